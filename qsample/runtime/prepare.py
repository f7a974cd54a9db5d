"""A call → sequences: the prompts as token ids, the parameters as the arrays that the graph reads, a
seed for each row."""

from __future__ import annotations

import secrets
import sys
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np

from qsample.checks import plain, refuse
from qsample.contract.arrays import Array
from qsample.contract.interface import Interface
from qsample.contract.tensors import (
    ALLOWED_TOKENS,
    DRAFT_IDS,
    GRAMMAR_DEADLINE,
    MASK_WORDS,
    PAD_STOP_ID,
    PROMPT_LOOKUP,
    TensorSpec,
)
from qsample.errors import ArgumentError, shown
from qsample.package.manifest import TokenIds
from qsample.request.grammar import CompiledGrammar, GrammarGuide
from qsample.request.repetition import RepetitionDetector
from qsample.request.sampling_params import (
    INT32_MAX,
    NUM_DRAWN_SEEDS,
    NUM_SEEDS,
    OFF_VALUES,
    SamplingParams,
)
from qsample.request.structured.tables import MAX_TABLE_BYTES, TokenGrammar
from qsample.request.text.generated_text import (
    PROMPT_CONTEXT_TOKENS,
    GeneratedText,
    check_stop_strings,
)
from qsample.request.text.tokenizer import Tokenizer, choose_tokenizer
from qsample.runtime.adapters import Adapter
from qsample.runtime.call import Call, Prompt, check_token_ids, parse_prompts, read_array
from qsample.runtime.callbacks import Guide
from qsample.runtime.image_prompts import ImageReader
from qsample.runtime.sequence import (
    AnyGrammar,
    Delivery,
    ScoredTokens,
    Sequence,
    SequenceImages,
    SequenceRequest,
)


@dataclass(frozen=True, slots=True)
class _FittedParams:
    """Sampling parameters that fit the package, and the adapter that they name."""

    params: SamplingParams
    adapter: Adapter | None


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
    """Make the sequences of a call: `num_return_sequences` adjacent sequences for each prompt.

    Args:
        call: the call.
        interface: the interface of the package.
        token_ids: the special tokens of the package.
        tokenizer: the tokenizer of the package; None without one.
        capacity: returns the number of tokens of a slot, given the need of the longest sequence.
        adapters: the loaded adapters by name.
        reader: reads the images of the prompts.
        priority: the rank of the sequences among those that wait, see `SequenceRequest`.

    Returns:
        The sequences, and their guide if allowed_tokens is a function.

    Raises:
        ValueError: If an argument of the call is wrong.
    """
    call = _with_allowed_ids(call, interface, token_ids)
    if call.tokenizer is not None:
        tokenizer = choose_tokenizer(tokenizer, call.tokenizer, interface.vocab_size)
    bos = token_ids.bos if call.bos is None else call.bos
    prompts = parse_prompts(
        call, tokenizer, interface.vocab_size, bos, reader, holes=not interface.recurrent
    )
    prompts = _scored_prompts(call, interface, prompts)
    call = _scoring_call(call)
    params = _params_of_prompts(call.params, len(prompts))
    rows_per_prompt = call.num_return_sequences
    _check_draws(params, rows_per_prompt)
    seeds = choose_seeds(call.seed, call.params, len(prompts), rows_per_prompt)
    stop_strings = check_stop_strings(call.stop_strings)
    if stop_strings and tokenizer is None:
        raise ValueError(
            "stop_strings are found in the text, and the package has no tokenizer; give "
            "eos_token_id, or tokenizer"
        )
    grammars = _grammars(call.grammar, len(prompts), interface)
    _check_budget(call.thinking_token_budget, grammars)
    has_masks_of_grammars = _has_masks(grammars, call.allowed_tokens)
    has_mask_function = has_masks_of_grammars or callable(call.allowed_tokens)
    masks = _masks(
        call.allowed_tokens, len(seeds), interface.sizes[MASK_WORDS], is_written=has_mask_function
    )
    needs = [
        prompt_params.total_length(len(prompt.ids), prompt.padding)
        for prompt_params, prompt in zip(params, prompts, strict=True)
    ]
    slot_capacity = capacity(max(needs))
    fitted = _fit_params(params, interface, tokenizer, adapters)
    output_names = _output_names(call.outputs, interface)
    expected_tokens = _expected_tokens(call.prediction, interface, tokenizer, len(prompts))
    sequences: list[Sequence] = []
    for row, seed in enumerate(seeds):
        index = row // rows_per_prompt
        prompt = prompts[index]
        stops = call.chat_stops if prompt.is_chat else call.stops
        try:
            parameters = parameter_row(
                interface,
                fitted[index].params,
                len(prompt.ids),
                slot_capacity,
                token_ids.eos if stops is None else stops,
                padding=prompt.padding,
                allowed_tokens=None if masks is None else masks[row],
                thinking_token_budget=call.thinking_token_budget,
            )
            grammar = grammars[index]
            if isinstance(grammar, TokenGrammar):
                grammar = _fitted_grammar(grammar, parameters, len(prompt.ids))
        except ValueError as error:
            if len(prompts) == 1:
                raise
            raise ValueError(f"prompt {index}: {error}") from None
        if has_mask_function and PROMPT_LOOKUP.name in parameters:
            # The function has to see each token before the next one is sampled.
            parameters[PROMPT_LOOKUP.name] = np.array(0, np.int32)
        request = SequenceRequest(
            prompt=prompt.ids,
            parameters=parameters,
            seed=seed,
            padded_prompt=prompt.given,
            guided=has_mask_function or call.logits_processor is not None,
            priority=priority,
            max_time=call.max_time,
            expected_tokens=None if has_mask_function else expected_tokens,
            adapter=fitted[index].adapter,
            output_names=output_names,
            grammar=grammar,
            scored=prompt.scored,
        )
        images = None if prompt.images is None else SequenceImages(prompt.images)
        delivery = _delivery(call, prompt, tokenizer, stop_strings)
        sequences.append(Sequence(request, delivery, images))
    if not has_mask_function:
        return sequences, None
    assert masks is not None
    function = _guide_of(sequences) if has_masks_of_grammars else call.allowed_tokens
    return sequences, Guide(function, sequences, masks, token_ids.pad)


def _delivery(
    call: Call, prompt: Prompt, tokenizer: Tokenizer | None, stop_strings: tuple[str, ...]
) -> Delivery:
    """What a sequence's tokens become for its reader."""
    text = None
    if tokenizer is not None:
        context = prompt.ids[-PROMPT_CONTEXT_TOKENS:].tolist()
        text = GeneratedText(
            tokenizer,
            context,
            stop_strings,
            skip_special_tokens=call.skip_special_tokens,
            include_stop_str_in_output=call.include_stop_str_in_output,
        )
    repetitions = None
    if call.repetition_detection is not None:
        repetitions = RepetitionDetector(call.repetition_detection)
    return Delivery(text, repetitions)


def _guide_of(sequences: list[Sequence]) -> GrammarGuide:
    """The function that writes the masks of sequences whose grammars have no tables."""
    requests = [sequence.request for sequence in sequences]
    grammars = [
        request.grammar if isinstance(request.grammar, CompiledGrammar) else None
        for request in requests
    ]
    return GrammarGuide(grammars, [request.stop_ids for request in requests])


def _scored_prompts(call: Call, interface: Interface, prompts: list[Prompt]) -> list[Prompt]:
    """The prompts of a call, with the tokens that it scores. Raises ArgumentError if they cannot be
    scored."""
    name = call.scoring_argument
    if name is None:
        return prompts
    if not interface.features.prompt_logprobs:
        raise ArgumentError(
            f"{name} was given, and the package does not score prompts; export the model with "
            "prompt_logprobs=True (--prompt-logprobs, or --for-serving) and compile it for cpu without "
            "num_speculative_tokens and num_devices, or leave it out",
            name,
        )
    if any(prompt.images is not None for prompt in prompts):
        raise ArgumentError(f"{name} was given, and the prompt has images; leave out either", name)
    if call.logprob_token_ids is None:
        return [_scored_within(prompt) for prompt in prompts]
    if call.prompt_logprobs:
        raise ArgumentError(f"prompt_logprobs and {name} were given; give either", name)
    ids = np.array(call.logprob_token_ids, np.int64)
    check_token_ids(name, ids, interface.vocab_size)
    return [_scored_after(prompt, ids) for prompt in prompts]


def _scored_within(prompt: Prompt) -> Prompt:
    """A prompt whose tokens are scored, from the second on; so the last need not be read. Raises
    ArgumentError if there is no second."""
    if len(prompt.ids) < 2:
        name = "prompt_logprobs"
        raise ArgumentError(
            f"{name} is True, and the prompt is a single token, which nothing precedes; give a "
            "prompt of two tokens or more, or leave it out",
            name,
        )
    read = prompt.ids[:-1]
    places = np.arange(len(read))
    return Prompt(read, read, scored=ScoredTokens(places, prompt.ids[1:], num_unread=1))


def _scored_after(prompt: Prompt, ids: Array) -> Prompt:
    """A prompt after whose last token others are scored. ids: [m] int64, these tokens."""
    places = np.full(len(ids), len(prompt.ids) - 1)
    return prompt._replace(scored=ScoredTokens(places, ids))


def _scoring_call(call: Call) -> Call:
    """A call; if it scores its prompts, it only reads them: its rows sample a token that nobody
    gets."""
    if call.scoring_argument is None:
        return call
    is_shared = isinstance(call.params, SamplingParams)
    rows: Any = [call.params] if is_shared else call.params
    params = [
        SamplingParams(temperature=0.0, max_new_tokens=1, eos_token_id=(), adapter=row.adapter)
        for row in rows
    ]
    return replace(
        call,
        params=params[0] if is_shared else params,
        allowed_tokens=None,
        grammar=None,
        thinking_token_budget=None,
        prediction=None,
        outputs=(),
    )


def _with_allowed_ids(call: Call, interface: Interface, token_ids: TokenIds) -> Call:
    """A call with a mask or a grammar in place of its `allowed_token_ids`, which do not change in
    the course of an answer. Raises ArgumentError."""
    if call.allowed_token_ids is None:
        return call
    name = "allowed_token_ids"
    for other in (ALLOWED_TOKENS.name, "grammar"):
        if getattr(call, other) is not None:
            raise ArgumentError(
                f"{name} and {other} were given, which both say which tokens may come; give either",
                name,
            )
    allowed = set(call.allowed_token_ids)
    largest = max(allowed)
    if largest >= interface.vocab_size:
        refuse(name, largest, f"token ids of the model, 0 to {interface.vocab_size - 1}")
    if interface.features.allowed_tokens:
        mask = _mask_of(allowed, interface.sizes[MASK_WORDS])
        return replace(call, allowed_tokens=mask)
    if not interface.features.grammars:
        raise ArgumentError(
            f"{name} needs a package that was exported with allowed_tokens=True (--allowed-tokens) "
            "or grammars=True (--grammars); export the model again",
            name,
        )

    grammar = TokenGrammar.of_tokens(allowed, interface.vocab_size)
    return replace(_with_stops_among(allowed, call, token_ids.eos), grammar=grammar)


def _with_stops_among(
    allowed: abc.Collection[int], call: Call, default_stops: abc.Sequence[int]
) -> Call:
    """A call without the stop tokens that are not allowed: a grammar says when stop tokens may come,
    but not which of them. default_stops: the stop tokens of the package."""

    def chosen(stops: abc.Iterable[int] | None) -> tuple[int, ...]:
        listed = default_stops if stops is None else stops
        return tuple(stop for stop in listed if stop in allowed)

    def with_chosen(params: SamplingParams) -> SamplingParams:
        stops = params.eos_token_id
        return params if stops is None else replace(params, eos_token_id=chosen(stops))

    if isinstance(call.params, SamplingParams):
        params: Any = with_chosen(call.params)
    else:
        params = [with_chosen(one) for one in call.params]
    return replace(
        call, params=params, stops=chosen(call.stops), chat_stops=chosen(call.chat_stops)
    )


def _mask_of(allowed: abc.Collection[int], words: int) -> Array:
    """The bitmask of some tokens, [words] int32."""
    bits = np.zeros(words * 32, bool)
    bits[list(allowed)] = True
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def _check_draws(params: list[SamplingParams], rows_per_prompt: int) -> None:
    """Raise ValueError if several rows of a prompt would be the same."""
    for index, prompt_params in enumerate(params):
        if rows_per_prompt > 1 and prompt_params.temperature == 0:
            raise ValueError(
                f"num_return_sequences is {rows_per_prompt} and prompt {index} is continued greedily, "
                "which gives a single sequence; give do_sample=True or a temperature, or leave "
                "num_return_sequences out"
            )


def _fit_params(
    params: list[SamplingParams],
    interface: Interface,
    tokenizer: Tokenizer | None,
    adapters: abc.Mapping[str, Adapter],
) -> list[_FittedParams]:
    """The parameters of each prompt, as `for_package` and `find_adapter` make them. Raises
    ValueError."""
    # Most prompts share their parameters.
    distinct = {id(prompt_params): prompt_params for prompt_params in params}
    fitted = {key: for_package(interface, one, tokenizer) for key, one in distinct.items()}
    chosen = {key: find_adapter(one.adapter, adapters, interface) for key, one in distinct.items()}
    return [
        _FittedParams(fitted[id(prompt_params)], chosen[id(prompt_params)])
        for prompt_params in params
    ]


def _output_names(outputs: Any, interface: Interface) -> tuple[str, ...]:
    """The names of the optional outputs to return. Raises ValueError."""
    available = tuple(spec.name for spec in interface.token_outputs)
    if outputs is None:
        return available
    is_collection = isinstance(outputs, abc.Collection) and not isinstance(outputs, str)
    if not is_collection or not set(outputs) <= set(available):
        refuse(
            "outputs",
            outputs,
            f"a list of the package's optional outputs, which are {', '.join(available) or 'none'}",
        )
    return tuple(name for name in available if name in outputs)


def _expected_tokens(
    prediction: Any, interface: Interface, tokenizer: Tokenizer | None, prompts: int
) -> Array | None:
    """The expected tokens of the only prompt.

    Args:
        prediction: a text, or token ids; None without a prediction.
        interface: the interface of the package.
        tokenizer: encodes a text; None without one.
        prompts: the number of prompts of the call.

    Returns:
        [n] int64; None without a prediction.

    Raises:
        ValueError: If the prediction is not valid, or the call or the package takes none.
    """
    if prediction is None:
        return None
    if interface.features.num_speculative_tokens == 0:
        raise ValueError(
            "prediction is given, and the package draws a token a step; compile the portable "
            "package with num_speculative_tokens=7 (--num-speculative-tokens) and "
            'kv_cache_dtype="int8", or leave it out'
        )
    if prompts != 1:
        raise ValueError(f"prediction is given with {prompts} prompts; it is for a single prompt")
    if isinstance(prediction, str):
        if tokenizer is None:
            raise ValueError(
                "prediction is a text, and the package has no tokenizer; give token ids, or "
                "tokenizer"
            )
        prediction = tokenizer.encode(prediction, add_special_tokens=False)
    ids = read_array("prediction", prediction)
    if ids.ndim != 1 or (ids.size > 0 and ids.dtype.kind not in "iu"):
        raise ValueError(
            f"prediction is {ids.dtype} {ids.shape}; give a text, or a list of token ids"
        )
    ids = ids.astype(np.int64)
    check_token_ids("prediction", ids, interface.vocab_size)
    return ids


def _params_of_prompts(
    params: SamplingParams | abc.Sequence[SamplingParams], prompts: int
) -> list[SamplingParams]:
    """The parameters of each prompt. Raises ValueError for a list of another length."""
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
    """The loaded adapter with that name; None for no name. Raises ArgumentError for an unknown
    name."""
    if name is None:
        return None
    found = adapters.get(name) if isinstance(name, str) else None
    if found is not None:
        return found
    if not interface.adapters:
        remedy = (
            "the package was exported without adapters; export the model with max_loras "
            "(--max-loras)"
        )
    else:
        loaded = ", ".join(sorted(adapters)[:20]) or "none"
        remedy = f"{loaded} is loaded; load it with load_adapter, or name another"
    raise ArgumentError(f"adapter is {shown(name)}, and {remedy}", "adapter")


def _masks(allowed_tokens: Any, rows: int, words: int, *, is_written: bool) -> Array | None:
    """The masks of the rows.

    Args:
        allowed_tokens: a bitmask, or None.
        rows: B, the number of rows.
        words: W, the number of words of a mask.
        is_written: whether a function writes the masks.

    Returns:
        [B, W] int32, all bits set for a function; None if every token may be sampled.

    Raises:
        ValueError: If the mask has another dtype or shape.
    """
    if is_written:
        return np.full((rows, words), -1, dtype=np.int32)
    if allowed_tokens is None:
        return None
    mask = read_array("allowed_tokens", allowed_tokens)
    if mask.dtype != np.int32 or mask.shape not in ((words,), (rows, words)):
        raise ValueError(
            f"allowed_tokens is {mask.dtype} {mask.shape}; give an int32 bitmask [{words}] or "
            f"[{rows}, {words}], bit i of word w for token 32 w + i, or a function that writes the "
            "masks"
        )
    return np.array(np.broadcast_to(mask, (rows, words)), order="C")


def choose_seeds(
    seed: Any, params: SamplingParams | abc.Sequence[SamplingParams], prompts: int, count: int = 1
) -> list[int]:
    """Choose the seeds of a call.

    Args:
        seed: the seed of the first row, the next rows taking the numbers after it; or a list with
            the seed of each row; or None.
        params: the parameters of all prompts, or of each. Without `seed`, their seed is the seed of
            the first row, or of the first row of each prompt; without any, seeds are fresh.
        prompts: the number of prompts.
        count: the number of adjacent rows of each prompt.

    Returns:
        The seed of each row.

    Raises:
        ValueError: If a seed is wrong, or a list has another length.
    """
    seed = plain(seed)
    rows = prompts * count
    if isinstance(seed, abc.Sequence) and not isinstance(seed, str | bytes):
        return _checked_seeds(seed, rows)
    if seed is None and not isinstance(params, SamplingParams):
        seeds: list[int] = []
        for prompt_params in params:
            first = _fresh_seed() if prompt_params.seed is None else prompt_params.seed
            seeds += _seeds_from(first, count)
        return seeds
    if seed is None:
        assert isinstance(params, SamplingParams)
        seed = params.seed
    if seed is None:
        return [_fresh_seed() for _ in range(rows)]
    return _seeds_from(_checked_seed(seed), rows)


def _checked_seeds(seeds: abc.Sequence[Any], rows: int) -> list[int]:
    """The seeds of a list. Raises ValueError."""
    if len(seeds) != rows:
        raise ValueError(
            f"{len(seeds)} seeds were given for {rows} rows; give a single seed, or a seed for each "
            "row"
        )
    if None in seeds:
        raise ValueError("a seed of the list is None; give an integer")
    return [_checked_seed(seed) for seed in seeds]


def _checked_seed(seed: Any) -> int:
    """A seed as SamplingParams checks it. Raises ValueError."""
    checked = SamplingParams(seed=seed).seed
    assert checked is not None
    return checked


def _seeds_from(first: int, count: int) -> list[int]:
    """`count` seeds from `first` on; after the largest seed comes 0."""
    return [(first + row) % NUM_SEEDS for row in range(count)]


def _fresh_seed() -> int:
    """A random seed. It comes from torch in a process that uses torch, so that torch.manual_seed and
    transformers' set_seed make calls repeatable."""
    torch: Any = sys.modules.get("torch")
    return (
        secrets.randbelow(NUM_DRAWN_SEEDS)
        if torch is None
        else int(torch.randint(NUM_DRAWN_SEEDS, ()))
    )


# The inputs of the graph that are not the value of a single field of SamplingParams.
_COMPUTED_INPUTS: Final = frozenset(
    {
        "stop_ids",
        "logit_bias_ids",
        "logit_bias",
        "min_length",
        "max_length",
        ALLOWED_TOKENS.name,
        DRAFT_IDS.name,
        GRAMMAR_DEADLINE.name,
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
    thinking_token_budget: int | None = None,
) -> dict[str, Array]:
    """A row of every name of `Interface.parameters` except `draft_ids`.

    Args:
        interface: the interface of the package.
        params: the parameters; from `for_package` if they may have texts or ask for filters.
        prompt_length: the number of tokens of the prompt, without padding.
        capacity: the number of tokens of a row.
        default_stops: the stop tokens if eos_token_id is None.
        padding: the number of tokens of padding, as for `SamplingParams.lengths`.
        allowed_tokens: an int32 bitmask, [W]; by default all tokens are allowed.
        thinking_token_budget: the largest number of tokens of the thoughts; None for no limit.

    Returns:
        The values by name: scalars, [n], or [q, l].

    Raises:
        ValueError: If the parameters do not fit the package or the prompt.
    """
    row: dict[str, Array] = {}
    for spec in interface.parameters:
        if spec.name not in _COMPUTED_INPUTS:
            row[spec.name] = _field_value(spec, params, interface.vocab_size)
    min_length, max_length = params.lengths(prompt_length, capacity, padding)
    row["min_length"] = _scalar(min_length, "int32")
    row["max_length"] = _scalar(max_length, "int32")
    stops = default_stops if params.eos_token_id is None else params.eos_token_id
    row["stop_ids"] = _ids("eos_token_id", stops, interface.vocab_size)
    row |= _logit_bias(interface, params)
    row |= _allowed_tokens(interface, allowed_tokens)
    if interface.features.grammars:
        row[GRAMMAR_DEADLINE.name] = _deadline(prompt_length, thinking_token_budget)
    return row


def _deadline(prompt_length: int, thinking_token_budget: int | None) -> Array:
    """The number of tokens of a row from which its thoughts have to end, prompt included."""
    if thinking_token_budget is None:
        return _scalar(INT32_MAX, GRAMMAR_DEADLINE.dtype)
    return _scalar(min(prompt_length + thinking_token_budget, INT32_MAX), GRAMMAR_DEADLINE.dtype)


def _grammars(given: Any, prompts: int, interface: Interface) -> list[AnyGrammar | None]:
    """The grammar of each prompt; None for any text. Raises ValueError.

    Args:
        given: a grammar, or a list with the grammar or None for each prompt; None without any.
        prompts: the number of prompts.
        interface: the interface of the package.
    """
    if given is None or isinstance(given, AnyGrammar):
        chosen = [given] * prompts
    elif isinstance(given, abc.Sequence) and len(given) == prompts:
        chosen = list(given)
    else:
        refuse("grammar", given, "a result of CausalLM.grammar, or a list with one for each prompt")
    for grammar in chosen:
        if grammar is not None:
            _check_grammar(grammar, interface)
    return chosen


def _check_grammar(grammar: Any, interface: Interface) -> None:
    """Raise ValueError unless a package takes a grammar."""
    if isinstance(grammar, TokenGrammar):
        _check_tables(grammar, interface)
        vocab_size = len(grammar.classes)
    elif isinstance(grammar, CompiledGrammar):
        vocab_size = grammar.tokenizer.vocab_size
    else:
        refuse("grammar", grammar, "a result of CausalLM.grammar")
    if vocab_size != interface.vocab_size:
        raise ValueError(
            f"the grammar is for {vocab_size} tokens, and the model has {interface.vocab_size}; make "
            "it with this package"
        )


def _has_masks(grammars: list[AnyGrammar | None], allowed_tokens: Any) -> bool:
    """Whether a grammar writes masks. Raises ValueError if the caller gives masks, too."""
    has_masks = any(isinstance(grammar, CompiledGrammar) for grammar in grammars)
    if has_masks and allowed_tokens is not None:
        raise ValueError(
            "allowed_tokens is given with a grammar that writes the masks itself; give either"
        )
    return has_masks


def _check_tables(grammar: TokenGrammar, interface: Interface) -> None:
    """Raise ValueError unless a package takes tables of that size."""
    if not interface.features.grammars:
        raise ValueError(
            "a grammar is given, and the package was exported without grammars; export the model "
            "again with grammars=True (--grammars, or --for-serving)"
        )
    if grammar.transitions.nbytes > MAX_TABLE_BYTES:
        raise ValueError(
            f"the grammar has a table of {grammar.transitions.nbytes} bytes, and may have "
            f"{MAX_TABLE_BYTES}; give a smaller one"
        )


def _check_budget(budget: int | None, grammars: list[AnyGrammar | None]) -> None:
    """Raise ValueError if a budget is given for thoughts that no grammar knows."""
    if budget is None:
        return
    if not all(isinstance(one, TokenGrammar) and one.has_thoughts for one in grammars):
        raise ValueError(
            "thinking_token_budget is given, and the grammar does not know the thoughts of the "
            "model; make it with CausalLM.grammar(thoughts=...), or leave the budget out"
        )


def _fitted_grammar(
    grammar: TokenGrammar, parameters: abc.Mapping[str, Array], prompt_length: int
) -> TokenGrammar:
    """The grammar of a row, with or without a stop token. Raises ArgumentError if no answer that
    follows it fits the row."""
    if grammar.shortest > 0 and int(parameters["min_length"]) > prompt_length:
        raise ArgumentError(
            "min_new_tokens or min_length is given with a grammar, which says itself where an answer "
            "may end; leave it out",
            "min_new_tokens",
        )
    has_stop = bool((parameters["stop_ids"] >= 0).any())
    fitted = grammar if has_stop else grammar.without_stop
    room = int(parameters["max_length"]) - prompt_length
    if room < fitted.shortest:
        counted = ", its stop token included" if has_stop else ""
        raise ArgumentError(
            f"an answer may have {room} tokens, and the shortest that follows the grammar has "
            f"{fitted.shortest}{counted}; allow at least {fitted.shortest}",
            "max_new_tokens",
        )
    return fitted


def _field_value(spec: TensorSpec, params: SamplingParams, vocab_size: int) -> Array:
    """The value of an input that is a single field of SamplingParams."""
    value = params.value_of(spec.name)
    if len(spec.axes) == 1:
        return _scalar(value, spec.dtype)
    return _ids(spec.name, value or (), vocab_size, sequences=len(spec.axes) == 3)


def _scalar(value: Any, dtype: str) -> Array:
    """A NumPy scalar, in place of an array of the shape []."""
    scalar: Array = np.dtype(dtype).type(value)
    return scalar


def _logit_bias(interface: Interface, params: SamplingParams) -> dict[str, Array]:
    """The inputs of the feature logit_bias; none without the feature. Raises ValueError."""
    biases = params.biases
    if not interface.features.logit_bias:
        if biases:
            raise ValueError(
                f"{', '.join(biases)} needs a package that was exported with logit_bias=True"
            )
        return {}
    for name, bias in biases.items():
        check_token_ids(name, np.array([*bias], dtype=np.int64), interface.vocab_size)
    ids = [token for bias in biases.values() for token in bias]
    amounts = [amount for bias in biases.values() for amount in bias.values()]
    return {
        "logit_bias_ids": np.array(ids or [PAD_STOP_ID], dtype=np.int32),
        "logit_bias": np.array(amounts or [0], dtype=np.float32),
    }


def _allowed_tokens(interface: Interface, mask: Array | None) -> dict[str, Array]:
    """The input of the feature allowed_tokens; none without the feature. Raises ValueError."""
    if not interface.features.allowed_tokens:
        if mask is not None:
            raise ValueError(
                "allowed_tokens needs a package that was exported with allowed_tokens=True"
            )
        return {}
    if mask is None:
        mask = np.full(interface.sizes[MASK_WORDS], -1, dtype=np.int32)
    return {ALLOWED_TOKENS.name: mask}


def _ids(
    name: str, values: abc.Sequence[Any], vocab_size: int, *, sequences: bool = False
) -> Array:
    """Token ids as an input of the graph.

    Args:
        name: the name of the argument, for an error message.
        values: token ids; with `sequences`, sequences of token ids.
        vocab_size: the size of the vocabulary.

    Returns:
        int32, [n], or with `sequences` [q, l], each sequence with -1 before its beginning. There is at
        least one column.
    """
    rows = values if sequences else [(value,) for value in values]
    longest = max([1, *(len(ids) for ids in rows)])
    array = np.full((max(1, len(rows)), longest), PAD_STOP_ID, dtype=np.int32)
    for index, ids in enumerate(rows):
        check_token_ids(name, np.array(ids, dtype=np.int64), vocab_size)
        array[index, -len(ids) :] = ids
    return array if sequences else array[:, 0]


def check_features(interface: Interface, params: SamplingParams) -> None:
    """Raise ValueError if `params` ask for a filter that the package lacks, or for more guesses than
    it checks."""
    _check_filters(interface.features.filters, params)
    guesses = params.prompt_lookup_num_tokens
    most = interface.features.num_speculative_tokens
    if guesses > most:
        checks = f"checks {most} guesses a step at most" if most > 0 else "draws a token a step"
        raise ArgumentError(
            f"prompt_lookup_num_tokens is {guesses}, and the package {checks}; compile the portable "
            f"package with num_speculative_tokens={guesses} (--num-speculative-tokens) and "
            f'kv_cache_dtype="int8", or give prompt_lookup_num_tokens={most}',
            "prompt_lookup_num_tokens",
        )


def _check_filters(filters: abc.Sequence[str], params: SamplingParams) -> None:
    """Raise ArgumentError if `params` ask for a filter that is not among `filters`."""
    for name, field in params.filters.items():
        if name not in filters:
            exported = f"the filters {', '.join(filters)}" if filters else "no filters"
            raise ArgumentError(
                f"{field} is {shown(getattr(params, field))}, and the package was exported with "
                f"{exported}; export the model again with filters={[*filters, name]} (--filter), or "
                f"give {field}={OFF_VALUES[field]} to go without",
                field,
            )


def for_package(
    interface: Interface, params: SamplingParams, tokenizer: Tokenizer | None
) -> SamplingParams:
    """`params` with token ids for the texts of `bad_words` and `dry_sequence_breakers`.

    A word is forbidden at the beginning of a text, and after a space if that does not end with the
    same tokens.

    Raises:
        ValueError: If the package lacks a feature, there is a text but no tokenizer, or a breaker is
            not a single token.
    """
    check_features(interface, params)
    breakers = params.dry_sequence_breakers or ()
    words = params.bad_words or ()
    has_texts = any(isinstance(breaker, str) for breaker in breakers)
    if not has_texts and not words:
        return params
    if tokenizer is None:
        name = "bad_words" if words else "dry_sequence_breakers"
        raise ValueError(
            f"{name} has texts, and the package has no tokenizer; give token ids, or tokenizer"
        )
    encode = partial(tokenizer.encode, add_special_tokens=False)
    breaker_ids = tuple(
        _single_token(breaker, encode) if isinstance(breaker, str) else breaker
        for breaker in breakers
    )
    forbidden = list(params.bad_words_ids or ())
    for word in words:
        forbidden += _forbidden_sequences(word, encode)
    return replace(
        params, dry_sequence_breakers=breaker_ids, bad_words_ids=tuple(forbidden), bad_words=None
    )


def _single_token(breaker: str, encode: Callable[[str], list[int]]) -> int:
    """The token of a breaker. Raises ValueError if the breaker is not exactly one token."""
    tokens = encode(breaker)
    if len(tokens) != 1:
        raise ValueError(
            f"dry_sequence_breakers has {shown(breaker)}, which is {len(tokens)} tokens; give texts "
            "of a single token each, or token ids"
        )
    return tokens[0]


def _forbidden_sequences(word: str, encode: Callable[[str], list[int]]) -> list[tuple[int, ...]]:
    """The token sequences of a bad word. Raises ValueError if it has no tokens."""
    at_beginning = encode(word.lstrip())
    after_space = encode(" " + word.lstrip())
    if not at_beginning:
        raise ValueError(f"bad_words has {shown(word)}, which has no tokens; leave it out")
    if after_space[-len(at_beginning) :] == at_beginning:
        return [tuple(at_beginning)]
    return [tuple(at_beginning), tuple(after_space)]
