"""`/v1/messages`, Anthropic's API: its requests as chat completions, and answers as blocks of content with events."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, PlainValidator, StrictBool, StrictStr, model_validator
from pydantic_core import from_json

from qsample.addons.serve.answers import NamedEvents
from qsample.addons.serve.chats import (
    TEMPLATE_DESCRIPTION,
    TEMPLATE_KWARGS_DESCRIPTION,
    ChatCompletionRequest,
    Function,
    NamedFunction,
    NamedTool,
    Tool,
)
from qsample.addons.serve.choices import ChatChoice, Event
from qsample.addons.serve.http import MESSAGES_PATH, ApiError, json_bytes
from qsample.addons.serve.metrics import Metrics
from qsample.addons.serve.models import ServedModel
from qsample.addons.serve.parsers import ToolCalls
from qsample.addons.serve.refusals import MESSAGE_TOOL, MESSAGES
from qsample.addons.serve.requests import (
    IGNORED,
    Body,
    Count,
    GenerationRequest,
    JsonSchema,
    ResponseFormat,
    Texts,
    config_with_example,
)
from qsample.runtime import Delta, RequestOutput

_CHOICES: Final[dict[str, Any]] = {
    "auto": "auto",
    "any": "required",
    "none": "none",
}  # of tools, in OpenAI's words
# Who writes which blocks, and what these have to have.
_BLOCKS: Final = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
_FIELDS: Final[dict[str, dict[str, type]]] = {
    "text": {"text": str},
    "image": {"source": dict},
    "thinking": {"thinking": str},
    "redacted_thinking": {},
    "tool_use": {"id": str, "name": str, "input": dict},
    "tool_result": {"tool_use_id": str},
}


def _only_client_tools(tool: Any) -> Any:
    if isinstance(tool, dict) and tool.get("type", "custom") not in ("custom", None):
        raise ValueError(
            f"it is of type {tool['type']!r:.60}, and this server runs no tools itself; give a name and an "
            "input_schema, and send back what the tool returns"
        )
    return tool


class MessageTool(Body):
    """A tool that the model may call."""

    refusals = MESSAGE_TOOL

    name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")] = Field(
        description="A name of letters, digits, dots, _ and -."
    )
    description: StrictStr | None = Field(default=None, description="What the tool does.")
    input_schema: dict[str, Any] = Field(description="The JSON schema of the tool's input.")
    strict: StrictBool | None = Field(
        default=None, description="Ignored. A call that is demanded always follows the schema."
    )
    type: Literal["custom"] = Field(default="custom", description='Only "custom".')
    cache_control: dict[str, Any] | None = Field(default=None, description=IGNORED)
    eager_input_streaming: StrictBool | None = Field(default=None, description=IGNORED)
    input_examples: list[dict[str, Any]] | None = Field(default=None, description=IGNORED)


class ToolChoice(Body):
    """Whether the model has to call a tool."""

    type: Literal["auto", "any", "tool", "none"] = Field(
        description='"any" demands a call, and "tool" a call of one tool.'
    )
    name: StrictStr | None = Field(default=None, description="The name of the tool to call.")
    disable_parallel_tool_use: StrictBool = Field(
        default=False, description="Whether an answer has at most one call."
    )

    @model_validator(mode="after")
    def _has_a_name(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError(f"it is of type {self.type!r}; give a name with the type tool alone")
        return self


class Thinking(Body):
    """Thoughts before the answer."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"] = Field(
        description='"disabled" drops the thoughts, and sets enable_thinking of the template to false.'
    )
    budget_tokens: Count | None = Field(default=None, description=IGNORED)
    display: Literal["summarized", "omitted"] | None = Field(
        default=None, description='"omitted" drops the thoughts.'
    )


class JsonFormat(Body):
    """The form of an answer."""

    type: Literal["json_schema"] = Field(description='"json_schema".')
    schema_: dict[str, Any] = Field(
        alias="schema", description="The schema. Answers always follow it."
    )


class OutputConfig(Body):
    """How the answer is written."""

    effort: StrictStr | None = Field(
        default=None, description="The effort, for chat templates that read a reasoning_effort."
    )
    format: JsonFormat | None = Field(default=None, description="The form of the answer.")


def _messages_of(value: Any) -> list[dict[str, Any]]:
    """Messages with blocks of content as those of a chat."""
    if not isinstance(value, list) or not value:
        raise ValueError("give a list of messages")
    messages: list[dict[str, Any]] = []
    for place, message in enumerate(value):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in _BLOCKS:
            raise ValueError(f"message {place} has no role; give {', '.join(_BLOCKS)}")
        messages += _of_blocks(
            role, _blocks_of(message.get("content"), f"message {place}", *_BLOCKS[role]), place
        )
    return messages


def _blocks_of(content: Any, owner: str, *known: str) -> list[dict[str, Any]]:
    """Blocks of content of known types; a text is a block. owner: of the content, for errors."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise ValueError(f"{owner} has no content; give a text, or a list of blocks")
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind not in known:
            raise ValueError(f"{owner} has a block of type {kind!r:.60}; give {', '.join(known)}")
        for name, type_ in _FIELDS[kind].items():
            if not isinstance(block.get(name), type_):
                given = "a text" if type_ is str else "an object"
                raise ValueError(
                    f"{owner} has a block of type {kind!r} without {name}; give {given}"
                )
    return content


def _text_of(content: Any, owner: str = "it") -> str:
    return "\n".join(block["text"] for block in _blocks_of(content, owner, "text"))


def _of_blocks(role: str, blocks: list[dict[str, Any]], place: int) -> list[dict[str, Any]]:
    """The messages of a chat that a message stands for: a tool's result is one there."""
    results, parts, calls, thoughts = list[Any](), list[Any](), list[Any](), ""
    for block in blocks:
        match block:
            case {"type": "text" | "image"}:
                parts.append(block)
            case {"type": "tool_result", "tool_use_id": call}:
                owner = f"message {place}"
                content = _content_of(
                    _blocks_of(block.get("content", ""), owner, "text", "image"), owner
                )
                results.append({"role": "tool", "tool_call_id": call, "content": content})
            case {"type": "tool_use", "id": call, "name": name, "input": given}:
                calls.append(
                    {"id": call, "type": "function", "function": {"name": name, "arguments": given}}
                )
            case {"type": "thinking", "thinking": thought}:
                thoughts += thought
    said = _content_of(parts, f"message {place}") if parts or not calls else None
    message: dict[str, Any] = {"role": role, "content": said}
    more: dict[str, Any] = {"tool_calls": calls, "reasoning_content": thoughts}
    message |= {name: value for name, value in more.items() if value}
    return results if results and not parts else [*results, message]


def _content_of(blocks: list[dict[str, Any]], owner: str) -> str | list[dict[str, Any]]:
    """Blocks of text and images as the content of a chat's message."""
    if all(block["type"] == "text" for block in blocks):
        return "\n".join(block["text"] for block in blocks)
    return [
        {"type": "text", "text": block["text"]}
        if block["type"] == "text"
        else {"type": "image_url", "image_url": {"url": _address_of(block["source"], owner)}}
        for block in blocks
    ]


def _address_of(source: dict[str, Any], owner: str) -> str:
    match source:
        case {"type": "base64", "media_type": str(kind), "data": str(data)}:
            return f"data:{kind};base64,{data}"
        case {"type": "url", "url": str(address)}:
            return address
    form = '{"type": "base64", "media_type": "image/png", "data": "..."}'
    raise ValueError(
        f"{owner} has an image with a source of type {source.get('type')!r:.60}; give {form}"
    )


class CountTokensRequest(GenerationRequest):
    """`/v1/messages/count_tokens`, with the fields of `/v1/messages`."""

    model_config = config_with_example(
        messages=[{"role": "user", "content": "In the beginning"}], max_tokens=24
    )
    refusals = MESSAGES

    messages: Annotated[
        list[dict[str, Any]],
        PlainValidator(_messages_of, json_schema_input_type=list[dict[str, Any]]),
    ] = Field(
        description=(
            "Messages of texts, or of blocks of type text, image, tool_use, tool_result and "
            "thinking."
        )
    )
    system: (
        Annotated[str, PlainValidator(_text_of, json_schema_input_type=str | list[dict[str, Any]])]
        | None
    ) = Field(default=None, description="A system prompt.")
    tools: (
        Annotated[
            list[Annotated[MessageTool, BeforeValidator(_only_client_tools)]], Field(fail_fast=True)
        ]
        | None
    ) = Field(default=None, description="Tools that the model may call.")
    tool_choice: ToolChoice | None = Field(
        default=None, description="Whether the model has to call a tool."
    )
    thinking: Thinking | None = Field(default=None, description="Whether to return thoughts.")
    output_config: OutputConfig | None = Field(
        default=None, description="The effort, and the form of the answer."
    )
    stop_sequences: Texts | None = Field(default=None, description="Texts that end the answer.")
    cache_control: dict[str, Any] | None = Field(default=None, description=IGNORED)
    chat_template: StrictStr | None = Field(default=None, description=TEMPLATE_DESCRIPTION)
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description=TEMPLATE_KWARGS_DESCRIPTION
    )

    @model_validator(mode="after")
    def _check_messages(self) -> CountTokensRequest:
        self.chat.checked()
        return self

    @cached_property
    def chat(self) -> ChatCompletionRequest:
        """The same as a chat completion. An assistant's message at the end is continued."""
        same = {
            name: getattr(self, name)
            for name in self.model_fields_set
            if name in GenerationRequest.model_fields
        }
        choice, config = (
            self.tool_choice or ToolChoice(type="auto"),
            self.output_config or OutputConfig(),
        )
        same_in_tools = {"name", "description", "strict"}
        tools = [
            Function.model_construct(
                **tool.model_dump(include=same_in_tools), parameters=tool.input_schema
            )
            for tool in self.tools or []
        ]
        thinking, kwargs = self.thinking, dict(self.chat_template_kwargs or {})
        if thinking is not None and thinking.type == "disabled":
            kwargs.setdefault("enable_thinking", False)
        schema = JsonSchema(schema=config.format.schema_) if config.format is not None else None
        named = (
            NamedTool(function=NamedFunction(name=choice.name)) if choice.name is not None else None
        )
        last = self.messages[-1]
        return ChatCompletionRequest.model_construct(
            **same,
            messages=[
                *([] if self.system is None else [{"role": "system", "content": self.system}]),
                *self.messages,
            ],
            stop=self.stop_sequences,
            response_format=ResponseFormat(type="json_schema", json_schema=schema)
            if schema
            else None,
            tools=[Tool(function=function) for function in tools] or None,
            tool_choice=named or (_CHOICES[choice.type] if tools or choice.type == "any" else None),
            parallel_tool_calls=not choice.disable_parallel_tool_use,
            include_reasoning=thinking is None
            or (thinking.type != "disabled" and thinking.display != "omitted"),
            reasoning_effort=config.effort,
            continue_final_message=last["role"] == "assistant" and "tool_calls" not in last,
            chat_template=self.chat_template,
            chat_template_kwargs=kwargs,
        )


class MessagesRequest(CountTokensRequest):
    """`/v1/messages`. Fields of vLLM's and llama.cpp's requests are as in chats."""

    max_tokens: Count = Field(description="The largest number of tokens to write.")


class MessageChoice(ChatChoice):
    """The blocks of an answer (its thoughts, texts and calls) and their events."""

    kind = chunk = "message"
    prefix = "msg"

    def __init__(self, model: ServedModel, body: MessagesRequest, prompt: Sequence[int]) -> None:
        super().__init__(0, model, body.chat, prompt)
        self._limit = body.max_tokens
        known = {
            "id": f"msg_{body.request_id or uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
        }
        open_: Event = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(len(prompt), 0, 0),
        }
        self._message: Event = {**known, "model": model.name, **open_}
        self._blocks: list[Event] = []
        self._pieces: list[str] | None = None  # of the open block, the last one

    def start(self) -> list[Event]:
        return [{"type": "message_start", "message": self._message}, {"type": "ping"}]

    def piece(self, delta: Delta | RequestOutput) -> list[Event]:
        return self._written(*self._put(delta.text or ""))

    def end(self, output: RequestOutput) -> list[Event]:
        events = [*self._written(*self._rest()), *self._close()]
        reason, sequence, usage = "max_tokens", None, output.usage
        if output.finish_reason == "stop":
            sequence = None if self._calls else output.stop_string
            reason = (
                "tool_use" if self._calls else "end_turn" if sequence is None else "stop_sequence"
            )
        elif output.finish_reason == "length" and usage.completion_tokens < self._limit:
            reason = "model_context_window_exceeded"
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        counts = _usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        return [
            *events,
            {"type": "message_delta", "delta": delta, "usage": counts},
            {"type": "message_stop"},
        ]

    def whole(self, output: RequestOutput) -> Event:
        self.piece(output)
        ended = self.end(output)[-2]
        return {**self._message, "content": self._blocks, **ended["delta"], "usage": ended["usage"]}

    def failed(self, error: ApiError) -> list[Event]:
        return [error.body(MESSAGES_PATH)]

    def _written(self, thoughts: str, text: str, calls: ToolCalls) -> list[Event]:
        shown = thoughts if self._shows_thoughts else ""
        events = self._write(
            {"type": "thinking", "thinking": "", "signature": ""}, "thinking", shown
        )
        events += self._write({"type": "text", "text": ""}, "text", text)
        for call in calls:
            begun = {"id": call["id"], "name": call["function"]["name"]} if "id" in call else {}
            events += self._write(
                {"type": "tool_use", **begun, "input": {}},
                "input_json",
                call["function"]["arguments"],
            )
        return events

    def _write(self, block: Event, kind: str, text: str) -> list[Event]:
        """The events of a part of a block: of the open block if it has the same type, and a call does not begin."""
        events: list[Event] = []
        if "id" in block or (
            text and (self._pieces is None or self._blocks[-1]["type"] != block["type"])
        ):
            events = self._close()
            self._blocks.append(block)
            self._pieces = []
            events.append(
                {
                    "type": "content_block_start",
                    "index": len(self._blocks) - 1,
                    "content_block": block,
                }
            )
        if text and self._pieces is not None:
            self._pieces.append(text)
            delta = {
                "type": f"{kind}_delta",
                "partial_json" if kind == "input_json" else kind: text,
            }
            events.append(
                {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}
            )
        return events

    def _close(self) -> list[Event]:
        if self._pieces is None:
            return []
        block, text = self._blocks[-1], "".join(self._pieces)
        kind, self._pieces = block["type"], None
        self._blocks[-1] = {
            **block,
            **({"input": _input_of(text)} if kind == "tool_use" else {kind: text}),
        }
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]


def _usage(prompt: int, cached: int, completion: int) -> dict[str, int]:
    read = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}
    return {"input_tokens": prompt - cached, **read, "output_tokens": completion}


def _input_of(arguments: str) -> dict[str, Any]:
    """Arguments as an object; what there is of it if they were cut off, as Anthropic's clients read a stream."""
    try:
        value = from_json(arguments, allow_partial=True)
        json_bytes(value)  # which refuses numbers that JSON lacks
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class MessageAnswers(NamedEvents):
    """The answer to a request of `/v1/messages`."""

    def __init__(
        self, model: ServedModel, body: MessagesRequest, metrics: Metrics, prompt: list[int]
    ) -> None:
        super().__init__(model, body.chat, metrics, [MessageChoice(model, body, prompt)])
