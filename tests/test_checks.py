"""Single values that a caller gave: numbers that are no bools, counts, timeouts."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample.checks import (
    as_path,
    check_count,
    check_fields,
    checked,
    checked_timeout,
    choice,
    flag,
    from_keywords,
    instance,
    integer,
    is_integer,
    is_number,
    number,
    plain,
    refuse,
)
from qsample.errors import ArgumentError, CompileError


@pytest.mark.parametrize("value", [0, 5, 10**400, np.int32(7)])
def test_integers_are_numbers(value: Any) -> None:
    assert is_integer(value)
    assert is_number(value)
    assert is_integer(value, value, value)
    assert not is_integer(value, least=value + 1)
    assert not is_number(value, most=value - 1)


@pytest.mark.parametrize("value", [True, np.True_, "1", None, [1], 1j])
def test_neither(value: Any) -> None:
    assert not is_integer(value)
    assert not is_number(value)


def test_numbers() -> None:
    assert all(map(is_number, [0.5, -1e30, float("inf"), np.float32(2)]))
    assert not any(map(is_integer, [0.5, 1.0, np.float32(2)]))
    assert not is_number(float("nan"))


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2"])
def test_wrong_counts(value: Any) -> None:
    with pytest.raises(ValueError, match=f"n is {value!r}; give an integer >= 1, or None"):
        check_count("n", value)


def test_counts() -> None:
    check_count("n", None)
    check_count("n", 1)
    check_count("n", 0, least=0)


def test_timeouts() -> None:
    assert checked_timeout(None) is None
    assert [checked_timeout(value) for value in (2, -1, 0.5)] == [2.0, 0.0, 0.5]
    assert checked_timeout(float("inf")) == threading.TIMEOUT_MAX
    for value in (True, "1", float("nan")):
        with pytest.raises(
            ValueError, match=r"timeout is .*; give seconds, or None to wait as long as it takes"
        ):
            checked_timeout(value)


def _text(name: str, value: Any) -> str:
    return str(value) if isinstance(value, str | int) else refuse(name, value, "a text")


@dataclass(frozen=True, slots=True)
class _Options:
    rows: int | None = integer(None, 1, 5, "1 to 5, or None")
    share: float | None = number(0.5, 0, 1, "a number from 0 to 1, or None", optional=True)
    bits: int = choice(4, (4, 8))
    kind: str | None = choice(None, ["a", "b"])
    fast: bool = flag(True)
    names: Mapping[str, Any] = checked(factory=dict)
    text: str = checked("", _text, help="for a door")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass
class _Bits:
    bits: int = choice(4, (4, 8))

    def __post_init__(self) -> None:
        check_fields(self, CompileError)


def test_fields_keep_the_default_or_what_their_check_returns() -> None:
    assert _Options() == _Options(None, 0.5, 4, None, True, {}, "")
    options = _Options(np.int64(3), None, 8, "b", False, {"x": 1}, 7)  # type: ignore[arg-type]
    assert options == _Options(3, None, 8, "b", False, {"x": 1}, "7")
    assert type(options.rows) is int
    assert _Options.__dataclass_fields__["text"].metadata["help"] == "for a door"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rows": 6}, r"rows is 6; give 1 to 5, or None"),
        ({"share": True}, r"share is True; give a number from 0 to 1, or None"),
        ({"bits": 4.0}, r"bits is 4\.0; choose one of 4, 8$"),
        ({"bits": None}, r"bits is None; choose one of 4, 8$"),
        ({"kind": ["a"]}, r"kind is \['a'\]; choose one of a, b, or None"),
        ({"fast": 1}, r"fast is 1; give True or False"),
        ({"text": None}, r"text is None; give a text"),
    ],
)
def test_a_refused_field_is_named_with_what_is_accepted(
    wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=f"^{message}") as raised:
        _Options(**wrong)
    assert [raised.value.argument] == [*wrong]


def test_a_door_has_its_own_error() -> None:
    with pytest.raises(CompileError, match="bits is True; choose one of 4, 8"):
        _Bits(True)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", 'folder is empty; give a path \\(the current folder is "."\\)'),
        (5, "folder is 5, a int; give a path"),
        (None, "folder is None, a NoneType; give a path"),
        (b"a", "folder is b'a', a bytes; give a path"),
        ([], r"folder is \[\], a list; give a path"),
    ],
)
def test_what_is_no_path(value: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as raised:
        as_path("folder", value)
    assert raised.value.argument == "folder"


def test_paths() -> None:
    assert as_path("folder", "a/b") == Path("a/b")
    assert as_path("folder", Path("a")) == Path("a")
    assert as_path("folder", ".") == Path()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Keywords:
    path: str | None = instance(str | None, "a text, or None", None, help="where")
    count: int = integer(0, 1, 9, "1 to 9", metavar="N")
    share: float = number(-1.0, 0, 1, "0 to 1")
    mode: str | None = choice("a", ["a", "b"], optional=True)
    on: bool | None = flag(None)

    def __post_init__(self) -> None:
        check_fields(self)


def test_a_default_may_lie_outside_the_limits() -> None:
    assert from_keywords(_Keywords, "load", {}) == _Keywords()
    options = from_keywords(_Keywords, "load", {"path": "x", "count": 9, "share": 1, "mode": None})
    assert (options.path, options.count, options.share, options.mode) == ("x", 9, 1.0, None)
    assert type(options.share) is float
    fields = _Keywords.__dataclass_fields__
    assert fields["count"].metadata["limits"] == (1, 9, "1 to 9", int)
    assert fields["share"].metadata["limits"] == (0, 1, "0 to 1", float)
    assert (fields["path"].metadata["help"], fields["count"].metadata["metavar"]) == ("where", "N")
    for name, value in (("path", 5), ("count", 10), ("share", 1.5), ("mode", "c"), ("on", 0)):
        with pytest.raises(ArgumentError, match=f"^{name} is "):
            from_keywords(_Keywords, "load", {name: value})
    with pytest.raises(TypeError, match="load has no argument 'cont'; did you mean 'count'"):
        from_keywords(_Keywords, "load", {"cont": 5})
    assert (plain(np.array([1, 2])), plain(np.int32(3)), plain("a")) == ([1, 2], 3, "a")
    with pytest.raises(ArgumentError) as raised:
        refuse("name of it", 5, "a text")
    assert (str(raised.value), raised.value.argument) == ("name of it is 5; give a text", "name")
