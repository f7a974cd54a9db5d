"""Decoder files of other exporters as a source of models: the paths that hold one, and its way into
a package.

Neither onnx nor torch is imported until a file is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from qsample.checkpoints.private_parts import check_private_parts
from qsample.contract.interface import Features, Interface
from qsample.errors import QsampleError, install_hint
from qsample.models.sources import GraphSource, SourceDescription, SourceKind, SourceRequest
from qsample.package.package import Package
from qsample.progress import Progress

if TYPE_CHECKING:
    from qsample.addons.bake.describe import Description

_SUFFIX: Final = ".onnx"
_CHECKPOINT_SUFFIXES: Final = frozenset((".safetensors", ".bin"))


@dataclass(frozen=True, kw_only=True)
class DecoderSource(GraphSource):
    """A decoder file of another exporter; see `qsample.bake`.

    Attributes:
        rope: which of a file's two rotary tables is used, "short" or "long"; None for the short
            one.
        reference: a hub id or folder of the checkpoint to compare with; None for no comparison.
    """

    kind: ClassVar = "decoder file"

    rope: str | None = None
    reference: str | None = None

    @property
    def notice(self) -> str:
        return f"{self.model_id} holds a decoder file; it is used as `qsample bake` writes it"

    def identity(self) -> dict[str, Any]:
        return super().identity() | {"rope": self.rope, "reference": self.reference}

    def write_package(
        self, path: Path, features: Features, *, overwrite: bool, progress: Progress | None
    ) -> Package:
        with bake_installed():
            from qsample.addons.bake.bake import BakeOptions, bake
        options = BakeOptions(
            features=features,
            rope=self.rope,
            overwrite=overwrite,
            compare=None if self.reference is None else self._compare,
        )
        return bake(self, path, options, progress=progress)

    def _compare(
        self, folder: Path, interface: Interface, tolerance: float | None
    ) -> Mapping[str, Any]:
        """Compare a package with the reference; see `bake.Comparison`."""
        check_private_parts()
        from qsample.checkpoints.checkpoint import Checkpoint
        from qsample.exporters.huggingface_reference import compare_with_checkpoint

        assert self.reference is not None
        checkpoint = Checkpoint(self.reference, hub=self.hub.for_another_repository())
        return compare_with_checkpoint(checkpoint, folder, interface, tolerance)


class DecoderKind(SourceKind):
    """Decoder files: an .onnx file, a folder with such files and no checkpoint, or any path with
    the name of a file."""

    precedence = 20

    def find(self, request: SourceRequest) -> DecoderSource | None:
        path = Path(request.name)
        if request.file is None and not self.holds_graph(path):
            return None
        request.check_text_suffices()
        if request.adapter is not None or request.dtype is not None:
            given = "adapter" if request.adapter is not None else "dtype"
            raise QsampleError(
                f"{path} is a decoder file, whose weights are as they are; leave {given} out"
            )
        return DecoderSource(
            model_id=str(path), file=request.file, tokenizer=request.tokenizer, hub=request.hub
        )

    def describe(self, path: Path) -> SourceDescription | None:
        if not self.holds_graph(path):
            return None
        with bake_installed():
            from qsample.addons.bake.describe import describe
        decoders = describe(path)
        return SourceDescription(
            document=[asdict(decoder) for decoder in decoders],
            tables={decoder.file: _facts(decoder) for decoder in decoders},
        )

    def holds_graph(self, path: Path) -> bool:
        if os.path.isfile(path):
            return path.suffix == _SUFFIX
        if not os.path.isdir(path):
            return False
        suffixes = {file.suffix for file in (*path.glob("*"), *path.glob("onnx/*"))}
        return _SUFFIX in suffixes and suffixes.isdisjoint(_CHECKPOINT_SUFFIXES)


DECODER: Final = DecoderKind()


def _facts(decoder: Description) -> dict[str, Any]:
    """The facts of a decoder file to read, by name."""
    facts: dict[str, Any] = {
        "made by": f"{decoder.made_by}, opset {decoder.opset}",
        "inputs": decoder.inputs,
        "operators": decoder.operators,
        "layers": decoder.layers,
    }
    if decoder.states > 0:
        facts["states"] = f"{decoder.states} recurrent or convolutional"
    if decoder.dtype:
        facts["numbers"] = f"{decoder.dtype} caches, vocabulary {decoder.vocab_size}"
    if decoder.bits:
        facts["weights"] = f"packed in {' and '.join(map(str, decoder.bits))} bits"
    facts["bake"] = decoder.refusal
    if decoder.refusal is None:
        facts["bake"] = "takes it; it runs the file to measure its attention, and compares"
    return facts


@contextmanager
def bake_installed() -> Iterator[None]:
    """Raises QsampleError if an import inside lacks a library of the extra `bake`."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("onnx", "onnx_ir"):
            raise
        raise QsampleError(f"decoder files need {error.name}: `{install_hint('bake')}`") from error
