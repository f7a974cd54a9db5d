"""Groups of options: dataclasses whose fields are flags of a command."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Annotated, Any, get_args

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


@dataclass
class _Every:
    """A field of each kind of flag."""

    plain: str = checked("a", help="Text.", metavar="WORD")
    count: int = integer(3, 1, 9, "1 to 9", help="Count.")
    share: float | None = checked(None, help="Share.", least=0.5)
    noisy_mode: bool = flag(False, help="Noisy.")
    sampler: bool = flag(True, help="Sampler.", flag="--on/--off")
    ids: tuple[int, ...] = checked((), help="Ids.", flag="--id", repeated=int)
    unhelped: int = 5


def option_of(flags: FieldFlags, name: str) -> Any:
    (found,) = (each for each in flags.flags() if each.name == name)
    kind, option = get_args(found.annotation)
    return kind, option, found.default


@pytest.mark.parametrize(
    ("name", "kind", "names", "least", "default"),
    [
        ("plain", str, (), None, "a"),
        ("count", int, (), 1, 3),
        ("share", float | None, (), 0.5, None),
        ("noisy_mode", bool, ("--noisy-mode",), None, False),
        ("sampler", bool, ("--on/--off",), None, True),
        ("ids", list[int] | None, ("--id",), None, None),
    ],
)
def test_the_flag_of_a_field(name: str, kind: Any, names: Any, least: Any, default: Any) -> None:
    flags = FieldFlags(_Every, panels={"plain": "Heading"})
    found, option, value = option_of(flags, name)
    # In an annotation, typer's first argument is a name.
    given = tuple(each for each in (option.default, *(option.param_decls or ())) if each != ...)
    assert (found, given, option.min, value) == (
        kind,
        names,
        least,
        default,
    )
    field = _Every.__dataclass_fields__[name]
    assert (option.help, option.metavar) == (field.metadata["help"], field.metadata.get("metavar"))
    assert option.rich_help_panel == ("Heading" if name == "plain" else None)


def test_flags_that_are_not_given_have_no_default_and_no_limit() -> None:
    flags = FieldFlags(_Every, unset=True)
    assert option_of(flags, "count")[0] == int | None
    assert option_of(flags, "count")[1].min is None  # the dataclass checks it
    assert option_of(flags, "share")[1].min == 0.5
    assert {flag.default for flag in flags.flags()} == {None}
    assert FieldFlags(_Every).unset is False


def test_helps_and_defaults_choose_the_fields() -> None:
    flags = FieldFlags(
        _Every, helps={"unhelped": "Now helped."}, defaults={"unhelped": 7, "count": 1}
    )
    assert [flag.name for flag in flags.flags()] == ["count", "unhelped"]
    kind, option, default = option_of(flags, "unhelped")
    assert (kind, option.help, default) == (int, "Now helped.", 7)
    assert flags.value({"count": 4, "unhelped": 5, "other": 6}) == {"count": 4, "unhelped": 5}


def test_every_flag_is_a_keyword() -> None:
    assert {flag.kind for flag in FieldFlags(_Every).flags()} == {inspect.Parameter.KEYWORD_ONLY}


def test_a_command_keeps_its_name_and_text() -> None:
    def command(address: _Address) -> None:
        """Connect."""

    wrapped = with_option_groups(command)
    assert (wrapped.__name__, wrapped.__doc__) == ("command", "Connect.")
    assert [*wrapped.__annotations__] == ["host", "port"]
    assert [*inspect.signature(wrapped).parameters] == ["host", "port"]
