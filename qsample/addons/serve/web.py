"""A package and the page that runs it in a browser → a server on this machine: files, and nothing but files.

The browser computes: the page (examples/web) loads the package with the npm package `qsample-onnx`, over ONNX Runtime's
build for browsers. This server sends only the page's files and the files of the package's manifest.
"""

from __future__ import annotations

import os
import re
import socket
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any, BinaryIO, Final
from urllib.parse import unquote, urlsplit

from qsample.addons.serve.hosts import is_allowed, is_loopback
from qsample.disk.untrusted import leads_out, open_plain
from qsample.errors import QsampleError
from qsample.package.package import MANIFEST_NAME, Package

PAGE: Final = Path(__file__).resolve().parents[2] / "assets" / "web"
BUILD: Final = "npm --prefix examples/web ci && npm --prefix examples/web run build"
PACKAGE_PATH: Final = "/package/"
# What a system says of these differs.
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".mjs": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".wasm": "application/wasm",
}
_HEADERS: Final = {
    # Both together make a page "cross-origin isolated", for which browsers have shared memory: WebAssembly's threads.
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'wasm-unsafe-eval' blob:; "
    "worker-src 'self' blob:; connect-src 'self' blob: data:; img-src 'self' data:; "
    "style-src 'self' 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # a browser asks with the ETag, and gets 304
}
_RANGE: Final = re.compile(r"bytes=(\d{0,15})-(\d{0,15})")
_PIECE: Final = 1 << 20  # bytes of a file in memory


class WebServer(
    ThreadingTCPServer
):  # an HTTPServer may take seconds to look up the name of its address
    """Serves the page at /, and the package's files at /package/. port 0 takes a free port. Raises QsampleError if the
    page is not built, the package does not run in browsers, or the address cannot be used."""

    daemon_threads = allow_reuse_address = True

    def __init__(
        self, package: Package, host: str = "127.0.0.1", port: int = 8080, page: Path = PAGE
    ) -> None:
        check_built(page)
        check_package(package)
        pages = {
            f"/{path.relative_to(page).as_posix()}": path
            for path in page.rglob("*")
            if path.is_file()
        }
        names = (MANIFEST_NAME, *package.manifest.files)
        # By the path of an address: a file, and the folder that it may not lead out of, if it becomes a link.
        self.files = {
            path: (page, file) for path, file in (pages | {"/": pages["/index.html"]}).items()
        }
        self.files |= {PACKAGE_PATH + name: (package.path, package.path / name) for name in names}
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.is_local = is_loopback(host)
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise QsampleError(
                f"cannot listen on {host}, port {port} ({reason}); give another host or port"
            ) from None
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a browser closes connections as it likes."""


def check_built(page: Path = PAGE) -> None:
    """Raise QsampleError, with the remedy, if the folder `page` does not hold the built page."""
    if not (page / "index.html").is_file():
        raise QsampleError(
            f"{page} has no page: in a checkout of qsample, it has to be built. In its root, with Node 20 or "
            f"newer: {BUILD}"
        )


def check_package(package: Package) -> None:
    """Raise QsampleError, with the remedy, for a package that no browser runs."""
    compilation = package.manifest.compilation
    if compilation is not None and compilation.provider not in ("cpu", "web", "webgpu"):
        raise QsampleError(
            f"{package.path} is compiled for {compilation.provider}, which browsers do not have; give the portable "
            "package, or a package that is compiled for web or webgpu"
        )
    if not package.interface.features.sampler:
        raise QsampleError(
            f"{package.path} was exported without its sampler; export it with the sampler in its graph"
        )
    if not package.has("tokenizer.json"):
        raise QsampleError(
            f"{package.path} has no tokenizer.json, which the page needs; export the model with its tokenizer"
        )


class _Handler(BaseHTTPRequestHandler):
    server: WebServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "qsample", ""
    timeout = 60  # seconds without a byte, then a connection is closed

    def do_GET(self) -> None:
        if self.server.is_local and not is_allowed(self.headers.get("Host", "")):
            return self.send_error(
                403, explain="this server answers to localhost and to addresses only"
            )
        root, file = self.server.files.get(unquote(_path(self.path)), (None, None))
        try:
            opened = (
                None
                if root is None or file is None or leads_out(file, [root])
                else open_plain(file)
            )
        except (OSError, ValueError):  # removed since the server started, or a pipe
            opened = None
        if file is None or opened is None:
            return self.send_error(404)
        with opened:
            self._send(opened, _TYPES.get(file.suffix, "application/octet-stream"))
        return None

    do_HEAD = do_GET  # noqa: N815  # http.server's name for the method

    def _send(self, opened: BinaryIO, kind: str) -> None:
        about = os.fstat(opened.fileno())
        tag, size = f'"{about.st_size:x}-{about.st_mtime_ns:x}"', about.st_size
        headers = {"Content-Type": kind, "ETag": tag, "Accept-Ranges": "bytes"}
        first, end, status = 0, size, HTTPStatus.OK
        asked = _RANGE.fullmatch(
            self.headers.get("Range", "")
        )  # several ranges in a request get the whole file
        if tag in self.headers.get("If-None-Match", ""):
            status, end = HTTPStatus.NOT_MODIFIED, 0
        elif asked and any(asked.groups()) and self.headers.get("If-Range", tag) == tag:
            # Without its first byte, a range is the end of the file; without its last, it reaches to the end.
            first = int(asked[1]) if asked[1] else max(0, size - int(asked[2]))
            end = min(size, int(asked[2]) + 1) if asked[1] and asked[2] else size
            if first < end:
                status, headers["Content-Range"] = (
                    HTTPStatus.PARTIAL_CONTENT,
                    f"bytes {first}-{end - 1}/{size}",
                )
            else:
                status, headers["Content-Range"] = (
                    HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
                    f"bytes */{size}",
                )
        self.send_response(status)
        length = (
            size if status == HTTPStatus.NOT_MODIFIED else max(0, end - first)
        )  # of the file that 304 stands for
        for name, value in (headers | {"Content-Length": str(length)}).items():
            self.send_header(name, value)
        self.end_headers()
        opened.seek(first)
        while (
            first < end
            and self.command != "HEAD"
            and (piece := opened.read(min(_PIECE, end - first)))
        ):
            self.wfile.write(piece)
            first += len(piece)

    def end_headers(self) -> None:
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the page says what it loads."""


def _path(address: str) -> str:
    """The path of an address; "" if it is none, such as http://[."""
    try:
        return urlsplit(address).path
    except ValueError:
        return ""
