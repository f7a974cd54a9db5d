"""What a client reads of a command's flags, and of the fields of a body, to compare with a table."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from pydantic import BaseModel

from qsample import cli


def unlike(table: str, *names: str) -> list[str]:
    """What a table of a command's arguments and flags has otherwise, none if it is right: names, placeholder, limits,
    whether it may be repeated, default, heading. Lines and semicolons separate the flags."""
    command: Any = None
    for name in names:
        command = cli.commands()[name] if command is None else command.commands[name]
    lines = [_line(each) for each in command.params]
    told = [flag.strip() for flag in table.strip().replace("\n", ";").split(";")]
    return [flag for flag in told if flag not in lines]


def _line(flag: Any) -> str:
    ranged = flag if hasattr(flag, "min") else flag.type  # typer 0.29, and before it
    least, most = getattr(ranged, "min", None), getattr(ranged, "max", None)
    parts = ["/".join([*flag.opts, *flag.secondary_opts]), flag.metavar or ""]
    parts += [f">={least}" * (least is not None), f"<={most}" * (most is not None)]
    parts += ["repeated" * bool(flag.multiple), "required" * bool(flag.required)]
    parts += [f"= {flag.default}" * (flag.default not in (None, ()) and flag.default is not False)]
    parts += [f"[{flag.rich_help_panel}]" * bool(flag.rich_help_panel)]
    return " ".join(filter(None, parts)) + ", without a help" * (not flag.help)


def undescribed(module: ModuleType) -> list[str]:
    """The fields without a description, of the bodies that a module defines."""
    kinds = [each for each in vars(module).values() if isinstance(each, type)]
    bodies = [each for each in kinds if issubclass(each, BaseModel) and each.__module__ == module.__name__]  # fmt: skip
    return [
        f"{body.__name__}.{name}"
        for body in bodies
        for name, field in body.model_fields.items()
        if not field.description
    ]
