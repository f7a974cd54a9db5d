"""Extension points: the objects that add-ons register by name, found in the entry points of
installed distributions.

The core names no add-on. It asks for a group, or for a name in it; a distribution answers in its
pyproject.toml:

    [project.entry-points."qsample.commands"]
    hello = "my_addon.command:hello"

docs/addons.md says which object each group expects. Only metadata is read until an object is
loaded. In a checkout, qsample's own pyproject.toml counts, and not the metadata of an installation,
which may be older or missing.
"""

from __future__ import annotations

import sys
import tomllib
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import Any, Final

from qsample.errors import DISTRIBUTION, QsampleError

COMMANDS: Final = "qsample.commands"
TARGETS: Final = "qsample.targets"
CHECKPOINTS: Final = "qsample.checkpoints"
SOURCES: Final = "qsample.sources"
SPELLINGS: Final = "qsample.spellings"
DIALECTS: Final = "qsample.dialects"
_PYPROJECT: Final = Path(__file__).parents[1] / "pyproject.toml"


def extension_names(group: str) -> list[str]:
    """The names registered in a group, in alphabetical order."""
    return sorted(_entry_points(group, tuple(sys.path)))


def load_extension(group: str, name: str) -> Any:
    """The object registered under a name.

    Args:
        group: A group, such as `COMMANDS`.
        name: A name in `extension_names(group)`.

    Raises:
        KeyError: Nothing is registered under the name.
        ImportError: The add-on needs a library that is not installed.
    """
    return _entry_points(group, tuple(sys.path))[name].load()


def load_extensions(group: str) -> dict[str, Any]:
    """All objects of a group by name; for groups whose objects need no library of an extra."""
    return {name: load_extension(group, name) for name in extension_names(group)}


@cache
def _entry_points(group: str, search_path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """The entry points of a group by name, for one value of `sys.path`: reading all metadata takes
    milliseconds.

    Raises QsampleError for a name that two distributions register.
    """
    installed = entry_points(group=group)
    checkout = _entry_points_of_checkout()
    if checkout is not None:
        others = [entry for entry in installed if not _is_own(entry)]
        installed = EntryPoints([*checkout.select(group=group), *others])
    found: dict[str, EntryPoint] = {}
    for entry_point in installed:
        other = found.get(entry_point.name)
        if other is not None and other.value != entry_point.value:
            raise QsampleError(
                f"{_origin(other)} and {_origin(entry_point)} both register {entry_point.name!r} "
                f"in {group}; uninstall one of them"
            )
        found[entry_point.name] = entry_point
    return found


@cache
def _entry_points_of_checkout() -> EntryPoints | None:
    """The entry points of qsample itself, if its package lies in a checkout."""
    if not _PYPROJECT.is_file():
        return None
    project = tomllib.loads(_PYPROJECT.read_text(encoding="utf-8")).get("project", {})
    if project.get("name") != DISTRIBUTION:
        return None
    groups = project.get("entry-points", {})
    return EntryPoints(
        EntryPoint(name, value, group)
        for group, entries in groups.items()
        for name, value in entries.items()
    )


def _is_own(entry_point: EntryPoint) -> bool:
    """Whether an entry point belongs to an installation of qsample itself."""
    return entry_point.dist is not None and entry_point.dist.name == DISTRIBUTION


def _origin(entry_point: EntryPoint) -> str:
    """The distribution that an entry point belongs to, for messages."""
    if entry_point.dist is None:
        return entry_point.value
    return f"{entry_point.dist.name} ({entry_point.value})"
