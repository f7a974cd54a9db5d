"""Texts that graphs write and read, with graphs that are a few lines of Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from qsample.compiler import trial
from qsample.compiler.trial import Call, chosen, logits_of, read, write
from qsample.contract.arrays import Array
from qsample.contract.interface import ImageShape, Interface, KeyValueShape
from qsample.package.package import Package
from tests.helpers.small_graphs import small_graph

VOCAB = 50
INTERFACE = Interface(VOCAB, (KeyValueShape(1, 8),))


def test_the_tokens_of_a_call() -> None:
    logits = np.array([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    assert chosen({"logits": logits}).tolist() == [1, 0]
    assert chosen({"logits": logits, "next_ids": np.array([[7, 1], [8, 2]])}).tolist() == [7, 8]


def test_a_text_is_written_token_by_token() -> None:
    """Behind the prompt, each call reads what the call before chose: a token of each row."""
    given: list[tuple[Any, Any]] = []

    def step(ids: Array, lengths: Array) -> dict[str, Array]:
        given.append((ids.tolist(), lengths.tolist()))
        return {"next_ids": ids[:, -1:] + 10, "logits": np.full((2, 3), len(given))}

    prompt, lengths = np.array([[1, 2, 3], [4, 5, 0]]), np.array([3, 2])
    calls = list(write(step, prompt, lengths, 3))
    assert given == [
        ([[1, 2, 3], [4, 5, 0]], [3, 2]),
        ([[13], [10]], [1, 1]),
        ([[23], [20]], [1, 1]),
    ]
    assert [(call.ids.tolist(), call.lengths.tolist()) for call in calls] == given
    assert [call.tokens.tolist() for call in calls] == [[13, 10], [23, 20], [33, 30]]
    assert [call.logits[0, 0] for call in calls] == [1, 2, 3]
    assert all(dict(call.images) == {} for call in calls)

    given.clear()
    calls = list(write(step, prompt, lengths, 2, lambda results: results["next_ids"][:, 0] + 1))
    assert [call.tokens.tolist() for call in calls] == [[14, 11], [25, 22]]
    (call,) = write(lambda ids, lengths: {"next_ids": ids}, prompt, lengths, 1)
    assert call.logits.size == 0, "the graph returns none"
    assert list(write(step, prompt, lengths, 0)) == []


class FakeRunner:
    """Its logits are the id, and the number of real ids of the row before it; row by row if all are wanted."""

    made: list[dict[str, Any]]
    at_once: bool

    def __init__(self, *given: Any, **options: Any) -> None:
        self.made.append({"given": given, "options": options, "steps": []})

    def start(self, rows: int) -> dict[str, Array]:
        return {"lengths": np.zeros(rows, np.int64)}

    def step(
        self, ids: Array, lengths: Array, state: dict[str, Array], images: Mapping[str, Array]
    ) -> dict[str, Array]:
        self.made[-1]["steps"].append((ids.tolist(), lengths.tolist(), dict(images)))
        places = state["lengths"][:, None] + np.arange(ids.shape[1])
        logits = np.stack([ids, places], axis=-1).astype(np.float32)
        state["lengths"] = state["lengths"] + lengths
        last = logits[np.arange(len(ids)), np.asarray(lengths) - 1]
        return {"logits": logits.reshape(-1, 2) if self.at_once else last}


@pytest.fixture(params=[True, False])
def runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The sessions, whose graphs return all logits at once or only those of the last token."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(FakeRunner, "made", found, raising=False)
    monkeypatch.setattr(FakeRunner, "at_once", request.param, raising=False)
    monkeypatch.setattr(trial, "GraphRunner", FakeRunner)
    monkeypatch.setattr(trial, "return_all_logits", lambda model: request.param)
    return found


def call(ids: list[list[int]], lengths: list[int], **images: Array) -> Call:
    rows = len(ids)
    return Call(np.array(ids), np.array(lengths), np.zeros(rows), np.zeros((rows, 0)), images)


TEXTS = [
    [call([[1, 2, 3], [4, 5, 0]], [3, 2]), call([[6], [7]], [1, 1]), call([[8], [9]], [1, 1])],
    [call([[10, 11, 12, 13, 14]], [5]), call([[15, 16]], [2])],
]


def test_texts_are_read_in_one_call_or_call_by_call(runs: list[dict[str, Any]]) -> None:
    """With the same logits: those after the last token of each call, of each row."""
    model = small_graph("g (float[1] x) => (float[1] y) { y = Neg (x) }")
    found = read(model, TEXTS, Path("/weights"), INTERFACE, 64)
    assert [[logits.tolist() for logits in text] for text in found] == [
        [[[3, 2], [5, 1]], [[6, 3], [7, 2]], [[8, 4], [9, 3]]],
        [[[14, 4]], [[16, 6]]],
    ]
    (run,) = runs
    assert run["given"] == (model, Path("/weights"), INTERFACE, 64)
    assert run["options"] == {"weights_mapped": True}
    if FakeRunner.at_once:
        assert run["steps"] == [
            (
                [
                    [1, 2, 3, 6, 8, 0, 0],
                    [4, 5, 7, 9, 0, 0, 0],
                    [10, 11, 12, 13, 14, 15, 16],
                ],
                [5, 4, 7],
                {},
            )
        ]
    else:
        assert [step[0] for step in run["steps"]] == [
            one.ids.tolist() for text in TEXTS for one in text
        ]


def test_the_images_of_a_text(runs: list[dict[str, Any]]) -> None:
    """Inputs of tokens are joined like ids, and are off behind the end; features are those of the first call."""
    interface = replace(INTERFACE, image=ImageShape(4))
    rows = {spec.name: spec for spec in interface.image_inputs}
    off = rows["image_rows"].off
    features = np.ones((2, 4), np.float32)
    text = [
        call(
            [[1, 2], [3, 0]],
            [2, 1],
            image_rows=np.array([[0, 1], [off, off]]),
            image_features=features,
        ),
        call([[4], [5]], [1, 1], image_rows=np.array([[off], [1]]), image_features=features),
    ]
    model = small_graph("g (float[1] x) => (float[1] y) { y = Neg (x) }")
    read(model, [text], Path("/weights"), interface, 64)
    steps = runs[0]["steps"]
    assert all(step[2]["image_features"] is features for step in steps)
    assert [step[2]["image_rows"].tolist() for step in steps] == (
        [[[0, 1, off], [off, 1, off]]]
        if FakeRunner.at_once
        else [[[0, 1], [off, off]], [[off], [1]]]
    )


def test_the_graph_of_a_folder_ends_at_its_logits(small: Package) -> None:
    model = logits_of(small.path, small.interface)
    names = [str(value.name) for value in model.graph.outputs]
    assert names == ["logits", "present.0.key", "present.0.value"]
    assert isinstance(model, ir.Model)
