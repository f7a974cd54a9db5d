"""Fake packages that read images: what `fake_graphs` and `fake_reference` do with them, and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from qsample.contract.interface import ImageShape, Interface
from qsample.images.prompt import ImagePrompt, ProcessedImage

DIM = 16
SIDE = 4  # pixels of a patch; each patch is a placeholder
IMAGE = 260  # the id of a placeholder
BEGIN, END = 261, 262
SEEN = 0.3  # how much of the sum of its run each image token of a blockwise model gets
ROWS = ImageShape(DIM, patch_values=3 * SIDE * SIDE)
AXIAL = ImageShape(DIM, axial=True, patch_values=3 * SIDE * SIDE)
BLOCKWISE = ImageShape(DIM, blockwise=True, patch_values=3 * SIDE * SIDE)
AXES = np.array([[0.5], [0.3], [0.2]], np.float32)  # a token's position is their mean
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
MANIFEST: Mapping[str, Any] = {
    "family": "grid",
    "settings": {
        "resample": 3,
        "rescale_factor": 1 / 255,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.25, 0.25, 0.25],
        "size": {"shortest_edge": SIDE * SIDE, "longest_edge": 64 * SIDE * SIDE},
        "patch_size": SIDE,
        "merge_size": 1,
        "temporal_patch_size": 1,
    },
    "placeholder": "<image>",
    "token": "<image>",
    "token_id": IMAGE,
    "texts": {"single": "<begin>", "after": "<end>"},
}
_ROWS_OF_IMAGES = """
  i_zero = Constant <value_int = 0> ()
  i_zero32 = Cast <to = 6> (i_zero)
  i_row = Max (image_rows, i_zero32)
  i_seen = Gather <axis = 0> (image_features, i_row)
  i_is_image = GreaterOrEqual (image_rows, i_zero32)
  i_is_image_deep = Unsqueeze (i_is_image, last_axis)
  i_table = Gather <axis = 0> (embedding, input_ids)
"""
_EMBEDDED = "  embedded = Where (i_is_image_deep, i_seen, i_table)\n"
_RUNS = """
  i_number = Cast <to = 6> (i_is_image)
  i_text = Sub (one32, i_number)
  i_texts = CumSum (i_text, one_i)
  i_run_row = Unsqueeze (i_texts, last_axis)
  i_run_column = Unsqueeze (i_texts, column)
  i_same_run = Equal (i_run_row, i_run_column)
  i_is_image_column = Unsqueeze (i_is_image, column)
  i_both = And (i_is_image_deep, i_is_image_column)
  i_see = And (i_same_run, i_both)
  i_see_float = Cast <to = 1> (i_see)
  i_none = Sub (i_seen, i_seen)
  i_only = Where (i_is_image_deep, i_seen, i_none)
  i_sum = MatMul (i_see_float, i_only)
  i_part = Mul (i_sum, seen_share)
  i_whole = Add (i_seen, i_part)
  embedded = Where (i_is_image_deep, i_whole, i_table)
"""
_AXIAL = """
  i_offsets = Cast <to = 1> (position_offsets)
  i_shift = MatMul (i_offsets, axes)
  i_positions = Add (positions_deep, i_shift)
  angles = Mul (i_positions, frequencies)
"""


def with_images(body: str, interface: Interface) -> str:
    """The text of the model's graph, with the image inputs of `interface`."""
    image = interface.image
    if image is None:
        return body
    embedded = _ROWS_OF_IMAGES + (_RUNS if image.blockwise else _EMBEDDED)
    body = body.replace("  embedded = Gather <axis = 0> (embedding, input_ids)\n", embedded)
    if image.axial:
        body = body.replace("  angles = Mul (positions_deep, frequencies)\n", _AXIAL)
    return body


def image_weights(interface: Interface) -> dict[str, Any]:
    """More initialisers of the model."""
    image = interface.image
    weights: dict[str, Any] = {}
    if image is not None and image.blockwise:
        weights["seen_share"] = np.float32(SEEN)
    if image is not None and image.axial:
        weights["axes"] = AXES
    return weights


def _vision_weights() -> Any:
    generator = np.random.default_rng(17)
    return (generator.standard_normal((3 * SIDE * SIDE, DIM)) * 0.25).astype(np.float32)


def vision_graph(interface: Interface) -> Any:
    """vision.onnx: a product of the patches, and the sum of the grid's sides."""
    assert interface.image is not None
    nodes = [
        helper.make_node("MatMul", ["pixel_values", "w"], ["product"]),
        helper.make_node("ReduceSum", ["grid"], ["sides"], keepdims=0),
        helper.make_node("Cast", ["sides"], ["sides_float"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["sides_float", "scale"], ["shift"]),
        helper.make_node("Add", ["product", "shift"], ["image_features"]),
    ]
    pixels = helper.make_tensor_value_info(
        "pixel_values", TensorProto.FLOAT, ["A", 3 * SIDE * SIDE]
    )
    grid = helper.make_tensor_value_info("grid", TensorProto.INT64, [2])
    features = helper.make_tensor_value_info("image_features", TensorProto.FLOAT, ["F", DIM])
    weights = [
        numpy_helper.from_array(_vision_weights(), "w"),
        numpy_helper.from_array(np.float32(0.01).reshape(()), "scale"),
    ]
    graph = helper.make_graph(nodes, "vision", [pixels, grid], [features], weights)
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])


def features_of(image: ProcessedImage) -> np.ndarray:
    """[n, C] float64, the rows for an image's placeholders, in NumPy."""
    assert image.grid is not None
    return (image.pixel_values.astype(np.float64) @ _vision_weights() + 0.01 * sum(image.grid))[
        image.rows
    ]


class Seen(NamedTuple):
    """A prompt with images, for the reference. images: before `ImageReader.see` drops their pixels."""

    prompt: ImagePrompt
    blockwise: bool = False

    def embedded(self, table: np.ndarray) -> np.ndarray:
        """[n, DIM]: `table`, with the images' rows. Tokens after the prompt are text."""
        features = np.concatenate([features_of(image) for image in self.prompt.images])
        is_image = self.prompt.rows >= 0
        table = table.copy()
        table[: len(is_image)][is_image] = features
        if self.blockwise:
            edges = np.flatnonzero(
                np.diff(np.concatenate([[False], is_image, [False]]).astype(int))
            )
            for start, stop in edges.reshape(-1, 2):
                table[start:stop] += SEEN * table[start:stop].sum(axis=0)
        return table

    def shift(self, length: int) -> np.ndarray:
        """[length, 1]: what is added to the places of the first tokens of the row."""
        offsets = self.prompt.offsets
        if offsets is None:
            return np.zeros((length, 1))
        after = np.repeat(offsets[-1:], length, axis=0)
        after[: len(offsets)] = offsets[:length]
        return after @ AXES.astype(np.float64)


def picture(width: int = 12, height: int = 8, seed: int = 0) -> np.ndarray:
    """[height, width, 3] uint8: width x height / 16 placeholders."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def placeholders(*counts: int) -> Sequence[int]:
    """The ids of images with so many placeholders, each between its two tokens."""
    return [token for count in counts for token in (BEGIN, *[IMAGE] * count, END)]
