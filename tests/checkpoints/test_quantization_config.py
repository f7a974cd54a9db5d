"""What a configuration says of quantized weights, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

from qsample.checkpoints.quantization_config import CheckpointQuantization, quantization_of
from qsample.errors import UnsupportedModelError


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


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 0}, "group_size is 0; it must be 1 or more, or -1"),
        ({"group_size": -2}, "group_size is -2; it must be 1 or more, or -1"),
        ({"group_size": True}, "group_size is True; it must be an integer"),
        ({"group_size": "128"}, "group_size is '128'; it must be an integer"),
        ({"group_size": 64.0}, "group_size is 64.0; it must be an integer"),
        ({"group_size": None}, "group_size is None; it must be an integer"),
        ({"group_size": [128]}, r"group_size is \[128\]; it must be an integer"),
        ({"q_group_size": 0}, "group_size is 0"),
        ({"bits": "4"}, "bits is '4'; it must be an integer"),
        ({"bits": True}, "bits is True; it must be an integer"),
        ({"bits": None}, "bits is None; it must be an integer"),
        ({"sym": "false"}, "sym is 'false'; it must be true or false"),
    ],
)
def test_values_of_another_kind(method: str, options: dict[str, Any], message: str) -> None:
    stated = {"quant_method": method} | ({} if "bits" in options else {"bits": 4}) | options
    with pytest.raises(UnsupportedModelError, match=rf"some/model: the quantization's {message}"):
        quantization_of(SimpleNamespace(quantization_config=stated), "some/model")  # type: ignore[arg-type]


@pytest.mark.parametrize("stated", ["gptq", ["gptq"], 4])
def test_a_configuration_that_is_no_object(stated: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="must be an object with a quant_method"):
        quantization_of(SimpleNamespace(quantization_config=stated), "some/model")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "read"),
    [
        (
            {"quant_method": "gptq", "bits": 3, "group_size": 64, "sym": False, "checkpoint_format": "gptq_v2"},
            CheckpointQuantization("gptq", 3, 64, symmetric=False, version=2),
        ),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": -1}, CheckpointQuantization("awq", 4, -1)),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down.*": {"bits": 8, "group_size": 32}}},
            CheckpointQuantization("gptq", 4, 128, mixed=True),
        ),
    ],
)
def test_what_is_read(options: dict[str, Any], read: CheckpointQuantization) -> None:
    assert quantization_of(config(**options), "some/model") == read


def test_a_model_without_quantization() -> None:
    assert quantization_of(AutoConfig.for_model("llama"), "some/model") is None
