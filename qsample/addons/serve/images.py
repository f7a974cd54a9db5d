"""Images of a conversation: from the parts of a body to their bytes, within the server's limits.

The order keeps a request from costing more than it may: images are counted, their addresses and the lengths of base64
texts checked, and only then is anything fetched or decoded. An address is fetched from the hosts that the server allows
alone, over https, from a public address: the one that was checked is the one that is connected to (a name that leads
elsewhere a moment later, DNS rebinding, changes nothing). See docs/security.md.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

import httptools

from qsample.addons.serve.http import ApiError
from qsample.disk.untrusted import open_plain
from qsample.errors import shown
from qsample.images.messages import check_base64, decode_data_url
from qsample.text.chat import IMAGE_TYPES

_DETAILS: Final = ("auto", "low", "high", "original")  # OpenAI's; each is read as "auto"
_SECONDS: Final = 10.0  # for an image, redirects included
_AT_ONCE: Final = 8  # fetches
_REDIRECTS: Final = 3
_MOVED: Final = (301, 302, 303, 307, 308)
_HEAD: Final = 2**16  # bytes of an answer beside its image
_PIECE: Final = 2**16
_HTTPS: Final = 443
_TARGET: Final = re.compile(r"/[!-~]*")
_NAT64: Final = ipaddress.ip_network(
    "64:ff9b::/96"
)  # RFC 6052: an IPv4 address in its last 32 bits


def take_addresses(
    messages: Sequence[Mapping[str, Any]], most: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """The messages with {"type": "image"} for each image, and the images' addresses in order.

    A body's part is OpenAI's {"type": "image_url", "image_url": {"url": ..., "detail": ...}} and no other: the forms of
    Python's messages name files of this machine. Raises ApiError for another part of an image, and for more images than
    `most`.
    """
    parts = [
        part
        for message in messages
        if isinstance(content := message.get("content"), list)
        for part in content
        if isinstance(part, dict) and part.get("type") in IMAGE_TYPES
    ]
    if len(parts) > most:
        raise _refused(
            f"the request has {len(parts)} images, and this server takes {most}; give fewer"
        )
    addresses = [_address(part) for part in parts]
    bare = {id(part) for part in parts}
    taken = [dict(message) for message in messages]
    for message in taken if parts else ():
        if isinstance(content := message.get("content"), list):
            message["content"] = [
                {"type": IMAGE_TYPES[0]} if id(part) in bare else part for part in content
            ]
    return taken, addresses


def _address(part: Mapping[str, Any]) -> str:
    given: Any = part.get("image_url")
    given = {"url": given} if isinstance(given, str) else given
    if (
        part["type"] != "image_url"
        or not isinstance(given, dict)
        or not isinstance(given.get("url"), str)
    ):
        form = '{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}'
        raise _refused(f"a part of type {part['type']!r} has no image_url with a url; give {form}")
    if (detail := given.get("detail")) not in (None, *_DETAILS):
        raise _refused(
            f"the detail of an image is {shown(detail)}; give one of {', '.join(_DETAILS)}"
        )
    return str(given["url"])


def _refused(text: str) -> ApiError:
    return ApiError(400, text, code="invalid_image")


@dataclass(frozen=True, slots=True)
class MediaReader:
    """Reads the images of requests from data URLs, from the https addresses of `domains` and the files below `folder`,
    of `most_bytes` bytes each at most. `resolve`, `connect`, `context`: of the network; by default the certificates are
    the system's."""

    most_bytes: int
    domains: Sequence[str] = ()
    folder: str | None = None
    resolve: Callable[[str], Awaitable[list[str]]] = field(default_factory=lambda: _resolve)
    connect: Callable[..., Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]] = (
        asyncio.open_connection
    )
    context: ssl.SSLContext | None = None
    _fetches: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_AT_ONCE))

    async def read(self, addresses: Sequence[str]) -> list[bytes]:
        """The bytes of each image; nothing is read before every address is checked. Raises ApiError."""
        for address in addresses:
            self._check(address)
        return [await self._read(address) for address in addresses]

    def _check(self, address: str) -> None:
        scheme = address[: address.find(":")].lower()
        if scheme == "data":
            try:
                check_base64(len(address) - address.find(",") - 1, self.most_bytes)
            except ValueError as error:
                raise _refused(str(error)) from None
        elif scheme == "file":
            self._path(address)
        else:
            self._host(address)

    async def _read(self, address: str) -> bytes:
        if address[:5].lower() == "data:":
            try:
                return await asyncio.to_thread(decode_data_url, address, self.most_bytes)
            except ValueError as error:
                raise _refused(str(error)) from None
        if address[:5].lower() == "file:":
            return await asyncio.to_thread(self._read_file, address)
        async with self._fetches:
            try:
                async with asyncio.timeout(_SECONDS):
                    return await self._fetch(address)
            except TimeoutError:
                raise _refused(
                    f"{address:.100} did not come within {_SECONDS:g} seconds; send a data URL"
                ) from None
            except (OSError, ssl.SSLError, httptools.HttpParserError, ValueError) as error:
                raise _refused(
                    f"{address:.100} cannot be fetched ({type(error).__name__}); send a data URL"
                ) from None

    def _path(self, address: str) -> Path:
        """Of a file: address below `folder`."""
        parts = urlsplit(address)
        path = unquote(parts.path)
        if self.folder is None:
            text = "this server reads no files for its clients; send a data URL, or start it with "
            raise _refused(text + "--allowed-local-media-path")
        if parts.netloc not in ("", "localhost") or ".." in path.split("/") or "\0" in path:
            raise _refused(
                "an image's file: address has another host, or .. in its path; give the file's own path"
            )
        return Path(path)

    def _read_file(self, address: str) -> bytes:
        assert self.folder is not None
        real = os.path.realpath(self._path(address))
        # Whatever is wrong, the answer is the same: it tells nothing of the files elsewhere.
        error = _refused(
            f"{address:.100} is no plain file of at most {self.most_bytes} bytes below the allowed folder"
        )
        if not Path(real).is_relative_to(os.path.realpath(self.folder)):
            raise error
        try:
            with open_plain(real) as file:
                content = file.read(self.most_bytes + 1)
        except (OSError, ValueError):
            raise error from None
        if len(content) > self.most_bytes:
            raise error
        return content

    def _host(self, address: str) -> SplitResult:
        """The parts of an https address of one of `domains`."""
        try:
            parts = urlsplit(address)
            port = parts.port
        except ValueError:
            raise _refused(
                f"an image's address is {address[:100]!r}, which is none; send a data URL"
            ) from None
        if not self.domains:
            text = "this server fetches no images; send a data URL, or start it with --allowed-media-domains"
            raise _refused(
                f"an image's address is {address[:100]!r}, and {text} {parts.hostname or 'HOST'}"
            )
        allowed = parts.scheme == "https" and port in (None, _HTTPS) and parts.username is None
        if not allowed or parts.hostname not in self.domains:
            known = ", ".join(self.domains)
            raise _refused(
                f"an image's address is {address[:100]!r}; this server fetches https addresses of {known}"
            )
        if not _TARGET.fullmatch(_target(parts)):
            raise _refused(
                f"an image's address is {address[:100]!r}; write other characters as %XX"
            )
        return parts

    async def _fetch(self, address: str) -> bytes:
        first = self._host(address).hostname
        for _ in range(_REDIRECTS + 1):
            parts = self._host(address)
            if parts.hostname != first:
                raise _refused(
                    f"{first} sends the server to another host, {parts.hostname}; give that address"
                )
            status, headers, body = await self._get(str(first), _target(parts))
            if status in _MOVED and b"location" in headers:
                address = urljoin(address, headers[b"location"].decode("latin-1"))
            elif status == 200:
                return body
            else:
                raise _refused(f"{address:.100} answers with status {status}; send a data URL")
        raise _refused(f"{first} sends the server on more than {_REDIRECTS} times; send a data URL")

    async def _get(self, host: str, target: str) -> tuple[int, dict[bytes, bytes], bytes]:
        """The status, headers and body of an answer."""
        addresses = await self.resolve(host)
        if not addresses or not all(map(is_public, addresses)):
            raise _refused(f"{host} leads to an address that is not public; send a data URL")
        reader, writer = await self.connect(
            addresses[0], _HTTPS, ssl=self.context or _system_context(), server_hostname=host
        )
        try:
            head = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nAccept: image/*\r\nAccept-Encoding: identity\r\n"
            writer.write(f"{head}User-Agent: qsample\r\nConnection: close\r\n\r\n".encode("ascii"))
            answer, received = _Answer(), 0
            parser = httptools.HttpResponseParser(answer)
            while not answer.whole and (piece := await reader.read(_PIECE)):
                parser.feed_data(piece)
                received += len(piece)
                if received > self.most_bytes + _HEAD or len(answer.body) > self.most_bytes:
                    raise _refused(
                        f"an image of {host} has more than {self.most_bytes} bytes; give a smaller one"
                    )
        finally:
            writer.close()
        if not answer.whole and answer.headers.keys() & {b"content-length", b"transfer-encoding"}:
            raise _refused(f"an image of {host} ended early; send a data URL")
        return parser.get_status_code(), answer.headers, bytes(answer.body)


class _Answer:
    """What httptools' parser calls."""

    def __init__(self) -> None:
        self.headers: dict[bytes, bytes] = {}
        self.body = bytearray()
        self.whole = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.whole = True


def _target(parts: SplitResult) -> str:
    return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


@cache
def _system_context() -> ssl.SSLContext:
    return ssl.create_default_context()


async def _resolve(host: str) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, _HTTPS, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def is_public(address: str) -> bool:
    """Whether an IP address is of the internet: not of this machine, a private network or a link, nor an IPv6 address
    that stands for such an IPv4 address (mapped, 6to4, Teredo, NAT64)."""
    try:
        ip: Any = ipaddress.ip_address(address)
    except ValueError:
        return False
    if ip.version == 6:
        inner = [ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())]
        inner += [ipaddress.ip_address(int(ip) & 0xFFFFFFFF)] if ip in _NAT64 else []
        if not all(each.is_global for each in inner if each is not None):
            return False
        if ip.ipv4_mapped is not None:
            return True
    return bool(ip.is_global and not ip.is_multicast)
