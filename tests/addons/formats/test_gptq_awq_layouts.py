"""GPTQ's and AWQ's layouts: what each of them means, and errors that name the tensor of a layer that does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qsample.addons.formats.gptq_awq_layouts import Quantization
from qsample.checkpoints.stored_matrices import IntegerWeight
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


def read_layer(layer: str, parts: dict[str, Tensor], quantization: Quantization) -> IntegerWeight:
    """All rows, and the same in two parts."""
    matrix = quantization.matrix(layer, parts)
    outputs = matrix.shape[0]
    weight = matrix.read(slice(0, outputs))
    assert weight.levels.shape == matrix.shape
    if outputs > 32:
        parts_of_it = np.concatenate(
            [matrix.read(rows).floats() for rows in (slice(0, 32), slice(32, outputs))]
        )
        np.testing.assert_array_equal(parts_of_it, weight.floats())
    return weight


def read(layer: Layer, scheme: Scheme) -> IntegerWeight:
    version = scheme.stated_version or scheme.version
    quantization = Quantization(
        scheme.method, scheme.bits, scheme.group_size, scheme.symmetric, version
    )
    return read_layer("some.layer", layer.tensors, quantization)


def meaning(weight: QuantizedWeight) -> tuple[np.ndarray, np.ndarray]:
    """[N, K] levels and float64 weight, its inputs in their own order: as MatMulNBits' documentation has it."""
    outputs, inputs = weight.sizes
    count = inputs // weight.block_size
    levels = stored_levels(weight.blocks.numpy().reshape(outputs, -1), weight.bits)
    scales = weight.scales.numpy().reshape(outputs, count).astype(np.float64)
    zeros = np.full((outputs, count), 2 ** (weight.bits - 1))
    if weight.zero_points is not None:
        zeros = stored_levels(weight.zero_points.numpy().reshape(outputs, -1), weight.bits)[
            :, :count
        ]
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
    np.testing.assert_array_equal(grouped.floats(), layer.weight)

    blocks = grouped.blocks(torch.float32)
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
    blocks = read(layer, Scheme()).blocks(torch.float32)
    assert blocks is not None
    assert blocks.blocks.numpy().tobytes() == layer.tensors["qweight"].numpy().T.tobytes()


def test_a_symmetric_checkpoint_that_states_the_wrong_version() -> None:
    scheme = Scheme(symmetric=True, version=2, stated_version=1)
    layer = quantized_layer(np.random.default_rng(3), OUTPUTS, INPUTS, scheme)
    np.testing.assert_array_equal(read(layer, scheme).floats(), layer.weight)


def test_zero_points_of_zero_borrowed_from_their_neighbours() -> None:
    """GPTQModel subtracts one from every zero point of a word at once."""
    zeros = np.array([[0, 3, 0, 0, 15, 1, 0, 8]], np.int64)
    number = sum(int(zero) << 4 * i for i, zero in enumerate(zeros[0])) - 0x11111111
    qzeros = np.array([[number & 0xFFFFFFFF]], np.uint32).view(np.int32)
    parts = {
        "qweight": np.zeros((4, 8), np.int32),
        "scales": np.ones((1, 8), np.float32),
        "qzeros": qzeros,
    }
    tensors = {name: torch.from_numpy(array) for name, array in parts.items()}
    grouped = read_layer("layer", tensors, Quantization("gptq", 4, 32, symmetric=False))
    np.testing.assert_array_equal(grouped.zero_points[:, 0], zeros[0])


@pytest.mark.parametrize("group_size", [8, 24, 40])
def test_groups_that_no_block_lies_within(group_size: int) -> None:
    weight = quantized_layer(np.random.default_rng(4), 8, 480, Scheme(group_size=group_size))
    assert read(weight, Scheme(group_size=group_size)).blocks(torch.float32) is None


def test_no_zero_points() -> None:
    layer = quantized_layer(np.random.default_rng(6), OUTPUTS, INPUTS, Scheme(symmetric=True))
    del layer.tensors["qzeros"]
    np.testing.assert_array_equal(read(layer, Scheme(symmetric=True)).floats(), layer.weight)


ROWS, COLUMNS = 32, 128
GPTQ, AWQ = Scheme(), Scheme("awq")
INT = torch.int32


def stored(scheme: Scheme) -> dict[str, Tensor]:
    return dict(quantized_layer(np.random.default_rng(0), ROWS, COLUMNS, scheme).tensors)


def stated(scheme: Scheme, **changes: Any) -> Quantization:
    fields = {"symmetric": scheme.symmetric, "version": scheme.version}
    return Quantization(scheme.method, scheme.bits, scheme.group_size, **(fields | changes))


def resized(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor of `shape` that repeats the values of `tensor`."""
    return torch.from_numpy(np.resize(tensor.numpy(), shape).copy())


@pytest.mark.parametrize(
    ("scheme", "part", "change", "message"),
    [
        # a group size that the scales contradict: too few rows, too many, one group only
        (
            GPTQ,
            "scales",
            lambda t: t[:3],
            r"scales is float16 \[3, 32\], and must be .* \[4, 32\]: .* group_size of 32",
        ),
        (GPTQ, "scales", lambda t: resized(t, (8, 32)), r"scales is float16 \[8, 32\]"),
        (AWQ, "scales", lambda t: t[:2], r"scales is float16 \[2, 32\], and must be .* \[4, 32\]"),
        (AWQ, "scales", lambda t: t[:1], r"scales is float16 \[1, 32\]"),
        (AWQ, "qzeros", lambda t: t[:2], r"qzeros is int32 \[2, 4\], and must be int32 \[4, 4\]"),
        (
            GPTQ,
            "qzeros",
            lambda t: t[:, :3],
            r"qzeros is int32 \[4, 3\], and must be int32 \[4, 4\]",
        ),
        (
            GPTQ,
            "g_idx",
            lambda t: t[:0],
            r"g_idx is int32 \[0\], and must be int32 or int64 \[1 or more\]",
        ),
        (
            GPTQ,
            "g_idx",
            lambda t: torch.cat([t, t]),
            r"g_idx has 256 entries, and must have one for each of the 128",
        ),
        (
            GPTQ,
            "g_idx",
            lambda t: t[:-1],
            r"g_idx has 127 entries, and must have one for each of the 128",
        ),
        (GPTQ, "g_idx", lambda t: t[None], r"g_idx is int32 \[1, 128\]"),
        (GPTQ, "g_idx", lambda t: t.float(), r"g_idx is float32 \[128\]"),
        (GPTQ, "g_idx", lambda t: t + 1, "g_idx holds 1 to 4, and must hold the groups 0 to 3"),
        (GPTQ, "g_idx", lambda t: t - 1, "g_idx holds -1 to 2"),
        (GPTQ, "g_idx", lambda t: t * 0, "groups of 0 to 128 inputs, and every group must have 32"),
        (GPTQ, "g_idx", lambda t: t.clamp(max=2), "groups of 0 to 64 inputs"),
        (
            AWQ,
            "g_idx",
            lambda t: torch.zeros(COLUMNS, dtype=INT),
            "it has a g_idx, which AWQ's layout does not know",
        ),
        (AWQ, "qzeros", lambda t: None, "it has no qzeros"),
        (GPTQ, "qzeros", lambda t: None, "it has no qzeros, and the checkpoint is not symmetric"),
        (GPTQ, "qweight", lambda t: t.long(), r"qweight is int64 \[16, 32\], and must be int32"),
        (GPTQ, "qweight", lambda t: t.float(), "qweight is float32"),
        (
            GPTQ,
            "qweight",
            lambda t: t.flatten(),
            r"qweight is int32 \[512\], and must be int32 \[1 or more, 1 or more\]",
        ),
        (GPTQ, "qweight", lambda t: t[None], r"qweight is int32 \[1, 16, 32\]"),
        (GPTQ, "qweight", lambda t: t[:0], r"qweight is int32 \[0, 32\]"),
        (GPTQ, "qweight", lambda t: t[:, :0], r"qweight is int32 \[16, 0\]"),
        (
            GPTQ,
            "qweight",
            lambda t: t[:15],
            "g_idx has 128 entries, and must have one for each of the 120",
        ),
        (
            GPTQ,
            "qweight",
            lambda t: t[:, :31],
            r"scales is float16 \[4, 32\], and must be .* \[4, 31\]",
        ),
        (
            AWQ,
            "qweight",
            lambda t: t[:64],
            r"scales is float16 \[4, 32\], and must be .* \[2, 32\]",
        ),
        (
            AWQ,
            "qweight",
            lambda t: t[:, :3],
            r"scales is float16 \[4, 32\], and must be .* \[4, 24\]",
        ),
        (AWQ, "qweight", lambda t: t.to(torch.uint8), "qweight is uint8"),
        (
            GPTQ,
            "scales",
            lambda t: t.int(),
            r"scales is int32 \[4, 32\], and must be float16 or bfloat16 or float32",
        ),
        (GPTQ, "scales", lambda t: t.double(), "scales is float64"),
        (GPTQ, "scales", lambda t: t[0], r"scales is float16 \[32\]"),
        (GPTQ, "scales", lambda t: t[:0], r"scales is float16 \[0, 32\]"),
        (GPTQ, "scales", lambda t: t / 0, "scales hold numbers that are infinite or none"),
        (GPTQ, "qzeros", lambda t: t.flatten(), r"qzeros is int32 \[16\]"),
        (GPTQ, "qzeros", lambda t: t[:0], r"qzeros is int32 \[0, 4\]"),
        (AWQ, "qzeros", lambda t: t.short(), "qzeros is int16"),
    ],
)
def test_parts_that_do_not_fit(scheme: Scheme, part: str, change: Any, message: str) -> None:
    parts = stored(scheme)
    changed = change(parts.get(part))
    parts = {
        name: tensor for name, tensor in (parts | {part: changed}).items() if tensor is not None
    }
    with pytest.raises(ValueError, match=message):
        read_layer("some.layer", parts, stated(scheme))


@pytest.mark.parametrize(
    ("scheme", "changes", "message"),
    [
        (
            GPTQ,
            {"group_size": 64},
            r"scales is float16 \[4, 32\], and must be .* \[2, 32\]: .* group_size of 64",
        ),
        (GPTQ, {"group_size": -1}, r"\[1, 32\]: .* one group of all"),
        (GPTQ, {"group_size": 16}, r"\[8, 32\]"),
        (AWQ, {"group_size": 64}, r"\[2, 32\]"),
        (AWQ, {"group_size": -1}, r"\[1, 32\]"),
        (AWQ, {"group_size": 3}, r"\[43, 32\]"),
        (GPTQ, {"bits": 3}, "qweight has 16 rows of 32 bits, which 3-bit levels do not fill"),
        (
            GPTQ,
            {"bits": 8},
            r"scales is float16 \[4, 32\], and must be .* \[2, 32\]: qweight has 64 inputs",
        ),
    ],
)
def test_a_configuration_that_the_layer_contradicts(
    scheme: Scheme, changes: dict[str, Any], message: str
) -> None:
    parts = stored(scheme)
    if "bits" in changes:
        del parts["g_idx"]
    quantization = Quantization(
        **({"method": scheme.method, "bits": 4, "group_size": 32} | changes)
    )
    with pytest.raises(ValueError, match=message):
        read_layer("some.layer", parts, quantization)


@pytest.mark.parametrize("act_order", [False, True])
def test_layers_of_their_own_bits_and_group_size(act_order: bool) -> None:
    """The configuration says 4 bits in groups of 128, and that layers differ."""
    own = Scheme(bits=8, group_size=64, act_order=act_order)
    layer = quantized_layer(np.random.default_rng(1), ROWS, COLUMNS, own)
    mixed = Quantization("gptq", 4, 128, symmetric=False, mixed=True)
    np.testing.assert_array_equal(read_layer("layer", layer.tensors, mixed).floats(), layer.weight)
    with pytest.raises(ValueError, match="group_size of 128"):
        read_layer("layer", layer.tensors, Quantization("gptq", 4, 128, symmetric=False))


SHAPES = st.lists(st.integers(0, 40), min_size=0, max_size=3).map(tuple)
DTYPES = st.sampled_from(
    [torch.int32, torch.int64, torch.uint8, torch.float16, torch.float32, torch.bool]
)


@settings(max_examples=300, deadline=None)
@given(
    scheme=st.sampled_from(
        [GPTQ, AWQ, Scheme(bits=3), Scheme(bits=8, symmetric=True), Scheme(act_order=True)]
    ),
    part=st.sampled_from(["qweight", "qzeros", "scales", "g_idx"]),
    shape=SHAPES,
    dtype=st.none() | DTYPES,
    bits=st.none() | st.sampled_from([2, 3, 4, 8]),
    group_size=st.none() | st.sampled_from([-1, 1, 7, 16, 32, 33, 64, 1000]),
)
def test_any_shape_is_an_error_or_means_a_weight(
    scheme: Scheme,
    part: str,
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
    bits: int | None,
    group_size: int | None,
) -> None:
    parts = stored(scheme)
    if part in parts:
        parts[part] = resized(parts[part], shape).to(dtype or parts[part].dtype)
    method_bits = scheme.bits if bits is None or scheme.method == "awq" else bits
    size = scheme.group_size if group_size is None else group_size
    quantization = Quantization(scheme.method, method_bits, size, symmetric=scheme.symmetric)
    try:
        weight = read_layer("layer", parts, quantization)
    except ValueError as error:
        assert str(error).startswith("its ")  # noqa: PT017 - which of the two is the point
    else:
        assert weight.floats().shape == weight.levels.shape
        assert weight.scales.shape == weight.zero_points.shape == parts["scales"].T.shape
