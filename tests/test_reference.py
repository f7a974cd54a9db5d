"""docs/reference.md has every public name, and its docstring what a caller has to know: arguments, fields, errors."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from qsample import errors
from qsample.request.sampling_params import HELP

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "qsample"
PAGE = (ROOT / "docs" / "reference.md").read_text("utf-8")
NAMES = re.findall(r"^::: (qsample\.[\w.]+)$", PAGE, re.MULTILINE)
ROOMS = [
    "qsample",
    "qsample.runtime",
    "qsample.addons.evaluate",
    "qsample.addons.serve",
    "qsample.addons.ray",
]
EXTRAS = {"ray", "fastapi", "llguidance", "prometheus_client", "uvicorn"}
ARGS = re.compile(r"^(?:Args|Attributes):\n((?: {4,}.*\n?|\n)+)", re.MULTILINE)
# A docstring that leaves the rest to another: "see `load`", "as in `compile`", "with the arguments of `generate`".
ELSEWHERE = re.compile(r"\b(?:as(?: in| of| for)?|see|arguments of|errors of)\s`", re.IGNORECASE)


def public(name: str) -> Any:
    """The object of a dotted name; a function may have the name of its module."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] in EXTRAS:
                pytest.skip(f"needs {error.name}")
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


def named(name: str, text: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(name)}(?![\w(])", text) is not None


def raised(function: Any) -> set[str]:
    """The exceptions that the function's statements raise; not those of functions inside."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    whole = next(
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    found, statements = set[str](), list[ast.AST](whole.body)
    while statements:
        node = statements.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if (
            isinstance(node, ast.Raise)
            and isinstance(node.exc, ast.Call)
            and isinstance(node.exc.func, ast.Name)
        ):
            found.add(node.exc.func.id)
        statements += ast.iter_child_nodes(node)
    return {name for name in found if not name.startswith("_")} - {"AttributeError"}


def entries(text: str) -> set[str]:
    """The names that the list of arguments or attributes describes."""
    lines = re.findall(r"^ {4}([\w*, ]+): ", "".join(ARGS.findall(text)), re.MULTILINE)
    return {name.strip("* ") for line in lines for name in line.split(",")}


def function_gaps(owner: str, function: Any, text: str) -> Iterator[str]:
    if not text.strip():
        yield f"{owner} has no docstring"
    if ELSEWHERE.search(ARGS.sub("", text)):
        return
    listed = entries(text)
    for name in inspect.signature(function).parameters:
        if name not in ("self", "cls") and not (name in listed if listed else named(name, text)):
            yield f"{owner} does not describe {name}"
    for name in sorted(raised(function)):
        kind = getattr(errors, name, None) or getattr(builtins, name)
        if not any(named(base.__name__, text) for base in kind.__mro__[:-3]):
            yield f"{owner} does not say when it raises {name}"


def methods(cls: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class, as functions, if they are qsample's."""
    for name in dir(cls):
        value = inspect.getattr_static(cls, name)
        value = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
        value = inspect.unwrap(value.func if isinstance(value, cached_property) else value)
        if (
            not name.startswith("_")
            and inspect.isfunction(value)
            and value.__module__.startswith("qsample")
        ):
            yield name, value


def class_gaps(owner: str, cls: type) -> Iterator[str]:
    text = inspect.cleandoc(cls.__doc__ or "")
    if dataclasses.is_dataclass(cls):
        if "__post_init__" in vars(cls):
            yield from function_gaps(owner, vars(cls)["__post_init__"], text)
        listed, rest = entries(text), ARGS.sub("", text)
        for name in (
            entry.name for entry in dataclasses.fields(cls) if "help" not in entry.metadata
        ):
            if not (name in listed or name in HELP or named(name, rest) or ELSEWHERE.search(rest)):
                yield f"{owner} does not describe its field {name}"
    elif not text.strip():
        yield f"{owner} has no docstring"
    elif inspect.isfunction(init := vars(cls).get("__init__")) and init.__module__.startswith(
        "qsample"
    ):
        yield from function_gaps(owner, init, f"{text}\n{inspect.getdoc(init)}")
    for name, function in methods(cls):
        yield from function_gaps(
            f"{owner}.{name}", function, inspect.getdoc(getattr(cls, name)) or ""
        )


@pytest.mark.ci
@pytest.mark.parametrize("name", NAMES)
def test_a_docstring_says_what_a_caller_has_to_know(name: str) -> None:
    found = public(name)
    gaps = (
        class_gaps(name, found)
        if inspect.isclass(found)
        else function_gaps(name, found, inspect.getdoc(found) or "")
    )
    assert list(gaps) == []


def test_every_public_name_is_on_the_page() -> None:
    listed = {name.rpartition(".")[2] for name in NAMES} | {"__version__"}
    kinds = {
        name
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, Exception)
    }
    assert kinds | {name for room in ROOMS for name in names_of(room)} <= listed


def names_of(room: str) -> list[str]:
    """`__all__`; its file is read, as the room's libraries may be missing."""
    file = PACKAGE.joinpath(*room.split(".")[1:], "__init__.py").read_text("utf-8")
    return list(ast.literal_eval(re.findall(r"^__all__ = (\[[^]]*\])", file, re.MULTILINE)[0]))
