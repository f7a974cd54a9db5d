"""Equal layers: what may differ between them, and what may not."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from qsample.contract.tensors import BATCH, TensorSpec
from qsample.transforms.cache import DecodeContext
from qsample.transforms.repeated_layers import (
    DecoderLayers,
    RepeatedLayers,
    find_repeated_layers,
    standing_in,
)


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer_idx = index
        self.scale = 2.0
        self.inner = nn.Linear(4, 4)
        self.register_buffer("offset", torch.full((4,), float(index)))
        # As transforms do, and transformers' hooks.
        self.inner.forward = functools.partial(self.linear, self.inner)
        self.register_forward_hook(lambda *call: self.scale and None)

    @staticmethod
    def linear(module: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, module.weight, module.bias)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(index) for index in range(3))
        self.head = nn.Linear(4, 4)


def groups(
    model: nn.Module, states: dict[int, list[TensorSpec]] | None = None
) -> list[tuple[int, tuple[int, ...]]]:
    found = find_repeated_layers(model, DecoderLayers(3, states or {}, DecodeContext()))
    return [(group.first, group.others) for group in found]


def test_layers_differ_in_weights_and_in_their_own_index() -> None:
    (group,) = find_repeated_layers(Model(), DecoderLayers(3, {}, DecodeContext()))
    assert (group.path, group.first, group.others) == ("layers", 0, (1, 2))
    assert sorted(group.weights) == ["inner.bias", "inner.weight", "offset"]
    assert group.prefix(2) == "layers.2."


def set_scale(model: Model) -> None:
    model.layers[1].scale = 3.0  # type: ignore[assignment]


def set_index(model: Model) -> None:
    model.layers[1].layer_idx = 0  # type: ignore[assignment]


def drop_bias(model: Model) -> None:
    model.layers[1].inner.bias = None  # type: ignore[union-attr]


def widen(model: Model) -> None:
    model.layers[1].offset = torch.zeros(1)


def use_float16(model: Model) -> None:
    model.layers[1].inner.half()  # type: ignore[union-attr]


def use_own_forward(model: Model) -> None:
    model.layers[1].forward = lambda hidden: hidden  # type: ignore[method-assign]


def replace_module(model: Model) -> None:
    model.layers[1].inner = nn.Sequential(nn.Linear(4, 4))


def use_other_linear(model: Model) -> None:
    inner = model.layers[1].inner
    inner.forward = functools.partial(Layer.linear, model.head)  # type: ignore[union-attr]


def tie_to_head(model: Model) -> None:
    model.layers[1].inner.weight = model.head.weight  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "change",
    [
        set_scale,
        set_index,
        drop_bias,
        widen,
        use_float16,
        use_own_forward,
        replace_module,
        use_other_linear,
        tie_to_head,
    ],
)
def test_everything_else_that_differs_makes_another_kind_of_layer(
    change: Callable[[Model], None],
) -> None:
    model = Model()
    change(model)
    assert groups(model) == [(0, (2,))]


def test_layers_that_share_parameters_are_equal_to_none() -> None:
    model = Model()
    model.layers[0].inner.weight = model.layers[1].inner.weight  # type: ignore[union-attr]
    assert groups(model) == []


def test_a_buffer_of_several_layers_is_no_layers_own() -> None:
    model = Model()
    for layer in model.layers:
        layer.offset = model.layers[0].offset
    (group,) = find_repeated_layers(model, DecoderLayers(3, {}, DecodeContext()))
    assert sorted(group.weights) == ["inner.bias", "inner.weight"]


def test_layers_of_other_states_are_of_another_kind() -> None:
    def states(size: int) -> list[TensorSpec]:
        return [TensorSpec(f"of {size}", "float32", (BATCH, size), "a state")]

    assert groups(Model(), {0: states(4), 1: states(8), 2: states(8)}) == [(1, (2,))]


def test_only_lists_of_all_layers_count() -> None:
    assert find_repeated_layers(Model(), DecoderLayers(4, {}, DecodeContext())) == []


class Keeper(nn.Module):
    """Doubles its hidden states, and writes the state of `owner`."""

    def __init__(self, context: DecodeContext, owner: int) -> None:
        super().__init__()
        self.context, self.owner = context, owner

    def forward(self, hidden: torch.Tensor | float, shift: float = 0.0) -> torch.Tensor | float:
        self.context.next_states[self.owner, "conv_state", 0] = torch.ones(2, 3)
        return hidden * 2 + shift


@pytest.mark.parametrize(
    ("owner", "calls", "difference"),
    [
        (0, [(0, ()), (1, ())], None),
        (1, [(0, ()), (1, ())], "layer 0 returns no tensor, or writes the states"),
        (0, [(0, ()), (0, ())], "layer 0 takes no tensor, or runs twice"),
        (0, [(0, ()), (1, (1.0,))], "layer 1 is called in another way"),
        (0, [(0, (1.0,)), (1, (1.0,))], None),
        (0, [(0, (1.0,)), (1, (2.0,))], "layer 1 is called in another way"),
        (0, [(1, ()), (0, ())], "layer 1 is called in another way"),
    ],
)
def test_a_layer_stands_for_another(
    owner: int, calls: list[tuple[int, tuple[float, ...]]], difference: str | None
) -> None:
    context = DecodeContext(
        states={(layer, "conv_state", 0): torch.zeros(2, 3) for layer in range(2)}
    )
    root = nn.Module()
    root.layers = nn.ModuleList([Keeper(context, owner), Keeper(context, 1)])
    hidden = torch.ones(2, 5, 4)
    with (
        torch.no_grad(),
        standing_in(root, [RepeatedLayers("layers", 0, (1,), ())], context) as notes,
    ):
        for layer, arguments in calls:
            hidden = root.layers[layer](hidden, *arguments)
    assert hidden.shape == (2, 5, 4)
    if difference is None:
        assert notes.difference is None
        assert context.next_states.keys() == context.states.keys()
    else:
        assert str(notes.difference).startswith(difference)
    assert all("forward" not in vars(layer) for layer in root.layers)
