"""The kinds of products and attentions that are read from a graph; the package onnx writes the graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from qsample.ort.kernels import Attention, Constant, Kernel, Product, integers_of, read_kernels

FLOAT, HALF, BYTES, INTEGER = (
    TensorProto.FLOAT,
    TensorProto.FLOAT16,
    TensorProto.UINT8,
    TensorProto.INT32,
)
X = helper.make_tensor_value_info("x", FLOAT, ["rows", 8])


def constant(name: str, shape: Sequence[int], dtype: int = FLOAT) -> TensorProto:
    """A constant without its numbers, as of a file whose numbers lie elsewhere."""
    return TensorProto(name=name, dims=shape, data_type=dtype)


def graph_of(
    nodes: Sequence[onnx.NodeProto],
    constants: Sequence[TensorProto] = (),
    inputs: Sequence[onnx.ValueInfoProto] = (X,),
) -> onnx.GraphProto:
    return helper.make_graph(nodes, "graph", inputs, [], constants)


def kernels(graph: onnx.GraphProto, columns: int = 64) -> frozenset[Kernel]:
    return read_kernels(helper.make_model(graph).SerializeToString(), columns)


def only(
    nodes: Sequence[onnx.NodeProto],
    constants: Sequence[TensorProto] = (),
    inputs: Sequence[onnx.ValueInfoProto] = (X,),
    columns: int = 64,
) -> Any:
    (kernel,) = kernels(graph_of(nodes, constants, inputs), columns)
    return kernel


def packed(names: Sequence[str], **numbers: int) -> onnx.NodeProto:
    return helper.make_node("MatMulNBits", names, ["y"], domain="com.microsoft", **numbers)


FOUR_BITS = {"K": 64, "N": 48, "bits": 4, "block_size": 32}
WEIGHTS = constant("w", (48, 2, 16), BYTES)
SCALES = constant("s", (96,))


@pytest.mark.parametrize(
    ("numbers", "names", "constants", "dtype", "shapes", "dtypes"),
    [
        (FOUR_BITS, ["x", "w", "s"], [WEIGHTS, SCALES],
         "float32", ((48, 2, 16), (96,), ()), ("uint8", "float32", "")),
        (FOUR_BITS, ["x", "w", "s"], [WEIGHTS, constant("s", (96,), HALF)],
         "float16", ((48, 2, 16), (96,), ()), ("uint8", "float16", "")),
        # The last block may be a part; a block of bytes is as long as its bits.
        (FOUR_BITS | {"K": 65}, ["x", "w", "s"], [WEIGHTS, SCALES],
         "float32", ((48, 3, 16), (144,), ()), ("uint8", "float32", "")),
        (FOUR_BITS | {"bits": 8}, ["x", "w", "s"], [WEIGHTS, SCALES],
         "float32", ((48, 2, 32), (96,), ()), ("uint8", "float32", "")),
        # Zero points of three blocks take two bytes of each output, or a float each; then a bias.
        (FOUR_BITS | {"K": 96}, ["x", "w", "s", "z"], [WEIGHTS, SCALES, constant("z", (96,), BYTES)],
         "float32", ((48, 3, 16), (144,), (96,)), ("uint8", "float32", "uint8")),
        (FOUR_BITS | {"K": 96}, ["x", "w", "s", "z"], [WEIGHTS, SCALES, constant("z", (144,))],
         "float32", ((48, 3, 16), (144,), (144,)), ("uint8", "float32", "float32")),
        (FOUR_BITS, ["x", "w", "s", "", "", "b"], [WEIGHTS, SCALES, constant("b", (48,))],
         "float32", ((48, 2, 16), (96,), (), (), (48,)), ("uint8", "float32", "", "", "float32")),
    ],
)  # fmt: skip
def test_products_with_blocks(
    numbers: dict[str, int], names: list[str], constants: list[TensorProto], dtype: str,
    shapes: tuple[Any, ...], dtypes: tuple[str, ...],
) -> None:  # fmt: skip
    found = only([packed(names, **numbers)], constants)
    assert (found.operator, found.dtype, found.cast, found.given) == (
        "MatMulNBits",
        dtype,
        False,
        False,
    )
    assert (found.shapes, found.dtypes) == (shapes, dtypes)
    assert integers_of(found.attributes) == numbers
    assert found.inputs == numbers["K"]
    assert str(found) == f"MatMulNBits ({numbers['bits']} bits, blocks of 32)"


@pytest.mark.parametrize(
    ("outputs", "few"), [(64, 64), (80, 80), (81, 65), (96, 64), (1000, 72), (1007, 79)]
)
def test_wide_products_are_cut_and_keep_the_remainder(outputs: int, few: int) -> None:
    """Of 64 columns: the remainder by 16, which is what threads leave over."""
    block = only([packed(["x", "w", "s"], **FOUR_BITS | {"N": outputs})], [WEIGHTS, SCALES])
    assert (block.shapes[0][0], integers_of(block.attributes)["N"]) == (few, few)
    plain = only([helper.make_node("MatMul", ["x", "w"], ["y"])], [constant("w", (8, outputs))])
    assert plain.shapes == ((8, few),)
    turned = helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)
    assert only([turned], [constant("w", (outputs, 8))]).shapes == ((few, 8),)


MATMUL = helper.make_node("MatMul", ["x", "w"], ["y"])
GIVEN = helper.make_tensor_value_info("w", FLOAT, ["in", "out"])


@pytest.mark.parametrize(
    ("nodes", "constants", "inputs", "expected"),
    [
        ([MATMUL], [constant("w", (8, 5))], [X], ("MatMul", "float32", (8, 5), False, False, 8)),
        ([MATMUL], [constant("w", (8, 5), HALF)], [X], ("MatMul", "float16", (8, 5), False, False, 8)),
        ([helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)], [constant("w", (5, 8))], [X],
         ("Gemm", "float32", (5, 8), False, False, 8)),
        ([helper.make_node("FusedMatMul", ["x", "w"], ["y"], transB=0)], [constant("w", (8, 5))], [X],
         ("FusedMatMul", "float32", (8, 5), False, False, 8)),
        # The graph does not say how large the matrices of an adapter are.
        ([MATMUL], [], [X, GIVEN], ("MatMul", "float32", (64, 64), False, True, 64)),
        # What ONNX Runtime computes when it opens the graph: a cast, and a matrix turned round.
        ([helper.make_node("Cast", ["h"], ["w"], to=FLOAT), MATMUL], [constant("h", (8, 5), HALF)], [X],
         ("MatMul", "float32", (8, 5), True, False, 8)),
        ([helper.make_node("Transpose", ["t"], ["w"]), MATMUL], [constant("t", (5, 8))], [X],
         ("MatMul", "float32", (8, 5), False, False, 8)),
    ],
)  # fmt: skip
def test_products_of_floats(
    nodes: Any, constants: Any, inputs: Any, expected: tuple[Any, ...]
) -> None:
    found = only(nodes, constants, inputs)
    assert len(found.shapes) == 1
    shown = (found.operator, found.dtype, *found.shapes, found.cast, found.given, found.inputs)
    assert shown == expected
    assert found.dtypes == (found.dtype,)
    assert str(found) == f"{found.operator} ({found.dtype})"


@pytest.mark.parametrize(
    ("nodes", "constants", "inputs"),
    [
        ([helper.make_node("Add", ["x", "w"], ["y"])], [constant("w", (8, 5))], [X]),
        ([helper.make_node("MatMul", ["x"], ["y"])], [], [X]),
        ([helper.make_node("MatMul", ["", "w"], ["y"])], [constant("w", (8, 5))], [X]),
        # Two constants, a product of two computed values, integers, and a batch of matrices.
        ([helper.make_node("MatMul", ["w", "w"], ["y"])], [constant("w", (8, 8))], [X]),
        ([helper.make_node("MatMul", ["x", "unknown"], ["y"])], [], [X]),
        ([MATMUL], [constant("w", (8, 5), BYTES)], [X]),
        ([MATMUL], [constant("w", (2, 8, 5))], [X]),
        # The result of a cast of a computed value is computed as well.
        ([helper.make_node("Cast", ["x"], ["w"], to=FLOAT), MATMUL], [], [X]),
        ([helper.make_node("Cast", ["h"], ["w"], to=BYTES), MATMUL], [constant("h", (8, 5))], [X]),
        # An embedding is looked up in a run; levels without scales have no dtype.
        ([helper.make_node("GatherBlockQuantized", ["w8", "x", "s"], ["w"]), MATMUL],
         [constant("w8", (8, 5), BYTES), SCALES], [X]),
        ([helper.make_node("GatherBlockQuantized", ["w8", "i"], ["w"]), MATMUL],
         [constant("w8", (8, 5), BYTES), constant("i", (8,), INTEGER)], [X]),
    ],
)  # fmt: skip
def test_what_is_no_product_with_weights(nodes: Any, constants: Any, inputs: Any) -> None:
    assert kernels(graph_of(nodes, constants, inputs)) == frozenset()


@pytest.mark.parametrize(
    ("numbers", "width"), [({"bits": 4}, 16), ({}, 16), ({"bits": 8}, 8), ({"bits": 2}, 32)]
)
def test_levels_that_are_unpacked_when_the_graph_is_opened(
    numbers: dict[str, int], width: int
) -> None:
    """Rows of 8 bytes, with scales of float16."""
    unpack = helper.make_node("GatherBlockQuantized", ["w8", "i", "s"], ["w"], **numbers)
    constants = [
        constant("w8", (32, 8), BYTES),
        constant("i", (32,), INTEGER),
        constant("s", (32, 1), HALF),
    ]
    found = only([unpack, MATMUL], constants)
    assert (found.shapes, found.dtype, found.cast) == (((32, width),), "float16", False)


def test_a_constant_that_callers_may_replace_is_a_constant() -> None:
    """An input with a default, and two equal products, which are of one kind."""
    again = helper.make_node("MatMul", ["x", "w"], ["z"])
    found = only([MATMUL, again], [constant("w", (8, 5))], [X, GIVEN])
    assert (found.given, found.shapes) == (False, ((8, 5),))


def test_products_of_inner_graphs() -> None:
    """They see the constants of the graph around them, and their own before these."""
    inner = helper.make_graph([MATMUL], "inner", [], [])
    own = helper.make_graph([MATMUL], "own", [], [], [constant("w", (8, 6))])
    choice = helper.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=own)
    found = kernels(graph_of([choice], [constant("w", (8, 5))]))
    assert {kernel.shapes for kernel in found if isinstance(kernel, Product)} == {
        ((8, 5),),
        ((8, 6),),
    }
    for operator in ("Loop", "Scan"):
        loop = helper.make_node(operator, ["x"], ["y"], body=inner)
        assert len(kernels(graph_of([loop], [constant("w", (8, 5))]))) == 1


def experts(names: Sequence[str], operator: str, **numbers: int) -> onnx.NodeProto:
    return helper.make_node(operator, names, ["y"], domain="com.microsoft", **numbers)


def test_experts_of_floats_are_cut() -> None:
    """Eight experts of 512 hidden units and 128 values become two of 256. The first product has as many outputs as
    hidden units, twice with a gate; the second has as many inputs."""
    constants = [
        constant("w1", (8, 1024, 128)),
        constant("b1", (8, 1024)),
        constant("w2", (8, 128, 512)),
        constant("b2", (8, 128)),
    ]
    found = only([experts(["x", "r", "w1", "b1", "w2", "b2"], "MoE", k=2)], constants)
    assert (found.operator, found.dtype) == ("MoE", "float32")
    assert found.shapes == ((2, 512, 128), (2, 512), (2, 128, 256), (2, 128))
    assert found.dtypes == ("float32",) * 4
    assert integers_of(found.attributes) == {"k": 2}
    assert found.inputs == 128
    small = [constant("w1", (8, 64, 128), HALF), constant("w2", (8, 128, 64), HALF)]
    found = only([experts(["x", "r", "w1", "", "w2"], "MoE")], small)
    assert (found.dtype, found.shapes) == ("float16", ((2, 64, 128), (), (2, 128, 64)))
    assert found.dtypes == ("float16", "", "float16")


@pytest.mark.parametrize(("bits", "scale"), [(4, HALF), (8, FLOAT)])
def test_experts_of_packed_levels_are_cut(bits: int, scale: int) -> None:
    """The blocks of the second product's scales lie along the hidden units."""
    per_byte = 8 // bits
    names = ["x", "r", "w1", "s1", "b1", "w2", "s2", "b2", "", "", "", "z1", "z2"]
    constants = [
        constant("b1", (8, 1024)),
        constant("b2", (8, 128)),
        constant("w1", (8, 1024, 128 // per_byte), BYTES),
        constant("s1", (8, 1024, 4), scale),
        constant("w2", (8, 128, 512 // per_byte), BYTES),
        constant("s2", (8, 128, 16), scale),
        constant("z1", (8, 1024, 2), BYTES),
        constant("z2", (8, 128, 8), BYTES),
    ]
    numbers = {"expert_weight_bits": bits, "block_size": 32}
    found = only([experts(names, "QMoE", **numbers)], constants)
    assert found.dtype == ("float16" if scale == HALF else "float32")
    assert found.shapes == (
        (2, 512, 128 // per_byte),
        (2, 512, 4),
        (2, 512),
        (2, 128, 256 // per_byte),
        (2, 128, 8),
        (2, 128),
        (),
        (),
        (),
        (2, 512, 2),
        (2, 128, 4),
    )
    of_product = ("uint8", found.dtype, "float32")
    assert found.dtypes == (*of_product * 2, "", "", "", "uint8", "uint8")
    assert integers_of(found.attributes) == numbers
    assert found.inputs == 128
    assert str(found) == f"QMoE ({bits} bits, blocks of 32)"


@pytest.mark.parametrize(
    ("names", "numbers"),
    [
        (["x", "r", "w1", "s1", "", "w2"], {"expert_weight_bits": 4}),
        (["x", "r", "w1", "s1", "", "w2"], {"expert_weight_bits": 2, "block_size": 32}),
        (["x", "r", "w1", "s1", "", "w2"], {"block_size": 32}),
        (["x", "r", "w1", "s1", "", "x"], {"expert_weight_bits": 4, "block_size": 32}),
        (["x", "r", "x", "s1", "", "w2"], {"expert_weight_bits": 4, "block_size": 32}),
        (["x", "r", "w1"], {"expert_weight_bits": 4, "block_size": 32}),
    ],
)
def test_layouts_of_experts_that_no_exporter_writes(
    names: list[str], numbers: dict[str, int]
) -> None:
    constants = [
        constant("w1", (8, 64, 64), BYTES),
        constant("s1", (8, 64, 4)),
        constant("w2", (8, 64, 64), BYTES),
    ]
    assert kernels(graph_of([experts(names, "QMoE", **numbers)], constants)) == frozenset()


CACHE = helper.make_tensor_value_info("past", HALF, ["B", 3, "T", 16])
QUERY = helper.make_tensor_value_info("q", FLOAT, ["B", "S", 96])
SLOTS = 17  # with the tokens of each row in the last


def attention(inputs: Mapping[int, str], slots: int = SLOTS, **numbers: int) -> onnx.GraphProto:
    names = ["q", "k", "v", "past", *[""] * (slots - 4)]
    for slot, name in inputs.items():
        names[slot] = name
    node = helper.make_node("GroupQueryAttention", names, ["y"], domain="com.microsoft", **numbers)
    constants = [
        constant("cos", (999, 8)),
        constant("sin", (999, 8)),
        constant("scale", (1, 2, 5), HALF),
        constant("flat", (3, 4, 5)),
    ]
    return graph_of([node], constants, [QUERY, CACHE])


@pytest.mark.parametrize(
    ("inputs", "numbers", "expected"),
    [
        ({}, {"num_heads": 6}, Attention((), 3, 16, "float16", False, ())),
        ({1: ""}, {}, Attention((), 3, 16, "float16", True, ())),
        # Rotary tables of as many positions as the small attention has tokens; other constants as they are.
        ({7: "cos", 8: "sin", 15: "scale"}, {},
         Attention((), 3, 16, "float16", False,
                   (Constant(7, (12, 8), "float32"), Constant(8, (12, 8), "float32"),
                    Constant(15, (1, 2, 5), "float16")))),
        ({9: "scale"}, {}, Attention((), 3, 16, "float16", False, (Constant(9, (1, 2, 5), "float16"),))),
        # Two numbers of four bits are a byte of the cache.
        ({}, {"kv_cache_bit_width": 4}, Attention((), 3, 32, "float16", False, ())),
        ({}, {"kv_cache_bit_width": 8}, Attention((), 3, 16, "float16", False, ())),
    ],
)  # fmt: skip
def test_attention_to_the_tokens_of_each_row(
    inputs: dict[int, str], numbers: dict[str, int], expected: Attention
) -> None:
    (found,) = kernels(attention(inputs, **numbers))
    assert isinstance(found, Attention)
    assert found._replace(attributes=()) == expected
    assert integers_of(found.attributes) == numbers


@pytest.mark.parametrize(
    ("inputs", "slots", "numbers"),
    [
        ({}, SLOTS - 1, {}),
        ({3: ""}, SLOTS, {}),
        ({3: "flat"}, SLOTS, {}),
        ({3: "q"}, SLOTS, {}),
        ({7: "q"}, SLOTS, {}),
        ({15: "q"}, SLOTS, {}),
        ({}, SLOTS, {"sliding_window_cache": 1}),
    ],
)
def test_other_attentions(inputs: dict[int, str], slots: int, numbers: dict[str, int]) -> None:
    assert kernels(attention(inputs, slots, **numbers)) == frozenset()


@pytest.mark.parametrize("inputs", [0, 1 << 18 | 1])
def test_products_of_no_or_too_many_inputs(inputs: int) -> None:
    refused = pytest.raises(ValueError, match=f"it has a product with {inputs} inputs")
    with refused:
        only([MATMUL], [constant("w", (inputs, 5))])
    with refused:
        only([packed(["x", "w", "s"], **FOUR_BITS | {"K": inputs})], [WEIGHTS, SCALES])
    assert only([MATMUL], [constant("w", (1 << 18, 5))]).inputs == 1 << 18
    assert only([MATMUL], [constant("w", (1, 5))]).inputs == 1


def test_a_hundred_kinds_and_one_more() -> None:
    def matrices(count: int) -> onnx.GraphProto:
        nodes = [helper.make_node("MatMul", ["x", f"w{i}"], [f"y{i}"]) for i in range(count)]
        return graph_of(nodes, [constant(f"w{i}", (8, 1 + i)) for i in range(count)])

    assert len(kernels(matrices(100), columns=1000)) == 100
    with pytest.raises(ValueError, match="more than 100 kinds of products"):
        kernels(matrices(101), columns=1000)


def test_integers_of_attributes() -> None:
    """The last of an attribute's integers, as protobuf's parsers take it; none for another type."""
    attributes = [
        helper.make_attribute("a", 3).SerializeToString(),
        helper.make_attribute("b", 1.5).SerializeToString(),
        helper.make_attribute("c", 1).SerializeToString()
        + helper.make_attribute("d", 2).SerializeToString(),
    ]
    assert integers_of(attributes) == {"a": 3, "b": 0, "d": 2}


def test_names_that_are_no_text() -> None:
    """ONNX asks for UTF-8, and nothing makes a writer keep to it."""
    text = helper.make_model(graph_of([MATMUL], [constant("w", (8, 5))])).SerializeToString()
    (found,) = read_kernels(text.replace(b"w", b"\xff"), 64)
    assert isinstance(found, Product)
    assert found.shapes == ((8, 5),)


def test_a_number_that_is_stored_as_bytes_is_none() -> None:
    attribute = helper.make_attribute("a", "bytes").SerializeToString()
    assert b"\x22\x05bytes" in attribute  # field 4
    assert integers_of([attribute.replace(b"\x22\x05bytes", b"\x1a\x05bytes")]) == {"a": 0}
