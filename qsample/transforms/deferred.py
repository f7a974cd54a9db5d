"""Weights that take no memory: a float32 tensor without pages, and a function that computes its numbers on demand.

Such a placeholder is an ordinary tensor on the CPU, of zeros that the system never hands out, so transformers loads it
and torch traces it like any other. It is identified by its address. While `computing` is open, each operation gets the
numbers; anything else that reads a placeholder, such as NumPy, gets zeros.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from qsample.contract.arrays import sparse_zeros

# Exporters fold constants of up to 8,192 numbers, and compare them: these have to be there.
SMALLEST: Final = 1 << 14
_CHUNK: Final = 1 << 24  # numbers that `chunks` computes at a time
_PIECE: Final = (
    1 << 22
)  # numbers of a matrix that are widened and multiplied at a time: they stay in the cache
# Operations with the same result in any dtype that holds the numbers exactly.
_MOVES: Final = (
    "aten::stack",
    "aten::cat",
    "aten::clone",
    "aten::_unsafe_view",
    "aten::index",
    "aten::index_select",
)
_EQUAL: Final = "aten::equal"
_KEPT: Final = (
    2  # computed tensors that are kept for the next operation: both matrices of a layer's experts
)
_placeholders: dict[int, Deferred] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Deferred:
    """The meaning of a placeholder. stored: computes its numbers, contiguous, in a `dtype` that holds them exactly.
    place: of the same numbers in files, in that dtype: any object of the placeholder's maker, or `Joined` of such
    objects; None: in no file."""

    stored: Callable[[], Tensor]
    dtype: torch.dtype
    place: Any = None


@dataclass(frozen=True, slots=True)
class Joined:
    """The place of tensors that were put together: the numbers at `places`, in `shapes`, in a row along `axis`."""

    places: tuple[Any, ...]
    shapes: tuple[tuple[int, ...], ...]
    axis: int


def defer(
    shape: Sequence[int],
    dtype: torch.dtype,
    stored: Callable[[], Tensor],
    kept_in: torch.dtype,
    place: Any = None,
) -> Tensor:
    """A placeholder of `shape` and `dtype`. stored, kept_in, place: as in `Deferred`."""
    memory = sparse_zeros(
        (math.prod(shape) * dtype.itemsize,), "uint8"
    )  # NumPy does not know every dtype
    placeholder = torch.from_numpy(memory).view(dtype).view(tuple(shape))
    address = placeholder.untyped_storage().data_ptr()
    _placeholders[address] = Deferred(stored, kept_in, place)
    weakref.finalize(memory, _placeholders.pop, address, None)  # another tensor may get the address
    return placeholder


def deferred(tensor: Tensor) -> Deferred | None:
    """The meaning of `tensor`, or of the tensor that it is a view of; None: it holds its numbers itself."""
    if (
        not _placeholders
        or type(tensor) not in (Tensor, torch.nn.Parameter)
        or tensor.device.type != "cpu"
    ):
        return None
    return _placeholders.get(tensor.untyped_storage().data_ptr())


def stored_view(tensor: Tensor, found: Deferred) -> Tensor:
    """The numbers of `tensor`, a placeholder or a view of one, as they are stored."""
    return _viewed(found.stored(), tensor)


def numbers(tensor: Tensor) -> Tensor:
    """`tensor` itself, or the numbers of a placeholder, of its shape and dtype."""
    found = deferred(tensor)
    return tensor if found is None else stored_view(tensor, found).to(tensor.dtype)


def chunks(tensor: Tensor) -> Iterator[Tensor]:
    """The numbers of `tensor`, flat, a part at a time."""
    found = deferred(tensor)
    if found is None:
        yield tensor.contiguous().reshape(-1)
        return
    stored = stored_view(tensor, found).reshape(-1)
    for part in torch.split(stored, _CHUNK):
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


class _Computing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._newest: OrderedDict[Deferred, Tensor] = OrderedDict()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat, spec, found = _flatten(args, kwargs)
        if not found or func.is_view or _filled(func, flat, found):
            return func(*args, **(kwargs or {}))
        if (
            func is torch.ops.aten.embedding.default and 0 in found
        ):  # rows of a table, not all of it
            table = _viewed(self._stored(found.pop(0)), flat[0])
            rest = [numbers(value) if isinstance(value, Tensor) else value for value in flat[1:]]
            return func(table, *rest).to(flat[0].dtype)
        if func is torch.ops.aten.mm.default and found.keys() == {1}:
            stored = _viewed(self._stored(found[1]), flat[1])
            size = max(_PIECE // len(stored), 1)
            product = flat[0].new_empty(
                len(flat[0]), stored.shape[1]
            )  # a list of parts would scatter the heap
            parts = zip(torch.split(stored, size, 1), torch.split(product, size, 1), strict=True)
            for part, result in parts:
                result.copy_(func(flat[0], part.to(flat[1].dtype)))
            return product
        for index, placeholder in found.items():
            flat[index] = _viewed(self._stored(placeholder), flat[index]).to(flat[index].dtype)
        args, kwargs = tree_unflatten(flat, spec)
        return func(*args, **kwargs)

    def _stored(self, found: Deferred) -> Tensor:
        """Numbers in a file are mapped; computed numbers are kept a while, because experts are read in turn."""
        if found.place is not None and not isinstance(found.place, Joined):
            return found.stored()
        if found not in self._newest:
            while len(self._newest) >= _KEPT:  # before the next is in memory
                self._newest.popitem(last=False)
            self._newest[found] = found.stored()
        self._newest.move_to_end(found)
        return self._newest[found]


class _Deferring(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat, spec, found = _flatten(args, kwargs)
        if not found or func.is_view or _filled(func, flat, found):
            return func(*args, **(kwargs or {}))
        # An operation that returns a number, such as whether two weights are equal, needs theirs at once.
        gives_tensors = any("Tensor" in str(value.type) for value in func._schema.returns)
        known_later = gives_tensors and not func._schema.is_mutable
        result = (
            func(*tree_map(_on_meta, args), **tree_map(_on_meta, kwargs or {}))
            if known_later
            else None
        )
        floats = {
            i
            for i, value in enumerate(flat)
            if isinstance(value, Tensor) and value.is_floating_point()
        }
        kinds = {placeholder.dtype for placeholder in found.values()}
        moves = (
            func._schema.name in (*_MOVES, _EQUAL) and len(kinds) == 1 and floats == found.keys()
        )

        def compute() -> Any:
            filled = list(flat)
            for index, placeholder in found.items():
                view = stored_view(flat[index], placeholder)
                filled[index] = view if moves else view.to(flat[index].dtype)
            given, named = tree_unflatten(filled, spec)
            return func(*given, **named)

        if not isinstance(result, Tensor) or result.numel() < SMALLEST:
            computed = compute()
            return computed.to(result.dtype) if isinstance(result, Tensor) else computed
        if (
            func is torch.ops.aten._to_copy.default
            and result.dtype in kinds
            and flat[0].is_contiguous()
        ):
            whole = found[0]  # back in the dtype that it is stored in
            place = whole.place if _is_whole(flat[0]) else None
            return defer(
                result.shape, result.dtype, lambda: stored_view(flat[0], whole), result.dtype, place
            )
        kept_in = kinds.pop() if moves else result.dtype
        place = _joined(func, args, result.ndim) if moves else None
        return defer(result.shape, result.dtype, lambda: compute().contiguous(), kept_in, place)


def _flatten(args: Any, kwargs: Any) -> tuple[list[Any], Any, dict[int, Deferred]]:
    """The arguments flat, their tree, and the placeholders among them by index."""
    flat, spec = tree_flatten((args, kwargs or {}))
    found = {
        i: known
        for i, value in enumerate(flat)
        if isinstance(value, Tensor) and (known := deferred(value))
    }
    return flat, spec, found


def _filled(func: Any, flat: list[Any], found: dict[int, Deferred]) -> bool:
    """Whether `func` writes to a placeholder. If so, the placeholder gets memory and numbers, and is a plain tensor."""
    if not func._schema.is_mutable or 0 not in found:
        return False
    written, stored = flat[0], found[0].stored().reshape(-1)
    torch.as_strided(written, (stored.numel(),), (1,), 0).copy_(stored)
    _placeholders.pop(written.untyped_storage().data_ptr(), None)
    return len(found) == 1


def _joined(func: Any, args: Any, rank: int) -> Joined | None:
    """The place of the result of `func`, a stack or a concatenation of whole placeholders that have a place."""
    if func not in (torch.ops.aten.stack.default, torch.ops.aten.cat.default):
        return None
    tensors, axis = args[0], (args[1] if len(args) > 1 else 0) % rank
    parts = [deferred(tensor) for tensor in tensors]
    places = tuple(part.place for part in parts if part is not None and part.place is not None)
    if len(places) < len(tensors) or not all(map(_is_whole, tensors)):
        return None
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if func is torch.ops.aten.stack.default:
        shapes = [(*shape[:axis], 1, *shape[axis:]) for shape in shapes]
    return Joined(places, tuple(shapes), axis)


def _is_whole(tensor: Tensor) -> bool:
    """Whether `tensor` holds all numbers of its storage, in order."""
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


def _viewed(stored: Tensor, view: Tensor) -> Tensor:
    """The part of `stored` that `view` is of its placeholder."""
    return stored.as_strided(
        view.shape, view.stride(), stored.storage_offset() + view.storage_offset()
    )


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("meta")
    return value.to("meta") if isinstance(value, Tensor) else value
