"""`/v1/chat/completions`."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr, model_validator

from qsample.serve.protocol.common import Body, Count, GenerationRequest
from qsample.serve.protocol.unsupported import CHAT


class Function(Body):
    """A function that the model may call. parameters: a JSON schema of its arguments. strict: followed where the call
    is demanded."""

    name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(Body):
    """A function, the only kind of tool that models here can call."""

    type: Literal["function"] = "function"
    function: Function


class NamedFunction(Body):
    """A function by name."""

    name: StrictStr


class NamedTool(Body):
    """The tool that has to be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


class ChatPrompt(Body):
    """What makes a prompt of a conversation; `chat_template` and what follows are vLLM's."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[Tool] | None = None
    chat_template: StrictStr | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool = False
    reasoning_effort: StrictStr | None = None

    @property
    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as templates take them: the arguments of calls as objects, which OpenAI's API has as texts."""
        return [_with_objects(message) for message in self.messages]

    def template_options(self, *, with_tools: bool = True) -> dict[str, Any]:
        """The fields as `ChatOptions` takes them."""
        kwargs = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", self.reasoning_effort)
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or []] if with_tools else []
        options = {
            "tools": tools or None,
            "documents": self.documents,
            "chat_template": self.chat_template,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message or None,
            "chat_template_kwargs": kwargs or None,
        }
        return {name: value for name, value in options.items() if value is not None}


class ChatCompletionRequest(ChatPrompt, GenerationRequest):
    """max_completion_tokens, or max_tokens by its old name: as many as the context has room for where neither is given.

    tool_choice: "none", "auto" (where there are tools), "required", or the function to call. include_reasoning: hand on
    what the model thinks before it answers, where the server splits that off (vLLM).
    """

    unsupported = CHAT

    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: StrictBool | None = None
    include_reasoning: StrictBool = True

    modalities: list[Literal["text"]] | None = None
    verbosity: StrictStr | None = None
    prediction: dict[str, Any] | None = None
    prompt_cache_options: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_tools(self) -> ChatCompletionRequest:
        names = [tool.function.name for tool in self.tools or []]
        if len(names) != len(set(names)):
            raise ValueError("tools has two functions of one name")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice names {self.tool_choice.function.name!r:.70}, which is not among tools")
        if self.tool_choice == "required" and not names:
            raise ValueError('tool_choice is "required" and there are no tools')
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @property
    def limit(self) -> int | None:
        """The most tokens of an answer."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def offers_tools(self) -> bool:
        """Whether the model may call any."""
        return bool(self.tools) and self.tool_choice != "none"


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """A message with the arguments of its calls as objects; what is no text of one stays as it is."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    changed = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(text := function.get("arguments"), str):
            try:
                value = json.loads(text or "{}")
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, dict):
                call = {**call, "function": {**function, "arguments": value}}
        changed.append(call)
    return {**message, "tool_calls": changed}
