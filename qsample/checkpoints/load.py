"""Loads the Hugging Face model and tokenizer of a hub id or a checkpoint folder."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from qsample.checkpoints.gptq_awq import QuantizedCheckpoint, bytes_in_blocks, read_checkpoint
from qsample.checkpoints.hub_options import HubOptions
from qsample.checkpoints.locate import check_exists
from qsample.checkpoints.lora import find_adapter, merge_adapter
from qsample.checkpoints.mapped_weights import (
    INDEX,
    SINGLE,
    loading_in_this_thread,
    mapped_weights,
    weight_files,
)
from qsample.checkpoints.quantization_config import CheckpointQuantization, quantization_of
from qsample.checkpoints.support import check_supported, empty_model
from qsample.disk.source_files import SourceFiles
from qsample.disk.space import check_free, full_disk_named
from qsample.errors import QsampleError, UnsupportedModelError, listed
from qsample.transforms.deferred import deferring, numbers

_IN_BLOCKS: Final = "the copy of the quantized weights in blocks"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where a model is and how to load it.

    model_id: a hub id or a folder. dtype: "float32" or "float16". tokenizer: "auto" = the checkpoint's own, another id
    or folder, or None for a package of token ids only. adapter: a folder or hub id of a LoRA adapter, to be merged.
    """

    model_id: str
    dtype: str = "float32"
    tokenizer: str | None = "auto"
    adapter: str | None = None
    hub: HubOptions = field(default_factory=HubOptions)


def load_model(
    checkpoint: Checkpoint, scratch: Path | None = None, sources: SourceFiles | None = None
) -> PreTrainedModel:
    """The model in eval mode on the CPU, with eager attention, its weights in `checkpoint.dtype`.

    scratch: an empty folder that lives as long as the model; GPTQ and AWQ weights are written there in blocks
    (`gptq_awq`). With one, weights are placeholders for what is in the checkpoint's files (`mapped_weights`), so that a
    model larger than the memory can be exported; None = all of them are in memory. sources: is told these files.

    Raises UnsupportedModelError for a model type that transformers does not know or that is no causal LM, QsampleError
    where the files cannot be read or do not fit the configuration.
    """
    check_exists(checkpoint.model_id, checkpoint.hub)
    # Before the model: it fails fast.
    adapter = None if checkpoint.adapter is None else find_adapter(checkpoint.adapter, checkpoint.hub)
    config = read_config(checkpoint)
    own_generation_config(checkpoint)  # is it damaged?
    quantization = quantization_of(config, checkpoint.model_id)
    if quantization is not None:
        del config.quantization_config  # transformers would ask for the library that made it
    try:
        check_supported(config, trust_remote_code=checkpoint.hub.trust_remote_code)
    except (QsampleError, ImportError):
        raise
    except ValueError as error:
        raise UnsupportedModelError(f"{checkpoint.model_id}: {_first_line(error)}") from error
    except Exception as error:  # whatever a model raises that is made of numbers that do not fit each other
        raise _no_model(checkpoint.model_id, error) from error
    if quantization is None or scratch is not None:
        return _load(checkpoint, config, quantization, adapter, scratch, sources)
    own = Path(tempfile.mkdtemp(prefix="qsample-"))
    try:
        model = _load(checkpoint, config, quantization, adapter, own)
    except BaseException:
        shutil.rmtree(own, ignore_errors=True)
        raise
    for parameter in model.parameters():
        parameter.data = numbers(parameter.data)
    weakref.finalize(model, shutil.rmtree, own, ignore_errors=True)
    return model


def _load(
    checkpoint: Checkpoint,
    config: PretrainedConfig,
    quantization: CheckpointQuantization | None,
    adapter: tuple[Path, Path] | None,
    scratch: Path | None,
    sources: SourceFiles | None = None,
) -> PreTrainedModel:
    """adapter: its configuration and weights. scratch, sources: as in `load_model`; there is a scratch folder where
    weights are quantized."""
    quantized: QuantizedCheckpoint | None = None
    model: PreTrainedModel
    loading: dict[str, Any]
    options: dict[str, Any] = {
        "config": config,
        "dtype": getattr(torch, checkpoint.dtype),
        "attn_implementation": "eager",
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # they are refused below, by name
    }
    try:
        files = []
        if quantization is not None or (scratch is not None and _can_be_mapped(checkpoint, config)):
            files = _weight_files(checkpoint)
        if sources is not None:
            sources.add(files)
        if quantization is not None:
            assert scratch is not None
            quantized = _read_quantized(checkpoint, config, quantization, files, scratch)
        if quantized is None and not files:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                checkpoint.model_id, **options, **checkpoint.hub.loading()
            )
        else:
            weights = mapped_weights(files) if quantized is None else quantized.weights
            with deferring(), loading_in_this_thread():  # what transformers merges is computed when it is needed
                empty = empty_model(config, trust_remote_code=checkpoint.hub.trust_remote_code)
                options["config"] = empty.config  # of the text model, where the configuration is of several
                loaded = type(empty).from_pretrained(None, state_dict=weights, **options)
            loaded[0].generation_config = own_generation_config(checkpoint) or config_as_generation_config(checkpoint)
        model, loading = loaded
    except ValueError as error:
        raise UnsupportedModelError(f"{checkpoint.model_id}: {_first_line(error)}") from error
    except UnpicklingError as error:
        raise QsampleError(
            f"cannot load the weights of {checkpoint.model_id!r}: a .bin file is damaged, or a pickle that holds more "
            "than tensors, which could run any code; take a checkpoint in safetensors files"
        ) from error
    except (OSError, EOFError, RuntimeError, SafetensorError) as error:
        raise QsampleError(f"cannot load the weights of {checkpoint.model_id!r}: {_first_line(error)}") from error
    _check_sizes(model, loading["mismatched_keys"], checkpoint.model_id)
    if quantized is None:
        _check_complete(model, loading["missing_keys"], checkpoint.model_id)
    model.requires_grad_(False)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # its weights are float now
    if adapter is not None:
        merge_adapter(model, *adapter)
    if quantized is not None:
        quantized.check_loaded(loading["missing_keys"], loading["unexpected_keys"])
        quantized.attach(model)
    return model  # from_pretrained returns it in eval mode


def read_config(checkpoint: Checkpoint) -> PretrainedConfig:
    """The configuration. Raises UnsupportedModelError for a model type that transformers does not know, QsampleError
    where it cannot be read."""
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(checkpoint.model_id, **checkpoint.hub.loading())
    except (ValueError, KeyError) as error:
        raise UnsupportedModelError(f"{checkpoint.model_id}: {_first_line(error)}") from error
    except OSError as error:
        raise QsampleError(f"cannot read the model {checkpoint.model_id!r}: {_first_line(error)}") from error
    except ImportError:
        raise
    except Exception as error:  # transformers checks the values in half a dozen ways
        raise _no_model(checkpoint.model_id, error) from error
    return config


def _no_model(model_id: str, error: Exception) -> UnsupportedModelError:
    """For a config.json that nothing can be made of."""
    said = " ".join(str(error).split())
    return UnsupportedModelError(
        f"{model_id}: transformers makes no model of its config.json ({type(error).__name__}: {said:.300}); correct "
        "it, or download the checkpoint again"
    )


def _check_sizes(model: PreTrainedModel, mismatched: Collection[tuple[str, Any, Any]], model_id: str) -> None:
    """Raise QsampleError for a weight of another shape than the model's: transformers put random numbers there."""
    if mismatched:
        name, found, wanted = min(mismatched)
        others = f", and {len(mismatched) - 1} more do not fit" if len(mismatched) > 1 else ""
        raise QsampleError(
            f"{model_id} holds {name} of shape {list(found)}, and {type(model).__name__} has {list(wanted)} by its "
            f"config.json{others}; give weights and configuration of one model"
        )


def _check_complete(model: PreTrainedModel, missing: Collection[str], model_id: str) -> None:
    """Raise QsampleError for a weight that transformers made up, of random numbers, because the checkpoint lacks it."""
    made_up = set(missing) & {name for name, _ in model.named_parameters()}
    if made_up:
        raise QsampleError(
            f"{model_id} holds no {listed(made_up)}, which {type(model).__name__} needs; download the checkpoint "
            "again, or give one of this very architecture"
        )


def _can_be_mapped(checkpoint: Checkpoint, config: PretrainedConfig) -> bool:
    """Whether float weights can become placeholders; otherwise transformers has to load this checkpoint by itself."""
    # Code of the model's own lies beside its weights, and quantized weights mean nothing without their scales.
    named = getattr(config, "transformers_weights", None)  # files of other names
    quantized = getattr(config, "quantization_config", None) is not None
    return not (named or checkpoint.hub.trust_remote_code or quantized)


def _weight_files(checkpoint: Checkpoint) -> list[Path]:
    """The safetensors files of the weights; [] = it has none."""
    folder = _folder(checkpoint)
    return weight_files(folder) if folder is not None else []


def own_generation_config(checkpoint: Checkpoint) -> GenerationConfig | None:
    """The checkpoint's generation_config.json; None where it has none, QsampleError where it cannot be read.

    transformers passes over a damaged one, and stop tokens with it.
    """
    try:
        return GenerationConfig.from_pretrained(checkpoint.model_id, **checkpoint.hub.downloading())
    except OSError as error:
        if not isinstance(error.__context__, ValueError):  # it is no JSON, or no text
            return None
        damage: Exception = error
    except (ValueError, TypeError, AttributeError) as error:  # it is no object, or transformers takes no such value
        damage = error
    raise QsampleError(
        f"{checkpoint.model_id}: its generation_config.json cannot be used ({_first_line(damage)}); correct it, delete "
        "it, or download it again"
    ) from damage


def config_as_generation_config(checkpoint: Checkpoint) -> GenerationConfig:
    """What transformers generates with where there is no generation_config.json: what config.json says of it."""
    options = checkpoint.hub.downloading()
    return GenerationConfig.from_pretrained(
        checkpoint.model_id, config_file_name="config.json", _from_model_config=True, **options
    )


def _read_quantized(
    checkpoint: Checkpoint,
    config: PretrainedConfig,
    quantization: CheckpointQuantization,
    files: list[Path],
    scratch: Path,
) -> QuantizedCheckpoint:
    """A quantized checkpoint in `files`, its blocks in `scratch`."""
    if not files:
        raise UnsupportedModelError(
            f"{checkpoint.model_id} holds its quantized weights in another format than safetensors, the only one that "
            "can be read; save it as safetensors first"
        )
    needed = bytes_in_blocks(files, quantization, getattr(torch, checkpoint.dtype))
    check_free(scratch, needed, _IN_BLOCKS)
    with full_disk_named(scratch, needed, _IN_BLOCKS):
        return read_checkpoint(
            files[0].parent,
            files,
            scratch,
            quantization,
            dtype=getattr(torch, checkpoint.dtype),
            model=empty_model(config, trust_remote_code=checkpoint.hub.trust_remote_code),
        )


def _folder(checkpoint: Checkpoint) -> Path | None:
    """The folder of the checkpoint's files; a hub id's are downloaded if need be. None: it has no safetensors."""
    if Path(checkpoint.model_id).is_dir():
        return Path(checkpoint.model_id)
    options = checkpoint.hub.downloading()
    for name in (SINGLE, INDEX):
        file = cached_file(checkpoint.model_id, name, _raise_exceptions_for_missing_entries=False, **options)
        if file is not None:
            if name == INDEX:
                get_checkpoint_shard_files(checkpoint.model_id, file, **options)  # type: ignore[no-untyped-call]
            return Path(file).parent
    return None


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase | None:
    """The tokenizer that `checkpoint.tokenizer` names; QsampleError says what to do where there is none."""
    if checkpoint.tokenizer is None:
        return None
    own = checkpoint.tokenizer == "auto"
    name = checkpoint.model_id if own else checkpoint.tokenizer
    hub = checkpoint.hub if own else checkpoint.hub.for_another_repository()
    if not own:
        check_exists(name, hub, file="tokenizer_config.json")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, **hub.loading())
    except Exception as error:  # transformers raises half a dozen kinds for a missing tokenizer
        if own:
            read_config(checkpoint)  # which it reads, too, and may have failed at
        raise QsampleError(
            f"no tokenizer in {name!r} ({_first_line(error)}); give tokenizer= a folder or hub id that has one, or "
            "tokenizer=None for a package that takes and returns token ids only"
        ) from error
    return tokenizer


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
