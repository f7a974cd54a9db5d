"""The checkpoints that the libraries of other quantizers wrote: scripts/packed_fixtures.py makes them."""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file
from torch import Tensor

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "packed"


def unpack(name: str, folder: Path) -> Path:
    """The checkpoint `name`, in `folder`, beside what is expected of it."""
    with tarfile.open(FIXTURES / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def expected(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "expected.json").read_text())
    return result


def sha256(weight: np.ndarray) -> str:
    """Of float32 numbers, -0 as 0."""
    assert weight.dtype == np.float32
    return hashlib.sha256((weight + np.float32(0)).tobytes()).hexdigest()


def change_tensors(folder: Path, changes: dict[str, Callable[[Tensor], Tensor] | None]) -> None:
    """Write the weights of `folder` again, changed; None leaves a tensor out."""
    tensors = load_file(folder / "model.safetensors")
    for name, change in changes.items():
        tensor = tensors.pop(name)
        if change is not None:
            tensors[name] = change(tensor).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, **changes: Any) -> None:
    """None leaves a field out."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )
