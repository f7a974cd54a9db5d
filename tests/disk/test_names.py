"""Names of files from strangers: what any system would take for something else is refused on every system."""

from __future__ import annotations

import pytest

from qsample.disk.names import colliding_name, problem_of_name

GOOD = [
    *("decoder.onnx", "decoder.onnx.data", "tokenizer/extra.json", "a/b/c", ".hidden", "x..y", "...x", "Überraschung"),
    *("con1", "console", "comet", "com10", "nulls.json", "auxiliary.txt", "a b", "100%", "模型.json", "x" * 255),
]
OUTSIDE = [
    *("/etc/passwd", "..", "../x", "a/../b", "a/..", "/", "//server/share", "C:/x", "c:x", "C:", "c:\\x"),
    *("..\\x", "a\\b", "\\\\server\\share", "\\x", "\\\\?\\C:\\x", "a/..\\b"),
]
EMPTY_PARTS = ["", ".", "./x", "a/./b", "a//b", "a/"]
CHARACTERS = ["a\0b", "a\nb", "ab:c", "file:stream", "a*", "a?", 'a"', "a|b", "<a", "a>", "a\x7f", "a\x9b1m"]
DEVICES = ["con", "NUL", "Aux.txt", "a/prn", "COM1", "lpt9.json", "com¹", "CONIN$", "nul .txt", "a/com0/b"]
ENDS = ["a.", "a ", "a./b", "a/b ."]


@pytest.mark.parametrize("name", GOOD)
def test_good_names(name: str) -> None:
    assert problem_of_name(name) is None


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (OUTSIDE, "lies outside the package"),
        (EMPTY_PARTS, "empty part"),
        (CHARACTERS, "character that file names must not have"),
        (DEVICES, "device on Windows"),
        (ENDS, "ends with a dot or a space"),
        (["x" * 256, "é" * 128, "a/" + "x" * 256], "longer than 255 bytes"),
        (["\ud800"], "not Unicode text"),
    ],
)
def test_bad_names(names: list[str], problem: str) -> None:
    for name in names:
        assert problem in (problem_of_name(name) or ""), name


@pytest.mark.parametrize(
    "names",
    [
        ["a", "A"],
        ["a/b", "A/B"],
        ["stra\u00dfe", "STRASSE"],
        ["\u00e9", "e\u0301"],
        ["a", "a/b"],
        ["A/b", "a"],
        ["x", "y/z", "Y/Z/q"],
        ["\u212a", "k"],
    ],
)
def test_names_that_are_one_file_somewhere(names: list[str]) -> None:
    assert colliding_name(names) is not None
    assert colliding_name(reversed(names)) is not None


def test_names_that_are_not() -> None:
    assert colliding_name(["a", "b", "c/a", "c/b", "ca", "d/c/a", "a.b"]) is None
    assert colliding_name([]) is None
