"""Quantized weights on the disk: what is read is what was written, whole or in parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qsample.checkpoints.block_store import BlockStore
from qsample.transforms.deferred import deferred, numbers
from qsample.transforms.quantized_linear import QuantizedWeight

PARTS = ("blocks", "scales", "zero_points", "order", "offsets")


def weight(
    rows: int, *, zero_points: bool = True, offsets: bool = True, blocks: int = 3
) -> QuantizedWeight:
    return QuantizedWeight(
        4,
        32,
        torch.randint(0, 256, (rows, blocks, 16), dtype=torch.uint8),
        torch.rand(rows * blocks),
        torch.randint(0, 256, (rows * -(-blocks // 2),), dtype=torch.uint8)
        if zero_points
        else None,
        torch.arange(32 * blocks) if offsets else None,
        torch.rand(blocks, rows) if offsets else None,
    )


@pytest.mark.parametrize("rows", [8, 4000], ids=["small", "placeholders"])
def test_a_weight_in_parts_is_the_whole(rows: int, tmp_path: Path) -> None:
    store = BlockStore(tmp_path / "blocks")
    plain, first, second = (
        weight(5, zero_points=False, offsets=False),
        weight(rows),
        weight(24, zero_points=False),
    )
    assert "plain" not in store
    assert store.add("plain", [plain])
    assert store.add("whole", [first, second])
    assert not store.add("none", [None])
    assert ("plain" in store, "whole" in store, "none" in store) == (True, True, False)
    for part in PARTS:
        torch.testing.assert_close(
            getattr(store.read("plain"), part), getattr(plain, part), rtol=0, atol=0
        )
    whole = store.read("whole")
    assert (whole.bits, whole.block_size, whole.sizes) == (4, 32, (rows + 24, 96))
    assert (deferred(whole.blocks) is not None) == (rows > 8)
    middle = torch.full((24 * 2,), 0x88, dtype=torch.uint8)  # of the part without zero points
    wanted = {
        "blocks": torch.cat([first.blocks, second.blocks]),
        "scales": torch.cat([first.scales, second.scales]),
        "zero_points": torch.cat([first.zero_points, middle]),
        "order": first.order,
        "offsets": torch.cat([first.offsets, second.offsets], 1),
    }
    for part, tensor in wanted.items():
        torch.testing.assert_close(numbers(getattr(whole, part)), tensor, rtol=0, atol=0)
    assert store.read("whole") is whole
