"""Where a model comes from, before it is read: a folder, or a repository of the Hugging Face hub.

Names are checked before anything is loaded, so that a mistyped name fails at once: transformers
would take it for a hub id, and try for half a minute to reach the hub. The config.json of a folder
is checked as well. Nothing heavy is imported here: a cached package is found without the libraries
that read models.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, get_type_hints

from qsample.checkpoints.methods import stated_quantization
from qsample.checks import as_path, is_integer
from qsample.errors import QsampleError, UnsupportedModelError, shown
from qsample.package.disk.untrusted import leads_out, read_json, read_text

CONFIG: Final = "config.json"
ADAPTER: Final = "adapter_config.json"
HUB_TIMEOUT_S: Final = 10
# Weights may lie on another disk, because only numbers are read from them.
WEIGHT_SUFFIXES: Final = frozenset((".safetensors", ".bin", ".pt", ".pth"))
ANOTHER_MODEL: Final = (
    "take a decoder-only language model; docs/architectures.md lists the types that can be exported"
)
_HUB_ID: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")
_MAX_HUB_ID_LENGTH: Final = 96  # characters, as in huggingface_hub
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_ADDRESS: Final = re.compile(
    r"(?:https?://|hf://)?(?:www\.)?(?:huggingface\.co/|hf\.co/|(?<=hf://))([\w.-]+/[\w.-]+).*"
)
_OLLAMA_TAG: Final = re.compile(r"[\w.-]+(/[\w.-]+)?:[\w.-]+")
# Classes of models that do not continue texts, by the ends of their names.
_OTHER_HEADS: Final = re.compile(
    r".*For(MaskedLM|\w*Classification|\w*QuestionAnswering|\w*Detection|MultipleChoice|CTC)"
)
# Files up to this size are identified by their content; larger files, which hold weights, by size,
# time of change and samples.
_MAX_HASHED_BYTES: Final = 1 << 24
_SAMPLES: Final = 16
_SAMPLE_BYTES: Final = 1 << 12
# The folders whose files belong to a model, besides the model's own folder.
_INNER_FOLDERS: Final = ("onnx", "additional_chat_templates")
# The files that belong to a decoder in the folder `onnx` and lie beside that folder.
_BESIDE_ONNX: Final = re.compile(r".*config\.json|token.*|.*\.jinja|special_tokens_map\.json")
_IGNORED_SUFFIXES: Final = (".md", ".lock")
# The numbers of layers that a configuration states. The layers are made before a weight is read, so
# a stranger's number must not take hours; the deepest known models have 126.
_LAYER_COUNT: Final = re.compile(r"(.*_)?(layers?|blocks?|depth)")
_MAX_LAYERS: Final = 1024
_LICENSE: Final = re.compile(r"^license: *[\"']?([\w.+-]{1,64})[\"']? *$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubOptions:
    """How a repository of the hub is read: options of transformers, under its names.

    The values are checked when the object is made: a value of another type raises ValueError. A
    new option is a field here and a keyword in `models.keywords.HubKeywords`.

    Attributes:
        revision: a branch, tag or commit; by default "main".
        cache_dir: the folder of downloads; by default Hugging Face's.
        token: the token for repositories that need one; by default the logged-in user's.
        local_files_only: whether nothing is downloaded.
        trust_remote_code: whether the Python code of the repository is run.
    """

    revision: str | None = None
    cache_dir: str | Path | None = None
    token: str | bool | None = field(default=None, repr=False)
    local_files_only: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(HubOptions).items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                is_single = isinstance(kind, type)
                accepted = kind.__name__ if is_single else str(kind).replace(" | ", " or ")
                raise ValueError(f"{name} is of type {type(value).__name__}; it must be {accepted}")
        if self.cache_dir is not None:
            as_path("cache_dir", self.cache_dir)

    def for_another_repository(self) -> HubOptions:
        """The same options without the revision: it belongs to the model's repository."""
        return replace(self, revision=None)

    def loading(self) -> dict[str, Any]:
        """The keywords of transformers' `from_pretrained`."""
        options = {option.name: getattr(self, option.name) for option in fields(self)}
        return options | {"revision": "main" if self.revision is None else self.revision}

    def downloading(self) -> dict[str, Any]:
        """The keywords of a download by transformers' `cached_file` or huggingface_hub's functions:
        it runs no code."""
        options = self.loading()
        del options["trust_remote_code"]
        return options


def license_of(files: Mapping[str, Path]) -> str | None:
    """The licence of a model, in the hub's words, from the head of the README.md beside its files;
    None if that states none."""
    highest = min(files.values(), key=lambda path: len(path.parts), default=Path())
    try:
        _, head, _ = read_text(highest.with_name("README.md")).split("---\n", 2)
    except (OSError, ValueError):
        return None
    match = _LICENSE.search(head)
    return None if match is None else match[1]


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a hub id."""
    return len(name) <= _MAX_HUB_ID_LENGTH and _HUB_ID.fullmatch(name) is not None


def check_exists(name: str, hub: HubOptions | None = None, *, file: str = CONFIG) -> None:
    """Check that a name is a folder, or a hub id whose repository has a certain file.

    The hub is asked once, and not again if it cannot be reached; its other answers are left to
    transformers.

    Args:
        name: the name of a model, an adapter or a tokenizer.
        hub: how the hub is asked; None accepts every name that may be a hub id.
        file: the file that the repository has. A folder needs it only if it is a model's,
            config.json.

    Raises:
        QsampleError: if the name is neither, if something in the folder is neither a file nor a
            folder, or if a file other than weights is a link that leads out.
    """
    path = Path(name)
    if os.path.isdir(path):
        _check_folder(path, name, file)
        return
    if os.path.exists(path):
        raise QsampleError(f"{name} is a file; give the folder that it is in, or a hub id")
    missing = f"{name:.200} does not exist{_similar(path)}"
    accepted = "a folder or a hub id"
    if file == CONFIG:
        accepted = "a checkpoint folder, a package folder or a hub id"
    address = _ADDRESS.fullmatch(name)
    if address is not None:
        raise QsampleError(f"{name:.200} is an address; give the hub id, {address[1]}")
    if name.startswith((".", "~")) or not is_hub_id(name):
        example = ""
        if _OLLAMA_TAG.fullmatch(name):
            example = ", such as Qwen/Qwen3-0.6B: names of ollama are unknown"
        raise QsampleError(f"{missing}; give {accepted}{example}")
    if hub is not None:
        _ask_hub(name, missing, accepted, hub, file)


def _check_folder(path: Path, name: str, file: str) -> None:
    if file == CONFIG and not (path / file).is_file():
        raise QsampleError(
            f"{name} has neither a {file} (a checkpoint) nor a qsample.json (a package)"
        )
    entries = sorted([*path.iterdir(), *path.glob("*/*.jinja")])
    for entry in entries:
        if entry.exists() and not (entry.is_file() or entry.is_dir()):
            raise QsampleError(
                f"{entry} is a pipe, a device or a socket, and would be waited for; remove it"
            )
    check_links((entry for entry in entries if entry.suffix not in WEIGHT_SUFFIXES), [path])


def check_checkpoint(folder: Path) -> None:
    """Check a folder with a config.json, which transformers would do much later.

    Raises:
        QsampleError: if the config.json cannot be read or is not a language model's, or if there
            are no weights.
    """
    try:
        config = dict(read_json(folder / CONFIG, infinities=True))
    except (ValueError, TypeError) as error:
        raise QsampleError(
            f"{folder}: its {CONFIG} cannot be used ({error}); correct it, or download it again"
        ) from None
    check_kind(str(folder), config)
    suffixes = {path.suffix for path in folder.iterdir()}
    if suffixes.isdisjoint(WEIGHT_SUFFIXES) and "transformers_weights" not in config:
        raise QsampleError(
            f"{folder} has a {CONFIG} and no weights; put the model's .safetensors files there"
        )


def check_kind(name: str, config: Mapping[str, Any]) -> None:
    """Check that a model continues texts by itself, and that its weights can be read.

    Args:
        name: the model's name, for messages.
        config: the configuration, as in config.json.

    Raises:
        UnsupportedModelError: if not; the message says what to take instead.
    """
    check_layer_counts(name, config)
    kind = kind_of(config)
    if config.get("is_encoder_decoder") is True:
        named_kind = f" ({kind})" if kind else ""
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder{named_kind}, and the graph has no encoder; {ANOTHER_MODEL}"
        )
    if _OTHER_HEADS.fullmatch(kind) and config.get("is_decoder") is not True:
        raise UnsupportedModelError(
            f"{name} is a {kind}, which does not continue texts; {ANOTHER_MODEL}"
        )
    stated_quantization(config, name)


def check_layer_counts(name: str, config: Mapping[str, Any]) -> None:
    """Check the numbers of layers of a configuration, its inner configurations included. Raises
    UnsupportedModelError for more than 1,024."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            check_layer_counts(name, value)
        elif is_integer(value, _MAX_LAYERS + 1) and _LAYER_COUNT.fullmatch(str(key)):
            raise UnsupportedModelError(
                f"{name}: {key} is {shown(value, 40)} in its {CONFIG}, and {_MAX_LAYERS} is the most that can be "
                "exported; correct it, or download it again"
            )


def kind_of(config: Mapping[str, Any]) -> str:
    """The name of the model's class that a configuration states, otherwise the model's type."""
    classes = config.get("architectures")
    if isinstance(classes, list) and classes:
        return str(classes[0])
    return str(config.get("model_type", ""))


def check_links(paths: Iterable[Path], folders: Iterable[Path]) -> None:
    """Raise QsampleError for a path that is a link and leads out of the folders: a stranger's
    checkpoint could put any file of this machine into a package."""
    for path in paths:
        if path.is_symlink() and leads_out(path, folders):
            raise QsampleError(
                f"{path} is a link that leads out of its folder, to {os.path.realpath(path)}; copy the file there if "
                "you trust it"
            )


def downloaded_commit(name: str, hub: HubOptions, file: str = CONFIG) -> str | None:
    """The commit of a hub id that was downloaded last; None if its `file` was not downloaded. The
    network is not used."""
    if _COMMIT.fullmatch(hub.revision or ""):
        return hub.revision
    found = _downloaded(name, hub, file)
    return None if found is None else _commit_of(found)


def _downloaded(name: str, hub: HubOptions, file: str) -> str | None:
    """The path of a file of a hub id in the hub's cache; None if it was not downloaded."""
    from huggingface_hub import try_to_load_from_cache

    if not is_hub_id(name):
        return None
    found = try_to_load_from_cache(name, file, cache_dir=hub.cache_dir, revision=hub.revision)
    return found if isinstance(found, str) else None


def origin_of(
    name: str, hub: HubOptions | None = None, file: str = CONFIG
) -> tuple[str, str | None]:
    """The model's name and revision for a manifest, the same on every machine.

    Returns:
        A hub id and its commit, also for a folder in the hub's cache; otherwise the last name of
            the folder, and None.
    """
    if os.path.exists(name):
        folder = _model_folder(Path(os.path.abspath(name)))
        kind, *repository = folder.parent.parent.name.split("--", 2)
        if folder.parent.name == "snapshots" and kind == "models":
            return "/".join(repository), folder.name
        return folder.name or name, None
    hub = hub or HubOptions()
    commit = downloaded_commit(name, hub, file)
    return name, hub.revision if commit is None else commit


def _model_folder(path: Path) -> Path:
    """The folder of a model: itself, or the folder that a file of the model lies in, perhaps in an
    inner folder."""
    if path.is_dir():
        return path
    is_inner = path.parent.name in _INNER_FOLDERS
    return path.parent.parent if is_inner else path.parent


def files_of(name: str, hub: HubOptions, read: Collection[Path]) -> dict[str, Path]:
    """The files of a folder or of a downloaded hub id, by name.

    Args:
        name: the folder or hub id.
        hub: how the hub is read.
        read: the files of weights that were read; other weights are left out, unless this is empty.
    """
    folder = name if os.path.exists(name) else os.path.dirname(_downloaded(name, hub, CONFIG) or "")
    if not folder:
        return {}
    return {
        key: path
        for key, path in sorted(_files(Path(folder)))
        if path.suffix not in WEIGHT_SUFFIXES or not read or path in read
    }


def newest_commit(name: str, hub: HubOptions, file: str = CONFIG) -> str:
    """The hub's newest commit of a hub id; if the hub cannot be reached, the commit that was
    downloaded last.

    `file` is downloaded, so that `downloaded_commit` finds the commit from then on. Raises
    QsampleError if there is no commit.
    """
    check_exists(name, hub, file=file)
    return _commit_of(str(download(name, file, hub)))


def download(name: str, file: str, hub: HubOptions) -> Path:
    """The path of a file of a hub id, downloaded if need be. Raises QsampleError if the hub does
    not give it."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, file, **hub.downloading()))
    except Exception as error:  # the errors of the hub and of the network have no common class
        reason = " ".join(str(error).split())
        raise QsampleError(
            f"the hub does not give {file} of {name} ({reason:.300}); download the model to a folder, or give a token "
            "if it is gated"
        ) from error


def _commit_of(path: str) -> str:
    """The commit that a path in the hub's cache names: its part after the last "snapshots"."""
    parts = Path(path).parts
    return parts[len(parts) - parts[::-1].index("snapshots")]


def _similar(path: Path) -> str:
    """A question whether a folder with a similar name beside `path` was meant; "" if there is
    none."""
    try:
        folders = [entry.name for entry in os.scandir(path.parent) if entry.is_dir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, folders, n=1, cutoff=0.75)
    return f" (did you mean {path.parent / close[0]}?)" if close else ""


def _ask_hub(name: str, missing: str, accepted: str, hub: HubOptions, file: str) -> None:
    """Ask the hub whether a repository has a file. Raises QsampleError if there is no such
    repository, or no answer.

    Args:
        name: the hub id.
        missing: the beginning of the message, with the name that does not exist.
        accepted: the accepted names, for the message.
        hub: how the hub is read.
        file: the file that the repository must have.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    if isinstance(
        try_to_load_from_cache(name, file, cache_dir=hub.cache_dir, revision=hub.revision), str
    ):
        return
    if hub.local_files_only or constants.HF_HUB_OFFLINE:
        reason = "local_files_only" if hub.local_files_only else "HF_HUB_OFFLINE"
        raise QsampleError(
            f"{missing}, was not downloaded from the hub before, and {reason} allows no download"
        )
    try:
        get_hf_file_metadata(
            hf_hub_url(name, file, revision=hub.revision), token=hub.token, timeout=HUB_TIMEOUT_S
        )
    except GatedRepoError:
        return
    except RepositoryNotFoundError as error:
        raise QsampleError(
            f"{missing}, nor is there such a model on the hub, unless it is private and needs a token; give {accepted}"
        ) from error
    except HfHubHTTPError:
        return
    except Exception as error:
        raise QsampleError(
            f"{missing}, and the hub cannot be reached ({error}); give {accepted}"
        ) from error


def identity_of(source: str, hub: HubOptions, file: str = CONFIG) -> list[Any]:
    """A fingerprint of a model, an adapter or a tokenizer, JSON-ready; nothing is loaded.

    Args:
        source: a folder or file, known by the names and the content of its files; or a hub id,
            known by its commit (`commit_of`).
        hub: how the hub is read.
        file: a file that the repository has.
    """
    if os.path.exists(source):
        return [[name, *file_state(path)] for name, path in sorted(_files(Path(source)))]
    return [source, commit_of(source, hub, file)]


def commit_of(name: str, hub: HubOptions, file: str = CONFIG) -> str:
    """The commit of a hub id that was downloaded last, otherwise the newest."""
    commit = downloaded_commit(name, hub, file)
    return newest_commit(name, hub, file) if commit is None else commit


def _files(source: Path) -> Iterator[tuple[str, Path]]:
    """The names and paths of the files that belong to a model. source: the model's folder, or a
    file in it."""
    folder = source if source.is_dir() else source.parent
    yield from _files_in(folder, "")
    for inner in _INNER_FOLDERS:
        if (folder / inner).is_dir():
            yield from _files_in(folder / inner, f"{inner}/")
    if source != folder:
        yield "/", source  # which of the files is meant
        for path in folder.parent.iterdir():
            if _BESIDE_ONNX.fullmatch(path.name) and path.is_file():
                yield f"../{path.name}", path


def _files_in(folder: Path, prefix: str) -> Iterator[tuple[str, Path]]:
    """The files of a folder that may belong to a model, their names behind a prefix."""
    for entry in os.scandir(folder):
        is_ignored = entry.name.startswith(".") or entry.name.endswith(_IGNORED_SUFFIXES)
        if entry.is_file() and not is_ignored:
            yield f"{prefix}{entry.name}", Path(entry.path)


def file_state(path: Path) -> list[Any]:
    """A fingerprint of a file, JSON-ready: the hash of its content, or for a large file its size,
    time of change and samples."""
    status = path.stat()
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if status.st_size <= _MAX_HASHED_BYTES:
            digest.update(file.read())
            return [digest.hexdigest()]
        # The time alone would not do: archives and copies may give all files the same.
        for sample in range(_SAMPLES):
            file.seek((status.st_size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return [status.st_size, status.st_mtime_ns, digest.hexdigest()]
