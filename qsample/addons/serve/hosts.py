"""The names by which a client may call a server.

A page of another site may have its own name lead to this machine (DNS rebinding), and a browser then lets it read what
a server here answers. The browser's request still has the page's name, so a server of this machine alone refuses names
that a stranger can own: all but addresses and the names that never leave a machine or its containers.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Whether a server that listens on `host` is for this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_allowed(header: str, allowed: Collection[str] = ()) -> bool:
    """Whether a Host header, perhaps with a port, is empty, an address, `localhost`, a name that ends with `.localhost`
    or `.internal` (RFC 6761; ICANN's name for private networks), or one of `allowed`."""
    try:
        name = (urlsplit(f"//{header}").hostname or "").rstrip(".")
    except ValueError:
        return False
    try:
        return not header or bool(ipaddress.ip_address(name))
    except ValueError:
        return name in allowed or f".{name}".endswith((".localhost", ".internal"))
