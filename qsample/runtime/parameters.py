"""Sampling parameters as the arrays that the graph reads, one row a prompt; and the seed of each row."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from qsample.contract import ALLOWED_TOKENS, MASK_WORDS, PAD_STOP_ID, SEED, VOCAB
from qsample.errors import shown
from qsample.interface import Interface
from qsample.runtime.prompts import check_token_ids, read_array
from qsample.sampling_params import OFF, SEEDS, SamplingParams
from qsample.tensors import Array
from qsample.text.tokenizer import Tokenizer

# Inputs that are more than a field of SamplingParams; `seed` is made elsewhere.
_MADE_APART: Final = frozenset(
    {"stop_ids", "logit_bias_ids", "logit_bias", "allowed_tokens", "min_length", "max_length", SEED.name}
)


def parameter_arrays(
    interface: Interface,
    params: Sequence[SamplingParams],
    prompt_lengths: Sequence[int],
    capacity: int,
    default_stops: Sequence[int],
    allowed_tokens: Any = None,
    padding: Sequence[int] | None = None,
    tokenizer: Tokenizer | None = None,
) -> dict[str, Array]:
    """Every name of `Interface.parameters` but `seed`, a row each, from one SamplingParams a row.

    default_stops: for rows whose eos_token_id is None. allowed_tokens: int32 bitmask [W] or [B, W]; None = all allowed,
    and so for a function, which writes the array later. padding: of each prompt, as for `SamplingParams.lengths`.
    tokenizer: for texts among the parameters.
    """
    rows, params = len(params), _with_token_ids(interface, params, tokenizer)
    arrays = {}
    for spec in interface.parameters:
        if spec.name not in _MADE_APART:
            values = [row.value_of(spec.name) for row in params]
            if len(spec.axes) == 1:
                arrays[spec.name] = np.array(values, dtype=spec.dtype)
            else:
                pad = _padded if len(spec.axes) == 2 else _padded_sequences
                arrays[spec.name] = pad(spec.name, [value or () for value in values], interface.vocab_size)
    limits = [
        row.lengths(length, capacity, pads)
        for row, length, pads in zip(params, prompt_lengths, padding or [0] * rows, strict=True)
    ]
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
        check_token_ids(f"{name} of row {row}", np.array(values, dtype=np.int64), vocab_size)
        array[row, : len(values)] = values
    return array


def _padded_sequences(name: str, sequences: Sequence[Sequence[Sequence[int]]], vocab_size: int) -> Array:
    """[B, most sequences, longest] int32, each padded with -1 at its beginning; at least one column."""
    longest = max((len(ids) for row in sequences for ids in row), default=1)
    array = np.full((len(sequences), max(1, *map(len, sequences)), longest), PAD_STOP_ID, dtype=np.int32)
    for row, values in enumerate(sequences):
        for place, ids in enumerate(values):
            check_token_ids(f"{name} of row {row}", np.array(ids, dtype=np.int64), vocab_size)
            array[row, place, -len(ids) :] = ids
    return array


def check_filters(interface: Interface, params: SamplingParams) -> None:
    """Raise ValueError if `params` ask for a filter that the package lacks."""
    there = interface.features.filters
    for name, field in params.filters.items():
        if name not in there:
            raise ValueError(
                f"{field} is {shown(getattr(params, field))}, and the package was exported with "
                f"{f'filters={[*there]}' if there else 'no filters'}; export the model again with "
                f"filters={[*there, name]} (--filter), or give {field}={OFF[field]} to go without"
            )


def _with_token_ids(
    interface: Interface, params: Sequence[SamplingParams], tokenizer: Tokenizer | None
) -> list[SamplingParams]:
    """`params`, checked, with token ids in place of texts."""
    made: dict[int, SamplingParams] = {}  # most rows share one object
    for row in params:
        if id(row) not in made:
            check_filters(interface, row)
            made[id(row)] = _tokenized(row, tokenizer)
    return [made[id(row)] for row in params]


def _tokenized(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """`params` with token ids for the texts of `bad_words` and `dry_sequence_breakers`.

    A word is forbidden as it begins a text, and as it follows a space if that does not end with the same tokens.
    Raises ValueError without a tokenizer, and for a breaker that is not one token.
    """
    breakers, words = params.dry_sequence_breakers or (), params.bad_words or ()
    texts = [item for item in breakers if isinstance(item, str)]
    if not texts and not words:
        return params
    if tokenizer is None:
        name = "bad_words" if words else "dry_sequence_breakers"
        raise ValueError(f"{name} has texts, and the package has no tokenizer; give token ids, or tokenizer")
    encode = partial(tokenizer.encode, add_special_tokens=False)
    ids = {text: encode(text) for text in texts}
    for text, tokens in ids.items():
        if len(tokens) != 1:
            raise ValueError(
                f"dry_sequence_breakers has {shown(text)}, which is {len(tokens)} tokens; give texts of one token "
                "each, or token ids"
            )
    forbidden = list(params.bad_words_ids or ())
    for word in words:
        alone, spaced = encode(word.lstrip()), encode(" " + word.lstrip())
        if not alone:
            raise ValueError(f"bad_words has {shown(word)}, which has no tokens; leave it out")
        forbidden.append(tuple(alone))
        if spaced[-len(alone) :] != alone:
            forbidden.append(tuple(spaced))
    singles = tuple(ids[item][0] if isinstance(item, str) else item for item in breakers)
    return replace(params, dry_sequence_breakers=singles, bad_words_ids=tuple(forbidden), bad_words=None)


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
    mask = read_array("allowed_tokens", allowed_tokens)
    if mask.dtype != np.int32 or mask.shape not in ((words,), (rows, words)):
        raise ValueError(
            f"allowed_tokens is {mask.dtype} {mask.shape}; give an int32 bitmask [{words}] or [{rows}, {words}], "
            "bit i of word w for token 32 w + i, or a function that writes one"
        )
    return np.array(np.broadcast_to(mask, (rows, words)), order="C")


def choose_seeds(seed: Any, given: Any, params: Sequence[SamplingParams], rows_of_each: int = 1) -> list[int]:
    """A seed a row: from `seed`, otherwise from the rows' parameters, otherwise fresh.

    rows_of_each: rows one after another that share a prompt, and its parameters: their seeds count on from those.
    """
    rows = len(params)
    seed = seed.tolist() if callable(getattr(seed, "tolist", None)) else seed  # an array, a tensor
    if isinstance(seed, Sequence) and not isinstance(seed, str | bytes):
        if len(seed) != rows:
            raise ValueError(f"{len(seed)} seeds were given for {rows} rows; give one, or one for each")
        return [_checked_seed(value) for value in seed]
    one_a_row = given is not None and not isinstance(given, SamplingParams)
    if seed is None and one_a_row:
        firsts = [secrets.randbelow(SEEDS) if row.seed is None else row.seed for row in params[::rows_of_each]]
        return [(first + index) % SEEDS for first in firsts for index in range(rows_of_each)]
    first = params[0].seed if seed is None else _checked_seed(seed)
    if first is None:
        return [secrets.randbelow(SEEDS) for _ in params]
    return [(first + row) % SEEDS for row in range(rows)]


def _checked_seed(seed: Any) -> int:
    params = SamplingParams(seed=seed)  # refuses what is no seed
    if params.seed is None:
        raise ValueError("a seed of the list is None; give an integer")
    return params.seed
