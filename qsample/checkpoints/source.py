"""Where a model comes from, before it is read: a folder, or a repository of the Hugging Face hub and how it is read.
And whether its config.json describes a language model.

Names are checked before anything is loaded, so that a mistyped name fails at once: transformers would take it for a hub
id and try for half a minute to reach the hub. Imports nothing heavy: a cached package is found without the libraries
that read models.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, get_type_hints

from qsample.checkpoints.methods import stated_quantization
from qsample.disk.untrusted import leads_out, problem_of_name, read_json, read_text
from qsample.errors import QsampleError, UnsupportedModelError

CONFIG: Final = "config.json"
ADAPTER: Final = "adapter_config.json"
_HUB_ID: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_LONGEST_ID: Final = 96  # characters, of huggingface_hub
_ADDRESS: Final = re.compile(
    r"(?:https?://|hf://)?(?:www\.)?(?:huggingface\.co/|hf\.co/|(?<=hf://))([\w.-]+/[\w.-]+).*"
)
_OLLAMA_TAG: Final = re.compile(r"[\w.-]+(/[\w.-]+)?:[\w.-]+")
GGUF: Final = ".gguf"
_LISTED: Final = 40  # files in a message
MAGIC: Final = b"GGUF"  # a GGUF file begins with it
_PART: Final = re.compile(r".+-\d{5}-of-(\d{5})\.gguf", re.IGNORECASE)
# Heads that do not continue texts, as the last part of a class's name.
_OTHER_HEADS: Final = re.compile(
    r".*For(MaskedLM|\w*Classification|\w*QuestionAnswering|\w*Detection|MultipleChoice|CTC)"
)
ANOTHER_MODEL: Final = (
    "take a decoder-only language model; docs/architectures.md lists the types that can be exported"
)
# Weights may lie on another disk: nothing else than numbers is read of them.
_WEIGHTS: Final = frozenset((".safetensors", ".bin", ".pt", ".pth"))
_SECONDS: Final = 10  # to wait for the hub
_READ_WHOLE: Final = (
    1 << 24
)  # bytes; of larger files, the weights, size, time of change and a sample are looked at
_SAMPLES: Final = 16  # from a large file
_SAMPLE: Final = 1 << 12  # bytes
_FOLDERS: Final = (
    "onnx",
    "additional_chat_templates",
)  # whose files belong to a model, besides the files of its folder
_BESIDE: Final = re.compile(
    r".*config\.json|token.*|.*\.jinja|special_tokens_map\.json"
)  # of a decoder in `onnx/`
_IGNORED: Final = (".md", ".lock")
_LICENSE: Final = re.compile(r"^license: *[\"']?([\w.+-]{1,64})[\"']? *$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubOptions:
    """Options of transformers, by its names; they are checked when the object is made.

    A new option is a field here and a keyword of `AutoModelForCausalLM.from_pretrained`.

    Attributes:
        revision: a branch, tag or commit; by default "main".
        cache_dir: the folder of downloads; by default Hugging Face's.
        token: for repositories that need one; by default the logged-in user's.
        local_files_only: download nothing.
        trust_remote_code: run the Python code of the repository.

    Raises ValueError for a value of another type.
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
                accepted = (
                    kind.__name__ if isinstance(kind, type) else str(kind).replace(" | ", " or ")
                )
                raise ValueError(f"{name} is of type {type(value).__name__}; it must be {accepted}")

    def for_another_repository(self) -> HubOptions:
        """The same options without the revision: it belongs to the model's repository."""
        return replace(self, revision=None)

    def loading(self) -> dict[str, Any]:
        """The keywords of transformers' `from_pretrained`."""
        options = {option.name: getattr(self, option.name) for option in fields(self)}
        return options | {"revision": self.revision or "main"}

    def downloading(self) -> dict[str, Any]:
        """The keywords of a download by transformers' `cached_file` or huggingface_hub's functions: it runs no code."""
        options = self.loading()
        del options["trust_remote_code"]
        return options


def license_of(files: Mapping[str, Path]) -> str | None:
    """The licence of a model, in the hub's words, as the README.md beside its `files` begins; None if it does not."""
    first = min(files.values(), key=lambda path: len(path.parts), default=Path())
    try:
        _, front, _ = read_text(first.with_name("README.md")).split("---\n", 2)
        return match[1] if (match := _LICENSE.search(front)) else None
    except (OSError, ValueError):
        return None


def check_exists(name: str, hub: HubOptions | None = None, *, file: str = CONFIG) -> None:
    """Check that `name` is a folder (of a model: with a config.json), or a hub id whose repository has `file`.

    The hub is asked once, and not again if it cannot be reached; its other answers are left to transformers. Without
    `hub`, a name that may be a hub id is accepted. Raises QsampleError if the name is neither, if something in the
    folder is neither a file nor a folder, or if a file, other than weights, is a link that leads out.
    """
    path = Path(name)
    if os.path.isdir(path):
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
        check_links((entry for entry in entries if entry.suffix not in _WEIGHTS), [path])
        return
    if os.path.exists(path):
        raise QsampleError(f"{name} is a file; give the folder that it is in, or a hub id")
    missing = f"{name:.200} does not exist{_similar(path)}"
    accepted = (
        "a checkpoint folder, a package folder or a hub id"
        if file == CONFIG
        else "a folder or a hub id"
    )
    if address := _ADDRESS.fullmatch(name):
        raise QsampleError(f"{name:.200} is an address; give the hub id, {address[1]}")
    if name.startswith((".", "~")) or not _HUB_ID.fullmatch(name) or len(name) > _LONGEST_ID:
        example = (
            ", such as Qwen/Qwen3-0.6B: names of ollama are unknown"
            if _OLLAMA_TAG.fullmatch(name)
            else ""
        )
        raise QsampleError(f"{missing}; give {accepted}{example}")
    if hub is not None:
        _ask_hub(name, missing, accepted, hub, file)


def find_gguf(name: str, file: str | None, hub: HubOptions) -> tuple[str, str | None] | None:
    """The GGUF file that `name` means: a path and None, or a hub id and the file's name; None if it means none.

    A file, whatever its name, if it begins as GGUF does; a folder with .gguf files and no other weights; a hub id with
    "gguf" in it, or with the name of a file behind it (OWNER/NAME/FILE.gguf). file: which of several. Raises
    QsampleError if the file is missing, or if there are several.
    """
    path = Path(name)
    if file is not None and not file.lower().endswith(GGUF):
        return None
    if os.path.isfile(path):
        return (
            (name, None)
            if file is None and (is_gguf(path) or path.suffix.lower() == GGUF)
            else None
        )
    if os.path.isdir(path):
        names = {entry.name: entry.suffix for entry in path.iterdir()}
        if file is None and (GGUF not in names.values() or not _WEIGHTS.isdisjoint(names.values())):
            return None
        if file is not None and problem_of_name(file) is None and (path / file).is_file():
            return str(path / file), None
        return str(path / _choose_gguf(name, names, file)), None
    if file is None and name.lower().endswith(GGUF) and not os.path.exists(path):
        owner, _, rest = name.partition("/")
        if "/" not in rest or owner[:1] in ("", ".", "~") or os.path.exists(owner):
            raise QsampleError(
                f"{name:.200} does not exist; give a GGUF file, or OWNER/NAME/FILE{GGUF} of the hub"
            )
        repository, _, file = rest.partition("/")
        name = f"{owner}/{repository}"
    if (
        os.path.exists(path)
        or not _HUB_ID.fullmatch(name)
        or (file is None and "gguf" not in name.lower())
    ):
        return None
    file = file or _choose_gguf(name, _names_on_hub(name, hub), None)
    check_whole(file)
    return name, file


def is_gguf(path: Path) -> bool:
    """Whether `path` is a file that begins as GGUF does, whatever its name."""
    if not os.path.isfile(path) or not os.access(path, os.R_OK):
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def check_whole(name: str, parts: Any = None) -> None:
    """Raise UnsupportedModelError for a part of a model. parts: how many it has; by default, `name` tells."""
    if parts is None:
        parts = int(part[1]) if (part := _PART.fullmatch(name)) else 1
    if parts not in (0, 1):
        raise UnsupportedModelError(
            f"{name} is one of {parts!s:.20} parts of a model; join them: `llama-gguf-split --merge` with the first "
            "part and a name for the whole"
        )


def _choose_gguf(name: str, names: Iterable[str], file: str | None) -> str:
    """One of the files `names` of a folder or hub id, if it is the only whole model: projectors of images are none."""
    files = [one for one in sorted(names) if one.lower().endswith(GGUF)]
    models = [one for one in files if "mmproj" not in one.lower() and not _PART.fullmatch(one)]
    if file is None and len(models) == 1:
        return models[0]
    found = f"{', '.join(files[:_LISTED]) or f'no {GGUF} file'}{' and more' if len(files) > _LISTED else ''}"
    if file is None and models:
        raise QsampleError(
            f"{name} has several models, {found}; say which with file=, or give a path to the file"
        )
    raise QsampleError(
        f"{name} has no {file or 'whole model of GGUF'}, but {found}; give another file"
    )


def _names_on_hub(name: str, hub: HubOptions) -> list[str]:
    """The files of a hub id that were downloaded, if a GGUF file is among them; otherwise all, as the hub says."""
    from huggingface_hub import HfApi, snapshot_download

    names: list[str] = []
    with suppress(Exception):  # nothing was downloaded
        folder = Path(snapshot_download(name, **hub.downloading() | {"local_files_only": True}))
        names = [path.relative_to(folder).as_posix() for path in folder.rglob(f"*{GGUF}")]
    if names or hub.local_files_only:
        return names
    try:
        found = HfApi().model_info(name, revision=hub.revision, timeout=_SECONDS, token=hub.token)
        return [one.rfilename for one in found.siblings or ()]
    except Exception as error:  # of the hub and of the network
        raise QsampleError(
            f"{name} is not a folder here, and the hub does not give it ({' '.join(str(error).split())!s:.300})"
        ) from error


def check_checkpoint(folder: Path) -> None:
    """Raise QsampleError for a folder with a config.json that shows it to be no language model's, or without weights:
    transformers would tell so much later."""
    try:
        config = dict(read_json(folder / CONFIG, infinities=True))
    except (ValueError, TypeError) as error:
        raise QsampleError(
            f"{folder}: its {CONFIG} cannot be used ({error}); correct it, or download it again"
        ) from None
    check_kind(str(folder), config)
    if {path.suffix for path in folder.iterdir()}.isdisjoint(
        _WEIGHTS
    ) and "transformers_weights" not in config:
        raise QsampleError(
            f"{folder} has a {CONFIG} and no weights; put the model's .safetensors files there"
        )


def check_kind(name: str, config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError, with what to take instead, for a `config` (as in config.json) of a model that does
    not continue texts by itself, or whose quantized weights cannot be read. `name`: of the model, for the message."""
    kind = kind_of(config)
    if config.get("is_encoder_decoder") is True:
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder{f' ({kind})' if kind else ''}, and the graph has no encoder; {ANOTHER_MODEL}"
        )
    if _OTHER_HEADS.fullmatch(kind) and config.get("is_decoder") is not True:
        raise UnsupportedModelError(
            f"{name} is a {kind}, which does not continue texts; {ANOTHER_MODEL}"
        )
    stated_quantization(config, name)


def kind_of(config: Mapping[str, Any]) -> str:
    """The model's class in a `config`, otherwise its type."""
    kinds = config.get("architectures")
    return str(kinds[0] if isinstance(kinds, list) and kinds else config.get("model_type", ""))


def check_links(paths: Iterable[Path], folders: Iterable[Path]) -> None:
    """Raise QsampleError for a link that leads out of `folders`: a stranger's checkpoint could put any file of this
    machine into a package."""
    for path in paths:
        if path.is_symlink() and leads_out(path, folders):
            raise QsampleError(
                f"{path} is a link that leads out of its folder, to {os.path.realpath(path)}; copy the file there if "
                "you trust it"
            )


def downloaded_commit(name: str, hub: HubOptions, file: str = CONFIG) -> str | None:
    """The commit of a hub id that was downloaded last; None if `file` of it was not. Uses no network."""
    if _COMMIT.fullmatch(hub.revision or ""):
        return hub.revision
    found = _downloaded(name, hub, file)
    return None if found is None else _commit_of(found)


def _downloaded(name: str, hub: HubOptions, file: str) -> str | None:
    """The path of a file of a hub id in the hub's cache; None if it was not downloaded."""
    from huggingface_hub import try_to_load_from_cache

    if len(name) > _LONGEST_ID or not _HUB_ID.fullmatch(name):
        return None
    found = try_to_load_from_cache(name, file, cache_dir=hub.cache_dir, revision=hub.revision)
    return found if isinstance(found, str) else None


def origin_of(
    name: str, hub: HubOptions | None = None, file: str = CONFIG
) -> tuple[str, str | None]:
    """The model's name and revision for a manifest, the same on every machine: a hub id with its commit, also of a
    folder in the hub's cache; otherwise the last name of the folder, and None."""
    if os.path.exists(name):
        path = Path(os.path.abspath(name))
        folder = (
            path
            if path.is_dir()
            else path.parent.parent
            if path.parent.name in _FOLDERS
            else path.parent
        )
        kind, *repository = folder.parent.parent.name.split("--", 2)
        if folder.parent.name == "snapshots" and kind == "models":
            return "/".join(repository), folder.name
        return folder.name or name, None
    hub = hub or HubOptions()
    return name, downloaded_commit(name, hub, file) or hub.revision


def files_of(name: str, hub: HubOptions, read: Collection[Path]) -> dict[str, Path]:
    """The files of a folder or of a downloaded hub id by name; of weights, those that were `read`, or else all."""
    folder = name if os.path.exists(name) else os.path.dirname(_downloaded(name, hub, CONFIG) or "")
    found = sorted(_files(Path(folder))) if folder else []
    return {
        key: path for key, path in found if path.suffix not in _WEIGHTS or not read or path in read
    }


def newest_commit(name: str, hub: HubOptions, file: str = CONFIG) -> str:
    """The hub's newest commit of a hub id; if the hub cannot be reached, the commit that was downloaded last, and
    QsampleError if there is none. Downloads `file`, so that `downloaded_commit` finds the commit from then on."""
    check_exists(name, hub, file=file)
    from huggingface_hub import hf_hub_download

    try:
        return _commit_of(hf_hub_download(name, file, **hub.downloading()))
    except Exception as error:  # of the hub and of the network
        raise _not_given(name, file, error) from error


def _not_given(name: str, file: str, error: Exception) -> QsampleError:
    return QsampleError(
        f"the hub does not give {file} of {name} ({' '.join(str(error).split())!s:.300}); download the model to a "
        "folder, or give a token if it is gated"
    )


def _commit_of(path: str) -> str:
    parts = Path(path).parts
    return parts[len(parts) - parts[::-1].index("snapshots")]


def _similar(path: Path) -> str:
    """A folder next to `path` with a name that was perhaps meant."""
    try:
        folders = [entry.name for entry in os.scandir(path.parent) if entry.is_dir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, folders, n=1, cutoff=0.75)
    return f" (did you mean {path.parent / close[0]}?)" if close else ""


def _ask_hub(name: str, missing: str, accepted: str, hub: HubOptions, file: str) -> None:
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
            hf_hub_url(name, file, revision=hub.revision), token=hub.token, timeout=_SECONDS
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


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """The arguments of `checkpoints.Checkpoint`, whose import needs torch; `file` and a `model_id` of a file: those of
    `GgufCheckpoint`."""

    model_id: str
    dtype: str
    tokenizer: str | None
    adapter: str | None
    hub: HubOptions
    file: str | None = None
    images: bool | None = False
    text_only: bool = False

    @property
    def gguf(self) -> Path | None:
        """The GGUF file, downloaded if need be; None for another checkpoint."""
        if self.file is None:
            return Path(self.model_id) if os.path.isfile(self.model_id) else None
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(self.model_id, self.file, **self.hub.downloading()))
        except Exception as error:  # of the hub and of the network
            raise _not_given(self.model_id, self.file, error) from error

    @property
    def folders(self) -> tuple[str, ...]:
        """Nothing may be written over these."""
        return tuple(filter(None, (self.model_id, self.adapter, self.tokenizer)))

    def pinned(self) -> CheckpointSource:
        """The same at a commit of the hub; a folder by its full name."""
        if os.path.exists(self.model_id):
            return replace(self, model_id=os.path.abspath(self.model_id))
        return replace(
            self,
            hub=replace(self.hub, revision=commit_of(self.model_id, self.hub, self.file or CONFIG)),
        )

    def identity(self) -> dict[str, Any]:
        """All inputs of the loading, JSON-ready; see `identity_of`."""
        others = self.hub.for_another_repository()
        own = self.tokenizer in ("auto", None)
        return {
            "checkpoint": identity_of(self.model_id, self.hub, self.file or CONFIG),
            "file": self.file,
            "dtype": self.dtype,
            "tokenizer": self.tokenizer
            if own
            else identity_of(str(self.tokenizer), others, "tokenizer_config.json"),
            "adapter": None if self.adapter is None else identity_of(self.adapter, others, ADAPTER),
            "code": self.hub.trust_remote_code,
            "images": [self.images, self.text_only],
        }


@dataclass(frozen=True, slots=True)
class DecoderSource:
    """A decoder file of another exporter; the fields are arguments of `qsample.bake`."""

    model_id: str
    file: str | None = None
    tokenizer: str | None = "auto"
    rope: str | None = None
    reference: str | None = None
    hub: HubOptions = field(default_factory=HubOptions)

    @property
    def folders(self) -> tuple[str, ...]:
        """Nothing may be written over these."""
        return (self.model_id,)

    def pinned(self) -> DecoderSource:
        """The same at a commit of the hub; a folder or file by its full name."""
        if os.path.exists(self.model_id):
            return replace(self, model_id=os.path.abspath(self.model_id))
        return replace(
            self,
            hub=replace(self.hub, revision=commit_of(self.model_id, self.hub, self.file or CONFIG)),
        )

    def identity(self) -> dict[str, Any]:
        """All inputs of the loading, JSON-ready; see `identity_of`."""
        others, own = self.hub.for_another_repository(), self.tokenizer in ("auto", None)
        return {
            "decoder": identity_of(self.model_id, self.hub, self.file or CONFIG),
            "file": self.file,
            "tokenizer": self.tokenizer
            if own
            else identity_of(str(self.tokenizer), others, "tokenizer_config.json"),
            "rope": self.rope,
            "reference": self.reference,
        }


def identity_of(source: str, hub: HubOptions, file: str = CONFIG) -> list[Any]:
    """Distinguishes the states of a model, adapter or tokenizer, JSON-ready, without loading it: by names and content
    of a folder or file, or by a hub id's commit (`commit_of`). file: a file that the repository has."""
    if is_gguf(Path(source)):
        return _state(Path(source))
    if os.path.exists(source):
        return [[name, *_state(path)] for name, path in sorted(_files(Path(source)))]
    return [source, commit_of(source, hub, file)]


def commit_of(name: str, hub: HubOptions, file: str = CONFIG) -> str:
    """The commit of a hub id that was downloaded last, otherwise the newest."""
    return downloaded_commit(name, hub, file) or newest_commit(name, hub, file)


def _files(source: Path) -> Iterator[tuple[str, Path]]:
    """The files that belong to a model, by name."""
    folder = source if source.is_dir() else source.parent
    for inner in ("", *_FOLDERS):
        if (folder / inner).is_dir():
            for entry in os.scandir(folder / inner):
                if (
                    entry.is_file()
                    and not entry.name.startswith(".")
                    and not entry.name.endswith(_IGNORED)
                ):
                    yield f"{inner}/{entry.name}" if inner else entry.name, Path(entry.path)
    if source != folder:
        yield "/", source  # which of the files
        for path in folder.parent.iterdir():
            if _BESIDE.fullmatch(path.name) and path.is_file():
                yield f"../{path.name}", path


def _state(path: Path) -> list[Any]:
    status = path.stat()
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if status.st_size <= _READ_WHOLE:
            digest.update(file.read())
            return [digest.hexdigest()]
        # The time alone would not do: archives and copies may give all files the same.
        for sample in range(_SAMPLES):
            file.seek((status.st_size - _SAMPLE) * sample // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE))
    return [status.st_size, status.st_mtime_ns, digest.hexdigest()]
