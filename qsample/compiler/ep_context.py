"""Publishes a decode graph whose model part a provider has compiled ahead of time, into EPContext nodes.

Only the model is compiled: the sampler behind it stays as it is, and ONNX Runtime's own provider runs it, control flow
and float64 included. So the tokens are exact whatever the compiling provider makes of such operators, and it never
writes to a state.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import onnx_ir as ir
from onnx_ir.passes import common as common_passes

from qsample.compiler.placement import RECORD, Placement, placement_of
from qsample.compiler.plan import CompilePlan
from qsample.contract import LOGITS
from qsample.errors import CompileError
from qsample.graph import gqa
from qsample.graph.join import append_sampler
from qsample.ort.options import session_options
from qsample.ort.providers import compile_context, open_session

CONTEXT: Final = "EPContext"


def publish_compiled(
    model: ir.Model,
    sampler: ir.Model | None,
    plan: CompilePlan,
    folder: Path,
    providers: Sequence[str],
    provider_options: Mapping[str, str],
) -> Placement:
    """Let the first of `providers` compile `model`, join `sampler` behind it, and write `decoder.onnx` with what
    belongs to it into `folder`.

    Raises CompileError where it cannot, or takes nothing of the graph, where ONNX Runtime cannot load the result, and
    where anything but GroupQueryAttention writes to a state, which a compiled part might do before it has read it.
    """
    _check_states(model, providers[0])
    scratch, target = folder / "scratch", folder / "decoder.onnx"
    scratch.mkdir()
    try:
        ir.save(model, scratch / "model.onnx", external_data="model.onnx.data")
        try:
            compile_context(scratch / "model.onnx", target, providers, provider_options)
        except Exception as error:  # ONNX Runtime's own exceptions share no base but Exception
            raise CompileError(f"{providers[0]} cannot compile the model: {error}") from error
        compiled = ir.load(target)
        if sampler is not None:
            append_sampler(compiled, sampler, plan.interface.decoder)
        # A compiled file names all domains that this build of ONNX Runtime knows, which another may not.
        common_passes.RemoveUnusedOpsetsPass()(compiled)
        ir.save(compiled, scratch / target.name, external_data=f"{target.name}.data")
        for file in scratch.glob(f"{target.name}*"):
            file.replace(folder / file.name)
    finally:
        shutil.rmtree(scratch)
    return _placement(target, providers, provider_options)


def _check_states(model: ir.Model, provider: str) -> None:
    writers = {value.name: value.producer() for value in model.graph.outputs if value.name != LOGITS.name}
    others = [name for name, node in writers.items() if node is None or node.op_type != gqa.OP_TYPE]
    if others:
        raise CompileError(
            f"{provider} would update {len(others)} states of this model by itself ({others[0]} …), in place; it is "
            f"for models whose layers all attend through {gqa.OP_TYPE}. Compile it for cpu or cuda"
        )


def _placement(path: Path, providers: Sequence[str], provider_options: Mapping[str, str]) -> Placement:
    try:
        session = open_session(path, session_options(RECORD), providers, provider_options)
    except Exception as error:
        raise CompileError(f"ONNX Runtime cannot load what {providers[0]} compiled: {error}") from error
    placement = placement_of(session)
    if CONTEXT not in placement.get(providers[0], {}):
        raise CompileError(f"{providers[0]} compiled no part of this model; compile it for another provider")
    return placement
