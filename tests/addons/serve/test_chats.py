"""Bodies of chat completions: what contradicts itself, what a template gets, and the forms of demanded calls."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from qsample.addons.serve import chats
from qsample.addons.serve.chats import ChatCompletionRequest, DetokenizeRequest, TokenizeRequest
from qsample.addons.serve.http import ApiError
from qsample.request.grammar import Form
from qsample.request.text.chat import ChatOptions
from tests.helpers.flags import undescribed

MESSAGES = [{"role": "user", "content": "x"}]


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def chat(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"messages": MESSAGES, **fields})


@pytest.mark.parametrize("name", ["messages", "documents", "tools", "modalities"])
def test_lists_end_with_their_first_error(name: str) -> None:
    with pytest.raises(ValidationError, match="1 validation error"):
        chat(**{name: [0, 0]})


def test_what_is_right() -> None:
    plain = chat(top_logprobs=0)
    assert (
        plain.token_limit,
        plain.offers_tools,
        plain.demands_calls,
        plain.demanded_function,
    ) == (
        None,
        False,
        False,
        None,
    )
    assert (plain.include_reasoning, plain.tool_parameters, plain.form) == (True, {}, None)
    assert (
        chat(max_tokens=1).token_limit,
        chat(max_tokens=4, max_completion_tokens=1).token_limit,
    ) == (1, 1)
    assert chat(top_logprobs=20, logprobs=True).top_logprobs == 20
    tools = [
        {"function": {"name": "aZ_.-9" + "a" * 58}},
        tool("g", parameters={"type": "object", "a": 1}),
    ]
    for choice, offers, demands, function in (
        (None, True, False, None),
        ("auto", True, False, None),
        ("none", False, False, None),
        ("required", True, True, None),
        (tool("g"), True, True, "g"),
        ({"function": {"name": "g"}}, True, True, "g"),
    ):
        made = chat(tools=tools, tool_choice=choice)
        assert (made.offers_tools, made.demands_calls, made.demanded_function) == (
            offers,
            demands,
            function,
        )
        assert [*made.tool_parameters.values()] == [{"type": "object"}, {"type": "object", "a": 1}]


def test_what_a_template_gets() -> None:
    assert chat().template_options() == ChatOptions()
    empty = {"tools": [], "chat_template_kwargs": {}, "continue_final_message": False}
    assert chat(**empty).template_options() == ChatOptions()
    fields: dict[str, Any] = {
        "documents": [], "chat_template": "", "add_generation_prompt": False, "continue_final_message": True,
    }  # fmt: skip
    whole = chat(
        **fields,
        tools=[{"function": {"name": "f", "strict": None}}],
        chat_template_kwargs={"a": 1},
        reasoning_effort="low",
    )
    kwargs = {"a": 1, "reasoning_effort": "low"}
    assert whole.template_options() == ChatOptions(
        **fields, tools=[tool("f")], chat_template_kwargs=kwargs
    )
    assert whole.template_options(with_tools=False) == ChatOptions(
        **fields, chat_template_kwargs=kwargs
    )
    assert whole.chat_template_kwargs == {"a": 1}, "the request stays as it is"
    both = chat(chat_template_kwargs={"reasoning_effort": "high"}, reasoning_effort="low")
    assert both.template_options() == ChatOptions(chat_template_kwargs={"reasoning_effort": "high"})
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    made = chat(messages=[*MESSAGES, {"role": "assistant", "tool_calls": [call]}])
    first, second = made.template_messages
    assert first == MESSAGES[0]
    assert second["tool_calls"][0]["function"]["arguments"] == {"x": 1}


def test_forms_of_demanded_calls() -> None:
    parameters = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": {}}}
    tools = [tool("f"), tool("g", parameters=parameters)]
    assert chat(tools=tools).form is None
    assert chat(tools=tools, tool_choice=tool("g")).form == Form("json_schema", parameters)

    functions = {"f": {"type": "object"}, "g": parameters}
    for parallel, kind in ((None, "calls"), (True, "calls"), (False, "call")):
        assert chat(tools=tools, tool_choice="required", parallel_tool_calls=parallel).form == (
            kind,
            functions,
        )
    for choice in ("required", tool("g")):
        with pytest.raises(
            ApiError, match="response_format and tool_choice both constrain the answer"
        ) as raised:
            _ = chat(tools=tools, tool_choice=choice, guided_regex="a").form
        assert raised.value.status == 400
    assert chat(tools=tools, guided_regex="a").form == Form("regex", "a")


def test_texts_that_become_tokens_and_back() -> None:
    plain = TokenizeRequest.model_validate({})
    assert (plain.messages, plain.prompt, plain.add_special_tokens, plain.return_token_strs) == (
        None,
        None,
        True,
        False,
    )
    assert DetokenizeRequest.model_validate({"tokens": [0, 2**31 - 1]}).tokens == [0, 2**31 - 1]
    for tokens in ([2**31], [-1], ["x", "x"], None):
        with pytest.raises(ValidationError, match="1 validation error"):
            DetokenizeRequest.model_validate({"tokens": tokens})
    with pytest.raises(ValidationError, match="1 validation error"):
        TokenizeRequest.model_validate({"messages": [0, 0]})


def test_every_field_has_words_for_clients() -> None:
    assert undescribed(chats) == []
