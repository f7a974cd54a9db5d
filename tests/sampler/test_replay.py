"""What a step of a graph for replay does to a row, for every combination of what it may find there."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from qsample.contract.interface import Interface
from qsample.contract.tensors import INVALID_LOGITS, LENGTH, RUNNING, STOPPED
from tests.helpers.sampler_cases import PAD, make_inputs, sampler

VOCAB, CAPACITY, SEEN = 300, 16, 5
BEST = 299
# Four stop ids of a row, of which none, one, or several are its token.
STOPS = ([7, 8, -1, -1], [7, BEST, -1, -1], [BEST] * 4)
# A status beyond those of the contract ends a row as an invalid one.
STATUSES = {RUNNING: RUNNING, STOPPED: STOPPED, LENGTH: LENGTH, INVALID_LOGITS: INVALID_LOGITS}
STATUSES |= {4: INVALID_LOGITS, 70: INVALID_LOGITS}
CASES = [
    *product(STATUSES, (True, False), STOPS, (SEEN + 2, SEEN + 3), ("", "nan", "inf", "masked"))
]


@pytest.mark.parametrize("for_webgpu", [False, True])
@pytest.mark.parametrize("is_processed", [False, True])
def test_every_case(for_webgpu: bool, is_processed: bool) -> None:
    """Once as a greedy row, and once as one whose largest adjusted logit is taken."""
    face = Interface(VOCAB, (), captured=True)
    rows = len(CASES)
    logits = np.tile(np.arange(VOCAB, dtype=np.float32), (rows, 1))
    for row, (*_, fault) in enumerate(CASES):
        if fault == "masked":
            logits[row] = -np.inf
        elif fault:
            logits[row, 3] = np.float32(fault)
    status, emit, stops, limit, _ = map(np.array, zip(*CASES, strict=True))
    tokens = np.full((rows, CAPACITY), 9)
    inputs = make_inputs(
        face,
        rows,
        capacity=CAPACITY,
        stops=4,
        temperature=0,
        status=status,
        emit=emit,
        stop_ids=stops,
        max_length=limit,
        lengths=SEEN,
        tokens=tokens,
        input_ids=9,
        presence_penalty=0.5 if is_processed else 0,
    )
    listed = np.arange(rows if is_processed else 0)
    inputs |= {"processed_rows": listed}
    inputs |= dict.fromkeys(("vocabulary_rows", "searched_rows"), np.zeros(0, np.int64))
    got = sampler(face, for_webgpu=for_webgpu)(logits, inputs)
    for row, (before, emits, stop_ids, most, fault) in enumerate(CASES):
        runs = before == RUNNING
        emitted = runs and emits and not fault
        after = STATUSES[before]
        if runs and emits:
            ending = LENGTH if most == SEEN + 2 else RUNNING
            after = INVALID_LOGITS if fault else STOPPED if BEST in stop_ids else ending
        case = CASES[row]
        assert got["status_RetainedState"][row] == after, case
        assert got["next_ids"][row, 0] == (BEST if emitted else PAD), case
        advances = runs and (not emits or emitted)
        assert got["lengths_RetainedState"][row] == SEEN + advances, case
        assert got["output_counts_RetainedState"][row].sum() == emitted, case
        assert got["output_counts_RetainedState"][row, BEST] == emitted, case
        written = [9] * CAPACITY
        if emitted:
            written[SEEN + 1 :] = [BEST] * (CAPACITY - SEEN - 1)
        assert got["tokens_RetainedState"][row].tolist() == written, case
