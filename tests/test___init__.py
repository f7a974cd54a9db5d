"""The public names of `qsample`, which are imported when they are used."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import qsample


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("AutoModelForCausalLM", "qsample.models.auto_model"),
        ("AutoModelForImageTextToText", "qsample.models.auto_model"),
        ("CompileOptions", "qsample.compiler.options"),
        ("SamplingParams", "qsample.request.sampling_params"),
        ("bake", "qsample.addons.bake.api"),
        ("evaluate", "qsample.addons.evaluate"),
    ],
)
def test_a_name_is_that_of_its_module(name: str, module: str) -> None:
    found = getattr(qsample, name)
    assert found.__name__ == name
    assert found.__module__.startswith(module)
    assert name in dir(qsample)


def test_there_are_no_other_names() -> None:
    assert dir(qsample) == sorted(qsample.__all__)
    with pytest.raises(AttributeError) as raised:
        qsample.other  # noqa: B018
    assert str(raised.value) == "module 'qsample' has no attribute 'other'"
    with pytest.raises(AttributeError, match=r"'load'; AutoModelForCausalLM.from_pretrained opens"):
        qsample.load  # noqa: B018


@pytest.mark.parametrize(("before", "after"), [(None, "1"), ("0", "0")])
def test_onnxruntime_sends_nothing_unless_a_user_wants_it(before: str | None, after: str) -> None:
    name = "ORT_DISABLE_TELEMETRY"
    environment = {key: value for key, value in os.environ.items() if key != name}
    if before is not None:
        environment[name] = before
    done = subprocess.run(
        [sys.executable, "-c", f"import os, qsample; print(os.environ[{name!r}])"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == after
