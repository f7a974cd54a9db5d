"""Puts the weights into a traced graph that torch had only placeholders of (`transforms.deferred`): references to where
their numbers lie, or functions that compute them when the graph is saved."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters
from torch import Tensor

from qsample.exporters.graph.stored import StoredTensor
from qsample.exporters.graph.traversal import all_initializers
from qsample.transforms.deferred import Deferred, deferred, stored_view


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
        lies = found.place is not None and view.is_contiguous()
        return _in_file(view, found, name) if lies else _computed(view, found, view.dtype, name)
    turned = view.ndim == 2 and not view.is_contiguous() and view.T.is_contiguous()
    whole = view.T if turned else view
    if found.place is not None and whole.is_contiguous():
        return StoredTensor(_in_file(whole, found, name), name, transposed=turned)
    return StoredTensor(_computed(whole, found, found.dtype, name), name, transposed=turned)


def _in_file(view: Tensor, found: Deferred, name: str) -> ir.TensorProtocol:
    size = found.dtype.itemsize
    return ir.ExternalTensor(
        found.place.path,
        found.place.offset + view.storage_offset() * size,
        view.numel() * size,
        tensor_adapters.from_torch_dtype(found.dtype),
        shape=ir.Shape(view.shape),
        name=name,
    )


def _computed(view: Tensor, found: Deferred, dtype: torch.dtype, name: str) -> ir.TensorProtocol:
    def numbers() -> ir.TensorProtocol:
        return tensor_adapters.TorchTensor(stored_view(view, found).to(dtype).contiguous(), name=name)

    return ir.LazyTensor(numbers, tensor_adapters.from_torch_dtype(dtype), ir.Shape(view.shape), name=name)
