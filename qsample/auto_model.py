"""Opens a hub id, a checkpoint or a package as a model with one set of verbs: export, compile, generate.

Torch and transformers are imported only where a checkpoint is exported.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qsample.contract import HUGGING_FACE
from qsample.destination import Destination, scratch_folder
from qsample.errors import QsampleError
from qsample.huggingface.dtypes import check_export_dtype, choose_dtype
from qsample.huggingface.generation_config import GenerationConfig, as_generation_config
from qsample.huggingface.keywords import check_from_pretrained
from qsample.huggingface.model_methods import Device
from qsample.interface import Features
from qsample.models.foreign import ForeignModel, ForeignSource, is_decoder
from qsample.models.packaged import Compilable, PackagedModel
from qsample.package import MANIFEST_NAME, Package, check_features, check_not_source, read_package
from qsample.progress import Progress

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from qsample.checkpoints.hub_options import HubOptions
    from qsample.checkpoints.load import Checkpoint
    from qsample.runtime import CausalLM

__all__ = ["AutoModelForCausalLM", "CheckpointModel", "ForeignModel", "PackagedModel"]


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
        """Open a hub id, a checkpoint folder, an exported package, or a decoder file that somebody else exported.

        Args:
            include_sampler: bake the sampler into the decode graph; False returns logits and samples on the host, with
                the same results.
            return_pdfs: also return the distribution that each token was sampled from, `probs` [B, V] float32.
            logit_bias, allowed_tokens, logprobs, top_logprobs: further features, see `interface.Features`; each is
                absent from the graph unless asked for.
            filters: of the further sampling parameters, those that the graph shall have: names of
                `contract.EXTRA_PARAMETERS`, ["typical_p", "xtc", "dry"] say.
            filter_order: "huggingface" (the default), the temperature before all filters, or "llama.cpp", the
                temperature last.
            seed_input: the graph takes the seed of each row and makes the random numbers itself, in place of a buffer
                `noise`; the tokens are the same.
            dtype: of the weights and the cache: "float32" (the default), "float16", or "auto" for the checkpoint's own
                where it is one of these; torch's and NumPy's objects do as well. torch_dtype: its older name.
            tokenizer: "auto", another id or folder, or None for a package of token ids only.
            provider: the execution provider that generate() runs on; None = the one that a device package was compiled
                for, otherwise "cpu".
            revision, cache_dir, token, local_files_only, trust_remote_code: as in transformers, see `HubOptions`.
            adapter: a folder or hub id of a LoRA adapter as peft saves it; it is merged into the weights.
            file: of a folder or repository of decoder files: which one, "onnx/model_q4.onnx" say; see `qsample.bake`.
            others: what transformers takes and is off; docs/transformers.md says what to do instead where it is on.

        Returns a `PackagedModel` for a folder with a qsample.json, a `ForeignModel` for an .onnx file, a folder that
        has those and no checkpoint, and wherever `file` is given; otherwise a `CheckpointModel`. The latter two load
        nothing until they are used. Raises QsampleError for a path where neither is, and for features that a package
        was exported without.
        """
        from qsample.checkpoints.hub_options import HubOptions

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
        if os.path.isfile(path / MANIFEST_NAME):  # False for what is too long to be a path, too
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
            source = ForeignSource(
                path=str(path),
                file=file,
                tokenizer=tokenizer,
                revision=revision,
                cache_dir=cache_dir,
                token=token,
                local_files_only=local_files_only,
            )
            warnings.warn(f"{path} holds a decoder file; it is used as `qsample bake` writes it", stacklevel=2)
            return ForeignModel(source, features, provider)
        checkpoint = _checkpoint(
            str(pretrained_model_name_or_path),
            dtype=chosen or "float32",
            tokenizer=tokenizer,
            adapter=None if adapter is None else str(adapter),
            hub=hub,
        )
        return CheckpointModel(checkpoint, features, provider)


def _checkpoint(
    model_id: str, *, dtype: str, tokenizer: str | None, adapter: str | None, hub: HubOptions
) -> Checkpoint:
    """The checkpoint of a folder or hub id. Raises QsampleError where there is none, as far as that can be said without
    the hub, which is asked first where the extra `export` is missing."""
    from qsample.checkpoints.locate import ADAPTER, check_exists

    is_here = os.path.exists(Path(model_id))
    if not is_here:
        check_exists(model_id, ask_hub=False)
    if adapter is not None:
        check_exists(adapter, file=ADAPTER, ask_hub=False)
    try:
        from qsample.checkpoints.load import Checkpoint
    except ModuleNotFoundError:
        if not is_here:  # a mistyped package needs nothing that is not installed
            check_exists(model_id, hub)
        raise
    dtype = check_export_dtype(dtype)
    return Checkpoint(model_id=model_id, dtype=dtype, tokenizer=tokenizer, adapter=adapter, hub=hub)


class CheckpointModel(Compilable):
    """A Hugging Face checkpoint, to be exported. `generate` exports into a temporary folder first, once."""

    def __init__(self, checkpoint: Checkpoint, features: Features, provider: str | None = None) -> None:
        self._checkpoint = checkpoint
        self.features = features
        self._provider = provider
        self._exported: PackagedModel | None = None
        self._generation_config: GenerationConfig | None = None

    @property
    def config(self) -> PretrainedConfig:
        """The checkpoint's configuration, as transformers reads it."""
        from qsample.checkpoints.load import read_config

        return read_config(self._checkpoint)

    @property
    def generation_config(self) -> GenerationConfig:
        """The model's own settings of `generate`, to be changed or replaced; an export takes them along."""
        if self._generation_config is None:
            from qsample.checkpoints.settings import read_generation_config

            self._generation_config = as_generation_config(read_generation_config(self._checkpoint))
        return self._generation_config

    @generation_config.setter
    def generation_config(self, value: Any) -> None:
        self._generation_config = as_generation_config(value)

    def export(
        self, path: str | Path | None = None, *, overwrite: bool = False, progress: Progress | None = None
    ) -> PackagedModel:
        """Export to a portable package at `path`; None = a temporary folder that lives as long as the result.

        Raises UnsupportedModelError, ParityError or PackageError, and leaves nothing behind then.
        """
        return self._export(path, overwrite, progress)

    save_pretrained = export

    @property
    def _sources(self) -> tuple[str | Path, ...]:
        checkpoint = self._checkpoint
        return tuple(filter(None, (checkpoint.model_id, checkpoint.adapter, checkpoint.tokenizer)))

    @contextmanager
    def _portable(self, dtype: str | None, destination: Path, progress: Progress | None) -> Iterator[Package]:
        """In a scratch folder, with its weights where the checkpoint has them.

        float16 is set before the export, because transformers itself decides which parts of a model stay in float32;
        bfloat16, which no CPU could check, by the compiler.
        """
        from qsample.exporters.export import EXPORT_DTYPES, export_beside_checkpoint

        checkpoint = replace(self._checkpoint, dtype=dtype) if dtype in EXPORT_DTYPES else self._checkpoint
        with scratch_folder(destination) as scratch:
            package = export_beside_checkpoint(
                **self._load(checkpoint, scratch.new), folder=scratch.path / "portable", progress=progress
            )
            with package.sources:
                yield package

    @property
    def device(self) -> Device:
        return Device("cuda" if self._provider in ("cuda", "tensorrt") else "cpu")

    @property
    def dtype(self) -> str:
        from qsample.checkpoints.settings import settle_dtype

        return settle_dtype(self._checkpoint).dtype

    @property
    def runtime(self) -> CausalLM:
        """The loaded sessions of a temporary export, which is made by the first call."""
        if self._exported is None:
            self._exported = self.export()
        if self._generation_config is not None:
            self._exported.generation_config = self._generation_config
        return self._exported.runtime

    def _export(self, path: str | Path | None, overwrite: bool, progress: Progress | None) -> PackagedModel:
        from qsample.exporters.export import export_model

        if path is not None:
            check_not_source(path, *self._sources)
        with Destination(path) as destination, scratch_folder(destination.path) as scratch:
            loaded = self._load(self._checkpoint, scratch.new)
            package = export_model(path=destination.path, overwrite=overwrite, progress=progress, **loaded)
            return PackagedModel(package, self._provider, destination.keep())

    def _load(self, checkpoint: Checkpoint, scratch: Path) -> dict[str, Any]:
        """What an export takes of the checkpoint. scratch: as `load_model` takes it."""
        from qsample.checkpoints.load import load_model, load_tokenizer
        from qsample.checkpoints.locate import ADAPTER, check_exists
        from qsample.checkpoints.settings import settle_dtype, transformers_generation_config
        from qsample.disk.source_files import SourceFiles

        check_exists(checkpoint.model_id, checkpoint.hub)
        if checkpoint.adapter is not None:
            check_exists(checkpoint.adapter, checkpoint.hub.for_another_repository(), file=ADAPTER)
        checkpoint = settle_dtype(checkpoint)
        own = self._generation_config
        settings = None if own is None else transformers_generation_config(own)
        tokenizer = load_tokenizer(checkpoint)  # before the model: it fails fast
        with SourceFiles() as sources:
            model = load_model(checkpoint, scratch, sources)
        model.generation_config = settings or model.generation_config
        return {
            "model": model,
            "tokenizer": tokenizer,
            "features": self.features,
            "model_id": " + ".join(filter(None, (checkpoint.model_id, checkpoint.adapter))),
            "revision": None if os.path.isdir(checkpoint.model_id) else checkpoint.hub.revision,
            "sources": sources,
        }
