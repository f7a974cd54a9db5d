"""The files of a decoder: a file, a folder or a hub id enters; the decoder, its configurations and
its tokenizer leave.

Only the decoder of a hub id, its external data and the small files next to it are downloaded.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from qsample.addons.bake.conventions import refusal
from qsample.checkpoints.source import HubOptions, check_links
from qsample.checks import as_path
from qsample.errors import QsampleError
from qsample.package.disk.untrusted import problem_of_name, read_json, referenced_files
from qsample.package.manifest import TokenIds
from qsample.request.sampling_params import GENERATION_CONFIG_FILE
from qsample.request.text.chat import TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, special_tokens_of
from qsample.request.text.tokenizer import TOKENIZER_FILE, warn_of_missing_rows

GENAI_CONFIG: Final = "genai_config.json"
# transformers' exporter writes both files. Next to the decoder it writes a graph for the first
# call, without a cache.
EXPORT_RECORD: Final = "export.json"
DECODE: Final = "decode.onnx"
# The folder in which repositories for transformers.js have their graphs.
ONNX_FOLDER: Final = "onnx"
_SUFFIX: Final = ".onnx"
_HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+")
# Configurations and templates are downloaded as well.
_SMALL_FILE_SUFFIXES: Final = (".json", ".jinja")
_MAX_CONFIG_BYTES: Final = 1 << 23
# Token ids and lengths are int32 in the contract.
_MAX_SIZE: Final = 2**31 - 1
_CONFIG: Final = "config.json"
_TOKENIZER_FILES: Final = (
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    "special_tokens_map.json",
    TEMPLATE_FILE,
)
# The settings in which configurations state the number of positions.
_CONTEXT_SETTINGS: Final = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "seq_length",
    "context_length",
)
# Fields of "search" in a genai_config.json that have the same names and meanings in a
# generation_config.json.
_SEARCH_FIELDS: Final = (
    "repetition_penalty",
    "no_repeat_ngram_size",
    "min_length",
    "num_beams",
    "diversity_penalty",
)
# Those of rows that sample.
_SAMPLING_FIELDS: Final = ("temperature", "top_k", "top_p")
# Those that are read in another way, that shape beams alone, or that change no token.
_OTHER_SEARCH_FIELDS: Final = (
    *("do_sample", "max_length"),
    *("early_stopping", "length_penalty"),
    *("batch_size", "past_present_share_buffer", "chunk_size", "blank_penalty"),
)
# Those that a call gives here → the value that asks for nothing.
_NEUTRAL_SEARCH_VALUES: Final = {"random_seed": -1, "num_return_sequences": 1}


@dataclass(frozen=True, slots=True)
class Location:
    """A decoder file and its surroundings.

    Attributes:
        file: the decoder.
        folders: the folders of its configuration and tokenizer, the nearest first.
        name: the name that was given for it.
        data: the files with its external data.
    """

    file: Path
    folders: tuple[Path, ...]
    name: str
    data: tuple[Path, ...]

    @property
    def is_linked(self) -> bool:
        """Whether the decoder or its data are links, or files with several names (hard links)."""
        return any(
            path.is_symlink() or path.stat().st_nlink > 1 for path in (self.file, *self.data)
        )

    @property
    def files(self) -> dict[str, Path]:
        """The decoder, its data, its configurations and its tokenizer, by name."""
        small = (_CONFIG, GENERATION_CONFIG_FILE, GENAI_CONFIG, *_TOKENIZER_FILES)
        found = {name: path for name in small if (path := self.find(name)) is not None}
        return found | {
            path.relative_to(self.file.parent).as_posix(): path for path in (self.file, *self.data)
        }

    def find(self, name: str) -> Path | None:
        """A file that belongs to the decoder. Raises QsampleError for a link to something else."""
        path = next((folder / name for folder in self.folders if (folder / name).is_file()), None)
        if path is not None:
            check_links([path], self.folders)
        return path

    def read(self, name: str) -> dict[str, Any]:
        """The JSON object in a file that belongs to the decoder; {} if the file is missing."""
        path = self.find(name)
        if path is None:
            return {}
        try:
            data = read_json(path, _MAX_CONFIG_BYTES, infinities=True)
        except (OSError, ValueError) as error:
            raise QsampleError(f"cannot read {path}: {error}") from error
        if not isinstance(data, dict):
            raise QsampleError(f"{path} is not a JSON object")
        return data


def locate(path: str | Path, file: str | None = None, *, hub: HubOptions | None = None) -> Location:
    """Find the decoder of `path`, an .onnx file, a folder with such a file, or a hub id;
    QsampleError if it is missing, or if there are several. file: which of several, relative to the
    folder or repository."""
    given = as_path("path", path)
    if given.is_file():
        if file is not None:
            raise QsampleError(f"{given} is a file already; leave file out, or give its folder")
        return _located(
            given.absolute(), (given.absolute().parent, given.absolute().parent.parent), str(path)
        )
    if not given.is_dir():
        if not _HUB_ID.fullmatch(str(path)) or str(path).startswith("."):
            raise QsampleError(
                f"{path} does not exist; give an .onnx file, a folder with one, or a hub id"
            )
        given = _download(str(path), file, hub or HubOptions())
    folder = given.absolute()
    names = _names(folder)
    if file is not None and problem_of_name(file) is None and (folder / file).is_file():
        names.append(file)  # in a separate folder, as onnxruntime-genai's repositories have it
    chosen = folder / _choose(str(path), names, file, lambda name: _genai_file(folder / name))
    folders = dict.fromkeys(
        (chosen.parent, *([chosen.parent.parent] if chosen.parent != folder else []), folder)
    )
    return _located(chosen, tuple(folders), str(path))


def without_links(location: Location, folder: Path) -> Location:
    """Copy the decoder and its data into the empty `folder`: external data must lie next to its
    graph, and the hub's cache has links. Raises QsampleError for a link out of the decoder's folder
    and the hub's cache."""
    files = []
    check_links((location.file, *location.data), location.folders)
    for path in (location.file, *location.data):
        target = folder / path.relative_to(location.file.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)  # onnx_ir takes neither links nor files with a second name
        files.append(target)
    return replace(location, file=files[0], data=tuple(files[1:]))


def _located(file: Path, folders: tuple[Path, ...], name: str) -> Location:
    if file.suffix != _SUFFIX:
        raise QsampleError(
            f"{file} is not an {_SUFFIX} file; give an {_SUFFIX} file, a folder with one, or a hub id"
        )
    try:
        referenced = sorted({_without_dots(entry) for entry in referenced_files(file)})
    except (OSError, ValueError) as error:
        raise refusal(file, f"it is not an ONNX file ({error})") from error
    for entry in referenced:
        if (problem := problem_of_name(entry)) is not None:
            raise refusal(file, f"it refers to {entry!r:.120}, {problem}")
        if not (file.parent / entry).is_file():
            raise refusal(
                file, f"its data, {entry}, is missing next to it; download that file, too"
            )
    return Location(file, folders, name, tuple(file.parent / entry for entry in referenced))


def _without_dots(entry: str) -> str:
    """A relative name without the parts that stay in a folder: ONNX Runtime opens ./NAME, too."""
    return "/".join(part for part in entry.split("/") if part != ".")


def decoders(folder: Path) -> list[str]:
    """The .onnx files in `folder` and in its `onnx/`."""
    return [name for name in _names(folder) if name.endswith(_SUFFIX)]


def _names(folder: Path) -> list[str]:
    """The files in `folder` and in its `onnx/`."""
    names = []
    for prefix in ("", f"{ONNX_FOLDER}/"):
        if (folder / prefix).is_dir():
            names += sorted(
                prefix + entry.name for entry in os.scandir(folder / prefix) if entry.is_file()
            )
    return names


def _choose(
    given: str, names: Sequence[str], file: str | None, genai_file: Callable[[str], str | None]
) -> str:
    """The decoder among the files `names`. genai_file: reads the name in a genai_config.json."""
    decoders = [name for name in names if name.endswith(_SUFFIX)]
    if file is not None:
        if file not in decoders:
            raise QsampleError(f"{given} has no {file}; it has {_listed(decoders)}")
        return file
    if GENAI_CONFIG in names and (named := genai_file(GENAI_CONFIG)) in decoders:
        return str(named)
    if not decoders:
        raise QsampleError(f"{given} has no {_SUFFIX} file, in it or in {ONNX_FOLDER}/")
    if EXPORT_RECORD in names and DECODE in decoders:
        return DECODE
    if len(decoders) > 1:
        raise QsampleError(
            f"{given} has several decoders; say which with file (--file): {_listed(decoders)}"
        )
    return decoders[0]


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    return (
        ", ".join(listed[:12]) + (f" and {len(listed) - 12} others" if len(listed) > 12 else "")
        or "none"
    )


def _genai_file(path: Path) -> str | None:
    """The decoder that a genai_config.json names."""
    try:
        name = read_json(path, _MAX_CONFIG_BYTES, infinities=True)["model"]["decoder"]["filename"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return name if isinstance(name, str) else None


def _download(repository: str, file: str | None, hub: HubOptions) -> Path:
    """The folder of a snapshot that holds the decoder of a hub id, its data and the small files of
    its folders."""
    from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download

    options = hub.downloading()
    try:
        if hub.local_files_only or constants.HF_HUB_OFFLINE:
            return Path(snapshot_download(repository, **options | {"local_files_only": True}))
        names = HfApi().list_repo_files(repository, revision=hub.revision, token=hub.token)
        near = [
            name
            for name in names
            if name.removeprefix(f"{ONNX_FOLDER}/").count("/") == 0 or name == file
        ]

        def fetch(name: str) -> Path:
            return Path(hf_hub_download(repository, name, **options))

        chosen = _choose(repository, near, file, lambda name: _genai_file(fetch(name)))
        decoder = fetch(chosen)
        snapshot = decoder.parents[chosen.count("/")]
        # The branch may get another commit meanwhile, whose files would be in another folder.
        options["revision"] = snapshot.name
        folders = {os.path.dirname(chosen), os.path.dirname(os.path.dirname(chosen)), ""}
        for name in names:
            if name.endswith(_SMALL_FILE_SUFFIXES) and os.path.dirname(name) in folders:
                fetch(name)
        for entry in sorted(referenced_files(decoder)):
            if (data := os.path.normpath(os.path.join(os.path.dirname(chosen), entry))) in names:
                fetch(data)
    except QsampleError:
        raise
    except Exception as error:  # of the hub and of the network
        raise QsampleError(
            f"{repository} is not a folder here, and the hub does not give it ({' '.join(str(error).split())!s:.300})"
        ) from error
    return snapshot


@dataclass(frozen=True, slots=True)
class Settings:
    """config.json, of a text model, generation_config.json, and "model" and "search" of
    genai_config.json, next to a decoder; {} for a missing file or object. Properties are None if no
    file states them."""

    config: dict[str, Any]
    generation: dict[str, Any]
    genai: dict[str, Any]
    search: dict[str, Any]

    @property
    def context(self) -> int | None:
        """The positions that the model knows, at most."""
        owners = (_CONFIG, self.config), (GENAI_CONFIG, self.genai)
        sizes = [_size(file, owner, name) for file, owner in owners for name in _CONTEXT_SETTINGS]
        return min((size for size in sizes if size is not None), default=None)

    @property
    def head_dim(self) -> int | None:
        # All of them are checked, whichever of them counts.
        size = _size(_CONFIG, self.config, "head_dim")
        width = _size(_CONFIG, self.config, "hidden_size")
        heads = _size(_CONFIG, self.config, "num_attention_heads")
        if size is None:
            size = _size(GENAI_CONFIG, self._decoder, "head_size")
        if size is not None:
            return size
        return None if width is None or heads is None or width < heads else width // heads

    @property
    def vocab_size(self) -> int | None:
        size = _size(_CONFIG, self.config, "vocab_size")
        return _size(GENAI_CONFIG, self.genai, "vocab_size") if size is None else size

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type") or self.genai.get("type") or "unknown")

    @property
    def window(self) -> int | None:
        """The attention window of some layer; None if there is none, or none is stated."""
        layers = self.config.get("layer_types")
        if not isinstance(layers, list | None):
            raise _wrong(_CONFIG, "layer_types", layers, "a list with the type of each layer")
        is_used = self.config.get("use_sliding_window", True) and (
            layers is None or "sliding_attention" in layers
        )
        sliding = _object(GENAI_CONFIG, self._decoder, "sliding_window")
        stated = _size(_CONFIG, self.config, "sliding_window") if is_used else None
        return _size(GENAI_CONFIG, sliding, "window_size") if stated is None else stated

    @property
    def _decoder(self) -> dict[str, Any]:
        return _object(GENAI_CONFIG, self.genai, "decoder")

    def token_ids(self, vocab_size: int) -> TokenIds:
        """From generation_config.json, genai_config.json, config.json; ids that the vocabulary
        lacks are left out."""

        def find(name: str) -> Any:
            owners = (self.generation, self.genai, self.config)
            return next((owner[name] for owner in owners if owner.get(name) is not None), None)

        def known(token: Any) -> bool:
            return isinstance(token, int) and 0 <= token < vocab_size

        eos = find("eos_token_id")
        eos_ids = tuple(
            token for token in (eos if isinstance(eos, list) else [eos]) if known(token)
        )
        bos = find("bos_token_id")
        pad = find("pad_token_id")
        if not known(pad):
            pad = eos_ids[0] if eos_ids else 0
        return TokenIds(pad=int(pad), bos=bos if known(bos) else None, eos=eos_ids)


def read_settings(location: Location) -> Settings:
    """Read the configurations next to the decoder. Raises QsampleError if a file cannot be read."""
    config = location.read(_CONFIG)
    genai = location.read(GENAI_CONFIG)
    return Settings(
        config | _object(_CONFIG, config, "text_config"),
        location.read(GENERATION_CONFIG_FILE),
        _object(GENAI_CONFIG, genai, "model"),
        _object(GENAI_CONFIG, genai, "search"),
    )


def _object(file: str, owner: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object in a configuration; {} if it is missing or null."""
    value = owner.get(name)
    if not isinstance(value, dict | None):
        raise _wrong(file, name, value, "an object")
    return value or {}


def _size(file: str, owner: Mapping[str, Any], name: str) -> int | None:
    """A size in a configuration; None if it is missing, null, or not above 0: that means none."""
    value = owner.get(name)
    if value is None or value is False:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0:
        raise _wrong(file, name, value, "an integer")
    if value > _MAX_SIZE:
        raise _wrong(file, name, value, f"at most {_MAX_SIZE}")
    return int(value) if value > 0 else None


def _wrong(file: str, name: str, value: Any, accepted: str) -> QsampleError:
    return QsampleError(
        f"{file}: {name} is {value!r:.60}; it must be {accepted}. Correct it, or download it again"
    )


def write_files(
    location: Location,
    generation: Mapping[str, Any],
    vocab_size: int,
    tokenizer: str | None,
    folder: Path,
) -> int | None:
    """Copy configurations and tokenizer (as in `qsample.bake`) into `folder`, and write the
    generation_config.

    Returns:
        The tokenizer's end-of-text token; None without one.

    Raises:
        QsampleError: the tokenizer cannot be read.
    """
    if (config := location.find(_CONFIG)) is not None:
        shutil.copyfile(config, folder / _CONFIG)
    (folder / GENERATION_CONFIG_FILE).write_text(
        json.dumps(generation, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )
    if tokenizer is None:
        return None
    source = (
        location
        if tokenizer == "auto"
        else Location(location.file, (Path(tokenizer),), tokenizer, ())
    )
    if source.find(TOKENIZER_FILE) is None:
        if tokenizer != "auto":
            raise QsampleError(
                f"{tokenizer} has no {TOKENIZER_FILE}; give the folder of a tokenizer in that form, or none"
            )
        warnings.warn(
            f"{location.name} has no {TOKENIZER_FILE}: the package takes token ids only; give tokenizer= a folder that "
            "has one",
            stacklevel=5,
        )
        return None
    for name in _TOKENIZER_FILES:
        if (path := source.find(name)) is not None:
            shutil.copyfile(path, folder / name)
    tokens = special_tokens_of(source.read(TOKENIZER_CONFIG_FILE))
    vocabulary = _read_vocabulary(folder / TOKENIZER_FILE)
    warn_of_missing_rows(vocabulary, vocab_size)
    return vocabulary.get(tokens.get("eos_token", ""))


def generation_config(settings: Settings, token_ids: TokenIds) -> dict[str, Any]:
    """The contents of generation_config.json: the folder's, which is the model's own, or made of
    genai_config.json, which onnxruntime-genai's builder fills from the model's own."""
    own = dict(settings.generation) or _searched(settings)
    own |= {"pad_token_id": token_ids.pad}
    if token_ids.bos is not None:
        own["bos_token_id"] = token_ids.bos
    own["eos_token_id"] = [*token_ids.eos] or None
    return own


def _searched(settings: Settings) -> dict[str, Any]:
    """The settings of "search" in a genai_config.json, in transformers' names. A warning names
    those that the package does not have."""
    search = {name: value for name, value in settings.search.items() if value is not None}
    own: dict[str, Any] = {name: search[name] for name in _SEARCH_FIELDS if name in search}
    # The builder writes the length of the context if nobody chose another.
    length = _size(GENAI_CONFIG, search, "max_length")
    if length is not None and (settings.context is None or length < settings.context):
        own["max_length"] = length
    # With temperature 0, and unless it is told to sample, onnxruntime-genai takes the likeliest
    # token, and the builder's other values then mean nothing: its top_k is often 1.
    if search.get("do_sample") and search.get("temperature") != 0:
        own |= {name: search[name] for name in _SAMPLING_FIELDS if name in search}
        own["do_sample"] = True
        if own.get("top_p") == 0:  # off in onnxruntime-genai
            own["top_p"] = 1.0
    known = {*_SEARCH_FIELDS, *_SAMPLING_FIELDS, *_OTHER_SEARCH_FIELDS}
    left_out = [
        name
        for name, value in sorted(search.items())
        if name not in known and value != _NEUTRAL_SEARCH_VALUES.get(name)
    ]
    if left_out:
        warnings.warn(
            f'"search" in {GENAI_CONFIG} has {", ".join(left_out)}, which the package goes without',
            stacklevel=5,
        )
    return own


def _read_vocabulary(path: Path) -> dict[str, int]:
    """Every token of a tokenizer.json, and its id. Raises QsampleError."""
    try:
        vocabulary: dict[str, int] = Tokenizer.from_file(str(path)).get_vocab(True)
    except Exception as error:  # tokenizers raises Exception itself
        raise QsampleError(f"{path.name} cannot be read: {error}") from error
    return vocabulary
