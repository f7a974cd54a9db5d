"""Weights that take no memory: a float32 tensor without pages, and a function that computes its
numbers on demand.

Such a placeholder is an ordinary tensor on the CPU. Its pages are zeros that the system never
allocates, so transformers loads it and torch traces it like any other tensor. Its meaning, a
`Deferred`, is an attribute of its storage: all views share it, and it lives as long as the storage.
While `computing` is open, each operation gets the numbers; anything else that reads a placeholder,
such as NumPy, gets zeros."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from qsample.contract.arrays import sparse_zeros

# Exporters fold and compare constants of up to 8,192 numbers, so their numbers have to be in
# memory.
SMALLEST: Final = 1 << 14
_CHUNK_NUMBERS: Final = 1 << 24
# A matrix is widened and multiplied in pieces of this many numbers, which stay in the processor's
# caches.
_PIECE_NUMBERS: Final = 1 << 22
# Operations with the same result in any dtype that holds the numbers exactly.
_DTYPE_PRESERVING_OPERATIONS: Final = (
    "aten::stack",
    "aten::cat",
    "aten::clone",
    "aten::_unsafe_view",
    "aten::index",
    "aten::index_select",
    "aten::equal",
)
# Computed tensors stay in memory for the next operation: the two matrices of a layer's experts are
# read in turn.
_MAX_COMPUTED_TENSORS: Final = 2
# The name of an attribute of a placeholder's storage.
_MEANING: Final = "qsample_deferred"


@dataclass(frozen=True, slots=True, eq=False)
class Deferred:
    """The meaning of a placeholder.

    Attributes:
        stored: computes the numbers, contiguous and in `dtype`.
        dtype: a dtype that holds the numbers exactly, usually the dtype of a file.
        place: where files hold the same numbers in that dtype: any object of the placeholder's
            maker, or a `Joined` of such objects; None if no file holds them.
    """

    stored: Callable[[], Tensor]
    dtype: torch.dtype
    place: Any = None


@dataclass(frozen=True, slots=True)
class Joined:
    """The place of tensors that were concatenated.

    Attributes:
        places: the place of each part.
        shapes: the shape of each part.
        axis: the axis along which the parts lie one after the other.
    """

    places: tuple[Any, ...]
    shapes: tuple[tuple[int, ...], ...]
    axis: int


def defer(
    shape: Sequence[int],
    dtype: torch.dtype,
    stored: Callable[[], Tensor],
    stored_dtype: torch.dtype,
    place: Any = None,
) -> Tensor:
    """Make a placeholder.

    Args:
        shape: the shape of the placeholder.
        dtype: the dtype of the placeholder.
        stored: see `Deferred`.
        stored_dtype: the dtype of the tensor that `stored` returns.
        place: see `Deferred`.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = sparse_zeros((size,), "uint8")  # NumPy does not know every dtype
    placeholder = torch.from_numpy(memory).view(dtype).view(tuple(shape))
    setattr(placeholder.untyped_storage(), _MEANING, Deferred(stored, stored_dtype, place))
    return placeholder


def deferred(tensor: Tensor) -> Deferred | None:
    """The meaning of `tensor`, or of the placeholder that it is a view of; None if it holds its
    numbers itself."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
        return None
    return getattr(tensor.untyped_storage(), _MEANING, None)


def stored_view(tensor: Tensor, meaning: Deferred) -> Tensor:
    """The numbers of `tensor`, a placeholder or a view of one, as they are stored."""
    return _same_view(meaning.stored(), tensor)


def numbers(tensor: Tensor) -> Tensor:
    """`tensor` itself, or the numbers of a placeholder in its shape and dtype."""
    meaning = deferred(tensor)
    if meaning is None:
        return tensor
    return stored_view(tensor, meaning).to(tensor.dtype)


def chunks(tensor: Tensor) -> Iterator[Tensor]:
    """The numbers of `tensor` in flat parts."""
    meaning = deferred(tensor)
    if meaning is None:
        yield tensor.contiguous().reshape(-1)
        return
    stored = stored_view(tensor, meaning).reshape(-1)
    for part in torch.split(stored, _CHUNK_NUMBERS):
        yield part.to(tensor.dtype)


@contextmanager
def computing() -> Iterator[None]:
    """While open, operations on placeholders get their numbers."""
    with _Computing():
        yield


@contextmanager
def deferring() -> Iterator[None]:
    """While open, large results of operations on placeholders become placeholders themselves."""
    with _Deferring():  # type: ignore[no-untyped-call]
        yield


@dataclass(frozen=True, slots=True, eq=False)
class _Arguments:
    """The arguments of an operation.

    Attributes:
        values: the positional and the keyword arguments, with all collections flattened.
        layout: the structure of the collections.
        placeholders: the index of each placeholder in `values` → its meaning.
    """

    values: list[Any]
    layout: TreeSpec
    placeholders: dict[int, Deferred]

    @classmethod
    def of(cls, args: Any, kwargs: Any) -> _Arguments:
        values, layout = tree_flatten((args, kwargs))
        placeholders = {}
        for index, value in enumerate(values):
            meaning = deferred(value) if isinstance(value, Tensor) else None
            if meaning is not None:
                placeholders[index] = meaning
        return cls(values, layout, placeholders)

    def call(self, function: Any, replaced: Mapping[int, Tensor]) -> Any:
        """The result of `function` with some of the values replaced."""
        values = [replaced.get(index, value) for index, value in enumerate(self.values)]
        args, kwargs = tree_unflatten(values, self.layout)
        return function(*args, **kwargs)

    def needs_no_numbers(self, function: Any) -> bool:
        """Whether `function` can be called with the placeholders as they are.

        If it writes to a placeholder, the placeholder is given memory and its numbers first.
        """
        if not self.placeholders or function.is_view:
            return True
        if not function._schema.is_mutable or 0 not in self.placeholders:
            return False
        _materialise(self.values[0], self.placeholders.pop(0))
        return not self.placeholders


class _Computing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._computed: OrderedDict[Deferred, Tensor] = OrderedDict()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = _Arguments.of(args, kwargs)
        if arguments.needs_no_numbers(func):
            return func(*args, **kwargs)
        if func is torch.ops.aten.embedding.default and 0 in arguments.placeholders:
            return self._look_up(func, arguments)
        if func is torch.ops.aten.mm.default and arguments.placeholders.keys() == {1}:
            return self._multiply(func, arguments)
        replaced = {
            index: self._stored_view(arguments, index).to(arguments.values[index].dtype)
            for index in arguments.placeholders
        }
        return arguments.call(func, replaced)

    def _look_up(self, func: Any, arguments: _Arguments) -> Any:
        """Rows of a table: only they are converted, not the whole table."""
        table = self._stored_view(arguments, 0)
        others = arguments.values[1:]
        others = [numbers(value) if isinstance(value, Tensor) else value for value in others]
        return func(table, *others).to(arguments.values[0].dtype)

    def _multiply(self, func: Any, arguments: _Arguments) -> Tensor:
        """The product with a placeholder, piece by piece."""
        states, weight = arguments.values
        stored = self._stored_view(arguments, 1)
        columns = max(_PIECE_NUMBERS // len(stored), 1)
        # One allocation for the whole product: a list of parts would fragment the heap.
        product: Tensor = states.new_empty(len(states), stored.shape[1])
        pieces = torch.split(stored, columns, 1)
        results = torch.split(product, columns, 1)
        for piece, result in zip(pieces, results, strict=True):
            result.copy_(func(states, piece.to(weight.dtype)))
        return product

    def _stored_view(self, arguments: _Arguments, index: int) -> Tensor:
        """The stored numbers of the placeholder at `index`."""
        return _same_view(self._stored(arguments.placeholders[index]), arguments.values[index])

    def _stored(self, meaning: Deferred) -> Tensor:
        """Numbers in a file are mapped; computed numbers are cached, because experts are read in
        turn."""
        if meaning.place is not None and not isinstance(meaning.place, Joined):
            return meaning.stored()
        if meaning not in self._computed:
            while len(self._computed) >= _MAX_COMPUTED_TENSORS:  # before the next is in memory
                self._computed.popitem(last=False)
            self._computed[meaning] = meaning.stored()
        self._computed.move_to_end(meaning)
        return self._computed[meaning]


class _Deferring(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = _Arguments.of(args, kwargs)
        if arguments.needs_no_numbers(func):
            return func(*args, **kwargs)
        preserves = _preserves_dtype(func, arguments)

        def compute() -> Any:
            replaced = {}
            for index, meaning in arguments.placeholders.items():
                value = arguments.values[index]
                view = stored_view(value, meaning)
                replaced[index] = view if preserves else view.to(value.dtype)
            return arguments.call(func, replaced)

        result = _result_on_meta(func, args, kwargs)
        if not isinstance(result, Tensor):
            return compute()
        if result.numel() < SMALLEST:
            return compute().to(result.dtype)
        if func is torch.ops.aten._to_copy.default and 0 in arguments.placeholders:
            source = arguments.values[0]
            meaning = arguments.placeholders[0]
            if result.dtype == meaning.dtype and source.is_contiguous():
                # The conversion gives the stored numbers back.
                place = meaning.place if _is_whole(source) else None
                return defer(
                    result.shape,
                    result.dtype,
                    lambda: stored_view(source, meaning),
                    result.dtype,
                    place,
                )
        stored_dtype = result.dtype
        place = None
        if preserves:
            stored_dtype = next(iter(arguments.placeholders.values())).dtype
            place = _joined(func, args, result.ndim)
        return defer(
            result.shape, result.dtype, lambda: compute().contiguous(), stored_dtype, place
        )


def _result_on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of `func` without numbers; None if it needs them at once.

    An operation that returns a number, such as whether two weights are equal, needs them, as does
    one that writes."""
    schema = func._schema
    returns_tensors = any("Tensor" in str(value.type) for value in schema.returns)
    if not returns_tensors or schema.is_mutable:
        return None
    return func(*tree_map(_on_meta, args), **tree_map(_on_meta, kwargs))


def _preserves_dtype(func: Any, arguments: _Arguments) -> bool:
    """Whether `func` may run on the stored numbers: it moves numbers, and all floats are
    placeholders of one dtype."""
    floats = {
        index
        for index, value in enumerate(arguments.values)
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    dtypes = {meaning.dtype for meaning in arguments.placeholders.values()}
    return (
        func._schema.name in _DTYPE_PRESERVING_OPERATIONS
        and len(dtypes) == 1
        and floats == arguments.placeholders.keys()
    )


def _materialise(placeholder: Tensor, meaning: Deferred) -> None:
    """Make a placeholder a plain tensor: its memory gets pages and its numbers."""
    stored = meaning.stored().reshape(-1)
    torch.as_strided(placeholder, (stored.numel(),), (1,), 0).copy_(stored)
    delattr(placeholder.untyped_storage(), _MEANING)


def _joined(func: Any, args: Any, rank: int) -> Joined | None:
    """The place of the result of `func`, a stack or a concatenation of whole placeholders that have
    a place."""
    if func not in (torch.ops.aten.stack.default, torch.ops.aten.cat.default):
        return None
    tensors = args[0]
    axis = (args[1] if len(args) > 1 else 0) % rank
    places = []
    shapes = []
    for tensor in tensors:
        meaning = deferred(tensor)
        if meaning is None or meaning.place is None or not _is_whole(tensor):
            return None
        shape = tuple(tensor.shape)
        if func is torch.ops.aten.stack.default:
            shape = (*shape[:axis], 1, *shape[axis:])
        places.append(meaning.place)
        shapes.append(shape)
    return Joined(tuple(places), tuple(shapes), axis)


def _is_whole(tensor: Tensor) -> bool:
    """Whether `tensor` holds all numbers of its storage, in order."""
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


def _same_view(stored: Tensor, view: Tensor) -> Tensor:
    """The part of `stored` that `view` is of its placeholder."""
    offset = stored.storage_offset() + view.storage_offset()
    return stored.as_strided(view.shape, view.stride(), offset)


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, Tensor):
        return value.to("meta")
    return value
