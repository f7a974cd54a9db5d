"""The CPU target: the decode graph in ONNX Runtime's fused operators, optimised offline."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import onnx_ir as ir
import onnxruntime as ort

from qsample.compiler.ort import optimize_offline
from qsample.compiler.passes.recurrences import branch_where_rows_begin
from qsample.compiler.placement import Placement, placement_in_file
from qsample.compiler.plan import CompilePlan
from qsample.compiler.quantize.float16 import store_as_float16
from qsample.compiler.quantize.weights import round_activations
from qsample.compiler.recipe import Pass, lean_passes
from qsample.compiler.shared_data import share_equal_data
from qsample.contract import BATCH
from qsample.errors import CompileError
from qsample.interface import Interface
from qsample.ort.providers import CPU

_DTYPES: Final = ("float32", "float16")  # GroupQueryAttention's CPU kernels
# EXTENDED holds what every CPU of the architecture runs; ALL adds layouts of the very machine that compiles.
_LEVEL: Final = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED


class CpuTarget:
    """Plain x86-64 and Arm CPUs. The capacity is fixed; the batch is fixed at 1 or else only bounded, because a row of
    a batch is prefilled alone, as a batch of one over its slice of the buffers."""

    name = "cpu"
    execution_providers: tuple[str, ...] = (CPU,)
    provider_options: Mapping[str, str] = {}
    splits_at_logits = False  # ONNX Runtime optimises model and sampler as one graph
    bundled_options: Mapping[str, Any] = {}
    pads_blocks = True  # its MatMulNBits takes a last block that is not full

    def check(self, plan: CompilePlan) -> None:
        own = plan.source.interface.dtype
        if plan.dtype != own and plan.dtype not in _DTYPES:
            raise CompileError(
                f"dtype is {plan.dtype!r} and the CPU provider's attention takes {' or '.join(_DTYPES)}; leave it out, "
                "or compile for cuda"
            )
        if plan.dtype != own:
            raise CompileError(
                f"dtype is {plan.dtype!r} and the package was exported as {own}; export it again with that dtype"
            )
        if own not in _DTYPES:
            raise CompileError(
                f"the package is {own} and the CPU provider's attention takes {' or '.join(_DTYPES)}; export it with "
                "one of these dtypes"
            )

    def interface(self, plan: CompilePlan) -> Interface:
        return replace(plan.interface, kv_cache_dtype=plan.kv_cache_dtype)

    def fixed_axes(self, plan: CompilePlan) -> Mapping[str, int]:
        return {BATCH: 1} if plan.batch_size == 1 else {}

    def passes(self, plan: CompilePlan) -> Sequence[Pass]:
        return (*lean_passes("cpu", plan.ctx_len), round_activations)

    def publish(self, model: ir.Model, sampler: ir.Model | None, plan: CompilePlan, folder: Path) -> Placement:
        branch_where_rows_begin(model)
        scratch, target = folder / "scratch", folder / "decoder.onnx"
        scratch.mkdir()
        ir.save(model, scratch / "fused.onnx", external_data="fused.onnx.data")
        if plan.store_float16:  # behind ONNX Runtime's optimisation, which would undo it
            provider_of = optimize_offline(
                scratch / "fused.onnx", scratch / "optimized.onnx", self.execution_providers, _LEVEL
            )
            optimized = ir.load(scratch / "optimized.onnx")
            store_as_float16(optimized)
            model.meta.update(optimized.meta)
            ir.save(optimized, target, external_data="decoder.onnx.data")
        else:
            provider_of = optimize_offline(scratch / "fused.onnx", target, self.execution_providers, _LEVEL)
        shutil.rmtree(scratch)
        share_equal_data(target)
        return placement_in_file(target, provider_of, self.execution_providers[0])


TARGET = CpuTarget()
