"""An OpenAI-compatible server over the engine: `qsample serve`. It needs the extra `serve`.

Each name is imported when it is first used, so the command line reads the settings without the
server's libraries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qsample.addons.serve.app import make_app
    from qsample.addons.serve.settings import ServeSettings

__all__ = ["ServeSettings", "make_app"]


def __getattr__(name: str) -> Any:
    if name == "ServeSettings":
        from qsample.addons.serve.settings import ServeSettings

        return ServeSettings
    if name == "make_app":
        from qsample.addons.serve.app import make_app

        return make_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
