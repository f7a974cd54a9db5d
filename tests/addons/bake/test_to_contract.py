"""The contract's names and axes, shapes that a graph came without, and what is computed from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from qsample.addons.bake.conventions import ForeignGraph, Layer, Recurrence
from qsample.addons.bake.rows import Rows
from qsample.addons.bake.to_contract import interface_of, record_shapes, use_contract_names
from qsample.contract.interface import Features, Interface, KeyValueShape, RecurrentShape
from qsample.errors import UnsupportedModelError
from qsample.graph.edit import constant
from qsample.graph.operators import OPSET

INT64, FLOAT = ir.DataType.INT64, ir.DataType.FLOAT


def value(name: str, dims: list[int | str], dtype: ir.DataType) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(dims), type=ir.TensorType(dtype))


def numbers(graph: ir.Graph, name: str, given: object) -> ir.Value:
    tensor = ir.tensor(np.array(given, np.int64), name=name)
    made = ir.Value(name=name, const_value=tensor, type=ir.TensorType(INT64), shape=tensor.shape)
    graph.register_initializer(made)
    return made


@pytest.fixture
def split_heads() -> tuple[ir.Model, dict[str, ir.Node]]:
    """Ids [B, S] as float [B, S, 8], split into [B, S, 2, 4] and halved as TorchScript writes it."""
    ids, lengths = (
        value("input_ids", ["B", "S"], INT64),
        value("input_lengths", ["B"], ir.DataType.INT32),
    )
    cache = value("past_key_values.0.key", ["B", 2, "T", 4], FLOAT)
    graph = ir.Graph([ids, lengths, cache], [], nodes=[], opset_imports={"": 20})
    nodes: dict[str, ir.Node] = {}

    def add(name: str, op: str, inputs: list[ir.Value], **attributes: object) -> ir.Value:
        nodes[name] = ir.node(op, inputs, attributes, name=name)
        nodes[name].outputs[0].name = name
        graph.append(nodes[name])
        return nodes[name].outputs[0]

    weights = ir.tensor(np.ones((16, 8), np.float32), name="table")
    table = ir.Value(
        name="table", const_value=weights, type=ir.TensorType(FLOAT), shape=weights.shape
    )
    graph.register_initializer(table)
    hidden = add("hidden", "Gather", [table, ids])
    size = add("size", "Shape", [ids])
    both = add("both", "Concat", [size, numbers(graph, "heads", [2, 4])], axis=0)
    split = add("split", "Reshape", [hidden, both])
    width = add("width", "Gather", [add("shape", "Shape", [split]), numbers(graph, "last", [3])])
    half = add("half", "Div", [width, numbers(graph, "two", [2])])
    axis = numbers(graph, "axis", [3])
    first = add("first", "Slice", [split, numbers(graph, "zero", [0]), half, axis])
    capacity = add(
        "capacity", "Gather", [add("cached", "Shape", [cache]), numbers(graph, "two_", 2)]
    )
    least = add("least", "Min", [capacity, numbers(graph, "limit", 100)])
    graph.outputs.extend([first, least])
    return ir.Model(graph, ir_version=10), nodes


def test_shapes_have_the_contracts_axes(
    split_heads: tuple[ir.Model, dict[str, ir.Node]], tmp_path: Path
) -> None:
    model, nodes = split_heads
    assert record_shapes(model, tmp_path) > 0
    assert nodes["split"].outputs[0].shape == ["B", "S", 2, 4]
    assert nodes["first"].outputs[0].shape == ["B", "S", 2, 2]
    assert nodes["first"].outputs[0].dtype == FLOAT


def test_what_shapes_decide_alone_is_a_constant(
    split_heads: tuple[ir.Model, dict[str, ir.Node]], tmp_path: Path
) -> None:
    model, nodes = split_heads
    record_shapes(model, tmp_path)
    target, stop = constant(nodes["split"].inputs[1]), constant(nodes["first"].inputs[2])
    assert target is not None
    assert target.tolist() == [0, 0, 2, 4]
    assert stop is not None
    assert stop.tolist() == [2]


def test_what_follows_an_axis_stays(
    split_heads: tuple[ir.Model, dict[str, ir.Node]], tmp_path: Path
) -> None:
    """min(T, 100) is T for short caches only."""
    model, nodes = split_heads
    record_shapes(model, tmp_path)
    assert nodes["least"].outputs[0] in model.graph.outputs
    assert nodes["least"].op_type == "Min"


def model_of(body: str, constants: str = "") -> ir.Model:
    """A graph of `body` with an output y, and ids, lengths and a cache of two heads of 4 as inputs."""
    inputs = 'int64[B,S] input_ids, int32[B] input_lengths, float[B,2,T,4] "past_key_values.0.key"'
    head = (
        f'<ir_version: 10, opset_import: ["": 20, "com.microsoft": 1]> g ({inputs}) => (float[n] y)'
    )
    table = "float[16,8] table = {" + ", ".join(["1.0"] * 128) + "}"
    model = ir.from_onnx_text(
        f"{head} <{table}, int64 zero = {{0}}, int64 one = {{1}}{constants}> {{ {body} }}"
    )
    model.graph.outputs[0].type = model.graph.outputs[0].shape = None  # as it comes
    return model


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def targets_of(model: ir.Model) -> list[list[int] | None]:
    """Of the Reshapes; None = computed."""
    found = [constant(node.inputs[1]) for node in model.graph if node.op_type == "Reshape"]
    return [None if target is None else target.tolist() for target in found]


def shape_of(model: ir.Model, name: str) -> ir.Shape | None:
    return next(value.shape for node in model.graph for value in node.outputs if value.name == name)


@pytest.mark.parametrize(
    "body",
    [
        "most = ReduceMax<keepdims=0>(input_ids)  more = Add(most, one)  y = Identity(more)",
        "drawn = RandomUniform<shape=[1], seed=1.0>()  y = Identity(drawn)",
        """cached = Shape<start=2, end=3>("past_key_values.0.key")  is_long = Equal(cached, first)
           y = Identity(is_long)""",
    ],
    ids=["ids", "random numbers", "all but one"],
)
def test_what_is_the_same_in_all_runs_by_chance_stays(body: str, tmp_path: Path) -> None:
    """Ids are 0 in all of them."""
    model = model_of(body, ", int64[1] first = {37}")
    before = operators(model)
    assert record_shapes(model, tmp_path) == 0
    assert operators(model) == before


def test_a_graph_inside_may_read_contents(tmp_path: Path) -> None:
    model = model_of("""
        width = Shape<start=3, end=4>("past_key_values.0.key")  square = Mul(width, width)  is_wide = Cast<to=9>(square)
        read = If(is_wide) <then_branch = a () => (int64 t) { t = ReduceMax<keepdims=0>(input_ids) },
                            else_branch = b () => (int64 e) { e = ReduceMin<keepdims=0>(input_ids) }>
        y = Identity(read)""")
    assert record_shapes(model, tmp_path) == 3  # width, square, is_wide
    assert operators(model) == ["If", "Identity"]
    assert constant(model.graph[0].inputs[0]).tolist() == [True]  # type: ignore[union-attr]
    assert shape_of(model, "read") == []


def test_long_results_and_results_of_the_graph_stay(tmp_path: Path) -> None:
    model = model_of("""
        width = Shape<start=3, end=4>("past_key_values.0.key")  sixteen = Mul(width, width)
        short = ConstantOfShape(sixteen)  more = Add(sixteen, one)  long = ConstantOfShape(more)
        joined = Concat<axis=0>(short, long)  y = Identity(width)  z = Identity(joined)""")
    model.graph.outputs.append(
        next(value for node in model.graph for value in node.outputs if value.name == "z")
    )
    assert record_shapes(model, tmp_path) == 4  # width, sixteen, short, more
    assert operators(model) == ["ConstantOfShape", "Concat", "Identity", "Identity"]
    assert [value.name for value in model.graph.outputs] == ["y", "z"]
    assert (shape_of(model, "long"), shape_of(model, "z"), shape_of(model, "y")) == (
        [17],
        [33],
        [1],
    )
    assert model.graph.initializers["short.fixed"].const_value.numpy().tolist() == [0] * 16  # type: ignore[union-attr]


def test_lengths_are_those_of_full_rows(tmp_path: Path) -> None:
    model = model_of("""
        longest = ReduceMax<keepdims=0>(input_lengths)  count = Cast<to=7>(longest)  y = Range(zero, count, one)""")
    assert record_shapes(model, tmp_path) == 0
    assert shape_of(model, "y") == ["S"]
    assert model.graph.outputs[0].dtype == INT64


def test_caches_are_within_the_positions_of_the_model(tmp_path: Path) -> None:
    body = """cached = Shape<start=2, end=3>("past_key_values.0.key")  least = Min(cached, limit)
              y = ConstantOfShape(least)"""
    for limit, axis in ((None, None), (41, None), (30, "T")):
        model = model_of(body, ", int64 limit = {40}")
        record_shapes(model, tmp_path, limit)
        assert shape_of(model, "y") == [axis]


def test_a_rank_that_varies_is_unknown(tmp_path: Path) -> None:
    model = model_of(
        """rows = Shape<end=1>(input_ids)  dims = Slice(ones, first, rows)  long = Cast<to=7>(input_lengths)
           most = ReduceMax<keepdims=0>(long)  made = Reshape(most, dims)
           none = ReduceMax<keepdims=0>(input_ids)  unit = Add(none, last)  y = Reshape(made, unit)""",
        ", int64[2] ones = {1, 1}, int64[1] first = {0}, int64[1] last = {1}",
    )
    record_shapes(model, tmp_path)
    assert (shape_of(model, "made"), shape_of(model, "y")) == (None, [1])
    assert targets_of(model) == [None, [1]]


def test_outputs_that_are_left_out(tmp_path: Path) -> None:
    model = model_of(
        "hidden = Gather(table, input_ids)  y = Identity(hidden)",
        ", float[8] scale = {1,1,1,1,1,1,1,1}",
    )
    graph, hidden = model.graph, model.graph[0].outputs[0]
    inputs = [hidden, hidden, graph.initializers["scale"]]
    norm = ir.node(
        "SkipSimplifiedLayerNormalization", inputs, domain="com.microsoft", num_outputs=4
    )
    for value, name in zip(norm.outputs, ("normed", "", "", "sum"), strict=True):
        value.name = name
    graph.insert_after(graph[0], norm)
    graph[-1].replace_input_with(0, norm.outputs[3])
    record_shapes(model, tmp_path)
    assert [value.shape for value in norm.outputs] == [["B", "S", 8], None, None, ["B", "S", 8]]


HIDDEN = """hidden = Gather(table, input_ids)  rows = Shape<end=1>(input_ids)  tokens = Shape<start=1>(input_ids)
            width = Shape<start=-1>(hidden)"""


@pytest.mark.parametrize(
    ("body", "target"),
    [
        (
            "target = Concat<axis=0>(rows, tokens, four, two)  y = Reshape(hidden, target)",
            [0, 0, 4, 2],
        ),
        (
            "both = Mul(rows, tokens)  target = Concat<axis=0>(both, width)  y = Reshape(hidden, target)",
            [-1, 8],
        ),
        ("target = Concat<axis=0>(tokens, rows, width)  y = Reshape(hidden, target)", None),
        (
            "target = Concat<axis=0>(two, tokens, four, rows)  y = Reshape(hidden, target)",
            [2, 0, 4, -1],
        ),
        ("target = Concat<axis=0>(unit, rows, tokens)  y = Reshape(input_ids, target)", None),
        (
            "target = Concat<axis=0>(rows, tokens, width)  y = Reshape<allowzero=1>(hidden, target)",
            None,
        ),
        ("target = Concat<axis=0>(four, rest)  y = Reshape(table, target)", None),
        ("target = Concat<axis=0>(rest, width)  y = Reshape(hidden, target)", [-1, 8]),
        (
            "target = Concat<axis=0>(rest, four)  y = Reshape(hidden, target)",
            None,
        ),  # of constants alone
    ],
)
def test_targets_of_reshapes(body: str, target: list[int] | None, tmp_path: Path) -> None:
    """0 where an axis stays, and at most one that follows from the others; else it is computed as it was."""
    model = model_of(
        f"{HIDDEN}  {body}",
        ", int64[1] unit = {1}, int64[1] two = {2}, int64[1] four = {4}, int64[1] rest = {-1}",
    )
    record_shapes(model, tmp_path)
    assert targets_of(model) == [target]
    if target is None:
        assert operators(model)[-2:] == ["Concat", "Reshape"]
    elif -1 not in target:
        assert operators(model) == ["Gather", "Reshape"]


def layer(number: int, heads: int = 2) -> Layer:
    names = (f"past.{number}.k", f"past.{number}.v", f"new.{number}.k", f"new.{number}.v")
    return Layer(
        number, *(value(name, ["batch_size", heads, "past", 4], FLOAT) for name in names), heads, 4
    )


def recurrence(number: int, kind: str, shape: tuple[int, ...], dtype: ir.DataType) -> Recurrence:
    past, present = (
        value(f"{name}.{number}.{kind}", ["batch_size", *shape], dtype) for name in ("was", "is")
    )
    return Recurrence(number, kind, shape, dtype, ir.node("LinearAttention", [past]), past, present)


def foreign_graph(
    layers: list[Layer], recurrences: Sequence[Recurrence] = (), dtype: ir.DataType = FLOAT
) -> ForeignGraph:
    ids, logits = (
        value("input_ids", ["batch_size", "sequence_length"], INT64),
        value("logits", ["b", "s", 9], FLOAT),
    )
    model = ir.Model(ir.Graph([ids], [], nodes=[], opset_imports={"": 20}), ir_version=8)
    return ForeignGraph(
        Path("model.onnx"), model, tuple(layers), logits, 9, dtype, recurrences=tuple(recurrences)
    )


def test_the_interface_of_a_file() -> None:
    features = Features(sampler=False, logprobs=True)
    found = interface_of(foreign_graph([layer(0), layer(1, 1)]), features)
    assert found == Interface(9, (KeyValueShape(2, 4), KeyValueShape(1, 4)), "float32", features)
    states = [
        recurrence(0, "conv_state", (8, 3), FLOAT),
        recurrence(0, "conv_state", (6, 3), ir.DataType.FLOAT16),
        recurrence(2, "conv_state", (8, 3), FLOAT),
        recurrence(2, "recurrent_state", (2, 4, 4), FLOAT),
    ]
    found = interface_of(foreign_graph([layer(1), layer(3)], states, ir.DataType.FLOAT16), features)
    assert found == Interface(
        9,
        (KeyValueShape(2, 4, 1), KeyValueShape(2, 4, 3)),
        "float16",
        features,
        recurrent=(
            RecurrentShape(0, "conv_state", 0, (8, 3), "float32"),
            RecurrentShape(0, "conv_state", 1, (6, 3), "float16"),
            RecurrentShape(2, "conv_state", 0, (8, 3), "float32"),
            RecurrentShape(2, "recurrent_state", 0, (2, 4, 4), "float32"),
        ),
    )


@pytest.fixture
def file_and_rows() -> tuple[ForeignGraph, ir.Value, Rows]:
    """A file with a mask, a layer and a state, whose names are partly those of the contract, and its nodes in no order.

    The values of the rows are its own.
    """
    model = ir.from_onnx_text("""<ir_version: 8, producer_name: "other", producer_version: "1", opset_import: ["": 18]>
        file (int64[batch_size,sequence_length] input_ids, int64[batch_size,all] attention_mask,
              float[batch_size,2,past,4] k, float[batch_size,2,past,4] v, float16[batch_size,6,3] state)
        => (float[batch_size,sequence_length,9] head, float[batch_size,2,all,4] k_new, float[batch_size,2,all,4] v_new,
            float16[batch_size,6,3] state_new)
        <float[1] emit = {1.0}, float[9,4] table = {1,1,1,1,1,1,1,1,1, 1,1,1,1,1,1,1,1,1, 1,1,1,1,1,1,1,1,1,
         1,1,1,1,1,1,1,1,1}> {
            status = Gather(table, input_ids)
            head = Mul(status, emit)
            lengths = Unsqueeze(status, where)
            k_new = Concat<axis=2>(k, lengths)
            v_new = Concat<axis=2>(v, lengths)
            state_new = Identity(state)
            masked = Identity(attention_mask)
            where = Constant<value_ints=[1]>()
        }""")
    graph = model.graph
    graph[0].doc_string, graph[0].metadata_props["made"] = "text", "by somebody"
    values = {str(each.name): each for node in graph for each in node.outputs}
    values["status"].shape = ir.Shape(["batch_size", "sequence_length", 4])
    values["lengths"].shape = ir.Shape(["B", "T", "all", 4])
    inputs = {str(each.name): each for each in graph.inputs}
    values["k_new"].type = None
    cache = Layer(0, inputs["k"], inputs["v"], values["k_new"], values["v_new"], 2, 4)
    half = ir.DataType.FLOAT16
    node = values["state_new"].producer()
    assert node is not None
    state = Recurrence(1, "conv_state", (6, 3), half, node, inputs["state"], values["state_new"])
    foreign = ForeignGraph(
        Path("model.onnx"), model, (cache,), values["head"], 9, FLOAT, recurrences=(state,)
    )
    lengths, input_lengths, status = (
        value(name, ["B"], ir.DataType.INT32) for name in ("lengths", "input_lengths", "status")
    )
    values["head"].name = "logits"
    others = [value(name, [1], INT64) for name in "abcde"]
    rows = Rows(*others[:4], lengths, input_lengths, others[4], status)
    return foreign, values["head"], rows


def test_the_graph_gets_the_contracts_names(
    file_and_rows: tuple[ForeignGraph, ir.Value, Rows],
) -> None:
    foreign, logits, rows = file_and_rows
    interface = interface_of(foreign, Features())  # the sampler's names are taken, too
    model = use_contract_names(foreign, logits, rows, interface)
    graph = model.graph
    assert [each.name for each in graph.inputs] == interface.model.input_names
    assert [each.name for each in graph.outputs] == interface.model.output_names
    assert [each.shape for each in graph.inputs] == [
        *(["B", "S"], ["B"], ["B"], ["B"]),
        *(["B", 2, "T", 4], ["B", 2, "T", 4], ["B", 6, 3]),
    ]
    assert [each.shape for each in graph.outputs[1:]] == [
        ["B", 2, "T", 4],
        ["B", 2, "T", 4],
        ["B", 6, 3],
    ]
    assert [each.dtype for each in graph.outputs[1:]] == [FLOAT, FLOAT, ir.DataType.FLOAT16]
    made = {str(each.name): each for node in graph for each in node.outputs}
    assert {"status.foreign", "lengths.foreign"} <= made.keys()
    assert {"emit.foreign", "table"} <= graph.initializers.keys()
    assert made["status.foreign"].shape == ["B", "S", 4]
    assert made["lengths.foreign"].shape == ["B", "T", None, 4]
    assert "masked" not in made
    place = {node.op_type: index for index, node in enumerate(graph)}
    assert place["Constant"] < place["Unsqueeze"]
    assert (model.producer_name, model.producer_version, model.ir_version) == ("qsample", None, 10)
    assert all((node.doc_string, node.metadata_props) == (None, {}) for node in graph)
    assert graph.opset_imports[""] == OPSET


def test_logits_and_a_newer_format_stay(file_and_rows: tuple[ForeignGraph, ir.Value, Rows]) -> None:
    foreign, logits, rows = file_and_rows
    foreign.model.ir_version = 11
    model = use_contract_names(
        foreign, logits, rows, interface_of(foreign, Features(sampler=False))
    )
    assert (model.ir_version, model.graph.outputs[0].name) == (11, "logits")


def test_an_input_that_the_contract_lacks(
    file_and_rows: tuple[ForeignGraph, ir.Value, Rows],
) -> None:
    foreign, logits, rows = file_and_rows
    graph = foreign.graph
    mask = foreign.input("attention_mask")
    for op_type, reader in (("Shape", "Unsqueeze"), ("Cast", "Mul")):
        node = ir.node(op_type, [mask], {"to": FLOAT} if op_type == "Cast" else {})
        graph.append(node)
        next(each for each in graph if each.op_type == reader).replace_input_with(
            1, node.outputs[0]
        )
    with pytest.raises(
        UnsupportedModelError,
        match=r"model\.onnx cannot be baked: its input attention_mask is still used by Cast, Shape$",
    ):
        use_contract_names(foreign, logits, rows, interface_of(foreign, Features()))


def test_counts_of_tokens_are_no_sizes_of_axes(tmp_path: Path) -> None:
    """A mixture gathers the tokens of an expert: none in these runs, since no id is 9."""
    model = model_of(
        """flat = Reshape(input_ids, minus)  is_nine = Equal(flat, nine)  places = NonZero(is_nine)
           row = Squeeze(places, zero)  y = Gather(table, row)""",
        ", int64[1] minus = {-1}, int64 nine = {9}, int64[1] zero = {0}",
    )
    record_shapes(model, tmp_path)
    shapes = {node.op_type: node.outputs[0].shape for node in model.graph}
    assert [isinstance(dim, int) for dim in shapes["Gather"] or ()] == [False, True]
