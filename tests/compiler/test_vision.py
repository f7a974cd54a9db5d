"""vision.onnx of device packages: how its weights are stored, and that it is compared before it is published."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from qsample.compiler import vision
from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.compiler.vision import compare_vision, compile_vision
from qsample.contract.interface import ImageShape, Interface, KeyValueShape
from qsample.errors import CompileError
from qsample.graph.edit import all_initializers
from qsample.graph.vision import vision_session
from qsample.ort.providers import CPU, CUDA
from qsample.ort.session import open_vision
from qsample.package.package import read_package
from tests.helpers.small_graphs import small_graph

VALUES, WIDTH = 256, 128
WEIGHT = np.random.default_rng(0).standard_normal((VALUES, WIDTH), np.float32)


@pytest.fixture
def plan(tmp_path: Path) -> Any:
    """Of a portable package whose tower is a product and its root mean square."""
    folder = tmp_path / "portable"
    folder.mkdir()
    model = small_graph(
        "vision (float[A, 256] pixel_values, int64[2] grid, float[256, 128] weight) => (float[A, 128] image_features) {"
        """ projected = MatMul(pixel_values, weight)
            image_features = Tanh(projected) }""",
        {"projected": ["A", WIDTH]},
        constants={"weight": WEIGHT},
    )
    ir.save(model, folder / "vision.onnx", external_data="vision.onnx.data")
    interface = Interface(
        8, (KeyValueShape(1, 8),), "float32", image=ImageShape(WIDTH, patch_values=VALUES)
    )
    parity = {
        "vision_images": [
            {"pixel_values": [6, VALUES], "grid": [2, 3]},
            {"pixel_values": [1, VALUES]},
        ]
    }
    parity["vision_images"][1]["grid"] = [1, 1]
    source = SimpleNamespace(path=folder, manifest=SimpleNamespace(parity=parity))
    options = SimpleNamespace(provider="cpu")
    return SimpleNamespace(
        source=source, interface=interface, weights=None, store_float16=False, options=options
    )


def compiled(plan: Any, tmp_path: Path, providers: tuple[str, ...] = (CPU,)) -> Path:
    folder, scratch = tmp_path / "compiled", tmp_path / "scratch"
    folder.mkdir()
    scratch.mkdir()
    compile_vision(plan, providers, folder, scratch)
    return folder


def stored(folder: Path) -> set[ir.DataType | None]:
    """The dtypes of matrices."""
    values = all_initializers(ir.load(folder / "vision.onnx").graph)
    return {value.dtype for value in values if value.shape is not None and len(value.shape) == 2}


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, ir.DataType.FLOAT),
        ({"store_float16": True}, ir.DataType.FLOAT16),
        ({"weights": "any quantization"}, ir.DataType.FLOAT16),
    ],
)
@pytest.mark.parametrize("providers", [(CPU,), (CUDA, CPU)])
def test_weights_are_float16_unless_the_decoder_stays_in_float32(
    changes: dict[str, Any],
    dtype: ir.DataType,
    providers: tuple[str, ...],
    plan: Any,
    tmp_path: Path,
) -> None:
    vars(plan).update(changes)
    folder = compiled(plan, tmp_path, providers)
    assert stored(folder) == {dtype}
    pixels = np.random.default_rng(1).standard_normal((6, VALUES), np.float32)
    weight = WEIGHT.astype(np.float16 if dtype == ir.DataType.FLOAT16 else np.float32).astype(
        np.float64
    )
    got = vision_session(folder).features(pixels, [2, 3])
    np.testing.assert_allclose(got, np.tanh(pixels @ weight), atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_result_has_the_dtype_of_the_interface(dtype: str, plan: Any, tmp_path: Path) -> None:
    plan.interface = Interface(8, (KeyValueShape(1, 8),), dtype, image=plan.interface.image)
    folder = compiled(plan, tmp_path, (CUDA, CPU))
    assert ir.load(folder / "vision.onnx").graph.outputs[0].dtype == ir.DataType[dtype.upper()]
    pixels = np.random.default_rng(1).standard_normal((6, VALUES), np.float32)
    rows = vision_session(folder).features(pixels, [2, 3])
    wide = (
        (rows.astype(np.uint32) << 16).view(np.float32)
        if dtype == "bfloat16"
        else rows.astype(np.float32)
    )
    np.testing.assert_allclose(wide, np.tanh(pixels @ WEIGHT), atol=4e-3)  # 2 ** -9 of bfloat16


def test_the_comparison(plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = compiled(plan, tmp_path)
    monkeypatch.setattr(vision, "open_vision", vision_session)
    assert compare_vision(plan, folder) == {"vision_max_error": 0.0, "vision_cosine": 1.0}  # type: ignore[arg-type]

    def fuse_wrongly(model: ir.Model, provider: str) -> bool:
        tanh = next(node for node in model.graph if node.op_type == "Tanh")
        ir.convenience.replace_nodes_and_values(
            model.graph,
            tanh,
            [tanh],
            [wrong := ir.node("Erf", tanh.inputs)],
            tanh.outputs,
            wrong.outputs,
        )
        return True

    monkeypatch.setattr(vision, "fuse_operators", fuse_wrongly)
    again = tmp_path / "again"
    again.mkdir()
    with pytest.raises(
        CompileError,
        match=r"features of vision.onnx compiled for cpu differ .* more than 0.0001, with",
    ):
        compare_vision(plan, compiled(plan, again))  # type: ignore[arg-type]
    plan.store_float16 = True  # a tolerance of 0.03, and a difference of 0.1
    (third := tmp_path / "third").mkdir()
    with pytest.raises(CompileError, match=r"more than 0.03, with"):
        compare_vision(plan, compiled(plan, third))  # type: ignore[arg-type]


@pytest.mark.ci
def test_a_package(image_package: Callable[..., Path], tmp_path: Path) -> None:
    source = read_package(image_package("smolvlm", for_serving=True))
    options = CompileOptions(weights="int4", ctx_len=256, max_divergence=100)
    package = compile_package(source, tmp_path / "int4", options)
    assert package.has("vision.onnx")
    assert package.has("vision.onnx.data")
    assert stored(package.path) == {ir.DataType.FLOAT16}
    assert package.manifest.compilation is not None
    figures = package.manifest.compilation.self_test
    assert figures["vision_cosine"] > 0.9999
    assert figures["vision_max_error"] > 0
    shapes = (source.manifest.parity or {})["vision_images"][0]["pixel_values"]
    pixels = np.random.default_rng(1).standard_normal(shapes, np.float32)
    got, wanted = (open_vision(one).features(pixels) for one in (package, source))
    np.testing.assert_allclose(got, wanted, atol=1e-2 * np.abs(wanted).max())
    assert not np.array_equal(got, wanted)
