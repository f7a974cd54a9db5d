"""`qsample serve`: an OpenAI-compatible server."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Annotated, Any, Final

import typer

from qsample.cli.common import (
    BatchInvariant,
    CtxLen,
    Lora,
    Provider,
    Template,
    Threads,
    Weights,
    is_package,
    open_exported,
    read_loras,
    read_template,
)

KEY_VARIABLE: Final = "QSAMPLE_API_KEY"
_LORAS: Final = 4  # of a batch, for a checkpoint whose adapters come later
EXAMPLES: Final = (
    "[bold]Examples[/bold]\n\n"
    "qsample serve\n\n"
    "qsample serve qwen3-cpu --slots 16 --api-key secret\n\n"
    "qsample serve --model small=qwen3-cpu --model large=llama-cuda --port 9000\n\n"
    "curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{\"prompt\": \"In the beginning\"}'"
)


def serve(
    package: Annotated[
        str | None,
        typer.Argument(
            metavar="[PACKAGE_OR_MODEL]", help="Package, checkpoint or hub id. (default: the bundled model)"
        ),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(metavar="NAME=PACKAGE", help="Serve this package, too; may be repeated.")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The name of PACKAGE for clients. (default: its folder's)")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all of them.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free port.")] = 8000,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Requests that run at once. (default: the package's batch, or 8)")
    ] = None,
    max_waiting: Annotated[int, typer.Option(min=0, help="Requests that wait; the next gets 429.")] = 256,
    ctx_len: CtxLen = None,
    prefill_chunk_size: Annotated[
        int | None,
        typer.Option(min=1, help="Prompt tokens between two steps of other requests. (default: all of a prompt)"),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help=f"Clients have to send it; may be repeated. (default: {KEY_VARIABLE}, if it is set)"),
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Accept browser pages of this origin, * for all; may be repeated.")
    ] = None,
    chat_template: Template = None,
    trust_request_chat_template: Annotated[
        bool, typer.Option("--trust-request-chat-template", help="Clients may send chat templates, which are programs.")
    ] = False,
    generation_config: Annotated[
        str, typer.Option(help="openai: OpenAI's defaults; auto: those of the model's generation_config.")
    ] = "openai",
    tool_call_parser: Annotated[
        str | None, typer.Option(help="Format of tool calls. (default: the format that the chat template teaches)")
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(
            help="Format of thoughts: deepseek_r1, qwen3, glm45, seed_oss, granite. (default: they stay in the answer)"
        ),
    ] = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help='Guess tokens from the text so far: {"method": "ngram", "num_speculative_tokens": 7}. (default: off)',
        ),
    ] = None,
    prefix: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Prompts may begin with this file of `qsample prefix`; may be repeated."),
    ] = None,
    prefix_cache_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="Keep the prompts of ended requests here, also for a restart.")
    ] = None,
    prefix_cache_bytes: Annotated[int, typer.Option(min=1, help="Most bytes of that folder.")] = 8 << 30,
    lora: Lora = None,
    lora_dir: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Clients may load the adapters below it, and unload any. (default: none)"),
    ] = None,
    max_cpu_loras: Annotated[int, typer.Option(min=1, help="Most adapters in memory.")] = 64,
    request_timeout: Annotated[
        float | None, typer.Option(min=0, help="Seconds an answer may take; then it is cut off. (default: any)")
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests get on SIGTERM and ctrl-C.")
    ] = 30.0,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Bytes of a request.")] = 4 * 2**20,
    spinning: Annotated[
        bool, typer.Option("--spinning", help="Threads wait busily: faster for a single stream, slower for many.")
    ] = False,
    access_log: Annotated[bool, typer.Option("--access-log/--no-access-log", help="Log each HTTP request.")] = True,
    log_level: Annotated[str, typer.Option(help="critical, error, warning, info, debug or trace.")] = "info",
    weights: Weights = None,
    provider: Provider = None,
    threads: Threads = None,
    batch_invariant: BatchInvariant = True,
) -> None:
    """Serve packages with OpenAI's API: /v1/completions, /v1/chat/completions, /v1/models."""
    from qsample.serve.run import run
    from qsample.serve.settings import ServeSettings

    if log_level not in (known := ("critical", "error", "warning", "info", "debug", "trace")):
        raise typer.BadParameter(f"--log-level is {log_level}; choose from {', '.join(known)}")
    template = None if chat_template is None else read_template(chat_template)
    keys = api_key or [key for key in [os.environ.get(KEY_VARIABLE)] if key]
    named, loras = _named(package, model or [], served_model_name), read_loras(lora)
    try:
        settings = ServeSettings(  # checked here, before a checkpoint is exported
            models=named,
            provider=provider,
            ctx_len=ctx_len,
            threads=threads,
            batch_invariant=batch_invariant,
            spinning=spinning,
            slots=slots,
            max_waiting=max_waiting,
            prefill_chunk_size=prefill_chunk_size,
            api_keys=tuple(keys),
            cors_origins=tuple(cors_origin or ()),
            chat_template=template,
            trust_request_chat_template=trust_request_chat_template,
            generation_config=generation_config,  # type: ignore[arg-type]  # ServeSettings checks it
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
            speculative_config=_parsed(speculative_config),
            max_body_bytes=max_body_bytes,
            prefixes=tuple(prefix or ()),
            prefix_cache_dir=prefix_cache_dir,
            prefix_cache_bytes=prefix_cache_bytes,
            loras=loras,
            lora_dir=lora_dir,
            max_cpu_loras=max_cpu_loras,
            request_timeout=request_timeout,
            drain_timeout=drain_timeout,
            access_log=access_log,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    opened = None  # stays in the cache as long as this
    if (package or "") in named.values():  # otherwise every model has a --model of its own
        opened = open_exported(
            package,
            provider,
            weights=weights,
            ctx_len=ctx_len,
            for_serving=True,
            loras=loras,
            max_loras=_LORAS if lora_dir is not None else 0,
        )
    if opened is not None:
        settings = replace(settings, models={**named, next(iter(named)): str(opened.package.path)})

    def ready(url: str) -> None:
        names = ", ".join([*settings.models, *settings.loras])
        typer.echo(f"Serving {names} on {url} (API: {url}/v1, a page to try it: {url})", err=True)

    run(settings, host, port, ready=ready, log_level=log_level)


def _parsed(config: str | None) -> Any:
    """The JSON of --speculative-config. Raises ValueError."""
    try:
        return None if config is None else json.loads(config)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"speculative_config is not valid JSON ({error}): {config:.60}") from None


def _named(package: str | None, named: list[str], name: str | None) -> dict[str, str]:
    """Served name → package; "" is the bundled model. Raises typer.BadParameter."""
    from qsample.ort.model_package import package_in

    models: dict[str, str] = {}
    if name == "":
        raise typer.BadParameter("--served-model-name is empty; give the name of PACKAGE for clients, or leave it out")
    if package is not None or not named:
        own = "tiny_lm" if package is None else os.path.basename(os.path.abspath(package))
        models[own if name is None else name] = package or ""
    elif name is not None:
        raise typer.BadParameter(
            "--served-model-name is for PACKAGE, and only --model is given; give NAME=PACKAGE there"
        )
    for entry in named:
        served, found, path = entry.partition("=")
        if not found or not served or not path:
            raise typer.BadParameter(f"--model is {entry}; give NAME=PACKAGE")
        if served in models:
            raise typer.BadParameter(f"--model names {served} twice; give each a name of its own")
        if not is_package(package_in(path)):
            raise typer.BadParameter(
                f"--model {entry}: {path} is not a package; make it with qsample export or compile"
            )
        models[served] = path
    return models
