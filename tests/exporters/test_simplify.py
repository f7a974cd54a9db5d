"""A traced graph keeps every number that changes something, and loses every node that changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from qsample.contract import BATCH, TensorSpec
from qsample.exporters.trace import trace
from qsample.interface import GraphSpec
from tests.helpers.tiny_models import export_without_sampler, random_model

VALUES = TensorSpec("values", "float32", (BATCH, "K"), "numbers")
RESULT = TensorSpec("result", "float32", (BATCH, "K"), "the result")
SIZE = 4

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
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"result": self._function(inputs["values"])}


def traced(function: Callable[[Tensor], Tensor], size: int = SIZE, result: TensorSpec = RESULT) -> ir.Model:
    return trace(Applies(function), GraphSpec((VALUES,), (), (result,)), {"K": size})


def run(model: ir.Model, values: Tensor) -> np.ndarray:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString())
    return np.asarray(session.run(None, {"values": values.numpy()})[0])


@pytest.mark.parametrize("name", CONSTANTS)
def test_small_constants_and_scales_near_one_are_kept(name: str) -> None:
    function = CONSTANTS[name]
    values = torch.tensor([[0.0, 1e-9, 3e-7, 1.0], [-2e-12, 1e-30, -0.75, 1.5]])
    np.testing.assert_array_equal(run(traced(function), values), function(values).numpy())


def test_the_eps_of_a_norm_is_kept() -> None:
    def norm(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-9)

    values = torch.tensor([[0.0, 0.0, 0.0, 0.0], [3e-6, -1e-5, 2e-5, 0.0]])
    np.testing.assert_allclose(run(traced(norm), values), norm(values).numpy(), rtol=1e-6)


@pytest.mark.parametrize("function", [lambda x: x + 0.0, lambda x: 1.0 * x, lambda x: x - 0, lambda x: x / 1])
def test_what_changes_nothing_goes(function: Callable[[Tensor], Tensor]) -> None:
    model = traced(lambda x: function(x.cos()))
    assert [node.op_type for node in model.graph] == ["Cos"]


def test_an_output_that_is_an_input_has_its_name() -> None:
    model = traced(lambda x: x * 1)
    assert ([value.name for value in model.graph.inputs], [value.name for value in model.graph.outputs]) == (
        ["values"],
        ["result"],
    )


@pytest.mark.slow
def test_a_model_with_a_tiny_eps_passes_the_parity_gate(tmp_path: Path) -> None:
    """Its embeddings are so small that the norm's eps is most of what they are divided by."""
    model = random_model("llama", rms_norm_eps=1e-9, num_hidden_layers=1)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1e-4)
    export_without_sampler(model, tmp_path / "package")
