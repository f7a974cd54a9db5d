"""SwiGLU, told from what a function computes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from qsample.transforms.experts.swiglu import SwiGLU, find_swiglu

SIZE = 6


def halves(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda joint: function(*joint.chunk(2, dim=-1))


def turns(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda joint: function(joint[..., ::2], joint[..., 1::2])


def clamped(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(gate * 1.702)


@pytest.mark.parametrize(
    ("gate", "found"),
    [
        (halves(lambda gate, up: F.silu(gate) * up), SwiGLU()),
        (halves(lambda gate, up: (F.silu(gate.float()) * up.float()).to(gate.dtype)), SwiGLU()),
        (halves(lambda gate, up: F.silu(gate.clamp(max=10)) * up.clamp(-10, 10)), SwiGLU(limit=10.0)),
        (turns(clamped), SwiGLU(1.702, 1.0, 7.0, interleaved=True)),
        (halves(clamped), SwiGLU(1.702, 1.0, 7.0)),
    ],
    ids=["silu", "silu in float32", "limited", "gpt-oss", "gpt-oss, halves"],
)
def test_a_swiglu_is_found(gate: Callable[[Tensor], Tensor], found: SwiGLU) -> None:
    assert find_swiglu(gate, SIZE) == found


@pytest.mark.parametrize(
    "gate",
    [
        halves(lambda gate, up: F.gelu(gate) * up),
        halves(lambda gate, up: F.gelu(gate, approximate="tanh") * up),
        halves(lambda gate, up: F.relu(gate) * up),
        halves(lambda gate, up: F.silu(gate) * up * up),
        halves(lambda gate, up: F.silu(gate) * torch.tanh(up)),
        halves(lambda gate, up: F.silu(up) * gate),
        halves(lambda gate, up: F.silu(gate.clamp(max=7)) * up),
        halves(lambda gate, up: F.silu(gate.clamp(max=5)) * up.clamp(-7, 7)),
        halves(lambda gate, up: F.silu(gate) * up * torch.linspace(1, 1.01, SIZE)),
        halves(lambda gate, up: F.silu(gate.flip(-1)) * up),
        halves(lambda gate, up: gate * up),
        halves(lambda gate, up: torch.zeros_like(up)),
    ],
)
def test_anything_else_is_not(gate: Callable[[Tensor], Tensor]) -> None:
    assert find_swiglu(gate, SIZE) is None


def test_the_formula() -> None:
    """A value worked out by hand: gate 9 is limited to 7, up -8 to -7."""
    result = SwiGLU(1.702, 1.0, 7.0)(torch.tensor([[9.0, 0.5, -8.0, 2.0]], dtype=torch.float64))
    expected = [7 / (1 + math.exp(-1.702 * 7)) * -6, 0.5 / (1 + math.exp(-1.702 * 0.5)) * 3]
    torch.testing.assert_close(result, torch.tensor([expected], dtype=torch.float64))
