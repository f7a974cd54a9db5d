"""Exported and compiled packages as models: compile, generate, save."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qsample.compiler.options import CompileOptions
from qsample.destination import Destination
from qsample.disk.scratch import ScratchFolder
from qsample.huggingface.dtypes import dtype_name, is_dtype
from qsample.huggingface.generation_config import GENERATION_CONFIG_FILE, GenerationConfig, as_generation_config
from qsample.huggingface.model_config import ModelConfig
from qsample.huggingface.model_methods import RunsSessions
from qsample.package import Package, check_not_source, copy_package
from qsample.progress import Progress

if TYPE_CHECKING:
    from qsample.runtime import CausalLM


class Compilable(RunsSessions):
    """What a checkpoint, a foreign decoder and a package have in common."""

    def compile(
        self,
        path: str | Path | None = None,
        *,
        options: CompileOptions | None = None,
        overwrite: bool = False,
        progress: Progress | None = None,
        **changes: Any,
    ) -> PackagedModel:
        """Compile for a device into `path`; None = a temporary folder. A checkpoint is exported first.

        Args:
            options: what to compile for; None = `CompileOptions()`, the CPU.
            changes: fields of `CompileOptions`, on top of `options`: provider, batch_size, ctx_len, dtype, weights,
                block_size, quantization_method, calibration_text, kv_cache_dtype, max_divergence.
            overwrite: replace a package that is already there.
            progress: called with a stage's name and the fraction done, in [0, 1].

        Raises CompileError where an option does not fit, the self-test fails or quantized weights are too far off,
        PackageError where `path` cannot be written. Nothing is left behind then.

        >>> model.compile("qwen3-cpu", provider="cpu", ctx_len=2048, weights="int4")
        """
        from qsample.compiler.compile import compile_package

        if is_dtype(changes.get("dtype")):
            changes["dtype"] = dtype_name(changes["dtype"])
        options = (options or CompileOptions()).override(**changes)
        if path is not None:
            check_not_source(path, *self._sources)
        with Destination(path) as destination, self._portable(options.dtype, destination.path, progress) as source:
            compiled = compile_package(source, destination.path, options, overwrite=overwrite, progress=progress)
            return PackagedModel(compiled, options.provider, destination.keep())

    @property
    @abstractmethod
    def _sources(self) -> tuple[str | Path, ...]:
        """The folders that it is made from, which nothing may be written over."""

    @abstractmethod
    def _portable(
        self, dtype: str | None, destination: Path, progress: Progress | None
    ) -> AbstractContextManager[Package]:
        """The portable package to compile for `destination`."""


class PackagedModel(Compilable):
    """An exported or compiled package. Loading its sessions waits for the first `generate`."""

    def __init__(self, package: Package, provider: str | None = None, folder: ScratchFolder | None = None) -> None:
        self.package = package
        self._provider = provider
        self._folder = folder  # a temporary folder is deleted with the last reference to it
        self._runtime: CausalLM | None = None
        self._generation_config = GenerationConfig(package.read_json(GENERATION_CONFIG_FILE))

    @property
    def config(self) -> ModelConfig:
        """The model's config.json."""
        return ModelConfig(self.package.read_json("config.json"))

    @property
    def generation_config(self) -> GenerationConfig:
        """The model's own settings of `generate`, to be changed or replaced; the package keeps those that it has."""
        return self._generation_config

    @generation_config.setter
    def generation_config(self, value: Any) -> None:
        self._generation_config = as_generation_config(value)

    @property
    def dtype(self) -> str:
        return self.package.interface.dtype

    @property
    def runtime(self) -> CausalLM:
        """The loaded sessions; they need onnxruntime, numpy and tokenizers only."""
        if self._runtime is None:
            from qsample.runtime import load

            self._runtime = load(self.package.path, provider=self._provider, verify=False)
        self._runtime.generation_config = self._generation_config
        return self._runtime

    @property
    def _sources(self) -> tuple[str | Path, ...]:
        return (self.package.path,)

    def _portable(
        self, dtype: str | None, destination: Path, progress: Progress | None
    ) -> AbstractContextManager[Package]:
        return nullcontext(self.package)

    def save_pretrained(self, path: str | Path, *, overwrite: bool = False) -> PackagedModel:
        """Copy the package to `path` and return the copy, opened."""
        return PackagedModel(copy_package(self.package, path, overwrite=overwrite), self._provider)

    export = save_pretrained
