"""vision.onnx of random models against transformers' get_image_features, for images of other sizes than those that the
export compares."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import pytest
import torch

from qsample.contract.arrays import Array
from qsample.contract.interface import ImageShape, Interface, KeyValueShape
from qsample.errors import ParityError
from qsample.exporters import vision
from qsample.exporters.vision import compare_vision, write_vision
from qsample.graph.edit import initializer, put_behind
from qsample.graph.vision import vision_session
from qsample.transforms.vision import vision_module
from tests.helpers.tiny_vlms import random_vlm

CI = ["qwen2_5_vl", "mistral3", "llava_next"]
SLOW = [
    "qwen3_vl",
    "gemma4",
    "smolvlm",
    "qwen2_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "glm4v",
    "gemma3",
    "llava_onevision",
    "idefics3",
    "internvl",
    "aya_vision",
]
TYPES = [
    "llava",
    *(pytest.param(name, marks=pytest.mark.ci) for name in CI),
    *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
]
GRIDS = [
    (1, 2),
    (3, 6),
    (9, 4),
]  # rows and columns of features; one is larger than the image of the trace
TILES = [4, 1, 2]


class Written(NamedTuple):
    model: Any
    interface: Interface
    folder: Path
    figures: dict[str, Any]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def write(model_type: str, dtype: str = "float32") -> Written:
        model: Any = random_vlm(model_type)
        model = model.eval().to(getattr(torch, dtype))
        folder = tmp_path_factory.mktemp(model_type)
        interface = interface_of(model, dtype)
        return Written(model, interface, folder, write_vision(model, folder, interface))

    return write


def interface_of(model: Any, dtype: str) -> Interface:
    config = model.config
    pixels = vision_module(model).example["pixel_values"]
    deepstack = len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())
    width = config.get_text_config().hidden_size * (1 + deepstack)
    image = ImageShape(width, deepstack, patch_values=pixels.shape[-1] if pixels.ndim == 2 else 0)
    return Interface(160, (KeyValueShape(0, 1, 8),), dtype, image=image)


def images_of(model: Any) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """For each image the arguments of vision.onnx and of get_image_features, written from transformers' processors."""
    config, vision = model.config, model.config.vision_config
    generator = torch.Generator().manual_seed(5)
    random = functools.partial(torch.randn, generator=generator)
    for rows, columns, tiles in zip(*zip(*GRIDS, strict=True), TILES, strict=True):
        if hasattr(vision, "temporal_patch_size"):
            grid = [rows * vision.spatial_merge_size, columns * vision.spatial_merge_size]
            pixels = random(
                grid[0] * grid[1], 3 * vision.temporal_patch_size * vision.patch_size**2
            )
            yield (
                (pixels, grid),
                {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, *grid]])},
            )
        elif hasattr(vision, "pooling_kernel_size"):
            grid = [rows * vision.pooling_kernel_size, columns * vision.pooling_kernel_size]
            pixels = random(grid[0] * grid[1], 3 * vision.patch_size**2)
            x, y = np.meshgrid(np.arange(grid[1]), np.arange(grid[0]))
            places = torch.tensor(np.stack([x.ravel(), y.ravel()], -1))[None]
            yield (pixels, grid), {"pixel_values": pixels[None], "image_position_ids": places}
        elif vision.model_type == "pixtral":
            side = vision.patch_size * config.spatial_merge_size
            pixels = random(1, 3, rows * side, columns * side)
            yield (
                (pixels,),
                {"pixel_values": pixels, "image_sizes": torch.tensor([pixels.shape[2:]])},
            )
        else:
            size = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
            points = getattr(config, "image_grid_pinpoints", None)
            if points is None:
                pixels = random(tiles, 3, size, size)
                nested = hasattr(model.base_model, "connector")
                yield (pixels,), {"pixel_values": pixels[None] if nested else pixels}
            else:
                height, width = points[tiles % len(points)]
                pixels = random(1 + height // size * (width // size), 3, size, size)
                yield (
                    (pixels,),
                    {"pixel_values": pixels, "image_sizes": torch.tensor([[height, width]])},
                )


def features_of(model: Any, arguments: dict[str, Any]) -> Array:
    with torch.no_grad():
        output = model.base_model.get_image_features(**arguments)
    parts = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
    rows = torch.cat(
        [torch.cat([one.reshape(-1, one.shape[-1]) for one in part]) for part in parts], -1
    )
    found: Array = rows.float().numpy()
    return found


@pytest.mark.parametrize("model_type", TYPES)
def test_features_are_those_of_transformers(model_type: str, written: Any) -> None:
    model, _, folder, figures = written(model_type)
    session = vision_session(folder)
    for (pixels, *grid), arguments in images_of(model):
        got, wanted = session.features(pixels.numpy(), *grid), features_of(model, arguments)
        newline = getattr(model.base_model, "image_newline", None)
        if (
            newline is not None
        ):  # transformers arranges the rows of the tiles, and puts a newline behind each line
            tiles = len(pixels)
            assert np.array_equal(got[-1], newline.detach().numpy())
            first = (len(got) - 1) // tiles
            np.testing.assert_allclose(got[:first], wanted[:first], atol=1e-4)
            lines = wanted[first:].reshape(
                -1, arguments["image_sizes"][0, 1] // 4 + 1, wanted.shape[-1]
            )
            assert np.array_equal(lines[:, -1], np.broadcast_to(got[-1], lines[:, -1].shape))
            down, across = (arguments["image_sizes"][0] // pixels.shape[2]).tolist()
            side = pixels.shape[2] // 4
            parts = got[first:-1].reshape(down, across, side, side, -1).swapaxes(1, 2)
            got, wanted = parts.reshape(down * side, across * side, -1), lines[:, :-1]
        assert got.shape == wanted.shape
        np.testing.assert_allclose(got, wanted, atol=2e-5 * max(1.0, np.abs(wanted).max()))
    assert figures["vision_max_error"] <= figures["vision_tolerance"]
    assert len(figures["vision_images"]) == 3


def test_the_model_is_as_before(written: Any) -> None:
    model = written("llava").model
    assert not any("forward" in vars(module) for module in model.modules())
    assert not model.base_model.multi_modal_projector._forward_hooks
    assert "qsample" not in model.base_model.vision_tower.config._attn_implementation


@pytest.mark.ci
def test_a_tower_in_float16_computes_in_float32(written: Any) -> None:
    model, interface, folder, _ = written("llava", "float16")
    graph = ir.load(folder / "vision.onnx").graph
    assert graph.outputs[0].dtype == ir.DataType.FLOAT16 == ir.DataType[interface.dtype.upper()]
    halves = {
        value.dtype for node in graph for value in node.outputs if node.op_type not in ("Cast",)
    }
    assert ir.DataType.FLOAT16 not in halves
    stored = {value.dtype for value in graph.initializers.values() if len(value.shape or ()) == 2}
    assert stored == {ir.DataType.FLOAT16}
    (pixels,), arguments = next(images_of(model.float()))
    got, wanted = vision_session(folder).features(pixels.numpy()), features_of(model, arguments)
    np.testing.assert_allclose(
        got, wanted, atol=2e-3 * np.abs(wanted).max()
    )  # of the result's dtype alone
    model.half()


def with_one_dimension(path: Path) -> ir.Model:
    """Pixtral's graph, its patches rotated by their number alone in place of row and column."""
    model = ir.load(path)
    cosine: Any = next(node for node in model.graph if node.op_type == "Cos")
    angles = cosine.inputs[0].producer()
    assert angles is not None
    assert angles.op_type == "Mul"  # [A, 2, 1] places by frequencies
    nothing = initializer(model.graph, "nothing", np.zeros((), np.float32))
    first = initializer(model.graph, "first_axis", np.zeros((), np.int64))
    ones = put_behind(put_behind(angles.inputs[0], "Mul", [nothing]), "Exp")
    put_behind(ones, "CumSum", [first])
    return model


@pytest.mark.ci
@pytest.mark.parametrize("fused", [True, False])
def test_a_rotation_in_one_dimension_is_refused(
    written: Any, fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/onnxruntime/mobius/issues/151: the fused operator of text models rotates by one position."""
    model, interface, folder, _ = written("mistral3")
    planted = with_one_dimension(folder / "vision.onnx")
    ir.save(planted, tmp_path / "vision.onnx", external_data="vision.onnx.data")
    own = vision_session
    if fused:  # the graph is right until it is optimised

        def session(_: Path, level: Any = None) -> Any:
            return own(tmp_path if level is None else folder, level)

        monkeypatch.setattr(vision, "vision_session", session)
    cause = (
        r", because of ONNX Runtime's fusions; export the text alone"
        if fused
        else r"\); export the text alone"
    )
    with pytest.raises(ParityError, match=rf"eager PixtralVisionModel by .*{cause}"):
        compare_vision(model, vision_module(model), tmp_path, interface.dtype)
