"""Thoughts before an answer: before a form, and limited by a budget, in the words of each API."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from qsample.addons.serve.models import ServedModels
from qsample.addons.serve.parsers import REASONING_FORMATS
from qsample.addons.serve.settings import ServeSettings
from qsample.runtime import CausalLM

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
DATE = "[0-9]{4}-(0[1-9]|1[0-2])"
FORM = {"structured_outputs": {"regex": DATE}}
SAID = [{"role": "user", "content": "And the LORD spake unto Moses"}]
LocalApp = Callable[..., TestClient]


def template(name: str, *, opens: bool) -> str:
    """A chat template that ends the thoughts if enable_thinking is false, and else opens them or leaves that to the
    model."""
    marks = REASONING_FORMATS[name]
    opening = f"{marks.start}\n" if opens else ""
    return (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:"
        "{% if enable_thinking is defined and enable_thinking is false %}"
        f"{marks.start}\n\n{marks.end}\n\n"
        f"{{% else %}}{opening}{{% endif %}}{{% endif %}}"
    )


QUICK_NAMES = ("deepseek_r1", "granite")
NAMES = [
    pytest.param(name, marks=() if name in QUICK_NAMES else pytest.mark.ci)
    for name in REASONING_FORMATS
]


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    parser: str = request.param
    return parser


@pytest.fixture(scope="module", params=[True, False], ids=["opens", "leaves"])
def opens(request: pytest.FixtureRequest) -> bool:
    given: bool = request.param
    return given


@pytest.fixture(scope="module")
def client(local_app: LocalApp, name: str, opens: bool) -> Iterator[TestClient]:
    chat_template = template(name, opens=opens)
    with local_app(slots=4, reasoning_parser=name, chat_template=chat_template) as running:
        yield running


@pytest.fixture(scope="module")
def qwen(local_app: LocalApp) -> Iterator[TestClient]:
    chat_template = template("qwen3", opens=True)
    with local_app(slots=4, reasoning_parser="qwen3", chat_template=chat_template) as running:
        yield running


def body_of(**fields: Any) -> dict[str, Any]:
    return {"messages": SAID, "temperature": 1.5, "seed": 3, "max_tokens": 60, **fields}


def post(client: TestClient, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    answer = client.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def error_of(client: TestClient, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    answer = client.post(path, json=fields)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def streamed(client: TestClient, **fields: Any) -> tuple[str | None, str | None]:
    """The thoughts and the text of an answer's events."""
    lines = client.post(CHAT, json={**fields, "stream": True}).text.splitlines()
    thoughts = text = ""
    for line in lines:
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                thoughts += choice["delta"].get("reasoning") or ""
                text += choice["delta"].get("content") or ""
    return thoughts or None, text or None


def check_budget(model: CausalLM, ids: list[int], end: str, budget: int) -> None:
    """Fail unless the thoughts have ended, and the tokens after the budget belong to their end."""
    assert model.tokenizer is not None
    thoughts, mark, _ = model.tokenizer.decode(ids).partition(end)
    assert mark
    assert len(thoughts) <= len(model.tokenizer.decode(ids[:budget]))


@pytest.mark.parametrize("budget", [0, 1, 7, -1, None])
def test_thoughts_come_before_a_form(
    client: TestClient,
    served_model: CausalLM,
    name: str,
    opens: bool,
    budget: int | None,
) -> None:
    """The model writes random text: only the budget, or the limit of the answer, ends its thoughts."""
    is_open = opens or REASONING_FORMATS[name].from_start
    for seed in range(3):
        fields = body_of(**FORM, seed=seed, thinking_token_budget=budget, return_token_ids=True)
        document = post(client, **fields)
        (choice,) = document["choices"]
        message = choice["message"]
        assert re.fullmatch(DATE, message["content"])
        assert choice["finish_reason"] == "stop"
        assert document["usage"]["completion_tokens_details"] == {"structured_outputs": "graph"}
        if not is_open:
            assert message.get("reasoning") is None, "it does not begin any by chance"
        elif budget in (0, 1, 7):
            check_budget(served_model, choice["token_ids"], REASONING_FORMATS[name].end, budget)
        else:
            assert message["reasoning"]
        assert streamed(client, **fields) == (message.get("reasoning"), message["content"])


@pytest.mark.parametrize("budget", [0, 3])
def test_a_model_that_begins_its_thoughts(
    client: TestClient, served_model: CausalLM, name: str, budget: int
) -> None:
    """A bias makes the model begin the mark, and the form allows nothing else from there on."""
    assert served_model.tokenizer is not None
    marks = REASONING_FORMATS[name]
    (first,) = served_model.tokenizer.encode(marks.start[0], add_special_tokens=False)
    fields = body_of(**FORM, thinking_token_budget=budget, logit_bias={str(first): 100})
    (choice,) = post(client, **fields, return_token_ids=True)["choices"]
    message = choice["message"]
    assert re.fullmatch(DATE, message["content"])
    assert choice["finish_reason"] == "stop"
    text = served_model.tokenizer.decode(choice["token_ids"])
    assert marks.end in text
    assert streamed(client, **fields) == (message.get("reasoning"), message["content"])


def test_each_of_several_answers_thinks(client: TestClient) -> None:
    choices = post(client, **body_of(**FORM, thinking_token_budget=5, n=3))["choices"]
    alone = [
        post(client, **body_of(**FORM, thinking_token_budget=5, seed=seed))["choices"][0]["message"]
        for seed in (3, 4, 5)
    ]
    assert [choice["message"] for choice in choices] == alone


def test_thoughts_that_are_not_shown(client: TestClient) -> None:
    fields = body_of(**FORM, thinking_token_budget=4)
    shown = post(client, **fields)["choices"][0]["message"]
    hidden = post(client, **fields, include_reasoning=False)["choices"][0]["message"]
    assert hidden["content"] == shown["content"]
    assert "reasoning" not in hidden
    assert streamed(client, **fields, include_reasoning=False) == (None, shown["content"])


@pytest.mark.parametrize("form", [FORM, {}], ids=["form", "text"])
def test_a_prompt_past_the_thoughts(client: TestClient, form: dict[str, Any]) -> None:
    """The form comes at once, and a budget has nothing to limit."""
    for extra in (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {
            "messages": [*SAID, {"role": "assistant", "content": "2"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
    ):
        fields = body_of(**form, max_tokens=12, thinking_token_budget=0) | extra
        (choice,) = post(client, **fields)["choices"]
        assert "reasoning" not in choice["message"]
        if form:
            assert re.fullmatch(DATE, choice["message"]["content"])
            assert choice["finish_reason"] == "stop"
        del fields["thinking_token_budget"]
        assert post(client, **fields)["choices"][0]["message"] == choice["message"]


@pytest.mark.parametrize("budget", [0, 7])
def test_a_budget_without_a_form(
    client: TestClient, served_model: CausalLM, name: str, opens: bool, budget: int
) -> None:
    """It changes no token before it is spent, and is no form in the usage."""
    fields = body_of(max_tokens=40, return_token_ids=True, ignore_eos=True)
    free = post(client, **fields)["choices"][0]
    document = post(client, **fields, thinking_token_budget=budget)
    (choice,) = document["choices"]
    assert "completion_tokens_details" not in document["usage"]
    assert choice["finish_reason"] == "length"
    ids = choice["token_ids"]
    assert ids[:budget] == free["token_ids"][:budget]
    if opens or REASONING_FORMATS[name].from_start:
        check_budget(served_model, ids, REASONING_FORMATS[name].end, budget)
    else:
        assert ids == free["token_ids"], "it does not think"


# The words of each API.


@pytest.mark.parametrize("form", [FORM, {}], ids=["form", "text"])
def test_budgets_in_the_words_of_each_api(qwen: TestClient, form: dict[str, Any]) -> None:
    """The same tokens by all of them."""
    fields: dict[str, Any] = {"temperature": 1.5, "seed": 3, **form}
    for budget in (0, 1, 7, -1):
        chat = body_of(**form)
        message = post(qwen, **chat, thinking_token_budget=budget)["choices"][0]["message"]
        other = post(qwen, **chat, thinking_budget_tokens=budget)["choices"][0]["message"]
        assert other == message
        for field in ("thinking_token_budget", "thinking_budget_tokens"):
            items = post(
                qwen, RESPONSES, input=SAID[0]["content"], max_output_tokens=60, **fields,
                **{field: budget},
            )["output"]  # fmt: skip
            texts = {item["type"]: item["content"][0]["text"] for item in items if item["content"]}
            assert texts.get("reasoning") == message.get("reasoning")
            assert (texts.get("message") or None) == message["content"]
        if budget > 0:
            thinking = {"type": "enabled", "budget_tokens": budget}
            content = post(
                qwen, MESSAGES, messages=SAID, max_tokens=60, thinking=thinking, **fields
            )["content"]
            blocks = {block["type"]: block[block["type"]] for block in content}
            assert blocks.get("thinking") == message.get("reasoning")
            assert blocks.get("text") == message["content"]


def test_values_that_are_no_budgets(qwen: TestClient) -> None:
    for field in ("thinking_token_budget", "thinking_budget_tokens"):
        for value in (-2, 1.5, "7", True):
            error = error_of(qwen, **body_of(**{field: value}))
            assert error["param"] == field
        fields = {"prompt": "x", field: 5}
        error = error_of(qwen, COMPLETIONS, **fields)
        assert error["param"] == field
        assert "/v1/chat/completions takes it" in error["message"]
        assert error_of(qwen, MESSAGES, **body_of(**{field: 5}))["message"].endswith(
            "is not done here; give thinking.budget_tokens"
        )
        post(qwen, COMPLETIONS, prompt="x", max_tokens=1, **{field: -1})
        post(qwen, MESSAGES, **body_of(**{field: -1}))
    error_of(qwen, MESSAGES, **body_of(thinking={"type": "enabled", "budget_tokens": 0}))


def test_a_budget_beside_allowed_tokens(qwen: TestClient) -> None:
    """A grammar would end the thoughts with tokens that may not come."""
    fields = body_of(allowed_token_ids=[67], max_tokens=3)
    error = error_of(qwen, **fields, thinking_token_budget=5)
    assert error["param"] == "allowed_token_ids"
    assert "or give thinking_token_budget: -1" in error["message"]
    document = post(qwen, **fields, thinking_token_budget=-1)
    assert document["usage"]["completion_tokens"] == 3


def test_anthropics_switches(qwen: TestClient) -> None:
    """Thoughts that are disabled or omitted are not shown."""
    fields = body_of(**FORM)
    for thinking in ({"type": "disabled"}, {"type": "adaptive", "display": "omitted"}):
        document = post(qwen, MESSAGES, **fields, thinking=thinking)
        (block,) = document["content"]
        assert re.fullmatch(DATE, block["text"])
        assert document["stop_reason"] == "end_turn"


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_thoughts_then_demanded_calls(qwen: TestClient, path: str) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    if path == CHAT:
        function = {"name": "f", "parameters": schema}
        fields = body_of(
            tools=[{"type": "function", "function": function}],
            tool_choice="required",
            thinking_token_budget=6,
        )
        (choice,) = post(qwen, **fields)["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["reasoning"]
        calls = [
            json.loads(call["function"]["arguments"]) for call in choice["message"]["tool_calls"]
        ]
    else:
        fields = body_of(
            tools=[{"name": "f", "input_schema": schema}],
            tool_choice={"type": "any"},
            thinking={"type": "enabled", "budget_tokens": 6},
        )
        document = post(qwen, MESSAGES, **fields)
        assert document["stop_reason"] == "tool_use"
        thoughts, *used = document["content"]
        assert thoughts["type"] == "thinking"
        calls = [block["input"] for block in used]
    assert calls
    assert all(isinstance(arguments["n"], int) for arguments in calls)


def test_blanks_of_a_form_stay(qwen: TestClient) -> None:
    """Between thoughts and the form are at most two line feeds; other blanks are the form's own."""
    for seed in range(4):
        fields = body_of(structured_outputs={"choice": [" yes", "\tno"]}, seed=seed)
        message = post(qwen, **fields, thinking_token_budget=2)["choices"][0]["message"]
        assert message["content"] in (" yes", "\tno")
        assert streamed(qwen, **fields, thinking_token_budget=2)[1] == message["content"]


def test_a_form_by_masks_has_no_thoughts(qwen: TestClient) -> None:
    fields = body_of(structured_outputs={"grammar": 'start: "yes" | "no"'})
    for budget in (None, 5):
        document = post(qwen, **fields, thinking_token_budget=budget)
        message = document["choices"][0]["message"]
        assert message["content"] in ("yes", "no")
        assert "reasoning" not in message
        assert document["usage"]["completion_tokens_details"] == {"structured_outputs": "host"}


# The server's default.


def test_a_default_that_requests_override(local_app: LocalApp, served_model: CausalLM) -> None:
    chat_template = template("qwen3", opens=True)
    options = {"reasoning_parser": "qwen3", "chat_template": chat_template}
    with local_app(slots=2, **options, reasoning_budget=3) as client:
        for fields, budget in (
            ({}, 3),
            ({"thinking_token_budget": 1}, 1),
            ({"thinking_token_budget": 9}, 9),
            # Neither is an error with a budget.
            ({"min_tokens": 20}, 3),
            ({"ignore_eos": True, "stop": ["#"]}, 3),
        ):
            body = body_of(**fields, return_token_ids=True)
            ids = post(client, **body)["choices"][0]["token_ids"]
            check_budget(served_model, ids, "</think>", budget)
        message = post(client, **body_of(thinking_token_budget=-1))["choices"][0]["message"]
        assert message["content"] is None, "the thoughts end with the answer"
        thinking = {"type": "enabled", "budget_tokens": 8}
        long = post(client, MESSAGES, **body_of(thinking=thinking))["content"]
        short = post(client, MESSAGES, **body_of())["content"]
        assert long[0]["thinking"].startswith(short[0]["thinking"])
        assert len(long[0]["thinking"]) > len(short[0]["thinking"])
        # A completion has no thoughts.
        post(client, COMPLETIONS, prompt="x", max_tokens=4)


def test_a_budget_without_a_parser(local_app: LocalApp) -> None:
    with local_app(slots=1) as client:
        for path, fields in (
            (CHAT, body_of(thinking_token_budget=5)),
            (RESPONSES, {"input": "x", "thinking_token_budget": 5}),
        ):
            error = error_of(client, path, **fields)
            assert error["param"] == "thinking_token_budget"
            assert "start it with --reasoning-parser" in error["message"]
        post(client, CHAT, **body_of(thinking_token_budget=-1))
        thinking = {"type": "enabled", "budget_tokens": 5}
        ignored = post(client, MESSAGES, **body_of(thinking=thinking))
        plain = post(client, MESSAGES, **body_of())
        assert ignored["content"] == plain["content"]


def test_a_budget_without_tables(local_app: LocalApp, masked_package: Path) -> None:
    options: Any = {"models": {"tiny": str(masked_package)}, "reasoning_parser": "qwen3"}
    with local_app(slots=1, **options) as client:
        error = error_of(client, CHAT, **body_of(thinking_token_budget=5))
        assert "exported without grammars; export it with --for-serving" in error["message"]
        thinking = {"type": "enabled", "budget_tokens": 5}
        post(client, MESSAGES, **body_of(thinking=thinking))


def test_a_default_that_no_model_can_keep(served_package: Path, masked_package: Path) -> None:
    for package, options, words in (
        (served_package, {}, "reasoning_budget is given without reasoning_parser"),
        (masked_package, {"reasoning_parser": "qwen3"}, "exported without grammars"),
    ):
        settings = ServeSettings(models={"tiny": str(package)}, reasoning_budget=5, **options)
        with pytest.raises(ValueError, match=words):
            ServedModels(settings)
    with pytest.raises(ValueError, match="reasoning_budget is -2; give -1 or more"):
        ServeSettings(models={"tiny": "x"}, reasoning_budget=-2)
