"""What the sampler costs in a decode step: a package's graph, in turn with the same graph cut off at its logits.

    qsample export MODEL exported && qsample compile exported compiled --weights int4 --ctx-len 2048
    python benchmarks/sampler_share.py compiled --batch 1 4

Both run in one process, one step each in turn, over the same cache, in the middle of a generation: HISTORY tokens a
row. Every state is bound in place but `lengths`, so that every step is the same. The difference of the medians is the
sampler's; it is small beside the noise of a shared machine, so let it run long, and look at the spread.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from mixes import EVERYTHING
from mixes import MIXES as PLAIN_MIXES
from rich.console import Console
from rich.progress import track
from rich.table import Table

from qsample.contract import BATCH, BIASES, CAPACITY, SEQUENCE, STOPS, Interface
from qsample.exporters.divergence import logits_graph
from qsample.package import read_package

HISTORY = 1024
MIXES: dict[str, dict[str, float]] = {
    **PLAIN_MIXES,
    "everything on": EVERYTHING,
    "temperature alone": {"temperature": 0.8},
}


def open_sessions(decoder: Path, interface: Interface, threads: int) -> tuple[ort.InferenceSession, ...]:
    """The graph as it is, and cut off at its logits."""

    def options() -> ort.SessionOptions:
        made = ort.SessionOptions()
        made.intra_op_num_threads = threads
        made.log_severity_level = 3
        # Two idle pools of spinning threads would take the cores from the graph that runs.
        made.add_session_config_entry("session.force_spinning_stop", "1")
        return made

    cut_options = options()
    cut_options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(decoder.parent))
    cut = ir.to_proto(logits_graph(ir.load(decoder), interface)).SerializeToString()
    return ort.InferenceSession(decoder, options()), ort.InferenceSession(cut, cut_options)


def bind(session: ort.InferenceSession, interface: Interface, values: dict[str, ort.OrtValue]) -> ort.IOBinding:
    retained = {output: state for state, output in interface.decoder.retained.items() if state != "lengths"}
    binding = session.io_binding()
    for node in session.get_inputs():
        binding.bind_ortvalue_input(node.name, values[node.name])
    for node in session.get_outputs():
        if node.name in retained:
            binding.bind_ortvalue_output(node.name, values[retained[node.name]])
        else:
            binding.bind_output(node.name)
    return binding


def make_values(
    interface: Interface, batch: int, ctx_len: int, parameters: dict[str, float]
) -> dict[str, ort.OrtValue]:
    """Every input and state of a decode step."""
    rng = np.random.default_rng(0)
    sizes = {**interface.sizes, BATCH: batch, SEQUENCE: 1, CAPACITY: ctx_len, STOPS: 2, BIASES: 1}
    given: dict[str, object] = {"lengths": HISTORY, "input_lengths": 1, "emit": True, "max_length": 2**30, **parameters}
    given["tokens"] = rng.integers(0, interface.vocab_size, (batch, ctx_len))
    given["noise"] = rng.random((batch, ctx_len))
    result = {}
    for spec in (*interface.decoder.inputs, *interface.decoder.states):
        array = np.empty(spec.shape(sizes), dtype=spec.dtype)
        array[...] = given.get(spec.name, spec.off if spec.off is not None else 0)
        result[spec.name] = ort.OrtValue.ortvalue_from_numpy(array)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, help="a package compiled for cpu, sampler included")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=150, help="timed steps of each graph and mix")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    options = parser.parse_args()
    package = read_package(options.package, verify=False)
    compilation = package.manifest.compilation
    if compilation is None or compilation.ctx_len <= HISTORY + 1:
        parser.error(f"{options.package} must be compiled, with --ctx-len above {HISTORY + 1}")
    sessions = open_sessions(package.file("decoder.onnx"), package.interface, options.threads)

    table = Table("rows", "sampling", "step, ms", "up to the logits, ms", "sampler, ms", "share", "spread of a step")
    console = Console()
    runs = [(batch, mix) for batch in options.batch for mix in MIXES]
    for batch, mix in track(runs, "timing", console=Console(stderr=True), transient=True):
        values = make_values(package.interface, batch, compilation.ctx_len, MIXES[mix])
        bindings = [bind(session, package.interface, values) for session in sessions]
        times: list[list[float]] = [[], []]
        for step in range(options.steps + 5):
            for session, binding, taken in zip(sessions, bindings, times, strict=True):
                start = time.perf_counter()
                session.run_with_iobinding(binding)
                if step >= 5:
                    taken.append(1e3 * (time.perf_counter() - start))
        whole, model = (float(np.median(taken)) for taken in times)
        low, high = np.percentile(times[0], [10, 90])
        share = f"{(whole - model) / whole:.1%}"
        table.add_row(
            str(batch), mix, f"{whole:.2f}", f"{model:.2f}", f"{whole - model:.2f}", share, f"{low:.1f}-{high:.1f}"
        )
    console.print(table)


if __name__ == "__main__":
    main()
