"""Metadata as configurations: what is refused, by name and before torch is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample.addons.formats.gguf.file import GgufFile, GgufTensor
from qsample.addons.formats.gguf.models import configuration, weights_of
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
