"""The bodies of requests: OpenAI's fields with vLLM's and llama.cpp's, checked, and as
`SamplingParams` takes them.

Clients read the descriptions of the fields in /openapi.json and /docs.
"""

from __future__ import annotations

import difflib
import math
import secrets
import uuid
from collections.abc import Mapping
from functools import cache, cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import (
    AliasChoices,
    ConfigDict,
    Field,
    PlainValidator,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from qsample.addons.serve.http import ApiError, JsonBody
from qsample.addons.serve.refusals import COMPLETIONS, STRUCTURED_OUTPUTS, Refusals
from qsample.contract.tensors import MOST_SPECULATIVE_TOKENS
from qsample.request.grammar import Form
from qsample.request.repetition import RepetitionDetection, read_repetition_detection
from qsample.request.sampling_params import (
    FILTER_FIELDS,
    HELP,
    MIN_TOP_P,
    NUM_DRAWN_SEEDS,
    NUM_SEEDS,
    OFF_VALUES,
)
from qsample.runtime.call import MOST_SCORED_IDS

MAX_CHOICES: Final = 128  # OpenAI's limit of n.
MAX_TOKENS: Final = 2**31 - 1
# Each step reads, for every row of the batch, as many stop tokens and biases as the widest row has.
MAX_STOP_TOKENS: Final = 1024
MAX_BIASES: Final = 1024
# OpenAI takes 4 stop strings, and vLLM any number. Each character takes a few hundred bytes while
# the request runs.
MAX_STOP_STRINGS: Final = 64
# The limit of a request's stop strings together.
MAX_STOP_CHARACTERS: Final = 2048
# Few servers take this number of prompts at once.
MAX_PROMPTS: Final = 2**16
# The limit of an adapter's name, which is a label of metrics, and of a request's id, which every
# event has.
MAX_NAME_CHARACTERS: Final = 256
MAX_PATH_CHARACTERS: Final = 4096
# pydantic records an error for each unknown field of an object.
MAX_FIELDS_OF_AN_OBJECT: Final = 256
# The limit of the different unknown fields of a request.
MAX_IGNORED_NAMES: Final = 64
# The similarity from which an unknown name is a misspelled name: temprature and temperature have
# 0.95, max_token and max_tokens 0.95, client_metadata and metadata 0.70.
_LEAST_SIMILARITY: Final = 0.8
_FIELDS_WITH_THE_SAME_NAME: Final = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "prompt_lookup_num_tokens",
    *FILTER_FIELDS,
)
# Clients also write -1 for a filter that is off, and a top_p of 0 for the likeliest token only.
_SMALLEST_VALUES: Final = {"top_k": 0, "top_n_sigma": 0, "top_p": MIN_TOP_P}
IGNORED_DESCRIPTION: Final = "Ignored."
_FORMER_NAME_DESCRIPTION: Final = (
    "The same as a field of structured_outputs, under vLLM's former name."
)
SERVED_NAME_DESCRIPTION: Final = "A served name. By default, the first model is used."

Number = StrictFloat | StrictInt
TokenId = Annotated[StrictInt, Field(ge=0, le=MAX_TOKENS)]
Count = Annotated[StrictInt, Field(ge=1, le=MAX_TOKENS)]
# Validation of a list ends with its first error: recording each of a million errors takes seconds,
# and the answer shows only the first.
# A field of any value that changes no answer here.
Ignored = Annotated[Any, Field(description=IGNORED_DESCRIPTION)]
Texts = Annotated[list[StrictStr], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
# Outside of this range, a logit times or divided by the penalty may overflow float32.
Penalty = Annotated[Number, Field(ge=1e-6, le=1e6)]


class Body(JsonBody):
    """A JSON object without NaN and infinities.

    Fields that are unknown here are ignored, because clients send more of them with each release.
    An unknown field whose name is nearly that of a known field is a mistake, and an error.
    """

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)
    refusals: ClassVar[Refusals] = {}
    # Whether any field changes the answer, so that unknown fields are errors.
    is_strict: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _without_nulls_and_refusals(cls, value: Any, info: ValidationInfo) -> Any:
        """A field that is null counts as left out, even if it is unknown: clients write out fields
        that they do not use."""
        if not isinstance(value, dict):
            return value
        if len(value) > MAX_FIELDS_OF_AN_OBJECT:
            raise ValueError(
                f"an object has {len(value)} fields; give at most {MAX_FIELDS_OF_AN_OBJECT}"
            )
        known = cls._fields_by_name()
        names_of_fields: dict[str, str] = {}
        given: dict[str, Any] = {}
        for name, content in value.items():
            if content is None:
                continue
            refusal = cls.refusals.get(name)
            if refusal is not None:
                if refusal.applies_to(content):
                    raise _field_error(
                        "unsupported_parameter", name, f"not done here; {refusal.instead}"
                    )
                continue
            if name not in known:
                cls._ignore(name, info)
                continue
            other = names_of_fields.setdefault(known[name], name)
            if other != name:
                raise _field_error("duplicate_parameter", name, f"the same as {other}; give either")
            given[name] = content
        return given

    @classmethod
    @cache
    def _fields_by_name(cls) -> Mapping[str, str]:
        """The field of each name that JSON may have."""
        fields: dict[str, str] = {}
        for field, info in cls.model_fields.items():
            alias = info.validation_alias
            names = (
                alias.choices
                if isinstance(alias, AliasChoices)
                else [field if info.alias is None else info.alias]
            )
            fields.update((str(name), field) for name in names)
        return fields

    @classmethod
    def _ignore(cls, name: str, info: ValidationInfo) -> None:
        """Note that an unknown field is ignored."""
        ignored = set() if info.context is None else info.context
        if name in ignored and not cls.is_strict:
            return
        known = [*cls._fields_by_name(), *cls.refusals]
        close = difflib.get_close_matches(name, known, 1, _LEAST_SIMILARITY)
        if close:
            remedy = f"did you mean {close[0]!r}?"
            raise _field_error("unknown_parameter", name, f"not known here; {remedy}")
        if cls.is_strict:
            raise _field_error("unknown_parameter", name, "not known here; leave it out")
        # Comparing names takes time.
        if len(ignored) >= MAX_IGNORED_NAMES:
            raise ValueError(
                f"a request has more than {MAX_IGNORED_NAMES} fields that are not known here; "
                "give those of /docs"
            )
        ignored.add(name)


def _field_error(code: str, name: str, problem: str) -> PydanticCustomError:
    """An error of a field by name, see `http._of_validation`."""
    return PydanticCustomError(code, "{problem}", {"name": name, "problem": problem})


def config_with_example(**fields: Any) -> ConfigDict:
    """The configuration of a body with an example that can be tried in /docs."""
    return ConfigDict(json_schema_extra={"examples": [fields]})


class StreamOptions(Body):
    """The token counts of a stream."""

    include_usage: StrictBool = Field(
        default=False, description="Whether the stream ends with an event that counts the tokens."
    )
    continuous_usage_stats: StrictBool = Field(
        default=False, description="Whether every event counts the tokens so far (vLLM)."
    )
    include_obfuscation: StrictBool = Field(default=False, description=IGNORED_DESCRIPTION)


class JsonSchema(Body):
    """A JSON schema."""

    is_strict = True

    name: StrictStr | None = Field(default=None, description=IGNORED_DESCRIPTION)
    description: StrictStr | None = Field(default=None, description=IGNORED_DESCRIPTION)
    schema_: dict[str, Any] | StrictBool = Field(
        default_factory=dict,
        alias="schema",
        description="The schema. Answers follow it even if `strict` is false.",
    )
    strict: StrictBool | None = Field(default=None, description=IGNORED_DESCRIPTION)


class ResponseFormat(Body):
    """The form of an answer."""

    is_strict = True

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="Any text, a JSON object, or JSON that follows a schema."
    )
    json_schema: JsonSchema | None = Field(default=None, description="The schema.")
    schema_: dict[str, Any] | None = Field(
        default=None,
        alias="schema",
        description="The schema of an answer of type json_object; llama.cpp's name for it.",
    )

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("it is of type json_schema and has no schema; give json_schema")
        if self.type != "json_object" and self.schema_ is not None:
            raise ValueError(
                f"it is of type {self.type} and has schema, which is a field of type json_object; "
                "give json_schema and its type, or leave schema out"
            )
        return self


class StructuredOutputs(Body):
    """The form of an answer in vLLM's words. Only one field may be given."""

    is_strict = True

    refusals = STRUCTURED_OUTPUTS

    json_: dict[str, Any] | StrictStr | None = Field(
        default=None, alias="json", description="A JSON schema, or its text."
    )
    regex: StrictStr | None = Field(
        default=None, description="A regular expression that the whole answer matches."
    )
    choice: Texts | None = Field(
        default=None, min_length=1, description="Texts. The answer is one of them."
    )
    grammar: StrictStr | None = Field(
        default=None, description="A grammar in Lark's notation, or GBNF."
    )
    json_object: StrictBool | None = Field(
        default=None, description="Whether the answer is any JSON object."
    )


# The parameters of filters are named as in `SamplingParams`, which also checks their values. These
# are the names of vLLM, llama.cpp and transformers.
_Items = Annotated[list[Any], Field(max_length=MAX_STOP_TOKENS)]
if TYPE_CHECKING:
    FilterFields = Body
else:
    FilterFields = create_model(
        "FilterFields",
        __base__=Body,
        **{
            name: (
                (_Items if OFF_VALUES[name] is None else Number) | None,
                Field(None, description=HELP[name]),
            )
            for name in FILTER_FIELDS
        },
    )


class RepetitionDetectionFields(Body):
    """The repetitions that end an answer, with vLLM's fields."""

    max_pattern_size: StrictInt = Field(
        default=0, description="The largest number of tokens of the repeated pattern; 0 is off."
    )
    min_pattern_size: StrictInt = Field(
        default=0, description="The smallest number of tokens of the pattern; 0 counts as 1."
    )
    min_count: StrictInt = Field(
        default=0, description="The number of repetitions that end the answer, at least 2."
    )

    @model_validator(mode="after")
    def _check_numbers(self) -> RepetitionDetectionFields:
        _ = self.detection
        return self

    @property
    def detection(self) -> RepetitionDetection | None:
        """The repetitions; None if they are off. Raises ValueError for a number out of its range."""
        return read_repetition_detection("repetition_detection", self.model_dump())


class GenerationRequest(FilterFields):
    """The fields of completions and chats. Names, ranges and defaults are OpenAI's, and from
    `top_k` on vLLM's."""

    # None: as many tokens as fit into the context.
    default_token_limit: ClassVar[int | None] = None
    alternatives_field: ClassVar[str]

    model: StrictStr | None = Field(default=None, description=SERVED_NAME_DESCRIPTION)
    temperature: Annotated[Number, Field(ge=0)] | None = Field(
        default=None, description=HELP["temperature"]
    )
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = Field(
        default=None, description=HELP["top_p"]
    )
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = Field(
        default=None, description=HELP["presence_penalty"]
    )
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = Field(
        default=None, description=HELP["frequency_penalty"]
    )
    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] | None = Field(
        default=None, description="The number of answers to each prompt."
    )
    seed: StrictInt | None = Field(
        default=None,
        description="The seed of the first answer. The same seed gives the same tokens.",
    )
    stop: StrictStr | Texts | None = Field(default=None, description="Texts that end an answer.")
    logit_bias: dict[str, Number] | None = Field(
        default=None,
        description="Token id → a number from -100 to 100 that is added to its logit.",
    )
    max_tokens: Count | None = Field(
        default=None, description="The largest number of tokens of an answer."
    )
    stream: StrictBool | None = Field(
        default=None, description="Whether to send events while tokens are sampled."
    )
    stream_options: StreamOptions | None = Field(
        default=None, description="The token counts that events have."
    )
    response_format: ResponseFormat | None = Field(
        default=None, description="The form of the answer."
    )

    top_k: Annotated[StrictInt, Field(ge=-1, le=MAX_TOKENS)] | None = Field(
        default=None, description=HELP["top_k"]
    )
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = Field(
        default=None, description=HELP["min_p"]
    )
    repetition_penalty: Penalty | None = Field(
        default=None,
        validation_alias=AliasChoices("repetition_penalty", "repeat_penalty"),
        description=f"{HELP['repetition_penalty']} llama.cpp's name is repeat_penalty.",
    )
    penalty_last_n: Number | None = Field(
        default=None,
        validation_alias=AliasChoices("penalty_last_n", "repeat_last_n"),
        description=(
            "The number of the newest tokens, prompt included, that the penalties count; -1 is "
            "off. llama.cpp's name is repeat_last_n."
        ),
    )
    prompt_lookup_num_tokens: (
        Annotated[StrictInt, Field(ge=0, le=MOST_SPECULATIVE_TOKENS)] | None
    ) = Field(
        default=None,
        description=(
            "The largest number of tokens to guess in a step; 0 turns the server's guesses off."
        ),
    )
    min_tokens: Annotated[StrictInt, Field(ge=0, le=MAX_TOKENS)] | None = Field(
        default=None, description="The number of tokens before which no stop token is sampled."
    )
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = Field(
        default=None,
        max_length=MAX_STOP_TOKENS,
        description="Token ids that end an answer, in addition to the model's stop tokens.",
    )
    ignore_eos: StrictBool = Field(
        default=False, description="Whether the model's stop tokens do not end an answer."
    )
    allowed_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = Field(
        default=None,
        min_length=1,
        description="The ids of the tokens that an answer may have, stop tokens included.",
    )
    skip_special_tokens: StrictBool = Field(
        default=True, description="Whether special tokens have no text in the answer."
    )
    include_stop_str_in_output: StrictBool = Field(
        default=False,
        description="Whether the answer includes the stop string, or the stop token, that ends it.",
    )
    repetition_detection: RepetitionDetectionFields | None = Field(
        default=None, description="The repetitions that end an answer."
    )
    structured_outputs: StructuredOutputs | None = Field(
        default=None, description="The form of the answer, in vLLM's words."
    )
    guided_json: dict[str, Any] | StrictStr | None = Field(
        default=None, description=_FORMER_NAME_DESCRIPTION
    )
    guided_regex: StrictStr | None = Field(default=None, description=_FORMER_NAME_DESCRIPTION)
    guided_choice: Texts | None = Field(
        default=None, min_length=1, description=_FORMER_NAME_DESCRIPTION
    )
    guided_grammar: StrictStr | None = Field(default=None, description=_FORMER_NAME_DESCRIPTION)
    return_token_ids: StrictBool = Field(
        default=False, description="Whether to return the token ids of the prompt and the answer."
    )
    prompt_logprobs: Annotated[StrictInt, Field(ge=0)] | None = Field(
        default=None,
        description=(
            "The number of the likeliest tokens to return in each place of the prompt, with "
            "log-probabilities; 0 returns only the log-probability of the prompt's token."
        ),
    )
    logprob_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = Field(
        default=None,
        max_length=MOST_SCORED_IDS,
        description=(
            "The tokens that the log-probabilities of an answer of one token list, in the place of "
            "the likeliest tokens."
        ),
    )
    priority: StrictInt = Field(
        default=0, description="A rank. Requests with the lowest rank get a slot first."
    )
    request_id: StrictStr | None = Field(
        default=None, max_length=MAX_NAME_CHARACTERS, description="A part of the answer's id."
    )
    best_of: StrictInt | None = Field(default=None, description="Only the value of n.")

    user: StrictStr | None = Field(default=None, description=IGNORED_DESCRIPTION)
    store: StrictBool | None = Field(default=None, description=IGNORED_DESCRIPTION)
    metadata: dict[str, Any] | None = Field(default=None, description=IGNORED_DESCRIPTION)
    service_tier: StrictStr | None = Field(default=None, description=IGNORED_DESCRIPTION)
    safety_identifier: StrictStr | None = Field(default=None, description=IGNORED_DESCRIPTION)
    prompt_cache_key: StrictStr | None = Field(default=None, description=IGNORED_DESCRIPTION)
    prompt_cache_retention: StrictStr | None = Field(default=None, description=IGNORED_DESCRIPTION)

    @field_validator("stop", "stop_sequences", check_fields=False)
    @classmethod
    def _check_stop_strings(cls, stop: str | list[str] | None) -> str | list[str] | None:
        strings = [stop] if isinstance(stop, str) else stop or []
        if not all(strings):
            raise ValueError("it has an empty text; give texts of a character at least")
        characters = sum(map(len, strings))
        if len(strings) > MAX_STOP_STRINGS or characters > MAX_STOP_CHARACTERS:
            raise ValueError(
                f"it has {len(strings)} strings of {characters} characters in all; "
                f"give at most {MAX_STOP_STRINGS} of {MAX_STOP_CHARACTERS}"
            )
        return stop

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _check_number_of_biases(cls, bias: Any) -> Any:
        if isinstance(bias, dict) and len(bias) > MAX_BIASES:
            raise ValueError(f"it has {len(bias)} tokens; give at most {MAX_BIASES}")
        return bias

    @field_validator("prompt_logprobs", "logprobs", mode="before", check_fields=False)
    @classmethod
    def _without_false(cls, value: Any) -> Any:
        """Chat completions have false for no log-probabilities, so other requests may have it."""
        return None if value is False else value

    @field_validator("logit_bias")
    @classmethod
    def _check_biases(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for token, amount in (bias or {}).items():
            if not (token.isascii() and token.isdigit()) or len(token) > 10:
                raise ValueError(f"the key {token!r:.40} is not a token id")
            if not -100 <= amount <= 100 or not math.isfinite(amount):
                raise ValueError(f"the bias of token {token} is {amount}; give -100 to 100")
        return bias

    @model_validator(mode="after")
    def _check_together(self) -> GenerationRequest:
        options = self.stream_options
        if not self.stream and options is not None and any(options.model_dump().values()):
            raise ValueError("stream_options is for streams; leave it out, or give stream: true")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError(
                "prompt_logprobs come with a whole answer; "
                "leave out stream, or give echo and logprobs"
            )
        if self.best_of is not None and self.best_of != self.num_choices:
            raise ValueError("best_of is not done here; give only n")
        return self

    @property
    def num_alternatives(self) -> int | None:
        """The number of alternatives to each token of an answer, from the field
        `alternatives_field`; None if the request asks for no log-probabilities."""
        raise NotImplementedError

    @property
    def num_choices(self) -> int:
        """The number of answers to each prompt."""
        return 1 if self.n is None else self.n

    @property
    def token_limit(self) -> int | None:
        """The largest number of tokens of an answer, if the request limits it."""
        return self.max_tokens

    @property
    def token_limit_field(self) -> str:
        """The field that limits the tokens of an answer."""
        return "max_tokens"

    def id_of_answer(self) -> str:
        """The request's `request_id`, or a new identifier if it has none or an empty one."""
        return uuid.uuid4().hex if self.request_id in (None, "") else self.request_id

    @property
    def num_engine_requests(self) -> int:
        """The number of the engine's requests for each prompt."""
        answers = 0 if self.token_limit == 0 else self.num_choices
        return answers + int(self.scores_prompt or self.scores_answers)

    @property
    def scores_prompt(self) -> bool:
        """Whether the answer needs the log-probabilities of its prompt."""
        return self.prompt_logprobs is not None

    @property
    def scores_answers(self) -> bool:
        """Whether the answer needs the log-probabilities of tokens that the request lists."""
        return bool(self.logprob_token_ids)

    @property
    def counts_usage(self) -> bool:
        """Whether a stream ends with an event that counts the tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def counts_usage_in_each_event(self) -> bool:
        """Whether every event of a stream counts the tokens so far."""
        options = self.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats

    def sampling_fields(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that the request sets, except stop tokens and seeds."""
        fields: dict[str, Any] = {}
        for name in _FIELDS_WITH_THE_SAME_NAME:
            value = getattr(self, name)
            if value is None:
                continue
            if name in _SMALLEST_VALUES:
                value = max(value, _SMALLEST_VALUES[name])
            fields[name] = value
        if self.token_limit not in (None, 0):
            fields["max_new_tokens"] = self.token_limit
        if self.min_tokens is not None:
            fields["min_new_tokens"] = self.min_tokens
        biases = {
            int(token): float(amount)
            for token, amount in (self.logit_bias or {}).items()
            if amount != 0
        }
        if biases:  # Not every package takes biases.
            fields["logit_bias"] = biases
        return fields

    def answer_arguments(self) -> dict[str, Any]:
        """The fields of `Call` that the request sets for its answers."""
        arguments: dict[str, Any] = {
            "stop_strings": self.stop,
            "skip_special_tokens": self.skip_special_tokens,
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "allowed_token_ids": self.allowed_token_ids,
        }
        if self.repetition_detection is not None:
            arguments["repetition_detection"] = self.repetition_detection.detection
        return arguments

    def seeds(self) -> list[int]:
        """A seed for each answer to a prompt: `seed` and its successors. A negative seed is counted
        from the end of the range."""
        first = secrets.randbelow(NUM_DRAWN_SEEDS) if self.seed is None else self.seed
        return [(first + index) % NUM_SEEDS for index in range(self.num_choices)]

    @cached_property
    def form(self) -> Form | None:
        """The form that every answer has to follow; None for any text.

        Raises:
            ApiError: the request has several forms, or constrains the answer in another way, too, or
                asks for tokens after the end of the form.
        """
        form = self._given_form()
        if form is None:
            return None
        if self.allowed_token_ids is not None:
            raise ApiError(
                400,
                "allowed_token_ids and a schema, a choice or a grammar both constrain the answer; "
                "give either",
                param="allowed_token_ids",
            )
        for name in ("ignore_eos", "min_tokens"):
            if getattr(self, name):
                raise ApiError(
                    400,
                    f"{name} asks for tokens after the end of an answer that follows a schema, "
                    f"a choice or a grammar; leave {name} out",
                    param=name,
                )
        return form

    def _given_form(self) -> Form | None:
        forms = self._forms_of_fields()
        if len(forms) > 1:
            raise ApiError(
                400,
                "the answer is constrained by several fields; give one schema, grammar or choice",
            )
        return forms[0] if forms else None

    def _forms_of_fields(self) -> list[Form]:
        """The form of each field that constrains the answer."""
        response_format = self.response_format
        outputs = self.structured_outputs
        forms = [
            Form("json_schema", self.guided_json),
            Form("regex", self.guided_regex),
            Form("choice", self.guided_choice),
            Form("grammar", self.guided_grammar),
        ]
        if outputs is not None:
            forms += [
                Form("json_schema", outputs.json_),
                Form("regex", outputs.regex),
                Form("choice", outputs.choice),
                Form("grammar", outputs.grammar),
            ]
        if response_format is not None and response_format.json_schema is not None:
            forms.append(Form("json_schema", response_format.json_schema.schema_))
        given = [form for form in forms if form.value is not None]
        any_object = outputs is not None and outputs.json_object
        if response_format is not None and response_format.type == "json_object":
            if response_format.schema_:
                given.append(Form("json_schema", response_format.schema_))
            else:
                any_object = True
        if any_object:
            given.append(Form("json_schema", {"type": "object"}))
        return given


_PROMPT_REMEDY: Final = (
    f"give a text, a list of token ids from 0 to {MAX_TOKENS}, or a list of either"
)


def _check_prompt(value: Any) -> Any:
    """A text or token ids, or a list of either. pydantic would take seconds to try the types of a
    union on a million ids."""
    if isinstance(value, str) or _are_token_ids(value):
        return value
    if not isinstance(value, list):
        raise ValueError(_PROMPT_REMEDY)
    if len(value) > MAX_PROMPTS and not isinstance(value[0], int):
        raise ValueError(f"it has {len(value)} prompts; give at most {MAX_PROMPTS} in a request")
    if all(map(_are_token_ids, value)) or all(isinstance(item, str) for item in value):
        return value
    raise ValueError(_PROMPT_REMEDY)


def _are_token_ids(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    if not value:
        return True
    if set(map(type, value)) != {int}:
        return False
    smallest: int = min(value)
    largest: int = max(value)
    return smallest >= 0 and largest <= MAX_TOKENS


Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]],
    PlainValidator(
        _check_prompt, json_schema_input_type=str | list[str] | list[int] | list[list[int]]
    ),
]


class LoadLoraRequest(Body):
    """`/v1/load_lora_adapter`, with vLLM's fields."""

    lora_name: StrictStr = Field(
        min_length=1,
        max_length=MAX_NAME_CHARACTERS,
        pattern=r"^[^\x00-\x1f\x7f,]+$",
        description="The name by which requests choose the adapter.",
    )
    lora_path: StrictStr = Field(
        min_length=1,
        max_length=MAX_PATH_CHARACTERS,
        description="A folder below the server's `lora_dir`.",
    )
    load_inplace: StrictBool = Field(
        default=False, description="Whether to replace a loaded adapter of that name."
    )
    base_model_name: StrictStr | None = Field(
        default=None, description="The model that the adapter changes, by default the first."
    )


class UnloadLoraRequest(Body):
    """`/v1/unload_lora_adapter`, with vLLM's fields."""

    lora_name: StrictStr = Field(min_length=1, description="The name of the adapter.")
    lora_int_id: StrictInt | None = Field(default=None, description="Ignored, as in vLLM.")


class CompletionRequest(GenerationRequest):
    """`/v1/completions`."""

    model_config = config_with_example(prompt="In the beginning", max_tokens=24)
    refusals = COMPLETIONS
    default_token_limit = 16  # This is OpenAI's default.
    alternatives_field = "logprobs"

    prompt: Prompt = Field(
        default="", description='A text or token ids, or a list of either. "" begins a text.'
    )
    max_tokens: Annotated[StrictInt, Field(ge=0, le=MAX_TOKENS)] | None = Field(
        default=None,
        description="The largest number of tokens of an answer, by default 16; 0 writes nothing.",
    )
    logprobs: Annotated[StrictInt, Field(ge=0)] | None = Field(
        default=None,
        description=(
            "The number of the likeliest tokens to return in each place of the answer, with "
            "log-probabilities; 0 returns only the log-probability of the sampled token."
        ),
    )
    echo: StrictBool = Field(
        default=False,
        description=(
            "Whether to return the prompt before its continuation, with its log-probabilities if "
            "the request asks for `logprobs`."
        ),
    )
    suffix: StrictStr | None = Field(default=None, description='Only "".')
    add_special_tokens: StrictBool = Field(
        default=True, description="Whether the tokenizer adds its special tokens to a text."
    )

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.suffix not in (None, ""):
            raise ValueError(
                "suffix is not done here: the model writes the continuation of a prompt"
            )
        if self.max_tokens == 0 and self.min_tokens not in (None, 0):
            raise ValueError(f"min_tokens is {self.min_tokens} and max_tokens 0; leave out either")
        return self

    @property
    def num_alternatives(self) -> int | None:
        return self.logprobs

    @property
    def scores_prompt(self) -> bool:
        return (self.echo and self.logprobs is not None) or self.prompt_logprobs is not None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several.

        Raises:
            ValueError: the request has an empty list of prompts.
        """
        prompt: Any = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        if not prompt:
            raise ValueError(
                "prompt is an empty list; give a text, token ids, or several of either"
            )
        return list(prompt)
