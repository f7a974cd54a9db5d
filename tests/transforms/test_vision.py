"""What depends on an image's grid, computed from indices, against transformers' loops. tests/exporters/test_vision.py
has whole towers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import eager_attention_forward
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from qsample.errors import UnsupportedModelError
from qsample.transforms import vision
from qsample.transforms.vision import (
    Windows,
    attention,
    places_of_patches,
    resampled,
    vision_module,
    windows_of,
)
from tests.helpers.tiny_vlms import random_vlm
from tests.transforms.decoding import compute_operators

GRIDS = [(4, 6), (2, 14), (10, 8), (16, 16), (6, 2)]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("merge", [1, 2])
def test_places_of_patches(grid: tuple[int, int], merge: int) -> None:
    row, column = places_of_patches(torch.tensor(grid), grid[0] * grid[1], merge)
    assert torch.stack([row, column], -1).equal(
        get_vision_position_ids(torch.tensor([[1, *grid]]), merge)
    )


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("side", [2, 4, 8])
def test_windows(grid: tuple[int, int], side: int) -> None:
    row, column = places_of_patches(torch.tensor(grid), grid[0] * grid[1], 2)
    windows = windows_of(row, column, torch.tensor(grid), side, 2)
    merged, borders = get_vision_window_index(torch.tensor([[1, *grid]]), 2, side, 1)
    patches = (merged[:, None] * 4 + torch.arange(4)).flatten()
    expected = [set(part.tolist()) for part in patches.tensor_split(borders[1:-1].to(torch.int64))]
    pairs = zip(windows.patches, windows.held, strict=True)
    assert [set(patch[held].tolist()) for patch, held in pairs] == expected
    assert windows.patches.flatten()[windows.places].equal(torch.arange(len(row)))


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(
    ("mode", "align"), [("bilinear", True), ("bilinear", False), ("bicubic", False)]
)
def test_learned_positions_are_resampled(grid: tuple[int, int], mode: str, align: bool) -> None:
    tower = SimpleNamespace(
        num_grid_per_side=7, interpolation_mode=mode, interpolation_align_corners=align
    )
    row, column = places_of_patches(torch.tensor(grid), grid[0] * grid[1], 2)
    found = resampled(tower, row, column, torch.tensor(grid))
    wanted = get_vision_interpolation_indices_and_weights(
        torch.tensor([[1, *grid]]), 7, mode, align, 2
    )
    assert found["interp_indices"].equal(wanted[0])
    assert found["interp_weights"].equal(wanted[1])


def test_a_model_of_text_has_no_module() -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes))
    with pytest.raises(
        UnsupportedModelError, match=r"LlamaForCausalLM has no vision tower.*--text-only"
    ):
        vision_module(model)


@pytest.mark.parametrize(
    ("model_type", "shape", "free"),
    [
        ("qwen3_vl", (96, 96), "A"),
        ("llava_next", (3, 3, 16, 16), "I"),
        ("mistral3", (1, 3, 32, 48), "tile_height"),
    ],
)
def test_the_axes_that_images_decide(model_type: str, shape: tuple[int, ...], free: str) -> None:
    module = vision_module(random_vlm(model_type))
    assert tuple(module.example["pixel_values"].shape) == shape
    assert free in module.free


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize("windowed", [False, True])
def test_each_query_head_attends_with_the_key_head_of_its_group(
    heads: int, key_heads: int, windowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers' own attention, which repeats each key head for the query heads next to each other."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, count, 5, 8, generator=generator) for count in (heads, key_heads, key_heads)
    )
    mask = torch.zeros(1, 1, 5, 5)
    windows = None
    if windowed:
        patches = torch.tensor([[3, 0, 0], [1, 4, 2]])
        held = torch.tensor([[True, True, False], [True, True, True]])
        windows = Windows(patches, held, torch.tensor([1, 3, 5, 0, 4]))
        mask = torch.full((1, 1, 5, 5), -torch.inf)
        for patch in ([3, 0], [1, 4, 2]):
            for row in patch:
                mask[..., row, patch] = 0
    monkeypatch.setattr(vision, "_multi_head", multi_head)
    found, _ = attention(SimpleNamespace(), query, key, value, None, 0.3, windows)
    layer = SimpleNamespace(num_key_value_groups=heads // key_heads, training=False)
    wanted, _ = eager_attention_forward(layer, query, key, value, mask, 0.3)
    torch.testing.assert_close(found, wanted)


def multi_head(
    states: list[torch.Tensor], heads: int, scale: float | None, mask: torch.Tensor | None
) -> torch.Tensor:
    """ONNX Runtime's MultiHeadAttention, by its documentation."""
    query, key, value = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in states)
    attended = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, scale=scale
    )
    return attended.transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    "model_type",
    ["qwen2_5_vl", "qwen3_vl", "glm4v", "gemma4", "llava", "smolvlm", "mistral3", "internvl"],
)
def test_a_tower_in_a_trace_gives_the_features_of_transformers(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of images of other numbers of rows and columns than the example's; the model is as before afterwards."""
    compute_operators(monkeypatch)
    model: Any = random_vlm(model_type)
    module = vision_module(model.eval())
    before = model.base_model.config.to_json_string()
    for rows, columns in ((2, 1), (3, 2), (1, 3)):
        image = module.image(rows, columns)
        with torch.no_grad():
            output = model.base_model.get_image_features(**image.arguments)
            (found,) = module(image.inputs).values()
        parts = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        wanted = torch.cat([torch.cat([row.flatten(0, -2) for row in part]) for part in parts], -1)
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert model.base_model.config.to_json_string() == before
    assert not any("forward" in vars(part) for part in model.modules())
