"""The rows of a batch in a graph of a few nodes: what each new value holds, in runs; and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample.addons.bake import rows as module
from qsample.addons.bake.conventions import ForeignGraph, Layer
from qsample.addons.bake.recognise import recognise
from qsample.addons.bake.rows import (
    Nodes,
    add_rows,
    check_free_of_sizes,
    choose_table,
    keep_states,
    select_last,
    use_row_positions,
)
from qsample.errors import QsampleError, UnsupportedModelError
from tests.addons.bake.test_recognise_layers import PATH, recurrent
from tests.helpers.small_decoders import model

INT32, INT64, FLOAT = ir.DataType.INT32, ir.DataType.INT64, ir.DataType.FLOAT


def foreign_of(made: ir.Model, **options: Any) -> ForeignGraph:
    values = {value.name: value for value in made.graph.inputs}
    key, value = values["past_0_key"], values["past_0_value"]
    layer = Layer(0, key, value, ir.Value(name="k"), ir.Value(name="v"), 2, 4)
    return ForeignGraph(PATH, made, (layer,), made.graph.outputs[0], 7, FLOAT, **options)


def decoder(
    body: str = "logits = MatMul(x, head)", more: str = "", logits: str = ""
) -> ForeignGraph:
    inputs = f"float[B,2,T,4] past_0_key, float[B,2,T,4] past_0_value{more}"
    return foreign_of(model(body, inputs, "", logits=logits or "float[B,S,7] logits"))


def run(
    foreign: ForeignGraph, outputs: list[ir.Value], new_inputs: list[ir.Value], **given: Any
) -> list[Any]:
    graph = foreign.graph
    graph.inputs.extend(new_inputs)
    graph.outputs.clear()
    for index, value in enumerate(outputs):
        copy = ir.node("Identity", [value])
        copy.outputs[0].name, copy.outputs[0].type = f"out_{index}", value.type
        graph.append(copy)
        graph.outputs.append(copy.outputs[0])
    graph.sort()
    content = ir.to_proto(foreign.model).SerializeToString()
    session = ort.InferenceSession(content, providers=["CPUExecutionProvider"])
    named = {value.name for value in session.get_inputs()}
    found: list[Any] = session.run(
        None, {name: value for name, value in given.items() if name in named}
    )
    return found


def caches(rows: int, capacity: int) -> dict[str, Any]:
    return {
        f"past_0_{side}": np.zeros((rows, 2, capacity, 4), np.float32) for side in ("key", "value")
    }


@pytest.mark.parametrize(
    ("lengths", "input_lengths", "tokens", "capacity", "positions", "total"),
    [
        ([0, 0], [3, 2], 3, 16, [[0, 1, 2], [0, 1, 2]], 3),  # a first prefill
        ([5, 9], [1, 1], 1, 16, [[5], [9]], 16),  # a step
        ([5], [2], 3, 16, [[5, 6, 7]], 16),  # a later piece of one row
        (
            [5, 2],
            [3, 3],
            3,
            16,
            [[5, 6, 7], [2, 3, 4]],
            8,
        ),  # of several rows: refused, since it is above 3
        ([16, 15], [1, 1], 1, 16, [[15], [15]], 16),  # a row that has ended does not move
    ],
)
def test_values_of_rows(
    lengths: list[int],
    input_lengths: list[int],
    tokens: int,
    capacity: int,
    positions: list[list[int]],
    total: int,
) -> None:
    foreign = decoder()
    rows = add_rows(foreign, Nodes(foreign.graph))
    assert rows.status is None
    assert [value.name for value in (rows.lengths, rows.input_lengths)] == [
        "lengths",
        "input_lengths",
    ]
    assert {value.dtype for value in (rows.lengths, rows.input_lengths, rows.seqlens_k)} == {INT32}
    shapes = [str(value.shape) for value in (rows.positions, rows.seqlens_k, rows.last, rows.steps)]
    assert shapes == ["[B,S]", "[B]", "[B,1]", "[S]"]
    wanted = [rows.positions, rows.seqlens_k, rows.total_sequence_length, rows.last, rows.steps]
    found = run(
        foreign,
        wanted,
        [rows.lengths, rows.input_lengths],
        input_ids=np.zeros((len(lengths), tokens), np.int64),
        lengths=np.array(lengths, np.int32),
        input_lengths=np.array(input_lengths, np.int32),
        **caches(len(lengths), capacity),
    )
    assert [each.tolist() for each in found] == [
        positions,
        [length + tokens - 1 for length in lengths],
        total,
        [[count - 1] for count in input_lengths],
        [*range(tokens)],
    ]
    assert [each.dtype for each in found] == [np.int64, np.int32, np.int32, np.int64, np.int64]


def test_new_nodes_have_names_of_their_own() -> None:
    foreign = decoder()
    nodes = Nodes(foreign.graph)
    first = nodes("Neg", [foreign.logits], FLOAT, ["B", 3])
    second = nodes("Neg", [foreign.logits], None, ["B", 3], domain="other", alpha=2)
    node = second.producer()
    assert node is not None
    assert (first.name, second.name) == ("qsample.Neg_1.0", "qsample.Neg_2.0")
    assert (str(first.shape), first.dtype, second.shape, second.type) == (
        "[B,3]",
        FLOAT,
        None,
        None,
    )
    assert (node.domain, node.attributes.get_int("alpha")) == ("other", 2)
    assert nodes.integers(1, 2) is nodes.integers(1, 2)
    assert nodes.integers(1, 2).const_value.numpy().tolist() == [1, 2]  # type: ignore[union-attr]
    assert nodes.integers(1, dtype="int32").const_value.numpy().dtype == np.int32  # type: ignore[union-attr]
    scalar = nodes.integer(3).const_value
    assert scalar is not None
    assert (scalar.numpy().shape, scalar.numpy().item()) == ((), 3)


def test_heads_are_merged() -> None:
    foreign = decoder()
    nodes = Nodes(foreign.graph)
    merged = nodes.merged_heads(foreign.layers[0].past_key, FLOAT, 2, 4)
    assert str(merged.shape) == "[B,S,8]"
    heads = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
    given = caches(1, 3) | {"past_0_key": heads}
    (found,) = run(foreign, [merged], [], input_ids=np.zeros((1, 1), np.int64), **given)
    np.testing.assert_array_equal(found, heads.transpose(0, 2, 1, 3).reshape(1, 3, 8))


# The choice of the last token before the head.

TABLE = np.arange(72, dtype=np.float32).reshape(9, 8)
HEAD = np.arange(56, dtype=np.float32).reshape(8, 7) % 5


def with_weights(foreign: ForeignGraph) -> ForeignGraph:
    for name, numbers in (("table", TABLE), ("head", HEAD)):
        foreign.graph.initializers[name].const_value = ir.tensor(numbers, name=name)
    return foreign


@pytest.mark.parametrize(
    ("body", "before_head"),
    [
        ("logits = MatMul(x, head)", True),
        ("m = MatMul(x, head) logits = Mul(m, two)", True),
        ("m = MatMul(x, head) n = Neg(m) logits = Identity(n)", True),
        ("m = MatMul(x, head) t = Transpose<perm=[0, 1, 2]>(m) logits = Abs(t)", False),
    ],
)
def test_the_last_real_tokens_are_chosen(body: str, before_head: bool) -> None:
    foreign = with_weights(decoder(body))
    nodes = Nodes(foreign.graph)
    value = next(each for node in foreign.graph for each in node.outputs if each.name == "x")
    value.shape, value.type = ir.Shape(["B", "S", 8]), ir.TensorType(FLOAT)
    rows = add_rows(foreign, nodes)
    logits = select_last(foreign, rows, nodes)
    assert logits is foreign.graph.outputs[0]
    assert (logits.name, logits.dtype, str(logits.shape)) == ("logits", FLOAT, "[B,7]")
    product = next(node for node in foreign.graph if node.op_type == "MatMul")
    assert (product.inputs[0] is not value) is before_head
    ids = np.array([[1, 2, 3], [4, 5, 6]])
    given = {"lengths": np.zeros(2, np.int32), "input_lengths": np.array([3, 1], np.int32)}
    (found,) = run(
        foreign,
        [logits],
        [rows.lengths, rows.input_lengths],
        input_ids=ids,
        **given,
        **caches(2, 8),
    )
    wanted = TABLE[[3, 4]] @ HEAD
    factor = 2 if "two" in body else -1 if "Neg" in body else 1
    np.testing.assert_array_equal(found, factor * wanted)


def test_float16_logits_become_float32() -> None:
    foreign = with_weights(
        decoder("m = MatMul(x, head) logits = Cast<to=10>(m)", logits="float16[B,S,7] logits")
    )
    nodes = Nodes(foreign.graph)
    rows = add_rows(foreign, nodes)
    logits = select_last(foreign, rows, nodes)
    assert logits.dtype == FLOAT
    given = {"lengths": np.zeros(1, np.int32), "input_lengths": np.array([2], np.int32)}
    (found,) = run(
        foreign,
        [logits],
        [rows.lengths, rows.input_lengths],
        input_ids=np.array([[1, 2]]),
        **given,
        **caches(1, 8),
    )
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, (TABLE[[2]] @ HEAD).astype(np.float16))


# Positions, and sizes that are read elsewhere.


def test_positions_of_the_file_become_those_of_the_rows() -> None:
    foreign = decoder(
        "p = Abs(position_ids) c = Shape(past_0_key) r = Neg(c) logits = MatMul(x, head)",
        ", int64[B,S] position_ids",
    )
    values = {each.name: each for node in foreign.graph for each in node.outputs}
    rows = add_rows(foreign, Nodes(foreign.graph))
    use_row_positions(foreign, rows, [values["c"]])
    for name in ("p", "r"):
        node = values[name].producer()
        assert node is not None
        assert node.inputs[0] is rows.positions
    without = decoder()
    use_row_positions(without, rows, [])


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("", None),
        ("s = Shape(past_0_key) g = Gather(s, one)", None),
        ("s = Shape(past_0_key) g = Gather(s, two_)", "the number of cached tokens is used beyond the attention"),
        ("s = Shape(past_0_value) g = Neg(s)", "the number of cached tokens is used beyond the attention"),
        ("m = ReduceMax(attention_mask) n = Cast<to=1>(attention_mask)",
         "attention_mask is used beyond the attention, by Cast, ReduceMax$"),
    ],
)  # fmt: skip
def test_sizes_that_are_read_beyond_the_attention(body: str, why: str | None) -> None:
    foreign = decoder(f"{body} logits = MatMul(x, head)", ", int64[B,T] attention_mask")
    for node in foreign.graph:
        if (
            node.op_type == "Gather"
            and node.inputs[1] is not None
            and node.inputs[1].name in ("one", "two_")
        ):
            number = {"one": 1, "two_": 2}[str(node.inputs[1].name)]
            node.replace_input_with(1, Nodes(foreign.graph).integers(number))
    if why is None:
        check_free_of_sizes(foreign)
    else:
        with pytest.raises(UnsupportedModelError, match=why):
            check_free_of_sizes(foreign)


def test_axes_that_are_fixed() -> None:
    for index, is_fixed in (
        (0, True),
        (1, True),
        (2, False),
        (3, True),
        (-1, True),
        (-2, False),
        (-3, True),
        (-4, True),
    ):
        foreign = decoder("s = Shape(past_0_key) g = Gather(s, i) logits = MatMul(x, head)")
        gather = next(node for node in foreign.graph if node.outputs[0].name == "g")
        gather.replace_input_with(1, Nodes(foreign.graph).integers(index))
        shape = gather.inputs[0].producer() if gather.inputs[0] else None
        assert shape is not None
        assert module._reads_fixed_axes(shape) is is_fixed


# One rotary table of two.

LONG = "g () => (float[9,1] a) { a = Constant<value = float[9,1] {10,11,12,13,14,15,16,17,18}>() }"
SHORT = (
    "g () => (float[6,1] b) { c = Constant<value = float[6,1] {0,1,2,3,4,5}>() b = Identity(c) }"
)


def two_tables(
    condition: str = "n = ReduceMax(position_ids) c = Greater(n, limit)",
) -> ForeignGraph:
    text = (
        '<ir_version: 10, opset_import: ["": 20]> g (int64[B,S] input_ids, int64[B,S] position_ids, '
        "float[B,2,T,4] past_0_key, float[B,2,T,4] past_0_value) => (float[B,S,1] logits) "
        "<int64 limit = {4}> { "
        f"{condition} table = If(c) <then_branch = {LONG}, else_branch = {SHORT}> "
        "logits = Gather(table, input_ids) }"
    )
    made = ir.from_proto(onnx.parser.parse_model(text))
    for node in made.graph.all_nodes():
        if node.op_type == "Constant":  # as `load` lifts them
            tensor = node.attributes["value"].as_tensor()
            node.outputs[0].const_value = tensor
    return foreign_of(made)


@pytest.mark.parametrize(
    ("rope", "limit", "numbers"),
    [
        (None, 4, [0, 1, 2, 3, 4, 5]),
        ("short", 4, [0, 1, 2, 3, 4, 5]),
        ("long", 9, [*range(10, 19)]),
    ],
)
def test_a_table_is_chosen(rope: str | None, limit: int, numbers: list[int]) -> None:
    foreign = two_tables()
    assert choose_table(foreign, rope) == limit
    (gather,) = foreign.graph
    table = gather.inputs[0]
    assert table is not None
    assert table.const_value is not None
    assert table.name == f"table.{rope or 'short'}"
    assert table.const_value.numpy().ravel().tolist() == numbers


def test_graphs_with_one_table() -> None:
    foreign = decoder()
    assert choose_table(foreign, None) is None
    with pytest.raises(
        QsampleError, match="has one rotary table, not a short and a long one; leave rope"
    ):
        choose_table(foreign, "short")
    with pytest.raises(QsampleError, match="rope is 'medium'; choose short, long"):
        choose_table(two_tables(), "medium")


@pytest.mark.parametrize(
    "condition",
    [
        "n = ReduceMax(input_ids) c = Greater(n, limit)",
        "n = ReduceMax(position_ids) c = Less(n, limit)",
        "n = ReduceMax(position_ids) c = Greater(n, position_ids)",
    ],
)
def test_an_if_that_no_length_decides(condition: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"it has an If, .*, that no length decides"):
        choose_table(two_tables(condition), None)


# Recurrent states.


def test_states_of_rows() -> None:
    foreign = recognise(PATH, recurrent())
    hidden = foreign.recurrences[0].node.inputs[0]
    assert hidden is not None
    hidden.type = ir.TensorType(ir.DataType.FLOAT16)
    nodes = Nodes(foreign.graph)
    rows = add_rows(foreign, nodes)
    assert rows.status is not None
    assert (rows.status.name, rows.status.dtype) == ("status", INT32)
    kept = keep_states(foreign, nodes, rows)
    assert [each.number for each in kept.recurrences] == [0, 1]
    linear, conv = kept.recurrences
    assert linear.present is foreign.recurrences[0].present
    assert conv.present is not foreign.recurrences[1].present
    assert (conv.present.name, str(conv.present.shape)) == ("present_conv_1", "[B,8,3]")
    assert conv.present in list(foreign.graph.outputs)
    for each in kept.recurrences:
        past = each.node.inputs[3]
        where = past.producer() if past else None
        assert where is not None
        assert (where.op_type, where.inputs[1]) == ("Where", each.past)
    for place in (1, 2):  # keys and values of padding are 0
        value = linear.node.inputs[place]
        where = value.producer() if value else None
        assert where is not None
        assert where.op_type == "Where"
    assert linear.node.inputs[0] is not None
    assert linear.node.inputs[0].name == "x"  # queries write nothing


# The operators that are followed.

COUNTING = (
    "Range Add Sub Cast CumSum Unsqueeze Squeeze Reshape Slice Expand Where Gather Mul Clip Min Max Identity Flatten "
    "Concat"
)
BETWEEN = "Cast Mul Div Add Sub Tanh Identity Neg Clip Where Reshape Unsqueeze Squeeze Slice Gather"
PRODUCTS = "MatMul Gemm MatMulNBits MatMulBnb4 FusedMatMul MatMulFpQ4"


def following(operator: str, source: str, to: ir.DataType | None = None) -> ForeignGraph:
    """A decoder with an operator behind a value."""
    body = f"size = Shape(past_0_key) m = MatMul(x, head) out = {operator}({source})"
    foreign = decoder(f"{body} logits = Neg(out)")
    if to is not None:
        node = next(node for node in foreign.graph if node.outputs[0].name == "out")
        node.attributes["to"] = ir.AttrInt64("to", to)
    return foreign


@pytest.mark.parametrize("operator", [*COUNTING.split(), "Abs", "MatMul", "Div", "Shape"])
def test_operators_that_count_positions(operator: str) -> None:
    foreign = following(operator, "size", INT64 if operator == "Cast" else None)
    names = [value.name for value in module._counting_values(foreign)]
    assert names == (["out"] if operator in COUNTING.split() else [])


@pytest.mark.parametrize(("dtype", "counts"), [(INT32, True), (INT64, True), (FLOAT, False)])
def test_positions_are_integers(dtype: ir.DataType, counts: bool) -> None:
    assert bool(module._counting_values(following("Cast", "size", dtype))) is counts


@pytest.mark.parametrize("operator", [*BETWEEN.split(), "Transpose", "Softmax", "Concat"])
def test_operators_between_the_head_and_the_logits(operator: str) -> None:
    head, between = module._head(following(operator, "m, two").logits)
    passes = operator in BETWEEN.split()
    assert (head is not None) is passes
    assert [node.op_type for node in between] == (["Neg", operator] if passes else [])


@pytest.mark.parametrize("operator", [*PRODUCTS.split(), "Einsum"])
def test_products_that_make_logits(operator: str) -> None:
    head, _ = module._head(following(operator, "x, head").logits)
    assert (head is not None) is (operator in PRODUCTS.split())
