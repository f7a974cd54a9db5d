"""Sampler graphs in files that all test processes share, so that each is traced once and not once a process.

Tracing a sampler takes longer than most tests. A file is named after the arguments and lies in a folder named after
everything else that a trace depends on: the sources that `qsample.exporters.sampler` imports and the versions of the
libraries. Whoever edits one of these sources gets new traces; an edit elsewhere does not cost any.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
MODULE = "qsample.exporters.sampler"
LIBRARIES = ("torch", "transformers", "onnxscript", "onnx-ir", "onnx", "numpy", "sympy")
KEPT_FOLDERS = 3
VARIABLE = "QSAMPLE_TEST_TRACES"


def share_traces(parent: Path | None = None) -> None:
    """Take what `qsample.exporters.sampler` traces from files in `parent`, or in that of the process above this one.

    It holds from the moment that the module is imported, so that a test of what an import brings is not disturbed.
    """
    parent = parent or Path(os.environ[VARIABLE])
    os.environ[VARIABLE] = str(parent)
    folder = parent / _key()
    folder.mkdir(parents=True, exist_ok=True)
    folder.touch()
    _forget_old_folders(parent)
    if MODULE in sys.modules:
        _wrap(sys.modules[MODULE], folder)
    else:
        sys.meta_path.insert(0, _WrapOnImport(folder))


def python_that_shares_traces(code: str) -> list[str]:
    """The command that runs `code` in a Python of its own, from the root of the project."""
    return [sys.executable, "-c", f"from tests.helpers.sampler_traces import share_traces; share_traces(); {code}"]


def imported_sources(module: str) -> set[Path]:
    """The files of the project that importing `module` may read, that of `module` included."""
    sources: set[Path] = set()
    pending = [module]
    while pending:
        name = pending.pop()
        stem = ROOT.joinpath(*name.split("."))
        path = next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.exists()), None)
        if path is None or path in sources:
            continue
        sources.add(path)
        if "." in name:
            pending.append(name.rpartition(".")[0])
        for node in _walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                pending += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path} has a relative import"
                pending += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    return sources


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """What runs: every node but those under `if TYPE_CHECKING`."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING"):
            yield from _walk(child)


def _key() -> str:
    digest = hashlib.sha256(platform.python_version().encode())
    for name in LIBRARIES:
        digest.update(f"{name} {version(name)}\n".encode())
    for path in (*sorted(imported_sources(MODULE)), Path(__file__)):
        digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _forget_old_folders(parent: Path) -> None:
    with contextlib.suppress(OSError):  # another process forgets them as well
        for folder in sorted(parent.iterdir(), key=os.path.getmtime, reverse=True)[KEPT_FOLDERS:]:
            shutil.rmtree(folder)


def _wrap(module: ModuleType, folder: Path) -> None:
    trace: Callable[..., bytes] = module._trace.__wrapped__

    @functools.cache
    def trace_once(*arguments: object) -> bytes:
        path = folder / f"{hashlib.sha256(repr(arguments).encode()).hexdigest()[:16]}.onnx"
        with FileLock(path.with_suffix(".lock")):
            if not path.exists():
                partial = path.with_suffix(".partial")
                partial.write_bytes(trace(*arguments))
                partial.replace(path)
        return path.read_bytes()

    module._trace = trace_once  # type: ignore[attr-defined]


class _WrapOnImport(MetaPathFinder):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            _wrap(module, self._folder)

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec
