"""The bodies of requests: OpenAI's fields with vLLM's and llama.cpp's, checked, and as `SamplingParams` takes them."""

from __future__ import annotations

import json
import math
import re
import secrets
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from qsample.addons.serve.http import ApiError
from qsample.addons.serve.refusals import COMPLETIONS, STRUCTURED_OUTPUTS, Refusals
from qsample.contract.tensors import MOST_SPECULATIVE_TOKENS
from qsample.request.grammar import Form
from qsample.request.sampling_params import (
    DRAWN_SEEDS,
    FILTER_FIELDS,
    HELP,
    OFF,
    SEEDS,
    SMALLEST_TOP_P,
)

MOST_CHOICES: Final = 128  # OpenAI's limit for n
MOST_TOKENS: Final = 2**31 - 1
# Stop tokens, and biases: for each row, a step reads the number that the widest row has.
MOST_STOPS: Final = 1024
MOST_BIASES: Final = 1024
# OpenAI takes 4 stop strings, and vLLM any number; each character takes some hundred bytes while the request runs.
MOST_STOP_STRINGS: Final = 64
MOST_STOP_CHARACTERS: Final = 2048  # of all of them
MOST_PROMPTS: Final = 2**16  # of a request; few servers take that number at once
MOST_NAME: Final = (
    256  # characters of an adapter's name, a label of a metric, and of an id, which each event has
)
MOST_PATH: Final = 4096
MOST_FIELDS: Final = 256  # of an object; pydantic notes an error for each that is not known
# Fields that have the same name in `SamplingParams`.
_SAME_NAME: Final = (
    *(
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ),
    "prompt_lookup_num_tokens",
    *FILTER_FIELDS,
)
# Clients also write -1 for off, and a top_p of 0 for the likeliest token alone.
_LEAST: Final = {"top_k": 0, "top_n_sigma": 0, "top_p": SMALLEST_TOP_P}

Number = StrictFloat | StrictInt
TokenId = Annotated[StrictInt, Field(ge=0, le=MOST_TOKENS)]
Count = Annotated[StrictInt, Field(ge=1, le=MOST_TOKENS)]
# Lists end with their first error: noting each of a million takes seconds, and only the first is shown.
Texts = Annotated[list[StrictStr], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
# Beyond, a logit times or over the penalty is no number of float32.
Penalty = Annotated[Number, Field(ge=1e-6, le=1e6)]


def _describe(schema: dict[str, Any], kind: type[BaseModel]) -> None:
    """Put texts about the fields into a JSON schema: of the docstrings, "name, name: text", or of `SamplingParams`."""
    names = "|".join(sorted(schema.get("properties", ()), key=len, reverse=True))
    pattern, texts = re.compile(rf"(?<![\w`.])((?:{names})(?:, (?:{names}))*): "), dict(HELP)
    for base in reversed(kind.__mro__[: kind.__mro__.index(Body)]):
        schema["description"], *parts = pattern.split(" ".join((base.__doc__ or "").split()))
        for listed, text in zip(parts[::2], parts[1::2], strict=True):
            texts |= dict.fromkeys(listed.split(", "), f"{text[0].upper()}{text[1:]}".strip())
    if (example := getattr(kind, "example", None)) is not None:
        schema["examples"] = [json.loads(example)]
    for name, entry in schema.get("properties", {}).items():
        if name in texts:
            entry["description"] = texts[name]


class Body(BaseModel):
    """A JSON object without unknown fields, NaN and infinities. A null field counts as left out, even an unknown field:
    clients write out fields that they do not use. Docstrings describe the fields, as `name: text`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, json_schema_extra=_describe)
    refusals: ClassVar[Refusals] = {}
    example: ClassVar[str | None] = None  # JSON to try, in /docs

    @model_validator(mode="before")
    @classmethod
    def _without_nulls_and_refusals(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if len(value) > MOST_FIELDS:
            raise ValueError(f"an object has {len(value)} fields; give at most {MOST_FIELDS}")
        given = {name: content for name, content in value.items() if content is not None}
        for name in [name for name in given if name in cls.refusals]:
            if cls.refusals[name].applies_to(given.pop(name)):
                raise PydanticCustomError(
                    "unsupported_parameter",
                    "not done here; {instead}",
                    {"name": name, "instead": cls.refusals[name].instead},
                )
        return given


class StreamOptions(Body):
    """include_usage: end with an event that counts the tokens. continuous_usage_stats: counts in every event (vLLM).
    include_obfuscation: OpenAI's; ignored."""

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False
    include_obfuscation: StrictBool = False


class JsonSchema(Body):
    """A JSON schema. name, description: ignored. schema: followed, even if `strict` is false. strict: ignored."""

    name: StrictStr | None = None
    description: StrictStr | None = None
    schema_: dict[str, Any] | StrictBool = Field(default_factory=dict, alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(Body):
    """The form of an answer. type: any text, a JSON object, or JSON that follows a schema. json_schema: the schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("it is of type json_schema and has no schema; give json_schema")
        return self


class StructuredOutputs(Body):
    """The form of an answer in vLLM's words, a single field. json: a schema, or its text. regex: a regular expression
    for the whole answer. choice: texts, of which the answer is one. grammar: Lark's or GBNF. json_object: any JSON
    object."""

    refusals = STRUCTURED_OUTPUTS

    json_: dict[str, Any] | StrictStr | None = Field(None, alias="json")
    regex: StrictStr | None = None
    choice: Texts | None = Field(None, min_length=1)
    grammar: StrictStr | None = None
    json_object: StrictBool | None = None


# The filters' parameters, under the names of `SamplingParams`; that checks the values: vLLM's, llama.cpp's and
# transformers' names.
_Items = Annotated[list[Any], Field(max_length=MOST_STOPS)]
if TYPE_CHECKING:
    FilterFields = Body
else:
    FilterFields = create_model(
        "FilterFields",
        __base__=Body,
        **{
            name: ((_Items if OFF[name] is None else Number) | None, None) for name in FILTER_FIELDS
        },
    )


class GenerationRequest(FilterFields):
    """The fields of completions and chats. Names, ranges and defaults are OpenAI's, from `top_k` on vLLM's.

    model: a served name; by default the first. n: number of answers to each prompt. seed: of the first answer; the same
    seed gives the same tokens. stop: texts that end an answer. logit_bias: token id → a number from -100 to 100 that is
    added to its logit. max_tokens: most tokens of an answer. stream: events as tokens come. stream_options: which token
    counts they have. response_format: the form of the answer. min_tokens: no stop token before this many.
    repetition_penalty: on prompt and sampled tokens; 1 is off. llama.cpp's repeat_penalty is the same.
    penalty_last_n: newest tokens, prompt included, that the penalties count; -1 is off. The same as repeat_last_n.
    prompt_lookup_num_tokens: most tokens to guess in a step; 0 turns the server's guesses off. stop_token_ids: token
    ids that end an answer, in addition to the model's. ignore_eos: whether the model's own do not end it.
    structured_outputs: the form of the answer, in vLLM's words. guided_json, guided_regex, guided_choice,
    guided_grammar: the same, in vLLM's former words. return_token_ids: whether to return the ids of prompt and answer.
    prompt_logprobs: return log-probabilities of the prompt, with this many of the likeliest tokens in each place.
    priority: requests with the lowest get a slot first. request_id: a part of the answer's id. best_of: only as n.
    user, store, metadata, service_tier, safety_identifier, prompt_cache_key, prompt_cache_retention: ignored.
    """

    default_limit: ClassVar[int | None] = (
        None  # tokens of an answer; None: all that fit into the context
    )
    top_field: ClassVar[str]  # the field of `top`

    model: StrictStr | None = None
    temperature: Annotated[Number, Field(ge=0)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MOST_CHOICES)] | None = None
    seed: StrictInt | None = None
    stop: StrictStr | Texts | None = None
    logit_bias: dict[str, Number] | None = None
    max_tokens: Count | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    top_k: Annotated[StrictInt, Field(ge=-1, le=MOST_TOKENS)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Penalty | None = Field(
        None, validation_alias=AliasChoices("repetition_penalty", "repeat_penalty")
    )
    penalty_last_n: Number | None = Field(
        None, validation_alias=AliasChoices("penalty_last_n", "repeat_last_n")
    )
    prompt_lookup_num_tokens: (
        Annotated[StrictInt, Field(ge=0, le=MOST_SPECULATIVE_TOKENS)] | None
    ) = None
    min_tokens: Annotated[StrictInt, Field(ge=0, le=MOST_TOKENS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = Field(
        None, max_length=MOST_STOPS
    )
    ignore_eos: StrictBool = False
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | StrictStr | None = None
    guided_regex: StrictStr | None = None
    guided_choice: Texts | None = Field(None, min_length=1)
    guided_grammar: StrictStr | None = None
    return_token_ids: StrictBool = False
    prompt_logprobs: Annotated[StrictInt, Field(ge=0)] | None = None
    priority: StrictInt = 0
    request_id: StrictStr | None = Field(None, max_length=MOST_NAME)
    best_of: StrictInt | None = None

    user: StrictStr | None = None
    store: StrictBool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: StrictStr | None = None
    safety_identifier: StrictStr | None = None
    prompt_cache_key: StrictStr | None = None
    prompt_cache_retention: StrictStr | None = None

    @field_validator("stop", "stop_sequences", check_fields=False)
    @classmethod
    def _check_stop(cls, stop: str | list[str] | None) -> str | list[str] | None:
        strings = [stop] if isinstance(stop, str) else stop or []
        characters = sum(map(len, strings))
        if len(strings) > MOST_STOP_STRINGS or characters > MOST_STOP_CHARACTERS:
            raise ValueError(
                f"it has {len(strings)} strings of {characters} characters in all; give at most {MOST_STOP_STRINGS} of "
                f"{MOST_STOP_CHARACTERS}"
            )
        return stop

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _count_biases(cls, bias: Any) -> Any:
        if isinstance(bias, dict) and len(bias) > MOST_BIASES:
            raise ValueError(f"it has {len(bias)} tokens; give at most {MOST_BIASES}")
        return bias

    @field_validator("prompt_logprobs", "logprobs", mode="before", check_fields=False)
    @classmethod
    def _false_is_none(cls, value: Any) -> Any:  # as in a chat completion
        return None if value is False else value

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for token, amount in (bias or {}).items():
            if not (token.isascii() and token.isdigit()) or len(token) > 10:
                raise ValueError(f"the key {token!r:.40} is not a token id")
            if not -100 <= amount <= 100 or not math.isfinite(amount):
                raise ValueError(f"the bias of token {token} is {amount}; give -100 to 100")
        return bias

    @model_validator(mode="after")
    def _check_together(self) -> GenerationRequest:
        if (
            not self.stream
            and self.stream_options is not None
            and any(self.stream_options.model_dump().values())
        ):
            raise ValueError("stream_options is for streams; leave it out, or give stream: true")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError(
                "prompt_logprobs come with a whole answer; leave out stream, or give echo and logprobs"
            )
        if self.best_of is not None and self.best_of != self.choices:
            raise ValueError("best_of is not done here; give n alone")
        return self

    @property
    def top(self) -> int | None:
        """The number of alternatives to each token in an answer; None for no log-probabilities."""
        raise NotImplementedError

    @property
    def choices(self) -> int:
        """The number of answers to each prompt."""
        return self.n or 1

    @property
    def limit(self) -> int | None:
        """The most tokens of an answer, if the request limits them."""
        return self.max_tokens

    @property
    def requests(self) -> int:
        """The number of engine requests that each prompt makes."""
        return (0 if self.limit == 0 else self.choices) + self.scores_prompt

    @property
    def scores_prompt(self) -> bool:
        """Whether the answer needs the log-probabilities of its prompt."""
        return self.prompt_logprobs is not None

    @property
    def usage_in_stream(self) -> tuple[bool, bool]:
        """Whether a last event counts the tokens, and whether every event does."""
        options = self.stream_options or StreamOptions()
        return options.include_usage, options.include_usage and options.continuous_usage_stats

    def sampling_fields(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that the request sets, except for stop tokens and seeds."""
        fields = {name: value for name in _SAME_NAME if (value := getattr(self, name)) is not None}
        fields |= {
            name: max(fields[name], least) for name, least in _LEAST.items() if name in fields
        }
        if self.limit:
            fields["max_new_tokens"] = self.limit
        if self.min_tokens:
            fields["min_new_tokens"] = self.min_tokens
        biases = {
            int(token): float(amount) for token, amount in (self.logit_bias or {}).items() if amount
        }
        return fields | ({"logit_bias": biases} if biases else {})  # which not every package takes

    def seeds(self) -> list[int]:
        """A seed for each answer to a prompt: `seed` and its successors, negative seeds counted from the end."""
        first = secrets.randbelow(DRAWN_SEEDS) if self.seed is None else self.seed
        return [(first + index) % SEEDS for index in range(self.choices)]

    @cached_property
    def form(self) -> Form | None:
        """The form that every answer has to follow; None for any text. Raises ApiError if the request has several, or
        if it asks for tokens after the end of the form."""
        form = self._given_form()
        for name in ("ignore_eos", "min_tokens"):
            if form is not None and getattr(self, name):
                text = f"{name} asks for tokens after the end of an answer that follows a schema, a choice or a grammar"
                raise ApiError(400, f"{text}; leave {name} out", param=name)
        return form

    def _given_form(self) -> Form | None:
        wanted, given = (
            self.response_format,
            self.structured_outputs or StructuredOutputs.model_validate({}),
        )
        forms = [
            Form(
                "json_schema", wanted.json_schema.schema_ if wanted and wanted.json_schema else None
            ),
            Form("json_schema", self.guided_json),
            Form("json_schema", given.json_),
            Form("regex", self.guided_regex),
            Form("regex", given.regex),
            Form("choice", self.guided_choice),
            Form("choice", given.choice),
            Form("grammar", self.guided_grammar),
            Form("grammar", given.grammar),
        ]
        forms = [form for form in forms if form.value is not None]
        if given.json_object or (wanted and wanted.type == "json_object"):
            forms.append(Form("json_schema", {"type": "object"}))
        if len(forms) > 1:
            raise ApiError(
                400,
                "the answer is constrained by several fields; give one schema, grammar or choice",
            )
        return forms[0] if forms else None


def _check_prompt(value: Any) -> Any:
    """A text or token ids, or several of either. By hand: pydantic takes seconds to try a union on a million ids."""
    if isinstance(value, list) and len(value) > MOST_PROMPTS and not isinstance(value[0], int):
        raise ValueError(f"it has {len(value)} prompts; give at most {MOST_PROMPTS} in a request")
    if (
        isinstance(value, str)
        or _are_ids(value)
        or (isinstance(value, list) and all(map(_are_ids, value)))
    ):
        return value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    raise ValueError(
        f"give a text, a list of token ids from 0 to {MOST_TOKENS}, or a list of either"
    )


def _are_ids(value: Any) -> bool:
    if not isinstance(value, list) or {*map(type, value)} - {int}:
        return False
    return not value or (min(value) >= 0 and max(value) <= MOST_TOKENS)


Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]],
    PlainValidator(
        _check_prompt, json_schema_input_type=str | list[str] | list[int] | list[list[int]]
    ),
]


class LoadLoraRequest(Body):
    """`/v1/load_lora_adapter`, with vLLM's fields. lora_name: for requests. lora_path: a folder below the server's
    `lora_dir`. load_inplace: replace a loaded adapter of that name. base_model_name: the model that it changes, by
    default the first."""

    lora_name: StrictStr = Field(
        min_length=1, max_length=MOST_NAME, pattern=r"^[^\x00-\x1f\x7f,]+$"
    )
    lora_path: StrictStr = Field(min_length=1, max_length=MOST_PATH)
    load_inplace: StrictBool = False
    base_model_name: StrictStr | None = None


class UnloadLoraRequest(Body):
    """`/v1/unload_lora_adapter`, with vLLM's fields. lora_name: of the adapter. lora_int_id: ignored, as there."""

    lora_name: StrictStr = Field(min_length=1)
    lora_int_id: StrictInt | None = None


class CompletionRequest(GenerationRequest):
    """`/v1/completions`. prompt: a text or token ids, or several of either; "" begins a text. logprobs: return
    log-probabilities, with this many of the likeliest tokens in each place. echo: the prompt before its continuation,
    with its log-probabilities if the request asks for `logprobs`. max_tokens: most tokens of an answer, by default 16;
    0 writes nothing. suffix: only "". add_special_tokens: whether the tokenizer adds its special tokens to a text."""

    refusals = COMPLETIONS
    example = '{"prompt": "In the beginning", "max_tokens": 24}'
    default_limit = 16  # OpenAI's
    top_field = "logprobs"

    prompt: Prompt = ""
    max_tokens: Annotated[StrictInt, Field(ge=0, le=MOST_TOKENS)] | None = None
    logprobs: Annotated[StrictInt, Field(ge=0)] | None = None
    echo: StrictBool = False
    suffix: StrictStr | None = None
    add_special_tokens: StrictBool = True

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.suffix:
            raise ValueError(
                "suffix is not done here: the model writes the continuation of a prompt"
            )
        if self.max_tokens == 0 and self.min_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens} and max_tokens 0; leave out either")
        return self

    @property
    def top(self) -> int | None:
        return self.logprobs

    @property
    def scores_prompt(self) -> bool:
        return (self.echo and self.logprobs is not None) or self.prompt_logprobs is not None

    @property
    def prompts(self) -> list[str | list[int]]:
        prompt: Any = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        if not prompt:
            raise ValueError(
                "prompt is an empty list; give a text, token ids, or several of either"
            )
        return list(prompt)
