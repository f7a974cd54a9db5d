"""Browsers without WebGPU: the CPU's graph for ONNX Runtime's build in WebAssembly, and for Node.

Packages for the CPU multiply quantized weights by activations in 8 bits, each build of ONNX Runtime in another way.
Here activations stay in float32, and Python, Node and WebAssembly choose the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from qsample.compiler.pipeline import Phase, step
from qsample.compiler.plan import CompilePlan
from qsample.compiler.targets import Capability
from qsample.compiler.targets.cpu import CpuTarget
from qsample.compiler.write import cut_weights


class WebTarget(CpuTarget):
    """WebAssembly, with 4 GB of memory; every CPU runs these packages, slower than those compiled for it."""

    name = "web"
    weight_bits: tuple[int, ...] = (4, 8)  # 2 are for activations in 8 bits
    kv_cache_dtypes: tuple[str, ...] = ("int8",)
    rounds_activations = False
    # onnxruntime-web 1.30 has no attention to a number of tokens for each row, as guesses and window caches need;
    # browsers have one device, and their hosts read no images.
    capabilities = CpuTarget.capabilities - {
        Capability.GUESSED_TOKENS,
        Capability.WINDOW_CACHES,
        Capability.SEVERAL_DEVICES,
        Capability.IMAGES,
        Capability.PROMPT_LOGPROBS,
    }

    def phases(self, plan: CompilePlan) -> Sequence[Phase]:
        return [*super().phases(plan), step(cut_weights)]


TARGET = WebTarget()
