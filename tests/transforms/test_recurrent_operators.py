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

from qsample.contract.arrays import Array
from qsample.transforms.recurrent_operators import causal_convolution, linear_attention
from tests.helpers.small_graphs import normal
from tests.helpers.tiny_models import export_without_sampler, random_model

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
