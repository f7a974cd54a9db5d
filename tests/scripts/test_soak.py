"""scripts/soak.py in short: no request fails, and what a server opens for requests is closed after them."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from qsample.contract.interface import Features
from qsample.package.package import read_package
from scripts.soak import MOST, Traffic, grown, measured, start

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")


def test_growth_is_seen() -> None:
    before, leave = measured(os.getpid()), threading.Event()
    with ExitStack() as opened:
        opened.callback(leave.set)
        for _ in range(8):
            opened.enter_context(socket.socket())
            threading.Thread(target=leave.wait).start()
        memory = b"x" * (round(before["resident"] * 0.05) << 20)
        found = grown(before, measured(os.getpid()))
    assert memory
    assert [line.partition(":")[0] for line in found] == [
        "resident",
        "anonymous",
        "threads",
        "files",
        "sockets",
    ]


@pytest.mark.ci
def test_a_server_closes_what_it_opens(
    adapted_server_package: Path, guessing_package: Path, bundled_package: Path, tmp_path: Path
) -> None:
    from tests.helpers.tiny_models import with_features

    with_features(read_package(bundled_package), tmp_path / "plain", Features().for_serving())
    packages = {
        "adapters": adapted_server_package,
        "guesses": guessing_package,
        "plain": tmp_path / "plain",
    }
    with start(packages, tmp_path) as server:

        def level() -> dict[str, float]:
            figures = measured(server.process.pid)
            return {name: figures[name] for name in MOST if name not in ("resident", "anonymous")}

        # The first rounds start threads and processes that stay. What leaks grows with every round.
        before = None
        for seed in range(5):
            traffic = Traffic(server, [*packages], seed)
            traffic.flow(8)
            assert not traffic.errors
            assert len(traffic.counts) == 6, "of each kind"
            end = time.monotonic() + 120  # in which the server notices that clients have left
            now = level()
            while before and now["sockets"] > before["sockets"] and time.monotonic() < end:
                time.sleep(0.2)
                now = level()
            more = ["the first round"] if before is None else grown(before, now)
            before = now
            if more == []:
                break
    assert more == []
