"""Mixtures of experts in a graph: which products choose the experts."""

from __future__ import annotations

import numpy as np

from qsample.graph import moe
from tests.helpers.small_graphs import small_graph


def test_the_products_that_choose_experts() -> None:
    """For ONNX Runtime's operator, and for weights that are looked up; not those before them, nor a lookup of rows."""
    shapes = {
        "before": (6, 6),
        "router": (6, 4),
        "other": (6, 4),
        "experts": (4, 6, 5),
        "fc1": (4, 12, 6),
        "rows": (9, 6),
    }
    model = small_graph(
        """
        mixture (float[B,6] x, int64[B] ids, float[6,6] before, float[6,4] router, float[6,4] other,
            float[4,6,5] experts, float[4,12,6] fc1, float[4,6,6] fc2, float[9,6] rows)
            => (float[B,6] y, float[B,6,5] own, float[B,6] z) {
            hidden = MatMul (x, before)
            scores = MatMul (hidden, router)
            shares = Softmax (scores)
            y = com.microsoft.MoE (hidden, shares, fc1, , fc2)
            others = MatMul (hidden, other)
            best = ArgMax <axis = 1, keepdims = 0> (others)
            own = Gather (experts, best)
            z = Gather (rows, ids)
        }""",
        constants={name: np.zeros(shape, np.float32) for name, shape in shapes.items()},
    )
    nodes = {node.name: node for node in model.graph}
    assert moe.routers(model.graph) == {nodes["scores"], nodes["others"]}
    assert moe.mixtures(model.graph) == [nodes["y"]]
    assert moe.gather_of_weights(nodes["own"]) is nodes["own"].inputs[0]
    assert moe.gather_of_weights(nodes["z"]) is None
