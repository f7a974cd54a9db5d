"""An OpenAI-compatible server over the engine: `qsample serve`. Needs the extra `serve`.

Each name is imported when it is first used, so the command line reads the settings without the server's libraries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qsample.addons.serve.app import make_app
    from qsample.addons.serve.settings import ServeSettings

__all__ = ["ServeSettings", "make_app"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in __all__:
        return getattr(
            import_module(f"qsample.addons.serve.{'app' if name == 'make_app' else 'settings'}"),
            name,
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
