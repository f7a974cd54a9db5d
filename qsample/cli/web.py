"""`qsample web`: a page that runs a package in the browser."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Final

import typer

from qsample.cli.common import CtxLen, Provider, Weights, is_package, open_exported

EXAMPLES: Final = (
    "[bold]Examples[/bold]\n\nqsample web\n\nqsample web --provider webgpu\n\nqsample web qwen3-webgpu --port 9000\n\n"
    "qsample web Qwen/Qwen3-0.6B --weights int4"
)


def web(
    package: Annotated[
        str | None,
        typer.Argument(
            metavar="[PACKAGE_OR_MODEL]", help="Package, checkpoint or hub id. (default: the bundled model)"
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all of them.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free port.")] = 8080,
    provider: Provider = None,
    ctx_len: CtxLen = None,
    weights: Weights = None,
) -> None:
    """Serve a page that runs a package in the browser; this command sends files and computes nothing.

    A checkpoint is compiled for WebAssembly, or with --provider webgpu for WebGPU and WebAssembly. For other machines,
    put https before it: browsers have WebGPU and threads on secure pages and on localhost only.
    """
    from qsample.ort.model_package import package_in
    from qsample.serve.web import WebServer, check_built

    check_built()  # before a checkpoint is exported
    if provider is None:  # of a bundle, the variant that runs everywhere
        provider = "webgpu" if package is not None and is_package(package_in(package, "webgpu")) else "web"
    opened = open_exported(package, provider, weights=weights, ctx_len=ctx_len, for_serving=True)
    with WebServer(opened.package, host, port) as server:
        typer.echo(f"Serving {opened.package.path} on {server.url} (ctrl-C ends it)", err=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
