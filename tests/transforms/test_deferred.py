"""Placeholders: operations on them see the numbers, and they take no memory."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from qsample.transforms import deferred as module
from qsample.transforms.deferred import (
    Joined,
    chunks,
    computing,
    defer,
    deferred,
    deferring,
    numbers,
)

STORED = torch.randn(300, 200, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
WIDE = STORED.to(torch.float32)
IDS = torch.tensor([[3, 299], [0, 3]])
ROWS = torch.randn(4, 200, generator=torch.Generator().manual_seed(1))
OPERATIONS: list[Callable[[Tensor], Tensor]] = [
    lambda weight: F.linear(ROWS, weight),
    lambda weight: ROWS @ weight.T,
    lambda weight: ROWS @ weight[7:11].t(),
    lambda weight: F.linear(ROWS, weight.view(3, 100, 200)[1]),
    lambda weight: F.embedding(IDS, weight),
    lambda weight: F.embedding(IDS % 100, weight[100:200]),
    lambda weight: weight[IDS],
    lambda weight: weight.T.contiguous().view(-1)[3::7],
    lambda weight: torch.cat([weight, weight.flip(0)]).sum(0),
    lambda weight: torch.stack([weight.T, 2 * weight.T])[1, 3:9],
    lambda weight: weight.to(torch.float64).std(0),
    lambda weight: torch.einsum("nk,bk->bn", weight, ROWS),
    lambda weight: weight.clone().mul_(3),
    lambda weight: torch.zeros(300, 200).copy_(weight),
]


def placeholder() -> Tensor:
    return defer(WIDE.shape, torch.float32, lambda: STORED, torch.bfloat16, "somewhere")


@pytest.mark.parametrize("number", range(len(OPERATIONS)))
@pytest.mark.parametrize("piece", [1000, 10**6])
def test_an_operation_sees_the_numbers(
    number: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE_NUMBERS", piece)
    operation, weight = OPERATIONS[number], placeholder()
    with computing():
        result = operation(weight)
    torch.testing.assert_close(result, operation(WIDE), rtol=1e-6, atol=1e-5)
    assert deferred(weight) is not None


@pytest.mark.parametrize("number", range(len(OPERATIONS)))
@pytest.mark.parametrize("smallest", [1, 10**6])
def test_what_is_computed_later_is_the_same(
    number: int, smallest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SMALLEST", smallest)
    operation, weight = OPERATIONS[number], placeholder()
    with deferring():
        result = operation(weight)
    torch.testing.assert_close(numbers(result), operation(WIDE), rtol=1e-6, atol=1e-5)


def test_a_large_matrix_is_widened_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE_NUMBERS", 1000)
    made, to = list[int](), Tensor.to

    def noted(self: Tensor, *args: object, **options: object) -> Tensor:
        made.append(self.numel())
        result: Tensor = to(self, *args, **options)  # type: ignore[call-overload]
        return result

    monkeypatch.setattr(Tensor, "to", noted)
    with computing():
        F.linear(ROWS, placeholder())
    assert sum(made) == STORED.numel()
    assert max(made) == 1000


def test_what_is_only_moved_stays_in_its_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALLEST", 1)
    weight = placeholder()
    with deferring():
        moved = torch.stack([weight.T.contiguous(), weight.T], dim=1)
        other = torch.cat([weight, WIDE])
    found, mixed = deferred(moved), deferred(other)
    assert found is not None
    assert mixed is not None
    assert (found.dtype, mixed.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(numbers(moved), torch.stack([WIDE.T, WIDE.T], dim=1))
    assert torch.equal(numbers(other), torch.cat([WIDE, WIDE]))


def test_what_is_put_together_is_told_by_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALLEST", 1)
    one, other = placeholder(), placeholder()
    nowhere = defer(WIDE.shape, torch.float32, lambda: STORED, torch.bfloat16)
    with deferring():
        stacked = torch.stack([one, other], dim=1)
        both = torch.cat([stacked, stacked], dim=-2)
        apart = [
            torch.stack([one, nowhere]),
            torch.stack([one[:150], other[150:]]),
            torch.stack([one.T, other.T]),
        ]
    shape = (300, 1, 200)
    found = deferred(both)
    assert found is not None
    place = Joined(("somewhere", "somewhere"), (shape, shape), 1)
    assert found.place == Joined((place, place), ((300, 2, 200), (300, 2, 200)), 1)
    assert torch.equal(numbers(both), torch.stack([WIDE] * 4, dim=1))
    for tensor in apart:  # something lies nowhere, is a part, or is turned
        found = deferred(tensor)
        assert found is not None
        assert found.place is None


def test_there_and_back_it_is_as_it_was_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALLEST", 1)
    with deferring():
        half = placeholder().to(torch.bfloat16)
    found = deferred(half)
    assert found is not None
    assert found.place == "somewhere"
    assert torch.equal(numbers(half), STORED)


@pytest.mark.parametrize("mode", [computing, deferring])
def test_what_gives_a_number_is_computed_at_once(mode: Callable[[], object]) -> None:
    """transformers asks whether a head and the table that it is tied to are equal, if a checkpoint has both."""
    weight, same, other = (
        placeholder(),
        placeholder(),
        defer(WIDE.shape, torch.float32, lambda: -STORED, STORED.dtype),
    )
    with mode():  # type: ignore[attr-defined]
        assert torch.equal(weight, same)
        assert torch.equal(weight, WIDE)
        assert not torch.equal(weight, other)
        assert not torch.equal(WIDE + 1, weight)
        assert weight[3, 4].item() == WIDE[3, 4]
        assert torch.allclose(weight, WIDE)


@pytest.mark.parametrize("mode", [computing, deferring])
def test_what_is_written_to_is_none_any_more(mode: Callable[[], object]) -> None:
    weight = placeholder()
    with mode():  # type: ignore[attr-defined]
        weight[2:5].zero_()
    assert deferred(weight) is None
    wanted = WIDE.clone()
    wanted[2:5] = 0
    assert torch.equal(weight, wanted)


def test_parts_are_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_NUMBERS", 7)
    assert torch.equal(torch.cat(list(chunks(placeholder()))), WIDE.reshape(-1))
    assert torch.equal(torch.cat(list(chunks(placeholder().T))), WIDE.T.reshape(-1))
    assert torch.equal(torch.cat(list(chunks(WIDE))), WIDE.reshape(-1))


@pytest.mark.parametrize("mode", [computing, deferring])
def test_a_placeholder_is_written_over_with_another(mode: Callable[[], object]) -> None:
    weight = placeholder()
    other = defer(WIDE.shape, torch.float32, lambda: -STORED, STORED.dtype)
    with mode():  # type: ignore[attr-defined]
        weight.copy_(other)
    assert deferred(weight) is None
    assert deferred(other) is not None
    assert torch.equal(weight, -WIDE)


def test_a_meaning_lives_as_long_as_the_storage() -> None:
    def stored() -> Tensor:
        return STORED

    alive = weakref.ref(stored)
    weight = defer(WIDE.shape, torch.float32, stored, STORED.dtype)
    del stored
    parameter = torch.nn.Parameter(weight.T)
    del weight
    gc.collect()
    assert deferred(parameter) is not None
    del parameter
    gc.collect()
    assert alive() is None
    assert deferred(torch.zeros(300, 200)) is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_it_takes_no_memory() -> None:
    def anonymous() -> int:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return (
            int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1])
            * 1024
        )

    before = anonymous()
    weight = defer((1 << 14, 1 << 12), torch.float32, lambda: STORED, torch.bfloat16)
    assert weight.sum() == 0  # read past the modes
    assert anonymous() - before < weight.nbytes // 8
