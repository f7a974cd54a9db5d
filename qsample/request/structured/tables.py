"""Temporary."""

from __future__ import annotations
import hashlib
from dataclasses import dataclass
from functools import cached_property
import numpy as np
from qsample.contract.arrays import Array

START_STATE = 1


@dataclass(frozen=True, eq=False)
class TokenGrammar:
    classes: Array
    transitions: Array
    distances: Array
    late: Array
    drafts: Array

    @property
    def shortest(self) -> int:
        return int(self.distances[START_STATE])

    @cached_property
    def key(self) -> str:
        digest = hashlib.sha256()
        for array in (self.classes, self.transitions, self.distances, self.late, self.drafts):
            digest.update(f"{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    @property
    def has_thoughts(self) -> bool:
        return bool((self.late != np.arange(len(self.late))).any())
