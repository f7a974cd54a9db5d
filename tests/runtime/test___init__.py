"""The public names of `qsample.runtime`, which are imported when they are used."""

from __future__ import annotations

import inspect

import pytest

import qsample.runtime


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("AllowedTokensFn", "qsample.runtime.callbacks"),
        ("Call", "qsample.runtime.call"),
        ("CausalLM", "qsample.runtime.causal_lm"),
        ("Delta", "qsample.runtime.request"),
        ("Engine", "qsample.runtime.engine"),
        ("EngineClosedError", "qsample.errors"),
        ("EngineStats", "qsample.runtime.request"),
        ("GenerateOutput", "qsample.runtime.output"),
        ("QueueFullError", "qsample.errors"),
        ("Request", "qsample.runtime.request"),
        ("RequestFailedError", "qsample.errors"),
        ("RequestOutput", "qsample.runtime.request"),
        ("SamplingParams", "qsample.request.sampling_params"),
        ("Step", "qsample.runtime.callbacks"),
        ("TextStreamer", "qsample.request.text.generated_text"),
        ("TokenGrammar", "qsample.request.structured.tables"),
        ("load", "qsample.runtime.causal_lm"),
    ],
)
def test_a_name_is_that_of_its_module(name: str, module: str) -> None:
    found = getattr(qsample.runtime, name)
    assert name in dir(qsample.runtime)
    if inspect.isclass(found) or inspect.isfunction(found):
        assert (found.__module__, found.__name__) == (module, name)


def test_there_are_no_other_names() -> None:
    assert dir(qsample.runtime) == sorted(qsample.runtime.__all__)
    with pytest.raises(
        AttributeError, match=r"module 'qsample.runtime' has no attribute 'generate'"
    ):
        qsample.runtime.generate  # noqa: B018
