"""`ModelConfig`: a package's config.json with the attributes of transformers' configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from qsample.errors import unknown

# What transformers' configurations have, set or not.
_ALWAYS: Final = ("pad_token_id", "bos_token_id", "eos_token_id")


class ModelConfig(Mapping[str, Any]):
    """What the checkpoint's config.json says, as keys and as attributes; a nested object is one of these, too.

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
            return None
        raise AttributeError(unknown("the package's config.json has no field", name, self._values))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"config.{name} cannot be set: config describes the model that was exported; set generation_config.{name} "
            "where it is a setting of generate"
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
        """The part that describes the text model, which is the whole where there is no other."""
        text = self._values.get("text_config")
        return ModelConfig(text) if isinstance(text, dict) else self
