"""The graphs as a whole: their interface and operators, and whole steps against the reference at many sizes."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import onnx
import onnx.shape_inference
import onnx_ir as ir
import pytest
from hypothesis import given, settings

from qsample.compiler.passes.capture import host_data, lower_opset, remove_host_copies
from qsample.contract.interface import Features, Interface
from qsample.contract.tensors import EXTRA_PARAMETERS, FILTER_ORDERS, INVALID_LOGITS
from qsample.graph.operators import OPSET
from qsample.sampler import build_sampler
from tests.helpers.cuda_kernels import KERNELS, VALUES_OF_WHERE, VERSIONS, has_kernel
from tests.helpers.sampler_cases import (
    ALL_FEATURES,
    PAD,
    WITH_PROBS,
    check_rows,
    check_steps,
    graph,
    interface,
    make_inputs,
    sampler,
)

Array = np.ndarray
ALL_FILTERS = tuple(EXTRA_PARAMETERS)
EVERYTHING = replace(ALL_FEATURES, filters=ALL_FILTERS)
GRAPHS = [
    Interface(1000, (), features=replace(features, filter_order=order), captured=captured)
    for features, order in (
        (Features(), FILTER_ORDERS[0]),
        (EVERYTHING, FILTER_ORDERS[0]),
        (EVERYTHING, FILTER_ORDERS[1]),
    )
    for captured in (False, True)
]
CUDA_OPSET = 18  # that compile converts graphs to


def names(face: Interface) -> str:
    chosen = face.features
    return "-".join(
        [
            "all" if chosen.filters else "none",
            *["captured"] * face.captured,
            chosen.filter_order,
        ]
    )


slow = pytest.mark.slow
every_graph = pytest.mark.parametrize("face", GRAPHS, ids=names)


@every_graph
def test_interface(face: Interface) -> None:
    model = graph(face)
    assert [value.name for value in model.graph.inputs] == face.sampler.input_names
    assert [value.name for value in model.graph.outputs] == face.sampler.output_names
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert model.opset_imports == {"": OPSET}
    wanted = {
        spec.name: (spec.dtype, len(spec.axes))
        for spec in (*face.sampler.inputs, *face.sampler.states)
    }
    for value in graph(face).graph.inputs:
        assert value.dtype is not None
        assert value.shape is not None
        assert (value.dtype.numpy().name, len(value.shape)) == wanted[str(value.name)]


def test_bad_sizes() -> None:
    with pytest.raises(ValueError, match="num_candidates is 0; it must be at least 1"):
        build_sampler(interface(4), PAD, num_candidates=0)


@every_graph
def test_recorded_shapes_are_those_that_onnx_infers(face: Interface) -> None:
    """Passes trust them, and infer no shapes at all if any is wrong."""
    onnx.shape_inference.infer_shapes(ir.to_proto(graph(face)), strict_mode=True, data_prop=True)


@pytest.mark.parametrize("captured", [False, True])
def test_recorded_shapes_of_a_vocabulary_of_one_block(captured: bool) -> None:
    model = graph(Interface(60, (), features=EVERYTHING, captured=captured))
    onnx.shape_inference.infer_shapes(ir.to_proto(model), strict_mode=True, data_prop=True)


@every_graph
def test_no_value_that_a_provider_lacks(face: Interface) -> None:
    """The bitwise operators, which WebGPU and CUDA do not have, float64, which WebGPU does not, and other domains."""
    model = build_sampler(face, PAD, for_webgpu=True) if face.captured else graph(face)
    for node in model.graph.all_nodes():
        assert not node.domain
        assert not node.op_type.startswith(("Bit", "Random", "Multinomial", "Bernoulli"))
        for value in (*node.inputs, *node.outputs):
            assert value is None or value.dtype not in (
                ir.DataType.DOUBLE,
                ir.DataType.FLOAT16,
                ir.DataType.UINT64,
            )
        assert all(value.dtype is not None for value in node.outputs)


@every_graph
def test_no_branch_in_a_captured_graph(face: Interface) -> None:
    """And every operator of it has a kernel on CUDA."""
    for node in graph(face).graph.all_nodes():
        inner = [
            attribute.as_graph()
            for attribute in node.attributes.values()
            if attribute.type == ir.AttributeType.GRAPH
        ]
        if face.captured:
            assert not inner
            assert has_kernel(
                node.op_type, onnx.defs.get_schema(node.op_type, CUDA_OPSET, "").since_version
            )
            first, second = node.inputs[0], node.inputs[-1]
            assert first is not None
            assert second is not None
            assert first.dtype is not None
            assert first.dtype.name.lower() in KERNELS[node.op_type], (node.op_type, first.dtype)
            assert node.op_type != "Where" or (
                second.dtype and second.dtype.name.lower() in VALUES_OF_WHERE
            )
    assert "GatherND" not in KERNELS
    assert VERSIONS.keys() <= KERNELS.keys()


@pytest.mark.parametrize("face", [face for face in GRAPHS if face.captured], ids=names)
def test_shapes_stay_on_the_host(face: Interface) -> None:
    """After the passes that compile has for CUDA no kernel takes a shape for data, which would forbid the capture."""
    model = ir.from_proto(ir.to_proto(graph(face)))
    lower_opset(model, CUDA_OPSET)
    remove_host_copies(model, 64)
    assert host_data(model.graph) == []


def test_a_greedy_step_runs_few_nodes() -> None:
    """Outside the branches: a node costs most of a microsecond, however little it computes."""
    for vocab in (151_936, 50_257):
        top = list(graph(interface(vocab)).graph)
        assert len(top) <= 58
        assert not {"TopK", "Exp", "CumSum", "ReduceLogSum", "Floor"} & {
            node.op_type for node in top
        }
        assert sum(node.op_type == "If" for node in top) <= 9


@every_graph
def test_nothing_is_computed_twice(face: Interface) -> None:
    """Outside of branches and loops; ONNX Runtime finds duplicates inside by itself."""
    plain = [node for node in graph(face).graph if node.op_type not in ("If", "Loop")]
    found = {
        (
            node.op_type,
            *map(id, node.inputs),
            *(str(attribute.value) for attribute in node.attributes.values()),
        )
        for node in plain
    }
    assert len(found) == len(plain)


def test_an_absent_feature_adds_nothing() -> None:
    """No input, no output and no node, whatever its name."""
    plain = {node.op_type for node in graph(interface(1000)).graph.all_nodes()}
    assert not {"Mod", "Pow", "Sqrt", "Abs", "ReduceLogSum"} & plain
    counts = [
        sum(1 for _ in graph(interface(1000, features)).graph.all_nodes())
        for features in (Features(), EVERYTHING)
    ]
    assert counts[0] < 0.55 * counts[1]


# Padding, blocks, words and candidates meet their edges; each vocabulary with few or many candidates, or as many.
SIZES = [
    *(
        (vocab, count, False)
        for vocab, count in ((1, 1), (2, 3), (3, 64), (33, 16), (65, 64), (257, 3), (1025, 64))
    ),
    *((vocab, count, True) for vocab, count in ((2, 1), (127, 64), (1000, 3))),
]
VOCABULARIES = (1, 2, 3, 32, 33, 63, 65, 127, 129, 257, 1000, 1024, 1025, 3001)
MORE_SIZES = [
    (vocab, count, captured)
    for vocab in VOCABULARIES
    for count in (1, 3, 16, 64)
    for captured in (False, True)
]


@pytest.mark.parametrize(
    ("vocab", "num_candidates", "captured"),
    [*SIZES, *(pytest.param(*sizes, marks=slow) for sizes in MORE_SIZES if sizes not in SIZES)],
)
def test_steps_equal_the_reference(vocab: int, num_candidates: int, captured: bool) -> None:
    features = replace(ALL_FEATURES, top_logprobs=min(vocab, 3))
    check_steps(
        Interface(vocab, (), features=features, captured=captured),
        vocab + num_candidates,
        8,
        num_candidates,
    )


@slow
@pytest.mark.parametrize("face", GRAPHS, ids=names)
@pytest.mark.parametrize("seed", range(5))
def test_steps_equal_the_reference_at_length(seed: int, face: Interface) -> None:
    check_steps(face, 100 + seed, 400)


@pytest.mark.parametrize("vocab", [32_000, 151_936, pytest.param(262_145, marks=slow)])
def test_large_vocabularies(vocab: int) -> None:
    """A few rows of each way to settle a row, from logits with and without ties."""
    rng = np.random.default_rng(vocab)
    rows = {
        "temperature": [1, 1, 1, 2, 0, 1],
        "top_p": [0.9, 0.99, 1, 1, 1, 0.9],
        "top_k": [0, 700, 0, 0, 0, 50],
        "min_p": [0, 0, 0.001, 0, 0, 0],
    }
    for captured in (False, True)[: 1 + (vocab == 32_000)]:
        face = Interface(vocab, (), features=WITH_PROBS, captured=captured)
        logits = rng.normal(size=(6, vocab)).astype(np.float32)
        check_rows(face, logits, make_inputs(face, 6, noise=rng.random((6, 16)), **rows))
        check_rows(
            face,
            logits.astype(np.float16).astype(np.float32) * 2,
            make_inputs(face, 6, noise=0.97, **rows),
        )


EDGE = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    1e-30,
    88.0,
    -104.0,
    1e4,
    -65504.0,
    3e38,
    -3e38,
    -3.4028235e38,
    -np.inf,
    np.inf,
    np.nan,
]


@pytest.mark.ci
@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    logits=st.lists(
        st.one_of(st.sampled_from(EDGE), st.floats(-50, 50, width=32)), min_size=1, max_size=40
    ),
    temperature=st.sampled_from([0, 1e-45, 1e-30, 1e-6, 0.3, 1, 100, 1e30]),
    top_k=st.sampled_from([0, 1, 2, 3, 39, 40, 41, 10**6]),
    top_p=st.sampled_from([1, 1e-45, 1e-30, 1e-6, 0.5, 0.999999]),
    min_p=st.sampled_from([0, 1e-30, 0.5, 1]),
    u=st.sampled_from([0, 2**-24, 0.3, 0.5, 1 - 2**-24]),
    extra=st.fixed_dictionaries(
        {
            "typical_p": st.sampled_from([1, 1, 1e-6, 0.5, 0.999]),
            "epsilon_cutoff": st.sampled_from([0, 0, 1e-6, 0.1, 1]),
            "eta_cutoff": st.sampled_from([0, 0, 1e-6, 0.1, 1]),
            "top_n_sigma": st.sampled_from([0, 0, 1e-6, 1, 1e6]),
            "xtc_probability": st.sampled_from([0, 0, 1]),
            "xtc_threshold": st.sampled_from([0, 1e-6, 0.1, 0.5]),
            "dynatemp_range": st.sampled_from([0, 0, 0.3, 1e6]),
            "dynatemp_exponent": st.sampled_from([0, 0.5, 3]),
            "mirostat_tau": st.sampled_from([0, 0, 1e-3, 3, 100]),
            "mirostat_mu": st.sampled_from([0, -1e3, 1e-3, 3, 1e3]),
        }
    ),
    num_candidates=st.sampled_from([2, 64]),
    order=st.sampled_from(FILTER_ORDERS),
)
def test_never_an_impossible_token(
    logits: list[float],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    u: float,
    extra: dict[str, float],
    num_candidates: int,
    order: str,
) -> None:
    """Whatever the logits and parameters: an id in range, never a masked token, and the status of the contract."""
    row = np.full((1, 40), -np.inf, np.float32)
    row[0, : len(logits)] = logits
    filters = tuple(
        name for name in ALL_FILTERS if name not in ("dry", "no_repeat_ngram_size", "bad_words_ids")
    )
    face = interface(40, Features(probs=True, filters=filters, filter_order=order))
    given = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "noise": u,
        "xtc_noise": u,
    }
    result = sampler(face, num_candidates=num_candidates)(row, make_inputs(face, **given, **extra))
    token, status = result["next_ids"][0, 0], result["status_RetainedState"][0]
    valid = not (np.isnan(row).any() or (row == np.inf).any()) and (row > np.float32(-3e38)).any()
    if not valid:
        assert status == INVALID_LOGITS
    elif (
        status == INVALID_LOGITS
    ):  # allowed for a sum that overflows next to an infinite or so large a logit
        assert row.max() > 2.0**110
    else:
        assert 0 <= token < len(logits)
        assert np.isfinite(row[0, token])
        assert result["probs"][0, token] > 0
        assert np.isclose(result["probs"].sum(), 1, rtol=1e-5)
        assert np.isfinite(result["mirostat_mu_RetainedState"][0])


@pytest.mark.parametrize("num_candidates", [64, 8])
@pytest.mark.parametrize("vocab", [2, 97, 5003])
def test_equal_logits(vocab: int, num_candidates: int) -> None:
    """Ties are kept or dropped whole, so these filters keep all; only greedy picks a single token, the first."""
    face = interface(vocab, WITH_PROBS)
    filters = {
        "temperature": [0, 1, 1, 1, 1],
        "top_k": [0, 0, 73, 0, 0],
        "top_p": [1, 1, 1, 0.5, 1],
        "min_p": [0] * 4 + [1],
    }
    inputs = make_inputs(face, 5, noise=0.7, **filters)
    result = sampler(face, num_candidates=num_candidates)(
        np.full((5, vocab), -7, np.float32), inputs
    )
    assert result["next_ids"][:, 0].tolist() == [0] + [int(np.float32(0.7) * np.float64(vocab))] * 4
    np.testing.assert_array_equal(result["probs"][0], np.eye(vocab)[0])
    np.testing.assert_allclose(result["probs"][1:], 1 / vocab, rtol=1e-6)


@pytest.mark.parametrize(
    "parameters", [{"top_k": 50}, {"top_p": 0.9}, {"top_p": 0.3, "top_k": 400}, {"min_p": 0.05}]
)
def test_half_precision_ties(parameters: dict[str, float]) -> None:
    """Thousands of ties across every edge."""
    face = interface(20_000, WITH_PROBS)
    logits = np.random.default_rng(0).normal(size=(4, 20_000)).astype(np.float16).astype(np.float32)
    assert (
        check_rows(
            face, logits, make_inputs(face, 4, noise=[0, 0.2, 0.9, 1 - 2**-24], **parameters)
        )
        == 0
    )
