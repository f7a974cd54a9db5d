"""WebGPU: a decode graph for any GPU, natively and in browsers, with the sampler on the device.

A value that goes to the host is a wait for the device, in a browser most of all. So the sampler is the one for replay:
with the input `searched_rows` of docs/contract.md, and no control flow but an If around the search, on a shape. Every
operator of a step runs on the device, except for shapes. The capacity stays free: a host may begin small and grow.

Bugs of the provider (onnxruntime-ep-webgpu 0.4.0): TopK pads with -3.4e38, above -inf and with negative ids, so the
sampler's `FLOOR` is higher; the graph in an If finds the constants of the graph around it in the host's memory, and
fails, so it gets copies (`own_constants`); Pow fails for some shapes (`float_ids`); QMoE is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import onnx_ir as ir

from qsample.compiler.passes.capture import host_arithmetic
from qsample.compiler.passes.float_ids import ids_as_floats, own_constants
from qsample.compiler.pipeline import (
    Build,
    Phase,
    graph_pass,
    half_phases,
    lean_phases,
    quantization_phases,
    save,
    split_sampler,
    step,
)
from qsample.compiler.plan import CompilePlan
from qsample.compiler.quantize.weights import keep_activations
from qsample.compiler.targets import Capability, Target
from qsample.compiler.write import (
    cut_weights,
    join_flat_sampler,
    load_written,
    misplaced_nodes,
    placement_of,
)
from qsample.contract.interface import Interface
from qsample.errors import CompileError
from qsample.graph.edit import cast, initializer, insert, replace_node
from qsample.graph.gqa import Slot, attentions, set_inputs
from qsample.graph.operators import is_contrib
from qsample.ort.providers import CPU, HOST_NODES_OPTION, WEBGPU, plugin_devices

# Over several tokens its result sometimes equals the CPU's and sometimes is another one altogether, for the same
# inputs.
_WRONG: Final = "QMoE"
_HOST: Final = "Cpu"  # ONNX Runtime's name of the host's memory
_READ_ON_HOST: Final = {
    "Clip": (1, 2),
    "If": (0,),
}  # in addition to the inputs that CUDA's kernels read there


class WebGpuTarget(Target):
    """GPUs through Vulkan, Metal or Direct3D 12, and browsers. Rows, new tokens and the capacity stay free."""

    name = "webgpu"
    execution_providers: tuple[str, ...] = (WEBGPU, CPU)
    # Ids and indices are int64 in the contract. Their kernels compute in 32 bits, enough for every id.
    provider_options: Mapping[str, str] = {"enableInt64": "1"}
    default_options: Mapping[str, Any] = {"weights": "int4"}
    kv_cache_dtypes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("float32", "float16")
    capabilities = frozenset({Capability.DTYPE_CONVERSION})

    def check_installed(self) -> None:
        super().check_installed()
        if not plugin_devices(WEBGPU):
            raise CompileError(
                f"{WEBGPU} finds no GPU here. docs/devices.md lists its requirements; to compile for other machines, "
                "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1 lets it take a Vulkan driver that computes on the CPU"
            )

    def interface(self, plan: CompilePlan) -> Interface:
        """Without control flow, if it has the sampler."""
        captured = plan.interface.features.sampler
        return replace(plan.interface, dtype=plan.dtype, captured=captured)

    def phases(self, plan: CompilePlan) -> Sequence[Phase]:
        return [
            graph_pass(take_total_from_shape),
            step(split_sampler),
            *lean_phases("cuda", plan.ctx_len),
            *half_phases(plan),
            *quantization_phases(plan),
            graph_pass(keep_activations),  # some GPUs would round them, and some would not
            graph_pass(plain_products),  # after quantization: it looks for such heads
            step(join_flat_sampler, for_webgpu=True),
            graph_pass(ids_as_floats),
            graph_pass(own_constants),
            step(keep_shapes_on_host),
            step(save),
            step(cut_weights),
            step(place, providers=self.execution_providers, provider_options=self.provider_options),
        ]


def take_total_from_shape(model: ir.Model) -> bool:
    """Give every GroupQueryAttention the capacity as its longest total length, from its cache's shape, in place: the
    host reads it, and must not have to wait for the lengths. Returns whether there was one."""
    nodes = attentions(model.graph)
    for node in nodes:
        axis = {"start": 2, "end": 3}
        int64 = ir.DataType.INT64
        shape = insert(node, "Shape", [node.inputs[Slot.PAST_KEY]], [1], axis, dtype=int64)
        total = cast(insert(node, "Squeeze", [shape], []), ir.DataType.INT32, node)
        set_inputs(node, {Slot.TOTAL_SEQUENCE_LENGTH: total})
    return bool(nodes)


def plain_products(model: ir.Model) -> bool:
    """Turn FusedMatMul, missing in WebGPU, into plain products, in place: a Gemm of single positions times a transposed
    matrix, such as a table of embeddings, and transpositions otherwise. Returns whether there was one."""
    modified = False
    for node in [node for node in model.graph if is_contrib(node, "FusedMatMul")]:
        alpha = node.attributes.get_float("alpha", 1.0)
        flags = {
            name: attribute.value
            for name, attribute in node.attributes.items()
            if name != "alpha" and attribute.value != 0
        }
        sides = list(node.inputs[:2])
        shapes = [value.shape for value in node.inputs[:2] if value is not None]
        known = [shape for shape in shapes if shape is not None]
        if alpha != 1.0 or not flags.keys() <= {"transA", "transB"} or len(known) < 2:
            continue
        rows, matrix = known
        if flags == {"transB": 1} and len(rows) == 3 and rows[1] == 1 and len(matrix) == 2:
            axis = initializer(model.graph, "axis_1", np.array([1]))
            squeezed = insert(node, "Squeeze", [sides[0], axis], [rows[0], rows[2]])
            product = insert(
                node, "Gemm", [squeezed, sides[1]], [rows[0], matrix[0]], {"transB": 1}
            )
            replace_node(node, [ir.node("Unsqueeze", [product, axis])])
        else:
            for index, (flag, shape) in enumerate(zip(("transA", "transB"), known, strict=True)):
                if flag in flags:
                    order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
                    swapped = [shape[axis] for axis in order]
                    sides[index] = insert(
                        node, "Transpose", [sides[index]], swapped, {"perm": order}
                    )
            replace_node(node, [ir.node("MatMul", sides)])
        modified = True
    return modified


def host_shapes(model: ir.Model) -> str:
    """The value of `HOST_NODES_OPTION`: the nodes between shapes and the kernels that read them on
    the host. With int64 enabled, the provider would compute some of them on the device, and the
    host would wait for the result."""
    return " ".join(sorted(str(node.name) for node in host_arithmetic(model.graph, _READ_ON_HOST)))


def keep_shapes_on_host(build: Build) -> None:
    """Note the option that does it."""
    build.provider_options = {HOST_NODES_OPTION: host_shapes(build.model)}


def place(build: Build, providers: Sequence[str], provider_options: Mapping[str, str]) -> None:
    """As `cuda.place`; also raises CompileError if an input or output is not on the device."""
    session = load_written(build, providers, provider_options)
    if wrong := [
        str(node.name) for node in build.model.graph.all_nodes() if node.op_type == _WRONG
    ]:
        raise CompileError(
            f"{len(wrong)} layers of experts become {_WRONG} ({wrong[0]} …), whose results on {WEBGPU} are not "
            "reliable. Compile the model for cpu or web"
        )
    misplaced = misplaced_nodes(build, session, WEBGPU)
    memories = (*session.get_input_memory_infos(), *session.get_output_memory_infos())
    values = (*session.get_inputs(), *session.get_outputs())
    misplaced += [
        value.name for value, memory in zip(values, memories, strict=True) if memory.name == _HOST
    ]
    if misplaced:
        raise CompileError(
            f"{len(misplaced)} nodes have no kernel on {WEBGPU}, and each would wait for the device in every step: "
            f"{', '.join(misplaced[:5])}{' …' if len(misplaced) > 5 else ''}. Compile the model for cpu or web"
        )
    build.placement = placement_of(session)


TARGET = WebGpuTarget()
