"""Messages as clients write them become messages that templates take."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qsample.request.text.conversation import check_messages, is_parts, plain, with_objects


def test_arguments_become_objects_for_templates() -> None:
    def call(arguments: object) -> dict[str, Any]:
        return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}

    plain: dict[str, Any] = {"role": "assistant", "content": "hm"}
    for message in (
        plain,
        plain | {"tool_calls": None},
        plain | {"tool_calls": [1, {"function": 2}, call(3)]},
    ):
        assert with_objects(message) == message
    given = [call('{"a": 1}'), call(""), call("[1]"), call('{"a"'), call({"b": 2})]
    changed = [call({"a": 1}), call({}), call("[1]"), call('{"a"'), call({"b": 2})]
    assert with_objects(plain | {"tool_calls": given}) == plain | {"tool_calls": changed}


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
@pytest.mark.parametrize("given", ["", None, [], (), [{"type": "text", "text": ""}]])
def test_a_content_without_a_text(role: str, given: Any) -> None:
    (message,) = check_messages([{"role": role, "content": given}])
    content = message.get("content", "absent")
    if role == "assistant" and given is None:
        assert content == "absent", "as in transformers"
    elif role == "tool" and isinstance(given, list | tuple):
        assert content == list(given), "the result of a Python function"
    else:
        assert content == ""


def test_a_content_that_is_absent() -> None:
    assert check_messages([{"role": "assistant"}]) == [{"role": "assistant"}]
    assert check_messages([{"role": "tool"}]) == [{"role": "tool", "content": ""}]
    for role in ("system", "developer", "user"):
        with pytest.raises(ValueError, match=rf"chat message 0 \({role}\) has no content"):
            check_messages([{"role": role}])


@pytest.mark.parametrize("content", ["hi", "", None, "absent"])
def test_an_answer_that_called_nothing(content: str | None) -> None:
    answer: dict[str, Any] = {"role": "assistant", "content": content}
    if content == "absent":
        del answer["content"]
    (plain,) = check_messages([answer])
    for calls in ([], None):
        assert check_messages([answer | {"tool_calls": calls}]) == [plain]
    assert check_messages([answer | {"tool_calls": [CALL]}]) == [plain | {"tool_calls": [CALL]}]


def test_texts_in_parts_of_other_apis() -> None:
    parts = [
        "a",
        {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}},
        {"type": "input_text", "text": "c"},
        {"type": "output_text", "text": "d", "annotations": []},
        {"type": "refusal", "refusal": "e"},
    ]
    (message,) = check_messages([{"role": "assistant", "content": parts}])
    assert [part["text"] for part in message["content"]] == list("abcde")
    assert {part["type"] for part in message["content"]} == {"text"}
    for wrong in (
        {"type": "refusal", "text": "e"},
        {"type": "input_text", "text": 5},
        {"type": "input_audio", "text": "x"},
    ):
        with pytest.raises(ValueError, match=f"part of type {wrong['type']!r}"):
            check_messages([{"role": "user", "content": [wrong]}])


@pytest.mark.parametrize("content", ["", None, []])
def test_a_refusal_takes_the_place_of_a_content(content: Any) -> None:
    answer = {"role": "assistant", "content": content, "refusal": "I cannot."}
    assert check_messages([answer])[0]["content"] == "I cannot."
    assert check_messages([answer | {"content": "I can."}])[0]["content"] == "I can."
    assert "content" not in check_messages([{"role": "assistant", "refusal": None}])[0]


def test_images_of_every_api_take_a_place() -> None:
    images = [{"type": kind, kind: "x.png"} for kind in ("image", "image_url", "input_image")]
    (message,) = check_messages([{"role": "user", "content": images}])
    assert message["content"] == [{"type": "image"}] * 3, "not nothing"
    assert is_parts(message["content"])
    for image in images:
        with pytest.raises(ValueError, match=r"has a part of type .*; gpt reads text only"):
            check_messages([{"role": "user", "content": [image]}], "gpt")
    for content in ([], "a", ["a"], [{"text": "a"}], [{"type": 1}], None):
        assert not is_parts(content)


def test_thoughts_have_each_name_that_templates_read() -> None:
    given: dict[str, Any] = {"role": "assistant", "content": "x"}
    assert check_messages([given | {"thinking": None}]) == [given]
    for name in ("reasoning", "thinking", "reasoning_content"):  # the later ones come first
        given[name] = name
        (message,) = check_messages([given])
        assert message["reasoning_content"] == name
        assert message["thinking"] == given.get("thinking", name)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ("hi", "the chat messages are 'hi'; give a list of"),
        ({"role": "user", "content": "a"}, "the chat messages are {"),
        (iter([]), "the chat messages are <"),
        ([], "the conversation is empty; give a list of"),
        (["a"], "a chat message is 'a'; give a list of"),
        ([{"role": 5, "content": "a"}], "a chat message is {'role': 5"),
        ([{"role": "user", "content": [5]}], r"content of chat message 0 \(user\) is \[5\]"),
        ([{"role": "tool", "content": {"any": 1}}, {"role": "user"}], "chat message 1 "),
        ([{"role": "user", "content": "a", "x": {1}}], "chat message 0 holds a set; give text"),
    ],
)
def test_what_is_no_conversation(messages: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_messages(messages)


def test_values_become_those_of_json_up_to_100_levels() -> None:
    given = (np.int32(2), np.bool_(True), np.float32(0.5), None, "b", False)
    assert repr(plain("it", {"a": given})) == "{'a': [2, True, 0.5, None, 'b', False]}"
    for wrap in (lambda value: [value], lambda value: {"k": value}):
        value: Any = "x"
        for _ in range(100):
            value = wrap(value)
        assert plain("it", value) == value
        with pytest.raises(ValueError, match="it is nested more than 100 levels deep"):
            plain("it", wrap(value))
