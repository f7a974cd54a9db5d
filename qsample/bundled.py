"""The small model of the quick start, `assets/tiny_lm`: compiled once for this user and provider, and cached.

The name of a cache entry is a hash of its sources: the checkpoint's files, this package's code, the provider and the
version of ONNX Runtime. It is written elsewhere and renamed into place, so two processes may make it at the same time.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from qsample.disk.scratch import ScratchFolder
from qsample.errors import QsampleError
from qsample.garbage import young_collections
from qsample.progress import Progress

if TYPE_CHECKING:
    from qsample.models import PackagedModel

PACKAGE_ROOT: Final = Path(__file__).resolve().parent
TINY_LM: Final = PACKAGE_ROOT / "assets" / "tiny_lm"
CACHE_VARIABLE: Final = "QSAMPLE_CACHE"
KEPT_ENTRIES: Final = 4
_ENTRY: Final = re.compile(r"tiny_lm-\w+-[0-9a-f]+")


def cache_folder() -> Path:
    """`$QSAMPLE_CACHE`, else `qsample` in the user's cache folder."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qsample"


@young_collections()
def bundled_model(
    provider: str = "cpu", progress: Progress | None = None, *, for_serving: bool = False
) -> PackagedModel:
    """The bundled model compiled for `provider`: from the cache, or exported into it first (about half a minute).

    Args:
        provider: to compile for.
        progress: called with a stage's name and the fraction done, in [0, 1].
        for_serving: with all that a server's requests may ask for.
    """
    from qsample.auto_model import AutoModelForCausalLM
    from qsample.models import PackagedModel

    kind = f"{provider}_for_serving" if for_serving else provider
    entry = cache_folder() / f"tiny_lm-{kind}-{_content_hash(provider)[:16]}"
    if entry.is_dir():
        try:
            model = AutoModelForCausalLM.from_pretrained(entry, provider=provider)
            assert isinstance(model, PackagedModel)
            return model
        except QsampleError:  # damaged since: make it again
            shutil.rmtree(entry, ignore_errors=True)
    # Imported here, because a cached model needs neither onnx nor torch.
    from qsample.compiler.options import CompileOptions
    from qsample.compiler.targets import find_target

    options = CompileOptions(provider=provider).override(**find_target(provider).bundled_options)
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        folder = ScratchFolder(entry.parent)
    except OSError as error:
        raise QsampleError(
            f"cannot write to {entry.parent}, the folder of the bundled model ({error.strerror}); set {CACHE_VARIABLE} "
            "to another folder"
        ) from error
    with folder as scratch:
        checkpoint = AutoModelForCausalLM.from_pretrained(TINY_LM, local_files_only=True, for_serving=for_serving)
        checkpoint.compile(scratch.new / "package", options=options, progress=progress)
        try:
            (scratch.new / "package").rename(entry)
        except OSError:
            if not entry.is_dir():  # otherwise another process was faster, with the same content
                raise
    _forget_old_entries(entry.parent)
    model = AutoModelForCausalLM.from_pretrained(entry, provider=provider)
    assert isinstance(model, PackagedModel)
    return model


def _content_hash(provider: str) -> str:
    """sha256 over the checkpoint, this package's code, the provider and ONNX Runtime's version."""
    digest = hashlib.sha256(f"{provider} {_runtime_version()}\n".encode())
    for path in sorted([*TINY_LM.iterdir(), *PACKAGE_ROOT.rglob("*.py")]):
        digest.update(f"{path.relative_to(PACKAGE_ROOT)} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _runtime_version() -> str:
    for distribution in ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino"):
        try:
            return f"{distribution} {version(distribution)}"
        except PackageNotFoundError:
            continue
    return "no onnxruntime"


def _forget_old_entries(folder: Path) -> None:
    """Delete all but the newest entries: each change of the code makes a new entry."""
    entries = [path for path in folder.iterdir() if _ENTRY.fullmatch(path.name)]
    entries.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for entry in entries[KEPT_ENTRIES:]:
        shutil.rmtree(entry, ignore_errors=True)
