"""Parts of a step of a graph for replay, each for a list of rows: all of them, or none.

On CUDA a part takes the rows of its list, and puts its results back in their place. If the list is
empty, its tensors are, and a device launches nothing for those. A graph for WebGPU is not captured
and has an `If` around each part, within which the list has all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol, Self, TypeVar

from qsample.contract.interface import Interface
from qsample.contract.tensors import REPLAY_ROWS
from qsample.sampler.tensor import (
    SLICE_END,
    Structure,
    Tensor,
    axis_size,
    concat,
    if_any,
    operator,
)


class _HasRows(Protocol):
    """A tensor or a record of tensors."""

    def rows(self, indices: Tensor) -> Self: ...

    def with_rows(self, indices: Tensor, updates: Self) -> Self: ...


_Values = TypeVar("_Values", bound=_HasRows)


class Part:
    """A part of a step, for a list of rows."""

    def __init__(self, rows: Tensor, *, for_webgpu: bool) -> None:
        """Begin a part.

        Args:
            rows: [R] int64, the numbers of all rows, or of none.
            for_webgpu: see `build_sampler`.
        """
        self._rows = rows
        self._for_webgpu = for_webgpu

    def run(self, compute: Callable[[], Structure], otherwise: Structure) -> Structure:
        """The results of the part, or `otherwise` if it has no rows.

        Args:
            compute: computes the part, and puts its results into those of `otherwise` (`put`).
            otherwise: the results without the part.
        """
        if self._for_webgpu:
            return if_any(self._rows, compute, lambda: otherwise)
        return compute()

    def take(self, values: _Values) -> _Values:
        """The rows of the part, of values of all rows."""
        return values if self._for_webgpu else values.rows(self._rows)

    def put(self, whole: _Values, results: _Values) -> _Values:
        """Values of all rows, [B, n], with results of the part, [R, n], in its rows."""
        return results if self._for_webgpu else whole.with_rows(self._rows, results)

    def put_first_columns(self, whole: Tensor, results: Tensor) -> Tensor:
        """A tensor of all rows, [B, n], with results of the part, [R, m], in the first m columns of
        its rows."""
        if self._for_webgpu:
            return concat(results, whole.columns(axis_size(results, 1), SLICE_END))
        return whole.with_rows(self._rows, results)

    def inputs(
        self,
        interface: Interface,
        inputs: Mapping[str, Tensor],
        numbers: Numbers | None = None,
        whole: Collection[str] = (),
    ) -> Mapping[str, Tensor]:
        """The inputs of the rows of the part, by name.

        Args:
            interface: the interface of the graph.
            inputs: the inputs of all rows.
            numbers: inputs that are taken together; by default those of `inputs`.
            whole: the names of inputs that are read at places of all rows, and stay unchanged.
        """
        if self._for_webgpu:
            return inputs
        if numbers is None and isinstance(inputs, _RowInputs):
            numbers = inputs.numbers
        return _RowInputs(interface, inputs, self._rows, numbers, whole)


class Numbers:
    """Numbers of each row side by side, so that one node serves all of them.

    Attributes:
        names: the names of the numbers.
        values: [B, k] float32, in the order of the names.
    """

    def __init__(self, names: Sequence[str], values: Tensor) -> None:
        self.names = names
        self.values = values

    @classmethod
    def of(cls, inputs: Mapping[str, Tensor], names: Sequence[str]) -> Numbers:
        """The inputs `names`, [B] float32 each."""
        return cls(names, concat(*(inputs[name].unsqueeze() for name in names)))

    def rows(self, indices: Tensor) -> Numbers:
        """The numbers of the rows at `indices`, [R] int64."""
        return Numbers(self.names, self.values.rows(indices))

    def separate(self) -> dict[str, Tensor]:
        """Each number by its name, [B] float32."""
        count = len(self.names)
        columns = operator("Split", self.values, axis=1, num_outputs=count, outputs=count)
        return {name: column.squeeze() for name, column in zip(self.names, columns, strict=True)}


class _RowInputs(Mapping[str, Tensor]):
    """The inputs of some rows by name. Inputs that all rows share are unchanged.

    Attributes:
        numbers: the numbers that were taken together; None without any.
    """

    def __init__(
        self,
        interface: Interface,
        inputs: Mapping[str, Tensor],
        rows: Tensor,
        numbers: Numbers | None,
        whole: Collection[str],
    ) -> None:
        """Take the rows.

        Args:
            interface, inputs, numbers, whole: see `Part.inputs`.
            rows: [R] int64, the rows.
        """
        shared = {spec.name for spec in (*REPLAY_ROWS, *interface.grammar_tables)} | set(whole)
        self.numbers = None if numbers is None else numbers.rows(rows)
        together = {} if self.numbers is None else self.numbers.separate()
        self._rows = {
            name: value if name in shared else value.rows(rows)
            for name, value in inputs.items()
            if name not in together
        }
        self._rows |= together

    def __getitem__(self, name: str) -> Tensor:
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)
