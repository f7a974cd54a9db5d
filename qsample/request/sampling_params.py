"""`SamplingParams`: how to choose tokens, checked; from keywords or from a model's generation_config.

Names and meanings are Hugging Face's. The effect of each value on the logits is fixed by the decode contract
(`docs/contract.md`). Needs the standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from qsample.checks import (
    check_fields,
    checked,
    integer,
    is_integer,
    is_number,
    number,
    plain,
    refuse,
)
from qsample.contract.tensors import EXTRA_PARAMETERS, LONGEST_MATCH, MOST_SPECULATIVE_TOKENS
from qsample.disk.untrusted import read_json
from qsample.errors import ArgumentError, shown, unknown
from qsample.request.refusals import UNSUPPORTED, without_refused

GENERATION_CONFIG_FILE: Final = "generation_config.json"
DEFAULT_NEW_TOKENS: Final = 256  # if neither the model nor the caller says how much to generate
HF_DEFAULT_TOP_K: Final = 50  # transformers samples with it if top_k is not set
SEEDS: Final = 2**63  # the number of seeds, from 0 on
DRAWN_SEEDS: Final = 2**52  # of fresh seeds: they and their successors are exact as numbers of JSON
INT32_MAX: Final = 2**31 - 1
FLOAT32_MAX: Final = 3.4028235e38
SMALLEST_TOP_P: Final = (
    1.1754944e-38  # the least normal float32: the likeliest token alone, of any mass
)
_TINY: Final = SMALLEST_TOP_P
_STRONGEST: Final = (
    1e6  # of a penalty: far beyond all logits, and far from numbers that they overflow with
)
LONGEST_TEXT: Final = 256  # characters: longer texts are neither tokens nor words to forbid

_ONLY_IF_SAMPLING: Final = ("top_h",)  # transformers ignores these in a greedy search
# A number of new tokens beats a total length, unless a caller gives the total length and only the model has the number.
_TOTALS: Final = {"max_length": "max_new_tokens", "min_length": "min_new_tokens"}


def _mirostat(name: str, value: Any) -> int:
    return (
        int(value)
        if is_integer(value) and value in (0, 2)
        else refuse(name, value, "0 (off) or 2 (Mirostat 2.0)")
    )


def _token_id(name: str, value: Any, accepted: str) -> int:
    return int(value) if is_integer(value, 0, INT32_MAX) else refuse(name, value, accepted)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Token ids, each once; a single id counts as a list."""
    accepted = "a token id >= 0, or a list of them"
    return tuple(
        dict.fromkeys(
            _token_id(name, item, accepted) for item in (value if _is_list(value) else (value,))
        )
    )


def _ids_or_texts(name: str, value: Any) -> tuple[int | str, ...] | None:
    accepted = f"a list of token ids, and of texts up to {LONGEST_TEXT} characters that are a single token, or None"
    items = _items(name, value, accepted)
    return (
        tuple(
            dict.fromkeys(
                item if _is_text(item) else _token_id(name, item, accepted) for item in items
            )
        )
        or None
    )


def _texts(name: str, value: Any) -> tuple[str, ...] | None:
    items = _items(
        name, value, accepted := f"a list of texts of 1 to {LONGEST_TEXT} characters, or None"
    )
    return (
        tuple(dict.fromkeys(items)) or None
        if all(map(_is_text, items))
        else refuse(name, value, accepted)
    )


def _id_sequences(name: str, value: Any) -> tuple[tuple[int, ...], ...] | None:
    accepted = f"a list of lists of 1 to {LONGEST_MATCH} token ids, or None"
    sequences = [_items(name, item, accepted) for item in _items(name, value, accepted)]
    if not all(1 <= len(sequence) <= LONGEST_MATCH for sequence in sequences):
        refuse(name, value, accepted)
    checked = (
        tuple(_token_id(name, item, accepted) for item in sequence) for sequence in sequences
    )
    return tuple(dict.fromkeys(checked)) or None


def _bias(name: str, value: Any) -> dict[int, float] | None:
    if not isinstance(value, Mapping):
        refuse(name, value, "a mapping of token ids to numbers, or None")
    checked = {}
    for token, amount in value.items():
        token = _token_id(f"{name} (token id)", token, "an integer >= 0")
        if not is_number(amount, -FLOAT32_MAX, FLOAT32_MAX) and amount != -math.inf:
            refuse(
                f"{name} of token {token}", amount, "a finite number, or -inf to forbid the token"
            )
        checked[token] = float(amount)
    return checked or None


def _name(name: str, value: Any) -> str | None:
    if value is not None and not (isinstance(value, str) and value):
        refuse(name, value, "the name of a loaded adapter, or None")
    return value


def _items(name: str, value: Any, accepted: str) -> list[Any]:
    """The items of a list, a tuple or an array."""
    return [plain(item) for item in value] if _is_list(value) else refuse(name, value, accepted)


def _is_list(value: Any) -> bool:
    return isinstance(plain(value), Iterable) and not isinstance(value, str | bytes | Mapping)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= LONGEST_TEXT


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the tokens of a row. The defaults sample from the model's distribution as it is.

    Args:
        temperature: >= 0; 0 = greedy.
        top_k: >= 0; 0 = off.
        top_p: in (0, 1]; 1 = off.
        min_p: in [0, 1]; 0 = off.
        repetition_penalty: 1e-6 to 1e6; 1 = off. For prompt and sampled tokens.
        presence_penalty, frequency_penalty: -1e6 to 1e6; 0 = off. For sampled tokens.
        min_length, max_length: total tokens, prompt included.
        min_new_tokens, max_new_tokens: sampled tokens. They win over min_length and max_length, as in transformers. A
            row always ends when its buffers are full.
        eos_token_id: an id or several; sampling any of them ends the row, and none can be sampled before min_length. By
            default the model's; () for none.
        seed: in [0, 2**63); the same seed gives the same tokens. By default a fresh seed, reported in the output.
        logit_bias: token id → a number added to its logit (-inf forbids the token). Needs the feature `logit_bias`.
        adapter: the name of a LoRA adapter that `load_adapter` loaded; None for the model without an adapter.
        prompt_lookup_num_tokens: in [0, 64]; 0 = off. The most tokens that a step guesses by looking for the row's last
            tokens in its text so far; changes how fast tokens come, and no token. Needs a package compiled with
            num_speculative_tokens of at least this number.

    The rest are for packages that were exported with a filter: `contract.EXTRA_PARAMETERS` has their meanings, and each
    field its range. Of these, dry_sequence_breakers are token ids, or texts of a single token each; bad_words_ids are
    sequences of 1 to 64 token ids, and bad_words the same as texts, forbidden alone and after a space; mirostat is 2
    for Mirostat 2.0, after the other filters, and 0 = off. With a penalty_last_n of 0 or more, the repetition, presence
    and frequency penalties are for that many newest tokens of the row, prompt included.

    Raises ValueError, naming the field, if a value is outside its range.

    >>> SamplingParams(temperature=0.7, top_p=0.9, max_new_tokens=64, seed=1)
    """

    temperature: float = number(
        1.0, 0, FLOAT32_MAX, "a finite number >= 0 (0 = greedy)", help="0 is greedy."
    )
    top_k: int = integer(
        0, 0, INT32_MAX, "an integer >= 0 (0 = off)", help="Keep the k likeliest tokens; 0 is off."
    )
    top_p: float = number(
        1.0,
        SMALLEST_TOP_P,
        1,
        "a number > 0 and <= 1 (1 = off)",
        help="Keep the nucleus of this mass; 1 is off.",
    )
    min_p: float = number(
        0.0,
        0,
        1,
        "a number from 0 to 1 (0 = off)",
        help="Keep tokens with this share of the likeliest's probability; 0 is off.",
    )
    repetition_penalty: float = number(
        1.0,
        1 / _STRONGEST,
        _STRONGEST,
        "a number from 1e-6 to 1e6 (1 = off)",
        help="On prompt and sampled tokens; 1 is off.",
    )
    presence_penalty: float = number(
        0.0,
        -_STRONGEST,
        _STRONGEST,
        "a number from -1e6 to 1e6 (0 = off)",
        help="On sampled tokens; 0 is off.",
    )
    frequency_penalty: float = number(
        0.0,
        -_STRONGEST,
        _STRONGEST,
        "a number from -1e6 to 1e6 (0 = off)",
        help="On sampled tokens, per occurrence; 0 is off.",
    )
    min_length: int = integer(0, 0, INT32_MAX, "an integer >= 0")
    min_new_tokens: int | None = integer(
        None, 0, INT32_MAX, "an integer >= 0, or None", help="No stop token before this many."
    )
    max_length: int | None = integer(None, 1, INT32_MAX, "an integer >= 1, or None")
    max_new_tokens: int | None = integer(
        None, 1, INT32_MAX, "an integer >= 1, or None", help="Stop after this many."
    )
    eos_token_id: tuple[int, ...] | None = checked(
        None,
        _token_ids,
        help="Token id that ends a row, replacing the model's own; may be repeated.",
        flag="--stop-id",
        repeated=int,
    )
    seed: int | None = integer(
        None,
        0,
        SEEDS - 1,
        "an integer from 0 to 2**63 - 1, or None for a fresh seed",
        help="Same seed, same tokens. (default: fresh, and shown)",
    )
    logit_bias: Mapping[int, float] | None = checked(None, _bias, hashed=False)
    adapter: str | None = checked(
        None,
        _name,
        help="A LoRA adapter by its name in --lora. (default: the only one)",
        metavar="NAME",
    )
    prompt_lookup_num_tokens: int = integer(
        0,
        0,
        MOST_SPECULATIVE_TOKENS,
        f"an integer from 0 to {MOST_SPECULATIVE_TOKENS} (0 = off)",
        help="Guess up to this many tokens a step from the text so far; changes the speed alone; 0 is off.",
    )
    typical_p: float = number(1.0, _TINY, 1, "a number > 0 and <= 1 (1 = off)")
    top_a: float = number(0.0, 0, 1, "a number from 0 to 1 (0 = off)")
    epsilon_cutoff: float = number(0.0, 0, 1, "a number from 0 to 1 (0 = off)")
    eta_cutoff: float = number(0.0, 0, 1, "a number from 0 to 1 (0 = off)")
    top_n_sigma: float = number(0.0, 0, FLOAT32_MAX, "a finite number >= 0 (0 = off)")
    xtc_probability: float = number(0.0, 0, 1, "a number from 0 to 1 (0 = off)")
    xtc_threshold: float = number(0.1, 0, 1, "a number from 0 to 1 (above 0.5 = off)")
    dry_multiplier: float = number(0.0, 0, FLOAT32_MAX, "a finite number >= 0 (0 = off)")
    dry_base: float = number(1.75, 1, FLOAT32_MAX, "a finite number >= 1")
    dry_allowed_length: int = integer(2, 1, INT32_MAX, "an integer >= 1")
    dry_penalty_last_n: int = integer(
        -1, -1, INT32_MAX, "an integer >= -1 (-1 = all tokens, 0 = off)"
    )
    dry_sequence_breakers: tuple[int | str, ...] | None = checked(
        None,
        _ids_or_texts,
        help="Text of a single token that ends a repetition; may be repeated.",
        flag="--dry-sequence-breaker",
        repeated=str,
    )
    penalty_last_n: int = integer(
        -1, -1, INT32_MAX, "an integer >= -1 (-1 = off, 0 = no token is penalized)"
    )
    no_repeat_ngram_size: int = integer(
        0, 0, LONGEST_MATCH + 1, "an integer from 0 to 65 (0 = off)"
    )
    bad_words_ids: tuple[tuple[int, ...], ...] | None = checked(None, _id_sequences)
    bad_words: tuple[str, ...] | None = checked(
        None,
        _texts,
        help="Text that must not come; may be repeated. (bad_words_ids)",
        flag="--bad-word",
        repeated=str,
    )
    dynatemp_range: float = number(0.0, 0, FLOAT32_MAX, "a finite number >= 0 (0 = off)")
    dynatemp_exponent: float = number(1.0, 0, FLOAT32_MAX, "a finite number >= 0")
    mirostat: int = checked(0, _mirostat, help="2 is Mirostat 2.0; 0 is off.")
    mirostat_tau: float = number(
        5.0, _TINY, FLOAT32_MAX, "a finite number > 0", help="Its target surprise, in bits."
    )
    mirostat_eta: float = number(0.1, 0, FLOAT32_MAX, "a finite number >= 0")
    adaptive_target: float = number(-1.0, -1, 1, "a number from 0 to 1 (negative = off)")
    adaptive_decay: float = number(0.9, 0, 0.99, "a number from 0 to 0.99")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.adaptive_target < 0:  # clients write any negative number
            object.__setattr__(self, "adaptive_target", -1.0)
        least, most = self.min_new_tokens, self.max_new_tokens
        if least is not None and most is not None and least > most:
            raise ArgumentError(
                f"min_new_tokens is {least}, more than max_new_tokens ({most})", "min_new_tokens"
            )

    @classmethod
    def from_generation_config(
        cls, config: Mapping[str, Any] | Any = None, **overrides: Any
    ) -> SamplingParams:
        """The parameters of a model's generation_config, with `overrides` on top: fields of this class, or do_sample.

        The defaults of a `config` (a mapping, a path, or an object with `to_dict()`) equal transformers': greedy unless
        do_sample is true, and top_k = 50 if it samples and top_k is not set. Keys that transformers does not know are
        ignored, too. An override of None switches a field off. One of SAMPLING_FIELDS implies do_sample=True. A
        max_length or min_length beats a max_new_tokens or min_new_tokens of the config.

        Raises ValueError for an unknown, contradictory or unsupported setting, and a value outside its range.

        >>> SamplingParams.from_generation_config({"do_sample": True, "temperature": 0.6}, top_p=0.9)
        """
        own = {"do_sample", *OFF}
        for name in overrides.keys() - own - UNSUPPORTED.keys():
            raise ValueError(unknown("unknown sampling option", name, own))
        config = settings_of(config)
        settings, do_sample = layered(config, overrides), _do_sample(config, overrides)
        ignored = () if do_sample else _ONLY_IF_SAMPLING
        settings = without_refused(
            UNSUPPORTED, {name: settings[name] for name in settings if name not in ignored}
        )
        if not do_sample:
            settings |= {**dict.fromkeys(SAMPLING_FIELDS), "temperature": 0.0}
        elif settings.get("top_k") is None and "top_k" not in overrides:
            settings["top_k"] = HF_DEFAULT_TOP_K
        if "eos_token_id" in overrides and overrides["eos_token_id"] is None:
            settings["eos_token_id"] = ()
        wanted = {name: settings[name] for name in OFF if settings.get(name) is not None}
        try:
            params = cls(**wanted)
        except ValueError as error:
            cls(
                **{name: value for name, value in wanted.items() if name in overrides}
            )  # the caller's own mistake
            raise ValueError(f"generation_config: {error}") from None
        if do_sample and params.temperature == 0:
            raise ValueError(
                "do_sample is true and temperature is 0; give a temperature > 0, or do_sample=False for greedy"
            )
        return params

    @property
    def filters(self) -> dict[str, str]:
        """The filters that the values ask for (names of `Features.filters`), each with the field that does."""
        return {
            filter_name: name
            for name, filter_name in _SWITCHES.items()
            if getattr(self, name) != OFF[name]
        }

    def value_of(self, parameter: str) -> Any:
        """The value that the graph reads as `parameter`, a name of the contract, before it is padded."""
        return (
            0.0 if parameter == "mirostat_tau" and not self.mirostat else getattr(self, parameter)
        )

    def total_length(self, prompt_length: int, padding: int = 0) -> int:
        """The most tokens of a row in the end, prompt included; the capacity may be less. padding: tokens of the prompt
        beyond the `prompt_length` that the model reads; only `max_length` counts them, as in transformers."""
        if self.max_new_tokens is not None:
            return prompt_length + self.max_new_tokens
        return (
            self.max_length - padding
            if self.max_length is not None
            else prompt_length + DEFAULT_NEW_TOKENS
        )

    def lengths(self, prompt_length: int, capacity: int, padding: int = 0) -> tuple[int, int]:
        """The contract's min_length and max_length of a row, cut to `capacity`: such a row ends with finish reason
        "length". Raises ValueError if not even a single token fits. prompt_length, padding: as for `total_length`."""
        if prompt_length >= capacity:
            raise ValueError(
                f"the prompt has {prompt_length} tokens and the context length is {capacity}; give at most "
                f"{capacity - 1}, or use a package with a larger ctx_len"
            )
        total = self.total_length(prompt_length, padding)
        if total <= prompt_length:
            counted = f"{prompt_length + padding} tokens" + (" with its padding" if padding else "")
            raise ValueError(
                f"max_length is {total + padding} and the prompt already has {counted}; raise max_length, or give "
                "max_new_tokens; it does not count the prompt"
            )
        least = (
            self.min_length - padding
            if self.min_new_tokens is None
            else prompt_length + self.min_new_tokens
        )
        return max(0, min(least, INT32_MAX)), min(total, capacity, INT32_MAX)


OFF: Final = {
    entry.name: entry.default for entry in fields(SamplingParams)
}  # a field that is off has its default
_INPUTS: Final = {spec.name: spec.meaning for specs in EXTRA_PARAMETERS.values() for spec in specs}
# What each field does, for its doors: the flags of the command line, the description of the server's fields.
HELP: Final[Mapping[str, str]] = {
    entry.name: entry.metadata.get("help")
    or f"{_INPUTS[entry.name][:1].upper()}{_INPUTS[entry.name][1:]}."
    for entry in fields(SamplingParams)
    if "help" in entry.metadata or entry.name in _INPUTS
}
# The fields that need a package with filters.
FILTER_FIELDS: Final = tuple(
    name for name in OFF if name in {*_INPUTS, *EXTRA_PARAMETERS, "bad_words"}
)
# Field → the filter that it switches on: the filter of its name, or the filter that has it as its first input.
_SWITCHES: Final = {
    name if name in OFF else specs[0].name: name for name, specs in EXTRA_PARAMETERS.items()
} | {"bad_words": "bad_words_ids"}
_CHANGE_GREEDY_TOKENS: Final = ("dry", "penalty_last_n", "no_repeat_ngram_size", "bad_words_ids")
# Fields that choose among several tokens, with the values that ask for nothing: transformers' own defaults, too.
SAMPLING_FIELDS: Final[Mapping[str, tuple[Any, ...]]] = {
    "temperature": (1,),
    "top_k": (0, HF_DEFAULT_TOP_K),
    "top_p": (1,),
    "min_p": (0,),
    **{
        name: (OFF[name],)
        for name, filter_name in _SWITCHES.items()
        if filter_name not in _CHANGE_GREEDY_TOKENS
    },
}


def settings_of(config: Any) -> dict[str, Any]:
    """The fields of a generation_config that are set: of a mapping, of an object with `to_dict()` such as
    transformers.GenerationConfig, or of the file at a path, or in the folder at a path; None has no fields. Raises
    ValueError for anything else."""
    if isinstance(config, str | Path):
        path = Path(config)
        file = path / GENERATION_CONFIG_FILE if path.is_dir() else path
        try:
            config = read_json(file, infinities=True)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"generation_config is {str(path)!r}, and {file} cannot be read: {error}"
            ) from error
        if not isinstance(config, dict):
            raise ValueError(f"generation_config is {str(path)!r}, and {file} is not a JSON object")
    elif config is None or callable(getattr(config, "to_dict", None)):
        config = {} if config is None else config.to_dict()
    elif not isinstance(config, Mapping):
        raise ValueError(
            f"generation_config is a {type(config).__name__}; give a mapping, a transformers.GenerationConfig, or the "
            "path of a generation_config.json or its folder"
        )
    return {name: value for name, value in config.items() if value is not None}


def layered(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of several layers, each on top of the layers before it, field by field as in transformers. A total
    length beats the number of new tokens of an earlier layer; within a layer, the number of new tokens counts."""
    settings: dict[str, Any] = {}
    for layer in layers:
        for total, new in _TOTALS.items():
            if layer.get(total) is not None:
                settings.pop(new, None)
        settings |= layer
    return settings


def _do_sample(settings: Mapping[str, Any], overrides: Mapping[str, Any]) -> bool:
    """Whether to sample, from do_sample and the overrides that imply it."""
    given = overrides.get("do_sample")
    sampling = {
        name: plain(overrides[name]) for name in SAMPLING_FIELDS if overrides.get(name) is not None
    }
    if given is not None and not isinstance(given, bool):
        raise ValueError(f"do_sample is {shown(given)}; give True or False")
    greedy = sampling.get("temperature") == 0 and not isinstance(sampling["temperature"], bool)
    if given is False:
        sampling = {
            name: value for name, value in sampling.items() if value not in SAMPLING_FIELDS[name]
        }
    if given is False and sampling and not greedy:
        listed = ", ".join(f"{name}={shown(value)}" for name, value in sampling.items())
        raise ValueError(f"do_sample=False chooses greedily, yet {listed} is given; drop either")
    if given is True and greedy:
        raise ValueError(
            "do_sample=True and temperature=0 contradict each other; temperature 0 is greedy"
        )
    if greedy:
        return False
    return given if given is not None else bool(sampling) or bool(settings.get("do_sample"))
