"""A chat template → what it reads of messages: texts or parts, tools, calls, answers without a text.

Nothing but rendering sees through macros, filters and tests of a type alike. So a template is
rendered with a short conversation that has a word of its own, and what it reads contains the word.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal

from qsample.request.text.conversation import with_objects
from qsample.request.text.jinja_template import render_template

_WORD: Final = "qsample-probe"
_FUNCTION_WORD: Final = "qsample_function"
# The name of an argument, because some templates spell the names, and some all of JSON.
_ARGUMENT_WORD: Final = "qsample_argument"
_PYTHON_DICT: Final = f"{{'{_ARGUMENT_WORD}'"
_CALL_ID: Final = "call00000"  # Mistral's templates demand ids of nine characters.
_USER: Final = {"role": "user", "content": "x"}
_MAX_TEMPLATES: Final = 64

Content = Literal["text", "absent", "null", "empty"]
Arguments = Literal["none", "object", "json"]


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form of an assistant's message, which templates of different families expect differently.

    Attributes:
        content: "text" for an answer with a text. An answer without a text has no `content`
            ("absent"), as in transformers, a `content` that is None ("null"), or "" ("empty").
        arguments: whether the arguments of its calls are objects, or their texts in JSON; "none"
            for an answer without calls.
    """

    content: Content
    arguments: Arguments

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> AnswerForm:
        """The form of a checked message."""
        content: Content = "absent"
        if "content" in message:
            content = "text" if message["content"] else "empty"
        arguments: Arguments = "none"
        for function in _functions_of(message):
            arguments = "json" if isinstance(function.get("arguments"), str) else "object"
        return cls(content, arguments)

    def alternatives(self) -> Iterator[AnswerForm]:
        """The form itself, and then the others of the same answer."""
        contents: tuple[Content, ...] = ("text",)
        if self.content != "text":
            contents = (self.content, "absent", "null", "empty")
        arguments: tuple[Arguments, ...] = ("none",)
        if self.arguments != "none":
            arguments = (self.arguments, "object", "json")
        for form in itertools.product(contents, arguments):
            yield AnswerForm(*form)

    def applied(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message in this form."""
        changed = dict(message)
        match self.content:
            case "absent":
                changed.pop("content", None)
            case "null":
                changed["content"] = None
            case "empty":
                changed["content"] = ""
        match self.arguments:
            case "object":
                return with_objects(changed)
            case "json":
                return _with_texts(changed)
        return changed


class TemplateReading:
    """What templates read; each question about a template is answered once."""

    def __init__(self, special_tokens: Mapping[str, str]) -> None:
        """special_tokens: the texts of the special tokens by name, which templates may spell."""
        self._special_tokens = special_tokens
        cached = lru_cache(maxsize=_MAX_TEMPLATES)
        self.reads_content = cached(self._reads_content)
        self.reads_tools = cached(self._reads_tools)
        self.answer_form = cached(self._answer_form)

    def _reads_content(self, source: str, role: str, parts: bool) -> bool:
        """Whether a template prints the content of a role's message.

        Args:
            source: the text of the template.
            role: the role.
            parts: whether the content is a list of parts, and not a text.
        """
        content: Any = [{"type": "text", "text": _WORD}] if parts else _WORD
        text = self._rendered(source, _conversation_with({"role": role, "content": content}))
        # A template that prints the parts as a list does not read them.
        return (
            text is not None
            and _WORD in text
            and re.search(rf"""['"]text['"]: ?['"]{_WORD}""", text) is None
        )

    def _reads_tools(self, source: str, variables: str) -> bool:
        """Whether a template prints the tools.

        Args:
            source: the text of the template.
            variables: the further variables of the template, as JSON.
        """
        function = {
            "name": _FUNCTION_WORD,
            "description": "x",
            "parameters": {"type": "object", "properties": {}},
        }
        tools = [{"type": "function", "function": function}]
        text = self._rendered(source, [_USER], tools=tools, **json.loads(variables))
        return text is not None and _FUNCTION_WORD in text

    def _answer_form(self, source: str, given: AnswerForm) -> tuple[AnswerForm, bool]:
        """The form in which a template reads an answer, and whether it prints the answer's calls.

        The given form is kept if the template reads it, so that a conversation is rendered as
        transformers renders it.

        Args:
            source: the text of the template.
            given: the form of the answer as its author wrote it.
        """
        faults = {form: self._faults(source, form) for form in given.alternatives()}
        best = min(faults, key=lambda form: faults[form])
        reads_calls = not faults[best].lacks_call and not faults[best].is_refused
        return best, reads_calls or given.arguments == "none"

    def _faults(self, source: str, form: AnswerForm) -> _Faults:
        message: dict[str, Any] = {"role": "assistant", "content": _WORD}
        if form.arguments != "none":
            message["tool_calls"] = [_call()]
        text = self._rendered(source, _conversation_with(form.applied(message)))
        if text is None:
            return _Faults(is_refused=True)
        num_nones = text.count("None")
        if form.arguments == "none":
            return _Faults(num_nones=num_nones)
        return _Faults(
            lacks_call=_FUNCTION_WORD not in text,
            lacks_arguments=_ARGUMENT_WORD not in text,
            prints_python=_PYTHON_DICT in text,
            num_nones=num_nones,
        )

    def _rendered(
        self, source: str, messages: list[dict[str, Any]], **variables: Any
    ) -> str | None:
        """The text of a conversation; None if the template refuses it."""
        known = {**self._special_tokens, "tools": None}
        try:
            return render_template(source, messages, known | variables)
        except ValueError:
            return None


@dataclass(frozen=True, slots=True, order=True)
class _Faults:
    """What is wrong with a form of an answer for a template, the worst first."""

    is_refused: bool = False
    lacks_call: bool = False
    lacks_arguments: bool = False
    prints_python: bool = False
    num_nones: int = 0


def _functions_of(message: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The functions that a message calls."""
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            yield function


def _with_texts(message: Mapping[str, Any]) -> dict[str, Any]:
    """A chat message whose calls have texts in JSON as arguments."""
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), Mapping):
            text = json.dumps(function["arguments"], ensure_ascii=False)
            call = {**call, "function": {**function, "arguments": text}}
        calls.append(call)
    return {**message, "tool_calls": calls}


def _call() -> dict[str, Any]:
    function = {"name": _FUNCTION_WORD, "arguments": {_ARGUMENT_WORD: 1}}
    return {"id": _CALL_ID, "type": "function", "function": function}


def _conversation_with(message: dict[str, Any]) -> list[dict[str, Any]]:
    """A conversation with a message, at a place where templates take its role."""
    match message:
        case {"role": "user"}:
            return [message]
        case {"role": "system" | "developer"}:
            return [message, _USER]
        case {"role": "assistant"}:
            return [_USER, message]
    calling = {"role": "assistant", "content": "", "tool_calls": [_call()]}
    of_call = {"tool_call_id": _CALL_ID, "name": _FUNCTION_WORD}
    return [_USER, calling, message | of_call]
