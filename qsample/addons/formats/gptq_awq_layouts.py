"""The stored tensors of a linear layer with GPTQ or AWQ weights enter; its checked integers leave.

GPTQ: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", ICLR 2023. AWQ: Lin et al., "AWQ: Activation-aware Weight Quantization for LLM
Compression and Acceleration", MLSys 2024. AutoGPTQ, GPTQModel and AutoAWQ define the layouts;
neither paper has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final

import numpy as np
import torch

from qsample.checkpoints.stored_matrices import (
    Bytes,
    IntegerWeight,
    StoredMatrix,
    check_part,
    unpack_bits,
)
from qsample.contract.arrays import Array

# The stored tensors of a layer: qweight, scales and, if it has them, qzeros and g_idx.
Parts = Mapping[str, torch.Tensor]
BITS: Final = {"gptq": (2, 3, 4, 8), "awq": (4,)}
_WORD_BITS: Final = 32
# AWQ's "gemm" layout: the i-th four bits of a word belong to column _AWQ_ORDER[i] of the word's
# eight columns.
_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
# Zero points minus one, as GPTQ's first format stores them, were subtracted from whole words; so 1
# is added back to every field of a word, carries included. GPTQModel does the same
# (gptqmodel/utils/model.py, v1 to v2).
_ONE_IN_EACH_FIELD: Final = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
_WORD_DTYPES: Final = (torch.int32,)
_SCALE_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)
_INDEX_DTYPES: Final = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the weights of a checkpoint are stored.

    Attributes:
        method: "gptq" or "awq".
        bits: the bits of a level, 2, 3, 4 or 8, unless a layer's tensors say otherwise.
        group_size: the number of inputs that share a scale, 1 or more; -1 for all inputs.
        symmetric: whether every zero point is 2^(bits - 1).
        version: the version of GPTQ's format: 1 stores zero points minus one, 2 as they are.
        mixed: whether layers may differ in their group size, which then follows from their g_idx.
    """

    method: str
    bits: int
    group_size: int
    symmetric: bool = True
    version: int = 1
    mixed: bool = False
    mark: ClassVar = "qweight"
    parts: ClassVar = ("qweight", "qzeros", "scales", "g_idx")
    unread: ClassVar = ()

    def matrix(self, layer: str, parts: Parts) -> StoredMatrix:
        """The weight of a layer. Raises ValueError if the parts do not fit one another or the
        configuration."""
        bits = _check_layer(parts, self)
        outputs = parts["scales"].shape[1]
        rows = len(parts["qweight"])
        inputs = rows if self.method == "awq" else rows * _WORD_BITS // bits
        return StoredMatrix(layer, (outputs, inputs), partial(_read, parts, bits, self))


def _read(parts: Parts, bits: int, quantization: Quantization, rows: slice) -> IntegerWeight:
    """Some of the N rows, from a multiple of 32 on.

    GPTQ stores qweight [K * bits / 32, N] int32, the levels of a column from the low bits up;
    qzeros [G, N * bits / 32] int32, along N; scales [G, N]; and g_idx [K], the group of each input,
    in order by default. AWQ's "gemm" layout has 4 bits: qweight [K, N / 8], qzeros [G, N / 8] and
    scales [G, N].
    """
    words = {name: tensor.numpy() for name, tensor in parts.items() if name != "scales"}
    scales = np.ascontiguousarray(parts["scales"].to(torch.float32).numpy().T)
    if quantization.method == "awq":
        columns = slice(rows.start * bits // _WORD_BITS, _words(rows.stop, bits))
        levels = np.ascontiguousarray(_awq_columns(words["qweight"][:, columns]).T)
        zero_points = _awq_columns(words["qzeros"]).T
    else:
        levels = unpack_bits(words["qweight"][:, rows].T, bits)
        zero_points = _gptq_zero_points(words.get("qzeros"), scales.shape, bits, quantization)
    if "g_idx" in words:
        groups = words["g_idx"].astype(np.int64)
    else:
        inputs = levels.shape[1]
        size = inputs if quantization.group_size == -1 else quantization.group_size
        groups = np.arange(inputs) // size
    return IntegerWeight(bits, levels, scales[rows], zero_points[rows], groups=groups)


def _gptq_zero_points(
    qzeros: Array | None, shape: tuple[int, ...], bits: int, quantization: Quantization
) -> Bytes:
    """[N, G]. shape: the shape of the scales.

    Some checkpoints say version 1 and store version 2's numbers (vllm-project/vllm#38966), so in a
    symmetric checkpoint the stored number itself decides.
    """
    middle = 2 ** (bits - 1)
    outputs = shape[0]
    if qzeros is None:
        return np.full(shape, middle, np.uint8)
    stored = unpack_bits(qzeros, bits)[:, :outputs]
    first = stored.flat[0]
    all_equal = (stored == first).all()
    if quantization.symmetric and all_equal and first in (middle - 1, middle):
        return np.full(shape, middle, np.uint8)
    if quantization.version == 2:
        return stored.T
    if bits in _ONE_IN_EACH_FIELD:
        ones = np.uint32(_ONE_IN_EACH_FIELD[bits])
        words = (qzeros.view(np.uint32) + ones).view(np.int32)
        return unpack_bits(words, bits)[:, :outputs].T
    return ((stored + np.uint8(1)) & np.uint8(2**bits - 1)).T


def _awq_columns(words: Array) -> Bytes:
    """The levels of words [R, N / 8] int32, as [R, N]."""
    fields = unpack_bits(words, 4).reshape(len(words), -1, len(_AWQ_ORDER))
    columns: Bytes = fields[:, :, np.argsort(_AWQ_ORDER)].reshape(len(words), -1)
    return columns


def _check_layer(parts: Parts, quantization: Quantization) -> int:
    """The bits of a level: the configuration's, unless g_idx and qweight agree on another number,
    as in mixed checkpoints. Raises ValueError before anything is unpacked, with a tensor's actual
    and accepted dtype and shape."""
    check_part("qweight", parts["qweight"], _WORD_DTYPES, (None, None), "words by outputs")
    check_part("scales", parts["scales"], _SCALE_DTYPES, (None, None), "groups by outputs")
    check = _check_awq if quantization.method == "awq" else _check_gptq
    bits = check(parts, quantization)
    if not torch.isfinite(parts["scales"]).all():
        raise ValueError("its scales hold numbers that are infinite or none")
    return bits


def _check_awq(parts: Parts, quantization: Quantization) -> int:
    inputs, words = parts["qweight"].shape
    outputs = words * _WORD_BITS // quantization.bits
    if "g_idx" in parts:
        raise ValueError("it has a g_idx, which AWQ's layout does not know")
    if "qzeros" not in parts:
        raise ValueError("it has no qzeros")
    groups = _groups(inputs, quantization.group_size)
    why = _because(inputs, outputs, quantization.group_size)
    check_part("scales", parts["scales"], _SCALE_DTYPES, (groups, outputs), why)
    check_part("qzeros", parts["qzeros"], _WORD_DTYPES, (groups, words), why)
    return quantization.bits


def _check_gptq(parts: Parts, quantization: Quantization) -> int:
    rows, outputs = parts["qweight"].shape
    bits = quantization.bits
    g_idx = parts.get("g_idx")
    if g_idx is not None:
        check_part("g_idx", g_idx, _INDEX_DTYPES, (None,), "the group of each input")
        bits = _bits(rows, len(g_idx), parts, quantization)
    if rows * _WORD_BITS % bits != 0:
        raise ValueError(
            f"its qweight has {rows} rows of {_WORD_BITS} bits, which {bits}-bit levels do not fill"
        )
    inputs = rows * _WORD_BITS // bits
    mixed = quantization.mixed and g_idx is not None
    groups = len(parts["scales"]) if mixed else _groups(inputs, quantization.group_size)
    why = _because(inputs, outputs, "its own" if mixed else quantization.group_size)
    check_part("scales", parts["scales"], _SCALE_DTYPES, (groups, outputs), why)
    if "qzeros" in parts:
        check_part("qzeros", parts["qzeros"], _WORD_DTYPES, (groups, _words(outputs, bits)), why)
    elif not quantization.symmetric:
        raise ValueError("it has no qzeros, and the checkpoint is not symmetric")
    if g_idx is not None:
        _check_groups(g_idx, groups, -(-inputs // groups) if mixed else quantization.group_size)
    return bits


def _bits(rows: int, inputs: int, parts: Parts, quantization: Quantization) -> int:
    """The bits of a level by qweight's rows and g_idx's inputs; ValueError if there is no such
    number of bits, or if the layer's zero points have another."""
    stated = quantization.bits
    bits, rest = divmod(rows * _WORD_BITS, inputs)
    if bits == stated and rest == 0:
        return bits
    words = _words(parts["qweight"].shape[1], bits)
    qzeros = parts.get("qzeros")
    zero_points_agree = qzeros is None or qzeros.ndim < 2 or qzeros.shape[1] == words
    if rest != 0 or bits not in BITS["gptq"] or not zero_points_agree:
        raise ValueError(
            f"its parts do not fit: g_idx has {inputs} entries, and must have one for each of the "
            f"{rows * _WORD_BITS // stated} inputs that {rows} rows of qweight hold in {stated} bits"
        )
    return bits


def _check_groups(g_idx: torch.Tensor, groups: int, group_size: int) -> None:
    """Raise ValueError unless each group has `group_size` inputs, except the group of the remaining
    inputs."""
    low = int(g_idx.min())
    high = int(g_idx.max())
    if not 0 <= low <= high < groups:
        raise ValueError(
            f"its g_idx holds {low} to {high}, and must hold the groups 0 to {groups - 1}"
        )
    counts = torch.bincount(g_idx.to(torch.int64), minlength=groups).tolist()
    size = len(g_idx) if group_size == -1 else min(group_size, len(g_idx))
    rest = len(g_idx) - (groups - 1) * size
    if sorted(counts) != sorted([size] * (groups - 1) + [rest]):
        raise ValueError(
            f"its g_idx gives groups of {min(counts)} to {max(counts)} inputs, and every group must have {size}"
            + (f", but for one of {rest}" if rest != size else "")
        )


def _words(levels: int, bits: int) -> int:
    """The number of words that so many levels fill."""
    return -(-levels * bits // _WORD_BITS)


def _groups(inputs: int, group_size: int) -> int:
    """The number of groups."""
    return 1 if group_size == -1 else -(-inputs // group_size)


def _because(inputs: int, outputs: int, group_size: int | str) -> str:
    """The reason for the shapes of a layer, for messages."""
    size = "one group of all" if group_size == -1 else f"a group_size of {group_size}"
    return f"qweight has {inputs} inputs and {outputs} outputs, with {size}"
