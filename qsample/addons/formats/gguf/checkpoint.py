"""A GGUF file as a `Checkpoint`: its metadata are the configuration and the tokenizer, its float
weights stay in the file, and its integers stay integers."""

from __future__ import annotations

import functools
import warnings
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from qsample.addons.formats.gguf.file import GgufFile, GgufTensor
from qsample.addons.formats.gguf.models import (
    ExpertLayout,
    Weight,
    configuration,
    family_of,
    prediction_layers,
    weights_by_type,
    weights_of,
)
from qsample.addons.formats.gguf.tokenizer import stop_ids, tokenizer_of
from qsample.addons.formats.gguf.types import FLOATS, read_rows, symmetric_types
from qsample.checkpoints.checkpoint import Checkpoint
from qsample.checkpoints.mapped_weights import Place, in_float32
from qsample.checkpoints.quantized import QuantizedCheckpoint, read_quantized
from qsample.checkpoints.source import origin_of
from qsample.checkpoints.stored_matrices import (
    IntegerWeight,
    StoredExperts,
    StoredMatrix,
    in_turns,
)
from qsample.checks import is_number
from qsample.errors import UnsupportedModelError
from qsample.package.disk.source_files import SourceFiles
from qsample.transforms.deferred import SMALLEST, defer

# The keys of recommended sampling, behind "general.sampling.", and transformers' names of these
# settings.
_SAMPLING_KEYS: Final = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
}


class GgufCheckpoint(Checkpoint):
    """A GGUF file. Its weights are float32 or integers; the matrices that an adapter changes become
    float."""

    _configured_by = "metadata"
    _needs_scratch = True

    def __init__(
        self, file: GgufFile, model_id: str, dtype: str = "float32", **options: Any
    ) -> None:
        """The checkpoint of a file.

        Args:
            file: the header of the file.
            model_id: the path, or the hub id and the name of the file, for messages.
            dtype: the dtype of the weights, as `Checkpoint` takes it.
            options: the other options of `Checkpoint`.
        """
        super().__init__(model_id, dtype, **options)
        self.file = file
        for key, number in file.strange_ids():
            warnings.warn(
                f"{model_id}: {key} is {number}, and the file has {file.token_count} tokens; the id counts as missing",
                stacklevel=2,
            )

    @cached_property
    def config(self) -> PretrainedConfig:
        with self._config_errors():
            stops = stop_ids(self.file) or None
            config: PretrainedConfig = AutoConfig.for_model(**self._settings, eos_token_id=stops)
            return config

    @cached_property
    def _settings(self) -> dict[str, Any]:
        return configuration(self.file)

    @property
    def _weight_type(self) -> str:  # type: ignore[override]
        ((most, _),) = weights_by_type(self.file).most_common(1)
        return most

    @cached_property
    def dtype(self) -> str:
        return "float16" if self._dtype == "float16" else "float32"

    @cached_property
    def generation_config(self) -> GenerationConfig:
        """The tokens that begin and end texts, and the sampling that the file recommends."""
        settings: dict[str, Any] = {}
        for theirs, ours in _SAMPLING_KEYS.items():
            value = self.file.metadata.get(f"general.sampling.{theirs}")
            if is_number(value, 0, 1e6):
                settings[ours] = value
        if settings.get("temperature") == 0:  # llama.cpp's greedy tokens
            settings = {"do_sample": False}
        elif settings:
            settings["do_sample"] = True
        tokens = {
            name: getattr(self.config, name)
            for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        }
        with self._config_errors():
            return GenerationConfig(**tokens, **settings)  # type: ignore[no-untyped-call]

    def _origin(self, sources: SourceFiles) -> tuple[tuple[str, str | None], dict[str, Path]]:
        path = self.file.path
        name, revision = origin_of(str(path))
        file_id = path.name if revision is None else f"{name}/{path.name}"
        return (file_id, revision), {path.name: path}

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return tokenizer_of(self.file) if self.tokenizer_id == "auto" else super().tokenizer

    def load(
        self,
        dtype: str | None = None,
        scratch: Path | None = None,
        sources: SourceFiles | None = None,
    ) -> PreTrainedModel:
        """As `Checkpoint.load`. Raises UnsupportedModelError for float16."""
        chosen = self.dtype if dtype is None else dtype
        if chosen != "float32":
            raise UnsupportedModelError(
                f"{self.model_id}: dtype is {chosen}, and the scales of its weights are float32; leave "
                "dtype out, or compile with dtype='bfloat16' for cuda"
            )
        return super().load(dtype, scratch, sources)

    def _stored(
        self, dtype: torch.dtype, scratch: Path | None, sources: SourceFiles
    ) -> QuantizedCheckpoint:
        assert scratch is not None
        sources.add([self.file.path])
        weights: dict[str, Tensor] = {}
        matrices = []
        experts = []
        float_types = set[str]()
        left_out = prediction_layers(self.file)
        if left_out:
            names = ", ".join(f"blk.{layer}" for layer in left_out)
            warnings.warn(
                f"{self.model_id}: its layers for the prediction of further tokens ({names}) are left out",
                stacklevel=2,
            )
        for name, weight in weights_of(self.file, self._settings).items():
            if _is_matrix_of_integers(name, weight):
                tensor = weight.tensors[0]
                read = functools.partial(_rows, self.file, tensor, weight)
                layer = name.removesuffix(".weight")
                matrices.append(StoredMatrix(layer, (tensor.shape[0], tensor.shape[1]), read))
            elif (stored := _stored_experts(self.file, name, weight)) is not None:
                experts.append(stored)
                weights[name] = _float(self.file, weight, smallest=0)
            else:
                weights[name] = _float(self.file, weight)
                if weight.experts is not None:
                    float_types |= {tensor.type for tensor in weight.tensors} - FLOATS.keys()
        if float_types:
            warnings.warn(
                f"{self.model_id}: experts of the type {' and '.join(sorted(float_types))} become float32, computed "
                "layer by layer: experts stay integers if gate and up have one type and it is one of "
                f"{', '.join(symmetric_types())}; compile's weights='int4' or 'int8' rounds the others",
                stacklevel=2,
            )
        biases = frozenset(weights)
        shapes = self.outline.shapes
        if family_of(self.file).has_optional_biases:
            for name in shapes.keys() - biases:
                if name.endswith(".bias"):
                    weights[name] = torch.zeros(shapes[name])
        stored_matrices = [*matrices, *(one.matrix for one in experts)]
        needed_bytes = sum(matrix.bytes_in_blocks(dtype) for matrix in stored_matrices)
        with self._room_for_blocks(scratch, needed_bytes):
            return read_quantized(
                weights,
                matrices,
                scratch,
                dtype=dtype,
                shapes=shapes,
                biases=biases,
                experts=experts,
            )


def _is_matrix_of_integers(name: str, weight: Weight) -> bool:
    """Whether a weight is the matrix of a layer that is read as integers."""
    tensor = weight.tensors[0]
    is_quantized = tensor.type not in FLOATS
    is_matrix = len(tensor.shape) == 2 and weight.shape is None and name.endswith(".weight")
    return is_quantized and is_matrix and weight.experts is None


def _rows(file: GgufFile, tensor: GgufTensor, weight: Weight, rows: slice) -> IntegerWeight:
    """Some rows of a weight, which may be other rows of its tensor, or have their inputs in another
    order."""
    order = weight.order
    if order is None:
        return read_rows(file, tensor, rows)
    if order.axis == 0:
        return read_rows(file, tensor, order.places[rows])
    return read_rows(file, tensor, rows).inputs(order.places)


def _stored_experts(file: GgufFile, name: str, weight: Weight) -> StoredExperts | None:
    """The integers of experts; None for biases, and for types that stay float."""
    types = {tensor.type for tensor in weight.tensors}
    first = weight.tensors[0]
    if weight.experts is None or len(first.shape) != 3 or len(types) > 1:
        return None
    if first.type not in symmetric_types():
        return None
    count, outputs, inputs = first.shape
    rows = count * outputs * len(weight.tensors)
    read = functools.partial(_rows_of_experts, file, weight.tensors)
    if len(weight.tensors) == 1 and name.endswith("gate_up_proj"):
        read = functools.partial(_rows_of_joined_experts, file, first)
    return StoredExperts(name, count, StoredMatrix(name, (rows, inputs), read))


def _rows_of_experts(file: GgufFile, tensors: tuple[GgufTensor, ...], rows: slice) -> IntegerWeight:
    """Some rows of all experts' matrices: of a single tensor, or of gate and up in turns."""
    if len(tensors) == 1:
        return read_rows(file, tensors[0], rows)
    pairs = slice(rows.start // 2, -(-rows.stop // 2))
    gate, up = (read_rows(file, tensor, pairs) for tensor in tensors)
    start = rows.start - 2 * pairs.start
    return in_turns(gate, up).rows(slice(start, start + rows.stop - rows.start))


def _rows_of_joined_experts(file: GgufFile, tensor: GgufTensor, rows: slice) -> IntegerWeight:
    """Some rows of gate and up in turns, of a tensor in which each expert has all rows of gate, and
    then those of up."""
    outputs = tensor.shape[1]
    experts, outputs_of_experts = np.divmod(np.arange(rows.start, rows.stop), outputs)
    pairs, halves = np.divmod(outputs_of_experts, 2)
    return read_rows(file, tensor, experts * outputs + halves * (outputs // 2) + pairs)


def _float(file: GgufFile, weight: Weight, smallest: int = SMALLEST) -> Tensor:
    """A weight as float: in the file, or computed when it is needed if it has `smallest` numbers or
    more."""
    tensors = weight.tensors
    first = tensors[0]
    is_unchanged = weight == Weight(tensors)
    if first.type in FLOATS and is_unchanged:
        return in_float32(_tensor(file, first), Place(file.path, first.offset, first.length))
    dtypes = {FLOATS.get(tensor.type, "float32") for tensor in tensors}
    keeps_dtype = len(dtypes) == 1 and weight.shift == 0 and not weight.is_logarithm
    dtype = getattr(torch, dtypes.pop() if keeps_dtype else "float32")
    empty = [torch.empty(tensor.shape, device="meta") for tensor in tensors]
    shape = _assembled(empty, weight).shape

    def compute() -> Tensor:
        return _assembled([_tensor(file, tensor).to(dtype) for tensor in tensors], weight)

    if shape.numel() < smallest:
        return compute().to(torch.float32)
    return defer(shape, torch.float32, compute, dtype)


def _assembled(tensors: list[Tensor], weight: Weight) -> Tensor:
    """The numbers of a weight, from the numbers of its tensors."""
    whole = tensors[0]
    if weight.order is not None:
        whole = whole.index_select(
            weight.order.axis, torch.from_numpy(weight.order.places).to(whole.device)
        )
    if weight.experts is ExpertLayout.JOINED:
        whole = torch.cat(tensors, 1)
    elif weight.experts is ExpertLayout.ALTERNATING:
        whole = torch.stack(tensors, 2).flatten(1, 2)
        if whole.ndim == 3:
            whole = whole.transpose(1, 2)
    if weight.shift != 0:
        whole = whole - weight.shift
    if weight.is_logarithm:
        whole = whole.neg().log()
    if weight.shape is not None:
        whole = whole.reshape(weight.shape)
    return whole.contiguous()


def _tensor(file: GgufFile, tensor: GgufTensor) -> Tensor:
    """The numbers of a tensor: mapped, or dequantized to float32."""
    raw = file.raw(tensor)
    if tensor.type in FLOATS:
        dtype = getattr(torch, FLOATS[tensor.type])
        return torch.from_numpy(raw).view(dtype).reshape(tensor.shape)
    read = functools.partial(read_rows, file, tensor)
    matrix = StoredMatrix(tensor.name, (len(raw), tensor.shape[-1]), read)
    return torch.from_numpy(matrix.floats()).reshape(tensor.shape)
