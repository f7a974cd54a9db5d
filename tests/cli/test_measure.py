"""`qsample bench`: as a table and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qsample.cli import run
from tests.helpers.fake_package import fake_package
from tests.helpers.flags import unlike


def test_bench_as_json_and_as_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = fake_package(tmp_path / "package")
    arguments = [
        "bench",
        str(package.path),
        "--new-tokens",
        "4",
        "--prompt-tokens",
        "3",
        "--repetitions",
        "1",
    ]
    assert run([*arguments, "--batch", "1", "--batch", "2", "--temperature", "0.7", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [row["rows"] for row in shown["measurements"]] == [1, 2]
    assert shown["load_seconds"] > 0
    assert shown["package_bytes"] == sum(entry.bytes for entry in package.manifest.files.values())
    assert shown["peak_memory_bytes"] > 10 * 2**20

    assert run(arguments) == 0
    assert "decode, tok/s" in capsys.readouterr().out
    assert run([*arguments, "--top-p", "2"]) == 2
    assert "--top-p is 2" in capsys.readouterr().err


def test_guessed_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--new-tokens",
        "5",
        "--prompt-tokens",
        "9",
        "--repetitions",
        "2",
        "--prompt-lookup-num-tokens",
        "4",
    )
    options += (
        "--no-batch-invariant",
    )  # the fake's cache is float32, over which guesses change last bits
    package = fake_package(tmp_path / "guessing", num_speculative_tokens=4)
    assert run(["bench", str(package.path), *options, "--temperature", "0", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["measurements"]
    assert 1 <= row["tokens_per_step"] <= 5
    assert run(["bench", str(fake_package(tmp_path / "plain").path), *options]) == 1
    assert (
        "--prompt-lookup-num-tokens is 4, and the package draws a token a step"
        in capsys.readouterr().err
    )


@pytest.mark.ci
def test_bench_with_an_image(run: Any, smolvlm_package: Path) -> None:
    counts = ("--prompt-tokens", 4, "--new-tokens", 2, "--repetitions", 1, "--batch", 2)
    status, out, err = run("bench", smolvlm_package, "--image", "48x20", *counts, "--json")
    assert status == 0, err
    (found,) = json.loads(out)["measurements"]
    assert (found["rows"], found["image_tokens"] % 9, found["vision_ms"] > 0) == (2, 0, True)
    assert found["prompt_tokens"] > found["image_tokens"] + 4  # the texts around its tiles
    status, _, err = run("bench", smolvlm_package, "--image", "48")
    assert (status, "give a width and a height in pixels" in err) == (2, True)


def test_the_flags() -> None:
    own = """
        package PACKAGE_OR_MODEL required; --batch >=1 repeated; --prompt-tokens >=1 = 64; --new-tokens >=1 = 64
        --repetitions >=1 = 3; --image WIDTHxHEIGHT; --json; --temperature = 0.0 [Sampling]; --top-k = 0 [Sampling]
        --top-p = 1.0 [Sampling]; --min-p = 0.0 [Sampling]; --repetition-penalty = 1.0 [Sampling]
        --prompt-lookup-num-tokens = 0 [Sampling]
    """
    assert unlike(own, "bench") == []
