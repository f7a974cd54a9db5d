"""Models of random integers, as `checkpoints.stored_matrices` holds packed weights, and the same in float."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from qsample.checkpoints.mapped_weights import loading_in_this_thread
from qsample.checkpoints.quantized import conv1d_names, read_quantized
from qsample.checkpoints.stored_matrices import IntegerWeight, StoredMatrix
from qsample.transforms.deferred import deferring
from tests.helpers.tiny_models import random_model


def random_integers(
    rng: np.random.Generator,
    outputs: int,
    inputs: int,
    *,
    bits: int = 4,
    block: int = 32,
    zero_points: bool = False,
    offsets: bool = False,
    act_order: bool = False,
    empty: float = 0.1,
) -> IntegerWeight:
    """Weights of about the size that `random_model` gives them. empty: share of the blocks whose scale is 0."""
    groups = inputs // block
    scales = rng.uniform(0.5, 1.5, (outputs, groups)).astype(np.float32) * np.float32(0.4 / 2**bits)
    scales[rng.uniform(size=scales.shape) < empty] = 0
    order = np.arange(inputs) // block
    return IntegerWeight(
        bits,
        rng.integers(0, 2**bits, (outputs, inputs), dtype=np.uint8),
        scales,
        rng.integers(0, 2**bits, (outputs, groups), dtype=np.uint8) if zero_points else None,
        (-rng.uniform(0.05, 0.35, (outputs, groups))).astype(np.float32) if offsets else None,
        rng.permutation(order) if act_order else None,
    )


class IntegerModel(NamedTuple):
    """model: with blocks, as a reader of packed weights loads it. floats: the same in float. integers: by layer."""

    model: PreTrainedModel
    floats: PreTrainedModel
    integers: Mapping[str, IntegerWeight]


def integer_model(
    model_type: str,
    scratch: Path,
    make: Callable[..., Mapping[str, Any]] | None = None,
    **overrides: Any,
) -> IntegerModel:
    """A random `model_type` whose matrices are all integers. make: layer → arguments of `random_integers`; by default
    none. scratch: a new folder that lives as long as the model."""
    scratch.mkdir()
    floats = random_model(model_type, **overrides)
    rng, integers, weights, turned = np.random.default_rng(0), {}, {}, conv1d_names(floats)
    for name, tensor in floats.state_dict().items():
        layer = name.removesuffix(".weight")
        if layer == "lm_head" and floats.config.tie_word_embeddings:
            continue
        if tensor.ndim != 2 or "wpe" in name:
            weights[name] = tensor.clone()
            continue
        is_turned = layer.rpartition(".")[2] in turned
        shape = tensor.shape[::-1] if is_turned else tensor.shape
        integers[layer] = random_integers(rng, *shape, **({} if make is None else make(layer)))
        meant = torch.from_numpy(integers[layer].floats())
        with torch.no_grad():
            tensor.copy_(meant.T if is_turned else meant)
    shapes = {name: tensor.shape for name, tensor in floats.state_dict().items()}
    matrices = [StoredMatrix(layer, one.levels.shape, one.rows) for layer, one in integers.items()]
    quantized = read_quantized(
        weights, matrices, scratch, dtype=torch.float32, shapes=shapes, transposed=turned
    )
    with deferring(), loading_in_this_thread():
        model: PreTrainedModel = type(floats).from_pretrained(
            None,
            config=copy.deepcopy(floats.config),
            state_dict=quantized.weights,
            attn_implementation="eager",
        )
    model.requires_grad_(False)
    quantized.attach(model)
    return IntegerModel(model.eval(), floats, integers)
