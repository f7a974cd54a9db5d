"""Writes docs/vectors/pixels.json: pixels and placeholders of images, for hosts in any language.

    python scripts/image_vectors.py

The numbers are those of transformers' processors, of tiny models. docs/vectors/README.md describes the file.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from qsample.contract.tensors import IMAGES_VERSION  # noqa: E402
from qsample.exporters.images import describe_images  # noqa: E402
from qsample.images.families import FAMILIES, Family  # noqa: E402
from tests.helpers.tiny_vlms import config_of, processor_of  # noqa: E402

FILE: Final = ROOT / "docs" / "vectors" / "pixels.json"
TYPES: Final = (
    "llava",
    "qwen2_vl",
    "glm4v",
    "gemma4",
    "smolvlm",
    "aya_vision",
    "llava_next",
    "mistral3",
)
SIZES: Final = ((64, 48), (30, 99), (12, 12))


def main() -> None:
    families = (json.dumps(vectors(processor_of(kind), config_of(kind))) for kind in TYPES)
    head = f'{{"contract_version": "{IMAGES_VERSION}", "families": [\n'
    FILE.write_text(head + ",\n".join(families) + "\n]}\n", encoding="utf-8")


def picture(width: int, height: int) -> Image.Image:
    """The image of these vectors."""
    y, x, channel = np.ogrid[:height, :width, :3]
    return Image.fromarray(((31 * x + 17 * y + 101 * channel + x * y // 7) % 256).astype(np.uint8))


def vectors(processor: Any, config: Any) -> dict[str, Any]:
    images = describe_images(processor, config)
    family: Family = FAMILIES[images["family"]](**images["settings"])
    cases = []
    for width, height in SIZES:
        inputs = processor(text=[images["placeholder"]], images=[picture(width, height)])
        ids = np.asarray(inputs["input_ids"])[0].tolist()
        layout = family.layout(width, height)
        values, grid = family.pixels(picture(width, height), layout)
        theirs = inputs["pixel_values"]
        theirs = np.asarray(
            theirs if hasattr(theirs, "shape") else [np.asarray(each) for each in theirs],
            np.float32,
        )
        values = theirs.reshape(-1, *values.shape[1:])[
            : len(values)
        ]  # without the padding of a batch
        cases.append(
            {
                "width": width,
                "height": height,
                "shape": list(values.shape),
                "grid": grid,
                "first": [float(f"{number:.9g}") for number in values.reshape(-1)[:4]],
                "sha256": hashlib.sha256(values.astype("<f4").tobytes()).hexdigest(),
                "text": processor.tokenizer.decode(ids).removeprefix(processor.tokenizer.bos_token),
                "rows": None if layout.rows is None else layout.rows.tolist(),
                "size": layout.size,
            }
        )
    return {"images": images, "cases": cases}


if __name__ == "__main__":
    main()
