"""The decode loop: late reads, overlapped reads, and rows that come and go change no token."""

from __future__ import annotations

import gc
import itertools
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qsample.contract.tensors import INVALID_LOGITS, RUNNING, STATUS_NAMES, STOPPED
from qsample.errors import QsampleError
from qsample.ort.buffers import OutputRing
from qsample.ort.rounding import RowCounts
from qsample.runtime import CausalLM, Engine, SamplingParams
from qsample.runtime.callbacks import Guide, Step
from qsample.runtime.decode.jobs import Admission
from qsample.runtime.decode.loop import DecodeLoop
from qsample.runtime.decode.scheduler import Scheduler, SchedulerConfig
from qsample.runtime.decode.slots import Slots, Snapshot
from qsample.runtime.sequence import PrefixStats, Sequence
from tests.helpers import fake_reference
from tests.helpers.fake_package import MAX_POSITIONS, PIECE_SIZE, POISON
from tests.helpers.requests import make_sequence, random_params, random_prompt, wait_until
from tests.helpers.sessions import with_prompt_calls, with_step_rows

CAPACITY = 64


def run(
    model: CausalLM,
    requests: list[Sequence],
    slots: int = 4,
    *,
    flush_every: int = 1,
    double_buffering: bool = False,
    chunk: int | None = None,
    interleave: bool = True,
) -> tuple[list[list[int]], list[str], list[tuple[int, int]]]:
    """Run requests. Returns the tokens and the finish reason of each, and the number of tokens and the
    status of each delivery."""
    delivered: list[tuple[int, int]] = []

    def deliver(sequence: Sequence) -> None:
        delivered.append((len(sequence.take()[0]), sequence.status))

    scheduler = Scheduler(
        slots,
        SchedulerConfig.of(
            model.sessions, flush_every=flush_every, prefill_chunk_size=chunk, interleave=interleave
        ),
    )
    device = Slots(model.sessions, slots, CAPACITY, flush_every=flush_every)
    with DecodeLoop(device, scheduler, deliver, double_buffering=double_buffering) as loop:
        for request in requests:
            loop.add(request)
        while loop.busy:
            loop.step()
    reasons = [STATUS_NAMES[request.status] for request in requests]
    return [request.progress.sampled for request in requests], reasons, delivered


def record_prefill_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each run over prompts, from now on."""
    rows: list[int] = []
    plain = Slots.prefill

    def prefill(self: Slots, slot: int, *ids: np.ndarray, emit: bool, **rest: Any) -> None:
        rows.append(len(ids))
        plain(self, slot, *ids, emit=emit, **rest)

    monkeypatch.setattr(Slots, "prefill", prefill)
    return rows


def record_step_rows(monkeypatch: pytest.MonkeyPatch) -> list[range]:
    """The rows of each decode step as the loop asks for them, from now on."""
    asked: list[range] = []
    plain = Slots.decode

    def decode(self: Slots, rows: range, *, wait: bool = True) -> None:
        asked.append(rows)
        plain(self, rows, wait=wait)

    monkeypatch.setattr(Slots, "decode", decode)
    return asked


def record_output_reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """The name and the numbers of steps and rows of each read of an optional output, from now on."""
    read: list[tuple[str, int, int]] = []
    plain = OutputRing.read

    def counted(self: OutputRing, steps: range, name: str, rows: range) -> Any:
        read.append((name, len(steps), len(rows)))
        return plain(self, steps, name, rows)

    monkeypatch.setattr(OutputRing, "read", counted)
    return read


def free_params(most: int) -> SamplingParams:
    """Parameters of random rows that end after `most` tokens."""
    return SamplingParams(temperature=0.9, max_new_tokens=most, eos_token_id=())


def reference_answers(
    prompts: list[list[int]], params: list[SamplingParams], capacity: int = CAPACITY
) -> list[Any]:
    """The tokens and the finish reason of each row; the seeds count from 0."""
    rows = enumerate(zip(prompts, params, strict=True))
    return [fake_reference.generate(*row, seed, capacity) for seed, row in rows]


def make_hundred_requests(model: CausalLM) -> tuple[list[Sequence], Any]:
    """100 random requests, many of them short, and the answers of the reference."""
    generator = random.Random(5)
    cases = [
        (random_prompt(generator, generator.choice([3, 20])), random_params(generator), seed)
        for seed in range(100)
    ]
    wanted = [
        fake_reference.generate(prompt, params, seed, CAPACITY) for prompt, params, seed in cases
    ]
    return [make_sequence(model, *case, CAPACITY) for case in cases], wanted


@pytest.mark.parametrize("double_buffering", [False, True])
@pytest.mark.parametrize("flush_every", [1, 4, 16])
def test_a_hundred_random_requests_give_the_tokens_of_the_reference(
    flush_every: int, double_buffering: bool, model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, wanted = make_hundred_requests(model)
    rows = record_prefill_rows(monkeypatch)
    tokens, reasons, _ = run(
        model, requests, 8, flush_every=flush_every, double_buffering=double_buffering, chunk=17
    )
    assert {1, 2} <= set(rows)
    assert list(zip(tokens, reasons, strict=True)) == wanted
    assert {reason for _, reason in wanted} == {"stop", "length"}
    assert len({len(row) for row in tokens}) > 15


@pytest.mark.parametrize("double_buffering", [False, True])
def test_tokens_come_a_window_at_a_time(
    double_buffering: bool, model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[bool] = []
    plain = Slots.decode

    def decode(self: Slots, rows: range, *, wait: bool = True) -> None:
        waits.append(wait)
        plain(self, rows, wait=wait)

    monkeypatch.setattr(Slots, "decode", decode)
    requests = [make_sequence(model, [5, 6, 7], free_params(12), 0, CAPACITY)]
    _, _, delivered = run(model, requests, 1, flush_every=4, double_buffering=double_buffering)
    assert delivered == [(1, RUNNING), (4, RUNNING), (4, RUNNING), (3, 2)]
    assert waits == [
        *[False, False, False, True] * 2,
        False,
        False,
        True,
    ]  # the last step of a window


@pytest.mark.parametrize("flush_every", [1, 3, 16])
@pytest.mark.parametrize("double_buffering", [False, True])
def test_no_step_runs_after_the_longest_row_must_have_ended(
    double_buffering: bool, flush_every: int, model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = record_step_rows(monkeypatch)
    requests = [make_sequence(model, [5], free_params(n), n, CAPACITY) for n in (9, 4, 14)]
    run(
        model,
        requests,
        3,
        flush_every=flush_every,
        double_buffering=double_buffering,
        interleave=False,
    )
    assert len(calls) == 13


@pytest.mark.parametrize("double_buffering", [False, True])
def test_a_step_is_over_the_rows_that_run(
    double_buffering: bool, model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second request ends first, then the first. The next request takes the slot beside the one that
    runs."""
    asked = record_step_rows(monkeypatch)
    lengths = (5, 3, 14, 6)
    requests = [make_sequence(model, [5 + n], free_params(n), n, CAPACITY) for n in lengths]
    tokens, _, _ = run(model, requests, 3, double_buffering=double_buffering, interleave=False)
    assert tokens == [
        fake_reference.generate([5 + n], free_params(n), n, CAPACITY)[0] for n in lengths
    ]
    assert asked[:2] == [range(3)] * 2
    assert set(asked[2:]) == {range(3), range(1, 3), range(2, 3)}


@pytest.mark.parametrize("double_buffering", [False, True])
@pytest.mark.parametrize("features", [{}, {"logprobs": True, "logit_bias": True}])
def test_the_rows_that_remain_are_moved_together(
    features: dict[str, Any],
    double_buffering: bool,
    fake_model: Callable[..., CausalLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps are over few rows soon after the rows in the middle have ended, and no token changes."""
    asked, model = record_step_rows(monkeypatch), fake_model(**features)
    lengths = (50, 3, 4, 40, 5, 3, 6, 45)
    prompts, params = [[5 + n, 9] for n in range(8)], [free_params(most) for most in lengths]
    requests = [make_sequence(model, prompts[n], params[n], n, CAPACITY) for n in range(8)]
    tokens, _, _ = run(model, requests, 8, double_buffering=double_buffering, interleave=False)
    assert tokens == [row for row, _ in reference_answers(prompts, params)]
    assert asked[0] == range(8)
    assert {len(rows) for rows in asked[20:]} <= {1, 2, 3}
    alone = make_sequence(model, [7, 9], free_params(4), 2, CAPACITY)
    run(model, [alone], 8, double_buffering=double_buffering)
    assert (
        len(alone.progress.outputs) == len(requests[2].progress.outputs) == (4 if features else 0)
    )
    for one, other in zip(alone.progress.outputs, requests[2].progress.outputs, strict=True):
        assert one == other


@pytest.mark.parametrize("double_buffering", [False, True])
def test_prompts_continue_from_tokens_that_were_moved_to_another_slot(
    double_buffering: bool, model: CausalLM
) -> None:
    """Three conversations take turns in the slot beside a row that runs all the time."""
    generator, short, long = random.Random(2), free_params(2), free_params(60)
    texts = [[generator.randrange(3, 290) for _ in range(CAPACITY)] for _ in range(3)]
    sessions = with_step_rows(model.sessions, step=RowCounts(1))
    moved: list[bool] = []

    class Watched(Scheduler):
        def admit(self, *given: Any) -> list[Admission]:
            admitted = super().admit(*given)
            moved.extend(admission.moved is not None for admission in admitted)
            return admitted

    scheduler, device = Watched(6, SchedulerConfig.of(sessions)), Slots(sessions, 6, CAPACITY)
    running = make_sequence(model, [5], long, 0, CAPACITY)
    with DecodeLoop(
        device, scheduler, lambda sequence: sequence.take(), double_buffering=double_buffering
    ) as loop:
        loop.add(running)
        while not running.progress.sampled:
            loop.step()
        for turn in range(1, 4):
            for seed, text in enumerate(texts):
                prompt = text[: turn * sessions.prompts.piece_size + 1]
                one = make_sequence(model, prompt, short, seed, CAPACITY)
                loop.add(one)
                while one.status == RUNNING:
                    loop.step()
                assert one.placement.tokens_reused == (turn - 1) * sessions.prompts.piece_size
                assert (
                    one.progress.sampled
                    == fake_reference.generate(prompt, short, seed, CAPACITY)[0]
                )
        assert running.status == RUNNING
        assert sum(moved) > 3
    assert (
        running.progress.sampled
        == fake_reference.generate([5], long, 0, CAPACITY)[0][: len(running.progress.sampled)]
    )


def test_the_copy_of_one_step_overlaps_the_run_of_the_next(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read waits for the next step to begin, and that step waits for the read to end. Without overlap,
    both would hang."""
    begun, read = threading.Semaphore(0), threading.Semaphore(0)
    plain_decode, plain_read, overlapped = Slots.decode, Slots.read, []

    def decode(self: Slots, rows: range, *, wait: bool = True) -> None:
        begun.release()
        assert read.acquire(timeout=120)
        plain_decode(self, rows, wait=wait)

    def copy(self: Slots, step: int | None = None, newest: int | None = None) -> Snapshot:
        if step is not None:
            assert begun.acquire(timeout=120)
            overlapped.append(step)
        snapshot = plain_read(self, step)
        read.release()
        return snapshot

    monkeypatch.setattr(Slots, "decode", decode)
    monkeypatch.setattr(Slots, "read", copy)
    tokens, _, _ = run(
        model, [make_sequence(model, [5, 6], free_params(9), 3, CAPACITY)], 1, double_buffering=True
    )
    assert tokens[0] == fake_reference.generate([5, 6], free_params(9), 3, CAPACITY)[0]
    assert overlapped == [*range(8)]


@pytest.mark.parametrize("flush_every", [1, 3])
@pytest.mark.parametrize("chunk", [None, 1])
def test_a_copy_that_is_slower_than_the_next_step(
    chunk: int | None, flush_every: int, model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory that is copied is not written: the step after the next waits."""
    plain = Slots.read

    def copy(self: Slots, step: int | None = None, newest: int | None = None) -> Snapshot:
        time.sleep(0.01)  # any step that does not wait is done by then
        return plain(self, step, newest)

    monkeypatch.setattr(Slots, "read", copy)
    params, prompts = (
        [free_params(16), free_params(9), free_params(13)],
        [[5, 6], [7, 8, 9, 10, 11], [12]],
    )
    requests = [make_sequence(model, prompts[n], params[n], n, CAPACITY) for n in range(3)]
    tokens, _, _ = run(
        model, requests, 2, double_buffering=True, flush_every=flush_every, chunk=chunk
    )
    assert tokens == [row for row, _ in reference_answers(prompts, params)]


@pytest.mark.parametrize("double_buffering", [False, True])
def test_a_request_that_leaves_in_the_middle(double_buffering: bool, model: CausalLM) -> None:
    """Out of the queue, out of its prompt, and while its next tokens are on the way."""
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [14, 15], [16, 17, 18], [19, 20, 21, 22]]
    stays, prefilling, running, queued, last = [
        make_sequence(model, prompt, free_params(20), seed, CAPACITY)
        for seed, prompt in enumerate(prompts)
    ]
    seen: list[Sequence] = []

    def deliver(sequence: Sequence) -> None:
        seen.append(sequence)
        if len(running.progress.sampled) >= 3:
            for leaver in (running, prefilling, queued):
                loop.leave(leaver)

    slots = Slots(model.sessions, 3, CAPACITY)
    scheduler = Scheduler(
        3, SchedulerConfig.of(model.sessions, flush_every=2, prefill_chunk_size=1)
    )
    with DecodeLoop(slots, scheduler, deliver, double_buffering=double_buffering) as loop:
        for request in (stays, running, prefilling, queued, last):
            loop.add(request)
        while loop.busy:
            loop.step()
    wanted = [row for row, _ in reference_answers(prompts, [free_params(20)] * 5)]
    assert (stays.progress.sampled, last.progress.sampled) == (wanted[0], wanted[4])
    assert running.progress.sampled == wanted[2][: len(running.progress.sampled)]
    assert 3 <= len(running.progress.sampled) < 20
    assert prefilling.progress.sampled == []
    assert queued not in seen


@pytest.mark.parametrize("double_buffering", [False, True])
def test_nothing_is_kept_of_the_last_request_that_leaves(
    double_buffering: bool, model: CausalLM
) -> None:
    """Its tokens were sampled, but no later job reads them."""
    request = make_sequence(model, [5, 6, 7], free_params(20), 0, CAPACITY)
    slots = Slots(model.sessions, 1, CAPACITY)
    scheduler = Scheduler(1, SchedulerConfig.of(model.sessions, flush_every=2))
    with DecodeLoop(slots, scheduler, lambda _: None, double_buffering=double_buffering) as loop:
        loop.add(request)
        for _ in range(3):
            loop.step()
        loop.leave(request)
        assert not loop.busy
        assert request not in [unread.sequence for unread in loop._unread_tokens]


def test_a_row_with_invalid_logits_changes_no_other_row(model: CausalLM) -> None:
    prompts = [[5, 6], [7, POISON, 8, 9], [10, 11], [12]]
    for flush_every in (1, 4):
        requests = [
            make_sequence(model, prompt, free_params(10), seed, CAPACITY)
            for seed, prompt in enumerate(prompts)
        ]
        tokens, reasons, _ = run(
            model, requests, 2, flush_every=flush_every, double_buffering=True, chunk=2
        )
        assert reasons == ["length", "invalid", "length", "length"]
        assert tokens[1] == []
        for seed in (0, 2, 3):
            assert (
                tokens[seed]
                == fake_reference.generate(prompts[seed], free_params(10), seed, CAPACITY)[0]
            )


@pytest.mark.parametrize(("status", "reused"), [(INVALID_LOGITS, 0), (STOPPED, 8)])
def test_keys_and_values_of_an_invalid_row_are_not_reused(
    status: int, reused: int, model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may hold the numbers that made its logits invalid after some tokens."""
    plain, reads = Slots.read, itertools.count(1)

    def read(self: Slots, step: int | None = None, newest: int | None = None) -> Snapshot:
        snapshot = plain(self, step, newest)
        ended = np.full_like(snapshot.status, status) if next(reads) == 3 else snapshot.status
        return Snapshot(ended, snapshot.lengths, snapshot.tokens)

    monkeypatch.setattr(Slots, "read", read)
    params = SamplingParams(max_new_tokens=6, eos_token_id=())
    first, again = (
        make_sequence(model, list(range(20, 29)), params, 0, CAPACITY) for _ in range(2)
    )
    tokens, _, _ = run(model, [first, again], 1)
    assert (first.status, again.placement.tokens_reused) == (status, reused)
    assert tokens[1][:3] == tokens[0]


def test_a_graph_that_never_ends_its_rows_is_an_error(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Slots.read

    def read(self: Slots, step: int | None = None, newest: int | None = None) -> Snapshot:
        snapshot = plain(self, step, newest)
        return Snapshot(np.zeros_like(snapshot.status), snapshot.lengths, snapshot.tokens)

    monkeypatch.setattr(Slots, "read", read)
    request = make_sequence(
        model, [5, 6, 7], SamplingParams(max_new_tokens=6, eos_token_id=()), 0, CAPACITY
    )
    with pytest.raises(QsampleError, match="still runs with 6 new tokens of at most 6"):
        run(model, [request], 1)


# Through generate().


@pytest.mark.parametrize("sampler", [True, False])
def test_generate_reads_prompts_of_one_length_in_one_run(
    sampler: bool, fake_model: Callable[..., CausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = random.Random(9)
    prompts = [[generator.randrange(3, 290) for _ in range(n)] for n in (3, 3, 4, 30, 4, 4, 1, 1)]
    params = [random_params(generator, 30) for _ in prompts]
    model = fake_model(sampler=sampler)
    rows = record_prefill_rows(monkeypatch)
    output = model.generate(prompts, params, seed=0)
    assert rows == [2, 1, *[1] * 8, 2, 2]
    wanted = reference_answers(prompts, params, MAX_POSITIONS)
    assert list(zip(output.token_ids, output.finish_reasons, strict=True)) == wanted
    rows.clear()
    assert (
        model.generate(prompts, params, seed=0, prefill_chunk_size=7).token_ids == output.token_ids
    )
    assert rows == [2, 1, *[1] * 8, 1, 1, 2]
    rows.clear()
    alone = CausalLM(model.package, with_prompt_calls(model.sessions, joins_prompts=False))
    assert alone.generate(prompts, params, seed=0).token_ids == output.token_ids
    assert rows == [1] * 15


@pytest.mark.parametrize("double_buffering", [True, False])
def test_the_memory_of_a_batch_is_free_when_generate_returns(
    double_buffering: bool, model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Slots]] = []
    plain = Slots.__init__

    def init(self: Slots, *args: Any, **options: Any) -> None:
        made.append(weakref.ref(self))
        plain(self, *args, **options)

    monkeypatch.setattr(Slots, "__init__", init)
    gc.disable()
    try:
        model.generate([5, 6, 7], max_new_tokens=4, double_buffering=double_buffering)
        assert [slots() for slots in made] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize("sampler", [True, False])
def test_generate_with_all_reading_options(
    sampler: bool, fake_model: Callable[..., CausalLM]
) -> None:
    generator = random.Random(8)
    prompts = [random_prompt(generator) for _ in range(6)]
    params = [random_params(generator, 30) for _ in prompts]
    wanted = reference_answers(prompts, params, MAX_POSITIONS)
    for flush_every in (None, 1, 4, 16):
        for double_buffering in (True, False):
            output = fake_model(sampler=sampler).generate(
                prompts, params, seed=0, flush_every=flush_every, double_buffering=double_buffering
            )
            assert list(zip(output.token_ids, output.finish_reasons, strict=True)) == wanted


def test_a_streamer_gets_every_token_at_any_depth(model: CausalLM) -> None:
    class Recorder:
        def __init__(self) -> None:
            self.values: list[list[int]] = []

        def put(self, value: Any) -> None:
            self.values.append(np.asarray(value).reshape(-1).tolist())

        def end(self) -> None:
            self.values.append([])

    wanted = fake_reference.generate([5, 6, 7], free_params(11), 2, MAX_POSITIONS)[0]
    for flush_every, double_buffering in itertools.product((1, 4), (True, False)):
        recorder = Recorder()
        options: dict[str, Any] = {"flush_every": flush_every, "double_buffering": double_buffering}
        model.generate([5, 6, 7], free_params(11), seed=2, streamer=recorder, **options)
        assert recorder.values == [[5, 6, 7], *([token] for token in wanted), []]


def test_flush_every_is_at_least_one(model: CausalLM) -> None:
    with pytest.raises(ValueError, match="flush_every is 0"):
        model.generate([5, 6], flush_every=0)


def test_optional_outputs_are_the_same_with_and_without_overlap(
    fake_model: Callable[..., CausalLM],
) -> None:
    model = fake_model(logprobs=True, top_logprobs=3, probs=True)
    generator = random.Random(3)
    prompts = [random_prompt(generator) for _ in range(4)]
    params = [random_params(generator) for _ in prompts]
    plain, overlapped = (
        model.generate(prompts, params, seed=1, double_buffering=double_buffering)
        for double_buffering in (False, True)
    )
    assert plain.token_ids == overlapped.token_ids
    for name in ("logprobs", "top_logprob_ids", "top_logprobs", "probs"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(overlapped, name))


OUTPUTS = {"logprobs": True, "top_logprobs": 3, "probs": True}


def test_optional_outputs_wait_for_a_later_read(
    fake_model: Callable[..., CausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows join between the steps, end in the middle of a window and want different outputs. They get the
    outputs of a read after each step, bit for bit. A few rows are taken out before their end."""
    model = fake_model(**OUTPUTS)
    generator = random.Random(12)
    cases = [(random_prompt(generator), random_params(generator), seed) for seed in range(24)]
    wanted = [(), ("logprobs",), OUTPUT_NAMES, ("top_logprobs", "top_logprob_ids")]

    def outputs(flush_every: int, double_buffering: bool) -> list[Sequence]:
        sequences = [
            make_sequence(model, *case, CAPACITY, output_names=wanted[number % 4])
            for number, case in enumerate(cases)
        ]
        scheduler = Scheduler(
            5, SchedulerConfig.of(model.sessions, flush_every=flush_every, prefill_chunk_size=4)
        )
        device = Slots(model.sessions, 5, CAPACITY, flush_every=flush_every)
        given: dict[int, list[int]] = {}

        def deliver(sequence: Sequence) -> None:
            tokens = given.setdefault(sequence.request.seed, [])
            tokens += sequence.take()[0]
            assert not sequence.request.output_names or len(sequence.progress.outputs) >= len(
                tokens
            )
            if sequence.request.seed % 5 == 4 and len(tokens) > 2:
                loop.leave(sequence)

        with DecodeLoop(device, scheduler, deliver, double_buffering=double_buffering) as loop:
            for sequence in sequences:
                loop.add(sequence)
            while loop.busy:
                loop.step()
        for sequence in sequences:
            if sequence.request.seed % 5 != 4:
                assert given[sequence.request.seed] == sequence.progress.sampled
                assert len(sequence.progress.outputs) == len(sequence.progress.sampled) * (
                    sequence.request.output_names != ()
                )
        return sequences

    plain = outputs(1, False)
    for flush_every, double_buffering in itertools.product((4, 7), (False, True)):
        read = record_output_reads(monkeypatch)
        late = outputs(flush_every, double_buffering)
        assert max(steps for _, steps, _ in read) == flush_every
        for one, other, case in zip(plain, late, cases, strict=True):
            most = (
                min(len(one.progress.sampled), len(other.progress.sampled))
                if case[2] % 5 == 4
                else None
            )
            assert one.progress.sampled[:most] == other.progress.sampled[:most]
            for mine, its in zip(
                one.progress.outputs[:most], other.progress.outputs[:most], strict=True
            ):
                assert sorted(mine) == sorted(its) == sorted(one.request.output_names)
                for name in mine:
                    assert mine[name].tobytes() == its[name].tobytes()


OUTPUT_NAMES = ("logprobs", "top_logprob_ids", "top_logprobs", "probs")


@pytest.mark.parametrize("looks", [False, True])
def test_a_guided_row_reads_only_the_tokens_after_each_step(
    looks: bool, fake_model: Callable[..., CausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the guided row runs, a step is read at once, but its outputs only after four steps, unless the
    function looks at them. After it, four steps are read at a time. A row leaves while its outputs
    wait."""
    model = fake_model(allowed_tokens=True, **OUTPUTS)
    guided, other = (
        make_sequence(model, [5 + row], free_params(most), row, CAPACITY, guided=row == 0)
        for row, most in enumerate((10, 26))
    )
    seen: list[Step] = []

    def follow(step: Step | None, mask: Any) -> None:
        if step is not None:
            seen.append(step)
            if looks:
                assert step.outputs["logprobs"].shape == (1, 1)
            if len(seen) == 2:
                loop.leave(gone)

    alone = [
        make_sequence(model, [5 + row], free_params(most), row, CAPACITY)
        for row, most in enumerate((10, 26))
    ]
    run(model, alone)
    read, tokens_read = record_output_reads(monkeypatch), []
    plain = Slots.read
    monkeypatch.setattr(
        Slots, "read", lambda *given: tokens_read.append(len(read)) or plain(*given)
    )
    gone = make_sequence(model, [7], free_params(20), 2, CAPACITY)
    guide = Guide(follow, [guided], np.full((1, 10), -1, np.int32), 0)

    def deliver(sequence: Sequence) -> None:
        sequence.take()
        if sequence is guided:
            guide.update(loop.set_parameter, loop.read_outputs)

    config = SchedulerConfig.of(model.sessions, flush_every=4, interleave=False)
    device = Slots(model.sessions, 3, CAPACITY, flush_every=4)
    guide.start()
    with DecodeLoop(device, Scheduler(3, config), deliver, double_buffering=True) as loop:
        loop.add(guided)
        loop.add(other)
        loop.add(gone)
        while loop.busy:
            loop.step()
    # The first token of both, nine steps of the guided row, four windows of the other.
    assert len(tokens_read) == 1 + 9 + 4
    probs = [(steps, rows) for name, steps, rows in read if name == "probs"]
    followed = [(1, 3)] * 2 + [(1, 2)] * 8 if looks else [(4, 2), (4, 2), (2, 2)]
    assert probs == [*followed, *[(4, 1)] * 4]
    assert len(gone.progress.outputs) == (2 if looks else 0)
    for sequence, reference in zip((guided, other), alone, strict=True):
        assert sequence.progress.sampled == reference.progress.sampled
        for mine, its in zip(sequence.progress.outputs, reference.progress.outputs, strict=True):
            assert all(mine[name].tobytes() == its[name].tobytes() for name in OUTPUT_NAMES)
    assert [step.outputs["logprobs"][0, 0] for step in seen] == [
        one["logprobs"][0] for one in guided.progress.outputs
    ]


@pytest.mark.parametrize("double_buffering", [True, False])
def test_outputs_that_wait_are_read_after_the_guided_row_has_left(
    double_buffering: bool, fake_model: Callable[..., CausalLM]
) -> None:
    """The windows after it may overwrite all outputs that wait."""
    model = fake_model(allowed_tokens=True, **OUTPUTS)
    guided, other, alone = (
        make_sequence(model, [5 + row], free_params(20), row, CAPACITY, guided=row == 0)
        for row in (0, 1, 1)
    )
    run(model, [alone])
    device = Slots(model.sessions, 2, CAPACITY, flush_every=4)
    scheduler = Scheduler(2, SchedulerConfig.of(model.sessions, flush_every=4, interleave=False))
    with DecodeLoop(
        device, scheduler, lambda one: one.take(), double_buffering=double_buffering
    ) as loop:
        loop.add(guided)
        loop.add(other)
        while len(guided.progress.sampled) < 3:
            loop.step()
        assert (len(other.progress.sampled), other.progress.outputs, other.token_ids) == (3, [], [])
        loop.leave(guided)
        while loop.busy:
            loop.step()
    assert other.progress.sampled == alone.progress.sampled == other.token_ids
    for mine, its in zip(other.progress.outputs, alone.progress.outputs, strict=True):
        assert all(mine[name].tobytes() == its[name].tobytes() for name in OUTPUT_NAMES)


def test_outputs_that_are_not_requested_are_not_read(
    fake_model: Callable[..., CausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, read = fake_model(**OUTPUTS), record_output_reads(monkeypatch)
    output = model.generate([[5, 6], [7]], free_params(9), outputs=())
    assert (read, output.logprobs, output.probs) == ([], None, None)
    output = model.generate([[5, 6], [7]], free_params(9), outputs=["logprobs"])
    assert {name for name, _, _ in read} == {"logprobs"}
    assert output.probs is None
    assert output.logprobs is not None
    assert output.logprobs.shape == (2, 9)
    with Engine(model) as engine:
        both = [
            engine.add_request([5], free_params(9), seed=1, outputs=names).result(60)
            for names in (["probs"], None)
        ]
    assert [sorted(one.outputs) for one in both] == [["probs"], sorted(OUTPUT_NAMES)]
    for wrong in ("probs", ["prob"], 5):
        with pytest.raises(
            ValueError,
            match=r"outputs is .*; give a list of the package's optional outputs, which are",
        ):
            model.generate([5], outputs=wrong)


@pytest.mark.parametrize(("late", "flush_every"), [(True, 1), (False, 1), (True, 4)])
def test_optional_outputs_belong_to_their_step(
    late: bool,
    flush_every: int,
    fake_model: Callable[..., CausalLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are copied after the next step has written its outputs (late), or before it has begun."""
    model = fake_model(logprobs=True, top_logprobs=3, probs=True)
    copied, overlapped = threading.Semaphore(0), []
    plain_decode, plain_read, plain_outputs = Slots.decode, Slots.read, Slots.read_outputs

    def decode(self: Slots, rows: range, *, wait: bool = True) -> None:
        if not late:
            assert copied.acquire(timeout=120)
        plain_decode(self, rows, wait=wait)

    def read(self: Slots, step: int | None = None, newest: int | None = None) -> Snapshot:
        if step is not None:
            overlapped.append(step)
            if late:
                wait_until(lambda: self.step > step)
        return plain_read(self, step)

    def read_outputs(self: Slots, *given: Any) -> Any:
        values = plain_outputs(self, *given)
        copied.release()
        return values

    monkeypatch.setattr(Slots, "decode", decode)
    monkeypatch.setattr(Slots, "read", read)
    monkeypatch.setattr(Slots, "read_outputs", read_outputs)
    prompts = [[5, 6, 7], [9, 10, 11]]
    output = model.generate(prompts, free_params(7), seed=1, flush_every=flush_every)
    assert overlapped == ([0, 4] if flush_every == 4 else [*range(6)])
    assert output.logprobs is not None
    assert output.top_logprobs is not None
    assert output.top_logprob_ids is not None
    assert output.probs is not None
    for row, prompt in enumerate(prompts):
        for step, token in enumerate(output.token_ids[row]):
            logits = fake_reference.logits([*prompt, *output.token_ids[row][:step]])
            logs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            likeliest = np.argsort(-logs)[:3]
            np.testing.assert_allclose(output.logprobs[row, step], logs[token], atol=1e-4)
            assert output.top_logprob_ids[row, step].tolist() == likeliest.tolist()
            np.testing.assert_allclose(output.top_logprobs[row, step], logs[likeliest], atol=1e-4)
            warmer = np.exp((logits - logits.max()) / 0.9)
            np.testing.assert_allclose(output.probs[row, step], warmer / warmer.sum(), atol=1e-5)


def test_figures_of_prompts_and_steps(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts in one slot, of which the second begins with two pieces of the first; and only the last call of a
    job waits for the device."""
    waits: list[bool] = []
    for name in ("prefill", "decode"):
        plain = getattr(Slots, name)

        def call(
            self: Slots, *given: Any, plain: Any = plain, wait: bool = True, **rest: Any
        ) -> None:
            waits.append(wait)
            plain(self, *given, wait=wait, **rest)

        monkeypatch.setattr(Slots, name, call)
    beginning, params = [*range(5, 5 + 2 * PIECE_SIZE)], free_params(3)
    prompts = [[*beginning, 40], [*beginning, 50, 51]]
    rows = [make_sequence(model, prompt, params, 1, CAPACITY) for prompt in prompts]
    scheduler = Scheduler(1, SchedulerConfig.of(model.sessions, flush_every=2))
    with DecodeLoop(
        Slots(model.sessions, 1, CAPACITY, flush_every=2),
        scheduler,
        lambda sequence: None,
        double_buffering=False,
    ) as loop:
        for row in rows:
            loop.add(row)
        loop.step()
        first, second = (row.progress.admitted_at for row in rows)
        assert first is not None
        assert second is None
        while loop.busy:
            loop.step()
    assert 0 < time.perf_counter() - first < 600
    assert rows[0].progress.admitted_at == first < (rows[1].progress.admitted_at or 0)
    assert loop.steps == 2 * 2
    assert loop.prefixes == PrefixStats(2, 2 * len(prompts[0]) + 1, 1, 2 * PIECE_SIZE, 0, 0)
    assert waits == [False, False, True, False, True, True, False, True]
