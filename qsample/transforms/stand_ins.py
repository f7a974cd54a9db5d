"""A trace in which a single node stands for each layer that repeats another.

While `standing_in` is open, the first layer of each group of `repeated_layers` runs between two markers. Another layer
is a marker from hidden states to hidden states. Its retained states are no part of the trace: the next ones of the
first layer take their place. `exporters.repetition` puts copies of the first layer there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from qsample.transforms.cache import DecodeContext, StateKey
from qsample.transforms.markers import GROUP, LAYER, LAYER_BEGIN, LAYER_END, MARKER_DOMAIN, REPEATED_LAYER
from qsample.transforms.repeated_layers import RepeatedLayers

_BUFFERS: Final = "key_value"


@dataclass(slots=True)
class StandIns:
    """The notes of a trace.

    Attributes:
        context: of the call that is traced.
        first: the number of each group → the call of its first layer.
        difference: why a copy of the first layer cannot take the place of another layer; None: copies can.
    """

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
def standing_in(root: nn.Module, groups: Sequence[RepeatedLayers], context: DecodeContext) -> Iterator[StandIns]:
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
    return {name: value for kind in kinds for name, value in vars(layer)[kind].items()} | {kind: {} for kind in kinds}


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


def _run_first(record: StandIns, group: int, index: int, own: Any, *args: Any, **kwargs: Any) -> Any:
    """The layer's own forward, with its hidden states and retained states between two markers."""
    context = record.context
    values, layout = tree_flatten((args, kwargs))
    tensors = _tensors(values)
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
    tensors = _tensors(results)
    if not tensors or written != _own(context, index):
        record.note(f"layer {index} returns no tensor, or writes the states {sorted(written)}")
        return result
    output = tensors[0]  # others, such as attention weights, are those of this layer: nothing may read them
    after = _read(context, index, context.present, context.next_states)
    ended = _marker(LAYER_END, [results[output], *after], {GROUP: group})
    _assign(context, index, ended[1:], context.present, context.next_states)
    record.first[group] = _Call(index, layout, values, hidden, result_layout, results, output)
    return tree_unflatten([*results[:output], ended[0], *results[output + 1 :]], result_layout)


def _stand_in(record: StandIns, group: int, index: int, own: Any, *args: Any, **kwargs: Any) -> Any:
    """The marker of a layer, in results like those of the first layer of its group."""
    context, call = record.context, record.first.get(group)
    values, layout = tree_flatten((args, kwargs))
    if call is None or not _is_like(values, layout, call):
        record.note(f"layer {index} is called in another way than the first layer that is equal to it")
        return own(*args, **kwargs)
    attributes = {GROUP: group, LAYER: index}
    (hidden,) = _marker(REPEATED_LAYER, [values[call.hidden]], attributes, like=[call.results[call.output]])
    for key in _own(context, call.layer):
        if key[1] == _BUFFERS:
            context.present[index] = context.present[call.layer]
        else:
            context.next_states[index, *key[1:]] = context.next_states[key]
    return tree_unflatten([*call.results[: call.output], hidden, *call.results[call.output + 1 :]], call.result_layout)


def _is_like(values: list[Any], layout: TreeSpec, call: _Call) -> bool:
    """Whether these are the arguments of `call`, but for the numbers of the hidden states."""
    if layout != call.layout:
        return False
    hidden, first = values[call.hidden], call.values[call.hidden]
    is_like = isinstance(hidden, Tensor) and hidden.dtype == first.dtype and hidden.shape == first.shape
    return is_like and all(
        place == call.hidden or _is_same(value, other)
        for place, (value, other) in enumerate(zip(values, call.values, strict=True))
    )


def _is_same(value: Any, other: Any) -> bool:
    return value is other or (
        type(value) is type(other) and isinstance(value, bool | int | float | str) and value == other
    )


def _tensors(values: Sequence[Any]) -> list[int]:
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
    context: DecodeContext, layer: int, buffers: dict[int, tuple[Tensor, Tensor]], states: dict[StateKey, Tensor]
) -> list[Tensor]:
    """The values of all states of `layer`: those in `buffers`, then those in `states`."""
    return [*buffers.get(layer, ()), *(states[key] for key in sorted(context.states) if key[0] == layer)]


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
    states.update(zip((key for key in sorted(context.states) if key[0] == layer), rest, strict=True))


def _marker(
    name: str, inputs: Sequence[Tensor], attributes: dict[str, Any], like: Sequence[Tensor] | None = None
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
