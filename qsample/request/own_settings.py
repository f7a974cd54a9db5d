"""The settings that come with a model, in its generation_config: which features of a graph they need,
and which of them a package applies.

A caller's settings are followed or refused. A model's own are followed or named, and the run goes
on: whoever runs the model did not write them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from qsample.checks import is_integer
from qsample.contract.interface import Features, Interface
from qsample.request.refusals import UNSUPPORTED_SETTINGS
from qsample.request.sampling_params import BIAS_FIELDS, FILTER_SWITCHES, OFF_VALUES, SamplingParams

_LOGIT_BIAS: Final = "logit_bias"
_GUESSES: Final = "prompt_lookup_num_tokens"
_SUPPRESSED: Final = "suppress_tokens"
_SEQUENCE_BIAS: Final = "sequence_bias"


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
    settings: Mapping[str, Any], interface: Interface, others: Collection[str] = ()
) -> AppliedSettings:
    """The settings of a model that a package applies.

    Args:
        settings: the fields of the model's generation_config.
        interface: the interface of the package.
        others: the fields that are no fields of SamplingParams, and that the caller applies.
    """
    features = interface.features
    applied: dict[str, Any] = {}
    lacking: list[str] = []
    undone: list[str] = []
    for name, value in settings.items():
        need = _need(name, value)
        if name not in others and _is_undone(name, value):
            undone.append(name)
        elif need is not None and not _has(features, need):
            lacking.append(name)
        else:
            applied[name] = _fitted(name, value, interface)
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
    left_out = ". It also asks for ".join(sentences)
    return AppliedSettings(
        applied, f"the model's generation_config.json asks for {left_out}" if sentences else None
    )


def _quoted(names: list[str]) -> str:
    """Fields of a file, in quotes: the command line writes names without quotes as its options."""
    return ", ".join(f'"{name}"' for name in names)


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
