"""How many rows and tokens a run of the decoder may have, so that a row's last bits do not depend
on its batch.

`rounding` measures how the kernels round on this processor. This module draws the conclusions for
the runtime: `StepRows` for decode steps, `PromptCalls` for the calls that read prompts, and
`guesses_are_exact`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import onnxruntime as ort

from qsample.contract.tensors import INPUT_IDS, ROW_MULTIPLE
from qsample.ort.options import SessionOptions, most_shares
from qsample.ort.providers import Place
from qsample.ort.rounding import ANY_ROWS, Rounding, RowCounts
from qsample.package.package import Package

# On two cores and with int4 weights, 1,024 tokens take as long in pieces of 64 tokens as in larger
# pieces, and 10 % longer in pieces of 32.
_PIECE_TOKENS_ON_CPU: Final = 64
_LATE_PIECE_TOKENS_ON_CPU: Final = 256
_PIECE_TOKENS_ON_GPU: Final = 512
# The CPU's attention computes each of two or more tokens alike, whatever their number.
_MIN_TOKENS_ROUNDED_ALIKE: Final = 2


@dataclass(frozen=True, slots=True)
class DecoderTraits:
    """The properties of a loaded decoder that decide on the rows and tokens of its runs.

    Attributes:
        tokens_per_call: S, if the graph has it fixed; None if it is free.
        pads_rows: Whether the graph itself pads the rows of products to `ROW_MULTIPLE`.
        has_guesses: Whether a step can check guesses.
        has_adapters: Whether layers take LoRA adapters.
        has_single_row: Whether the package was compiled for a batch of one row.
        rows_of_whole_heads: The numbers of rows at which no thread computes only a part of an
            attention head. If a session has more threads than rows times heads, several threads
            share a head and add up their parts, which rounds otherwise.
    """

    tokens_per_call: int | None
    pads_rows: bool
    has_guesses: bool
    has_adapters: bool
    has_single_row: bool
    rows_of_whole_heads: RowCounts

    @classmethod
    def of(
        cls, package: Package, sessions: Sequence[ort.InferenceSession], options: SessionOptions
    ) -> DecoderTraits:
        """Read the traits from a package and the sessions of its decoder.

        Args:
            package: The package.
            sessions: The sessions of the decoder's parts in order; one if it is whole.
            options: The options that the sessions were opened with.
        """
        interface = package.interface
        compilation = package.manifest.compilation
        shares = most_shares(options.intra_op_num_threads)
        heads = [shape.num_key_value_heads for shape in interface.key_values]
        fewest_heads = min(heads, default=shares)
        return cls(
            tokens_per_call=_fixed_length(sessions),
            pads_rows=any(_has_row_multiple(session) for session in sessions),
            has_guesses=interface.features.num_speculative_tokens > 0,
            has_adapters=bool(interface.adapters),
            has_single_row=compilation is not None and compilation.batch_size == 1,
            rows_of_whole_heads=RowCounts(-(-shares // fewest_heads)),
        )


def _fixed_length(sessions: Sequence[ort.InferenceSession]) -> int | None:
    """The size of the axis S of the token ids, or None if it is free."""
    inputs = [value for session in sessions for value in session.get_inputs()]
    length = next(value.shape[1] for value in inputs if value.name == INPUT_IDS.name)
    return length if isinstance(length, int) and length > 0 else None


def _has_row_multiple(session: ort.InferenceSession) -> bool:
    names = [value.name for value in session.get_overridable_initializers()]
    return ROW_MULTIPLE.name in names


@dataclass(frozen=True, slots=True)
class StepRows:
    """The numbers of adjacent rows that a decode step may have.

    Attributes:
        step: The numbers of rows of a step, or None if every step is over the whole batch.
        adapter_step: The numbers of rows of a step in which a row uses a LoRA adapter. It counts
            only if `step` is not None.
        batch: The numbers of rows of a whole batch, idle rows included, that its products round
            alike.
    """

    step: RowCounts | None = None
    adapter_step: RowCounts = ANY_ROWS
    batch: RowCounts = ANY_ROWS

    @classmethod
    def of(
        cls, decoder: DecoderTraits, place: Place, rounding: Rounding, *, batch_invariant: bool
    ) -> StepRows:
        """Choose the rows of steps. batch_invariant: see `SessionOptions`."""
        batch = ANY_ROWS if decoder.has_single_row else _product_rows(decoder, rounding)
        step = batch & decoder.rows_of_whole_heads if batch_invariant else batch
        return cls(
            step=step if place.is_plain_cpu else None,
            adapter_step=step & rounding.adapters,
            batch=batch & rounding.adapters if decoder.has_adapters else batch,
        )


@dataclass(frozen=True, slots=True)
class PromptCalls:
    """The calls in which a prompt is read. The class `Pieces` of the runtime says what a piece is.

    Attributes:
        piece_size: The number of tokens of a piece.
        late_piece_size: The number of tokens of a piece far behind the start of a prompt; None if
            all pieces have the same size.
        piece_tokens: The numbers of tokens of a row, padding included, that a piece may have.
        tail_size: The number of tokens at the end of a piece that give the same last bits if they
            are read again without the tokens before them; None if the whole piece has to be read.
        joins_prompts: Whether a call can read the first tokens of several rows.
        ragged: Whether a call takes any number of each row's tokens, behind earlier tokens, with
            the last bits of the row by itself.
    """

    piece_size: int
    late_piece_size: int | None = None
    piece_tokens: RowCounts = ANY_ROWS
    tail_size: int | None = None
    joins_prompts: bool = False
    ragged: bool = False

    @classmethod
    def of(cls, decoder: DecoderTraits, place: Place, rounding: Rounding) -> PromptCalls:
        """Choose the calls that suit a decoder, the place where it runs and its kernels."""
        products = _product_rows(decoder, rounding)
        # The output layer gets one row for each prompt of a call.
        joins_prompts = place.is_plain_cpu and products.any and rounding.experts.any
        # The rows that an expert gets depend on all tokens of a call, so these have to be the same.
        has_tail = place.on_cpu and rounding.experts.any
        calls = cls(
            piece_size=_PIECE_TOKENS_ON_GPU,
            piece_tokens=replace(products, least=_MIN_TOKENS_ROUNDED_ALIKE),
            tail_size=_MIN_TOKENS_ROUNDED_ALIKE if has_tail else None,
            joins_prompts=joins_prompts,
            ragged=joins_prompts and decoder.has_guesses and rounding.attention,
        )
        if decoder.tokens_per_call is not None:
            return replace(calls, piece_size=decoder.tokens_per_call, piece_tokens=ANY_ROWS)
        if place.device == "cpu":
            return replace(
                calls,
                piece_size=_PIECE_TOKENS_ON_CPU,
                late_piece_size=_LATE_PIECE_TOKENS_ON_CPU,
            )
        return calls


def _product_rows(decoder: DecoderTraits, rounding: Rounding) -> RowCounts:
    """The numbers of rows that the products with the model's weights round alike."""
    if decoder.has_guesses and decoder.pads_rows:
        return ANY_ROWS  # The graph pads them to the numbers that the kernels round alike.
    return rounding.products


def guesses_are_exact(decoder: DecoderTraits, rounding: Rounding) -> bool:
    """Whether steps may check guesses: False if guesses would change tokens here."""
    return rounding.attention and (decoder.pads_rows or rounding.is_uniform)


def broken_promises(decoder: DecoderTraits, rounding: Rounding) -> list[str]:
    """Warnings of what this processor's kernels, and a graph that does not pad its rows, cannot
    keep."""
    dependent = "a row's tokens may depend on its batch here: "
    again = "compile it again with this version of qsample"
    broken = list[str]()
    if rounding.unknown:
        weights = "try other weights, or --provider web, whose activations stay in float32"
        broken.append(f"{dependent}{'; '.join(rounding.unknown)}; {weights}")
    if not rounding.experts.any and not decoder.pads_rows:
        broken.append(
            f"{dependent}this processor's kernels round an expert's only row otherwise than several; {again}"
        )
    if decoder.has_guesses:
        off = "guesses are off here (num_speculative_tokens): this processor's kernels round one"
        why = f"otherwise than several, and they would change tokens; {again}"
        if not decoder.pads_rows and not rounding.products.any:
            broken.append(f"{off} row {why}, for batches (without --batch-size 1)")
        elif not rounding.attention:
            broken.append(f"{off} token {why}, on this machine; compile says whether it can")
    return broken
