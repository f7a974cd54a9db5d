"""The cost of the sampler in a decode step: a package's graph, in turn with the same graph cut at its logits, with a
plain ArgMax over them, and with its head alone.

    qsample export MODEL exported && qsample compile exported compiled --weights int4 --ctx-len 2048
    python benchmarks/sampler_share.py compiled --batch 1 4

They run in the same process, a few steps each in turn, over the same cache, in the middle of a generation with
--history tokens per row. Every state except `lengths` is bound in place, so that every step is the same. The first
steps of a turn do not count, because the other graph's threads still spin and its own have to wake. The place of its
weights in memory changes a step by about 3 %, more than the sampler does, so each graph is loaded --copies times: the
sampler's time is the median over the copies of the difference of their medians, shown with the range of those
differences.

(head + sampler) / head is the measure of FlashSampling (arXiv:2603.15854). The head is the product that computes the
logits, with the same weights.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from common import EVERYTHING, make_parser
from common import MIXES as PLAIN_MIXES
from rich.console import Console
from rich.progress import track
from rich.table import Table

from qsample.contract.interface import Interface
from qsample.contract.tensors import BATCH, BIASES, CAPACITY, SEQUENCE, STOPS
from qsample.graph.join import cut_at_logits
from qsample.package.package import Compilation, Package, read_package

TURN, UNCOUNTED = 16, 4  # consecutive steps of a graph, and the number of uncounted steps
MIXES: dict[str, dict[str, float]] = {
    **PLAIN_MIXES,
    "everything on": EVERYTHING,
    "temperature alone": {"temperature": 0.8},
}


GRAPHS = ("whole", "up to the logits", "with ArgMax", "head alone")
HEADS = ("MatMul", "MatMulNBits")


def make_graphs(decoder: Path, interface: Interface) -> dict[str, bytes]:
    """Name of GRAPHS → the whole graph, the graph cut at its logits, with ArgMax instead of the sampler, its head."""
    cut, argmax, head = (cut_at_logits(ir.load(decoder), interface) for _ in range(3))
    keep_head(head)
    logits = argmax.graph.outputs[0]
    node = ir.node("ArgMax", [logits], {"axis": -1, "keepdims": 0}, name="argmax")
    node.outputs[0].name, node.outputs[0].type = "argmax", ir.TensorType(ir.DataType.INT64)
    argmax.graph.append(node)
    argmax.graph.outputs[0] = node.outputs[0]
    models = zip(GRAPHS, (ir.load(decoder), cut, argmax, head), strict=True)
    return {name: ir.to_proto(model).SerializeToString() for name, model in models}


def keep_head(model: ir.Model) -> None:
    """Keep only the product that computes the logits, with an input `hidden`."""
    graph = model.graph
    node = graph.outputs[0].producer()
    while node is not None and node.op_type not in HEADS:
        source = node.inputs[0]
        node = None if source is None else source.producer()
    if node is None:
        raise SystemExit(f"no {' or '.join(HEADS)} computes the logits of this package")
    given = node.inputs[0]
    hidden = ir.Value(name="hidden", type=given.type, shape=given.shape)
    node.replace_input_with(0, hidden)
    graph.outputs[:] = [node.outputs[0]]
    graph.remove([other for other in graph if other is not node], safe=False)
    graph.inputs[:] = [hidden]
    for name in [name for name, value in graph.initializers.items() if value not in node.inputs]:
        del graph.initializers[name]


def open_session(graph: bytes, folder: Path, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return ort.InferenceSession(graph, options)


def bind(session: ort.InferenceSession, interface: Interface, values: dict[str, ort.OrtValue]) -> ort.IOBinding:
    retained = {output: state for state, output in interface.decoder.retained.items() if state != "lengths"}
    binding = session.io_binding()
    for node in session.get_inputs():
        if node.name == "hidden":
            shape = (values["lengths"].shape()[0], *node.shape[1:])
            hidden = np.random.default_rng(0).standard_normal(shape, np.float32)
            binding.bind_ortvalue_input(node.name, ort.OrtValue.ortvalue_from_numpy(hidden))
        else:
            binding.bind_ortvalue_input(node.name, values[node.name])
    for node in session.get_outputs():
        if node.name in retained:
            binding.bind_ortvalue_output(node.name, values[retained[node.name]])
        else:
            binding.bind_output(node.name)
    return binding


def make_values(
    interface: Interface, batch: int, ctx_len: int, history: int, parameters: dict[str, float]
) -> dict[str, ort.OrtValue]:
    """Every input and state of a decode step after `history` tokens."""
    rng = np.random.default_rng(0)
    sizes = {**interface.sizes, BATCH: batch, SEQUENCE: 1, CAPACITY: ctx_len, STOPS: 2, BIASES: 1}
    given: dict[str, object] = {"lengths": history, "input_lengths": 1, "emit": True, "max_length": 2**30, **parameters}
    given["tokens"] = rng.integers(0, interface.vocab_size, (batch, ctx_len))
    given["noise"] = rng.random((batch, ctx_len))
    result = {}
    for spec in (*interface.decoder.inputs, *interface.decoder.states):
        array = np.empty(spec.shape(sizes), dtype=spec.dtype)
        array[...] = given.get(spec.name, spec.off if spec.off is not None else 0)
        result[spec.name] = ort.OrtValue.ortvalue_from_numpy(array)
    return result


def take_turn(session: ort.InferenceSession, binding: ort.IOBinding) -> list[float]:
    """Milliseconds of the counted steps."""
    taken = []
    for step in range(TURN):
        start = time.perf_counter()
        session.run_with_iobinding(binding)
        if step >= UNCOUNTED:
            taken.append(1e3 * (time.perf_counter() - start))
    return taken


def package_parser(doc: str | None, steps: int, history: int) -> argparse.ArgumentParser:
    """The options of a benchmark of a compiled package, with the defaults of --steps and --history."""
    parser = make_parser(doc)
    parser.add_argument("package", type=Path, help="a package compiled for cpu, sampler included")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=steps, help="counted steps of each graph")
    parser.add_argument("--history", type=int, default=history, help="tokens of a row before the step")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    return parser


def open_compiled(parser: argparse.ArgumentParser, path: Path, history: int) -> tuple[Package, Compilation]:
    """The package; exits with a message if it does not fit."""
    package = read_package(path, verify=False)
    compilation = package.manifest.compilation
    if compilation is None or compilation.ctx_len <= history + 1:
        parser.error(f"{path} must be compiled, with --ctx-len above {history + 1}")
    return package, compilation


def main() -> None:
    parser = package_parser(__doc__, steps=480, history=1024)
    parser.add_argument("--copies", type=int, default=4, help="of each graph")
    options = parser.parse_args()
    package, compilation = open_compiled(parser, options.package, options.history)
    decoder = package.file("decoder.onnx")
    graphs = make_graphs(decoder, package.interface)
    copies = [
        [open_session(graph, decoder.parent, options.threads) for graph in graphs.values()]
        for _ in range(options.copies)
    ]

    header = (
        "step, ms",
        "up to the logits, ms",
        "sampler, ms",
        "share",
        "by copy, ms",
        "ArgMax in its place, ms",
        "(head + sampler) / head",
    )
    table = Table("rows", "sampling", *header)
    console = Console()
    runs = [(batch, mix) for batch in options.batch for mix in MIXES]
    for batch, mix in track(runs, "timing", console=Console(stderr=True), transient=True):
        values = make_values(package.interface, batch, compilation.ctx_len, options.history, MIXES[mix])
        bound = [[(session, bind(session, package.interface, values)) for session in copy] for copy in copies]
        times: list[list[list[float]]] = [[[] for _ in copy] for copy in copies]
        while len(times[0][0]) * options.copies < options.steps:
            for copy, taken in zip(bound, times, strict=True):
                for (session, binding), milliseconds in zip(copy, taken, strict=True):
                    milliseconds += take_turn(session, binding)
        medians = np.array([[np.median(milliseconds) for milliseconds in taken] for taken in times])
        whole, model, _, head = np.median(medians, axis=0)
        sampler, argmax = (medians[:, i] - medians[:, 1] for i in (0, 2))
        figures = [f"{whole:.2f}", f"{model:.2f}", f"{np.median(sampler):.2f}", f"{np.median(sampler) / whole:.1%}"]
        figures += [f"{sampler.min():.2f} to {sampler.max():.2f}", f"{np.median(argmax):.2f}"]
        figures.append(f"{1 + np.median(sampler) / head:.3f}")
        table.add_row(str(batch), mix, *figures)
    console.print(table)


if __name__ == "__main__":
    main()
