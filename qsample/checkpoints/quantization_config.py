"""What a checkpoint's configuration says of quantized weights, and which of it can be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

from transformers import PretrainedConfig

from qsample.errors import UnsupportedModelError
from qsample.values import is_integer

ADVICE: Final = "export the unquantized checkpoint that it was made from, and compile that with weights='int4'"
BITS: Final = {"gptq": (2, 3, 4, 8), "awq": (4,)}
_DEQUANTIZED: Final = ("fp8", "mxfp4")  # transformers turns these into float if it is asked to


@dataclass(frozen=True, slots=True)
class CheckpointQuantization:
    """How the weights of a checkpoint are stored. method: "gptq" or "awq". bits: 2, 3, 4 or 8, unless a layer's own
    tensors say otherwise. group_size: inputs that share a scale, 1 or more; -1 = all of them. version: of GPTQ's
    format. mixed: layers may have a group size of their own, which their g_idx tells."""

    method: str
    bits: int
    group_size: int
    symmetric: bool = True
    version: int = 1
    mixed: bool = False


def quantization_of(config: PretrainedConfig, model_id: str) -> CheckpointQuantization | None:
    """The quantization that `config` states; None = none, or one that transformers undoes: `config` then asks for that.

    Raises UnsupportedModelError for a method, a format or a number of bits that cannot be read.
    """
    stated = getattr(config, "quantization_config", None)
    if stated is None:
        return None
    if not isinstance(stated, dict) and not hasattr(stated, "to_dict"):
        raise UnsupportedModelError(
            f"{model_id}: quantization_config is {stated!r}; it must be an object with a quant_method"
        )
    options: Mapping[str, Any] = stated if isinstance(stated, dict) else stated.to_dict()
    method = str(getattr(options.get("quant_method"), "value", options.get("quant_method"))).lower()
    if method in _DEQUANTIZED:
        if method == "fp8" and find_spec("accelerate") is None:
            raise UnsupportedModelError(
                f"{model_id} is quantized with {method}, which transformers turns into float with the help of "
                f"accelerate; `pip install accelerate`, or {ADVICE}"
            )
        config.quantization_config = {**options, "dequantize": True}
        return None
    if method not in BITS:
        raise UnsupportedModelError(
            f"{model_id} is quantized with {method}; what can be read is float weights, gptq and awq (and "
            f"{' and '.join(_DEQUANTIZED)}, which become float); {ADVICE}"
        )
    version = _format_version(options, method)
    bits = _integer(options, ("bits", "w_bit"), 4, model_id)
    if version is None or bits not in BITS[method] or options.get("pack_dtype", "int32") != "int32":
        known = "gptq or gptq_v2, in int32, with 2, 3, 4 or 8 bits" if method == "gptq" else "gemm, with 4 bits"
        given = {
            name: options[name]
            for name in ("checkpoint_format", "format", "version", "backend", "is_marlin_format", "pack_dtype", "bits")
            if options.get(name) is not None
        }
        raise UnsupportedModelError(
            f"{model_id} is quantized with {method} in a form that cannot be read ({given}); what can is {known}; "
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
        raise UnsupportedModelError(f"{model_id}: the quantization's sym is {symmetric!r}; it must be true or false")
    return CheckpointQuantization(method, bits, group_size, symmetric, version, mixed=bool(options.get("dynamic")))


def _integer(options: Mapping[str, Any], names: tuple[str, ...], default: int, model_id: str) -> int:
    """The first of `names` that `options` hold; UnsupportedModelError where it is no integer."""
    name = next((name for name in names if name in options), names[0])
    value = options.get(name, default)
    if not is_integer(value):
        raise UnsupportedModelError(
            f"{model_id}: the quantization's {name} is {value!r}; it must be an integer; {ADVICE}"
        )
    return value


def _format_version(options: Mapping[str, Any], method: str) -> int | None:
    """The version of the format that `options` state; None for a format that cannot be read."""
    if method == "awq":
        layout = str(options.get("version") or options.get("format") or "gemm").lower()
        return 1 if layout == "gemm" and options.get("backend") != "llm-awq" else None
    layout = str(options.get("checkpoint_format") or options.get("format") or "gptq").lower()
    return {"gptq": 1, "gptq_v2": 2}.get(layout) if not options.get("is_marlin_format") else None
