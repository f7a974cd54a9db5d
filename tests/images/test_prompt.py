"""The images of a prompt: what is there by default, and when two are the same."""

from __future__ import annotations

import numpy as np

from qsample.images.prompt import ImagePrompt, ProcessedImage


def test_an_image_of_a_simple_family() -> None:
    """No grid of placeholders, no text of its own, and features that are still to be computed."""
    image = ProcessedImage(b"key", np.zeros((1, 3, 2, 2), np.float32), None, np.arange(4))
    assert (image.size, image.text, image.features) == (None, "", None)


def test_prompts_are_compared_by_themselves_and_not_by_their_arrays() -> None:
    """Arrays have no single truth value, and a prompt may be a key."""
    one, two = (
        ImagePrompt((), np.array([-1, -1], np.int32), None, np.array([5, 6])) for _ in range(2)
    )
    assert one == one
    assert one != two
    assert len({one, two}) == 2
