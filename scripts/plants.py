"""Plants one bug at a time in a module, runs the tests beside it, and lists the bugs that they miss.

    python scripts/plants.py qsample/request/checks.py            40 random bugs in a module
    python scripts/plants.py qsample/disk --number 100    in the modules of a folder, a row of docs/testing.md
    python scripts/plants.py --changed                    in each module that differs from HEAD, or --changed=REVISION

A bug changes one operator, constant, condition, argument, index or statement of the source. It is planted in a copy of
the tree in a temporary folder, so processes that a test starts meet it, too, and the tree itself is only read. The
tests are those of the module's name, tests/x/test_y.py and test_y_*.py for qsample/x/y.py, or the whole folder tests/x
if there are none. Those that run the changed function come first, and the first failure ends the run. Each bug is tried
in a fork of a process that has imported all libraries.

A bug that changes nothing that is promised is listed in scripts/equal_plants.toml, with a reason. An entry that fits no
possible bug of its module any more fails the run, so the list cannot go stale. --record writes the counts to
docs/testing.md.
"""

from __future__ import annotations

import argparse
import ast
import bisect
import contextlib
import copy
import datetime
import gc
import importlib
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EQUAL = "scripts/equal_plants.toml"
PAGE = "docs/testing.md"
_COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
_COMPARISONS |= {"is": "is not", "is not": "is", "in": "not in", "not in": "in"}
_BINARY = {"+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "//", "**": "*", "<<": ">>", ">>": "<<"}
_BINARY |= {"&": "|", "|": "&", "^": "|"}
_SYMBOLS: dict[type[ast.AST], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is",
    ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/",
    ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**", ast.LShift: "<<", ast.RShift: ">>", ast.BitAnd: "&",
    ast.BitOr: "|", ast.BitXor: "^",
}  # fmt: skip
_MEMORY = 8 << 30  # bytes of a test process; a bug may allocate without end
_FILE = 2 << 30  # bytes of a file that it writes


@dataclass(frozen=True)
class Plant:
    """One change of a module's source: the bytes from `start` to `end` become `text`."""

    module: str
    kind: str
    function: str
    line: int
    start: int
    end: int
    text: str
    old: str = field(default="", compare=False)
    new: str = field(default="", compare=False)

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Survives changes elsewhere in the module: the function and its changed lines, not their numbers."""
        return self.module, self.function, self.old, self.new

    def __str__(self) -> str:
        lines = [f"- {line}" for line in self.old.splitlines()] + [f"+ {line}" for line in self.new.splitlines()]
        return "\n    ".join([f"{self.module}:{self.line} in {self.function} ({self.kind})", *lines])


class _Planter(ast.NodeVisitor):
    """Collects every change of a module that this script can make."""

    def __init__(self, module: str, source: bytes) -> None:
        self.module, self.source = module, source
        self.offsets = [0]
        for line in source.splitlines(keepends=True):
            self.offsets.append(self.offsets[-1] + len(line))
        self.names: list[str] = []
        self.found: list[tuple[str, str, int, int, int, str]] = []

    def start(self, node: Any) -> int:
        return self.offsets[int(node.lineno) - 1] + int(node.col_offset)

    def end(self, node: Any) -> int:
        return self.offsets[int(node.end_lineno) - 1] + int(node.end_col_offset)

    def add(self, kind: str, node: Any, text: str) -> None:
        self.add_between(kind, node, self.start(node), self.end(node), text)

    def add_between(self, kind: str, node: Any, start: int, end: int, text: str) -> None:
        self.found.append((kind, ".".join(self.names) or "<module>", node.lineno, start, end, text))

    def swap_symbol(self, left: ast.AST, right: ast.AST, symbol: str, new: str) -> None:
        start, end = self.end(left), self.start(right)
        # Words need their ends; in a comment between the two, neither stands alone.
        pattern = r"\s+".join(map(re.escape, symbol.split()))
        match = re.search(rf"\b{pattern}\b" if symbol[0].isalpha() else pattern, self.source[start:end].decode())
        if match:
            before = len(self.source[start:end].decode()[: match.start()].encode())
            self.add_between("operator", right, start + before, start + before + len(match[0].encode()), new)

    # What says nothing about behaviour is left alone: annotations, decorators, docstrings, messages, type checking.
    def visit_FunctionDef(self, node: Any) -> None:
        self.names.append(node.name)
        for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self.names.pop()

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.names.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self.names.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Python 3.11 gives wrong places for what is inside, and most of it is messages."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """States what holds anyway, for readers and type checkers."""

    def visit_Raise(self, node: ast.Raise) -> None:
        self.add("statement", node, "pass")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return
        if isinstance(node.value, ast.Call | ast.Await):
            self.add("statement", node, "pass")
        self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets):
            return
        if all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self.add("statement", node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add("statement", node, "pass")
        symbol = _SYMBOLS.get(type(node.op), "@")
        if symbol in _BINARY:
            self.swap_symbol(node.target, node.value, symbol + "=", _BINARY[symbol] + "=")
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None or ast.unparse(node.value) == "None":
            return
        self.add("statement", node, "return None")
        self.visit(node.value)

    def visit_Continue(self, node: ast.Continue) -> None:
        self.add("statement", node, "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self.add("statement", node, "pass")

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            return
        self.add("condition", node.test, f"(not ({ast.unparse(node.test)}))")
        self.generic_visit(node)

    visit_While = visit_IfExp = visit_If  # noqa: N815

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self.add("condition", test, "True")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, right, operator in zip(operands, operands[1:], node.ops, strict=False):
            symbol = _SYMBOLS[type(operator)]
            self.swap_symbol(left, right, symbol, _COMPARISONS[symbol])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        symbol = _SYMBOLS.get(type(node.op), "@")
        if symbol in _BINARY:
            self.swap_symbol(node.left, node.right, symbol, _BINARY[symbol])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        symbol, other, neutral = ("and", "or", "True") if isinstance(node.op, ast.And) else ("or", "and", "False")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.swap_symbol(left, right, symbol, other)
        for value in node.values:
            self.add("condition", value, neutral)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub | ast.Invert):
            self.add("operator", node, f"({ast.unparse(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self.add("constant", node, str(not value))
        elif isinstance(value, int):
            self.add("constant", node, str(value + 1))
            if value:
                self.add("constant", node, f"({value - 1})")
        elif isinstance(value, float):
            self.add("constant", node, f"({value * 2 if value else 1.0!r})")
        elif isinstance(value, str) and not re.search(r"\s", value):
            self.add("constant", node, repr(value + "_planted"))

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.visit(node.value)
        indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for index in indices:
            if isinstance(index, ast.Slice):
                self.change_slice(index)
            elif ast.unparse(index) == "-1":
                self.add("index", index, "0")
            elif isinstance(index, ast.Constant) and type(index.value) is int:
                self.add("index", index, str(index.value + 1))
            elif isinstance(index, ast.BinOp):
                self.add("index", index, f"({ast.unparse(index)}) + 1")
            if not isinstance(index, ast.Slice):
                self.visit(index)

    def change_slice(self, index: ast.Slice) -> None:
        for bound in ("lower", "upper"):
            value = getattr(index, bound)
            if value is not None:
                self.add("index", value, "")
                self.add("index", value, f"({ast.unparse(value)}) + 1")
                self.visit(value)

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func).rpartition(".")[2]
        if "warn" in name or name in ("debug", "info", "TypeVar", "cast", "print"):
            return
        for index, keyword in enumerate(node.keywords):
            if keyword.arg is not None:
                changed = copy.copy(node)
                changed.keywords = node.keywords[:index] + node.keywords[index + 1 :]
                self.add("argument", node, ast.unparse(changed))
        for index in range(len(node.args) - 1 if name not in ("min", "max") else 0):
            first, second = node.args[index : index + 2]
            starred = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
            if not starred and ast.unparse(first) != ast.unparse(second):
                changed = copy.copy(node)
                changed.args = [*node.args[:index], second, first, *node.args[index + 2 :]]
                self.add("argument", node, ast.unparse(changed))
        self.generic_visit(node)


def possible_plants(module: str, source: bytes) -> list[Plant]:
    """Every change, in the order of the source. A few give no valid program, see `is_program`."""
    planter = _Planter(module, source)
    planter.visit(ast.parse(source))
    lines = source.splitlines(keepends=True)
    starts = [0, *itertools.accumulate(map(len, lines))]
    plants, repeated = [], Counter[tuple[str, str, str, str]]()
    for kind, function, line, start, end, text in sorted(set(planter.found), key=lambda found: found[3:]):
        first, last = bisect.bisect_right(starts, start) - 1, bisect.bisect_left(starts, end)
        before, after = source[starts[first] : start], source[end : starts[last]]
        old = _stripped((before + source[start:end] + after).decode())
        new = _stripped((before + text.encode() + after).decode())
        key = (module, function, old, new)
        repeated[key] += 1
        if repeated[key] > 1:
            new += f"  #{repeated[key]}"
        plants.append(Plant(module, kind, function, line, start, end, text, old, new))
    return plants


def _stripped(lines: str) -> str:
    return "\n".join(line.strip() for line in lines.splitlines())


def planted(source: bytes, plant: Plant) -> bytes:
    return source[: plant.start] + plant.text.encode() + source[plant.end :]


def is_program(source: bytes) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def tests_of(root: Path, module: str) -> list[str]:
    """The namesake tests of a module, or the tests of its folder if it has none."""
    _, *folders, name = Path(module).with_suffix("").parts
    folder = root.joinpath("tests", *folders)
    found = [*folder.glob(f"test_{name}.py"), *folder.glob(f"test_{name}_*.py")]
    if not found:
        found = list(folder.glob("test_*.py"))
    if not found:
        raise SystemExit(f"{module} has no tests: neither {folder}/test_{name}.py nor others in that folder.")
    return sorted(str(path.relative_to(root)) for path in found)


class Watch:
    """A pytest plugin of the run without a bug: which test runs which functions, and how long it takes."""

    def __init__(self, root: Path, modules: list[str]) -> None:
        self.files = {str(root / module): module for module in modules}
        self.test = ""
        self.functions: dict[str, dict[str, set[str]]] = {module: defaultdict(set) for module in modules}
        self.seconds: Counter[str] = Counter()

    def _call(self, frame: Any, event: str, argument: object) -> None:
        if (module := self.files.get(frame.f_code.co_filename)) is not None:
            self.functions[module][self.test].add(frame.f_code.co_name)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.test = nodeid

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionstart(self) -> None:
        threading.settrace(self._call)
        sys.settrace(self._call)

    def pytest_sessionfinish(self) -> None:
        sys.settrace(None)

    def result(self, root: Path) -> dict[str, Any]:
        files = {name: str(getattr(module, "__file__", None) or "") for name, module in list(sys.modules.items())}
        libraries = [name for name, file in files.items() if "site-packages" in file]
        functions = {
            module: {test: sorted(names) for test, names in tests.items()} for module, tests in self.functions.items()
        }
        return {"functions": functions, "seconds": self.seconds, "libraries": libraries}


class Order:
    """A pytest plugin of a run with a bug: the given tests first, in their order."""

    def __init__(self, first: list[str]) -> None:
        self.places = {test: place for place, test in enumerate(first)}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items.sort(key=lambda item: self.places.get(item.nodeid, len(self.places)))


def fork_tests(folder: Path, arguments: list[str], plugin: Watch | Order) -> int:
    """Start pytest in a fork of this process, in a copy of the tree. Returns its process id; its group is the same."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    status = 70
    try:
        os.setsid()
        with open(folder / "output", "wb") as output:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        # A bug may write or delete what it should not: nothing but the temporary folder is in its reach by name.
        home, temporary = folder / "home", folder / "temporary"
        shutil.rmtree(temporary, ignore_errors=True)
        for path in (home, temporary):
            path.mkdir(exist_ok=True)
        tree = folder / "tree"
        os.environ |= {"HOME": str(home), "XDG_CACHE_HOME": str(home), "TMPDIR": str(temporary)}
        os.environ |= {"PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1"}
        tempfile.tempdir = None
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE, _FILE))
        os.chdir(tree)
        sys.path.insert(0, str(tree))
        importlib.invalidate_caches()
        import pytest

        status = int(pytest.main(["-q", "-p", "no:cacheprovider", "-m", "not slow", *arguments], plugins=[plugin]))
        if isinstance(plugin, Watch):
            (folder / "watched.json").write_text(json.dumps(plugin.result(tree)))
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def end_group(process: int) -> None:
    """End what a test process started and left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


def copy_tree(root: Path, folder: Path) -> None:
    """The files of git's working tree, with those that are new and not ignored; links stay links."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (root / name).is_symlink() or (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name, follow_symlinks=False)


class Field:
    """Copies of the tree in which bugs are planted, and what is known of the tests without a bug."""

    def __init__(self, root: Path, folder: Path, jobs: int, limit: float | None) -> None:
        self.limit = limit
        self.folders = [folder / str(job) for job in range(jobs)]
        for place in self.folders:
            (place / "tree").mkdir(parents=True)
            copy_tree(root, place / "tree")
        self.root = folder / "original"
        shutil.copytree(self.folders[0] / "tree", self.root, symlinks=True)
        self.functions: dict[str, dict[str, list[str]]] = {}
        self.seconds: dict[str, float] = {}
        self.tests: dict[str, list[str]] = {}
        self.planted = 0

    def watch(self, modules: list[str]) -> None:
        """Run the tests of the modules without a bug, then import the libraries that they use."""
        self.tests = {module: tests_of(self.root, module) for module in modules}
        every = sorted({test for tests in self.tests.values() for test in tests})
        folder = self.folders[0]
        process = fork_tests(folder, every, Watch(folder / "tree", modules))
        _, status = os.waitpid(process, 0)
        end_group(process)
        if os.waitstatus_to_exitcode(status) != 0:
            output = (folder / "output").read_text(errors="replace")
            raise SystemExit(f"The tests fail without a bug, so they tell nothing:\n{output[-4000:]}")
        watched = json.loads((folder / "watched.json").read_text())
        self.functions, self.seconds = watched["functions"], watched["seconds"]
        for name in watched["libraries"]:
            if name != "__main__" and name not in sys.modules:
                with contextlib.suppress(BaseException):
                    importlib.import_module(name)
        gc.collect()
        gc.freeze()

    def in_order(self, plant: Plant) -> list[str]:
        """The tests that run the changed function, the fastest first."""
        name = plant.function.rpartition(".")[2]
        found = [test for test, names in self.functions[plant.module].items() if test and name in names]
        return sorted(found, key=lambda test: self.seconds.get(test, 0.0))

    def start(self, folder: Path, plant: Plant) -> tuple[int, float]:
        """Plant the bug and start the tests: (process, when it is ended)."""
        path = folder / "tree" / plant.module
        path.write_bytes(planted((self.root / plant.module).read_bytes(), plant))
        # Python takes a compiled file by the second and the size of its source: give each bug a second of its own.
        self.planted += 1
        os.utime(path, (self.planted * 10, self.planted * 10))
        usual = sum(
            seconds for test, seconds in self.seconds.items() if test.split("::")[0] in self.tests[plant.module]
        )
        limit = self.limit if self.limit is not None else 30 + 2 * usual
        arguments = ["-x", *self.tests[plant.module]]
        return fork_tests(folder, arguments, Order(self.in_order(plant))), time.monotonic() + limit

    def restore(self, folder: Path, plant: Plant) -> None:
        shutil.copy2(self.root / plant.module, folder / "tree" / plant.module)

    def outcomes(self, plants: list[Plant]) -> Iterator[tuple[Plant, str]]:
        """Try each bug: "caught", "hang" (caught by the time limit) or "missed"."""
        waiting, free = list(reversed(plants)), list(self.folders)
        running: dict[int, tuple[Plant, Path, float]] = {}
        try:
            while waiting or running:
                while waiting and free:
                    plant, folder = waiting.pop(), free.pop()
                    process, until = self.start(folder, plant)
                    running[process] = plant, folder, until
                time.sleep(0.05)
                for process, (plant, folder, until) in list(running.items()):
                    done, status = os.waitpid(process, os.WNOHANG)
                    if not done and time.monotonic() < until:
                        continue
                    end_group(process)
                    if not done:
                        os.waitpid(process, 0)
                        outcome = "hang"
                    else:
                        code = os.waitstatus_to_exitcode(status)
                        outcome = "missed" if code == 0 else "caught"
                        if code in (4, 5, 70):  # wrong usage, no tests, this script
                            output = (folder / "output").read_text(errors="replace")
                            if "Error while loading conftest" not in output and "ImportError" not in output:
                                raise SystemExit(f"No tests ran for {plant}:\n{output[-4000:]}")
                    self.restore(folder, plant)
                    del running[process]
                    free.append(folder)
                    yield plant, outcome
        finally:
            for process in running:
                end_group(process)


def equal_plants(root: Path) -> dict[tuple[str, str, str, str], str]:
    """(module, function, old lines, new lines) → why this change is none of behaviour."""
    path = root / EQUAL
    if not path.exists():
        return {}
    return {
        (module, entry["in"], entry["old"], entry["new"]): entry["why"]
        for module, entries in tomllib.loads(path.read_text("utf-8")).items()
        for entry in entries
    }


def changed_modules(root: Path, package: str, revision: str) -> list[str]:
    """The modules of the package that differ from a revision, or are new."""
    names = set()
    for command in (
        ["diff", "--name-only", "--diff-filter=d", revision],
        ["ls-files", "--others", "--exclude-standard"],
    ):
        run = subprocess.run(["git", *command, "--", package], cwd=root, capture_output=True, text=True)
        if run.returncode:
            raise SystemExit(f"--changed={revision}: {run.stderr.strip()}")
        names |= set(run.stdout.split("\n"))
    return sorted(name for name in names if name.endswith(".py"))


def modules_in(root: Path, path: str) -> list[str]:
    """The modules of a path, relative to the root: a file, or all files of a folder."""
    full = (Path.cwd() / path).resolve()
    if full.is_dir():
        found = sorted(full.rglob("*.py"))
    elif full.is_file() and full.suffix == ".py":
        found = [full]
    else:
        raise SystemExit(f"{path} is neither a module nor a folder of modules.")
    return [str(file.relative_to(root)) for file in found]


def record(root: Path, area: str, counts: Counter[str]) -> None:
    """Write a row of the page's table; the first measurement of an area stays in the row."""
    page = root / PAGE
    text = page.read_text("utf-8")
    number = sum(counts.values())
    caught = counts["caught"] + counts["hang"]
    share = f"{100 * caught / (number - counts['equal']):.0f} %" if number > counts["equal"] else "-"
    pattern = re.compile(rf"^\| `{re.escape(area)}` \|(.*)\|$", re.MULTILINE)
    match = pattern.search(text)
    before = match[1].split("|")[0].strip() if match else f"{caught} of {number}"
    row = f"| `{area}` | {before} | {number} | {caught} | {counts['equal']} | {share} | {datetime.date.today()} |"
    text = pattern.sub(row, text) if match else text.replace("\n<!-- plants -->", f"\n{row}\n<!-- plants -->")
    page.write_text(text, "utf-8")


def try_area(field: Field, area: str, modules: list[str], arguments: argparse.Namespace) -> Counter[str]:
    """Plant bugs in the modules of a path, and print what was missed."""
    equal = {key: why for key, why in equal_plants(field.root).items() if key[0] in modules}
    possible = [plant for module in modules for plant in possible_plants(module, (field.root / module).read_bytes())]
    if stale := equal.keys() - {plant.key for plant in possible}:
        places = "\n  ".join(f"{module}, in {function}: {old}" for module, function, old, _ in sorted(stale))
        raise SystemExit(f"Entries of {EQUAL} that fit no bug of their module any more:\n  {places}")
    wanted = [plant for plant in possible if arguments.only is None or re.search(arguments.only, str(plant))]
    random.Random(f"{arguments.seed} {area}").shuffle(wanted)
    programs = (plant for plant in wanted if is_program(planted((field.root / plant.module).read_bytes(), plant)))
    chosen = list(itertools.islice(programs, arguments.number))
    counts = Counter(equal=sum(plant.key in equal for plant in chosen))
    chosen = [plant for plant in chosen if plant.key not in equal]
    if chosen:
        field.watch(sorted({plant.module for plant in chosen}))
    started = time.monotonic()
    for plant, outcome in field.outcomes(chosen):
        counts[outcome] += 1
        if outcome == "missed" or arguments.verbose:
            print(f"{outcome}: {plant}", flush=True)
    caught = counts["caught"] + counts["hang"]
    print(
        f"{area}: {len(chosen) + counts['equal']} bugs of {len(possible)} possible, {caught} caught ({counts['hang']} "
        f"by the time limit), {counts['missed']} missed, {counts['equal']} equal; {time.monotonic() - started:.0f} s",
        flush=True,
    )
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="modules, or folders of modules")
    parser.add_argument(
        "--changed", nargs="?", const="HEAD", metavar="REVISION", help="the modules that differ from it"
    )
    parser.add_argument("--number", type=int, default=40, help="bugs for each path (40)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of bugs (0)")
    parser.add_argument("--only", metavar="PATTERN", help="only bugs whose printed form has this regular expression")
    parser.add_argument("--jobs", type=int, default=1, help="bugs at the same time (1)")
    parser.add_argument("--limit", type=float, help="seconds for each bug (30, and twice those of the tests)")
    parser.add_argument("--record", action="store_true", help=f"write the counts to {PAGE}")
    parser.add_argument("--verbose", action="store_true", help="print every bug, not only those that were missed")
    arguments = parser.parse_args()
    top = subprocess.run(["git", "rev-parse", "--show-toplevel"], capture_output=True, text=True)
    if top.returncode:
        parser.error("run this in a checkout: the tree is copied with git.")
    root = Path(top.stdout.strip()).resolve()
    areas = {path: modules_in(root, path) for path in arguments.paths}
    if arguments.changed:
        areas |= {module: [module] for module in changed_modules(root, "qsample", arguments.changed)}
    if not areas:
        parser.error("name a module or a folder, or give --changed; nothing has changed." if arguments.changed else
                     "name a module or a folder, or give --changed.")  # fmt: skip
    # Before a library starts its threads; tests/conftest.py has the same setting.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    missed = 0
    for path, modules in areas.items():
        with tempfile.TemporaryDirectory(prefix="plants-", ignore_cleanup_errors=True) as folder:
            field = Field(root, Path(folder).resolve(), arguments.jobs, arguments.limit)
            counts = try_area(field, path, modules, arguments)
        missed += counts["missed"]
        if arguments.record:
            record(root, path, counts)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
