"""The arguments of `generate`, those of transformers among them: sorted, checked, and made into sequences."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from tokenizers import Tokenizer as _Tokenizer

from qsample.contract import ALLOWED_TOKENS
from qsample.errors import shown, unknown, without_refused
from qsample.huggingface.generation_config import read_generation_config
from qsample.huggingface.keywords import BOOKKEEPING, GENERATE
from qsample.interface import Interface
from qsample.manifest import TokenIds
from qsample.runtime.callbacks.logits_processors import INSTEAD
from qsample.runtime.guided_decoding import Guide
from qsample.runtime.parameters import choose_seeds, parameter_arrays
from qsample.runtime.prompts import parse_prompts
from qsample.runtime.sequence import Sequence
from qsample.sampling_params import UNSUPPORTED, SamplingParams, layered
from qsample.text.chat import ChatOptions, ChatTemplates
from qsample.text.generated_text import GeneratedText
from qsample.text.stop_strings import check_stop_strings
from qsample.text.tokenizer import Tokenizer
from qsample.values import is_integer, is_number

_OF_GENERATE: Final = frozenset(
    {"inputs", "params", "input_ids", "attention_mask", "generation_config", "streamer", "seed", "allowed_tokens"}
    | {"prefill_chunk_size", "flush_every", "double_buffering", "in_place", "stop_strings", "max_time", "tokenizer"}
    | {"pad_token_id", "bos_token_id", "stopping_criteria", "logits_processor", "return_dict_in_generate"}
    | {"num_return_sequences"}
    | {entry.name for entry in fields(ChatOptions)}
)
_SAMPLING: Final = frozenset({"do_sample", *(entry.name for entry in fields(SamplingParams)), *UNSUPPORTED})
# Of a caller's GenerationConfig: what it asks to have returned. The rest of `GENERATE` may stand in a model's own file.
_OUTPUTS: Final = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_READ_APART: Final = ("stop_strings", "max_time", "num_return_sequences")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What a call asks for.

    inputs, attention_mask: as for `parse_prompts`; a call without inputs is one empty prompt. settings: the model's
    generation_config with the caller's on top. options: the sampling keywords, on top of both. chat: what goes
    with chat messages. tokenizer: the caller's; None = the package's own. stopping_criteria, logits_processor,
    return_dict_in_generate: as given. max_time: seconds; None = any. num_return_sequences: rows of each prompt.
    """

    inputs: Any
    attention_mask: Any
    params: Any
    settings: Mapping[str, Any]
    options: Mapping[str, Any]
    chat: ChatOptions | None = None
    tokenizer: Any = None
    stopping_criteria: Any = None
    logits_processor: Any = None
    max_time: float | None = None
    num_return_sequences: int = 1
    return_dict_in_generate: bool | None = None

    @property
    def sampling_settings(self) -> dict[str, Any]:
        """The settings that say how to choose tokens."""
        return {name: value for name, value in self.settings.items() if name not in _READ_APART}

    def check_for_engine(self) -> None:
        """Raise ValueError for what follows a batch, which an engine's requests are not."""
        if self.stopping_criteria is not None:
            raise ValueError("stopping_criteria are for generate; cancel() ends a request of an engine")
        if self.logits_processor is not None:
            raise ValueError(f"logits_processor is for generate; {INSTEAD}")

    def padding(self, token_ids: TokenIds) -> int | None:
        """The token that is not read where no mask is given. None = all are read.

        transformers' rule: the pad token, unless it ends a row as well, for then it may belong to the text.
        """
        pad = self._of_config("pad_token_id")
        return None if pad is None or pad in self._ends(token_ids) else pad

    def fill(self, token_ids: TokenIds) -> int:
        """The token behind a row that has ended, and before a prompt shorter than others: as in transformers the pad
        token, otherwise the first that ends a row."""
        pad = self._of_config("pad_token_id")
        if pad is None:
            eos = self._eos
            pad = next(iter(() if eos is None else _several(eos)), token_ids.pad)
        return int(pad)

    def token_ids(self, token_ids: TokenIds) -> TokenIds:
        """The package's, with the beginning-of-text token that the settings name."""
        bos = self._of_config("bos_token_id")
        return token_ids if bos is None else TokenIds(token_ids.pad, bos, token_ids.eos)

    @property
    def _eos(self) -> Any:
        return self.options.get("eos_token_id", self.settings.get("eos_token_id"))

    def _of_config(self, name: str) -> int | None:
        """A token id of the settings; a negative one in a model's file means that there is none."""
        value: Any = self.settings.get(name)
        return int(value) if is_integer(value, 0) else None

    def _ends(self, token_ids: TokenIds) -> Collection[int]:
        eos = self._eos
        if eos is None and "eos_token_id" not in self.options:
            eos = token_ids.eos
        return () if eos is None else _several(eos)


def read_arguments(
    inputs: Any, attention_mask: Any, params: Any, options: Mapping[str, Any], own: Mapping[str, Any], vocab_size: int
) -> Arguments:
    """Sort the arguments of a call.

    options: its keywords. own: the model's generation_config. Raises ValueError for a keyword that is unknown, that
    means nothing here and asks for something, or whose value is wrong.
    """
    chat, options = ChatOptions.split(options)
    inputs, attention_mask = _inputs(inputs, attention_mask, options)
    given = options.pop("generation_config", None)
    if callable(getattr(params, "to_dict", None)):  # transformers' second positional argument
        given, params = params, None
    given = {} if given is None else read_generation_config(given)
    if given and params is not None:
        raise ValueError("params and generation_config were given; put everything into one of them")
    without_refused(GENERATE, {name: given[name] for name in _OUTPUTS if name in given})
    options = without_refused(GENERATE, options)
    for name in ("pad_token_id", "bos_token_id"):
        if options.get(name) is not None:
            given[name] = _token_id(name, options[name], vocab_size)
        elif name in options:
            given[name] = None
        options.pop(name, None)
    settings = layered(own, given)
    # The model's settings and the caller's generation_config do not go with params.
    count, max_time = (
        options.pop(name, settings.get(name) if params is None else None)
        for name in ("num_return_sequences", "max_time")
    )
    arguments = Arguments(
        inputs=inputs,
        attention_mask=attention_mask,
        params=params,
        settings=settings,
        chat=chat,
        tokenizer=options.pop("tokenizer", None),
        stopping_criteria=options.pop("stopping_criteria", None),
        logits_processor=_none_where_empty(options.pop("logits_processor", None)),
        max_time=_seconds(max_time),
        num_return_sequences=_count("num_return_sequences", count),
        return_dict_in_generate=_optional_bool("return_dict_in_generate", options.pop("return_dict_in_generate", None)),
        options={name: value for name, value in options.items() if name not in BOOKKEEPING},
    )
    for name in arguments.options:
        if name not in _SAMPLING:
            raise ValueError(unknown("generate has no argument", name, _SAMPLING - set(UNSUPPORTED) | _OF_GENERATE))
    return arguments


def make_sequences(
    arguments: Arguments,
    interface: Interface,
    token_ids: TokenIds,
    tokenizer: Tokenizer | None,
    capacity: Callable[[int], int],
    *,
    seed: Any = None,
    stop_strings: Any = None,
    allowed_tokens: Any = None,
) -> tuple[list[Sequence], Guide | None]:
    """A sequence for each prompt, or `num_return_sequences` one after another; and the guide that writes their masks,
    where allowed_tokens is a function.

    token_ids, tokenizer: the package's. capacity: the tokens of a slot, from how many the longest sequence may take.
    The others are those of `generate`. Raises ValueError where one is wrong.
    """
    params, token_ids = arguments.params, arguments.token_ids(token_ids)
    tokenizer = choose_tokenizer(tokenizer, arguments.tokenizer, interface.vocab_size)
    rows = parse_prompts(
        arguments.inputs,
        arguments.attention_mask,
        tokenizer,
        interface.vocab_size,
        token_ids,
        arguments.chat,
        pad=arguments.padding(token_ids),
        holes=not interface.recurrent,
    )
    count, row_params = arguments.num_return_sequences, _sampling_params(arguments, len(rows))
    if count > 1:
        rows = [row for row in rows for _ in range(count)]
        row_params = [row for row in row_params for _ in range(count)]
        _check_sampled(count, row_params)
    seeds = choose_seeds(seed, params, row_params, count)
    stops = choose_stop_strings(stop_strings, params, arguments.settings, tokenizer)
    lengths, padding = [len(row.ids) for row in rows], [row.padding for row in rows]
    needed = max(map(SamplingParams.total_length, row_params, lengths, padding))
    arrays = parameter_arrays(
        interface, row_params, lengths, capacity(needed), token_ids.eos, allowed_tokens, padding, tokenizer
    )
    guided = callable(allowed_tokens)
    sequences = []
    for row, prompt in enumerate(rows):
        text = None if tokenizer is None else GeneratedText(tokenizer, prompt.ids.tolist(), stops)
        parameters = {name: values[row] for name, values in arrays.items()}
        sequences.append(Sequence(prompt.ids, parameters, seeds[row], guided, text, prompt.given))
    if not guided:
        return sequences, None
    return sequences, Guide(allowed_tokens, sequences, arrays[ALLOWED_TOKENS.name], token_ids.pad)


def choose_stop_strings(
    given: Any, params: Any, settings: Mapping[str, Any], tokenizer: Tokenizer | None
) -> tuple[str, ...]:
    """`given`, or what the model's settings say where they are used. Raises ValueError without a tokenizer."""
    stops = check_stop_strings(settings.get("stop_strings") if given is None and params is None else given)
    if stops and tokenizer is None:
        raise ValueError(
            "stop_strings are found in the text, and the package has no tokenizer; give eos_token_id, or tokenizer"
        )
    return stops


def _sampling_params(arguments: Arguments, rows: int) -> list[SamplingParams]:
    """One a row, from `params` or from the settings with the options on top. Raises ValueError."""
    params, options = arguments.params, arguments.options
    if params is None:
        return [SamplingParams.from_generation_config(arguments.sampling_settings, **options)] * rows
    if options:
        raise ValueError(f"params and {', '.join(options)} were given; put everything into params, or leave it out")
    if isinstance(params, SamplingParams):
        return [params] * rows
    if not isinstance(params, abc.Sequence) or not all(isinstance(row, SamplingParams) for row in params):
        raise ValueError(f"params is {shown(params)}; give a SamplingParams, or a list with one for each prompt")
    if len(params) != rows:
        raise ValueError(f"{len(params)} SamplingParams were given for {rows} prompts; give one, or one for each")
    return list(params)


def _check_sampled(count: int, params: list[SamplingParams]) -> None:
    for row, one in enumerate(params):
        if one.temperature == 0:
            raise ValueError(
                f"num_return_sequences is {count} and prompt {row // count} is continued greedily, which gives one "
                "sequence only; give do_sample=True or a temperature, or leave num_return_sequences out"
            )


def choose_tokenizer(own: Tokenizer | None, given: Any, vocab_size: int) -> Tokenizer | None:
    """The package's own tokenizer, and where it has none the one that the caller gives: ours, transformers' or the
    tokenizers library's. Raises ValueError for anything else, and for one that is not the model's."""
    if given is None:
        return own
    backend = getattr(given, "backend_tokenizer", given)
    if isinstance(given, Tokenizer):
        return own or given
    if not isinstance(backend, _Tokenizer):
        if own is not None and callable(getattr(given, "decode", None)):
            return own
        raise ValueError(f"tokenizer is a {type(given).__name__}; give a fast tokenizer of transformers")
    size = backend.get_vocab_size(with_added_tokens=True)
    if size > vocab_size:
        raise ValueError(f"tokenizer has {size} tokens and the model {vocab_size}; give the model's own")
    # A copy: what a prompt is cut or padded to is switched off in ours.
    if own is not None:
        return own
    templates = ChatTemplates(getattr(given, "chat_template", None), getattr(given, "special_tokens_map", None))
    return Tokenizer(_Tokenizer.from_str(backend.to_str()), templates)


def _inputs(inputs: Any, attention_mask: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """The prompts and their mask, in whichever of the ways they are given."""
    named = options.pop("input_ids", None)
    if inputs is not None and named is not None:
        raise ValueError("inputs and input_ids were given, which are two names of one argument; give one")
    inputs = named if inputs is None else inputs
    mask = options.pop("attention_mask", None)
    attention_mask = mask if attention_mask is None else attention_mask
    if isinstance(inputs, Mapping) and "input_ids" in inputs:
        rest = without_refused(GENERATE, inputs)
        rest = {name: value for name, value in rest.items() if name not in ("input_ids", "attention_mask")}
        if rest:
            raise ValueError(f"inputs has {', '.join(map(repr, rest))}; give a mapping of input_ids and attention_mask")
    return ([[]] if inputs is None else inputs), attention_mask


def _several(ids: Any) -> Collection[int]:
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    return list(ids) if isinstance(ids, Collection) else [ids]


def _token_id(name: str, value: Any, vocab_size: int) -> int:
    value = value.item() if hasattr(value, "item") and getattr(value, "size", None) in (1, ()) else value
    if not is_integer(value, 0, vocab_size - 1):
        raise ValueError(f"{name} is {shown(value)}; give one of the model's token ids, 0 to {vocab_size - 1}")
    return int(value)


def _count(name: str, value: Any) -> int:
    if value is None:
        return 1
    if not is_integer(value, 1):
        raise ValueError(f"{name} is {value!r:.60}; give an integer >= 1, or None for 1")
    return int(value)


def _seconds(value: Any) -> float | None:
    if value is None:
        return None
    if not is_number(value) or not value > 0:
        raise ValueError(f"max_time is {shown(value)}; give a number of seconds > 0, or None")
    return float(value)


def _none_where_empty(value: Any) -> Any:
    return None if isinstance(value, Collection) and len(value) == 0 else value


def _optional_bool(name: str, value: Any) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} is {shown(value)}; give True, False or None")
    return value
