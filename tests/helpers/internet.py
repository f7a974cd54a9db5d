"""Hosts of the internet for a process: https hosts on this machine, a certificate of their names, and a resolver.

The process has the resolver and the way to the hosts in a sitecustomize.py, so that everything of qsample and Python
above `socket` is what users run. Python's own event loop runs there, because uvloop does not use `socket`.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

_SITECUSTOMIZE: Final = """
import json, os, socket, sys, time
sys.modules["uvloop"] = None
with open(os.path.join(os.path.dirname(__file__), "internet.json"), encoding="utf-8") as file:
    internet = json.load(file)
own_lookup, own_connect = socket.getaddrinfo, socket.socket.connect

def getaddrinfo(host, port, *args, **options):
    answers = internet["names"].get(host)
    if answers is None:
        return own_lookup(host, port, *args, **options)
    found = answers.pop(0) if len(answers) > 1 else answers[0]
    if found is None:  # the resolver does not answer, and the library gives up at last
        time.sleep(30)
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

def connect(self, address):
    port = internet["ports"].get(address[0]) if isinstance(address, tuple) else None
    return own_connect(self, address if port is None else ("127.0.0.1", port))

socket.getaddrinfo, socket.socket.connect = getaddrinfo, connect
"""


def certificate_of(names: Sequence[str], path: Path) -> Path:
    """Write a certificate of `names`, which is its own CA, with its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, issuer = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.datetime.now(datetime.UTC)
    alternatives = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
    made = (
        x509.CertificateBuilder(issuer, issuer, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(alternatives, critical=True)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(plain + made.public_bytes(pem))
    return path


class Internet:
    """Hosts that `serve` answers for, while it is open; `asked` has the address and path of each request.

    names: name → the answers of its look-ups, in order, each a list of addresses; the last answer stays; None = none
    for 30 s. addresses: those that lead to the https host of this machine. silent: an address that accepts, and never
    says a word.
    """

    def __init__(
        self,
        folder: Path,
        serve: Serve,
        names: Mapping[str, Sequence[Sequence[str] | None]],
        addresses: Sequence[str],
        silent: str,
    ) -> None:
        self.asked: list[str] = []
        self._serve = serve
        certificate = certificate_of(list(names), folder / "certificate.pem")
        self._own = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._own.load_cert_chain(certificate)
        self._silent = socket.create_server(("127.0.0.1", 0))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        ports = {silent: self._silent.getsockname()[1]}
        for address in addresses:
            ports[address] = asyncio.run_coroutine_threadsafe(
                self._listen(address), self._loop
            ).result()
        (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE, "utf-8")
        (folder / "internet.json").write_text(json.dumps({"names": dict(names), "ports": ports}))
        self.environment = {"PYTHONPATH": str(folder), "SSL_CERT_FILE": str(certificate)}

    async def _listen(self, address: str) -> int:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.asked.append(address)
            with suppress(OSError, asyncio.IncompleteReadError):
                await self._serve(reader, writer)
            writer.transport.abort()

        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=self._own)
        return int(server.sockets[0].getsockname()[1])

    def __enter__(self) -> Internet:
        return self

    def __exit__(self, *error: Any) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._silent.close()
