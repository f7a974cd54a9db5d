"""Chat templates: where they come from, and what they render."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from qsample.runtime import CausalLM, load
from qsample.runtime.text.chat import ChatTemplate
from tests.helpers.fake_package import BOS, byte_tokenizer, fake_package

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi <b>"}]


def test_chat_is_templated_without_doubling_special_tokens(model: CausalLM) -> None:
    assert model.tokenizer is not None
    rendered = "[system]be brief\n[user]hi <b>\n[assistant]"
    expected = [BOS, *model.tokenizer.encode(rendered, add_special_tokens=False)]
    output = model.generate(CHAT, seed=1, max_new_tokens=2)
    assert output.sequences[0, : output.prompt_lengths[0]].tolist() == expected
    batch = model.generate([CHAT, CHAT[1:]], seed=1, max_new_tokens=2)
    assert batch.prompt_lengths[0] == len(expected)
    assert batch.token_ids[0] == output.token_ids[0]


def test_templates_render_as_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    template = (
        "{%- set ns = namespace(n=0) %}\n"
        "{%- for m in messages %}\n"
        "    {%- if m.role == 'tool' %}{% continue %}{% endif %}\n"
        "    {%- set ns.n = ns.n + 1 %}\n"
        "    {{- bos_token + m.role + ': ' + m.content | trim }}\n"
        "    {%- generation %}{{ m | tojson }}{% endgeneration %}\n"
        "    {% if loop.last %}\n"
        "last {{ ns.n }}\n"
        "    {% endif %}\n"
        "{%- endfor %}\n"
        "{{ messages | tojson(indent=2) }}{{ {'a': '<é>'} | tojson }}\n"
        "{% if add_generation_prompt %}go{% endif %}\n"
    )
    messages = [*CHAT, {"role": "tool", "content": "x"}, {"role": "user", "content": " 日本 "}]
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), bos_token="<s>")
    expected = theirs.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=True)
    assert ChatTemplate(template, {"bos_token": "<s>"}).render(messages) == expected


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({"chat_template": "A{{ bos_token }}", "bos_token": {"content": "<s>"}}, {}, "A<s>"),
        ({"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}, {}, "D"),
        ({"chat_template": "A"}, {"chat_template.jinja": "J"}, "J"),
    ],
)
def test_where_the_template_comes_from(
    config: dict[str, Any], files: dict[str, str], expected: str, tmp_path: Path
) -> None:
    package = fake_package(tmp_path / "package", tokenizer_config=config, files=files)
    template = ChatTemplate.of(package)
    assert template is not None
    assert template.render(CHAT) == expected


def test_no_template(tmp_path: Path) -> None:
    model = load(fake_package(tmp_path / "package", tokenizer_config={}).path)
    with pytest.raises(ValueError, match=r"has no chat template \(chat_template.jinja, or"):
        model.generate(CHAT)


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", CHAT, "refuses these messages: roles must alternate"),
        ("{% if %}", CHAT, "is not valid Jinja"),
        ("{{ ''.__class__.__mro__ }}", CHAT, "refuses these messages"),
        ("{{ messages.append(1) }}", CHAT, "refuses these messages"),
        ("x", [{"content": "hi"}], 'a chat message is .*; give {"role"'),
        ("x", ["hi"], "a chat message is 'hi'"),
    ],
)
def test_wrong_templates_and_messages(template: str, messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatTemplate(template).render(messages)


def test_without_jinja(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"need jinja2: `pip install 'qsample\[chat\]'`"):
        ChatTemplate("x").render(CHAT)
