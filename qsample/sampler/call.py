"""One call of the graph: its inputs, the rows' tokens, and which rows do what."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from qsample.contract.interface import Interface
from qsample.contract.tensors import RUNNING, TensorSpec
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
    """Rows of numbers as columns, [B, 1], made at their first use: a branch makes a copy."""

    def __init__(self, rows: Mapping[str, Tensor]) -> None:
        self._rows, self._made = rows, dict[str, Tensor]()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._made:
            value = self._rows[name]
            self._made[name] = value.unsqueeze() if len(value.shape) == 1 else value
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


class DrawCall(ABC):
    """The inputs of one call as far as the draw reads them, and which rows draw.

    Attributes:
        interface, features: the graph's dimensions and options.
        inputs: the graph's inputs by name.
        running: [B] bool, rows that are not finished.
        sampling: [B] bool, rows that have to emit a token.
        vocab: V, the number of tokens.
        captured: the graph has no control flow.
        for_webgpu: as in `build_sampler`.
    """

    def __init__(
        self,
        interface: Interface,
        inputs: Mapping[str, Tensor],
        *,
        running: Tensor,
        sampling: Tensor,
        for_webgpu: bool = False,
    ) -> None:
        self.interface = interface
        self.features = interface.features
        self.vocab = interface.vocab_size
        self.captured = interface.captured
        self.inputs = inputs
        self.running = running
        self.sampling = sampling
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
        """`then()` if some row needs it (`needed`, [B] bool), else `otherwise()`.

        A graph without control flow always computes `then()`.
        """
        return then() if self.captured else branch(needed.any(), then, otherwise)

    @abstractmethod
    def uniforms(self) -> Uniforms:
        """The source of this step's random numbers; called once, where the random rows begin."""


# Takes the state that holds the numbers of a stream, and returns the number that decides the next token of each row:
# [B, 1] float32, in [0, 1).
Uniforms: TypeAlias = Callable[[TensorSpec], Tensor]


class Call(DrawCall):
    """The inputs of one decode step, by the names of `Interface.sampler`, and values that all its parts share.

    Attributes:
        total: [B] int32, how many tokens each row has after this call's inputs.
        start: [B] int32, how many tokens each row had before them.
        capacity, capacity32: T, [1] int64 and int32.
    """

    def __init__(
        self, interface: Interface, inputs: Mapping[str, Tensor], *, for_webgpu: bool = False
    ) -> None:
        # `lengths` is read once, for the sum: its buffer may also hold its next value.
        self.total = inputs["lengths"] + inputs["input_lengths"]
        self.start = self.total - inputs["input_lengths"]
        running = inputs["status"].equals(RUNNING)
        super().__init__(
            interface,
            inputs,
            running=running,
            sampling=running & inputs["emit"],
            for_webgpu=for_webgpu,
        )
        self.capacity = size(inputs["tokens"], 1)
        self.capacity32 = self.capacity.to(INT32)

    def uniforms(self) -> Uniforms:
        """The numbers of the noise buffers, at each row's position."""
        return self._buffered_uniform

    def _buffered_uniform(self, buffer: TensorSpec) -> Tensor:
        return self[buffer.name].gather(self.position().unsqueeze())

    def position(self) -> Tensor:
        """Where each row's next token is decided, at most T - 1: [B] int32."""
        return op("Min", self.total, self.capacity32 - 1)

    def history(self, length: Tensor) -> Tensor:
        """Ids of every token of each row, this call's inputs included: [B, length + S] int64, padded with duplicates.
        length: int64, how many columns of `tokens` to read: at least the largest `start` that matters."""
        start, lengths = self.start.unsqueeze(), self["input_lengths"].unsqueeze()
        ids = self["input_ids"]
        filler = ids.columns(0, 1)
        old = where(start > 0, self["tokens"].columns(0, length).to(INT64), filler)
        new = where(count_up(size(ids, 1)) < lengths, ids, filler)
        return concat(old, new)

    def newest(self, length: Tensor, count: Tensor) -> Tensor:
        """1 for each column of `history` that is among the row's newest `count` [B, 1] int32 tokens, 0 for the rest:
        float32."""
        start, lengths = self.start.unsqueeze(), self["input_lengths"].unsqueeze()
        old, new = count_up(length), count_up(size(self["input_ids"], 1))
        before = start + lengths - count
        return concat(
            (old >= before) & (old < start), (new >= lengths - count) & (new < lengths)
        ).to(FLOAT)

    def row_tokens(self) -> Tensor:
        """Each row's tokens in their places, this call's inputs included: [B, T] int64."""
        start, lengths = self.start.unsqueeze(), self["input_lengths"].unsqueeze()
        tokens, ids = self["tokens"], self["input_ids"]
        offset = count_up(size(tokens, 1)) - start
        inside = (offset >= 0) & (offset < lengths)
        # Clip of int32 has no kernel on CUDA.
        columns = maximum(minimum(offset, size(ids, 1).to(INT32) - 1), 0).to(INT64)
        return where(inside, ids.gather(columns), tokens.to(INT64))


def count_up(count: Tensor) -> Tensor:
    """0, 1, … count - 1: [count] int32. count: [1] int64."""
    return op("Range", 0, op("Squeeze", count), 1).to(INT32)
