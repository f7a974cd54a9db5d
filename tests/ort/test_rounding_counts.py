"""Numbers of rows that round alike, in words and by hand; what is asked for the measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from qsample.ort import rounding as module
from qsample.ort.kernels import Attention, Product
from qsample.ort.options import session_options
from qsample.ort.rounding import ANY_ROWS, Rounding, RowCounts, measured
from qsample.ort.small_graphs import integer


@pytest.mark.parametrize(
    ("counts", "covers"),
    [
        (RowCounts(), {1: 1, 2: 2, 7: 7}),
        (RowCounts(2), {1: 2, 2: 2, 3: 3}),
        (RowCounts(2, 2), {1: 2, 2: 2, 3: 4, 4: 4, 5: 6}),
        (RowCounts(3, 2), {1: 4, 3: 4, 5: 6}),
        (RowCounts(1, 4), {1: 4, 4: 4, 5: 8}),
    ],
)
def test_the_next_number_of_rows(counts: RowCounts, covers: dict[int, int]) -> None:
    assert {rows: counts.cover(rows) for rows in covers} == covers
    assert counts.any == (counts == ANY_ROWS)


def test_both_of_two_counts() -> None:
    assert RowCounts(3) & RowCounts(2, 2) == RowCounts(3, 2)
    assert RowCounts(1, 4) & RowCounts(5, 2) == RowCounts(5, 4)
    assert ANY_ROWS & ANY_ROWS == ANY_ROWS


def test_rounding_in_words() -> None:
    assert Rounding().described() == "products: every number of rows rounds alike"
    assert Rounding().is_uniform
    every = Rounding(
        RowCounts(2), RowCounts(2, 2), RowCounts(2), attention=False, unknown=("one", "two")
    )
    parts = every.described().split("; ")
    assert [part.partition(":")[0] for part in parts] == [
        "products", "experts", "adapters", "attention", "one", "two",
    ]  # fmt: skip
    assert "one row rounds otherwise than several, so a step computes two" in parts[0]
    assert "the last of an odd number of rows" in parts[2]
    assert not Rounding(experts=RowCounts(2)).is_uniform
    assert not Rounding(products=RowCounts(2)).is_uniform
    assert Rounding(adapters=RowCounts(2), attention=False).is_uniform


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (set(), ANY_ROWS),
        ({1}, RowCounts(2)),
        ({1, 3}, RowCounts(2, 2)),
        ({37}, RowCounts(2, 2)),
        ({1, 2}, None),
        ({16}, None),
    ],
)
def test_the_widest_counts_that_hold(broken: set[int], expected: RowCounts | None) -> None:
    measured_counts = {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 37}
    assert set(module._MEASURED_ROW_COUNTS) == measured_counts
    assert module._row_counts(measured_counts - broken) == expected


def test_each_kind_has_its_own_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def kind(operator: str, **changes: Any) -> Product:
        return Product(operator, "float32", ((8, 8),), ("float32",), **changes)

    kinds = {
        kind("Gemm"): {1},
        kind("MatMul"): set(),
        kind("MatMul", given=True): {1, 3},
        kind("MoE"): {1},
        kind("FusedMatMul"): {2},
    }

    class Outputs:
        digest = "d"

        def __init__(self, products: Any) -> None:
            self.alike = [set(module._MEASURED_ROW_COUNTS) - kinds[one] for one in products]

        @classmethod
        def of(cls, products: Any, options: Any) -> Outputs:
            return cls(products)

    monkeypatch.setattr(module, "_Outputs", Outputs)
    measure = module._measured.__wrapped__
    found = measure(frozenset(kinds), None, ())
    assert (found.products, found.adapters, found.experts) == (
        RowCounts(2),
        RowCounts(2, 2),
        RowCounts(2),
    )
    assert found.unknown == ("FusedMatMul (float32) rounds otherwise for every number of rows",)
    assert (found.attention, found.digest) == (True, "d")
    attention = Attention((), 1, 8, "float32", False, ())
    for alike in (True, False):
        monkeypatch.setattr(module, "_attends_alike", lambda one, options, alike=alike: alike)
        assert measure(frozenset([attention]), None, ()).attention == alike


def test_what_cannot_be_measured_has_even_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "graph.onnx"
    graph = onnx.helper.make_graph([], "graph", [], [])
    path.write_bytes(onnx.helper.make_model(graph).SerializeToString())

    def fail(*given: Any) -> Any:
        asked.append(given)
        raise LookupError("x" * 500)

    asked: list[Any] = []
    monkeypatch.setattr(module, "_measured", fail)
    found = measured(path, 3, {"b": "2", "a": "1"})
    assert asked == [(frozenset(), 3, (("a", "1"), ("b", "2")))]
    even = RowCounts(2, 2)
    assert (found.products, found.adapters, found.experts) == (even, even, even)
    assert found.unknown == (f"its products cannot be measured ({'x' * 200})",)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("differs", [None, 1, 3])
def test_an_attention_that_reads_several_tokens_otherwise(
    packed: bool, differs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that is planted: it adds a last bit where it reads `differs` tokens or more at once."""
    seen: list[dict[str, np.ndarray]] = []

    class Session:
        def run(self, _: object, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
            seen.append(feeds)
            count = int(feeds["query_seqlens"][0])
            query = feeds["query"].copy()
            if differs is not None and count >= differs > 1:
                query = np.nextafter(query, np.float32(9))
            return [query, feeds["past_key"], feeds["past_value"]]

    monkeypatch.setattr(module, "open_session", lambda *given: Session())
    heads = (integer("num_heads", 4),)
    attention = Attention(heads, 2, 8, "float16", packed, ())
    alike = module._attends_alike(attention, session_options())
    assert alike == (differs is None or differs == 1)
    first = seen[0]
    assert first["query"].shape == (1, 1, (4 + 2 * 2) * 8 if packed else 4 * 8)
    assert ("key" in first) == (not packed)
    assert first["past_key"].shape == (1, 2, 12, 8)
    assert first["past_key"].dtype == np.float16
    ends = [int(feeds["seqlens_k"][0]) for feeds in seen[:12]]
    assert ends == list(range(12))
    if alike:
        later = [int(feeds["query_seqlens"][0]) for feeds in seen[12:]]
        assert later == [3, 1, 5, 2, 1, 1, 8, 3]
