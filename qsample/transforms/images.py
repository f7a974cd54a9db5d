"""Images in a decoder call: features in place of embeddings, further features after the first
layers, and positions of three parts. `image_shape` finds out which of these a model has."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from qsample.contract.interface import ImageShape
from qsample.errors import UnsupportedModelError
from qsample.transforms.cache import DecodeContext

# A position of an image's token has a time, a height and a width.
POSITION_AXES: Final = 3
# The argument of text models that add features after their first layers.
ADDED_FEATURES: Final = "deepstack_visual_embeds"


class ImageEmbedding(nn.Module):
    """The table of the token ids, except that a token of an image gets its row of
    `context.image_features`.

    The features are read in decoder calls with images only. The id of an image's token may lie
    outside of the table."""

    def __init__(self, embedding: nn.Module, context: DecodeContext, *, ids_beyond: bool) -> None:
        super().__init__()
        self.embedding = embedding
        self.context = context
        self._ids_beyond = ids_beyond

    @property
    def weight(self) -> Tensor:
        """[V, hidden]; transformers reads it if the head is tied to it."""
        weight = self.embedding.weight
        assert isinstance(weight, Tensor)
        return weight

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [B, S]. Returns [B, S, hidden]."""
        context = self.context
        rows = context.image_rows
        features = context.image_features
        if self._ids_beyond and context.active:
            ids = torch.where(ids < len(self.weight), ids, 0)
        embedded: Tensor = self.embedding(ids)
        if rows is None or features is None:
            return embedded
        is_image = (rows >= 0)[..., None]
        own = F.embedding(rows.clamp(min=0), features)
        if own.shape[-1] > embedded.shape[-1]:
            own, *added = torch.split(own, embedded.shape[-1], dim=-1)
            context.added_features = [torch.where(is_image, part, 0.0) for part in added]
        return torch.where(is_image, own, embedded)


def use_images(model: PreTrainedModel, context: DecodeContext) -> None:
    """Let decoder calls of `context` read the features of images."""
    embedding = model.get_input_embeddings()
    if isinstance(embedding, ImageEmbedding):
        embedding.context = context  # an earlier export had another
    else:
        beyond = any(id >= len(embedding.weight) for id in _placeholder_ids(model))  # type: ignore[arg-type]
        model.set_input_embeddings(ImageEmbedding(embedding, context, ids_beyond=beyond))
    text: Any = text_model(model)
    choose_angles(text)
    if not hasattr(text, "_deepstack_process"):
        return
    own = type(text)._deepstack_process

    def add(hidden: Tensor, mask: Tensor | None, added: Tensor) -> Tensor:
        return hidden + added if mask is None else own(text, hidden, mask, added)

    def hand_over(
        module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        if context.added_features:
            kwargs = kwargs | {ADDED_FEATURES: context.added_features, "visual_pos_masks": None}
        return args, kwargs

    text._deepstack_process = add
    text.register_forward_pre_hook(hand_over, with_kwargs=True)


def choose_angles(text: nn.Module) -> None:
    """Let the rotary embeddings of `text` take a token's angles from those of three positions, [3,
    B, S, n], by index: assignments to slices, or parts side by side, are as many as 20 operators a
    step."""
    module: Any
    for module in text.modules():
        if hasattr(module, "mrope_section") and hasattr(module, "recomposition_frequencies"):
            numbers = torch.arange(POSITION_AXES * len(module.inv_freq)).reshape(
                POSITION_AXES, 1, 1, -1
            )
            index = type(module).recomposition_frequencies(module, numbers).flatten()

            def choose(angles: Tensor, index: Tensor = index) -> Tensor:
                return angles.permute(1, 2, 0, 3).flatten(2).index_select(2, index)

            module.recomposition_frequencies = choose


def with_offsets(positions: Tensor, offsets: Tensor) -> Tensor:
    """[4, B, S]: the tokens' places for masks, then their positions in time, height and width.
    positions: [B, S]. offsets: [B, S, 3]."""
    axes = positions[None] + offsets.to(torch.int64).permute(2, 0, 1)
    return torch.cat([positions[None], axes])


def text_model(model: PreTrainedModel) -> PreTrainedModel:
    """The part of `model` that has the decoder's layers, without the towers beside it."""
    if model.config.get_text_config(decoder=True) is model.config:
        return model
    found = model.get_decoder()  # type: ignore[no-untyped-call]
    return found if isinstance(found, PreTrainedModel) else model


def image_shape(model: PreTrainedModel) -> ImageShape | None:
    """How images enter `model`; None if it takes none. `blockwise` is left False. Raises
    UnsupportedModelError for positions of another number of parts than three."""
    vision = getattr(model.config, "vision_config", None)
    if vision is None or not hasattr(model, "get_image_features"):
        return None
    text = text_model(model)
    hidden = int(model.config.get_text_config(decoder=True).hidden_size)
    deepstack = (
        len(getattr(vision, "deepstack_visual_indexes", None) or ()) if _adds_features(text) else 0
    )
    return ImageShape(hidden * (1 + deepstack), deepstack, axial=_is_axial(text))


def _adds_features(text: nn.Module) -> bool:
    return hasattr(text, "_deepstack_process")


def _is_axial(text: PreTrainedModel) -> bool:
    """Whether a rotary embedding of `text` takes its angles from several positions of a token."""
    for module in text.modules():
        sections = getattr(module, "mrope_section", None)
        for section in sections.values() if isinstance(sections, dict) else [sections]:
            if section and len(section) != POSITION_AXES:
                raise UnsupportedModelError(
                    f"{type(module).__name__} has positions of {len(section)} parts; only those of time, height and "
                    "width are supported"
                )
            if section:
                return True
    return False


def _placeholder_ids(model: PreTrainedModel) -> list[int]:
    """The ids that stand for images in a prompt."""
    names = ("image_token_id", "image_token_index")
    return [id for name in names if isinstance(id := getattr(model.config, name, None), int)]
