"""Operators of newer and older opsets: written as ONNX Runtime has them, with the same results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import onnx.reference
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample.addons.bake.conventions import ForeignGraph
from qsample.addons.bake.rows import Nodes
from qsample.addons.bake.to_contract import rotary_tables, set_opset, use_own_operators
from qsample.errors import UnsupportedModelError
from qsample.graph.operators import OPSET

PATH = Path("model.onnx")


def parsed(text: str, opset: int) -> ForeignGraph:
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> {text}')
    model = ir.from_proto(proto)
    return ForeignGraph(PATH, model, (), model.graph.outputs[0], 9, ir.DataType.FLOAT)


def node_of(foreign: ForeignGraph, op_type: str) -> ir.Node:
    return next(node for node in foreign.graph if node.op_type == op_type)


def attributes(node: ir.Node) -> dict[str, Any]:
    return {name: attribute.value for name, attribute in node.attributes.items()}


def by_runtime(foreign: ForeignGraph, **inputs: Any) -> Any:
    foreign.graph.sort()
    content = ir.to_proto(foreign.model).SerializeToString()
    return ort.InferenceSession(content, providers=["CPUExecutionProvider"]).run(None, inputs)[0]


NORM = "g (float[B,S,4] x, float[4] w) => (float[B,S,4] y) {{ n = RMSNormalization{} (x, w) y = Identity (n) }}"


@pytest.mark.parametrize(
    ("given", "epsilon", "axis", "stash_type"),
    [
        ("", 1e-5, -1, 1),
        ("<epsilon=0.5, axis=2, stash_type=1>", 0.5, 2, 1),
        ("<stash_type=10>", 1e-5, -1, 10),
    ],
)
def test_rms_normalization(given: str, epsilon: float, axis: int, stash_type: int) -> None:
    foreign = parsed(NORM.format(given), 23)
    use_own_operators(foreign, Nodes(foreign.graph))
    node = node_of(foreign, "SimplifiedLayerNormalization")
    assert len(foreign.graph) == 2
    assert (node.domain, node.op_type, len(node.inputs)) == ("", "SimplifiedLayerNormalization", 2)
    found = attributes(node)
    assert found.pop("epsilon") == pytest.approx(epsilon)
    assert found == {"axis": axis, "stash_type": stash_type}


def test_a_norm_inside_computes_what_onnx_says() -> None:
    text = (
        "g (float[B,S,4] x, float[4] w) => (float[B,S,4] y) "
        "{ n = RMSNormalization<epsilon=0.25> (x, w) y = Identity (n) }"
    )
    generator = np.random.default_rng(0)
    x, w = (
        generator.standard_normal((2, 3, 4), np.float32),
        generator.standard_normal(4, np.float32),
    )
    foreign = parsed(text, 23)
    foreign.graph[0].outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    foreign.graph[0].outputs[0].shape = ir.Shape(["B", "S", 4])
    use_own_operators(foreign, Nodes(foreign.graph))
    new = node_of(foreign, "SimplifiedLayerNormalization").outputs[0]
    assert (new.dtype, str(new.shape)) == (ir.DataType.FLOAT, "[B,S,4]")
    set_opset(foreign)
    wanted = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 0.25) * w
    np.testing.assert_allclose(by_runtime(foreign, x=x, w=w), wanted, rtol=1e-5)


def test_operators_of_other_domains_stay() -> None:
    text = (
        "g (float[B,S,4] x, float[4] w) => (float[B,S,4] y) "
        "{ n = com.microsoft.RMSNormalization (x, w) y = Identity (n) }"
    )
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 23, "com.microsoft": 1]> {text}'
    )
    model = ir.from_proto(proto)
    foreign = ForeignGraph(PATH, model, (), model.graph.outputs[0], 9, ir.DataType.FLOAT)
    use_own_operators(foreign, Nodes(foreign.graph))
    assert [node.op_type for node in foreign.graph] == ["RMSNormalization", "Identity"]


ROTARY = (
    "g (float[B,2,S,4] x, int64[B,S] positions, int64[B,S] others, float[9,2] cos, float[9,2] sin, "
    "float[B,S,2] c, float[B,S,2] s) => (float[B,2,S,4] y) {{ {} y = Identity (r) }}"
)
LOOKED_UP = (
    "pc = Gather{0} (cos, positions) ps = Gather{1} (sin, {2}) r = RotaryEmbedding{3} (x, pc, ps)"
)


@pytest.mark.parametrize(
    ("body", "tables"),
    [
        ("r = RotaryEmbedding (x, cos, sin, positions)", ("positions", "cos", "sin")),
        (LOOKED_UP.format("", "", "positions", ""), ("positions", "cos", "sin")),
        (LOOKED_UP.format("<axis=0>", "<axis=0>", "positions", ""), ("positions", "cos", "sin")),
        (LOOKED_UP.format("<axis=1>", "<axis=1>", "positions", ""), None),
        (LOOKED_UP.format("", "<axis=1>", "positions", ""), None),
        (LOOKED_UP.format("", "", "others", ""), None),
        (LOOKED_UP.format("", "", "positions", "").replace("Gather (sin", "GatherND (sin"), None),
        (LOOKED_UP.format("", "", "positions", "").replace("Gather", "GatherND"), None),
        ("r = RotaryEmbedding (x, c, s)", None),
        ("pc = Gather (cos, positions) r = RotaryEmbedding (x, pc, s)", None),
        ("ps = Gather (sin, positions) r = RotaryEmbedding (x, c, ps)", None),
    ],
)
def test_tables_of_rotary_embeddings(body: str, tables: tuple[str, ...] | None) -> None:
    foreign = parsed(ROTARY.format(body), 23)
    found = rotary_tables(node_of(foreign, "RotaryEmbedding"))
    assert (None if found is None else tuple(value.name for value in found)) == tables
    use_own_operators(foreign, Nodes(foreign.graph))
    node = node_of(foreign, "RotaryEmbedding")
    assert node.domain == ("" if tables is None else "com.microsoft")
    if tables is not None:
        assert tuple(value.name for value in node.inputs if value) == ("x", *tables)
        given = {"interleaved": 0, "num_heads": 0, "rotary_embedding_dim": 0}
        assert attributes(node) == given


@pytest.mark.parametrize("interleaved", [0, 1])
def test_rotary_embeddings_turn_as_onnx_says(interleaved: int) -> None:
    """Beside ONNX's reference of the operator."""
    body = f"r = RotaryEmbedding<interleaved={interleaved}, num_heads=2> (x, cos, sin, positions)"
    text = ROTARY.format(body)
    generator = np.random.default_rng(0)
    angles = generator.uniform(0, 6, (9, 2)).astype(np.float32)
    inputs = {
        "x": generator.standard_normal((1, 2, 3, 4), np.float32),
        "positions": np.array([[5, 0, 8]]),
        "cos": np.cos(angles),
        "sin": np.sin(angles),
    }
    unused = {
        "others": np.zeros((1, 3), np.int64),
        "c": np.zeros((1, 3, 2), np.float32),
        "s": np.zeros((1, 3, 2), np.float32),
    }
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 23]> {text}')
    (wanted,) = onnx.reference.ReferenceEvaluator(proto).run(None, inputs | unused)
    foreign = parsed(text, 23)
    use_own_operators(foreign, Nodes(foreign.graph))
    assert attributes(node_of(foreign, "RotaryEmbedding"))["num_heads"] == 2
    set_opset(foreign)
    np.testing.assert_allclose(
        by_runtime(foreign, **inputs, **unused), wanted, rtol=1e-5, atol=1e-6
    )


X = "g (float[B,4] x) => (float[B,M] y)"


@pytest.mark.parametrize(
    ("opset", "body", "written"),
    [
        (14, "y = ReduceMean<axes=[1], keepdims=1> (x)", 20),
        (17, "y = ReduceMax<axes=[-1], keepdims=1> (x)", 20),
        (17, "y = ReduceMean (x)", 20),
        *(
            (17, f"y = Reduce{kind}<axes=[1], keepdims=1> (x)", 20)
            for kind in ("Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")
        ),
        (18, "y = Softmax (x)", 20),
        (20, "y = Softmax (x)", 20),
        (24, "y = Softmax (x)", 20),
    ],
)
def test_the_opset_is_ours(opset: int, body: str, written: int) -> None:
    foreign = parsed(f"{X} {{ {body} }}", opset)
    x = np.array([[1.0, 2, 5, 4], [0, -3, 9, 2]], np.float32)
    wanted = by_runtime(foreign, x=x)
    foreign.graph[0].version = opset
    set_opset(foreign)
    assert foreign.graph.opset_imports == {"": written, "com.microsoft": 1}
    assert OPSET == 20
    assert foreign.graph[0].version is None
    np.testing.assert_array_equal(by_runtime(foreign, x=x), wanted)


@pytest.mark.parametrize("inputs", ["x", "x, "])
def test_equal_splits_say_their_number(inputs: str) -> None:
    text = f"g (float[B,6] x) => (float[B,2] y) {{ y, z, w = Split<axis=1> ({inputs}) }}"
    foreign = parsed(text, 14)
    set_opset(foreign)
    assert attributes(foreign.graph[0]) == {"axis": 1, "num_outputs": 3}
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    if inputs == "x":
        assert by_runtime(foreign, x=x).tolist() == [[0, 1], [6, 7]]


def test_splits_with_sizes_and_newer_splits_stay() -> None:
    text = "g (float[B,6] x, int64[2] sizes) => (float[B,2] y) {{ y, z = Split<axis=1{}> ({}) }}"
    sized = parsed(text.format("", "x, sizes"), 14)
    set_opset(sized)
    assert "num_outputs" not in sized.graph[0].attributes
    newer = parsed(text.format(", num_outputs=2", "x"), 18)
    set_opset(newer)
    assert attributes(newer.graph[0])["num_outputs"] == 2


def test_operators_of_other_domains_keep_their_axes() -> None:
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 14, "other": 1]> '
        f"{X} {{ m = other.ReduceMean<axes=[1]> (x) y = Identity (m) }}"
    )
    model = ir.from_proto(proto)
    foreign = ForeignGraph(PATH, model, (), model.graph.outputs[0], 9, ir.DataType.FLOAT)
    set_opset(foreign)
    assert attributes(foreign.graph[0]) == {"axes": (1,)}
    assert len(foreign.graph[0].inputs) == 1


@pytest.mark.parametrize(
    ("opset", "text", "written"),
    [
        (23, "g (float[B,4] x, float[4] w) => (float[B,4] y) { y = RMSNormalization (x, w) }", 23),
        (24, "g (float[B,4] x, float[4] w) => (float[B,4] y) { y = RMSNormalization (x, w) }", 23),
        (24, "g (float[B,4] x, int64[B] i) => (float[B,4] y) { y = TensorScatter (x, x, i) }", 24),
        # An attribute, an input and a type that came later.
        (24, "g (float[B,4] x) => (float[B,4] y) { y = Cast<to=1, round_mode=\"up\"> (x) }", 24),
        (21, "g (bfloat16[B,4] x) => (bfloat16[B,4] y) { y = Acos (x) }", 21),
        (22, "g (bfloat16[B,4] x) => (bfloat16[B,4] y) { y = Acos (x) }", 22),
        (22, "g (float[B,4] x) => (float[B,4] y) { y = Acos (x) }", 20),
        (20, "g (float[B,4] x, float[4] w) => (float[B,4] y) { y = Nonsense (x, w) }", 20),
    ],
)  # fmt: skip
def test_the_oldest_opset_that_has_all_operators(opset: int, text: str, written: int) -> None:
    foreign = parsed(text, opset)
    set_opset(foreign)
    assert foreign.graph.opset_imports[""] == written


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("g (float[B,4] x, float[4] w) => (float[B,4] y) { y = RMSNormalization (x, w) }",
         "its RMSNormalization is not in opset 20"),
        ("g (float[B,4] x) => (float[B,4] y) { y = Softmax<other=1> (x) }",
         "its Softmax has other, which opset 20 lacks"),
    ],
)  # fmt: skip
def test_what_no_opset_has(text: str, why: str) -> None:
    foreign = parsed(text, 20)
    with pytest.raises(UnsupportedModelError, match=f"model.onnx cannot be baked: {why}$"):
        set_opset(foreign)
