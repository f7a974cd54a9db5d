"""Decoder files in 2 bits and in 1 bit, in the layouts of onnx-community's, made of a file in 4 bits.

In a file of 1 bit, as of Bonsai, a byte holds the signs of 8 weights. The graph looks each byte up in a table of the
levels that ONNX Runtime's operators take: 2 bits in the products, 4 bits in the table of embeddings, which is also the
head's.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

from qsample.contract.arrays import Array

BLOCK = 32
# The levels of the signs - and + in 2 and 4 bits, with a zero point of 2 and 8.
SIGNS = {2: (1, 3), 4: (7, 9)}


def write_low_bits(source: Path, target: Path, *, signs: bool) -> dict[str, Array]:
    """Write a file with random weights.

    Args:
        source: the file in 4 bits, of onnx-community's layout.
        target: the file to write, with its data in the same folder.
        signs: whether the weights are one bit each; otherwise they have 2 bits.

    Returns:
        The matrices [N, K] that the file means, float64, by the names of their products; the table of embeddings, which
        is the head's, too, as "embedding".
    """
    model = ir.load(source)
    graph = model.graph
    maker = _Maker(graph, signs)
    products = [node for node in graph if node.op_type == "MatMulNBits"]
    table = next(
        node for node in graph if node.op_type == "Gather" and node.inputs[1].name == "input_ids"
    )
    scales_dtype = products[0].inputs[2].dtype
    for node in products:
        is_head = node.outputs[0].name == "logits"
        maker.multiply(node, "embedding" if is_head else str(node.name), scales_dtype)
    maker.look_up(table, scales_dtype)
    read = {value for node in graph for value in node.inputs if value is not None}
    for name, value in list(graph.initializers.items()):
        if value not in read:
            del graph.initializers[name]
    target.parent.mkdir(exist_ok=True)
    ir.save(model, target, external_data=f"{target.name}_data")
    return maker.meant


class _Maker:
    """Replaces the weights of a graph.

    Attributes:
        meant: the weights, float64, by name.
    """

    def __init__(self, graph: ir.Graph, signs: bool) -> None:
        self.meant: dict[str, Array] = {}
        self._graph = graph
        self._signs = signs
        self._levels: dict[str, Array] = {}
        self._scales: dict[str, Array] = {}
        self._rng = np.random.default_rng(0)

    def multiply(self, node: ir.Node, name: str, dtype: ir.DataType) -> None:
        """Give a MatMulNBits other weights."""
        outputs = node.attributes.get_int("N", 0)
        inputs = node.attributes.get_int("K", 0)
        self._draw(name, outputs, inputs)
        blocks = inputs // BLOCK
        levels = self._operand(node, name, 2, (outputs, blocks, BLOCK // 4))
        scales = self._constant(f"{name}_scales", self._scales[name].astype(dtype.numpy()))
        zeros = self._zeros(name, 2, outputs, blocks)
        node.resize_inputs(4)
        for index, value in enumerate((levels, scales, zeros), 1):
            node.replace_input_with(index, value)
        node.attributes["bits"] = ir.AttrInt64("bits", 2)
        node.attributes["block_size"] = ir.AttrInt64("block_size", BLOCK)

    def look_up(self, node: ir.Node, dtype: ir.DataType) -> None:
        """Let the Gather of embeddings read the head's weights."""
        bits = 4 if self._signs else 2
        rows, inputs = self._levels["embedding"].shape
        levels = self._operand(node, "embedding", bits, (rows, inputs * bits // 8))
        scales = self._constant("embedding_scales", self._scales["embedding"].astype(dtype.numpy()))
        zeros = self._zeros("embedding", bits, rows, inputs // BLOCK)
        attributes = {"bits": bits, "block_size": BLOCK, "gather_axis": 0, "quantize_axis": 1}
        lookup = ir.node(
            "GatherBlockQuantized",
            [levels, node.inputs[1], scales, zeros],
            attributes,
            domain="com.microsoft",
            name="/model/embed_tokens/Gather_Quant",
        )
        old = node.outputs[0]
        new = lookup.outputs[0]
        new.type = old.type
        new.shape = old.shape
        self._graph.insert_before(node, lookup)
        old.replace_all_uses_with(new)
        self._graph.remove(node, safe=True)

    def _draw(self, name: str, outputs: int, inputs: int) -> None:
        if self._signs:
            levels = 2 * self._rng.integers(0, 2, (outputs, inputs)) - 1
        else:
            levels = self._rng.integers(-2, 2, (outputs, inputs))
        scales = self._rng.uniform(0.05, 0.2, (outputs, inputs // BLOCK)).astype(np.float16)
        self._levels[name] = levels
        self._scales[name] = scales
        self.meant[name] = levels * np.repeat(scales.astype(np.float64), BLOCK, 1)

    def _operand(self, node: ir.Node, name: str, bits: int, shape: tuple[int, ...]) -> ir.Value:
        """Levels of `bits` bits in a shape: a constant [N, bytes], or looked up in the table of signs."""
        levels = self._levels[name]
        if self._signs:
            packed = self._constant(f"{name}_quant", _packed((levels > 0).astype(np.uint8), 1))
            table = self._constant(f"unpack_lut_src1_tgt{bits}", _table_of_signs(bits))
            ids = ir.node("Cast", [packed], {"to": ir.DataType.INT32}, name=f"{name}/Cast_{bits}")
            found = ir.node("Gather", [table, ids.outputs[0]], name=f"{name}/Gather_{bits}")
            before = [ids, found]
            result = found.outputs[0]
        else:
            own = shape if name != "embedding" else (len(levels), -1)
            packed_levels = _packed(levels + 2 ** (bits - 1), bits).reshape(own)
            result = self._constant(f"{name}_quant", packed_levels)
            before = []
            if result.shape == ir.Shape(shape):
                return result
        target = self._constant(f"{name}_shape_{bits}_{len(shape)}", np.array(shape))
        reshaped = ir.node("Reshape", [result, target], name=f"{name}/Reshape_{bits}")
        self._graph.insert_before(node, [*before, reshaped])
        return reshaped.outputs[0]

    def _zeros(self, name: str, bits: int, rows: int, blocks: int) -> ir.Value:
        zeros = np.full((rows, blocks), 2 ** (bits - 1), np.uint8)
        return self._constant(f"{name}_zp_{bits}b", _packed(zeros, bits))

    def _constant(self, name: str, array: Array) -> ir.Value:
        if name not in self._graph.initializers:
            tensor = ir.tensor(array, name=name)
            value = ir.Value(
                name=name,
                shape=ir.Shape(array.shape),
                type=ir.TensorType(tensor.dtype),
                const_value=tensor,
            )
            self._graph.register_initializer(value)
        return self._graph.initializers[name]


def _packed(levels: Array, bits: int) -> Array:
    """[N, n] levels as [N, ceil(n * bits / 8)] bytes, the first in the low bits."""
    count = 8 // bits
    padded = np.pad(levels, ((0, 0), (0, -levels.shape[1] % count)))
    shifted = padded.reshape(len(levels), -1, count) << np.arange(0, 8, bits)
    return shifted.sum(-1).astype(np.uint8)


def _table_of_signs(bits: int) -> Array:
    """[256, bits] bytes: the levels of the 8 signs of each byte."""
    signs = (np.arange(256)[:, None] >> np.arange(8)) & 1
    return _packed(np.array(SIGNS[bits])[signs], bits)
