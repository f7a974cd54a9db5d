"""OpenVINO: a decode graph whose parts OpenVINO has compiled for the CPU, kept as EPContext nodes.

OpenVINO takes no GroupQueryAttention there. It stays on ONNX Runtime's own CPU provider, which updates the cache in
place, and what lies between two attentions is one compiled part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from qsample.contract import BATCH, CAPACITY, Interface
from qsample.errors import CompileError
from qsample.exporters.compiler.ep_context import load_model_part, publish_compiled
from qsample.exporters.compiler.options import CompileOptions
from qsample.exporters.compiler.passes.joint_projections import pack_projections
from qsample.exporters.compiler.passes.lean import make_lean
from qsample.exporters.compiler.passes.ort_fusions import fuse
from qsample.exporters.compiler.placement import Placement
from qsample.exporters.compiler.quantize.kv_cache import quantize_cache
from qsample.exporters.compiler.quantize.weights import QuantizationReport, quantize_weights
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
        model, report = self.build(decoder, interface, options)
        chosen = self.execution_providers, self.provider_options
        return replace(publish_compiled(model, folder, interface, options, *chosen), quantization=report)

    def build(
        self, decoder: Path, interface: Interface, options: CompileOptions
    ) -> tuple[ir.Model, QuantizationReport | None]:
        """The model part as OpenVINO is given it; `interface` is that of the compiled package."""
        model = load_model_part(decoder, interface)
        fix_axes(model, {CAPACITY: options.ctx_len} | ({BATCH: 1} if options.batch_size == 1 else {}))
        pack_projections(model)  # as the fusions would, but without reading the weights
        fuse(model, "cpu")
        make_lean(model, options.ctx_len)
        if options.cache_ranges is not None:
            quantize_cache(model, options.cache_ranges)
        return model, quantize_weights(model, options.weights) if options.weights is not None else None


TARGET = OpenVinoTarget()
