"""A host that knows docs/contract.md up to 2.5 and ONNX Runtime, and nothing of the project's code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

OFF: dict[str, tuple[float, type]] = {
    "temperature": (0, np.float32),
    "top_k": (0, np.int32),
    "top_p": (1, np.float32),
    "min_p": (0, np.float32),
    "repetition_penalty": (1, np.float32),
    "presence_penalty": (0, np.float32),
    "frequency_penalty": (0, np.float32),
    "min_length": (0, np.int32),
    "max_length": (2**31 - 1, np.int32),
}
# Of packages for serving; vectors without these inputs leave them out.
OFF_FOR_SERVING: dict[str, tuple[float, type]] = {
    "penalty_last_n": (-1, np.int32),
    "grammar_deadline": (2**31 - 1, np.int32),
}
# What a graph for replay may leave out; nothing, if they have all rows.
LISTS = ("processed_rows", "vocabulary_rows", "searched_rows")
State = dict[str, np.ndarray]


class PlainHost:
    """Feeds a graph NumPy arrays; greedy, unless told otherwise."""

    def __init__(self, package: Path) -> None:
        self.manifest: dict[str, Any] = json.loads((package / "qsample.json").read_text("utf-8"))
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._decoder = ort.InferenceSession(
            package / "decoder.onnx", options, providers=["CPUExecutionProvider"]
        )
        self._initial = ort.InferenceSession(
            package / "initial_state.onnx", options, providers=["CPUExecutionProvider"]
        )
        self._inputs = {value.name for value in self._decoder.get_inputs()}
        optional = {value.name for value in self._decoder.get_overridable_initializers()}
        self._scores = {"scored_places", "scored_ids"} <= optional
        self._outputs = [value.name for value in self._decoder.get_outputs()]

    def start(self, seeds: list[int], capacity: int) -> State:
        """The starting state of a row for each seed."""
        names = [value.name for value in self._initial.get_outputs()]
        values = self._initial.run(
            names, {"seed": np.int64(seeds), "capacity": np.array(capacity, np.int64)}
        )
        return dict(zip(names, values, strict=True))

    def call(self, state: State, ids: Any, lengths: list[int] | None = None, **given: Any) -> State:
        """Every output of a call. ids: [B, S]. lengths: None = S in each row. given: parameters, a value per row, and
        tables of grammars. What the graph lacks is passed over."""
        ids = np.int64(ids)
        rows = len(ids)
        scored = {
            name: np.asarray(given.pop(name), np.int32)
            for name in ("scored_places", "scored_ids")
            if name in given
        }
        assert self._scores or not scored
        feed: dict[str, np.ndarray] = {
            name: np.full(rows, off, dtype)
            for name, (off, dtype) in (OFF | OFF_FOR_SERVING).items()
        }
        feed |= {"stop_ids": np.full((rows, 1), -1, np.int32), "emit": np.full(rows, True)}
        feed |= {
            "logit_bias_ids": np.full((rows, 1), -1, np.int32),
            "logit_bias": np.zeros((rows, 1), np.float32),
        }
        words = -(-self.manifest["interface"]["vocab_size"] // 32)
        guesses = self.manifest["interface"]["features"].get("num_speculative_tokens", 0)
        feed |= {
            "prompt_lookup_num_tokens": np.zeros(rows, np.int32),
            "draft_ids": np.full((rows, guesses), -1, np.int32),
        }
        feed |= {
            "allowed_tokens": np.full((rows, words), -1, np.int32),
            **dict.fromkeys(LISTS, np.arange(rows)),
        }
        if self.manifest["interface"].get("captured"):
            state = state | {"tokens": self._with_inputs(state, ids, lengths)}
        feed |= no_grammar(self.manifest["interface"]["vocab_size"])
        feed |= {"input_ids": ids, "input_lengths": np.int32(lengths or [ids.shape[1]] * rows)}
        feed |= {name: np.asarray(value, feed[name].dtype) for name, value in given.items()} | state
        values = self._decoder.run(
            self._outputs, {name: feed[name] for name in feed if name in self._inputs} | scored
        )
        return dict(zip(self._outputs, values, strict=True))

    def _with_inputs(self, state: State, ids: Any, lengths: list[int] | None) -> np.ndarray:
        """The tokens of rows that run, with this call's inputs: a graph for replay does not record them."""
        tokens = state["tokens"].copy()
        for row, start in enumerate(state["lengths"]):
            if state["status"][row] == 0:
                count = ids.shape[1] if lengths is None else lengths[row]
                tokens[row, start:] = ids[row, 0]
                tokens[row, start : start + count] = ids[row, :count]
        return tokens

    def after(self, state: State, outputs: State) -> State:
        """The state that the next call is given."""
        return {name: outputs.get(retained(name), value) for name, value in state.items()}

    def generate(self, state: State, prompt: list[int], count: int, **given: Any) -> list[int]:
        """The new tokens of one row, which has read what `state` says."""
        tokens: list[int] = []
        ids: Any = [prompt]
        for _ in range(count):
            outputs = self.call(state, ids, **given)
            state, ids = self.after(state, outputs), outputs["next_ids"]
            tokens.append(int(ids[0, 0]))
        return tokens


def no_grammar(vocab_size: int) -> dict[str, np.ndarray]:
    """The tables that let rows in state 0 draw any token."""
    return {
        "grammar_classes": np.zeros((1, vocab_size), np.int32),
        "grammar_transitions": np.zeros((1, 1), np.int32),
        "grammar_distances": np.zeros(1, np.int32),
        "grammar_maps": np.zeros(1, np.int32),
        "grammar_late": np.zeros(1, np.int32),
        "grammar_drafts": np.full(1, -1, np.int32),
    }


def retained(state: str) -> str:
    """The output that holds a state's next value."""
    return (
        state.replace("past_key_values.", "present.") if "." in state else f"{state}_RetainedState"
    )
