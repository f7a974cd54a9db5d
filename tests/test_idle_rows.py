"""A row that does not run keeps its states bit for bit, whatever the others read: packages of every kind of state.

Only keys and values behind its `lengths` may change, docs/contract.md.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.contract.interface import Interface
from qsample.contract.tensors import CAPACITY as ROW_CAPACITY
from qsample.graph.runner import GraphRunner
from qsample.graph.weights import load_graph
from qsample.package.package import Package, read_package

CAPACITY = 32
Array = np.ndarray


class Graph(NamedTuple):
    """A decode graph: its folder and interface."""

    folder: Path
    interface: Interface


class Sources(NamedTuple):
    """Where the graphs come from: fixtures, and a folder for those that are made."""

    fake: Callable[..., Package]
    exported: Callable[..., Path]
    fixture: Callable[[str], Any]
    folder: Path

    def of(self, package: Package) -> Graph:
        return Graph(package.path, package.interface)

    def compiled(self, package: Path, **options: Any) -> Graph:
        chosen = CompileOptions(ctx_len=CAPACITY, **options)
        return self.of(compile_package(read_package(package), self.folder / "device", chosen))

    def captured(self, package: Path) -> Graph:
        from tests.helpers.capturing import compile_captured

        return self.of(read_package(compile_captured(package, self.folder / "device", CAPACITY)))

    def baked(self, kind: str) -> Graph:
        from tests.helpers.foreign import rewritten, save, unpack

        baked = rewritten(unpack(kind, self.folder / "file"))
        return Graph(save(baked, self.folder / "graph"), baked.interface)


KINDS: dict[str, Callable[[Sources], Graph]] = {
    "attention": lambda sources: sources.of(sources.fake()),
    "sampler on the host": lambda sources: sources.of(sources.fake(sampler=False)),
    "filters with states": lambda sources: sources.of(
        sources.fake(filters=("mirostat", "adaptive_p"))
    ),
    "baked hybrid": lambda sources: sources.baked("mobius_qwen3_next"),
}
CI_KINDS: dict[str, Callable[[Sources], Graph]] = {
    "exported": lambda sources: sources.of(read_package(sources.exported("llama"))),
    "baked attention": lambda sources: sources.baked("genai_cpu_int4_pruned"),
    "int8 cache": lambda sources: sources.compiled(
        sources.exported("llama"), kv_cache_dtype="int8"
    ),
    "captured": lambda sources: sources.captured(sources.exported("llama")),
}
SLOW_KINDS: dict[str, Callable[[Sources], Graph]] = {
    "int4 cache": lambda sources: sources.compiled(
        sources.exported("llama"), kv_cache_dtype="int4"
    ),
    "caches of a window": lambda sources: sources.compiled(sources.exported("gemma3_text")),
    "convolutions": lambda sources: sources.of(read_package(sources.exported("lfm2"))),
    "recurrent": lambda sources: sources.of(read_package(sources.exported("mamba2"))),
    "hybrid": lambda sources: sources.of(read_package(sources.exported("qwen3_5_text"))),
    "hybrid without sampler": lambda sources: sources.of(
        read_package(sources.exported("qwen3_5_text", include_sampler=False))
    ),
    "compiled hybrid": lambda sources: sources.compiled(sources.exported("qwen3_5_text")),
}


@pytest.mark.parametrize(
    "kind",
    [
        *KINDS,
        *(pytest.param(kind, marks=pytest.mark.ci) for kind in CI_KINDS),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW_KINDS),
    ],
)
def test_an_idle_row_keeps_its_states(
    kind: str, fake: Any, exported: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    sources = Sources(fake, exported, request.getfixturevalue, tmp_path)
    graph = (KINDS | CI_KINDS | SLOW_KINDS)[kind](sources)
    runner = GraphRunner(
        load_graph(graph.folder / "decoder.onnx"), graph.folder, graph.interface, CAPACITY
    )
    rng = np.random.default_rng(0)
    # The ids of real tokens that every package's vocabulary has.
    draw = lambda *shape: rng.integers(5, 60, shape)  # noqa: E731
    for status in ([0, 1, 2], [3, 0, 1], [2, 1, 0], [0, 0, 1]):
        state = runner.start(3)
        if graph.interface.captured:  # whose steps are of a token
            for _ in range(5):
                runner.step(draw(3, 1), np.ones(3, np.int64), state)
        else:
            runner.step(draw(3, 6), np.array([6, 3, 5]), state)
        runner.step(draw(3, 1), np.ones(3, np.int64), state)
        statuses = np.array(status, np.int32)
        state["status"] = statuses.copy()
        lengths = state["lengths"].copy()
        before = {name: values.copy() for name, values in state.items()}
        idle = np.flatnonzero(statuses)
        running = np.flatnonzero(statuses == 0)
        for call in range(3):
            runner.step(draw(3, 1), np.ones(3, np.int64), state)
            # Without the sampler, the host counts.
            state["lengths"] = np.where(statuses == 0, state["lengths"], lengths).astype(np.int32)
            state["status"] = statuses.copy()
            for row in idle:
                for name, values in kept(state, row, lengths[row], graph.interface).items():
                    wanted = kept(before, row, lengths[row], graph.interface)[name]
                    assert values.tobytes() == wanted.tobytes(), (name, row, call)
        for row in running:
            changed = [
                spec.name
                for spec in graph.interface.cache_states
                if not np.array_equal(state[spec.name][row], before[spec.name][row])
            ]
            assert changed == [spec.name for spec in graph.interface.cache_states]


def kept(state: dict[str, Array], row: int, length: int, interface: Interface) -> dict[str, Array]:
    """What a row that does not run keeps of each state."""
    of_capacity = {spec.name for spec in interface.cache_states if ROW_CAPACITY in spec.axes}
    return {
        name: values[row, :, :length] if name in of_capacity else values[row]
        for name, values in state.items()
        if name != "searched_rows"
    }
