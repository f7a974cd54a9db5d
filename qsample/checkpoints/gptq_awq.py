"""The safetensors files of a checkpoint with GPTQ or AWQ weights enter; a `QuantizedCheckpoint` leaves."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PretrainedConfig

from qsample.checkpoints.block_store import block_bytes
from qsample.checkpoints.gptq_awq_layouts import ADVICE, BITS, WORD, Quantization, stored_matrix
from qsample.checkpoints.integers import StoredMatrix
from qsample.checkpoints.mapped_weights import in_float32, open_weights, places
from qsample.checkpoints.quantized import QuantizedCheckpoint, read_quantized
from qsample.checks import is_integer
from qsample.errors import QsampleError, UnsupportedModelError, listed

_STORED_PARTS: Final = ("qweight", "qzeros", "scales", "g_idx")
_DEQUANTIZED: Final = ("fp8", "mxfp4")  # transformers turns these into float if it is asked to


def quantization_of(config: PretrainedConfig, model_id: str) -> Quantization | None:
    """The quantization that `config` states; None for float weights, and if transformers undoes it: `config` then asks
    for that. Raises UnsupportedModelError for a method, format or number of bits that cannot be read."""
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
            f"{model_id} is quantized with {method}; only float weights, gptq and awq can be read (and "
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
        raise UnsupportedModelError(f"{model_id}: the quantization's sym is {symmetric!r}; it must be true or false")
    return Quantization(method, bits, group_size, symmetric, version, mixed=bool(options.get("dynamic")))


def _integer(options: Mapping[str, Any], names: tuple[str, ...], default: int, model_id: str) -> int:
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


def read_checkpoint(
    files: list[Path],
    scratch: Path,
    quantization: Quantization,
    *,
    dtype: torch.dtype,
    shapes: Mapping[str, torch.Size],
    transposed: Collection[str],
) -> QuantizedCheckpoint:
    """Read the safetensors `files` of a checkpoint with quantized weights, one layer at a time in memory.

    Args:
        scratch: a folder that lives as long as the result; the blocks are written into a new folder inside it.
        dtype: of weights and scales.
        shapes, transposed: of the model that the checkpoint will be loaded into, as in `checkpoint.Outline`.

    Raises QsampleError if a layer is incomplete, or its tensors do not fit one another or the model.
    """
    weights: dict[str, Tensor] = {}
    biases: set[str] = set()
    with ExitStack() as stack:
        opened = {file: stack.enter_context(open_weights(file)) for file in files}
        file_of = {name: file for file, tensors in opened.items() for name in tensors.keys()}  # noqa: SIM118
        places_of = {name: place for file in files for name, place in places(file).items()}
        quantized = {name.removesuffix(".qweight") for name in file_of if name.endswith(".qweight")}
        _check_names(file_of, quantized, files[0].parent)

        def stored() -> Iterator[StoredMatrix]:
            for layer in sorted(quantized):
                names = {part: f"{layer}.{part}" for part in _STORED_PARTS if f"{layer}.{part}" in file_of}
                yield stored_matrix(
                    layer, {part: opened[file_of[name]].get_tensor(name) for part, name in names.items()}, quantization
                )

        for name, file in file_of.items():
            layer, _, part = name.rpartition(".")
            if layer in quantized and part in _STORED_PARTS:
                continue
            tensor = opened[file].get_tensor(name)
            if layer in quantized and part == "bias" and tensor.any():
                biases.add(name)
            weights[name] = in_float32(tensor, places_of[name])
        return read_quantized(
            weights, stored(), scratch, dtype=dtype, shapes=shapes, transposed=transposed, biases=biases
        )


def bytes_in_blocks(files: list[Path], quantization: Quantization, dtype: torch.dtype) -> int:
    """About how many bytes `read_checkpoint` writes for the quantized layers in `files`, by their shapes."""
    total = 0
    for file in files:
        with open_weights(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                if name.endswith(".qweight"):
                    shape = tensors.get_slice(name).get_shape()
                    total += _layer_bytes(math.prod(shape), shape[0] if shape else 0, quantization, dtype)
    return total


def _layer_bytes(words: int, rows: int, quantization: Quantization, dtype: torch.dtype) -> int:
    """words: of 32 bits, in each of `rows`."""
    levels = words * WORD // quantization.bits
    inputs = rows if quantization.method == "awq" else rows * WORD // quantization.bits
    group = inputs if quantization.group_size == -1 else quantization.group_size
    return block_bytes(levels // max(1, inputs), inputs, quantization.bits, group, dtype)


def _check_names(names: Collection[str], layers: set[str], source: Path) -> None:
    """Every part of quantized weights must be known: a scale that is never applied would go unnoticed."""
    incomplete = sorted(layer for layer in layers if f"{layer}.scales" not in names)
    known = {f"{layer}.{part}" for layer in layers for part in _STORED_PARTS}
    strays = sorted(name for name in names if name.rpartition(".")[2] in _STORED_PARTS and name not in known)
    if not layers:
        raise QsampleError(f"{source} says that it is quantized, and holds no qweight; download the checkpoint again")
    if twice := sorted(layer for layer in layers if f"{layer}.weight" in names):
        raise QsampleError(
            f"{source} holds both a qweight and a weight for {listed(twice)}; download the checkpoint again"
        )
    if incomplete:
        raise QsampleError(f"{source} holds no scales for {listed(incomplete)}; download the checkpoint again")
    if strays:
        raise UnsupportedModelError(
            f"{source} scales more than the weights of its linear layers ({listed(strays)}), which cannot be "
            f"exported; {ADVICE}"
        )
