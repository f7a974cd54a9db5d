"""A transformed causal LM (and a sampler) enters; the module that the decode graph is traced from leaves.

Both modules map the contract's input names to its output names. `DecoderWithSampler` returns next-token ids and all
state; `Decoder` returns logits and the cache, for packages whose sampler runs on the host.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qsample.contract import Interface, retained_name
from qsample.transforms.cache import DecodeContext, PassThroughCache


class Decoder(nn.Module):
    """`model` over the retained cache: token ids in, logits of each row's next token out."""

    def __init__(self, model: PreTrainedModel, context: DecodeContext, interface: Interface) -> None:
        super().__init__()
        self.model = model
        self._context = context
        self._cache_names = [spec.name for spec in interface.cache_states]

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """inputs: `input_ids` [B, S] int64, `input_lengths` [B] int32, `lengths` [B] int32 and the cache states.

        Returns `logits` [B, V] float32 and the next value of each cache state.
        """
        ids, lengths = inputs["input_ids"], inputs["lengths"]
        batch, length = ids.shape
        past = [inputs[name] for name in self._cache_names]
        capacity = past[0].shape[2]
        positions = lengths[:, None] + torch.arange(length, dtype=torch.int32)[None]
        # Padding beyond the capacity has no position of its own; its results are never used.
        positions = positions.clamp(max=capacity - 1).to(torch.int64)

        context = self._context
        context.input_lengths = inputs["input_lengths"]
        context.seqlens_k = lengths + (length - 1)
        context.total_length = _total_length(batch, length, capacity)
        context.past = list(zip(past[::2], past[1::2], strict=True))
        try:
            output = self.model(
                input_ids=ids, position_ids=positions, past_key_values=PassThroughCache(context.past), use_cache=True
            )
            present = [tensor for i in range(len(context.past)) for tensor in context.present[i]]
        finally:
            context.clear()
        logits = output.logits.squeeze(1).to(torch.float32)  # a view: indexing would copy all of them
        return {"logits": logits} | dict(zip(map(retained_name, self._cache_names), present, strict=True))


class DecoderWithSampler(nn.Module):
    """`decoder`, then `sampler` on its logits: token ids in, next-token ids out.

    The logits are among the results, under their own name, for the parity gate; a published graph has no such output.
    """

    def __init__(self, decoder: Decoder, sampler: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder
        self.sampler = sampler

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """inputs: every name of `Interface.decoder.input_names`. Returns those of `output_names`, and `logits`."""
        results: dict[str, Tensor] = self.decoder(inputs)
        results.update(self.sampler(results["logits"], inputs))
        return results


def _total_length(batch: int, length: int, capacity: int) -> Tensor:
    """GroupQueryAttention's total_sequence_length, scalar int32.

    A batch of prompts is accepted only as a first prefill, total == S; one row, or one token a row, with the capacity.
    """
    any_position = torch.logical_or(torch.scalar_tensor(batch) == 1, torch.scalar_tensor(length) == 1)
    total = torch.where(any_position, torch.scalar_tensor(capacity), torch.scalar_tensor(length))
    return total.to(torch.int32)
