"""How a repository of the Hugging Face hub is read: one object from `from_pretrained` to every download.

A new option is a field of `HubOptions` and a keyword of `AutoModelForCausalLM.from_pretrained`. Imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints


@dataclass(frozen=True, slots=True, kw_only=True)
class HubOptions:
    """Options of transformers, by its names; they are checked when the object is made.

    revision: a branch, tag or commit; None = "main". cache_dir: the folder of downloads; None = Hugging Face's own.
    token: for repositories that need one; None = the one that is logged in. local_files_only: download nothing.
    trust_remote_code: run the Python code of the repository.

    Raises ValueError for a value of another type.
    """

    revision: str | None = None
    cache_dir: str | Path | None = None
    token: str | bool | None = field(default=None, repr=False)
    local_files_only: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(HubOptions).items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                accepted = kind.__name__ if isinstance(kind, type) else str(kind).replace(" | ", " or ")
                raise ValueError(f"{name} is of type {type(value).__name__}; it must be {accepted}")

    def for_another_repository(self) -> HubOptions:
        """The same options without the revision, which is one of the model's repository."""
        return replace(self, revision=None)

    def loading(self) -> dict[str, Any]:
        """The keywords of transformers' `from_pretrained`."""
        options = {option.name: getattr(self, option.name) for option in fields(self)}
        return options | {"revision": self.revision or "main"}

    def downloading(self) -> dict[str, Any]:
        """The keywords of transformers' `cached_file`, which runs no code."""
        options = self.loading()
        del options["trust_remote_code"]
        return options
