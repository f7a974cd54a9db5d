"""Chat templates: where they come from, and that they render what transformers renders."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample.request.text.chat import ChatOptions, ChatTemplates, special_tokens_of
from qsample.request.text.tokenizer import Tokenizer
from qsample.runtime import CausalLM, Engine, load
from tests.helpers.chat_templates import (
    CALL,
    CALLING,
    CHATML,
    CONVERSATIONS,
    HERMES,
    MISTRAL,
    PARTS_ONLY,
    RESULT,
    SPECIAL,
    SYSTEM,
    TEMPLATES,
    USER,
    WEATHER,
)
from tests.helpers.fake_package import BOS, byte_tokenizer, fake_package

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi <b>"}]
SWITCHES: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": True},
    {"add_generation_prompt": True, "tools": [WEATHER], "date_string": "26 Jul 2024"},
    {"add_generation_prompt": True, "tools": []},
    {
        "add_generation_prompt": True,
        "enable_thinking": False,
        "reasoning_effort": "high",
        "custom_tools": [WEATHER],
    },
    {
        "documents": [{"title": "T", "text": "x"}, {"title": "日", "text": "y"}],
        "bos_token": "<other>",
    },
    {"continue_final_message": True},
]


def templates(text: str = "", **named: str) -> ChatTemplates:
    return ChatTemplates({"default": text, **named} if text else named, SPECIAL)


def ours(template: Any) -> Tokenizer:
    named = template if isinstance(template, dict) else {"default": template}
    return Tokenizer(byte_tokenizer(), ChatTemplates(named, SPECIAL))


def theirs(template: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), **SPECIAL)
    made.chat_template = template
    return made


def test_chat_is_templated_without_doubling_special_tokens(model: CausalLM) -> None:
    assert model.tokenizer is not None
    rendered = "[system]be brief\n[user]hi <b>\n[assistant]"
    expected = [BOS, *model.tokenizer.encode(rendered, add_special_tokens=False)]
    output = model.generate(CHAT, seed=1, max_new_tokens=2)
    assert output.sequences[0, : output.prompt_lengths[0]].tolist() == expected
    batch = model.generate([CHAT, CHAT[1:]], seed=1, max_new_tokens=2)
    assert batch.prompt_lengths[0] == len(expected)
    assert batch.token_ids[0] == output.token_ids[0]


@pytest.mark.parametrize("switches", SWITCHES, ids=lambda switches: "+".join(switches) or "plain")
@pytest.mark.parametrize("family", TEMPLATES)
def test_every_family_renders_as_in_transformers(family: str, switches: dict[str, Any]) -> None:
    mine, reference = ours(TEMPLATES[family]), theirs(TEMPLATES[family])
    rendered = 0
    for name, messages in CONVERSATIONS.items():
        try:
            expected = reference.apply_chat_template(messages, tokenize=False, **switches)
        except Exception:
            with pytest.raises(
                ValueError, match=r"refuses these messages|continue_final_message needs"
            ):
                mine.apply_chat_template(messages, tokenize=False, **switches)
            continue
        assert mine.apply_chat_template(messages, tokenize=False, **switches) == expected, name
        ids = mine.apply_chat_template(messages, return_dict=False, **switches)
        assert ids == reference.apply_chat_template(messages, return_dict=False, **switches), name
        rendered += 1
    assert rendered >= 3, "most of a row is there"


def test_a_conversation_of_openai_with_arguments_as_text() -> None:
    as_text = {**CALL, "function": {"name": "get_weather", "arguments": '{"place": "Bern"}'}}
    messages = [USER, {**CALLING, "tool_calls": [as_text]}]
    for template in TEMPLATES.values():
        expected = theirs(template).apply_chat_template(messages, tokenize=False)
        assert ours(template).apply_chat_template(messages, tokenize=False) == expected


def test_a_function_is_a_tool() -> None:
    def add(x: int, y: int) -> int:
        """Adds.

        Args:
            x: one
            y: the other
        """
        return x + y

    for template in TEMPLATES.values():
        options: dict[str, Any] = {
            "tools": [add, WEATHER],
            "tokenize": False,
            "date_string": "today",
        }
        assert ours(template).apply_chat_template([USER], **options) == theirs(
            template
        ).apply_chat_template([USER], **options)


def test_the_forms_that_apply_chat_template_returns() -> None:
    mine, reference = ours(CHATML), theirs(CHATML)
    pair = [CONVERSATIONS["one"], CONVERSATIONS["system"]]
    for given, options in itertools.product(
        ([USER], pair),
        ({"tokenize": False}, {"return_dict": False}, {}, {"tokenize": False, "return_dict": True}),
    ):
        expected = reference.apply_chat_template(given, **options)
        found = mine.apply_chat_template(given, **options)
        if isinstance(found, dict):
            assert found == {name: expected[name] for name in ("input_ids", "attention_mask")}
        else:
            assert found == expected
    arrays = mine.apply_chat_template([[USER], [USER]], return_tensors="np")
    expected = reference.apply_chat_template([[USER], [USER]], return_tensors="np")
    for name in ("input_ids", "attention_mask"):
        assert np.array_equal(arrays[name], expected[name])
        assert arrays[name].dtype == np.int64
    with pytest.raises(ValueError, match="conversations of the same length"):
        mine.apply_chat_template(pair, return_tensors="np")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding": True}, "padding is True, which is not supported"),
        ({"truncation": True}, "truncation is True"),
        ({"return_assistant_tokens_mask": True}, "return_assistant_tokens_mask is True"),
        ({"return_tensors": "pt"}, "return_tensors is 'pt'; give \"np\""),
        ({"tools": "get_weather"}, "tools is 'get_weather'; give a list"),
        ({"documents": ["text"]}, "documents has 'text'; give mappings"),
        ({"chat_template": 3}, "chat_template is 3; give a text"),
        (
            {"chat_template": "tool_us"},
            "is neither Jinja nor a template of the package .it has default",
        ),
        ({"add_generation_prompt": 1}, "add_generation_prompt is 1; give True or False"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "give either"),
        ({"thing": object()}, "chat_template_kwargs holds a object"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ours(CHATML).apply_chat_template([USER], **options)


def test_arguments_without_effect_are_accepted_as_in_transformers() -> None:
    plain = ours(CHATML).apply_chat_template([USER])
    assert plain == ours(CHATML).apply_chat_template(
        [USER],
        padding=False,
        truncation=False,
        max_length=None,
        sanitize_control_tokens=False,
        tokenizer_kwargs=None,
    )


@pytest.mark.parametrize("given", [None, [], [WEATHER]], ids=["none", "empty", "tools"])
@pytest.mark.parametrize("name", [None, "rag", "default", "{{ 'own' }}"])
def test_which_of_several_templates(name: str | None, given: Any) -> None:
    named = {
        "default": "{{ 'D' }}",
        "tool_use": "T{{ tools | length }}",
        "rag": "R{{ documents | length }}",
    }
    options: dict[str, Any] = {
        "tools": given,
        "chat_template": name,
        "documents": [{"text": "x"}],
        "tokenize": False,
    }
    assert ours(named).apply_chat_template([USER], **options) == theirs(named).apply_chat_template(
        [USER], **options
    )


def test_several_templates_without_a_default() -> None:
    with pytest.raises(
        ValueError, match="several chat templates and no default; give chat_template a name: a, b"
    ):
        templates(a="A{{ 1 }}", b="B").render([USER])
    assert templates(a="A{{ 1 }}", b="B").render([USER], ChatOptions(chat_template="b")) == "B"


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(
    ("family", "role", "expected"),
    [
        ("qwen", "user", "onetwo"),  # its macro reads parts
        ("qwen", "system", "onetwo"),
        ("gemma", "user", "onetwo"),
        ("chatml", "user", "one\ntwo"),  # reads a text only
        ("chatml", "assistant", "one\ntwo"),
        ("llama", "user", "one\ntwo"),
        ("llama", "tool", '"one\\ntwo"'),  # prints parts as JSON, which is not reading them
        ("mistral", "system", "one\ntwo"),
    ],
)
def test_parts_of_text(family: str, role: str, expected: str) -> None:
    message = {"role": role, "content": PARTS}
    conversation = {
        "user": [message],
        "system": [message, USER],
        "assistant": [USER, message],
        "tool": [USER, CALLING, RESULT | message],
    }[role]
    assert expected in templates(TEMPLATES[family]).render(conversation)
    assert "'type'" not in templates(TEMPLATES[family]).render(conversation)


def test_parts_that_a_template_reads_are_those_of_transformers() -> None:
    for family in ("qwen", "gemma"):
        messages = [{"role": "user", "content": PARTS}, {"role": "assistant", "content": PARTS[:1]}]
        for options in ({}, {"continue_final_message": True}):
            expected = theirs(TEMPLATES[family]).apply_chat_template(
                messages, tokenize=False, **options
            )
            assert (
                ours(TEMPLATES[family]).apply_chat_template(messages, tokenize=False, **options)
                == expected
            )


def test_a_text_reaches_a_template_that_reads_parts_only() -> None:
    expected = templates(PARTS_ONLY).render(
        [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    )
    assert "hello" in expected
    assert templates(PARTS_ONLY).render([{"role": "user", "content": "hello"}]) == expected
    assert templates(PARTS_ONLY).render([{"role": "user", "content": ["hello"]}]) == expected


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            {"role": "user", "content": [{"type": "image", "url": "x"}]},
            "message 1 has a part of type 'image'",
        ),
        (
            {"role": "user", "content": [PARTS[0], {"type": "image_url"}]},
            "part of type 'image_url'; the model reads",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "part of type 'text'"),
        ({"role": "user"}, r"message 1 \(user\) has no content"),
        ({"role": "system", "contents": "hi"}, "has no content"),
        ({"role": "user", "content": 3}, "is 3; give a text, or parts"),
        ({"role": "user", "content": [3]}, "give a text, or parts"),
        ({"role": "tool", "content": {"a": object()}}, "message 1 holds a object"),
        ({"content": "hi"}, 'a chat message is .*; give a list of {"role"'),
        ({"role": None, "content": "hi"}, "a chat message is"),
        ("hi", "a chat message is 'hi'"),
    ],
)
def test_wrong_messages(message: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        templates(CHATML).render([USER, message])


@pytest.mark.parametrize("messages", ["hi", {"role": "user"}, [], None])
def test_invalid_conversations_are_refused(messages: Any) -> None:
    with pytest.raises(ValueError, match=r"chat messages are|conversation is empty"):
        ours(CHATML).apply_chat_template(messages)


def test_a_message_that_nests_for_ever() -> None:
    message: dict[str, Any] = {"role": "tool"}
    message["content"] = {"again": message}
    with pytest.raises(ValueError, match="nested more than"):
        templates(CHATML).render([message])


def test_rendering_changes_no_argument() -> None:
    messages = [
        {"role": "user", "content": PARTS},
        {"role": "assistant", "content": "so ", "reasoning": "x"},
    ]
    before = repr(messages)
    for template in TEMPLATES.values():
        for goes_on in (False, True):
            templates(template).render(messages, ChatOptions(continue_final_message=goes_on))
    assert repr(messages) == before


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ raise_exception('roles must alternate') }}",
            "refuses these messages: roles must alternate",
        ),
        ("{% if %}", "is not valid Jinja"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        (
            "{{ tojson.__globals__ }}{{ strftime_now.__globals__['json'] }}",
            "refuses these messages",
        ),
        ("{{ namespace.__init__.__globals__ }}", "refuses these messages"),
        ("{{ '{0.__class__.x}'.format(messages) }}", "refuses these messages"),
        ("{{ 1 / 0 }}", "refuses these messages: ZeroDivisionError"),
        ("{{ messages + 'x' }}", "refuses these messages: TypeError"),
        (
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            "refuses these messages: RecursionError",
        ),
        ("{% include 'x' %}", "refuses these messages"),
        ("{{ open('/etc/passwd') }}", "refuses these messages"),
    ],
)
def test_hostile_and_broken_templates(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        templates(template).render(CHAT)


def test_a_message_that_cannot_be_continued() -> None:
    upper = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    for template, last, name in (
        (upper, "so", True),
        (CHATML, "so", "reasoning"),
        (MISTRAL, None, True),
    ):
        messages = [USER, CALLING if last is None else {"role": "assistant", "content": last}]
        with pytest.raises(ValueError, match="continue_final_message needs"):
            templates(template).render(messages, ChatOptions(continue_final_message=name))


def test_reasoning_is_continued_by_name() -> None:
    template = (
        "{% for m in messages %}{{ m.content }}<think>{{ m.reasoning_content }}</think>{% endfor %}"
    )
    messages = [{"role": "assistant", "content": "", "thinking": "because "}]
    for name in ("thinking", "reasoning_content"):
        options: dict[str, Any] = {"continue_final_message": name, "tokenize": False}
        expected = theirs(template).apply_chat_template(messages, **options)
        assert expected == "<think>because "
        assert ours(template).apply_chat_template(messages, **options) == expected


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({"chat_template": "A{{ bos_token }}", "bos_token": {"content": "<s>"}}, {}, "A<s>"),
        (
            {
                "chat_template": [
                    {"name": "tool_use", "template": "T"},
                    {"name": "default", "template": "D"},
                ]
            },
            {},
            "D",
        ),
        ({"chat_template": {"tool_use": "T", "default": "D"}}, {}, "D"),
        ({"chat_template": "A"}, {"chat_template.jinja": "J"}, "J"),
    ],
)
def test_the_sources_of_the_template(
    config: dict[str, Any], files: dict[str, str], expected: str, tmp_path: Path
) -> None:
    package = fake_package(tmp_path / "package", tokenizer_config=config, files=files)
    assert ChatTemplates.of(package).render(CHAT) == expected


def test_no_template(tmp_path: Path) -> None:
    model = load(fake_package(tmp_path / "package", tokenizer_config={}).path)
    with pytest.raises(
        ValueError, match=r"has no chat template \(no chat_template.jinja, and none in"
    ):
        model.generate(CHAT)
    assert model.generate(
        CHAT, max_new_tokens=1, chat_template="{{ messages[0].content }}"
    ).prompt_lengths == [8]


def test_the_templates_that_transformers_saves_are_those_that_are_read(tmp_path: Path) -> None:
    """One, or several in a folder of their own."""
    for index, template in enumerate(
        (HERMES, {"default": CHATML, "tool_use": HERMES, "rag": "{{ documents }}"})
    ):
        saved = tmp_path / f"saved{index}"
        theirs(template).save_pretrained(saved)
        files = {str(file.relative_to(saved)): file for file in saved.rglob("*") if file.is_file()}
        package = fake_package(
            tmp_path / f"package{index}",
            files={name: file.read_text("utf-8") for name, file in files.items()},
        )
        tokenizer = Tokenizer.of(package)
        assert tokenizer is not None
        for options in ({}, {"tools": [WEATHER]}):
            expected = theirs(template).apply_chat_template(
                [SYSTEM, USER], tokenize=False, **options
            )
            assert (
                tokenizer.apply_chat_template([SYSTEM, USER], tokenize=False, **options) == expected
            )


def test_the_template_can_be_read_and_set_as_in_transformers() -> None:
    for template in (CHATML, {"default": CHATML, "rag": HERMES}, {"rag": HERMES}, None):
        assert ours(template).chat_template == template
    tokenizer = ours(CHATML)
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0].content }}"
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
        == "<s>hi"
    )
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        tokenizer.apply_chat_template([USER])


def test_a_tokenizer_of_the_caller_brings_its_template(tmp_path: Path) -> None:
    model = load(fake_package(tmp_path / "package", tokenizer=False).path)
    output = model.generate([USER], tokenizer=theirs(HERMES), max_new_tokens=1, seed=1)
    expected = theirs(HERMES).apply_chat_template(
        [USER], add_generation_prompt=True, return_dict=False
    )
    assert output.sequences[0, :-1].tolist() == expected


def test_generate_and_the_engine_take_the_options_of_a_chat(model: CausalLM) -> None:
    assert model.tokenizer is not None
    options: dict[str, Any] = {
        "tools": [WEATHER],
        "documents": [{"title": "a", "text": "b"}],
        "chat_template": "{{ tools | length }}{{ documents[0].text }}{{ enable_thinking }}{{ messages[0].content }}",
        "chat_template_kwargs": {"enable_thinking": False},
    }
    expected = model.tokenizer.encode("1bFalsehi", add_special_tokens=False)
    messages = [{"role": "user", "content": "hi"}]
    output = model.generate(messages, max_new_tokens=2, seed=5, **options)
    assert output.sequences[0, : output.prompt_lengths[0]].tolist() == expected
    with Engine(model, slots=1) as engine:
        request = engine.add_request(messages, max_new_tokens=2, seed=5, **options)
        assert request.result().token_ids == output.token_ids[0]
        assert request.result().usage.prompt_tokens == len(expected)
    started = [*messages, {"role": "assistant", "content": "Well, "}]
    output = model.generate(
        started, max_new_tokens=1, continue_final_message=True, add_generation_prompt=None
    )
    assert output.sequences[0, 1:-1].tolist() == model.tokenizer.encode(
        "[user]hi\n[assistant]Well, ", add_special_tokens=False
    )


def test_without_jinja(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"need jinja2: `pip install .*\[chat\]\"`"):
        templates("a template that was not compiled yet").render(CHAT)


def test_options_that_are_not_at_their_defaults() -> None:
    assert ChatOptions().given == ChatOptions(tools=None, chat_template_kwargs={}).given == []
    options: dict[str, Any] = {
        "tools": [], "documents": [{"text": "a"}], "chat_template": "{{ 1 }}", "add_generation_prompt": False,
        "continue_final_message": True, "chat_template_kwargs": {"a": 1},
    }  # fmt: skip
    assert ChatOptions(**options).given == list(options)
    for name in ("messages", *options):
        with pytest.raises(ValueError, match=f"chat_template_kwargs has {name}, an argument"):
            ChatOptions(chat_template_kwargs={name: 1, "a": 2})


CALLS = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}C{% endfor %}{% endfor %}"
CALLS = CALLS.replace("C", "{{ c.function.name + c.function.arguments }}")  # of texts only


def test_what_a_template_leaves_out_is_named() -> None:
    chat: list[Any] = [USER, CALLING, RESULT]
    tools = ChatOptions(tools=[WEATHER])
    for template, unread in ((HERMES, []), (CALLS, ["tools"]), (CHATML, ["tools", "tool_calls"])):
        assert templates(template).unread(chat, tools) == unread
        assert templates(template).unread(chat) == unread[1:]
        assert templates(template).unread([USER], ChatOptions(tools=[])) == []
    # The template that is chosen counts, with the variables that it gets.
    several = templates(CHATML, tool_use=HERMES, own="{% if on %}{{ tools }}{% endif %}")
    assert several.unread(chat, tools) == []
    for on, unread in ((False, ["tools"]), (True, [])):
        own = replace(tools, chat_template="own", chat_template_kwargs={"on": on})
        assert several.unread([USER], own) == unread
    # An answer with a text, too, is in the form that the template reads.
    assert 'so: get_weather{"' in templates(CALLS).render([USER, {**CALLING, "content": "so: "}])


def test_special_tokens_and_templates_that_are_no_texts_are_left_out() -> None:
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>"},
        "pad_token": None,
        "unk_token": {},
        "other": "x",
    }
    assert special_tokens_of(config) == {"bos_token": "<s>", "eos_token": "</s>"}
    named = [{"name": "a", "template": "A"}, {"name": "b", "template": 5}, {"name": 5}, {}, "x"]
    assert ChatTemplates(named).templates == {"a": "A"}
    assert ChatTemplates({"a": "A", "b": None}).templates == {"a": "A"}
    assert ChatTemplates(None).templates == ChatTemplates(5).templates == {}


def test_images_need_a_template_of_parts() -> None:
    image = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "x"}]}]
    parts = "{% for p in messages[0].content %}{{ p.type }}{{ p.text }};{% endfor %}"
    assert ChatTemplates(parts, text_only=None).render(image) == "image;textx;"
    for text_only, message in (
        (None, "a message has an image, and"),
        ("gpt", "gpt reads text only"),
    ):
        with pytest.raises(ValueError, match=message):
            ChatTemplates(CHATML, SPECIAL, text_only).render(image)
