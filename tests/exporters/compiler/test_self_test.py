"""The self-test: a graph that chooses other tokens is refused."""

from __future__ import annotations

import os
from pathlib import Path

import onnx_ir as ir
import pytest

from qsample.errors import CompileError
from qsample.exporters.compiler.compile import compile_package
from qsample.exporters.compiler.options import CompileOptions
from qsample.exporters.compiler.targets import cpu
from qsample.package import read_package


def test_self_test_refuses_a_wrong_graph(llama_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = cpu.lean_passes

    def negate_first_norm(model: ir.Model) -> bool:
        """Plant a bug: the first norm of the model has the wrong sign."""
        norm = next(node for node in model.graph if node.op_type == "SimplifiedLayerNormalization")
        weight = norm.inputs[1]
        assert weight is not None
        assert weight.const_value is not None
        weight.const_value = ir.tensor(-weight.const_value.numpy())
        return True

    monkeypatch.setattr(cpu, "lean_passes", lambda *given: (*real(*given), negate_first_norm))
    with pytest.raises(CompileError, match=r"self-test failed: .* times of 32"):
        compile_package(read_package(llama_package), tmp_path / "device", CompileOptions(ctx_len=64))
    assert os.listdir(tmp_path) == []
