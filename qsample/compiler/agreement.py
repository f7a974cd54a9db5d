"""A compiled package enters; the figures of its self-test leave, or CompileError if its graph chooses other tokens.

The compiled graph chooses tokens after prompts of different lengths. The portable graph reads them all in one call, and
its sampler has to choose the same of its logits; in float32, the logits have to agree, too. A quantized graph is
another model: there the sampler gets the graph's own logits, and the divergence says how far off they are.

On the machine that compiles, a graph that checks guesses is also compared with itself: steps of several tokens take
other ways through the kernels, and whether they round alike depends on the processor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx_ir as ir

from qsample.compiler.plan import CompilePlan
from qsample.compiler.targets import Capability, Target
from qsample.compiler.trial import Text, chosen, read, write
from qsample.contract.arrays import Array
from qsample.contract.tensors import (
    EMIT,
    IMAGE_FEATURES,
    IMAGE_ROWS,
    INPUT_IDS,
    LENGTHS,
    LOGITS,
    NOISE_STREAMS,
    POSITION_OFFSETS,
    REPLAY_ROWS,
    TOKENS,
)
from qsample.errors import CompileError
from qsample.graph.compare import largest_difference, largest_finite
from qsample.graph.join import return_logits, split_at_logits
from qsample.graph.runner import GraphRunner, error_of_scores, scores_of_last_tokens
from qsample.graph.weights import load_graph
from qsample.ort.rounding import measured
from qsample.ort.session import open_sessions
from qsample.ort.stepper import Stepper
from qsample.package.package import Package
from qsample.runtime.decode.inputs import uniforms

_ROWS_PER_BATCH: Final = 4
_PROMPT_TOKENS: Final = 3
_CALLS: Final = 4
# Sessions may capture a graph; more calls are then replays.
_CALLS_OF_SESSIONS: Final = 8
# Greedy, and a little of everything, so that the self-test runs every step of the sampler.
_PARAMETERS: Final[tuple[dict[str, float], ...]] = (
    {},
    {
        "temperature": 0.9,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
    },
)
# The same float32 arithmetic in another order moves a token about once in a million; float16 rounds visibly.
# The most that float32 logits may differ, per unit of the largest logit.
_MAX_RELATIVE_ERROR: Final = 1e-3
# The share of tokens on which both graphs have to agree.
_MIN_AGREEMENT: Final = {"float32": 1.0, "float16": 0.8, "bfloat16": 0.5}


@dataclass(frozen=True, slots=True)
class SelfTest:
    """The counts of a self-test.

    Attributes:
        tokens: the tokens that the compiled graph chose.
        agreeing: the tokens that the portable graph, or its sampler, chose as well.
        replayed: the tokens that replays of a captured graph chose.
    """

    tokens: int
    agreeing: int
    replayed: int = 0


def run_self_test(plan: CompilePlan, published: Package, target: Target) -> SelfTest:
    """Let the compiled graph choose tokens, greedily and sampled, and count how often the portable graph agrees. It
    runs in the sessions that `load` opens, captured and replayed as later (on a `self_contained` target: see `Target`).
    Raises CompileError if they agree too rarely, or if logits of float32 differ."""
    # A graph for a single row runs once with each row's parameters.
    batches = [[0], [1]] if plan.batch_size == 1 else [list(range(_rows_per_batch(plan)))]
    device = _device(plan, published, target, len(batches[0]))
    texts = [_written(device, plan, rows) for rows in batches]
    replays = device.replays if isinstance(device, Published) else 0
    if plan.interface.features.prompt_logprobs and isinstance(device, GraphRunner):
        _check_scores(device, plan, len(batches[0]))
    del device  # before the next graph opens its session
    model, sampler = split_at_logits(load_graph(plan.decoder), plan.source.interface)
    own_logits = plan.quantized and texts[0][0].logits.size > 0
    portable = texts if own_logits else _with_portable_logits(texts, plan, model)
    if not plan.quantized:  # otherwise the divergence is no number, and is refused with advice
        _check_numbers(texts, "compiled")
        _check_numbers(portable, "portable")
    got = np.concatenate([call.tokens for text in texts for call in text])
    wanted = [
        _sampled(text, plan, sampler, rows) for text, rows in zip(portable, batches, strict=True)
    ]
    tokens = got.size
    agreeing = int((got == np.concatenate([token for own in wanted for token in own])).sum())
    needed = 1.0 if own_logits else _MIN_AGREEMENT[plan.dtype]
    if (own_logits or not plan.quantized) and agreeing < needed * tokens:
        chooser = (
            "portable sampler's token for the same logits"
            if own_logits
            else "portable graph's token"
        )
        raise CompileError(
            f"self-test failed: the graph compiled for {target.name} chose the {chooser} {agreeing} times of {tokens}, "
            f"and {plan.dtype} needs {needed:.0%}"
        )
    if plan.dtype == "float32" and not plan.quantized:
        _compare_logits(texts, portable)
    return SelfTest(tokens, agreeing, replayed=len(batches[0]) * replays)


def _check_scores(device: GraphRunner, plan: CompilePlan, rows: int) -> None:
    """Raise CompileError if the graph's scores differ from the log-softmax of its own logits."""
    width = min(_PROMPT_TOKENS, plan.ctx_len - 1)
    vocab_size = plan.source.interface.vocab_size
    ids, following = np.random.default_rng(0).integers(0, vocab_size, (2, rows, width))
    lengths = np.array([width, 1, 1, width])[:rows]
    scored_ids = following[:, 0]
    parameters = scores_of_last_tokens(ids, lengths, scored_ids)
    results = device.step(ids, lengths, device.start(rows), parameters)
    error = error_of_scores(results, scored_ids)
    most = _MAX_RELATIVE_ERROR * max(1.0, largest_finite(results[LOGITS.name]))
    if not error <= most:  # NaN must not pass
        raise CompileError(
            f"self-test failed: the compiled graph's prompt_logprobs differ from the log-softmax of its logits by "
            f"{error:.3g}, more than {most:.3g}; export the model without prompt_logprobs"
        )


def _rows_per_batch(plan: CompilePlan) -> int:
    return _ROWS_PER_BATCH if plan.batch_size is None else min(plan.batch_size, _ROWS_PER_BATCH)


def _device(
    plan: CompilePlan, published: Package, target: Target, rows: int
) -> GraphRunner | Published:
    in_parts = plan.options.num_devices > 1
    runs_on_cpu = Capability.CPU_SELF_TEST in target.capabilities
    if in_parts or not runs_on_cpu:
        return Published(published, rows, logits=in_parts and runs_on_cpu)
    model = return_logits(load_graph(published.path / "decoder.onnx"))
    mapped = not (plan.weights or plan.packed_weights)
    return GraphRunner(model, published.path, plan.interface, plan.ctx_len, weights_mapped=mapped)


def _written(device: GraphRunner | Published, plan: CompilePlan, rows: Sequence[int]) -> Text:
    """What the compiled graph writes after random prompts, in the rows numbered `rows`."""
    width = 1 if isinstance(device, Published) else min(_PROMPT_TOKENS, plan.ctx_len - 1)
    ids = np.random.default_rng(0).integers(
        0, plan.source.interface.vocab_size, (_ROWS_PER_BATCH, width)
    )[rows]
    lengths = np.array([width, 1, 1, width])[rows]
    calls = min(
        _CALLS_OF_SESSIONS if isinstance(device, Published) else _CALLS, plan.ctx_len - width
    )
    state = device.start(len(rows))
    parameters = _parameters(plan, rows)
    images = [_images(plan, rows, width, call) for call in range(calls)]
    given = iter(images)

    def step(ids: Array, lengths: Array) -> dict[str, Array]:
        return device.step(ids, lengths, state, {**parameters, **next(given)})

    written = write(step, ids, lengths, calls)
    return [call._replace(images=own) for call, own in zip(written, images, strict=True)]


def _images(plan: CompilePlan, rows: Sequence[int], width: int, call: int) -> dict[str, Array]:
    """Inputs of images, random, of the call of that number: the first tokens of rows 0 and 1 in the first call are an
    image's. Nothing for a package that reads text only."""
    image = plan.source.interface.image
    if image is None:
        return {}
    count = min(width, 2)
    columns = width if call == 0 else 1
    inputs: dict[str, Array] = {IMAGE_ROWS.name: np.full((_ROWS_PER_BATCH, columns), -1, np.int32)}
    if call == 0:
        inputs[IMAGE_ROWS.name][0, :count] = np.arange(count)
        inputs[IMAGE_ROWS.name][1, 0] = count - 1
    inputs = {name: values[rows] for name, values in inputs.items()}
    inputs[IMAGE_FEATURES] = np.random.default_rng(0).standard_normal(
        (count, image.width), np.float32
    )
    if image.axial:
        inputs[POSITION_OFFSETS.name] = np.random.default_rng(call).integers(
            0, 3, (_ROWS_PER_BATCH, columns, 3)
        )[rows]
    return inputs


def _parameters(plan: CompilePlan, rows: Sequence[int]) -> dict[str, Array]:
    """[rows] each: the even rows are greedy, the odd ones sampled."""
    off = {spec.name: spec.off for spec in plan.source.interface.parameters} | {"temperature": 0.0}
    return {
        name: np.array([_PARAMETERS[row % 2].get(name, off[name]) for row in rows])
        for name in _PARAMETERS[1]
    }


def _with_portable_logits(texts: Sequence[Text], plan: CompilePlan, model: ir.Model) -> list[Text]:
    found = read(model, texts, plan.source.path, plan.source.interface, plan.ctx_len)
    return [
        [call._replace(logits=logits) for call, logits in zip(text, own, strict=True)]
        for text, own in zip(texts, found, strict=True)
    ]


def _sampled(
    text: Text, plan: CompilePlan, sampler: ir.Model | None, rows: Sequence[int]
) -> list[Array]:
    """[rows] after each call: the tokens that `sampler` chooses of the call's logits, without one the largest."""
    results = ({LOGITS.name: call.logits} for call in text)
    if sampler is None:
        return list(map(chosen, results))
    interface = plan.source.interface
    runner = GraphRunner(sampler, plan.source.path, interface, plan.ctx_len, spec=interface.sampler)
    state = runner.start(len(rows))
    tokens = []
    for call in text:
        state[LOGITS.name] = call.logits
        tokens.append(chosen(runner.step(call.ids, call.lengths, state, _parameters(plan, rows))))
    return tokens


def _check_numbers(texts: Sequence[Text], graph: str) -> None:
    """Raise CompileError if a logit is NaN or +inf, or if none of a row is finite: two graphs may choose the same token
    of such logits. graph: the name of the graph in the message."""
    for number, call in enumerate(call for text in texts for call in text):
        if call.logits.size > 0 and not np.isfinite(call.logits.max(-1)).all():
            raise CompileError(
                f"self-test failed: the {graph} graph's logits in call {number} are not numbers; "
                "take another dtype, or export the model again"
            )


def _compare_logits(texts: Sequence[Text], portable: Sequence[Text]) -> None:
    """Raise CompileError if the logits differ by more than float32 rounds: few tokens show a mistake in few weights."""
    pairs = [
        (call.logits, other.logits)
        for text, read_by_portable in zip(texts, portable, strict=True)
        for call, other in zip(text, read_by_portable, strict=True)
        if call.logits.size > 0
    ]
    if not pairs:  # sessions return none
        return
    # Python's max would lose a NaN that is not the first.
    error = float(np.max([largest_difference(*pair) for pair in pairs]))
    most = _MAX_RELATIVE_ERROR * max(1.0, largest_finite(*(wanted for _, wanted in pairs)))
    if not error <= most:  # NaN must not pass
        raise CompileError(
            f"self-test failed: the compiled graph's logits differ from the portable graph's by {error:.3g}, more than "
            f"{most:.3g}"
        )


class Published:
    """A compiled package in the sessions that `load` opens, captured if they are; driven as a `GraphRunner` is."""

    def __init__(self, package: Package, rows: int, *, logits: bool = False) -> None:
        """logits: whether the graph returns its logits as well."""
        compilation = package.manifest.compilation
        assert compilation is not None
        sessions = open_sessions(package, logits=logits)
        self._stepper = Stepper(sessions, rows, compilation.ctx_len, captured=True, logits=logits)
        self._capacity = compilation.ctx_len
        self._captured = sessions.replays is not None
        self._keeps_lengths = package.interface.features.sampler
        # A graph for replay records sampled tokens alone.
        self._records_tokens = package.interface.captured
        self._runs = 0

    @property
    def replays(self) -> int:
        """Runs that replayed a captured graph."""
        return max(self._runs - 1, 0) if self._captured else 0

    def start(self, rows: int) -> dict[str, Array]:
        """Row i with seed i. The states stay in the stepper, except the lengths: a graph may not keep these."""
        seeds = np.arange(rows)
        noise = {
            name: [uniforms(seed, self._capacity, at) for seed in range(rows)]
            for name, at in NOISE_STREAMS.items()
        }
        self._stepper.reset()
        self._tokens = np.zeros((rows, self._capacity), np.int32)
        lists = {spec.name: seeds for spec in REPLAY_ROWS}
        self._write({**noise, EMIT.name: True, **lists})
        return {LENGTHS.name: np.zeros(rows, np.int32)}

    def step(
        self,
        ids: Array,
        lengths: Array,
        state: dict[str, Array],
        parameters: Mapping[str, Any] | None = None,
    ) -> dict[str, Array]:
        """As `GraphRunner.step`, with ids [rows, 1] and lengths of 1."""
        kept = {} if self._keeps_lengths else state
        self._write({INPUT_IDS.name: ids, "temperature": 0.0, **(parameters or {}), **kept})
        if self._records_tokens:
            # The unused tail has a token of the row, too.
            for row, start in enumerate(state[LENGTHS.name]):
                self._tokens[row, start:] = ids[row]
            self._write({TOKENS.name: self._tokens})
        self._stepper.run()
        self._runs += 1
        self._stepper.advance()
        state[LENGTHS.name] = state[LENGTHS.name] + lengths.astype(np.int32)
        return {name: self._stepper.read(name) for name in self._stepper.outputs}

    def _write(self, values: Mapping[str, Any]) -> None:
        for spec in self._stepper.specs:
            if spec.name in values:
                self._stepper.write(spec.name, values[spec.name])


# Each row has this many guesses less than the row before it.
_GUESSES_LESS_PER_ROW: Final = 3


def check_guesses_change_nothing(plan: CompilePlan, published: Package) -> None:
    """Let the compiled graph check guesses, a different number in each row: all of them right, or only half.
    CompileError unless the logits after each token, and every state, equal the results of steps of one token, bit by
    bit; with several rows and with one, and for every number of rows that sessions choose (`ROW_MULTIPLE`)."""
    interface = plan.interface
    rows = _rows_per_batch(plan)
    most = min(interface.features.num_speculative_tokens, plan.ctx_len - _PROMPT_TOKENS - 2)
    if most < 1:
        return
    rounding = measured(published.path / "decoder.onnx")
    model = return_logits(load_graph(published.path / "decoder.onnx"))
    for multiple in (1, 2) if rounding.products.any and rounding.experts.any else (2,):
        runner = GraphRunner(model, published.path, interface, plan.ctx_len, row_multiple=multiple)
        for count in sorted({rows, 1}):
            _compare_steps(plan, runner, count, most)


def _compare_steps(plan: CompilePlan, runner: GraphRunner, rows: int, most: int) -> None:
    """Compare steps that check guesses with steps of one token; `most` is the number of guesses of a step."""
    interface = plan.interface
    prompt = np.random.default_rng(0).integers(0, interface.vocab_size, (rows, _PROMPT_TOKENS))
    lengths = np.array([_PROMPT_TOKENS, 1, 2, _PROMPT_TOKENS])[:rows]
    ones = np.ones(rows, np.int64)
    parameters: dict[str, Any] = {
        "temperature": np.array([0, 0.9, 0, 0.9])[:rows],
        "repetition_penalty": 1.1,
    }
    images = _images(plan, range(rows), _PROMPT_TOKENS, 0)
    if POSITION_OFFSETS.name in images:
        parameters[POSITION_OFFSETS.name] = images[POSITION_OFFSETS.name][:, -1:]

    state = runner.start(rows)
    steps = [(runner.step(prompt, lengths, state, parameters | images), _copied(state))]
    for _ in range(most + 1):
        steps.append(
            (runner.step(steps[-1][0]["next_ids"], ones, state, parameters), _copied(state))
        )
    tokens = np.concatenate([result["next_ids"] for result, _ in steps], axis=1)
    count = np.maximum(most - _GUESSES_LESS_PER_ROW * np.arange(rows), 0)
    for right in (most, most // 2):
        guesses = np.full((rows, interface.features.num_speculative_tokens), -1)
        guesses[:, :most] = np.where(np.arange(most) < count[:, None], tokens[:, 1 : most + 1], -1)
        wrong = (np.arange(guesses.shape[1]) >= right) & (guesses >= 0)
        guesses = np.where(wrong, (guesses + 1) % interface.vocab_size, guesses)
        state = runner.start(rows)
        runner.step(prompt, lengths, state, parameters | images)
        logits = runner.step(tokens[:, :1], ones, state, parameters | {"draft_ids": guesses})[
            LOGITS.name
        ]
        first = np.cumsum(count + 1) - (count + 1)
        for row, kept in enumerate(np.minimum(count, right)):
            wanted = [result[LOGITS.name][row] for result, _ in steps[1 : kept + 2]]
            _compare(
                plan,
                f"logits of row {row}",
                logits[first[row] : first[row] + kept + 1],
                np.array(wanted),
            )
            after = steps[kept + 1][1]
            for name, value in state.items():
                used = (
                    int(state[LENGTHS.name][row])
                    if name in (cache.name for cache in interface.cache_states)
                    else None
                )
                pair = (
                    array[row] if used is None else array[row, :, :used]
                    for array in (value, after[name])
                )
                _compare(plan, f"{name} of row {row}", *pair)


def _copied(state: dict[str, Array]) -> dict[str, Array]:
    return {name: value.copy() for name, value in state.items()}


def _compare(plan: CompilePlan, what: str, several: Any, one: Any) -> None:
    if not np.array_equal(several, one):
        weights = plan.dtype if plan.options.weights is None else plan.options.weights
        raise CompileError(
            f"self-test failed: the {what} differ between a step of several tokens and steps of one: this processor's "
            f"kernels for {weights} weights round them otherwise, and guesses would change "
            "tokens; compile without num_speculative_tokens, or for batches (without batch_size=1)"
        )
