"""Processes that write and read small packages, race for a name, and are killed: `python -m tests.helpers.writers`.

They are forks of one process without threads, so that a thousand of them take seconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

import qsample
from qsample.errors import PackageError
from qsample.package.disk import replace
from qsample.package.manifest import MODEL_PACKAGE_NAME
from qsample.package.package import MANIFEST_NAME, read_package, use_package
from tests.helpers.small_packages import FILES, write

REFUSED: Final = 3
_WATCHED: Final = tuple(str(Path(qsample.__file__).parent / name) for name in ("package", "disk"))


def files(version: int) -> dict[str, bytes]:
    """A package of which every file says its version, and none has another size."""
    return {name: b"%08d" % version + content[:20_000] for name, content in FILES.items()}


def version_of(path: Path) -> int:
    """The version that all files have; ValueError where they differ."""
    package = read_package(path)
    versions = {int(package.file(name).read_bytes()[:8]) for name in FILES}
    (version,) = versions
    return version


def fork(action: Callable[[], object]) -> int:
    """Run `action` in a child; its exit status is 0, or REFUSED for a PackageError. Returns its id."""
    child = os.fork()
    if child:
        return child
    try:
        action()
        os._exit(0)
    except PackageError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(REFUSED)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)


def status(child: int) -> int:
    """Its exit status; minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def race(folder: Path, rounds: int, writers: int, overwrite: bool) -> list[list[int]]:
    """Let `writers` processes write one package at the same moment; the exit statuses of each round."""
    results = []
    for number in range(rounds):
        target = folder / f"race{number}"
        ready, go = os.pipe(), os.pipe()

        def enter(version: int, target: Path = target, ready: Any = ready, go: Any = go) -> None:
            def wait(_: Path) -> None:
                os.write(ready[1], b"r")
                os.close(go[1])
                os.read(go[0], 1)

            write(target, files(version), then=wait, overwrite=overwrite)

        children = [fork(lambda version=version: enter(version)) for version in range(writers)]  # type: ignore[misc]
        for _ in children:
            os.read(ready[0], 1)
        os.close(go[1])
        statuses = [status(child) for child in children]
        for end in (*ready, go[0]):
            os.close(end)
        assert statuses[version_of(target)] == 0
        results.append(statuses)
    return results


def kill_at_step(step: int, action: Callable[[], object]) -> Callable[[], None]:
    """`action`, killed with SIGKILL at that step of the code that writes packages, counted from 0.

    A step is a line that runs for the first or the second time.
    """

    def run() -> None:
        remaining, times = step, Counter[tuple[str, int]]()

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal remaining
            if not frame.f_code.co_filename.startswith(_WATCHED):
                return None
            times[place := (frame.f_code.co_filename, frame.f_lineno)] += event == "line"
            if event == "line" and times[place] <= 2:
                if remaining == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                remaining -= 1
            return trace

        sys.settrace(trace)
        action()

    return run


def kill_everywhere(folder: Path, first: int, stride: int, overwrite: bool) -> dict[str, int]:
    """Kill a writer at every `stride`-th step from `first` on; how often which state was left behind."""
    target, seen = folder / "package", {"none": 0, "old": 0, "new": 0}
    step = first
    while True:
        if overwrite:
            write(target, files(1), overwrite=True)
        killed = status(
            fork(kill_at_step(step, lambda: write(target, files(2), overwrite=overwrite)))
        )
        assert killed in (0, -signal.SIGKILL), killed
        atomic = replace.exchange is not _never or not overwrite
        if not atomic and not target.exists():
            seen["none"] += 1
        elif target.exists():
            seen["new" if version_of(target) == 2 else "old"] += 1
        write(folder / "beside", files(3), overwrite=True)
        left = sorted(os.listdir(folder))
        assert left in (["beside"], ["beside", "package"]), (step, left)
        assert version_of(target) in (1, 2) if overwrite or target.exists() else True
        if target.exists() and not overwrite:
            for name in (*files(2), MANIFEST_NAME, MODEL_PACKAGE_NAME):
                (target / name).unlink()
            (target / "tokenizer").rmdir()
            target.rmdir()
        if killed == 0:
            return seen
        step += stride


def read_while_replaced(folder: Path, times: int, readers: int) -> list[int]:
    """Replace a package while others read it; how often each of them did. Raises where one saw no package."""
    target = folder / "package"
    write(target, files(0))
    stop = os.pipe()

    def read() -> None:
        os.close(stop[1])
        os.set_blocking(stop[0], False)
        count = 0
        while True:
            read_in_every_way(target)
            count += 1
            try:
                os.read(stop[0], 1)
            except BlockingIOError:
                continue
            break
        print(json.dumps(count), flush=True)

    children = [fork(read) for _ in range(readers)]
    for version in range(1, times):
        write(target, files(version), overwrite=True)
    os.close(stop[1])
    return [status(child) for child in children]


def read_in_every_way(target: Path) -> None:
    """By name, as any program does, and as ours do: then all files are of one package."""
    (target / "decoder.onnx").read_bytes()
    read_package(target)
    versions = use_package(
        target, lambda package: {int(package.file(name).read_bytes()[:8]) for name in FILES}
    )
    assert len(versions) == 1, versions


def _never(first: Path, second: Path) -> bool:
    return False


if __name__ == "__main__":
    command, path, *numbers = sys.argv[1:]
    os.fsync = lambda descriptor: (
        None
    )  # a process that is killed loses nothing by it, and it takes most of the time
    if os.environ.get("WITHOUT_EXCHANGE"):
        replace.exchange = _never
    first, second, third = map(int, numbers)
    if command == "race":
        print(json.dumps(race(Path(path), first, second, bool(third))))
    elif command == "kill":
        print(json.dumps(kill_everywhere(Path(path), first, second, bool(third))))
    else:
        print(json.dumps(read_while_replaced(Path(path), first, second)))
