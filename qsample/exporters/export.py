"""A Hugging Face causal LM enters; a portable package (decode graph, states, tokenizer, manifest) leaves.

Stages: reference logits → transforms → trace → write → parity gate → publish. Everything is written aside and renamed
into place at the end, so a refused, failed or interrupted export leaves nothing behind.
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from qsample.checks import is_integer
from qsample.contract.interface import Features, Interface
from qsample.disk.source_files import SourceFiles
from qsample.disk.space import full_disk_named
from qsample.disk.untrusted import parse_json, read_json
from qsample.errors import QsampleError, UnsupportedModelError
from qsample.exporters.huggingface_reference import longest_context, reference
from qsample.exporters.image_reference import image_reference
from qsample.exporters.images import describe_images
from qsample.exporters.lowering import (
    adapt_layers,
    align_row_sums,
    fill_placeholders,
    lower_experts,
    outline_scans,
)
from qsample.exporters.portable import Draft, write_draft
from qsample.exporters.trace import trace
from qsample.exporters.vision import write_vision
from qsample.graph.image_blocks import see_whole_images
from qsample.huggingface.facade import dtype_name
from qsample.package import package
from qsample.progress import Progress, Stage, Stages, metered
from qsample.request.sampling_params import GENERATION_CONFIG_FILE
from qsample.text.chat import TOKENIZER_CONFIG_FILE
from qsample.transforms.cache import DecodeContext
from qsample.transforms.decoder import Decoder, apply_transforms, state_shapes
from qsample.transforms.deferred import computing, deferred
from qsample.transforms.image_blocks import find_blockwise
from qsample.transforms.images import image_shape
from qsample.transforms.quantized_linear import quantized_layers

_NO_MEMORY: Final = re.compile(
    "returned NULL without setting an exception|error return without exception set|allocate memory|bad allocation|"
    "bad_alloc|enough memory|out of memory",
    re.IGNORECASE,
)
EXPORT_DTYPES: Final = ("float32", "float16")
# Of the time, for 0.6 B to 4 B parameters (docs/benchmarks/export.md).
_SHARES: Final[Mapping[str, float]] = {
    Stage.CHECKING: 30,
    Stage.TRACING: 30,
    Stage.WRITING_WEIGHTS: 5,
    Stage.COMPARING: 30,
    Stage.PUBLISHING: 5,
}


def export_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    path: str | Path,
    features: Features,
    *,
    processor: ProcessorMixin | None = None,
    model_id: str,
    revision: str | None = None,
    license: str | None = None,
    weight_type: str | None = None,
    files: Mapping[str, Path] = MappingProxyType({}),
    sources: SourceFiles | None = None,
    overwrite: bool = False,
    publish: bool = True,
    progress: Progress | None = None,
) -> package.Package:
    """Export `model` to a portable package at `path` and return it.

    Args:
        model: a causal LM in eval mode on the CPU, its weights float32 or float16. It is transformed in place.
        tokenizer: saved into the package; None makes a package of token ids only.
        processor: of images and text, for a package that reads images; None exports the text model alone.
        model_id, revision, license, files: the origin of the model, for `manifest.Source`; its files by name.
        weight_type: of most weights of a GGUF file, in llama.cpp's words.
        sources: the files that were read, among them those that its placeholders refer to.
        publish: False, for `compile` alone, returns an `Unpublished` in a new folder of scratch space, not hashed. Its
            weights stay in the checkpoint's files, and it lives as long as both.
        progress: called with a stage's name and the fraction of the whole export done, in [0, 1].

    Raises UnsupportedModelError, before any long work, for a model that cannot be exported; ParityError if the graph
    does not match the model; PackageError if `path` cannot be written; QsampleError if `sources` changed meanwhile.
    """
    sources = sources or SourceFiles()
    source = package.Source(
        model_id, revision, model.config.model_type, type(model).__name__, license=license
    )
    size = _weight_bytes(model)
    with _memory_named(), metered(progress) as report, sources:
        stages = Stages(report, _SHARES)

        def write(folder: Path) -> package.Manifest:
            with _hashed_meanwhile(files) as hashed:
                manifest = _export(
                    model, tokenizer, processor, folder, features, source, stages, refer=not publish
                )
                packed = manifest.packed_weights
                if packed is not None and weight_type is not None:
                    packed = {**packed, "type": weight_type}
                named = replace(manifest.source, files=hashed.result())
                return replace(manifest, source=named, packed_weights=packed)

        if not publish:
            folder = Path(path).absolute()
            with full_disk_named(folder.parent):
                folder.mkdir()
                manifest = write(folder)
            written = {
                path.name: package.FileEntry("", path.stat().st_size) for path in folder.iterdir()
            }
            stages.finish()
            return package.Unpublished(folder, replace(manifest, files=written), sources=sources)
        with package.write_package(path, overwrite=overwrite, required_bytes=size) as writer:
            manifest = write(writer.directory)
            stages.begin(Stage.PUBLISHING)
            sources.check()
            writer.finish(manifest)
    stages.finish()
    return package.read_package(path, verify=False)


@contextmanager
def _memory_named() -> Iterator[None]:
    """Say that the memory was used up: torch, ONNX Runtime and the interpreter each report it in other words."""
    try:
        yield
    except (MemoryError, SystemError, OSError, RuntimeError, QsampleError) as error:
        causes = [error, error.__cause__, error.__context__]
        if not any(
            isinstance(cause, MemoryError) or _NO_MEMORY.search(str(cause))
            for cause in causes
            if cause
        ):
            raise
        raise MemoryError(
            f"the export ran out of memory ({' '.join(str(error).split())!s:.200}); end other programs, raise the "
            "limit of this process (ulimit -v), or take a machine with more"
        ) from error


def _export(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    processor: ProcessorMixin | None,
    folder: Path,
    features: Features,
    source: package.Source,
    stages: Stages,
    *,
    refer: bool,
) -> package.Manifest:
    """Write all of a package but its manifest into `folder`, and return the manifest. refer: as in `write_draft`."""
    context = DecodeContext()
    stages.begin(Stage.CHECKING)
    dtype = _check_dtype(model)
    _check_settings(model)
    image, blockwise, described = (
        None if processor is None else image_shape(model),
        frozenset[int](),
        None,
    )
    with computing():
        expected = reference(model)
        if processor is not None and image is not None:
            described = describe_images(processor, model.config)
            known = longest_context(model.config.get_text_config(decoder=True))
            images, image = image_reference(model, processor, image, known)
            expected, blockwise = replace(expected, images=images), find_blockwise(model)
            image = replace(image, blockwise=bool(blockwise))
        apply_transforms(model, context, images=image is not None)
    vocab_size = int(expected.logits[0].shape[-1])
    key_values, recurrent = state_shapes(model, context)
    interface = Interface(vocab_size, key_values, dtype, features, recurrent=recurrent, image=image)
    token_ids = _token_ids(model, tokenizer)
    _check_vocabulary(tokenizer, vocab_size)
    _save_model_files(model, tokenizer, folder)
    if processor is not None:
        processor.image_processor.save_pretrained(folder)

    stages.begin(Stage.TRACING)
    vision = {} if image is None else write_vision(model, folder, interface, refer=refer)
    decoder = Decoder(model, context, interface)
    adapted = features.max_loras > 0
    traced = trace(decoder, interface.model, interface.sizes, decoder.layers, adapted=adapted)
    if adapted:
        interface = adapt_layers(traced, interface, "model.")
    fill_placeholders(traced)
    outline_scans(traced)
    lower_experts(traced)
    align_row_sums(traced)
    if blockwise:
        see_whole_images(traced, blockwise)
    draft = Draft(
        traced,
        interface,
        expected,
        source,
        token_ids,
        longest_context(model.config.get_text_config(decoder=True)),
        original="the eager model",
        plain_attention_layers=len(interface.key_values)
        if context.buffered
        else len(context.masked),
        libraries=("torch", "transformers"),
        images=described,
    )
    del traced
    manifest = write_draft(draft, folder, stages, refer=refer)
    return replace(manifest, parity={**(manifest.parity or {}), **vision})


def _check_dtype(model: PreTrainedModel) -> str:
    dtype = dtype_name(model.dtype)
    if dtype not in EXPORT_DTYPES:
        raise UnsupportedModelError(
            f"the model is loaded as {dtype}; load it with dtype={' or '.join(EXPORT_DTYPES)} "
            "(the CPU that checks the export has no attention kernel for others)"
        )
    return dtype


def _check_settings(model: PreTrainedModel) -> None:
    """Raise QsampleError for a generation_config that could not be read from the package."""
    try:
        parse_json(
            "{}" if model.generation_config is None else model.generation_config.to_json_string(),
            infinities=True,
        )
    except ValueError as error:
        raise QsampleError(
            f"the model's generation_config cannot be stored: {error}; correct it"
        ) from error


def _check_vocabulary(tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> None:
    if tokenizer is not None and len(tokenizer) > vocab_size:
        raise QsampleError(
            f"the tokenizer has {len(tokenizer)} tokens and the model's head only {vocab_size}; give the tokenizer "
            "that belongs to the model, or resize the model's embeddings"
        )


def _weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of the weights as they are written."""
    quantized = list(quantized_layers(model))
    not_written = {layer.weight for layer, _ in quantized}
    return sum(
        _stored_bytes(weight) for weight in model.parameters() if weight not in not_written
    ) + sum(weight.nbytes for _, weight in quantized)


def _stored_bytes(weight: torch.Tensor) -> int:
    found = deferred(weight)
    return weight.numel() * (weight.dtype if found is None else found.dtype).itemsize


def _save_model_files(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path
) -> None:
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        # Without the checks of save_pretrained: many a model has a temperature and does not sample.
        model.generation_config.to_json_file(folder / GENERATION_CONFIG_FILE)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        try:
            read_json(folder / TOKENIZER_CONFIG_FILE, infinities=True)
        except ValueError as error:
            raise QsampleError(
                f"the tokenizer's {TOKENIZER_CONFIG_FILE} cannot be stored: {error}; correct it"
            ) from error
        if not (folder / "tokenizer.json").exists():
            raise UnsupportedModelError(
                f"{type(tokenizer).__name__} has no tokenizer.json form, which the runtime reads; "
                "convert it to a fast tokenizer first, or export with tokenizer=None for token ids only"
            )


def _token_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> package.TokenIds:
    """The ids that the runtime needs: from generation_config, then config, then the tokenizer."""

    def find(name: str) -> tuple[int, ...] | None:
        for owner in (
            model.generation_config,
            model.config.get_text_config(decoder=True),
            tokenizer,
        ):
            if (value := getattr(owner, name, None)) is not None:
                return _ids(name, value)
        return None

    vocab_size = int(model.config.get_text_config(decoder=True).vocab_size)
    given = find("eos_token_id") or ()
    eos_ids = tuple(i for i in given if 0 <= i < vocab_size)
    if eos_ids != given:
        # No row can sample the ids beyond; and the runtime refuses a generation_config that asks for them.
        left_out = ", ".join(str(i) for i in given if i not in eos_ids)
        warnings.warn(
            f"eos_token_id {left_out} is left out: the model's ids are 0 to {vocab_size - 1}",
            stacklevel=3,
        )
        if model.generation_config is not None:
            model.generation_config.eos_token_id = [*eos_ids] or None
    # The first of several begins a text, and pads.
    bos, pad = (
        next((i for i in find(name) or () if 0 <= i < vocab_size), None)
        for name in ("bos_token_id", "pad_token_id")
    )
    if pad is None:
        pad = eos_ids[0] if eos_ids else 0
    return package.TokenIds(pad=pad, bos=bos, eos=eos_ids)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    """A token id, or a list of them, as configurations state it."""
    values = value if isinstance(value, list | tuple) else [value]
    if not all(map(is_integer, values)):
        raise QsampleError(
            f"{name} is {value!r:.80} in the model's configuration; it must be a token id, or a list of ids"
        )
    return tuple(values)


@contextmanager
def _hashed_meanwhile(files: Mapping[str, Path]) -> Iterator[Future[dict[str, str]]]:
    """The sha256 of each file, computed by another thread: tracing leaves a processor idle."""
    left = threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="qsample-hash") as pool:
        try:
            yield pool.submit(_hash, files, left)
        finally:
            left.set()


def _hash(files: Mapping[str, Path], left: threading.Event) -> dict[str, str]:
    """left: ends the work early; the result means nothing then."""
    return {name: package.sha256_of(path) for name, path in files.items() if not left.is_set()}
