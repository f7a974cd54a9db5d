"""What the commands share: options, and opening what is named on the command line."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from qsample.models import CheckpointModel, ForeignModel, PackagedModel

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it is a package.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document for a script to read.")]
Provider = Annotated[str | None, typer.Option(help="Execution provider. (default: what it was compiled for, else cpu)")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads. (default: the cores that this process may use)")]


def no_escapes() -> bool:
    """Whether the terminal gets plain text: NO_COLOR (no-color.org) or a terminal that knows no escapes."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") in ("dumb", "unknown")


def quieten(model: str) -> None:
    """Keep what libraries say of themselves off the terminal; downloads from the hub still show their progress."""
    if os.path.isdir(model):
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("torch.onnx._internal.exporter").setLevel(logging.ERROR)


def is_package(model: str) -> bool:
    """Whether `model` is the folder of a package."""
    from qsample.package import MANIFEST_NAME

    return os.path.isfile(os.path.join(model, MANIFEST_NAME))  # False for what is too long to be a path, too


def open_model(model: str, provider: str | None = None) -> CheckpointModel | ForeignModel | PackagedModel:
    """A package with whatever features it has, a checkpoint or a decoder file."""
    from qsample.auto_model import AutoModelForCausalLM
    from qsample.models import PackagedModel
    from qsample.package import read_package

    if is_package(model):
        return PackagedModel(read_package(model), provider)
    quieten(model)
    return AutoModelForCausalLM.from_pretrained(model, provider=provider)


def open_exported(model: str | None, provider: str | None) -> PackagedModel:
    """A package as it is, a checkpoint or decoder file exported to a temporary folder, or the bundled model."""
    from qsample.bundled import TINY_LM, bundled_model
    from qsample.cli import terminal
    from qsample.models import PackagedModel

    with terminal.progress() as progress:
        if model is None:
            quieten(str(TINY_LM))
            return bundled_model(provider or "cpu", progress)
        opened = open_model(model, provider)
        return opened if isinstance(opened, PackagedModel) else opened.export(progress=progress)


def read_text(path: Path, option: str) -> str:
    """The text of a file that `option` names."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise typer.BadParameter(f"cannot read {option} {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{option} {path} is no UTF-8, from byte {error.start} on; convert it") from None
    if not text.strip():
        raise typer.BadParameter(f"{option} {path} is empty; give a file with text in it")
    return text
