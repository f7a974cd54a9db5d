"""`qsample chat`: a conversation on a terminal or through a pipe."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from qsample.cli.common import (
    CHAT_FLAGS,
    LOAD_FLAGS,
    SAMPLING_FLAGS,
    CtxLen,
    chat_options,
    check_jinja,
    chosen_adapter,
    load_given,
    open_given,
    read_loras,
    sampling_options,
    with_flags,
)
from qsample.cli.terminal import counted, note, progress
from qsample.errors import QsampleError
from qsample.progress import Stage
from qsample.request.sampling_params import SAMPLING_FIELDS, SamplingParams

if TYPE_CHECKING:
    from qsample.runtime import CausalLM, Engine, RequestOutput

EXAMPLES: Final = (
    "[bold]Examples[/bold]\n\n"
    "qsample chat qwen3-cpu\n\n"
    "qsample chat qwen3-cpu --system 'Answer in one sentence.' --no-thinking --temperature 0.7\n\n"
    "printf 'Who was Moses?\\nAnd his brother?\\n' | qsample chat qwen3-cpu --greedy"
)
_HELP: Final = '''\
/system TEXT      set the system prompt; without TEXT show it, with - drop it
/set NAME VALUE   change a parameter, such as /set temperature 0.7; without NAME show them
/reset            forget the conversation, not the system prompt
/retry            answer the last message again
/save FILE        write the conversation as JSON, {"messages": [...]}
/load FILE        continue a saved conversation
/stats            tokens and speed so far
/help             this
/exit             end, as ctrl-D does
A line that ends with \\ goes on in the next; """ begins and ends a text of several lines.
ctrl-C stops an answer and keeps its text.'''
_COMMAND: Final = re.compile(r"/([a-z?]+)(?:\s+(.*))?$", re.DOTALL)
_QUOTES: Final = '"""'
_PROMPT, _MORE = ">>> ", "... "


@with_flags({**CHAT_FLAGS, **LOAD_FLAGS, **SAMPLING_FLAGS})
def chat(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="PACKAGE_OR_MODEL", help="Package, checkpoint or hub id.")],
    ctx_len: CtxLen = None,
) -> None:
    """Talk to a model. Answers stream to stdout, remarks go to stderr. From a pipe, each line is a turn."""
    from qsample.runtime import Engine

    given, system = ctx.params, ctx.params["system"]
    options = chosen_adapter(sampling_options(given), read_loras(given["lora"]))
    template = chat_options(given)
    check_jinja()
    opened = open_given(model, given)  # stays in the cache as long as this
    with progress() as report:
        report(Stage.LOADING, 0.0)
        loaded = load_given(opened, given)
        remarks = _check_template(loaded, system, template)
    for remark in remarks:
        note(remark)
    # A single slot keeps the tokens that it read and wrote: a turn costs its own tokens.
    with Engine(loaded, slots=1, reuse_sampled_tokens=True) as engine:
        talk = Conversation(loaded, engine, options, template)
        talk.set_system(system)
        failed = Screen(talk).run()
    if failed:
        raise QsampleError(f"lines of standard input that could not be answered: {failed}")


def _check_template(model: CausalLM, system: str | None, template: dict[str, Any]) -> list[str]:
    """Refuse a package that cannot chat before the first question, and return remarks about options that its template
    ignores."""
    if model.tokenizer is None:
        raise QsampleError("the package has no tokenizer, so it cannot chat; export the model with its tokenizer")
    tokenizer, remarks = model.tokenizer, []
    messages = [{"role": "user", "content": "hello"}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    arguments = template.get("chat_template_kwargs", {})

    def render(**changes: Any) -> Any:
        return tokenizer.apply_chat_template(
            messages,
            chat_template=template.get("chat_template"),
            add_generation_prompt=True,
            tokenize=False,
            **{**arguments, **changes},
        )

    if system is not None and system.strip() not in render():
        remarks.append("the chat template leaves the system prompt out")
    if "enable_thinking" in arguments and render(enable_thinking=True) == render(enable_thinking=False):
        remarks.append("the chat template has no switch for thinking: --thinking and --no-thinking change nothing")
    render()
    return remarks


class TurnError(Exception):
    """A turn that failed; the conversation is unchanged."""


@dataclass
class Conversation:
    """Messages, the system prompt first, and an engine that answers them.

    options, template: of `Engine.add_request`. turns, tokens, seconds: of all answers. context: tokens after the last
    answer. forgotten: the oldest messages after the system prompt that no longer fit into the context, and that the
    model does not see.
    """

    model: CausalLM
    engine: Engine
    options: dict[str, Any]
    template: dict[str, Any]
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: int = 0
    tokens: int = 0
    seconds: float = 0.0
    context: int = 0
    forgotten: int = 0

    @property
    def seen(self) -> list[dict[str, Any]]:
        """The messages that the model sees."""
        head = 0 if self.system is None else 1
        return self.messages[:head] + self.messages[head + self.forgotten :]

    @property
    def system(self) -> str | None:
        first = self.messages[0] if self.messages else {}
        return first["content"] if first.get("role") == "system" else None

    def set_system(self, text: str | None) -> None:
        rest = self.messages[self.system is not None :]
        self.messages = ([] if text is None else [{"role": "system", "content": text}]) + rest

    def start_with(self, messages: list[dict[str, Any]]) -> None:
        self.messages, self.forgotten = messages, 0

    def reset(self) -> None:
        self.start_with(self.messages[: self.system is not None])

    def ask(self, text: str, show: Callable[[str], None]) -> RequestOutput:
        """Add the user's text, and answer it. Raises TurnError."""
        forgotten = self.forgotten
        self.messages.append({"role": "user", "content": text})
        try:
            return self.answer(show)
        except BaseException:
            self.messages.pop()
            self.forgotten = forgotten
            raise

    def answer(self, show: Callable[[str], None]) -> RequestOutput:
        """Answer the last message, in pieces to `show`; KeyboardInterrupt ends the answer, and its text is kept."""
        from qsample.runtime import EngineClosedError

        options = dict(self.options)
        if not {"max_new_tokens", "max_length"} & options.keys() and not self._model_says_how_long():
            options["max_length"] = self.engine.capacity
        self._forget(options.get("max_new_tokens"))
        try:
            request = self.engine.add_request(self.seen, **options, **self.template)
        except EngineClosedError:
            raise
        except (ValueError, QsampleError) as error:
            raise TurnError(self._too_long() or str(error)) from error
        try:
            for delta in request:
                show(delta.text or "")
        except KeyboardInterrupt:
            request.cancel()
        except BaseException:
            request.cancel()
            raise
        output = request.result()
        self.messages.append({"role": "assistant", "content": output.text or ""})
        self.turns += 1
        self.tokens += len(output.token_ids)
        self.seconds += output.timing.total_seconds
        self.context = output.usage.prompt_tokens + len(output.token_ids)
        return output

    def _forget(self, new_tokens: int | None) -> None:
        """Leave the oldest turns out, as many as the context has no room for next to an answer of `new_tokens`, or of a
        quarter of it. The last question stays."""
        capacity = self.engine.capacity
        room = min(new_tokens or capacity, capacity // 4)
        count = self._count()
        while count is not None and count + room > capacity:
            seen = self.seen[self.system is not None :]
            later = [place for place, message in enumerate(seen) if place and message["role"] == "user"]
            if not later:
                return
            self.forgotten += later[0]
            count = self._count()

    def _count(self) -> int | None:
        """The tokens of the messages that the model sees; None if its template does not take them."""
        from qsample.text.chat import ChatOptions

        assert self.model.tokenizer is not None
        try:
            return len(self.model.tokenizer.encode_chat(self.seen, ChatOptions(**self.template)))
        except ValueError:
            return None

    def _too_long(self) -> str | None:
        """The message for a question that does not fit; None if it does."""
        count = self._count()
        if count is None or count < self.engine.capacity:
            return None
        return (
            f"the message has {count} tokens with its template and the context {self.engine.capacity}, so this was not "
            "added: say less; --ctx-len of compile gives more"
        )

    def _model_says_how_long(self) -> bool:
        config = self.model.generation_config
        return any(config.get(name) is not None for name in ("max_new_tokens", "max_length"))

    def retry(self, show: Callable[[str], None]) -> RequestOutput:
        """Answer the last question again. Raises TurnError if the conversation has no question."""
        before = list(self.messages)
        while self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages or self.messages[-1]["role"] == "system":
            self.messages = before
            raise TurnError("the conversation has no question to answer again")
        try:
            return self.answer(show)
        except BaseException:
            self.messages = before
            raise

    def set_parameter(self, name: str, text: str) -> None:
        """Set an option of the next answers. Raises TurnError for an unknown name or a wrong value."""
        from qsample.text.generated_text import check_stop_strings

        value: Any
        try:
            value = json.loads(text)
        except ValueError:
            if name not in ("stop_strings", "adapter"):
                raise TurnError(f"{name} is {text}; give a number, true, false or null") from None
            value = text
        if name in ("stop_strings", "adapter") and not isinstance(value, str | list | None):
            value = text  # a number that stands in the text
        changed = {key: kept for key, kept in {**self.options, name: value}.items() if kept is not None}
        if name in SAMPLING_FIELDS and value is not None:
            changed.pop("do_sample", None)
        try:
            check_stop_strings(changed.get("stop_strings"))
            checked = {key: kept for key, kept in changed.items() if key != "stop_strings"}
            SamplingParams.from_generation_config(None, **checked)
        except (ValueError, TypeError) as error:
            raise TurnError(str(error)) from None
        self.options = changed


class Screen:
    """Reads the user's lines, and shows the answers."""

    def __init__(self, talk: Conversation) -> None:
        self._talk = talk
        self._typed = sys.stdin.isatty()
        self._failed = 0
        self._file: Path | None = None  # was written or read, and may be written again
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda text: note(_HELP),
            "?": lambda text: note(_HELP),
            "reset": self._reset,
            "clear": self._reset,
            "system": self._system,
            "set": self._set,
            "save": self._save,
            "load": self._load,
            "retry": lambda text: self._answer(self._talk.retry),
            "stats": self._stats,
        }

    def run(self) -> int:
        """Run until the input ends. Returns how many lines of a pipe failed; 0 at a terminal, whose user saw it."""
        if self._typed:
            note("/help lists the commands; ctrl-D ends")
        for text in self._texts():
            match = _COMMAND.match(text)
            if match and match[1] in ("exit", "quit", "bye"):
                break
            try:
                if match and match[1] not in self._commands:
                    raise TurnError(f"/{match[1]} is not a command; /help lists them")
                if match:
                    self._commands[match[1]]((match[2] or "").strip())
                else:
                    self._answer(lambda show, said=text: self._talk.ask(said, show))  # type: ignore[misc]
            except TurnError as error:
                self._failed += 1
                note(str(error))
            except KeyboardInterrupt:  # before an answer began
                if not self._typed:
                    raise
                print()
                note("stopped")
        return 0 if self._typed else self._failed

    def _texts(self) -> Iterator[str]:
        """The user's texts: a line each, or several lines in quotes or with a backslash at their ends."""
        lines: list[str] = []
        quoted = False
        while True:
            try:
                line = self._line(_MORE if lines or quoted else _PROMPT)
            except EOFError:
                if lines:
                    yield "\n".join(lines)
                if self._typed:
                    print()
                return
            except KeyboardInterrupt:
                if not self._typed:
                    raise
                print()
                lines, quoted = [], False
                note("ctrl-D or /exit ends the chat")
                continue
            if not lines and not quoted and line.lstrip().startswith(_QUOTES):
                quoted, line = True, line.lstrip().removeprefix(_QUOTES)
            if quoted and not line.rstrip().endswith(_QUOTES):
                lines.append(line)
                continue
            if quoted:
                line = line.rstrip().removesuffix(_QUOTES)
            elif line.endswith("\\"):
                lines.append(line[:-1])
                continue
            text = "\n".join([*lines, line]).strip()
            lines, quoted = [], False
            if text:
                yield text

    def _line(self, prompt: str) -> str:
        if not self._typed:
            line = sys.stdin.readline()
            if not line:
                raise EOFError
            return line.rstrip("\r\n")
        if sys.stdout.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401  # input() edits lines and has a history then
            return input(prompt)
        print(prompt, end="", file=sys.stderr, flush=True)
        return input()

    def _answer(self, ask: Callable[[Callable[[str], None]], RequestOutput]) -> None:
        ended = "\n"

        def show(text: str) -> None:
            nonlocal ended
            ended = text[-1:] or ended
            print(text, end="", flush=True)

        forgotten = self._talk.forgotten
        output = ask(show)
        if ended != "\n" or not output.text:
            print(flush=True)
        note(self._figures(output))
        if self._talk.forgotten > forgotten:
            left_out = counted(self._talk.forgotten, "message")
            note(f"the context is full: the model no longer sees the oldest {left_out}; /save keeps them all")
        if output.finish_reason == "cancelled" and not self._typed:
            raise KeyboardInterrupt
        if output.finish_reason == "invalid":
            raise TurnError("the model gave NaN or infinite logits, and the answer ended there")

    def _figures(self, output: RequestOutput) -> str:
        count, capacity = len(output.token_ids), self._talk.engine.capacity
        speed = count / max(output.timing.total_seconds, 1e-9)
        drafts = output.usage.drafts
        guessed = f", {drafts.tokens_per_step:.2f} a step" if drafts.num_drafts else ""
        text = f"{counted(count, 'token')}, {speed:.0f} a second{guessed}, seed {output.seed}"
        text += f"; {self._talk.context} of {capacity} tokens of context"
        if output.finish_reason == "cancelled":
            return f"{text}; stopped"
        if output.finish_reason != "length":
            return text
        if self._talk.context >= capacity:
            return f"{text}. The context is full, and the answer ends there; --ctx-len gives more"
        return f"{text}. The answer was cut off: /set max_new_tokens gives more"

    def _reset(self, text: str) -> None:
        self._talk.reset()
        note("the conversation is empty")

    def _system(self, text: str) -> None:
        if text:
            self._talk.set_system(None if text == "-" else text)
        note(f"system prompt: {self._talk.system or 'none'}")

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if name:
            self._talk.set_parameter(name.replace("-", "_"), value.strip())
        given = ", ".join(f"{name} {value}" for name, value in self._talk.options.items())
        note(f"{given or 'nothing is set'}; the rest is the model's own")

    def _stats(self, text: str) -> None:
        talk = self._talk
        speed = talk.tokens / max(talk.seconds, 1e-9)
        note(
            f"{counted(talk.turns, 'answer')}, {counted(talk.tokens, 'token')} in {talk.seconds:.2f} s, "
            f"{speed:.0f} a second; {talk.context} of {talk.engine.capacity} tokens of context"
        )

    def _save(self, text: str) -> None:
        path = self._path(text)
        if path.exists() and path != self._file:
            raise TurnError(f"{path} exists; give another file")
        document = json.dumps({"messages": self._talk.messages}, ensure_ascii=False, indent=2)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(document + "\n", encoding="utf-8")
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise TurnError(f"cannot write {path}: {error.strerror}") from None
        self._file = path
        note(f"{counted(len(self._talk.messages), 'message')} written to {path}")

    def _load(self, text: str) -> None:
        from qsample.text.chat import check_messages

        path = self._path(text)
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            messages: Any = document.get("messages") if isinstance(document, dict) else document
            check_messages(messages)
        except OSError as error:
            raise TurnError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise TurnError(f"{path} does not hold a conversation: {error}") from None
        self._talk.start_with(messages)
        self._file = path
        last = messages[-1]["role"]
        note(counted(len(messages), "message") + ("" if last == "assistant" else "; /retry answers the last"))

    def _path(self, text: str) -> Path:
        if not text:
            raise TurnError("name a file")
        return Path(text).expanduser().absolute()
