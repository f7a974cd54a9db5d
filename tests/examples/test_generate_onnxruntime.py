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


def same_text(package: Package, seed: int, **options: float) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    result = run(package.path, "--prompt=In the", f"--seed={seed}", "--max-new-tokens=20", *flags)
    assert result.returncode == 0, result.stderr
    model = load(package.path)
    output = model.generate("In the", max_new_tokens=20, seed=seed, **({"top_k": 0} | options))
    assert model.tokenizer is not None
    assert result.stdout == model.tokenizer.decode(output.sequences[0].tolist()) + "\n"


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
