"""An older opset: what it writes differently, and what it lacks."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from qsample.compiler.passes.opset import lower_opset
from qsample.errors import CompileError


def model_of(nodes: list[ir.Node], x: ir.Value) -> ir.Model:
    return ir.Model(ir.Graph([x], [], nodes=nodes, opset_imports={"": 20}), ir_version=10)


def test_gelu_is_written_as_onnx_runtime_does() -> None:
    x = ir.val("x", ir.DataType.FLOAT, [2])
    model = model_of([ir.node("Gelu", [x], {"approximate": "tanh"}), ir.node("Gelu", [x])], x)
    assert lower_opset(model, 18)
    assert [(node.domain, node.op_type) for node in model.graph] == [
        ("com.microsoft", "FastGelu"),
        ("com.microsoft", "Gelu"),
    ]
    assert model.opset_imports == {"": 18, "com.microsoft": 1}
    assert not lower_opset(model, 18)


def test_a_cast_forgets_what_is_for_float8() -> None:
    x = ir.val("x", ir.DataType.FLOAT, [2])
    model = model_of([ir.node("Cast", [x], {"to": ir.DataType.FLOAT16, "saturate": 1})], x)
    assert lower_opset(model, 18)
    assert list(model.graph.node(0).attributes) == ["to"]


def test_what_the_opset_lacks_is_refused() -> None:
    text = ir.val("text", ir.DataType.STRING, [2])
    with pytest.raises(CompileError, match=r"StringConcat .* is not in opset 18"):
        lower_opset(model_of([ir.node("StringConcat", [text, text])], text), 18)
    x = ir.val("x", ir.DataType.FLOAT, [2])
    with pytest.raises(CompileError, match=r"Reshape .* has allowzero, which opset 13 lacks"):
        lower_opset(model_of([ir.node("Reshape", [x, None], {"allowzero": 1})], x), 13)
