"""A compiled package that checks guesses enters; nothing leaves, or CompileError if guesses change what it computes.

Steps of several tokens take other ways through the kernels than steps of one, and whether both round alike depends on
the processor. So the graph is compared with itself, on the machine that compiles, with the kernels that it will have.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from qsample.compiler.plan import CompilePlan
from qsample.contract.arrays import Array
from qsample.contract.tensors import LENGTHS, LOGITS
from qsample.errors import CompileError
from qsample.graph.join import return_logits
from qsample.graph.runner import GraphRunner
from qsample.graph.weights import load_graph
from qsample.ort.rounding import measured
from qsample.package.package import Package

_ROWS: Final = 4
_PROMPT: Final = 3
_FEWER: Final = 3  # guesses that a row has less than the row before it


def check_guesses_change_nothing(plan: CompilePlan, published: Package) -> None:
    """Let the compiled graph check guesses, a different number in each row: all of them right, or only half.

    The logits after each token, and every state, have to be those of steps of one token, bit by bit; with several rows
    and with one, and with the numbers of rows that sessions choose here and elsewhere (`ROW_MULTIPLE`).

    Raises CompileError if they are not.
    """
    interface, rows = plan.interface, min(plan.batch_size or _ROWS, _ROWS)
    most = min(interface.features.num_speculative_tokens, plan.ctx_len - _PROMPT - 2)
    if most < 1:
        return
    rounding = measured(published.path / "decoder.onnx")
    model = return_logits(load_graph(published.path / "decoder.onnx"))
    for multiple in (1, 2) if rounding.products.any and rounding.experts.any else (2,):
        initial_state = published.path / "initial_state.onnx"
        runner = GraphRunner(
            model, initial_state, interface, plan.ctx_len, folder=published.path, row_multiple=multiple
        )
        for count in sorted({rows, 1}):
            _compare_steps(plan, runner, count, most)


def _compare_steps(plan: CompilePlan, runner: GraphRunner, rows: int, most: int) -> None:
    """most: guesses of a step."""
    interface = plan.interface
    prompt = np.random.default_rng(0).integers(0, interface.vocab_size, (rows, _PROMPT))
    lengths, ones = np.array([_PROMPT, 1, 2, _PROMPT])[:rows], np.ones(rows, np.int64)
    parameters = {"temperature": np.array([0, 0.9, 0, 0.9])[:rows], "repetition_penalty": 1.1}

    state = runner.start(rows)
    steps = [(runner.step(prompt, lengths, state, parameters), _copied(state))]
    for _ in range(most + 1):
        steps.append((runner.step(steps[-1][0]["next_ids"], ones, state, parameters), _copied(state)))
    tokens = np.concatenate([result["next_ids"] for result, _ in steps], axis=1)
    count = np.maximum(most - _FEWER * np.arange(rows), 0)
    for right in (most, most // 2):
        guesses = np.full((rows, interface.features.num_speculative_tokens), -1)
        guesses[:, :most] = np.where(np.arange(most) < count[:, None], tokens[:, 1 : most + 1], -1)
        wrong = (np.arange(guesses.shape[1]) >= right) & (guesses >= 0)
        guesses = np.where(wrong, (guesses + 1) % interface.vocab_size, guesses)
        state = runner.start(rows)
        runner.step(prompt, lengths, state, parameters)
        logits = runner.step(tokens[:, :1], ones, state, parameters | {"draft_ids": guesses})[LOGITS.name]
        first = np.cumsum(count + 1) - (count + 1)
        for row, kept in enumerate(np.minimum(count, right)):
            wanted = [result[LOGITS.name][row] for result, _ in steps[1 : kept + 2]]
            _compare(plan, f"logits of row {row}", logits[first[row] : first[row] + kept + 1], np.array(wanted))
            after = steps[kept + 1][1]
            for name, value in state.items():
                used = (
                    int(state[LENGTHS.name][row]) if name in (cache.name for cache in interface.cache_states) else None
                )
                pair = (array[row] if used is None else array[row, :, :used] for array in (value, after[name]))
                _compare(plan, f"{name} of row {row}", *pair)


def _copied(state: dict[str, Array]) -> dict[str, Array]:
    return {name: value.copy() for name, value in state.items()}


def _compare(plan: CompilePlan, what: str, several: Any, one: Any) -> None:
    if not np.array_equal(several, one):
        raise CompileError(
            f"self-test failed: the {what} differ between a step of several tokens and steps of one: this processor's "
            f"kernels for {plan.options.weights or plan.dtype} weights round them otherwise, and guesses would change "
            "tokens; compile without num_speculative_tokens, or for batches (without batch_size=1)"
        )
