"""The settings of a server. `qsample serve` has an option for each field with a `help`."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from qsample.addons.serve.parsers import REASONING_FORMATS, TOOL_FORMATS
from qsample.checks import (
    check_fields,
    checked,
    choice,
    flag,
    integer,
    is_integer,
    is_number,
    refuse,
)
from qsample.contract.tensors import MOST_SPECULATIVE_TOKENS
from qsample.errors import shown

DEFAULT_PORT: Final = 8000
_COUNT: Final = (1, math.inf, "an integer >= 1")
_COUNT_OR_ZERO: Final = (0, math.inf, "an integer >= 0")
_MAX_BODY_BYTES: Final = 4 << 20
# This is Anthropic's limit, and holds four photos of a phone in base64.
_MAX_IMAGE_BODY_BYTES: Final = 32 << 20


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):  # The text is not shown, because it may be a key.
        raise ValueError(f"{name} is a text; give a tuple of texts")
    return tuple(value)


def _seconds(name: str, value: Any) -> float | None:
    if value is None and name == "request_timeout":
        return None
    if not is_number(value, 0, math.inf) or value == math.inf:
        refuse(name, value, "seconds, 0 or more")
    if value == 0 and name == "request_timeout":
        raise ValueError(f"{name} is 0, too short for an answer; give more, or leave it out")
    return float(value)


def _folder(name: str, value: Any) -> Any:
    if isinstance(value, str | os.PathLike) and os.path.isdir(value):
        return value
    return refuse(name, value, "an existing folder")


def _domains(name: str, value: Any) -> tuple[str, ...]:
    domains = tuple(domain.strip().lower().rstrip(".") for domain in _texts(name, value))
    for domain in domains:
        if not re.fullmatch(r"[a-z0-9.-]+", domain):
            refuse(name, domain, "names of hosts, such as images.example.org")
    return domains


def _speculative_config(name: str, config: Any) -> Any:
    """VLLM's settings of n-gram speculation."""
    accepted = '{"method": "ngram", "num_speculative_tokens": n}'
    if not isinstance(config, Mapping) or config.get("method") != "ngram":
        raise ValueError(
            f"{name} is {shown(config)}; tokens are guessed by prompt lookup: give {accepted}"
        )
    names = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
    if others := config.keys() - {"method", *names}:
        raise ValueError(f"{name} has {', '.join(sorted(map(repr, others)))}; give {accepted}")
    for key in names:
        if (key == names[0] or key in config) and not is_integer(
            config.get(key), 1, MOST_SPECULATIVE_TOKENS
        ):
            raise ValueError(
                f'{name} has "{key}": {shown(config.get(key))}; give 1 to {MOST_SPECULATIVE_TOKENS}'
            )
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """The models of a server, and its limits.

    Most fields are described by their `help`. These are the other fields:

    Args:
        models: served name → the package's folder. The first model answers requests that name no
            model.
        provider, ctx_len, batch_invariant: the arguments of `load`; see `load`.
        threads: the number of threads of ONNX Runtime's operators. By default, ONNX Runtime
            chooses it.
        chat_template: a Jinja template, or the name of a template in the packages. It replaces the
            packages' templates.
        loras: served name → the folder of a LoRA adapter, for a server of a single model.
        session_config: further settings of ONNX Runtime's sessions, by its keys.

    Raises ValueError for a wrong value.
    """

    models: Mapping[str, str]
    provider: str | None = None
    ctx_len: int | None = None
    threads: int | None = None
    batch_invariant: bool = True
    chat_template: str | None = None
    loras: Mapping[str, str] = checked(factory=dict)
    session_config: Mapping[str, str] = checked(factory=dict)
    slots: int | None = integer(
        None, *_COUNT, help="Requests that run at once. (default: the package's batch, or 8)"
    )
    max_waiting: int = integer(256, *_COUNT_OR_ZERO, help="Requests that wait; the next gets 429.")
    prefill_chunk_size: int | None = integer(
        None,
        *_COUNT,
        help="Prompt tokens between two steps of other requests. (default: all of a prompt)",
    )
    api_keys: tuple[str, ...] = checked(
        (), _texts, repeated=str, flag="--api-key",
        help="Clients have to send it; may be repeated. (default: QSAMPLE_API_KEY, if it is set)",
    )  # fmt: skip
    trusted_keys: tuple[str, ...] = checked(
        (), _texts, repeated=str, metavar="FILE",
        help="Serve only packages signed by one of these keys: PEM files, folders; may be repeated.",
    )  # fmt: skip
    cors_origins: tuple[str, ...] = checked(
        (),
        _texts,
        repeated=str,
        flag="--cors-origin",
        help="Accept browser pages of this origin, * for all; may be repeated.",
    )
    allowed_hosts: tuple[str, ...] = checked(
        (), _texts, repeated=str, flag="--allowed-host", metavar="NAME",
        help="Clients may call the server by this name, * for any; may be repeated. (default: any; localhost and "
        "addresses if it listens for this machine alone)",
    )  # fmt: skip
    trust_request_chat_template: bool = flag(
        False, help="Clients may send chat templates, which are programs."
    )
    generation_config: Literal["openai", "auto"] = choice(
        "openai",
        ("openai", "auto"),
        help="What requests leave out has defaults of: openai; auto: the model's generation_config.",
    )
    tool_call_parser: str | None = choice(
        None,
        TOOL_FORMATS,
        help="Format of tool calls. (default: the format that the chat template teaches)",
    )
    reasoning_parser: str | None = choice(
        None,
        REASONING_FORMATS,
        help=f"Format of thoughts: {', '.join(REASONING_FORMATS)}. (default: they stay in the answer)",
    )
    reasoning_budget: int = integer(
        -1,
        -1,
        math.inf,
        "-1 or more",
        help="Most tokens of thoughts, for --reasoning-parser; -1 is no limit. Requests may say otherwise.",
    )
    speculative_config: Mapping[str, Any] | None = checked(
        None,
        _speculative_config,
        metavar="JSON",
        help='Guess tokens from the text so far: {"method": "ngram", "num_speculative_tokens": 7}. (default: off)',
    )
    prefixes: tuple[str, ...] = checked(
        (), _texts, repeated=str, flag="--prefix", metavar="FILE",
        help="Prompts may begin with this file of `qsample prefix`; may be repeated.",
    )  # fmt: skip
    prefix_cache_dir: str | None = checked(
        None, metavar="DIR", help="Keep the prompts of ended requests here, also for a restart."
    )
    prefix_cache_bytes: int = integer(8 << 30, *_COUNT, help="Most bytes of that folder.")
    lora_dir: str | None = checked(
        None,
        _folder,
        metavar="DIR",
        help="Clients may load the adapters below it, and unload any. (default: none)",
    )
    max_cpu_loras: int = integer(
        64, *_COUNT, help="Most adapters in memory; a batch has the package's number of them."
    )
    request_timeout: float | None = checked(
        None, _seconds, help="Seconds an answer may take; then it is cut off. (default: any)"
    )
    drain_timeout: float = checked(
        30.0, _seconds, help="Seconds that running requests get on SIGTERM and ctrl-C."
    )
    limit_images_per_prompt: int = integer(8, *_COUNT_OR_ZERO, help="Images of a request.")
    max_image_bytes: int = integer(20 * 2**20, *_COUNT, help="Bytes of an image's file.")
    max_image_pixels: int = integer(40_000_000, *_COUNT, help="Pixels of an image.")
    image_cache_mib: int = integer(
        256,
        *_COUNT_OR_ZERO,
        help="MiB of image features to keep, for images that come again.",
    )
    allowed_media_domains: tuple[str, ...] = checked(
        (), _domains, repeated=str, metavar="HOST",
        help="Fetch the images of this host, over https; may be repeated. (default: none, data URLs alone)",
    )  # fmt: skip
    allowed_local_media_path: str | None = checked(
        None,
        _folder,
        metavar="DIR",
        help="Read images of file: addresses below this folder. (default: none)",
    )
    max_body_bytes: int | None = integer(
        None,
        *_COUNT,
        help=f"Bytes of a request. (default: {_MAX_BODY_BYTES >> 20} MiB; "
        f"with images {_MAX_IMAGE_BODY_BYTES >> 20} MiB)",
    )
    spinning: bool = flag(
        False, help="Threads wait busily: faster for a single stream, slower for many."
    )
    access_log: bool = flag(
        True, flag="--access-log/--no-access-log", help="Log each HTTP request."
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.models:
            raise ValueError("models is empty; give a package")
        if "" in self.models:
            raise ValueError("models has an empty name; give NAME=PACKAGE")
        if not isinstance(self.loras, Mapping):
            refuse("loras", self.loras, "a mapping from served names to adapters' folders")
        for name, remedy in (
            ("prefixes", "prefix_cache_dir, or one model"),
            ("loras", "lora_dir, or one model"),
        ):
            if getattr(self, name) and len(self.models) > 1:
                raise ValueError(
                    f"{name} are of one package, and several are served; give {remedy}"
                )
        if any(not key.strip() for key in self.api_keys):
            raise ValueError(
                "api_keys has an empty key; give another, or none for a server without keys"
            )

    def most_body(self, images: bool) -> int:
        """The largest size of a request's body, in bytes.

        Args:
            images: whether a served model reads images.
        """
        if self.max_body_bytes is not None:
            return self.max_body_bytes
        return _MAX_IMAGE_BODY_BYTES if images else _MAX_BODY_BYTES

    @property
    def session_options(self) -> dict[str, str]:
        """The configuration of ONNX Runtime's sessions, by its keys."""
        if self.spinning:
            return dict(self.session_config)
        return {
            "session.intra_op.allow_spinning": "0",
            "session.inter_op.allow_spinning": "0",
            **self.session_config,
        }
