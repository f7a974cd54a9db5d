"""Adapters in a graph: their products against NumPy, taken out and added again after other passes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample.compiler.passes.fusions import join_projections
from qsample.contract.interface import (
    AdapterTarget,
    Features,
    Interface,
    adapter_ids,
    adapter_names,
)
from qsample.errors import CompileError
from qsample.graph.adapters import (
    Layer,
    add_adapters,
    branch_where_adapters_are,
    join_adapters,
    split_adapters,
)
from qsample.graph.edit import constant_value

IN, SIZES = 6, {"l.q": 5, "l.k": 3, "l.down": 4}
INTERFACE = Interface(
    9,
    (),
    features=Features(max_loras=2),
    adapters=tuple(AdapterTarget(path, IN, n) for path, n in SIZES.items()),
)
RANKS = {"q": [1, 1, 2], "k": [2], "down": [7, 1]}  # of each kind, the adapter of each rank
NO_RANKS: dict[str, list[int]] = {kind: [] for kind in RANKS}
ONE_KIND = [
    NO_RANKS | {kind: ids} for kind, ids in RANKS.items()
]  # q and k are a joint product after compile


def make_model(rng: np.random.Generator) -> tuple[ir.Model, dict[str, np.ndarray]]:
    """Three products of the same states, the last of transposed ones, and their weights; adapters are added."""
    x = ir.Value(name="x", shape=ir.Shape(["B", "S", IN]), type=ir.TensorType(ir.DataType.FLOAT))
    weights = {path: rng.normal(size=(IN, size)).astype(np.float32) for path, size in SIZES.items()}
    constants = [
        constant_value(f"w_{path}", ir.tensor(weight, name="other"))
        for path, weight in weights.items()
    ]
    turned = ir.node("Transpose", [x], {"perm": [0, 2, 1]})
    turned.outputs[0].shape, turned.outputs[0].dtype = ir.Shape(["B", IN, "S"]), ir.DataType.FLOAT
    products = [ir.node("MatMul", [x, constant], name=constant.name) for constant in constants[:2]]
    fused = {"transA": 1, "alpha": 0.5}
    products.append(
        ir.node(
            "FusedMatMul",
            [turned.outputs[0], constants[2]],
            fused,
            domain="com.microsoft",
            name="down",
        )
    )
    for product, path in zip(products, SIZES, strict=True):
        product.outputs[0].name, product.outputs[0].dtype = path, ir.DataType.FLOAT
        product.outputs[0].shape = ir.Shape(["B", "S", SIZES[path]])
    outputs = [ir.node("Neg", [product.outputs[0]]) for product in products]
    for output, path in zip(outputs, SIZES, strict=True):
        output.outputs[0].name, output.outputs[0].dtype = f"-{path}", ir.DataType.FLOAT
        output.outputs[0].shape = ir.Shape(["B", "S", SIZES[path]])
    nodes, results = [turned, *products, *outputs], [output.outputs[0] for output in outputs]
    opsets = {"": 20, "com.microsoft": 1}
    graph = ir.Graph(
        [x], results, nodes=nodes, initializers=constants, opset_imports=opsets, name="g"
    )
    model = ir.Model(graph, ir_version=10)
    layers = [
        Layer(path, x, product.outputs[0]) for path, product in zip(SIZES, products, strict=True)
    ]
    layers[2] = layers[2]._replace(states=turned.outputs[0], factor=0.5, transposed=True)
    add_adapters(model, INTERFACE, layers)
    return model, weights


def feeds_of(
    rng: np.random.Generator, adapter: list[int], ranks: dict[str, list[int]]
) -> dict[str, np.ndarray]:
    feeds = {
        "x": rng.normal(size=(len(adapter), 2, IN)).astype(np.float32),
        "adapter": np.array(adapter, np.int32),
    }
    for target in INTERFACE.adapters:
        own = ranks[target.kind]
        feeds[adapter_ids(target.kind).name] = np.array(own, np.int32)
        for name, size in zip(adapter_names(target.path), (IN, target.out_features), strict=True):
            feeds[name] = rng.normal(size=(len(own), size)).astype(np.float32)
    return feeds


def run(model: ir.Model, feeds: dict[str, np.ndarray], tmp_path: Path) -> list[np.ndarray]:
    ir.save(model, tmp_path / "m.onnx")
    return ort.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"]).run(
        None, feeds
    )


def check(
    model: ir.Model, weights: dict[str, np.ndarray], rng: np.random.Generator, tmp_path: Path
) -> None:
    for adapter in ([0, 1, 2, 7, 3], [0], [0, 0]):
        for ranks in (RANKS, NO_RANKS, *ONE_KIND):
            feeds = feeds_of(rng, adapter, ranks)
            results = run(model, feeds, tmp_path)
            for result, (path, weight) in zip(results, weights.items(), strict=True):
                factor = 0.5 if path == "l.down" else 1.0
                a, b = (feeds[name].astype(np.float64) for name in adapter_names(path))
                own = np.array(ranks[path[2:]], int) == np.array(adapter)[:, None]
                x = feeds["x"].astype(np.float64)
                wanted = x @ weight + np.einsum("bsi,pi,bp,po->bso", x, a, own.astype(float), b)
                np.testing.assert_allclose(-result, factor * wanted, rtol=2e-5, atol=2e-5)


def test_each_row_gets_its_own_products(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    model, weights = make_model(rng)
    check(model, weights, rng, tmp_path)


def test_rows_without_an_adapter_keep_their_bits(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    model, _ = make_model(rng)
    # Whatever the unused ranks are called: a host may fill them with zeros, or with numbers beyond float32.
    feeds = feeds_of(rng, [0, 1, 0], {"q": [0, 1], "k": [-1, 0], "down": [0]})
    with_adapters = run(model, feeds | {"l.q.lora_A": np.full((2, IN), 3e38, np.float32)}, tmp_path)
    without = run(model, feeds_of(rng, [0, 1, 0], NO_RANKS) | {"x": feeds["x"]}, tmp_path)
    for one, other in zip(with_adapters, without, strict=True):
        assert np.array_equal(one[[0, 2]], other[[0, 2]])
        assert one[0].any()


def test_taken_out_and_added_after_projections_are_joined(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    model, weights = make_model(rng)
    cut = split_adapters(model, INTERFACE)
    assert cut == [(path, f"w_{path}") for path in SIZES]
    assert [value.name for value in model.graph.inputs] == ["x"]
    assert sorted(node.op_type for node in model.graph) == [
        "FusedMatMul",
        *["MatMul"] * 2,
        *["Neg"] * 3,
        "Transpose",
    ]
    assert join_projections(model)
    join_adapters(model, INTERFACE, cut)
    assert (
        sum(node.op_type == "Concat" for node in model.graph) == 1
    )  # of both joined layers' changes
    check(model, weights, rng, tmp_path)


@pytest.mark.parametrize("order", [None, [3, 0, 5, 1, 4, 2]])
def test_layers_that_share_a_weight_get_what_is_theirs(
    order: list[int] | None, tmp_path: Path
) -> None:
    """order: of the weight's inputs, as act-order packs them; the weight is zeros. Adapters read the states as they
    were before."""
    x = ir.Value(name="x", shape=ir.Shape(["B", "S", IN]), type=ir.TensorType(ir.DataType.FLOAT))
    weights, nodes = [constant_value("w", ir.tensor(np.zeros((IN, 5), np.float32)))], []
    products = [ir.node("MatMul", [x, *weights]) for _ in range(2)]
    if order:
        zeros = {
            "w": np.full((5, 1, 8), 0x88, np.uint8),
            "scales": np.ones(5, np.float32),
            "order": np.array(order),
        }
        weights = [constant_value(name, ir.tensor(array)) for name, array in zeros.items()]
        nodes = [ir.node("Gather", [x, weights[2]], {"axis": -1})]
        nodes[0].outputs[0].shape, nodes[0].outputs[0].dtype = x.shape, x.dtype
        block = {"K": IN, "N": 5, "bits": 4, "block_size": 16}
        given = [nodes[0].outputs[0], *weights[:2]]
        products = [ir.node("MatMulNBits", given, block, domain="com.microsoft") for _ in range(2)]
    outputs = [ir.node("Neg", [product.outputs[0]]) for product in products]
    for node, name in zip((*products, *outputs), ("q", "k", "-q", "-k"), strict=True):
        node.outputs[0].name, node.outputs[0].dtype = name, ir.DataType.FLOAT
        node.outputs[0].shape = ir.Shape(["B", "S", 5])
    results = [output.outputs[0] for output in outputs]
    opsets, nodes = {"": 20, "com.microsoft": 1}, [*nodes, *products, *outputs]
    graph = ir.Graph(
        [x], results, nodes=nodes, initializers=weights, opset_imports=opsets, name="g"
    )
    model, targets = (
        ir.Model(graph, ir_version=10),
        [AdapterTarget(f"{name}.p", IN, 5) for name in "qk"],
    )
    interface = Interface(9, (), features=Features(max_loras=2), adapters=tuple(targets))
    join_adapters(model, interface, [(target.path, "w") for target in targets])
    rng = np.random.default_rng(6)
    feeds = {"x": rng.normal(size=(1, 2, IN)).astype(np.float32)}
    feeds |= {"adapter": np.ones(1, np.int32), adapter_ids("p").name: np.ones(3, np.int32)}
    for target in targets:
        for name, size in zip(adapter_names(target.path), (IN, 5), strict=True):
            feeds[name] = rng.normal(size=(3, size)).astype(np.float32)
    for target, result in zip(targets, run(model, feeds, tmp_path), strict=True):
        states, a, b = (
            feeds[name].astype(np.float64) for name in ("x", *adapter_names(target.path))
        )
        np.testing.assert_allclose(-result, states @ a.T @ b, rtol=2e-5, atol=2e-5)


def test_a_product_that_is_gone_is_named() -> None:
    model, _ = make_model(np.random.default_rng(4))
    cut = split_adapters(model, INTERFACE)
    with pytest.raises(CompileError, match=r"adapters cannot change l\.gone, whose product"):
        join_adapters(model, INTERFACE, [*cut, ("l.gone", "w_gone")])


def test_a_layer_that_is_no_product_is_named() -> None:
    model, _ = make_model(np.random.default_rng(5))
    product = next(node for node in model.graph if node.name == "w_l.q")
    computed = ir.node("Neg", [product.inputs[0]])
    computed.outputs[0].dtype, computed.outputs[0].shape = (
        ir.DataType.FLOAT,
        ir.Shape(["B", "S", IN]),
    )
    model.graph.insert_before(product, computed)
    product.outputs[0].replace_all_uses_with(computed.outputs[0])
    with pytest.raises(
        CompileError, match=r"adapters cannot change l\.q, which is no product with a matrix"
    ):
        split_adapters(model, INTERFACE)


def test_each_sum_is_in_a_branch_of_its_own_kinds(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    model, weights = make_model(rng)
    names = split_adapters(model, INTERFACE)
    join_projections(model)
    join_adapters(model, INTERFACE, names)
    assert branch_where_adapters_are(model, INTERFACE)
    assert not branch_where_adapters_are(model, INTERFACE)
    branches = [node for node in model.graph if node.op_type == "If"]
    inside = [
        [node.op_type for node in branch.attributes["then_branch"].as_graph()]
        for branch in branches
    ]
    product = ["FusedMatMul", "Where", "FusedMatMul"]
    assert sorted(inside) == sorted([[*product, *product, "Concat", "Add"], [*product, "Add"]])
    assert [node.op_type for node in model.graph if node.op_type in ("Add", "Concat")] == []
    check(model, weights, rng, tmp_path)
