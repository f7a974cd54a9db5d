"""Layers that compute the same from different weights, and a trace in which one node stands for
each repetition.

While `standing_in` is open, the first layer of each group runs between two markers. Every other
layer of the group is a single marker from hidden states to hidden states. Its retained states are
not in the trace: the next states of the first layer take their place. `exporters.repetition`
replaces the marker by a copy of the first layer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from qsample.contract.tensors import TensorSpec
from qsample.transforms.cache import DecodeContext, StateKey
from qsample.transforms.experts import SwiGLU
from qsample.transforms.markers import (
    GROUP,
    LAYER,
    LAYER_BEGIN,
    LAYER_END,
    MARKER_DOMAIN,
    REPEATED_LAYER,
)
from qsample.transforms.quantized_experts import QuantizedExperts
from qsample.transforms.quantized_linear import QuantizedWeight
from qsample.transforms.recurrent import RetainedForward

# The kind of state that an attention layer keeps.
_BUFFERS: Final = "key_value"
# Attributes of modules that may hold the index of their layer.
_INDEX_ATTRIBUTES: Final = ("layer_idx", "layer_id", "layer_index", "layer_number")
# The attributes in which every nn.Module registers its parts.
_REGISTRIES: Final = ("_modules", "_parameters", "_buffers")
_COMPARED_BY_VALUE: Final = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    SwiGLU,
)
_COMPARED_BY_FIELDS: Final = (QuantizedExperts, QuantizedWeight, RetainedForward)


@dataclass(frozen=True, slots=True)
class DecoderLayers:
    """The layers of a decoder.

    Attributes:
        count: the number of layers.
        states: the index of a layer → its retained states: the key and the value, then states of
            other kinds.
        context: the context of the decoder's calls.
        inside: the module that has the layers; None for any module.
    """

    count: int
    states: Mapping[int, Sequence[TensorSpec]]
    context: DecodeContext
    inside: nn.Module | None = None

    def state_names(self, layer: int) -> list[str]:
        """The names of the states of `layer`."""
        return [state.name for state in self.states.get(layer, ())]


@dataclass(frozen=True, slots=True)
class RepeatedLayers:
    """Layers of one list of modules that differ only in their weights.

    Attributes:
        path: the name of the list.
        first: the index of the layer that is traced.
        others: the indices of the layers that repeat it.
        weights: the names, in a layer, of the parameters and buffers that no other module has.
    """

    path: str
    first: int
    others: tuple[int, ...]
    weights: tuple[str, ...]

    def prefix(self, layer: int) -> str:
        """The beginning of the names of the weights of `layer`."""
        return f"{self.path}.{layer}."


def find_repeated_layers(root: nn.Module, layers: DecoderLayers) -> list[RepeatedLayers]:
    """Find the groups of two or more equal layers in lists of `layers.count` modules of `root`.

    Equal layers have modules of the same classes, weights of the same names, shapes and dtypes,
    states of the same shapes and dtypes, and the same attributes, except that a few may hold the
    layer's index. Objects that are neither numbers nor collections are the same only if they are
    one object. A layer that shares parameters with another module is equal to no other layer: it
    may choose among them by its index."""
    groups = []
    for path, modules in _layer_lists(root, layers):
        owners = _owners(root, modules)
        equal_layers: dict[Any, list[_Description]] = {}
        for index, module in enumerate(modules):
            description = _Description(module, index, owners)
            if description.shares_parameters:
                continue
            states = tuple((state.dtype, state.axes) for state in layers.states.get(index, ()))
            kind = (description.modules(), states, index in layers.context.masked)
            equal_layers.setdefault(kind, []).append(description)
        for first, *others in equal_layers.values():
            if others:
                indices = tuple(other.index for other in others)
                groups.append(RepeatedLayers(path, first.index, indices, first.own_names))
    return groups


def _layer_lists(root: nn.Module, layers: DecoderLayers) -> Iterator[tuple[str, nn.ModuleList]]:
    """The lists of `layers.count` modules that are in no other such list, with their names."""
    found: list[str] = []
    inside = {*(layers.inside or root).modules()}  # a tower may have as many layers
    for path, module in root.named_modules():
        is_inner = any(path.startswith(f"{outer}.") for outer in found)
        if (
            isinstance(module, nn.ModuleList)
            and len(module) == layers.count
            and module in inside
            and not is_inner
        ):
            found.append(path)
            yield path, module


def _owners(root: nn.Module, layers: nn.ModuleList) -> dict[int, set[int | None]]:
    """The id of each tensor of `root` → the layers that have it, and None if a module outside of
    the layers has it."""
    owners: dict[int, set[int | None]] = {}
    inside: set[int] = set()
    for index, layer in enumerate(layers):
        for module in layer.modules():
            inside.add(id(module))
            for tensor in _tensors(module).values():
                owners.setdefault(id(tensor), set()).add(index)
    for module in root.modules():
        if id(module) not in inside:
            for tensor in _tensors(module).values():
                owners.setdefault(id(tensor), set()).add(None)
    return owners


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module, without those of its children."""
    return {name: tensor for name, tensor in _registered(module).items() if tensor is not None}


def _registered(module: nn.Module) -> dict[str, Tensor | None]:
    """The same as `_tensors`, with None for a parameter or buffer that is registered but absent."""
    return {**vars(module)["_parameters"], **vars(module)["_buffers"]}


class _Description:
    """Everything except the numbers of its weights that decides what a layer computes, as values
    that compare."""

    def __init__(self, layer: nn.Module, index: int, owners: dict[int, set[int | None]]) -> None:
        self._layer = layer
        self.index = index
        self._module_names = {id(module): name for name, module in layer.named_modules()}
        named: list[tuple[str, Tensor]] = []
        for path, module in layer.named_modules():
            for name, tensor in _tensors(module).items():
                named.append((f"{path}.{name}" if path else name, tensor))
        own = [(name, tensor) for name, tensor in named if owners[id(tensor)] == {index}]
        self.own_names = tuple(name for name, _ in own)
        self.shares_parameters = any(owners[id(tensor)] != {index} for tensor in layer.parameters())
        # The first name counts, if a tensor has several.
        self._weight_names = {id(tensor): name for name, tensor in reversed(own)}
        # The functions that are being described: they may refer to themselves.
        self._open_functions: list[int] = []

    def modules(self) -> tuple[Any, ...]:
        """The layer's modules, with their attributes and the shapes and dtypes of their weights."""
        return tuple(
            (name, self._module(module))
            for name, module in self._layer.named_modules(remove_duplicate=False)
        )

    def _module(self, module: nn.Module) -> Any:
        weights = tuple(
            (name, tensor.shape, tensor.dtype, self._value(tensor))
            for name, tensor in _tensors(module).items()
        )
        absent = tuple(name for name, tensor in _registered(module).items() if tensor is None)
        attributes = tuple(
            (name, self._attribute(name, value))
            for name, value in sorted(vars(module).items())
            if name not in _REGISTRIES
        )
        return type(module), weights, absent, attributes

    def _attribute(self, name: str, value: Any) -> Any:
        if name in _INDEX_ATTRIBUTES and value == self.index:
            return "the layer's index"
        if "hooks" in name and isinstance(value, dict):
            # The keys of the dictionary count all hooks of the process.
            value = list(value.values())
        return self._value(value)

    def _value(self, value: Any) -> Any:
        if isinstance(value, _COMPARED_BY_VALUE):
            return type(value), value
        if isinstance(value, nn.Module) and id(value) in self._module_names:
            return nn.Module, self._module_names[id(value)]
        if isinstance(value, Tensor) and id(value) in self._weight_names:
            return Tensor, self._weight_names[id(value)]
        if isinstance(value, dict | list | tuple | set | frozenset):
            return type(value), self._items(value)
        if isinstance(value, functools.partial | MethodType | FunctionType):
            return self._callable(value)
        if isinstance(value, _COMPARED_BY_FIELDS):
            contents = [getattr(value, entry.name) for entry in dataclasses.fields(value)]
            return type(value), self._items(contents)
        return "object", id(value)

    def _items(self, collection: Any) -> Any:
        if isinstance(collection, dict):
            return tuple((self._value(key), self._value(item)) for key, item in collection.items())
        if isinstance(collection, set | frozenset):
            return frozenset(map(self._value, collection))
        return tuple(map(self._value, collection))

    def _callable(self, value: functools.partial[Any] | MethodType | FunctionType) -> Any:
        if isinstance(value, functools.partial):
            return functools.partial, self._items((value.func, value.args, value.keywords))
        if isinstance(value, MethodType):
            return MethodType, self._items((value.__func__, value.__self__))
        if not value.__closure__:
            return "object", id(value)
        return self._closure(value)

    def _closure(self, function: FunctionType) -> Any:
        """A function that was made for this layer, by the values that it refers to."""
        if id(function) in self._open_functions:
            return "open", self._open_functions.index(id(function))
        self._open_functions.append(id(function))
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        described = self._items((cells, function.__defaults__, function.__kwdefaults__))
        self._open_functions.pop()
        return FunctionType, function.__code__, described


@dataclass(slots=True)
class StandIns:
    """The notes of a trace.

    Attributes:
        context: the decoder call that is traced.
        first: the number of each group → the call of its first layer.
        difference: why a copy of the first layer cannot replace another layer; None if copies can.
    """

    context: DecodeContext
    first: dict[int, _Call] = field(default_factory=dict)
    difference: str | None = None

    def note(self, difference: str) -> None:
        """Remember the difference, if it is the first one."""
        self.difference = difference if self.difference is None else self.difference


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a layer, with all collections flattened.

    Attributes:
        layer: the index of the layer.
        layout: the structure of the arguments.
        values: the arguments.
        hidden: the place of the hidden states among the arguments.
        result_layout: the structure of the results.
        results: the results.
        output: the place of the hidden states among the results.
    """

    layer: int
    layout: TreeSpec
    values: list[Any]
    hidden: int
    result_layout: TreeSpec
    results: list[Any]
    output: int


@contextmanager
def standing_in(
    root: nn.Module, groups: Sequence[RepeatedLayers], context: DecodeContext
) -> Iterator[StandIns]:
    """While open, decoder calls of `context` run only the first layer of each group."""
    record = StandIns(context)
    with ExitStack() as stack:
        for number, group in enumerate(groups):
            for index in (group.first, *group.others):
                layer = root.get_submodule(f"{group.path}.{index}")
                attributes: dict[str, Any] = {}
                if index == group.first:
                    run = _run_first
                else:
                    run = _stand_in
                    attributes |= _without_weights(layer)
                attributes["forward"] = functools.partial(run, record, number, index, layer.forward)
                stack.enter_context(_replaced(layer, attributes))
        yield record


def _without_weights(layer: nn.Module) -> dict[str, Any]:
    """Attributes that unregister the weights of `layer`, so that they are not traced, and keep its
    modules."""
    attributes: dict[str, Any] = {}
    for registry in _REGISTRIES:
        attributes |= vars(layer)[registry]
    for registry in _REGISTRIES:
        attributes[registry] = {}
    return attributes


@contextmanager
def _replaced(module: nn.Module, attributes: Mapping[str, Any]) -> Iterator[None]:
    """While open, the instance `module` has these attributes."""
    present = vars(module)
    before = {name: present[name] for name in attributes if name in present}
    present.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del present[name]
        present.update(before)


def _run_first(
    record: StandIns, group: int, index: int, own: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run the layer's `own` forward, with its hidden states and retained states between two
    markers."""
    context = record.context
    values, layout = tree_flatten((args, kwargs))
    tensors = _places(values)
    if not tensors or group in record.first:
        record.note(f"layer {index} takes no tensor, or runs twice")
        return own(*args, **kwargs)
    hidden = tensors[0]
    before = _read(context, index, context.past, context.states)
    begun = _marker(LAYER_BEGIN, [values[hidden], *before], {GROUP: group})
    args, kwargs = tree_unflatten(_with(values, hidden, begun[0]), layout)
    written_before = _written(context)
    _assign(context, index, begun[1:], context.past, context.states)
    result = own(*args, **kwargs)
    _assign(context, index, before, context.past, context.states)
    written = _written(context) - written_before

    results, result_layout = tree_flatten(result)
    tensors = _places(results)
    if not tensors or written != _states_of(context, index):
        record.note(f"layer {index} returns no tensor, or writes the states {sorted(written)}")
        return result
    # Other results, such as attention weights, belong to this layer only: nothing may read them.
    output = tensors[0]
    after = _read(context, index, context.present, context.next_states)
    ended = _marker(LAYER_END, [results[output], *after], {GROUP: group})
    _assign(context, index, ended[1:], context.present, context.next_states)
    record.first[group] = _Call(index, layout, values, hidden, result_layout, results, output)
    return tree_unflatten(_with(results, output, ended[0]), result_layout)


def _stand_in(record: StandIns, group: int, index: int, own: Any, *args: Any, **kwargs: Any) -> Any:
    """Put a layer's marker in the place of its hidden states; all other results are those of the
    group's first layer."""
    context = record.context
    call = record.first.get(group)
    values, layout = tree_flatten((args, kwargs))
    if call is None or not _is_like(values, layout, call):
        record.note(
            f"layer {index} is called in another way than the first layer that is equal to it"
        )
        return own(*args, **kwargs)
    attributes = {GROUP: group, LAYER: index}
    (hidden,) = _marker(
        REPEATED_LAYER, [values[call.hidden]], attributes, like=[call.results[call.output]]
    )
    for key in _states_of(context, call.layer):
        _, kind, number = key
        if kind == _BUFFERS:
            context.present[index] = context.present[call.layer]
        else:
            context.next_states[index, kind, number] = context.next_states[key]
    return tree_unflatten(_with(call.results, call.output, hidden), call.result_layout)


def _with(values: Sequence[Any], place: int, value: Any) -> list[Any]:
    """A copy of `values` with another value at a place."""
    changed = list(values)
    changed[place] = value
    return changed


def _is_like(values: list[Any], layout: TreeSpec, call: _Call) -> bool:
    """Whether these are the arguments of `call`, except for the numbers of the hidden states."""
    if layout != call.layout:
        return False
    hidden = values[call.hidden]
    first = call.values[call.hidden]
    if not isinstance(hidden, Tensor):
        return False
    if hidden.dtype != first.dtype or hidden.shape != first.shape:
        return False
    pairs = zip(values, call.values, strict=True)
    return all(
        place == call.hidden or _is_same(value, other) for place, (value, other) in enumerate(pairs)
    )


def _is_same(value: Any, other: Any) -> bool:
    if value is other:
        return True
    is_plain = isinstance(value, bool | int | float | str)
    return is_plain and type(value) is type(other) and value == other


def _places(values: Sequence[Any]) -> list[int]:
    """The places of the tensors among `values`."""
    return [place for place, value in enumerate(values) if isinstance(value, Tensor)]


def _states_of(context: DecodeContext, layer: int) -> set[StateKey]:
    """The states that `layer` retains."""
    keys = {key for key in context.states if key[0] == layer}
    if layer in context.past:
        keys.add((layer, _BUFFERS, 0))
    return keys


def _written(context: DecodeContext) -> set[StateKey]:
    """The states that have a next value."""
    return {(layer, _BUFFERS, 0) for layer in context.present} | context.next_states.keys()


def _read(
    context: DecodeContext,
    layer: int,
    buffers: dict[int, tuple[Tensor, Tensor]],
    states: dict[StateKey, Tensor],
) -> list[Tensor]:
    """The values of all states of `layer`: those in `buffers`, then those in `states`."""
    return [
        *buffers.get(layer, ()),
        *(states[key] for key in sorted(context.states) if key[0] == layer),
    ]


def _assign(
    context: DecodeContext,
    layer: int,
    values: Sequence[Tensor],
    buffers: dict[int, tuple[Tensor, Tensor]],
    states: dict[StateKey, Tensor],
) -> None:
    """Set the values of all states of `layer`, in the order of `_read`."""
    others = list(values)
    if layer in context.past:
        buffers[layer] = (others[0], others[1])
        others = others[2:]
    keys = [key for key in sorted(context.states) if key[0] == layer]
    states.update(zip(keys, others, strict=True))


def _marker(
    name: str,
    inputs: Sequence[Tensor],
    attributes: dict[str, Any],
    like: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """The outputs of a node that computes nothing; they have the shapes and dtypes of `like`, or
    else of the inputs."""
    like = like or inputs
    return list(
        torch.onnx.ops.symbolic_multi_out(
            f"{MARKER_DOMAIN}::{name}",
            inputs,
            attributes,
            dtypes=[tensor.dtype for tensor in like],
            shapes=[tensor.shape for tensor in like],
            version=1,
        )
    )
