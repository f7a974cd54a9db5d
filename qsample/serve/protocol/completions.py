"""`/v1/completions`, and tokens for texts and back."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator, StrictBool, StrictInt, StrictStr, field_validator, model_validator

from qsample.serve.protocol.chat import ChatPrompt
from qsample.serve.protocol.common import MOST_TOKENS, Body, Count, GenerationRequest, TokenId
from qsample.serve.protocol.unsupported import COMPLETIONS


def _check_prompt(value: Any) -> Any:
    """Texts or token ids, one or several. By hand: pydantic tries the types of a union in turn, on a million ids for
    seconds."""
    if isinstance(value, str) or _are_ids(value) or (isinstance(value, list) and all(map(_are_ids, value))):
        return value
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return value
    raise ValueError(f"give a text, a list of token ids from 0 to {MOST_TOKENS}, or a list of either")


def _are_ids(value: Any) -> bool:
    if not isinstance(value, list) or {*map(type, value)} - {int}:
        return False
    return not value or (min(value) >= 0 and max(value) <= MOST_TOKENS)


Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]],
    PlainValidator(_check_prompt, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]


class CompletionRequest(GenerationRequest):
    """prompt: texts or token ids, one or several; "" begins a text. max_tokens: 16 where nothing is said, as OpenAI has
    it. logprobs: also that many of the likeliest tokens. echo: the prompt before its continuation."""

    unsupported = COMPLETIONS

    prompt: Prompt = ""
    max_tokens: Count | None = None
    logprobs: Annotated[StrictInt, Field(ge=0)] | None = None
    echo: StrictBool = False
    suffix: StrictStr | None = None
    add_special_tokens: StrictBool = True

    @field_validator("logprobs", mode="before")
    @classmethod
    def _none(cls, value: Any) -> Any:
        """A chat completion's word for none."""
        return None if value is False else value

    @model_validator(mode="after")
    def _check_more(self) -> CompletionRequest:
        if self.suffix:
            raise ValueError("suffix is not done here: the model writes what follows a prompt")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs needs those of the prompt, which are not computed; leave one out")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, one or several."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        if not prompt:
            raise ValueError("prompt is an empty list; give a text, token ids, or several of either")
        return list(prompt)


class TokenizeRequest(ChatPrompt):
    """Either prompt, a text, or messages, as of a chat completion."""

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: list[dict[str, Any]] | None = None  # type: ignore[assignment]
    add_special_tokens: StrictBool = True
    return_token_strs: StrictBool = False


class DetokenizeRequest(Body):
    """tokens: ids."""

    model: StrictStr | None = None
    tokens: list[TokenId]
