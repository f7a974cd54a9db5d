"""Experts with quantized weights: the graph of a trace computes from their blocks what the float experts compute."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from qsample.graph import moe
from qsample.transforms import experts as module
from qsample.transforms.experts import ExpertWeights, SwiGLU
from qsample.transforms.quantized_experts import (
    quantized_experts,
    set_quantized_experts,
    traced_matrices,
)
from qsample.transforms.quantized_linear import QuantizedWeight
from tests.helpers.mixtures import mixture
from tests.helpers.tiny_models import export_without_sampler

BLOCK = 16
NAMES = ("gate_up_proj", "down_proj")
# Families whose parameters are [E, K, N], and whose gates and up projections take turns already.
TRANSPOSED = ("gpt_oss", "llama4_text")
IN_TURNS = ("gpt_oss",)


def quantize(experts: Any, kind: str) -> None:
    """Round the parameters of a module to blocks of 8 bits, and give it these blocks."""
    for name in NAMES:
        parameter = getattr(experts, name)
        matrices = parameter.data.transpose(1, 2) if kind in TRANSPOSED else parameter.data
        count, outputs, inputs = matrices.shape
        blocks = matrices.reshape(count * outputs, inputs // BLOCK, BLOCK)
        scales = blocks.abs().amax(-1, keepdim=True) / 127
        levels = (blocks / scales).round()
        meant = (levels * scales).reshape(matrices.shape)
        parameter.data = (
            meant.transpose(1, 2).contiguous() if kind in TRANSPOSED else meant.contiguous()
        )
        stored = ((levels + 128).to(torch.uint8)).reshape(count, outputs, -1, BLOCK)
        steps = scales.reshape(count, outputs, -1)
        if name == "gate_up_proj" and kind not in IN_TURNS:
            stored, steps = turns(stored), turns(steps)
        rows = count * outputs
        weight = QuantizedWeight(
            8, BLOCK, stored.reshape(rows, -1, BLOCK), steps.reshape(rows, -1).contiguous()
        )
        set_quantized_experts(experts, name, weight, count)


def turns(halves: Tensor) -> Tensor:
    return torch.stack(halves.chunk(2, 1), 2).flatten(1, 2)


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "llama4_text"])
def test_a_traced_mixture(kind: str, tmp_path: Path) -> None:
    """The parity gate compares the graph with the float experts."""
    model = mixture(kind)
    before = set(model.state_dict())
    found = [one for one in model.modules() if all(hasattr(one, name) for name in NAMES)]
    assert len(found) == 1
    quantize(found[0], kind)
    assert quantized_experts(found[0]).keys() == set(NAMES)
    assert set(model.state_dict()) == before
    package = export_without_sampler(model, tmp_path / "package")
    (node,) = moe.mixtures(ir.load(package.path / "decoder.onnx").graph)
    packed = moe.packed_weights(node)
    assert [(one.bits, one.block_size) for one in packed] == [(8, BLOCK)] * 2
    assert package.manifest.packed_weights["experts"] == 8
    assert package.manifest.packed_weights["matrices"] == 0


def test_biases_follow_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of gates and up projections that are stored one after the other are put in turns."""
    matrices = {"gate_up_proj": torch.zeros(1, 4, 2), "down_proj": torch.ones(1, 2, 2)}
    monkeypatch.setattr(module, "traced_matrices", lambda owner, name: matrices[name])
    bias = torch.tensor([[1.0, 2.0, 10.0, 20.0]])
    float_weights = torch.zeros(1, 2, 4)
    for interleaved, wanted in ((False, [1.0, 10.0, 2.0, 20.0]), (True, [1.0, 2.0, 10.0, 20.0])):
        weights = ExpertWeights(
            SwiGLU(interleaved=interleaved),
            1,
            float_weights,
            float_weights,
            gate_bias=bias,
            gate_transposed=True,
            down_transposed=True,
        )
        changed = module._with_blocks(weights, nn.Module())
        assert changed.gate_bias is not None
        assert changed.gate_bias.tolist() == [wanted]
        assert changed.activation == SwiGLU(interleaved=True)
        assert changed.gate is matrices["gate_up_proj"]
        assert changed.down is matrices["down_proj"]
        assert not changed.gate_transposed
        assert not changed.down_transposed


def test_experts_without_blocks_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = ExpertWeights(SwiGLU(), 1, torch.zeros(1, 4, 2), torch.zeros(1, 2, 2))
    assert module._with_blocks(weights, nn.Module()) is weights
    assert quantized_experts(nn.Module()) == {}


def test_blocks_of_a_parameter_are_those_of_each_expert() -> None:
    """Rows, expert by expert, become matrices; buffers of a parameter each, which no checkpoint holds."""
    layer = nn.Module()
    assert quantized_experts(layer) == {}
    assert traced_matrices(layer, "up") is None
    for number, (parameter, bits) in enumerate((("up", 4), ("down", 8))):
        blocks = torch.arange(6 * 64 * bits // 8).reshape(6, -1).to(torch.uint8)
        scales = torch.arange(6 * 2.0).reshape(6, 2) + number
        weight: Any = SimpleNamespace(
            sizes=(6, 64), bits=bits, block_size=32, blocks=blocks, scales=scales
        )
        set_quantized_experts(layer, parameter, weight, 3)
        found = quantized_experts(layer)[parameter]
        assert (found.bits, found.block_size) == (bits, 32)
        assert found.blocks.shape == (3, 2, 64 * bits // 8)
        assert torch.equal(found.blocks.flatten(), blocks.flatten())
        assert torch.equal(found.scales, scales.reshape(3, 2, 2))
        assert found.nbytes == 6 * 64 * bits // 8 + 4 * 12
    assert list(quantized_experts(layer)) == ["up", "down"]
    buffers = dict(layer.named_buffers())
    assert len(buffers) == 4
    for parameter, found in quantized_experts(layer).items():
        for part in ("blocks", "scales"):
            assert any(
                parameter in name and part in name and buffer is getattr(found, part)
                for name, buffer in buffers.items()
            )
    assert layer.state_dict() == {}
    assert traced_matrices(layer, "other") is None
