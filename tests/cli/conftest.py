"""A command line that runs in the test's own process, and a package with every feature."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qsample import cli


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command line here; (status, stdout, stderr)."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        status = cli.run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture(scope="session")
def everything(exported: Callable[..., Path]) -> Path:
    """A package with every feature."""
    shown = {"logprobs": True, "top_logprobs": 3, "return_pdfs": True}
    return exported("llama", logit_bias=True, allowed_tokens=True, **shown)
