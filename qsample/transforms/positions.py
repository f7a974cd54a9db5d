"""A causal LM enters; the same model with position embeddings that take each row's own positions leaves.

Some models do not let the caller give positions: they count on from the length of the cache, which differs by row here.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from qsample.transforms.cache import DecodeContext

_PARAMETERS = {"past_key_values_length", "position_ids"}


class RowPositions(nn.Module):
    """`embedding`, a table of positions, looked up at `context.positions` [B, S] in a decoder call."""

    def __init__(self, embedding: nn.Module, context: DecodeContext) -> None:
        super().__init__()
        self.embedding = embedding
        self.context = context

    @property
    def weight(self) -> Tensor:
        """[positions, hidden]; where transformers initialises or resizes the table."""
        weight = self.embedding.weight
        assert isinstance(weight, Tensor)
        return weight

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        positions = self.context.positions
        if positions is None:
            result: Tensor = self.embedding(*args, **kwargs)
            return result
        names = inspect.signature(self.embedding.forward).parameters
        given = dict(zip(names, args, strict=False)) | kwargs
        # Most tables expect one row of positions, which all rows have in common; some, the rows' own.
        own = given.get("position_ids")
        flat = own is None or own.ndim < positions.ndim
        given |= {"position_ids": positions.flatten() if flat else positions, "past_key_values_length": 0}
        embedded: Tensor = self.embedding(**given)
        return embedded.reshape(*positions.shape, embedded.shape[-1])


@dataclass(frozen=True, slots=True)
class UseRowPositions:
    """Wrap every position embedding whose `forward` knows both `position_ids` and `past_key_values_length`."""

    context: DecodeContext

    def __call__(self, model: PreTrainedModel) -> tuple[PreTrainedModel, bool]:
        modified = False
        for parent in list(model.modules()):
            if isinstance(parent, RowPositions):
                parent.context = self.context  # an earlier export's otherwise
                continue
            for name, child in list(parent.named_children()):
                if _is_position_table(child):
                    setattr(parent, name, RowPositions(child, self.context))
                    modified = True
        return model, modified


def _is_position_table(module: nn.Module) -> bool:
    if "Position" not in type(module).__name__:
        return False
    return set(inspect.signature(module.forward).parameters) >= _PARAMETERS
