"""The products of adapters in branches: the same numbers, and none of them without adapters."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from qsample.compiler.passes.fusions import join_projections
from qsample.graph.adapters import branch_where_adapters_are, join_adapters, split_adapters
from tests.graph.test_adapters import INTERFACE, check, make_model


def test_each_sum_is_in_a_branch_of_its_own_kinds(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    model, weights = make_model(rng)
    names = split_adapters(model, INTERFACE)
    join_projections(model)
    join_adapters(model, INTERFACE, names)
    assert branch_where_adapters_are(model, INTERFACE)
    assert not branch_where_adapters_are(model, INTERFACE)
    branches = [node for node in model.graph if node.op_type == "If"]
    inside = [[node.op_type for node in branch.attributes["then_branch"].as_graph()] for branch in branches]
    product = ["FusedMatMul", "Where", "FusedMatMul"]
    assert sorted(inside) == sorted([[*product, *product, "Concat", "Add"], [*product, "Add"]])
    assert [node.op_type for node in model.graph if node.op_type in ("Add", "Concat")] == []
    check(model, weights, rng, tmp_path)
