"""`/v1/responses`, OpenAI's later API: its requests as chat completions, and answers as items with
their events.

Nothing is stored: a client sends the whole conversation each time, with the items of earlier
answers.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationInfo,
    model_validator,
)

from qsample.addons.serve.answers import NamedEvents
from qsample.addons.serve.chats import (
    NAME_PATTERN,
    PARALLEL_CALLS_DESCRIPTION,
    TEMPLATE_DESCRIPTION,
    TEMPLATE_KWARGS_DESCRIPTION,
    TOOLS_DESCRIPTION,
    TOP_LOGPROBS_DESCRIPTION,
    ChatCompletionRequest,
    Function,
    NamedFunction,
    NamedTool,
    ThinkingBudget,
    Tool,
)
from qsample.addons.serve.choices import AnswerParts, ChatChoice, Event
from qsample.addons.serve.forms import AnswerForm
from qsample.addons.serve.http import ApiError
from qsample.addons.serve.metrics import Metrics
from qsample.addons.serve.models import ServedModel
from qsample.addons.serve.refusals import RESPONSES
from qsample.addons.serve.requests import (
    IGNORED_DESCRIPTION,
    Body,
    Count,
    GenerationRequest,
    Ignored,
    JsonSchema,
    ResponseFormat,
    Texts,
    config_with_example,
)
from qsample.request.sampling_params import SamplingParams
from qsample.request.text.conversation import TEXT_FIELDS
from qsample.runtime import Delta, RequestOutput

_LOGPROBS_OPTION: Final = "message.output_text.logprobs"
_ROLES: Final = ("user", "assistant", "system", "developer")
# The type of an item → the type of its part.
_PART_TYPES: Final = {"reasoning": "reasoning_text", "message": "output_text"}
_CALL: Final = "function_call"

_RETURNED_DESCRIPTION: Final = "Returned with the answer, and not used."


# Tools that OpenAI's servers run. A model here cannot call them.
_HOSTED_TOOLS: Final = (
    "code_interpreter",
    "file_search",
    "image_generation",
    "mcp",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
)
_NAMESPACE_SEPARATOR: Final = "__"


def _only_functions(tool: Any) -> Any:
    if isinstance(tool, dict) and tool.get("type") != "function":
        raise ValueError(
            f"it is of type {tool.get('type')!r:.60}, and this server runs no tools itself; "
            "give a function, and send back what it returns"
        )
    return tool


def _client_tools(tools: Any, info: ValidationInfo) -> Any:
    """The tools that the client runs. The functions of a namespace get its name, too."""
    if not isinstance(tools, list):
        return tools
    functions: list[Any] = []
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind in _HOSTED_TOOLS:
            if info.context is not None:
                info.context.add(f"tools.{kind}")
        elif kind == "namespace" and isinstance(tool.get("tools"), list):
            functions += [_in_namespace(inner, tool.get("name")) for inner in tool["tools"]]
        else:
            functions.append(tool)
    return functions


def _in_namespace(tool: Any, namespace: Any) -> Any:
    return {**tool, "namespace": namespace} if isinstance(tool, dict) else tool


def _full_name(namespace: str | None, name: str) -> str:
    """The name of a function for the model, which knows no namespaces."""
    if namespace in (None, ""):
        return name
    return f"{namespace.removesuffix(_NAMESPACE_SEPARATOR)}{_NAMESPACE_SEPARATOR}{name}"


class _InNamespace(Body):
    """A function that may be in a namespace."""

    name: StrictStr
    namespace: Annotated[StrictStr, Field(pattern=NAME_PATTERN)] | None = Field(
        default=None, description="The namespace of the function, which its calls have, too."
    )

    @property
    def full_name(self) -> str:
        """The name by which the model calls the function."""
        return _full_name(self.namespace, self.name)


class FunctionTool(Function, _InNamespace):
    """A function that the model may call, in one object."""

    type: Literal["function"] = Field(description='"function".')


class NamedFunctionTool(NamedFunction, _InNamespace):
    """The function that has to be called."""

    type: Literal["function"] = Field(description='"function".')


class TextFormat(Body):
    """The form of an answer, in one object."""

    is_strict = True

    type: Literal["text", "json_object", "json_schema"] = Field(
        default="text", description="Any text, a JSON object, or JSON that follows a schema."
    )
    name: StrictStr = Field(default="response", description=_RETURNED_DESCRIPTION)
    description: StrictStr | None = Field(default=None, description=_RETURNED_DESCRIPTION)
    schema_: dict[str, Any] | None = Field(
        default=None, alias="schema", description="The schema. Answers always follow it."
    )
    strict: StrictBool | None = Field(default=None, description=_RETURNED_DESCRIPTION)

    @model_validator(mode="after")
    def _has_no_schema_in_vain(self) -> TextFormat:
        if self.type == "text" and self.schema_ is not None:
            raise ValueError("it is of type text and has schema; give type json_schema")
        return self


class TextOptions(Body):
    """How the text is written."""

    format: TextFormat | None = Field(default=None, description="The form of the text.")
    verbosity: StrictStr | None = Field(default=None, description=IGNORED_DESCRIPTION)


class Reasoning(Body):
    """Thoughts come whole, if the server splits them off the answer."""

    effort: StrictStr | None = Field(
        default=None, description="The effort, for chat templates that read it."
    )
    summary: StrictStr | None = Field(default=None, description=IGNORED_DESCRIPTION)
    generate_summary: StrictStr | None = Field(default=None, description=IGNORED_DESCRIPTION)


def _messages_of(value: Any) -> list[dict[str, Any]]:
    """The items of an input as messages of a chat."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise ValueError("give a text, or a list of items")
    messages: list[dict[str, Any]] = []
    thoughts: str | None = None
    for place, item in enumerate(value):
        if not isinstance(item, dict):
            raise ValueError(f"item {place} is not an object")
        if item.get("type") == "reasoning":
            thoughts = _thoughts_of(item, place)
            continue
        _add_item(messages, item, place)
        if thoughts is not None and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = thoughts
        thoughts = None
    if not messages:
        raise ValueError("it has no message; give one")
    return messages


def _thoughts_of(item: Mapping[str, Any], place: int) -> str:
    parts = item.get("content") or ()
    return "".join(_text_of(part, place, {"reasoning_text": "text"}) for part in parts)


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any], place: int) -> None:
    """Add an item to the messages that the items before it have become."""
    match item.get("type", "message"):
        case "message":
            messages.append(_message_of(item, place))
        case "function_call":
            _add_call(messages, item, place)
        case "function_call_output":
            messages.append(_result_of(item, place))
        case "item_reference":
            raise ValueError(
                f"item {place} refers to a stored item, and nothing is stored here; "
                "send the item itself"
            )
        case kind:
            raise ValueError(
                f"item {place} is of type {kind!r:.60}, which this server does not know; "
                "leave it out"
            )


def _message_of(item: Mapping[str, Any], place: int) -> dict[str, Any]:
    role = item.get("role")
    if role not in _ROLES:
        raise ValueError(f"item {place} has no role; give {', '.join(_ROLES)}")
    return {"role": role, "content": _content_of(item.get("content"), place)}


def _add_call(messages: list[dict[str, Any]], item: Mapping[str, Any], place: int) -> None:
    """Add a call to the assistant's message before it, or to a new message."""
    call = {
        "id": _string(item, "call_id", place),
        "type": "function",
        "function": {
            "name": _full_name(item.get("namespace"), _string(item, "name", place)),
            "arguments": _string(item, "arguments", place),
        },
    }
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    messages[-1].setdefault("tool_calls", []).append(call)


def _result_of(item: Mapping[str, Any], place: int) -> dict[str, Any]:
    """The result of a call, as a tool's message."""
    content = _content_of(item.get("output"), place)
    return {"role": "tool", "tool_call_id": _string(item, "call_id", place), "content": content}


def _content_of(content: Any, place: int) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        raise ValueError(f"item {place} has no content; give a text, or a list of parts")
    if not any(_is_image(part) for part in content):
        return "\n".join(_text_of(part, place, TEXT_FIELDS) for part in content)
    return [
        _image_of(part, place)
        if _is_image(part)
        else {"type": "text", "text": _text_of(part, place, TEXT_FIELDS)}
        for part in content
    ]


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_image"


def _image_of(part: Mapping[str, Any], place: int) -> dict[str, Any]:
    url = part.get("image_url")
    if not isinstance(url, str):
        raise ValueError(
            f"item {place} has an input_image without image_url; give data:image/png;base64,..."
        )
    return {"type": "image_url", "image_url": {"url": url, "detail": part.get("detail")}}


def _text_of(part: Any, place: int, fields: Mapping[str, str]) -> str:
    """The text of a part.

    Args:
        part: the part.
        place: the place of the part's item, for errors.
        fields: the type of a part → the field with its text.
    """
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(fields[kind]) if isinstance(kind, str) and kind in fields else None
    if not isinstance(text, str):
        raise ValueError(
            f"item {place} has a part of type {kind!r:.60}; give input_text or input_image"
        )
    return text


def _string(item: Mapping[str, Any], name: str, place: int) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise ValueError(f"item {place} has no {name}; give a text")
    return value


_Function = Annotated[FunctionTool, BeforeValidator(_only_functions)]


class ResponsesRequest(GenerationRequest):
    """`/v1/responses`. Fields of vLLM's and llama.cpp's requests are as in chats."""

    model_config = config_with_example(input="In the beginning", max_output_tokens=24)
    refusals = RESPONSES

    input: Annotated[
        list[dict[str, Any]],
        PlainValidator(_messages_of, json_schema_input_type=str | list[dict[str, Any]]),
    ] = Field(description="A text, or messages, calls of functions and their results, in order.")
    instructions: StrictStr | None = Field(
        default=None, description="A system prompt in front of the input."
    )
    max_output_tokens: Count | None = Field(
        default=None, description="The largest number of tokens of the answer."
    )
    text: TextOptions | None = Field(default=None, description="How the text is written.")
    tools: (
        Annotated[list[_Function], Field(fail_fast=True), BeforeValidator(_client_tools)] | None
    ) = Field(default=None, description=TOOLS_DESCRIPTION)
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedFunctionTool | None,
        BeforeValidator(_only_functions),
    ] = Field(default=None, description='"none", "auto", "required", or the function to call.')
    parallel_tool_calls: StrictBool | None = Field(
        default=None, description=PARALLEL_CALLS_DESCRIPTION
    )
    include: Texts | None = Field(
        default=None,
        description=(
            "What to return besides the answer: message.output_text.logprobs. OpenAI's other values "
            "ask for things that answers here do not have."
        ),
    )
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = Field(
        default=None, description=TOP_LOGPROBS_DESCRIPTION
    )
    reasoning: Reasoning | None = Field(default=None, description="How the model thinks.")
    max_tool_calls: Ignored = None
    thinking_token_budget: ThinkingBudget = None
    chat_template: StrictStr | None = Field(default=None, description=TEMPLATE_DESCRIPTION)
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description=TEMPLATE_KWARGS_DESCRIPTION
    )
    metadata: dict[str, Any] | None = Field(default=None, description="Returned with the answer.")
    prompt_cache_options: dict[str, Any] | None = Field(
        default=None, description=IGNORED_DESCRIPTION
    )

    @model_validator(mode="after")
    def _check_response(self) -> ResponsesRequest:
        if self.top_logprobs not in (None, 0) and _LOGPROBS_OPTION not in (self.include or ()):
            raise ValueError(f'top_logprobs needs include: ["{_LOGPROBS_OPTION}"]')
        form = self.text.format if self.text is not None else None
        if form is not None and form.type == "json_schema" and form.schema_ is None:
            raise ValueError("text.format is of type json_schema and has no schema; give schema")
        self.chat.checked()
        return self

    @property
    def token_limit_field(self) -> str:
        return "max_output_tokens"

    @cached_property
    def chat(self) -> ChatCompletionRequest:
        """The request as a chat completion."""
        fields = {
            name: getattr(self, name)
            for name in self.model_fields_set
            if name in GenerationRequest.model_fields
        }
        messages = list(self.input)
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        tools = []
        for tool in self.tools or []:
            fields_of_tool = tool.model_dump(exclude={"type", "namespace", "name"})
            function = Function.model_construct(name=tool.full_name, **fields_of_tool)
            tools.append(Tool(function=function))
        tool_choice: Any = self.tool_choice
        if isinstance(tool_choice, NamedFunctionTool):
            tool_choice = NamedTool(function=NamedFunction(name=tool_choice.full_name))
        chat = ChatCompletionRequest.model_construct(
            **fields,
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            response_format=self._response_format(),
            tools=tools or None,
            tool_choice=tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            logprobs=_LOGPROBS_OPTION in (self.include or ()),
            top_logprobs=self.top_logprobs,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            thinking_token_budget=self.thinking_token_budget,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
        )
        chat.share_ignored_of(self)
        return chat

    def _response_format(self) -> ResponseFormat | None:
        """The form of the answer, as chat completions have it."""
        text_format = None if self.text is None else self.text.format
        if text_format is None:
            return None
        if text_format.type == "json_schema":
            schema = JsonSchema(schema=text_format.schema_ or {})
            return ResponseFormat(type="json_schema", json_schema=schema)
        return ResponseFormat(type=text_format.type, schema=text_format.schema_)

    def repeated_fields(self, params: SamplingParams) -> dict[str, Any]:
        """The fields that an answer repeats.

        Args:
            params: the sampling parameters of the answer, defaults included.
        """
        text = self.text or TextOptions()
        text_format: dict[str, Any] = {"type": "text"}
        if text.format is not None and text.format.type == "json_schema":
            text_format = text.format.model_dump(by_alias=True, exclude_none=True)
        elif text.format is not None:
            text_format = {"type": text.format.type}
        tool_choice: Any = self.tool_choice or "auto"
        if isinstance(tool_choice, NamedFunctionTool):
            tool_choice = tool_choice.model_dump(exclude_none=True)
        tools = [
            {"strict": None, "parameters": None, **tool.model_dump(exclude={"namespace"})}
            for tool in self.tools or []
        ]
        effort = None if self.reasoning is None else self.reasoning.effort
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": {"effort": effort, "summary": None},
            "temperature": params.temperature,
            "text": {
                "format": text_format,
                "verbosity": "medium" if text.verbosity is None else text.verbosity,
            },
            "tool_choice": tool_choice,
            "tools": tools,
            "top_logprobs": self.top_logprobs or 0,
            "top_p": params.top_p,
            "user": self.user,
            # These fields always have the same value here.
            "background": False,
            "max_tool_calls": None,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "truncation": "disabled",
        }


class ResponseChoice(ChatChoice):
    """The items of an answer (its thoughts, message and calls) and their events."""

    kind = "response"
    chunk = "response"
    prefix = "resp"

    def __init__(
        self,
        model: ServedModel,
        body: ResponsesRequest,
        prompt: Sequence[int],
        form: AnswerForm,
        response: Mapping[str, Any],
    ) -> None:
        """response: the fields of the whole answer that its request decides."""
        super().__init__(0, model, body.chat, prompt, form)
        self._response = response
        # A call has the names of its function and of the function's namespace apart.
        self._names_of_functions = {
            tool.full_name: tool.model_dump(include={"name", "namespace"}, exclude_none=True)
            for tool in body.tools or []
        }
        self._items: list[dict[str, Any]] = []
        # The last item is open while it has a type here and its pieces are collected.
        self._open_type: str | None = None
        self._open_pieces: list[str] = []
        self._message_logprobs: list[dict[str, Any]] = []
        self._logprobs_without_event: list[dict[str, Any]] = []

    def start(self) -> list[Event]:
        return [
            self._response_event(kind, status="in_progress") for kind in ("created", "in_progress")
        ]

    def piece(self, delta: Delta | RequestOutput) -> list[Event]:
        parts = self._read(delta.text or "")
        if self._num_alternatives is not None and delta.token_ids:
            self._logprobs_without_event += self._logprobs(delta)["content"]
        return self._write_parts(parts)

    def end(self, output: RequestOutput) -> list[Event]:
        events = self._write_parts(self._read_end())
        is_complete = output.finish_reason == "stop"
        status = "completed" if is_complete else "incomplete"
        if self._open_type in (None, "reasoning"):
            events += self._close("completed")
            events += self._open("message")
        events += self._close(status)
        response = self._response_event(
            status,
            status=status,
            completed_at=int(time.time()) if is_complete else None,
            incomplete_details=None if is_complete else {"reason": "max_output_tokens"},
            output=self._items,
            usage=self._usage(output),
        )
        events.append(response)
        return events

    def _usage(self, output: RequestOutput) -> dict[str, Any]:
        thoughts = self._model.tokenizer.tokenize(self._thoughts, add_special_tokens=False)
        usage = output.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {
                "reasoning_tokens": len(thoughts),
                **self._form.usage_details,
            },
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def whole(self, output: RequestOutput) -> Event:
        self.piece(output)
        response: Event = self.end(output)[-1]["response"]
        return response

    def failed(self, error: ApiError) -> list[Event]:
        message = str(error)
        return [
            {"type": "error", "code": error.code, "message": message, "param": error.param},
            self._response_event(
                "failed", status="failed", error={"code": "server_error", "message": message}
            ),
        ]

    def _response_event(self, kind: str, **fields: Any) -> Event:
        """An event with the response as it is now."""
        return {"type": f"response.{kind}", "response": {**self._response, **fields}}

    def _write_parts(self, parts: AnswerParts) -> list[Event]:
        events: list[Event] = []
        if parts.thoughts and self._shows_thoughts:
            events += self._write("reasoning", parts.thoughts)
        if parts.text:
            events += self._write("message", parts.text)
        for call in parts.calls:
            events += self._write_call(call)
        return events

    def _write(self, kind: str, text: str) -> list[Event]:
        """The events of a part of thoughts or of the message."""
        events: list[Event] = []
        if kind != self._open_type:
            events += self._close("completed")
            events += self._open(kind)
        self._open_pieces.append(text)
        delta = {
            "type": f"response.{_PART_TYPES[kind]}.delta",
            **self._place_of_part(),
            "delta": text,
        }
        if kind == "message":
            delta["logprobs"] = self._take_logprobs()
        events.append(delta)
        return events

    def _take_logprobs(self) -> list[dict[str, Any]]:
        """The log-probabilities of the tokens since the last event of the message, thoughts
        included."""
        new = self._logprobs_without_event
        self._logprobs_without_event = []
        self._message_logprobs += new
        return new

    def _open(self, kind: str) -> list[Event]:
        """The events of the beginning of an item of thoughts or of the message."""
        item: Event = {
            "id": _id("rs" if kind == "reasoning" else "msg"),
            "type": kind,
            "status": "in_progress",
        }
        if kind == "reasoning":
            item["summary"] = []
        else:
            item["role"] = "assistant"
        item["content"] = []
        self._open_type = kind
        self._open_pieces = []
        return [
            self._add_item(item),
            {
                "type": "response.content_part.added",
                **self._place_of_part(),
                "part": _part(kind, "", []),
            },
        ]

    def _close(self, status: str) -> list[Event]:
        """The events of the end of the open item."""
        kind = self._open_type
        if kind is None:
            return []
        self._open_type = None
        text = "".join(self._open_pieces)
        if kind == _CALL:
            name = self._items[-1]["name"]
            return [
                self._call_event("done", name=name, arguments=text),
                self._end_item(arguments=text, status=status),
            ]
        text_done: Event = {
            "type": f"response.{_PART_TYPES[kind]}.done",
            **self._place_of_part(),
            "text": text,
        }
        if kind == "message":
            self._take_logprobs()
            text_done["logprobs"] = list(self._message_logprobs)
        part = _part(kind, text, list(self._message_logprobs))
        return [
            text_done,
            {"type": "response.content_part.done", **self._place_of_part(), "part": part},
            self._end_item(content=[part], status=status),
        ]

    def _write_call(self, call: Mapping[str, Any]) -> list[Event]:
        """The events of a part of a call."""
        events: list[Event] = []
        function = call["function"]
        if "id" in call:
            events += self._close("completed")
            self._open_type = _CALL
            self._open_pieces = []
            item = {
                "id": _id("fc"),
                "type": _CALL,
                "status": "in_progress",
                "call_id": call["id"],
                **self._names_of_functions.get(function["name"], {"name": function["name"]}),
                "arguments": "",
            }
            events.append(self._add_item(item))
        if function["arguments"]:
            self._open_pieces.append(function["arguments"])
            events.append(self._call_event("delta", delta=function["arguments"]))
        return events

    def _call_event(self, kind: str, **fields: str) -> Event:
        return {
            "type": f"response.function_call_arguments.{kind}",
            "item_id": self._items[-1]["id"],
            "output_index": len(self._items) - 1,
            **fields,
        }

    def _add_item(self, item: Event) -> Event:
        """The event of a new item."""
        self._items.append(item)
        return {
            "type": "response.output_item.added",
            "output_index": len(self._items) - 1,
            "item": item,
        }

    def _end_item(self, **fields: Any) -> Event:
        """The event of the end of the last item, with its last fields. Earlier events keep the item
        as it was."""
        item = {**self._items[-1], **fields}
        self._items[-1] = item
        return {
            "type": "response.output_item.done",
            "output_index": len(self._items) - 1,
            "item": item,
        }

    def _place_of_part(self) -> Event:
        return {
            "item_id": self._items[-1]["id"],
            "output_index": len(self._items) - 1,
            "content_index": 0,
        }


class ResponseAnswers(NamedEvents):
    """The answer to a request of `/v1/responses`."""

    def __init__(
        self,
        model: ServedModel,
        body: ResponsesRequest,
        metrics: Metrics,
        params: SamplingParams,
        prompt: list[int],
        form: AnswerForm,
    ) -> None:
        """The arguments are as for `Answers`; `params` and `prompt` are those of the answer."""
        response = {
            "id": f"resp_{body.id_of_answer()}",
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "model": model.name,
            "status": None,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            **body.repeated_fields(params),
        }
        choice = ResponseChoice(model, body, prompt, form, response)
        super().__init__(model, body.chat, metrics, [choice], form)
        self._next_sequence_number = 0

    def _encode(self, event: Event) -> bytes:
        numbered = {**event, "sequence_number": self._next_sequence_number}
        self._next_sequence_number += 1
        return super()._encode(numbered)


def _part(kind: str, text: str, logprobs: list[dict[str, Any]]) -> Event:
    """The part of an item of thoughts or of the message."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
