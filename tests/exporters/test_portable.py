"""A portable package: versions, packed weights, and initial_state.onnx: noise, shapes, dtypes and starting values."""

from __future__ import annotations

from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample.contract.interface import Features, Interface, KeyValueShape
from qsample.contract.tensors import MODEL_DTYPES
from qsample.errors import ParityError
from qsample.exporters import portable
from qsample.exporters.parity import Parity, Reference
from qsample.exporters.portable import Draft, build_initial_state, write_draft
from qsample.package.manifest import Source, TokenIds
from qsample.progress import Stage, Stages, unreported
from tests.helpers.reference import philox_uniforms
from tests.helpers.small_graphs import small_graph


def test_the_version_of_onnxruntime_does_not_depend_on_its_distribution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """onnxruntime-gpu and onnxruntime-openvino install the same module, and no distribution `onnxruntime`."""

    def installed(name: str) -> str:
        if name == "onnxruntime":
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(portable, "version", installed)
    assert portable._versions(())["onnxruntime"] == ort.__version__


def test_the_figures_of_packed_weights() -> None:
    def node(bits: int, block: int, *shapes: tuple[int, ...]) -> ir.Node:
        tensors = [ir.tensor(np.zeros(shape, np.uint8)) for shape in shapes]
        weights = [ir.Value(name="w", const_value=tensor) for tensor in tensors]
        attributes = {"bits": bits, "block_size": block}
        return ir.node(
            "MatMulNBits", [ir.Value(name="x"), *weights], attributes, domain="com.microsoft"
        )

    nodes = [node(4, 32, (6, 2, 16), (12,), (6,)), node(8, 16, (2, 16), (2,))]
    graph = ir.Graph([], [], nodes=nodes, opset_imports={"": 20})
    wanted = {
        "matrices": 2,
        "bits": [4, 8],
        "block_sizes": [16, 32],
        "bytes": 192 + 12 + 6 + 32 + 2,
    }
    assert portable.packed_weights(ir.Model(graph, ir_version=10)) == wanted
    assert portable.packed_weights(ir.Model(ir.Graph([], [], nodes=[]), ir_version=10)) is None


def test_the_figures_of_packed_experts() -> None:
    """Of two layers that share the first matrix; the second of one is float."""
    constants = {
        "levels": np.zeros((3, 64, 16), np.uint8),
        "scales": np.zeros((3, 64, 1), np.float32),
        "others": np.zeros((3, 32, 32), np.uint8),
        "steps": np.zeros((3, 32, 2), np.float32),
        "ids": np.arange(3),
        "plain": np.zeros((3, 32, 32), np.float32),
    }
    model = small_graph(
        """mixtures (float[S,32] rows, float[S,3] choice, uint8[3,64,16] levels, float[3,64,1] scales,
            uint8[3,32,32] others, float[3,32,2] steps, int64[3] ids, float[3,32,32] plain)
            => (float[S,32] result) {
            fc1 = com.microsoft.GatherBlockQuantized
                <bits = 4, block_size = 32, gather_axis = 0, quantize_axis = 2> (levels, ids, scales)
            fc2 = com.microsoft.GatherBlockQuantized
                <bits = 8, block_size = 16, gather_axis = 0, quantize_axis = 2> (others, ids, steps)
            hidden = com.microsoft.MoE (rows, choice, fc1, , fc2)
            result = com.microsoft.MoE (hidden, choice, fc1, , plain)
        }""",
        constants=constants,
    )
    packed = ("levels", "scales", "others", "steps")
    assert portable.packed_weights(model) == {
        "matrices": 0,
        "experts": 6,
        "bits": [4, 8],
        "block_sizes": [16, 32],
        "bytes": sum(constants[name].nbytes for name in packed),
    }


FACE = Interface(100, (KeyValueShape(2, 8), KeyValueShape(1, 4)))
FIGURES = Parity(3e-6, 1.0, 1e-4, 3, 14, 2, 0, "none")


def load(model: ir.Model, folder: Path) -> ort.InferenceSession:
    ir.save(model, folder / "graph.onnx")
    return ort.InferenceSession(folder / "graph.onnx")


def test_noise(tmp_path: Path) -> None:
    face = Interface(100, FACE.key_values, features=Features(filters=("xtc",)))
    seeds = np.array([0, -1, -(2**63), 2**53 + 1])
    feeds = {"seed": seeds, "capacity": np.array(13)}
    buffers = load(build_initial_state(face), tmp_path).run(["noise", "xtc_noise"], feeds)
    for stream, buffer in enumerate(buffers):
        np.testing.assert_array_equal(
            buffer, [philox_uniforms(int(seed), 13, stream) for seed in seeds]
        )


def test_filters_have_their_states(tmp_path: Path) -> None:
    face = Interface(100, FACE.key_values, features=Features(filters=("xtc", "mirostat")))
    session = load(build_initial_state(face), tmp_path)
    names = [node.name for node in session.get_outputs()]
    assert names == face.initial_state.output_names
    assert {"noise", "xtc_noise"} < {*names}
    mu = session.run(["mirostat_mu"], {"seed": np.arange(3), "capacity": np.array(7)})[0]
    np.testing.assert_array_equal(mu, np.zeros(3, np.float32))


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
            spec.output_names,
            {name: ort.OrtValue.ortvalue_from_numpy(value) for name, value in feeds.items()},
        )
        for tensor, value in zip(spec.outputs, values, strict=True):
            assert tuple(value.shape()) == tensor.shape(sizes)
            assert value.data_type() == {
                "bfloat16": "tensor(bfloat16)",
                "float32": "tensor(float)",
            }.get(tensor.dtype, "tensor(int32)")
        return
    for tensor, value in zip(spec.outputs, session.run(spec.output_names, feeds), strict=True):
        assert value.shape == tensor.shape(sizes)
        assert value.dtype == tensor.dtype
        assert tensor.name == "noise" or not value.any()


def draft(model: ir.Model, **more: Any) -> Draft:
    source, tokens = Source("m", None, "llama", "Llama"), TokenIds(0, None, ())
    return Draft(
        model, FACE, Reference([], [], []), source, tokens, None, original="the file", **more
    )


def test_a_draft_is_judged_by_its_own_tolerance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def check(folder: Path, interface: Interface, expected: Reference, **options: Any) -> Parity:
        given.update(options, folder=folder, interface=interface)
        return FIGURES

    monkeypatch.setattr(portable, "write_graphs", lambda *arguments, **options: None)
    monkeypatch.setattr(portable.parity, "check", check)
    model = ir.Model(ir.Graph([], [], nodes=[]), ir_version=10)
    stages = Stages(unreported, {Stage.WRITING_WEIGHTS: 1.0, Stage.COMPARING: 1.0})
    manifest = write_draft(draft(model, tolerance=3e-2, plain_attention_layers=2), tmp_path, stages)
    wanted = {"tolerance": 3e-2, "plain_attention_layers": 2, "original": "the file"}
    assert given == wanted | {"folder": tmp_path, "interface": FACE}
    assert manifest.parity == {**asdict(FIGURES), "max_error": 1e-5}

    def fail(*arguments: Any, **options: Any) -> Parity:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(portable.parity, "check", fail)
    with pytest.raises(
        ParityError, match=r"onnxruntime cannot run the exported graph \(no kernel\)"
    ):
        write_draft(draft(model), tmp_path, stages)


@pytest.mark.parametrize(("wanted", "takes"), [(True, True), (True, False), (False, False)])
def test_scores_that_a_graph_cannot_have(
    wanted: bool, takes: bool, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """They are left out with a warning; everything else stays."""
    monkeypatch.setattr(portable, "takes_scorer", lambda model: takes)
    features = Features(logprobs=True, top_logprobs=3, prompt_logprobs=wanted)
    face = replace(FACE, features=features)
    found = portable.possible_interface(ir.Model(ir.Graph([], [], nodes=[]), ir_version=10), face)
    assert found == replace(face, features=replace(features, prompt_logprobs=wanted and takes))
    assert len(recwarn) == (wanted and not takes)
