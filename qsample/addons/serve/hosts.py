"""The names by which a client may call a server.

The name of another site may lead to this machine (DNS rebinding), and a browser then lets the
site's page read the answers of a server here. The browser's request still has the name of the site,
so a server that is only for this machine refuses names that a stranger can own: all names except
addresses and the names that never leave a machine or its containers.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches a server that listens on an address.

    Args:
        address: the address that the socket has. Texts such as `127.1`, and names of this machine,
            become one when the socket is bound.
    """
    ip = ipaddress.ip_address(address)
    inner = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return ip.is_loopback or (inner is not None and inner.is_loopback)


def is_allowed(header: str, allowed: Collection[str] = ()) -> bool:
    """Whether a server answers to a Host header.

    These headers are allowed: an empty header, addresses, `localhost`, names that end with
    `.localhost` (RFC 6761) or `.internal` (ICANN's name for private networks), and `allowed`.

    Args:
        header: the value of the header, perhaps with a port.
        allowed: further names.
    """
    try:
        name = (urlsplit(f"//{header}").hostname or "").rstrip(".")
    except ValueError:
        return False
    if not header or name in allowed or f".{name}".endswith((".localhost", ".internal")):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
