"""The form of an answer: who keeps it, and the arguments that the engine gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from qsample.addons.serve.forms import ANY_TEXT, AnswerForm


def form(shortest: int | None, **options: Any) -> AnswerForm:
    """A form whose tables have a shortest answer; None for a form without tables."""
    tables = None if shortest is None else SimpleNamespace(shortest=shortest)
    prepared: Any = SimpleNamespace(grammar="grammar", tables=tables)
    return AnswerForm(prepared, **options)


@pytest.mark.parametrize(
    ("answer", "keeper", "shortest", "arguments"),
    [
        (ANY_TEXT, None, 0, {}),
        (AnswerForm(thinking_token_budget=5), None, 0, {}),
        (form(None), "host", 0, {"grammar": "grammar"}),
        (form(1), "graph", 1, {"grammar": "grammar"}),
        (form(7), "graph", 7, {"grammar": "grammar"}),
        (form(0), None, 0, {"grammar": "grammar"}),
        (
            form(7, thinking_token_budget=0),
            "graph",
            7,
            {"grammar": "grammar", "thinking_token_budget": 0},
        ),
    ],
)
def test_forms(
    answer: AnswerForm, keeper: str | None, shortest: int, arguments: dict[str, Any]
) -> None:
    assert answer.keeper == keeper
    assert answer.shortest == shortest
    assert answer.arguments() == arguments
    details = {} if keeper is None else {"structured_outputs": keeper}
    assert answer.usage_details == details


def test_any_text() -> None:
    assert (ANY_TEXT.prepared, ANY_TEXT.may_have_thoughts, ANY_TEXT.thinking_token_budget) == (
        None,
        True,
        None,
    )
