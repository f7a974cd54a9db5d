"""Runs packages with onnxruntime, numpy and tokenizers only.

>>> from qsample.runtime import load
>>> load("exported").generate("In the beginning", temperature=0.8).texts
"""

from qsample.runtime.causal_lm import CausalLM, load
from qsample.runtime.engine import Engine
from qsample.runtime.guided_decoding import AllowedTokensFn, Step
from qsample.runtime.output import GenerateOutput
from qsample.runtime.request import (
    Delta,
    EngineClosedError,
    EngineStats,
    QueueFullError,
    Request,
    RequestFailedError,
    RequestOutput,
)
from qsample.runtime.text.streamer import TextStreamer
from qsample.sampling_params import SamplingParams

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
