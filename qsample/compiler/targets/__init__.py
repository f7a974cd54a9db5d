"""The registry of compile targets: one module a target, found by its name.

A target is a module of this package, or an entry point in the group `qsample.targets` of an installed distribution,
with an attribute `TARGET` that follows `Target`. Everything that is particular to it stands in that module.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

import onnx_ir as ir

from qsample.compiler.placement import Placement
from qsample.compiler.plan import CompilePlan
from qsample.compiler.recipe import Pass
from qsample.errors import CompileError, QsampleError
from qsample.interface import Interface
from qsample.ort.providers import check_available
from qsample.ort.trusted_options import TARGETS


class Target(Protocol):
    """Turns a portable decode graph into one for a device.

    name: what `CompileOptions.provider` says. execution_providers: ONNX Runtime's names, the one that compiles for the
    device first. provider_options: of that one, in the session that runs the package. splits_at_logits: whether the
    passes see the model up to its logits, and `publish` gets the sampler apart; otherwise both see the whole graph.
    bundled_options: fields of CompileOptions that the bundled model needs there.

    A target may also have expert_block_sizes, those that its provider's QMoE takes (without them, it takes any), and
    pads_blocks, whether its MatMulNBits takes a last block that is not full (without it, it does not).
    """

    name: str
    execution_providers: tuple[str, ...]
    provider_options: Mapping[str, str]
    splits_at_logits: bool
    bundled_options: Mapping[str, Any]

    def check(self, plan: CompilePlan) -> None:
        """Raise CompileError, before any work, where the target cannot serve this package or these options."""
        ...

    def interface(self, plan: CompilePlan) -> Interface:
        """The interface of the compiled package; `plan.interface` is the portable one's."""
        ...

    def fixed_axes(self, plan: CompilePlan) -> Mapping[str, int]:
        """The size of each named axis that the graph fixes, besides the capacity."""
        ...

    def passes(self, plan: CompilePlan) -> Sequence[Pass]:
        """The passes, in order; quantization follows them."""
        ...

    def publish(self, model: ir.Model, sampler: ir.Model | None, plan: CompilePlan, folder: Path) -> Placement:
        """Write `decoder.onnx`, with its data and what other graphs the package needs, into `folder`; return where its
        nodes run.

        model: after `passes` and quantization. sampler: the portable graph's, to join behind it; None where the target
        does not split, and for a package that samples on the host.
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
    return sorted({*own, *(point.name for point in entry_points(group=TARGETS))})


def find_target(name: str) -> Target:
    """The target called `name`; CompileError lists the names that exist."""
    for point in entry_points(group=TARGETS):
        if point.name == name:
            installed: Target = point.load().TARGET
            return installed
    if name not in target_names():
        raise CompileError(f"no compile target {name!r}; choose one of {', '.join(target_names())}")
    own: Target = import_module(f"{__name__}.{name}").TARGET
    return own
