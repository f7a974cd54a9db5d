"""The metadata of a GGUF file as a configuration of transformers, and its tensors as the model's
weights.

Each architecture is a row of `FAMILIES`. The code follows llama.cpp's convert_hf_to_gguf.py, which
writes such files, and src/models, which computes them. Only NumPy is imported: a file that cannot
be read is refused before the libraries of models are loaded.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any, Final

import numpy as np

from qsample.addons.formats.gguf.file import GgufFile, GgufTensor, read_gguf
from qsample.checks import is_integer, is_number
from qsample.contract.arrays import Array
from qsample.errors import QsampleError, UnsupportedModelError, listed, shown

_MAX_INTEGER: Final = (1 << 31) - 1
_EMBEDDING: Final = "token_embd.weight"
_FREQUENCY_FACTORS: Final = "rope_freqs.weight"
# The tensors of LongRoPE's factors, by transformers' names of these.
_LONGROPE_FACTORS: Final = {
    "long_factor": "rope_factors_long.weight",
    "short_factor": "rope_factors_short.weight",
}
_LAYER_TENSOR: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_MODULES_OUTSIDE_LAYERS: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
# The modules of a layer by the names of their tensors, unless a family has others.
_LAYER_MODULES: Final = {
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
_GEMMA3_MODULES: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# The tensors that a weight of all experts of a layer is made of.
_EXPERT_TENSORS: Final = {
    "gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
    "down_proj": ("ffn_down_exps",),
}
_YARN_KEYS: Final = {
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_attn_factor": "attention_factor",
    "yarn_log_multiplier": "mscale_all_dim",
}
# Llama 3's scaling of rotations: the context of its first models, its limits, and the factors of
# its releases.
_LLAMA3_CONTEXT: Final = 8192
_LLAMA3_LOW: Final = 1.0
_LLAMA3_HIGH: Final = 4.0
_LLAMA3_FACTORS: Final = (8.0, 32.0)
_GEMMA3_27B_LAYERS: Final = 62


class ExpertLayout(Enum):
    """How transformers holds the gates and the up projections of a layer's experts in a single
    weight.

    Attributes:
        JOINED: all rows of the gate lie above all rows of the up projection.
        ALTERNATING: the rows of both take turns, and the weight is transposed.
    """

    JOINED = auto()
    ALTERNATING = auto()


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture of llama.cpp as transformers has it.

    Attributes:
        model_type: the model_type of the configuration.
        settings: a function of the file and the settings of all families, which gives the family's
            other settings.
        modules: modules of a layer by the names of their tensors, besides `_LAYER_MODULES` or in
            their place.
        is_interleaved: whether the halves of a rotated head take turns in the rows of queries and
            keys.
        norm_shift: the number that the file adds to the weights of norms.
        experts: the layout of the experts' weights; None for a family without experts.
    """

    model_type: str
    settings: Callable[[GgufFile, Mapping[str, Any]], dict[str, Any]] = lambda file, config: {}
    modules: Mapping[str, str] = field(default_factory=dict)
    is_interleaved: bool = False
    norm_shift: float = 0.0
    experts: ExpertLayout | None = None


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of the model.

    Attributes:
        tensors: the tensors of the file that it is made of: one, or the gate and up projections of
            experts.
        order: the tensor's row of each row of the weight; None for the tensor's own order.
        shift: the number that is subtracted from each weight.
        experts: the layout, for the weights of experts; otherwise None.
    """

    tensors: tuple[GgufTensor, ...]
    order: Array | None = None
    shift: float = 0.0
    experts: ExpertLayout | None = None


def read_model(path: Path) -> GgufFile:
    """The header of a file whose model can be read. Raises as `read_gguf` and `configuration`
    do."""
    file = read_gguf(path)
    configuration(file)
    return file


def describe_gguf(path: Path) -> dict[str, Any]:
    """What a file is, JSON-ready: the model's kind and sizes, the numbers of weights by type, and
    why the model cannot be read, or None. Raises as `read_gguf` does."""
    file = read_gguf(path)
    refusal = None
    try:
        weights_of(file, configuration(file))
    except QsampleError as error:
        refusal = str(error)
    return {
        "architecture": file.metadata.get("general.architecture"),
        "name": file.metadata.get("general.name"),
        "block_count": file.value("block_count"),
        "embedding_length": file.value("embedding_length"),
        "context_length": file.value("context_length"),
        "weights": dict(weights_by_type(file)),
        "refusal": refusal,
    }


def weights_by_type(file: GgufFile) -> Counter[str]:
    """The numbers of weights by the types of their tensors."""
    types = Counter[str]()
    for tensor in file.tensors.values():
        types[tensor.type] += math.prod(tensor.shape)
    return types


def family_of(file: GgufFile) -> Family:
    """The family of a file's architecture. Raises UnsupportedModelError for an architecture that is
    not read."""
    family = FAMILIES.get(file.architecture)
    if family is None:
        raise UnsupportedModelError(
            f"{file.path} is of the architecture {shown(file.architecture)}; {', '.join(FAMILIES)} are read from GGUF. "
            "Give the checkpoint that the file was made of"
        )
    return family


def configuration(file: GgufFile) -> dict[str, Any]:
    """The configuration as in a config.json, without the tokens that end a text.

    Raises:
        QsampleError: for metadata that are missing or wrong.
        UnsupportedModelError: for a model that is computed in another way.
    """
    family = family_of(file)
    embedding = file.tensors.get(_EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise QsampleError(f"{file.path} has no matrix {_EMBEDDING}; download it again")
    heads = _integer(file, "attention.head_count")
    width = _integer(file, "embedding_length")
    head_dim = _integer(file, "attention.key_length", width // heads)
    rotated = _integer(file, "rope.dimension_count", head_dim)
    layers = _integer(file, "block_count")
    if layers > len(file.tensors):
        raise QsampleError(
            f"{file.path} has {len(file.tensors)} tensors for {layers} layers; download it again"
        )
    values_differ = _integer(file, "attention.value_length", head_dim) != head_dim
    if values_differ or (rotated != head_dim and family.model_type != "phi3"):
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
        "vocab_size": embedding.shape[0],
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _integer(file, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": _integer(
            file, "feed_forward_length", file.value("expert_feed_forward_length")
        ),
        "max_position_embeddings": _integer(file, "context_length"),
        "rms_norm_eps": _number(file, "attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(file, head_dim, rotated),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": _token(file, "bos"),
        "pad_token_id": _token(file, "padding"),
    }
    if "blk.0.attn_q.bias" in file.tensors:
        config["attention_bias"] = True
    if "blk.0.ffn_gate.bias" in file.tensors:
        config["mlp_bias"] = True
    return config | family.settings(file, config)


def weights_of(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Weight]:
    """The weights by their names in the model.

    Args:
        file: the file.
        config: the file's `configuration`.

    Raises:
        UnsupportedModelError: for tensors that are unknown, because the model would be computed
            without them.
    """
    family = family_of(file)
    weights: dict[str, Weight] = {}
    unknown = []
    for name, tensor in file.tensors.items():
        target = _target(family, name)
        if target is not None:
            shift = family.norm_shift if "norm" in name else 0.0
            weights[target] = Weight((tensor,), _order(file, family, tensor, config), shift)
        elif not _is_read_elsewhere(family, name):
            unknown.append(name)
    if unknown:
        raise UnsupportedModelError(
            f"{file.path} has tensors that {file.architecture} is not known to have ({listed(unknown)}), so the model "
            "would be computed wrongly; give the checkpoint that the file was made of"
        )
    if family.experts is not None:
        weights.update(_experts(file, family.experts, config["num_hidden_layers"]))
    return weights


def _is_read_elsewhere(family: Family, name: str) -> bool:
    """Whether a tensor belongs to the rotary embedding or to the experts."""
    if name == _FREQUENCY_FACTORS or name in _LONGROPE_FACTORS.values():
        return True
    return family.experts is not None and "_exps." in name


def _target(family: Family, name: str) -> str | None:
    """The model's name of a tensor; None if it has none."""
    modules = {**_LAYER_MODULES, **family.modules}
    match = _LAYER_TENSOR.fullmatch(name)
    if match is not None and match[2] in modules:
        module = f"model.layers.{int(match[1])}.{modules[match[2]]}"
        return module if module.endswith(".sinks") else f"{module}.{match[3]}"
    stem, _, part = name.partition(".")
    if stem in _MODULES_OUTSIDE_LAYERS and part in ("weight", "bias"):
        return f"{_MODULES_OUTSIDE_LAYERS[stem]}.{part}"
    return None


def _order(
    file: GgufFile, family: Family, tensor: GgufTensor, config: Mapping[str, Any]
) -> Array | None:
    """The tensor's row of each row of a weight, if the rows of its heads are interleaved; otherwise
    None."""
    match = _LAYER_TENSOR.fullmatch(tensor.name)
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


def _experts(file: GgufFile, layout: ExpertLayout, layers: int) -> Iterator[tuple[str, Weight]]:
    """The names and weights of the experts of all layers."""
    for layer in range(layers):
        for target, stems in _EXPERT_TENSORS.items():
            for part, suffix in (("weight", ""), ("bias", "_bias")):
                names = [f"blk.{layer}.{stem}.{part}" for stem in stems]
                found = tuple(file.tensors[name] for name in names if name in file.tensors)
                if not found:
                    continue
                shapes = {tensor.shape for tensor in found}
                if len(found) < len(names) or len(shapes) > 1:
                    raise QsampleError(
                        f"{file.path} has not all of {listed(names)}, of one shape; download it again"
                    )
                name = f"model.layers.{layer}.mlp.experts.{target}{suffix}"
                yield name, Weight(found, experts=layout)


def _rope(file: GgufFile, head_dim: int, rotated: int) -> dict[str, Any]:
    """The rotary embedding as transformers' rope_parameters (LLM_KV_ROPE_* of llama.cpp).

    Args:
        file: the file.
        head_dim: the numbers of a head.
        rotated: how many of these are rotated.
    """
    rope = _scaled_rope(file, rotated)
    rope["rope_theta"] = _rope_theta(file)
    if rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    if _FREQUENCY_FACTORS in file.tensors:
        if rope["rope_type"] != "default":
            raise UnsupportedModelError(
                f"{file.path}: its rotary embedding is scaled in two ways, which is not read"
            )
        factors = _factors(file, _FREQUENCY_FACTORS, rotated)
        rope |= _rope_of_factors(factors, rope["rope_theta"], _first_context(file))
    return rope


def _rope_theta(file: GgufFile) -> float:
    return _number(file, "rope.freq_base", 1e6 if file.architecture == "gemma3" else 1e4)


def _first_context(file: GgufFile) -> int:
    """The context length before the rotary embedding was scaled."""
    whole = file.value("context_length")
    return _integer(file, "rope.scaling.original_context_length", whole)


def _scaled_rope(file: GgufFile, rotated: int) -> dict[str, Any]:
    """The rope_type, and the parameters of its scaling."""
    scaling = str(file.value("rope.scaling.type", "linear"))
    first_context = _first_context(file)
    factor = _number(file, "rope.scaling.factor", file.value("rope.scale_linear", 0.0))
    has_longrope_factors = any(name in file.tensors for name in _LONGROPE_FACTORS.values())
    if has_longrope_factors or scaling == "longrope":
        return _longrope(file, rotated, first_context)
    if scaling == "yarn":
        return _yarn(file, factor, first_context)
    if scaling not in ("linear", "none"):
        raise UnsupportedModelError(
            f"{file.path}: its rotary embedding is scaled by {shown(scaling)}, which is not read"
        )
    if scaling == "linear" and factor not in (0.0, 1.0):
        return {"rope_type": "linear", "factor": factor}
    return {"rope_type": "default"}


def _longrope(file: GgufFile, rotated: int, first_context: int) -> dict[str, Any]:
    rope: dict[str, Any] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": first_context,
    }
    for key, tensor in _LONGROPE_FACTORS.items():
        rope[key] = _factors(file, tensor, rotated)
    if file.value("rope.scaling.attn_factor") is not None:
        rope["attention_factor"] = _number(file, "rope.scaling.attn_factor")
    return rope


def _yarn(file: GgufFile, factor: float, first_context: int) -> dict[str, Any]:
    rope: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": first_context,
    }
    for theirs, ours in _YARN_KEYS.items():
        if file.value(f"rope.scaling.{theirs}") is not None:
            rope[ours] = _number(file, f"rope.scaling.{theirs}")
    if "mscale_all_dim" in rope:
        rope["mscale"] = 1.0
    return rope


def _rope_of_factors(factors: list[float], theta: float, context: int) -> dict[str, Any]:
    """Wavelengths that are multiplied by factors: Llama 3's if one of its scalings gives these
    factors, otherwise any factors, in the form of LongRoPE."""
    count = len(factors)
    wavelengths = 2 * np.pi * theta ** (np.arange(count) / count)
    position = (_LLAMA3_CONTEXT / wavelengths - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    smooth = np.clip(position, 0, 1)
    for factor in _LLAMA3_FACTORS:
        if np.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=1e-5):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LLAMA3_LOW,
                "high_freq_factor": _LLAMA3_HIGH,
                "original_max_position_embeddings": _LLAMA3_CONTEXT,
            }
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": context,
    }


def _factors(file: GgufFile, name: str, rotated: int) -> list[float]:
    """The numbers of a tensor of factors, one for each rotated pair."""
    tensor = file.tensors.get(name)
    if tensor is None or tensor.type != "F32" or tensor.shape != (rotated // 2,):
        raise QsampleError(
            f"{file.path} has no tensor {name} of {rotated // 2} F32, which its rotary embedding needs; download the "
            "file again"
        )
    factors: list[float] = file.raw(tensor).view(np.float32).reshape(-1).tolist()
    return factors


# The functions below give the settings of a family, from a file and the settings of all families.


def _gemma3(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    window = _integer(file, "attention.sliding_window", 0, least=0)
    period = _integer(file, "attention.sliding_window_pattern", 6)
    layer_types = ["full_attention"] * layers
    if window:
        for layer in range(layers):
            if (layer + 1) % period:
                layer_types[layer] = "sliding_attention"
    local_rope = {"rope_type": "default", "rope_theta": _number(file, "rope.freq_base_swa", 1e4)}
    query_scalar = config["head_dim"]
    if layers == _GEMMA3_27B_LAYERS:  # llama_model_gemma3 in llama.cpp
        query_scalar = config["hidden_size"] // config["num_attention_heads"]
    return {
        # transformers accepts no model without a window.
        "sliding_window": window or config["max_position_embeddings"],
        "layer_types": layer_types,
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": local_rope,
        },
        "query_pre_attn_scalar": query_scalar,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": _number(file, "final_logit_softcapping", 0.0) or None,
    }


def _phi3(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    whole = config["max_position_embeddings"]
    window = _integer(file, "attention.sliding_window", 0, least=0)
    return {
        "sliding_window": window or None,
        "original_max_position_embeddings": config["rope_parameters"].get(
            "original_max_position_embeddings", whole
        ),
    }


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
    "gemma3": Family("gemma3_text", _gemma3, _GEMMA3_MODULES, norm_shift=1.0),
    "mistral3": Family("mistral", _mistral3, is_interleaved=True),
    "phi3": Family("phi3", _phi3, {"ffn_up": "mlp.gate_up_proj"}),
    "granite": Family("granite", _granite, is_interleaved=True),
    "qwen3moe": Family("qwen3_moe", _qwen3moe, experts=ExpertLayout.JOINED),
    "gpt-oss": Family(
        "gpt_oss",
        _gpt_oss,
        {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
        experts=ExpertLayout.ALTERNATING,
    ),
}


def _token(file: GgufFile, name: str) -> int | None:
    """The id of a special token; None if there is no such id in the vocabulary."""
    rows = file.tensors[_EMBEDDING].shape[0]
    ids = [number for number in file.special_ids(f"{name}_token_id") if number < rows]
    return ids[0] if ids else None


def _integer(file: GgufFile, name: str, default: Any = None, *, least: int = 1) -> int:
    """An integer among the architecture's metadata. Raises QsampleError for another value, or one
    below `least`."""
    value = file.value(name, default)
    if not is_integer(value, least, _MAX_INTEGER):
        raise _wrong(file, name, value, f"an integer >= {least}, the same for all layers")
    return value


def _number(file: GgufFile, name: str, default: float | None = None) -> float:
    """A number, 0 or more, among the architecture's metadata. Raises QsampleError for another
    value."""
    value = file.value(name, default)
    if not is_number(value, 0, 1e30):
        raise _wrong(file, name, value, "a number >= 0")
    return float(value)


def _wrong(file: GgufFile, name: str, value: Any, accepted: str) -> QsampleError:
    """The error for a value of metadata. accepted: the accepted values, behind "it must be"."""
    return QsampleError(
        f"{file.path}: {file.architecture}.{name} is {shown(value)}; it must be {accepted}. Download the file again, "
        "or give the checkpoint that it was made of"
    )
