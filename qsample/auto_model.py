"""Opens a hub id, checkpoint, decoder file or package as a model with one set of verbs: export, compile, generate.

Torch and transformers are imported only if a checkpoint is exported.
"""

from __future__ import annotations

import os
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, overload

from qsample.checkpoints.hub import ADAPTER, HubOptions, check_exists
from qsample.compiler.options import CompileOptions
from qsample.contract import HUGGING_FACE
from qsample.destination import Destination, scratch_folder
from qsample.disk.scratch import ScratchFolder
from qsample.errors import QsampleError
from qsample.huggingface.dtypes import check_export_dtype, choose_dtype, dtype_name, is_dtype
from qsample.huggingface.generation_config import GENERATION_CONFIG_FILE, GenerationConfig, as_generation_config
from qsample.huggingface.keywords import check_from_pretrained
from qsample.huggingface.model_config import ModelConfig
from qsample.huggingface.model_methods import Device, ModelMethods
from qsample.interface import Features, Interface
from qsample.package import MANIFEST_NAME, Package, check_features, check_not_source, copy_package, read_package
from qsample.progress import Progress, part

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from qsample.checkpoints.checkpoint import Checkpoint
    from qsample.runtime import CausalLM, GenerateOutput
    from qsample.tensors import Array

_DECODER: Final = ".onnx"
_WEIGHTS: Final = {".safetensors", ".bin"}  # of a checkpoint, which is exported instead


class AutoModelForCausalLM:
    """Opens a model for sampling in its own graph.

    >>> model = AutoModelForCausalLM.from_pretrained("qsample/assets/tiny_lm", include_sampler=True)
    >>> package = model.export("tiny").compile("tiny-cpu", provider="cpu", ctx_len=512)
    >>> package.generate("In the beginning", max_new_tokens=8, do_sample=False).texts
    """

    @staticmethod
    def from_pretrained(
        pretrained_model_name_or_path: str | Path,
        *,
        include_sampler: bool = True,
        return_pdfs: bool = False,
        logit_bias: bool = False,
        allowed_tokens: bool = False,
        logprobs: bool = False,
        top_logprobs: int = 0,
        filters: Sequence[str] = (),
        filter_order: str | None = None,
        seed_input: bool = False,
        dtype: Any = None,
        torch_dtype: Any = None,
        tokenizer: str | None = "auto",
        provider: str | None = None,
        revision: str | None = None,
        cache_dir: str | None = None,
        token: str | None = None,
        local_files_only: bool = False,
        trust_remote_code: bool = False,
        adapter: str | Path | None = None,
        file: str | None = None,
        **others: Any,
    ) -> CheckpointModel | ForeignModel | PackagedModel:
        """Open a hub id, a checkpoint folder, an exported package, or a decoder file of another exporter.

        Checkpoints and decoder files load nothing until they are used.

        Args:
            pretrained_model_name_or_path: the hub id, folder or file.
            include_sampler: bake the sampler into the decode graph; False returns logits and samples on the host, with
                the same results.
            return_pdfs: also return the distribution that each token was sampled from, `probs` [B, V] float32.
            logit_bias, allowed_tokens, logprobs, top_logprobs: further features, off by default and then absent from
                the graph; see `interface.Features`.
            filters: further sampling parameters of the graph: names of `contract.EXTRA_PARAMETERS`, for example
                ["typical_p", "xtc", "dry"].
            filter_order: "huggingface" (the default), the temperature before all filters, or "llama.cpp", the
                temperature last.
            seed_input: the graph takes the seed of each row and makes the random numbers itself, in place of a buffer
                `noise`; the tokens are the same.
            dtype: of the weights and the cache: "float32" (the default), "float16", or "auto" for the checkpoint's own
                if it is one of these; torch's and NumPy's objects are accepted, too.
            torch_dtype: the older name of dtype.
            tokenizer: "auto", another id or folder, or None for a package of token ids only.
            provider: the execution provider that generate() runs on; None = the provider that a device package was
                compiled for, otherwise "cpu".
            revision, cache_dir, token, local_files_only, trust_remote_code: as in transformers, see `HubOptions`.
            adapter: a folder or hub id of a LoRA adapter as peft saves it; it is merged into the weights.
            file: which decoder of a folder or repository of decoder files, for example "onnx/model_q4.onnx"; see
                `qsample.bake`.
            others: keywords of transformers, accepted if they are off; docs/transformers.md has the replacements.

        Returns:
            A `PackagedModel` for a folder with a qsample.json; a `ForeignModel` if `file` is given, for an .onnx file,
            and for a folder that has .onnx files and no checkpoint; otherwise a `CheckpointModel`.

        Raises:
            QsampleError: for a path that has none of these, and for features that a package was exported without.
        """
        own = AutoModelForCausalLM.from_pretrained.__annotations__.keys() - {"others", "return"}
        check_from_pretrained(others, own)
        chosen = choose_dtype(dtype, torch_dtype)
        features = Features(
            sampler=include_sampler,
            logit_bias=logit_bias,
            allowed_tokens=allowed_tokens,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            probs=return_pdfs,
            filters=filters,  # type: ignore[arg-type]  # it makes a tuple of them
            filter_order=filter_order or HUGGING_FACE,
            seed=seed_input,
        )
        hub = HubOptions(
            revision=revision,
            cache_dir=cache_dir,
            token=token,
            local_files_only=local_files_only,
            trust_remote_code=trust_remote_code,
        )
        path = Path(pretrained_model_name_or_path)
        if os.path.isfile(path / MANIFEST_NAME):  # False if it is too long to be a path
            package = read_package(path)
            if adapter is not None:
                raise QsampleError(f"{path} is a package, and an adapter is merged at export; export the model with it")
            if filter_order is None:
                features = replace(features, filter_order=package.interface.features.filter_order)
            check_features(package, features, None if chosen == "auto" else chosen)
            return PackagedModel(package, provider)
        if file is not None or is_decoder(path):
            if adapter is not None or chosen is not None:
                given = "adapter" if adapter is not None else "dtype"
                raise QsampleError(f"{path} is a decoder file, whose weights are as they are; leave {given} out")
            warnings.warn(f"{path} holds a decoder file; it is used as `qsample bake` writes it", stacklevel=2)
            return ForeignModel(path, features, provider, file=file, tokenizer=tokenizer, hub=hub)
        checkpoint = _checkpoint(
            str(pretrained_model_name_or_path),
            dtype=chosen or "float32",
            tokenizer=tokenizer,
            adapter=None if adapter is None else str(adapter),
            hub=hub,
        )
        return CheckpointModel(checkpoint, features, provider)


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
    """Bake the sampler into a decoder of another exporter; neither torch nor transformers is needed.

    Args:
        path: an .onnx file, a folder with one, or a hub id, of which only the decoder's files are downloaded.
        out: the folder of the package; None = a temporary folder that lives as long as the result.
        file: which decoder of several, relative to the folder or repository: "onnx/model_q4.onnx".
        features: of the graph, see `interface.Features`; None = the sampler and no more.
        tokenizer: "auto" for the tokenizer next to the decoder, another folder, or None for a package of token ids
            only.
        rope: "short" or "long", for a file with two rotary tables (longrope), of which one is kept: by default the
            short table, which limits the context to the length at which the file itself would change over.
        reference: a hub id or folder of the checkpoint, to compare with transformers as well, which needs the extra
            `export`. The manifest gets the figures; a float file that differs is refused.
        revision, cache_dir, token, local_files_only: of the hub, as in transformers.
        overwrite: replace a package at `out`.
        progress: called with a stage's name and the fraction done, in [0, 1].

    Returns:
        The portable package. Nothing is left behind after an error.

    Raises:
        UnsupportedModelError: for a file that cannot be baked; one line says why and what to take instead.
        ParityError: if the baked graph does not compute what the file does.
        PackageError: if `out` cannot be written.

    >>> package = qsample.bake("onnx-community/Qwen3-0.6B-ONNX", "qwen3", file="onnx/model_q4.onnx")
    """
    hub = HubOptions(revision=revision, cache_dir=cache_dir, token=token, local_files_only=local_files_only)
    model = ForeignModel(
        path, features or Features(), file=file, tokenizer=tokenizer, rope=rope, reference=reference, hub=hub
    )
    return model.export(out, overwrite=overwrite, progress=progress)


def is_decoder(path: Path) -> bool:
    """Whether `path` is an .onnx file, or a folder that holds .onnx files, in it or in its onnx/, and no checkpoint."""
    if os.path.isfile(path):
        return path.suffix == _DECODER
    files = [*path.glob("*"), *path.glob("onnx/*")] if os.path.isdir(path) else []
    suffixes = {file.suffix for file in files}
    return _DECODER in suffixes and not suffixes & _WEIGHTS


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
        return self.runtime.device

    @property
    def dtype(self) -> str:
        return self.runtime.dtype

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
    ) -> Array: ...

    @overload
    def generate(
        self, inputs: Any = ..., params: Any = ..., *, return_dict_in_generate: bool | None = ..., **options: Any
    ) -> GenerateOutput: ...

    def generate(self, inputs: Any = None, params: Any = None, **options: Any) -> Any:
        """Generate text or tokens; see `runtime.CausalLM.generate`."""
        return self.runtime.generate(inputs, params, **options)

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
            progress: called with a stage's name and the fraction done, in [0, 1].
            changes: fields of `CompileOptions`, on top of `options`: provider, batch_size, ctx_len, dtype, weights,
                block_size, quantization_method, calibration_text, kv_cache_dtype, max_divergence.

        Returns:
            The device package. Nothing is left behind after an error.

        Raises:
            CompileError: if an option does not fit, the self-test fails or quantized weights are too far off.
            PackageError: if `path` cannot be written.

        >>> model.compile("qwen3-cpu", provider="cpu", ctx_len=2048, weights="int4")
        """
        from qsample.compiler.compile import compile_package

        if is_dtype(changes.get("dtype")):
            changes["dtype"] = dtype_name(changes["dtype"])
        options = (options or CompileOptions()).override(**changes)
        if path is not None:
            check_not_source(path, *self._sources)
        exporting, compiling = part(progress, 0.0, self._export_share), part(progress, self._export_share, 1.0)
        with Destination(path) as destination, self._portable(options.dtype, destination.path, exporting) as source:
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
        self, dtype: str | None, destination: Path, progress: Progress | None
    ) -> AbstractContextManager[Package]:
        """The portable package to compile for `destination`, exported first if need be, in `dtype` if possible."""


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
        self._folder = folder
        self._runtime: CausalLM | None = None

    @property
    def config(self) -> ModelConfig:
        """The model's config.json."""
        return ModelConfig(self.package.read_json("config.json"))

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
        self, dtype: str | None, destination: Path, progress: Progress | None
    ) -> AbstractContextManager[Package]:
        return nullcontext(self.package)


class ExportableModel(Model):
    """A model that becomes a package. `generate` exports into a temporary folder first, once."""

    _export_share = 0.5

    def __init__(self, features: Features, provider: str | None) -> None:
        super().__init__(provider)
        self.features = features
        self._exported: PackagedModel | None = None

    def export(
        self, path: str | Path | None = None, *, overwrite: bool = False, progress: Progress | None = None
    ) -> PackagedModel:
        """Export to a portable package.

        Args:
            path: the folder of the package; None = a temporary folder that lives as long as the result.
            overwrite: replace a package at `path`.
            progress: called with a stage's name and the fraction done, in [0, 1].

        Returns:
            The package. Nothing is left behind after an error.

        Raises:
            UnsupportedModelError: for a model that cannot be exported.
            ParityError: if the graph does not compute what the model computes.
            PackageError: if `path` cannot be written.
        """
        if path is not None:
            check_not_source(path, *self._sources)
        with Destination(path) as destination:
            package = self._write(destination.path, overwrite, progress)
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
    def _write(self, path: Path, overwrite: bool, progress: Progress | None) -> Package:
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
    def device(self) -> Device:
        return Device("cuda" if self._provider in ("cuda", "tensorrt") else "cpu")

    @property
    def dtype(self) -> str:
        return self._checkpoint.dtype

    @property
    def _sources(self) -> tuple[str | Path, ...]:
        checkpoint = self._checkpoint
        return tuple(filter(None, (checkpoint.model_id, checkpoint.adapter, checkpoint.tokenizer_id)))

    def _own_generation_config(self) -> GenerationConfig:
        return as_generation_config(self._checkpoint.generation_config)

    def _write(self, path: Path, overwrite: bool, progress: Progress | None) -> Package:
        from qsample.exporters.export import export_model

        with scratch_folder(path) as scratch:
            return export_model(path=path, overwrite=overwrite, progress=progress, **self._load(None, scratch.new))

    @contextmanager
    def _portable(self, dtype: str | None, destination: Path, progress: Progress | None) -> Iterator[Package]:
        """In a scratch folder, with its weights in the checkpoint's files.

        float16 is set before the export, because transformers itself decides which parts of a model stay in float32;
        bfloat16, which no CPU could check, by the compiler.
        """
        from qsample.exporters.export import EXPORT_DTYPES, export_beside_checkpoint

        with scratch_folder(destination) as scratch:
            package = export_beside_checkpoint(
                **self._load(dtype if dtype in EXPORT_DTYPES else None, scratch.new),
                folder=scratch.path / "portable",
                progress=progress,
            )
            with package.sources:
                yield package

    def _load(self, dtype: str | None, scratch: Path) -> dict[str, Any]:
        """The arguments of an export. dtype, scratch: as `Checkpoint.load` takes them."""
        from qsample.checkpoints.checkpoint import transformers_generation_config
        from qsample.disk.source_files import SourceFiles

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


def _checkpoint(
    model_id: str, *, dtype: str, tokenizer: str | None, adapter: str | None, hub: HubOptions
) -> Checkpoint:
    """The checkpoint of a folder or hub id. Raises QsampleError if there is none, as far as that is known without the
    hub, which is asked first if the extra `export` is missing."""
    is_here = os.path.exists(Path(model_id))
    if not is_here:
        check_exists(model_id)
    if adapter is not None:
        check_exists(adapter, file=ADAPTER)
    try:
        from qsample.checkpoints.checkpoint import Checkpoint
    except ModuleNotFoundError:
        if not is_here:  # a mistyped package needs nothing that is not installed
            check_exists(model_id, hub)
        raise
    return Checkpoint(model_id, check_export_dtype(dtype), tokenizer=tokenizer, adapter=adapter, hub=hub)


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
    def _portable(self, dtype: str | None, destination: Path, progress: Progress | None) -> Iterator[Package]:
        exported = self.export(progress=progress)
        yield exported.package  # whose folder lives as long as `exported`

    def _write(self, path: Path, overwrite: bool, progress: Progress | None) -> Package:
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
            compare=None if self._reference is None else self._compare,
            progress=progress,
            **self._options,
        )

    def _compare(self, folder: Path, interface: Interface, tolerance: float | None) -> Mapping[str, Any]:
        """See `exporters.foreign.bake.Comparison`."""
        from qsample.checkpoints.checkpoint import Checkpoint
        from qsample.exporters.huggingface_reference import compare_with_checkpoint

        assert self._reference is not None
        checkpoint = Checkpoint(self._reference, hub=self._hub.for_another_repository())
        return compare_with_checkpoint(checkpoint, folder, interface, tolerance)
