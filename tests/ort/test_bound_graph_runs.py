"""Graphs over bound memory: what a run reads and writes, on which thread, and under which number."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from qsample.ort import bound_graph, small_graphs
from qsample.ort.bound_graph import NOT_CAPTURED, BoundGraph, Replays, _run_options
from qsample.ort.buffers import Buffer

FLOAT = 1
SPEC: Any = SimpleNamespace(input_names=["x", "added"], output_names=["y"])


def session() -> ort.InferenceSession:
    nodes = [small_graphs.node("Add", ["x", "added"], "y")]
    data = small_graphs.model(nodes, {"x": FLOAT, "added": FLOAT}, {"y": FLOAT})
    return ort.InferenceSession(data, providers=["CPUExecutionProvider"])


def buffers() -> dict[str, Buffer]:
    arrays = {"x": [1, 2], "added": [10, 20], "y": [0, 0], "unused": [0, 0]}
    return {name: Buffer.of(np.array(array, np.float32), "cpu") for name, array in arrays.items()}


def test_a_run_reads_and_writes_the_memory_as_it_is() -> None:
    memory = buffers()
    graph = BoundGraph(session(), SPEC, memory, "cpu", None)
    graph.run()
    assert memory["y"].read().tolist() == [11, 22]
    memory["x"].write(np.array([3, 4], np.float32))
    graph.run(wait=False)
    assert memory["y"].read().tolist() == [13, 24]


def test_an_input_is_read_from_other_memory() -> None:
    memory = buffers()
    graph = BoundGraph(session(), SPEC, memory, "cpu", None)
    other = Buffer.of(np.array([5, 6], np.float32), "cpu")
    graph.bind_input("x", other)
    graph.bind_input("nothing", other)
    graph.run()
    assert memory["y"].read().tolist() == [15, 26]
    graph.bind_input("x", memory["x"])
    graph.run()
    assert memory["y"].read().tolist() == [11, 22]


def test_inputs_in_special_memory_are_bound_before_each_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A write between two runs is seen although ONNX Runtime copied the input."""
    memory = buffers()
    bound: list[str] = []
    plain = type(memory["x"]).bind_input

    def bind_input(self: Buffer, binding: Any, name: str) -> None:
        bound.append(name)
        plain(self, binding, name)

    monkeypatch.setattr(type(memory["x"]), "bind_input", bind_input)
    monkeypatch.setattr(bound_graph, "_foreign_inputs", lambda session: {"added"})
    graph = BoundGraph(session(), SPEC, memory, "cpu", None)
    assert bound == ["x", "added"]
    graph.run()
    graph.run()
    assert bound == ["x", "added", "added", "added"]
    assert memory["y"].read().tolist() == [11, 22]


def test_captured_runs_have_a_thread_and_a_number_each(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def run_options(number: Any, device: str, *, wait: bool) -> None:
        asked.append((number, device, wait))

    monkeypatch.setattr(bound_graph, "_run_options", run_options)
    replays = Replays()
    memory = buffers()
    BoundGraph(session(), SPEC, memory, "cpu", replays).run()
    BoundGraph(session(), SPEC, memory, "cpu", replays, captured=False)
    BoundGraph(session(), SPEC, memory, "cpu", replays)
    BoundGraph(session(), SPEC, memory, "cpu", None)
    numbers = [number for number, _, _ in asked[::2]]
    assert numbers == [1, NOT_CAPTURED, 2, None]
    assert {device for _, device, _ in asked} == {"cpu"}
    assert {wait for _, _, wait in asked} == {True, False}
    assert memory["y"].read().tolist() == [11, 22]
    assert replays.number() == 3
    assert replays.thread is not None
    assert replays.thread.submit(threading.get_ident).result(60) != threading.get_ident()
    replays.thread.shutdown()
    with pytest.raises(RuntimeError, match="the device's thread has ended"):
        replays.thread.submit(lambda: None)
    assert Replays(threaded=False).thread is None


@pytest.mark.parametrize(
    ("number", "device", "wait", "entries"),
    [
        (None, "cpu", True, None),
        (None, "cpu", False, None),
        (3, "cpu", False, {"gpu_graph_id": "3"}),
        (None, "cuda", True, {}),
        (None, "cuda", False, {"disable_synchronize_execution_providers": "1"}),
        (0, "cuda", True, {"gpu_graph_id": "0"}),
        (7, "cuda", False, {"gpu_graph_id": "7", "disable_synchronize_execution_providers": "1"}),
    ],
)
def test_options_of_a_run(
    number: int | None, device: str, wait: bool, entries: dict[str, str] | None
) -> None:
    options = _run_options(number, device, wait=wait)
    if entries is None:
        assert options is None
        return
    assert options is not None
    for key in ("gpu_graph_id", "disable_synchronize_execution_providers"):
        if key in entries:
            assert options.get_run_config_entry(key) == entries[key]
        else:
            with pytest.raises(RuntimeError):
                options.get_run_config_entry(key)
