"""What a package is made from: a checkpoint of Hugging Face, or a source of a kind that an add-on
registers.

Making a source reads names and headers only; the weights are opened when the package is made.
Neither torch nor transformers is imported here.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from qsample.checkpoints.private_parts import check_private_parts
from qsample.checkpoints.source import (
    ADAPTER,
    CONFIG,
    HubOptions,
    check_checkpoint,
    check_exists,
    commit_of,
    identity_of,
    newest_commit,
)
from qsample.checks import as_path
from qsample.contract.interface import Features
from qsample.errors import QsampleError
from qsample.extensions import SOURCES, load_extensions
from qsample.package.package import Package
from qsample.progress import Progress, young_collections
from qsample.request.huggingface.facade import check_export_dtype

if TYPE_CHECKING:
    from qsample.checkpoints.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRequest:
    """A model to be opened, as its caller names it; see `AutoModelForCausalLM.from_pretrained`.

    Attributes:
        name: a hub id, a folder or a file.
        file: which file of a folder or repository; None leaves the choice to the kind of source.
        gguf_file: transformers' name of `file`, for GGUF.
        dtype: the dtype of the weights; None if the caller gave none.
        tokenizer: "auto" for the model's own, another id or folder, or None for token ids only.
        adapter: a folder or hub id of a LoRA adapter to merge into the weights; None for no
            adapter.
        images: whether images are read, too; None: if they can be.
        text_only: whether only the language model is read.
        hub: how the hub is read.
    """

    name: str
    file: str | None = None
    gguf_file: str | None = None
    dtype: str | None = None
    tokenizer: str | None = "auto"
    adapter: str | None = None
    images: bool | None = False
    text_only: bool = False
    hub: HubOptions = field(default_factory=HubOptions)

    def __post_init__(self) -> None:
        for name in ("name", "file", "gguf_file", "tokenizer", "adapter"):
            if getattr(self, name) is not None:
                as_path(name, getattr(self, name))

    def check_text_suffices(self) -> None:
        """Raise QsampleError if images have to be read: for kinds of files that hold only the
        language model."""
        if self.images:
            raise QsampleError(
                f"{Path(self.name)} is a file of the language model alone; open it with AutoModelForCausalLM"
            )

    def check_adapter_and_dtype(self) -> None:
        """Raise QsampleError for an adapter that does not exist, or a dtype that no checkpoint is
        exported in."""
        if self.adapter is not None:
            check_exists(self.adapter, file=ADAPTER)
        check_export_dtype(self.export_dtype)

    @property
    def export_dtype(self) -> str:
        """The dtype of the weights, by default "float32"."""
        return "float32" if self.dtype is None else self.dtype


@dataclass(frozen=True, kw_only=True)
class ModelSource(ABC):
    """What a package is made from: a `WeightSource` or a `GraphSource`.

    Attributes:
        kind: a noun for messages, such as "checkpoint".
        model_id: a hub id, a folder or a file.
        file: the file of a repository that is read; None for config.json and the files that it
            implies.
        tokenizer: "auto" for the model's own, another id or folder, or None for token ids only.
        hub: how the hub is read.
    """

    kind: ClassVar[str]

    model_id: str
    file: str | None = None
    tokenizer: str | None = "auto"
    hub: HubOptions = field(default_factory=HubOptions)

    @property
    def notice(self) -> str | None:
        """A warning for callers who open this source by its path; None for no warning."""
        return None

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders and files that the model is read from: nothing may be written over them."""
        return (self.model_id,)

    def pinned(self) -> Self:
        """The same source at a commit of the hub; a folder or file by its full name."""
        if os.path.exists(self.model_id):
            return replace(self, model_id=os.path.abspath(self.model_id))
        commit = commit_of(self.model_id, self.hub, self._tested_file)
        return replace(self, hub=replace(self.hub, revision=commit))

    def download_newest(self) -> None:
        """Download the hub's newest commit, so that `pinned` and `identity` refer to it. Raises
        QsampleError if neither the hub nor the cache of downloads has the model."""
        newest_commit(self.model_id, self.hub, self._tested_file)

    def identity(self) -> dict[str, Any]:
        """All that the model follows from, JSON-ready; see `identity_of`."""
        return {
            "model": self._model_identity(),
            "file": self.file,
            "tokenizer": self._tokenizer_identity(),
        }

    def _model_identity(self) -> list[Any]:
        return identity_of(self.model_id, self.hub, self._tested_file)

    def _tokenizer_identity(self) -> Any:
        if self.tokenizer is None or self.tokenizer == "auto":
            return self.tokenizer
        others = self.hub.for_another_repository()
        return identity_of(self.tokenizer, others, "tokenizer_config.json")

    @property
    def _tested_file(self) -> str:
        """A file that the repository has."""
        return CONFIG if self.file is None else self.file


@dataclass(frozen=True, kw_only=True)
class WeightSource(ModelSource):
    """Weights and a configuration, from which transformers makes a model.

    Attributes:
        dtype: the dtype of the weights, as `Checkpoint` takes it.
        adapter: a folder or hub id of a LoRA adapter to merge into the weights; None for no
            adapter.
    """

    kind: ClassVar = "checkpoint"

    dtype: str = "float32"
    adapter: str | None = None

    @abstractmethod
    def open(self) -> Checkpoint:
        """The checkpoint, whose class needs torch and transformers."""

    @property
    def folders(self) -> tuple[str, ...]:
        names = (self.model_id, self.adapter, self.tokenizer)
        return tuple(name for name in names if name not in (None, ""))

    def identity(self) -> dict[str, Any]:
        adapter = None
        if self.adapter is not None:
            adapter = identity_of(self.adapter, self.hub.for_another_repository(), ADAPTER)
        return super().identity() | {"dtype": self.dtype, "adapter": adapter}


@dataclass(frozen=True, kw_only=True)
class GraphSource(ModelSource):
    """The graph of another exporter, which becomes a package as it is."""

    @abstractmethod
    def write_package(
        self, path: Path, features: Features, *, overwrite: bool, progress: Progress | None
    ) -> Package:
        """Write the portable package to a folder, and return it; nothing remains after an error.

        Args:
            path: the folder of the package.
            features: the features of its graph.
            overwrite: whether a package at `path` is replaced.
            progress: called with a stage's name and the fraction done.
        """


@dataclass(frozen=True, kw_only=True)
class CheckpointSource(WeightSource):
    """A checkpoint of Hugging Face, in a folder or on the hub.

    Attributes:
        images: whether images are read, too, as `Checkpoint` takes it.
        text_only: whether only the language model is read.
    """

    images: bool | None = False
    text_only: bool = False

    def open(self) -> Checkpoint:
        with young_collections():
            check_private_parts()
            from qsample.checkpoints.checkpoint import Checkpoint
        return Checkpoint(
            self.model_id,
            self.dtype,
            tokenizer=self.tokenizer,
            adapter=self.adapter,
            hub=self.hub,
            images=self.images,
            text_only=self.text_only,
        )

    def identity(self) -> dict[str, Any]:
        return super().identity() | {
            "code": self.hub.trust_remote_code,
            "images": self.images,
            "text_only": self.text_only,
        }


@dataclass(frozen=True, slots=True)
class SourceDescription:
    """Files of a source, as `qsample inspect` shows them.

    Attributes:
        document: all facts, JSON-ready.
        tables: the facts to read, by file: a text, names, or numbers by name, beside the name of
            each fact. Empty facts are left out.
    """

    document: Any
    tables: Mapping[str, Mapping[str, str | Sequence[str] | Mapping[str, int]]]


class SourceKind(ABC):
    """A kind of source. An add-on registers an instance in the group `qsample.sources`.

    The module of the instance imports neither torch nor transformers, because each kind is asked
    about every path.

    Attributes:
        precedence: the place of the kind; kinds are asked in ascending order.
    """

    precedence: ClassVar[int]

    @abstractmethod
    def find(self, request: SourceRequest) -> ModelSource | None:
        """The source that a request names; None if its path is of another kind.

        Raises:
            QsampleError: for a path of this kind that cannot be opened as the request says.
        """

    @abstractmethod
    def describe(self, path: Path) -> SourceDescription | None:
        """What a file or folder on this machine holds, and whether it can become a package; None if
        it is of another kind. Raises QsampleError if it cannot be read."""

    def holds_graph(self, path: Path) -> bool:
        """Whether a file or folder on this machine holds a graph that was exported already."""
        return False


def find_source(request: SourceRequest) -> ModelSource:
    """The source that a request names: of the first kind that recognises it, otherwise a
    checkpoint.

    Raises:
        QsampleError: for a path that no kind can open.
    """
    for kind in _kinds():
        source = kind.find(request)
        if source is not None:
            return source
    return _find_checkpoint(request)


def describe_source(path: Path) -> SourceDescription | None:
    """Describe the files at a path, if an add-on knows their kind; otherwise None."""
    for kind in _kinds():
        description = kind.describe(path)
        if description is not None:
            return description
    return None


def holds_graph(path: Path) -> bool:
    """Whether a file or folder on this machine holds a graph of another exporter, and no
    checkpoint."""
    return any(kind.holds_graph(path) for kind in _kinds())


def _kinds() -> list[SourceKind]:
    kinds: list[SourceKind] = list(load_extensions(SOURCES).values())
    return sorted(kinds, key=lambda kind: kind.precedence)


def _find_checkpoint(request: SourceRequest) -> CheckpointSource:
    exists = os.path.exists(request.name)
    # If transformers is missing, the hub is asked right away: a mistyped name is then reported as
    # such, and not as a missing library.
    ask_hub = not exists and find_spec("transformers") is None
    check_exists(request.name, request.hub if ask_hub else None)
    if exists:
        check_checkpoint(Path(request.name))
    request.check_adapter_and_dtype()
    return CheckpointSource(
        model_id=request.name,
        tokenizer=request.tokenizer,
        hub=request.hub,
        dtype=request.export_dtype,
        adapter=request.adapter,
        images=request.images,
        text_only=request.text_only,
    )
