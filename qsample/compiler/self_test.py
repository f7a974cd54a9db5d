"""The self-test of compile: a package and the portable graph that it was made of enter; a count of tokens leaves.

By default the compiled graph chooses tokens after prompts of different lengths, and the portable sampler has to choose
the same. It takes the logits of the portable graph, which reads all of the text in a single call; in float32, they have
to be the compiled graph's as well. A quantized graph is
another model: there it takes the graph's own logits, and the divergence says how far these are off. A package that only
runs in the sessions of its target, which return no logits, is tested the other way round: the portable graph generates,
step by step, and the compiled graph chooses after its tokens.

One after the other: together their weights may not fit into the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import onnx_ir as ir

from qsample.compiler.plan import CompilePlan
from qsample.compiler.targets import Target
from qsample.contract.arrays import Array
from qsample.contract.tensors import EMIT, INPUT_IDS, LENGTHS, LOGITS, NOISE_STREAMS, SEARCHED_ROWS, SEED
from qsample.errors import CompileError
from qsample.graph.join import return_all_logits, return_logits, split_at_logits
from qsample.graph.runner import GraphRunner
from qsample.graph.weights import load_graph
from qsample.ort.session import open_sessions
from qsample.ort.stepper import Stepper
from qsample.package.package import Package
from qsample.runtime.decode.inputs import uniforms

STEPS: Final = 8
_FEW_STEPS: Final = 4  # of the default
_ROWS: Final = 4  # of the default
_PROMPT: Final = 3
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
_LARGEST_ERROR: Final = 1e-3  # of logits in float32, per unit of the largest
_AGREEMENT: Final = {"float32": 1.0, "float16": 0.8, "bfloat16": 0.5}


@dataclass(frozen=True, slots=True)
class SelfTest:
    """Tokens that the compiled graph chose, and how many of them the portable graph, or its sampler, chose too.

    replayed: of the tokens, those from replays of the captured graph.
    """

    tokens: int
    agreeing: int
    replayed: int = 0


def run_self_test(plan: CompilePlan, published: Package, target: Target) -> SelfTest:
    """Let the compiled graph of `published` and the portable graph choose tokens after the same text, greedily and
    sampled, and count how many times they choose the same.

    The compiled graph runs in the sessions that `load` opens, with the target's options, and is captured and replayed
    as it will be later. Only for the CPU its weights stay mapped, as they may be larger than the memory, and its first
    call reads prompts of different lengths, with padding.

    Raises CompileError if they agree too rarely, or if logits of float32 differ.
    """
    if target.self_contained:
        portable = _Portable.of(plan)
        if portable is not None:
            return _check_own_tokens(plan, published, target, portable)
    return _checked(plan, target, _check_after_portable(plan, published, target), own_logits=False)


def _checked(plan: CompilePlan, target: Target, result: SelfTest, *, own_logits: bool) -> SelfTest:
    """`result`, or CompileError if too few tokens agree. own_logits: those tokens are of the same logits."""
    needed = 1.0 if own_logits else _AGREEMENT[plan.dtype]
    if (own_logits or not plan.quantized) and result.agreeing < needed * result.tokens:
        chooser = "portable sampler's token for the same logits" if own_logits else "portable graph's token"
        raise CompileError(
            f"self-test failed: the graph compiled for {target.name} chose the {chooser} {result.agreeing} times of "
            f"{result.tokens}, and {plan.dtype} needs {needed:.0%}"
        )
    return result


class _Run(NamedTuple):
    """A batch that the compiled graph generated. ids, lengths: of each call. parameters: of the sampler, [rows] each.
    tokens: [rows] after each call. logits: [rows, V] after each call."""

    ids: list[Array]
    lengths: list[Array]
    parameters: dict[str, Array]
    tokens: list[Array]
    logits: list[Array]


class _Portable(NamedTuple):
    """The portable graph in two parts. model: returns the logits of all positions; None = its logits are not used.
    sampler: None = the graph has no sampler, and the largest logit is chosen."""

    model: ir.Model | None
    sampler: ir.Model | None

    @classmethod
    def of(cls, plan: CompilePlan) -> _Portable | None:
        """None if it is needed at all positions and has the logits of the last one only."""
        model, sampler = split_at_logits(load_graph(plan.decoder), plan.source.interface)
        if plan.quantized:
            return cls(None, sampler)
        return cls(model, sampler) if return_all_logits(model) else None


def _check_own_tokens(plan: CompilePlan, published: Package, target: Target, portable: _Portable) -> SelfTest:
    """The default: the compiled graph generates, and the portable sampler chooses after the same text."""
    model = return_logits(load_graph(published.path / "decoder.onnx"))
    runner = _runner(plan, model, published.path, weights_mapped=_stays_mapped(plan))
    # A graph for a single row runs once with each row's parameters.
    batches = (
        [np.arange(min(plan.batch_size or _ROWS, _ROWS))] if plan.batch_size != 1 else [np.array([0]), np.array([1])]
    )
    own = runs = [_generate(runner, plan, rows) for rows in batches]
    del runner  # before the next opens its session
    if portable.model is not None:
        runs = [_with_portable_logits(run, plan, portable.model) for run in own]
    pairs = [pair for run in runs for pair in zip(run.tokens, _sampled(run, plan, portable.sampler), strict=True)]
    agreeing = sum(int((got == wanted).sum()) for got, wanted in pairs)
    result = SelfTest(tokens=sum(len(got) for got, _ in pairs), agreeing=agreeing)
    _checked(plan, target, result, own_logits=plan.quantized)
    if portable.model is not None:
        _compare_logits(own, runs, plan)
    return result


def _generate(runner: GraphRunner, plan: CompilePlan, rows: Array) -> _Run:
    """Let the compiled graph generate after random prompts. rows: their numbers; the odd rows are sampled."""
    width = min(_PROMPT, plan.ctx_len - 1)
    ids = np.random.default_rng(0).integers(0, plan.source.interface.vocab_size, (_ROWS, width))[rows]
    lengths = np.array([width, 1, 1, width])[rows]
    off = {spec.name: spec.off for spec in plan.source.interface.parameters} | {"temperature": 0.0}
    parameters = {
        name: np.array([_PARAMETERS[row % 2].get(name, off[name]) for row in rows]) for name in _PARAMETERS[1]
    }
    state, run = runner.start(len(rows)), _Run([], [], parameters, [], [])
    for _ in range(min(_FEW_STEPS, plan.ctx_len - width)):
        results = runner.step(ids, lengths, state, parameters)
        run.ids.append(ids)
        run.lengths.append(lengths)
        run.tokens.append(_chosen(results))
        run.logits.append(results[LOGITS.name])
        ids, lengths = run.tokens[-1][:, None], np.ones(len(rows), np.int64)
    return run


def _with_portable_logits(run: _Run, plan: CompilePlan, model: ir.Model) -> _Run:
    """`run` with the logits that the portable graph has after the same text, in a single call."""
    runner = _runner(plan, model, plan.source.path, weights_mapped=True)
    rows = range(len(run.tokens[0]))
    texts = [np.concatenate([ids[row, : n[row]] for ids, n in zip(run.ids, run.lengths, strict=True)]) for row in rows]
    lengths = np.array(list(map(len, texts)))
    ids = np.stack([np.pad(text, (0, max(lengths) - len(text))) for text in texts])
    results = runner.step(ids, lengths, runner.start(len(rows)))
    logits = results[LOGITS.name].reshape(len(rows), max(lengths), -1)
    ends = np.cumsum(run.lengths, axis=0) - 1  # of each call in its row's text
    return run._replace(logits=[logits[np.arange(len(rows)), end] for end in ends])


def _compare_logits(own: list[_Run], portable: list[_Run], plan: CompilePlan) -> None:
    """Raise CompileError if the logits differ by more than float32 rounds: few tokens show a mistake in few weights."""
    pairs = [
        pair for run, other in zip(own, portable, strict=True) for pair in zip(run.logits, other.logits, strict=True)
    ]
    error = float(np.max([np.abs(got - wanted) for got, wanted in pairs]))
    most = _LARGEST_ERROR * max(1.0, float(np.max([np.abs(wanted) for _, wanted in pairs])))
    if plan.dtype == "float32" and not error <= most:  # NaN must not pass
        raise CompileError(
            f"self-test failed: the compiled graph's logits differ from the portable graph's by {error:.3g}, more than "
            f"{most:.3g}"
        )


def _sampled(run: _Run, plan: CompilePlan, sampler: ir.Model | None) -> list[Array]:
    """[rows] after each call of `run`: the tokens that `sampler` chooses of its logits."""
    if sampler is None:
        return [logits.argmax(-1) for logits in run.logits]
    interface = plan.source.interface
    runner = GraphRunner(
        sampler,
        plan.source.path / "initial_state.onnx",
        interface,
        plan.ctx_len,
        folder=plan.source.path,
        spec=interface.sampler,
    )
    state, tokens = runner.start(len(run.tokens[0])), []
    for ids, lengths, logits in zip(run.ids, run.lengths, run.logits, strict=True):
        state[LOGITS.name] = logits
        tokens.append(_chosen(runner.step(ids, lengths, state, run.parameters)))
    return tokens


def _stays_mapped(plan: CompilePlan) -> bool:
    return plan.weights is None and not plan.packed_weights


def _check_after_portable(plan: CompilePlan, published: Package, target: Target) -> SelfTest:
    """The portable graph generates, and the compiled graph chooses after its tokens."""
    rows = min(plan.batch_size or 2, 2)
    width = min(_PROMPT, plan.ctx_len - 1) if target.self_contained else 1
    prompt = np.random.default_rng(0).integers(0, plan.source.interface.vocab_size, (rows, width))
    prompt_lengths = np.array([width, 1] if rows == 2 else [max(1, width - 1)])
    wanted = _own_tokens(plan, prompt, prompt_lengths)
    device = (
        _runner(plan, published.path / "decoder.onnx", published.path, weights_mapped=_stays_mapped(plan))
        if target.self_contained
        else _Published(published, rows)
    )
    agreeing = total = 0
    for parameters, tokens in zip(_PARAMETERS, wanted, strict=True):
        state = device.start(rows)
        ids, lengths = prompt, prompt_lengths
        for chosen in tokens:
            got = _chosen(device.step(ids, lengths, state, parameters))
            agreeing, total = agreeing + int((got == chosen).sum()), total + rows
            ids, lengths = chosen[:, None], np.ones(rows, np.int32)
    replays = device.replays if isinstance(device, _Published) else 0
    return SelfTest(tokens=total, agreeing=agreeing, replayed=rows * replays)


class _Published:
    """A compiled package in the sessions that `load` opens, captured if they are; driven as a `GraphRunner` is."""

    def __init__(self, package: Package, rows: int) -> None:
        compilation = package.manifest.compilation
        assert compilation is not None
        sessions = open_sessions(package)
        self._stepper = Stepper(sessions, rows, compilation.ctx_len, captured=True)
        self._capacity, self._captured = compilation.ctx_len, sessions.replays is not None
        self._keeps_lengths = package.interface.features.sampler
        self._runs = 0

    @property
    def replays(self) -> int:
        """Runs that replayed a captured graph."""
        return max(self._runs - 1, 0) if self._captured else 0

    def start(self, rows: int) -> dict[str, Array]:
        """Row i with seed i. The states stay in the stepper, but for the lengths, which a graph may not keep."""
        seeds = np.arange(rows)
        noise = {
            name: [uniforms(seed, self._capacity, at) for seed in range(rows)] for name, at in NOISE_STREAMS.items()
        }
        self._stepper.reset()
        self._write({**noise, EMIT.name: True, SEARCHED_ROWS.name: seeds, SEED.name: seeds})
        return {LENGTHS.name: np.zeros(rows, np.int32)}

    def step(
        self, ids: Array, lengths: Array, state: dict[str, Array], parameters: Mapping[str, float]
    ) -> dict[str, Array]:
        """As `GraphRunner.step`; ids: [rows, 1], lengths: ones."""
        kept = {} if self._keeps_lengths else state
        self._write({INPUT_IDS.name: ids, "temperature": 0.0, **parameters, **kept})
        self._stepper.run()
        self._runs += 1
        self._stepper.advance()
        state[LENGTHS.name] = state[LENGTHS.name] + lengths.astype(np.int32)
        return {name: self._stepper.read(name) for name in self._stepper.outputs}

    def _write(self, values: Mapping[str, Any]) -> None:
        for spec in self._stepper.specs:
            if spec.name in values:
                self._stepper.write(spec.name, values[spec.name])


def _own_tokens(plan: CompilePlan, prompt: Array, prompt_lengths: Array) -> list[list[Array]]:
    """For each of `_PARAMETERS` the tokens [rows] that the portable graph chooses after `prompt`, step by step."""
    portable = _runner(plan, plan.decoder, plan.source.path, weights_mapped=True)
    rows, width = prompt.shape
    wanted = []
    for parameters in _PARAMETERS:
        state, tokens = portable.start(rows), []
        ids, lengths = prompt, prompt_lengths
        for _ in range(min(STEPS, plan.ctx_len - width)):
            tokens.append(_chosen(portable.step(ids, lengths, state, parameters)))
            ids, lengths = tokens[-1][:, None], np.ones(rows, np.int32)
        wanted.append(tokens)
    return wanted


def _runner(plan: CompilePlan, decoder: Path | ir.Model, folder: Path, *, weights_mapped: bool) -> GraphRunner:
    """A runner of `decoder`, whose weights and starting state are in `folder`."""
    initial_state = folder / "initial_state.onnx"
    interface = plan.source.interface if folder == plan.source.path else plan.interface
    return GraphRunner(decoder, initial_state, interface, plan.ctx_len, folder=folder, weights_mapped=weights_mapped)


def _chosen(results: Mapping[str, Array]) -> Array:
    """[rows]: the tokens of one step, or the argmax if the graph returns logits."""
    chosen: Array = results["next_ids"][:, 0] if "next_ids" in results else results["logits"].argmax(-1)
    return chosen
