"""vLLM's names of sampling parameters → the arguments of `generate` and `Engine.add_request`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from qsample.checks import is_integer, plain, refuse
from qsample.errors import unknown

# vLLM's name → the argument with the same meaning and the same values.
NAMES: Final[Mapping[str, str]] = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "n": "num_return_sequences",
    "stop": "stop_strings",
}
# The names that together make an eos_token_id.
_IGNORE_EOS: Final = "ignore_eos"
_STOP_TOKEN_IDS: Final = "stop_token_ids"
# Parameters of vLLM that are no fields of SamplingParams here, but arguments.
_ARGUMENTS: Final = {
    **NAMES,
    _IGNORE_EOS: "eos_token_id",
    _STOP_TOKEN_IDS: "eos_token_id",
    "skip_special_tokens": "skip_special_tokens",
    "include_stop_str_in_output": "include_stop_str_in_output",
    "repetition_detection": "repetition_detection",
    "allowed_token_ids": "allowed_token_ids",
    "structured_outputs": "grammar",
    "thinking_token_budget": "thinking_token_budget",
}


def with_own_names(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords with the names here in place of vLLM's. None counts as left out, as in vLLM. Raises
    ValueError if both names of an argument are given."""
    renamed = {name: value for name, value in keywords.items() if name not in NAMES}
    for name, own in NAMES.items():
        if keywords.get(name) is None:
            continue
        if own in keywords:
            raise ValueError(
                f"{name} and {own} were given, which are two names of the same argument; give either"
            )
        renamed[own] = keywords[name]
    return renamed


def take_stop_tokens(keywords: dict[str, Any], ends: Any) -> None:
    """Put eos_token_id in place of vLLM's ignore_eos and stop_token_ids, which come on top of the
    model's stop tokens.

    Args:
        keywords: the keywords, which are changed.
        ends: the model's stop tokens, an id or a list of ids.

    Raises:
        ValueError: a value is wrong, or eos_token_id is given, too.
    """
    ignore_eos = keywords.pop(_IGNORE_EOS, None)
    more = plain(keywords.pop(_STOP_TOKEN_IDS, None))
    if ignore_eos not in (None, False, True):
        refuse(_IGNORE_EOS, ignore_eos, "True or False")
    is_list = isinstance(more, Collection) and not isinstance(more, str | bytes | Mapping)
    if more is not None and not (is_list and all(is_integer(item, 0) for item in more)):
        refuse(_STOP_TOKEN_IDS, more, "a list of token ids")
    if not (ignore_eos or more):
        return
    if "eos_token_id" in keywords:
        name = _IGNORE_EOS if ignore_eos else _STOP_TOKEN_IDS
        raise ValueError(
            f"{name} and eos_token_id were given, which both choose the stop tokens; give either"
        )
    listed = ends if isinstance(ends, Collection) else (ends,)
    kept = [] if ignore_eos else [end for end in listed if end is not None]
    keywords["eos_token_id"] = [*kept, *(more or ())]


def unknown_field(name: str, fields: Collection[str]) -> str:
    """The message about a name that is no field of SamplingParams."""
    own = _ARGUMENTS.get(name)
    if own is None:
        return unknown("unknown sampling option", name, fields)
    if own in fields:
        return f"SamplingParams has no field {name!r}; it is called {own} here"
    return (
        f"SamplingParams has no field {name!r}; give {own} to generate or add_request, for all rows"
    )
