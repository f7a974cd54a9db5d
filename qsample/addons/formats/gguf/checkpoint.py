"""A GGUF file as a `Checkpoint`: configuration and tokenizer from its metadata, float weights in the file, integers as
they are."""

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
from qsample.addons.formats.gguf.models import Weight, configuration, weights_by_type, weights_of
from qsample.addons.formats.gguf.tokenizer import stop_ids, tokenizer_of
from qsample.addons.formats.gguf.types import FLOATS, read_rows
from qsample.checkpoints.checkpoint import Checkpoint
from qsample.checkpoints.mapped_weights import Place, in_float32
from qsample.checkpoints.quantized import QuantizedCheckpoint, read_quantized
from qsample.checkpoints.source import origin_of
from qsample.checkpoints.stored_matrices import IntegerWeight, StoredMatrix
from qsample.checks import is_number
from qsample.disk.source_files import SourceFiles
from qsample.errors import UnsupportedModelError
from qsample.transforms.deferred import SMALLEST, defer

_SAMPLING: Final = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


class GgufCheckpoint(Checkpoint):
    """A GGUF file. Its weights are float32 or integers; an adapter makes the matrices that it changes float."""

    _configured_by = "metadata"
    _needs_scratch = True

    def __init__(
        self, file: GgufFile, model_id: str, dtype: str = "float32", **options: Any
    ) -> None:
        """model_id: a path, or the hub id and the name of the file. dtype, options: as `Checkpoint` takes them."""
        super().__init__(model_id, dtype, **options)
        self.file = file

    @cached_property
    def config(self) -> PretrainedConfig:
        with self._config_errors():
            config: PretrainedConfig = AutoConfig.for_model(
                **self._settings, eos_token_id=stop_ids(self.file) or None
            )
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
        stated = {
            ours: self.file.metadata.get(f"general.sampling.{theirs}")
            for theirs, ours in _SAMPLING.items()
        }
        settings: dict[str, Any] = {
            name: value for name, value in stated.items() if is_number(value, 0, 1e6)
        }
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
        path, (name, revision) = self.file.path, origin_of(str(self.file.path))
        return (path.name if revision is None else f"{name}/{path.name}", revision), {
            path.name: path
        }

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
        for name, weight in stored.items():
            tensor, layer = weight.tensors[0], name.removesuffix(".weight")
            if tensor.type in FLOATS or len(tensor.shape) != 2 or weight.experts or layer == name:
                weights[name] = _float(self.file, weight)
            else:
                read = functools.partial(_rows, self.file, tensor, weight)
                matrices.append(StoredMatrix(layer, (tensor.shape[0], tensor.shape[1]), read))
        if any(
            name.endswith("experts.down_proj") and w.tensors[0].type not in FLOATS
            for name, w in stored.items()
        ):
            warnings.warn(
                f"{self.model_id}: its experts are computed as float32, in memory layer by layer; a portable package "
                "holds them so, and compile's weights='int4' or 'int8' rounds them",
                stacklevel=2,
            )
        with self._room_for_blocks(
            scratch, sum(matrix.bytes_in_blocks(dtype) for matrix in matrices)
        ):
            return read_quantized(
                weights,
                matrices,
                scratch,
                dtype=dtype,
                shapes=self.outline.shapes,
                biases=frozenset(weights),
            )


def _rows(file: GgufFile, tensor: GgufTensor, weight: Weight, rows: slice) -> IntegerWeight:
    return read_rows(file, tensor, rows if weight.order is None else weight.order[rows])


def _float(file: GgufFile, weight: Weight) -> Tensor:
    """A weight that is no matrix of integers: in the file, or computed when it is needed."""
    tensors = weight.tensors
    if (
        tensors[0].type in FLOATS
        and weight.order is None
        and weight.experts is None
        and not weight.shift
    ):
        return in_float32(
            _tensor(file, tensors[0]), Place(file.path, tensors[0].offset, tensors[0].length)
        )
    stored = {FLOATS.get(part.type, "float32") for part in tensors}
    dtype = getattr(torch, stored.pop() if len(stored) == 1 and not weight.shift else "float32")
    shape = _put_together(
        [torch.empty(part.shape, device="meta") for part in tensors], weight
    ).shape

    def compute() -> Tensor:
        return _put_together([_tensor(file, part).to(dtype) for part in tensors], weight)

    return (
        compute().to(torch.float32)
        if shape.numel() < SMALLEST
        else defer(shape, torch.float32, compute, dtype)
    )


def _put_together(parts: list[Tensor], weight: Weight) -> Tensor:
    """`weight` of its tensors."""
    whole = parts[0]
    if weight.order is not None:
        whole = whole[torch.from_numpy(weight.order)]
    if weight.experts == "joined":
        whole = torch.cat(parts, 1)
    elif weight.experts == "alternating":
        whole = torch.stack(parts, 2).flatten(1, 2)
        whole = whole.transpose(1, 2) if whole.ndim == 3 else whole
    return (whole - weight.shift if weight.shift else whole).contiguous()


def _tensor(file: GgufFile, tensor: GgufTensor) -> Tensor:
    """The numbers of a tensor: mapped, or dequantized, float32."""
    raw = file.raw(tensor)
    if tensor.type in FLOATS:
        return torch.from_numpy(raw).view(getattr(torch, FLOATS[tensor.type])).reshape(tensor.shape)
    rows = StoredMatrix(
        tensor.name, (len(raw), tensor.shape[-1]), functools.partial(read_rows, file, tensor)
    )
    return torch.from_numpy(rows.floats()).reshape(tensor.shape)
