"""`qsample generate`: text for prompts on stdout, figures on stderr."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from qsample.cli.commands import CliCommand, Panel
from qsample.cli.common import (
    CHAT_FLAGS,
    FORM_FLAGS,
    LOAD_FLAGS,
    SAMPLING_FLAGS,
    Images,
    Json,
    chat_options,
    check_jinja,
    chosen_adapter,
    context_full,
    load_given,
    open_given,
    read_loras,
    read_text,
    sampling_options,
    with_flags,
    with_images_before,
)
from qsample.cli.prompt_file import (
    check_output,
    generate_file,
    read_lines,
    rows_of,
)
from qsample.cli.terminal import AlreadyPrintedError, console, counted, finite, note
from qsample.errors import ArgumentError, QsampleError

if TYPE_CHECKING:
    from qsample.contract.arrays import Array
    from qsample.package.package import Package
    from qsample.request.grammar import Form
    from qsample.runtime import CausalLM, GenerateOutput, Step

_SHOWN: Final = (
    "logprobs",
    "top_logprob_ids",
    "top_logprobs",
)  # in JSON, if the package returns them
_AS_A_CHAT: Final = (
    "answering as a chat, with the model's chat template; --raw continues the text itself"
)
EXAMPLES: Final = (
    "[bold]Examples[/bold]\n\n"
    "qsample generate -p 'And the LORD spake unto' --temperature 0.8 --seed 7\n\n"
    "qsample generate qwen3-cpu -p 'Why is the sky blue?' --max-new-tokens 200\n\n"
    "qsample generate qwen3-cpu -p 'One' -p 'Two' --greedy --json\n\n"
    "qsample generate qwen3-cpu -p 'The sky is' --raw\n\n"
    "qsample generate qwen-vl-cpu -p 'What is this?' --image cat.jpg\n\n"
    "qsample generate qwen3-cpu --prompt-file prompts.jsonl --output answers.jsonl\n\n"
    "echo 'In the beginning' | qsample generate --top-p 0.9"
)


@with_flags({**FORM_FLAGS, **CHAT_FLAGS, **LOAD_FLAGS, **SAMPLING_FLAGS})
def generate(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[PACKAGE_OR_MODEL]",
            help="Package, checkpoint or hub id. (default: the bundled model)",
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="Repeat it for a batch. (default: standard input)"),
    ] = None,
    image: Images = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A prompt a line; or JSON lines (.jsonl) of prompt or messages, id, parameters.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON lines for --prompt-file; rows in it are not done again. (default: stdout)",
        ),
    ] = None,
    retry_errors: Annotated[
        bool,
        typer.Option(
            "--retry-errors", help="Do the rows again whose line in --output has an error."
        ),
    ] = False,
    slots: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Rows at once, for --prompt-file. (default: the number it was compiled for, else 8)",
        ),
    ] = None,
    num_return_sequences: Annotated[
        int,
        typer.Option("--num-return-sequences", min=1, max=128, help="Answers to each --prompt."),
    ] = 1,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw",
            help="Continue the text of a prompt itself, although the model has a chat template.",
        ),
    ] = False,
    ctx_len: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Tokens that a row holds, for a portable package or a checkpoint. (default: as many as a portable "
            "package needs, otherwise the model's, at most 4096)",
        ),
    ] = None,
    flush_every: Annotated[
        int | None,
        typer.Option(
            min=1, help="Steps between two reads of the tokens. (default: 1 on the CPU, else 4)"
        ),
    ] = None,
    double_buffering: Annotated[
        bool,
        typer.Option(
            "--double-buffering/--no-double-buffering",
            help="Read a token while the next is computed.",
        ),
    ] = True,
    as_json: Json = False,
) -> None:
    """Generate text. If the model has a chat template, a prompt is a user's message; without one, it is continued.

    A single prompt streams; several form a batch. The model has the defaults.
    """
    given, system, loras = ctx.params, ctx.params["system"], read_loras(ctx.params["lora"])
    options, chat_settings = chosen_adapter(sampling_options(given), loras), chat_options(given)
    if prompt_file is not None and prompt:
        raise typer.BadParameter("--prompt and --prompt-file were given; give either")
    for name, value in (("--output", output), ("--slots", slots)):
        if value is not None and prompt_file is None:
            raise typer.BadParameter(f"{name} goes with --prompt-file")
    if image and (prompt_file is not None or len(prompt or ()) > 1):
        raise typer.BadParameter(
            '--image goes with a single --prompt; a line of --prompt-file has "images": [...]'
        )
    if num_return_sequences > 1 and prompt_file is not None:
        raise typer.BadParameter("--num-return-sequences goes with --prompt")
    if retry_errors and output is None:
        raise typer.BadParameter("--retry-errors goes with --output")
    asks_for_chat = bool(chat_settings) or system is not None
    if raw and asks_for_chat:
        raise typer.BadParameter(
            "--raw goes without a chat template, and --system, --chat-template, --chat-template-kwargs and --thinking "
            "belong to it; give either"
        )
    form = _form({f"--{name.replace('_', '-')}": given[name] for name in FORM_FLAGS})
    lines = []
    if prompt_file is not None:  # before a checkpoint is exported
        lines = read_lines(prompt_file)
        check_output(output, prompt_file)
    running = {"flush_every": flush_every, "double_buffering": double_buffering}
    prompts = prompt or ([] if prompt_file else [_read_stdin()])
    opened = open_given(
        model, given, allowed_tokens=form is not None
    )  # stays in the cache as long as this
    if form is not None and not opened.package.interface.features.allowed_tokens:
        raise QsampleError(
            "--json-schema, --regex and --grammar need a package that was exported with --allowed-tokens or "
            "--for-serving, or a checkpoint; export the model again"
        )
    chat = asks_for_chat or (not raw and _has_chat_template(opened.package))
    by_default = chat and not asks_for_chat
    if prompt_file is None:
        inputs: list[Any] = list(prompts)
        if chat:
            check_jinja()
            head = [] if system is None else [{"role": "system", "content": system}]
            inputs = [
                [*head, {"role": "user", "content": with_images_before(text, image or ())}]
                for text in prompts
            ]
        loaded = load_given(opened, given)
        if by_default:
            note(_AS_A_CHAT)
        _generate_prompts(
            loaded,
            prompts,
            inputs,
            chat=chat,
            as_json=as_json,
            form=form,
            **({"images": image} if image and not chat else {}),
            num_return_sequences=num_return_sequences,
            **options,
            **chat_settings,
            **running,
        )
        return
    rows = rows_of(lines, options, chat_settings, as_chat=chat, system=system)
    if any(row.is_chat for row in rows):
        check_jinja()
    elif asks_for_chat and not any(row.error for row in rows):
        raise typer.BadParameter(
            f"each prompt of --prompt-file {prompt_file} is token ids, so --system, --chat-template, "
            "--chat-template-kwargs and --thinking would change nothing; leave them out"
        )
    if by_default and any(line.is_text for line in lines):
        note(_AS_A_CHAT)
    generate_file(
        partial(load_given, opened, given),
        rows,
        output,
        slots=slots,
        retry_errors=retry_errors,
        form=form,
        **running,
    )


def _has_chat_template(package: Package) -> bool:
    from qsample.text.chat import ChatTemplates
    from qsample.text.tokenizer import TOKENIZER_FILE

    return package.has(TOKENIZER_FILE) and bool(ChatTemplates.of(package).templates)


def _form(given: Mapping[str, str | None]) -> Form | None:
    """The form that answers have to follow. Raises typer.BadParameter for several, and for an invalid one."""
    named = {option: value for option, value in given.items() if value is not None}
    if not named:
        return None
    if len(named) > 1:
        raise typer.BadParameter(f"{' and '.join(named)} were given; give one of them")
    from qsample.request.grammar import Form, check_form

    ((option, value),) = named.items()
    is_text = (
        option == "--regex" or value.lstrip().startswith("{") or "start:" in value or "::=" in value
    )
    form = Form(option[2:].replace("-", "_"), value if is_text else read_text(Path(value), option))  # type: ignore[arg-type]
    try:
        check_form(form)
    except ArgumentError as error:
        raise typer.BadParameter(f"{option}: {error}") from None
    return form


def _guide(model: CausalLM, form: Form, rows: int) -> Callable[[Step | None, Array], None]:
    """The guide of a batch."""
    from qsample.request.grammar import GrammarGuide, Grammars

    compiled = Grammars(model).compiled(form)
    guides = [GrammarGuide(compiled, row) for row in range(rows)]

    def guide(step: Step | None, mask: Array) -> None:
        for row, own in enumerate(guides):
            own(step, mask[row : row + 1])

    return guide


def _generate_prompts(
    model: CausalLM,
    prompts: list[str],
    inputs: list[Any],
    *,
    chat: bool,
    as_json: bool,
    form: Form | None,
    **options: Any,
) -> None:
    from qsample.runtime import TextStreamer

    if model.tokenizer is None:
        raise QsampleError(
            'the package has no tokenizer, so it takes no text; give token ids, as "prompt" of a line in a '
            "--prompt-file, or export the model with a tokenizer"
        )
    prompts = [prompt for prompt in prompts for _ in range(options["num_return_sequences"])]
    if form is not None:
        options["allowed_tokens"] = _guide(model, form, len(prompts))
    stops = options.pop("stop_strings", None) or model.generation_config.stop_strings
    images = options.get("images")
    streamer = (
        None
        if as_json or len(prompts) > 1
        else TextStreamer(model.tokenizer, skip_prompt=chat or bool(images), stop_strings=stops)
    )
    if images and streamer is not None:
        print(prompts[0], end="", flush=True)  # without its placeholders
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the finish reasons say the same
        there = {spec.name for spec in model.interface.token_outputs}
        shown = [name for name in _SHOWN if as_json and name in there]
        done = model.generate(
            inputs, streamer=streamer, stop_strings=stops, outputs=shown, **options
        )
    if as_json:
        typer.echo(json.dumps(_as_json(prompts, done), ensure_ascii=False, indent=2))
    elif streamer is None:
        _show(prompts, done, with_prompt=not chat)
    note(_figures(done))
    limit = model.capacity(2**30)  # the largest
    used = map(sum, zip(done.prompt_lengths, map(len, done.token_ids), strict=True))
    full = [
        row
        for row, count in enumerate(used, 1)
        if done.finish_reasons[row - 1] == "length" and count >= limit
    ]
    if full:
        note(context_full(limit, f"ended {len(full)} of {len(prompts)} rows"))
    if "invalid" in done.finish_reasons:
        kind = AlreadyPrintedError if as_json else QsampleError
        raise kind("the model gave NaN or infinite logits, and a row ended there")


def _read_stdin() -> str:
    try:
        text = "" if sys.stdin.isatty() else sys.stdin.read().rstrip("\n")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(
            f"standard input is not valid {error.encoding.upper()} from byte {error.start} on; convert it, or give -p"
        ) from None
    if not text:
        raise typer.BadParameter("no prompt; give -p, or standard input")
    return text


def _as_json(prompts: Sequence[str], output: GenerateOutput) -> dict[str, Any]:
    """A JSON-ready dict with an entry of `results` for each prompt."""
    results: list[dict[str, Any]] = []
    for row, prompt in enumerate(prompts):
        new = output.token_ids[row]
        entry: dict[str, Any] = {
            "prompt": prompt,
            "text": output.texts[row] if output.texts is not None else None,
            "token_ids": new,
            "finish_reason": output.finish_reasons[row],
            "seed": output.seeds[row],
            "prompt_tokens": output.prompt_lengths[row],
        }
        for name in _SHOWN:
            values = getattr(output, name)
            if values is not None:
                entry[name] = finite(values[row, : len(new)].tolist())
        results.append(entry)
    return {"results": results, "timing": asdict(output.timing)}


def _show(prompts: Sequence[str], output: GenerateOutput, *, with_prompt: bool) -> None:
    """Print a batch on stdout, a section for each prompt."""
    screen = console()
    for row, prompt in enumerate(prompts):
        count, reason = len(output.token_ids[row]), output.finish_reasons[row]
        screen.rule(
            f"{row + 1}: {counted(count, 'token')}, {reason}, seed {output.seeds[row]}",
            align="left",
            style="dim",
        )
        print((prompt if with_prompt else "") + (output.texts or [])[row])


def _figures(output: GenerateOutput) -> str:
    """The number of tokens, the speed and the seeds."""
    count, timing = sum(map(len, output.token_ids)), output.timing
    seconds = timing.prefill_seconds + timing.decode_seconds
    seeds = ", ".join(map(str, output.seeds))
    guessed = f", {timing.drafts.tokens_per_step:.2f} a step" if timing.drafts.num_drafts else ""
    return f"{counted(count, 'token')} in {seconds:.2f} s, {count / seconds:.0f} a second{guessed}; seed {seeds}"


GENERATE: Final = CliCommand(generate, Panel.RUN, EXAMPLES)
