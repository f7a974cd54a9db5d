"""The CPU target: a portable decode graph enters; a fused one, optimised offline by ONNX Runtime, leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import onnx_ir as ir
import onnxruntime as ort

from qsample.contract import BATCH, CAPACITY, Interface
from qsample.errors import CompileError
from qsample.exporters.compiler.options import CompileOptions
from qsample.exporters.compiler.ort import optimize_offline
from qsample.exporters.compiler.placement import Placement
from qsample.exporters.compiler.quantize.float16 import store_as_float16
from qsample.exporters.compiler.quantize.kv_cache import quantize_kv_cache
from qsample.exporters.compiler.quantize.weights import (
    QuantizationReport,
    quantization_report,
    quantize_weights,
    round_activations,
)
from qsample.exporters.compiler.recipe import Pass, lean_passes, run
from qsample.exporters.graph.axes import fix_axes

_DTYPES: Final = ("float32", "float16")  # GroupQueryAttention's CPU kernels


class CpuTarget:
    """Plain x86-64 and Arm CPUs. The capacity is fixed; the batch is fixed at 1 or else only bounded, because a row of
    a batch is prefilled alone, as a batch of one over its slice of the buffers."""

    name = "cpu"
    execution_providers: tuple[str, ...] = ("CPUExecutionProvider",)
    provider_options: Mapping[str, str] = {}

    def check(self, interface: Interface, options: CompileOptions) -> None:
        if options.dtype != interface.dtype:
            raise CompileError(
                f"dtype is {options.dtype!r} and the package was exported as {interface.dtype}; export it again with "
                "that dtype"
            )
        if interface.dtype not in _DTYPES:
            raise CompileError(
                f"the package is {interface.dtype} and the CPU provider's attention takes {' or '.join(_DTYPES)}; "
                "export it with one of these dtypes"
            )

    def interface(self, interface: Interface, options: CompileOptions) -> Interface:
        return replace(interface, kv_cache_dtype=options.kv_cache_dtype)

    def compile(self, decoder: Path, folder: Path, interface: Interface, options: CompileOptions) -> Placement:
        fused = folder / "fused.onnx"
        model = ir.load(decoder)
        sizes = {CAPACITY: options.ctx_len} | ({BATCH: 1} if options.batch_size == 1 else {})
        passes: list[Pass] = [partial(fix_axes, sizes=sizes), *lean_passes(self.name, options.ctx_len)]
        passes.append(round_activations)
        if options.cache_ranges is not None:
            passes.append(partial(quantize_kv_cache, ranges=options.cache_ranges))
        if options.weights is not None:
            passes.append(partial(quantize_weights, quantization=options.weights))
        run(model, passes)
        report = quantization_report(model)
        ir.save(model, fused, external_data="fused.onnx.data")
        del model  # it may hold weights
        # EXTENDED holds what every CPU of the architecture runs; ALL adds layouts of the very machine that compiles.
        level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        placement = optimize_offline(fused, folder / "decoder.onnx", self.execution_providers, level)
        fused.unlink()
        (folder / "fused.onnx.data").unlink(missing_ok=True)
        if options.store_float16:
            report = _store_half(folder)
            casts = {**placement.nodes[self.execution_providers[0]], "Cast": report.matrices}
            casts["Cast"] += placement.nodes[self.execution_providers[0]].get("Cast", 0)
            placement = Placement({**placement.nodes, self.execution_providers[0]: casts})
        return replace(placement, quantization=report)


def _store_half(folder: Path) -> QuantizationReport:
    """Rewrite `decoder.onnx` in `folder`. This comes last: ONNX Runtime's optimisation would undo it."""
    model, aside = ir.load(folder / "decoder.onnx"), folder / "float16"
    store_as_float16(model)
    report = quantization_report(model)
    assert report is not None
    aside.mkdir()
    ir.save(model, aside / "decoder.onnx", external_data="decoder.onnx.data")
    del model
    for file in aside.iterdir():
        file.replace(folder / file.name)
    aside.rmdir()
    return report


TARGET = CpuTarget()
