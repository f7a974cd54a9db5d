"""Zero and "" are values: each door keeps them, or refuses them and names the field. None takes its default.

Every parameter that may be a number has its place in a table here. A new parameter fails these tests until it has one,
too.
"""

from __future__ import annotations

import types
from dataclasses import fields
from typing import Annotated, Any, Final, Union, get_args, get_origin, get_type_hints

import pytest
import typer
from pydantic import ValidationError

from qsample.addons.ray.processor import QsampleProcessorConfig
from qsample.addons.serve.chats import ChatCompletionRequest
from qsample.addons.serve.messages import MessagesRequest
from qsample.addons.serve.requests import CompletionRequest
from qsample.addons.serve.responses import ResponsesRequest
from qsample.addons.serve.settings import ServeSettings
from qsample.cli.common import SamplingOptions
from qsample.cli.option_groups import with_option_groups
from qsample.compiler.options import CompileOptions
from qsample.contract.interface import Features
from qsample.errors import QsampleError
from qsample.ort.options import SessionOptions
from qsample.package.manifest import TokenIds
from qsample.request.repetition import RepetitionDetection
from qsample.request.sampling_params import MIN_TOP_P, SamplingParams
from qsample.runtime.call import read_call
from qsample.runtime.engine import EngineOptions

# The numbers of SamplingParams of which 0 is outside the range that docs/contract.md gives.
REFUSED_OF_SAMPLING: Final = {
    "top_p", "repetition_penalty", "max_length", "max_new_tokens", "typical_p", "dry_base", "dry_allowed_length",
    "mirostat_tau",
}  # fmt: skip
# Class → what it needs besides, the fields that keep 0, those that refuse it.
RECORDS: Final[dict[type, tuple[dict[str, Any], set[str], set[str]]]] = {
    CompileOptions: ({}, {"num_speculative_tokens", "max_divergence"},
        {"batch_size", "ctx_len", "block_size", "num_devices"}),
    Features: ({}, {"top_logprobs", "num_speculative_tokens", "max_loras", "max_lora_rank"}, set()),
    SessionOptions: ({}, set(), {"intra_op_num_threads"}),
    RepetitionDetection: ({"max_pattern_size": 1, "min_count": 2}, {"max_pattern_size", "min_pattern_size"},
        {"min_count"}),
    # Those that an engine's parts read are refused there, such as flush_every.
    EngineOptions: (
        {}, {"max_waiting", "flush_every", "saved_states", "prefix_cache_bytes"}, {"slots", "prefill_chunk_size"},
    ),
    ServeSettings: (
        {"models": {"a": "b"}},
        {
            "ctx_len", "threads", "max_waiting", "reasoning_budget", "drain_timeout", "limit_images_per_prompt",
            "image_cache_mib",
        },
        {
            "slots", "prefill_chunk_size", "prefix_cache_bytes", "max_cpu_loras", "request_timeout", "max_image_bytes",
            "max_image_pixels", "max_body_bytes",
        },
    ),
    QsampleProcessorConfig: (
        {"package": "a"},
        {"num_cpus", "num_gpus", "ctx_len"},
        {"concurrency", "batch_size", "max_concurrent_batches", "slots", "prefill_chunk_size"},
    ),
}  # fmt: skip


def is_numeric(hint: Any) -> bool:
    """Whether a type is int or float, or may be either."""
    if get_origin(hint) in (Union, types.UnionType, Annotated):
        return any(is_numeric(one) for one in get_args(hint))
    return hint in (int, float)


def numbers_of(record: type) -> set[str]:
    hints = get_type_hints(record)
    return {field.name for field in fields(record) if is_numeric(hints[field.name])}


KEPT_BY_SAMPLING: Final = numbers_of(SamplingParams) - REFUSED_OF_SAMPLING


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_zero_in_a_record(record: type) -> None:
    needed, kept, refused = RECORDS[record]
    assert numbers_of(record) == kept | refused
    for name in kept:
        assert getattr(record(**{**needed, name: 0}), name) == 0, name
    for name in refused:
        with pytest.raises((ValueError, QsampleError), match=name):
            record(**{**needed, name: 0})


def test_zero_in_sampling_params() -> None:
    for name in KEPT_BY_SAMPLING:
        assert getattr(SamplingParams(**{name: 0}), name) == 0, name
    for name in REFUSED_OF_SAMPLING:
        with pytest.raises(ValueError, match=name):
            SamplingParams(**{name: 0})
    params = SamplingParams(
        eos_token_id=0, suppress_tokens=[0], logit_bias={0: 0.0}, bad_words_ids=[[0]]
    )
    assert (params.eos_token_id, params.suppress_tokens) == ((0,), (0,))
    assert (params.logit_bias, params.bad_words_ids) == ({0: 0.0}, ((0,),))
    for name in ("adapter", "bad_words", "dry_sequence_breakers"):
        with pytest.raises(ValueError, match=name):
            SamplingParams(**{name: "" if name == "adapter" else [""]})


@pytest.mark.parametrize("place", ["config", "override"])
def test_zero_in_a_generation_config(place: str) -> None:
    """The other values are not 0, so that a 0 that is lost shows; temperature=0 means do_sample=False."""
    others = {"do_sample": True, "temperature": 0.5, "top_k": 5, "min_p": 0.5, "eos_token_id": [7]}

    def read(name: str) -> SamplingParams:
        if place == "config":
            return SamplingParams.from_generation_config({**others, name: 0})
        return SamplingParams.from_generation_config(others, **{name: 0})

    for name in KEPT_BY_SAMPLING - {"temperature"}:
        assert getattr(read(name), name) == 0, name
    for name in REFUSED_OF_SAMPLING:
        with pytest.raises(ValueError, match=name):
            read(name)
    if place == "config":
        with pytest.raises(ValueError, match="temperature is 0"):
            read("temperature")
    else:
        assert read("temperature").temperature == 0
    assert read("eos_token_id").eos_token_id == (0,)
    assert SamplingParams.from_generation_config({"do_sample": False}).temperature == 0


def call(keywords: dict[str, Any], own: dict[str, Any]) -> Any:
    ids = TokenIds(pad=3, eos=(4,), bos=5)
    return read_call([6], None, keywords, own, ids, vocab_size=10)


def test_zero_among_the_keywords_of_generate() -> None:
    own = {
        "do_sample": True,
        "temperature": 0.5,
        "pad_token_id": 3,
        "bos_token_id": 5,
        "eos_token_id": [4],
    }
    for name in KEPT_BY_SAMPLING - {"temperature", "seed"}:
        assert getattr(call({name: 0}, own).params, name) == 0, name
    for name in REFUSED_OF_SAMPLING:
        with pytest.raises(ValueError, match=name):
            call({name: 0}, own)
    assert call({"seed": 0}, own).seed == 0
    assert call({"do_sample": False}, own).params.temperature == 0
    for given, settings in (
        ({"pad_token_id": 0, "bos_token_id": 0}, own),
        ({}, {**own, "pad_token_id": 0, "bos_token_id": 0}),
    ):
        read = call(given, settings)
        assert (read.pad, read.fill, read.bos) == (0, 0, 0)
    assert call({"eos_token_id": 0}, own).params.eos_token_id == (0,)
    assert call({"thinking_token_budget": 0}, own).thinking_token_budget == 0
    with pytest.raises(ValueError, match="max_time"):
        call({"max_time": 0}, own)


MESSAGES: Final = [{"role": "user", "content": "a"}]
# Model of a body → the fields that it needs.
BODIES: Final[dict[type[Any], dict[str, Any]]] = {
    CompletionRequest: {"prompt": "a"},
    ChatCompletionRequest: {"messages": MESSAGES},
    ResponsesRequest: {"input": "a"},
    MessagesRequest: {"model": "m", "max_tokens": 3, "messages": MESSAGES},
}
# The field of a body → that of SamplingParams, if the names differ.
NAMES: Final = {"min_tokens": "min_new_tokens"}
REFUSED_BY_BODIES: Final = {"repetition_penalty"}
# 0 of top_p is vLLM's greedy: the least nucleus.
LEAST: Final = {"top_p": MIN_TOP_P}
# Numbers of a body that are no parameters of SamplingParams: the value that the request has at 0, None if 0 is refused.
OTHER_NUMBERS: Final[dict[type[Any], dict[str, int | None]]] = {
    CompletionRequest: {
        "n": None, "best_of": None, "max_tokens": 0, "seed": 0, "priority": 0, "prompt_logprobs": 0, "logprobs": 0,
    },
    ChatCompletionRequest: {
        "n": None, "best_of": None, "max_tokens": None, "max_completion_tokens": None, "seed": 0, "priority": 0,
        "prompt_logprobs": 0, "top_logprobs": 0, "thinking_token_budget": 0,
    },
    ResponsesRequest: {
        "n": None, "best_of": None, "max_tokens": None, "max_output_tokens": None, "seed": 0, "priority": 0,
        "prompt_logprobs": None, "top_logprobs": 0, "thinking_token_budget": 0, "max_tool_calls": 0,
    },
    MessagesRequest: {
        "n": None, "best_of": None, "max_tokens": None, "seed": 0, "priority": 0, "prompt_logprobs": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_zero_in_a_request(body: type[Any]) -> None:
    """Up to the arguments of SamplingParams; the ranges are its own, and were tested above."""
    others = OTHER_NUMBERS[body]
    numbers = {name for name, info in body.model_fields.items() if is_numeric(info.annotation)}
    parameters = {NAMES.get(name, name): name for name in numbers - others.keys()}
    assert parameters.keys() <= numbers_of(SamplingParams)
    for parameter, name in parameters.items():
        if name in REFUSED_BY_BODIES:
            with pytest.raises(ValidationError, match=name):
                body.model_validate({**BODIES[body], name: 0})
            continue
        request = body.model_validate({**BODIES[body], name: 0})
        request = getattr(request, "chat", request)
        assert request.sampling_fields()[parameter] == LEAST.get(name, 0), name
    for name, value in others.items():
        if value is None:
            with pytest.raises(ValidationError, match=name):
                body.model_validate({**BODIES[body], name: 0})
            continue
        request = body.model_validate({**BODIES[body], name: 0})
        assert getattr(request, name) == 0, name
        chat = getattr(request, "chat", request)
        assert getattr(chat, name, 0) == 0, name


def test_what_zero_means_in_a_request() -> None:
    """Where 0 is neither off nor a number like others."""
    completion = CompletionRequest(
        prompt="a", max_tokens=0, logprobs=0, prompt_logprobs=0, suffix=""
    )
    assert (completion.token_limit, completion.num_alternatives, completion.scores_prompt) == (
        0,
        0,
        True,
    )
    assert completion.num_engine_requests == 1  # which scores the prompt
    chat = ChatCompletionRequest(messages=MESSAGES, logprobs=True, top_logprobs=0)
    assert chat.num_alternatives == 0
    assert ChatCompletionRequest(messages=MESSAGES, top_logprobs=0).num_alternatives is None
    assert ChatCompletionRequest(messages=MESSAGES, prompt_logprobs=0).scores_prompt
    assert chat.answer_arguments().get("stop_token_ids") is None
    assert CompletionRequest(prompt="a", request_id="").id_of_answer() != ""
    assert CompletionRequest(prompt="a", logit_bias={"0": 1.0}).sampling_fields()["logit_bias"] == {
        0: 1.0
    }


def test_zero_of_a_flag() -> None:
    """The command line hands 0 on, or refuses it in its own words."""
    seen: list[dict[str, Any]] = []
    app = typer.Typer()

    @app.command()
    @with_option_groups
    def command(sampling: SamplingOptions) -> None:
        seen.append(sampling.arguments())

    (sampling_flags,) = get_type_hints(SamplingOptions, include_extras=True)["params"].__metadata__
    names = {flag.name for flag in sampling_flags.flags()} & numbers_of(SamplingParams)
    assert len(names) > 20
    flags = {name: f"--{name.replace('_', '-')}" for name in names}
    for name, flag in flags.items():
        line = [flag, "0"]
        if name in REFUSED_OF_SAMPLING:
            with pytest.raises(Exception, match=r"Invalid value|give|range"):
                app(line, standalone_mode=False)
        else:
            app(line, standalone_mode=False)
            assert seen.pop() == {name: 0}, name
    app(["--stop-id", "0"], standalone_mode=False)
    assert seen.pop() == {"eos_token_id": [0]}
