"""Images in a decoder call, beside NumPy after the contract: rows of features, added features, positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForImageTextToText, PreTrainedModel

from qsample.contract.interface import ImageShape
from qsample.errors import UnsupportedModelError
from qsample.transforms.cache import DecodeContext
from qsample.transforms.images import (
    ImageEmbedding,
    choose_angles,
    image_shape,
    text_model,
    use_images,
    with_offsets,
)
from tests.helpers.tiny_vlms import config_of, random_vlm

IDS = torch.tensor([[3, 9, 9, 4], [9, 1, 2, 0]])  # 9: beyond the table
ROWS = torch.tensor([[-1, 2, 0, -1], [2, -1, -1, -1]], dtype=torch.int32)
HIDDEN, PARTS = 5, 3


def call(rows: torch.Tensor | None, features: torch.Tensor | None) -> DecodeContext:
    return DecodeContext(
        input_lengths=torch.tensor([4, 3]), image_rows=rows, image_features=features
    )


@pytest.mark.parametrize("parts", [1, PARTS])
def test_rows_of_features_take_the_places_of_embeddings(parts: int) -> None:
    torch.manual_seed(0)
    table, features = nn.Embedding(8, HIDDEN), torch.randn(4, parts * HIDDEN)
    context = call(ROWS, features)
    with torch.no_grad():
        got = ImageEmbedding(table, context, ids_beyond=True)(IDS).numpy()
    assert len(context.added_features) == parts - 1
    for row, column in np.ndindex(*IDS.shape):
        taken, id = int(ROWS[row, column]), int(IDS[row, column])
        vectors = (
            features[taken].reshape(parts, HIDDEN).numpy()
            if taken >= 0
            else np.zeros((parts, HIDDEN), np.float32)
        )
        first = vectors[0] if taken >= 0 else table.weight[id].detach().numpy()
        np.testing.assert_array_equal(got[row, column], first)
        for part, added in zip(vectors[1:], context.added_features, strict=True):
            np.testing.assert_array_equal(added[row, column], part)


def test_outside_of_decoder_calls_it_is_the_table() -> None:
    table = nn.Embedding(10, HIDDEN)
    embedding = ImageEmbedding(table, DecodeContext(), ids_beyond=True)
    assert torch.equal(embedding(IDS), table(IDS))
    assert embedding.weight is table.weight


@pytest.mark.parametrize(("rows", "features"), [(ROWS, None), (None, torch.ones(4, HIDDEN))])
def test_a_call_without_images_reads_the_table(
    rows: torch.Tensor | None, features: torch.Tensor | None
) -> None:
    """An id beyond the table, which stands for an image, reads its first row."""
    table, context = nn.Embedding(8, HIDDEN), call(rows, features)
    got = ImageEmbedding(table, context, ids_beyond=True)(IDS)
    assert torch.equal(got, table(torch.where(IDS < 8, IDS, 0)))
    assert context.added_features == []


def test_positions_are_places_and_their_sums_with_offsets() -> None:
    places, offsets = (
        torch.tensor([[4, 5], [0, 1]]),
        torch.arange(12, dtype=torch.int32).reshape(2, 2, 3),
    )
    wanted = np.stack(
        [places.numpy(), *(places.numpy() + offsets[..., axis].numpy() for axis in range(3))]
    )
    np.testing.assert_array_equal(with_offsets(places, offsets), wanted)


def model_of(model_type: str, **changes: Any) -> PreTrainedModel:
    config = config_of(model_type)
    for name, value in changes.items():
        setattr(config.get_text_config(), name, value)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(config)
    return model


@pytest.mark.parametrize(
    ("model_type", "shape"),
    [
        ("qwen2_5_vl", ImageShape(64, axial=True)),
        ("qwen3_vl", ImageShape(3 * 64, deepstack=2, axial=True)),
        ("llava", ImageShape(64)),
        ("glm4v", ImageShape(64, axial=True)),
    ],
)
def test_shapes_are_read_off_the_model(model_type: str, shape: ImageShape) -> None:
    model = model_of(model_type)
    assert image_shape(model) == shape
    assert image_shape(text_model(model)) is None


def test_positions_of_four_parts_are_refused() -> None:
    model = model_of("qwen2_5_vl")
    model.model.language_model.rotary_emb.mrope_section = [2, 2, 2, 2]
    with pytest.raises(UnsupportedModelError, match="positions of 4 parts"):
        image_shape(model)


def test_features_are_added_after_the_first_layers() -> None:
    """Part k + 1 of a row after layer k; and the model still adds its own outside of decoder calls."""
    model = random_vlm("qwen3_vl")
    text: Any = text_model(model)
    ids, rows = torch.tensor([[5, 6, 7]]), torch.tensor([[-1, 1, 0]], dtype=torch.int32)
    features = torch.randn(2, 3 * 64, generator=torch.Generator().manual_seed(1))
    masks, visual = rows >= 0, features[[1, 0]].split(64, dim=-1)
    with torch.no_grad():
        embedded = text.embed_tokens(ids)
        embedded[masks] = visual[0]
        wanted = text(
            inputs_embeds=embedded, visual_pos_masks=masks, deepstack_visual_embeds=list(visual[1:])
        )
        context = DecodeContext()
        use_images(model, context)
        context.input_lengths, context.image_rows, context.image_features = (
            torch.tensor([3]),
            rows,
            features,
        )
        embedded = model.get_input_embeddings()(ids)
        got = text(inputs_embeds=embedded)
        context.clear()
        after = text(
            inputs_embeds=embedded, visual_pos_masks=masks, deepstack_visual_embeds=list(visual[1:])
        )
    for result in (got, after):
        torch.testing.assert_close(result.last_hidden_state, wanted.last_hidden_state)


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_angles_of_three_positions_are_chosen_by_index(model_type: str) -> None:
    """Sections in blocks and interleaved: the same numbers, bit for bit, however often the model is prepared."""
    text = text_model(random_vlm(model_type))
    rotary: Any = next(module for module in text.modules() if hasattr(module, "mrope_section"))
    own, angles = rotary.recomposition_frequencies, torch.randn(3, 2, 5, len(rotary.inv_freq))
    expected = own(angles.clone())
    for _ in range(2):
        choose_angles(text)
        assert rotary.recomposition_frequencies != own
        assert torch.equal(rotary.recomposition_frequencies(angles), expected)
