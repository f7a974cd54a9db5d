"""A GGUF file as a `Checkpoint`: its metadata are the configuration and the tokenizer, its float
weights stay in the file, and its integers stay integers."""

from __future__ import annotations

import functools
import warnings
from functools import cached_property
from pathlib import Path
from typing import Any, Final

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
    prediction_layers,
    weights_by_type,
    weights_of,
)
from qsample.addons.formats.gguf.tokenizer import stop_ids, tokenizer_of
from qsample.addons.formats.gguf.types import FLOATS, read_rows
from qsample.checkpoints.checkpoint import Checkpoint
from qsample.checkpoints.mapped_weights import Place, in_float32
from qsample.checkpoints.quantized import QuantizedCheckpoint, read_quantized
from qsample.checkpoints.source import origin_of
from qsample.checkpoints.stored_matrices import IntegerWeight, StoredMatrix
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
        if (dtype or self.dtype) != "float32":
            raise UnsupportedModelError(
                f"{self.model_id}: dtype is {dtype or self.dtype}, and the scales of its weights are float32; leave "
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
        stored = weights_of(self.file, self._settings)
        left_out = prediction_layers(self.file)
        if left_out:
            names = ", ".join(f"blk.{layer}" for layer in left_out)
            warnings.warn(
                f"{self.model_id}: its layers for the prediction of further tokens ({names}) are left out",
                stacklevel=2,
            )
        for name, weight in stored.items():
            if _is_matrix_of_integers(name, weight):
                tensor = weight.tensors[0]
                read = functools.partial(_rows, self.file, tensor, weight)
                layer = name.removesuffix(".weight")
                matrices.append(StoredMatrix(layer, (tensor.shape[0], tensor.shape[1]), read))
            else:
                weights[name] = _float(self.file, weight)
        experts = [one for name, one in stored.items() if name.endswith("experts.down_proj")]
        if any(one.tensors[0].type not in FLOATS for one in experts):
            warnings.warn(
                f"{self.model_id}: its experts are computed as float32, in memory layer by layer; a portable package "
                "holds them so, and compile's weights='int4' or 'int8' rounds them",
                stacklevel=2,
            )
        needed_bytes = sum(matrix.bytes_in_blocks(dtype) for matrix in matrices)
        with self._room_for_blocks(scratch, needed_bytes):
            return read_quantized(
                weights,
                matrices,
                scratch,
                dtype=dtype,
                shapes=self.outline.shapes,
                biases=frozenset(weights),
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


def _float(file: GgufFile, weight: Weight) -> Tensor:
    """A weight that is not a matrix of integers: in the file, or computed when it is needed."""
    tensors = weight.tensors
    first = tensors[0]
    is_unchanged = weight == Weight(tensors)
    if first.type in FLOATS and is_unchanged:
        return in_float32(_tensor(file, first), Place(file.path, first.offset, first.length))
    dtypes = {FLOATS.get(tensor.type, "float32") for tensor in tensors}
    keeps_dtype = len(dtypes) == 1 and not weight.shift and not weight.is_logarithm
    dtype = getattr(torch, dtypes.pop() if keeps_dtype else "float32")
    empty = [torch.empty(tensor.shape, device="meta") for tensor in tensors]
    shape = _assembled(empty, weight).shape

    def compute() -> Tensor:
        return _assembled([_tensor(file, tensor).to(dtype) for tensor in tensors], weight)

    if shape.numel() < SMALLEST:
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
    if weight.shift:
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
