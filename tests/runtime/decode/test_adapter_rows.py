"""The memory of adapters: whatever was loaded before, a row meets its own adapter's matrices and nobody else's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qsample.contract.interface import AdapterTarget, Features, Interface, adapter_ids, adapter_names
from qsample.ort.buffers import Buffer
from qsample.runtime.adapters import Adapter
from qsample.runtime.decode.adapter_rows import AdapterRows

TARGETS = AdapterTarget("0.q", 3, 4), AdapterTarget("1.q", 3, 4), AdapterTarget("0.down", 5, 2)
ROWS, PLACES, RANK = 4, 3, 4


def make_adapter(rng: np.random.Generator) -> Adapter:
    """Of some of the layers, with ranks of their own."""
    changed = [target for target in TARGETS if rng.random() < 0.7] or [TARGETS[0]]
    matrices = {}
    for target in changed:
        rank = int(rng.integers(1, RANK + 1))
        a, b = rng.normal(size=(rank, target.in_features)), rng.normal(size=(rank, target.out_features))
        matrices[target.path] = a.astype(np.float32), b.astype(np.float32)
    return Adapter("a", Path(), str(rng.random()), matrices)


def shown(buffer: Buffer) -> np.ndarray:
    """What a graph that is bound to it reads."""
    whole = buffer.owner.numpy().reshape(-1)
    first = (buffer.address - buffer.owner.data_ptr()) // whole.itemsize
    return whole[first : first + int(np.prod(buffer.shape))].reshape(buffer.shape)


def changes(inputs: dict[str, np.ndarray], row: int, target: AdapterTarget) -> np.ndarray:
    """A^T B of a row, as the graph computes it."""
    a, b = (inputs[name] for name in adapter_names(target.path))
    own = inputs[adapter_ids(target.kind).name] == inputs["adapter"][row]
    return np.asarray((a * own[:, None]).astype(np.float64).T @ b)


@pytest.mark.parametrize("captured", [False, True])
def test_random_loads(captured: bool) -> None:
    rng = np.random.default_rng(5)
    features = Features(max_loras=PLACES, max_lora_rank=RANK)
    memory = AdapterRows(Interface(9, (), features=features, captured=captured, adapters=TARGETS), ROWS, "cpu")
    held: list[Adapter | None] = [None] * PLACES
    of_row = [0] * ROWS
    keys = set()
    for _ in range(300):
        row, place = int(rng.integers(ROWS)), int(rng.integers(PLACES))
        action = rng.random()
        if action < 0.3 and place + 1 not in of_row:
            held[place] = make_adapter(rng)
            memory.put(place + 1, held[place])  # type: ignore[arg-type]
        elif action < 0.6 and held[place] is not None:
            of_row[row] = place + 1
            memory.begin(row, place + 1)
        elif action < 0.8:
            of_row[row] = 0
            memory.stop(row)
        else:
            other = int(rng.integers(ROWS))
            of_row[row], of_row[other] = of_row[other], of_row[row]
            memory.swap_rows(row, other)
        start = int(rng.integers(ROWS))
        rows = range(start, int(rng.integers(start + 1, ROWS + 1)))
        inputs = {name: shown(buffer) for name, buffer in memory.inputs(rows).items()}
        keys.add(memory.key(rows))
        assert tuple((kind, len(inputs[adapter_ids(kind).name])) for kind in ("q", "down")) == memory.key(rows)
        for index, row in enumerate(rows):
            adapter = held[of_row[row] - 1] if of_row[row] else None
            for target in TARGETS:
                a, b = adapter.matrices.get(target.path, (None, None)) if adapter else (None, None)
                wanted = np.zeros((target.in_features, target.out_features)) if a is None else a.astype(float).T @ b
                np.testing.assert_allclose(changes(inputs, index, target), wanted, atol=1e-6)
        if not captured and not any(of_row[one] for one in rows):
            assert memory.key(rows) == (("q", 0), ("down", 0))
    assert len(keys) == (1 if captured else len(keys))
    assert captured or len(keys) > 10


def test_without_adapters_there_is_nothing() -> None:
    memory = AdapterRows(Interface(9, ()), ROWS, "cpu")
    memory.begin(0, 0)
    memory.stop(slice(None))
    memory.swap_rows(0, 1)
    assert memory.inputs(range(2)) == {}
    assert memory.key(range(2)) == ()
