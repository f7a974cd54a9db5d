"""Graphs of a product with weights, or of several, in the forms that packages have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

Made = tuple[list[ir.Node], list[ir.Value], list[ir.Value], int]
"""Nodes, of which the last gives the result, further inputs, constants, and how many inputs a row has."""


def product(way: tuple[object, ...] | str | None, inputs: int, outputs: int) -> Made:
    """way: bits and block size, "zeros" after them for zero points; "cast" from float16; "input"; None = float32."""
    if isinstance(way, tuple):
        return quantized(*way[:2], inputs, outputs, zeros=len(way) > 2)  # type: ignore[arg-type]
    array = np.random.default_rng(0).standard_normal((inputs, outputs)).astype(np.float32)
    x, dtype = _input("x", inputs), ir.DataType.FLOAT
    if way == "input":
        weights = ir.Value(name="w", shape=ir.Shape([inputs, outputs]), type=ir.TensorType(dtype))
        return [ir.node("MatMul", [x, weights])], [x, weights], [], inputs
    constant = _constant("w", array.astype(np.float16) if way == "cast" else array)
    nodes = [ir.node("Cast", [constant], {"to": dtype})] if way == "cast" else []
    nodes.append(ir.node("MatMul", [x, nodes[0].outputs[0] if nodes else constant]))
    return nodes, [x], [constant], inputs


def quantized(bits: int, block: int, inputs: int, outputs: int, *, zeros: bool = False) -> Made:
    rng, blocks, x = np.random.default_rng(0), inputs // block, _input("x", inputs)
    constants = [
        _constant("w", rng.integers(0, 256, (outputs, blocks, block * bits // 8), np.uint8))
    ]
    constants.append(
        _constant("scales", rng.uniform(0.001, 0.02, outputs * blocks).astype(np.float32))
    )
    if zeros:
        constants.append(
            _constant("zeros", rng.integers(0, 256, outputs * -(-blocks * bits // 8), np.uint8))
        )
    attributes = {"K": inputs, "N": outputs, "bits": bits, "block_size": block, "accuracy_level": 4}
    return (
        [ir.node("MatMulNBits", [x, *constants], attributes, domain="com.microsoft")],
        [x],
        constants,
        inputs,
    )


def decoder(folder: Path, *products: Made, name: str = "decoder") -> Path:
    """A file with the products, whose names get the number of their product from the second on."""
    nodes: list[ir.Node] = []
    inputs: list[ir.Value] = []
    outputs: list[ir.Value] = []
    constants: list[ir.Value] = []
    for number, (own_nodes, own_inputs, own_constants, _) in enumerate(products):
        output = own_nodes[-1].outputs[0]
        output.name, output.type = "y", ir.TensorType(ir.DataType.FLOAT)
        for value in (*own_inputs, *own_constants, output) if number else ():
            value.name = f"{value.name}_{number}"
        nodes += own_nodes
        inputs += own_inputs
        outputs.append(output)
        constants += own_constants
    opsets = {"": 20, "com.microsoft": 1}
    graph = ir.Graph(
        inputs, outputs, nodes=nodes, initializers=constants, opset_imports=opsets, name="products"
    )
    ir.save(ir.Model(graph, ir_version=10), folder / f"{name}.onnx")
    return folder / f"{name}.onnx"


def _input(name: str, size: int) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape([None, size]), type=ir.TensorType(ir.DataType.FLOAT))


def _constant(name: str, array: np.ndarray) -> ir.Value:
    tensor = ir.Tensor(array, name=name)
    return ir.Value(
        name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
    )
