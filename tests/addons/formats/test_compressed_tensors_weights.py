"""Layers of compressed-tensors, worked by hand: each number of a weight, and parts that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from qsample.addons.formats.compressed_tensors import CompressedTensors, Scheme, read_options
from qsample.checkpoints.stored_matrices import StoredMatrix
from qsample.errors import UnsupportedModelError
from tests.helpers.quantized_checkpoints import words

E4M3 = torch.float8_e4m3fn
LEVELS = np.arange(40 * 32).reshape(40, 32) * 7 % 16


def packing(*schemes: Scheme) -> CompressedTensors:
    return CompressedTensors(schemes)


def group(bits: int, size: int | None, *, symmetric: bool = True, kind: str = "int") -> Scheme:
    return Scheme(kind, bits, (1, size), symmetric)


def packed(bits: int = 4, groups: int = 2, **changes: Any) -> dict[str, torch.Tensor]:
    """Levels [40, 32] of some bits, with scales 1, 2, ... of their groups."""
    levels = LEVELS % 2**bits
    parts = {
        "weight_packed": torch.from_numpy(words(levels, bits).copy()),
        "weight_scale": torch.arange(1.0, 1 + 40 * groups).reshape(40, groups),
        "weight_shape": torch.tensor([40, 32]),
        **changes,
    }
    return {name: part for name, part in parts.items() if part is not None}


def by_hand(bits: int = 4, groups: int = 2, zeros: Any = None) -> Any:
    middle = 2 ** (bits - 1) if zeros is None else zeros
    scales = np.arange(1.0, 1 + 40 * groups).reshape(40, groups).repeat(32 // groups, 1)
    return (LEVELS % 2**bits - middle) * scales


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_packed_levels(bits: int, groups: int) -> None:
    layout = packing(group(3, 16), group(bits, 32 // groups))
    matrix = layout.matrix("layer", packed(bits, groups))
    assert isinstance(matrix, StoredMatrix)
    assert (matrix.layer, matrix.shape) == ("layer", (40, 32))
    np.testing.assert_array_equal(matrix.floats(), by_hand(bits, groups))
    part = matrix.read(slice(32, 40))
    assert part.bits == bits
    np.testing.assert_array_equal(part.floats(), by_hand(bits, groups)[32:])


def test_a_scale_of_a_row_or_of_all() -> None:
    rows = packing(group(4, None)).matrix("x", packed(weight_scale=torch.arange(1.0, 41)))
    np.testing.assert_array_equal(rows.floats(), by_hand(groups=1))
    for one in (torch.tensor([2.0]), torch.tensor(2.0), torch.tensor([[2.0]])):
        every = packing(Scheme("int", 4, (None, None), True)).matrix("x", packed(weight_scale=one))
        np.testing.assert_array_equal(every.floats(), (LEVELS - 8) * 2.0)


def test_inputs_in_the_order_of_their_groups_or_in_another() -> None:
    order = torch.arange(32) % 2
    layout = packing(group(4, 16))
    found = layout.matrix("x", packed(weight_g_idx=order.to(torch.int32))).floats()
    scales = np.arange(1.0, 81).reshape(40, 2)[:, order.numpy()]
    np.testing.assert_array_equal(found, (LEVELS - 8) * scales)
    unused = order - 1  # -1: not in use
    np.testing.assert_array_equal(
        layout.matrix("x", packed(weight_g_idx=unused)).floats(), by_hand()
    )


def test_whole_bytes() -> None:
    weight = torch.from_numpy((LEVELS * 8 - 60).astype(np.int8))
    scale = torch.arange(1.0, 41).reshape(40, 1).to(torch.bfloat16)
    parts = {"weight": weight, "weight_scale": scale}
    matrix = packing(group(8, None)).matrix("layer", parts)
    assert (matrix.layer, matrix.shape) == ("layer", (40, 32))
    wanted = weight.numpy() * scale.to(torch.float32).numpy()
    np.testing.assert_array_equal(matrix.floats(), wanted)
    zeros = (torch.arange(40) - 20).to(torch.int8)
    shifted = packing(group(8, None, symmetric=False)).matrix(
        "layer", parts | {"weight_zero_point": zeros}
    )
    wanted = (weight.numpy().astype(float) - zeros.numpy()[:, None]) * scale.float().numpy()
    np.testing.assert_array_equal(shifted.floats(), wanted)
    one = parts | {"weight_scale": torch.tensor([2.0]), "weight_zero_point": zeros[:1]}
    every = packing(Scheme("int", 8, (None, None), False)).matrix("layer", one)
    np.testing.assert_array_equal(every.floats(), (weight.numpy().astype(float) + 20) * 2)


@pytest.mark.parametrize(
    ("block", "shape"),
    [((None, None), (1, 1)), ((1, None), (40, 1)), ((16, 8), (3, 4)), ((128, 16), (1, 2))],
)
def test_floats_of_8_bits(block: tuple[Any, Any], shape: tuple[int, int]) -> None:
    weight = torch.from_numpy(LEVELS.astype(np.float32)).to(E4M3)
    scales = torch.arange(1.0, 1 + shape[0] * shape[1]).reshape(shape)
    matrix = packing(Scheme("float", 8, block, True)).matrix(
        "layer", {"weight": weight, "weight_scale": scales}
    )
    rows, columns = block[0] or 40, block[1] or 32
    each = scales.numpy()[np.arange(40)[:, None] // rows, np.arange(32) // columns]
    np.testing.assert_array_equal(matrix.floats(), LEVELS * each)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.mark.parametrize("divisor", [None, torch.tensor([4.0]), torch.tensor(4.0)])
def test_floats_of_4_bits(divisor: torch.Tensor | None) -> None:
    pairs = torch.from_numpy((LEVELS[:, 0::2] | LEVELS[:, 1::2] << 4).astype(np.uint8))
    scales = (torch.arange(80).reshape(40, 2) % 7 + 1).to(torch.float32).to(E4M3)
    parts = {"weight_packed": pairs, "weight_scale": scales}
    if divisor is not None:
        parts["weight_global_scale"] = divisor
    matrix = packing(group(4, 16, kind="float")).matrix("layer", parts)
    assert (matrix.layer, matrix.shape) == ("layer", (40, 32))
    steps = scales.float().numpy().repeat(16, 1) / (1 if divisor is None else 4)
    np.testing.assert_array_equal(matrix.floats(), E2M1[LEVELS] * steps)
    part = matrix.read(slice(3, 5))  # type: ignore[union-attr, call-arg]
    np.testing.assert_array_equal(part.floats(), (E2M1[LEVELS] * steps)[3:5])


W4 = packing(group(4, 16), group(4, 16, symmetric=False))
W8 = packing(group(8, 16))
FP4 = packing(group(4, 16, kind="float"))
FP8 = packing(Scheme("float", 8, (None, None), True))
NIBBLES = torch.zeros(40, 16, dtype=torch.uint8)
ONES = torch.ones(40, 2)
BYTES = torch.zeros(40, 32, dtype=torch.int8)


@pytest.mark.parametrize(
    ("layout", "parts", "words_of_the_error"),
    [
        (W4, packed(weight_scale=torch.full((40, 2), torch.inf)), "its scales hold numbers that"),
        (W4, packed(weight_scale=torch.ones(40, 2, dtype=torch.float64)), "weight_scale is float64"),
        (W4, packed(weight_scale=torch.ones(40, 2, 1)), r"weight_scale is float32 \[40, 2, 1\].*rows by"),
        (W4, packed(weight_packed=torch.zeros(40, 4).long()), "weight_packed is int64.*outputs by words"),
        (W4, packed(weight_shape=torch.tensor([40.0, 32])), "weight_shape is float32"),
        (W4, packed(weight_shape=torch.tensor([40])), r"must be int64 or int32 \[2\]: N, K"),
        (W4, packed(weight_shape=torch.tensor([41, 32])),
         r"weight_packed is \[40, 4\], and its weight_shape says \[41, 32\]"),
        (W4, packed(weight_shape=torch.tensor([40, 200])), r"its weight_shape says \[40, 200\]"),
        (W4, packed(weight_scale=torch.ones(40, 4)), "its weight is .*int of 4 bits, its weight_scale "
         r"\[40, 4\], without weight_zero_point, and no group of the configuration is stored so"),
        (W8, packed(), "int of 4 bits.*no group"),
        (packing(group(4, 16, kind="float")), packed(), "no group of the configuration"),
        (packing(group(4, 16, symmetric=False)), packed(), "without weight_zero_point, and no group"),
        (W8, packed(weight_zero_point=torch.zeros(40, 2, dtype=torch.int8)), "with weight_zero_point, and no"),
        (W4, packed(weight_zero_point=torch.zeros(40, 3, dtype=torch.int8)),
         r"weight_zero_point is int8 \[40, 3\].*\[40, 2\]: weight_scale is \[40, 2\]"),
        (W4, packed(weight_zero_point=torch.zeros(6, 2, dtype=torch.int32)), r"must be .*\[5, 2\]: weight_scale"),
        (W4, packed(weight_zero_point=torch.zeros(40, 2)), "weight_zero_point is float32"),
        (W4, packed(weight_zero_point=torch.full((40, 2), 8, dtype=torch.int8)), "holds more than 4 bits"),
        (W4, packed(weight_g_idx=torch.arange(32) % 3), "weight_g_idx holds 2, and it has 2 groups"),
        (W4, packed(weight_g_idx=torch.zeros(31).int()), r"\[32\]: the group of each input"),
        (W4, packed(weight_g_idx=torch.zeros(32)), "weight_g_idx is float32"),
        (W8, {"weight": torch.zeros(40, 32), "weight_scale": ONES}, "weight is float32.*outputs by inputs"),
        (W8, {"weight": BYTES, "weight_scale": torch.ones(40, 4)}, "int of 8 bits"),
        (FP8, {"weight": BYTES.to(E4M3), "weight_scale": ONES}, "float of 8 bits"),
        (FP4, {"weight_packed": NIBBLES[0], "weight_scale": ONES}, r"outputs by pairs of inputs"),
        (FP4, {"weight_packed": NIBBLES, "weight_scale": torch.ones(40, 1)}, r"\[40, 32\], float of 4 bits"),
        (FP4, {"weight_packed": NIBBLES, "weight_scale": ONES, "weight_global_scale": torch.zeros(1)},
         "its weight_global_scale is no step"),
        (FP4, {"weight_packed": NIBBLES, "weight_scale": ONES, "weight_global_scale": torch.ones(2)},
         r"\[1\]: the divisor of the matrix"),
        (FP4, {"weight_packed": NIBBLES, "weight_scale": ONES, "weight_global_scale": torch.ones(1).half()},
         "weight_global_scale is float16"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit(
    layout: CompressedTensors, parts: dict[str, torch.Tensor], words_of_the_error: str
) -> None:
    with pytest.raises(ValueError, match=words_of_the_error):
        layout.matrix("layer", parts)


def test_the_names_of_the_parts() -> None:
    layout = packing()
    assert layout.mark == "weight_scale"
    assert {"weight", *packed(), "weight_zero_point", "weight_g_idx", "weight_global_scale"} == {
        *layout.parts
    }
    assert {"input_scale", "k_zero_point", "v_scale", "q_scale", "output_global_scale"} <= {
        *layout.unread
    }
    assert len(layout.unread) == 15


def options(weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"format": "pack-quantized", "config_groups": {"g": {"weights": weights}}, **more}


@pytest.mark.parametrize(
    ("weights", "scheme"),
    [
        ({}, Scheme("int", 8, (None, None), True)),
        ({"num_bits": 2, "group_size": 1}, Scheme("int", 2, (1, 1), True)),
        ({"num_bits": 8, "strategy": "tensor"}, Scheme("int", 8, (None, None), True)),
        ({"symmetric": None}, Scheme("int", 8, (None, None), True)),
        (
            {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16},
            Scheme("float", 4, (1, 16), True),
        ),
        (
            {"type": "float", "strategy": "block", "block_structure": [1, 1]},
            Scheme("float", 8, (1, 1), True),
        ),
    ],
)
def test_schemes_with_what_is_left_out(weights: dict[str, Any], scheme: Scheme) -> None:
    assert read_options(options(weights), "me/m") == CompressedTensors((scheme,))


@pytest.mark.parametrize(
    "weights",
    [
        {"num_bits": 9},
        {"num_bits": 1},
        {"type": "float", "num_bits": 5},
        {"strategy": "token"},
        {"type": "float", "strategy": "block", "block_structure": [0, 1]},
        {"type": "float", "strategy": "block", "block_structure": [1, 0]},
        {"type": "float", "strategy": "block", "block_structure": [1]},
    ],
)
def test_schemes_that_are_refused(weights: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"me/m is quantized .* g has weights of "):
        read_options(options(weights), "me/m")


def test_several_groups_have_their_schemes_once_and_in_an_order() -> None:
    groups = {
        "b": {"weights": {"num_bits": 8}, "format": "int-quantized"},
        "a": {"weights": {"num_bits": 4, "group_size": 32}},
        "c": {"weights": {"num_bits": 4, "group_size": 32}},
        "d": {"weights": None},
    }
    found = read_options({"format": "pack-quantized", "config_groups": groups}, "me/m")
    wanted = (Scheme("int", 4, (1, 32), True), Scheme("int", 8, (None, None), True))
    assert found == CompressedTensors(wanted)


@pytest.mark.parametrize(
    "name",
    ["pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "nvfp4-pack-quantized",
     "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision"],
)  # fmt: skip
def test_formats(name: str) -> None:
    assert read_options(
        options({}, format=name, sparsity_config={"format": "dense"}), "me/m"
    ).schemes
    assert read_options(
        options({}, format=name, sparsity_config={}, transform_config={}), "me/m"
    ).schemes


def test_what_is_also_quantized() -> None:
    given = options({}, kv_cache_scheme={"num_bits": 8})
    given["config_groups"]["g"]["output_activations"] = {"num_bits": 8}
    with pytest.warns(
        UserWarning, match="me/m also quantizes keys and values, the inputs of products, at"
    ):
        read_options(given, "me/m")
