"""Layers with a quantized weight. Traced, a linear layer is one MatMulNBits on its blocks, and a
product of the blocks' sums with offsets if there are any; an embedding is one GatherBlockQuantized
on the same blocks. Run eagerly, such a layer uses its float weight as before, and the model
computes the same with and without the blocks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qsample.transforms.deferred import numbers

_ATTRIBUTE: Final = "quantized_weight"
# The names of a layer's buffers.
_BLOCKS: Final = "packed_blocks"
_SCALES: Final = "packed_scales"
_ZERO_POINTS: Final = "packed_zero_points"
_ORDER: Final = "packed_order"
_OFFSETS: Final = "packed_offsets"


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight of N outputs and K inputs in blocks along K, in the layout of ONNX Runtime's
    MatMulNBits.

    Attributes:
        bits: the bits of a stored level, 4 or 8.
        block_size: the number of levels that share a scale and a zero point; it divides K.
        blocks: [N, K / block_size, block_size * bits / 8] uint8, with the first level in the low
            bits.
        scales: [N, K / block_size] in the layer's dtype.
        zero_points: [N * ceil(K / block_size * bits / 8)] uint8, packed like the levels; None
            stands for 2^(bits - 1).
        order: [K] int64, the input that each column belongs to; None for columns in the order of
            the inputs.
        offsets: [K / block_size, N] in the layer's dtype, added to each weight of a block; None for
            no offsets.
    """

    bits: int
    block_size: int
    blocks: Tensor
    scales: Tensor
    zero_points: Tensor | None = None
    order: Tensor | None = None
    offsets: Tensor | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """N, K."""
        return int(self.blocks.shape[0]), int(self.blocks.shape[1]) * self.block_size

    @property
    def nbytes(self) -> int:
        tensors = (self.blocks, self.scales, self.zero_points, self.order, self.offsets)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def row_offsets(self) -> Tensor | None:
        """[N, K / block_size, 1], the numbers to add to scale * (level - 2^(bits - 1)); None if
        they are all 0.

        The kernels of different devices read other zero points of a GatherBlockQuantized in
        different ways."""
        if self.zero_points is None:
            return None if self.offsets is None else numbers(self.offsets).T[..., None].contiguous()
        rows, blocks = self.blocks.shape[:2]
        packed = numbers(self.zero_points).reshape(rows, -1)
        zeros = (
            packed
            if self.bits == 8
            else torch.stack([packed & 15, packed >> 4], -1).reshape(rows, -1)[:, :blocks]
        )
        result: Tensor = (2 ** (self.bits - 1) - zeros.to(torch.float32)).mul_(numbers(self.scales))
        if self.offsets is not None:
            result += numbers(self.offsets).T
        return result.to(self.scales.dtype).unsqueeze(-1)


def set_quantized_weight(layer: nn.Module, weight: QuantizedWeight) -> None:
    """Let `layer`, a Linear, a Conv1D of transformers or an Embedding, be traced with `weight` in
    place of its float weight."""
    if looks_up := isinstance(layer, nn.Embedding):
        tensors = {_SCALES: weight.scales.unsqueeze(-1), _OFFSETS: weight.row_offsets()}
    else:
        tensors = {_SCALES: weight.scales, _OFFSETS: weight.offsets}
        tensors |= {_ZERO_POINTS: weight.zero_points, _ORDER: weight.order}
    for name, tensor in {_BLOCKS: weight.blocks, **tensors}.items():
        layer.register_buffer(name, tensor, persistent=False)  # a state_dict stays the same
    setattr(layer, _ATTRIBUTE, weight)
    layer.forward = functools.partial(_look_up if looks_up else _multiply, layer)


def quantized_layers(model: nn.Module) -> Iterator[tuple[nn.Module, QuantizedWeight]]:
    """Every layer of `model` that has a quantized weight."""
    for module in model.modules():
        if isinstance(weight := module.__dict__.get(_ATTRIBUTE), QuantizedWeight):
            yield module, weight


def _multiply(layer: Any, states: Tensor) -> Tensor:
    """states: [.., K]. Returns [.., N]."""
    if not torch.onnx.is_in_onnx_export():
        eager: Tensor = type(layer).forward(layer, states)
        return eager
    weight: QuantizedWeight = getattr(layer, _ATTRIBUTE)
    outputs, inputs = weight.sizes
    if getattr(layer, _ORDER) is not None:
        states = states.index_select(-1, getattr(layer, _ORDER))
    operands = [states, getattr(layer, _BLOCKS), getattr(layer, _SCALES)]
    if getattr(layer, _ZERO_POINTS) is not None:
        operands.append(getattr(layer, _ZERO_POINTS))
    result: Tensor = torch.onnx.ops.symbolic(
        "com.microsoft::MatMulNBits",
        operands,
        {"K": inputs, "N": outputs, "bits": weight.bits, "block_size": weight.block_size},
        dtype=states.dtype,
        shape=(*states.shape[:-1], outputs),
        version=1,
    )
    if (offsets := getattr(layer, _OFFSETS)) is not None:
        sums = states.reshape(*states.shape[:-1], -1, weight.block_size).sum(-1)
        result = result + sums @ offsets
    return result if layer.bias is None else result + layer.bias


def _look_up(layer: Any, ids: Tensor) -> Tensor:
    """ids: [..]. Returns [.., K], after all that the layer's class does with the rows of its table,
    such as scaling."""
    with _RowsOfBlocks(layer) if torch.onnx.is_in_onnx_export() else nullcontext():
        rows: Tensor = type(layer).forward(layer, ids)
    return rows


class _RowsOfBlocks(TorchFunctionMode):
    """While open, lookups in the float table of `layer` read its blocks."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self._layer = layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.embedding and args[1] is self._layer.weight:
            return self._rows(args[0])
        return func(*args, **(kwargs or {}))

    def _rows(self, ids: Tensor) -> Tensor:
        weight: QuantizedWeight = getattr(self._layer, _ATTRIBUTE)
        inputs = weight.sizes[1]
        scales = getattr(self._layer, _SCALES)
        offsets = getattr(self._layer, _OFFSETS)
        rows: Tensor = torch.onnx.ops.symbolic(
            "com.microsoft::GatherBlockQuantized",
            [getattr(self._layer, _BLOCKS), ids, scales],
            {
                "bits": weight.bits,
                "block_size": weight.block_size,
                "gather_axis": 0,
                "quantize_axis": 2,
            },
            dtype=scales.dtype,
            shape=(*ids.shape, inputs // weight.block_size, weight.block_size),
            version=1,
        )
        if offsets is not None:
            rows = rows + offsets[ids]
        return rows.reshape(*ids.shape, inputs)
