"""Conversations of agents reach templates that refuse their roles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qsample.addons.serve.roles import rewritings
from qsample.request.text.chat import ChatOptions
from tests.addons.serve.test_models import served
from tests.helpers.fake_package import fake_package

ROLES_PRINTED = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
KNOWS_DEVELOPER = ROLES_PRINTED + "{# developer #}"
KNOWN_ROLES = (
    """{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}
{{- raise_exception('what role?') }}{% endif %}{% endfor %}"""
    + ROLES_PRINTED
)
FIRST_SYSTEM = (
    """{% for m in messages %}{% if m.role == 'system' and not loop.first %}
{{- raise_exception('a late system message') }}{% endif %}{% endfor %}"""
    + ROLES_PRINTED
)
ALTERNATING = (
    """{% set ns = namespace(turn='user') %}{% for m in messages %}
{%- if m.role == 'system' and loop.first %}{% elif m.role != ns.turn %}{{ raise_exception('turns') }}
{%- else %}{% set ns.turn = 'assistant' if m.role == 'user' else 'user' %}{% endif %}{% endfor %}"""
    + ROLES_PRINTED
)
NO_SYSTEM = ALTERNATING.replace("m.role == 'system' and loop.first", "false")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_package(tmp_path_factory.mktemp("served") / "package").path


CODEX = [
    {"role": "system", "content": "a"},
    {"role": "developer", "content": "b"},
    {"role": "developer", "content": [{"type": "text", "text": "c"}]},
    {"role": "user", "content": "d"},
    {"role": "user", "content": "e"},
]
CLAUDE_CODE = [
    {"role": "system", "content": "a"},
    {"role": "user", "content": "b"},
    {"role": "system", "content": "c"},
    {"role": "assistant", "content": "d"},
    {"role": "user", "content": "e"},
    {"role": "system", "content": "f"},
]


@pytest.mark.parametrize(
    ("template", "codex", "claude_code"),
    [
        (
            ROLES_PRINTED,
            "<system>a<system>b<system>c<user>d<user>e",
            "<system>a<user>b<system>c<assistant>d<user>e<system>f",
        ),
        (
            KNOWS_DEVELOPER,
            "<system>a<developer>b<developer>c<user>d<user>e",
            "<system>a<user>b<system>c<assistant>d<user>e<system>f",
        ),
        (
            KNOWN_ROLES + "{# developer #}",
            "<system>a<system>b<system>c<user>d<user>e",
            "<system>a<user>b<system>c<assistant>d<user>e<system>f",
        ),
        (
            FIRST_SYSTEM,
            "<system>a\nb\nc<user>d<user>e",
            "<system>a<user>b<user>c<assistant>d<user>e<user>f",
        ),
        (
            ALTERNATING,
            "<system>a\nb\nc<user>d\ne",
            "<system>a<user>b\nc<assistant>d<user>e\nf",
        ),
        (
            NO_SYSTEM,
            "<user>a\nb\nc\nd\ne",
            "<user>a\nb\nc<assistant>d<user>e\nf",
        ),
    ],
)  # fmt: skip
def test_the_roles_of_agents(package: Path, template: str, codex: str, claude_code: str) -> None:
    with served(package) as model:
        options = ChatOptions(chat_template=template)
        assert model.render_chat(CODEX, options, pytest.fail) == codex
        assert model.render_chat(CLAUDE_CODE, options, pytest.fail) == claude_code


def test_the_error_of_the_conversation_as_it_was_sent(package: Path) -> None:
    refusing = "{{ raise_exception(messages|map(attribute='role')|join(' ')) }}"
    with served(package) as model:
        options = ChatOptions(chat_template=refusing)
        with pytest.raises(ValueError, match="system user system assistant user system"):
            model.render_chat(CLAUDE_CODE, options, pytest.fail)


def test_changes_are_few_and_change_no_argument() -> None:
    plain: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
    assert list(rewritings(plain, True)) == [plain]
    alternating = [*plain, {"role": "assistant", "content": "b"}, *plain]
    assert list(rewritings(alternating, False)) == [alternating]
    sent = [dict(message) for message in CLAUDE_CODE]
    assert len(list(rewritings(sent, True))) == 4
    assert sent == CLAUDE_CODE
    only_system = [{"role": "system", "content": None}, {"role": "system", "content": "b"}]
    assert list(rewritings(only_system, True))[1] == [{"role": "system", "content": "\nb"}]
