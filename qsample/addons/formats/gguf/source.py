"""GGUF files as a source of models: which file a path or a hub id means, and the file as a
checkpoint.

Neither torch nor transformers is imported until the file is opened.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from qsample.addons.formats.gguf.file import SUFFIX, check_whole, is_gguf, is_part
from qsample.addons.formats.gguf.models import describe_gguf, read_model
from qsample.checkpoints.private_parts import check_private_parts
from qsample.checkpoints.source import (
    HUB_TIMEOUT_S,
    WEIGHT_SUFFIXES,
    HubOptions,
    download,
    file_state,
    is_hub_id,
)
from qsample.errors import QsampleError
from qsample.models.sources import (
    SourceDescription,
    SourceKind,
    SourceRequest,
    WeightSource,
)
from qsample.package.disk.untrusted import problem_of_name
from qsample.progress import young_collections

if TYPE_CHECKING:
    from qsample.checkpoints.checkpoint import Checkpoint

_MAX_LISTED_FILES: Final = 40
_PROJECTOR: Final = re.compile("mmproj", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class GgufSource(WeightSource):
    """A GGUF file: a path, or a hub id and the name of a `file` there."""

    @property
    def path(self) -> Path:
        """The file, downloaded if need be."""
        if self.file is None:
            return Path(self.model_id)
        return download(self.model_id, self.file, self.hub)

    def open(self) -> Checkpoint:
        file = read_model(
            self.path
        )  # a file that cannot be read is refused before torch is imported
        with young_collections():
            check_private_parts()
            from qsample.addons.formats.gguf.checkpoint import GgufCheckpoint
        name = self.model_id if self.file is None else f"{self.model_id}/{self.file}"
        return GgufCheckpoint(
            file,
            name,
            self.dtype,
            tokenizer=self.tokenizer,
            adapter=self.adapter,
            hub=self.hub,
        )

    def _model_identity(self) -> list[Any]:
        return file_state(self.path) if self.file is None else super()._model_identity()


class GgufKind(SourceKind):
    """Files of llama.cpp, in place or on the hub. They come before decoder files, which a folder
    may hold as well."""

    precedence = 10

    def find(self, request: SourceRequest) -> GgufSource | None:
        found = find_gguf(
            request.name,
            request.file if request.gguf_file is None else request.gguf_file,
            request.hub,
        )
        if found is None:
            return None
        request.check_text_suffices()
        if os.path.exists(found.model_id):
            read_model(Path(found.model_id))
        request.check_adapter_and_dtype()
        return GgufSource(
            model_id=found.model_id,
            file=found.file,
            tokenizer=request.tokenizer,
            hub=request.hub,
            dtype=request.export_dtype,
            adapter=request.adapter,
        )

    def describe(self, path: Path) -> SourceDescription | None:
        if not path.exists():
            return None
        found = find_gguf(str(path), None, HubOptions())
        if found is None:
            return None
        facts = describe_gguf(Path(found.model_id))
        rows = {
            name: value if isinstance(value, dict) else str(value or "")
            for name, value in facts.items()
        }
        return SourceDescription(facts, {found.model_id: rows})


GGUF: Final = GgufKind()


@dataclass(frozen=True, slots=True)
class GgufLocation:
    """Where a GGUF file is.

    Attributes:
        model_id: a path, or a hub id.
        file: the name of the file in the repository of a hub id; None for a path.
    """

    model_id: str
    file: str | None = None


def find_gguf(name: str, file: str | None, hub: HubOptions) -> GgufLocation | None:
    """The GGUF file that a name means; None if it means none.

    A name means a GGUF file if it is one of these:

    - a file that begins as GGUF does, whatever its name;
    - a folder with .gguf files and no other weights;
    - a hub id with "gguf" in it, or with the name of a file behind it (OWNER/NAME/FILE.gguf).

    Args:
        name: a file, a folder or a hub id.
        file: which of several files; a name of another kind of file means no GGUF file.
        hub: how the hub is read.

    Raises:
        QsampleError: if the file is missing, or if there are several.
    """
    if file is not None and not file.lower().endswith(SUFFIX):
        return None
    path = Path(name)
    if os.path.isfile(path):
        is_meant = file is None and (is_gguf(path) or path.suffix.lower() == SUFFIX)
        return GgufLocation(name) if is_meant else None
    if os.path.isdir(path):
        return _find_in_folder(name, path, file)
    if os.path.exists(path):
        return None
    if file is None and name.lower().endswith(SUFFIX):
        name, file = _split_hub_path(name)
    if not is_hub_id(name):
        return None
    if file is None:
        if "gguf" not in name.lower():
            return None
        file = _choose_file(name, _names_on_hub(name, hub), None)
    check_whole(file)
    return GgufLocation(name, file)


def _find_in_folder(name: str, folder: Path, file: str | None) -> GgufLocation | None:
    entries = list(folder.iterdir())
    suffixes = {entry.suffix for entry in entries}
    if file is None:
        if SUFFIX not in suffixes or not WEIGHT_SUFFIXES.isdisjoint(suffixes):
            return None
    elif problem_of_name(file) is None and (folder / file).is_file():
        return GgufLocation(str(folder / file))
    chosen = _choose_file(name, [entry.name for entry in entries], file)
    return GgufLocation(str(folder / chosen))


def _split_hub_path(name: str) -> tuple[str, str]:
    """The hub id and the file of OWNER/NAME/FILE.gguf. Raises QsampleError for a path on this
    machine."""
    owner, _, rest = name.partition("/")
    is_local = owner == "" or owner.startswith((".", "~")) or os.path.exists(owner)
    if "/" not in rest or is_local:
        raise QsampleError(
            f"{name:.200} does not exist; give a GGUF file, or OWNER/NAME/FILE{SUFFIX} of the hub"
        )
    repository, _, file = rest.partition("/")
    return f"{owner}/{repository}", file


def _choose_file(name: str, names: Iterable[str], file: str | None) -> str:
    """The only whole model among the files of a folder or hub id; projectors of images are not
    models.

    Args:
        name: the folder or hub id, for messages.
        names: the names of its files.
        file: the wanted file if there is no such file, for the message; otherwise None.
    """
    files = [one for one in sorted(names) if one.lower().endswith(SUFFIX)]
    models = [one for one in files if not _PROJECTOR.search(one) and not is_part(one)]
    if file is None and len(models) == 1:
        return models[0]
    found = ", ".join(files[:_MAX_LISTED_FILES]) or f"no {SUFFIX} file"
    if len(files) > _MAX_LISTED_FILES:
        found += " and more"
    if file is None and models:
        raise QsampleError(
            f"{name} has several models, {found}; say which with file=, or give a path to the file"
        )
    raise QsampleError(
        f"{name} has no {'whole model of GGUF' if file is None else file}, but {found}; give another file"
    )


def _names_on_hub(name: str, hub: HubOptions) -> list[str]:
    """The files of a hub id that were downloaded, if a GGUF file is among them; otherwise all files
    that the hub lists."""
    from huggingface_hub import HfApi, snapshot_download

    names: list[str] = []
    with suppress(Exception):  # nothing was downloaded
        folder = Path(snapshot_download(name, **hub.downloading() | {"local_files_only": True}))
        names = [path.relative_to(folder).as_posix() for path in folder.rglob(f"*{SUFFIX}")]
    if names or hub.local_files_only:
        return names
    try:
        found = HfApi().model_info(
            name, revision=hub.revision, timeout=HUB_TIMEOUT_S, token=hub.token
        )
        return [one.rfilename for one in found.siblings or ()]
    except Exception as error:  # the errors of the hub and of the network have no common class
        reason = " ".join(str(error).split())
        raise QsampleError(
            f"{name} is not a folder here, and the hub does not give it ({reason:.300})"
        ) from error
