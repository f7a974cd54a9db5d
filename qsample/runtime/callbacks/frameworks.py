"""Arrays as a caller's function wants them: torch tensors for transformers' own objects, NumPy arrays for others."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from qsample.tensors import Array


@dataclass(frozen=True, slots=True)
class Callback:
    """A function of arrays. in_torch: it takes and returns torch tensors."""

    function: Any
    in_torch: bool

    def __call__(self, *arrays: Array | None) -> Any:
        """What the function makes of copies of `arrays`; None stays None."""
        return self.function(*(None if array is None else self._shown(array.copy()) for array in arrays))

    def _shown(self, array: Array) -> Any:
        # Who made an object of transformers' has imported torch; nobody else needs it.
        return sys.modules["torch"].from_numpy(array) if self.in_torch else array


def as_callbacks(name: str, given: Any, what: str) -> list[Callback]:
    """One callable or several, as callbacks; None = none. Raises ValueError for anything else.

    name: of the argument. what: the functions that it takes, for the message.
    """
    if given is None:
        return []
    several = list(given) if isinstance(given, Iterable) else [given]
    wrong = [one for one in several if not callable(one)]
    if wrong:
        raise ValueError(f"{name} has a {type(wrong[0]).__name__}; give {what}, or a list of them")
    return [Callback(one, of_transformers(given) or of_transformers(one)) for one in several]


def of_transformers(value: Any) -> bool:
    """Whether `value` is an object of transformers, or of a class that inherits from one."""
    return any(kind.__module__.split(".")[0] == "transformers" for kind in type(value).__mro__)


def on_host(result: Any) -> Array:
    """What a callback returned, as an array."""
    return np.asarray(result.detach().cpu() if hasattr(result, "detach") else result)
