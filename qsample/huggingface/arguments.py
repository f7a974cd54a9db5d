"""The keywords of `generate`, those of transformers among them, as a `Call`: sorted, checked, with defaults."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from qsample.errors import shown, unknown, without_refused
from qsample.huggingface.configs import read_generation_config
from qsample.huggingface.keywords import BOOKKEEPING, GENERATE
from qsample.package.manifest import TokenIds
from qsample.request.call import Call
from qsample.request.checks import is_integer, is_number, plain
from qsample.request.sampling_params import OFF, UNSUPPORTED, SamplingParams, layered
from qsample.text.chat import ChatOptions

SAMPLING: Final = frozenset({"do_sample", *OFF, *UNSUPPORTED})
KEYWORDS: Final = frozenset(  # of generate and of this function, in addition to SAMPLING
    {"inputs", "params", "input_ids", "attention_mask", "generation_config", "streamer", "seed", "allowed_tokens"}
    | {"prefill_chunk_size", "flush_every", "double_buffering", "stop_strings", "max_time", "tokenizer"}
    | {"pad_token_id", "bos_token_id", "stopping_criteria", "logits_processor", "return_dict_in_generate"}
    | {"num_return_sequences", "prediction", *(entry.name for entry in fields(ChatOptions))}
)
# A caller's GenerationConfig may ask for these outputs. The rest of `GENERATE` may be in a model's own file.
_OUTPUTS: Final = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_TAKEN_AS_THEY_ARE: Final = ("seed", "allowed_tokens", "prediction", "tokenizer", "stopping_criteria")
_NOT_OF_A_ROW: Final = ("stop_strings", "max_time", "num_return_sequences")


def read_call(
    inputs: Any, params: Any, keywords: Mapping[str, Any], own: Mapping[str, Any], token_ids: TokenIds, vocab_size: int
) -> Call:
    """The arguments of a call of `generate` as a `Call`.

    Args:
        inputs, params, keywords: the arguments; no inputs are a single empty prompt. A keyword beats the caller's
            generation_config, which beats the model's; neither of the two counts if `params` are given.
        own: the model's generation_config.
        token_ids, vocab_size: of the package.

    Raises ValueError for an unknown keyword, a keyword that means nothing here and asks for something, and a wrong
    value.
    """
    chat, rest = ChatOptions.split(keywords)
    config = rest.pop("generation_config", None)
    if callable(getattr(params, "to_dict", None)):  # transformers' second positional argument
        config, params = params, None
    given = {} if config is None else read_generation_config(config)
    if given and params is not None:
        raise ValueError("params and generation_config were given; put everything into either")
    without_refused(GENERATE, {name: given[name] for name in _OUTPUTS if name in given})
    rest = without_refused(GENERATE, rest)
    for name in ("pad_token_id", "bos_token_id"):
        if name in rest:
            given[name] = _token_id(name, rest.pop(name), vocab_size)
    settings = layered(own, given)
    apart = {name: settings.pop(name, None) for name in _NOT_OF_A_ROW}
    apart = (apart if params is None else {}) | {name: rest.pop(name) for name in _NOT_OF_A_ROW if name in rest}
    inputs, attention_mask = _inputs(inputs, rest)
    return_dict = rest.pop("return_dict_in_generate", None)
    if return_dict is not None and not isinstance(return_dict, bool):
        raise ValueError(f"return_dict_in_generate is {shown(return_dict)}; give True, False or None")
    processors = rest.pop("logits_processor", None)
    as_they_are = {name: rest.pop(name) for name in _TAKEN_AS_THEY_ARE if name in rest}
    eos, pad = rest.get("eos_token_id", settings.get("eos_token_id")), _setting(settings, "pad_token_id")
    ends = _ids(token_ids.eos if eos is None and "eos_token_id" not in rest else eos)
    return Call(
        inputs=inputs,
        params=_sampling_params(params, settings, rest),
        attention_mask=attention_mask,
        # transformers' rule: the pad token is not read, unless it ends a row as well, as it may then be text.
        pad=None if pad in ends else pad,
        fill=next(iter(_ids(eos)), None) if pad is None else pad,
        bos=_setting(settings, "bos_token_id"),
        chat=chat,
        logits_processor=None if isinstance(processors, Collection) and not processors else processors,
        stop_strings=apart.get("stop_strings"),
        max_time=_seconds(apart.get("max_time")),
        num_return_sequences=_count(apart.get("num_return_sequences")),
        return_dict=return_dict,
        **as_they_are,
    )


def _sampling_params(
    params: Any, settings: Mapping[str, Any], keywords: dict[str, Any]
) -> SamplingParams | Sequence[SamplingParams]:
    """`params`, or those of the settings with the keywords on top. Raises ValueError."""
    keywords = {name: value for name, value in keywords.items() if name not in BOOKKEEPING}
    for name in keywords.keys() - SAMPLING:
        if name in KEYWORDS:
            raise ValueError(f"{name} is an argument of generate, for a batch; leave it out here")
        raise ValueError(unknown("generate has no argument", name, SAMPLING - UNSUPPORTED.keys() | KEYWORDS))
    if params is None:
        return SamplingParams.from_generation_config(settings, **keywords)
    if keywords:
        raise ValueError(f"params and {', '.join(keywords)} were given; put everything into params, or leave it out")
    rows = [params] if isinstance(params, SamplingParams) else params
    if not isinstance(rows, Sequence) or not all(isinstance(row, SamplingParams) for row in rows):
        raise ValueError(
            f"params is {shown(params)}; give a SamplingParams, or a list of them, for each prompt its own"
        )
    return params  # type: ignore[no-any-return]


def _inputs(inputs: Any, keywords: dict[str, Any]) -> tuple[Any, Any]:
    """The prompts and their mask, in whichever of the ways they are given."""
    named, mask = keywords.pop("input_ids", None), keywords.pop("attention_mask", None)
    if inputs is not None and named is not None:
        raise ValueError("inputs and input_ids were given, which are two names of the same argument; give either")
    inputs = named if inputs is None else inputs
    if isinstance(inputs, Mapping) and "input_ids" in inputs:
        others = without_refused(GENERATE, inputs).keys() - {"input_ids", "attention_mask"}
        if others:
            raise ValueError(
                f"inputs has {', '.join(sorted(map(repr, others)))}; give a mapping of input_ids and attention_mask"
            )
    return ([[]] if inputs is None else inputs), mask


def _ids(ids: Any) -> list[Any]:
    ids = plain(ids)
    return [] if ids is None else list(ids) if isinstance(ids, Collection) else [ids]


def _setting(settings: Mapping[str, Any], name: str) -> int | None:
    """A token id of the settings; in a model's file, a negative number means that there is none."""
    value = settings.get(name)
    return int(value) if is_integer(value, 0) else None


def _token_id(name: str, value: Any, vocab_size: int) -> int | None:
    value = value.item() if hasattr(value, "item") and getattr(value, "size", None) in (1, ()) else value
    if value is None:
        return None
    if not is_integer(value, 0, vocab_size - 1):
        raise ValueError(f"{name} is {shown(value)}; give a token id of the model, 0 to {vocab_size - 1}")
    return int(value)


def _count(value: Any) -> int:
    if value is not None and not is_integer(value, 1):
        raise ValueError(f"num_return_sequences is {shown(value, 60)}; give an integer >= 1, or None for 1")
    return int(value or 1)


def _seconds(value: Any) -> float | None:
    if value is not None and not (is_number(value) and value > 0):
        raise ValueError(f"max_time is {shown(value)}; give a number of seconds > 0, or None")
    return None if value is None else float(value)
