"""CUDA: a decode graph that is captured once and replayed, the sampler included, in float16 or bfloat16.

Replay forbids control flow, so the sampler's graph has none: docs/contract.md has its input `searched_rows`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import onnx_ir as ir

from qsample.compiler.passes.attention import absorb_qk_norms, pack_qkv
from qsample.compiler.passes.capture import (
    cut_splits,
    fix_total_length,
    host_data,
    lower_opset,
    remove_host_copies,
)
from qsample.compiler.passes.half_precision import HALF_DTYPES
from qsample.compiler.passes.launches import (
    choose_before_softmax,
    fuse_decays,
    fuse_gated_norms,
    fuse_gated_sums,
    index_by_int32,
    look_up_one_hots,
    merge_parts,
)
from qsample.compiler.pipeline import (
    DECODER,
    Build,
    Phase,
    fixed_sizes,
    graph_pass,
    half_phases,
    lean_phases,
    quantization_phases,
    save,
    split_sampler,
    step,
)
from qsample.compiler.plan import CompilePlan
from qsample.compiler.targets import Capability, Target
from qsample.compiler.write import (
    cut_for_devices,
    join_flat_sampler,
    load_written,
    misplaced_nodes,
    placement_of,
)
from qsample.contract.interface import Interface
from qsample.errors import CompileError
from qsample.ort.providers import CPU, CUDA

# A kernel without an end to its versions serves the operator's version that it names and no later version, and CUDA's
# for Equal, ReduceMax, Pad and ConstantOfShape name 13, 18, 18 and 9; newer versions would run on the host
# (https://github.com/microsoft/onnxruntime/issues/26065).
_OPSET: Final = 18
_CONTROL_FLOW: Final = ("If", "Loop", "Scan")
# Kernels that copy between host and device, or draw anew from the same seed, at every replay.
_NOT_REPLAYABLE: Final = ("NonZero", "RandomUniform", "RandomUniformLike", "Multinomial")
# https://github.com/microsoft/onnxruntime/blob/main/docs/contrib_ops/cuda/moe_qmoe.md
_EXPERT_BLOCK_SIZES: Final = (64, 128)


class CudaTarget(Target):
    """NVIDIA GPUs. Rows and new tokens stay free: the same session runs prefill as it is and replays decode."""

    name = "cuda"
    execution_providers: tuple[str, ...] = (CUDA, CPU)
    # TF32 would round float32 products, the check of the logits among them, to ten bits.
    provider_options: Mapping[str, str] = {"enable_cuda_graph": "1", "use_tf32": "0"}
    default_options: Mapping[str, Any] = {"dtype": "bfloat16"}
    dtypes: tuple[str, ...] = HALF_DTYPES
    capabilities = frozenset(
        {Capability.DTYPE_CONVERSION, Capability.SEVERAL_DEVICES, Capability.IMAGES}
    )

    def interface(self, plan: CompilePlan) -> Interface:
        """In half precision, and captured if it has the sampler."""
        own = plan.interface
        captured = plan.interface.features.sampler
        return replace(own, dtype=plan.dtype, kv_cache_dtype=plan.kv_cache_dtype, captured=captured)

    def fixed_axes(self, plan: CompilePlan) -> Mapping[str, int]:
        return {}

    def phases(self, plan: CompilePlan) -> Sequence[Phase]:
        return [
            fixed_sizes(plan),
            step(split_sampler),
            *lean_phases("cuda", plan.ctx_len),
            graph_pass(absorb_qk_norms),
            graph_pass(pack_qkv),  # of the attentions whose norms stood in the way
            graph_pass(choose_before_softmax),
            graph_pass(fix_total_length, capacity=plan.ctx_len),
            *half_phases(plan),
            *quantization_phases(plan, expert_block_sizes=_EXPERT_BLOCK_SIZES),
            graph_pass(merge_parts),
            graph_pass(fuse_gated_norms),
            graph_pass(fuse_gated_sums),
            graph_pass(fuse_decays),
            graph_pass(look_up_one_hots),
            graph_pass(index_by_int32),
            step(join_flat_sampler),
            graph_pass(cut_splits),
            # Numbers that come from shapes: the new tokens of a call, never more than the capacity.
            graph_pass(remove_host_copies, limit=plan.ctx_len + 1),
            graph_pass(lower_opset, opset=_OPSET),
            step(check_capture),
            step(save),
            step(cut_for_devices),
            step(place, providers=self.execution_providers, provider_options=self.provider_options),
        ]


def check_capture(build: Build) -> None:
    """Raise CompileError if the graph cannot be captured and replayed."""
    problems = capture_problems(build.model)
    if problems:
        raise CompileError(f"the graph cannot be captured and replayed: {'; '.join(problems[:5])}")


def place(build: Build, providers: Sequence[str], provider_options: Mapping[str, str]) -> None:
    """Find out where the nodes run; CompileError if the graph does not load, or a node computes outside the device."""
    device = providers[0]
    files = [part.file for part in build.parts] or [DECODER]
    own = [
        provider_options,
        *({**provider_options, "device_id": str(number)} for number in range(1, len(files))),
    ]
    sessions = [load_written(build, providers, *pair) for pair in zip(own, files, strict=True)]
    if misplaced := [
        name for session in sessions for name in misplaced_nodes(build, session, device)
    ]:
        raise CompileError(
            f"{len(misplaced)} nodes do not run on {device}: {', '.join(misplaced[:5])}"
            + (" …" if len(misplaced) > 5 else "")
        )
    build.placement = placement_of(*sessions)


def capture_problems(model: ir.Model) -> list[str]:
    """The nodes that forbid to capture `model` as a CUDA graph and replay it, as far as the graph shows."""
    problems = [
        f"{node.op_type} {node.name} is control flow"
        for node in model.graph
        if node.op_type in _CONTROL_FLOW
    ]
    problems += [
        f"{node.op_type} {node.name} does not replay"
        for node in model.graph
        if node.op_type in _NOT_REPLAYABLE
    ]
    return problems + host_data(model.graph)


TARGET = CudaTarget()
