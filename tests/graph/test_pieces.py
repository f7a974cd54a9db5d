"""Weights in pieces: their sizes and order, which weights have them, and parts that are read without the whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from qsample.contract.arrays import Array
from qsample.graph import pieces as pieces_module
from qsample.graph.pieces import PIECE_ELEMENTS, Piece, PiecewiseTensor, pieces_of, read, readable
from qsample.graph.weights import JoinedTensor, StoredTensor
from tests.graph.test_save import in_file, stored


def test_any_part_can_be_read(tmp_path: Path) -> None:
    for name, tensor in stored(tmp_path).items():
        whole, source = tensor.numpy(), readable(tensor)
        for index in (
            (slice(1, 4),),
            (slice(0, 5), slice(2, 40)),
            (slice(3, 4), slice(0, 3)),
            (slice(0, 0),),
        ):
            np.testing.assert_array_equal(read(source, *index), whole[index], name)


@pytest.mark.parametrize(
    ("shape", "at_once", "rows"),
    [
        ((7, 4), 8, [2, 2, 2, 1]),
        ((7, 4), 11, [2, 2, 2, 1]),
        ((6, 4), 12, [3, 3]),
        ((3, 4), 2, [1, 1, 1]),  # a row is never cut
        ((5,), 2, [2, 2, 1]),
        ((4, 2, 2), 8, [2, 2]),
        ((3, 0), 2, [2, 1]),
        ((0, 3), 2, []),
    ],
)
def test_pieces_are_rows_of_a_limited_size(
    shape: tuple[int, ...],
    at_once: int,
    rows: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pieces_module, "PIECE_ELEMENTS", at_once)
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    source: ir.TensorProtocol = StoredTensor(ir.Tensor(array), "w")
    pieces = pieces_of(source)
    assert pieces is not None
    found = [piece() for piece in pieces]
    assert [len(piece) for piece in found] == rows
    assert all(piece.flags.c_contiguous for piece in found)
    np.testing.assert_array_equal(np.concatenate([*found, array[:0]]), array)


def test_a_piece_is_a_megabyte() -> None:
    assert 4 * PIECE_ELEMENTS == 2**20


def test_what_has_no_pieces(tmp_path: Path) -> None:
    """Scalars, numbers narrower than a byte, and tensors in memory, which are there as a whole."""
    array = np.arange(6, dtype=np.float32)
    assert pieces_of(in_file(array, tmp_path / "w")) is not None
    assert pieces_of(in_file(array[:1].reshape(()), tmp_path / "scalar")) is None
    for dtype, has_pieces in (
        (ir.DataType.INT4, False),
        (ir.DataType.UINT8, True),
        (ir.DataType.BFLOAT16, True),
    ):
        (tmp_path / "bytes").write_bytes(bytes(64))
        tensor = ir.ExternalTensor(
            "bytes", 0, 8, dtype, shape=ir.Shape([4]), name="bytes", base_dir=tmp_path
        )
        assert (pieces_of(tensor) is not None) == has_pieces, dtype
    assert pieces_of(ir.Tensor(array)) is None
    lazy = ir.LazyTensor(lambda: ir.Tensor(array), ir.DataType.FLOAT, ir.Shape([6]))
    assert pieces_of(lazy) is None


def test_a_tensor_that_is_computed_in_pieces() -> None:
    array = np.arange(6, dtype=np.float32)

    def pieces() -> Iterator[Piece]:
        yield lambda: array[:2]
        yield lambda: array[2:]

    tensor = PiecewiseTensor(lambda: ir.Tensor(array), pieces, ir.DataType.FLOAT, (6,), "w")
    assert (tensor.name, tensor.dtype, list(tensor.shape)) == ("w", ir.DataType.FLOAT, [6])
    found = pieces_of(tensor)
    assert found is not None
    assert [piece().tolist() for piece in found] == [[0, 1], [2, 3, 4, 5]]
    np.testing.assert_array_equal(tensor.numpy(), array)


def test_what_is_readable_keeps_its_form() -> None:
    """Names, dtypes, the axis and transposition; tensors of which no part can be read are computed."""
    half = np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16)
    wide = StoredTensor(ir.Tensor(half, name="h"), "wide", transposed=True)
    source = readable(wide)
    assert isinstance(source, StoredTensor)
    assert (source.name, source.transposed, list(source.shape)) == ("wide", True, [3, 2])
    assert (source.stored.name, source.stored.dtype) == ("h", ir.DataType.BFLOAT16)

    part = ir.Tensor(half)
    for axis, shape, has_parts in (
        (0, (4, 3), True),
        (1, (2, 6), True),
        (1, (2, 3, 2), True),  # the first axis is that of the parts
        (1, (6, 2), False),
        (0, (2, 6), False),
        (0, (4, 3, 1), False),
    ):
        joined = readable(JoinedTensor([part, part], axis, shape, "joined"))
        assert isinstance(joined, JoinedTensor) == has_parts, (axis, shape)
        assert (joined.name, joined.dtype) == ("joined", ir.DataType.BFLOAT16)
        whole = np.concatenate([half, half], axis).reshape(shape)
        np.testing.assert_array_equal(joined.numpy(), whole)
        for index in ((slice(1, 2),), (slice(0, 2), slice(1, 2)), (slice(1, 9),)):
            np.testing.assert_array_equal(read(joined, *index), whole[index], str((axis, shape)))


class Counted(ir.Tensor):
    """Notes that it is read."""

    reads: int = 0

    def numpy(self) -> Array:
        type(self).reads += 1
        return super().numpy()


def test_only_the_parts_of_the_range_are_read() -> None:
    """Rows at the border of two parts are those of one of them."""
    arrays = [np.full((2, 3), number, np.float32) for number in range(3)]
    parts = [
        type(f"Part{number}", (Counted,), {"reads": 0})(array)
        for number, array in enumerate(arrays)
    ]
    joined = JoinedTensor(parts, 0, (6, 3), "joined")
    assert np.shares_memory(read(joined, slice(2, 3)), parts[1].numpy()), (
        "a part alone is not copied"
    )
    for index, of_parts in (
        (slice(0, 2), {0}),
        (slice(2, 4), {1}),
        (slice(1, 3), {0, 1}),
        (slice(4, 9), {2}),
        (slice(0, 6), {0, 1, 2}),
        (slice(3, 3), {2}),  # nothing: the last part says its shape
    ):
        for part in parts:
            type(part).reads = 0
        found = read(joined, index)
        np.testing.assert_array_equal(found, np.concatenate(arrays)[index])
        assert {number for number, part in enumerate(parts) if type(part).reads} == of_parts, index


def test_float32_is_not_copied() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    for transposed in (False, True):
        source = StoredTensor(ir.Tensor(array), "w", transposed=transposed)
        assert np.shares_memory(read(source, slice(0, 2)), array)
        assert (
            read(
                StoredTensor(ir.Tensor(array.astype(np.float16)), "w", transposed=transposed),
                slice(0, 2),
            ).dtype
            == np.float32
        )
