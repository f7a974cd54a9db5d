"""Weights that are stored in another form than the graph reads them.

They may be in half precision, in files of other graphs, or in separate parts, such as the experts
of a mixture. In memory, such a weight is an initializer whose tensor is a `StoredTensor` (float32
numbers that are converted at each read) or a `JoinedTensor` (parts that are concatenated at each
read). In a file, it is an initializer for each stored part, followed by Concat, Cast and Transpose
as needed. ONNX Runtime folds these nodes when it loads the graph. If folding is off, it runs them
in each call, and the weight stays in its mapped file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import onnx_ir as ir

from qsample.contract.arrays import Array
from qsample.graph.edit import all_initializers, constant, constant_value, initializer, put_behind
from qsample.package.disk.space import check_free

# The suffixes of the names of a Concat that `write_joined` makes, and of the Reshape after it.
_CONCAT_SUFFIX: Final = "_joined"
_RESHAPE_SUFFIX: Final = "_reshaped"


class JoinedTensor(ir.LazyTensor):
    """Tensors of one dtype that are concatenated and reshaped at each read.

    Attributes:
        parts: the tensors.
        axis: the axis along which they are concatenated.
    """

    __slots__ = ("axis", "parts")

    def __init__(
        self,
        parts: Sequence[ir.TensorProtocol],
        axis: int,
        shape: Sequence[int],
        name: str | None = None,
    ) -> None:
        super().__init__(self._computed, parts[0].dtype, ir.Shape(shape), name=name)
        self.parts = tuple(parts)
        self.axis = axis

    @property
    def joined_shape(self) -> tuple[int, ...]:
        """The shape of the concatenated parts."""
        return _joined_shape(self.parts, self.axis)

    def _computed(self) -> ir.TensorProtocol:
        array = np.concatenate([part.numpy() for part in self.parts], self.axis)
        return ir.Tensor(array.reshape(self.shape.numpy()), dtype=self.dtype, name=self.name)


def parts_in_files(tensor: ir.TensorProtocol | None) -> Iterator[ir.ExternalTensor]:
    """The tensors in files of which `tensor` consists: itself or parts of it."""
    if isinstance(tensor, ir.ExternalTensor):
        yield tensor
    elif isinstance(tensor, JoinedTensor):
        for part in tensor.parts:
            yield from parts_in_files(part)


def lies_in_files(tensor: ir.TensorProtocol | None) -> bool:
    """Whether all numbers of `tensor` lie in files."""
    if isinstance(tensor, JoinedTensor):
        return all(map(lies_in_files, tensor.parts))
    return isinstance(tensor, ir.ExternalTensor)


def in_turns(tensors: Sequence[ir.TensorProtocol], name: str) -> JoinedTensor | None:
    """A tensor, [E, 2 * N, K], with alternating rows of two tensors, [E, N, K], in files.

    A single tensor is split into halves. None if a tensor does not lie in files.
    """
    if not all(map(lies_in_files, tensors)):
        return None
    halves = tensors if len(tensors) == 2 else _halves(tensors[0])
    if halves is None:
        return None
    experts, rows, columns = halves[0].shape.numpy()
    apart = [_seen_as(half, (experts, rows, 1, columns)) for half in halves]
    return JoinedTensor(apart, 2, (experts, 2 * rows, columns), name)


def _halves(tensor: ir.TensorProtocol) -> Sequence[ir.TensorProtocol] | None:
    experts, both, columns = tensor.shape.numpy()
    shape = (experts, both // 2, columns)
    if isinstance(tensor, ir.ExternalTensor):
        parts = [
            _rows(tensor, number, both // 2 * columns, (1, *shape[1:]))
            for number in range(2 * experts)
        ]
        return [
            JoinedTensor(parts[half::2], 0, shape, f"{tensor.name}_{half}") for half in range(2)
        ]
    assert isinstance(tensor, JoinedTensor)
    fitting = tensor.axis == 1 and [part.shape.numpy() for part in tensor.parts] == [shape, shape]
    return tensor.parts if fitting else None


def _rows(
    tensor: ir.ExternalTensor, number: int, count: int, shape: Sequence[int]
) -> ir.ExternalTensor:
    """The part of `tensor` with the index `number`, if each part has `count` elements."""
    size = tensor.dtype.itemsize
    return _external(
        tensor, (tensor.offset or 0) + int(number * count * size), shape, f"{tensor.name}_{number}"
    )


def _seen_as(tensor: ir.TensorProtocol, shape: Sequence[int]) -> ir.TensorProtocol:
    if isinstance(tensor, JoinedTensor):
        return JoinedTensor(tensor.parts, tensor.axis, shape, tensor.name)
    assert isinstance(tensor, ir.ExternalTensor)
    return _external(tensor, tensor.offset or 0, shape, tensor.name)


def _external(
    tensor: ir.ExternalTensor, offset: int, shape: Sequence[int], name: str | None
) -> ir.ExternalTensor:
    length = int(math.prod(shape) * tensor.dtype.itemsize)
    return ir.ExternalTensor(
        tensor.location,
        offset,
        length,
        tensor.dtype,
        shape=ir.Shape(shape),
        name=str(name),
        base_dir=tensor.base_dir,
    )


def write_joined(
    graph: ir.Graph, tensor: JoinedTensor, name: str
) -> tuple[ir.Value, list[ir.Node]]:
    """Make the nodes for a joined tensor; its initializers are added to the graph.

    Returns:
        The value with the name `name`, and the nodes, which are not in the graph yet.
    """
    nodes: list[ir.Node] = []
    inputs = []
    for number, part in enumerate(tensor.parts):
        part_name = f"{name}_{number}"
        if isinstance(part, JoinedTensor):
            value, inner = write_joined(graph, part, part_name)
            nodes += inner
        else:
            value = constant_value(part_name, part)
            graph.register_initializer(value)
        inputs.append(value)
    nodes.append(
        ir.Node(
            "",
            "Concat",
            inputs,
            [ir.AttrInt64("axis", tensor.axis)],
            name=f"{name}{_CONCAT_SUFFIX}",
        )
    )
    if tensor.joined_shape != tensor.shape.numpy():
        nodes[-1].outputs[0].name = f"{name}{_CONCAT_SUFFIX}"
        sizes = initializer(graph, f"{name}_sizes", np.array(tensor.shape.numpy(), np.int64))
        nodes.append(
            ir.Node("", "Reshape", [nodes[-1].outputs[0], sizes], name=f"{name}{_RESHAPE_SUFFIX}")
        )
    output = nodes[-1].outputs[0]
    output.name = name
    output.shape = ir.Shape(tensor.shape.numpy())
    output.type = ir.TensorType(tensor.dtype)
    return output, nodes


def read_joined(graph: ir.Graph) -> bool:
    """The inverse of `write_joined`: replaces each chain of its nodes by an initializer.

    Returns whether there was such a chain.
    """
    joins = [
        node
        for node in graph
        if node.op_type == "Concat" and str(node.name).endswith(_CONCAT_SUFFIX)
    ]
    modified = False
    # A part comes before its whole.
    for node in joins:
        parts = [tensor for value in node.inputs if (tensor := _const_value(value)) is not None]
        if len(parts) < len(node.inputs):
            continue
        axis = node.attributes.get_int("axis", 0)
        nodes = [node]
        shape = _joined_shape(parts, axis)
        users = [user for user, _ in node.outputs[0].uses()]
        if len(users) == 1 and str(users[0].name).endswith(_RESHAPE_SUFFIX):
            sizes = constant(users[0].inputs[1])
            if sizes is not None and (sizes > 0).all():
                nodes.append(users[0])
                shape = tuple(sizes.tolist())
        _replace_chain(graph, nodes, JoinedTensor(parts, axis, shape, nodes[-1].outputs[0].name))
        modified = True
    return modified


def _replace_chain(graph: ir.Graph, nodes: list[ir.Node], tensor: JoinedTensor) -> None:
    """Replace a chain of nodes, which only read constants, by an initializer."""
    output = nodes[-1].outputs[0]
    read = {
        value
        for node in nodes
        for value in node.inputs
        if value is not None and value.is_initializer()
    }
    value = constant_value(str(output.name), tensor)
    output.replace_all_uses_with(value, replace_graph_outputs=True)
    graph.remove(nodes, safe=True)
    for one in read:
        if not one.uses():
            graph.initializers.pop(str(one.name), None)
    graph.register_initializer(value)


def _const_value(value: ir.Value | None) -> ir.TensorProtocol | None:
    return value.const_value if value is not None and value.is_initializer() else None


def _joined_shape(parts: Sequence[ir.TensorProtocol], axis: int) -> tuple[int, ...]:
    shapes = [part.shape.numpy() for part in parts]
    return (*shapes[0][:axis], sum(shape[axis] for shape in shapes), *shapes[0][axis + 1 :])


HALF: Final = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
# The suffix of the name of the initializer before a Cast.
SUFFIX: Final = "_stored"
# A constant up to this size stays in the file of the graph.
_MAX_INLINE_BYTES: Final = 1024
_FLOAT: Final = int(ir.DataType.FLOAT)
# ONNX Runtime maps each part separately, and Linux allows a process 65,530 maps.
_MAX_PARTS: Final = 45_000


class StoredTensor(ir.LazyTensor):
    """The numbers of another tensor in float32, converted at each read.

    Attributes:
        stored: the other tensor.
        transposed: whether its two axes are swapped.
    """

    __slots__ = ("stored", "transposed")

    def __init__(
        self, stored: ir.TensorProtocol, name: str | None, *, transposed: bool = False
    ) -> None:
        sizes = stored.shape.numpy()
        shape = ir.Shape(sizes[::-1] if transposed else sizes)
        super().__init__(self._widened, ir.DataType.FLOAT, shape, name=name)
        self.stored = stored
        self.transposed = transposed

    def in_own_dtype(self) -> Array:
        """The numbers in the dtype of `stored`."""
        array = self.stored.numpy()
        return array.T if self.transposed else array

    def _widened(self) -> ir.TensorProtocol:
        return ir.Tensor(self.in_own_dtype().astype(np.float32, copy=False), name=self.name)


def rearranged(
    tensors: Sequence[ir.TensorProtocol],
    shape: Sequence[int],
    arrange: Callable[[list[Array]], Array],
    name: str,
) -> ir.TensorProtocol:
    """A tensor of rearranged numbers, computed at each read.

    Args:
        tensors: the tensors with the numbers. If all are stored in one half-precision dtype, so is
            the result.
        shape: the shape of the result.
        arrange: rearranges the arrays of the tensors, without changing any number.
        name: the name of the result.
    """
    stored = [
        tensor
        for tensor in tensors
        if isinstance(tensor, StoredTensor) and tensor.stored.dtype in HALF
    ]
    fixed = ir.Shape(shape)
    if len(stored) == len(tensors) and len({tensor.stored.dtype for tensor in stored}) == 1:

        def moved() -> ir.TensorProtocol:
            return ir.Tensor(
                np.ascontiguousarray(arrange([tensor.in_own_dtype() for tensor in stored])),
                name=name,
            )

        return StoredTensor(ir.LazyTensor(moved, stored[0].stored.dtype, fixed, name=name), name)

    def computed() -> ir.TensorProtocol:
        array = np.ascontiguousarray(arrange([tensor.numpy() for tensor in tensors]))
        return ir.Tensor(array, dtype=tensors[0].dtype, name=name)

    return ir.LazyTensor(computed, tensors[0].dtype, fixed, name=name)


def rows_in_turns(tensors: Sequence[ir.TensorProtocol], name: str) -> ir.TensorProtocol | None:
    """`in_turns` for stored tensors, which stay in their files."""
    if any(isinstance(tensor, StoredTensor) and tensor.transposed for tensor in tensors):
        return None
    wide = {isinstance(tensor, StoredTensor) for tensor in tensors}
    stored = [tensor.stored if isinstance(tensor, StoredTensor) else tensor for tensor in tensors]
    if len(wide) > 1 or len({tensor.dtype for tensor in stored}) > 1:
        return None
    joined = in_turns(stored, name)
    return StoredTensor(joined, name) if joined is not None and wide == {True} else joined


def narrow_weights(model: ir.Model, *, as_they_lie: bool = False) -> bool:
    """Give each weight that is stored in half precision an initializer in it, with a Cast; in
    place.

    Rows that a Gather looks up are cast after the Gather.

    Args:
        model: the graph.
        as_they_lie: also leave weights in their files, with a Concat if there are several files,
            and with a Transpose if the graph needs it; otherwise they are written anew.

    Returns:
        Whether there was such a weight.
    """
    found = [
        value
        for value in all_initializers(model.graph)
        if isinstance(value.const_value, StoredTensor)
    ]
    few = (
        sum(len(list(parts_in_files(_as_stored(value.const_value)))) for value in found)
        <= _MAX_PARTS
    )
    for value in found:
        in_parts = isinstance(_as_stored(value.const_value), JoinedTensor)
        _narrow(value, as_they_lie=as_they_lie and (few or not in_parts))
    return bool(found)


def _as_stored(tensor: ir.TensorProtocol | None) -> ir.TensorProtocol | None:
    return tensor.stored if isinstance(tensor, StoredTensor) else tensor


def _narrow(value: ir.Value, *, as_they_lie: bool) -> None:
    tensor = value.const_value
    graph = value.graph
    name = str(value.name)
    assert isinstance(tensor, StoredTensor)
    assert graph is not None
    stored = tensor.stored
    transposed = tensor.transposed
    lies = as_they_lie and lies_in_files(stored)
    if not lies and stored.dtype not in HALF:
        return
    if transposed and not lies:
        stored = _swapped(tensor, f"{name}{SUFFIX}")
        transposed = False
    half = stored.dtype in HALF
    nodes: list[ir.Node] = []
    if lies and isinstance(stored, JoinedTensor):
        base, nodes = write_joined(graph, stored, f"{name}{SUFFIX}")
    elif not half and not transposed:
        value.const_value = stored
        return
    else:
        base = constant_value(f"{name}{SUFFIX}", stored)
        graph.register_initializer(base)
    uses = list(value.uses())
    if half and not transposed:
        lookups = [(node, index) for node, index in uses if _is_lookup(node, index)]
        for node, _ in lookups:
            _cast_behind(node, base)
        uses = [use for use in uses if use not in lookups]
    graph.initializers.pop(name)
    last = base
    if half and uses:
        nodes.append(ir.Node("", "Cast", [last], [ir.AttrInt64("to", _FLOAT)], name=f"{name}_cast"))
        last = nodes[-1].outputs[0]
        last.shape = base.shape
        last.type = ir.TensorType(ir.DataType.FLOAT)
        last.name = f"{name}_cast"
    if transposed and uses:
        nodes.append(
            ir.Node(
                "", "Transpose", [last], [ir.AttrInt64s("perm", (1, 0))], name=f"{name}_transpose"
            )
        )
        last = nodes[-1].outputs[0]
    if uses:
        value.replace_all_uses_with(last, replace_graph_outputs=True)
        last.name = name
        last.shape = value.shape
        last.type = ir.TensorType(ir.DataType.FLOAT)
    # ONNX Runtime orders nodes backwards from the last node, and continues from each node with the
    # input that is last in the file. So these nodes stand before all others: then the other inputs
    # of a product come first, and its float32 weight is computed right before it. At another place,
    # all weights would be computed before the first product runs.
    graph.insert_before(graph[0], nodes)


def widen_weights(model: ir.Model) -> bool:
    """The inverse of `narrow_weights`, in place: weights with a Cast become float32
    initializers."""
    graph = model.graph
    modified = read_joined(graph)
    for value in list(graph.initializers.values()):
        tensor = value.const_value
        if tensor is None or (value.dtype not in HALF and not str(value.name).endswith(SUFFIX)):
            continue
        modified |= _widen(graph, value, tensor)
    return modified


def _widen(graph: ir.Graph, value: ir.Value, tensor: ir.TensorProtocol) -> bool:
    users = [node for node, _ in value.uses()]
    casts = [node for node in users if _is_cast(node)]
    lookups = [
        node
        for node, index in value.uses()
        if _is_lookup(node, index) and _only_cast(node) is not None
    ]
    turned = (
        [node for node in users if node.op_type == "Transpose"] if tensor.dtype not in HALF else []
    )
    if (not casts and not lookups and not turned) or len(casts) + len(lookups) + len(turned) < len(
        users
    ):
        return False
    name = str(value.name).removesuffix(SUFFIX)
    del graph.initializers[str(value.name)]
    for node in turned:
        _replace(graph, node, StoredTensor(tensor, name, transposed=True), name)
    if not turned:
        wide = ir.Value(name=name)
        for node in lookups:
            cast = _only_cast(node)
            assert cast is not None
            output = cast.outputs[0]
            node.replace_input_with(0, wide)
            node.outputs[0].shape = output.shape
            node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
            output.replace_all_uses_with(node.outputs[0], replace_graph_outputs=True)
            graph.remove(cast, safe=True)
        for cast in casts:
            after = [node for node, _ in cast.outputs[0].uses()]
            if (
                not lookups
                and len(casts) == 1
                and len(after) == 1
                and after[0].op_type == "Transpose"
            ):
                _replace(graph, after[0], StoredTensor(tensor, name, transposed=True), name)
            else:
                cast.outputs[0].replace_all_uses_with(wide, replace_graph_outputs=True)
            graph.remove(cast, safe=True)
        if wide.uses():
            _fill(graph, wide, StoredTensor(tensor, name), name)
    return True


def load_graph(path: Path) -> ir.Model:
    """Load the model at `path` with its weights in their files, including files of `save_beside`.

    It is for graphs that were checked, or that this process wrote. It opens hard links, which onnx_ir
    refuses below a folder.
    """
    model = ir.load(path)
    for value in all_initializers(model.graph):
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor):
            value.const_value = relocated(tensor, tensor.path, "")
    return model


def relocated(tensor: ir.ExternalTensor, location: str, folder: str | Path) -> ir.ExternalTensor:
    """The same tensor in the file `location` below `folder`; with an empty folder, a path."""
    return ir.ExternalTensor(
        location,
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=ir.Shape(tensor.shape),
        name=str(tensor.name),
        base_dir=folder,
    )


def save_beside(model: ir.Model, folder: Path, name: str) -> None:
    """Write a graph for `load_graph`, which refers to weights in other files by absolute paths.

    Weights in memory go to a file with `.data` appended to the name. So do all weights if the files are
    on several drives, because ONNX Runtime needs a common folder.

    Args:
        model: the graph.
        folder: the folder of the file.
        name: the name of the file.
    """
    lies = _are_on_one_drive(model, folder)
    narrow_weights(model, as_they_lie=lies)
    values = []
    tensors = []
    for value in all_initializers(model.graph):
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and lies:
            value.const_value = relocated(tensor, os.path.abspath(tensor.path), "")
        elif tensor is not None and tensor.nbytes > _MAX_INLINE_BYTES:
            values.append(value)
            tensors.append(tensor)
    if tensors:
        needed = sum(tensor.nbytes for tensor in tensors)
        check_free(folder, needed, "the copy of the weights that are computed")
        written = ir.external_data.convert_tensors_to_external(tensors, folder, f"{name}.data")
        for value, tensor in zip(values, written, strict=True):
            value.const_value = tensor
    ir.save(model, folder / name)


def _are_on_one_drive(model: ir.Model, folder: Path) -> bool:
    tensors = [value.const_value for value in all_initializers(model.graph)]
    lying = [part for tensor in tensors for part in parts_in_files(_as_stored(tensor))]
    paths = [str(folder), *(tensor.path for tensor in lying)]
    return len({os.path.splitdrive(os.path.abspath(path))[0] for path in paths}) == 1


def _replace(graph: ir.Graph, node: ir.Node, tensor: StoredTensor, name: str) -> None:
    """Replace the output of `node` by an initializer."""
    wide = ir.Value(name=name)
    node.outputs[0].replace_all_uses_with(wide, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    _fill(graph, wide, tensor, name)


def _fill(graph: ir.Graph, value: ir.Value, tensor: StoredTensor, name: str) -> None:
    value.const_value = tensor
    value.type = ir.TensorType(ir.DataType.FLOAT)
    value.shape = ir.Shape(tensor.shape)
    if name in graph.initializers:
        value.name = f"{name}_{len(graph.initializers)}"
    graph.register_initializer(value)


def _swapped(tensor: StoredTensor, name: str) -> ir.TensorProtocol:
    def swapped() -> ir.TensorProtocol:
        return ir.Tensor(
            np.ascontiguousarray(tensor.in_own_dtype()), dtype=tensor.stored.dtype, name=name
        )

    return ir.LazyTensor(swapped, tensor.stored.dtype, ir.Shape(tensor.shape), name=name)


def _cast_behind(node: ir.Node, table: ir.Value) -> None:
    """Let `node`, a Gather, look up in `table`, and cast its result to float32."""
    old = node.outputs[0]
    new = put_behind(
        old, "Cast", attributes={"to": _FLOAT}, dtype=ir.DataType.FLOAT, name=f"{node.name}_cast"
    )
    new.name = old.name
    old.name = f"{old.name}{SUFFIX}"
    old.type = ir.TensorType(table.dtype)  # type: ignore[arg-type]
    node.replace_input_with(0, table)


def _is_lookup(node: ir.Node, index: int) -> bool:
    return node.op_type == "Gather" and not node.domain and index == 0


def _is_cast(node: ir.Node) -> bool:
    return node.op_type == "Cast" and node.attributes.get_int("to", 0) == _FLOAT


def _only_cast(node: ir.Node) -> ir.Node | None:
    """The Cast to float32 that is the only reader of the output of `node`; None without it."""
    users = [user for user, _ in node.outputs[0].uses()]
    return users[0] if len(users) == 1 and _is_cast(users[0]) else None
