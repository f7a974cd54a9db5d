"""Many streams at once against a server of OpenAI's API; started by `serve.py` in a process of its own.

    python benchmarks/serve_client.py URL BODY.json --streams 64

Plain sockets: a client library would take more of the machine than the server. Prints one JSON line: for each stream
the seconds of its events since it was sent, and how many were refused.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


async def stream(host: str, port: int, path: str, body: dict[str, Any]) -> list[float] | None:
    """The moments of a stream's events, [DONE] left out; None where it was refused."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(head.encode() + data)
        status = (await reader.readline()).split()[1]
        if status != b"200":
            return None
        moments = []
        async for line in reader:
            if line.startswith(b"data: [DONE]"):
                return moments
            if line.startswith(b"data: {"):
                moments.append(time.perf_counter() - start)
        raise RuntimeError("a stream ended without [DONE]")
    finally:
        writer.close()


async def run(url: str, body: dict[str, Any], streams: int) -> dict[str, Any]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    start = time.perf_counter()
    every = await asyncio.gather(
        *(
            stream(parts.hostname, parts.port or 80, parts.path, {**body, "seed": seed, "stream": True})
            for seed in range(streams)
        )
    )
    seconds = time.perf_counter() - start
    answered = [moments for moments in every if moments is not None]
    return {"seconds": seconds, "moments": answered, "refused": len(every) - len(answered)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("body", type=Path)
    parser.add_argument("--streams", type=int, required=True)
    options = parser.parse_args()
    print(json.dumps(asyncio.run(run(options.url, json.loads(options.body.read_text()), options.streams))))


if __name__ == "__main__":
    main()
