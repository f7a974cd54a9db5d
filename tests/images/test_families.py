"""Families beside transformers' Pillow classes: every pixel, bit for bit, for many sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import transformers as tf
from PIL import Image

from qsample.exporters.images import pixel_difference
from qsample.images import families
from qsample.images.families import Family

SIZES = [
    (64, 48),
    (30, 99),
    (5, 8),
    (192, 108),
    (33, 34),
    (20, 41),
    (100, 3),
    (23, 24),
    (1, 3),
    (150, 37),
    (48, 48),
]
LARGE = [(640, 480), (301, 999), (56, 80), (1000, 21), (1920, 1080), (337, 336), (2000, 1500)]
MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
PIXELS: dict[str, Any] = {
    "resample": 3,
    "rescale_factor": 1 / 255,
    "image_mean": MEAN,
    "image_std": STD,
}


def shared(family: str, theirs: Any, given: dict[str, Any], **own: Any) -> tuple[Any, Family]:
    """A class of transformers and a family with the same settings."""
    made = theirs(**{"image_mean": MEAN, "image_std": STD, "resample": 3, **given})
    return made, families.FAMILIES[family](**{**PIXELS, **given, **own})


def qwen(scale: int) -> tuple[Any, Family]:
    size = {"shortest_edge": 256 * scale**2, "longest_edge": 4096 * scale**2}
    grid = {"patch_size": 4 * scale, "merge_size": 2, "temporal_patch_size": 3}
    made, family = shared("grid", tf.Qwen2VLImageProcessorPil, {"size": size, **grid})
    return made, family


def glm(scale: int) -> tuple[Any, Family]:
    size = {"shortest_edge": 512 * scale**2, "longest_edge": 8192 * scale**2}
    grid = {"patch_size": 4 * scale, "merge_size": 2, "temporal_patch_size": 2}
    return shared("grid", tf.Glm4vImageProcessorPil, {"size": size, **grid}, frames=True)


def siglip(scale: int) -> tuple[Any, Family]:
    return shared(
        "square",
        tf.SiglipImageProcessorPil,
        {"size": {"height": 24 * scale, "width": 20 * scale}},
        tokens=9,
    )


def clip(scale: int) -> tuple[Any, Family]:
    sides = {"height": 23 * scale, "width": 20 * scale}
    given = {"size": {"shortest_edge": 24 * scale}, "crop_size": sides}
    return shared("square", tf.LlavaImageProcessorPil, given, tokens=9)


def gemma4(scale: int) -> tuple[Any, Family]:
    given = {"patch_size": 4 * scale, "pooling_kernel_size": 3, "max_soft_tokens": 70}
    made = tf.Gemma4ImageProcessorPil(**given)
    plain = {"resample": 3, "rescale_factor": 1 / 255}
    return made, families.PooledGrid(**plain, **given)


def smolvlm(scale: int) -> tuple[Any, Family]:
    given = {
        "size": {"longest_edge": 60 * scale},
        "max_image_size": {"longest_edge": 16 * scale},
        "resample": 1,
    }
    return shared("split", tf.SmolVLMImageProcessorPil, given, tokens=4)


def whole(scale: int) -> tuple[Any, Family]:
    given = {"size": {"longest_edge": 60 * scale}, "max_image_size": {"longest_edge": 16 * scale}}
    return shared(
        "split", tf.Idefics3ImageProcessorPil, {**given, "do_image_splitting": False}, tokens=4
    )


def internvl(scale: int) -> tuple[Any, Family]:
    size = {"height": 16 * scale, "width": 20 * scale}
    given = {"size": size, "min_patches": 1, "max_patches": 12}
    made = tf.GotOcr2ImageProcessorPil(
        **given, crop_to_patches=True, image_mean=MEAN, image_std=STD
    )
    return made, families.Tiles(**PIXELS, **given, tokens=4)


def llava_next(scale: int) -> tuple[Any, Family]:
    side = 16 * scale
    points = [
        [side, 2 * side],
        [2 * side, side],
        [2 * side, 2 * side],
        [3 * side, side],
        [side, 3 * side],
    ]
    sizes = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
    made = tf.LlavaNextImageProcessorPil(
        **sizes, image_grid_pinpoints=points, image_mean=MEAN, image_std=STD
    )
    return made, families.AnyResolution(**PIXELS, size=side, image_grid_pinpoints=points, side=4)


def pixtral(scale: int) -> tuple[Any, Family]:
    given = {"size": {"longest_edge": 64 * scale}, "patch_size": 8 * scale}
    return shared("lines", tf.PixtralImageProcessorPil, given)


KINDS = [qwen, glm, siglip, clip, gemma4, smolvlm, whole, internvl, llava_next, pixtral]


def compare(
    kind: Callable[[int], tuple[Any, Family]], scale: int, sizes: list[tuple[int, int]]
) -> None:
    theirs, family = kind(scale)
    rng = np.random.default_rng(0)
    done = 0
    for width, height in sizes:
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        try:
            want = theirs(image)
        except ValueError:  # too long and thin for both
            with pytest.raises(ValueError, match=f"the image has {width} x {height} pixels"):
                family.layout(width, height)
            continue
        pixels, grid = family.pixels(image, family.layout(width, height))
        values = np.asarray([np.asarray(each) for each in want["pixel_values"]], np.float32)
        assert pixels.dtype == np.float32
        assert not pixel_difference(pixels, values), (width, height)
        if "image_grid_thw" in want:
            assert tuple(want["image_grid_thw"][0]) == (1, *(grid or ()))
        done += 1
    assert done >= len(sizes) - 2


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_those_of_transformers(kind: Callable[[int], tuple[Any, Family]]) -> None:
    compare(kind, 1, SIZES)


@pytest.mark.ci
@pytest.mark.parametrize("kind", KINDS)
def test_pixels_of_large_images_are_those_of_transformers(
    kind: Callable[[int], tuple[Any, Family]],
) -> None:
    compare(kind, 7, LARGE)


def test_steps_that_the_settings_leave_out_are_left_out() -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8))
    size = {"height": 8, "width": 8}
    for rescale, normalize in ((False, True), (True, False), (False, False)):
        options = {
            "do_rescale": rescale,
            "do_normalize": normalize,
            "image_mean": MEAN,
            "image_std": STD,
        }
        theirs = tf.SiglipImageProcessorPil(size=size, **options)(image)["pixel_values"][0]
        own = {"image_mean": MEAN, "image_std": STD} if normalize else {}
        factor = 1 / 255 if rescale else None
        family = families.Square(resample=3, rescale_factor=factor, size=size, tokens=1, **own)
        ours = family.pixels(image, family.layout(40, 30))[0][0]
        np.testing.assert_array_equal(ours, np.asarray(theirs, np.float32))


def test_the_rows_of_any_resolution_are_those_that_llava_next_packs() -> None:
    """Beside the model's own packing, of features that are the numbers of their rows."""
    import torch
    from transformers.models.llava_next.modeling_llava_next import LlavaNextModel

    _, family = llava_next(1)
    points = family.image_grid_pinpoints  # type: ignore[attr-defined]
    config = tf.LlavaNextConfig(
        text_config={"model_type": "llama"},
        vision_config={"model_type": "clip_vision_model", "image_size": 16, "patch_size": 4},
        image_grid_pinpoints=[list(pair) for pair in points],
    )
    model = type("Model", (), {"config": config})()
    for width, height in SIZES:
        layout = family.layout(width, height)
        tiles = 1 + layout.height // 16 * (layout.width // 16)
        features = torch.arange(tiles * 16, dtype=torch.float32).reshape(tiles, 16, 1)
        sizes = torch.tensor([[height, width]])
        newline = torch.tensor([float(tiles * 16)])
        packed, _ = LlavaNextModel.pack_image_features(model, [features], sizes, "default", newline)
        assert layout.rows is not None
        assert layout.rows.tolist() == packed[0][:, 0].tolist()


def test_a_family_refuses_what_no_image_could_be_made_of() -> None:
    square: dict[str, Any] = {"resample": 3, "rescale_factor": None, "tokens": 1}
    with pytest.raises(ValueError, match=r"size is .*give height and width, or shortest_edge"):
        families.Square(**square, size={"longest_edge": 4})
    with pytest.raises(ValueError, match="crop_size is None: images would have many sizes"):
        families.Square(**square, size={"shortest_edge": 4})
    with pytest.raises(ValueError, match=r"crop_size is .*at most as large as size"):
        families.Square(**square, size={"shortest_edge": 4}, crop_size={"height": 5, "width": 4})
    with pytest.raises(ValueError, match="image_mean and image_std"):
        families.Square(**square, size={"height": 4, "width": 4}, image_mean=MEAN)
    with pytest.raises(ValueError, match=r"image_mean is .*a number for each of the channels"):
        families.Square(
            **square, size={"height": 4, "width": 4}, image_mean=[0.5, float("nan"), 0.5]
        )
    with pytest.raises(ValueError, match="min_patches is 3; give at most max_patches"):
        families.Tiles(
            **PIXELS, size={"height": 4, "width": 4}, tokens=1, min_patches=3, max_patches=2
        )
    with pytest.raises(ValueError, match=r"image_grid_pinpoints is .*multiples of size \(4\)"):
        families.AnyResolution(**PIXELS, size=4, image_grid_pinpoints=[[4, 6]], side=1)


def test_a_thin_image_is_refused_before_it_is_enlarged() -> None:
    _, family = clip(14)
    with pytest.raises(ValueError, match=r"the image has 10000 x 1 pixels.*less long and thin"):
        family.layout(10_000, 1)
    _, family = qwen(1)
    with pytest.raises(ValueError, match="10000 x 1 pixels; the longer side may be 200 times"):
        family.layout(10_000, 1)
    _, family = pixtral(1)
    with pytest.raises(ValueError, match="the model would read it with 64 x 0"):
        family.layout(10_000, 1)


def test_enormous_sizes_of_a_stranger_are_refused_before_they_take_memory() -> None:
    side = 1 << 16
    family = families.AnyResolution(**PIXELS, size=1, image_grid_pinpoints=[[side, side]], side=1)
    with pytest.raises(ValueError, match=f"the model would read it with {side} x {side}"):
        family.layout(8, 8)


def test_more_tiles_than_llava_onevision_keeps_are_refused() -> None:
    given = {"size": 4, "side": 2, "image_grid_pinpoints": [[4, 4], [8, 8], [16, 16]]}
    family = families.AnyResolution(**PIXELS, **given, most_tiles=9)
    assert family.layout(8, 8).placeholders == 4 + 4 * 5
    with pytest.raises(ValueError, match=r"the image has 16 x 16 pixels.*make it smaller"):
        family.layout(16, 16)


# The settings that a family has no default for.
FEWEST: dict[str, dict[str, Any]] = {
    "square": {"size": {"height": 8, "width": 8}, "tokens": 1},
    "grid": {"size": {"shortest_edge": 1, "longest_edge": 4096}, "patch_size": 1, "merge_size": 1,
             "temporal_patch_size": 2},
    "pooled_grid": {"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70},
    "split": {"size": {"longest_edge": 8}, "max_image_size": {"longest_edge": 4}, "tokens": 1},
    "tiles": {"size": {"height": 4, "width": 8}, "min_patches": 1, "max_patches": 2, "tokens": 1},
    "any_resolution": {"size": 4, "image_grid_pinpoints": [[4, 8]], "side": 2},
    "lines": {"size": {"longest_edge": 64}, "patch_size": 8},
}  # fmt: skip


def family_of(name: str, **changed: Any) -> Any:
    plain: dict[str, Any] = {"resample": 3, "rescale_factor": None}
    return families.FAMILIES[name](**plain | FEWEST[name] | changed)


@pytest.mark.parametrize(
    ("family", "setting", "default", "good", "bad"),
    [
        ("lines", "resample", 3, (0, 5), (-1, 6, None)),
        ("lines", "rescale_factor", None, (0, 1e30), (-1, 2e30)),
        ("lines", "image_mean", None, (), ([0, 0, 2e30], (1, 2), [1, 2, 3, 4], "123", [1, 2, None])),
        ("square", "tokens", 1, (65536,), (0, 65537)),
        ("square", "size", {"height": 8, "width": 8}, ({"height": 1, "width": 2**31},),
         ({"height": 0, "width": 1}, {"height": 1, "width": 2**31 + 1})),
        ("square", "crop_size", None, ({"height": 8, "width": 8},),
         ({"height": 8, "width": 9}, {"height": 9, "width": 8})),
        ("grid", "temporal_patch_size", 2, (1, 8), (0, 9)),
        ("grid", "frames", False, (True,), (1, None)),
        ("split", "do_image_splitting", True, (False,), (0, None)),
        ("tiles", "max_patches", 2, (1, 128), (0, 129)),
        ("tiles", "min_patches", 1, (2,), (0, 3)),
        ("any_resolution", "most_tiles", None, (1, 1000), (0, 1001)),
        ("any_resolution", "side", 2, (1, 4), (0, 5)),
        ("any_resolution", "image_grid_pinpoints", ((4, 8),), ([[4, 4]] * 999, [[4, 2**31]]),
         ([[4, 4]] * 1000, [], [[4]], [[4, 4, 4]], [[4, 0]], [[4, 6]], "44", [[4, 2**31 + 4]])),
    ],
)  # fmt: skip
def test_settings_by_default_at_their_limits_and_beyond(
    family: str, setting: str, default: Any, good: tuple[Any, ...], bad: tuple[Any, ...]
) -> None:
    assert getattr(family_of(family), setting) == default
    for value in good:
        family_of(family, **{setting: value})
    for value in bad:
        with pytest.raises(ValueError, match=f"^{setting} is "):
            family_of(family, **{setting: value})


def test_the_largest_resized_image_and_the_longest_side() -> None:
    """2^26 pixels, and 200 times the shorter side."""
    for wide in (0, 1):
        square = family_of("square", size={"height": 2**13, "width": 2**13 + wide})
        if wide == 0:
            square.layout(1, 1)
            continue
        with pytest.raises(ValueError, match="the model would read it with 8193 x 8192"):
            square.layout(1, 1)
    for size in ((200, 1), (1, 200)):
        assert family_of("grid").layout(*size).size == size[::-1]
        with pytest.raises(ValueError, match="the longer side may be 200 times the shorter"):
            family_of("grid").layout(size[0] + (size[0] > 1), size[1] + (size[1] > 1))


@pytest.mark.parametrize("tall", [12, 13])
def test_llava_onevision_reduces_rows_from_1_1_on(tall: int) -> None:
    """With 10 tiles at most, the roots of 12 / 10 and 13 / 10 are 1.095 and 1.14."""
    family = family_of("any_resolution", image_grid_pinpoints=[[4 * tall, 4]], most_tiles=10)
    if tall == 12:
        assert family.layout(4, 4 * tall).placeholders == 4 + 2 * tall * 3
    else:
        with pytest.raises(ValueError, match="packages take about 10 tiles at most"):
            family.layout(4, 4 * tall)
