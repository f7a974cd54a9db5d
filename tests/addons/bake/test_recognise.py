"""A decoder's graph without functions, or one line that says why it cannot be read."""

from __future__ import annotations

import logging
from pathlib import Path

import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from qsample.addons.bake import recognise as recognition
from qsample.addons.bake.conventions import refusal
from qsample.addons.bake.files import locate
from qsample.addons.bake.recognise import graph_errors, load
from qsample.errors import QsampleError, UnsupportedModelError
from qsample.package.disk.protobuf import field

IMPORTS = 'opset_import: ["": 20, "mine": 1, "com.microsoft": 1]'
HEAD = f"<ir_version: 10, {IMPORTS}> g (float[n] x) => (float[n] y)"
TWICE = f'<domain: "mine", {IMPORTS}> Twice (a) => (b) {{ b = Add(a, a) }}'


def written(folder: Path, text: str) -> Path:
    onnx.save(onnx.parser.parse_model(text), folder / "model.onnx")
    return folder / "model.onnx"


def test_functions_are_put_in_place(tmp_path: Path) -> None:
    four = f'<domain: "mine", {IMPORTS}> Four (a) => (b) {{ m = mine.Twice(a) b = mine.Twice(m) }}'
    body = "{ unused = Abs(x)  c = Constant<value_float=2.0>()  m = mine.Four(x)  y = Mul(m, c) }"
    model = load(written(tmp_path, f"{HEAD} {body} {TWICE} {four}"))
    assert [node.op_type for node in model.graph] == ["Add", "Add", "Mul"]
    assert not model.functions
    assert [value.const_value.numpy().tolist() for value in model.graph.initializers.values()] == [
        2.0
    ]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "operator",
    [
        *("CausalConvWithState", "LinearAttention", "MatMulNBits"),
        *("SkipSimplifiedLayerNormalization", "SkipLayerNormalization"),
    ],
)
def test_operators_of_onnx_runtime_stay(operator: str, tmp_path: Path) -> None:
    """Those of its domain, whatever function a file has for them."""
    ours, theirs = (f'<domain: "{name}", {IMPORTS}> {operator} (a) => (b) {{ b = Add(a, a) }}' for name in
                    ("com.microsoft", "mine"))  # fmt: skip
    body = f"{{ m = com.microsoft.{operator}(x)  y = mine.{operator}(m) }}"
    model = load(written(tmp_path, f"{HEAD} {body} {ours} {theirs}"))
    assert [(node.domain, node.op_type) for node in model.graph] == [
        ("com.microsoft", operator),
        ("", "Add"),
    ]
    assert not model.functions


def test_other_functions_of_its_domain_do_not(tmp_path: Path) -> None:
    function = f'<domain: "com.microsoft", {IMPORTS}> Gelu (a) => (b) {{ b = Add(a, a) }}'
    model = load(written(tmp_path, f"{HEAD} {{ y = com.microsoft.Gelu(x) }} {function}"))
    assert [node.op_type for node in model.graph] == ["Add"]


@pytest.mark.ci
def test_no_more_nodes_than_a_model_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of a small file may stand for billions; they are counted first."""
    functions = [TWICE] + [
        f'<domain: "mine", {IMPORTS}> F{number} (a) => (b) {{ m = mine.{inner}(a) b = mine.{inner}(m) }}'
        for number, inner in enumerate(["Twice", *(f"F{number}" for number in range(15))])
    ]
    path = written(tmp_path, f"{HEAD} {{ y = mine.F15(x) }} {' '.join(functions)}")
    with pytest.raises(
        UnsupportedModelError,
        match=r"its functions stand for 65536 nodes, and bake reads at most 50000$",
    ):
        load(path)
    path = written(tmp_path, f"{HEAD} {{ m = mine.F1(x)  y = Abs(m) }} {' '.join(functions)}")
    monkeypatch.setattr(recognition, "_MAX_NODES", 5)
    assert len(list(load(path).graph)) == 5
    monkeypatch.setattr(recognition, "_MAX_NODES", 4)
    with pytest.raises(UnsupportedModelError, match="for 5 nodes"):
        load(path)


def test_no_more_nodes_than_a_model_has_without_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, f"{HEAD} {{ a = Abs(x)  b = Abs(a)  y = Abs(b) }}")
    monkeypatch.setattr(recognition, "_MAX_NODES", 3)
    assert len(list(load(path).graph)) == 3
    monkeypatch.setattr(recognition, "_MAX_NODES", 2)
    with pytest.raises(UnsupportedModelError, match="it has 3 nodes, and bake reads at most 2"):
        load(path)


def test_a_million_nodes_are_not_read(tmp_path: Path) -> None:
    """A file of 12 MB. All of them took minutes."""
    graph = field(1, field(4, b"Identity")) * 10**6
    (tmp_path / "model.onnx").write_bytes(field(7, graph))
    with pytest.raises(UnsupportedModelError, match="it has more than 131072 nodes"):
        locate(tmp_path)


def test_a_circle_of_functions(tmp_path: Path) -> None:
    circle = [
        f'<domain: "mine", {IMPORTS}> {a} (a) => (b) {{ b = mine.{b}(a) }}' for a, b in ("AB", "BA")
    ]
    with pytest.raises(
        UnsupportedModelError, match=r"model\.onnx cannot be baked: its functions call one another"
    ):
        load(written(tmp_path, f"{HEAD} {{ y = mine.A(x) }} {' '.join(circle)}"))


def test_a_function_of_another_opset(tmp_path: Path) -> None:
    function = TWICE.replace('["": 20', '["": 13')
    with pytest.raises(
        UnsupportedModelError, match=r"its functions cannot be inlined \(.*Opset mismatch"
    ) as caught:
        load(written(tmp_path, f"{HEAD} {{ y = mine.Twice(x) }} {function}"))
    assert "\n" not in str(caught.value)


def test_no_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library, which would print names as they are, is silent meanwhile."""
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    log, real, silent = logging.getLogger("onnx_ir.serde"), ir.load, []

    def look(path: Path) -> ir.Model:
        silent.append(log.disabled)
        return real(path)

    monkeypatch.setattr(ir, "load", look)
    for before in (False, True):
        log.disabled = before
        try:
            with pytest.raises(
                UnsupportedModelError, match=r"model\.onnx is not an ONNX file \(\w+: .*\)$"
            ):
                load(tmp_path / "model.onnx")
            assert log.disabled is before
        finally:
            log.disabled = False
    assert silent == [True, True]


@pytest.mark.parametrize("error", [QsampleError("a"), OSError("b"), MemoryError("c")])
def test_errors_with_a_meaning_pass(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, graph_errors(Path("model.onnx")):
        raise error
    assert caught.value is error


def test_errors_of_libraries_become_one_line() -> None:
    error = KeyError("two\nlines " + "x" * 300)
    with pytest.raises(UnsupportedModelError) as caught, graph_errors(Path("model.onnx")):
        raise error
    assert caught.value.__cause__ is error
    start = (
        "model.onnx cannot be baked: its graph is not as its operators are defined (KeyError: 'two"
    )
    assert str(caught.value).startswith(start)
    assert str(caught.value).count("x") == 200 - len("'two\\nlines ") + 1  # and that of onnx
    assert str(refusal(Path("a"), "one\n two ")) == "a cannot be baked: one two"


def test_sizes_that_are_written_as_names_are_numbers(tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[B,2] x) => (float[B,2] y) { y = Neg (x) }'
    model = onnx.parser.parse_model(text)
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "2"
    onnx.save(model, tmp_path / "model.onnx")
    shape = load(tmp_path / "model.onnx").graph.inputs[0].shape
    assert shape is not None
    assert (str(shape[0]), shape[1]) == ("B", 2)
