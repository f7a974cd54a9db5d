"""A server whose wall clock jumps by years at every look: nothing that is timed, cached or kept depends on it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fake_package import fake_package
from tests.helpers.servers import ServerProcess

pytestmark = pytest.mark.ci
# The clock of each look: as it is, ten years ahead, ten years behind, ...
JUMPS = """
import itertools, time
own_time, own_time_ns = time.time, time.time_ns
years = itertools.cycle((0, 10, -10))
time.time = lambda: own_time() + next(years) * 365 * 86400.0
time.time_ns = lambda: own_time_ns() + next(years) * 365 * 86400 * 10**9
"""
BODY: Any = {"prompt": "a" * 40, "max_tokens": 8, "temperature": 0.9, "seed": 7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clocks")


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[list[ServerProcess]]:
    """A server with a clock that is right, and one with the clock that jumps."""
    package = fake_package(folder / "package").path
    (folder / "sitecustomize.py").write_text(JUMPS, "utf-8")
    options = ("--threads", "1", "--slots", "2", "--request-timeout", "300")

    def start(name: str, **environment: str) -> ServerProcess:
        kept = ("--prefix-cache-dir", folder / name)
        return ServerProcess(package, *options, *kept, environment=environment)

    with start("right") as right, start("jumping", PYTHONPATH=str(folder)) as jumping:
        yield [right, jumping]


def test_answers_and_limits_of_time(servers: list[ServerProcess]) -> None:
    texts = []
    for server in servers:
        for _ in range(3):
            answer = server.client.post("/v1/completions", json=BODY).json()
            texts.append(answer["choices"][0]["text"])
            with server.client.stream(
                "POST", "/v1/completions", json={**BODY, "stream": True}
            ) as stream:
                assert [*stream.iter_lines()][-2:] == ["data: [DONE]", ""]
    assert len({*texts}) == 1
    answer = servers[1].client.post("/v1/completions", json=BODY).json()
    # Only what says a time of day has the clock's.
    assert abs(answer["created"] - time.time()) < 11 * 365 * 86400
    assert servers[1].metric("request_success_total") >= 6


def test_prefixes_are_kept(servers: list[ServerProcess], folder: Path) -> None:
    """A conversation that no slot has any more, and whose file is written, is read from its file."""
    for server, name in zip(servers, ("right", "jumping"), strict=True):

        def hits(letter: str, server: ServerProcess = server) -> float:
            before = server.metric("prefix_cache_hits_total")
            body = {**BODY, "prompt": letter * 200}
            assert server.client.post("/v1/completions", json=body).status_code == 200
            return server.metric("prefix_cache_hits_total") - before

        for number, letter in enumerate("bcd", start=1):
            hits(letter)
            deadline = time.monotonic() + 300
            while len([*(folder / name).glob("*.safetensors")]) < number:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert hits("b") > 100


def test_the_clock_does_jump(servers: list[ServerProcess]) -> None:
    created = set()
    for _ in range(6):
        answer = servers[1].client.post("/v1/completions", json=BODY).json()
        created.add(round((answer["created"] - time.time()) / (365 * 86400)))
    assert created - {0}
