"""`Call`: the arguments of `generate` or of a request to an engine, read from keywords; its prompts as token ids."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from qsample.checks import is_integer, is_number, plain, refuse
from qsample.contract.arrays import Array
from qsample.errors import ArgumentError, shown, unknown
from qsample.images.prompt import ImagePrompt, ProcessedImage
from qsample.package.manifest import TokenIds
from qsample.request.refusals import BOOKKEEPING, GENERATE, UNSUPPORTED, without_refused
from qsample.request.sampling_params import OFF, SamplingParams, layered, settings_of
from qsample.runtime.image_prompts import TEXT_ONLY, ImageReader, images_of_prompts
from qsample.text.chat import CHAT_OPTIONS, ChatOptions
from qsample.text.tokenizer import Tokenizer

SAMPLING: Final = frozenset({"do_sample", *OFF, *UNSUPPORTED})
# Arguments of a Call that every caller has.
_OWN: Final = frozenset(
    {"attention_mask", "seed", "allowed_tokens", "stop_strings", "return_dict_in_generate"}
) | {*("num_return_sequences", "outputs", "images")}
KEYWORDS: Final = _OWN | {  # in addition to SAMPLING
    *(
        "inputs",
        "params",
        "input_ids",
        "generation_config",
        "streamer",
        "prefill_chunk_size",
        "flush_every",
    ),
    *(
        "double_buffering",
        "max_time",
        "tokenizer",
        "pad_token_id",
        "bos_token_id",
        "stopping_criteria",
    ),
    *("logits_processor", "prediction", *CHAT_OPTIONS),
}
# A caller's GenerationConfig may ask for these outputs. The rest of `GENERATE` may be in a model's own file.
_OUTPUTS: Final = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_TAKEN_AS_THEY_ARE: Final = frozenset(
    {"seed", "allowed_tokens", "outputs", "prediction", "tokenizer", "stopping_criteria", "images"}
)
_NOT_OF_A_ROW: Final = ("stop_strings", "max_time", "num_return_sequences")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Prompts, and how to continue them. `read_call` makes a Call of keywords.

    The fields are arguments of `CausalLM.generate`, described there, and these:

    Args:
        images: as there, or some of them as `ProcessedImage`.
        pad: the token id that is padding if no mask is given; by default, every token is read.
        fill: the token id after a row's end, and before a shorter prompt; by default the package's pad token.
        bos: the token id that an empty prompt becomes; by default the package's.
        chat: options of chat messages.
        prediction: the text or the token ids that the continuation of a single prompt is expected to have: they are
            guessed, in packages that were compiled with num_speculative_tokens. Changes the speed alone.
        outputs: the optional outputs to return, a list of names; by default all that the package has. The other outputs
            are not read from the device.
        return_dict: False for an array of the sequences alone from `generate`.
    """

    inputs: Any
    params: SamplingParams | Sequence[SamplingParams]
    images: Any = None
    attention_mask: Any = None
    pad: int | None = None
    fill: int | None = None
    bos: int | None = None
    chat: ChatOptions | None = None
    tokenizer: Any = None
    seed: Any = None
    stop_strings: str | Sequence[str] | None = None
    allowed_tokens: Any = None
    outputs: Any = None
    prediction: Any = None
    stopping_criteria: Any = None
    logits_processor: Any = None
    max_time: float | None = None
    num_return_sequences: int = 1
    return_dict: bool | None = None


def read_call(
    inputs: Any,
    params: Any,
    keywords: Mapping[str, Any],
    own: Mapping[str, Any],
    token_ids: TokenIds,
    vocab_size: int,
) -> Call:
    """The arguments of a call of `generate` as a `Call`. No inputs are a single empty prompt. A keyword beats the
    caller's generation_config, and that beats `own`, the model's; neither of the two counts if `params` are given.
    Raises ValueError for an unknown or unsupported keyword, and for a wrong value."""
    if isinstance(params, SamplingParams) and keywords.keys() <= _OWN:
        chat, settings, rest = None, own, dict(keywords)
    else:
        chat, params, settings, rest = _like_transformers(params, keywords, own, vocab_size)
    defaults = settings if params is None else {}
    apart = {name: rest.pop(name, defaults.get(name)) for name in _NOT_OF_A_ROW}
    inputs, attention_mask = _inputs(inputs, rest)
    return_dict = rest.pop("return_dict_in_generate", None)
    if return_dict is not None and not isinstance(return_dict, bool):
        refuse("return_dict_in_generate", return_dict, "True, False or None")
    processors = rest.pop("logits_processor", None)
    as_they_are = {name: rest.pop(name) for name in _TAKEN_AS_THEY_ARE if name in rest}
    eos, pad = (
        rest.get("eos_token_id", settings.get("eos_token_id")),
        _setting(settings, "pad_token_id"),
    )
    ends = _ids(token_ids.eos if eos is None and "eos_token_id" not in rest else eos)
    if rest or not isinstance(params, SamplingParams):
        rows = {name: value for name, value in settings.items() if name not in _NOT_OF_A_ROW}
        params = _sampling_params(params, rows, rest)
    return Call(
        inputs=inputs,
        params=params,
        attention_mask=attention_mask,
        # transformers' rule: the pad token is not read, unless it ends a row as well, as it may then be text.
        pad=None if pad in ends else pad,
        fill=next(iter(_ids(eos)), None) if pad is None else pad,
        bos=_setting(settings, "bos_token_id"),
        chat=chat,
        logits_processor=None
        if isinstance(processors, Collection) and not processors
        else processors,
        stop_strings=apart["stop_strings"],
        max_time=_seconds(apart["max_time"]),
        num_return_sequences=_count(apart["num_return_sequences"]),
        return_dict=return_dict,
        **as_they_are,
    )


def _like_transformers(
    params: Any, keywords: Mapping[str, Any], own: Mapping[str, Any], vocab_size: int
) -> tuple[ChatOptions | None, Any, dict[str, Any], dict[str, Any]]:
    """The options of chat messages, the parameters, the settings of both generation_configs, and the other keywords."""
    chat = {
        name: value
        for name, value in keywords.items()
        if name in CHAT_OPTIONS and value is not None
    }
    rest = {name: value for name, value in keywords.items() if name not in CHAT_OPTIONS}
    config = rest.pop("generation_config", None)
    if callable(getattr(params, "to_dict", None)):  # transformers' second positional argument
        config, params = params, None
    given = {} if config is None else settings_of(config)
    if given and params is not None:
        raise ValueError("params and generation_config were given; put everything into either")
    without_refused(GENERATE, {name: given[name] for name in _OUTPUTS if name in given})
    rest = without_refused(GENERATE, rest)
    for name in ("pad_token_id", "bos_token_id"):
        if name in rest:
            given[name] = _token_id(name, rest.pop(name), vocab_size)
    options = ChatOptions(**chat) if chat else None
    return options if options and options.given else None, params, layered(own, given), rest


def _sampling_params(
    params: Any, settings: Mapping[str, Any], keywords: dict[str, Any]
) -> SamplingParams | Sequence[SamplingParams]:
    """`params`, or the parameters of the settings with the keywords on top. Raises ValueError."""
    keywords = {name: value for name, value in keywords.items() if name not in BOOKKEEPING}
    for name in keywords.keys() - SAMPLING:
        if name in KEYWORDS:
            raise ValueError(f"{name} is an argument of generate, for a batch; leave it out here")
        raise ValueError(
            unknown("generate has no argument", name, SAMPLING - UNSUPPORTED.keys() | KEYWORDS)
        )
    if params is None:
        return SamplingParams.from_generation_config(settings, **keywords)
    if keywords:
        raise ValueError(
            f"params and {', '.join(keywords)} were given; put everything into params, or leave it out"
        )
    rows = [params] if isinstance(params, SamplingParams) else params
    if not isinstance(rows, Sequence) or not all(isinstance(row, SamplingParams) for row in rows):
        refuse("params", params, "a SamplingParams, or a list of them, for each prompt its own")
    return params  # type: ignore[no-any-return]


def _inputs(inputs: Any, keywords: dict[str, Any]) -> tuple[Any, Any]:
    """The prompts and their mask, in whichever argument they are given."""
    named, mask = keywords.pop("input_ids", None), keywords.pop("attention_mask", None)
    if inputs is not None and named is not None:
        raise ValueError(
            "inputs and input_ids were given, which are two names of the same argument; give either"
        )
    inputs = named if inputs is None else inputs
    if isinstance(inputs, Mapping) and "input_ids" in inputs:
        others = without_refused(GENERATE, inputs).keys() - {"input_ids", "attention_mask"}
        if others:
            raise ValueError(
                f"inputs has {', '.join(sorted(map(repr, others)))}; give a mapping of input_ids and attention_mask"
            )
        mask = inputs.get("attention_mask") if mask is None else mask
        inputs = inputs["input_ids"]
    return ([[]] if inputs is None else inputs), mask


def _ids(ids: Any) -> list[Any]:
    ids = plain(ids)
    return [] if ids is None else list(ids) if isinstance(ids, Collection) else [ids]


def _setting(settings: Mapping[str, Any], name: str) -> int | None:
    """A token id of the settings; in a model's file, a negative number means that there is none."""
    value = settings.get(name)
    return int(value) if is_integer(value, 0) else None


def _token_id(name: str, value: Any, vocab_size: int) -> int | None:
    value = (
        value.item()
        if hasattr(value, "item") and getattr(value, "size", None) in (1, ())
        else value
    )
    if value is None:
        return None
    if not is_integer(value, 0, vocab_size - 1):
        refuse(name, value, f"a token id of the model, 0 to {vocab_size - 1}")
    return int(value)


def _count(value: Any) -> int:
    if value is not None and not is_integer(value, 1):
        refuse("num_return_sequences", value, "an integer >= 1, or None for 1")
    return int(value or 1)


def _seconds(value: Any) -> float | None:
    if value is not None and not (is_number(value) and value > 0):
        refuse("max_time", value, "a number of seconds > 0, or None")
    return None if value is None else float(value)


_ACCEPTED: Final = (
    "give a text, token ids, a list of either, a 2-D integer array (with attention_mask if it is padded), or chat "
    'messages [{"role": ..., "content": ...}]'
)
_INT64: Final = 2**63


class Prompt(NamedTuple):
    """ids: [n] int64, n >= 1, the tokens that the model reads. given: [m] int64, the same tokens and their padding.
    images: of the prompt, None without any."""

    ids: Array
    given: Array
    images: ImagePrompt | None = None

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
    """The prompts of a call, with the inputs of `CausalLM.generate`, every id in [0, vocab_size). Raises ValueError.
    bos: the token id that an empty prompt becomes, an error without it. holes: padding between tokens is valid."""
    items, attention_mask = _items(call.inputs), call.attention_mask
    if not len(items):
        raise ValueError("no prompt was given; give at least a single prompt")
    pairs = zip(items, images_of_prompts(call.images, len(items)), strict=True)
    read = []
    for index, (item, own) in enumerate(pairs):
        with _named(index, len(items)):
            read.append(_row(index, item, tokenizer, call.chat, own, reader))
    rows, images = [ids for ids, _ in read], [own for _, own in read]
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
                raise ValueError(
                    f"prompt {index} is empty and the model has no beginning-of-text token; give a token"
                )
            ids = np.array([bos], dtype=np.int64)
            given = given if len(given) else ids
        check_token_ids(f"prompt {index}", given, vocab_size)
        with _named(index, len(items)):
            image_prompt = reader.prompt(ids, images[index])
        prompts.append(Prompt(ids, given, image_prompt))
    return prompts


@contextmanager
def _named(index: int, count: int) -> Iterator[None]:
    """Name the prompt, one of `count`, in errors of its images."""
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
        raise ValueError(f"inputs is a {type(inputs).__name__}; {_ACCEPTED}")
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
    raise ValueError(f"prompt {index} is {shown(item)}; {_ACCEPTED}")


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
    """`value` as an array, even a torch tensor on a device. Raises ValueError, with the name `what`."""
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
    if array.dtype.kind == "u" and array.size and array.max() >= _INT64:
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
    wanted, got = [(len(row),) for row in rows], [mask.shape for mask in masks]
    if got != wanted or not all(np.isin(mask, (0, 1)).all() for mask in masks):
        raise ValueError(
            f"attention_mask must be 0 or 1 with the shape of the input ids, {_shape(wanted)}; it is {_shape(got)}"
        )
    return [mask.astype(bool) for mask in masks]


def _shape(rows: Sequence[tuple[int, ...]]) -> str:
    same = len(set(rows)) == 1
    return (
        str((len(rows), *rows[0]))
        if same
        else f"rows of {', '.join('x'.join(map(str, row)) for row in rows)}"
    )


def check_token_ids(what: str, ids: Array, vocab_size: int) -> None:
    """Raise ValueError, with the owner `what`, unless every id is in [0, vocab_size)."""
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise ValueError(
            f"{what} has token id {outside[0]}; the model's ids are 0 to {vocab_size - 1}"
        )
