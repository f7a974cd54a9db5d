"""Recurrent layers over retained states: padding and rows that have ended leave the states alone, and chunks make no
difference, however a layer runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from qsample.transforms import recurrent
from qsample.transforms.cache import DecodeContext, RetainedCache, StateKey
from qsample.transforms.decoder import apply_transforms, run_model, state_shapes
from qsample.transforms.recurrent import StepCache, retain_recurrent_states, scan
from tests.architectures.configs import tiny_model

States = dict[StateKey, Tensor]
# How the layers of each type run: the functions of transformers that have an operator.
TYPES = {
    "qwen3_next": ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"),
    "olmo_hybrid": ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"),
    "kimi_linear": ("causal_conv1d_fn", "chunk_kimi_delta_attention"),
    "mamba2": ("causal_conv1d_fn", "mamba2_chunk_scan"),
    "lfm2": ("causal_conv1d_fn",),
    "mamba": ("causal_conv1d_fn", "mamba_selective_scan"),
    "zamba": ("causal_conv1d_fn", "mamba_selective_scan"),
}
LENGTHS = [4, 2, 4]
START = [0, 0, 3]


class Rows:
    """A model over retained states. Row 0 has four tokens, row 1 two and padding; row 2 has ended."""

    def __init__(self, model_type: str) -> None:
        self.context = DecodeContext()
        self.model = tiny_model(model_type)
        apply_transforms(self.model, self.context)
        self.shapes = state_shapes(self.model, self.context)[1]
        self.layers = [
            module for module in self.model.modules() if id(module) in self.context.states_of
        ]

    def filled(self, value: float) -> States:
        return {(s.layer, s.kind, s.index): torch.full((3, *s.shape), value) for s in self.shapes}

    def layer(
        self, index: int, hidden: Tensor, lengths: list[int], start: list[int], states: States
    ) -> Any:
        """The results of a layer on `hidden`, [3, S, hidden], and the states that it leaves."""
        context, module = self.context, self.layers[index]
        context.input_lengths = torch.tensor(lengths, dtype=torch.int32)
        context.positions = torch.tensor(start)[:, None] + torch.arange(hidden.shape[1])
        context.running = torch.tensor([True, True, False])
        context.states = states
        with torch.no_grad():
            result = module(hidden, RetainedCache(context, 2))
        after = dict(context.next_states)
        context.clear()
        return result[0] if isinstance(result, tuple) else result, after


BY_TOKEN = "mamba, token by token"


@pytest.fixture(scope="module", params=[*TYPES, BY_TOKEN])
def rows(request: pytest.FixtureRequest) -> Iterator[Rows]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == BY_TOKEN:
            patch.setattr(recurrent, "recurrence_of", lambda module: None)
        yield Rows(request.param.partition(",")[0])


HIDDEN = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(0))


def test_how_the_layers_run(rows: Rows) -> None:
    assert rows.layers
    found = {recurrent.recurrence_of(type(layer)) for layer in rows.layers}
    assert found in ({TYPES[rows.model.config.model_type]}, {None})


def test_states_of_ragged_rows(rows: Rows) -> None:
    before = rows.filled(7.0)
    output, whole = rows.layer(0, HIDDEN, LENGTHS, START, before)
    clean_output, clean = rows.layer(0, HIDDEN, LENGTHS, START, rows.filled(0.0))
    padded = HIDDEN.clone()
    padded[1, 2:] = 100
    other_output, other = rows.layer(0, padded, LENGTHS, START, before)
    assert whole.keys() == {key for key in before if key[0] == rows.shapes[0].layer}
    for key, state in whole.items():
        assert torch.equal(
            clean[key][:2], state[:2]
        )  # a row that begins does not see its old states
        assert torch.equal(other[key], state)  # nor does the padding matter
        assert torch.equal(state[2], before[key][2])
        assert not torch.equal(state[0], before[key][0])
    for row, length in enumerate(LENGTHS[:2]):
        assert torch.equal(clean_output[row, :length], output[row, :length])
        assert torch.equal(other_output[row, :length], output[row, :length])


def test_states_that_hold_anything(rows: Rows) -> None:
    """NaN in the buffers of a row that begins, in its padding, and in a row that has ended stays there."""
    hidden, states = HIDDEN.clone(), rows.filled(float("nan"))
    hidden[1, 2:] = float("nan")
    output, after = rows.layer(0, hidden, LENGTHS, START, states)
    wanted, clean = rows.layer(0, HIDDEN, LENGTHS, START, rows.filled(0.0))
    assert torch.equal(output[0], wanted[0])
    assert torch.equal(output[1, :2], wanted[1, :2])
    for key, state in after.items():
        assert torch.equal(state[:2], clean[key][:2])
        assert state[2].isnan().all()


def test_chunks_make_no_difference(rows: Rows) -> None:
    output, whole = rows.layer(0, HIDDEN, LENGTHS, START, rows.filled(7.0))
    parts, states, position = [], rows.filled(7.0), 0
    for size in (1, 2, 1):
        part = HIDDEN[:, position : position + size]
        lengths = [size, max(0, min(size, 2 - position)), size]
        result, after = rows.layer(0, part, lengths, [position, position, 3], states)
        states = states | after
        parts.append(result)
        position += size
    torch.testing.assert_close(torch.cat(parts, dim=1)[0], output[0], rtol=1e-5, atol=1e-5)
    for key, state in whole.items():
        torch.testing.assert_close(states[key][:2], state[:2], rtol=1e-5, atol=1e-5)


def test_the_layer_computes_what_it_did(rows: Rows) -> None:
    """Against the layer as transformers runs it, without a cache."""
    output, _ = rows.layer(0, HIDDEN, LENGTHS, START, rows.filled(7.0))
    module = rows.layers[0]
    with torch.no_grad():
        wanted = type(module).forward(module, HIDDEN)
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    torch.testing.assert_close(output[0], wanted[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output[1, :2], wanted[1, :2], rtol=1e-4, atol=1e-5)


def test_the_transform_is_done_once() -> None:
    context, model = DecodeContext(), tiny_model("mamba2")
    for _ in range(2):
        retain_recurrent_states(model, context)
    with torch.no_grad():
        run_model(model, context, torch.ones(1, 4, dtype=torch.int64), torch.arange(4)[None])
    assert context.states_of


def test_scan_runs_the_steps_in_order() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    final, stacked = scan(
        lambda states, inputs: ([states[0] + inputs[0]], states[0]), [torch.zeros(2)], [x]
    )
    assert final[0].tolist() == [3, 12]
    assert stacked.tolist() == [[0, 0, 1], [0, 3, 7]]


def test_a_convolution_sees_its_window_and_keeps_the_newest() -> None:
    key = (0, "conv_state", 0)
    cache = StepCache({key: torch.tensor([[1.0, 2.0, 3.0]])})
    assert cache.update_conv_state(torch.tensor([[4.0]]), 0).tolist() == [[1, 2, 3, 4]]
    assert cache.states[key].tolist() == [[2, 3, 4]]
