"""A hub id or a checkpoint folder enters; the Hugging Face model and tokenizer, ready to be transformed, leave."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from qsample.errors import QsampleError, UnsupportedModelError


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where a model is and how to load it; Hugging Face's names.

    model_id: a hub id or a folder. dtype: "float32" or "float16". tokenizer: "auto" = the checkpoint's own, another id
    or folder, or None for a package of token ids only.
    """

    model_id: str
    dtype: str = "float32"
    tokenizer: str | None = "auto"
    revision: str | None = None
    cache_dir: str | None = None
    token: str | None = None
    local_files_only: bool = False
    trust_remote_code: bool = False

    def _hub_options(self) -> dict[str, object]:
        return {
            "revision": self.revision or "main",
            "cache_dir": self.cache_dir,
            "token": self.token,
            "local_files_only": self.local_files_only,
            "trust_remote_code": self.trust_remote_code,
        }


def load_model(checkpoint: Checkpoint) -> PreTrainedModel:
    """The model in eval mode on the CPU, with eager attention, its weights in `checkpoint.dtype`.

    Raises UnsupportedModelError for a model type that transformers does not know or that is no causal LM, QsampleError
    where the files cannot be read or do not fit the configuration.
    """
    check_exists(checkpoint.model_id)
    options = checkpoint._hub_options()
    try:
        config = AutoConfig.from_pretrained(checkpoint.model_id, **options)
    except (ValueError, KeyError) as error:
        raise UnsupportedModelError(f"{checkpoint.model_id}: {_first_line(error)}") from error
    except OSError as error:
        raise QsampleError(f"cannot read the model {checkpoint.model_id!r}: {_first_line(error)}") from error
    try:
        # A size mismatch is left to raise: weights that do not fit the configuration must not be made up.
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint.model_id,
            config=config,
            dtype=getattr(torch, checkpoint.dtype),
            attn_implementation="eager",
            **options,
        )
    except ValueError as error:
        raise UnsupportedModelError(f"{checkpoint.model_id}: {_first_line(error)}") from error
    except (OSError, RuntimeError) as error:
        raise QsampleError(f"cannot load the weights of {checkpoint.model_id!r}: {_first_line(error)}") from error
    model.requires_grad_(False)
    loaded: PreTrainedModel = model  # from_pretrained returns it in eval mode
    return loaded


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase | None:
    """The tokenizer that `checkpoint.tokenizer` names; QsampleError says what to do where there is none."""
    if checkpoint.tokenizer is None:
        return None
    own = checkpoint.tokenizer == "auto"
    name = checkpoint.model_id if own else checkpoint.tokenizer
    options = checkpoint._hub_options() if own else {**checkpoint._hub_options(), "revision": "main"}
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, **options)
    except Exception as error:  # transformers raises half a dozen kinds for a missing tokenizer
        raise QsampleError(
            f"no tokenizer in {name!r} ({_first_line(error)}); give tokenizer= a folder or hub id that has one, or "
            "tokenizer=None for a package that takes and returns token ids only"
        ) from error
    return tokenizer


def check_exists(model_id: str) -> None:
    """Raise QsampleError for a folder that is missing or no checkpoint.

    Taken for a hub id, its error would speak of the network.
    """
    path = Path(model_id)
    if path.is_dir() and not (path / "config.json").is_file():
        raise QsampleError(f"{model_id} has neither a config.json (a checkpoint) nor a qsample.json (a package)")
    looks_like_path = model_id.startswith((".", "/", "~")) or model_id.count("/") > 1
    if looks_like_path and not path.exists():
        raise QsampleError(f"{model_id} does not exist; give a checkpoint folder, a package folder or a hub id")


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
