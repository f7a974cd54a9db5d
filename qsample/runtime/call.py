"""`Call`: the arguments of `generate` or of a request to an engine, read from keywords; its prompts
as token ids."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Final, NamedTuple

import numpy as np

from qsample.checks import is_integer, is_number, plain, refuse
from qsample.contract.arrays import Array
from qsample.errors import ArgumentError, shown, unknown
from qsample.images.prompt import ImagePrompt, ProcessedImage
from qsample.package.manifest import TokenIds
from qsample.request.refusals import BOOKKEEPING, GENERATE, UNSUPPORTED_SETTINGS, without_refused
from qsample.request.repetition import RepetitionDetection, read_repetition_detection
from qsample.request.sampling_params import OFF_VALUES, SamplingParams, layered, settings_of
from qsample.request.text.chat import CHAT_OPTIONS, ChatOptions
from qsample.request.text.generated_text import check_stop_strings
from qsample.request.text.tokenizer import Tokenizer
from qsample.request.vllm import take_stop_tokens, with_own_names
from qsample.runtime.image_prompts import TEXT_ONLY, ImageReader, images_of_prompts
from qsample.runtime.sequence import ScoredTokens


@dataclass(frozen=True, slots=True)
class Keyword:
    """How `read_call` fills a field of `Call` from a keyword of `generate`.

    Args:
        name: the keyword, if it is not called as the field.
        check: a function of the keyword's name and value. It returns the value to keep, or raises
            ValueError.
        in_config: whether a generation_config gives the value of a call without the keyword.
    """

    name: str | None = None
    check: Callable[[str, Any], Any] | None = None
    in_config: bool = False


_METADATA_KEY: Final = "keyword"

# The limit of tokens that a request scores after its prompt: the head computes a row for each.
MOST_SCORED_IDS: Final = 128


def _keyword(
    name: str | None = None,
    *,
    check: Callable[[str, Any], Any] | None = None,
    in_config: bool = False,
) -> dict[str, Keyword]:
    """The metadata of a field of `Call` that a keyword fills; see `Keyword`."""
    return {_METADATA_KEY: Keyword(name, check, in_config)}


def _scores_prompt(name: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        refuse(
            name, value, "True, for the alternatives that the package has (top_logprobs), or False"
        )
    return bool(value)


def _count(name: str, value: Any) -> int:
    if value is None:
        return 1
    if not is_integer(value, 1):
        refuse(name, value, "an integer >= 1, or None for 1")
    return int(value)


def _budget(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if not is_integer(value, 0):
        refuse(name, value, "an integer >= 0, or None for no limit")
    return int(value)


def _seconds(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if not is_number(value) or value <= 0:
        refuse(name, value, "a number of seconds > 0, or None")
    return float(value)


def _flag(name: str, value: Any) -> bool | None:
    if value is not None and not isinstance(value, bool):
        refuse(name, value, "True, False or None")
    return value


def _flag_or(default: bool) -> Callable[[str, Any], bool]:
    """The check of a flag for which None stands for `default`."""

    def check(name: str, value: Any) -> bool:
        given = _flag(name, value)
        return default if given is None else given

    return check


def _allowed_ids(name: str, value: Any) -> list[int] | None:
    """Token ids, at least one; their range is checked with the package."""
    ids = plain(value)
    if ids is None:
        return None
    is_list = isinstance(ids, Collection) and not isinstance(ids, str | bytes | Mapping)
    if not is_list or not ids or not all(is_integer(item, 0) for item in ids):
        refuse(name, value, "a list of at least one token id, or None for all tokens")
    return [int(item) for item in ids]


def _scored_ids(name: str, value: Any) -> list[int] | None:
    """Token ids to score; their range is checked with the package."""
    ids = plain(value)
    if ids is None:
        return None
    is_list = isinstance(ids, Collection) and not isinstance(ids, str | bytes | Mapping)
    if (
        not is_list
        or not 1 <= len(ids) <= MOST_SCORED_IDS
        or not all(is_integer(item, 0) for item in ids)
    ):
        refuse(name, value, f"a list of 1 to {MOST_SCORED_IDS} token ids, or None for none")
    return [int(item) for item in ids]


def _stop_strings(name: str, value: Any) -> tuple[str, ...]:
    return check_stop_strings(value)


def _processors(name: str, value: Any) -> Any:
    """None for an empty list of processors."""
    is_empty = isinstance(value, Collection) and len(value) == 0
    return None if is_empty else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Prompts, and how to continue them. `read_call` makes a Call of keywords.

    The fields are arguments of `CausalLM.generate`, described there, and these:

    Args:
        images: the images, as in `generate`; each may also be a `ProcessedImage`.
        pad: the token id that marks padding in a block of token ids without an attention_mask; by
            default, every token is read.
        fill: the token id after a row's end, and before a shorter prompt; by default the package's
            pad token.
        bos: the token id that replaces an empty prompt; by default the package's.
        stops: the stop tokens of prompts that are no chats, if their parameters name none; by
            default the package's.
        chat_stops: the same of chats.
        chat: the options of chat messages.
        allowed_token_ids: the ids of the tokens that may be sampled; None for all. Needs the feature
            `allowed_tokens` or `grammars`.
        skip_special_tokens: whether special tokens have no text in `texts`.
        include_stop_str_in_output: whether a text includes the stop string, or the stop token, that
            ends it.
        repetition_detection: the repetitions that end a row, see `RepetitionDetection`; a mapping
            with its fields will do. None for none.
        grammar: the grammar that the answers follow, see `CausalLM.grammar`: one for all prompts, or
            a list with the grammar of each prompt, None for any text. Needs the feature `grammars`.
        thinking_token_budget: the largest number of tokens of the thoughts of each answer; None for
            no limit. Needs a grammar whose answers have thoughts.
        prediction: the text or the token ids that the continuation of a single prompt is expected
            to have. Packages that were compiled with num_speculative_tokens guess these tokens.
            This changes the speed only.
        prompt_logprobs: whether a request of an engine scores its prompt, see `Engine.add_request`.
        logprob_token_ids: the tokens that a request of an engine scores after its prompt.
        outputs: the names of the optional outputs to return, a list; by default all that the
            package has. The other outputs are not read from the device.
        return_dict: False makes `generate` return the array of the sequences only.
    """

    inputs: Any
    params: SamplingParams | Sequence[SamplingParams]
    images: Any = field(default=None, metadata=_keyword())
    attention_mask: Any = None
    pad: int | None = None
    fill: int | None = None
    bos: int | None = None
    stops: Sequence[int] | None = None
    chat_stops: Sequence[int] | None = None
    chat: ChatOptions | None = None
    tokenizer: Any = field(default=None, metadata=_keyword())
    seed: Any = field(default=None, metadata=_keyword())
    stop_strings: str | Sequence[str] | None = field(
        default=None, metadata=_keyword(check=_stop_strings, in_config=True)
    )
    skip_special_tokens: bool = field(default=True, metadata=_keyword(check=_flag_or(True)))
    include_stop_str_in_output: bool = field(
        default=False, metadata=_keyword(check=_flag_or(False))
    )
    repetition_detection: RepetitionDetection | None = field(
        default=None, metadata=_keyword(check=read_repetition_detection)
    )
    allowed_tokens: Any = field(default=None, metadata=_keyword())
    allowed_token_ids: Sequence[int] | None = field(
        default=None, metadata=_keyword(check=_allowed_ids)
    )
    grammar: Any = field(default=None, metadata=_keyword())
    thinking_token_budget: int | None = field(default=None, metadata=_keyword(check=_budget))
    prompt_logprobs: bool = field(default=False, metadata=_keyword(check=_scores_prompt))
    logprob_token_ids: Sequence[int] | None = field(
        default=None, metadata=_keyword(check=_scored_ids)
    )
    outputs: Any = field(default=None, metadata=_keyword())
    prediction: Any = field(default=None, metadata=_keyword())
    stopping_criteria: Any = field(default=None, metadata=_keyword())
    logits_processor: Any = field(default=None, metadata=_keyword(check=_processors))
    max_time: float | None = field(default=None, metadata=_keyword(check=_seconds, in_config=True))
    num_return_sequences: int = field(default=1, metadata=_keyword(check=_count, in_config=True))
    return_dict: bool | None = field(
        default=None, metadata=_keyword("return_dict_in_generate", check=_flag)
    )

    @property
    def scoring_argument(self) -> str | None:
        """The argument that makes the requests score tokens, and sample none; None without it."""
        if self.logprob_token_ids is not None:
            return "logprob_token_ids"
        return "prompt_logprobs" if self.prompt_logprobs else None


# Field of `Call` → the keyword that fills it.
_KEYWORD_FIELDS: Final[Mapping[str, Keyword]] = {
    entry.name: entry.metadata[_METADATA_KEY]
    for entry in fields(Call)
    if _METADATA_KEY in entry.metadata
}
# Field of a generation_config that fills a field of `Call` → its check.
CONFIG_KEYWORDS: Final[Mapping[str, Callable[[str, Any], Any] | None]] = {
    (name if keyword.name is None else keyword.name): keyword.check
    for name, keyword in _KEYWORD_FIELDS.items()
    if keyword.in_config
}
# Arguments of `CausalLM.generate` that say how a batch runs. A call does not have them.
_BATCH_KEYWORDS: Final = frozenset(
    {"streamer", "prefill_chunk_size", "flush_every", "double_buffering"}
)
_SPECIAL_TOKENS: Final = ("pad_token_id", "bos_token_id")
_STOPS: Final = "eos_token_id"
_SAMPLING_KEYWORDS: Final = frozenset({"do_sample", *OFF_VALUES})
# Fields of a generation_config that are refused in the caller's only: the model's own file may
# have them, too.
_CONFIG_OUTPUTS: Final = (
    "output_scores",
    "output_logits",
    "output_attentions",
    "output_hidden_states",
)


def accepted_keywords() -> frozenset[str]:
    """The names of all arguments of `CausalLM.generate` that have an effect, without vLLM's."""
    own = {
        (name if keyword.name is None else keyword.name)
        for name, keyword in _KEYWORD_FIELDS.items()
    }
    inputs = {"inputs", "input_ids", "attention_mask", "params", "generation_config"}
    return frozenset(
        own | inputs | _BATCH_KEYWORDS | _SAMPLING_KEYWORDS | CHAT_OPTIONS | {*_SPECIAL_TOKENS}
    )


def read_call(
    inputs: Any,
    params: Any,
    keywords: Mapping[str, Any],
    own: Mapping[str, Any],
    token_ids: TokenIds,
    vocab_size: int,
    file_stops: Any = None,
) -> Call:
    """The arguments of a call of `generate` as a `Call`.

    Other prompts than chats end as in transformers: at the stop tokens of the generation_config.
    Chats also end at those that the package has in addition.

    Args:
        inputs: the prompts; None for a single empty prompt, or if `keywords` have them.
        params: a SamplingParams, a list of them, or None; or a generation_config.
        keywords: the other arguments, under their names here or in vLLM. A keyword takes precedence
            over the caller's generation_config.
        own: the model's own settings that the package applies, over which the caller's take
            precedence. If `params` are given, only the special tokens count.
        token_ids: the package's special tokens.
        vocab_size: the number of the model's token ids.
        file_stops: the eos_token_id of the model's file, from which `own` may differ by now: a
            caller's stop tokens are those of chats, too.

    Raises ValueError for an unknown or unsupported keyword, and for a wrong value.
    """
    given = with_own_names(keywords)
    config = given.pop("generation_config", None)
    if callable(getattr(params, "to_dict", None)):  # transformers' second positional argument
        config = params
        params = None
    changes = _config_changes(config)
    if changes and params is not None:
        raise ValueError("params and generation_config were given; put everything into either")
    for name in _SPECIAL_TOKENS:
        if name in given:
            changes[name] = _token_id(name, given.pop(name), vocab_size)
    settings = layered(own, changes)
    # vLLM also counts the tokenizer's ending among the model's.
    is_of_file = settings.get(_STOPS) == file_stops
    take_stop_tokens(given, token_ids.eos if is_of_file else settings.get(_STOPS))

    chat = _take_chat_options(given)
    inputs, attention_mask = _take_inputs(inputs, given)
    values = _take_fields(given, {} if params is not None else settings)
    first_stop = _first_id(given.get(_STOPS, settings.get(_STOPS)))
    stops = _own_stops(own)
    is_of_file = own.get(_STOPS) == file_stops
    if _STOPS not in changes:
        settings.pop(_STOPS, None)  # `stops` and `chat_stops` have them.
    params = _sampling_params(params, settings, without_refused(GENERATE, given))

    pad = _id_setting(settings, "pad_token_id")
    return Call(
        inputs=inputs,
        params=params,
        attention_mask=attention_mask,
        # transformers' rule: a pad token that also ends a row may be text, so it is read.
        pad=None if pad in _stop_ids(params, token_ids.eos if stops is None else stops) else pad,
        fill=first_stop if pad is None else pad,
        bos=_id_setting(settings, "bos_token_id"),
        stops=stops,
        chat_stops=None if is_of_file else stops,
        chat=chat,
        **values,
    )


def _config_changes(config: Any) -> dict[str, Any]:
    """The settings of the caller's generation_config. Raises ValueError for unsupported outputs."""
    if config is None:
        return {}
    changes = settings_of(config)
    without_refused(GENERATE, {name: changes[name] for name in _CONFIG_OUTPUTS if name in changes})
    return changes


def _take_chat_options(given: dict[str, Any]) -> ChatOptions | None:
    """The options of chat messages, removed from `given`; None if all are at their defaults."""
    values = {name: given.pop(name) for name in CHAT_OPTIONS & given.keys()}
    if not values:
        return None
    options = ChatOptions(**{name: value for name, value in values.items() if value is not None})
    return options if options.given else None


def _take_fields(given: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `Call` that have a keyword, from `given`, where they are removed, or from
    `settings`."""
    values: dict[str, Any] = {}
    for field_name, keyword in _KEYWORD_FIELDS.items():
        name = field_name if keyword.name is None else keyword.name
        if name in given:
            value = given.pop(name)
        elif keyword.in_config and name in settings:
            value = settings[name]
        else:
            continue
        values[field_name] = value if keyword.check is None else keyword.check(name, value)
    return values


def _sampling_params(
    params: Any, settings: Mapping[str, Any], keywords: Mapping[str, Any]
) -> SamplingParams | Sequence[SamplingParams]:
    """`params`, or the parameters of the settings with the keywords on top. Raises ValueError."""
    keywords = {name: value for name, value in keywords.items() if name not in BOOKKEEPING}
    for name in keywords.keys() - _SAMPLING_KEYWORDS - UNSUPPORTED_SETTINGS.keys():
        if name in _BATCH_KEYWORDS:
            raise ValueError(f"{name} is an argument of generate, for a batch; leave it out here")
        raise ValueError(unknown("generate has no argument", name, accepted_keywords()))
    if params is None:
        config = {name: value for name, value in settings.items() if name not in CONFIG_KEYWORDS}
        return SamplingParams.from_generation_config(config, **keywords)
    if keywords:
        raise ValueError(
            f"params and {', '.join(keywords)} were given; put everything into params, or leave it out"
        )
    rows = [params] if isinstance(params, SamplingParams) else params
    if not isinstance(rows, Sequence) or not all(isinstance(row, SamplingParams) for row in rows):
        refuse("params", params, "a SamplingParams, or a list of them, for each prompt its own")
    return params  # type: ignore[no-any-return]


def _take_inputs(inputs: Any, given: dict[str, Any]) -> tuple[Any, Any]:
    """The prompts and their mask, in whichever argument they are given; removed from `given`."""
    input_ids = given.pop("input_ids", None)
    mask = given.pop("attention_mask", None)
    if inputs is not None and input_ids is not None:
        raise ValueError(
            "inputs and input_ids were given, which are two names of the same argument; give either"
        )
    if inputs is None:
        inputs = input_ids
    if isinstance(inputs, Mapping) and "input_ids" in inputs:
        others = without_refused(GENERATE, inputs).keys() - {"input_ids", "attention_mask"}
        if others:
            raise ValueError(
                f"inputs has {', '.join(sorted(map(repr, others)))}; give a mapping of input_ids and attention_mask"
            )
        if mask is None:
            mask = inputs.get("attention_mask")
        inputs = inputs["input_ids"]
    return ([[]] if inputs is None else inputs), mask


def _own_stops(own: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The stop tokens of the model's generation_config; None if it has none. Raises ValueError."""
    settings = {_STOPS: own[_STOPS]} if _STOPS in own else {}
    return SamplingParams.from_generation_config(settings).eos_token_id


def _stop_ids(
    params: SamplingParams | Sequence[SamplingParams], default_stops: Sequence[int]
) -> frozenset[int]:
    """The token ids that end a row of token ids of the call. default_stops: those of parameters
    that name none."""
    rows = [params] if isinstance(params, SamplingParams) else params
    found: set[int] = set()
    for row in rows:
        found.update(default_stops if row.eos_token_id is None else row.eos_token_id)
    return frozenset(found)


def _first_id(ids: Any) -> int | None:
    """The first of several token ids, or a single id; None for none."""
    ids = plain(ids)
    if isinstance(ids, Collection):
        return next(iter(ids), None)
    return ids  # type: ignore[no-any-return]


def _id_setting(settings: Mapping[str, Any], name: str) -> int | None:
    """A token id of the settings; in a model's file, a negative number means that there is none."""
    value = settings.get(name)
    return int(value) if is_integer(value, 0) else None


def _token_id(name: str, value: Any, vocab_size: int) -> int | None:
    """The value of pad_token_id or bos_token_id: a token id, which an array with a single element
    may hold, or None. Raises ValueError."""
    if hasattr(value, "item") and getattr(value, "size", None) == 1:
        value = value.item()
    if value is None:
        return None
    if not is_integer(value, 0, vocab_size - 1):
        refuse(name, value, f"a token id of the model, 0 to {vocab_size - 1}")
    return int(value)


_ACCEPTED_PROMPTS: Final = (
    "give a text, token ids, a list of either, a 2-D integer array (with attention_mask if it is padded), or chat "
    'messages [{"role": ..., "content": ...}]'
)
_INT64_END: Final = 2**63


class Prompt(NamedTuple):
    """A prompt as token ids.

    Attributes:
        ids: [n] int64, n >= 1, the tokens that the model reads.
        given: [m] int64, the same tokens and their padding.
        images: the prompt's images; None without any.
        is_chat: whether the prompt is chat messages.
        scored: the tokens to score; None to score none.
    """

    ids: Array
    given: Array
    images: ImagePrompt | None = None
    is_chat: bool = False
    scored: ScoredTokens | None = None

    @property
    def identities(self) -> Array:
        """[n] int64, see `ImagePrompt.identities`."""
        return self.ids if self.images is None else self.images.identities

    @property
    def padding(self) -> int:
        """The number of tokens of `given` that are not read."""
        return len(self.given) - len(self.ids)


def parse_prompts(
    call: Call,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    bos: int | None,
    reader: ImageReader = TEXT_ONLY,
    *,
    holes: bool = True,
) -> list[Prompt]:
    """The prompts of a call, with the inputs of `CausalLM.generate`.

    Args:
        call: its inputs, their mask and images, and the options of chat messages.
        tokenizer: the tokenizer for texts; without it, texts are an error.
        vocab_size: the end of the range of token ids, [0, vocab_size).
        bos: the token id that replaces an empty prompt; without it, an empty prompt is an error.
        reader: the reader of images.
        holes: whether padding between tokens is valid.

    Raises ValueError.
    """
    items = _items(call.inputs)
    count = len(items)
    if count == 0:
        raise ValueError("no prompt was given; give at least a single prompt")
    images_of_items = images_of_prompts(call.images, count)
    rows: list[Array] = []
    processed_images: list[list[ProcessedImage]] = []
    for index, item in enumerate(items):
        with _naming_prompt(index, count):
            ids, processed = _row(index, item, tokenizer, call.chat, images_of_items[index], reader)
        rows.append(ids)
        processed_images.append(processed)

    prompts = []
    for index, mask in enumerate(_row_masks(call, items, rows)):
        given = rows[index]
        if not holes:
            _check_no_holes(index, mask)
        ids = given[mask]
        if len(ids) == 0:
            if bos is None:
                raise ValueError(
                    f"prompt {index} is empty and the model has no beginning-of-text token; give a token"
                )
            ids = np.array([bos], dtype=np.int64)
            if len(given) == 0:
                given = ids
        check_token_ids(f"prompt {index}", given, vocab_size)
        with _naming_prompt(index, count):
            image_prompt = reader.prompt(ids, processed_images[index])
        prompts.append(Prompt(ids, given, image_prompt, is_chat(items[index])))
    return prompts


def _row_masks(call: Call, items: Sequence[Any], rows: Sequence[Array]) -> list[Array]:
    """The tokens of each row that are read, [n] bool. Without a mask, a block of token ids is
    padded with the pad token, as in transformers; other prompts need no padding."""
    are_texts = [isinstance(item, str) or is_chat(item) for item in items]
    if call.attention_mask is not None:
        return _masks(call.attention_mask, rows, are_texts)
    if call.pad is not None and not any(are_texts) and _is_block(call.inputs, rows):
        return [row != call.pad for row in rows]
    return [np.ones(len(row), dtype=bool) for row in rows]


def _is_block(inputs: Any, rows: Sequence[Array]) -> bool:
    """Whether token ids are [rows, tokens]: a 2-D array, or a list of rows of one length. A single
    row without that axis, and rows of different lengths, are no block."""
    if hasattr(inputs, "__array__"):
        return read_array("token ids", inputs).ndim == 2
    return not _is_ids(inputs) and len({len(row) for row in rows}) == 1


def _check_no_holes(index: int, mask: Array) -> None:
    """Raise ValueError if tokens of a prompt that are not read stand between tokens that are
    read."""
    places = np.flatnonzero(mask)
    if len(places) > 0 and places[-1] - places[0] + 1 != len(places):
        raise ValueError(
            f"prompt {index} has padding between its tokens, over which a recurrent model cannot go; put it before "
            "or after them, or give an attention_mask of ones to have every token read"
        )


@contextmanager
def _naming_prompt(index: int, count: int) -> Iterator[None]:
    """Name a prompt in the errors of its images, if there are several prompts."""
    try:
        yield
    except ArgumentError as error:
        if count == 1:
            raise
        raise ArgumentError(f"prompt {index}: {error}", error.argument) from None


def _items(inputs: Any) -> Sequence[Any]:
    """Each prompt as it was given."""
    if hasattr(inputs, "__array__"):
        ids = _as_array(inputs)
        if ids.ndim not in (1, 2):
            raise ValueError(
                f"input ids have shape {ids.shape}; give [rows, tokens], or a single row [tokens]"
            )
        return list(np.atleast_2d(ids))
    if isinstance(inputs, str) or is_chat(inputs) or _is_ids(inputs):
        return [inputs]
    if isinstance(inputs, Mapping | bytes) or not isinstance(inputs, Sequence):
        raise ValueError(f"inputs is a {type(inputs).__name__}; {_ACCEPTED_PROMPTS}")
    return inputs


def _row(
    index: int,
    item: Any,
    tokenizer: Tokenizer | None,
    chat: ChatOptions | None,
    images: list[Any],
    reader: ImageReader,
) -> tuple[Array, list[ProcessedImage]]:
    """The token ids of a prompt, [n] int64, and its images."""
    conversation = is_chat(item)
    if chat is not None and not conversation:
        raise ValueError(
            f"{', '.join(chat.given)} go with chat messages, and another kind of prompt was given"
        )
    if isinstance(item, str) or conversation:
        if tokenizer is None:
            raise ValueError("the package has no tokenizer, so it takes no text; give token ids")
        ids, processed = reader.encode(item, images, tokenizer, chat)
        return np.array(ids, dtype=np.int64), processed
    if hasattr(item, "__array__"):
        array = _as_array(item)
        if array.ndim == 1:
            return array, reader.process(images)
    elif _is_ids(item) or (isinstance(item, Sequence) and len(item) == 0):
        try:
            return np.array([*map(int, item)], dtype=np.int64), reader.process(images)
        except OverflowError:
            largest = shown(max(item, key=abs))
            raise ValueError(
                f"prompt {index} has token id {largest}; no model has so many tokens"
            ) from None
    raise ValueError(f"prompt {index} is {shown(item)}; {_ACCEPTED_PROMPTS}")


def is_chat(value: Any) -> bool:
    """Whether `value` is a conversation: a list of messages."""
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(isinstance(item, Mapping) for item in value)
    )


def _is_ids(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(map(is_integer, value))


def read_array(what: str, value: Any) -> Array:
    """`value` as an array, even a torch tensor on a device. Raises ValueError, with the name
    `what`."""
    try:
        return np.asarray(value.cpu() if hasattr(value, "cpu") else value)
    except Exception as error:  # of the other library, if a tensor has no data or another layout
        raise ValueError(
            f"{what} is {shown(value)}, which is not a plain array: {error}"
        ) from error


def _as_array(value: Any) -> Array:
    """An integer array of `value`, also of a torch tensor on a device."""
    array = read_array("token ids", value)
    if array.dtype.kind not in "iu":
        raise ValueError(f"token ids are {array.dtype}; give integers")
    if array.dtype.kind == "u" and array.size > 0 and array.max() >= _INT64_END:
        raise ValueError(f"a prompt has token id {array.max()}; no model has so many tokens")
    return array.astype(np.int64)


def _masks(attention_mask: Any, rows: Sequence[Array], texts: Sequence[bool]) -> list[Array]:
    """The tokens of each row that are read, bool."""
    if any(texts):
        raise ValueError(
            f"attention_mask goes with token ids, and prompt {texts.index(True)} is text; leave it out"
        )
    is_array = hasattr(attention_mask, "__array__") or not isinstance(attention_mask, Sequence)
    if not is_array and any(hasattr(row, "__len__") for row in attention_mask):
        masks = [read_array("attention_mask", row) for row in attention_mask]
    else:
        masks = list(np.atleast_2d(read_array("attention_mask", attention_mask)))
    wanted = [(len(row),) for row in rows]
    got = [mask.shape for mask in masks]
    if got != wanted or not all(np.isin(mask, (0, 1)).all() for mask in masks):
        raise ValueError(
            f"attention_mask must be 0 or 1 with the shape of the input ids, {_shape(wanted)}; it is {_shape(got)}"
        )
    return [mask.astype(bool) for mask in masks]


def _shape(rows: Sequence[tuple[int, ...]]) -> str:
    """The shape of an array of `rows`, or the shape of each row if they differ."""
    if len(set(rows)) == 1:
        return str((len(rows), *rows[0]))
    shapes = ("x".join(map(str, row)) for row in rows)
    return f"rows of {', '.join(shapes)}"


def check_token_ids(what: str, ids: Array, vocab_size: int) -> None:
    """Raise ValueError, with the owner `what`, unless every id is in [0, vocab_size)."""
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside) > 0:
        raise ArgumentError(
            f"{what} has token id {outside[0]}; the model's ids are 0 to {vocab_size - 1}",
            what if what.isidentifier() else None,
        )
