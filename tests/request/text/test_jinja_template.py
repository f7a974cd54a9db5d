"""Templates in the sandbox: what transformers offers them, what they may do, and what they say if they fail."""

from __future__ import annotations

import datetime
import sys
from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from qsample.request.text.jinja_template import compile_template, render_template

HI = [{"role": "user", "content": "hi <b>é"}]


def transformers_text(template: str, variables: dict[str, Any]) -> str:
    texts, _ = render_jinja_template(conversations=[HI], chat_template=template, **variables)
    return str(texts[0])


@pytest.mark.parametrize(
    ("template", "variables", "expected"),
    [
        ("{{ messages[0].content }}|{{ eos_token }}", {"eos_token": "</s>"}, "hi <b>é|</s>"),
        # Blocks leave neither their line nor the blanks before them.
        ("a\n  {% if true %}\n  b\n  {% endif %}\nc", {}, "a\n  b\nc"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", {}, "13"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", {}, "1"),
        ("{{ value | tojson }}", {"value": {"b": "é<&>'", "a": [1, None]}}, '{"b": "é<&>\'", "a": [1, null]}'),
        ("{{ value | tojson(indent=2) }}", {"value": {"a": 1}}, '{\n  "a": 1\n}'),
        ("{{ value | tojson(ensure_ascii=true) }}", {"value": "é"}, '"\\u00e9"'),
        ("{{ value | tojson(sort_keys=true) }}", {"value": {"b": 1, "a": 2}}, '{"a": 2, "b": 1}'),
        ("{{ value | tojson(separators=(',', ':')) }}", {"value": {"b": 1, "a": 2}}, '{"b":1,"a":2}'),
        # What is set inside does not leave the block.
        ("{% set x = 1 %}{% generation %}{% set x = 2 %}a{{ x }}{% endgeneration %}{{ x }}", {}, "a21"),
    ],
)  # fmt: skip
def test_templates_render_as_in_transformers(
    template: str, variables: dict[str, Any], expected: str
) -> None:
    assert render_template(template, HI, variables) == expected
    assert transformers_text(template, variables) == expected


def test_the_date_of_today() -> None:
    found = render_template("{{ strftime_now('%Y-%m-%d %H') }}", [], {})
    assert abs(datetime.datetime.strptime(found, "%Y-%m-%d %H") - datetime.datetime.now()) < (
        datetime.timedelta(hours=1, minutes=1)
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        # A template's own words come without the name of the error; Python's errors with it.
        ("{{ raise_exception('only user') }}", "refuses these messages: only user$"),
        ("{{ 1 // 0 }}", "refuses these messages: ZeroDivisionError: "),
        ("{{ missing.field }}", "refuses these messages: 'missing' is undefined"),
        # The sandbox: no way to Python's objects, and no change of what is given.
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "is unsafe|access to attribute"),
        ("{{ messages.append(1) }}", "refuses these messages: .*append"),
    ],
)
def test_templates_that_refuse(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render_template(template, list(HI), {})


def test_a_long_refusal_is_cut() -> None:
    with pytest.raises(ValueError, match=r"refuses these messages: x{300}$"):
        render_template("{{ raise_exception('x' * 1000) }}", [], {})


@pytest.mark.parametrize(
    "template", ["{% if %}", "{{ a", "{% generation %}", "{{ a | unknown }}", "{{" + "(" * 5000]
)
def test_what_is_no_template(template: str) -> None:
    with pytest.raises(ValueError, match="chat template is not valid Jinja: "):
        compile_template(template)


def test_a_template_is_compiled_once() -> None:
    assert compile_template("{{ a }}!") is compile_template("{{ a }}!")


def test_no_jinja(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    compile_template.cache_clear()
    with pytest.raises(
        ImportError, match=r"need jinja2: `pip install .*\[chat\]\"`, or give plain"
    ):
        render_template("a", [], {})


@pytest.mark.parametrize(
    ("version", "is_safe"),
    [
        ("3.1.5", False),
        ("3.0.9", False),
        ("2.11.3", False),
        ("3.1", False),
        ("3.1.6", True),
        ("3.1.10", True),
        ("3.2.0", True),
        ("4.0.0.dev1", True),
    ],
)
def test_only_sandboxes_that_hold(
    version: str, is_safe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jinja2, "__version__", version)
    compile_template.cache_clear()
    if is_safe:
        assert render_template("a", [], {}) == "a"
    else:
        with pytest.raises(ImportError, match=f"need jinja2 >= 3.1.6, and {version} is installed"):
            render_template("a", [], {})
