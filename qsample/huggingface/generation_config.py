"""`GenerationConfig`: a model's own settings as transformers' object shows them; and those that a caller brings."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from qsample.errors import unknown
from qsample.huggingface.keywords import BOOKKEEPING, GENERATE
from qsample.sampling_params import UNSUPPORTED, SamplingParams, settings_of

GENERATION_CONFIG_FILE: Final = "generation_config.json"
_OWN: Final = ("do_sample", "pad_token_id", "bos_token_id", "return_dict_in_generate", "prefill_chunk_size")
FIELDS: Final = frozenset(
    {entry.name for entry in fields(SamplingParams)} | {*UNSUPPORTED, *GENERATE, *BOOKKEEPING, *_OWN}
)


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
    return {name: value for name, value in settings_of(given).items() if value is not None}


def as_generation_config(given: Any) -> GenerationConfig:
    """`given` itself, where it is one; otherwise one with the fields of whatever `read_generation_config` takes."""
    return given if isinstance(given, GenerationConfig) else GenerationConfig(read_generation_config(given))


def _read_file(path: Path) -> dict[str, Any]:
    file = path / GENERATION_CONFIG_FILE if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"generation_config is {str(path)!r}, and {file} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"generation_config is {str(path)!r}, and {file} is no JSON object")
    return data
