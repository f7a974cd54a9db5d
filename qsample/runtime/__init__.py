"""Runs packages with onnxruntime, numpy and tokenizers only.

>>> from qsample.runtime import load
>>> load("exported").generate("In the beginning", temperature=0.8).texts

Each name is imported when it is first used, so a module of this room loads only the modules that it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qsample.errors import EngineClosedError, QueueFullError, RequestFailedError
    from qsample.runtime.causal_lm import CausalLM, load
    from qsample.runtime.engine import Engine
    from qsample.runtime.guided_decoding import AllowedTokensFn, Step
    from qsample.runtime.output import GenerateOutput
    from qsample.runtime.request import Delta, EngineStats, Request, RequestOutput
    from qsample.sampling_params import SamplingParams
    from qsample.text.generated_text import TextStreamer

__all__ = [
    "AllowedTokensFn",
    "CausalLM",
    "Delta",
    "Engine",
    "EngineClosedError",
    "EngineStats",
    "GenerateOutput",
    "QueueFullError",
    "Request",
    "RequestFailedError",
    "RequestOutput",
    "SamplingParams",
    "Step",
    "TextStreamer",
    "load",
]

_LAZY = {
    "AllowedTokensFn": "qsample.runtime.guided_decoding",
    "CausalLM": "qsample.runtime.causal_lm",
    "Engine": "qsample.runtime.engine",
    "EngineClosedError": "qsample.errors",
    "GenerateOutput": "qsample.runtime.output",
    "QueueFullError": "qsample.errors",
    "RequestFailedError": "qsample.errors",
    "SamplingParams": "qsample.sampling_params",
    "Step": "qsample.runtime.guided_decoding",
    "TextStreamer": "qsample.text.generated_text",
    "load": "qsample.runtime.causal_lm",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        from importlib import import_module

        return getattr(import_module(_LAZY.get(name, "qsample.runtime.request")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
