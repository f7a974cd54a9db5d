"""A client's sampling fields as `SamplingParams`, and what an answer is held to as a grammar."""

from __future__ import annotations

import secrets
from functools import partial
from typing import Any, Final

from qsample.runtime.parameters import check_filters
from qsample.sampling_params import FILTER_FIELDS, SEEDS, SMALLEST_TOP_P, SamplingParams
from qsample.serve.guides import Grammar, from_choice, from_json_schema, from_lark, from_regex
from qsample.serve.http.errors import ApiError
from qsample.serve.protocol.common import GenerationRequest, StructuredOutputs
from qsample.serve.served_model import ServedModel

COMPLETION_TOKENS: Final = 16  # OpenAI's default on /v1/completions


def sampling_params(request: GenerationRequest, model: ServedModel, limit: int | None) -> SamplingParams:
    """How to choose the tokens of each answer.

    limit: most new tokens; None = what the model's generation_config says with generation_config="auto", otherwise as
    many as a slot has room for. Raises ApiError for a value that is refused, and if the fields contradict one another.
    """
    fields: dict[str, Any] = dict(model.defaults)
    for name in ("temperature", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        if getattr(request, name) is not None:
            fields[name] = getattr(request, name)
    if request.top_k is not None:
        fields["top_k"] = max(request.top_k, 0)  # vLLM's -1 is off, too
    if request.top_p is not None:
        fields["top_p"] = max(request.top_p, SMALLEST_TOP_P)
    fields |= {name: value for name in FILTER_FIELDS if (value := getattr(request, name)) is not None}
    if "top_n_sigma" in fields:
        fields["top_n_sigma"] = max(fields["top_n_sigma"], 0)  # llama.cpp's -1 is off, too
    if limit is not None:
        fields["max_new_tokens"] = limit
    elif "max_new_tokens" not in fields:
        fields["max_length"] = model.max_model_len
    if request.min_tokens:
        fields["min_new_tokens"] = request.min_tokens
    ends = model.model.package.manifest.token_ids.eos
    if request.ignore_eos:
        ends = ()
    if request.ignore_eos or request.stop_token_ids:
        fields["eos_token_id"] = (*ends, *(request.stop_token_ids or ()))
    biases = {int(token): float(amount) for token, amount in (request.logit_bias or {}).items() if amount}
    if biases:  # which not every package takes
        fields["logit_bias"] = biases
    try:
        params = SamplingParams(**fields)
        check_filters(model.model.interface, params)
    except ValueError as error:
        name = str(error).partition(" ")[0]
        raise ApiError(400, str(error), param=name if name in type(request).model_fields else None) from None
    return params


def seeds(request: GenerationRequest, count: int) -> list[int]:
    """A seed for each of `count` answers: the request's and those after it, negative ones counted from the end."""
    first = secrets.randbelow(SEEDS) if request.seed is None else request.seed
    return [(first + index) % SEEDS for index in range(count)]


def grammar_of(request: GenerationRequest) -> Grammar | None:
    """What every answer has to follow; None = any text. Raises ApiError where more than one is asked for."""
    asked: list[Grammar] = []
    wanted = request.response_format
    if wanted is not None and wanted.type == "json_object":
        asked.append(partial(from_json_schema, {"type": "object"}))
    elif wanted is not None and wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise ApiError(400, "response_format is of type json_schema and has none", param="response_format")
        asked.append(partial(from_json_schema, wanted.json_schema.schema_))
    given = request.structured_outputs or StructuredOutputs.model_validate({})
    for makes, values in (
        (from_json_schema, (request.guided_json, given.json_)),
        (from_regex, (request.guided_regex, given.regex)),
        (from_choice, (request.guided_choice, given.choice)),
        (from_lark, (request.guided_grammar, given.grammar)),
    ):
        asked += [partial(makes, value) for value in values if value is not None]  # type: ignore[arg-type]
    if given.json_object:
        asked.append(partial(from_json_schema, {"type": "object"}))
    if len(asked) > 1:
        raise ApiError(400, "the answer is held to several things at once; give one schema, grammar or choice")
    return asked[0] if asked else None


def check_ends(request: GenerationRequest) -> None:
    """Raise ApiError where an answer that is held to something is also to go on when that is complete."""
    for name in ("ignore_eos", "min_tokens"):
        if getattr(request, name):
            raise ApiError(
                400,
                f"{name} asks for tokens behind the end of an answer, and there are none where it has to follow a "
                f"schema, a choice or a grammar; leave {name} out",
                param=name,
            )


def check_logprobs(model: ServedModel, top: int, param: str) -> None:
    """Raise ApiError where the package does not return what is asked for. top: alternatives a token."""
    features = model.model.interface.features
    if not features.logprobs:
        raise ApiError(400, "this package was exported without logprobs; export it with --logprobs", param=param)
    if model.model.tokenizer is None:
        text = "log-probabilities come with the texts of tokens, and this package has no tokenizer; leave them out"
        raise ApiError(400, text, param=param)
    if top > features.top_logprobs:
        raise ApiError(
            400,
            f"{top} alternatives are asked for and this package returns {features.top_logprobs}; ask for fewer, or "
            f"export it with --top-logprobs {top}",
            param=param,
        )
