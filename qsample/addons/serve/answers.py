"""Requests of the engine as OpenAI's answers, whole or as events while they come."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final

import numpy as np

from qsample.addons.serve.choices import Choice, Event, PromptScores
from qsample.addons.serve.http import ApiError, json_bytes, logged_api_error
from qsample.addons.serve.metrics import Metrics
from qsample.addons.serve.models import ServedModel
from qsample.addons.serve.requests import GenerationRequest
from qsample.contract.arrays import Array
from qsample.contract.tensors import LOGPROBS, PROBS
from qsample.images.prompt import ProcessedImage
from qsample.request.grammar import GrammarGuide
from qsample.request.sampling_params import SamplingParams
from qsample.runtime import Delta, Request, RequestOutput, Step
from qsample.runtime.request import RequestTiming, Usage
from qsample.runtime.sequence import NO_DRAFTS

_WORD_BITS: Final = 32  # of a mask


class Answers:
    """The answers to an HTTP request, ordered by prompt."""

    def __init__(
        self,
        model: ServedModel,
        body: GenerationRequest,
        metrics: Metrics,
        choices: Sequence[Choice],
    ) -> None:
        self._model = model
        self._body = body
        self._metrics = metrics
        self._choices = choices
        self._head = {
            "id": f"{choices[0].prefix}-{body.request_id or uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model.name,
        }
        # The beginning of each event, encoded once; and fields of the first event.
        self._beginning = json_bytes({**self._head, "object": choices[0].chunk}).removesuffix(b"}")
        self._outer: Event = {}
        self._counts_usage = body.counts_usage
        self._counts_usage_in_each_event = body.counts_usage_in_each_event
        self._requests: list[Request] = []
        self._scoring: list[Request] = []  # of each prompt with at least two tokens
        self._prompts: Sequence[Sequence[int]] = ()
        self._sampled = 0  # tokens of the events so far

    async def start(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        make_guide: Callable[[], Awaitable[GrammarGuide]] | None,
        max_time: float | None,
        prediction: Sequence[int] | None = None,
        images: Sequence[ProcessedImage] = (),
    ) -> None:
        """Give the prompts to the engine, all or none; they have passed the model's `check_count` and `check_room`.

        Every answer gets `params` and, if there is a `make_guide`, a guide. It takes at most `max_time` seconds, and is
        expected to have the tokens of `prediction`. images: of a single prompt, with their features. Raises ApiError,
        QueueFullError or ValueError.
        """
        body, model = self._body, self._model
        self._prompts = prompts
        rows = [
            prompt for prompt in prompts for _ in range(body.num_choices) if body.token_limit != 0
        ]
        guides = [None if make_guide is None else await make_guide() for _ in rows]
        # Without a given seed, each prompt gets another.
        seeds = [seed for _ in prompts for seed in body.seeds()]
        scored = [prompt for prompt in prompts if body.scores_prompt and len(prompt) > 1]
        # Otherwise some would be added and cancelled, and occupy places meanwhile.
        model.check_places(len(rows) + len(scored))
        options: dict[str, Any] = {"priority": body.priority, "max_time": max_time}
        ranked = [spec.name for spec in model.interface.token_outputs if spec is not PROBS]
        wanted = (
            ranked
            if body.num_alternatives
            else []
            if body.num_alternatives is None
            else [LOGPROBS.name]
        )
        try:
            for prompt in scored:
                guide = ForcedTokens(prompt[1:])
                self._scoring.append(
                    model.add(
                        prompt[:1],
                        scoring_params(len(prompt)),
                        allowed_tokens=guide,
                        outputs=ranked,
                        **options,
                    )
                )
            options |= {"outputs": wanted, "stop_strings": body.stop} | (
                {} if prediction is None else {"prediction": prediction}
            )
            if images:
                options["images"] = list(images)
            for row, seed, own in zip(rows, seeds, guides, strict=False):
                self._requests.append(
                    model.add(row, params, seed=seed, allowed_tokens=own, **options)
                )
        except BaseException:
            self.cancel()
            raise
        for request in self._requests:
            self._metrics.follow(model.base, request)
        for request in self._scoring:
            self._metrics.follow_scoring(model.base, request)

    async def whole(self) -> dict[str, Any]:
        """The finished answers. Raises ApiError if an answer failed."""
        try:
            await self._score()
            outputs = [
                _checked(await request) for request in self._requests
            ] or self._empty_outputs()
        except BaseException:
            self.cancel()
            raise
        return self._document(outputs)

    def _document(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = [
            choice.whole(output) for choice, output in zip(self._choices, outputs, strict=True)
        ]
        first = self._choices[0]
        head = {**self._head, "object": first.kind, **first.outer()}
        return {**head, "choices": choices, "usage": self._usage(outputs)}

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events, each a part of an answer, then [DONE]; an error is an event, too. A slow reader delays no
        other request: its events wait here, and its requests leave their slots."""
        try:
            await self._score()
            self._outer = self._choices[0].outer()
            for choice in self._choices:
                for event in choice.start():
                    yield self._event(event)
            if not self._requests:
                for choice, output in zip(self._choices, self._empty_outputs(), strict=True):
                    for event in choice.end(output):
                        yield self._event(event)
            async for index, delta in _merged(self._requests):
                choice = self._choices[index]
                if delta is None:
                    events = choice.end(_checked(self._requests[index].result(0)))
                else:
                    self._sampled += len(delta.token_ids)
                    events = choice.piece(delta)
                for event in events:
                    yield self._event(event)
            if self._counts_usage:
                outputs = [request.result(0) for request in self._requests] or self._empty_outputs()
                yield self._event(None, self._usage(outputs))
        except Exception as error:
            self.cancel()
            yield self._failed(logged_api_error(error))
        yield self._last()

    def _event(self, event: Event | None, usage: dict[str, Any] | None = None) -> bytes:
        """An event of a choice, or with `usage`, the event behind all of them."""
        choices = [] if event is None else [event]
        document = {**self._outer, "choices": choices}
        self._outer = {}
        if self._counts_usage:
            if usage is None and self._counts_usage_in_each_event:
                prompts = sum(
                    request.prompt_tokens for request in self._requests[:: self._body.num_choices]
                )
                usage = _total(prompts, self._sampled)
            document["usage"] = usage
        return b"data: " + self._beginning + b"," + json_bytes(document)[1:] + b"\n\n"

    def _failed(self, error: ApiError) -> bytes:
        """The event of an error."""
        return b"data: " + json_bytes(error.body()) + b"\n\n"

    def _last(self) -> bytes:
        """The event after the last."""
        return b"data: [DONE]\n\n"

    async def _score(self) -> None:
        """Give the choices the scores of their prompts, if the request asks for them."""
        left, count = iter(self._scoring), self._body.num_choices
        for number, prompt in enumerate(self._prompts if self._body.scores_prompt else ()):
            output = _checked(await next(left)) if len(prompt) > 1 else None
            if output is not None and output.finish_reason == "time":
                raise ApiError(
                    504,
                    "the prompt was not scored in the time that an answer may take",
                    code="timeout",
                )
            for choice in self._choices[number * count : (number + 1) * count]:
                choice.scores = PromptScores(prompt, {} if output is None else output.outputs)

    def _empty_outputs(self) -> list[RequestOutput]:
        """Answers of no tokens, without the engine."""
        timing = RequestTiming(None, None, 0.0)
        return [
            RequestOutput([], "", "length", None, 0, Usage(len(prompt), 0, 0), timing, {})
            for prompt in self._prompts
            for _ in range(self._body.num_choices)
        ]

    def _usage(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        firsts = outputs[
            :: self._body.num_choices
        ]  # a prompt is counted once, however many answers it has
        prompt = sum(output.usage.prompt_tokens for output in firsts)
        completion = sum(output.usage.completion_tokens for output in outputs)
        cached = sum(output.usage.cached_tokens for output in firsts)
        usage: dict[str, Any] = {
            **_total(prompt, completion),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if self._model.interface.features.num_speculative_tokens:
            drafts = sum((output.usage.drafts for output in outputs), NO_DRAFTS)
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": drafts.num_accepted_tokens,
                "rejected_prediction_tokens": drafts.num_draft_tokens - drafts.num_accepted_tokens,
            }
        return usage

    def cancel(self) -> None:
        """End the answers with the text that they have."""
        for request in (*self._requests, *self._scoring):
            request.cancel()


class NamedEvents(Answers):
    """An answer of a single choice that makes the whole document, and events with their types as names."""

    def _document(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return self._choices[0].whole(outputs[0])

    def _event(self, event: Event | None, usage: dict[str, Any] | None = None) -> bytes:
        if event is None:
            return b""  # the last event has the usage
        return f"event: {event['type']}\ndata: ".encode() + json_bytes(event) + b"\n\n"

    def _failed(self, error: ApiError) -> bytes:
        return b"".join(map(self._event, self._choices[0].failed(error)))

    def _last(self) -> bytes:
        return b""  # the event before says that it is the last


async def _merged(requests: Sequence[Request]) -> AsyncIterator[tuple[int, Delta | None]]:
    """The requests' deltas as they come, with the request's index; None at the end of each. Raises the exception of the
    first request that fails."""
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


def _checked(output: RequestOutput) -> RequestOutput:
    """Raise ApiError for a failed answer."""
    if output.finish_reason == "invalid":
        raise ApiError(
            500,
            "the model gave NaN or infinite logits, or no token was allowed",
            code="invalid_logits",
        )
    if (
        output.finish_reason == "cancelled"
    ):  # by the end of its engine: a client that left reads no answer
        raise ApiError(503, "the server is shutting down; try again", code="server_shutdown")
    return output


def _total(prompt: int, completion: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def scoring_params(tokens: int) -> SamplingParams:
    """For a request that scores a prompt of `tokens` tokens, at least 2. A stop token in it ends nothing."""
    return SamplingParams(temperature=0.0, max_new_tokens=tokens - 1, eos_token_id=())


class ForcedTokens:
    """The `allowed_tokens` of a request that has to sample given tokens: for the log-probabilities of a prompt.

    A graph returns the log-probability of the tokens that it samples, as the model has it, before any mask. A request
    begins with the prompt's first token, and each mask allows only the prompt's next token. That takes a step for each
    token, in a slot like any other, and works on every device. It changes no other request, the answer to the same
    prompt included.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._left = iter(tokens)

    def __call__(self, step: Step | None, mask: Array) -> None:
        """Allow the next token alone; mask: [1, W] int32."""
        token = next(self._left)
        mask[:] = 0
        mask[0, token // _WORD_BITS] = np.uint32(1 << token % _WORD_BITS).astype(np.int32)
