"""Plants one bug at a time in a module, runs the tests beside it, and lists the bugs that they miss.

    python scripts/plants.py qsample/checks.py               20 random bugs in a module
    python scripts/plants.py qsample/package/disk --number 100       in the modules of a folder
    python scripts/plants.py qsample --number 200 --table plants.md  in modules drawn by lot
    python scripts/plants.py --changed                       in modules that differ from HEAD, or --changed=REVISION

A bug changes one operator, constant, condition, argument, index or statement. In a folder, each bug's module is drawn
first, so a long module has no more bugs than a short one. The bug is planted in a copy of the tree in a temporary
folder: processes that a test starts meet it as well, and the tree itself is only read. The tests are those of the
module's name, tests/x/test_y.py and test_y_*.py for qsample/x/y.py, or the whole folder tests/x if there are none.
A bug is caught if a test fails with it that passes without it, or if the tests hang or take all memory. It has no
verdict if the tests fail without it, too.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import difflib
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

SWAPS: Final[dict[type[ast.AST], type[ast.AST]]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr,
}  # fmt: skip
SILENT: Final = re.compile(
    r"warn|^(?:debug|info|TypeVar|cast|print)$"
)  # calls that only speak, or only type
MEMORY: Final = 8 << 30  # bytes of a test process: a bug may allocate without end
# The quick tests catch most bugs, so they come first.
KINDS_OF_TESTS: Final = ("not slow and not ci and not real", "ci and not slow")
NO_TESTS: Final = 5  # pytest's exit status if it finds none
NO_VERDICT: Final = "no verdict: the tests fail without the bug, too"
Change = tuple[
    ast.AST, ast.AST | None
]  # a node, and its replacement; None for a statement that is left out


@dataclass(frozen=True)
class Plant:
    """A changed source of a module."""

    module: str
    function: str
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        lines = difflib.unified_diff(
            self.before.splitlines(), self.after.splitlines(), n=0, lineterm=""
        )
        return "\n    ".join([f"{self.module}:{self.line} in {self.function}", *list(lines)[3:]])


@dataclass(frozen=True)
class Candidate:
    """A change that a module may get."""

    module: str
    source: str
    function: str
    node: Any
    changed: ast.AST | None

    def plant(self) -> Plant | None:
        """The changed module; None if it is no program."""
        offsets = [0]
        for line in self.source.encode().splitlines(keepends=True):
            offsets.append(offsets[-1] + len(line))
        node = self.node
        start = offsets[node.lineno - 1] + node.col_offset
        end = offsets[node.end_lineno - 1] + node.end_col_offset
        text = "pass" if self.changed is None else ast.unparse(self.changed)
        if isinstance(self.changed, ast.expr) and not isinstance(
            self.changed, ast.Slice | ast.Constant
        ):
            text = f"({text})"
        source = self.source.encode()
        after = (source[:start] + text.encode() + source[end:]).decode()
        try:
            ast.parse(after)
        except SyntaxError:
            return None
        return Plant(self.module, self.function, node.lineno, self.source, after)


def candidates_of(module: str, source: str) -> list[Candidate]:
    """Every change that this script can make in a module."""
    return [
        Candidate(module, source, ".".join(function) or "<module>", node, changed)
        for function, (node, changed) in _visited(ast.parse(source), ())
    ]


def _visited(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Change]]:
    """(function, change), of every node that says something about behaviour."""
    match node:
        # Asserts state what holds anyway; messages, annotations, decorators and types change no behaviour.
        case ast.Assert() | ast.JoinedStr() | ast.arg() | ast.Expr(value=ast.Constant()):
            return
        case ast.If() if "TYPE_CHECKING" in ast.unparse(node.test):
            return
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return
        case ast.Call() if SILENT.search(ast.unparse(node.func).rpartition(".")[2]):
            return
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            names = (*names, node.name)
    for change in _changes(node):
        yield names, change
    if isinstance(node, ast.Raise):
        return
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "decorator_list", "bases"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _visited(child, names)


def _changes(node: Any) -> Iterator[Change]:
    match node:
        case ast.Raise() | ast.Continue() | ast.Break() | ast.Expr(value=ast.Call() | ast.Await()):
            yield node, None
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, None
        case ast.AugAssign():
            yield node, None
            yield from (
                (node, _with(node, op=SWAPS[kind]())) for kind in [type(node.op)] if kind in SWAPS
            )
        case ast.Return(value=ast.expr()) if ast.unparse(node.value) != "None":
            yield node, ast.Return(ast.Constant(None))
        case ast.If() | ast.While() | ast.IfExp():
            yield node.test, ast.UnaryOp(ast.Not(), node.test)
        case ast.comprehension():
            yield from ((test, ast.Constant(True)) for test in node.ifs)
        case ast.Compare():
            for index, operator in enumerate(node.ops):
                yield (
                    node,
                    _with(
                        node,
                        ops=[*node.ops[:index], SWAPS[type(operator)](), *node.ops[index + 1 :]],
                    ),
                )
        case ast.BinOp() if type(node.op) in SWAPS:
            yield node, _with(node, op=SWAPS[type(node.op)]())
        case ast.BoolOp():
            yield node, _with(node, op=SWAPS[type(node.op)]())
            yield from (
                (value, ast.Constant(isinstance(node.op, ast.And))) for value in node.values
            )
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert()):
            yield node, node.operand
        case ast.Constant(value=bool() as value):
            yield node, ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield from (
                (node, ast.Constant(other)) for other in ((value + 1, value - 1) if value else (1,))
            )
        case ast.Constant(value=float() as value):
            yield node, ast.Constant(2 * value or 1.0)
        case ast.Constant(value=str() as value) if not re.search(r"\s", value):
            yield node, ast.Constant(f"{value}_planted")
        case ast.Slice():
            for bound in ("lower", "upper"):
                if (value := getattr(node, bound)) is not None:
                    yield node, _with(node, **{bound: None})
                    yield node, _with(node, **{bound: ast.BinOp(value, ast.Add(), ast.Constant(1))})
        case ast.Call():
            for index, keyword in enumerate(node.keywords):
                if keyword.arg is not None:
                    yield (
                        node,
                        _with(node, keywords=node.keywords[:index] + node.keywords[index + 1 :]),
                    )
            if ast.unparse(node.func) not in ("min", "max"):
                for index, (one, two) in enumerate(zip(node.args, node.args[1:], strict=False)):
                    if not isinstance(one, ast.Starred) and not isinstance(two, ast.Starred):
                        yield (
                            node,
                            _with(
                                node, args=[*node.args[:index], two, one, *node.args[index + 2 :]]
                            ),
                        )


def _with(node: Any, **fields: Any) -> ast.AST:
    changed: ast.AST = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def tests_of(root: Path, module: str) -> list[str]:
    """The namesake tests of a module, or the tests of its folder if it has none."""
    _, *folders, name = Path(module).with_suffix("").parts
    folder = root.joinpath("tests", *folders)
    found = [*folder.glob(f"test_{name}.py"), *folder.glob(f"test_{name}_*.py")] or [
        *folder.glob("test_*.py")
    ]
    if not found:
        raise SystemExit(
            f"{module} has no tests: neither {folder}/test_{name}.py nor any test_*.py in that folder."
        )
    return sorted(str(path.relative_to(root)) for path in found)


def git(root: Path, *arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.splitlines()


def copy_tree(root: Path, folder: Path) -> None:
    """The files of git's working tree, with new files that are not ignored; links stay links."""
    for name in git(
        root, "-c", "core.quotePath=false", "ls-files", "--cached", "--others", "--exclude-standard"
    ):
        if (root / name).is_symlink() or (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name, follow_symlinks=False)


def run_tests(
    tree: Path, tests: list[str], limit: float, marked: str = "not slow"
) -> tuple[int | None, str]:
    """The exit status of pytest in the copy, None after `limit` seconds; and the end of its output."""
    # A bug may write or delete anything: by name it reaches only the temporary folder.
    home = tree.parent / "home"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    environment = {
        **os.environ,
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home),
        "TMPDIR": str(home),
        "PYTHONPATH": str(tree),
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    options = ["-xq", "-p", "no:cacheprovider", "-m", marked]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=tree,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY)),
        )
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:  # with all processes that the tests started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return status, output.read()[-20_000:]


def caught_by(tree: Path, plant: Plant, tests: list[str], limit: float) -> str | None:
    """The test that catches a bug, how else it is caught, or NO_VERDICT; None if it is missed."""
    path = tree / plant.module
    path.write_text(plant.after, "utf-8")
    try:
        for marked in KINDS_OF_TESTS:
            status, output = run_tests(tree, tests, limit, marked)
            if status not in (0, NO_TESTS):
                break
    finally:
        path.write_text(plant.before, "utf-8")
    if status in (0, NO_TESTS):
        return None
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - .*)?$", output, re.MULTILINE)
    # A test that fails anyway, or tests that take longer anyway, catch nothing.
    again, output = run_tests(tree, failed[:1] or tests, limit)
    if again != 0:
        print(f"The tests of {plant.module} fail without a bug, so they tell nothing:\n{output}")
        return NO_VERDICT
    if status is None:
        return "time"
    return failed[0] if failed else f"exit status {status}"


def drawn(root: Path, area: str, number: int, seed: int) -> tuple[list[Plant], int]:
    """At most `number` bugs of the modules of an area by lot, and how many there are to draw from."""
    path = root / area
    modules = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    if not all(module.is_file() for module in modules):
        raise SystemExit(f"{area} is neither a module nor a folder of modules")
    lot = random.Random(f"{seed} {area}")
    left = []
    for module in modules:
        candidates = candidates_of(str(module.relative_to(root)), module.read_text("utf-8"))
        lot.shuffle(candidates)
        if candidates:
            left.append(candidates)
    possible = sum(map(len, left))
    chosen: list[Plant] = []
    while left and len(chosen) < number:
        candidates = lot.choice(left)
        plant = candidates.pop().plant()
        if plant is not None:
            chosen.append(plant)
        if not candidates:
            left.remove(candidates)
    return chosen, possible


def try_area(root: Path, tree: Path, area: str, arguments: argparse.Namespace) -> int:
    """Plant bugs in the modules of an area. Returns the number that was not caught."""
    started = time.monotonic()
    chosen, possible = drawn(root, area, arguments.number, arguments.seed)
    missed = 0
    without_verdict = 0
    for number, plant in enumerate(chosen, 1):
        catcher = caught_by(tree, plant, tests_of(tree, plant.module), arguments.limit)
        if catcher is None:
            missed += 1
            print(f"missed: {plant}", flush=True)
        elif catcher == NO_VERDICT:
            without_verdict += 1
        if arguments.table:
            with open(arguments.table, "a", encoding="utf-8") as table:
                table.write(row(number, plant, catcher))
    seconds = time.monotonic() - started
    not_caught = missed + without_verdict
    caught = len(chosen) - not_caught
    share = f"{len(chosen)} bugs of {possible} possible, {caught} caught, {missed} missed"
    print(f"{area}: {share}, {without_verdict} without a verdict; {seconds:.0f} s", flush=True)
    return not_caught


TABLE_HEAD: Final = (
    "| # | module and line | function | without | with | caught by |\n"
    "| --- | --- | --- | --- | --- | --- |\n"
)


def row(number: int, plant: Plant, catcher: str | None) -> str:
    """A bug as a row of a Markdown table."""
    removed, added = [], []
    for line in difflib.ndiff(plant.before.splitlines(), plant.after.splitlines()):
        if line.startswith("- "):
            removed.append(line[2:].strip())
        elif line.startswith("+ "):
            added.append(line[2:].strip())
    cells = [
        str(number),
        f"{plant.module}:{plant.line}",
        plant.function,
        f"`{' '.join(removed)}`",
        f"`{' '.join(added)}`",
        catcher or "**missed**",
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", help="modules, or folders of modules")
    parser.add_argument(
        "--changed", nargs="?", const="HEAD", metavar="REVISION", help="modules that differ from it"
    )
    parser.add_argument("--number", type=int, default=20, help="bugs for each path (20)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of bugs (0)")
    parser.add_argument(
        "--limit", type=float, default=600, help="seconds for a module's tests (600)"
    )
    parser.add_argument(
        "--table", metavar="FILE", help="a Markdown table of all bugs, written anew"
    )
    arguments = parser.parse_args()
    root = Path(git(Path.cwd(), "rev-parse", "--show-toplevel")[0])
    paths = [os.path.relpath(path, root) for path in arguments.paths]
    if arguments.changed:
        changed = git(
            root, "diff", "--name-only", "--diff-filter=d", arguments.changed, "--", "qsample"
        )
        new = git(root, "ls-files", "--others", "--exclude-standard", "--", "qsample")
        paths += sorted(name for name in {*changed, *new} if name.endswith(".py"))
    if not paths:
        parser.error(
            "name a module or a folder, or give --changed"
            + "; nothing has changed" * bool(arguments.changed)
        )
    if arguments.table:
        Path(arguments.table).write_text(TABLE_HEAD, "utf-8")
    missed = 0
    with tempfile.TemporaryDirectory(prefix="plants-") as folder:
        tree = Path(folder).resolve() / "tree"
        copy_tree(root, tree)
        for path in paths:
            missed += try_area(root, tree, path, arguments)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
