"""What the sampler adds to a captured step, by what its rows need: the same for every kind of model.

tests/cuda/test_sampler_kernels.py counts with a large vocabulary, which takes more kernels to select from and to sort.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from qsample import AutoModelForCausalLM, SamplingParams
from qsample.runtime import CausalLM, load
from qsample.runtime.decode.slots import Slots
from qsample.runtime.prepare import parameter_row
from tests.cuda.test_model_kernels import captured_step
from tests.cuda.trace import Trace

FAMILIES = ("llama", "qwen3", "gemma3_text", "mixtral", "olmo_hybrid")
SHORT = ("llama", "olmo_hybrid")
ROWS, CONTEXT = 4, 64
# Parameters of all rows, and the kernels, and the copies and memsets, that the sampler adds to a step.
NEEDS: dict[str, tuple[dict[str, float], tuple[int, int]]] = {
    "greedy": ({"temperature": 0.0}, (30, 2)),
    "candidates": (
        {"temperature": 1.0, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.2},
        (109, 6),
    ),
    "vocabulary": ({"temperature": 1.0}, (173, 8)),
    "every row searched": ({"temperature": 1.0, "top_p": 0.9}, (203, 9)),
}


def compiled(checkpoint: Path, path: Path, *, sampler: bool) -> Path:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, include_sampler=sampler)
    model.compile(path, provider="cuda", dtype="float16", ctx_len=CONTEXT, max_divergence=100)
    return path


def launches(model: CausalLM, parameters: dict[str, float], trace: Trace) -> tuple[int, int]:
    """The kernels, and the copies and memsets, of a captured step of rows with these parameters."""
    slots = Slots(model.sessions, ROWS, model.capacity(CONTEXT))
    prompt = np.arange(4, 9)
    params = SamplingParams(**parameters)
    given = parameter_row(model.interface, params, prompt.size, slots.capacity)
    for row in range(ROWS):
        slots.begin(row, prompt, row, given)
        slots.prefill(row, prompt, emit=True)
    trace.clear()
    slots.decode()
    captures = trace.captures()
    assert captures > 0
    assert not trace.problems()
    kernels, copies = trace.captured_launches(), trace.captured_copies()
    assert kernels % captures == copies % captures == 0
    return kernels // captures, copies // captures


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in SHORT else pytest.mark.slow) for name in FAMILIES],
)
def test_kernels_that_the_sampler_adds(
    checkpoint: Callable[[str], Path], family: str, tmp_path: Path, trace: Trace
) -> None:
    source = checkpoint(family)
    alone = captured_step(
        compiled(source, tmp_path / "alone", sampler=False) / "decoder.onnx", trace
    )
    model = load(compiled(source, tmp_path / "whole", sampler=True))
    added = {}
    for name, (parameters, _) in NEEDS.items():
        kernels, copies = launches(model, parameters, trace)
        added[name] = (kernels - alone.kernels, copies - alone.copies)
    assert added == {name: counts for name, (_, counts) in NEEDS.items()}
