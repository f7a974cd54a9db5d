"""`--prompt-file` of `qsample generate`: rows enter; JSON lines leave in their order, a line for each row.

Each line begins with its row's fingerprint: so an interrupted run continues after the last whole line, and a file of
other prompts or settings is recognised. A line with an error may be done again, from a corrected prompt.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from qsample.cli.common import context_full, read_text
from qsample.cli.errors import AlreadyPrintedError
from qsample.cli.terminal import counted, finite, note, progress
from qsample.disk.scratch import ScratchFolder
from qsample.errors import QsampleError
from qsample.progress import Stage
from qsample.request.sampling_params import SAMPLING_FIELDS, SEEDS, SamplingParams, layered

if TYPE_CHECKING:
    from qsample.runtime import CausalLM, RequestOutput

_JSON_LINES: Final = (".jsonl", ".ndjson", ".json")
_WAITING: Final = 64  # prompts that are read ahead of the slots


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt of the file.

    error: the mistake in its line; None = none. source: the file's and the command line's contribution to the
    fingerprint.
    """

    id: Any
    inputs: Any
    options: Mapping[str, Any]
    error: str | None = None
    source: Any = field(default=None, repr=False)
    fingerprint: str = ""

    @property
    def is_chat(self) -> bool:
        return self.error is None and isinstance(self.inputs, list) and not _are_ids(self.inputs)


def read_rows(
    path: Path, options: Mapping[str, Any], chat: Mapping[str, Any], *, as_chat: bool, system: str | None
) -> list[Row]:
    """The rows of a file: a line of text each, or a JSON object with prompt or messages, id, and parameters.

    Args:
        path: the file.
        options, chat: of rows that do not have their own.
        as_chat: texts are a user's messages.
        system: the system prompt of conversations.

    Raises typer.BadParameter if the file cannot be read or is empty, and if `chat` or `system` apply to no row.
    """
    rows: list[Row] = []
    as_json, text = path.suffix.lower() in _JSON_LINES, read_text(path, "--prompt-file")
    if as_json and _is_array(text):
        raise typer.BadParameter(
            f"--prompt-file {path} is a JSON array; give its objects a line each, as `jq -c '.[]'` writes them"
        )
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        content: dict[str, Any] = {"prompt": line.rstrip("\r")}
        fault = None
        if as_json:
            content, fault = _parse(line)
        own = {name: value for name, value in content.items() if name not in ("id", "metadata", "prompt", "messages")}
        inputs: Any = content.get("prompt")
        is_chat = "messages" in content
        if is_chat:
            inputs = content["messages"]
        elif as_chat:
            inputs, is_chat = [{"role": "user", "content": inputs}], True
        if is_chat and system is not None and not (inputs and inputs[0].get("role") == "system"):
            inputs = [{"role": "system", "content": system}, *inputs]
        merged = _merge({**options, **chat} if is_chat else options, own)
        if merged.get("seed") is None and options.get("seed") is not None:
            merged["seed"] = (options["seed"] + len(rows)) % SEEDS
        name = content.get("id", number)
        rows.append(Row(name, inputs, merged, fault, line if fault else [name, inputs, merged]))
    if (chat or system is not None) and not any(row.is_chat or row.error for row in rows):
        raise typer.BadParameter(
            f"no row of --prompt-file {path} is a conversation, so --system, --chat-template, --chat-template-kwargs "
            "and --thinking would change nothing; give --chat, which makes every prompt a user's message, or leave "
            "them out"
        )
    return rows


def with_fingerprints(rows: list[Row], settings: Any) -> list[Row]:
    """The rows with a fingerprint of everything that decides about their tokens. settings: JSON-ready, of the run."""

    def fingerprint(row: Row) -> str:
        source = json.dumps([row.source, settings], sort_keys=True, default=str)
        return hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    return [replace(row, fingerprint=fingerprint(row)) for row in rows]


def _is_array(text: str) -> bool:
    if not text.lstrip().startswith("["):
        return False
    try:
        return isinstance(json.loads(text), list)
    except (ValueError, RecursionError):
        return False


def _parse(line: str) -> tuple[dict[str, Any], str | None]:
    """The object of a line, and its mistake; None = none."""
    from qsample.text.chat import ChatOptions

    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        return {}, f"the line is not valid JSON: {error}"
    if not isinstance(content, dict):
        return {}, 'the line is not a JSON object; give {"prompt": "..."} or {"messages": [...]}'
    named = {name: content[name] for name in ("id", "metadata") if name in content}
    given = [name for name in ("prompt", "messages") if name in content]
    if len(given) != 1:
        return (
            named,
            f"the line has {' and '.join(given) or 'neither prompt nor messages'}; give either prompt or messages",
        )
    prompt, messages = content.get("prompt"), content.get("messages", [])
    if given == ["prompt"] and not isinstance(prompt, str) and not _are_ids(prompt):
        return named, f"prompt is {prompt!r:.60}; give a text, or token ids"
    if given == ["messages"] and not (isinstance(messages, list) and messages and all(map(_is_object, messages))):
        return named, f'messages is {messages!r:.60}; give [{{"role": "user", "content": "..."}}]'
    known = {"id", "metadata", "prompt", "messages", "do_sample", "stop_strings"}
    known |= {item.name for item in fields(SamplingParams)} | {item.name for item in fields(ChatOptions)}
    unknown = sorted(content.keys() - known)
    if unknown:
        return named, f"the line has {', '.join(unknown)}, which is not a parameter; put your own fields into metadata"
    bias = content.get("logit_bias")
    if isinstance(bias, dict) and all(key.isdecimal() for key in bias):  # JSON's keys are texts
        content["logit_bias"] = {int(key): value for key, value in bias.items()}
    return content, None


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _merge(options: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """`own` on top of `options`, without the options that it contradicts."""
    dropped: set[str] = set()
    if own.get("do_sample") is False or own.get("temperature") == 0:
        dropped |= {*SAMPLING_FIELDS, "do_sample"}
    elif any(own.get(name) is not None for name in SAMPLING_FIELDS):
        dropped.add("do_sample")
    dropped.add("seed")  # of row 0; each has its own
    return layered({name: value for name, value in options.items() if name not in dropped}, own)


def check_output(output: Path | None, source: Path) -> None:
    """Raise typer.BadParameter if `output` cannot take the rows of `source`, as far as that shows beforehand."""
    if output is None:
        return
    if output.exists() and output.samefile(source):
        raise typer.BadParameter("--output and --prompt-file are the same file; give another")
    if not output.parent.is_dir():
        raise typer.BadParameter(
            f"cannot write --output {output}: the folder {output.parent} does not exist; give another file"
        )
    if output.exists() and not output.is_file():  # only a file's lines can be read again
        raise typer.BadParameter(
            f"cannot write --output {output}: it is not a plain file; give another, or leave it out for standard output"
        )


def generate_file(
    load: Callable[[], CausalLM],
    rows: list[Row],
    output: Path | None,
    slots: int | None,
    *,
    retry_errors: bool = False,
    **settings: Any,
) -> None:
    """Generate the rows that `output` does not have yet.

    Args:
        load: loads the model.
        rows: with their fingerprints.
        output: a file; None = stdout.
        retry_errors: do the rows again whose line in `output` has an error.
        slots, settings: of `Engine`.

    Raises QsampleError if rows have an error.
    """
    load, summary = cache(load), Summary()
    if output is None:
        _run(load, rows, 0, _print, slots, settings, summary)
    else:
        with results_file(output, rows, retry_errors=retry_errors) as results:
            if results.done:
                note(f"{results.done} of {len(rows)} rows are in {output} already")
            if retry_errors and results.failed:
                _retry(results, load, rows, slots, settings, summary)
            else:
                summary.errors += len(results.failed)
            if results.done < len(rows):
                _run(load, rows, results.done, results.write, slots, settings, summary)
    if summary.rows:
        note(
            f"{counted(summary.rows, 'row')}, {counted(summary.tokens, 'token')} in {summary.seconds:.2f} s, "
            f"{summary.speed:.0f} a second"
        )
    if summary.full:
        note(context_full(summary.capacity, f"ended {summary.full} of {len(rows)} rows"))
    if summary.errors:
        kind = AlreadyPrintedError if output is None else QsampleError  # stdout has only the lines of rows
        again = "" if output is None else "; --retry-errors does these again, also from corrected prompts"
        raise kind(f"{summary.errors} of {len(rows)} rows have an error, see their lines{again}")


def _retry(
    results: Results,
    load: Callable[[], CausalLM],
    rows: list[Row],
    slots: int | None,
    settings: Mapping[str, Any],
    summary: Summary,
) -> None:
    """Do the rows with an error again. Their lines are replaced at once, at the end or at an interruption."""
    failed, lines = results.failed, list[str]()
    note(f"{counted(len(failed), 'row')} with an error: done again")
    try:
        _run(load, [rows[number] for number in failed], 0, lines.append, slots, settings, summary)
    finally:
        results.replace(dict(zip(failed, lines, strict=False)))


def _print(line: str) -> None:
    sys.stdout.write(line)
    sys.stdout.flush()


@dataclass(slots=True)
class Summary:
    """Counts of a run so far. full: rows that ended because the context of `capacity` tokens was full."""

    rows: int = 0
    tokens: int = 0
    errors: int = 0
    full: int = 0
    seconds: float = 0.0
    capacity: int = 0

    @property
    def speed(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


def _run(
    load: Callable[[], CausalLM],
    rows: list[Row],
    done: int,
    write: Callable[[str], None],
    slots: int | None,
    settings: Mapping[str, Any],
    summary: Summary,
) -> None:
    """Generate the rows from number `done` on in the slots of an engine, write their records in order, and count them
    in `summary`."""
    from qsample.runtime import Engine

    finished = 0
    with progress(hidden=write is _print and sys.stdout.isatty()) as report:
        report(Stage.LOADING, 0.0)
        model, started, before = load(), time.perf_counter(), summary.seconds
        try:
            with Engine(model, slots=slots, max_waiting=_WAITING, **settings) as engine:
                summary.capacity = engine.capacity
                valid = [row for row in rows[done:] if row.error is None]
                outputs = engine.map(
                    (row.inputs for row in valid), each=(row.options for row in valid), return_errors=True
                )
                for row in rows[done:]:
                    record = _record(row, ValueError(row.error) if row.error is not None else next(outputs), summary)
                    write(json.dumps(record, ensure_ascii=False) + "\n")
                    finished, summary.rows = finished + 1, summary.rows + 1
                    summary.seconds = before + time.perf_counter() - started
                    stage = f"{done + finished} of {len(rows)} rows, {summary.speed:.0f} tokens a second"
                    report(stage, (done + finished) / len(rows))
        except KeyboardInterrupt:
            if write is not _print:
                note(f"{done + finished} of {len(rows)} rows are done; the same command continues")
            raise


def _record(row: Row, output: RequestOutput | Exception, summary: Summary) -> dict[str, Any]:
    record: dict[str, Any] = {"fingerprint": row.fingerprint, "id": row.id}
    if isinstance(output, Exception):
        summary.errors += 1
        known = isinstance(output, ValueError | QsampleError)
        return record | {"error": {"message": str(output) if known else f"{type(output).__name__}: {output}"}}
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
    return record | {name: finite(values.tolist()) for name, values in output.outputs.items() if name != "probs"}


class Results:
    """The file of the results, opened and locked.

    Attributes:
        path: of the file; not a link.
        done: its whole lines.
        failed: the numbers of those with an error, from 0 on.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done = 0
        self.failed: list[int] = []
        self._file = _opened(path)

    def check(self, rows: list[Row], *, any_error: bool) -> None:
        """Count the lines, which must be the first of `rows`, and cut a torn last line off. any_error: a line with an
        error may be that of another prompt. Raises typer.BadParameter, and changes nothing, for any other line."""
        size = 0
        with self.path.open("rb") as lines:
            for line in lines:
                if self.done == len(rows):
                    raise typer.BadParameter(
                        f"--output {self.path} has more lines than the prompts have rows; give another file"
                    )
                beginning = f'{{"fingerprint": "{rows[self.done].fingerprint}"'.encode()
                if not line.endswith(b"\n") and (line.startswith(beginning) or beginning.startswith(line)):
                    break
                has_error = _has_error(line)
                if has_error is None or not (line.startswith(beginning) or (has_error and any_error)):
                    raise typer.BadParameter(self._other_line(has_error))
                if has_error:
                    self.failed.append(self.done)
                self.done, size = self.done + 1, size + len(line)
        os.ftruncate(self._file.fileno(), size)

    def _other_line(self, has_error: bool | None) -> str:
        where = f"line {self.done + 1} of --output {self.path}"
        if has_error is None:
            return f"{where} is not a whole line of a result; give another file, or delete it and all lines after it"
        if has_error:
            return f"{where} has an error, and its prompt or the settings have changed; --retry-errors does it again"
        return f"{where} comes from another prompt or other settings; give another file, or the command that wrote it"

    def write(self, line: str) -> None:
        """Append a line. Raises QsampleError, with whole lines in the file, if the disk does not take it."""
        size = os.fstat(self._file.fileno()).st_size
        try:
            _write(self._file, line.encode("utf-8", "replace"))
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file.fileno(), size)
            raise QsampleError(
                f"cannot write to --output {self.path}: {error.strerror}; the rows before are in it. Free some space, "
                "and the same command continues"
            ) from error

    def replace(self, lines: Mapping[int, str]) -> None:
        """Put other lines in the place of some, by number: all or, if the disk is full, none."""
        if not lines:
            return
        try:
            with ScratchFolder(self.path.parent) as scratch, self.path.open("rb") as old:
                aside = scratch.new / self.path.name
                new = _opened(aside)  # it is locked before it has the name
                for number, line in enumerate(old):
                    _write(new, lines[number].encode("utf-8", "replace") if number in lines else line)
                os.fsync(new.fileno())
                shutil.copymode(self.path, aside)
                aside.replace(self.path)
        except OSError as error:
            raise QsampleError(
                f"cannot write to the folder of --output {self.path}: {error.strerror}; the file is as it was. Free "
                "some space, and the same command starts again"
            ) from error
        self._file.close()
        self._file = new

    def close(self) -> None:
        self._file.close()


@contextmanager
def results_file(path: Path, rows: list[Row], *, retry_errors: bool = False) -> Iterator[Results]:
    """The file of the results, of which a torn last line is cut off.

    Raises typer.BadParameter, and changes nothing, if the file holds anything but the first of these rows.
    retry_errors: lines with an error may be those of other prompts.
    """
    path = Path(os.path.realpath(path))
    created = not path.exists()
    try:
        results = Results(path)
    except OSError as error:
        raise typer.BadParameter(f"cannot write --output {path}: {error.strerror}; give another file") from None
    try:
        results.check(rows, any_error=retry_errors)
        yield results
    finally:
        if created and path.stat().st_size == 0:  # no row was finished
            path.unlink(missing_ok=True)
        results.close()


def _has_error(line: bytes) -> bool | None:
    """Whether a line is that of a row with an error; None if it is not a whole line of a result."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return "error" in record if isinstance(record, dict) and "fingerprint" in record else None


def _opened(path: Path) -> FileIO:
    """A file to append to, without a buffer, which would be written once more when a full disk is reported."""
    file = FileIO(path, "a+")
    try:
        _lock(file, path)
    except BaseException:
        file.close()
        raise
    return file


def _write(file: FileIO, content: bytes) -> None:
    while content:
        content = content[file.write(content) :]


def _lock(file: FileIO, path: Path) -> None:
    """Keep a second run of the command from continuing with the same rows."""
    if os.name == "posix":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise typer.BadParameter(f"another process writes to --output {path}; wait for it") from None
