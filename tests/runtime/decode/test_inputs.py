"""The memory for prompts; random numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample.contract.interface import Features, Interface
from qsample.contract.tensors import NOISE_STREAMS
from qsample.exporters.portable import build_initial_state
from qsample.ort.rounding import RowCounts
from qsample.runtime.decode.inputs import PromptInputs, uniforms
from tests.helpers.reference import philox4x32, philox_uniforms

INTERFACE = Interface(1000, (), features=Features(filters=("typical_p",)), captured=True)


@pytest.mark.parametrize("renewed", [False, True])
def test_prompts_are_padded_with_a_token_of_their_own(renewed: bool) -> None:
    inputs = PromptInputs(3, 10, RowCounts(4, 2), "cpu", renewed=renewed)
    calls = []
    for rows, expected in (
        ([[5, 6]], [[5, 6, 5, 5]]),
        ([[5, 6, 7, 8, 9], [4], [1, 2]], [[5, 6, 7, 8, 9, 5], [4] * 6, [1, 2, 1, 1, 1, 1]]),
    ):
        written = inputs.write([np.array(row) for row in rows])
        ids, lengths = written["input_ids"], written["input_lengths"]
        assert ids.shape == (len(rows), len(expected[0]))
        assert ids.read().ravel()[: np.size(expected)].tolist() == np.ravel(expected).tolist()
        assert lengths.read()[: lengths.shape[0]].tolist() == [len(row) for row in rows]
        calls.append(ids)
    assert (
        calls[0].read().ravel()[:4].tolist() == [5, 6, 5, 5]
    ) is renewed  # else the second call wrote there
    assert inputs.of_rows(2)["input_ids"].shape == (2, 1)


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63 - 1, 0x0123456789ABCDEF])
@pytest.mark.parametrize("count", [1, 4, 7, 130])
def test_uniforms_equal_the_reference(seed: int, count: int) -> None:
    got = uniforms(seed, count)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, philox_uniforms(seed, count))


def test_uniforms_equal_the_graph(tmp_path: Path) -> None:
    interface = Interface(5, (), features=Features(filters=("xtc",)))
    ir.save(build_initial_state(interface), tmp_path / "graph.onnx")
    session = ort.InferenceSession(tmp_path / "graph.onnx", providers=["CPUExecutionProvider"])
    seeds = [3, 2**40 + 5]
    feeds = {"seed": np.array(seeds), "capacity": np.array(50)}
    for name, stream in NOISE_STREAMS.items():
        np.testing.assert_array_equal(
            session.run([name], feeds)[0], [uniforms(seed, 50, stream) for seed in seeds]
        )


def test_xtc_noise_has_a_separate_stream() -> None:
    words = philox4x32((1, 1, 0, 0), (7, 0))
    assert uniforms(7, 8, stream=1)[4:].tolist() == [(word >> 8) * 2.0**-24 for word in words]


@pytest.mark.parametrize("lengths", [(1, 5), (5, 1), (2, 5, 3)])
def test_the_longest_prompt_decides_the_width(lengths: tuple[int, ...]) -> None:
    """Whichever row it is in."""
    inputs = PromptInputs(3, 10, RowCounts(), "cpu", renewed=True)
    rows = [np.arange(10 * row, 10 * row + length) for row, length in enumerate(lengths)]
    made = inputs.write(rows)
    ids = made["input_ids"].read()
    assert ids.shape == (len(lengths), 5)
    assert [row[:length].tolist() for row, length in zip(ids, lengths, strict=True)] == [
        row.tolist() for row in rows
    ]
    assert made["input_lengths"].read()[: len(lengths)].tolist() == list(lengths)
