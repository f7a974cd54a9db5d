"""Layers of MLX, worked by hand: each number of a weight, and parts that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from qsample.addons.formats.mlx import LayerOptions, Mlx, read_options
from qsample.errors import UnsupportedModelError

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def stream(levels: Any, bits: int) -> torch.Tensor:
    """Rows of levels as uint32 words, a stream of bits from the low bits up."""
    digits = (levels[..., None] >> np.arange(bits) & 1).astype(np.uint8).reshape(len(levels), -1)
    octets = np.packbits(digits, axis=1, bitorder="little")
    return torch.from_numpy(octets.view("<u4").copy())


def affine(
    bits: int = 4, group_size: int = 32, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    levels = np.arange(3 * 64).reshape(3, 64) * 5 % 2**bits
    groups = 64 // group_size
    numbers = torch.arange(1.0, 1 + 3 * groups).reshape(3, groups).to(dtype)
    return {
        "weight": stream(levels, bits),
        "scales": numbers,
        "biases": -2 * numbers,
        "levels": levels,
    }


def layout(mode: str, bits: int, group_size: int, **layers: LayerOptions) -> Mlx:
    return Mlx(LayerOptions(mode, bits, group_size), layers)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group_size", [32, 64])
def test_affine_weights(bits: int, group_size: int) -> None:
    parts = affine(bits, group_size, torch.float16)
    levels = parts.pop("levels")
    matrix = layout("affine", bits, group_size).matrix("layer", parts)
    assert (matrix.layer, matrix.shape) == ("layer", (3, 64))
    scales = parts["scales"].float().numpy().repeat(group_size, 1)
    wanted = levels * scales - 2 * scales
    np.testing.assert_array_equal(matrix.floats(), wanted)
    part = matrix.read(slice(1, 2))  # type: ignore[union-attr, call-arg]
    assert part.bits == bits  # type: ignore[union-attr]
    np.testing.assert_array_equal(part.floats(), wanted[1:2])  # type: ignore[union-attr]


def test_a_layer_may_have_options_of_its_own() -> None:
    own = layout("affine", 4, 32, special=LayerOptions("affine", 8, 64))
    for layer, bits, group_size in (("special", 8, 64), ("other", 4, 32)):
        parts = affine(bits, group_size)
        levels = parts.pop("levels")
        scales = parts["scales"].numpy().repeat(group_size, 1)
        found = own.matrix(layer, parts).floats()
        np.testing.assert_array_equal(found, levels * scales - 2 * scales)


@pytest.mark.parametrize(
    ("mode", "group_size", "codes", "steps"),
    [
        ("mxfp4", 32, [127, 128, 126, 127, 130, 124], [1, 2, 0.5, 1, 8, 0.125]),  # e8m0
        ("nvfp4", 16, [0x38, 0x40, 0x30, 0x38, 0x44, 0x28, 0x38, 0x40, 0x30, 0x38, 0x44, 0x28],
         [1, 2, 0.5, 1, 3, 0.25] * 2),  # e4m3
    ],
)  # fmt: skip
def test_floats_of_4_bits(mode: str, group_size: int, codes: list[int], steps: list[float]) -> None:
    levels = np.arange(3 * 64).reshape(3, 64) * 5 % 16
    scales = torch.tensor(codes, dtype=torch.uint8).reshape(3, -1)
    matrix = layout(mode, 4, group_size).matrix(
        "layer", {"weight": stream(levels, 4), "scales": scales}
    )
    assert (matrix.layer, matrix.shape) == ("layer", (3, 64))
    each = np.array(steps).reshape(3, -1).repeat(group_size, 1)
    np.testing.assert_array_equal(matrix.floats(), E2M1[levels] * each)


def test_floats_of_8_bits() -> None:
    numbers = torch.arange(3 * 64).reshape(3, 64).to(torch.float32).to(torch.float8_e4m3fn)
    scales = torch.tensor([[127, 128], [126, 127], [130, 124]], dtype=torch.uint8)
    words = numbers.view(torch.uint8).view(torch.uint32)
    matrix = layout("mxfp8", 8, 32).matrix("layer", {"weight": words, "scales": scales})
    assert (matrix.layer, matrix.shape) == ("layer", (3, 64))
    each = np.array([[1, 2], [0.5, 1], [8, 0.125]]).repeat(32, 1)
    np.testing.assert_array_equal(matrix.floats(), numbers.float().numpy() * each)


def changed(**changes: Any) -> dict[str, Any]:
    parts = affine()
    del parts["levels"]
    return parts | changes


BYTES = torch.zeros(3, 2, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("mode", "parts", "words"),
    [
        (("affine", 4, 32), changed(weight=torch.zeros(2, 3, 8, dtype=torch.uint32)), "it holds stacked experts"),
        (("affine", 4, 32), changed(weight=torch.zeros(3, 8)), "weight is float32.*must be uint32.*outputs by words"),
        (("affine", 4, 48), changed(),
         "weight has 3 outputs, and 64 inputs in 4 bits, in groups of 48"),
        (("affine", 4, 64), changed(), r"scales is float32 \[3, 2\].*\[3, 1\]: weight has 3 outputs, and 64"),
        (("affine", 4, 32), changed(biases=torch.ones(3, 1)), r"biases is float32 \[3, 1\]"),
        (("affine", 4, 32), changed(scales=torch.ones(3, 2).double()), "scales is float64"),
        (("affine", 4, 32), changed(scales=torch.ones(3, 2) / 0), "scales or biases hold numbers that are inf"),
        (("affine", 4, 32), changed(biases=torch.ones(3, 2) * torch.nan), "scales or biases hold numbers"),
        (("mxfp4", 4, 32), changed(), r"scales is float32 \[3, 2\], and must be uint8"),
        (("mxfp4", 4, 32), changed(scales=torch.zeros(3, 1, dtype=torch.uint8)), r"must be uint8 \[3, 2\]: weight"),
        (("mxfp4", 4, 32), changed(scales=BYTES + 255), "its scales or biases hold numbers"),
        (("nvfp4", 4, 32), changed(scales=BYTES + 0x7F), "its scales or biases hold numbers"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit(
    mode: tuple[str, int, int], parts: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        layout(*mode).matrix("layer", parts)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, ("affine", 4, 64)),
        ({"group_size": 1, "bits": 2}, ("affine", 2, 1)),
        ({"mode": "mxfp4"}, ("mxfp4", 4, 32)),
        ({"mode": "mxfp8"}, ("mxfp8", 8, 32)),
        ({"mode": "nvfp4", "bits": 4, "group_size": 16}, ("nvfp4", 4, 16)),
    ],
)
def test_options_that_are_left_out(given: dict[str, Any], wanted: tuple[str, int, int]) -> None:
    assert read_options(given, "me/m").default == LayerOptions(*wanted)


def test_modes_of_other_sizes() -> None:
    for given in ({"mode": "nvfp4", "group_size": 32}, {"mode": "mxfp8", "bits": 4}, {"bits": 4.0}):
        with pytest.raises(
            UnsupportedModelError, match="me/m is quantized with mlx in a form that"
        ):
            read_options(given, "me/m")


def test_the_names_of_the_parts() -> None:
    assert (Mlx.mark, Mlx.unread) == ("scales", ())
    assert {*Mlx.parts} == {"weight", "scales", "biases"}
