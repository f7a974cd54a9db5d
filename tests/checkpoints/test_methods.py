"""Which method a config.json says that its weights were quantized with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from qsample.checkpoints import methods
from qsample.checkpoints.methods import AS_FLOAT, CONFIG_KEYS, stated_quantization
from qsample.errors import UnsupportedModelError


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


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quantization_config": {"quant_method": "hqq"}},
         "some/model is quantized with hqq; only float weights.* can be read .and fp8 and mxfp4, which become float"),
        ({"quantization_config": {"quant_method": "x" * 100}}, "quantized with x{60};"),
        ({"quantization_config": {}}, "is quantized with none"),
        ({"quantization_config": {"quant_method": None}}, "is quantized with none"),
        ({"quantization_config": "gptq"}, "quantization_config is 'gptq'; it must be an object with a quant_method"),
        ({"quantization_config": False}, "quantization_config is False; it must be an object"),
        ({"compression_config": []}, r"quantization_config is \[\]; it must be an object"),
    ],
)  # fmt: skip
def test_methods_that_cannot_be_read(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        stated_quantization(config, "some/model")


def test_the_options_are_those_of_the_method() -> None:
    gptq, mlx = {"quant_method": SimpleNamespace(value="GPTQ"), "bits": 4}, {"bits": 8}
    found = stated_quantization({"quantization_config": gptq, "quantization": mlx}, "some/model")
    assert found is not None
    assert (found.method, found.options) == ("gptq", gptq)
    for config in ({"quantization": mlx}, {"quantization": mlx, "quantization_config": None}):
        found = stated_quantization(config, "some/model")
        assert found is not None
        assert (found.method, found.options) == ("mlx", mlx)
    assert stated_quantization(dict.fromkeys(CONFIG_KEYS), "some/model") is None
    assert AS_FLOAT == {"fp8": 32 / 8, "mxfp4": 7.5}


def test_readable_methods_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "extension_names", lambda group: ["awq", "gptq"])
    with pytest.raises(UnsupportedModelError, match="only float weights, awq and gptq can be read"):
        stated_quantization({"quantization_config": {"quant_method": "hqq"}}, "some/model")
