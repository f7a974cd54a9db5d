"""Exporting a checkpoint: qsample, onnxruntime-genai's builder, mobius and optimum, with the same random weights.

    python -m venv peers && peers/bin/pip install -r benchmarks/peers.txt
    python -m venv optimum && optimum/bin/pip install 'optimum-onnx[onnxruntime]'   # needs transformers 4
    python benchmarks/export.py --peers-python peers/bin/python --optimum-python optimum/bin/python
    python benchmarks/export.py --shape llama-3.1-8b --system "qsample, int4" "genai, int4" --rounds 1
    python benchmarks/export.py --shape qwen3-0.6b --system "qsample, int4" "genai, int4"   # five minutes
    LD_PRELOAD=$PWD/build/avx2.so python benchmarks/export.py --output docs/benchmarks/export_avx2 ...   # see avx2.c

A checkpoint of random bfloat16 weights is made once for each shape, in --work. Each exporter runs as its users run it:
its own command, in a process of its own, with its own number of threads. The exporters take turns, in another order in
each round, and ratios are taken within a round; the result is deleted before the next turn. Each turn begins with the
checkpoint in the system's page cache, as far as that has room, and with nothing left to be written.

Memory is the anonymous memory of the process, sampled from /proc: its resident pages would count a page of a file once
for each of its mappings. Bytes are those of the process, and the use of the disk that of its results and of its
temporary files: Linux only. An exporter that needs more than --memory or
--limit is stopped, and named. Only qsample compares its result with the model and with the float weights (the stages
"checking", "comparing", "self-test" and "divergence"); optimum runs the graph and the model once on a short prompt.

Results are written after every turn, and a run continues an interrupted run, unless --again is given.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import report
from checkpoints import SHAPES, can_import, make_large_checkpoint, qsample
from report import Kept, Rows, describe_machine, make_parser, markdown, median, one_line, rotated
from rich.console import Console

INTERVAL: Final = 0.1  # seconds between two samples
OWN: Final = "qsample, int4"  # the exporter that the ratios refer to
ROUNDS: Final = {"qwen3-0.6b": 3}  # others: 1
CHECKS: Final = (
    "checking",
    "comparing",
    "self-test",
    "measuring the divergence",
)  # beginnings of stages
GENAI: Final = ("onnxruntime_genai", "onnx_ir", "torch", "transformers")
# Distributions whose versions the page names.
DISTRIBUTIONS: Final = (
    "qsample",
    "onnxruntime-genai",
    "mobius-onnx",
    "optimum-onnx",
    "torch",
    "transformers",
)


@dataclass(frozen=True)
class Exporter:
    """How an exporter is run.

    Attributes:
        python: the option that names its interpreter; "" = this Python.
        modules: that the interpreter must have.
        weights: their dtype in the result.
        command: interpreter, checkpoint, folder → the command line.
    """

    python: str
    modules: tuple[str, ...]
    weights: str
    command: Callable[[str, Path, Path], list[str]]


def _genai(precision: str) -> Callable[[str, Path, Path], list[str]]:
    def command(python: str, checkpoint: Path, out: Path) -> list[str]:
        line = [
            python,
            "-m",
            "onnxruntime_genai.models.builder",
            "-i",
            checkpoint,
            "-o",
            out,
            "-p",
            precision,
        ]
        line += ["-e", "cpu", "-c", out / "cache"]
        more = (
            ["--extra_options", "block_size=32", "accuracy_level=4"] if precision == "int4" else []
        )
        return [*map(str, line), *more]

    return command


def _qsample(*arguments: str) -> Callable[[str, Path, Path], list[str]]:
    verb, *options = arguments
    return lambda _, checkpoint, out: qsample(verb, checkpoint, out, "--json", *options)


def _mobius(dtype: str) -> Callable[[str, Path, Path], list[str]]:
    code = "import sys; from mobius.__main__ import main; sys.exit(main())"
    return lambda python, checkpoint, out: [
        *(python, "-c", code, "build", "--config", str(checkpoint), "--dtype", dtype, str(out))
    ]


def _optimum(python: str, checkpoint: Path, out: Path) -> list[str]:
    code = "from optimum.commands.optimum_cli import main; main()"
    line = [
        python,
        "-c",
        code,
        "export",
        "onnx",
        "-m",
        str(checkpoint),
        "--task",
        "text-generation-with-past",
    ]
    return [*line, "--dtype", "fp32", str(out)]


# Random weights diverge further than trained weights.
INT4: Final = ("--weights", "int4", "--ctx-len", "2048", "--max-divergence", "100")
EXPORTERS: Final = {
    "qsample, portable": Exporter("", (), "bfloat16", _qsample("export")),
    OWN: Exporter("", (), "int4", _qsample("compile", *INT4)),
    "genai, float32": Exporter("peers_python", GENAI, "float32", _genai("fp32")),
    "genai, int4": Exporter("peers_python", GENAI, "int4", _genai("int4")),
    "mobius, bfloat16": Exporter("peers_python", ("mobius",), "bfloat16", _mobius("bf16")),
    "mobius, float32": Exporter("peers_python", ("mobius",), "float32", _mobius("f32")),
    "optimum, float32": Exporter(
        "optimum_python", ("optimum.exporters.onnx",), "float32", _optimum
    ),
}


def measure(command: list[str], log: Path, *, limit: float, memory: float) -> dict[str, Any]:
    """Run an exporter, with its messages in `log`, its temporary files and its result in the folder of `log`.

    Args:
        command: its command line.
        log: a file.
        limit: seconds after which it is stopped.
        memory: bytes of anonymous memory after which it is stopped.

    Returns:
        seconds, cpu_seconds; peak_anonymous, peak_disk and written, in bytes; stdout.

    Raises:
        RuntimeError: It failed or was stopped; the message is a line.
    """
    left_out = {"PYTHONDONTWRITEBYTECODE"}  # installed packages are compiled
    if command[0] != sys.executable:  # another interpreter has its own packages
        left_out.add("PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"HF_HUB_OFFLINE": "1", "TMPDIR": str(log.parent)}
    peak, stopped, written, output = 0, "", 0, log.with_suffix(".out")
    before = disk = disk_bytes(log.parent)
    with log.open("w", encoding="utf-8") as errors, output.open("w") as results:
        begun = time.perf_counter()
        process = subprocess.Popen(command, stdout=results, stderr=errors, env=environment)
        try:
            # The process stays until it is waited for, so that its last count of bytes can be read.
            while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
                peak = max(
                    peak, _figures(process.pid, "status", ("RssAnon",)).get("RssAnon", 0) * 1024
                )
                disk = max(disk, disk_bytes(log.parent))
                if peak > memory:
                    stopped = f"needs more than {memory / 1e9:.0f} GB of memory"
                if time.perf_counter() - begun > limit:
                    stopped = f"takes more than {limit:.0f} s"
                if stopped:
                    process.kill()
                time.sleep(INTERVAL)
            seconds = time.perf_counter() - begun
            written = _figures(process.pid, "io", ("write_bytes",)).get("write_bytes", 0)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            if process.returncode is None:
                process.kill()
                process.wait()
    if stopped or process.returncode:
        said = [
            line
            for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
            if line.strip()
        ]
        raise RuntimeError(
            stopped or (said[-1].strip() if said else f"ended with {process.returncode}")
        )
    return {
        "seconds": seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_anonymous": peak,
        "peak_disk": disk - before,
        "written": written,
        "stdout": output.read_text(errors="replace"),
    }


def disk_bytes(folder: Path) -> int:
    """The disk use of the files below `folder`."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # deleted meanwhile
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
    return total


def _figures(process: int, file: str, names: Iterable[str]) -> dict[str, int]:
    """The numbers in the lines of /proc/PROCESS/FILE that begin with `names`; those that it lacks are left out."""
    try:
        lines = Path(f"/proc/{process}/{file}").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    fields = {name: words.split() for name, _, words in (line.partition(":") for line in lines)}
    return {name: int(fields[name][0]) for name in names if fields.get(name)}


def take_turn(name: str, shape: str, options: argparse.Namespace) -> dict[str, Any]:
    """An export of `shape` by the exporter `name`: its figures, with the bytes of the result and qsample's stages."""
    exporter, folder = EXPORTERS[name], options.work / shape
    checkpoint, out = folder / "checkpoint", folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    for file in checkpoint.glob("*.safetensors"):
        with file.open("rb") as opened:
            while opened.read(1 << 24):
                pass
    command = exporter.command(_python(exporter, options), checkpoint.absolute(), out.absolute())
    try:
        log = folder / f"{name.replace(', ', '-')}.log"
        figures = measure(command, log, limit=options.limit, memory=1e9 * options.memory)
        stdout = figures.pop("stdout")
        shutil.rmtree(out / "cache", ignore_errors=True)  # of genai's builder
        figures["bytes"] = disk_bytes(out)
        if not exporter.python:
            figures["stages"] = {
                cost["stage"]: cost["seconds"] for cost in json.loads(stdout)["timing"]
            }
    finally:
        shutil.rmtree(out, ignore_errors=True)
    return figures


def _python(exporter: Exporter, options: argparse.Namespace) -> str:
    return getattr(options, exporter.python) if exporter.python else sys.executable


def versions(names: Iterable[str], options: argparse.Namespace) -> dict[str, str]:
    """Distribution → version, of each interpreter's distributions in DISTRIBUTIONS, "torch" and the like in each."""
    code = (
        "import importlib.metadata as m, json\ndef v(n):\n try: return m.version(n)\n except m.PackageNotFoundError: "
        f"pass\nprint(json.dumps({{n: v(n) for n in {DISTRIBUTIONS}}}))"
    )
    found: dict[str, set[str]] = {}
    for python in {_python(EXPORTERS[name], options) for name in names}:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
        for name, version in json.loads(done.stdout).items():
            if version:
                found.setdefault(name, set()).add(version)
    return {name: " and ".join(sorted(found[name])) for name in DISTRIBUTIONS if name in found}


def run_shape(shape: str, options: argparse.Namespace, results: Kept, console: Console) -> None:
    """Let the exporters take turns on a shape; those that fail are recorded, and leave."""
    with console.status(f"{shape}: a checkpoint of random weights"):
        make_large_checkpoint(shape, options.work / shape / "checkpoint")
    known = results.data["shapes"].setdefault(shape, {"turns": {}, "missing": {}})
    if options.again:
        known |= {"turns": {}, "missing": {}}
    running = []
    for name in options.system:
        missing = can_import(_python(EXPORTERS[name], options), list(EXPORTERS[name].modules))
        known["missing"].pop(name, None)
        if missing is None:
            running.append(name)
        elif not known["turns"].get(name):
            known["missing"][name] = one_line(missing)
            console.print(f"{shape} without {name}: {missing}", highlight=False)
    known["versions"] = versions(running, options)
    for turn in range(options.rounds or ROUNDS.get(shape, 1)):
        for name in rotated(running, turn):
            turns = known["turns"].setdefault(name, [])
            if len(turns) > turn or name in known["missing"]:
                continue
            with console.status(f"{shape}, round {turn + 1}: {name}"):
                try:
                    turns.append(take_turn(name, shape, options))
                    sizes = f"{turns[-1]['peak_anonymous'] / 1e9:.1f} GB of memory, {turns[-1]['peak_disk'] / 1e9:.1f}"
                    console.print(
                        f"{shape}, {name}: {turns[-1]['seconds']:.1f} s, {sizes} of disk",
                        highlight=False,
                    )
                except RuntimeError as error:
                    if name == OWN:
                        raise
                    known["missing"][name] = one_line(str(error))
                    console.print(f"{shape} without {name}: {error}", highlight=False)
            results.save()


def table_rows(known: dict[str, Any]) -> Rows:
    """A line for each exporter: medians of the rounds, and the multiple of qsample's time, taken within a round."""
    rows = []
    for name in EXPORTERS:
        if not (turns := known["turns"].get(name)):
            continue
        seconds, cpu = (median([turn[key] for turn in turns]) for key in ("seconds", "cpu_seconds"))
        keys = ("peak_anonymous", "written", "bytes")
        sizes = [f"{median([turn[key] for turn in turns]) / 1e9:.2f}" for key in keys]
        pairs = zip(turns, known["turns"].get(OWN, []), strict=False)
        ratios = [turn["seconds"] / own["seconds"] for turn, own in pairs]
        ratio = f"{median(ratios):.2f}x" if ratios else ""
        rows.append([name, EXPORTERS[name].weights, f"{seconds:.1f}", ratio, f"{cpu:.1f}", *sizes])
    header = ["exporter", "weights", "seconds", f"of {OWN}", "CPU seconds"]
    return [*header, "anonymous memory, GB", "written, GB", "result, GB"], rows


def stage_rows(known: dict[str, Any]) -> Rows:
    """The stages of qsample's exporters: medians of the seconds, and the share of those that check the result."""
    own = [
        name
        for name in EXPORTERS
        if known["turns"].get(name) and "stages" in known["turns"][name][0]
    ]
    columns = {name: _stages(known["turns"][name]) for name in own}
    longest_first = sorted(
        columns.values(), key=len, reverse=True
    )  # it has the others' stages in their order
    names = list(dict.fromkeys(stage for column in longest_first for stage in column))
    rows = [
        [stage, *(f"{columns[name][stage]:.1f}" if stage in columns[name] else "" for name in own)]
        for stage in names
    ]
    for label, checks in (("checks together", True), ("without the checks", False)):
        sums = [
            sum(
                seconds
                for stage, seconds in columns[name].items()
                if stage.startswith(CHECKS) == checks
            )
            for name in own
        ]
        rows.append([f"**{label}**", *(f"**{seconds:.1f}**" for seconds in sums)])
    return ["stage, seconds", *own], rows


def _stages(turns: list[dict[str, Any]]) -> dict[str, float]:
    """Stage → median of its seconds."""
    return {
        stage: median([turn["stages"][stage] for turn in turns]) for stage in turns[0]["stages"]
    }


def write(data: dict[str, Any], output: Path) -> None:
    """Write the page and the plot."""
    lines = [
        "# Exporting a checkpoint",
        "",
        f"{data['machine']}. Made by `python benchmarks/export.py`, whose docstring describes the method.",
        "A checkpoint of random bfloat16 weights becomes an ONNX model. Medians of the rounds; the multiple of",
        "qsample's time is the median of the ratios within each round. Memory is the most of the process, without the",
        "pages of mapped files, which the system takes back if others need the memory.",
        "",
    ]
    shapes = {shape: known for shape, known in data["shapes"].items() if known["turns"].get(OWN)}
    for shape, known in shapes.items():
        lines += [f"## {shape}", "", *markdown(*table_rows(known)), ""]
        missing = {name: one_line(reason).rstrip(".") for name, reason in known["missing"].items()}
        lines += [f"{name} is missing: {reason}.\n" for name, reason in missing.items()]
        measured = ", ".join(f"{name} {version}" for name, version in known["versions"].items())
        rounds = report.count(len(known["turns"][OWN]), "round")
        lines += [f"{rounds}, {measured}.", "", *markdown(*stage_rows(known)), ""]
    if shapes:
        lines += [
            "Only qsample runs these checks: the graph is compared with the model in transformers, the compiled graph",
            "with the portable graph, and the distributions of quantized weights with those of the float weights.",
            "",
            f"![Seconds by stage]({output.name}.png)",
            "",
        ]
        plot(data, output.with_suffix(".png"))
    output.with_suffix(".md").write_text("\n".join(lines))


def plot(data: dict[str, Any], path: Path) -> None:
    """A panel for each shape, a bar for each exporter; qsample's are stacked by stage, the checks hatched and pale."""
    shapes = {shape: known for shape, known in data["shapes"].items() if known["turns"].get(OWN)}
    names = [
        name for name in EXPORTERS if any(known["turns"].get(name) for known in shapes.values())
    ]
    stages = list(
        dict.fromkeys(s for known in shapes.values() for name in names for s in _shown(known, name))
    )
    figure, axes = report.new_figure(len(shapes), 1, (10, 0.7 + 0.45 * len(names)))
    for axis, (shape, known) in zip(axes[:, 0], shapes.items(), strict=True):
        for place, name in enumerate(names):
            if not known["turns"].get(name):
                axis.text(
                    0,
                    place,
                    f" {known['missing'].get(name, report.MISSING)}",
                    va="center",
                    color="#555555",
                )
            left, shown = 0.0, _shown(known, name)
            for stage, seconds in shown.items():
                look = {"color": _shade(stages.index(stage), len(stages)), "label": stage}
                if stage.startswith(CHECKS):
                    look |= {"hatch": "///"}
                if len(shown) == 1:
                    look = {"color": report.colour(name)}
                axis.barh(place, seconds, left=left, edgecolor="white", linewidth=0.8, **look)
                left += seconds
        axis.set(title=shape, yticks=range(len(names)), ylim=(len(names) - 0.5, -0.5))
        axis.set_yticklabels(names)
        axis.grid(visible=False, axis="y")
    axes[-1, 0].set_xlabel("seconds; hatched: checks, which only qsample runs")
    report.save_figure(figure, path)


def _shown(known: dict[str, Any], name: str) -> dict[str, float]:
    """The seconds of an exporter's stages and of the rest; of an exporter without stages, of the whole."""
    if not (turns := known["turns"].get(name)):
        return {}
    stages = _stages(turns) if "stages" in turns[0] else {}
    rest = median([turn["seconds"] for turn in turns]) - sum(stages.values())
    return {**stages, "starting" if stages else name: max(rest, 0.0)}


def _shade(index: int, number: int) -> Any:
    """Of qsample's colour: neighbours differ."""
    from matplotlib.colors import to_rgb

    strength = (1.0, 0.55, 0.78, 0.35)[index % 4]
    return tuple(
        1 - (1 - part) * strength * (1 - 0.25 * index / number) for part in to_rgb(report.QSAMPLE)
    )


def main() -> None:
    parser = make_parser(__doc__, "export", work="build/export", peers=True, again=True)
    parser.add_argument(
        "--shape", nargs="+", choices=list(SHAPES), default=["qwen3-0.6b", "qwen3-4b"]
    )
    parser.add_argument("--system", nargs="+", choices=list(EXPORTERS), default=list(EXPORTERS))
    parser.add_argument(
        "--optimum-python", default=sys.executable, help="a Python with optimum-onnx"
    )
    parser.add_argument(
        "--rounds", type=int, help="turns of each exporter; default: 3 for qwen3-0.6b, otherwise 1"
    )
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds of a turn")
    parser.add_argument(
        "--memory", type=float, default=_available(), help="anonymous memory of an exporter, GB"
    )
    options, console = parser.parse_args(), Console(stderr=True)
    data = {"machine": describe_machine(os.cpu_count() or 1), "shapes": {}}
    results = Kept(options.output.with_suffix(".json"), data)
    for shape in options.shape:
        run_shape(shape, options, results, console)
    results.save()
    write(results.data, options.output)


def _available() -> float:
    """Nine tenths of the memory that Linux has available, in GB; elsewhere 1,000."""
    file = Path("/proc/meminfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    kilobytes = next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), 0)
    return round(0.9 * kilobytes * 1024 / 1e9, 1) or 1000.0


if __name__ == "__main__":
    main()
