"""A system under a load of requests; started by `serving.py`, with the Python that has the system.

    python benchmarks/serving_worker.py SYSTEM MODEL LOAD OUT --threads 2 --slots 8

LOAD is JSON with `[arrival in seconds, prompt tokens, new tokens]` per request. OUT is JSON with the number of runs of
the graph and, for each request, the moments of its tokens in seconds since its arrival. It needs the system and NumPy.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from decode_worker import WatchedSession

SAMPLING = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}
Load = list[tuple[float, int, int]]
Prompts = list[np.ndarray[Any, np.dtype[np.int64]]]
Moments = list[list[float]]
Measured = tuple[int, Moments]  # runs of the graph, prompts included; moments of each request's tokens


def make_prompts(load: Load, vocab_size: int) -> Prompts:
    """The same random ids for every system, without special ids."""
    generator = np.random.default_rng(0)
    return [generator.integers(3, vocab_size, count) for _, count, _ in load]


def load_package(folder: Path, threads: int) -> Any:
    """Load a package; `sessions.decoder.runs` counts the runs of its graph."""
    from qsample.runtime import load

    model = load(folder, intra_op_num_threads=threads, verify=False)
    model.sessions = replace(model.sessions, decoder=WatchedSession(model.sessions.decoder))
    return model


def continuous(folder: Path, load: Load, threads: int, slots: int) -> Measured:
    """The engine: a request joins as soon as a slot is free."""
    from qsample.runtime import Engine, SamplingParams

    model = load_package(folder, threads)
    prompts = make_prompts(load, model.interface.vocab_size)
    requests = []
    with Engine(model, slots=slots, max_waiting=len(load)) as engine:
        warm_up = SamplingParams(max_new_tokens=4, eos_token_id=())
        for request in [engine.add_request(prompts[0], warm_up) for _ in range(slots)]:
            request.result()
        before = model.sessions.decoder.runs
        start = time.perf_counter()
        for index, (arrival, _, new_tokens) in enumerate(load):
            time.sleep(max(0.0, start + arrival - time.perf_counter()))
            params = SamplingParams(**SAMPLING, max_new_tokens=new_tokens, eos_token_id=(), seed=index)
            requests.append(engine.add_request(prompts[index], params))
        moments = [[delta.seconds for delta in request if delta.token_ids] for request in requests]
    return model.sessions.decoder.runs - before, moments


def static(folder: Path, load: Load, threads: int, slots: int) -> Measured:
    """The same graph, slots and loop, but a batch begins only after the previous batch has ended."""
    from qsample.runtime import SamplingParams
    from qsample.runtime.call import Call
    from qsample.runtime.decode.loop import DecodeLoop
    from qsample.runtime.decode.scheduler import Scheduler, SchedulerConfig
    from qsample.runtime.decode.slots import Slots
    from qsample.runtime.sequence import Sequence

    model = load_package(folder, threads)
    capacity = model.capacity(4096)
    prompts = make_prompts(load, model.interface.vocab_size)

    def make(index: int, new_tokens: int) -> Sequence:
        params = SamplingParams(**SAMPLING, max_new_tokens=new_tokens, eos_token_id=())
        sequences, _ = model.prepare(Call(inputs=[prompts[index]], params=params, seed=index), capacity)
        return sequences[0]

    came: dict[Sequence, list[float]] = {}

    def deliver(sequence: Sequence) -> None:
        came[sequence] += [time.perf_counter()] * (len(sequence.sampled) - len(came[sequence]))

    def run(sequences: list[Sequence]) -> None:
        for sequence in sequences:
            came[sequence] = []
            loop.add(sequence)
        while loop.busy:
            loop.step()

    scheduler = Scheduler(slots, SchedulerConfig.of(model.sessions, interleave=False))
    with DecodeLoop(Slots(model.sessions, slots, capacity), scheduler, deliver, double_buffering=True) as loop:
        run([make(0, 4) for _ in range(slots)])
        sequences = [make(index, new_tokens) for index, (_, _, new_tokens) in enumerate(load)]
        before = model.sessions.decoder.runs
        start = time.perf_counter()
        in_batches(load, slots, start, lambda first, last: run(sequences[first:last]))
    moments = [
        [moment - start - arrival for moment in came[sequence]]
        for sequence, (arrival, _, _) in zip(sequences, load, strict=True)
    ]
    return model.sessions.decoder.runs - before, moments


def genai(folder: Path, load: Load, threads: int, slots: int) -> Measured:
    """onnxruntime-genai's generator on padded batches of waiting requests, each until its longest row ends."""
    import onnxruntime_genai as og

    settings = json.loads((folder / "genai_config.json").read_text())["model"]
    config = og.Config(str(folder))
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    model = og.Model(config)
    prompts = make_prompts(load, int(settings["vocab_size"]))
    moments: Moments = [[] for _ in load]
    runs = 0

    def run(first: int, last: int, start: float, least: int | None = None) -> None:
        rows = prompts[first:last]
        length = max(map(len, rows))
        counts = [least or new_tokens for _, _, new_tokens in load[first:last]]
        padded = np.full((len(rows), length), settings["pad_token_id"], dtype=np.int32)
        for row, prompt in zip(padded, rows, strict=True):
            row[length - len(prompt) :] = prompt
        nonlocal runs
        runs += max(counts)  # the first run also reads the prompts
        params = og.GeneratorParams(model)
        total = length + max(counts)
        params.set_search_options(
            batch_size=len(rows),
            max_length=total,
            min_length=total,
            do_sample=True,
            temperature=SAMPLING["temperature"],
            top_k=int(SAMPLING["top_k"]),
            top_p=SAMPLING["top_p"],
            random_seed=first,
        )
        generator = og.Generator(model, params)
        generator.append_tokens(padded)
        for step in range(max(counts)):
            generator.generate_next_token()
            generator.get_next_tokens()
            now = time.perf_counter() - start
            for index, count in zip(range(first, last), counts, strict=True):
                if step < count:
                    moments[index].append(now - load[index][0])

    run(0, min(slots, len(load)), 0.0, least=4)
    moments, runs = [[] for _ in load], 0
    start = time.perf_counter()
    in_batches(load, slots, start, lambda first, last: run(first, last, start))
    return runs, moments


def in_batches(load: Load, slots: int, start: float, run: Callable[[int, int], None]) -> None:
    """Call `run(first, last)` for batches in sequence, each of the requests that have arrived, at most `slots`."""
    first = 0
    while first < len(load):
        time.sleep(max(0.0, start + load[first][0] - time.perf_counter()))
        now = time.perf_counter() - start
        last = first
        while last < len(load) and last - first < slots and load[last][0] <= now:
            last += 1
        run(first, last)
        first = last


SYSTEMS = {"continuous": continuous, "static": static, "genai": genai}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=list(SYSTEMS))
    parser.add_argument("model", type=Path)
    parser.add_argument("load", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--slots", type=int, default=8)
    options = parser.parse_args()
    load = [(float(arrival), int(prompt), int(new)) for arrival, prompt, new in json.loads(options.load.read_text())]
    runs, moments = SYSTEMS[options.system](options.model, load, options.threads, options.slots)
    assert [len(row) for row in moments] == [new_tokens for _, _, new_tokens in load]
    options.out.write_text(json.dumps({"runs": runs, "moments": moments}))


if __name__ == "__main__":
    main()
