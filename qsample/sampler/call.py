"""One call of the graph: its inputs, and which rows do what."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from qsample.contract import RUNNING
from qsample.interface import Interface
from qsample.sampler.tensor import INT32, Tensor, Tensors, branch, op, size


class Columns(Mapping[str, Tensor]):
    """Numbers a row as columns, [B, 1], made when they are asked for: a branch makes its own."""

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


class Call:
    """The inputs of one call and what every part of the step asks of them.

    Args:
        interface: the vocabulary and the features. `captured`: no If and no Loop.
        inputs: the tensors of `Interface.sampler`, by name.

    Attributes:
        total: [B] int32, how many tokens each row has after this call's inputs; `start`: before them.
        running: [B] bool. sampling: [B] bool, the rows that are asked for a token.
        capacity: T, scalar int64. capacity32: the same as int32.
    """

    def __init__(self, interface: Interface, inputs: Mapping[str, Tensor]) -> None:
        self.interface, self.inputs, self.features = interface, inputs, interface.features
        self.vocab, self.captured = interface.vocab_size, interface.captured
        # `lengths` is read once, for the sum: its buffer may be that of its own next value.
        self.total = inputs["lengths"] + inputs["input_lengths"]
        self.start = self.total - inputs["input_lengths"]
        self.running = inputs["status"].equals(RUNNING)
        self.sampling = self.running & inputs["emit"]
        self.capacity = op("Squeeze", size(inputs["tokens"], 1))
        self.capacity32 = self.capacity.to(INT32)

    def __getitem__(self, name: str) -> Tensor:
        return self.inputs[name]

    def uses(self, *filters: str) -> bool:
        """Whether the graph has any of these extra filters."""
        return any(name in self.features.filters for name in filters)

    def columns(self, *names: str) -> list[Tensor]:
        """Inputs as columns, [B, 1]."""
        return [self.inputs[name].unsqueeze() for name in names]

    def branch(self, needed: Tensor, then: Callable[[], Tensors], otherwise: Callable[[], Tensors]) -> Tensors:
        """`then()` if some row needs it (`needed`, bool), else `otherwise()`; without control flow, always `then()`."""
        return then() if self.captured else branch(needed.any(), then, otherwise)

    def position(self) -> Tensor:
        """Where each row's next token is decided, at most T - 1: [B] int32."""
        return op("Min", self.total, self.capacity32 - 1)
