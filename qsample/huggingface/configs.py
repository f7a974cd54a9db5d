"""A model's configurations as transformers' objects show them, and a generation_config in the forms of a caller."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from qsample.errors import unknown
from qsample.huggingface.keywords import BOOKKEEPING, GENERATE
from qsample.request.sampling_params import OFF, UNSUPPORTED, settings_of

GENERATION_CONFIG_FILE: Final = "generation_config.json"
_OWN: Final = ("do_sample", "pad_token_id", "bos_token_id", "return_dict_in_generate", "prefill_chunk_size")
_FIELDS: Final = frozenset({*OFF, *UNSUPPORTED, *GENERATE, *BOOKKEEPING, *_OWN})
# Fields that transformers' configurations always have.
_ALWAYS: Final = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "is_encoder_decoder": False}


class GenerationConfig(dict[str, Any]):
    """The fields of a generation_config.json, as keys and as attributes.

    A field that is not set is None, as in transformers. A new value counts from the next `generate` on.

    >>> model.generation_config.pad_token_id = 0
    """

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name in _FIELDS and not name.startswith("_"):
            return None
        raise AttributeError(unknown("a generation_config has no field", name, _FIELDS))

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _FIELDS and name not in self:
            raise AttributeError(unknown("a generation_config has no field", name, _FIELDS))
        # None in a model's file leaves the stop tokens to the tokenizer; () means that there are none.
        self[name] = () if name == "eos_token_id" and value is None else value

    def to_dict(self) -> dict[str, Any]:
        return dict(self)

    to_diff_dict = to_dict  # a file has what differs from transformers' defaults


def read_generation_config(given: Any) -> dict[str, Any]:
    """The fields that are set in `given`: a mapping, an object with to_dict() such as transformers.GenerationConfig,
    or the path of a generation_config.json or of its folder. Raises ValueError for anything else."""
    if isinstance(given, str | Path):
        path = Path(given)
        file = path / GENERATION_CONFIG_FILE if path.is_dir() else path
        try:
            given = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"generation_config is {str(path)!r}, and {file} cannot be read: {error}") from error
        if not isinstance(given, dict):
            raise ValueError(f"generation_config is {str(path)!r}, and {file} is not a JSON object")
    return {name: value for name, value in settings_of(given).items() if value is not None}


def as_generation_config(given: Any) -> GenerationConfig:
    """`given` itself if it is a GenerationConfig; otherwise the result of `read_generation_config` as such."""
    return given if isinstance(given, GenerationConfig) else GenerationConfig(read_generation_config(given))


class ModelConfig(Mapping[str, Any]):
    """A checkpoint's config.json, as keys and as attributes; nested objects are ModelConfigs, too.

    It describes the model that was exported and changes nothing: settings of `generate` are in `generation_config`.

    >>> model.config.hidden_size
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_values", dict(values))

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        return ModelConfig(value) if isinstance(value, dict) else value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_values":  # asked for while it is copied or unpickled
            raise AttributeError(name)
        if name in self._values:
            return self[name]
        if name in _ALWAYS:
            return _ALWAYS[name]
        raise AttributeError(unknown("the package's config.json has no field", name, self._values))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "use_cache":  # for training; generate always keeps its cache
            return
        raise AttributeError(
            f"config.{name} cannot be set: config describes the model that was exported; set generation_config.{name} "
            "if it is a setting of generate"
        )

    def __reduce__(self) -> Any:
        return ModelConfig, (self._values,)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"ModelConfig({self._values!r})"

    def to_dict(self) -> dict[str, Any]:
        return dict(self._values)

    def get_text_config(self, decoder: bool | None = None) -> ModelConfig:
        """The part that describes the text model; the whole if there is no such part."""
        text = self._values.get("text_config")
        return ModelConfig(text) if isinstance(text, dict) else self
