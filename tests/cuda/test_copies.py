"""What crosses the bus: of an admitted row its own state, of a step nothing, of a read the new tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from qsample import AutoModelForCausalLM
from qsample.runtime import load
from qsample.runtime.decode.slots import Slots
from tests.cuda.trace import Trace

ROWS, CONTEXT = 16, 64


@pytest.fixture(scope="module")
def package(exported: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copies") / "cuda"
    AutoModelForCausalLM.from_pretrained(exported("llama")).compile(
        folder, provider="cuda", dtype="float16", ctx_len=CONTEXT
    )
    return folder


def test_rows_move_alone_and_steps_move_nothing(package: Path, trace: Trace) -> None:
    model = load(package)
    slots = Slots(model.sessions, ROWS, CONTEXT)
    specs = {spec.name: spec for spec in model.interface.parameters}
    parameters = {name: np.array(spec.off, spec.dtype) for name, spec in specs.items() if len(spec.axes) == 1}
    parameters["stop_ids"] = np.array([1, 2], np.int32)
    prompt = np.arange(4, 9)

    def admit(slot: int) -> None:
        slots.begin(slot, prompt, slot, parameters)
        slots.prefill(slot, prompt, emit=True)

    for slot in range(ROWS):
        admit(slot)
    slots.prepare()
    for _ in range(4):  # all of their graphs are bound, on both sides
        slots.decode()
    slots.read(newest=4)

    trace.clear()
    slots.stop(3)
    slots.begin(3, prompt, 99, parameters)
    own = 4 * (2 * CONTEXT + 1)  # noise, tokens, length
    own += (
        sum(np.asarray(values).nbytes for values in parameters.values()) * 2 + 4
    )  # off, then the given values; status
    assert own <= trace.bytes_from_host() <= own + 32
    assert trace.bytes_to_host() == 0
    trace.clear()
    slots.prefill(3, prompt, emit=True)
    assert trace.bytes_from_host() <= 8 * len(prompt) + 64  # the tokens' ids, how many, and shapes
    assert trace.bytes_to_host() <= 64

    trace.clear()
    for _ in range(3):
        slots.decode(wait=False)
    slots.decode()
    assert trace.bytes_from_host() == 0
    assert trace.bytes_to_host() == 0
    snapshot = slots.read(newest=4)
    assert trace.bytes_from_host() == 0
    assert trace.bytes_to_host() == 4 * ROWS * (2 + 4)  # status, length, four tokens
    whole = slots.read()
    for slot in range(ROWS):
        position = int(whole.lengths[slot]) - 3
        assert snapshot.tokens_from(slot, position) == whole.tokens_from(slot, position)
        assert len(snapshot.tokens_from(slot, position)) == 4
    with pytest.raises(IndexError, match="and 4 were read"):
        snapshot.tokens_from(0, 5)
