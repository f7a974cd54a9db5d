"""`qsample serve`, an OpenAI-compatible server, and `qsample web`, a page that runs a package in
the browser."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Final

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
    read_loras,
    read_template,
)
from qsample.cli.opening import CompileChoices, FeatureNeeds, is_package, open_exported
from qsample.cli.option_groups import FieldFlags, with_option_groups
from qsample.cli.quantized import note_divergence
from qsample.cli.terminal import note
from qsample.package.disk.untrusted import parse_json

if TYPE_CHECKING:
    from qsample.models.model import PackagedModel

KEY_VARIABLE: Final = "QSAMPLE_API_KEY"
# The adapters that a batch may use, if a checkpoint is compiled before its adapters are known.
_MAX_LATER_LORAS: Final = 4
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModels:
    """The packages that are served, and their names."""

    package: PackageOrModel = None
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PACKAGE", help="Serve this package, too; may be repeated."),
    ] = None
    served_model_name: Annotated[
        str | None, typer.Option(help="The name of PACKAGE for clients. (default: its folder's)")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenOptions:
    """Where the server listens, and with which certificate."""

    host: Host = "127.0.0.1"
    port: Port = DEFAULT_PORT
    ssl_keyfile: Annotated[
        str | None, typer.Option(metavar="FILE", help="PEM file of the key, for https.")
    ] = None
    ssl_certfile: Annotated[
        str | None, typer.Option(metavar="FILE", help="PEM file of its certificate.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedOptions:
    """The settings that all served models have in common."""

    ctx_len: CtxLen = None
    chat_template: Template = None
    lora: Lora = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageOptions:
    """How PACKAGE is compiled if it is a checkpoint, and how all packages are run."""

    weights: Weights = None
    preset: Preset = None
    text_only: TextOnly = False
    provider: Provider = None
    threads: Threads = None
    batch_invariant: BatchInvariant = True


@with_option_groups
def serve(
    *,
    served: ServedModels,
    listening: ListenOptions,
    shared: SharedOptions,
    log_level: Annotated[str, typer.Option(help=f"{', '.join(_LOG_LEVELS)}.")] = "info",
    packages: PackageOptions,
    values: Annotated[dict[str, Any], FieldFlags(ServeSettings)],
) -> None:
    """Serve packages with OpenAI's API: /v1/completions, /v1/chat/completions, /v1/responses,
    /v1/models.

    Also Anthropic's /v1/messages, vLLM's /tokenize, /metrics, /health and /version. /docs has all;
    / is a page to try."""
    from qsample.addons.serve.run import run

    if log_level not in _LOG_LEVELS:
        raise typer.BadParameter(
            f"--log-level is {log_level}; choose from {', '.join(_LOG_LEVELS)}"
        )
    models = models_by_name(served)
    # Checked before a checkpoint is exported.
    settings = _settings(models, shared, packages, values)
    opened = None  # stays in the cache as long as this
    if (served.package or "") in models.values():  # otherwise each model has a --model
        opened = _open_package(served.package, shared, packages, settings)
        path = str(opened.package.path)
        settings = replace(settings, models={**models, next(iter(models)): path})

    def ready(url: str) -> None:
        from qsample.ort.model_package import package_in
        from qsample.package.package import read_package

        names = ", ".join([*settings.models, *settings.loras])
        for path in settings.models.values():
            note_divergence(read_package(package_in(path), verify=False))
        typer.echo(f"Serving {names} on {url} (API: {url}/v1, a page to try it: {url})", err=True)

    run(
        settings,
        listening.host,
        listening.port,
        ssl_keyfile=listening.ssl_keyfile,
        ssl_certfile=listening.ssl_certfile,
        ready=ready,
        log_level=log_level,
    )


def _settings(
    models: Mapping[str, str],
    shared: SharedOptions,
    packages: PackageOptions,
    values: Mapping[str, Any],
) -> ServeSettings:
    """The settings of the command line. Raises typer.BadParameter for a wrong value.

    Args:
        models: served name → package.
        values: the values of the flags that the settings declare, by field.
    """
    loras = read_loras(shared.lora)
    api_keys = values["api_keys"]
    if not api_keys and os.environ.get(KEY_VARIABLE, "") != "":
        api_keys = (os.environ[KEY_VARIABLE],)
    chat_template = shared.chat_template
    if chat_template is not None:
        chat_template = read_template(chat_template)
    try:
        config = _parsed(values["speculative_config"])
        return ServeSettings(
            models=models,
            provider=packages.provider,
            ctx_len=shared.ctx_len,
            threads=packages.threads,
            batch_invariant=packages.batch_invariant,
            chat_template=chat_template,
            loras=loras,
            **{**values, "api_keys": api_keys, "speculative_config": config},
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _open_package(
    package: str | None, shared: SharedOptions, packages: PackageOptions, settings: ServeSettings
) -> PackagedModel:
    """Open PACKAGE with all that the requests of a server may ask for."""
    choices = CompileChoices(
        provider=packages.provider,
        weights=packages.weights,
        preset=packages.preset,
        ctx_len=shared.ctx_len,
        text_only=packages.text_only,
    )
    needs = FeatureNeeds(
        for_serving=True,
        loras=settings.loras,
        max_loras=_MAX_LATER_LORAS if settings.lora_dir is not None else 0,
    )
    return open_exported(package, choices, needs, trusted_keys=settings.trusted_keys)


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
    """Serve a page that runs a package in the browser; this command sends files and computes
    nothing.

    A checkpoint is compiled for WebAssembly, or with --provider webgpu for WebGPU and WebAssembly.
    For other machines, put https before it: browsers have WebGPU and threads on secure pages and on
    localhost only."""
    from qsample.addons.serve.web import WebServer, check_built
    from qsample.ort.model_package import package_in

    check_built()  # before a checkpoint is exported
    if provider is None:  # of a bundle, the variant that runs everywhere
        provider = (
            "webgpu" if package is not None and is_package(package_in(package, "webgpu")) else "web"
        )
    choices = CompileChoices(provider=provider, weights=weights, preset=preset, ctx_len=ctx_len)
    opened = open_exported(package, choices, FeatureNeeds(for_serving=True))
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


def models_by_name(served: ServedModels) -> dict[str, str]:
    """Served name → package, "" for the bundled model. Raises typer.BadParameter."""
    from qsample.ort.model_package import package_in

    package = served.package
    entries = served.model or []
    own_name = served.served_model_name
    if own_name == "":
        raise typer.BadParameter(
            "--served-model-name is empty; give the name of PACKAGE for clients, or leave it out"
        )
    models: dict[str, str] = {}
    if package is not None or not entries:
        models[_folder_name(package) if own_name is None else own_name] = package or ""
    elif own_name is not None:
        raise typer.BadParameter(
            "--served-model-name is for PACKAGE, and only --model is given; give NAME=PACKAGE there"
        )
    for entry in entries:
        name, separator, path = entry.partition("=")
        if not separator or not name or not path:
            raise typer.BadParameter(f"--model is {entry}; give NAME=PACKAGE")
        if name in models:
            raise typer.BadParameter(f"--model names {name} twice; give each a name of its own")
        if not is_package(package_in(path)):
            raise typer.BadParameter(
                f"--model {entry}: {path} is not a package; make it with qsample export or compile"
            )
        models[name] = path
    return models


def _folder_name(package: str | None) -> str:
    """The name of PACKAGE for clients, if the command line has none."""
    if package is None:
        return "tiny_lm"
    return os.path.basename(os.path.abspath(package))


SERVE: Final = CliCommand(serve, Panel.RUN, SERVE_EXAMPLES)
WEB: Final = CliCommand(web, Panel.RUN, WEB_EXAMPLES)
