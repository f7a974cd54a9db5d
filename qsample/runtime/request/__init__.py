"""A prompt in an engine: its handle, what its readers get, those who wait, and until when."""

from qsample.runtime.request.deadlines import Deadlines
from qsample.runtime.request.errors import EngineClosedError, QueueFullError, RequestFailedError
from qsample.runtime.request.handle import CANCELLED, TIME, Request
from qsample.runtime.request.outputs import Delta, EngineStats, RequestOutput, RequestTiming, Usage

__all__ = [
    "CANCELLED",
    "TIME",
    "Deadlines",
    "Delta",
    "EngineClosedError",
    "EngineStats",
    "QueueFullError",
    "Request",
    "RequestFailedError",
    "RequestOutput",
    "RequestTiming",
    "Usage",
]
