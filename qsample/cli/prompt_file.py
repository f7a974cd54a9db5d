"""`--prompt-file` of `qsample generate`: rows enter; JSON lines leave in their order, a line for each row.

Each line begins with the id of its row. An interrupted run continues after the last whole line of its file, if the
lines have the ids of the first rows. A line with an error may be done again, from a corrected prompt.
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import cache
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from qsample.cli.common import context_full, read_text, with_images_before
from qsample.cli.spellings import names_here
from qsample.cli.terminal import AlreadyPrintedError, counted, finite, note, progress
from qsample.disk.locks import lock
from qsample.disk.replace import file_aside
from qsample.disk.untrusted import open_plain, parse_json
from qsample.errors import QsampleError, shown
from qsample.images.messages import with_images
from qsample.progress import Stage
from qsample.request.sampling_params import NUM_SEEDS, SAMPLING_FIELDS, SamplingParams, layered

if TYPE_CHECKING:
    from qsample.request.grammar import Form
    from qsample.runtime import CausalLM, RequestOutput

_JSON_LINES: Final = (".jsonl", ".ndjson", ".json")
_WAITING: Final = 64  # prompts that are read ahead of the slots
_NO_OPTIONS: Final = (
    "id",
    "metadata",
    "prompt",
    "messages",
    "images",
)  # fields of a line that are not parameters


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt of the file. `error`: the mistake in its line, if any."""

    id: Any
    inputs: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def is_chat(self) -> bool:
        return isinstance(self.inputs, list) and not _are_ids(self.inputs)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the file: an object with prompt or messages, id, and parameters. `error`: the mistake in it, if any."""

    number: int
    content: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def is_text(self) -> bool:
        """Whether its prompt is a text, not token ids or messages."""
        return isinstance(self.content.get("prompt"), str)


def read_lines(path: Path) -> list[Line]:
    """The lines of a file that are not empty: a prompt each, or a JSON object. Raises typer.BadParameter for a file
    that is unreadable or empty."""
    lines: list[Line] = []
    as_json, text = path.suffix.lower() in _JSON_LINES, read_text(path, "--prompt-file")
    if as_json and text.lstrip().startswith("[") and text.rstrip().endswith("]"):
        raise typer.BadParameter(
            f"--prompt-file {path} is a JSON array; give its objects a line each, as `jq -c '.[]'` writes them"
        )
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        content: dict[str, Any] = {} if as_json else {"prompt": line.rstrip("\r")}
        error = None
        if as_json:
            try:
                content = _parse(line)
                _check(content)
                _read_images(content, path.parent)
            except ValueError as mistake:
                error = str(mistake)
        lines.append(Line(number, content, error))
    return lines


def rows_of(
    lines: Sequence[Line],
    options: Mapping[str, Any],
    chat: Mapping[str, Any],
    *,
    as_chat: bool,
    system: str | None,
) -> list[Row]:
    """The rows of a file's lines.

    `options`, `chat`: of rows without one. `as_chat`: texts are a user's messages; token ids never are. `system`: the
    system prompt of conversations.
    """
    rows: list[Row] = []
    for line in lines:
        content = dict(line.content)
        name = content.get("id", line.number)
        if line.error is not None:
            rows.append(Row(name, error=line.error))
            continue
        own = {name: value for name, value in content.items() if name not in _NO_OPTIONS}
        inputs: Any = content.get("prompt")
        is_chat = "messages" in content or (as_chat and line.is_text)
        if is_chat:
            own_images = [] if "messages" in content else content.pop("images", [])
            inputs = content.get("messages") or [
                {"role": "user", "content": with_images_before(inputs, own_images)}
            ]
            if system is not None and inputs[0].get("role") != "system":
                inputs = [{"role": "system", "content": system}, *inputs]
        merged = _merge({**options, **chat} if is_chat else options, own)
        if merged.get("seed") is None and options.get("seed") is not None:
            merged["seed"] = (options["seed"] + len(rows)) % NUM_SEEDS
        images = {"images": content["images"]} if "images" in content else {}
        rows.append(Row(name, inputs, merged | images))
    return rows


def _parse(line: str) -> dict[str, Any]:
    """The object of a line. Raises ValueError for anything else."""
    try:
        content = parse_json(line)
    except ValueError as error:
        raise ValueError(f"the line is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(
            'the line is not a JSON object; give {"prompt": "..."} or {"messages": [...]}'
        )
    return content


def _check(content: dict[str, Any]) -> None:
    """Raise ValueError for the first mistake in the object of a line."""
    from qsample.text.chat import ChatOptions

    given = [name for name in ("prompt", "messages") if name in content]
    if len(given) != 1:
        had = " and ".join(given) or "neither prompt nor messages"
        raise ValueError(f"the line has {had}; give either prompt or messages")
    value = content[given[0]]
    if given == ["prompt"] and not isinstance(value, str) and not _are_ids(value):
        raise ValueError(f"prompt is {shown(value, 60)}; give a text, or token ids")
    if given == ["messages"] and not (
        isinstance(value, list) and value and all(isinstance(message, dict) for message in value)
    ):
        raise ValueError(
            f'messages is {shown(value, 60)}; give [{{"role": "user", "content": "..."}}]'
        )
    known = {*_NO_OPTIONS, "do_sample", "stop_strings", "outputs"}
    known |= {item.name for item in (*fields(SamplingParams), *fields(ChatOptions))}
    if others := sorted(content.keys() - known):
        ours = names_here(
            f"--{others[0].replace('_', '-')}", {f"--{name.replace('_', '-')}" for name in known}
        )
        close = [name[2:].replace("-", "_") for name in ours if name.startswith("--")]
        close = close or difflib.get_close_matches(others[0], sorted(known), n=1)
        hint = f"did you mean {close[0]!r}? Otherwise " if close else ""
        raise ValueError(
            f"the line has {', '.join(others)}, which is not a parameter; {hint}put your own fields into metadata"
        )
    bias = content.get("logit_bias")
    if isinstance(bias, dict) and all(key.isdecimal() for key in bias):  # JSON's keys are texts
        content["logit_bias"] = {int(key): value for key, value in bias.items()}


def _read_images(content: dict[str, Any], folder: Path) -> None:
    """Put the images of a line in order: files below `folder` by their paths, others by their bytes. Raises ValueError
    for an image that cannot be read."""

    def found(image: Any) -> bytes | Path:
        if isinstance(image, bytes):
            return image
        path: Path = folder / image
        try:
            with open_plain(path):
                return path
        except (OSError, ValueError) as error:
            raise ValueError(
                f"the image {image} cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from None

    if "images" in content:
        images = content["images"]
        if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
            raise ValueError(f"images is {shown(images, 60)}; give a list of files")
        parts = [{"type": "image", "image": image} for image in images]
        (message,) = with_images([{"content": parts}], found)
        content["images"] = [part["image"] for part in message["content"]]
    if "messages" in content:
        content["messages"] = with_images(content["messages"], found)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _merge(options: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """`own` on top of `options`, without the options that it contradicts."""
    dropped: set[str] = set()
    if own.get("do_sample") is False or own.get("temperature") == 0:
        dropped |= SAMPLING_FIELDS.keys()
    elif any(own.get(name) is not None for name in SAMPLING_FIELDS):
        dropped.add("do_sample")
    dropped.add("seed")  # of row 0; each row has another
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
    form: Form | None = None,
    **settings: Any,
) -> None:
    """Generate the rows that `output` does not have yet; without that file, all on stdout.
    `retry_errors`: do the rows again whose line in `output` has an error. `form`: of all answers. `slots`, `settings`:
    of `Engine`. Raises QsampleError if rows have an error."""
    work = _Work(
        cache(load), len(rows), {"slots": slots, "max_waiting": _WAITING, **settings}, form
    )
    if output is None:
        work.do(rows, _print)
    else:
        with results_file(output, rows, retry_errors=retry_errors) as results:
            done, failed = results.done, results.failed
            if done:
                note(f"{done} of {len(rows)} rows are in {output} already")
            if done < len(rows):
                work.do(rows[done:], results.write, done)
            if retry_errors and failed:
                note(f"{counted(len(failed), 'row')} with an error: done again")
                lines = list[str]()
                try:
                    work.do([rows[number] for number in failed], lines.append)
                finally:  # also of an interruption
                    results.replace(dict(zip(failed, lines, strict=False)))
            else:
                work.errors += len(failed)
    work.tell()
    if work.errors:
        kind = (
            AlreadyPrintedError if output is None else QsampleError
        )  # stdout has only the lines of rows
        again = (
            ""
            if output is None
            else "; --retry-errors does these again, also from corrected prompts"
        )
        raise kind(f"{work.errors} of {len(rows)} rows have an error, see their lines{again}")


def _print(line: str) -> None:
    sys.stdout.write(line)
    sys.stdout.flush()


@dataclass(slots=True)
class _Work:
    """Rows through engines, with their counts so far. `total`: rows of the file. `settings`: of `Engine`. `full`: rows
    that ended because the context of `capacity` tokens was full."""

    load: Callable[[], CausalLM]
    total: int
    settings: Mapping[str, Any]
    form: Form | None = None
    rows: int = 0
    tokens: int = 0
    errors: int = 0
    full: int = 0
    seconds: float = 0.0
    capacity: int = 0

    def do(self, rows: list[Row], write: Callable[[str], None], done: int = 0) -> None:
        """Generate rows, and write their records in order; `done` rows of the file are there already."""
        from qsample.runtime import Engine

        with progress(hidden=write is _print and sys.stdout.isatty()) as report:
            report(Stage.LOADING, 0.0)
            model, started, before = self.load(), time.perf_counter(), self.seconds
            try:
                with Engine(model, **self.settings) as engine:
                    self.capacity = engine.capacity
                    valid = [row for row in rows if row.error is None]
                    each = (row.options for row in valid)
                    if self.form is not None:
                        from qsample.request.grammar import GrammarGuide, Grammars

                        compiled = Grammars(model).compiled(self.form)
                        each = (
                            {**row.options, "allowed_tokens": GrammarGuide(compiled)}
                            for row in valid
                        )
                    # Log-probabilities of each token are many times as long as the text: of rows that ask for them.
                    outputs = engine.map(
                        (row.inputs for row in valid), each=each, outputs=(), return_errors=True
                    )
                    for row in rows:
                        record = self._record(
                            row, ValueError(row.error) if row.error is not None else next(outputs)
                        )
                        write(json.dumps(record, ensure_ascii=False) + "\n")
                        done, self.rows = done + 1, self.rows + 1
                        self.seconds = before + time.perf_counter() - started
                        report(
                            f"{done} of {self.total} rows, {self._speed:.0f} tokens a second",
                            done / self.total,
                        )
            except KeyboardInterrupt:
                if write is not _print:
                    note(f"{done} of {self.total} rows are done; the same command continues")
                raise

    def tell(self) -> None:
        """Print the counts on stderr."""
        if self.rows:
            done = f"{counted(self.rows, 'row')}, {counted(self.tokens, 'token')}"
            note(f"{done} in {self.seconds:.2f} s, {self._speed:.0f} a second")
        if self.full:
            note(context_full(self.capacity, f"ended {self.full} of {self.total} rows"))

    @property
    def _speed(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    def _record(self, row: Row, output: RequestOutput | Exception) -> dict[str, Any]:
        record: dict[str, Any] = {"id": row.id}
        if isinstance(output, Exception):
            self.errors += 1
            known = isinstance(output, ValueError | QsampleError)
            return record | {
                "error": {"message": str(output) if known else f"{type(output).__name__}: {output}"}
            }
        self.tokens += len(output.token_ids)
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
        if (
            output.finish_reason == "length"
            and output.usage.prompt_tokens + len(output.token_ids) >= self.capacity
        ):
            record["context_full"] = True
            self.full += 1
        if output.finish_reason == "invalid":
            self.errors += 1
            record["error"] = {"message": "the model gave NaN or infinite logits"}
        return record | {name: finite(values.tolist()) for name, values in output.outputs.items()}


class Results:
    """The file of the results, locked; a torn last line is cut off. `done`: the number of whole lines, of the first
    rows. `failed`: the numbers of the lines with an error, from 0 on."""

    def __init__(self, path: Path, rows: list[Row], *, any_error: bool) -> None:
        """With `any_error`, a line with an error may be another prompt's. Raises typer.BadParameter, and changes
        nothing, if the file holds anything but lines of the first rows."""
        self._path, self._file = (
            path,
            FileIO(path, "a+"),
        )  # a buffer would be written again after a full disk
        self.done, self.failed = 0, list[int]()
        try:
            if (
                lock(self._file.fileno()) is False
            ):  # a second run of the command would continue with the same rows
                raise typer.BadParameter(f"another process writes to --output {path}; wait for it")
            self._check(rows, any_error=any_error)
        except BaseException:
            self._file.close()
            raise

    def _check(self, rows: list[Row], *, any_error: bool) -> None:
        size = 0
        with self._path.open("rb") as lines:
            for line in lines:
                if self.done == len(rows):
                    raise typer.BadParameter(
                        f"--output {self._path} has more lines than the prompts have rows; give another file"
                    )
                beginning = _beginning(rows[self.done])
                if not line.endswith(b"\n") and (
                    line.startswith(beginning) or beginning.startswith(line)
                ):
                    break
                has_error = _has_error(line)
                if has_error is None:
                    raise typer.BadParameter(
                        f"line {self.done + 1} of --output {self._path} is not a whole line of a result; give another "
                        "file, or delete it and all lines after it"
                    )
                if not line.startswith(beginning) and not (has_error and any_error):
                    raise typer.BadParameter(
                        f"line {self.done + 1} of --output {self._path} does not have the id of row {self.done + 1}; "
                        "give another file, or the prompts that it was written from"
                    )
                if has_error:
                    self.failed.append(self.done)
                self.done, size = self.done + 1, size + len(line)
        self._file.truncate(size)

    def write(self, line: str) -> None:
        """Append a line. Raises QsampleError, with whole lines in the file, if the disk does not take it."""
        size = os.fstat(self._file.fileno()).st_size
        try:
            _write(self._file, line.encode("utf-8", "replace"))
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(size)
            raise QsampleError(
                f"cannot write to --output {self._path}: {error.strerror}; the rows before are in it. Free some space, "
                "and the same command continues"
            ) from error

    def replace(self, lines: Mapping[int, str]) -> None:
        """Put other lines in the place of some, by number: all or, if the disk is full, none."""
        try:
            with file_aside(self._path) as aside:
                with self._path.open("rb") as old, aside.open("wb") as new:
                    for number, line in enumerate(old):
                        new.write(
                            lines[number].encode("utf-8", "replace") if number in lines else line
                        )
                shutil.copymode(self._path, aside)
        except OSError as error:
            raise QsampleError(
                f"cannot write to the folder of --output {self._path}: {error.strerror}; the file is as it was. Free "
                "some space, and the same command starts again"
            ) from error

    def close(self) -> None:
        self._file.close()


@contextmanager
def results_file(path: Path, rows: list[Row], *, retry_errors: bool = False) -> Iterator[Results]:
    """`Results`, and no file if no row was finished. Raises typer.BadParameter as `Results` does."""
    path = Path(os.path.realpath(path))
    created = not path.exists()
    try:
        results = Results(path, rows, any_error=retry_errors)
    except OSError as error:
        raise typer.BadParameter(
            f"cannot write --output {path}: {error.strerror}; give another file"
        ) from None
    try:
        yield results
    finally:
        if created and path.stat().st_size == 0:
            path.unlink(missing_ok=True)
        results.close()


def _beginning(row: Row) -> bytes:
    """How the line of a row begins."""
    return f'{{"id": {json.dumps(row.id, ensure_ascii=False)}, '.encode("utf-8", "replace")


def _has_error(line: bytes) -> bool | None:
    """Whether a line is the record of a row with an error; None if it is not a whole record."""
    try:
        record = parse_json(line.decode("utf-8"), infinities=True)
    except ValueError:
        return None
    return "error" in record if isinstance(record, dict) and "id" in record else None


def _write(file: FileIO, content: bytes) -> None:
    while content:
        content = content[file.write(content) :]
