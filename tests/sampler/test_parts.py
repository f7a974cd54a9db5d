"""Parts of a step that a list of rows switches on and off: by empty tensors on CUDA, by an If on WebGPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from qsample.contract.interface import Features, Interface
from qsample.sampler.parts import Numbers, Part
from qsample.sampler.tensor import Tensor, TensorRecord, Tensors
from tests.helpers.computed import computed, graph_of

X = np.arange(12, dtype=np.float32).reshape(3, 4)
ROWS = {"all": np.arange(3), "none": np.zeros(0, np.int64)}


@dataclass(frozen=True)
class _Both(TensorRecord):
    one: Tensor
    other: Tensor | None


@pytest.mark.parametrize("for_webgpu", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_results_are_put_in_the_rows_of_the_part(rows: str, for_webgpu: bool) -> None:
    """Tensors and records; whole rows and their first columns."""

    def step(x: Tensor, listed: Tensor) -> Tensors:
        part = Part(listed, for_webgpu=for_webgpu)
        whole = _Both(x, x.columns(0, 2))

        def compute() -> _Both:
            taken = part.take(whole)
            assert taken.other is not None
            one = part.put_first_columns(whole.one, taken.other * 10.0)
            changed = _Both(part.take(one) + 1.0, taken.other * 2.0)
            return part.put(_Both(one, whole.other), changed)

        return part.run(compute, whole).tensors()

    one, other = computed(step, X, ROWS[rows])
    if rows == "none":
        np.testing.assert_array_equal(one, X)
        np.testing.assert_array_equal(other, X[:, :2])
    else:
        np.testing.assert_array_equal(one, X * [10, 10, 1, 1] + 1)
        np.testing.assert_array_equal(other, X[:, :2] * 2)


@pytest.mark.parametrize("for_webgpu", [False, True])
def test_only_a_graph_for_webgpu_has_an_if(for_webgpu: bool) -> None:
    def step(x: Tensor, listed: Tensor) -> Tensor:
        part = Part(listed, for_webgpu=for_webgpu)
        return part.run(lambda: part.put(x, part.take(x) * 2.0), x)

    operators = [node.op_type for node in graph_of(step, X, ROWS["all"]).graph]
    assert operators.count("If") == for_webgpu
    assert ("Gather" in operators) is not for_webgpu


@pytest.mark.parametrize("for_webgpu", [False, True])
def test_inputs_of_the_rows(for_webgpu: bool) -> None:
    """A part in a part has those of the first. Numbers are taken together; what all rows share stays whole."""
    face = Interface(30, (), features=Features(grammars=True), captured=True)
    arrays = {
        "temperature": np.array([1, 2, 3], np.float32),
        "top_p": np.array([4, 5, 6], np.float32),
        "top_k": np.array([7, 8, 9], np.int32),
        "noise": X,
        "grammar_transitions": X[:2],
        "searched_rows": np.array([1]),
    }

    def step(*tensors: Tensor) -> Tensors:
        *values, every_row, reversed_rows = tensors
        inputs = dict(zip(arrays, values, strict=True))
        numbers = Numbers.of(inputs, ["temperature", "top_p"])
        outer = Part(every_row, for_webgpu=for_webgpu).inputs(face, inputs, numbers, ["noise"])
        inner = Part(reversed_rows, for_webgpu=for_webgpu).inputs(face, outer)
        assert set(outer) == set(inner) == set(inputs)
        assert len(outer) == len(inputs)
        assert outer["noise"] is inputs["noise"]
        return tuple(inner[name] for name in inputs)

    # For the test, the inner list is in another order than a host's.
    order = np.arange(3) if for_webgpu else np.array([2, 1, 0])
    given = [*arrays.values(), np.arange(3), order]
    operators = [node.op_type for node in graph_of(step, *given).graph]
    assert operators.count("Split") == (0 if for_webgpu else 2)
    found = dict(zip(arrays, computed(step, *given), strict=True))
    for name, values in arrays.items():
        is_shared = name in ("grammar_transitions", "searched_rows")
        np.testing.assert_array_equal(found[name], values if is_shared else values[order])
