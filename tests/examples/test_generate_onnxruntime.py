"""The stand-alone script gives the runtime's tokens, without qsample."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qsample.contract.tensors import EXTRA_PARAMETERS
from qsample.package.package import Package, read_package
from qsample.runtime import load
from tests.helpers.fake_package import compilation, fake_package
from tests.helpers.grammar_files import GrammarFile, choice_tables, write_tables

SCRIPT = Path(__file__).parents[2] / "examples" / "generate_onnxruntime.py"


def run(package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # -I: neither the repository nor an installed qsample's folder is on the path by way of the environment.
    return subprocess.run(
        [sys.executable, "-I", SCRIPT, package, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )


def same_text(
    package: Package, seed: int, grammar: GrammarFile | None = None, **options: float
) -> str:
    """Compare the script's text with the runtime's and return it."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    keywords: dict[str, Any] = {"top_k": 0} | options
    if grammar is not None:
        flags.append(f"--grammar={grammar.path}")
        keywords["grammar"] = grammar.token_grammar
    result = run(package.path, "--prompt=In the", f"--seed={seed}", "--max-new-tokens=20", *flags)
    assert result.returncode == 0, result.stderr
    model = load(package.path)
    output = model.generate("In the", max_new_tokens=20, seed=seed, **keywords)
    assert model.tokenizer is not None
    text = model.tokenizer.decode(output.sequences[0].tolist())
    assert result.stdout == text + "\n"
    return text


def test_it_imports_only_the_runtime_libraries() -> None:
    tree = ast.parse(SCRIPT.read_text())
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported == {"argparse", "json", "pathlib", "numpy", "onnxruntime", "tokenizers"}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_it_gives_the_runtimes_text(temperature: float, tmp_path: Path) -> None:
    same_text(fake_package(tmp_path / "package"), 5, temperature=temperature, top_p=1.0)


def test_packages_with_every_feature_and_device_packages(tmp_path: Path) -> None:
    features = {
        "logit_bias": True,
        "allowed_tokens": True,
        "logprobs": True,
        "top_logprobs": 2,
        "probs": True,
    }
    same_text(fake_package(tmp_path / "features", **features), 2, temperature=0.9, top_p=1.0)
    filters = {"filters": tuple(EXTRA_PARAMETERS), "filter_order": "llama.cpp"}
    same_text(fake_package(tmp_path / "filters", **filters), 2, temperature=0.9, top_p=1.0)
    same_text(
        fake_package(tmp_path / "device", compilation=compilation()), 3, temperature=0.9, top_p=1.0
    )


ALL_FILTERS = {"filters": tuple(EXTRA_PARAMETERS)}


@pytest.mark.parametrize("features", [{}, pytest.param(ALL_FILTERS, marks=pytest.mark.slow)])
def test_the_real_graph(features: dict[str, Any], exported: Callable[..., Path]) -> None:
    same_text(read_package(exported("llama", **features)), 7, temperature=0.8, top_k=20, top_p=0.9)


def grammar_file(package: Package, path: Path) -> GrammarFile:
    """A choice between two words for the tokens of a package."""
    tokenizer = load(package.path).tokenizer
    assert tokenizer is not None
    answers = [tokenizer.encode(word) for word in ("yes", "never")]
    return write_tables(path, choice_tables(package.manifest.interface.vocab_size, answers))


@pytest.mark.ci
def test_an_answer_follows_the_tables(exported: Callable[..., Path], tmp_path: Path) -> None:
    package = read_package(exported("llama", grammars=True))
    grammar = grammar_file(package, tmp_path / "choice.safetensors")
    texts = {same_text(package, seed, grammar, temperature=2.0, top_p=1.0) for seed in range(4)}
    assert texts == {"In theyes", "In thenever"}
    # Without the option, every token is allowed.
    same_text(package, 1, temperature=0.8, top_p=0.9)


@pytest.mark.ci
def test_an_answer_follows_the_tables_in_steps_of_several_tokens(
    guessing_package: Path, tmp_path: Path
) -> None:
    package = read_package(guessing_package)
    grammar = grammar_file(package, tmp_path / "choice.safetensors")
    assert same_text(package, 3, grammar, temperature=0.0) in {"In theyes", "In thenever"}
    same_text(package, 3, temperature=0.8, top_p=0.9)


def test_a_grammar_that_the_package_or_the_limit_refuses(
    exported: Callable[..., Path], llama_package: Path, tmp_path: Path
) -> None:
    package = read_package(exported("llama", grammars=True))
    grammar = grammar_file(package, tmp_path / "choice.safetensors")
    shortest = grammar.tables["grammar_distances"][1]
    other = write_tables(tmp_path / "other.safetensors", choice_tables(7, [[1]]))
    for path, file, limit, message in (
        (llama_package, grammar, 20, "the package takes no grammars"),
        (package.path, other, 20, "the grammar is for 7 tokens and the model has"),
        (package.path, grammar, shortest - 1, f"give --max-new-tokens {shortest} or more"),
    ):
        result = run(path, f"--grammar={file.path}", f"--max-new-tokens={limit}")
        assert (result.returncode, result.stdout) == (1, "")
        assert message in result.stderr
        assert result.stderr.count("\n") == 1


def test_a_row_that_stops(tmp_path: Path) -> None:
    package = fake_package(tmp_path / "package", manifest={"token_ids": _stops()})
    same_text(package, 1, temperature=0.9, top_p=1.0)


def _stops() -> object:
    from qsample.package.package import TokenIds

    return TokenIds(0, 1, tuple(range(100, 200)))


def test_clear_messages(tmp_path: Path) -> None:
    result = run(fake_package(tmp_path / "host", sampler=False).path)
    assert (result.returncode, result.stderr.strip()) == (
        1,
        "the package was exported without its sampler; this script needs a package with the sampler",
    )
    result = run(
        fake_package(tmp_path / "short", compilation=compilation(ctx_len=4)).path,
        "--prompt=too long",
    )
    assert (result.returncode, result.stderr.strip()) == (
        1,
        "the prompt has 9 tokens and the context holds 4",
    )
