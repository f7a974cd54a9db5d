"""What a caller gives to `generate` enters; prompts and parameter arrays, checked, leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np

from qsample.contract import ALLOWED_TOKENS, MASK_WORDS, PAD_STOP_ID, VOCAB, Interface
from qsample.manifest import TokenIds
from qsample.runtime.output import Step
from qsample.runtime.text.tokenizer import Tokenizer
from qsample.sampling_params import SamplingParams
from qsample.tensors import Array


class AllowedTokensFn(Protocol):
    """Guided decoding: writes the mask of every next token into one array, which keeps its values between calls."""

    def __call__(self, step: Step | None, mask: Array) -> None:
        """step: what was sampled last, None before the first token. mask: [B, W] int32, bit i of word w for token
        32 w + i, all ones at first. Called while some row still runs; the masks of rows that ended are ignored."""


_ACCEPTED: Final = (
    "give a text, token ids, a list of either, a 2-D integer array (with attention_mask where it is padded), or chat "
    'messages [{"role": ..., "content": ...}]'
)
_FEATURE_INPUTS: Final = ("stop_ids", "logit_bias_ids", "logit_bias", "allowed_tokens", "min_length", "max_length")


def prompts(
    inputs: Any,
    attention_mask: Any,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    token_ids: TokenIds,
) -> list[Array]:
    """The prompts, one a row: [n] int64 with n >= 1, every id in [0, vocab_size).

    inputs: a text, a list of texts, token ids, a list of those, a 1-D or 2-D integer array, chat messages or a list of
    those, or a mapping with input_ids (and attention_mask), as a Hugging Face tokenizer returns. attention_mask: 0
    where a 2-D array is padding, before or after the tokens. An empty prompt becomes the beginning-of-text token.
    """
    if isinstance(inputs, Mapping) and "input_ids" in inputs:
        mask = inputs.get("attention_mask") if attention_mask is None else attention_mask
        return prompts(inputs["input_ids"], mask, tokenizer, vocab_size, token_ids)
    if hasattr(inputs, "__array__"):
        rows = _unpad(_as_array(inputs), attention_mask)
    else:
        if attention_mask is not None:
            raise ValueError("attention_mask goes with a 2-D array of token ids; lists may simply differ in length")
        rows = _list_rows(inputs, tokenizer)
    if not rows:
        raise ValueError("no prompt was given; give at least one")
    for index, row in enumerate(rows):
        if len(row) == 0:
            if token_ids.bos is None:
                raise ValueError(f"prompt {index} is empty and the model has no beginning-of-text token; give a token")
            rows[index] = np.array([token_ids.bos], dtype=np.int64)
        _check_range(f"prompt {index}", rows[index], vocab_size)
    return rows


def _list_rows(inputs: Any, tokenizer: Tokenizer | None) -> list[Array]:
    if isinstance(inputs, str) or _is_chat(inputs) or _is_ids(inputs):
        inputs = [inputs]
    if isinstance(inputs, Mapping) or not isinstance(inputs, Sequence):
        raise ValueError(f"inputs is a {type(inputs).__name__}; {_ACCEPTED}")
    return [_row(item, index, tokenizer) for index, item in enumerate(inputs)]


def _row(item: Any, index: int, tokenizer: Tokenizer | None) -> Array:
    if isinstance(item, str) or (_is_chat(item) and len(item) > 0):
        if tokenizer is None:
            raise ValueError("the package has no tokenizer, so it takes no text; give token ids")
        ids = tokenizer.encode(item) if isinstance(item, str) else tokenizer.encode_chat(item)
        return np.array(ids, dtype=np.int64)
    if hasattr(item, "__array__"):
        array = _as_array(item)
        if array.ndim == 1:
            return array
    elif _is_ids(item) or (isinstance(item, Sequence) and len(item) == 0):
        return np.array([int(token) for token in item], dtype=np.int64)
    raise ValueError(f"prompt {index} is {item!r:.60}; {_ACCEPTED}")


def _is_chat(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(item, Mapping) for item in value)


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(isinstance(item, int | np.integer) and not isinstance(item, bool) for item in value)
    )


def _as_array(value: Any) -> Array:
    """An integer array of `value`, a torch tensor on a device included."""
    array = np.asarray(value.cpu() if hasattr(value, "cpu") else value)
    if array.dtype.kind not in "iu":
        raise ValueError(f"token ids are {array.dtype}; give integers")
    return array.astype(np.int64)


def _unpad(ids: Array, attention_mask: Any) -> list[Array]:
    if ids.ndim not in (1, 2):
        raise ValueError(f"input ids have shape {ids.shape}; give [rows, tokens], or one row")
    ids = np.atleast_2d(ids)
    if attention_mask is None:
        return list(ids)
    mask = np.atleast_2d(np.asarray(attention_mask.cpu() if hasattr(attention_mask, "cpu") else attention_mask))
    if mask.shape != ids.shape or not np.isin(mask, (0, 1)).all():
        raise ValueError(
            f"attention_mask must be 0 or 1 with the shape of the input ids, {ids.shape}; it is {mask.shape}"
        )
    rows = []
    for index, (row, real) in enumerate(zip(ids, mask.astype(bool), strict=True)):
        places = np.flatnonzero(real)
        if len(places) and places[-1] - places[0] + 1 != len(places):
            raise ValueError(f"attention_mask of row {index} has a hole; padding must be before or after the tokens")
        rows.append(row[real])
    return rows


def _check_range(what: str, ids: Array, vocab_size: int) -> None:
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise ValueError(f"{what} has token id {outside[0]}; the model's ids are 0 to {vocab_size - 1}")


def parameter_arrays(
    interface: Interface,
    params: Sequence[SamplingParams],
    prompt_lengths: Sequence[int],
    capacity: int,
    default_stops: Sequence[int],
    allowed_tokens: Any = None,
) -> dict[str, Array]:
    """Every name of `Interface.parameters`, a row each, from one SamplingParams a row.

    default_stops: for rows whose eos_token_id is None. allowed_tokens: int32 bitmask [W] or [B, W]; None = all allowed,
    and so for a function, which writes the array later.
    """
    rows = len(params)
    arrays = {
        spec.name: np.array([getattr(row, spec.name) for row in params], dtype=spec.dtype)
        for spec in interface.parameters
        if spec.name not in _FEATURE_INPUTS
    }
    limits = [row.lengths(length, capacity) for row, length in zip(params, prompt_lengths, strict=True)]
    arrays["min_length"], arrays["max_length"] = np.array(limits, dtype=np.int32).T.copy()
    stops = [list(default_stops if row.eos_token_id is None else row.eos_token_id) for row in params]
    arrays["stop_ids"] = _padded("eos_token_id", stops, interface.vocab_size)
    arrays |= _bias_arrays(interface, params)
    if interface.features.allowed_tokens:
        arrays[ALLOWED_TOKENS.name] = _mask(allowed_tokens, rows, interface.sizes[MASK_WORDS])
    elif allowed_tokens is not None:
        raise ValueError("allowed_tokens needs a package that was exported with allowed_tokens=True")
    return arrays


def _padded(name: str, ids: Sequence[Sequence[int]], vocab_size: int) -> Array:
    """[B, widest] int32, padded with -1; at least one column."""
    array = np.full((len(ids), max(1, *map(len, ids))), PAD_STOP_ID, dtype=np.int32)
    for row, values in enumerate(ids):
        _check_range(f"{name} of row {row}", np.array(values, dtype=np.int64), vocab_size)
        array[row, : len(values)] = values
    return array


def _bias_arrays(interface: Interface, params: Sequence[SamplingParams]) -> dict[str, Array]:
    biases = [dict(row.logit_bias or {}) for row in params]
    if not interface.features.logit_bias:
        if any(biases):
            raise ValueError("logit_bias needs a package that was exported with logit_bias=True")
        return {}
    ids = _padded("logit_bias", [list(bias) for bias in biases], interface.sizes[VOCAB])
    values = np.zeros(ids.shape, dtype=np.float32)
    for row, bias in enumerate(biases):
        values[row, : len(bias)] = list(bias.values())
    return {"logit_bias_ids": ids, "logit_bias": values}


def _mask(allowed_tokens: Any, rows: int, words: int) -> Array:
    if allowed_tokens is None or callable(allowed_tokens):
        return np.full((rows, words), -1, dtype=np.int32)
    mask = np.asarray(allowed_tokens)
    if mask.dtype != np.int32 or mask.shape not in ((words,), (rows, words)):
        raise ValueError(
            f"allowed_tokens is {mask.dtype} {mask.shape}; give an int32 bitmask [{words}] or [{rows}, {words}], "
            "bit i of word w for token 32 w + i, or a function that writes one"
        )
    return np.array(np.broadcast_to(mask, (rows, words)), order="C")
