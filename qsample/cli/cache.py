"""`qsample pull`, `qsample cache list` and `qsample cache clear`: the packages of models that were given directly."""

from __future__ import annotations

import json
import os
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.markup import escape

from qsample.cli.common import CtxLen, Json, Provider, Weights, is_package, open_exported
from qsample.cli.terminal import console, format_size, note, table

if TYPE_CHECKING:
    from qsample.models.cache import Entry

PULL_EXAMPLES: Final = (
    "[bold]Examples[/bold]\n\n"
    "qsample pull Qwen/Qwen3-0.6B --weights int4\n\n"
    "qsample chat Qwen/Qwen3-0.6B --weights int4"
)
_WIDTH_OF_A_FILE: Final = 160

app = typer.Typer(help="The models that were given directly, compiled: list them, or free their space.")


def pull(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, checkpoint folder or decoder file.")],
    weights: Weights = None,
    ctx_len: CtxLen = None,
    provider: Provider = None,
    for_serving: Annotated[
        bool, typer.Option("--for-serving", help="For `qsample serve`, whose requests may ask for more.")
    ] = False,
) -> None:
    """Download the newest version of a model and compile it into the cache, for commands that name the same model and
    options. Prints the package's folder."""
    from qsample.checkpoints.hub import HubOptions, newest_commit

    if is_package(model):
        raise typer.BadParameter(f"{model} is a package already; commands take it as it is")
    if not os.path.exists(model):
        newest_commit(model, HubOptions())
    opened = open_exported(model, provider, weights=weights, ctx_len=ctx_len, for_serving=for_serving)
    print(opened.package.path)


@app.command("list")
def list_entries(as_json: Json = False) -> None:
    """List the cache, the last used first."""
    from qsample.models.cache import cache_folder, entries, size_limit

    limit, found = size_limit(), entries()
    total = sum(entry.bytes for entry in found)
    if as_json:
        document = {"folder": str(cache_folder()), "bytes": total, "limit_bytes": limit}
        print(json.dumps({**document, "entries": [_described(entry) for entry in found]}, indent=2, ensure_ascii=False))
        return
    screen = console(width_of_a_file=_WIDTH_OF_A_FILE)
    if found:
        shown = table(None, "model", "options", "size", "last used")
        for entry in found:
            facts = _described(entry)
            used = "in use" if entry.in_use else datetime.fromtimestamp(entry.last_used).strftime("%Y-%m-%d %H:%M")
            shown.add_row(escape(facts["model"]), escape(", ".join(facts["options"])), format_size(entry.bytes), used)
        screen.print(shown)
    counted = "no model" if not found else f"{len(found)} model{'s' if len(found) > 1 else ''}"
    screen.print(
        f"{counted}, {format_size(total)} of at most {format_size(limit)}, in {cache_folder()}",
        markup=False,
        soft_wrap=True,
    )


@app.command("clear")
def clear_entries(
    model: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="As `list` names them. (default: all)")
    ] = None,
) -> None:
    """Remove models from the cache, except those that a process has open. Downloads and checkpoints stay."""
    from qsample.models.cache import clear, entries, remove

    if not model:
        removed, kept = clear()
    else:
        found = entries()
        named = [os.path.abspath(name) if os.path.exists(name) else name for name in model]
        for name in named:
            if not any(entry.manifest.source.model_id == name for entry in found):
                raise typer.BadParameter(f"{name} is not in the cache; `qsample cache list` has the names")
        done = [remove(entry.path) for entry in found if entry.manifest.source.model_id in named]
        removed, kept = sum(done), len(done) - sum(done)
    note(f"{removed} removed" + (f", {kept} kept: a process has them open" if kept else ""))


def _described(entry: Entry) -> dict[str, Any]:
    """An entry as a JSON-ready dict."""
    manifest, compilation = entry.manifest, entry.manifest.compilation
    options = [manifest.interface.dtype]
    if compilation is not None:
        quantization = compilation.quantization or {}
        options = [compilation.provider, str(quantization.get("dtype", options[0])), f"{compilation.ctx_len} tokens"]
    features = manifest.interface.features
    names = ("logit_bias", "allowed_tokens", "logprobs", "top_logprobs", "probs", "seed")
    options += [name for name in names if getattr(features, name)] + list(features.filters)
    options += [] if features.sampler else ["no sampler"]
    return {
        "model": manifest.source.model_id,
        "revision": manifest.source.revision,
        "options": options,
        "bytes": entry.bytes,
        "last_used": datetime.fromtimestamp(entry.last_used).astimezone().isoformat(timespec="seconds"),
        "in_use": entry.in_use,
        "path": str(entry.path),
    }
