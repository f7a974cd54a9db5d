"""Requests of the engine as OpenAI's answers, whole or as events while they come."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from qsample.runtime import Delta, Request, RequestOutput
from qsample.sampling_params import SamplingParams
from qsample.serve.guides import GrammarGuide
from qsample.serve.http.errors import ApiError, answer_to
from qsample.serve.http.json_bytes import json_bytes
from qsample.serve.metrics import Metrics
from qsample.serve.protocol.common import GenerationRequest
from qsample.serve.sampling import seeds
from qsample.serve.served_model import ServedModel

DONE: Final = b"data: [DONE]\n\n"
Receive = Callable[[], Awaitable[Any]]


class Choice(Protocol):
    """One answer in its form on the wire: that of chat completions or of completions."""

    def opening(self) -> dict[str, Any] | None:
        """What comes before the first text; None = nothing."""

    def piece(self, delta: Delta) -> dict[str, Any] | None:
        """What a delta makes certain; None = nothing so far."""

    def ending(self, output: RequestOutput) -> list[dict[str, Any]]:
        """What comes last; the last of it says why the answer ended."""

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """All of it at once."""


class Answers:
    """The answers to one HTTP request: those of each prompt, one after another."""

    def __init__(
        self,
        model: ServedModel,
        body: GenerationRequest,
        metrics: Metrics,
        *,
        prefix: str,
        kind: str,
        make_choice: Callable[[int], Choice],
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """prefix: of the id. kind: OpenAI's name of a whole answer. make_choice: by the answer's index. more: fields of
        the whole answer, or of the first event."""
        self._model = model
        self._body = body
        self._metrics = metrics
        self._kind = kind
        self._head = {
            "id": f"{prefix}-{body.request_id or uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model.name,
        }
        self._make_choice = make_choice
        self._more = dict(more or {})
        self._requests: list[Request] = []
        self._given_up = False  # the client has gone

    async def start(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        make_guide: Callable[[], Awaitable[GrammarGuide]] | None,
        max_time: float | None,
    ) -> None:
        """Hand the prompts to the engine, all of them or none. Raises ApiError, QueueFullError, ValueError.

        prompts: as many and as long as the model's `check_count` and `check_room` let pass. max_time: seconds that an
        answer may take; None = any.
        """
        body, model = self._body, self._model
        count = len(prompts) * body.choices
        guides = [await make_guide() for _ in range(count)] if make_guide is not None else [None] * count
        numbers = [seed for _ in prompts for seed in seeds(body, body.choices)]  # without one, each prompt gets its own
        rows = [prompt for prompt in prompts for _ in range(body.choices)]
        model.check_places(count)  # some of them, which would be cancelled, would keep others from the places
        try:
            for row, seed, guide in zip(rows, numbers, guides, strict=True):
                options: Any = {"stop_strings": body.stop, "priority": body.priority, "max_time": max_time}
                self._requests.append(model.add(row, params, seed=seed, allowed_tokens=guide, **options))
        except BaseException:
            self._cancel()
            raise
        for request in self._requests:
            self._metrics.follow(model.name, request)

    async def whole(self, receive: Receive) -> dict[str, Any]:
        """The finished answers. Raises ApiError where one failed, and where the client has gone.

        receive: of the HTTP request, which tells when its client goes.
        """
        async with _Watch(self, receive) as watch:
            outputs = [self._checked(await request) for request in self._requests]
        if watch.client_left:
            raise ApiError(499, "the client closed the connection")
        choices = [self._make_choice(index).whole(output) for index, output in enumerate(outputs)]
        head = {**self._head, "object": self._kind, **self._more}
        return {**head, "choices": choices, "usage": self._usage(outputs)}

    async def events(self, receive: Receive) -> AsyncIterator[bytes]:
        """Server-sent events, each a part of an answer, then [DONE]; an error is an event, too.

        A reader that is slow holds up nothing: what it has not taken waits here, and its requests leave their slots.
        """
        async with _Watch(self, receive) as watch:
            try:
                async for event in self._events():
                    yield event
            except Exception as error:
                self._cancel()
                if not watch.client_left:
                    yield b"data: " + json_bytes(answer_to(error).body()) + b"\n\n"
            if not watch.client_left:
                yield DONE

    async def _events(self) -> AsyncIterator[bytes]:
        with_usage, always = self._body.usage_in_stream
        kind = "chat.completion.chunk" if self._kind == "chat.completion" else self._kind
        head = json_bytes({**self._head, "object": kind}).removesuffix(b"}")  # once, not for every event
        more = b"".join(b"," + json_bytes({name: value})[1:-1] for name, value in self._more.items())
        counts = [0] * len(self._requests)

        def event(choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
            nonlocal more
            if with_usage and always and usage is None:
                usage = self._count(sum(counts))
            end = b',"usage":' + json_bytes(usage) if with_usage else b""
            parts = [b"data: ", head, more, b',"choices":', json_bytes(choices), end, b"}\n\n"]
            more = b""
            return b"".join(parts)

        choices = [self._make_choice(index) for index in range(len(self._requests))]
        for choice in choices:
            if (opening := choice.opening()) is not None:
                yield event([opening])
        outputs: list[RequestOutput | None] = [None] * len(choices)
        async for index, delta in _merged(self._requests):
            if delta is not None:
                counts[index] += len(delta.token_ids)
                if (piece := choices[index].piece(delta)) is not None:
                    yield event([piece])
                continue
            outputs[index] = output = self._checked(self._requests[index].result(0))
            for part in choices[index].ending(output):
                yield event([part])
        if with_usage:
            yield event([], self._usage([output for output in outputs if output is not None]))

    def _checked(self, output: RequestOutput) -> RequestOutput:
        """Raise ApiError for an answer that is none."""
        if output.finish_reason == "invalid":
            raise ApiError(500, "the model gave NaN or infinite logits, or no token was allowed", code="invalid_logits")
        if output.finish_reason == "cancelled" and not self._given_up:
            raise ApiError(503, "the server is going down; ask again", code="server_shutdown")
        return output

    def _usage(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        firsts = outputs[:: self._body.choices]  # a prompt is counted once, however many answers it has
        prompt = sum(output.usage.prompt_tokens for output in firsts)
        completion = sum(output.usage.completion_tokens for output in outputs)
        cached = sum(output.usage.cached_tokens for output in firsts)
        return {**_total(prompt, completion), "prompt_tokens_details": {"cached_tokens": cached}}

    def _count(self, completion: int) -> dict[str, Any]:
        return _total(sum(request.prompt_tokens for request in self._requests[:: self._body.choices]), completion)

    def give_up(self) -> None:
        """End the answers with what they have."""
        self._given_up = True
        self._cancel()

    def _cancel(self) -> None:
        for request in self._requests:
            request.cancel()


class _Watch:
    """Gives answers up when their client goes."""

    def __init__(self, answers: Answers, receive: Receive) -> None:
        self._answers = answers
        self._receive = receive
        self.client_left = False

    async def __aenter__(self) -> _Watch:
        self._task = asyncio.create_task(self._wait_for_disconnect())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:  # GeneratorExit and CancelledError, too: whoever reads is no longer there
            self._answers.give_up()
        self._task.cancel()

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.client_left = True
        self._answers.give_up()


async def _merged(requests: Sequence[Request]) -> AsyncIterator[tuple[int, Delta | None]]:
    """The deltas of several requests as they come, with the request's index; None at the end of each.

    Raises what a request raises.
    """
    if len(requests) == 1:
        async for delta in requests[0]:
            yield 0, delta
        yield 0, None
        return
    queue: asyncio.Queue[tuple[int, Delta | BaseException | None]] = asyncio.Queue()

    async def read(index: int, request: Request) -> None:
        try:
            async for delta in request:
                queue.put_nowait((index, delta))
            queue.put_nowait((index, None))
        except Exception as error:
            queue.put_nowait((index, error))

    readers = [asyncio.create_task(read(index, request)) for index, request in enumerate(requests)]
    try:
        left = len(readers)
        while left:
            index, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            left -= item is None
            yield index, item
    finally:
        for reader in readers:
            reader.cancel()


def _total(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def finish_reason(output: RequestOutput) -> str:
    """OpenAI's word for why an answer ended; one that took too long ended at a length, too."""
    return "stop" if output.finish_reason == "stop" else "length"


def stop_reason(output: RequestOutput, ends: Sequence[int]) -> str | int | None:
    """vLLM's: the stop string or the stop token that ended an answer; None at the model's own end of text."""
    if output.finish_reason != "stop":
        return None
    if output.stop_string is not None:
        return output.stop_string
    last = output.token_ids[-1] if output.token_ids else None
    return None if last in ends else last
