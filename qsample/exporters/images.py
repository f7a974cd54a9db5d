"""transformers' processor of a checkpoint → `Manifest.images`, with which a package processes
images itself.

Nothing here knows a type of model: a family of `images/families.py` is tried with the settings that
the processor's image class receives, and taken if its pixels and its token ids equal the
processor's, bit for bit, for all of `PROBES`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from transformers import PretrainedConfig, ProcessorMixin
from transformers.image_processing_backends import PilBackend

from qsample.contract.arrays import Array
from qsample.errors import ArgumentError, UnsupportedModelError
from qsample.images.families import FAMILIES, Family, Layout
from qsample.images.processing import ImageProcessor, ImageTexts

if TYPE_CHECKING:
    from PIL.Image import Image

# Width, height and mode: smaller than a patch's block, tall, wide, of one tile, of many.
PROBES: Final = (
    (640, 420, "RGB"),
    (40, 20, "L"),
    (300, 700, "RGBA"),
    (1600, 300, "P"),
    (24, 24, "1"),
    (512, 512, "CMYK"),
    (1150, 760, "RGB"),
)
# Limits that the last probe exceeds: numbers of pixels, and the length of an edge.
_SMALLER_PIXEL_LIMITS: Final = {"shortest_edge": 50_000, "longest_edge": 200_000}
_SMALLER_EDGE: Final = 400
# transformers' default for resizing, as Pillow numbers it.
_BILINEAR: Final = 2
_REMEDY: Final = "export the model without images (--text-only)"


@dataclass(frozen=True)
class _Probe:
    """An image with the processor's results.

    Attributes:
        image: the image.
        settings: the settings that the processor's image class received.
        pixels: the pixels.
        grid: the rows and columns of patches; None for tiles.
        text: the text that replaces the placeholder of the image.
        ids: the token ids of the prompt.
    """

    image: Image
    settings: Mapping[str, Any]
    pixels: Array
    grid: tuple[int, int] | None
    text: str
    ids: list[int]


def describe_images(processor: ProcessorMixin, config: PretrainedConfig) -> dict[str, Any]:
    """The content of `Manifest.images`.

    Args:
        processor: the checkpoint's processor as `load_processor` opens it, with a Pillow class for
            images.
        config: the model's configuration.

    Raises:
        UnsupportedModelError: packages cannot do the same; the message names the processor and the
            difference.
    """
    name = f"{type(processor).__name__} with {type(processor.image_processor).__name__}"
    if not isinstance(processor.image_processor, PilBackend):
        raise UnsupportedModelError(f"{name} has no class that works with Pillow; {_REMEDY}")
    token_id = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    placeholder = getattr(processor, "image_token", None)
    token = (
        processor.tokenizer.convert_ids_to_tokens(token_id) if isinstance(token_id, int) else None
    )
    if not isinstance(placeholder, str) or not isinstance(token, str):
        raise UnsupportedModelError(f"{name} has no text and id that stand for an image; {_REMEDY}")
    names = {"placeholder": placeholder, "token": token, "token_id": token_id}
    try:
        probes = _probes(processor, placeholder)
    except Exception as error:  # transformers raises any exception, and the images are ordinary
        said = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
        raise UnsupportedModelError(
            f"{name} fails for a trial image ({said}); {_REMEDY}"
        ) from error
    most_alike = -1
    difference = "its settings are of no family that packages have"
    for family in FAMILIES:
        for choices in _choices(family, probes[0], config, token):
            described = _described(family, choices, probes, config, names)
            alike, problem = _difference(described, probes, processor) if described else (-1, "")
            if described and not problem:
                return described[0]
            if alike > most_alike:
                most_alike = alike
                difference = problem
    raise UnsupportedModelError(
        f"packages cannot process images as {name} does: {difference}; {_REMEDY}"
    )


def prompt_of(placeholder: str, count: int = 1) -> str:
    """A text with images at its beginning, side by side, and inside."""
    return placeholder * (count - 1) + f"Look:\n{placeholder} is one of {count}."


def _probes(processor: ProcessorMixin, placeholder: str) -> list[_Probe]:
    from PIL.Image import Resampling, fromarray  # late: models of text export without Pillow

    rng = np.random.default_rng(0)
    probes = []
    for width, height, mode in PROBES:
        # Enlarged noise is smooth, as photographs are.
        small = rng.integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8)
        image = fromarray(small).resize((width, height), Resampling.BICUBIC)
        if getattr(processor.image_processor, "do_convert_rgb", False):
            image = image.convert(mode)
            if mode == "RGBA":
                image.putalpha(image.getchannel("G"))
        probes.append(_probe(processor, image, prompt_of(placeholder)))
    size = dict(probes[0].settings.get("size") or {})
    least = _SMALLER_PIXEL_LIMITS if size.get("shortest_edge") else {"longest_edge": _SMALLER_EDGE}
    smaller = {key: min(size[key], most) for key, most in least.items() if size.get(key)}
    if size.get("longest_edge") and any(smaller[key] < size[key] for key in smaller):
        probes.append(_probe(processor, probes[-1].image, prompt_of(placeholder), size=smaller))
    return probes


def _probe(processor: ProcessorMixin, image: Image, prompt: str, **options: Any) -> _Probe:
    """The processor's results for an image; its image class is watched for the settings."""
    images: Any = processor.image_processor
    watched: Any = processor
    preprocess = images.preprocess
    replacement = watched.replace_image_token
    calls: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
    texts: list[str] = []

    def preprocessing(*arguments: Any, **settings: Any) -> Any:
        calls.append(({**images.to_dict(), **settings}, preprocess(*arguments, **settings)))
        return calls[-1][1]

    def replacing(*arguments: Any, **settings: Any) -> str:
        texts.append(replacement(*arguments, **settings))
        return texts[-1]

    images.preprocess = preprocessing
    watched.replace_image_token = replacing
    try:
        inputs = watched(
            text=[prompt], images=[image], **({"images_kwargs": options} if options else {})
        )
    finally:
        del images.preprocess, watched.replace_image_token
    (settings, result), text = calls[0], texts[0]
    values = result["pixel_values"]
    pixels = np.asarray(
        values if hasattr(values, "shape") else [np.asarray(value) for value in values], np.float32
    )
    grid = np.asarray(result["image_grid_thw"])[0] if "image_grid_thw" in result else None
    ids = [int(token) for token in np.asarray(inputs["input_ids"][0])]
    return _Probe(
        image, settings, pixels, None if grid is None else (int(grid[1]), int(grid[2])), text, ids
    )


def _settings(family: str, settings: Mapping[str, Any], config: PretrainedConfig) -> dict[str, Any]:
    """The settings of the family among all settings."""
    values: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            value = {key: number for key, number in dict(value).items() if number is not None}
        values[name] = value
    values["resample"] = _BILINEAR if values.get("resample") is None else int(values["resample"])
    for name in ("image_mean", "image_std"):
        value = values.get(name) if values.get("do_normalize") else None
        values[name] = value if value is None or isinstance(value, Sequence) else [value] * 3
    if not values.get("do_rescale"):
        values["rescale_factor"] = None
    if not values.get("do_center_crop"):
        values["crop_size"] = None
    if isinstance(patch := values.get("patch_size"), Mapping) and len(set(patch.values())) == 1:
        values["patch_size"] = next(iter(patch.values()))
    if family == "any_resolution":
        sides = {*(values.get("size") or {}).values(), *(values["crop_size"] or {}).values()}
        values["size"] = sides.pop() if len(sides) == 1 else None
        most = re.fullmatch(r"anyres_max_(\d+)", str(getattr(config, "vision_aspect_ratio", "")))
        values["most_tiles"] = int(most[1]) if most else None
    return {
        entry.name: values[entry.name] for entry in fields(FAMILIES[family]) if entry.name in values
    }


def _made(
    family: str, choices: Mapping[str, Any], probe: _Probe, config: PretrainedConfig
) -> Family | None:
    """The family with the settings of a probe, or None if they are of another."""
    if not probe.settings.get("do_resize", True) or (family == "tiles") != bool(
        probe.settings.get("crop_to_patches")
    ):
        return None
    try:
        return FAMILIES[family](**_settings(family, probe.settings, config), **choices)
    except (ArgumentError, TypeError):
        return None


def _choices(
    family: str, probe: _Probe, config: PretrainedConfig, token: str
) -> Iterator[dict[str, Any]]:
    """Settings that the processor does not name: numbers of placeholders, and rules that only the
    code has."""
    names = {entry.name for entry in fields(FAMILIES[family])}
    count = probe.text.count(token)
    if "tokens" in names:
        if made := _made(family, {"tokens": 1}, probe, config):
            yield {"tokens": max(count // made.layout(*probe.image.size).placeholders, 1)}
    elif "side" in names:
        for side in range(1, math.isqrt(count) + 1):
            made = _made(family, {"side": side}, probe, config)
            if made and made.layout(*probe.image.size).placeholders == count:
                yield {"side": side}
    elif "frames" in names:
        yield from ({"frames": False}, {"frames": True})
    else:
        yield {}


def _described(
    family: str,
    choices: Mapping[str, Any],
    probes: Sequence[_Probe],
    config: PretrainedConfig,
    names: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """`Manifest.images` with the settings of each probe; none if the family does not have these."""
    made = [_made(family, choices, probe, config) for probe in probes]
    families = [each for each in made if each is not None]
    if len(families) < len(probes):
        return []
    try:
        layouts = [
            each.layout(*probe.image.size) for each, probe in zip(families, probes, strict=True)
        ]
    except ArgumentError:
        return []
    texts = image_texts(layouts, [probe.text for probe in probes], names["token"]) or ImageTexts()
    all_of = [
        {"family": family, "settings": asdict(each), **names, "texts": asdict(texts)}
        for each in families
    ]
    return json.loads(json.dumps(all_of))  # type: ignore[no-any-return]


def _difference(
    described: Sequence[dict[str, Any]], probes: Sequence[_Probe], processor: ProcessorMixin
) -> tuple[int, str]:
    """The number of probes that came out the same, and the first difference, or an empty text."""
    placeholder = described[0]["placeholder"]
    images = []
    for number, (probe, settings) in enumerate(zip(probes, described, strict=True)):
        mine = ImageProcessor(settings)
        image = mine.process(probe.image)
        what = f"of an image of {' x '.join(map(str, probe.image.size))} pixels in mode {probe.image.mode}"
        if problem := pixel_difference(image.pixel_values, probe.pixels):
            return number, f"{problem} in the pixels {what}"
        if probe.grid not in (None, image.grid):
            return number, f"{probe.grid} and {image.grid} patches {what}"
        if _ids(processor, mine.expand(prompt_of(placeholder), [image])) != probe.ids:
            return number, f"the token ids {what} differ"
        images.append(image)
    mine = ImageProcessor(described[0])
    three = images[:3]
    prompt = prompt_of(placeholder, 3)
    theirs: Any = processor(text=[prompt], images=[probe.image for probe in probes[:3]])
    ids = _ids(processor, mine.expand(prompt, three))
    if ids != [int(token) for token in np.asarray(theirs["input_ids"][0])]:
        return len(probes), "the token ids of three images differ"
    try:
        mine.prompt(ids, three)
    except ArgumentError as error:
        return len(probes), str(error)
    return len(probes), ""


def _ids(processor: ProcessorMixin, text: str) -> list[int]:
    return list(processor.tokenizer(text)["input_ids"])


def pixel_difference(ours: Array, theirs: Array) -> str:
    """The difference in a few words, or nothing. theirs: perhaps with further axes of size 1, and
    padded with zeros."""
    if ours[0].size == 0 or theirs.size % ours[0].size or theirs.size < ours.size:
        return f"there are numbers {list(theirs.shape)}, not {list(ours.shape)},"
    flat = theirs.reshape(-1, *ours.shape[1:])
    if ours.shape[1:] != theirs.shape[-ours.ndim + 1 :] or flat[len(ours) :].any():
        return f"there are numbers {list(theirs.shape)}, not {list(ours.shape)},"
    wrong = int(np.count_nonzero(flat[: len(ours)] != ours))
    return f"{wrong} of {ours.size} numbers differ" if wrong > 0 else ""


def image_texts(layouts: Sequence[Layout], written: Sequence[str], token: str) -> ImageTexts | None:
    """The texts with which images of these layouts are `written`, or None if there are none."""
    texts = ImageTexts()
    line = ""
    patterns = [""]
    most = 1
    for layout, text in zip(layouts, written, strict=True):
        part = _around(layout, text, token)
        if part is None:
            return None
        rows, columns = layout.tiles
        texts = replace(texts, after=part[-1])
        if rows * columns == 0:
            texts = replace(texts, single=part[0])
            continue
        texts = replace(texts, before=part[0], whole=part[-2] if layout.whole else texts.whole)
        if rows > 1:
            line = part[columns]
            most = columns
        if columns > 1:
            patterns = _patterns(part[rows * columns - 1], rows - 1, columns - 1, columns)
    for (
        tile
    ) in patterns:  # the texts before the first tile of an image and of a row include that tile's
        found = replace(texts, tile=tile)
        before = found.before.removesuffix(found.of_tile(0, 0, 1))
        found = replace(found, before=before, line=line.removesuffix(found.of_tile(1, 0, most)))
        if all(
            found.written(layout, token) == text
            for layout, text in zip(layouts, written, strict=True)
        ):
            return found
    return None


def _around(layout: Layout, text: str, token: str) -> list[str] | None:
    """The texts before each run of placeholders, and after the last; None if there are other
    runs."""
    rows, columns = layout.tiles
    parts = []
    at = 0
    run = token * layout.count
    for _ in range(max(rows * columns, 1) + layout.whole):
        found = text.find(run, at)
        if found < 0:
            return None
        parts.append(text[at:found])
        at = found + len(run)
    return None if token in "".join(parts) + text[at:] else [*parts, text[at:]]


def _patterns(text: str, row: int, column: int, columns: int) -> list[str]:
    """`text` with {row}, {column} and {number} in place of numbers that may be these."""
    values = {"{row}": row + 1, "{column}": column + 1, "{number}": row * columns + column + 1}
    parts = re.split(r"(\d+)", text)
    options = [
        [*(name for name, value in values.items() if part == str(value)), part] for part in parts
    ]
    return list(map("".join, product(*options)))
