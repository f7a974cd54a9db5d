"""The bodies of requests of conversations: messages, tools, and the calls that an answer has to make."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr, model_validator

from qsample.addons.serve.http import ApiError
from qsample.addons.serve.parsers import with_objects
from qsample.addons.serve.refusals import CHAT
from qsample.addons.serve.requests import Body, Count, GenerationRequest, Objects, TokenId
from qsample.request.grammar import Form
from qsample.text.chat import ChatOptions


class Function(Body):
    """A function that the model may call. name: of letters, digits, dots, _ and -. description: what it does.
    parameters: a JSON schema. strict: always so if the call is demanded."""

    name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(Body):
    """A function, the only kind of tool that models here can call. type: "function". function: its description."""

    type: Literal["function"] = "function"
    function: Function


class NamedFunction(Body):
    """A function by name. name: of the function."""

    name: StrictStr


class NamedTool(Body):
    """The tool that has to be called. type: "function". function: its name."""

    type: Literal["function"] = "function"
    function: NamedFunction


class ChatPrompt(Body):
    """A conversation and its chat template's options; `chat_template` and the fields after it are vLLM's.

    messages: each with role and content, and an assistant's with tool_calls. tools: functions that the model may call.
    chat_template: a template of the package by name, or if the server allows it, a Jinja template.
    chat_template_kwargs: further variables of the template. documents: to answer from, each with title and text.
    add_generation_prompt: whether to end with the opening of an answer; by default if no message is continued.
    continue_final_message: whether the answer continues the last message. reasoning_effort: for templates that know it.
    """

    messages: Objects = Field(min_length=1)
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    chat_template: StrictStr | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Objects | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool = False
    reasoning_effort: StrictStr | None = None

    @property
    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as templates take them: the arguments of calls are objects, in OpenAI's API texts."""
        return [
            with_objects(message) if "tool_calls" in message else message
            for message in self.messages
        ]

    def template_options(self, *, with_tools: bool = True) -> ChatOptions:
        kwargs = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", self.reasoning_effort)
        tools = (
            [tool.model_dump(exclude_none=True) for tool in self.tools or []] if with_tools else []
        )
        return ChatOptions(
            tools=tools or None,
            documents=self.documents,
            chat_template=self.chat_template,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=kwargs,
        )


class TextPart(Body):
    """A part of a predicted text. type: "text". text: of the part."""

    type: Literal["text"]
    text: StrictStr


class Prediction(Body):
    """The text that an answer is expected to have. type: "content". content: the text, in whole or in parts."""

    type: Literal["content"]
    content: StrictStr | Annotated[list[TextPart], Field(fail_fast=True)]

    @property
    def text(self) -> str:
        return (
            self.content
            if isinstance(self.content, str)
            else "".join(part.text for part in self.content)
        )


class ChatCompletionRequest(ChatPrompt, GenerationRequest):
    """`/v1/chat/completions`. max_completion_tokens: the new name of max_tokens. logprobs: whether to return
    log-probabilities. top_logprobs: number of the likeliest tokens in each place. tool_choice: "none", "auto" (if the
    request has tools), "required", or the function to call. parallel_tool_calls: whether an answer may have several
    calls. include_reasoning: whether to return the model's thoughts, if the server splits them off the answer (vLLM).
    modalities: only ["text"]. verbosity, prompt_cache_options: ignored. prediction: guesses of the answer's tokens, if
    the package checks any."""

    refusals = CHAT
    example = '{"messages": [{"role": "user", "content": "In the beginning"}], "max_tokens": 24}'
    top_field = "top_logprobs"

    max_completion_tokens: Count | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: StrictBool | None = None
    include_reasoning: StrictBool = True

    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    verbosity: StrictStr | None = None
    prediction: Prediction | None = None
    prompt_cache_options: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatCompletionRequest:
        return self.checked()

    def checked(self) -> ChatCompletionRequest:
        """The request; raises ValueError if its fields contradict each other."""
        names = [tool.function.name for tool in self.tools or []]
        if len(names) != len(set(names)):
            raise ValueError("tools has two functions with the same name")
        if self.demanded_function is not None and self.demanded_function not in names:
            raise ValueError(
                f"tool_choice names {self.demanded_function!r:.70}, which is not among tools"
            )
        if self.tool_choice == "required" and not names:
            raise ValueError('tool_choice is "required" and the request has no tools')
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @property
    def limit(self) -> int | None:
        """The most tokens of an answer, if the request limits them."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def offers_tools(self) -> bool:
        """Whether the model may call a tool."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def demanded_function(self) -> str | None:
        """The name of the function that has to be called, if the request names one."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    @property
    def demands_calls(self) -> bool:
        """Whether the answer has to be a call, or several."""
        return self.tool_choice == "required" or self.demanded_function is not None

    @property
    def tool_parameters(self) -> dict[str, Any]:
        """The JSON schema of each function's arguments, by name."""
        return {
            tool.function.name: {"type": "object", **(tool.function.parameters or {})}
            for tool in self.tools or []
        }

    def _given_form(self) -> Form | None:
        """Demanded calls have a form as well: a function's arguments, or a list of names and arguments."""
        form = super()._given_form()
        if not self.demands_calls:
            return form
        if form is not None:
            raise ApiError(
                400, "response_format and tool_choice both constrain the answer; give either"
            )
        if self.demanded_function is not None:
            return Form("json_schema", self.tool_parameters[self.demanded_function])
        return Form("call" if self.parallel_tool_calls is False else "calls", self.tool_parameters)


class TokenizeRequest(ChatPrompt):
    """`/tokenize`. model: a served name; by default the first. prompt: a text. messages: in place of a prompt, a
    conversation. add_special_tokens: whether the tokenizer adds its special tokens to the prompt. return_token_strs:
    whether to return the tokens' texts."""

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: Objects | None = None  # type: ignore[assignment]
    add_special_tokens: StrictBool = True
    return_token_strs: StrictBool = False


class DetokenizeRequest(Body):
    """`/detokenize`. model: a served name; by default the first. tokens: their ids."""

    model: StrictStr | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
