"""OpenVINO: a decode graph whose parts OpenVINO has compiled for the CPU, kept as EPContext nodes.

OpenVINO takes no GroupQueryAttention there. It stays on ONNX Runtime's CPU provider, for caches updated in place, and
the graph between two attentions is a compiled part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qsample.compiler.pipeline import (
    Phase,
    fixed_sizes,
    lean_phases,
    quantization_phases,
    split_sampler,
    step,
)
from qsample.compiler.plan import CompilePlan
from qsample.compiler.targets import Target
from qsample.compiler.write import ahead_of_time_phases
from qsample.ort.providers import CPU, DEVICE_OPTION, OPENVINO


class OpenVinoTarget(Target):
    """Intel CPUs. The capacity is fixed; rows and new tokens stay free, or the batch is fixed at 1."""

    name = "openvino"
    execution_providers: tuple[str, ...] = (OPENVINO, CPU)
    # By itself, OpenVINO would compute in bfloat16 if the processor has it.
    provider_options: Mapping[str, str] = {DEVICE_OPTION: "CPU", "INFERENCE_PRECISION_HINT": "f32"}
    dtypes: tuple[str, ...] = ("float32",)

    def phases(self, plan: CompilePlan) -> Sequence[Phase]:
        return [
            fixed_sizes(plan, self.fixed_axes(plan)),
            step(split_sampler),
            *lean_phases("cpu", plan.ctx_len),
            *quantization_phases(plan, copies=2),  # a provider reads a graph and writes another
            *ahead_of_time_phases(self.execution_providers, self.provider_options),
        ]


TARGET = OpenVinoTarget()
