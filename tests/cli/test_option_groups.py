"""Groups of options: dataclasses whose fields are flags of a command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer

from qsample.checks import checked, flag, integer
from qsample.cli.option_groups import FieldFlags, with_option_groups


@dataclass
class _LibraryOptions:
    rows: int | None = integer(None, 1, 9, "1 to 9", help="Rows.")
    names: tuple[str, ...] = checked((), help="Names.", flag="--name", metavar="NAME", repeated=str)
    noisy: bool = flag(False, help="Noisy.", argument="with_noise")
    hidden: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Address:
    host: Annotated[str, typer.Option(help="Host.")] = "localhost"
    port: Annotated[int, typer.Option(min=1, help="Port.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Connection:
    address: _Address
    secure: Annotated[bool, typer.Option("--secure", help="Encrypt.")] = False


def test_a_dataclass_of_the_library_becomes_flags_and_flags_its_fields() -> None:
    seen: list[dict[str, Any]] = []
    app = typer.Typer()

    @app.command()
    @with_option_groups
    def command(values: Annotated[dict[str, Any], FieldFlags(_LibraryOptions)]) -> None:
        seen.append(values)

    for line in ("", "--rows 2 --name a --name b --with-noise"):
        app(line.split(), standalone_mode=False)
    assert seen == [
        {"rows": None, "names": (), "noisy": False},
        {"rows": 2, "names": ("a", "b"), "noisy": True},
    ]
    for line, words in (("--rows 0", "equal to 1"), ("--hidden 3", "--hidden")):
        with pytest.raises(Exception, match=words):
            app(line.split(), standalone_mode=False)


def test_flags_of_a_library_dataclass_without_its_defaults_or_with_others() -> None:
    unset = {flag.name: flag.default for flag in FieldFlags(_LibraryOptions, unset=True).flags()}
    assert unset == {"rows": None, "names": None, "with_noise": None}
    (rows,) = FieldFlags(_LibraryOptions, defaults={"rows": 5}).flags()
    assert (rows.name, rows.default) == ("rows", 5)
    names = [flag.name for flag in FieldFlags(_LibraryOptions, helps={"hidden": "Hidden."}).flags()]
    assert names == ["rows", "names", "with_noise", "hidden"]


def test_a_group_and_the_groups_in_it_reach_the_command() -> None:
    seen: list[Any] = []
    app = typer.Typer()

    @app.command()
    @with_option_groups
    def command(
        name: Annotated[str, typer.Argument()] = "me", *, connection: _Connection, last: int = 1
    ) -> None:
        """Connect."""
        seen.append((name, connection, last))

    app(["--port", "9"], standalone_mode=False)
    app(["you", "--host", "far", "--port", "9", "--secure", "--last", "2"], standalone_mode=False)
    assert seen == [
        ("me", _Connection(address=_Address(port=9)), 1),
        ("you", _Connection(address=_Address(host="far", port=9), secure=True), 2),
    ]
    flags = [parameter.name for parameter in typer.main.get_command(app).params]
    assert flags[:5] == ["name", "host", "port", "secure", "last"]
    with pytest.raises(Exception, match="Missing parameter: port"):
        app([], standalone_mode=False)


def test_two_flags_of_one_name_are_refused() -> None:
    def command(address: _Address, port: int = 1) -> None: ...

    with pytest.raises(ValueError, match="port"):
        with_option_groups(command)
