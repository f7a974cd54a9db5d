"""The methods of quantization that the entry points of `qsample.checkpoints` name.

Nothing heavy is imported here: the module that reads a method's weights is imported by `format_of`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

from qsample.checkpoints.methods import ADVICE, Format, QuantizationMethod
from qsample.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class GptqOrAwq(QuantizationMethod):
    """GPTQ and AWQ, which always write their name."""

    def __init__(self, name: Literal["gptq", "awq"]) -> None:
        self.name = name

    def format_of(
        self, options: Mapping[str, Any], config: PretrainedConfig, model_id: str
    ) -> Format:
        from qsample.addons.formats.gptq_awq import read_options

        return read_options(self.name, options, model_id)


class CompressedTensorsMethod(QuantizationMethod):
    """compressed-tensors, whose early releases wrote no name, and nested their options in a second
    object."""

    def options_in(self, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
        options = _quantization_config(config)
        is_ours = "config_groups" in options or "quantization_config" in options
        return options if is_ours else None

    def format_of(
        self, options: Mapping[str, Any], config: PretrainedConfig, model_id: str
    ) -> Format:
        from qsample.addons.formats.compressed_tensors import read_options

        return read_options(options, model_id)


class MlxMethod(QuantizationMethod):
    """MLX, which writes `quantization`, and a copy of it as `quantization_config`, both without a
    name."""

    def options_in(self, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
        quantization = config.get("quantization")
        if isinstance(quantization, Mapping):
            return quantization
        options = _quantization_config(config)
        is_ours = "bits" in options or "mode" in options
        return options if is_ours else None

    def format_of(
        self, options: Mapping[str, Any], config: PretrainedConfig, model_id: str
    ) -> Format:
        from qsample.addons.formats.mlx import read_options

        if any("vision" in part or "audio" in part for part in config.sub_configs):
            raise UnsupportedModelError(
                f"{model_id} is a {config.model_type} in mlx's layout, which lacks parts of the model or turns "
                f"their axes; {ADVICE}"
            )
        return read_options(options, model_id)


class BitsAndBytesMethod(QuantizationMethod):
    """bitsandbytes, whose early releases wrote no name."""

    def options_in(self, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
        options = _quantization_config(config)
        is_ours = options.get("load_in_8bit") or options.get("load_in_4bit")
        return options if is_ours else None

    def format_of(
        self, options: Mapping[str, Any], config: PretrainedConfig, model_id: str
    ) -> Format:
        from qsample.addons.formats.bitsandbytes import Float4, Int8

        return Int8() if options.get("load_in_8bit") else Float4()


def _quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options under transformers' key, or under the key of early releases of
    compressed-tensors; {} if neither is an object."""
    options = config.get("quantization_config")
    if options is None:
        options = config.get("compression_config")
    return options if isinstance(options, Mapping) else {}


GPTQ: Final = GptqOrAwq("gptq")
AWQ: Final = GptqOrAwq("awq")
COMPRESSED_TENSORS: Final = CompressedTensorsMethod()
MLX: Final = MlxMethod()
BITSANDBYTES: Final = BitsAndBytesMethod()
