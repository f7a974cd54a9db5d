"""OpenVINO: a decode graph whose parts OpenVINO has compiled for the CPU, kept as EPContext nodes.

OpenVINO takes no GroupQueryAttention there. It stays on ONNX Runtime's own CPU provider, which updates the cache in
place, and what lies between two attentions is one compiled part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import onnx_ir as ir

from qsample.contract import BATCH, CAPACITY, Interface
from qsample.errors import CompileError
from qsample.exporters.compiler.ep_context import load_model_part, publish_compiled
from qsample.exporters.compiler.options import CompileOptions
from qsample.exporters.compiler.placement import Placement
from qsample.exporters.compiler.quantize.kv_cache import quantize_kv_cache
from qsample.exporters.compiler.quantize.weights import quantization_report, quantize_weights
from qsample.exporters.compiler.recipe import Pass, lean_passes, run
from qsample.exporters.compiler.targets import check_providers
from qsample.exporters.graph.axes import fix_axes


class OpenVinoTarget:
    """Intel CPUs. The capacity is fixed; rows and new tokens stay free, or the batch is fixed at 1."""

    name = "openvino"
    execution_providers: tuple[str, ...] = ("OpenVINOExecutionProvider", "CPUExecutionProvider")
    # By itself, OpenVINO would compute in bfloat16 where the processor has it.
    provider_options: Mapping[str, str] = {"device_type": "CPU", "INFERENCE_PRECISION_HINT": "f32"}

    def check(self, interface: Interface, options: CompileOptions) -> None:
        if (interface.dtype, options.dtype) != ("float32", "float32"):
            raise CompileError(
                f"the package is {interface.dtype} and dtype is {options.dtype!r}; the openvino target computes in "
                "float32: export the model with that dtype"
            )
        if options.store_float16:
            raise CompileError("weights is 'float16', which is for the cpu target; give 'int4', 'int8' or 'float32'")
        check_providers(self.execution_providers)

    def interface(self, interface: Interface, options: CompileOptions) -> Interface:
        return replace(interface, kv_cache_dtype=options.kv_cache_dtype)

    def compile(self, decoder: Path, folder: Path, interface: Interface, options: CompileOptions) -> Placement:
        model = self.build(decoder, interface, options)
        chosen = self.execution_providers, self.provider_options
        placement = publish_compiled(model, folder, interface, options, *chosen)
        return replace(placement, quantization=quantization_report(model))

    def build(self, decoder: Path, interface: Interface, options: CompileOptions) -> ir.Model:
        """The model part as OpenVINO is given it; `interface` is that of the compiled package."""
        model = load_model_part(decoder, interface)
        sizes = {CAPACITY: options.ctx_len} | ({BATCH: 1} if options.batch_size == 1 else {})
        passes: list[Pass] = [partial(fix_axes, sizes=sizes), *lean_passes("cpu", options.ctx_len)]
        if options.cache_ranges is not None:
            passes.append(partial(quantize_kv_cache, ranges=options.cache_ranges))
        if options.weights is not None:
            passes.append(partial(quantize_weights, quantization=options.weights))
        run(model, passes)
        return model


TARGET = OpenVinoTarget()
