"""TensorRT: a decode graph whose parts TensorRT has built into engines for one GPU, kept as EPContext nodes.

TensorRT takes no GroupQueryAttention. It stays on ONNX Runtime's CUDA provider, which updates the cache in place, and
what lies between two attentions is one engine. An engine is built ahead of time for fixed shapes: one row, and one
token a call, so a prompt is read token by token. An engine belongs to the GPU and the TensorRT version that built it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import onnx_ir as ir

from qsample.contract import BATCH, CAPACITY, SEQUENCE, Interface
from qsample.errors import CompileError
from qsample.exporters.compiler.ep_context import load_model_part, publish_compiled
from qsample.exporters.compiler.options import CompileOptions
from qsample.exporters.compiler.passes.half_precision import convert_to_half
from qsample.exporters.compiler.passes.no_host_copies import fix_total_length
from qsample.exporters.compiler.placement import Placement
from qsample.exporters.compiler.recipe import run
from qsample.exporters.compiler.targets import check_providers
from qsample.exporters.graph.axes import fix_axes


class TensorRtTarget:
    """NVIDIA GPUs, for one row at a time."""

    name = "tensorrt"
    execution_providers: tuple[str, ...] = (
        "TensorrtExecutionProvider",
        "CUDAExecutionProvider",
        "CPUExecutionProvider",
    )
    provider_options: Mapping[str, str] = {"trt_fp16_enable": "1"}

    def check(self, interface: Interface, options: CompileOptions) -> None:
        if options.batch_size != 1:
            raise CompileError(
                f"batch_size is {options.batch_size}, and TensorRT's engines are built for fixed shapes, in which a "
                "row of a batch cannot be prefilled alone; give batch_size=1, or compile for cuda"
            )
        if options.dtype != "float16":
            raise CompileError(f"dtype is {options.dtype!r}; the tensorrt target takes 'float16'")
        if interface.dtype not in ("float32", "float16"):
            raise CompileError(f"the package is {interface.dtype} and cannot become float16 without another rounding")
        if options.quantized:
            raise CompileError(
                "TensorRT has none of ONNX Runtime's quantized operators; leave weights and kv_cache_dtype out, or "
                "compile for cuda"
            )
        check_providers(self.execution_providers)

    def interface(self, interface: Interface, options: CompileOptions) -> Interface:
        return replace(interface, dtype=options.dtype)

    def compile(self, decoder: Path, folder: Path, interface: Interface, options: CompileOptions) -> Placement:
        model = self.build(decoder, interface, options)
        return publish_compiled(model, folder, interface, options, self.execution_providers, self.provider_options)

    def build(self, decoder: Path, interface: Interface, options: CompileOptions) -> ir.Model:
        """The model part as TensorRT is given it: in ONNX's own operators, but for the attention.

        interface: that of the compiled package.
        """
        model = load_model_part(decoder, interface)
        states = {state.name for state in interface.cache_states}
        passes = (
            partial(fix_axes, sizes={CAPACITY: options.ctx_len, BATCH: 1, SEQUENCE: 1}),
            partial(fix_total_length, capacity=options.ctx_len),
            partial(convert_to_half, dtype=options.dtype, states=states),
        )
        run(model, passes)
        return model


TARGET = TensorRtTarget()
