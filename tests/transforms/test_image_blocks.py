"""Which layers let an image's tokens see each other, as transformers' masks say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from transformers import AutoModelForImageTextToText

from qsample.errors import UnsupportedModelError
from qsample.transforms.image_blocks import _kind, find_blockwise, token_types
from tests.helpers.tiny_vlms import TEXT, TOWER, random_vlm


@pytest.mark.parametrize(
    ("model_type", "changes", "expected"),
    [
        ("gemma3", {}, {0, 1}),
        ("gemma4", {}, set()),
        ("gemma4", {"use_bidirectional_attention": "vision"}, {0}),  # in sliding layers
        ("qwen2_5_vl", {}, set()),
        ("llava", {}, set()),
    ],
)
def test_a_prompt_with_images_tells(
    model_type: str, changes: dict[str, Any], expected: set[int]
) -> None:
    model = random_vlm(model_type, **changes)
    before = model.config.to_json_string(), model.config._attn_implementation
    assert find_blockwise(model) == expected
    assert (model.config.to_json_string(), model.config._attn_implementation) == before


def test_a_prefix_that_sees_itself_is_refused() -> None:
    text = tf.GemmaConfig(**TEXT)
    vision = tf.SiglipVisionConfig(**TOWER, vision_use_head=False)
    config = tf.PaliGemmaConfig(
        text_config=text, vision_config=vision, image_token_index=300, projection_dim=64
    )
    auto: Any = AutoModelForImageTextToText
    with pytest.raises(
        UnsupportedModelError, match="PaliGemmaForConditionalGeneration lets more than"
    ):
        find_blockwise(auto.from_config(config).eval())


def test_a_window_cuts_images_or_not() -> None:
    """Runs that see beyond the window backwards would be another mask: refused."""
    model = random_vlm("gemma3")
    module: Any = tf.models.gemma3.modeling_gemma3
    made = module.create_masks_for_vision_model

    def without(**options: Any) -> Any:
        config, blocks = options["config"], options.pop("block_sequence_ids")
        own = {name: value for name, value in options.items() if name != "config"}
        sliding = module.create_sliding_window_causal_mask(config, **own, block_sequence_ids=blocks)
        return {**made(**options, block_sequence_ids=blocks), "sliding_attention": sliding}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "create_masks_for_vision_model", without)
        with pytest.raises(UnsupportedModelError, match="layer 0"):
            find_blockwise(model)


IS_IMAGE = torch.tensor([0, 1, 1, 1, 1, 1, 0, 1, 1, 0]) == 1


def mask(window: int | None, *, blockwise: bool) -> torch.Tensor:
    """[S, S], token by token: which keys a query sees."""
    runs = [0, 1, 1, 1, 1, 1, 0, 2, 2, 0]

    def sees(query: int, key: int) -> bool:
        near = window is None or query - key < window
        return near and (key <= query or (blockwise and 0 < runs[query] == runs[key]))

    return torch.tensor([[sees(query, key) for key in range(10)] for query in range(10)])


@pytest.mark.parametrize(
    ("sees", "kind"),
    [
        (mask(None, blockwise=False), "causal"),
        (mask(3, blockwise=False), "causal"),
        (mask(None, blockwise=True), "blockwise"),
        (mask(3, blockwise=True), "blockwise"),
        (mask(2, blockwise=True), "other"),  # no window that the probe set
        (mask(4, blockwise=False), "other"),
        (torch.ones(10, 10) == 1, "other"),
        (mask(None, blockwise=True).T, "other"),
        (torch.zeros(10, 10) == 1, "other"),
    ],
)
def test_the_kind_of_a_mask(sees: torch.Tensor, kind: str) -> None:
    assert _kind(sees, IS_IMAGE) == kind


def test_two_images_do_not_see_each_other() -> None:
    sees = mask(None, blockwise=True)
    sees[1, 7] = True
    assert _kind(sees, IS_IMAGE) == "other"


def test_the_argument_for_types_of_tokens() -> None:
    """Each name that the model's `forward` has; as numbers."""

    class Model:
        def forward(self, input_ids: Any, mm_token_type_ids: Any = None) -> None: ...

    class Plain:
        def forward(self, input_ids: Any) -> None: ...

    model: Any = Model()
    ((name, types),) = token_types(model, IS_IMAGE[None]).items()
    assert (name, types.dtype, types.tolist()) == (
        "mm_token_type_ids",
        torch.int64,
        [[0, 1, 1, 1, 1, 1, 0, 1, 1, 0]],
    )
    plain: Any = Plain()
    assert token_types(plain, IS_IMAGE[None]) == {}
    assert find_blockwise(plain) == frozenset(), "a model without the argument is not asked"
