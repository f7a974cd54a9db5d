"""What `quantization` of mlx's config.json says."""

from __future__ import annotations

from typing import Any

import pytest

from qsample.addons.formats.mlx import LayerOptions, Mlx, read_options
from qsample.errors import UnsupportedModelError


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"group_size": 32, "bits": 6}, Mlx(LayerOptions("affine", 6, 32), {})),
        ({"mode": "nvfp4"}, Mlx(LayerOptions("nvfp4", 4, 16), {})),
        (
            {
                "bits": 4,
                "group_size": 64,
                "mode": "affine",
                "a.b": {"bits": 8},
                "a.c": {"mode": "mxfp4"},
                "a.d": False,
            },
            Mlx(
                LayerOptions("affine", 4, 64),
                {"a.b": LayerOptions("affine", 8, 64), "a.c": LayerOptions("mxfp4", 4, 32)},
            ),
        ),
    ],
)
def test_options_of_layers(options: dict[str, Any], wanted: Mlx) -> None:
    assert read_options(options, "some/model") == wanted


@pytest.mark.parametrize(
    "options",
    [
        *(
            {"bits": 7},
            {"bits": 1},
            {"bits": "4"},
            {"group_size": 0},
            {"mode": "mxfp6"},
            {"mode": "mxfp4", "bits": 8},
        ),
        *({"mode": ["affine"]}, {"bits": 4, "model.layers.0.mlp": {"bits": 1}}),
    ],
)
def test_unreadable_options(options: dict[str, Any]) -> None:
    with pytest.raises(
        UnsupportedModelError,
        match=r"^some/model is quantized with mlx in a form .* affine with 2, 3, 4",
    ):
        read_options(options, "some/model")
