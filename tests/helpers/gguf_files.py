"""GGUF files of models, written with the gguf package in the layout of llama.cpp's convert_hf_to_gguf.py."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
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
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
    "gemma4_text": gguf.MODEL_ARCH.GEMMA4,
}
SHIFTED = ("gemma3_text", "qwen3_5_text", "qwen3_5_moe_text")
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
QWEN35 = {
    "num_hidden_layers": 3,
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e5,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}
GEMMA4 = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 6,
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e6,
        },
        "sliding_attention": LOCAL,
    },
}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 32}
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
    "qwen35": ("qwen3_5_text", QWEN35),
    "qwen35moe": (
        "qwen3_5_moe_text",
        QWEN35
        | EXPERTS
        | {
            "shared_expert_intermediate_size": 64,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4, of E2B": (
        "gemma4_text",
        GEMMA4
        | {
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 320,
        },
    ),
    "gemma4, of 31B": (
        "gemma4_text",
        GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gemma4, with experts": (
        "gemma4_text",
        GEMMA4 | EXPERTS | {"enable_moe_block": True, "top_k_experts": 2},
    ),
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
        for key, parameter in [*sorted(model.named_parameters()), *sorted(buffers(model))]:
            values = draw.standard_normal(tuple(parameter.shape)) * 0.12
            is_factor = "norm" in key and not is_shifted(key, kind)
            if is_factor or key.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
                values += 1
            parameter.copy_(torch.from_numpy(values.astype(np.float32)))
    return model


def buffers(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that a checkpoint stores."""
    stored = model.state_dict().keys()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in stored)


def is_shifted(name: str, kind: str) -> bool:
    """Whether the file adds 1 to a weight."""
    return kind in SHIFTED and "norm" in name and "linear_attn.norm" not in name


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: Callable[[str], str] = lambda name: "F32",
    *,
    tokenizer: Path | None = None,
    add: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    leave_out: str = "",
) -> Path:
    """Write `model`, and give it the weights that the file means.

    Args:
        kind: the type of a matrix, by its name in the file; vectors are F32.
        tokenizer: a tokenizer.json of byte-level BPE; by default `byte_tokenizer`.
        add: adds more metadata.
        leave_out: a pattern of the tensors that the file lacks, which are zeros.
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
        for name, weight in [*model.named_parameters(), *buffers(model)]:  # a tied head comes once
            for part, view in _parts(name, weight, config):
                if part.endswith((".sinks", ".layer_scalar")):
                    part = f"{part}.weight"
                target = names.get_name(part, (".weight", ".bias", ".scale"))
                assert target is not None, part
                if re.fullmatch(leave_out, target):
                    view.copy_(torch.zeros(view.numpy().shape))
                    continue
                shift = 1.0 if is_shifted(part, config.model_type) else 0.0
                values = np.ascontiguousarray(view.numpy()) + np.float32(shift)
                chosen = (
                    Kind.F32
                    if values.ndim == 1 or part.endswith("bias") or "conv1d" in part
                    else Kind[kind(target)]
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
    if "linear_attn." in name:
        return [_linear_attention(name, weight, config)]
    if kind == "gemma4_text" and ".experts." in name:
        return [(f"{name}.weight", weight)]
    if name.endswith("router.scale"):
        return [(name.replace("router.scale", "router.proj.scale"), weight)]
    if name.endswith("router.per_expert_scale"):
        return [(name.replace("router.per_expert_scale", "experts.down_proj.scale"), weight)]
    if ".experts." in name and kind in ("qwen3_moe", "qwen3_5_moe_text"):
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


def _linear_attention(
    name: str, weight: torch.Tensor, config: Any
) -> tuple[str, torch.Tensor | _Reordered | _NegatedExponential]:
    """A weight with the values of all keys in turns."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    last = name.split("linear_attn.")[1].removesuffix(".weight")
    size = (
        1
        if last in ("in_proj_a", "in_proj_b", "A_log", "dt_bias")
        else config.linear_value_head_dim
    )
    if last == "norm":
        return name, weight
    before = 2 * keys * config.linear_key_head_dim if last in ("in_proj_qkv", "conv1d") else 0
    heads = torch.arange(values * size).reshape(keys, values // keys, size)
    index = torch.cat([torch.arange(before), before + heads.permute(1, 0, 2).reshape(-1)])
    if last == "conv1d":
        weight = weight[:, 0]
    reordered = _Reordered(weight, index, 1 if last == "out_proj" else 0)
    if last == "A_log":
        return name, _NegatedExponential(reordered)
    return name.replace(".dt_bias", ".dt_proj.bias"), reordered


class _Reordered:
    """The rows or columns of a weight in another order, read and written."""

    def __init__(self, weight: torch.Tensor, index: torch.Tensor, axis: int) -> None:
        self.weight, self.index, self.axis = weight, index, axis

    def numpy(self) -> np.ndarray:
        return self.weight.index_select(self.axis, self.index).numpy()

    def copy_(self, values: torch.Tensor) -> None:
        self.weight.index_copy_(self.axis, self.index, values)


class _NegatedExponential:
    """-exp of a weight, read and written."""

    def __init__(self, view: _Reordered) -> None:
        self.view = view

    def numpy(self) -> np.ndarray:
        return -np.exp(self.view.numpy())

    def copy_(self, values: torch.Tensor) -> None:
        self.view.copy_(values.neg().log())


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
    of_a_layer = config.per_layer_config[-1] if kind == "gemma4_text" else config
    size = getattr(of_a_layer, "head_dim", None) or config.hidden_size // heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    if kind == "gemma4_text":
        _add_gemma4(writer, config)
    else:
        if kind != "qwen3_5_moe_text":
            writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_head_count(heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(full["rope_theta"]))
    if kind not in ("granite", "phi3", "gemma4_text"):
        writer.add_key_length(size)
        writer.add_value_length(size)
    if kind in (*PERMUTED, "phi3", "qwen3_5_text", "qwen3_5_moe_text"):
        writer.add_rope_dimension_count(int(size * full.get("partial_rotary_factor", 1.0)))
    _add_rope(writer, full, config, size)
    if kind in ("gemma3_text", "gemma4_text"):
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
    if kind in ("qwen3_5_text", "qwen3_5_moe_text"):
        _add_qwen35(writer, config)
    _add_experts(writer, config)


def _add_experts(writer: gguf.GGUFWriter, config: Any) -> None:
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if experts is None:
        return
    used = getattr(config, "top_k_experts", None) or config.num_experts_per_tok
    writer.add_expert_count(experts)
    writer.add_expert_used_count(used)
    writer.add_expert_feed_forward_length(
        getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    )
    if shared := getattr(config, "shared_expert_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(shared)


def _add_qwen35(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_array(
        f"{writer.arch}.attention.recurrent_layers",
        [kind == "linear_attention" for kind in config.layer_types],
    )
    writer.add_full_attention_interval(4)
    writer.add_rope_dimension_sections([*config.rope_parameters["mrope_section"], 0])


def _add_gemma4(writer: gguf.GGUFWriter, config: Any) -> None:
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    layers, shared = config.num_hidden_layers, config.num_kv_shared_layers
    local, whole = (config.per_layer_config[slides.index(is_local)] for is_local in (True, False))
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input or 0)
    writer.add_sliding_window_pattern(slides)
    writer.add_key_length(whole.head_dim)
    writer.add_value_length(whole.head_dim)
    writer.add_key_length_swa(local.head_dim)
    writer.add_value_length_swa(local.head_dim)
    writer.add_rope_dimension_count(whole.head_dim)
    writer.add_rope_dimension_count_swa(local.head_dim)
    width = config.intermediate_size
    if config.use_double_wide_mlp:
        writer.add_feed_forward_length([width] * (layers - shared) + [2 * width] * shared)
    else:
        writer.add_feed_forward_length(width)
    heads = [config.per_layer_config[layer].num_key_value_heads for layer in range(layers)]
    writer.add_head_count_kv(heads)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    rotated = int(
        whole.head_dim / 2 * config.rope_parameters["full_attention"]["partial_rotary_factor"]
    )
    factors = [1.0] * rotated + [1e30] * (whole.head_dim // 2 - rotated)
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))


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
