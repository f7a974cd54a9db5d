"""The matrices of a checkpoint with integers of its own enter: as float weights, computed when needed, and as the same
integers in blocks for the layers of the loaded model they leave. Neither the library that quantized the checkpoint nor
a GPU is needed.

A float weight is a placeholder (`transforms.deferred`); it identifies its layer wherever transformers puts it. Weights
that transformers merges, or an adapter changes, stay float.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from qsample.checkpoints.block_store import BlockStore
from qsample.checkpoints.stored_matrices import FloatMatrix, StoredMatrix
from qsample.contract.tensors import BLOCK_SIZES
from qsample.errors import QsampleError, listed
from qsample.transforms.deferred import SMALLEST, Deferred, defer, deferred, numbers
from qsample.transforms.quantized_linear import QuantizedWeight, set_quantized_weight


@dataclass(frozen=True, slots=True)
class QuantizedCheckpoint:
    """A quantized checkpoint as float, and the blocks of its layers.

    Attributes:
        weights: every tensor by name; a quantized tensor is a placeholder.
        layers: the placeholders of the quantized layers, with their names.
        without_blocks: names of the layers that no block size fits; they stay float.
        biases: names of the layers' biases, except zeros: some tools write these everywhere.
        blocks: of the other layers, by name.
    """

    weights: dict[str, Tensor]
    layers: Mapping[Deferred, str]
    without_blocks: tuple[str, ...]
    biases: frozenset[str]
    blocks: BlockStore

    def attach(self, model: PreTrainedModel) -> int:
        """Give each layer of `model` whose weight was read from blocks those blocks, still mapped from their file.
        Warns of layers that stay float; returns how many layers have blocks."""
        attached = set()  # a tied table counts once
        for layer in model.modules():
            weight = getattr(layer, "weight", None)
            found = deferred(weight) if isinstance(weight, Tensor) else None
            if found not in self.layers or found is None or weight is None:
                continue
            key = self.layers[found]
            blocks = (
                self.blocks.read(key) if key in self.blocks and weight.is_contiguous() else None
            )
            if blocks is not None and _takes(layer, blocks):
                set_quantized_weight(layer, blocks)
                attached.add(key)
            elif weight.numel() < SMALLEST:
                layer.weight = nn.Parameter(numbers(weight.detach()), requires_grad=False)
        reasons = []
        if self.without_blocks:
            count = len(self.without_blocks)
            reasons.append(
                f"{count} because no block of {min(BLOCK_SIZES)} inputs lies within one group"
            )
        stay = len(self.layers) - len(attached)
        if (rest := stay - len(self.without_blocks)) > 0:
            reasons.append(
                f"{rest} because they were merged into other weights, or changed by an adapter"
            )
        if reasons:
            warnings.warn(
                f"{stay} of {len(self.layers)} quantized matrices become float: {'; '.join(reasons)}",
                stacklevel=2,
            )
        return len(attached)

    def check_loaded(
        self, model_id: str, missing: Collection[str], unexpected: Collection[str]
    ) -> None:
        """Raise QsampleError if the checkpoint lacks weights of the model, or has a layer or bias too many."""
        lost = sorted(
            set(unexpected) & ({f"{layer}.weight" for layer in self.layers.values()} | self.biases)
        )
        if missing or lost:
            problem = (
                f"lacks {listed(missing)}"
                if missing
                else f"has {listed(lost)}, which the model does not know"
            )
            raise QsampleError(
                f"{model_id} {problem}; it is damaged, or of another model than it says"
            )


def read_quantized(
    weights: dict[str, Tensor],
    matrices: Iterable[StoredMatrix | FloatMatrix],
    scratch: Path,
    *,
    dtype: torch.dtype,
    shapes: Mapping[str, torch.Size],
    transposed: Collection[str] = (),
    biases: Collection[str] = (),
) -> QuantizedCheckpoint:
    """Write the blocks of `matrices`, a part of one in memory at a time.

    Args:
        weights: the checkpoint's other tensors, by name.
        scratch: a folder that lives as long as the result; the blocks are written into a new folder inside it.
        dtype: of float weights, scales and offsets.
        shapes, transposed: of the model that the checkpoint will be loaded into, as in `checkpoint.Outline`.
        biases: as in `QuantizedCheckpoint`.

    Raises QsampleError if a matrix does not fit the model.
    """
    weights, layers, without_blocks = dict(weights), {}, []
    blocks = BlockStore(scratch / "qsample-blocks")
    for matrix in matrices:
        turned = matrix.layer.rpartition(".")[2] in transposed
        weight = _float_weight(matrix, dtype, turned)
        _check_shape(matrix.layer, weight, shapes)
        weights[f"{matrix.layer}.weight"] = weight
        if isinstance(matrix, FloatMatrix):
            if weight.numel() < SMALLEST:
                weights[f"{matrix.layer}.weight"] = numbers(weight)
            continue
        found = deferred(weight)
        assert found is not None
        layers[found] = matrix.layer
        if not blocks.add(matrix.layer, (part.blocks(dtype) for part in matrix.parts())):
            without_blocks.append(matrix.layer)
    return QuantizedCheckpoint(weights, layers, tuple(without_blocks), frozenset(biases), blocks)


def _takes(layer: nn.Module, blocks: QuantizedWeight) -> bool:
    if isinstance(layer, nn.Embedding):
        return (
            layer.max_norm is None and blocks.order is None
        )  # with a norm, a table changes when it is read
    return type(layer).forward in (
        nn.Linear.forward,
        Conv1D.forward,
    )  # subclasses may do more than that


def conv1d_names(model: nn.Module) -> frozenset[str]:
    """Last names of the layers of `model` that hold their weight as [K, N]."""
    return frozenset(
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, Conv1D)
    )


def _float_weight(matrix: StoredMatrix | FloatMatrix, dtype: torch.dtype, turned: bool) -> Tensor:
    """A placeholder for the float weight of a layer; `turned`: the model has it as [K, N]."""

    def compute() -> Tensor:
        weight = torch.from_numpy(matrix.floats()).to(dtype)
        return weight.T.contiguous() if turned else weight

    return defer(matrix.shape[::-1] if turned else matrix.shape, dtype, compute, dtype)


def _check_shape(layer: str, weight: Tensor, shapes: Mapping[str, torch.Size]) -> None:
    """`shapes`: of the model's weights, except renamed weights: transformers' loading checks those."""
    wanted = shapes.get(f"{layer}.weight")
    if wanted is not None and weight.shape != wanted:
        raise QsampleError(
            f"the quantized layer {layer} stands for a weight of {list(weight.shape)}, and the model's is "
            f"{list(wanted)}; the checkpoint is damaged, or of another model or number of bits than it says"
        )
