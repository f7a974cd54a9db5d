"""The command line: `qsample export | compile | generate | bench | inspect`. It parses and calls, nothing else.

Heavy modules are imported inside the commands, so that `qsample --help` answers at once. Results go to stdout;
progress, figures and errors to stderr. Exit status: 0 done, 1 error, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

import qsample
from qsample.errors import QsampleError

if TYPE_CHECKING:
    from qsample.auto_model import CheckpointModel, PackagedModel

DEBUG_VARIABLE: Final = "QSAMPLE_DEBUG"
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")

app = typer.Typer(
    name="qsample",
    help="Bake the sampler into a language model's ONNX graph, and run it.",
    epilog="Start with: [bold]qsample generate -p 'And the LORD spake unto'[/bold]  (the bundled model)",
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it is a package.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document for a script to read.")]


def _version(value: bool) -> None:
    if value:
        typer.echo(f"qsample {qsample.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help=f"Show tracebacks ({DEBUG_VARIABLE}=1 does too).")] = False,
) -> None:
    """Bake the sampler into a language model's ONNX graph, and run it."""
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"


@app.command(
    epilog="[bold]Examples[/bold]\n\n"
    "qsample export Qwen/Qwen3-0.6B qwen3\n\n"
    "qsample export ./my-checkpoint out --dtype float16 --logprobs --top-logprobs 5"
)
def export(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id or checkpoint folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write the package to.")],
    sampler: Annotated[
        bool, typer.Option("--sampler/--no-sampler", help="Bake the sampler in, or return logits.")
    ] = True,
    return_pdfs: Annotated[
        bool, typer.Option("--return-pdfs", help="Also return the sampled distribution, `probs`.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="Of weights and cache: float32 or float16.")] = "float32",
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Also return each token's log-probability.")] = False,
    top_logprobs: Annotated[int, typer.Option(min=0, metavar="M", help="Also return the M likeliest tokens.")] = 0,
    logit_bias: Annotated[bool, typer.Option("--logit-bias", help="Take a bias on chosen tokens.")] = False,
    allowed_tokens: Annotated[
        bool, typer.Option("--allowed-tokens", help="Take a token mask (guided decoding).")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    adapter: Annotated[str | None, typer.Option(help="LoRA adapter to merge: a folder or hub id.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Export a Hugging Face model to a portable package: one ONNX graph with the sampler in it."""
    from qsample import cli_output
    from qsample.auto_model import AutoModelForCausalLM, CheckpointModel

    if _is_package(model):
        raise typer.BadParameter(f"{model} is a package already; `qsample compile` takes it from here")
    _quieten(model)
    source = AutoModelForCausalLM.from_pretrained(
        model,
        include_sampler=sampler,
        return_pdfs=return_pdfs,
        logit_bias=logit_bias,
        allowed_tokens=allowed_tokens,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        dtype=dtype,
        revision=revision,
        adapter=adapter,
    )
    assert isinstance(source, CheckpointModel)
    with cli_output.progress() as progress:
        exported = source.export(out, overwrite=overwrite, progress=progress)
    cli_output.written(exported.package)


@app.command(
    epilog="[bold]Examples[/bold]\n\n"
    "qsample compile qwen3 qwen3-cpu --provider cpu --ctx-len 2048\n\n"
    "qsample compile qwen3 qwen3-cpu --batch-size 1 --overwrite"
)
def compile(
    package: Annotated[str, typer.Argument(metavar="PACKAGE", help="A portable package, or a model to export first.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write the device package to.")],
    provider: Annotated[str, typer.Option(help="Target to compile for.")] = "cpu",
    batch_size: Annotated[int | None, typer.Option(min=1, help="Most rows of one call. (default: any)")] = None,
    ctx_len: Annotated[
        int | None, typer.Option(min=2, help="Tokens that a row holds. (default: the model's, at most 4096)")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(metavar="int4|int8|float16", help="Quantize the weights. (default: as exported)")
    ] = None,
    block_size: Annotated[int, typer.Option(help="Quantized weights that share a scale: 16 to 256.")] = 32,
    quantization_method: Annotated[
        str, typer.Option(metavar="rtn|k_quant", help="Nearest level, or a search for the best ones.")
    ] = "rtn",
    kv_cache_dtype: Annotated[
        str | None, typer.Option(metavar="int8", help="Quantize keys and values. (default: as exported)")
    ] = None,
    max_divergence: Annotated[
        float, typer.Option(min=0, help="Refuse quantized weights that are further off, in nats a token.")
    ] = 1.0,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="float16|bfloat16", help="Of weights and cache, for cuda. (default: as exported)"),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Compile a package for one device: fused, its shapes bounded, tested there."""
    from qsample import cli_output

    source = _open(package)
    with cli_output.progress() as progress:
        compiled = source.compile(
            out,
            provider=provider,
            batch_size=batch_size,
            ctx_len=ctx_len,
            weights=weights,
            block_size=block_size,
            quantization_method=quantization_method,
            kv_cache_dtype=kv_cache_dtype,
            max_divergence=max_divergence,
            dtype=dtype,
            overwrite=overwrite,
            progress=progress,
        )
    cli_output.written(compiled.package)


@app.command(
    epilog="[bold]Examples[/bold]\n\n"
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
    provider: Annotated[
        str | None, typer.Option(help="Execution provider. (default: what it was compiled for, else cpu)")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. (default: ONNX Runtime's choice)")] = None,
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
    from qsample import cli_output
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
        SamplingParams.from_generation_config(None, **options)  # a wrong value is found before the model is loaded
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    prompts = prompt or [_read_stdin()]
    opened = _open_exported(model, provider)  # kept: a temporary export lives as long as this
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


@app.command(
    epilog="[bold]Examples[/bold]\n\n"
    "qsample bench qwen3-cpu --batch 1 --batch 8 --prompt-tokens 512\n\n"
    "qsample bench qwen3-cpu --temperature 0.8 --top-p 0.9 --json"
)
def bench(
    package: Annotated[str, typer.Argument(metavar="PACKAGE_OR_MODEL", help="Package, checkpoint or hub id.")],
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Rows; may be repeated. (default: 1)")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of every prompt.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=1, help="Decode steps to time.")] = 64,
    repetitions: Annotated[int, typer.Option(min=1, help="Generations to time, after one to warm up.")] = 3,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 is off.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    provider: Annotated[
        str | None, typer.Option(help="Execution provider. (default: what it was compiled for, else cpu)")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. (default: ONNX Runtime's choice)")] = None,
    as_json: Json = False,
) -> None:
    """Time a package: first token, prefill, decode steps, memory."""
    from qsample import cli_output
    from qsample.runtime import load
    from qsample.runtime.bench import measure
    from qsample.sampling_params import SamplingParams

    try:
        params = SamplingParams(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    opened = _open_exported(package, provider)  # kept: a temporary export lives as long as this
    start = time.perf_counter()
    model = load(opened.package.path, provider, intra_op_num_threads=threads, verify=False)
    load_seconds = time.perf_counter() - start
    measurements = []
    with cli_output.progress() as progress:
        for place, rows in enumerate(batches := batch or [1]):
            progress(f"{rows} rows", place / len(batches))
            measurements.append(measure(model, rows, prompt_tokens, new_tokens, params, repetitions))
    if as_json:
        typer.echo(json.dumps(cli_output.describe_bench(opened.package, measurements, load_seconds), indent=2))
    else:
        cli_output.show_bench(opened.package, measurements, load_seconds)


@app.command(
    epilog="[bold]Examples[/bold]\n\nqsample inspect qwen3-cpu\n\nqsample inspect qwen3-cpu --json | jq .graphs"
)
def inspect(
    package: Annotated[Path, typer.Argument(metavar="PACKAGE", help="Folder of a package.")],
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Compare every file with its sha256.")] = True,
    as_json: Json = False,
) -> None:
    """Show a package: its graphs' inputs, states and outputs, where it came from, and what runs where."""
    from qsample import cli_output
    from qsample.package import read_package

    opened = read_package(package, verify=verify)
    if as_json:
        typer.echo(json.dumps(cli_output.describe(opened), indent=2))
    else:
        cli_output.show(opened)


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit status; errors are one line on stderr."""
    try:
        status = app(arguments, standalone_mode=False, prog_name="qsample")
    except Exception as error:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        usage = getattr(error, "exit_code", 1) == 2  # the parser's errors carry their own status
        hint = "; see qsample --help" if usage else ""
        print(f"qsample: {_message(error)}{hint}", file=sys.stderr)
        return 2 if usage else 1
    return status if isinstance(status, int) else 0


def main() -> None:
    """The `qsample` command."""
    try:
        status = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` perhaps, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)


def _message(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        extra = "cpu' or 'gpu" if error.name == "onnxruntime" else "export"
        return f"this needs {error.name}, which is not installed; install qsample with its extra '{extra}'"
    parsed = getattr(error, "format_message", None)  # of the command line's parser
    text = " ".join(_COLOUR.sub("", str(parsed() if parsed else error)).split())
    if parsed or isinstance(error, QsampleError | ValueError | OSError):
        return text
    return f"{type(error).__name__}: {text:.300} ({DEBUG_VARIABLE}=1 shows where)"


def _quieten(model: str) -> None:
    """Keep what libraries say of themselves off the terminal; downloads from the hub still show their progress."""
    if Path(model).is_dir():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("torch.onnx._internal.exporter").setLevel(logging.ERROR)


def _is_package(model: str) -> bool:
    from qsample.package import MANIFEST_NAME

    return (Path(model) / MANIFEST_NAME).is_file()


def _open(model: str, provider: str | None = None) -> CheckpointModel | PackagedModel:
    """A package with whatever features it has, or a checkpoint."""
    from qsample.auto_model import AutoModelForCausalLM, PackagedModel
    from qsample.package import read_package

    if _is_package(model):
        return PackagedModel(read_package(model), provider)
    _quieten(model)
    return AutoModelForCausalLM.from_pretrained(model, provider=provider)


def _open_exported(model: str | None, provider: str | None) -> PackagedModel:
    """A package as it is, a checkpoint exported to a temporary folder, or the bundled model."""
    from qsample import cli_output
    from qsample.auto_model import PackagedModel
    from qsample.bundled import TINY_LM, bundled_model

    with cli_output.progress() as progress:
        if model is None:
            _quieten(str(TINY_LM))
            return bundled_model(provider or "cpu", progress)
        opened = _open(model, provider)
        return opened if isinstance(opened, PackagedModel) else opened.export(progress=progress)


def _read_stdin() -> str:
    text = "" if sys.stdin.isatty() else sys.stdin.read().rstrip("\n")
    if not text:
        raise typer.BadParameter("no prompt; give one with -p, or on standard input")
    return text
