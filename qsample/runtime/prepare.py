"""A call as sequences: its prompts as token ids, its parameters as the arrays that the graph reads, a seed for each."""

from __future__ import annotations

import secrets
import sys
from collections import abc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from qsample.checks import plain, refuse
from qsample.contract.arrays import Array
from qsample.contract.interface import Interface
from qsample.contract.tensors import (
    ALLOWED_TOKENS,
    DRAFT_IDS,
    MASK_WORDS,
    PAD_STOP_ID,
    PROMPT_LOOKUP,
)
from qsample.errors import ArgumentError, shown
from qsample.package.manifest import TokenIds
from qsample.request.sampling_params import NUM_DRAWN_SEEDS, NUM_SEEDS, OFF_VALUES, SamplingParams
from qsample.runtime.adapters import Adapter
from qsample.runtime.call import Call, check_token_ids, parse_prompts, read_array
from qsample.runtime.callbacks import Guide
from qsample.runtime.image_prompts import ImageReader
from qsample.runtime.sequence import Delivery, Sequence, SequenceImages, SequenceRequest
from qsample.text.generated_text import PROMPT_CONTEXT_TOKENS, GeneratedText, check_stop_strings
from qsample.text.tokenizer import Tokenizer, choose_tokenizer


def make_sequences(
    call: Call,
    interface: Interface,
    token_ids: TokenIds,
    tokenizer: Tokenizer | None,
    capacity: Callable[[int], int],
    adapters: abc.Mapping[str, Adapter],
    reader: ImageReader,
    *,
    priority: int = 0,
) -> tuple[list[Sequence], Guide | None]:
    """`num_return_sequences` adjacent sequences for each prompt, and their guide, if allowed_tokens is a function.
    capacity: tokens of a slot, from the need of the longest sequence. Raises ValueError for a wrong argument."""
    if call.tokenizer is not None:
        tokenizer = choose_tokenizer(tokenizer, call.tokenizer, interface.vocab_size)
    bos = token_ids.bos if call.bos is None else call.bos
    prompts = parse_prompts(
        call, tokenizer, interface.vocab_size, bos, reader, holes=not interface.recurrent
    )
    params = _params_of_prompts(call.params, len(prompts))
    count = call.num_return_sequences
    for index, own in enumerate(params):
        if count > 1 and own.temperature == 0:
            raise ValueError(
                f"num_return_sequences is {count} and prompt {index} is continued greedily, which gives a single "
                "sequence; give do_sample=True or a temperature, or leave num_return_sequences out"
            )
    seeds = choose_seeds(call.seed, call.params, len(prompts), count)
    stops = check_stop_strings(call.stop_strings)
    if stops and tokenizer is None:
        raise ValueError(
            "stop_strings are found in the text, and the package has no tokenizer; give eos_token_id, or tokenizer"
        )
    masks = _masks(call.allowed_tokens, len(seeds), interface.sizes[MASK_WORDS])
    pairs = zip(params, prompts, strict=True)
    room = capacity(max(own.total_length(len(prompt.ids), prompt.padding) for own, prompt in pairs))
    distinct = {id(own): own for own in params}  # most prompts share their parameters
    fitted = {key: for_package(interface, own, tokenizer) for key, own in distinct.items()}
    chosen = {key: find_adapter(own.adapter, adapters, interface) for key, own in distinct.items()}
    guided = callable(call.allowed_tokens)
    output_names = _output_names(call.outputs, interface)
    expected = _expected_tokens(call.prediction, interface, tokenizer, len(prompts))
    sequences = []
    for row, seed in enumerate(seeds):
        prompt, own = prompts[row // count], fitted[id(params[row // count])]
        mask = None if masks is None else masks[row]
        try:
            parameters = parameter_row(
                interface,
                own,
                len(prompt.ids),
                room,
                token_ids.eos,
                padding=prompt.padding,
                allowed_tokens=mask,
            )
        except ValueError as error:
            if len(prompts) == 1:
                raise
            raise ValueError(f"prompt {row // count}: {error}") from None
        if guided and PROMPT_LOOKUP.name in parameters:
            parameters[PROMPT_LOOKUP.name] = np.array(
                0, np.int32
            )  # the function has to see each token before the next
        text = None
        if tokenizer is not None:
            text = GeneratedText(tokenizer, prompt.ids[-PROMPT_CONTEXT_TOKENS:].tolist(), stops)
        request = SequenceRequest(
            prompt=prompt.ids,
            parameters=parameters,
            seed=seed,
            padded_prompt=prompt.given,
            guided=guided or call.logits_processor is not None,
            priority=priority,
            max_time=call.max_time,
            expected_tokens=None if guided else expected,
            adapter=chosen[id(params[row // count])],
            output_names=output_names,
        )
        images = None if prompt.images is None else SequenceImages(prompt.images)
        sequences.append(Sequence(request, Delivery(text), images))
    if not guided:
        return sequences, None
    assert masks is not None
    return sequences, Guide(call.allowed_tokens, sequences, masks, token_ids.pad)


def _output_names(outputs: Any, interface: Interface) -> tuple[str, ...]:
    """The names of the optional outputs to return. Raises ValueError."""
    there = tuple(spec.name for spec in interface.token_outputs)
    if outputs is None:
        return there
    if (
        isinstance(outputs, str)
        or not isinstance(outputs, abc.Collection)
        or not set(outputs) <= set(there)
    ):
        refuse(
            "outputs",
            outputs,
            f"a list of the package's optional outputs, which are {', '.join(there) or 'none'}",
        )
    return tuple(name for name in there if name in outputs)


def _expected_tokens(
    prediction: Any, interface: Interface, tokenizer: Tokenizer | None, prompts: int
) -> Array | None:
    """[n] int64; None without a prediction. Raises ValueError."""
    if prediction is None:
        return None
    if not interface.features.num_speculative_tokens:
        raise ValueError(
            "prediction is given, and the package draws a token a step; compile the portable package with "
            'num_speculative_tokens=7 (--num-speculative-tokens) and kv_cache_dtype="int8", or leave it out'
        )
    if prompts != 1:
        raise ValueError(f"prediction is given with {prompts} prompts; it is for a single prompt")
    if isinstance(prediction, str):
        if tokenizer is None:
            raise ValueError(
                "prediction is a text, and the package has no tokenizer; give token ids, or tokenizer"
            )
        prediction = tokenizer.encode(prediction, add_special_tokens=False)
    ids = read_array("prediction", prediction)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(
            f"prediction is {ids.dtype} {ids.shape}; give a text, or a list of token ids"
        )
    ids = ids.astype(np.int64)
    check_token_ids("prediction", ids, interface.vocab_size)
    return ids


def _params_of_prompts(
    params: SamplingParams | abc.Sequence[SamplingParams], prompts: int
) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * prompts
    if len(params) != prompts:
        raise ValueError(
            f"{len(params)} SamplingParams were given for {prompts} prompts; give one, or {prompts}"
        )
    return list(params)


def find_adapter(
    name: str | None, adapters: abc.Mapping[str, Adapter], interface: Interface
) -> Adapter | None:
    """The loaded adapter with that name; None for no name. Raises ArgumentError for an unknown name."""
    found = adapters.get(name) if isinstance(name, str) else None
    if name is None or found is not None:
        return found
    if not interface.adapters:
        remedy = "the package was exported without adapters; export the model with max_loras (--max-loras)"
    else:
        loaded = ", ".join(sorted(adapters)[:20]) or "none"
        remedy = f"{loaded} is loaded; load it with load_adapter, or name another"
    raise ArgumentError(f"adapter is {shown(name)}, and {remedy}", "adapter")


def _masks(allowed_tokens: Any, rows: int, words: int) -> Array | None:
    """[B, W] int32; None if every token may be sampled."""
    if allowed_tokens is None:
        return None
    if callable(allowed_tokens):
        return np.full((rows, words), -1, dtype=np.int32)
    mask = read_array("allowed_tokens", allowed_tokens)
    if mask.dtype != np.int32 or mask.shape not in ((words,), (rows, words)):
        raise ValueError(
            f"allowed_tokens is {mask.dtype} {mask.shape}; give an int32 bitmask [{words}] or [{rows}, {words}], "
            "bit i of word w for token 32 w + i, or a function that writes the masks"
        )
    return np.array(np.broadcast_to(mask, (rows, words)), order="C")


def choose_seeds(
    seed: Any, params: SamplingParams | abc.Sequence[SamplingParams], prompts: int, count: int = 1
) -> list[int]:
    """A seed for each of `count` adjacent rows of each prompt, counted on from its first: from `seed` (of the first
    row, or a list for all rows), otherwise from `params`, otherwise fresh. Raises ValueError for wrong seeds."""
    rows, seed = prompts * count, plain(seed)
    if isinstance(seed, abc.Sequence) and not isinstance(seed, str | bytes):
        if len(seed) != rows:
            raise ValueError(
                f"{len(seed)} seeds were given for {rows} rows; give a single seed, or a seed for each row"
            )
        if None in seed:
            raise ValueError("a seed of the list is None; give an integer")
        return [SamplingParams(seed=value).seed for value in seed]  # type: ignore[misc]
    if seed is not None or isinstance(params, SamplingParams):
        first = SamplingParams(seed=params.seed if seed is None else seed).seed  # type: ignore[union-attr]
        if first is not None:
            return [(first + row) % NUM_SEEDS for row in range(rows)]
        return [_fresh_seed() for _ in range(rows)]
    firsts = [_fresh_seed() if own.seed is None else own.seed for own in params]
    return [(first + index) % NUM_SEEDS for first in firsts for index in range(count)]


def _fresh_seed() -> int:
    """A random seed; from torch in a process that uses it, for scripts that call torch.manual_seed or set_seed."""
    torch: Any = sys.modules.get("torch")
    return (
        secrets.randbelow(NUM_DRAWN_SEEDS)
        if torch is None
        else int(torch.randint(NUM_DRAWN_SEEDS, ()))
    )


# Inputs that are not the value of a single field of SamplingParams.
_MADE_APART: Final = frozenset(
    {
        "stop_ids",
        "logit_bias_ids",
        "logit_bias",
        "min_length",
        "max_length",
        ALLOWED_TOKENS.name,
        DRAFT_IDS.name,
    }
)


def parameter_row(
    interface: Interface,
    params: SamplingParams,
    prompt_length: int,
    capacity: int,
    default_stops: abc.Sequence[int] = (),
    *,
    padding: int = 0,
    allowed_tokens: Array | None = None,
) -> dict[str, Array]:
    """A row of every name of `Interface.parameters` but `seed` and `draft_ids`: scalars, [n], or [q, l]. Raises
    ValueError if the parameters do not fit the package or the prompt.
    params: from `for_package` if they may have texts or ask for filters. prompt_length, capacity, padding: tokens, as
    for `SamplingParams.lengths`. default_stops: stop tokens if eos_token_id is None. allowed_tokens: int32 bitmask [W];
    by default all tokens."""
    row: dict[str, Any] = {}
    for spec in interface.parameters:
        if spec.name not in _MADE_APART:
            value = params.value_of(spec.name)
            if len(spec.axes) == 1:
                row[spec.name] = np.dtype(spec.dtype).type(value)
            else:
                row[spec.name] = _ids(
                    spec.name, value or (), interface.vocab_size, sequences=len(spec.axes) == 3
                )
    row["min_length"], row["max_length"] = map(
        np.int32, params.lengths(prompt_length, capacity, padding)
    )
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
        raise ValueError(
            "allowed_tokens needs a package that was exported with allowed_tokens=True"
        )
    return row


def _ids(
    name: str, values: abc.Sequence[Any], vocab_size: int, *, sequences: bool = False
) -> Array:
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
                f"{'the filters ' + ', '.join(there) if there else 'no filters'}; export the model again with "
                f"filters={[*there, name]} (--filter), or give {field}={OFF_VALUES[field]} to go without",
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


def for_package(
    interface: Interface, params: SamplingParams, tokenizer: Tokenizer | None
) -> SamplingParams:
    """`params` with token ids for the texts of `bad_words` and `dry_sequence_breakers`. A word is forbidden at the
    beginning of a text, and after a space if that does not end with the same tokens. Raises ValueError for a feature
    that the package lacks, a text without a tokenizer, and a breaker that is not a single token."""
    check_features(interface, params)
    breakers, words = params.dry_sequence_breakers or (), params.bad_words or ()
    texts = [item for item in breakers if isinstance(item, str)]
    if not texts and not words:
        return params
    if tokenizer is None:
        name = "bad_words" if words else "dry_sequence_breakers"
        raise ValueError(
            f"{name} has texts, and the package has no tokenizer; give token ids, or tokenizer"
        )
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
    return replace(
        params, dry_sequence_breakers=singles, bad_words_ids=tuple(forbidden), bad_words=None
    )
