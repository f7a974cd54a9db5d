"""Grammars that are compiled in a process of their own: what would end or hold up the server ends there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from qsample.runtime import CausalLM
from qsample.serve.grammar import Form, TokenizerArguments, Trial, grammar_of

SLOW = "(ab)?" * 100_000  # as a regular expression: minutes, and gigabytes


def chained(count: int) -> dict[str, Any]:
    """A schema of definitions that refer to each other."""
    links = {f"d{number}": {"type": "array", "items": {"$ref": f"#/$defs/d{number + 1}"}} for number in range(count)}
    return {"$defs": {**links, f"d{count}": {"type": "null"}}, "$ref": "#/$defs/d0"}


@pytest.fixture(scope="module")
def trial(served_model: CausalLM) -> Iterator[Trial]:
    tokenizer = served_model.tokenizer
    assert tokenizer is not None
    arguments = TokenizerArguments(
        tokenizer=tokenizer.to_json(), n_vocab=served_model.interface.vocab_size, eos_token=[2]
    )
    made = Trial(lambda: arguments, seconds=600)
    yield made
    made.stop()


@pytest.mark.parametrize(
    ("form", "seconds", "reason"),
    [
        (Form("json_schema", chained(5000)), 600, "too large or nested too deep"),
        (Form("regex", SLOW), 0.5, "takes more than 0.5 seconds"),
    ],
)
def test_what_goes_too_far_ends_alone(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, form: Form, seconds: float, reason: str
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(trial, "_seconds", seconds)
        assert reason in str(trial.refusal(grammar_of(form)))
    assert trial.refusal(grammar_of(Form("regex", "[a-z]+"))) is None


def test_an_invalid_grammar_is_left_to_the_server(trial: Trial) -> None:
    assert trial.refusal("start: missing") is None
