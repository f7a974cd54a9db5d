"""The responses of the page at /: what a browser lets it do, and the scripts that it loads."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from pathlib import Path

import pytest
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse

from qsample.addons.serve import page


def get_page() -> tuple[str, dict[str, list[str]]]:
    """The page's HTML, and its policy: directive → what it allows."""
    response = asyncio.run(page.page())
    assert response.status_code == 200
    assert response.media_type == "text/html"
    directives = response.headers["content-security-policy"].split("; ")
    policy = {name: values for name, *values in map(str.split, directives)}
    return bytes(response.body).decode(), policy


def get_script(name: str) -> FileResponse:
    response = asyncio.run(page.script(name))
    assert isinstance(response, FileResponse)
    return response


def test_the_page_loads_nothing_from_elsewhere() -> None:
    html, policy = get_page()
    (inline,) = re.findall(r"<script[^>]*>(.+?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
    assert policy == {
        "default-src": ["'none'"],
        "script-src": ["'self'", f"'sha256-{digest}'"],
        "style-src": ["'unsafe-inline'"],
        "connect-src": ["'self'"],
        "img-src": ["data:"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
    }


def test_every_script_that_the_page_imports_is_served() -> None:
    html, _ = get_page()
    names = set(re.findall(r"[\"'/]([\w.-]+\.m?js)[\"']", html))
    assert names
    waiting = [*names]
    while waiting:  # scripts import others
        response = get_script(waiting.pop())
        assert response.media_type == "text/javascript"
        assert response.headers["cache-control"] == "no-cache"
        text = Path(response.path).read_text(encoding="utf-8")
        assert text
        inner = set(re.findall(r'from "\./([\w.-]+)"', text)) - names
        names |= inner
        waiting += inner
    assert names == set(page._SCRIPTS)


@pytest.mark.parametrize("name", ["LICENSE", "page.html", "../page.html", "other.js", ""])
def test_other_files_are_not_found(name: str) -> None:
    with pytest.raises(HTTPException) as raised:
        asyncio.run(page.script(name))
    assert raised.value.status_code == 404
