"""The quantized layers of MLX: the stored tensors of a layer enter, its weight leaves.

MLX documents the modes: https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.quantize.html
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from qsample.checkpoints.integers import IntegerWeight, StoredMatrix, check_part, unpack_bits
from qsample.checkpoints.methods import ADVICE
from qsample.checkpoints.small_floats import FloatMatrix, e2m1_matrix, floats_of, scaled_matrix
from qsample.checks import is_integer
from qsample.errors import UnsupportedModelError, shown

_AFFINE: Final = "affine"
# Modes of floats: bits, inputs that share a scale, the dtype of the scales.
_FLOATS: Final = {
    "mxfp4": (4, 32, torch.uint8),
    "nvfp4": (4, 16, torch.float8_e4m3fn),
    "mxfp8": (8, 32, torch.uint8),
}
_BITS: Final = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """bits: of a level. group_size: inputs that share a scale."""

    mode: str
    bits: int
    group_size: int


@dataclass(frozen=True, slots=True)
class Mlx:
    """default: of the layers that `layers` does not name."""

    default: LayerOptions
    layers: Mapping[str, LayerOptions]
    mark: ClassVar = "scales"
    parts: ClassVar = ("weight", "scales", "biases")
    unread: ClassVar = ()

    def matrix(self, layer: str, parts: Mapping[str, Tensor]) -> StoredMatrix | FloatMatrix:
        """The weight of a layer. Raises ValueError if the parts do not fit one another or the configuration.

        weight [N, K * bits / 32] uint32 has the levels of a row as a stream of bits, from the low bits up. An affine
        weight is scales * level + biases, both [N, G].
        """
        options = self.layers.get(layer, self.default)
        weight, scales = parts["weight"], parts["scales"]
        biases = parts["biases"] if options.mode == _AFFINE else None
        if weight.ndim == 3:
            raise ValueError("it holds stacked experts, which cannot be read in mlx's layout")
        check_part("weight", weight, (torch.uint32,), (None, None), "outputs by words")
        bits, outputs = options.bits, len(weight)
        inputs = weight.shape[1] * 32 // bits
        why = f"weight has {outputs} outputs, and {inputs} inputs in {bits} bits, in groups of {options.group_size}"
        if inputs % options.group_size:
            raise ValueError(why)
        shape = (outputs, inputs // options.group_size)
        dtypes = (
            (torch.uint8,) if biases is None else (torch.float16, torch.bfloat16, torch.float32)
        )
        check_part("scales", scales, dtypes, shape, why)
        if biases is None:
            scales = scales.view(_FLOATS[options.mode][2])
        else:
            check_part("biases", biases, dtypes, shape, why)
        for numbers in (scales, biases):
            if numbers is not None and not torch.isfinite(floats_of(numbers)).all():
                raise ValueError("its scales or biases hold numbers that are infinite or none")
        if options.mode == "mxfp8":
            return scaled_matrix(
                layer, weight.view(torch.float8_e4m3fn), scales, (1, options.group_size)
            )
        if biases is None:
            return e2m1_matrix(layer, weight, lambda rows: floats_of(scales[rows]))
        offsets = biases

        def read(rows: slice) -> IntegerWeight:
            levels = unpack_bits(weight[rows].numpy(), bits)
            of_rows = floats_of(scales[rows]).numpy()
            return IntegerWeight(bits, levels, of_rows, offsets=floats_of(offsets[rows]).numpy())

        return StoredMatrix(layer, (outputs, inputs), read)


def read_options(options: Mapping[str, Any], model_id: str) -> Mlx:
    """options: of all layers, and of layers by name. Raises UnsupportedModelError for a mode that cannot be read."""
    layers = {name: value for name, value in options.items() if isinstance(value, Mapping)}
    return Mlx(
        _layer_options(options, model_id),
        {name: _layer_options(value, model_id) for name, value in layers.items()},
    )


def _layer_options(options: Mapping[str, Any], model_id: str) -> LayerOptions:
    """A missing value is MLX's default."""
    mode = str(options.get("mode", _AFFINE))
    bits, group_size, _ = _FLOATS.get(mode, (4, 64, None))
    given = options.get("bits", bits), options.get("group_size", group_size)
    is_affine = (
        mode == _AFFINE
        and is_integer(given[0], 2, 8)
        and given[0] in _BITS
        and is_integer(given[1], 1)
    )
    if is_affine or (mode in _FLOATS and given == (bits, group_size)):
        return LayerOptions(mode, *(given if is_affine else (bits, group_size)))
    raise UnsupportedModelError(
        f"{model_id} is quantized with mlx in a form that cannot be read ({shown(mode, 40)}, bits {given[0]!r:.40}, "
        f"group_size {given[1]!r:.40}); accepted are affine with {', '.join(map(str, _BITS))} bits and "
        f"{', '.join(_FLOATS)}, in mlx's own group sizes; {ADVICE}"
    )
