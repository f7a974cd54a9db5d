"""Models with the same verbs, export, compile, generate: packages, and the sources that packages are made of."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import cached_property, partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

from qsample.addons.formats.gguf.models import read_model
from qsample.checkpoints.private_parts import check_private_parts
from qsample.checkpoints.source import CheckpointSource, DecoderSource
from qsample.compiler.options import CompileOptions
from qsample.contract.arrays import Array
from qsample.contract.interface import Features, Interface
from qsample.disk.scratch import Destination, ScratchFolder, scratch_near
from qsample.errors import QsampleError, install_hint
from qsample.huggingface.facade import (
    Device,
    GenerationConfig,
    ModelConfig,
    ModelMethods,
    as_generation_config,
    dtype_name,
    is_dtype,
)
from qsample.models.cache import Recipe, open_cached
from qsample.package.package import (
    Package,
    check_not_source,
    check_target,
    copy_package,
)
from qsample.package.signature import TrustedKeys
from qsample.progress import Progress, Stage, metered, shown, unreported, young_collections
from qsample.request.qefficient import read_compile, read_generate
from qsample.request.refusals import NO_ADAPTERS
from qsample.request.sampling_params import GENERATION_CONFIG_FILE

if TYPE_CHECKING:
    from qsample.checkpoints.checkpoint import Checkpoint
    from qsample.exporters.export import LoadedModel
    from qsample.runtime import CausalLM, GenerateOutput
    from qsample.runtime.adapters import Adapter


class Model(ModelMethods):
    """The verbs of every model: `compile` and `generate`; its sessions are loaded when they are first needed."""

    _export_share: ClassVar[float] = 0.0  # of the time of `compile`

    def __init__(self, provider: str | None) -> None:
        self._provider = provider
        self._generation_config: GenerationConfig | None = None

    @abstractmethod
    def __repr__(self) -> str:
        """The model in a line."""

    @property
    @abstractmethod
    def runtime(self) -> CausalLM:
        """The loaded sessions that `generate` runs."""

    @property
    def device(self) -> Device:
        from qsample.ort.providers import device_of, execution_providers

        return Device(device_of(execution_providers(self._provider or "cpu")))

    @property
    def generation_config(self) -> GenerationConfig:
        """The model's settings of `generate`, to be changed or replaced. The export of a checkpoint keeps changes; a
        package keeps the settings that it was made with."""
        if self._generation_config is None:
            self._generation_config = self._own_generation_config()
        return self._generation_config

    @generation_config.setter
    def generation_config(self, value: Any) -> None:
        self._generation_config = as_generation_config(value)

    @overload
    def generate(
        self,
        inputs: Any = ...,
        params: Any = ...,
        *,
        return_dict_in_generate: Literal[False],
        **options: Any,
    ) -> Any: ...

    @overload
    def generate(
        self,
        inputs: Any = ...,
        params: Any = ...,
        *,
        return_dict_in_generate: bool | None = ...,
        **options: Any,
    ) -> GenerateOutput: ...

    def generate(self, inputs: Any = None, params: Any = None, **options: Any) -> Any:
        """Generate text or tokens; see `runtime.CausalLM.generate`. QEfficient's arguments are known, too."""
        inputs, params, options = read_generate(inputs, params, options, self.features)
        return self.runtime.generate(inputs, params, **options)

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The LoRA adapters that `load_adapter` loaded, by name."""
        return self.runtime.adapters

    def load_adapter(
        self, adapter_name: str, path: str | Path, *, hotswap: bool = False
    ) -> Adapter:
        """Load a LoRA adapter, see `runtime.CausalLM.load_adapter`. Raises ValueError for a model without max_loras."""
        if not self.features.max_loras:  # before an export
            raise ValueError(NO_ADAPTERS)
        return self.runtime.load_adapter(adapter_name, path, hotswap=hotswap)

    def unload_adapter(self, adapter_name: str) -> None:
        """Forget a LoRA adapter; see `runtime.CausalLM.unload_adapter`."""
        self.runtime.unload_adapter(adapter_name)

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
        """Compile for a device. A checkpoint or a decoder file is exported first, and its `generate` then runs the
        package.

        Args:
            path: the folder of the package; by default a temporary folder that lives as long as the result.
            options: by default `CompileOptions()`, for the CPU.
            overwrite: replace a package at `path`.
            progress: called with a stage's name and the fraction done, in [0, 1]; by default a bar, on a terminal.
            changes: fields of `CompileOptions`, on top of `options`; or QEfficient's arguments (docs/qefficient.md).

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
        options = (options or CompileOptions()).override(**read_compile(changes))
        if self._export_share:  # an export may take minutes
            find_target(options.provider).check_installed()
        self._check_out(path, overwrite)
        with shown(progress) as report, metered(report) as meter, Destination(path) as destination:
            exporting, compiling = (
                meter.part(0.0, self._export_share),
                meter.part(self._export_share, 1.0),
            )
            with self._portable(options, destination.path, exporting) as source:
                compiled = compile_package(
                    source, destination.path, options, overwrite=overwrite, progress=compiling
                )
                return self._keep(PackagedModel(compiled, options.provider, destination.keep()))

    def _keep(self, compiled: PackagedModel) -> PackagedModel:
        """The model that `compile` made; `generate` may run it from now on."""
        return compiled

    def _check_out(self, path: str | Path | None, overwrite: bool) -> None:
        """Raise PackageError, before any work, if the package cannot be written to `path`."""
        if path is not None:
            check_not_source(path, *self._sources)
            target = Path(os.path.realpath(path))
            check_target(target, target, overwrite)

    @property
    @abstractmethod
    def _sources(self) -> tuple[str | Path, ...]:
        """The folders that the model is read from; nothing may be written over them."""

    @abstractmethod
    def _own_generation_config(self) -> GenerationConfig:
        """The settings that come with the model."""

    @abstractmethod
    def _portable(
        self, options: CompileOptions, destination: Path, progress: Progress | None
    ) -> AbstractContextManager[Package]:
        """The portable package to compile for `destination`, in the dtype of `options` if possible; exported first
        if need be."""


class PackagedModel(Model):
    """An exported or compiled package. Its sessions are loaded by the first `generate`."""

    def __init__(
        self,
        package: Package,
        provider: str | None = None,
        holding: ScratchFolder | FileIO | None = None,
        trusted_keys: TrustedKeys | None = None,
    ) -> None:
        """The model of a verified `package`. provider: by default the package's, otherwise "cpu". holding goes with the
        last reference to this object: the package's temporary folder, or the lock that keeps it in the cache.
        trusted_keys: of which one has to have signed it when its sessions are loaded, too."""
        super().__init__(provider)
        self.package = package
        self.features = package.interface.features
        self._holding = holding
        self._trusted_keys = trusted_keys
        self._runtime: CausalLM | None = None

    def __repr__(self) -> str:
        return f"PackagedModel({self.package.summary})"

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

            self._runtime = load(
                self.package.path,
                provider=self._provider,
                verify=False,
                trusted_keys=self._trusted_keys,
            )
        self._runtime.generation_config = self.generation_config
        return self._runtime

    def save_pretrained(self, path: str | Path, *, overwrite: bool = False) -> PackagedModel:
        """Copy the package to `path`, with `overwrite` over a package, and return the copy, opened. Raises PackageError
        if it cannot be written."""
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


class SourceModel(Model):
    """A checkpoint, or a decoder file of another exporter, that becomes a package. `generate` takes the package that
    `compile` made last, otherwise the package from the user's cache; the first call makes it there."""

    _export_share = 0.5

    def __init__(
        self,
        source: CheckpointSource | DecoderSource,
        features: Features,
        provider: str | None = None,
    ) -> None:
        """source: what is exported. features: of its graph. provider: of `generate`; by default "cpu"."""
        super().__init__(provider)
        self.source = source
        self.features = features

    def __repr__(self) -> str:
        kind = "decoder file" if isinstance(self.source, DecoderSource) else "checkpoint"
        return f"SourceModel({self.source.model_id}, {kind} to export or compile)"

    @property
    def config(self) -> Any:
        """The checkpoint's configuration, as transformers reads it; of a decoder file, the package's ModelConfig."""
        return self._described.config

    @property
    def dtype(self) -> str:
        return self._described.dtype

    @young_collections()
    def export(
        self,
        path: str | Path | None = None,
        *,
        overwrite: bool = False,
        progress: Progress | None = None,
    ) -> PackagedModel:
        """Export to a portable package, and return it; the arguments are as in `compile`. Nothing remains after an
        error.

        Raises:
            UnsupportedModelError: for a model that cannot be exported.
            ParityError: if the graph does not compute the model's logits.
            PackageError: if `path` cannot be written.
        """
        self._check_out(path, overwrite)
        with shown(progress) as report, metered(report) as meter, Destination(path) as destination:
            package = self._write(destination.path, overwrite, meter)
            return PackagedModel(package, self._provider, destination.keep())

    save_pretrained = export

    @young_collections()
    def cached(
        self,
        *,
        weights: str | None = None,
        preset: str | None = None,
        ctx_len: int | None = None,
        progress: Progress | None = None,
    ) -> PackagedModel:
        """The package of this model in the user's cache, compiled for the model's provider; made first if need be.

        It is found without the model's libraries, and is the same for all processes of the user. If the model's files
        change, another is made. docs/command-line.md describes the cache.

        Args:
            weights, preset, ctx_len: as in `CompileOptions`; by default the options' or the model's.
            progress: as in `compile`.

        Raises:
            QsampleError: if the cache cannot be written; and as `export` and `compile` do.
        """
        given: dict[str, Any] = {"weights": weights, "preset": preset, "ctx_len": ctx_len}
        options = CompileOptions(
            **{name: value for name, value in given.items() if value is not None}
        )  # checked first
        provider = self._provider or options.provider
        parts = {
            "model": self.source.identity(),
            "features": asdict(self.features),
            "provider": provider,
            **given,
        }
        name = "-".join(
            filter(None, (Path(self.source.model_id).name, str(provider), weights, preset))
        )
        recipe = Recipe(name, parts, self.source.pinned().model_id)
        with shown(progress) as report:
            make = partial(self._make, provider=provider, options=options, progress=report)
            package, holding = open_cached(recipe, make, report)
        return PackagedModel(package, self._provider, holding)

    def eager_logits(self) -> Callable[[list[list[int]]], list[Array]] | None:
        """A function from rows of token ids to their logits, [n, V] float32 each, in transformers; None for a decoder
        file."""
        if self._checkpoint is None:
            return None
        from qsample.exporters.huggingface_reference import eager_logits

        return partial(eager_logits, self._checkpoint.load())

    def _make(
        self, path: Path, *, provider: Any, options: CompileOptions, progress: Progress | None
    ) -> None:
        """Write the package of `cached` to `path`: compiled, or as exported for a provider that is no target."""
        from qsample.compiler.targets import Capability, find_target, target_names
        from qsample.ort.providers import execution_providers

        # The model as it is on the disk or at a commit of the hub, without settings that were changed since.
        source, is_target = self.source.pinned(), provider in target_names()
        if isinstance(source, CheckpointSource) and source.images is None and is_target:
            reads_images = Capability.IMAGES in find_target(provider).capabilities
            source = replace(source, text_only=source.text_only or not reads_images)
        unchanged = SourceModel(source, self.features, self._provider)
        if not is_target:
            execution_providers(provider)  # is there such a provider?
            unchanged.export(path, progress=progress)
            return
        preferred = find_target(provider).default_options
        if (
            "dtype" in preferred and self._checkpoint is not None and self.dtype == "float16"
        ):  # the caller chose it
            preferred = {**preferred, "dtype": "float16"}
        unchanged.compile(
            path, options=options.override(provider=provider, **preferred), progress=progress
        )

    @property
    def runtime(self) -> CausalLM:
        """The loaded sessions of the package that `generate` runs."""
        if self._generation_config is not None:
            self._packaged.generation_config = self._generation_config
        return self._packaged.runtime

    @cached_property
    def _packaged(self) -> PackagedModel:
        return self.cached()

    @property
    def device(self) -> Device:
        return self._packaged.device if "_packaged" in vars(self) else super().device

    def _keep(self, compiled: PackagedModel) -> PackagedModel:
        self._packaged = compiled
        return compiled

    @cached_property
    def _checkpoint(self) -> Checkpoint | None:
        """Opened once, when first needed; None for a decoder file."""
        source = self.source
        if isinstance(source, DecoderSource):
            return None
        options: dict[str, Any] = {
            "tokenizer": source.tokenizer,
            "adapter": source.adapter,
            "hub": source.hub,
        }
        if (path := source.gguf) is not None:
            file = read_model(path)
            with young_collections():
                check_private_parts()
                from qsample.addons.formats.gguf.checkpoint import GgufCheckpoint
            return GgufCheckpoint(
                file,
                "/".join(filter(None, (source.model_id, source.file))),
                source.dtype,
                **options,
            )
        with young_collections():
            check_private_parts()
            from qsample.checkpoints.checkpoint import Checkpoint
        return Checkpoint(
            source.model_id,
            source.dtype,
            images=source.images,
            text_only=source.text_only,
            **options,
        )

    @property
    def _described(self) -> Checkpoint | PackagedModel:
        return self._checkpoint or self._packaged

    @property
    def _sources(self) -> tuple[str | Path, ...]:
        return self.source.folders

    def _own_generation_config(self) -> GenerationConfig:
        return as_generation_config(self._described.generation_config)

    def _write(self, path: Path, overwrite: bool, progress: Progress | None) -> Package:
        """Write the package to `path`."""
        if isinstance(self.source, DecoderSource):
            with bake_installed():
                from qsample.addons.bake.bake import bake
            compare = None if self.source.reference is None else partial(self._compare, self.source)
            return bake(
                self.source,
                path,
                self.features,
                overwrite=overwrite,
                compare=compare,
                progress=progress,
            )
        _ = self._checkpoint  # what is not read is refused before torch is imported
        from qsample.exporters.export import export_model

        with scratch_near(path) as scratch:
            loaded = self._load(None, scratch.new, progress)
            return export_model(loaded, path, self.features, overwrite=overwrite, progress=progress)

    @contextmanager
    def _portable(
        self, options: CompileOptions, destination: Path, progress: Progress | None
    ) -> Iterator[Package]:
        """In a scratch folder, with its weights in the checkpoint's files. float16 is set before the export, because
        transformers chooses the parts of a model that stay in float32; bfloat16 is left to the compiler: no CPU could
        check it."""
        if self._checkpoint is None:
            exported = self.export(progress=progress)
            yield exported.package  # whose folder lives as long as `exported`
            return
        from qsample.exporters.export import EXPORT_DTYPES, export_unpublished

        with scratch_near(destination) as scratch:
            dtype = options.dtype if options.dtype in EXPORT_DTYPES else None
            package = export_unpublished(
                self._load(dtype, scratch.new, progress),  # nothing else holds the model
                scratch.path / "portable",
                self.features,
                progress=progress,
            )
            with package.sources:
                yield package

    def _load(
        self, dtype: str | None, scratch: Path, progress: Progress | None = None
    ) -> LoadedModel:
        """The loaded checkpoint, to be exported. dtype, scratch: as `Checkpoint.load` takes them."""
        (progress or unreported)(Stage.OPENING, 0.0)
        from qsample.checkpoints.checkpoint import transformers_generation_config
        from qsample.disk.source_files import SourceFiles
        from qsample.exporters.export import LoadedModel

        checkpoint = self._checkpoint
        assert checkpoint is not None
        _ = checkpoint.config, checkpoint.adapter_files  # do they exist?
        changed = self._generation_config
        settings = None if changed is None else transformers_generation_config(changed)
        tokenizer, processor = (
            checkpoint.tokenizer,
            checkpoint.processor,
        )  # before the model: they fail fast
        with SourceFiles() as sources:
            model = checkpoint.load(dtype, scratch, sources)
            origin = checkpoint.origin(sources)
        model.generation_config = settings or model.generation_config
        return LoadedModel(model, tokenizer, origin, processor, sources)

    @staticmethod
    def _compare(
        source: DecoderSource, folder: Path, interface: Interface, tolerance: float | None
    ) -> Mapping[str, Any]:
        """See `addons.bake.bake.Comparison`."""
        check_private_parts()
        from qsample.checkpoints.checkpoint import Checkpoint
        from qsample.exporters.huggingface_reference import compare_with_checkpoint

        assert source.reference is not None
        checkpoint = Checkpoint(source.reference, hub=source.hub.for_another_repository())
        return compare_with_checkpoint(checkpoint, folder, interface, tolerance)


@contextmanager
def bake_installed() -> Iterator[None]:
    """Raises QsampleError if an import inside lacks a library of the extra `bake`."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("onnx", "onnx_ir"):
            raise
        raise QsampleError(f"decoder files need {error.name}: `{install_hint('bake')}`") from error
