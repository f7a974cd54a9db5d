"""A decode graph and the logits of its original model enter; the measured difference leaves, or a
ParityError.

The gate runs before a package is published. Teacher-forced, it compares every logit of a ragged
batch of prompts, of a padded later chunk and of a decode step, and (with a sampler) greedy tokens
with the argmax. These are three calls, because each reads all weights; the states that they leave
are compared with the states after the same tokens in one piece. Attention windows that are longer
than all prompts are made smaller, in the model and in the graph alike. The gate knows arrays and
graphs only: the caller makes the reference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import onnx_ir as ir

from qsample.contract.arrays import Array
from qsample.contract.interface import Interface
from qsample.contract.tensors import CAPACITY, LOGITS
from qsample.errors import ParityError, UnsupportedModelError
from qsample.graph import gqa
from qsample.graph.compare import largest_difference, largest_finite
from qsample.graph.gqa import narrow_windows
from qsample.graph.join import return_logits
from qsample.graph.runner import GraphRunner, error_of_scores, scores_of_last_tokens
from qsample.graph.weights import load_graph

# Largest difference per unit of the largest logit. Rounding alone stays a factor of several below
# (float32: 1e-5).
TOLERANCES: Final = {"float32": 1e-4, "float16": 3e-2}
_PROMPT_LENGTHS: Final = (9, 4, 14)
# A window has an effect only on prompts that exceed it; they do so by this many tokens.
_TOKENS_BEYOND_WINDOW: Final = 3
# The attention of the reference takes time quadratic in the length, so no prompt exceeds a longer
# window.
_MAX_PASSED_WINDOW: Final = 640
# The later chunk has this many tokens, and this many tokens of padding.
_CHUNK_TOKENS: Final = 3
_PADDING_TOKENS: Final = 2
# The tokens after each prompt are the chunk and a step.
CONTINUATION_TOKENS: Final = _CHUNK_TOKENS + 1


class Narrowed(NamedTuple):
    """The last row of a `Reference` with smaller attention windows.

    Attributes:
        windows: the size of each window → its smaller size.
        logits: [CONTINUATION_TOKENS + 1, V].
    """

    windows: Mapping[int, int]
    logits: Array


@dataclass(frozen=True, slots=True, eq=False)
class ImageReference:
    """The results of the original model for a prompt of n tokens with images.

    Attributes:
        prompt: the token ids, which include placeholders.
        following: the token after the prompt.
        rows: [n] int32, the contract's `image_rows`.
        features: [F, C] float32, the contract's `image_features`.
        logits: [2, V], after the prompt and after the token that follows.
        offsets: [n + 1, 3] int32, the contract's `position_offsets`; None for positions of one
            part.
    """

    prompt: list[int]
    following: int
    rows: Array
    features: Array
    logits: Array
    offsets: Array | None = None


@dataclass(frozen=True, slots=True)
class Reference:
    """Logits of the original model: after prompts, and after each of the tokens that follow.

    Attributes:
        prompts: the token ids of each row.
        continuations: [rows, CONTINUATION_TOKENS].
        logits: [CONTINUATION_TOKENS + 1, V] for each row.
        narrowed: the results with smaller windows, if a window is too long for a prompt and can be
            made smaller.
        windows: how the model's attention windows are compared, in words.
        images: the results for a prompt with images, if the package reads images.
    """

    prompts: list[list[int]]
    continuations: list[list[int]]
    logits: list[Array]
    narrowed: Narrowed | None = None
    windows: str = "none"
    images: ImageReference | None = None

    def of_first_tokens(self, vocab_size: int) -> Reference:
        """The same without the logits of the tokens from `vocab_size` on."""
        narrowed = self.narrowed
        images = self.images
        return replace(
            self,
            logits=[row[..., :vocab_size] for row in self.logits],
            narrowed=narrowed and narrowed._replace(logits=narrowed.logits[..., :vocab_size]),
            images=images and replace(images, logits=images.logits[..., :vocab_size]),
        )


@dataclass(frozen=True, slots=True)
class Parity:
    """The figures of a passed gate.

    Attributes:
        max_error: the largest absolute difference of logits.
        scale: the largest |logit|.
        tolerance: the largest accepted difference.
        rows: the number of prompts.
        longest_prompt: the tokens of the longest prompt.
        attention_layers: the number of layers with a GroupQueryAttention.
        plain_attention_layers: the number of layers that attend through plain operators.
        windows: how attention windows were compared; see `Reference`.
    """

    max_error: float
    scale: float
    tolerance: float
    rows: int
    longest_prompt: int
    attention_layers: int
    plain_attention_layers: int
    windows: str


def rounded_up(error: float, tolerance: float) -> float:
    """A measured error for the manifest: the next power of ten, or the tolerance, because its
    digits depend on the number of threads; without a tolerance, two digits."""
    if not 0 < error < math.inf:
        return error
    return (
        float(f"{error:.2g}")
        if tolerance == math.inf
        else min(10.0 ** math.ceil(math.log10(error)), tolerance)
    )


class Compared(NamedTuple):
    """Logits of a call of the graph, and the model's: [V] or [rows, V]."""

    got: Array
    wanted: Array

    @property
    def error(self) -> float:
        """The largest difference; NaN if either side holds a NaN. Equal infinities do not
        differ."""
        return largest_difference(self.got, self.wanted)


class Difference(NamedTuple):
    """The largest difference, the largest finite |logit|, and the largest accepted difference."""

    error: float
    scale: float
    tolerance: float


def reference_lengths(context: int | None, windows: Iterable[int]) -> tuple[list[int], list[int]]:
    """The lengths of the prompts of a `Reference`, in order, and the attention `windows` that the
    last prompt exceeds. context: the positions that the model knows; None for any number. Raises
    UnsupportedModelError if it has no room for a prompt and the tokens after it."""
    longest = (2**20 if context is None else context) - CONTINUATION_TOKENS - 1
    if longest < 1:
        raise UnsupportedModelError(
            f"the model knows {context} positions (max_position_embeddings); it needs {CONTINUATION_TOKENS + 2} to be "
            "compared with its graph. Correct its config.json"
        )
    passed = [
        size
        for size in windows
        if size < _MAX_PASSED_WINDOW and size + _TOKENS_BEYOND_WINDOW <= longest
    ]
    beyond = [max(passed) + _TOKENS_BEYOND_WINDOW] if passed else []
    return sorted({min(length, longest) for length in (*_PROMPT_LENGTHS, *beyond)}), passed


def check(
    folder: Path,
    interface: Interface,
    expected: Reference,
    *,
    plain_attention_layers: int = 0,
    tolerance: float | None = None,
    original: str = "the eager model",
) -> Parity:
    """Compare the decode graph in `folder` with `expected`. Its logits are read even if it does not
    return them.

    Args:
        folder: the folder with decoder.onnx and initial_state.onnx.
        interface: the interface of the graph.
        expected: the results of the original.
        plain_attention_layers: the number of layers that attend through plain operators.
        tolerance: the largest difference per unit of the largest logit; by default the graph's
            dtype decides (TOLERANCES).
        original: the name of the original in messages.

    Raises:
        ParityError: a logit or a state differs by more than the tolerance, a greedy token is not
            the argmax, or not every other attention layer has exactly one GroupQueryAttention. The
            message has the figures.
    """
    model = return_logits(load_graph(folder / "decoder.onnx"))
    attentions = len(gqa.attentions(model.graph))
    layers = len(interface.key_values) - plain_attention_layers
    if attentions != layers:
        raise ParityError(
            f"the graph has {attentions} GroupQueryAttention nodes for {layers} attention layers; "
            "the model's attention was not exported as it is"
        )
    longest = max(map(len, expected.prompts))

    images = expected.images
    most = max(longest + CONTINUATION_TOKENS, 0 if images is None else len(images.prompt) + 1)

    def run(model: ir.Model) -> GraphRunner:
        capacity = most + _PADDING_TOKENS
        return GraphRunner(model, folder, interface, capacity, weights_mapped=True)

    runner = run(model)
    parts, states = _in_few_calls(runner, interface, expected)
    if images is not None:
        with_images, states_with_images = _with_images(runner, interface, expected, images)
        parts = parts | with_images
        states = states | states_with_images
    if expected.narrowed is not None:
        narrow_windows(model, expected.narrowed.windows)
        sizes = " and ".join(
            f"{window} made {narrow}" for window, narrow in expected.narrowed.windows.items()
        )
        parts[f"with a window of {sizes}"] = _beyond_windows(
            run(model), expected, expected.narrowed
        )
    error, scale, largest = compare(parts, interface.dtype, tolerance=tolerance, original=original)
    if interface.features.prompt_logprobs:
        _compare_scores(runner, expected, largest)
    _compare_states(states, TOLERANCES[interface.dtype] if tolerance is None else tolerance)
    return Parity(
        error,
        scale,
        largest,
        rows=len(expected.prompts),
        longest_prompt=longest,
        attention_layers=attentions,
        plain_attention_layers=plain_attention_layers,
        windows=expected.windows,
    )


def _compare_scores(runner: GraphRunner, expected: Reference, most: float) -> None:
    """Raise ParityError if the graph's scores differ by more than `most` from the log-softmax of its
    own logits, which were compared."""
    ids, lengths = _ragged(expected.prompts)
    following = np.array([row[0] for row in expected.continuations])
    scored = scores_of_last_tokens(ids, lengths, following)
    results = runner.step(ids, lengths, runner.start(len(ids)), scored)
    error = error_of_scores(results, following)
    if not error <= most:  # NaN must not pass
        raise ParityError(
            f"the exported graph's prompt_logprobs differ from the log-softmax of its logits by {error:.3g}, more "
            f"than {most:.3g}; leave prompt_logprobs out"
        )


def compare(
    parts: Mapping[str, Sequence[Compared]],
    dtype: str,
    *,
    tolerance: float | None = None,
    original: str = "the eager model",
) -> Difference:
    """How far the graph's logits are from the original's, over all calls of the `parts` by name;
    else as `check`."""
    scale = largest_finite(*(call.wanted for calls in parts.values() for call in calls))
    # Python's max would lose a NaN that is not the first.
    error = float(np.max([call.error for calls in parts.values() for call in calls]))
    relative = TOLERANCES[dtype] if tolerance is None else tolerance
    most = relative * max(1.0, scale)
    if not error <= most:  # NaN must not pass
        listed = [
            f"{name}: {', '.join(f'{call.error:.2g}' for call in calls)}"
            for name, calls in parts.items()
        ]
        raise ParityError(
            f"the exported graph's logits differ from {original}'s by {error:.3g}, more than {most:.3g} "
            f"({relative:g} of the largest logit, {scale:.3g}); {'; '.join(listed)}"
        )
    return Difference(error, scale, most)


def _in_few_calls(
    runner: GraphRunner, interface: Interface, expected: Reference
) -> tuple[dict[str, list[Compared]], dict[str, Compared]]:
    """The calls by name: the prompts as a ragged batch, a padded later chunk of the longest, and a
    step of every row. And each state of the longest after them, beside the state of a further row
    of the batch that read the same tokens in one piece: it shows a wrong state that no logit has
    shown yet, such as the state of a step that is not kept."""
    longest = expected.prompts[-1]
    continued = expected.continuations[-1]
    prompts = [*expected.prompts, longest + continued]
    state = runner.start(len(prompts))
    logits = _logits(runner, *_ragged(prompts), state)
    prefill = Compared(
        logits,
        np.stack([*(row[0] for row in expected.logits), expected.logits[-1][CONTINUATION_TOKENS]]),
    )
    in_one_piece = {name: values[-1:].copy() for name, values in state.items()}

    row = {name: values[-2:-1].copy() for name, values in state.items()}
    logits = _logits(runner, *_ragged([continued[:_CHUNK_TOKENS]], _PADDING_TOKENS), row)
    chunk = Compared(logits, expected.logits[-1][None, _CHUNK_TOKENS])

    state = {name: np.concatenate([values[:-2], row[name]]) for name, values in state.items()}
    # The chunk has been read after the longest prompt only.
    done = [0] * (len(expected.prompts) - 1) + [_CHUNK_TOKENS]
    tokens = [[row[count]] for row, count in zip(expected.continuations, done, strict=True)]
    logits = _logits(runner, *_ragged(tokens), state)
    step = Compared(
        logits, np.stack([row[count + 1] for row, count in zip(expected.logits, done, strict=True)])
    )

    row = {name: values[-1:] for name, values in state.items()}
    states = _states(interface, row, in_one_piece, len(prompts[-1]))
    return {"by step (prefill first)": [prefill, step], "prompt in chunks": [chunk]}, states


def _with_images(
    runner: GraphRunner, interface: Interface, expected: Reference, images: ImageReference
) -> tuple[dict[str, list[Compared]], dict[str, Compared]]:
    """As `_in_few_calls`: a batch of a text and the prompt with images, a step of both, and that
    prompt in two pieces, cut within the last image (between images if its tokens see each
    other)."""
    text = expected.prompts[0]
    n = len(images.prompt)
    state = runner.start(2)
    ids, lengths = _ragged([text, images.prompt])
    logits = _logits(runner, ids, lengths, state, _image_inputs(images, slice(0, n), len(text)))
    prefill = Compared(logits, np.stack([expected.logits[0][0], images.logits[0]]))
    in_one_piece = {name: values[-1:].copy() for name, values in state.items()}
    ids, lengths = _ragged([expected.continuations[0][:1], [images.following]])
    logits = _logits(runner, ids, lengths, state, _image_inputs(images, slice(n, n + 1), 1))
    step = Compared(logits, np.stack([expected.logits[0][1], images.logits[1]]))

    last = int(np.flatnonzero(images.rows >= 0)[-1])
    first = int(np.flatnonzero(images.rows[:last] < 0)[-1]) + 1  # of the last run
    assert interface.image is not None
    cut = first if interface.image.blockwise else (first + last + 1) // 2
    row = runner.start(1)
    for piece in (slice(0, cut), slice(cut, n)):
        logits = _logits(
            runner, *_ragged([images.prompt[piece]]), row, _image_inputs(images, piece)
        )
    pieces = Compared(logits, images.logits[:1])
    states = _states(interface, row, in_one_piece, n)
    named = {f"{name}, with images,": state for name, state in states.items()}
    return {"with images": [prefill, step], "images in pieces": [pieces]}, named


def _image_inputs(images: ImageReference, piece: slice, before: int = 0) -> dict[str, Array]:
    """The inputs of a call that reads that piece of the prompt with images in its last row; in rows
    before it, if `before` is not 0, a text."""
    rows = np.append(images.rows, -1)[piece]
    n = 2 if before != 0 else 1
    used = rows[rows >= 0]
    first, end = (int(used.min()), int(used.max()) + 1) if len(used) > 0 else (0, 1)
    inputs = {"image_rows": np.full((n, max(len(rows), before)), -1, np.int32)}
    inputs["image_rows"][-1, : len(rows)] = np.where(rows >= 0, rows - first, -1)
    inputs["image_features"] = images.features[first:end]
    if images.offsets is not None:
        inputs["position_offsets"] = np.zeros((*inputs["image_rows"].shape, 3), np.int32)
        inputs["position_offsets"][-1, : len(rows)] = images.offsets[piece]
    return inputs


def _states(
    interface: Interface, state: Mapping[str, Array], wanted: Mapping[str, Array], tokens: int
) -> dict[str, Compared]:
    """The cache of a row that read that many tokens, in `state` and as `wanted`."""
    states = {}
    for spec in interface.cache_states:
        written = (slice(None), slice(None), slice(tokens)) if CAPACITY in spec.axes else ()
        pair = (values[spec.name][written].astype(np.float32) for values in (state, wanted))
        states[spec.name] = Compared(*pair)
    return states


def _compare_states(states: Mapping[str, Compared], relative: float) -> None:
    """Raise ParityError if one of the `states` by name differs by more than `relative` of its
    largest number."""
    for name, state in states.items():
        most = relative * largest_finite(state.wanted)
        if not state.error <= most:  # NaN must not pass
            raise ParityError(
                f"the exported graph's state {name} after a prompt, a padded chunk and a step differs by "
                f"{state.error:.3g} from that of the same tokens in one piece, more than {most:.3g}"
            )


def _ragged(rows: Sequence[Sequence[int]], padding: int = 0) -> tuple[Array, Array]:
    """Token ids [rows, S], filled with 0 up to the longest row and `padding` more, and lengths
    [rows]."""
    lengths = np.array([len(row) for row in rows])
    ids = np.zeros((len(rows), max(lengths) + padding), np.int64)
    for filled, row in zip(ids, rows, strict=True):
        filled[: len(row)] = row
    return ids, lengths


def _beyond_windows(runner: GraphRunner, expected: Reference, narrowed: Narrowed) -> list[Compared]:
    """[V] after the last prompt, and after another token."""
    state = runner.start(1)
    pieces = [expected.prompts[-1], expected.continuations[-1][:1]]
    logits = [_logits(runner, *_ragged([piece]), state)[0] for piece in pieces]
    return list(map(Compared, logits, narrowed.logits[:2]))


def _logits(
    runner: GraphRunner,
    ids: Array,
    lengths: Array,
    state: dict[str, Array],
    images: Mapping[str, Array] | None = None,
) -> Array:
    """[rows, V]; ParityError if a sampler in the graph does not take the largest. A NaN is left to
    `compare`."""
    results = runner.step(ids, lengths, state, images)
    logits = results[LOGITS.name]
    is_greedy = "next_ids" not in results or np.array_equal(
        results["next_ids"][:, 0], logits.argmax(-1)
    )
    if not is_greedy and not np.isnan(logits).any():
        raise ParityError(
            "the sampler at temperature 0 did not return the token with the largest logit"
        )
    return logits
