"""The quantized layers of bitsandbytes: the stored tensors of a layer enter, its weight leaves.

LLM.int8() (Dettmers et al., NeurIPS 2022) has integers. NF4 (Dettmers et al., "QLoRA", NeurIPS
2023) and FP4 have none, and become float.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor

from qsample.checkpoints.stored_matrices import (
    FloatMatrix,
    IntegerWeight,
    StoredMatrix,
    check_part,
)
from qsample.checks import is_integer, is_number
from qsample.package.disk.untrusted import parse_json

_STATE_PREFIX: Final = "weight.quant_state.bitsandbytes__"
# It is below the largest float32.
_MAX_OFFSET: Final = 3e38


class Int8:
    """8 bits: weight [N, K] int8, and SCB [N], the largest magnitude of each row; a weight is SCB /
    127 a step."""

    mark: ClassVar = "SCB"
    parts: ClassVar = ("weight", "SCB", "weight_format")
    unread: ClassVar = ()

    def matrix(self, layer: str, parts: Mapping[str, Tensor]) -> StoredMatrix:
        """The weight of a layer. Raises ValueError if the parts do not fit one another."""
        weight = parts["weight"]
        largest = parts["SCB"]
        check_part("weight", weight, (torch.int8,), (None, None), "outputs by inputs")
        dtypes = (torch.float16, torch.bfloat16, torch.float32)
        check_part("SCB", largest, dtypes, (len(weight),), "the largest magnitude of each output")
        layout = parts.get("weight_format")
        if layout is not None and int(layout) != 0:
            raise ValueError(f"its weight_format is {int(layout)}, and must be 0, in rows")
        if not torch.isfinite(largest).all():
            raise ValueError("its SCB holds numbers that are infinite or none")

        def read(rows: slice) -> IntegerWeight:
            levels = weight[rows].numpy().view(np.uint8) ^ np.uint8(128)
            scales = largest[rows, None].to(torch.float32).div(127).numpy()
            return IntegerWeight(8, levels, scales)

        return StoredMatrix(layer, (weight.shape[0], weight.shape[1]), read)


class Float4:
    """4 bits: weight holds indices into quant_map, two a byte, the first in the high bits, each
    times the absmax of its block. With double quantization, absmax is itself indices into
    nested_quant_map, times nested_absmax, plus a mean.
    """

    mark: ClassVar = "weight.absmax"
    parts: ClassVar = (
        "weight",
        "weight.absmax",
        "weight.quant_map",
        "weight.nested_absmax",
        "weight.nested_quant_map",
        f"{_STATE_PREFIX}nf4",
        f"{_STATE_PREFIX}fp4",
    )
    unread: ClassVar = ()

    def matrix(self, layer: str, parts: Mapping[str, Tensor]) -> FloatMatrix:
        """The weight of a layer. Raises ValueError if the parts do not fit one another."""
        state = _read_state(parts)
        count = math.prod(state.shape)
        packed = parts["weight"].reshape(-1).view(torch.uint8)
        code = parts["weight.quant_map"]
        pairs = -(-count // 2)
        check_part("weight", packed, (torch.uint8,), (pairs,), f"pairs of {list(state.shape)}")
        check_part("quant_map", code, (torch.float32,), (16,), "numbers of 4 bits")
        block_size = state.options.get("blocksize")
        if not is_integer(block_size, 1, count):
            raise ValueError(f"its quant_state has blocksize {block_size!r:.60}")
        scales = _BlockScales(parts, state.options, blocks=-(-count // block_size))
        if not (torch.isfinite(code).all() and torch.isfinite(scales.read()).all()):
            raise ValueError("its quant_map or absmax holds numbers that are infinite or none")

        def read() -> Tensor:
            indices = torch.stack([packed >> 4, packed & 15], 1).reshape(-1)[:count]
            scale_of_each = scales.read().repeat_interleave(block_size)[:count]
            return (code[indices.long()] * scale_of_each).reshape(state.shape)

        return FloatMatrix(layer, state.shape, read)


@dataclass(frozen=True, slots=True)
class _State:
    """The JSON object that is stored beside a weight of 4 bits.

    Attributes:
        shape: N, K.
        options: all values of the object.
    """

    shape: tuple[int, int]
    options: Mapping[str, Any]


def _read_state(parts: Mapping[str, Tensor]) -> _State:
    stored = [tensor for name, tensor in parts.items() if name.startswith(_STATE_PREFIX)]
    text = stored[0] if stored else torch.zeros(0)
    check_part("quant_state", text, (torch.uint8,), (None,), "JSON")
    options = parse_json(bytes(text.numpy()).decode())
    if not isinstance(options, dict):
        options = {}
    shape = options.get("shape")
    if not isinstance(shape, list) or len(shape) != 2:
        raise ValueError(f"its quant_state has the shape {shape!r:.60}")
    if not all(is_integer(size, 1) for size in shape):
        raise ValueError(f"its quant_state has the shape {shape!r:.60}")
    return _State((shape[0], shape[1]), options)


class _BlockScales:
    """The scales of the blocks of a weight of 4 bits, checked."""

    def __init__(
        self, parts: Mapping[str, Tensor], options: Mapping[str, Any], *, blocks: int
    ) -> None:
        """parts: the tensors of the layer. options: the stored JSON object. blocks: the number of
        blocks."""
        self._absmax = parts["weight.absmax"]
        nested_absmax = parts.get("weight.nested_absmax")
        dtype = torch.float32 if nested_absmax is None else torch.uint8
        check_part("absmax", self._absmax, (dtype,), (blocks,), "a number for each block")
        self._nested = None
        if nested_absmax is not None:
            self._nested = _nested_scales(parts, nested_absmax, options, blocks)

    def read(self) -> Tensor:
        """[blocks] float32; with double quantization, computed anew."""
        return self._absmax if self._nested is None else self._nested.scales_of(self._absmax)


@dataclass(frozen=True, slots=True)
class _NestedScales:
    """Scales that are themselves quantized.

    Attributes:
        table: [256] float32, the numbers that the indices stand for.
        steps: the factor of each block of indices, float32.
        block_size: the number of indices that share a factor.
        mean: added to each scale.
    """

    table: Tensor
    steps: Tensor
    block_size: int
    mean: float

    def scales_of(self, indices: Tensor) -> Tensor:
        """The scales that uint8 indices stand for, float32."""
        count = len(indices)
        step_of_each = self.steps.repeat_interleave(min(self.block_size, count))[:count]
        return self.table[indices.long()] * step_of_each + self.mean


def _nested_scales(
    parts: Mapping[str, Tensor], steps: Tensor, options: Mapping[str, Any], count: int
) -> _NestedScales:
    """The quantization of `count` scales. Raises ValueError if the parts do not fit one another."""
    block_size = options.get("nested_blocksize")
    mean = options.get("nested_offset")
    if not is_integer(block_size, 1) or not is_number(mean, -_MAX_OFFSET, _MAX_OFFSET):
        raise ValueError(
            f"its quant_state has nested_blocksize {block_size!r:.60} and nested_offset {mean!r:.60}"
        )
    blocks = -(-count // block_size)
    check_part(
        "nested_absmax", steps, (torch.float32,), (blocks,), "a number for each block of absmax"
    )
    table = parts["weight.nested_quant_map"]
    check_part("nested_quant_map", table, (torch.float32,), (256,), "numbers of 8 bits")
    return _NestedScales(table, steps, block_size, mean)
