"""The text that weights are fitted to: the caller's, or one that the model itself writes.

A model's own text serves as well as text that it was trained on (Williams et al., 2025,
https://arxiv.org/abs/2410.17170).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from qsample.compiler.own_text import opening_of, random_starts, write_text
from qsample.compiler.plan import CompilePlan
from qsample.compiler.trial import logits_of
from qsample.contract.arrays import Array
from qsample.errors import CompileError
from qsample.graph.runner import GraphRunner
from qsample.package.divergence import CHATS
from qsample.request.text.documents import documents_of

_LENGTH: Final = 2048  # tokens that are read as a text
_LEAST: Final = 128
_MOST: Final = 2**16
_TEXT_TOKENS: Final = 8192
_TOKENS_PER_ROW: Final = 128
_MAX_ROWS: Final = 256
# The tokens of a row's state, with those of the opening.
_MAX_STATE_TOKENS: Final = 1024
# The divergence and the scales of a cache use other seeds, so that they measure another text.
_SEED: Final = 2


def given_text(plan: CompilePlan) -> list[Array]:
    """The calibration text as sequences [n] int64, n at most the context or 2,048; of a longer text, 65,536 tokens from
    all parts. Raises CompileError if the text is too short or cannot be read."""
    try:
        documents = documents_of(plan.options.calibration_text, [plan.source])
    except ValueError as error:
        raise CompileError(f"calibration_{error}") from error
    length = min(plan.ctx_len - 1, _LENGTH)
    pieces = [ids[at : at + length] for ids in documents for at in range(0, len(ids), length)]
    tokens = sum(map(len, pieces))
    if tokens < _LEAST:
        raise CompileError(
            f"calibration_text has {tokens} tokens; give at least {_LEAST}, and rather tens of thousands"
        )
    step = max(1, -(-tokens // _MOST))
    return pieces[::step]


def own_text(plan: CompilePlan, progress: Callable[[float], None]) -> list[Array]:
    """Sequences [n] int64 that the float model writes, 8,192 tokens, the same each time. A model that chats writes half
    of them as chats, and half after random tokens: of texts of one kind, a fit is worse for texts of the other."""
    source = plan.source
    capacity = min(plan.ctx_len, _MAX_STATE_TOKENS)
    opening = opening_of(source, capacity)
    openings = [opening, random_starts(source)] if opening.text == CHATS else [opening]
    runner = GraphRunner(
        logits_of(source.path, source.interface),
        source.path,
        source.interface,
        capacity,
        weights_mapped=True,
    )
    sequences: list[Array] = []
    for number, one in enumerate(openings):
        tokens = min(capacity - max(len(one.ids), 1), _TOKENS_PER_ROW)
        rows = min(-(-_TEXT_TOKENS // tokens), _MAX_ROWS) // len(openings)
        text = write_text(
            partial(runner.step, state=runner.start(rows)),
            one,
            source.interface.vocab_size,
            rows=rows,
            tokens=tokens,
            seed=_SEED,
            progress=partial(_report_part, progress, number, len(openings)),
        )
        sequences += list(text.rows)
    return sequences


def _report_part(
    progress: Callable[[float], None], number: int, count: int, fraction: float
) -> None:
    """Report the fraction done of the part `number` of `count` parts."""
    progress((number + fraction) / count)
