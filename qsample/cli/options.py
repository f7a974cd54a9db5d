"""Options of more than one command, and what they say to the Python API."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

MaxNewTokens = Annotated[int | None, typer.Option(min=1, help="Stop after this many.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy.")]
TopK = Annotated[int | None, typer.Option(help="Keep the k likeliest tokens; 0 is off.")]
TopP = Annotated[float | None, typer.Option(help="Keep the nucleus of this mass; 1 is off.")]
MinP = Annotated[float | None, typer.Option(help="Keep what has this share of the likeliest's probability; 0 is off.")]
RepetitionPenalty = Annotated[float | None, typer.Option(help="On prompt and sampled tokens; 1 is off.")]
PresencePenalty = Annotated[float | None, typer.Option(help="On sampled tokens; 0 is off.")]
FrequencyPenalty = Annotated[float | None, typer.Option(help="On sampled tokens, per occurrence; 0 is off.")]
MinNewTokens = Annotated[int | None, typer.Option(min=0, help="No stop token before this many.")]
StopId = Annotated[
    list[int] | None, typer.Option(help="Token id that ends a row, in place of the model's own; may be repeated.")
]
StopString = Annotated[
    list[str] | None, typer.Option(help="Text that ends a row, and is cut off with what follows; may be repeated.")
]
Seed = Annotated[int | None, typer.Option(help="Same seed, same tokens. (default: a fresh one, shown)")]
Greedy = Annotated[bool, typer.Option("--greedy", help="Always take the likeliest token.")]
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

_SAMPLING: Final = (
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_new_tokens",
    "seed",
)


def sampling_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a command line says of sampling, as options of `generate`. given: all its parameters, by name.

    Raises typer.BadParameter for a wrong value, before anything is loaded.
    """
    from qsample.sampling_params import SamplingParams

    options = {name: given[name] for name in _SAMPLING if given[name] is not None}
    if given["stop_id"]:
        options["eos_token_id"] = list(given["stop_id"])
    if given["greedy"]:
        options["do_sample"] = False
    try:
        SamplingParams.from_generation_config(None, **options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return options


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
    from qsample.runtime.text.template_sandbox import compile_template

    compile_template("{{ messages }}")


def context_full(limit: int, what: str) -> str:
    """What to say where a context was too short. what: it ended, for the sentence."""
    return (
        f"the context of {limit} tokens is full, which {what}; compile with a larger --ctx-len where the model has "
        "more, or give less"
    )
