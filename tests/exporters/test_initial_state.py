"""initial_state.onnx: Philox against the published vectors, shapes, dtypes and starting values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnxscript import GraphBuilder

from qsample.contract import MODEL_DTYPES, Interface, KeyValueShape
from qsample.exporters.initial_state import build_initial_state, philox
from qsample.exporters.trace import OPSET
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
FACE = Interface(100, (KeyValueShape(2, 8), KeyValueShape(1, 4)))


def load(model: ir.Model, folder: Path) -> ort.InferenceSession:
    ir.save(model, folder / "graph.onnx")
    return ort.InferenceSession(folder / "graph.onnx")


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_published_vectors(counter: list[int], key: list[int], expected: list[int], tmp_path: Path) -> None:
    inputs = [ir.val(f"i{index}", ir.DataType.INT64, [1]) for index in range(6)]
    graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": OPSET}, name="philox")
    graph.outputs.extend(philox(GraphBuilder(graph).op, inputs[:4], inputs[4:]))
    session = load(ir.Model(graph, ir_version=10), tmp_path)
    feeds = {f"i{index}": np.array([word], np.int64) for index, word in enumerate(counter + key)}
    assert [int(word[0]) for word in session.run(None, feeds)] == expected
    assert list(philox4x32(tuple(counter), tuple(key))) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("capacity", [1, 2, 3, 4, 5, 1023])
def test_noise(capacity: int, tmp_path: Path) -> None:
    seeds = np.array([0, 1, -1, 2**63 - 1, -(2**63), 123456789012345, 2**32], np.int64)
    noise = load(build_initial_state(FACE), tmp_path).run(["noise"], {"seed": seeds, "capacity": np.array(capacity)})[0]
    assert noise.dtype == np.float32
    np.testing.assert_array_equal(noise, [philox_uniforms(int(seed), capacity) for seed in seeds])
    assert noise.min() >= 0
    assert noise.max() < 1


@pytest.mark.parametrize("dtype", MODEL_DTYPES)
def test_states(dtype: str, tmp_path: Path) -> None:
    face = Interface(100, FACE.key_values, dtype=dtype)
    session = load(build_initial_state(face), tmp_path)
    spec = face.initial_state
    assert [node.name for node in session.get_inputs()] == spec.input_names
    assert [node.name for node in session.get_outputs()] == spec.output_names
    sizes = face.sizes | {"B": 3, "T": 7}
    feeds = {"seed": np.arange(3), "capacity": np.array(7)}
    if dtype == "bfloat16":  # NumPy has none; the OrtValue gives its shape and type
        values = session.run_with_ort_values(
            spec.output_names, {name: ort.OrtValue.ortvalue_from_numpy(value) for name, value in feeds.items()}
        )
        for tensor, value in zip(spec.outputs, values, strict=True):
            assert tuple(value.shape()) == tensor.shape(sizes)
            assert value.data_type() == {"bfloat16": "tensor(bfloat16)", "float32": "tensor(float)"}.get(
                tensor.dtype, "tensor(int32)"
            )
        return
    for tensor, value in zip(spec.outputs, session.run(spec.output_names, feeds), strict=True):
        assert value.shape == tensor.shape(sizes)
        assert value.dtype == tensor.dtype
        assert tensor.name == "noise" or not value.any()


def test_every_product_fits_signed_64_bits() -> None:
    """The halves of a multiplier times any word, and their sum, stay below 2**63: no kernel has to wrap."""
    assert 0xFFFFFFFF * 0xFFFF + (0xFFFF << 16) + 0xFFFFFFFF * 0xFFFF < 2**63
