"""Images from hosts that attack: a real server, with https hosts and a resolver of its own."""

from __future__ import annotations

import asyncio
import gzip
import io
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import numpy as np
import pytest

from tests.helpers.fake_images import ROWS
from tests.helpers.fake_package import fake_package
from tests.helpers.internet import Internet
from tests.helpers.servers import ServerProcess, watched

pytestmark = pytest.mark.ci
PUBLIC, OTHER, PRIVATE, SILENT = "93.184.216.34", "93.184.216.35", "10.0.0.5", "93.184.216.36"
MAX_BYTES = 4 << 20
NAMES: Any = {
    "media.example": [[PUBLIC]],
    "other.example": [[OTHER]],
    "private.example": [[PRIVATE]],
    "both.example": [[PUBLIC, PRIVATE]],
    "moves.example": [[PUBLIC], [PRIVATE]],
    "mapped.example": [["::ffff:93.184.216.34"]],
    "translated.example": [["::ffff:0:5db8:d822"]],
    "silent.example": [[SILENT]],
    "lost.example": [None],
}


def image() -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.full((16, 16, 3), 99, np.uint8)).save(file, "PNG")
    return file.getvalue()


PNG = image()


def moved(address: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {address}\r\nContent-Length: 0\r\n\r\n".encode()


def whole(*headers: str, body: bytes = PNG) -> bytes:
    lines = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


BEGIN = b"HTTP/1.1 200 OK\r\n"
ANSWERS = {
    "/a.png": whole(),
    "/on": moved("/a.png"),
    "/away": moved("https://other.example/a.png"),
    "/unlisted": moved("https://evil.example/a.png"),
    "/http": moved("http://media.example/a.png"),
    "/port": moved("https://media.example:8443/a.png"),
    "/address": moved(f"https://{PRIVATE}/a.png"),
    "/file": moved("file:///etc/passwd"),
    "/data": moved("data:image/png;base64,AAAA"),
    "/odd": moved("https://[/"),
    "/round": moved("/round"),
    "/gzip": whole("Content-Encoding: gzip", body=gzip.compress(bytes(50 << 20))),
    "/upgrade": b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n" + bytes(100),
    "/short": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nx",
    "/negative": BEGIN + b"Content-Length: -5\r\n\r\n" + PNG,
    "/huge": BEGIN + b"Content-Length: 99999999999999999999999\r\n\r\n" + PNG,
    "/both": BEGIN + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
}
# Path → what begins the answer, and what goes on for ever.
ENDLESS = {
    "/endless": (BEGIN + b"\r\n", lambda number: bytes(1 << 16)),
    "/headers": (BEGIN, lambda number: b"".join(b"%x:\r\n" % (number << 12 | n) for n in range(4096))),
    "/header": (BEGIN + b"X: ", lambda number: b"x" * (1 << 16)),
    "/trailers": (
        BEGIN + b"Transfer-Encoding: chunked\r\n\r\n0\r\n",
        lambda number: b"".join(b"%x:\r\n" % (number << 12 | n) for n in range(4096)),
    ),
    "/chunks": (BEGIN + b"Transfer-Encoding: chunked\r\n\r\n", lambda number: b"1;xxxx\r\nx\r\n" * 4096),
    "/hints-for-ever": (b"", lambda number: b"HTTP/1.1 103 Early Hints\r\n\r\n" * 1000),
}  # fmt: skip


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    path = (await reader.readuntil(b"\r\n\r\n")).decode().split(" ")[1]
    if path in ENDLESS:
        begin, piece = ENDLESS[path]
        writer.write(begin)
        for number in count():
            writer.write(piece(number))
            await writer.drain()
            await asyncio.sleep(0)
    elif path == "/slow":
        writer.write(BEGIN + b"Content-Length: 1000\r\n\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.2)
    writer.write(ANSWERS[path])
    await writer.drain()
    if path == "/short":
        writer.close()
        return
    await reader.read()  # The client closes the connection.


@pytest.fixture(scope="module")
def internet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Internet]:
    folder = tmp_path_factory.mktemp("internet")
    with Internet(folder, serve, NAMES, (PUBLIC, OTHER, PRIVATE), SILENT) as running:
        yield running


@pytest.fixture(scope="module")
def server(internet: Internet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    package = fake_package(tmp_path_factory.mktemp("fetching") / "package", image=ROWS)
    hosts = [argument for name in NAMES for argument in ("--allowed-media-domains", name)]
    options = ("--threads", "1", "--slots", "2", "--max-image-bytes", str(MAX_BYTES))
    # Proxies of the environment are not used: nobody answers there.
    proxies = dict.fromkeys(("https_proxy", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9")
    environment = {**internet.environment, **proxies}
    with ServerProcess(package.path, *options, *hosts, environment=environment) as running:
        yield running


def ask(server: ServerProcess, address: str) -> tuple[int, str]:
    """The status of a chat with the image at an address, and the message of the error."""
    part = {"type": "image_url", "image_url": {"url": address}}
    body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 2}
    answer = server.client.post("/v1/chat/completions", json=body)
    document = answer.json()
    return answer.status_code, "" if answer.is_success else document["error"]["message"]


@pytest.mark.parametrize("path", ["/a.png", "/on"])
def test_images_come(server: ServerProcess, path: str) -> None:
    assert ask(server, f"https://media.example{path}") == (200, "")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/away", "sends the server to another host, other.example"),
        *((path, "this server fetches https addresses of") for path in ("/unlisted", "/http", "/port", "/address")),
        *((path, "this server fetches https addresses of") for path in ("/file", "/data")),
        ("/odd", "cannot be fetched|which is none"),
        ("/round", "more than 3 times"),
        ("/gzip", "give a PNG, JPEG, WebP or GIF file"),
        *((path, "cannot be fetched|status 101") for path in ("/upgrade", "/negative", "/huge", "/both")),
        ("/short", "ended early"),
    ],
)  # fmt: skip
def test_answers_that_lead_elsewhere_or_nowhere(
    server: ServerProcess, internet: Internet, path: str, message: str
) -> None:
    internet.asked.clear()
    with watched(server):
        status, text = ask(server, f"https://media.example{path}")
    assert status == 400, text
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(text)
    assert {*internet.asked} == {PUBLIC}


@pytest.mark.parametrize("name", ["private", "both", "mapped", "translated"])
def test_names_that_lead_inside(server: ServerProcess, internet: Internet, name: str) -> None:
    internet.asked.clear()
    status, text = ask(server, f"https://{name}.example/a.png")
    assert (status, "leads to an address that is not public" in text) == (400, True), text
    assert internet.asked == []


def test_a_name_that_moves_between_redirects(server: ServerProcess, internet: Internet) -> None:
    internet.asked.clear()
    status, text = ask(server, "https://moves.example/on")
    assert (status, "leads to an address that is not public" in text) == (400, True), text
    assert internet.asked == [PUBLIC]


@pytest.mark.parametrize("path", ENDLESS)
def test_answers_without_end(server: ServerProcess, path: str) -> None:
    """Eight at once. They are cut off by their size, and not by the 10 seconds."""
    with watched(server), ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: ask(server, f"https://media.example{path}"), range(8)))
    assert {status for status, _ in answers} == {400}
    assert {"more than" in text or "status 103" in text for _, text in answers} == {True}, answers


@pytest.mark.slow
@pytest.mark.parametrize(
    "address", ["https://media.example/slow", "https://silent.example/a", "https://lost.example/a"]
)
def test_hosts_that_keep_the_server_waiting(server: ServerProcess, address: str) -> None:
    """Sixteen requests at once, beside a chat without images, which is answered before the first of them gives up."""
    with watched(server), ThreadPoolExecutor(16) as pool:
        waiting = [pool.submit(ask, server, address) for _ in range(16)]
        time.sleep(3)  # All have arrived.
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        chat = server.client.post("/v1/chat/completions", json=body)
        ended = [future for future in waiting if future.done()]
        answers = [future.result() for future in waiting]
    assert (chat.status_code, ended) == (200, [])
    assert {status for status, _ in answers} == {400}
    assert {"did not come within 10 seconds" in text for _, text in answers} == {True}
