"""What the configuration of compressed-tensors says: schemes that are read, notes, refusals."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from qsample.addons.formats.compressed_tensors import CompressedTensors, Scheme, read_options
from qsample.errors import UnsupportedModelError
from tests.helpers.quantized_checkpoints import words

W4: dict[str, Any] = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 128,
}


def stated(weights: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": W4 | (weights or {}), **changes.pop("group", {})}
    return {
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    } | changes


@pytest.mark.parametrize(
    ("options", "scheme"),
    [
        (stated(), Scheme("int", 4, (1, 128), True)),
        (stated({"symmetric": False, "group_size": 32}), Scheme("int", 4, (1, 32), False)),
        (
            stated({"num_bits": 8, "strategy": "channel", "group_size": None}),
            Scheme("int", 8, (1, None), True),
        ),
        (stated({"strategy": None}), Scheme("int", 4, (1, 128), True)),
        (stated({"strategy": None, "group_size": -1}), Scheme("int", 4, (1, None), True)),
        ({"quantization_config": stated()}, Scheme("int", 4, (1, 128), True)),
        (
            stated(format="dense", group={"format": "int-quantized"}),
            Scheme("int", 4, (1, 128), True),
        ),
        (
            stated(
                {
                    "type": "float",
                    "num_bits": 8,
                    "strategy": "block",
                    "group_size": None,
                    "block_structure": [8, 16],
                }
            ),
            Scheme("float", 8, (8, 16), True),
        ),
    ],
)
def test_schemes(options: dict[str, Any], scheme: Scheme) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_options(options, "some/model") == CompressedTensors((scheme,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            stated(group={"input_activations": {"num_bits": 8}}),
            "also quantizes the inputs of products, at run time; they",
        ),
        (
            stated(kv_cache_scheme={"num_bits": 8}),
            "also quantizes keys and values, at run time; they stay float",
        ),
    ],
)
def test_quantized_activations_are_left_out_with_a_note(
    options: dict[str, Any], message: str
) -> None:
    with pytest.warns(UserWarning, match=f"^some/model {message}"):
        read_options(options, "some/model")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (stated(format="marlin-24"), "its format is 'marlin-24'; accepted are pack-quantized"),
        (
            stated(sparsity_config={"format": "sparse-24-bitmask"}),
            "its weights are sparse .'sparse-24-bitmask'",
        ),
        (stated(transform_config={"config_groups": {"R1": {}}}), "it transforms activations"),
        (stated({"num_bits": 1}), "group_0 has weights of {'type': 'int', 'num_bits': 1"),
        (stated({"type": "float", "num_bits": 6}), "'num_bits': 6"),
        (stated({"num_bits": "4"}), "'num_bits': '4'"),
        (stated({"type": ["int"]}), "'type': .'int'"),
        (stated({"strategy": "block", "block_structure": [128, 128]}), "'strategy': 'block'"),
        (stated({"group_size": 0}), "'group_size': 0"),
        ({"format": "pack-quantized"}, "its config_groups have no weights"),
        (stated(config_groups=["Linear"]), "its config_groups have no weights"),
        (stated(config_groups={"W4A16": ["Linear"]}), "its config_groups have no weights"),
    ],
)
def test_unreadable_configurations(options: dict[str, Any], message: str) -> None:
    with pytest.raises(
        UnsupportedModelError, match=rf"^some/model is quantized .* cannot be read: .*{message}"
    ):
        read_options(options, "some/model")


def test_zero_points_of_outputs_that_fill_no_word() -> None:
    """36 outputs: of the last word of zero points, half."""
    numbers = torch.arange(36 * 32).reshape(36, 32).numpy() * 7 % 16
    zeros = torch.arange(36).numpy() * 5 % 16
    padded = torch.tensor([*zeros, 0, 0, 0, 0]).numpy()[None]
    parts = {
        "weight_packed": torch.from_numpy(words(numbers, 4).copy()),
        "weight_zero_point": torch.from_numpy(words(padded, 4).T.copy()),
        "weight_scale": torch.full((36, 1), 0.5),
        "weight_shape": torch.tensor([36, 32]),
    }
    packing = CompressedTensors((Scheme("int", 4, (1, 32), False),))
    matrix = packing.matrix("layer", parts)
    wanted = (numbers - zeros[:, None]) * 0.5
    for rows in (slice(0, 36), slice(0, 32), slice(32, 36)):
        assert (matrix.read(rows).floats() == wanted[rows]).all()  # type: ignore[call-arg, union-attr]
    # Some releases store them as they are, in symmetric checkpoints, too.
    plain = torch.from_numpy(zeros - 8).to(torch.int8)
    matrix = packing.matrix("layer", parts | {"weight_zero_point": plain[:, None]})
    assert (matrix.floats() == wanted).all()
    with pytest.raises(ValueError, match="weight_zero_point holds more than 4 bits"):
        packing.matrix("layer", parts | {"weight_zero_point": plain[:, None] + 1})
