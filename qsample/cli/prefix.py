"""`qsample prefix`: read the beginning of prompts once, into a file that engines and servers load."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from qsample.cli.common import (
    CHAT_FLAGS,
    Json,
    Lora,
    Provider,
    Threads,
    chat_options,
    check_jinja,
    open_exported,
    read_loras,
    read_text,
    with_flags,
)
from qsample.cli.terminal import format_size, note, progress

EXAMPLES: Final = (
    "[bold]Examples[/bold]\n\n"
    "qsample prefix qwen3-cpu rules.prefix --system-file rules.txt\n\n"
    "qsample prefix qwen3-cpu book.prefix --prompt-text book.txt\n\n"
    "qsample serve qwen3-cpu --prefix rules.prefix"
)


@with_flags(CHAT_FLAGS)
def prefix(
    ctx: typer.Context,
    package: Annotated[str, typer.Argument(metavar="PACKAGE", help="Package that is to use the file.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file, in safetensors' format.")],
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The text that prompts begin with.")] = None,
    prompt_text: Annotated[Path | None, typer.Option(metavar="FILE", help="A file with that text.")] = None,
    system_file: Annotated[Path | None, typer.Option(metavar="FILE", help="A file with the system prompt.")] = None,
    lora: Lora = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it is a file.")] = False,
    provider: Provider = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Read the beginning of prompts, and save its keys and values: prompts that begin with it continue from there."""
    from qsample.runtime import load

    system: str | None = ctx.params["system"]
    given = {"--prompt": prompt, "--prompt-text": prompt_text, "--system": system, "--system-file": system_file}
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        raise typer.BadParameter(f"{' and '.join(named) or 'no text'} given; give one of {', '.join(given)}")
    options = chat_options(ctx.params)
    if options and named[0] in ("--prompt", "--prompt-text"):
        raise typer.BadParameter(f"the options of chat templates go with --system, and {named[0]} was given")
    loras = read_loras(lora)
    if len(loras) > 1:
        raise typer.BadParameter(f"--lora was given {len(loras)} times; a prefix is of one adapter, or of none")
    if out.exists() and not overwrite:
        raise typer.BadParameter(f"{out} exists; give --overwrite to replace it, or another name")
    if prompt_text is not None:
        prompt = read_text(prompt_text, "--prompt-text")
    if system_file is not None:
        system = read_text(system_file, "--system-file")
    inputs: Any = prompt
    if system is not None:
        check_jinja()
        inputs = [{"role": "system", "content": system}]
    opened = open_exported(package, provider)
    model = load(opened.package.path, provider, intra_op_num_threads=threads)
    adapter = None
    for adapter, folder in loras.items():
        model.load_adapter(adapter, folder)
    with progress() as report:
        tokens = model.save_prefix(inputs, out, adapter=adapter, progress=report, **options)
    size = out.stat().st_size
    if as_json:
        json.dump({"prefix": str(out), "tokens": tokens, "bytes": size}, sys.stdout)
        print()
    else:
        typer.echo(str(out))
    note(f"{tokens} tokens, {format_size(size)}")
