"""`qsample prefix`, and the server that starts with its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qsample.runtime import Engine, load
from qsample.serve.models import ServedModel
from qsample.serve.settings import ServeSettings

TEXT = "ab cd ef " * 20


def test_a_text_becomes_a_file_for_engines_and_servers(run: Any, everything: Path, tmp_path: Path) -> None:
    out = tmp_path / "text.prefix"
    (tmp_path / "text").write_text(TEXT)
    status, stdout, stderr = run("prefix", everything, out, "--prompt-text", tmp_path / "text", "--json")
    assert status == 0, stderr
    told = json.loads(stdout)
    assert told == {"prefix": str(out), "tokens": told["tokens"], "bytes": out.stat().st_size}
    assert told["tokens"] >= 64
    with Engine(load(everything), slots=1, prefixes=[out]) as engine:
        assert engine.add_request(TEXT + "gh", max_new_tokens=1).result(60).usage.cached_tokens == told["tokens"]
    served = ServedModel("m", str(everything), ServeSettings(models={"m": str(everything)}, prefixes=(str(out),)))
    with served.engine as engine:
        assert engine.add_request(TEXT + "gh", max_new_tokens=1).result(60).usage.cached_tokens == told["tokens"]
    with pytest.raises(ValueError, match="give prefix_cache_dir, or one model"):
        ServeSettings(models={"a": "x", "b": "y"}, prefixes=(str(out),))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no text given; give one of --prompt, --prompt-text, --system, --system-file"),
        (["-p", "a", "--system", "b"], "--prompt and --system given"),
        (["-p", TEXT, "--thinking"], "go with --system"),
        (["--system-file", "missing"], "cannot read --system-file missing"),
        (["-p", "short"], "64 are the least"),
    ],
)
def test_wrong_options_write_nothing(
    run: Any, everything: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    status, _, stderr = run("prefix", everything, tmp_path / "out", *arguments)
    assert status in (1, 2)
    assert message in " ".join(stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_only_on_request(run: Any, everything: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    status, _, stderr = run("prefix", everything, tmp_path / "out", "-p", TEXT)
    assert status == 2
    assert "--overwrite" in stderr
    assert (tmp_path / "out").read_text() == "mine"
    assert run("prefix", everything, tmp_path / "out", "-p", TEXT, "--overwrite")[0] == 0
