"""`qsample generate`: text for prompts on stdout, figures on stderr."""

from __future__ import annotations

import json
import sys
import warnings
from typing import Annotated, Any, Final

import typer

from qsample.cli.common import Json, Provider, Threads, open_exported
from qsample.errors import QsampleError

EXAMPLES: Final = (
    "[bold]Examples[/bold]\n\n"
    "qsample generate -p 'And the LORD spake unto' --temperature 0.8 --seed 7\n\n"
    "qsample generate qwen3-cpu -p 'Why is the sky blue?' --chat --max-new-tokens 200\n\n"
    "qsample generate qwen3-cpu -p 'One' -p 'Two' --greedy --json\n\n"
    "echo 'In the beginning' | qsample generate --top-p 0.9"
)


def generate(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[PACKAGE_OR_MODEL]", help="Package, checkpoint or hub id. (default: the bundled model)"
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="Repeat it for a batch. (default: standard input)")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt into the model's chat template.")] = False,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Stop after this many.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens; 0 is off.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the nucleus of this mass; 1 is off.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Drop what is this much less likely than the best; 0 is off.")
    ] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="On prompt and sampled tokens; 1 is off.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="On sampled tokens; 0 is off.")] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="On sampled tokens, per occurrence; 0 is off.")
    ] = None,
    min_new_tokens: Annotated[int | None, typer.Option(min=0, help="No stop token before this many.")] = None,
    stop_id: Annotated[
        list[int] | None, typer.Option(help="Token id that ends a row, in place of the model's own; may be repeated.")
    ] = None,
    stop_string: Annotated[
        list[str] | None, typer.Option(help="Text that ends a row, and is cut off with what follows; may be repeated.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens. (default: a fresh one, shown)")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always take the likeliest token.")] = False,
    provider: Provider = None,
    threads: Threads = None,
    flush_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between two reads of the tokens. (default: 1 on the CPU, else 4)")
    ] = None,
    double_buffering: Annotated[
        bool,
        typer.Option("--double-buffering/--no-double-buffering", help="Read a token while the next one is computed."),
    ] = True,
    as_json: Json = False,
) -> None:
    """Generate text. One prompt streams; several form one batch. What is not given comes from the model."""
    from qsample.cli import output as cli_output
    from qsample.runtime import TextStreamer, load
    from qsample.sampling_params import SamplingParams

    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "min_new_tokens": min_new_tokens,
        "eos_token_id": stop_id or None,
        "seed": seed,
        "do_sample": False if greedy else None,
    }
    options = {name: value for name, value in options.items() if value is not None}
    try:
        SamplingParams.from_generation_config(None, **options)  # a wrong value is refused before the model is loaded
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    prompts = prompt or [_read_stdin()]
    opened = open_exported(model, provider)  # kept: a temporary export lives as long as this
    engine = load(opened.package.path, provider, intra_op_num_threads=threads, verify=False)
    inputs = [[{"role": "user", "content": text}] for text in prompts] if chat else prompts
    stops = engine.stop_strings(stop_string or None, None)
    streamer = (
        None if as_json or len(prompts) > 1 else TextStreamer(engine.tokenizer, skip_prompt=chat, stop_strings=stops)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the finish reasons say the same
        output = engine.generate(
            inputs,
            streamer=streamer,
            stop_strings=stops,
            flush_every=flush_every,
            double_buffering=double_buffering,
            **options,
        )
    if as_json:
        typer.echo(json.dumps(cli_output.generation(prompts, output), ensure_ascii=False, indent=2))
    elif streamer is None:
        cli_output.show_generation(prompts, output, with_prompt=not chat)
    cli_output.note(cli_output.figures(output))
    if "invalid" in output.finish_reasons:
        raise QsampleError("the model gave NaN or infinite logits, and a row ended there")


def _read_stdin() -> str:
    text = "" if sys.stdin.isatty() else sys.stdin.read().rstrip("\n")
    if not text:
        raise typer.BadParameter("no prompt; give one with -p, or on standard input")
    return text
