"""qsample's engine without a server, read by a coroutine per stream."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

from qsample.runtime import Engine, SamplingParams, load

Streams = list[
    list[tuple[float, int]]
]  # of each stream the moments of its deltas in seconds, and their tokens


class EngineAlone:
    """An engine for the requests of a file, as `serve_client.py` reads them."""

    library = "onnxruntime"

    def __init__(self, model: Path, threads: int, requests: str, slots: int) -> None:
        config = {"session.intra_op.allow_spinning": "0"}
        asked = json.loads(Path(requests).read_text(encoding="utf-8"))
        body, self._prompts = asked["body"], asked["prompts"]
        self._params = SamplingParams(
            max_new_tokens=body["max_tokens"], temperature=body["temperature"], eos_token_id=()
        )
        loaded = load(model, intra_op_num_threads=threads, session_config=config)
        self._engine = Engine(loaded, slots=slots, max_waiting=len(self._prompts))
        self.measure(1, 1)  # allocates memory and reads files

    def measure(self, streams: int, waves: int) -> dict[str, Any]:
        """What `serve_client.py` says, plus the processor time of this process."""
        return asyncio.run(self._measure(streams, waves))

    async def _measure(self, streams: int, waves: int) -> dict[str, Any]:
        seconds, answered, before = list[float](), Streams(), time.process_time()
        for wave in range(waves):
            start = time.perf_counter()
            answered += await asyncio.gather(
                *(self._read(wave * streams + number) for number in range(streams))
            )
            seconds.append(time.perf_counter() - start)
        cpu_seconds = time.process_time() - before
        return {
            "seconds": seconds,
            "streams": answered,
            "refused": 0,
            "failed": [],
            "cpu_seconds": cpu_seconds,
        }

    async def _read(self, number: int) -> list[tuple[float, int]]:
        start, prompt = time.perf_counter(), self._prompts[number % len(self._prompts)]
        request = self._engine.add_request(prompt, self._params, seed=number, timeout=0)
        return [
            (time.perf_counter() - start, len(delta.token_ids))
            async for delta in request
            if delta.token_ids
        ]
