"""Images that cost a reader far more than they are, sent to a real server, which goes on for others."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers import hostile_images
from tests.helpers.servers import ServerProcess

pytestmark = pytest.mark.ci

MOST_MEMORY = 600  # MiB of the server and its process for images together
PATIENCE = 120  # seconds; a busy machine takes long

HOSTILE = {
    "scans": (hostile_images.jpeg_of_scans(6300, 6300, 5000), "more than 100 scans"),
    "segments": (hostile_images.jpeg_of_comments(5000), "more than 2000 segments"),
    "profiles": (hostile_images.png_of_profiles(1000), "more than 64 chunks beside its pixels"),
    "texts": (hostile_images.png_of_texts(100_000), "more than 64 chunks beside its pixels"),
    "pieces": (hostile_images.png_of_pieces(500_000), "more than 65536 chunks"),
    "blocks": (hostile_images.gif_of_blocks(5_000_000), "more than 131072 blocks"),
    "frame": (hostile_images.gif_of_frame_blocks(5_000_000), "more than 131072 blocks"),
    "chunks": (hostile_images.webp_of_chunks(500_000), "more than 65536 chunks"),
}
# Within the limits of parts, and dear nevertheless: these are read, in the time of a large image.
DEAR = {
    "scans": hostile_images.jpeg_of_scans(6300, 6300, 80),
    "profiles": hostile_images.png_of_profiles(60),
    "transparent": hostile_images.large_png(6300, 6300, "RGBA"),
}


def chat(*files: bytes, **more: Any) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [
        {
            "type": "image_url",
            "image_url": {"url": f"data:image/png;base64,{base64.b64encode(file).decode()}"},
        }
        for file in files
    ]
    parts.append({"type": "text", "text": "hello"})
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 2, **more}


def post_timed(
    server: ServerProcess, bodies: Sequence[dict[str, Any]], path: str = "/v1/chat/completions"
) -> list[tuple[httpx.Response, float]]:
    """The answers to requests that are sent at once, and the seconds of each."""

    def post(body: dict[str, Any]) -> tuple[httpx.Response, float]:
        began = time.monotonic()
        return server.client.post(path, json=body, timeout=PATIENCE), time.monotonic() - began

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(post, bodies))


def processes(server: ServerProcess) -> list[Path]:
    """The server and its children, below /proc."""
    found = [Path(f"/proc/{server.process.pid}")]
    children = (found[0] / "task").glob("*/children")
    return found + [Path(f"/proc/{pid}") for file in children for pid in file.read_text().split()]


def peak_memory(server: ServerProcess) -> int:
    """MiB: the sum of what each process had at most."""
    total = 0
    for process in processes(server):
        found = re.search(r"VmHWM:\s+(\d+)", (process / "status").read_text())
        assert found is not None
        total += int(found[1])
    return total // 1024


@pytest.fixture(scope="module")
def server(smolvlm_package: Path) -> Iterator[ServerProcess]:
    options = ("--ctx-len", "256", "--threads", "1", "--slots", "2")
    with ServerProcess(smolvlm_package, *options) as server:
        # The process for images has started.
        assert server.client.post("/v1/chat/completions", json=chat(PHOTO)).status_code == 200
        yield server


@pytest.fixture
def fresh_server(smolvlm_package: Path) -> Iterator[ServerProcess]:
    """Whose memory no other test has used."""
    options = ("--ctx-len", "256", "--threads", "1", "--slots", "2")
    with ServerProcess(smolvlm_package, *options) as server:
        assert server.client.post("/v1/chat/completions", json=chat(PHOTO)).status_code == 200
        yield server


PHOTO = hostile_images.photo()


@pytest.mark.parametrize("kind", HOSTILE)
def test_files_of_many_parts_are_refused(server: ServerProcess, kind: str) -> None:
    file, message = HOSTILE[kind]
    for path in ("/v1/chat/completions", "/v1/responses", "/tokenize"):
        body = chat(file)
        if path == "/v1/responses":
            (image, text) = body["messages"][0]["content"]
            content = [
                {"type": "input_image", "image_url": image["image_url"]["url"]},
                {"type": "input_text", "text": text["text"]},
            ]
            body = {"input": [{"role": "user", "content": content}]}
        elif path == "/tokenize":
            del body["max_tokens"]
        answer = server.client.post(path, json=body, timeout=PATIENCE)
        assert answer.status_code == 400, answer.text[:300]
        assert re.search(message, answer.json()["error"]["message"])


def test_ten_good_images_beside_ten_hostile_ones(server: ServerProcess) -> None:
    hostile = [file for file, _ in HOSTILE.values()]
    files = [file for good in range(10) for file in (hostile[good % len(hostile)], photo(good))]
    answers = post_timed(server, [chat(file) for file in files])
    assert [answer.status_code for answer, _ in answers] == [400, 200] * 10
    print(f"{max(seconds for _, seconds in answers[1::2]):.2f} s for the last good image")


def test_dear_images_delay_others_and_end(fresh_server: ServerProcess) -> None:
    files = [*DEAR.values(), *map(photo, range(4))]
    answers = post_timed(fresh_server, [chat(file) for file in files])
    assert [answer.status_code for answer, _ in answers[-4:]] == [200] * 4
    for answer, _ in answers[:-4]:
        # The largest may have more tokens than the context.
        assert answer.status_code in (200, 400), answer.text[:300]
    assert peak_memory(fresh_server) < MOST_MEMORY


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_the_memory_of_many_requests_at_once(count: int, fresh_server: ServerProcess) -> None:
    """28 MiB of pixels each, in 30 kB; each has a place, waits for its turn, and is answered."""
    large = hostile_images.large_png(3500, 2800)
    assert len(large) < 40_000
    answers = post_timed(fresh_server, [chat(large)] * count)
    assert {answer.status_code for answer, _ in answers} == {200}
    print(f"{peak_memory(fresh_server)} MiB at most")
    assert peak_memory(fresh_server) < MOST_MEMORY


def test_requests_without_a_place_are_refused_before_their_images_are_read(
    smolvlm_package: Path,
) -> None:
    options = ("--ctx-len", "256", "--threads", "1", "--slots", "1", "--max-waiting", "3")
    large = hostile_images.large_png(3500, 2800)
    with ServerProcess(smolvlm_package, *options) as server:
        answers = post_timed(server, [chat(large)] * 20)
        statuses = [answer.status_code for answer, _ in answers]
        assert set(statuses) == {200, 429}
        read = server.metric("prompt_images_total")
        assert read == statuses.count(200)
        # Counting tokens is work, too.
        body = chat(large)
        del body["max_tokens"]
        answers = post_timed(server, [body] * 40, "/tokenize")
        assert {answer.status_code for answer, _ in answers} == {200, 429}
        # The places are free again.
        assert server.client.post("/v1/chat/completions", json=chat(PHOTO)).status_code == 200


def test_the_end_of_a_server_that_reads_images(smolvlm_package: Path) -> None:
    """SIGTERM ends it after the drain, whatever is being read and whoever waits."""
    options = ("--ctx-len", "256", "--threads", "1", "--slots", "1", "--drain-timeout", "1")
    large = hostile_images.large_png(6300, 6300, "RGBA")
    with ServerProcess(smolvlm_package, *options) as server:
        with ThreadPoolExecutor(30) as pool:
            for _ in range(30):
                pool.submit(_post_and_forget, server, chat(large))
            while not server.metric("prompt_images_total"):
                time.sleep(0.05)
            began = time.monotonic()
            assert server.stop() == 0
            seconds = time.monotonic() - began
        print(f"ended {seconds:.1f} s after the signal")
        assert seconds < PATIENCE / 2


def _post_and_forget(server: ServerProcess, body: dict[str, Any]) -> None:
    with suppress(httpx.HTTPError):
        server.client.post("/v1/chat/completions", json=body, timeout=PATIENCE)


def test_the_time_of_an_answer_begins_with_the_request(smolvlm_package: Path) -> None:
    options = ("--ctx-len", "256", "--threads", "1", "--slots", "1", "--request-timeout", "0.2")
    large = hostile_images.large_png(6300, 6300, "RGBA")
    with ServerProcess(smolvlm_package, *options) as server:
        answers = post_timed(server, [chat(large)] * 4)
        assert {answer.status_code for answer, _ in answers} == {504}
        error = answers[0][0].json()["error"]
        assert error["code"] == "timeout"
        assert "did not begin in the time" in error["message"]


def photo(seed: int) -> bytes:
    return hostile_images.photo(seed=seed)
