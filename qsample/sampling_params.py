"""`SamplingParams`: how to choose tokens, checked, from a caller's options or a model's generation_config.

Names and meanings are Hugging Face's. What each value does to the logits is fixed by the decode contract
(`docs/contract.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from qsample.contract import EXTRA_PARAMETERS, LONGEST_MATCH
from qsample.errors import shown, unknown
from qsample.values import (
    FLOAT32_MAX,
    FLOAT32_TINY,
    INT32_MAX,
    bias,
    id_sequences,
    ids_or_texts,
    integer,
    number,
    one_of,
    optional_integer,
    plain,
    texts,
    token_ids,
)

DEFAULT_NEW_TOKENS: Final = 256  # where neither the model nor the caller says how much to generate
HF_DEFAULT_TOP_K: Final = 50  # what transformers samples with where top_k is unset
SEEDS: Final = 2**63  # how many there are, from 0 on
SMALLEST_TOP_P: Final = FLOAT32_TINY  # the likeliest token alone, whatever its mass

# Fields of a generation_config that change which tokens come out and that qsample does not implement, with the values
# that switch them off (None always does).
UNSUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "prompt_lookup_num_tokens": (),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "force_words_ids": ([],),
    "constraints": ([],),
    "sequence_bias": ([], {}),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "remove_invalid_values": (False,),
    "guidance_scale": (1,),
    "watermarking_config": (),
    "token_healing": (False,),
    "stop_strings": ([], ()),
    "max_time": (),
}
# The same, but transformers applies these only where it samples.
UNSUPPORTED_SAMPLING: Final[Mapping[str, tuple[Any, ...]]] = {
    "top_h": (),
}
# What comes closest to something that is not implemented.
_INSTEAD: Final = {
    "suppress_tokens": "logit_bias={token: -inf} forbids tokens",
    "sequence_bias": "logit_bias={token: bias} does it for single tokens",
    "force_words_ids": "allowed_tokens says which tokens may come next",
    "constraints": "allowed_tokens says which tokens may come next",
    "num_beams": "temperature=0 takes the likeliest token each time",
    "num_return_sequences": "it is an argument of generate and of Engine.add_requests",
}


def _checked(default: Any, check: Callable[..., Any], *limits: Any, hashed: bool = True) -> Any:
    """A field that holds what `check(name, value, *limits)` makes of what is given."""
    return field(default=default, hash=hashed, metadata={"check": (check, limits)})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the tokens of one row. The defaults sample from the model's own distribution.

    temperature: >= 0; 0 = greedy. top_k: >= 0; 0 = off. top_p: in (0, 1]; 1 = off. min_p: in [0, 1]; 0 = off.
    repetition_penalty: > 0; 1 = off; on prompt and sampled tokens. presence_penalty, frequency_penalty: finite;
    0 = off; on sampled tokens.
    min_length, max_length: total tokens, prompt included. min_new_tokens, max_new_tokens: sampled tokens; where both
    are given they win over min_length and max_length, as in transformers. A row always ends when its buffers are full.
    eos_token_id: an id or several; sampling one ends the row. Before min_length none of them can be sampled. None: the
    model's own; (): none.
    seed: in [0, 2**63); the same seed gives the same tokens. None: a fresh one, reported in the output.
    logit_bias: token id → a number added to its logit (-inf forbids the token); the package must have been
    exported with `logit_bias`.

    The others need a package that was exported with the filter of their name, `contract.EXTRA_PARAMETERS` says which:
    typical_p: in (0, 1]; 1 = off. top_a, epsilon_cutoff, eta_cutoff: in [0, 1]; 0 = off. top_n_sigma: >= 0; 0 = off.
    xtc_probability: in [0, 1]; 0 = off. xtc_threshold: in [0, 1]; off above 0.5.
    dry_multiplier: >= 0; 0 = off. dry_base: >= 1. dry_allowed_length: >= 1. dry_penalty_last_n: tokens; -1 = all, 0 =
    off. dry_sequence_breakers: token ids, or texts that are one token each; None = none.
    no_repeat_ngram_size: in [0, 65]; 0 = off. bad_words_ids: sequences of 1 to 64 token ids. bad_words: the same as
    texts, alone and behind a space. None = none.
    dynatemp_range: >= 0; 0 = off. dynatemp_exponent: >= 0.
    mirostat: 2 for Mirostat 2.0, behind the filters that are on; 0 = off. mirostat_tau: > 0, bits. mirostat_eta: >= 0.

    Raises ValueError, naming the field, if a value is outside its range.

    >>> SamplingParams(temperature=0.7, top_p=0.9, max_new_tokens=64, seed=1)
    """

    temperature: float = _checked(1.0, number, 0, FLOAT32_MAX, "a finite number >= 0 (0 = greedy)")
    top_k: int = _checked(0, integer, 0, INT32_MAX, "an integer >= 0 (0 = off)")
    top_p: float = _checked(1.0, number, SMALLEST_TOP_P, 1, "a number > 0 and <= 1 (1 = off)")
    min_p: float = _checked(0.0, number, 0, 1, "a number from 0 to 1 (0 = off)")
    repetition_penalty: float = _checked(1.0, number, FLOAT32_TINY, FLOAT32_MAX, "a finite number > 0 (1 = off)")
    presence_penalty: float = _checked(0.0, number, -FLOAT32_MAX, FLOAT32_MAX, "a finite number (0 = off)")
    frequency_penalty: float = _checked(0.0, number, -FLOAT32_MAX, FLOAT32_MAX, "a finite number (0 = off)")
    min_length: int = _checked(0, integer, 0, INT32_MAX, "an integer >= 0")
    min_new_tokens: int | None = _checked(None, optional_integer, 0, INT32_MAX, "an integer >= 0, or None")
    max_length: int | None = _checked(None, optional_integer, 1, INT32_MAX, "an integer >= 1, or None")
    max_new_tokens: int | None = _checked(None, optional_integer, 1, INT32_MAX, "an integer >= 1, or None")
    eos_token_id: tuple[int, ...] | None = _checked(None, token_ids)
    seed: int | None = _checked(
        None, optional_integer, 0, SEEDS - 1, "an integer from 0 to 2**63 - 1, or None for a fresh one"
    )
    logit_bias: Mapping[int, float] | None = _checked(None, bias, hashed=False)
    typical_p: float = _checked(1.0, number, FLOAT32_TINY, 1, "a number > 0 and <= 1 (1 = off)")
    top_a: float = _checked(0.0, number, 0, 1, "a number from 0 to 1 (0 = off)")
    epsilon_cutoff: float = _checked(0.0, number, 0, 1, "a number from 0 to 1 (0 = off)")
    eta_cutoff: float = _checked(0.0, number, 0, 1, "a number from 0 to 1 (0 = off)")
    top_n_sigma: float = _checked(0.0, number, 0, FLOAT32_MAX, "a finite number >= 0 (0 = off)")
    xtc_probability: float = _checked(0.0, number, 0, 1, "a number from 0 to 1 (0 = off)")
    xtc_threshold: float = _checked(0.1, number, 0, 1, "a number from 0 to 1 (above 0.5 = off)")
    dry_multiplier: float = _checked(0.0, number, 0, FLOAT32_MAX, "a finite number >= 0 (0 = off)")
    dry_base: float = _checked(1.75, number, 1, FLOAT32_MAX, "a finite number >= 1")
    dry_allowed_length: int = _checked(2, integer, 1, INT32_MAX, "an integer >= 1")
    dry_penalty_last_n: int = _checked(-1, integer, -1, INT32_MAX, "an integer >= -1 (-1 = all tokens, 0 = off)")
    dry_sequence_breakers: tuple[int | str, ...] | None = _checked(None, ids_or_texts)
    no_repeat_ngram_size: int = _checked(0, integer, 0, LONGEST_MATCH + 1, "an integer from 0 to 65 (0 = off)")
    bad_words_ids: tuple[tuple[int, ...], ...] | None = _checked(None, id_sequences, LONGEST_MATCH)
    bad_words: tuple[str, ...] | None = _checked(None, texts)
    dynatemp_range: float = _checked(0.0, number, 0, FLOAT32_MAX, "a finite number >= 0 (0 = off)")
    dynatemp_exponent: float = _checked(1.0, number, 0, FLOAT32_MAX, "a finite number >= 0")
    mirostat: int = _checked(0, one_of, (0, 2), "0 (off) or 2 (Mirostat 2.0)")
    mirostat_tau: float = _checked(5.0, number, FLOAT32_TINY, FLOAT32_MAX, "a finite number > 0")
    mirostat_eta: float = _checked(0.1, number, 0, FLOAT32_MAX, "a finite number >= 0")

    def __post_init__(self) -> None:
        for entry in fields(self):
            check, limits = entry.metadata["check"]
            object.__setattr__(self, entry.name, check(entry.name, getattr(self, entry.name), *limits))
        least, most = self.min_new_tokens, self.max_new_tokens
        if least is not None and most is not None and least > most:
            raise ValueError(f"min_new_tokens is {least}, more than max_new_tokens ({most})")

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any] | Any = None, **overrides: Any) -> SamplingParams:
        """What a model's generation_config asks for, with the caller's `overrides` on top.

        Args:
            config: the contents of generation_config.json, or an object with `to_dict()`. Its defaults are those of
                transformers: greedy unless do_sample is true, and top_k = 50 where it samples and top_k is unset.
                Keys that transformers itself does not know are ignored, as it does.
            overrides: any field of this class, or do_sample. None switches a field off. One of SAMPLING_FIELDS implies
                do_sample=True. A max_length or min_length overrides the config's max_new_tokens or min_new_tokens too.

        Raises ValueError for an unknown override, a contradiction, a value outside its range, and a field that asks for
        something that qsample does not do.

        >>> SamplingParams.from_generation_config({"do_sample": True, "temperature": 0.6}, top_p=0.9)
        """
        settings = _as_dict(config)
        _check_names(overrides)
        do_sample = _do_sample(settings, overrides)
        settings |= overrides
        for total, new in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
            if overrides.get(total) is not None and overrides.get(new) is None:
                settings[new] = None
        _check_supported(settings, do_sample)

        if not do_sample:
            settings |= {**dict.fromkeys(SAMPLING_FIELDS), "temperature": 0.0}
        elif settings.get("top_k") is None and "top_k" not in overrides:
            settings["top_k"] = HF_DEFAULT_TOP_K
        if "eos_token_id" in overrides and overrides["eos_token_id"] is None:
            settings["eos_token_id"] = ()
        names = [entry.name for entry in fields(cls)]
        wanted = {name: settings[name] for name in names if settings.get(name) is not None}
        try:
            params = cls(**wanted)
        except ValueError as error:
            cls(**{name: value for name, value in wanted.items() if name in overrides})  # the caller's own mistake
            raise ValueError(f"generation_config: {error}") from None
        if do_sample and params.temperature == 0:
            raise ValueError(
                "do_sample is true and temperature is 0; give a temperature > 0, or do_sample=False for greedy"
            )
        return params

    @property
    def filters(self) -> dict[str, str]:
        """What of `Features.filters` the values ask for, each with the field that does."""
        asked = (name for name in _SWITCHES if getattr(self, name) != OFF[name])
        return {_SWITCHES[name]: name for name in asked}

    def value_of(self, parameter: str) -> Any:
        """What the graph reads as `parameter`, a name of the contract, before it is padded."""
        return 0.0 if parameter == "mirostat_tau" and not self.mirostat else getattr(self, parameter)

    def total_length(self, prompt_length: int, padding: int = 0) -> int:
        """Tokens that a row with this prompt may have in the end, prompt included, whatever the capacity.

        padding: tokens of the prompt as it was given that the model does not read: a `max_length` counts them, as in
        transformers, and the result does not.
        """
        if self.max_new_tokens is not None:
            return prompt_length + self.max_new_tokens
        return self.max_length - padding if self.max_length is not None else prompt_length + DEFAULT_NEW_TOKENS

    def lengths(self, prompt_length: int, capacity: int, padding: int = 0) -> tuple[int, int]:
        """The contract's (min_length, max_length) for a prompt of `prompt_length` tokens in buffers of `capacity`.

        padding: as for `total_length`. max_length is cut to the capacity: such a row ends with finish reason "length".
        Raises ValueError where not even one token fits.
        """
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
                "max_new_tokens, which does not count the prompt"
            )
        least = self.min_length - padding if self.min_new_tokens is None else prompt_length + self.min_new_tokens
        return max(0, min(least, INT32_MAX)), min(total, capacity, INT32_MAX)


OFF: Final = {entry.name: entry.default for entry in fields(SamplingParams)}  # a field that is off has its default
_INPUTS: Final = {spec.name for specs in EXTRA_PARAMETERS.values() for spec in specs}
# The fields that need a package with filters.
FILTER_FIELDS: Final = tuple(name for name in OFF if name in {*_INPUTS, *EXTRA_PARAMETERS, "bad_words"})
# Field → the filter that it switches on: that of its name, or the one that has it as its first input.
_SWITCHES: Final = {name if name in OFF else specs[0].name: name for name, specs in EXTRA_PARAMETERS.items()} | {
    "bad_words": "bad_words_ids"
}
_CHANGE_GREEDY_TOKENS: Final = ("dry", "no_repeat_ngram_size", "bad_words_ids")
# What chooses among several tokens, with the values that ask for nothing: those of transformers' own defaults, too.
SAMPLING_FIELDS: Final[Mapping[str, tuple[Any, ...]]] = {
    "temperature": (1,),
    "top_k": (0, HF_DEFAULT_TOP_K),
    "top_p": (1,),
    "min_p": (0,),
    **{field: (OFF[field],) for field, name in _SWITCHES.items() if name not in _CHANGE_GREEDY_TOKENS},
}


def _do_sample(settings: Mapping[str, Any], overrides: dict[str, Any]) -> bool:
    """Whether to sample, from do_sample and the overrides that imply it. Takes do_sample out of `overrides`."""
    given = overrides.pop("do_sample", None)
    sampling = {name: plain(overrides[name]) for name in SAMPLING_FIELDS if overrides.get(name) is not None}
    if given is not None and not isinstance(given, bool):
        raise ValueError(f"do_sample is {shown(given)}; give True or False")
    greedy = sampling.get("temperature") == 0 and not isinstance(sampling["temperature"], bool)
    if given is False:
        sampling = {name: value for name, value in sampling.items() if value not in SAMPLING_FIELDS[name]}
    if given is False and sampling and not greedy:
        listed = ", ".join(f"{name}={shown(value)}" for name, value in sampling.items())
        raise ValueError(f"do_sample=False chooses greedily, yet {listed} is given; drop one or the other")
    if given is True and greedy:
        raise ValueError("do_sample=True and temperature=0 contradict each other; temperature 0 is greedy")
    if greedy:
        return False
    return given if given is not None else bool(sampling) or bool(settings.get("do_sample"))


def _as_dict(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        if not callable(getattr(config, "to_dict", None)):
            raise ValueError(
                f"generation_config is a {type(config).__name__}; give a mapping or an object with to_dict(), such as "
                "transformers.GenerationConfig"
            )
        config = config.to_dict()
    return dict(config)


def _check_names(overrides: Mapping[str, Any]) -> None:
    own = {"do_sample", *(entry.name for entry in fields(SamplingParams))}
    known = own | set(UNSUPPORTED) | set(UNSUPPORTED_SAMPLING)
    for name in overrides:
        if name not in known:
            raise ValueError(unknown("unknown sampling option", name, own))


def _check_supported(settings: Mapping[str, Any], do_sample: bool) -> None:
    table = {**UNSUPPORTED, **(UNSUPPORTED_SAMPLING if do_sample else {})}
    asked = [name for name, off in table.items() if settings.get(name) is not None and plain(settings[name]) not in off]
    if asked:
        listed = ", ".join(f"{name}={shown(settings[name])}" for name in asked)
        proceed = ", ".join(f"{name}=None" for name in asked)
        raise ValueError(
            f"the generation settings ask for {listed}, which qsample does not implement; pass {proceed} to generate "
            "without (the tokens will differ from transformers')"
            + "".join(f"; {_INSTEAD[name]}" for name in asked if name in _INSTEAD)
        )
