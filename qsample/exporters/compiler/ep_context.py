"""A decode graph up to its logits and a sampler enter; a decode graph leaves whose model part a provider has compiled
ahead of time, into EPContext nodes.

Only the model is compiled: the sampler behind it stays as it is, and ONNX Runtime's own provider runs it, control flow
and float64 included. So the tokens are exact whatever the compiling provider makes of such operators, and it never
writes to a state.
"""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import onnx_ir as ir
from onnx_ir.passes import common as common_passes

from qsample.contract import CAPACITY, LOGITS, Interface
from qsample.errors import CompileError
from qsample.exporters.compiler.options import CompileOptions
from qsample.exporters.compiler.placement import Placement
from qsample.exporters.graph.axes import fix_axes
from qsample.exporters.graph.join import append_sampler, cut_at_logits
from qsample.exporters.sampler import export_sampler
from qsample.runtime.session.options import session_options
from qsample.runtime.session.providers import compile_context, open_session

CONTEXT: Final = "EPContext"
ATTENTION: Final = "GroupQueryAttention"


def load_model_part(decoder: Path, interface: Interface) -> ir.Model:
    """The graph of the file `decoder` up to its logits. interface: that of the package that it belongs to."""
    model = ir.load(decoder)
    return cut_at_logits(model, interface) if interface.features.sampler else model


def publish_compiled(
    model: ir.Model,
    folder: Path,
    interface: Interface,
    options: CompileOptions,
    providers: Sequence[str],
    provider_options: Mapping[str, str],
) -> Placement:
    """Let the first of `providers` compile `model`, and write `decoder.onnx` with what belongs to it into `folder`.

    Raises CompileError where it cannot, or takes nothing of the graph, where ONNX Runtime cannot load the result, and
    where anything but GroupQueryAttention writes to a state, which a compiled part might do before it has read it.
    """
    written = {value.name: value.producer() for value in model.graph.outputs if value.name != LOGITS.name}
    others = [name for name, node in written.items() if node is None or node.op_type != ATTENTION]
    if others:
        raise CompileError(
            f"{providers[0]} would update {len(others)} states of this model by itself ({others[0]} …), in place; it "
            f"is for models whose layers all attend through {ATTENTION}. Compile it for cpu or cuda"
        )
    aside, target = folder / "aside", folder / "decoder.onnx"
    aside.mkdir()
    try:
        ir.save(model, aside / "model.onnx", external_data="model.onnx.data")
        try:
            compile_context(aside / "model.onnx", target, providers, provider_options)
        except Exception as error:  # ONNX Runtime's own exceptions share no base but Exception
            raise CompileError(f"{providers[0]} cannot compile the model: {error}") from error
        compiled = ir.load(target)
        if interface.features.sampler:
            sampler = export_sampler(interface, options.pad_token_id)
            fix_axes(sampler, {CAPACITY: options.ctx_len})
            append_sampler(compiled, sampler, interface.decoder)
        # It names all domains that this build of ONNX Runtime knows, which another may not.
        common_passes.RemoveUnusedOpsetsPass()(compiled)
        ir.save(compiled, aside / target.name, external_data=f"{target.name}.data")
        for file in aside.glob(f"{target.name}*"):
            file.replace(folder / file.name)
    finally:
        shutil.rmtree(aside)
    return _placement(target, providers, provider_options)


def _placement(path: Path, providers: Sequence[str], provider_options: Mapping[str, str]) -> Placement:
    options = session_options({"session.record_ep_graph_assignment_info": "1"})
    try:
        session = open_session(path, options, providers, provider_options)
    except Exception as error:
        raise CompileError(f"ONNX Runtime cannot load what {providers[0]} compiled: {error}") from error
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for part in session.get_provider_graph_assignment_info():
        for node in part.get_nodes():
            counts[part.ep_name][node.op_type] += 1
    if not counts[providers[0]][CONTEXT]:
        raise CompileError(f"{providers[0]} compiled no part of this model; compile it for another provider")
    return Placement({provider: dict(sorted(operators.items())) for provider, operators in counts.items()})
