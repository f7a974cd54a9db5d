"""Inputs for one sampling step, and the graph that takes it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from qsample.contract.interface import Features, Interface
from qsample.contract.tensors import (
    CANDIDATES,
    EXTRA_PARAMETERS,
    GRAMMAR_AXES,
    PAD_STOP_ID,
    TensorSpec,
)
from qsample.sampler import build_sampler
from tests.helpers.reference import REPLAY_LISTS, reference_step, replay_lists
from tests.helpers.reference_grammar import TABLE_NAMES, random_tables

PAD = 0
Array = np.ndarray
Step = Callable[[Array, Mapping[str, Array]], dict[str, Array]]
ALL_FEATURES = Features(
    logit_bias=True,
    allowed_tokens=True,
    grammars=True,
    logprobs=True,
    top_logprobs=3,
    probs=True,
)
WITH_PROBS = Features(probs=True)


def interface(vocab: int, features: Features = Features()) -> Interface:  # noqa: B008 (frozen)
    return Interface(vocab, (), features=features)


def make_inputs(
    face: Interface,
    batch: int = 1,
    *,
    sequence: int = 1,
    capacity: int = 16,
    stops: int = 1,
    biases: int = 1,
    breakers: int = 1,
    bad_words: tuple[int, int] = (1, 1),
    **values: object,
) -> dict[str, Array]:
    """Every input and state of the sampler but logits: parameters at their off-values, `values` in their place.

    A value may be a scalar, one value a row, or the whole array. Each row holds its first token, 0, and u = 0.5, and is
    in every list of a graph for replay. `bad_words` is how many forbidden sequences a row has, and how long they are.
    """
    sizes = face.sizes | {
        "B": batch,
        "S": sequence,
        "T": capacity,
        "E": stops,
        "N": biases,
        "D": breakers,
    }
    sizes |= {
        "Q": bad_words[0],
        "L": bad_words[1],
    }
    for name, axis in zip(REPLAY_LISTS, ("R.processed", "R.vocabulary", "R"), strict=True):
        sizes[axis] = len(values.setdefault(name, np.arange(batch)))
    sizes |= dict.fromkeys(GRAMMAR_AXES, 1)
    if "grammar_transitions" in values:
        sizes["X"], sizes["Y"] = np.shape(values["grammar_transitions"])
        sizes["Z"] = len(values["grammar_classes"])
    if not face.captured:
        for name in REPLAY_LISTS:
            del values[name]
    defaults: dict[str, object] = {
        "input_lengths": sequence,
        "emit": True,
        "lengths": 0,
        "noise": 0.5,
        "xtc_noise": 0.5,
        "temperature": 1.0,
    }
    inputs = {}
    for spec in (*face.sampler.inputs[1:], *face.sampler.states):
        value = values.pop(
            spec.name, defaults.get(spec.name, spec.off if spec.off is not None else 0)
        )
        inputs[spec.name] = _fill(spec, value, spec.shape(sizes))
    assert not values, f"unknown inputs: {sorted(values)}"
    if face.captured:
        write_prompts(inputs)
    return inputs


def of_rows(inputs: Mapping[str, Array], rows: Array) -> dict[str, Array]:
    """The inputs of some rows, [n] integers, of which a graph for replay leaves nothing out."""
    whole = {*TABLE_NAMES, *REPLAY_LISTS}
    part = {name: array if name in whole else array[rows] for name, array in inputs.items()}
    return part | {name: np.arange(len(rows)) for name in REPLAY_LISTS if name in inputs}


def write_prompts(inputs: Mapping[str, Array]) -> None:
    """Write this call's inputs to `tokens`, as a host does for a graph for replay; in place."""
    for tokens, ids, start, count in zip(
        *(inputs[name] for name in ("tokens", "input_ids", "lengths", "input_lengths")), strict=True
    ):
        if start == 0:
            tokens[:] = ids[0]
        room = tokens[start : start + count]
        room[:] = ids[: len(room)]


def _fill(spec: TensorSpec, value: object, shape: tuple[int, ...]) -> Array:
    array = np.asarray(value).astype(spec.dtype)
    if array.ndim == 1 and len(shape) > 1 and array.shape[0] == shape[0]:
        array = array[:, None]
    return np.array(np.broadcast_to(array, shape))


@functools.lru_cache(maxsize=16)  # a graph and its session take 15 MB
def graph(face: Interface, **options: int) -> ir.Model:
    return build_sampler(face, PAD, **options)


def opened(model: ir.Model) -> ort.InferenceSession:
    """A session of two threads, which do not spin while they wait: other test processes need the processors."""
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = 2
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return ort.InferenceSession(ir.to_proto(model).SerializeToString(), settings)


@functools.lru_cache(maxsize=16)
def session(face: Interface, **options: int) -> ort.InferenceSession:
    return opened(graph(face, **options))


@functools.lru_cache(maxsize=16)
def sampler(face: Interface, **options: int) -> Step:
    """The graph's step. The options are those of `build_sampler`."""
    runner = session(face, **options)
    names = [output.name for output in runner.get_outputs()]

    def step(logits: Array, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return dict(zip(names, runner.run(names, {"logits": logits, **inputs}), strict=True))

    return step


# How random_step draws the inputs of the extra filters; a filter's first input is off in most rows.
EXTRA_VALUES: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "typical_p": lambda rng, n: rng.uniform(0.05, 0.97, n),
    "top_a": lambda rng, n: rng.uniform(0.02, 1, n),
    "epsilon_cutoff": lambda rng, n: 10 ** rng.uniform(-4, -0.5, n),
    "eta_cutoff": lambda rng, n: 10 ** rng.uniform(-4, -0.3, n),
    "top_n_sigma": lambda rng, n: rng.uniform(0.2, 3, n),
    "xtc_probability": lambda rng, n: rng.choice([0.5, 1, 1], n),
    "xtc_threshold": lambda rng, n: 10 ** rng.uniform(-3, -0.25, n),
    "dry_multiplier": lambda rng, n: rng.choice([0.5, 0.8, 3], n),
    "dry_base": lambda rng, n: rng.choice([0.9, 1, 1.75, 1.75, 2], n),
    "dry_allowed_length": lambda rng, n: rng.choice([1, 1, 2, 3], n),
    "dry_penalty_last_n": lambda rng, n: rng.choice([-1, -1, -1, 0, 5, 12], n),
    "penalty_last_n": lambda rng, n: rng.choice([0, 1, 2, 5, 12, 100], n),
    "no_repeat_ngram_size": lambda rng, n: rng.integers(1, 5, n),
    "dynatemp_range": lambda rng, n: rng.uniform(0.1, 2, n),
    "dynatemp_exponent": lambda rng, n: rng.uniform(0.3, 2, n),
    "mirostat_tau": lambda rng, n: rng.uniform(0.3, 5, n),
    "mirostat_eta": lambda rng, n: rng.uniform(0.05, 0.9, n),
    "adaptive_target": lambda rng, n: rng.choice([0, 0.05, 0.3, 0.7, 1], n),
    "adaptive_decay": lambda rng, n: rng.choice([0, 0.5, 0.9, 0.99], n),
}


def random_step(
    rng: np.random.Generator, face: Interface, batch: int, sequence: int
) -> tuple[Array, dict[str, Array]]:
    """A consistent random state, logits with and without ties and masks, and parameters of every kind, row by row.

    The newest tokens and most histories are made of a few likely tokens, so that they repeat themselves.
    """
    vocab, capacity = face.vocab_size, 24
    logits = rng.normal(size=(batch, vocab)) * rng.choice([0.01, 1, 1, 2, 5, 30])
    if rng.random() < 0.5:
        logits = np.round(logits * rng.choice([1, 4, 16])) / 4
    if rng.random() < 0.3:
        logits[rng.random((batch, vocab)) < 0.5] = -np.inf
    likely = np.argsort(-logits, axis=1)[:, : rng.integers(1, 5)]

    def pick(*values: float) -> Array:
        return rng.choice(values, batch)

    def ids(*shape: int) -> Array:
        return np.where(
            rng.random((batch, *shape)) < 0.5, -1, rng.integers(0, vocab, (batch, *shape))
        )

    def repeating(*shape: int) -> Array:
        chosen = rng.integers(0, likely.shape[1], (batch, *shape))
        return np.take_along_axis(likely, chosen.reshape(batch, -1), axis=1).reshape(batch, *shape)

    def uniforms() -> Array:
        return rng.integers(0, 2**24, (batch, capacity)) / 2**24

    repeats = rng.random((batch, 1)) < 0.7
    bad_words = repeating(3, 3)
    bad_words[np.arange(3) < rng.integers(0, 4, (batch, 3, 1))] = (
        PAD_STOP_ID  # none of them, or up to three tokens
    )
    values: dict[str, object] = {
        "temperature": pick(0, 0.01, 0.5, 0.7, 1, 1, 1.5, 2, 100),
        "top_k": pick(0, 0, 1, 2, 5, 40, 64, 65, 90, 500, 5000),
        "top_p": pick(1, 1, 0.01, 0.3, 0.9, 0.99),
        "min_p": pick(0, 0, 0.01, 0.1, 0.5, 1),
        "repetition_penalty": pick(1, 1, 1.3, 0.8),
        "presence_penalty": pick(0, 0.5, -1),
        "frequency_penalty": pick(0, 0.3),
        "min_length": pick(0, 20),
        "max_length": pick(100, 8),
        "stop_ids": ids(3),
        "logit_bias_ids": ids(4),
        "logit_bias": rng.normal(size=(batch, 4)),
        "dry_sequence_breakers": np.where(rng.random((batch, 2)) < 0.85, -1, repeating(2)),
        "bad_words_ids": np.where(rng.random((batch, 1, 1)) < 0.75, -1, bad_words),
        "lengths": pick(0, 3, 9, 20, 20),
        "status": pick(0, 0, 0, 0, 0, 0, 1, 2, 3),
        "emit": pick(True, True, True, False),
        "input_ids": repeating(sequence),
        "input_lengths": rng.integers(1, sequence + 1, batch),
        "noise": uniforms(),
        "xtc_noise": uniforms(),
        "mirostat_mu": np.where(rng.random(batch) < 0.3, 0, rng.uniform(-1, 8, batch)),
        "adaptive_error": np.where(rng.random(batch) < 0.3, 0, rng.uniform(-0.5, 0.5, batch)),
        "tokens": np.where(repeats, repeating(capacity), rng.integers(0, vocab, (batch, capacity))),
    }
    if rng.random() < 0.5:
        values["allowed_tokens"] = rng.integers(-(2**31), 2**31, (batch, -(-vocab // 32)))
    for first, *_ in EXTRA_PARAMETERS.values():
        if first.name in EXTRA_VALUES:
            # DRY needs a repetition, and that neither is banned.
            on = rng.random(batch) < (0.6 if first.name == "dry_multiplier" else 0.25)
            values[first.name] = np.where(on, EXTRA_VALUES[first.name](rng, batch), first.off)
    if face.features.filters:  # an extra filter finds little to do after those of every graph
        alone = rng.random(batch) < 0.5
        values |= {
            name: np.where(alone, off, values[name])
            for name, off in (("top_k", 0), ("top_p", 1), ("min_p", 0))
        }
    values |= {name: draw(rng, batch) for name, draw in EXTRA_VALUES.items() if name not in values}
    if face.features.grammars:
        tables = random_tables(rng, vocab)
        states = len(tables["grammar_maps"])
        values |= tables
        values["grammar_state"] = np.where(
            rng.random(batch) < 0.3, 0, rng.integers(0, states, batch)
        )
        values["grammar_deadline"] = pick(2**31 - 1, 0, 10, 22)
    known = {spec.name for spec in (*face.sampler.inputs, *face.sampler.states)}
    values = {name: value for name, value in values.items() if name in known}
    sizes = {"stops": 3, "biases": 4, "breakers": 2}
    inputs = make_inputs(
        face,
        batch,
        sequence=sequence,
        capacity=capacity,
        bad_words=bad_words.shape[1:],
        **sizes,
        **values,
    )
    for row in range(batch):
        length = int(inputs["lengths"][row])
        inputs["tokens"][row, length:] = inputs["tokens"][row, 0]
        np.add.at(inputs["output_counts"][row], inputs["tokens"][row, 1:length], 1)
    if face.captured:
        write_prompts(inputs)
        if rng.random() < 0.5:
            inputs |= replay_lists(inputs)
    return logits.astype(np.float32), inputs


# A token may differ from the float64 oracle's only if u lies this close to a boundary of the cumulative
# distribution: the float32 weights are off by a few 2**-24 relative, their arguments by 2**-24 * |l - max| / t.
BOUNDARY = 1e-5
# A filter may decide otherwise than the oracle only if its closest call is this close, relative to the threshold.
EDGE = 1e-5


def excused(expected: Mapping[str, Array], row: int, wrong: list[str]) -> bool:
    """Whether float32 cannot tell: u lies on a boundary, and nothing but the token differs, or a filter on an edge."""
    return expected["edge"][row] < EDGE or (
        expected["margin"][row] < BOUNDARY and "support" not in wrong
    )


def compare_step(got: Mapping[str, Array], expected: Mapping[str, Array], row: int) -> list[str]:
    """The names of the outputs that differ in this row. Supports must be equal, probabilities to float32 rounding."""
    wrong = []
    for name in got:
        g, e = got[name][row], expected[name][row]
        if name == "top_logprob_ids":  # the order of ties is free; the values are compared
            continue
        if (
            name == "adjusted_logits" and np.isnan(e).any()
        ):  # of a row that samples nothing, or of an invalid row
            continue
        if name in ("logprobs", "top_logprobs"):
            g, e = (np.where(one < expected["logprob_floor"][row], -np.inf, one) for one in (g, e))
        same = (
            np.allclose(g, e, rtol=5e-5, atol=1e-6) if g.dtype.kind == "f" else np.array_equal(g, e)
        )
        if not same:
            wrong.append(name)
    if "probs" in got:
        # A weight below float32's smallest normal number may be zero on one side only.
        g, e = got["probs"][row], expected["probs"][row]
        if np.any((g > 0) & (e == 0)) or np.any((g == 0) & (e > 1e-37)):
            wrong.append("support")
    return wrong


def expected_step(
    face: Interface, logits: Array, inputs: Mapping[str, Array], num_candidates: int = CANDIDATES
) -> dict[str, Array]:
    """The reference's step."""
    chosen = face.features
    with np.errstate(all="ignore"):  # logits of any size
        return reference_step(
            logits,
            inputs,
            pad_token_id=PAD,
            top_logprobs=chosen.top_logprobs,
            logprobs_mode=chosen.logprobs_mode,
            filter_order=chosen.filter_order,
            num_candidates=num_candidates,
        )


def check_rows(
    face: Interface, logits: Array, inputs: Mapping[str, Array], num_candidates: int = CANDIDATES
) -> int:
    """Assert that a step of the graph is the reference's. Returns how many rows are too close to tell."""
    expected = expected_step(face, logits, inputs, num_candidates)
    got, close = sampler(face, num_candidates=num_candidates)(logits, inputs), 0
    for row in range(len(logits)):
        if wrong := compare_step(got, expected, row):
            values = {
                name: array[row] for name, array in inputs.items() if array[row : row + 1].size < 20
            }
            assert excused(expected, row, wrong), (wrong, values)
            close += 1
    return close


def check_steps(face: Interface, seed: int, steps: int, num_candidates: int = CANDIDATES) -> None:
    """Assert that random steps of the graph are the reference's; one row in a hundred may be too close to tell."""
    rng = np.random.default_rng(seed)
    rows = close = 0
    for _ in range(steps):
        batch = int(rng.integers(1, 7))
        close += check_rows(
            face, *random_step(rng, face, batch, int(rng.integers(1, 4))), num_candidates
        )
        rows += batch
    assert close <= rows // 100
