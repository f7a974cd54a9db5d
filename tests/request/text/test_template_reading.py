"""Conversations with calls reach templates in the form that each template reads."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from qsample.request.text.chat import ChatOptions, ChatTemplates
from qsample.request.text.template_reading import TemplateReading
from qsample.request.text.tokenizer import Tokenizer
from tests.helpers.chat_templates import CHATML, HERMES, MISTRAL, QWEN, SPECIAL, WEATHER
from tests.helpers.fake_package import byte_tokenizer

# After templates of the hub that llama.cpp#13471, llama.cpp#19056 and vllm#13978 are about.
JOINED = """{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"""
PRINTED = """{% for m in messages %}{{ '<' ~ m.role ~ '>' }}{{ m.content }}{% endfor %}"""
IS_NONE = """{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}
{%- for c in m['tool_calls'] %}{{ '<call>' + c['function']['name'] + '</call>' }}{% endfor %}
{%- else %}{{ '<' + m['role'] + '>' + m['content'] }}{% endif %}{% endfor %}"""
NOT_DEFINED = """{% for m in messages %}{% if m.content is not defined %}{{ m.tool_calls[0].function.name }}
{%- else %}{{ '<' + m['role'] + '>' + m['content'] }}{% endif %}{% endfor %}"""
ARGUMENTS_AS_TEXT = """{% for m in messages %}{{ '<' + m['role'] + '>' + (m['content'] or '') }}
{%- for c in m['tool_calls'] or [] %}{{ c['function']['name'] + '(' + c['function']['arguments'] + ')' }}{% endfor %}
{%- endfor %}"""
ARGUMENTS_PRINTED = ARGUMENTS_AS_TEXT.replace("'(' + c", "'(' ~ c")
ARGUMENTS_IN_TAGS = """{% for m in messages %}{{ '<' + m['role'] + '>' }}{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ c.function.name }}{% for name, value in c.function.arguments|items %}
{{- '<' ~ name ~ '>' ~ value }}{% endfor %}{% endfor %}{% endfor %}"""
ONE_CALL = """{% for m in messages %}{% if 'tool_calls' in m %}
{%- if m.tool_calls|length != 1 %}{{ raise_exception('one call') }}{% endif %}{{ m.tool_calls[0].function.name }}
{%- else %}{{ '<' + m.role + '>' + m.content }}{% endif %}{% endfor %}"""

NO_CALLS = """{% for m in messages %}{% if m.tool_calls %}{{ raise_exception('no calls') }}{% endif %}
{{- m.content }}{% endfor %}"""
ARGUMENTS_IF_TEXT = ARGUMENTS_AS_TEXT.replace(
    "c['function']['arguments'] + ')'",
    "(c['function']['arguments'] if c['function']['arguments'] is string else '') + ')'",
)
CONTENT_BEFORE_ARGUMENTS = ARGUMENTS_AS_TEXT.replace("(m['content'] or '')", "m['content']")
NEEDS_CONTENT = """{% for m in messages %}{% if m.content is not defined %}{{ raise_exception('no content') }}
{%- endif %}{{ '<' ~ m.role ~ '>' ~ m.content }}{% endfor %}"""
# Templates that look at the parts of calls, tools and results.
FUNCTIONS = """{% for t in tools or [] if t.type == 'function' %}[{{ t.function.name }}]{% endfor %}
{%- for m in messages %}{{ '<' ~ m.role ~ '>' }}{{ m.content or '' }}
{%- for c in m.tool_calls or [] if c.type == 'function' and c.id %}{{ c.function.name }}
{{- c.function.arguments | tojson }}{% endfor %}{% endfor %}"""
RESULTS_OF_PARTS = """{% for m in messages %}{% if m.role == 'tool' %}
{%- if not m.tool_call_id or m.name is not defined %}{{ raise_exception('whose result?') }}{% endif %}
{%- for p in m.content %}{{ '<' ~ p.text ~ '>' }}{% endfor %}
{%- elif m.role == 'user' and loop.index0 % 2 %}{{ raise_exception('turns') }}
{%- elif m.role == 'user' %}{% for p in m.content %}{{ '(' ~ p.text ~ ')' }}{% endfor %}{% endif %}{% endfor %}"""

USER = {"role": "user", "content": "Time?"}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "now", "content": "12:00"}
CONTENTS = ("absent", None, "")


def calling(content: Any, arguments: Any, name: str = "now") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    call = {"id": "call00001", "type": "function", "function": function}
    answer = {"role": "assistant", "content": content, "tool_calls": [call]}
    if content == "absent":
        del answer["content"]
    return answer


def rendered(template: str, *messages: dict[str, Any]) -> str:
    return ChatTemplates(template, SPECIAL).render([USER, *messages])


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (JOINED, "<user>Time?<assistant><tool>12:00"),
        (PRINTED, "<user>Time?<assistant><tool>12:00"),
        (IS_NONE, "<user>Time?<call>now</call><tool>12:00"),
        (NOT_DEFINED, "<user>Time?now<tool>12:00"),
        (ARGUMENTS_AS_TEXT, '<user>Time?<assistant>now({"zone": "Bern"})<tool>12:00'),
        (ARGUMENTS_IF_TEXT, '<user>Time?<assistant>now({"zone": "Bern"})<tool>12:00'),
        (CONTENT_BEFORE_ARGUMENTS, '<user>Time?<assistant>now({"zone": "Bern"})<tool>12:00'),
        (ARGUMENTS_PRINTED, '<user>Time?<assistant>now({"zone": "Bern"})<tool>12:00'),
        (ARGUMENTS_IN_TAGS, "<user>Time?<assistant>now<zone>Bern<tool>12:00"),
        (ONE_CALL, "<user>Time?now<tool>12:00"),
        (NEEDS_CONTENT, "<user>Time?<assistant><tool>12:00"),
        (FUNCTIONS, '<user>Time?<assistant>now{"zone": "Bern"}<tool>12:00'),
        (RESULTS_OF_PARTS, "(Time?)<12:00>"),
    ],
)
def test_the_second_turn_of_a_conversation_with_a_tool(
    template: str, expected: str, content: Any
) -> None:
    assert rendered(template, calling(content, {"zone": "Bern"}), RESULT) == expected


def test_arguments_given_as_text_to_a_template_that_walks_through_them() -> None:
    expected = rendered(ARGUMENTS_IN_TAGS, calling("", {"zone": "Bern"}), RESULT)
    assert rendered(ARGUMENTS_IN_TAGS, calling("", '{"zone": "Bern"}'), RESULT) == expected


def test_arguments_become_json_as_their_author_wrote_it() -> None:
    text = rendered(ARGUMENTS_AS_TEXT, calling("", {"zone": "Zürich"}), RESULT)
    assert 'now({"zone": "Zürich"})' in text


@pytest.mark.parametrize("call", [{"id": "1"}, 5, {"function": "f"}, {"function": {"name": "f"}}])
def test_calls_that_are_no_calls_are_the_templates_affair(call: Any) -> None:
    counting = "{% for m in messages %}{{ m.role }}{{ (m.tool_calls or [])|length }}{% endfor %}"
    sent = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert ChatTemplates(counting, SPECIAL).render(sent) == "user0assistant1"
    needs_text = counting.replace(
        "m.role }}", "m.role + (m.tool_calls or [{}])[0].x|default('') }}"
    )
    assert ChatTemplates(needs_text, SPECIAL).render(sent) == "user0assistant1"


@pytest.mark.parametrize("template", [JOINED, PRINTED, IS_NONE, ARGUMENTS_IN_TAGS, CHATML])
@pytest.mark.parametrize("content", CONTENTS)
def test_an_answer_of_nothing(template: str, content: Any) -> None:
    silent: dict[str, Any] = {"role": "assistant", "content": content}
    if content == "absent":
        del silent["content"]
    text = rendered(template, silent, USER)
    assert text.count("Time?") == 2
    assert "None" not in text


def test_an_answer_with_a_text_and_calls_keeps_both() -> None:
    for template in (HERMES, ARGUMENTS_AS_TEXT, CONTENT_BEFORE_ARGUMENTS, ARGUMENTS_IN_TAGS):
        text = rendered(template, calling("I look.", {"zone": "Bern"}), RESULT)
        assert "I look." in text
        assert text.index("I look.") < text.index("now") < text.index("Bern")


def test_conversations_of_both_forms_with_one_object() -> None:
    templates = ChatTemplates(IS_NONE, SPECIAL)
    for _ in range(2):
        text = templates.render([USER, calling("", {}), RESULT, calling("Now:", {}), RESULT])
        assert text == "<user>Time?<call>now</call><tool>12:00<assistant>Now:<tool>12:00"


@pytest.mark.parametrize(
    ("template", "unread"),
    [
        (JOINED, ["tools", "tool_calls"]),
        (IS_NONE, ["tools"]),
        (NO_CALLS, ["tools", "tool_calls"]),
        (CHATML, ["tools", "tool_calls"]),
        (QWEN, []),
        (HERMES, []),
        (MISTRAL, []),
        (FUNCTIONS, []),
    ],
)
def test_what_a_template_leaves_out(template: str, unread: list[str]) -> None:
    templates = ChatTemplates(template, SPECIAL)
    with_tools = ChatOptions(tools=[WEATHER])
    messages = [USER, calling(None, {}), RESULT]
    assert templates.unread(messages, with_tools) == unread
    assert templates.unread([USER], with_tools) == [name for name in unread if name == "tools"]
    assert templates.unread(messages) == [name for name in unread if name == "tool_calls"]
    assert templates.unread([USER], ChatOptions(tools=[])) == []
    assert templates.unread([USER]) == []


def test_roles_are_tried_where_a_template_takes_them() -> None:
    first = """{% for m in messages %}{% if m.role in ['system', 'developer'] and not loop.first %}
    {{- raise_exception('first') }}{% endif %}{{ m.content }}{% endfor %}"""
    reading = TemplateReading(SPECIAL)
    for role in ("system", "developer", "user", "assistant", "tool"):
        assert reading.reads_content(first, role, False), role
    never = first.replace("not loop.first", "true")
    assert not reading.reads_content(never, "developer", False)
    assert reading.reads_content(never, "user", False)


def test_tools_that_a_template_reads_only_with_a_switch() -> None:
    switched = "{% if use_tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}"
    templates = ChatTemplates(switched, SPECIAL)
    for use_tools in (True, False, True):
        options = ChatOptions(tools=[WEATHER], chat_template_kwargs={"use_tools": use_tools})
        assert templates.unread([USER], options) == ([] if use_tools else ["tools"])


def test_a_warning_names_what_is_left_out() -> None:
    tokenizer = Tokenizer(byte_tokenizer(), ChatTemplates(JOINED, SPECIAL))
    with pytest.warns(UserWarning, match="does not print tools") as given:
        tokenizer.encode_chat([USER], ChatOptions(tools=[WEATHER]))
    assert len(given) == 1
    with pytest.warns(UserWarning, match="does not print the calls"):
        tokenizer.apply_chat_template([USER, calling("", {}), RESULT])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenizer.apply_chat_template([USER])
