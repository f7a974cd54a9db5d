"""`Checkpoint`: a Hugging Face model with its adapter and tokenizer, opened once for all readers of
its parts."""

from __future__ import annotations

import copy
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, ClassVar, Final

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from qsample.checkpoints.mapped_weights import (
    INDEX,
    SINGLE,
    loading_in_this_thread,
    mapped_weights,
    weight_files,
)
from qsample.checkpoints.merge_lora import find_adapter, merge_adapter
from qsample.checkpoints.methods import Format
from qsample.checkpoints.own_tokenizer import keep_own_parts
from qsample.checkpoints.packed import packing_of, read_packed
from qsample.checkpoints.processor import load_processor
from qsample.checkpoints.quantized import QuantizedCheckpoint, conv1d_names, read_quantized
from qsample.checkpoints.source import (
    ADAPTER,
    ANOTHER_MODEL,
    CONFIG,
    HubOptions,
    check_exists,
    check_kind,
    check_layer_counts,
    files_of,
    kind_of,
    license_of,
    origin_of,
)
from qsample.errors import QsampleError, UnsupportedModelError, listed
from qsample.package.disk.source_files import SourceFiles
from qsample.package.disk.space import check_free, full_disk_named
from qsample.transforms.cache import DecodeContext
from qsample.transforms.decoder import apply_transforms, state_shapes
from qsample.transforms.deferred import deferring, numbers

_LANGUAGE_MODEL_ONLY: Final = "its language model alone with text_only=True (--text-only)"
# The numbers of a model that its files may lack until it is refused by its size. With fewer, the
# weights are loaded, and an error names the missing ones.
_MAX_MISSING_NUMBERS: Final = 1 << 27
_COPY_IN_BLOCKS: Final = "the copy of the quantized weights in blocks"
# The errors of a layer that meets a cache of an unexpected kind; a value that is missing without
# weights raises others.
_ERRORS_OF_LAYERS: Final = (AttributeError, ValueError)


@dataclass(frozen=True, slots=True)
class Outline:
    """A model as its configuration describes it, without weights.

    Attributes:
        config: the configuration to load the checkpoint with; it lacks a quantization that
            transformers cannot undo.
        packing: the format of packed weights; None for float weights, or weights that transformers
            turns into float.
        kind: the model's class; None if it is the repository's code, because making a model may
            then need memory.
        model_config: the configuration of `kind`, which is the text model's if `config` describes
            several models.
        shapes: the shapes of the model's weights, by name.
        transposed: the last names of the layers that hold their weight as [in, out].
        size: the number of numbers of all parameters; tied ones count once.
    """

    config: PretrainedConfig
    packing: Format | None
    kind: type[PreTrainedModel] | None
    model_config: PretrainedConfig
    shapes: Mapping[str, torch.Size]
    transposed: frozenset[str]
    size: int = 0


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a loaded model comes from.

    Attributes:
        model_id: the model's name: a hub id, or the last name of a folder.
        revision: the commit of the hub; None for a folder outside of the hub's cache.
        license: the license that the model's README.md states, in the hub's words.
        weight_type: the type of most weights of a GGUF file, in llama.cpp's words; None for other
            files.
        files: the files that were read, by the names that they have in a manifest.
    """

    model_id: str
    revision: str | None = None
    license: str | None = None
    weight_type: str | None = None
    files: Mapping[str, Path] = field(default_factory=dict)


class Checkpoint:
    """A checkpoint in a folder or on the hub. Each part is read once, when it is first needed.

    Attributes:
        model_id: a hub id or a folder.
        adapter: a folder or hub id of a LoRA adapter to merge into the weights; None for no
            adapter.
        tokenizer_id: "auto" for the checkpoint's own, another id or folder, or None for token ids
            only.
        hub: how the hub is read.
        images: whether images are read, too; None: if they can be, and always for types without a
            text model.
        text_only: whether only the language model is read, whatever the type.
    """

    # The name of the configuration in messages.
    _configured_by: ClassVar[str] = CONFIG
    _weight_type: str | None = None

    def __init__(
        self,
        model_id: str,
        dtype: str = "float32",
        *,
        tokenizer: str | None = "auto",
        adapter: str | None = None,
        hub: HubOptions | None = None,
        images: bool | None = False,
        text_only: bool = False,
    ) -> None:
        """Name a checkpoint; nothing is read yet. The other arguments are attributes of the class.

        Args:
            dtype: the dtype of the weights: "float32", "float16", or "auto" for float16 if the
                checkpoint is stored so, else float32, because it holds bfloat16 exactly.
        """
        self.model_id = model_id
        self.adapter = adapter
        self.tokenizer_id = tokenizer
        self.hub = hub or HubOptions()
        self.images = images
        self.text_only = text_only
        self._dtype = dtype

    def origin(self, sources: SourceFiles) -> Origin:
        """Where the loaded model comes from.

        Args:
            sources: the files of the weights, if they are known; all other files are added to it.
        """
        (name, revision), files = self._origin(sources)
        if self.adapter is not None:
            adapter_name, _ = origin_of(self.adapter)
            name = f"{name} + {adapter_name}"
            files |= {f"adapter/{path.name}": path for path in self.adapter_files or ()}
        sources.add(files.values())
        return Origin(name, revision, license_of(files), self._weight_type, files)

    def _origin(self, sources: SourceFiles) -> tuple[tuple[str, str | None], dict[str, Path]]:
        """Name and revision, and the files by name."""
        return origin_of(self.model_id, self.hub), files_of(self.model_id, self.hub, sources.paths)

    @cached_property
    def config(self) -> PretrainedConfig:
        """The configuration, not to be changed. Raises UnsupportedModelError for a model type that
        transformers does not know, QsampleError for a missing checkpoint or a configuration that
        cannot be read."""
        check_exists(self.model_id, self.hub)
        with self._config_errors():
            # Some configurations make a list as long as their number of layers.
            values, _ = PretrainedConfig.get_config_dict(self.model_id, **self.hub.downloading())
            check_layer_counts(self.model_id, values)
            config: PretrainedConfig = AutoConfig.from_pretrained(
                self.model_id, **self.hub.loading()
            )
        check_kind(self.model_id, config.to_dict())  # a folder's was checked before
        self._check_type(config)
        return config

    def _check_type(self, config: PretrainedConfig) -> None:
        """Raise UnsupportedModelError for a model of a type that is not exported, or not as this
        checkpoint is read."""
        kind = kind_of(config.to_dict())
        media = _media(config)
        reads_text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        reads_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        if reads_images and not reads_text and self.images is False and not self.text_only:
            problem = f"a {kind}, which reads {media or 'images'}"
            advice = f"open it with AutoModelForImageTextToText, or {_LANGUAGE_MODEL_ONLY}"
        elif self.images and not reads_images:
            problem = f"a {kind}, of which transformers has no class for images and text"
            advice = "open it with AutoModelForCausalLM"
        elif not (reads_text or reads_images or self.hub.trust_remote_code):
            reads_media = f", which reads {media}" if media else ""
            problem = f"a {kind}{reads_media}; transformers has no causal language model of type {config.model_type}"
            advice = ANOTHER_MODEL
        elif type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(
            config, "is_decoder", True
        ):
            problem = f"an encoder ({kind}), which does not continue texts"
            advice = ANOTHER_MODEL
        else:
            return
        raise UnsupportedModelError(f"{self.model_id} is {problem}; {advice}")

    @cached_property
    def dtype(self) -> str:
        """The dtype of the weights: "float32" or "float16"."""
        if self._dtype != "auto":
            return self._dtype
        stored = getattr(self.config, "dtype", None)
        if not stored:
            stored = getattr(self.config.get_text_config(decoder=True), "dtype", None)
        return "float16" if stored is torch.float16 else "float32"

    @cached_property
    def generation_config(self) -> GenerationConfig:
        """The settings of generate, from generation_config.json or else config.json; not to be
        changed. Raises QsampleError for a damaged file: transformers would pass over it, and lose
        its stop tokens."""
        _ = self.config  # raises an error unless there is such a checkpoint
        options = self.hub.downloading()
        try:
            return GenerationConfig.from_pretrained(self.model_id, **options)
        except OSError as error:
            damage: Exception = error
            if not isinstance(error.__context__, ValueError):  # the file is missing
                return GenerationConfig.from_pretrained(
                    self.model_id, config_file_name=CONFIG, _from_model_config=True, **options
                )
        # Not an object, a value that transformers refuses, or nested deeply.
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            damage = error
        raise QsampleError(
            f"{self.model_id}: its generation_config.json cannot be used ({_first_line(damage)}); correct it, delete "
            "it, or download it again"
        ) from damage

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer; None for a package of token ids only. Raises QsampleError, with advice, if
        it cannot be loaded."""
        if self.tokenizer_id is None:
            return None
        if self.tokenizer_id == "auto":
            name = self.model_id
            hub = self.hub
            options = {**hub.loading(), "config": self.config}
        else:
            name = self.tokenizer_id
            hub = self.hub.for_another_repository()
            check_exists(name, hub, file="tokenizer_config.json")
            options = hub.loading()
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, **options)
        except (
            Exception
        ) as error:  # transformers raises half a dozen kinds if there is no tokenizer
            raise QsampleError(
                f"no tokenizer in {name!r} ({_first_line(error)}); give tokenizer= a folder or hub id that has one, or "
                "tokenizer=None for a package that takes and returns token ids only"
            ) from error
        keep_own_parts(tokenizer, name, hub)
        return tokenizer

    @cached_property
    def processor(self) -> ProcessorMixin | None:
        """Transformers' processor of texts with images; None if only the language model is read.

        `tokenizer` gets the processor's chat template. Raises UnsupportedModelError for images that
        a package cannot read.
        """
        reads_images = type(self.config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        if self.images is False or self.text_only or not reads_images:
            return None
        try:
            return load_processor(self.model_id, self.config, self.tokenizer, self.hub)
        except UnsupportedModelError as error:
            if self.images is None and type(self.config) in MODEL_FOR_CAUSAL_LM_MAPPING:
                warnings.warn(f"{error}; its language model alone is exported", stacklevel=3)
                return None
            raise UnsupportedModelError(f"{error}; open {_LANGUAGE_MODEL_ONLY}") from error

    @property
    def _auto_class(self) -> Any:
        """The class of transformers that loads the model: the text model's, if it exists and
        suffices."""
        has_text_model = type(self.config) in MODEL_FOR_CAUSAL_LM_MAPPING
        reads_images = type(self.config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        text_suffices = self.processor is None and has_text_model
        if reads_images and not text_suffices:
            return AutoModelForImageTextToText
        return AutoModelForCausalLM

    @cached_property
    def adapter_files(self) -> tuple[Path, Path] | None:
        """The configuration and the weights of the adapter; None without an adapter. Raises
        QsampleError if a file is missing."""
        if self.adapter is None:
            return None
        hub = self.hub.for_another_repository()
        check_exists(self.adapter, hub, file=ADAPTER)
        return find_adapter(self.adapter, hub)

    @cached_property
    def outline(self) -> Outline:
        """The model without weights, made on torch's meta device and asked which states it keeps;
        the export asks the questions that need weights.

        Raises:
            UnsupportedModelError: for a state in a place that no retained buffer can take, for a
                quantization that cannot be read, and for a configuration that transformers makes no
                model of.
        """
        config = copy.deepcopy(self.config)
        packing = packing_of(config, self.model_id)
        runs_remote_code = self.hub.trust_remote_code
        with self._config_errors():
            try:
                with torch.device("meta"):
                    model: PreTrainedModel = self._auto_class.from_config(
                        copy.deepcopy(config),
                        attn_implementation="eager",
                        trust_remote_code=runs_remote_code,
                    ).eval()
            except Exception:
                if runs_remote_code and packing is None:  # the model's code may need memory
                    return Outline(config, None, None, config, {}, frozenset())
                raise
            outline = Outline(
                config,
                packing,
                type(model),
                copy.deepcopy(model.config),
                {name: weight.shape for name, weight in model.state_dict().items()},
                conv1d_names(model),
                sum(parameter.numel() for parameter in model.parameters()),
            )
            _check_states(model)
        return outline

    def load(
        self,
        dtype: str | None = None,
        scratch: Path | None = None,
        sources: SourceFiles | None = None,
    ) -> PreTrainedModel:
        """A new copy of the model, in eval mode on the CPU, with eager attention.

        Args:
            dtype: the dtype of the weights, in place of the checkpoint's `dtype`.
            scratch: an empty folder that lives as long as the model. Packed weights are written
                there in blocks (`block_store`); other weights become placeholders for the numbers
                in the checkpoint's files (`mapped_weights`), so that a model larger than the memory
                can be exported. None loads into memory.
            sources: a collection that the files of the weights are added to.

        Raises:
            UnsupportedModelError: for a model that cannot be exported.
            QsampleError: if the files cannot be read or do not fit the configuration.
        """
        # Small files are read before the weights: an error of theirs comes at once.
        _ = self.config
        _ = self.adapter_files
        _ = self.generation_config
        _ = self.outline
        self._warn_of_media()
        torch_dtype = getattr(torch, self.dtype if dtype is None else dtype)
        sources = sources or SourceFiles()
        if scratch is not None or not self._needs_scratch:
            return self._load(torch_dtype, scratch, sources)
        own = Path(tempfile.mkdtemp(prefix="qsample-"))
        try:
            model = self._load(torch_dtype, own, sources)
        except BaseException:
            shutil.rmtree(own, ignore_errors=True)
            raise
        for parameter in model.parameters():
            parameter.data = numbers(parameter.data)
        weakref.finalize(model, shutil.rmtree, own, ignore_errors=True)
        return model

    def _warn_of_media(self) -> None:
        """Warn that images or audio, which the model also reads, are left out."""
        media = _media(self.config)
        if self.processor is not None:
            media = media.removeprefix("images").removeprefix(" and ")
            if media:
                warnings.warn(
                    f"{self.model_id} also reads {media}, which is left out", stacklevel=3
                )
        elif media and not self.text_only:
            hint = ""
            if media.startswith("images"):
                hint = "; AutoModelForImageTextToText also exports images"
            warnings.warn(
                f"{self.model_id} also reads {media}; its language model alone is exported, which reads text{hint}",
                stacklevel=3,
            )

    def _load(
        self, dtype: torch.dtype, scratch: Path | None, sources: SourceFiles
    ) -> PreTrainedModel:
        outline = self.outline
        options: dict[str, Any] = {
            "config": copy.deepcopy(outline.config),
            "dtype": dtype,
            "attn_implementation": "eager",
            "output_loading_info": True,
            "ignore_mismatched_sizes": True,  # `_check_complete` refuses them by name
        }
        with self._weight_errors():
            stored = self._stored(dtype, scratch, sources)
            if stored is None:
                loaded: Any = self._auto_class.from_pretrained(
                    self.model_id, **options, **self.hub.loading()
                )
            else:
                assert outline.kind is not None
                weights = stored.weights if isinstance(stored, QuantizedCheckpoint) else stored
                self._check_size(outline.kind, weights)
                options["config"] = copy.deepcopy(outline.model_config)
                # Weights that transformers merges are computed when they are needed.
                with deferring(), loading_in_this_thread():
                    loaded = outline.kind.from_pretrained(None, state_dict=weights, **options)
        model: PreTrainedModel = loaded[0]
        info: dict[str, Any] = loaded[1]
        quantized = stored if isinstance(stored, QuantizedCheckpoint) else None
        missing = info["missing_keys"] if quantized is None else ()
        self._check_complete(model, info["mismatched_keys"], missing)
        model.generation_config = copy.deepcopy(self.generation_config)
        model.requires_grad_(False)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config  # the weights are float now
        if self.adapter_files is not None:
            merge_adapter(model, *self.adapter_files)
        if quantized is not None:
            quantized.check_loaded(self.model_id, info["missing_keys"], info["unexpected_keys"])
            quantized.attach(model)
        return model  # from_pretrained returns it in eval mode

    @property
    def _needs_scratch(self) -> bool:
        """Whether `_stored` writes blocks."""
        return self.outline.packing is not None

    def _stored(
        self, dtype: torch.dtype, scratch: Path | None, sources: SourceFiles
    ) -> QuantizedCheckpoint | dict[str, Tensor] | None:
        """The weights by name, left in their files if possible; None if transformers has to load
        them itself."""
        packing = self.outline.packing
        if packing is None and (scratch is None or not self._can_be_mapped()):
            return None
        files = self._weight_files()
        sources.add(files)
        if packing is None:
            return mapped_weights(files) if files else None
        if not files:
            raise UnsupportedModelError(
                f"{self.model_id} holds its quantized weights in another format than safetensors, the only format "
                "that can be read; save it as safetensors first"
            )
        assert scratch is not None
        packed = read_packed(files, packing)
        with self._room_for_blocks(scratch, packed.bytes_in_blocks(dtype)):
            return read_quantized(
                packed.others,
                packed.matrices,
                scratch,
                dtype=dtype,
                shapes=self.outline.shapes,
                transposed=self.outline.transposed,
                biases=packed.biases,
            )

    @contextmanager
    def _room_for_blocks(self, scratch: Path, needed: int) -> Iterator[None]:
        """Raises QsampleError, before or when the disk is full, if `needed` bytes have no room."""
        check_free(scratch, needed, _COPY_IN_BLOCKS)
        with full_disk_named(scratch, needed, _COPY_IN_BLOCKS):
            yield

    def _can_be_mapped(self) -> bool:
        """Whether float weights can become placeholders; otherwise transformers has to load this
        checkpoint itself."""
        # The code of a model lies beside its weights, and quantized weights mean nothing without
        # their scales.
        config = self.outline.config
        has_other_names = bool(getattr(config, "transformers_weights", None))
        is_quantized = getattr(config, "quantization_config", None) is not None
        return not (has_other_names or self.hub.trust_remote_code or is_quantized)

    def _weight_files(self) -> list[Path]:
        """The safetensors files of the weights, downloaded if need be; [] if the checkpoint has
        another format."""
        if Path(self.model_id).is_dir():
            return weight_files(Path(self.model_id))
        options = self.hub.downloading()
        for name in (SINGLE, INDEX):
            file = cached_file(
                self.model_id, name, _raise_exceptions_for_missing_entries=False, **options
            )
            if file is not None:
                if name == INDEX:
                    get_checkpoint_shard_files(self.model_id, file, **options)  # type: ignore[no-untyped-call]
                return weight_files(Path(file).parent)
        return []

    def _check_size(self, kind: type[PreTrainedModel], weights: Mapping[str, Tensor]) -> None:
        """Raise QsampleError if the model is much larger than its weights: transformers would make
        random numbers for the rest, in memory, before `_check_complete` can name them."""
        held = sum(weight.numel() for weight in weights.values())
        # A tied table may be stored once and counted twice.
        if self.outline.size > 2 * held + _MAX_MISSING_NUMBERS:
            raise QsampleError(
                f"{self.model_id}: {kind.__name__} has {self.outline.size} numbers by its {self._configured_by}, and "
                f"the files of its weights hold {held}; give weights and configuration of one model"
            )

    def _check_complete(
        self,
        model: PreTrainedModel,
        mismatched: Collection[tuple[str, Any, Any]],
        missing: Collection[str],
    ) -> None:
        """Raise QsampleError for a missing weight, or one of another shape: transformers puts
        random numbers there.

        Args:
            model: the loaded model.
            mismatched: the names of weights with another shape, the shape in the files and the
                model's.
            missing: the names of weights that the files lack.
        """
        kind = type(model).__name__
        if mismatched:
            name, found, wanted = min(mismatched)
            others = f", and {len(mismatched) - 1} more do not fit" if len(mismatched) > 1 else ""
            raise QsampleError(
                f"{self.model_id} holds {name} of shape {list(found)}, and {kind} has {list(wanted)} by its "
                f"{self._configured_by}{others}; give weights and configuration of one model"
            )
        random_weights = set(missing) & {name for name, _ in model.named_parameters()}
        if random_weights:
            raise QsampleError(
                f"{self.model_id} holds no {listed(random_weights)}, which {kind} needs; download the checkpoint "
                "again, or give a checkpoint of this very architecture"
            )

    @contextmanager
    def _config_errors(self) -> Iterator[None]:
        """Turns errors of transformers about a configuration into errors that name the
        checkpoint."""
        try:
            yield
        except (QsampleError, ImportError):
            raise
        except OSError as error:
            raise QsampleError(
                f"cannot read the model {self.model_id!r}: {_first_line(error)}"
            ) from error
        except ValueError as error:
            raise UnsupportedModelError(f"{self.model_id}: {_first_line(error)}") from error
        except Exception as error:  # transformers checks the values in half a dozen ways
            reason = " ".join(str(error).split())
            raise UnsupportedModelError(
                f"{self.model_id}: transformers makes no model of its {self._configured_by} ({type(error).__name__}: "
                f"{reason:.300}); correct it, or download the checkpoint again"
            ) from error

    @contextmanager
    def _weight_errors(self) -> Iterator[None]:
        """Turns errors of transformers and safetensors about weights into errors that name the
        checkpoint."""
        try:
            yield
        except ValueError as error:
            raise UnsupportedModelError(f"{self.model_id}: {_first_line(error)}") from error
        except UnpicklingError as error:
            raise QsampleError(
                f"cannot load the weights of {self.model_id!r}: a .bin file is damaged, or a pickle that holds more "
                "than tensors, which could run any code; take a checkpoint in safetensors files"
            ) from error
        except (OSError, EOFError, RuntimeError, SafetensorError) as error:
            raise QsampleError(
                f"cannot load the weights of {self.model_id!r}: {_first_line(error)}"
            ) from error


def transformers_generation_config(settings: Mapping[str, Any]) -> GenerationConfig:
    """The settings of generate as the object to export a model with. Raises QsampleError if
    transformers would not save them."""
    try:
        config = GenerationConfig(**settings)  # type: ignore[no-untyped-call]
        config.validate(strict=True)
        return config
    except ValueError as error:
        raise QsampleError(f"model.generation_config cannot be exported: {error}") from error


def _check_states(model: PreTrainedModel) -> None:
    """Transform a model in place. Raises UnsupportedModelError if it cannot keep its states in
    buffers."""
    context = DecodeContext()
    try:
        with torch.device("meta"):
            apply_transforms(model, context)
            state_shapes(model, context)
    except UnsupportedModelError as error:
        if error.__cause__ is None or isinstance(error.__cause__, _ERRORS_OF_LAYERS):
            raise
    except Exception:  # the answer needs weights, and the export asks again
        return


def _media(config: PretrainedConfig) -> str:
    """What a model reads besides text: "images", "audio", "images and audio", or ""."""
    found = []
    for mark, medium in (("vision", "images"), ("audio", "audio")):
        if any(mark in part for part in config.sub_configs):
            found.append(medium)
    return " and ".join(found)


def _first_line(error: BaseException) -> str:
    """The first line of an error's message that is not empty, otherwise the error's class."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)
