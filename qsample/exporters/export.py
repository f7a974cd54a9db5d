"""A Hugging Face causal LM enters; a portable package (decode graph, states, tokenizer, manifest)
leaves.

Stages: reference logits → transforms → trace → write → parity gate → publish. Everything is written
into a scratch folder and renamed into place at the end, so a refused, failed or interrupted export
leaves nothing behind."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from qsample.checkpoints.checkpoint import Origin
from qsample.checks import is_integer
from qsample.contract.interface import Features, ImageShape, Interface
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
from qsample.exporters.parity import ImageReference
from qsample.exporters.portable import Draft, write_draft
from qsample.exporters.trace import trace
from qsample.exporters.vision import write_vision
from qsample.graph.image_blocks import see_whole_images
from qsample.package import package
from qsample.package.disk.source_files import SourceFiles
from qsample.package.disk.space import full_disk_named
from qsample.package.disk.untrusted import parse_json, read_json
from qsample.progress import Progress, Stage, Stages, metered
from qsample.request.huggingface.facade import dtype_name
from qsample.request.own_settings import with_needed
from qsample.request.sampling_params import GENERATION_CONFIG_FILE, settings_of
from qsample.request.text.chat import TOKENIZER_CONFIG_FILE
from qsample.request.text.tokenizer import warn_of_missing_rows
from qsample.transforms.cache import DecodeContext
from qsample.transforms.decoder import Decoder, apply_transforms, state_shapes
from qsample.transforms.deferred import computing, deferred
from qsample.transforms.image_blocks import find_blockwise
from qsample.transforms.images import image_shape
from qsample.transforms.quantized_experts import quantized_experts
from qsample.transforms.quantized_linear import quantized_layers

_OUT_OF_MEMORY_MESSAGES: Final = re.compile(
    "returned NULL without setting an exception|error return without exception set|allocate memory|"
    "bad allocation|bad_alloc|enough memory|out of memory",
    re.IGNORECASE,
)
EXPORT_DTYPES: Final = ("float32", "float16")
# Percentages of the time, measured with 0.6 B to 4 B parameters (docs/benchmarks/export.md).
_STAGE_SHARES: Final[Mapping[str, float]] = {
    Stage.CHECKING: 30,
    Stage.TRACING: 30,
    Stage.WRITING_WEIGHTS: 5,
    Stage.COMPARING: 30,
    Stage.PUBLISHING: 5,
}


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A loaded model, with everything else that goes into its package.

    Attributes:
        model: a causal LM in eval mode on the CPU, with weights in float32 or float16. An export
            transforms it in place.
        tokenizer: the tokenizer to save into the package; None makes a package of token ids only.
        origin: where the model comes from, for the manifest.
        processor: the processor of images and text, for a package that reads images; None exports
            only the text model.
        sources: the files that were read, which include the files that the model's placeholders
            refer to.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    origin: Origin
    processor: ProcessorMixin | None = None
    sources: SourceFiles = field(default_factory=SourceFiles)


def export_model(
    loaded: LoadedModel,
    path: str | Path,
    features: Features,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> package.Package:
    """Export a model to a portable package.

    Args:
        loaded: the model.
        path: the folder of the package.
        features: the features of its graph.
        overwrite: whether an existing package is replaced.
        progress: called with a stage's name and the fraction of the whole export that is done, in
            [0, 1].

    Raises:
        UnsupportedModelError: the model cannot be exported; raised before any long work.
        ParityError: the graph does not match the model.
        PackageError: `path` cannot be written.
        QsampleError: a file of `loaded.sources` has changed meanwhile.
    """
    size = _weight_bytes(loaded.model)
    with _memory_errors(), metered(progress) as report, loaded.sources:
        stages = Stages(report, _STAGE_SHARES)
        with package.write_package(path, overwrite=overwrite, required_bytes=size) as writer:
            manifest = _write(loaded, writer.directory, features, stages, refer=False)
            stages.begin(Stage.PUBLISHING)
            loaded.sources.check()
            writer.finish(manifest)
    stages.finish()
    return package.read_package(path, verify=False)


def export_unpublished(
    loaded: LoadedModel, folder: Path, features: Features, *, progress: Progress | None = None
) -> package.Unpublished:
    """Export a model for a compile only.

    The weights stay in the checkpoint's files, and nothing is hashed. The package lives as long as
    both.

    Args:
        loaded: the model.
        folder: a folder in scratch space, which is made.
        features: the features of its graph.
        progress: see `export_model`.

    Raises:
        UnsupportedModelError, ParityError, QsampleError: as `export_model` does.
    """
    with _memory_errors(), metered(progress) as report, loaded.sources:
        stages = Stages(report, _STAGE_SHARES)
        folder = folder.absolute()
        with full_disk_named(folder.parent):
            folder.mkdir()
            manifest = _write(loaded, folder, features, stages, refer=True)
        files = {path.name: package.FileEntry("", path.stat().st_size) for path in folder.iterdir()}
        stages.finish()
        manifest = replace(manifest, files=files)
        return package.Unpublished(folder, manifest, sources=loaded.sources)


@contextmanager
def _memory_errors() -> Iterator[None]:
    """Turn errors of memory that is used up into a MemoryError with a remedy.

    torch, ONNX Runtime and the interpreter each report it in other words.
    """
    try:
        yield
    except (MemoryError, SystemError, OSError, RuntimeError, QsampleError) as error:
        causes = [error, error.__cause__, error.__context__]
        if not any(cause is not None and _is_out_of_memory(cause) for cause in causes):
            raise
        raise MemoryError(
            f"the export ran out of memory ({' '.join(str(error).split())!s:.200}); end other programs, raise the "
            "limit of this process (ulimit -v), or take a machine with more"
        ) from error


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    return _OUT_OF_MEMORY_MESSAGES.search(str(error)) is not None


def _write(
    loaded: LoadedModel, folder: Path, features: Features, stages: Stages, *, refer: bool
) -> package.Manifest:
    """Write everything except the manifest of a package into `folder`, and return the manifest.

    refer: see `write_draft`.
    """
    origin = loaded.origin
    model = loaded.model
    source = package.Source(
        origin.model_id,
        origin.revision,
        model.config.model_type,
        type(model).__name__,
        license=origin.license,
    )
    with _hashed_meanwhile(origin.files) as hashes:
        manifest = _write_graphs(loaded, folder, features, source, stages, refer=refer)
        source = replace(manifest.source, files=hashes.result())
    packed = manifest.packed_weights
    if packed is not None and origin.weight_type is not None:
        packed = {**packed, "type": origin.weight_type}
    return replace(manifest, source=source, packed_weights=packed)


@dataclass(frozen=True, slots=True)
class _ImageSupport:
    """How a model reads images.

    Attributes:
        shape: how images enter the decoder.
        reference: what the model computes for a prompt with images.
        blockwise: the layers in which the tokens of an image see each other.
        settings: the manifest's `images`.
    """

    shape: ImageShape
    reference: ImageReference
    blockwise: frozenset[int]
    settings: Mapping[str, Any]


def _image_support(
    model: PreTrainedModel, processor: ProcessorMixin, shape: ImageShape
) -> _ImageSupport:
    """Find out how `model` reads images, of which `shape` is known."""
    settings = describe_images(processor, model.config)
    images, shape = image_reference(model, processor, shape, _context_length(model))
    blockwise = find_blockwise(model)
    return _ImageSupport(replace(shape, blockwise=bool(blockwise)), images, blockwise, settings)


def _context_length(model: PreTrainedModel) -> int | None:
    return longest_context(model.config.get_text_config(decoder=True))


def _write_graphs(
    loaded: LoadedModel,
    folder: Path,
    features: Features,
    source: package.Source,
    stages: Stages,
    *,
    refer: bool,
) -> package.Manifest:
    """As `_write`, without the hashes of the checkpoint's files."""
    model = loaded.model
    if model.generation_config is not None:
        features = with_needed(features, settings_of(model.generation_config))
    tokenizer = loaded.tokenizer
    context = DecodeContext()
    stages.begin(Stage.CHECKING)
    dtype = _check_dtype(model)
    _check_settings(model)
    image = None if loaded.processor is None else image_shape(model)
    images = None
    with computing():
        expected = reference(model)
        if loaded.processor is not None and image is not None:
            images = _image_support(model, loaded.processor, image)
            expected = replace(expected, images=images.reference)
        apply_transforms(model, context, images=images is not None)
    vocab_size = _vocab_size(model, int(expected.logits[0].shape[-1]))
    expected = expected.of_first_tokens(vocab_size)
    key_values, recurrent = state_shapes(model, context)
    interface = Interface(
        vocab_size,
        key_values,
        dtype,
        features,
        recurrent=recurrent,
        image=None if images is None else images.shape,
    )
    token_ids = _token_ids(model, tokenizer, vocab_size)
    if tokenizer is not None:
        warn_of_missing_rows(tokenizer.get_vocab(), vocab_size)
    _save_model_files(model, tokenizer, folder)
    if loaded.processor is not None:
        loaded.processor.image_processor.save_pretrained(folder)

    stages.begin(Stage.TRACING)
    vision_figures: dict[str, Any] = {}
    if images is not None:
        vision_figures = write_vision(model, folder, interface, refer=refer)
    decoder = Decoder(model, context, interface)
    adapted = features.max_loras > 0
    traced = trace(decoder, interface.model, interface.sizes, decoder.layers, adapted=adapted)
    if adapted:
        interface = adapt_layers(traced, interface, "model.")
    fill_placeholders(traced)
    outline_scans(traced)
    lower_experts(traced)
    align_row_sums(traced)
    if images is not None and images.blockwise:
        see_whole_images(traced, images.blockwise)
    plain_layers = len(interface.key_values) if context.buffered else len(context.masked)
    draft = Draft(
        traced,
        interface,
        expected,
        source,
        token_ids,
        _context_length(model),
        original="the eager model",
        plain_attention_layers=plain_layers,
        libraries=("torch", "transformers"),
        images=None if images is None else images.settings,
    )
    del traced  # `write_draft` frees the graph
    manifest = write_draft(draft, folder, stages, refer=refer)
    return replace(manifest, parity={**(manifest.parity or {}), **vision_figures})


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


def _vocab_size(model: PreTrainedModel, head_rows: int) -> int:
    """V: the rows of the head whose tokens the embedding can read. The others are never sampled."""
    embedding = model.get_input_embeddings()
    return min(head_rows, getattr(embedding, "num_embeddings", head_rows))


def _weight_bytes(model: PreTrainedModel) -> int:
    """The size of the weights as they are written."""
    quantized = list(quantized_layers(model))
    not_written = {layer.weight for layer, _ in quantized}
    size = sum(weight.nbytes for _, weight in quantized)
    for module in model.modules():
        for name, experts in quantized_experts(module).items():
            not_written.add(module.get_parameter(name))
            size += experts.nbytes
    for weight in model.parameters():
        if weight not in not_written:
            size += _stored_bytes(weight)
    return size


def _stored_bytes(weight: torch.Tensor) -> int:
    meaning = deferred(weight)
    dtype = weight.dtype if meaning is None else meaning.dtype
    return weight.numel() * dtype.itemsize


def _save_model_files(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path
) -> None:
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        # save_pretrained would refuse models that state a temperature and do not sample.
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
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int
) -> package.TokenIds:
    """The ids that the runtime needs: from generation_config, else from config, else from the
    tokenizer, whose end of a text is a stop token in any case."""
    text_config = model.config.get_text_config(decoder=True)

    def find(name: str) -> tuple[int, ...]:
        for owner in (model.generation_config, text_config, tokenizer):
            value = getattr(owner, name, None)
            if value is not None:
                return _ids(name, value)
        return ()

    def find_first(name: str) -> int | None:
        known = [i for i in find(name) if 0 <= i < vocab_size]
        return known[0] if known else None

    given = find("eos_token_id")
    eos_ids = tuple(i for i in given if 0 <= i < vocab_size)
    if eos_ids != given:
        # No row can sample ids beyond the vocabulary, and the runtime refuses a generation_config
        # that names them.
        left_out = ", ".join(str(i) for i in given if i not in eos_ids)
        warnings.warn(
            f"eos_token_id {left_out} is left out: the model's ids are 0 to {vocab_size - 1}",
            stacklevel=3,
        )
        if model.generation_config is not None:
            model.generation_config.eos_token_id = [*eos_ids] or None
    # If a configuration lists several ids, the first one counts.
    bos = find_first("bos_token_id")
    pad = find_first("pad_token_id")
    if pad is None:
        pad = eos_ids[0] if eos_ids else 0
    token_ids = package.TokenIds(pad=pad, bos=bos, eos=eos_ids)
    end = getattr(tokenizer, "eos_token_id", None)
    return token_ids.ending_at(end, vocab_size)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    """The ids of a configuration, which states a token id or a list of token ids."""
    values = value if isinstance(value, list | tuple) else [value]
    if not all(map(is_integer, values)):
        raise QsampleError(
            f"{name} is {value!r:.80} in the model's configuration; it must be a token id, or a list of ids"
        )
    return tuple(values)


@contextmanager
def _hashed_meanwhile(files: Mapping[str, Path]) -> Iterator[Future[dict[str, str]]]:
    """Compute the sha256 of each file in another thread: tracing leaves a processor idle."""
    cancelled = threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="qsample-hash") as pool:
        try:
            yield pool.submit(_hash, files, cancelled)
        finally:
            cancelled.set()


def _hash(files: Mapping[str, Path], cancelled: threading.Event) -> dict[str, str]:
    """The sha256 of each file by its name; files are skipped once `cancelled` is set."""
    return {name: package.sha256_of(path) for name, path in files.items() if not cancelled.is_set()}
