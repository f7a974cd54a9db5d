"""The safetensors files of a checkpoint with packed weights, and its configuration, enter; matrices
and the other tensors leave. Neither the library that quantized the checkpoint nor a GPU is
needed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from qsample.checkpoints.mapped_weights import (
    Place,
    check_held_once,
    named_in_float32,
    open_weights,
    places,
)
from qsample.checkpoints.methods import (
    ADVICE,
    AS_FLOAT,
    CONFIG_KEYS,
    Format,
    QuantizationMethod,
    stated_quantization,
)
from qsample.checkpoints.stored_matrices import FloatMatrix, StoredMatrix
from qsample.errors import QsampleError, UnsupportedModelError, listed
from qsample.extensions import CHECKPOINTS, load_extension


class _LayerParts(dict[str, Tensor]):
    """The tensors of a layer by the ends of their names; a missing part raises the error of
    `Format.matrix`."""

    def __missing__(self, name: str) -> Tensor:
        raise ValueError(f"it has no {name}")


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """The weights of a checkpoint whose linear layers are packed.

    Attributes:
        matrices: the quantized weights.
        others: the other tensors, by name.
        biases: the names of the quantized layers' biases, except zeros, which some tools write
            everywhere.
    """

    matrices: list[StoredMatrix | FloatMatrix]
    others: dict[str, Tensor]
    biases: frozenset[str]

    def bytes_in_blocks(self, dtype: torch.dtype) -> int:
        """About how many bytes `read_quantized` writes."""
        return sum(
            matrix.bytes_in_blocks(dtype)
            for matrix in self.matrices
            if isinstance(matrix, StoredMatrix)
        )


def packing_of(config: PretrainedConfig, model_id: str) -> Format | None:
    """The format of the packed weights that a configuration describes.

    Args:
        config: the configuration. It loses its quantization if the weights are packed, and asks for
            float weights if transformers makes them.
        model_id: the model's name, for messages.

    Returns:
        None for float weights, and for weights that transformers turns into float.

    Raises:
        UnsupportedModelError: for a format that cannot be read.
    """
    keys = [key for key in CONFIG_KEYS if getattr(config, key, None) is not None]
    values = {key: _as_mapping(getattr(config, key)) for key in keys}
    stated = stated_quantization(values, model_id)
    if stated is None:
        return None
    if stated.method in AS_FLOAT:
        _check_float(stated.method, model_id)
        config.quantization_config = {**stated.options, "dequantize": True}
        return None
    for key in keys:
        delattr(config, key)  # transformers would ask for the library that quantized the weights
    method: QuantizationMethod = load_extension(CHECKPOINTS, stated.method)
    return method.format_of(stated.options, config, model_id)


def _as_mapping(options: Any) -> Any:
    """The options of a quantization as in config.json; transformers turns some of them into an
    object."""
    return options.to_dict() if hasattr(options, "to_dict") else options


def _check_float(method: str, model_id: str) -> None:
    """Warn of weights that transformers turns into float, with the memory that they need. Raises
    UnsupportedModelError if transformers lacks a library for it."""
    if method == "fp8" and find_spec("accelerate") is None:
        raise UnsupportedModelError(
            f"{model_id} is quantized with {method}, which transformers turns into float with the help of "
            f"accelerate; `pip install accelerate`, or {ADVICE}"
        )
    warnings.warn(
        f"{model_id}: its {method} weights become float32, in memory and in {AS_FLOAT[method]:g} times their "
        "space; compile quantizes them with weights='int8'",
        stacklevel=3,
    )


def read_packed(files: list[Path], packing: Format) -> PackedWeights:
    """The tensors of safetensors files, mapped. Warns if quantized weights become float.

    Args:
        files: the files of the checkpoint, at least one.
        packing: how the weights of quantized layers are stored.

    Raises:
        QsampleError: for parts of layers that are missing or do not fit.
        UnsupportedModelError: for parts that belong to no layer.
    """
    with ExitStack() as stack:
        tensors: dict[str, Callable[[], Tensor]] = {}
        places_by_name: dict[str, Place] = {}
        for file in files:
            opened = stack.enter_context(open_weights(file))
            tensors |= {name: partial(opened.get_tensor, name) for name in opened.keys()}  # noqa: SIM118
            places_of_file = places(file)
            check_held_once(places_by_name.keys() & places_of_file.keys(), file)
            places_by_name |= places_of_file
        end_of_mark = f".{packing.mark}"
        layers = sorted(
            name.removesuffix(end_of_mark) for name in tensors if name.endswith(end_of_mark)
        )
        _check_names(tensors.keys(), layers, packing, files[0].parent)
        matrices = [_take_matrix(tensors, layer, packing) for layer in layers]
        unread = tuple(f".{end}" for end in packing.unread)
        others = {
            name: named_in_float32(name, read(), places_by_name[name])
            for name, read in tensors.items()
            if not name.endswith(unread)
        }
    _warn_of_floats(matrices)
    biases = [f"{layer}.bias" for layer in layers]
    used_biases = frozenset(name for name in biases if name in others and others[name].any())
    return PackedWeights(matrices, others, used_biases)


def _take_matrix(
    tensors: dict[str, Callable[[], Tensor]], layer: str, packing: Format
) -> StoredMatrix | FloatMatrix:
    """The weight of a layer, whose parts are removed from `tensors`."""
    parts = _LayerParts()
    for part in packing.parts:
        read = tensors.pop(f"{layer}.{part}", None)
        if read is not None:
            parts[part] = read()
    try:
        return packing.matrix(layer, parts)
    except ValueError as error:
        raise QsampleError(
            f"the quantized layer {layer} cannot be read: {error}; download the checkpoint again, or {ADVICE}"
        ) from error


def _warn_of_floats(matrices: list[StoredMatrix | FloatMatrix]) -> None:
    floats = [matrix for matrix in matrices if isinstance(matrix, FloatMatrix)]
    if not floats:
        return
    count = sum(matrix.shape[0] * matrix.shape[1] for matrix in floats)
    warnings.warn(
        f"{len(floats)} of {len(matrices)} quantized matrices hold floats of 4 or 8 bits, for which there are no "
        f"kernels; they become float32, {count * 4 / 1e9:.3g} GB, and compile quantizes them with weights='int8'",
        stacklevel=3,
    )


def _check_names(
    names: Collection[str], layers: Collection[str], packing: Format, folder: Path
) -> None:
    """Raise an error unless every part of quantized weights is known: a scale that is never applied
    would go unnoticed."""
    if not layers:
        raise QsampleError(
            f"{folder} says that it is quantized, and holds no {packing.mark}; download the checkpoint again"
        )
    if "weight" not in packing.parts:
        stored_twice = [layer for layer in layers if f"{layer}.weight" in names]
        if stored_twice:
            raise QsampleError(
                f"{folder} holds both a {packing.mark} and a weight for {listed(stored_twice)}; download the "
                "checkpoint again"
            )
    known = {f"{layer}.{part}" for layer in layers for part in packing.parts}
    ends = tuple(f".{part}" for part in packing.parts if part != "weight")
    strays = [name for name in names if name.endswith(ends) and name not in known]
    if strays:
        raise UnsupportedModelError(
            f"{folder} scales more than the weights of its linear layers ({listed(strays)}), which cannot be "
            f"exported; {ADVICE}"
        )
