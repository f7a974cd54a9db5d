"""The registry of compile targets: one module a target, found by its name.

A target is a module of this package, or an entry point in the group `qsample.targets` of an installed distribution,
with an attribute `TARGET` that follows `Target`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from qsample.contract import Interface
from qsample.errors import CompileError, QsampleError
from qsample.exporters.compiler.options import CompileOptions
from qsample.exporters.compiler.placement import Placement
from qsample.runtime.session.providers import check_available

ENTRY_POINTS = "qsample.targets"


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
