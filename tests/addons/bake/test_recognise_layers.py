"""Graphs of a few nodes: the layers, states and sizes that are recognised in them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from qsample.addons.bake.conventions import ForeignGraph
from qsample.addons.bake.recognise import recognise
from qsample.errors import UnsupportedModelError
from tests.helpers.small_decoders import ATTENTION, CACHE, GQA, attending, model

PATH = Path("folder/model.onnx")
FLOAT, HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16
INT32, INT64 = ir.DataType.INT32, ir.DataType.INT64


def read(made: ir.Model, **options: Any) -> ForeignGraph:
    return recognise(PATH, made, **options)


def value(made: ir.Model, name: str) -> ir.Value:
    found = [*made.graph.inputs, *(output for node in made.graph for output in node.outputs)]
    return next(each for each in found if each.name == name)


def test_a_layer_of_group_query_attention() -> None:
    made = attending()
    found = read(made)
    (layer,) = found.layers
    assert (found.path, found.model, found.vocab_size, found.dtype) == (PATH, made, 7, FLOAT)
    assert (found.changed, found.recurrences, found.size) == (False, (), None)
    assert found.logits is made.graph.outputs[0]
    assert [each.name for each in layer.pasts] == ["past_0_key", "past_0_value"]
    assert [each.name for each in layer.presents] == ["present_0_key", "present_0_value"]
    assert (layer.number, layer.heads, layer.head_dim) == (0, 2, 4)
    assert (layer.ring, layer.size, layer.new, layer.new_is_flat) == (None, None, None, False)
    assert layer.attention is not None
    assert layer.attention.op_type == "GroupQueryAttention"
    assert layer.shape(5) == (1, 2, 5, 4)
    assert found.input("past_0_key") is layer.past_key
    assert found.input("position_ids") is None


@pytest.mark.parametrize(
    ("more", "ring"),
    [
        (", local_window_size=16", None),
        (", sliding_window_cache=1, local_window_size=16", 16),
        (", sliding_window_cache=0, local_window_size=16", None),
        (", sliding_window_cache=1", -1),
    ],
)
def test_a_cache_that_is_a_ring(more: str, ring: int | None) -> None:
    node = f"{GQA.format(more=more)} (q, k, v, past_0_key, past_0_value)"
    assert read(attending([node])).layers[0].ring == ring


def test_layers_are_ordered_by_the_numbers_in_their_names() -> None:
    nodes = [f"{GQA.format(more='')} (q, k, v, past_{n}_key, past_{n}_value)" for n in (11, 3)]
    found = read(attending(nodes, [11, 3]))
    assert [layer.number for layer in found.layers] == [3, 11]
    assert [layer.past_key.name for layer in found.layers] == ["past_3_key", "past_11_key"]
    nodes = [f"{GQA.format(more='')} (q, k, v, past_{n}_key, past_{n}_value)" for n in ("b", "a")]
    unnumbered = read(attending(nodes, ["b", "a"])).layers
    assert [(layer.number, layer.past_key.name) for layer in unnumbered] == [
        (0, "past_b_key"),
        (1, "past_a_key"),
    ]


OPEN = "float[B,2,P,D]"  # a cache that does not say the size of a head


def packed(heads: int = 4) -> str:
    return f"com.microsoft.GroupQueryAttention<num_heads={heads}, kv_num_heads=2>(q, , , past_0_key, past_0_value)"


@pytest.mark.parametrize(
    ("node", "widths", "size"),
    [
        (ATTENTION, {"k": ["B", "S", 12]}, 6),  # of 2 heads of keys
        (ATTENTION, {"k": ["B", "S", 12], "q": ["B", "S", 99]}, 6),
        (packed(), {"q": ["B", "S", 40]}, 5),  # of 4 + 2 + 2 heads
        (ATTENTION.replace(", k,", ", m,"), {}, 4),  # m has 8 columns
        (ATTENTION, {}, 32),  # what the configuration says
        (ATTENTION, {"k": ["B", "S", "W"]}, 32),
        (ATTENTION, {"k": ["B", 12]}, 32),
        (ATTENTION.replace("kv_num_heads=2", "kv_num_heads=0"), {"k": ["B", "S", 12]}, 32),
        (ATTENTION.replace(", k,", ", n,"), {}, 32),  # a product with one column has no 2 heads
    ],
)
def test_the_size_of_a_head(node: str, widths: dict[str, list[Any]], size: int) -> None:
    end = "logits = MatMul(x, head)"
    made = attending([node], cache=OPEN, end=end)
    for name, dims in widths.items():
        value(made, name).shape = ir.Shape(dims)
    (attention,) = (each for each in made.graph if each.op_type == "GroupQueryAttention")
    for name, columns in (("m", 8), ("n", 1)):
        key = attention.inputs[1]
        if key is not None and key.name == name:
            weight = ir.Value(name="w", shape=ir.Shape([8, columns]))
            product = ir.node("MatMul", [value(made, "x"), weight])
            attention.replace_input_with(1, product.outputs[0])
            made.graph.insert_before(attention, product)
    assert read(made, head_dim=32).layers[0].head_dim == size


def test_a_size_of_heads_that_nothing_states() -> None:
    with pytest.raises(UnsupportedModelError, match="no file states the size of its heads"):
        read(attending(cache=OPEN))
    assert read(attending(), head_dim=32).layers[0].head_dim == 4  # the graph's comes first


@pytest.mark.parametrize(
    ("node", "why"),
    [
        (
            ATTENTION.replace(", past_0_key, past_0_value", ""),
            "shares its cache with another layer, or has",
        ),
        (ATTENTION.replace("past_0_key", "k"), "shares its cache with another layer"),
        (ATTENTION.replace("past_0_value", "v"), "shares its cache with another layer"),
        (ATTENTION.replace("past_0_key, past_0_value", "past_0_key"), "shares its cache"),
    ],
)
def test_a_layer_without_a_cache_of_its_own(node: str, why: str) -> None:
    with pytest.raises(UnsupportedModelError, match=why):
        read(attending([node]))


@pytest.mark.parametrize("lost", [1, 2])
def test_a_layer_that_does_not_return_its_cache(lost: int) -> None:
    made = attending()
    made.graph.outputs.pop(lost)
    with pytest.raises(UnsupportedModelError, match="does not return its cache"):
        read(made)


def test_a_layer_of_one_output_does_not_return_its_cache() -> None:
    made = model(
        f"a = {GQA.format(more='')} (x, x, x, past_0_key, past_0_value) logits = MatMul(x, head)",
        f"{CACHE} past_0_key, {CACHE} past_0_value",
        "",
    )
    with pytest.raises(UnsupportedModelError, match="does not return its cache"):
        read(made)


def test_a_state_that_no_attention_reads() -> None:
    made = attending(inputs=f"{CACHE} past_1_key")
    with pytest.raises(
        UnsupportedModelError, match="its input past_1_key is a state that no attention"
    ):
        read(made)


# Layers of plain operators, whose caches grow by a Concat.

GROWING = (
    "k = Abs(x) v = Exp(x) present_0_key = Concat<axis=2>(past_0_key, k) "
    "present_0_value = Concat<axis=2>(past_0_value, v) logits = MatMul(x, head)"
)
PASTS = f"{CACHE} past_0_key, {CACHE} past_0_value"
PRESENTS = "float[B,2,T,4] present_0_key, float[B,2,T,4] present_0_value"


def test_a_layer_whose_cache_grows() -> None:
    (layer,) = read(model(GROWING, PASTS, PRESENTS)).layers
    assert [each.name for each in layer.pasts] == ["past_0_key", "past_0_value"]
    assert [each.name for each in layer.presents] == ["present_0_key", "present_0_value"]
    assert (layer.number, layer.heads, layer.head_dim, layer.attention) == (0, 2, 4, None)
    assert (layer.size, layer.new_is_flat) == (None, False)
    assert layer.new is not None
    assert [each.name for each in layer.new] == ["k", "v"]


def test_keys_and_values_are_told_apart_by_name_and_paired_by_number() -> None:
    """Names such as past_key_values.0.value have both words; the order of the inputs says nothing."""
    names = ["past_key_values_1_value", "past_key_values_0_value", "past_key_values_0_key"]
    names += ["past_key_values_1_key"]
    body = " ".join(f"out_{name} = Concat<axis=2>({name}, x)" for name in names)
    made = model(
        f"{body} logits = MatMul(x, head)",
        ", ".join(f"{CACHE} {name}" for name in names),
        ", ".join(f"float[B,2,T,4] out_{name}" for name in names),
    )
    found = read(made).layers
    assert [(layer.number, *(each.name for each in layer.pasts)) for layer in found] == [
        (0, "past_key_values_0_key", "past_key_values_0_value"),
        (1, "past_key_values_1_key", "past_key_values_1_value"),
    ]


def test_caches_without_numbers_are_paired_by_their_order() -> None:
    names = ["key_a", "value_a", "key_b", "value_b"]
    body = " ".join(f"out_{name} = Concat<axis=2>({name}, x)" for name in names)
    made = model(
        f"{body} logits = MatMul(x, head)",
        ", ".join(f"{CACHE} {name}" for name in names),
        ", ".join(f"float[B,2,T,4] out_{name}" for name in names),
    )
    found = [(each.number, *(past.name for past in each.pasts)) for each in read(made).layers]
    assert found == [(0, "key_a", "value_a"), (1, "key_b", "value_b")]


def test_a_layer_of_onnx_attention() -> None:
    for attributes, is_flat in (("", False), ("<q_num_heads=4, kv_num_heads=2>", True)):
        body = (
            "q = Neg(x) k = Abs(x) v = Exp(x) a, present_0_key, present_0_value = "
            f"Attention{attributes}(q, k, v, , past_0_key, past_0_value) logits = MatMul(x, head)"
        )
        (layer,) = read(model(body, PASTS, PRESENTS, opset=23)).layers
        assert layer.new is not None
        assert [each.name for each in layer.new] == ["k", "v"]
        assert [each.name for each in layer.presents] == ["present_0_key", "present_0_value"]
        assert (layer.new_is_flat, layer.heads, layer.head_dim, layer.size) == (is_flat, 2, 4, None)


def scattering(
    *,
    attributes: tuple[str, str] = ("<axis=2>", "<axis=-2>"),
    start: str = ", write_indices",
    cache: str = "float[B,2,48,4]",
    inputs: str = "int64[B] write_indices",
    attention: str = "",
) -> ir.Model:
    key, value = attributes
    body = (
        f"k = Abs(x) v = Exp(x) present_0_key = TensorScatter{key}(past_0_key, k{start}) "
        f"present_0_value = TensorScatter{value}(past_0_value, v{start}) {attention} logits = MatMul(x, head)"
    )
    states = ", ".join(f"{cache} past_0_{side}" for side in ("key", "value"))
    return model(body, f"{states}, {inputs}", states.replace("past", "present"), opset=24)


def test_a_cache_of_fixed_size() -> None:
    found = read(scattering())
    (layer,) = found.layers
    assert (layer.size, layer.heads, layer.head_dim, found.size) == (48, 2, 4, 48)
    assert (layer.new_is_flat, layer.shape(5)) == (False, (1, 2, 48, 4))
    assert layer.new is not None
    assert [each.name for each in layer.new] == ["k", "v"]
    assert [each.name for each in layer.presents] == ["present_0_key", "present_0_value"]
    assert read(scattering(attributes=("", '<mode="linear">'))).layers[0].size == 48


def test_a_flat_cache_of_fixed_size() -> None:
    attention = "a = Attention<q_num_heads=4, kv_num_heads=2>(x, present_0_key, present_0_value)"
    flat = {"cache": "float[B,48,8]", "attributes": ("<axis=1>", "<axis=-2>")}
    (layer,) = read(scattering(attention=attention, **flat)).layers
    assert (layer.size, layer.heads, layer.head_dim, layer.new_is_flat) == (48, 2, 4, True)
    assert layer.shape(5) == (1, 48, 8)
    two = (
        attention
        + " b = Attention<q_num_heads=4, kv_num_heads=4>(x, present_0_key, present_0_value)"
    )
    for wrong in ("", attention.replace(", kv_num_heads=2", ""), two):
        with pytest.raises(
            UnsupportedModelError, match="past_0_key has no fixed number and size of heads"
        ):
            read(scattering(attention=wrong, **flat))


@pytest.mark.parametrize(
    "changes",
    [
        {"start": ""},
        {"start": ", x"},
        {"attributes": ('<mode="circular">', "")},
        {"attributes": ("<axis=1>", "<axis=1>")},
        {"attributes": ("<axis=3>", "<axis=3>")},
        {"cache": "float[B,2,P,4]"},
    ],
)
def test_a_scatter_that_writes_otherwise(changes: dict[str, Any]) -> None:
    with pytest.raises(
        UnsupportedModelError, match="its cache past_0_key is not one that a Concat or"
    ):
        read(scattering(**changes))


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("Concat<axis=2>(past_0_key, k)", "Concat<axis=2>(k, past_0_key)", "cache past_0_key is not one"),
        ("Concat<axis=2>(past_0_key, k)", "Concat<axis=2>(past_0_key, k, k)", "cache past_0_key is not"),
        ("Concat<axis=2>(past_0_value, v)", "Add(past_0_value, v)", "cache past_0_value is not one"),
        ("past_0_value", "past_1_value", "it has not as many caches of keys as of values"),
        ("past_0_key", "past_0_state", "the name past_0_state says neither key nor value"),
        ("past_0_value", "past_key_values_0", "the name past_key_values_0 says neither key nor value"),
        ("float[B,2,P,4] past_0_key", "float[B,H,P,4] past_0_key", "past_0_key has no fixed number"),
        ("float[B,2,P,4] past_0_key", "float[B,2,P,D] past_0_key", "past_0_key has no fixed number"),
        ("float[B,2,P,4] past_0_key", "float[B,P,8] past_0_key", "past_0_key is neither a known input"),
        ("float[B,2,P,4] past_0_key", "float[B] past_0_key", "past_0_key is neither a known input nor"),
        ("float[B,2,P,4] past_0_key", "float16[B,2,P,4] past_0_key", "its cache is FLOAT, FLOAT16; th"),
        ("float[B,2,P,4] past_0_value", "float16[B,2,P,4] past_0_value", "its cache is FLOAT, FLOAT16"),
        ("float[B,2,P,4]", "bfloat16[B,2,P,4]", "its cache is BFLOAT16; this machine's CPU checks"),
        ("past_0_", "past_conv_", "recurrent states, and past_conv_key is not that of a LinearAttention"),
        ("past_0_", "past_ssm_", "it has recurrent states, and past_ssm_key is not that of"),
    ],
)  # fmt: skip
def test_caches_that_do_not_fit(old: str, new: str, why: str) -> None:
    body, pasts = GROWING.replace(old, new), PASTS.replace(old, new)
    with pytest.raises(UnsupportedModelError, match=why):
        read(model(body, pasts, PRESENTS))


@pytest.mark.parametrize("lost", [1, 2])
def test_a_cache_that_is_not_returned(lost: int) -> None:
    made = model(GROWING, PASTS, PRESENTS)
    made.graph.outputs.pop(lost)
    with pytest.raises(UnsupportedModelError, match="and whose new value is an output"):
        read(made)


def test_float16_caches() -> None:
    half = [text.replace("float[", "float16[") for text in (PASTS, PRESENTS)]
    assert read(model(GROWING, *half)).dtype == HALF


def test_a_graph_without_caches() -> None:
    with pytest.raises(
        UnsupportedModelError, match="it has no cache; take the file with past_key_values"
    ):
        read(model("logits = MatMul(x, head)", "", ""))
    every_call = "int64[B,T] attention_mask, int64[B,S] position_ids, int64 num_logits_to_keep"
    with pytest.raises(UnsupportedModelError, match="it has no cache"):
        read(model("logits = MatMul(x, head)", every_call, ""))


# Recurrent states.

CONV = "com.microsoft.CausalConvWithState(x, w, , past_conv_1)"
LINEAR = "com.microsoft.LinearAttention(x, x, x, past_recurrent_0)"
STATES = "float[B,8,3] past_conv_1, float16[B,2,4,5] past_recurrent_0"
NEXT = "float[B,8,3] present_conv_1, float16[B,2,4,5] present_recurrent_0"


def recurrent(body: str = "", states: str = STATES) -> ir.Model:
    nodes = f"c, present_conv_1 = {CONV} l, present_recurrent_0 = {LINEAR}".replace(", w,", ", x,")
    return model(f"{body or nodes} {GROWING}", f"{states}, {PASTS}", f"{NEXT}, {PRESENTS}")


def test_recurrences_in_the_order_of_their_layers() -> None:
    found = read(recurrent()).recurrences
    assert [(each.number, each.kind, each.shape, each.dtype) for each in found] == [
        (0, "recurrent_state", (2, 4, 5), HALF),
        (1, "conv_state", (8, 3), FLOAT),
    ]
    assert [(each.past.name, each.present.name, each.node.op_type) for each in found] == [
        ("past_recurrent_0", "present_recurrent_0", "LinearAttention"),
        ("past_conv_1", "present_conv_1", "CausalConvWithState"),
    ]


@pytest.mark.parametrize(
    ("states", "why"),
    [
        (STATES.replace("[B,8,3]", "[B,8,K]"), "its state past_conv_1 has no fixed shape"),
        (STATES.replace("[B,8,3]", "[B]"), "its state past_conv_1 has no fixed shape"),
        (
            STATES.replace("float16", "bfloat16"),
            "its state past_recurrent_0 has no fixed shape, or is not",
        ),
    ],
)
def test_states_that_do_not_fit(states: str, why: str) -> None:
    with pytest.raises(UnsupportedModelError, match=why):
        read(recurrent(states=states))


def test_states_that_are_not_kept() -> None:
    conv = "c, present_conv_1 = com.microsoft.CausalConvWithState(x, x, , past_conv_1)"
    linear = f"l, present_recurrent_0 = {LINEAR}"
    bodies = [
        f"{conv.replace(', , past_conv_1', '')} {linear}",  # no state enters
        f"{conv.replace('c, present_conv_1', 'c')} {linear}",  # none leaves
        f"{conv.replace('present_conv_1', 'other')} {linear}",  # it is no output
        f"{conv.replace(', past_conv_1', ', x')} {linear}",  # it is no input
        f"{conv} {linear} twice = Abs(past_conv_1)",  # another node reads it
    ]
    for body in bodies:
        with pytest.raises(UnsupportedModelError, match="does not keep a state of its own"):
            read(recurrent(body))


# Inputs, outputs and sizes.


@pytest.mark.parametrize(
    ("options", "stated", "size"),
    [
        ({}, 99, 7),
        ({"logits": "float[B,S,V] logits"}, 99, 7),  # the columns of the head
        (
            {"logits": "float[B,S,V] logits", "end": "m = MatMul(x, head) logits = Cast<to=1>(m)"},
            99,
            7,
        ),
        (
            {
                "logits": "float[B,S,V] logits",
                "end": "m = MatMul(x, head) d = Div(m, two) t = Tanh(d) u = Mul(two, t) logits = Identity(u)",
            },
            99,
            7,
        ),
        ({"logits": "float[B,S,V] logits", "end": "logits = FusedMatMul(x, head)"}, 99, 7),
        ({"logits": "float[B,S,V] logits", "end": "logits = Gemm(x, head)"}, 99, 7),
        ({"logits": "float[B,S,V] logits", "end": "logits = Gemm<transB=0>(x, head)"}, 99, 7),
        ({"logits": "float[B,S,V] logits", "end": "logits = Gemm<transB=1>(x, table)"}, 99, 9),
        (
            {
                "logits": "float[B,S,V] logits",
                "end": "logits = com.microsoft.MatMulNBits<N=5>(x, head)",
            },
            99,
            5,
        ),
        (
            {"logits": "float[B,S,V] logits", "end": "logits = com.microsoft.MatMulNBits(x, head)"},
            99,
            99,
        ),
        ({"logits": "float[B,S,V] logits", "end": "logits = MatMul(x, x)"}, 99, 99),
        (
            {"logits": "float[B,S,V] logits", "end": "m = MatMul(x, head) logits = Add(m, x)"},
            99,
            99,
        ),
        ({"logits": "float[B,S,V] logits", "end": "logits = Cast<to=1>(input_ids)"}, 99, 99),
    ],
)
def test_the_size_of_the_vocabulary(options: dict[str, str], stated: int, size: int) -> None:
    assert read(attending(**options), vocab_size=stated).vocab_size == size


def test_a_size_of_the_vocabulary_that_nothing_states() -> None:
    made = attending(logits="float[B,S,V] logits", end="logits = MatMul(x, x)")
    with pytest.raises(UnsupportedModelError, match="no file states the size of its vocabulary"):
        read(made)


def test_no_logits() -> None:
    made = attending(logits="float[B,S,7] scores", end="scores = MatMul(x, head)")
    with pytest.raises(
        UnsupportedModelError,
        match="no output logits, only scores, present_0_key, present_0_value; take the decoder with",
    ):
        read(made)


@pytest.mark.parametrize("opset", [13, 14, 24, 25])
def test_the_oldest_and_the_newest_opset(opset: int) -> None:
    made = attending(opset=opset)
    if 14 <= opset <= 24:
        assert read(made).vocab_size == 7
    else:
        with pytest.raises(
            UnsupportedModelError, match=f"its opset is {opset}; export it with 14 to 24"
        ):
            read(made)


@pytest.mark.parametrize(
    ("ids", "why"),
    [
        ("int64[2,S] input_ids", "its number of rows is fixed; export it for any number of both"),
        ("int64[B,1] input_ids", "its number of tokens is fixed"),
        ("int64[2,3] input_ids", "its number of rows and tokens is fixed"),
    ],
)
def test_ids_of_fixed_size(ids: str, why: str) -> None:
    with pytest.raises(UnsupportedModelError, match=why):
        read(attending(ids=ids))


def test_no_ids() -> None:
    made = attending()
    made.graph.inputs[0].name = "tokens"
    with pytest.raises(
        UnsupportedModelError, match="no input input_ids, only tokens, past_0_key, past_0_value"
    ):
        read(made)


def test_ids_and_positions_of_int32_become_int64() -> None:
    made = attending(
        ids="int32[B,S] input_ids",
        inputs="int32[B,S] position_ids, int32[B,T] attention_mask",
        end="p = Abs(position_ids) m = Abs(attention_mask) logits = MatMul(x, head)",
    )
    found = read(made)
    assert found.changed
    types = {
        name: found.input(name).dtype for name in ("input_ids", "position_ids", "attention_mask")
    }  # type: ignore[union-attr]
    assert types == {"input_ids": INT64, "position_ids": INT64, "attention_mask": INT32}
    for reader, name, shape in (("x", "input_ids", "[B,S]"), ("p", "position_ids", "[B,S]")):
        node = value(made, reader).producer()
        assert node is not None
        narrow = node.inputs[-1]
        assert narrow is not None
        assert (narrow.name, narrow.dtype, str(narrow.shape)) == (f"{name}.int32", INT32, shape)
        cast = narrow.producer()
        assert cast is not None
        assert (cast.op_type, cast.attributes.get_int("to"), cast.inputs[0]) == (
            "Cast",
            INT32,
            found.input(name),
        )
        assert [*made.graph].index(cast) < [*made.graph].index(node)
    mask = value(made, "m").producer()
    assert mask is not None
    assert mask.inputs[0] is found.input("attention_mask")


CASTS = (
    "hk = Cast<to=10>(past_0_key) hv = Cast<to=10>(past_0_value) "
    "pk = Concat<axis=2>(hk, x) pv = Concat<axis=2>(hv, x) "
    "present_0_key = Cast<to=1>(pk) present_0_value = Cast<to=1>(pv) logits = MatMul(x, head)"
)


def test_caches_that_the_graph_casts_to_float16_become_float16() -> None:
    made = model(CASTS, PASTS, PRESENTS)
    found = read(made)
    assert (found.changed, found.dtype) == (True, HALF)
    assert [(each.name, each.dtype) for each in made.graph.inputs[1:]] == [
        ("past_0_key", HALF),
        ("past_0_value", HALF),
    ]
    assert [(each.name, each.dtype, str(each.shape)) for each in made.graph.outputs[1:]] == [
        ("present_0_key", HALF, "[B,2,T,4]"),
        ("present_0_value", HALF, "[B,2,T,4]"),
    ]
    producers = [each.producer() for each in made.graph.outputs[1:]]
    assert [node.op_type for node in producers if node is not None] == ["Concat", "Concat"]
    assert [node.inputs[0] for node in producers if node is not None] == [*made.graph.inputs[1:]]
    assert made.graph.outputs[0].dtype == FLOAT


def test_logits_keep_their_cast() -> None:
    body = CASTS.replace("logits = MatMul(x, head)", "m = MatMul(x, head) logits = Cast<to=1>(m)")
    made = model(body, PASTS, PRESENTS)
    read(made)
    logits = made.graph.outputs[0]
    assert (logits.name, logits.dtype) == ("logits", FLOAT)
    producer = logits.producer()
    assert producer is not None
    assert producer.op_type == "Cast"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("to=10", "to=11"),  # casts to another type
        ("hk = Cast<to=10>(past_0_key)", "hk = Abs(past_0_key)"),
        ("hk = Cast<to=10>(past_0_key)", "hk = Cast<to=10>(past_0_key) other = Abs(past_0_key)"),
    ],
)
def test_caches_that_are_read_otherwise_stay_float32(old: str, new: str) -> None:
    made = model(CASTS.replace(old, new), PASTS, PRESENTS)
    with pytest.raises(UnsupportedModelError):  # of no layer: the Concat has another input
        read(made)
    assert made.graph.inputs[1].dtype == FLOAT


def test_a_constant_with_a_default_is_no_input() -> None:
    made = attending()
    made.graph.inputs.append(made.graph.initializers["head"])
    assert read(made).changed
    assert "head" not in [each.name for each in made.graph.inputs]


def test_scalars_that_only_pass_through_are_dropped() -> None:
    made = attending(
        inputs="int64 window", end="window_out = Identity(window) logits = MatMul(x, head)"
    )
    made.graph.outputs.append(value(made, "window_out"))
    assert read(made).changed
    assert "window" not in [each.name for each in made.graph.inputs]
    assert "window_out" not in [each.name for each in made.graph.outputs]
    assert "Identity" not in [node.op_type for node in made.graph]


@pytest.mark.parametrize(
    ("inputs", "end", "is_output"),
    [
        ("int64[1] window", "w = Identity(window)", True),  # no scalar
        ("int64 window", "w = Identity(window) other = Abs(window)", True),  # with another use
        ("int64 window", "w = Abs(window)", True),  # that is no copy
        ("int64 window", "w = Identity(window)", False),  # that is no output
    ],
)
def test_other_inputs_stay(inputs: str, end: str, is_output: bool) -> None:
    made = attending(inputs=inputs, end=f"{end} logits = MatMul(x, head)")
    if is_output:
        made.graph.outputs.append(value(made, "w"))
    with pytest.raises(UnsupportedModelError, match="its input window is neither a known input"):
        read(made)


@pytest.mark.parametrize(
    ("files", "advice"),
    [
        ((), "; take its q4, fp16 or fp32 file"),
        (
            ("model_int8.onnx", "model_uint8.onnx", "model_quantized.onnx", "notes.txt"),
            "; take its q4",
        ),
        (
            ("e.onnx", "d.onnx", "c.onnx", "b.onnx", "a.onnx"),
            "; take a.onnx, b.onnx, c.onnx, d.onnx$",
        ),
    ],
)
def test_files_beside_one_that_quantizes_activations(
    files: tuple[str, ...], advice: str, tmp_path: Path
) -> None:
    for name in (*files, "model.onnx"):
        (tmp_path / name).touch()
    made = attending(end="s = DynamicQuantizeLinear(x) logits = MatMul(x, head)")
    with pytest.raises(UnsupportedModelError, match=rf"\(DynamicQuantizeLinear\).*{advice}"):
        recognise(tmp_path / "model.onnx", made)


def test_a_cache_under_an_if() -> None:
    """A merged decoder without use_cache_branch. Calls, such as the mask, may be read there."""
    for read_inside, is_refused in (("past_0_key", True), ("attention_mask", False)):
        branch = f"g () => (y) {{ y = Shape({read_inside}) }}"
        made = attending(
            inputs="int64[B,T] attention_mask, bool position_ids",
            end=f"i = If(position_ids) <then_branch = {branch}, else_branch = {branch}> logits = MatMul(x, head)",
        )
        if is_refused:
            with pytest.raises(
                UnsupportedModelError, match="it has a cache under an If: a merged decoder"
            ):
                read(made)
        else:
            assert len(read(made).layers) == 1


@pytest.mark.parametrize(
    ("node", "is_refused"),
    [
        ("com.microsoft.MultiHeadAttention<num_heads=2>(x, x, x)", False),
        ("com.microsoft.MultiHeadAttention<num_heads=2>(x, x, x, , , x)", False),
        ("com.microsoft.MultiHeadAttention<num_heads=2, unidirectional=0>(x, x, x)", False),
        ("com.microsoft.MultiHeadAttention<num_heads=2, unidirectional=1>(x, x, x)", True),
        ("com.microsoft.MultiHeadAttention<num_heads=2>(x, x, x, x)", True),  # an input bias
        ("com.microsoft.MultiHeadAttention<num_heads=2>(x)", True),  # packed
        ("com.microsoft.Attention<num_heads=2>(x, x, x)", True),
        ("Attention(x, x, x)", False),
    ],
)
def test_attentions_of_onnx_runtime(node: str, is_refused: bool) -> None:
    made = model(f"h = {node} {GROWING}", PASTS, PRESENTS)
    if is_refused:
        with pytest.raises(UnsupportedModelError, match=r"it attends through \w+; only GroupQuery"):
            read(made)
    else:
        assert len(read(made).layers) == 1


def test_an_attention_with_its_own_cache_is_refused() -> None:
    body = "h, pk, pv = com.microsoft.MultiHeadAttention<num_heads=2>(x, x, x)"
    with pytest.raises(UnsupportedModelError, match="it attends through MultiHeadAttention"):
        read(model(f"{body} {GROWING}", PASTS, PRESENTS))
