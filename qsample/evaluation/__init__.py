"""How good a package is, on a text of the user's: perplexity, KL divergence from a reference, top-1 agreement; and how
far its log-probabilities are from a reference's.

>>> from qsample.evaluation import evaluate
>>> evaluate("tiny-int4", open("book.txt").read(), against="tiny-cpu").packages[0].perplexity
"""

from qsample.evaluation.evaluate import Comparison, Evaluation, PackageQuality, evaluate
from qsample.evaluation.statistics import Estimate
from qsample.evaluation.verify import Differences, Verification, verify

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
