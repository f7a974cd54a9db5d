"""The sampler: from logits to the next token and the new state, exact over the whole vocabulary."""

from qsample.transforms.sampler.module import Sampler

__all__ = ["Sampler"]
