"""The engine without a server, read by a coroutine per stream; started by `serve.py`.

    python benchmarks/serve_engine.py PACKAGE REQUESTS.json --slots 16 --threads 2

It answers each line of its input, a JSON object with `streams` and `waves`, with a line like that of `serve_client.py`,
plus the processor time of this process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from qsample.runtime import Engine, SamplingParams, load


async def read(engine: Engine, prompt: list[int], params: SamplingParams, seed: int) -> list[tuple[float, int]]:
    """The moment of each delta in seconds, and its number of tokens."""
    start = time.perf_counter()
    request = engine.add_request(prompt, params, seed=seed, timeout=0)
    return [(time.perf_counter() - start, len(delta.token_ids)) async for delta in request if delta.token_ids]


async def run(engine: Engine, requests: dict[str, Any], streams: int, waves: int) -> dict[str, Any]:
    body, prompts = requests["body"], requests["prompts"]
    params = SamplingParams(max_new_tokens=body["max_tokens"], temperature=body["temperature"], eos_token_id=())
    seconds, answered = [], []
    before = time.process_time()
    for wave in range(waves):
        start = time.perf_counter()
        numbers = range(wave * streams, (wave + 1) * streams)
        answered += await asyncio.gather(*(read(engine, prompts[i % len(prompts)], params, i) for i in numbers))
        seconds.append(time.perf_counter() - start)
    cpu_seconds = time.process_time() - before
    return {"seconds": seconds, "streams": answered, "refused": 0, "failed": [], "cpu_seconds": cpu_seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("requests", type=Path)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    requests = json.loads(options.requests.read_text())
    model = load(
        options.package,
        intra_op_num_threads=options.threads,
        session_config={"session.intra_op.allow_spinning": "0"},
    )
    with Engine(model, slots=options.slots, max_waiting=len(requests["prompts"])) as engine:
        print(json.dumps({"loaded": True}), flush=True)
        for line in sys.stdin:
            print(json.dumps(asyncio.run(run(engine, requests, **json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
