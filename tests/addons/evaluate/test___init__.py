"""The names that `qsample.addons.evaluate` has, each imported when it is first used."""

from __future__ import annotations

import pytest

from qsample.addons import evaluate as package
from qsample.addons.evaluate import differences, quality
from qsample.package import statistics


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("Comparison", quality),
        ("Differences", differences),
        ("Estimate", statistics),
        ("Evaluation", quality),
        ("PackageQuality", quality),
        ("Verification", differences),
        ("evaluate", quality),
        ("verify", differences),
    ],
)
def test_names(name: str, module: object) -> None:
    assert getattr(package, name) is getattr(module, name)
    assert name in package.__all__


def test_another_name() -> None:
    with pytest.raises(AttributeError, match=r"'qsample.addons.evaluate' has no attribute 'x'"):
        _ = package.x  # type: ignore[attr-defined]
