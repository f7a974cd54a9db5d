"""Complex rotary embeddings in real arithmetic, for as long as a call is traced.

ONNX has no complex numbers. (a + bi)(cos + i sin) = (a cos - b sin) + (a sin + b cos) i.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

# Modules of transformers with a function `apply_rotary_emb(query, key, frequencies)`: the axis of their heads.
_HEADS_AXIS: Final = {
    "transformers.models.deepseek_v2.modeling_deepseek_v2": 1,
    "transformers.models.llama4.modeling_llama4": 2,
}


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and sin of every position's angles, [B, S, D / 2] each, in place of one complex tensor."""

    cos: Tensor
    sin: Tensor

    def to(self, *unused: Any, **ignored: Any) -> Rotation:
        """Itself: there is one device and one dtype."""
        return self

    def rotate(self, states: Tensor, heads_axis: int) -> Tensor:
        """states: [B, .., D] with the heads on `heads_axis`; pairs of neighbours are rotated."""
        cos, sin = self.cos.unsqueeze(heads_axis), self.sin.unsqueeze(heads_axis)
        pairs = states.float().reshape(*states.shape[:-1], -1, 2)
        first, second = pairs[..., 0], pairs[..., 1]
        rotated = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1)
        return rotated.flatten(3).type_as(states)


@contextmanager
def real_rotary_embeddings(model: PreTrainedModel) -> Iterator[None]:
    """While open, `model` rotates queries and keys without complex numbers; any other model is left alone."""
    with ExitStack() as stack:
        for name in {type(module).__module__ for module in model.modules()} & _HEADS_AXIS.keys():
            stack.enter_context(_replaced(sys.modules[name], "apply_rotary_emb", _apply(_HEADS_AXIS[name])))
        for module in model.modules():
            if type(module).__module__ in _HEADS_AXIS and type(module).__name__.endswith("RotaryEmbedding"):
                stack.enter_context(_replaced(module, "forward", _forward(module)))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _apply(heads_axis: int) -> Any:
    def apply_rotary_emb(query: Tensor, key: Tensor, rotation: Rotation, *unused: Any) -> tuple[Tensor, Tensor]:
        return rotation.rotate(query, heads_axis), rotation.rotate(key, heads_axis)

    return apply_rotary_emb


def _forward(module: nn.Module) -> Any:
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Rotation:
        parts = torch.view_as_real(own(*args, **kwargs))
        return Rotation(parts[..., 0], parts[..., 1])

    return forward
