"""Graphs that compute ids and flags in float32: the same results, without the kernels that WebGPU lacks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from onnx_ir.passes import common as common_passes

from qsample.compiler.passes.float_ids import ids_as_floats, own_constants
from qsample.compiler.pipeline import apply
from qsample.contract.interface import Features, Interface
from qsample.sampler import build_sampler
from qsample.sampler.tensor import (
    BOOL,
    FLOAT,
    INT32,
    INT64,
    Tensor,
    branch,
    building,
    concat,
    op,
    top,
)
from tests.helpers.sampler_cases import PAD, opened, random_step

Array = np.ndarray
FILTERS = ("typical_p", "dry", "penalty_last_n", "adaptive_p")
LACKING = {
    "Concat": ("bool",),
    "GatherElements": ("bool", "int32", "int64"),
    "Or": ("bool",),
    "ReduceMax": ("bool", "int64"),
    "ReduceMin": ("bool", "int64"),
    "Slice": ("bool", "int32", "int64"),
    "Squeeze": ("bool",),
    "TopK": ("int32", "int64"),
    "Xor": ("bool",),
}


def graph_of(make: Callable[..., Tensor], **inputs: tuple[ir.DataType, list[object]]) -> ir.Model:
    values = [
        ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        for name, (dtype, shape) in inputs.items()
    ]
    graph = ir.Graph(values, [], nodes=[], opset_imports={"": 20}, name="graph")
    with building(graph):
        result = make(*map(Tensor, values))
    result.value.name = "y"
    graph.outputs.append(result.value)
    return ir.Model(graph, ir_version=10)


IDS = np.array([[70_001, 3, 150_000], [9, 16_777_215, 0]])
FLAGS = np.array([[True, False, True], [False, False, True]])
CASES: dict[str, tuple[Callable[[Tensor], Tensor], Array]] = {
    "or": (lambda x: x | ~x.columns(0, 1), FLAGS),
    "xor": (lambda x: op("Xor", x, x.columns(0, 1)), FLAGS),
    "concat": (lambda x: concat(x, ~x), FLAGS),
    "squeeze": (lambda x: x.columns(0, 1).squeeze(), FLAGS),
    "slice": (lambda x: x.columns(1, 3), IDS),
    "slice32": (lambda x: x.columns(1, 3), IDS.astype(np.int32)),
    "min": (lambda x: x.min(), IDS),
    "top": (lambda x: top(x, 2)[0], IDS),
    "gather": (lambda x: x.gather(top(x, 3, largest=False)[1]), IDS),
    "shape": (lambda x: op("Range", 0, op("Squeeze", op("Shape", x, start=-1)), 1), IDS),
    "sizes": (lambda x: op("Shape", x, end=-1), IDS),
    "all sizes": (lambda x: op("Shape", x), FLAGS),
    "power": (
        lambda x: op("Pow", x.columns(0, 1), x),
        np.linspace(1, 2, 8, dtype=np.float32).reshape(2, 4),
    ),
}
TYPES = {"bool": BOOL, "int64": INT64, "int32": INT32, "float32": FLOAT}


@pytest.mark.parametrize("name", CASES)
def test_the_result_is_the_same(name: str) -> None:
    make, x = CASES[name]
    model = graph_of(make, x=(TYPES[x.dtype.name], ["B", "N"]))
    (expected,) = opened(model).run(None, {"x": x})
    assert ids_as_floats(model)
    (got,) = opened(model).run(None, {"x": x})
    assert model.graph.outputs[0].name == "y"
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)
    assert not lacking(model)


def test_flags_are_not_cast_between_operators_that_lack_them() -> None:
    """Once to float32 and once back, whatever is between."""
    model = graph_of(
        lambda x: concat(x.unsqueeze(), (~x).unsqueeze()).unsqueeze(0), x=(BOOL, ["N"])
    )
    flags = np.array([True, False, False])
    (expected,) = opened(model).run(None, {"x": flags})
    assert apply(model, ids_as_floats, common_passes.RemoveUnusedNodesPass())
    casts = [node.outputs[0].dtype for node in model.graph if node.op_type == "Cast"]
    assert casts == [ir.DataType.FLOAT, ir.DataType.FLOAT, ir.DataType.BOOL]
    (got,) = opened(model).run(None, {"x": flags})
    np.testing.assert_array_equal(got, expected)


def test_a_cast_to_integers_of_the_graph_itself_stays() -> None:
    """It cuts fractions off."""
    model = graph_of(lambda x: x.to(INT64).columns(0, 2), x=(FLOAT, ["B", "N"]))
    assert ids_as_floats(model)
    (got,) = opened(model).run(None, {"x": np.array([[1.75, -2.5, 3]], np.float32)})
    assert got.tolist() == [[1, -2]]


@pytest.mark.parametrize("operator", ["And", "Or", "Xor"])
@pytest.mark.parametrize("order", [0, 1])
def test_flags_of_rows_are_multiplied(operator: str, order: int) -> None:
    """WebGPU's And is wrong if it repeats an operand along the last axis; flags of equal lengths are left to it."""

    def step(x: Tensor, row: Tensor) -> Tensor:
        operands = (row, x) if order else (x, row)
        return op(operator, *operands) & ~x

    model = graph_of(step, x=(BOOL, ["B", "N"]), row=(BOOL, ["B", 1]))
    feeds = {"x": np.array([[1, 0, 0], [0, 1, 0]], bool), "row": np.array([[True], [False]])}
    (expected,) = opened(model).run(None, feeds)
    assert ids_as_floats(model)
    shapes = [
        [value.shape[-1] for value in node.inputs if value is not None and value.shape]
        for node in model.graph
        if node.op_type == "And"
    ]
    assert shapes
    assert all(lengths.count(1) != 1 for lengths in shapes)
    (got,) = opened(model).run(None, feeds)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("shape", [["B", "N"], ["N"], []])
def test_int64_is_passed_out_of_an_if_without_a_cast(shape: list[object]) -> None:
    model = graph_of(
        lambda x, condition: branch(condition, lambda: (x + 1,), lambda: (op("Identity", x),))[0],
        x=(INT64, shape),
        condition=(BOOL, []),
    )
    ids_as_floats(model)
    assert not {"Cast", "Identity"} & {node.op_type for node in model.graph.all_nodes()}
    x = np.full([2] * len(shape), 2**62)
    for condition, added in ((True, 1), (False, 0)):
        (got,) = opened(model).run(None, {"x": x, "condition": np.array(condition)})
        np.testing.assert_array_equal(got, x + added)


def lacking(model: ir.Model) -> list[str]:
    """Nodes that compute ids or flags with an operator that has no kernel for them; shapes are the host's."""
    shapes: set[ir.Value] = set()
    found = []
    for node in model.graph.all_nodes():
        values = [value for value in node.inputs if value is not None and value.const_value is None]
        if node.op_type == "Shape" or (values and all(value in shapes for value in values)):
            shapes.update(node.outputs)
        elif (dtype := node.inputs[0].dtype) is not None and dtype.name.lower() in LACKING.get(
            node.op_type, ()
        ):
            found.append(f"{node.op_type} {node.name} of {dtype.name}")
    return found


def test_the_whole_sampler() -> None:
    """No operator that WebGPU lacks is left, on either side of the If; a step gives the same as before."""
    face = Interface(
        300,
        (),
        captured=True,
        features=Features(allowed_tokens=True, grammars=True, logit_bias=True, filters=FILTERS),
    )
    model = build_sampler(face, PAD, for_webgpu=True)
    before = opened(model)
    assert lacking(model)
    ids_as_floats(model)
    own_constants(model)
    assert not lacking(model)
    inside = [node for part in model.graph.subgraphs() for node in part]
    assert {node.op_type for node in inside} >= {"ReduceMin", "ScatterElements"}
    constants = [
        value
        for node in inside
        for value in node.inputs
        if value is not None and value.const_value is not None
    ]
    assert all(value.graph is not model.graph for value in constants)

    after, rng = opened(model), np.random.default_rng(0)
    names = [output.name for output in before.get_outputs()]
    for _ in range(3):
        logits, inputs = random_step(rng, face, 3, sequence=2)
        for old, new in zip(
            *(session.run(names, {"logits": logits, **inputs}) for session in (before, after)),
            strict=True,
        ):
            np.testing.assert_array_equal(new, old)


def test_constants_are_copied_into_the_graph_of_an_if_alone() -> None:
    model = graph_of(
        lambda x: branch(
            op("Squeeze", op("Shape", x, end=1)) > 1, lambda: (x * 3.0,), lambda: (x,)
        )[0],
        x=(FLOAT, ["B"]),
    )
    assert own_constants(model)
    assert not own_constants(model)
    for rows in (1, 2):
        (got,) = opened(model).run(None, {"x": np.ones(rows, np.float32)})
        assert got.tolist() == [1.0 if rows == 1 else 3.0] * rows
