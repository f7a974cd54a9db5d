"""Quantizes the experts of a mixture: MoE becomes QMoE.

Experts that no MoE takes, because of their gate, are looked up by GatherBlockQuantized: the weights of each row's
expert are made float again, and multiplied by as before. Levels are computed when the graph is saved, expert by expert;
a matrix of all experts of a layer is in memory then.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Final

import numpy as np
import onnx_ir as ir

from qsample.compiler.quantize.blocks import (
    QuantizationReport,
    QuantizedWeight,
    added_up,
    report_quantization,
)
from qsample.compiler.quantize.methods import WeightQuantization
from qsample.contract.tensors import BLOCK_SIZES
from qsample.graph import moe
from qsample.graph.edit import drop_unread, lazy_initializer, replace_node, reshape_target, suffixed
from qsample.graph.moe import QuantizedSlot, Slot
from qsample.graph.operators import CONTRIB_DOMAIN, INT8_ACTIVATIONS, is_contrib

FC1_SLOTS: Final = (QuantizedSlot.FC1, QuantizedSlot.FC1_SCALES)
FC2_SLOTS: Final = (QuantizedSlot.FC2, QuantizedSlot.FC2_SCALES)


def quantize_experts(
    model: ir.Model, quantization: WeightQuantization, block_sizes: Collection[int] = BLOCK_SIZES
) -> bool:
    """Quantize the experts of `model`, in place; `quantization_report` has the figures.

    Experts get the largest of `block_sizes` that divides the inputs and is at most `quantization.block_size`, or else
    the smallest that divides them. If it does not divide the hidden units, zeros are added, without effect on results.
    Experts whose inputs no size divides stay float.

    Args:
        model: the graph.
        quantization: how its weights are quantized.
        block_sizes: the sizes that the device's QMoE takes.

    Returns:
        Whether there were any experts.
    """
    graph = model.graph
    quantized: dict[ir.Value, QuantizedWeight] = {}
    # The value that chooses experts → their number.
    experts: dict[ir.Value | None, int] = {}
    for node in list(graph):
        if is_contrib(node, moe.OP_TYPE):
            choice = node.inputs[Slot.ROUTER]
            found = _mixture(node, quantization, block_sizes, quantized)
        elif moe.gather_of_weights(node) is not None:
            choice = node.inputs[1]
            found = _lookup(node, quantization, quantized)
        else:
            continue
        if found is not None:
            experts[choice] = found
    if not quantized:
        return False
    for weight in quantized.values():
        weight.register(graph)
    drop_unread(graph, quantized)
    model.opset_imports.setdefault(CONTRIB_DOMAIN, 1)
    before, after = added_up(quantized.values())
    report = QuantizationReport(
        matrices=0,
        bytes_before=before,
        bytes_after=after,
        experts=sum(experts.values()),
        expert_block_size=max(weight.quantization.block_size for weight in quantized.values()),
    )
    report_quantization(model, report)
    return True


def _mixture(
    node: ir.Node,
    quantization: WeightQuantization,
    block_sizes: Collection[int],
    quantized: dict[ir.Value, QuantizedWeight],
) -> int | None:
    """Turn an MoE into a QMoE, its weights added to `quantized`. Returns the number of experts; None if they stay."""
    inputs = [*node.inputs, *[None] * (len(Slot) - len(node.inputs))]
    fc1 = inputs[Slot.FC1]
    fc2 = inputs[Slot.FC2]
    bias = inputs[Slot.FC1_BIAS]
    if fc1 is None or fc2 is None or fc1.const_value is None or fc2.const_value is None:
        return None
    experts, hidden, size = (int(dim) for dim in fc2.const_value.shape.numpy())
    chosen = _block_size(hidden, size, quantization, block_sizes)
    if chosen is None:
        return None
    way = replace(quantization, block_size=chosen)
    padded = -(-size // chosen) * chosen
    first = QuantizedWeight(fc1, way, outputs_first=True, rows=2 * padded)
    second = QuantizedWeight(fc2, way, outputs_first=True, columns=padded)
    assert node.graph is not None
    listed: dict[QuantizedSlot, ir.Value | None] = {
        QuantizedSlot.INPUT: inputs[Slot.INPUT],
        QuantizedSlot.ROUTER: inputs[Slot.ROUTER],
        QuantizedSlot.FC1_BIAS: bias
        if bias is None or padded == size
        else _padded_bias(node.graph, bias, 2 * padded),
        QuantizedSlot.FC2_BIAS: inputs[Slot.FC2_BIAS],
    }
    for value, weight, slots in ((fc1, first, FC1_SLOTS), (fc2, second, FC2_SLOTS)):
        weight = quantized.setdefault(value, weight)
        rows = (experts, weight.rows)
        levels = (*rows, weight.row_blocks * weight.block_bytes)
        operands = weight.operands(levels, (*rows, weight.row_blocks))
        listed |= dict(zip(slots, operands, strict=True))
    replace_mixture(node, listed, way.bits, way.block_size)
    return experts


def replace_mixture(
    node: ir.Node, inputs: Mapping[QuantizedSlot, ir.Value | None], bits: int, block_size: int
) -> None:
    """Replace an MoE by a QMoE with these inputs."""
    attributes = {
        "expert_weight_bits": bits,
        "block_size": block_size,
        "accuracy_level": INT8_ACTIVATIONS,
        "weights_prepacked": 0,
    }
    name = suffixed(node, "quantized")
    new = ir.node(
        moe.QUANTIZED_OP_TYPE, _by_slot(inputs), attributes, domain=CONTRIB_DOMAIN, name=name
    )
    new.attributes.update(node.attributes)
    replace_node(node, [new])


def _by_slot(listed: Mapping[QuantizedSlot, ir.Value | None]) -> list[ir.Value | None]:
    last = max(slot for slot, value in listed.items() if value is not None)
    inputs: list[ir.Value | None] = [None] * (last + 1)
    for slot, value in listed.items():
        if value is not None:
            inputs[slot] = value
    return inputs


def _block_size(
    hidden: int, size: int, quantization: WeightQuantization, block_sizes: Collection[int]
) -> int | None:
    """A size that divides both, or else `hidden` alone; the nearest to the options' size, smaller sizes first."""
    asked = quantization.block_size
    nearest = sorted(block_sizes, key=lambda block: (block > asked, abs(block - asked)))
    fitting = [block for block in nearest if hidden % block == 0]
    both = [block for block in fitting if size % block == 0 and block <= asked]
    return next(iter([*both, *fitting]), None)


def _padded_bias(graph: ir.Graph, bias: ir.Value, columns: int) -> ir.Value:
    """The constant [E, N] with zeros after each row, up to `columns`."""
    tensor = bias.const_value
    assert tensor is not None
    assert bias.dtype is not None
    experts, own = (int(dim) for dim in tensor.shape.numpy())
    name = f"{bias.name}_padded"
    if name not in graph.initializers:
        graph.register_initializer(
            lazy_initializer(
                name,
                (experts, columns),
                bias.dtype,
                lambda: np.pad(tensor.numpy(), ((0, 0), (0, columns - own))),
            )
        )
    return graph.initializers[name]


def _lookup(
    node: ir.Node, quantization: WeightQuantization, quantized: dict[ir.Value, QuantizedWeight]
) -> int | None:
    """Turn a lookup of experts' matrices into a lookup of their levels; arguments and result as in `_mixture`."""
    weights = moe.gather_of_weights(node)
    if weights is None:
        return None
    # The inputs are the axis that a MatMul sums over: the last axis of its first operand, the first of its second.
    inputs_first = any(
        user.op_type == "MatMul" and index == 1 for user, index in node.outputs[0].uses()
    )
    assert weights.const_value is not None
    experts, *sizes = (int(dim) for dim in weights.const_value.shape.numpy())
    nearest = [
        size
        for size in BLOCK_SIZES
        if size <= quantization.block_size and sizes[not inputs_first] % size == 0
    ]
    if not nearest:
        return None
    way = replace(quantization, block_size=max(nearest))
    weight = quantized.setdefault(
        weights, QuantizedWeight(weights, way, outputs_first=not inputs_first)
    )
    blocks = weight.rows * weight.row_blocks
    levels, scales = weight.operands(
        (experts, blocks, weight.block_bytes), (experts, blocks, 1), "block_scales"
    )
    attributes = {
        "bits": way.bits,
        "block_size": way.block_size,
        "gather_axis": 0,
        "quantize_axis": 2,
    }
    name = suffixed(node, "quantized")
    lookup = ir.node(
        "GatherBlockQuantized",
        [levels, node.inputs[1], scales],
        attributes,
        domain=CONTRIB_DOMAIN,
        name=name,
    )
    rank = len(node.inputs[1].shape)  # type: ignore[union-attr,arg-type]
    assert node.graph is not None
    matrices = reshape_target(node.graph, [0] * rank + [weight.rows, weight.columns])
    new = [
        lookup,
        ir.Node("", "Reshape", [lookup.outputs[0], matrices], name=suffixed(node, "matrices")),
    ]
    if inputs_first:
        order = [*range(rank), rank + 1, rank]
        new.append(
            ir.node(
                "Transpose",
                [new[-1].outputs[0]],
                {"perm": order},
                name=suffixed(node, "transposed"),
            )
        )
    replace_node(node, new)
    return experts
