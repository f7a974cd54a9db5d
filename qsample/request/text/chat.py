"""Chat messages as the prompt that a model was trained on, written by the model's Jinja templates.

Templates come from strangers. So they run in Jinja's sandbox, with the functions that transformers
offers them and no others, and see plain JSON data only: an object would lend them its methods. The
first template imports jinja2.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, TypeGuard

import numpy as np

from qsample.checks import check_fields, checked, flag, instance, refuse
from qsample.errors import PackageError, install_hint, shown
from qsample.package.package import Package
from qsample.request.text.tool_schemas import tool_schema

TEMPLATE_FILE: Final = "chat_template.jinja"
TEMPLATE_FOLDER: Final = "additional_chat_templates"
TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"
_DEFAULT_TEMPLATE: Final = "default"
_TOOL_TEMPLATE: Final = "tool_use"
# Marks the end of an open message in a rendered text. Its last space shows whether the template
# trims.
_END_MARK: Final = "[qsample: the message goes on here] "
# The names of the thoughts of a model before its answer. Templates read the first name, older hosts
# write the others.
REASONING_FIELDS: Final = ("reasoning_content", "thinking", "reasoning")
# The types of parts that hold an image. Templates know the first type.
IMAGE_TYPES: Final = ("image", "image_url", "input_image")
# The roles whose content is a text or parts. The content of other roles may be any JSON: the result
# of a tool, for example.
_TEXT_ROLES: Final = ("system", "developer", "user", "assistant")
_MAX_DEPTH: Final = 100  # levels
_MESSAGE_FORM: Final = 'give a list of {"role": "user", "content": "..."}'
_MIN_JINJA_VERSION: Final = (3, 1, 6)  # Programs can escape from older sandboxes.


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
        self._reads = lru_cache(maxsize=64)(self._find_whether_read)

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
        templates: Any = {name: _read(package, file) for name, file in files.items()}
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
        conversation = [
            self._fitted(source, message) for message in check_messages(messages, self.text_only)
        ]
        continued = options.continue_final_message
        if not continued:
            opens_answer = options.add_generation_prompt
            variables["add_generation_prompt"] = True if opens_answer is None else opens_answer
            return _render(source, conversation, variables)
        field = continued if isinstance(continued, str) else "content"
        message_text = _mark_end(conversation[-1], field)
        variables["add_generation_prompt"] = False
        text = _render(source, conversation, variables)
        before, mark, after = text.rpartition(_END_MARK.rstrip())
        if not mark or message_text.strip() not in before:
            raise ValueError(
                "continue_final_message needs the last message in the prompt as it was given, and the chat template "
                "changes or drops it; append its beginning to the prompt as plain text"
            )
        return before if after.startswith(" ") else before.rstrip()

    def _fitted(self, source: str, message: dict[str, Any]) -> dict[str, Any]:
        """The message with its content in a form that the template reads: a text, or parts of
        text."""
        content = message.get("content")
        role = message["role"]
        if is_parts(content) and not self._reads(source, role, True):
            if any("text" not in part for part in content):
                raise ValueError(
                    "a message has an image, and the chat template reads text only; give another template"
                )
            return {**message, "content": "\n".join(part["text"] for part in content)}
        if isinstance(content, str):
            reads_text = self._reads(source, role, False)
            if not reads_text and self._reads(source, role, True):
                return {**message, "content": [{"type": "text", "text": content}]}
        return message

    def _find_whether_read(self, source: str, role: str, parts: bool) -> bool:
        """Whether the template prints the content of a role's message, given as parts or as a text.
        The template is rendered for that: nothing else can see through macros, filters and tests of
        a type alike."""
        probe = "qsample-probe"
        content: Any = [{"type": "text", "text": probe}] if parts else probe
        variables = {**self.special_tokens, "add_generation_prompt": False}
        try:
            text = _render(source, _conversation_with(role, content), variables)
        except ValueError:
            return False
        # A template that prints the parts as a list does not read them.
        return probe in text and re.search(rf"""['"]text['"]: ?['"]{probe}""", text) is None


def _named_templates(entries: list[Any]) -> dict[str, Any]:
    """The templates by name from the list of a tokenizer_config.json."""
    templates = {}
    for entry in entries:
        if isinstance(entry, Mapping) and isinstance(entry.get("name"), str):
            templates[entry["name"]] = entry.get("template")
    return templates


def _conversation_with(role: str, content: Any) -> list[dict[str, Any]]:
    """A conversation with a message of a role, at a place where templates take that role."""
    message: dict[str, Any] = {"role": role, "content": content}
    user: dict[str, Any] = {"role": "user", "content": "x"}
    if role == "user":
        return [message]
    if role in ("system", "developer"):
        return [message, user]
    if role == "assistant":
        return [user, message]
    function = {"name": "f", "arguments": {}}
    call = {"id": "call00000", "type": "function", "function": function}
    message |= {"tool_call_id": call["id"], "name": function["name"]}
    return [user, {"role": "assistant", "content": "", "tool_calls": [call]}, message]


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


def _render(source: str, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
    template = compile_template(source)
    try:
        text: str = template.render(**variables, messages=messages)
    except Exception as error:  # A template raises, or Python does for its expressions.
        is_of_jinja = type(error).__module__.startswith("jinja2")
        kind = "" if is_of_jinja else f"{type(error).__name__}: "
        raise ValueError(
            f"the model's chat template refuses these messages: {kind}{error!s:.300}"
        ) from error
    return text


def _read(package: Package, name: str) -> str:
    path = package.file(name)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PackageError(f"cannot read {path}: {error}; export the package again") from error


def special_tokens_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The texts of bos_token, eos_token and so on. Older files have a mapping with `content` for
    each."""
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def plain(what: str, value: Any, depth: int = 0) -> Any:
    """A copy of `value` in JSON's types. Raises ValueError for other types, with the name
    `what`."""
    if value is None:
        return None
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if depth > _MAX_DEPTH:
        raise ValueError(f"{what} is nested more than {_MAX_DEPTH} levels deep; give less")
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return float(value)
    if isinstance(value, Mapping):
        return {
            plain(what, key, depth + 1): plain(what, item, depth + 1) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [plain(what, item, depth + 1) for item in value]
    raise ValueError(
        f"{what} holds a {type(value).__name__}; give text, numbers, lists and mappings, as JSON has them"
    )


def check_messages(messages: Any, text_only: str | None = None) -> list[dict[str, Any]]:
    """A plain copy of a conversation: without entries that are None, with reasoning under each of
    its names, and with {"type": "image"} for each image.

    Args:
        messages: the conversation.
        text_only: the name of a reader that takes no images; None if images are accepted.

    Raises ValueError for a message that is not a mapping with a role, has no content, or has a part
    that is neither text nor an accepted image.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(f"the chat messages are {shown(messages)}; {_MESSAGE_FORM}")
    if not messages:
        raise ValueError(f"the conversation is empty; {_MESSAGE_FORM}")
    return [_message(index, message, text_only) for index, message in enumerate(messages)]


def _message(index: int, given: Any, text_only: str | None) -> dict[str, Any]:
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
        raise ValueError(f"a chat message is {shown(given)}; {_MESSAGE_FORM}")
    what = f"chat message {index}"
    message = {name: value for name, value in given.items() if value is not None}
    if "content" in message:
        message["content"] = _content(what, message["role"], message["content"], text_only)
    elif message["role"] != "assistant" or len(message) == 1:
        # Only an assistant's message may lack a content: it has called tools, or holds thoughts.
        raise ValueError(
            f"{what} ({message['role']}) has no content; give a text, or parts of type text"
        )
    message = plain(what, message)
    reasoning = next((message[name] for name in REASONING_FIELDS if name in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _content(what: str, role: str, content: Any, text_only: str | None) -> Any:
    """The checked content of a message."""
    has_parts = isinstance(content, list | tuple) and all(
        isinstance(part, str) or _is_part(part) for part in content
    )
    if has_parts:
        return [_part(what, part, text_only) for part in content]
    if isinstance(content, str) or role not in _TEXT_ROLES:
        return content
    raise ValueError(
        f'the content of {what} ({role}) is {shown(content)}; give a text, or parts [{{"type": "text", "text": "..."}}]'
    )


def _is_part(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("type"), str)


def _part(what: str, part: Any, text_only: str | None) -> Any:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if part["type"] in IMAGE_TYPES and text_only is None:
        return {"type": IMAGE_TYPES[0]}
    if part["type"] != "text" or not isinstance(part.get("text"), str):
        known = "give parts of text or images"
        if text_only is not None:
            known = f"{text_only} reads text only"
        text = '{"type": "text", "text": "..."}'
        raise ValueError(f"{what} has a part of type {shown(part['type'])}; {known}: {text}")
    return part


def is_parts(content: Any) -> TypeGuard[list[dict[str, Any]]]:
    """Whether the content of a checked message is a list of parts."""
    return (
        isinstance(content, list) and len(content) > 0 and all(_is_part(part) for part in content)
    )


@lru_cache(maxsize=32)
def compile_template(source: str) -> Any:
    """The Jinja template of `source`. Raises ImportError without a safe jinja2, and ValueError if
    it is not valid Jinja."""
    try:
        import jinja2
        import jinja2.ext
        import jinja2.sandbox
    except ImportError:
        raise ImportError(
            f"chat templates need jinja2: `{install_hint('chat')}`, or give plain text (`qsample generate --raw`)"
        ) from None
    version = tuple(int(part) for part in jinja2.__version__.split(".")[:3] if part.isdigit())
    if version < _MIN_JINJA_VERSION:
        raise ImportError(
            f"chat templates need jinja2 >= 3.1.6, and {jinja2.__version__} is installed: `pip install -U jinja2`"
        )

    class Generation(jinja2.ext.Extension):
        """{% generation %} marks an assistant's text for training; here it only prints its
        content."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            # A separate scope keeps the variables that are set inside, as in transformers.
            return jinja2.nodes.Scope(body).set_lineno(line)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ValueError(f"the chat template is not valid Jinja: {error}") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's filter escapes HTML, on which models were not trained. This filter does not."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
