"""GGUF files of models, written with the gguf package in the layout of llama.cpp's convert_hf_to_gguf.py."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

from qsample.models.bundled import TINY_LM
from tests.helpers.small_packages import byte_tokenizer
from tests.helpers.tiny_models import random_model

Kind = gguf.GGMLQuantizationType
NARROW = {
    "hidden_size": 256,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
NARROW |= {"tie_word_embeddings": True}
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "ministral3": gguf.MODEL_ARCH.MISTRAL3,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
}
PERMUTED = ("llama", "mistral", "ministral3", "granite")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
BETAS = {"beta_fast": 16.0, "beta_slow": 2.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.25, 1.5, 2.0, 2.5, 3.0],
    "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
    "original_max_position_embeddings": 256,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
LOCAL = {"rope_type": "default", "rope_theta": 2e4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, of Llama 3": (
        "llama",
        {"head_dim": 32, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    ),
    "llama, with biases": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": LINEAR},
    ),
    "llama, of Mistral": ("mistral", {"head_dim": 32, "sliding_window": None}),
    "mistral3": (
        "ministral3",
        {
            "rope_parameters": YARN
            | BETAS
            | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
        },
    ),
    "qwen2": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "gemma3": (
        "gemma3_text",
        {
            "num_hidden_layers": 7,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 16,
            "rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL},
        },
    ),
    "phi3": ("phi3", {"sliding_window": 40}),
    "phi3, longrope": (
        "phi3",
        {
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 256,
            "max_position_embeddings": 512,
        },
    ),
    "granite": (
        "granite",
        {
            "attention_multiplier": 0.015625,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
    ),
    "qwen3moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "gpt-oss": ("gpt_oss", {"rope_parameters": YARN | {"rope_theta": 1.5e5, "truncate": False}}),
}


RECORDED = (
    Path(__file__).parents[1] / "fixtures" / "gguf_logits.json"
)  # by scripts/gguf_fixtures.py
PROMPT = [
    1,
    *(5 + 41 * i % 295 for i in range(23)),
]  # with 16 tokens more, no longer than the window of phi3
RECORDED_AT = (8, 23)  # positions
QUANTIZED = RECORDED.with_name(
    "gguf_q4_k_m.gguf"
)  # by llama.cpp: Q4_K, Q6_K, and Q5_0 and Q8_0 for narrow matrices


def settled_model(name: str, **changed: Any) -> PreTrainedModel:
    """The model of `MODELS` with the weights that llama.cpp's logits were recorded of, the same on every torch."""
    kind, settings = MODELS[name]
    model = random_model(kind, **(settings | changed))
    draw = np.random.RandomState(47)
    with torch.no_grad():
        for key, parameter in sorted(model.named_parameters()):
            values = draw.standard_normal(tuple(parameter.shape)) * 0.12
            if "norm" in key and kind != "gemma3_text":
                values += 1
            parameter.copy_(torch.from_numpy(values.astype(np.float32)))
    return model


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: Callable[[str], str] = lambda name: "F32",
    *,
    tokenizer: Path | None = None,
    add: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Write `model`, and give it the weights that the file means.

    Args:
        kind: the type of a matrix, by its name in the file; vectors are F32.
        tokenizer: a tokenizer.json of byte-level BPE; by default `byte_tokenizer`.
        add: adds more metadata.
    """
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    add_settings(writer, model)
    add_tokens(
        writer, model, byte_tokenizer().to_str() if tokenizer is None else tokenizer.read_text()
    )
    add(writer)
    with torch.no_grad():
        for name, weight in model.named_parameters():  # a tied head comes once
            for part, view in _parts(name, weight, config):
                if part.endswith(".sinks"):
                    part = f"{part}.weight"
                target = names.get_name(part, (".weight", ".bias"))
                assert target is not None, part
                shift = 1.0 if config.model_type == "gemma3_text" and "norm" in part else 0.0
                values = np.ascontiguousarray(view.numpy()) + np.float32(shift)
                chosen = (
                    Kind.F32 if values.ndim == 1 or part.endswith("bias") else Kind[kind(target)]
                )
                raw = gguf.quants.quantize(values, chosen)
                writer.add_tensor(target, raw, raw_dtype=chosen)
                meant = gguf.quants.dequantize(raw, chosen).reshape(values.shape) - np.float32(
                    shift
                )
                view.copy_(torch.from_numpy(np.ascontiguousarray(meant, np.float32)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _parts(name: str, weight: torch.Tensor, config: Any) -> list[tuple[str, torch.Tensor]]:
    """Views of `weight` as the file has them, by names that the gguf package knows."""
    kind = config.model_type
    if kind in PERMUTED and any(part in name for part in (".q_proj.", ".k_proj.")):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        halves = weight.unflatten(0, (heads, 2, -1))
        return [(name, _Flat(halves.swapaxes(1, 2)))]  # type: ignore[list-item]
    if ".experts." in name and kind == "qwen3_moe":
        stem = name.rpartition(".")[0]
        if "gate_up" not in name:
            return [(f"{stem}.down_proj.weight", weight)]
        return [
            (f"{stem}.{part}_proj.weight", half)
            for part, half in zip(("gate", "up"), weight.chunk(2, 1), strict=True)
        ]
    if ".experts." in name and kind == "gpt_oss":
        stem, last = name.rpartition(".")[::2]
        suffix = "bias" if last.endswith("_bias") else "weight"
        view = weight if suffix == "bias" else weight.transpose(1, 2)
        if not last.startswith("gate_up"):
            return [(f"{stem}.down_proj.{suffix}", view)]
        return [
            (f"{stem}.{part}_proj.{suffix}", view[:, i::2]) for i, part in enumerate(("gate", "up"))
        ]
    return [(name, weight)]


class _Flat:
    """The rows of heads whose halves take turns: read and written as a matrix, or a vector."""

    def __init__(self, view: torch.Tensor) -> None:
        self.view = view

    def numpy(self) -> np.ndarray:
        return self.view.flatten(0, 2).numpy()

    def copy_(self, rows: torch.Tensor) -> None:
        self.view.copy_(rows.reshape(self.view.shape))


def add_settings(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    config, kind = model.config, model.config.model_type
    heads, rope = config.num_attention_heads, config.rope_parameters
    full = rope.get("full_attention", rope)
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(full["rope_theta"]))
    if kind not in ("granite", "phi3"):
        writer.add_key_length(size)
        writer.add_value_length(size)
    if kind in (*PERMUTED, "phi3"):
        writer.add_rope_dimension_count(int(size * full.get("partial_rotary_factor", 1.0)))
    _add_rope(writer, full, config, size)
    if kind == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    if kind == "phi3":
        writer.add_sliding_window(config.sliding_window or 0)
    if kind == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if kind == "gpt_oss":
        writer.add_sliding_window(config.sliding_window)
    if experts := getattr(config, "num_experts", None) or getattr(
        config, "num_local_experts", None
    ):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(
            getattr(config, "moe_intermediate_size", config.intermediate_size)
        )


def _add_rope(writer: gguf.GGUFWriter, rope: dict[str, Any], config: Any, size: int) -> None:
    kinds = gguf.RopeScalingType
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(kinds.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(kinds.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        if "llama_4_scaling_beta" in rope:
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    elif rope["rope_type"] == "longrope":
        first = rope["original_max_position_embeddings"]
        scale = config.max_position_embeddings / first
        writer.add_rope_scaling_orig_ctx_len(first)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(first)))
        writer.add_tensor("rope_factors_long.weight", np.array(rope["long_factor"], np.float32))
        writer.add_tensor("rope_factors_short.weight", np.array(rope["short_factor"], np.float32))
    elif rope["rope_type"] == "llama3":
        factors = []
        low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
        high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
        for i in range(0, size, 2):
            wavelength = 2 * math.pi * rope["rope_theta"] ** (i / size)
            if wavelength < high:
                factors.append(1.0)
            elif wavelength > low:
                factors.append(rope["factor"])
            else:
                smooth = (low * rope["low_freq_factor"] / wavelength - rope["low_freq_factor"]) / (
                    rope["high_freq_factor"] - rope["low_freq_factor"]
                )
                factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))


def add_tokens(writer: gguf.GGUFWriter, model: PreTrainedModel, text: str) -> None:
    """The vocabulary of a byte-level BPE, filled up to the model's."""
    tokenizer = json.loads(text)
    vocabulary = {
        **tokenizer["model"]["vocab"],
        **{token["content"]: token["id"] for token in tokenizer["added_tokens"]},
    }
    special = {token["id"] for token in tokenizer["added_tokens"]}
    kinds, size = gguf.TokenType, model.config.vocab_size
    tokens = {size - 1: "zq"} | {
        i: token for token, i in vocabulary.items()
    }  # a file has a merge at least
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens.get(i, f"[PAD{i}]") for i in range(size)])
    writer.add_token_types(
        [
            kinds.CONTROL if i in special else kinds.NORMAL if i in tokens else kinds.UNUSED
            for i in range(size)
        ]
    )
    merges = [
        merge if isinstance(merge, str) else " ".join(merge)
        for merge in tokenizer["model"]["merges"]
    ]
    writer.add_token_merges(merges or ["z q"])
    for name in ("bos", "eos", "pad"):
        if (token := getattr(model.config, f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(token)
    writer.add_add_bos_token(True)


def tiny_lm_gguf(path: Path, kind: str = "F32") -> Path:
    """The bundled model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TINY_LM)
    template = (TINY_LM / "chat_template.jinja").read_text()
    return write_gguf(
        path,
        model,
        lambda name: kind,
        tokenizer=TINY_LM / "tokenizer.json",
        add=lambda writer: writer.add_chat_template(template),
    )
