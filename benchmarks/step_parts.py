"""The parts of a decode step: a package's graph, in turn with parts of it.

    qsample export MODEL exported && qsample compile exported compiled --weights int4 --ctx-len 2048
    python benchmarks/step_parts.py compiled --batch 1 4
    python benchmarks/step_parts.py compiled --batch 1 4 --mix greedy --history 64 --copies 1    # the floor alone
    python benchmarks/step_parts.py compiled --share --copies 3 --steps 180 --history 64         # the sampler alone

The parts are the graph cut at its logits; the same with a plain ArgMax over them; its head alone, the product that
computes the logits; and the quantized matrix products alone. They run in the same process, a few steps each in turn,
over the same cache, in the middle of a generation with --history tokens per row. Every state except `lengths` is bound
in place, so that every step is the same. The first steps of a turn do not count, because the other graph's threads
still spin and its own have to wake. The place of its weights in memory changes a step by about 3 %, more than the
sampler does, so each graph is loaded --copies times: the sampler's time is the median over the copies of the difference
of their medians, shown with the range of those differences.

--share compares the whole step with ArgMax in the sampler's place alone: their ratio within each round and copy, its
median and quartiles.

(head + sampler) / head is the measure of FlashSampling (arXiv:2603.15854). Every system on ONNX Runtime runs the same
products on the same kernels. A better graph or loop can save only the rest of a step, so `step / products` bounds the
possible speedup over this package.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from report import describe_machine, make_parser, print_table
from rich.console import Console
from rich.progress import track
from systems import ALL

from qsample.contract.interface import Interface
from qsample.contract.tensors import BATCH, CAPACITY, HOST_AXES, SEQUENCE, STOPS
from qsample.graph.join import cut_at_logits
from qsample.package.package import read_package

TURN, UNCOUNTED = 16, 4  # consecutive steps of a graph, and the number of uncounted steps
MIXES: Final = ALL | {
    "temperature alone": {"temperature": 0.8},
    "top-k 50": {"temperature": 0.8, "top_k": 50},
}
HEADS: Final = ("MatMul", "MatMulNBits")
HEADER: Final = (
    "rows",
    "sampling",
    "step, ms",
    "up to the logits, ms",
    "sampler, ms",
    "share",
    "by copy, ms",
)
SHARE: Final = (
    "rows",
    "sampling",
    "step, ms",
    "with ArgMax, ms",
    "step / with ArgMax",
    "quartiles",
)
MORE: Final = (
    "ArgMax in its place, ms",
    "(head + sampler) / head",
    "products alone, ms",
    "step / products",
)


def make_graphs(decoder: Path, interface: Interface) -> list[bytes]:
    """The whole graph, the graph cut at its logits, with ArgMax instead of the sampler, its head, its products."""
    cut, argmax, head, products = (cut_at_logits(ir.load(decoder), interface) for _ in range(4))
    logits = argmax.graph.outputs[0]
    node = ir.node("ArgMax", [logits], {"axis": -1, "keepdims": 0}, name="argmax")
    node.outputs[0].name, node.outputs[0].type = "argmax", ir.TensorType(ir.DataType.INT64)
    argmax.graph.append(node)
    argmax.graph.outputs[0] = node.outputs[0]
    last = head.graph.outputs[0].producer()
    while last is not None and last.op_type not in HEADS:
        source = last.inputs[0]
        last = None if source is None else source.producer()
    if last is None:
        raise SystemExit(f"no {' or '.join(HEADS)} computes the logits of this package")
    keep(head, [last])
    # Of a package of float weights, the heads of attention are products, too: it has no figure.
    keep(products, [node for node in products.graph if node.op_type == "MatMulNBits"])
    models = (ir.load(decoder), cut, argmax, head, products)
    return [ir.to_proto(model).SerializeToString() for model in models]


def keep(model: ir.Model, nodes: list[ir.Node]) -> None:
    """Keep only these products, each with its own weights; products of the same width share an input."""
    graph = model.graph
    inputs: dict[int, ir.Value] = {}
    for node in nodes:
        assert node.inputs[1] is not None
        shape = node.inputs[1].shape
        width = node.attributes["K"].as_int() if "K" in node.attributes else int(shape[0])  # type: ignore[index,arg-type]
        name, kind = f"hidden_{width}", ir.TensorType(ir.DataType.FLOAT)
        value = ir.Value(name=name, type=kind, shape=ir.Shape(["batch", 1, width]))
        node.replace_input_with(0, inputs.setdefault(width, value))
    kept = set(nodes)
    graph.outputs[:] = [node.outputs[0] for node in nodes]
    graph.remove([node for node in graph if node not in kept], safe=False)
    graph.inputs[:] = list(inputs.values())
    read = {value for node in nodes for value in node.inputs}
    for name in [name for name, value in graph.initializers.items() if value not in read]:
        del graph.initializers[name]


def open_session(graph: bytes, folder: Path, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(folder)
    )
    return ort.InferenceSession(graph, options)


def bind(
    session: ort.InferenceSession, interface: Interface, values: dict[str, ort.OrtValue], batch: int
) -> Any:
    retained = {
        output: state for state, output in interface.decoder.retained.items() if state != "lengths"
    }
    binding = session.io_binding()
    for node in session.get_inputs():
        if node.name.startswith("hidden_"):
            width = int(node.name.removeprefix("hidden_"))
            rank = len(node.shape)
            hidden = np.random.default_rng(0).standard_normal(
                (batch, 1, width)[3 - rank :], np.float32
            )
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
    sizes = {**interface.sizes, **dict.fromkeys(HOST_AXES, 1)}
    sizes |= {BATCH: batch, SEQUENCE: 1, CAPACITY: ctx_len, STOPS: 2}
    given: dict[str, object] = {
        "lengths": history,
        "input_lengths": 1,
        "emit": True,
        "max_length": 2**30,
        **parameters,
    }
    given["tokens"] = rng.integers(0, interface.vocab_size, (batch, ctx_len))
    given["noise"] = rng.random((batch, ctx_len))
    result = {}
    for spec in (*interface.decoder.inputs, *interface.decoder.states):
        array = np.empty(spec.shape(sizes), dtype=spec.dtype)
        array[...] = given.get(spec.name, spec.off if spec.off is not None else 0)
        result[spec.name] = ort.OrtValue.ortvalue_from_numpy(array)
    return result


def take_turn(session: ort.InferenceSession, binding: Any) -> list[float]:
    """Milliseconds of the counted steps."""
    taken = []
    for step in range(TURN):
        start = time.perf_counter()
        session.run_with_iobinding(binding)
        if step >= UNCOUNTED:
            taken.append(1e3 * (time.perf_counter() - start))
    return taken


def share(copies: list[list[Any]], steps: int) -> list[str]:
    """Figures of `SHARE`. copies: the whole graph and the one with ArgMax, with their bindings."""
    times: list[list[float]] = []  # of each round and copy: the medians of both
    while len(times) * (TURN - UNCOUNTED) < steps:
        turn, copy = divmod(len(times), len(copies))
        taken = {place: take_turn(*copies[copy][place]) for place in ((0, 1), (1, 0))[turn % 2]}
        times.append([float(np.median(taken[place])) for place in (0, 1)])
    whole, argmax = np.array(times).T
    low, middle, high = np.quantile(whole / argmax, (0.25, 0.5, 0.75))
    return [
        f"{np.median(whole):.2f}",
        f"{np.median(argmax):.2f}",
        f"{middle:.3f}",
        f"{low:.3f} to {high:.3f}",
    ]


def main() -> None:
    parser = make_parser(__doc__, threads=2)
    parser.add_argument("package", type=Path, help="a package compiled for cpu, sampler included")
    parser.add_argument("--steps", type=int, default=480, help="counted steps of each graph")
    parser.add_argument("--history", type=int, default=1024, help="tokens of a row before the step")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--mix", nargs="+", choices=list(MIXES), default=list(MIXES))
    parser.add_argument("--copies", type=int, default=4, help="of each graph")
    parser.add_argument(
        "--share",
        action="store_true",
        help="the whole step beside ArgMax in the sampler's place alone",
    )
    options = parser.parse_args()
    package = read_package(options.package, verify=False)
    interface, compilation = package.interface, package.manifest.compilation
    if compilation is None or compilation.ctx_len <= options.history + 1:
        parser.error(
            f"{options.package} must be compiled, with --ctx-len above {options.history + 1}"
        )
    decoder = package.file("decoder.onnx")
    graphs = make_graphs(decoder, interface)
    graphs = graphs if compilation.quantization else graphs[:-1]  # without quantized products
    graphs = graphs[::2][:2] if options.share else graphs
    copies = [
        [open_session(graph, decoder.parent, options.threads) for graph in graphs]
        for _ in range(options.copies)
    ]
    lines = []
    runs = [(batch, mix) for batch in options.batch for mix in options.mix]
    for batch, mix in track(runs, "timing", console=Console(stderr=True), transient=True):
        values = make_values(interface, batch, compilation.ctx_len, options.history, MIXES[mix])
        bound = [
            [(session, bind(session, interface, values, batch)) for session in copy]
            for copy in copies
        ]
        if options.share:
            lines.append([str(batch), mix, *share(bound, options.steps)])
            continue
        times: list[list[list[float]]] = [[[] for _ in copy] for copy in copies]
        while len(times[0][0]) * options.copies < options.steps:
            for copy, taken in zip(bound, times, strict=True):
                for (session, binding), milliseconds in zip(copy, taken, strict=True):
                    milliseconds += take_turn(session, binding)
        medians = np.array([[np.median(milliseconds) for milliseconds in taken] for taken in times])
        whole, model, _, head, *products = np.median(medians, axis=0)
        sampler, argmax = (medians[:, i] - medians[:, 1] for i in (0, 2))
        figures = [
            f"{whole:.2f}",
            f"{model:.2f}",
            f"{np.median(sampler):.2f}",
            f"{np.median(sampler) / whole:.1%}",
        ]
        figures += [f"{sampler.min():.2f} to {sampler.max():.2f}", f"{np.median(argmax):.2f}"]
        figures.append(f"{1 + np.median(sampler) / head:.3f}")
        figures += [f"{products[0]:.2f}", f"{whole / products[0]:.2f}"] if products else ["", ""]
        lines.append([str(batch), mix, *figures])
    print_table(
        SHARE if options.share else (*HEADER, *MORE), lines, describe_machine(options.threads)
    )


if __name__ == "__main__":
    main()
