"""The server of `qsample web`, asked over real connections: the page's files and the package's, whole or in part."""

from __future__ import annotations

import http.client
import os
import threading
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path

import pytest

from qsample.addons.serve.web import WebServer, check_built
from qsample.errors import QsampleError
from tests.helpers.command_line import qsample
from tests.helpers.fake_package import compilation, fake_package

WASM = bytes(range(256)) * 10


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    (folder / "assets").mkdir()
    (folder / "index.html").write_text("<title>qsample</title>")
    (folder / "assets" / "ort.wasm").write_bytes(WASM)
    (folder / "assets" / "page.mjs").write_text("export {}")
    return folder


@pytest.fixture(scope="module")
def server(page: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    package = fake_package(tmp_path_factory.mktemp("packages") / "fake")
    (package.path / "secret.txt").write_text("not of the package")
    (package.path.parent / "outside.txt").write_text("outside")
    with WebServer(package, port=0, page=page) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def ask(
    server: WebServer, path: str, method: str = "GET", **headers: str
) -> tuple[HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    connection.request(
        method, path, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response, body


def test_files_have_their_types_and_the_headers_of_threads(server: WebServer) -> None:
    for path, kind in (
        ("/", "text/html; charset=utf-8"),
        ("/index.html?package=x", "text/html; charset=utf-8"),
        ("/assets/page.mjs", "text/javascript; charset=utf-8"),
        ("/assets/ort.wasm", "application/wasm"),
        ("/package/qsample.json", "application/json"),
        ("/package/decoder.onnx", "application/octet-stream"),
    ):
        response, body = ask(server, path)
        assert (response.status, response.headers["Content-Type"]) == (200, kind), path
        assert (
            len(body)
            == int(response.headers["Content-Length"])
            == server.files[path.partition("?")[0]].path.stat().st_size
        )
        assert response.headers["Cross-Origin-Opener-Policy"] == "same-origin"
        assert response.headers["Cross-Origin-Embedder-Policy"] == "require-corp"
        head, nothing = ask(server, path, "HEAD")
        assert (head.headers["Content-Length"], nothing) == (
            response.headers["Content-Length"],
            b"",
        )
        again, nothing = ask(server, path, If_None_Match=response.headers["ETag"])
        assert (again.status, nothing) == (304, b"")


@pytest.mark.parametrize(
    ("asked", "first", "end"),
    [
        ("0-0", 0, 1),
        ("100-2559", 100, 2560),
        ("2500-9999", 2500, 2560),
        ("2559-", 2559, 2560),
        ("-60", 2500, 2560),
    ],
)
def test_parts_of_files(server: WebServer, asked: str, first: int, end: int) -> None:
    response, body = ask(server, "/assets/ort.wasm", Range=f"bytes={asked}")
    assert (response.status, response.headers["Content-Range"]) == (
        206,
        f"bytes {first}-{end - 1}/2560",
    )
    assert body == WASM[first:end]


def test_ranges_that_cannot_be_sent(server: WebServer) -> None:
    for asked in ("bytes=2560-", "bytes=5-4", "bytes=-0"):
        response, _ = ask(server, "/assets/ort.wasm", Range=asked)
        assert (response.status, response.headers["Content-Range"]) == (416, "bytes */2560"), asked
    for asked in (
        "bytes=-",
        "bytes=0-1,4-5",
        "lines=0-1",
        "bytes=x-y",
    ):  # which a server may ignore
        assert ask(server, "/assets/ort.wasm", Range=asked)[1] == WASM, asked
    tag = ask(server, "/assets/ort.wasm")[0].headers["ETag"]
    assert ask(server, "/assets/ort.wasm", Range="bytes=0-1", If_Range='"another"')[1] == WASM
    assert ask(server, "/assets/ort.wasm", Range="bytes=0-1", If_Range=tag)[1] == WASM[:2]


def test_no_other_file_is_sent(server: WebServer) -> None:
    outside = [
        "/package/secret.txt",
        "/package/../outside.txt",
        "/package/%2e%2e/outside.txt",
        "//etc/passwd",
    ]
    for path in [
        *outside,
        "/package/..%2foutside.txt",
        "/package",
        "/package/",
        "/../page/index.html",
        "/assets",
        "/%00",
    ]:
        response, body = ask(server, path)
        assert response.status == 404, path
        assert b"outside" not in body
        assert b"not of the package" not in body
    assert ask(server, "/", "POST")[0].status == 501
    assert ask(server, "/", Host="evil.example:80")[0].status == 403
    assert ask(server, "/", Host="[evil")[0].status == 403
    assert ask(server, "HTTP://[")[0].status == 404
    for host in ("localhost:1", "127.0.0.1", "[::1]:80"):
        assert ask(server, "/", Host=host)[0].status == 200


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes in folders")
def test_files_that_become_links_or_pipes_are_not_sent(page: Path, tmp_path: Path) -> None:
    package = fake_package(tmp_path / "package")
    (tmp_path / "outside").write_text("outside")
    with WebServer(package, port=0, page=page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        paths = {
            "/package/qsample.json": package.path / "qsample.json",
            "/assets/page.mjs": page / "assets/page.mjs",
        }
        for path, file in paths.items():
            file.rename(file.with_name("moved"))
            file.symlink_to(tmp_path / "outside")
            assert ask(server, path)[0].status == 404
            file.unlink()
            os.mkfifo(file)
            assert ask(server, path)[0].status == 404
            file.unlink()
            file.symlink_to("moved")
            assert ask(server, path)[0].status == 200, "it stays in the folder"
            file.unlink()
            file.with_name("moved").rename(file)
        server.shutdown()


def test_what_cannot_be_served(page: Path, server: WebServer, tmp_path: Path) -> None:
    good = fake_package(tmp_path / "good")
    for package, options, message in (
        (
            fake_package(tmp_path / "cuda", compilation=compilation(provider="cuda")),
            {},
            "is compiled for cuda",
        ),
        (fake_package(tmp_path / "host", sampler=False), {}, "exported without its sampler"),
        (good, {"page": tmp_path}, "npm --prefix examples/web ci"),
        (good, {"port": server.server_address[1]}, "cannot listen on 127.0.0.1"),
        (good, {"host": "no.such.host.invalid"}, "cannot listen on no.such.host.invalid"),
    ):
        with pytest.raises(QsampleError, match=message):
            WebServer(package, **{"port": 0, "page": page, **options})  # type: ignore[arg-type]


@pytest.mark.ci
def test_the_command_says_what_is_missing(tmp_path: Path) -> None:
    try:
        check_built()
    except QsampleError:
        result = qsample("web", "--port", "0")
        assert result.returncode == 1
        assert "npm --prefix examples/web run build" in result.stderr.replace("\n", " ")
    result = qsample("web", tmp_path / "missing", "--port", "99999")
    assert result.returncode == 2
    assert "--port" in result.stderr
