"""A LoRA adapter in memory, as the graph takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from qsample.tensors import Array


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A checked LoRA adapter. It stays in memory as long as a model has its name, or a request runs with it.

    Attributes:
        name: that callers choose it by.
        path: of its folder.
        sha256: of all its numbers, scales included. Adapters of the same sha256 give the same tokens; those of the same
            name, loaded at different times, may not.
        tensors: by the graph's names, float32.
    """

    name: str
    path: Path
    sha256: str
    tensors: Mapping[str, Array]
