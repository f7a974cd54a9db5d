"""Layers with a quantized weight: run eagerly they are unchanged, traced they multiply by the blocks."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from qsample.contract.interface import GraphSpec
from qsample.contract.tensors import BATCH, SEQUENCE, TensorSpec
from qsample.exporters.trace import trace
from qsample.transforms.quantized_linear import QuantizedWeight, quantized_layers, set_quantized_weight

OUTPUTS, INPUTS, BLOCK = 4, 32, 16
SPEC = GraphSpec(
    (TensorSpec("states", "float32", (BATCH, SEQUENCE, INPUTS), "in"),),
    (),
    (TensorSpec("product", "float32", (BATCH, SEQUENCE, OUTPUTS), "out"),),
)


class Model(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"product": self.layer(inputs["states"])}


def quantized(*, zero_points: bool, order: bool) -> tuple[QuantizedWeight, np.ndarray]:
    """Random blocks of 8 bits, and the float64 weight [N, K] that they stand for."""
    rng = np.random.default_rng(0)
    levels = rng.integers(0, 256, (OUTPUTS, INPUTS // BLOCK, BLOCK), dtype=np.uint8)
    scales = rng.uniform(0.01, 0.02, (OUTPUTS, INPUTS // BLOCK)).astype(np.float32)
    zeros = (
        rng.integers(100, 150, scales.shape, dtype=np.uint8) if zero_points else np.full(scales.shape, 128, np.uint8)
    )
    columns = rng.permutation(INPUTS) if order else np.arange(INPUTS)
    weight = np.empty((OUTPUTS, INPUTS))
    weight[:, columns] = ((levels - zeros[..., None].astype(np.float64)) * scales[..., None]).reshape(OUTPUTS, INPUTS)
    return QuantizedWeight(
        8,
        BLOCK,
        torch.from_numpy(levels),
        torch.from_numpy(scales.reshape(-1)),
        torch.from_numpy(zeros.reshape(-1)) if zero_points else None,
        torch.from_numpy(columns) if order else None,
    ), weight


@pytest.mark.parametrize(("zero_points", "order"), [(False, False), (True, True)])
@pytest.mark.parametrize("kind", ["linear", "conv1d", "no bias"])
def test_a_traced_layer_multiplies_by_its_blocks(kind: str, zero_points: bool, order: bool) -> None:
    layer = Conv1D(OUTPUTS, INPUTS) if kind == "conv1d" else nn.Linear(INPUTS, OUTPUTS, bias=kind == "linear")
    weight, meaning = quantized(zero_points=zero_points, order=order)
    set_quantized_weight(layer, weight)
    with torch.no_grad():
        layer.weight.zero_()  # the float weight is not traced
    graph = trace(Model(layer), SPEC, {})
    assert [node.op_type for node in graph.graph if node.op_type in ("MatMulNBits", "MatMul", "Gemm")] == [
        "MatMulNBits"
    ]
    states = np.random.default_rng(1).normal(size=(2, 3, INPUTS)).astype(np.float32)
    session = ort.InferenceSession(ir.to_proto(graph).SerializeToString(), providers=["CPUExecutionProvider"])
    bias = 0 if layer.bias is None else layer.bias.detach().numpy()
    np.testing.assert_allclose(session.run(None, {"states": states})[0], states @ meaning.T + bias, atol=1e-4)


def test_an_eager_layer_is_what_it_was() -> None:
    layer = nn.Linear(INPUTS, OUTPUTS)
    states = torch.randn(2, INPUTS)
    before, names = layer(states), list(layer.state_dict())
    weight, _ = quantized(zero_points=True, order=True)
    set_quantized_weight(layer, weight)
    torch.testing.assert_close(layer(states), before, rtol=0, atol=0)
    assert list(layer.state_dict()) == names


def test_quantized_layers_are_those_that_were_set() -> None:
    model = nn.Sequential(nn.Linear(INPUTS, OUTPUTS), nn.Linear(OUTPUTS, OUTPUTS))
    weight, _ = quantized(zero_points=False, order=False)
    set_quantized_weight(model[0], weight)
    assert [(layer is model[0], of_layer is weight) for layer, of_layer in quantized_layers(model)] == [(True, True)]
    assert (weight.sizes, weight.nbytes) == ((OUTPUTS, INPUTS), OUTPUTS * INPUTS + 4 * OUTPUTS * INPUTS // BLOCK)
