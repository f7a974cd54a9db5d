"""The least time of a decode step: the package's quantized matrix products alone, in turn with the whole step.

    qsample compile exported compiled --weights int4 --ctx-len 2048
    python benchmarks/matmul_floor.py compiled --batch 1 4

Every system on ONNX Runtime runs the same products on the same kernels. A better graph or loop can save only the rest
of a step, so `step / products` bounds the possible speedup over this package.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from common import MIXES, describe_machine
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sampler_share import bind, make_values, open_compiled, open_session, package_parser, take_turn

PRODUCT = "MatMulNBits"


def products_alone(decoder: Path) -> bytes:
    """A model of the decoder's products, each with its own weights; products of the same width share an input."""
    model = ir.load(decoder)
    graph = model.graph
    nodes = [node for node in graph if node.op_type == PRODUCT]
    inputs: dict[int, ir.Value] = {}
    for node in nodes:
        width = node.attributes["K"].as_int()
        shared = inputs.setdefault(
            width,
            ir.Value(name=f"input_{width}", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", 1, width])),
        )
        node.replace_input_with(0, shared)
    kept = set(nodes)
    graph.outputs[:] = [node.outputs[0] for node in nodes]
    graph.remove([node for node in graph if node not in kept], safe=False)
    graph.inputs[:] = list(inputs.values())
    read = {value for node in nodes for value in node.inputs}
    for name in [name for name, value in graph.initializers.items() if value not in read]:
        del graph.initializers[name]
    return ir.to_proto(model).SerializeToString()


def bind_products(session: ort.InferenceSession, batch: int) -> ort.IOBinding:
    binding, rng = session.io_binding(), np.random.default_rng(0)
    for node in session.get_inputs():
        values = rng.standard_normal((batch, *node.shape[1:])).astype(np.float32)
        binding.bind_ortvalue_input(node.name, ort.OrtValue.ortvalue_from_numpy(values))
    for node in session.get_outputs():
        binding.bind_output(node.name)
    return binding


def main() -> None:
    parser = package_parser(__doc__, steps=240, history=64)
    options = parser.parse_args()
    package, compilation = open_compiled(parser, options.package, options.history)
    if compilation.quantization is None:
        parser.error(f"{options.package} must be compiled with --weights int4 or int8")
    decoder = package.file("decoder.onnx")
    graphs = (decoder.read_bytes(), products_alone(decoder))
    sessions = [open_session(graph, decoder.parent, options.threads) for graph in graphs]

    console = Console()
    table = Table(
        "rows", "step, ms", "its products alone, ms", "step / products", title=describe_machine(options.threads)
    )
    for batch in track(options.batch, "timing", console=Console(stderr=True), transient=True):
        values = make_values(package.interface, batch, compilation.ctx_len, options.history, MIXES["greedy"])
        bindings = [bind(sessions[0], package.interface, values), bind_products(sessions[1], batch)]
        times: list[list[float]] = [[], []]
        while len(times[0]) < options.steps:
            for session, binding, taken in zip(sessions, bindings, times, strict=True):
                taken += take_turn(session, binding)
        step, products = (float(np.median(taken)) for taken in times)
        table.add_row(str(batch), f"{step:.2f}", f"{products:.2f}", f"{step / products:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
