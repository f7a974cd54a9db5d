"""Systems under a load of requests: `[arrival in seconds, prompt tokens, new tokens]` of each.

`serve` returns the runs of the graph, prompts included, and the moments of each request's tokens, in seconds since its
arrival.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

SAMPLING: Final = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}
Load = list[tuple[float, int, int]]
Moments = list[list[float]]


class Served(ABC):
    """A system that serves a load."""

    vocab_size: int

    def serve(self, load: Load, slots: int) -> dict[str, Any]:
        generator = np.random.default_rng(0)
        # The same random ids for every system, without special ids.
        prompts = [generator.integers(3, self.vocab_size, count) for _, count, _ in load]
        runs, moments = self.run(load, prompts, slots)
        assert [len(row) for row in moments] == [new_tokens for _, _, new_tokens in load]
        return {"runs": runs, "moments": moments}

    @abstractmethod
    def run(self, load: Load, prompts: list[Any], slots: int) -> tuple[int, Moments]: ...


class Continuous(Served):
    """The engine: a request joins as soon as a slot is free."""

    library = "onnxruntime"

    def __init__(self, model: Path, threads: int) -> None:
        from systems.qsample import load_watched

        self.model = load_watched(model, threads)
        self.vocab_size = self.model.interface.vocab_size

    def run(self, load: Load, prompts: list[Any], slots: int) -> tuple[int, Moments]:
        from qsample.runtime import Engine, SamplingParams

        decoder: Any = self.model.sessions.decoder
        requests = []
        with Engine(self.model, slots=slots, max_waiting=len(load)) as engine:
            warm_up = SamplingParams(max_new_tokens=4, eos_token_id=())
            for request in [engine.add_request(prompts[0], warm_up) for _ in range(slots)]:
                request.result()
            before, start = decoder.runs, time.perf_counter()
            for index, (arrival, _, new_tokens) in enumerate(load):
                time.sleep(max(0.0, start + arrival - time.perf_counter()))
                params = SamplingParams(
                    **SAMPLING, max_new_tokens=new_tokens, eos_token_id=(), seed=index
                )
                requests.append(engine.add_request(prompts[index], params))
            moments = [
                [delta.seconds for delta in request if delta.token_ids] for request in requests
            ]
        return decoder.runs - before, moments


class Static(Continuous):
    """The same graph, slots and loop, but a batch begins only after the previous batch has ended."""

    def run(self, load: Load, prompts: list[Any], slots: int) -> tuple[int, Moments]:
        from qsample.runtime import SamplingParams
        from qsample.runtime.call import Call
        from qsample.runtime.decode.loop import DecodeLoop
        from qsample.runtime.decode.scheduler import Scheduler, SchedulerConfig
        from qsample.runtime.decode.slots import Slots
        from qsample.runtime.sequence import Sequence

        model, capacity = self.model, self.model.capacity(4096)
        decoder: Any = model.sessions.decoder

        def make(index: int, new_tokens: int) -> Sequence:
            params = SamplingParams(**SAMPLING, max_new_tokens=new_tokens, eos_token_id=())
            sequences, _ = model.prepare(
                Call(inputs=[prompts[index]], params=params, seed=index), capacity
            )
            return sequences[0]

        came: dict[Sequence, list[float]] = {}

        def deliver(sequence: Sequence) -> None:
            new = len(sequence.progress.sampled) - len(came[sequence])
            came[sequence] += [time.perf_counter()] * new

        def run(sequences: list[Sequence]) -> None:
            for sequence in sequences:
                came[sequence] = []
                loop.add(sequence)
            while loop.busy:
                loop.step()

        scheduler = Scheduler(slots, SchedulerConfig.of(model.sessions, interleave=False))
        with DecodeLoop(
            Slots(model.sessions, slots, capacity), scheduler, deliver, double_buffering=True
        ) as loop:
            run([make(0, 4) for _ in range(slots)])
            sequences = [make(index, new_tokens) for index, (_, _, new_tokens) in enumerate(load)]
            before, start = decoder.runs, time.perf_counter()
            in_batches(load, slots, start, lambda first, last: run(sequences[first:last]))
        arrivals = [start + arrival for arrival, _, _ in load]
        moments = [
            [moment - at for moment in came[sequence]]
            for sequence, at in zip(sequences, arrivals, strict=True)
        ]
        return decoder.runs - before, moments


class Genai(Served):
    """onnxruntime-genai's generator on padded batches of waiting requests, each until its longest row ends."""

    library = "onnxruntime_genai"

    def __init__(self, model: Path, threads: int) -> None:
        from systems.genai import load

        self._model, self.vocab_size = load(model, threads)

    def run(self, load: Load, prompts: list[Any], slots: int) -> tuple[int, Moments]:
        import onnxruntime_genai as og

        moments: Moments = [[] for _ in load]
        runs = 0

        def run(first: int, last: int, start: float, least: int | None = None) -> None:
            rows = prompts[first:last]
            length = max(map(len, rows))
            counts = [least or new_tokens for _, _, new_tokens in load[first:last]]
            padded = np.full((len(rows), length), 2, dtype=np.int32)  # checkpoints.TOKEN_IDS' pad
            for row, prompt in zip(padded, rows, strict=True):
                row[length - len(prompt) :] = prompt
            nonlocal runs
            runs += max(counts)  # the first run also reads the prompts
            params, total = og.GeneratorParams(self._model), length + max(counts)
            options = {
                "batch_size": len(rows),
                "max_length": total,
                "min_length": total,
                "do_sample": True,
            }
            params.set_search_options(**options, **SAMPLING, random_seed=first)
            generator = og.Generator(self._model, params)
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
