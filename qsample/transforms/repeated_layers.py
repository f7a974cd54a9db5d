"""Layers that compute the same from different weights: the layers of a decoder in groups.

Weights are compared by name, shape and dtype, and everything else that a layer's modules hold by value or identity.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn

from qsample.contract.tensors import TensorSpec
from qsample.transforms.cache import DecodeContext
from qsample.transforms.experts import SwiGLU
from qsample.transforms.quantized_linear import QuantizedWeight

# Attributes of modules that hold the place of their layer.
_INDICES: Final = ("layer_idx", "layer_id", "layer_index", "layer_number")
_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, SwiGLU)


@dataclass(frozen=True, slots=True)
class DecoderLayers:
    """The layers of a decoder.

    Attributes:
        count: how many there are.
        states: the index of a layer → its retained states: key and value, then states of other kinds.
        context: of the decoder's calls.
    """

    count: int
    states: Mapping[int, Sequence[TensorSpec]]
    context: DecodeContext

    def state_names(self, layer: int) -> list[str]:
        """The names of the states of `layer`."""
        return [state.name for state in self.states.get(layer, ())]


@dataclass(frozen=True, slots=True)
class RepeatedLayers:
    """Layers of a list of modules that differ in their weights alone.

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
    """The groups of two or more equal layers in lists of `layers.count` modules of `root`.

    Equal layers have modules of the same classes, weights of the same names, shapes and dtypes, states of the same
    shapes and dtypes, and the same attributes. Attributes of a few names may hold the layer's index. Objects that are
    neither numbers nor collections are the same if they are one object. A layer that shares parameters with another
    module is equal to none: it may choose among them by its index.
    """
    groups = []
    for path, modules in _layer_lists(root, layers.count):
        owners = _owners(root, modules)
        kinds: dict[Any, list[_Description]] = {}
        for index, module in enumerate(modules):
            description = _Description(module, index, owners)
            states = tuple((state.dtype, state.axes) for state in layers.states.get(index, ()))
            kind = (description.modules(), states, index in layers.context.masked)
            if not description.shares_parameters:
                kinds.setdefault(kind, []).append(description)
        groups += [
            RepeatedLayers(path, first.index, tuple(other.index for other in others), first.own_names)
            for first, *others in kinds.values()
            if others
        ]
    return groups


def _layer_lists(root: nn.Module, count: int) -> Iterator[tuple[str, nn.ModuleList]]:
    """Lists of `count` modules that are in no other list."""
    found: list[str] = []
    for path, module in root.named_modules():
        is_inner = any(path.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and len(module) == count and not is_inner:
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
        self._own = {id(tensor): name for name, tensor in reversed(named) if owners[id(tensor)] == {index}}
        self._open: list[int] = []  # functions that are being described: they may refer to themselves

    def modules(self) -> tuple[Any, ...]:
        """The layer's modules, with their attributes and the kinds of their weights."""
        return tuple((name, self._module(module)) for name, module in self._layer.named_modules(remove_duplicate=False))

    def _module(self, module: nn.Module) -> Any:
        weights = tuple(
            (name, tensor.shape, tensor.dtype, self._value(tensor)) for name, tensor in _tensors(module).items()
        )
        registries = ("_parameters", "_buffers", "_modules")
        attributes = {name: value for name, value in vars(module).items() if name not in registries}
        absent = tuple(name for name, tensor in _registered(module).items() if tensor is None)
        return type(module), weights, absent, self._attributes(attributes)

    def _attributes(self, attributes: dict[str, Any]) -> Any:
        return tuple((name, self._attribute(name, value)) for name, value in sorted(attributes.items()))

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
            return type(value), tuple((self._value(key), self._value(item)) for key, item in value.items())
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
            return QuantizedWeight, self._value([getattr(value, entry.name) for entry in dataclasses.fields(value)])
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
