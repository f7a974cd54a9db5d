"""Requests of an engine that a test plays, as documents and events, to the last field."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qsample.addons.serve.answers import Answers, ForcedTokens
from qsample.addons.serve.chats import ChatCompletionRequest
from qsample.addons.serve.choices import ChatChoice, Choice, CompletionChoice
from qsample.addons.serve.forms import ANY_TEXT, AnswerForm
from qsample.addons.serve.http import ApiError, EventStream, while_connected
from qsample.addons.serve.requests import CompletionRequest
from qsample.contract.interface import Features
from qsample.request.repetition import RepetitionDetection
from qsample.request.structured.grammars import PreparedForm
from qsample.request.structured.tables import TokenGrammar
from qsample.runtime import RequestOutput, SamplingParams
from qsample.runtime.request import Usage
from qsample.runtime.sequence import DraftStats
from tests.helpers.answers import END, Scripted, delta, ended, optional_outputs, served

PARAMS = SamplingParams(max_new_tokens=5)


class Play:
    """Answers over scripted requests, and what they told the metrics."""

    def __init__(self, body: Any, *requests: Scripted | Exception) -> None:
        self.requests, self.model, self.followed = requests, served(*requests), list[Any]()
        self.body, self.counted = body, list[Any]()
        self.metrics: Any = SimpleNamespace(
            count_form=lambda *given: self.counted.append(given),
            follow=lambda *given: self.followed.append(("answer", *given)),
            follow_scoring=lambda *given: self.followed.append(("scoring", *given)),
        )

    async def start(
        self,
        prompts: Sequence[list[int]],
        form: AnswerForm = ANY_TEXT,
        max_time: float | None = None,
    ) -> Answers:
        choices: list[Choice] = []
        for prompt in prompts:
            for index in range(len(choices), len(choices) + self.body.num_choices):
                if isinstance(self.body, ChatCompletionRequest):
                    choices.append(ChatChoice(index, self.model, self.body, prompt, form))
                else:
                    echo = "x" if self.body.echo else None
                    choices.append(CompletionChoice(index, self.model, self.body, prompt, echo))
        answers = Answers(self.model, self.body, self.metrics, choices, form)
        await answers.start(prompts, PARAMS, max_time)
        return answers

    def whole(self, *prompts: list[int]) -> dict[str, Any]:
        async def run() -> dict[str, Any]:
            return await (await self.start(prompts)).whole()

        return asyncio.run(run())

    def events(self, *prompts: list[int]) -> list[Any]:
        async def run() -> list[bytes]:
            return [event async for event in (await self.start(prompts)).events()]

        events = [event.decode() for event in asyncio.run(run())]
        assert all(event.startswith("data: ") and event.endswith("\n\n") for event in events)
        return [
            event[6:-2] if event[6:-2] == "[DONE]" else json.loads(event[6:-2]) for event in events
        ]


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"request_id": "r", "seed": 5, **fields})


def chat(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate(
        {"messages": [{}], "request_id": "r", "seed": 5, **fields}
    )


def answer(text: str, **more: Any) -> Scripted:
    """Tokens 2, one for each character, then the end."""
    deltas = [delta(2, text=character) for character in text]
    return Scripted(*deltas, delta(END), output=ended(*[2] * len(text), END, text=text, **more))


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    counted = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    return (
        counted
        if cached is None
        else counted | {"prompt_tokens_details": {"cached_tokens": cached}}
    )


def test_a_document() -> None:
    play = Play(completion(n=2), *map(answer, ("a", "bc", "d", "efg")))
    before = int(time.time())
    document = play.whole([5] * 10, [6] * 10)
    assert before <= document.pop("created") <= time.time()
    choices = document.pop("choices")
    assert document == {
        "id": "cmpl-r", "object": "text_completion", "model": "tiny", "usage": usage(20, 2 + 3 + 2 + 4, 8),
    }  # fmt: skip
    assert [(choice["index"], choice["text"]) for choice in choices] == [
        *enumerate(("a", "bc", "d", "efg"))
    ]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    assert Play(completion(request_id=None), answer("a")).whole([5])["id"] != "cmpl-None"


def test_what_the_engine_is_given() -> None:
    ends: Any = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    repeated = {"max_pattern_size": 2, "min_count": 3}
    body = completion(
        n=2, stop=["x"], priority=-3, echo=True, logprobs=0, repetition_detection=repeated, **ends
    )
    scoring = Scripted(output=ended(6))
    play = Play(body, scoring, *map(answer, "abcd"))
    masks: Any = object()
    form = AnswerForm(PreparedForm(tables=None, masks=masks), may_have_thoughts=False)
    asyncio.run(play.start([[5, 6], [7]], form, 30.0))
    assert play.model.places == [5]
    assert play.counted == [("tiny", "host", 4)]
    requests: Any = play.requests
    options = {"priority": -3, "max_time": 30.0}
    (prompt, params), own = scoring.arguments, dict(scoring.options)
    guide_of_prompt = own.pop("allowed_tokens")
    assert isinstance(guide_of_prompt, ForcedTokens)
    ranked = ["logprobs", "top_logprob_ids", "top_logprobs"]
    assert ([*guide_of_prompt._remaining], prompt, own) == (
        [6],
        [5],
        {"outputs": ranked, **options},
    )
    options |= {"outputs": ["logprobs"], "stop_strings": ["x"], "allowed_token_ids": None, **ends}
    options["repetition_detection"] = RepetitionDetection(max_pattern_size=2, min_count=3)
    assert (params.max_new_tokens, params.temperature, params.eos_token_id) == (1, 0.0, ())
    for request, row, seed in zip(
        requests[1:], ([5, 6], [5, 6], [7], [7]), (5, 6, 5, 6), strict=True
    ):
        own = dict(request.options)
        assert own.pop("grammar") is masks
        assert request.arguments == (row, PARAMS)
        assert own == {"seed": seed, **options}
    assert play.followed == [
        *(("answer", "tiny", request) for request in requests[1:]), ("scoring", "tiny", scoring),
    ]  # fmt: skip


def tables(shortest: int) -> TokenGrammar:
    """Tables of a form whose shortest answer has so many tokens, or of thoughts alone."""
    rows = np.array([0, shortest], np.int32)
    return TokenGrammar(rows, rows[:, None], rows, rows, rows)


@pytest.mark.parametrize(("shortest", "keeper"), [(3, "graph"), (0, None)])
def test_tables_of_the_graph(shortest: int, keeper: str | None) -> None:
    """A budget of thoughts alone is no form."""
    play = Play(completion(n=2), answer("a"), answer("b"))
    grammar = tables(shortest)
    form = AnswerForm(PreparedForm(tables=grammar, masks=None), thinking_token_budget=7)

    async def run() -> dict[str, Any]:
        return await (await play.start([[5]], form)).whole()

    details = asyncio.run(run())["usage"].get("completion_tokens_details")
    assert details == (None if keeper is None else {"structured_outputs": keeper})
    assert play.counted == [("tiny", keeper, 2)]
    for request in play.requests:
        assert isinstance(request, Scripted)
        assert request.options["grammar"] is grammar
        assert request.options["thinking_token_budget"] == 7


def test_guesses_that_were_right_and_wrong_are_counted() -> None:
    counts = Usage(
        10, 5, 4, DraftStats(num_steps=2, num_drafts=1, num_draft_tokens=7, num_accepted_tokens=3)
    )
    outputs = [ended(2, usage=counts), ended(2, usage=counts), ended(2)]
    play = Play(completion(n=3), *(Scripted(output=output) for output in outputs))
    assert "completion_tokens_details" not in play.whole([5])["usage"]
    play = Play(completion(n=3), *(Scripted(output=output) for output in outputs))
    play.model.interface = replace(
        play.model.interface, features=Features(num_speculative_tokens=7)
    )
    wanted = {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 8}
    assert play.whole([5])["usage"]["completion_tokens_details"] == wanted


def test_without_a_seed_each_prompt_has_its_own() -> None:
    play = Play(completion(seed=None, n=2), *map(answer, "abcd"))
    play.whole([5], [5])
    seeds = [request.options["seed"] for request in play.requests]  # type: ignore[union-attr]
    assert len({*seeds}) == 4
    assert all(int(float(seed)) == seed for seed in seeds), "exact in JavaScript"


@pytest.mark.parametrize("error", [ValueError("full"), KeyboardInterrupt()])
def test_all_requests_are_added_or_none(error: Any) -> None:
    for requests in ([Scripted(output=ended()), answer("a")], [Scripted(output=ended())], []):
        play = Play(completion(n=2, echo=True, logprobs=0), *requests)
        play.model.add = _raising(play.model.add, len(requests), error)
        with pytest.raises(type(error)):
            asyncio.run(play.start([[5, 6]]))
        assert [request.cancelled for request in requests] == [1] * len(requests)
        assert not play.followed


def _raising(add: Any, after: int, error: BaseException) -> Any:
    left = iter(range(after))

    def raising(*arguments: Any, **options: Any) -> Any:
        if next(left, None) is None:
            raise error
        return add(*arguments, **options)

    return raising


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [("invalid", 500, "invalid_logits"), ("cancelled", 503, "server_shutdown")],
)
def test_answers_that_fail(reason: str, status: int, code: str) -> None:
    def play() -> Play:
        return Play(completion(n=2), answer("a"), answer("b", reason=reason))

    with pytest.raises(ApiError) as raised:
        play().whole([5])
    assert (raised.value.status, raised.value.code) == (status, code)
    streamed = play()
    *_, error, last = streamed.events([5])
    assert (error["error"]["code"], last) == (code, "[DONE]")
    assert [request.cancelled for request in streamed.requests] == [1, 1]  # type: ignore[union-attr]


class Long(Scripted):
    """It goes on until it is cancelled."""

    def __init__(self) -> None:
        super().__init__(output=ended(2, text="a", reason="cancelled"))

    def __await__(self) -> Any:
        while not self.cancelled:
            yield from asyncio.sleep(0).__await__()
        return self.output

    async def __aiter__(self) -> Any:
        yield delta(2, text="a")
        await self


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves(stream: bool, several: bool) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        begun = asyncio.Event()

        async def receive() -> Any:
            if not begun.is_set():
                begun.set()
                return {"type": "http.request"}
            await asyncio.sleep(0.01)
            return {"type": "http.disconnect"}

        answers = await Play(completion(n=1 + several), *requests).start([[5]])
        if stream:
            await EventStream(answers.events(), answers.cancel, {}, b"")({}, receive, send)
        else:
            assert await while_connected(receive, answers.whole()) is None
        for _ in range(100):
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "nothing waits on"

    requests = [Long() for _ in range(1 + several)]
    asyncio.run(run())
    assert all(request.cancelled for request in requests)
    bodies = b"".join(message.get("body", b"") for message in sent)
    assert bodies.count(b"data: ") == len(requests) * stream
    assert b"error" not in bodies


@pytest.mark.parametrize("always", [True, False])
@pytest.mark.parametrize("counted", [True, False])
def test_events(counted: bool, always: bool) -> None:
    options = {"include_usage": counted, "continuous_usage_stats": always}
    body = completion(stream=True, n=2, stream_options=options)
    play = Play(body, *map(answer, ("ab", "c", "d", "")))
    *events, done = play.events([5] * 10, [6] * 10)
    assert done == "[DONE]"
    last = events.pop() if counted else None
    head = {"id": "cmpl-r", "object": "text_completion", "model": "tiny"}
    for event in events:
        own = dict(event)
        assert len(own.pop("choices")) == 1
        own.pop("created")
        counts = own.pop("usage", "none")
        assert (counts is not None and counts != "none") == (counted and always)
        assert (counts == "none") == (not counted)
        assert own == head
    choices = [event["choices"][0] for event in events]
    texts = [
        "".join(choice["text"] for choice in choices if choice["index"] == index)
        for index in range(4)
    ]
    assert texts == ["ab", "c", "d", ""]
    assert sum(choice["finish_reason"] == "stop" for choice in choices) == 4
    if last is not None:
        assert (last["choices"], last["usage"]) == ([], usage(20, 3 + 2 + 2 + 1, 8))
        if always:
            counts = [event["usage"] for event in events]
            assert counts[-1] == usage(20, 8)
            assert counts[0] == usage(20, counts[0]["completion_tokens"])
            assert 1 <= counts[0]["completion_tokens"] < 8


def test_events_of_a_chat() -> None:
    first, second, third, fourth, done = Play(chat(stream=True), answer("ab")).events([5])
    assert {event["object"] for event in (first, second, third, fourth)} == {
        "chat.completion.chunk"
    }
    changes = [event["choices"][0]["delta"] for event in (first, second, third, fourth)]
    assert changes == [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}, {}]
    assert done == "[DONE]"
    first, *others, _ = Play(chat(stream=True, return_token_ids=True), answer("ab")).events([5])
    assert first["prompt_token_ids"] == [5]  # as in vLLM's streams: once
    assert not any("prompt_token_ids" in event for event in others)
    whole = Play(chat(return_token_ids=True), answer("ab")).whole([5])
    assert (whole["object"], whole["prompt_token_ids"]) == ("chat.completion", [5])


@pytest.mark.parametrize("several", [True, False])
def test_a_stream_that_breaks(several: bool) -> None:
    broken = Scripted(delta(2, text="a"), ValueError("wrong"), output=ended())
    play = Play(completion(stream=True, n=1 + several), broken, *[answer("b")] * several)
    *events, error, done = play.events([5])
    assert {event["choices"][0]["index"] for event in events} >= {0}
    assert (error["error"]["message"], done) == ("wrong", "[DONE]")
    assert broken.cancelled == 1


def scored(*tokens: int, reason: str = "length") -> Scripted:
    return Scripted(
        output=RequestOutput(
            [*tokens],
            None,
            reason,
            None,
            0,
            Usage(1, 1, 0),
            ended().timing,
            optional_outputs(*tokens),
        )
    )


def test_scores_of_prompts() -> None:
    body = completion(max_tokens=0, echo=True, logprobs=0, n=2)
    play = Play(body, scored(3), scored(2, 3))
    document = play.whole([2, 3], [4], [4, 2, 3])
    assert play.model.places == [2]
    tokens = [["c", "ddd"], ["é"], ["é", "c", "ddd"]]
    assert [choice["logprobs"]["tokens"] for choice in document["choices"]] == [
        tokens[index // 2] for index in range(6)
    ]
    assert {choice["finish_reason"] for choice in document["choices"]} == {"length"}
    assert [choice["text"] for choice in document["choices"]] == ["x"] * 6
    assert document["usage"] == usage(2 + 1 + 3, 0, 0)
    body = completion(
        max_tokens=0, echo=True, logprobs=0, stream=True, stream_options={"include_usage": True}
    )
    *events, last, done = Play(body, scored(3)).events([2, 3], [4])
    choices = [event["choices"][0] for event in events]
    assert [(choice["index"], choice["finish_reason"]) for choice in choices] == [
        (0, None), (1, None), (0, "length"), (1, "length"),
    ]  # fmt: skip
    assert [choice["logprobs"]["tokens"] for choice in choices[:2]] == [["c", "ddd"], ["é"]]
    assert (last["usage"], done) == (usage(3, 0, 0), "[DONE]")
    for late, code in (("time", "timeout"), ("invalid", "invalid_logits")):
        with pytest.raises(ApiError) as raised:
            Play(body, scored(3, reason=late)).whole([2, 3])
        assert (raised.value.status, raised.value.code) == (504 if late == "time" else 500, code)


def test_scores_of_a_chats_prompt() -> None:
    document = Play(chat(prompt_logprobs=0), scored(3), answer("a")).whole([2, 3])
    assert document["prompt_logprobs"] == [
        None,
        {"3": {"logprob": -1.0, "rank": None, "decoded_token": "ddd"}},
    ]
    assert "prompt_logprobs" not in Play(chat(), answer("a")).whole([2, 3])
    assert "prompt_logprobs" not in Play(
        completion(prompt_logprobs=0), scored(3), answer("a")
    ).whole([2, 3])
