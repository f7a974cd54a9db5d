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

from qsample.errors import ParityError, UnsupportedModelError
from qsample.exporters import parity
from qsample.exporters.huggingface_reference import reference
from qsample.graph import gqa
from qsample.graph.join import return_logits
from qsample.graph.runner import GraphRunner
from qsample.graph.weights import load_graph
from qsample.package.package import Package, read_package
from qsample.transforms import attention, decoder, recurrent, recurrent_operators
from qsample.transforms.attention import AttentionCall
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


def check(
    package: Package, expected: parity.Reference, folder: Path | None = None, **options: int
) -> parity.Parity:
    return parity.check(folder or package.path, package.interface, expected, **options)


def test_a_published_graph_passes_and_stays_as_it_is(
    package: Package, expected: parity.Reference
) -> None:
    before = package.file("decoder.onnx").read_bytes()
    found = asdict(check(package, expected))
    assert (
        0 < found["max_error"] <= (package.manifest.parity or {})["max_error"] <= found["tolerance"]
    )
    assert {**found, "max_error": None} == {**(package.manifest.parity or {}), "max_error": None}
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
            chunk = np.pad(
                ids[:, done : done + size], ((0, 0), (0, (number * 3) % 4 if size > 1 else 0))
            )
            done += size
            logits = runner.step(chunk, np.array([size]), state)["logits"][0]
            np.testing.assert_allclose(logits, wanted[done - 1], atol=1e-5)


@pytest.mark.parametrize(
    ("row", "step", "wrong"), [(0, 0, 1), (1, 1, 1), (2, 4, 1), (2, 3, np.nan)]
)
def test_one_logit_that_differs(
    row: int, step: int, wrong: float, package: Package, expected: parity.Reference
) -> None:
    logits = [array.copy() for array in expected.logits]
    logits[row][step, 17] += wrong * 2e-4 * max(1.0, np.abs(logits).max())
    with pytest.raises(
        ParityError, match=r"differ from the eager model's by .*, more than .* by step"
    ):
        check(package, replace(expected, logits=logits))


def test_other_attention_operators_than_layers(
    package: Package, expected: parity.Reference
) -> None:
    with pytest.raises(ParityError, match="2 GroupQueryAttention nodes for 1 attention layers"):
        check(package, expected, plain_attention_layers=1)
    interface = package.interface
    longer = replace(interface, key_values=interface.key_values + interface.key_values[:1])
    with pytest.raises(ParityError, match="2 GroupQueryAttention nodes for 3 attention layers"):
        parity.check(package.path, longer, expected)


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


@pytest.mark.parametrize("wrong", [1e-3, np.nan])
def test_scores_that_are_not_those_of_the_logits(
    wrong: float,
    exported: Callable[..., Path],
    expected: parity.Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = read_package(exported("llama", logprobs=True, prompt_logprobs=True))
    check(package, expected)
    step = GraphRunner.step

    def off_by_a_little(*args: Any) -> dict[str, Any]:
        results = step(*args)
        scores = results["prompt_logprobs"] + np.float32(wrong)
        return results | {"prompt_logprobs": scores}

    monkeypatch.setattr(GraphRunner, "step", off_by_a_little)
    with pytest.raises(ParityError, match="prompt_logprobs differ from the log-softmax"):
        check(package, expected)


# What the gate makes of numbers.


def call(*rows: list[float], wanted: list[list[float]] | None = None) -> parity.Compared:
    """A call whose logits are `rows`; `wanted`: the model's, if they are others."""
    return parity.Compared(
        np.array(rows, np.float32), np.array(rows if wanted is None else wanted, np.float32)
    )


SAME = call([1.0, -8.0, 2.0], [0.5, 3.0, -4.0])
NAN, INFINITY = float("nan"), float("inf")


def test_equal_logits_do_not_differ() -> None:
    assert parity.compare({"steps": [SAME, SAME]}, "float32") == (0.0, 8.0, pytest.approx(8e-4))


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize(
    ("one", "other"),
    [(NAN, 2.0), (INFINITY, 2.0), (-INFINITY, 2.0), (INFINITY, 3e38), (INFINITY, -INFINITY)],
)
def test_what_no_difference_can_be_computed_of_never_passes(
    one: float, other: float, position: int
) -> None:
    """Whichever call it is in: the largest of a list that holds a NaN depends on the order in Python."""
    for got, wanted in ((one, other), (other, one)):
        calls = [SAME] * 4
        calls[position] = call([1.0, got, 2.0], wanted=[[1.0, wanted, 2.0]])
        with pytest.raises(
            ParityError,
            match=f"differ from the eager model's by {'nan' if np.isnan(one) else 'inf'}",
        ):
            parity.compare({"steps": calls[:2], "chunks": calls[2:]}, "float32")


def test_an_infinite_mask_on_both_sides_is_no_difference() -> None:
    masked = call([1.0, -INFINITY, 2.0])
    assert parity.compare({"steps": [masked, SAME]}, "float32").error == 0.0
    assert parity.compare({"steps": [masked]}, "float32").scale == 2.0


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
            with pytest.raises(
                ParityError, match=rf"by {1.01 * tolerance:.3g}, more than {tolerance:.3g}"
            ):
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


def without(option: str) -> Callable[[pytest.MonkeyPatch], None]:
    """The operator is emitted without one of its options."""
    original = attention._group_query_attention

    def changed(context: DecodeContext, layer: int, call: AttentionCall) -> Any:
        if option == "window":
            return original(context, layer, replace(call, window=None))
        value = call.query.shape[-1] ** -0.5 if option == "scale" else None
        scoring = replace(call.scoring, **{option: value})
        return original(context, layer, replace(call, scoring=scoring))

    return lambda monkeypatch: monkeypatch.setattr(attention, "_group_query_attention", changed)


def padding_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a later chunk: it is right for a first chunk and for one without padding."""
    real = attention._group_query_attention

    def planted(context: DecodeContext, layer: int, call: AttentionCall) -> Any:
        context.seqlens_k = context.positions[:, 0].to(torch.int32) + context.input_lengths - 1
        return real(context, layer, call)

    monkeypatch.setattr(attention, "_group_query_attention", planted)


def swapped_rotary_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    real_run, real_half = decoder.run_model, modeling_llama.rotate_half

    def swapped(*args: Any) -> Any:
        with monkeypatch.context() as planted:
            planted.setattr(modeling_llama, "rotate_half", lambda states: -real_half(states))
            return real_run(*args)

    monkeypatch.setattr(decoder, "run_model", swapped)


def dropped_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a layer of plain operators: every key before a token is seen, whatever the model's mask says."""
    allowed = attention.MaskRule.allowed
    monkeypatch.setattr(
        attention.MaskRule,
        "allowed",
        lambda rule, *args: allowed(attention.MaskRule(attention.causal()), *args),
    )


def padding_that_changes_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "recurrence_of", lambda module: None)
    monkeypatch.setattr(recurrent, "where", lambda rows, new, old: new.to(old.dtype))


def padding_that_an_operator_takes_for_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent_operators.Chunk, "without_padding", lambda chunk, values: values)


ONE_LAYER, LONG = (
    {"num_hidden_layers": 1},
    {"sliding_window": 4096, "max_position_embeddings": 32768},
)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("plant", "model", "message"),
    [
        (without("softcap"), lambda: random_model("gemma2", **ONE_LAYER), "more than"),
        (
            padding_not_counted,
            lambda: random_model("llama", **ONE_LAYER),
            r"prompt in chunks: [\d.]+$",
        ),
        *(
            pytest.param(plant, model, "more than", marks=pytest.mark.slow)
            for plant, model in (
                (without("window"), lambda: random_model("mistral", **LONG)),
                (without("sinks"), lambda: random_model("gpt_oss")),
                (without("scale"), lambda: random_model("gemma3_text", query_pre_attn_scalar=64)),
                (swapped_rotary_embedding, lambda: random_model("llama")),
                (dropped_pattern, lambda: tiny_model("llama4_text")),
                (padding_that_changes_a_state, lambda: tiny_model("mamba")),
                (padding_that_an_operator_takes_for_tokens, lambda: tiny_model("qwen3_next")),
            )
        ),
    ],
)
def test_an_export_that_computes_something_else(
    plant: Callable[[pytest.MonkeyPatch], None],
    model: Callable[[], Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    with pytest.raises(ParityError, match=rf"differ from the eager model's by .*{message}"):
        export_without_sampler(model(), tmp_path / "package")
    assert os.listdir(tmp_path) == []


@pytest.mark.ci
@pytest.mark.parametrize(
    ("window", "windows"),
    [
        (20, "passed by a prompt"),
        (1024, "narrowed"),
        pytest.param(32768, "narrowed", marks=pytest.mark.slow),
    ],
)
def test_windows_that_are_one_token_off(
    window: int, windows: str, package: Package, tmp_path: Path
) -> None:
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
            with pytest.raises(
                ParityError, match="with a window of" if windows == "narrowed" else "by step"
            ):
                check(package, expected, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", ["gemma3n_text", "llama4_text", "gpt_oss", "olmo3", "gemma4_unified_text"]
)
def test_long_windows_are_compared(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of GroupQueryAttention, of layers that share a cache, of chunked attention."""
    for name in ("sliding_window", "attention_chunk_size"):
        monkeypatch.setitem(configs.SIZES, name, 2048)
    figures = export_without_sampler(
        configs.tiny_model(model_type), tmp_path / "package"
    ).manifest.parity
    assert figures["windows"] == "narrowed"
    assert figures["max_error"] <= 1e-4


def test_errors_of_the_manifest() -> None:
    assert [parity.rounded_up(error, 1e-4) for error in (0.0, 2e-6, 1e-5, 1.7e-5, 2.5e-5)] == [
        0,
        1e-5,
        1e-5,
        1e-4,
        1e-4,
    ]
    assert parity.rounded_up(3e-2, 4e-2) == 4e-2
    assert parity.rounded_up(0.4567, float("inf")) == 0.46
    assert parity.rounded_up(float("inf"), float("inf")) == float("inf")


@pytest.mark.parametrize(
    ("context", "windows", "lengths", "passed"),
    [
        (None, [], [4, 9, 14], []),
        (4096, [], [4, 9, 14], []),
        (19, [], [4, 9, 14], []),  # 14 tokens and 5 after them
        (18, [], [4, 9, 13], []),
        (9, [], [4], []),  # equal lengths are one prompt
        (6, [], [1], []),  # the least
        (None, [8], [4, 9, 11, 14], [8]),
        (None, [8, 20], [4, 9, 14, 23], [8, 20]),
        (None, [639, 640, 2048], [4, 9, 14, 642], [639]),
        (30, [22], [4, 9, 14, 25], [22]),
        (30, [23], [4, 9, 14], []),  # no room beyond it
    ],
)
def test_lengths_of_prompts(
    context: int | None, windows: list[int], lengths: list[int], passed: list[int]
) -> None:
    """Each is within the positions that the model knows, and the last exceeds the windows that it can."""
    assert parity.reference_lengths(context, windows) == (lengths, passed)


def test_a_model_without_room_for_a_prompt() -> None:
    for context in (5, 0):
        with pytest.raises(
            UnsupportedModelError, match=rf"knows {context} positions .* it needs 6 to be compared"
        ):
            parity.reference_lengths(context, [])


def image_reference(**changes: Any) -> parity.ImageReference:
    """A prompt of a text, an image of two tokens, a text, and an image of three."""
    values: dict[str, Any] = {
        "prompt": [5, 90, 90, 6, 90, 90, 90, 7],
        "following": 8,
        "rows": np.array([-1, 0, 1, -1, 2, 3, 4, -1], np.int32),
        "features": np.arange(10, dtype=np.float32).reshape(5, 2),
        "logits": np.arange(12.0).reshape(2, 6),
        "offsets": np.arange(27, dtype=np.int32).reshape(9, 3),
    }
    return parity.ImageReference(**(values | changes))


@pytest.mark.parametrize(
    ("piece", "before", "rows", "features"),
    [
        (slice(0, 8), 0, [[-1, 0, 1, -1, 2, 3, 4, -1]], (0, 5)),
        (slice(0, 8), 3, [[-1] * 8, [-1, 0, 1, -1, 2, 3, 4, -1]], (0, 5)),
        (slice(4, 8), 0, [[0, 1, 2, -1]], (2, 5)),  # only the features that the piece reads
        (slice(5, 6), 3, [[-1] * 3, [0, -1, -1]], (3, 4)),  # padded to the row before it
        (slice(8, 9), 1, [[-1], [-1]], (0, 1)),  # a text: some features have to be there
    ],
)
def test_inputs_of_a_piece_of_a_prompt_with_images(
    piece: slice, before: int, rows: list[list[int]], features: tuple[int, int]
) -> None:
    images = image_reference()
    inputs = parity._image_inputs(images, piece, before)
    assert inputs["image_rows"].tolist() == rows
    assert inputs["image_rows"].dtype == inputs["position_offsets"].dtype == np.int32
    np.testing.assert_array_equal(inputs["image_features"], images.features[slice(*features)])
    assert images.offsets is not None
    count = piece.stop - piece.start
    offsets = np.zeros((*np.shape(rows), 3))
    offsets[-1, :count] = images.offsets[piece]
    np.testing.assert_array_equal(inputs["position_offsets"], offsets)
    assert "position_offsets" not in parity._image_inputs(
        image_reference(offsets=None), piece, before
    )


def test_only_the_logits_of_the_first_tokens() -> None:
    """Of all parts of a reference; those that are not there stay absent."""
    logits = np.arange(30.0).reshape(5, 6)
    plain = parity.Reference([[1]], [[2, 3, 4, 5]], [logits, logits + 1])
    cut = plain.of_first_tokens(4)
    assert [row.shape for row in cut.logits] == [(5, 4)] * 2
    np.testing.assert_array_equal(cut.logits[1], logits[:, :4] + 1)
    assert (cut.narrowed, cut.images, cut.windows) == (None, None, "none")
    whole = replace(
        plain,
        narrowed=parity.Narrowed({8: 4}, logits),
        images=image_reference(),
        windows="narrowed",
    ).of_first_tokens(4)
    assert whole.narrowed is not None
    assert whole.images is not None
    assert (whole.narrowed.windows, whole.narrowed.logits.shape) == ({8: 4}, (5, 4))
    assert (whole.images.logits.shape, whole.images.prompt) == ((2, 4), image_reference().prompt)
    assert whole.windows == "narrowed"


def test_states_that_differ() -> None:
    """Each is measured by its own largest number; the message names it."""
    same = parity.Compared(np.array([1.0, 100.0]), np.array([1.0, 100.0]))
    small = parity.Compared(np.array([0.5, 0.0]), np.array([0.5, 0.0009]))
    parity._compare_states({}, 1e-2)
    parity._compare_states({"key": same, "value": small}, 1e-2)
    with pytest.raises(
        ParityError, match=r"state value .* differs by 0.0009 from .* more than 0.0005"
    ):
        parity._compare_states({"key": same, "value": small}, 1e-3)


def test_ragged_rows_are_filled_up() -> None:
    ids, lengths = parity._ragged([[1, 2, 3], [4], []])
    assert ids.tolist() == [[1, 2, 3], [4, 0, 0], [0, 0, 0]]
    assert (ids.dtype, lengths.tolist()) == (np.int64, [3, 1, 0])
    assert parity._ragged([[1]], 2)[0].tolist() == [[1, 0, 0]]


class TwoTokens:
    """A runner that returns the same logits, and the token that it is told to choose."""

    def __init__(self, logits: list[float], *chosen: int) -> None:
        self.results: dict[str, np.ndarray] = {"logits": np.array([logits])}
        if chosen:
            self.results["next_ids"] = np.array([chosen])

    def step(self, *given: object) -> dict[str, np.ndarray]:
        return self.results


def test_a_greedy_token_is_the_argmax() -> None:
    """Of a graph that chooses tokens; a NaN is left to the comparison, which names it."""
    one: Any = np.zeros(1)
    for runner in (TwoTokens([0.0, 2.0]), TwoTokens([0.0, 2.0], 1, 0), TwoTokens([0.0, NAN], 0)):
        given: Any = runner
        np.testing.assert_array_equal(parity._logits(given, one, one, {}), runner.results["logits"])
    wrong: Any = TwoTokens([0.0, 2.0], 0, 1)
    with pytest.raises(ParityError, match="did not return the token with the largest logit"):
        parity._logits(wrong, one, one, {})
