"""Every field of OpenAI's, vLLM's and llama.cpp's requests: what asks for nothing changes nothing, what is not done is
refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import TypeAdapter, ValidationError
from starlette.testclient import TestClient

from qsample.addons.serve import ServeSettings, make_app
from qsample.addons.serve import requests as bodies
from qsample.addons.serve.http import ApiError
from qsample.addons.serve.requests import CompletionRequest
from qsample.request.grammar import Form
from qsample.runtime import SamplingParams, load
from tests.helpers.fake_package import fake_package
from tests.helpers.filters import ASKED, FILTERS, assert_read, read_by_the_graph, record_parameters
from tests.helpers.flags import undescribed
from tests.helpers.servers import ServerProcess

PATHS = {"chat": "/v1/chat/completions", "text": "/v1/completions"}
MESSAGES: Any = [{"role": "user", "content": "And the LORD spake unto Moses"}]
GOOD: dict[str, dict[str, Any]] = {
    "chat": {"messages": MESSAGES, "max_tokens": 6, "seed": 1},
    "text": {"prompt": "In the", "max_tokens": 6, "seed": 1},
}
# What vLLM's requests have beside OpenAI's, with its defaults, and other words for nothing.
VLLM: dict[str, list[Any]] = {
    "best_of": [1], "use_beam_search": [False], "top_k": [0, -1], "min_p": [0, 0.0], "repetition_penalty": [1, 1.0],
    "length_penalty": [1, 1.0], "stop_token_ids": [[]], "include_stop_str_in_output": [False], "ignore_eos": [False],
    "min_tokens": [0], "skip_special_tokens": [True], "spaces_between_special_tokens": [True, False],
    "truncate_prompt_tokens": [], "prompt_logprobs": [False], "allowed_token_ids": [], "bad_words": [[]],
    # llama.cpp's, and transformers'
    "typical_p": [1, 1.0], "top_n_sigma": [0, -1, -1.0], "xtc_probability": [0], "xtc_threshold": [0.1],
    "dry_multiplier": [0.0], "dry_base": [1.75], "dry_allowed_length": [2], "dry_penalty_last_n": [-1],
    "dry_sequence_breakers": [[]], "dynatemp_range": [0], "dynatemp_exponent": [1], "mirostat": [0],
    "mirostat_tau": [5], "mirostat_eta": [0.1], "repeat_last_n": [-1], "min_keep": [0], "samplers": [],
    "adaptive_target": [-1, -0.5], "adaptive_decay": [0.5],
    "epsilon_cutoff": [0], "eta_cutoff": [0], "no_repeat_ngram_size": [0], "bad_words_ids": [[]],
    "early_stopping": [False], "echo": [False], "structured_outputs": [{}, {"regex": None, "disable_fallback": False}],
    "guided_json": [], "guided_regex": [], "guided_choice": [], "guided_grammar": [], "guided_json_object": [False],
    "guided_decoding_backend": ["auto"], "guided_whitespace_pattern": [], "priority": [0], "request_id": ["x"],
    "logits_processors": [[]], "return_tokens_as_token_ids": [False], "return_token_ids": [False], "cache_salt": [],
    "kv_transfer_params": [{}], "vllm_xargs": [{}],
    "repetition_detection": [{}, {"max_pattern_size": 0}], "response_format": [{"type": "text"}],
}  # fmt: skip
OF_CHAT: dict[str, list[Any]] = {
    "add_generation_prompt": [True], "continue_final_message": [False], "add_special_tokens": [False],
    "documents": [[]], "chat_template": [], "chat_template_kwargs": [{}], "mm_processor_kwargs": [{}],
    "media_io_kwargs": [{}], "include_reasoning": [True], "thinking_token_budget": [], "top_logprobs": [0],
    "logprobs": [False], "functions": [[]], "function_call": ["none", "auto"], "tools": [[]], "modalities": [["text"]],
    "tool_choice": ["none", "auto"], "parallel_tool_calls": [True, False],
}  # fmt: skip
OF_TEXTS: dict[str, list[Any]] = {
    "add_special_tokens": [True], "prompt_embeds": [[]], "suffix": [""], "logprobs": [False],
}  # fmt: skip
OPENAI: dict[str, list[Any]] = {
    "frequency_penalty": [0], "presence_penalty": [0], "temperature": [1], "top_p": [1, 1.0], "n": [1], "stop": [[]],
    "logit_bias": [{}], "stream": [False], "stream_options": [{}, {"include_usage": False}], "user": ["x"],
}  # fmt: skip
# Value → what the error says to do.
Post = Callable[[str, dict[str, Any]], Any]


@pytest.fixture(scope="module")
def post(local_app: Callable[..., TestClient]) -> Iterator[Post]:
    """(kind of request, more fields) → the answer."""
    with local_app(slots=2) as client:
        yield lambda kind, fields: client.post(PATHS[kind], json=GOOD[kind] | fields)


def names(kind: str) -> set[str]:
    """The fields of the `openai` client's requests."""
    params = (
        chat_create_params if kind == "chat" else completion_create_params
    ).CompletionCreateParamsBase
    return {*params.__annotations__, "stream"}


def text_of(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate(fields)


# Field → its least and largest values, and others that are wrong.
RANGES: dict[str, tuple[list[Any], list[Any]]] = {
    "temperature": ([0, 0.0, 1e300], [-1e-9, "1", True, float("inf"), float("nan")]),
    "top_p": ([0, 1], [-1e-9, 1.000001]),
    "min_p": ([0, 1], [-1e-9, 1.000001]),
    "presence_penalty": ([-2, 2], [-2.000001, 2.000001]),
    "frequency_penalty": ([-2, 2], [-2.000001, 2.000001]),
    "repetition_penalty": ([1e-6, 1e6], [0.9e-6, 1.1e6, 0]),
    "repeat_penalty": ([1e-6, 1e6], [0.9e-6, 1.1e6]),
    "n": ([1, 128], [0, 129, 1.0, True]),
    "top_k": ([-1, 2**31 - 1], [-2, 2**31]),
    "max_tokens": ([0, 2**31 - 1], [-1, 2**31]),
    "min_tokens": ([0, 2**31 - 1], [-1, 2**31]),
    "logprobs": ([0, 2**31], [-1, True, "1"]),
    "prompt_logprobs": ([0, 2**31], [-1, True]),
    "stop_token_ids": ([[], [0, 2**31 - 1], [5] * 1024], [[-1], [2**31], [5] * 1025, ["x"] * 3]),
    "logit_bias": (
        [{}, {"0": -100, "9999999999": 100}, {str(n): 1 for n in range(1024)}],
        [
            *({"0": -100.5}, {"0": 100.5}, {"12345678901": 1}, {"x": 1}, {"-1": 1}, {"\u0665": 1}, {"0": float("nan")}),
            *({str(n): 1 for n in range(1025)}, []),
        ],
    ),
    "stop": (
        [[], "a" * 2048, ["a"] * 64, ["a" * 1024] * 2],
        ["", ["a", ""], "a" * 2049, ["a"] * 65, ["a" * 1025] * 2, 5, [0] * 3],
    ),
    "guided_choice": ([["a"]], [[], [0] * 3]),
    "structured_outputs": (
        [{}, {"choice": ["a"]}, {"json_object": False}], [{"choice": []}, {"choice": [0] * 3}, {"other": 1}]
    ),
    "response_format": ([{"type": "text"}, {"type": "json_schema", "json_schema": {}}], [{"type": "json_schema"}, {}]),
    "bad_words": ([["x"] * 1024], [["x"] * 1025, 5]),
    "typical_p": ([0.5], [[0.5], "x"]),
    "prompt": (
        ["", "x", [], [0, 2**31 - 1], [[]], [[0], [5, 6]], ["x", ""], [[5]] * 2**16, [5] * (2**16 + 1)],
        [
            *(5, {}, True, [-1], [2**31], [5, "x"], ["x", 5], [[5], "x"], ["x", [5]], [[5], 5], [True], [[[5]]]),
            *([-1, 5], [5, -1], [2**31, 5], [[5]] * (2**16 + 1), ["x"] * (2**16 + 1)),
        ],
    ),
    "suffix": ([""], ["x"]),
    "best_of": ([1], [0, 2]),
}  # fmt: skip


@pytest.mark.parametrize("name", RANGES)
def test_values_of_fields(name: str) -> None:
    right, wrong = RANGES[name]
    for value in right:
        completion(**{name: value})
    for value in wrong:
        with pytest.raises(ValidationError) as raised:
            completion(**{name: value})
        assert raised.value.error_count() <= 2, "of two types; lists end with their first error"


def test_fields_that_agree() -> None:
    completion(**{f"k{n}": None for n in range(256)})
    completion(stream=True, logprobs=0, echo=True)
    completion(max_tokens=0, min_tokens=0)
    assert completion(n=2, best_of=2).num_choices == 2
    for options, expected in (
        (None, (False, False)),
        ({"include_usage": True}, (True, False)),
        ({"continuous_usage_stats": True}, (False, False)),
        ({"include_usage": True, "continuous_usage_stats": True}, (True, True)),
    ):
        made = completion(stream=True, stream_options=options)
        assert (made.counts_usage, made.counts_usage_in_each_event) == expected
    plain = completion()
    assert (
        plain.num_choices,
        plain.token_limit,
        plain.num_engine_requests,
        plain.scores_prompt,
        plain.prompts,
    ) == (
        1,
        None,
        1,
        False,
        [""],
    )
    assert (plain.ignore_eos, plain.return_token_ids, plain.priority, plain.echo) == (
        False,
        False,
        0,
        False,
    )
    assert (
        plain.add_special_tokens,
        plain.default_token_limit,
        plain.form,
        plain.sampling_fields(),
    ) == (
        True,
        16,
        None,
        {},
    )
    for fields, scores, requests in (
        ({"echo": True}, False, 1),
        ({"logprobs": 0}, False, 1),
        ({"echo": True, "logprobs": False, "prompt_logprobs": False}, False, 1),
        ({"echo": True, "logprobs": 0, "n": 2}, True, 3),
        ({"prompt_logprobs": 0, "max_tokens": 0, "n": 2}, True, 1),
        ({"max_tokens": 0, "n": 2}, False, 0),
        ({"max_tokens": 1, "n": 2, "logprobs": 0, "logprob_token_ids": [5]}, False, 3),
        ({"max_tokens": 1, "n": 2, "logprobs": 0, "logprob_token_ids": []}, False, 2),
    ):
        made = completion(**fields)
        assert (made.scores_prompt, made.num_engine_requests) == (scores, requests)
    for prompt, prompts in (
        ("x", ["x"]),
        ([5], [[5]]),
        ([[5], []], [[5], []]),
        (["x", ""], ["x", ""]),
        ([[]], [[]]),
    ):
        assert completion(prompt=prompt).prompts == prompts
    with pytest.raises(ValueError, match="prompt is an empty list"):
        _ = completion(prompt=[]).prompts


def test_what_sampling_gets() -> None:
    same: dict[str, Any] = {
        "temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.25, "repetition_penalty": 1.5, "presence_penalty": 1,
        "frequency_penalty": -1, "typical_p": 0.5,
    }  # fmt: skip
    assert completion(**same, max_tokens=4, min_tokens=2).sampling_fields() == same | {
        "max_new_tokens": 4, "min_new_tokens": 2,
    }  # fmt: skip
    off = completion(
        top_k=-1, top_n_sigma=-1, top_p=0, max_tokens=0, min_tokens=0
    ).sampling_fields()
    assert 0 < off.pop("top_p") < 1e-6
    assert off == {"top_k": 0, "top_n_sigma": 0, "min_new_tokens": 0}
    assert completion(logit_bias={"7": 2, "5": 0}).sampling_fields() == {"logit_bias": {7: 2.0}}
    assert completion(seed=5, n=3).seeds() == [5, 6, 7]
    assert completion(seed=-1, n=2).seeds() == [2**63 - 1, 0]
    assert completion(seed=2**63 + 4).seeds() == [4]
    assert completion().seeds() != completion().seeds()


def test_forms() -> None:
    schema = {"type": "object", "properties": {}}
    given: list[tuple[dict[str, Any], Form]] = [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": schema, "strict": False}}},
         Form("json_schema", schema)),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, Form("json_schema", {})),
        ({"response_format": {"type": "json_object"}}, Form("json_schema", {"type": "object"})),
        ({"response_format": {"type": "json_object", "schema": schema}}, Form("json_schema", schema)),
        ({"response_format": {"type": "json_object", "schema": {}}}, Form("json_schema", {"type": "object"})),
        ({"response_format": {"type": "json_object", "schema": None}}, Form("json_schema", {"type": "object"})),
        ({"structured_outputs": {"json_object": True}}, Form("json_schema", {"type": "object"})),
        ({"guided_json": schema}, Form("json_schema", schema)),
        ({"structured_outputs": {"json": "{}"}}, Form("json_schema", "{}")),
        ({"guided_regex": "a"}, Form("regex", "a")),
        ({"structured_outputs": {"regex": "a"}}, Form("regex", "a")),
        ({"guided_choice": ["a"]}, Form("choice", ["a"])),
        ({"structured_outputs": {"choice": ["a"]}}, Form("choice", ["a"])),
        ({"guided_grammar": "g"}, Form("grammar", "g")),
        ({"structured_outputs": {"grammar": "g"}}, Form("grammar", "g")),
    ]  # fmt: skip
    for fields, form in given:
        assert completion(**fields).form == form
        for name in ("ignore_eos", "min_tokens"):
            with pytest.raises(
                ApiError, match=f"{name} asks for tokens after the end.*leave {name} out"
            ) as raised:
                _ = completion(**fields, **{name: name == "ignore_eos" or 1}).form
            assert (raised.value.status, raised.value.param) == (400, name)
    for fields in (
        {"response_format": {"type": "text"}},
        {"structured_outputs": {"json_object": False}},
    ):
        assert completion(**fields, ignore_eos=True, min_tokens=1).form is None
    for fields in (
        {"guided_choice": ["a"], "guided_regex": "b"},
        {"structured_outputs": {"json_object": True}, "guided_regex": "b"},
    ):
        with pytest.raises(ApiError, match="constrained by several fields") as raised:
            _ = completion(**fields).form
        assert raised.value.status == 400


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_what_is_null_is_as_if_it_was_left_out(kind: str, post: Post) -> None:
    known = names(kind) | VLLM.keys() | (OF_CHAT if kind == "chat" else OF_TEXTS).keys()
    assert len(known) > 50
    expected = text_of(post(kind, {}))
    for name in sorted(known - GOOD[kind].keys()):
        assert (name, text_of(post(kind, {name: None}))) == (name, expected)
    assert text_of(post(kind, dict.fromkeys(known - GOOD[kind].keys()))) == expected
    assert text_of(post(kind, {"of_a_later_version": None})) == expected
    required = "messages" if kind == "chat" else None
    if required:
        answer = post(kind, {required: None})
        assert (answer.status_code, answer.json()["error"]["message"]) == (
            400,
            "messages is missing",
        )


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_neutral_values_change_nothing(kind: str, post: Post) -> None:
    neutral = OPENAI | VLLM | (OF_CHAT if kind == "chat" else OF_TEXTS)
    expected = text_of(post(kind, {}))
    for name, values in neutral.items():
        for value in values:
            assert (name, value, text_of(post(kind, {name: value}))) == (name, value, expected)
    together = {name: values[-1] for name, values in neutral.items() if values}
    assert (
        text_of(post(kind, together | ({"function_call": "none"} if kind == "chat" else {})))
        == expected
    )


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_filters_reach_the_graph(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = fake_package(tmp_path / "package", filters=FILTERS)
    begun = record_parameters(monkeypatch)
    with TestClient(
        make_app(ServeSettings(models={"tiny": str(package.path)}, slots=1, threads=1))
    ) as client:
        asked = {
            {"penalty_last_n": "repeat_last_n"}.get(name, name): value
            for name, value in ASKED.items()
        }
        answer = client.post(PATHS[kind], json=GOOD[kind] | asked | {"repeat_penalty": 1.5})
        assert answer.status_code == 200, answer.text
        (row,) = begun
        assert_read(row, {**read_by_the_graph(), "repetition_penalty": 1.5})
        wrong = {
            "mirostat": (1, "mirostat is 1; give 0 (off) or 2 (Mirostat 2.0)"),
            "typical_p": (0, "typical_p is 0; give a number > 0 and <= 1 (1 = off)"),
            "no_repeat_ngram_size": (2.5, "no_repeat_ngram_size is 2.5; give an integer"),
            "bad_words": (["x" * 257], "bad_words is ['xxxx"),
            "dry_sequence_breakers": (
                ["x"] * 1025,
                "dry_sequence_breakers: list should have at most 1024 items",
            ),
            "bad_words_ids": ([[5] * 65], "bad_words_ids is [[5, 5"),
        }
        for name, (value, message) in wrong.items():
            error = client.post(PATHS[kind], json=GOOD[kind] | {name: value}).json()["error"]
            assert error["param"] == name, error
            assert error["message"].startswith(message)
        error = client.post(PATHS[kind], json=GOOD[kind] | {"min_tokens": 9}).json()["error"]
        assert (error["param"], error["message"][:19]) == ("min_tokens", "min_new_tokens is 9")
        twice = client.post(
            PATHS[kind], json=GOOD[kind] | {"repeat_penalty": 1.5, "repetition_penalty": 1.5}
        )
        assert (twice.status_code, twice.json()["error"]["param"]) == (400, "repetition_penalty")


@pytest.mark.slow
def test_filters_of_a_real_graph(exported: Callable[..., Path]) -> None:
    package = exported("llama", filters=FILTERS)
    fields = {
        "typical_p": 0.5,
        "top_n_sigma": -1,
        "no_repeat_ngram_size": 1,
        "bad_words": ["e"],
        "dry_multiplier": 0.5,
    }
    asked = {
        "prompt": "In the",
        "max_tokens": 16,
        "seed": 1,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    with TestClient(
        make_app(ServeSettings(models={"tiny": str(package)}, slots=2, threads=1))
    ) as client:
        answer = client.post(PATHS["text"], json=asked | fields).json()["choices"][0]
    params = SamplingParams(
        **fields | {"top_n_sigma": 0}, max_new_tokens=16, seed=1, eos_token_id=()
    )
    assert answer["token_ids"] == load(package).generate("In the", params).token_ids[0]


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"logit_bias": {"5": 1}}, "--logit-bias"),
        ({"logprobs": 1}, "--logprobs"),
        ({"response_format": {"type": "json_object"}}, "--grammars"),
    ],
)
def test_what_an_export_left_out_is_named_as_one_types_it(
    fields: dict[str, Any], option: str, tmp_path: Path
) -> None:
    package = fake_package(tmp_path / "package")
    with TestClient(
        make_app(ServeSettings(models={"tiny": str(package.path)}, slots=1, threads=1))
    ) as client:
        answer = client.post(PATHS["text"], json={"prompt": "x"} | fields)
    assert answer.status_code == 400
    assert (
        f"--for-serving, which brings all that requests ask for, or with {option}"
        in answer.json()["error"]["message"]
    )


def test_a_bias_of_nothing_needs_no_package_that_takes_biases(
    local_app: Callable[..., TestClient],
) -> None:
    with local_app(slots=1) as client:
        model = client.app.state.server.models.find("tiny")  # type: ignore[attr-defined]
        for bias, expected in (
            ({"5": 0, "6": 0.0}, None),
            ({"5": 0, "6": 1}, {6: 1.0}),
            ({}, None),
        ):
            request = CompletionRequest(prompt="x", max_tokens=4, logit_bias=bias)
            assert (model.sampling_params(request).logit_bias or None) == expected


def test_stop_token_ids_are_added_to_the_models(local_app: Callable[..., TestClient]) -> None:
    with local_app(slots=1) as client:
        model = client.app.state.server.models.find("tiny")  # type: ignore[attr-defined]
        ends = model.model.package.manifest.token_ids.eos
        for options, expected in (
            ({"stop_token_ids": [7, 9]}, {*ends, 7, 9}),
            ({"stop_token_ids": [7], "ignore_eos": True}, {7}),
            ({"ignore_eos": True}, set()),
        ):
            assert {
                *model.sampling_params(CompletionRequest(prompt="x", **options)).eos_token_id
            } == expected  # type: ignore[arg-type]
        body = {"prompt": "In the", "max_tokens": 4, "stop_token_ids": [7]}
        for bias, reason in (({str(ends[0]): 100}, None), ({"7": 100}, 7)):
            choice = client.post("/v1/completions", json={**body, "logit_bias": bias}).json()[
                "choices"
            ][0]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)


def test_the_openai_client_writes_out_what_it_does_not_use(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    options: dict[str, Any] = dict.fromkeys(names("chat") - {"messages", "model"})
    plain = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=6, seed=1
    )
    answer = client.chat.completions.create(
        **options | {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 6, "seed": 1}
    )
    assert answer.choices[0].message == plain.choices[0].message
    options = dict.fromkeys(names("text") - {"prompt", "model"})
    completion = client.completions.create(
        **options | {"model": "tiny", "prompt": "In the", "max_tokens": 6, "seed": 1}
    )
    assert completion.choices[0].text
    # The message of an answer goes back as the client has it, every field that is null included.
    said = answer.choices[0].message.model_dump()
    assert None in said.values()
    again = [*MESSAGES, said, {"role": "user", "content": "And then?"}]
    assert (
        client.chat.completions.create(model="tiny", messages=again, max_tokens=4)
        .choices[0]
        .message.content
    )
    with pytest.raises(openai.BadRequestError, match="audio is not done here") as refused:
        client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            modalities=["text"],
            audio={"voice": "alloy", "format": "wav"},
        )
    assert refused.value.param == "audio"


def test_every_field_has_words_for_clients() -> None:
    assert undescribed(bodies) == []


@pytest.mark.parametrize(
    ("kind", "least", "most", "step"),
    [
        (bodies.Count, 1, 2**31 - 1, 1), (bodies.TokenId, 0, 2**31 - 1, 1), (bodies.Penalty, 1e-6, 1e6, 1e-7),
    ],
)  # fmt: skip
def test_numbers_of_several_bodies(kind: Any, least: float, most: float, step: float) -> None:
    check = TypeAdapter(kind).validate_python
    assert [check(least), check(most)] == [least, most]
    for wrong in (least - step, most + step, True, str(least)):
        with pytest.raises(ValidationError):
            check(wrong)
