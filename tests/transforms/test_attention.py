"""Which models attend through the interface, and in which layers GroupQueryAttention does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.interface import KeyValueShape
from qsample.transforms.attention import RetainedAttention
from qsample.transforms.cache import DecodeContext
from qsample.transforms.pipeline import apply, default_transforms
from qsample.transforms.probe import state_shapes
from tests.helpers.tiny_models import export_without_sampler, random_model


def test_a_model_off_the_interface_keeps_its_attention() -> None:
    context = DecodeContext()
    model = random_model("bloom")
    assert RetainedAttention(context)(model) == (model, False)
    assert context.buffered
    assert state_shapes(model, context)[0] == (KeyValueShape(4, 16),) * 2


def test_a_model_that_uses_the_interface_in_its_own_way_gets_its_attention_back() -> None:
    """DiffLlama attends twice with the same keys and other values than it put into the cache."""
    context = DecodeContext()
    model, _ = apply(random_model("diffllama"), default_transforms(context))
    assert not context.buffered
    state_shapes(model, context)
    assert context.buffered
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("head_dim", [4, 20])
def test_heads_of_a_size_that_the_operator_does_not_take(head_dim: int, tmp_path: Path) -> None:
    """They get zeros behind them; the parity gate compares what is exported, and this the cache in 8 bits."""
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
    model, _ = apply(model, default_transforms(context))
    state_shapes(model, context)
    assert context.masked == {0}
