"""`SamplingParams`: how to choose tokens, checked, from a caller's options or a model's generation_config.

Names and meanings are Hugging Face's. What each value does to the logits is fixed by the decode contract
(`docs/contract.md`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, Final

from qsample.errors import shown, unknown

DEFAULT_NEW_TOKENS: Final = 256  # where neither the model nor the caller says how much to generate
HF_DEFAULT_TOP_K: Final = 50  # what transformers samples with where top_k is unset
SEEDS: Final = 2**63  # how many there are, from 0 on
_INT32_MAX: Final = 2**31 - 1
_FLOAT32_MAX: Final = 3.4028235e38
_FLOAT32_TINY: Final = 1.1754944e-38  # the least that float32 holds in full
SMALLEST_TOP_P: Final = _FLOAT32_TINY  # the likeliest token alone, whatever its mass

# Field → least and greatest value, and what to tell the caller. Numbers reach the graph as float32.
_NUMBERS: Final = {
    "temperature": (0, _FLOAT32_MAX, "a finite number >= 0 (0 = greedy)"),
    "top_p": (SMALLEST_TOP_P, 1, "a number > 0 and <= 1 (1 = off)"),
    "min_p": (0, 1, "a number from 0 to 1 (0 = off)"),
    "repetition_penalty": (_FLOAT32_TINY, _FLOAT32_MAX, "a finite number > 0 (1 = off)"),
    "presence_penalty": (-_FLOAT32_MAX, _FLOAT32_MAX, "a finite number (0 = off)"),
    "frequency_penalty": (-_FLOAT32_MAX, _FLOAT32_MAX, "a finite number (0 = off)"),
}
_INTEGERS: Final = {
    "top_k": (0, _INT32_MAX, "an integer >= 0 (0 = off)"),
    "min_length": (0, _INT32_MAX, "an integer >= 0"),
}
_OPTIONAL_INTEGERS: Final = {
    "min_new_tokens": (0, _INT32_MAX, "an integer >= 0, or None"),
    "max_length": (1, _INT32_MAX, "an integer >= 1, or None"),
    "max_new_tokens": (1, _INT32_MAX, "an integer >= 1, or None"),
    "seed": (0, SEEDS - 1, "an integer from 0 to 2**63 - 1, or None for a fresh one"),
}

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
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": ([],),
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
    "typical_p": (1,),
    "top_h": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
}
# What chooses among several tokens, with the values that ask for nothing: those of transformers' own defaults, too.
_SAMPLING_FIELDS: Final = {"temperature": (1,), "top_k": (0, HF_DEFAULT_TOP_K), "top_p": (1,), "min_p": (0,)}
# What comes closest to something that is not implemented.
_INSTEAD: Final = {
    "bad_words_ids": "logit_bias={token: -inf} forbids single tokens",
    "suppress_tokens": "logit_bias={token: -inf} forbids tokens",
    "sequence_bias": "logit_bias={token: bias} does it for single tokens",
    "no_repeat_ngram_size": "repetition_penalty, presence_penalty and frequency_penalty work against repetition",
    "force_words_ids": "allowed_tokens says which tokens may come next",
    "constraints": "allowed_tokens says which tokens may come next",
    "num_beams": "temperature=0 takes the likeliest token each time",
    "num_return_sequences": "it is an argument of generate and of Engine.add_requests",
}


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

    Raises ValueError, naming the field, where a value is outside its range.

    >>> SamplingParams(temperature=0.7, top_p=0.9, max_new_tokens=64, seed=1)
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_length: int = 0
    min_new_tokens: int | None = None
    max_length: int | None = None
    max_new_tokens: int | None = None
    eos_token_id: tuple[int, ...] | None = None
    seed: int | None = None
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        clean: dict[str, Any] = {name: _number(name, getattr(self, name), *limits) for name, limits in _NUMBERS.items()}
        for name, limits in _INTEGERS.items():
            clean[name] = _integer(name, getattr(self, name), *limits)
        for name, limits in _OPTIONAL_INTEGERS.items():
            if getattr(self, name) is not None:
                clean[name] = _integer(name, getattr(self, name), *limits)
        if self.eos_token_id is not None:
            clean["eos_token_id"] = _token_ids("eos_token_id", self.eos_token_id)
        clean["logit_bias"] = _bias(self.logit_bias)
        for name, value in clean.items():
            object.__setattr__(self, name, value)
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
            overrides: any field of this class, or do_sample. None switches a field off. A temperature, top_k, top_p or
                min_p implies do_sample=True. A max_length or min_length overrides the config's max_new_tokens or
                min_new_tokens too.

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
            settings |= {"temperature": 0.0, "top_k": None, "top_p": None, "min_p": None}
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
        return max(0, min(least, _INT32_MAX)), min(total, capacity, _INT32_MAX)


def _do_sample(settings: Mapping[str, Any], overrides: dict[str, Any]) -> bool:
    """Whether to sample, from do_sample and the overrides that imply it. Takes do_sample out of `overrides`."""
    given = overrides.pop("do_sample", None)
    sampling = {name: _plain(overrides[name]) for name in _SAMPLING_FIELDS if overrides.get(name) is not None}
    if given is not None and not isinstance(given, bool):
        raise ValueError(f"do_sample is {shown(given)}; give True or False")
    greedy = sampling.get("temperature") == 0 and not isinstance(sampling["temperature"], bool)
    if given is False:
        sampling = {name: value for name, value in sampling.items() if value not in _SAMPLING_FIELDS[name]}
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
    asked = [
        name for name, off in table.items() if settings.get(name) is not None and _plain(settings[name]) not in off
    ]
    if asked:
        listed = ", ".join(f"{name}={shown(settings[name])}" for name in asked)
        proceed = ", ".join(f"{name}=None" for name in asked)
        raise ValueError(
            f"the generation settings ask for {listed}, which qsample does not implement; pass {proceed} to generate "
            "without (the tokens will differ from transformers')"
            + "".join(f"; {_INSTEAD[name]}" for name in asked if name in _INSTEAD)
        )


def _plain(value: Any) -> Any:
    """A value that compares with others: an array, which does so number by number, as a list."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else value


def _is_a(kind: type, value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _number(name: str, value: Any, least: float, most: float, accepted: str) -> float:
    # NaN fails every comparison, so the range check refuses it too.
    if not _is_a(Real, value) or not least <= value <= most:
        raise ValueError(f"{name} is {shown(value)}; give {accepted}")
    return float(value)


def _integer(name: str, value: Any, least: int, most: int, accepted: str) -> int:
    if not _is_a(Integral, value) or not least <= value <= most:
        raise ValueError(f"{name} is {shown(value)}; give {accepted}")
    return int(value)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        value = (value,)
    return tuple(
        dict.fromkeys(_integer(name, item, 0, _INT32_MAX, "a token id >= 0, or a list of them") for item in value)
    )


def _bias(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias is {shown(value)}; give a mapping of token ids to numbers, or None")
    bias = {}
    for token, amount in value.items():
        token = _integer("logit_bias (token id)", token, 0, _INT32_MAX, "an integer >= 0")
        least = amount if amount == -math.inf else -_FLOAT32_MAX
        name = f"logit_bias of token {token}"
        bias[token] = _number(name, amount, least, _FLOAT32_MAX, "a finite number, or -inf to forbid the token")
    return bias or None
