"""Layers with a quantized weight: run eagerly they are unchanged, traced they multiply by the blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding
from transformers.pytorch_utils import Conv1D

from qsample.contract.interface import GraphSpec
from qsample.contract.tensors import BATCH, SEQUENCE, TensorSpec
from qsample.exporters.trace import trace
from qsample.graph.operators import pack_bits
from qsample.transforms.deferred import defer
from qsample.transforms.quantized_linear import (
    QuantizedWeight,
    quantized_layers,
    set_quantized_weight,
)

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


def quantized(
    *, zero_points: bool, order: bool, offsets: bool = False
) -> tuple[QuantizedWeight, np.ndarray]:
    """Random blocks of 8 bits, and the float64 weight [N, K] that they stand for."""
    rng = np.random.default_rng(0)
    levels = rng.integers(0, 256, (OUTPUTS, INPUTS // BLOCK, BLOCK), dtype=np.uint8)
    scales = rng.uniform(0.01, 0.02, (OUTPUTS, INPUTS // BLOCK)).astype(np.float32)
    zeros = (
        rng.integers(100, 150, scales.shape, dtype=np.uint8)
        if zero_points
        else np.full(scales.shape, 128, np.uint8)
    )
    columns = rng.permutation(INPUTS) if order else np.arange(INPUTS)
    added = rng.normal(size=scales.shape).astype(np.float32) if offsets else np.zeros_like(scales)
    weight = np.empty((OUTPUTS, INPUTS))
    blocks = (levels - zeros[..., None].astype(np.float64)) * scales[..., None] + added[..., None]
    weight[:, columns] = blocks.reshape(OUTPUTS, INPUTS)
    return QuantizedWeight(
        8,
        BLOCK,
        torch.from_numpy(levels),
        torch.from_numpy(scales),
        torch.from_numpy(zeros.reshape(-1)) if zero_points else None,
        torch.from_numpy(columns) if order else None,
        torch.from_numpy(added.T.copy()) if offsets else None,
    ), weight


@pytest.mark.parametrize(
    ("kind", "zero_points", "order", "offsets"),
    [
        ("linear", False, False, False),
        ("linear", True, True, True),
        ("conv1d", True, True, False),
        ("no bias", False, False, True),
    ],
)
def test_a_traced_layer_multiplies_by_its_blocks(
    kind: str, zero_points: bool, order: bool, offsets: bool
) -> None:
    layer = (
        Conv1D(OUTPUTS, INPUTS)
        if kind == "conv1d"
        else nn.Linear(INPUTS, OUTPUTS, bias=kind == "linear")
    )
    weight, meaning = quantized(zero_points=zero_points, order=order, offsets=offsets)
    set_quantized_weight(layer, weight)
    with torch.no_grad():
        layer.weight.zero_()  # the float weight is not traced
    graph = trace(Model(layer), SPEC, {})
    products = [
        node.op_type for node in graph.graph if node.op_type in ("MatMulNBits", "MatMul", "Gemm")
    ]
    assert products == (["MatMulNBits", "MatMul"] if offsets else ["MatMulNBits"])
    states = np.random.default_rng(1).normal(size=(2, 3, INPUTS)).astype(np.float32)
    session = ort.InferenceSession(
        ir.to_proto(graph).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    bias = 0 if layer.bias is None else layer.bias.detach().numpy()
    np.testing.assert_allclose(
        session.run(None, {"states": states})[0], states @ meaning.T + bias, atol=1e-4
    )


class Shifted(nn.Embedding):
    """A subclass that no one knows."""

    def forward(self, ids: Tensor) -> Tensor:
        return 2 * super().forward(ids) + self.weight.shape[1]


LOOKUP = GraphSpec(
    (TensorSpec("states", "int64", (BATCH, SEQUENCE), "in"),),
    (),
    (TensorSpec("product", "float32", (BATCH, SEQUENCE, INPUTS), "out"),),
)
IDS = np.array([[3, 0, 1], [2, 2, 3]])


@pytest.mark.parametrize(
    ("table", "change", "options"),
    [
        (nn.Embedding(OUTPUTS, INPUTS), lambda rows: rows, {"zero_points": False}),
        (
            Gemma3TextScaledWordEmbedding(OUTPUTS, INPUTS, 0, 5.0),
            lambda rows: 5 * rows,
            {"zero_points": False, "offsets": True},
        ),
        (
            Shifted(OUTPUTS, INPUTS),
            lambda rows: 2 * rows + INPUTS,
            {"zero_points": True, "offsets": True},
        ),
    ],
)
def test_a_traced_table_reads_its_blocks(
    table: nn.Embedding, change: Callable[[np.ndarray], np.ndarray], options: dict[str, Any]
) -> None:
    weight, meaning = quantized(order=False, **options)
    with torch.no_grad():
        table.weight.copy_(torch.from_numpy(meaning))
    set_quantized_weight(table, weight)
    torch.testing.assert_close(
        table(torch.from_numpy(IDS)), torch.from_numpy(change(meaning[IDS])).float()
    )
    with torch.no_grad():
        table.weight.zero_()  # the float weight is not traced
    graph = trace(Model(table), LOOKUP, {})
    assert Counter(node.op_type for node in graph.graph)["GatherBlockQuantized"] == 1
    session = ort.InferenceSession(
        ir.to_proto(graph).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    np.testing.assert_allclose(
        session.run(None, {"states": IDS})[0], change(meaning[IDS]), rtol=1e-5, atol=1e-5
    )


def test_rows_of_four_bits_have_the_zero_points_of_their_blocks() -> None:
    """Whose number is odd, so that the last byte of a row is half empty."""
    rng = np.random.default_rng(0)
    levels, zeros = rng.integers(0, 16, (OUTPUTS, 3, 32)), rng.integers(0, 16, (OUTPUTS, 3))
    scales = rng.uniform(0.1, 0.2, (OUTPUTS, 3)).astype(np.float32)
    packed = (
        pack_bits(array.reshape(OUTPUTS, -1).astype(np.uint8), 4) for array in (levels, zeros)
    )
    blocks, zero_points = map(torch.from_numpy, packed)
    weight = QuantizedWeight(
        4, 32, blocks.reshape(OUTPUTS, 3, 16), torch.from_numpy(scales), zero_points.reshape(-1)
    )
    offsets = weight.row_offsets()
    assert offsets is not None
    np.testing.assert_allclose(offsets.numpy(), (scales * (8 - zeros))[..., None], rtol=1e-6)


@pytest.mark.parametrize("zero_points", [False, True])
def test_offsets_of_rows_come_from_placeholders_too(zero_points: bool) -> None:
    """What is read without an operation of torch would be zeros."""
    weight, _ = quantized(zero_points=zero_points, order=False, offsets=True)
    parts = {name: getattr(weight, name) for name in ("scales", "zero_points", "offsets")}
    later = {
        name: None
        if tensor is None
        else defer(tensor.shape, tensor.dtype, lambda tensor=tensor: tensor, tensor.dtype)
        for name, tensor in parts.items()
    }
    torch.testing.assert_close(
        replace(weight, **later).row_offsets(), weight.row_offsets(), rtol=0, atol=0
    )


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
    assert [
        (layer is model[0], of_layer is weight) for layer, of_layer in quantized_layers(model)
    ] == [(True, True)]
    assert (weight.sizes, weight.nbytes) == (
        (OUTPUTS, INPUTS),
        OUTPUTS * INPUTS + 4 * OUTPUTS * INPUTS // BLOCK,
    )
