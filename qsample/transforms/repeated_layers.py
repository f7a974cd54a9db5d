"""Layers that compute the same from different weights, and a trace in which one node stands for each repetition.

While `standing_in` is open, the first layer of each group runs between two markers. Another layer is a marker from
hidden states to hidden states. Its retained states are no part of the trace: the next states of the first layer take
their place. `exporters.repetition` puts copies of the first layer there.
"""

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
from qsample.transforms.quantized_linear import QuantizedWeight

_BUFFERS: Final = "key_value"  # the kind of an attention layer's states
# Attributes of modules that hold the place of their layer.
_INDICES: Final = ("layer_idx", "layer_id", "layer_index", "layer_number")
_PLAIN: Final = (
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


@dataclass(frozen=True, slots=True)
class DecoderLayers:
    """The layers of a decoder: `count` of them, in calls with `context`. states: the index of a layer → its retained
    states: key and value, then states of other kinds. inside: the module that has them; None: any."""

    count: int
    states: Mapping[int, Sequence[TensorSpec]]
    context: DecodeContext
    inside: nn.Module | None = None

    def state_names(self, layer: int) -> list[str]:
        """The names of the states of `layer`."""
        return [state.name for state in self.states.get(layer, ())]


@dataclass(frozen=True, slots=True)
class RepeatedLayers:
    """Layers of the list of modules named `path` that differ in their weights alone. `first` is the index of the layer
    that is traced, and the layers `others` repeat it. weights: the names, in a layer, of the parameters and buffers
    that no other module has."""

    path: str
    first: int
    others: tuple[int, ...]
    weights: tuple[str, ...]

    def prefix(self, layer: int) -> str:
        """The beginning of the names of the weights of `layer`."""
        return f"{self.path}.{layer}."


def find_repeated_layers(root: nn.Module, layers: DecoderLayers) -> list[RepeatedLayers]:
    """The groups of two or more equal layers in lists of `layers.count` modules of `root`.

    Equal layers have modules of the same classes, weights of the same names, shapes and dtypes, states of the same
    shapes and dtypes, and the same attributes, except that a few may hold the layer's index. Objects that are neither
    numbers nor collections are the same if they are one object. A layer that shares parameters with another module is
    equal to none: it may choose among them by its index.
    """
    groups = []
    for path, modules in _layer_lists(root, layers):
        owners = _owners(root, modules)
        kinds: dict[Any, list[_Description]] = {}
        for index, module in enumerate(modules):
            description = _Description(module, index, owners)
            states = tuple((state.dtype, state.axes) for state in layers.states.get(index, ()))
            kind = (description.modules(), states, index in layers.context.masked)
            if not description.shares_parameters:
                kinds.setdefault(kind, []).append(description)
        groups += [
            RepeatedLayers(
                path, first.index, tuple(other.index for other in others), first.own_names
            )
            for first, *others in kinds.values()
            if others
        ]
    return groups


def _layer_lists(root: nn.Module, layers: DecoderLayers) -> Iterator[tuple[str, nn.ModuleList]]:
    """Lists of `layers.count` modules that are in no other list."""
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
    """The id of each tensor of `root` → the layers that have it; None: a module outside of them has it."""
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
    """The parameters and buffers of a module itself."""
    return {name: tensor for name, tensor in _registered(module).items() if tensor is not None}


def _registered(module: nn.Module) -> dict[str, Tensor | None]:
    """The parameters and buffers of a module itself, with None for a missing one."""
    return {**vars(module)["_parameters"], **vars(module)["_buffers"]}


class _Description:
    """All that decides what a layer computes but its weights' numbers, as values that compare."""

    def __init__(self, layer: nn.Module, index: int, owners: dict[int, set[int | None]]) -> None:
        self._layer, self.index = layer, index
        self._modules = {id(module): name for name, module in layer.named_modules()}
        named = [
            (f"{path}.{name}" if path else name, tensor)
            for path, module in layer.named_modules()
            for name, tensor in _tensors(module).items()
        ]
        self.own_names = tuple(name for name, tensor in named if owners[id(tensor)] == {index})
        self.shares_parameters = any(owners[id(tensor)] != {index} for tensor in layer.parameters())
        self._own = {
            id(tensor): name for name, tensor in reversed(named) if owners[id(tensor)] == {index}
        }
        self._open: list[
            int
        ] = []  # functions that are being described: they may refer to themselves

    def modules(self) -> tuple[Any, ...]:
        """The layer's modules, with their attributes and the kinds of their weights."""
        return tuple(
            (name, self._module(module))
            for name, module in self._layer.named_modules(remove_duplicate=False)
        )

    def _module(self, module: nn.Module) -> Any:
        weights = tuple(
            (name, tensor.shape, tensor.dtype, self._value(tensor))
            for name, tensor in _tensors(module).items()
        )
        registries = ("_parameters", "_buffers", "_modules")
        attributes = {name: value for name, value in vars(module).items() if name not in registries}
        absent = tuple(name for name, tensor in _registered(module).items() if tensor is None)
        return type(module), weights, absent, self._attributes(attributes)

    def _attributes(self, attributes: dict[str, Any]) -> Any:
        return tuple(
            (name, self._attribute(name, value)) for name, value in sorted(attributes.items())
        )

    def _attribute(self, name: str, value: Any) -> Any:
        if name in _INDICES and value == self.index:
            return "its own"
        if "hooks" in name and isinstance(value, dict):
            value = list(value.values())  # the keys count all hooks of the process
        return self._value(value)

    def _value(self, value: Any) -> Any:
        if isinstance(value, _PLAIN):
            return type(value), value
        if isinstance(value, nn.Module) and id(value) in self._modules:
            return nn.Module, self._modules[id(value)]
        if isinstance(value, Tensor) and id(value) in self._own:
            return Tensor, self._own[id(value)]
        if isinstance(value, dict):
            return type(value), tuple(
                (self._value(key), self._value(item)) for key, item in value.items()
            )
        if isinstance(value, list | tuple):
            return type(value), tuple(map(self._value, value))
        if isinstance(value, set | frozenset):
            return type(value), frozenset(map(self._value, value))
        if isinstance(value, functools.partial):
            return functools.partial, self._value((value.func, value.args, value.keywords))
        if isinstance(value, MethodType):
            return MethodType, self._value((value.__func__, value.__self__))
        if isinstance(value, FunctionType) and value.__closure__:
            return self._function(value)
        if isinstance(value, QuantizedWeight):
            return QuantizedWeight, self._value(
                [getattr(value, entry.name) for entry in dataclasses.fields(value)]
            )
        return "object", id(value)

    def _function(self, function: FunctionType) -> Any:
        """A function that was made for this layer, by the values that it refers to."""
        if id(function) in self._open:
            return "open", self._open.index(id(function))
        self._open.append(id(function))
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        described = self._value((cells, function.__defaults__, function.__kwdefaults__))
        self._open.pop()
        return FunctionType, function.__code__, described


@dataclass(slots=True)
class StandIns:
    """The notes of a trace, in the call of `context`. first: the number of each group → the call of its first layer.
    difference: why a copy of the first layer cannot take the place of another layer; None: copies can."""

    context: DecodeContext
    first: dict[int, _Call] = field(default_factory=dict)
    difference: str | None = None

    def note(self, difference: str) -> None:
        """Keep the first difference."""
        self.difference = self.difference or difference


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a layer, flat: its hidden states are `values[hidden]`, and `results[output]` afterwards."""

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
                run = _run_first if index == group.first else _stand_in
                forward = functools.partial(run, record, number, index, layer.forward)
                hidden = {} if index == group.first else _unregistered(layer)
                stack.enter_context(_replaced(layer, {**hidden, "forward": forward}))
        yield record


def _unregistered(layer: nn.Module) -> dict[str, Any]:
    """Attributes of `layer` with which it has no weights to be traced, although its modules are there."""
    kinds = ("_modules", "_parameters", "_buffers")
    return {name: value for kind in kinds for name, value in vars(layer)[kind].items()} | {
        kind: {} for kind in kinds
    }


@contextmanager
def _replaced(module: nn.Module, attributes: Mapping[str, Any]) -> Iterator[None]:
    """While open, `module` itself has these attributes."""
    own = vars(module)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del own[name]
        own.update(before)


def _run_first(
    record: StandIns, group: int, index: int, own: Any, *args: Any, **kwargs: Any
) -> Any:
    """The layer's `own` forward, with its hidden states and retained states between two markers."""
    context = record.context
    values, layout = tree_flatten((args, kwargs))
    tensors = _places(values)
    if not tensors or group in record.first:
        record.note(f"layer {index} takes no tensor, or runs twice")
        return own(*args, **kwargs)
    hidden = tensors[0]
    before = _read(context, index, context.past, context.states)
    begun = _marker(LAYER_BEGIN, [values[hidden], *before], {GROUP: group})
    args, kwargs = tree_unflatten([*values[:hidden], begun[0], *values[hidden + 1 :]], layout)
    written = _written(context)
    _assign(context, index, begun[1:], context.past, context.states)
    result = own(*args, **kwargs)
    _assign(context, index, before, context.past, context.states)
    written = _written(context) - written

    results, result_layout = tree_flatten(result)
    tensors = _places(results)
    if not tensors or written != _own(context, index):
        record.note(f"layer {index} returns no tensor, or writes the states {sorted(written)}")
        return result
    output = tensors[0]  # the rest, such as attention weights, is this layer's: nothing may read it
    after = _read(context, index, context.present, context.next_states)
    ended = _marker(LAYER_END, [results[output], *after], {GROUP: group})
    _assign(context, index, ended[1:], context.present, context.next_states)
    record.first[group] = _Call(index, layout, values, hidden, result_layout, results, output)
    return tree_unflatten([*results[:output], ended[0], *results[output + 1 :]], result_layout)


def _stand_in(record: StandIns, group: int, index: int, own: Any, *args: Any, **kwargs: Any) -> Any:
    """The marker of a layer, in results like the results of the group's first layer."""
    context, call = record.context, record.first.get(group)
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
    for key in _own(context, call.layer):
        if key[1] == _BUFFERS:
            context.present[index] = context.present[call.layer]
        else:
            context.next_states[index, *key[1:]] = context.next_states[key]
    return tree_unflatten(
        [*call.results[: call.output], hidden, *call.results[call.output + 1 :]], call.result_layout
    )


def _is_like(values: list[Any], layout: TreeSpec, call: _Call) -> bool:
    """Whether these are the arguments of `call`, but for the numbers of the hidden states."""
    if layout != call.layout:
        return False
    hidden, first = values[call.hidden], call.values[call.hidden]
    is_like = (
        isinstance(hidden, Tensor) and hidden.dtype == first.dtype and hidden.shape == first.shape
    )
    return is_like and all(
        place == call.hidden or _is_same(value, other)
        for place, (value, other) in enumerate(zip(values, call.values, strict=True))
    )


def _is_same(value: Any, other: Any) -> bool:
    return value is other or (
        type(value) is type(other)
        and isinstance(value, bool | int | float | str)
        and value == other
    )


def _places(values: Sequence[Any]) -> list[int]:
    """The places of the tensors among `values`."""
    return [place for place, value in enumerate(values) if isinstance(value, Tensor)]


def _own(context: DecodeContext, layer: int) -> set[StateKey]:
    """The states that `layer` retains."""
    buffers = {(layer, _BUFFERS, 0)} if layer in context.past else set()
    return buffers | {key for key in context.states if key[0] == layer}


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
    """values: as `_read` returns them."""
    rest = [*values]
    if layer in context.past:
        buffers[layer] = (rest.pop(0), rest.pop(0))
    states.update(
        zip((key for key in sorted(context.states) if key[0] == layer), rest, strict=True)
    )


def _marker(
    name: str,
    inputs: Sequence[Tensor],
    attributes: dict[str, Any],
    like: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """The outputs of a node that computes nothing, with the shapes and dtypes of `like`, by default of its inputs."""
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
