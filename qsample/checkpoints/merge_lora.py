"""Merges a LoRA adapter into the weights of a Hugging Face model; `huggingface.lora` reads its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils.hub import cached_file

from qsample.checkpoints.hub import HubOptions
from qsample.errors import QsampleError, UnsupportedModelError
from qsample.huggingface.facade import dtype_name
from qsample.huggingface.lora import ADVICE, CONFIG, PART, WEIGHTS, LoraConfig, read_config
from qsample.transforms.deferred import SMALLEST, defer, deferred, numbers


class _Change(NamedTuple):
    """The change of the weight of the module at `path`: scale * b a. a: [rank, in]. b: [out, rank]. base: the
    weight itself, if the adapter has a copy of it, which peft saves with the LoRA of an embedding."""

    path: str
    a: Tensor | None
    b: Tensor | None
    base: Tensor | None
    scale: float


def find_adapter(adapter: str, hub: HubOptions) -> tuple[Path, Path]:
    """The files of the configuration and the weights of `adapter`, a folder or a hub id; QsampleError if one is
    missing. hub: how the adapter is read."""
    paths = []
    for name in (CONFIG, WEIGHTS):
        try:
            path = cached_file(adapter, name, **hub.downloading())
        except OSError as error:
            reason = str(error).splitlines()[0]
            raise QsampleError(
                f"no LoRA adapter in {adapter!r}: cannot read {name} ({reason}); give a folder or a hub id that has "
                f"{CONFIG} and {WEIGHTS}"
            ) from error
        assert path is not None
        paths.append(Path(path))
    return paths[0], paths[1]


def merge_adapter(model: PreTrainedModel, config_path: Path, weights_path: Path) -> int:
    """Add the adapter to `model`'s weights, in their dtype, and return how many matrices it changed.

    A weight that is tied to another module's is untied: the adapter was trained for only one of them.

    Raises:
        UnsupportedModelError: for an adapter that is not plain LoRA.
        QsampleError: for an adapter that cannot be read or is of another model; the model is unchanged then.
    """
    config = read_config(config_path)
    modules = dict(model.named_modules())
    changes = []
    for change in _changes(config, weights_path):
        _check_fits(modules.get(change.path), change, model, weights_path)
        changes.append(change)
    for change in changes:
        _apply(model, modules[change.path], change)
    return len(changes)


def _changes(config: LoraConfig, weights_path: Path) -> list[_Change]:
    """The changes in the file; QsampleError if a tensor does not belong to a pair, or is of another rank."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in sorted(_read(weights_path).items()):
        match = PART.fullmatch(name)
        if match is None:
            raise UnsupportedModelError(
                f"{weights_path} holds {name}, which does not belong to a pair of LoRA matrices; {ADVICE}"
            )
        part = match["linear"] or match["embedding"] or "base"
        parts.setdefault(match["path"], {})[part] = tensor
        if not tensor.is_floating_point() or tensor.ndim != 2 or not torch.isfinite(tensor).all():
            raise QsampleError(
                f"{weights_path}: {name} is {dtype_name(tensor.dtype)} {list(tensor.shape)}; it must be a matrix of "
                "finite floats"
            )
    changes = []
    for path, found in parts.items():
        a, b, rank = found.get("A"), found.get("B"), config.rank_of(path)
        if (a is None) != (b is None):
            raise QsampleError(f"{weights_path} holds matrix {'A' if b is None else 'B'} of {path} without its partner")
        if a is not None and b is not None and (len(a), b.shape[1]) != (rank, rank):
            raise QsampleError(
                f"{weights_path}: the matrices of {path} are {list(a.shape)} and {list(b.shape)}, and the rank that "
                f"{CONFIG} gives it is {rank}"
            )
        changes.append(_Change(path, a, b, found.get("base"), config.scale_of(path)))
    if all(change.a is None for change in changes):
        raise QsampleError(f"{weights_path} holds no LoRA matrices; give the adapter that was trained")
    return changes


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise QsampleError(f"{path} cannot be read ({error}); download the adapter again") from error


def _check_fits(module: nn.Module | None, change: _Change, model: PreTrainedModel, weights_path: Path) -> None:
    weight = getattr(module, "weight", None)
    if module is None or not isinstance(weight, nn.Parameter):
        raise QsampleError(f"the adapter changes {change.path}, which {type(model).__name__} does not have")
    shape = list(weight.shape)
    for kind, given in (
        ("makes a change of shape", _shape(module, change)),
        ("holds a weight of shape", change.base),
    ):
        given_shape = list(given.shape) if isinstance(given, Tensor) else given
        if given_shape is not None and given_shape != shape:
            raise QsampleError(
                f"{weights_path}: {change.path} {kind} {given_shape} and the model's has {shape}; give the adapter of "
                "this very model"
            )


def _shape(module: nn.Module, change: _Change) -> list[int] | None:
    if change.a is None or change.b is None:
        return None
    shape = [int(change.b.shape[0]), int(change.a.shape[1])]
    return shape[::-1] if _is_transposed(module) else shape


def _is_transposed(module: nn.Module) -> bool:
    """Whether the weight of `module` is [in, out]."""
    return isinstance(module, nn.Embedding | Conv1D)


def _apply(model: PreTrainedModel, module: nn.Module, change: _Change) -> None:
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    old, transposed = weight.data, _is_transposed(module)

    def merged() -> Tensor:
        """A new tensor, because a loaded tensor may be a mapped file."""
        result = (numbers(old) if change.base is None else change.base).to(torch.float32)
        if change.a is not None and change.b is not None:
            product = change.scale * (change.b.to(torch.float32) @ change.a.to(torch.float32))
            result = result + (product.T if transposed else product)
        return result.to(old.dtype)

    is_small = old.numel() < SMALLEST
    new = merged() if is_small or deferred(old) is None else defer(old.shape, old.dtype, merged, old.dtype)
    module.weight = nn.Parameter(new, requires_grad=False)
    if any(other is weight for other in model.parameters()):
        model.config.tie_word_embeddings = False
