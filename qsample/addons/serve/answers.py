"""Requests of the engine as OpenAI's answers, whole or as events while they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar, Final

import numpy as np

from qsample.addons.serve.choices import Choice, Event, PromptScores, listed_tokens
from qsample.addons.serve.forms import AnswerForm
from qsample.addons.serve.http import ApiError, json_bytes, logged_api_error
from qsample.addons.serve.metrics import Metrics
from qsample.addons.serve.models import ServedModel
from qsample.addons.serve.requests import GenerationRequest
from qsample.contract.arrays import Array
from qsample.contract.tensors import LOGPROBS, PROBS
from qsample.images.prompt import ProcessedImage
from qsample.request.sampling_params import SamplingParams
from qsample.runtime import Delta, Request, RequestOutput, Step
from qsample.runtime.request import RequestTiming, Usage
from qsample.runtime.sequence import NO_DRAFTS

_MASK_WORD_BITS: Final = 32


class Answers:
    """The answers to an HTTP request, ordered by prompt."""

    # What a stream sends while no token comes: a comment of server-sent events.
    keep_alive: ClassVar[bytes] = b": keep-alive\n\n"

    def __init__(
        self,
        model: ServedModel,
        body: GenerationRequest,
        metrics: Metrics,
        choices: Sequence[Choice],
        form: AnswerForm,
    ) -> None:
        self._model = model
        self._body = body
        self._metrics = metrics
        self._choices = choices
        self._form = form
        self._head = {
            "id": f"{choices[0].prefix}-{body.id_of_answer()}",
            "created": int(time.time()),
            "model": model.name,
        }
        # All events begin alike, so the beginning is encoded once.
        self._beginning = json_bytes({**self._head, "object": choices[0].chunk}).removesuffix(b"}")
        self._fields_of_next_event: Event = {}
        self._counts_usage = body.counts_usage
        self._counts_usage_in_each_event = body.counts_usage_in_each_event
        self._requests: list[Request] = []
        self._scoring_requests: list[Request] = []
        self._prompts: Sequence[Sequence[int]] = ()
        self._num_tokens_in_events = 0

    async def start(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        max_time: float | None,
        prediction: Sequence[int] | None = None,
        images: Sequence[ProcessedImage] = (),
        shows_special_tokens: bool = False,
    ) -> None:
        """Give the prompts to the engine, all or none.

        Args:
            prompts: the token ids of each prompt. They have passed the model's `check_count` and
                `check_room`.
            params: the sampling parameters of every answer.
            max_time: the seconds that an answer may take.
            prediction: the tokens that an answer is expected to have.
            images: the images of a single prompt, with their features.
            shows_special_tokens: whether the texts keep special tokens, even if the request skips
                them.

        Raises:
            ApiError: the engine cannot answer the request.
            QueueFullError: too few places are free.
            ValueError: an argument is wrong.
        """
        body = self._body
        model = self._model
        self._prompts = prompts
        answered = () if body.token_limit == 0 else prompts
        scored = [prompt for prompt in prompts if self._is_scored(prompt)]
        num_answers = len(answered) * body.num_choices
        # Otherwise, some requests would be added and cancelled, and take places meanwhile.
        model.check_places(num_answers + len(scored))
        options: dict[str, Any] = {"priority": body.priority, "max_time": max_time}
        answer_options = {
            **options,
            "outputs": self._outputs_of_answers(),
            **body.answer_arguments(),
        }
        if shows_special_tokens:
            answer_options["skip_special_tokens"] = False
        if prediction is not None:
            answer_options["prediction"] = prediction
        if images:
            answer_options["images"] = list(images)
        try:
            for prompt in scored:
                self._scoring_requests.append(self._score_request(prompt, options))
            for prompt in answered:
                # If the request has no seed, each prompt gets other seeds.
                for seed in body.seeds():
                    own_options = {**answer_options, **self._form.arguments()}
                    self._requests.append(model.add(prompt, params, seed=seed, **own_options))
        except BaseException:
            self.cancel()
            raise
        self._metrics.count_form(model.base, self._form.keeper, num_answers)
        for request in self._requests:
            self._metrics.follow(model.base, request)
        for request in self._scoring_requests:
            self._metrics.follow_scoring(model.base, request)

    def _is_scored(self, prompt: Sequence[int]) -> bool:
        """Whether a request of the engine scores the tokens of a prompt, or tokens after it. The
        first token of a prompt has no score."""
        within = self._body.scores_prompt and len(prompt) > 1
        return within or self._body.scores_answers

    def _score_request(self, prompt: list[int], options: dict[str, Any]) -> Request:
        """The request that scores a prompt of at least 2 tokens, or the tokens after a prompt that
        the client's request lists."""
        if self._body.scores_answers:
            ids = self._body.logprob_token_ids
            return self._model.add(prompt, SamplingParams(), logprob_token_ids=ids, **options)
        if self._model.interface.features.prompt_logprobs:
            return self._model.add(prompt, SamplingParams(), prompt_logprobs=True, **options)
        return self._model.add(
            prompt[:1],
            _scoring_params(len(prompt)),
            allowed_tokens=ForcedTokens(prompt[1:]),
            outputs=self._logprob_outputs(),
            **options,
        )

    def _logprob_outputs(self) -> list[str]:
        """The names of the package's outputs with log-probabilities."""
        return [spec.name for spec in self._model.interface.token_outputs if spec is not PROBS]

    def _outputs_of_answers(self) -> list[str]:
        """The names of the package's outputs that the answers show."""
        if self._body.num_alternatives is None:
            return []
        if self._body.num_alternatives == 0:
            return [LOGPROBS.name]
        return self._logprob_outputs()

    async def whole(self) -> dict[str, Any]:
        """The finished answers.

        Raises:
            ApiError: an answer failed.
        """
        try:
            await self._score()
            outputs = [_checked(await request) for request in self._requests]
        except BaseException:
            self.cancel()
            raise
        return self._document(outputs or self._empty_outputs())

    def _document(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = [
            choice.whole(output) for choice, output in zip(self._choices, outputs, strict=True)
        ]
        first = self._choices[0]
        return {
            **self._head,
            "object": first.kind,
            **first.outer(),
            "choices": choices,
            "usage": self._usage(outputs),
        }

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events, each a part of an answer, and [DONE] at the end. An error is an event
        also.

        A slow reader delays no other request: its events wait here, and its requests leave their
        slots.
        """
        try:
            await self._score()
            self._fields_of_next_event = self._choices[0].outer()
            for event in self._first_events():
                yield self._encode(event)
            async for index, delta in _merged(self._requests):
                for event in self._events_of(index, delta):
                    yield self._encode(event)
            if self._counts_usage:
                outputs = [request.result(0) for request in self._requests]
                yield self._encode_usage(self._usage(outputs or self._empty_outputs()))
        except Exception as error:
            self.cancel()
            yield self._encode_error(logged_api_error(error))
        yield self._end_of_stream()

    def _first_events(self) -> list[Event]:
        """The events before the first token, or all events of answers without tokens."""
        events: list[Event] = []
        for choice in self._choices:
            events += choice.start()
        if not self._requests:
            for choice, output in zip(self._choices, self._empty_outputs(), strict=True):
                events += choice.end(output)
        return events

    def _events_of(self, index: int, delta: Delta | None) -> list[Event]:
        """The events of a delta of the answer `index`, or of its end."""
        choice = self._choices[index]
        if delta is None:
            return choice.end(_checked(self._requests[index].result(0)))
        self._num_tokens_in_events += len(delta.token_ids)
        return choice.piece(delta)

    def _encode(self, event: Event) -> bytes:
        """An event of a choice as a server-sent event."""
        document = {**self._fields_of_next_event, "choices": [event]}
        self._fields_of_next_event = {}
        if self._counts_usage_in_each_event:
            firsts = self._requests[:: self._body.num_choices]
            prompt_tokens = sum(request.prompt_tokens for request in firsts)
            document["usage"] = _token_counts(prompt_tokens, self._num_tokens_in_events)
        elif self._counts_usage:
            document["usage"] = None
        return self._encode_document(document)

    def _encode_usage(self, usage: dict[str, Any]) -> bytes:
        """The server-sent event with the counts of all tokens."""
        return self._encode_document({"choices": [], "usage": usage})

    def _encode_document(self, document: dict[str, Any]) -> bytes:
        return b"data: " + self._beginning + b"," + json_bytes(document)[1:] + b"\n\n"

    def _encode_error(self, error: ApiError) -> bytes:
        return b"data: " + json_bytes(error.body()) + b"\n\n"

    def _end_of_stream(self) -> bytes:
        return b"data: [DONE]\n\n"

    async def _score(self) -> None:
        """Give the choices the scores of their prompts, or of the tokens that the request lists, if
        the request asks for them."""
        listed_ids = self._body.logprob_token_ids
        if listed_ids:
            await self._score_listed(listed_ids)
        elif self._body.scores_prompt:
            await self._score_prompts()

    async def _score_listed(self, ids: Sequence[int]) -> None:
        for index, request in enumerate(self._scoring_requests):
            listed = listed_tokens(ids, await self._scored(request))
            for choice in self._choices_of(index):
                choice.listed = listed

    async def _score_prompts(self) -> None:
        scoring_requests = iter(self._scoring_requests)
        for index, prompt in enumerate(self._prompts):
            output = None
            if self._is_scored(prompt):
                output = await self._scored(next(scoring_requests))
            scores = PromptScores.of(prompt, output)
            for choice in self._choices_of(index):
                choice.scores = scores

    def _choices_of(self, prompt: int) -> Sequence[Choice]:
        """The choices that answer a prompt, by its number."""
        num_choices = self._body.num_choices
        return self._choices[prompt * num_choices : (prompt + 1) * num_choices]

    async def _scored(self, request: Request) -> RequestOutput:
        """The output of a request that scores tokens. Raises ApiError if it failed."""
        output = _checked(await request)
        if output.finish_reason == "time":
            raise ApiError(
                504,
                "the prompt was not scored in the time that an answer may take",
                code="timeout",
            )
        return output

    def _empty_outputs(self) -> list[RequestOutput]:
        """Answers without tokens, which need no engine."""
        timing = RequestTiming(None, None, 0.0)
        return [
            RequestOutput([], "", "length", None, 0, Usage(len(prompt), 0, 0), timing, {})
            for prompt in self._prompts
            for _ in range(self._body.num_choices)
        ]

    def _usage(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        # A prompt is counted once, however many answers it has.
        firsts = outputs[:: self._body.num_choices]
        prompt = sum(output.usage.prompt_tokens for output in firsts)
        completion = sum(output.usage.completion_tokens for output in outputs)
        cached = sum(output.usage.cached_tokens for output in firsts)
        usage: dict[str, Any] = {
            **_token_counts(prompt, completion),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        details: dict[str, Any] = {**self._form.usage_details}
        if self._model.interface.features.num_speculative_tokens > 0:
            drafts = sum((output.usage.drafts for output in outputs), NO_DRAFTS)
            details["accepted_prediction_tokens"] = drafts.num_accepted_tokens
            details["rejected_prediction_tokens"] = (
                drafts.num_draft_tokens - drafts.num_accepted_tokens
            )
        if details:
            usage["completion_tokens_details"] = details
        return usage

    def cancel(self) -> None:
        """End the answers with the text that they have."""
        for request in self._requests:
            request.cancel()
        for request in self._scoring_requests:
            request.cancel()


class NamedEvents(Answers):
    """An answer whose single choice makes the whole document, and events with their types as
    names."""

    def _document(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return self._choices[0].whole(outputs[0])

    def _encode(self, event: Event) -> bytes:
        return f"event: {event['type']}\ndata: ".encode() + json_bytes(event) + b"\n\n"

    def _encode_usage(self, usage: dict[str, Any]) -> bytes:
        return b""  # The choice's last event has the usage.

    def _encode_error(self, error: ApiError) -> bytes:
        return b"".join(map(self._encode, self._choices[0].failed(error)))

    def _end_of_stream(self) -> bytes:
        return b""  # The choice's last event says that it is the last.


async def _merged(requests: Sequence[Request]) -> AsyncIterator[tuple[int, Delta | None]]:
    """The requests' deltas as they come, with the request's index, and None at the end of each
    request. Raises the exception of the first request that fails."""
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
    num_running = len(readers)
    try:
        while num_running > 0:
            index, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_running -= 1
            yield index, item
    finally:
        for reader in readers:
            reader.cancel()


def _checked(output: RequestOutput) -> RequestOutput:
    """The output of an answer that did not fail. Raises ApiError for other answers."""
    if output.finish_reason == "invalid":
        raise ApiError(
            500,
            "the model gave NaN or infinite logits, or no token was allowed",
            code="invalid_logits",
        )
    # A client that left reads no answer, so this answer was cancelled by the end of its engine.
    if output.finish_reason == "cancelled":
        raise ApiError(503, "the server is shutting down; try again", code="server_shutdown")
    return output


def _token_counts(prompt: int, completion: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _scoring_params(num_tokens: int) -> SamplingParams:
    """The parameters of a request that scores a prompt of at least 2 tokens. A stop token in the
    prompt ends nothing."""
    return SamplingParams(temperature=0.0, max_new_tokens=num_tokens - 1, eos_token_id=())


class ForcedTokens:
    """The `allowed_tokens` of a request that has to sample given tokens, for the log-probabilities
    of a prompt.

    A graph returns the log-probability of the tokens that it samples, as the model has it, before
    any mask. A request begins with the prompt's first token, and each mask allows only the prompt's
    next token. That takes a step for each token, in a slot like any other, and works on every
    device. It changes no other request, and not the answer to the same prompt either.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._remaining = iter(tokens)

    def __call__(self, step: Step | None, mask: Array) -> None:
        """Allow only the next token.

        Args:
            step: the last step. It is not used.
            mask: [1, W] int32, the mask to write. Bit i of word w allows the token 32 w + i.
        """
        token = next(self._remaining)
        mask[:] = 0
        bit = np.uint32(1 << token % _MASK_WORD_BITS)
        mask[0, token // _MASK_WORD_BITS] = bit.astype(np.int32)
