"""Sampling parameters of a row as the arrays that the graph reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from qsample.contract.arrays import Array
from qsample.contract.interface import Interface
from qsample.contract.tensors import ALLOWED_TOKENS, DRAFT_IDS, MASK_WORDS, PAD_STOP_ID, SEED
from qsample.errors import ArgumentError, shown
from qsample.request.sampling_params import OFF, SamplingParams
from qsample.runtime.prompts import check_token_ids
from qsample.text.tokenizer import Tokenizer

# Inputs that are not the value of a single field of SamplingParams.
_MADE_APART: Final = frozenset(
    {"stop_ids", "logit_bias_ids", "logit_bias", "min_length", "max_length", ALLOWED_TOKENS.name, DRAFT_IDS.name}
    | {SEED.name}
)


def parameter_row(
    interface: Interface,
    params: SamplingParams,
    prompt_length: int,
    capacity: int,
    default_stops: Sequence[int] = (),
    *,
    padding: int = 0,
    allowed_tokens: Array | None = None,
) -> dict[str, Array]:
    """A row of every name of `Interface.parameters` but `seed` and `draft_ids`: scalars, [n], or [q, l].

    Args:
        interface: of the package.
        params: of the row, from `for_package` if they may have texts or ask for filters.
        prompt_length, capacity, padding: tokens, as for `SamplingParams.lengths`.
        default_stops: stop tokens if eos_token_id is None.
        allowed_tokens: int32 bitmask [W]; None = all tokens.

    Raises ValueError if the parameters do not fit the package or the prompt.
    """
    row: dict[str, Any] = {}
    for spec in interface.parameters:
        if spec.name not in _MADE_APART:
            value = params.value_of(spec.name)
            if len(spec.axes) == 1:
                row[spec.name] = np.dtype(spec.dtype).type(value)
            else:
                row[spec.name] = _ids(spec.name, value or (), interface.vocab_size, sequences=len(spec.axes) == 3)
    row["min_length"], row["max_length"] = map(np.int32, params.lengths(prompt_length, capacity, padding))
    stops = default_stops if params.eos_token_id is None else params.eos_token_id
    row["stop_ids"] = _ids("eos_token_id", stops, interface.vocab_size)
    if interface.features.logit_bias:
        bias = params.logit_bias or {}
        row["logit_bias_ids"] = _ids("logit_bias", list(bias), interface.vocab_size)
        row["logit_bias"] = np.array(list(bias.values()) or [0], dtype=np.float32)
    elif params.logit_bias:
        raise ValueError("logit_bias needs a package that was exported with logit_bias=True")
    if interface.features.allowed_tokens:
        everything = np.full(interface.sizes[MASK_WORDS], -1, dtype=np.int32)
        row[ALLOWED_TOKENS.name] = everything if allowed_tokens is None else allowed_tokens
    elif allowed_tokens is not None:
        raise ValueError("allowed_tokens needs a package that was exported with allowed_tokens=True")
    return row


def _ids(name: str, values: Sequence[Any], vocab_size: int, *, sequences: bool = False) -> Array:
    """Token ids [n], or sequences of them [q, l], each with -1 before its beginning; at least one column, int32."""
    rows = values if sequences else [(value,) for value in values]
    array = np.full((max(1, len(rows)), max([1, *map(len, rows)])), PAD_STOP_ID, dtype=np.int32)
    for place, ids in enumerate(rows):
        check_token_ids(name, np.array(ids, dtype=np.int64), vocab_size)
        array[place, -len(ids) :] = ids
    return array if sequences else array[:, 0]


def check_features(interface: Interface, params: SamplingParams) -> None:
    """Raise ValueError if `params` ask for a filter that the package lacks, or for more guesses than it checks."""
    there = interface.features.filters
    for name, field in params.filters.items():
        if name not in there:
            raise ArgumentError(
                f"{field} is {shown(getattr(params, field))}, and the package was exported with "
                f"{f'filters={[*there]}' if there else 'no filters'}; export the model again with "
                f"filters={[*there, name]} (--filter), or give {field}={OFF[field]} to go without",
                field,
            )
    guesses, most = params.prompt_lookup_num_tokens, interface.features.num_speculative_tokens
    if guesses > most:
        checks = f"checks {most} guesses a step at most" if most else "draws a token a step"
        raise ArgumentError(
            f"prompt_lookup_num_tokens is {guesses}, and the package {checks}; compile the portable package with "
            f'num_speculative_tokens={guesses} (--num-speculative-tokens) and kv_cache_dtype="int8", or give '
            f"prompt_lookup_num_tokens={most}",
            "prompt_lookup_num_tokens",
        )


def for_package(interface: Interface, params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """`params` with token ids for the texts of `bad_words` and `dry_sequence_breakers`.

    A word is forbidden at the beginning of a text, and after a space if that does not end with the same tokens. Raises
    ValueError for what the package lacks, a text without a tokenizer, and a breaker that is not a single token.
    """
    check_features(interface, params)
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
                f"dry_sequence_breakers has {shown(text)}, which is {len(tokens)} tokens; give texts of a single token "
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
