"""Images of a conversation: from the parts of a body to their bytes, within the server's limits.

The order keeps a request from costing more than it may: images are counted, their addresses and the
lengths of base64 texts are checked, and only then is an image fetched or decoded. Images are
fetched only from hosts that the server allows, over https and from public addresses. The server
connects to the address that it checked, so a name that leads elsewhere a moment later (DNS
rebinding) changes nothing. See docs/security.md.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Final
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

import httptools

from qsample.addons.serve.http import ApiError
from qsample.errors import shown
from qsample.images.messages import check_base64, decode_data_url
from qsample.package.disk.untrusted import open_plain, path_below
from qsample.request.text.conversation import IMAGE_TYPES

# OpenAI's details. Each is read as "auto".
_DETAILS: Final = ("auto", "low", "high", "original")
# An image has this time to come, redirects included.
_MAX_FETCH_SECONDS: Final = 10.0
_MAX_FETCHES_AT_ONCE: Final = 8
_MAX_REDIRECTS: Final = 3
_REDIRECT_STATUSES: Final = (301, 302, 303, 307, 308)
# An answer may have this size in addition to its image.
_MAX_HEAD_BYTES: Final = 2**16
_READ_BYTES: Final = 2**16
_HTTPS_PORT: Final = 443
_FETCH_ERRORS: Final = (
    OSError,
    ssl.SSLError,
    httptools.HttpParserError,
    # It is no HttpParserError: the host takes the connection for another protocol.
    httptools.HttpParserUpgrade,
    ValueError,
)
_REQUEST_TARGET: Final = re.compile(r"/[!-~]*")
# These blocks have no public hosts: those of IANA's registry that are not globally reachable (RFC
# 6890), multicast, and anycast addresses of relays. Python's own tables age with Python.
# https://www.iana.org/assignments/iana-ipv4-special-registry
_SPECIAL_IPV4: Final = tuple(
    map(
        ipaddress.IPv4Network,
        (
            "0.0.0.0/8",  # RFC 791
            "10.0.0.0/8",  # RFC 1918
            "100.64.0.0/10",  # RFC 6598
            "127.0.0.0/8",  # RFC 1122
            "169.254.0.0/16",  # RFC 3927
            "172.16.0.0/12",  # RFC 1918
            "192.0.0.0/24",  # RFC 6890
            "192.0.2.0/24",  # RFC 5737
            "192.88.99.0/24",  # RFC 7526, RFC 6751
            "192.168.0.0/16",  # RFC 1918
            "198.18.0.0/15",  # RFC 2544
            "198.51.100.0/24",  # RFC 5737
            "203.0.113.0/24",  # RFC 5737
            "224.0.0.0/4",  # RFC 5771
            "240.0.0.0/4",  # RFC 1112
        ),
    )
)
# Of IPv6, IANA gives public addresses from this block only (RFC 4291).
_PUBLIC_IPV6: Final = ipaddress.IPv6Network("2000::/3")
# https://www.iana.org/assignments/iana-ipv6-special-registry, and tunnels to IPv4 addresses.
_SPECIAL_IPV6: Final = tuple(
    map(
        ipaddress.IPv6Network,
        (
            "2001::/23",  # RFC 2928; it contains Teredo's tunnels (RFC 4380)
            "2001:db8::/32",  # RFC 3849
            "2002::/16",  # RFC 3056 (6to4)
            "3fff::/20",  # RFC 9637
        ),
    )
)
# In networks without IPv4, DNS has these addresses for hosts that only have an IPv4 address, which
# is the last 32 bits (RFC 6052, RFC 6147).
_NAT64_NETWORK: Final = ipaddress.IPv6Network("64:ff9b::/96")


def take_addresses(
    messages: Sequence[Mapping[str, Any]], max_images: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """The messages with {"type": "image"} for each image, and the images' addresses in order.

    The part of a body with an image is OpenAI's {"type": "image_url", "image_url": {"url": ...,
    "detail": ...}} and no other: the forms of Python's messages name files of this machine.

    Args:
        messages: the messages of a body.
        max_images: the largest number of images.

    Raises:
        ApiError: the messages have another part with an image, or more images than `max_images`.
    """
    num_images = sum(_is_image(part) for message in messages for part in _parts_of(message))
    if num_images > max_images:
        raise _refused(
            f"the request has {num_images} images, and this server takes {max_images}; give fewer"
        )
    changed: list[dict[str, Any]] = []
    addresses: list[str] = []
    for message in messages:
        parts = []
        for part in _parts_of(message):
            if _is_image(part):
                addresses.append(_address(part))
                part = {"type": IMAGE_TYPES[0]}
            parts.append(part)
        has_parts = isinstance(message.get("content"), list)
        changed.append({**message, "content": parts} if has_parts else dict(message))
    return changed, addresses


def _parts_of(message: Mapping[str, Any]) -> list[Any]:
    """The parts of a message's content; none if the content is a text."""
    content = message.get("content")
    return content if isinstance(content, list) else []


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in IMAGE_TYPES


def _address(part: Mapping[str, Any]) -> str:
    """The address of an image."""
    image_url: Any = part.get("image_url")
    if isinstance(image_url, str):
        image_url = {"url": image_url}
    is_openai_part = part["type"] == "image_url" and isinstance(image_url, dict)
    if not is_openai_part or not isinstance(image_url.get("url"), str):
        raise _refused(
            f"a part of type {part['type']!r} has no image_url with a url; "
            'give {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}'
        )
    detail = image_url.get("detail")
    if detail is not None and detail not in _DETAILS:
        raise _refused(
            f"the detail of an image is {shown(detail)}; give one of {', '.join(_DETAILS)}"
        )
    return str(image_url["url"])


def _refused(text: str) -> ApiError:
    return ApiError(400, text, code="invalid_image")


@dataclass(frozen=True, slots=True)
class MediaReader:
    """Reads the images of requests.

    Attributes:
        max_bytes: the largest size of an image.
        domains: the hosts whose https addresses are fetched.
        folder: the folder whose files are read, if there is one.
        resolve: returns the addresses of a host.
        connect: opens a connection, as asyncio.open_connection.
        context: the certificates to trust, by default the system's.
    """

    max_bytes: int
    domains: Sequence[str] = ()
    folder: str | None = None
    resolve: Callable[[str], Awaitable[list[str]]] = field(default_factory=lambda: _resolve)
    connect: Callable[..., Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]] = (
        asyncio.open_connection
    )
    context: ssl.SSLContext | None = None
    _fetches: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(_MAX_FETCHES_AT_ONCE)
    )

    def check(self, addresses: Sequence[str]) -> int:
        """The most bytes that the images take together, before any is read.

        Raises:
            ApiError: an address is wrong or not allowed, or leads to too many bytes.
        """
        return sum(self._check(address) for address in addresses)

    async def read(self, addresses: Sequence[str]) -> list[bytes]:
        """The bytes of each image. No image is read before every address is checked.

        Raises:
            ApiError: an image cannot be read.
        """
        self.check(addresses)
        return [await self._read(address) for address in addresses]

    def _check(self, address: str) -> int:
        """The most bytes that an image takes. Raises ApiError."""
        match _scheme(address):
            case "data":
                length = len(address) - address.find(",") - 1
                try:
                    check_base64(length, self.max_bytes)
                except ValueError as error:
                    raise _refused(str(error)) from None
                return min(length, self.max_bytes)
            case "file":
                self._path(address)
            case _:
                self._checked_url(address)
        return self.max_bytes

    async def _read(self, address: str) -> bytes:
        match _scheme(address):
            case "data":
                try:
                    return await asyncio.to_thread(decode_data_url, address, self.max_bytes)
                except ValueError as error:
                    raise _refused(str(error)) from None
            case "file":
                return await asyncio.to_thread(self._read_file, address)
            case _:
                return await self._fetch_in_time(address)

    def _path(self, address: str) -> str:
        """The path of a file: address. `_read_file` checks that it is below `folder`."""
        parts = urlsplit(address)
        path = unquote(parts.path)
        if self.folder is None:
            raise _refused(
                "this server reads no files for its clients; send a data URL, or start it with "
                "--allowed-local-media-path"
            )
        if parts.netloc not in ("", "localhost") or ".." in path.split("/") or "\0" in path:
            raise _refused(
                "an image's file: address has another host, or .. in its path; "
                "give the file's own path"
            )
        return path

    def _read_file(self, address: str) -> bytes:
        assert self.folder is not None
        # The answer is the same for every fault, because it must tell nothing of other files.
        error = _refused(
            f"{address:.100} is no plain file of at most {self.max_bytes} bytes below the allowed "
            "folder"
        )
        try:
            path = path_below(self.folder, self._path(address))
            if path is None:
                raise error
            with open_plain(path) as file:
                content = file.read(self.max_bytes + 1)
        except (OSError, ValueError):
            raise error from None
        if len(content) > self.max_bytes:
            raise error
        return content

    def _checked_url(self, address: str) -> SplitResult:
        """The parts of an https address of one of `domains`."""
        given = f"an image's address is {address[:100]!r}"
        try:
            parts = urlsplit(address)
            port = parts.port
        except ValueError:
            raise _refused(f"{given}, which is none; send a data URL") from None
        if not self.domains:
            raise _refused(
                f"{given}, and this server fetches no images; send a data URL, or start it with "
                f"--allowed-media-domains {'HOST' if parts.hostname is None else parts.hostname}"
            )
        is_plain_https = (
            parts.scheme == "https" and port in (None, _HTTPS_PORT) and parts.username is None
        )
        if not is_plain_https or parts.hostname not in self.domains:
            known = ", ".join(self.domains)
            raise _refused(f"{given}; this server fetches https addresses of {known}")
        if not _REQUEST_TARGET.fullmatch(_target(parts)):
            raise _refused(f"{given}; write other characters as %XX")
        return parts

    async def _fetch_in_time(self, address: str) -> bytes:
        async with self._fetches:
            try:
                async with asyncio.timeout(_MAX_FETCH_SECONDS):
                    return await self._fetch(address)
            except TimeoutError:
                raise _refused(
                    f"{address:.100} did not come within {_MAX_FETCH_SECONDS:g} seconds; "
                    "send a data URL"
                ) from None
            except _FETCH_ERRORS as error:
                raise _refused(
                    f"{address:.100} cannot be fetched ({type(error).__name__}); send a data URL"
                ) from None

    async def _fetch(self, address: str) -> bytes:
        """The image at an address, after redirects on the same host."""
        host = self._checked_url(address).hostname
        for _ in range(_MAX_REDIRECTS + 1):
            parts = self._checked_url(address)
            if parts.hostname != host:
                raise _refused(
                    f"{host} sends the server to another host, {parts.hostname}; give that address"
                )
            status, answer = await self._get(str(host), _target(parts))
            if status in _REDIRECT_STATUSES and b"location" in answer.headers:
                address = urljoin(address, answer.headers[b"location"].decode("latin-1"))
            elif status == 200:
                return bytes(answer.body)
            else:
                raise _refused(f"{address:.100} answers with status {status}; send a data URL")
        raise _refused(
            f"{host} sends the server on more than {_MAX_REDIRECTS} times; send a data URL"
        )

    async def _get(self, host: str, target: str) -> tuple[int, _Answer]:
        """The status of an answer, and the answer."""
        addresses = await self.resolve(host)
        if not addresses or not all(map(is_public, addresses)):
            raise _refused(f"{host} leads to an address that is not public; send a data URL")
        reader, writer = await self.connect(
            addresses[0], _HTTPS_PORT, ssl=self.context or _system_context(), server_hostname=host
        )
        try:
            request = (
                f"GET {target} HTTP/1.1\r\n"
                f"Host: {host}\r\n"
                "Accept: image/*\r\n"
                "Accept-Encoding: identity\r\n"
                "User-Agent: qsample\r\n"
                "Connection: close\r\n\r\n"
            )
            writer.write(request.encode("ascii"))
            answer = _Answer()
            parser = httptools.HttpResponseParser(answer)
            num_received = 0
            while not answer.is_complete:
                piece = await reader.read(_READ_BYTES)
                if not piece:
                    break
                parser.feed_data(piece)
                num_received += len(piece)
                if not answer.is_body and num_received > _MAX_HEAD_BYTES:
                    raise _refused(
                        f"an answer of {host} has more than {_MAX_HEAD_BYTES} bytes before its "
                        "image; send a data URL"
                    )
                if (
                    num_received > self.max_bytes + _MAX_HEAD_BYTES
                    or len(answer.body) > self.max_bytes
                ):
                    raise _refused(
                        f"an image of {host} has more than {self.max_bytes} bytes; "
                        "give a smaller one"
                    )
        finally:
            # A proper end of TLS would wait for the host, and read what it still sends.
            writer.transport.abort()
        has_length = answer.headers.keys() & {b"content-length", b"transfer-encoding"}
        if not answer.is_complete and has_length:
            raise _refused(f"an image of {host} ended early; send a data URL")
        return parser.get_status_code(), answer


def _scheme(address: str) -> str:
    end = address.find(":")
    return "" if end < 0 else address[:end].lower()


class _Answer:
    """An answer that httptools' parser fills by calling its methods."""

    def __init__(self) -> None:
        self.headers: dict[bytes, bytes] = {}
        self.is_body = False
        self.body = bytearray()
        self.is_complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        # After the body come trailers, which nobody reads.
        if not self.is_body:
            self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self.is_body = True

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.is_complete = True


def _target(parts: SplitResult) -> str:
    return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


@cache
def _system_context() -> ssl.SSLContext:
    return ssl.create_default_context()


@cache
def _lookup_threads() -> ThreadPoolExecutor:
    """Threads of their own: without an answer, a look-up holds its thread for a minute, and nothing
    else may wait for that."""
    return ThreadPoolExecutor(_MAX_FETCHES_AT_ONCE, thread_name_prefix="qsample-lookups")


async def _resolve(host: str) -> list[str]:
    look_up = partial(socket.getaddrinfo, host, _HTTPS_PORT, type=socket.SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(_lookup_threads(), look_up)
    return [str(socket_address[0]) for *_, socket_address in found]


def is_public(address: str) -> bool:
    """Whether an IP address may be one of a public host, after IANA's registries.

    Addresses of this machine, of private networks and of links are not, nor are IPv6 addresses that
    stand for an IPv4 address, except NAT64's of a public IPv4 address.
    """
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv4Address):
        return not any(ip in network for network in _SPECIAL_IPV4)
    if ip in _NAT64_NETWORK:
        return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
    return ip in _PUBLIC_IPV6 and not any(ip in network for network in _SPECIAL_IPV6)
