"""Options of more than one command, and what they say to the Python API."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from qsample.contract import EXTRA_PARAMETERS, FILTER_ORDERS
from qsample.errors import unknown

CtxLen = Annotated[
    int | None,
    typer.Option(min=2, help="Tokens that a row holds, for a portable package. (default: the model's, at most 4096)"),
]
CtxLenAsNeeded = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Tokens that a row holds, for a portable package. (default: what it needs; for --prompt-file the model's, "
        "at most 4096)",
    ),
]
System = Annotated[str | None, typer.Option(help="System prompt, in front of every conversation.")]
Template = Annotated[
    str | None,
    typer.Option("--chat-template", metavar="FILE", help="Jinja file, or the name of one of the package's templates."),
]
TemplateArguments = Annotated[
    str | None,
    typer.Option("--chat-template-kwargs", metavar="JSON", help="What else the template reads, as a JSON object."),
]
Thinking = Annotated[
    bool | None, typer.Option("--thinking/--no-thinking", help="enable_thinking, for templates that read it.")
]
IncludeSampler = Annotated[bool, typer.Option("--sampler/--no-sampler", help="Bake the sampler in, or return logits.")]
ReturnPdfs = Annotated[bool, typer.Option("--return-pdfs", help="Also return the sampled distribution, `probs`.")]
Logprobs = Annotated[bool, typer.Option("--logprobs", help="Also return each token's log-probability.")]
TopLogprobs = Annotated[int, typer.Option(min=0, metavar="M", help="Also return the M likeliest tokens.")]
LogitBias = Annotated[bool, typer.Option("--logit-bias", help="Take a bias on chosen tokens.")]
AllowedTokens = Annotated[bool, typer.Option("--allowed-tokens", help="Take a token mask (guided decoding).")]
Filters = Annotated[
    list[str] | None,
    typer.Option(
        "--filter", metavar="NAME", help=f"Also have {', '.join(EXTRA_PARAMETERS)}; may be repeated, or a,b,c."
    ),
]
FilterOrder = Annotated[
    str, typer.Option(metavar="|".join(FILTER_ORDERS), help="Temperature before all filters, or last.")
]
SeedInput = Annotated[bool, typer.Option("--seed-input", help="Take each row's seed in place of a noise buffer.")]


def filter_names(given: Sequence[str] | None) -> tuple[str, ...]:
    """The names of every --filter, which may have several with commas between them."""
    names = tuple(name.strip() for item in given or () for name in item.split(","))
    if unknown_names := [name for name in names if name not in EXTRA_PARAMETERS]:
        raise typer.BadParameter(unknown("--filter names", unknown_names[0], EXTRA_PARAMETERS))
    return names


def chat_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a command line says of chat templates, as options of `generate`."""
    options: dict[str, Any] = {}
    if (template := given["chat_template"]) is not None:
        options["chat_template"] = read_template(template)
    arguments: Any = {}
    if (text := given["chat_template_kwargs"]) is not None:
        try:
            arguments = json.loads(text)
        except ValueError as error:
            raise typer.BadParameter(f"--chat-template-kwargs is no JSON ({error}): {text:.60}") from None
        if not isinstance(arguments, dict):
            raise typer.BadParameter(f'--chat-template-kwargs is {text:.60}; give an object, {{"name": value}}')
    if given["thinking"] is not None:
        arguments["enable_thinking"] = given["thinking"]
    return options | ({"chat_template_kwargs": arguments} if arguments else {})


def read_template(template: str) -> str:
    """The text of a file; or the name of a template, where there is no such file."""
    path = Path(template)
    if not os.path.isfile(path):
        if path.suffix or "/" in template or "{" in template or os.path.exists(path):
            raise typer.BadParameter(f"--chat-template {template:.60} is no file; give one, or a template's name")
        return template
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot read --chat-template {template}: {error}") from None


def check_jinja() -> None:
    """Say what a chat needs before a model is loaded."""
    from qsample.text.chat import compile_template

    compile_template("{{ messages }}")


def context_full(limit: int, what: str) -> str:
    """What to say where a context was too short. what: it ended, for the sentence."""
    return (
        f"the context of {limit} tokens is full, which {what}; compile with a larger --ctx-len where the model has "
        "more, or give less"
    )
