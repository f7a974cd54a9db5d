"""Exports a tiny random model of a type that reads images; the result is a `Row` of the second table.

The prompts are a text, an image, two images, and images of other sizes. transformers' model with `pixel_values` is the
oracle: its logits, its greedy tokens, and the float64 reference's draws from its logits. The export itself compares the
graph's logits, the features of vision.onnx and the processing of images with transformers, and so does compile.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from qsample import AutoModelForImageTextToText
from qsample.contract.interface import ImageShape
from qsample.errors import QsampleError
from qsample.runtime import SamplingParams, load
from tests.architectures.run import MAX_ERROR, NEW_TOKENS, PARAMS, SEED, Row, check_draws
from tests.helpers.tiny_vlms import (
    IMAGE_TEXT,
    TYPES,
    make_tiny_vlm,
    picture,
    reference_generate,
    reference_steps,
)

IMAGE = "image:"  # in front of the type in a row's name
SIZES = ((40, 30), (50, 20), (20, 50), (64, 64), (33, 47))
# The second is longer than a piece of a prompt, and its first image lies across the pieces' border.
PROMPTS = (
    "{}What is this?",
    "Compare these two with care, and say which is larger: {} or {}?",
    "Hello",
    "{} A {}.",
)
IMAGES = ((0,), (1, 2), (), (3, 4))
_SMALL = 1e-6  # probabilities below are not compared


def image_names() -> list[str]:
    """The names of the table's rows."""
    return sorted(f"{IMAGE}{model_type}" for model_type in TYPES)


def run_images(name: str, *, compiled: bool = True) -> Row:
    """Make, export, generate from, and if `compiled` compile a model of the type of a row; errors become the result."""
    started, model_type = time.perf_counter(), name.removeprefix(IMAGE)
    figures: dict[str, Any] = {}

    def row(result: str, reason: object = "") -> Row:
        text = " ".join(str(reason).split())
        return Row(name, result, text, seconds=round(time.perf_counter() - started, 1), **figures)

    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny_vlm(model_type, Path(folder, "model"))
        try:
            model = AutoModelForImageTextToText.from_pretrained(path, return_pdfs=True)
            package = model.export(Path(folder, "package"))
        except QsampleError as error:
            return row("refused", error)
        except Exception as error:
            return row("export failed", f"{type(error).__name__}: {error}")
        manifest = package.package.manifest
        assert manifest.interface.image is not None
        assert manifest.images is not None
        assert manifest.parity is not None
        figures["images"] = _in_words(manifest.interface.image, manifest.images["family"])
        try:
            largest, figures["tokens"] = check_package(model_type, path, Path(folder, "package"))
            figures["error"] = max(largest, manifest.parity["max_error"])
            if compiled:
                package.compile(Path(folder, "compiled"), ctx_len=256)
                check_package(model_type, path, Path(folder, "compiled"))
        except Exception as error:
            return row("tokens differ", f"{type(error).__name__}: {error}")
        if figures["error"] > MAX_ERROR:
            return row("inexact", f"a logit is off by {figures['error']:.2g}")
        return row("passed")


def check_package(model_type: str, checkpoint: Path, package: Path) -> tuple[float, int]:
    """Compare the tokens of every prompt alone, in a batch and in pieces with transformers'. Returns the largest error
    of a log-probability, and how many sampled tokens were compared."""
    prompts = [prompt.replace("{}", IMAGE_TEXT[model_type]) for prompt in PROMPTS]
    images = [[picture(*SIZES[i], seed=i) for i in some] for some in IMAGES]
    model = load(package)
    greedy: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
    wanted = reference_generate(checkpoint, prompts, images, NEW_TOKENS)
    alone = [
        model.generate([one], images=[some], **greedy)
        for one, some in zip(prompts, images, strict=True)
    ]
    assert [output.token_ids[0] for output in alone] == wanted, "greedy, alone"
    assert model.generate(prompts, images=images, **greedy).token_ids == wanted, (
        "greedy, in a batch"
    )
    reordered = model.generate(
        prompts[::-1], images=images[::-1], prefill_chunk_size=64, **greedy
    ).token_ids
    assert reordered == wanted[::-1], "greedy, in pieces"
    error, draws = 0.0, 0
    for options in (
        {},
        *PARAMS[1:],
    ):  # all rows without filters first: probabilities are those of the logits
        params = SamplingParams(max_new_tokens=NEW_TOKENS, eos_token_id=(), **options)
        sampled = model.generate(
            prompts, params, images=images, seed=[SEED + row for row in range(len(prompts))]
        )
        for row, (prompt, some, new) in enumerate(
            zip(prompts, images, sampled.token_ids, strict=True)
        ):
            assert len(new) == NEW_TOKENS, (
                f"row {row} ended after {len(new)} tokens: {sampled.finish_reasons[row]}"
            )
            ids, logits = reference_steps(checkpoint, prompt, some, new)
            draws += check_draws(row, ids, new, logits, options)
            if not options:
                assert sampled.probs is not None
                error = max(error, _log_error(sampled.probs[row], logits))
    return error, draws


def _log_error(probs: np.ndarray, logits: np.ndarray) -> float:
    """The largest difference of a log-probability, [n, V] each."""
    expected = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    expected -= np.log(np.exp(expected).sum(-1, keepdims=True))
    compared = np.exp(expected) > _SMALL
    return float(
        np.abs(np.log(np.maximum(probs, 1e-30, dtype=np.float64)) - expected)[compared].max()
    )


def _in_words(shape: ImageShape, family: str) -> str:
    parts = [f"{family}: {'patches' if shape.patch_values else 'tiles'}"]
    parts += [f"deepstack {shape.deepstack}"] if shape.deepstack else []
    parts += ["M-RoPE"] if shape.axial else []
    parts += ["blockwise attention"] if shape.blockwise else []
    return ", ".join(parts)


def other_types() -> dict[str, list[str]]:
    """transformers' further types of texts and images, by what is known of them without a model."""
    groups: dict[str, list[str]] = {}
    for name in sorted(set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) - set(TYPES)):
        config = CONFIG_MAPPING[name]
        backends = IMAGE_PROCESSOR_MAPPING_NAMES.get(name, {})
        if config.is_encoder_decoder:
            group = "encoder-decoders, refused"
        elif "vision_config" not in config.sub_configs or not hasattr(
            MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config], "get_image_features"
        ):
            group = "images that do not enter as rows of a vision tower, refused"
        elif backends and not backends.get("pil"):
            group = "image processors for torchvision alone, refused"
        else:
            group = "not tried"
        groups.setdefault(group, []).append(name)
    return groups
