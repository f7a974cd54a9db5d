"""Requests of the engine as OpenAI's answers, whole or as events while they come."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from qsample.request.sampling_params import SamplingParams
from qsample.runtime import Delta, Request, RequestOutput
from qsample.runtime.request import RequestTiming, Usage
from qsample.runtime.sequence import NO_DRAFTS
from qsample.serve.choices import Choice, prompt_logprobs
from qsample.serve.guides import GrammarGuide
from qsample.serve.http import ApiError, json_bytes, logged_api_error
from qsample.serve.metrics import Metrics
from qsample.serve.models import ServedModel
from qsample.serve.requests import GenerationRequest
from qsample.serve.scoring import ForcedTokens, PromptScores, scoring_params

Receive = Callable[[], Awaitable[Any]]

_CHAT: Final = "chat.completion"  # OpenAI's name of a whole answer
_DONE: Final = b"data: [DONE]\n\n"


class Answers:
    """The answers to an HTTP request: those of the first prompt, then those of the next."""

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
        """Prepare them.

        Args:
            model: answers.
            body: the request.
            metrics: counts them.
            prefix: of the id.
            kind: OpenAI's name of a whole answer.
            make_choice: makes a choice from its index.
            more: fields of the whole answer, or of the first event.
        """
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
        self._scoring: list[Request] = []  # of each prompt with at least two tokens
        self._prompts: Sequence[Sequence[int]] = ()
        self._seeds: list[int] = []
        self._given_up = False  # the client has gone

    async def start(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        make_guide: Callable[[], Awaitable[GrammarGuide]] | None,
        max_time: float | None,
        prediction: Sequence[int] | None = None,
    ) -> None:
        """Give the prompts to the engine, all or none.

        Args:
            prompts: token ids, which have passed the model's `check_count` and `check_room`.
            params: of every answer.
            make_guide: makes the guide of an answer; None = any text.
            max_time: seconds that an answer may take; None = no limit.
            prediction: tokens that every answer is expected to have.

        Raises ApiError, QueueFullError or ValueError.
        """
        body, model = self._body, self._model
        self._prompts = prompts
        count = 0 if body.limit == 0 else len(prompts) * body.choices
        guides = [await make_guide() for _ in range(count)] if make_guide is not None else [None] * count
        # Without a given seed, each prompt gets its own.
        self._seeds = [seed for _ in prompts for seed in body.seeds()]
        rows = [prompt for prompt in prompts for _ in range(body.choices)]
        scored = [prompt for prompt in prompts if body.scores_prompt and len(prompt) > 1]
        # Otherwise some would be added and cancelled, and occupy places meanwhile.
        model.check_places(count + len(scored))
        options: Any = {"priority": body.priority, "max_time": max_time}
        try:
            for prompt in scored:
                guide = ForcedTokens(prompt[1:])
                self._scoring.append(
                    model.add(prompt[:1], scoring_params(len(prompt)), allowed_tokens=guide, **options)
                )
            options |= {} if prediction is None else {"prediction": prediction}
            for row, seed, own in zip(rows, self._seeds, guides, strict=False):  # there are no guides without requests
                request = model.add(row, params, seed=seed, allowed_tokens=own, stop_strings=body.stop, **options)
                self._requests.append(request)
        except BaseException:
            self._cancel()
            raise
        for request in self._requests:
            self._metrics.follow(model.base, request)
        for request in self._scoring:
            self._metrics.follow_scoring(model.base, request)

    async def whole(self, receive: Receive) -> dict[str, Any]:
        """The finished answers.

        Args:
            receive: of the HTTP request; it reports that the client has gone.

        Raises ApiError if an answer failed, or if the client has gone.
        """
        async with _Watch(self, receive) as watch:
            scores = await self._scores()
            outputs = [self._checked(await request) for request in self._requests] or self._empty_outputs()
        if watch.client_left:
            raise ApiError(499, "the client closed the connection", code="client_disconnected")
        return self._document(outputs, scores)

    def _document(self, outputs: Sequence[RequestOutput], scores: Sequence[PromptScores]) -> dict[str, Any]:
        """The whole answer. scores: of each prompt, if the request asks for them."""
        choices = [choice.whole(output) for choice, output in zip(self._choices(scores), outputs, strict=True)]
        head = {**self._head, "object": self._kind, **self._more}
        if self._kind == _CHAT and self._body.prompt_logprobs is not None:
            head["prompt_logprobs"] = prompt_logprobs(self._model.token_texts, scores[0], self._body.prompt_logprobs)
        return {**head, "choices": choices, "usage": self._usage(outputs)}

    async def events(self, receive: Receive) -> AsyncIterator[bytes]:
        """Server-sent events, each a part of an answer, then [DONE]; an error is an event, too.

        A slow reader delays nobody: its events wait here, and its requests leave their slots.
        """
        async with _Watch(self, receive) as watch:
            try:
                async for event in self._events():
                    yield event
            except Exception as error:
                self._cancel()
                if not watch.client_left:
                    yield self._failed(logged_api_error(error))
            if not watch.client_left:
                yield self._last()

    def _failed(self, error: ApiError) -> bytes:
        """The event of an error."""
        return b"data: " + json_bytes(error.body()) + b"\n\n"

    def _last(self) -> bytes:
        """The event after the last."""
        return _DONE

    async def _events(self) -> AsyncIterator[bytes]:
        with_usage, always = self._body.usage_in_stream
        kind = "chat.completion.chunk" if self._kind == _CHAT else self._kind
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

        choices = self._choices(await self._scores())
        for choice in choices:
            if (opening := choice.opening()) is not None:
                yield event([opening])
        outputs: list[RequestOutput | None] = [None] * len(choices)
        if not self._requests:
            empty = self._empty_outputs()
            outputs = [*empty]
            for choice, output in zip(choices, empty, strict=True):
                for part in choice.ending(output):
                    yield event([part])
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

    def _choices(self, scores: Sequence[PromptScores]) -> list[Choice]:
        choices = [self._make_choice(index) for index in range(len(self._seeds))]
        if self._body.scores_prompt:
            for index, choice in enumerate(choices):
                choice.scores = scores[index // self._body.choices]
        return choices

    async def _scores(self) -> list[PromptScores]:
        """Of each prompt, if the request asks for them."""
        left = iter(self._scoring)
        found = []
        for prompt in self._prompts if self._body.scores_prompt else ():
            output = self._checked(await next(left)) if len(prompt) > 1 else None
            if output is not None and output.finish_reason == "time":
                raise ApiError(504, "the prompt was not scored in the time that an answer may take", code="timeout")
            found.append(PromptScores(prompt, {} if output is None else output.outputs))
        return found

    def _empty_outputs(self) -> list[RequestOutput]:
        """Answers of no tokens, which the engine is not asked for."""
        prompts = [prompt for prompt in self._prompts for _ in range(self._body.choices)]
        return [
            RequestOutput([], "", "length", None, seed, Usage(len(prompt), 0, 0), RequestTiming(None, None, 0.0), {})
            for prompt, seed in zip(prompts, self._seeds, strict=True)
        ]

    def _checked(self, output: RequestOutput) -> RequestOutput:
        """Raise ApiError for a failed answer."""
        if output.finish_reason == "invalid":
            raise ApiError(500, "the model gave NaN or infinite logits, or no token was allowed", code="invalid_logits")
        if output.finish_reason == "cancelled" and not self._given_up:
            raise ApiError(503, "the server is shutting down; try again", code="server_shutdown")
        return output

    def _usage(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        firsts = outputs[:: self._body.choices]  # a prompt is counted once, however many answers it has
        prompt = sum(output.usage.prompt_tokens for output in firsts)
        completion = sum(output.usage.completion_tokens for output in outputs)
        cached = sum(output.usage.cached_tokens for output in firsts)
        usage: dict[str, Any] = {**_total(prompt, completion), "prompt_tokens_details": {"cached_tokens": cached}}
        if self._model.interface.features.num_speculative_tokens:
            drafts = sum((output.usage.drafts for output in outputs), NO_DRAFTS)
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": drafts.num_accepted_tokens,
                "rejected_prediction_tokens": drafts.num_draft_tokens - drafts.num_accepted_tokens,
            }
        return usage

    def _count(self, completion: int) -> dict[str, Any]:
        return _total(sum(request.prompt_tokens for request in self._requests[:: self._body.choices]), completion)

    def give_up(self) -> None:
        """End the answers with the text that they have."""
        self._given_up = True
        self._cancel()

    def _cancel(self) -> None:
        for request in (*self._requests, *self._scoring):
            request.cancel()


class _Watch:
    """Gives answers up when their client has gone."""

    def __init__(self, answers: Answers, receive: Receive) -> None:
        self._answers = answers
        self._receive = receive
        self.client_left = False

    async def __aenter__(self) -> _Watch:
        self._task = asyncio.create_task(self._wait_for_disconnect())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:  # GeneratorExit and CancelledError, too: the reader has gone
            self._answers.give_up()
        self._task.cancel()

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.client_left = True
        self._answers.give_up()


async def _merged(requests: Sequence[Request]) -> AsyncIterator[tuple[int, Delta | None]]:
    """The deltas of several requests as they come, with the request's index; None at the end of each.

    Raises the exception of the first request that fails.
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
