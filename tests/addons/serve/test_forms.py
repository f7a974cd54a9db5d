"""Answers in a form, by all APIs: kept by the graph, or by the host."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from starlette.testclient import TestClient

from qsample.runtime import CausalLM, Engine, Request, SamplingParams
from qsample.runtime.call import Call

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
CHATS = (CHAT, RESPONSES, MESSAGES)
TEXT = "And the LORD spake unto Moses"
LIMITS = {
    COMPLETIONS: "max_tokens",
    CHAT: "max_completion_tokens",
    RESPONSES: "max_output_tokens",
    MESSAGES: "max_tokens",
}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["king", "prophet"]},
        "sons": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
# No finite automaton follows these.
ANY_OBJECT = {"type": "json_object"}
TREE = {
    "type": "object",
    "properties": {"left": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["left"],
    "additionalProperties": False,
}
DATE = "[0-9]{4}-(0[1-9]|1[0-2])"
GBNF = 'root ::= "[" item ("," item)? "]"\nitem ::= "yes" | "no"'
FORMS: Mapping[str, dict[str, Any]] = {
    "schema": {"json": PERSON},
    "regex": {"regex": DATE},
    "choice": {"choice": ["just", "wicked", "neither"]},
    "gbnf": {"grammar": GBNF},
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Ur", "Zoar"]}, "days": {"type": "integer", "maximum": 7}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
LocalApp = Callable[..., TestClient]


@pytest.fixture(scope="module")
def client(local_app: LocalApp) -> Iterator[TestClient]:
    with local_app(slots=4) as running:
        yield running


@pytest.fixture(scope="module")
def masks(local_app: LocalApp, masked_package: Path) -> Iterator[TestClient]:
    with local_app(slots=4, models={"tiny": str(masked_package)}) as running:
        yield running


@pytest.fixture(scope="module")
def tables(local_app: LocalApp, tables_package: Path) -> Iterator[TestClient]:
    with local_app(slots=4, models={"tiny": str(tables_package)}) as running:
        yield running


def body_of(path: str, limit: int | None = None, **fields: Any) -> dict[str, Any]:
    """A request in the words of an API."""
    said = [{"role": "user", "content": TEXT}]
    body: dict[str, Any] = {"temperature": 1.4, "seed": 5, **fields}
    if path == COMPLETIONS:
        body["prompt"] = TEXT
    elif path == RESPONSES:
        body["input"] = TEXT
    else:
        body["messages"] = said
    if limit is not None:
        body[LIMITS[path]] = limit
    return body


def in_words_of(path: str, form: dict[str, Any]) -> dict[str, Any]:
    """The fields of a form; a schema's are the API's own."""
    if "json" not in form:
        return {"structured_outputs": form}
    schema = form["json"]
    if path == RESPONSES:
        return {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}
    if path == MESSAGES:
        return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def post(client: TestClient, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def error_of(client: TestClient, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def text_and_reason(path: str, document: dict[str, Any]) -> tuple[str, str]:
    """The text of an answer, and why it ended."""
    if path == COMPLETIONS:
        choice = document["choices"][0]
        return choice["text"], choice["finish_reason"]
    if path == CHAT:
        choice = document["choices"][0]
        return choice["message"]["content"], choice["finish_reason"]
    if path == RESPONSES:
        (item,) = document["output"]
        return item["content"][0]["text"], document["status"]
    (block,) = document["content"]
    return block["text"], document["stop_reason"]


ENDS = {COMPLETIONS: "stop", CHAT: "stop", RESPONSES: "completed", MESSAGES: "end_turn"}


def streamed_text(path: str, stream: str) -> str:
    """The text of an answer's events."""
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    text = ""
    for event in events:
        assert "error" not in event, event
        if path == COMPLETIONS:
            text += "".join(choice["text"] for choice in event["choices"])
        elif path == CHAT:
            text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        elif event["type"] == "response.output_text.delta":
            text += event["delta"]
        elif event["type"] == "content_block_delta":
            text += event["delta"]["text"]
    return text


def keeper_of(path: str, usage: dict[str, Any]) -> str | None:
    """Who kept an answer to its form, by its usage."""
    details = usage
    if path == RESPONSES:
        details = usage["output_tokens_details"]
    elif path != MESSAGES:
        details = usage.get("completion_tokens_details", {})
    keeper: str | None = details.get("structured_outputs")
    return keeper


def check(form: dict[str, Any], text: str) -> None:
    """Fail unless a text follows a form."""
    match form:
        case {"json": schema}:
            value = json.loads(text)
            jsonschema.validate(value, schema)
            assert json.dumps(value, ensure_ascii=False) == text or "\\" in text
        case {"regex": expression}:
            assert re.fullmatch(expression, text)
        case {"choice": texts}:
            assert text in texts
        case {"grammar": _}:
            assert re.fullmatch(r"\[(yes|no)(,(yes|no))?\]", text)


def shortest_of(client: TestClient, path: str, fields: dict[str, Any]) -> int:
    """The number of tokens of the shortest answer, from the refusal of a limit of 1."""
    error = error_of(client, path, **body_of(path, 1, **fields))
    name = LIMITS[path]
    found = re.fullmatch(
        rf"{name} is 1, and the shortest answer that follows the form has (\d+) tokens, its stop "
        r"token included; give at least \1",
        error["message"],
    )
    assert found is not None, error
    if path == MESSAGES:
        assert error["type"] == "invalid_request_error"
    else:
        assert error["param"] == name
    return int(found[1])


@pytest.mark.parametrize("path", LIMITS)
@pytest.mark.parametrize("name", FORMS)
def test_answers_are_whole_at_any_limit(client: TestClient, path: str, name: str) -> None:
    form = FORMS[name]
    fields = in_words_of(path, form)
    shortest = shortest_of(client, path, fields)
    error_of(client, path, **body_of(path, shortest - 1, **fields))
    for limit in (*range(shortest, shortest + 4), 100):
        body = body_of(path, limit, **fields | {"seed": limit})
        text, reason = text_and_reason(path, post(client, path, **body))
        check(form, text)
        assert reason == ENDS[path]
        streamed = client.post(path, json={**body, "stream": True})
        assert streamed_text(path, streamed.text) == text


def test_a_limit_by_the_names_of_its_api(client: TestClient) -> None:
    """The former name of a chat's limit, and the default of completions."""
    fields = in_words_of(CHAT, FORMS["schema"])
    error = error_of(client, CHAT, **body_of(CHAT, **fields), max_tokens=2)
    assert error["param"] == "max_tokens"
    assert error["message"].startswith("max_tokens is 2, and the shortest answer")
    error = error_of(client, COMPLETIONS, **body_of(COMPLETIONS, **fields))
    assert error["message"].startswith("max_tokens is 16, and the shortest answer")
    # Nothing is written, so nothing has to follow the form.
    post(client, COMPLETIONS, **body_of(COMPLETIONS, 0, **fields))


@pytest.mark.ci
@pytest.mark.parametrize("path", LIMITS)
def test_a_context_without_room_for_the_form(
    local_app: LocalApp, client: TestClient, path: str
) -> None:
    fields = in_words_of(path, FORMS["schema"])
    shortest = shortest_of(client, path, fields)
    with local_app(slots=1, ctx_len=shortest + 5) as small:
        error = error_of(small, path, **body_of(path, shortest, **fields))
    assert re.search(
        rf"this model's context {shortest + 5}, and the shortest answer that follows the form "
        rf"{shortest}; give at most 5",
        error["message"],
    )
    with local_app(slots=1, ctx_len=shortest - 1) as smaller:
        error = error_of(smaller, path, **body_of(path, shortest, **fields))
    assert "context" in error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_each_of_several_answers_follows_the_form(
    client: TestClient, path: str, stream: bool
) -> None:
    fields = in_words_of(path, FORMS["schema"])
    alone = [
        text_and_reason(path, post(client, path, **body_of(path, 60, **fields | {"seed": seed})))[0]
        for seed in (5, 6, 7)
    ]
    body = body_of(path, 60, **fields, n=3, stream=stream)
    if stream:
        parts = [
            choice
            for line in client.post(path, json=body).text.splitlines()
            if line.startswith("data: {")
            for choice in json.loads(line[6:])["choices"]
        ]
        texts = ["", "", ""]
        for part in parts:
            new = part["text"] if path == COMPLETIONS else part["delta"].get("content")
            texts[part["index"]] += new or ""
    else:
        choices = post(client, path, **body)["choices"]
        texts = [
            choice["text"] if path == COMPLETIONS else choice["message"]["content"]
            for choice in choices
        ]
    assert texts == alone
    assert len({*texts}) == 3
    for text in texts:
        check(FORMS["schema"], text)


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({}, {}),
        ({"repetition_penalty": 1.3, "presence_penalty": 0.5}, {}),
        ({"top_k": 5, "top_p": 0.9, "frequency_penalty": 1.0}, {}),
        ({"logit_bias": {"5": -3.0}}, {"logit_bias": {5: -3.0}}),
        ({"temperature": 0}, {}),
        ({"stop_token_ids": [7]}, {"eos_token_id": (1, 7)}),
    ],
)
def test_tokens_are_those_of_generate(
    client: TestClient, served_model: CausalLM, fields: dict[str, Any], params: dict[str, Any]
) -> None:
    body = body_of(COMPLETIONS, 60, **in_words_of(COMPLETIONS, FORMS["schema"]), logprobs=2)
    answer = post(client, COMPLETIONS, **{**body, **fields, "return_token_ids": True})["choices"][0]
    grammar = served_model.grammar(json=PERSON)
    values = {"temperature": 1.4, **fields, "max_new_tokens": 60, **params}
    if "eos_token_id" in params:
        del values["stop_token_ids"]
        values["eos_token_id"] = (*served_model.package.manifest.token_ids.eos, 7)
    output = served_model.generate(TEXT, SamplingParams(**values), seed=5, grammar=grammar)
    assert answer["token_ids"] == output.token_ids[0]
    assert answer["finish_reason"] == "stop"
    assert len(answer["logprobs"]["tokens"]) == len(output.token_ids[0])
    if "stop_token_ids" not in fields:
        check(FORMS["schema"], answer["text"])


def test_a_stop_string_ends_an_answer_before_its_form(client: TestClient) -> None:
    fields = in_words_of(CHAT, FORMS["schema"])
    whole, _ = text_and_reason(CHAT, post(client, CHAT, **body_of(CHAT, 60, **fields)))
    choice = post(client, CHAT, **body_of(CHAT, 60, **fields, stop=['", "age']))["choices"][0]
    assert choice["message"]["content"] == whole.partition('", "age')[0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", '", "age')


def demanded(path: str, tool: str | None) -> dict[str, Any]:
    """The fields of a request that demands calls, of a tool or of any."""
    if path == MESSAGES:
        return {
            "tools": [{"name": "weather", "input_schema": WEATHER}],
            "tool_choice": {"type": "any"} if tool is None else {"type": "tool", "name": tool},
        }
    if path == RESPONSES:
        return {
            "tools": [{"type": "function", "name": "weather", "parameters": WEATHER}],
            "tool_choice": "required" if tool is None else {"type": "function", "name": tool},
        }
    named: Any = {"type": "function", "function": {"name": tool}}
    return {
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}],
        "tool_choice": "required" if tool is None else named,
    }


def calls_and_reason(path: str, document: dict[str, Any]) -> tuple[list[tuple[str, Any]], str]:
    """The calls of an answer, and why it ended."""
    if path == CHAT:
        choice = document["choices"][0]
        functions = [call["function"] for call in choice["message"]["tool_calls"]]
        calls = [(function["name"], json.loads(function["arguments"])) for function in functions]
        return calls, choice["finish_reason"]
    if path == RESPONSES:
        items = [item for item in document["output"] if item["type"] == "function_call"]
        calls = [(item["name"], json.loads(item["arguments"])) for item in items]
        return calls, document["status"]
    return [(block["name"], block["input"]) for block in document["content"]], document[
        "stop_reason"
    ]


@pytest.mark.parametrize("path", CHATS)
@pytest.mark.parametrize("tool", [None, "weather"])
def test_demanded_calls(client: TestClient, path: str, tool: str | None) -> None:
    fields = demanded(path, tool)
    shortest = shortest_of(client, path, fields)
    ends = {
        CHAT: "stop" if tool else "tool_calls",
        RESPONSES: "completed",
        MESSAGES: "tool_use",
    }
    for limit in (shortest, shortest + 1, shortest + 40):
        body = body_of(path, limit, **fields | {"seed": limit})
        calls, reason = calls_and_reason(path, post(client, path, **body))
        assert reason == ends[path]
        assert calls
        for name, arguments in calls:
            assert name == "weather"
            jsonschema.validate(arguments, WEATHER)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("fields", "keeper"),
    [
        ({"structured_outputs": {"regex": DATE}}, "graph"),
        ({"structured_outputs": {"grammar": 'start: "yes"'}}, "host"),
        ({"response_format": ANY_OBJECT}, "host"),
        ({"structured_outputs": {"json": TREE}}, "host"),
        ({}, None),
    ],
)
def test_who_keeps_the_form(
    client: TestClient, path: str, fields: dict[str, Any], keeper: str | None
) -> None:
    def counted(name: str) -> float:
        text = client.get("/metrics").text
        label = f'{{keeper="{name}",model_name="tiny"}}'
        found = re.search(
            rf"^qsample:structured_outputs_total{re.escape(label)} (\S+)$", text, re.M
        )
        return float(found[1]) if found else 0.0

    before = {name: counted(name) for name in ("graph", "host")}
    body = body_of(path, 24, **fields, n=2)
    usage = post(client, path, **body)["usage"]
    details = {} if keeper is None else {"structured_outputs": keeper}
    assert usage.get("completion_tokens_details", {}) == details
    assert {name: counted(name) - before[name] for name in before} == {
        name: 2 * (name == keeper) for name in before
    }
    options = {"stream": True, "stream_options": {"include_usage": True}}
    lines = client.post(path, json=body | options).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    streamed = events[-1]["usage"]
    assert streamed.get("completion_tokens_details", {}) == details


# Schemas as clients write them.

FILE = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "path", "maxLength": 4},
        "secret": {"anyOf": [{"$ref": "#/$defs/secret"}, {"type": "null"}]},
    },
    "required": ["file", "secret"],
    "additionalProperties": False,
    "$defs": {
        "secret": {"type": "string", "format": "password", "maxLength": 2, "writeOnly": True}
    },
}
# Its tables would have to count.
COUNTED = FILE | {
    "properties": FILE["properties"]
    | {"third": {"type": "integer", "format": "int64", "multipleOf": 3}}
}


@pytest.mark.parametrize("path", LIMITS)
@pytest.mark.parametrize(("schema", "keeper"), [(FILE, "graph"), (COUNTED, "host")])
def test_a_format_that_nobody_knows_restricts_nothing(
    client: TestClient, path: str, schema: dict[str, Any], keeper: str
) -> None:
    document = post(client, path, **body_of(path, 60, **in_words_of(path, {"json": schema})))
    text, reason = text_and_reason(path, document)
    assert text.startswith('{"file": "')
    if keeper == "graph" or reason not in ("length", "incomplete", "max_tokens"):
        jsonschema.validate(json.loads(text), schema)
    assert keeper_of(path, document["usage"]) == keeper


def tools_of(path: str, schemas: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request that demands calls of some functions."""
    if path == MESSAGES:
        tools = [{"name": name, "input_schema": schemas[name]} for name in schemas]
        return {"tools": tools, "tool_choice": {"type": "any"}}
    functions = [{"name": name, "parameters": schemas[name]} for name in schemas]
    if path == RESPONSES:
        tools = [{"type": "function", **function} for function in functions]
    else:
        tools = [{"type": "function", "function": function} for function in functions]
    return {"tools": tools, "tool_choice": "required"}


@pytest.mark.parametrize("path", CHATS)
@pytest.mark.parametrize(("schema", "keeper"), [(FILE, "graph"), (COUNTED, "host")])
def test_one_tool_with_an_unknown_format_among_others(
    client: TestClient, path: str, schema: dict[str, Any], keeper: str
) -> None:
    schemas = {"now": {"type": "object", "properties": {}}, "read": schema}
    document = post(client, path, **body_of(path, 40, **tools_of(path, schemas)))
    assert keeper_of(path, document["usage"]) == keeper
    if keeper == "graph":
        calls, _ = calls_and_reason(path, document)
        assert calls
        for name, arguments in calls:
            jsonschema.validate(arguments, schemas[name])


REFUSED: list[tuple[Any, str]] = [
    ({"type": "string", "not": {"pattern": "x"}}, "#/properties/a~1b/not"),
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "#/properties/a~1b/uniqueItems"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#/properties/a~1b/oneOf"),
    ({"type": "string", "pattern": "(?=x)x"}, "#/properties/a~1b/pattern"),
    ({"type": "thing"}, "#/properties/a~1b/type"),
    ({"$ref": "other.json"}, "#/properties/a~1b/$ref"),
]  # fmt: skip


@pytest.mark.parametrize("path", LIMITS)
@pytest.mark.parametrize(("part", "pointer"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_not_kept_is_refused_by_its_place(
    client: TestClient, masks: TestClient, path: str, part: Any, pointer: str
) -> None:
    schema = {"type": "object", "properties": {"a/b": part}, "x-guidance": {"lenient": True}}
    for app in (client, masks):
        requests = [in_words_of(path, {"json": schema})]
        if path in CHATS:
            requests.append(tools_of(path, {"now": {}, "weather": schema}))
        for fields, is_tool in zip(requests, (False, True), strict=False):
            message = error_of(app, path, **body_of(path, 50, **fields))["message"]
            assert f" {pointer}: " in message
            assert "; " in message
            assert ("of the arguments of weather: " in message) == is_tool
            for foreign in ("lenient", "guidance", "coerce", "Unimplemented"):
                assert foreign not in message


@pytest.mark.parametrize("path", LIMITS)
def test_clients_have_no_options_of_llguidance(masks: TestClient, path: str) -> None:
    """One of them would write blanks as it likes. A property of the same name is a property."""
    schema = {
        "x-guidance": {"whitespace_flexible": True, "item_separator": ";"},
        "type": "object",
        "properties": {
            "x-guidance": {"enum": [1, 2], "x-guidance": {"lenient": True}},
            "b": {"type": "boolean"},
        },
        "required": ["x-guidance", "b"],
        "additionalProperties": False,
    }
    text, _ = text_and_reason(
        path, post(masks, path, **body_of(path, 60, **in_words_of(path, {"json": schema})))
    )
    assert re.fullmatch(r'\{"x-guidance": [12], "b": (true|false)\}', text)


# Packages of a single kind.


@pytest.mark.parametrize("path", LIMITS)
@pytest.mark.parametrize("name", FORMS)
def test_a_package_with_masks_alone(masks: TestClient, path: str, name: str) -> None:
    """The host keeps every form, and a limit may cut an answer off."""
    form = FORMS[name]
    fields = in_words_of(path, form)
    document = post(masks, path, **body_of(path, 200, **fields))
    check(form, text_and_reason(path, document)[0])
    assert keeper_of(path, document["usage"]) == "host"
    cut, reason = text_and_reason(path, post(masks, path, **body_of(path, 1, **fields)))
    assert reason in ("length", "incomplete", "max_tokens")
    assert len(cut) < len(text_and_reason(path, document)[0])


@pytest.mark.parametrize("tool", [None, "weather"])
def test_calls_that_are_cut_off(masks: TestClient, tool: str | None) -> None:
    """An answer that is cut off has what there is of a call, and never its JSON as a text."""
    fields = demanded(CHAT, tool)
    for limit in (1, 8, 15):
        choice = post(masks, CHAT, **body_of(CHAT, limit, **fields))["choices"][0]
        assert choice["message"]["content"] is None
        assert choice["finish_reason"] == "length"
        for call in choice["message"].get("tool_calls", []):
            assert call["function"]["name"] == "weather"


@pytest.mark.parametrize("path", LIMITS)
@pytest.mark.parametrize("name", FORMS)
def test_a_package_with_tables_alone(tables: TestClient, path: str, name: str) -> None:
    fields = in_words_of(path, FORMS[name])
    shortest = shortest_of(tables, path, fields)
    document = post(tables, path, **body_of(path, shortest, **fields))
    check(FORMS[name], text_and_reason(path, document)[0])
    assert keeper_of(path, document["usage"]) == "graph"
    free = post(tables, path, **body_of(path, shortest))
    assert keeper_of(path, free["usage"]) is None


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"json_object": True}, "any object"),
        ({"json": TREE}, "#/properties/left"),
        ({"json": {"type": "integer", "multipleOf": 3}}, "multipleOf"),
        ({"grammar": 'start: "yes"'}, "Lark"),
    ],
)
def test_tables_alone_follow_no_other_form(
    tables: TestClient, form: dict[str, Any], words: str
) -> None:
    for path in LIMITS:
        error = error_of(tables, path, **body_of(path, 50, structured_outputs=form))
        message = error["message"]
        assert "answers of this package cannot follow that form" in message
        assert words in message
        assert "export the model with --for-serving, or give a form that docs/" in message
    assert post(tables, COMPLETIONS, **body_of(COMPLETIONS, 4))["choices"][0]["text"]


def test_tables_alone_score_no_prompt(tables: TestClient) -> None:
    error = error_of(tables, COMPLETIONS, **body_of(COMPLETIONS, 4), prompt_logprobs=1)
    assert "--allowed-tokens" in error["message"]


# Reads.


@pytest.mark.parametrize(
    ("fields", "is_read_every_step"),
    [
        ({"structured_outputs": {"json": PERSON}}, False),
        ({"structured_outputs": {"regex": DATE}, "stream": True}, False),
        ({"tools": demanded(CHAT, None)["tools"], "tool_choice": "required"}, False),
        ({"structured_outputs": {"json": TREE}}, True),
    ],
)
def test_the_graph_waits_for_no_read(
    local_app: LocalApp,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    is_read_every_step: bool,
) -> None:
    """Steps are read four at a time while an answer follows tables, and one by one for masks."""
    requests: list[Request] = []
    plain = Engine.add

    def noted(self: Engine, call: Call, **options: Any) -> list[Request]:
        added = plain(self, call, **options)
        requests.extend(added)
        return added

    monkeypatch.setattr(Engine, "add", noted)
    monkeypatch.setattr("qsample.runtime.engine.choose_flush_every", lambda *_: 4)
    with local_app(slots=2) as late:
        answer = late.post(CHAT, json=body_of(CHAT, 60, **fields))
        assert answer.status_code == 200, answer.text
    (request,) = requests
    assert request._sequence.request.is_read_every_step == is_read_every_step
