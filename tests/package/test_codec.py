"""Dataclasses as JSON values, and what is read back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from qsample.contract.storage import Storage, stored
from qsample.package.codec import DecodeError, decode, encode, place_of, shown_key


@dataclass
class Inner:
    sizes: tuple[int, ...] = field(default=(), metadata=stored(least=1, limit=10))
    kind: Literal["a", "b"] = "a"


@dataclass
class Outer:
    name: str
    count: int = field(metadata=stored(omitted=3, least=-2, limit=5))
    ratio: float | None = field(default=None, metadata=stored(omitted=None))
    inner: Inner | None = None
    by_name: Mapping[str, Inner] = field(default_factory=dict)
    anything: Any = 0
    is_on: bool = False

    def __post_init__(self) -> None:
        if self.name == "refused":
            raise ValueError("it has that name")


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (
            Outer("x", 3),
            {"name": "x", "inner": None, "by_name": {}, "anything": 0, "is_on": False},
        ),
        (
            Outer("", 0, 0.0, Inner((1, 9), "b"), {"k": Inner()}, [1, None], True),
            {
                "name": "",
                "count": 0,
                "ratio": 0.0,
                "inner": {"sizes": [1, 9], "kind": "b"},
                "by_name": {"k": {"sizes": [], "kind": "a"}},
                "anything": [1, None],
                "is_on": True,
            },
        ),
    ],
)
def test_a_value_as_json(value: Outer, encoded: dict[str, Any]) -> None:
    assert encode(value) == encoded
    back = decode(Outer, {"count": 3, **encoded}, "x")
    assert back == value


def test_numbers_that_json_lacks_become_texts() -> None:
    given = {"a": math.nan, "b": [math.inf, -math.inf], "c": 1.5}
    assert encode(given) == {"a": "nan", "b": ["inf", "-inf"], "c": 1.5}


GOOD: dict[str, Any] = {"name": "x", "count": 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": -3}, r"x\.count is -3; it must be -2 or more, and less than 5"),
        ({"count": 5}, r"x\.count is 5; it must be -2"),
        ({"count": True}, r"x\.count is True; it must be int"),
        ({"count": 1.0}, r"x\.count is 1\.0; it must be int"),
        ({"count": None}, r"x\.count is None"),
        ({"ratio": 1}, r"x\.ratio is 1; it must be float"),
        ({"name": None}, r"x\.name is None; it must be str"),
        ({"inner": {"sizes": [1, 0]}}, r"x\.inner\.sizes\[1\] is 0; it must be 1 or more, and less than 10"),
        ({"inner": {"sizes": [10]}}, r"x\.inner\.sizes\[0\] is 10"),
        ({"inner": {"sizes": 1}}, r"x\.inner\.sizes is 1; it must be tuple"),
        ({"inner": {"kind": "c"}}, r"x\.inner\.kind is 'c'; it must be 'a' or 'b'"),
        ({"inner": [1]}, r"x\.inner is \[1\]; it must be Inner"),
        ({"by_name": {"k\n": {"kind": 0}}}, r"x\.by_name\.'k\\n'….kind is 0"),
        ({"by_name": []}, r"x\.by_name is \[\]; it must be Mapping"),
        ({"is_on": 1}, r"x\.is_on is 1; it must be bool"),
        ({"other": 1, "another": 2}, "x does not fit this qsample: unknown another, unknown other"),
        ({"name": "refused"}, "x: it has that name"),
    ],
)  # fmt: skip
def test_what_does_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        decode(Outer, GOOD | changes, "x")


def test_what_is_missing_or_of_another_version() -> None:
    with pytest.raises(DecodeError, match="missing name, missing count"):
        decode(Outer, {}, "x")
    # Nothing reads these keys any longer.
    assert decode(Outer, GOOD | {"seed": 3, "timing": {}}, "x") == Outer("x", 1)
    many = {f"key{number}": 0 for number in range(9)}
    with pytest.raises(DecodeError) as raised:
        decode(Outer, GOOD | many, "manifest")
    assert str(raised.value).count("unknown") == 5
    assert (raised.value.where, raised.value.problem[:5]) == ("manifest", " does")
    assert decode(Outer, GOOD | {"inner": None, "ratio": None}, "x").inner is None
    assert decode(Outer, GOOD | {"count": 4}, "x").count == 4
    assert decode(Outer, GOOD | {"count": -2}, "x").count == -2


@dataclass
class Choices:
    either: int | None = None
    sizes: tuple[str, ...] | None = None


@pytest.mark.parametrize(
    ("value", "back"),
    [
        ({}, Choices()),
        ({"either": None, "sizes": None}, Choices()),
        ({"either": 0, "sizes": []}, Choices(0, ())),
        ({"either": 2**31 - 1, "sizes": ["a", "b"]}, Choices(2**31 - 1, ("a", "b"))),
    ],
)
def test_values_that_may_be_absent(value: dict[str, Any], back: Choices) -> None:
    assert decode(Choices, value, "x") == back


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"either": 2**31}, r"x\.either is 2147483648; it must be 0 or more, and less than 2147483648"),
        ({"either": -1}, r"x\.either is -1; it must be 0"),
        ({"either": "1"}, r"x\.either is '1'; it must be int"),
        ({"sizes": ["a", 1]}, r"x\.sizes\[1\] is 1; it must be str"),
        ({"sizes": ["a" * 200, None]}, r"x\.sizes\[1\] is None"),
        ([], r"x is \[\]; it must be Choices"),
    ],
)  # fmt: skip
def test_values_of_another_type(value: Any, message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        decode(Choices, value, "x")


def test_the_limits_of_a_field_are_those_of_its_items() -> None:
    """Of a list, a mapping and a value that may be absent; a type alone has those of all numbers."""
    limits = Storage(least=3, limit=4)
    for kind, value in (
        (int, 5),
        (int | None, 5),
        (tuple[int, ...], [3, 5]),
        (Mapping[str, int], {"a": 3, "b": 5}),
    ):
        with pytest.raises(DecodeError, match="is 5; it must be 3 or more, and less than 4"):
            decode(kind, value, "x", limits)
        assert decode(kind, value, "x") in (5, (3, 5), {"a": 3, "b": 5})
    assert decode(Any, [None], "x", limits) == [None]


def test_long_values_and_refusals_are_cut() -> None:
    with pytest.raises(DecodeError, match=r"^x is 'y{79}; it must be int$"):
        decode(int, "y" * 500, "x")

    @dataclass
    class Refusing:
        def __post_init__(self) -> None:
            raise ValueError("z" * 500)

    with pytest.raises(DecodeError, match=r"^x: z{300}$"):
        decode(Refusing, {}, "x")


def test_keys_as_messages_show_them() -> None:
    assert shown_key("a" * 60) == "a" * 60
    assert shown_key("a" * 61) == f"'{'a' * 50}'…"
    assert shown_key("a\n") == r"'a\n'…"
    assert place_of("x.y", "key") == "x.y.key"
    assert place_of("x" * 198, "key") == "x" * 198 + ".k"
