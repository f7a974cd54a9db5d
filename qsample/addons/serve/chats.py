"""The bodies of conversations: messages, tools, and the calls that an answer has to make."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AliasChoices, Field, StrictBool, StrictInt, StrictStr, model_validator

from qsample.addons.serve.http import ApiError
from qsample.addons.serve.refusals import CHAT
from qsample.addons.serve.requests import (
    IGNORED_DESCRIPTION,
    MAX_TOKENS,
    SERVED_NAME_DESCRIPTION,
    Body,
    Count,
    GenerationRequest,
    Objects,
    TokenId,
    config_with_example,
)
from qsample.request.grammar import Form
from qsample.request.text.chat import ChatOptions
from qsample.request.text.conversation import with_objects

# Descriptions that fields of several APIs share.
TOOLS_DESCRIPTION: Final = "Functions that the model may call."
TEMPLATE_DESCRIPTION: Final = (
    "The name of a template of the package, or a Jinja template if the server allows it."
)
TEMPLATE_KWARGS_DESCRIPTION: Final = "Further variables of the template."
PARALLEL_CALLS_DESCRIPTION: Final = "Whether an answer may have several calls."
TOP_LOGPROBS_DESCRIPTION: Final = (
    "The number of the likeliest tokens in each place to return with their log-probabilities."
)


NAME_PATTERN: Final = r"^[A-Za-z0-9_.-]{1,64}$"


class Function(Body):
    """A function that the model may call."""

    name: Annotated[StrictStr, Field(pattern=NAME_PATTERN)] = Field(
        description="A name of letters, digits, dots, _ and -."
    )
    description: StrictStr | None = Field(default=None, description="What the function does.")
    parameters: dict[str, Any] | None = Field(
        default=None, description="The JSON schema of the function's arguments."
    )
    strict: StrictBool | None = Field(
        default=None, description="Ignored. A call that is demanded always follows the schema."
    )


class Tool(Body):
    """A function, the only kind of tool that models here can call."""

    type: Literal["function"] = Field(default="function", description='"function".')
    function: Function = Field(description="The function.")


class NamedFunction(Body):
    """A function by name."""

    name: StrictStr = Field(description="The name of the function.")


class NamedTool(Body):
    """The tool that has to be called."""

    type: Literal["function"] = Field(default="function", description='"function".')
    function: NamedFunction = Field(description="The function's name.")


class ChatPrompt(Body):
    """A conversation and the options of its chat template. `chat_template` and the fields after it
    are vLLM's."""

    messages: Objects = Field(
        min_length=1,
        description="Objects with role and content, and an assistant's with tool_calls.",
    )
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = Field(
        default=None, description=TOOLS_DESCRIPTION
    )
    chat_template: StrictStr | None = Field(default=None, description=TEMPLATE_DESCRIPTION)
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description=TEMPLATE_KWARGS_DESCRIPTION
    )
    documents: Objects | None = Field(
        default=None, description="Documents to answer from, each with title and text."
    )
    add_generation_prompt: StrictBool | None = Field(
        default=None,
        description=(
            "Whether the prompt ends with the opening of an answer, by default if no message is "
            "continued."
        ),
    )
    continue_final_message: StrictBool = Field(
        default=False, description="Whether the answer continues the last message."
    )
    reasoning_effort: StrictStr | None = Field(
        default=None, description="The effort, for chat templates that read it."
    )

    @property
    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as templates take them: the arguments of calls are objects, and a content
        without parts is a text. In OpenAI's API, arguments are texts, and the content of a tool's
        message is a text or parts."""
        messages = [with_objects(message) for message in self.messages]
        for message in messages:
            if message.get("content") == []:
                message["content"] = ""
        return messages

    def template_options(self, *, with_tools: bool = True) -> ChatOptions:
        """The options of the chat template. with_tools: whether it describes the tools."""
        kwargs = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", self.reasoning_effort)
        tools = None
        if with_tools and self.tools:
            tools = [tool.model_dump(exclude_none=True) for tool in self.tools]
        return ChatOptions(
            tools=tools,
            documents=self.documents,
            chat_template=self.chat_template,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=kwargs,
        )


class TextPart(Body):
    """A part of a predicted text."""

    type: Literal["text"] = Field(description='"text".')
    text: StrictStr = Field(description="The text of the part.")


class Prediction(Body):
    """The text that an answer is expected to have."""

    type: Literal["content"] = Field(description='"content".')
    content: StrictStr | Annotated[list[TextPart], Field(fail_fast=True)] = Field(
        description="The text, in whole or in parts."
    )

    @property
    def text(self) -> str:
        """The whole text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


# The limit of thoughts, in vLLM's and llama.cpp's words.
ThinkingBudget = Annotated[
    Annotated[StrictInt, Field(ge=-1, le=MAX_TOKENS)] | None,
    Field(
        validation_alias=AliasChoices("thinking_token_budget", "thinking_budget_tokens"),
        description=(
            "The largest number of tokens of the thoughts; -1 is no limit. The server's default is "
            "--reasoning-budget. llama.cpp's name is thinking_budget_tokens."
        ),
    ),
]


class ChatCompletionRequest(ChatPrompt, GenerationRequest):
    """`/v1/chat/completions`."""

    model_config = config_with_example(
        messages=[{"role": "user", "content": "In the beginning"}], max_tokens=24
    )
    refusals = CHAT
    alternatives_field = "top_logprobs"

    max_completion_tokens: Count | None = Field(
        default=None,
        description="The largest number of tokens of an answer, the new name of max_tokens.",
    )
    logprobs: StrictBool | None = Field(
        default=None, description="Whether to return log-probabilities."
    )
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = Field(
        default=None, description=TOP_LOGPROBS_DESCRIPTION
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        default=None,
        description='"none", "auto" (if the request has tools), "required", or the tool to call.',
    )
    parallel_tool_calls: StrictBool | None = Field(
        default=None, description=PARALLEL_CALLS_DESCRIPTION
    )
    include_reasoning: StrictBool = Field(
        default=True,
        description=(
            "Whether to return the model's thoughts, if the server splits them off the answer "
            "(vLLM)."
        ),
    )
    thinking_token_budget: ThinkingBudget = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = Field(
        default=None, description='Only ["text"].'
    )
    verbosity: StrictStr | None = Field(default=None, description=IGNORED_DESCRIPTION)
    prediction: Prediction | None = Field(
        default=None, description="A guess of the answer, if the package checks guesses."
    )
    prompt_cache_options: dict[str, Any] | None = Field(
        default=None, description=IGNORED_DESCRIPTION
    )

    @model_validator(mode="after")
    def _check_chat(self) -> ChatCompletionRequest:
        return self.checked()

    def checked(self) -> ChatCompletionRequest:
        """The request. Raises ValueError if its fields contradict each other."""
        names = [tool.function.name for tool in self.tools or []]
        if len(names) != len(set(names)):
            raise ValueError("tools has two functions with the same name")
        if self.demanded_function is not None and self.demanded_function not in names:
            raise ValueError(
                f"tool_choice names {self.demanded_function!r:.70}, which is not among tools"
            )
        if self.tool_choice == "required" and not names:
            raise ValueError('tool_choice is "required" and the request has no tools')
        if self.top_logprobs not in (None, 0) and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @property
    def token_limit(self) -> int | None:
        """The largest number of tokens of an answer, if the request limits it."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def token_limit_field(self) -> str:
        return "max_completion_tokens" if self.max_completion_tokens is not None else "max_tokens"

    @property
    def num_alternatives(self) -> int | None:
        if not self.logprobs:
            return None
        return self.top_logprobs or 0

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
        """Demanded calls have a form also: the arguments of a function, or a list of names and
        arguments."""
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
    """`/tokenize`."""

    model: StrictStr | None = Field(default=None, description=SERVED_NAME_DESCRIPTION)
    prompt: StrictStr | None = Field(default=None, description="A text.")
    messages: Objects | None = Field(  # type: ignore[assignment]
        default=None, description="A conversation, in place of a prompt."
    )
    add_special_tokens: StrictBool = Field(
        default=True, description="Whether the tokenizer adds its special tokens to the prompt."
    )
    return_token_strs: StrictBool = Field(
        default=False, description="Whether to return the tokens' texts."
    )


class DetokenizeRequest(Body):
    """`/detokenize`."""

    model: StrictStr | None = Field(default=None, description=SERVED_NAME_DESCRIPTION)
    tokens: Annotated[list[TokenId], Field(fail_fast=True)] = Field(
        description="The ids of the tokens."
    )
