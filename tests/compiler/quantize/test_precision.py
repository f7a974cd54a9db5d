"""Which products a mixed recipe holds in 8 bits."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from qsample.compiler.quantize.precision import head_products, sensitive_products
from tests.helpers.small_graphs import small_graph


def decoder(layers: int) -> ir.Model:
    """Layers of qkv → mix → out → up → down; then the head."""
    states = "".join(f", float[1,4] state{layer}" for layer in range(layers))
    body, value = [], "x"
    for i in range(layers):
        body += [f"n{i} = Relu({value})", f"qkv{i} = MatMul(n{i}, w)", f"mix{i} = Add(qkv{i}, state{i})"]
        body += [f"out{i} = MatMul(mix{i}, w)", f"r{i} = Add({value}, out{i})", f"up{i} = MatMul(r{i}, w)"]
        body += [f"down{i} = MatMul(up{i}, w)", f"s{i} = Add(r{i}, down{i})"]
        value = f"s{i}"
    body += [f"norm = Relu({value})", "logits = MatMul(norm, w)"]
    model = small_graph(f"g (float[1,4] x, float[4,4] w{states}) => (float[1,4] logits) {{ {chr(10).join(body)} }}")
    for layer, state in enumerate(model.graph.inputs[2:]):
        state.name = f"past_key_values.{layer}.key"
    return model


@pytest.mark.parametrize(("layers", "kept"), [(1, []), (2, []), (3, [1]), (5, [1, 2, 3])])
def test_the_head_and_the_outer_layers(layers: int, kept: list[int]) -> None:
    model = decoder(layers)
    products = [node for node in model.graph if node.op_type == "MatMul"]
    wide = sensitive_products(model.graph, products)
    narrow = {node.outputs[0].name for node in products if node not in wide}
    assert narrow == {f"{part}{layer}" for layer in kept for part in ("qkv", "out", "up", "down")}
    assert [node.outputs[0].name for node in head_products(model.graph, products)] == ["logits"]
