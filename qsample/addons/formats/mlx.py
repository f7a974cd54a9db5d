"""The quantized layers of MLX: the stored tensors of a layer enter, its weight leaves.

MLX documents the modes:
https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.quantize.html
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from qsample.addons.formats.small_floats import as_float32, e2m1_matrix, scaled_matrix
from qsample.checkpoints.methods import ADVICE
from qsample.checkpoints.stored_matrices import (
    FloatMatrix,
    IntegerWeight,
    StoredMatrix,
    check_part,
    unpack_bits,
)
from qsample.checks import is_integer
from qsample.errors import UnsupportedModelError, shown

_AFFINE: Final = "affine"
_AFFINE_BITS: Final = (2, 3, 4, 5, 6, 8)
_SCALE_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class FloatMode:
    """A mode whose levels are floats.

    Attributes:
        bits: the bits of a level.
        group_size: the number of inputs that share a scale.
        scale_dtype: the dtype of the scales, which are stored as uint8.
    """

    bits: int
    group_size: int
    scale_dtype: torch.dtype


_FLOAT_MODES: Final = {
    "mxfp4": FloatMode(4, 32, torch.uint8),
    "nvfp4": FloatMode(4, 16, torch.float8_e4m3fn),
    "mxfp8": FloatMode(8, 32, torch.uint8),
}


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """How a layer is quantized.

    Attributes:
        mode: "affine", or the name of a mode of floats.
        bits: the bits of a level.
        group_size: the number of inputs that share a scale.
    """

    mode: str
    bits: int
    group_size: int


@dataclass(frozen=True, slots=True)
class Mlx:
    """The layout of MLX.

    Attributes:
        default: the options of the layers that `layers` does not name.
        layers: the options of single layers, by name.
    """

    default: LayerOptions
    layers: Mapping[str, LayerOptions]
    mark: ClassVar = "scales"
    parts: ClassVar = ("weight", "scales", "biases")
    unread: ClassVar = ()

    def matrix(self, layer: str, parts: Mapping[str, Tensor]) -> StoredMatrix | FloatMatrix:
        """The weight of a layer. Raises ValueError if the parts do not fit one another or the
        configuration.

        weight [N, K * bits / 32] uint32 holds the levels of a row as a stream of bits, from the low
        bits up. An affine weight is scales * level + biases, both [N, G].
        """
        options = self.layers.get(layer, self.default)
        weight = parts["weight"]
        if weight.ndim == 3:
            raise ValueError("it holds stacked experts, which cannot be read in mlx's layout")
        check_part("weight", weight, (torch.uint32,), (None, None), "outputs by words")
        bits = options.bits
        outputs = len(weight)
        inputs = weight.shape[1] * 32 // bits
        why = f"weight has {outputs} outputs, and {inputs} inputs in {bits} bits, in groups of {options.group_size}"
        if inputs % options.group_size != 0:
            raise ValueError(why)
        shape = (outputs, inputs // options.group_size)
        if options.mode != _AFFINE:
            return _floats(layer, parts, options, shape, why)
        scales = parts["scales"]
        biases = parts["biases"]
        for name, numbers in (("scales", scales), ("biases", biases)):
            check_part(name, numbers, _SCALE_DTYPES, shape, why)
        _check_finite(scales)
        _check_finite(biases)

        def read(rows: slice) -> IntegerWeight:
            levels = unpack_bits(weight[rows].numpy(), bits)
            scales_of_rows = as_float32(scales[rows]).numpy()
            offsets_of_rows = as_float32(biases[rows]).numpy()
            return IntegerWeight(bits, levels, scales_of_rows, offsets=offsets_of_rows)

        return StoredMatrix(layer, (outputs, inputs), read)


def _floats(
    layer: str,
    parts: Mapping[str, Tensor],
    options: LayerOptions,
    shape: tuple[int, int],
    why: str,
) -> StoredMatrix | FloatMatrix:
    """The weight of a layer in a mode of floats. shape, why: the shape of the scales, and its
    reason."""
    check_part("scales", parts["scales"], (torch.uint8,), shape, why)
    scales = parts["scales"].view(_FLOAT_MODES[options.mode].scale_dtype)
    _check_finite(scales)
    weight = parts["weight"]
    if options.bits == 8:
        e4m3 = weight.view(torch.float8_e4m3fn)
        return scaled_matrix(layer, e4m3, scales, (1, options.group_size))
    return e2m1_matrix(layer, weight, lambda rows: as_float32(scales[rows]))


def _check_finite(numbers: Tensor) -> None:
    if not torch.isfinite(as_float32(numbers)).all():
        raise ValueError("its scales or biases hold numbers that are infinite or none")


def read_options(options: Mapping[str, Any], model_id: str) -> Mlx:
    """How the weights are stored. Raises UnsupportedModelError for a mode that cannot be read.

    Args:
        options: the options of all layers, and the options of single layers by name.
        model_id: the model's name, for messages.
    """
    layers = {
        name: _layer_options(value, model_id)
        for name, value in options.items()
        if isinstance(value, Mapping)
    }
    return Mlx(_layer_options(options, model_id), layers)


def _layer_options(options: Mapping[str, Any], model_id: str) -> LayerOptions:
    """The options of a layer; a missing value is MLX's default."""
    mode = str(options.get("mode", _AFFINE))
    floats = _FLOAT_MODES.get(mode)
    bits = options.get("bits", 4 if floats is None else floats.bits)
    group_size = options.get("group_size", 64 if floats is None else floats.group_size)
    if floats is None:
        is_affine_bits = is_integer(bits) and bits in _AFFINE_BITS
        is_read = mode == _AFFINE and is_affine_bits and is_integer(group_size, 1)
    else:
        is_read = (bits, group_size) == (floats.bits, floats.group_size)
    if is_read:
        return LayerOptions(mode, int(bits), int(group_size))
    raise UnsupportedModelError(
        f"{model_id} is quantized with mlx in a form that cannot be read ({shown(mode, 40)}, bits {bits!r:.40}, "
        f"group_size {group_size!r:.40}); accepted are affine with {', '.join(map(str, _AFFINE_BITS))} bits and "
        f"{', '.join(_FLOAT_MODES)}, in mlx's own group sizes; {ADVICE}"
    )
