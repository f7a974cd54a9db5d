"""A decoder file as its authors run it: a single row, no padding, a mask of 1, a cache that grows
token by token.

A baked graph is compared with its logits. Further outputs show the positions, masks and scores of
the file's arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from qsample.addons.bake.conventions import (
    IDS,
    KEEP,
    LOGITS,
    MASK,
    POSITIONS,
    TOTAL_TOKENS,
    WRITE,
    ForeignGraph,
)
from qsample.contract.arrays import Array
from qsample.errors import UnsupportedModelError
from qsample.exporters.parity import CONTINUATION_TOKENS, Reference, reference_lengths
from qsample.graph.evaluate import with_outputs
from qsample.ort.options import WEIGHTS_FOLDER_KEY, session_options
from qsample.ort.providers import CPU


class Original:
    """A session on the file. Caches are by the names of their inputs; a call takes the last call's
    cache."""

    def __init__(
        self, foreign: ForeignGraph, extra: Iterable[ir.Value] = (), *, rewritten: bool = False
    ) -> None:
        """extra: values of `foreign` that are outputs as well. rewritten: run the model in memory,
        not its file."""
        self._presents = {
            str(past.name): str(present.name)
            for layer in foreign.layers
            for past, present in zip(layer.pasts, layer.presents, strict=True)
        } | {str(each.past.name): str(each.present.name) for each in foreign.recurrences}
        self._empty = {
            str(past.name): layer.shape(layer.ring or 0)
            for layer in foreign.layers
            for past in layer.pasts
        }
        self._shapes = {
            str(past.name): layer.shape for layer in foreign.layers for past in layer.pasts
        }
        self._states = {
            str(each.past.name): (each.shape, each.dtype.numpy()) for each in foreign.recurrences
        }
        self.dtype = foreign.dtype.numpy()
        self._path = foreign.path
        extra = list(extra)
        options = session_options()
        graph: str | bytes = str(foreign.path)
        if extra or rewritten:
            options.add_session_config_entry(WEIGHTS_FOLDER_KEY, str(foreign.path.parent))
            graph = with_outputs(foreign.model, extra)
        try:
            self._session = ort.InferenceSession(graph, options, providers=[CPU])
        except Exception as error:  # onnxruntime's own kinds
            raise UnsupportedModelError(
                f"{foreign.path} cannot be checked: ONNX Runtime does not run it on this machine's CPU "
                f"({' '.join(str(error).split())!s:.300})"
            ) from error
        self._inputs = {value.name for value in self._session.get_inputs()}
        self._outputs = [value.name for value in self._session.get_outputs()]

    def start(self) -> dict[str, Array]:
        """The cache of no token."""
        caches = {name: np.zeros(shape, self.dtype) for name, shape in self._empty.items()}
        return caches | {
            name: np.zeros((1, *shape), dtype) for name, (shape, dtype) in self._states.items()
        }

    def filled(self, tokens: int, generator: np.random.Generator) -> dict[str, Array]:
        """A cache of `tokens` tokens of random numbers."""
        caches = {
            name: generator.standard_normal(shape(tokens)).astype(self.dtype)
            for name, shape in self._shapes.items()
        }
        return self.start() | caches

    def run(self, ids: Sequence[int], past: Mapping[str, Array], done: int) -> dict[str, Array]:
        """Every output by name, for `ids` after the `done` tokens of `past`."""
        total = done + len(ids)
        feeds: dict[str, Any] = {
            IDS: np.array([ids], np.int64),
            MASK: np.ones((1, total), np.int64),
            POSITIONS: np.arange(done, total)[None],
            WRITE: np.array([done], np.int64),
            TOTAL_TOKENS: np.array([total], np.int64),
            **dict.fromkeys(KEEP, np.array(0, np.int64)),
            **past,
        }
        types = {value.name: value.type for value in self._session.get_inputs()}
        given = {
            name: array.astype(np.int32) if types.get(name) == "tensor(int32)" else array
            for name, array in feeds.items()
            if name in self._inputs
        }
        try:
            results = self._session.run(None, given)
        except Exception as error:  # onnxruntime's own kinds
            raise UnsupportedModelError(
                f"{self._path} cannot be checked: ONNX Runtime fails to run it on this machine's CPU "
                f"({' '.join(str(error).split())[-300:]})"
            ) from error
        return dict(zip(self._outputs, results, strict=True))

    def step(
        self, ids: Sequence[int], past: Mapping[str, Array], done: int
    ) -> tuple[Array, dict[str, Array]]:
        """[V] float32 after the last of `ids`, and the new cache."""
        results = self.run(ids, past, done)
        logits: Array = (
            results[LOGITS].reshape(-1, results[LOGITS].shape[-1])[-1].astype(np.float32)
        )
        return logits, {name: results[present] for name, present in self._presents.items()}


def probes(longest: int) -> list[tuple[int, int]]:
    """Calls, as numbers of cached and of new tokens, that show the use of positions in a file; the
    last fills a cache of `longest` tokens. Neighbours tell a window from a chunk: both end with the
    keys before a token, but from a token to the next, a window moves and a chunk grows. A depth in
    between shows what changes with the depth."""
    depths = (0, longest * 5 // 8, longest - 2)
    return [
        (max(depth, 0), min(count, longest)) for depth, count in zip(depths, (9, 2, 2), strict=True)
    ]


def reference(
    original: Original, vocab_size: int, limit: int | None, windows: Iterable[int]
) -> Reference:
    """The file's logits on random prompts of different lengths (seeded), the longest beyond its
    attention windows. limit: the positions that it knows; None for any number."""
    generator = np.random.default_rng(0)
    sizes = sorted({window for window in windows if window > 0})
    lengths, passed = reference_lengths(limit, sizes)
    prompts = []
    continuations = []
    logits = []
    for length in lengths:
        row = generator.integers(0, vocab_size, length + CONTINUATION_TOKENS).tolist()
        after, past = original.step(row[:length], original.start(), 0)
        rows = [after]
        for done in range(length, len(row)):
            after, past = original.step([row[done]], past, done)
            rows.append(after)
        prompts.append(row[:length])
        continuations.append(row[length:])
        logits.append(np.stack(rows))
    said = ["passed by a prompt"] * bool(passed)
    longer = [str(size) for size in sizes if size not in passed]
    said += [f"not compared: {', '.join(longer)}"] * bool(longer)
    return Reference(prompts, continuations, logits, windows=", ".join(said) or "none")
