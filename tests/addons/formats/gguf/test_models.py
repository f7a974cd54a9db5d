"""Metadata as configurations: what is refused, by name and before torch is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample.addons.formats.gguf.file import GgufFile, GgufTensor
from qsample.addons.formats.gguf.models import FAMILIES, configuration, weights_of
from qsample.errors import QsampleError, UnsupportedModelError

SETTINGS: dict[str, Any] = {
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "block_count": 1,
    "context_length": 256,
    "embedding_length": 32,
    "feed_forward_length": 96,
}


def some_file(
    architecture: str = "llama", tensors: dict[str, tuple[int, ...]] | None = None, **changed: Any
) -> GgufFile:
    """A file of a single layer; the keys of `changed` have __ in place of a dot, and None leaves a
    key out."""
    settings = SETTINGS | {name.replace("__", "."): value for name, value in changed.items()}
    metadata = {
        f"{architecture}.{name}": value for name, value in settings.items() if value is not None
    }
    shapes = {"token_embd.weight": (320, 32), "blk.0.attn_q.weight": (64, 32), **(tensors or {})}
    found = {name: GgufTensor(name, "F32", shape, 0, 0) for name, shape in shapes.items()}
    return GgufFile(Path("some.gguf"), {"general.architecture": architecture, **metadata}, found)


def test_a_configuration() -> None:
    config = configuration(some_file())
    assert {
        name: config[name] for name in ("model_type", "vocab_size", "hidden_size", "head_dim")
    } == {
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 32,
        "head_dim": 16,
    }
    assert config["tie_word_embeddings"]
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert not configuration(some_file(tensors={"output.weight": (320, 32)}))["tie_word_embeddings"]
    assert configuration(some_file(attention__key_length=None))["head_dim"] == 8
    older = configuration(some_file(rope__scale_linear=4.0))
    assert older["rope_parameters"] == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    large = configuration(
        some_file("gemma3", tensors={f"{i}": (1,) for i in range(62)}, block_count=62)
    )
    assert large["query_pre_attn_scalar"] == 8
    assert set(large["layer_types"]) == {"full_attention"}


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"block_count": None}, r"llama\.block_count is None; it must be an integer >= 1"),
        ({"block_count": 2**31 - 1}, "has 2 tensors for 2147483647 layers"),
        ({"block_count": 2**40}, "block_count is 1099511627776"),
        (
            {"attention__head_count": [4, 2]},
            r"head_count is \[4, 2\]; .* or 1 of them, one for each",
        ),
        (
            {"attention__head_count_kv": []},
            r"head_count_kv is \[\]; it must be an integer >= 1, or 1",
        ),
        ({"feed_forward_length": ["96"]}, r"feed_forward_length is \['96'\]"),
        ({"feed_forward_length": [0]}, r"feed_forward_length is \[0\]"),
        ({"block_count": [1]}, r"block_count is \[1\]; it must be an integer >= 1\. Download"),
        ({"nextn_predict_layers": 1}, "nextn_predict_layers is 1; it must be below 1, the layers"),
        ({"attention__head_count": "4"}, "head_count is '4'"),
        (
            {"attention__layer_norm_rms_epsilon": float("nan")},
            "epsilon is nan; it must be a number",
        ),
        ({"attention__layer_norm_rms_epsilon": None}, "epsilon is None"),
        ({"context_length": True}, "context_length is True"),
        ({"attention__value_length": 8}, "of different lengths"),
        ({"rope__dimension_count": 8}, "of different lengths"),
        ({"rope__scaling__type": "ntk"}, "scaled by 'ntk', which is not read"),
        ({"rope__scaling__type": "longrope"}, r"no tensor rope_factors_long\.weight of 8 F32"),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": "4"}, "factor is '4'"),
        ({"attention__causal": False}, "makes embeddings of texts"),
        (
            {"architecture": "gemma3n"},
            "'gemma3n'; llama, qwen2, qwen3, gemma3, .*gpt-oss, qwen35, qwen35moe, gemma4 are read from GGUF. Give the",
        ),
        ({"tensors": {"token_embd.weight": (32,)}}, "has no matrix token_embd.weight"),
        ({"tensors": {"rope_freqs.weight": (7,)}}, "has no tensor rope_freqs.weight of 8 F32"),
        (
            {"tensors": {"blk.0.attn_q.weight": (60, 32)}},
            "attn_q.weight has 60 rows, and 4 heads of 16 by the metadata",
        ),
    ],
)
def test_refusals(changed: dict[str, Any], problem: str) -> None:
    file = some_file(**changed)
    with pytest.raises(QsampleError, match=problem):
        weights_of(file, configuration(file))


def test_experts_must_be_whole() -> None:
    settings = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 48}
    shapes = {"blk.0.ffn_gate_exps.weight": (4, 48, 32)}
    file = some_file("qwen3moe", shapes, **settings)
    with pytest.raises(
        QsampleError,
        match=r"has not all of blk\.0\.ffn_gate_exps\.weight, blk\.0\.ffn_up_exps\.weight",
    ):
        weights_of(file, configuration(file))
    with pytest.raises(
        UnsupportedModelError, match=r"llama is not known to have \(blk\.0\.ffn_gate_exps\.weight\)"
    ):
        weights_of(some_file("llama", shapes), configuration(some_file("llama", shapes)))


def test_any_other_factors_of_wavelengths_are_kept(tmp_path: Path) -> None:
    factors = np.array([1, 1, 2, 3, 4, 5, 6, 7], np.float32)
    (tmp_path / "some.gguf").write_bytes(factors.tobytes())
    file = some_file()
    tensors = file.tensors | {
        "rope_freqs.weight": GgufTensor("rope_freqs.weight", "F32", (8,), 0, factors.nbytes)
    }
    rope = configuration(GgufFile(tmp_path / "some.gguf", file.metadata, tensors))[
        "rope_parameters"
    ]
    assert (rope["rope_type"], rope["short_factor"], rope["long_factor"]) == (
        "longrope",
        [*factors],
        [*factors],
    )
    assert rope["attention_factor"] == 1.0


BY_LAYER = ("attention__head_count", "attention__head_count_kv", "feed_forward_length")


@pytest.mark.parametrize("key", BY_LAYER)
def test_an_integer_may_be_given_for_each_layer(key: str) -> None:
    value = SETTINGS[key.replace("__", ".")]
    plain = some_file(block_count=2)
    wanted = configuration(plain)
    assert configuration(some_file(block_count=2, **{key: [value] * 2})) == wanted
    for length in (1, 3):
        with pytest.raises(QsampleError, match=r"or 2 of them, one for each layer\. Download"):
            configuration(some_file(block_count=2, **{key: [value] * length}))
    with pytest.raises(UnsupportedModelError, match=r"must be the same for all layers\. Give the"):
        configuration(some_file(block_count=2, **{key: [value, 2 * value]}))


def test_numbers_of_experts_may_be_given_for_each_layer() -> None:
    numbers = {
        "expert_used_count": 2,
        "expert_feed_forward_length": 48,
        "feed_forward_length": None,
    }
    for architecture in ("qwen3moe", "gpt-oss"):
        wanted = configuration(
            some_file(
                architecture,
                block_count=2,
                expert_count=4,
                attention__sliding_window=6,
                **numbers,
            )
        )
        lists = {key: None if value is None else [value] * 2 for key, value in numbers.items()}
        found = configuration(
            some_file(
                architecture, block_count=2, expert_count=4, attention__sliding_window=6, **lists
            )
        )
        assert found == wanted


LINEAR = {
    "ssm__inner_size": 96,
    "ssm__time_step_rank": 6,
    "ssm__group_count": 2,
    "ssm__state_size": 16,
    "ssm__conv_kernel": 4,
    "rope__dimension_count": 8,
}
LAYERS: dict[str, tuple[int, ...]] = {f"{i}": (1,) for i in range(6)}


def test_layers_of_linear_attention() -> None:
    regular = configuration(some_file("qwen35", LAYERS, block_count=5, **LINEAR))
    linear, full = "linear_attention", "full_attention"
    assert regular["layer_types"] == [linear, linear, linear, full, linear]
    assert regular["rope_parameters"]["partial_rotary_factor"] == 0.5
    assert (regular["linear_value_head_dim"], regular["linear_num_value_heads"]) == (16, 6)
    other = {"full_attention_interval": 2, "block_count": 3}
    assert configuration(some_file("qwen35", LAYERS, **other, **LINEAR))["layer_types"] == [
        linear,
        full,
        linear,
    ]
    stated = {"attention__recurrent_layers": [False, True, False], "nextn_predict_layers": 1}
    config = configuration(some_file("qwen35", LAYERS, **other, **stated, **LINEAR))
    assert (config["layer_types"], config["num_hidden_layers"]) == ([full, linear], 2)
    whole = LINEAR | {"rope__dimension_count": None}
    rope = configuration(some_file("qwen35", LAYERS, **whole))["rope_parameters"]
    assert rope["partial_rotary_factor"] == 1.0


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"ssm__group_count": 4}, "has 6 heads of values for 4 of keys, 96 numbers in all"),
        ({"ssm__inner_size": 100}, "has 6 heads of values for 2 of keys, 100 numbers"),
        ({"ssm__state_size": None}, "ssm.state_size is None"),
        ({"attention__recurrent_layers": [True] * 2}, "it must be 1 truth values, one for each"),
        ({"attention__recurrent_layers": [1]}, r"recurrent_layers is \[1\]"),
        (
            {"tensors": {"blk.0.attn_gate.weight": (90, 32)}},
            "attn_gate.weight has 90 rows, and 6 heads of 16 behind 0 by the metadata",
        ),
        (
            {"tensors": {"blk.0.ssm_out.weight": (32, 90)}},
            "ssm_out.weight has 90 inputs, and 6 heads of 16 behind 0 by the metadata",
        ),
        (
            {"tensors": {"blk.0.attn_qkv.weight": (161, 32)}},
            "attn_qkv.weight has 161 rows, and 6 heads of 16 behind 64",
        ),
    ],
)
def test_refusals_of_linear_attention(changed: dict[str, Any], problem: str) -> None:
    file = some_file("qwen35", **LINEAR | changed)
    with pytest.raises(QsampleError, match=problem):
        weights_of(file, configuration(file))


WINDOWS = {
    "block_count": 4,
    "attention__sliding_window_pattern": [True, False] * 2,
    "attention__sliding_window": 6,
    "attention__key_length_swa": 8,
}


def test_layers_of_gemma_4() -> None:
    shared = {
        "attention__shared_kv_layers": 2,
        "feed_forward_length": [96, 96, 192, 192],
        "attention__head_count_kv": [2, 1, 2, 4],
    }
    unused = {"blk.2.attn_k.weight": (16, 32), "blk.3.attn_k_norm.weight": (16,)}
    file = some_file("gemma4", LAYERS | unused, **WINDOWS | shared)
    config = configuration(file)
    assert (config["head_dim"], config["num_key_value_heads"]) == (8, 2)
    assert config["per_layer_config"] == {
        1: {"head_dim": 16, "num_key_value_heads": 1},
        3: {"head_dim": 16, "num_key_value_heads": 4},
    }
    assert (config["intermediate_size"], config["use_double_wide_mlp"]) == (96, True)
    assert config["attention_k_eq_v"]
    values = {"blk.1.attn_v.weight": (16, 32)}
    plain = configuration(some_file("gemma4", LAYERS | values, **WINDOWS | shared))
    assert not plain["attention_k_eq_v"]
    with pytest.raises(UnsupportedModelError, match=r"is not known to have \(0, 1, 2 and 3 more"):
        weights_of(file, config)
    names = {name: tensor for name, tensor in file.tensors.items() if name not in LAYERS}
    weights = weights_of(GgufFile(file.path, file.metadata, names), config)
    assert [*weights] == ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"]


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"attention__sliding_window_pattern": 2}, "pattern is 2; it must be 4 truth values"),
        ({"attention__sliding_window_pattern": [False, True] * 2}, "has other layers than Gemma 4"),
        ({"attention__shared_kv_layers": 4}, "has other layers than Gemma 4"),
        ({"attention__head_count_kv": [2, 2, 1, 2]}, "has other layers than Gemma 4"),
        ({"feed_forward_length": [96, 96, 96, 192]}, "has other layers than Gemma 4"),
        ({"feed_forward_length": [96, 48, 96, 96]}, "has other layers than Gemma 4"),
        ({"attention__sliding_window": None}, "sliding_window is None"),
        ({"rope__dimension_count_swa": 4}, "heads in windows that are rotated in part"),
        ({"embedding_length_per_layer_input": 8}, "has no tensor per_layer_token_embd.weight"),
    ],
)
def test_refusals_of_gemma_4(changed: dict[str, Any], problem: str) -> None:
    with pytest.raises(QsampleError, match=problem):
        configuration(some_file("gemma4", LAYERS, **WINDOWS | changed))


@pytest.mark.parametrize("rotated", [0, 1, 3, 8])
def test_pairs_that_are_not_rotated(rotated: int, tmp_path: Path) -> None:
    factors = np.array([1.0] * rotated + [1e30] * (8 - rotated), np.float32)
    (tmp_path / "some.gguf").write_bytes(factors.tobytes())
    file = some_file()
    tensors = file.tensors | {
        "rope_freqs.weight": GgufTensor("rope_freqs.weight", "F32", (8,), 0, factors.nbytes)
    }
    config = configuration(GgufFile(tmp_path / "some.gguf", file.metadata, tensors))
    rope = config["rope_parameters"]
    assert (rope["rope_type"], rope["partial_rotary_factor"]) == ("proportional", rotated / 8)


EXPERT_SIZES = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 48}
# The metadata of a file that has nothing optional, besides those of `SETTINGS`.
FEW: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("llama", "qwen2", "qwen3", "gemma3", "mistral3", "phi3", "granite")},
    "qwen3moe": EXPERT_SIZES,
    "gpt-oss": EXPERT_SIZES | {"attention__sliding_window": 6},
    "qwen35": LINEAR,
    "qwen35moe": LINEAR | EXPERT_SIZES,
    "gemma4": {"attention__sliding_window_pattern": [False], "attention__sliding_window": 6},
}


@pytest.mark.parametrize("architecture", FEW)
def test_what_every_architecture_has_without_its_optional_keys(architecture: str) -> None:
    """The values are those of llama.cpp or its converters."""
    assert FEW.keys() == FAMILIES.keys()
    keys = ("attention__head_count_kv", "attention__key_length", "rope__dimension_count")
    bare = dict.fromkeys(keys, None)
    config = configuration(some_file(architecture, **FEW[architecture] | bare))
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 4)
    assert (config["head_dim"], config["num_hidden_layers"]) == (8, 1)
    assert (config["bos_token_id"], config["pad_token_id"]) == (None, None)
    assert (config["dtype"], config["rms_norm_eps"]) == ("float32", 1e-5)
    assert not {"attention_bias", "mlp_bias", "enable_moe_block"} & config.keys()
    rope = config["rope_parameters"].get("full_attention", config["rope_parameters"])
    theta = 1e6 if architecture == "gemma3" else 1e4
    assert (rope["rope_type"], rope["rope_theta"]) == ("default", theta)
    assert rope.get("partial_rotary_factor", 1.0) == 1.0


LOCAL_ROPE = {"rope_type": "default", "rope_theta": 1e4}
SIX: dict[str, Any] = {"tensors": LAYERS, "block_count": 6, "attention__sliding_window": 1}
YARN = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}


@pytest.mark.parametrize(
    ("architecture", "changed", "setting", "value"),
    [
        ("llama", {"rope__scaling__factor": 4.0}, "rope_parameters.rope_type", "linear"),
        ("llama", {"rope__scaling__factor": 1.0}, "rope_parameters.rope_type", "default"),
        ("llama", {"rope__scale_linear": 1.0}, "rope_parameters.rope_type", "default"),
        ("llama", {"rope__scale_linear": 4.0, "rope__scaling__factor": 2.0}, "rope_parameters.factor", 2.0),
        ("llama", {"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, "rope_parameters",
         {"rope_type": "default", "rope_theta": 1e4}),
        ("llama", YARN, "rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                                            "original_max_position_embeddings": 256}),
        ("llama", YARN | {"rope__scaling__original_context_length": 64},
         "rope_parameters.original_max_position_embeddings", 64),
        ("llama", YARN | {"rope__scaling__yarn_beta_fast": 0.0}, "rope_parameters.beta_fast", 0.0),
        ("llama", YARN | {"rope__scaling__yarn_beta_slow": 2.0}, "rope_parameters.beta_slow", 2.0),
        ("llama", YARN | {"rope__scaling__yarn_attn_factor": 0.5}, "rope_parameters.attention_factor", 0.5),
        ("llama", YARN | {"rope__scaling__yarn_log_multiplier": 0.1}, "rope_parameters.mscale_all_dim", 0.1),
        ("llama", YARN | {"rope__scaling__yarn_log_multiplier": 0.1}, "rope_parameters.mscale", 1.0),
        ("mistral3", {}, "model_type", "mistral"),
        ("mistral3", {"attention__temperature_scale": 0.0}, "model_type", "ministral3"),
        ("gemma3", {}, "sliding_window", 256),
        ("gemma3", {}, "layer_types", ["full_attention"]),
        ("gemma3", {}, "query_pre_attn_scalar", 16),
        ("gemma3", {}, "rope_parameters.sliding_attention", LOCAL_ROPE),
        ("gemma3", {"rope__freq_base_swa": 2e4}, "rope_parameters.sliding_attention.rope_theta", 2e4),
        ("gemma3", SIX, "sliding_window", 1),
        ("gemma3", SIX, "layer_types", ["sliding_attention"] * 5 + ["full_attention"]),
        ("gemma3", SIX | {"attention__sliding_window_pattern": 2}, "layer_types",
         ["sliding_attention", "full_attention"] * 3),
        *((name, {"final_logit_softcapping": given}, "final_logit_softcapping", value)
          for name in ("gemma3", "gemma4") for given, value in ((None, None), (0.0, None), (30.0, 30.0))),
        ("phi3", {}, "sliding_window", None),
        ("phi3", {"attention__sliding_window": 1}, "sliding_window", 1),
        ("phi3", {}, "original_max_position_embeddings", 256),
        ("phi3", {"rope__dimension_count": 12}, "rope_parameters.partial_rotary_factor", 0.75),
        *(("granite", {key: given}, setting, value)
          for key, setting, default in (
              ("attention__scale", "attention_multiplier", 0.25), ("embedding_scale", "embedding_multiplier", 1.0),
              ("residual_scale", "residual_multiplier", 1.0), ("logit_scale", "logits_scaling", 1.0))
          for given, value in ((None, default), (0.0, default), (3.0, 3.0))),
        ("qwen3moe", {"feed_forward_length": None}, "intermediate_size", 48),
        ("qwen3moe", {}, "intermediate_size", 96),
        ("qwen3moe", {}, "moe_intermediate_size", 48),
        ("qwen3moe", {}, "norm_topk_prob", True),
        ("gpt-oss", {}, "intermediate_size", 48),
        ("gpt-oss", {}, "num_local_experts", 4),
        ("gpt-oss", {}, "rope_parameters.truncate", False),
        ("qwen35", SIX, "layer_types", ["linear_attention"] * 3 + ["full_attention"] + ["linear_attention"] * 2),
        ("qwen35moe", {}, "shared_expert_intermediate_size", 96),
        ("qwen35moe", {"expert_shared_feed_forward_length": 1}, "shared_expert_intermediate_size", 1),
        ("gemma4", {}, "num_kv_shared_layers", 0),
        ("gemma4", {}, "head_dim", 16),
        ("gemma4", {"attention__key_length_swa": 8}, "head_dim", 8),
        ("gemma4", {}, "use_double_wide_mlp", False),
        ("gemma4", {}, "hidden_size_per_layer_input", 0),
        ("gemma4", {}, "rope_parameters.sliding_attention", LOCAL_ROPE),
        ("gemma4", {"rope__freq_base_swa": 2e4}, "rope_parameters.sliding_attention.rope_theta", 2e4),
        ("gemma4", EXPERT_SIZES, "enable_moe_block", True),
        ("gemma4", EXPERT_SIZES, "top_k_experts", 2),
        ("gemma4", {"tensors": {"per_layer_token_embd.weight": (300, 8)}, "embedding_length_per_layer_input": 1},
         "vocab_size_per_layer_input", 300),
    ],
)  # fmt: skip
def test_a_setting_with_and_without_its_optional_key(
    architecture: str, changed: dict[str, Any], setting: str, value: Any
) -> None:
    """Without the key, the value is that of llama.cpp or its converters, and otherwise the key's."""
    found: Any = configuration(some_file(architecture, **FEW[architecture] | changed))
    for part in setting.split("."):
        found = found[part]
    assert found == value


@pytest.mark.parametrize(
    ("architecture", "key", "least"),
    [
        ("llama", "nextn_predict_layers", 0), ("llama", "attention__head_count", 1), ("llama", "embedding_length", 1),
        ("llama", "attention__key_length", 1), ("llama", "rope__dimension_count", 1), ("llama", "context_length", 1),
        ("gemma3", "attention__sliding_window", 0), ("gemma3", "attention__sliding_window_pattern", 1),
        ("phi3", "attention__sliding_window", 0), ("qwen35", "full_attention_interval", 1),
        ("qwen35", "ssm__conv_kernel", 1), ("qwen35", "ssm__state_size", 1), ("qwen3moe", "expert_count", 1),
        ("gpt-oss", "attention__sliding_window", 1), ("gemma4", "attention__shared_kv_layers", 0),
        ("gemma4", "embedding_length_per_layer_input", 0), ("gemma4", "expert_count", 0),
    ],
)  # fmt: skip
def test_0_is_as_good_as_no_key_or_refused_by_name(architecture: str, key: str, least: int) -> None:
    plain = FEW[architecture]
    if least == 0:
        zero = configuration(some_file(architecture, **plain | {key: 0}))
        assert zero == configuration(some_file(architecture, **plain))
    with pytest.raises(QsampleError, match=rf"is {least - 1}; it must be an integer >= {least}"):
        configuration(some_file(architecture, **plain | {key: least - 1}))


@pytest.mark.parametrize("architecture", FEW)
def test_norms_that_are_shifted_and_queries_in_another_order(architecture: str) -> None:
    """As the converters write them: 1 is added to Gemma's and Qwen3.5's norms."""
    sizes = {
        "output_norm.weight": (32,),
        "blk.0.attn_norm.weight": (32,),
        "output.weight": (320, 32),
    }
    file = some_file(architecture, sizes, **FEW[architecture])
    weights = weights_of(file, configuration(file))
    shift = 1.0 if architecture in ("gemma3", "qwen35", "qwen35moe") else 0.0
    for name in ("model.norm.weight", "model.layers.0.input_layernorm.weight"):
        assert weights[name].shift == shift
    queries = weights["model.layers.0.self_attn.q_proj.weight"]
    for weight in (queries, weights["lm_head.weight"], weights["model.embed_tokens.weight"]):
        assert (weight.shift, weight.is_logarithm) == (0.0, False)
    assert (queries.order is not None) == (architecture in ("llama", "mistral3", "granite"))
