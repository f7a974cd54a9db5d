"""The metadata of a package: `Manifest`, typed and checked, and its text in `qsample.json`."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from qsample.contract.interface import Interface
from qsample.contract.storage import stored
from qsample.contract.tensors import CONTRACT_VERSION, CONTRACT_VERSIONS
from qsample.disk.untrusted import colliding_name, parse_json, problem_of_name
from qsample.errors import PackageError
from qsample.package.codec import DecodeError, decode, encode, place_of, shown_key

MANIFEST_NAME: Final = "qsample.json"
MODEL_PACKAGE_NAME: Final = "manifest.json"
FORMAT_VERSION: Final = 1
_MODEL_PACKAGE_VERSION: Final = "1.0"
# No size, count or id reaches this.
_INTEGER_LIMIT: Final = 2**63
# A terminal may take these for commands.
_CONTROL_CHARACTER: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Special tokens: `pad` is the content of `next_ids` for a row that emitted nothing, `bos` is
    the first token of a text, and the ids `eos` end a row by default."""

    pad: int
    bos: int | None
    eos: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """The model that was exported.

    Attributes:
        model_id: its hub id; of a folder the last name, because a package is the same wherever its
            model lay.
        revision: the commit of the hub.
        files: name → sha256 of the files that were read, in hexadecimal; an adapter's begin with
            "adapter/".
        license: as the model's README.md states it, in the hub's words.
    """

    model_id: str
    revision: str | None
    model_type: str
    architecture: str
    files: Mapping[str, str] = field(default_factory=dict)
    license: str | None = None


@dataclass(frozen=True, slots=True)
class GraphPart:
    """A part of the decode graph, for a device. layers: the first, and the one after its last.
    weight_bytes: of all its weights, which lie in the files of the whole graph's."""

    file: str
    layers: tuple[int, ...]
    weight_bytes: int = field(metadata=stored(limit=_INTEGER_LIMIT))


@dataclass(frozen=True, slots=True)
class Compilation:
    """The device and the limits of a device package.

    Attributes:
        provider: the target's name.
        execution_providers: of ONNX Runtime, in order.
        batch_size: most rows in a call (None: any number).
        ctx_len: capacity T.
        placement: execution provider → operator → number of nodes.
        self_test: figures of the run that compared it with the portable graph.
        provider_options: of the first execution provider.
        quantization: of weights and cache, if any, with the bytes of the weights before and after,
            the number of matrices that came quantized, and the measured divergence.
        least_onnxruntime: the oldest version of ONNX Runtime that runs it; by default as
            docs/contract.md says.
        parts: of the decode graph in order, each for a device; none if it is for one device.
        options: of compile, except those with their default; a calibration text is its sha256.
        versions: as in `Manifest`, of the compilation.
    """

    provider: str
    execution_providers: tuple[str, ...]
    batch_size: int | None = field(metadata=stored(least=1))
    ctx_len: int = field(metadata=stored(least=1))
    placement: Mapping[str, Mapping[str, int]]
    self_test: Mapping[str, Any]
    provider_options: Mapping[str, str] = field(default_factory=dict)
    quantization: Mapping[str, Any] | None = None
    least_onnxruntime: str | None = field(default=None, metadata=stored(omitted=None))
    parts: tuple[GraphPart, ...] = field(default=(), metadata=stored(omitted=()))
    options: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """sha256: hexadecimal. bytes: the size."""

    sha256: str
    bytes: int = field(metadata=stored(limit=_INTEGER_LIMIT))


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of `qsample.json`.

    Attributes:
        versions: distribution → its version that made the portable package.
        max_position_embeddings: longest context that the model knows (None: unlimited).
        parity: figures of the export's comparison with the original model.
        compilation: device packages only.
        files: name → entry; filled in by the writer.
        images: how an image becomes pixels, and text with images token ids; see `qsample.images`.
            None: text only.
        packed_weights: of a checkpoint that was quantized already: matrices quantized, their bits,
            block sizes, bytes; of a GGUF file also the type of most weights, in llama.cpp's words,
            such as Q4_1.

    The same model, versions and options make the same manifest: it has no dates and no times, and
    the errors that gates measured, which depend on the number of threads, are rounded up to powers
    of ten.
    """

    kind: Literal["portable", "device"]
    contract_version: str
    interface: Interface
    source: Source
    versions: Mapping[str, str]
    token_ids: TokenIds
    max_position_embeddings: int | None = field(metadata=stored(least=1))
    parity: Mapping[str, Any] | None
    compilation: Compilation | None = None
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION
    packed_weights: Mapping[str, Any] | None = None
    images: Mapping[str, Any] | None = field(default=None, metadata=stored(omitted=None))

    def __post_init__(self) -> None:
        if (self.kind == "device") != (self.compilation is not None):
            raise ValueError(
                f"kind is {self.kind!r}; a device package has a compilation, a portable one has none"
            )

    def to_json(self) -> str:
        """The text of `qsample.json`."""
        text = json.dumps(encode(self), indent=2, sort_keys=True, allow_nan=False)
        return text + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read `to_json`'s result. Raises PackageError that names the key at fault."""
        try:
            data = parse_json(text)
        except ValueError as error:
            raise PackageError(
                f"{MANIFEST_NAME} is not JSON ({error}); export the package again"
            ) from error
        if not isinstance(data, dict) or not isinstance(data.get("format_version"), int):
            raise PackageError(
                f"{MANIFEST_NAME} has no format_version; it is not a qsample manifest"
            )
        _check_scalars(data, "manifest")
        # Versions come first: a newer format may well have other keys.
        _check_versions(data)
        try:
            manifest: Manifest = decode(cls, data, "manifest")
        except DecodeError as error:
            raise PackageError(f"{error.where} in {MANIFEST_NAME}{error.problem}") from error
        if data["interface"].get("features", {}).get("seed"):
            raise PackageError(
                "the package's graph has an input for seeds in place of the noise, which this "
                "qsample does not feed; export the package again"
            )
        _check_names(manifest.files)
        _check_figures(manifest)
        _check_graphs_are_listed(manifest)
        return manifest


def model_package(packages: Mapping[str, Manifest]) -> dict[str, Any]:
    """The content of `manifest.json`, with which ONNX Runtime opens packages as the variants of a
    model package, from the manifests by folder, relative to the folder of `manifest.json`."""
    components: dict[str, Any] = {}
    for folder, manifest in packages.items():
        compilation = manifest.compilation
        for file in manifest.interface.graphs:
            compiled = compilation if file == "decoder.onnx" else None
            component = components.setdefault(file.removesuffix(".onnx"), {"variants": {}})
            component["variants"]["portable" if compilation is None else compilation.provider] = {
                "variant_directory": folder,
                "ep": compiled.execution_providers[0] if compiled else "CPUExecutionProvider",
                "executor_info": {
                    "ort": {"model_file": file},
                    "qsample": {"package": MANIFEST_NAME},
                },
            }
    return {"schema_version": _MODEL_PACKAGE_VERSION, "components": components}


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _check_versions(data: Mapping[str, Any]) -> None:
    """Raise PackageError unless this qsample reads the manifest's format and runs its graphs."""
    version = data["format_version"]
    if version != FORMAT_VERSION:
        advice = "upgrade qsample" if version > FORMAT_VERSION else "export it again"
        raise PackageError(
            f"the package has format {version} and this qsample reads format {FORMAT_VERSION}; {advice}"
        )
    contract = f"{data.get('contract_version')!s:.40}"
    if contract not in CONTRACT_VERSIONS:
        is_newer = _numbers(contract) > _numbers(CONTRACT_VERSION)
        advice = "upgrade qsample" if is_newer else f"make the package again: {_commands_of(data)}"
        raise PackageError(
            f"the package's graphs follow decode contract {shown_key(contract)} and this qsample runs "
            f"{', '.join(CONTRACT_VERSIONS)}; {advice}"
        )


def _check_graphs_are_listed(manifest: Manifest) -> None:
    """Raise PackageError if the manifest lists no file for a graph or a part of the decode
    graph."""
    names = list(manifest.interface.graphs)
    if manifest.compilation is not None:
        names += [part.file for part in manifest.compilation.parts]
    missing = [name for name in names if name not in manifest.files]
    if missing:
        raise PackageError(
            f"{MANIFEST_NAME} lists no {', '.join(missing)}; export the package again"
        )


def _check_scalars(data: Any, where: str) -> None:
    """Raise PackageError for excessive integers, and for texts that a terminal or a file could not
    take."""
    if isinstance(data, dict):
        for key, value in data.items():
            _check_scalars(key, f"a key of {where}")
            _check_scalars(value, place_of(where, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            _check_scalars(value, f"{where}[{index}]")
    elif isinstance(data, int) and not -_INTEGER_LIMIT <= data < _INTEGER_LIMIT:
        raise PackageError(f"{where} in {MANIFEST_NAME} is an integer of more than 64 bits")
    elif isinstance(data, str):
        # Texts that images add to a prompt may have several lines.
        line = data.replace("\n", "") if where.startswith("manifest.images.") else data
        if _CONTROL_CHARACTER.search(line) or any(_is_surrogate(one) for one in data):
            raise PackageError(
                f"{where} in {MANIFEST_NAME} is {data!r:.80}, which holds control characters"
            )


def _is_surrogate(character: str) -> bool:
    return "\ud800" <= character <= "\udfff"


def _commands_of(data: Mapping[str, Any]) -> str:
    """The commands that make a package of an older contract again, as far as its manifest, with
    other keys, says."""
    make = "export" if _shell_word(data, "versions", "transformers") else "bake"
    model = _shell_word(data, "source", "model_id") or "MODEL"
    if data.get("kind") != "device":
        return f"qsample {make} {model} OUT"
    provider = _shell_word(data, "compilation", "provider") or "cpu"
    ctx_len = _shell_word(data, "compilation", "ctx_len") or "4096"
    return (
        f"qsample {make} {model} PORTABLE && "
        f"qsample compile PORTABLE OUT --provider {provider} --ctx-len {ctx_len}"
    )


def _shell_word(data: Mapping[str, Any], name: str, key: str) -> str | None:
    """The value of `key` in the object `name`, as a word for a shell; None if it is missing or
    cannot be shown."""
    values = data.get(name)
    if not isinstance(values, dict) or key not in values:
        return None
    text = f"{values[key]!s:.200}"
    return shlex.quote(text) if text and text.isprintable() else None


def _check_figures(manifest: Manifest) -> None:
    """Raise PackageError for figures that do not fit each other."""
    interface, compilation = manifest.interface, manifest.compilation
    if compilation is not None and not compilation.execution_providers:
        raise PackageError(
            f"compilation.execution_providers in {MANIFEST_NAME} is empty; compile the package again"
        )
    names = interface.decoder.input_names
    if len(set(names)) < len(names):
        raise PackageError(
            f"{MANIFEST_NAME} lists two states or inputs of the same name; export the package again"
        )
    if bool(interface.adapters) != bool(interface.features.max_loras):
        raise PackageError(
            f"max_loras in {MANIFEST_NAME} is {interface.features.max_loras}, and {len(interface.adapters)} layers "
            "take adapters; export the package again"
        )


def _check_names(files: Mapping[str, FileEntry]) -> None:
    for name in files:
        if problem := problem_of_name(name):
            raise PackageError(
                f"{MANIFEST_NAME} lists {name!r:.120}, {problem}; do not use this package"
            )
    if pair := colliding_name([*files, MANIFEST_NAME]):
        raise PackageError(
            f"{MANIFEST_NAME} lists {pair[0]!r:.120} and {pair[1]!r:.120}, which are one file on some systems; do not "
            "use this package"
        )
