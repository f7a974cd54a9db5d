"""Marks the linear layers that LoRA adapters may change, while a module is traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from qsample.transforms.decoder import LastTokenHead
from qsample.transforms.markers import ADAPTED, ADAPTED_PATH, MARKER_DOMAIN


@contextmanager
def linear_layers_marked(root: nn.Module) -> Iterator[None]:
    """While open, the trace of `root` has a marker after each call of a linear layer, but for the model's head.

    The marker's metadata has the layer's name in `root`.
    """
    heads = {module.head for module in root.modules() if isinstance(module, LastTokenHead)}
    paths: dict[nn.Module, str] = {
        module: path
        for path, module in root.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module not in heads
    }
    mark = _Mark(paths)  # one for all layers: they stay equal to each other
    hooks = [layer.register_forward_hook(mark.after) for layer in paths]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Mark:
    """Puts the markers into a trace. paths: the name of each layer."""

    def __init__(self, paths: dict[nn.Module, str]) -> None:
        self._paths = paths

    def after(self, layer: nn.Module, arguments: tuple[Any, ...], result: Tensor) -> Tensor | None:
        """The result of `layer`, marked; None = as it is."""
        if not torch.onnx.is_in_onnx_export() or len(arguments) != 1:
            return None
        marked: Tensor = torch.onnx.ops.symbolic(
            f"{MARKER_DOMAIN}::{ADAPTED}",
            [arguments[0], result],
            dtype=result.dtype,
            shape=result.shape,
            version=1,
            metadata_props={ADAPTED_PATH: self._paths[layer]},
        )
        return marked
