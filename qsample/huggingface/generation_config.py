"""`GenerationConfig`: a model's own settings as transformers' object shows them; and those that a caller brings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from qsample.errors import unknown
from qsample.huggingface.keywords import BOOKKEEPING, GENERATE
from qsample.sampling_params import UNSUPPORTED, UNSUPPORTED_SAMPLING, SamplingParams

GENERATION_CONFIG_FILE: Final = "generation_config.json"
_OWN: Final = ("do_sample", "pad_token_id", "bos_token_id", "return_dict_in_generate", "prefill_chunk_size")
FIELDS: Final = frozenset(
    {entry.name for entry in fields(SamplingParams)}
    | {*UNSUPPORTED, *UNSUPPORTED_SAMPLING, *GENERATE, *BOOKKEEPING, *_OWN}
)
# Fields that beat another one in transformers, and that a caller who gives the other alone does not mean.
_TOTAL: Final = {"max_length": "max_new_tokens", "min_length": "min_new_tokens"}


class GenerationConfig(dict[str, Any]):
    """The fields of a generation_config.json, as keys and as attributes.

    A field that is not set reads as None, as in transformers. What is set counts from the next `generate` on.

    >>> model.generation_config.pad_token_id = 0
    """

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name in FIELDS and not name.startswith("_"):
            return None
        raise AttributeError(unknown("a generation_config has no field", name, FIELDS))

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in FIELDS and name not in self:
            raise AttributeError(unknown("a generation_config has no field", name, FIELDS))
        # None is what a model's file may say of its stop tokens, and the tokenizer's count then; () is none at all.
        self[name] = () if name == "eos_token_id" and value is None else value

    def to_dict(self) -> dict[str, Any]:
        return dict(self)


def read_generation_config(given: Any) -> dict[str, Any]:
    """The fields that are set in `given`: a mapping, an object with to_dict() such as transformers.GenerationConfig,
    or the path of a generation_config.json or of the folder that it is in. Raises ValueError for anything else."""
    if isinstance(given, str | Path):
        given = _read_file(Path(given))
    elif not isinstance(given, Mapping):
        if not callable(getattr(given, "to_dict", None)):
            raise ValueError(
                f"generation_config is a {type(given).__name__}; give a mapping, a transformers.GenerationConfig, or "
                f"the path of a {GENERATION_CONFIG_FILE} or its folder"
            )
        given = given.to_dict()
    return {name: value for name, value in given.items() if value is not None}


def as_generation_config(given: Any) -> GenerationConfig:
    """`given` itself, where it is one; otherwise one with the fields of whatever `read_generation_config` takes."""
    return given if isinstance(given, GenerationConfig) else GenerationConfig(read_generation_config(given))


def merge(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A model's `own` settings with a caller's on top, field by field as in transformers.

    A total length that the caller gives counts, also where the model has a number of new tokens.
    """
    merged = {**own, **given}
    for total, new in _TOTAL.items():
        if total in given and new not in given:
            merged.pop(new, None)
    return merged


def _read_file(path: Path) -> dict[str, Any]:
    file = path / GENERATION_CONFIG_FILE if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"generation_config is {str(path)!r}, and {file} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"generation_config is {str(path)!r}, and {file} is no JSON object")
    return data
