"""How good a package is, on a text of the user's: perplexity, KL divergence from a reference, top-1 agreement.

>>> from qsample.evaluation import evaluate
>>> evaluate("tiny-int4", open("book.txt").read(), against="tiny-cpu").packages[0].perplexity
"""

from qsample.evaluation.evaluate import Comparison, Evaluation, PackageQuality, evaluate
from qsample.evaluation.statistics import Estimate

__all__ = ["Comparison", "Estimate", "Evaluation", "PackageQuality", "evaluate"]
