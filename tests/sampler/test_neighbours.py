"""A row's results do not depend on the other rows, whatever these hold."""

from __future__ import annotations

import numpy as np
import pytest

from qsample.contract.interface import Features
from qsample.contract.tensors import EXTRA_PARAMETERS, FILTER_ORDERS
from tests.helpers.sampler_cases import interface, make_inputs, sampler

# Each on its own: a value that takes tokens away.
ON = {
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.5,
    "typical_p": 0.5,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
}
ON |= {"top_n_sigma": 1.0, "xtc_probability": 1.0, "dynatemp_range": 0.5, "mirostat_tau": 2.0}
BESIDE = {
    "ended": ("status", 1),
    "silent": ("emit", 0),
    "greedy": ("temperature", 0),
    "invalid": ("top_k", 0),
}


@pytest.mark.parametrize("shift", [-50, 0, 50])
@pytest.mark.parametrize("order", FILTER_ORDERS)
@pytest.mark.parametrize("beside", BESIDE)
def test_beside_a_row_that_draws_nothing(beside: str, order: str, shift: float) -> None:
    """Row 0 draws from the whole vocabulary, row 1 from the tokens that min_p leaves; row 2 has an idle filter."""
    face = interface(300, Features(filters=tuple(EXTRA_PARAMETERS), filter_order=order))
    step, drawing = sampler(face), {"min_p": [0, 0.01]}
    logits = np.random.default_rng(0).normal(shift, 1, (3, 300)).astype(np.float32)
    alone = [
        step(logits[row : row + 1], make_inputs(face, 1, min_p=drawing["min_p"][row]))["next_ids"][
            0, 0
        ]
        for row in range(2)
    ]
    if beside == "invalid":
        logits[2, 5] = np.nan
    for name, value in ON.items():
        inputs = make_inputs(face, 3, min_p=[*drawing["min_p"], 0])
        for parameter, number in ((name, value), BESIDE[beside]):
            inputs[parameter][2] = number
        assert step(logits, inputs)["next_ids"][:2, 0].tolist() == alone, name
