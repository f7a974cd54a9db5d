"""Attention over retained buffers; mask rules: which patterns are plainly causal, and their masks over buffers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.contract.interface import KeyValueShape
from qsample.transforms.attention import MaskRule, causal, eager_masks_over_buffers, mask_rule, use_retained_attention
from qsample.transforms.cache import DecodeContext
from qsample.transforms.decoder import apply_transforms, state_shapes
from tests.helpers.tiny_models import export_without_sampler, random_model


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
    assert compiled.manifest.compilation.quantization["divergence"]["kl"] < 0.01  # type: ignore[index]


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
    assert allowed[:, 0].int().tolist() == [[[0, 1, 1, 0, 0], [0, 0, 1, 1, 0]], [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]]


def test_eager_masks_are_transformers_own_outside_the_context() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    own = ALL_MASK_ATTENTION_FUNCTIONS["eager"]
    with eager_masks_over_buffers(torch.tensor([[1]]), capacity=3):
        mask = ALL_MASK_ATTENTION_FUNCTIONS["eager"](mask_function=causal())
        assert mask.tolist() == [[[[0.0, 0.0, torch.finfo(torch.float32).min]]]]
    assert ALL_MASK_ATTENTION_FUNCTIONS["eager"] is own
