"""Attention over retained buffers; mask rules: which patterns are plainly causal, and their masks over buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.contract.interface import KeyValueShape
from qsample.errors import UnsupportedModelError
from qsample.transforms.attention import (
    MaskRule,
    Scoring,
    causal,
    eager_masks_over_buffers,
    group_query_attention,
    mask_rule,
    masked_attention,
    use_retained_attention,
)
from qsample.transforms.cache import DecodeContext
from qsample.transforms.decoder import apply_transforms, state_shapes
from tests.architectures.configs import tiny_model
from tests.helpers.tiny_models import export_without_sampler, random_model
from tests.transforms.decoding import check_decoding, compute_operators


def test_a_model_off_the_interface_keeps_its_attention() -> None:
    context = DecodeContext()
    model = random_model("bloom")
    use_retained_attention(model, context)
    assert context.buffered
    assert state_shapes(model, context)[0] == (KeyValueShape(4, 16),) * 2


def test_a_model_that_uses_the_interface_in_its_own_way_gets_its_attention_back() -> None:
    """DiffLlama attends twice with the same keys and other values than it put into the cache."""
    context = DecodeContext()
    model = random_model("diffllama")
    apply_transforms(model, context)
    assert not context.buffered
    state_shapes(model, context)
    assert context.buffered
    assert model.config._attn_implementation == "eager"


@pytest.mark.ci
@pytest.mark.parametrize("head_dim", [20, pytest.param(4, marks=pytest.mark.slow)])
def test_heads_of_a_size_that_the_operator_does_not_take(head_dim: int, tmp_path: Path) -> None:
    """They get zeros after them; the parity gate compares the export, and this the cache in 8 bits."""
    model = random_model("llama", head_dim=head_dim)
    package = export_without_sampler(model, tmp_path / "package")
    assert package.interface.key_values == (KeyValueShape(2, -(-head_dim // 8) * 8),) * 2
    assert package.manifest.parity is not None
    assert package.manifest.parity["attention_layers"] == 2
    options = CompileOptions(ctx_len=32, kv_cache_dtype="int8")
    compiled = compile_package(package, tmp_path / "compiled", options)
    assert compiled.manifest.compilation is not None
    assert compiled.manifest.compilation.quantization["divergence"]["kl"]["value"] < 0.01  # type: ignore[index]


def test_layers_with_a_pattern_of_their_own_are_masked() -> None:
    context = DecodeContext()
    model = random_model(
        "llama4_text",
        attention_chunk_size=8,
        layer_types=["chunked_attention", "full_attention"],
        num_local_experts=2,
        intermediate_size_mlp=96,
        head_dim=16,
    )
    model = model
    apply_transforms(model, context)
    state_shapes(model, context)
    assert context.masked == {0}


def chunked(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (key <= query) & (key // 8 == query // 8)


def bidirectional(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (key <= query) | (key < 4)


@pytest.mark.parametrize("window", [None, 1, 3, 100, 4096])
def test_causal_rules_are_recognised(window: int | None) -> None:
    rule = mask_rule(mask_function=causal(window), batch_size=2)
    assert rule.is_causal(window)
    assert not rule.is_causal(7)


@pytest.mark.parametrize("function", [chunked, bidirectional])
@pytest.mark.parametrize("window", [None, 8])
def test_other_rules_are_not_causal(function: object, window: int | None) -> None:
    assert not MaskRule(function).is_causal(window)  # type: ignore[arg-type]


def test_the_mask_of_ragged_rows() -> None:
    """Row 0 is at positions 2 and 3, row 1 at 0 and 1; a query sees itself and the key before it."""
    allowed = MaskRule(causal(2)).allowed(torch.tensor([[2, 3], [0, 1]]), keys=5)
    assert allowed.shape == (2, 1, 2, 5)
    assert allowed[:, 0].int().tolist() == [
        [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0]],
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]],
    ]


def test_eager_masks_are_transformers_own_outside_the_context() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    own = ALL_MASK_ATTENTION_FUNCTIONS["eager"]
    with eager_masks_over_buffers(torch.tensor([[1]]), capacity=3):
        mask = ALL_MASK_ATTENTION_FUNCTIONS["eager"](mask_function=causal())
        assert mask.tolist() == [[[[0.0, 0.0, torch.finfo(torch.float32).min]]]]
    assert ALL_MASK_ATTENTION_FUNCTIONS["eager"] is own


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_masked_attention(softcap: float | None, sinks: bool) -> None:
    """Against float64: grouped heads, values smaller than keys, rows with other masks."""
    random = np.random.default_rng(0)
    query, keys = random.standard_normal((2, 6, 3, 8)), random.standard_normal((2, 2, 5, 8))
    values, sink = random.standard_normal((2, 2, 5, 4)), random.standard_normal(6)
    allowed = random.random((2, 1, 3, 5)) < 0.6
    allowed[..., 0] = True
    tensors = (torch.tensor(array, dtype=torch.float32) for array in (query, keys, values))
    sink_logits = torch.tensor(sink, dtype=torch.float32) if sinks else None
    got = masked_attention(*tensors, torch.tensor(allowed), Scoring(0.3, softcap, sink_logits))
    wanted = np.zeros((2, 3, 6, 4))
    for row, head, place in np.ndindex(2, 6, 3):
        scores = keys[row, head // 3] @ query[row, head, place] * 0.3
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores) * allowed[row, 0, place]
        total = weights.sum() + (np.exp(sink[head]) if sinks else 0)
        wanted[row, place, head] = weights @ values[row, head // 3] / total
    assert got.is_contiguous()
    np.testing.assert_allclose(got.numpy(), wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("sizes", "options", "words"),
    [
        ((8, 4, 4), {}, "queries, keys and values of sizes 8, 4 and 4"),
        ((8, 8, 16), {}, "queries, keys and values of sizes 8, 8 and 16"),
        ((8, 8, 8), {"attention_mask": torch.zeros(1)}, "an attention mask of its own"),
        ((8, 8, 8), {"position_bias": torch.zeros(1)}, "a position bias"),
        ((8, 8, 8), {"is_causal": False}, "attends to later tokens"),
        ((8, 8, 8), {}, "keys and values that are not in the cache"),
    ],
)
def test_attention_that_the_interface_does_not_carry(
    sizes: tuple[int, int, int], options: dict[str, Any], words: str
) -> None:
    model = random_model("llama")
    use_retained_attention(model, DecodeContext())
    module: nn.Module = model.model.layers[0].self_attn  # type: ignore[union-attr]
    query, key, value = (torch.zeros(1, 2, 3, size) for size in sizes)
    with pytest.raises(UnsupportedModelError, match=f"LlamaAttention .*{words}"):
        group_query_attention(module, query, key, value, **{"attention_mask": None, **options})


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("llama", {"head_dim": 20}),  # which the operator gets with zeros behind it
        ("gemma2", {"query_pre_attn_scalar": 40}),  # a window in one layer, soft caps, a scale
        ("gpt_oss", {}),  # sinks, and a window
    ],
)
def test_both_ways_to_attend_are_transformers(
    model_type: str, options: dict[str, Any], plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GroupQueryAttention, and plain operators over the same buffers."""
    compute_operators(monkeypatch)
    check_decoding(random_model(model_type, **options), plain=plain)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("model_type", "masked"),
    # Values smaller than keys; a pattern in chunks; layers that attend with the keys of others.
    [("deepseek_v2", set()), ("llama4_text", {0}), ("gemma3n_text", set())],
)
def test_attention_of_other_kinds_is_transformers(
    model_type: str, masked: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_operators(monkeypatch)
    assert check_decoding(tiny_model(model_type)).context.masked == masked
