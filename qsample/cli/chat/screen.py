"""The lines of a terminal or a pipe, and what comes of them."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from qsample.cli.chat.conversation import Conversation, TurnError

if TYPE_CHECKING:
    from qsample.runtime import RequestOutput

_HELP: Final = '''\
/system TEXT      set the system prompt; without TEXT show it, with - drop it
/set NAME VALUE   change a parameter, /set temperature 0.7 say; without NAME show them
/reset            forget the conversation, not the system prompt
/retry            answer the last message again
/save FILE        write the conversation as JSON, {"messages": [...]}
/load FILE        go on with a saved one
/stats            tokens and speed so far
/help             this
/exit             end, as ctrl-D does
A line that ends with \\ goes on in the next one; """ begins and ends a text of several lines.
ctrl-C stops an answer and keeps what it has.'''
_COMMAND: Final = re.compile(r"/([a-z?]+)(?:\s+(.*))?$", re.DOTALL)
_QUOTES: Final = '"""'
_PROMPT, _MORE = ">>> ", "... "


class Screen:
    """Reads what the user says, and shows the answers. note: writes beside them."""

    def __init__(self, talk: Conversation, note: Callable[[str], None]) -> None:
        self._talk = talk
        self._note = note
        self._typed = sys.stdin.isatty()
        self._failed = 0
        self._file: Path | None = None  # that was written or read, and may be written again
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
        """Until the input ends. Returns how many lines of a pipe failed; at a terminal the user has seen it."""
        if self._typed:
            self._note("/help lists the commands; ctrl-D ends")
        for text in self._texts():
            match = _COMMAND.match(text)
            if match and match[1] in ("exit", "quit", "bye"):
                break
            try:
                if match and match[1] not in self._commands:
                    raise TurnError(f"there is no command /{match[1]}; /help lists them")
                if match:
                    self._commands[match[1]]((match[2] or "").strip())
                else:
                    self._answer(lambda show, said=text: self._talk.ask(said, show))  # type: ignore[misc]
            except TurnError as error:
                self._failed += 1
                self._note(str(error))
            except KeyboardInterrupt:  # before an answer began
                if not self._typed:
                    raise
                print()
                self._note("stopped")
        return 0 if self._typed else self._failed

    def _texts(self) -> Iterator[str]:
        """What the user says: a line each, or several in quotes or with a backslash at their ends."""
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
                self._note("ctrl-D or /exit ends the chat")
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

        output = ask(show)
        if ended != "\n" or not output.text:
            print(flush=True)
        self._note(self._figures(output))
        if output.finish_reason == "cancelled" and not self._typed:
            raise KeyboardInterrupt
        if output.finish_reason == "invalid":
            raise TurnError("the model gave NaN or infinite logits, and the answer ended there")

    def _figures(self, output: RequestOutput) -> str:
        count, capacity = len(output.token_ids), self._talk.engine.capacity
        text = f"{count} tokens, {count / max(output.timing.total_seconds, 1e-9):.0f} a second, seed {output.seed}"
        text += f"; {self._talk.context} of {capacity} tokens of context"
        if output.finish_reason == "cancelled":
            return f"{text}; stopped"
        if output.finish_reason != "length":
            return text
        if self._talk.context >= capacity:
            return f"{text}. The context is full, and the answer ends there: /reset starts anew; --ctx-len gives more"
        return f"{text}. The answer was cut off: /set max_new_tokens gives more"

    def _reset(self, text: str) -> None:
        self._talk.reset()
        self._note("the conversation is empty")

    def _system(self, text: str) -> None:
        if text:
            self._talk.set_system(None if text == "-" else text)
        self._note(f"system prompt: {self._talk.system or 'none'}")

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if name:
            self._talk.set_parameter(name.replace("-", "_"), value.strip())
        given = ", ".join(f"{name} {value}" for name, value in self._talk.options.items())
        self._note(f"{given or 'nothing is set'}; the rest is the model's own")

    def _stats(self, text: str) -> None:
        talk = self._talk
        speed = talk.tokens / max(talk.seconds, 1e-9)
        self._note(
            f"{talk.turns} answers, {talk.tokens} tokens in {talk.seconds:.2f} s, {speed:.0f} a second; "
            f"{talk.context} of {talk.engine.capacity} tokens of context"
        )

    def _save(self, text: str) -> None:
        path = self._path(text)
        if path.exists() and path != self._file:
            raise TurnError(f"{path} exists; give another file")
        document = json.dumps({"messages": self._talk.messages}, ensure_ascii=False, indent=2)
        beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            beside.write_text(document + "\n", encoding="utf-8")
            beside.replace(path)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise TurnError(f"cannot write {path}: {error.strerror}") from None
        self._file = path
        self._note(f"{len(self._talk.messages)} messages written to {path}")

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
            raise TurnError(f"{path} holds no conversation: {error}") from None
        self._talk.messages = messages
        self._file = path
        last = messages[-1]["role"]
        self._note(f"{len(messages)} messages" + ("" if last == "assistant" else "; /retry answers the last one"))

    def _path(self, text: str) -> Path:
        if not text:
            raise TurnError("name a file")
        return Path(text).expanduser().absolute()
