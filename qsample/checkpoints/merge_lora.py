"""Merges a LoRA adapter into the weights of a Hugging Face model.

LoRA: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022; W + scale * B A, scale = alpha / r, or
alpha / sqrt(r) for rank-stabilised adapters (Kalajdzievski, 2023). The files are those that peft writes,
and the meaning of a configuration's fields is peft's: https://huggingface.co/docs/peft/package_reference/lora
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils.hub import cached_file

from qsample.checkpoints.hub import ADAPTER, HubOptions
from qsample.errors import QsampleError, UnsupportedModelError, shown
from qsample.huggingface.dtypes import dtype_name
from qsample.transforms.deferred import SMALLEST, defer, deferred, numbers
from qsample.values import is_integer, is_number

WEIGHTS: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
_PART: Final = re.compile(
    rf"{re.escape(_PREFIX)}(?P<path>.+)\.(lora_(?P<linear>[AB])\.weight|lora_embedding_(?P<embedding>[AB])|(?P<base>base_layer)\.weight)"
)
_ADVICE: Final = "merge it with the tool that trained it, and export the merged checkpoint"
_READ: Final = (
    "peft_type",
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "bias",
    "init_lora_weights",
)
# Fields that a merge does not need: the training, and the layers, which the names of the tensors also give.
# fan_in_fan_out follows from the layer itself.
_WITHOUT_EFFECT: Final = (
    *("peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "base_model_class", "parent_library"),
    *("revision", "inference_mode", "runtime_config", "megatron_core", "qalora_group_size"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out"),
    *("lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config"),
)
# Initialisations that leave the model's own weights alone. The others move a part of the weight into A and B,
# so a file of trained A and B means nothing without that weight.
_INITIALISATIONS: Final = (True, False, "gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """rank, alpha: of a layer that no pattern names. ranks, alphas: pattern → value; the first that matches counts.
    rank_stabilised: whether a change is scaled by the root of the rank."""

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    rank_stabilised: bool

    def rank_of(self, path: str) -> int:
        """The rank in the module at `path`."""
        return self.ranks.get(_first_match(self.ranks, path), self.rank)

    def scale_of(self, path: str) -> float:
        """The factor of the product of B and A in the module at `path`."""
        alpha, rank = self.alphas.get(_first_match(self.alphas, path), self.alpha), self.rank_of(path)
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)


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
    for name in (ADAPTER, WEIGHTS):
        try:
            path = cached_file(adapter, name, **hub.downloading())
        except OSError as error:
            reason = str(error).splitlines()[0]
            raise QsampleError(
                f"no LoRA adapter in {adapter!r}: cannot read {name} ({reason}); give a folder or a hub id that has "
                f"{ADAPTER} and {WEIGHTS}"
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
        match = _PART.fullmatch(name)
        if match is None:
            raise UnsupportedModelError(
                f"{weights_path} holds {name}, which does not belong to a pair of LoRA matrices; {_ADVICE}"
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
                f"{ADAPTER} gives it is {rank}"
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


def read_config(path: Path) -> LoraConfig:
    """The configuration at `path`.

    Raises:
        QsampleError: if it is not a configuration, or a value is out of its range.
        UnsupportedModelError: if it asks for more than plain LoRA.
    """
    try:
        options = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise QsampleError(f"{path} is not valid JSON ({error}); download the adapter again") from error
    if not isinstance(options, dict):
        raise QsampleError(
            f"{path} holds {shown(options, 60)}, and must hold an object; give the folder of a LoRA adapter"
        )
    _check_plain(options, path)
    return LoraConfig(
        _rank(options.get("r", 8), "r", path),
        _alpha(options.get("lora_alpha", 8), "lora_alpha", path),
        {name: _rank(value, f"rank_pattern[{name!r}]", path) for name, value in _patterns(options, "rank", path)},
        {name: _alpha(value, f"alpha_pattern[{name!r}]", path) for name, value in _patterns(options, "alpha", path)},
        _flag(options, "use_rslora", path),
    )


def _first_match(patterns: Mapping[str, Any], path: str) -> str:
    """The first of `patterns` that a path ends with, at a dot; `path` itself if none matches, as in peft."""
    return next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", path)), path)


def _check_plain(options: Mapping[str, Any], path: Path) -> None:
    kind = options.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModelError(
            f"{path}: an adapter of type {kind} cannot be merged here, only plain LoRA; {_ADVICE}"
        )
    asked = [name for name in sorted(options) if name not in (*_READ, *_WITHOUT_EFFECT) and options[name]]
    if options.get("bias", "none") != "none":
        asked.append("bias")
    if options.get("init_lora_weights", True) not in _INITIALISATIONS:
        asked.append(f"init_lora_weights={shown(options['init_lora_weights'], 60)}")
    if asked:
        raise UnsupportedModelError(
            f"{path}: an adapter with {', '.join(asked)} cannot be merged here, only plain LoRA; {_ADVICE}"
        )


def _patterns(options: Mapping[str, Any], kind: str, path: Path) -> list[tuple[str, Any]]:
    name = f"{kind}_pattern"
    patterns = options.get(name) or {}
    if not isinstance(patterns, dict):
        raise QsampleError(f"{path}: {name} is {shown(patterns, 60)}; it must be an object, from patterns to numbers")
    for pattern in patterns:
        try:
            re.compile(rf"(.*\.)?({pattern})$")
        except (re.error, RecursionError, OverflowError) as error:
            raise QsampleError(
                f"{path}: {name} holds {pattern!r}, which is not a regular expression: {error}"
            ) from error
    return list(patterns.items())


def _rank(value: Any, name: str, path: Path) -> int:
    if not is_integer(value, 1):
        raise QsampleError(f"{path}: {name} is {shown(value, 60)}; it must be an integer of at least 1")
    return value


def _alpha(value: Any, name: str, path: Path) -> float:
    if not is_number(value) or not math.isfinite(value):
        raise QsampleError(f"{path}: {name} is {shown(value, 60)}; it must be a number")
    return float(value)


def _flag(options: Mapping[str, Any], name: str, path: Path) -> bool:
    value = options.get(name, False)
    if not isinstance(value, bool):
        raise QsampleError(f"{path}: {name} is {shown(value, 60)}; it must be true or false")
    return value
