"""The benchmark of servers: resumed runs, figures, the page, and the client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SETTINGS = {
    "machine": "a machine",
    "shape": "tiny",
    "slots": 2,
    "prompt_tokens": 32,
    "new_tokens": 2,
}
ANSWER = {
    "seconds": [2.0, 2.0],
    "streams": [[[0.5, 1], [0.6, 1]], [[0.7, 1], [1.0, 2]], []],
    "refused": 1,
    "failed": [],
    "cpu_seconds": 0.01,
}


@pytest.fixture
def serve(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("serve")


def test_figures(serve: ModuleType) -> None:
    """Five tokens in four seconds; first tokens after 0.5 and 0.7 s; gaps of 0.1 and 0.3 s."""
    one = serve.figures(ANSWER)
    assert one["tokens_per_second"] == 1.25
    assert one["first_ms"] == pytest.approx([600, 698])
    assert one["gap_ms"] == pytest.approx([200, 298])
    assert one["cpu_us_per_token"] == pytest.approx(2000)
    nothing = serve.figures({**ANSWER, "streams": []})
    assert nothing["tokens_per_second"] == 0
    assert nothing["first_ms"] is nothing["gap_ms"] is None


def test_a_run_goes_on_where_the_one_before_stopped(serve: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "new" / "serve.json"
    results = serve.ServeResults(path, SETTINGS)
    results.cell("server", 8)["rounds"].append(serve.figures(ANSWER))
    results.save()
    assert len(serve.ServeResults(path, SETTINGS).cell("server", 8)["rounds"]) == 1
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"other settings \(slots\); give another --output"):
        serve.ServeResults(path, {**SETTINGS, "slots": 3})
    assert path.read_bytes() == before


class System:
    """Answers, or fails while it starts or runs."""

    def __init__(self, started: list[str], name: str, failing: str = "") -> None:
        self.started, self.name, self.failing = started, name, failing
        started.append(name)
        if failing == "start":
            raise RuntimeError("it did not start")

    def measure(self, streams: int, waves: int, seconds: float) -> dict[str, Any]:
        if self.failing == f"at {streams}":
            self.started.append(f"{self.name} fails")
            raise RuntimeError("no\nroom")
        return {**ANSWER, "streams": [[[0.5, 2]]] * streams * waves}

    def close(self) -> None:
        pass


def test_a_system_that_fails_leaves_the_cell(serve: ModuleType, tmp_path: Path) -> None:
    results, started = serve.ServeResults(tmp_path / "serve.json", SETTINGS), list[str]()
    start = {
        "good": lambda: System(started, "good"),
        "weak": lambda: System(started, "weak", "at 64"),
        "bad": lambda: System(started, "bad", "start"),
    }
    options = SimpleNamespace(rounds=2, streams=[8, 64], cell_seconds=9, new_tokens=2)
    serve.run(start, results, options, serve.Console(quiet=True))
    counts = {
        name: [len(results.cell(name, streams)["rounds"]) for streams in (8, 64)]
        for name in results.data["cells"]
    }
    assert counts == {"good": [2, 2], "weak": [2, 0], "bad": [0, 0]}
    assert results.cell("weak", 64)["failed"] == "no room"
    assert results.cell("bad", 8)["failed"] == "it did not start"
    assert started == ["good", "weak", "bad", "weak fails", "weak"], (
        "a process that failed is replaced, one that did not start is not"
    )


def test_page(serve: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = serve.ServeResults(tmp_path / "serve.json", SETTINGS)
    for number, factor in enumerate((1, 2, 3)):
        for system, cost in ((serve.ENGINE, 0.01), ("qsample serve", 0.02)):
            if number or system != serve.ENGINE:  # the first round of the engine failed
                one = serve.figures({**ANSWER, "cpu_seconds": cost * factor}) | {"round": number}
                results.cell(system, 1)["rounds"].append(one)
    results.cell("qsample serve", 200)["failed"] = "not done after 9 s"
    results.data["missing"]["other"] = "it is not installed"
    assert serve.table_rows(results.data)[1] == [
        ["engine alone", "1", "1.2", "600.0 / 698.0", "200.0 / 298.0", "5000", "", "2"],
        ["qsample serve", "1", "1.2", "600.0 / 698.0", "200.0 / 298.0", "8000", "2.00", "3"],
        ["qsample serve", "200", "failed", "", "", "", "", ""],
    ]
    serve.write(results.data, tmp_path / "serve")
    page = (tmp_path / "serve.md").read_text()
    assert "medians of 3 rounds" in page
    assert "Without other: it is not installed" in page
    assert "qsample serve failed at 200 streams: not done after 9 s" in page
    assert (tmp_path / "serve.png").stat().st_size > 1000


def event(**choice: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
ANSWERS = {
    "ids": OK
    + event(text="", token_ids=[5])
    + event(text="x", token_ids=[6, 7])
    + event(text="held back", token_ids=[]),
    "texts": OK + event(text="x") + event(text="", finish_reason="length"),
    "full": b"HTTP/1.1 429 Too Many Requests\r\n\r\n{}",
    "wrong": b'HTTP/1.1 400 Bad Request\r\n\r\n{"error": "no such field"}',
    "fails": OK + b'data: {"error": {"message": "the engine ended"}}\n\n',
    "breaks": OK + event(text="x"),
    "gone": b"",
}


def test_client_counts_tokens_refusals_and_failures(benchmark: Callable[[str], ModuleType]) -> None:
    client = benchmark("serve_client")
    asked: list[dict[str, Any]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.split("Content-Length: ")[1].split("\r\n")[0])
        asked.append(json.loads(await reader.readexactly(length)))
        kind = asked[-1]["prompt"]
        writer.write(
            ANSWERS[kind] + (b"data: [DONE]\n\n" if kind in ("ids", "texts", "fails") else b"")
        )
        writer.close()

    async def every() -> dict[str, Any]:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/completions"
            return await client.run(
                url, {"body": {"max_tokens": 3}, "prompts": list(ANSWERS)}, len(ANSWERS), 2
            )

    done = asyncio.run(every())
    assert len(done["seconds"]) == 2
    assert [[count for _, count in row] for row in done["streams"]] == 2 * [[1, 2], [1]]
    assert done["refused"] == 2
    for text, wanted in zip(
        done["failed"], 2 * ["no such field", "the engine ended", "[DONE]", "[]"], strict=True
    ):
        assert wanted in text
    assert sorted(body["seed"] for body in asked) == list(range(2 * len(ANSWERS)))
    assert all(body["stream"] and body["max_tokens"] == 3 for body in asked)
