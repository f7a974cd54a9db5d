"""What crosses the bus: of an admitted row its own state, of a step nothing, of a read the new tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from qsample import AutoModelForCausalLM, SamplingParams
from qsample.runtime import Engine, load
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
    parameters = {
        name: np.array(spec.off, spec.dtype) for name, spec in specs.items() if len(spec.axes) == 1
    }
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


OUTPUTS = {
    "logprobs": 1,
    "top_logprob_ids": 3,
    "top_logprobs": 3,
    "probs": None,
}  # numbers of 4 bytes a row; None: V


@pytest.fixture(scope="module")
def returning(exported: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with all optional outputs, and masks."""
    features = {"logprobs": True, "top_logprobs": 3, "return_pdfs": True, "allowed_tokens": True}
    folder = tmp_path_factory.mktemp("returning") / "cuda"
    AutoModelForCausalLM.from_pretrained(exported("llama", **features)).compile(
        folder, provider="cuda", dtype="float16", ctx_len=CONTEXT
    )
    return folder


def test_outputs_of_four_steps_cross_together(returning: Path, trace: Trace) -> None:
    model = load(returning)
    slots = Slots(model.sessions, 4, CONTEXT, flush_every=4)
    specs = {spec.name: spec for spec in model.interface.parameters}
    parameters = {
        name: np.array(spec.off, spec.dtype) for name, spec in specs.items() if len(spec.axes) == 1
    }
    prompt = np.arange(4, 9)
    for slot in range(4):
        slots.begin(slot, prompt, slot, parameters)
        slots.prefill(slot, prompt, emit=True)
    trace.clear()
    slots.prepare()
    assert (
        trace.captures() == 6
    )  # a place for each of four steps that wait, and for the step after them
    steps, wanted = range(slots.step + 1, slots.step + 5), {}
    for step in steps:
        slots.decode()
        wanted |= {
            (name, step): slots.read_outputs(range(step, step + 1), [name], range(4))[name]
            for name in OUTPUTS
        }
    slots.read_outputs(steps, [*OUTPUTS], range(1, 3))  # what it needs is there from now on

    widths = {name: width or model.interface.vocab_size for name, width in OUTPUTS.items()}
    for name, width in widths.items():
        trace.clear()
        values = slots.read_outputs(steps, [name], range(1, 3))[name]
        assert len(trace.calls("device->pageable") + trace.calls("device->pinned")) == 1
        assert trace.bytes_to_host() == 4 * 4 * 2 * width  # four steps of two rows
        assert trace.bytes_from_host() == 0
        for index, step in enumerate(steps):
            assert values[index].tobytes() == wanted[name, step][0, 1:3].tobytes()

    trace.clear()
    for step in range(4):
        slots.decode(wait=step == 3)
    assert trace.bytes_from_host() == trace.bytes_to_host() == 0


@pytest.mark.parametrize("double_buffering", [True, False])
def test_rows_that_ask_for_nothing_read_their_tokens(
    returning: Path, trace: Trace, double_buffering: bool
) -> None:
    """In an engine: three copies for four tokens, of the state and the new tokens; log-probabilities add one."""
    row = SamplingParams(max_new_tokens=25, eos_token_id=())
    with Engine(load(returning), slots=2, double_buffering=double_buffering) as engine:
        for names in ((), ["logprobs"]):
            engine.add_request([5, 6], row, seed=3, outputs=names).result(
                120
            )  # captured, and all memory is there
            trace.clear()
            engine.add_request([5, 6], row, seed=3, outputs=names).result(120)
            copies = len(trace.calls("device->pageable") + trace.calls("device->pinned"))
            reads = 1 + 24 // 4
            assert copies - (3 + len(names)) * reads in (
                0,
                3,
            )  # a window after the last, if it was run ahead
            assert trace.bytes_to_host() < 600  # the probabilities of a single step are more


def test_late_outputs_are_those_of_each_step(returning: Path) -> None:
    """Rows that end in the middle of a window; beside a guided row, and alone."""
    rows = [
        SamplingParams(temperature=0.9, max_new_tokens=most, eos_token_id=()) for most in (9, 12, 3)
    ]
    prompts = [[5, 6], [7], [8, 9, 10]]
    model = load(returning)
    for guide in (None, lambda step, mask: None):
        early, *late = (
            model.generate(prompts, rows, seed=1, flush_every=every, allowed_tokens=guide)
            for every in (1, 4, 7)
        )
        for one in late:
            assert early.token_ids == one.token_ids
            for name in OUTPUTS:
                assert getattr(early, name).tobytes() == getattr(one, name).tobytes()
