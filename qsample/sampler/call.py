"""A call of the graph: its inputs, which rows run and draw, and the tokens of each row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from qsample.contract.interface import Interface
from qsample.contract.tensors import RUNNING, TensorSpec
from qsample.sampler import blocks
from qsample.sampler.blocks import Blocks
from qsample.sampler.tensor import (
    FLOAT,
    INT32,
    INT64,
    Structure,
    Tensor,
    branch,
    concat,
    maximum,
    minimum,
    op,
    size,
    where,
)


class Columns(Mapping[str, Tensor]):
    """Tensors with a number for each row, [B], as columns, [B, 1]; other tensors unchanged.

    A column is made at its first use. Each branch needs an object of its own: the values of one
    branch do not exist in another.
    """

    def __init__(self, rows: Mapping[str, Tensor]) -> None:
        self._rows = rows
        self._columns: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._columns:
            value = self._rows[name]
            self._columns[name] = value.unsqueeze() if len(value.shape) == 1 else value
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


class DrawCall(ABC):
    """The inputs of a call that the draw reads, and the rows that draw.

    Attributes:
        interface: the dimensions and options of the graph.
        features: the options of the graph.
        vocab: V, the number of tokens.
        captured: whether the graph is one for replay, without control flow.
        inputs: the graph's inputs by name.
        running: [B] bool, the rows that are not finished; only in graphs with control flow.
        sampling: [B] bool, the rows that have to emit a token; only in graphs with control flow.
        for_webgpu: whether the graph is for WebGPU, see `build_sampler`.
    """

    running: Tensor
    sampling: Tensor

    def __init__(
        self, interface: Interface, inputs: Mapping[str, Tensor], *, for_webgpu: bool = False
    ) -> None:
        self.interface = interface
        self.features = interface.features
        self.vocab = interface.vocab_size
        self.captured = interface.captured
        self.inputs = inputs
        self.for_webgpu = for_webgpu

    def __getitem__(self, name: str) -> Tensor:
        return self.inputs[name]

    def uses(self, *filters: str) -> bool:
        """Whether the graph has any of these optional filters."""
        return any(name in self.features.filters for name in filters)

    def columns(self, *names: str) -> list[Tensor]:
        """Inputs as columns, [B, 1]."""
        return [self.inputs[name].unsqueeze() for name in names]

    def branch(
        self,
        needed: Tensor,
        then: Callable[[], Structure],
        otherwise: Callable[[], Structure],
    ) -> Structure:
        """`then()` if some row needs it, else `otherwise()`.

        A graph without control flow always computes `then()`.

        Args:
            needed: [B] bool, the rows that need the result of `then`.
            then: computes the result.
            otherwise: computes a placeholder with the same structure.
        """
        if self.captured:
            return then()
        return branch(needed.any(), then, otherwise)

    def top_of_blocks(self, split: Blocks, count: int) -> tuple[Tensor, Tensor]:
        """The `count` largest logits, largest first; of equal logits, the lowest ids.

        Returns:
            The logits, [B, count] float32, and their ids, [B, count] int64.
        """
        if self.captured:
            return blocks.replayed_top_candidates(split, count, for_webgpu=self.for_webgpu)
        return blocks.top_candidates(split, count)

    @abstractmethod
    def uniforms(self) -> Uniforms:
        """The random numbers of this step; called once, in the branch of the random rows."""


# Takes the state of a stream of random numbers, and returns the number that the stream has for the
# next token of each row: [B, 1] float32, in [0, 1).
Uniforms: TypeAlias = Callable[[TensorSpec], Tensor]


class StepCall(DrawCall):
    """The inputs of rows of a decode step, and their tokens.

    Attributes:
        total: [B] int32, how many tokens each row has after this call's inputs.
        capacity: T, [1] int64.
        capacity32: T, [1] int32.
    """

    def __init__(
        self,
        interface: Interface,
        inputs: Mapping[str, Tensor],
        total: Tensor,
        *,
        for_webgpu: bool = False,
    ) -> None:
        super().__init__(interface, inputs, for_webgpu=for_webgpu)
        self.total = total
        self.capacity = size(inputs["tokens"], 1)
        self.capacity32 = self.capacity.to(INT32)

    def uniforms(self) -> Uniforms:
        """The numbers of the noise buffers, at each row's position."""
        return self._buffered_uniform

    def _buffered_uniform(self, buffer: TensorSpec) -> Tensor:
        return self[buffer.name].gather(self.position().unsqueeze())

    def position(self) -> Tensor:
        """The position of each row's next token, at most T - 1: [B] int32."""
        return op("Min", self.total, self.capacity32 - 1)

    @abstractmethod
    def longest(self, needed: Tensor) -> Tensor:
        """How many columns of `tokens` to read for the rows `needed`, [B] bool: [1] int64."""

    @abstractmethod
    def history(self, length: Tensor) -> Tensor:
        """The ids of all tokens of each row, this call's inputs included.

        Args:
            length: the result of `longest` for the rows that matter.

        Returns:
            [B, h] int64, padded with further tokens of the row.
        """

    @abstractmethod
    def newest(self, length: Tensor, count: Tensor) -> Tensor:
        """Which columns of `history` are among the newest tokens of each row.

        Args:
            length: the argument of `history`.
            count: [B, 1] int32, how many of the newest tokens.

        Returns:
            [B, h] float32: 1 for the newest tokens, 0 for other columns.
        """

    @abstractmethod
    def row_tokens(self) -> Tensor:
        """Each row's tokens at their positions, this call's inputs included: [B, T] int64."""

    @abstractmethod
    def counts(self, ids: Tensor) -> Tensor:
        """How often each row sampled the tokens `ids`, [B, h] int64: [B, h] float32."""


class Call(StepCall):
    """The inputs of a decode step with control flow, by the names of `Interface.sampler`.

    Attributes:
        start: [B] int32, how many tokens each row has before this call's inputs.
    """

    def __init__(self, interface: Interface, inputs: Mapping[str, Tensor]) -> None:
        # `lengths` is read once, for the sum: its buffer may also hold its next value.
        total = inputs["lengths"] + inputs["input_lengths"]
        self.start = total - inputs["input_lengths"]
        self.running = inputs["status"].equals(RUNNING)
        self.sampling = self.running & inputs["emit"]
        super().__init__(interface, inputs, total)

    def longest(self, needed: Tensor) -> Tensor:
        length = where(needed, self.start, 0).max(keep=False).to(INT64)
        return minimum(length, self.capacity)

    def history(self, length: Tensor) -> Tensor:
        # The padding repeats the first input.
        start = self.start.unsqueeze()
        lengths = self["input_lengths"].unsqueeze()
        ids = self["input_ids"]
        filler = ids.columns(0, 1)
        old = where(start > 0, self["tokens"].columns(0, length).to(INT64), filler)
        new = where(count_up(size(ids, 1)) < lengths, ids, filler)
        return concat(old, new)

    def newest(self, length: Tensor, count: Tensor) -> Tensor:
        start = self.start.unsqueeze()
        lengths = self["input_lengths"].unsqueeze()
        old = count_up(length)
        new = count_up(size(self["input_ids"], 1))
        first_place = start + lengths - count
        old_is_newest = (old >= first_place) & (old < start)
        new_is_newest = (new >= lengths - count) & (new < lengths)
        return concat(old_is_newest, new_is_newest).to(FLOAT)

    def row_tokens(self) -> Tensor:
        start = self.start.unsqueeze()
        lengths = self["input_lengths"].unsqueeze()
        tokens = self["tokens"]
        ids = self["input_ids"]
        offset = count_up(size(tokens, 1)) - start
        is_input = (offset >= 0) & (offset < lengths)
        # CUDA has no Clip of int32.
        columns = maximum(minimum(offset, size(ids, 1).to(INT32) - 1), 0).to(INT64)
        return where(is_input, ids.gather(columns), tokens.to(INT64))

    def counts(self, ids: Tensor) -> Tensor:
        return self["output_counts"].gather(ids)


def count_up(count: Tensor) -> Tensor:
    """The numbers 0, 1, … count - 1: [count] int32. count: [1] int64."""
    return op("Range", 0, op("Squeeze", count), 1).to(INT32)
