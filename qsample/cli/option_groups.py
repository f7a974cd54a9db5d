"""Dataclasses as groups of options: a command takes an object, and the command line has a flag for each of its fields.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class ListenOptions:
        host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
        port: Annotated[int, typer.Option(help="0 takes a free port.")] = 8000

    @with_option_groups
    def serve(package: Annotated[str, typer.Argument()], *, listening: ListenOptions) -> None: ...

A field of a group may be a group itself. The options of the library, such as `CompileOptions`, are dataclasses without
typer's annotations: `FieldFlags` makes their flags from the metadata of their fields.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from types import GenericAlias
from typing import Annotated, Any, Protocol, get_args, get_type_hints

import typer


class _Member(Protocol):
    """A parameter of a command or a field of a group: the flags that it stands for, and its value."""

    def flags(self) -> list[inspect.Parameter]:
        """The parameters that typer makes flags of, in the order of the help."""
        ...

    def value(self, given: Mapping[str, Any]) -> Any:
        """The object for the command. given: the values of all flags, by the name of the parameter."""
        ...


@dataclass(frozen=True, slots=True)
class FieldFlags:
    """The flags of a dataclass of the library, which annotate a dictionary of its fields' values.

        values: Annotated[dict[str, Any], FieldFlags(CompileOptions)]

    A field has a flag if its metadata has the key `help`; further keys are:

    - `argument`: the name of the field in Python's functions, if it differs from the field's;
    - `flag`: the name of the flag, if it differs from the argument's;
    - `metavar`: what stands for the value in the help;
    - `limits` or `least`: the numbers that the field accepts, or the least of them;
    - `repeated`: the type of each value, if the flag may be repeated.

    Attributes:
        options: the dataclass.
        helps: the help of fields whose metadata has none, by field.
        panels: the headings under which the help lists the flags, by field.
        unset: whether a flag that is not given is None in place of the field's default. The range of numbers is then
            left to the dataclass.
        defaults: other defaults, by field; only these fields have flags. None for the flags of all fields.
    """

    options: type
    helps: Mapping[str, str] = field(default_factory=dict)
    panels: Mapping[str, str] = field(default_factory=dict)
    unset: bool = False
    defaults: Mapping[str, Any] | None = None

    def flags(self) -> list[inspect.Parameter]:
        """The parameters that typer makes flags of, in the order of the fields."""
        types = get_type_hints(self.options)
        return [self._flag(entry, types[entry.name]) for entry in self._fields()]

    def value(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The values by field. given: the values of all flags, by the name of the parameter."""
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
        elif kind is bool:  # with this name typer adds no --no-...
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
    """A parameter or field that typer makes a flag of itself."""

    parameter: inspect.Parameter

    def flags(self) -> list[inspect.Parameter]:
        return [self.parameter]

    def value(self, given: Mapping[str, Any]) -> Any:
        return given[self.parameter.name]


@dataclass(frozen=True, slots=True)
class _OptionGroup:
    """A dataclass that stands for the flags of its fields.

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
    """The function that typer calls for a command some of whose parameters are groups of options.

    The flags are in the order of the parameters, those of a group in the order of its fields.

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
    """The name of a field in Python's functions, which is the name of its parameter here."""
    argument: str = entry.metadata.get("argument", entry.name)
    return argument


def _kind_of(annotation: Any) -> Any:
    """The type of the flag for a field: bool, int or float if the field may be one, otherwise str."""
    for kind in get_args(annotation) or [annotation]:
        if kind in (bool, int, float):
            return kind
    return str
