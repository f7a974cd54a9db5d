"""Conversations with tools, in all three APIs: the second turn, and what answers say of things that were ignored."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.helpers.servers import TOOL_TEMPLATE
from tests.request.text.test_template_reading import IS_NONE, JOINED

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
FUNCTION = {
    "name": "now",
    "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = [{"type": "function", "function": FUNCTION}]
USER = {"role": "user", "content": "Time?"}


@pytest.fixture(scope="module")
def client(local_app: Callable[..., TestClient]) -> Iterator[TestClient]:
    with local_app(slots=2, trust_request_chat_template=True) as running:
        yield running


def ask(client: TestClient, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer


def prompt(client: TestClient, **body: Any) -> str:
    answer = ask(client, "/tokenize", return_token_strs=True, **body)
    return "".join(answer.json()["token_strs"])


@pytest.mark.parametrize("template", [TOOL_TEMPLATE, JOINED, IS_NONE])
def test_an_answer_goes_back_as_it_came(client: TestClient, template: str) -> None:
    shared: dict[str, Any] = {"chat_template": template, "temperature": 0}
    answer = ask(
        client, CHAT, messages=[USER], tools=TOOLS, tool_choice="required", max_tokens=60, **shared
    )
    said = answer.json()["choices"][0]["message"]
    assert said["content"] is None
    result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "12:00"}
    for content in (None, "", []):
        messages = [USER, said | {"content": content}, result]
        ask(client, CHAT, messages=messages, max_tokens=4, **shared)
    del said["content"]
    ask(client, CHAT, messages=[USER, said, result], max_tokens=4, **shared)

    answer = ask(
        client, RESPONSES, input="Time?", tools=[{"type": "function", **FUNCTION}],
        tool_choice="required", max_output_tokens=60, **shared,
    ).json()  # fmt: skip
    call = answer["output"][-1]
    for output in ("12:00", [{"type": "input_text", "text": "12:00"}], []):
        item = {"type": "function_call_output", "call_id": call["call_id"], "output": output}
        items = [USER, *answer["output"], item]
        ask(client, RESPONSES, input=items, max_output_tokens=4, **shared)

    tool = {"name": "now", "input_schema": FUNCTION["parameters"]}
    answer = ask(
        client, MESSAGES, messages=[USER], tools=[tool], tool_choice={"type": "any"}, max_tokens=60,
        **shared,
    ).json()  # fmt: skip
    use = answer["content"][-1]
    for content in ("12:00", [{"type": "text", "text": "12:00"}], [], None, "absent"):
        block = {"type": "tool_result", "tool_use_id": use["id"], "content": content}
        if content == "absent":
            del block["content"]
        messages = [
            USER,
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": [block]},
        ]
        ask(client, MESSAGES, messages=messages, max_tokens=4, **shared)


def test_the_same_prompt_for_every_empty_content(client: TestClient) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c", "content": "12:00"}
    for template in (JOINED, IS_NONE):
        prompts = set()
        for content in (None, "", [], [{"type": "text", "text": ""}]):
            calling = {"role": "assistant", "content": content, "tool_calls": [call]}
            messages = [USER, calling, result]
            prompts.add(prompt(client, messages=messages, chat_template=template))
        assert len(prompts) == 1
    for content in ([], "", None):
        messages = [{"role": "user", "content": content}, USER]
        assert prompt(client, messages=messages, chat_template=JOINED) == "<user><user>Time?"


def test_what_is_ignored_is_named_and_counted(client: TestClient) -> None:
    def count(field: str) -> float:
        label = f'qsample:request_fields_ignored_total{{field="{field}",model_name="tiny"}} '
        lines = client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(label))

    body = {
        "messages": [{**USER, "mood": "good"}],
        "client_metadata": {"a": 1},
        "stream_options": {"include_usage": True, "include_timing": True},
        "tools": [{"type": "function", "function": FUNCTION | {"cost": 3}, "icon": "x"}],
        "max_tokens": 4,
        "stream": True,
    }
    wanted = {"client_metadata", "cost", "icon", "include_timing"}
    before = {name: count(name) for name in (*wanted, "tools")}
    answer = ask(client, CHAT, **body)
    assert set(answer.headers["X-Qsample-Ignored"].split(", ")) == wanted
    assert {name: count(name) - before[name] for name in wanted} == dict.fromkeys(wanted, 1)
    answer = ask(client, CHAT, **body, chat_template=JOINED)
    assert set(answer.headers["X-Qsample-Ignored"].split(", ")) == wanted | {"tools"}
    assert count("tools") == before["tools"] + 1
    plain = ask(client, CHAT, messages=[USER], max_tokens=4, unused=None)
    assert "X-Qsample-Ignored" not in plain.headers
    strange = ask(client, "/v1/completions", prompt="x", max_tokens=1, **{"a\r\nSet-Cookie: b": 1})
    assert strange.headers["X-Qsample-Ignored"] == "other"
    assert "Set-Cookie" not in strange.headers


def test_tools_of_a_namespace(client: TestClient) -> None:
    inner = {"type": "function", "name": "now", "parameters": FUNCTION["parameters"]}
    tools = [
        {"type": "namespace", "name": "mcp__clock__", "description": "Clocks.", "tools": [inner]},
        {"type": "web_search", "external_web_access": True},
        {**inner, "name": "later"},
    ]
    body = {"input": "Time?", "tools": tools, "max_output_tokens": 60, "temperature": 0}
    named = {"type": "function", "name": "now", "namespace": "mcp__clock__"}
    answer = ask(client, RESPONSES, tool_choice=named, **body)
    assert answer.headers["X-Qsample-Ignored"] == "tools.web_search"
    call = answer.json()["output"][-1]
    assert (call["type"], call["namespace"], call["name"]) == (
        "function_call",
        "mcp__clock__",
        "now",
    )
    streamed = ask(client, RESPONSES, tool_choice=named, stream=True, **body).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    (done,) = (event for event in events if event["type"] == "response.output_item.done")
    assert (done["item"]["namespace"], done["item"]["name"]) == ("mcp__clock__", "now")
    later = {"type": "function", "name": "later"}
    call = ask(client, RESPONSES, tool_choice=later, **body).json()["output"][-1]
    assert call["name"] == "later"
    assert "namespace" not in call
    wrong = client.post(
        RESPONSES, json={**body, "tool_choice": {"type": "function", "name": "now"}}
    )
    assert wrong.status_code == 400
    printed = "{{ tools[0].function.name }}{{ messages[-1].tool_calls[0].function.name }}"
    item = {
        "type": "function_call", "call_id": "c", "name": "now", "namespace": "mcp__clock__",
        "arguments": "{}",
    }  # fmt: skip
    counted = ask(
        client, RESPONSES, input=[USER, item], tools=tools[:1], chat_template=printed,
        max_output_tokens=1,
    ).json()  # fmt: skip
    both = "mcp__clock__now" * 2
    assert (
        counted["usage"]["input_tokens"]
        == ask(client, "/tokenize", prompt=both, add_special_tokens=False).json()["count"]
    )


def test_claude_codes_billing_line_spoils_no_prefix(client: TestClient) -> None:
    def cached(cch: str, as_text: bool) -> int:
        line = f"x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli; cch={cch};"
        rest = "In the beginning God created the heaven and the earth."
        blocks = [{"type": "text", "text": line}, {"type": "text", "text": rest}]
        system = f"{line}\n{rest}" if as_text else blocks
        answer = ask(client, MESSAGES, messages=[USER], system=system, max_tokens=2)
        return int(answer.json()["usage"]["cache_read_input_tokens"])

    cached("36ee5", False)
    for place, cch in enumerate(("0aaa9", "7c1f2")):
        assert cached(cch, bool(place)) > 10
    quoting = [{"role": "user", "content": "x-anthropic-billing-header: cch=1; is what?"}]
    counted = ask(client, f"{MESSAGES}/count_tokens", messages=quoting).json()["input_tokens"]
    short = ask(client, f"{MESSAGES}/count_tokens", messages=[USER]).json()["input_tokens"]
    assert counted > short + 10, "only the system prompt has such a line"


@pytest.mark.parametrize("system", ["", [], [{"type": "text", "text": ""}], None])
def test_an_empty_system_prompt_is_none(client: TestClient, system: Any) -> None:
    def count(**fields: Any) -> int:
        path = f"{MESSAGES}/count_tokens"
        return int(ask(client, path, messages=[USER], **fields).json()["input_tokens"])

    assert count(system=system) == count()
    billing = "x-anthropic-billing-header: cc_version=2.1.0; cch=1;"
    assert count(system=billing) == count()
