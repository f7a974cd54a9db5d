"""qsample bakes the sampler into a language model's ONNX graph.

    >>> import qsample
    >>> model = qsample.AutoModelForCausalLM.from_pretrained("path/or/hub-id", include_sampler=True)
    >>> package = model.export("exported").compile(provider="cpu", ctx_len=512)
    >>> print(package.generate("In the beginning", temperature=0.8).texts[0])

Nothing heavy is imported until it is used: `import qsample` needs neither torch nor transformers.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qsample.addons.bake.api import bake
    from qsample.addons.evaluate import evaluate
    from qsample.compiler.options import CompileOptions
    from qsample.models.auto_model import AutoModelForCausalLM, AutoModelForImageTextToText
    from qsample.request.sampling_params import SamplingParams

# ONNX Runtime's own builds send events to Microsoft, and read this as they are imported; docs/security.md.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__version__ = "0.2.0"
__all__ = [
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "CompileOptions",
    "SamplingParams",
    "__version__",
    "bake",
    "evaluate",
]

_LAZY = {
    "AutoModelForCausalLM": "qsample.models.auto_model",
    "AutoModelForImageTextToText": "qsample.models.auto_model",
    "CompileOptions": "qsample.compiler.options",
    "SamplingParams": "qsample.request.sampling_params",
    "bake": "qsample.addons.bake.api",
    "evaluate": "qsample.addons.evaluate",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    hint = "; AutoModelForCausalLM.from_pretrained opens a model" if name == "load" else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted(__all__)
