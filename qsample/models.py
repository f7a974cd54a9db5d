"""Models with the same verbs, export, compile, generate: packages, checkpoints, decoder files of other exporters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

from qsample.checkpoints.hub import HubOptions
from qsample.compiler.options import CompileOptions
from qsample.destination import Destination, scratch_folder
from qsample.disk.scratch import ScratchFolder
from qsample.errors import QsampleError
from qsample.garbage import young_collections
from qsample.huggingface.configs import GENERATION_CONFIG_FILE, GenerationConfig, ModelConfig, as_generation_config
from qsample.huggingface.dtypes import dtype_name, is_dtype
from qsample.huggingface.model_methods import Device, ModelMethods
from qsample.interface import Features, Interface
from qsample.package import Package, check_not_source, copy_package
from qsample.progress import Progress, Stage, shown, unreported
from qsample.timing import metered
from qsample.values import DEFAULT, check_verify

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from qsample.checkpoints.checkpoint import Checkpoint
    from qsample.runtime import CausalLM, GenerateOutput


class Model(ModelMethods):
    """The verbs of every model: `compile` and `generate`; its sessions are loaded when they are first needed."""

    _export_share: ClassVar[float] = 0.0  # of the time of `compile`

    def __init__(self, provider: str | None) -> None:
        self._provider = provider
        self._generation_config: GenerationConfig | None = None

    @property
    @abstractmethod
    def runtime(self) -> CausalLM:
        """The loaded sessions, which `generate` runs."""

    @property
    def device(self) -> Device:
        from qsample.ort.providers import device_of, execution_providers

        return Device(device_of(execution_providers(self._provider or "cpu")))

    @property
    @abstractmethod
    def dtype(self) -> str:
        """The dtype of the weights and the cache, "float32" for example."""

    @property
    def generation_config(self) -> GenerationConfig:
        """The model's own settings of `generate`, to be changed or replaced; the export of a checkpoint keeps changes,
        a package keeps the settings that it was made with."""
        if self._generation_config is None:
            self._generation_config = self._own_generation_config()
        return self._generation_config

    @generation_config.setter
    def generation_config(self, value: Any) -> None:
        self._generation_config = as_generation_config(value)

    @overload
    def generate(
        self, inputs: Any = ..., params: Any = ..., *, return_dict_in_generate: Literal[False], **options: Any
    ) -> Any: ...

    @overload
    def generate(
        self, inputs: Any = ..., params: Any = ..., *, return_dict_in_generate: bool | None = ..., **options: Any
    ) -> GenerateOutput: ...

    def generate(self, inputs: Any = None, params: Any = None, **options: Any) -> Any:
        """Generate text or tokens; see `runtime.CausalLM.generate`."""
        return self.runtime.generate(inputs, params, **options)

    @young_collections()
    def compile(
        self,
        path: str | Path | None = None,
        *,
        options: CompileOptions | None = None,
        overwrite: bool = False,
        progress: Progress | None = None,
        **changes: Any,
    ) -> PackagedModel:
        """Compile for a device. A checkpoint or a decoder file is exported first.

        Args:
            path: the folder of the package; None = a temporary folder that lives as long as the result.
            options: what to compile for; None = `CompileOptions()`, the CPU.
            overwrite: replace a package at `path`.
            progress: called with a stage's name and the fraction done, in [0, 1]; None = a bar, on a terminal.
            changes: fields of `CompileOptions`, on top of `options`: provider, batch_size, ctx_len, dtype, weights,
                block_size, quantization_method, calibration_text, kv_cache_dtype, max_divergence, verify.

        Returns:
            The device package. Nothing remains after an error.

        Raises:
            CompileError: if an option does not fit, the self-test fails or quantized weights are too far off.
            PackageError: if `path` cannot be written.

        >>> model.compile("qwen3-cpu", provider="cpu", ctx_len=2048, weights="int4")
        """
        from qsample.compiler.compile import compile_package
        from qsample.compiler.targets import find_target

        if is_dtype(changes.get("dtype")):
            changes["dtype"] = dtype_name(changes["dtype"])
        options = (options or CompileOptions()).override(**changes)
        if self._export_share:  # an export may take minutes
            find_target(options.provider).check_installed()
        if path is not None:
            check_not_source(path, *self._sources)
        with shown(progress) as report, metered(report) as meter, Destination(path) as destination:
            exporting, compiling = meter.part(0.0, self._export_share), meter.part(self._export_share, 1.0)
            with self._portable(options, destination.path, exporting) as source:
                compiled = compile_package(source, destination.path, options, overwrite=overwrite, progress=compiling)
                return PackagedModel(compiled, options.provider, destination.keep())

    @property
    @abstractmethod
    def _sources(self) -> tuple[str | Path, ...]:
        """The folders that the model is read from, which nothing may be written over."""

    @abstractmethod
    def _own_generation_config(self) -> GenerationConfig:
        """The settings that come with the model."""

    @abstractmethod
    def _portable(
        self, options: CompileOptions, destination: Path, progress: Progress | None
    ) -> AbstractContextManager[Package]:
        """The portable package to compile for `destination`, exported first if need be, in the dtype of `options` if
        possible."""


class PackagedModel(Model):
    """An exported or compiled package. Its sessions are loaded by the first `generate`."""

    def __init__(self, package: Package, provider: str | None = None, folder: ScratchFolder | None = None) -> None:
        """
        Args:
            package: verified.
            provider: the execution provider; None = the provider that the package was compiled for, otherwise "cpu".
            folder: the temporary folder of the package, which is deleted with the last reference to it.
        """
        super().__init__(provider)
        self.package = package
        self.features = package.interface.features
        self._folder = folder
        self._runtime: CausalLM | None = None

    @property
    def config(self) -> ModelConfig:
        """The model's config.json."""
        return ModelConfig(self.package.read_json("config.json"))

    @property
    def device(self) -> Device:
        from qsample.ort.providers import device_of

        compilation = self.package.manifest.compilation
        return Device(device_of(compilation.execution_providers)) if compilation else super().device

    @property
    def dtype(self) -> str:
        return self.package.interface.dtype

    @property
    def runtime(self) -> CausalLM:
        """The loaded sessions; they need onnxruntime, numpy and tokenizers only."""
        if self._runtime is None:
            from qsample.runtime import load

            self._runtime = load(self.package.path, provider=self._provider, verify=False)
        self._runtime.generation_config = self.generation_config
        return self._runtime

    def save_pretrained(self, path: str | Path, *, overwrite: bool = False) -> PackagedModel:
        """Copy the package to `path` and return the copy, opened."""
        return PackagedModel(copy_package(self.package, path, overwrite=overwrite), self._provider)

    export = save_pretrained

    @property
    def _sources(self) -> tuple[str | Path, ...]:
        return (self.package.path,)

    def _own_generation_config(self) -> GenerationConfig:
        return GenerationConfig(self.package.read_json(GENERATION_CONFIG_FILE))

    def _portable(
        self, options: CompileOptions, destination: Path, progress: Progress | None
    ) -> AbstractContextManager[Package]:
        return nullcontext(self.package)


class ExportableModel(Model):
    """A model that becomes a package. `generate` exports into a temporary folder first, once."""

    _export_share = 0.5

    def __init__(self, features: Features, provider: str | None) -> None:
        super().__init__(provider)
        self.features = features
        self._exported: PackagedModel | None = None

    @young_collections()
    def export(
        self,
        path: str | Path | None = None,
        *,
        overwrite: bool = False,
        verify: str = DEFAULT,
        progress: Progress | None = None,
    ) -> PackagedModel:
        """Export to a portable package.

        Args:
            path: the folder of the package; None = a temporary folder that lives as long as the result.
            overwrite: replace a package at `path`.
            verify: how much of the graph is compared with the model: "default", or "full", which takes several times as
                long; docs/architecture.md has what each proves.
            progress: called with a stage's name and the fraction done, in [0, 1]; None = a bar, on a terminal.

        Returns:
            The package. Nothing remains after an error.

        Raises:
            UnsupportedModelError: for a model that cannot be exported.
            ParityError: if the graph does not compute what the model computes.
            PackageError: if `path` cannot be written.
        """
        check_verify(verify)
        if path is not None:
            check_not_source(path, *self._sources)
        with shown(progress) as report, metered(report) as meter, Destination(path) as destination:
            package = self._write(destination.path, overwrite, verify, meter)
            return PackagedModel(package, self._provider, destination.keep())

    save_pretrained = export

    @property
    def runtime(self) -> CausalLM:
        """The loaded sessions of a temporary export, which is made by the first call."""
        exported = self._packaged
        if self._generation_config is not None:
            exported.generation_config = self._generation_config
        return exported.runtime

    @property
    def _packaged(self) -> PackagedModel:
        if self._exported is None:
            self._exported = self.export()
        return self._exported

    @abstractmethod
    def _write(self, path: Path, overwrite: bool, verify: str, progress: Progress | None) -> Package:
        """Write the package to `path`."""


class CheckpointModel(ExportableModel):
    """A Hugging Face checkpoint, opened once for all that is asked of it."""

    def __init__(self, checkpoint: Checkpoint, features: Features, provider: str | None = None) -> None:
        super().__init__(features, provider)
        self._checkpoint = checkpoint

    @property
    def config(self) -> PretrainedConfig:
        """The checkpoint's configuration, as transformers reads it."""
        return self._checkpoint.config

    @property
    def dtype(self) -> str:
        return self._checkpoint.dtype

    @property
    def _sources(self) -> tuple[str | Path, ...]:
        checkpoint = self._checkpoint
        return tuple(filter(None, (checkpoint.model_id, checkpoint.adapter, checkpoint.tokenizer_id)))

    def _own_generation_config(self) -> GenerationConfig:
        return as_generation_config(self._checkpoint.generation_config)

    def _write(self, path: Path, overwrite: bool, verify: str, progress: Progress | None) -> Package:
        from qsample.exporters.export import export_model

        with scratch_folder(path) as scratch:
            model = self._load(None, scratch.new, progress)
            return export_model(path=path, overwrite=overwrite, verify=verify, progress=progress, **model)

    @contextmanager
    def _portable(self, options: CompileOptions, destination: Path, progress: Progress | None) -> Iterator[Package]:
        """In a scratch folder, with its weights in the checkpoint's files.

        float16 is set before the export, because transformers itself decides which parts of a model stay in float32;
        bfloat16, which no CPU could check, by the compiler.
        """
        from qsample.exporters.export import EXPORT_DTYPES, export_beside_checkpoint

        with scratch_folder(destination) as scratch:
            package = export_beside_checkpoint(
                **self._load(options.dtype if options.dtype in EXPORT_DTYPES else None, scratch.new, progress),
                folder=scratch.path / "portable",
                verify=options.verify,
                progress=progress,
            )
            with package.sources:
                yield package

    def _load(self, dtype: str | None, scratch: Path, progress: Progress | None = None) -> dict[str, Any]:
        """The arguments of an export. dtype, scratch: as `Checkpoint.load` takes them."""
        from qsample.checkpoints.checkpoint import transformers_generation_config
        from qsample.disk.source_files import SourceFiles

        (progress or unreported)(Stage.OPENING, 0.0)
        checkpoint = self._checkpoint
        _ = checkpoint.config, checkpoint.adapter_files  # do they exist?
        changed = self._generation_config
        settings = None if changed is None else transformers_generation_config(changed)
        tokenizer = checkpoint.tokenizer  # before the model: it fails fast
        with SourceFiles() as sources:
            model = checkpoint.load(dtype, scratch, sources)
        model.generation_config = settings or model.generation_config
        return {
            "model": model,
            "tokenizer": tokenizer,
            "features": self.features,
            "model_id": checkpoint.name,
            "revision": checkpoint.revision,
            "sources": sources,
        }


class ForeignModel(ExportableModel):
    """A decoder file of another exporter, to be baked."""

    def __init__(
        self,
        path: str | Path,
        features: Features,
        provider: str | None = None,
        *,
        file: str | None = None,
        tokenizer: str | None = "auto",
        rope: str | None = None,
        reference: str | None = None,
        hub: HubOptions | None = None,
    ) -> None:
        """The arguments are those of `bake`; provider: as in `PackagedModel`."""
        super().__init__(features, provider)
        self._path = path
        self._reference = reference
        self._hub = hub or HubOptions()
        self._options = {"file": file, "tokenizer": tokenizer, "rope": rope}

    @property
    def config(self) -> ModelConfig:
        """The model's config.json."""
        return self._packaged.config

    @property
    def dtype(self) -> str:
        return self._packaged.dtype

    @property
    def _sources(self) -> tuple[str | Path, ...]:
        return (self._path,)

    def _own_generation_config(self) -> GenerationConfig:
        return self._packaged.generation_config

    @contextmanager
    def _portable(self, options: CompileOptions, destination: Path, progress: Progress | None) -> Iterator[Package]:
        exported = self.export(verify=options.verify, progress=progress)
        yield exported.package  # whose folder lives as long as `exported`

    def _write(self, path: Path, overwrite: bool, verify: str, progress: Progress | None) -> Package:
        try:
            from qsample.exporters.foreign.bake import bake as bake_file
        except ModuleNotFoundError as error:
            if error.name not in ("onnx", "onnx_ir"):
                raise
            raise QsampleError(f"baking needs {error.name}; install it: pip install 'qsample[bake]'") from error
        return bake_file(
            self._path,
            path,
            self.features,
            hub=self._hub,
            overwrite=overwrite,
            compare=None if self._reference is None else partial(self._compare, verify),
            verify=verify,
            progress=progress,
            **self._options,
        )

    def _compare(self, verify: str, folder: Path, interface: Interface, tolerance: float | None) -> Mapping[str, Any]:
        """See `exporters.foreign.bake.Comparison`."""
        from qsample.checkpoints.checkpoint import Checkpoint
        from qsample.exporters.huggingface_reference import compare_with_checkpoint

        assert self._reference is not None
        checkpoint = Checkpoint(self._reference, hub=self._hub.for_another_repository())
        return compare_with_checkpoint(checkpoint, folder, interface, tolerance, verify)
