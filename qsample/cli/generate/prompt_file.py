"""`--prompt-file` runs: rows enter; JSON lines leave, one a row, in their order.

Each line begins with its row's fingerprint. So a run that was killed goes on behind the last whole line, and a file of
other prompts or settings is told from it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import typer

from qsample.cli.errors import AlreadyPrintedError
from qsample.cli.generate.prompt_rows import Row
from qsample.cli.options import context_full
from qsample.errors import QsampleError

if TYPE_CHECKING:
    from qsample.runtime import CausalLM, Engine, Request

_WAITING: Final = 64  # prompts that are read ahead of the slots
_SECONDS: Final = 0.05  # between two looks at what has ended


def check_output(output: Path | None, source: Path) -> None:
    """Raise typer.BadParameter where `output` cannot take the rows of `source`, as far as that shows beforehand."""
    if output is None:
        return
    if output.exists() and output.samefile(source):
        raise typer.BadParameter("--output and --prompt-file are one file; give another")
    if not output.parent.is_dir():
        raise typer.BadParameter(
            f"cannot write --output {output}: there is no folder {output.parent}; give another file"
        )
    if output.exists() and not output.is_file():  # whose lines could be read when the command goes on
        raise typer.BadParameter(
            f"cannot write --output {output}: it is no plain file; give one, or leave it out for standard output"
        )


def generate_file(load: Callable[[], CausalLM], rows: list[Row], output: Path | None, **settings: Any) -> None:
    """Do what is not in `output` yet, and raise QsampleError where rows have an error. None: write to stdout."""
    from qsample.cli import terminal

    if output is None:
        summary = _run(load, rows, _print, 0, **settings)
    else:
        with results_file(output, rows) as (done, failed, write):
            if done:
                terminal.note(f"{done} of {len(rows)} rows are in {output} already")
            summary = _run(load, rows[done:], write, done, **settings) if done < len(rows) else Summary()
            summary.errors += failed
    if summary.full:
        terminal.note(context_full(summary.capacity, f"ended {summary.full} of {len(rows)} rows"))
    if summary.errors:
        kind = AlreadyPrintedError if output is None else QsampleError  # stdout has lines of JSON, and nothing else
        raise kind(f"{summary.errors} of {len(rows)} rows have an error, which stands in their line")


def _print(line: str) -> None:
    sys.stdout.write(line)
    sys.stdout.flush()


def _run(
    load: Callable[[], CausalLM], rows: list[Row], write: Callable[[str], None], done: int, **settings: Any
) -> Summary:
    from qsample.cli import terminal

    summary = Summary()
    with terminal.progress(hidden=write is _print and sys.stdout.isatty()) as progress:
        progress("loading", 0.0)
        model = load()

        def show() -> None:
            stage = f"{done + summary.rows} of {done + len(rows)} rows, {summary.speed:.0f} tokens a second"
            progress(stage, (done + summary.rows) / (done + len(rows)))

        try:
            run_rows(model, rows, write, show, summary, **settings)
        except KeyboardInterrupt:
            if write is not _print:
                terminal.note(f"{done + summary.rows} of {done + len(rows)} rows are done; the same command goes on")
            raise
    terminal.note(
        f"{summary.rows} rows, {summary.tokens} tokens in {summary.seconds:.2f} s, {summary.speed:.0f} a second"
    )
    return summary


@dataclass(slots=True)
class Summary:
    """What a run did so far. full: rows that ended because the context of `capacity` tokens was full."""

    rows: int = 0
    tokens: int = 0
    errors: int = 0
    full: int = 0
    seconds: float = 0.0
    capacity: int = 0

    @property
    def speed(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


def run_rows(
    model: CausalLM,
    rows: list[Row],
    write: Callable[[str], None],
    progress: Callable[[], None],
    summary: Summary,
    *,
    slots: int | None = None,
    **settings: Any,
) -> None:
    """Continue every row, in the slots of an engine, and write their records in order."""
    from qsample.runtime import Engine

    started = time.perf_counter()
    pending: deque[tuple[Row, Request | str]] = deque()
    with Engine(model, slots=slots, max_waiting=_WAITING, **settings) as engine:
        summary.capacity = engine.capacity

        def drain() -> None:
            while pending and (isinstance(pending[0][1], str) or pending[0][1].done):
                row, request = pending.popleft()
                record = _record(row, request, summary)
                write(json.dumps(record, ensure_ascii=False) + "\n")
                summary.rows += 1
                summary.seconds = time.perf_counter() - started
                progress()

        for row in rows:
            while _running(pending) >= engine.slots + _WAITING:
                time.sleep(_SECONDS)
                drain()
            pending.append((row, _add(engine, row)))
            drain()
        while pending:
            _wait(pending[0][1])
            drain()


def _running(pending: deque[tuple[Row, Request | str]]) -> int:
    return sum(not isinstance(request, str) and not request.done for _, request in pending)


def _wait(request: Request | str) -> None:
    if not isinstance(request, str):
        try:
            request.result()
        except Exception:  # `_record` sees it
            return


def _add(engine: Engine, row: Row) -> Request | str:
    """The request; or what is wrong with the row."""
    from qsample.runtime import EngineClosedError

    if row.error is not None:
        return row.error
    try:
        return engine.add_request(row.inputs, **row.options)
    except (EngineClosedError, ImportError, MemoryError):
        raise
    except Exception as error:
        return str(error) if isinstance(error, ValueError | QsampleError) else f"{type(error).__name__}: {error}"


def _record(row: Row, request: Request | str, summary: Summary) -> dict[str, Any]:
    from qsample.cli.output import finite
    from qsample.runtime import EngineClosedError

    record: dict[str, Any] = {"fingerprint": row.fingerprint, "id": row.id}
    try:
        if isinstance(request, str):
            raise ValueError(request)
        output = request.result()
    except EngineClosedError:  # no fault of the row, which the next run does again
        raise
    except Exception as error:
        summary.errors += 1
        return record | {"error": {"message": str(error)}}
    summary.tokens += len(output.token_ids)
    record |= {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "seed": output.seed,
        "prompt_tokens": output.usage.prompt_tokens,
        "completion_tokens": output.usage.completion_tokens,
    }
    if output.stop_string is not None:
        record["stop_string"] = output.stop_string
    if output.finish_reason == "length" and output.usage.prompt_tokens + len(output.token_ids) >= summary.capacity:
        record["context_full"] = True
        summary.full += 1
    if output.finish_reason == "invalid":
        summary.errors += 1
        record["error"] = {"message": "the model gave NaN or infinite logits"}
    record |= {name: finite(values.tolist()) for name, values in output.outputs.items() if name != "probs"}
    return record


@contextmanager
def results_file(path: Path, rows: list[Row]) -> Iterator[tuple[int, int, Callable[[str], None]]]:
    """How many rows `path` has already, how many of them have an error, and what appends a line.

    A torn last line is cut off. Raises typer.BadParameter, and changes nothing, where the file holds anything but the
    first of these rows.
    """
    created = not path.exists()
    try:
        file = path.open("a+b")
    except OSError as error:
        raise typer.BadParameter(f"cannot write --output {path}: {error.strerror}; give another file") from None

    def write(line: str) -> None:
        file.write(line.encode("utf-8", "replace"))
        file.flush()

    with file:
        _lock(file, path)
        done, failed, size = _check(path, file, rows)
        file.truncate(size)
        try:
            yield done, failed, write
        finally:
            if created and file.tell() == 0:  # nothing came of it
                path.unlink(missing_ok=True)


def _check(path: Path, file: IO[bytes], rows: list[Row]) -> tuple[int, int, int]:
    """Whole rows, those with an error, and the bytes of all."""
    file.seek(0)
    count = failed = size = 0
    for line in file:
        if count == len(rows):
            raise typer.BadParameter(f"--output {path} has more rows than the prompts; give another file")
        start = _beginning(rows[count])
        if not line.startswith(start) and not (start.startswith(line) and not line.endswith(b"\n")):
            raise typer.BadParameter(
                f"line {count + 1} of --output {path} comes from another prompt or other settings; give another file, "
                "or the command that wrote it"
            )
        if not line.endswith(b"\n"):
            break
        count, size = count + 1, size + len(line)
        failed += b'"error": {' in line
    return count, failed, size


def _beginning(row: Row) -> bytes:
    return f'{{"fingerprint": "{row.fingerprint}"'.encode()


def _lock(file: IO[Any], path: Path) -> None:
    """Two runs of one command would both go on with the same rows."""
    if os.name == "posix":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise typer.BadParameter(f"another process writes to --output {path}; wait for it") from None
