"""Input from strangers: names that any system would take for something else, JSON as a value or a ValueError of one
line, and the files that an ONNX file refers to.
"""

from __future__ import annotations

import json
import os
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, TensorProto, helper

from qsample.package.disk.protobuf import field
from qsample.package.disk.untrusted import (
    colliding_name,
    parse_json,
    path_below,
    problem_of_name,
    read_json,
    referenced_files,
)

GOOD_NAMES = [
    *(
        "decoder.onnx",
        "decoder.onnx.data",
        "tokenizer/extra.json",
        "a/b/c",
        ".hidden",
        "x..y",
        "...x",
        "Überraschung",
    ),
    *(
        "con1",
        "console",
        "comet",
        "com10",
        "nulls.json",
        "auxiliary.txt",
        "a b",
        "100%",
        "模型.json",
        "x" * 255,
    ),
]
OUTSIDE = [
    *(
        "/etc/passwd",
        "..",
        "../x",
        "a/../b",
        "a/..",
        "/",
        "//server/share",
        "C:/x",
        "c:x",
        "C:",
        "c:\\x",
    ),
    *("..\\x", "a\\b", "\\\\server\\share", "\\x", "\\\\?\\C:\\x", "a/..\\b"),
]
EMPTY_PARTS = ["", ".", "./x", "a/./b", "a//b", "a/"]
CHARACTERS = [
    "a\0b",
    "a\nb",
    "ab:c",
    "file:stream",
    "a*",
    "a?",
    'a"',
    "a|b",
    "<a",
    "a>",
    "a\x7f",
    "a\x9b1m",
]
DEVICES = [
    "con",
    "NUL",
    "Aux.txt",
    "a/prn",
    "COM1",
    "lpt9.json",
    "com¹",
    "CONIN$",
    "nul .txt",
    "a/com0/b",
]
ENDS = ["a.", "a ", "a./b", "a/b ."]


def test_paths_below_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "a").mkdir(parents=True)
    (folder / "same").symlink_to("a")
    (folder / "out").symlink_to(tmp_path)
    (tmp_path / "alias").symlink_to(folder)
    given = tmp_path / "alias"
    for name in (
        "a",
        "a/x",
        "./a//x",
        "same/x",
        "none/x",
        "a\\..",
        str(folder / "a"),
        str(given / "a"),
    ):
        path = path_below(given, name)
        assert path is not None, name
        assert path == folder.resolve() / Path(name).relative_to(
            next((base for base in (folder, given) if Path(name).is_relative_to(base)), "")
        )
    assert path_below(given, "") == path_below(given, ".") == folder.resolve()
    outside = (
        "..",
        "a/..",
        "a/../a",
        "../folder/a",
        "out",
        "out/folder/a",
        "/",
        "/etc",
        str(tmp_path),
    )
    for name in (*outside, f"{folder}2", f"{tmp_path}/folder/../folder/a"):
        assert path_below(given, name) is None, name
    with pytest.raises(ValueError, match="null"):
        path_below(given, "a\0")


@pytest.mark.parametrize("name", GOOD_NAMES)
def test_good_names(name: str) -> None:
    assert problem_of_name(name) is None


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (OUTSIDE, "lies outside the package"),
        (EMPTY_PARTS, "empty part"),
        (CHARACTERS, "character that file names must not have"),
        (DEVICES, "device on Windows"),
        (ENDS, "ends with a dot or a space"),
        (["x" * 256, "é" * 128, "a/" + "x" * 256], "longer than 255 bytes"),
        (["\ud800"], "not Unicode text"),
    ],
)
def test_bad_names(names: list[str], problem: str) -> None:
    for name in names:
        assert problem in (problem_of_name(name) or ""), name


@pytest.mark.parametrize(
    "names",
    [
        ["a", "A"],
        ["a/b", "A/B"],
        ["stra\u00dfe", "STRASSE"],
        ["\u00e9", "e\u0301"],
        ["a", "a/b"],
        ["A/b", "a"],
        ["x", "y/z", "Y/Z/q"],
        ["\u212a", "k"],
    ],
)
def test_names_that_are_one_file_somewhere(names: list[str]) -> None:
    assert colliding_name(names) is not None
    assert colliding_name(reversed(names)) is not None


def test_names_that_are_not() -> None:
    assert colliding_name(["a", "b", "c/a", "c/b", "ca", "d/c/a", "a.b"]) is None
    assert colliding_name([]) is None


GOOD_JSON = [
    {"a": [1, -2.5, 1e300, True, None, "ü"], "b": {}},
    {"model_max_length": 1000000000000000019884624838656},  # transformers writes this
    [[[[]]]],
    "text",
    0,
]
BAD_JSON = [
    ("", "Expecting value"),
    ("{", "Expecting"),
    ('{"a": 1, "a": 2}', "'a' comes twice"),
    ('{"x": {"b": 1, "c": 0, "b": 1}}', "'b' comes twice"),
    ("NaN", "NaN is not JSON"),
    ('{"a": -Infinity}', "-Infinity is not JSON"),
    ("[Infinity]", "Infinity is not JSON"),
    ("1e999", "1e999 is too large"),
    ("[-1E+400]", "too large"),
    ("9" * 401, "too large"),
    ("9" * 5000, "too large"),
    ("[" * 66 + "]" * 66, "more than 64 deep"),
    ('{"a":' * 66 + "1" + "}" * 66, "more than 64 deep"),
    ("[" * 1_000_000, "more than 64 deep"),
    ('{"a":' * 300_000, "more than 64 deep"),
    ("[1] []", "Extra data"),
    ('"\x01"', "Invalid control character"),
]


@pytest.mark.parametrize("value", GOOD_JSON, ids=lambda value: json.dumps(value)[:20])
def test_good_json(value: object) -> None:
    assert parse_json(json.dumps(value)) == value


@pytest.mark.parametrize(("text", "problem"), BAD_JSON, ids=[text[:12] for text, _ in BAD_JSON])
def test_bad_json(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        parse_json(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_the_infinities_of_pythons_own_json() -> None:
    limits = {"time_step_limit": [0.0, float("inf")], "least": -float("inf")}
    assert parse_json(json.dumps(limits), infinities=True) == limits
    for text in ("NaN", "[1e999]"):
        with pytest.raises(ValueError, match=r"JSON|too large"):
            parse_json(text, infinities=True)


def test_64_deep_is_fine() -> None:
    assert parse_json("[" * 64 + "]" * 64)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b'{"a": 1}')
    assert read_json(path) == {"a": 1}
    with pytest.raises(ValueError, match="larger than 0 MiB"):
        read_json(path, largest=7)
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="utf-8"):
        read_json(path)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "missing")
    with pytest.raises(ValueError, match="not a plain file"):
        read_json(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a plain file"):
        read_json(tmp_path / "pipe")


def external(location: str, *, name: str = "weight", declared: bool = True) -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[4])
    if declared:
        tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("offset", "0"), ("location", location), ("length", "16")):
        tensor.external_data.add(key=key, value=value)
    return tensor


def graph(*nodes: Any, initializers: Any = (), name: str = "graph") -> onnx.GraphProto:
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    return helper.make_graph(list(nodes), name, [], [output], list(initializers))


def constant(location: str) -> onnx.NodeProto:
    return helper.make_node("Constant", [], ["y"], value=external(location))


def nested(depth: int, location: str) -> onnx.NodeProto:
    node = constant(location)
    for _ in range(depth):
        node = helper.make_node("If", ["c"], ["y"], then_branch=graph(node), else_branch=graph())
    return node


def context(
    file: str, mode: int | None = 0, operator: str = "EPContext", domain: str = "com.microsoft"
) -> onnx.NodeProto:
    attributes: dict[str, Any] = {} if mode is None else {"embed_mode": mode}
    attributes |= {
        "fixed": 0.5,
        "doubles": onnx.numpy_helper.from_array(np.ones(1)),
        "zeros": [0.0],
    }
    return helper.make_node(
        operator, ["x"], ["y"], domain=domain, ep_cache_context=file, **attributes
    )


def model(*nodes: Any, **options: Any) -> onnx.ModelProto:
    return helper.make_model(graph(*nodes, **options))


def without_number(made: onnx.ModelProto) -> onnx.ModelProto:
    """A parser takes it for 0."""
    next(one for one in made.graph.node[0].attribute if one.name == "embed_mode").ClearField("i")
    return made


def sparse() -> onnx.ModelProto:
    made = model()
    made.graph.sparse_initializer.add(
        values=external("sparse"), indices=external("indices"), dims=[4]
    )
    node = made.graph.node.add(op_type="Constant", output=["y"])
    attribute = node.attribute.add(name="sparse_value", type=AttributeProto.SPARSE_TENSOR)
    attribute.sparse_tensor.CopyFrom(made.graph.sparse_initializer[0])
    attribute.sparse_tensor.values.external_data[1].value = "sparse attribute"
    attribute.sparse_tensors.add(values=external("sparse attributes"))
    return made


def everywhere() -> onnx.ModelProto:
    made = model(constant("constant"), nested(3, "nested"), initializers=[external("initializer")])
    made.graph.node[0].attribute.add(name="many", type=AttributeProto.TENSORS).tensors.append(
        external("tensors")
    )
    graphs = made.graph.node[0].attribute.add(name="graphs", type=AttributeProto.GRAPHS).graphs
    graphs.append(graph(constant("graphs")))
    function = made.functions.add(name="f", domain="mine")
    function.node.append(constant("function"))
    function.attribute_proto.add(name="default", type=AttributeProto.TENSOR).t.CopyFrom(
        external("default")
    )
    training = made.training_info.add()
    training.initialization.CopyFrom(graph(constant("initialization")))
    training.algorithm.CopyFrom(graph(constant("algorithm")))
    return made


CASES: dict[str, tuple[onnx.ModelProto, set[str]]] = {
    "none": (model(helper.make_node("Identity", ["x"], ["y"])), set()),
    "inline": (
        model(initializers=[onnx.numpy_helper.from_array(np.zeros(1000, np.float32), "w")]),
        set(),
    ),
    "one": (model(initializers=[external("decoder.onnx.data")]), {"decoder.onnx.data"}),
    "two": (model(initializers=[external("a"), external("b", name="other")]), {"a", "b"}),
    "not declared external": (model(initializers=[external("hidden", declared=False)]), {"hidden"}),
    "everywhere": (
        everywhere(),
        {
            *(
                "constant",
                "nested",
                "initializer",
                "tensors",
                "graphs",
                "function",
                "default",
                "initialization",
            ),
            "algorithm",
        },
    ),
    "sparse": (sparse(), {"sparse", "indices", "sparse attribute", "sparse attributes"}),
    "context": (model(context("engine.bin")), {"engine.bin"}),
    "context inside": (model(context("\0the engine itself", 1)), set()),
    "context without mode": (model(context("the engine itself", None)), set()),
    "context of another domain": (model(context("engine.bin", domain="")), {"engine.bin"}),
    "context of another mode": (model(context("engine.bin", 7)), {"engine.bin"}),
    "context in a branch": (
        model(
            helper.make_node(
                "If", ["c"], ["y"], then_branch=graph(context("deep")), else_branch=graph()
            )
        ),
        {"deep"},
    ),
    "context whose mode has no number": (
        without_number(model(context("engine.bin"))),
        {"engine.bin"},
    ),
    "no context": (model(context("engine.bin", operator="Other")), set()),
    "not text": (model(initializers=[external("placeholder")]), {"placeholder"}),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_referred_to(name: str, tmp_path: Path) -> None:
    made, wanted = CASES[name]
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
    assert referenced_files(tmp_path / "m.onnx") == wanted


def test_weights_inside_cost_nothing(tmp_path: Path) -> None:
    made = model(initializers=[onnx.numpy_helper.from_array(np.zeros(1 << 20, np.float32), "w")])
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
    tracemalloc.start()
    try:
        assert referenced_files(tmp_path / "m.onnx") == set()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_location_that_comes_twice_counts_twice(tmp_path: Path) -> None:
    tensor = external("first")
    tensor.external_data.add(key="location", value="second")
    made = model(initializers=[tensor]).SerializeToString()
    entry = b"\x0a\x08location\x12\x05third\x12\x06fourth"  # one entry with two values
    tensor_bytes = external("first").SerializeToString() + b"\x6a" + bytes([len(entry)]) + entry
    graph_bytes = b"\x2a" + bytes([len(tensor_bytes)]) + tensor_bytes
    made += (
        b"\x3a" + bytes([len(graph_bytes)]) + graph_bytes
    )  # protobuf merges it with the first graph
    (tmp_path / "m.onnx").write_bytes(made)
    assert {
        value.value
        for t in onnx.ModelProto.FromString(made).graph.initializer
        for value in t.external_data
    } >= {
        *("first", "second", "fourth"),
    }
    assert referenced_files(tmp_path / "m.onnx") == {"first", "second", "third", "fourth"}


def test_fields_of_other_types_than_onnx_gives_them_are_passed_over(tmp_path: Path) -> None:
    mode = field(1, b"embed_mode") + field(3, b"1") + field(3, 1)
    file = field(1, b"ep_cache_context") + field(1, 7) + field(4, 7) + field(4, b"engine.bin")
    node = field(4, b"EPContext") + field(4, 7) + field(5, 7) + field(5, mode) + field(5, file)
    for number, wanted in ((1, set()), (0, {"engine.bin"})):
        graph = field(1, 7) + field(1, node.replace(field(3, 1), field(3, number)))
        (tmp_path / "m.onnx").write_bytes(field(7, 7) + field(7, graph))
        assert referenced_files(tmp_path / "m.onnx") == wanted


def test_text_that_is_not_unicode_is_no_name_of_a_file(tmp_path: Path) -> None:
    made = model(initializers=[external("placeholder")]).SerializeToString()
    (tmp_path / "m.onnx").write_bytes(made.replace(b"placeholder", b"\xff\xfeaceholde\0"))
    assert referenced_files(tmp_path / "m.onnx") == {"\udcff\udcfeaceholde\0"}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"graph" * 1000,
        b"\x3a\xff\xff\xff\xff\x0f",
        b"\x3a\x05\x2a",
        b"\x3a" + b"\x80" * 20,
        b"\x08" + b"\xff" * 11,
        b"\x3b\x3c",
        b"\xba\x80\x80\x80\x7f\x00",
        b"\x0d\x00",
    ],
)
def test_what_is_no_onnx(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(ValueError, match="it is"):
        referenced_files(tmp_path / "m.onnx")


def test_too_deep(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(model(nested(30, "deep")).SerializeToString())
    assert referenced_files(tmp_path / "m.onnx") == {"deep"}
    message = b""
    for _ in range(200):  # Graph → Node → Attribute → Graph
        for tag in (b"\x32", b"\x2a", b"\x0a"):
            message = tag + _varint(len(message)) + message
    (tmp_path / "m.onnx").write_bytes(b"\x3a" + _varint(len(message)) + message)
    with pytest.raises(ValueError, match="more than 100 deep"):
        referenced_files(tmp_path / "m.onnx")


def _varint(value: int) -> bytes:
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def locations(made: onnx.ModelProto) -> set[str]:
    """As the package onnx sees them."""
    found: set[str] = set()

    def visit(message: Any) -> None:
        for descriptor, value in message.ListFields():
            if descriptor.message_type is None:
                continue
            values = value if descriptor.is_repeated else [value]
            for item in values:
                if descriptor.name == "external_data" and item.key == "location":
                    found.add(
                        item.value if isinstance(item.value, str) else os.fsdecode(item.value)
                    )
                visit(item)

    visit(made)
    return found


@pytest.mark.parametrize("count", [400, pytest.param(40_000, marks=pytest.mark.slow)])
def test_altered_files_hide_nothing(count: int, tmp_path: Path) -> None:
    """Whatever protobuf itself still reads of an altered file is found; anything else is a ValueError."""
    generator, whole = random.Random(5), everywhere().SerializeToString()
    compared = 0
    for _ in range(count):
        content = bytearray(whole)
        for _ in range(generator.choice([1, 1, 2, 5])):
            position = generator.randrange(len(content))
            if generator.random() < 0.3:
                del content[position : position + generator.randrange(1, 9)]
            else:
                content[position] = generator.randrange(256)
        (tmp_path / "m.onnx").write_bytes(content)
        try:
            made = onnx.ModelProto.FromString(bytes(content))
        except Exception:  # protobuf's DecodeError
            made = None
        try:
            found = referenced_files(tmp_path / "m.onnx")
        except ValueError:
            continue
        if made is not None:
            assert locations(made) <= found
            compared += 1
    assert compared > count / 10
