"""Finds the layers in which the tokens of an image see each other, by the masks that they ask
for."""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from qsample.errors import UnsupportedModelError
from qsample.transforms.attention import MaskFunction, MaskRule, causal

# Arguments of models that are 1 for the tokens of an image.
_TOKEN_TYPE_NAMES: Final = ("token_type_ids", "mm_token_type_ids")
_PROBE_ATTENTION: Final = "qsample_image_probe"
# The window is shorter than an image of the prompt, so it shows whether a window cuts images.
_PROBE_WINDOW: Final = 3
# 1 for a token of an image.
_PROBE_PROMPT: Final = (0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0)


def token_types(model: PreTrainedModel, is_image: Tensor) -> dict[str, Tensor]:
    """The argument of `model.forward` that says which tokens are an image's; none if it does not
    ask. is_image: [B, S] bool."""
    parameters = inspect.signature(model.forward).parameters
    return {name: is_image.to(torch.int64) for name in _TOKEN_TYPE_NAMES if name in parameters}


def find_blockwise(model: PreTrainedModel) -> frozenset[int]:
    """The layers of `model` in which a token of an image sees its whole run of image tokens; the
    window, if there is one, cuts it like all else. Raises UnsupportedModelError if a layer's
    attention to a prompt with images is neither so nor causal. `model` runs a short prompt; it is
    as before afterwards."""
    prompt = torch.tensor([_PROBE_PROMPT])
    types = token_types(model, prompt == 1)
    if not types or not model._can_set_attn_implementation():
        return frozenset()  # if that is wrong, the parity gate says so
    positions = torch.arange(len(_PROBE_PROMPT))[None]
    found = dict[int, str]()

    def mask(*, mask_function: MaskFunction, **unused: Any) -> Tensor:
        return MaskRule(mask_function).allowed(positions, len(_PROBE_PROMPT))

    def note(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, allowed: Any, **options: Any
    ) -> Any:
        if allowed is None:
            allowed = mask(mask_function=causal(options.get("sliding_window")))
        found[int(module.layer_idx)] = _kind(allowed[0, 0], prompt[0] == 1)  # type: ignore[arg-type]
        return query.transpose(1, 2)[..., : value.shape[-1]], None

    AttentionInterface.register(_PROBE_ATTENTION, note)
    AttentionMaskInterface.register(_PROBE_ATTENTION, mask)
    config = model.config.get_text_config(decoder=True)
    before = model.config._attn_implementation
    window = getattr(config, "sliding_window", None)
    try:
        model.set_attn_implementation(_PROBE_ATTENTION)
        if window:
            config.sliding_window = _PROBE_WINDOW
        with (
            torch.no_grad()
        ):  # without a cache: it would tell some models that the prompt came before
            model(
                input_ids=torch.zeros_like(prompt), position_ids=positions, use_cache=False, **types
            )
    finally:
        if window:
            config.sliding_window = window
        model.set_attn_implementation(before)
    if others := sorted(layer for layer, kind in found.items() if kind == "other"):
        raise UnsupportedModelError(
            f"{type(model).__name__} lets more than the tokens of an image see later tokens (in layer {others[0]}), "
            "perhaps all of a prompt; qsample serves causal attention, and images that see themselves. Choose another "
            "model, or export the text model alone (--text-only) if the type has one"
        )
    return frozenset(layer for layer, kind in found.items() if kind == "blockwise")


def _kind(sees: Tensor, is_image: Tensor) -> str:
    """One of "causal", "blockwise" and "other". sees: [S, S] bool, of queries and keys. is_image:
    [S] bool."""
    at, run = (
        torch.arange(len(is_image)),
        (~is_image).cumsum(0),
    )  # a run's tokens have as many text tokens before them
    distance = at[:, None] - at[None]
    same = is_image[:, None] & is_image[None] & (run[:, None] == run[None])
    for window in (len(is_image), _PROBE_WINDOW):
        for kind, allowed in (("causal", distance >= 0), ("blockwise", (distance >= 0) | same)):
            if torch.equal(sees, allowed & (distance < window)):
                return kind
    return "other"
