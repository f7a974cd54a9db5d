"""`qsample serve`, an OpenAI-compatible server, and `qsample web`, a page that runs a package in the browser."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any, Final

import typer

from qsample.addons.serve.settings import DEFAULT_PORT, ServeSettings
from qsample.cli.commands import CliCommand, Panel
from qsample.cli.common import (
    BatchInvariant,
    CtxLen,
    Lora,
    Preset,
    Provider,
    Template,
    TextOnly,
    Threads,
    Weights,
    flags_of,
    given_of,
    is_package,
    open_exported,
    read_loras,
    read_template,
    with_flags,
)
from qsample.cli.quantized import note_divergence
from qsample.cli.terminal import note
from qsample.disk.untrusted import parse_json

KEY_VARIABLE: Final = "QSAMPLE_API_KEY"
_LORAS: Final = 4  # of a batch, for a checkpoint whose adapters come later
_LOG_LEVELS: Final = ("critical", "error", "warning", "info", "debug", "trace")
SERVE_EXAMPLES: Final = (
    "[bold]Examples[/bold]\n\n"
    "qsample serve\n\n"
    "qsample serve qwen3-cpu --slots 16 --api-key secret\n\n"
    "qsample serve --model small=qwen3-cpu --model large=llama-cuda --port 9000\n\n"
    "curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{\"prompt\": \"In the beginning\"}'"
)
WEB_EXAMPLES: Final = (
    "[bold]Examples[/bold]\n\nqsample web\n\nqsample web --provider webgpu\n\nqsample web qwen3-webgpu --port 9000\n\n"
    "qsample web Qwen/Qwen3-0.6B --weights int4"
)
PackageOrModel = Annotated[
    str | None,
    typer.Argument(
        metavar="[PACKAGE_OR_MODEL]",
        help="Package, checkpoint or hub id. (default: the bundled model)",
    ),
]
Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all of them.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free port.")]


@with_flags(flags_of(ServeSettings))
def serve(
    context: typer.Context,
    package: PackageOrModel = None,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PACKAGE", help="Serve this package, too; may be repeated."),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The name of PACKAGE for clients. (default: its folder's)")
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = DEFAULT_PORT,
    ssl_keyfile: Annotated[
        str | None, typer.Option(metavar="FILE", help="PEM file of the key, for https.")
    ] = None,
    ssl_certfile: Annotated[
        str | None, typer.Option(metavar="FILE", help="PEM file of its certificate.")
    ] = None,
    ctx_len: CtxLen = None,
    chat_template: Template = None,
    lora: Lora = None,
    log_level: Annotated[str, typer.Option(help=f"{', '.join(_LOG_LEVELS)}.")] = "info",
    weights: Weights = None,
    preset: Preset = None,
    text_only: TextOnly = False,
    provider: Provider = None,
    threads: Threads = None,
    batch_invariant: BatchInvariant = True,
) -> None:
    """Serve packages with OpenAI's API: /v1/completions, /v1/chat/completions, /v1/responses, /v1/models.

    Also Anthropic's /v1/messages, vLLM's /tokenize, /metrics, /health and /version. /docs has all; / is a page to try.
    """
    from qsample.addons.serve.run import run

    if log_level not in _LOG_LEVELS:
        raise typer.BadParameter(
            f"--log-level is {log_level}; choose from {', '.join(_LOG_LEVELS)}"
        )
    named, loras = _named(package, model or [], served_model_name), read_loras(lora)
    given = given_of(ServeSettings, context.params)
    given["api_keys"] = given["api_keys"] or tuple(filter(None, [os.environ.get(KEY_VARIABLE)]))
    try:
        given["speculative_config"] = _parsed(given["speculative_config"])
        settings = ServeSettings(  # checked here, before a checkpoint is exported
            models=named,
            provider=provider,
            ctx_len=ctx_len,
            threads=threads,
            batch_invariant=batch_invariant,
            chat_template=None if chat_template is None else read_template(chat_template),
            loras=loras,
            **given,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    opened = None  # stays in the cache as long as this
    if (package or "") in named.values():  # otherwise each model has a --model
        opened = open_exported(
            package,
            provider,
            weights=weights,
            preset=preset,
            ctx_len=ctx_len,
            text_only=text_only,
            for_serving=True,
            loras=loras,
            max_loras=_LORAS if settings.lora_dir is not None else 0,
            trusted_keys=settings.trusted_keys,
        )
        settings = replace(settings, models={**named, next(iter(named)): str(opened.package.path)})

    def ready(url: str) -> None:
        from qsample.ort.model_package import package_in
        from qsample.package.package import read_package

        names = ", ".join([*settings.models, *settings.loras])
        for path in settings.models.values():
            note_divergence(read_package(package_in(path), verify=False))
        typer.echo(f"Serving {names} on {url} (API: {url}/v1, a page to try it: {url})", err=True)

    run(
        settings,
        host,
        port,
        ssl_keyfile=ssl_keyfile,
        ssl_certfile=ssl_certfile,
        ready=ready,
        log_level=log_level,
    )


def web(
    package: PackageOrModel = None,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    provider: Annotated[
        str | None,
        typer.Option(
            metavar="web|webgpu", help="Compile for WebAssembly, or WebGPU, too. (default: web)"
        ),
    ] = None,
    ctx_len: CtxLen = None,
    weights: Weights = None,
    preset: Preset = None,
) -> None:
    """Serve a page that runs a package in the browser; this command sends files and computes nothing.

    A checkpoint is compiled for WebAssembly, or with --provider webgpu for WebGPU and WebAssembly. For other machines,
    put https before it: browsers have WebGPU and threads on secure pages and on localhost only.
    """
    from qsample.addons.serve.web import WebServer, check_built
    from qsample.ort.model_package import package_in

    check_built()  # before a checkpoint is exported
    if provider is None:  # of a bundle, the variant that runs everywhere
        provider = (
            "webgpu" if package is not None and is_package(package_in(package, "webgpu")) else "web"
        )
    opened = open_exported(
        package, provider, weights=weights, preset=preset, ctx_len=ctx_len, for_serving=True
    )
    compilation = opened.package.manifest.compilation
    if compilation is not None and compilation.provider != "webgpu":
        note(
            "browsers run this package with WebAssembly; --provider webgpu compiles a checkpoint for their GPU, too"
        )
    with WebServer(opened.package, host, port) as server:
        typer.echo(f"Serving {opened.package.path} on {server.url} (ctrl-C ends it)", err=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def _parsed(config: str | None) -> Any:
    """The JSON of --speculative-config. Raises ValueError."""
    try:
        return None if config is None else parse_json(config)
    except ValueError as error:
        raise ValueError(f"speculative_config is not valid JSON ({error}): {config:.60}") from None


def _named(package: str | None, named: list[str], name: str | None) -> dict[str, str]:
    """Served name → package, "" for the bundled model. Raises typer.BadParameter."""
    from qsample.ort.model_package import package_in

    models: dict[str, str] = {}
    if name == "":
        raise typer.BadParameter(
            "--served-model-name is empty; give the name of PACKAGE for clients, or leave it out"
        )
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


SERVE: Final = CliCommand(serve, Panel.RUN, SERVE_EXAMPLES)
WEB: Final = CliCommand(web, Panel.RUN, WEB_EXAMPLES)
