"""The server of `qsample web` as a process of its own, and clients that mean it no good."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.command_line import ROOT
from tests.helpers.fake_package import fake_package

LARGE = 64 << 20
PATIENCE = 120  # seconds; a busy machine takes long
RUN = """
import sys
from pathlib import Path
from qsample.addons.serve.web import WebServer
from qsample.package.package import read_package
with WebServer(read_package(Path(sys.argv[1])), port=0, page=Path(sys.argv[2])) as server:
    print(server.server_address[1], flush=True)
    server.serve_forever()
"""


class Web:
    def __init__(self, folder: Path) -> None:
        self.page = folder / "page"
        self.page.mkdir()
        (self.page / "index.html").write_text("the page")
        with (self.page / "large.wasm").open("wb") as file:
            file.truncate(LARGE)
        self.package = fake_package(folder / "package").path
        (self.package / "secret.txt").write_text("a secret")
        (folder / "secret.txt").write_text("a secret")
        command = [sys.executable, "-c", RUN, str(self.package), str(self.page)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), PATIENCE)

    def ask(self, *requests: bytes) -> bytes:
        """All that comes back on a connection."""
        with self.connect() as connection:
            connection.sendall(b"".join(requests))
            answer = b""
            while piece := connection.recv(1 << 16):
                answer += piece
            return answer

    @property
    def memory(self) -> int:
        """Resident MiB."""
        text = Path(f"/proc/{self.process.pid}/statm").read_text("ascii")
        return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    running = Web(tmp_path_factory.mktemp("web"))
    yield running
    assert running.process.poll() is None
    running.process.kill()
    running.process.wait()


def get(path: str | bytes, *headers: str) -> bytes:
    """A request, after whose answer the connection is closed."""
    target = path.encode() if isinstance(path, str) else path
    lines = "\r\n".join(["Host: localhost", "Connection: close", *headers, "", ""])
    return b"GET " + target + b" HTTP/1.1\r\n" + lines.encode()


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt", "/package/../secret.txt", "/package/%2e%2e/secret.txt", "/package/..%2fsecret.txt",
        "/package%2f..%2fsecret.txt", "/package/%252e%252e/secret.txt", "/package/secret.txt", "/package//secret.txt",
        "/package/..\\secret.txt", "/package/secret.txt%00.json", "/%00", "/index.html%00", "/package/secret.txt/",
        "//localhost/../secret.txt", "/package/%c0%ae%c0%ae/secret.txt", "/package/%ff", "/package/.%2e/secret.txt",
        "http://localhost/package/secret.txt", "http://[", "http://localhost/../secret.txt", "file:///etc/passwd", "*",
        "/" + "a" * 60_000, b"/package/\xff\xfe",
    ],
)  # fmt: skip
def test_other_paths(web: Web, path: str | bytes) -> None:
    answer = web.ask(get(path))
    assert answer.startswith(b"HTTP/1.1 404"), answer[:100]
    assert b"secret" not in answer.partition(b"\r\n\r\n")[2]


def test_requests_that_are_no_good(web: Web) -> None:
    assert web.ask(get("/" + "a" * 70_000)).startswith(b"HTTP/1.1 414")
    many = [f"X-{number}: {'x' * 100}" for number in range(1000)]
    assert web.ask(get("/", *many)).startswith(b"HTTP/1.1 431")
    assert web.ask(get("/", "X: " + "x" * 70_000)).startswith(b"HTTP/1.1 431")
    assert web.ask(b"\0" * 100 + b"\r\n\r\n").startswith(b"<!DOCTYPE HTML>")
    rebound = b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n"
    assert web.ask(rebound).startswith(b"HTTP/1.1 403")
    # An absolute address is no way around the name.
    rebound = b"GET http://localhost/ HTTP/1.1\r\nHost: evil.example\r\n\r\n"
    assert web.ask(rebound).startswith(b"HTTP/1.1 403")
    assert web.ask(get("/")).endswith(b"the page")


@pytest.mark.parametrize("header", ["Content-Length: {}", "Transfer-Encoding: chunked"])
def test_a_body_is_no_second_request(web: Web, header: str) -> None:
    """A proxy in front would take the second answer for that of another client (request smuggling)."""
    hidden = get("/package/qsample.json")
    head = f"GET / HTTP/1.1\r\nHost: localhost\r\n{header.format(len(hidden))}\r\n\r\n".encode()
    assert web.ask(head, hidden).count(b"HTTP/1.1 200") == 1


def read_head(connection: socket.socket) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += connection.recv(1)
    return head


@pytest.mark.parametrize("becomes", ["truncated", "replaced"])
def test_a_file_that_changes_while_it_is_sent(web: Web, becomes: str) -> None:
    """Whole as it was, or an answer that ends early; never the next answer in place of what lacks."""
    file = web.page / "large.wasm"
    request = b"GET /large.wasm HTTP/1.1\r\nHost: localhost\r\n\r\n"
    content = bytearray()
    try:
        with web.connect() as connection:
            connection.sendall(request)
            assert f"Content-Length: {LARGE}".encode() in read_head(connection)
            if becomes == "truncated":
                os.truncate(file, 1000)
            else:
                (web.page / "new").write_bytes(b"new")
                (web.page / "new").replace(file)
            connection.sendall(get("/"))
            # A server that closes a connection before it has read all of it resets the connection.
            with contextlib.suppress(ConnectionResetError):
                while piece := connection.recv(1 << 20):
                    content += piece
    finally:
        file.unlink()
        with file.open("wb") as again:
            again.truncate(LARGE)
    if becomes == "truncated":
        assert len(content) < LARGE
        assert content.count(0) == len(content)
    else:
        assert content[:LARGE].count(0) == LARGE
        assert content.endswith(b"the page")


@pytest.mark.ci
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_clients_that_wait(web: Web) -> None:
    """600 connections: idle, with half a request, or with an answer that they do not read."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    connections = []
    try:
        began = time.monotonic()
        for number in range(600):
            connection = web.connect()
            connections.append(connection)
            if number % 3 == 1:
                connection.sendall(b"GET / HTTP/1.1\r\nHost: lo")
            elif number % 3 == 2:
                connection.sendall(get("/large.wasm"))
        print(f"600 connections after {time.monotonic() - began:.1f} s, {web.memory} MiB")
        began = time.monotonic()
        assert web.ask(get("/")).endswith(b"the page")
        print(f"answered after {time.monotonic() - began:.1f} s, {web.memory} MiB")
        assert web.memory < 1024
    finally:
        for connection in connections:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
