"""compressed-tensors, the format of vLLM's llm-compressor: the stored tensors of a layer enter, its weight leaves.

A layer's tensors tell how it is stored, so targets and `ignore` are not matched; the configuration has to agree. The
library defines the layouts: https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor

from qsample.checkpoints.integers import Bytes, IntegerWeight, StoredMatrix, check_part, unpack_bits
from qsample.checkpoints.methods import ADVICE
from qsample.checkpoints.small_floats import FloatMatrix, e2m1_matrix, floats_of, scaled_matrix
from qsample.checks import is_integer
from qsample.errors import UnsupportedModelError, listed, shown

_FORMATS: Final = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized")
_FORMATS_OF_FLOATS: Final = ("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized")
_SEVERAL: Final = "mixed-precision"
_FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32)
_E4M3: Final = torch.float8_e4m3fn
_WORD: Final = 32  # bits


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a group of layers is stored. kind: "int" or "float". block: rows and inputs that share a scale; None: all of
    them. symmetric: without zero points."""

    kind: str
    bits: int
    block: tuple[int | None, int | None]
    symmetric: bool


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """schemes: of the configuration's groups."""

    schemes: tuple[Scheme, ...]
    mark: ClassVar = "weight_scale"
    parts: ClassVar = (
        *(
            "weight",
            "weight_packed",
            "weight_scale",
            "weight_zero_point",
            "weight_shape",
            "weight_g_idx",
        ),
        "weight_global_scale",
    )
    unread: ClassVar = tuple(  # of activations and caches
        f"{of}_{what}"
        for of in ("input", "output", "q", "k", "v")
        for what in ("scale", "zero_point", "global_scale")
    )

    def matrix(self, layer: str, parts: Mapping[str, Tensor]) -> StoredMatrix | FloatMatrix:
        """The weight of a layer. Raises ValueError if the parts fit neither each other nor a scheme.

        weight_packed [N, K * bits / 32] int32 holds levels along K, weight_zero_point [N * bits / 32, G] along N. In
        their place may be int8: weight [N, K] of 8 bits, weight_zero_point [N, G]. weight_scale: [N, G], [N, 1] or [1].
        """
        scales = _matrix(parts["weight_scale"])
        check_part(
            "weight_scale", scales, (*_FLOATS, _E4M3, torch.uint8), (None, None), "rows by groups"
        )
        if not torch.isfinite(floats_of(scales)).all():
            raise ValueError("its scales hold numbers that are infinite or none")
        if "weight_packed" in parts and parts["weight_packed"].dtype == torch.uint8:
            return self._e2m1(layer, parts, scales)
        if "weight_packed" not in parts:
            check_part(
                "weight", parts["weight"], (torch.int8, _E4M3), (None, None), "outputs by inputs"
            )
            if parts["weight"].dtype == _E4M3:
                _, block = self._scheme("float", [8], parts["weight"].shape, scales)
                return scaled_matrix(layer, parts["weight"], scales, block)
        return self._integers(layer, parts, scales)

    def _integers(self, layer: str, parts: Mapping[str, Tensor], scales: Tensor) -> StoredMatrix:
        if (packed := parts.get("weight_packed")) is not None:
            check_part("weight_packed", packed, (torch.int32,), (None, None), "outputs by words")
            check_part(
                "weight_shape", parts["weight_shape"], (torch.int64, torch.int32), (2,), "N, K"
            )
            outputs, inputs = (int(size) for size in parts["weight_shape"])
            fitting = [
                bits for bits in range(2, 9) if packed.shape[1] == -(-inputs * bits // _WORD)
            ]
        else:
            (outputs, inputs), fitting = parts["weight"].shape, [8]
        if packed is not None and (len(packed) != outputs or not fitting):
            raise ValueError(
                f"weight_packed is {list(packed.shape)}, and its weight_shape says {[outputs, inputs]}"
            )
        groups, g_idx, zeros = (
            scales.shape[1],
            parts.get("weight_g_idx"),
            parts.get("weight_zero_point"),
        )
        zeros = None if zeros is None else _matrix(zeros)
        bits, _ = self._scheme("int", fitting, (outputs, inputs), scales, zeros)
        if zeros is not None:
            rows = len(scales) if zeros.dtype == torch.int8 else -(-outputs * bits // _WORD)
            why = f"weight_scale is {list(scales.shape)}"
            check_part("weight_zero_point", zeros, (torch.int8, torch.int32), (rows, groups), why)
            if zeros.dtype == torch.int8 and (_unsigned(zeros, bits) >= 2**bits).any():
                raise ValueError(f"its weight_zero_point holds more than {bits} bits")
        indices = None
        if g_idx is not None and (g_idx >= 0).all():  # -1: not in use
            check_part(
                "weight_g_idx",
                g_idx,
                (torch.int32, torch.int64),
                (inputs,),
                "the group of each input",
            )
            if int(g_idx.max()) >= groups:
                raise ValueError(
                    f"its weight_g_idx holds {int(g_idx.max())}, and it has {groups} groups"
                )
            indices = g_idx.numpy().astype(np.int64)

        def read(rows: slice) -> IntegerWeight:
            if packed is None:
                levels = _unsigned(parts["weight"][rows], 8)
            else:
                levels = unpack_bits(packed[rows].numpy(), bits)[:, :inputs]
            zero_points = None
            if zeros is not None and zeros.dtype == torch.int8:
                zero_points = _unsigned(zeros.expand(outputs, -1)[rows], bits)
            elif zeros is not None:
                words = zeros[rows.start * bits // _WORD : -(-rows.stop * bits // _WORD)].numpy()
                zero_points = unpack_bits(words.T, bits)[:, : rows.stop - rows.start].T
            of_rows = floats_of(scales.expand(outputs, -1)[rows]).numpy()
            return IntegerWeight(bits, levels, of_rows, zero_points, groups=indices)

        return StoredMatrix(layer, (outputs, inputs), read)

    def _e2m1(self, layer: str, parts: Mapping[str, Tensor], scales: Tensor) -> StoredMatrix:
        packed, step = parts["weight_packed"], parts.get("weight_global_scale")
        check_part(
            "weight_packed", packed, (torch.uint8,), (None, None), "outputs by pairs of inputs"
        )
        self._scheme("float", [4], (len(packed), packed.shape[1] * 2), scales)
        if step is not None:
            step = step.reshape(-1)
            check_part("weight_global_scale", step, (torch.float32,), (1,), "of the matrix")
            if not torch.isfinite(floats_of(scales) / step).all():
                raise ValueError("its weight_global_scale is no step")

        def of_rows(rows: slice) -> Tensor:
            found = floats_of(scales[rows])
            return found if step is None else found / step

        return e2m1_matrix(layer, packed, of_rows)

    def _scheme(
        self,
        kind: str,
        fitting: list[int],
        shape: Sequence[int],
        scales: Tensor,
        zeros: Tensor | None = None,
    ) -> tuple[int, tuple[int, int]]:
        """The bits and the block of the scheme that a layer has. fitting: bits that its weight may have."""
        outputs, inputs = shape
        for scheme in self.schemes:
            rows, columns = scheme.block[0] or outputs, scheme.block[1] or inputs
            fits = (
                scheme.kind == kind
                and scheme.bits in fitting
                and (scheme.symmetric or zeros is not None)
                and scales.shape == (-(-outputs // rows), inputs / columns)
            )
            if fits:
                return scheme.bits, (rows, columns)
        raise ValueError(
            f"its weight is {list(shape)}, {kind} of {' or '.join(map(str, fitting))} bits, its weight_scale "
            f"{list(scales.shape)}, with{'out' if zeros is None else ''} weight_zero_point, and no group of the "
            "configuration is stored so"
        )


def read_options(options: Mapping[str, Any], model_id: str) -> CompressedTensors:
    """The configuration's schemes. Warns of quantized activations, which stay float. Raises UnsupportedModelError for
    formats that cannot be read."""
    options = options.get("quantization_config") or options
    groups = options.get("config_groups")
    groups = groups if isinstance(groups, dict) else {}
    schemes, activations = set(), []
    sparse = options.get("sparsity_config") or {}
    problem = ""
    if isinstance(sparse, dict) and sparse.get("format", "dense") != "dense":
        problem = f"its weights are sparse ({shown(sparse['format'], 40)})"
    elif options.get("transform_config"):
        problem = "it transforms activations (transform_config)"
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            continue
        form = group.get("format") or options.get("format")
        if form not in (*_FORMATS, *_FORMATS_OF_FLOATS, _SEVERAL):
            problem = problem or f"its format is {shown(form, 40)}"
        if any(group.get(part) for part in ("input_activations", "output_activations")):
            activations.append("the inputs of products")
        scheme = _scheme(weights)
        if scheme is None:
            problem = problem or f"{name} has weights of {_described(weights)}"
        else:
            schemes.add(scheme)
    if not problem and not schemes:
        problem = "its config_groups have no weights"
    if problem:
        raise UnsupportedModelError(
            f"{model_id} is quantized with compressed-tensors in a form that cannot be read: {problem}; accepted are "
            f"{', '.join((*_FORMATS, *_FORMATS_OF_FLOATS))}, integers of 2 to 8 bits and floats of 4 or 8; {ADVICE}"
        )
    if options.get("kv_cache_scheme"):
        activations.append("keys and values")
    if activations:
        warnings.warn(
            f"{model_id} also quantizes {listed(set(activations))}, at run time; they stay float here, and the weights "
            "are the checkpoint's",
            stacklevel=2,
        )
    return CompressedTensors(tuple(sorted(schemes, key=repr)))


def _scheme(weights: Mapping[str, Any]) -> Scheme | None:
    """None: cannot be read."""
    kind, bits, strategy = (
        weights.get("type", "int"),
        weights.get("num_bits", 8),
        weights.get("strategy"),
    )
    symmetric = weights.get("symmetric", True) is not False
    size, block = weights.get("group_size"), weights.get("block_structure")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if (
        kind not in ("int", "float")
        or not is_integer(bits, 2 if kind == "int" else 4, 8)
        or (kind == "float" and bits not in (4, 8))
    ):
        return None
    if strategy in ("group", "tensor_group") and is_integer(size, 1):
        return Scheme(kind, bits, (1, size), symmetric)
    if strategy in ("channel", "tensor"):
        return Scheme(kind, bits, (1 if strategy == "channel" else None, None), symmetric)
    if strategy == "block" and kind == "float" and isinstance(block, list) and len(block) == 2:
        return (
            Scheme(kind, bits, (block[0], block[1]), symmetric)
            if all(is_integer(n, 1) for n in block)
            else None
        )
    return None


def _described(weights: Mapping[str, Any]) -> str:
    names = ("type", "num_bits", "strategy", "group_size", "block_structure")
    return shown({name: weights[name] for name in names if weights.get(name) is not None}, 120)


def _matrix(numbers: Tensor) -> Tensor:
    """One number, or one for each row, as [N, 1]."""
    return numbers.reshape(-1, 1) if numbers.ndim < 2 else numbers


def _unsigned(numbers: Tensor, bits: int) -> Bytes:
    """int8 as levels, with the middle of `bits` for 0."""
    levels: Bytes = numbers.numpy().view(np.uint8) + np.uint8(2 ** (bits - 1))
    return levels
