"""The flags that say how to choose tokens, and what they say to the Python API."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

import typer

from qsample.contract import EXTRA_PARAMETERS
from qsample.sampling_params import FILTER_FIELDS, OFF, SamplingParams

_MEANINGS: Final = {spec.name: spec.meaning for specs in EXTRA_PARAMETERS.values() for spec in specs}


def _flag(kind: Any, text: str, *names: str, **more: Any) -> Any:
    return Annotated[kind, typer.Option(*names, help=text, **{"rich_help_panel": "Sampling", **more})]


def _further(name: str) -> Any:
    """The flag of one of FILTER_FIELDS: a number, and what the contract says of it, unless told otherwise."""
    text = _MEANINGS.get(name, "")
    kind, text, *names = _NOT_AS_THE_CONTRACT.get(name) or (type(OFF[name]) | None, f"{text[:1].upper()}{text[1:]}.")
    return _flag(kind, text, *names, rich_help_panel="More sampling, for packages exported with --filter")


_TEXTS: Final = list[str] | None
_NOT_AS_THE_CONTRACT: Final[Mapping[str, tuple[Any, ...]]] = {
    "dry_sequence_breakers": (
        _TEXTS,
        "Text of one token that ends a repetition; may be repeated.",
        "--dry-sequence-breaker",
    ),
    "bad_words": (_TEXTS, "Text that may not come; may be repeated. (bad_words_ids)", "--bad-word"),
    "mirostat": (int | None, "2 is Mirostat 2.0; 0 is off."),
    "mirostat_tau": (float | None, "Its target surprise, in bits."),
}
FLAGS: Final[Mapping[str, Any]] = {
    "max_new_tokens": _flag(int | None, "Stop after this many.", min=1),
    "temperature": _flag(float | None, "0 is greedy."),
    "top_k": _flag(int | None, "Keep the k likeliest tokens; 0 is off."),
    "top_p": _flag(float | None, "Keep the nucleus of this mass; 1 is off."),
    "min_p": _flag(float | None, "Keep what has this share of the likeliest's probability; 0 is off."),
    "repetition_penalty": _flag(float | None, "On prompt and sampled tokens; 1 is off."),
    "presence_penalty": _flag(float | None, "On sampled tokens; 0 is off."),
    "frequency_penalty": _flag(float | None, "On sampled tokens, per occurrence; 0 is off."),
    "min_new_tokens": _flag(int | None, "No stop token before this many.", min=0),
    "stop_id": _flag(list[int] | None, "Token id that ends a row, in place of the model's own; may be repeated."),
    "stop_string": _flag(_TEXTS, "Text that ends a row, and is cut off with what follows; may be repeated."),
    "seed": _flag(int | None, "Same seed, same tokens. (default: a fresh one, shown)"),
    "greedy": _flag(bool, "Always take the likeliest token.", "--greedy"),
    **{name: _further(name) for name in FILTER_FIELDS if name != "bad_words_ids"},
}
_OTHER_NAMES: Final = {"stop_id": "eos_token_id", "stop_string": "stop_strings"}  # of `generate`


def with_sampling_flags(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with FLAGS behind its own parameters; `sampling_options` reads them from its context."""
    own = inspect.signature(command, eval_str=True).parameters

    def wrapped(**given: Any) -> None:
        command(**{name: given[name] for name in own})

    flags = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=False if name == "greedy" else None, annotation=of
        )
        for name, of in FLAGS.items()
    ]
    parameters = [*(one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own.values()), *flags]
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {one.name: one.annotation for one in parameters}
    wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
    return wrapped


def sampling_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a command line says of sampling, as options of `generate`. given: all its parameters, by name.

    Raises typer.BadParameter for a wrong value, before anything is loaded.
    """
    from qsample.text.stop_strings import check_stop_strings

    said = {_OTHER_NAMES.get(name, name): given[name] for name in FLAGS if name != "greedy"}
    options = {name: value for name, value in said.items() if value not in (None, (), [])}
    if given["greedy"]:
        options["do_sample"] = False
    stops = options.pop("stop_strings", None)
    try:
        SamplingParams.from_generation_config(None, **options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return options | ({} if stops is None else {"stop_strings": check_stop_strings(stops)})
