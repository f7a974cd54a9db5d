"""Methods of quantization: whose options a config.json has, and which reader they lead to."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from transformers import CLIPConfig, LlamaConfig

from qsample.addons.formats import compressed_tensors, gptq_awq, mlx
from qsample.addons.formats.bitsandbytes import Float4, Int8
from qsample.addons.formats.methods import AWQ, BITSANDBYTES, COMPRESSED_TENSORS, GPTQ, MLX
from qsample.errors import UnsupportedModelError

QUANTIZATION = "quantization_config"
GROUPS = {"config_groups": {}}
NESTED = {QUANTIZATION: {"format": "dense"}}
METHODS = {
    "gptq": GPTQ,
    "awq": AWQ,
    "compressed-tensors": COMPRESSED_TENSORS,
    "mlx": MLX,
    "bitsandbytes": BITSANDBYTES,
}


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({QUANTIZATION: GROUPS}, {"compressed-tensors": GROUPS}),
        ({"compression_config": GROUPS}, {"compressed-tensors": GROUPS}),
        ({"compression_config": NESTED}, {"compressed-tensors": NESTED}),
        ({QUANTIZATION: NESTED, "compression_config": {}}, {"compressed-tensors": NESTED}),
        ({"quantization": {"group_size": 64}}, {"mlx": {"group_size": 64}}),
        (
            {"quantization": {"bits": 4}, QUANTIZATION: {"bits": 8}},
            {"mlx": {"bits": 4}},
        ),
        ({QUANTIZATION: {"bits": 8}}, {"mlx": {"bits": 8}}),
        ({QUANTIZATION: {"mode": "mxfp4"}}, {"mlx": {"mode": "mxfp4"}}),
        ({"quantization": "q4", QUANTIZATION: {"bits": 8}}, {"mlx": {"bits": 8}}),
        ({QUANTIZATION: {"load_in_8bit": True}}, {"bitsandbytes": {"load_in_8bit": True}}),
        ({QUANTIZATION: {"load_in_4bit": True}}, {"bitsandbytes": {"load_in_4bit": True}}),
        ({QUANTIZATION: {"load_in_8bit": False, "load_in_4bit": False}}, {}),
        ({QUANTIZATION: {"group_size": 128}}, {}),
        ({QUANTIZATION: "int8"}, {}),
        ({QUANTIZATION: None, "compression_config": None}, {}),
        ({"bits": 4, "config_groups": {}, "load_in_8bit": True}, {}),
        ({}, {}),
    ],
)
def test_options_without_a_name(config: dict[str, Any], found: dict[str, Any]) -> None:
    options = {name: method.options_in(config) for name, method in METHODS.items()}
    assert {name: given for name, given in options.items() if given is not None} == found


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"load_in_8bit": True}, Int8),
        ({"load_in_8bit": True, "load_in_4bit": False}, Int8),
        ({"load_in_4bit": True}, Float4),
        ({"load_in_8bit": False, "load_in_4bit": True}, Float4),
    ],
)
def test_bitsandbytes_has_two_formats(options: dict[str, Any], kind: type) -> None:
    assert isinstance(BITSANDBYTES.format_of(options, LlamaConfig(), "me/m"), kind)


@pytest.mark.parametrize(
    ("method", "module", "name"),
    [(GPTQ, gptq_awq, "gptq"), (AWQ, gptq_awq, "awq"), (COMPRESSED_TENSORS, compressed_tensors, None),
     (MLX, mlx, None)],
)  # fmt: skip
def test_each_method_has_a_reader_of_its_options(
    method: Any, module: Any, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, "read_options", lambda *given: calls.append(given) or "format")
    options = {"bits": 4}
    assert method.format_of(options, LlamaConfig(), "me/m") == "format"
    assert calls == [((name,) if name else ()) + (options, "me/m")]


def test_a_model_of_several_parts_in_the_layout_of_mlx_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"me/m is a clip in mlx's layout"):
        MLX.format_of({"bits": 4}, CLIPConfig(), "me/m")

    class Hearing(LlamaConfig):
        sub_configs: ClassVar = {"audio_config": LlamaConfig, "text_config": LlamaConfig}

    with pytest.raises(UnsupportedModelError, match="mlx's layout"):
        MLX.format_of({"bits": 4}, Hearing(), "me/m")

    class Text(LlamaConfig):
        sub_configs: ClassVar = {"text_config": LlamaConfig}

    assert MLX.format_of({"bits": 4}, Text(), "me/m").mark == "scales"
