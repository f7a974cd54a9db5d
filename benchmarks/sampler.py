"""The sampler graph alone, over vocabularies, batches and parameter mixes, compared with ArgMax and a full sort.

    python benchmarks/sampler.py                                      # the whole sweep, to docs/benchmarks/sampler.*
    python benchmarks/sampler.py --vocab 151936 --batch 1 8 --output /tmp/sampler

The columns are the mixes of MIXES and two references: ONNX Runtime's ArgMax over the vocabulary, and naive sampling by
a full sort with a cumulative sum. All states are bound in place, as in the runtime. Figures are medians; the graphs of
a vocabulary and batch take turns, so that a slow moment of the machine affects all of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import report
from report import (
    Rows,
    count,
    describe_machine,
    find,
    make_parser,
    markdown,
    median,
    print_table,
    write_json,
)
from rich.console import Console
from rich.progress import track
from systems import EVERYTHING

from qsample.contract.interface import Interface
from qsample.sampler import build_sampler

Results = list[dict[str, Any]]
HISTORY = 1024
CAPACITY = 2048
FLAT, PEAKED = "flat", "peaked"
MIXES: dict[str, tuple[str, dict[str, float]]] = {
    "greedy": (PEAKED, {"temperature": 0}),
    "top-k 50": (PEAKED, {"top_k": 50}),
    "complete": (PEAKED, EVERYTHING | {"presence_penalty": 0.1}),
    "top-p, peaked": (PEAKED, {"top_p": 0.95}),
    "top-p, flat": (FLAT, {"top_p": 0.9}),
    "temperature": (PEAKED, {"temperature": 0.9}),
}
ARGMAX, SORT = "ArgMax", "sort"
OFF = {
    "temperature": 1.0,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "max_length": 2**30,
    "stop_ids": -1,
}


# The reference for greedy decoding; and for random decoding: sort all tokens, cut the cumulative sum, draw.
ARGMAX_GRAPH = """
<ir_version: 10, opset_import: ["" : 20]>
argmax (float[B, V] logits) => (int64[B] ids) { ids = ArgMax <axis = -1, keepdims = 0> (logits) }
"""
SORT_GRAPH = """
<ir_version: 10, opset_import: ["" : 20]>
sort (float[B, V] logits, float[B, 1] top_p, float[B, 1] uniform) => (int64[B, 1] drawn_ids) {
  shape = Shape (logits)
  one = Constant <value_ints = [1]> ()
  size = Gather (shape, one)
  values, ids = TopK (logits, size)
  probs = Softmax <axis = -1> (values)
  axis = Constant <value_int = 1> ()
  cumulative = CumSum (probs, axis)
  before = Sub (cumulative, probs)
  inside = Less (before, top_p)
  zero = Constant <value_float = 0.0> ()
  cut = Where (inside, probs, zero)
  kept = CumSum (cut, axis)
  total = ReduceMax (kept, one)
  drawn = Mul (uniform, total)
  passed = LessOrEqual (kept, drawn)
  passed_int = Cast <to = 7> (passed)
  rank = ReduceSum (passed_int, one)
  last = Sub (size, one)
  place = Min (rank, last)
  drawn_ids = GatherElements <axis = 1> (ids, place)
}
"""


def make_session(model: ir.Model, threads: int, folder: Path) -> ort.InferenceSession:
    path = folder / f"{id(model)}.onnx"
    ir.save(model, path)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return ort.InferenceSession(path, options)


def make_logits(kind: str, batch: int, vocab: int) -> np.ndarray:
    """[B, V] float32; flat: a standard deviation of 1, as from random weights; peaked: the best token has about half of
    the mass."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(batch, vocab)).astype(np.float32)
    if kind == PEAKED:
        logits *= 2
        for row in range(batch):
            best = rng.choice(vocab, 30, replace=False)
            logits[row, best] = 17 - 0.5 * np.arange(30)
    return logits


def sampler_call(
    session: ort.InferenceSession, interface: Interface, logits: np.ndarray, mix: dict[str, float]
) -> Callable[[], None]:
    """A decode step: a token per row after HISTORY tokens, with every state bound in place."""
    batch, vocab = logits.shape
    rng = np.random.default_rng(1)
    sizes = interface.sizes | {"B": batch, "S": 1, "T": CAPACITY, "E": 2}
    values = {
        "logits": logits,
        "emit": True,
        "input_lengths": 1,
        "lengths": HISTORY,
        "noise": rng.random((batch, CAPACITY)),
    }
    values |= OFF | {"tokens": rng.integers(0, vocab, (batch, CAPACITY))} | mix
    binding = session.io_binding()
    buffers = {}
    for spec in (*interface.sampler.inputs, *interface.sampler.states):
        array = np.broadcast_to(np.asarray(values.get(spec.name, 0)), spec.shape(sizes)).astype(
            spec.dtype
        )
        buffers[spec.name] = ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))
        binding.bind_ortvalue_input(spec.name, buffers[spec.name])
    # `lengths` is not bound in place, so that every repetition is the same step.
    for state, output in interface.sampler.retained.items():
        if state == "lengths":
            binding.bind_output(output)
        else:
            binding.bind_ortvalue_output(output, buffers[state])
    for spec in interface.sampler.outputs:
        if spec.name == "adjusted_logits":
            binding.bind_ortvalue_output(spec.name, buffers["logits"])
        else:
            binding.bind_output(spec.name)
    return lambda: session.run_with_iobinding(binding)


def plain_call(session: ort.InferenceSession, arrays: list[np.ndarray]) -> Callable[[], None]:
    binding = session.io_binding()
    for node, array in zip(session.get_inputs(), arrays, strict=True):
        binding.bind_cpu_input(node.name, array)
    for node in session.get_outputs():
        binding.bind_output(node.name)
    return lambda: session.run_with_iobinding(binding)


def medians(calls: dict[str, Callable[[], None]], seconds: float) -> dict[str, float]:
    """Median milliseconds of each call; the calls take turns until each has had its share of `seconds`."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    spent = dict.fromkeys(calls, 0.0)
    while any(spent[name] < seconds for name in calls):
        for name, call in calls.items():
            for _ in range(10):
                if spent[name] >= seconds and len(samples[name]) >= 5:
                    break
                start = time.perf_counter()
                call()
                elapsed = time.perf_counter() - start
                samples[name].append(elapsed * 1e3)
                spent[name] += elapsed
    return {name: median(values) for name, values in samples.items()}


def measure(
    vocab: int, batches: list[int], mixes: list[str], threads: int, seconds: float, folder: Path
) -> Results:
    interface = Interface(vocab, ())
    sampler = make_session(build_sampler(interface, 0), threads, folder)
    argmax, naive = (
        make_session(ir.from_onnx_text(text), threads, folder)
        for text in (ARGMAX_GRAPH, SORT_GRAPH)
    )
    results: Results = []
    for batch in batches:
        logits = {kind: make_logits(kind, batch, vocab) for kind in (PEAKED, FLAT)}
        calls = {ARGMAX: plain_call(argmax, [logits[PEAKED]])}
        for name in mixes:
            kind, mix = MIXES[name]
            calls[name] = sampler_call(sampler, interface, logits[kind], mix)
        columns = [np.full((batch, 1), value, np.float32) for value in (0.9, 0.5)]
        calls[SORT] = plain_call(naive, [logits[FLAT], *columns])
        for name, milliseconds in medians(calls, seconds).items():
            results.append({"vocab": vocab, "batch": batch, "name": name, "ms": milliseconds})
    return results


def as_rows(results: Results) -> Rows:
    """A line per vocabulary and batch: milliseconds, and multiples of ArgMax."""
    names, rows = list(dict.fromkeys(result["name"] for result in results)), []
    for vocab, batch in dict.fromkeys((result["vocab"], result["batch"]) for result in results):
        times = [
            find(results, vocab=vocab, batch=batch, name=name)["ms"] for name in (ARGMAX, *names)
        ]  # type: ignore[index]
        rows.append(
            [
                f"{vocab:,}",
                str(batch),
                *(f"{time:.3f} ({time / times[0]:.2f}x)" for time in times[1:]),
            ]
        )
    return ["V", "B", *names], rows


def write(data: dict[str, Any], output: Path) -> None:
    """Print the table, and write the page and the plot."""
    header, rows = as_rows(data["results"])
    print_table(header, rows, "Sampler, ms per step (multiple of ArgMax)")
    lines = [
        "# Sampler benchmark",
        "",
        f"Milliseconds per step and multiples of ArgMax over V; medians of a single run. {data['machine']}.",
        "Made by `python benchmarks/sampler.py`, whose docstring describes the columns.",
        "",
        *markdown(header, rows),
        "",
        f"![Milliseconds a step]({output.name}.png)",
        "",
    ]
    output.with_suffix(".md").write_text("\n".join(lines))
    plot(data, output.with_suffix(".png"))


def plot(data: dict[str, Any], path: Path) -> None:
    """Milliseconds by vocabulary: the sampler's parameters in shades of qsample's colour, other operators in black."""
    from matplotlib.colors import to_rgb

    results = data["results"]
    batches = sorted({result["batch"] for result in results})
    names = list(dict.fromkeys(result["name"] for result in results))
    own = [name for name in names if name not in (ARGMAX, SORT)]
    ends = (to_rgb("#0a2a52"), to_rgb("#7fb8e6"))
    figure, axes = report.new_figure(1, len(batches), (3.4, 3.8), sharex=True, sharey=True)
    for axis, batch in zip(axes[0], batches, strict=True):
        for name in names:
            shown = [
                result for result in results if (result["batch"], result["name"]) == (batch, name)
            ]
            look: dict[str, Any] = {"color": "black", "linestyle": "--" if name == ARGMAX else ":"}
            if name in own:
                place = own.index(name)
                share = place / max(len(own) - 1, 1)
                shade = tuple(
                    (1 - share) * dark + share * light for dark, light in zip(*ends, strict=True)
                )
                look = {"color": shade, "marker": "os^Dv*<>"[place % 8], "markersize": 5}
            axis.plot(
                [one["vocab"] / 1000 for one in shown],
                [one["ms"] for one in shown],
                label=name,
                **look,
            )
        axis.set(title=count(batch, "row"), xlabel="vocabulary, thousands", yscale="log")
    axes[0][0].set_ylabel("ms a step")
    report.save_figure(figure, path)


def main() -> None:
    parser = make_parser(__doc__, "sampler", threads=2)
    parser.add_argument("--vocab", type=int, nargs="+", default=[32000, 128256, 151936, 262144])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--mix", nargs="+", choices=list(MIXES), default=list(MIXES))
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="measuring time per graph, vocabulary and batch"
    )
    options, results = parser.parse_args(), Results()
    with TemporaryDirectory() as folder:
        for vocab in track(
            options.vocab, "vocabularies", console=Console(stderr=True), transient=True
        ):
            results += measure(
                vocab, options.batch, options.mix, options.threads, options.seconds, Path(folder)
            )
    # Other work delays graphs that use both threads, but not the single-threaded ArgMax.
    load = f"load average {os.getloadavg()[1]:.1f}"
    machine = f"{describe_machine(options.threads)}, onnxruntime {ort.__version__}, {load}"
    data = {"machine": machine, "results": results}
    write_json(options.output.with_suffix(".json"), data)
    write(data, options.output)


if __name__ == "__main__":
    main()
