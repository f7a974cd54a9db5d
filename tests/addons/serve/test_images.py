"""Images of requests: what may be read and fetched. A https server of this machine stands for the internet."""

from __future__ import annotations

import asyncio
import base64
import io
import ipaddress
import json
import os
import ssl
import struct
import threading
import zlib
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from qsample.addons.serve import ServeSettings, images, make_app
from qsample.addons.serve.http import ApiError
from qsample.addons.serve.images import MediaReader, is_public, take_addresses
from qsample.images.features import VisionEncoder
from qsample.runtime import CausalLM, SamplingParams, load
from tests.helpers.internet import certificate_of
from tests.helpers.servers import ServerProcess

PUBLIC, MOST = "93.184.216.34", 2000
PNG = b"\x89PNG" + bytes(996)
DATA = "data:image/png;base64," + base64.b64encode(PNG).decode()


def url_part(url: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def test_addresses_leave_the_messages() -> None:
    text = {"type": "text", "text": "and"}
    messages = [
        {"role": "system", "content": "x"},
        user(url_part("a"), text, url_part("b", detail="low")),
    ]
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


# IANA's registries of special-purpose addresses (RFC 6890, RFC 8190), as of 2025: the blocks that are not globally
# reachable, or about which they do not say. https://www.iana.org/assignments/iana-ipv4-special-registry, and ipv6.
NOT_GLOBAL = """
0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24 192.88.99.0/24
192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 240.0.0.0/4
::1/128 ::/128 ::ffff:0:0/96 64:ff9b:1::/48 100::/64 100:0:0:1::/64 2001::/23 2001:2::/48 2001:10::/28 2001:db8::/32
2002::/16 3fff::/20 5f00::/16 fc00::/7 fe80::/10
"""
# Other blocks without hosts: multicast; IPv4-compatible and site-local addresses, which RFC 4291 and RFC 3879 gave up;
# IPv4-translated addresses (RFC 2765); and what IANA has given to nobody.
NO_HOSTS = "224.0.0.0/4 ff00::/8 ::/96 fec0::/10 ::ffff:0:0:0/96 1000::/4 4000::/3 8000::/2"
# Parts of 192.0.0.0/24 and 2001::/23 that are reachable, but addresses of relays and identifiers, not of web hosts.
NO_WEB_HOSTS = "192.0.0.9/32 192.0.0.10/32 2001:1::1/128 2001:3::/32 2001:4:112::/48 2001:20::/28"
GLOBAL = """
1.0.0.0/8 8.8.8.0/24 93.184.216.34/32 192.31.196.0/24 192.52.193.0/24 192.175.48.0/24 9.0.0.0/8 11.0.0.0/8
100.63.0.0/16 100.128.0.0/16 126.0.0.0/8 128.0.0.0/8 169.253.0.0/16 172.15.0.0/16 172.32.0.0/16 192.0.1.0/24
192.0.3.0/24 192.167.0.0/16 198.17.0.0/16 198.20.0.0/16 223.255.255.0/24 2001:200::/23 2001:db7::/32 2001:db9::/32
2003::/18 2400::/12 2600::/12 2606:2800:220:1::1/128 2620:4f:8000::/48 2a00::/12 3ffe::/16
"""


def edges(block: str) -> list[str]:
    """The first and the last address of a block."""
    network = ipaddress.ip_network(block)
    return [str(network[0]), str(network[-1])]


@pytest.mark.parametrize("block", f"{NOT_GLOBAL} {NO_HOSTS} {NO_WEB_HOSTS}".split())
def test_addresses_of_no_public_host(block: str) -> None:
    assert [is_public(address) for address in edges(block)] == [False, False]


@pytest.mark.parametrize("block", GLOBAL.split())
def test_addresses_of_public_hosts(block: str) -> None:
    assert [is_public(address) for address in edges(block)] == [True, True]


@pytest.mark.parametrize(
    ("address", "public"),
    [
        # NAT64 is an IPv6-only network's way to an IPv4 address, which has to be public itself (RFC 6052).
        ("64:ff9b::5db8:d822", True), ("64:ff9b::a00:1", False), ("64:ff9b::7f00:1", False), ("64:ff9b:0:0:1::", False),
        ("::ffff:93.184.216.34", False), ("::93.184.216.34", False), ("2002:5db8:d822::", False),
        ("2001:0:4136:e378:8000:63bf:f5ff:fffe", False), ("fe80::1%eth0", False), ("x", False), ("", False),
    ],
)  # fmt: skip
def test_addresses_that_stand_for_others(address: str, public: bool) -> None:
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
    text = len(DATA.partition(",")[2])  # the room that it needs is that of its text, or the limit
    assert MediaReader(MOST).check([DATA, DATA]) == 2 * text
    assert MediaReader(1000).check([DATA]) == 1000
    assert MediaReader(MOST, ("a.org",)).check([DATA, "https://a.org/x"]) == text + MOST
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
    for address in (
        f"file://{folder}/%2e%2e/secret.png",
        f"file://{folder}/in/../in/a",
        f"file://other{folder}/in/a",
    ):
        refused("another host, or ..", address, **options)
    refused("below the allowed folder", f"file://{tmp_path}/secret.png", **options)
    refused("below the allowed folder", f"file://{folder}/\ud800.png", **options)
    # A way out and back tells whether what lies between exists.
    (tmp_path / "back").symlink_to(folder)
    for path in ("back/in/a%20b.png", "images/up/images/in/a%20b.png"):
        refused("below the allowed folder", f"file://{tmp_path}/{path}", **options)
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
        await MediaReader(MOST, ("example.org",), resolve=resolve).read(
            ["https://example.org/a.png", address]
        )

    with pytest.raises(ApiError, match="an image's address is"):
        asyncio.run(both())


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of example.org, with its key."""
    return certificate_of(["example.org"], tmp_path_factory.mktemp("tls") / "example.pem")


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


def on_the_internet(
    certificate: Path, work: Callable[..., Coroutine[Any, Any, Any]], **options: Any
) -> list[str]:
    """Run `work(reader)`; the hosts and addresses that were asked for, in order."""
    asked: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split(" ")[1]
            if path == "/slow":
                await asyncio.sleep(600)
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
    monkeypatch.setattr(images, "_MAX_FETCH_SECONDS", 120.0)
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
    }

    async def work(reader: MediaReader) -> None:
        paths = ("/a.png?size=1", "/to-the-end", "/chunks", "/moved")
        assert await reader.read([f"https://example.org{path}" for path in paths]) == [PNG] * 4
        for path, message in wrong.items():
            with pytest.raises(ApiError, match=message) as error:
                await reader.read([f"https://example.org{path}"])
            assert error.value.code == "invalid_image"
        with monkeypatch.context() as patch:
            patch.setattr(images, "_MAX_FETCH_SECONDS", 0.5)
            with pytest.raises(ApiError, match=r"within 0\.5 seconds"):
                await reader.read(["https://example.org/slow"])
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


def png(width: int = 30, height: int = 20, seed: int = 0) -> bytes:
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def data_url(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def bomb(width: int, height: int) -> bytes:
    """A PNG of that size of nothing, in a few bytes."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


ONE, TWO = png(30, 20, 1), png(48, 20, 2)
SETTINGS: dict[str, Any] = {"max_tokens": 8, "temperature": 0.7, "seed": 3}


@pytest.fixture(scope="module")
def model(smolvlm_package: Path) -> CausalLM:
    return load(smolvlm_package, intra_op_num_threads=1, ctx_len=256)


def expected(model: CausalLM, *parts: Any) -> tuple[str, int]:
    """The text of `generate` for a user's message of images (bytes) and texts, and the tokens of the prompt."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": part}
        for part in parts
    ]
    done = model.generate(
        [{"role": "user", "content": content}],
        SamplingParams(temperature=0.7, max_new_tokens=8),
        seed=3,
    )
    assert done.texts is not None
    return done.texts[0], done.prompt_lengths[0]


@pytest.mark.ci
def test_the_clients_of_three_apis_send_images(
    smolvlm_package: Path, model: CausalLM, tmp_path: Path
) -> None:
    import anthropic
    import openai

    (tmp_path / "two.png").write_bytes(TWO)
    one, two = url_part(data_url(ONE), detail="low"), url_part(f"file://{tmp_path}/two.png")
    hello = {"type": "text", "text": "hello"}
    options = ("--served-model-name", "tiny", "--ctx-len", "256", "--threads", "1", "--slots", "2")
    with ServerProcess(smolvlm_package, *options, "--allowed-local-media-path", tmp_path) as server:
        ours = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        assert ours.models.list().data[0].capabilities == {"completion_chat": True, "vision": True}  # type: ignore[attr-defined]
        text, tokens = expected(model, ONE, "hello", TWO)
        for stream in (False, True):
            chat: Any = {"model": "tiny", "messages": [user(one, hello, two)], **SETTINGS}
            if stream:
                events = ours.chat.completions.create(
                    **chat, stream=True, stream_options={"include_usage": True}
                )
                heard = list(events)
                assert "".join(event.choices[0].delta.content or "" for event in heard[:-1]) == text
                usage = heard[-1].usage
            else:
                answer = ours.chat.completions.create(**chat, n=2)
                assert answer.choices[0].message.content == text
                usage = answer.usage
            assert usage is not None and usage.prompt_tokens == tokens  # noqa: PT018
        # Another image of the same size is not taken for the first, nor its prompt for that one.
        assert expected(model, png(30, 20, 9), "hello", TWO)[0] != text
        other = url_part(data_url(png(30, 20, 9)))
        answer = ours.chat.completions.create(
            model="tiny", messages=[user(other, hello, two)], **SETTINGS
        )  # type: ignore[call-overload]
        assert answer.choices[0].message.content == expected(model, png(30, 20, 9), "hello", TWO)[0]
        assert usage.prompt_tokens_details is None or usage.prompt_tokens_details.cached_tokens > 0

        alone, tokens = expected(model, ONE, "hello")
        response = ours.responses.create(
            model="tiny", max_output_tokens=8, temperature=0.7, extra_body={"seed": 3},
            input=[user({"type": "input_image", "image_url": data_url(ONE)}, {"type": "input_text", "text": "hello"})],  # type: ignore[list-item]
        )  # fmt: skip
        assert (response.output_text, response.usage.input_tokens) == (alone, tokens)  # type: ignore[union-attr]

        theirs = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
        source = {
            "type": "base64",
            "media_type": "image/png",
            "data": base64.b64encode(ONE).decode(),
        }
        asked: Any = {
            "model": "tiny",
            "messages": [user({"type": "image", "source": source}, hello)],
        }
        message = theirs.messages.create(
            **asked, max_tokens=8, extra_body={"temperature": 0.7, "seed": 3}
        )
        assert [block.text for block in message.content] == [alone]  # type: ignore[union-attr]
        assert theirs.messages.count_tokens(**asked).input_tokens == tokens

        # Seven prompts with images so far; the last ones are computed once.
        images = 2 + 2 + 2 + 1 + 1
        assert server.metric("prompt_images_total") == images
        assert server.metric("image_encoder_seconds_count") == 5
        assert server.metric("prompt_image_tokens_total") % 9 == 0


@pytest.fixture(scope="module")
def image_app(smolvlm_package: Path) -> Any:
    settings = ServeSettings(
        models={"tiny": str(smolvlm_package)}, ctx_len=256, threads=1, limit_images_per_prompt=6,
        max_image_bytes=10_000, max_image_pixels=10_000, slots=1,
    )  # fmt: skip
    with TestClient(make_app(settings), raise_server_exceptions=False) as client:
        yield client


HELLO = {"type": "text", "text": "hello"}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("parts", "message", "more"),
    [
        ([url_part("https://example.org/a.png")] * 10_000, "10000 images, and this server takes 6", {}),
        ([url_part(data_url(ONE))] * 7, "7 images, and this server takes 6", {}),
        ([url_part("https://example.org/a.png")], "this server fetches no images; send a data URL", {}),
        ([url_part("http://169.254.169.254/latest")], "this server fetches no images", {}),
        ([url_part("file:///etc/passwd")], "--allowed-local-media-path", {}),
        ([url_part("/etc/passwd")], "this server fetches no images", {}),
        ([{"type": "image", "image": "/etc/passwd"}], "has no image_url", {}),
        ([url_part(data_url(bytes(20_000)))], "10000 are the most", {}),
        ([url_part(data_url(bomb(60_000, 60_000)))], "at most 10000 are read", {}),
        ([url_part(data_url(ONE[:200]))], "cannot be decoded|damaged", {}),
        ([url_part(data_url(b"<svg></svg>"))], "give a PNG, JPEG, WebP or GIF file", {}),
        ([url_part(data_url(ONE, "svg+xml"))], "of the types image/png", {}),
        ([url_part(data_url(ONE)), {"type": "text", "text": "an <image>"}], "which stands for an image", {}),
        ([{"type": "text", "text": "an <image>"}], "which stands for an image", {}),
        ([url_part(data_url(ONE)), HELLO], "log-probabilities of a prompt with images", {"prompt_logprobs": 1}),
        ([url_part(data_url(ONE))] * 3 + [HELLO] * 30, "this model's context 256", {}),
        ([url_part(data_url(png(48, 48)[:200]))] * 6, "the prompt has 270 tokens and this model's context 256", {}),
    ],
    ids=range(17),
)  # fmt: skip
def test_requests_that_are_refused(
    image_app: TestClient, parts: list[Any], message: str, more: dict[str, Any]
) -> None:
    """Without a run of vision.onnx."""
    answer = image_app.post(
        "/v1/chat/completions", json={"messages": [user(*parts)], **SETTINGS, **more}
    )
    assert answer.status_code == 400, answer.text[:300]
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(answer.json()["error"]["message"])
    assert image_app.post("/v1/completions", json={"prompt": "an <image>"}).status_code == 400
    assert "prompt_images_total{" not in image_app.get("/metrics").text


@pytest.mark.ci
def test_vision_runs_once_and_beside_the_event_loop(
    smolvlm_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without a cache, and for several answers."""
    threads: list[str] = []
    run = VisionEncoder._run

    def spy(self: VisionEncoder, image: Any) -> Any:
        threads.append(threading.current_thread().name)
        return run(self, image)

    monkeypatch.setattr(VisionEncoder, "_run", spy)
    settings = ServeSettings(
        models={"tiny": str(smolvlm_package)}, ctx_len=256, threads=1, slots=1, image_cache_mib=0
    )
    with TestClient(make_app(settings)) as client:
        messages = [user(url_part(data_url(ONE)), url_part(data_url(TWO)), HELLO)]
        answer = client.post(
            "/v1/chat/completions", json={"messages": messages, "n": 3, **SETTINGS}
        )
        assert answer.status_code == 200, answer.text
        assert (
            client.post("/tokenize", json={"messages": messages}).json()["count"]
            == answer.json()["usage"]["prompt_tokens"]
        )
    assert [name.startswith("qsample-images") for name in threads] == [True, True]


@pytest.mark.ci
def test_bodies_are_as_large_as_their_images(image_app: TestClient) -> None:
    """32 MiB of base64, and no more JSON than in a server of text."""

    def post(body: str) -> tuple[int, str]:
        answer = image_app.post(
            "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
        )
        return answer.status_code, answer.json()["error"]["message"]

    large = json.dumps({"messages": [user(url_part("data:image/png;base64," + "A" * (30 << 20)))]})
    status, message = post(large)
    assert (status, "10000 are the most" in message) == (400, True)
    assert post(large + " " * (4 << 20))[0] == 413
    status, message = post(json.dumps({"messages": [{"role": "user", "content": [0] * 3_000_000}]}))
    assert (status, "besides its images" in message) == (413, True)
