"""The configuration of a checkpoint enters; the method that quantized its weights leaves. Imports nothing heavy: a
checkpoint that cannot be read is refused at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from qsample.errors import UnsupportedModelError, shown

ADVICE: Final = (
    "export the unquantized checkpoint that it was made from, and compile that with weights='int4'"
)
# Methods of which transformers makes float32 if it is asked to, with the multiple of their space.
AS_FLOAT: Final = {"fp8": 4.0, "mxfp4": 7.5}
PACKED: Final = ("gptq", "awq", "compressed-tensors", "mlx", "bitsandbytes")
_MLX: Final = ("bits", "mode")


class Stated(NamedTuple):
    """method: one of `AS_FLOAT` and `PACKED`. options: what the configuration says of it."""

    method: str
    options: Mapping[str, Any]


def stated_quantization(config: Mapping[str, Any], name: str) -> Stated | None:
    """The quantization that `config`, as in config.json, states; None for float weights. name: of the model, for
    messages. Raises UnsupportedModelError for a method that cannot be read."""
    options = config.get("quantization_config")
    # mlx writes `quantization`, and a copy without a method; compressed-tensors wrote `compression_config` once.
    if isinstance(config.get("quantization"), Mapping) and not (
        isinstance(options, Mapping) and "quant_method" in options
    ):
        return Stated("mlx", config["quantization"])
    if options is None and (options := config.get("compression_config")) is None:
        return None
    if not isinstance(options, Mapping):
        raise UnsupportedModelError(
            f"{name}: quantization_config is {shown(options, 60)}; it must be an object with a quant_method"
        )
    stated = options.get("quant_method")
    method = str(getattr(stated, "value", stated)).lower()
    if stated is None:
        if any(key in options for key in _MLX):
            return Stated("mlx", options)
        if options.get("load_in_8bit") or options.get("load_in_4bit"):
            method = "bitsandbytes"
        elif "config_groups" in options or "quantization_config" in options:
            method = "compressed-tensors"
    if method not in (*PACKED, *AS_FLOAT):
        raise UnsupportedModelError(
            f"{name} is quantized with {method:.60}; only float weights, {', '.join(PACKED[:-1])} and {PACKED[-1]} can "
            f"be read (and {' and '.join(AS_FLOAT)}, which become float); {ADVICE}"
        )
    return Stated(method, options)
