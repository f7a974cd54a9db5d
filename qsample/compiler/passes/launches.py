"""Fewer kernels a step: several nodes of a graph become a single operator of ONNX Runtime.

A step of one token launches hundreds of kernels that have little to compute, so each of them costs its launch. The
operators here have kernels on CUDA and on the CPU in every ONNX Runtime that qsample takes, and compute in float32:
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import onnx_ir as ir

from qsample.contract.arrays import Array
from qsample.graph.edit import (
    constant,
    initializer,
    insert,
    producer,
    replace_node,
    reshape,
    suffixed,
)
from qsample.graph.operators import CONTRIB_DOMAIN, is_contrib


def merge_parts(model: ir.Model) -> bool:
    """Let a Split leave together the parts that a Concat alone reads, side by side and in order."""
    modified = False
    for node in list(model.graph):
        if node.op_type == "Concat":
            modified |= _merge(model.graph, node)
    return modified


def _merge(graph: ir.Graph, concat: ir.Node) -> bool:
    """Replace `concat` and the Split before it by a Split into fewer parts, if nothing stands between them."""
    split = producer(concat.inputs[0])
    if split is None or split.op_type != "Split" or not _have_same_axis(split, concat):
        return False
    parts = list(split.outputs)
    sizes = constant(split.inputs[1]) if len(split.inputs) > 1 else None
    first = next(index for index, part in enumerate(parts) if part is concat.inputs[0])
    stop = first + len(concat.inputs)
    if sizes is None or parts[first:stop] != list(concat.inputs):
        return False
    if any(_single_user(part) is not concat for part in parts[first:stop]):
        return False
    kept = [*parts[:first], concat.outputs[0], *parts[stop:]]
    if any(value.is_graph_output() for value in kept):
        return False
    lengths = [*sizes[:first], sizes[first:stop].sum(), *sizes[stop:]]
    for old, new in zip(kept, _split_into(split, np.array(lengths)), strict=True):
        old.replace_all_uses_with(new)
    graph.remove([concat, split], safe=True)
    return True


def _split_into(split: ir.Node, sizes: Array) -> list[ir.Value]:
    """The source of `split`, cut into parts of these sizes; a single part is the source itself."""
    source = split.inputs[0]
    graph = split.graph
    assert source is not None
    assert source.shape is not None
    assert graph is not None
    if len(sizes) == 1:
        return [source]
    axis = split.attributes.get_int("axis", 0)
    inputs = [source, initializer(graph, f"sizes_{'_'.join(map(str, sizes))}", sizes)]
    name = suffixed(split, "merged")
    node = ir.node("Split", inputs, {"axis": axis}, num_outputs=len(sizes), name=name)
    for output, size in zip(node.outputs, sizes.tolist(), strict=True):
        output.type = source.type
        output.shape = source.shape.copy()
        output.shape[axis] = size
    graph.insert_before(split, node)
    return list(node.outputs)


def _have_same_axis(split: ir.Node, concat: ir.Node) -> bool:
    source = split.inputs[0]
    if source is None or source.shape is None:
        return False
    axes = {node.attributes.get_int("axis", 0) % len(source.shape) for node in (split, concat)}
    return len(axes) == 1


def _single_user(value: ir.Value) -> ir.Node | None:
    """The only node that reads `value`, and reads it once; None if it is an output of the graph."""
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def choose_before_softmax(model: ir.Model) -> bool:
    """Let a router choose by its logits and take the softmax of the chosen alone, in place of the softmax of all, whose
    largest numbers are divided by their sum: the same weights, rounded once."""
    modified = False
    for node in list(model.graph):
        found = _router(node) if node.op_type == "Div" else None
        if found is None:
            continue
        softmax, top_k = found
        top_k.replace_input_with(0, softmax.inputs[0])
        replace_node(node, [ir.node("Softmax", [top_k.outputs[0]], {"axis": -1})])
        modified = True
    return modified


def _router(division: ir.Node) -> tuple[ir.Node, ir.Node] | None:
    """The Softmax and the TopK before `division`, if it divides the chosen numbers by their sum."""
    chosen, total = division.inputs
    top_k = producer(chosen)
    addition = producer(total)
    if chosen is None or top_k is None or addition is None or addition.inputs[0] is not chosen:
        return None
    softmax = producer(top_k.inputs[0])
    if softmax is None or _single_user(softmax.outputs[0]) is not top_k:
        return None
    nodes = (softmax, top_k, addition)
    is_router = [node.op_type for node in nodes] == ["Softmax", "TopK", "ReduceSum"]
    is_over_last_axis = all(_has_last_axis(node, chosen) for node in nodes)
    is_largest = chosen is top_k.outputs[0] and top_k.attributes.get_int("largest", 1) == 1
    is_read_elsewhere = {user for user, _ in chosen.uses()} != {division, addition}
    if not is_router or not is_over_last_axis or not is_largest or is_read_elsewhere:
        return None
    return softmax, top_k


def _has_last_axis(node: ir.Node, value: ir.Value) -> bool:
    """Whether `node` is over the last axis of `value`, and that axis stays."""
    last = -1 if value.shape is None else len(value.shape) - 1
    if node.op_type != "ReduceSum":
        return node.attributes.get_int("axis", -1) in (-1, last)
    axes = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    stays = node.attributes.get_int("keepdims", 1) == 1
    return stays and axes is not None and axes.tolist() in ([-1], [last])


def fuse_gated_norms(model: ir.Model) -> bool:
    """Make GatedRMSNorm nodes of RMS norms over the last axis that are multiplied by the SiLU or sigmoid of a gate."""
    modified = False
    for node in list(model.graph):
        if node.op_type != "Mul":
            continue
        for normed, factor in (node.inputs, reversed(node.inputs)):
            norm = producer(normed)
            gate = _gate(factor)
            if gate is None or norm is None or not _is_norm_alone(norm, gate.value):
                continue
            attributes: dict[str, float | str] = {
                "epsilon": norm.attributes.get_float("epsilon", _NORM_EPSILON),
                "activation": gate.activation,
            }
            inputs = [*norm.inputs[:2], gate.value]
            gated = ir.node("GatedRMSNorm", inputs, attributes, domain=CONTRIB_DOMAIN)
            replace_node(node, [gated])
            modified = True
            break
    return modified


# The default of SimplifiedLayerNormalization's epsilon.
_NORM_EPSILON: Final = 1e-5


class _Gate(NamedTuple):
    """A gate, and GatedRMSNorm's name of the function that is taken of it."""

    value: ir.Value
    activation: str


def _gate(value: ir.Value | None) -> _Gate | None:
    """The gate whose SiLU or sigmoid `value` is, if a single node reads it."""
    node = producer(value)
    if value is None or node is None or _single_user(value) is None:
        return None
    if node.op_type == "Sigmoid":
        x = node.inputs[0]
        return None if x is None else _Gate(x, "sigmoid")
    if node.op_type != "Mul":
        return None
    for x, factor in (node.inputs, reversed(node.inputs)):
        sigmoid = producer(factor)
        if sigmoid is not None and sigmoid.op_type == "Sigmoid" and sigmoid.inputs[0] is x:
            return None if x is None else _Gate(x, "silu")
    return None


def _is_norm_alone(norm: ir.Node, gate: ir.Value) -> bool:
    """Whether `norm` is an RMS norm over the last axis of a value like `gate`, and a single node reads its result."""
    x = norm.inputs[0]
    if norm.op_type != "SimplifiedLayerNormalization" or x is None or x.shape is None:
        return False
    is_over_last_axis = norm.attributes.get_int("axis", -1) in (-1, len(x.shape) - 1)
    is_alone = _single_user(norm.outputs[0]) is not None
    return is_over_last_axis and is_alone and x.dtype == gate.dtype and x.shape == gate.shape


def fuse_decays(model: ir.Model) -> bool:
    """Make LinearAttentionGate nodes of the inputs of LinearAttention: decays, scale * softplus(a + bias), and rates,
    sigmoid(b)."""
    modified = False
    for attention in list(model.graph):
        if not is_contrib(attention, "LinearAttention"):
            continue
        decay = _decay(_input(attention, _DECAY_SLOT))
        if decay is None:
            continue
        inputs = [decay.a, decay.bias, decay.scale]
        rates = _rates(_input(attention, _RATE_SLOT))
        b = None if rates is None else rates.inputs[0]
        if b is not None and b.dtype == decay.a.dtype and b.shape == decay.a.shape:
            inputs.append(b)
        old = [value.outputs[0] for value in (decay.node, rates) if value is not None]
        gate = ir.node(
            "LinearAttentionGate", inputs, domain=CONTRIB_DOMAIN, num_outputs=len(inputs) - 2
        )
        model.graph.insert_before(decay.node, gate)
        for new, replaced in zip(gate.outputs, old, strict=False):
            new.shape = replaced.shape
            new.type = replaced.type
            ir.convenience.replace_all_uses_with(replaced, new)
        modified = True
    if modified:
        # The rates may be read before the decays were computed.
        model.graph.sort()
    return modified


_DECAY_SLOT: Final = 4
_RATE_SLOT: Final = 5
# PyTorch's softplus takes x itself from here on; in float32, log(1 + exp(x)) is x from 17 on.
_SOFTPLUS_THRESHOLD: Final = 20


class _Decay(NamedTuple):
    """The decays scale * softplus(a + bias), with `a` [B, S, heads] and constants [heads].

    Attributes:
        node: the node that computes the decays.
        a: the numbers of each token.
        bias: the bias of each head.
        scale: the factor of each head.
    """

    node: ir.Node
    a: ir.Value
    bias: ir.Value
    scale: ir.Value


def _input(node: ir.Node, slot: int) -> ir.Value | None:
    return node.inputs[slot] if slot < len(node.inputs) else None


def _decay(value: ir.Value | None) -> _Decay | None:
    """The decays in `value`, possibly masked by a Where."""
    node = _unmasked(value)
    product = None if node is None or node.op_type != "Mul" else _with_constant(node)
    if node is None or product is None or _single_user(product[0]) is None:
        return None
    softplus, scale = product
    x = producer(_softplus_input(softplus))
    total = None if x is None or x.op_type != "Add" else _with_constant(x)
    if total is None:
        return None
    a, bias = total
    if a.dtype != ir.DataType.FLOAT or a.shape is None or len(a.shape) != 3:
        return None
    vectors = [list(constants.shape or ()) for constants in (bias, scale)]
    return _Decay(node, a, bias, scale) if vectors == [[a.shape[2]]] * 2 else None


def _rates(value: ir.Value | None) -> ir.Node | None:
    """The Sigmoid of the rates in `value`, possibly scaled, and possibly masked by a Where."""
    node = _unmasked(value)
    if node is not None and node.op_type == "Mul":
        product = _with_constant(node)
        node = None if product is None else producer(product[0])
    return node if node is not None and node.op_type == "Sigmoid" else None


def _unmasked(value: ir.Value | None) -> ir.Node | None:
    """The node that computes `value`, or the numbers that a Where masks in it."""
    node = producer(value)
    return producer(node.inputs[1]) if node is not None and node.op_type == "Where" else node


def _with_constant(node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """The computed and the constant input of `node`, if it has one of each."""
    first, second = node.inputs
    if first is None or second is None or first.is_initializer() == second.is_initializer():
        return None
    return (second, first) if first.is_initializer() else (first, second)


def _softplus_input(value: ir.Value) -> ir.Value | None:
    """The x of softplus(x), or of PyTorch's Where(x > 20, x, softplus(x)), if `value` is either."""
    node = producer(value)
    if node is None or node.op_type != "Where":
        return node.inputs[0] if node is not None and node.op_type == "Softplus" else None
    condition, x, otherwise = node.inputs
    greater = producer(condition)
    softplus = producer(otherwise)
    if greater is None or softplus is None or greater.op_type != "Greater":
        return None
    threshold = constant(greater.inputs[1])
    is_far = threshold is not None and threshold.size == 1 and threshold >= _SOFTPLUS_THRESHOLD
    is_softplus = softplus.op_type == "Softplus" and softplus.inputs[0] is x
    return x if is_far and is_softplus and greater.inputs[0] is x else None


def fuse_gated_sums(model: ir.Model) -> bool:
    """Make GatedAdd nodes of x + y * gate, with a number of `gate` for each row of x and y: a shared expert. It rounds
    the product, as two nodes do (https://github.com/microsoft/onnxruntime/pull/31835)."""
    modified = False
    for node in list(model.graph):
        if node.op_type != "Add":
            continue
        for x, product in (node.inputs, reversed(node.inputs)):
            factors = _factors(x, product)
            if factors is not None:
                replace_node(node, [ir.node("GatedAdd", [x, *factors], domain=CONTRIB_DOMAIN)])
                modified = True
                break
    return modified


def _factors(x: ir.Value | None, product: ir.Value | None) -> tuple[ir.Value, ir.Value] | None:
    """(y, gate) of the `product`, as `fuse_gated_sums` adds it to `x`, and which nothing else reads."""
    node = producer(product)
    if x is None or x.shape is None or product is None or node is None or node.op_type != "Mul":
        return None
    if _single_user(product) is None or x.dtype is None or not x.dtype.is_floating_point():
        return None
    gate_shape = [*x.shape[:-1], 1]
    for y, gate in (node.inputs, reversed(node.inputs)):
        if y is None or gate is None or gate.shape is None:
            continue
        if y.shape == x.shape and list(gate.shape) == gate_shape and x.shape[-1] != 1:
            return y, gate
    return None


def look_up_one_hots(model: ir.Model) -> bool:
    """Take rows of a unit matrix in place of comparing the experts that a router chose, [N, 1], with 0, 1, 2 … and
    casting the result."""
    modified = False
    for node in list(model.graph):
        numbers = constant(node.inputs[1]) if node.op_type == "Equal" else None
        cast = _last_cast(node)
        dtype = cast.outputs[0].dtype
        if numbers is None or numbers.tolist() != list(range(numbers.size)) or cast is node:
            continue
        indices = _chosen(node.inputs[0], numbers.size)
        if indices is None or indices.shape is None or dtype is None:
            continue
        unit_matrix = np.eye(numbers.size, dtype=dtype.numpy())
        name = f"one_hots_{numbers.size}_{dtype.name.lower()}"
        rows = initializer(model.graph, name, unit_matrix)
        shape = [*indices.shape, numbers.size]
        found = insert(cast, "Gather", [rows, indices], shape, {"axis": 0})
        one_hots = reshape(cast, found, [0, numbers.size])
        ir.convenience.replace_all_uses_with(cast.outputs[0], one_hots)
        modified = True
    return modified


def _chosen(value: ir.Value | None, count: int) -> ir.Value | None:
    """The `value` itself if it is [N, 1] with the reshaped indices of a TopK among `count` numbers."""
    if value is None or value.shape is None or list(value.shape)[1:] != [1]:
        return None
    indices: ir.Value | None = value
    node = producer(indices)
    while node is not None and node.op_type == "Reshape":
        indices = node.inputs[0]
        node = producer(indices)
    if node is None or node.op_type != "TopK" or indices is not node.outputs[1]:
        return None
    numbers = node.inputs[0]
    is_of_count = numbers is not None and numbers.shape is not None and numbers.shape[-1] == count
    return value if is_of_count else None


def _last_cast(node: ir.Node) -> ir.Node:
    """The last of the Casts that follow `node`, each the only reader of the one before; `node` if there is none."""
    user = _single_user(node.outputs[0])
    while user is not None and user.op_type == "Cast":
        node = user
        user = _single_user(node.outputs[0])
    return node


# The operators that may stand between a Cast and the GatherElements whose indices it makes.
_OF_INDICES: Final = ("Add", "Expand", "Reshape", "Sub", "Unsqueeze")


def index_by_int32(model: ir.Model) -> bool:
    """Let GatherElements take int32 indices as they are, without a Cast to the int64 of PyTorch's."""
    modified = False
    for node in list(model.graph):
        source = node.inputs[0] if node.op_type == "Cast" else None
        if source is None or source.dtype != ir.DataType.INT32:
            continue
        nodes = _to_indices(node.outputs[0])
        if node.outputs[0].dtype != ir.DataType.INT64 or nodes is None:
            continue
        node.outputs[0].replace_all_uses_with(source)
        for user in nodes:
            user.outputs[0].type = ir.TensorType(ir.DataType.INT32)
            if user.op_type in ("Add", "Sub"):
                _make_constant_int32(model.graph, user)
        modified = True
    return modified


def _to_indices(value: ir.Value) -> list[ir.Node] | None:
    """The nodes between `value` and the GatherElements that take it as indices; None if it has another use."""
    nodes: list[ir.Node] = []
    waiting = [value]
    while waiting:
        reached = waiting.pop()
        if reached.is_graph_output():
            return None
        for user, slot in reached.uses():
            if user.op_type == "GatherElements" and slot == 1:
                continue
            operands = user.inputs if user.op_type in ("Add", "Sub") else ()
            constants = [
                constant(operand) is not None for operand in operands if operand is not reached
            ]
            if user.op_type not in _OF_INDICES or slot != 0 or not all(constants):
                return None
            nodes.append(user)
            waiting += user.outputs
    return nodes


def _make_constant_int32(graph: ir.Graph, node: ir.Node) -> None:
    number = constant(node.inputs[1])
    assert number is not None
    value = node.inputs[1]
    assert value is not None
    node.replace_input_with(1, initializer(graph, f"{value.name}_int32", number.astype(np.int32)))
