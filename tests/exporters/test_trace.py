"""Tracing: the graph has the names, axes and order of its spec, and what no graph can express is refused."""

from __future__ import annotations

import logging
import sys

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from qsample.contract import BATCH, SEQUENCE, TensorSpec
from qsample.errors import UnsupportedModelError
from qsample.exporters.trace import _without_torchvision_notice, trace
from qsample.graph.operators import OPSET
from qsample.interface import GraphSpec

IDS = TensorSpec("ids", "int64", (BATCH, SEQUENCE), "tokens")
TABLE = TensorSpec("table", "float32", (BATCH, "K"), "a state")
SCALE = TensorSpec("scale", "float32", (BATCH,), "a state that no step changes", read_only=True)
TOTAL = TensorSpec("total", "float32", (BATCH, "K"), "the result")
SPEC = GraphSpec((IDS,), (TABLE, SCALE), (TOTAL,))


class Adds(nn.Module):
    """Returns its results in another order than the spec's."""

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        table = inputs["table"] + inputs["ids"].sum(-1, keepdim=True)
        return {"table_RetainedState": table, "total": table * inputs["scale"][:, None]}


class Branches(nn.Module):
    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        table = inputs["table"] if inputs["ids"].sum() > 3 else -inputs["table"]
        return {"table_RetainedState": table, "total": table}


def axes(value: ir.Value) -> list[int | str | None]:
    assert value.shape is not None
    return [axis if isinstance(axis, int) else axis.value for axis in value.shape]


def test_names_axes_and_order_are_those_of_the_spec() -> None:
    graph = trace(Adds(), SPEC, {"K": 6}).graph
    assert [(value.name, axes(value)) for value in graph.inputs] == [
        ("ids", [BATCH, SEQUENCE]),
        ("table", [BATCH, 6]),
        ("scale", [BATCH]),
    ]
    assert [value.name for value in graph.outputs] == ["total", "table_RetainedState"]
    assert graph.opset_imports[""] == OPSET


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (5, 3)])
def test_the_graph_runs_at_sizes_that_it_was_not_traced_at(rows: int, tokens: int) -> None:
    session = ort.InferenceSession(ir.to_proto(trace(Adds(), SPEC, {"K": 6})).SerializeToString())
    ids = np.arange(rows * tokens, dtype=np.int64).reshape(rows, tokens)
    table, scale = np.ones((rows, 6), np.float32), np.full(rows, 2, np.float32)
    total, retained = session.run(None, {"ids": ids, "table": table, "scale": scale})
    np.testing.assert_array_equal(retained, table + ids.sum(1, keepdims=True))
    np.testing.assert_array_equal(total, 2 * retained)


class Rounds(nn.Module):
    """Multiplies in bfloat16, as the biases by distance of a Falcon do."""

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        products = inputs["scale"][:, None].bfloat16() * inputs["table"].bfloat16()
        larger = products > inputs["table"].bfloat16()
        return {"table_RetainedState": larger.float(), "total": products.reshape(-1, 2, 3).flatten(1).float()}


def test_bfloat16_is_computed_in_float32_and_rounded() -> None:
    session = ort.InferenceSession(ir.to_proto(trace(Rounds(), SPEC, {"K": 6})).SerializeToString())
    generator = torch.Generator().manual_seed(0)
    inputs = {"table": torch.randn(5, 6, generator=generator), "scale": torch.randn(5, generator=generator)}
    feeds = {name: value.numpy() for name, value in inputs.items()} | {"ids": np.zeros((5, 1), np.int64)}
    results = dict(zip(["total", "table_RetainedState"], session.run(None, feeds), strict=True))
    for name, wanted in Rounds()(inputs).items():
        np.testing.assert_array_equal(results[name], wanted.numpy())
    assert not np.allclose(results["total"], (inputs["table"] * inputs["scale"][:, None]).numpy(), rtol=1e-4)


def test_what_depends_on_values_is_refused_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"cannot express: .*docs/architectures\.md"):
        trace(Branches(), SPEC, {"K": 6})
    assert capfd.readouterr() == ("", "")


def test_nothing_is_said_of_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    logger, said = logging.getLogger("torch.onnx._internal.exporter._registration"), []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: said.append(record.getMessage()))
    # Whatever other tests of this process let torch and transformers say.
    monkeypatch.setattr(logging.root.manager, "disable", logging.NOTSET)
    monkeypatch.setattr(logger, "level", logging.WARNING)
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setitem(sys.modules, "torchvision", None)  # not installed, here at least
    with _without_torchvision_notice():
        ONNXRegistry.from_torchlib()
        logger.warning("something else")
    assert said == ["something else"]
    trace(Adds(), SPEC, {"K": 2})
    assert said == ["something else"]
