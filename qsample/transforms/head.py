"""Logits for the last real token of each row only.

The head is the largest MatMul of a prefill; all but one of its rows would be thrown away.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qsample.errors import UnsupportedModelError
from qsample.transforms.cache import DecodeContext


class LastTokenHead(nn.Module):
    """`head` applied to the hidden state of each row's last real token.

    Outside a decoder call it is `head` itself, so the model can still be run as it was.
    """

    def __init__(self, head: nn.Module, context: DecodeContext) -> None:
        super().__init__()
        self.head = head
        self.context = context

    @property
    def weight(self) -> Tensor:
        """[V, hidden]; transformers reads the head's weight where it is tied to the embedding."""
        weight = self.head.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def bias(self) -> Tensor | None:
        """[V], of a head that has one."""
        bias = getattr(self.head, "bias", None)
        assert bias is None or isinstance(bias, Tensor)
        return bias

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [B, S, hidden]. Returns [B, 1, V] in a decoder call, otherwise [B, S, V]."""
        lengths = self.context.input_lengths
        if lengths is not None:
            last = (lengths.to(torch.int64) - 1)[:, None, None].expand(-1, 1, hidden.shape[-1])
            # [B, 1, hidden] and not [B, hidden]: a 2-D product becomes Gemm, which weight quantizers skip.
            hidden = torch.gather(hidden, 1, last)
        logits: Tensor = self.head(hidden)
        return logits


@dataclass(frozen=True, slots=True)
class SampleLastToken:
    """Put a LastTokenHead in place of the model's head."""

    context: DecodeContext

    def __call__(self, model: PreTrainedModel) -> tuple[PreTrainedModel, bool]:
        head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if head is None:
            raise UnsupportedModelError(f"{type(model).__name__} has no output embeddings (no language-model head)")
        if isinstance(head, LastTokenHead):
            head.context = self.context  # an earlier export's otherwise
            return model, False
        model.set_output_embeddings(LastTokenHead(head, self.context))  # type: ignore[no-untyped-call]
        return model, True
