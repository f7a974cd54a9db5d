"""Many concurrent streams from a server of OpenAI's API; started by `serve.py` in its own process.

    python benchmarks/serve_client.py URL REQUESTS.json --streams 64 --waves 2

REQUESTS.json has `body`, the fields that all requests share, and `prompts`, which the streams take in turn. The client
uses plain sockets, because a client library would take more processor time than the server. A wave begins when the last
stream of the previous wave has ended. Prints a JSON line: the seconds of each wave; for each stream the moments of its
events since the request, with their numbers of tokens; the number of refused streams; and the errors of failed streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

Events = list[tuple[float, bytes]]


class RefusedError(Exception):
    """The server has no room: 429 or 503."""


async def stream(host: str, port: int, path: str, body: dict[str, Any]) -> Events:
    """The events of a stream with their moments in seconds, without [DONE]."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(head.encode() + data)
        status = (await reader.readline()).split()
        if len(status) < 2 or status[1] != b"200":
            while (await reader.readline()).strip():
                pass  # headers
            text = (await reader.read(2000)).decode(errors="replace")
            raise (RefusedError if status[1:2] in ([b"429"], [b"503"]) else RuntimeError)(
                f"{status} {text:.300}"
            )
        events = []
        async for line in reader:
            if line.startswith(b"data: [DONE]"):
                return events
            if line.startswith(b"data: {"):
                events.append((time.perf_counter() - start, line))
        raise RuntimeError("a stream ended without [DONE]")
    finally:
        writer.close()


def tokens_of(line: bytes) -> int:
    """The number of tokens of an event; without token ids, an event with a text counts 1."""
    event = json.loads(line.removeprefix(b"data: "))
    if "error" in event:
        raise RuntimeError(f"a stream failed: {event['error']}")
    count = 0
    for choice in event.get("choices") or []:
        ids = choice.get("token_ids")
        count += (
            len(ids) if ids is not None else bool(choice.get("text"))
        )  # an event of released text has no ids
    return count


async def run(url: str, requests: dict[str, Any], streams: int, waves: int) -> dict[str, Any]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    prompts, seconds, every = requests["prompts"], [], []
    for wave in range(waves):
        start = time.perf_counter()
        calls = []
        for number in range(wave * streams, (wave + 1) * streams):
            body = {
                **requests["body"],
                "prompt": prompts[number % len(prompts)],
                "seed": number,
                "stream": True,
            }
            calls.append(stream(parts.hostname, parts.port or 80, parts.path, body))
        every += await asyncio.gather(*calls, return_exceptions=True)
        seconds.append(time.perf_counter() - start)
    answered, refused, failed = [], 0, []
    for answer in every:  # events are parsed after all have arrived
        try:
            if isinstance(answer, BaseException):
                raise answer
            counted = [(moment, tokens_of(line)) for moment, line in answer]
            answered.append([pair for pair in counted if pair[1]])
        except RefusedError:
            refused += 1
        except (RuntimeError, OSError, ValueError) as error:
            failed.append(f"{type(error).__name__}: {error}")
    return {"seconds": seconds, "streams": answered, "refused": refused, "failed": failed}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("requests", type=Path)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--waves", type=int, default=1)
    options = parser.parse_args()
    requests = json.loads(options.requests.read_text())
    print(json.dumps(asyncio.run(run(options.url, requests, options.streams, options.waves))))


if __name__ == "__main__":
    main()
