"""A checkpoint's weights of half precision enter; a copy of the checkpoint in float32 leaves, written tensor by tensor.

transformers leaves weights that already have the wanted dtype in their files, mapped. Converting them while it loads
would put the whole model into memory, at twice its size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file

INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"
_HALF: Final = ("F16", "BF16")
_FILE_BYTES: Final = 128 * 2**20


def has_half_weights(files: list[Path]) -> bool:
    """Whether a tensor in one of the safetensors files is float16 or bfloat16."""
    for file in files:
        with safe_open(file, "pt") as tensors:
            if any(tensors.get_slice(name).get_dtype() in _HALF for name in tensors.keys()):  # noqa: SIM118
                return True
    return False


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder that transformers reads; [] where it reads another format."""
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if not (folder / INDEX).is_file():
        return []
    names = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
    return [folder / name for name in sorted(set(names))]


def cast_to_float32(folder: Path, files: list[Path], destination: Path) -> None:
    """Write the checkpoint in `folder`, whose weights are `files`, to the empty folder `destination` in float32.

    Tensors of other types are copied, every other file is linked.
    """
    placed: dict[str, str] = {}
    size, waiting = 0, dict[str, torch.Tensor]()

    def write() -> None:
        name = f"weights-{len(set(placed.values())):05}.safetensors"
        save_file(waiting, destination / name, metadata={"format": "pt"})
        placed.update(dict.fromkeys(waiting, name))
        waiting.clear()

    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                tensor = tensors.get_tensor(name)
                waiting[name] = tensor.to(torch.float32) if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
                size += waiting[name].nbytes
                del tensor
                if size >= _FILE_BYTES:
                    write()
                    size = 0
    if waiting:
        write()
    (destination / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    for other in folder.iterdir():
        if not other.name.endswith((".safetensors", INDEX)):
            (destination / other.name).symlink_to(other.resolve())
