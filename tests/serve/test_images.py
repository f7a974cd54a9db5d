"""Images of requests: what may be read and fetched. A https server of this machine stands for the internet."""

from __future__ import annotations

import asyncio
import base64
import datetime
import os
import ssl
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from qsample.serve import images
from qsample.serve.http import ApiError
from qsample.serve.images import MediaReader, is_public, take_addresses

PUBLIC, MOST = "93.184.216.34", 2000
PNG = b"\x89PNG" + bytes(996)
DATA = "data:image/png;base64," + base64.b64encode(PNG).decode()


def url_part(url: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def test_addresses_leave_the_messages() -> None:
    text = {"type": "text", "text": "and"}
    messages = [{"role": "system", "content": "x"}, user(url_part("a"), text, url_part("b", detail="low"))]
    taken, addresses = take_addresses(messages, 2)
    bare = {"type": "image"}
    assert taken == [messages[0], user(bare, text, bare)]
    assert addresses == ["a", "b"]
    assert messages[1]["content"][0] == url_part("a")  # the caller's are as they were


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([{"type": "image", "image": "/etc/passwd"}], "has no image_url"),
        ([{"type": "image", "path": "/etc/passwd"}], "has no image_url"),
        ([{"type": "image"}], "has no image_url"),
        ([{"type": "input_image", "image_url": DATA}], "has no image_url"),
        ([{"type": "image_url", "image_url": {"url": 5}}], "has no image_url"),
        ([url_part("x", detail="tiny")], "give one of auto, low, high"),
        ([url_part("/etc/passwd")] * 10_000, "10000 images, and this server takes 8"),
    ],
)
def test_parts_that_are_refused(parts: list[Any], message: str) -> None:
    with pytest.raises(ApiError, match=message):
        take_addresses([user(*parts)], 8)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        (PUBLIC, True), ("2606:2800:220:1::1", True), ("::ffff:93.184.216.34", True), ("127.0.0.1", False),
        ("10.1.2.3", False), ("172.16.0.1", False), ("192.168.1.1", False), ("169.254.169.254", False),
        ("100.64.0.1", False), ("0.0.0.0", False), ("224.0.0.1", False), ("255.255.255.255", False), ("::1", False),
        ("::", False), ("fe80::1%eth0", False), ("fc00::1", False), ("ff02::1", False), ("::ffff:127.0.0.1", False),
        ("2002:7f00:1::", False), ("64:ff9b::a00:1", False), ("2001:0:4136:e378:8000:63bf:f5ff:fffe", False),
        ("x", False),
    ],
)  # fmt: skip
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) is public


def read(address: str, **options: Any) -> bytes:
    (content,) = asyncio.run(MediaReader(MOST, **options).read([address]))
    return content


def refused(message: str, address: str, **options: Any) -> None:
    with pytest.raises(ApiError, match=message) as error:
        read(address, **options)
    assert (error.value.status, error.value.code) == (400, "invalid_image")


def test_data_urls() -> None:
    assert read(DATA) == PNG
    refused("and 2000 are the most", "data:image/png;base64," + "A" * 2800)
    refused("not valid base64", "data:image/png;base64,A")
    refused("give data:image/png", "data:text/html;base64,AAAA")


def test_files_below_the_folder_only(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    (folder / "in").mkdir(parents=True)
    (folder / "in" / "a b.png").write_bytes(PNG)
    (tmp_path / "secret.png").write_bytes(PNG)
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "up").symlink_to(tmp_path)
    (folder / "large.png").write_bytes(bytes(MOST + 1))
    os.mkfifo(folder / "pipe.png")
    options = {"folder": str(folder)}
    assert read(f"file://{folder}/in/a%20b.png", **options) == PNG
    for path in ("link.png", "up/secret.png", "large.png", "pipe.png", "none.png", "in"):
        refused("below the allowed folder", f"file://{folder}/{path}", **options)
    for address in (f"file://{folder}/%2e%2e/secret.png", f"file://{folder}/in/../in/a", f"file://other{folder}/in/a"):
        refused("another host, or ..", address, **options)
    refused("below the allowed folder", f"file://{tmp_path}/secret.png", **options)
    refused("--allowed-local-media-path", f"file://{folder}/in/a%20b.png")


@pytest.mark.parametrize(
    "address",
    [
        "http://example.org/a.png", "https://example.com/a.png", "https://sub.example.org/a.png", "ftp://example.org/a",
        "https://example.org:8443/a.png", "https://u:p@example.org/a.png", "https://example.org@evil.example/a.png",
        "https://[::1]/a.png", "https://127.0.0.1/a.png", "/etc/passwd", "example.org/a.png", "https://exämple.org/a",
        "https://example.org/a b.png", "https://example.org\\@evil.example/", "https://[x/",
    ],
)  # fmt: skip
def test_addresses_that_are_not_allowed(address: str) -> None:
    async def resolve(host: str) -> list[str]:
        raise AssertionError("a name was looked up")

    async def both() -> None:  # the first is not fetched either
        await MediaReader(MOST, ("example.org",), resolve=resolve).read(["https://example.org/a.png", address])

    with pytest.raises(ApiError, match="an image's address is"):
        asyncio.run(both())


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of example.org, with its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("example.org")]), critical=True)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path = tmp_path_factory.mktemp("tls") / "example.pem"
    path.write_bytes(plain + made.public_bytes(pem))
    return path


def answer(status: str, *headers: str, body: bytes = b"") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode() + body


ANSWERS = {
    "/a.png?size=1": answer("200 OK", f"Content-Length: {len(PNG)}", body=PNG),
    "/to-the-end": answer("200 OK", body=PNG),
    "/chunks": answer("200 OK", "Transfer-Encoding: chunked", body=b"3e8\r\n" + PNG + b"\r\n0\r\n\r\n"),
    "/moved": answer("302 Found", "Location: /a.png?size=1", "Content-Length: 0"),
    "/away": answer("302 Found", "Location: https://other.org/a.png", "Content-Length: 0"),
    "/plain": answer("301 Moved", "Location: http://example.org/a.png", "Content-Length: 0"),
    "/inside": answer("302 Found", "Location: https://169.254.169.254/latest", "Content-Length: 0"),
    "/round": answer("302 Found", "Location: /round", "Content-Length: 0"),
    "/short": answer("200 OK", "Content-Length: 1000", body=PNG[:10]),
    "/none": answer("404 Not Found", "Content-Length: 0"),
    "/endless": answer("200 OK", body=bytes(10 * MOST)),
    "/headers": answer("200 OK", "X: " + "y" * 100_000),
    "/no-http": b"\x00" * 100,
}  # fmt: skip


def on_the_internet(certificate: Path, work: Callable[..., Coroutine[Any, Any, Any]], **options: Any) -> list[str]:
    """Run `work(reader)`; the hosts and addresses that were asked for, in order."""
    asked: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split(" ")[1]
            if path == "/slow":
                await asyncio.sleep(1)
            writer.write(ANSWERS[path])
            await writer.drain()
            while path == "/endless":
                writer.write(bytes(1000))
                await writer.drain()
        writer.close()

    async def resolve(host: str) -> list[str]:
        asked.append(host)
        return [PUBLIC]

    async def run() -> None:
        own = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        own.load_cert_chain(certificate)
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=own)
        port = server.sockets[0].getsockname()[1]

        async def connect(host: str, to: int, **more: Any) -> Any:
            asked.append(f"{host}:{to}")
            return await asyncio.open_connection("127.0.0.1", port, **more)

        trusted = ssl.create_default_context(cafile=certificate)
        given = {"resolve": resolve, "connect": connect, "context": trusted, **options}
        async with server:
            await work(MediaReader(MOST, ("example.org", "other.org"), **given))

    asyncio.run(run())
    return asked


def test_fetching(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_SECONDS", 0.5)
    wrong = {
        "/away": "another host, other.org",
        "/plain": "fetches https addresses of",
        "/inside": "fetches https addresses of",
        "/round": "more than 3 times",
        "/short": "ended early",
        "/none": "status 404",
        "/endless": "more than 2000 bytes",
        "/headers": "more than 2000 bytes|cannot be fetched",
        "/no-http": "cannot be fetched",
        "/slow": "within 0.5 seconds",
    }

    async def work(reader: MediaReader) -> None:
        paths = ("/a.png?size=1", "/to-the-end", "/chunks", "/moved")
        assert await reader.read([f"https://example.org{path}" for path in paths]) == [PNG] * 4
        for path, message in wrong.items():
            with pytest.raises(ApiError, match=message) as error:
                await reader.read([f"https://example.org{path}"])
            assert error.value.code == "invalid_image"
        # A certificate of another name.
        with pytest.raises(ApiError, match="SSLCertVerificationError"):
            await reader.read(["https://other.org/a.png?size=1"])

    asked = on_the_internet(certificate, work)
    assert {*asked} == {"example.org", "other.org", f"{PUBLIC}:443"}


@pytest.mark.parametrize("found", [["127.0.0.1"], [PUBLIC, "10.0.0.1"], ["::1"], []])
def test_names_of_the_local_network(certificate: Path, found: list[str]) -> None:
    async def resolve(host: str) -> list[str]:
        return found

    async def work(reader: MediaReader) -> None:
        with pytest.raises(ApiError, match="not public"):
            await reader.read(["https://example.org/a.png?size=1"])

    assert on_the_internet(certificate, work, resolve=resolve) == []


def test_a_name_that_moves_is_looked_up_once(certificate: Path) -> None:
    """DNS rebinding: the address that was checked is the one that is connected to, for each redirect anew."""
    answers = [[PUBLIC], ["127.0.0.1"]]

    async def resolve(host: str) -> list[str]:
        return answers.pop(0)

    async def work(reader: MediaReader) -> None:
        with pytest.raises(ApiError, match="not public"):
            await reader.read(["https://example.org/moved"])

    assert on_the_internet(certificate, work, resolve=resolve) == [f"{PUBLIC}:443"]
