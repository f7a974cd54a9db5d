"""Which bits a matrix gets: its name in a graph, and the entry of a table that a name matches."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir
import pytest

from qsample.compiler.quantize import INT_BITS, PRESETS, Preset, entry_of_table
from qsample.compiler.quantize.bits import PLAIN, BitsTable, layers_of, names_of, table_of
from qsample.compiler.quantize.methods import WeightQuantization
from qsample.graph.edit import insert, put_behind
from tests.helpers.small_graphs import loop_graph, normal, small_graph


def decoder(layers: int, *, adapts: bool = False) -> ir.Model:
    """Layers of qkv → mix → out → up → down; then the head. adapts: beside each product of a layer is an adapter's."""
    states = "".join(f", float[1,4] state{layer}" for layer in range(layers))
    body, value = [], "x"
    for i in range(layers):
        body += [
            f"n{i} = Relu({value})",
            f"qkv{i} = MatMul(n{i}, w)",
            f"mix{i} = Add(qkv{i}, state{i})",
        ]
        body += [
            f"out{i} = MatMul(mix{i}, w)",
            f"r{i} = Add({value}, out{i})",
            f"up{i} = MatMul(r{i}, w)",
        ]
        body += [f"down{i} = MatMul(up{i}, w)", f"s{i} = Add(r{i}, down{i})"]
        value = f"s{i}"
    body += [f"norm = Relu({value})", "logits = MatMul(norm, w)"]
    model = small_graph(
        f"g (float[1,4] x, float[4,4] w{states}) => (float[1,4] logits) {{ {chr(10).join(body)} }}"
    )
    for layer, state in enumerate(model.graph.inputs[2:]):
        state.name = f"past_key_values.{layer}.key"
    *of_layers, _head = [node for node in model.graph if node.op_type == "MatMul"]
    for node in of_layers if adapts else []:
        matrices = [ir.Value(name=f"{node.outputs[0].name}.lora_{part}") for part in "AB"]
        model.graph.inputs.extend(matrices)
        total = put_behind(node.outputs[0], "Add", [node.outputs[0]]).producer()
        assert total is not None
        narrow = insert(total, "MatMul", [node.inputs[0], matrices[0]], ["B", 4])
        total.replace_input_with(1, insert(total, "MatMul", [narrow, matrices[1]], ["B", 4]))
    return model


@pytest.mark.parametrize("adapts", [False, True])
@pytest.mark.parametrize("layers", [0, 1, 2, 5])
def test_names_of_matrices(layers: int, adapts: bool) -> None:
    model = decoder(layers, adapts=adapts)
    products = [
        node for node in model.graph if node.op_type == "MatMul" and node.inputs[1].name == "w"
    ]
    roles = {"qkv": "qkv_proj", "out": "o_proj", "up": "gate_up_proj", "down": "down_proj"}
    expected = {
        f"{part}{layer}": f"layers.{layer}.{role}"
        for layer in range(layers)
        for part, role in roles.items()
    }
    found = {node.outputs[0].name: name for node, name in names_of(model.graph, products).items()}
    assert found == {**expected, "logits": "lm_head"}
    assert layers_of(model.graph) == layers


def test_a_layer_of_several_products_of_a_name() -> None:
    """Queries and keys apart, a gate beside up; a lookup; a product before the first layer."""
    model = small_graph(
        """g (int64[1] ids, float[1,4] past, float[9,4] table, float[4,4] w) => (float[1,4] logits, float[1,4] aside) {
            embedded = Gather (table, ids)
            early = MatMul (embedded, w)
            q = MatMul (early, w)
            k = MatMul (early, w)
            length = Shape (past)
            mix = Sum (q, k, past)
            twice = Add (mix, past)
            o = MatMul (twice, w)
            gate = MatMul (o, w)
            up = MatMul (o, w)
            both = Mul (gate, up)
            down = MatMul (both, w)
            logits = MatMul (down, w)
            side = Sum (q, k, past)
            aside = Identity (side)
        }"""
    )
    model.graph.inputs[1].name = "past_key_values.0.key"
    nodes = [node for node in model.graph if node.op_type in ("Gather", "MatMul")]
    found = {node.outputs[0].name: name for node, name in names_of(model.graph, nodes).items()}
    assert found == {
        "embedded": "embed_tokens",
        "early": "layers.0.gate_up_proj",
        "q": "layers.0.qkv_proj",
        "k": "layers.0.qkv_proj",
        "o": "layers.0.o_proj",
        "gate": "layers.0.gate_up_proj",
        "up": "layers.0.gate_up_proj",
        "down": "layers.0.down_proj",
        "logits": "lm_head",
    }
    assert list(found) == [node.outputs[0].name for node in nodes]
    assert layers_of(model.graph) == 1, "several readers of its state, and one Shape"


def test_products_of_a_model_without_layers_and_in_loops() -> None:
    """A product that is in no layer, as in the body of a loop, has another name than all patterns of layers."""
    model = loop_graph(normal(64, 32), normal(64, 32))
    products = [node for node in model.graph.all_nodes() if node.op_type == "MatMul"]
    assert set(names_of(model.graph, products).values()) == {"other"}
    assert layers_of(model.graph) == 0
    beside = decoder(2)
    of_layers = [node for node in beside.graph if node.op_type == "MatMul"]
    found = names_of(beside.graph, [*of_layers, *products])
    assert {found[node] for node in products} == {"other"}
    assert {node: found[node] for node in of_layers} == names_of(beside.graph, of_layers)


@pytest.mark.parametrize(
    ("given", "bits", "expected"),
    [
        (
            {},
            4,
            {
                "lm_head": 8,
                "layers.1.down_proj": 4,
                "embed_tokens": 4,
                "layers.0.o_proj": 8,
                "layers.3.o_proj": 8,
            },
        ),
        ({}, 8, {"lm_head": 8, "layers.1.down_proj": 8}),
        (
            {},
            2,
            {
                "lm_head": 8,
                "layers.1.down_proj": 2,
                "layers.1.qkv_proj": 4,
                "layers.3.down_proj": 4,
            },
        ),
        ({"lm_head": "int4"}, 4, {"lm_head": 4, "layers.1.down_proj": 4, "layers.0.down_proj": 8}),
        (
            {"layers.*": "int8", "layers.1.*": "int2", "*": "float"},
            4,
            {"layers.1.o_proj": 8, "lm_head": None},
        ),
    ],
)
def test_a_table_of_bits(given: dict[str, str], bits: int, expected: dict[str, int | None]) -> None:
    """The caller's entries come first, and the first that matches counts."""
    table = table_of(given, bits, Preset("rtn", 32, head="int8:64", outer="int8"), layers=4)
    ways = {name: table.way(name, WeightQuantization(bits)) for name in expected}
    assert {name: None if way is None else way.bits for name, way in ways.items()} == expected
    sizes = {
        name: way.block_size for name, way in ways.items() if way is not None and name != "lm_head"
    }
    assert set(sizes.values()) == {32}


def test_block_sizes_of_a_table() -> None:
    way = WeightQuantization(4, 32, "gptq", zero_points=True)
    table = BitsTable({"lm_head": "int8:64", "layers.0.*": "int4:16", "*": "int8"})
    assert table.way("lm_head", way) == replace(way, bits=8, block_size=64)
    assert table.way("layers.0.o_proj", way) == replace(way, block_size=16)
    assert table.way("other", way) == replace(way, bits=8)
    assert PLAIN.way("lm_head", way) is way


def test_defaults_of_a_table() -> None:
    """The first and the last layer are the outer ones. What the caller names is not named again behind it."""
    preset = Preset("rtn", 32, head="int4:16", outer="int8:128")
    assert table_of({}, 4, preset, layers=3).entries == {
        "lm_head": "int4:16",
        "layers.0.*": "int8:128",
        "layers.2.*": "int8:128",
    }
    assert table_of({}, 4, preset, layers=1).entries == {
        "lm_head": "int4:16",
        "layers.0.*": "int8:128",
    }
    assert table_of({}, 4, preset, layers=0).entries == {"lm_head": "int4:16"}
    assert table_of({}, 2, preset, layers=2).entries == {
        "lm_head": "int8:128",
        "layers.0.*": "int4",
        "layers.1.*": "int4",
        "*.qkv_proj": "int4",
        "*.o_proj": "int4",
        "embed_tokens": "int4",
    }
    given = {"layers.0.*": "float", "*": "int4"}
    table = table_of(given, 4, preset, layers=2)
    assert list(table.entries.items()) == [
        *given.items(),
        ("lm_head", "int4:16"),
        ("layers.1.*", "int8:128"),
    ]


def test_presets() -> None:
    """As in docs/quantization.md: the method, the weights that share a scale, and the bits of the head and of the outer
    layers."""
    assert {name: tuple(preset) for name, preset in PRESETS.items()} == {
        "quick": ("rtn", 32, "int4:32", "int8:128"),
        "balanced": ("gptq", 64, "int4:32", "int8:128"),
        "speed": ("gptq", 128, "int4:32", "int4"),
    }
    assert [preset.fitted for preset in PRESETS.values()] == [False, True, True]


def test_entries_of_tables() -> None:
    assert dict(INT_BITS) == {"int2": 2, "int4": 4, "int8": 8}
    entries = {"int2": (2, None), "int4:16": (4, 16), "int8:256": (8, 256), "float": (None, None)}
    assert {entry: entry_of_table(entry) for entry in entries} == entries
    for entry in ("", "int3", "int4:", "int4:48", "float:32", ":32", "int4:32:32"):
        with pytest.raises(ValueError, match=f"{entry!r} is no entry of a table of bits"):
            entry_of_table(entry)
