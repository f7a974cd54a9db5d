"""Every gate that compares numbers refuses NaN and infinities, on either side and in whichever place they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from qsample.addons.bake import attention
from qsample.addons.evaluate.commands import LimitOptions
from qsample.addons.evaluate.differences import Differences, Verification, _differences, _head
from qsample.addons.evaluate.quality import log_probabilities
from qsample.compiler import agreement
from qsample.compiler import vision as compiled_vision
from qsample.compiler.divergence import _divergence, _figures, _Place
from qsample.compiler.own_text import Opening, OwnText, write_text
from qsample.compiler.passes import rope
from qsample.compiler.trial import Call
from qsample.contract.arrays import Array
from qsample.contract.tensors import LOGITS, PROMPT_LOGPROBS
from qsample.errors import QsampleError
from qsample.exporters import parity
from qsample.exporters import vision as exported_vision
from qsample.graph.compare import largest_difference, largest_finite
from qsample.package.divergence import DOCUMENTS, Divergence
from qsample.package.statistics import Estimate

NAN, INFINITY = math.nan, math.inf
Gate = Callable[[Array, Array, pytest.MonkeyPatch], None]


class RefusedError(Exception):
    """A gate that returns whether numbers pass said no."""


def call_of(logits: Array) -> Call:
    rows = len(logits)
    return Call(np.zeros((rows, 1)), np.ones(rows), np.zeros(rows), logits)


def self_test_of_float32(got: Array, wanted: Array, _: pytest.MonkeyPatch) -> None:
    agreement._compare_logits([[call_of(got)]], [[call_of(wanted)]])


def parity_of_logits(got: Array, wanted: Array, _: pytest.MonkeyPatch) -> None:
    parity.compare({"steps": [parity.Compared(got, wanted)]}, "float32")


def parity_of_states(got: Array, wanted: Array, _: pytest.MonkeyPatch) -> None:
    parity._compare_states({"key": parity.Compared(got, wanted)}, 1e-4)


class FakeVision:
    def __init__(self, features: Array) -> None:
        self._features = features

    def features(self, pixels: Any, grid: Any) -> Array:
        return self._features


def parity_of_images(got: Array, wanted: Array, patch: pytest.MonkeyPatch) -> None:
    image = SimpleNamespace(pixels=SimpleNamespace(numpy=lambda: None, shape=(1,)), grid=None)
    module: Any = SimpleNamespace(by_tiles=True, image=lambda *_: image, tower=None)
    patch.setattr(exported_vision, "_features", lambda _, __, images: [wanted] * len(images))
    patch.setattr(exported_vision, "vision_session", lambda *_: FakeVision(got))
    patch.setattr(exported_vision, "_sizes_of", lambda image: {})
    model: Any = None
    exported_vision.compare_vision(model, module, Path(), "float32")


def self_test_of_images(got: Array, wanted: Array, patch: pytest.MonkeyPatch) -> None:
    plan: Any = SimpleNamespace(
        source=SimpleNamespace(
            manifest=SimpleNamespace(parity={"vision_images": [{}]}), path=Path()
        ),
        interface=SimpleNamespace(dtype="float32"),
        options=SimpleNamespace(provider="cpu"),
        weights=None,
        store_float16=False,
    )
    patch.setattr(compiled_vision, "_image", lambda shapes: (None, None))
    patch.setattr(compiled_vision, "vision_session", lambda *_: FakeVision(wanted))
    patch.setattr(compiled_vision, "open_vision", lambda *_: FakeVision(got))
    package: Any = None
    compiled_vision.compare_vision(plan, package)


def divergence(got: Array, wanted: Array, _: pytest.MonkeyPatch) -> None:
    """With the widest limit."""
    tokens = np.zeros((len(got), 1), np.int64)
    columns = _figures(wanted, got, tokens)
    places = [_Place(row, *(column[row] for column in columns)) for row in range(len(got))]
    text = OwnText(Opening(DOCUMENTS, (), (), 1.0, ()), tokens, [tokens], [], [])
    found = _divergence(text, places)
    assert found.far or found.is_within(INFINITY)
    if not found.is_within(INFINITY):
        raise RefusedError


def verification(got: Array, wanted: Array, _: pytest.MonkeyPatch) -> None:
    """With the widest finite limits."""
    head = _head("the reference", enumerate(wanted), len(wanted), wanted.shape[1])
    found = _differences(head, "the package", enumerate(got))
    limits = LimitOptions(max_mean=1e300, max_p99=1e300, max_difference=1e300, min_agreement=0)
    if limits.failures(verified(found)):
        raise RefusedError


def rotary_tables(got: Array, wanted: Array, patch: pytest.MonkeyPatch) -> None:
    """got: [positions, D], the angles that a call computes. wanted: the table."""

    class Angles:
        most_rows = 2
        calls = 0

        def __call__(self, starts: list[int], length: int) -> tuple[Array, Array]:
            self.calls += 1
            table = wanted if self.calls == 1 else got
            positions = [start + step for start in starts for step in range(length)]
            return wanted[positions], table[positions]

    patch.setattr(rope, "_position_angles", lambda *_: Angles())
    patch.setattr(rope, "initializer", lambda *_: None)
    model: Any = SimpleNamespace(graph=SimpleNamespace(initializers={}))
    if rope._tables(model, (), len(wanted)) is None:
        raise RefusedError


def scale_of_attention(got: Array, wanted: Array, _: pytest.MonkeyPatch) -> None:
    """The scores of a file, `got`, are to be half of the products of its queries and keys: `wanted`."""
    names = {name: SimpleNamespace(name=name) for name in ("query", "key", "scores")}
    layer = SimpleNamespace(present_key=names["key"], heads=1, number=0)
    match: Any = SimpleNamespace(query=names["query"], scores=names["scores"], heads=1, layer=layer)
    keys = np.eye(wanted.shape[1])
    run = {"query": 2 * wanted[None], "key": keys[None, None], "scores": got[None, None]}
    foreign: Any = SimpleNamespace(path=Path("file.onnx"), dtype=ir.DataType.FLOAT)
    attention._scale(foreign, match, [run], [np.ones(wanted.shape, bool)], 0.0)


GATES: list[Gate] = [
    self_test_of_float32,
    parity_of_logits,
    parity_of_states,
    parity_of_images,
    self_test_of_images,
    divergence,
    verification,
    rotary_tables,
    scale_of_attention,
]
ROWS = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.__name__)
def test_equal_numbers_pass(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    gate(ROWS.copy(), ROWS.copy(), monkeypatch)


@pytest.mark.parametrize("place", [(1, 0), (2, 1), (5, 3)])
@pytest.mark.parametrize("side", ["got", "wanted"])
@pytest.mark.parametrize("value", [NAN, INFINITY, -INFINITY])
@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.__name__)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_one_number_that_is_none_does_not_pass(
    gate: Gate,
    value: float,
    side: str,
    place: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if gate is divergence and (side, value) == ("wanted", -INFINITY):
        pytest.skip("a token that the float model never draws adds nothing")
    given = {"got": ROWS.copy(), "wanted": ROWS.copy()}
    given[side][place] = value
    with pytest.raises((QsampleError, RefusedError)):
        gate(given["got"], given["wanted"], monkeypatch)


@pytest.mark.parametrize("value", [NAN, INFINITY])
@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.__name__)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_another_number_that_is_wrong_does_not_pass_beside_an_equal_one_that_is_none(
    gate: Gate, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An infinity on both sides is not the scale of what may differ."""
    got, wanted = ROWS.copy(), ROWS.copy()
    got[2, 1] = wanted[2, 1] = value
    got[4, 2] += 1
    with pytest.raises((QsampleError, RefusedError)):
        gate(got, wanted, monkeypatch)


def scores(logits: Array, scored: Array) -> Array:
    exact = logits.astype(np.float64)
    return np.array(
        [row[token] - np.log(np.exp(row).sum()) for row, token in zip(exact, scored, strict=True)]
    )


@pytest.mark.parametrize("value", [0.0, NAN, INFINITY, -INFINITY])
@pytest.mark.parametrize("what", [LOGITS.name, PROMPT_LOGPROBS.name])
@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_scores_of_prompts(what: str, value: float, row: int) -> None:
    """A masked logit is no scale of what a score may differ by."""
    plan: Any = SimpleNamespace(
        ctx_len=8, source=SimpleNamespace(interface=SimpleNamespace(vocab_size=4))
    )

    class Device:
        def start(self, rows: int) -> None:
            pass

        def step(self, ids: Array, lengths: Array, state: Any, parameters: Any) -> dict[str, Array]:
            scored = parameters["scored_ids"]
            logits = ROWS[: len(ids)].copy()
            if what == LOGITS.name:
                logits[row, (scored[row] + 1) % 4] = value or ROWS[row, 0]
            results = {LOGITS.name: logits, PROMPT_LOGPROBS.name: scores(logits, scored)[:, None]}
            if what == PROMPT_LOGPROBS.name:
                results[what][row] = value or results[what][row]
            elif value:
                results[PROMPT_LOGPROBS.name][1 - row] += 1
            return results

    device: Any = Device()
    if value == 0.0:
        agreement._check_scores(device, plan, 2)
        return
    with pytest.raises(QsampleError, match="prompt_logprobs differ from the log-softmax"):
        agreement._check_scores(device, plan, 2)


@pytest.mark.parametrize("value", [NAN, INFINITY])
@pytest.mark.parametrize("row", range(3))
def test_a_text_is_not_written_of_what_is_no_number(value: float, row: int) -> None:
    """Neither a text to fit weights to, nor one to measure the divergence on, nor that of the self-test."""
    logits = ROWS[:3].copy()
    logits[row, 3] = value
    opening = Opening(DOCUMENTS, (1,), (), 1.0, ())
    with pytest.raises(QsampleError, match="the float model gives logits that are not numbers"):
        write_text(lambda ids, lengths: {"logits": logits}, opening, 4, rows=3, tokens=2, seed=0)
    with pytest.raises(QsampleError, match="the compiled graph's logits in call 1 are not numbers"):
        agreement._check_numbers([[call_of(ROWS), call_of(logits)]], "compiled")
    logits[row, 3] = -INFINITY  # a token that the model masks
    write_text(lambda ids, lengths: {"logits": logits}, opening, 4, rows=3, tokens=2, seed=0)
    agreement._check_numbers([[call_of(ROWS), call_of(logits)]], "compiled")


@pytest.mark.parametrize("value", [NAN, INFINITY])
@pytest.mark.parametrize("place", [0, 3])
def test_evaluations(value: float, place: int) -> None:
    logits = ROWS[0].copy()
    logits[place] = value
    for given in (logits, np.full(4, -INFINITY)):
        with pytest.raises(
            QsampleError, match="gives logits that are not numbers, at scored token 5"
        ):
            log_probabilities(given, "package", 5)


def verified(differences: Differences) -> Verification:
    return Verification("package", "reference", 6, 4, {"batched": differences}, 0, "", "")


@pytest.mark.parametrize("figure", ["mean", "p99", "largest", "agreement"])
@pytest.mark.parametrize("limit", [0.0, 0.5, 1.0])
def test_a_figure_that_is_none_is_outside_every_limit(figure: str, limit: float) -> None:
    figures = {"mean": 0.0, "p99": 0.0, "largest": 0.0, "agreement": 1.0}
    limits = LimitOptions(max_mean=limit, max_p99=limit, max_difference=limit, min_agreement=limit)
    assert not limits.failures(verified(Differences(**figures, quantiles=())))
    (failure,) = limits.failures(verified(Differences(**figures | {figure: NAN}, quantiles=())))
    assert failure.startswith(f"batched: {figure} is nan")


@pytest.mark.parametrize("limit", [0.0, 0.7, 1e300, INFINITY])
def test_a_divergence_that_is_none_is_within_no_limit(limit: float) -> None:
    def within(kl: float) -> bool:
        one = Estimate(1.0, 1.0, 1.0)
        return Divergence(DOCUMENTS, 1, Estimate(kl, kl, kl), one, one).is_within(limit)

    assert within(0.0)
    assert [within(kl) for kl in (NAN, INFINITY)] == [False, False]
    assert within(limit) == math.isfinite(limit)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (1.0, 1.5, 0.5),
        (INFINITY, INFINITY, 0.0),
        (-INFINITY, -INFINITY, 0.0),
        (INFINITY, 1.0, INFINITY),
        (INFINITY, -INFINITY, INFINITY),
        (NAN, NAN, NAN),
        (NAN, 1.0, NAN),
        (NAN, INFINITY, NAN),
    ],
)
def test_the_largest_difference(one: float, other: float, expected: float) -> None:
    for got, wanted in ((one, other), (other, one)):
        for place in range(3):
            arrays = np.zeros((2, 3), np.float32)
            arrays[:, place] = got, wanted
            np.testing.assert_equal(largest_difference(*arrays), expected)
    assert largest_difference(np.zeros(0), np.zeros(0)) == 0


def test_the_largest_finite_number() -> None:
    assert largest_finite(np.array([1.0, -8.0, NAN]), np.array([[INFINITY, 2.0]])) == 8
    assert largest_finite(np.array([NAN, -INFINITY]), np.zeros(0)) == 0
