"""`qsample generate`: text for prompts on stdout, figures on stderr."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from qsample.cli.commands import CliCommand, Panel
from qsample.cli.common import (
    ChatMode,
    Images,
    Json,
    SamplingOptions,
    TemplateOptions,
    check_jinja,
    context_full,
    plain_text,
    with_adapter,
)
from qsample.cli.forms import FormOptions
from qsample.cli.opening import LoadOptions
from qsample.cli.option_groups import with_option_groups
from qsample.cli.prompt_file import (
    Line,
    PromptFileOptions,
    RunOptions,
    generate_file,
    rows_of,
)
from qsample.cli.terminal import AlreadyPrintedError, console, counted, finite, note
from qsample.errors import QsampleError

if TYPE_CHECKING:
    from qsample.models.model import PackagedModel
    from qsample.package.package import Package
    from qsample.request.grammar import Form
    from qsample.runtime import CausalLM, GenerateOutput, TextStreamer

# The outputs of a package that the JSON has, if the package returns them.
_OUTPUTS_IN_JSON: Final = ("logprobs", "top_logprob_ids", "top_logprobs")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """The prompts, and the number and kind of their answers."""

    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="Repeat it for a batch. (default: standard input)"),
    ] = None
    image: Images = None
    file: PromptFileOptions
    num_return_sequences: Annotated[
        int,
        typer.Option("--num-return-sequences", min=1, max=128, help="Answers to each --prompt."),
    ] = 1
    raw: Annotated[
        bool,
        typer.Option(
            "--raw",
            help="Continue the text of a prompt itself, although the model has a chat template.",
        ),
    ] = False

    def check(self) -> None:
        """Raise typer.BadParameter for options that contradict each other."""
        has_file = self.file.prompt_file is not None
        if has_file and self.prompt:
            raise typer.BadParameter("--prompt and --prompt-file were given; give either")
        self.file.check()
        if self.image and (has_file or len(self.prompt or ()) > 1):
            raise typer.BadParameter(
                '--image goes with a single --prompt; a line of --prompt-file has "images": [...]'
            )
        if self.num_return_sequences > 1 and has_file:
            raise typer.BadParameter("--num-return-sequences goes with --prompt")

    def texts(self) -> list[str]:
        """The prompts of the command line, or of standard input; none if there is a prompt file.

        Raises:
            typer.BadParameter: there is no prompt.
        """
        if self.file.prompt_file is not None:
            return []
        return self.prompt or [_read_stdin()]


@with_option_groups
def generate(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[PACKAGE_OR_MODEL]",
            help="Package, checkpoint or hub id. (default: the bundled model)",
        ),
    ] = None,
    *,
    prompts: PromptOptions,
    running: RunOptions,
    as_json: Json = False,
    form: FormOptions,
    template: TemplateOptions,
    loading: LoadOptions,
    sampling: SamplingOptions,
) -> None:
    """Generate text. If the model has a chat template, a prompt is a user's message; without one,
    it is continued.

    A single prompt streams; several form a batch. The model has the defaults.
    """
    arguments = with_adapter(sampling.arguments(), loading.loras())
    chat = ChatMode.of(template)
    prompts.check()
    if prompts.raw and chat.asked_for:
        raise typer.BadParameter(
            "--raw goes without a chat template, and --system, --chat-template, --chat-template-kwargs and --thinking "
            "belong to it; give either"
        )
    answer_form = form.form()
    # The prompts are read before a checkpoint is exported, because that takes long.
    lines = prompts.file.lines()
    texts = prompts.texts()
    opened = loading.open(model, ctx_len=running.ctx_len, has_form=answer_form is not None)
    if answer_form is not None:
        _check_takes_forms(opened.package)
    if not prompts.raw and _has_chat_template(opened.package):
        chat = chat.enable()
    run = _Run(
        opened=opened,
        loading=loading,
        running=running,
        arguments=arguments,
        chat=chat,
        form=answer_form,
    )
    if prompts.file.prompt_file is None:
        run.answer_prompts(prompts, texts, as_json=as_json)
    else:
        run.answer_file(prompts.file, lines)


def _check_takes_forms(package: Package) -> None:
    """Raise QsampleError if the answers of a package cannot follow a form."""
    features = package.interface.features
    if not (features.grammars or features.allowed_tokens):
        raise QsampleError(
            "--json-schema, --regex, --choice and --grammar need a package that was exported with --grammars, "
            "--allowed-tokens or --for-serving, or a checkpoint; export the model again"
        )


def _has_chat_template(package: Package) -> bool:
    """Whether a package can turn messages into tokens."""
    from qsample.request.text.chat import ChatTemplates
    from qsample.request.text.tokenizer import TOKENIZER_FILE

    return package.has(TOKENIZER_FILE) and bool(ChatTemplates.of(package).templates)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A run of the command, after its options were checked.

    Attributes:
        opened: the package. It stays in the cache as long as this object.
        loading: the options of loading the package.
        running: the options of computing its tokens.
        arguments: the sampling options and the adapter, as arguments of `CausalLM.generate`.
        chat: whether the texts of prompts are messages of a user.
        form: the form of all answers.
    """

    opened: PackagedModel
    loading: LoadOptions
    running: RunOptions
    arguments: dict[str, Any]
    chat: ChatMode
    form: Form | None

    def load(self) -> CausalLM:
        """Load the package with its adapters."""
        return self.loading.load(self.opened, ctx_len=self.running.ctx_len)

    def answer_prompts(self, prompts: PromptOptions, texts: list[str], *, as_json: bool) -> None:
        """Answer the prompts of the command line as a batch."""
        if self.chat.enabled:
            check_jinja()
        model = self.load()
        if self.chat.is_default:
            note(_AS_A_CHAT)
        if model.tokenizer is None:
            raise QsampleError(
                'the package has no tokenizer, so it takes no text; give token ids, as "prompt" of a line in a '
                "--prompt-file, or export the model with a tokenizer"
            )
        # Each answer has the text of its prompt.
        repeated = [text for text in texts for _ in range(prompts.num_return_sequences)]
        inputs = self._inputs(texts, prompts.image or [])
        arguments = self._arguments(model, prompts)
        if self.form is not None:
            from qsample.request.structured.grammars import Wish

            arguments["grammar"] = model.grammars.prepared(Wish(self.form)).grammar
        if as_json:
            output = _answer(model, inputs, arguments, outputs=_json_outputs(model))
            document = _as_json(repeated, output)
            typer.echo(json.dumps(document, ensure_ascii=False, indent=2))
        elif len(repeated) > 1:
            output = _answer(model, inputs, arguments)
            _show(repeated, output, with_prompt=not self.chat.enabled)
        else:
            output = self._stream(model, inputs, arguments, texts[0])
        _report(model, output, as_json=as_json)

    def _inputs(self, texts: list[str], images: Sequence[Path]) -> list[Any]:
        """The texts or conversations that `CausalLM.generate` answers."""
        if not self.chat.enabled:
            return list(texts)
        return [self.chat.messages(text, images) for text in texts]

    def _arguments(self, model: CausalLM, prompts: PromptOptions) -> dict[str, Any]:
        """The further arguments of `CausalLM.generate`."""
        stop_strings = self.arguments.get("stop_strings") or model.applied_settings.get(
            "stop_strings"
        )
        arguments = {
            **self.arguments,
            **self.chat.arguments,
            "stop_strings": stop_strings,
            "num_return_sequences": prompts.num_return_sequences,
            "flush_every": self.running.flush_every,
            "double_buffering": self.running.double_buffering,
        }
        if prompts.image and not self.chat.enabled:
            arguments["images"] = prompts.image
        return arguments

    def _stream(
        self, model: CausalLM, inputs: list[Any], arguments: dict[str, Any], text: str
    ) -> GenerateOutput:
        """Answer a single prompt, and print the text of the answer while it is generated.

        Args:
            text: the text of the prompt. It is printed before a continuation.
        """
        from qsample.runtime import TextStreamer

        assert model.tokenizer is not None
        # The model reads placeholders in place of images; the prompt is printed without them.
        has_placeholders = "images" in arguments
        if has_placeholders:
            print(text, end="", flush=True)
        streamer = TextStreamer(
            model.tokenizer,
            skip_prompt=self.chat.enabled or has_placeholders,
            stop_strings=arguments["stop_strings"],
        )
        return _answer(model, inputs, arguments, streamer=streamer)

    def answer_file(self, file: PromptFileOptions, lines: list[Line]) -> None:
        """Answer the lines of a prompt file."""
        rows = rows_of(lines, self.arguments, self.chat)
        if any(row.is_chat for row in rows):
            check_jinja()
        elif self.chat.asked_for and not any(row.error is not None for row in rows):
            raise typer.BadParameter(
                f"each prompt of --prompt-file {file.prompt_file} is token ids, so --system, --chat-template, "
                "--chat-template-kwargs and --thinking would change nothing; leave them out"
            )
        if self.chat.is_default and any(line.is_text for line in lines):
            note(_AS_A_CHAT)
        generate_file(self.load, rows, file, self.running, self.form)


def _answer(
    model: CausalLM,
    inputs: list[Any],
    arguments: dict[str, Any],
    *,
    outputs: Sequence[str] = (),
    streamer: TextStreamer | None = None,
) -> GenerateOutput:
    """Generate a batch without warnings, because the finish reasons of its rows say the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output: GenerateOutput = model.generate(
            inputs, streamer=streamer, outputs=list(outputs), **arguments
        )
    return output


def _json_outputs(model: CausalLM) -> list[str]:
    """The optional outputs of a package that the JSON has."""
    returned = {spec.name for spec in model.interface.token_outputs}
    return [name for name in _OUTPUTS_IN_JSON if name in returned]


def _report(model: CausalLM, output: GenerateOutput, *, as_json: bool) -> None:
    """Print the figures of a batch on stderr, and remarks on rows that ended early.

    Raises:
        QsampleError: a row ended because its logits were NaN or infinite.
    """
    note(_figures(output))
    largest_capacity = model.capacity(2**30)
    full_rows = 0
    for row, reason in enumerate(output.finish_reasons):
        length = output.prompt_lengths[row] + len(output.token_ids[row])
        if reason == "length" and length >= largest_capacity:
            full_rows += 1
    if full_rows > 0:
        total = len(output.finish_reasons)
        note(context_full(largest_capacity, f"ended {full_rows} of {total} rows"))
    if "invalid" in output.finish_reasons:
        kind = AlreadyPrintedError if as_json else QsampleError
        raise kind("the model gave NaN or infinite logits, and a row ended there")


def _read_stdin() -> str:
    """The text of standard input. Raises typer.BadParameter if it is a terminal, or empty."""
    try:
        text = "" if sys.stdin.isatty() else plain_text(sys.stdin.read()).rstrip("\n")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(
            f"standard input is not valid {error.encoding.upper()} from byte {error.start} on; convert it, or give -p"
        ) from None
    if not text:
        raise typer.BadParameter("no prompt; give -p, or standard input")
    return text


def _as_json(prompts: Sequence[str], output: GenerateOutput) -> dict[str, Any]:
    """The document for --json: a result for each answer, and the times.

    Args:
        prompts: the text of each answer's prompt.
    """
    results: list[dict[str, Any]] = []
    for row, prompt in enumerate(prompts):
        token_ids = output.token_ids[row]
        entry: dict[str, Any] = {
            "prompt": prompt,
            "text": output.texts[row] if output.texts is not None else None,
            "token_ids": token_ids,
            "finish_reason": output.finish_reasons[row],
            "seed": output.seeds[row],
            "prompt_tokens": output.prompt_lengths[row],
        }
        for name in _OUTPUTS_IN_JSON:
            values = getattr(output, name)
            if values is not None:
                entry[name] = finite(values[row, : len(token_ids)].tolist())
        results.append(entry)
    return {"results": results, "timing": asdict(output.timing)}


def _show(prompts: Sequence[str], output: GenerateOutput, *, with_prompt: bool) -> None:
    """Print a batch on stdout, with a section for each answer.

    Args:
        prompts: the text of each answer's prompt.
        with_prompt: print the prompt before the answer, which continues it.
    """
    screen = console()
    for row, prompt in enumerate(prompts):
        tokens = counted(len(output.token_ids[row]), "token")
        heading = f"{row + 1}: {tokens}, {output.finish_reasons[row]}, seed {output.seeds[row]}"
        screen.rule(heading, align="left", style="dim")
        answer = (output.texts or [])[row]
        print(f"{prompt}{answer}" if with_prompt else answer)


def _figures(output: GenerateOutput) -> str:
    """The number of tokens, the speed and the seeds of a batch."""
    count = sum(len(token_ids) for token_ids in output.token_ids)
    timing = output.timing
    seconds = timing.prefill_seconds + timing.decode_seconds
    seeds = ", ".join(map(str, output.seeds))
    guessed = (
        f", {timing.drafts.tokens_per_step:.2f} a step" if timing.drafts.num_drafts > 0 else ""
    )
    return f"{counted(count, 'token')} in {seconds:.2f} s, {count / seconds:.0f} a second{guessed}; seed {seeds}"


GENERATE: Final = CliCommand(generate, Panel.RUN, EXAMPLES)
