"""The configuration of a checkpoint with GPTQ or AWQ weights enters; how its weights are stored
leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from qsample.addons.formats.gptq_awq_layouts import BITS, Quantization
from qsample.checkpoints.methods import ADVICE
from qsample.checks import is_integer
from qsample.errors import UnsupportedModelError

_READABLE_FORMATS: Final = {
    "gptq": "gptq or gptq_v2, in int32, with 2, 3, 4 or 8 bits",
    "awq": "gemm, with 4 bits",
}
# The options that decide whether a format can be read, for messages.
_FORMAT_OPTIONS: Final = (
    "checkpoint_format",
    "format",
    "version",
    "backend",
    "is_marlin_format",
    "pack_dtype",
    "bits",
)


def read_options(
    method: Literal["gptq", "awq"], options: Mapping[str, Any], model_id: str
) -> Quantization:
    """How the weights are stored.

    Args:
        method: "gptq" or "awq".
        options: the quantization_config.
        model_id: the model's name, for messages.

    Raises:
        UnsupportedModelError: for a format or a number of bits that cannot be read.
    """
    version = _gptq_version(options) if method == "gptq" else _awq_version(options)
    bits = _integer(options, ("bits", "w_bit"), 4, model_id)
    if version is None or bits not in BITS[method] or options.get("pack_dtype", "int32") != "int32":
        given = {name: options[name] for name in _FORMAT_OPTIONS if options.get(name) is not None}
        raise UnsupportedModelError(
            f"{model_id} is quantized with {method} in a form that cannot be read ({given}); accepted is "
            f"{_READABLE_FORMATS[method]}; {ADVICE}"
        )
    group_size = _integer(options, ("group_size", "q_group_size"), 128, model_id)
    if group_size != -1 and group_size < 1:
        raise UnsupportedModelError(
            f"{model_id}: the quantization's group_size is {group_size}; it must be 1 or more, or -1 for one group of "
            f"all inputs; {ADVICE}"
        )
    symmetric = options.get("sym", True)
    if not isinstance(symmetric, bool):
        raise UnsupportedModelError(
            f"{model_id}: the quantization's sym is {symmetric!r}; it must be true or false"
        )
    mixed = bool(options.get("dynamic"))
    return Quantization(method, bits, group_size, symmetric, version, mixed)


def _integer(
    options: Mapping[str, Any], names: tuple[str, ...], default: int, model_id: str
) -> int:
    """The option under the first of its `names` that is given. Raises UnsupportedModelError unless
    it is an integer."""
    name = next((name for name in names if name in options), names[0])
    value = options.get(name, default)
    if not is_integer(value):
        raise UnsupportedModelError(
            f"{model_id}: the quantization's {name} is {value!r}; it must be an integer; {ADVICE}"
        )
    return value


def _awq_version(options: Mapping[str, Any]) -> int | None:
    """1 for the layout "gemm"; None for a layout that cannot be read."""
    layout = str(options.get("version") or options.get("format") or "gemm").lower()
    return 1 if layout == "gemm" and options.get("backend") != "llm-awq" else None


def _gptq_version(options: Mapping[str, Any]) -> int | None:
    """The version of the format; None for a format that cannot be read."""
    if options.get("is_marlin_format"):
        return None
    layout = str(options.get("checkpoint_format") or options.get("format") or "gptq").lower()
    return {"gptq": 1, "gptq_v2": 2}.get(layout)
