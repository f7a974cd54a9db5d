"""An OpenAI-compatible server over the engine: `qsample serve`. Needs the extra `serve`."""

from qsample.serve.app import make_app
from qsample.serve.settings import ServeSettings

__all__ = ["ServeSettings", "make_app"]
