"""SwiGLU recognised by its results; which experts run as the operator."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from qsample.transforms.experts import (
    ACTIVATION,
    IMPLEMENTATION,
    SwiGLU,
    find_swiglu,
    replace_own_experts,
    route_experts,
)
from tests.architectures.configs import tiny_model
from tests.helpers.tiny_models import random_model
from tests.transforms.decoding import compute_operators

SIZE = 6


def halves(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda joint: function(*joint.chunk(2, dim=-1))


def turns(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda joint: function(joint[..., ::2], joint[..., 1::2])


def clamped(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(gate * 1.702)


@pytest.mark.parametrize(
    ("gate", "found"),
    [
        (halves(lambda gate, up: F.silu(gate) * up), SwiGLU()),
        (halves(lambda gate, up: (F.silu(gate.float()) * up.float()).to(gate.dtype)), SwiGLU()),
        (
            halves(lambda gate, up: F.silu(gate.clamp(max=10)) * up.clamp(-10, 10)),
            SwiGLU(limit=10.0),
        ),
        (turns(clamped), SwiGLU(1.702, 1.0, 7.0, interleaved=True)),
        (halves(clamped), SwiGLU(1.702, 1.0, 7.0)),
    ],
    ids=["silu", "silu in float32", "limited", "gpt-oss", "gpt-oss, halves"],
)
def test_a_swiglu_is_found(gate: Callable[[Tensor], Tensor], found: SwiGLU) -> None:
    assert find_swiglu(gate, SIZE) == found


@pytest.mark.parametrize(
    "gate",
    [
        halves(lambda gate, up: F.gelu(gate) * up),
        halves(lambda gate, up: F.gelu(gate, approximate="tanh") * up),
        halves(lambda gate, up: F.relu(gate) * up),
        halves(lambda gate, up: F.silu(gate) * up * up),
        halves(lambda gate, up: F.silu(gate) * torch.tanh(up)),
        halves(lambda gate, up: F.silu(up) * gate),
        halves(lambda gate, up: F.silu(gate.clamp(max=7)) * up),
        halves(lambda gate, up: F.silu(gate.clamp(max=5)) * up.clamp(-7, 7)),
        halves(lambda gate, up: F.silu(gate) * up * torch.linspace(1, 1.01, SIZE)),
        halves(lambda gate, up: F.silu(gate.flip(-1)) * up),
        halves(lambda gate, up: gate * up),
        halves(lambda gate, up: torch.zeros_like(up)),
    ],
)
def test_anything_else_is_not(gate: Callable[[Tensor], Tensor]) -> None:
    assert find_swiglu(gate, SIZE) is None


def test_the_formula() -> None:
    """A value worked out by hand: gate 9 is limited to 7, up -8 to -7."""
    result = SwiGLU(1.702, 1.0, 7.0)(torch.tensor([[9.0, 0.5, -8.0, 2.0]], dtype=torch.float64))
    expected = [7 / (1 + math.exp(-1.702 * 7)) * -6, 0.5 / (1 + math.exp(-1.702 * 0.5)) * 3]
    torch.testing.assert_close(result, torch.tensor([expected], dtype=torch.float64))


def test_a_dense_model_is_left_alone() -> None:
    model = random_model("llama")
    route_experts(model)
    assert model.config._experts_implementation != IMPLEMENTATION


def test_eagerly_they_compute_what_the_default_computes() -> None:
    model, ids = random_model("mixtral"), torch.arange(12)[None]
    with torch.no_grad():
        before = model(ids).logits
        route_experts(model)
        after = model(ids).logits
    assert model.config._experts_implementation == IMPLEMENTATION
    torch.testing.assert_close(after, before, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("model_type", "overrides", "activation"),
    [
        ("mixtral", {}, SwiGLU()),
        ("gpt_oss", {}, SwiGLU(1.702, 1.0, 7.0, interleaved=True)),
        ("mixtral", {"hidden_act": "gelu"}, None),
    ],
)
def test_the_gate_of_a_family(
    model_type: str, overrides: dict[str, str], activation: SwiGLU | None
) -> None:
    model = random_model(model_type, **overrides)
    route_experts(model)
    found = [
        module.qsample_activation
        for module in model.modules()
        if hasattr(module, "qsample_activation")
    ]
    assert found == [activation] * model.config.num_hidden_layers


@pytest.mark.parametrize("model_type", ["dbrx", "longcat_flash", "llama4_text", "jetmoe"])
def test_eagerly_they_compute_what_their_own_code_computes(model_type: str) -> None:
    model, ids = tiny_model(model_type), torch.arange(12)[None]
    with torch.no_grad():
        before = model(input_ids=ids, use_cache=False).logits
        replace_own_experts(model)
        after = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(after, before, atol=2e-5, rtol=0)
    assert any(hasattr(module, ACTIVATION) for module in model.modules())


def run_marked(inputs: Sequence[Tensor | None], attributes: dict[str, Any]) -> list[Tensor]:
    """What the marker of a trace stands for, row by row in float64: each row through its expert."""
    rows, choice, gate, down, gate_bias, down_bias, up = inputs
    assert rows is not None
    assert choice is not None
    count = choice.shape[1]
    assert choice.sum(1).eq(1).all()

    def matrix(weights: Tensor | None, expert: int, transposed: int) -> Tensor:
        assert weights is not None
        own = (weights if weights.ndim == 3 else weights.reshape(count, -1, weights.shape[1]))[
            expert
        ]
        return (own.T if transposed else own).double()

    results = []
    for row, expert in zip(rows.double(), choice.argmax(1).tolist(), strict=True):
        joint = matrix(gate, expert, attributes["gate_transposed"]) @ row
        if up is not None:
            joint = torch.cat([joint, matrix(up, expert, attributes["gate_transposed"]) @ row])
        if gate_bias is not None:
            joint = joint + gate_bias[expert]
        parts = (joint[::2], joint[1::2]) if attributes["interleaved"] else joint.chunk(2)
        limit = attributes.get("limit", math.inf)
        gates, ups = parts[0].clamp(max=limit), parts[1].clamp(-limit, limit)
        hidden = gates / (1 + torch.exp(-attributes["alpha"] * gates)) * (ups + attributes["beta"])
        result = matrix(down, expert, attributes["down_transposed"]) @ hidden
        results.append(result if down_bias is None else result + down_bias[expert])
    return [torch.stack(results).to(rows.dtype)]


@pytest.mark.parametrize(
    "model_type",
    ["mixtral", "gpt_oss", "qwen3_moe", "dbrx", "longcat_flash", "llama4_text", "jetmoe"],
)
def test_in_a_trace_the_operator_computes_what_their_own_code_computes(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = model_type in ("mixtral", "gpt_oss", "qwen3_moe")
    model, ids = random_model(model_type) if own else tiny_model(model_type), torch.arange(12)[None]
    calls = 0

    def counted(inputs: Sequence[Tensor | None], attributes: dict[str, Any]) -> list[Tensor]:
        nonlocal calls
        calls += 1
        assert attributes.get("limit") == (7.0 if model_type == "gpt_oss" else None)
        return run_marked(inputs, attributes)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name:
                parameter.normal_()
        before = model(input_ids=ids, use_cache=False).logits
        route_experts(model)
        replace_own_experts(model)
        compute_operators(monkeypatch, Experts=counted)
        monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
        after = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)
    assert calls == sum(hasattr(module, ACTIVATION) for module in model.modules())
