"""A package whose guesses would change its tokens is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.compiler.targets import cpu
from qsample.errors import CompileError
from qsample.package.package import read_package


@pytest.mark.ci
def test_over_a_float_cache_guesses_change_the_last_bits(
    llama_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_check_speculation", lambda plan: None)
    options = CompileOptions(ctx_len=64, num_speculative_tokens=5)
    with pytest.raises(CompileError, match="self-test failed: the logits of row 0 differ between a step of several"):
        compile_package(read_package(llama_package), tmp_path / "device", options)
    assert os.listdir(tmp_path) == []
