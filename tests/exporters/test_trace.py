"""Tracing: names, axes and order of the spec; every number that changes something is kept, and no idle node."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from qsample.contract.interface import GraphSpec
from qsample.contract.tensors import BATCH, CAPACITY, IMAGE_TOKENS, SEQUENCE, TensorSpec
from qsample.errors import UnsupportedModelError
from qsample.exporters.trace import _without_torchvision_notice, trace
from qsample.graph.operators import OPSET
from tests.helpers.tiny_models import export_without_sampler, random_model

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
    model = trace(Adds(), SPEC, {"K": 6})
    graph = model.graph
    assert [(value.name, axes(value)) for value in graph.inputs] == [
        ("ids", [BATCH, SEQUENCE]),
        ("table", [BATCH, 6]),
        ("scale", [BATCH]),
    ]
    assert [value.name for value in graph.outputs] == ["total", "table_RetainedState"]
    assert graph.opset_imports[""] == OPSET
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString())
    for rows, tokens in ((1, 1), (5, 3)):  # other sizes than those of the trace
        ids = np.arange(rows * tokens, dtype=np.int64).reshape(rows, tokens)
        table, scale = np.ones((rows, 6), np.float32), np.full(rows, 2, np.float32)
        total, retained = session.run(None, {"ids": ids, "table": table, "scale": scale})
        np.testing.assert_array_equal(retained, table + ids.sum(1, keepdims=True))
        np.testing.assert_array_equal(total, 2 * retained)


def test_the_example_of_a_trace_is_a_valid_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids, lengths and scales are 1, caches are empty; free axes have different sizes above 1."""
    cache = TensorSpec("cache", "float16", (BATCH, 2, CAPACITY, "K"), "keys")
    counts = TensorSpec("counts", "int32", (BATCH,), "lengths")
    rows = TensorSpec("rows", "float32", (IMAGE_TOKENS, 7), "an input that the caller gives")
    given: dict[str, Any] = {}

    def export(root: nn.Module, **options: Any) -> None:
        given.update(options, training=root.training)

    monkeypatch.setattr(torch.onnx, "export", export)
    spec = GraphSpec((IDS, counts, rows), (cache,), (TOTAL,))
    with pytest.raises(RuntimeError, match="returned no program"):
        trace(Adds(), spec, {"K": 6}, examples={"rows": torch.full((3, 7), 5.0)})
    inputs = given["kwargs"]["inputs"]
    assert [*inputs] == ["ids", "counts", "cache", "rows"]
    assert {(name, str(one.dtype), float(one.max()), float(one.min())) for name, one in inputs.items()} == {
        ("ids", "torch.int64", 1, 1), ("counts", "torch.int32", 1, 1),
        ("cache", "torch.float16", 0, 0), ("rows", "torch.float32", 5, 5),
    }  # fmt: skip
    (batch, sequence), (_, two, capacity, six) = inputs["ids"].shape, inputs["cache"].shape
    assert (two, six, inputs["counts"].shape) == (2, 6, (batch,))
    assert len({batch, sequence, capacity, 1}) == 4
    axes = given["dynamic_shapes"]["inputs"]
    assert {name: sorted(free) for name, free in axes.items()} == {
        "ids": [0, 1], "counts": [0], "cache": [0, 2], "rows": [0],
    }  # fmt: skip
    assert axes["ids"][0] is axes["cache"][0] is axes["counts"][0]
    assert (given["input_names"], given["training"]) == (spec.input_names, False)


class Rounds(nn.Module):
    """Multiplies in bfloat16, as the biases by distance of a Falcon do."""

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        products = inputs["scale"][:, None].bfloat16() * inputs["table"].bfloat16()
        larger = products > inputs["table"].bfloat16()
        return {
            "table_RetainedState": larger.float(),
            "total": products.reshape(-1, 2, 3).flatten(1).float(),
        }


def test_bfloat16_is_computed_in_float32_and_rounded() -> None:
    session = ort.InferenceSession(ir.to_proto(trace(Rounds(), SPEC, {"K": 6})).SerializeToString())
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "table": torch.randn(5, 6, generator=generator),
        "scale": torch.randn(5, generator=generator),
    }
    feeds = {name: value.numpy() for name, value in inputs.items()} | {
        "ids": np.zeros((5, 1), np.int64)
    }
    results = dict(zip(["total", "table_RetainedState"], session.run(None, feeds), strict=True))
    for name, wanted in Rounds()(inputs).items():
        np.testing.assert_array_equal(results[name], wanted.numpy())
    assert not np.allclose(
        results["total"], (inputs["table"] * inputs["scale"][:, None]).numpy(), rtol=1e-4
    )


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


VALUES = TensorSpec("values", "float32", (BATCH, "K"), "numbers")

# ONNX Runtime and torch round these alike: each is one operation on float32.
CONSTANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "x + 1e-9": lambda x: x + 1e-9,
    "1e-9 + x": lambda x: torch.tensor(1e-9) + x,
    "x - 1e-9": lambda x: x - 1e-9,
    "x + 1e-30": lambda x: x + 1e-30,
    "x * (1 + 2**-20)": lambda x: x * (1 + 2.0**-20),
    "(1 - 2**-24) * x": lambda x: torch.tensor(1 - 2.0**-24) * x,
    "x / (1 - 2**-20)": lambda x: x / (1 - 2.0**-20),
}


class Applies(nn.Module):
    """Functions of the same numbers, each an output."""

    def __init__(self, functions: Sequence[Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self._functions = functions

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            f"result{i}": function(inputs["values"]) for i, function in enumerate(self._functions)
        }


def traced(*functions: Callable[[Tensor], Tensor]) -> ir.Model:
    results = tuple(
        TensorSpec(f"result{i}", "float32", (BATCH, "K"), "a result") for i in range(len(functions))
    )
    return trace(Applies(functions), GraphSpec((VALUES,), (), results), {"K": 4})


def test_small_constants_and_scales_near_one_are_kept() -> None:
    values = torch.tensor([[0.0, 1e-9, 3e-7, 1.0], [-2e-12, 1e-30, -0.75, 1.5]])
    model = traced(*CONSTANTS.values())
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString())
    for (name, function), got in zip(
        CONSTANTS.items(), session.run(None, {"values": values.numpy()}), strict=True
    ):
        np.testing.assert_array_equal(got, function(values).numpy(), err_msg=name)


def test_the_eps_of_a_norm_is_kept() -> None:
    def norm(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-9)

    values = torch.tensor([[0.0, 0.0, 0.0, 0.0], [3e-6, -1e-5, 2e-5, 0.0]])
    (got,) = ort.InferenceSession(ir.to_proto(traced(norm)).SerializeToString()).run(
        None, {"values": values.numpy()}
    )
    np.testing.assert_allclose(got, norm(values).numpy(), rtol=1e-6)


def test_what_changes_nothing_goes() -> None:
    model = traced(
        lambda x: x.cos() + 0.0,
        lambda x: 1.0 * x.sin(),
        lambda x: x.exp() - 0,
        lambda x: x.abs() / 1,
        lambda x: x * 1,
    )
    assert sorted(node.op_type for node in model.graph) == ["Abs", "Cos", "Exp", "Identity", "Sin"]
    # An output that is an input has its own name.
    assert [value.name for value in model.graph.inputs] == ["values"]
    assert [value.name for value in model.graph.outputs] == [f"result{i}" for i in range(5)]


@pytest.mark.slow
def test_a_model_with_a_tiny_eps_passes_the_parity_gate(tmp_path: Path) -> None:
    """Its embeddings are so small that the norm's eps is most of what they are divided by."""
    model = random_model("llama", rms_norm_eps=1e-9, num_hidden_layers=1)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1e-4)
    export_without_sampler(model, tmp_path / "package")
