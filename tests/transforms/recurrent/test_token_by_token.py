"""Layers run token by token: the loop, and the cache of one token."""

from __future__ import annotations

import torch

from qsample.transforms.recurrent.token_by_token import StepCache, scan


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
