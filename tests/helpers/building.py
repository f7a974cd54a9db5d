"""The pipeline of compile, run in parts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import onnx_ir as ir

from qsample.compiler import pipeline
from qsample.compiler.pipeline import Build, Phase
from qsample.compiler.plan import CompilePlan
from qsample.compiler.targets import Target


def build(plan: CompilePlan, target: Target, folder: Path, until: str = "") -> Build:
    """The build of `plan` after the phases of `target` before that called `until`; by default, after all of them."""
    plan = replace(plan, interface=target.interface(plan))
    scratch = folder / "scratch"
    scratch.mkdir()
    made = pipeline.start(plan, pipeline.stages_of(plan, None), folder, scratch)
    pipeline.run(made, takewhile(lambda phase: phase.name != until, target.phases(plan)))
    return made


def run_on(model: ir.Model, phases: Iterable[Phase]) -> None:
    """Run phases that read nothing but the model on `model`, in place."""
    nothing: Any = None
    pipeline.run(Build(nothing, nothing, nothing, nothing, model), phases)
