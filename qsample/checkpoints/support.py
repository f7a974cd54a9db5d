"""Refuses a model whose configuration alone tells that it cannot be exported.

The model is built without memory for its weights, on torch's meta device, and asked which states it keeps. What cannot
be answered there is left to the export itself, which asks again with the weights.
"""

from __future__ import annotations

import copy

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from qsample.errors import UnsupportedModelError
from qsample.transforms.cache import DecodeContext
from qsample.transforms.decoder import apply_transforms, state_shapes

# What a layer raises that meets a cache of another kind than its own; a value that is not there raises others.
_OF_THE_MODEL = (AttributeError, ValueError)


def empty_model(config: PretrainedConfig, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model of `config` in eval mode, without memory for its weights."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            copy.deepcopy(config), attn_implementation="eager", trust_remote_code=trust_remote_code
        ).eval()
    return model


def check_supported(config: PretrainedConfig, *, trust_remote_code: bool = False) -> None:
    """Raise UnsupportedModelError for a model that keeps its state where no retained buffer can be put, and what
    transformers raises for a configuration that it can make no model of."""
    context = DecodeContext()
    try:
        model = empty_model(config, trust_remote_code=trust_remote_code)
    except Exception:
        if trust_remote_code:  # the model's own code may need memory
            return
        raise
    try:
        with torch.device("meta"):
            apply_transforms(model, context)
            state_shapes(model, context)
    except UnsupportedModelError as error:
        if error.__cause__ is None or isinstance(error.__cause__, _OF_THE_MODEL):
            raise
    except Exception:
        return
