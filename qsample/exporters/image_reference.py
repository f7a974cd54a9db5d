"""The results of a Hugging Face model for a prompt with images, with which the parity gate compares
its export.

The model gets pixels, and a hook notes the inputs of its layers: features in place of embeddings,
features that are added later, and positions. So nothing here depends on how a model makes these
from pixels."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, ProcessorMixin

from qsample.contract.arrays import Array
from qsample.contract.interface import ImageShape
from qsample.errors import UnsupportedModelError
from qsample.exporters.parity import ImageReference
from qsample.images.positions import position_offsets
from qsample.transforms.images import ADDED_FEATURES, POSITION_AXES, text_model

# Width and height of each image; most processors enlarge them.
_IMAGE_SIZES: Final = ((64, 48), (40, 72))
_UNLIMITED_TOKENS: Final = 1 << 20


@dataclass(slots=True)
class _Call:
    """The inputs of a model's decoder.

    Attributes:
        embedded: the embedded tokens, [1, n, hidden].
        added: the features that are added to those of images, [F, hidden] each.
        positions: [.., 1, n].
    """

    embedded: Tensor | None = None
    added: list[Tensor] = field(default_factory=list)
    positions: Tensor | None = None

    def note(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        self.embedded = kwargs.get("inputs_embeds")
        self.positions = kwargs.get("position_ids")
        self.added = list(kwargs.get(ADDED_FEATURES) or ())


def image_reference(
    model: PreTrainedModel, processor: ProcessorMixin, shape: ImageShape, context: int | None
) -> tuple[ImageReference, ImageShape]:
    """Run a model eagerly on a prompt with random images (seeded) of different sizes.

    Args:
        model: the model.
        processor: its processor.
        shape: how images enter the decoder.
        context: the number of positions that the model knows; None for any number.

    Returns:
        The results, and `shape` with the `patch_values` of the processor's pixels.

    Raises:
        UnsupportedModelError: the context has no room for an image, or the model does not take
            images as `shape` says.
    """
    model.set_attn_implementation("eager")
    for count in (len(_IMAGE_SIZES), 1):
        inputs = _inputs(model, processor, count)
        if (n := inputs["input_ids"].shape[1]) <= (
            _UNLIMITED_TOKENS if context is None else context
        ):
            break
    else:
        raise UnsupportedModelError(
            f"the model knows {context} positions (max_position_embeddings), and a prompt with an image has {n}; "
            "export its text alone (--text-only)"
        )
    call = _Call()
    hook = text_model(model).register_forward_pre_hook(call.note, with_kwargs=True)
    try:
        with torch.no_grad():
            kept = (
                {"logits_to_keep": 2}
                if "logits_to_keep" in inspect.signature(model.forward).parameters
                else {}
            )
            logits = (
                model(**inputs, **kept, use_cache=False).logits[0, -2:].to(torch.float32).numpy()
            )
            table: Any = model.get_input_embeddings()
            ids = inputs["input_ids"]
            own = table(torch.where(ids < len(table.weight), ids, 0))
    finally:
        hook.remove()
    if call.embedded is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} takes images in another way than in place of tokens"
        )
    is_image = (call.embedded != own).any(-1)[0]
    parts = [call.embedded[0, is_image], *call.added]
    pixels = inputs["pixel_values"]
    shape = replace(shape, patch_values=pixels.shape[-1] if pixels.ndim < 4 else 0)
    if (
        sum(part.shape[-1] for part in parts) != shape.width
        or len({len(part) for part in parts}) != 1
    ):
        raise UnsupportedModelError(
            f"{type(model).__name__} gives its images {[tuple(part.shape) for part in parts]} numbers, "
            f"not {shape.width} each"
        )
    rows = torch.where(is_image, is_image.cumsum(0) - 1, -1)[:-1]
    *prompt, following = inputs["input_ids"][0].tolist()
    found = ImageReference(
        prompt,
        following,
        rows.numpy().astype(np.int32),
        torch.cat(parts, -1).to(torch.float32).numpy(),
        logits,
        _offsets(call.positions, is_image[:-1].numpy()) if shape.axial else None,
    )
    return found, shape


def _inputs(model: PreTrainedModel, processor: ProcessorMixin, count: int) -> dict[str, Any]:
    """The inputs of `model` for a prompt with that many images, and a token after it."""
    from PIL.Image import fromarray  # late: models of text export without Pillow

    generator = np.random.default_rng(0)
    images = [
        fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))
        for width, height in _IMAGE_SIZES[:count]
    ]
    text = "".join(
        f"{word} {getattr(processor, 'image_token', '')} " for word in ("one", "two")[:count]
    )
    inputs: dict[str, Any] = dict(
        processor(text=[f"{text}three"], images=[images], return_tensors="pt")
    )
    ids = inputs["input_ids"]
    inputs["attention_mask"] = torch.ones_like(ids)
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            inputs[name] = value.to(model.dtype)
        elif isinstance(value, Tensor) and value.shape == ids.shape:
            # It has a number for each token, and the token after the prompt is text.
            last = {"input_ids": ids[:, :1], "attention_mask": value[:, :1]}.get(
                name, torch.zeros_like(value[:, :1])
            )
            inputs[name] = torch.cat([value, last], dim=1)
    return inputs


def _offsets(positions: Tensor | None, is_image: Array) -> Array:
    """[n + 1, 3] int32: what a host adds to the places of the n tokens and of the token after
    them."""
    if positions is None or positions.ndim != 3 or positions.shape[0] < POSITION_AXES:
        raise UnsupportedModelError("the model's decoder is not given positions of three parts")
    wanted = positions[-POSITION_AXES:, 0].T.numpy()
    starts = np.flatnonzero(np.diff(is_image, prepend=False) & is_image)
    ends = np.flatnonzero(np.diff(is_image, append=False) & is_image) + 1
    sides = [
        np.ptp(wanted[start:end, 1:], axis=0) + 1 for start, end in zip(starts, ends, strict=True)
    ]
    offsets = position_offsets(is_image, [(int(rows), int(columns)) for rows, columns in sides])
    if not np.array_equal(offsets + np.arange(len(offsets))[:, None], wanted):
        raise UnsupportedModelError(
            "the model gives the tokens of images other positions than Qwen2-VL does: those are all that hosts compute"
        )
    return offsets
