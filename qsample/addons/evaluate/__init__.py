"""How good a package is, on a text of the user's: perplexity, KL divergence from a reference, top-1 agreement; and how
far its log-probabilities are from a reference's.

>>> from qsample.addons.evaluate import evaluate
>>> evaluate("tiny-int4", open("book.txt").read(), against="tiny-cpu").packages[0].perplexity

Each name is imported when it is first used, so that the command line reads the commands without loading NumPy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qsample.addons.evaluate.differences import Differences, Verification, verify
    from qsample.addons.evaluate.quality import Comparison, Evaluation, PackageQuality, evaluate
    from qsample.package.statistics import Estimate

_MODULE_OF = {
    "Comparison": "qsample.addons.evaluate.quality",
    "Differences": "qsample.addons.evaluate.differences",
    "Estimate": "qsample.package.statistics",
    "Evaluation": "qsample.addons.evaluate.quality",
    "PackageQuality": "qsample.addons.evaluate.quality",
    "Verification": "qsample.addons.evaluate.differences",
    "evaluate": "qsample.addons.evaluate.quality",
    "verify": "qsample.addons.evaluate.differences",
}
__all__ = [
    "Comparison",
    "Differences",
    "Estimate",
    "Evaluation",
    "PackageQuality",
    "Verification",
    "evaluate",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
