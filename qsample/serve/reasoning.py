"""What a model thinks before it answers, apart from the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from qsample.serve.marks import open_end


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models writes its thoughts.

    start, end: texts around them. from_start: an answer begins with thoughts, whether or not `start` is there, unless
    its prompt ends them.
    """

    start: str
    end: str
    from_start: bool = False


# By vLLM's names.
FORMATS: Final[Mapping[str, ReasoningFormat]] = {
    "deepseek_r1": ReasoningFormat("<think>", "</think>", from_start=True),
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "glm45": ReasoningFormat("<think>", "</think>"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>", from_start=True),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
}


class ReasoningReader:
    """Splits an answer that comes in pieces into thoughts and what follows them.

    What may be a part of a mark is held back until it is certain, and so are blanks that may stand in front of one.
    Blanks beside the marks belong to neither side. Thoughts come first or not at all: a mark in the middle of an answer
    is text.
    """

    def __init__(self, form: ReasoningFormat, prompt: str) -> None:
        """prompt: its end, special tokens included. Many templates write the mark that begins the thoughts, or, where
        a client wants none, both marks."""
        prompt = prompt.rstrip()
        self._form = form
        self._text = ""  # not handed out
        closed = prompt.endswith(form.end)
        self._opened = prompt.endswith(form.start) or (form.from_start and not closed)
        self._read: Callable[[], tuple[str, str]] = self._read_answer if closed else self._read_start
        self._beside_mark = False  # whether blanks that come now are dropped

    def put(self, text: str) -> tuple[str, str]:
        """The thoughts, and the text of the answer, that have become certain."""
        self._text += text
        return self._read()

    def end(self) -> tuple[str, str]:
        """The rest of both."""
        text, self._text = self._text, ""
        if self._read == self._read_start and self._opened:
            return text.strip(), ""
        return (text.rstrip(), "") if self._read == self._read_thoughts else ("", text)

    def _read_start(self) -> tuple[str, str]:
        text = self._text.lstrip()
        if not text.startswith(self._form.start) and self._form.start.startswith(text):
            return "", ""
        if text.startswith(self._form.start):
            self._text, self._opened = text.removeprefix(self._form.start), True
        self._read = self._read_thoughts if self._opened else self._read_answer
        self._beside_mark = self._opened
        return self._read()

    def _read_thoughts(self) -> tuple[str, str]:
        self._drop_blanks()
        thoughts, mark, rest = self._text.partition(self._form.end)
        if not mark:
            certain = self._text[: len(self._text) - open_end(self._text, self._form.end)].rstrip()
            self._text = self._text[len(certain) :]
            return certain, ""
        self._text, self._read, self._beside_mark = rest, self._read_answer, True
        return thoughts.rstrip(), self._read_answer()[1]

    def _read_answer(self) -> tuple[str, str]:
        self._drop_blanks()
        text, self._text = self._text, ""
        return "", text

    def _drop_blanks(self) -> None:
        if self._beside_mark:
            self._text = self._text.lstrip()
            self._beside_mark = not self._text


def find_format(name: str | None, is_shown: Callable[[str], bool]) -> ReasoningFormat | None:
    """The format of that name; None = thoughts stay in the answer.

    is_shown: whether a text of the model can have a mark. Raises ValueError where it cannot.
    """
    if name is None:
        return None
    form = FORMATS[name]
    for mark in (form.start, form.end):
        if not is_shown(mark):
            raise ValueError(
                f"the reasoning parser {name} looks for {mark}, which is a special token of this model, and those are "
                "left out of texts; choose another parser, or none"
            )
    return form
