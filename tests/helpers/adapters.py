"""LoRA adapters as peft saves them, of random matrices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from qsample.checkpoints.hub import HubOptions
from qsample.checkpoints.merge_lora import find_adapter

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
