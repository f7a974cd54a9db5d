"""Offsets of M-RoPE beside each model's get_rope_index."""

from __future__ import annotations

import importlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qsample.images.positions import position_offsets

MODELS = {
    "qwen2_vl": "Qwen2VLModel",
    "qwen2_5_vl": "Qwen2_5_VLModel",
    "qwen3_vl": "Qwen3VLModel",
    "qwen3_5": "Qwen3_5Model",
    "glm4v": "Glm4vModel",
}
# Text lengths, and rows and columns of the placeholders of the images between them.
PROMPTS: list[tuple[list[int], list[tuple[int, int]]]] = [
    ([5], []),
    ([3, 4], [(2, 3)]),
    ([0, 4], [(4, 1)]),
    ([3, 0], [(3, 5)]),
    ([0, 0], [(1, 7)]),
    ([2, 1, 6], [(2, 2), (5, 3)]),
    ([0, 1, 1, 0], [(1, 1), (3, 9), (9, 3)]),
]


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_offsets_are_those_of_get_rope_index(model_type: str, number: int) -> None:
    import torch

    lengths, sizes = PROMPTS[number]
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    kind: Any = getattr(module, MODELS[model_type])
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=4)
    model = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    model.get_vision_position_ids = partial(kind.get_vision_position_ids, model)
    kinds = [0] * lengths[0]
    for (rows, columns), length in zip(sizes, lengths[1:], strict=True):
        kinds += [1] * (rows * columns) + [0] * length
    grids = torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in sizes]) if sizes else None
    types = torch.tensor([kinds])
    positions, delta = kind.get_rope_index(model, types, types, image_grid_thw=grids)
    want = positions[:, 0].T.numpy() - np.arange(len(kinds))[:, None]

    offsets = position_offsets(np.array(kinds) == 1, sizes)

    assert offsets.dtype == np.int32
    np.testing.assert_array_equal(offsets[:-1], want)
    assert offsets[-1].tolist() == [int(delta)] * 3
