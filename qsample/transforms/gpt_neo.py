"""A GPT-Neo enters; the same model with windows that hold for rows of different lengths leaves.

Its attention cuts the causal and local pattern out of a table by the number of keys, which is the capacity here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention

from qsample.transforms.attention import masked_attention
from qsample.transforms.cache import DecodeContext
from qsample.transforms.masks import MaskRule, causal


@dataclass(frozen=True, slots=True)
class GPTNeoWindows:
    """Replace the step from queries, keys and values to their product in every attention layer of a GPT-Neo."""

    context: DecodeContext

    def __call__(self, model: PreTrainedModel) -> tuple[PreTrainedModel, bool]:
        modified = False
        for module in model.modules():
            if isinstance(module, GPTNeoSelfAttention):
                modified |= not isinstance(module.__dict__.get("_attn"), functools.partial)
                module._attn = functools.partial(_attend, self.context, module)  # type: ignore[method-assign]
        return model, modified


def _attend(
    context: DecodeContext,
    module: GPTNeoSelfAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """query: [B, heads, S, D]; key, value: [B, heads, T, D]. Returns [B, heads, S, D] and no weights.

    Outside a decoder call it is the class's own step.
    """
    if context.positions is None:
        own: tuple[Tensor, Tensor] = GPTNeoSelfAttention._attn(  # type: ignore[no-untyped-call]
            module, query, key, value, attention_mask
        )
        return own
    window = int(module.config.window_size) if module.attention_type == "local" else None
    allowed = MaskRule(causal(window)).allowed(context.positions, key.shape[2])
    return masked_attention(query, key, value, allowed, scale=1.0).transpose(1, 2), None
