"""TensorRT: a decode graph whose parts TensorRT has built into engines for one GPU, kept as EPContext nodes.

TensorRT takes no GroupQueryAttention. It stays on ONNX Runtime's CUDA provider, which updates the cache in place, and
what lies between two attentions is one engine. An engine is built ahead of time for fixed shapes: one row, and one
token a call, so a prompt is read token by token. An engine belongs to the GPU and the TensorRT version that built it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir

from qsample.compiler.ep_context import publish_compiled
from qsample.compiler.passes.half_precision import convert_to_half
from qsample.compiler.passes.no_host_copies import fix_total_length
from qsample.compiler.placement import Placement
from qsample.compiler.plan import CompilePlan
from qsample.compiler.recipe import Pass
from qsample.compiler.targets import check_providers
from qsample.contract import BATCH, SEQUENCE
from qsample.errors import CompileError
from qsample.interface import Interface
from qsample.ort.providers import CPU, CUDA, TENSORRT


class TensorRtTarget:
    """NVIDIA GPUs, for one row at a time."""

    name = "tensorrt"
    execution_providers: tuple[str, ...] = (TENSORRT, CUDA, CPU)
    provider_options: Mapping[str, str] = {"trt_fp16_enable": "1"}
    splits_at_logits = True  # the sampler stays on ONNX Runtime's own provider
    bundled_options: Mapping[str, Any] = {"dtype": "float16", "batch_size": 1}

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
        check_providers(self.execution_providers)

    def interface(self, plan: CompilePlan) -> Interface:
        return replace(plan.interface, dtype=plan.dtype)

    def fixed_axes(self, plan: CompilePlan) -> Mapping[str, int]:
        return {BATCH: 1, SEQUENCE: 1}

    def passes(self, plan: CompilePlan) -> Sequence[Pass]:
        """In ONNX's own operators, but for the attention."""
        states = {state.name for state in plan.interface.cache_states}
        return (
            partial(fix_total_length, capacity=plan.ctx_len),
            partial(convert_to_half, dtype=plan.dtype, states=states),
        )

    def publish(self, model: ir.Model, sampler: ir.Model | None, plan: CompilePlan, folder: Path) -> Placement:
        return publish_compiled(model, sampler, plan, folder, self.execution_providers, self.provider_options)


TARGET = TensorRtTarget()
