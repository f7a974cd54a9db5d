"""The names by which a server may be called, and real servers that are called by a stranger's name."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from qsample.addons.serve.hosts import is_allowed, is_loopback
from tests.helpers.servers import ServerProcess

ALLOWED = (
    "",
    "localhost",
    "LOCALHOST:8000",
    "localhost.",
    "a.b.localhost:1",
    "host.docker.internal",
    "127.0.0.1:80",
)
ALLOWED += ("[::1]:8000", "10.1.2.3", "[fe80::1]", "models.example:443")
REFUSED = (
    "evil.example",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "notlocalhost",
    "internal.example",
)
REFUSED += (
    "[evil",
    "[::1",
    "other.models.example",
    "a@evil.example",
    "evil.example/localhost",
    ":80",
    "1.2.3.4.5",
)


def test_names_that_a_stranger_can_own() -> None:
    assert [name for name in (*ALLOWED, *REFUSED) if is_allowed(name, ("models.example",))] == [
        *ALLOWED
    ]
    local = ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"]
    others = ["0.0.0.0", "::", "10.0.0.1", "::ffff:10.0.0.1"]
    assert [address for address in (*local, *others) if is_loopback(address)] == local


def status(server: ServerProcess, host: str) -> int:
    return httpx.get(server.url + "/v1/models", headers={"Host": host}, timeout=60).status_code


def test_a_server_of_this_machine_alone(server: ServerProcess) -> None:
    """DNS rebinding: a page of evil.example has its name lead here, and the browser would let it read the answer."""
    assert {status(server, host) for host in ALLOWED if host != "models.example:443"} == {200}
    assert {
        status(server, host)
        for host in ("evil.example", "models.example", "localhost.evil.example:80")
    } == {403}
    refused = httpx.post(
        server.url + "/v1/completions", json={"prompt": "x"}, headers={"Host": "evil.example"}
    )
    assert refused.json()["error"]["code"] == "host_not_allowed"
    assert "'evil.example'" in refused.json()["error"]["message"]


@pytest.mark.ci
def test_servers_with_names(start_server: Callable[..., ServerProcess]) -> None:
    """Behind a proxy that keeps the name, in a container, or for a network."""
    for options, answers in (
        (
            ["--allowed-host", "models.example"],
            {"models.example": 200, "evil.example": 403, "localhost": 200},
        ),
        (["--allowed-host", "*"], {"models.example": 200, "evil.example": 200}),
        # Other spellings of addresses of this machine, and a name of it.
        (["--host", "127.1"], {"evil.example": 403, "localhost": 200, "127.1": 200}),
        (["--host", "localhost"], {"evil.example": 403, "localhost": 200}),
        (["--host", "0.0.0.0"], {"models.example": 200, "evil.example": 200}),
        (
            ["--host", "0.0.0.0", "--allowed-host", "models.example"],
            {"models.example": 200, "evil.example": 403},
        ),
    ):
        with start_server(*options) as server:
            assert {host: status(server, host) for host in answers} == answers, options
