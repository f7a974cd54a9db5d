"""CUDA: a decode graph that is captured once and replayed, the sampler included, in float16 or bfloat16.

Replay forbids control flow, so the graph has the narrow tier alone and returns its logits, which stay on the device; a
second graph, `sampler.onnx`, gives the rows their token that the first could not settle (docs/contract.md).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import onnx_ir as ir

from qsample.contract import CAPACITY, Interface
from qsample.errors import CompileError, QsampleError
from qsample.exporters.compiler.options import CompileOptions
from qsample.exporters.compiler.passes.half_precision import DTYPES, convert_to_half
from qsample.exporters.compiler.passes.no_host_copies import (
    fix_total_length,
    host_data,
    host_nodes,
    remove_host_copies,
)
from qsample.exporters.compiler.passes.opset import lower_opset
from qsample.exporters.compiler.passes.packed_qkv import pack_qkv
from qsample.exporters.compiler.passes.qk_norms import absorb_qk_norms
from qsample.exporters.compiler.placement import Placement
from qsample.exporters.compiler.quantize.kv_cache import quantize_kv_cache
from qsample.exporters.compiler.quantize.weights import quantization_report, quantize_weights
from qsample.exporters.compiler.recipe import Pass, lean_passes, run
from qsample.exporters.compiler.targets import check_providers
from qsample.exporters.graph.axes import fix_axes
from qsample.exporters.graph.join import append_sampler, cut_at_logits
from qsample.exporters.sampler import export_sampler
from qsample.runtime.session.options import session_options
from qsample.runtime.session.providers import open_session

# A kernel without an end to its versions serves the operator's version that it names and no later one, and CUDA's for
# Equal, ReduceMax, Pad and ConstantOfShape name those of 13, 18, 18 and 9; newer ones would run on the host
# (https://github.com/microsoft/onnxruntime/issues/26065).
_OPSET: Final = 18
_CONTROL_FLOW: Final = ("If", "Loop", "Scan")
# Kernels that copy between host and device, or draw anew from one seed, at every replay.
_NOT_REPLAYABLE: Final = ("GatherND", "NonZero", "RandomUniform", "RandomUniformLike", "Multinomial")


class CudaTarget:
    """NVIDIA GPUs. Rows and new tokens stay free: one session runs prefill as it is and replays decode."""

    name = "cuda"
    execution_providers: tuple[str, ...] = ("CUDAExecutionProvider", "CPUExecutionProvider")
    # TF32 would round float32 products, the check of the logits among them, to ten bits.
    provider_options: Mapping[str, str] = {"enable_cuda_graph": "1", "use_tf32": "0"}

    def check(self, interface: Interface, options: CompileOptions) -> None:
        if options.store_float16:
            raise CompileError("weights is 'float16', which is for the cpu target; give dtype='float16' for cuda")
        if options.dtype not in DTYPES:
            raise CompileError(
                f"dtype is {options.dtype!r} and CUDA's attention takes {' or '.join(map(repr, DTYPES))}; compile with "
                "dtype= one of these"
            )
        if interface.dtype not in ("float32", options.dtype):
            raise CompileError(
                f"the package is {interface.dtype} and cannot become {options.dtype} without another rounding; "
                "export the model as float32 first"
            )
        check_providers(self.execution_providers)

    def interface(self, interface: Interface, options: CompileOptions) -> Interface:
        """That of the compiled package: in half precision, and captured where there is a sampler to stall."""
        return replace(
            interface,
            dtype=options.dtype,
            kv_cache_dtype=options.kv_cache_dtype,
            captured=interface.features.sampler,
        )

    def compile(self, decoder: Path, folder: Path, interface: Interface, options: CompileOptions) -> Placement:
        model = self.build(decoder, interface, options)
        problems = capture_problems(model)
        if problems:
            raise CompileError(f"the graph cannot be captured and replayed: {'; '.join(problems[:5])}")
        ir.save(model, folder / "decoder.onnx", external_data="decoder.onnx.data")
        if interface.captured:
            resuming = export_sampler(interface, options.pad_token_id, resumes=True)
            lower_opset(resuming, _OPSET)
            ir.save(resuming, folder / "sampler.onnx")
        return replace(self._placement(folder / "decoder.onnx", model), quantization=quantization_report(model))

    def build(self, decoder: Path, interface: Interface, options: CompileOptions) -> ir.Model:
        """The graph as it is published, from the portable one; `interface` is that of the compiled package."""
        model = ir.load(decoder)
        if interface.captured:
            cut_at_logits(model, interface)
        states = {state.name for state in interface.cache_states}
        passes: list[Pass] = [
            partial(fix_axes, sizes={CAPACITY: options.ctx_len}),
            *lean_passes("cuda", options.ctx_len),
            absorb_qk_norms,
            pack_qkv,
            partial(fix_total_length, capacity=options.ctx_len),
        ]
        if options.dtype in DTYPES:
            passes.append(partial(convert_to_half, dtype=options.dtype, states=states))
        if options.cache_ranges is not None:
            passes.append(partial(quantize_kv_cache, ranges=options.cache_ranges))
        if options.weights is not None:
            passes.append(partial(quantize_weights, quantization=options.weights))
        run(model, passes)
        if interface.captured:
            sampler = export_sampler(interface, options.pad_token_id, control_flow=False)
            fix_axes(sampler, {CAPACITY: options.ctx_len})
            append_sampler(model, sampler, interface.decoder)
        # Numbers that come from shapes: the new tokens of a call, which never exceed the capacity.
        run(model, [partial(remove_host_copies, limit=options.ctx_len + 1), partial(lower_opset, opset=_OPSET)])
        return model

    def _placement(self, path: Path, model: ir.Model) -> Placement:
        """Load the graph as it will be run, and refuse it where a node that computes is not on the device."""
        options = session_options({"session.record_ep_graph_assignment_info": "1"})
        try:
            session = open_session(path, options, self.execution_providers, self.provider_options)
        except QsampleError:
            raise
        except Exception as error:  # ONNX Runtime's own exceptions share no base but Exception
            raise CompileError(f"ONNX Runtime cannot capture the graph on this device: {error}") from error
        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        shapes = {node.name for node in host_nodes(model.graph)}
        misplaced = []
        for part in session.get_provider_graph_assignment_info():
            for node in part.get_nodes():
                counts[part.ep_name][node.op_type] += 1
                if part.ep_name != self.execution_providers[0] and node.name not in shapes:
                    misplaced.append(f"{node.op_type} {node.name}")
        if misplaced:
            raise CompileError(
                f"{len(misplaced)} nodes do not run on {self.execution_providers[0]}: {', '.join(misplaced[:5])}"
                + (" …" if len(misplaced) > 5 else "")
            )
        return Placement({provider: dict(sorted(operators.items())) for provider, operators in counts.items()})


def capture_problems(model: ir.Model) -> list[str]:
    """What forbids to capture `model` as a CUDA graph and to replay it, as far as the file tells; [] = nothing."""
    problems = [f"{node.op_type} {node.name} is control flow" for node in model.graph if node.op_type in _CONTROL_FLOW]
    problems += [
        f"{node.op_type} {node.name} does not replay" for node in model.graph if node.op_type in _NOT_REPLAYABLE
    ]
    return problems + host_data(model.graph)


TARGET = CudaTarget()
