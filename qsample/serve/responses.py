"""`/v1/responses`, OpenAI's later API: its requests as chat completions, and answers as items with their events.

Nothing is stored: a client sends the whole conversation each time, the items of earlier answers included.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import (
    Field,
    PlainValidator,
    PrivateAttr,
    StrictBool,
    StrictInt,
    StrictStr,
    field_validator,
    model_validator,
)

from qsample.request.sampling_params import SamplingParams
from qsample.runtime import RequestOutput
from qsample.serve.answers import Answers
from qsample.serve.chats import ChatCompletionRequest, Function, NamedFunction, NamedTool, Tool
from qsample.serve.choices import ChatChoice
from qsample.serve.http import ApiError, json_bytes
from qsample.serve.metrics import Metrics
from qsample.serve.models import ServedModel
from qsample.serve.refusals import RESPONSES
from qsample.serve.requests import (
    Body,
    Count,
    GenerationRequest,
    JsonSchema,
    ResponseFormat,
)
from qsample.serve.scoring import PromptScores

Event = dict[str, Any]

_LOGPROBS: Final = "message.output_text.logprobs"
_ROLES: Final = ("user", "assistant", "system", "developer")
_TEXTS: Final = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}  # part → its field


def _check_function(tool: Any) -> None:
    if isinstance(tool, dict) and tool.get("type") != "function":
        raise ValueError(
            f"it is of type {tool.get('type')!r:.60}, and this server runs no tools itself; give a function, and send "
            "back what it returns"
        )


class FunctionTool(Function):
    """A function that the model may call, in one object."""

    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _only_functions(cls, tool: Any) -> Any:
        _check_function(tool)
        return tool


class NamedFunctionTool(NamedFunction):
    """The function that has to be called."""

    type: Literal["function"]


class TextFormat(Body):
    """The form of an answer, in one object. It is always followed, whatever `strict` says."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: StrictStr = "response"
    description: StrictStr | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: StrictBool | None = None


class TextOptions(Body):
    """How the text is written; verbosity is ignored."""

    format: TextFormat | None = None
    verbosity: StrictStr | None = None


class Reasoning(Body):
    """effort: for chat templates that read it. Thoughts come whole, if the server splits them off the answer."""

    effort: StrictStr | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


def _messages_of(value: Any) -> list[dict[str, Any]]:
    """The messages of a chat that the items of an input are."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise ValueError("give a text, or a list of items")
    messages: list[dict[str, Any]] = []
    thoughts: str | None = None
    for place, item in enumerate(value):
        if not isinstance(item, dict):
            raise ValueError(f"item {place} is not an object")
        kind = item.get("type", "message")
        if kind == "reasoning":
            thoughts = "".join(_text_of(part, place, {"reasoning_text": "text"}) for part in item.get("content") or ())
            continue
        if kind == "message":
            if item.get("role") not in _ROLES:
                raise ValueError(f"item {place} has no role; give {', '.join(_ROLES)}")
            messages.append({"role": item["role"], "content": _content_of(item.get("content"), place)})
        elif kind == "function_call":
            last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
            if last is None:
                messages.append(last := {"role": "assistant", "content": None})
            function = {"name": _string(item, "name", place), "arguments": _string(item, "arguments", place)}
            call = {"id": _string(item, "call_id", place), "type": "function", "function": function}
            last.setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = _content_of(item.get("output"), place)
            messages.append({"role": "tool", "tool_call_id": _string(item, "call_id", place), "content": output})
        elif kind == "item_reference":
            raise ValueError(f"item {place} refers to a stored item, and nothing is stored here; send the item itself")
        else:
            raise ValueError(f"item {place} is of type {kind!r:.60}, which this server does not know; leave it out")
        if thoughts is not None and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = thoughts
        thoughts = None
    if not messages:
        raise ValueError("it has no message; give one")
    return messages


def _content_of(content: Any, place: int) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"item {place} has no content; give a text, or a list of parts")
    return "\n".join(_text_of(part, place, _TEXTS) for part in content)


def _text_of(part: Any, place: int, fields: Mapping[str, str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(fields[kind]) if isinstance(kind, str) and kind in fields else None
    if not isinstance(text, str):
        raise ValueError(f"item {place} has a part of type {kind!r:.60}; the model reads text only, give input_text")
    return text


def _string(item: Mapping[str, Any], name: str, place: int) -> str:
    if not isinstance(value := item.get(name), str):
        raise ValueError(f"item {place} has no {name}; give a text")
    return value


def _check_input(value: Any) -> Any:
    _messages_of(value)
    return value


class ResponsesRequest(GenerationRequest):
    """`/v1/responses`.

    input: a text, or messages, calls of functions and their results, in order. instructions: a system prompt in front
    of it. include: `message.output_text.logprobs`. Fields of vLLM's and llama.cpp's requests are those of chats.
    """

    refusals = RESPONSES

    input: Annotated[
        str | list[dict[str, Any]],
        PlainValidator(_check_input, json_schema_input_type=str | list[dict[str, Any]]),
    ]
    instructions: StrictStr | None = None
    max_output_tokens: Count | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: StrictBool | None = None
    include: (
        Annotated[list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]], Field(fail_fast=True)]
        | None
    ) = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    reasoning: Reasoning | None = None
    chat_template: StrictStr | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_cache_options: dict[str, Any] | None = None

    _chat: ChatCompletionRequest = PrivateAttr()

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _only_functions(cls, choice: Any) -> Any:
        _check_function(choice)
        return choice

    @model_validator(mode="after")
    def _check_response(self) -> ResponsesRequest:
        if self.top_logprobs and _LOGPROBS not in (self.include or ()):
            raise ValueError(f'top_logprobs needs include: ["{_LOGPROBS}"]')
        form = self.text.format if self.text is not None else None
        if form is not None and form.type == "json_schema" and form.schema_ is None:
            raise ValueError("text.format is of type json_schema and has no schema; give schema")
        self._chat = self._as_chat().checked()
        return self

    @property
    def chat(self) -> ChatCompletionRequest:
        """The same as a chat completion."""
        return self._chat

    def _as_chat(self) -> ChatCompletionRequest:
        same = {name: getattr(self, name) for name in self.model_fields_set if name in GenerationRequest.model_fields}
        messages = _messages_of(self.input)
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        form = self.text.format if self.text is not None else None
        schema = JsonSchema(schema=form.schema_ or {}) if form and form.type == "json_schema" else None
        tools = [
            Tool(function=Function.model_construct(**tool.model_dump(exclude={"type"}))) for tool in self.tools or []
        ]
        choice = self.tool_choice
        if isinstance(choice, NamedFunctionTool):
            choice = NamedTool(function=NamedFunction(name=choice.name))  # type: ignore[assignment]
        return ChatCompletionRequest.model_construct(
            **same,
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            response_format=ResponseFormat(type=form.type, json_schema=schema) if form else None,
            tools=tools or None,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            logprobs=_LOGPROBS in (self.include or ()),
            top_logprobs=self.top_logprobs,
            reasoning_effort=self.reasoning.effort if self.reasoning is not None else None,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def described(self, params: SamplingParams) -> dict[str, Any]:
        """The fields that an answer repeats. params: of the answer, defaults included."""
        text, choice = self.text or TextOptions(), self.tool_choice
        form = {"type": "text"} if text.format is None else text.format.model_dump(by_alias=True, exclude_none=True)
        if form["type"] != "json_schema":
            form = {"type": form["type"]}
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": {"effort": self.reasoning.effort if self.reasoning else None, "summary": None},
            "temperature": params.temperature,
            "text": {"format": form, "verbosity": text.verbosity or "medium"},
            "tool_choice": choice.model_dump() if isinstance(choice, NamedFunctionTool) else choice or "auto",
            "tools": [{"strict": None, "parameters": None, **tool.model_dump()} for tool in self.tools or []],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": params.top_p,
            "user": self.user,
            # What is always so here.
            "background": False,
            "max_tool_calls": None,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "truncation": "disabled",
        }


class ResponseChoice(ChatChoice):
    """The items of an answer: its thoughts, its message, its calls; and the events that tell of them."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.items: list[dict[str, Any]] = []
        self._pieces: list[str] = []  # of the open item, which is the last
        self._entries: list[dict[str, Any]] = []  # log-probabilities of the message
        self._new: list[dict[str, Any]] = []  # those that no event has had
        self._writing: str | None = None  # the type of the open item
        self.thoughts = ""

    def put(self, text: str, token_ids: Sequence[int], outputs: Any) -> Iterator[Event]:
        """The events that new tokens make certain. Each has to be written before the next is asked for."""
        thoughts, text = self._put(text)
        if self._top is not None and token_ids:
            self._new += self._logprobs(token_ids, outputs)["content"]
        yield from self._write("reasoning", thoughts)
        yield from self._write("message", text)

    def finish(self, output: RequestOutput) -> Iterator[Event]:
        """The events at the end."""
        thoughts, text, calls = self._rest()
        yield from self._write("reasoning", thoughts)
        yield from self._write("message", text)
        complete = "completed" if output.finish_reason == "stop" else "incomplete"
        if not calls and self._writing != "message":
            yield from self._close("completed")
            yield from self._open("message")
        yield from self._close("completed" if calls else complete)
        for index, call in enumerate(calls):
            yield from self._call(call, complete if index == len(calls) - 1 else "completed")

    def _write(self, kind: str, text: str) -> Iterator[Event]:
        if not text:
            return
        if kind == "reasoning":
            self.thoughts += text
            if not self._show_reasoning:
                return
        if kind != self._writing:
            yield from self._close("completed")
            yield from self._open(kind)
        self._pieces.append(text)
        yield {"type": f"response.{_PARTS[kind]}.delta", **self._place(), "delta": text, **self._taken(kind)}

    def _taken(self, kind: str) -> dict[str, Any]:
        """The log-probabilities of the tokens since the last event of the message; those of the thoughts, too."""
        if kind != "message":
            return {}
        new, self._new = self._new, []
        self._entries += new
        return {"logprobs": new}

    def _open(self, kind: str) -> Iterator[Event]:
        more: dict[str, Any] = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
        prefix = "rs" if kind == "reasoning" else "msg"
        item = {"id": _id(prefix), "type": kind, "status": "in_progress", **more, "content": []}
        self.items.append(item)
        self._writing, self._pieces = kind, []
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": item}
        yield {"type": "response.content_part.added", **self._place(), "part": self._part("", [])}

    def _close(self, status: str) -> Iterator[Event]:
        if self._writing is None:
            return
        kind, text = self._writing, "".join(self._pieces)
        taken = self._taken(kind)
        item, part = self.items[-1], self._part(text, self._entries)
        item["content"], item["status"] = [part], status
        whole = {"logprobs": self._entries} if taken else {}
        yield {"type": f"response.{_PARTS[kind]}.done", **self._place(), "text": text, **whole}
        yield {"type": "response.content_part.done", **self._place(), "part": part}
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}
        self._writing = None

    def _call(self, call: Mapping[str, Any], status: str) -> Iterator[Event]:
        function = call["function"]
        item = {
            "id": _id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": call["id"],
            "name": function["name"],
            "arguments": "",
        }
        self.items.append(item)
        place = {"output_index": len(self.items) - 1}
        own = {"item_id": item["id"], **place}
        arguments = function["arguments"]
        yield {"type": "response.output_item.added", **place, "item": item}
        yield {"type": "response.function_call_arguments.delta", **own, "delta": arguments}
        yield {
            "type": "response.function_call_arguments.done",
            **own,
            "name": function["name"],
            "arguments": arguments,
        }
        item["arguments"], item["status"] = arguments, status
        yield {"type": "response.output_item.done", **place, "item": item}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, "content_index": 0}

    def _part(self, text: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
        if self._writing == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": entries}


_PARTS: Final = {"reasoning": "reasoning_text", "message": "output_text"}  # item → its part


class ResponseAnswers(Answers):
    """The answer to a request of `/v1/responses`."""

    def __init__(
        self,
        model: ServedModel,
        body: ResponsesRequest,
        metrics: Metrics,
        params: SamplingParams,
        make_choice: Callable[[int], ResponseChoice],
    ) -> None:
        """Prepare it. Arguments: as for `Answers`; params: of the answer."""
        super().__init__(model, body.chat, metrics, prefix="resp", kind="response", make_choice=make_choice)
        self._make_response_choice = make_choice
        self._described = body.described(params)
        self._id = f"resp_{body.request_id or uuid.uuid4().hex}"
        self._sequence = 0

    def _document(self, outputs: Sequence[RequestOutput], scores: Sequence[PromptScores]) -> dict[str, Any]:
        choice, (output,) = self._make_response_choice(0), outputs
        for _ in (*choice.put(output.text or "", output.token_ids, output.outputs), *choice.finish(output)):
            pass
        return self._ended(choice, output)

    async def _events(self) -> AsyncIterator[bytes]:
        choice, (request,) = self._make_response_choice(0), self._requests
        for kind in ("created", "in_progress"):
            yield self._event({"type": f"response.{kind}", "response": self._response("in_progress", [])})
        async for delta in request:
            for event in choice.put(delta.text or "", delta.token_ids, delta.outputs):
                yield self._event(event)
        output = self._checked(request.result(0))
        for event in choice.finish(output):
            yield self._event(event)
        document = self._ended(choice, output)
        yield self._event({"type": f"response.{document['status']}", "response": document})

    def _failed(self, error: ApiError) -> bytes:
        told = {"code": error.code, "message": str(error), "param": error.param}
        failure = {"code": "server_error", "message": str(error)}
        document = self._response("failed", [], error=failure)
        return self._event({"type": "error", **told}) + self._event({"type": "response.failed", "response": document})

    def _last(self) -> bytes:
        return b""  # the last event says that it is the last

    def _event(self, event: Event) -> bytes:
        numbered = {**event, "sequence_number": self._sequence}
        self._sequence += 1
        return f"event: {event['type']}\ndata: ".encode() + json_bytes(numbered) + b"\n\n"

    def _ended(self, choice: ResponseChoice, output: RequestOutput) -> dict[str, Any]:
        complete = output.finish_reason == "stop"
        tokenizer = self._model.tokenizer
        usage = {
            "input_tokens": output.usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": output.usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": output.usage.completion_tokens,
            "output_tokens_details": {
                "reasoning_tokens": len(tokenizer.encode(choice.thoughts, add_special_tokens=False))
            },
            "total_tokens": output.usage.prompt_tokens + output.usage.completion_tokens,
        }
        return self._response(
            "completed" if complete else "incomplete",
            choice.items,
            completed_at=int(time.time()) if complete else None,
            incomplete_details=None if complete else {"reason": "max_output_tokens"},
            usage=usage,
        )

    def _response(self, status: str, output: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """The response as it is now."""
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._head["created"],
            "completed_at": None,
            "model": self._head["model"],
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": output,
            "usage": None,
            **self._described,
            **more,
        }


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
