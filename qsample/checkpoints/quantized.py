"""The matrices of a quantized checkpoint enter. They leave twice: as float weights, computed when
they are needed, and as the same integers in blocks, for the layers of the loaded model.

A float weight is a placeholder (`transforms.deferred`), which identifies its layer wherever
transformers puts it. Weights that transformers merges, or that an adapter changes, stay float.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from qsample.checkpoints.block_store import BlockStore
from qsample.checkpoints.stored_matrices import FloatMatrix, StoredExperts, StoredMatrix
from qsample.contract.tensors import BLOCK_SIZES
from qsample.errors import QsampleError, listed
from qsample.transforms.deferred import SMALLEST, Deferred, defer, deferred, numbers
from qsample.transforms.quantized_experts import set_quantized_experts
from qsample.transforms.quantized_linear import QuantizedWeight, set_quantized_weight


@dataclass(frozen=True, slots=True)
class QuantizedCheckpoint:
    """A quantized checkpoint as float, and the blocks of its layers.

    Attributes:
        weights: every tensor by name; a quantized tensor is a placeholder.
        layers: the names of the quantized layers by their placeholders.
        without_blocks: the names of the layers that no block size fits; they stay float.
        biases: the names of the layers' biases, except zeros, which some tools write everywhere.
        blocks: the blocks of the other layers, by name.
        experts: the quantized experts by the placeholders of their parameters; `blocks` has their
            blocks by the name of the parameter.
    """

    weights: dict[str, Tensor]
    layers: Mapping[Deferred, str]
    without_blocks: tuple[str, ...]
    biases: frozenset[str]
    blocks: BlockStore
    experts: Mapping[Deferred, StoredExperts] = field(default_factory=dict)

    def attach(self, model: PreTrainedModel) -> int:
        """Give the layers of a model the blocks of their weights, which stay mapped from their
        file.

        Warns of layers that stay float. Returns the number of layers that have blocks.
        """
        attached = set[str]()  # names, so that a tied table counts once
        for layer in model.modules():
            weight = getattr(layer, "weight", None)
            placeholder = deferred(weight) if isinstance(weight, Tensor) else None
            if weight is None or placeholder is None or placeholder not in self.layers:
                continue
            name = self.layers[placeholder]
            blocks = None
            if name in self.blocks and weight.is_contiguous():
                blocks = self.blocks.read(name)
            if blocks is not None and _takes_blocks(layer, blocks):
                set_quantized_weight(layer, blocks)
                attached.add(name)
            elif weight.numel() < SMALLEST:
                layer.weight = nn.Parameter(numbers(weight.detach()), requires_grad=False)
        self._warn_of_floats(float_layers=len(self.layers) - len(attached))
        self._attach_experts(model)
        return len(attached)

    def _attach_experts(self, model: PreTrainedModel) -> None:
        """Give modules of experts the blocks of their parameters."""
        for module in model.modules():
            for name, weight in [*module.named_parameters(recurse=False)]:
                placeholder = deferred(weight)
                if placeholder is None or placeholder not in self.experts:
                    continue
                experts = self.experts[placeholder]
                blocks = self.blocks.read(experts.parameter)
                set_quantized_experts(module, name, blocks, experts.count)
                if weight.numel() < SMALLEST:
                    setattr(module, name, nn.Parameter(numbers(weight.detach()), False))

    def _warn_of_floats(self, float_layers: int) -> None:
        """Warn of the number of layers that stay float."""
        reasons = []
        if self.without_blocks:
            count = len(self.without_blocks)
            reasons.append(
                f"{count} because no block of {min(BLOCK_SIZES)} inputs lies within one group"
            )
        changed = float_layers - len(self.without_blocks)
        if changed > 0:
            reasons.append(
                f"{changed} because they were merged into other weights, or changed by an adapter"
            )
        if reasons:
            warnings.warn(
                f"{float_layers} of {len(self.layers)} quantized matrices become float: {'; '.join(reasons)}",
                stacklevel=3,
            )

    def check_loaded(
        self, model_id: str, missing: Collection[str], unexpected: Collection[str]
    ) -> None:
        """Raise QsampleError if the checkpoint lacks weights of the model, or has a layer or a bias
        that the model lacks.

        Args:
            model_id: the checkpoint's name, for messages.
            missing: the names of weights that the checkpoint lacks.
            unexpected: the names of weights that the model lacks.
        """
        quantized = {f"{layer}.weight" for layer in self.layers.values()} | self.biases
        lost = quantized & set(unexpected)
        if missing or lost:
            problem = f"has {listed(lost)}, which the model does not know"
            if missing:
                problem = f"lacks {listed(missing)}"
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
    experts: Iterable[StoredExperts] = (),
) -> QuantizedCheckpoint:
    """Write the blocks of matrices, with a part of one matrix in memory at a time.

    Args:
        weights: the checkpoint's other tensors, by name.
        matrices: the quantized weights.
        scratch: a folder that lives as long as the result; the blocks are written into a new folder
            inside it.
        dtype: the dtype of float weights, scales and offsets.
        shapes: the shapes of the model's weights, as in `checkpoint.Outline`.
        transposed: the layers that hold their weight as [in, out], as in `checkpoint.Outline`.
        biases: the names of the layers' biases, as in `QuantizedCheckpoint`.
        experts: the quantized experts, whose float parameters are placeholders in `weights`.

    Raises:
        QsampleError: if a matrix does not fit the model.
    """
    weights = dict(weights)
    layers = {}
    without_blocks = []
    blocks = BlockStore(scratch / "qsample-blocks")
    for matrix in matrices:
        is_transposed = matrix.layer.rpartition(".")[2] in transposed
        weight = _float_weight(matrix, dtype, is_transposed)
        _check_shape(matrix.layer, weight, shapes)
        weights[f"{matrix.layer}.weight"] = weight
        if isinstance(matrix, FloatMatrix):
            if weight.numel() < SMALLEST:
                weights[f"{matrix.layer}.weight"] = numbers(weight)
            continue
        placeholder = deferred(weight)
        assert placeholder is not None
        layers[placeholder] = matrix.layer
        if not blocks.add(matrix.layer, (part.blocks(dtype) for part in matrix.parts())):
            without_blocks.append(matrix.layer)
    experts_by_placeholder = {}
    for one in experts:
        placeholder = deferred(weights[one.parameter])
        assert placeholder is not None
        if blocks.add(one.parameter, (part.blocks(dtype) for part in one.matrix.parts())):
            experts_by_placeholder[placeholder] = one
    return QuantizedCheckpoint(
        weights,
        layers,
        tuple(without_blocks),
        frozenset(biases),
        blocks,
        experts_by_placeholder,
    )


def _takes_blocks(layer: nn.Module, blocks: QuantizedWeight) -> bool:
    """Whether a layer computes nothing else with its weight than a product, or a row of a table."""
    if isinstance(layer, nn.Embedding):
        # With a norm, a table changes when it is read.
        return layer.max_norm is None and blocks.order is None
    # Subclasses may compute more.
    return type(layer).forward in (nn.Linear.forward, Conv1D.forward)


def conv1d_names(model: nn.Module) -> frozenset[str]:
    """The last names of a model's layers that hold their weight as [K, N]."""
    return frozenset(
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, Conv1D)
    )


def _float_weight(
    matrix: StoredMatrix | FloatMatrix, dtype: torch.dtype, is_transposed: bool
) -> Tensor:
    """A placeholder for the float weight of a layer. is_transposed: whether the model has it as [K,
    N]."""
    outputs, inputs = matrix.shape
    shape = (inputs, outputs) if is_transposed else (outputs, inputs)

    def compute() -> Tensor:
        weight = torch.from_numpy(matrix.floats()).to(dtype)
        return weight.T.contiguous() if is_transposed else weight

    return defer(shape, dtype, compute, dtype)


def _check_shape(layer: str, weight: Tensor, shapes: Mapping[str, torch.Size]) -> None:
    """Raise QsampleError if the model's weight has another shape. transformers renames some
    weights, which are not in `shapes`, and checks these when it loads them."""
    wanted = shapes.get(f"{layer}.weight")
    if wanted is not None and weight.shape != wanted:
        raise QsampleError(
            f"the quantized layer {layer} stands for a weight of {list(weight.shape)}, and the model's is "
            f"{list(wanted)}; the checkpoint is damaged, or of another model or number of bits than it says"
        )
