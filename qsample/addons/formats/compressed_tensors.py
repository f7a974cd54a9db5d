"""compressed-tensors, the format of vLLM's llm-compressor: the stored tensors of a layer enter, its
weight leaves.

A layer's tensors tell how it is stored, so targets and `ignore` are not matched; the configuration
has to agree. The library defines the layouts: https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor

from qsample.addons.formats.small_floats import as_float32, e2m1_matrix, scaled_matrix
from qsample.checkpoints.methods import ADVICE
from qsample.checkpoints.stored_matrices import (
    Bytes,
    FloatMatrix,
    Indices,
    IntegerWeight,
    StoredMatrix,
    check_part,
    unpack_bits,
)
from qsample.checks import is_integer
from qsample.errors import UnsupportedModelError, listed, shown

_INTEGER_FORMATS: Final = (
    "pack-quantized",
    "int-quantized",
    "naive-quantized",
    "float-quantized",
)
_FLOAT_FORMATS: Final = ("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized")
_MIXED_FORMAT: Final = "mixed-precision"
_SCALE_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)
_E4M3: Final = torch.float8_e4m3fn
_WORD_BITS: Final = 32


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a group of layers is stored.

    Attributes:
        kind: "int" or "float".
        bits: the bits of a level, 2 to 8; 4 or 8 for floats.
        block: the rows and the inputs that share a scale; None for all of them.
        symmetric: whether there are no zero points.
    """

    kind: str
    bits: int
    block: tuple[int | None, int | None]
    symmetric: bool


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """The layout of compressed-tensors.

    Attributes:
        schemes: the schemes of the configuration's groups.
    """

    schemes: tuple[Scheme, ...]
    mark: ClassVar = "weight_scale"
    parts: ClassVar = (
        "weight",
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
        "weight_global_scale",
    )
    # The numbers that quantize activations and caches, which stay float.
    unread: ClassVar = tuple(
        f"{tensor}_{number}"
        for tensor in ("input", "output", "q", "k", "v")
        for number in ("scale", "zero_point", "global_scale")
    )

    def matrix(self, layer: str, parts: Mapping[str, Tensor]) -> StoredMatrix | FloatMatrix:
        """The weight of a layer. Raises ValueError if the parts fit neither each other nor a
        scheme.

        weight_packed [N, K * bits / 32] int32 holds levels along K, weight_zero_point [N * bits /
        32, G] along N. In their place may be int8: weight [N, K] of 8 bits, weight_zero_point [N,
        G]. weight_scale: [N, G], [N, 1] or [1].
        """
        scales = _as_matrix(parts["weight_scale"])
        scale_dtypes = (*_SCALE_DTYPES, _E4M3, torch.uint8)
        check_part("weight_scale", scales, scale_dtypes, (None, None), "rows by groups")
        if not torch.isfinite(as_float32(scales)).all():
            raise ValueError("its scales hold numbers that are infinite or none")
        packed = parts.get("weight_packed")
        if packed is not None:
            if packed.dtype == torch.uint8:
                return self._e2m1(layer, parts, scales)
            return self._packed_integers(layer, parts, scales)
        weight = parts["weight"]
        check_part("weight", weight, (torch.int8, _E4M3), (None, None), "outputs by inputs")
        if weight.dtype == torch.int8:
            return self._plain_integers(layer, parts, scales)
        scheme = self._scheme("float", [8], weight.shape, scales)
        return scaled_matrix(layer, weight, scales, _block(scheme, weight.shape))

    def _packed_integers(
        self, layer: str, parts: Mapping[str, Tensor], scales: Tensor
    ) -> StoredMatrix:
        packed = parts["weight_packed"]
        check_part("weight_packed", packed, (torch.int32,), (None, None), "outputs by words")
        stored_shape = parts["weight_shape"]
        check_part("weight_shape", stored_shape, (torch.int64, torch.int32), (2,), "N, K")
        outputs, inputs = (int(size) for size in stored_shape)
        words = packed.shape[1]
        fitting = [bits for bits in range(2, 9) if words == _words(inputs, bits)]
        if len(packed) != outputs or not fitting:
            raise ValueError(
                f"weight_packed is {list(packed.shape)}, and its weight_shape says {[outputs, inputs]}"
            )
        shape = (outputs, inputs)
        zeros = _zero_points(parts)
        bits = self._scheme("int", fitting, shape, scales, zeros).bits
        numbers = _Numbers(parts, scales, zeros, bits, shape)

        def read(rows: slice) -> IntegerWeight:
            levels = unpack_bits(packed[rows].numpy(), bits)[:, :inputs]
            return numbers.with_levels(levels, rows)

        return StoredMatrix(layer, shape, read)

    def _plain_integers(
        self, layer: str, parts: Mapping[str, Tensor], scales: Tensor
    ) -> StoredMatrix:
        weight = parts["weight"]
        shape = (weight.shape[0], weight.shape[1])
        zeros = _zero_points(parts)
        bits = self._scheme("int", [8], shape, scales, zeros).bits
        numbers = _Numbers(parts, scales, zeros, bits, shape)

        def read(rows: slice) -> IntegerWeight:
            return numbers.with_levels(_as_levels(weight[rows], 8), rows)

        return StoredMatrix(layer, shape, read)

    def _e2m1(self, layer: str, parts: Mapping[str, Tensor], scales: Tensor) -> StoredMatrix:
        packed = parts["weight_packed"]
        check_part(
            "weight_packed", packed, (torch.uint8,), (None, None), "outputs by pairs of inputs"
        )
        self._scheme("float", [4], (len(packed), packed.shape[1] * 2), scales)
        divisor = parts.get("weight_global_scale")
        if divisor is not None:
            divisor = divisor.reshape(-1)
            check_part(
                "weight_global_scale", divisor, (torch.float32,), (1,), "the divisor of the matrix"
            )
            if not torch.isfinite(as_float32(scales) / divisor).all():
                raise ValueError("its weight_global_scale is no step")

        def scales_of_rows(rows: slice) -> Tensor:
            found = as_float32(scales[rows])
            return found if divisor is None else found / divisor

        return e2m1_matrix(layer, packed, scales_of_rows)

    def _scheme(
        self,
        kind: str,
        fitting: list[int],
        shape: Sequence[int],
        scales: Tensor,
        zeros: Tensor | None = None,
    ) -> Scheme:
        """The first scheme that the tensors of a layer agree with.

        Args:
            kind: "int" or "float".
            fitting: the numbers of bits that the stored weight may have.
            shape: N, K.
            scales: the stored scales, a matrix.
            zeros: the stored zero points; None if there are none.
        """
        for scheme in self.schemes:
            rows, columns = _block(scheme, shape)
            is_stored_so = scheme.kind == kind and scheme.bits in fitting
            has_zero_points = scheme.symmetric or zeros is not None
            scales_shape = (-(-shape[0] // rows), shape[1] / columns)
            if is_stored_so and has_zero_points and scales.shape == scales_shape:
                return scheme
        raise ValueError(
            f"its weight is {list(shape)}, {kind} of {' or '.join(map(str, fitting))} bits, its weight_scale "
            f"{list(scales.shape)}, with{'out' if zeros is None else ''} weight_zero_point, and no group of the "
            "configuration is stored so"
        )


class _Numbers:
    """The numbers beside the levels of an integer weight, checked: scales, zero points and the
    groups of inputs."""

    def __init__(
        self,
        parts: Mapping[str, Tensor],
        scales: Tensor,
        zeros: Tensor | None,
        bits: int,
        shape: tuple[int, int],
    ) -> None:
        self._scales = scales
        self._zeros = zeros
        self._bits = bits
        self._outputs, inputs = shape
        if zeros is not None:
            self._check_zero_points(zeros)
        self._groups = _groups(parts.get("weight_g_idx"), inputs, scales.shape[1])

    def with_levels(self, levels: Bytes, rows: slice) -> IntegerWeight:
        """The weight of some rows with these levels."""
        scales = as_float32(self._scales.expand(self._outputs, -1)[rows]).numpy()
        zero_points = self._zero_points(rows)
        return IntegerWeight(self._bits, levels, scales, zero_points, groups=self._groups)

    def _check_zero_points(self, zeros: Tensor) -> None:
        is_packed = zeros.dtype != torch.int8
        rows = _words(self._outputs, self._bits) if is_packed else len(self._scales)
        shape = (rows, self._scales.shape[1])
        why = f"weight_scale is {list(self._scales.shape)}"
        check_part("weight_zero_point", zeros, (torch.int8, torch.int32), shape, why)
        if not is_packed and (_as_levels(zeros, self._bits) >= 2**self._bits).any():
            raise ValueError(f"its weight_zero_point holds more than {self._bits} bits")

    def _zero_points(self, rows: slice) -> Bytes | None:
        """[rows, G]."""
        zeros = self._zeros
        if zeros is None:
            return None
        if zeros.dtype == torch.int8:
            return _as_levels(zeros.expand(self._outputs, -1)[rows], self._bits)
        first_word = rows.start * self._bits // _WORD_BITS
        words = zeros[first_word : _words(rows.stop, self._bits)].numpy()
        return unpack_bits(words.T, self._bits)[:, : rows.stop - rows.start].T


def _groups(g_idx: Tensor | None, inputs: int, groups: int) -> Indices | None:
    """The group of each input; None if they are in order. A negative g_idx is not in use."""
    if g_idx is None or (g_idx < 0).any():
        return None
    index_dtypes = (torch.int32, torch.int64)
    check_part("weight_g_idx", g_idx, index_dtypes, (inputs,), "the group of each input")
    if int(g_idx.max()) >= groups:
        raise ValueError(f"its weight_g_idx holds {int(g_idx.max())}, and it has {groups} groups")
    return g_idx.numpy().astype(np.int64)


def read_options(options: Mapping[str, Any], model_id: str) -> CompressedTensors:
    """The schemes of a configuration. Warns of quantized activations, which stay float.

    Args:
        options: the quantization_config, or an object that holds it.
        model_id: the model's name, for messages.

    Raises:
        UnsupportedModelError: for formats that cannot be read.
    """
    options = options.get("quantization_config") or options
    groups = _weight_groups(options)
    problem = _problem(options, groups)
    if problem is not None:
        formats = ", ".join((*_INTEGER_FORMATS, *_FLOAT_FORMATS))
        raise UnsupportedModelError(
            f"{model_id} is quantized with compressed-tensors in a form that cannot be read: {problem}; accepted are "
            f"{formats}, integers of 2 to 8 bits and floats of 4 or 8; {ADVICE}"
        )
    _warn_of_activations(options, groups, model_id)
    found = [_scheme_of(group["weights"]) for group in groups.values()]
    schemes = {scheme for scheme in found if scheme is not None}
    return CompressedTensors(tuple(sorted(schemes, key=repr)))


def _weight_groups(options: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The groups of layers with quantized weights, by name."""
    groups = options.get("config_groups")
    if not isinstance(groups, dict):
        return {}
    return {
        name: group
        for name, group in groups.items()
        if isinstance(group, dict) and isinstance(group.get("weights"), dict)
    }


def _problem(options: Mapping[str, Any], groups: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The reason why a checkpoint cannot be read, as the end of a sentence; None if it can."""
    sparsity = options.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        return f"its weights are sparse ({shown(sparsity['format'], 40)})"
    if options.get("transform_config"):
        return "it transforms activations (transform_config)"
    for name, group in groups.items():
        stored_format = group.get("format") or options.get("format")
        if stored_format not in (*_INTEGER_FORMATS, *_FLOAT_FORMATS, _MIXED_FORMAT):
            return f"its format is {shown(stored_format, 40)}"
        if _scheme_of(group["weights"]) is None:
            return f"{name} has weights of {_described(group['weights'])}"
    if not groups:
        return "its config_groups have no weights"
    return None


def _warn_of_activations(
    options: Mapping[str, Any], groups: Mapping[str, Mapping[str, Any]], model_id: str
) -> None:
    activations = set()
    for group in groups.values():
        if group.get("input_activations") or group.get("output_activations"):
            activations.add("the inputs of products")
    if options.get("kv_cache_scheme"):
        activations.add("keys and values")
    if activations:
        warnings.warn(
            f"{model_id} also quantizes {listed(activations)}, at run time; they stay float here, and the weights "
            "are the checkpoint's",
            stacklevel=3,
        )


def _scheme_of(weights: Mapping[str, Any]) -> Scheme | None:
    """The scheme of a group's weights; None if it cannot be read."""
    kind = weights.get("type", "int")
    bits = weights.get("num_bits", 8)
    block = _scheme_block(weights, kind)
    if kind not in ("int", "float") or not is_integer(bits) or block is None:
        return None
    if bits not in (range(2, 9) if kind == "int" else (4, 8)):
        return None
    return Scheme(kind, bits, block, weights.get("symmetric", True) is not False)


def _scheme_block(weights: Mapping[str, Any], kind: Any) -> tuple[int | None, int | None] | None:
    """The rows and the inputs that share a scale, as in `Scheme`; None if the strategy cannot be
    read."""
    size = weights.get("group_size")
    block = weights.get("block_structure")
    strategy = weights.get("strategy")
    if strategy is None:
        strategy = _default_strategy(size)
    match strategy:
        case "group" | "tensor_group" if is_integer(size, 1):
            return (1, size)
        case "channel":
            return (1, None)
        case "tensor":
            return (None, None)
        case "block" if kind == "float" and isinstance(block, list) and len(block) == 2:
            rows, columns = block
            if is_integer(rows, 1) and is_integer(columns, 1):
                return (rows, columns)
    return None


def _default_strategy(group_size: Any) -> str:
    if group_size is None:
        return "tensor"
    return "channel" if group_size == -1 else "group"


def _described(weights: Mapping[str, Any]) -> str:
    """The fields of a group's weights that decide how they are stored, for messages."""
    names = ("type", "num_bits", "strategy", "group_size", "block_structure")
    return shown({name: weights[name] for name in names if weights.get(name) is not None}, 120)


def _block(scheme: Scheme, shape: Sequence[int]) -> tuple[int, int]:
    """The rows and the inputs that share a scale in a matrix of this shape."""
    rows, columns = scheme.block
    return (shape[0] if rows is None else rows), (shape[1] if columns is None else columns)


def _zero_points(parts: Mapping[str, Tensor]) -> Tensor | None:
    """The stored zero points as a matrix; None if there are none."""
    zeros = parts.get("weight_zero_point")
    return None if zeros is None else _as_matrix(zeros)


def _as_matrix(numbers: Tensor) -> Tensor:
    """The numbers as a matrix; one number, or one for each row, becomes [N, 1]."""
    return numbers.reshape(-1, 1) if numbers.ndim < 2 else numbers


def _words(levels: int, bits: int) -> int:
    """The number of words that so many levels fill."""
    return -(-levels * bits // _WORD_BITS)


def _as_levels(numbers: Tensor, bits: int) -> Bytes:
    """Signed numbers, int8, as levels, whose middle is 0."""
    levels: Bytes = numbers.numpy().view(np.uint8) + np.uint8(2 ** (bits - 1))
    return levels
