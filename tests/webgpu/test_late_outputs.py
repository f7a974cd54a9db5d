"""Optional outputs stay on the device, and those of several steps are read together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample import SamplingParams
from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.ort import buffers
from qsample.package.package import read_package
from qsample.runtime import CausalLM, Engine, load

OUTPUTS = ("logprobs", "top_logprob_ids", "top_logprobs", "probs")
PROMPTS = [[5, 6], [7], [8, 9, 10]]
ROWS = [
    SamplingParams(temperature=0.9, max_new_tokens=most, eos_token_id=()) for most in (9, 12, 3)
]


@pytest.fixture(scope="module")
def model(exported: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    portable = exported(
        "llama", logprobs=True, top_logprobs=3, return_pdfs=True, allowed_tokens=True
    )
    options = CompileOptions(provider="webgpu", ctx_len=48)
    return load(
        compile_package(
            read_package(portable), tmp_path_factory.mktemp("late") / "webgpu", options
        ).path
    )


def test_late_outputs_are_those_of_each_step(model: CausalLM) -> None:
    """Rows that end in the middle of a window; beside a guided row, and alone."""
    for guide in (None, lambda step, mask: None):
        early, *late = (
            model.generate(PROMPTS, ROWS, seed=1, flush_every=every, allowed_tokens=guide)
            for every in (1, 4, 7)
        )
        for one in late:
            assert early.token_ids == one.token_ids
            for name in OUTPUTS:
                assert getattr(early, name).tobytes() == getattr(one, name).tobytes()


def test_reads_of_four_tokens(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each output that the request wants, beside those of the tokens."""
    read: list[tuple[int, ...]] = []
    plain = buffers._on_host

    def counted(value: Any, dtype: str) -> Any:
        read.append(tuple(value.shape()))
        return plain(value, dtype)

    params = SamplingParams(max_new_tokens=25, eos_token_id=())
    with Engine(model, slots=2) as engine:
        for names in ((), ["logprobs"], OUTPUTS):
            engine.add_request([5, 6], params, seed=3, outputs=names).result(
                120
            )  # all memory is there from now on
            with monkeypatch.context() as patch:
                patch.setattr(buffers, "_on_host", counted)
                read.clear()
                output = engine.add_request([5, 6], params, seed=3, outputs=names).result(120)
            assert [*output.outputs] == [*names]
            for width in (1, 3, model.interface.vocab_size):
                wanted = sum(value.shape[1] == width for value in output.outputs.values())
                assert read.count((4 * 2, width)) == 24 // 4 * wanted  # four steps of two rows
            assert read.count((2, model.interface.vocab_size)) <= 1 + 2 * ("probs" in names)
    assert np.isfinite(output.outputs["probs"]).all()
