"""llama.cpp's own samplers, through llama-cpp-python: float32 logits of a row enter, what they leave of it leaves.

Needs the packages llama-cpp-python and gguf. Parameters have the contract's names; one that is absent is off. The
functions `..._case` run them on random logits and parameters and give inputs and results in one dict, fit for JSON.
"""

from __future__ import annotations

import ctypes
import functools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import llama_cpp as llama
import numpy as np

Array = np.ndarray
Parameters = Mapping[str, Any]


class _Candidates:
    """A `llama_token_data_array`, and the memory that it points to."""

    def __init__(self, logits: Array) -> None:
        self._tokens = (llama.llama_token_data * len(logits))()
        for i, logit in enumerate(np.asarray(logits, np.float32)):
            self._tokens[i].id, self._tokens[i].logit = i, float(logit)
        self.array = llama.llama_token_data_array(self._tokens, len(logits), -1, False)

    def apply(self, sampler: Any) -> None:
        llama.llama_sampler_apply(sampler, ctypes.byref(self.array))

    @property
    def left(self) -> list[Any]:
        """What was neither dropped nor masked, in llama.cpp's order."""
        tokens = [self.array.data[i] for i in range(self.array.size)]
        return [token for token in tokens if token.logit > -np.inf]

    @property
    def probs(self) -> dict[int, float]:
        return {token.id: token.p for token in sorted(self.left, key=lambda token: token.id)}

    @property
    def logits(self) -> Array:
        """[V] float32, of a chain that drops no token."""
        values = np.full(self.array.size, -np.inf, np.float32)
        for token in self.left:
            values[token.id] = token.logit
        return values

    @property
    def selected(self) -> int:
        return self.array.data[self.array.selected].id


@contextmanager
def _chain(*samplers: Any) -> Iterator[Any]:
    chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    for sampler in samplers:
        llama.llama_sampler_chain_add(chain, sampler)
    yield chain
    llama.llama_sampler_free(chain)


def filtered(logits: Array, parameters: Parameters, seed: int = 0) -> dict[int, float]:
    """Id → probability of the tokens that llama.cpp's filters leave, in the order of its command-line tools.

    Args:
        logits: [V] float32.
        parameters: any of top_n_sigma, top_k, typical_p, top_p, min_p, xtc_probability and xtc_threshold, temperature,
            dynatemp_range and dynatemp_exponent.
        seed: of XTC's random number, `xtc_uniform(seed)`.
    """
    candidates = _Candidates(logits)
    # The last draws a token, and computes the probabilities for that.
    with _chain(*_filters(parameters, seed), llama.llama_sampler_init_dist(0)) as chain:
        candidates.apply(chain)
    return candidates.probs


def _filters(parameters: Parameters, seed: int) -> list[Any]:
    get = parameters.get
    return [
        llama.llama_sampler_init_top_n_sigma(get("top_n_sigma", 0.0)),
        llama.llama_sampler_init_top_k(get("top_k", 0)),
        llama.llama_sampler_init_typical(get("typical_p", 1.0), 1),
        llama.llama_sampler_init_top_p(get("top_p", 1.0), 1),
        llama.llama_sampler_init_min_p(get("min_p", 0.0), 1),
        llama.llama_sampler_init_xtc(
            get("xtc_probability", 0.0), get("xtc_threshold", 0.1), 1, seed
        ),
        llama.llama_sampler_init_temp_ext(
            get("temperature", 1.0), get("dynatemp_range", 0.0), get("dynatemp_exponent", 1.0)
        ),
    ]


def xtc_uniform(seed: int) -> float:
    """The number that decides whether XTC applies: std::mt19937's first, as std::uniform_real_distribution<float>."""
    bits = np.random.MT19937()
    bits._legacy_seeding(seed)
    return float(np.float32(bits.random_raw()) * np.float32(2.0**-32))


def penalized(logits: Array, history: Sequence[int], parameters: Parameters) -> Array:
    """[V] float32 logits after DRY.

    Args:
        logits: [V] float32.
        history: the row's tokens so far.
        parameters: dry_multiplier, dry_base, dry_allowed_length, dry_penalty_last_n, dry_sequence_breakers.
    """
    last_n = parameters["dry_penalty_last_n"]
    breakers = [_text(id_).encode() for id_ in parameters["dry_sequence_breakers"] if id_ >= 0]
    sampler = llama.llama_sampler_init_dry(
        _vocabulary(len(logits)),
        parameters["dry_multiplier"],
        parameters["dry_base"],
        parameters["dry_allowed_length"],
        len(history) + 1 if last_n < 0 else last_n,  # llama.cpp has no value for "all"
        (ctypes.c_char_p * len(breakers))(*breakers),
        len(breakers),
    )
    candidates = _Candidates(logits)
    with _chain(sampler) as chain:
        for token in history:
            llama.llama_sampler_accept(chain, int(token))
        candidates.apply(chain)
    return candidates.logits


def chain_steps(
    logits: Sequence[Array], prompt: Sequence[int], parameters: Parameters, seed: int
) -> list[tuple[int, Array, dict[int, float]]]:
    """For each [V] of `logits`: the token drawn, the logits after the penalties, and id → probability of the tokens
    that the filters left.

    Args:
        logits: the steps' logits.
        prompt: the row's tokens before the first step.
        parameters: penalty_last_n, 0 or more, the three penalties, and those of `filtered`.
        seed: of the draws.
    """
    penalties = llama.llama_sampler_init_penalties(
        len(logits[0]),
        parameters["penalty_last_n"],
        *(
            parameters[name]
            for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
        ),
    )
    steps = []
    with (
        _chain(penalties) as first,
        _chain(*_filters(parameters, 0), llama.llama_sampler_init_dist(seed)) as rest,
    ):
        for token in prompt:
            llama.llama_sampler_accept(first, token)
        for step in logits:
            candidates = _Candidates(step)
            candidates.apply(first)
            after = candidates.logits
            candidates.apply(rest)
            llama.llama_sampler_accept(first, candidates.selected)
            steps.append((candidates.selected, after, candidates.probs))
    return steps


def adaptive_steps(
    logits: Sequence[Array], parameters: Parameters, seed: int
) -> list[tuple[int, float, dict[int, float]]]:
    """For each [V] of `logits`: the token drawn, its sampler's mean probability less the target after that, and id →
    probability of the tokens that it was among.

    Args:
        logits: the steps' logits.
        parameters: min_p, temperature, adaptive_target, adaptive_decay.
        seed: of the draws.
    """
    target, decay = np.float32([parameters["adaptive_target"], parameters["adaptive_decay"]])
    adaptive = llama.llama_sampler_init_adaptive_p(float(target), float(decay), seed)
    # llama.cpp keeps them behind target, decay, two seeds and a std::mt19937, and has no function to read them.
    context = ctypes.cast(adaptive, ctypes.POINTER(_Sampler)).contents.ctx
    weighted, total = (ctypes.c_float.from_address(context + offset) for offset in (5016, 5020))
    assert np.allclose([weighted.value * (1 - decay), total.value * (1 - decay)], [target, 1]), (
        "another layout"
    )
    before = (
        llama.llama_sampler_init_min_p(parameters["min_p"], 1),
        llama.llama_sampler_init_temp(parameters["temperature"]),
    )
    steps = []
    with _chain(*before, adaptive) as chain:
        for step in logits:
            candidates = _Candidates(step)
            candidates.apply(chain)
            llama.llama_sampler_accept(chain, candidates.selected)
            steps.append(
                (
                    candidates.selected,
                    weighted.value / total.value - float(target),
                    candidates.probs,
                )
            )
    return steps


def mirostat_steps(
    logits: Sequence[Array], parameters: Parameters, seed: int
) -> list[tuple[int, float, dict[int, float]]]:
    """For each [V] of `logits`: the token drawn, mu after that, and id → probability of the tokens that it was among.

    Args:
        logits: the steps' logits.
        parameters: temperature, mirostat_tau, mirostat_eta.
        seed: of the draws.
    """
    tau, eta = parameters["mirostat_tau"], parameters["mirostat_eta"]
    mirostat = llama.llama_sampler_init_mirostat_v2(seed, tau, eta)
    mu = _mirostat_mu(mirostat, tau, eta)
    steps = []
    with _chain(llama.llama_sampler_init_temp(parameters["temperature"]), mirostat) as chain:
        for step in logits:
            candidates = _Candidates(step)
            candidates.apply(chain)
            steps.append((candidates.selected, float(mu.value), candidates.probs))
    return steps


class _Sampler(ctypes.Structure):
    _fields_ = (("iface", ctypes.c_void_p), ("ctx", ctypes.c_void_p))


def _mirostat_mu(sampler: Any, tau: float, eta: float) -> ctypes.c_float:
    """mu, which llama.cpp keeps behind two seeds, tau and eta, and has no function to read."""
    context = ctypes.cast(sampler, ctypes.POINTER(_Sampler)).contents.ctx
    values = [ctypes.c_float.from_address(context + offset) for offset in (8, 12, 16)]
    assert [v.value for v in values] == [np.float32(v) for v in (tau, eta, 2 * tau)], (
        "llama.cpp's layout is another"
    )
    return values[2]


def _text(token: int) -> str:
    """One character a token, so that a breaker's text is that of one token and in no other."""
    return chr(0x4E00 + token)


@functools.cache
def _vocabulary(size: int) -> Any:
    """A vocabulary of `size` tokens."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_context_length(64)
        writer.add_embedding_length(8)
        writer.add_block_count(1)
        writer.add_feed_forward_length(8)
        writer.add_head_count(1)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tokenizer_model("llama")
        writer.add_token_list([_text(token).encode() for token in range(size)])
        writer.add_token_scores([0.0] * size)
        writer.add_token_types([gguf.TokenType.NORMAL] * size)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        params = llama.llama_model_default_params()
        params.vocab_only = True
        model = llama.llama_model_load_from_file(str(path).encode(), params)
        assert model, "llama.cpp did not take the vocabulary"
        return llama.llama_model_get_vocab(model)


def _float32(value: float) -> float:
    """A number of few digits that float32 holds as what the digits say."""
    return float(f"{value:.3g}")


def _logits(rng: np.random.Generator) -> list[float]:
    """Between 40 and 60 of them, no two equal: of ties llama.cpp keeps any."""
    while True:
        logits = np.round(rng.normal(size=rng.integers(40, 61)) * rng.choice([0.5, 1.5, 4]), 3)
        if len(np.unique(logits)) == len(logits):
            return logits.tolist()


_DRAWS = {
    "top_n_sigma": (0.3, 2.5),
    "top_k": (1, 40),
    "typical_p": (0.1, 0.95),
    "top_p": (0.1, 0.99),
    "min_p": (0.005, 0.4),
    "xtc_probability": (0.3, 0.7),
    "xtc_threshold": (0.01, 0.15),
    "temperature": (0.2, 2),
    "dynatemp_range": (0.1, 1.5),
    "dynatemp_exponent": (0.4, 2),
}
# Each filter with what else it needs. With logits that top_n_sigma masked llama.cpp computes no entropy (it is NaN) and
# counts them for dynatemp.
FILTERS = {
    "top_n_sigma": (),
    "top_k": (),
    "typical_p": (),
    "top_p": (),
    "min_p": (),
    "xtc_probability": ("xtc_threshold",),
    "temperature": (),
    "dynatemp_range": ("dynatemp_exponent", "temperature"),
}


def filters_case(rng: np.random.Generator, names: Sequence[str]) -> dict[str, Any]:
    """`filtered` with these of FILTERS."""
    parameters = _drawn(rng, names)
    logits, seed = _logits(rng), int(rng.integers(1, 1000))
    probs = {
        str(id_): float(f"{p:.6g}")
        for id_, p in filtered(np.array(logits), parameters, seed).items()
    }
    return {
        "logits": logits,
        "parameters": parameters,
        "xtc_uniform": xtc_uniform(seed),
        "probs": probs,
    }


def _drawn(rng: np.random.Generator, names: Sequence[str]) -> dict[str, Any]:
    """Parameters for these of FILTERS."""
    parameters: dict[str, Any] = {}
    needed = (name for filter_ in names for name in (filter_, *FILTERS[filter_]))
    for name in dict.fromkeys(needed):
        low, high = _DRAWS[name]
        parameters[name] = (
            int(rng.integers(low, high)) if name == "top_k" else _float32(rng.uniform(low, high))
        )
    return parameters


def random_filters(rng: np.random.Generator) -> list[str]:
    """Some of FILTERS, of those only that llama.cpp can combine."""
    names = [name for name in FILTERS if rng.random() < 0.5]
    return [
        name
        for name in names
        if "top_n_sigma" not in names or name not in ("typical_p", "dynatemp_range")
    ]


def dry_case(rng: np.random.Generator) -> dict[str, Any]:
    """`penalized` over a history with repetitions; the result holds the logits that changed."""
    logits = _logits(rng)
    history = rng.integers(0, rng.integers(2, 6), rng.integers(4, 30)).tolist()
    history += history[: rng.integers(0, len(history))]
    parameters = {
        "dry_multiplier": _float32(rng.uniform(0.2, 2)),
        "dry_base": _float32(rng.uniform(1, 2.5)),
        "dry_allowed_length": int(rng.integers(1, 4)),
        "dry_penalty_last_n": int(rng.choice([-1, -1, 5, 20])),
        "dry_sequence_breakers": rng.choice([-1, -1, 0, 1, 2], 2).tolist(),
    }
    after = penalized(np.array(logits), history, parameters)
    changed = {
        str(i): float(f"{after[i]:.7g}") for i in np.flatnonzero(after != np.float32(logits))
    }
    return {"logits": logits, "history": history, "parameters": parameters, "changed": changed}


def chain_case(rng: np.random.Generator, steps: int = 6) -> dict[str, Any]:
    """`chain_steps` with some filters, of a prompt with repetitions, and with the same logits at each step. `changed`
    holds the logits that the penalties changed."""
    parameters: dict[str, Any] = {
        "penalty_last_n": int(rng.choice([0, 1, 3, 8, 20, 64, 1000])),
        "repetition_penalty": _float32(rng.choice([1, rng.uniform(0.5, 2)])),
        "frequency_penalty": _float32(rng.choice([0, rng.uniform(-0.5, 1)])),
        "presence_penalty": _float32(rng.choice([0, rng.uniform(-1, 1)])),
    }
    logits, names = (
        _logits(rng),
        [name for name in random_filters(rng) if name != "xtc_probability"],
    )
    parameters |= _drawn(rng, names)
    prompt = rng.integers(0, rng.integers(2, 40), rng.integers(1, 30)).tolist()
    results = chain_steps(
        [np.array(logits)] * steps, prompt, parameters, int(rng.integers(1, 1000))
    )
    changed = [
        {str(i): float(f"{after[i]:.7g}") for i in np.flatnonzero(after != np.float32(logits))}
        for _, after, _ in results
    ]
    return {
        "logits": logits,
        "prompt": prompt,
        "parameters": parameters,
        "changed": changed,
    } | _steps(results)


def adaptive_case(rng: np.random.Generator, steps: int = 5) -> dict[str, Any]:
    """`adaptive_steps`, with the same logits at each step."""
    parameters = {
        "min_p": _float32(rng.choice([0, rng.uniform(0.01, 0.1)])),
        "temperature": _float32(rng.uniform(0.5, 1.5)),
        "adaptive_target": _float32(rng.uniform(0, 1)),
        "adaptive_decay": _float32(rng.choice([0, 0.99, rng.uniform(0.3, 0.95)])),
    }
    logits = _logits(rng)
    results = adaptive_steps([np.array(logits)] * steps, parameters, int(rng.integers(1, 1000)))
    errors = [float(f"{error:.7g}") for _, error, _ in results]
    return {"logits": logits, "parameters": parameters, "adaptive_error": errors} | _steps(results)


def _steps(results: Sequence[tuple[int, Any, dict[int, float]]]) -> dict[str, Any]:
    """The tokens of some steps, and the probabilities that they were drawn from."""
    probs = [{str(id_): float(f"{p:.6g}") for id_, p in step.items()} for _, _, step in results]
    return {"tokens": [token for token, _, _ in results], "probs": probs}


def mirostat_case(rng: np.random.Generator, steps: int = 5) -> dict[str, Any]:
    """`mirostat_steps`, with the same logits at each step."""
    parameters = {
        "temperature": _float32(rng.uniform(0.5, 1.5)),
        "mirostat_tau": _float32(rng.uniform(0.5, 4)),
        "mirostat_eta": _float32(rng.uniform(0.05, 0.8)),
    }
    logits = _logits(rng)
    results = mirostat_steps([np.array(logits)] * steps, parameters, int(rng.integers(1, 1000)))
    mus = [float(f"{mu:.7g}") for _, mu, _ in results]
    return {"logits": logits, "parameters": parameters, "mirostat_mu": mus} | _steps(results)
