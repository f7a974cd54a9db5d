"""Python's operators and the functions on tensors: their nodes compute the same as NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import pytest

from qsample.sampler.tensor import (
    FLOAT,
    INT32,
    INT64,
    Tensor,
    TensorRecord,
    Tensors,
    absolute,
    axis_size,
    branch,
    building,
    concat,
    constant,
    constants,
    exp,
    indices,
    log_of_column,
    loop,
    maximum,
    minimum,
    op,
    operator,
    size,
    top,
    where,
)
from tests.helpers.computed import computed, graph_of

X = np.array([[3, -1, 2, 2], [0, 5, -4, 5], [7, 7, 7, -7]], np.float32)
Y = np.array([[1, 2, 4, 2], [0.5, 8, -4, 1], [7, 1, 2, -2]], np.float32)
ORDER = np.array([[2, 0, 3, 1], [1, 1, 0, 2], [3, 2, 1, 0]])
FIRST = np.array(
    [[0, 2, 3], [1, 3, 0], [0, 1, 2]]
)  # the indices of the largest three, the lowest of ties
SET = np.array([[3, -1, 1, 2], [0, 0.5, -4, 5], [7, 7, 7, 7]])
ADDED = np.array([[5, -1, 3, 2], [0, 13.5, -4, 5], [7, 7, 8, 0]])


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, y: x + y, X + Y),
        (lambda x, y: 1 + x, X + 1),
        (lambda x, y: x - y, X - Y),
        (lambda x, y: 1 - x, 1 - X),
        (lambda x, y: x * y, X * Y),
        (lambda x, y: 2 * x, 2 * X),
        (lambda x, y: x / y, X / Y),
        (lambda x, y: 4 / y, 4 / Y),
        (lambda x, y: -x, -X),
        (lambda x, y: x < y, X < Y),
        (lambda x, y: x <= y, X <= Y),
        (lambda x, y: x > y, X > Y),
        (lambda x, y: x >= 2, X >= 2),
        (lambda x, y: x.equals(y), X == Y),
        (lambda x, y: (x > 0) & (y > 0), (X > 0) & (Y > 0)),
        (lambda x, y: (x > 0) | (y > 0), (X > 0) | (Y > 0)),
        (lambda x, y: ~(x > 0), X <= 0),
        (lambda x, y: x.to(INT64) / 2, np.array([[1, 0, 1, 1], [0, 2, -2, 2], [3, 3, 3, -3]])),
        (lambda x, y: x.max(), X.max(1, keepdims=True)),
        (lambda x, y: x.max(0, 1, keep=False), X.max()),
        (lambda x, y: x.min(keep=False), X.min(1)),
        (lambda x, y: x.sum(-2), X.sum(0, keepdims=True)),
        (lambda x, y: (x > 6).any(), True),
        (lambda x, y: (x > -7).any(), True),
        (lambda x, y: (x > 7).any(), False),
        (lambda x, y: (x > -8).all(), True),
        (lambda x, y: (x > -7).all(), False),
        (lambda x, y: x.argmax(), np.array([[0], [1], [0]])),
        (lambda x, y: x.cumsum(), X.cumsum(1)),
        (lambda x, y: x.cumsum(exclusive=True), X.cumsum(1) - X),
        (lambda x, y: x.reshape(0, 2, -1), X.reshape(3, 2, 2)),
        (lambda x, y: x.unsqueeze(), X[:, :, None]),
        (lambda x, y: x.unsqueeze(1).squeeze(1), X),
        (lambda x, y: x.columns(1, 3), X[:, 1:3]),
        (lambda x, y: x.columns(0, x.max(0, 1, keep=False).to(INT64) - 5), X[:, :2]),
        (lambda x, y: x.last(), X[:, -1:]),
        (lambda x, y: x.gather(constant(ORDER)), np.take_along_axis(X, ORDER, 1)),
        (lambda x, y: x.rows(constant(np.array([2, 0]))), X[[2, 0]]),
        (lambda x, y: x.scatter(constant(ORDER[:, :1]), y.columns(0, 1)), SET),
        (lambda x, y: x.scatter(constant(ORDER[:, :2]), y.columns(0, 2), reduction="add"), ADDED),
        (lambda x, y: x.scatter(constant(ORDER[:1] * 0 + 1), y.rows(indices(1)), axis=0), np.stack([X[0], Y[0], X[2]])),
        (lambda x, y: exp(x), np.exp(X)),
        (lambda x, y: absolute(x), np.abs(X)),
        (lambda x, y: maximum(x, y), np.maximum(X, Y)),
        (lambda x, y: minimum(x, 2.0), np.minimum(X, 2)),
        (lambda x, y: where(x > 0, x, 0.0), np.where(X > 0, X, 0)),
        (lambda x, y: concat(x, y), np.concatenate([X, Y], 1)),
        (lambda x, y: top(x, 3), (np.array([[3, 2, 2], [5, 5, 0], [7, 7, 7]]), FIRST)),
        (lambda x, y: top(x, 2, largest=False)[1], np.array([[1, 2], [2, 0], [3, 0]])),
        (lambda x, y: op("Clip", x - np.float32([[1, 2, 3, 4]]), 0.0, 5.0), np.clip(X - np.arange(1, 5), 0, 5)),
        (lambda x, y: constants(x / 0.0, 2.5), np.full_like(X, 2.5)),  # with a NaN among them
        (lambda x, y: constants(x > 0, 3), np.full_like(X, 3)),
        (lambda x, y: indices(axis_size(x, 1)), np.arange(4)),
        (lambda x, y: size(x, 0), np.array([3])),
        (lambda x, y: operator("Split", x, axis=1, num_outputs=2, outputs=2)[1], X[:, 2:]),
    ],
)  # fmt: skip
def test_operations(function: Callable[..., Tensor | Tensors], expected: object) -> None:
    wanted = expected if isinstance(expected, tuple) else (expected,)
    got = computed(function, X, Y)
    for found, value in zip(got, wanted, strict=True):
        assert found.shape == np.shape(value)
        np.testing.assert_allclose(found, value, rtol=1e-6)


def test_numbers_take_the_type_of_the_tensor_beside_them() -> None:
    def function(ids: Tensor, x: Tensor) -> Tensors:
        assert x.to(FLOAT).value is x.value
        return ids + 1, ids.to(INT32) * 2, x * 2, where(x > 0, ids.to(INT32), -1)

    dtypes = [array.dtype for array in computed(function, ORDER, X)]
    assert dtypes == [np.int64, np.int32, np.float32, np.int32]


def test_log_does_not_depend_on_the_place() -> None:
    """Log itself takes another way for the last elements of a tensor."""
    numbers = np.random.default_rng(0).lognormal(0, 5, (37, 1)).astype(np.float32)
    (whole,) = computed(log_of_column, numbers)
    np.testing.assert_allclose(whole, np.log(numbers.astype(np.float64)), rtol=2e-7, atol=1e-7)
    for row in range(37):
        np.testing.assert_array_equal(
            computed(log_of_column, numbers[row : row + 3])[0], whole[row : row + 3]
        )


def test_an_error_ends_the_graph() -> None:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20})
    with pytest.raises(ZeroDivisionError), building(graph):
        constant(X / (1 // 0))
    with pytest.raises(LookupError):
        constant(X)


@pytest.mark.parametrize(("sign", "expected"), [(1, [[4], [6], [8]]), (-1, [[-3], [-5], [-7]])])
def test_a_branch(sign: int, expected: list[list[float]]) -> None:
    """One side adds, the other takes a tensor from outside as it is; both are wanted twice."""
    plus = np.float32([[3], [5], [7]]) * sign

    def function(x: Tensor) -> Tensors:
        def then() -> Tensors:
            more = x + 1.0
            return more, more

        first, second = branch((x > 0).any(), then, lambda: (x, x))
        inner = branch(
            (x > 0).all(),
            lambda: branch((x > 9).any(), lambda: x, lambda: first),
            lambda: second,
        )
        assert (first.dtype, list(first.shape)) == (FLOAT, list(x.shape))
        return first, inner

    for found in computed(function, plus):
        np.testing.assert_array_equal(found, expected)
    for side in graph_of(function, plus).graph.subgraphs():
        assert len(set(side.outputs)) == len(side.outputs)


def test_an_axis_in_which_the_sides_of_a_branch_differ_has_no_size() -> None:
    def function(x: Tensor) -> Tensor:
        result = branch((x > 0).any(), lambda: x, lambda: x.columns(0, 0))
        assert (result.shape[0], result.shape[1]) == (x.shape[0], None)
        ranks = branch((x > 0).any(), lambda: x, lambda: x.max(keep=False))
        assert ranks.value.shape is None
        return result

    assert computed(function, X)[0].shape == (3, 4)
    assert computed(function, -np.abs(X))[0].shape == (3, 0)


@pytest.mark.parametrize(
    ("most", "begin", "expected"),
    [
        (100, True, (64, 0 + 1 + 2 + 3 + 4 + 5)),  # 2 ** 6 is the first beyond 50
        (3, True, (8, 0 + 1 + 2)),
        (100, False, (1, 0)),
    ],
)
def test_a_loop(most: int, begin: bool, expected: tuple[int, int]) -> None:
    """Doubles a number that the step before left, and adds up the numbers of the steps."""

    def function(start: Tensor, flag: Tensor) -> Tensors:
        def step(number: Tensor, states: Tensors) -> tuple[Tensor, Tensors]:
            power, total = states
            return (power * 2.0 <= 50).any(), (power * 2.0, total + number.to(FLOAT))

        power, total = loop(most, flag, (start, start * 0.0), step)
        assert list(power.shape) == list(start.shape)
        return power, total

    power, total = computed(function, np.ones((1, 1), np.float32), np.array(begin))
    assert (power.item(), total.item()) == expected


@dataclass(frozen=True)
class Pair(TensorRecord):
    first: Tensor | TensorRecord
    second: Tensor | None = None


def test_records_through_branches_and_loops() -> None:
    """Each tensor comes back in its place, those of a record inside as well; an absent one stays absent."""

    def function(x: Tensor) -> Tensors:
        one, other = (Pair(Pair(x * factor), x - factor) for factor in (2.0, 8.0))
        more = (x > -9).any()
        chosen = branch(more, lambda: one, lambda: other)
        repeated = loop(2, more, chosen, lambda number, before: (more, other))
        return chosen.tensors() + repeated.tensors() + one.where(x > 2, other).tensors()

    wanted = [X * 2, X - 2, X * 8, X - 8, np.where(X > 2, X * 2, X * 8), X - np.where(X > 2, 2, 8)]
    np.testing.assert_allclose(computed(function, X), wanted)
