"""How many programs a step dispatches for the sampler, by what its rows need: each costs a launch.

ONNX Runtime's plugin logs each program that it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample import AutoModelForCausalLM
from qsample.contract.interface import Interface
from qsample.contract.tensors import HOST_AXES, REPLAY_ROWS
from qsample.ort.options import session_options
from qsample.ort.providers import WEBGPU, open_session
from qsample.package.package import read_package
from qsample.sampler import build_sampler
from tests.helpers.sampler_cases import PAD, make_inputs
from tests.webgpu.conftest import on_webgpu

Array = np.ndarray
ROWS = 4
LLM_VOCAB = 151_936
# The lengths of processed_rows, vocabulary_rows and searched_rows.
LISTS = {
    "greedy": (0, 0, 0),
    "candidates": (ROWS, 0, 0),
    "vocabulary": (ROWS, ROWS, 0),
    "every row searched": (ROWS, ROWS, ROWS),
}
# A large vocabulary is selected from in blocks of blocks. The search sorts it twice, by 171 programs each time.
PROGRAMS = {"greedy": 48, "candidates": 169, "vocabulary": 240, "every row searched": 634}
ADDED = {"greedy": 48, "candidates": 153, "vocabulary": 224, "every row searched": 274}
# Mixtures are not for WebGPU: its provider has no kernel of MoE.
FAMILIES = ("llama", "qwen3", "gemma3_text", "olmo_hybrid")
SHORT = ("llama", "olmo_hybrid")
INFO = 1  # ONNX Runtime's severity


def lists(name: str) -> dict[str, Array]:
    names = (spec.name for spec in REPLAY_ROWS)
    return dict(zip(names, map(np.arange, LISTS[name]), strict=True))


def programs(session: Any, feeds: Mapping[str, Array], capfd: pytest.CaptureFixture[str]) -> int:
    """How many programs a run starts."""
    known = {value.name for value in session.get_inputs()}
    capfd.readouterr()
    session.run(None, {name: array for name, array in feeds.items() if name in known})
    return capfd.readouterr().err.count("Starting program")


def test_programs_of_the_sampler(capfd: pytest.CaptureFixture[str]) -> None:
    face = Interface(LLM_VOCAB, (), captured=True)
    session = on_webgpu(build_sampler(face, PAD, for_webgpu=True), severity=INFO)
    logits = np.random.default_rng(0).normal(size=(ROWS, LLM_VOCAB)).astype(np.float32)
    found = {}
    for name in LISTS:
        inputs = make_inputs(face, ROWS, capacity=64, stops=2, status=1, **lists(name))
        found[name] = programs(session, {"logits": logits, **inputs}, capfd)
    assert found == PROGRAMS


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in SHORT else pytest.mark.slow) for name in FAMILIES],
)
def test_programs_that_the_sampler_adds(
    checkpoint: Callable[[str], Path],
    family: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The same, whichever model is before it."""
    source = checkpoint(family)
    counts = {}
    for sampler in (False, True):
        model = AutoModelForCausalLM.from_pretrained(source, include_sampler=sampler)
        path = tmp_path / str(sampler)
        model.compile(path, provider="webgpu", ctx_len=64, max_divergence=100)
        counts[sampler] = programs_of_steps(path, capfd)
    assert {name: counts[True][name] - counts[False][name] for name in LISTS} == ADDED


def programs_of_steps(path: Path, capfd: pytest.CaptureFixture[str]) -> dict[str, int]:
    """How many programs a step of one token starts."""
    package = read_package(path)
    assert package.manifest.compilation is not None
    options = session_options()
    options.log_severity_level = INFO
    given = package.manifest.compilation.provider_options
    session = open_session(package.path / "decoder.onnx", options, [WEBGPU], given)
    found = {}
    for name in LISTS:
        needed = lists(name)
        sizes = {**package.interface.sizes, **dict.fromkeys(HOST_AXES, 1)}
        sizes |= {"B": ROWS, "S": 1, "T": 64}
        sizes |= {spec.axes[0]: needed[spec.name].size for spec in REPLAY_ROWS}
        spec = package.interface.decoder
        feeds = {
            one.name: np.full(one.shape(sizes), one.off or 0, one.dtype)
            for one in (*spec.inputs, *spec.states)
        }
        feeds |= {"input_lengths": np.ones(ROWS, np.int32), **needed}
        found[name] = programs(session, feeds, capfd)
    return found
