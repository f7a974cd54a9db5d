"""`SamplingParams`: how to choose tokens, checked; from keywords or from a model's
generation_config.

Names and meanings are Hugging Face's. The decode contract (`docs/contract.md`) defines the effect
of each value on the logits. This module needs the standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeVar

from qsample.checks import (
    as_path,
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
from qsample.errors import ArgumentError, shown
from qsample.package.disk.untrusted import read_json
from qsample.request.refusals import UNSUPPORTED_SETTINGS, without_refused
from qsample.request.vllm import unknown_field

T = TypeVar("T")

GENERATION_CONFIG_FILE: Final = "generation_config.json"
DEFAULT_NEW_TOKENS: Final = 256  # This holds if neither the model nor the caller sets a length.
HF_DEFAULT_TOP_K: Final = 50  # transformers samples with it if top_k is not set.
NUM_SEEDS: Final = 2**63  # Seeds are counted from 0.
# Fresh seeds are below this number: JSON numbers hold them and their successors exactly.
NUM_DRAWN_SEEDS: Final = 2**52
INT32_MAX: Final = 2**31 - 1
FLOAT32_MAX: Final = 3.4028235e38
_FLOAT32_MIN: Final = 1.1754944e-38  # The least normal number.
MIN_TOP_P: Final = _FLOAT32_MIN  # Only the likeliest token is in the nucleus.
# A penalty beyond this limit is far larger than all logits, and could make them overflow.
_MAX_PENALTY: Final = 1e6
MAX_TEXT_CHARACTERS: Final = 256  # Longer texts are neither tokens nor words to forbid.

# transformers ignores these fields in a greedy search.
_SAMPLING_ONLY_FIELDS: Final = ("top_h",)
# Field with a total length → field with a number of new tokens. The number beats the total length,
# unless a caller gives the total length and only the model has the number.
_NEW_TOKEN_FIELDS: Final = {"max_length": "max_new_tokens", "min_length": "min_new_tokens"}


def _mirostat(name: str, value: Any) -> int:
    if not is_integer(value) or value not in (0, 2):
        refuse(name, value, "0 (off) or 2 (Mirostat 2.0)")
    return int(value)


def _token_id(name: str, value: Any, accepted: str) -> int:
    if not is_integer(value, 0, INT32_MAX):
        refuse(name, value, accepted)
    return int(value)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Token ids, each once; a single id counts as a list."""
    accepted = "a token id >= 0, or a list of them"
    items = value if _is_list(value) else (value,)
    return _distinct(_token_id(name, item, accepted) for item in items)


def _ids_or_none(name: str, value: Any) -> tuple[int, ...] | None:
    return _token_ids(name, value) or None


def _ids_or_texts(name: str, value: Any) -> tuple[int | str, ...] | None:
    accepted = (
        f"a list of token ids, and of texts up to {MAX_TEXT_CHARACTERS} characters that are a "
        "single token, or None"
    )
    checked_items: list[int | str] = []
    for item in _items(name, value, accepted):
        checked_items.append(item if _is_text(item) else _token_id(name, item, accepted))
    return _distinct(checked_items) or None


def _texts(name: str, value: Any) -> tuple[str, ...] | None:
    accepted = f"a list of texts of 1 to {MAX_TEXT_CHARACTERS} characters, or None"
    items = _items(name, value, accepted)
    if not all(_is_text(item) for item in items):
        refuse(name, value, accepted)
    return _distinct(items) or None


def _id_sequences(name: str, value: Any) -> tuple[tuple[int, ...], ...] | None:
    accepted = f"a list of lists of 1 to {LONGEST_MATCH} token ids, or None"
    sequences: list[tuple[int, ...]] = []
    for item in _items(name, value, accepted):
        ids = _items(name, item, accepted)
        if not 1 <= len(ids) <= LONGEST_MATCH:
            refuse(name, value, accepted)
        sequences.append(tuple(_token_id(name, token, accepted) for token in ids))
    return _distinct(sequences) or None


def _bias(name: str, value: Any) -> dict[int, float] | None:
    if not isinstance(value, Mapping):
        refuse(name, value, "a mapping of token ids to numbers, or None")
    bias = {}
    for key, amount in value.items():
        token = _token_id(f"{name} (token id)", key, "an integer >= 0")
        bias[token] = _amount(name, token, amount)
    return bias or None


def _amount(name: str, token: int, amount: Any) -> float:
    if not is_number(amount, -FLOAT32_MAX, FLOAT32_MAX) and amount != -math.inf:
        refuse(f"{name} of token {token}", amount, "a finite number, or -inf to forbid the token")
    return float(amount)


def _sequence_bias(name: str, value: Any) -> dict[tuple[int], float] | None:
    """Transformers' mapping {(id,): number}, also of its list of [[id], number]."""
    accepted = (
        "a bias for each single token, as {(id,): number} or a list of [[id], number], or None; "
        "bad_words_ids forbids a sequence of several tokens"
    )
    entries = value.items() if isinstance(value, Mapping) else _items(name, value, accepted)
    bias = {}
    for entry in entries:
        if not _is_list(entry) or len(entry) != 2:
            refuse(name, value, accepted)
        ids, amount = entry
        ids = _items(name, ids, accepted)
        if len(ids) != 1:
            refuse(name, value, accepted)
        token = _token_id(name, ids[0], accepted)
        bias[(token,)] = _amount(name, token, plain(amount))
    return bias or None


def _name(name: str, value: Any) -> str | None:
    if value is not None and not (isinstance(value, str) and value):
        refuse(name, value, "the name of a loaded adapter, or None")
    return value


def _items(name: str, value: Any, accepted: str) -> list[Any]:
    """The items of a list, a tuple or an array."""
    if not _is_list(value):
        refuse(name, value, accepted)
    return [plain(item) for item in value]


def _distinct(items: Iterable[T]) -> tuple[T, ...]:
    """Each item once, in the order of the items."""
    return tuple(dict.fromkeys(items))


def _is_list(value: Any) -> bool:
    return isinstance(plain(value), Iterable) and not isinstance(value, str | bytes | Mapping)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= MAX_TEXT_CHARACTERS


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the tokens of a row. The defaults sample from the model's unchanged
    distribution.

    Args:
        temperature: the divisor of the logits, >= 0; 0 = greedy.
        top_k: the number of likeliest tokens to keep, >= 0; 0 = off.
        top_p: the probability mass of the nucleus to keep, in (0, 1]; 1 = off.
        min_p: the share of the likeliest token's probability that a token needs, in [0, 1]; 0 =
            off.
        repetition_penalty: the penalty on prompt and sampled tokens, 1e-6 to 1e6; 1 = off.
        presence_penalty, frequency_penalty: the penalties on sampled tokens, -1e6 to 1e6; 0 = off.
        min_length, max_length: the numbers of all tokens, prompt included.
        min_new_tokens, max_new_tokens: the numbers of sampled tokens. They take precedence over
            min_length and max_length, as in transformers. A row always ends when its buffers are
            full.
        eos_token_id: an id or several. A sampled token that is among them ends the row, and none of
            them can be sampled before min_length. By default the model's; () for none.
        seed: an integer in [0, 2**63). The same seed gives the same tokens. By default a fresh
            seed, which the output reports.
        logit_bias: token id → a number added to its logit; -inf forbids the token. Needs the
            feature `logit_bias`.
        sequence_bias: transformers' logit_bias, {(token id,): number}, for single tokens. Needs the
            feature `logit_bias`, too.
        suppress_tokens: token ids that are never sampled. Needs the feature `logit_bias`, too.
        adapter: the name of a LoRA adapter that `load_adapter` loaded; None for the model without
            an adapter.
        prompt_lookup_num_tokens: the most tokens that a step guesses by looking for the row's last
            tokens in its text so far, 0 to 64; 0 = off. It changes the speed only, never a token.
            Needs a package compiled with num_speculative_tokens of at least this number.

    The other fields need packages that were exported with a filter: `contract.EXTRA_PARAMETERS`
    describes them, and each field has its range. Among them, dry_sequence_breakers are token ids,
    or texts of a single token each; bad_words_ids are sequences of 1 to 64 token ids, and bad_words
    are texts, which are forbidden at the beginning and after a space; mirostat is 2 for Mirostat
    2.0, after the other filters, and 0 = off. With a penalty_last_n of 0 or more, the repetition,
    presence and frequency penalties only count the row's newest tokens, that many, prompt included.

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
        MIN_TOP_P,
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
        1 / _MAX_PENALTY,
        _MAX_PENALTY,
        "a number from 1e-6 to 1e6 (1 = off)",
        help="On prompt and sampled tokens; 1 is off.",
    )
    presence_penalty: float = number(
        0.0,
        -_MAX_PENALTY,
        _MAX_PENALTY,
        "a number from -1e6 to 1e6 (0 = off)",
        help="On sampled tokens; 0 is off.",
    )
    frequency_penalty: float = number(
        0.0,
        -_MAX_PENALTY,
        _MAX_PENALTY,
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
        NUM_SEEDS - 1,
        "an integer from 0 to 2**63 - 1, or None for a fresh seed",
        help="Same seed, same tokens. (default: fresh, and shown)",
    )
    logit_bias: Mapping[int, float] | None = checked(None, _bias, hashed=False)
    sequence_bias: Mapping[tuple[int], float] | None = checked(None, _sequence_bias, hashed=False)
    suppress_tokens: tuple[int, ...] | None = checked(None, _ids_or_none)
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
    typical_p: float = number(1.0, _FLOAT32_MIN, 1, "a number > 0 and <= 1 (1 = off)")
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
        5.0, _FLOAT32_MIN, FLOAT32_MAX, "a finite number > 0", help="Its target surprise, in bits."
    )
    mirostat_eta: float = number(0.1, 0, FLOAT32_MAX, "a finite number >= 0")
    adaptive_target: float = number(-1.0, -1, 1, "a number from 0 to 1 (negative = off)")
    adaptive_decay: float = number(0.9, 0, 0.99, "a number from 0 to 0.99")

    def __new__(cls, *values: Any, **named: Any) -> SamplingParams:
        """An empty object for `__init__`. Raises TypeError for a keyword that is no field, before
        Python's own, whose message has no remedy."""
        for name in named:
            if name not in OFF_VALUES:
                raise TypeError(unknown_field(name, OFF_VALUES))
        return object.__new__(cls)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.adaptive_target < 0:  # Any negative number means off.
            object.__setattr__(self, "adaptive_target", -1.0)
        least = self.min_new_tokens
        most = self.max_new_tokens
        if least is not None and most is not None and least > most:
            raise ArgumentError(
                f"min_new_tokens is {least}, more than max_new_tokens ({most})", "min_new_tokens"
            )

    @classmethod
    def from_generation_config(
        cls, config: Mapping[str, Any] | Any = None, **overrides: Any
    ) -> SamplingParams:
        """The parameters of a model's generation_config, with `overrides` on top.

        The defaults of a config equal transformers': greedy unless do_sample is true, and top_k =
        50 if it samples and top_k is not set. Keys that transformers does not know are ignored,
        too. A max_length or min_length in `overrides` takes precedence over a max_new_tokens or
        min_new_tokens of the config.

        Args:
            config: a mapping, a path, or an object with `to_dict()`.
            overrides: fields of this class, or do_sample. None switches a field off. A field in
                `SAMPLING_FIELDS` implies do_sample=True.

        Raises ValueError for an unknown, contradictory or unsupported setting, and for a value
        outside its range.

        >>> SamplingParams.from_generation_config({"do_sample": True, "temperature": 0.6}, top_p=0.9)
        """
        own = {"do_sample", *OFF_VALUES}
        for name in overrides.keys() - own - UNSUPPORTED_SETTINGS.keys():
            raise ValueError(unknown_field(name, own))
        config = settings_of(config)
        do_sample = _do_sample(config, overrides)
        settings = layered(config, overrides)
        if not do_sample:
            for name in _SAMPLING_ONLY_FIELDS:
                settings.pop(name, None)
        settings = without_refused(UNSUPPORTED_SETTINGS, settings)
        if not do_sample:
            settings.update(dict.fromkeys(SAMPLING_FIELDS))
            settings["temperature"] = 0.0
        elif settings.get("top_k") is None and "top_k" not in overrides:
            settings["top_k"] = HF_DEFAULT_TOP_K
        if "eos_token_id" in overrides and overrides["eos_token_id"] is None:
            settings["eos_token_id"] = ()
        wanted = {name: settings[name] for name in OFF_VALUES if settings.get(name) is not None}
        try:
            params = cls(**wanted)
        except ValueError as error:
            # A wrong value of the caller raises here, so that the config is not blamed for it.
            cls(**{name: value for name, value in wanted.items() if name in overrides})
            raise ValueError(f"generation_config: {error}") from None
        if do_sample and params.temperature == 0:
            raise ValueError(
                "do_sample is true and temperature is 0; give a temperature > 0, or do_sample=False for greedy"
            )
        return params

    @property
    def filters(self) -> dict[str, str]:
        """The filters that the values ask for, by their names in `Features.filters`; each with the
        field that asks for it."""
        return {
            filter_name: name
            for name, filter_name in FILTER_SWITCHES.items()
            if getattr(self, name) != OFF_VALUES[name]
        }

    @property
    def biases(self) -> dict[str, dict[int, float]]:
        """The numbers that are added to the logits of tokens, by the field that asks for them;
        fields that ask for none are left out. Those of the same token add up."""
        sequence_bias = {token: amount for (token,), amount in (self.sequence_bias or {}).items()}
        biases = {
            "logit_bias": dict(self.logit_bias or {}),
            "sequence_bias": sequence_bias,
            "suppress_tokens": dict.fromkeys(self.suppress_tokens or (), -math.inf),
        }
        return {name: bias for name, bias in biases.items() if bias}

    def value_of(self, parameter: str) -> Any:
        """The value of `parameter`, a name of the contract, that the graph reads, before
        padding."""
        if parameter == "mirostat_tau" and self.mirostat == 0:
            return 0.0
        return getattr(self, parameter)

    def total_length(self, prompt_length: int, padding: int = 0) -> int:
        """The most tokens of a row at its end, prompt included; the capacity may be less.

        Args:
            prompt_length: the number of prompt tokens that the model reads.
            padding: the number of further tokens of the prompt. Only `max_length` counts them, as
                in transformers.
        """
        if self.max_new_tokens is not None:
            return prompt_length + self.max_new_tokens
        if self.max_length is not None:
            return self.max_length - padding
        return prompt_length + DEFAULT_NEW_TOKENS

    def lengths(self, prompt_length: int, capacity: int, padding: int = 0) -> tuple[int, int]:
        """The contract's min_length and max_length of a row, cut to `capacity`: a row that reaches
        it ends with finish reason "length".

        Args:
            prompt_length, padding: the numbers of tokens that `total_length` describes.
            capacity: the tokens that a row can hold.

        Raises ValueError if not even a single token fits.
        """
        if prompt_length >= capacity:
            raise ValueError(
                f"the prompt has {prompt_length} tokens and the context length is {capacity}; give at most "
                f"{capacity - 1}, or use a package with a larger ctx_len"
            )
        total = self.total_length(prompt_length, padding)
        if total <= prompt_length:
            counted = f"{prompt_length + padding} tokens" + (
                " with its padding" if padding > 0 else ""
            )
            raise ValueError(
                f"max_length is {total + padding} and the prompt already has {counted}; raise max_length, or give "
                "max_new_tokens; it does not count the prompt"
            )
        if self.min_new_tokens is None:
            least = self.min_length - padding
        else:
            least = prompt_length + self.min_new_tokens
        return max(0, min(least, INT32_MAX)), min(total, capacity, INT32_MAX)


# Field → its default, with which it is off.
OFF_VALUES: Final = {entry.name: entry.default for entry in fields(SamplingParams)}
# Input of a filter → its meaning.
_FILTER_INPUTS: Final = {
    spec.name: spec.meaning for specs in EXTRA_PARAMETERS.values() for spec in specs
}


def _help_texts() -> dict[str, str]:
    texts = {}
    for entry in fields(SamplingParams):
        if "help" in entry.metadata:
            texts[entry.name] = entry.metadata["help"]
        elif entry.name in _FILTER_INPUTS:
            meaning = _FILTER_INPUTS[entry.name]
            texts[entry.name] = f"{meaning[:1].upper()}{meaning[1:]}."
    return texts


# Field → its effect, for the flags of the command line and the description of the server's fields.
HELP: Final[Mapping[str, str]] = _help_texts()
# The fields that need a package with filters.
FILTER_FIELDS: Final = tuple(
    name for name in OFF_VALUES if name in {*_FILTER_INPUTS, *EXTRA_PARAMETERS, "bad_words"}
)


def _switches() -> dict[str, str]:
    switches = {"bad_words": "bad_words_ids"}
    for filter_name, specs in EXTRA_PARAMETERS.items():
        field_name = filter_name if filter_name in OFF_VALUES else specs[0].name
        switches[field_name] = filter_name
    return switches


# The fields that need the feature logit_bias.
BIAS_FIELDS: Final = ("logit_bias", "sequence_bias", "suppress_tokens")
# Field → the filter that it switches on. The field has the filter's name, or is its first input.
FILTER_SWITCHES: Final[Mapping[str, str]] = _switches()
_FILTERS_OF_GREEDY_TOKENS: Final = (
    "dry",
    "penalty_last_n",
    "no_repeat_ngram_size",
    "bad_words_ids",
)
# Field that chooses among several tokens → the values that ask for nothing; the default of
# transformers is among them.
SAMPLING_FIELDS: Final[Mapping[str, tuple[Any, ...]]] = {
    "temperature": (1,),
    "top_k": (0, HF_DEFAULT_TOP_K),
    "top_p": (1,),
    "min_p": (0,),
} | {
    name: (OFF_VALUES[name],)
    for name, filter_name in FILTER_SWITCHES.items()
    if filter_name not in _FILTERS_OF_GREEDY_TOKENS
}


def settings_of(config: Any) -> dict[str, Any]:
    """The fields of a generation_config that are set.

    Args:
        config: a mapping, an object with `to_dict()` such as transformers.GenerationConfig, the
            path of a file or of its folder, or None for no fields.

    Raises ValueError for anything else.
    """
    if isinstance(config, str | Path):
        path = as_path("generation_config", config)
        file = path / GENERATION_CONFIG_FILE if path.is_dir() else path
        try:
            config = read_json(file, infinities=True)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"generation_config is {str(path)!r}, and {file} cannot be read: {error}"
            ) from error
        if not isinstance(config, dict):
            raise ValueError(f"generation_config is {str(path)!r}, and {file} is not a JSON object")
    elif config is None:
        config = {}
    elif callable(getattr(config, "to_dict", None)):
        config = config.to_dict()
    elif not isinstance(config, Mapping):
        raise ValueError(
            f"generation_config is a {type(config).__name__}; give a mapping, a transformers.GenerationConfig, or the "
            "path of a generation_config.json or its folder"
        )
    return {name: value for name, value in config.items() if value is not None}


def layered(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of several layers, each on top of the layers before it, field by field as in
    transformers. A total length takes precedence over the number of new tokens of an earlier layer;
    within a layer, the number of new tokens does."""
    settings: dict[str, Any] = {}
    for layer in layers:
        for total_field, new_field in _NEW_TOKEN_FIELDS.items():
            if layer.get(total_field) is not None:
                settings.pop(new_field, None)
        settings.update(layer)
    return settings


def _do_sample(settings: Mapping[str, Any], overrides: Mapping[str, Any]) -> bool:
    """Whether to sample, from do_sample and the overrides that imply it. Raises ValueError for a
    contradiction."""
    given = overrides.get("do_sample")
    if given is not None and not isinstance(given, bool):
        raise ValueError(f"do_sample is {shown(given)}; give True or False")
    sampling = {
        name: plain(overrides[name]) for name in SAMPLING_FIELDS if overrides.get(name) is not None
    }
    temperature = sampling.get("temperature")
    is_greedy = temperature == 0 and not isinstance(temperature, bool)
    if is_greedy:
        if given is True:
            raise ValueError(
                "do_sample=True and temperature=0 contradict each other; temperature 0 is greedy"
            )
        return False
    if given is False:
        _check_greedy(sampling)
    if given is not None:
        return given
    return bool(sampling) or bool(settings.get("do_sample"))


def _check_greedy(sampling: Mapping[str, Any]) -> None:
    """Raise ValueError if fields that choose among several tokens ask for something."""
    asked = [
        f"{name}={shown(value)}"
        for name, value in sampling.items()
        if value not in SAMPLING_FIELDS[name]
    ]
    if asked:
        raise ValueError(
            f"do_sample=False chooses greedily, yet {', '.join(asked)} is given; drop either"
        )
