"""Protobuf messages, next to the package protobuf."""

from __future__ import annotations

import onnx
import pytest

from qsample.package.disk.protobuf import field, fields


def test_fields_are_those_that_protobuf_writes() -> None:
    """Numbers of one byte and of more, bytes, messages, and numbers of a fixed size, which are bytes here."""
    message = onnx.AttributeProto(name="n" * 300, i=2**40, f=1.5, ints=[0, 127, 128], type=2)
    message.t.MergeFrom(onnx.TensorProto(dims=[3], name="t"))
    data = b"\xff" + message.SerializeToString() + b"\xff"
    found = list(fields(data, 1, len(data) - 1))
    read = [
        (number, one if isinstance(one, int) else data[one.start : one.stop])
        for number, one in found
    ]
    tensor = message.t.SerializeToString()
    wanted = [
        (1, b"n" * 300),
        (2, b"\0\0\xc0\x3f"),
        (3, 2**40),
        (5, tensor),
        (8, 0),
        (8, 127),
        (8, 128),
        (20, 2),
    ]
    assert sorted(read, key=lambda one: one[0]) == wanted
    for end in range(2, len(data) - 1):  # cut anywhere, it is refused or ends after a field
        try:
            cut = list(fields(data, 1, end))
        except ValueError:
            continue
        assert cut == found[: len(cut)]
        assert len(cut) < len(found)


def test_what_field_writes_is_what_protobuf_reads() -> None:
    tensor = b"".join(field(1, size) for size in (0, 127, 128, 2**40)) + field(8, b"t" * 300)
    attribute = onnx.AttributeProto.FromString(field(5, tensor) + field(20, 4))
    assert (list(attribute.t.dims), attribute.t.name, attribute.type) == (
        [0, 127, 128, 2**40],
        "t" * 300,
        4,
    )


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x0b", "not a protobuf that ONNX knows"),  # a group
        (b"\x0a\x05abcd", "cut off"),
        (b"\x0d\0\0\0", "cut off"),
        (b"\x08" + b"\xff" * 10 + b"\x01", "cut off, or not a protobuf"),
        (b"\x0a\xff\xff\xff\xff\x1f", "cut off, or not a protobuf"),  # 2 ** 33 - 1 bytes
    ],
)
def test_what_is_no_message(data: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        list(fields(data, 0, len(data)))
