"""The responses of the page at /: its HTML, and the scripts that it loads."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Final

from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, HTMLResponse, Response

_HTML: Final = Path(__file__).parent / "page.html"
_SCRIPTS: Final = {path.name: path for path in _HTML.with_name("markdown").glob("*js")}


async def page() -> Response:
    """The page. It runs the script in its HTML and the scripts of this server, and loads nothing
    from elsewhere."""
    html = _HTML.read_text(encoding="utf-8")
    inline_script = html.partition('<script type="module">')[2].partition("</script>")[0]
    sha256 = base64.b64encode(hashlib.sha256(inline_script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'self' 'sha256-{sha256}'; style-src 'unsafe-inline'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    return HTMLResponse(html, headers={"Content-Security-Policy": policy})


async def script(name: str) -> Response:
    """A script of the page, by its file's name."""
    if name not in _SCRIPTS:
        raise HTTPException(404)
    # Systems differ in the type that they give to the file. Without no-cache, a browser may keep
    # the script of an older version.
    return FileResponse(
        _SCRIPTS[name], media_type="text/javascript", headers={"Cache-Control": "no-cache"}
    )
