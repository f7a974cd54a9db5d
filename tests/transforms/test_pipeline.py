"""The transforms together: applying one twice changes nothing."""

from __future__ import annotations

from qsample.transforms.cache import DecodeContext
from qsample.transforms.pipeline import apply, default_transforms
from tests.helpers.tiny_models import random_model


def test_every_transform_is_idempotent() -> None:
    transforms = default_transforms(DecodeContext())
    model, modified = apply(random_model("mixtral"), transforms)
    assert modified
    for transform in transforms:
        assert transform(model) == (model, False)
