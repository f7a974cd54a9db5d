"""A command line that runs in the test's own process, and a package that the command exported."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest

from qsample import cli
from tests.conftest import made_once
from tests.helpers.command_line import qsample


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command line here; (status, stdout, stderr)."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        status = cli.run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture(scope="session")
def everything(checkpoint: Any, shared_folder: Path) -> Path:
    """A package with every feature, exported by the command."""
    features = ["--logprobs", "--top-logprobs", "3", "--logit-bias", "--allowed-tokens", "--return-pdfs"]

    def export(out: Path) -> None:
        # What is there already is replaced only when that is asked for.
        out.mkdir()
        (out / "qsample.json").write_text("{}")
        with redirect_stderr(io.StringIO()) as refused:
            assert cli.run(["export", str(checkpoint("llama")), str(out)]) == 1
        assert "already holds a package" in refused.getvalue()
        done = qsample("export", checkpoint("llama"), out, "--overwrite", *features)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{out}\n"
        *stages, written = done.stderr.splitlines()
        assert all(re.fullmatch(r" *\d+\.\d s  [a-zA-Z -]+", line) for line in stages), "no notices of the libraries"
        assert [stages[0].split("  ")[-1], stages[-1].split("  ")[-1]] == ["starting", "publishing"]
        assert written.endswith("written to")

    return made_once(shared_folder / "everything", export)
