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
_LAYER_EMBEDDINGS: Final = "per_layer_token_embd.weight"
_FREQUENCY_FACTORS: Final = "rope_freqs.weight"
# The tensors of LongRoPE's factors, by transformers' names of these.
_LONGROPE_FACTORS: Final = {
    "long_factor": "rope_factors_long.weight",
    "short_factor": "rope_factors_short.weight",
}
# The factor of a pair that is not rotated; each wavelength is multiplied by it.
_NO_ROTATION: Final = 1e30
_LAYER_TENSOR: Final = re.compile(r"blk\.(\d+)\.(.+)")
_MODULES_OUTSIDE_LAYERS: Final = {
    "token_embd": "model.embed_tokens",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
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
_GEMMA4_MODULES: Final = {
    **_GEMMA3_MODULES,
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp": "router.proj",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
_GEMMA4_PARAMETERS: Final = {
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
_QWEN35_MODULES: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_QWEN35_PARAMETERS: Final = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
# The norms whose weights no family shifts.
_UNSHIFTED_NORMS: Final = frozenset({"ssm_norm.weight"})
# The tensor that holds -exp of its weight.
_NEGATED_EXPONENTIAL: Final = "ssm_a"
# The axes of length 1 that tensors may lack, by their names behind the layer.
_LENGTH_1_AXES: Final = {"ssm_conv1d.weight": 1, "ffn_gate_inp_shexp.weight": 0}
# Setting → the tensors of the biases that it adds to a model.
_BIASES: Final = {
    "attention_bias": re.compile(r"blk\.\d+\.attn_(q|k|v|output)\.bias"),
    "mlp_bias": re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.bias"),
}
# The tensors of the keys and values that a layer has unless it takes those of another layer.
_KEY_VALUE_TENSORS: Final = re.compile(r"attn_(k|v|k_norm)\.(weight|bias)")
# The tensors that a weight of all experts of a layer is made of.
_EXPERT_TENSORS: Final = {
    "gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
    "down_proj": ("ffn_down_exps",),
}
_JOINED_EXPERTS: Final = "ffn_gate_up_exps"
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
class Order:
    """The order of the rows, or of the inputs, of a weight.

    Attributes:
        places: the tensor's row, or input, of each one of the weight.
        axis: 0 for rows, 1 for inputs.
    """

    places: Array
    axis: int = 0


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture of llama.cpp as transformers has it.

    Attributes:
        model_type: the model_type of the configuration.
        settings: a function of the file and the settings of all families, which gives the family's
            other settings.
        modules: modules of a layer by the names of their tensors, besides `_LAYER_MODULES` or in
            their place.
        parameters: weights of a layer by the whole names of their tensors, which a name of a module
            and "weight" or "bias" do not give.
        order: a function of the file, a tensor's name behind its layer, the tensor and the
            configuration, which gives the order of the weight; None for the tensor's own order.
        norm_shift: the number that the file adds to the weights of norms.
        experts: the layout of the experts' weights; None for a family without experts.
        expert_module: the module of a layer that holds the experts.
        has_unrotated_part: whether a part of each head may stay without rotation.
        has_optional_biases: whether a file may have only some of the biases; the others are zero, as
            llama.cpp loads it.
        varying: the keys whose values may differ from layer to layer. The settings of all families
            have the first layer's.
    """

    model_type: str
    settings: Callable[[GgufFile, Mapping[str, Any]], dict[str, Any]] = lambda file, config: {}
    modules: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    order: Callable[[GgufFile, str, GgufTensor, Mapping[str, Any]], Order | None] = (
        lambda file, name, tensor, config: None
    )
    norm_shift: float = 0.0
    experts: ExpertLayout | None = None
    expert_module: str = "mlp.experts"
    has_unrotated_part: bool = False
    has_optional_biases: bool = False
    varying: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of the model.

    Attributes:
        tensors: the tensors of the file that it is made of: one, or the gate and up projections of
            experts.
        order: the order of its rows or inputs; None for the tensor's own order.
        shift: the number that is subtracted from each weight.
        experts: the layout, for the weights of experts; otherwise None.
        is_logarithm: whether it is the logarithm of the tensor's negated numbers.
        shape: the shape, if it has an axis of length 1 that the tensor lacks; otherwise None.
    """

    tensors: tuple[GgufTensor, ...]
    order: Order | None = None
    shift: float = 0.0
    experts: ExpertLayout | None = None
    is_logarithm: bool = False
    shape: tuple[int, ...] | None = None


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
    heads = _of_all_layers(file, "attention.head_count")
    width = _integer(file, "embedding_length")
    head_dim = _integer(file, "attention.key_length", width // heads)
    rotated = _integer(file, "rope.dimension_count", head_dim)
    values_differ = _integer(file, "attention.value_length", head_dim) != head_dim
    if values_differ or (rotated != head_dim and not family.has_unrotated_part):
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
        "num_hidden_layers": len(_blocks(file)) - len(prediction_layers(file)),
        "num_attention_heads": heads,
        "num_key_value_heads": _of_all_layers(file, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": _of_all_layers(
            file, "feed_forward_length", file.value("expert_feed_forward_length")
        ),
        "max_position_embeddings": _integer(file, "context_length"),
        "rms_norm_eps": _number(file, "attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(file, head_dim, rotated),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": _token(file, "bos"),
        "pad_token_id": _token(file, "padding"),
    }
    for flag, pattern in _BIASES.items():
        if any(pattern.fullmatch(name) for name in file.tensors):
            config[flag] = True
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
        if _is_unused(file, name, config) or _is_read_elsewhere(family, name):
            continue
        if target is None:
            unknown.append(name)
        else:
            weights[target] = _weight(file, family, tensor, config)
    if unknown:
        raise UnsupportedModelError(
            f"{file.path} has tensors that {file.architecture} is not known to have ({listed(unknown)}), so the model "
            "would be computed wrongly; give the checkpoint that the file was made of"
        )
    if family.experts is not None:
        weights.update(_experts(file, family, config["num_hidden_layers"]))
    return weights


def prediction_layers(file: GgufFile) -> range:
    """The numbers of the last layers, which guess further tokens (multi-token prediction). They are
    no part of the model as transformers has it."""
    layers = _blocks(file)
    count = _integer(file, "nextn_predict_layers", 0, least=0)
    if count >= len(layers):
        raise _wrong(file, "nextn_predict_layers", count, f"below {len(layers)}, the layers")
    return layers[len(layers) - count :]


def _blocks(file: GgufFile) -> range:
    """The numbers of all layers."""
    layers = _integer(file, "block_count")
    if layers > len(file.tensors):
        raise QsampleError(
            f"{file.path} has {len(file.tensors)} tensors for {layers} layers; download it again"
        )
    return range(layers)


def _is_unused(file: GgufFile, name: str, config: Mapping[str, Any]) -> bool:
    """Whether a tensor belongs to a layer that guesses further tokens, or to keys and values in
    whose place a layer takes those of an earlier layer."""
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None:
        return False
    layer = int(match[1])
    layers = config["num_hidden_layers"]
    shares = layers - config.get("num_kv_shared_layers", 0) <= layer < layers
    has_key_values = _KEY_VALUE_TENSORS.fullmatch(match[2]) is not None
    return layer in prediction_layers(file) or (shares and has_key_values)


def _is_read_elsewhere(family: Family, name: str) -> bool:
    """Whether a tensor belongs to the rotary embedding or to the experts."""
    if name == _FREQUENCY_FACTORS or name in _LONGROPE_FACTORS.values():
        return True
    return family.experts is not None and re.search(r"_exps\.(weight|bias)$", name) is not None


def _target(family: Family, name: str) -> str | None:
    """The model's name of a tensor; None if it has none."""
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None:
        return _parameter(_MODULES_OUTSIDE_LAYERS, name)
    parameter = family.parameters.get(match[2])
    if parameter is None:
        parameter = _parameter({**_LAYER_MODULES, **family.modules}, match[2])
    return None if parameter is None else f"model.layers.{int(match[1])}.{parameter}"


def _parameter(modules: Mapping[str, str], name: str) -> str | None:
    """The name of a tensor with its module's name in transformers; None if that is unknown."""
    stem, _, part = name.partition(".")
    return f"{modules[stem]}.{part}" if stem in modules and part in ("weight", "bias") else None


def _weight(
    file: GgufFile, family: Family, tensor: GgufTensor, config: Mapping[str, Any]
) -> Weight:
    """The weight that a tensor outside experts is."""
    match = _LAYER_TENSOR.fullmatch(tensor.name)
    name = tensor.name if match is None else match[2]
    has_shift = "norm" in name and name not in _UNSHIFTED_NORMS
    shape = None
    axis = _LENGTH_1_AXES.get(name)
    if axis is not None and len(tensor.shape) == 1 + axis:
        shape = (*tensor.shape[:axis], 1, *tensor.shape[axis:])
    return Weight(
        (tensor,),
        family.order(file, name, tensor, config),
        shift=family.norm_shift if has_shift else 0.0,
        is_logarithm=name == _NEGATED_EXPONENTIAL,
        shape=shape,
    )


def _interleaved(
    file: GgufFile, name: str, tensor: GgufTensor, config: Mapping[str, Any]
) -> Order | None:
    """The order of queries and keys whose rotated halves of a head take turns in the file."""
    if name not in (
        "attn_q.weight",
        "attn_q.bias",
        "attn_k.weight",
        "attn_k.bias",
    ):
        return None
    heads = config["num_attention_heads" if name.startswith("attn_q") else "num_key_value_heads"]
    rows = tensor.shape[0]
    if rows != heads * config["head_dim"] or config["head_dim"] % 2:
        raise _not_fitting(file, tensor, 0, f"{heads} heads of {config['head_dim']}")
    return Order(np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1))


@dataclass(frozen=True, slots=True)
class _Values:
    """Where a tensor of linear attention has its values.

    Attributes:
        has_head_dim: whether a value has a number for each number of its head, or one for all.
        follows_keys: whether queries and keys lie in front of the values.
        axis: 0 for rows, 1 for inputs.
    """

    has_head_dim: bool
    follows_keys: bool = False
    axis: int = 0


_VALUES: Final = {
    "attn_qkv": _Values(has_head_dim=True, follows_keys=True),
    "ssm_conv1d": _Values(has_head_dim=True, follows_keys=True),
    "attn_gate": _Values(has_head_dim=True),
    "ssm_beta": _Values(has_head_dim=False),
    "ssm_alpha": _Values(has_head_dim=False),
    "ssm_a": _Values(has_head_dim=False),
    "ssm_dt": _Values(has_head_dim=False),
    "ssm_out": _Values(has_head_dim=True, axis=1),
}


def _tiled(
    file: GgufFile, name: str, tensor: GgufTensor, config: Mapping[str, Any]
) -> Order | None:
    """The order of the values of linear attention. All values of a key lie together in
    transformers; the file has the first value of each key, then the second of each, and so on."""
    values = _VALUES.get(name.partition(".")[0])
    heads = config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"]
    if values is None or heads == keys:
        return None
    size = config["linear_value_head_dim"] if values.has_head_dim else 1
    before = 2 * keys * config["linear_key_head_dim"] if values.follows_keys else 0
    axis = values.axis
    if tensor.shape[axis] != before + heads * size:
        raise _not_fitting(file, tensor, axis, f"{heads} heads of {size} behind {before}")
    places = np.arange(heads * size).reshape(heads // keys, keys, size).swapaxes(0, 1).reshape(-1)
    return Order(np.concatenate([np.arange(before), before + places]), axis)


def _not_fitting(file: GgufFile, tensor: GgufTensor, axis: int, wanted: str) -> QsampleError:
    """The error for a tensor whose rows or inputs are not those of the metadata. wanted: theirs."""
    what = ("rows", "inputs")[axis]
    return QsampleError(
        f"{file.path}: the tensor {tensor.name} has {tensor.shape[axis]} {what}, and {wanted} by the metadata; "
        "download the file again"
    )


def _experts(file: GgufFile, family: Family, layers: int) -> Iterator[tuple[str, Weight]]:
    """The names and weights of the experts of all layers."""
    for layer in range(layers):
        for target, stems in _EXPERT_TENSORS.items():
            for part, suffix in (("weight", ""), ("bias", "_bias")):
                names = [f"blk.{layer}.{stem}.{part}" for stem in stems]
                joined = f"blk.{layer}.{_JOINED_EXPERTS}.{part}"
                if len(stems) == 2 and joined in file.tensors:
                    names = [joined]
                found = tuple(file.tensors[name] for name in names if name in file.tensors)
                if not found:
                    continue
                shapes = {tensor.shape for tensor in found}
                if len(found) < len(names) or len(shapes) > 1:
                    raise QsampleError(
                        f"{file.path} has not all of {listed(names)}, of one shape; download it again"
                    )
                name = f"model.layers.{layer}.{family.expert_module}.{target}{suffix}"
                yield name, Weight(found, experts=family.experts)


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
    factors, those of which the last do not rotate, or any others, in the form of LongRoPE."""
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
    rotated = factors.count(1.0)
    share = rotated / count
    is_share = int(share * 2 * count // 2) == rotated  # as transformers rounds it
    if is_share and np.allclose(factors, [1.0] * rotated + [_NO_ROTATION] * (count - rotated)):
        return {"rope_type": "proportional", "partial_rotary_factor": share}
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
    if window > 0:
        for layer in range(layers):
            if (layer + 1) % period != 0:
                layer_types[layer] = "sliding_attention"
    local_rope = {"rope_type": "default", "rope_theta": _number(file, "rope.freq_base_swa", 1e4)}
    query_scalar = config["head_dim"]
    if layers == _GEMMA3_27B_LAYERS:  # llama_model_gemma3 in llama.cpp
        query_scalar = config["hidden_size"] // config["num_attention_heads"]
    return {
        # transformers accepts no model without a window.
        "sliding_window": config["max_position_embeddings"] if window == 0 else window,
        "layer_types": layer_types,
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": local_rope,
        },
        "query_pre_attn_scalar": query_scalar,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": _nonzero(file, "final_logit_softcapping", None),
    }


def _phi3(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    whole = config["max_position_embeddings"]
    window = _integer(file, "attention.sliding_window", 0, least=0)
    return {
        "sliding_window": None if window == 0 else window,
        "original_max_position_embeddings": config["rope_parameters"].get(
            "original_max_position_embeddings", whole
        ),
    }


def _granite(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention_multiplier": _nonzero(file, "attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": _nonzero(file, "embedding_scale", 1.0),
        "residual_multiplier": _nonzero(file, "residual_scale", 1.0),
        "logits_scaling": _nonzero(file, "logit_scale", 1.0),
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
        **_sizes_of_experts(file),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _sizes_of_experts(file: GgufFile) -> dict[str, Any]:
    return {
        "num_experts": _integer(file, "expert_count"),
        "num_experts_per_tok": _of_all_layers(file, "expert_used_count"),
        "moe_intermediate_size": _of_all_layers(file, "expert_feed_forward_length"),
    }


def _qwen35(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    width = _integer(file, "ssm.inner_size")
    heads = _integer(file, "ssm.time_step_rank")
    keys = _integer(file, "ssm.group_count")
    if width % heads != 0 or heads % keys != 0:
        raise QsampleError(
            f"{file.path} has {heads} heads of values for {keys} of keys, {width} numbers in all; download it again"
        )
    period = _integer(file, "full_attention_interval", 4)
    regular = [(layer + 1) % period != 0 for layer in _blocks(file)]
    is_linear = _truths(file, "attention.recurrent_layers", regular)
    rotated = _integer(file, "rope.dimension_count", config["head_dim"])
    return {
        "layer_types": ["linear_attention" if linear else "full_attention" for linear in is_linear],
        "linear_conv_kernel_dim": _integer(file, "ssm.conv_kernel"),
        "linear_key_head_dim": _integer(file, "ssm.state_size"),
        "linear_value_head_dim": width // heads,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": heads,
        # transformers has another default than all.
        "rope_parameters": config["rope_parameters"]
        | {"partial_rotary_factor": rotated / config["head_dim"]},
    }


def _qwen35moe(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_qwen35(file, config),
        **_sizes_of_experts(file),
        "shared_expert_intermediate_size": _integer(
            file, "expert_shared_feed_forward_length", config["intermediate_size"]
        ),
    }


def _gemma4(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    slides = _truths(file, "attention.sliding_window_pattern")
    shared = _integer(file, "attention.shared_kv_layers", 0, least=0)
    key_values = _by_layer(file, "attention.head_count_kv", config["num_attention_heads"])
    widths = _by_layer(file, "feed_forward_length")
    is_wide = widths[-1] > widths[0]
    wanted_widths = widths[:1] * (layers - shared) + [widths[0] * (2 if is_wide else 1)] * shared
    local = {heads for heads, is_local in zip(key_values, slides, strict=True) if is_local}
    if slides[-1] or shared >= layers or widths != wanted_widths or len(local) > 1:
        raise UnsupportedModelError(
            f"{file.path} has other layers than Gemma 4: the last one must see all tokens, the layers that see a "
            "window must have equal heads, and only layers with shared keys may be wider, twice. Give the "
            "checkpoint that the file was made of"
        )
    local_dim = _integer(file, "attention.key_length_swa", config["head_dim"])
    if _integer(file, "rope.dimension_count_swa", local_dim) != local_dim:
        raise UnsupportedModelError(
            f"{file.path} has heads in windows that are rotated in part, which is not read"
        )
    return {
        **_gemma4_embeddings(file),
        **_gemma4_experts(file),
        "layer_types": [
            "sliding_attention" if is_local else "full_attention" for is_local in slides
        ],
        "sliding_window": _integer(file, "attention.sliding_window"),
        "head_dim": local_dim,
        "num_key_value_heads": min(local, default=key_values[0]),
        "per_layer_config": {
            layer: {"head_dim": config["head_dim"], "num_key_value_heads": heads}
            for layer, heads in enumerate(key_values)
            if not slides[layer]
        },
        "attention_k_eq_v": any(
            f"blk.{layer}.attn_v.weight" not in file.tensors
            for layer in range(layers - shared)
            if not slides[layer]
        ),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": is_wide,
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": _number(file, "rope.freq_base_swa", 1e4),
            },
        },
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": _nonzero(file, "final_logit_softcapping", None),
    }


def _gemma4_embeddings(file: GgufFile) -> dict[str, Any]:
    """The settings of the embeddings that each layer has of its own."""
    size = _integer(file, "embedding_length_per_layer_input", 0, least=0)
    table = file.tensors.get(_LAYER_EMBEDDINGS)
    if size != 0 and table is None:
        raise QsampleError(f"{file.path} has no tensor {_LAYER_EMBEDDINGS}; download it again")
    settings = {"hidden_size_per_layer_input": size}
    if table is not None:
        settings["vocab_size_per_layer_input"] = table.shape[0]
    return settings


def _gemma4_experts(file: GgufFile) -> dict[str, Any]:
    if _integer(file, "expert_count", 0, least=0) == 0:
        return {}
    sizes = _sizes_of_experts(file)
    return {"enable_moe_block": True, "top_k_experts": sizes.pop("num_experts_per_tok"), **sizes}


def _gpt_oss(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_local_experts": _integer(file, "expert_count"),
        "num_experts_per_tok": _of_all_layers(file, "expert_used_count"),
        "intermediate_size": _of_all_layers(file, "expert_feed_forward_length"),
        "sliding_window": _integer(file, "attention.sliding_window"),
        # The limits of the model's own YaRN are not rounded, and no key says so.
        "rope_parameters": {**config["rope_parameters"], "truncate": False},
    }


FAMILIES: Final = {
    "llama": Family("llama", order=_interleaved, has_optional_biases=True),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "gemma3": Family("gemma3_text", _gemma3, _GEMMA3_MODULES, norm_shift=1.0),
    "mistral3": Family("mistral", _mistral3, order=_interleaved),
    "phi3": Family("phi3", _phi3, {"ffn_up": "mlp.gate_up_proj"}, has_unrotated_part=True),
    "granite": Family("granite", _granite, order=_interleaved, has_optional_biases=True),
    "qwen3moe": Family("qwen3_moe", _qwen3moe, experts=ExpertLayout.JOINED),
    "gpt-oss": Family(
        "gpt_oss",
        _gpt_oss,
        {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
        {"attn_sinks.weight": "self_attn.sinks"},
        experts=ExpertLayout.ALTERNATING,
    ),
    "qwen35": Family(
        "qwen3_5_text",
        _qwen35,
        _QWEN35_MODULES,
        _QWEN35_PARAMETERS,
        _tiled,
        norm_shift=1.0,
        has_unrotated_part=True,
    ),
    "qwen35moe": Family(
        "qwen3_5_moe_text",
        _qwen35moe,
        _QWEN35_MODULES,
        _QWEN35_PARAMETERS,
        _tiled,
        norm_shift=1.0,
        experts=ExpertLayout.JOINED,
        has_unrotated_part=True,
    ),
    "gemma4": Family(
        "gemma4_text",
        _gemma4,
        _GEMMA4_MODULES,
        _GEMMA4_PARAMETERS,
        experts=ExpertLayout.JOINED,
        expert_module="experts",
        varying=frozenset({"attention.head_count_kv", "feed_forward_length"}),
    ),
}


def _token(file: GgufFile, name: str) -> int | None:
    """The id of a special token; None if there is no such id in the vocabulary."""
    rows = file.tensors[_EMBEDDING].shape[0]
    ids = [number for number in file.special_ids(f"{name}_token_id") if number < rows]
    return ids[0] if ids else None


def _of_all_layers(file: GgufFile, name: str, default: Any = None) -> int:
    """An integer that all layers have. Raises UnsupportedModelError if they have different ones,
    unless the family knows what these mean."""
    values = _by_layer(file, name, default)
    if len(set(values)) > 1 and name not in family_of(file).varying:
        raise UnsupportedModelError(
            f"{file.path}: {file.architecture}.{name} is {shown(values)}; it must be the same for all layers. Give the "
            "checkpoint that the file was made of"
        )
    return values[0]


def _by_layer(file: GgufFile, name: str, default: Any = None) -> list[int]:
    """The integers of the model's layers: the metadata have one for all of them, or a list. Raises
    QsampleError for other values."""
    blocks = len(_blocks(file))
    stated = file.value(name, default)
    values = stated if isinstance(stated, list) else [stated] * blocks
    are_integers = all(is_integer(value, 1, _MAX_INTEGER) for value in values)
    if len(values) != blocks or not are_integers:
        raise _wrong(
            file, name, stated, f"an integer >= 1, or {blocks} of them, one for each layer"
        )
    return values[: blocks - len(prediction_layers(file))]


def _truths(file: GgufFile, name: str, default: list[bool] | None = None) -> list[bool]:
    """A truth value for each of the model's layers. Raises QsampleError for other values."""
    blocks = len(_blocks(file))
    values = file.value(name, default)
    are_truths = isinstance(values, list) and all(isinstance(value, bool) for value in values)
    if not are_truths or len(values) != blocks:
        raise _wrong(file, name, values, f"{blocks} truth values, one for each layer")
    return list(values[: blocks - len(prediction_layers(file))])


def _integer(file: GgufFile, name: str, default: Any = None, *, least: int = 1) -> int:
    """An integer among the architecture's metadata. Raises QsampleError for another value, or one
    below `least`."""
    value = file.value(name, default)
    if not is_integer(value, least, _MAX_INTEGER):
        raise _wrong(file, name, value, f"an integer >= {least}")
    return value


def _number(file: GgufFile, name: str, default: float | None = None) -> float:
    """A number, 0 or more, among the architecture's metadata. Raises QsampleError for another
    value."""
    value = file.value(name, default)
    if not is_number(value, 0, 1e30):
        raise _wrong(file, name, value, "a number >= 0")
    return float(value)


def _nonzero(file: GgufFile, name: str, otherwise: float | None) -> float | None:
    """As `_number`; `otherwise` if it is missing or 0, as llama.cpp reads its scales."""
    number = _number(file, name, 0.0)
    return otherwise if number == 0 else number


def _wrong(file: GgufFile, name: str, value: Any, accepted: str) -> QsampleError:
    """The error for a value of metadata. accepted: the accepted values, behind "it must be"."""
    return QsampleError(
        f"{file.path}: {file.architecture}.{name} is {shown(value)}; it must be {accepted}. Download the file again, "
        "or give the checkpoint that it was made of"
    )
