"""SwiGLU, the gate between the two products of an expert, and whether a function is one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

Gate = Callable[[Tensor], Tensor]
"""[N, 2 * size] → [N, size]."""

ACTIVATION: Final = "qsample_activation"  # the attribute of a module of experts that holds what `find_swiglu` found
_DIGITS: Final = 5  # of the numbers that configurations state: 1.702, 7.0
_FAR: Final = 1e4  # beyond any limit
_PROBES: Final = (-30.0, -9.0, -3.0, -1.3, -0.7, -0.1, 0.0, 0.1, 0.7, 1.3, 3.0, 6.9, 9.0, 30.0)
_TOLERANCE: Final = 1e-5  # some gates compute in float32


@dataclass(frozen=True, slots=True)
class SwiGLU:
    """gate * sigmoid(alpha * gate) * (up + beta), with gate at most `limit` and up within ± `limit`.

    SiLU(gate) * up (https://arxiv.org/abs/2002.05202) has alpha 1, beta 0 and no limit (infinity). interleaved: gate
    and up take turns along the last axis; otherwise the first half is the gate.
    """

    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf
    interleaved: bool = False

    def __call__(self, joint: Tensor) -> Tensor:
        """joint: [N, 2 * size]. Returns [N, size]."""
        gate, up = _parts(joint, self.interleaved)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + self.beta)


def find_swiglu(gate: Gate, size: int) -> SwiGLU | None:
    """The SwiGLU that `gate` computes, told from its results; None where it is something else.

    size: outputs of `gate`, which may treat each differently.
    """
    for interleaved in (False, True):
        found = _fitted(gate, size, interleaved)
        if found is not None:
            return found
    return None


def _fitted(gate: Gate, size: int, interleaved: bool) -> SwiGLU | None:
    def at(gate_value: float, up_value: float) -> float:
        return float(gate(_joint([(gate_value, up_value)], size, interleaved))[0, 0])

    slope = at(1.0, 1.0) - at(1.0, 0.0)  # sigmoid(alpha): the function is linear in up, within the limit
    if not 0 < slope < 1:
        return None
    beta = at(1.0, 0.0) / slope
    limit = at(1.0, _FAR) / slope - beta
    found = SwiGLU(
        round(math.log(slope / (1 - slope)), _DIGITS),
        round(beta, _DIGITS),
        round(limit, _DIGITS) if limit < 0.9 * _FAR else math.inf,
        interleaved,
    )
    probes = _joint(list(itertools.product(_PROBES, _PROBES)), size, interleaved)
    probes = probes + torch.arange(size, dtype=probes.dtype).repeat_interleave(2) / (10 * size)  # no two outputs alike
    return found if torch.allclose(gate(probes).double(), found(probes), _TOLERANCE, _TOLERANCE) else None


def _joint(pairs: list[tuple[float, float]], size: int, interleaved: bool) -> Tensor:
    """[len(pairs), 2 * size]: each output of a row has the pair of that row."""
    gate, up = (
        torch.tensor(values, dtype=torch.float64).unsqueeze(1).expand(-1, size) for values in zip(*pairs, strict=True)
    )
    return torch.stack([gate, up], dim=2).flatten(1) if interleaved else torch.cat([gate, up], dim=1)


def _parts(joint: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return joint[..., 0::2], joint[..., 1::2]
    gate, up = joint.chunk(2, dim=-1)
    return gate, up
