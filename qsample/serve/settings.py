"""The settings of a server."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from qsample.contract.tensors import MOST_SPECULATIVE_TOKENS
from qsample.errors import shown
from qsample.ort.options import NO_SPINNING
from qsample.request.checks import check_count, is_integer
from qsample.runtime.decode.stored_prefixes import DEFAULT_BYTES
from qsample.serve.parsers import REASONING_FORMATS, TOOL_FORMATS

DEFAULT_PORT: Final = 8000
_NO_SPINNING: Final = {**NO_SPINNING, "session.inter_op.allow_spinning": "0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """The models of a server, and its limits.

    Args:
        models: served name → the package's folder; the first model answers requests that name none.
        provider, ctx_len: as in `load`.
        threads: of ONNX Runtime's operators; None = its own choice.
        batch_invariant: as in `load`.
        spinning: threads wait busily between two operators. That is faster for a single stream, and takes the processor
            from other work, the server's own event loop included.
        slots, max_waiting, prefill_chunk_size: as in `Engine`.
        api_keys: clients have to send one of these keys; () = no key.
        cors_origins: origins of browser pages that may send requests; "*" = all.
        chat_template: replaces the packages' own: a Jinja template, or the name of a template in the packages.
        generation_config: "auto" = fields that a request leaves out come from the model's generation_config
            (temperature, top_k, top_p, min_p, repetition_penalty, max_new_tokens and filters); "openai" = they have
            OpenAI's defaults.
        tool_call_parser: the format of tool calls; None = the format that the chat template teaches.
        reasoning_parser: the format of thoughts, which answers then have in a field of their own; None = they stay in
            the answer.
        speculative_config: vLLM's, for requests that do not say prompt_lookup_num_tokens: {"method": "ngram",
            "num_speculative_tokens": n}, with packages that were compiled for at least n. prompt_lookup_min and
            prompt_lookup_max are accepted; the graph looks for 2 to 8 tokens. None = no guesses.
        trust_request_chat_template: accept chat templates of clients, which are programs, and not only names of the
            package's templates.
        max_body_bytes: of a request.
        prefixes, prefix_cache_dir, prefix_cache_bytes: as in `Engine`; prefixes are for a server of a single model.
        loras: served name → the folder of a LoRA adapter, for a server of a single model.
        lora_dir: clients may load adapters from folders below this one, and unload any; None = they may not.
        max_cpu_loras: most adapters in memory; a batch has the package's `max_loras` of them.
        request_timeout: seconds that a whole answer may take; None = no limit.
        drain_timeout: seconds that running requests get when the server ends.
        access_log: log a line for each HTTP request.
        session_config: more settings of ONNX Runtime's sessions, by its keys.

    Raises ValueError for a wrong value.
    """

    models: Mapping[str, str]
    provider: str | None = None
    ctx_len: int | None = None
    threads: int | None = None
    batch_invariant: bool = True
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
    speculative_config: Mapping[str, Any] | None = None
    trust_request_chat_template: bool = False
    max_body_bytes: int = 4 * 2**20
    request_timeout: float | None = None
    drain_timeout: float = 30.0
    access_log: bool = True
    prefixes: tuple[str, ...] = ()
    prefix_cache_dir: str | None = None
    prefix_cache_bytes: int = DEFAULT_BYTES
    loras: Mapping[str, str] = field(default_factory=dict)
    lora_dir: str | None = None
    max_cpu_loras: int = 64
    session_config: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("models is empty; give a package")
        if "" in self.models:
            raise ValueError("models has an empty name; give NAME=PACKAGE")
        check_count("max_body_bytes", self.max_body_bytes, 1)
        if self.prefixes and len(self.models) > 1:
            raise ValueError("prefixes are of one package, and several are served; give prefix_cache_dir, or one model")
        if not is_integer(self.max_cpu_loras, 1):
            raise ValueError(f"max_cpu_loras is {shown(self.max_cpu_loras)}; give an integer >= 1")
        if not isinstance(self.loras, Mapping):
            raise ValueError(f"loras is {shown(self.loras)}; give a mapping from served names to adapters' folders")
        if self.loras and len(self.models) > 1:
            raise ValueError("loras are of one package, and several are served; serve one model, or give lora_dir")
        if self.lora_dir is not None and not (
            isinstance(self.lora_dir, str | os.PathLike) and os.path.isdir(self.lora_dir)
        ):
            raise ValueError(f"lora_dir is {shown(self.lora_dir)}, which is not a folder; give the adapters' folder")
        for name in ("request_timeout", "drain_timeout"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 0 <= value < math.inf):
                raise ValueError(f"{name} is {shown(value)}; give seconds, 0 or more")
        if self.request_timeout == 0:
            raise ValueError("request_timeout is 0, too short for an answer; give more, or leave it out")
        if self.generation_config not in ("openai", "auto"):
            raise ValueError(f'generation_config is {shown(self.generation_config)}; give "openai" or "auto"')
        for name, known in (("tool_call_parser", [*TOOL_FORMATS]), ("reasoning_parser", [*REASONING_FORMATS])):
            if getattr(self, name) not in (None, *known):
                raise ValueError(f"{name} is {shown(getattr(self, name))}; choose from {', '.join(known)}")
        if self.speculative_config is not None:
            _check_speculative_config(self.speculative_config)
        for name in ("api_keys", "cors_origins"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is a text; give a tuple of texts")
        if any(not key.strip() for key in self.api_keys):
            raise ValueError("api_keys has an empty key; give another, or none for a server without keys")

    @property
    def session_options(self) -> dict[str, str]:
        """The configuration of ONNX Runtime's sessions, by its keys."""
        return {**({} if self.spinning else _NO_SPINNING), **self.session_config}


def _check_speculative_config(config: Any) -> None:
    """Raise ValueError for anything but vLLM's settings of n-gram speculation."""
    accepted = '{"method": "ngram", "num_speculative_tokens": n}'
    if not isinstance(config, Mapping) or config.get("method") != "ngram":
        raise ValueError(f"speculative_config is {shown(config)}; tokens are guessed by prompt lookup: give {accepted}")
    names = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
    if others := config.keys() - {"method", *names}:
        raise ValueError(f"speculative_config has {', '.join(sorted(map(repr, others)))}; give {accepted}")
    for name in names:
        if (name == names[0] or name in config) and not is_integer(config.get(name), 1, MOST_SPECULATIVE_TOKENS):
            raise ValueError(
                f"speculative_config has {name} {shown(config.get(name))}; give 1 to {MOST_SPECULATIVE_TOKENS}"
            )
