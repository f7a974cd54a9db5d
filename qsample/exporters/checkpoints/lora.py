"""Merges a LoRA adapter into the weights of a Hugging Face model.

LoRA: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022; W + scale * B A, scale = alpha / r, or
alpha / sqrt(r) for rank-stabilised adapters (Kalajdzievski, 2023). The files are those that peft writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils.hub import cached_file

from qsample.errors import QsampleError, UnsupportedModelError
from qsample.exporters.checkpoints.hub_options import HubOptions

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
# Options of an adapter that change more than W + scale * B A.
_UNSUPPORTED: Final = ("use_dora", "use_qalora", "modules_to_save", "layer_replication", "trainable_token_indices")


def find_adapter(adapter: str, hub: HubOptions) -> tuple[Path, Path]:
    """The configuration and the weights of `adapter`, a folder or a hub id; QsampleError where one is missing.

    hub: how the model is read; the revision is not the adapter's.
    """
    paths = []
    for name in (CONFIG, WEIGHTS):
        try:
            path = cached_file(adapter, name, **hub.for_another_repository().downloading())
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

    Raises UnsupportedModelError for an adapter that is not plain LoRA, QsampleError for one of another model; the model
    is then as it was.
    """
    config = json.loads(config_path.read_text())
    _check_plain(config, config_path)
    changes = {}
    tensors = load_file(weights_path)
    for name in sorted(tensors):
        if ".lora_B." in name or ".lora_embedding_B" in name:
            continue
        path, weight, change = _change(model, config, tensors, name)
        if weight.shape != change.shape:
            raise QsampleError(
                f"{weights_path}: {name} makes a change of shape {list(change.shape)} and the model's {path} has "
                f"{list(weight.shape)}; give the adapter of this very model"
            )
        changes[path] = (weight, change)
    for weight, change in changes.values():
        # A new tensor, because a loaded one may be a file that is mapped.
        weight.data = (weight.data.to(torch.float32) + change).to(weight.dtype)
    return len(changes)


def _change(
    model: PreTrainedModel, config: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str
) -> tuple[str, nn.Parameter, Tensor]:
    """The name of the module that tensor A called `name` belongs to, its weight, and what is added to it."""
    match = re.fullmatch(rf"{re.escape(_PREFIX)}(.+)\.lora_(A\.weight|embedding_A)", name)
    partner = name.replace(".lora_A.", ".lora_B.").replace(".lora_embedding_A", ".lora_embedding_B")
    if match is None or partner not in tensors:
        raise UnsupportedModelError(
            f"the adapter holds {name}, which is no pair of LoRA matrices; merge it with the tool that trained it, and "
            "export the merged checkpoint"
        )
    path = match[1]
    module = dict(model.named_modules()).get(path)
    if module is None or not isinstance(getattr(module, "weight", None), nn.Parameter):
        raise QsampleError(f"the adapter changes {path}, which {type(model).__name__} does not have")
    a, b = tensors[name].to(torch.float32), tensors[partner].to(torch.float32)
    change = _scale(config, path, rank=int(a.shape[0])) * (b @ a)
    is_transposed = isinstance(module, nn.Embedding | Conv1D)  # their weights are [in, out]
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    return path, weight, change.T if is_transposed else change


def _scale(config: Mapping[str, Any], path: str, rank: int) -> float:
    alpha = config.get("lora_alpha", 8)
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            alpha = value
    return float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)


def _check_plain(config: Mapping[str, Any], path: Path) -> None:
    kind = config.get("peft_type")
    asked = [name for name in _UNSUPPORTED if config.get(name)]
    if config.get("bias", "none") != "none":
        asked.append("bias")
    if kind != "LORA" or asked:
        what = f"with {', '.join(asked)}" if kind == "LORA" else f"of type {kind}"
        raise UnsupportedModelError(
            f"{path}: an adapter {what} cannot be merged here, only plain LoRA; merge it with the tool that trained "
            "it, and export the merged checkpoint"
        )
