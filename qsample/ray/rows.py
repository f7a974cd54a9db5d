"""A row of a dataset as a request: its prompt, parameters and seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from qsample.sampling_params import SEEDS

Row = Mapping[str, Any]


def columns_of(id_column: str) -> list[str]:
    """The columns that a request is made of, where a dataset has them."""
    return list(dict.fromkeys(("prompt", "messages", "sampling_params", "seed", id_column)))


def plain(value: Any) -> Any:
    """Without NumPy's types, and without the nulls that Arrow puts where another row's mapping has a key.

    The `content` of a message may be None by itself, and stays.
    """
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items() if one is not None or name == "content"}
    return [plain(one) for one in value] if isinstance(value, list) else value


def request_of(row: Row, defaults: Mapping[str, Any], id_column: str) -> tuple[Any, dict[str, Any]]:
    """The prompt or the messages of a row, and the arguments of its request, its seed among them.

    defaults: what counts where the row's own `sampling_params` say nothing. Raises ValueError for a row that has
    neither prompt nor messages, or neither seed nor id.
    """
    options = {**defaults, **plain(row.get("sampling_params") or {})}
    seed = _number(options.pop("seed", None))
    seed = _number(row.get("seed")) if seed is None else seed
    options["seed"] = seed_of(row, id_column) if seed is None else seed
    messages = plain(row.get("messages"))
    inputs = plain(row.get("prompt")) if messages in (None, []) else messages
    if inputs is None:
        raise ValueError(f"a row has neither prompt nor messages, but {', '.join(row)}; make them in preprocess")
    return inputs, options


def seed_of(row: Row, id_column: str) -> int:
    """A seed that follows from a row's id. Raises ValueError for a row without one."""
    given = _number(row.get(id_column))
    if given is None:
        raise ValueError(
            f"a row has no seed and no {id_column!r}; give it one of them, so that it comes out the same when it is "
            "done again, or name another id_column"
        )
    text = json.dumps(plain(given), sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % SEEDS


def _number(value: Any) -> Any:
    """None for a number that is missing, which pandas has as NaN, and then the others of its column as floats."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float):
        if np.isnan(value):
            return None
        return int(value) if value.is_integer() else value
    return value
