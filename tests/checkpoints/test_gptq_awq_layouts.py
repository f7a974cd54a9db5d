"""GPTQ's and AWQ's layouts: the integers, the float weight and the blocks that each of them means."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qsample.checkpoints.gptq_awq_layouts import GroupedWeight, dequantize, to_blocks, unpack_awq, unpack_gptq
from qsample.transforms.quantized_linear import QuantizedWeight
from tests.helpers.quantized_checkpoints import Layer, Scheme, quantized_layer, stored_levels

OUTPUTS, INPUTS = 64, 256
SCHEMES = [
    Scheme(),
    Scheme(symmetric=True),
    Scheme(group_size=64, version=2),
    Scheme(group_size=128, act_order=True),
    Scheme(group_size=-1),
    Scheme(bits=8, group_size=64),
    Scheme(bits=8, symmetric=True, version=2),
    Scheme(bits=2, group_size=64),
    Scheme(bits=3, symmetric=True),
    Scheme(bits=3, version=2, act_order=True),
    Scheme("awq"),
    Scheme("awq", group_size=128),
    Scheme("awq", group_size=-1),
]


def read(layer: Layer, scheme: Scheme) -> GroupedWeight:
    stored = {name: tensor.numpy() for name, tensor in layer.tensors.items()}
    scales = stored.pop("scales").astype(np.float32)
    if scheme.method == "awq":
        return unpack_awq(stored["qweight"], scales, stored["qzeros"], group_size=scheme.group_size)
    return unpack_gptq(
        stored["qweight"],
        scales,
        stored.get("qzeros"),
        stored.get("g_idx"),
        bits=scheme.bits,
        group_size=scheme.group_size,
        symmetric=scheme.symmetric,
        version=scheme.stated_version or scheme.version,
    )


def meaning(weight: QuantizedWeight) -> tuple[np.ndarray, np.ndarray]:
    """[N, K] levels and float64 weight, its inputs in their own order: as MatMulNBits' documentation has it."""
    outputs, inputs = weight.sizes
    count = inputs // weight.block_size
    levels = stored_levels(weight.blocks.numpy().reshape(outputs, -1), weight.bits)
    scales = weight.scales.numpy().reshape(outputs, count).astype(np.float64)
    zeros = np.full((outputs, count), 2 ** (weight.bits - 1))
    if weight.zero_points is not None:
        zeros = stored_levels(weight.zero_points.numpy().reshape(outputs, -1), weight.bits)[:, :count]
    blocks = levels.reshape(outputs, count, -1).astype(np.int64) - zeros[:, :, None]
    floats = (blocks * scales[:, :, None]).reshape(outputs, inputs)
    if weight.order is not None:
        columns = np.argsort(weight.order.numpy())
        levels, floats = levels[:, columns], floats[:, columns]
    return levels, floats


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_layer_means_what_its_format_says(scheme: Scheme) -> None:
    layer = quantized_layer(np.random.default_rng(1), OUTPUTS, INPUTS, scheme)
    grouped = read(layer, scheme)
    np.testing.assert_array_equal(grouped.levels, layer.levels)
    np.testing.assert_array_equal(dequantize(grouped), layer.weight)

    blocks = to_blocks(grouped, torch.float32)
    assert blocks is not None
    assert blocks.bits == max(4, scheme.bits)
    assert blocks.block_size == (256 if scheme.group_size == -1 else scheme.group_size)
    integers, weight = meaning(blocks)
    np.testing.assert_array_equal(integers, layer.levels)
    np.testing.assert_array_equal(weight, layer.weight)
    assert (blocks.order is not None) == scheme.act_order
    assert (blocks.zero_points is None) == (scheme.symmetric and scheme.bits in (4, 8))


def test_the_blocks_of_plain_gptq_are_the_bytes_of_the_checkpoint() -> None:
    layer = quantized_layer(np.random.default_rng(2), OUTPUTS, INPUTS, Scheme())
    blocks = to_blocks(read(layer, Scheme()), torch.float32)
    assert blocks is not None
    assert blocks.blocks.numpy().tobytes() == layer.tensors["qweight"].numpy().T.tobytes()


def test_a_symmetric_checkpoint_that_states_the_wrong_version() -> None:
    scheme = Scheme(symmetric=True, version=2, stated_version=1)
    layer = quantized_layer(np.random.default_rng(3), OUTPUTS, INPUTS, scheme)
    np.testing.assert_array_equal(dequantize(read(layer, scheme)), layer.weight)


def test_zero_points_of_zero_borrowed_from_their_neighbours() -> None:
    """GPTQModel subtracts one from every zero point of a word at once."""
    zeros = np.array([[0, 3, 0, 0, 15, 1, 0, 8]], np.int64)
    number = sum(int(zero) << 4 * i for i, zero in enumerate(zeros[0])) - 0x11111111
    qzeros = np.array([[number & 0xFFFFFFFF]], np.uint32).view(np.int32)
    qweight = np.zeros((4, 8), np.int32)
    options = {"bits": 4, "group_size": 32, "symmetric": False, "version": 1}
    grouped = unpack_gptq(qweight, np.ones((1, 8), np.float32), qzeros, None, **options)
    np.testing.assert_array_equal(grouped.zero_points[:, 0], zeros[0])


@pytest.mark.parametrize("group_size", [8, 24, 40])
def test_groups_that_no_block_lies_within(group_size: int) -> None:
    weight = quantized_layer(np.random.default_rng(4), 8, 480, Scheme(group_size=group_size))
    assert to_blocks(read(weight, Scheme(group_size=group_size)), torch.float32) is None


@pytest.mark.parametrize("part", ["qzeros", "scales", "g_idx"])
def test_parts_that_do_not_fit(part: str) -> None:
    layer = quantized_layer(np.random.default_rng(5), OUTPUTS, INPUTS, Scheme())
    layer.tensors[part] = layer.tensors[part][:-1]
    with pytest.raises(ValueError, match=r"its parts do not fit: levels \[64, 256\]"):
        read(layer, Scheme())


def test_no_zero_points() -> None:
    layer = quantized_layer(np.random.default_rng(6), OUTPUTS, INPUTS, Scheme(symmetric=True))
    del layer.tensors["qzeros"]
    np.testing.assert_array_equal(dequantize(read(layer, Scheme(symmetric=True))), layer.weight)
    with pytest.raises(ValueError, match="it has no qzeros, and the checkpoint is not symmetric"):
        read(layer, Scheme(symmetric=False))
