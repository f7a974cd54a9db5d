"""docs/vectors as the inputs of a sampler: docs/vectors/README.md says what is in the files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qsample.contract.interface import Features, Interface
from qsample.contract.tensors import EXTRA_PARAMETERS, TensorSpec
from tests.helpers.reference import philox_uniforms, replay_lists
from tests.helpers.sampler_cases import write_prompts

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "vectors"
Array = np.ndarray
Case = dict[str, Any]
Arrays = dict[str, Array]


def load(name: str) -> dict[str, Any]:
    """A file. Its tables of grammars are those of each of its cases."""
    content: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    if "tables" in content:
        for case in content["cases"]:
            case["tables"] = content["tables"]
    return content


def interface_of(vocab: int, order: str, *, grammars: bool = False, **graph: Any) -> Interface:
    """A sampler with every input, of grammars if asked for. graph: further arguments of `Interface`, such as
    `captured`."""
    features = Features(
        logit_bias=True,
        allowed_tokens=True,
        grammars=grammars,
        probs=True,
        filters=tuple(EXTRA_PARAMETERS),
        filter_order=order,
    )
    return Interface(vocab, (), features=features, **graph)


def start(face: Interface, cases: Sequence[Case]) -> Arrays:
    """The starting state, a row for each case; all have one capacity."""
    capacity = max(case["capacity"] for case in cases)
    sizes = face.sizes | {"B": len(cases), "T": capacity}
    state = {spec.name: np.zeros(spec.shape(sizes), spec.dtype) for spec in face.sampler_states}
    if "grammar_state" in state:
        state["grammar_state"][:] = [case.get("grammar_state", 0) for case in cases]
    for stream, name in enumerate(("noise", "xtc_noise")):
        if name in state:
            state[name][:] = [
                philox_uniforms(int(case["seed"]), capacity, stream) for case in cases
            ]
    return state


def inputs_of(
    face: Interface, cases: Sequence[Case], calls: Sequence[Case], state: Arrays
) -> Arrays:
    """Every input of one call but the logits.

    Args:
        face: the sampler.
        cases: a row each: its seed and parameters.
        calls: what a step of each feeds, `input_ids` and `emit`.
        state: the retained state.
    """
    ids = [call["input_ids"] for call in calls]
    inputs = {
        "input_ids": np.array(
            [[*row, *[0] * (max(map(len, ids)) - len(row))] for row in ids], np.int64
        )
    }
    inputs["input_lengths"] = np.array([len(row) for row in ids], np.int32)
    inputs["emit"] = np.array([call["emit"] for call in calls])
    for spec in face.parameters:
        values = [numbers(case["parameters"].get(spec.name, _off(spec, face))) for case in cases]
        inputs[spec.name] = _stacked(spec, values)
    if face.captured:
        state = {name: np.array(value) for name, value in state.items()}
        write_prompts(inputs | state)
        inputs |= replay_lists(inputs | state)
    for spec in face.grammar_tables:
        inputs[spec.name] = np.array(cases[0]["tables"][spec.name], spec.dtype)
    return inputs | state


def after(state: Arrays, outputs: Mapping[str, Array]) -> Arrays:
    """The state that the next call is given."""
    return {name: outputs.get(f"{name}_RetainedState", value) for name, value in state.items()}


def numbers(value: Any) -> Any:
    """Numbers from JSON, where "-inf", "inf" and "nan" are strings."""
    return [numbers(item) for item in value] if isinstance(value, list) else float(value)


def _off(spec: TensorSpec, face: Interface) -> Any:
    value: Any = spec.off
    for axis in reversed(spec.axes[1:]):
        value = [value] * face.sizes.get(str(axis), 1)
    return value


def _stacked(spec: TensorSpec, values: list[Any]) -> Array:
    """A row each; shorter lists are padded at their ends, sequences of ids at their beginnings."""
    arrays = [np.asarray(value, spec.dtype) for value in values]
    shape = np.max([array.shape for array in arrays], axis=0).astype(int)
    stacked = np.full((len(arrays), *shape), spec.off, spec.dtype)
    for row, array in enumerate(arrays):
        places = [slice(size) for size in array.shape]
        if array.ndim == 2:
            places[1] = slice(shape[1] - array.shape[1], None)
        stacked[(row, *places)] = array
    return stacked
