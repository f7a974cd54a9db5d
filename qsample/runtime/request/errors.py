"""Why an engine takes no request, or one ended without an answer."""

from __future__ import annotations

from qsample.errors import QsampleError


class QueueFullError(QsampleError):
    """The engine has no free slot, and its queue is full."""


class EngineClosedError(QsampleError):
    """The engine was closed, its graph failed, or this is a fork of the process that it runs in."""


class RequestFailedError(QsampleError):
    """A function that came with the request raised, or its text could not be decoded. The cause is what was raised."""
