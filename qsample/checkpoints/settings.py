"""What a checkpoint says of itself before its weights are read: configuration, settings of generate, dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers

from qsample.checkpoints.load import Checkpoint, own_generation_config, read_config
from qsample.errors import QsampleError


def read_generation_config(checkpoint: Checkpoint) -> transformers.GenerationConfig:
    """The checkpoint's generation_config.json, or what transformers makes of its configuration where there is none."""
    own = own_generation_config(checkpoint)
    return transformers.GenerationConfig.from_model_config(read_config(checkpoint)) if own is None else own


def transformers_generation_config(settings: Mapping[str, Any]) -> transformers.GenerationConfig:
    """`settings` as the object that a model is exported with. Raises QsampleError where transformers would not save
    them."""
    try:
        config = transformers.GenerationConfig(**settings)  # type: ignore[no-untyped-call]
        config.validate(strict=True)
        return config
    except ValueError as error:
        raise QsampleError(f"model.generation_config cannot be exported: {error}") from error


def settle_dtype(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with a dtype in place of "auto": float16 where that is its own, otherwise float32, which holds
    bfloat16 exactly."""
    if checkpoint.dtype != "auto":
        return checkpoint
    config = read_config(checkpoint)
    own = getattr(config, "dtype", None) or getattr(config.get_text_config(decoder=True), "dtype", None)
    return replace(checkpoint, dtype="float16" if own is torch.float16 else "float32")
