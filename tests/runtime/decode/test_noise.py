"""The runtime's random numbers: those of the contract."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from qsample.runtime.decode.noise import uniforms
from tests.helpers.reference import philox_uniforms


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63 - 1, 0x0123456789ABCDEF])
@pytest.mark.parametrize("count", [1, 4, 7, 130])
def test_uniforms_are_those_of_the_reference(seed: int, count: int) -> None:
    got = uniforms(seed, count)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, philox_uniforms(seed, count))


def test_uniforms_are_those_of_the_graph(llama_package: Path) -> None:
    session = ort.InferenceSession(llama_package / "initial_state.onnx", providers=["CPUExecutionProvider"])
    seeds = [3, 2**40 + 5]
    feeds = {"seed": np.array(seeds), "capacity": np.array(50)}
    np.testing.assert_array_equal(session.run(["noise"], feeds)[0], [uniforms(seed, 50) for seed in seeds])
