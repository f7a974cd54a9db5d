"""The settings that come with a model, in its generation_config: which features of a graph they need,
and which of them a package applies.

A caller's settings are followed or refused. A model's own are followed or named, and the run goes
on: whoever runs the model did not write them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from qsample.checks import is_integer, is_number
from qsample.contract.interface import Features, Interface
from qsample.errors import shown
from qsample.request.refusals import UNSUPPORTED_SETTINGS
from qsample.request.sampling_params import BIAS_FIELDS, FILTER_SWITCHES, OFF_VALUES, SamplingParams

# A function of a field's name and value that raises ValueError for a value outside the range.
Check = Callable[[str, Any], Any]

_LOGIT_BIAS: Final = "logit_bias"
_GUESSES: Final = "prompt_lookup_num_tokens"
_SUPPRESSED: Final = "suppress_tokens"
_SEQUENCE_BIAS: Final = "sequence_bias"
_FEWEST_NEW: Final = "min_new_tokens"
_MOST_NEW: Final = "max_new_tokens"
# Older versions of vLLM, and other tools, switch top_k off with this value.
_TOP_K_OFF: Final = -1


class AppliedSettings(NamedTuple):
    """The settings of a model that a package applies.

    Attributes:
        settings: these settings.
        left_out: a sentence that names the others, and says what to do; None without any.
    """

    settings: dict[str, Any]
    left_out: str | None


def with_needed(features: Features, settings: Mapping[str, Any]) -> Features:
    """`features`, and those without which a graph could not apply a model's own settings."""
    needed = {_need(name, value) for name, value in settings.items() if not _is_undone(name, value)}
    filters = [need for need in needed if need is not None and need != _LOGIT_BIAS]
    return replace(
        features,
        logit_bias=features.logit_bias or _LOGIT_BIAS in needed,
        filters=(*features.filters, *filters),
    )


def applied_settings(
    settings: Mapping[str, Any],
    interface: Interface,
    others: Mapping[str, Check | None] | None = None,
    changed: Collection[str] = (),
) -> AppliedSettings:
    """The settings of a model that a package applies.

    Args:
        settings: the fields of the model's generation_config.
        interface: the interface of the package.
        others: the fields that are no fields of SamplingParams, and that the caller applies; each
            with its check, or None without one.
        changed: the fields that the caller changed. Their values stay as they are, also those
            outside the range.
    """
    others = others or {}
    features = interface.features
    applied: dict[str, Any] = {}
    lacking: list[str] = []
    undone: list[str] = []
    wrong: dict[str, Any] = {}
    read = {
        name: _fitted(name, value, interface) for name, value in _read(settings, changed).items()
    }
    for name, value in read.items():
        need = _need(name, value)
        if name not in others and _is_undone(name, value):
            undone.append(name)
        elif name not in changed and not _is_valid(name, value, interface, others.get(name)):
            wrong[name] = value
        elif need is not None and not _has(features, need):
            lacking.append(name)
        else:
            applied[name] = value
    if _FEWEST_NEW not in changed and _contradicts_most_new(applied):
        wrong[_FEWEST_NEW] = applied.pop(_FEWEST_NEW)
    sentences = []
    if lacking:
        sentences.append(
            f"{_quoted(lacking)}, which the package was made without (export or bake the model again: the package "
            "then has what its settings need)"
        )
    if undone:
        sentences.append(
            f"{_quoted(undone)}, which qsample does not do (the tokens differ from transformers')"
        )
    if wrong:
        values = ", ".join(f'"{name}": {shown(value)}' for name, value in wrong.items())
        sentences.append(f"{values}, which is outside the accepted range (it is left out)")
    left_out = ". It also asks for ".join(sentences)
    return AppliedSettings(
        applied, f"the model's generation_config.json asks for {left_out}" if sentences else None
    )


def _quoted(names: list[str]) -> str:
    """Fields of a file, in quotes: the command line writes names without quotes as its options."""
    return ", ".join(f'"{name}"' for name in names)


def _read(settings: Mapping[str, Any], changed: Collection[str]) -> dict[str, Any]:
    """The settings, in SamplingParams' words for what other tools say in their own.

    A top_k of -1 is off. With a temperature of 0, vLLM and llama.cpp take the likeliest token,
    whatever do_sample is.
    """
    read = dict(settings)
    if "top_k" not in changed and is_integer(read.get("top_k"), _TOP_K_OFF, _TOP_K_OFF):
        read["top_k"] = OFF_VALUES["top_k"]
    is_own = "temperature" not in changed and "do_sample" not in changed
    if is_own and read.get("do_sample") and is_number(read.get("temperature"), 0, 0):
        read["do_sample"] = False
    return read


def _is_valid(name: str, value: Any, interface: Interface, check: Check | None) -> bool:
    """Whether a value is in the range of its field, and the model has all tokens that it names.

    Args:
        name, value: the field and its value.
        interface: the interface of the package.
        check: the check of a field that is none of SamplingParams; None without one.
    """
    if value is None:
        return True
    try:
        if check is not None:
            check(name, value)
        if name not in OFF_VALUES:
            return True
        params = SamplingParams(**{name: value})
    except ValueError:
        return False
    return all(token < interface.vocab_size for token in _named_tokens(params))


def _named_tokens(params: SamplingParams) -> Iterator[int]:
    """The token ids in the fields of `params`."""
    yield from params.eos_token_id or ()
    for bias in params.biases.values():
        yield from bias
    for ids in params.bad_words_ids or ():
        yield from ids
    for breaker in params.dry_sequence_breakers or ():
        if not isinstance(breaker, str):
            yield breaker


def _contradicts_most_new(settings: Mapping[str, Any]) -> bool:
    """Whether no answer is as long as min_new_tokens without being longer than max_new_tokens."""
    least = settings.get(_FEWEST_NEW)
    most = settings.get(_MOST_NEW)
    return least is not None and most is not None and least > most


def _need(name: str, value: Any) -> str | None:
    """The feature that a setting needs: `logit_bias`, or the name of a filter; None for none."""
    if value is None or value in ([], (), {}):
        return None
    if name in BIAS_FIELDS:
        return _LOGIT_BIAS
    return FILTER_SWITCHES.get(name) if value != OFF_VALUES.get(name) else None


def _has(features: Features, need: str) -> bool:
    return features.logit_bias if need == _LOGIT_BIAS else need in features.filters


def _is_undone(name: str, value: Any) -> bool:
    """Whether no package applies a setting."""
    if name in UNSUPPORTED_SETTINGS:
        return UNSUPPORTED_SETTINGS[name].applies_to(value)
    return name == _SEQUENCE_BIAS and not _is_of_single_tokens(value)


def _is_of_single_tokens(sequence_bias: Any) -> bool:
    try:
        SamplingParams(sequence_bias=sequence_bias)
    except ValueError:
        return False
    return True


def _fitted(name: str, value: Any, interface: Interface) -> Any:
    """A setting in the values that a package takes, without a change of any token."""
    if name == _GUESSES and is_integer(value):
        return min(value, interface.features.num_speculative_tokens)
    if name == _SUPPRESSED and isinstance(value, list | tuple):
        return [token for token in value if is_integer(token, 0, interface.vocab_size - 1)]
    return value
