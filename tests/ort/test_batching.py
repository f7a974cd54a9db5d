"""The rows and tokens of the decoder's runs, by what its kernels round alike and where it runs."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from qsample.ort import batching
from qsample.ort.batching import (
    DecoderTraits,
    PromptCalls,
    StepRows,
    broken_promises,
    guesses_are_exact,
)
from qsample.ort.providers import Place
from qsample.ort.rounding import ANY_ROWS, Rounding, RowCounts

CPU = Place(("CPUExecutionProvider",), "cpu", None)
COMPILED_CPU = Place(("OpenVINOExecutionProvider",), "cpu", "OpenVINOExecutionProvider")
GPU = Place(("CUDAExecutionProvider",), "cuda", None)
TRAITS = DecoderTraits(
    tokens_per_call=None,
    pads_rows=False,
    has_guesses=False,
    has_adapters=False,
    has_single_row=False,
    rows_of_whole_heads=RowCounts(),
)
TWO = RowCounts(2)
EVEN = RowCounts(2, 2)
THREE = RowCounts(3)
ROUNDS_ALIKE = Rounding()


def session(length: Any, *, padded: bool = False, ids: bool = True) -> Any:
    """A part of a decoder; only one part reads the token ids."""
    inputs = [SimpleNamespace(name="lengths", shape=[7])]
    inputs += [SimpleNamespace(name="input_ids", shape=[9, length])] * ids
    overridable = [SimpleNamespace(name="other")] + [SimpleNamespace(name="row_multiple")] * padded
    return SimpleNamespace(
        get_inputs=lambda: inputs, get_overridable_initializers=lambda: overridable
    )


def package(heads: tuple[int, ...], guesses: int, adapters: int, batch_size: int | None) -> Any:
    """batch_size: None for a package that is not compiled."""
    interface = SimpleNamespace(
        key_values=[SimpleNamespace(num_key_value_heads=count) for count in heads],
        features=SimpleNamespace(num_speculative_tokens=guesses),
        adapters=[object()] * adapters,
    )
    compilation = None if batch_size is None else SimpleNamespace(batch_size=batch_size)
    return SimpleNamespace(interface=interface, manifest=SimpleNamespace(compilation=compilation))


@pytest.mark.parametrize(
    ("given", "sessions", "expected"),
    [
        (package((4,), 0, 0, None), [session("S")], TRAITS),
        (package((4,), 0, 0, 2), [session(0)], TRAITS),
        (package((4,), 0, 0, 1), [session("S")], replace(TRAITS, has_single_row=True)),
        (package((4,), 1, 0, None), [session("S")], replace(TRAITS, has_guesses=True)),
        (package((4,), 0, 1, None), [session("S")], replace(TRAITS, has_adapters=True)),
        (package((4,), 0, 0, None), [session(1)], replace(TRAITS, tokens_per_call=1)),
        # Parts: the second reads the ids, and any of them may pad.
        (
            package((4,), 0, 0, None),
            [session(0, ids=False, padded=True), session(16)],
            replace(TRAITS, tokens_per_call=16, pads_rows=True),
        ),
        # Four shares: a layer of three heads has whole heads at two rows, a layer of one at four.
        (package((4, 3), 0, 0, None), [session("S")], replace(TRAITS, rows_of_whole_heads=TWO)),
        (
            package((1, 4), 0, 0, None),
            [session("S")],
            replace(TRAITS, rows_of_whole_heads=RowCounts(4)),
        ),
        # Without attention, there are no heads to share.
        (package((), 0, 0, None), [session("S")], TRAITS),
    ],
)  # fmt: skip
def test_traits_of_a_decoder(
    given: Any, sessions: list[Any], expected: DecoderTraits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "most_shares", lambda threads: {5: 4}[threads])
    assert DecoderTraits.of(given, sessions, SimpleNamespace(intra_op_num_threads=5)) == expected  # type: ignore[arg-type]


HEADS_IN_PARTS = replace(TRAITS, rows_of_whole_heads=THREE)
WITH_ADAPTERS = replace(TRAITS, has_adapters=True)
PADDED = replace(TRAITS, has_guesses=True, pads_rows=True)


@pytest.mark.parametrize(
    ("decoder", "place", "rounding", "invariant", "expected"),
    [
        (TRAITS, CPU, ROUNDS_ALIKE, True, StepRows(ANY_ROWS)),
        (TRAITS, CPU, Rounding(products=EVEN), True, StepRows(EVEN, EVEN, EVEN)),
        # Heads that threads share decide if tokens must not depend on the batch, else only the products do.
        (HEADS_IN_PARTS, CPU, Rounding(products=EVEN), True, StepRows(RowCounts(3, 2), RowCounts(3, 2), EVEN)),
        (HEADS_IN_PARTS, CPU, Rounding(products=EVEN), False, StepRows(EVEN, EVEN, EVEN)),
        (HEADS_IN_PARTS, CPU, ROUNDS_ALIKE, True, StepRows(THREE, THREE, ANY_ROWS)),
        # A step with adapters keeps to the adapters' rows as well; the batch only if layers take adapters.
        (TRAITS, CPU, Rounding(adapters=EVEN), True, StepRows(ANY_ROWS, EVEN, ANY_ROWS)),
        (WITH_ADAPTERS, CPU, Rounding(adapters=EVEN), True, StepRows(ANY_ROWS, EVEN, EVEN)),
        (WITH_ADAPTERS, CPU, Rounding(products=TWO, adapters=EVEN), True, StepRows(TWO, EVEN, EVEN)),
        # A batch of one row has no other rows to depend on.
        (replace(TRAITS, has_single_row=True), CPU, Rounding(products=EVEN), True, StepRows(ANY_ROWS)),
        # The graph pads by itself, in packages with guesses.
        (PADDED, CPU, Rounding(products=EVEN), True, StepRows(ANY_ROWS)),
        (replace(PADDED, has_guesses=False), CPU, Rounding(products=EVEN), True, StepRows(EVEN, EVEN, EVEN)),
        (replace(PADDED, pads_rows=False), CPU, Rounding(products=EVEN), True, StepRows(EVEN, EVEN, EVEN)),
        # Elsewhere than on the plain CPU, every step is over the whole batch.
        (TRAITS, GPU, Rounding(products=EVEN), True, StepRows(None, EVEN, EVEN)),
        (TRAITS, COMPILED_CPU, ROUNDS_ALIKE, True, StepRows(None)),
        (TRAITS, Place(CPU.providers, "cpu", "CUDAExecutionProvider"), ROUNDS_ALIKE, True, StepRows(None)),
    ],
)  # fmt: skip
def test_rows_of_a_step(
    decoder: DecoderTraits, place: Place, rounding: Rounding, invariant: bool, expected: StepRows
) -> None:
    assert StepRows.of(decoder, place, rounding, batch_invariant=invariant) == expected


GUESSES = replace(TRAITS, has_guesses=True)
ON_CPU = PromptCalls(64, 256, TWO, tail_size=2, joins_prompts=True)


@pytest.mark.parametrize(
    ("decoder", "place", "rounding", "expected"),
    [
        (TRAITS, CPU, ROUNDS_ALIKE, ON_CPU),
        # Only guesses give the attention the tokens of each row, and only some kernels keep them apart.
        (GUESSES, CPU, ROUNDS_ALIKE, replace(ON_CPU, ragged=True)),
        (GUESSES, CPU, Rounding(attention=False), ON_CPU),
        (GUESSES, CPU, Rounding(products=EVEN), replace(ON_CPU, piece_tokens=EVEN, joins_prompts=False)),
        # Products that round three rows alike need two tokens at least, as attention does.
        (TRAITS, CPU, Rounding(products=RowCounts(1, 2)), replace(ON_CPU, piece_tokens=EVEN, joins_prompts=False)),
        # An expert's rows depend on all tokens of a call.
        (TRAITS, CPU, Rounding(experts=TWO), replace(ON_CPU, tail_size=None, joins_prompts=False)),
        # A graph of a fixed number of tokens has no choice.
        (replace(TRAITS, tokens_per_call=8), CPU, Rounding(products=EVEN), PromptCalls(8, tail_size=2)),
        (replace(GUESSES, tokens_per_call=1), CPU, ROUNDS_ALIKE,
         PromptCalls(1, tail_size=2, joins_prompts=True, ragged=True)),
        (TRAITS, GPU, ROUNDS_ALIKE, PromptCalls(512, None, TWO)),
        (GUESSES, COMPILED_CPU, ROUNDS_ALIKE, replace(ON_CPU, joins_prompts=False, tail_size=None)),
    ],
)  # fmt: skip
def test_calls_that_read_a_prompt(
    decoder: DecoderTraits, place: Place, rounding: Rounding, expected: PromptCalls
) -> None:
    assert PromptCalls.of(decoder, place, rounding) == expected


@pytest.mark.parametrize("pads", [True, False])
@pytest.mark.parametrize(
    ("rounding", "unpadded"),
    [
        (ROUNDS_ALIKE, True),
        (Rounding(products=TWO), False),
        (Rounding(experts=TWO), False),
        (Rounding(adapters=TWO), True),
    ],
)
def test_guesses_change_no_token(rounding: Rounding, unpadded: bool, pads: bool) -> None:
    """Padding makes up for products and experts, and nothing for attention."""
    decoder = replace(TRAITS, pads_rows=pads)
    assert guesses_are_exact(decoder, rounding) == (pads or unpadded)
    assert not guesses_are_exact(decoder, rounding._replace(attention=False))


@pytest.mark.parametrize(
    ("decoder", "rounding", "words"),
    [
        (TRAITS, ROUNDS_ALIKE, []),
        (TRAITS, Rounding(products=EVEN, attention=False), []),  # steps have the right numbers of rows
        (TRAITS, Rounding(unknown=("one", "two")), ["may depend on its batch here: one; two; try other weights"]),
        (TRAITS, Rounding(experts=TWO), ["round an expert's only row otherwise"]),
        (replace(TRAITS, pads_rows=True), Rounding(experts=TWO), []),
        (GUESSES, Rounding(products=TWO), ["round one row otherwise than several.*without --batch-size 1"]),
        (GUESSES, Rounding(products=TWO, attention=False), ["round one row otherwise"]),
        (GUESSES, Rounding(attention=False), ["round one token otherwise than several"]),
        (PADDED, Rounding(products=TWO), []),
        (PADDED, Rounding(products=TWO, attention=False), ["round one token otherwise"]),
        (GUESSES, Rounding(experts=TWO, products=TWO, unknown=("one",)),
         ["here: one;", "expert's only row", "round one row otherwise"]),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_said(
    decoder: DecoderTraits, rounding: Rounding, words: list[str]
) -> None:
    said = broken_promises(decoder, rounding)
    assert len(said) == len(words)
    for sentence, part in zip(said, words, strict=True):
        assert re.search(part, sentence)
