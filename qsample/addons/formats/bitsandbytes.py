"""The quantized layers of bitsandbytes: the stored tensors of a layer enter, its weight leaves. LLM.int8() (Dettmers et
al., NeurIPS 2022) has integers. NF4 (Dettmers et al., "QLoRA", NeurIPS 2023) and FP4 have none, and become float.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor

from qsample.checkpoints.integers import IntegerWeight, StoredMatrix, check_part
from qsample.checkpoints.small_floats import FloatMatrix
from qsample.checks import is_integer, is_number
from qsample.disk.untrusted import parse_json

_STATE: Final = "weight.quant_state.bitsandbytes__"


class Int8:
    """8 bits: weight [N, K] int8, and SCB [N], the largest magnitude of each row; a weight is SCB / 127 a step."""

    mark: ClassVar = "SCB"
    parts: ClassVar = ("weight", "SCB", "weight_format")
    unread: ClassVar = ()

    def matrix(self, layer: str, parts: Mapping[str, Tensor]) -> StoredMatrix:
        """The weight of a layer. Raises ValueError if the parts do not fit one another."""
        weight, largest, layout = parts["weight"], parts["SCB"], parts.get("weight_format")
        check_part("weight", weight, (torch.int8,), (None, None), "outputs by inputs")
        check_part(
            "SCB",
            largest,
            (torch.float16, torch.bfloat16, torch.float32),
            (len(weight),),
            "of each output",
        )
        if layout is not None and int(layout) != 0:
            raise ValueError(f"its weight_format is {int(layout)}, and must be 0, in rows")
        if not torch.isfinite(largest).all():
            raise ValueError("its SCB holds numbers that are infinite or none")

        def read(rows: slice) -> IntegerWeight:
            levels = weight[rows].numpy().view(np.uint8) ^ np.uint8(128)
            return IntegerWeight(8, levels, largest[rows, None].to(torch.float32).div(127).numpy())

        return StoredMatrix(layer, (weight.shape[0], weight.shape[1]), read)


class Float4:
    """4 bits: weight holds indices into quant_map, two a byte, the first in the high bits, each times the absmax of its
    block. With double quantization, absmax is itself indices into nested_quant_map, times nested_absmax, plus a mean.
    """

    mark: ClassVar = "weight.absmax"
    parts: ClassVar = (
        *(
            "weight",
            "weight.absmax",
            "weight.quant_map",
            "weight.nested_absmax",
            "weight.nested_quant_map",
        ),
        *(_STATE + "nf4", _STATE + "fp4"),
    )
    unread: ClassVar = ()

    def matrix(self, layer: str, parts: Mapping[str, Tensor]) -> FloatMatrix:
        """The weight of a layer. Raises ValueError if the parts do not fit one another."""
        kept = next((tensor for name, tensor in parts.items() if name.startswith(_STATE)), None)
        check_part(
            "quant_state", torch.zeros(0) if kept is None else kept, (torch.uint8,), (None,), "JSON"
        )
        state = parse_json(bytes(kept.numpy()).decode()) if kept is not None else None
        state = state if isinstance(state, dict) else {}
        shape, size = state.get("shape"), state.get("blocksize")
        if (
            not isinstance(shape, list)
            or len(shape) != 2
            or not all(is_integer(n, 1) for n in shape)
        ):
            raise ValueError(f"its quant_state has the shape {shape!r:.60}")
        count, packed, code = (
            math.prod(shape),
            parts["weight"].reshape(-1).view(torch.uint8),
            parts["weight.quant_map"],
        )
        check_part("weight", packed, (torch.uint8,), (-(-count // 2),), f"pairs of {shape}")
        check_part("quant_map", code, (torch.float32,), (16,), "numbers of 4 bits")
        if not is_integer(size, 1, count):
            raise ValueError(f"its quant_state has blocksize {size!r:.60}")
        blocks, absmax, nested = (
            -(-count // size),
            parts["weight.absmax"],
            parts.get("weight.nested_absmax"),
        )
        check_part(
            "absmax",
            absmax,
            (torch.float32 if nested is None else torch.uint8,),
            (blocks,),
            "of each block",
        )

        def scales() -> Tensor:
            return absmax if nested is None else _nested(parts, absmax, nested, state)

        if not (torch.isfinite(code).all() and torch.isfinite(scales()).all()):
            raise ValueError("its quant_map or absmax holds numbers that are infinite or none")

        def read() -> Tensor:
            indices = torch.stack([packed >> 4, packed & 15], 1).reshape(-1)[:count]
            return (code[indices.long()] * scales().repeat_interleave(size)[:count]).reshape(shape)

        return FloatMatrix(layer, (shape[0], shape[1]), read)


def _nested(
    parts: Mapping[str, Tensor], indices: Tensor, nested: Tensor, state: Mapping[str, Any]
) -> Tensor:
    """The magnitudes that `indices` stand for."""
    table, size, mean = (
        parts["weight.nested_quant_map"],
        state.get("nested_blocksize"),
        state.get("nested_offset"),
    )
    if not is_integer(size, 1) or not is_number(mean, -3e38, 3e38):
        raise ValueError(
            f"its quant_state has nested_blocksize {size!r:.60} and nested_offset {mean!r:.60}"
        )
    check_part(
        "nested_absmax",
        nested,
        (torch.float32,),
        (-(-len(indices) // size),),
        "of each block of absmax",
    )
    check_part("nested_quant_map", table, (torch.float32,), (256,), "numbers of 8 bits")
    steps = nested.repeat_interleave(min(size, len(indices)))[: len(indices)]
    return table[indices.long()] * steps + mean
