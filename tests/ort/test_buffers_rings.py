"""Outputs of the newest steps, states that take turns, rows that are saved: on the CPU, and as on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qsample.contract.tensors import BATCH, TensorSpec
from qsample.ort import buffers
from qsample.ort.buffers import Buffer, OutputRing, RetainedState, SavedRows, rows_of

SIZES = {BATCH: 3, "T": 4}
OUT = TensorSpec("out", "float32", (BATCH, 2), "an output")
TURNING = TensorSpec("turning", "int32", (BATCH, "T"), "a state that takes turns")
STAYING = TensorSpec("staying", "int64", (BATCH, 1), "a state in place")
FIXED = TensorSpec("fixed", "int64", (BATCH,), "a state that no step changes", read_only=True)


@pytest.mark.parametrize(("steps", "places"), [(1, 2), (2, 4), (3, 4), (4, 6)])
def test_a_ring_has_an_even_number_of_places_for_the_steps_that_wait(
    steps: int, places: int
) -> None:
    """And one more, for the step that runs."""
    ring = OutputRing([OUT], SIZES, "cpu", steps)
    assert (len(ring), ring.steps) == (places, steps)
    assert [ring.place(step) for step in (0, 1, places, places + 1)] == [0, 1, 0, 1]
    assert ring.of(places + 1) is ring.of(1)
    assert len({ring.of(step)["out"].address for step in range(places)}) == places


def as_device(buffer: Buffer) -> Buffer:
    """The same memory, used as a device's."""
    return Buffer(buffer.owner, buffer.dtype, buffer.shape, buffer.address, buffer.device)


@pytest.mark.parametrize("on_device", [False, True])
def test_outputs_of_some_steps_and_rows(on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if on_device:
        plain, of = Buffer.allocate, Buffer.of
        monkeypatch.setattr(
            Buffer, "allocate", staticmethod(lambda *given: as_device(plain(*given)))
        )
        monkeypatch.setattr(Buffer, "of", staticmethod(lambda *given: as_device(of(*given))))
    ring = OutputRing([OUT], SIZES, "cpu", 3)
    for step in range(6):
        ring.of(step)["out"].write_at(slice(None), np.arange(6).reshape(3, 2) + 10 * step)
    one = ring.read(range(5, 6), "out", range(3))
    assert one.tolist() == [[[50, 51], [52, 53], [54, 55]]]
    some = ring.read(range(3, 6), "out", range(1, 3))
    assert some.tolist() == [
        [[32, 33], [34, 35]],
        [[42, 43], [44, 45]],
        [[52, 53], [54, 55]],
    ]
    assert ring.read(range(4, 6), "out", range(1)).tolist() == [[[40, 41]], [[50, 51]]]
    some[:] = 0
    assert ring.of(5)["out"].read()[0].tolist() == [50, 51], "it was a copy"


def test_rows_of_a_ring_are_swapped_in_every_place() -> None:
    ring = OutputRing([OUT], SIZES, "cpu", 1)
    for step in range(2):
        ring.of(step)["out"].write(np.arange(6, dtype=np.float32).reshape(3, 2) + 10 * step)
    ring.swap_rows(0, 2)
    assert ring.of(0)["out"].read().tolist() == [[4, 5], [2, 3], [0, 1]]
    assert ring.of(1)["out"].read().tolist() == [[14, 15], [12, 13], [10, 11]]


def state() -> RetainedState:
    specs = dict.fromkeys((TURNING, STAYING, FIXED), "cpu")
    return RetainedState(specs, SIZES, turns=["turning"])


def test_states_that_take_turns() -> None:
    """And those in place. A read-only state has no next value."""
    kept = state()
    assert kept.side == 0
    now, after = kept.inputs(), kept.outputs()
    assert set(now) == {"turning", "staying", "fixed"}
    assert set(after) == {"turning_RetainedState", "staying_RetainedState"}
    assert after["staying_RetainedState"] is now["staying"]
    assert after["turning_RetainedState"] is not now["turning"]
    kept.flip()
    assert kept.side == 1
    assert kept["turning"] is after["turning_RetainedState"]
    assert kept.outputs()["turning_RetainedState"] is now["turning"]
    assert kept.inputs(side=0)["turning"] is now["turning"]
    kept.flip()
    assert kept["turning"] is now["turning"]


def test_some_rows_are_updated_in_place() -> None:
    kept = state()
    kept["turning"].write(np.arange(12, dtype=np.int32).reshape(3, 4))
    rows = kept.inputs(range(1, 3))
    assert rows["turning"].read().tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
    outputs = kept.outputs(range(1, 3))
    assert outputs["turning_RetainedState"].address == rows["turning"].address
    assert outputs["turning_RetainedState"].shape == (2, 4)
    part = rows_of({"a": kept["turning"]}, range(2, 3))["a"]
    assert part.read().tolist() == [[8, 9, 10, 11]]


def test_the_host_copies_the_rows_that_a_run_did_not_write() -> None:
    kept = state()
    kept["turning"].write(np.arange(12, dtype=np.int32).reshape(3, 4))
    kept.outputs()["turning_RetainedState"].write(np.full((3, 4), -1, np.int32))
    kept.flip(range(1, 2))
    assert kept["turning"].read().tolist() == [[0, 1, 2, 3], [-1] * 4, [8, 9, 10, 11]]
    kept.flip()
    assert kept["turning"].read().tolist() == np.arange(12).reshape(3, 4).tolist()


def test_the_bytes_of_a_saved_row() -> None:
    kept = state()
    specs: Any = {TURNING: "cpu", STAYING: "cpu"}
    saved = SavedRows(kept, specs, SIZES, 2)
    assert saved.nbytes == 4 * 4 + 8
    assert SavedRows(kept, specs, SIZES, 0).nbytes == saved.nbytes
    assert SavedRows(kept, specs, SIZES, 0).read(0) == {}
    kept["turning"].write_at(2, [1, 2, 3, 4])
    kept["staying"].write_at(2, 9)
    saved.save(2, 1)
    kept["turning"].clear_row(2)
    copy = saved.read(1)
    assert (copy["turning"].tolist(), copy["staying"].tolist()) == ([1, 2, 3, 4], [9])
    saved.restore(1, 0)
    assert kept["turning"].read()[0].tolist() == [1, 2, 3, 4]
    assert kept["staying"].read().tolist() == [[9], [0], [9]]


def test_rows_swap_all_or_some_of_their_columns() -> None:
    rows = Buffer.of(np.arange(12, dtype=np.int32).reshape(2, 1, 6), "cpu")
    rows.swap_rows(0, 1)
    assert rows.read()[:, 0].tolist() == [[6, 7, 8, 9, 10, 11], [0, 1, 2, 3, 4, 5]]
    rows.swap_rows(0, 1, (2, 4))
    assert rows.read()[0, 0, :4].tolist() == [0, 1, 2, 3]
    assert rows.read()[1, 0].tolist() == [6, 7, 2, 3, 4, 5]
    with pytest.raises(NotImplementedError, match="cpu"):
        as_device(rows).swap_rows(0, 1)


def test_devices_by_name() -> None:
    assert buffers._kind_and_number("cuda:1") == ("cuda", 1)
    assert buffers._kind_and_number("cuda") == ("cuda", 0)
    assert buffers._kind_and_number("cpu") == ("cpu", 0)
