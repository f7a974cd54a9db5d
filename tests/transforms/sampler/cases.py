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
from qsample.transforms.sampler import Sampler

PAD = 0
Array = np.ndarray
Step = Callable[[Array, Mapping[str, Array]], dict[str, Array]]
ALL_FEATURES = Features(logit_bias=True, allowed_tokens=True, logprobs=True, top_logprobs=3, probs=True)
WITH_PROBS = Features(probs=True)


def interface(vocab: int, features: Features = Features()) -> Interface:  # noqa: B008 (frozen)
    return Interface(vocab, (), features=features)


def make_inputs(
    face: Interface, batch: int = 1, *, sequence: int = 1, capacity: int = 16, stops: int = 1, biases: int = 1, **values: object
) -> dict[str, Array]:
    """Every input and state of the sampler but logits: parameters at their off-values, `values` in their place.

    A value may be a scalar, one value a row, or the whole array. Each row holds its first token, 0, and u = 0.5.
    """
    sizes = face.sizes | {"B": batch, "S": sequence, "T": capacity, "E": stops, "N": biases}
    defaults: dict[str, object] = {"input_lengths": sequence, "emit": True, "lengths": 0, "noise": 0.5, "temperature": 1.0}
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
def session(face: Interface, **options: int) -> ort.InferenceSession:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "sampler.onnx"
        ir.save(export_sampler(face, PAD, **options), path)
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
