"""Prompts in every form that `generate` takes, as checked token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from qsample.contract.arrays import Array
from qsample.errors import shown
from qsample.request.call import Call
from qsample.request.checks import is_integer
from qsample.text.chat import ChatOptions
from qsample.text.tokenizer import Tokenizer

_ACCEPTED: Final = (
    "give a text, token ids, a list of either, a 2-D integer array (with attention_mask if it is padded), or chat "
    'messages [{"role": ..., "content": ...}]'
)
_INT64: Final = 2**63


class Prompt(NamedTuple):
    """ids: [n] int64, n >= 1, the tokens that the model reads. given: [m] int64, the same tokens and their padding."""

    ids: Array
    given: Array

    @property
    def padding(self) -> int:
        """The number of tokens of `given` that are not read."""
        return len(self.given) - len(self.ids)


def parse_prompts(
    call: Call, tokenizer: Tokenizer | None, vocab_size: int, bos: int | None, *, holes: bool = True
) -> list[Prompt]:
    """The prompts of a call, every id in [0, vocab_size).

    Args:
        call: its `inputs` are a text, token ids, a 1-D or 2-D integer array, chat messages, a list of any of these, or
            a mapping with input_ids (and attention_mask), as a Hugging Face tokenizer returns. Its `attention_mask` has
            the shape of the token ids.
        tokenizer: for texts and chat messages.
        vocab_size: of the model.
        bos: the token id that an empty prompt becomes; None = an empty prompt is not valid.
        holes: whether padding may be between tokens.

    Raises ValueError for an input of another kind.
    """
    inputs, attention_mask = call.inputs, call.attention_mask
    if isinstance(inputs, Mapping) and "input_ids" in inputs:
        attention_mask = inputs.get("attention_mask") if attention_mask is None else attention_mask
        inputs = inputs["input_ids"]
    items = _items(inputs)
    if not len(items):
        raise ValueError("no prompt was given; give at least a single prompt")
    rows = [_row(index, item, tokenizer, call.chat) for index, item in enumerate(items)]
    texts = [isinstance(item, str) or is_chat(item) for item in items]
    if attention_mask is not None:
        masks = _masks(attention_mask, rows, texts)
    else:
        masks = [
            np.ones(len(row), dtype=bool) if text or call.pad is None else row != call.pad
            for row, text in zip(rows, texts, strict=True)
        ]
    prompts = []
    for index, (given, mask) in enumerate(zip(rows, masks, strict=True)):
        ids = given[mask]
        if not holes and len(ids) and not mask[np.argmax(mask) :][: len(ids)].all():
            raise ValueError(
                f"prompt {index} has padding between its tokens, over which a recurrent model cannot go; put it before "
                "or after them, or give an attention_mask of ones to have every token read"
            )
        if len(ids) == 0:
            if bos is None:
                raise ValueError(f"prompt {index} is empty and the model has no beginning-of-text token; give a token")
            ids = np.array([bos], dtype=np.int64)
            given = given if len(given) else ids
        check_token_ids(f"prompt {index}", given, vocab_size)
        prompts.append(Prompt(ids, given))
    return prompts


def _items(inputs: Any) -> Sequence[Any]:
    """Each prompt as it was given."""
    if hasattr(inputs, "__array__"):
        ids = _as_array(inputs)
        if ids.ndim not in (1, 2):
            raise ValueError(f"input ids have shape {ids.shape}; give [rows, tokens], or a single row [tokens]")
        return list(np.atleast_2d(ids))
    if isinstance(inputs, str) or is_chat(inputs) or _is_ids(inputs):
        return [inputs]
    if isinstance(inputs, Mapping | bytes) or not isinstance(inputs, Sequence):
        raise ValueError(f"inputs is a {type(inputs).__name__}; {_ACCEPTED}")
    return inputs


def _row(index: int, item: Any, tokenizer: Tokenizer | None, chat: ChatOptions | None) -> Array:
    """The token ids of a prompt, [n] int64."""
    conversation = is_chat(item)
    if chat is not None and not conversation:
        raise ValueError(f"{', '.join(chat.given)} go with chat messages, and another kind of prompt was given")
    if isinstance(item, str) or conversation:
        if tokenizer is None:
            raise ValueError("the package has no tokenizer, so it takes no text; give token ids")
        return np.array(tokenizer.encode_chat(item, chat) if conversation else tokenizer.encode(item), dtype=np.int64)
    if hasattr(item, "__array__"):
        array = _as_array(item)
        if array.ndim == 1:
            return array
    elif _is_ids(item) or (isinstance(item, Sequence) and len(item) == 0):
        try:
            return np.array([*map(int, item)], dtype=np.int64)
        except OverflowError:
            largest = shown(max(item, key=abs))
            raise ValueError(f"prompt {index} has token id {largest}; no model has so many tokens") from None
    raise ValueError(f"prompt {index} is {shown(item)}; {_ACCEPTED}")


def is_chat(value: Any) -> bool:
    """Whether `value` is a conversation: a list of messages."""
    return isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(item, Mapping) for item in value)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(map(is_integer, value))


def read_array(what: str, value: Any) -> Array:
    """`value` as an array, even a torch tensor on a device. Raises ValueError. what: its name in the message."""
    try:
        return np.asarray(value.cpu() if hasattr(value, "cpu") else value)
    except Exception as error:  # of the other library, if a tensor has no data or another layout
        raise ValueError(f"{what} is {shown(value)}, which is not a plain array: {error}") from error


def _as_array(value: Any) -> Array:
    """An integer array of `value`, which may be a torch tensor on a device."""
    array = read_array("token ids", value)
    if array.dtype.kind not in "iu":
        raise ValueError(f"token ids are {array.dtype}; give integers")
    if array.dtype.kind == "u" and array.size and array.max() >= _INT64:
        raise ValueError(f"a prompt has token id {array.max()}; no model has so many tokens")
    return array.astype(np.int64)


def _masks(attention_mask: Any, rows: Sequence[Array], texts: Sequence[bool]) -> list[Array]:
    """The tokens of each row that are read, bool."""
    if any(texts):
        raise ValueError(f"attention_mask goes with token ids, and prompt {texts.index(True)} is text; leave it out")
    is_array = hasattr(attention_mask, "__array__") or not isinstance(attention_mask, Sequence)
    if not is_array and any(hasattr(row, "__len__") for row in attention_mask):
        masks = [read_array("attention_mask", row) for row in attention_mask]
    else:
        masks = list(np.atleast_2d(read_array("attention_mask", attention_mask)))
    wanted, got = [(len(row),) for row in rows], [mask.shape for mask in masks]
    if got != wanted or not all(np.isin(mask, (0, 1)).all() for mask in masks):
        raise ValueError(
            f"attention_mask must be 0 or 1 with the shape of the input ids, {_shape(wanted)}; it is {_shape(got)}"
        )
    return [mask.astype(bool) for mask in masks]


def _shape(rows: Sequence[tuple[int, ...]]) -> str:
    same = len(set(rows)) == 1
    return str((len(rows), *rows[0])) if same else f"rows of {', '.join('x'.join(map(str, row)) for row in rows)}"


def check_token_ids(what: str, ids: Array, vocab_size: int) -> None:
    """Raise ValueError unless every id is in [0, vocab_size). what: their owner, for the message."""
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise ValueError(f"{what} has token id {outside[0]}; the model's ids are 0 to {vocab_size - 1}")
