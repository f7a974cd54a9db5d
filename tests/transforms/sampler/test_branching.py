"""Branches run eagerly, and what an export needs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from qsample.transforms.sampler.branching import Tensors, branch


class Either(nn.Module):
    """x + 1 where the sum of x is positive, else -x."""

    def forward(self, x: Tensor) -> Tensor:
        return branch(x.sum() > 0, lambda: (x + 1,), lambda: (-x,))[0]


@pytest.mark.parametrize(("x", "expected"), [(2.0, 3.0), (-2.0, 2.0)])
def test_the_predicate_chooses(x: float, expected: float) -> None:
    assert Either()(torch.tensor([x])).item() == expected


def test_only_one_side_is_computed() -> None:
    def fail() -> Tensors:
        raise AssertionError("computed")

    one = torch.ones(1)
    assert branch(torch.tensor(True), lambda: (one,), fail) == (one,)
    assert branch(torch.tensor(False), fail, lambda: (one,)) == (one,)


def test_an_export_without_inline_branches_is_refused() -> None:
    with pytest.raises(Exception, match="inline_branches"):
        torch.export.export(Either(), (torch.ones(2),))
