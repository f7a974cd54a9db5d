"""The logits of a Hugging Face model for random prompts, with which the parity gate compares its
export."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeGuard

import numpy as np
import torch
from transformers import PreTrainedModel

from qsample.checkpoints.checkpoint import Checkpoint
from qsample.checkpoints.source import origin_of
from qsample.contract.arrays import Array
from qsample.contract.interface import Interface
from qsample.exporters import parity
from qsample.exporters.parity import CONTINUATION_TOKENS, Narrowed, Reference, reference_lengths

# A window that is too long for a prompt is compared with this length.
NARROW_WINDOW: Final = 6
# The settings in which configurations state the sizes of attention windows.
_WINDOW_SETTINGS: Final = (
    "sliding_window",
    "sliding_window_size",
    "attention_chunk_size",
    "attention_window_size",
    "window_size",
    "local_attention",
)


def reference(model: PreTrainedModel) -> Reference:
    """Run `model` eagerly, without a cache, on random prompts of different lengths (seeded).
    Prompts of similar lengths are a batch, so that the weights are read once."""
    config = model.config.get_text_config(decoder=True)
    generator = np.random.default_rng(0)
    # Models that number positions themselves skip padding; a prompt contains none.
    weight = model.get_input_embeddings().weight
    pad = getattr(config, "pad_token_id", None)
    assert isinstance(weight, torch.Tensor)
    allowed = np.setdiff1d(np.arange(len(weight)), [] if pad is None else [pad])
    windows = _windows(config)
    lengths, short = reference_lengths(longest_context(config), windows)
    long = [size for size in windows if size not in short]
    rows = [generator.choice(allowed, n + CONTINUATION_TOKENS).tolist() for n in lengths]
    model.set_attn_implementation("eager")
    batches = _batches(rows)
    logits = [
        of_row[n - 1 :]
        for of_row, n in zip(
            (row for batch in batches for row in eager_logits(model, batch)), lengths, strict=True
        )
    ]
    prompts = [row[:n] for row, n in zip(rows, lengths, strict=True)]
    expected = Reference(prompts, [row[n:] for row, n in zip(rows, lengths, strict=True)], logits)
    narrowed = (
        _narrowed(model, expected, batches[-1], dict.fromkeys(long, NARROW_WINDOW))
        if long
        else None
    )
    return replace(
        expected, narrowed=narrowed, windows=_what_is_compared(config, short, long, narrowed)
    )


def longest_context(config: Any) -> int | None:
    """The number of positions that a text model knows; None for any number, which some
    configurations state as -1.

    Doge attends to all of keep_window_size tokens, and beyond that to the keys that it chooses; a
    graph does not."""
    stated = [
        int(getattr(config, name, None) or 0)
        for name in ("max_position_embeddings", "keep_window_size")
    ]
    return min((size for size in stated if size > 0), default=None)


def _batches(rows: list[list[int]]) -> list[list[list[int]]]:
    """`rows`, in order of their lengths, in batches; a row that is much longer than those before it
    begins another."""
    batches = [rows[:1]]
    for row in rows[1:]:
        if len(row) <= 3 * len(batches[-1][0]):
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def eager_logits(model: PreTrainedModel, rows: list[list[int]]) -> list[Array]:
    """[n, V] float32 for each row of n tokens. Shorter rows are filled up at the end; no earlier
    token sees that."""
    longest = max(map(len, rows))
    ids = torch.tensor([(row * longest)[:longest] for row in rows])
    with torch.no_grad():
        output = model(input_ids=ids, use_cache=False).logits.to(torch.float32).numpy()
    return [logits[: len(row)] for logits, row in zip(output, rows, strict=True)]


def _windows(config: Any) -> list[int]:
    """The sizes of the attention windows that `config` states, in order."""
    stated = (getattr(config, name, None) for name in _WINDOW_SETTINGS)
    return sorted({size for size in stated if _is_size(size)})


def _is_size(setting: Any) -> TypeGuard[int]:
    """Whether a setting is a window's size; some models state a list of them, or nothing."""
    return isinstance(setting, int) and setting > 0


def _narrowed(
    model: PreTrainedModel, expected: Reference, batch: list[list[int]], windows: Mapping[int, int]
) -> Narrowed | None:
    """The last row of `expected`, and of the `batch` that it was computed in, with smaller
    `windows`. None if `model` fails, or computes the same: no layer has a window, or layers took
    theirs when they were made."""
    try:
        with _with_windows(model, windows):
            logits = eager_logits(model, batch)[-1][len(expected.prompts[-1]) - 1 :]
    except (RuntimeError, ValueError, IndexError):  # weights whose shape is the window's
        return None
    return None if np.array_equal(logits, expected.logits[-1]) else Narrowed(windows, logits)


@contextmanager
def _with_windows(model: PreTrainedModel, windows: Mapping[int, int]) -> Iterator[None]:
    """While open, attention windows of `model` that are keys of `windows` have the values. Masks
    are made with the configuration's; some modules keep a copy."""
    owners = [model.config.get_text_config(decoder=True), *model.modules()]
    found = [
        (owner, name, size)
        for owner in owners
        for name in _WINDOW_SETTINGS
        if _is_size(size := vars(owner).get(name)) and size in windows
    ]
    try:
        for owner, name, window in found:
            setattr(owner, name, windows[window])
        yield
    finally:
        for owner, name, window in found:
            setattr(owner, name, window)


def _what_is_compared(
    config: Any, short: list[int], long: list[int], narrowed: Narrowed | None
) -> str:
    """As `Reference.windows` says it."""
    said = ["passed by a prompt"] * bool(short) + ["narrowed"] * (narrowed is not None)
    if (
        long
        and narrowed is None
        and set(getattr(config, "layer_types", None) or ()) != {"full_attention"}
    ):
        said.append(f"not compared: {', '.join(map(str, long))}")
    return ", ".join(said) or "none"


def compare_with_checkpoint(
    checkpoint: Checkpoint, folder: Path, interface: Interface, tolerance: float | None
) -> Mapping[str, Any]:
    """Compare a baked graph with its checkpoint in transformers, as an export is compared.

    Args:
        checkpoint: the checkpoint.
        folder: the folder with the graph.
        interface: the interface of the graph.
        tolerance: the largest difference per unit of the largest logit; None accepts any, for
            quantized weights.

    Returns:
        The figures for the manifest.

    Raises:
        ParityError: the difference is larger.
    """
    figures = parity.check(
        folder,
        interface,
        reference(checkpoint.load()),
        tolerance=math.inf if tolerance is None else tolerance,
        original=f"the checkpoint {checkpoint.model_id}",
    )
    return {
        "checkpoint": origin_of(checkpoint.model_id)[0],
        "checkpoint_max_error": parity.rounded_up(figures.max_error, figures.tolerance),
        "checkpoint_scale": figures.scale,
        "checkpoint_windows": figures.windows,
    }
