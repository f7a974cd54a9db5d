"""Groups of options: dataclasses whose fields are flags of a command.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class ListenOptions:
        host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
        port: Annotated[int, typer.Option(help="0 takes a free port.")] = 8000

    @with_option_groups
    def serve(package: Annotated[str, typer.Argument()], *, listening: ListenOptions) -> None: ...

The command is given an object of the dataclass. A field of a group may be a group itself. The
options of the library, such as `CompileOptions`, are dataclasses without annotations of typer:
`FieldFlags` makes their flags from the metadata of their fields.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from types import GenericAlias
from typing import Annotated, Any, Protocol, get_args, get_type_hints

import typer


class _Member(Protocol):
    """A parameter of a command, or a field of a group."""

    def flags(self) -> list[inspect.Parameter]:
        """The parameters from which typer makes flags, in the order of the help."""
        ...

    def value(self, given: Mapping[str, Any]) -> Any:
        """The value of the parameter or field.

        Args:
            given: the values of all flags, by the name of their parameter.
        """
        ...


@dataclass(frozen=True, slots=True)
class FieldFlags:
    """The flags for a dataclass of the library. The command is given the values, by field.

        values: Annotated[dict[str, Any], FieldFlags(CompileOptions)]

    A field has a flag if its metadata has the key `help`. The metadata may have further keys:

    - `argument`: the name of the argument of Python's functions, if it is not the field's name;
    - `flag`: the name of the flag, if it is not the argument's name;
    - `metavar`: the placeholder of the value in the help;
    - `limits`: the numbers that the field accepts;
    - `least`: the smallest number that the flag accepts;
    - `repeated`: the type of each value, if the flag may be repeated.

    Attributes:
        options: the dataclass.
        helps: the help of fields whose metadata has none, by field.
        panels: the headings under which the help lists the flags, by field.
        unset: whether a flag that is not given has the value None, and not the field's default. The
            dataclass then checks the range of numbers.
        defaults: the defaults of the only fields that have flags, by field. None gives each field
            its flag and its default.
    """

    options: type
    helps: Mapping[str, str] = field(default_factory=dict)
    panels: Mapping[str, str] = field(default_factory=dict)
    unset: bool = False
    defaults: Mapping[str, Any] | None = None

    def flags(self) -> list[inspect.Parameter]:
        """The parameters from which typer makes flags, in the order of the fields."""
        types = get_type_hints(self.options)
        return [self._flag(entry, types[entry.name]) for entry in self._fields()]

    def value(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The values by field.

        Args:
            given: the values of all flags, by the name of their parameter.
        """
        values: dict[str, Any] = {}
        for entry in self._fields():
            value = given[_argument(entry)]
            if isinstance(entry.default, tuple):
                value = tuple(value or ())
            values[entry.name] = value
        return values

    def _fields(self) -> list[Field[Any]]:
        found: list[Field[Any]] = []
        for entry in fields(self.options):
            has_help = "help" in entry.metadata or entry.name in self.helps
            if has_help and (self.defaults is None or entry.name in self.defaults):
                found.append(entry)
        return found

    def _flag(self, entry: Field[Any], annotation: Any) -> inspect.Parameter:
        metadata = entry.metadata
        repeated = metadata.get("repeated")
        default = self._default(entry)
        kind = _kind_of(annotation)
        names: list[str] = []
        if "flag" in metadata:
            names = [metadata["flag"]]
        elif kind is bool:
            # Without a name, typer would add a flag --no-....
            names = [f"--{_argument(entry).replace('_', '-')}"]
        least = None
        if repeated is not None:
            kind = GenericAlias(list, (repeated,))
        elif kind in (int, float):
            least = self._least(entry)
        option = typer.Option(
            *names,
            help=metadata.get("help", self.helps.get(entry.name)),
            metavar=metadata.get("metavar"),
            min=least,
            rich_help_panel=self.panels.get(entry.name),
        )
        optional = kind if default is not None else kind | None
        return _parameter(_argument(entry), Annotated[optional, option], default)

    def _default(self, entry: Field[Any]) -> Any:
        if self.defaults is not None:
            return self.defaults[entry.name]
        if self.unset or "repeated" in entry.metadata:
            return None
        return entry.default

    def _least(self, entry: Field[Any]) -> float | None:
        least: float | None = entry.metadata.get("least")
        if least is None and "limits" in entry.metadata and not self.unset:
            least = entry.metadata["limits"].least
        return least


@dataclass(frozen=True, slots=True)
class _SingleFlag:
    """A parameter or field that typer itself makes a flag of."""

    parameter: inspect.Parameter

    def flags(self) -> list[inspect.Parameter]:
        return [self.parameter]

    def value(self, given: Mapping[str, Any]) -> Any:
        return given[self.parameter.name]


@dataclass(frozen=True, slots=True)
class _OptionGroup:
    """A parameter or field whose type is a dataclass, with a flag for each field.

    Attributes:
        options: the dataclass.
        members: the fields of the dataclass, by name.
    """

    options: type
    members: Mapping[str, _Member]

    @classmethod
    def of(cls, options: type) -> _OptionGroup:
        types = get_type_hints(options, include_extras=True)
        members: dict[str, _Member] = {}
        for entry in fields(options):
            default = inspect.Parameter.empty if entry.default is MISSING else entry.default
            members[entry.name] = _member(entry.name, types[entry.name], default)
        return cls(options, members)

    def flags(self) -> list[inspect.Parameter]:
        return _flags_of(self.members)

    def value(self, given: Mapping[str, Any]) -> Any:
        return self.options(**_values_of(self.members, given))


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command that takes groups of options.

    The flags are in the order of the command's parameters and of the groups' fields.

    Raises:
        ValueError: two flags have the same name.
    """
    types = get_type_hints(command, include_extras=True)
    members = {
        name: _member(name, types[name], parameter.default)
        for name, parameter in inspect.signature(command).parameters.items()
    }

    def wrapped(**given: Any) -> None:
        command(**_values_of(members, given))

    flags = _flags_of(members)
    wrapped.__signature__ = inspect.Signature(flags)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {flag.name: flag.annotation for flag in flags}
    wrapped.__name__ = command.__name__
    wrapped.__doc__ = command.__doc__
    return wrapped


def _member(name: str, annotation: Any, default: Any) -> _Member:
    if is_dataclass(annotation):
        return _OptionGroup.of(annotation)  # type: ignore[arg-type]
    for extra in getattr(annotation, "__metadata__", ()):
        if isinstance(extra, FieldFlags):
            return extra
    return _SingleFlag(_parameter(name, annotation, default))


def _flags_of(members: Mapping[str, _Member]) -> list[inspect.Parameter]:
    return [flag for member in members.values() for flag in member.flags()]


def _values_of(members: Mapping[str, _Member], given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: member.value(given) for name, member in members.items()}


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _argument(entry: Field[Any]) -> str:
    """The argument of Python's functions for a field. It names the parameter of typer, too."""
    argument: str = entry.metadata.get("argument", entry.name)
    return argument


def _kind_of(annotation: Any) -> Any:
    """The type of the flag for a field: bool, int or float if the field may have it, else str."""
    for kind in get_args(annotation) or [annotation]:
        if kind in (bool, int, float):
            return kind
    return str
