"""Refuses the truth of a number, and of a number or a text that may be None: zero and "" are values.

    python scripts/check_truth.py              the package
    python scripts/check_truth.py FILE ...     these files

`seed or 1`, `if temperature:` and `not pad_token_id` take 0 for "not given". Such code is refused wherever Python asks
for the truth of an expression: `x or y`, `x and y`, `not x`, `if`, `while`, `assert`, conditions of comprehensions and
of cases, `bool(x)`, `any` and `all` of a generator, and `filter(None, x)`. mypy tells the types, so an expression of
type Any is not judged. These pass: plain texts, bool, containers, also those that may be None, and `x or 0` and
`x or ""`, whose results are the same for None and for zero.

Run mypy first: its cache serves all other packages; half a minute. The exit status is 1 if something was refused, and
2 if mypy rejects a file.
"""

from __future__ import annotations

import ast
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mypy import build
from mypy.errors import CompileError
from mypy.main import process_options
from mypy.types import Instance, NoneType, ProperType, Type, UnionType, get_proper_type

NUMBERS: Final = {"builtins.int", "builtins.float", "builtins.complex", "numpy.number"}
TEXTS: Final = {"builtins.str", "builtins.bytes"}
CACHE: Final = Path(".mypy_cache")
# mypy also tells the types in packages that its cache lacks: none of their files has so many lines.
FIRST_LINE: Final = 100_000
Place = tuple[int, int, int, int]


@dataclass(frozen=True)
class Module:
    """A file whose lines are numbered after those of the files before it, so that a line tells its file."""

    path: Path
    text: str
    first_line: int

    def conditions(self) -> Iterator[ast.expr]:
        """Every expression whose truth is asked for."""
        tree = ast.parse(self.text)
        ast.increment_lineno(tree, self.first_line)
        for node in ast.walk(tree):
            match node:
                case ast.If() | ast.While() | ast.IfExp() | ast.Assert():
                    yield from _operands(node.test)
                case ast.BoolOp(op=op):
                    for value, after in zip(node.values, node.values[1:], strict=False):
                        if not (isinstance(op, ast.Or) and _is_zero(after)):
                            yield from _operands(value)
                case ast.UnaryOp(op=ast.Not()):
                    yield from _operands(node.operand)
                case ast.comprehension():
                    for condition in node.ifs:
                        yield from _operands(condition)
                case ast.match_case(guard=ast.expr() as guard):
                    yield from _operands(guard)
                case ast.Call(
                    func=ast.Name(id="any" | "all"), args=[ast.GeneratorExp(elt=element)]
                ):
                    yield from _operands(element)
                case ast.Call(func=ast.Name(id="bool"), args=[argument]):
                    yield from _operands(argument)
                case ast.Call(func=ast.Name(id="filter"), args=[ast.Constant(value=None), _]):
                    yield node


def _operands(condition: ast.expr) -> Iterator[ast.expr]:
    """The part of a condition that is not visited as a condition of its own."""
    match condition:
        case ast.BoolOp(op=ast.Or(), values=[*_, last]) if _is_zero(last):
            yield condition
        case ast.BoolOp():
            yield from _operands(condition.values[-1])
        case ast.UnaryOp(op=ast.Not()) | ast.Constant():
            return
        case _:
            yield condition


def _is_zero(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is not None and not node.value


def problem_of(kind: Type) -> str | None:
    """Why the truth of an expression of this type is refused; None if it is not."""
    kind = get_proper_type(kind)
    if isinstance(kind, Instance) and kind.type.fullname == "builtins.filter":
        kind = get_proper_type(kind.args[0])
    members = (
        [get_proper_type(one) for one in kind.items] if isinstance(kind, UnionType) else [kind]
    )
    may_be_none = any(isinstance(one, NoneType) for one in members)
    if any(_is_a(one, NUMBERS) and one.can_be_false for one in members):
        return "0 is a number: compare it with 0, or with None"
    if may_be_none and any(_is_a(one, TEXTS) and one.can_be_false for one in members):
        return '"" is a text: compare it with None'
    return None


def _is_a(kind: ProperType, names: set[str]) -> bool:
    instance = getattr(kind, "fallback", kind)
    if not isinstance(instance, Instance) or instance.type.has_base("builtins.bool"):
        return False
    return any(instance.type.has_base(name) for name in names)


def refusals(arguments: Sequence[str]) -> Iterator[str]:
    """A line for each refused expression of the files that mypy's arguments name.

    Raises:
        CompileError: if mypy rejects a file.
    """
    with tempfile.TemporaryDirectory() as folder:
        if CACHE.is_dir():
            shutil.copytree(CACHE, folder, dirs_exist_ok=True)
        sources, options = process_options(["--cache-dir", folder, *arguments])
        options.export_types = True
        modules: list[Module] = []
        first_line = FIRST_LINE
        for source in sources:
            if source.path is None or not source.path.endswith(".py"):
                continue
            module = Module(Path(source.path), Path(source.path).read_text("utf-8"), first_line)
            modules.append(module)
            source.text = "\n" * first_line + module.text
            first_line += module.text.count("\n") + 1
        result = build.build(sources, options)
    if result.errors:
        raise CompileError(result.errors)
    kinds: dict[Place, list[Type]] = defaultdict(list)
    for node, kind in result.types.items():
        if node.end_line is not None and node.end_column is not None:
            kinds[node.line, node.column, node.end_line, node.end_column].append(kind)
    for module in modules:
        for condition in module.conditions():
            problems = [problem_of(kind) for kind in kinds.get(_place(condition), [])]
            for problem in filter(None, problems[:1]):
                line = condition.lineno - module.first_line
                yield f"{os.path.relpath(module.path)}:{line}: {ast.unparse(condition)}: {problem}"


def _place(node: ast.expr) -> Place:
    """The place that mypy gives to an expression: that of an arithmetic one has no parentheses at its ends."""
    if isinstance(node, ast.BinOp):
        return (*_place(node.left)[:2], *_place(node.right)[2:])
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def main() -> int:
    try:
        found = sorted(set(refusals(sys.argv[1:])))
    except CompileError:
        print("mypy rejects a file; run mypy", file=sys.stderr)
        return 2
    print("\n".join(found) or "no truth of a number")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
