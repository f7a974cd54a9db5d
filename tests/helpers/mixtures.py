"""Small mixtures of experts: models of the families that route in different ways, and the operator in float64."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from transformers import PreTrainedModel

from qsample.contract.arrays import Array
from tests.helpers.tiny_models import random_model

_COMMON: Final = {"num_hidden_layers": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# What each shows: how the router scores and what it does with the scores of those that it chose.
ROUTERS: Final[dict[str, dict[str, Any]]] = {
    "qwen3_moe": {
        **_COMMON,
        "num_experts": 8,
        "head_dim": 16,
        "norm_topk_prob": True,
    },  # softmax, normalised
    "olmoe": {**_COMMON, "num_experts": 8},  # softmax, not normalised
    "mixtral": {**_COMMON, "num_local_experts": 8},  # softmax of the chosen
    "gpt_oss": {
        **_COMMON,
        "num_local_experts": 8,
        "head_dim": 16,
    },  # the same; biases, clamped gate, transposed weights
    "qwen2_moe": {
        **_COMMON,
        "num_experts": 8,
        "shared_expert_intermediate_size": 32,
    },  # a gated shared expert
    "granitemoe": {**_COMMON, "num_local_experts": 8, "residual_multiplier": 0.5},
    "deepseek_v3": {  # sigmoid, a bias for the choice alone, groups, a shared expert, a scaling factor
        **_COMMON,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "head_dim": 8,
        "num_key_value_heads": 4,
    },
    "glm4_moe": {**_COMMON, "n_routed_experts": 8, "first_k_dense_replace": 0, "head_dim": 16},
    "phimoe": {**_COMMON, "num_local_experts": 8},  # a sparse mixer
    "dbrx": {
        "num_hidden_layers": 1,
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 1,
        "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "jetmoe": {**_COMMON, "num_local_experts": 8, "kv_channels": 16, "num_key_value_heads": 2},
    "llama4_text": {
        **_COMMON,
        "num_local_experts": 8,
        "intermediate_size_mlp": 96,
        "head_dim": 16,
    },  # scaled inputs
}


def mixture(model_type: str, **overrides: Any) -> PreTrainedModel:
    """A random model of one layer with eight experts of which a token takes two."""
    return random_model(model_type, **{**ROUTERS[model_type], **overrides})


def experts_reference(
    rows: Array,
    chosen: Array,
    fc1: Array,
    fc2: Array,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float = math.inf,
    fc1_bias: Array | None = None,
    fc2_bias: Array | None = None,
) -> Array:
    """float64 [S, H]: each row of `rows` [S, H] through the expert in `chosen` [S]. fc1: [E, 2 * I, H], gate and up in
    turns. fc2: [E, H, I]."""
    results = []
    for row, expert in zip(rows.astype(np.float64), chosen, strict=True):
        joint = fc1[expert].astype(np.float64) @ row + (0 if fc1_bias is None else fc1_bias[expert])
        gate, up = np.minimum(joint[0::2], limit), np.clip(joint[1::2], -limit, limit)
        hidden = gate / (1 + np.exp(-alpha * gate)) * (up + beta)
        results.append(
            fc2[expert].astype(np.float64) @ hidden + (0 if fc2_bias is None else fc2_bias[expert])
        )
    return np.stack(results)
