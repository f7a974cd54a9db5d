"""`qsample evaluate` and `verify`: as tables, as JSON, with a plot."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from qsample.addons.evaluate import commands
from tests.helpers.fake_package import fake_package
from tests.helpers.flags import unlike

TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps.\n"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_a_table_json_and_a_plot(run: Any, text: Path, tmp_path: Path) -> None:
    first, second = fake_package(tmp_path / "first"), fake_package(tmp_path / "second")
    arguments = ("evaluate", first.path, "--text", text, "--text", text, "--against", second.path)
    status, out, err = run(*arguments, "--max-length", 16, "--stride", 8, "--confidence", 0.9)
    assert (status, err) == (0, "")
    assert "first" in out
    assert "KL, nats" in out
    assert (
        f"{2 * len(TEXT)} tokens of 2 texts, in windows of 16, 8 apart; 90 % intervals by block bootstrap"
        in out
    )

    plot = tmp_path / "plot.svg"
    status, out, err = run(*arguments, "--plot", plot, "--step-time", "--json")
    assert (status, err) == (0, f"plot written to {plot}\n")
    assert plot.read_text("utf-8").startswith("<?xml")
    shown = json.loads(out)
    assert shown["tokens"] == 2 * len(TEXT)
    one, reference = shown["packages"]
    assert one["comparisons"][0]["reference"] == reference["path"] == str(second.path)
    assert one["comparisons"][0]["kl"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert one["step_ms"] > 0
    assert one["perplexity"]["low"] < one["perplexity"]["value"] < one["perplexity"]["high"]


@pytest.mark.ci
def test_no_columns_for_what_was_not_asked_for(run: Any, text: Path, tmp_path: Path) -> None:
    status, out, _ = run("evaluate", fake_package(tmp_path / "package").path, "--text", text)
    assert status == 0
    assert "perplexity" in out
    assert all(word not in out for word in ("KL", "top-1", "step, ms", "against"))


def test_several_references_have_a_row_each(run: Any, text: Path, tmp_path: Path) -> None:
    names = ["one", "two", "three"]
    one, two, three = (fake_package(tmp_path / name).path for name in names)
    status, out, _ = run("evaluate", one, "--text", text, "--against", two, "--against", three)
    assert status == 0
    rows = [line.split() for line in out.splitlines() if "0 (0 to 0)" in line]
    assert ["two" in rows[0], "three" in rows[1]] == [True, True]


def test_verify_two_packages(run: Any, text: Path, tmp_path: Path) -> None:
    first, second = (
        fake_package(tmp_path / "first").path,
        fake_package(tmp_path / "second", logprobs=True).path,
    )
    arguments = (
        "verify",
        first,
        "--against",
        second,
        "--text",
        text,
        "--positions",
        20,
        "--max-length",
        20,
    )
    status, out, err = run(*arguments, "--max-difference", 0, "--min-agreement", 1)
    assert (status, err) == (0, "")
    assert out.count("0.00e+00     0.00e+00   0.00e+00   100") == 2
    assert "captured     none" in out
    assert f"20 positions, the 20 likeliest tokens of {second}" in " ".join(out.split())

    plot = tmp_path / "plot.svg"
    status, out, err = run(*arguments, "--plot", plot, "--json")
    assert (status, err) == (0, f"plot written to {plot}\n")
    assert "difference from second up to, nats" in plot.read_text("utf-8")
    shown = json.loads(out)
    assert (shown["package"], shown["reference"]) == (str(first), str(second))
    assert shown["forms"]["captured"] is None
    assert len(shown["forms"]["batched"]["quantiles"]) == 101
    assert shown["sha256"] == shown["alone_sha256"]
    assert (shown["limits"]["p99"], shown["failures"]) == (None, [])


@pytest.mark.ci
def test_verify_against_a_checkpoint(run: Any, llama_package: Path, checkpoint: Any) -> None:
    """The checkpoint is run by transformers; of another model, it is outside of every limit."""
    own, other = checkpoint("llama"), checkpoint("qwen3")
    status, out, _ = run(
        "verify", llama_package, "--against", own, "--max-difference", "1e-4", "--positions", 40
    )
    assert status == 0
    assert f"tokens of {own}" in " ".join(out.split())
    limits = (
        "--max-mean",
        "0.01",
        "--max-p99",
        "0.01",
        "--max-difference",
        "0.01",
        "--min-agreement",
        "0.99",
    )
    status, out, err = run(
        "verify", llama_package, "--against", other, "--positions", 40, *limits, "--json"
    )
    assert status == 1
    failures = json.loads(out)["failures"]
    assert err.splitlines()[-8:] == failures  # after the progress bar of transformers
    assert [failure.split(" is ")[0] for failure in failures] == [
        f"{form}: {name}"
        for form in ("sequential", "batched")
        for name in ("mean", "p99", "largest", "agreement")
    ]


FLAGS = {
    "evaluate": """
        packages PACKAGE_OR_MODEL... required; --text FILE repeated required
        --against PACKAGE_OR_MODEL repeated; --max-length >=2; --stride >=1; --batch-size >=1 = 8
        --confidence = 0.95; --seed >=0 = 0; --step-time; --plot FILE; --json
    """,
    "verify": """
        package PACKAGE_OR_MODEL required; --against CHECKPOINT_OR_PACKAGE; --trusted-keys FILE repeated
        --text FILE repeated; --positions >=1 = 256; --max-length >=2; --batch-size >=1 = 8; --max-mean >=0
        --max-p99 >=0; --max-difference >=0; --min-agreement >=0 <=1; --plot FILE; --json
    """,
}


@pytest.mark.parametrize("command", FLAGS)
def test_the_flags(command: str) -> None:
    assert unlike(FLAGS[command], command) == []


class Signer:
    kind, fingerprint = "key", "ab"

    def __str__(self) -> str:
        return "key ab"


@pytest.mark.parametrize(
    ("found", "trusted", "words"),
    [
        (None, None, "; not signed"),
        (Signer(), None, "; signed by the key ab; --trusted-keys checks that"),
        (None, Signer(), "; signed by the trusted key ab"),
    ],
)
def test_verify_says_who_signed(
    found: Any, trusted: Any, words: str, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fake_package(tmp_path / "p").path
    package = SimpleNamespace(path=path, signer=trusted, manifest=SimpleNamespace(files="abc"))
    monkeypatch.setattr(commands, "signer_of", lambda _: found)
    read = MagicMock(return_value=package)
    monkeypatch.setattr(commands, "read_package", read)
    given = [] if trusted is None else ["--trusted-keys", "k"]
    told = f"{path}: 3 files have the sha256 of the manifest{words}\n"
    assert run("verify", path, *given)[:2] == (0, told)
    facts = json.loads(run("verify", path, *given, "--json")[1])
    signature = {"kind": "key", "fingerprint": "ab", "trusted": trusted is not None}
    wanted = signature if found or trusted else None
    assert facts == {"package": str(path), "files": 3, "signature": wanted}
    assert read.call_args_list == [call(str(path), trusted_keys=given[1:] or None)] * 2
