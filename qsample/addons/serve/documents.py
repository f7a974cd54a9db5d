"""The answers of the endpoints, as /openapi.json describes them; `choices.py`, `responses.py` and
`messages.py` make them."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

_ID: Final = "The id of the answer."
_MODEL: Final = "The served name of the model."
_OBJECT: Final = "The kind of the object."
_FROM_THE_REQUEST: Final = "The value of the request, or the default."


class Document(BaseModel):
    """A JSON object that an endpoint answers with."""

    model_config = ConfigDict(extra="forbid")


class Completion(Document):
    """An answer in OpenAI's form."""

    id: str = Field(description=_ID)
    object: str = Field(description=_OBJECT)
    model: str = Field(description=_MODEL)
    created: int = Field(description="The time of the request, in seconds since 1970.")
    choices: list[dict[str, Any]] = Field(
        description=(
            'Objects with index, finish_reason ("stop", "length", "tool_calls" or "repetition"), '
            "stop_reason (the stop string or token), logprobs, and the text, or the message with role, "
            "content, reasoning and tool_calls."
        )
    )
    usage: dict[str, Any] = Field(
        description=(
            "The counts prompt_tokens, completion_tokens and total_tokens. "
            "`prompt_tokens_details.cached_tokens` is the number that a slot held already."
        )
    )
    prompt_token_ids: Any = Field(
        default=None, description="The token ids of a chat's prompt, if the request asks for them."
    )
    prompt_logprobs: Any = Field(
        default=None,
        description="The log-probabilities of a chat's prompt, if the request asks for them.",
    )


class Response(Document):
    """An answer in items."""

    id: str = Field(description=_ID)
    object: str = Field(description=_OBJECT)
    model: str = Field(description=_MODEL)
    status: str = Field(description='"completed", "incomplete", "in_progress" or "failed".')
    created_at: int = Field(description="The time of the request, in seconds since 1970.")
    completed_at: Any = Field(
        default=None, description="The time of the answer's end, in seconds since 1970."
    )
    error: Any = Field(default=None, description="The error of an answer that failed.")
    incomplete_details: Any = Field(
        default=None, description="The reason why an answer was cut off."
    )
    output: list[dict[str, Any]] = Field(
        description="Items of type reasoning, message and function_call."
    )
    usage: Any = Field(
        default=None,
        description="The counts input_tokens, output_tokens and total_tokens, with details.",
    )
    instructions: Any = Field(default=None, description=_FROM_THE_REQUEST)
    max_output_tokens: Any = Field(default=None, description=_FROM_THE_REQUEST)
    metadata: Any = Field(default=None, description=_FROM_THE_REQUEST)
    parallel_tool_calls: Any = Field(default=None, description=_FROM_THE_REQUEST)
    reasoning: Any = Field(default=None, description=_FROM_THE_REQUEST)
    temperature: Any = Field(default=None, description=_FROM_THE_REQUEST)
    text: Any = Field(default=None, description=_FROM_THE_REQUEST)
    tool_choice: Any = Field(default=None, description=_FROM_THE_REQUEST)
    tools: Any = Field(default=None, description=_FROM_THE_REQUEST)
    top_logprobs: Any = Field(default=None, description=_FROM_THE_REQUEST)
    top_p: Any = Field(default=None, description=_FROM_THE_REQUEST)
    user: Any = Field(default=None, description=_FROM_THE_REQUEST)
    background: Any = Field(default=None, description=_FROM_THE_REQUEST)
    max_tool_calls: Any = Field(default=None, description=_FROM_THE_REQUEST)
    previous_response_id: Any = Field(default=None, description=_FROM_THE_REQUEST)
    service_tier: Any = Field(default=None, description=_FROM_THE_REQUEST)
    store: Any = Field(default=None, description=_FROM_THE_REQUEST)
    truncation: Any = Field(default=None, description=_FROM_THE_REQUEST)


class Message(Document):
    """An answer in blocks."""

    id: str = Field(description=_ID)
    type: str = Field(description='"message".')
    role: str = Field(description='"assistant".')
    model: str = Field(description=_MODEL)
    content: list[dict[str, Any]] = Field(description="Blocks of type thinking, text and tool_use.")
    stop_reason: Any = Field(
        default=None,
        description=(
            '"end_turn", "max_tokens", "stop_sequence", "tool_use" or '
            '"model_context_window_exceeded".'
        ),
    )
    stop_sequence: Any = Field(default=None, description="The stop sequence that ended the answer.")
    usage: dict[str, int] = Field(
        description=(
            "The counts input_tokens, cache_read_input_tokens (which a slot held already) and "
            "output_tokens."
        )
    )


class TokenCount(Document):
    """The number of tokens of a conversation."""

    input_tokens: int = Field(description="The number of tokens of the conversation.")


class Model(Document):
    """A model, or an adapter."""

    id: str = Field(description="The served name.")
    object: str = Field(description=_OBJECT)
    owned_by: str = Field(description='"qsample".')
    created: int = Field(description="The time when it was loaded, in seconds since 1970.")
    max_model_len: int = Field(
        description="The largest number of tokens of a prompt and its answer together."
    )
    parent: Any = Field(default=None, description="The served name of an adapter's model.")
    capabilities: dict[str, bool] = Field(
        description=(
            "Whether there is a chat template (completion_chat), and whether the model reads "
            "images (vision)."
        )
    )


class Models(Document):
    """The models and adapters."""

    object: str = Field(description='"list".')
    data: list[Model] = Field(description="The models.")


class Tokens(Document):
    """The tokens of a text or a conversation."""

    count: int = Field(description="The number of tokens.")
    max_model_len: int = Field(
        description="The largest number of tokens of a prompt and its answer together."
    )
    tokens: list[int] = Field(description="The ids of the tokens.")
    token_strs: Any = Field(
        default=None, description="The texts of the tokens, if the request asks for them."
    )


class Text(Document):
    """The text of token ids."""

    prompt: str = Field(description="The text of the tokens.")


class Health(Document):
    """The state of the server."""

    status: str = Field(description='"ok" or "error".')
    ended: Any = Field(default=None, description="The names of models whose engines have ended.")


class Version(Document):
    """The version of the server."""

    version: str = Field(description="The version of qsample.")


class Error(Document):
    """An error in OpenAI's form."""

    error: dict[str, Any] = Field(
        description=(
            "An object with a message (the problem and its remedy), a type, the field (param), and "
            "a word for the error (code)."
        )
    )


class MessageError(Document):
    """An error in Anthropic's form."""

    type: str = Field(description='"error".')
    error: dict[str, str] = Field(
        description="An object with a message (the problem and its remedy) and a type."
    )
