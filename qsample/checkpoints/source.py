"""Where a model comes from, before it is read: the arguments of `Checkpoint`, and the identity of files and hub ids.

Imports nothing heavy: a package that was made of a model earlier is found without the libraries that read models.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from qsample.checkpoints.hub import ADAPTER, CONFIG, HubOptions, downloaded_commit, newest_commit

_READ_WHOLE: Final = 1 << 24  # bytes; of larger files, the weights, size, time of change and a sample are looked at
_SAMPLES: Final = 16  # from a large file
_SAMPLE: Final = 1 << 12  # bytes
_FOLDERS: Final = (
    "onnx",
    "additional_chat_templates",
)  # whose files belong to a model, besides the files of its folder
_BESIDE: Final = re.compile(r".*config\.json|token.*|.*\.jinja|special_tokens_map\.json")  # of a decoder in `onnx/`
_IGNORED: Final = (".md", ".lock")


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """The arguments of `checkpoints.Checkpoint`, whose import needs torch."""

    model_id: str
    dtype: str
    tokenizer: str | None
    adapter: str | None
    hub: HubOptions

    @property
    def folders(self) -> tuple[str, ...]:
        """Nothing may be written over these."""
        return tuple(filter(None, (self.model_id, self.adapter, self.tokenizer)))

    def pinned(self) -> CheckpointSource:
        """The same at a commit of the hub; a folder by its full name."""
        if os.path.exists(self.model_id):
            return replace(self, model_id=os.path.abspath(self.model_id))
        return replace(self, hub=replace(self.hub, revision=commit_of(self.model_id, self.hub)))

    def identity(self) -> dict[str, Any]:
        """All that the checkpoint is read from and with, JSON-ready; see `identity_of`."""
        others = self.hub.for_another_repository()
        own = self.tokenizer in ("auto", None)
        return {
            "checkpoint": identity_of(self.model_id, self.hub),
            "dtype": self.dtype,
            "tokenizer": self.tokenizer if own else identity_of(str(self.tokenizer), others, "tokenizer_config.json"),
            "adapter": None if self.adapter is None else identity_of(self.adapter, others, ADAPTER),
            "code": self.hub.trust_remote_code,
        }


@dataclass(frozen=True, slots=True)
class DecoderSource:
    """A decoder file of another exporter; the fields are arguments of `qsample.bake`. hub: how a hub id is read."""

    model_id: str
    file: str | None = None
    tokenizer: str | None = "auto"
    rope: str | None = None
    reference: str | None = None
    hub: HubOptions = field(default_factory=HubOptions)

    @property
    def folders(self) -> tuple[str, ...]:
        """Nothing may be written over these."""
        return (self.model_id,)

    def pinned(self) -> DecoderSource:
        """The same at a commit of the hub; a folder or file by its full name."""
        if os.path.exists(self.model_id):
            return replace(self, model_id=os.path.abspath(self.model_id))
        return replace(self, hub=replace(self.hub, revision=commit_of(self.model_id, self.hub, self.file or CONFIG)))

    def identity(self) -> dict[str, Any]:
        """All that the decoder is read from and with, JSON-ready; see `identity_of`."""
        others, own = self.hub.for_another_repository(), self.tokenizer in ("auto", None)
        return {
            "decoder": identity_of(self.model_id, self.hub, self.file or CONFIG),
            "file": self.file,
            "tokenizer": self.tokenizer if own else identity_of(str(self.tokenizer), others, "tokenizer_config.json"),
            "rope": self.rope,
            "reference": self.reference,
        }


def identity_of(source: str, hub: HubOptions, file: str = CONFIG) -> list[Any]:
    """What tells one state of a model, adapter or tokenizer from another, JSON-ready, without loading it.

    Args:
        source: a folder or file, of which names and content count, or a hub id, of which the commit does: that which
            was downloaded last, otherwise the newest.
        hub: how the hub is read.
        file: a file that the repository has.
    """
    if os.path.exists(source):
        return [[name, *_state(path)] for name, path in sorted(_files(Path(source)))]
    return [source, commit_of(source, hub, file)]


def commit_of(name: str, hub: HubOptions, file: str = CONFIG) -> str:
    """The commit of a hub id that was downloaded last, otherwise the newest. file: as in `identity_of`."""
    return downloaded_commit(name, hub, file) or newest_commit(name, hub, file)


def _files(source: Path) -> Iterator[tuple[str, Path]]:
    """The files that belong to a model, by name."""
    folder = source if source.is_dir() else source.parent
    for inner in ("", *_FOLDERS):
        if (folder / inner).is_dir():
            for entry in os.scandir(folder / inner):
                if entry.is_file() and not entry.name.startswith(".") and not entry.name.endswith(_IGNORED):
                    yield f"{inner}/{entry.name}" if inner else entry.name, Path(entry.path)
    if source != folder:
        yield "/", source  # which of the files
        for path in folder.parent.iterdir():
            if _BESIDE.fullmatch(path.name) and path.is_file():
                yield f"../{path.name}", path


def _state(path: Path) -> list[Any]:
    status = path.stat()
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if status.st_size <= _READ_WHOLE:
            digest.update(file.read())
            return [digest.hexdigest()]
        # The time alone would not do: archives and copies may give all files the same.
        for sample in range(_SAMPLES):
            file.seek((status.st_size - _SAMPLE) * sample // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE))
    return [status.st_size, status.st_mtime_ns, digest.hexdigest()]
