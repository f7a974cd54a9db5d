"""`/v1/messages`, Anthropic's API: its requests as chat completions, and answers as blocks of
content with their events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    StrictBool,
    StrictStr,
    ValidationInfo,
    field_validator,
    model_validator,
)
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
from qsample.addons.serve.choices import AnswerParts, ChatChoice, Event
from qsample.addons.serve.forms import AnswerForm
from qsample.addons.serve.http import MESSAGES_PATH, ApiError, json_bytes
from qsample.addons.serve.metrics import Metrics
from qsample.addons.serve.models import ServedModel
from qsample.addons.serve.refusals import MESSAGE_TOOL, MESSAGES
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
from qsample.runtime import Delta, RequestOutput

# The types of a tool choice in OpenAI's words.
_TOOL_CHOICES: Final[dict[str, Any]] = {"auto": "auto", "any": "required", "none": "none"}
# The types of blocks that the messages of a role may have.
_BLOCK_TYPES: Final = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
# The fields that a block of a type has to have.
_BLOCK_FIELDS: Final[dict[str, dict[str, type]]] = {
    "text": {"text": str},
    "image": {"source": dict},
    "thinking": {"thinking": str},
    "redacted_thinking": {},
    "tool_use": {"id": str, "name": str, "input": dict},
    "tool_result": {"tool_use_id": str},
    "tool_reference": {"tool_name": str},
}
# The types of blocks that the result of a tool may have. A client that searches tools itself, and
# marks them with defer_loading, answers with references; here the model knows all of them already.
_RESULT_TYPES: Final = ("text", "image", "tool_reference")


# The beginnings of the types of tools that Anthropic's servers run. A model here cannot call them.
_HOSTED_TOOLS: Final = (
    "advisor_",
    "code_execution_",
    "mcp_toolset",
    "tool_search_tool_",
    "web_fetch_",
    "web_search_",
)
# Claude Code begins its system prompt with a line that differs in each request, for Anthropic's
# accounting. In a prompt it would spoil the reuse of the beginning.
_BILLING_LINE: Final = "x-anthropic-billing-header:"
# The edits of a context that leave out earlier thoughts, which chat templates leave out anyway.
_EDITS_OF_THOUGHTS: Final = "clear_thinking_"


def _client_tools(tools: Any, info: ValidationInfo) -> Any:
    """The tools that the client runs."""
    if not isinstance(tools, list):
        return tools
    client_tools: list[Any] = []
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind.startswith(_HOSTED_TOOLS):
            if info.context is not None:
                info.context.add(f"tools.{kind}")
        else:
            client_tools.append(tool)
    return client_tools


def _only_custom_tools(tool: Any) -> Any:
    if isinstance(tool, dict) and tool.get("type", "custom") not in ("custom", None):
        raise ValueError(
            f"it is of type {tool['type']!r:.60}, and models here know no tools of Anthropic's; "
            "give a name and an input_schema, and send back what the tool returns"
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
    cache_control: dict[str, Any] | None = Field(default=None, description=IGNORED_DESCRIPTION)
    eager_input_streaming: StrictBool | None = Field(default=None, description=IGNORED_DESCRIPTION)
    input_examples: list[dict[str, Any]] | None = Field(
        default=None, description=IGNORED_DESCRIPTION
    )


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
            raise ValueError(f"it is of type {self.type!r}; give a name only with the type tool")
        return self


class Thinking(Body):
    """Thoughts before the answer."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"] = Field(
        description=(
            '"disabled" drops the thoughts, and sets enable_thinking of the template to false.'
        )
    )
    budget_tokens: Count | None = Field(
        default=None,
        description="The largest number of tokens of the thoughts, if the server splits them off.",
    )
    display: StrictStr | None = Field(
        default=None, description='"omitted" drops the thoughts; other values change nothing.'
    )


class JsonFormat(Body):
    """The form of an answer."""

    is_strict = True

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


class ContextEdit(Body):
    """A cut of the conversation."""

    type: StrictStr = Field(description="Only types that begin with clear_thinking_.")
    keep: Ignored = None

    @field_validator("type")
    @classmethod
    def _only_of_thoughts(cls, kind: str) -> str:
        if not kind.startswith(_EDITS_OF_THOUGHTS):
            raise ValueError(
                "this server cuts no messages; leave the edit out, and send the conversation "
                "as the model should read it"
            )
        return kind


class ContextManagement(Body):
    """How earlier parts of the conversation are cut."""

    edits: Annotated[list[ContextEdit], Field(fail_fast=True)] = Field(
        default_factory=list,
        description=(
            "Cuts of earlier thoughts. Chat templates leave out those that their models should not "
            "read again, so nothing else is cut."
        ),
    )


def _messages_of(value: Any) -> list[dict[str, Any]]:
    """Messages with blocks of content as the messages of a chat."""
    if not isinstance(value, list) or not value:
        raise ValueError("give a list of messages")
    messages: list[dict[str, Any]] = []
    for place, message in enumerate(value):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in _BLOCK_TYPES:
            raise ValueError(f"message {place} has no role; give {', '.join(_BLOCK_TYPES)}")
        owner = f"message {place}"
        if "content" not in message:
            raise ValueError(f"{owner} has no content; give a text, or a list of blocks")
        blocks = _blocks_of(message.get("content"), owner, _BLOCK_TYPES[role])
        messages += _messages_of_blocks(role, blocks, owner)
    return messages


def _blocks_of(content: Any, owner: str, known_types: Sequence[str]) -> list[dict[str, Any]]:
    """The blocks of a content. A text is a block.

    Args:
        content: the content.
        owner: the thing that has the content, for errors.
        known_types: the types of blocks that it may have.
    """
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if content is None:
        return []
    if not isinstance(content, list):
        raise ValueError(f"{owner} has no content; give a text, or a list of blocks")
    for block in content:
        kind: Any = block.get("type") if isinstance(block, dict) else None
        if kind not in known_types:
            raise ValueError(
                f"{owner} has a block of type {kind!r:.60}; give {', '.join(known_types)}"
            )
        for name, field_type in _BLOCK_FIELDS[kind].items():
            if not isinstance(block.get(name), field_type):
                remedy = "a text" if field_type is str else "an object"
                raise ValueError(
                    f"{owner} has a block of type {kind!r} without {name}; give {remedy}"
                )
    return content


def _system_prompt_of(content: Any) -> str:
    texts = [block["text"] for block in _blocks_of(content, "it", ("text",))]
    lines = "\n".join(texts).split("\n")
    return "\n".join(line for line in lines if not line.startswith(_BILLING_LINE))


def _messages_of_blocks(
    role: str, blocks: list[dict[str, Any]], owner: str
) -> list[dict[str, Any]]:
    """The messages of a chat that a message with blocks stands for. The result of a tool is a
    message of its own there."""
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts = ""
    for block in blocks:
        match block:
            case {"type": "text" | "image"}:
                parts.append(block)
            case {"type": "tool_result", "tool_use_id": call_id}:
                inner = _blocks_of(block.get("content"), owner, _RESULT_TYPES)
                content = _content_of(inner, owner)
                results.append({"role": "tool", "tool_call_id": call_id, "content": content})
            case {"type": "tool_use", "id": call_id, "name": name, "input": arguments}:
                function = {"name": name, "arguments": arguments}
                calls.append({"id": call_id, "type": "function", "function": function})
            case {"type": "thinking", "thinking": thought}:
                thoughts += thought
    if results and not parts:
        return results
    message: dict[str, Any] = {"role": role, "content": None}
    if parts or not calls:
        message["content"] = _content_of(parts, owner)
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = thoughts
    return [*results, message]


def _content_of(blocks: list[dict[str, Any]], owner: str) -> str | list[dict[str, Any]]:
    """Blocks of text, images and references as the content of a chat's message."""
    parts: list[dict[str, Any]] = []
    for block in blocks:
        match block:
            case {"type": "image", "source": source}:
                image_url = {"url": _address_of(source, owner)}
                parts.append({"type": "image_url", "image_url": image_url})
            case {"text": text} | {"tool_name": text}:
                parts.append({"type": "text", "text": text})
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


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
        Annotated[
            str,
            PlainValidator(_system_prompt_of, json_schema_input_type=str | list[dict[str, Any]]),
        ]
        | None
    ) = Field(default=None, description="A system prompt.")
    tools: (
        Annotated[
            list[Annotated[MessageTool, BeforeValidator(_only_custom_tools)]],
            Field(fail_fast=True),
            BeforeValidator(_client_tools),
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
    context_management: ContextManagement | None = Field(
        default=None, description="How earlier parts of the conversation are cut."
    )
    stop_sequences: Texts | None = Field(default=None, description="Texts that end the answer.")
    cache_control: dict[str, Any] | None = Field(default=None, description=IGNORED_DESCRIPTION)
    diagnostics: Ignored = None
    inference_geo: Ignored = None
    speed: Ignored = None
    user_profile_id: Ignored = None
    workspace_id: Ignored = None
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
        """The request as a chat completion. An assistant's message at the end is continued."""
        fields = {
            name: getattr(self, name)
            for name in self.model_fields_set
            if name in GenerationRequest.model_fields
        }
        messages = list(self.messages)
        if self.system not in (None, ""):
            messages.insert(0, {"role": "system", "content": self.system})
        last = self.messages[-1]
        choice = self.tool_choice or ToolChoice(type="auto")
        config = self.output_config or OutputConfig()
        response_format = None
        if config.format is not None:
            schema = JsonSchema(schema=config.format.schema_)
            response_format = ResponseFormat(type="json_schema", json_schema=schema)
        thinking = self.thinking
        disables_thinking = thinking is not None and thinking.type == "disabled"
        omits_thoughts = thinking is not None and thinking.display == "omitted"
        template_kwargs = dict(self.chat_template_kwargs or {})
        if disables_thinking:
            template_kwargs.setdefault("enable_thinking", False)
        chat = ChatCompletionRequest.model_construct(
            **fields,
            messages=messages,
            stop=self.stop_sequences,
            response_format=response_format,
            tools=self._chat_tools() or None,
            tool_choice=self._chat_tool_choice(choice),
            parallel_tool_calls=not choice.disable_parallel_tool_use,
            include_reasoning=not disables_thinking and not omits_thoughts,
            thinking_token_budget=None if thinking is None else thinking.budget_tokens,
            reasoning_effort=config.effort,
            continue_final_message=last["role"] == "assistant" and "tool_calls" not in last,
            chat_template=self.chat_template,
            chat_template_kwargs=template_kwargs,
        )
        chat.share_ignored_of(self)
        return chat

    def _chat_tools(self) -> list[Tool]:
        """The tools as chat completions have them."""
        tools = []
        for tool in self.tools or []:
            same_fields = tool.model_dump(include={"name", "description", "strict"})
            function = Function.model_construct(**same_fields, parameters=tool.input_schema)
            tools.append(Tool(function=function))
        return tools

    def _chat_tool_choice(self, choice: ToolChoice) -> Any:
        """The tool choice as chat completions have it."""
        if choice.name is not None:
            return NamedTool(function=NamedFunction(name=choice.name))
        if self.tools or choice.type == "any":
            return _TOOL_CHOICES[choice.type]
        return None


class MessagesRequest(CountTokensRequest):
    """`/v1/messages`. Fields of vLLM's and llama.cpp's requests are as in chats."""

    max_tokens: Count = Field(description="The largest number of tokens to write.")


class MessageChoice(ChatChoice):
    """The blocks of an answer (its thoughts, texts and calls) and their events."""

    kind = "message"
    chunk = "message"
    prefix = "msg"

    def __init__(
        self, model: ServedModel, body: MessagesRequest, prompt: Sequence[int], form: AnswerForm
    ) -> None:
        super().__init__(0, model, body.chat, prompt, form)
        self._max_tokens = body.max_tokens
        self._message: Event = {
            "id": f"msg_{body.id_of_answer()}",
            "type": "message",
            "role": "assistant",
            "model": model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(len(prompt), 0, 0),
        }
        self._blocks: list[Event] = []
        # The last block is open while its pieces are collected here.
        self._open_pieces: list[str] | None = None

    def start(self) -> list[Event]:
        return [{"type": "message_start", "message": self._message}, {"type": "ping"}]

    def piece(self, delta: Delta | RequestOutput) -> list[Event]:
        return self._write_parts(self._read(delta.text or ""))

    def end(self, output: RequestOutput) -> list[Event]:
        events = self._write_parts(self._read_end())
        events += self._close()
        usage = output.usage
        counts = _usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        events.append(
            {
                "type": "message_delta",
                "delta": self._stop_fields(output),
                "usage": {**counts, **self._form.usage_details},
            }
        )
        events.append({"type": "message_stop"})
        return events

    def _stop_fields(self, output: RequestOutput) -> Event:
        """Why the answer ended."""
        reason = "max_tokens"
        stop_sequence = None
        if output.finish_reason == "stop":
            if self._has_calls:
                reason = "tool_use"
            elif output.stop_string is None:
                reason = "end_turn"
            else:
                reason = "stop_sequence"
                stop_sequence = output.stop_string
        elif output.finish_reason == "length":
            if output.usage.completion_tokens < self._max_tokens:
                reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": stop_sequence}

    def whole(self, output: RequestOutput) -> Event:
        self.piece(output)
        message_delta = self.end(output)[-2]
        return {
            **self._message,
            "content": self._blocks,
            **message_delta["delta"],
            "usage": message_delta["usage"],
        }

    def failed(self, error: ApiError) -> list[Event]:
        return [error.body(MESSAGES_PATH)]

    def _write_parts(self, parts: AnswerParts) -> list[Event]:
        events: list[Event] = []
        if parts.thoughts and self._shows_thoughts:
            events += self._write_text(
                {"type": "thinking", "thinking": "", "signature": ""}, parts.thoughts
            )
        if parts.text:
            events += self._write_text({"type": "text", "text": ""}, parts.text)
        for call in parts.calls:
            events += self._write_call(call)
        return events

    def _write_text(self, new_block: Event, text: str) -> list[Event]:
        """The events of a part of thoughts or text. It goes on in the open block if that has the
        type of `new_block`."""
        kind = new_block["type"]
        events: list[Event] = []
        if self._open_pieces is None or self._blocks[-1]["type"] != kind:
            events += self._open(new_block)
        events.append(self._add_piece({"type": f"{kind}_delta", kind: text}, text))
        return events

    def _write_call(self, call: Mapping[str, Any]) -> list[Event]:
        """The events of a part of a call."""
        events: list[Event] = []
        function = call["function"]
        if "id" in call:
            events += self._open(
                {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
            )
        arguments = function["arguments"]
        if arguments:
            delta = {"type": "input_json_delta", "partial_json": arguments}
            events.append(self._add_piece(delta, arguments))
        return events

    def _add_piece(self, delta: Event, text: str) -> Event:
        """The event of a piece of the open block."""
        assert self._open_pieces is not None
        self._open_pieces.append(text)
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _open(self, block: Event) -> list[Event]:
        """The events of the beginning of a block."""
        events = self._close()
        self._blocks.append(block)
        self._open_pieces = []
        index = len(self._blocks) - 1
        events.append({"type": "content_block_start", "index": index, "content_block": block})
        return events

    def _close(self) -> list[Event]:
        """The events of the end of the open block."""
        if self._open_pieces is None:
            return []
        text = "".join(self._open_pieces)
        self._open_pieces = None
        block = self._blocks[-1]
        kind = block["type"]
        if kind == "tool_use":
            self._blocks[-1] = {**block, "input": _input_of(text)}
        else:
            self._blocks[-1] = {**block, kind: text}
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]


def _usage(prompt: int, cached: int, completion: int) -> dict[str, int]:
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": completion,
    }


def _input_of(arguments: str) -> dict[str, Any]:
    """Arguments as an object. If they were cut off, it has the fields so far: Anthropic's clients
    read a stream in the same way."""
    try:
        value = from_json(arguments, allow_partial=True)
        json_bytes(value)  # It refuses numbers that JSON lacks.
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class MessageAnswers(NamedEvents):
    """The answer to a request of `/v1/messages`."""

    # Clients count the events of this API only, and give up on a stream without any.
    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(
        self,
        model: ServedModel,
        body: MessagesRequest,
        metrics: Metrics,
        prompt: list[int],
        form: AnswerForm,
    ) -> None:
        choice = MessageChoice(model, body, prompt, form)
        super().__init__(model, body.chat, metrics, [choice], form)
