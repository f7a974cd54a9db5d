"""The shapes of the states that a model keeps, read off a run of two tokens."""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from qsample.errors import UnsupportedModelError
from qsample.huggingface.dtypes import dtype_name
from qsample.interface import KeyValueShape, RecurrentShape
from qsample.transforms.attention import use_own_attention
from qsample.transforms.cache import DecodeContext, RetainedCache
from qsample.transforms.positions import RowPositions

_ELSE: Final = "choose a model of a type that docs/architectures.md lists as passed"


def state_shapes(
    model: PreTrainedModel, context: DecodeContext
) -> tuple[tuple[KeyValueShape, ...], tuple[RecurrentShape, ...]]:
    """The cache shape of every attention layer and every other state, in layer order; makes `context`'s choices.

    A model whose attention the interface does not carry gets its own back. Raises UnsupportedModelError where a layer
    attends to later tokens or keeps a state of another kind.
    """
    try:
        return _probe(model, context)
    except UnsupportedModelError:
        if context.buffered:
            raise
    use_own_attention(model, context)
    return _probe(model, context)


def _probe(
    model: PreTrainedModel, context: DecodeContext
) -> tuple[tuple[KeyValueShape, ...], tuple[RecurrentShape, ...]]:
    name = type(model).__name__
    context.clear()
    context.masked.clear()
    context.states_of.clear()
    try:
        with torch.no_grad():
            cache = _cache(model, context)
            run_model(model, context, torch.zeros(1, 2, dtype=torch.int64), torch.arange(2)[None], cache)
        present = dict(sorted(context.present.items()))
        recurrent = _recurrent_shapes(context, cache)
    except UnsupportedModelError:
        raise
    except Exception as error:  # whatever a layer raises that meets a cache of another kind than its own
        raise UnsupportedModelError(
            f"{name} keeps its state in a way that retained buffers cannot serve ({type(error).__name__}: {error}); "
            f"{_ELSE}"
        ) from error
    finally:
        context.clear()
    if not present and not recurrent:
        raise UnsupportedModelError(f"{name} puts nothing into the cache, so there is no state to retain; {_ELSE}")
    numbered = list(present) == list(range(len(present)))
    key_values = tuple(
        KeyValueShape(key.shape[1], max(key.shape[-1], value.shape[-1]), None if numbered else layer)
        for layer, (key, value) in present.items()
    )
    return key_values, recurrent


def _recurrent_shapes(context: DecodeContext, cache: RetainedCache) -> tuple[RecurrentShape, ...]:
    """The states that layers made in `cache`."""
    shapes = []
    for layer, kind, index in sorted({key for keys in context.states_of.values() for key in keys}):
        state = getattr(cache.layers[layer], f"{kind}s")[index]
        shapes.append(RecurrentShape(layer, kind, index, tuple(state.shape[1:]), dtype_name(state.dtype)))
    return tuple(shapes)


def run_model(
    model: PreTrainedModel,
    context: DecodeContext,
    ids: torch.Tensor,
    positions: torch.Tensor,
    cache: RetainedCache | None = None,
) -> Any:
    """Call `model` over `cache`, by default a new one of `context`: ids, positions [B, S] int64. Returns its output."""
    parameters = inspect.signature(model.forward).parameters
    name = "cache_params" if "cache_params" in parameters else "past_key_values"
    inputs: dict[str, Any] = {"input_ids": ids, name: cache or _cache(model, context), "use_cache": True}
    if _takes_positions(model):
        inputs["position_ids"] = positions + _first_position(model)
    # Every key of the buffers: the causal mask decides which of them a query sees.
    keys = context.capacity if context.buffered and context.past else ids.shape[1]
    inputs["attention_mask"] = torch.ones(ids.shape[0], keys, dtype=torch.int64)
    return model(**inputs)


def _cache(model: PreTrainedModel, context: DecodeContext) -> RetainedCache:
    return RetainedCache(context, int(model.config.get_text_config(decoder=True).num_hidden_layers))


def _takes_positions(model: PreTrainedModel) -> bool:
    """Whether `forward` has the argument `position_ids`, or hands unknown ones on to a text model that has."""
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" in parameters:
        return True
    hands_on = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return hands_on and not any(isinstance(module, RowPositions) for module in model.modules())


def _first_position(model: PreTrainedModel) -> int:
    """The number of the first position: RoBERTa and its like begin behind the padding's."""
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            return int(module.padding_idx) + 1  # type: ignore[arg-type]
    return 0
