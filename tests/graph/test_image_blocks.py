"""The tokens of an image see each other, against attention in NumPy by docs/contract.md, in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from qsample.errors import UnsupportedModelError
from qsample.graph.image_blocks import cut_image_blocks, see_whole_images

Array = np.ndarray
HEADS, KV, SIZE, CAPACITY = 4, 2, 32, 40
CELLS = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "int8": TensorProto.INT8}


@dataclass(frozen=True)
class Layer:
    """An attention, and its number in the model."""

    layer: int = 0
    window: int = 0
    softcap: float = 0.0
    packed: bool = False
    rotary: int = 0  # numbers of a head that the operator rotates
    interleaved: int = 0
    dtype: str = "float32"
    cache: str = ""

    @property
    def scales(self) -> tuple[Array, Array]:
        rng = np.random.default_rng(5)
        both = rng.uniform(0.01, 0.04, (2, 1, KV, 1, SIZE)).astype("f")
        return both[0], both[1]

    @property
    def angles(self) -> Array:
        return np.outer(
            np.arange(CAPACITY), 100.0 ** -(np.arange(self.rotary // 2) / (self.rotary // 2))
        )


def model_of(*layers: Layer) -> ir.Model:
    """One attention after the other over the same new tokens; the result of each is an output."""
    inputs: dict[str, tuple[int, list[Any]]] = {
        "image_rows": (TensorProto.INT32, ["B", "S"]),
        "input_lengths": (TensorProto.INT32, ["B"]),
    }
    inputs |= {
        "lengths": (TensorProto.INT32, ["B"]),
        "seqlens": (TensorProto.INT32, ["B"]),
        "total": (TensorProto.INT32, []),
    }
    outputs: dict[str, tuple[int, list[Any]]] = {}
    nodes, constants = [], []
    for one in layers:
        kind, cell, names = (
            CELLS[one.dtype],
            CELLS[one.cache or one.dtype],
            {"x": HEADS, "k": KV, "v": KV},
        )
        if one.packed:
            names = {"x": HEADS + 2 * KV}
        inputs |= {
            f"{name}{one.layer}": (kind, ["B", "S", heads * SIZE]) for name, heads in names.items()
        }
        states = {"key": "present.{}.key", "value": "present.{}.value"}
        for name, present in states.items():
            inputs[f"past_key_values.{one.layer}.{name}"] = (cell, ["B", KV, CAPACITY, SIZE])
            outputs[present.format(one.layer)] = (cell, ["B", KV, CAPACITY, SIZE])
        outputs[f"out{one.layer}"] = (kind, ["B", "S", HEADS * SIZE])
        read = [f"{name}{one.layer}" for name in names] + [""] * (3 - len(names))
        read += [f"past_key_values.{one.layer}.{name}" for name in states] + ["seqlens", "total"]
        extra: dict[str, Any] = {}
        if one.rotary:
            extra |= {"do_rotary": 1, "rotary_interleaved": one.interleaved}
            for name, table in (("cos", np.cos(one.angles)), ("sin", np.sin(one.angles))):
                constants.append(
                    onnx.numpy_helper.from_array(table.astype(one.dtype), f"{name}{one.layer}")
                )
        read += [f"cos{one.layer}", f"sin{one.layer}"] if one.rotary else ["", ""]
        if one.cache:
            extra |= {
                "k_quant_type": "PER_CHANNEL",
                "v_quant_type": "PER_CHANNEL",
                "kv_cache_bit_width": 8,
            }
            read += ["", "", "", f"ks{one.layer}", f"vs{one.layer}"]
            constants += [
                onnx.numpy_helper.from_array(s, f"{n}{one.layer}")
                for n, s in zip(("ks", "vs"), one.scales, strict=True)
            ]
        if one.window:
            extra["local_window_size"] = one.window
        made = [f"plain{one.layer}", *(present.format(one.layer) for present in states.values())]
        sizes: dict[str, Any] = {"num_heads": HEADS, "kv_num_heads": KV, "softcap": one.softcap}
        nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                read,
                made,
                f"attention{one.layer}",
                domain="com.microsoft",
                **sizes,
                **extra,
            )
        )
        nodes.append(
            helper.make_node("Identity", made[:1], [f"out{one.layer}"], f"identity{one.layer}")
        )
    before, after = (
        [helper.make_tensor_value_info(name, *of) for name, of in values.items()]
        for values in (inputs, outputs)
    )
    known: list[Any] = ["B", "S", HEADS * SIZE]
    plain = [
        helper.make_tensor_value_info(f"plain{one.layer}", CELLS[one.dtype], known)
        for one in layers
    ]
    graph = helper.make_graph(nodes, "g", before, after, constants, value_info=plain)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=10))


def rotated(one: Layer, states: Array, positions: Array) -> Array:
    """states: [heads, n, SIZE]."""
    angles, result = one.angles[positions], states.copy()
    half, part = one.rotary // 2, states[..., : one.rotary]
    first, second = (
        (part[..., 0::2], part[..., 1::2])
        if one.interleaved
        else (part[..., :half], part[..., half:])
    )
    pair = (
        first * np.cos(angles) - second * np.sin(angles),
        second * np.cos(angles) + first * np.sin(angles),
    )
    result[..., : one.rotary] = (
        np.stack(pair, -1).reshape(part.shape) if one.interleaved else np.concatenate(pair, -1)
    )
    return result


@dataclass(frozen=True)
class Call:
    """Rows of new tokens: how many tokens each has already, how many it gets, and where the runs begin and end."""

    lengths: list[int]
    new: list[int]
    runs: list[list[tuple[int, int]]]

    @property
    def rows(self) -> Array:
        rows = np.full((len(self.new), max(self.new)), -1, "i")
        for row, runs in zip(rows, self.runs, strict=True):
            for begin, end in runs:
                row[begin:end] = np.arange(end - begin)[::-1]
        for row, new in zip(rows, self.new, strict=True):
            row[new:] = 0  # padding may have any
        return rows


CALLS = {
    "prompts, padded": Call([0, 0], [12, 9], [[(2, 8)], [(1, 4), (5, 9)]]),
    "a run at the end, and a row without images": Call([0, 0], [5, 9], [[], [(4, 9)]]),
    "a later piece": Call([17], [11], [[(3, 9)]]),
    "nothing but a run": Call([7], [6], [[(0, 6)]]),
    "a piece of text": Call([17], [5], [[]]),
    "a step": Call([5, 9, 30], [1, 1, 1], [[], [], []]),
    "a step, over an image of one token": Call([5, 9, 30], [1, 1, 1], [[(0, 1)], [], []]),
}


def reference(one: Layer, call: Call, fed: dict[str, Array], row: int) -> Array:
    """[new, HEADS * SIZE] of a row, in float64."""
    n, before, window = call.new[row], call.lengths[row], one.window or 10**9
    parts = {"x": HEADS, "k": KV, "v": KV}
    if one.packed:
        whole = fed[f"x{one.layer}"][row, :n].astype("d").reshape(n, -1, SIZE)
        query, key, value = np.split(whole.transpose(1, 0, 2), [HEADS, HEADS + KV])
    else:
        query, key, value = (
            fed[f"{p}{one.layer}"][row, :n].astype("d").reshape(n, -1, SIZE).transpose(1, 0, 2)
            for p in parts
        )
    places = before + np.arange(n)
    if one.rotary:
        query, key = (rotated(one, states, places) for states in (query, key))
    past = [
        fed[f"past_key_values.{one.layer}.{kind}"][row, :, :before].astype("d")
        for kind in ("key", "value")
    ]
    if one.cache:
        past = [states * scale[0] for states, scale in zip(past, one.scales, strict=True)]
        key, value = (
            np.clip(np.round(s / c[0]), -128, 127) * c[0]
            for s, c in zip((key, value), one.scales, strict=True)
        )
    keys, values = (np.concatenate(pair, axis=1) for pair in zip(past, (key, value), strict=True))
    run_of = {
        place: (before + a, before + b)
        for a, b in call.runs[row]
        for place in range(before + a, before + b)
    }
    out = np.zeros((n, HEADS, SIZE))
    for index, place in enumerate(places):
        begin, end = run_of.get(int(place), (place, place))
        sees = [
            t for t in range(before + n) if (t <= place or begin <= t < end) and place - t < window
        ]
        for head in range(HEADS):
            scores = keys[head * KV // HEADS, sees] @ query[head, index] * SIZE**-0.5
            if one.softcap:
                scores = one.softcap * np.tanh(scores / one.softcap)
            weights = np.exp(scores - scores.max())
            out[index, head] = weights / weights.sum() @ values[head * KV // HEADS, sees]
    return out.reshape(n, -1)


def feeds(call: Call, *layers: Layer) -> dict[str, Array]:
    rng, (rows, new) = np.random.default_rng(0), call.rows.shape
    fed: dict[str, Array] = {
        "image_rows": call.rows,
        "input_lengths": np.array(call.new, "i"),
        "lengths": np.array(call.lengths, "i"),
    }
    fed["seqlens"] = fed["lengths"] + new - 1
    fed["total"] = np.array(CAPACITY if rows == 1 or new == 1 else new, "i")
    for one in layers:
        for name, heads in (
            {"x": HEADS + 2 * KV} if one.packed else {"x": HEADS, "k": KV, "v": KV}
        ).items():
            fed[f"{name}{one.layer}"] = rng.standard_normal((rows, new, heads * SIZE)).astype(
                one.dtype
            )
        for kind in ("key", "value"):
            if one.cache:
                states = rng.integers(-128, 128, (rows, KV, CAPACITY, SIZE), dtype=np.int8)
            else:
                states = rng.standard_normal((rows, KV, CAPACITY, SIZE)).astype(one.dtype)
                for row, length in enumerate(
                    call.lengths
                ):  # memory beyond a row's tokens may hold anything
                    states[row, :, length:] = np.nan
            fed[f"past_key_values.{one.layer}.{kind}"] = states
    return fed


def run(model: ir.Model, fed: dict[str, Array]) -> dict[str, Array]:
    """The results that are no states; these are updated in place, as hosts do."""
    session = ort.InferenceSession(
        ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    values, binding = (
        {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in fed.items()},
        session.io_binding(),
    )
    for value in session.get_inputs():
        binding.bind_ortvalue_input(value.name, values[value.name])
    names = [value.name for value in session.get_outputs()]
    for name in names:
        if name.startswith("present"):
            binding.bind_ortvalue_output(name, values[name.replace("present", "past_key_values")])
        else:
            binding.bind_output(name)
    session.run_with_iobinding(binding)
    return dict(zip(names, binding.copy_outputs_to_cpu(), strict=True))


LAYERS = {
    "plain": Layer(),
    "window": Layer(window=4),
    "capped": Layer(softcap=3.0, window=7),
    "packed, rotated": Layer(packed=True, rotary=32, window=5),
    "half rotated, pairs side by side": Layer(rotary=16, interleaved=1),
    "float16": Layer(dtype="float16", packed=True, rotary=32),
    "int8 cache": Layer(cache="int8", packed=True, rotary=32, window=5),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_image_tokens_see_their_run(call: Call) -> None:
    layers = [replace(one, layer=number) for number, one in enumerate(LAYERS.values())]
    fed = feeds(call, *layers)
    causal, whole = model_of(*layers), model_of(*layers)
    assert see_whole_images(whole, [one.layer for one in layers])
    before, after = run(causal, fed), run(whole, fed)
    for one in layers:
        tolerance = 4e-3 if one.dtype == "float16" else 2e-5 if one.cache else 2e-6
        for row, new in enumerate(call.new):
            got = after[f"out{one.layer}"][row, :new]
            np.testing.assert_allclose(
                got, reference(one, call, fed, row), atol=tolerance, rtol=tolerance
            )
            text = call.rows[row, :new] < 0
            np.testing.assert_array_equal(got[text], before[f"out{one.layer}"][row, :new][text])


def test_calls_of_text_ask_one_question() -> None:
    """ReduceMax and a comparison, and the Ifs pass results on."""
    model = model_of(Layer(), Layer(layer=3))
    assert see_whole_images(model, [3])
    added = [node for node in model.graph if str(node.name).startswith("image_blocks")]
    assert [node.op_type for node in added] == ["ReduceMax", "GreaterOrEqual", "If", "If"]
    (passed_on,) = added[-1].attributes["else_branch"].as_graph()
    assert passed_on.op_type == "Identity"
    assert [node.op_type for node in model.graph if node not in added] == [
        "GroupQueryAttention",
        "Identity",
    ] * 2


def test_what_was_added_can_be_taken_out() -> None:
    model, plain = (model_of(Layer(layer=1), Layer(layer=2)) for _ in range(2))
    see_whole_images(model, [2])
    assert cut_image_blocks(model) == [2]
    assert cut_image_blocks(model) == []
    assert str(ir.to_proto(model).graph.node) == str(ir.to_proto(plain).graph.node)


def test_other_attentions_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="layers 7, which have no GroupQueryAttention"):
        see_whole_images(model_of(Layer()), [0, 7])
    model = model_of(Layer(dtype="float16"))
    node = model.graph[0]
    node.resize_inputs(12)
    node.replace_input_with(11, ir.Value(name="sinks"))
    with pytest.raises(UnsupportedModelError, match="a sink"):
        see_whole_images(model, [0])
