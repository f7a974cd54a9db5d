"""The CPU target: the decode graph in ONNX Runtime's fused operators, optimised offline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import onnxruntime as ort

from qsample.compiler.passes.expert_rows import repeat_expert_rows
from qsample.compiler.passes.fusions import merge_equal_nodes
from qsample.compiler.passes.recurrences import branch_where_rows_begin
from qsample.compiler.passes.several_tokens import check_guesses
from qsample.compiler.pipeline import (
    Phase,
    cut_adapters,
    cut_blocks,
    fixed_sizes,
    fold_sampler,
    graph_pass,
    lean_phases,
    put_adapters,
    put_blocks,
    quantization_phases,
    save,
    slide_caches,
    split_sampler,
    step,
)
from qsample.compiler.plan import CompilePlan
from qsample.compiler.quantize.float16 import store_as_float16
from qsample.compiler.quantize.weights import keep_activations, round_activations
from qsample.compiler.targets import Capability, Target
from qsample.compiler.write import (
    cut_for_devices,
    join_sampler,
    join_scorer,
    optimize_offline,
    place_optimized,
)
from qsample.contract.tensors import STEPS_ONNXRUNTIME
from qsample.errors import CompileError, QsampleError
from qsample.graph.adapters import branch_where_adapters_are
from qsample.ort.providers import CPU, check_version, is_version

# EXTENDED makes graphs that every CPU of the architecture runs; ALL adds layouts of the very machine that compiles.
_LEVEL: Final = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED


class CpuTarget(Target):
    """Plain x86-64 and Arm CPUs, with a fixed capacity. The batch is fixed at 1 or only bounded: a row of a batch is
    prefilled alone, over its slice of the buffers. ONNX Runtime optimises model and sampler together."""

    name = "cpu"
    execution_providers: tuple[str, ...] = (CPU,)
    # GroupQueryAttention has CPU kernels for these.
    dtypes: tuple[str, ...] = ("float32", "float16")
    weight_bits: tuple[int, ...] = (2, 4, 8)
    kv_cache_dtypes: tuple[str, ...] = ("int8", "int4")
    capabilities: frozenset[Capability] = frozenset(Capability) - {Capability.DTYPE_CONVERSION}
    # Products with quantized weights round activations to 8 bits.
    rounds_activations = True

    def check(self, plan: CompilePlan) -> None:
        if plan.options.num_speculative_tokens > 0:
            _check_speculation(plan)

    def phases(self, plan: CompilePlan) -> Sequence[Phase]:
        # ONNX Runtime's optimisation would undo the storage in float16, so the storage comes after it.
        halved = [graph_pass(store_as_float16), step(save)] if plan.store_float16 else []
        return [
            fixed_sizes(plan, self.fixed_axes(plan)),
            step(cut_adapters),
            step(cut_blocks),
            step(split_sampler),  # the fusions would look at its nodes over and over
            step(fold_sampler),
            *lean_phases("cpu", plan.ctx_len),
            step(put_adapters),
            step(join_sampler),
            graph_pass(merge_equal_nodes),  # model and sampler ask whether a row begins
            *([graph_pass(round_activations)] if self.rounds_activations else []),
            *quantization_phases(plan, pads_blocks=True),
            *([] if self.rounds_activations else [graph_pass(keep_activations)]),
            *([step(slide_caches)] if self._slides(plan) else []),
            *self._speculation(plan),
            graph_pass(repeat_expert_rows),
            graph_pass(branch_where_adapters_are, interface=plan.interface),
            graph_pass(branch_where_rows_begin),
            step(put_blocks),
            step(join_scorer),
            step(
                optimize_offline, providers=self.execution_providers, level=_LEVEL, final=not halved
            ),
            *halved,
            step(cut_for_devices),
            step(place_optimized, default=self.execution_providers[0]),
        ]

    def _slides(self, plan: CompilePlan) -> bool:
        """Whether layers with a window may forget old tokens: a wrong guess returns to the token before it, and the
        tokens of an image see those after them."""
        interface = plan.interface
        asked = plan.options.sliding_window_cache and Capability.WINDOW_CACHES in self.capabilities
        if (
            not asked
            or not interface.features.sampler
            or interface.features.num_speculative_tokens > 0
        ):
            return False
        return is_version(STEPS_ONNXRUNTIME) and (
            interface.image is None or not interface.image.blockwise
        )

    def _speculation(self, plan: CompilePlan) -> Sequence[Phase]:
        if plan.options.num_speculative_tokens == 0:
            return []
        several = plan.batch_size != 1  # a single row has no padding
        return [
            graph_pass(
                check_guesses,
                interface=self.interface(plan),
                pad_token_id=plan.pad_token_id,
                pack=several,
            )
        ]


def _check_speculation(plan: CompilePlan) -> None:
    """Raise CompileError if steps of several tokens could choose other tokens than steps of one, or cannot be made."""
    given = f"num_speculative_tokens={plan.options.num_speculative_tokens}"
    features = plan.source.interface.features
    if (states := len(plan.source.interface.recurrent)) > 0:
        raise CompileError(
            f"{given}: this model has {states} states of a fixed size, which cannot return to the token before a wrong "
            "guess; leave it out"
        )
    if features.max_loras > 0:
        raise CompileError(
            f"{given}: the package takes adapters (max_loras={features.max_loras}), whose float products round one "
            "token otherwise than several, so that guesses would change tokens; export it without adapters"
        )
    if plan.source.interface.image is not None and plan.source.interface.image.blockwise:
        raise CompileError(
            f"{given}: in this model the tokens of an image see each other, which steps that check guesses do not "
            "compute; leave it out, or export the text model alone (--text-only)"
        )
    if plan.kv_cache_dtype is None:
        raise CompileError(
            f"{given} needs kv_cache_dtype='int8': over a cache in {plan.dtype}, attention to several tokens at once "
            "rounds otherwise than to one, and guesses would change tokens"
        )
    if not features.sampler or features.probs:
        reason = (
            "the distributions of single tokens (probs)"
            if features.sampler
            else "logits, and samples on the host"
        )
        raise CompileError(
            f"{given} needs a package that samples in the graph, and this one returns {reason}"
        )
    try:
        check_version(STEPS_ONNXRUNTIME)
    except QsampleError as error:
        raise CompileError(f"{given}: {error}") from error


TARGET = CpuTarget()
