"""What a server is started with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from qsample.errors import shown
from qsample.ort.options import NO_SPINNING
from qsample.serve.reasoning import FORMATS as REASONING_FORMATS
from qsample.serve.tool_calls.formats import FORMATS
from qsample.values import check_count

DEFAULT_PORT: Final = 8000
_NO_SPINNING: Final = {**NO_SPINNING, "session.inter_op.allow_spinning": "0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """What a server serves, and within which limits.

    models: served name → the package's folder, the first for requests that name none. provider, ctx_len: as in `load`.
    threads: of ONNX Runtime's operators; None = its own choice. spinning: let those threads wait busily between two
    operators, which is faster for one stream and takes the processor from whoever else needs it, the server's own event
    loop included. slots, max_waiting, prefill_chunk_size: as in `Engine`. api_keys: those that clients may come with;
    () = any. cors_origins: of pages in browsers that may ask, "*" for all. chat_template: in place of the packages'
    own, a Jinja template or the name of one that they have. generation_config: "auto" takes temperature, top_k, top_p,
    min_p, repetition_penalty and max_new_tokens from a model's generation_config where a request says nothing; "openai"
    takes OpenAI's defaults. tool_call_parser: how models write calls of tools; None = as their chat template has it.
    reasoning_parser: how models write what they think before they answer, which then comes in a field of its own; None
    = it is a part of the answer. max_body_bytes: of a request.
    trust_request_chat_template: take chat templates of clients, too, which are programs, and not only the names of the
    package's. request_timeout: seconds that an answer may take, whole; None = any. drain_timeout: seconds that running
    requests get at the end.

    Raises ValueError where one is wrong.
    """

    models: Mapping[str, str]
    provider: str | None = None
    ctx_len: int | None = None
    threads: int | None = None
    spinning: bool = False
    slots: int | None = None
    max_waiting: int = 256
    prefill_chunk_size: int | None = None
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    chat_template: str | None = None
    generation_config: Literal["openai", "auto"] = "openai"
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    trust_request_chat_template: bool = False
    max_body_bytes: int = 4 * 2**20
    request_timeout: float | None = None
    drain_timeout: float = 30.0
    session_config: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("there is nothing to serve; give a package")
        if "" in self.models:
            raise ValueError("a model is served under an empty name; give NAME=PACKAGE")
        check_count("max_body_bytes", self.max_body_bytes, 1)
        for name in ("request_timeout", "drain_timeout"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 0 <= value < math.inf):
                raise ValueError(f"{name} is {shown(value)}; give seconds, 0 or more")
        if self.request_timeout == 0:
            raise ValueError("request_timeout is 0, in which no answer comes; give more, or leave it out")
        if self.generation_config not in ("openai", "auto"):
            raise ValueError(f'generation_config is {shown(self.generation_config)}; give "openai" or "auto"')
        for name, known in (("tool_call_parser", [*FORMATS]), ("reasoning_parser", [*REASONING_FORMATS])):
            if getattr(self, name) not in (None, *known):
                raise ValueError(f"{name} is {shown(getattr(self, name))}; choose from {', '.join(known)}")
        for name in ("api_keys", "cors_origins"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is a text, whose characters would each be one; give a tuple of texts")
        if any(not key.strip() for key in self.api_keys):
            raise ValueError("an API key is empty; give one that is not, or none at all for a server without keys")

    @property
    def session_options(self) -> dict[str, str]:
        """What ONNX Runtime is told."""
        return {**({} if self.spinning else _NO_SPINNING), **self.session_config}
