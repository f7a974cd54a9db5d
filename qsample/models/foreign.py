"""Decoder files that others exported as models: `bake` gives one the sampler, `ForeignModel` does it when it is
used."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from qsample.destination import Destination
from qsample.errors import QsampleError
from qsample.interface import Features, Interface
from qsample.models.packaged import Compilable, PackagedModel
from qsample.package import Package, check_not_source
from qsample.progress import Progress

if TYPE_CHECKING:
    from qsample.runtime import CausalLM

_SUFFIX: Final = ".onnx"
_WEIGHTS: Final = {".safetensors", ".bin"}  # of a checkpoint, which is exported instead


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignSource:
    """Which decoder, and how it is read: the arguments of `bake`."""

    path: str
    file: str | None = None
    tokenizer: str | None = "auto"
    rope: str | None = None
    reference: str | None = None
    revision: str | None = None
    cache_dir: str | None = None
    token: str | None = None
    local_files_only: bool = False

    @property
    def hub(self) -> dict[str, Any]:
        """The keywords of a download."""
        options = {"revision": self.revision, "cache_dir": self.cache_dir, "token": self.token}
        return options | ({"local_files_only": True} if self.local_files_only else {})

    @property
    def hub_of_reference(self) -> dict[str, Any]:
        """The same for the checkpoint, which is another repository."""
        return {name: value for name, value in self.hub.items() if name != "revision"}


def bake(
    path: str | Path,
    out: str | Path | None = None,
    *,
    file: str | None = None,
    features: Features | None = None,
    tokenizer: str | None = "auto",
    rope: str | None = None,
    reference: str | None = None,
    revision: str | None = None,
    cache_dir: str | None = None,
    token: str | None = None,
    local_files_only: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> PackagedModel:
    """Bake the sampler into a decoder that somebody else exported; neither torch nor transformers is needed.

    Args:
        path: an .onnx file, a folder with one, or a hub id, of which only the decoder's files are downloaded.
        out: the folder of the package; None = a temporary one that lives as long as the result.
        file: which decoder, relative to the folder or repository, where there are several: "onnx/model_q4.onnx".
        features: what the graph shall have, see `interface.Features`; None = the sampler and no more.
        tokenizer: "auto" for the one beside the decoder, another folder, or None for a package of token ids only.
        rope: "short" or "long", for a file with two rotary tables (longrope), of which one is kept: the short one
            unless told otherwise, which limits the context to where the file itself would change over.
        reference: a hub id or folder of the checkpoint, to compare with transformers as well, which needs the extra
            `export`. The figures come into the manifest; a float file that differs is refused.
        revision, cache_dir, token, local_files_only: of the hub, as in transformers.
        overwrite: replace a package that is already there.
        progress: called with a stage's name and the fraction done, in [0, 1].

    Raises UnsupportedModelError, in one line that says why and what to take instead, for a file that cannot be baked;
    ParityError where the baked graph does not compute what the file does; PackageError where `out` cannot be written.
    Nothing is left behind then.

    >>> package = qsample.bake("onnx-community/Qwen3-0.6B-ONNX", "qwen3", file="onnx/model_q4.onnx")
    """
    source = ForeignSource(
        path=str(path),
        file=file,
        tokenizer=tokenizer,
        rope=rope,
        reference=reference,
        revision=revision,
        cache_dir=cache_dir,
        token=token,
        local_files_only=local_files_only,
    )
    return _bake(source, features or Features(), out, overwrite, progress)


def is_decoder(path: Path) -> bool:
    """Whether `path` is an .onnx file, or a folder that holds some, in it or in its onnx/, and no checkpoint."""
    if os.path.isfile(path):
        return path.suffix == _SUFFIX
    files = [*path.glob("*"), *path.glob("onnx/*")] if os.path.isdir(path) else []
    suffixes = {file.suffix for file in files}
    return _SUFFIX in suffixes and not suffixes & _WEIGHTS


class ForeignModel(Compilable):
    """A decoder file, to be baked. `generate` bakes into a temporary folder first, once."""

    def __init__(self, source: ForeignSource, features: Features, provider: str | None = None) -> None:
        self._source = source
        self.features = features
        self._provider = provider
        self._baked: PackagedModel | None = None

    def export(
        self, path: str | Path | None = None, *, overwrite: bool = False, progress: Progress | None = None
    ) -> PackagedModel:
        """Bake to a portable package at `path`; None = a temporary folder that lives as long as the result.

        Raises what `bake` raises, and leaves nothing behind then.
        """
        return _bake(self._source, self.features, path, overwrite, progress, self._provider)

    save_pretrained = export

    @property
    def runtime(self) -> CausalLM:
        """The loaded sessions of a temporary package, which is made by the first call."""
        return self._model.runtime

    @property
    def _model(self) -> PackagedModel:
        if self._baked is None:
            self._baked = self.export()
        return self._baked

    @property
    def config(self) -> Any:
        """The model's config.json."""
        return self._model.config

    @property
    def generation_config(self) -> Any:
        """The model's own settings of `generate`, to be changed or replaced."""
        return self._model.generation_config

    @generation_config.setter
    def generation_config(self, value: Any) -> None:
        self._model.generation_config = value

    @property
    def dtype(self) -> str:
        return self._model.dtype

    @property
    def _sources(self) -> tuple[str | Path, ...]:
        return (self._source.path,)

    @contextmanager
    def _portable(self, dtype: str | None, destination: Path, progress: Progress | None) -> Iterator[Package]:
        exported = self.export(progress=progress)
        yield exported.package  # whose folder lives as long as `exported`


def _bake(
    source: ForeignSource,
    features: Features,
    out: str | Path | None,
    overwrite: bool,
    progress: Progress | None,
    provider: str | None = None,
) -> PackagedModel:
    try:
        from qsample.exporters.foreign.bake import bake as bake_file
    except ModuleNotFoundError as error:
        if error.name not in ("onnx", "onnx_ir"):
            raise
        raise QsampleError(f"baking needs {error.name}; install it: pip install 'qsample[bake]'") from error
    if out is not None:
        check_not_source(out, source.path)
    with Destination(out) as destination:
        package = bake_file(
            source.path,
            destination.path,
            features,
            file=source.file,
            tokenizer=source.tokenizer,
            rope=source.rope,
            hub=source.hub,
            overwrite=overwrite,
            compare=None if source.reference is None else partial(_compare, source.reference, source.hub_of_reference),
            progress=progress,
        )
        return PackagedModel(package, provider, destination.keep())


def _compare(
    checkpoint: str, hub: dict[str, Any], folder: Path, interface: Interface, tolerance: float | None
) -> Mapping[str, Any]:
    """How far the baked graph is from transformers, as an export is compared: figures for the manifest.

    tolerance: largest difference per unit of the largest logit; None = any, for weights that are quantized.
    """
    from qsample.checkpoints.hub_options import HubOptions
    from qsample.checkpoints.load import Checkpoint, load_model
    from qsample.exporters import parity
    from qsample.exporters.huggingface_reference import reference

    figures = parity.check(
        folder / "decoder.onnx",
        folder / "initial_state.onnx",
        interface,
        reference(load_model(Checkpoint(checkpoint, hub=HubOptions(**hub)))),
        tolerance=math.inf if tolerance is None else tolerance,
        original=f"the checkpoint {checkpoint}",
    )
    return {
        "checkpoint": checkpoint,
        "checkpoint_max_error": figures.max_error,
        "checkpoint_scale": figures.scale,
        "checkpoint_windows": figures.windows,
    }
