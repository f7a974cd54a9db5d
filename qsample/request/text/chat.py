"""Chat messages as the prompt that a model was trained on, written by the model's Jinja templates.

Templates come from strangers. So they see plain JSON data only: an object would lend them its
methods.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from qsample.checks import check_fields, checked, flag, instance, refuse
from qsample.errors import shown
from qsample.package.package import Package
from qsample.request.text.conversation import REASONING_FIELDS, check_messages, is_parts, plain
from qsample.request.text.jinja_template import render_template
from qsample.request.text.template_reading import AnswerForm, TemplateReading
from qsample.request.text.tool_schemas import tool_schema

TEMPLATE_FILE: Final = "chat_template.jinja"
TEMPLATE_FOLDER: Final = "additional_chat_templates"
TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"
_DEFAULT_TEMPLATE: Final = "default"
_TOOL_TEMPLATE: Final = "tool_use"
# Marks the end of an open message in a rendered text. Its last space shows whether the template
# trims.
_END_MARK: Final = "[qsample: the message goes on here] "


def _list(name: str, values: Any) -> Sequence[Any]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        refuse(name, values, "a list")
    return values


def _tools(name: str, values: Any) -> list[Mapping[str, Any]]:
    return [tool_schema(tool) for tool in _list(name, values)]


def _documents(name: str, values: Any) -> Sequence[Mapping[str, Any]]:
    documents = _list(name, values)
    for document in documents:
        if not isinstance(document, Mapping):
            raise ValueError(f"{name} has {shown(document)}; give mappings, as JSON has them")
    return documents


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """The parts of a prompt in addition to the messages; the names come from transformers and vLLM.

    Args:
        tools: the tools that the model may call, each a JSON schema or a Python function
            (`tool_schema`).
        documents: the documents to answer from, each a mapping, usually of title and text.
        chat_template: a Jinja template, or the name of a template of the package. By default
            "tool_use" if tools are given and the package has a template of that name, otherwise the
            package's default.
        add_generation_prompt: whether the prompt ends with the opening of the assistant's answer;
            by default, it does unless a message is continued.
        continue_final_message: whether the last message stays open, so that the model continues it;
            a text names the field to continue.
        chat_template_kwargs: further variables of the template, such as enable_thinking.

    Raises ValueError for a value of another kind.
    """

    tools: Sequence[Any] | None = checked(None, _tools)
    documents: Sequence[Mapping[str, Any]] | None = checked(None, _documents)
    chat_template: str | None = instance(str, "a text", None)
    add_generation_prompt: bool | None = flag(None)
    continue_final_message: bool | str = instance(
        bool | str, "True, False or the name of a field", False
    )
    chat_template_kwargs: Mapping[str, Any] = instance(
        Mapping, 'a mapping, such as {"enable_thinking": False}', factory=dict
    )

    def __post_init__(self) -> None:
        check_fields(self)
        own = {"messages", *(item.name for item in fields(self))} & {*self.chat_template_kwargs}
        if own:
            raise ValueError(
                f"chat_template_kwargs has {', '.join(sorted(own))}, an argument of its own; give it there"
            )
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError(
                "add_generation_prompt starts another message, continue_final_message does not; give either"
            )

    @property
    def given(self) -> list[str]:
        """The names of the options that are not at their defaults."""
        default = type(self)()
        return [
            item.name
            for item in fields(self)
            if getattr(self, item.name) != getattr(default, item.name)
        ]


# What a template may leave out of a prompt, and what follows from that.
UNREAD_WARNINGS: Final = {
    "tools": (
        "the chat template does not print tools, so the model does not know them; describe them in a message, "
        "or give another template"
    ),
    "tool_calls": (
        "the chat template does not print the calls of earlier answers, so the model does not see them; repeat "
        "them in a message, or give another template"
    ),
}


def warn_of_unread(name: str) -> None:
    """Warn that the template does not print what `name` of `UNREAD_WARNINGS` stands for."""
    warnings.warn(UNREAD_WARNINGS[name], stacklevel=3)


CHAT_OPTIONS: Final = frozenset(item.name for item in fields(ChatOptions))


class ChatTemplates:
    """A package's Jinja templates by name, and the special tokens that they may spell."""

    def __init__(
        self,
        templates: Any,
        special_tokens: Mapping[str, str] | None = None,
        text_only: str | None = "the model",
    ) -> None:
        """templates: a text, texts by name, or the list of a tokenizer_config.json; None for none.
        special_tokens: the texts of the special tokens by name, such as bos_token. text_only: the
        name of the reader that takes no images, for errors; None if messages may have images."""
        if isinstance(templates, list):
            templates = _named_templates(templates)
        elif not isinstance(templates, Mapping):
            templates = {_DEFAULT_TEMPLATE: templates}
        self.templates: Mapping[str, str] = {
            name: text for name, text in templates.items() if isinstance(text, str)
        }
        self.special_tokens = dict(special_tokens or {})
        self.text_only = text_only
        self._reading = TemplateReading(self.special_tokens)

    @classmethod
    def of(cls, package: Package) -> ChatTemplates:
        """The templates of a package: those in chat_template.jinja and additional_chat_templates/,
        otherwise those in tokenizer_config.json."""
        config = package.read_json(TOKENIZER_CONFIG_FILE)
        files: dict[str, str] = {}
        if package.has(TEMPLATE_FILE):
            files[_DEFAULT_TEMPLATE] = TEMPLATE_FILE
        for path in package.manifest.files:
            folder, _, file = path.partition("/")
            if folder == TEMPLATE_FOLDER and file.endswith(".jinja"):
                files[file.removesuffix(".jinja")] = path
        templates: Any = {name: package.read_text(file) for name, file in files.items()}
        if not templates:
            templates = config.get("chat_template")
        reads_images = package.interface.image is not None
        text_only = None if reads_images else f"the package {package.path.name}"
        return cls(templates, special_tokens_of(config), text_only)

    def source(self, chat_template: str | None = None, *, tools: bool = False) -> str:
        """The text of a template.

        Args:
            chat_template: the text itself, or the name of a template of the package; by default the
                package's default.
            tools: whether the prompt has tools, for which a package may have another default.

        Raises ValueError if the package has no such template.
        """
        if chat_template is not None:
            if chat_template not in self.templates and "{" not in chat_template:
                names = ", ".join(sorted(self.templates)) or "none"
                raise ValueError(
                    f"chat_template is {chat_template!r:.60}, which is neither Jinja nor a template of the package (it "
                    f"has {names}); give such a name, or the template's text"
                )
            return self.templates.get(chat_template, chat_template)
        if not self.templates:
            raise ValueError(
                f"the package has no chat template (no {TEMPLATE_FILE}, and none in {TOKENIZER_CONFIG_FILE}); give "
                "chat_template (--chat-template), give plain text, or export the model with a tokenizer that has one"
            )
        if tools and _TOOL_TEMPLATE in self.templates:
            return self.templates[_TOOL_TEMPLATE]
        if _DEFAULT_TEMPLATE not in self.templates:
            names = ", ".join(sorted(self.templates))
            raise ValueError(
                f"the package has several chat templates and no default; give chat_template a name: {names}"
            )
        return self.templates[_DEFAULT_TEMPLATE]

    def render(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions | None = None
    ) -> str:
        """The prompt for `messages`, see `check_messages`. If the template does not read parts, the
        texts of a message are joined by line breaks. The template writes
        `ImageProcessor.placeholder` for an image.

        Raises ImportError without jinja2, and ValueError if the messages or the template are wrong.
        """
        if options is None:
            options = ChatOptions()
        source = self.source(options.chat_template, tools=options.tools is not None)
        variables = {
            **self.special_tokens,
            **plain("chat_template_kwargs", options.chat_template_kwargs),
            "tools": plain("tools", options.tools),
            "documents": plain("documents", options.documents),
        }
        conversation = check_messages(messages, self.text_only)
        continued = options.continue_final_message
        if not continued:
            opens_answer = options.add_generation_prompt
            variables["add_generation_prompt"] = True if opens_answer is None else opens_answer
            return self._rendered(source, conversation, variables)
        field = continued if isinstance(continued, str) else "content"
        message_text = _mark_end(conversation[-1], field)
        variables["add_generation_prompt"] = False
        text = self._rendered(source, conversation, variables)
        before, mark, after = text.rpartition(_END_MARK.rstrip())
        if not mark or message_text.strip() not in before:
            raise ValueError(
                "continue_final_message needs the last message in the prompt as it was given, and the chat template "
                "changes or drops it; append its beginning to the prompt as plain text"
            )
        return before if after.startswith(" ") else before.rstrip()

    def unread(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions | None = None
    ) -> list[str]:
        """What the template leaves out of the prompt, though it is given: "tools", and "tool_calls"
        of earlier answers.

        Raises ImportError and ValueError as `render` does.
        """
        if options is None:
            options = ChatOptions()
        source = self.source(options.chat_template, tools=options.tools is not None)
        unread = []
        if options.tools:
            variables = plain("chat_template_kwargs", options.chat_template_kwargs)
            if not self._reading.reads_tools(source, json.dumps(variables, sort_keys=True)):
                unread.append("tools")
        forms = {
            AnswerForm.of(message)
            for message in check_messages(messages, self.text_only)
            if message["role"] == "assistant"
        }
        if not all(self._reading.answer_form(source, form)[1] for form in forms):
            unread.append("tool_calls")
        return unread

    def _rendered(
        self, source: str, messages: list[dict[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        fitted = [self._fitted(source, message) for message in messages]
        return render_template(source, fitted, variables)

    def _fitted(self, source: str, message: dict[str, Any]) -> dict[str, Any]:
        """The message in a form that the template reads: with a text, or parts of text; and an
        answer of an assistant without a text, or with calls, in the form that the template expects."""
        content = message.get("content")
        role = message["role"]
        if role == "assistant" and (not content or "tool_calls" in message):
            form, _ = self._reading.answer_form(source, AnswerForm.of(message))
            message = form.applied(message)
        if is_parts(content) and not self._reading.reads_content(source, role, True):
            if any("text" not in part for part in content):
                raise ValueError(
                    "a message has an image, and the chat template reads text only; give another template"
                )
            return {**message, "content": "\n".join(part["text"] for part in content)}
        if isinstance(content, str) and content:
            reads_text = self._reading.reads_content(source, role, False)
            if not reads_text and self._reading.reads_content(source, role, True):
                return {**message, "content": [{"type": "text", "text": content}]}
        return message


def _named_templates(entries: list[Any]) -> dict[str, Any]:
    """The templates by name from the list of a tokenizer_config.json."""
    templates = {}
    for entry in entries:
        if isinstance(entry, Mapping) and isinstance(entry.get("name"), str):
            templates[entry["name"]] = entry.get("template")
    return templates


def _mark_end(message: dict[str, Any], name: str) -> str:
    """Mark the end of a message's field, under each of its names; returns its text."""
    value: Any = message.get(name)
    if is_parts(value) and "text" in value[-1]:
        last = value[-1]
        text: str = last["text"]
        message[name] = [*value[:-1], {**last, "text": text + _END_MARK}]
        return text
    if not isinstance(value, str):
        raise ValueError(
            f"continue_final_message needs a last message with a text as its {name}; it has {shown(value)}"
        )
    names = REASONING_FIELDS if name in REASONING_FIELDS else (name,)
    for same_field in names:
        if message.get(same_field) == value:
            message[same_field] = value + _END_MARK
    return value


def special_tokens_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The texts of bos_token, eos_token and so on. Older files have a mapping with `content` for
    each."""
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens
