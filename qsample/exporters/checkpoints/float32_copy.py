"""Copies a checkpoint with weights of half precision to float32, tensor by tensor.

transformers leaves weights that already have the wanted dtype in their files, mapped. Converting them while it loads
would put the whole model into memory, at twice its size.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from qsample.errors import QsampleError

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
_HALF: Final = ("F16", "BF16")
_BYTES: Final = {"F64": 8, "I64": 8, "U64": 8, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}  # others have 4
_FILE_BYTES: Final = 128 * 2**20


def has_half_weights(files: list[Path]) -> bool:
    """Whether a tensor in one of the safetensors files is float16 or bfloat16."""
    for file in files:
        with safe_open(file, "pt") as tensors:
            if any(tensors.get_slice(name).get_dtype() in _HALF for name in tensors.keys()):  # noqa: SIM118
                return True
    return False


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder that transformers reads; [] where it reads another format.

    QsampleError where there is an index of them that says nothing.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        return []
    try:
        names = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        return [folder / name for name in sorted(names)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise QsampleError(
            f"{folder / INDEX} is no index of weights, an object whose weight_map gives the file of each tensor "
            f"({error!r}); download the checkpoint again"
        ) from error


def copy_bytes(files: list[Path], itemsize: int = 4, bits: int | None = None) -> int:
    """Bytes of a copy of safetensors files in which weights of half precision, and integers of `bits` bits that GPTQ or
    AWQ packed, have become floats of `itemsize` bytes."""
    total = 0
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                part = tensors.get_slice(name)
                count = math.prod(part.get_shape())
                if bits is not None and name.endswith(".qweight"):
                    total += count * 32 // bits * itemsize + count * 4
                else:
                    total += count * (itemsize if part.get_dtype() in _HALF else _BYTES.get(part.get_dtype(), 4))
    return total


class WeightWriter:
    """Writes named tensors to safetensors files in a folder, a few at a time.

    Files are named `prefix` and a number. files: name → file name, of the tensors that are written.
    """

    def __init__(self, folder: Path, prefix: str = "weights") -> None:
        self._folder, self._prefix = folder, prefix
        self._pending: dict[str, torch.Tensor] = {}
        self.files: dict[str, str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self._pending[name] = tensor
        if sum(pending.nbytes for pending in self._pending.values()) >= _FILE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the tensors that are still in memory; called once more after the last one."""
        if not self._pending:
            return
        file = f"{self._prefix}-{len(set(self.files.values())):05}.safetensors"
        save_file(self._pending, self._folder / file, metadata={"format": "pt"})
        self.files.update(dict.fromkeys(self._pending, file))
        self._pending = {}


def to_float32(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, in float32 where it is of half precision."""
    return tensor.to(torch.float32) if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def cast_to_float32(folder: Path, files: list[Path], destination: Path) -> None:
    """Write the checkpoint in `folder`, whose weights are `files`, to the empty folder `destination` in float32.

    Tensors of other types are copied, every other file is linked.
    """
    writer = WeightWriter(destination)
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                writer.add(name, to_float32(tensors.get_tensor(name)))
    finish_checkpoint(folder, writer, destination)


def finish_checkpoint(folder: Path, writer: WeightWriter, destination: Path) -> None:
    """Make a checkpoint of the weights that `writer` put into `destination`: their index, and links to every other file
    of `folder`."""
    writer.flush()
    (destination / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": writer.files}))
    for other in folder.iterdir():
        if not other.name.endswith((".safetensors", INDEX)):
            (destination / other.name).symlink_to(other.resolve())
