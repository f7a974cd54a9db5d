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
        ({"attention__head_count": [4, 2]}, r"head_count is \[4, 2\]; .* the same for all layers"),
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
            "'gemma3n'; llama, qwen2, qwen3, gemma3, .*gpt-oss are read from GGUF. Give the",
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
