"""LoRA adapters as peft saves them, of random matrices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from qsample.checkpoints.merge_lora import find_adapter
from qsample.checkpoints.source import HubOptions
from qsample.contract.interface import Interface

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 12, "bias": "none"}


def lora_pair(path: str, rows: int, columns: int, rank: int = 4) -> dict[str, Tensor]:
    """A and B of a change of [rows, columns] to the module at `path`, as peft names them."""
    generator = torch.Generator().manual_seed(len(path))
    name = f"base_model.model.{path}"
    return {
        f"{name}.lora_A.weight": torch.randn(rank, columns, generator=generator),
        f"{name}.lora_B.weight": torch.randn(rows, rank, generator=generator),
    }


def save_adapter(folder: Path, tensors: dict[str, Tensor], **config: Any) -> tuple[Path, Path]:
    """Write an adapter as peft does. config: on top of `CONFIG`. Returns the files of the configuration and weights."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return find_adapter(str(folder), HubOptions())


def random_adapter(
    folder: Path, interface: Interface, seed: int, rank: int = 4, **config: Any
) -> Path:
    """The folder of an adapter of every layer that a package takes adapters for, large enough to change tokens."""
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for target in interface.adapters:
        name = f"base_model.model.{target.path}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(
            rank, target.in_features, generator=generator
        )
        tensors[f"{name}.lora_B.weight"] = (
            torch.randn(target.out_features, rank, generator=generator) / 8
        )
    save_adapter(folder, tensors, r=rank, lora_alpha=rank, **config)
    return folder
