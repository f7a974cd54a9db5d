"""Jinja as chat templates know it: in its sandbox, with what transformers offers them and no more.

Templates come from strangers. Jinja is imported by the first template.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

_SAFE_JINJA: Final = (3, 1, 6)  # older sandboxes can be escaped


@lru_cache(maxsize=32)
def compile_template(source: str) -> Any:
    """The Jinja template of `source`. Raises ImportError without a safe jinja2, ValueError where it is no Jinja."""
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
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            # A scope of its own: what is set inside stays inside, as in transformers.
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
    """Jinja's own filter escapes HTML, which a model was not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
