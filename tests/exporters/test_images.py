"""transformers' processors described for packages: pixels and ids of other images than the export compares."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.image_processing_utils import BaseImageProcessor

from qsample.errors import UnsupportedModelError
from qsample.exporters.images import describe_images, image_texts, pixel_difference
from qsample.images.families import Layout
from qsample.images.processing import ImageProcessor, ImageTexts
from tests.helpers.tiny_vlms import TYPES, config_of, picture, processor_of

FAMILY = {
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v"), "grid"
    ),
    **dict.fromkeys(("gemma3", "llava"), "square"),
    **dict.fromkeys(("llava_next", "llava_onevision"), "any_resolution"),
    **dict.fromkeys(("smolvlm", "idefics3"), "split"),
    **dict.fromkeys(("internvl", "aya_vision"), "tiles"),
    "gemma4": "pooled_grid",
    "mistral3": "lines",
}
# Published sizes, of the image class and of the processor.
REAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (
        {"patch_size": 14, "size": {"shortest_edge": 3136, "longest_edge": 12845056}},
        {},
    ),
    "gemma3": ({"size": {"height": 896, "width": 896}}, {"image_seq_length": 256}),
    "gemma4": ({"patch_size": 16, "max_soft_tokens": 280}, {}),
    "llava_next": (
        {
            "size": {"shortest_edge": 336},
            "crop_size": {"height": 336, "width": 336},
            "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
        },
        {"patch_size": 14},
    ),
    "smolvlm": (
        {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}},
        {"image_seq_len": 64},
    ),
    "internvl": (
        {"size": {"height": 448, "width": 448}, "max_patches": 12},
        {"image_seq_length": 256},
    ),
    "mistral3": ({"size": {"longest_edge": 1540}, "patch_size": 14}, {"patch_size": 14}),
    "glm4v": ({"patch_size": 14, "size": {"shortest_edge": 12544, "longest_edge": 9633792}}, {}),
}


@functools.cache
def described(model_type: str) -> tuple[Any, dict[str, Any]]:
    processor = processor_of(model_type)
    return processor, describe_images(processor, config_of(model_type))


def compare(
    processor: Any, images: dict[str, Any], prompt: str, pictures: list[Image.Image]
) -> None:
    """`{}` in the prompt stands for an image."""
    ours = ImageProcessor(json.loads(json.dumps(images)), axial=False)
    text = prompt.format(*[ours.placeholder] * len(pictures))
    theirs = processor(text=[text], images=pictures)
    seen = [ours.process(image) for image in pictures]
    ids = processor.tokenizer(ours.expand(text, seen))["input_ids"]
    assert ids == np.asarray(theirs["input_ids"])[0].tolist()
    given = ours.prompt(ids, seen)
    assert np.flatnonzero(given.rows >= 0).tolist() == [
        at for at, token in enumerate(ids) if token == ours.token_id
    ]
    for image, one in zip(pictures, seen, strict=True):
        values = processor(text=[ours.placeholder], images=[image])["pixel_values"]
        values = values if hasattr(values, "shape") else [np.asarray(each) for each in values]
        assert not pixel_difference(one.pixel_values, np.asarray(values, np.float32))


QUICK = ("llava_next", "smolvlm")


@pytest.mark.parametrize(
    "model_type",
    [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.ci) for kind in TYPES],
)
def test_a_described_processor_gives_the_pixels_and_ids_of_transformers(model_type: str) -> None:
    processor, images = described(model_type)
    assert images["family"] == FAMILY[model_type]
    wide, tall, small = picture(61, 33), picture(29, 75, 1), picture(10, 11, 2)
    compare(processor, images, "{}", [wide])
    compare(processor, images, "A{} and\n{}{} c", [tall, small, wide])


@pytest.mark.ci
@pytest.mark.parametrize(
    "model_type",
    [pytest.param(kind, marks=pytest.mark.slow) if kind == "smolvlm" else kind for kind in REAL],
)
def test_published_sizes_are_described(model_type: str) -> None:
    image_settings, settings = REAL[model_type]
    processor = processor_of(model_type, image_settings, **settings)
    images = describe_images(processor, config_of(model_type))
    assert images["family"] == FAMILY[model_type]
    compare(processor, images, "See {}, {}.", [picture(900, 500), picture(333, 1000, 1)])


def test_other_pixels_are_refused_by_name() -> None:
    crops = {"pan_and_scan_min_crop_size": 16, "pan_and_scan_max_num_crops": 4}
    processor = processor_of(
        "gemma3", {"do_pan_and_scan": True, **crops, "pan_and_scan_min_ratio_to_activate": 1.2}
    )
    processor.images_kwargs = {}
    said = r"Gemma3Processor with Gemma3ImageProcessorPil does: .* 640 x 420 pixels in mode RGB.*--text-only"
    with pytest.raises(UnsupportedModelError, match=said):
        describe_images(processor, config_of("gemma3"))


@pytest.mark.parametrize(
    "settings", [{"do_pad": True}, {"do_resize": False}, {"size": {"shortest_edge": 20}}]
)
def test_settings_that_packages_lack_are_refused_or_followed(settings: dict[str, Any]) -> None:
    processor = processor_of("llava", settings)
    if "size" in settings:
        assert describe_images(processor, config_of("llava"))["settings"]["size"] == {
            "shortest_edge": 20
        }
        return
    with pytest.raises(UnsupportedModelError, match="LlavaProcessor with LlavaImageProcessorPil"):
        describe_images(processor, config_of("llava"))


def test_a_difference_of_a_single_number_or_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    processor: Any = processor_of("qwen2_vl")
    preprocess, replace = processor.image_processor._preprocess, processor.replace_image_token

    def other_pixel(*arguments: Any, **settings: Any) -> Any:
        result = preprocess(*arguments, **settings)
        if len(result["pixel_values"]) == 4 * 9:  # of a single trial image
            result["pixel_values"][-1, -1] += np.float32(1e-6)
        return result

    monkeypatch.setattr(
        type(processor.image_processor), "_preprocess", lambda _, *a, **s: other_pixel(*a, **s)
    )
    with pytest.raises(
        UnsupportedModelError, match=r"1 of .* numbers differ in the pixels of an image of"
    ):
        describe_images(processor, config_of("qwen2_vl"))
    monkeypatch.undo()
    monkeypatch.setattr(
        type(processor), "replace_image_token", lambda _, *a, **s: "<" + replace(*a, **s) + ">"
    )
    images = describe_images(processor, config_of("qwen2_vl"))
    assert (images["texts"]["single"], images["texts"]["after"]) == ("<", ">")
    monkeypatch.setattr(
        type(processor),
        "replace_image_token",
        lambda _, *a, **s: replace(*a, **s) + "!" * len(replace(*a, **s)),
    )
    with pytest.raises(
        UnsupportedModelError, match="the token ids of an image of 640 x 420 pixels"
    ):
        describe_images(processor, config_of("qwen2_vl"))


def test_processors_without_the_parts_are_refused() -> None:
    processor: Any = processor_of("llava")
    config = config_of("llava")
    config.image_token_id = None
    with pytest.raises(UnsupportedModelError, match="has no text and id that stand for an image"):
        describe_images(processor, config)
    processor.image_processor = BaseImageProcessor()
    with pytest.raises(
        UnsupportedModelError, match="with BaseImageProcessor has no class that works with Pillow"
    ):
        describe_images(processor, config_of("llava"))


def test_the_texts_of_tiles_are_found_from_examples() -> None:
    token, many = "*", Layout(0, 0, 2, (2, 3), whole=True)
    text = "[1:**2:**3:**|4:**5:**6:**+**]"
    found = image_texts([Layout(0, 0, 2), many], ["(**]", text], token)
    assert found == ImageTexts(
        single="(", before="[", tile="{number}:", line="|", whole="+", after="]"
    )
    assert found.written(Layout(0, 0, 1, (1, 2)), token) == "[1:*2:*]"
    text = "<r1c1>**<r1c2>**<r1c3>**/<r2c1>**<r2c2>**<r2c3>**+**"
    found = image_texts([many], [text], token)
    assert found is not None
    assert found.tile == "<r{row}c{column}>"
    assert image_texts([many], ["**" * 6 + "***"], token) is None


@pytest.mark.ci
def test_an_export_without_images_needs_no_pillow() -> None:
    code = "import sys; sys.modules['PIL'] = None; import qsample.exporters.export, qsample.checkpoints.checkpoint"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ([[1, 2], [3, 4]], [[1, 2], [3, 4]], ""),
        ([[1, 2], [3, 4]], [[[1, 2], [3, 4]]], ""),
        # Padded with zeros, and with nothing else.
        ([[1, 2], [3, 4]], [[1, 2], [3, 4], [0, 0]], ""),
        ([[1, 2], [3, 4]], [[1, 2], [3, 4], [0, 5]], "numbers [3, 2], not [2, 2],"),
        ([[1, 2], [3, 4]], [[1, 2]], "numbers [1, 2], not [2, 2],"),
        ([[1, 2], [3, 4]], [[1], [2], [3], [4]], "numbers [4, 1], not [2, 2],"),
        ([[1, 2], [3, 4]], [[1, 2, 3], [4, 0, 0]], "numbers [2, 3], not [2, 2],"),
        ([[1, 2], [3, 4]], [1, 2, 3, 4, 0], "numbers [5], not [2, 2],"),
        ([[], []], [[], []], "numbers [2, 0], not [2, 0],"),
        ([[1, 2], [3, 4]], [[1, 5], [6, 4]], "2 of 4 numbers differ"),
    ],
)
def test_how_pixels_differ(ours: Any, theirs: Any, said: str) -> None:
    found = pixel_difference(np.array(ours, np.float32), np.array(theirs, np.float32))
    assert found == (f"there are {said}" if said.startswith("numbers") else said)
