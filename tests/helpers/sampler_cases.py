"""Inputs for one sampling step, and the two ways to run it: the eager module and the exported graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch

from qsample.contract import Features, Interface, TensorSpec
from qsample.exporters.sampler import export_sampler
from qsample.transforms.sampler.module import Sampler

PAD = 0
Array = np.ndarray
Step = Callable[[Array, Mapping[str, Array]], dict[str, Array]]
ALL_FEATURES = Features(logit_bias=True, allowed_tokens=True, logprobs=True, top_logprobs=3, probs=True)
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
    **values: object,
) -> dict[str, Array]:
    """Every input and state of the sampler but logits: parameters at their off-values, `values` in their place.

    A value may be a scalar, one value a row, or the whole array. Each row holds its first token, 0, and u = 0.5.
    """
    sizes = face.sizes | {"B": batch, "S": sequence, "T": capacity, "E": stops, "N": biases}
    defaults: dict[str, object] = {
        "input_lengths": sequence,
        "emit": True,
        "lengths": 0,
        "noise": 0.5,
        "temperature": 1.0,
    }
    inputs = {}
    for spec in (*face.sampler.inputs[1:], *face.sampler.states):
        value = values.pop(spec.name, defaults.get(spec.name, spec.off if spec.off is not None else 0))
        inputs[spec.name] = _fill(spec, value, spec.shape(sizes))
    assert not values, f"unknown inputs: {sorted(values)}"
    return inputs


def _fill(spec: TensorSpec, value: object, shape: tuple[int, ...]) -> Array:
    array = np.asarray(value).astype(spec.dtype)
    if array.ndim == 1 and len(shape) > 1 and array.shape[0] == shape[0]:
        array = array[:, None]
    return np.array(np.broadcast_to(array, shape))


@functools.cache
def eager(face: Interface, **options: int) -> Step:
    sampler = Sampler(face, PAD, **options)

    def step(logits: Array, inputs: Mapping[str, Array]) -> dict[str, Array]:
        with torch.inference_mode():
            results = sampler(torch.from_numpy(logits), {k: torch.from_numpy(v.copy()) for k, v in inputs.items()})
        return {name: tensor.numpy() for name, tensor in results.items()}

    return step


@functools.cache
def graph(face: Interface, **options: int) -> ir.Model:
    return export_sampler(face, PAD, **options)


@functools.cache
def session(face: Interface, **options: int) -> ort.InferenceSession:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "sampler.onnx"
        ir.save(graph(face, **options), path)
        settings = ort.SessionOptions()
        settings.intra_op_num_threads = 2
        return ort.InferenceSession(path, settings)


@functools.cache
def exported(face: Interface, **options: int) -> Step:
    runner = session(face, **options)
    names = [output.name for output in runner.get_outputs()]

    def step(logits: Array, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return dict(zip(names, runner.run(names, {"logits": logits, **inputs}), strict=True))

    return step


def random_step(rng: np.random.Generator, face: Interface, batch: int, sequence: int) -> tuple[Array, dict[str, Array]]:
    """A consistent random state, logits with and without ties and masks, and parameters of every kind, row by row."""
    vocab, capacity = face.vocab_size, 16
    logits = rng.normal(size=(batch, vocab)) * rng.choice([0.01, 1, 5, 30])
    if rng.random() < 0.5:
        logits = np.round(logits * rng.choice([1, 4, 16])) / 4
    if rng.random() < 0.3:
        logits[rng.random((batch, vocab)) < 0.5] = -np.inf

    def pick(*values: float) -> Array:
        return rng.choice(values, batch)

    def ids(count: int) -> Array:
        return np.where(rng.random((batch, count)) < 0.5, -1, rng.integers(0, vocab, (batch, count)))

    values: dict[str, object] = {
        "temperature": pick(0, 0.01, 0.7, 1, 2, 100),
        "top_k": pick(0, 0, 1, 2, 5, 40, 90, 500, 5000),
        "top_p": pick(1, 1, 0.01, 0.3, 0.9, 0.99),
        "min_p": pick(0, 0, 0.01, 0.1, 0.5, 1),
        "repetition_penalty": pick(1, 1, 1.3, 0.8),
        "presence_penalty": pick(0, 0.5, -1),
        "frequency_penalty": pick(0, 0.3),
        "min_length": pick(0, 20),
        "max_length": pick(100, 8),
        "stop_ids": ids(3),
        "lengths": pick(0, 3, 9),
        "status": pick(0, 0, 0, 1, 2, 3, 4),
        "emit": pick(True, True, True, False),
        "input_ids": rng.integers(0, vocab, (batch, sequence)),
        "input_lengths": rng.integers(1, sequence + 1, batch),
        "noise": rng.integers(0, 2**24, (batch, capacity)) / 2**24,
        "tokens": rng.integers(0, vocab, (batch, capacity)),
    }
    if face.features.logit_bias:
        values |= {"logit_bias_ids": ids(4), "logit_bias": rng.normal(size=(batch, 4))}
    if face.features.allowed_tokens and rng.random() < 0.5:
        values["allowed_tokens"] = rng.integers(-(2**31), 2**31, (batch, -(-vocab // 32)))
    inputs = make_inputs(face, batch, sequence=sequence, capacity=capacity, stops=3, biases=4, **values)
    for row in range(batch):
        length = int(inputs["lengths"][row])
        inputs["tokens"][row, length:] = inputs["tokens"][row, 0]
        np.add.at(inputs["output_counts"][row], inputs["tokens"][row, 1:length], 1)
    return logits.astype(np.float32), inputs


# A token may differ from the float64 oracle's only where u lies this close to a boundary of the cumulative
# distribution: the float32 weights are off by a few 2**-24 relative, their arguments by 2**-24 * |l - max| / t.
BOUNDARY = 1e-5


def compare_step(got: Mapping[str, Array], expected: Mapping[str, Array], row: int) -> list[str]:
    """The names of the outputs that differ in this row. Supports must be equal, probabilities to float32 rounding."""
    wrong = []
    for name in got:
        g, e = got[name][row], expected[name][row]
        if name == "top_logprob_ids":  # the order of ties is free; the values are compared
            continue
        if name == "adjusted_logits" and np.isnan(e).any():  # of a row that samples nothing, or of an invalid one
            continue
        same = np.allclose(g, e, rtol=5e-5, atol=1e-6) if g.dtype.kind == "f" else np.array_equal(g, e)
        if not same:
            wrong.append(name)
    if "probs" in got:
        # A weight below float32's smallest normal number may be zero in one and not in the other.
        g, e = got["probs"][row], expected["probs"][row]
        if np.any((g > 0) & (e == 0)) or np.any((g == 0) & (e > 1e-37)):
            wrong.append("support")
    return wrong
