"""Graphs of a few nodes: the attention in them, the rule that its numbers follow, and what replaces it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample.addons.bake import attention
from qsample.addons.bake.attention import Match, Rule
from qsample.addons.bake.conventions import ForeignGraph
from qsample.addons.bake.recognise import recognise
from qsample.addons.bake.rows import Nodes, Rows
from qsample.errors import UnsupportedModelError
from qsample.graph.gqa import Slot
from tests.addons.bake.test_recognise_layers import GROWING, PASTS, PATH, PRESENTS
from tests.helpers.small_decoders import ATTENTION, GQA, attending, model

FLOAT = ir.DataType.FLOAT


def read(made: ir.Model) -> ForeignGraph:
    return recognise(PATH, made)


def value(foreign: ForeignGraph, name: str) -> ir.Value:
    made = [output for node in foreign.graph for output in node.outputs]
    return next(each for each in [*foreign.graph.inputs, *made] if each.name == name)


def number_of(foreign: ForeignGraph, name: str, number: Any) -> None:
    """Give a name that nothing computes a constant."""
    tensor = ir.tensor(np.array(number, np.float32), name=name)
    constant = ir.Value(
        name=name, const_value=tensor, shape=tensor.shape, type=ir.TensorType(FLOAT)
    )
    foreign.graph.register_initializer(constant)
    for node in foreign.graph:
        for place, source in enumerate(node.inputs):
            if source is not None and source.name == name:
                node.replace_input_with(place, constant)


# GroupQueryAttention of the file itself.


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("", None),
        (", causal=1, qk_output=0", None),
        (", causal=0", "is not causal"),
        (", qk_output=1", "returns its scores; export it without qk_output"),
    ],
)
def test_attributes_that_change_the_meaning(more: str, why: str | None) -> None:
    foreign = read(attending([f"{GQA.format(more=more)} (q, k, v, past_0_key, past_0_value)"]))
    if why is None:
        attention.check_attentions(foreign)
    else:
        with pytest.raises(UnsupportedModelError, match=why):
            attention.check_attentions(foreign)


@pytest.mark.parametrize("slot", [Slot.K_SCALE, Slot.V_SCALE])
def test_quantized_caches_are_refused(slot: Slot) -> None:
    foreign = read(attending())
    node = foreign.layers[0].attention
    assert node is not None
    node.resize_inputs(slot + 1)
    node.replace_input_with(slot, value(foreign, "q"))
    with pytest.raises(
        UnsupportedModelError, match="its cache is quantized; take the file with a float"
    ):
        attention.check_attentions(foreign)


def two_layers(first: str, second: str) -> ForeignGraph:
    operators = [
        f"{GQA.format(more=more)} (q, k, v, past_{number}_key, past_{number}_value)"
        for number, more in enumerate((first, second))
    ]
    return read(attending(operators, [0, 1]))


@pytest.mark.parametrize(
    ("first", "second", "windows", "rotates"),
    [
        ("", "", [-1, -1], False),
        (", local_window_size=8, do_rotary=1", "", [8, -1], False),
        (", do_rotary=1", ", do_rotary=1, local_window_size=0", [-1, 0], True),
        ("", ", do_rotary=1", [-1, -1], False),
    ],
)
def test_windows_and_rotations(first: str, second: str, windows: list[int], rotates: bool) -> None:
    foreign = two_layers(first, second)
    assert attention.windows(foreign) == windows
    assert attention.rotates(foreign) is rotates


def test_lengths_of_rows_take_the_place_of_the_files() -> None:
    node = ATTENTION.replace("past_0_value)", "past_0_value, x, x, , , input_ids, , , , , , , x)")
    foreign = read(
        attending([node.replace("kv_num_heads=2", "kv_num_heads=2, sliding_window_cache=1")])
    )
    found = foreign.layers[0].attention
    assert found is not None
    assert len(found.inputs) == 17
    names = ("positions", "seqlens_k", "total", "last", "lengths", "input_lengths", "steps")
    rows = Rows(*(ir.Value(name=name) for name in names))
    attention.use_rows(foreign, rows)
    given = [None if source is None else source.name for source in found.inputs]
    assert given == ["q", "k", "v", "past_0_key", "past_0_value", "seqlens_k", "total"]
    assert "sliding_window_cache" not in found.attributes


def norms(more: str, *, packed: bool, weights: str = "qw, kw") -> ForeignGraph:
    projections = "q, , " if packed else "q, k, v"
    node = f"{GQA.format(more=more)} ({projections}, past_0_key, past_0_value, , , , , , , , , , {weights})"
    foreign = read(attending([node]))
    number_of(foreign, "qw", [1, 2, 3, 4])
    number_of(foreign, "kw", [5, 6, 7, 8])
    return foreign


def rms(x: Any, weight: list[float], epsilon: float) -> Any:
    x = x.astype(np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * np.array(weight)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("more", "epsilons"),
    [
        ("", (1e-6, 1e-6)),
        (", qk_norm_epsilon=0.5", (0.5, 0.5)),
        (", q_norm_epsilon=0.25, k_norm_epsilon=2.0", (0.25, 2.0)),
        (", qk_norm_epsilon=0.5, k_norm_epsilon=2.0", (0.5, 2.0)),
    ],
)
def test_norms_leave_the_operator(more: str, epsilons: tuple[float, float], packed: bool) -> None:
    """What reaches the attention is normed by head, in float64 for comparison."""
    foreign = norms(more, packed=packed)
    assert attention.unfuse_norms(foreign) is True
    node = foreign.layers[0].attention
    assert node is not None
    assert not [name for name in node.attributes if "epsilon" in name]
    assert len(node.inputs) == Slot.Q_NORM_WEIGHT
    reaching = [node.inputs[slot] for slot in (Slot.QUERY, Slot.KEY, Slot.VALUE)]
    query, key, values = np.random.default_rng(0).standard_normal((3, 2, 3, 16), np.float32)
    key, values = key[..., :8], values[..., :8]
    given = (
        {"q": np.concatenate([query, key, values], -1)}
        if packed
        else {"q": query, "k": key, "v": values}
    )
    inner = ir.Graph([], [], nodes=[], opset_imports={"": 20, "com.microsoft": 1})
    inner.opset_imports[""] = 20
    sources = [value(foreign, name) for name in given]
    kept = [each for each in foreign.graph if each.name and each.name.startswith("qsample")]
    for each in kept:
        foreign.graph.remove(each)
    for source in sources:  # inputs of a graph of the new nodes alone
        fed = ir.Value(
            name=source.name, type=ir.TensorType(FLOAT), shape=ir.Shape(["B", "S", None])
        )
        inner.inputs.append(fed)
        for each in kept:
            for place, read_value in enumerate(each.inputs):
                if read_value is source:
                    each.replace_input_with(place, fed)
        reaching = [fed if each is source else each for each in reaching]
    for constant in [*foreign.graph.initializers.values()]:
        if constant.name is not None and any(constant in each.inputs for each in kept):
            foreign.graph.initializers.pop(constant.name)
            inner.register_initializer(constant)
    inner.extend(kept)
    for index, each in enumerate(reaching):
        assert each is not None
        copy = ir.node("Identity", [each])
        copy.outputs[0].name = f"out_{index}"
        copy.outputs[0].type = ir.TensorType(FLOAT)
        inner.append(copy)
        inner.outputs.append(copy.outputs[0])
    content = ir.to_proto(ir.Model(inner, ir_version=10)).SerializeToString()
    got = ort.InferenceSession(content, providers=["CPUExecutionProvider"]).run(None, given)
    wanted_query = rms(query.reshape(2, 3, 4, 4), [1, 2, 3, 4], epsilons[0]).reshape(2, 3, 16)
    wanted_key = rms(key.reshape(2, 3, 2, 4), [5, 6, 7, 8], epsilons[1]).reshape(2, 3, 8)
    np.testing.assert_allclose(got[0], wanted_query, rtol=1e-5)
    np.testing.assert_allclose(got[1], wanted_key, rtol=1e-5)
    np.testing.assert_array_equal(got[2], values)


def test_attentions_without_norms_stay() -> None:
    for weights in (", ", "qw, ", ", kw"):
        foreign = norms("", packed=False, weights=weights)
        node = foreign.layers[0].attention
        assert attention.unfuse_norms(foreign) is False
        assert node is not None
        assert node.inputs[Slot.QUERY] is value(foreign, "q")


# Plain attention.

SCORES = "p = MatMul(q, t) {scores} w = Softmax(s) {weights} o = MatMul({factor}, present_0_value)"
KEYS = "q = Neg(x) t = Transpose<perm=[0, 1, 3, 2]>(present_0_key)"


def plain(
    scores: str = "s = Mul(p, c)", weights: str = "", factor: str = "w", keys: str = KEYS
) -> ForeignGraph:
    body = SCORES.format(scores=scores, weights=weights, factor=factor)
    foreign = read(model(f"{GROWING} {keys} {body}", PASTS, PRESENTS))
    number_of(foreign, "c", 0.5)
    number_of(foreign, "d", 30.0)
    return foreign


def matched(foreign: ForeignGraph) -> Match:
    return attention.match(foreign, foreign.layers[0])


@pytest.mark.parametrize(
    "scores",
    [
        "s = Mul(p, c)",
        "a = Div(p, c) b = Add(a, mask) s = Where(cond, b, c)",
        "a = Cast<to=1>(p) b = Sub(a, mask) e = Identity(b) f = Max(e, c) s = Clip(f)",
    ],
)
@pytest.mark.parametrize(
    ("weights", "factor"),
    [
        ("", "w"),
        ("w2 = Cast<to=1>(w) w3 = Dropout(w2) w4 = Where(cond, c, w3)", "w4"),
        ("w2 = Slice(w, c, c, c) w3 = Reshape(w2, c) w4 = Identity(w3)", "w4"),
    ],
)
def test_a_softmax_of_products(scores: str, weights: str, factor: str) -> None:
    foreign = plain(scores, weights, factor)
    found = matched(foreign)
    assert found.layer is foreign.layers[0]
    assert [found.query.name, found.scores.name, found.output.name] == ["q", "s", "o"]
    assert (found.cap, found.heads, found.sink) == (None, None, None)


@pytest.mark.parametrize(
    "keys",
    [
        "q = Neg(x) r = Unsqueeze(present_0_key, c) e = Expand(r, c) f = Reshape(e, c) t = Transpose(f)",
        "q = Neg(x) r = Mul(c, present_0_key) e = Div(r, c) f = Tile(e, c) g = Cast<to=1>(f) t = Identity(g)",
    ],
)
def test_keys_may_be_repeated_and_scaled(keys: str) -> None:
    assert matched(plain(keys=keys)).query.name == "q"


def test_a_fused_product() -> None:
    foreign = plain(keys="q = Neg(x) t = Identity(present_0_key)")
    for node in foreign.graph:
        if node.op_type == "MatMul":
            node.op_type = "FusedMatMul"
    assert matched(foreign).output.name == "o"


@pytest.mark.parametrize(
    ("scores", "cap"),
    [
        ("a = Div(p, d) h = Tanh(a) s = Mul(h, d)", "d"),
        ("a = Div(p, d) h = Tanh(a) i = Cast<to=1>(h) j = Identity(i) s = Mul(d, j)", "d"),
        ("a = Div(p, d) h = Tanh(a) i = Mul(h, d) s = Add(i, mask)", "d"),
        ("m = Tanh(mask) a = Add(p, m) s = Mul(a, c)", None),  # a Tanh of something else
    ],
)
def test_soft_caps(scores: str, cap: str | None) -> None:
    found = matched(plain(scores)).cap
    assert (found.name if isinstance(found, ir.Value) else found) == cap


@pytest.mark.parametrize(
    ("scores", "name", "sink"),
    [
        ("a = Mul(p, c) s = Concat<axis=-1>(a, sinks)", "a", "sinks"),
        (
            "a = Mul(p, c) b = Concat<axis=-1>(a, sinks) m = ReduceMax(b) s = Sub(b, m)",
            "a",
            "sinks",
        ),
        ("a = Mul(p, c) m = ReduceMax(a) s = Sub(a, m)", "s", None),  # no sink
        ("a = Mul(p, c) b = Add(a, c) m = ReduceMax(a) s = Sub(b, m)", "s", None),
        ("a = Mul(p, c) b = Add(a, c) s = Sub(b, mask)", "s", None),
    ],
)
def test_sinks(scores: str, name: str, sink: str | None) -> None:
    found = matched(plain(scores, "w2 = Slice(w, c, c, c)", "w2"))
    assert found.scores.name == name
    assert (None if found.sink is None else found.sink.name) == sink


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"keys": KEYS + " u = MatMul(x, t)"}, "layer 0 is not Softmax.* one product each"),
        ({"keys": "q = Neg(x) t = Exp(present_0_key)"}, "one product each"),
        ({"keys": "q = Neg(x) t = Gather(x, present_0_key)"}, "one product each"),
        ({"weights": "u = MatMul(w, present_0_value)"}, "one product each"),
        (
            {"weights": "w2 = Sigmoid(w)", "factor": "w2"},
            "layer 0 has no Softmax before its values",
        ),
        (
            {"scores": "a = Sigmoid(p) s = Mul(a, c)"},
            "scores of layer 0 are not made of query keys",
        ),
        ({"scores": "s = Mul(x, c)"}, "scores of layer 0 are not made of query keys"),
        (
            {"scores": "s = Concat<axis=-1>(p, c, c)"},
            "not made of query keys by numbers and a mask",
        ),
        (
            {"scores": "h = Tanh(p) s = Add(h, c)"},
            "scores of layer 0 pass a Tanh that is not a soft cap",
        ),
        (
            {"scores": "h = Tanh(p) i = Mul(h, d) j = Mul(h, c) s = Add(i, j)"},
            "that is not a soft cap",
        ),
        (
            {"scores": "h = Tanh(p) i = Mul(h, d) j = Tanh(i) s = Mul(j, d)"},
            "that is not a soft cap",
        ),
    ],
)
def test_other_forms_are_refused(options: dict[str, str], why: str) -> None:
    with pytest.raises(UnsupportedModelError, match=why):
        matched(plain(**options))


def by_operator(more: str = "", outputs: str = "a, present_0_key, present_0_value") -> ForeignGraph:
    body = (
        f"q = Neg(x) k = Abs(x) v = Exp(x) {outputs} = "
        f"Attention{more}(q, k, v, , past_0_key, past_0_value) logits = MatMul(x, head)"
    )
    return read(model(body, PASTS, PRESENTS, opset=23))


@pytest.mark.parametrize(
    ("more", "cap", "heads"),
    [
        ("", None, None),
        ("<softcap=30.0>", 30.0, None),
        ("<q_num_heads=4, kv_num_heads=2>", None, 4),
    ],
)
def test_the_operator_of_onnx(more: str, cap: float | None, heads: int | None) -> None:
    foreign = by_operator(more)
    value(foreign, "q").type = ir.TensorType(FLOAT)
    found = matched(foreign)
    assert (found.query.name, found.output.name, found.cap, found.heads) == ("q", "a", cap, heads)
    node = found.output.producer()
    assert node is not None
    assert found.scores is node.outputs[3]
    assert (found.scores.name, found.scores.dtype) == ("qsample.scores_0", FLOAT)
    assert node.attributes.get_int("qk_matmul_output_mode") == 2  # after the cap and the mask
    assert [output.name for output in node.outputs[1:3]] == ["present_0_key", "present_0_value"]


def test_the_operator_of_onnx_with_scores_is_refused() -> None:
    with pytest.raises(
        UnsupportedModelError, match="returns its scores; export it without qk_matmul"
    ):
        matched(by_operator(outputs="a, present_0_key, present_0_value, scores"))


def test_the_operator_of_onnx_behind_a_cache_that_grows() -> None:
    foreign = read(
        model(
            f"{GROWING} q = Neg(x) o = Attention(q, present_0_key, present_0_value)",
            PASTS,
            PRESENTS,
            opset=23,
        )
    )
    found = matched(foreign)
    assert (found.query.name, found.output.name) == ("q", "o")
    node = found.output.producer()
    assert node is not None
    assert [output.name for output in node.outputs] == ["o", "", "", "qsample.scores_0"]


# What the numbers of runs say.

CALLS = [(0, 5), (3, 4), (9, 1)]
HEADS, KV_HEADS, SIZE = 4, 2, 4


def runs_of(
    scores: Callable[[Any, Any, Any], Any],
    *,
    flat: bool = False,
    calls: list[tuple[int, int]] = CALLS,
) -> tuple[Match, list[dict[str, Any]]]:
    """Runs whose scores [heads, S, T] follow from products, and from the positions of queries and keys."""
    foreign = read(model(GROWING, PASTS, PRESENTS))
    generator = np.random.default_rng(1)
    runs = []
    for past, tokens in calls:
        query = generator.standard_normal((HEADS, tokens, SIZE))
        keys = generator.standard_normal((KV_HEADS, past + tokens, SIZE))
        product = np.einsum("hsd,htd->hst", query, keys.repeat(HEADS // KV_HEADS, 0))
        at_query, at_key = np.arange(past, past + tokens)[:, None], np.arange(past + tokens)
        found = np.where(at_key <= at_query, scores(product, at_query, at_key), -1e9)
        run = {"query": query[None], "scores": found[None], "present_0_key": keys[None]}
        if flat:
            run["query"] = query.transpose(1, 0, 2).reshape(1, tokens, HEADS * SIZE)
            run["present_0_key"] = keys.transpose(1, 0, 2).reshape(
                1, past + tokens, KV_HEADS * SIZE
            )
        runs.append(run)
    made = [ir.Value(name=name) for name in ("query", "scores", "output")]
    return Match(foreign.layers[0], made[0], made[1], None, made[2], HEADS if flat else None), runs


def rule(match: Match, runs: list[dict[str, Any]], calls: list[tuple[int, int]] = CALLS) -> Rule:
    return attention._rule(read(model(GROWING, PASTS, PRESENTS)), match, calls, runs)


def with_parts(match: Match, **parts: Any) -> Match:
    from dataclasses import replace

    return replace(match, **parts)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("scale", [0.25, 1.0, 3.0])
def test_a_scale(scale: float, flat: bool) -> None:
    found = rule(*runs_of(lambda product, query, key: scale * product, flat=flat))
    assert found.scale == pytest.approx(scale, rel=1e-6)
    assert (found.heads, found.window, found.softcap, found.sink) == (HEADS, None, 0.0, None)


@pytest.mark.parametrize(("window", "wanted"), [(1, 1), (4, 4), (9, 9), (10, None), (11, None)])
def test_a_window(window: int, wanted: int | None) -> None:
    """The last call has 10 keys: a larger window is none."""
    scores = runs_of(lambda product, query, key: np.where(key > query - window, product, -1e5))
    assert rule(*scores).window == wanted


@pytest.mark.parametrize("cap", [2.0, 30.0])
def test_a_soft_cap(cap: float) -> None:
    match, runs = runs_of(lambda product, query, key: cap * np.tanh(0.5 * product / cap))
    found = rule(with_parts(match, cap=cap), runs)
    assert found.scale == pytest.approx(0.5, rel=1e-3)
    assert found.softcap == cap


def test_a_soft_cap_that_each_run_computes() -> None:
    match, runs = runs_of(lambda product, query, key: 2 * np.tanh(0.5 * product / 2))
    match = with_parts(match, cap=ir.Value(name="cap"))
    given = [run | {"cap": np.array([2.0, 2.0])} for run in runs]
    assert rule(match, given).softcap == 2
    given[1]["cap"] = np.array([2.0, 3.0])
    with pytest.raises(UnsupportedModelError, match="the soft cap of layer 0 is not a number"):
        rule(match, given)


def test_sinks_of_heads() -> None:
    match, runs = runs_of(lambda product, query, key: product)
    match = with_parts(match, sink=ir.Value(name="sink"))
    sinks = np.array([0.5, -1.0, 2.0, 3.0]).reshape(1, HEADS, 1, 1)
    given = [run | {"sink": sinks.repeat(run["query"].shape[2], 2)} for run in runs]
    found = rule(match, given).sink
    assert found is not None
    assert found.tolist() == [0.5, -1, 2, 3]
    given[2]["sink"] = given[2]["sink"] + [[[[0]], [[0]], [[1]], [[0]]]]
    with pytest.raises(
        UnsupportedModelError, match="the sink of layer 0 is not a number for each head"
    ):
        rule(match, given)


@pytest.mark.parametrize(
    ("scores", "why"),
    [
        (lambda product, query, key: -product, "not a multiple of query keys"),
        (lambda product, query, key: 0 * product, "not a multiple of query keys"),
        (lambda product, query, key: product + 0.1 * key, "not a multiple of query keys"),
        (lambda product, query, key: product + 0.02, "not a multiple of query keys"),
        (lambda product, query, key: np.where(key != 0, product, -1e9), "mask of layer 0 is not causal"),
        (lambda product, query, key: np.full_like(product, -1e9), "mask of layer 0 is not causal"),
        (lambda product, query, key: np.where(np.arange(HEADS)[:, None, None] == 1, -1e9, product),
         "mask of layer 0 is not causal"),
        (lambda product, query, key: np.where((query > 4) | (key > query - 2), product, -1e9),
         "mask of layer 0 is not causal"),
    ],
)  # fmt: skip
def test_scores_of_another_form(scores: Any, why: str) -> None:
    with pytest.raises(UnsupportedModelError, match=why):
        rule(*runs_of(scores))


def test_small_errors_of_arithmetic_are_no_other_form() -> None:
    assert (
        rule(*runs_of(lambda product, query, key: product + 0.0005 * np.sign(product))).window
        is None
    )
    half = read(model(GROWING, *(text.replace("float[", "float16[") for text in (PASTS, PRESENTS))))
    match, runs = runs_of(lambda product, query, key: product + 0.01)
    assert attention._rule(half, match, CALLS, runs).scale == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize("name", ["query", "scores"])
def test_tensors_of_another_rank(name: str) -> None:
    match, runs = runs_of(lambda product, query, key: product)
    runs[0 if name == "query" else -1][name] = runs[0 if name == "query" else -1][name][0]
    with pytest.raises(
        UnsupportedModelError, match=r"attention of layer 0 is not over \[B, heads, S, size\]"
    ):
        rule(match, runs)


def test_heads_and_sizes_that_do_not_fit() -> None:
    match, runs = runs_of(lambda product, query, key: product)
    for change in (lambda query: query[:, :3], lambda query: query[..., :3]):
        with pytest.raises(UnsupportedModelError, match=r"is not over \[B, heads, S, size\]"):
            rule(match, [{**runs[0], "query": change(runs[0]["query"])}, *runs[1:]])


# What is put in its place.


def put(rule: Rule, match: Match, foreign: ForeignGraph) -> tuple[ForeignGraph, ir.Node]:
    names = ("positions", "seqlens_k", "total", "last", "lengths", "input_lengths", "steps")
    rows = Rows(*(ir.Value(name=name) for name in names))
    made = attention.put_operators(foreign, Nodes(foreign.graph), rows, [match], [rule])
    node = made.layers[0].attention
    assert node is not None
    return made, node


@pytest.mark.parametrize(
    ("rule", "more"),
    [
        (Rule(4, 0.5, None, 0.0), {}),
        (Rule(4, 0.5, 8, 0.0), {"local_window_size": 8}),
        (Rule(4, 0.5, None, 30.0), {"softcap": 30.0}),
    ],
)
def test_the_operator_that_follows_a_rule(rule: Rule, more: dict[str, Any]) -> None:
    foreign = plain(weights="n = Abs(w)")
    reader = ir.node("Abs", [value(foreign, "o")])
    foreign.graph.append(reader)
    made, node = put(rule, matched(foreign), foreign)
    assert (node.op_type, node.domain) == ("GroupQueryAttention", "com.microsoft")
    attributes = {name: each.value for name, each in node.attributes.items()}
    assert attributes == {"num_heads": 4, "kv_num_heads": 2, "scale": 0.5, **more}
    assert [each.name for each in node.inputs[3:] if each] == [
        "past_0_key",
        "past_0_value",
        "seqlens_k",
        "total",
    ]
    for source, name in zip(node.inputs[:3], ("q", "k", "v"), strict=True):
        reshape = source.producer() if source else None  # [B, heads, S, D] → [B, S, heads * D]
        transpose = reshape.inputs[0].producer() if reshape and reshape.inputs[0] else None
        assert transpose is not None
        assert list(transpose.attributes["perm"].as_ints()) == [0, 2, 1, 3]
        assert transpose.inputs[0] is value(foreign, name)
    assert [(each.dtype, str(each.shape)) for each in node.outputs] == [
        (FLOAT, "[B,S,16]"),
        (FLOAT, "[B,2,T,4]"),
        (FLOAT, "[B,2,T,4]"),
    ]
    assert [each.name for each in foreign.graph.outputs] == [
        "logits",
        "present_0_key",
        "present_0_value",
    ]
    assert list(foreign.graph.outputs[1:]) == list(node.outputs[1:])
    assert list(made.layers[0].presents) == list(node.outputs[1:])
    assert [each.name for each in foreign.layers[0].presents] == [
        "present_0_key.grown",
        "present_0_value.grown",
    ]
    back = reader.inputs[0].producer() if reader.inputs[0] else None
    assert back is not None
    assert list(back.attributes["perm"].as_ints()) == [0, 2, 1, 3]
    assert str(back.outputs[0].shape) == "[B,4,S,4]"


def test_a_sink_becomes_an_input() -> None:
    foreign = plain()
    _, node = put(Rule(4, 0.5, None, 0.0, np.array([1.0, 2, 3, 4])), matched(foreign), foreign)
    sink = node.inputs[Slot.HEAD_SINK]
    assert sink is not None
    assert sink.const_value is not None
    assert (sink.name, sink.const_value.numpy().dtype) == ("qsample.sink_0", np.float32)
    assert sink.const_value.numpy().tolist() == [1, 2, 3, 4]


def test_flat_tensors_stay_flat() -> None:
    foreign = by_operator("<q_num_heads=4, kv_num_heads=2>")
    foreign.graph.append(ir.node("Abs", [value(foreign, "a")]))
    _, node = put(Rule(4, 0.5, None, 0.0), matched(foreign), foreign)
    assert [each.name for each in node.inputs[:3] if each] == ["q", "k", "v"]
    assert foreign.graph[-1].op_type == "GroupQueryAttention"
    assert next(
        each
        for each in foreign.graph
        if each.op_type == "Abs" and each.inputs[0] is node.outputs[0]
    )
