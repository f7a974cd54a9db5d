"""The TensorRT target: the graph that it is given."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from qsample.compiler.options import CompileOptions
from qsample.compiler.plan import make_plan
from qsample.compiler.targets.tensorrt import TensorRtTarget
from qsample.package import Package
from tests.helpers.building import build

CAPACITY = 48
CONTROL_FLOW = {"If", "Loop", "Scan"}


def test_tensorrt_is_given_fixed_shapes_and_plain_operators(llama: Package, tmp_path: Path) -> None:
    target = TensorRtTarget()
    plan = make_plan(llama, CompileOptions(provider="tensorrt", batch_size=1, ctx_len=CAPACITY, dtype="float16"))
    interface = target.interface(plan)
    assert (interface.dtype, interface.captured) == ("float16", False)
    model = build(plan, target, tmp_path, until="check-states").model
    assert not CONTROL_FLOW & {node.op_type for node in model.graph.all_nodes()}
    for value in model.graph.inputs:
        assert value.shape is not None
        assert all(isinstance(dim, int) for dim in value.shape), value.name
    attentions = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    assert len(attentions) == 2
    assert {node.op_type for node in model.graph if node.domain} == {"GroupQueryAttention"}
    for node in attentions:
        total = node.inputs[6]
        assert total is not None
        assert total.const_value is not None
        assert total.const_value.numpy() == CAPACITY
    dtypes = {value.name: value.dtype for value in (*model.graph.inputs, *model.graph.outputs)}
    assert dtypes["past_key_values.0.key"] == dtypes["present.1.value"] == ir.DataType.FLOAT16
    assert dtypes["logits"] == ir.DataType.FLOAT
