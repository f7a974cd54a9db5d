"""Which method a config.json says that its weights were quantized with."""

from __future__ import annotations

from typing import Any

import pytest

from qsample.checkpoints.methods import stated_quantization


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"quantization": {"bits": 4}}, "mlx"),
        ({"quantization": {"bits": 4}, "quantization_config": {"bits": 4}}, "mlx"),
        ({"quantization_config": {"group_size": 64, "bits": 4}}, "mlx"),
        ({"quantization": {"bits": 4}, "quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"compression_config": {"config_groups": {}}}, "compressed-tensors"),
        ({"quantization_config": {"load_in_8bit": True}}, "bitsandbytes"),
        ({"quantization_config": {"quant_method": "FP8"}}, "fp8"),
        ({}, None),
    ],
)
def test_the_method(config: dict[str, Any], method: str | None) -> None:
    stated = stated_quantization(config, "some/model")
    assert (stated and stated.method) == method
