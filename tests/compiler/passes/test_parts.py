"""Cuts of small graphs: where they are, what crosses them, and that the parts compute what the graph does."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from qsample.compiler.passes.parts import cut_at_layers
from qsample.contract.interface import Interface, KeyValueShape
from qsample.errors import CompileError

SIZE = 8
_STATE = r"(past_key_values|present)\.(\d)\.(key|value)"


def graph(
    layers: int,
    *,
    widths: dict[int, int] | None = None,
    shared: bool = False,
    first_again: bool = False,
) -> Any:
    """x → x + relu(x A) B + mean of the layer's keys, in each layer, and a head.
    widths: of A, 16 unless given. shared: the last layer reads the keys of the first, beside numbers of the layer
    before it. first_again: the head adds the embedding once more."""
    state = "float[B, 1, 6, 2]"
    inputs = "int64[B, S] input_ids, int32[B] lengths"
    outputs, body, numbers = "", "", {"table": (10, SIZE), "head": (SIZE, 10)}
    for layer in range(layers):
        inputs += "".join(f", {state} past_key_values.{layer}.{kind}" for kind in ("key", "value"))
        outputs += "".join(f", {state} present.{layer}.{kind}" for kind in ("key", "value"))
        numbers |= {
            f"A{layer}": (SIZE, (widths or {}).get(layer, 16)),
            f"B{layer}": (numbers_of(widths, layer), SIZE),
        }
        keys = f"present.{layer}.key"
        if shared and layer == layers - 1:
            body, keys = f"{body} mixed = Add (present.0.key, mean{layer - 1})\n", "mixed"
        body += f"""
            rows{layer} = Shape <start = 0, end = 1> (past_key_values.0.key)
            wide{layer} = Cast <to = 1> (rows{layer})
            present.{layer}.key = Add (past_key_values.{layer}.key, wide{layer})
            present.{layer}.value = Identity (past_key_values.{layer}.value)
            mean{layer} = ReduceMean <keepdims = 0> ({keys})
            up{layer} = MatMul (x{layer}, A{layer})
            relu{layer} = Relu (up{layer})
            down{layer} = MatMul (relu{layer}, B{layer})
            sum{layer} = Add (down{layer}, mean{layer})
            skip{layer} = Add (x{layer}, sum{layer})
            x{layer + 1} = Mul (skip{layer}, scale)
        """
    last = f"x{layers}"
    if first_again:
        body, last = f"{body} again = Add ({last}, x0)\n", "again"
    text = f"""<ir_version: 10, opset_import: ["" : 20]> decoder ({inputs}) => (float[B, S, 10] logits{outputs}) {{
        positions = Cast <to = 1> (lengths)
        scale = ReduceMax <keepdims = 0> (positions)
        x0 = Gather (table, input_ids)
        {body}
        logits = MatMul ({last}, head)
    }}"""
    model = dotted(onnx.parser.parse_model(re.sub(_STATE, r"\1_\2_\3", text)))
    random = np.random.default_rng(0)
    for name, shape in numbers.items():
        array = random.normal(size=shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return onnx.shape_inference.infer_shapes(model)


def dotted(model: Any) -> Any:
    """The states under their names: the parser takes no dots."""
    undotted = re.compile(_STATE.replace(r"\.", "_"))
    for value in (*model.graph.input, *model.graph.output):
        value.name = undotted.sub(r"\1.\2.\3", value.name)
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [undotted.sub(r"\1.\2.\3", name) for name in names]
    return model


def numbers_of(widths: dict[int, int] | None, layer: int) -> int:
    return (widths or {}).get(layer, 16)


def interface(layers: int) -> Interface:
    return Interface(10, (KeyValueShape(1, 2),) * layers)


def cut(model: Any, layers: int, count: int) -> list[Any]:
    return cut_at_layers(ir.from_proto(model), interface(layers), count)


def hidden(part: Any) -> list[str]:
    return [
        str(value.name)
        for value in part.model.graph.inputs
        if value.name.startswith(("x", "skip", "sum", "up"))
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("again", [False, True])
def test_parts_compute_what_the_graph_does(count: int, again: bool) -> None:
    model, random = graph(4, first_again=again), np.random.default_rng(1)
    states = {f"past_key_values.{layer}.{kind}" for layer in range(4) for kind in ("key", "value")}
    feeds: dict[str, Any] = {
        name: random.normal(size=(2, 1, 6, 2)).astype(np.float32) for name in states
    }
    feeds |= {"input_ids": np.array([[1, 2, 3], [4, 5, 6]]), "lengths": np.array([1, 2], np.int32)}
    wanted = dict(
        zip(
            (value.name for value in model.graph.output),
            ReferenceEvaluator(model).run(None, feeds),
            strict=True,
        )
    )
    known, seen, read = dict(feeds), list[str](), list[str]()
    for part in cut(model, 4, count):
        proto = ir.to_proto(part.model)
        names = [value.name for value in proto.graph.output]
        inputs = {value.name: known[value.name] for value in proto.graph.input}
        known |= zip(names, ReferenceEvaluator(proto).run(None, inputs), strict=True)
        seen += names
        read += [name for name in inputs if name in states]
    assert len(seen) == len(set(seen))
    assert sorted(read) == sorted(states)
    for name, value in wanted.items():
        np.testing.assert_array_equal(known[name], value)


def test_the_narrowest_place_behind_a_whole_layer() -> None:
    one, two = cut(graph(4), 4, 2)
    assert (one.layers, two.layers) == (range(2), range(2, 4))
    assert [hidden(one), hidden(two)] == [[], ["x2"]]
    read = {value.name for value in two.model.graph.inputs}
    assert read == {
        "x2",
        "lengths",
        "input_ids",
        *(f"past_key_values.{n}.{kind}" for n in (2, 3) for kind in ("key", "value")),
    }


def test_a_mask_is_computed_where_the_logits_are() -> None:
    """A matrix of numbers that follows from an input, of sizes that ONNX cannot infer."""
    model = graph(3)
    words = onnx.helper.make_tensor_value_info("words", onnx.TensorProto.INT32, ["B", "W"])
    model.graph.input.append(words)
    masks = np.ones((4, 5), np.float32)
    shape = np.array([0, 1, -1])
    model.graph.initializer.append(onnx.numpy_helper.from_array(masks, "masks"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(shape, "shape"))
    gather = onnx.helper.make_node("Gather", ["masks", "words"], ["masks_of_words"])
    reshape = onnx.helper.make_node("Reshape", ["masks_of_words", "shape"], ["mask"])
    model.graph.node[-1].output[0] = "unmasked"
    add = onnx.helper.make_node("Add", ["unmasked", "mask"], ["logits"])
    model.graph.node.insert(0, reshape)
    model.graph.node.insert(0, gather)
    model.graph.node.append(add)
    one, two = cut(model, 3, 2)
    assert "words" not in {value.name for value in one.model.graph.inputs}
    assert "words" in {value.name for value in two.model.graph.inputs}
    assert hidden(two) == ["x2"]


def test_a_value_that_crosses_several_borders_skips_the_parts_between() -> None:
    parts = cut(graph(3, first_again=True), 3, 3)
    assert [sorted(hidden(part)) for part in parts] == [
        [],
        ["x1"],
        ["x0", "x2"],
    ]


@pytest.mark.parametrize(
    ("widths", "expected"),
    [
        ({}, [2, 2]),
        ({0: 96}, [1, 3]),
        ({3: 96}, [3, 1]),
        ({1: 96, 2: 96}, [2, 2]),
    ],
)
def test_the_largest_part_is_as_small_as_it_can_be(
    widths: dict[int, int], expected: list[int]
) -> None:
    parts = cut(graph(4, widths=widths), 4, 2)
    assert [len(part.layers) for part in parts] == expected
    matrices = [2 * 4 * SIZE * widths.get(layer, 16) for layer in range(4)]
    ends = [4 * SIZE * 10] * 2  # the embedding, the head
    first = sum(matrices[: expected[0]]) + ends[0]
    assert [part.nbytes for part in parts] == [first, sum(matrices) + sum(ends) - first]


def test_layers_that_share_keys_stay_together() -> None:
    with pytest.raises(
        CompileError, match=r"num_devices is 3, and the graph can be cut into 2 parts"
    ):
        cut(graph(3, shared=True), 3, 3)
    assert [part.layers for part in cut(graph(3, shared=True), 3, 2)] == [range(2), range(2, 3)]
