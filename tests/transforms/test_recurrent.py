"""Recurrent layers token by token: padding and finished rows leave the states alone, and chunks make no difference."""

from __future__ import annotations

import pytest
import torch

from qsample.transforms.cache import DecodeContext
from qsample.transforms.pipeline import apply, default_transforms
from qsample.transforms.probe import run_model, state_shapes
from qsample.transforms.recurrent import StepCache, scan
from tests.helpers.tiny_models import random_model


def test_scan_runs_the_steps_in_order() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    final, stacked = scan(lambda states, inputs: ([states[0] + inputs[0]], states[0]), [torch.zeros(2)], [x])
    assert final[0].tolist() == [3, 12]
    assert stacked.tolist() == [[0, 0, 1], [0, 3, 7]]


def test_a_convolution_sees_its_window_and_keeps_the_newest() -> None:
    key = (0, "conv_state", 0)
    cache = StepCache({key: torch.tensor([[1.0, 2.0, 3.0]])})
    assert cache.update_conv_state(torch.tensor([[4.0]]), 0).tolist() == [[1, 2, 3, 4]]
    assert cache.states[key].tolist() == [[2, 3, 4]]


@pytest.mark.parametrize("model_type", ["mamba", "lfm2"])
def test_states_of_ragged_rows(model_type: str) -> None:
    """Row 0 has four tokens, row 1 two and padding; row 2 is finished: its states stay whatever it is given."""
    options = {"mamba": {"state_size": 4}, "lfm2": {"layer_types": ["conv", "conv"], "conv_L_cache": 3}}[model_type]
    context = DecodeContext()
    model, _ = apply(random_model(model_type, **options), default_transforms(context))
    _, shapes = state_shapes(model, context)
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 9, 9], [5, 6, 7, 8]])

    def run(ids: torch.Tensor, lengths: list[int], start: list[int], states: dict) -> dict:
        context.input_lengths = torch.tensor(lengths, dtype=torch.int32)
        context.positions = torch.tensor(start)[:, None] + torch.arange(ids.shape[1])
        context.running = torch.tensor([True, True, False])
        context.states = states
        with torch.no_grad():
            run_model(model, context, ids, context.positions)
        after = dict(context.next_states)
        context.clear()
        return after

    before = {(s.layer, s.kind, s.index): torch.full((3, *s.shape), 7.0) for s in shapes}
    whole = run(ids, [4, 2, 4], [0, 0, 3], before)
    first = run(ids[:, :2], [2, 2, 2], [0, 0, 3], before)
    second = run(ids[:, 2:], [2, 1, 2], [2, 2, 3], first)
    clean = run(ids, [4, 2, 4], [0, 0, 3], {key: torch.zeros_like(state) for key, state in before.items()})
    for key, state in whole.items():
        assert torch.equal(clean[key][:2], state[:2])  # a row that begins does not see what its states were
        torch.testing.assert_close(second[key][0], state[0])
        torch.testing.assert_close(first[key][1], state[1])
        assert torch.equal(state[2], before[key][2])
