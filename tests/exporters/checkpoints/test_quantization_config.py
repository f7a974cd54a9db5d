"""What a configuration says of quantized weights, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from qsample.errors import UnsupportedModelError
from qsample.exporters.checkpoints.quantization_config import CheckpointQuantization, quantization_of


def config(**options: Any) -> Any:
    return AutoConfig.for_model("llama", quantization_config=options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "quantized with bitsandbytes; what can be read is float",
        ),
        (
            {"quant_method": "compressed-tensors"},
            "quantized with compressed-tensors; .* compile that with weights='int4'",
        ),
        ({"quant_method": "gptq", "bits": 5}, r"with gptq in a form .*'bits': 5.*; what can is gptq or gptq_v2"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'checkpoint_format': 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "'is_marlin_format': True"),
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"}, "'pack_dtype': 'int16'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'version': 'gemv'.* what can is gemm, with 4 bits"),
        ({"quant_method": "awq", "bits": 8, "version": "gemm"}, "'bits': 8"),
    ],
)
def test_what_cannot_be_read_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"some/model is {message}|some/model is quantized .*{message}"):
        quantization_of(config(**options), "some/model")


@pytest.mark.parametrize(
    ("options", "read"),
    [
        (
            {"quant_method": "gptq", "bits": 3, "group_size": 64, "sym": False, "checkpoint_format": "gptq_v2"},
            CheckpointQuantization("gptq", 3, 64, symmetric=False, version=2),
        ),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": -1}, CheckpointQuantization("awq", 4, -1)),
    ],
)
def test_what_is_read(options: dict[str, Any], read: CheckpointQuantization) -> None:
    assert quantization_of(config(**options), "some/model") == read


def test_a_model_without_quantization() -> None:
    assert quantization_of(AutoConfig.for_model("llama"), "some/model") is None
