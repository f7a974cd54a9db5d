"""The image inputs of calls: rows of several prompts over joined features, padding, and memory that
stays for text."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qsample.contract.interface import ImageShape, Interface, KeyValueShape
from qsample.images.prompt import ImagePrompt
from qsample.runtime.decode.image_inputs import ImageInputs, ImagePiece, image_piece

WIDTH, ROWS, CAPACITY = 3, 2, 16


def make_inputs(dtype: str = "float32", *, axial: bool = True) -> ImageInputs:
    interface = Interface(20, (KeyValueShape(1, 4),), dtype, image=ImageShape(WIDTH, axial=axial))
    return ImageInputs(interface, ROWS, CAPACITY, "cpu", "cpu")


def make_prompt() -> tuple[ImagePrompt, np.ndarray]:
    """A prompt of a text token, two image tokens, a text token and three image tokens; and its
    features."""
    rows = np.array([-1, 0, 1, -1, 2, 3, 4], np.int32)
    # The last row is for the tokens after the prompt.
    offsets = np.arange(24, dtype=np.int32).reshape(8, 3)
    return ImagePrompt((), rows, offsets, rows.astype(np.int64)), np.arange(
        15, dtype=np.float32
    ).reshape(5, 3)


def test_a_piece_takes_the_rows_that_it_needs() -> None:
    images, features = make_prompt()
    for piece, rows, first, end in (
        (range(7), [-1, 0, 1, -1, 2, 3, 4], 0, 5),
        (range(2, 6), [0, -1, 1, 2], 1, 4),
        (range(5, 7), [0, 1], 3, 5),
        (range(1), [-1], 0, 0),
    ):
        got = image_piece(images, features, piece)
        assert got is not None
        assert got.rows.tolist() == rows
        np.testing.assert_array_equal(got.features, features[first:end])
        assert images.offsets is not None
        np.testing.assert_array_equal(got.offsets, images.offsets[piece.start : piece.stop])
    assert image_piece(None, None, range(3)) is None


def test_several_rows_share_the_features_of_a_call() -> None:
    images, features = make_prompt()
    pieces = [
        image_piece(images, features, range(4, 7)),
        None,
        image_piece(images, features, range(1, 3)),
    ]
    made = {name: buffer.read() for name, buffer in make_inputs().of_prompts(pieces, 4).items()}
    assert made["image_rows"].tolist() == [[0, 1, 2, -1], [-1] * 4, [3, 4, -1, -1]]
    np.testing.assert_array_equal(made["image_features"], features[[2, 3, 4, 0, 1]])
    offsets = made["position_offsets"]
    assert [offsets[0, :, 0].tolist(), offsets[2, :, 0].tolist()] == [
        [12, 15, 18, 18],
        [3, 6, 6, 6],
    ]
    assert not offsets[1].any()


def test_text_and_steps_read_memory_that_stays() -> None:
    images, features = make_prompt()
    memory = make_inputs()
    text, step = memory.of_prompts([None] * 2, 5), memory.of_step(range(ROWS))
    memory.of_prompts([image_piece(images, features, range(7))] * 2, 8)
    memory.begin(1, images)
    assert memory.of_prompts([None] * 2, 5) == text
    assert memory.of_step(range(ROWS)) == step
    assert text["image_features"].shape == step["image_features"].shape == (1, WIDTH)
    assert (text["image_rows"].read() == -1).all()
    assert not text["position_offsets"].read().any()
    assert step["position_offsets"].read()[:, 0].tolist() == [[0, 0, 0], [21, 22, 23]]
    memory.swap_rows(0, 1)
    memory.begin(1, None)
    assert step["position_offsets"].read()[:, 0].tolist() == [[21, 22, 23], [0, 0, 0]]


def test_the_rows_of_two_images_are_swapped_and_begun_anew() -> None:
    """A row that moves takes its offsets with it, and one that begins keeps none of its predecessor."""
    images, _ = make_prompt()
    assert images.offsets is not None
    other = replace(images, offsets=images.offsets + 100)
    memory = make_inputs()
    step = memory.of_step(range(ROWS))

    def rows() -> list[list[int]]:
        return [row.tolist() for row in step["position_offsets"].read()[:, 0]]

    memory.begin(0, images)
    memory.begin(1, other)
    assert rows() == [[21, 22, 23], [121, 122, 123]]
    memory.swap_rows(0, 1)
    assert rows() == [[121, 122, 123], [21, 22, 23]]
    memory.swap_rows(1, 0)
    assert rows() == [[21, 22, 23], [121, 122, 123]]
    memory.swap_rows(1, 1)
    assert rows() == [[21, 22, 23], [121, 122, 123]]
    memory.begin(0, replace(images, offsets=None))
    assert rows() == [[0, 0, 0], [121, 122, 123]]
    memory.begin(1, None)
    assert rows() == [[0, 0, 0]] * 2


@pytest.mark.parametrize(("dtype", "numbers"), [("float16", np.float16), ("bfloat16", np.uint16)])
def test_features_in_half_precision(dtype: str, numbers: type) -> None:
    piece = ImagePiece(np.array([0], np.int32), np.ones((1, WIDTH), numbers), None)
    memory = make_inputs(dtype, axial=False)
    made, text = memory.of_prompts([piece], 1), memory.of_prompts([None], 1)
    assert made["image_features"].dtype == text["image_features"].dtype == dtype
    assert "position_offsets" not in made


def test_a_package_that_reads_text_only_has_no_inputs() -> None:
    memory = ImageInputs(Interface(20, (KeyValueShape(1, 4),)), ROWS, CAPACITY, "cpu", "cpu")
    memory.begin(0, None)
    memory.swap_rows(0, 1)
    assert memory.of_step(range(ROWS)) == memory.of_prompts([None], 3) == {}
