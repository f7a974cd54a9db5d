"""The whole sampler on WebGPU: docs/vectors, random steps against the float64 reference, large vocabularies."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from qsample.contract.interface import Features, Interface
from qsample.contract.tensors import EXTRA_PARAMETERS
from qsample.ort.options import session_options
from qsample.ort.providers import CPU, WEBGPU, open_session
from qsample.sampler.blocks import FLOOR
from tests.helpers.sampler_cases import (
    Step,
    compare_step,
    excused,
    expected_step,
    make_inputs,
    random_step,
)
from tests.helpers.vectors import interface_of
from tests.test_vectors import by_graph, check

Array = np.ndarray
Sampler = Callable[[Interface], Step]
MASKED_VOCAB = 151_936


@pytest.mark.parametrize("name", ["adjust", "filters", "wide"])
@pytest.mark.parametrize(
    "most", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["most", "all"]
)
def test_vectors(sampler: Sampler, name: str, most: bool) -> None:
    """Every feature and extra filter in both orders, and histories and vocabularies beyond a block of TopK."""
    for batch in by_graph(name):
        face = interface_of(batch[0]["vocab_size"], batch[0]["filter_order"], captured=True)
        for cases in [batch] if most else [batch, *([case] for case in batch)]:
            if len(cases) >= 10 or not most:
                check(cases, face, sampler(face))


@pytest.mark.parametrize(
    "features",
    [
        Features(probs=True, logprobs=True, top_logprobs=3),
        Features(probs=True, grammars=True, allowed_tokens=True),
        pytest.param(Features(probs=True, filters=tuple(EXTRA_PARAMETERS)), marks=pytest.mark.slow),
    ],
    ids=["plain", "grammars", "filters"],
)
def test_random_steps(sampler: Sampler, features: Features) -> None:
    """Against the float64 reference: the token is another one only if u is within 1e-5 of a boundary."""
    face, rng = Interface(1187, (), features=features, captured=True), np.random.default_rng(3)
    step, rows, near = sampler(face), 0, 0
    for number in range(6):
        logits, inputs = random_step(rng, face, 4, sequence=1 + number % 2)
        got, expected = step(logits, inputs), expected_step(face, logits, inputs)
        for row in range(4):
            wrong = compare_step(got, expected, row)
            assert not wrong or excused(expected, row, wrong), (number, row, wrong)
            rows, near = rows + 1, near + bool(wrong)
    assert near <= rows // 10


def test_masks_that_leave_five_tokens(sampler: Sampler) -> None:
    """The provider's TopK alone gives wrong ids then; see `test_topk_of_masked_logits`."""
    face = Interface(MASKED_VOCAB, (), features=Features(allowed_tokens=True), captured=True)
    rng, rows = np.random.default_rng(0), 3
    logits = rng.normal(size=(rows, MASKED_VOCAB)).astype(np.float32) * 3
    allowed = np.zeros((rows, MASKED_VOCAB // 32), np.int32)
    chosen = np.stack([rng.choice(MASKED_VOCAB, 5, replace=False) for _ in range(rows)])
    chosen[:, 0] = chosen[:, 0] // 32 * 32 + 31  # the sign of a word
    for row, ids in enumerate(chosen):
        for token in ids:
            allowed.view(np.uint32)[row, token // 32] |= np.uint32(1) << np.uint32(token % 32)
    u = [0.1, 0.5, 0.93]
    # A temperature at which each of the five has its share, and a top-k for the candidates.
    inputs = make_inputs(
        face,
        rows,
        allowed_tokens=allowed,
        temperature=[8, 8, 0],
        top_k=[0, 40, 0],
        noise=np.array(u),
    )
    inputs["searched_rows"] = np.zeros(0, np.int64)
    tokens = sampler(face)(logits, inputs)["next_ids"][:, 0]
    for row, token in enumerate(tokens):
        ids = np.sort(chosen[row])
        weights = np.exp(logits[row, ids].astype(float) / [8, 8, 0.01][row])
        expected = ids[np.searchsorted(np.cumsum(weights) / weights.sum(), u[row], side="right")]
        assert token == (ids[weights.argmax()] if row == 2 else expected)


def test_topk_of_masked_logits() -> None:
    """The bug that `FLOOR` works around; if this fails, the provider has mended it."""
    x, k = (ir.Value(name=name) for name in ("x", "k"))
    x.shape, x.type = ir.Shape([1, 1187]), ir.TensorType(ir.DataType.FLOAT)
    k.const_value = ir.tensor(np.array([64]), name="k")
    node = ir.node("TopK", [x, k], {"axis": -1}, num_outputs=2)
    for name, value, dtype in zip(
        "vi", node.outputs, (ir.DataType.FLOAT, ir.DataType.INT64), strict=True
    ):
        value.name, value.type = name, ir.TensorType(dtype)
    graph = ir.Graph(
        [x], node.outputs, nodes=[node], initializers=[k], opset_imports={"": 20}, name="topk"
    )
    model = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    session = open_session(model, session_options(), [WEBGPU, CPU])
    logits = np.full((1, 1187), -np.inf, np.float32)
    logits[0, [5, 700, 9]] = [1, 3, 2]
    _, ids = session.run(None, {"x": logits})
    assert ids.min() == -1
    values, ids = session.run(None, {"x": np.maximum(logits, np.float32(FLOOR))})
    assert ids[0, :3].tolist() == [700, 9, 5]
    assert ids.min() >= 0
    assert values[0, 3] == np.float32(FLOOR)


def test_and_of_flags_of_rows() -> None:
    """The bug that `float_ids` works around: a program for one operand that is repeated serves another as well. If
    this fails, the provider has mended it."""
    rng = np.random.default_rng(0)
    shapes = {"tokens": ["B", 16], "rows": ["B", 1]}
    values = {name: ir.Value(name=name, shape=ir.Shape(shape)) for name, shape in shapes.items()}
    for value in values.values():
        value.type = ir.TensorType(ir.DataType.BOOL)
    tokens, rows = values.values()
    nodes = [ir.node("And", operands) for operands in ((tokens, rows), (rows, tokens))]
    for number, node in enumerate(nodes):
        (output,) = node.outputs
        output.name, output.type = f"y{number}", ir.TensorType(ir.DataType.BOOL)
    outputs = [node.outputs[0] for node in nodes]
    graph = ir.Graph([tokens, rows], outputs, nodes=nodes, opset_imports={"": 20}, name="and")
    model = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    flags = {"tokens": rng.random((2, 16)) < 0.5, "rows": np.array([[True], [False]])}
    wanted = flags["tokens"] & flags["rows"]
    got = open_session(model, session_options(), [WEBGPU, CPU]).run(None, flags)
    assert not all(np.array_equal(one, wanted) for one in got)


def test_rows_are_those_of_a_batch_and_none_needs_the_search(sampler: Sampler) -> None:
    """A row that should be listed and is not gets status 3; the others do not notice."""
    face = Interface(1187, (), captured=True)
    logits = np.random.default_rng(1).normal(size=(3, 1187)).astype(np.float32)
    given = {"temperature": [0, 1, 1], "top_p": [1, 0.9, 0.9], "top_k": [0, 0, 64]}
    step = sampler(face)
    listed = step(logits, make_inputs(face, 3, **given, searched_rows=np.array([1])))
    unlisted = step(logits, make_inputs(face, 3, **given, searched_rows=np.zeros(0, np.int64)))
    assert unlisted["status_RetainedState"].tolist() == [0, 3, 0]
    assert listed["status_RetainedState"].tolist() == [0, 0, 0]
    assert unlisted["next_ids"][[0, 2]].tolist() == listed["next_ids"][[0, 2]].tolist()
    alone = [
        step(logits[[r]], make_inputs(face, 1, **{k: v[r : r + 1] for k, v in given.items()}))
        for r in range(3)
    ]
    assert [one["next_ids"][0, 0] for one in alone] == listed["next_ids"][:, 0].tolist()
