"""The configuration of a checkpoint with GPTQ or AWQ weights enters; how its weights are stored leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qsample.checkpoints.gptq_awq_layouts import BITS, Quantization
from qsample.checkpoints.methods import ADVICE
from qsample.checks import is_integer
from qsample.errors import UnsupportedModelError


def read_options(method: str, options: Mapping[str, Any], model_id: str) -> Quantization:
    """Raises UnsupportedModelError for a format or number of bits that cannot be read. method: "gptq" or "awq"."""
    version = _format_version(options, method)
    bits = _integer(options, ("bits", "w_bit"), 4, model_id)
    if version is None or bits not in BITS[method] or options.get("pack_dtype", "int32") != "int32":
        known = (
            "gptq or gptq_v2, in int32, with 2, 3, 4 or 8 bits"
            if method == "gptq"
            else "gemm, with 4 bits"
        )
        given = {
            name: options[name]
            for name in (
                "checkpoint_format",
                "format",
                "version",
                "backend",
                "is_marlin_format",
                "pack_dtype",
                "bits",
            )
            if options.get(name) is not None
        }
        raise UnsupportedModelError(
            f"{model_id} is quantized with {method} in a form that cannot be read ({given}); accepted is {known}; "
            f"{ADVICE}"
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
    return Quantization(
        method, bits, group_size, symmetric, version, mixed=bool(options.get("dynamic"))
    )


def _integer(
    options: Mapping[str, Any], names: tuple[str, ...], default: int, model_id: str
) -> int:
    """The first of `names` that `options` hold; UnsupportedModelError if it is not an integer."""
    name = next((name for name in names if name in options), names[0])
    value = options.get(name, default)
    if not is_integer(value):
        raise UnsupportedModelError(
            f"{model_id}: the quantization's {name} is {value!r}; it must be an integer; {ADVICE}"
        )
    return value


def _format_version(options: Mapping[str, Any], method: str) -> int | None:
    """The version of the format; None for a format that cannot be read."""
    if method == "awq":
        layout = str(options.get("version") or options.get("format") or "gemm").lower()
        return 1 if layout == "gemm" and options.get("backend") != "llm-awq" else None
    layout = str(options.get("checkpoint_format") or options.get("format") or "gptq").lower()
    return {"gptq": 1, "gptq_v2": 2}.get(layout) if not options.get("is_marlin_format") else None
