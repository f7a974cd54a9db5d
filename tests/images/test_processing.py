"""A package's processor: strangers' manifests, texts and ids that do not fit, keys and identities."""

from __future__ import annotations

import copy
import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from PIL import Image

from qsample.contract.interface import ImageShape
from qsample.contract.tensors import IMAGES_VERSION
from qsample.errors import PackageError
from qsample.images.decode import ImageLimits
from qsample.images.processing import ImageProcessor, ImageSettings, ImageTexts
from qsample.package.manifest import FileEntry, Manifest
from qsample.package.package import Package
from tests.helpers.small_packages import INTERFACE, manifest

PIXELS = {
    "resample": 3,
    "rescale_factor": 1 / 255,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
IMAGES: dict[str, Any] = {
    "family": "grid",
    "settings": {
        **PIXELS,
        "size": {"shortest_edge": 64, "longest_edge": 4096},
        "patch_size": 4,
        "merge_size": 2,
        "temporal_patch_size": 2,
    },
    "placeholder": "<image>",
    "token": "<pad>",
    "token_id": 9,
    "texts": {"single": "<s>", "after": "</s>"},
}
A, B = (Image.fromarray(np.full((16, 24, 3), value, np.uint8)) for value in (7, 8))


def changed(path: str, value: Any) -> dict[str, Any]:
    images = copy.deepcopy(IMAGES)
    *parents, name = path.split(".")
    place = images
    for parent in parents:
        place = place[parent]
    if value is None:
        del place[name]
    else:
        place[name] = value
    return images


def package_of(images: Any, image: ImageShape | None, sha256: str = "a" * 64) -> Package:
    interface, files = replace(INTERFACE, image=image), {"vision.onnx": FileEntry(sha256, 1)}
    return Package(Path("/nowhere"), manifest(interface=interface, images=images, files=files))


def test_a_package_of_text_has_no_processor() -> None:
    for images, image in ((None, None), (IMAGES, None), (None, ImageShape(8))):
        assert ImageProcessor.of(package_of(images, image)) is None


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("family", "squares", "family is 'squares'; choose one of square, grid"),
        ("family", ["grid"], "family is"),
        ("family", None, "family is unknown or missing"),
        (
            "settings.patch_size",
            0,
            "images.settings in qsample.json: patch_size is 0; give an integer from 1",
        ),
        ("settings.patch_size", 1 << 40, "patch_size is 1099511627776"),
        ("settings.patch_size", "4", "patch_size is '4'"),
        ("settings.patch_size", None, "patch_size is unknown or missing"),
        ("settings.patches", 4, "patches is unknown or missing"),
        (
            "settings.size",
            {"shortest_edge": 64},
            "size is .*; give longest_edge and shortest_edge, in pixels",
        ),
        ("settings.size", {"shortest_edge": -1, "longest_edge": 4}, "size is"),
        ("settings.resample", 9, "resample is 9"),
        ("settings.rescale_factor", "1/255", "rescale_factor is '1/255'"),
        ("settings.image_std", [0.5, 0, 0.5], "those of image_std not 0"),
        ("settings.image_mean", [1e300, 1, 1], "image_mean is"),
        ("settings", [1], "settings is"),
        ("placeholder", "", "placeholder and token are texts of at least a character"),
        ("token_id", -1, "token_id is -1"),
        ("texts.tile", 7, "images.texts in qsample.json: tile is 7"),
        ("texts.title", "x", "title is unknown or missing"),
        ("more", 1, "more is unknown or missing"),
    ],
)
def test_a_strangers_manifest_is_refused_by_the_value(path: str, value: Any, said: str) -> None:
    with pytest.raises(PackageError, match=f"{said}.*export the package again"):
        ImageProcessor.of(package_of(changed(path, value), ImageShape(8)))


def test_a_manifest_that_does_not_fit_its_graphs_is_refused() -> None:
    with pytest.raises(
        PackageError, match=r"images.token_id in qsample.json is 1000, and the model has"
    ):
        ImageProcessor.of(package_of(changed("token_id", 1000), ImageShape(8)))
    size = {
        "family": "square",
        "settings": {**PIXELS, "size": {"height": 8, "width": 8}, "tokens": 4},
    }
    with pytest.raises(PackageError, match="give no sizes for M-RoPE"):
        ImageProcessor.of(package_of({**IMAGES, **size}, ImageShape(8, axial=True)))


def test_braces_of_a_stranger_are_plain_text() -> None:
    texts = ImageTexts(tile="{row.__class__}{column}{0}")
    assert texts.of_tile(0, 4, 5) == "{row.__class__}5{0}"


def test_a_manifest_keeps_line_breaks_of_prompts_alone() -> None:
    images = changed("texts.single", "\n\n<s>")
    written = replace(package_of(images, ImageShape(8)).manifest, contract_version=IMAGES_VERSION)
    files = {name: FileEntry("a" * 64, 1) for name in written.interface.graphs}
    written = replace(written, files=files)
    assert Manifest.from_json(written.to_json()).images == images
    with pytest.raises(PackageError, match=r"images.token in qsample.json is .*control characters"):
        Manifest.from_json(replace(written, images=changed("token", "\x1b[2J")).to_json())


def test_images_stand_in_a_text_and_among_its_tokens() -> None:
    processor = ImageProcessor(IMAGES, axial=True)
    first, second = processor.process(A), processor.process(np.zeros((8, 8, 3), np.uint8))
    assert (first.size, first.grid, first.pixel_values.shape) == ((2, 3), (4, 6), (24, 96))
    assert (
        processor.expand("a<image>b<image>", [first, second])
        == f"a<s>{'<pad>' * 6}</s>b<s><pad></s>"
    )
    prompt = processor.prompt([5, *[9] * 6, 4, 9], [first, second])
    assert prompt.rows.tolist() == [-1, *range(6), -1, 6]
    assert prompt.rows.dtype == np.int32
    assert prompt.offsets is not None
    assert prompt.offsets[:, 2].tolist() == [0, 0, 0, 0, -3, -3, -3, -3, -3, -3]
    assert prompt.identities[[0, 7]].tolist() == [5, 4]
    assert (prompt.identities[prompt.rows >= 0] < 0).all()
    assert len(set(prompt.identities.tolist())) == 9
    assert ImageProcessor(IMAGES).prompt([5], []).offsets is None


def test_numbers_that_differ_are_refused() -> None:
    processor = ImageProcessor(IMAGES)
    image = processor.process(A)
    for text, images, said in (
        ("no place", [image], "has 0 times '<image>'.*1 images were given"),
        ("a user writes <image>, and <image>", [image], "2 times '<image>'"),
        ("<image>", [], "1 times '<image>'.*0 images"),
    ):
        with pytest.raises(ValueError, match=said):
            processor.expand(text, images)
    for ids, images in (([9] * 5, [image]), ([9] * 7, [image]), ([9], []), ([1], [image])):
        with pytest.raises(ValueError, match=rf"has {ids.count(9)} placeholders \(id 9, '<pad>'\)"):
            processor.prompt(ids, images)


def test_keys_and_identities_tell_images_and_packages_apart() -> None:
    shape = ImageShape(8)
    made = [
        ImageProcessor.of(package_of(IMAGES, shape)),
        ImageProcessor.of(package_of(IMAGES, shape, "b" * 64)),
        ImageProcessor.of(package_of(changed("settings.resample", 2), shape)),
    ]
    seen = [
        processor.process(image) for processor in made if processor is not None for image in (A, B)
    ]
    turned = Image.fromarray(np.full((24, 16, 3), 7, np.uint8))
    assert made[0] is not None
    seen.append(made[0].process(turned))
    assert len({image.key for image in seen}) == 7
    assert made[0].process(A.copy()).key == seen[0].key
    ids = [9] * 6
    prompts = [
        made[0].prompt(ids, [image]).identities.tolist() for image in (seen[0], seen[1], seen[6])
    ]
    assert len({number for prompt in prompts for number in prompt}) == 18
    assert made[0].prompt(ids, [made[0].process(np.asarray(A))]).identities.tolist() == prompts[0]


def test_an_image_is_named_in_messages() -> None:
    processor = ImageProcessor(IMAGES)
    thin = np.zeros((1, 900, 3), np.uint8)
    with pytest.raises(ValueError, match=r"^image 3 has 900 x 1 pixels; the longer side"):
        processor.process(thin, name="image 3")
    with pytest.raises(ValueError, match=r"^image 3 has 24 x 16 = 384 pixels, and at most 5"):
        processor.process(A, ImageLimits(most_pixels=5), "image 3")


def test_pixels_need_neither_torch_nor_transformers() -> None:
    code = f"""
import sys
for name in ("torch", "torchvision", "transformers", "onnx", "onnx_ir"):
    sys.modules[name] = None
import numpy as np
from qsample.images.processing import ImageProcessor
processor = ImageProcessor({IMAGES!r}, axial=True)
image = processor.process(np.zeros((16, 24, 3), np.uint8))
print(len(processor.prompt([9] * 6, [image]).identities), image.pixel_values[0, 0])
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert run.stdout.split() == ["6", "-1.0"]


VECTORS: Final = json.loads(
    (Path(__file__).parents[2] / "docs" / "vectors" / "pixels.json").read_text()
)


@pytest.mark.parametrize("number", range(len(VECTORS["families"])))
def test_published_vectors(number: int) -> None:
    entry = VECTORS["families"][number]
    processor = ImageProcessor(entry["images"])
    for case in entry["cases"]:
        y, x, channel = np.ogrid[: case["height"], : case["width"], :3]
        image = processor.process(
            ((31 * x + 17 * y + 101 * channel + x * y // 7) % 256).astype(np.uint8)
        )
        assert image.pixel_values.dtype == np.float32
        assert list(image.pixel_values.shape) == case["shape"]
        assert image.pixel_values.reshape(-1)[:4].tolist() == pytest.approx(case["first"], rel=1e-7)
        assert (
            hashlib.sha256(image.pixel_values.astype("<f4").tobytes()).hexdigest() == case["sha256"]
        )
        assert (image.text, image.grid and list(image.grid)) == (case["text"], case["grid"])
        assert (image.size and list(image.size)) == case["size"]
        placeholders = case["text"].count(processor.token)
        assert image.rows.tolist() == (case["rows"] or list(range(placeholders)))


def test_another_process_makes_the_same_processor() -> None:
    """Of its arguments, which are plain JSON."""
    for axial in (False, True):
        processor = ImageProcessor(IMAGES, axial=axial, identity=b"\x00\xff")
        arguments = json.loads(json.dumps(processor.arguments))
        again = ImageProcessor.of_arguments(arguments)
        image = processor.process(A)
        assert again.process(A).key == image.key
        assert again.arguments == processor.arguments
        ids = [IMAGES["token_id"]] * len(image.rows)
        assert (again.prompt(ids, [image]).offsets is None) == (not axial)
    plain = ImageProcessor(IMAGES)
    assert plain.process(A).key != image.key
    assert plain.prompt([5], []).offsets is None


def test_texts_by_default_and_wrong_ones() -> None:
    assert ImageTexts() == ImageTexts("", "", "", "", "", "")
    settings = {**IMAGES, "token_id": 2**31 - 1}
    assert ImageSettings(**settings).token_id == 2**31 - 1
    for wrong in ({"token_id": 2**31}, {"token": ""}, {"placeholder": ""}, {"token_id": -1}):
        with pytest.raises(ValueError, match="token"):
            ImageSettings(**{**IMAGES, **wrong})


@pytest.mark.parametrize(("tiles", "does_fit"), [(15, True), (16, False)])
def test_an_image_has_at_most_2_to_the_20_placeholders(tiles: int, does_fit: bool) -> None:
    """Of tiles with 2^16 each, and of the whole image."""
    settings = {**PIXELS, "size": {"height": 1, "width": 1}, "tokens": 2**16}
    settings |= {"min_patches": tiles, "max_patches": tiles}
    processor = ImageProcessor({**IMAGES, "family": "tiles", "settings": settings})
    if does_fit:
        assert processor.layout(tiles, 1).placeholders == 2**20
    else:
        with pytest.raises(ValueError, match=r"^it has 16 x 1 pixels: too many placeholders; make"):
            processor.layout(tiles, 1, "it")


def test_the_placeholder_is_a_token_of_the_model() -> None:
    last = INTERFACE.vocab_size - 1
    assert ImageProcessor.of(package_of(changed("token_id", last), ImageShape(8))) is not None
    with pytest.raises(
        PackageError, match=r"token_id in qsample\.json is 100, and the model has 100"
    ):
        ImageProcessor.of(package_of(changed("token_id", last + 1), ImageShape(8)))
