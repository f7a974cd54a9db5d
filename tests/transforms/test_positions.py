"""Each row's own positions; rotation of pairs in real arithmetic against complex numbers."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.errors import CompileError, UnsupportedModelError
from qsample.graph.runner import GraphRunner
from qsample.graph.weights import load_graph
from qsample.package.package import Package
from qsample.transforms.cache import DecodeContext
from qsample.transforms.decoder import apply_transforms
from qsample.transforms.positions import (
    Rotation,
    RowPositions,
    check_named_parts,
    real_rotary_embeddings,
    use_rope_of_capacity,
    use_row_positions,
    use_row_windows,
)
from tests.architectures.configs import tiny_model
from tests.helpers.tiny_models import export_without_sampler, random_model
from tests.transforms.decoding import check_decoding, compute_operators

FIRST_CONTEXT = 32
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1 + 0.1 * i for i in range(8)],
    "long_factor": [2 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": FIRST_CONTEXT,
}


def longrope_model() -> PreTrainedModel:
    return random_model(
        "phi3", rope_parameters=LONGROPE, original_max_position_embeddings=FIRST_CONTEXT
    )


@pytest.mark.parametrize("model_type", ["biogpt", "opt", "trocr", "xglm"])
def test_each_row_has_its_own_positions_inside_a_call_only(model_type: str) -> None:
    """Classes of the installed transformers: its releases differ in the names of their parameters."""
    context, model = DecodeContext(), random_model(model_type)
    alone = positions_read(model, torch.ones(1, 12, dtype=torch.int64))[0]
    tables = {name for name, _ in model.named_modules() if name.endswith("embed_positions")}
    # A model may be exported again; the positions are those of the last export.
    earlier = DecodeContext()
    for one in (earlier, context, context):
        use_row_positions(model, one)
    wrapped = {name for name, part in model.named_modules() if isinstance(part, RowPositions)}
    assert wrapped == tables
    ids = torch.ones(2, 3, dtype=torch.int64)
    torch.testing.assert_close(positions_read(model, ids)[0], alone[:3])
    context.positions = torch.tensor([[4, 5, 6], [9, 10, 11]])
    earlier.positions = torch.tensor([[1, 2, 3], [0, 1, 2]])
    torch.testing.assert_close(positions_read(model, ids), alone[context.positions])


def positions_read(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """[B, S, hidden]: what the model gets from its table of positions."""
    (table,) = (part for name, part in model.named_modules() if name.endswith("embed_positions"))
    found: list[Tensor] = []
    hook = table.register_forward_hook(lambda _module, _given, result: found.append(result))
    with torch.no_grad():
        model(ids, use_cache=False)
    hook.remove()
    return found[0].reshape(*found[0].shape[-3:])


class CountingTable(nn.Embedding):
    """A table that cannot be told the positions."""

    def forward(self, input_ids: Tensor, number_of_earlier_tokens: int = 0) -> Tensor:
        return super().forward(torch.arange(input_ids.shape[1]) + number_of_earlier_tokens)


def test_a_table_that_takes_no_positions_is_named() -> None:
    """TrOCR's table of sines is one, and so would be one that calls its positions by another name."""
    sines = random_model("trocr", use_learned_position_embeddings=False)
    model = nn.ModuleDict({"table": type("PositionTable", (CountingTable,), {})(20, 4)})
    for counting, expected in (
        (sines, "TrOCRSinusoidalPositionalEmbedding takes input_ids, "),
        (model, "PositionTable takes input_ids, number_of_earlier_tokens in transformers "),
    ):
        with pytest.raises(UnsupportedModelError, match=expected) as raised:
            use_row_positions(counting, DecodeContext())  # type: ignore[arg-type]
        assert f"transformers {version('transformers')}, and no position_ids" in str(raised.value)


@pytest.mark.parametrize(
    ("model_type", "part"),
    [
        ("llama4_text", "Llama4TextAttention"),
        ("llama4_text", "apply_rotary_emb"),
        ("deepseek_v2", "apply_rotary_emb"),
    ],
)
def test_a_part_that_another_release_calls_otherwise_is_named(
    model_type: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(model_type, num_local_experts=2, n_routed_experts=2, head_dim=16)
    check_named_parts(model)
    monkeypatch.delattr(sys.modules[type(model).__module__], part)
    with pytest.raises(
        UnsupportedModelError, match=f"transformers {version('transformers')}: .* has no {part}"
    ):
        apply_transforms(model, DecodeContext())


def test_local_layers_of_gpt_neo_see_a_window_of_each_row() -> None:
    """One token at position 9 of a buffer of 12 keys, in the windows of transformers' own attention on 10 keys."""
    model = random_model("gpt_neo", attention_types=[[["global", "local"], 1]], window_size=4)
    context = DecodeContext()
    use_row_windows(model, context)
    layer = model.transformer.h[1].attn.attention
    assert layer.attention_type == "local"
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 4, size, 16, generator=generator) for size in (10, 12, 12))
    with torch.no_grad():
        own = layer._attn(query, key[:, :, :10], value[:, :, :10])[0]
        context.positions = torch.tensor([[9]])
        at_nine = layer._attn(query[:, :, 9:], key, value)[0]
    torch.testing.assert_close(at_nine, own[:, :, 9:], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("capacity", "last"), [(FIRST_CONTEXT, 20), (FIRST_CONTEXT + 1, FIRST_CONTEXT)]
)
def test_the_frequencies_of_longrope_follow_the_capacity(capacity: int, last: int) -> None:
    """last: the largest position with which transformers itself takes the same frequencies."""
    rotary, context = longrope_model().model.rotary_emb, DecodeContext()
    x = torch.zeros(1)
    expected = [angles[:, [3, 17]] for angles in rotary(x, torch.arange(last + 1)[None])]
    model = longrope_model()
    use_rope_of_capacity(model, context)
    rotary = model.model.rotary_emb
    outside = rotary(x, torch.arange(last + 1)[None])
    positions = torch.tensor([[3, 17]])
    context.positions, context.past = positions, {0: (torch.zeros(1, 1, capacity, 1),) * 2}
    for got, wanted, own in zip(rotary(x, positions), expected, outside, strict=True):
        torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(own[:, [3, 17]], wanted)


@pytest.mark.ci
def test_longrope_in_a_package(tmp_path: Path) -> None:
    """A row has the model's logits in any batch, however its prompt is cut, and once compiled."""
    model = longrope_model()
    rng = np.random.default_rng(0)
    long, short = rng.integers(3, 300, 48), rng.integers(3, 300, 9)
    with torch.no_grad():
        wanted = {
            len(ids): model(torch.tensor(ids[None])).logits[0, -1].numpy() for ids in (long, short)
        }
    package = export_without_sampler(model, tmp_path / "package")
    np.testing.assert_allclose(alone(package, short, FIRST_CONTEXT), wanted[9], atol=1e-4)
    np.testing.assert_allclose(alone(package, long, 64), wanted[48], atol=1e-4)
    np.testing.assert_allclose(alone(package, long, 64, pieces=4), wanted[48], atol=1e-4)
    ids = np.zeros((2, 48), np.int64)
    ids[0], ids[1, :9] = long, short
    runner = runner_of(package, 64)
    both = runner.step(ids, np.array([48, 9]), runner.start(2))["logits"]
    np.testing.assert_allclose(both, [wanted[48], alone(package, short, 64)], atol=1e-4)
    for context, ids in ((FIRST_CONTEXT, short), (3 * FIRST_CONTEXT, long)):
        options = CompileOptions(ctx_len=context)
        compiled = compile_package(package, tmp_path / f"compiled-{context}", options)
        np.testing.assert_allclose(alone(compiled, ids, context), wanted[len(ids)], atol=1e-4)


def dynamic_model() -> PreTrainedModel:
    scaling = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    return random_model("llama", rope_parameters=scaling, max_position_embeddings=48)


def test_the_frequencies_of_dynamic_scaling_never_change() -> None:
    """Up to the positions that a model knows, they are transformers' own; a longer row does not change them."""
    model, context, x = dynamic_model(), DecodeContext(), torch.zeros(1)
    rotary, positions = model.model.rotary_emb, torch.tensor([[3, 47]])
    expected = [angles[:, [3, 47]] for angles in rotary(x, torch.arange(48)[None])]
    use_rope_of_capacity(model, context)
    longer = rotary(x, torch.arange(60)[None])
    assert not torch.allclose(longer[0][:, [47]], expected[0][:, [1]])
    context.positions, context.past = positions, {0: (torch.zeros(1, 1, 48, 1),) * 2}
    for got, wanted in zip(rotary(x, positions), expected, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.slow
def test_dynamic_scaling_in_a_package(tmp_path: Path) -> None:
    model = dynamic_model()
    ids = np.random.default_rng(0).integers(3, 300, 47)
    with torch.no_grad():
        wanted = model(torch.tensor(ids[None])).logits[0, -1].numpy()
    package = export_without_sampler(model, tmp_path / "package")
    np.testing.assert_allclose(alone(package, ids, 48), wanted, atol=1e-4)
    compiled = compile_package(package, tmp_path / "compiled", CompileOptions(ctx_len=48))
    np.testing.assert_allclose(alone(compiled, ids, 48), wanted, atol=1e-4)
    with pytest.raises(CompileError, match="ctx_len is 49"):
        compile_package(package, tmp_path / "longer", CompileOptions(ctx_len=49))


@pytest.mark.ci
def test_queries_of_llama_4_are_scaled_by_the_rows_own_positions(tmp_path: Path) -> None:
    """The parity gate compares rows of several lengths, steps after them and pieces. A Llama 4 of the hub has a
    floor_scale of 8,192 tokens, which its prompts do not reach."""
    model = random_model(
        "llama4_text",
        layer_types=["full_attention", "full_attention"],
        no_rope_layers=[0, 1],
        num_local_experts=2,
        intermediate_size_mlp=96,
        head_dim=16,
        floor_scale=4,
        attn_scale=0.5,
    )
    package = export_without_sampler(model, tmp_path / "package")
    assert package.manifest.parity is not None
    assert package.manifest.parity["max_error"] <= 1e-4
    rows = model.model.layers[0].self_attn
    assert rows.attn_temperature_tuning
    assert not any(name.startswith("qsample_query") for name in vars(rows))


def runner_of(package: Package, capacity: int) -> GraphRunner:
    path = package.path
    return GraphRunner(load_graph(path / "decoder.onnx"), path, package.interface, capacity)


def alone(package: Package, ids: np.ndarray, capacity: int, pieces: int = 1) -> np.ndarray:
    """[V] after `ids`, read in so many pieces."""
    runner = runner_of(package, capacity)
    state = runner.start(1)
    for piece in np.split(ids, pieces):
        logits = runner.step(piece[None], np.array([len(piece)]), state)["logits"][0]
    return logits


@pytest.mark.parametrize("heads_axis", [1, 2])
def test_rotation_is_a_complex_product(heads_axis: int) -> None:
    generator = torch.Generator().manual_seed(0)
    angles = torch.rand(2, 5, 4, generator=generator) * 7
    shape = [2, 5, 8]
    shape.insert(heads_axis, 3)
    states = torch.randn(shape, generator=generator)
    expected = torch.view_as_complex(states.reshape(*shape[:-1], 4, 2)) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(heads_axis)
    rotated = Rotation(angles.cos(), angles.sin()).rotate(states, heads_axis)
    torch.testing.assert_close(rotated, torch.view_as_real(expected).flatten(3))


def test_a_model_computes_the_same_and_is_itself_again() -> None:
    model, ids = (
        random_model("llama4_text", num_local_experts=2, intermediate_size_mlp=96, head_dim=16),
        torch.arange(6),
    )
    with torch.no_grad():
        before = model(ids[None]).logits
        with real_rotary_embeddings(model):
            inside = model(ids[None]).logits
        after = model(ids[None]).logits
    torch.testing.assert_close(inside, before, atol=1e-5, rtol=0)
    assert torch.equal(after, before)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("opt", {}),
        ("biogpt", {}),
        ("deepseek_v2", {}),
        ("gpt_neo", {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4,
                     "window_size": 4}),
        ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": FIRST_CONTEXT}),
        ("llama4_text", {"layer_types": ["full_attention"] * 2, "no_rope_layers": [0, 1],
                         "num_local_experts": 2, "intermediate_size_mlp": 96, "head_dim": 16,
                         "floor_scale": 4, "attn_scale": 0.5}),
    ],
)  # fmt: skip
def test_rows_of_a_call_have_their_own_positions(
    model_type: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of several lengths, a step of each, and a prompt in pieces, against transformers."""
    compute_operators(monkeypatch)
    own_sizes = model_type == "deepseek_v2"
    check_decoding(tiny_model(model_type) if own_sizes else random_model(model_type, **options))
