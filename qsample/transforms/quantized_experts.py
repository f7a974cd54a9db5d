"""Experts with quantized weights. Traced, a GatherBlockQuantized makes the matrices of all experts
of a layer float again, in front of the operator that multiplies by them; `compile` lets QMoE read
the blocks instead. Run eagerly, such experts use their float weights as before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from qsample.transforms.quantized_linear import QuantizedWeight

# The name of an attribute of a module of experts: its quantized parameters by name.
_ATTRIBUTE: Final = "quantized_experts"


@dataclass(frozen=True, slots=True)
class QuantizedExperts:
    """The matrices of E experts, of N outputs and K inputs each, in blocks along K without zero
    points and offsets. A matrix of gates and up projections has both in turns.

    Attributes:
        bits: the bits of a stored level, 4 or 8.
        block_size: the number of levels that share a scale; it divides K.
        blocks: [E, N, K * bits / 8] uint8, with the first level in the low bits.
        scales: [E, N, K / block_size] in the layer's dtype.
    """

    bits: int
    block_size: int
    blocks: Tensor
    scales: Tensor

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes + self.scales.nbytes


def set_quantized_experts(
    module: nn.Module, parameter: str, weight: QuantizedWeight, experts: int
) -> None:
    """Let `module` be traced with `weight` in place of a float parameter.

    Args:
        module: a module of experts.
        parameter: the name of its parameter.
        weight: the rows of all experts, expert by expert, without zero points, offsets
            and another order of the inputs.
        experts: E.
    """
    rows, inputs = weight.sizes
    shape = (experts, rows // experts)
    quantized = QuantizedExperts(
        weight.bits,
        weight.block_size,
        weight.blocks.view(*shape, inputs * weight.bits // 8),
        weight.scales.view(*shape, inputs // weight.block_size),
    )
    # Buffers that are not persistent leave the state_dict as it is.
    module.register_buffer(_name(parameter, "blocks"), quantized.blocks, persistent=False)
    module.register_buffer(_name(parameter, "scales"), quantized.scales, persistent=False)
    setattr(module, _ATTRIBUTE, {**quantized_experts(module), parameter: quantized})


def quantized_experts(module: nn.Module) -> dict[str, QuantizedExperts]:
    """The quantized parameters of a module by name."""
    found: dict[str, QuantizedExperts] = module.__dict__.get(_ATTRIBUTE, {})
    return found


def traced_matrices(module: nn.Module, parameter: str) -> Tensor | None:
    """The float matrices [E, N, K] of a parameter, computed from its blocks in a trace; None if it
    has no blocks."""
    quantized = quantized_experts(module).get(parameter)
    if quantized is None:
        return None
    scales: Any = getattr(module, _name(parameter, "scales"))
    experts, outputs, blocks = scales.shape
    matrices: Tensor = torch.onnx.ops.symbolic(
        "com.microsoft::GatherBlockQuantized",
        [getattr(module, _name(parameter, "blocks")), torch.arange(experts), scales],
        {
            "bits": quantized.bits,
            "block_size": quantized.block_size,
            "gather_axis": 0,
            "quantize_axis": 2,
        },
        dtype=scales.dtype,
        shape=(experts, outputs, blocks * quantized.block_size),
        version=1,
    )
    return matrices


def _name(parameter: str, part: str) -> str:
    """The name of the buffer that holds a part of a quantized parameter."""
    return f"packed_{parameter}_{part}"
