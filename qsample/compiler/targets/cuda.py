"""CUDA: a decode graph that is captured once and replayed, the sampler included, in float16 or bfloat16.

Replay forbids control flow, so the sampler's graph is one without: docs/contract.md has its input `searched_rows`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import onnx_ir as ir

from qsample.compiler import recipe
from qsample.compiler.passes.half_precision import HALF_DTYPES, convert_to_half
from qsample.compiler.passes.no_host_copies import (
    cut_splits,
    fix_total_length,
    host_data,
    host_nodes,
    remove_host_copies,
)
from qsample.compiler.passes.opset import lower_opset
from qsample.compiler.passes.packed_qkv import pack_qkv
from qsample.compiler.passes.qk_norms import absorb_qk_norms
from qsample.compiler.placement import RECORD, Placement, assigned_nodes, placement_of
from qsample.compiler.plan import CompilePlan
from qsample.compiler.recipe import Pass, lean_passes
from qsample.compiler.targets import check_providers
from qsample.contract import CAPACITY
from qsample.errors import CompileError, QsampleError
from qsample.graph.edit import fix_axes
from qsample.graph.join import append_sampler
from qsample.interface import Interface
from qsample.ort.options import session_options
from qsample.ort.providers import CPU, CUDA, open_session
from qsample.sampler import build_sampler

# A kernel without an end to its versions serves the operator's version that it names and no later one, and CUDA's for
# Equal, ReduceMax, Pad and ConstantOfShape name those of 13, 18, 18 and 9; newer ones would run on the host
# (https://github.com/microsoft/onnxruntime/issues/26065).
_OPSET: Final = 18
_CONTROL_FLOW: Final = ("If", "Loop", "Scan")
# Kernels that copy between host and device, or draw anew from one seed, at every replay.
_NOT_REPLAYABLE: Final = ("NonZero", "RandomUniform", "RandomUniformLike", "Multinomial")


class CudaTarget:
    """NVIDIA GPUs. Rows and new tokens stay free: one session runs prefill as it is and replays decode."""

    name = "cuda"
    execution_providers: tuple[str, ...] = (CUDA, CPU)
    # TF32 would round float32 products, the check of the logits among them, to ten bits.
    provider_options: Mapping[str, str] = {"enable_cuda_graph": "1", "use_tf32": "0"}
    splits_at_logits = True  # replay forbids the sampler's control flow
    bundled_options: Mapping[str, Any] = {"dtype": "bfloat16"}
    # https://github.com/microsoft/onnxruntime/blob/main/docs/contrib_ops/cuda/moe_qmoe.md
    expert_block_sizes: tuple[int, ...] = (64, 128)

    def check(self, plan: CompilePlan) -> None:
        own = plan.source.interface.dtype
        if plan.store_float16:
            raise CompileError("weights is 'float16', which is for the cpu target; give dtype='float16' for cuda")
        if plan.dtype not in HALF_DTYPES:
            raise CompileError(
                f"dtype is {plan.dtype!r} and CUDA's attention takes {' or '.join(map(repr, HALF_DTYPES))}; compile "
                "with dtype= one of these"
            )
        if own not in ("float32", plan.dtype):
            raise CompileError(
                f"the package is {own} and cannot become {plan.dtype} without another rounding; export the model as "
                "float32 first"
            )
        check_providers(self.execution_providers)

    def interface(self, plan: CompilePlan) -> Interface:
        """In half precision, and captured if it has the sampler."""
        own, captured = plan.interface, plan.interface.features.sampler
        return replace(own, dtype=plan.dtype, kv_cache_dtype=plan.kv_cache_dtype, captured=captured)

    def fixed_axes(self, plan: CompilePlan) -> Mapping[str, int]:
        return {}

    def passes(self, plan: CompilePlan) -> Sequence[Pass]:
        kept = {state.name for state in plan.interface.recurrent}
        states = {state.name for state in plan.interface.cache_states} - kept
        half = (partial(convert_to_half, dtype=plan.dtype, states=states),) if plan.dtype in HALF_DTYPES else ()
        return (
            *lean_passes("cuda", plan.ctx_len),
            absorb_qk_norms,
            pack_qkv,  # of the attentions whose norms stood in the way
            partial(fix_total_length, capacity=plan.ctx_len),
            *half,
        )

    def publish(self, model: ir.Model, sampler: ir.Model | None, plan: CompilePlan, folder: Path) -> Placement:
        self.join(model, sampler, plan)
        problems = capture_problems(model)
        if problems:
            raise CompileError(f"the graph cannot be captured and replayed: {'; '.join(problems[:5])}")
        ir.save(model, folder / "decoder.onnx", external_data="decoder.onnx.data")
        return self._placement(folder / "decoder.onnx", model)

    def join(self, model: ir.Model, sampler: ir.Model | None, plan: CompilePlan) -> None:
        """Put a sampler that can be replayed behind `model`, in place, and keep on the device what is computed there.

        Replay forbids the control flow of `sampler`, the portable graph's; one without takes its place.
        """
        if sampler is not None:
            sampler = build_sampler(plan.interface, plan.pad_token_id)
            fix_axes(sampler, {CAPACITY: plan.ctx_len})
            append_sampler(model, sampler, plan.interface.decoder)
        # Numbers that come from shapes: the new tokens of a call, which never exceed the capacity.
        numbers = partial(remove_host_copies, limit=plan.ctx_len + 1)
        recipe.run(model, (cut_splits, numbers, partial(lower_opset, opset=_OPSET)))

    def _placement(self, path: Path, model: ir.Model) -> Placement:
        """Load the graph as it will be run, and refuse it where a node that computes is not on the device."""
        try:
            session = open_session(path, session_options(RECORD), self.execution_providers, self.provider_options)
        except QsampleError:
            raise
        except Exception as error:  # ONNX Runtime's own exceptions share no base but Exception
            raise CompileError(f"ONNX Runtime cannot capture the graph on this device: {error}") from error
        device, shapes = self.execution_providers[0], {node.name for node in host_nodes(model.graph)}
        misplaced = [
            f"{node.op_type} {node.name}"
            for provider, node in assigned_nodes(session)
            if provider != device and node.name not in shapes
        ]
        if misplaced:
            raise CompileError(
                f"{len(misplaced)} nodes do not run on {device}: {', '.join(misplaced[:5])}"
                + (" …" if len(misplaced) > 5 else "")
            )
        return placement_of(session)


def capture_problems(model: ir.Model) -> list[str]:
    """What forbids to capture `model` as a CUDA graph and to replay it, as far as the file tells; [] = nothing."""
    problems = [f"{node.op_type} {node.name} is control flow" for node in model.graph if node.op_type in _CONTROL_FLOW]
    problems += [
        f"{node.op_type} {node.name} does not replay" for node in model.graph if node.op_type in _NOT_REPLAYABLE
    ]
    return problems + host_data(model.graph)


TARGET = CudaTarget()
