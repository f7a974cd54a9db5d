"""Each pass leaves a graph in which it finds nothing as it is, and says so."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from qsample.compiler import passes
from tests.helpers.small_graphs import small_graph

# Other arguments than the model.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "absorb_rope": {"capacity": 8},
    "lower_opset": {"opset": 20},
    "remove_host_copies": {"limit": 8},
}
# These are never without work: they make what a target asks for, or write every node anew.
OTHERS = {"check_guesses", "convert_to_half", "fix_total_length", "fuse_operators"}


def found() -> dict[str, Callable[..., bool]]:
    """The functions of the room that take a model and return whether they changed it."""
    functions = {}
    for module in pkgutil.iter_modules(passes.__path__):
        for name, function in vars(import_module(f"{passes.__name__}.{module.name}")).items():
            if (
                not inspect.isfunction(function)
                or function.__module__.split(".")[-1] != module.name
            ):
                continue
            first, *_ = [*inspect.signature(function).parameters, ""]
            returns = function.__annotations__.get("return")
            if first == "model" and returns == "bool" and not name.startswith("_"):
                functions[name] = function
    return functions


PASSES = found()


def test_the_passes_are_found() -> None:
    assert {"repeat_expert_rows", "fuse_rope", "pack_qkv", "cut_splits", "lower_opset"} <= set(
        PASSES
    )
    assert set(PASSES) >= OTHERS


@pytest.mark.parametrize("name", sorted(set(PASSES) - OTHERS))
def test_a_graph_with_nothing_to_do(name: str) -> None:
    model = small_graph(
        """model (float[B,4] x, float[4,4] weights) => (float[B,4] y) {
        product = MatMul (x, weights)
        y = Tanh (product)
        }""",
        constants={"weights": np.eye(4, dtype=np.float32)},
    )
    before = ir.to_proto(model).SerializeToString()
    assert PASSES[name](model, **ARGUMENTS.get(name, {})) is False
    assert ir.to_proto(model).SerializeToString() == before
