"""The parity gate on a model with M-RoPE and deepstack: transformers' answer to pixels, and mistakes that it sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qsample.errors import ParityError, UnsupportedModelError
from qsample.exporters import parity
from qsample.exporters.huggingface_reference import reference
from qsample.exporters.image_reference import _offsets, image_reference
from qsample.exporters.parity import ImageReference, Reference
from qsample.package.package import Package, read_package
from qsample.transforms.images import image_shape
from tests.helpers.tiny_vlms import open_reference

TYPE = "qwen3_vl"


@pytest.fixture(scope="module")
def opened(image_checkpoint: Callable[[str], Path]) -> tuple[Any, Any]:
    return open_reference(image_checkpoint(TYPE))


@pytest.fixture(scope="module")
def expected(opened: tuple[Any, Any]) -> Reference:
    model, processor = opened
    shape = image_shape(model)
    assert shape is not None
    images, found = image_reference(model, processor, shape, 512)
    assert found == replace(shape, patch_values=96)
    return replace(reference(model), images=images)


@pytest.fixture(scope="module")
def package(image_package: Callable[..., Path]) -> Package:
    features: dict[str, Any] = {"max_loras": 2, "max_lora_rank": 4, "filters": ["typical_p"]}
    flags = dict.fromkeys(("allowed_tokens", "logit_bias", "logprobs"), True)
    return read_package(image_package(TYPE, **features, **flags))


@pytest.mark.ci
def test_the_reference_has_two_images_of_different_sizes(expected: Reference) -> None:
    images = expected.images
    assert images is not None
    places = np.flatnonzero(images.rows >= 0)
    runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    assert len(runs) == 2
    assert len(runs[0]) != len(runs[1])
    assert images.rows[places].tolist() == list(range(len(images.features)))


def reversed_rows(images: ImageReference) -> ImageReference:
    return replace(images, features=images.features[::-1])


def without_delta(images: ImageReference) -> ImageReference:
    """Tokens after the last image count on from its placeholders."""
    assert images.offsets is not None
    offsets, last = images.offsets.copy(), int(np.flatnonzero(images.rows >= 0)[-1])
    offsets[last + 1 :] = 0
    return replace(images, offsets=offsets)


def without_delta_in_steps(images: ImageReference) -> ImageReference:
    assert images.offsets is not None
    return replace(
        images, offsets=np.concatenate([images.offsets[:-1], np.zeros((1, 3), np.int32)])
    )


def second_image_by_itself(images: ImageReference) -> ImageReference:
    """As if the first image had taken a position for each placeholder."""
    assert images.offsets is not None
    offsets, second = images.offsets.copy(), int(np.flatnonzero(np.diff(images.rows) > 1)[-1]) + 1
    offsets[second:] -= offsets[second - 1]
    return replace(images, offsets=offsets)


def added_after_the_wrong_layer(images: ImageReference) -> ImageReference:
    first, *added = np.split(images.features, 3, axis=1)
    return replace(images, features=np.concatenate([first, *added[::-1]], axis=1))


@pytest.mark.ci
@pytest.mark.parametrize(
    "mistake",
    [
        None,
        reversed_rows,
        without_delta,
        without_delta_in_steps,
        second_image_by_itself,
        added_after_the_wrong_layer,
    ],
)
def test_the_gate(
    package: Package,
    expected: Reference,
    mistake: Callable[[ImageReference], ImageReference] | None,
) -> None:
    assert expected.images is not None
    images = expected.images if mistake is None else mistake(expected.images)

    def check() -> None:
        parity.check(package.path, package.interface, replace(expected, images=images))

    if mistake is None:
        check()
    else:
        with pytest.raises(ParityError, match="with images"):
            check()


@pytest.mark.ci
def test_a_context_without_room_for_an_image(opened: tuple[Any, Any]) -> None:
    model, processor = opened
    shape = image_shape(model)
    assert shape is not None
    with pytest.raises(UnsupportedModelError, match=r"knows 8 positions .*--text-only"):
        image_reference(model, processor, shape, 8)
    both, _ = image_reference(model, processor, shape, None)  # and a token after the prompt
    one, _ = image_reference(model, processor, shape, len(both.prompt))
    assert len(one.prompt) < len(both.prompt)
    assert [np.count_nonzero(np.diff(each.rows >= 0)) for each in (both, one)] == [4, 2], (
        "beginnings and ends"
    )


def test_positions_that_no_host_computes() -> None:
    is_image = np.array([False, True, True, True, True, False])
    rows = torch.tensor([[0, 1, 1, 1, 1, 3, 4], [0, 1, 1, 2, 2, 3, 4], [0, 1, 2, 1, 2, 3, 4]])[
        :, None
    ]
    offsets = _offsets(rows, is_image)
    np.testing.assert_array_equal(offsets + np.arange(7)[:, None], rows[:, 0].T)
    rows[0, 0, 3:5] += 1  # time goes on within an image
    with pytest.raises(UnsupportedModelError, match="other positions than Qwen2-VL"):
        _offsets(rows, is_image)
    for positions in (None, rows[:, 0], rows[:2]):
        with pytest.raises(UnsupportedModelError, match="not given positions of three parts"):
            _offsets(positions, is_image)
