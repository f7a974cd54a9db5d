"""The module that the model's part of the decode graph is traced from: token ids in, logits out."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qsample.contract import RUNNING, retained_name
from qsample.interface import Interface
from qsample.transforms.cache import DecodeContext
from qsample.transforms.complex_rotary import real_rotary_embeddings
from qsample.transforms.masks import eager_masks_over_buffers
from qsample.transforms.probe import run_model


class Decoder(nn.Module):
    """`model` over the retained cache: token ids in, logits of each row's next token out."""

    def __init__(self, model: PreTrainedModel, context: DecodeContext, interface: Interface) -> None:
        super().__init__()
        self.model = model
        self._context = context
        self._recurrent = interface.recurrent
        names = [spec.name for spec in interface.cache_states]
        self._cache_names = names[: len(names) - len(self._recurrent)]
        self._layers = interface.cache_layers

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """inputs: `input_ids` [B, S] int64, `input_lengths` [B] int32, `lengths` [B] int32 and the cache states.

        Returns `logits` [B, V] float32 and the next value of each cache state.
        """
        ids, lengths = inputs["input_ids"], inputs["lengths"]
        batch, length = ids.shape
        past = [inputs[name] for name in self._cache_names]
        positions = (lengths[:, None] + torch.arange(length, dtype=torch.int32)[None]).to(torch.int64)

        context = self._context
        context.input_lengths, context.positions = inputs["input_lengths"], positions
        if past:
            capacity = past[0].shape[2]
            # Padding beyond the capacity has no position of its own; its results are never used.
            context.positions = positions = positions.clamp(max=capacity - 1)
            context.seqlens_k = lengths + (length - 1)
            context.total_length = _total_length(batch, length, capacity, lengths)
            context.past = dict(zip(self._layers, zip(past[::2], past[1::2], strict=True), strict=True))
        if self._recurrent:
            context.states = {(state.layer, state.kind, state.index): inputs[state.name] for state in self._recurrent}
            context.running = inputs["status"] == RUNNING
        masks = eager_masks_over_buffers(positions, capacity) if context.buffered else nullcontext()
        try:
            with masks, real_rotary_embeddings(self.model):
                output = run_model(self.model, context, ids, positions)
            present = [tensor for layer in self._layers for tensor in context.present[layer]]
            states = {
                retained_name(state.name): context.next_states[state.layer, state.kind, state.index]
                for state in self._recurrent
            }
        finally:
            context.clear()
        logits = output.logits.squeeze(1).to(torch.float32)  # a view: indexing would copy all of them
        return {"logits": logits} | dict(zip(map(retained_name, self._cache_names), present, strict=True)) | states


def _total_length(batch: int, length: int, capacity: int, lengths: Tensor) -> Tensor:
    """GroupQueryAttention's total_sequence_length, scalar int32.

    A batch of prompts is accepted only as a first prefill, total == S; one row, or one token a row, with the capacity.
    For later pieces of several rows it is more than S, and the operator refuses them: it would read them as first ones,
    over the rows' own beginnings.
    """
    any_position = torch.logical_or(torch.scalar_tensor(batch) == 1, torch.scalar_tensor(length) == 1)
    longest = torch.scalar_tensor(length) + lengths.max()
    return torch.where(any_position, torch.scalar_tensor(capacity), longest).to(torch.int32)
