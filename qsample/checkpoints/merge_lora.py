"""Merges a LoRA adapter into the weights of a Hugging Face model; `huggingface.lora` reads its
files."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils.hub import cached_file

from qsample.checkpoints.source import HubOptions
from qsample.errors import QsampleError
from qsample.request.huggingface.lora import CONFIG, WEIGHTS, Change, floats, read_changes
from qsample.transforms.deferred import SMALLEST, defer, deferred, numbers


def find_adapter(adapter: str, hub: HubOptions) -> tuple[Path, Path]:
    """The configuration and the weights of an adapter, a folder or a hub id. Raises QsampleError if
    a file is missing."""
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
    """Add an adapter to a model's weights, in their dtype, and return how many matrices it changed.

    A weight that is tied to another module's is untied, because the adapter was trained for only
    one of them. After an error, the model is unchanged.

    Args:
        model: the model.
        config_path: the adapter's configuration.
        weights_path: the adapter's weights.

    Raises:
        UnsupportedModelError: for an adapter that is not plain LoRA.
        QsampleError: for an adapter that cannot be read or belongs to another model.
    """
    modules = dict(model.named_modules())
    changes = read_changes(config_path, weights_path)
    for change in changes:
        _check_fits(modules.get(change.path), change, model, weights_path)
    for change in changes:
        _apply(model, modules[change.path], change)
    return len(changes)


def _check_fits(
    module: nn.Module | None, change: Change, model: PreTrainedModel, weights_path: Path
) -> None:
    """Raise QsampleError if a module lacks the weight that an adapter changes, or has it in another
    shape."""
    weight = getattr(module, "weight", None)
    if module is None or not isinstance(weight, nn.Parameter):
        raise QsampleError(
            f"the adapter changes {change.path}, which {type(model).__name__} does not have"
        )
    shape = list(weight.shape)
    given: list[tuple[str, list[int]]] = []
    if change.a is not None and change.b is not None:
        product_shape = [change.b.shape[0], change.a.shape[1]]
        if _is_transposed(module):
            product_shape.reverse()
        given.append(("makes a change of shape", product_shape))
    if change.base is not None:
        given.append(("holds a weight of shape", list(change.base.shape)))
    for verb, found in given:
        if found != shape:
            raise QsampleError(
                f"{weights_path}: {change.path} {verb} {found} and the model's has {shape}; give the adapter of this "
                "very model"
            )


def _is_transposed(module: nn.Module) -> bool:
    """Whether the weight of a module is [in, out]."""
    return isinstance(module, nn.Embedding | Conv1D)


def _apply(model: PreTrainedModel, module: nn.Module, change: Change) -> None:
    """Change the weight of a module, at once if it is small or in memory, otherwise when its
    numbers are needed."""
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    old = weight.data
    transposed = _is_transposed(module)

    def merged() -> Tensor:
        """The changed weight, a new tensor, because a loaded tensor may be a mapped file."""
        base = numbers(old) if change.base is None else torch.from_numpy(floats(change.base))
        result = base.to(torch.float32)
        if change.a is not None and change.b is not None:
            a = torch.from_numpy(floats(change.a))
            b = torch.from_numpy(floats(change.b))
            product = change.scale * (b @ a)
            result = result + (product.T if transposed else product)
        return result.to(old.dtype)

    if old.numel() < SMALLEST or deferred(old) is None:
        new = merged()
    else:
        new = defer(old.shape, old.dtype, merged, old.dtype)
    module.weight = nn.Parameter(new, requires_grad=False)
    if any(other is weight for other in model.parameters()):
        model.config.tie_word_embeddings = False
