"""The safetensors files of a checkpoint with packed weights, and its configuration, enter; matrices and the other
tensors leave. Neither the library that quantized the checkpoint nor a GPU is needed."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from transformers import PretrainedConfig

from qsample.checkpoints import bitsandbytes, compressed_tensors, gptq_awq, mlx
from qsample.checkpoints.integers import StoredMatrix
from qsample.checkpoints.mapped_weights import named_in_float32, open_weights, places
from qsample.checkpoints.methods import ADVICE, AS_FLOAT, stated_quantization
from qsample.checkpoints.small_floats import FloatMatrix
from qsample.errors import QsampleError, UnsupportedModelError, listed

_KEYS: Final = ("quantization_config", "compression_config", "quantization")  # of a configuration


class Format(Protocol):
    """How the weights of quantized layers are stored."""

    @property
    def mark(self) -> str:
        """The end of the name of a tensor that every quantized layer has, and no other layer."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The ends of the names of all tensors of such weights."""

    @property
    def unread(self) -> tuple[str, ...]:
        """The ends of the names of tensors that change no weight."""

    def matrix(self, layer: str, parts: Mapping[str, Tensor]) -> StoredMatrix | FloatMatrix:
        """The weight of a layer. Raises ValueError for a missing part, or parts that do not fit."""


class _Parts(dict[str, Tensor]):
    def __missing__(self, name: str) -> Tensor:
        raise ValueError(f"it has no {name}")


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Attributes:
    matrices: the quantized weights.
    others: the rest of the tensors, by name.
    biases: names of the quantized layers' biases, except zeros: some tools write these everywhere.
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
    """The format of the weights that `config` describes, whose quantization it loses; None for float weights, and if
    transformers makes them float: `config` then asks for that. Raises UnsupportedModelError for a format that cannot
    be read."""
    given = {key: getattr(config, key) for key in _KEYS if getattr(config, key, None) is not None}
    stated = stated_quantization({key: _plain(value) for key, value in given.items()}, model_id)
    if stated is None:
        return None
    method, options = stated
    if method in AS_FLOAT:
        if method == "fp8" and find_spec("accelerate") is None:
            raise UnsupportedModelError(
                f"{model_id} is quantized with {method}, which transformers turns into float with the help of "
                f"accelerate; `pip install accelerate`, or {ADVICE}"
            )
        warnings.warn(
            f"{model_id}: its {method} weights become float32, in memory and in {AS_FLOAT[method]:g} times their "
            "space; compile quantizes them with weights='int8'",
            stacklevel=2,
        )
        config.quantization_config = {**options, "dequantize": True}
        return None
    for key in given:
        delattr(config, key)  # transformers would ask for the library that made it
    match method:
        case "compressed-tensors":
            return compressed_tensors.read_options(options, model_id)
        case "mlx":
            if any("vision" in part or "audio" in part for part in config.sub_configs):
                raise UnsupportedModelError(
                    f"{model_id} is a {config.model_type} in mlx's layout, which lacks parts of the model or turns "
                    f"their axes; {ADVICE}"
                )
            return mlx.read_options(options, model_id)
        case "bitsandbytes":
            return bitsandbytes.Int8() if options.get("load_in_8bit") else bitsandbytes.Float4()
    return gptq_awq.read_options(method, options, model_id)


def _plain(options: Any) -> Any:
    return options.to_dict() if hasattr(options, "to_dict") else options


def read_packed(files: list[Path], packing: Format) -> PackedWeights:
    """The tensors of the safetensors `files`, mapped. Warns if weights become float. Raises QsampleError for parts of
    layers that are missing or do not fit, UnsupportedModelError for parts of no layer."""
    with ExitStack() as stack:
        opened = {file: stack.enter_context(open_weights(file)) for file in files}
        file_of = {name: file for file, tensors in opened.items() for name in tensors.keys()}  # noqa: SIM118
        tensor = {name: partial(opened[file].get_tensor, name) for name, file in file_of.items()}
        places_of = {name: place for file in files for name, place in places(file).items()}
        layers = sorted(
            name.removesuffix(f".{packing.mark}")
            for name in file_of
            if name.endswith(f".{packing.mark}")
        )
        names_of = {layer: {part: f"{layer}.{part}" for part in packing.parts} for layer in layers}
        _check_names(file_of, names_of, packing, files[0].parent)
        matrices = []
        for layer, names in names_of.items():
            parts = _Parts(
                {part: tensor.pop(name)() for part, name in names.items() if name in tensor}
            )
            try:
                matrices.append(packing.matrix(layer, parts))
            except ValueError as error:
                raise QsampleError(
                    f"the quantized layer {layer} cannot be read: {error}; download the checkpoint again, or {ADVICE}"
                ) from error
        unread = tuple(f".{end}" for end in packing.unread)
        others = {
            name: named_in_float32(name, read(), places_of[name])
            for name, read in tensor.items()
            if not name.endswith(unread)
        }
    floats = [matrix for matrix in matrices if isinstance(matrix, FloatMatrix)]
    if floats:
        count = sum(matrix.shape[0] * matrix.shape[1] for matrix in floats)
        warnings.warn(
            f"{len(floats)} of {len(matrices)} quantized matrices hold floats of 4 or 8 bits, for which there are no "
            f"kernels; they become float32, {count * 4 / 1e9:.3g} GB, and compile quantizes them with weights='int8'",
            stacklevel=2,
        )
    biases = frozenset(
        name
        for name in (f"{layer}.bias" for layer in layers)
        if name in others and others[name].any()
    )
    return PackedWeights(matrices, others, biases)


def _check_names(
    names: Collection[str], layers: Mapping[str, Mapping[str, str]], packing: Format, source: Path
) -> None:
    """Every part of quantized weights must be known: a scale that is never applied would go unnoticed."""
    if not layers:
        raise QsampleError(
            f"{source} says that it is quantized, and holds no {packing.mark}; download the checkpoint again"
        )
    if "weight" not in packing.parts and (
        twice := [layer for layer in layers if f"{layer}.weight" in names]
    ):
        raise QsampleError(
            f"{source} holds both a {packing.mark} and a weight for {listed(twice)}; download the checkpoint again"
        )
    known = {name for names in layers.values() for name in names.values()}
    ends = tuple(f".{part}" for part in packing.parts if part != "weight")
    if strays := [name for name in names if name.endswith(ends) and name not in known]:
        raise UnsupportedModelError(
            f"{source} scales more than the weights of its linear layers ({listed(strays)}), which cannot be "
            f"exported; {ADVICE}"
        )
