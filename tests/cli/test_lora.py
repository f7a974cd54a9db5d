"""`--lora`: the adapters of a command line; the oracle is `generate` in Python."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qsample.runtime import CausalLM, SamplingParams, load
from qsample.runtime.decode.prefix_file import PrefixFile, signature_of
from tests.helpers.adapters import random_adapter

SETTINGS = [
    "--max-new-tokens",
    "6",
    "--temperature",
    "1",
    "--top-k",
    "0",
    "--seed",
    "1",
    "--stop-id",
    "1",
]


@pytest.fixture
def package(adapted: Callable[..., Path]) -> Path:
    return adapted("llama", logprobs=True, max_loras=2, max_lora_rank=4)


@pytest.fixture
def model(package: Path, tmp_path: Path) -> CausalLM:
    """With the adapters a and b, of folders of their names."""
    model = load(package)
    for seed, name in enumerate("ab"):
        model.load_adapter(name, random_adapter(tmp_path / name, model.interface, seed, rank=4))
    return model


@pytest.mark.ci
def test_the_only_adapter_is_used_and_another_by_its_name(
    run: Any, package: Path, model: CausalLM, tmp_path: Path
) -> None:
    loras = [f"--lora={name}={tmp_path / name}" for name in "ab"]
    cases = [(loras[:1], "a"), (loras, None), ([*loras, "--adapter", "b"], "b")]
    for arguments, name in cases:
        status, out, err = run(
            "generate", package, "-p", "In the beginning", "--json", *arguments, *SETTINGS
        )
        assert status == 0, err
        params = SamplingParams(max_new_tokens=6, seed=1, eos_token_id=(1,), adapter=name)
        wanted = model.generate("In the beginning", params).token_ids[0]
        assert json.loads(out)["results"][0]["token_ids"] == wanted


@pytest.mark.ci
def test_rows_of_a_prompt_file_choose_adapters(
    run: Any, package: Path, model: CausalLM, tmp_path: Path
) -> None:
    names: list[Any] = ["a", "b", None, "c"]
    rows = [{"prompt": [5, 6, 7], "adapter": name, "seed": 1} for name in names]
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["generate", package, "--prompt-file", prompts, "--output", output, *SETTINGS]
    loras = [f"--lora={name}={tmp_path / name}" for name in "ab"]
    assert run(*command, *loras)[0] == 1
    *lines, failed = [json.loads(line) for line in output.read_text().splitlines()]
    for line, name in zip(lines, names[:3], strict=True):
        params = SamplingParams(max_new_tokens=6, seed=1, eos_token_id=(1,), adapter=name)
        assert line["token_ids"] == model.generate([[5, 6, 7]], params).token_ids[0]
    assert failed["error"]["message"].startswith("adapter is 'c', and a, b is loaded")


@pytest.mark.ci
def test_a_prefix_and_a_measurement_with_adapters(
    run: Any, package: Path, model: CausalLM, tmp_path: Path
) -> None:
    file_path = tmp_path / "own.prefix"
    text = tmp_path / "text"
    text.write_text("And the LORD spake unto Moses. " * 5)
    status, _, err = run(
        "prefix", package, file_path, "--prompt-text", text, f"--lora=a={tmp_path / 'a'}"
    )
    assert status == 0, err
    file = PrefixFile.open(file_path, signature_of(model.package, model.sessions), model.interface)
    assert file.adapter == model.adapters["a"].sha256
    loras = [f"--lora={name}={tmp_path / name}" for name in "ab"]
    short = ["--batch", "3", "--prompt-tokens", "4", "--new-tokens", "2", "--repetitions", "1"]
    status, out, err = run("bench", package, *short, "--json", *loras)
    assert status == 0, err
    assert json.loads(out)["measurements"][0]["rows"] == 3
