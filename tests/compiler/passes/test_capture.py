"""Copies from the host: which are named, the numbers that are cut out on the device, and the attention's length."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample.compiler.passes.capture import (
    cut_splits,
    fix_total_length,
    host_arithmetic,
    host_data,
    host_nodes,
    lower_opset,
    remove_host_copies,
)
from qsample.compiler.pipeline import apply
from qsample.errors import CompileError
from qsample.graph.gqa import Slot
from tests.helpers.small_graphs import normal, operators, results, small_graph

GRAPH = """
decode (float[%s,S] x, int64[B] lengths) => (int64[B] result, float[B,M] flat)
    <int64 one = {1}, int64[1] first = {0}>
{
    rows = Shape <start = 0, end = 1> (x)
    count = Shape <start = 1, end = 2> (x)
    number = Squeeze (count)
    last = Sub (number, one)
    result = Add (lengths, %s)
    shape = Concat <axis = 0> (rows, count)
    flat = Reshape (x, shape)
}
"""
SHAPES = {"rows": [1], "count": [1], "number": [], "last": [], "shape": [2]}


def decoder(number: str = "last", rows: int | str = "B") -> ir.Model:
    model = small_graph(GRAPH % (rows, number), SHAPES, ir.DataType.INT64)
    for node in model.graph:
        node.name = f"of_{node.outputs[0].name}"
    return model


@pytest.mark.parametrize(("number", "offset"), [("last", 6), ("count", 7)])
def test_numbers_from_shapes_are_cut_out_on_the_device(number: str, offset: int) -> None:
    model = decoder(number)
    assert host_data(model.graph) == [
        f"Add of_result takes {number}"
    ]  # and the kernel of Reshape reads on the host
    assert {node.op_type for node in host_nodes(model.graph)} == {
        "Shape",
        "Squeeze",
        "Sub",
        "Concat",
    }
    assert apply(model, partial(remove_host_copies, limit=10))
    assert host_data(model.graph) == []
    assert not remove_host_copies(model, 10)
    place = {node: index for index, node in enumerate(model.graph)}
    read = [
        (node, value.producer()) for node in place for value in node.inputs if value is not None
    ]
    assert all(place[source] < place[node] for node, source in read if source is not None)
    feeds = {"x": np.zeros((2, 7), np.float32), "lengths": np.array([3, 4])}
    result, flat = results(model, feeds)
    assert result.tolist() == [3 + offset, 4 + offset]
    assert flat.shape == (2, 7)


def test_shapes_that_the_graph_fixes_become_constants() -> None:
    model = decoder(rows=2)
    model.graph.inputs[0].shape = ir.Shape([2, 7])
    assert apply(model, partial(remove_host_copies, limit=10))
    assert "Shape" not in operators(model)
    assert host_data(model.graph) == []
    feeds = {"x": np.zeros((2, 7), np.float32), "lengths": np.array([3, 4])}
    result, flat = results(model, feeds)
    assert (result.tolist(), flat.shape) == ([9, 10], (2, 7))


def test_arithmetic_on_shapes_that_the_host_reads() -> None:
    """Behind the shapes themselves; a device's kernels may read more there than CUDA's."""
    graph = decoder().graph
    assert [node.name for node in host_arithmetic(graph, {})] == ["of_shape"]
    more = host_arithmetic(graph, {"Add": (1, 2), "Concat": (0,)})
    assert sorted(str(node.name) for node in more) == ["of_last", "of_number", "of_shape"]


def test_more_than_a_number_stays_and_is_named() -> None:
    model = decoder("shape")
    assert not remove_host_copies(model, 10)
    assert host_data(model.graph) == ["Add of_result takes shape"]


def test_every_attention_reads_one_constant_length() -> None:
    model = small_graph(
        """
        decode (float[B,S,64] q, float[B,S,32] k, float[B,2,8,16] past_key, float[B,2,8,16] past_value, int32[B] seen)
            => (float[B,S,64] result)
        {
            size = Shape <start = 1, end = 2> (q)
            total = Cast <to = 6> (size)
            middle = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2>
                (q, k, k, past_key, past_value, seen, total)
            result = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2>
                (middle, k, k, past_key, past_value, seen, total)
        }
        """
    )
    assert apply(model, partial(fix_total_length, capacity=8))
    assert operators(model) == ["GroupQueryAttention"] * 2
    first, second = (node.inputs[Slot.TOTAL_SEQUENCE_LENGTH] for node in model.graph)
    assert first is second
    assert (first.dtype, first.const_value.numpy().tolist()) == (ir.DataType.INT32, 8)
    assert not fix_total_length(
        small_graph("nothing (float[B] x) => (float[B] y) { y = Neg (x) }"), 8
    )


@pytest.mark.parametrize(
    ("sizes", "axis", "is_cut"),
    [
        ([2, 6], 0, True),
        ([1, 2, 3, 2], 0, True),
        ([2, 6], -1, False),
        ([1, 2, 3, 2], 1, False),
        ([4, 4], 0, False),
    ],
)
def test_splits_into_unequal_parts_become_slices(
    sizes: list[int], axis: int, is_cut: bool, tmp_path: Path
) -> None:
    names = [f"part{index}" for index in range(len(sizes))]
    model = small_graph(f"""
        cut (float[8,8] x) => ({", ".join(f"float[M,N] {name}" for name in names)})
            <int64[{len(sizes)}] sizes = {{{", ".join(map(str, sizes))}}}>
        {{ {", ".join(names)} = Split <axis = {axis}> (x, sizes) }}""")
    model.graph.node(0).name = "split"
    assert cut_splits(model) == is_cut
    assert set(operators(model)) == ({"Gather", "Slice"} if is_cut else {"Split"})
    optimized = ort.SessionOptions()
    optimized.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(ir.to_proto(model).SerializeToString(), optimized)
    assert ("Split" in operators(ir.load(tmp_path / "optimized.onnx"))) != is_cut
    x = normal(8, 8)
    wanted = np.split(x, np.cumsum(sizes)[:-1], axis=axis)
    for got, part in zip(results(model, {"x": x}), wanted, strict=True):
        np.testing.assert_array_equal(got, part)


@pytest.mark.parametrize(
    ("sizes", "outputs"),
    [([1, 2, 3, 4, 5], [4, 2]), ([1, 2, 3, 4, 5, 6, 7], [4, 4]), ([1] * 7 + [2], [4, 4, 2])],
)
def test_splits_into_many_parts_become_several(sizes: list[int], outputs: list[int]) -> None:
    names = [f"part{index}" for index in range(len(sizes))]
    model = small_graph(f"""
        cut (float[8,M] x) => ({", ".join(f"float[8,N] {name}" for name in names)})
            <int64[{len(sizes)}] sizes = {{{", ".join(map(str, sizes))}}}>
        {{ {", ".join(names)} = Split <axis = -1> (x, sizes) }}""")
    assert cut_splits(model)
    assert operators(model) == ["Split"] * len(outputs)
    assert [len(node.outputs) for node in model.graph] == outputs
    x = normal(8, sum(sizes))
    wanted = np.split(x, np.cumsum(sizes)[:-1], axis=-1)
    for got, part in zip(results(model, {"x": x}), wanted, strict=True):
        np.testing.assert_array_equal(got, part)
    assert not cut_splits(model)


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
