"""Puts the weights into a traced graph that torch had only placeholders of (`transforms.deferred`): references to where
their numbers lie, or functions that compute them when the graph is saved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters
from torch import Tensor

from qsample.graph.edit import all_initializers
from qsample.graph.weights import JoinedTensor, StoredTensor
from qsample.transforms.deferred import Deferred, Joined, deferred, stored_view


def fill_placeholders(model: ir.Model) -> bool:
    """Give each constant of `model` that is a placeholder, or a view of one, its numbers; in place. Returns whether
    there was one."""
    modified = False
    for value in all_initializers(model.graph):
        view = _view(getattr(value.const_value, "raw", None))
        found = None if view is None else deferred(view)
        if view is not None and found is not None:
            value.const_value = _tensor(view, found, str(value.name))
            modified = True
    return modified


def _view(raw: Any) -> Tensor | None:
    """The tensor that a constant's memory belongs to, seen as the constant sees it: optimisers turn weights round in
    NumPy."""
    if isinstance(raw, Tensor):
        return raw
    owner = raw
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if not isinstance(raw, np.ndarray) or not isinstance(owner, Tensor) or deferred(owner) is None:
        return None
    size = raw.itemsize
    offset = (raw.__array_interface__["data"][0] - owner.untyped_storage().data_ptr()) // size
    return torch.as_strided(owner, raw.shape, [stride // size for stride in raw.strides], offset)


def _tensor(view: Tensor, found: Deferred, name: str) -> ir.TensorProtocol:
    """The numbers of `view`: in float32 a StoredTensor, in other dtypes one that is computed."""
    if view.dtype != torch.float32:
        return _in_files(view, found, name) or _computed(view, found, view.dtype, name)
    turned = view.ndim == 2 and not view.is_contiguous() and view.T.is_contiguous()
    whole = view.T if turned else view
    stored = _in_files(whole, found, name) or _computed(whole, found, found.dtype, name)
    return StoredTensor(stored, name, transposed=turned)


def _in_files(view: Tensor, found: Deferred, name: str) -> ir.TensorProtocol | None:
    """The numbers of `view` where they lie; None where they lie nowhere, or in another order."""
    if found.place is None or not view.is_contiguous():
        return None
    if not isinstance(found.place, Joined):
        return _lying(found.place, view.shape, found.dtype, name, int(view.storage_offset()))
    is_whole = view.nbytes == view.untyped_storage().nbytes()
    return _lying(found.place, view.shape, found.dtype, name) if is_whole else None


def _lying(place: Any, shape: Sequence[int], dtype: torch.dtype, name: str, first: int = 0) -> ir.TensorProtocol:
    """The numbers of `shape` at `place`, from the number `first` on."""
    if isinstance(place, Joined):
        parts = zip(place.places, place.shapes, strict=True)
        return JoinedTensor(
            [_lying(*part, dtype, f"{name}_{i}") for i, part in enumerate(parts)], place.axis, shape, name
        )
    return ir.ExternalTensor(
        place.path,
        place.offset + first * dtype.itemsize,
        math.prod(shape) * dtype.itemsize,
        tensor_adapters.from_torch_dtype(dtype),
        shape=ir.Shape(shape),
        name=name,
    )


def _computed(view: Tensor, found: Deferred, dtype: torch.dtype, name: str) -> ir.TensorProtocol:
    def numbers() -> ir.TensorProtocol:
        return tensor_adapters.TorchTensor(stored_view(view, found).to(dtype).contiguous(), name=name)

    return ir.LazyTensor(numbers, tensor_adapters.from_torch_dtype(dtype), ir.Shape(view.shape), name=name)
