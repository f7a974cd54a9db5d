"""The transforms that prepare a Hugging Face causal LM for tracing, and their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from transformers import PreTrainedModel

from qsample.transforms.attention import RetainedAttention
from qsample.transforms.cache import DecodeContext
from qsample.transforms.experts.interface import RoutedExperts
from qsample.transforms.experts.own_loops import OwnExperts
from qsample.transforms.head import SampleLastToken
from qsample.transforms.positions import GPTNeoWindows, QueryScales, RopeByCapacity, UseRowPositions
from qsample.transforms.recurrent.layers import RetainRecurrentStates


class Transform(Protocol):
    """One step: changes the model in place and returns it, with whether there was anything to change."""

    def __call__(self, model: PreTrainedModel) -> tuple[PreTrainedModel, bool]: ...


def default_transforms(context: DecodeContext) -> tuple[Transform, ...]:
    """Every transform that a decode graph needs, in order."""
    return (
        RoutedExperts(),
        OwnExperts(),
        UseRowPositions(context),
        GPTNeoWindows(context),
        RopeByCapacity(context),
        QueryScales(context),
        RetainRecurrentStates(context),
        RetainedAttention(context),
        SampleLastToken(context),
    )


def apply(model: PreTrainedModel, transforms: Sequence[Transform]) -> tuple[PreTrainedModel, bool]:
    """Run `transforms` in order; the flag says whether any of them changed the model."""
    modified = False
    for transform in transforms:
        model, changed = transform(model)
        modified |= changed
    return model, modified
