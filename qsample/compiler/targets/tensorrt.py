"""TensorRT: a decode graph whose parts TensorRT has built into engines for a particular GPU, kept as EPContext nodes.

TensorRT takes no GroupQueryAttention. It stays on ONNX Runtime's CUDA provider, which updates the cache in place, and
the graph between two attentions is an engine. An engine is built ahead of time for fixed shapes: a single row,
and a single token a call, so a prompt is read token by token. An engine belongs to the GPU and the TensorRT version
that built it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from qsample.compiler.passes.capture import fix_total_length
from qsample.compiler.passes.half_precision import convert_to_half
from qsample.compiler.pipeline import Phase, fixed_sizes, graph_pass, quantization_phases, split_sampler, step
from qsample.compiler.plan import CompilePlan
from qsample.compiler.publish import ahead_of_time_phases
from qsample.compiler.targets import Target
from qsample.contract import BATCH, SEQUENCE
from qsample.errors import CompileError
from qsample.interface import Interface
from qsample.ort.providers import CPU, CUDA, TENSORRT


class TensorRtTarget(Target):
    """NVIDIA GPUs, for a single row at a time."""

    name = "tensorrt"
    execution_providers: tuple[str, ...] = (TENSORRT, CUDA, CPU)
    provider_options: Mapping[str, str] = {"trt_fp16_enable": "1"}
    default_options: Mapping[str, Any] = {"dtype": "float16", "batch_size": 1}

    def check(self, plan: CompilePlan) -> None:
        own = plan.source.interface.dtype
        if plan.batch_size != 1:
            raise CompileError(
                f"batch_size is {plan.batch_size}, and TensorRT's engines are built for fixed shapes, in which a row "
                "of a batch cannot be prefilled alone; give batch_size=1, or compile for cuda"
            )
        if plan.dtype != "float16":
            raise CompileError(f"dtype is {plan.dtype!r}; the tensorrt target takes 'float16'")
        if own not in ("float32", "float16"):
            raise CompileError(f"the package is {own} and cannot become float16 without another rounding")
        if plan.quantized:
            raise CompileError(
                "TensorRT has none of ONNX Runtime's quantized operators; leave weights and kv_cache_dtype out, or "
                "compile for cuda"
            )

    def interface(self, plan: CompilePlan) -> Interface:
        return replace(plan.interface, dtype=plan.dtype)

    def fixed_axes(self, plan: CompilePlan) -> Mapping[str, int]:
        return {BATCH: 1, SEQUENCE: 1}

    def phases(self, plan: CompilePlan) -> Sequence[Phase]:
        """In ONNX's own operators, except for the attention."""
        states = {state.name for state in plan.interface.cache_states}
        return [
            fixed_sizes(plan, self.fixed_axes(plan)),
            step(split_sampler),
            graph_pass(fix_total_length, capacity=plan.ctx_len),
            graph_pass(convert_to_half, dtype=plan.dtype, states=states),
            *quantization_phases(plan, copies=2),  # a provider reads a graph and writes another
            *ahead_of_time_phases(self.execution_providers, self.provider_options),
        ]


TARGET = TensorRtTarget()
