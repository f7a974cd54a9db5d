"""Philox: the published vectors, and the buffers of the reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample.graph.operators import OPSET
from qsample.sampler.philox import noise_buffer, philox
from qsample.sampler.tensor import Tensor, building
from tests.helpers.reference import philox4x32, philox_uniforms

# kat_vectors of the Random123 distribution (Salmon et al., SC'11), philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]
SEEDS = [
    0,
    1,
    -1,
    2**63 - 1,
    -(2**63),
    2**32,
    2**32 - 1,
    -(2**32),
    2**53 + 1,
    -(2**53) - 1,
    0x0123456789ABCDEF,
]


def graph_of(*inputs: ir.Value) -> ir.Graph:
    return ir.Graph(inputs, [], nodes=[], opset_imports={"": OPSET}, name="philox")


def load(graph: ir.Graph, folder: Path) -> ort.InferenceSession:
    ir.save(ir.Model(graph, ir_version=10), folder / "graph.onnx")
    return ort.InferenceSession(folder / "graph.onnx")


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_published_vectors(
    counter: list[int], key: list[int], expected: list[int], tmp_path: Path
) -> None:
    inputs = [ir.val(f"i{index}", ir.DataType.INT64, [1]) for index in range(6)]
    graph = graph_of(*inputs)
    with building(graph):
        words = philox(
            [Tensor(value) for value in inputs[:4]], [Tensor(value) for value in inputs[4:]]
        )
    graph.outputs.extend(word.value for word in words)
    feeds = {f"i{index}": np.array([word], np.int64) for index, word in enumerate(counter + key)}
    assert [int(word[0]) for word in load(graph, tmp_path).run(None, feeds)] == expected
    assert list(philox4x32(tuple(counter), tuple(key))) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("capacity", [1, 2, 3, 4, 5, 1023])
@pytest.mark.parametrize("stream", [0, 1])
def test_buffer(capacity: int, stream: int, tmp_path: Path) -> None:
    graph = graph_of(
        ir.val("seed", ir.DataType.INT64, ["B"]), ir.val("capacity", ir.DataType.INT64, [])
    )
    with building(graph):
        graph.outputs.append(noise_buffer(*(Tensor(value) for value in graph.inputs), stream).value)
    buffer = load(graph, tmp_path).run(
        None, {"seed": np.array(SEEDS), "capacity": np.array(capacity)}
    )[0]
    assert buffer.dtype == np.float32
    np.testing.assert_array_equal(
        buffer, [philox_uniforms(seed, capacity, stream) for seed in SEEDS]
    )
    assert buffer.min() >= 0
    assert buffer.max() < 1
