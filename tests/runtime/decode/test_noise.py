"""The runtime's random numbers: those of the contract."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample.contract import NOISE_STREAMS
from qsample.exporters.initial_state import build_initial_state
from qsample.interface import Features, Interface
from qsample.runtime.decode.noise import uniforms
from tests.helpers.reference import philox4x32, philox_uniforms


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63 - 1, 0x0123456789ABCDEF])
@pytest.mark.parametrize("count", [1, 4, 7, 130])
def test_uniforms_are_those_of_the_reference(seed: int, count: int) -> None:
    got = uniforms(seed, count)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, philox_uniforms(seed, count))


def test_uniforms_are_those_of_the_graph(tmp_path: Path) -> None:
    interface = Interface(5, (), features=Features(filters=("xtc",)))
    ir.save(build_initial_state(interface), tmp_path / "graph.onnx")
    session = ort.InferenceSession(tmp_path / "graph.onnx", providers=["CPUExecutionProvider"])
    seeds = [3, 2**40 + 5]
    feeds = {"seed": np.array(seeds), "capacity": np.array(50)}
    for name, stream in NOISE_STREAMS.items():
        np.testing.assert_array_equal(session.run([name], feeds)[0], [uniforms(seed, 50, stream) for seed in seeds])


def test_xtc_noise_is_of_another_counter() -> None:
    words = philox4x32((1, 1, 0, 0), (7, 0))
    assert uniforms(7, 8, stream=1)[4:].tolist() == [(word >> 8) * 2.0**-24 for word in words]
