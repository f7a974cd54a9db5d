"""The parity gate: a published graph passes, and what differs from the model is refused."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from transformers.models.llama import modeling_llama

from qsample.errors import ParityError
from qsample.exporters import parity
from qsample.exporters.huggingface_reference import reference
from qsample.graph import gqa
from qsample.graph.join import return_logits
from qsample.graph.runner import GraphRunner
from qsample.graph.weights import load_graph
from qsample.package.package import Package, read_package
from qsample.transforms import attention, decoder, recurrent, recurrent_operators
from qsample.transforms.cache import DecodeContext
from tests.architectures import configs
from tests.architectures.configs import tiny_model
from tests.helpers.tiny_models import export_without_sampler, random_model


@pytest.fixture
def package(llama_package: Path) -> Package:
    return read_package(llama_package)


@pytest.fixture(scope="module")
def expected() -> parity.Reference:
    return reference(random_model("llama"))


def check(package: Package, expected: parity.Reference, folder: Path | None = None, **options: int) -> parity.Parity:
    return parity.check(
        folder or package.path,
        package.interface,
        expected,
        **options,
    )


def test_a_published_graph_passes_and_stays_as_it_is(package: Package, expected: parity.Reference) -> None:
    before = package.file("decoder.onnx").read_bytes()
    assert asdict(check(package, expected)) == package.manifest.parity
    assert package.file("decoder.onnx").read_bytes() == before


def test_a_graph_that_passed_is_right_in_more_calls_than_the_gate_takes(package: Package) -> None:
    """A long run of steps, and a prompt in chunks, some of them padded."""
    ids = np.random.default_rng(3).integers(0, package.interface.vocab_size, (1, 24))
    with torch.no_grad():
        wanted = random_model("llama")(torch.tensor(ids)).logits[0].numpy()
    model = return_logits(load_graph(package.file("decoder.onnx")))
    runner = GraphRunner(model, package.path, package.interface, 28)
    for chunks in ([9, *[1] * 15], [4, 5, 3, 1, 11]):
        state, done = runner.start(1), 0
        for number, size in enumerate(chunks):
            chunk = np.pad(ids[:, done : done + size], ((0, 0), (0, (number * 3) % 4 if size > 1 else 0)))
            done += size
            logits = runner.step(chunk, np.array([size]), state)["logits"][0]
            np.testing.assert_allclose(logits, wanted[done - 1], atol=1e-5)


@pytest.mark.parametrize(("row", "step"), [(0, 0), (1, 1), (2, 4)])
def test_one_logit_that_differs(row: int, step: int, package: Package, expected: parity.Reference) -> None:
    logits = [array.copy() for array in expected.logits]
    logits[row][step, 17] += 2e-4 * max(1.0, np.abs(logits).max())
    with pytest.raises(ParityError, match=r"differ from the eager model's by .*, more than .* by step"):
        check(package, replace(expected, logits=logits))


def test_a_logit_that_is_no_number(package: Package, expected: parity.Reference) -> None:
    logits = [array.copy() for array in expected.logits]
    logits[2][3, 5] = np.nan
    with pytest.raises(ParityError, match="differ from the eager model's by nan"):
        check(package, replace(expected, logits=logits))


def test_more_attention_operators_than_layers(package: Package, expected: parity.Reference) -> None:
    with pytest.raises(ParityError, match="2 GroupQueryAttention nodes for 1 attention layers"):
        check(package, expected, plain_attention_layers=1)


def test_a_sampler_that_is_not_greedy_at_temperature_0(
    package: Package, expected: parity.Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = GraphRunner.step

    def off_by_one(*args: Any) -> dict[str, Any]:
        results = step(*args)
        return results | {"next_ids": results["next_ids"] + 1}

    monkeypatch.setattr(GraphRunner, "step", off_by_one)
    with pytest.raises(ParityError, match="did not return the token with the largest logit"):
        check(package, expected)


# What the gate makes of numbers.


def call(*rows: list[float], wanted: list[list[float]] | None = None) -> parity.Compared:
    """A call whose logits are `rows`; `wanted`: the model's, if they are others."""
    return parity.Compared(np.array(rows, np.float32), np.array(rows if wanted is None else wanted, np.float32))


SAME = call([1.0, -8.0, 2.0], [0.5, 3.0, -4.0])
NAN, INFINITY = float("nan"), float("inf")


def test_equal_logits_do_not_differ() -> None:
    assert parity.compare({"steps": [SAME, SAME]}, "float32") == (0.0, 8.0, pytest.approx(8e-4))


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("side", ["got", "wanted"])
def test_a_number_that_is_none_never_passes(side: str, position: int) -> None:
    """Whichever call it is in: the largest of a list that holds a NaN depends on the order in Python."""
    calls = [SAME, SAME, SAME, SAME]
    changed = getattr(SAME, side).copy()
    changed[1, 2] = NAN
    calls[position] = SAME._replace(**{side: changed})
    with pytest.raises(ParityError, match="differ from the eager model's by nan"):
        parity.compare({"steps": calls[:2], "chunks": calls[2:]}, "float32")


def test_an_infinite_mask_on_both_sides_is_no_difference() -> None:
    masked = call([1.0, -INFINITY, 2.0])
    assert parity.compare({"steps": [masked, SAME]}, "float32").error == 0.0
    assert parity.compare({"steps": [masked]}, "float32").scale == 2.0


@pytest.mark.parametrize("infinity", [INFINITY, -INFINITY])
@pytest.mark.parametrize("other", [1.0, 3e38, "the opposite"])
def test_an_infinity_on_one_side_never_passes(infinity: float, other: float | str) -> None:
    got, wanted = [1.0, infinity, 2.0], [1.0, -infinity if other == "the opposite" else other, 2.0]
    for one, two in ((got, wanted), (wanted, got)):
        with pytest.raises(ParityError, match="differ from the eager model's by inf"):
            parity.compare({"steps": [call(one, wanted=[two])]}, "float32")


@pytest.mark.parametrize("dtype", parity.TOLERANCES)
@pytest.mark.parametrize(("largest", "scale"), [(0.25, 1.0), (64.0, 64.0)])
def test_the_tolerance(dtype: str, largest: float, scale: float) -> None:
    """It follows the largest logit, from 1 up, and is inclusive."""
    tolerance = parity.TOLERANCES[dtype] * scale
    for factor, passes in ((0.99, True), (1.01, False)):
        parts = {"steps": [call([largest, 0.0], wanted=[[largest, factor * tolerance]])]}
        if passes:
            assert parity.compare(parts, dtype).error == pytest.approx(factor * tolerance)
        else:
            with pytest.raises(ParityError, match=rf"by {1.01 * tolerance:.3g}, more than {tolerance:.3g}"):
                parity.compare(parts, dtype)


@pytest.mark.parametrize("part", ["steps", "chunks", "windows"])
@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("index", [0, 2])
def test_an_error_in_one_row_of_one_call(part: str, row: int, index: int) -> None:
    parts = {"steps": [SAME] * 3, "chunks": [SAME] * 3, "windows": [SAME] * 3}
    wrong = SAME.got.copy()
    wrong[row, 1] += 0.01
    parts[part] = [*parts[part][:index], SAME._replace(got=wrong), *parts[part][index + 1 :]]
    with pytest.raises(ParityError, match=rf"{part}: {'0, ' * index}0\.01"):
        parity.compare(parts, "float32")


# Planted errors: each changes what the exported graph computes, and must be refused.


def drop(option: str) -> Callable[..., Any]:
    """What emits the operator, without one of its options."""
    original = attention._group_query_attention

    def changed(*args: Any, **options: Any) -> Any:
        query = args[2]
        return original(*args, **(options | {option: query.shape[-1] ** -0.5 if option == "scale" else None}))

    return changed


@pytest.mark.ci
@pytest.mark.parametrize(
    ("model_type", "option", "overrides"),
    [
        ("gemma2", "softcap", {"num_hidden_layers": 1}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("mistral", "sliding_window", {"sliding_window": 4096, "max_position_embeddings": 32768}),
                ("gpt_oss", "s_aux", {}),
                ("gemma3_text", "scale", {"query_pre_attn_scalar": 64}),
            )
        ),
    ],
)
def test_parity_gate_refuses_a_planted_error(
    model_type: str, option: str, overrides: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_group_query_attention", drop(option))
    with pytest.raises(ParityError, match=r"differ from the eager model's by .*, more than"):
        export_without_sampler(random_model(model_type, **overrides), tmp_path / "package")
    assert os.listdir(tmp_path) == []


@pytest.mark.ci
def test_parity_gate_refuses_padding_that_a_later_chunk_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is right for a first chunk and for one without padding."""
    real = attention._group_query_attention

    def planted(context: DecodeContext, *args: Any, **options: Any) -> Any:
        assert context.positions is not None
        assert context.input_lengths is not None
        context.seqlens_k = context.positions[:, 0].to(torch.int32) + context.input_lengths - 1
        return real(context, *args, **options)

    monkeypatch.setattr(attention, "_group_query_attention", planted)
    with pytest.raises(ParityError, match=r"differ from .* prompt in chunks: [\d.]+$"):
        export_without_sampler(random_model("llama", num_hidden_layers=1), tmp_path / "package")
    assert os.listdir(tmp_path) == []


@pytest.mark.ci
@pytest.mark.parametrize(
    ("window", "windows"),
    [(20, "passed by a prompt"), (1024, "narrowed"), pytest.param(32768, "narrowed", marks=pytest.mark.slow)],
)
def test_windows_that_are_one_token_off(window: int, windows: str, package: Package, tmp_path: Path) -> None:
    """The package's graph is given windows of its own; the model is the same with windows."""
    model = random_model("mistral", sliding_window=window, max_position_embeddings=2 * window)
    model.load_state_dict(random_model("llama").state_dict())
    expected = reference(model)
    assert expected.windows == windows
    graph = ir.load(package.file("decoder.onnx"))
    shutil.copy(package.file("initial_state.onnx"), tmp_path)
    for size, passes in ((window, True), (window - 1, False), (window + 1, False), (-1, False)):
        for node in gqa.attentions(graph.graph):
            node.attributes["local_window_size"] = ir.AttrInt64("local_window_size", size)
        ir.save(graph, tmp_path / "decoder.onnx", external_data="decoder.onnx.data")
        if passes:
            assert check(package, expected, tmp_path).windows == windows
        else:
            with pytest.raises(ParityError, match="with a window of" if windows == "narrowed" else "by step"):
                check(package, expected, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gemma3n_text", "llama4_text", "gpt_oss", "olmo3", "gemma4_unified_text"])
def test_long_windows_are_compared(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of GroupQueryAttention, of layers that share a cache, of chunked attention."""
    for name in ("sliding_window", "attention_chunk_size"):
        monkeypatch.setitem(configs.SIZES, name, 2048)
    figures = export_without_sampler(configs.tiny_model(model_type), tmp_path / "package").manifest.parity
    assert figures is not None
    assert figures["windows"] == "narrowed"
    assert figures["max_error"] < 1e-4


@pytest.mark.slow
def test_parity_gate_refuses_a_swapped_rotary_embedding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_run, real_half = decoder.run_model, modeling_llama.rotate_half

    def swapped(*args: Any) -> Any:
        with monkeypatch.context() as planted:
            planted.setattr(modeling_llama, "rotate_half", lambda states: -real_half(states))
            return real_run(*args)

    monkeypatch.setattr(decoder, "run_model", swapped)
    with pytest.raises(ParityError, match=r"differ from the eager model's by .*, more than"):
        export_without_sampler(random_model("llama"), tmp_path / "package")
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_parity_gate_refuses_a_dropped_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a layer of plain operators: every key before a token is seen, whatever the model's mask says."""
    allowed = attention.MaskRule.allowed
    monkeypatch.setattr(
        attention.MaskRule, "allowed", lambda rule, *args: allowed(attention.MaskRule(attention.causal()), *args)
    )
    with pytest.raises(ParityError, match="differ from the eager model's"):
        export_without_sampler(tiny_model("llama4_text"), tmp_path / "package")


@pytest.mark.slow
def test_parity_gate_refuses_padding_that_changes_a_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "recurrence_of", lambda module: None)
    monkeypatch.setattr(recurrent, "where", lambda rows, new, old: new.to(old.dtype))
    with pytest.raises(ParityError, match="differ from the eager model's"):
        export_without_sampler(tiny_model("mamba"), tmp_path / "package")


@pytest.mark.slow
def test_parity_gate_refuses_padding_that_an_operator_takes_for_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent_operators.Chunk, "kept", lambda chunk, values: values)
    with pytest.raises(ParityError, match="differ from the eager model's"):
        export_without_sampler(tiny_model("qwen3_next"), tmp_path / "package")


def test_fewer_attention_operators_than_layers(package: Package, expected: parity.Reference) -> None:
    interface = package.interface
    longer = replace(interface, key_values=interface.key_values + interface.key_values[:1])
    with pytest.raises(ParityError, match="2 GroupQueryAttention nodes for 3 attention layers"):
        parity.check(package.path, longer, expected)
