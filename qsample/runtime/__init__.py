"""Runs packages with onnxruntime, numpy and tokenizers only.

>>> from qsample.runtime import load
>>> load("exported").generate("In the beginning", temperature=0.8).texts

A name is imported when it is first used, so a module of this room only loads the modules that it
needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qsample.errors import EngineClosedError, QueueFullError, RequestFailedError
    from qsample.request.sampling_params import SamplingParams
    from qsample.request.structured.tables import TokenGrammar
    from qsample.request.text.generated_text import TextStreamer
    from qsample.runtime.call import Call
    from qsample.runtime.callbacks import AllowedTokensFn, Step
    from qsample.runtime.causal_lm import CausalLM, load
    from qsample.runtime.engine import Engine
    from qsample.runtime.output import GenerateOutput
    from qsample.runtime.request import Delta, EngineStats, Request, RequestOutput

__all__ = [
    "AllowedTokensFn", "Call", "CausalLM", "Delta", "Engine", "EngineClosedError", "EngineStats", "GenerateOutput",
    "QueueFullError", "Request", "RequestFailedError", "RequestOutput", "SamplingParams", "Step", "TextStreamer",
    "TokenGrammar", "load",
]  # fmt: skip

# Module → the public names that it defines.
_NAMES_OF_MODULES = {
    "qsample.runtime.call": ("Call",),
    "qsample.errors": ("EngineClosedError", "QueueFullError", "RequestFailedError"),
    "qsample.runtime.causal_lm": ("CausalLM", "load"),
    "qsample.runtime.engine": ("Engine",),
    "qsample.runtime.callbacks": ("AllowedTokensFn", "Step"),
    "qsample.runtime.output": ("GenerateOutput",),
    "qsample.runtime.request": ("Delta", "EngineStats", "Request", "RequestOutput"),
    "qsample.request.sampling_params": ("SamplingParams",),
    "qsample.request.structured.tables": ("TokenGrammar",),
    "qsample.request.text.generated_text": ("TextStreamer",),
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    for module, names in _NAMES_OF_MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
