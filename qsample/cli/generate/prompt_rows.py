"""The rows of a `--prompt-file`: what stands in a line, and a fingerprint of all that decides about its tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

import typer

from qsample.cli.common import read_text
from qsample.sampling_params import SAMPLING_FIELDS

_JSON_LINES: Final = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt of the file. error: what is wrong with its line, if anything. told: what the file and the command
    line say, for the fingerprint."""

    id: Any
    inputs: Any
    options: Mapping[str, Any]
    error: str | None = None
    told: Any = field(default=None, repr=False)
    fingerprint: str = ""

    @property
    def is_chat(self) -> bool:
        return self.error is None and isinstance(self.inputs, list) and not _are_ids(self.inputs)


def read_rows(
    path: Path, options: Mapping[str, Any], chat: Mapping[str, Any], *, as_chat: bool, system: str | None
) -> list[Row]:
    """The rows of a file: a line of text each, or a JSON object with prompt or messages, id, and parameters of its own.

    options, chat: for rows that do not say otherwise. as_chat: texts are what a user says. Raises typer.BadParameter
    where the file cannot be read or is empty, and where `chat` or `system` is of no use to any row.
    """
    rows: list[Row] = []
    as_json, text = path.suffix.lower() in _JSON_LINES, read_text(path, "--prompt-file")
    if as_json and _is_array(text):
        raise typer.BadParameter(
            f"--prompt-file {path} is one JSON array; give its objects a line each, as `jq -c '.[]'` writes them"
        )
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        content: dict[str, Any] = {"prompt": line.rstrip("\r")}
        fault = None
        if as_json:
            content, fault = _parse(line)
        own = {name: value for name, value in content.items() if name not in ("id", "metadata", "prompt", "messages")}
        inputs: Any = content.get("prompt")
        is_chat = "messages" in content
        if is_chat:
            inputs = content["messages"]
        elif as_chat:
            inputs, is_chat = [{"role": "user", "content": inputs}], True
        if is_chat and system is not None and not (inputs and inputs[0].get("role") == "system"):
            inputs = [{"role": "system", "content": system}, *inputs]
        merged = _merge({**options, **chat} if is_chat else options, own)
        if merged.get("seed") is None and options.get("seed") is not None:
            merged["seed"] = (options["seed"] + len(rows)) % 2**63
        name = content.get("id", number)
        rows.append(Row(name, inputs, merged, fault, line if fault else [name, inputs, merged]))
    if (chat or system is not None) and not any(row.is_chat or row.error for row in rows):
        raise typer.BadParameter(
            f"no row of --prompt-file {path} is a conversation, so --system, --chat-template, --chat-template-kwargs "
            "and --thinking would change nothing; give --chat, which makes every prompt what a user says, or leave "
            "them out"
        )
    return rows


def with_fingerprints(rows: list[Row], settings: Any) -> list[Row]:
    """settings: JSON-ready; what else decides about the tokens."""

    def fingerprint(row: Row) -> str:
        told = json.dumps([row.told, settings], sort_keys=True, default=str)
        return hashlib.sha256(told.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    return [replace(row, fingerprint=fingerprint(row)) for row in rows]


def _is_array(text: str) -> bool:
    if not text.lstrip().startswith("["):
        return False
    try:
        return isinstance(json.loads(text), list)
    except (ValueError, RecursionError):
        return False


def _parse(line: str) -> tuple[dict[str, Any], str | None]:
    """The object of a line; {} and what is wrong with it."""
    from qsample.sampling_params import SamplingParams
    from qsample.text.chat import ChatOptions

    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        return {}, f"the line is no JSON: {error}"
    if not isinstance(content, dict):
        return {}, 'the line is no JSON object; give {"prompt": "..."} or {"messages": [...]}'
    named = {name: content[name] for name in ("id", "metadata") if name in content}
    given = [name for name in ("prompt", "messages") if name in content]
    if len(given) != 1:
        return (
            named,
            f"the line has {' and '.join(given) or 'neither prompt nor messages'}; give one of prompt, messages",
        )
    prompt, messages = content.get("prompt"), content.get("messages", [])
    if given == ["prompt"] and not isinstance(prompt, str) and not _are_ids(prompt):
        return named, f"prompt is {prompt!r:.60}; give one text, or token ids"
    if given == ["messages"] and not (isinstance(messages, list) and messages and all(map(_is_object, messages))):
        return named, f'messages is {messages!r:.60}; give [{{"role": "user", "content": "..."}}]'
    known = {"id", "metadata", "prompt", "messages", "do_sample", "stop_strings"}
    known |= {item.name for item in fields(SamplingParams)} | {item.name for item in fields(ChatOptions)}
    unknown = sorted(content.keys() - known)
    if unknown:
        return named, f"the line has {', '.join(unknown)}, which is no parameter; what is yours goes into metadata"
    bias = content.get("logit_bias")
    if isinstance(bias, dict) and all(key.isdecimal() for key in bias):  # JSON's keys are texts
        content["logit_bias"] = {int(key): value for key, value in bias.items()}
    return content, None


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _merge(options: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """`own` on top of `options`, without what it contradicts."""
    dropped: set[str] = set()
    if own.get("do_sample") is False or own.get("temperature") == 0:
        dropped |= {*SAMPLING_FIELDS, "do_sample"}
    elif any(own.get(name) is not None for name in SAMPLING_FIELDS):
        dropped.add("do_sample")
    for total, new in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
        if total in own:
            dropped.add(new)
    dropped.add("seed")  # of row 0; each has its own
    return {name: value for name, value in options.items() if name not in dropped} | dict(own)
