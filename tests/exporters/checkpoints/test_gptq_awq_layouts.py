"""GPTQ's and AWQ's layouts: the integers, the float weight and the blocks that each of them means."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qsample.exporters.checkpoints.gptq_awq_layouts import GroupedWeight, dequantize, to_blocks, unpack_awq, unpack_gptq
from qsample.transforms.quantized_linear import QuantizedWeight
from tests.helpers.quantized_checkpoints import Layer, Way, quantized_layer

OUTPUTS, INPUTS = 64, 256
WAYS = [
    Way(),
    Way(symmetric=True),
    Way(group_size=64, version=2),
    Way(group_size=128, act_order=True),
    Way(group_size=-1),
    Way(bits=8, group_size=64),
    Way(bits=8, symmetric=True, version=2),
    Way(bits=2, group_size=64),
    Way(bits=3, symmetric=True),
    Way(bits=3, version=2, act_order=True),
    Way("awq"),
    Way("awq", group_size=128),
    Way("awq", group_size=-1),
]


def read(layer: Layer, way: Way) -> GroupedWeight:
    stored = {name: tensor.numpy() for name, tensor in layer.tensors.items()}
    scales = stored.pop("scales").astype(np.float32)
    if way.method == "awq":
        return unpack_awq(stored["qweight"], scales, stored["qzeros"], group_size=way.group_size)
    return unpack_gptq(
        stored["qweight"],
        scales,
        stored.get("qzeros"),
        stored.get("g_idx"),
        bits=way.bits,
        group_size=way.group_size,
        symmetric=way.symmetric,
        version=way.stated_version or way.version,
    )


def levels(packed: np.ndarray, bits: int) -> np.ndarray:
    """[R, bytes] as [R, values]: 4-bit values lie in the low half of a byte first."""
    return packed if bits == 8 else np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def meaning(packed: QuantizedWeight) -> tuple[np.ndarray, np.ndarray]:
    """[N, K] levels and float64 weight, its inputs in their own order: as MatMulNBits' documentation has it."""
    outputs, inputs = packed.sizes
    count = inputs // packed.block_size
    found = levels(packed.blocks.numpy().reshape(outputs, -1), packed.bits)
    scales = packed.scales.numpy().reshape(outputs, count).astype(np.float64)
    zeros = np.full((outputs, count), 2 ** (packed.bits - 1))
    if packed.zero_points is not None:
        zeros = levels(packed.zero_points.numpy().reshape(outputs, -1), packed.bits)[:, :count]
    blocks = found.reshape(outputs, count, -1).astype(np.int64) - zeros[:, :, None]
    weight = (blocks * scales[:, :, None]).reshape(outputs, inputs)
    if packed.order is not None:
        place = np.argsort(packed.order.numpy())
        found, weight = found[:, place], weight[:, place]
    return found, weight


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_layer_means_what_its_format_says(way: Way) -> None:
    layer = quantized_layer(np.random.default_rng(1), OUTPUTS, INPUTS, way)
    found = read(layer, way)
    np.testing.assert_array_equal(found.levels, layer.levels)
    np.testing.assert_array_equal(dequantize(found), layer.weight)

    packed = to_blocks(found, torch.float32)
    assert packed is not None
    assert packed.bits == max(4, way.bits)
    assert packed.block_size == (256 if way.group_size == -1 else way.group_size)
    integers, weight = meaning(packed)
    np.testing.assert_array_equal(integers, layer.levels)
    np.testing.assert_array_equal(weight, layer.weight)
    assert (packed.order is not None) == way.act_order
    assert (packed.zero_points is None) == (way.symmetric and way.bits in (4, 8))


def test_the_blocks_of_plain_gptq_are_the_bytes_of_the_checkpoint() -> None:
    layer = quantized_layer(np.random.default_rng(2), OUTPUTS, INPUTS, Way())
    packed = to_blocks(read(layer, Way()), torch.float32)
    assert packed is not None
    assert packed.blocks.numpy().tobytes() == layer.tensors["qweight"].numpy().T.tobytes()


def test_a_symmetric_checkpoint_that_states_the_wrong_version() -> None:
    way = Way(symmetric=True, version=2, stated_version=1)
    layer = quantized_layer(np.random.default_rng(3), OUTPUTS, INPUTS, way)
    np.testing.assert_array_equal(dequantize(read(layer, way)), layer.weight)


def test_zero_points_of_zero_borrowed_from_their_neighbours() -> None:
    """GPTQModel subtracts one from every zero point of a word at once."""
    zeros = np.array([[0, 3, 0, 0, 15, 1, 0, 8]], np.int64)
    number = sum(int(zero) << 4 * place for place, zero in enumerate(zeros[0])) - 0x11111111
    qzeros = np.array([[number & 0xFFFFFFFF]], np.uint32).view(np.int32)
    qweight = np.zeros((4, 8), np.int32)
    options = {"bits": 4, "group_size": 32, "symmetric": False, "version": 1}
    found = unpack_gptq(qweight, np.ones((1, 8), np.float32), qzeros, None, **options)
    np.testing.assert_array_equal(found.zero_points[:, 0], zeros[0])


@pytest.mark.parametrize("group_size", [8, 24, 40])
def test_groups_that_no_block_lies_within(group_size: int) -> None:
    weight = quantized_layer(np.random.default_rng(4), 8, 480, Way(group_size=group_size))
    assert to_blocks(read(weight, Way(group_size=group_size)), torch.float32) is None


@pytest.mark.parametrize("part", ["qzeros", "scales", "g_idx"])
def test_parts_that_do_not_fit(part: str) -> None:
    layer = quantized_layer(np.random.default_rng(5), OUTPUTS, INPUTS, Way())
    layer.tensors[part] = layer.tensors[part][:-1]
    with pytest.raises(ValueError, match=r"its parts do not fit: levels \[64, 256\]"):
        read(layer, Way())


def test_no_zero_points() -> None:
    layer = quantized_layer(np.random.default_rng(6), OUTPUTS, INPUTS, Way(symmetric=True))
    del layer.tensors["qzeros"]
    np.testing.assert_array_equal(dequantize(read(layer, Way(symmetric=True))), layer.weight)
    with pytest.raises(ValueError, match="it has no qzeros, and the checkpoint is not symmetric"):
        read(layer, Way(symmetric=False))
