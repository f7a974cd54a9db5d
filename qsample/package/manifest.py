"""The metadata of a package: `Manifest`, which is checked when it is read from `qsample.json`."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from qsample.contract.interface import Interface
from qsample.contract.storage import stored
from qsample.contract.tensors import CONTRACT_VERSION, CONTRACT_VERSIONS, REPLAY_VERSION
from qsample.errors import PackageError
from qsample.package.codec import DecodeError, decode, encode, place_of, shown_key
from qsample.package.disk.untrusted import colliding_name, parse_json, problem_of_name

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
    """Special tokens.

    Attributes:
        pad: The content of `next_ids` for a row that emitted nothing.
        bos: The first token of a text; None if texts have none.
        eos: The tokens that end a row by default.
    """

    pad: int
    bos: int | None
    eos: tuple[int, ...]

    def ending_at(self, token: int | None, vocab_size: int) -> TokenIds:
        """The same with the tokenizer's end-of-text token as a further stop token.

        A model that was fine-tuned for chats may end its answers with that token, while its
        generation_config.json still has the ending of its base.

        Args:
            token: the tokenizer's token; None without one.
            vocab_size: V. A token that the model lacks is no stop token.
        """
        if token is None or token in self.eos or token >= vocab_size:
            return self
        return replace(self, eos=(*self.eos, token))


@dataclass(frozen=True, slots=True)
class Source:
    """The model that was exported.

    Attributes:
        model_id: The hub id of the model, or the last name of its folder: the place of the folder
            does not change the package.
        revision: The commit of the hub; None for a folder.
        model_type: The model type of the configuration.
        architecture: The class of the model in transformers.
        files: The sha256, in hexadecimal, of each file that was read, by name; names of an
            adapter's files begin with "adapter/".
        license: The license, as the metadata of the model's README.md states it.
    """

    model_id: str
    revision: str | None
    model_type: str
    architecture: str
    files: Mapping[str, str] = field(default_factory=dict)
    license: str | None = None


@dataclass(frozen=True, slots=True)
class GraphPart:
    """A part of the decode graph, for one device.

    Attributes:
        file: The name of its file.
        layers: The number of its first layer, and the number after its last.
        weight_bytes: The size of its weights, which lie in the weight files of the whole graph.
    """

    file: str
    layers: tuple[int, ...]
    weight_bytes: int = field(metadata=stored(limit=_INTEGER_LIMIT))


@dataclass(frozen=True, slots=True)
class Compilation:
    """The device and the limits of a device package.

    Attributes:
        provider: The name of the target.
        execution_providers: ONNX Runtime's execution providers, in order.
        batch_size: The largest number of rows in a call; None for any number.
        ctx_len: The capacity T.
        placement: The number of nodes by execution provider and operator.
        self_test: The results of the comparison with the portable graph.
        provider_options: The options of the first execution provider.
        quantization: The dtypes of weights and cache, the size of the weights in bytes before and
            after, the number of quantized matrices, and the measured divergence; None if nothing is
            quantized.
        least_onnxruntime: The oldest version of ONNX Runtime that runs it; None for the version in
            docs/contract.md.
        parts: The parts of the decode graph in order, each for a device; none if it is whole.
        options: The options of compile that differ from their defaults; a calibration text is given
            by its sha256.
        versions: The versions of the distributions that compiled the package.
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
    """A file of a package.

    Attributes:
        sha256: Its sha256, in hexadecimal.
        bytes: Its size.
    """

    sha256: str
    bytes: int = field(metadata=stored(limit=_INTEGER_LIMIT))


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of `qsample.json`.

    Attributes:
        kind: The kind of the package.
        contract_version: The version of the decode contract that the graphs follow.
        interface: The dimensions and features of the graphs.
        source: The model that was exported.
        versions: The versions of the distributions that made the portable package.
        token_ids: The special tokens.
        max_position_embeddings: The longest context that the model knows; None if it is unlimited.
        parity: The results of the export's comparison with the original model.
        compilation: The device and the limits of a device package; None for a portable package.
        files: The files of the package by name; the writer fills them in.
        format_version: The version of the format of this file.
        packed_weights: For a checkpoint that was already quantized, the number of quantized
            matrices, that of experts in all layers if any are quantized, their bits, block sizes
            and bytes, and for a GGUF file the type of most weights by llama.cpp's name, such as
            Q4_1; None for other checkpoints.
        images: How an image becomes pixels, and a text with images token ids, see `qsample.images`;
            None for packages that read only text.

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
    """The content of `manifest.json`, which lets ONNX Runtime open packages as the variants of a
    model package.

    Args:
        packages: The manifests by folder, relative to the folder of `manifest.json`.
    """
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
    graphs = data.get("interface")
    is_replayed = isinstance(graphs, Mapping) and graphs.get("captured") is True
    if is_replayed and _numbers(contract) < _numbers(REPLAY_VERSION):
        raise PackageError(
            f"the package's graph for replay follows decode contract {contract} and this qsample replays graphs of "
            f"{REPLAY_VERSION}; make the package again: {_commands_of(data)}"
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
    make = "export" if _shell_word(data, "versions", "transformers", "") != "" else "bake"
    model = _shell_word(data, "source", "model_id", "MODEL")
    if data.get("kind") != "device":
        return f"qsample {make} {model} OUT"
    provider = _shell_word(data, "compilation", "provider", "cpu")
    ctx_len = _shell_word(data, "compilation", "ctx_len", "4096")
    return (
        f"qsample {make} {model} PORTABLE && "
        f"qsample compile PORTABLE OUT --provider {provider} --ctx-len {ctx_len}"
    )


def _shell_word(data: Mapping[str, Any], name: str, key: str, otherwise: str) -> str:
    """The value of `key` in the object `name`, as a word for a shell; `otherwise` if it is missing or
    cannot be shown."""
    values = data.get(name)
    if not isinstance(values, dict) or key not in values:
        return otherwise
    text = f"{values[key]!s:.200}"
    return shlex.quote(text) if text and text.isprintable() else otherwise


def _check_figures(manifest: Manifest) -> None:
    """Raise PackageError for values that contradict each other."""
    interface = manifest.interface
    compilation = manifest.compilation
    if compilation is not None and not compilation.execution_providers:
        raise PackageError(
            f"compilation.execution_providers in {MANIFEST_NAME} is empty; compile the package again"
        )
    names = interface.decoder.input_names
    if len(set(names)) < len(names):
        raise PackageError(
            f"{MANIFEST_NAME} lists two states or inputs of the same name; export the package again"
        )
    if bool(interface.adapters) != (interface.features.max_loras > 0):
        raise PackageError(
            f"max_loras in {MANIFEST_NAME} is {interface.features.max_loras}, and {len(interface.adapters)} layers "
            "take adapters; export the package again"
        )


def _check_names(files: Mapping[str, FileEntry]) -> None:
    """Raise PackageError for names that do not mean one file of the package on every system."""
    for name in files:
        problem = problem_of_name(name)
        if problem is not None:
            raise PackageError(
                f"{MANIFEST_NAME} lists {name!r:.120}, {problem}; do not use this package"
            )
    pair = colliding_name([*files, MANIFEST_NAME])
    if pair is not None:
        raise PackageError(
            f"{MANIFEST_NAME} lists {pair[0]!r:.120} and {pair[1]!r:.120}, which are one file on some systems; do not "
            "use this package"
        )
