"""The time that an image takes before vision.onnx, beside transformers' Pillow classes, in turns.

    python benchmarks/pixels.py

Each family with published sizes, and an RGB image of 1,024 x 768 random pixels in memory. Both sides end with the same
float32 numbers. Prints milliseconds, medians over the rounds: transformers' class for images, `ImageProcessor.process`,
which also hashes the image and writes its text, and how often the second goes into the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import transformers
from PIL import Image
from report import median

from qsample.images.processing import ImageProcessor

ROUNDS = 15
SHARED: dict[str, Any] = {
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 3,
}
POINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
SQUARE = {"height": 336, "width": 336}
# Family → transformers' class, the settings of both, of transformers, and of the family.
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "square": (
        "SiglipImageProcessorPil",
        {"size": {"height": 896, "width": 896}},
        {},
        {"tokens": 256},
    ),
    "grid": (
        "Qwen2VLImageProcessorPil",
        {
            "size": {"shortest_edge": 3136, "longest_edge": 12845056},
            "patch_size": 14,
            "merge_size": 2,
        }
        | {"temporal_patch_size": 2},
        {},
        {},
    ),
    "split": (
        "SmolVLMImageProcessorPil",
        {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}},
        {},
        {"tokens": 64},
    ),
    "tiles": (
        "GotOcr2ImageProcessorPil",
        {"size": {"height": 448, "width": 448}, "min_patches": 1, "max_patches": 12},
        {"crop_to_patches": True},
        {"tokens": 256},
    ),
    "any_resolution": (
        "LlavaNextImageProcessorPil",
        {"image_grid_pinpoints": POINTS},
        {"size": {"shortest_edge": 336}, "crop_size": SQUARE},
        {"size": 336, "side": 24},
    ),
    "lines": (
        "PixtralImageProcessorPil",
        {"size": {"longest_edge": 1540}, "patch_size": 28},
        {},
        {},
    ),
}


def main() -> None:
    image = Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (768, 1024, 3), dtype=np.uint8)
    )
    print("family          transformers  qsample  ratio")
    for family, (name, both, theirs, ours) in KINDS.items():
        reference = getattr(transformers, name)(**SHARED, **both, **theirs)
        settings = {"rescale_factor": 1 / 255, **SHARED, **both, **ours}
        processor = ImageProcessor(
            {
                "family": family,
                "settings": settings,
                "placeholder": "*",
                "token": "*",
                "token_id": 0,
                "texts": {},
            }
        )
        sides: list[Callable[[], Any]] = [
            lambda: reference(image),  # noqa: B023
            lambda: processor.process(image),  # noqa: B023
        ]
        times: list[list[float]] = [[], []]
        for round_ in range(ROUNDS + 1):
            for side, spent in zip(sides, times, strict=True):
                start = time.perf_counter()
                side()
                if round_:  # the first warms up
                    spent.append((time.perf_counter() - start) * 1e3)
        slow, fast = (median(spent) for spent in times)
        print(f"{family:15} {slow:12.1f} {fast:8.1f} {slow / fast:6.2f}")


if __name__ == "__main__":
    main()
