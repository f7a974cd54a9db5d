"""Models with the same verbs, export, compile and generate: packages, and the sources that packages
are made from."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import cached_property, partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, overload

from qsample.compiler.options import CompileOptions
from qsample.contract.arrays import Array
from qsample.contract.interface import Features
from qsample.models.cache import Recipe, open_cached
from qsample.models.dialects import GenerateArguments, read_compile, read_generate
from qsample.models.sources import CheckpointSource, GraphSource, ModelSource, WeightSource
from qsample.package.disk.scratch import Destination, ScratchFolder, scratch_near
from qsample.package.package import (
    Package,
    check_not_source,
    check_target,
    copy_package,
)
from qsample.package.signature import TrustedKeys
from qsample.progress import Progress, Stage, metered, shown, unreported, young_collections
from qsample.request.huggingface.facade import (
    Device,
    GenerationConfig,
    ModelConfig,
    ModelMethods,
    as_generation_config,
    dtype_name,
    is_dtype,
)
from qsample.request.refusals import NO_ADAPTERS, NO_GRAMMARS
from qsample.request.sampling_params import GENERATION_CONFIG_FILE

if TYPE_CHECKING:
    from qsample.checkpoints.checkpoint import Checkpoint
    from qsample.exporters.export import LoadedModel
    from qsample.request.structured.tables import TokenGrammar
    from qsample.runtime import CausalLM, GenerateOutput
    from qsample.runtime.adapters import Adapter


class Model(ModelMethods):
    """The verbs of every model: `compile` and `generate`. Its sessions are loaded when they are
    first needed."""

    # The share of the time of `compile` that an export takes.
    _export_share: ClassVar[float] = 0.0

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
    def model(self) -> Self:
        """The model itself: programs for transformers and QEfficient read model.model.config, too."""
        return self

    @property
    def device(self) -> Device:
        from qsample.ort.providers import device_of, execution_providers

        return Device(
            device_of(execution_providers("cpu" if self._provider is None else self._provider))
        )

    @property
    def generation_config(self) -> GenerationConfig:
        """The model's settings of `generate`, which may be changed or replaced.

        The export of a checkpoint writes them with their changes; a package on the disk keeps the
        settings that it was made with.
        """
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
        """Generate text or tokens; see `runtime.CausalLM.generate`. The arguments of other programs
        are accepted if an add-on knows them."""
        given = GenerateArguments(inputs, params, options)
        arguments = read_generate(given, self.features)
        return self.runtime.generate(arguments.inputs, arguments.params, **arguments.keywords)

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The LoRA adapters that `load_adapter` loaded, by name."""
        return self.runtime.adapters

    def grammar(self, **form: Any) -> TokenGrammar:
        """Tables by which the graph keeps an answer to a form, see `runtime.CausalLM.grammar`, which
        has the arguments. Raises ValueError for a model without grammars."""
        if not self.features.grammars:  # before an export
            raise ValueError(NO_GRAMMARS)
        return self.runtime.grammar(**form)

    def load_adapter(
        self, adapter_name: str, path: str | Path, *, hotswap: bool = False
    ) -> Adapter:
        """Load a LoRA adapter, see `runtime.CausalLM.load_adapter`. Raises ValueError for a model
        without max_loras."""
        if self.features.max_loras == 0:  # before an export
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
        """Compile for a device. A checkpoint or a decoder file is exported first, and its
        `generate` then runs the package.

        Args:
            path: the folder of the package; by default a temporary folder that lives as long as the
                result.
            options: by default `CompileOptions()`, for the CPU.
            overwrite: replace a package at `path`.
            progress: called with a stage's name and the fraction done, in [0, 1]; by default a bar,
                on a terminal.
            changes: fields of `CompileOptions`, on top of `options`; or QEfficient's arguments
                (docs/qefficient.md).

        Returns:
            The device package. Nothing remains after an error.

        Raises:
            CompileError: if an option does not fit, the self-test fails or quantized weights are
                too far off.
            PackageError: if `path` cannot be written.

        >>> model.compile("qwen3-cpu", provider="cpu", ctx_len=2048, weights="int4")
        """
        from qsample.compiler.compile import compile_package
        from qsample.compiler.targets import find_target

        if is_dtype(changes.get("dtype")):
            changes["dtype"] = dtype_name(changes["dtype"])
        options = (options or CompileOptions()).override(**read_compile(changes))
        if self._export_share != 0:  # an export may take minutes
            find_target(options.provider).check_installed()
        self._check_out(path, overwrite)
        with shown(progress) as report, metered(report) as meter, Destination(path) as destination:
            exporting = meter.part(0.0, self._export_share)
            compiling = meter.part(self._export_share, 1.0)
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
        """The portable package to compile for `destination`, in the dtype of `options` if possible;
        a source is exported first."""


class PackagedModel(Model):
    """An exported or compiled package. Its sessions are loaded by the first `generate`."""

    def __init__(
        self,
        package: Package,
        provider: str | None = None,
        holding: ScratchFolder | FileIO | None = None,
        trusted_keys: TrustedKeys | None = None,
    ) -> None:
        """The model of a verified package.

        Args:
            package: the package.
            provider: the execution provider; None for the package's own, otherwise "cpu".
            holding: an object that is released with the last reference to this one: the package's
                temporary folder, or the lock that keeps it in the cache.
            trusted_keys: public keys; the package must be signed with one of them, also when its
                sessions are loaded. None accepts every package.
        """
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
        """The loaded sessions, which need only onnxruntime, numpy and tokenizers."""
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
        """Copy the package to a folder, and return the model of the copy.

        Args:
            path: the folder of the copy.
            overwrite: whether a package at `path` is replaced.

        Raises:
            PackageError: if `path` cannot be written.
        """
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
    """A checkpoint, or the graph of another exporter, that becomes a package.

    `generate` runs the package that `compile` made last, otherwise the package in the user's cache,
    which the first call makes.
    """

    _export_share = 0.5

    def __init__(
        self, source: ModelSource, features: Features, provider: str | None = None
    ) -> None:
        """The model of a source.

        Args:
            source: the source that is exported.
            features: the features of its graph.
            provider: the execution provider of `generate`; by default "cpu".
        """
        super().__init__(provider)
        self.source = source
        self.features = features

    def __repr__(self) -> str:
        return f"SourceModel({self.source.model_id}, {self.source.kind} to export or compile)"

    @property
    def config(self) -> Any:
        """The checkpoint's configuration, as transformers reads it; for a decoder file, the
        package's ModelConfig."""
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
        """Export to a portable package, and return its model; the arguments are as in `compile`.
        Nothing remains after an error.

        Raises:
            UnsupportedModelError: for a model that cannot be exported.
            ParityError: if the graph does not compute the model's logits.
            PackageError: if `path` cannot be written.
        """
        self._check_out(path, overwrite)
        with shown(progress) as report, metered(report) as meter, Destination(path) as destination:
            package = self._write_package(destination.path, overwrite, meter)
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
        """The package of this model in the user's cache, compiled for the model's provider; the
        first call makes it.

        It is found without the model's libraries, and is the same for all processes of the user. If
        the model's files change, another package is made. docs/command-line.md describes the cache.

        Args:
            weights, preset, ctx_len: as in `CompileOptions`; by default the values there, or the
                model's.
            progress: as in `compile`.

        Raises:
            QsampleError: if the cache cannot be written, and as `export` and `compile` do.
        """
        given: dict[str, Any] = {"weights": weights, "preset": preset, "ctx_len": ctx_len}
        stated = {name: value for name, value in given.items() if value is not None}
        options = CompileOptions(**stated)
        provider = options.provider if self._provider is None else self._provider
        parts = {
            "model": self.source.identity(),
            "features": asdict(self.features),
            "provider": provider,
            **given,
        }
        words = (Path(self.source.model_id).name, str(provider), weights, preset)
        name = "-".join(word for word in words if word not in (None, ""))
        recipe = Recipe(name, parts, self.source.pinned().model_id)
        with shown(progress) as report:
            make = partial(self._make, provider=provider, options=options, progress=report)
            package, holding = open_cached(recipe, make, report)
        return PackagedModel(package, self._provider, holding)

    def eager_logits(self) -> Callable[[list[list[int]]], list[Array]] | None:
        """A function from rows of token ids to their logits, [n, V] float32 each, as transformers
        computes them; None for a decoder file."""
        if self._checkpoint is None:
            return None
        from qsample.exporters.huggingface_reference import eager_logits

        return partial(eager_logits, self._checkpoint.load())

    def _make(
        self, path: Path, *, provider: Any, options: CompileOptions, progress: Progress | None
    ) -> None:
        """Write the package of `cached` to `path`: compiled, or as exported for a provider that is
        not a target."""
        from qsample.compiler.targets import Capability, find_target, target_names
        from qsample.ort.providers import execution_providers

        # The model as it is on the disk or at a commit of the hub, without settings that were
        # changed since.
        source = self.source.pinned()
        if provider not in target_names():
            execution_providers(provider)  # raises an error for an unknown provider
            SourceModel(source, self.features, self._provider).export(path, progress=progress)
            return
        target = find_target(provider)
        if isinstance(source, CheckpointSource) and source.images is None:
            reads_images = Capability.IMAGES in target.capabilities
            source = replace(source, text_only=source.text_only or not reads_images)
        preferred = target.default_options
        chose_float16 = self._checkpoint is not None and self.dtype == "float16"
        if "dtype" in preferred and chose_float16:
            preferred = {**preferred, "dtype": "float16"}
        SourceModel(source, self.features, self._provider).compile(
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
        """The checkpoint, opened when it is first needed; None for a graph."""
        return self.source.open() if isinstance(self.source, WeightSource) else None

    @property
    def _described(self) -> Checkpoint | PackagedModel:
        """The checkpoint or the package, which has the model's configuration, dtype and
        settings."""
        return self._checkpoint or self._packaged

    @property
    def _sources(self) -> tuple[str | Path, ...]:
        return self.source.folders

    def _own_generation_config(self) -> GenerationConfig:
        return as_generation_config(self._described.generation_config)

    def _write_package(self, path: Path, overwrite: bool, progress: Progress | None) -> Package:
        """Write the portable package to `path`."""
        if isinstance(self.source, GraphSource):
            return self.source.write_package(
                path, self.features, overwrite=overwrite, progress=progress
            )
        _ = self._checkpoint  # weights that cannot be read are refused before torch is imported
        from qsample.exporters.export import export_model

        with scratch_near(path) as scratch:
            loaded = self._load(None, scratch.new, progress)
            return export_model(loaded, path, self.features, overwrite=overwrite, progress=progress)

    @contextmanager
    def _portable(
        self, options: CompileOptions, destination: Path, progress: Progress | None
    ) -> Iterator[Package]:
        """The portable package in a scratch folder, with its weights in the checkpoint's files.

        float16 is set before the export, because transformers chooses the parts of a model that
        stay in float32; bfloat16 is left to the compiler, because no CPU could check it.
        """
        if self._checkpoint is None:
            exported = self.export(progress=progress)
            yield exported.package  # its folder lives as long as `exported`
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
        """The loaded checkpoint, to be exported; dtype and scratch are as in `Checkpoint.load`."""
        (progress or unreported)(Stage.OPENING, 0.0)
        from qsample.checkpoints.checkpoint import transformers_generation_config
        from qsample.exporters.export import LoadedModel
        from qsample.package.disk.source_files import SourceFiles

        checkpoint = self._checkpoint
        assert checkpoint is not None
        # Small files are read before the weights: an error of theirs comes at once.
        _ = checkpoint.config
        _ = checkpoint.adapter_files
        changed = self._generation_config
        settings = None if changed is None else transformers_generation_config(changed)
        tokenizer = checkpoint.tokenizer
        processor = checkpoint.processor
        with SourceFiles() as sources:
            model = checkpoint.load(dtype, scratch, sources)
            origin = checkpoint.origin(sources)
        model.generation_config = settings or model.generation_config
        return LoadedModel(model, tokenizer, origin, processor, sources)
