"""The benchmark of servers: resumed runs, figures, the page, and the client."""

from __future__ import annotations

import asyncio
import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SETTINGS = {"machine": "a machine", "shape": "tiny", "slots": 2, "prompt_tokens": 32, "new_tokens": 2}
ANSWER = {
    "seconds": [2.0, 2.0],
    "streams": [[[0.5, 1], [0.6, 1]], [[0.7, 1], [1.0, 2]], []],
    "refused": 1,
    "failed": [],
    "cpu_seconds": 0.01,
}


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("serve_report")


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("serve_client")


def test_figures(report: ModuleType) -> None:
    """Five tokens in four seconds; first tokens after 0.5 and 0.7 s; gaps of 0.1 and 0.3 s."""
    one = report.figures(ANSWER)
    assert one["tokens_per_second"] == 1.25
    assert one["first_ms"] == pytest.approx([600, 698])
    assert one["gap_ms"] == pytest.approx([200, 298])
    assert one["cpu_us_per_token"] == pytest.approx(2000)
    nothing = report.figures({**ANSWER, "streams": []})
    assert nothing["tokens_per_second"] == 0
    assert nothing["first_ms"] is nothing["gap_ms"] is None


def test_a_run_goes_on_where_the_one_before_stopped(report: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "new" / "serve.json"
    results = report.ServeResults(path, SETTINGS)
    results.add("server", 8, report.figures(ANSWER))
    results.fail("server", 64, "no\nroom")
    results.save()
    results = report.ServeResults(path, SETTINGS)
    assert len(results.rounds("server", 8)) == 1
    assert results.rounds("server", 64) == []
    assert results.failed("server", 64) == "no room"
    results.add("server", 64, report.figures(ANSWER))
    assert results.failed("server", 64) is None
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"other settings \(slots\); give another --output"):
        report.ServeResults(path, {**SETTINGS, "slots": 3})
    assert path.read_bytes() == before


def test_page(report: ModuleType, tmp_path: Path) -> None:
    results = report.ServeResults(tmp_path / "serve.json", SETTINGS)
    for number, factor in enumerate((1, 2, 3)):
        if number:  # the first round of the engine failed
            results.add(report.ENGINE, 1, report.figures({**ANSWER, "cpu_seconds": 0.01 * factor}) | {"round": number})
        results.add("qsample serve", 1, report.figures({**ANSWER, "cpu_seconds": 0.02 * factor}) | {"round": number})
    results.fail("qsample serve", 200, "not done after 9 s")
    results.data["missing"]["other"] = "it is not installed"
    assert report.table_rows(results) == [
        ["engine alone", "1", "1.2", "600.0 / 698.0", "200.0 / 298.0", "5000", "", "2"],
        ["qsample serve", "1", "1.2", "600.0 / 698.0", "200.0 / 298.0", "8000", "2.00", "3"],
        ["qsample serve", "200", "failed", "", "", "", "", ""],
    ]
    report.write(results, tmp_path / "serve", "Servers", "An explanation.")
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


def test_client_counts_tokens_refusals_and_failures(client: ModuleType) -> None:
    asked: list[dict[str, Any]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.split("Content-Length: ")[1].split("\r\n")[0])
        asked.append(json.loads(await reader.readexactly(length)))
        kind = asked[-1]["prompt"]
        writer.write(ANSWERS[kind] + (b"data: [DONE]\n\n" if kind in ("ids", "texts", "fails") else b""))
        writer.close()

    async def every() -> dict[str, Any]:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/completions"
            return await client.run(url, {"body": {"max_tokens": 3}, "prompts": list(ANSWERS)}, len(ANSWERS), 2)

    done = asyncio.run(every())
    assert len(done["seconds"]) == 2
    assert [[count for _, count in row] for row in done["streams"]] == 2 * [[1, 2], [1]]
    assert done["refused"] == 2
    for text, wanted in zip(done["failed"], 2 * ["no such field", "the engine ended", "[DONE]", "[]"], strict=True):
        assert wanted in text
    assert sorted(body["seed"] for body in asked) == list(range(2 * len(ANSWERS)))
    assert all(body["stream"] and body["max_tokens"] == 3 for body in asked)
