"""A model type enters; a random model of it with tiny sizes leaves, made from whatever fields its config class has."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 320
WINDOW = 6  # of sliding and chunked attention: shorter than the prompts
LARGEST_LOGIT = 10.0

# Field → tiny value, for every config (also nested configs) with the field.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size"), 64),
    **dict.fromkeys(
        ("input_embedding_size", "output_embedding_size", "lru_width", "attention_hidden_size"), 64
    ),
    **dict.fromkeys(
        ("embedding_dim", "ple_embed_dim", "router_hidden_size", "hidden_size_per_layer_input"), 64
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "n_inner", "d_ff", "ffn_hidden_size"),
        96,
    ),
    **dict.fromkeys(
        (
            "encoder_ffn_dim",
            "dim_ff",
            "intermediate_size_mlp",
            "feed_forward_size",
            "dff",
            "d_inner",
        ),
        96,
    ),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32
    ),
    **dict.fromkeys(
        ("shared_intermediate_size", "dense_intermediate_size", "swa_intermediate_size"), 32
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "n_layer",
            "n_layers",
            "num_layers",
            "decoder_layers",
            "encoder_layers",
        ),
        2,
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(
        ("encoder_attention_heads", "attention_heads", "num_heads", "linear_num_heads"), 4
    ),
    **dict.fromkeys(("linear_num_value_heads", "index_n_heads"), 4),
    **dict.fromkeys(
        ("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads", "kv_n_heads"), 2
    ),
    **dict.fromkeys(("linear_num_key_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(
        (
            "head_dim",
            "attention_head_dim",
            "kv_channels",
            "v_head_dim",
            "global_head_dim",
            "d_head",
        ),
        16,
    ),
    **dict.fromkeys(
        ("qk_nope_head_dim", "kv_lora_rank", "q_lora_rank", "dim_head", "swa_head_dim"), 16
    ),
    **dict.fromkeys(
        ("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "index_head_dim"), 16
    ),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2
    ),
    **dict.fromkeys(
        ("n_group", "topk_group", "num_expert_group", "first_k_dense_replace", "num_dense_layers"),
        1,
    ),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB_SIZE),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "model_max_length"), 256
    ),
    **dict.fromkeys(("max_target_positions", "max_source_positions", "context_length"), 256),
    **dict.fromkeys(
        ("sliding_window", "attention_chunk_size", "window_size", "attention_window_size"), WINDOW
    ),
    "is_decoder": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# What a type needs beside that: sizes that its own checks tie together, or a pattern that shows every kind of layer.
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dory": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
    },
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    **{name: {"layer_types": ["conv", "full_attention"]} for name in ("lfm2", "lfm2_moe")},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16},
    "phi4_multimodal": {"vision_config": {}, "audio_config": {}},
    "reformer": {"axial_pos_embds_dim": (16, 48), "axial_pos_shape": (16, 16)},
    "roc_bert": {
        "pronunciation_embed_dim": 64,
        "pronunciation_vocab_size": 64,
        "shape_embed_dim": 64,
        "shape_vocab_size": 64,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_query_groups": 4,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "adapter_rank": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(model_type: str) -> PreTrainedConfig:
    """A config of `model_type` with tiny sizes and a layer of every kind, in two layers if that is enough."""
    config_class = CONFIG_MAPPING[model_type]
    return config_class(**_tiny_fields(config_class(), OVERRIDES.get(model_type, {})))


def _tiny_fields(default: PreTrainedConfig, overrides: dict[str, Any]) -> dict[str, Any]:
    known = default.to_dict()
    fields = {name: value for name, value in SIZES.items() if name in known}
    if "num_key_value_heads" in known and known["num_key_value_heads"] == known.get(
        "num_attention_heads"
    ):
        fields["num_key_value_heads"] = SIZES["num_attention_heads"]
    if "qk_rope_head_dim" in known:
        fields["head_dim"] = SIZES["qk_rope_head_dim"]
    kinds = list(dict.fromkeys(known.get("layer_types") or []))
    if kinds:
        count = max(2, len(kinds))
        fields |= {"num_hidden_layers": count, "layer_types": (kinds * count)[:count]}
    for name, value in known.items():
        if isinstance(value, dict) and isinstance(
            nested := getattr(default, name), PreTrainedConfig
        ):
            fields[name] = _tiny_fields(nested, {})
    return fields | overrides


def tiny_model(model_type: str, *, seed: int = 0) -> PreTrainedModel:
    """A random model in eval mode whose largest logit is about `LARGEST_LOGIT`."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        tiny_config(model_type), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.12)
            elif name.endswith("bias"):
                parameter.normal_(std=0.05)
        _scale_logits(model)
    return model.requires_grad_(False)


def _scale_logits(model: PreTrainedModel) -> None:
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Module)
    ids = torch.arange(24)[None] * 7 % VOCAB_SIZE
    for _ in range(3):  # a tied head moves the embedding, too
        largest = float(model(input_ids=ids, use_cache=False).logits.abs().max())
        head.weight.mul_(LARGEST_LOGIT / largest)
