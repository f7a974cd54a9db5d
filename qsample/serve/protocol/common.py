"""Fields that completions and chat completions share."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    create_model,
    field_validator,
    model_validator,
)

from qsample.sampling_params import FILTER_FIELDS, OFF
from qsample.serve.protocol.unsupported import STRUCTURED_OUTPUTS, Fields

MOST_CHOICES: Final = 128  # OpenAI's limit for n
MOST_TOKENS: Final = 2**31 - 1
# Stop tokens, and biases: a step reads as many for each row as the widest has.
MOST_STOPS: Final = 1024
MOST_BIASES: Final = 1024

Number = StrictFloat | StrictInt
TokenId = Annotated[StrictInt, Field(ge=0, le=MOST_TOKENS)]
Count = Annotated[StrictInt, Field(ge=1, le=MOST_TOKENS)]


class Body(BaseModel):
    """A JSON object without unknown fields, and without NaN and infinities, which JSON lacks.

    A field that is null is as one that was left out, whatever its name: clients write out what they do not use.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    unsupported: ClassVar[Fields] = {}

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, value: Any) -> Any:
        """What asks for nothing."""
        if not isinstance(value, dict):
            return value
        given = {name: one for name, one in value.items() if one is not None}
        for name in [name for name in given if name in cls.unsupported]:
            cls.unsupported[name].check(name, given.pop(name))
        return given


class StreamOptions(Body):
    """include_usage: a last event with the tokens counted. continuous_usage_stats: the counts in every event (vLLM).
    include_obfuscation: of OpenAI; there is none here, so nothing follows from it."""

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False
    include_obfuscation: StrictBool = False


class JsonSchema(Body):
    """A JSON schema with a name. strict: followed in any case."""

    name: StrictStr = "response"
    description: StrictStr | None = None
    schema_: dict[str, Any] | StrictBool = Field(default_factory=dict, alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(Body):
    """What the answer has to be: any text, a JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """What the answer has to be, in vLLM's words; one of them. json: a schema, or one as text. grammar: Lark's."""

    unsupported = STRUCTURED_OUTPUTS

    json_: dict[str, Any] | StrictStr | None = Field(None, alias="json")
    regex: StrictStr | None = None
    choice: list[StrictStr] | None = Field(None, min_length=1)
    grammar: StrictStr | None = None
    json_object: StrictBool | None = None


# What a package may have beside, under the names that `SamplingParams` has for it, which checks the values: vLLM's,
# llama.cpp's and transformers'.
_Items = Annotated[list[Any], Field(max_length=MOST_STOPS)]
if TYPE_CHECKING:
    FilterFields = Body
else:
    FilterFields = create_model(
        "FilterFields",
        __base__=Body,
        **{name: ((_Items if OFF[name] is None else Number) | None, None) for name in FILTER_FIELDS},
    )


class GenerationRequest(FilterFields):
    """How to continue; names, ranges and defaults are OpenAI's, below them vLLM's.

    model: a served name; None = the first. repeat_penalty: llama.cpp's name of repetition_penalty. Fields at the end
    are taken and change nothing.
    """

    model: StrictStr | None = None
    temperature: Annotated[Number, Field(ge=0)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MOST_CHOICES)] | None = None
    seed: StrictInt | None = None
    stop: StrictStr | list[StrictStr] | None = None
    logit_bias: dict[str, Number] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    top_k: Annotated[StrictInt, Field(ge=-1, le=MOST_TOKENS)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0)] | None = Field(
        None, validation_alias=AliasChoices("repetition_penalty", "repeat_penalty")
    )
    min_tokens: Annotated[StrictInt, Field(ge=0, le=MOST_TOKENS)] | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MOST_STOPS)
    ignore_eos: StrictBool = False
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | StrictStr | None = None
    guided_regex: StrictStr | None = None
    guided_choice: list[StrictStr] | None = Field(None, min_length=1)
    guided_grammar: StrictStr | None = None
    return_token_ids: StrictBool = False
    priority: StrictInt = 0
    request_id: StrictStr | None = None
    best_of: StrictInt | None = None

    user: StrictStr | None = None
    store: StrictBool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: StrictStr | None = None
    safety_identifier: StrictStr | None = None
    prompt_cache_key: StrictStr | None = None
    prompt_cache_retention: StrictStr | None = None

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        if bias is not None and len(bias) > MOST_BIASES:
            raise ValueError(f"there are {len(bias)} of them; give at most {MOST_BIASES}")
        for token, amount in (bias or {}).items():
            if not (token.isascii() and token.isdigit()) or len(token) > 10:
                raise ValueError(f"the key {token!r:.40} is no token id")
            if not -100 <= amount <= 100 or not math.isfinite(amount):
                raise ValueError(f"the bias of token {token} is {amount}; give -100 to 100")
        return bias

    @model_validator(mode="after")
    def _check_options(self) -> GenerationRequest:
        asked = self.stream_options is not None and any(self.stream_options.model_dump().values())
        if asked and not self.stream:
            raise ValueError("stream_options is for streams; leave it out, or give stream: true")
        if self.best_of is not None and self.best_of != self.choices:
            raise ValueError("best_of is not done here; give n alone")
        return self

    @property
    def choices(self) -> int:
        """How many answers to a prompt are asked for."""
        return self.n or 1

    @property
    def usage_in_stream(self) -> tuple[bool, bool]:
        """Whether the tokens are counted in a last event of their own, and in every one."""
        options = self.stream_options or StreamOptions()
        return options.include_usage, options.include_usage and options.continuous_usage_stats
