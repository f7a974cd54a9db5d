"""The text that weights are fitted to: the caller's, or one that the model itself writes.

A model's own text serves as well as text that it was trained on (Williams et al., 2025,
https://arxiv.org/abs/2410.17170). A copy of the graph writes it, rounded to 4 bits: in steps of many rows that takes a
third of the float graph's time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from qsample.compiler.divergence import sampled
from qsample.compiler.plan import CompilePlan
from qsample.compiler.quantize.experts import quantize_experts
from qsample.compiler.quantize.methods import WeightQuantization
from qsample.compiler.quantize.weights import quantize_weights, round_activations
from qsample.compiler.trial import logits_of, write
from qsample.contract.arrays import Array
from qsample.disk.space import check_free
from qsample.errors import CompileError
from qsample.evaluation.texts import documents_of
from qsample.graph.edit import all_initializers
from qsample.graph.packed import in_bytes
from qsample.graph.runner import GraphRunner
from qsample.graph.save import save_graph
from qsample.graph.weights import widen_weights

_LENGTH: Final = 2048  # tokens that are read as a text
_LEAST: Final = 128
_MOST: Final = 2**16
_WRITTEN: Final = 8192  # tokens
_ROW: Final = 128  # of them in a row
_ROWS: Final = 256  # at most
_WRITER: Final = WeightQuantization(4, 128)


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


def own_text(plan: CompilePlan, scratch: Path, progress: Callable[[float], None]) -> list[Array]:
    """Sequences [n] int64 that the model samples at temperature 1, 8,192 tokens, the same each time. A row begins with
    the model's first token, or with any if it has none, and so it goes on after a stop token. scratch: an empty folder
    for the copy of the graph."""
    interface, ids_of = plan.source.interface, plan.source.manifest.token_ids
    length = min(plan.ctx_len - 1, _ROW)
    rows = min(-(-_WRITTEN // length), _ROWS)
    rng = np.random.default_rng(2)  # another text than those of the divergence and of the cache's ranges
    ids = rng.integers(0, interface.vocab_size, (rows, 1)) if ids_of.bos is None else np.full((rows, 1), ids_of.bos)
    text = [ids]
    choose = sampled(rng)

    def chosen(results: Mapping[str, Array]) -> Array:
        tokens = choose(results)
        if ids_of.bos is not None:
            tokens[np.isin(text[-1][:, 0], ids_of.eos)] = ids_of.bos
        text.append(tokens[:, None])
        return tokens

    model = logits_of(plan.source.path, interface)
    widen_weights(model)
    in_bytes(model)
    round_activations(model)
    quantize_experts(model, _WRITER)
    quantize_weights(model, _WRITER, pads=True)
    size = sum(tensor.nbytes for value in all_initializers(model.graph) if (tensor := value.const_value) is not None)
    check_free(scratch, size, "writing the text to fit to")
    save_graph(model, scratch / "decoder.onnx")
    runner = GraphRunner(model, plan.source.path, interface, length)
    step = partial(runner.step, state=runner.start(rows))
    for number, _ in enumerate(write(step, ids, np.ones(rows, np.int64), length - 1, chosen)):
        progress((number + 1) / (length - 1))
    return list(np.concatenate(text, axis=1))
