"""A request without an engine: its numbers, its end, and who waits for it."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qsample.contract.tensors import STOPPED
from qsample.errors import Failure, RequestFailedError
from qsample.request.text.generated_text import GeneratedText
from qsample.request.text.tokenizer import Tokenizer
from qsample.runtime import Delta, Request
from qsample.runtime.request import _Feed, _Reader
from qsample.runtime.sequence import Delivery, DraftStats, ScoredTokens, Sequence, SequenceRequest
from tests.helpers.fake_package import byte_tokenizer

LETTER_A = 68


def made(
    *, text: bool = True, stops: tuple[str, ...] = (), **fields: Any
) -> tuple[Request, Sequence, list[Sequence]]:
    """A request, its sequence, and the sequences that were cancelled."""
    parameters = {
        "max_length": np.array(99),
        "min_length": np.array(0),
        "stop_ids": np.array([2]),
    }
    delivery = Delivery(GeneratedText(Tokenizer(byte_tokenizer()), [5], stops) if text else None)
    sequence = Sequence(SequenceRequest(np.array([5, 6, 7]), parameters, 11, **fields), delivery)
    cancelled: list[Sequence] = []
    return Request(sequence, cancelled.append, lambda: None), sequence, cancelled


def test_a_request_before_its_first_token() -> None:
    request, sequence, _ = made()
    assert (request.seed, request.prompt_tokens, request.completion_tokens) == (11, 3, 0)
    assert (request.scored_tokens, request.running, request.done) == (0, False, False)
    sequence.placement.slot = 0
    assert request.running
    request.update()
    assert request._feed.deltas == [], "there is nothing to tell"


def test_deltas_and_the_output() -> None:
    request, sequence, _ = made(output_names=("probs",))
    sequence.progress.admitted_at = request.added_at + 1.5
    for number, token in enumerate((LETTER_A, LETTER_A + 1, 2)):
        sequence.progress.sampled.append(token)
        sequence.progress.outputs.append({"probs": np.array([number, 7.0])})
    request.update()
    sequence.progress.sampled.append(LETTER_A)
    sequence.progress.outputs.append({"probs": np.array([9, 7.0])})
    request.update()
    request.update()
    sequence.progress.status = STOPPED
    sequence.progress.drafts = DraftStats(num_steps=5)
    sequence.placement.tokens_reused = 2
    request.finish("stop")
    first, second = request
    assert (first.token_ids, first.text) == ([LETTER_A, LETTER_A + 1, 2], "ab")
    assert first.outputs["probs"].tolist() == [[0, 7], [1, 7], [2, 7]]
    assert (second.token_ids, second.text) == ([LETTER_A], "a")
    assert second.outputs["probs"].tolist() == [[9, 7]]
    assert 0 <= first.seconds <= second.seconds
    output = request.result(0)
    assert (output.token_ids, output.text) == ([LETTER_A, LETTER_A + 1, 2, LETTER_A], "aba")
    assert (output.finish_reason, output.stop_string, output.seed) == ("stop", None, 11)
    assert output.outputs["probs"][:, 0].tolist() == [0, 1, 2, 9]
    assert output.prompt_outputs == {}
    usage = output.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 4, 2)
    assert usage.drafts == DraftStats(num_steps=5)
    timing = output.timing
    assert timing.queue_seconds == 1.5
    assert timing.first_token_seconds == first.seconds
    assert timing.total_seconds >= second.seconds
    assert request.done


def test_text_that_is_certain_only_at_the_end() -> None:
    """It comes without a token, and without outputs."""
    request, sequence, _ = made(stops=("ax",))
    sequence.progress.sampled.append(LETTER_A)
    request.update()
    request.finish("length")
    held, rest = request
    assert (held.token_ids, held.text) == ([LETTER_A], "")
    assert (rest.token_ids, rest.text, rest.outputs) == ([], "a", {})
    assert request.result().text == "a"


def test_the_stop_string_of_an_output() -> None:
    """Of what was read after it, nothing is told."""
    request, sequence, _ = made(stops=("a",), output_names=("probs",))
    sequence.progress.sampled += [LETTER_A, LETTER_A + 1]
    sequence.progress.outputs += [{"probs": np.array([7.0])}, {"probs": np.array([8.0])}]
    request.update()
    request.finish(sequence.finish_reason)
    output = request.result()
    (delta,) = request
    assert delta.outputs["probs"].tolist() == output.outputs["probs"].tolist() == [[7.0]]
    assert (output.text, output.stop_string, output.finish_reason) == ("", "a", "stop")


def test_a_request_without_a_tokenizer_and_without_tokens() -> None:
    request, _, _ = made(text=False)
    request.finish("cancelled")
    output = request.result()
    assert (output.token_ids, output.text, output.stop_string) == ([], None, None)
    assert (output.timing.queue_seconds, output.timing.first_token_seconds) == (None, None)
    request, sequence, _ = made(text=False)
    sequence.progress.sampled.append(9)
    request.update()
    request.finish("stop")
    assert [(delta.token_ids, delta.text) for delta in request] == [([9], None)]


def test_scores_of_a_prompt_are_joined() -> None:
    scored = ScoredTokens(np.array([0, 1, 2]), np.array([6, 7, 8]), num_unread=1)
    request, sequence, _ = made(scored=scored)
    for piece in ([[0.5], [0.25]], [[0.125]]):
        sequence.progress.scores.append({"prompt_logprobs": np.array(piece)})
    assert (request.scored_tokens, request.prompt_tokens) == (3, 4)
    request.finish("stop")
    output = request.result()
    assert output.prompt_outputs["prompt_logprobs"].tolist() == [[0.5], [0.25], [0.125]]
    assert output.usage.prompt_tokens == 4


def test_a_failed_request_gives_its_error_to_every_reader() -> None:
    request, sequence, cancelled = made()
    sequence.progress.sampled.append(LETTER_A)
    request.update()
    request.fail(Failure.of(RequestFailedError, "it broke ({})", ValueError("why")))
    for _ in range(2):
        with pytest.raises(RequestFailedError, match=r"it broke \(.*why"):
            request.result(0)
    seen = []
    with pytest.raises(RequestFailedError):
        seen.extend(iter(request))
    request.cancel()
    assert cancelled == []


def test_a_text_that_cannot_be_decoded_fails_the_request() -> None:
    request, sequence, _ = made()
    sequence.delivery.text = SimpleNamespace(end=lambda: 1 // 0)  # type: ignore[assignment]
    request.finish("stop")
    with pytest.raises(
        RequestFailedError, match=r"the request's text cannot be decoded .*division"
    ):
        request.result()


def test_a_wait_that_takes_too_long() -> None:
    request, _, cancelled = made()
    with pytest.raises(TimeoutError, match="has not ended after 0 seconds; it goes on, or cancel"):
        request.result(0)
    assert cancelled == [], "who waits no longer has not given up"
    assert not request._feed.has_readers
    for timeout in ("5", True):
        with pytest.raises(ValueError, match="timeout is"):
            request.result(timeout)  # type: ignore[arg-type]


def test_cancelling_asks_until_the_end() -> None:
    request, sequence, cancelled = made()
    request.cancel()
    request.cancel()
    assert cancelled == [sequence] * 2
    request.finish("cancelled")
    request.cancel()
    assert len(cancelled) == 2


@pytest.mark.parametrize("cancels", [True, False])
def test_the_last_reader_that_gives_up_cancels(cancels: bool) -> None:
    _, sequence, cancelled = made()
    request = Request(sequence, cancelled.append, lambda: None, cancel_if_abandoned=cancels)
    sequence.progress.sampled.append(LETTER_A)
    request.update()
    first, second = iter(request), iter(request)
    assert next(first) == next(second)
    first.close()  # type: ignore[attr-defined]
    assert cancelled == []
    second.close()  # type: ignore[attr-defined]
    assert cancelled == [sequence] * cancels
    # A reader that never began is none.
    iter(request)
    assert len(cancelled) == cancels


@pytest.mark.parametrize("cancels", [True, False])
def test_a_task_that_gives_up(cancels: bool) -> None:
    async def main() -> None:
        waiting = asyncio.ensure_future(anext(aiter(request)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    _, sequence, cancelled = made()
    request = Request(sequence, cancelled.append, lambda: None, cancel_if_abandoned=cancels)
    asyncio.run(main())
    assert cancelled == [sequence] * cancels


def test_a_reader_that_is_closed_has_no_more_deltas() -> None:
    async def main() -> None:
        deltas: Any = aiter(request)
        assert (await anext(deltas)).token_ids == [LETTER_A]
        await deltas.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(deltas)

    request, sequence, cancelled = made()
    sequence.progress.sampled.append(LETTER_A)
    request.update()
    asyncio.run(main())
    assert cancelled == [sequence]


def test_every_delta_in_a_coroutine_and_then_the_error() -> None:
    async def main() -> None:
        deltas = aiter(request)
        assert [(await anext(deltas)).text, (await anext(deltas)).text] == ["a", "b"]
        with pytest.raises(RequestFailedError):
            await anext(deltas)
        with pytest.raises(StopAsyncIteration):
            await anext(deltas)
        with pytest.raises(RequestFailedError):
            await request

    request, sequence, cancelled = made()
    for token in (LETTER_A, LETTER_A + 1):
        sequence.progress.sampled.append(token)
        request.update()
    request.fail(Failure.of(RequestFailedError, "no ({})", ValueError("why")))
    asyncio.run(main())
    assert cancelled == []


def test_a_wait_that_cannot_end_is_refused() -> None:
    """And who was refused has not given up."""

    def refuse() -> None:
        raise RuntimeError("never")

    _, sequence, cancelled = made()
    request = Request(sequence, cancelled.append, refuse)

    async def main() -> None:
        with pytest.raises(RuntimeError, match="never"):
            await anext(aiter(request))

    with pytest.raises(RuntimeError, match="never"):
        request.result(1)
    with pytest.raises(RuntimeError, match="never"):
        next(iter(request))
    asyncio.run(main())
    assert cancelled == []
    request.finish("stop")
    assert request.result().token_ids == []


def test_a_feed_wakes_who_waits() -> None:
    woken: list[str] = []

    class Reader(_Reader):
        def wake(self) -> None:
            woken.append("woken")

    feed = _Feed(lambda: None, None)
    reader = Reader()
    feed.join(reader)
    assert (feed.has_readers, feed.ends_when_abandoned) == (True, False)
    assert not feed.wait(reader, 0, 0.0)
    feed.put(Delta([1], None, 0.0))
    assert woken == ["woken"]
    assert feed.wait(reader, 0, 0.0)
    assert not feed.wait(reader, 1, 0.0)
    assert not feed.wait(reader, None, 0.0)
    waited: list[bool] = []
    thread = threading.Thread(target=lambda: waited.append(feed.wait(reader, None, 60)))
    thread.start()
    feed.end(Failure.of(RequestFailedError, "no ({})", ValueError("why")))
    thread.join(60)
    assert waited == [True]
    assert len(woken) == 2
    assert feed.wait(reader, 5, 0.0)
    feed.leave(reader)
    feed.leave(reader)
    assert not feed.has_readers
    ends = _Feed(lambda: None, lambda: woken.append("abandoned"))
    assert ends.ends_when_abandoned
    ends.abandon(reader)
    assert "abandoned" not in woken, "it was no reader"
    ends.join(reader)
    ends.abandon(reader)
    assert woken[-1] == "abandoned"


def test_callbacks_are_called_in_order_and_once() -> None:
    request, _, _ = made()
    told: list[Any] = []
    request.add_done_callback(lambda one: told.append((1, one.done)))
    request.add_done_callback(lambda one: 1 // 0)
    request.add_done_callback(lambda one: told.append((2, one is request)))
    with pytest.warns(RuntimeWarning, match="a callback of a request raised .*division"):
        request.finish("stop")
    assert told == [(1, True), (2, True)]
    request.add_done_callback(lambda one: told.append(3))
    assert told[2:] == [3]
