"""Layers of bitsandbytes, worked by hand: each number of a weight, and parts that do not fit."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from qsample.addons.formats.bitsandbytes import Float4, Int8

STATE = "weight.quant_state.bitsandbytes__"
CODE = torch.linspace(-1, 1, 16)


def text(document: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)


def int8_parts(**changes: Any) -> dict[str, torch.Tensor]:
    parts = {
        "weight": torch.tensor([[-128, 0, 127], [1, -1, 64]], dtype=torch.int8),
        "SCB": torch.tensor([127.0, 254.0]),
        **changes,
    }
    return {name: part for name, part in parts.items() if part is not None}


def test_a_step_of_int8_is_a_127th_of_the_largest_magnitude() -> None:
    matrix = Int8().matrix("layer", int8_parts())
    assert (matrix.layer, matrix.shape) == ("layer", (2, 3))
    np.testing.assert_array_equal(matrix.floats(), [[-128, 0, 127], [2, -2, 128]])
    second = matrix.read(slice(1, 2))
    assert (second.bits, second.is_symmetric) == (8, True)
    np.testing.assert_array_equal(second.floats(), [[2, -2, 128]])
    assert {"weight", Int8.mark, "weight_format"} == {*Int8.parts}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_largest_magnitudes_of_int8_have_any_float_dtype(dtype: torch.dtype) -> None:
    parts = int8_parts(SCB=torch.tensor([127.0, 254.0], dtype=dtype))
    assert Int8().matrix("layer", parts).floats()[1].tolist() == [2, -2, 128]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight": torch.zeros(2, 3)}, r"weight is float32 \[2, 3\], and must be int8"),
        (
            {"weight": torch.zeros(6, dtype=torch.int8)},
            r"must be int8 \[1 or more, 1 or more\]: outp",
        ),
        ({"SCB": torch.ones(3)}, r"SCB is float32 \[3\].*\[2\]: the largest magnitude"),
        ({"SCB": torch.ones(2, dtype=torch.float64)}, "float16 or bfloat16 or float32"),
        ({"SCB": torch.tensor([1.0, torch.inf])}, "SCB holds numbers that are infinite"),
        ({"SCB": torch.tensor([torch.nan, 1.0])}, "SCB holds numbers that are infinite"),
        ({"weight_format": torch.tensor(1)}, "weight_format is 1, and must be 0"),
        ({"weight_format": torch.tensor(-1)}, "weight_format is -1, and must be 0"),
    ],
)
def test_parts_of_int8_that_do_not_fit(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Int8().matrix("layer", int8_parts(**changes))


def test_the_smallest_weight_of_float4() -> None:
    one = torch.ones(1)
    parts = float4_parts({"shape": [1, 1], "blocksize": 1}, weight__absmax=2 * one)
    parts["weight"] = torch.tensor([[0xF0]], dtype=torch.uint8)
    assert Float4().matrix("x", parts).floats().tolist() == [[2.0]]


def test_int8_in_rows_may_say_so() -> None:
    parts = int8_parts(weight_format=torch.tensor(0, dtype=torch.uint8))
    assert Int8().matrix("layer", parts).shape == (2, 3)


def float4_parts(state: dict[str, Any] | None = None, **changes: Any) -> dict[str, torch.Tensor]:
    """A weight [3, 3] of the indices 0 to 8, in blocks of 4 with the scales 1, 10 and 100."""
    document = {"shape": [3, 3], "blocksize": 4, **(state or {})}
    parts = {
        "weight": torch.tensor([[0x01], [0x23], [0x45], [0x67], [0x8F]], dtype=torch.uint8),
        "weight.absmax": torch.tensor([1.0, 10.0, 100.0]),
        "weight.quant_map": CODE,
        f"{STATE}nf4": text(document),
        **{name.replace("__", "."): part for name, part in changes.items()},
    }
    return {name: part for name, part in parts.items() if part is not None}


def by_hand(scales: list[float]) -> Any:
    code = CODE.numpy().astype(np.float32)
    numbers = [code[index] * np.float32(scales[index // 4]) for index in range(9)]
    return np.array(numbers, np.float32).reshape(3, 3)


def test_pairs_of_indices_and_the_scale_of_each_block() -> None:
    matrix = Float4().matrix("layer", float4_parts())
    assert (matrix.layer, matrix.shape) == ("layer", (3, 3))
    np.testing.assert_array_equal(matrix.floats(), by_hand([1, 10, 100]))
    fp4 = float4_parts()
    fp4[f"{STATE}fp4"] = fp4.pop(f"{STATE}nf4")
    np.testing.assert_array_equal(Float4().matrix("x", fp4).floats(), by_hand([1, 10, 100]))
    assert {*float4_parts(), *fp4} <= {*Float4.parts}


def test_a_block_may_be_the_whole_weight_and_bytes_may_be_signed() -> None:
    parts = float4_parts({"blocksize": 9}, weight__absmax=torch.tensor([2.0]))
    parts["weight"] = parts["weight"].view(torch.int8)
    np.testing.assert_array_equal(Float4().matrix("x", parts).floats(), by_hand([2, 2, 2]))


def nested(state: dict[str, Any] | None = None, **changes: Any) -> dict[str, torch.Tensor]:
    """The same weight with scales in two blocks: 3 * 2 + 0.5, 4 * 2 + 0.5 and 5 * 7 + 0.5."""
    options = {"nested_blocksize": 2, "nested_offset": 0.5, **(state or {})}
    given = {
        "weight__absmax": torch.tensor([3, 4, 5], dtype=torch.uint8),
        "weight__nested_absmax": torch.tensor([2.0, 7.0]),
        "weight__nested_quant_map": torch.arange(256.0),
        **changes,
    }
    return float4_parts(options, **given)


def test_double_quantization() -> None:
    matrix = Float4().matrix("layer", nested())
    np.testing.assert_array_equal(matrix.floats(), by_hand([6.5, 8.5, 35.5]))
    assert {*nested()} <= {*Float4.parts}
    for size in (3, 10**15):  # as many as there are scales, and more
        parts = nested({"nested_blocksize": size}, weight__nested_absmax=torch.tensor([2.0]))
        np.testing.assert_array_equal(
            Float4().matrix("x", parts).floats(), by_hand([6.5, 8.5, 10.5])
        )
    one = nested({"nested_blocksize": 1}, weight__nested_absmax=torch.tensor([1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(Float4().matrix("x", one).floats(), by_hand([3.5, 8.5, 15.5]))


@pytest.mark.parametrize("offset", [-3e38, 3e38])
def test_the_largest_offset(offset: float) -> None:
    parts = nested({"nested_offset": offset}, weight__nested_absmax=torch.zeros(2))
    first = Float4().matrix("x", parts).floats()[0, 0]
    assert first == np.float32(offset) * CODE[0].item()


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (float4_parts({"shape": None}), "quant_state has the shape None"),
        (float4_parts({"shape": [9]}), r"quant_state has the shape \[9\]"),
        (float4_parts({"shape": [3, 3, 1]}), r"shape \[3, 3, 1\]"),
        (float4_parts({"shape": [3, 0]}), r"shape \[3, 0\]"),
        (float4_parts({"shape": [3.0, 3]}), r"shape \[3.0, 3\]"),
        (float4_parts({"shape": "33"}), "shape '33'"),
        (float4_parts({"blocksize": 0}), "quant_state has blocksize 0"),
        (float4_parts({"blocksize": 10}), "quant_state has blocksize 10"),
        (float4_parts({"blocksize": None}), "quant_state has blocksize None"),
        (float4_parts(weight=torch.zeros(4, dtype=torch.uint8)), r"\[5\]: pairs of \[3, 3\]"),
        (float4_parts(weight__quant_map=CODE[:15]), r"must be float32 \[16\]: numbers of 4 bits"),
        (float4_parts(weight__quant_map=CODE.double()), "quant_map is float64"),
        (float4_parts(weight__quant_map=CODE / 0), "quant_map or absmax holds numbers that"),
        (float4_parts(weight__absmax=torch.ones(2)), r"float32 \[3\]: a number for each block"),
        (float4_parts(weight__absmax=torch.ones(3).byte()), "absmax is uint8"),
        (float4_parts(weight__absmax=torch.ones(3) / 0), "quant_map or absmax holds numbers that"),
        ({**float4_parts(), f"{STATE}nf4": text([3, 3])}, "quant_state has the shape None"),
        ({**float4_parts(), f"{STATE}nf4": torch.zeros(4)}, "quant_state is float32"),
        (nested({"nested_blocksize": 0}), "nested_blocksize 0 and nested_offset 0.5"),
        (nested({"nested_offset": 4e38}), r"nested_blocksize 2 and nested_offset 4e\+38"),
        (nested({"nested_offset": -4e38}), r"nested_offset -4e\+38"),
        (nested({"nested_offset": None}), "nested_offset None"),
        (nested(weight__absmax=torch.ones(3)), r"absmax is float32 \[3\], and must be uint8"),
        (nested(weight__nested_absmax=torch.ones(3)), r"nested_absmax is .*\[2\]: a number for each"),
        (nested(weight__nested_absmax=torch.ones(2).half()), "nested_absmax is float16"),
        (nested(weight__nested_quant_map=torch.ones(255)), r"\[256\]: numbers of 8 bits"),
        (nested(weight__nested_quant_map=torch.ones(256).half()), "nested_quant_map is float16"),
        (nested(weight__nested_absmax=torch.ones(2) / 0), "quant_map or absmax holds numbers that"),
    ],
)  # fmt: skip
def test_parts_of_float4_that_do_not_fit(parts: dict[str, torch.Tensor], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Float4().matrix("layer", parts)


def test_a_weight_without_its_state_is_refused() -> None:
    parts = float4_parts()
    del parts[f"{STATE}nf4"]
    with pytest.raises(ValueError, match=r"quant_state is float32 \[0\], and must be uint8"):
        Float4().matrix("layer", parts)
