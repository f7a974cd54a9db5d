"""Which layers let an image's tokens see each other, as transformers' masks say."""

from __future__ import annotations

from typing import Any

import pytest
import transformers as tf
from transformers import AutoModelForImageTextToText

from qsample.errors import UnsupportedModelError
from qsample.transforms.image_blocks import find_blockwise
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
