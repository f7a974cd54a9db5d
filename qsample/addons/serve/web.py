"""A server on this machine of a package and the page that runs it in a browser.

The browser computes: the page (examples/web) loads the package with the npm package `qsample-onnx`,
over ONNX Runtime's build for browsers. This server sends only the page's files and the files of the
package's manifest.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any, BinaryIO, Final
from urllib.parse import unquote, urlsplit

from qsample.addons.serve.hosts import is_allowed, is_loopback
from qsample.errors import QsampleError
from qsample.package.disk.untrusted import leads_out, open_plain
from qsample.package.package import MANIFEST_NAME, Package

PAGE: Final = Path(__file__).resolve().parents[2] / "assets" / "web"
BUILD: Final = "npm --prefix examples/web ci && npm --prefix examples/web run build"
PACKAGE_PATH: Final = "/package/"
# Systems differ in the types that they give to these suffixes.
_CONTENT_TYPES: Final = {
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
    # The first two together make a page "cross-origin isolated". Only such pages have shared
    # memory, and WebAssembly's threads need it.
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'wasm-unsafe-eval' blob:; "
    "worker-src 'self' blob:; connect-src 'self' blob: data:; img-src 'self' data:; "
    "style-src 'self' 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # A browser asks again with the ETag, and gets 304.
    "Cache-Control": "no-cache",
}
_RANGE: Final = re.compile(r"bytes=(\d{0,15})-(\d{0,15})")
_CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class ServedFile:
    """A file that the server sends.

    Attributes:
        path: the path of the file.
        root: the folder that the file must not lead out of if it becomes a link.
    """

    path: Path
    root: Path

    def open(self) -> BinaryIO | None:
        """The open file; None if it was removed since the server started, or is no plain file in
        its folder now."""
        try:
            if leads_out(self.path, [self.root]):
                return None
            return open_plain(self.path)
        except (OSError, ValueError):
            return None


class WebServer(ThreadingTCPServer):
    """Serves the page at /, and the package's files at /package/.

    It is no HTTPServer, because that may take seconds to look up the name of its address.

    Attributes:
        files: path of an address → the file that is sent.
        host: the name or address that the server was given to listen on.
        is_local: whether only this machine reaches the server.
        url: the address of the page.
    """

    daemon_threads = True
    allow_reuse_address = True
    # With socketserver's 5, a browser's connection may wait for a second while others arrive.
    request_queue_size = 128

    def __init__(
        self, package: Package, host: str = "127.0.0.1", port: int = 8080, page: Path = PAGE
    ) -> None:
        """
        Args:
            package: the package that the page runs.
            host, port: the address to listen on; port 0 takes a free port.
            page: the folder of the built page.

        Raises:
            QsampleError: the page is not built, the package does not run in browsers, or the
                address cannot be used.
        """
        check_built(page)
        check_package(package)
        self.files: dict[str, ServedFile] = {}
        for path in page.rglob("*"):
            if path.is_file():
                self.files[f"/{path.relative_to(page).as_posix()}"] = ServedFile(path, page)
        self.files["/"] = self.files["/index.html"]
        for name in (MANIFEST_NAME, *package.manifest.files):
            self.files[PACKAGE_PATH + name] = ServedFile(package.path / name, package.path)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise QsampleError(
                f"cannot listen on {host}, port {port} ({reason}); give another host or port"
            ) from None
        self.host = host
        self.is_local = is_loopback(str(self.server_address[0]))
        address = f"[{host}]" if ":" in host else host
        self.url = f"http://{address}:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report nothing: a browser closes connections as it likes."""


def check_built(page: Path = PAGE) -> None:
    """Raise QsampleError, with the remedy, if the folder `page` does not hold the built page."""
    if not (page / "index.html").is_file():
        raise QsampleError(
            f"{page} has no page: in a checkout of qsample, it has to be built. In its root, with "
            f"Node 20 or newer: {BUILD}"
        )


def check_package(package: Package) -> None:
    """Raise QsampleError, with the remedy, for a package that no browser runs."""
    compilation = package.manifest.compilation
    if compilation is not None and compilation.provider not in ("cpu", "web", "webgpu"):
        raise QsampleError(
            f"{package.path} is compiled for {compilation.provider}, which browsers do not have; "
            "give the portable package, or a package that is compiled for web or webgpu"
        )
    if not package.interface.features.sampler:
        raise QsampleError(
            f"{package.path} was exported without its sampler; "
            "export it with the sampler in its graph"
        )
    if not package.has("tokenizer.json"):
        raise QsampleError(
            f"{package.path} has no tokenizer.json, which the page needs; "
            "export the model with its tokenizer"
        )


class _Handler(BaseHTTPRequestHandler):
    server: WebServer
    protocol_version = "HTTP/1.1"
    server_version = "qsample"
    sys_version = ""
    # A connection is closed after this number of seconds without a byte.
    timeout = 60

    def do_GET(self) -> None:
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            # Nobody reads the body, which must not be taken for the next request.
            self.close_connection = True
        name = self.headers.get("Host", "")
        if self.server.is_local and not is_allowed(name, (self.server.host,)):
            self.send_error(403, explain="this server answers to localhost and to addresses only")
            return
        served = self.server.files.get(unquote(_path(self.path)))
        file = None if served is None else served.open()
        if served is None or file is None:
            self.send_error(404)
            return
        with file:
            content_type = _CONTENT_TYPES.get(served.path.suffix, "application/octet-stream")
            self._send(file, content_type)

    do_HEAD = do_GET  # noqa: N815  # http.server's name for the method

    def _send(self, file: BinaryIO, content_type: str) -> None:
        status = os.fstat(file.fileno())
        tag = f'"{status.st_size:x}-{status.st_mtime_ns:x}"'
        if tag in self.headers.get("If-None-Match", ""):
            part = _FilePart(HTTPStatus.NOT_MODIFIED, 0, 0, status.st_size)
        elif self.headers.get("If-Range", tag) == tag:
            part = _FilePart.requested(self.headers.get("Range", ""), status.st_size)
        else:
            part = _FilePart.whole(status.st_size)
        self.send_response(part.status)
        self.send_header("Content-Type", content_type)
        self.send_header("ETag", tag)
        self.send_header("Accept-Ranges", "bytes")
        if part.content_range is not None:
            self.send_header("Content-Range", part.content_range)
        self.send_header("Content-Length", str(part.content_length))
        self.end_headers()
        if self.command != "HEAD":
            self._write(file, part)

    def _write(self, file: BinaryIO, part: _FilePart) -> None:
        file.seek(part.start)
        remaining = part.end - part.start
        while remaining > 0:
            chunk = file.read(min(_CHUNK_BYTES, remaining))
            if not chunk:
                # The file became shorter. The next answer must not take the place of the rest.
                self.close_connection = True
                return
            self.wfile.write(chunk)
            remaining -= len(chunk)

    def end_headers(self) -> None:
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the page says what it loads."""


def _path(address: str) -> str:
    """The path of an address; "" for a text that is no address, such as http://[."""
    try:
        return urlsplit(address).path
    except ValueError:
        return ""


@dataclass(frozen=True, slots=True)
class _FilePart:
    """The part of a file that an answer sends.

    Attributes:
        status: the status of the answer.
        start, end: the first byte, and the byte after the last.
        file_size: the size of the file, in bytes.
    """

    status: HTTPStatus
    start: int
    end: int
    file_size: int

    @classmethod
    def whole(cls, file_size: int) -> _FilePart:
        return cls(HTTPStatus.OK, 0, file_size, file_size)

    @classmethod
    def requested(cls, header: str, file_size: int) -> _FilePart:
        """The part that a Range header asks for; the whole file for several ranges or none."""
        asked = _RANGE.fullmatch(header)
        if asked is None or not any(asked.groups()):
            return cls.whole(file_size)
        first, last = asked.groups()
        if not first:  # The range is the last bytes of the file.
            start = max(0, file_size - int(last))
            end = file_size
        else:
            start = int(first)
            end = min(file_size, int(last) + 1) if last else file_size
        if start < end:
            return cls(HTTPStatus.PARTIAL_CONTENT, start, end, file_size)
        return cls(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, start, end, file_size)

    @property
    def content_range(self) -> str | None:
        """The value of the Content-Range header."""
        if self.status == HTTPStatus.PARTIAL_CONTENT:
            return f"bytes {self.start}-{self.end - 1}/{self.file_size}"
        if self.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return f"bytes */{self.file_size}"
        return None

    @property
    def content_length(self) -> int:
        """The value of the Content-Length header. 304 stands for the whole file."""
        if self.status == HTTPStatus.NOT_MODIFIED:
            return self.file_size
        return max(0, self.end - self.start)
