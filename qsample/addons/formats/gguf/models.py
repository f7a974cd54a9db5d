"""The metadata of a GGUF file as a configuration of transformers, and its tensors as the model's weights: a row of
`FAMILIES` for each architecture. After llama.cpp's convert_hf_to_gguf.py, which writes such files, and src/models,
which computes them. Needs NumPy only: what is not read is refused before the libraries of models are loaded.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from qsample.addons.formats.gguf.file import GgufFile, GgufTensor, read_gguf
from qsample.checks import is_integer, is_number
from qsample.contract.arrays import Array
from qsample.errors import QsampleError, UnsupportedModelError, listed, shown

_LARGEST: Final = (1 << 31) - 1
_TABLE: Final = "token_embd.weight"
_FREQUENCIES: Final = "rope_freqs.weight"
_LONGROPE: Final = {
    "long_factor": "rope_factors_long.weight",
    "short_factor": "rope_factors_short.weight",
}
_OF_LAYER: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_MODULES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER: Final = {  # modules by the names of their tensors, where a family has no other
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks": "self_attn.sinks",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_GEMMA3: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS: Final = {
    "gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
    "down_proj": ("ffn_down_exps",),
}


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture of llama.cpp as transformers has it.

    Attributes:
        model_type: of the configuration.
        settings: of the configuration, besides those of all families, which it gets.
        modules: of a layer, besides `_LAYER` or in its place.
        is_interleaved: whether the halves of a rotated head take turns in the rows of queries and keys.
        norm_shift: what the file adds to the weights of norms.
        experts: None; "joined" for gate above up; "alternating" for rows of gate and up in turns, then transposed.
    """

    model_type: str
    settings: Callable[[GgufFile, Mapping[str, Any]], dict[str, Any]] = lambda file, config: {}
    modules: Mapping[str, str] = field(default_factory=dict)
    is_interleaved: bool = False
    norm_shift: float = 0.0
    experts: str | None = None


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of the model.

    Attributes:
        tensors: of the file; gate and up of experts have a common weight.
        order: row i of the weight is row `order[i]` of the tensor; None: as they are.
        shift: subtracted from each number.
        experts: as in `Family`, for the weights of experts.
    """

    tensors: tuple[GgufTensor, ...]
    order: Array | None = None
    shift: float = 0.0
    experts: str | None = None


def read_model(path: Path) -> GgufFile:
    """The header of a file whose model can be read. Raises as `read_gguf` and `configuration` do."""
    file = read_gguf(path)
    configuration(file)
    return file


def describe_gguf(path: Path) -> dict[str, Any]:
    """What a file is, JSON-ready: numbers of weights by type, the model's kind, and why it is not read, if so. Raises
    as `read_gguf` does."""
    file = read_gguf(path)
    try:
        problem = None
        weights_of(file, configuration(file))
    except QsampleError as error:
        problem = str(error)
    known = {name: file.metadata.get(f"general.{name}") for name in ("architecture", "name")}
    sizes = {
        name: file.value(name) for name in ("block_count", "embedding_length", "context_length")
    }
    return {**known, **sizes, "weights": dict(weights_by_type(file)), "refusal": problem}


def weights_by_type(file: GgufFile) -> Counter[str]:
    """Numbers of weights by the type of their tensor."""
    types = Counter[str]()
    for tensor in file.tensors.values():
        types[tensor.type] += math.prod(tensor.shape)
    return types


def family_of(file: GgufFile) -> Family:
    """Raises UnsupportedModelError for an architecture that is not read."""
    family = FAMILIES.get(file.architecture)
    if family is None:
        raise UnsupportedModelError(
            f"{file.path} is of the architecture {shown(file.architecture)}; {', '.join(FAMILIES)} are read from GGUF. "
            "Give the checkpoint that the file was made of"
        )
    return family


def configuration(file: GgufFile) -> dict[str, Any]:
    """The configuration as in a config.json, without the tokens that end a text. Raises QsampleError for metadata that
    are missing or wrong, UnsupportedModelError for a model that is computed otherwise."""
    family = family_of(file)
    table = file.tensors.get(_TABLE)
    if table is None or len(table.shape) != 2:
        raise QsampleError(f"{file.path} has no matrix {_TABLE}; download it again")
    heads, width = _integer(file, "attention.head_count"), _integer(file, "embedding_length")
    size = _integer(file, "attention.key_length", width // heads)
    rotated = _integer(file, "rope.dimension_count", size)
    layers = _integer(file, "block_count")
    if layers > len(file.tensors):
        raise QsampleError(
            f"{file.path} has {len(file.tensors)} tensors for {layers} layers; download it again"
        )
    if _integer(file, "attention.value_length", size) != size or (
        rotated != size and family.model_type != "phi3"
    ):
        raise UnsupportedModelError(
            f"{file.path} has keys, values and rotations of different lengths, which is not read"
        )
    if file.value("attention.causal", True) is not True:
        raise UnsupportedModelError(
            f"{file.path} makes embeddings of texts, and does not continue them"
        )
    config = {
        "model_type": family.model_type,
        "dtype": "float32",
        "vocab_size": table.shape[0],
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _integer(file, "attention.head_count_kv", heads),
        "head_dim": size,
        "intermediate_size": _integer(
            file, "feed_forward_length", file.value("expert_feed_forward_length")
        ),
        "max_position_embeddings": _integer(file, "context_length"),
        "rms_norm_eps": _number(file, "attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(file, size, rotated),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": _token(file, "bos"),
        "pad_token_id": _token(file, "padding"),
    }
    for setting, tensor in (
        ("attention_bias", "blk.0.attn_q.bias"),
        ("mlp_bias", "blk.0.ffn_gate.bias"),
    ):
        if tensor in file.tensors:
            config[setting] = True
    return config | family.settings(file, config)


def weights_of(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Weight]:
    """The weights by their names in the model, for a `configuration`. Raises UnsupportedModelError for tensors that are
    unknown: the model would not be computed without them."""
    family = family_of(file)
    weights: dict[str, Weight] = {}
    unknown = []
    for name, tensor in file.tensors.items():
        target = _target(family, name)
        if target is not None:
            shift = family.norm_shift if "norm" in name else 0.0
            weights[target] = Weight((tensor,), _order(file, family, tensor, config), shift)
        elif name not in (_FREQUENCIES, *_LONGROPE.values()) and not (
            family.experts and "_exps." in name
        ):
            unknown.append(name)
    if unknown:
        raise UnsupportedModelError(
            f"{file.path} has tensors that {file.architecture} is not known to have ({listed(unknown)}), so the model "
            "would be computed wrongly; give the checkpoint that the file was made of"
        )
    if family.experts is not None:
        weights.update(_experts(file, family.experts, config["num_hidden_layers"]))
    return weights


def _target(family: Family, name: str) -> str | None:
    """The model's name of a tensor; None if it has none."""
    modules = {**_LAYER, **family.modules}
    if (match := _OF_LAYER.fullmatch(name)) and match[2] in modules:
        module = f"model.layers.{int(match[1])}.{modules[match[2]]}"
        return module if module.endswith(".sinks") else f"{module}.{match[3]}"
    module, _, part = name.partition(".")
    return (
        f"{_MODULES[module]}.{part}" if module in _MODULES and part in ("weight", "bias") else None
    )


def _order(
    file: GgufFile, family: Family, tensor: GgufTensor, config: Mapping[str, Any]
) -> Array | None:
    match = _OF_LAYER.fullmatch(tensor.name)
    if not family.is_interleaved or match is None or match[2] not in ("attn_q", "attn_k"):
        return None
    heads = config["num_attention_heads" if match[2] == "attn_q" else "num_key_value_heads"]
    rows = tensor.shape[0]
    if rows != heads * config["head_dim"] or config["head_dim"] % 2:
        raise QsampleError(
            f"{file.path}: the tensor {tensor.name} has {rows} rows, and {heads} heads of {config['head_dim']} by the "
            "metadata; download the file again"
        )
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _experts(file: GgufFile, experts: str, layers: int) -> Iterator[tuple[str, Weight]]:
    for layer in range(layers):
        for target, sources in _EXPERTS.items():
            for part in ("weight", "bias"):
                names = [f"blk.{layer}.{source}.{part}" for source in sources]
                found = tuple(file.tensors[name] for name in names if name in file.tensors)
                if len({tensor.shape for tensor in found}) > 1 or 0 < len(found) < len(names):
                    raise QsampleError(
                        f"{file.path} has not all of {listed(names)}, of one shape; download it again"
                    )
                suffix = "" if part == "weight" else "_bias"
                if found:
                    yield (
                        f"model.layers.{layer}.mlp.experts.{target}{suffix}",
                        Weight(found, experts=experts),
                    )


def _rope(file: GgufFile, size: int, rotated: int) -> dict[str, Any]:
    """The rotary embedding, `rotated` of the `size` numbers of a head. Keys: LLM_KV_ROPE_* of llama.cpp."""
    theta = _number(file, "rope.freq_base", 1e6 if file.architecture == "gemma3" else 1e4)
    factor = _number(file, "rope.scaling.factor", file.value("rope.scale_linear", 0.0))
    kind = str(file.value("rope.scaling.type", "linear"))
    first_context = _integer(
        file, "rope.scaling.original_context_length", file.value("context_length")
    )
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if rotated != size:
        rope["partial_rotary_factor"] = rotated / size
    if any(name in file.tensors for name in _LONGROPE.values()) or kind == "longrope":
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": first_context}
        rope |= {key: _factors(file, name, rotated) for key, name in _LONGROPE.items()}
        if file.value("rope.scaling.attn_factor") is not None:
            rope["attention_factor"] = _number(file, "rope.scaling.attn_factor")
    elif kind == "yarn":
        rope |= {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": first_context,
        }
        names = {
            "yarn_beta_fast": "beta_fast",
            "yarn_beta_slow": "beta_slow",
            "yarn_attn_factor": "attention_factor",
        }
        for theirs, ours in {**names, "yarn_log_multiplier": "mscale_all_dim"}.items():
            if file.value(f"rope.scaling.{theirs}") is not None:
                rope[ours] = _number(file, f"rope.scaling.{theirs}")
        if "mscale_all_dim" in rope:
            rope["mscale"] = 1.0
    elif kind not in ("linear", "none"):
        raise UnsupportedModelError(
            f"{file.path}: its rotary embedding is scaled by {shown(kind)}, which is not read"
        )
    elif kind == "linear" and factor not in (0.0, 1.0):
        rope |= {"rope_type": "linear", "factor": factor}
    if _FREQUENCIES in file.tensors:
        if rope["rope_type"] != "default":
            raise UnsupportedModelError(
                f"{file.path}: its rotary embedding is scaled in two ways, which is not read"
            )
        rope |= _by_factors(_factors(file, _FREQUENCIES, rotated), theta, first_context)
    return rope


def _by_factors(factors: list[float], theta: float, context: int) -> dict[str, Any]:
    """Wavelengths times `factors`: those of Llama 3, if some factor gives them; otherwise any, as LongRoPE has them."""
    count = len(factors)
    wavelengths = 2 * np.pi * theta ** (np.arange(count) / count)
    first, low, high = 8192, 1.0, 4.0
    for factor in (8.0, 32.0):
        smooth = np.clip((first / wavelengths - low) / (high - low), 0, 1)
        if np.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=1e-5):
            limits = {
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": first,
            }
            return {"rope_type": "llama3", "factor": factor, **limits}
    numbers = {"factor": 1.0, "attention_factor": 1.0, "original_max_position_embeddings": context}
    return {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, **numbers}


def _factors(file: GgufFile, name: str, rotated: int) -> list[float]:
    tensor = file.tensors.get(name)
    if tensor is None or tensor.type != "F32" or tensor.shape != (rotated // 2,):
        raise QsampleError(
            f"{file.path} has no tensor {name} of {rotated // 2} F32, which its rotary embedding needs; download the "
            "file again"
        )
    factors: list[float] = file.raw(tensor).view(np.float32).reshape(-1).tolist()
    return factors


def _gemma3(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    window, layers = (
        _integer(file, "attention.sliding_window", 0, least=0),
        config["num_hidden_layers"],
    )
    period = _integer(file, "attention.sliding_window_pattern", 6)
    kinds = [
        "sliding_attention" if window and i % period else "full_attention"
        for i in range(1, layers + 1)
    ]
    local = {"rope_type": "default", "rope_theta": _number(file, "rope.freq_base_swa", 1e4)}
    # The model of 62 layers, 27B, scales by the width (llama_model_gemma3 in llama.cpp).
    scaled_by = (
        config["hidden_size"] // config["num_attention_heads"]
        if layers == 62
        else config["head_dim"]
    )
    return {
        "sliding_window": window
        or config["max_position_embeddings"],  # transformers takes no model without one
        "layer_types": kinds,
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": local,
        },
        "query_pre_attn_scalar": scaled_by,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": _number(file, "final_logit_softcapping", 0.0) or None,
    }


def _phi3(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    first = config["rope_parameters"].get(
        "original_max_position_embeddings", config["max_position_embeddings"]
    )
    window = _integer(file, "attention.sliding_window", 0, least=0)
    return {"sliding_window": window or None, "original_max_position_embeddings": first}


def _granite(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention_multiplier": _number(file, "attention.scale", 0.0) or config["head_dim"] ** -0.5,
        "embedding_multiplier": _number(file, "embedding_scale", 0.0) or 1.0,
        "residual_multiplier": _number(file, "residual_scale", 0.0) or 1.0,
        "logits_scaling": _number(file, "logit_scale", 0.0) or 1.0,
    }


def _mistral3(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    if file.value("attention.temperature_scale") is None:
        return {}
    beta = _number(file, "attention.temperature_scale")
    return {
        "model_type": "ministral3",
        "rope_parameters": {**config["rope_parameters"], "llama_4_scaling_beta": beta},
    }


def _qwen3moe(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": _integer(file, "expert_count"),
        "num_experts_per_tok": _integer(file, "expert_used_count"),
        "moe_intermediate_size": _integer(file, "expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gpt_oss(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_local_experts": _integer(file, "expert_count"),
        "num_experts_per_tok": _integer(file, "expert_used_count"),
        "intermediate_size": _integer(file, "expert_feed_forward_length"),
        "sliding_window": _integer(file, "attention.sliding_window"),
        # The limits of the model's own YaRN are not rounded, and no key says so.
        "rope_parameters": {**config["rope_parameters"], "truncate": False},
    }


FAMILIES: Final = {
    "llama": Family("llama", is_interleaved=True),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "gemma3": Family("gemma3_text", _gemma3, _GEMMA3, norm_shift=1.0),
    "mistral3": Family("mistral", _mistral3, is_interleaved=True),
    "phi3": Family("phi3", _phi3, {"ffn_up": "mlp.gate_up_proj"}),
    "granite": Family("granite", _granite, is_interleaved=True),
    "qwen3moe": Family("qwen3_moe", _qwen3moe, experts="joined"),
    "gpt-oss": Family(
        "gpt_oss",
        _gpt_oss,
        {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
        experts="alternating",
    ),
}


def _token(file: GgufFile, name: str) -> int | None:
    value = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return value if is_integer(value, 0, file.tensors[_TABLE].shape[0] - 1) else None


def _integer(file: GgufFile, name: str, default: Any = None, *, least: int = 1) -> int:
    value = file.value(name, default)
    if not is_integer(value, least, _LARGEST):
        raise _wrong(file, name, value, f"an integer >= {least}, the same for all layers")
    return value


def _number(file: GgufFile, name: str, default: float | None = None) -> float:
    value = file.value(name, default)
    if not is_number(value, 0, 1e30):
        raise _wrong(file, name, value, "a number >= 0")
    return float(value)


def _wrong(file: GgufFile, name: str, value: Any, accepted: str) -> QsampleError:
    return QsampleError(
        f"{file.path}: {file.architecture}.{name} is {shown(value)}; it must be {accepted}. Download the file again, "
        "or give the checkpoint that it was made of"
    )
