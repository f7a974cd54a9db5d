"""Chat messages as the prompt that a model was trained on, by the model's own Jinja template.

Templates come from strangers, so they run in Jinja's sandbox, with what transformers offers them and no more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from qsample.package import Package

TEMPLATE_FILE: Final = "chat_template.jinja"
CONFIG_FILE: Final = "tokenizer_config.json"
_SAFE_JINJA: Final = (3, 1, 6)  # older sandboxes can be escaped


class ChatTemplate:
    """A Jinja template and the special tokens that it may spell. Jinja is imported by the first `render`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens or {})
        self._template: Any = None

    @classmethod
    def of(cls, package: Package) -> ChatTemplate | None:
        """The package's template, from chat_template.jinja or tokenizer_config.json; None where it has neither."""
        config = package.read_json(CONFIG_FILE)
        if package.has(TEMPLATE_FILE):
            source: Any = package.file(TEMPLATE_FILE).read_text(encoding="utf-8")
        else:
            source = config.get("chat_template")
        if isinstance(source, list):  # several, by name
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        if not isinstance(source, str):
            return None
        return cls(source, _special_tokens(config))

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The prompt for `messages`, each {"role": ..., "content": ...}.

        add_generation_prompt: end with the opening of the assistant's answer. Raises ImportError without jinja2, and
        ValueError where the messages or the template are wrong.
        """
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ValueError(f'a chat message is {message!r:.80}; give {{"role": "user", "content": "..."}}')
        if self._template is None:
            self._template = _compile(self._source)
        import jinja2

        try:
            text: str = self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error
        return text


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and so on; older files hold a mapping with `content` for each."""
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _compile(source: str) -> Any:
    try:
        import jinja2
        import jinja2.ext
        import jinja2.sandbox
    except ImportError:
        raise ImportError("chat templates need jinja2: `pip install 'qsample[chat]'`, or give plain text") from None
    version = tuple(int(part) for part in jinja2.__version__.split(".")[:3] if part.isdigit())
    if version < _SAFE_JINJA:
        raise ImportError(
            f"chat templates need jinja2 >= 3.1.6, and {jinja2.__version__} is installed: `pip install -U jinja2`"
        )

    class Generation(jinja2.ext.Extension):
        """{% generation %} marks what an assistant wrote, for training; here it is only its content."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

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
    except jinja2.TemplateError as error:
        raise ValueError(f"the model's chat template is not valid Jinja: {error}") from error


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter escapes HTML, which a model was not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
