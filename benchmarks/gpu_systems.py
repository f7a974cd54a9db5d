"""The models of the GPU benchmark, and the figures of each way to decode with them."""

from __future__ import annotations

import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from gpu_report import BANDWIDTH, HOST_TRANSFORMERS, READS, Rows
from report import median, rotated
from systems import EVERYTHING, FIRST_TIMED, Generator, prompt_ids
from systems import MIXES as FILTERED_MIXES

import qsample
from qsample.package.package import read_package
from qsample.runtime import CausalLM, SamplingParams, load
from qsample.runtime.decode.slots import Slots
from qsample.runtime.output import GenerateOutput
from qsample.runtime.prepare import parameter_row

# Temperature alone is the default of OpenAI's API: the draw is from the whole vocabulary.
PLAIN: Final = "plain temperature"
MIXES: Final = {**FILTERED_MIXES, PLAIN: {"temperature": 1.0}, "everything": EVERYTHING}
FIRST_MIXES: Final = ("greedy", PLAIN, "everything")
EXTREMES: Final = ("greedy", "everything")
EVERY_MIX: Final = "each mix in turn"
ROWS, MORE_ROWS = (1, 32), (4, 16, 64)
PROMPT_TOKENS: Final = 64
PROMPT_LENGTHS: Final = (64, 256, 512)
# Few, because reading a trace takes longer than the run.
TRACED_TOKENS: Final = (9, 25)
BUILD_THREADS: Final = 4
# The tokens of a run over those of the shorter run that it is compared with.
LONGER: Final = 4
# The processors of 32 rows on a host take a tenth of a second.
HOST_TOKENS: Final = 32
ELEMENT_BYTES: Final = 2
NO_CUDA_GRAPH: Final = {"enable_cuda_graph": "0"}

# Rows, the name of a mix, and new tokens of a row → the seconds of a step.
Decode: TypeAlias = Callable[[int, str, int], float]
# The number and the microseconds of each kernel and kind of copy in a run, by its name; and the run's steps.
Trace: TypeAlias = tuple[dict[str, np.ndarray[Any, Any]], int]


def make_once(path: Path, make: Callable[[Path], object]) -> None:
    """Have `make` write to `path`, which exists only if it is complete, unless an earlier run did."""
    if not path.exists():
        unfinished = path.with_name(f"{path.name}.partial")
        shutil.rmtree(unfinished, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        make(unfinished)
        unfinished.rename(path)


def compile_package(checkpoint: Path, path: Path, *, sampler: bool = True, **options: Any) -> None:
    import torch

    torch.set_num_threads(BUILD_THREADS)
    model = qsample.AutoModelForCausalLM.from_pretrained(checkpoint, include_sampler=sampler)
    # Random weights diverge further than trained weights; `verify` says how far.
    model.compile(path, provider="cuda", max_divergence=100, **options)


def params(mix: str, rows: int, new_tokens: int) -> list[SamplingParams]:
    names = [*MIXES] if mix == EVERY_MIX else [mix]
    options = {"max_new_tokens": new_tokens, "eos_token_id": ()}
    return [SamplingParams(**MIXES[names[row % len(names)]], **options) for row in range(rows)]


def generate(
    model: CausalLM, rows: int, mix: str, new_tokens: int, length: int = PROMPT_TOKENS, **how: Any
) -> GenerateOutput:
    """Continue `rows` prompts of `length` tokens. how: further keywords of `CausalLM.generate`."""
    prompts = list(prompt_ids(rows, length, model.interface.vocab_size))
    return model.generate(prompts, params(mix, rows, new_tokens), seed=1, **how)


def generated(model: CausalLM, rows: int, mix: str, new_tokens: int, **how: Any) -> float:
    """What a run of `generate` takes longer than a shorter run, over the difference of their steps, in seconds."""
    short = generate(model, rows, mix, new_tokens // LONGER, **how).timing
    long = generate(model, rows, mix, new_tokens, **how).timing
    return (long.decode_seconds - short.decode_seconds) / (long.steps - short.steps)


def host_transformers(model: CausalLM, rows: int, mix: str, new_tokens: int) -> float:
    """A step with logits on the host, where transformers' processors filter the batch and qsample's sampler draws."""
    from systems.logits_host import TransformersSampler

    sampler = TransformersSampler(MIXES[mix])
    history = prompt_ids(rows, PROMPT_TOKENS, model.interface.vocab_size)
    slots = Slots(model.sessions, rows, model.capacity(PROMPT_TOKENS + new_tokens + 1))
    (drawn,) = params("greedy" if mix == "greedy" else PLAIN, 1, new_tokens + 1)
    parameters = parameter_row(model.interface, drawn, PROMPT_TOKENS, slots.capacity)
    for row, prompt in enumerate(history):
        slots.begin(row, prompt, row, parameters)
        slots.prefill(row, prompt, emit=True)
    if not slots.prepared:
        slots.prepare()
    history = np.hstack([history, slots.read(newest=1).tokens])
    slots.process_logits = lambda _, logits: np.asarray(
        sampler.scores(logits, history, PROMPT_TOKENS), np.float32
    )
    start = time.perf_counter()
    for _ in range(new_tokens):
        slots.decode()
        history = np.hstack([history, slots.read(newest=1).tokens])
    return (time.perf_counter() - start) / new_tokens


def other_library(system: Generator, rows: int, mix: str, new_tokens: int) -> float:
    """A step of another library, which is read after every step."""
    prompts = prompt_ids(rows, PROMPT_TOKENS, system.vocab_size)
    moments, _ = system.run(prompts, new_tokens, MIXES[mix])
    return (moments[-1] - moments[FIRST_TIMED]) / (new_tokens - FIRST_TIMED)


@dataclass(frozen=True)
class Figures:
    """Measures the models of a shape; the methods without arguments are parts of a run.

    Attributes:
        rows: the receiver of the rows.
        folder: the folder of the models; its name is the shape.
        dtype: the dtype of the packages.
        new_tokens: the number of new tokens of a row.
        rounds: the number of measured rounds, after one that warms up.
    """

    rows: Rows
    folder: Path
    dtype: str
    new_tokens: int
    rounds: int

    def captured(self) -> None:
        self._time({"captured": partial(generated, self._load())}, ROWS, FIRST_MIXES)

    def int4(self) -> None:
        self._time({"captured, int4": partial(generated, self._load("int4"))}, ROWS, FIRST_MIXES)

    def uncaptured(self) -> None:
        model = self._load(provider_options=NO_CUDA_GRAPH)
        self._time({"uncaptured": partial(generated, model)}, ROWS, EXTREMES)

    def host(self) -> None:
        model = self._load("host")
        systems: dict[str, Decode] = {"host": partial(generated, model)}
        systems[HOST_TRANSFORMERS] = partial(host_transformers, model)
        replace(self, new_tokens=HOST_TOKENS, rounds=1)._time(systems, ROWS, EXTREMES)

    def reads(self) -> None:
        """Reads after other numbers of steps, into one buffer and two; and the other mixes and rows."""
        model = self._load()
        for every in READS:
            name = f"captured, read every {every}"
            two = partial(generated, model, flush_every=every)
            systems = {name: two, f"{name}, one buffer": partial(two, double_buffering=False)}
            self._time(systems, ROWS, ("greedy",))
        others = [mix for mix in (*MIXES, EVERY_MIX) if mix not in FIRST_MIXES]
        self._time({"captured": partial(generated, model)}, ROWS, others)
        self._time({"captured": partial(generated, model)}, MORE_ROWS, FIRST_MIXES)

    def prompts(self) -> None:
        model = self._load()
        for rows in ROWS:
            for tokens in PROMPT_LENGTHS:
                run = partial(generate, model, rows, "greedy", 2, tokens)
                seconds = [run().timing.prefill_seconds for _ in range(self.rounds + 1)]
                row = {"shape": self.folder.name, "rows": rows, "tokens": tokens}
                self.rows.add("prompts", **row, ms=1e3 * median(seconds[1:]))

    def kernels(self) -> None:
        """Kernels and copies: what a run has more than a shorter run, over the difference of their steps."""
        for package in ("float", "int4"):
            model = self._load(package)
            for rows in ROWS:
                for mix in MIXES:
                    traces = []
                    for tokens in TRACED_TOKENS:
                        run = partial(generate, model, rows, mix, tokens)
                        trace(run)  # captures while CUPTI watches
                        traces.append(trace(run))
                    row = {"shape": self.folder.name, "package": package, "rows": rows, "mix": mix}
                    self.rows.add("kernels", **row, **kernels_of_a_step(*traces))

    def genai(self) -> None:
        """onnxruntime-genai as its builder leaves it, and with its CUDA graph on; weights are links."""
        from systems.genai import Genai

        folder, captured = self.folder / "genai", self.folder / "genai-graph"
        mixes = ("greedy", PLAIN, "top-k 50, top-p 0.95")
        self._time({"genai": partial(other_library, Genai(folder, None))}, ROWS, mixes)
        shutil.rmtree(captured, ignore_errors=True)
        shutil.copytree(folder, captured, copy_function=os.link)
        config = captured / "genai_config.json"
        text, switch = config.read_text(encoding="utf-8"), '"enable_cuda_graph": "{}"'
        if switch.format(0) not in text:
            raise ValueError(f"genai_config.json has no {switch.format(0)} to change")
        config.unlink()
        config.write_text(text.replace(switch.format(0), switch.format(1)), encoding="utf-8")
        self._time(
            {"genai, CUDA graph": partial(other_library, Genai(captured, None))}, ROWS, mixes
        )

    def transformers(self) -> None:
        """`generate` over a static cache, whose step transformers compiles on a GPU."""
        import torch
        from systems.transformers import Transformers

        device = "cuda" if torch.cuda.is_available() else "cpu"
        checkpoint = self.folder / "checkpoint"
        system = Transformers(checkpoint, None, device, self.dtype, cache="static")
        name = "transformers" if device == "cuda" else "transformers, CPU"
        self._time({name: partial(other_library, system)}, ROWS, EXTREMES)

    def _load(self, package: str = "float", **options: Any) -> CausalLM:
        return load(self.folder / package, verify=False, **options)

    def _time(
        self, systems: Mapping[str, Decode], batches: Iterable[int], mixes: Iterable[str]
    ) -> None:
        """Time steps of systems, which take turns."""
        for rows in batches:
            for mix in mixes:
                taken: dict[str, list[float]] = defaultdict(list)
                with self.rows.section(f"{rows} rows, {mix}"):
                    for turn in range(self.rounds + 1):
                        for name in rotated(systems, turn):
                            taken[name].append(systems[name](rows, mix, self.new_tokens))
                    for name in systems:
                        self._add_step(name, rows, mix, median(taken[name][1:]))

    def _add_step(self, system: str, rows: int, mix: str, seconds: float) -> None:
        row = {"shape": self.folder.name, "system": system, "rows": rows, "mix": mix}
        row |= {"ms_per_step": 1e3 * seconds, "tokens_per_second": rows / seconds}
        folder = self.folder / ("int4" if system.endswith("int4") else "float")
        for _, fact in self.rows.read():
            if fact.get("name") == BANDWIDTH and folder.exists():
                floor = self._bytes_of_a_step(folder, rows) / fact["value"]
                row["share_of_the_floor"] = floor / seconds
        self.rows.add("steps", **row)

    def _bytes_of_a_step(self, package: Path, rows: int) -> float:
        """The bytes of the weights, and of the cache with half of the new tokens."""
        caches = read_package(package, verify=False).interface.key_values
        numbers = sum(2 * cache.num_key_value_heads * cache.head_dim for cache in caches)
        tokens = rows * (PROMPT_TOKENS + self.new_tokens / 2)
        return (package / "decoder.onnx.data").stat().st_size + ELEMENT_BYTES * numbers * tokens


def trace(run: Callable[[], GenerateOutput]) -> Trace:
    """CUPTI's trace. Raises RuntimeError if it is empty."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        steps = run().timing.steps
    found = {
        event.key: np.array([event.count, event.self_device_time_total])
        for event in profiler.key_averages()
        if str(event.device_type).endswith("CUDA")
    }
    if not found:
        raise RuntimeError("the trace of the GPU is empty; torch needs CUDA and CUPTI for it")
    return found, steps


def kernels_of_a_step(short: Trace, long: Trace) -> dict[str, Any]:
    """What `long` has more than `short`, over the difference of their steps."""
    steps = long[1] - short[1]
    found = {name: (values - short[0].get(name, 0)) / steps for name, values in long[0].items()}

    def count(start: str) -> float:
        return float(sum(values[0] for name, values in found.items() if name.startswith(start)))

    longest = sorted(found, key=lambda name: -found[name][1])[:5]
    return {
        "kernels": count("") - count("Mem"),
        "copies": count("Mem"),
        "copies_to_the_host": count("Memcpy DtoH"),
        "microseconds": float(sum(values[1] for values in found.values())),
        "longest": "; ".join(f"{name[:50]} {found[name][1]:.0f}" for name in longest),
    }
