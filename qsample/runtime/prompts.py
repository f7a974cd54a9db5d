"""Prompts in every form that `generate` takes, as checked token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from qsample.manifest import TokenIds
from qsample.runtime.text.chat import ChatOptions
from qsample.runtime.text.tokenizer import Tokenizer
from qsample.tensors import Array

_ACCEPTED: Final = (
    "give a text, token ids, a list of either, a 2-D integer array (with attention_mask where it is padded), or chat "
    'messages [{"role": ..., "content": ...}]'
)


def parse_prompts(
    inputs: Any,
    attention_mask: Any,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    token_ids: TokenIds,
    chat: ChatOptions | None = None,
) -> list[Array]:
    """The prompts, one a row: [n] int64 with n >= 1, every id in [0, vocab_size).

    inputs: a text, a list of texts, token ids, a list of those, a 1-D or 2-D integer array, chat messages or a list of
    those, or a mapping with input_ids (and attention_mask), as a Hugging Face tokenizer returns. attention_mask: 0
    where a 2-D array is padding, before or after the tokens. An empty prompt becomes the beginning-of-text token. chat:
    what goes into the prompts beside chat messages; ValueError where a prompt is none.
    """
    if isinstance(inputs, Mapping) and "input_ids" in inputs:
        mask = inputs.get("attention_mask") if attention_mask is None else attention_mask
        return parse_prompts(inputs["input_ids"], mask, tokenizer, vocab_size, token_ids, chat)
    if hasattr(inputs, "__array__"):
        _refuse_chat_options(chat)
        rows = _unpad(_as_array(inputs), attention_mask)
    else:
        if attention_mask is not None:
            raise ValueError("attention_mask goes with a 2-D array of token ids; lists may simply differ in length")
        rows = _list_rows(inputs, tokenizer, chat)
    if not rows:
        raise ValueError("no prompt was given; give at least one")
    for index, row in enumerate(rows):
        if len(row) == 0:
            if token_ids.bos is None:
                raise ValueError(f"prompt {index} is empty and the model has no beginning-of-text token; give a token")
            rows[index] = np.array([token_ids.bos], dtype=np.int64)
        check_token_ids(f"prompt {index}", rows[index], vocab_size)
    return rows


def _list_rows(inputs: Any, tokenizer: Tokenizer | None, chat: ChatOptions | None) -> list[Array]:
    if isinstance(inputs, str) or _is_chat(inputs) or _is_ids(inputs):
        inputs = [inputs]
    if isinstance(inputs, Mapping) or not isinstance(inputs, Sequence):
        raise ValueError(f"inputs is a {type(inputs).__name__}; {_ACCEPTED}")
    return [_row(item, index, tokenizer, chat) for index, item in enumerate(inputs)]


def _row(item: Any, index: int, tokenizer: Tokenizer | None, chat: ChatOptions | None) -> Array:
    is_chat = _is_chat(item)
    if not is_chat:
        _refuse_chat_options(chat)
    if isinstance(item, str) or is_chat:
        if tokenizer is None:
            raise ValueError("the package has no tokenizer, so it takes no text; give token ids")
        ids = tokenizer.encode_chat(item, chat) if is_chat else tokenizer.encode(item)
        return np.array(ids, dtype=np.int64)
    if hasattr(item, "__array__"):
        array = _as_array(item)
        if array.ndim == 1:
            return array
    elif _is_ids(item) or (isinstance(item, Sequence) and len(item) == 0):
        return np.array([int(token) for token in item], dtype=np.int64)
    raise ValueError(f"prompt {index} is {item!r:.60}; {_ACCEPTED}")


def _refuse_chat_options(chat: ChatOptions | None) -> None:
    if chat is not None:
        raise ValueError(f"{', '.join(chat.given)} go with chat messages, and another kind of prompt was given")


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
        indices = np.flatnonzero(real)
        if len(indices) and indices[-1] - indices[0] + 1 != len(indices):
            raise ValueError(f"attention_mask of row {index} has a hole; padding must be before or after the tokens")
        rows.append(row[real])
    return rows


def check_token_ids(what: str, ids: Array, vocab_size: int) -> None:
    """Raise ValueError unless every id is in [0, vocab_size). what: has them, for the message."""
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise ValueError(f"{what} has token id {outside[0]}; the model's ids are 0 to {vocab_size - 1}")
