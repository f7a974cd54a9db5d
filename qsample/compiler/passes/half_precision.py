"""Converts a decode graph to float16 or bfloat16, except for its logits.

Values that depend on positions alone, above all a rotary embedding's angles, stay float32: half precision counts
positions exactly to 2,048 (float16) or 256 (bfloat16) only. So do the memory of a recurrent layer and its decay,
because their errors add up over all tokens, and with them the other values between the products of the layer: they
would be cast back and forth, a kernel each time. Norms keep their sums in float32 by themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

import onnx_ir as ir

from qsample.contract.arrays import DTYPES, Array
from qsample.contract.tensors import LOGITS
from qsample.graph.edit import cast, drop_unread, lazy_initializer, producer, put_behind
from qsample.graph.operators import is_contrib

HALF_DTYPES: Final = ("float16", "bfloat16")
# Operators whose CUDA kernels, in the versions of the graph's opset, take float16 but not bfloat16.
_WITHOUT_BFLOAT16: Final = ("Pad", "TopK")
# Operators over the states of recurrent layers, and which of their inputs are such a state or decide its future.
_RECURRENCES: Final = {"LinearAttention": (3, 4, 5), "CausalConvWithState": (3,)}
# The operators that may stand between such an input and the products that it comes from.
_ELEMENTWISE: Final = (
    "Add",
    "Cast",
    "Clip",
    "Concat",
    "Div",
    "Exp",
    "GatherElements",
    "Greater",
    "Identity",
    "Mul",
    "Neg",
    "Reshape",
    "Sigmoid",
    "Slice",
    "Softplus",
    "Sub",
    "Unsqueeze",
    "Where",
)
# The operators that may stand between the products of a recurrent layer.
_BETWEEN_PRODUCTS: Final = (*_ELEMENTWISE, "SimplifiedLayerNormalization", "Split", "Transpose")


def convert_to_half(model: ir.Model, dtype: str, states: Collection[str]) -> bool:
    """Convert every weight and hidden value of a decode graph, and the inputs in `states`, to `dtype`, of HALF_DTYPES.

    1. `model` ends with its logits. They stay float32.
    2. Values that the positions alone decide stay float32, and are cast for other nodes that read them.
    3. So do recurrences, the values that decide their states and decays, and all between the products of their layers.
    4. Weights are converted in turn, when the model is saved.
    """
    half = ir.DataType(DTYPES[dtype].onnx)
    graph = model.graph
    recurrent = _recurrences(graph, states)
    exact = _exact_values(graph)
    for node in recurrent:
        _make_float32(node, half)
        exact.update(node.outputs)
    for state in graph.inputs:
        if state.name in states:
            state.dtype = half
    rounding = _Casts(graph, half)
    modified = False
    for node in list(graph):
        if any(output in exact for output in node.outputs):
            continue
        modified |= _convert_node(node, exact, rounding)
    widening = _Casts(graph, ir.DataType.FLOAT)
    for node in recurrent:
        for index, value in enumerate(node.inputs):
            if value is not None and value.dtype == half:
                node.replace_input_with(index, widening.of(value))
    drop_unread(graph, rounding.sources)
    _widen_logits(graph)
    return modified


class _Casts:
    """Values in another dtype, made once for all nodes that read them."""

    def __init__(self, graph: ir.Graph, dtype: ir.DataType) -> None:
        self.dtype = dtype
        self._graph = graph
        self._cast: dict[ir.Value, ir.Value] = {}

    @property
    def sources(self) -> Collection[ir.Value]:
        """The values that were cast."""
        return self._cast.keys()

    def of(self, value: ir.Value) -> ir.Value:
        """`value` in the dtype: a constant is converted, any other value goes through a Cast."""
        if value not in self._cast:
            if value.is_initializer():
                self._cast[value] = _rounded(self._graph, value, self.dtype)
            else:
                self._cast[value] = cast(value, self.dtype)
        return self._cast[value]


def _convert_node(node: ir.Node, exact: Collection[ir.Value], rounding: _Casts) -> bool:
    """Let a node read and make half precision; True if it reads float32 values.

    `exact` has the values that stay float32.
    """
    half = rounding.dtype
    modified = False
    for index, value in enumerate(node.inputs):
        if value is None or value.dtype != ir.DataType.FLOAT:
            continue
        modified = True
        if value in exact or value.is_initializer():
            node.replace_input_with(index, rounding.of(value))
    for output in node.outputs:
        if output.dtype == ir.DataType.FLOAT:
            output.dtype = half
    if node.op_type == "Cast" and node.attributes.get_int("to") == ir.DataType.FLOAT:
        node.attributes["to"] = ir.AttrInt64("to", half)
    if half == ir.DataType.BFLOAT16 and node.op_type in _WITHOUT_BFLOAT16:
        _run_in_float32(node, half)
    return modified


def _exact_values(graph: ir.Graph) -> set[ir.Value]:
    """Float values that integers and vectors of constants decide: no state, and no row of a table, goes into them."""
    exact: set[ir.Value] = set()
    for node in graph:
        computed = [
            value for value in node.inputs if value is not None and not value.is_initializer()
        ]
        tables = any(_is_float_table(value) for value in node.inputs)
        if (
            computed
            and not tables
            and all(value in exact or _is_integer(value) for value in computed)
        ):
            exact.update(node.outputs)
    return exact


def _recurrences(graph: ir.Graph, converted: Collection[str]) -> list[ir.Node]:
    """The operators over float32 states, the elementwise nodes that decide these states and their decays, and the nodes
    between the products of their layers."""
    inputs = {
        value
        for value in graph.inputs
        if value.dtype == ir.DataType.FLOAT and value.name not in converted
    }
    found = [node for node in graph if is_contrib(node, *_RECURRENCES)]
    deciding = [
        node.inputs[index]
        for node in found
        for index in _RECURRENCES[node.op_type]
        if index < len(node.inputs)
    ]
    # The next state of a convolution is cut out by other nodes.
    deciding += [output for output in graph.outputs if _comes_from(output, inputs)]
    nodes = {*found, *_before(deciding, _ELEMENTWISE)}
    after = _after(found)
    read = [value for node in [*found, *after] for value in node.inputs]
    nodes |= {*after, *_before(read, _BETWEEN_PRODUCTS)}
    return [node for node in graph if node in nodes]


def _make_float32(node: ir.Node, half: ir.DataType) -> None:
    """Let a node of a graph that has half precision already compute in float32."""
    for output in node.outputs:
        if output.dtype == half:
            output.dtype = ir.DataType.FLOAT
    if node.op_type == "Cast" and node.attributes.get_int("to") == half:
        node.attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT)


def _before(values: Iterable[ir.Value | None], operators: Collection[str]) -> set[ir.Node]:
    """The nodes that `values` come from, as far as they are of `operators`."""
    nodes: set[ir.Node] = set()
    waiting = list(values)
    while waiting:
        node = producer(waiting.pop())
        if node is not None and node not in nodes and node.op_type in operators:
            nodes.add(node)
            waiting += node.inputs
    return nodes


def _after(nodes: Iterable[ir.Node]) -> set[ir.Node]:
    """The nodes that follow `nodes`, up to the next products."""
    following: set[ir.Node] = set()
    waiting = list(nodes)
    while waiting:
        for output in waiting.pop().outputs:
            users = {user for user, _ in output.uses() if user.op_type in _BETWEEN_PRODUCTS}
            waiting += users - following
            following |= users
    return following


def _comes_from(value: ir.Value, inputs: Collection[ir.Value]) -> bool:
    """Whether elementwise nodes alone lead from one of `inputs` to `value`."""
    waiting: list[ir.Value | None] = [value]
    while waiting:
        reached = waiting.pop()
        if reached in inputs:
            return True
        node = producer(reached)
        if node is not None and node.op_type in _ELEMENTWISE:
            waiting += node.inputs
    return False


def _is_float_table(value: ir.Value | None) -> bool:
    if value is None or not value.is_initializer() or value.dtype != ir.DataType.FLOAT:
        return False
    return value.shape is not None and sum(dim != 1 for dim in value.shape) > 1


def _is_integer(value: ir.Value) -> bool:
    return value.dtype is not None and not value.dtype.is_floating_point()


def _rounded(graph: ir.Graph, value: ir.Value, half: ir.DataType) -> ir.Value:
    """The constant in half precision."""
    tensor = value.const_value
    assert tensor is not None

    def convert() -> Array:
        return tensor.numpy().astype(half.numpy())

    rounded = lazy_initializer(
        f"{value.name}_{half.name.lower()}", tensor.shape.numpy(), half, convert
    )
    graph.register_initializer(rounded)
    return rounded


def _run_in_float32(node: ir.Node, half: ir.DataType) -> None:
    """Cast the inputs of `node` to float32, and its results back: exact, because it only chooses or moves values."""
    for index, value in enumerate(node.inputs):
        if value is not None and value.dtype == half:
            node.replace_input_with(index, cast(value, ir.DataType.FLOAT, node))
    for output in node.outputs:
        if output.dtype == half:
            output.dtype = ir.DataType.FLOAT
            put_behind(output, "Cast", attributes={"to": half}, dtype=half)


def _widen_logits(graph: ir.Graph) -> None:
    index = [value.name for value in graph.outputs].index(LOGITS.name)
    logits = graph.outputs[index]
    if logits.dtype == ir.DataType.FLOAT:
        return
    logits.name = f"{LOGITS.name}_half"
    widened = cast(logits, ir.DataType.FLOAT)
    widened.name = LOGITS.name
    graph.outputs[index] = widened
