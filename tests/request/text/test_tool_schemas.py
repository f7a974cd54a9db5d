"""Functions as tools: the schema is the one that transformers makes."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, Literal, Optional, Union

import pytest

from qsample.request.text.tool_schemas import tool_schema


class Unit(Enum):
    C = "celsius"
    F = "fahrenheit"


class Mixed(Enum):
    A = 1
    B = "b"


class Box:
    def method(self, x: int) -> None:
        """Does it.

        Args:
            x: a number
        """

    @classmethod
    def made(cls, y: str) -> str:
        """Makes it.

        Args:
            y: a text
        """
        return y


def weather(
    place: str,
    unit: Unit,
    days: int | None = None,
    ways: list[str] = [],  # noqa: B006
) -> dict[str, float]:
    """The weather of a place.

    More about it,
    in two lines.

    Args:
        place: Where it is: a city,
            or a village: any
            place at all

        unit: of the temperature
        days: how many (choices: [1, 2, 3])
        ways: of saying it (choices: ["short ", " long"])

    Returns:
        The temperature,
        by day.

    Raises:
        ValueError: never
    """
    return {}


def scalars(a: int, b: float, c: str, d: bool, e: list, f: tuple, g: dict, h: Any, i: None) -> None:  # type: ignore[type-arg]
    """Everything.

    Args:
        a: 1
        b: 2
        c: 3
        d: 4
        e: 5
        f: 6
        g: 7
        h: 8
        i: 9
    """


def nested(
    a: list[list[int]],
    b: dict[str, list[float]],
    c: tuple[int, str],
    d: Union[int, str],  # noqa: UP007
    e: Optional[Union[list[int], str]],  # noqa: UP007, UP045
    f: Literal["x", "y"],
    g: Literal[1, "y", None],
    h: int | float | None,
    i: Mixed,
    j: list | tuple,  # type: ignore[type-arg]
    *,
    k: Optional[bool] = None,  # noqa: UP045
) -> set[int]:
    """Nests.
    Args:
        a: one
        b: two
        c: three
        d: four
        e: five
        f: six
        g: seven
        h: eight
        i: nine
        j: ten
        k: eleven
    """
    return set()


def nothing() -> str:
    """Takes nothing."""
    return ""


@pytest.mark.parametrize(
    "function",
    [weather, scalars, nested, nothing, Box().method, Box.made],
    ids=lambda one: one.__name__,
)
def test_the_schema_is_that_of_transformers(function: Callable[..., Any]) -> None:
    reference = pytest.importorskip("transformers.utils").get_json_schema(function)
    found = tool_schema(function)
    assert found == reference
    assert repr(found) == repr(reference), "in the same order: it is printed"


def test_a_schema_stays_as_it_is() -> None:
    schema = {"name": "f"}
    assert tool_schema(schema) is schema


def test_wrong_tools() -> None:
    def bare(x: int) -> None: ...

    def silent(x: int) -> None:
        """Says nothing of x."""

    def untyped(x) -> None:  # type: ignore[no-untyped-def]
        """Args:
        x: one
        """

    def odd(x: bytes) -> None:
        """Odd.

        Args:
            x: one
        """

    def unknown(x: NoSuchType) -> None:  # type: ignore[name-defined]  # noqa: F821
        """Args:
        x: one
        """

    def chosen(x: int) -> None:
        """Chosen.

        Args:
            x: one (choices: [1, )
        """

    for tool, message in (
        (bare, "the tool bare has no docstring"),
        (silent, "the argument x of the tool silent has no line in the docstring's Args"),
        (untyped, "the argument x of the tool untyped has no annotation"),
        (odd, "the argument x of the tool odd is annotated <class 'bytes'>; JSON knows int"),
        (unknown, "the annotations of the tool unknown cannot be read"),
        (chosen, "are not a JSON list"),
        ("weather", "tools has 'weather'; give JSON schemas, or functions"),
        (Box, "tools has <class"),
        (print, "tools has <built-in"),
    ):
        with pytest.raises(ValueError, match=message):
            tool_schema(tool)
