"""The self-test of compile: the compiled graph chooses tokens after the same prompts as the portable graph.

One after the other: together their weights may not fit into the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from qsample.compiler.plan import CompilePlan
from qsample.compiler.targets import Target
from qsample.contract import EMIT, INPUT_IDS, LENGTHS, NOISE_STREAMS, SEARCHED_ROWS, SEED
from qsample.errors import CompileError
from qsample.graph.runner import GraphRunner
from qsample.ort.session import open_sessions
from qsample.ort.stepper import Stepper
from qsample.package import Package
from qsample.runtime.decode.inputs import uniforms
from qsample.tensors import Array

STEPS: Final = 8
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
_AGREEMENT: Final = {"float32": 1.0, "float16": 0.8, "bfloat16": 0.5}


@dataclass(frozen=True, slots=True)
class SelfTest:
    """Tokens that the compiled graph chose, and how many of them the portable graph chose too.

    replayed: of the tokens, those from replays of the captured graph.
    """

    tokens: int
    agreeing: int
    replayed: int = 0


def run_self_test(plan: CompilePlan, published: Package, target: Target) -> SelfTest:
    """Let the portable graph generate, greedily and sampled, feed its tokens to the compiled graph of `published`, and
    count how many times it chooses the same token.

    The compiled graph runs in the sessions that `load` opens, with the target's options, and is captured and replayed
    as it will be later. Only for the CPU its weights stay mapped, as they may be larger than the memory, and its first
    call reads prompts of different lengths, with padding.

    Raises CompileError if they agree too rarely. The divergence says how close a quantized model is.
    """
    source = plan.source
    rows = min(plan.batch_size or 2, 2)
    width = min(_PROMPT, plan.ctx_len - 1) if target.self_contained else 1
    prompt = np.random.default_rng(0).integers(0, source.interface.vocab_size, (rows, width))
    prompt_lengths = np.array([width, 1] if rows == 2 else [max(1, width - 1)])
    wanted = _own_tokens(plan, prompt, prompt_lengths)
    mapped = plan.weights is None and not plan.packed_weights
    device = (
        _runner(plan, published.path, weights_mapped=mapped) if target.self_contained else _Published(published, rows)
    )
    agreeing = total = 0
    for parameters, tokens in zip(_PARAMETERS, wanted, strict=True):
        state = device.start(rows)
        ids, lengths = prompt, prompt_lengths
        for chosen in tokens:
            got = _chosen(device.step(ids, lengths, state, parameters))
            agreeing, total = agreeing + int((got == chosen).sum()), total + rows
            ids, lengths = chosen[:, None], np.ones(rows, np.int32)
    if not plan.quantized and agreeing < _AGREEMENT[plan.dtype] * total:
        raise CompileError(
            f"self-test failed: the graph compiled for {target.name} chose the portable graph's token {agreeing} times "
            f"of {total}, and {plan.dtype} needs {_AGREEMENT[plan.dtype]:.0%}"
        )
    if isinstance(device, GraphRunner):
        return SelfTest(tokens=total, agreeing=agreeing)
    return SelfTest(tokens=total, agreeing=agreeing, replayed=rows * device.replays)


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
    portable = _runner(plan, plan.source.path, weights_mapped=True)
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


def _runner(plan: CompilePlan, folder: Path, *, weights_mapped: bool) -> GraphRunner:
    return GraphRunner(
        folder / "decoder.onnx",
        folder / "initial_state.onnx",
        plan.source.interface,
        plan.ctx_len,
        weights_mapped=weights_mapped,
    )


def _chosen(results: Mapping[str, Array]) -> Array:
    """[rows]: the tokens of one step, or the argmax if the graph returns logits."""
    chosen: Array = results["next_ids"][:, 0] if "next_ids" in results else results["logits"].argmax(-1)
    return chosen
