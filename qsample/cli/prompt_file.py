"""`--prompt-file` of `qsample generate`: each line of a file is a row, and each row a line of JSON.

The results are in the order of the rows. Each line begins with the id of its row. An interrupted
run continues after the last whole line of its file, if the lines have the ids of the first rows. A
line with an error may be done again, from a corrected prompt.
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
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from qsample.cli.common import ChatMode, context_full, read_text, system_message
from qsample.cli.spellings import names_here
from qsample.cli.terminal import AlreadyPrintedError, counted, finite, note, progress
from qsample.errors import QsampleError, shown
from qsample.images.messages import with_images
from qsample.package.disk.locks import lock
from qsample.package.disk.replace import file_aside
from qsample.package.disk.untrusted import open_plain, parse_json
from qsample.progress import Stage
from qsample.request.sampling_params import NUM_SEEDS, SAMPLING_FIELDS, SamplingParams, layered

if TYPE_CHECKING:
    from qsample.request.grammar import Form
    from qsample.runtime import CausalLM, Engine, RequestOutput

_JSON_LINES_SUFFIXES: Final = (".jsonl", ".ndjson", ".json")
# The fields of a line that are not parameters of the row.
_OTHER_FIELDS: Final = ("id", "metadata", "prompt", "messages", "images")
# An engine takes this number of prompts in advance, so no slot waits for its next row.
_MAX_WAITING_ROWS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFileOptions:
    """The file of the prompts, and the file of the answers."""

    prompt_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A prompt a line; or JSON lines (.jsonl) of prompt or messages, id, parameters.",
        ),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON lines for --prompt-file; rows in it are not done again. (default: stdout)",
        ),
    ] = None
    retry_errors: Annotated[
        bool,
        typer.Option(
            "--retry-errors", help="Do the rows again whose line in --output has an error."
        ),
    ] = False
    slots: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Rows at once, for --prompt-file. (default: the number it was compiled for, else 8)",
        ),
    ] = None

    def check(self) -> None:
        """Raise typer.BadParameter for options whose file was not given."""
        for flag, value in (("--output", self.output), ("--slots", self.slots)):
            if value is not None and self.prompt_file is None:
                raise typer.BadParameter(f"{flag} goes with --prompt-file")
        if self.retry_errors and self.output is None:
            raise typer.BadParameter("--retry-errors goes with --output")

    def lines(self) -> list[Line]:
        """The lines of the prompt file; none without a file.

        Raises:
            typer.BadParameter: the prompts cannot be read, or the output cannot be written.
        """
        if self.prompt_file is None:
            return []
        lines = read_lines(self.prompt_file)
        if self.output is not None:
            _check_output(self.output, self.prompt_file)
        return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How the tokens of a package are computed."""

    ctx_len: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Tokens that a row holds, for a portable package or a checkpoint. (default: as many as a portable "
            "package needs, otherwise the model's, at most 4096)",
        ),
    ] = None
    flush_every: Annotated[
        int | None,
        typer.Option(
            min=1, help="Steps between two reads of the tokens. (default: 1 on the CPU, else 4)"
        ),
    ] = None
    double_buffering: Annotated[
        bool,
        typer.Option(
            "--double-buffering/--no-double-buffering",
            help="Read a token while the next is computed.",
        ),
    ] = True


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the prompt file.

    Attributes:
        number: the number of the line, from 1 on.
        content: the object of the line: prompt or messages, id, and parameters; empty if it is not
            an object.
        error: the mistake in the line, if any.
    """

    number: int
    content: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def is_text(self) -> bool:
        """Whether the prompt is a text, not token ids or messages."""
        return isinstance(self.content.get("prompt"), str)


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt of the file, ready for an engine.

    Attributes:
        id: the id of the line, any JSON value; by default the number of the line.
        inputs: the text, token ids or messages.
        options: the arguments of `Engine.add_request`.
        error: the mistake in the line, if any. The row is then not generated.
    """

    id: Any
    inputs: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def is_chat(self) -> bool:
        """Whether the inputs are messages."""
        return isinstance(self.inputs, list) and not _are_ids(self.inputs)


def read_lines(path: Path) -> list[Line]:
    """The lines of a file that are not empty: a prompt each, or a JSON object.

    Raises:
        typer.BadParameter: the file is unreadable or empty.
    """
    text = read_text(path, "--prompt-file")
    as_json = path.suffix.lower() in _JSON_LINES_SUFFIXES
    if as_json and text.lstrip().startswith("[") and text.rstrip().endswith("]"):
        raise typer.BadParameter(
            f"--prompt-file {path} is a JSON array; give its objects a line each, as `jq -c '.[]'` writes them"
        )
    lines: list[Line] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        if as_json:
            lines.append(_json_line(number, line, path.parent))
        else:
            lines.append(Line(number, {"prompt": line}))
    return lines


def _json_line(number: int, text: str, folder: Path) -> Line:
    """A line of a JSON file. folder: the folder of the file, from which images are named."""
    content: dict[str, Any] = {}
    try:
        content = _parse(text)
        _check_fields(content)
        _use_token_ids(content)
        _read_images(content, folder)
    except ValueError as error:
        return Line(number, content, str(error))
    return Line(number, content)


def rows_of(lines: Sequence[Line], options: Mapping[str, Any], chat: ChatMode) -> list[Row]:
    """The rows of a file's lines.

    Args:
        options: the sampling options and the adapter of the command line. The parameters of a line
            replace them.
        chat: whether texts are messages of a user. It has the system prompt and the template's
            arguments for all conversations.
    """
    return [_row(index, line, options, chat) for index, line in enumerate(lines)]


def _row(index: int, line: Line, options: Mapping[str, Any], chat: ChatMode) -> Row:
    """The row of a line. index: the number of the row, from 0 on."""
    content = line.content
    row_id = content.get("id", line.number)
    if line.error is not None:
        return Row(row_id, error=line.error)
    own_options = {name: value for name, value in content.items() if name not in _OTHER_FIELDS}
    common_options = dict(options)
    inputs = content.get("prompt")
    images = content.get("images")
    if "messages" in content:
        inputs = _with_system_prompt(content["messages"], chat)
        common_options |= chat.arguments
    elif chat.enabled and line.is_text:
        inputs = chat.messages(content["prompt"], images or [])
        images = None  # The message contains them.
        common_options |= chat.arguments
    merged = _merge(common_options, own_options)
    if merged.get("seed") is None and options.get("seed") is not None:
        merged["seed"] = (options["seed"] + index) % NUM_SEEDS
    if images is not None:
        merged["images"] = images
    return Row(row_id, inputs, merged)


def _with_system_prompt(messages: list[dict[str, Any]], chat: ChatMode) -> list[dict[str, Any]]:
    """A conversation, with the system prompt of the command line if it has none."""
    if messages[0].get("role") == "system":
        return messages
    return [*system_message(chat.system), *messages]


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


def _check_fields(content: dict[str, Any]) -> None:
    """Raise ValueError for the first mistake in the object of a line."""
    given = [name for name in ("prompt", "messages") if name in content]
    if len(given) != 1:
        had = " and ".join(given) or "neither prompt nor messages"
        raise ValueError(f"the line has {had}; give either prompt or messages")
    if "prompt" in content:
        prompt = content["prompt"]
        if not isinstance(prompt, str) and not _are_ids(prompt):
            raise ValueError(f"prompt is {shown(prompt, 60)}; give a text, or token ids")
    else:
        messages = content["messages"]
        if not _are_messages(messages):
            raise ValueError(
                f'messages is {shown(messages, 60)}; give [{{"role": "user", "content": "..."}}]'
            )
    _check_names(content)


def _check_names(content: dict[str, Any]) -> None:
    """Raise ValueError for fields of a line that are not parameters, with the name that they have
    here."""
    from qsample.request.text.chat import ChatOptions

    known = {*_OTHER_FIELDS, "do_sample", "stop_strings", "outputs"}
    known |= {entry.name for entry in fields(SamplingParams)}
    known |= {entry.name for entry in fields(ChatOptions)}
    unknown_names = sorted(content.keys() - known)
    if not unknown_names:
        return
    flags = {_flag(name) for name in known}
    close = [
        name[2:].replace("-", "_")
        for name in names_here(_flag(unknown_names[0]), flags)
        if name.startswith("--")
    ]
    if not close:
        close = difflib.get_close_matches(unknown_names[0], sorted(known), n=1)
    hint = f"did you mean {close[0]!r}? Otherwise " if close else ""
    raise ValueError(
        f"the line has {', '.join(unknown_names)}, which is not a parameter; {hint}put your own fields into metadata"
    )


def _flag(name: str) -> str:
    """The flag of a parameter."""
    return f"--{name.replace('_', '-')}"


def _use_token_ids(content: dict[str, Any]) -> None:
    """Make integers of the token ids of a logit_bias: the keys of JSON objects are texts."""
    bias = content.get("logit_bias")
    if isinstance(bias, dict) and all(key.isdecimal() for key in bias):
        content["logit_bias"] = {int(key): value for key, value in bias.items()}


def _read_images(content: dict[str, Any], folder: Path) -> None:
    """Replace the images of a line: files by their paths, and data URLs by their bytes.

    Args:
        folder: the folder from which the files are named.

    Raises:
        ValueError: an image cannot be read.
    """

    def resolve(image: str | bytes) -> bytes | Path:
        if isinstance(image, bytes):
            return image
        path = folder / image
        try:
            with open_plain(path):
                return path
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"the image {image} cannot be read: {reason}") from None

    if "images" in content:
        images = content["images"]
        if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
            raise ValueError(f"images is {shown(images, 60)}; give a list of files")
        parts = [{"type": "image", "image": image} for image in images]
        (message,) = with_images([{"content": parts}], resolve)
        content["images"] = [part["image"] for part in message["content"]]
    if "messages" in content:
        content["messages"] = with_images(content["messages"], resolve)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _are_messages(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(message, dict) for message in value)


def _merge(options: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the command line, replaced by the parameters of a line.

    Options that the parameters contradict are dropped.
    """
    # The seed of the command line is only the first row's.
    dropped = {"seed"}
    if parameters.get("do_sample") is False or parameters.get("temperature") == 0:
        dropped |= SAMPLING_FIELDS.keys()
    elif any(parameters.get(name) is not None for name in SAMPLING_FIELDS):
        dropped.add("do_sample")
    remaining = {name: value for name, value in options.items() if name not in dropped}
    return layered(remaining, parameters)


def _check_output(output: Path, source: Path) -> None:
    """Raise typer.BadParameter for a file that evidently cannot take the results.

    Args:
        output: the file of the results.
        source: the prompt file.
    """
    if output.exists() and output.samefile(source):
        raise typer.BadParameter("--output and --prompt-file are the same file; give another")
    if not output.parent.is_dir():
        raise typer.BadParameter(
            f"cannot write --output {output}: the folder {output.parent} does not exist; give another file"
        )
    # Only the lines of a plain file can be read again.
    if output.exists() and not output.is_file():
        raise typer.BadParameter(
            f"cannot write --output {output}: it is not a plain file; give another, or leave it out for standard output"
        )


def generate_file(
    load: Callable[[], CausalLM],
    rows: list[Row],
    file: PromptFileOptions,
    running: RunOptions,
    form: Form | None,
) -> None:
    """Generate the rows that the file of results lacks; without such a file, all rows on stdout.

    Args:
        load: loads the model. It is not called if no row is left.
        rows: all rows of the prompt file.
        file: the file of the results, the slots of the engine, and whether rows with an error are
            done again.
        running: the options of computing tokens.
        form: the form of all answers.

    Raises:
        QsampleError: rows have an error, after all rows were done.
    """
    generation = _Generation(cache(load), len(rows), file, running, form)
    if file.output is None:
        generation.generate(rows, _print)
    else:
        with results_file(file.output, rows, retry_errors=file.retry_errors) as results:
            _complete(results, rows, generation)
    generation.report()
    if generation.errors == 0:
        return
    message = f"{generation.errors} of {len(rows)} rows have an error, see their lines"
    if file.output is None:
        # Standard output has only the lines of rows, so no document about the error follows them.
        raise AlreadyPrintedError(message)
    raise QsampleError(f"{message}; --retry-errors does these again, also from corrected prompts")


def _complete(results: Results, rows: list[Row], generation: _Generation) -> None:
    """Generate the rows that a file of results lacks, and, if asked to, its rows with an error."""
    file = generation.file
    done = results.done
    failed = list(results.failed)
    if done != 0:
        note(f"{done} of {len(rows)} rows are in {file.output} already")
    if done < len(rows):
        generation.generate(rows[done:], results.write, done)
    if not file.retry_errors or not failed:
        generation.errors += len(failed)
        return
    note(f"{counted(len(failed), 'row')} with an error: done again")
    lines: list[str] = []
    try:
        generation.generate([rows[number] for number in failed], lines.append)
    finally:
        # After an interruption, the rows that are done replace their lines, too.
        results.replace(dict(zip(failed, lines, strict=False)))


def _print(line: str) -> None:
    sys.stdout.write(line)
    sys.stdout.flush()


@dataclass(slots=True)
class _Generation:
    """Generates rows, and counts them.

    Attributes:
        load: loads the model at the first call, and returns it at each.
        total: the number of rows of the prompt file.
        file: the file of the results and the slots of the engine.
        running: the options of computing tokens.
        form: the form of all answers.
        rows: the number of rows that were generated, or refused.
        tokens: the number of their tokens.
        errors: the number of rows with an error.
        full: the number of rows that ended because the context was full.
        seconds: the time that the rows took.
        capacity: the tokens that the context of a row holds.
    """

    load: Callable[[], CausalLM]
    total: int
    file: PromptFileOptions
    running: RunOptions
    form: Form | None = None
    rows: int = 0
    tokens: int = 0
    errors: int = 0
    full: int = 0
    seconds: float = 0.0
    capacity: int = 0

    def generate(self, rows: list[Row], write: Callable[[str], None], done: int = 0) -> None:
        """Generate rows, and write their records in order.

        Args:
            write: writes a line of the results.
            done: the number of rows that are done before these.
        """
        to_stdout = self.file.output is None
        with progress(hidden=to_stdout and sys.stdout.isatty()) as show:
            show(Stage.LOADING, 0.0)
            model = self.load()
            start = time.perf_counter()
            seconds_before = self.seconds
            try:
                with self._start_engine(model) as engine:
                    self.capacity = engine.capacity
                    for row, output in self._outputs(model, engine, rows):
                        record = self._record(row, output)
                        write(json.dumps(record, ensure_ascii=False) + "\n")
                        done += 1
                        self.rows += 1
                        self.seconds = seconds_before + time.perf_counter() - start
                        stage = f"{done} of {self.total} rows, {self._speed:.0f} tokens a second"
                        show(stage, done / self.total)
            except KeyboardInterrupt:
                if not to_stdout:
                    note(f"{done} of {self.total} rows are done; the same command continues")
                raise

    def report(self) -> None:
        """Print the counts on stderr."""
        if self.rows > 0:
            done = f"{counted(self.rows, 'row')}, {counted(self.tokens, 'token')}"
            note(f"{done} in {self.seconds:.2f} s, {self._speed:.0f} a second")
        if self.full != 0:
            note(context_full(self.capacity, f"ended {self.full} of {self.total} rows"))

    def _start_engine(self, model: CausalLM) -> Engine:
        from qsample.runtime import Engine

        return Engine(
            model,
            slots=self.file.slots,
            max_waiting=_MAX_WAITING_ROWS,
            flush_every=self.running.flush_every,
            double_buffering=self.running.double_buffering,
        )

    def _outputs(
        self, model: CausalLM, engine: Engine, rows: list[Row]
    ) -> Iterator[tuple[Row, RequestOutput | Exception]]:
        """Each row with its output, or with the error in its place."""
        valid = [row for row in rows if row.error is None]
        # The log-probabilities of a text are many times as long as the text, so a row has them only
        # if it asks for them.
        outputs = engine.map(
            (row.inputs for row in valid),
            each=self._options(model, valid),
            outputs=(),
            return_errors=True,
        )
        for row in rows:
            if row.error is None:
                yield row, next(outputs)
            else:
                yield row, ValueError(row.error)

    def _options(self, model: CausalLM, rows: list[Row]) -> Iterator[Mapping[str, Any]]:
        """The arguments of each row's request, with the form of its answer."""
        if self.form is None:
            return (row.options for row in rows)
        from qsample.request.structured.grammars import Wish

        prepared = model.grammars.prepared(Wish(self.form))
        return ({**row.options, "grammar": prepared.grammar} for row in rows)

    @property
    def _speed(self) -> float:
        """Tokens a second."""
        return self.tokens / max(self.seconds, 1e-9)

    def _record(self, row: Row, output: RequestOutput | Exception) -> dict[str, Any]:
        """Count a row, and return the object for its line."""
        if isinstance(output, Exception):
            self.errors += 1
            is_expected = isinstance(output, ValueError | QsampleError)
            message = str(output) if is_expected else f"{type(output).__name__}: {output}"
            return {"id": row.id, "error": {"message": message}}
        self.tokens += len(output.token_ids)
        record: dict[str, Any] = {
            "id": row.id,
            "text": output.text,
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
            "seed": output.seed,
            "prompt_tokens": output.usage.prompt_tokens,
            "completion_tokens": output.usage.completion_tokens,
        }
        if output.stop_string is not None:
            record["stop_string"] = output.stop_string
        length = output.usage.prompt_tokens + len(output.token_ids)
        if output.finish_reason == "length" and length >= self.capacity:
            record["context_full"] = True
            self.full += 1
        if output.finish_reason == "invalid":
            self.errors += 1
            record["error"] = {"message": "the model gave NaN or infinite logits"}
        for name, values in output.outputs.items():
            record[name] = finite(values.tolist())
        return record


class Results:
    """The file of the results, locked. A torn last line is cut off.

    Attributes:
        done: the number of whole lines. They belong to the first rows.
        failed: the numbers of the lines with an error, from 0 on.
    """

    def __init__(self, path: Path, rows: list[Row], *, any_error: bool) -> None:
        """Open and check the file.

        Args:
            rows: all rows of the prompt file.
            any_error: whether a line with an error may have another id than its row.

        Raises:
            typer.BadParameter: another process writes to the file, or the file has lines that do
                not belong to the first rows. It is then unchanged.
        """
        self._path = path
        # The file has no buffer: after a full disk, a buffer would be written again.
        self._file = FileIO(path, "a+")
        self.done = 0
        self.failed: list[int] = []
        try:
            # Two runs of the command would continue with the same rows.
            if lock(self._file.fileno()) is False:
                raise typer.BadParameter(f"another process writes to --output {path}; wait for it")
            size = self._read(rows, any_error)
            self._file.truncate(size)
        except BaseException:
            self._file.close()
            raise

    def _read(self, rows: list[Row], any_error: bool) -> int:
        """Count the whole lines, and return the number of their bytes."""
        size = 0
        with self._path.open("rb") as lines:
            for line in lines:
                if self.done == len(rows):
                    raise typer.BadParameter(
                        f"--output {self._path} has more lines than the prompts have rows; give another file"
                    )
                beginning = _beginning(rows[self.done])
                if _is_torn(line, beginning):
                    break
                has_error = self._check_line(line, beginning, any_error)
                if has_error:
                    self.failed.append(self.done)
                self.done += 1
                size += len(line)
        return size

    def _check_line(self, line: bytes, beginning: bytes, any_error: bool) -> bool:
        """Whether the next line has an error. Raises typer.BadParameter for a line of another row.

        Args:
            beginning: how the line of the next row begins.
            any_error: whether a line with an error may have another id than its row.
        """
        has_error = _has_error(line)
        if has_error is None:
            raise typer.BadParameter(
                f"line {self.done + 1} of --output {self._path} is not a whole line of a result; give another file, or "
                "delete it and all lines after it"
            )
        is_replaced = has_error and any_error
        if not line.startswith(beginning) and not is_replaced:
            raise typer.BadParameter(
                f"line {self.done + 1} of --output {self._path} does not have the id of row {self.done + 1}; give "
                "another file, or the prompts that it was written from"
            )
        return has_error

    def write(self, line: str) -> None:
        """Append a line.

        Raises:
            QsampleError: the disk is full, for example. The file then has whole lines only.
        """
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
        """Replace lines.

        Args:
            lines: the new lines, by their numbers from 0 on.

        Raises:
            QsampleError: the disk is full, for example. The file is then unchanged.
        """
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
    """The file of the results. A new file is removed if no row was finished.

    Args:
        rows: all rows of the prompt file.
        retry_errors: whether a line with an error may have another id than its row.

    Raises:
        typer.BadParameter: the file cannot be written, or `Results` refuses it.
    """
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


def _is_torn(line: bytes, beginning: bytes) -> bool:
    """Whether the end of a line was not written.

    Args:
        beginning: how the line begins.
    """
    if line.endswith(b"\n"):
        return False
    return line.startswith(beginning) or beginning.startswith(line)


def _has_error(line: bytes) -> bool | None:
    """Whether a line says that its row has an error; None if it is not a whole line of a result."""
    try:
        record = parse_json(line.decode("utf-8"), infinities=True)
    except ValueError:
        return None
    if not isinstance(record, dict) or "id" not in record:
        return None
    return "error" in record


def _write(file: FileIO, content: bytes) -> None:
    """Write all of the content, of which a call of `write` may take a part only."""
    while content:
        content = content[file.write(content) :]
