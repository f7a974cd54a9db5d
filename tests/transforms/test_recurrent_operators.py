"""ONNX Runtime's LinearAttention and CausalConvWithState, and the eager functions in their place, against NumPy in
float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.mamba import modeling_mamba
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.olmo_hybrid import modeling_olmo_hybrid

from qsample.contract.arrays import Array
from qsample.errors import UnsupportedModelError
from qsample.transforms.recurrent_operators import (
    RECURRENCES,
    Chunk,
    causal_convolution,
    linear_attention,
    replacement,
)
from tests.helpers.small_graphs import normal
from tests.helpers.tiny_models import export_without_sampler, random_model
from tests.transforms.decoding import compute_operators

B, S, GROUPS, HEADS, K, V = 2, 7, 2, 4, 16, 8
SCALE = 0.3


def reference(
    query: Array, key: Array, value: Array, state: Array, decay: Array, beta: Array | None
) -> tuple[Array, Array]:
    state = state.astype(np.float64)
    results = np.zeros(value.shape)
    for b, h in np.ndindex(B, HEADS):
        group = h * GROUPS // HEADS
        for token in range(value.shape[1]):
            q, k, v = query[b, token, group], key[b, token, group], value[b, token, h]
            state[b, h] *= np.exp(decay[b, token, h].astype(np.float64))[..., None]
            if beta is not None:
                v = beta[b, token, h] * (v - k @ state[b, h])
            state[b, h] += np.outer(k, v)
            results[b, token, h] = SCALE * (q @ state[b, h])
    return results, state


def operands(*, delta: bool, by_row: bool) -> dict[str, Array]:
    """The delta rule wants keys of length 1."""
    key = normal(B, S, GROUPS, K, seed=1)
    result = {
        "query": normal(B, S, GROUPS, K, seed=0),
        "key": key / np.linalg.norm(key, axis=-1, keepdims=True),
        "value": normal(B, S, HEADS, V, seed=2),
        "state": normal(B, HEADS, K, V, seed=3),
        "decay": -np.abs(normal(B, S, HEADS, *([K] if by_row else []), seed=4)),
    }
    return result | ({"beta": 1 / (1 + np.exp(-normal(B, S, HEADS, seed=5)))} if delta else {})


def session(
    operator: str, inputs: list[str | None], outputs: list[str], **attributes: Any
) -> ort.InferenceSession:
    values = {
        name: ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT)) for name in inputs if name
    }
    node = ir.node(operator, [values.get(name or "") for name in inputs], attributes, domain="com.microsoft",
                   num_outputs=len(outputs))  # fmt: skip
    for value, name in zip(node.outputs, outputs, strict=True):
        value.name, value.type = name, ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(list(values.values()), list(node.outputs), nodes=[node],
                     opset_imports={"": 20, "com.microsoft": 1}, name="one")  # fmt: skip
    return ort.InferenceSession(ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString())


def attend(feeds: dict[str, Array]) -> tuple[Array, Array]:
    """The operator."""
    beta = "beta" in feeds
    names = ["query", "key", "value", "state", "decay", *(["beta"] if beta else [])]
    rule = "gated_delta" if beta else "gated"
    run = session("LinearAttention", list(names), ["output", "after"],
                  q_num_heads=GROUPS, kv_num_heads=HEADS, scale=SCALE, update_rule=rule)  # fmt: skip
    packed = {
        name: feeds[name] if name == "state" else feeds[name].reshape(*feeds[name].shape[:2], -1)
        for name in names
    }
    output, after = run.run(None, packed)
    return output.reshape(feeds["value"].shape), after


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("delta", [False, True])
def test_linear_attention(delta: bool, by_row: bool) -> None:
    feeds = operands(delta=delta, by_row=by_row)
    wanted = reference(**{"beta": None, **feeds})
    eager = linear_attention(*(torch.from_numpy(array) for array in feeds.values()), scale=SCALE)
    for got, want in zip((*attend(feeds), *eager), (*wanted, *wanted), strict=True):
        np.testing.assert_allclose(np.asarray(got), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("delta", [False, True])
def test_linear_attention_in_pieces_is_the_same_to_the_bit(delta: bool) -> None:
    feeds = operands(delta=delta, by_row=False)
    wanted, last = attend(feeds)
    state, parts = feeds["state"], []
    for tokens in (slice(0, 1), slice(1, 5), slice(5, 7)):
        piece = {
            name: array if name == "state" else array[:, tokens] for name, array in feeds.items()
        }
        output, state = attend({**piece, "state": state})
        parts.append(output)
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), wanted)
    np.testing.assert_array_equal(state, last)


@pytest.mark.parametrize("delta", [False, True])
def test_a_token_that_is_nothing_leaves_the_memory_as_it_is(delta: bool) -> None:
    feeds = operands(delta=delta, by_row=False)
    feeds["decay"][0, 3:] = 0
    feeds["beta" if delta else "value"][0, 3:] = 0
    shorter = {name: array if name == "state" else array[:, :3] for name, array in feeds.items()}
    np.testing.assert_array_equal(attend(feeds)[1][0], attend(shorter)[1][0])


@pytest.mark.parametrize("length", [1, 6])
def test_in_place(length: int) -> None:
    """The state before and after in one buffer."""
    feeds = {
        k: v if k == "state" else v[:, :length]
        for k, v in operands(delta=True, by_row=False).items()
    }
    output, after = attend(feeds)
    names = ["query", "key", "value", "state", "decay", "beta"]
    run = session("LinearAttention", list(names), ["output", "after"],
                  q_num_heads=GROUPS, kv_num_heads=HEADS, scale=SCALE, update_rule="gated_delta")  # fmt: skip
    state = feeds["state"].copy()
    binding = run.io_binding()
    for name in set(names) - {"state"}:
        binding.bind_cpu_input(name, np.ascontiguousarray(feeds[name].reshape(B, length, -1)))
    binding.bind_input("state", "cpu", 0, np.float32, state.shape, state.ctypes.data)
    binding.bind_output("output")
    binding.bind_output("after", "cpu", 0, np.float32, state.shape, state.ctypes.data)
    run.run_with_iobinding(binding)
    np.testing.assert_array_equal(state, after)
    np.testing.assert_array_equal(binding.get_outputs()[0].numpy().reshape(output.shape), output)


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("length", [1, 6])
def test_causal_convolution(length: int, bias: bool, silu: bool) -> None:
    channels, width = 5, 4
    x, past = normal(B, channels, length), normal(B, channels, width - 1, seed=1)
    weight, offset = normal(channels, width, seed=2), normal(channels, seed=3)
    window = np.concatenate([past, x], axis=-1).astype(np.float64)
    wanted = np.stack(
        [(window[..., i : i + width] * weight).sum(-1) for i in range(length)], axis=-1
    )
    wanted = wanted + offset[:, None] if bias else wanted
    wanted = wanted / (1 + np.exp(-wanted)) if silu else wanted

    tensors = [torch.from_numpy(array) for array in (x, weight, offset, past)]
    eager = causal_convolution(
        tensors[0], tensors[1], tensors[2] if bias else None, tensors[3], silu=silu
    )
    run = session("CausalConvWithState", ["x", "weight", "bias" if bias else None, "past"], ["output", "after"],
                  activation="silu" if silu else "none")  # fmt: skip
    feeds = {"x": x, "weight": weight[:, None], "past": past} | ({"bias": offset} if bias else {})
    output, _ = run.run(None, feeds)
    np.testing.assert_allclose(output, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(eager.numpy(), wanted, rtol=1e-5, atol=1e-5)
    alone = {name: array[1:] if name in ("x", "past") else array for name, array in feeds.items()}
    np.testing.assert_array_equal(
        run.run(None, alone)[0], output[1:]
    )  # and a row alone as among others


def test_a_convolution_in_pieces_is_the_same_to_the_bit() -> None:
    x, past, weight = normal(B, 5, 6), normal(B, 5, 3, seed=1), normal(5, 1, 4, seed=2)
    run = session(
        "CausalConvWithState", ["x", "weight", None, "past"], ["output", "after"], activation="silu"
    )
    wanted, _ = run.run(None, {"x": x, "weight": weight, "past": past})
    parts = []
    for tokens in (slice(0, 1), slice(1, 4), slice(4, 6)):
        output, past = run.run(
            None, {"x": np.ascontiguousarray(x[..., tokens]), "weight": weight, "past": past}
        )
        parts.append(output)
    np.testing.assert_array_equal(np.concatenate(parts, axis=-1), wanted)


def recurrence(name: str) -> tuple[Any, dict[str, torch.Tensor], dict[str, Any]]:
    """transformers' function, its arguments by token, and the others."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    if name == "mamba_selective_scan":
        by_token = {key: random(B, V, S) for key in ("hidden_states", "dt", "z")}
        by_token |= {"B": random(B, K, S), "C": random(B, K, S)}
        others: dict[str, Any] = {"A": -random(V, K).abs(), "D": random(V), "delta_bias": random(V)}
        others |= {"delta_softplus": True, "return_last_state": True}
        return modeling_mamba.mamba_selective_scan, by_token, others
    if name == "mamba2_chunk_scan":
        by_token = {"hidden_states": random(B, S, HEADS, V), "dt": random(B, S, HEADS)}
        by_token |= {"B": random(B, S, GROUPS, K), "C": random(B, S, GROUPS, K)}
        others = {"A": -random(HEADS).abs(), "D": random(HEADS), "dt_bias": random(HEADS)}
        others |= {"dt_softplus": True, "dt_limit": (0.2, 0.9), "chunk_size": 4}
        return modeling_mamba2.mamba2_chunk_scan, by_token, others | {"return_final_states": True}
    by_token = {"query": random(B, S, HEADS, K), "key": random(B, S, HEADS, K)}
    by_token |= {"value": random(B, S, HEADS, V), "beta": random(B, S, HEADS).sigmoid()}
    others = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    if name == "chunk_kimi_delta_attention":
        by_token["g"] = -random(B, S, HEADS, K).abs() / 4
        return modeling_kimi_linear.chunk_kimi_delta_attention, by_token, others
    by_token["g"] = -random(B, S, HEADS).abs()
    return modeling_olmo_hybrid.torch_chunk_gated_delta_rule, by_token, others


@pytest.mark.parametrize("name", RECURRENCES)
def test_a_recurrence_is_that_of_transformers(name: str) -> None:
    """In two pieces with padding between them; the second starts from the state after the first."""
    function, by_token, others = recurrence(name)
    axis = 2 if name == "mamba_selective_scan" else 1
    wanted, last = function(**by_token, **others)
    state, parts = None, []
    for begin, end, padding in ((0, 3, 2), (3, S, 0)):
        count = end - begin + padding
        real = torch.arange(count).expand(B, -1) < end - begin
        piece = {key: tensor.narrow(axis, begin, count) for key, tensor in by_token.items()}
        output, state = replacement(name, Chunk(real, state=state))(**piece, **others)
        parts.append(output.narrow(axis, 0, end - begin))
    torch.testing.assert_close(torch.cat(parts, axis), wanted, atol=1e-5, rtol=1e-4)
    assert state is not None
    last = last.transpose(2, 3) if name == "mamba2_chunk_scan" else last.reshape(state.shape)
    torch.testing.assert_close(state, last, atol=1e-5, rtol=1e-4)
    with pytest.raises(UnsupportedModelError, match="keeps a state of"):
        replacement(name, Chunk(state=state[..., :1, :]))(**by_token, **others)


def test_a_window_of_inputs_is_taken_once() -> None:
    """The newest of those that the layer keeps; zeros for the next convolution, and without any."""
    x, kept = torch.zeros(1, 2, 5), torch.arange(8.0).reshape(1, 2, 4)
    chunk = Chunk(window=kept)
    assert chunk.take_window(x, 3).tolist() == [[[1, 2, 3], [5, 6, 7]]]
    assert torch.equal(chunk.take_window(x, 3), torch.zeros(1, 2, 3))
    with pytest.raises(UnsupportedModelError, match="over 6 tokens keeps 4 of them"):
        Chunk(window=kept).take_window(x, 5)


@pytest.mark.parametrize("delta", [False, True])
def test_a_trace_has_the_operators(delta: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compute_operators(monkeypatch)
    tensors = [torch.from_numpy(one) for one in operands(delta=delta, by_row=not delta).values()]
    shapes = [(B, 5, 6), (5, 4), (5,), (B, 5, 3)]
    x, weight, bias, past = (torch.from_numpy(normal(*shape)) for shape in shapes)

    def both() -> tuple[torch.Tensor, ...]:
        convolved = causal_convolution(x, weight, bias if delta else None, past, silu=delta)
        return *linear_attention(*tensors, scale=SCALE), convolved

    eager = both()
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    torch.testing.assert_close(both(), eager, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_a_null_vector_of_a_released_model_s_size_has_a_norm(tmp_path: Path) -> None:
    """The export drops constants below 1e-8, and padding is null: the parity gate would see infinities."""
    model = random_model(
        "qwen3_5_text",
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        layer_types=["linear_attention", "full_attention"],
    )
    export_without_sampler(model, tmp_path / "package")
