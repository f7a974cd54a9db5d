"""A Jinja template of a stranger → a text.

Templates run in Jinja's sandbox, with the functions that transformers offers them and no others.
The first template imports jinja2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

from qsample.errors import install_hint

_MIN_JINJA_VERSION: Final = (3, 1, 6)  # Programs can escape from older sandboxes.


def render_template(
    source: str, messages: list[dict[str, Any]], variables: Mapping[str, Any]
) -> str:
    """The text that a template makes of messages.

    Args:
        source: the text of the template.
        messages: the messages, in plain JSON types: an object would lend templates its methods.
        variables: the other variables of the template, in plain JSON types.

    Raises ImportError without a safe jinja2, and ValueError if the template is not valid Jinja or
    refuses the messages.
    """
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
