"""The registry of compile targets: one module a target, found by its name.

A target is a module of this package, or an entry point in the group `qsample.targets` of an installed distribution,
with an attribute `TARGET` that follows `Target`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from qsample.contract import Interface
from qsample.errors import CompileError, QsampleError
from qsample.exporters.graph_runner import Array
from qsample.exporters.quantize import QuantizationReport, WeightQuantization
from qsample.runtime.providers import check_available

ENTRY_POINTS = "qsample.targets"


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """What a device package is compiled for.

    batch_size: most rows in one call; None = any number. ctx_len: capacity T of the state buffers, in tokens. dtype: of
    the model and, unless kv_cache_dtype is "int8", of its cache. pad_token_id: the package's. weights: how to quantize
    them; None = not. store_float16: whether float32 weights are stored in float16. cache_ranges: for an int8 cache, the
    largest absolute value of each channel of each cache state, [H, D] by the state's name. packed_weights: whether the
    portable graph holds weights that came packed; they stay so.
    """

    batch_size: int | None
    ctx_len: int
    dtype: str = "float32"
    pad_token_id: int = 0
    weights: WeightQuantization | None = None
    store_float16: bool = False
    kv_cache_dtype: str | None = None
    cache_ranges: Mapping[str, Array] | None = None
    packed_weights: bool = False

    @property
    def quantized(self) -> bool:
        """Whether the model computes something else than the portable graph, beyond rounding. Packed weights do: their
        fast kernels take activations in 8 bits."""
        return self.weights is not None or self.store_float16 or self.kv_cache_dtype is not None or self.packed_weights


@dataclass(frozen=True, slots=True)
class Placement:
    """What a target did. nodes: which execution provider runs what: provider → operator type → how many.
    quantization: what became of the weights, where that was asked for."""

    nodes: Mapping[str, Mapping[str, int]]

    quantization: QuantizationReport | None = None

    def count(self, provider: str) -> int:
        return sum(self.nodes.get(provider, {}).values())


class Target(Protocol):
    """Turns a portable decode graph into one for a device."""

    name: str
    execution_providers: tuple[str, ...]
    provider_options: Mapping[str, str]

    def check(self, interface: Interface, options: CompileOptions) -> None:
        """Raise CompileError, before any work, where the target cannot serve this interface or these options."""
        ...

    def interface(self, interface: Interface, options: CompileOptions) -> Interface:
        """The interface of the compiled package, given the portable one's."""
        ...

    def compile(self, decoder: Path, folder: Path, interface: Interface, options: CompileOptions) -> Placement:
        """Write `decoder.onnx` (with its data) for the device into `folder`, and say where its nodes run.

        interface: that of the compiled package. Graphs that only it has are written, too.
        """
        ...


def check_providers(providers: Sequence[str]) -> None:
    """Raise CompileError, with what to install, unless this installation has all of them: a graph is tested where it
    will run."""
    try:
        check_available(providers)
    except QsampleError as error:
        raise CompileError(str(error)) from error


def target_names() -> list[str]:
    """Every target that `find_target` accepts."""
    own = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]
    return sorted({*own, *(point.name for point in entry_points(group=ENTRY_POINTS))})


def find_target(name: str) -> Target:
    """The target called `name`; CompileError lists the names that exist."""
    for point in entry_points(group=ENTRY_POINTS):
        if point.name == name:
            found: Target = point.load().TARGET
            return found
    if name not in target_names():
        raise CompileError(f"no compile target {name!r}; choose one of {', '.join(target_names())}")
    own: Target = import_module(f"{__name__}.{name}").TARGET
    return own
