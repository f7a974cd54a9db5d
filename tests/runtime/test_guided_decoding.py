"""Guided decoding: a caller's function writes the mask of every token."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qsample.runtime import (
    CausalLM,
    Engine,
    RequestFailedError,
    SamplingParams,
    Step,
)
from qsample.runtime.callbacks import Guide
from qsample.runtime.sequence import Sequence, SequenceRequest
from tests.helpers.fake_package import VOCAB
from tests.helpers.requests import ENDLESS, FREE, expected, outcome


def test_each_request_may_have_its_own_function_for_allowed_tokens(
    fake_model: Callable[..., CausalLM],
) -> None:
    """One may sample 10, 11, 12 …, the other 100, 101 …; a third is free, and joins windows of one step."""

    def counting(start: int) -> Callable[..., None]:
        seen: list[Any] = []

        def only(step: Any, mask: np.ndarray) -> None:
            assert mask.shape == (1, -(-VOCAB // 32))
            if seen:
                assert (step.tokens.tolist(), step.emitted.tolist()) == (
                    [start + len(seen) - 1],
                    [True],
                )
            seen.append(step)
            mask[:] = 0
            token = start + len(seen) - 1
            mask[0, token // 32] = np.array(1 << token % 32, dtype=np.uint32).astype(np.int32)

        return only

    model = fake_model(allowed_tokens=True)
    with Engine(model, slots=3, flush_every=4) as engine:
        free = engine.add_request([7, 8], FREE, seed=1)
        guided = [
            engine.add_request([5], FREE, allowed_tokens=counting(start)) for start in (10, 100)
        ]
        fixed = engine.add_request(
            [6], FREE, allowed_tokens=np.array([1 << 5, *[0] * 10], dtype=np.int32)
        )
        assert outcome(free) == expected([7, 8], FREE, 1)
        assert [request.result(60).token_ids for request in guided] == [
            list(range(10, 30)),
            list(range(100, 120)),
        ]
        assert fixed.result(60).token_ids == [5] * 20


class Unprintable(BaseException):
    """Not even an Exception, and a trap for whoever looks at it."""

    def __str__(self) -> str:
        raise SystemExit("no")

    def __setattr__(self, name: str, value: Any) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RuntimeError("the grammar has no more rules"),
            "raised RuntimeError: the grammar has no more rules",
        ),
        (SystemExit(3), "raised SystemExit: 3"),
        (KeyboardInterrupt(), r"raised KeyboardInterrupt(\n|\Z)"),
        (GeneratorExit(), r"raised GeneratorExit(\n|\Z)"),
        (MemoryError(), r"raised MemoryError(\n|\Z)"),
        (Unprintable(), r"raised Unprintable(\n|\Z)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_function_that_raises_ends_its_request_alone(
    error: BaseException, message: str, fake_model: Callable[..., CausalLM]
) -> None:
    def broken(step: Any, mask: np.ndarray) -> None:
        if step is not None and step.tokens[0] >= 0:
            raise error

    with Engine(fake_model(allowed_tokens=True), slots=2) as engine:
        healthy = engine.add_request([6], FREE, seed=1)
        failing = engine.add_request([5], FREE, allowed_tokens=broken)
        for read in (failing.result, lambda: list(failing)):
            with pytest.raises(
                RequestFailedError, match=f"function for allowed_tokens {message}"
            ) as raised:
                read()
            if not isinstance(error, Unprintable):
                assert raised.value.__cause__ is error
                assert "in broken" in "".join(raised.value.__notes__)
        assert outcome(healthy) == expected([6], FREE, 1)
        assert outcome(engine.add_request([7], FREE, seed=2)) == expected([7], FREE, 2)


def test_requests_that_come_while_others_are_guided_harm_nobody(
    fake_model: Callable[..., CausalLM],
) -> None:
    """Whoever adds a guided request does so on a thread of his own, at any time."""
    at_work, added = threading.Event(), threading.Event()

    class Guides(dict[Any, Any]):
        def items(self) -> Any:
            for item in super().items():
                at_work.set()
                added.wait(120)
                yield item

    with Engine(fake_model(allowed_tokens=True), slots=2) as engine:
        engine._guides = Guides()
        first = engine.add_request(
            [5], FREE, seed=1, allowed_tokens=lambda step, mask: step and at_work.set()
        )
        at_work.wait(60)
        second = engine.add_request([6], FREE, seed=2, allowed_tokens=lambda step, mask: None)
        added.set()
        assert outcome(first) == expected([5], FREE, 1)
        assert outcome(second) == expected([6], FREE, 2)


def test_a_function_that_raises_at_once_raises_where_the_request_is_added(
    fake_model: Callable[..., CausalLM],
) -> None:
    def broken(step: Any, mask: np.ndarray) -> None:
        raise SystemExit("no grammar")

    with Engine(fake_model(allowed_tokens=True), slots=1, max_waiting=0) as engine:
        for _ in range(3):
            with pytest.raises(SystemExit, match="no grammar"):
                engine.add_request([5], FREE, allowed_tokens=broken)
        assert outcome(engine.add_request([7], FREE, seed=2)) == expected([7], FREE, 2)


def test_the_mask_keeps_its_shape_and_dtype_whatever_a_function_does(
    fake_model: Callable[..., CausalLM],
) -> None:
    def careless(step: Any, mask: np.ndarray) -> None:
        mask[:] = 0
        mask[0, 1] = 1 << 5
        mask.shape = (mask.size,)
        mask.dtype = np.uint8

    with Engine(fake_model(allowed_tokens=True), slots=1) as engine:
        assert (
            engine.add_request([5], FREE, allowed_tokens=careless).result(60).token_ids == [37] * 20
        )


@pytest.mark.parametrize("wait", ["add", "drain", "result", "iterate", "await", "done"])
def test_a_function_that_waits_for_its_own_engine(
    wait: str, fake_model: Callable[..., CausalLM]
) -> None:
    def waiting(step: Any, mask: np.ndarray) -> None:
        if step is None:
            return
        if wait == "add":
            engine.add_request([5], FREE)
        elif wait == "drain":
            engine.drain(60)
        elif wait == "result":
            other.result()
        elif wait == "iterate":
            list(other)
        elif wait == "await":

            async def read() -> None:
                await other

            asyncio.run(read())
        else:
            assert ended.result().token_ids == expected([9], FREE, 1)[0]
            assert [token for delta in ended for token in delta.token_ids] == expected(
                [9], FREE, 1
            )[0]
            other.cancel()

    with Engine(fake_model(allowed_tokens=True), slots=2) as engine:
        ended = engine.add_request([9], FREE, seed=1)
        ended.result(60)
        other = engine.add_request([6], ENDLESS, seed=1)
        request = engine.add_request([5], FREE, seed=3, allowed_tokens=waiting)
        if wait == "done":
            assert outcome(request) == expected([5], FREE, 3)
            assert other.result(60).finish_reason == "cancelled"
        else:
            with pytest.raises(
                RequestFailedError, match=r"RuntimeError: .* waits for the engine that calls it"
            ):
                request.result(60)
            assert outcome(other) == expected([6], ENDLESS, 1)


def test_a_function_may_close_its_engine(fake_model: Callable[..., CausalLM]) -> None:
    engine = Engine(fake_model(allowed_tokens=True), slots=2)
    request = engine.add_request(
        [5], ENDLESS, seed=3, allowed_tokens=lambda step, mask: step and engine.close()
    )
    assert request.result(60).finish_reason == "cancelled"
    engine.close()
    assert not engine._thread.is_alive()


PROMPTS = [[5, 6, 7], [9, 200, 31, 4, 5, 6, 7, 8, 9, 10, 11], [77], [50, 51, 52, 53, 54]]


def test_allowed_tokens_written_before_every_token(fake_model: Callable[..., CausalLM]) -> None:
    """Row r may sample token 100 r + n as its n-th token only, and ends by its second stop id or its length."""
    seen: list[list[int]] = []

    def only(step: Step | None, mask: np.ndarray) -> None:
        seen.append([] if step is None else step.tokens.tolist())
        assert mask.shape == (2, -(-VOCAB // 32))
        mask[:] = 0
        for row in range(2):
            token = 100 * row + len(seen) - 1
            mask[row, token // 32] = np.array(1 << token % 32, dtype=np.uint32).astype(np.int32)

    for sampler in (True, False):
        seen.clear()
        model = fake_model(sampler=sampler, allowed_tokens=True)
        params = [
            SamplingParams(max_new_tokens=5, eos_token_id=[3]),
            SamplingParams(max_new_tokens=6, eos_token_id=()),
        ]
        output = model.generate(PROMPTS[:2], params, allowed_tokens=only, seed=1)
        assert output.token_ids == [[0, 1, 2, 3], [100, 101, 102, 103, 104, 105]]
        assert seen[:4] == [[], [0, 100], [1, 101], [2, 102]]
        assert len(seen) == 6  # not after the last token


def test_a_function_sees_the_newest_token_of_every_row_once() -> None:
    seen: list[Step | None] = []
    written: list[tuple[int, str, list[int]]] = []

    def function(step: Step | None, mask: np.ndarray) -> None:
        seen.append(step)
        mask += 1

    parameters = {"max_length": np.array(9, dtype=np.int32)}
    sequences = [
        Sequence(
            SequenceRequest(
                np.array([5]), parameters, seed, guided=True, output_names=("logprobs",)
            )
        )
        for seed in range(3)
    ]
    guide = Guide(function, sequences, np.zeros((3, 2), dtype=np.int32), pad_token_id=7)

    def set_parameter(sequence: Sequence, name: str, mask: np.ndarray) -> None:
        written.append((sequence.request.seed, name, mask.tolist()))

    guide.start()
    guide.update(set_parameter)
    assert (seen, written) == ([None], [])
    for sequence, token in zip(sequences[:2], (11, 12), strict=True):
        sequence.progress.sampled.append(token)
        sequence.progress.outputs.append({"logprobs": np.array([-token], dtype=np.float32)})
    sequences[1].progress.status, sequences[2].progress.status = 1, 3
    guide.update(set_parameter)
    step = seen[1]
    assert step is not None
    assert (step.tokens.tolist(), step.tokens.dtype) == ([11, 12, 7], np.int64)
    assert (step.emitted.tolist(), step.emitted.dtype) == ([True, True, False], np.bool_)
    assert (step.status.tolist(), step.status.dtype) == ([0, 1, 3], np.int32)
    assert step.outputs["logprobs"].tolist() == [[-11], [-12], [0]]
    assert written == [(row, "allowed_tokens", [2, 2]) for row in range(3)]
    guide.update(set_parameter)
    assert len(seen) == 2
    sequences[0].progress.sampled.append(13)
    guide.update(set_parameter)
    assert seen[2] is not None
    assert (seen[2].tokens.tolist(), seen[2].emitted.tolist()) == ([13, 7, 7], [True, False, False])
