"""OpenVINO: a decode graph whose parts OpenVINO has compiled for the CPU, kept as EPContext nodes.

OpenVINO takes no GroupQueryAttention there. It stays on ONNX Runtime's own CPU provider, which updates the cache in
place, and what lies between two attentions is one compiled part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from qsample.compiler.ep_context import publish_compiled
from qsample.compiler.placement import Placement
from qsample.compiler.plan import CompilePlan
from qsample.compiler.recipe import Pass, lean_passes
from qsample.compiler.targets import check_providers
from qsample.contract import BATCH
from qsample.errors import CompileError
from qsample.interface import Interface
from qsample.ort.providers import CPU, DEVICE, OPENVINO


class OpenVinoTarget:
    """Intel CPUs. The capacity is fixed; rows and new tokens stay free, or the batch is fixed at 1."""

    name = "openvino"
    execution_providers: tuple[str, ...] = (OPENVINO, CPU)
    # By itself, OpenVINO would compute in bfloat16 where the processor has it.
    provider_options: Mapping[str, str] = {DEVICE: "CPU", "INFERENCE_PRECISION_HINT": "f32"}
    splits_at_logits = True  # the sampler stays on ONNX Runtime's own provider
    bundled_options: Mapping[str, Any] = {}

    def check(self, plan: CompilePlan) -> None:
        own = plan.source.interface.dtype
        if (own, plan.dtype) != ("float32", "float32"):
            raise CompileError(
                f"the package is {own} and dtype is {plan.dtype!r}; the openvino target computes in float32: export "
                "the model with that dtype"
            )
        if plan.store_float16:
            raise CompileError("weights is 'float16', which is for the cpu target; give 'int4', 'int8' or 'float32'")
        check_providers(self.execution_providers)

    def interface(self, plan: CompilePlan) -> Interface:
        return replace(plan.interface, kv_cache_dtype=plan.kv_cache_dtype)

    def fixed_axes(self, plan: CompilePlan) -> Mapping[str, int]:
        return {BATCH: 1} if plan.batch_size == 1 else {}

    def passes(self, plan: CompilePlan) -> Sequence[Pass]:
        return lean_passes("cpu", plan.ctx_len)

    def publish(self, model: ir.Model, sampler: ir.Model | None, plan: CompilePlan, folder: Path) -> Placement:
        return publish_compiled(model, sampler, plan, folder, self.execution_providers, self.provider_options)


TARGET = OpenVinoTarget()
