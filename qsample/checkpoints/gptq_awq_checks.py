"""Checks the stored tensors of one quantized layer, before anything is unpacked: dtypes, shapes, groups.

Each error names the tensor, what it is and what it must be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from qsample.checkpoints.gptq_awq_layouts import WORD
from qsample.checkpoints.quantization_config import BITS, CheckpointQuantization
from qsample.huggingface.dtypes import dtype_name

_WORDS: Final = (torch.int32,)
_SCALES: Final = (torch.float16, torch.bfloat16, torch.float32)
_INDICES: Final = (torch.int32, torch.int64)


def check_layer(parts: Mapping[str, Tensor], quantization: CheckpointQuantization) -> int:
    """The bits of a level in a layer that is stored as `parts`: qweight, scales and, where the checkpoint has them,
    qzeros and g_idx, as `gptq_awq_layouts` describes them.

    They are those of the configuration, unless g_idx and qweight agree on another number: some checkpoints mix them.
    Raises ValueError where the parts do not fit one another or `quantization`.
    """
    _check("qweight", parts["qweight"], _WORDS, (None, None), "words by outputs")
    _check("scales", parts["scales"], _SCALES, (None, None), "groups by outputs")
    bits = _check_awq(parts, quantization) if quantization.method == "awq" else _check_gptq(parts, quantization)
    if not torch.isfinite(parts["scales"]).all():
        raise ValueError("its scales hold numbers that are infinite or none")
    return bits


def _check_awq(parts: Mapping[str, Tensor], quantization: CheckpointQuantization) -> int:
    inputs, words = parts["qweight"].shape
    outputs = words * WORD // quantization.bits
    if "g_idx" in parts:
        raise ValueError("it has a g_idx, which AWQ's layout does not know")
    if "qzeros" not in parts:
        raise ValueError("it has no qzeros")
    groups = _groups(inputs, quantization.group_size)
    why = _because(inputs, outputs, quantization.group_size)
    _check("scales", parts["scales"], _SCALES, (groups, outputs), why)
    _check("qzeros", parts["qzeros"], _WORDS, (groups, words), why)
    return quantization.bits


def _check_gptq(parts: Mapping[str, Tensor], quantization: CheckpointQuantization) -> int:
    rows, outputs = parts["qweight"].shape
    bits, g_idx = quantization.bits, parts.get("g_idx")
    if g_idx is not None:
        _check("g_idx", g_idx, _INDICES, (None,), "the group of each input")
        bits = _bits(rows, len(g_idx), parts, quantization)
    if rows * WORD % bits:
        raise ValueError(f"its qweight has {rows} rows of {WORD} bits, which {bits}-bit levels do not fill")
    inputs = rows * WORD // bits
    mixed = quantization.mixed and g_idx is not None
    groups = len(parts["scales"]) if mixed else _groups(inputs, quantization.group_size)
    why = _because(inputs, outputs, "its own" if mixed else quantization.group_size)
    _check("scales", parts["scales"], _SCALES, (groups, outputs), why)
    if "qzeros" in parts:
        _check("qzeros", parts["qzeros"], _WORDS, (groups, -(-outputs * bits // WORD)), why)
    elif not quantization.symmetric:
        raise ValueError("it has no qzeros, and the checkpoint is not symmetric")
    if g_idx is not None:
        _check_groups(g_idx, groups, -(-inputs // groups) if mixed else quantization.group_size)
    return bits


def _bits(rows: int, inputs: int, parts: Mapping[str, Tensor], quantization: CheckpointQuantization) -> int:
    """What qweight's rows and g_idx's inputs make of a level; ValueError where it is no number of bits that exists, or
    where the layer's zero points are of another."""
    stated = quantization.bits
    bits, rest = divmod(rows * WORD, inputs)
    words = -(-parts["qweight"].shape[1] * bits // WORD)
    agrees = "qzeros" not in parts or parts["qzeros"].ndim < 2 or parts["qzeros"].shape[1] == words
    if bits == stated and not rest:
        return bits
    if rest or bits not in BITS["gptq"] or not agrees:
        raise ValueError(
            f"its parts do not fit: g_idx has {inputs} entries, and must have one for each of the "
            f"{rows * WORD // stated} inputs that {rows} rows of qweight hold in {stated} bits"
        )
    return bits


def _check_groups(g_idx: Tensor, groups: int, group_size: int) -> None:
    """Each group must have `group_size` inputs, but for the one that gets the rest of them."""
    low, high = int(g_idx.min()), int(g_idx.max())
    if not 0 <= low <= high < groups:
        raise ValueError(f"its g_idx holds {low} to {high}, and must hold the groups 0 to {groups - 1}")
    counts = torch.bincount(g_idx.to(torch.int64), minlength=groups).tolist()
    size = len(g_idx) if group_size == -1 else min(group_size, len(g_idx))
    rest = len(g_idx) - (groups - 1) * size
    if sorted(counts) != sorted([size] * (groups - 1) + [rest]):
        raise ValueError(
            f"its g_idx gives groups of {min(counts)} to {max(counts)} inputs, and every group must have {size}"
            + (f", but for one of {rest}" if rest != size else "")
        )


def _check(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...], why: str) -> None:
    """shape: the sizes that an axis must have; None = at least 1."""
    fits = tensor.ndim == len(shape) and all(
        size > 0 if wanted is None else size == wanted for size, wanted in zip(tensor.shape, shape, strict=True)
    )
    if fits and tensor.dtype in dtypes:
        return
    sizes = ", ".join("1 or more" if size is None else str(size) for size in shape)
    kinds = " or ".join(dtype_name(dtype) for dtype in dtypes)
    raise ValueError(
        f"its parts do not fit: {name} is {dtype_name(tensor.dtype)} {list(tensor.shape)}, and must be {kinds} "
        f"[{sizes}]: {why}"
    )


def _groups(inputs: int, group_size: int) -> int:
    return 1 if group_size == -1 else -(-inputs // group_size)


def _because(inputs: int, outputs: int, group_size: int | str) -> str:
    size = "one group of all" if group_size == -1 else f"a group_size of {group_size}"
    return f"qweight has {inputs} inputs and {outputs} outputs, with {size}"
