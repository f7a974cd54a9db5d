"""The metadata of a package: `Manifest`, typed and checked, and its text in `qsample.json`."""

from __future__ import annotations

import json
import math
import re
import shlex
import types
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from qsample.contract.interface import Interface
from qsample.contract.tensors import CONTRACT_VERSION, CONTRACT_VERSIONS
from qsample.disk.untrusted import colliding_name, parse_json, problem_of_name
from qsample.errors import PackageError

MANIFEST_NAME: Final = "qsample.json"
MODEL_PACKAGE_NAME: Final = "manifest.json"
FORMAT_VERSION: Final = 1
_MODEL_PACKAGE_VERSION: Final = "1.0"
_LARGEST: Final = 2**63  # no size, count or id reaches it
_FORMER: Final = frozenset(
    {"verify", "weight_hash", "timing"}
)  # keys that only older packages have
# Fields whose integers are at least 1.
_SIZES: Final = (
    *(
        "max_position_embeddings",
        "vocab_size",
        "num_key_value_heads",
        "head_dim",
        "shape",
        "ctx_len",
        "batch_size",
    ),
    *("capacity", "in_features", "out_features"),
)
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # a terminal may take them for commands


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Special tokens: `pad` is the content of `next_ids` for a row that emitted nothing, `bos` is the first token of a
    text, and the ids `eos` end a row by default."""

    pad: int
    bos: int | None
    eos: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """The model that was exported.

    Attributes:
        model_id: its hub id; of a folder the last name, because a package is the same wherever its model lay.
        revision: the commit of the hub.
        files: name → sha256 of the files that were read, in hexadecimal; an adapter's begin with "adapter/".
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
    """A part of the decode graph, for a device. layers: the first, and the one after its last. weight_bytes: of all its
    weights, which lie in the files of the whole graph's."""

    file: str
    layers: tuple[int, ...]
    weight_bytes: int


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
        quantization: of weights and cache, if any, with the bytes of the weights before and after, the number of
            matrices that came quantized, and the measured divergence.
        least_onnxruntime: the oldest version of ONNX Runtime that runs it; by default as docs/contract.md says.
        parts: of the decode graph in order, each for a device; none if it is for one device.
        options: of compile, except those with their default; a calibration text is its sha256.
        versions: as in `Manifest`, of the compilation.
    """

    provider: str
    execution_providers: tuple[str, ...]
    batch_size: int | None
    ctx_len: int
    placement: Mapping[str, Mapping[str, int]]
    self_test: Mapping[str, Any]
    provider_options: Mapping[str, str] = field(default_factory=dict)
    quantization: Mapping[str, Any] | None = None
    least_onnxruntime: str | None = None
    parts: tuple[GraphPart, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """sha256: hexadecimal. bytes: the size."""

    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of `qsample.json`.

    Attributes:
        versions: distribution → its version that made the portable package.
        max_position_embeddings: longest context that the model knows (None: unlimited).
        parity: figures of the export's comparison with the original model.
        compilation: device packages only.
        files: name → entry; filled in by the writer.
        images: how an image becomes pixels, and text with images token ids; see `qsample.images`. None: text only.
        packed_weights: of a checkpoint that was quantized already: matrices quantized, their bits, block sizes, bytes;
            of a GGUF file also the type of most weights, in llama.cpp's words, such as Q4_1.

    The same model, versions and options make the same manifest: it has no dates and no times, and the errors that gates
    measured, which depend on the number of threads, are rounded up to powers of ten.
    """

    kind: Literal["portable", "device"]
    contract_version: str
    interface: Interface
    source: Source
    versions: Mapping[str, str]
    token_ids: TokenIds
    max_position_embeddings: int | None
    parity: Mapping[str, Any] | None
    compilation: Compilation | None = None
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION
    packed_weights: Mapping[str, Any] | None = None
    images: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if (self.kind == "device") != (self.compilation is not None):
            raise ValueError(
                f"kind is {self.kind!r}; a device package has a compilation, a portable one has none"
            )

    def to_json(self) -> str:
        data = asdict(self)
        interface, features, compilation = (
            data["interface"],
            data["interface"]["features"],
            data["compilation"],
        )
        # Older versions of qsample read packages without these.
        if not features["num_speculative_tokens"]:
            del features["num_speculative_tokens"]
        if compilation is not None and compilation["least_onnxruntime"] is None:
            del compilation["least_onnxruntime"]
        if compilation is not None and not compilation["parts"]:
            del compilation["parts"]
        for shape in interface["key_values"]:
            if shape["capacity"] is None:
                del shape["capacity"]
        if data["images"] is None:
            del data["images"]
        if interface["image"] is None:
            del interface["image"]
        if not interface["adapters"]:
            del interface["adapters"], features["max_loras"], features["max_lora_rank"]
        return (
            json.dumps(_without_infinities(data), indent=2, sort_keys=True, allow_nan=False) + "\n"
        )

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
        if data["format_version"] != FORMAT_VERSION:
            newer = data["format_version"] > FORMAT_VERSION
            raise PackageError(
                f"the package has format {data['format_version']} and this qsample reads format {FORMAT_VERSION}; "
                + ("upgrade qsample" if newer else "export it again")
            )
        contract = f"{data.get('contract_version')!s:.40}"
        if contract not in CONTRACT_VERSIONS:
            newer = _numbers(contract) > _numbers(CONTRACT_VERSION)
            raise PackageError(
                f"the package's graphs follow decode contract {_shown(contract)} and this qsample runs "
                f"{', '.join(CONTRACT_VERSIONS)}; "
                + ("upgrade qsample" if newer else f"make the package again: {_commands(data)}")
            )
        manifest: Manifest = _decode(cls, data, "manifest")
        _check_names(manifest.files)
        _check_figures(manifest)
        parts = [part.file for part in manifest.compilation.parts] if manifest.compilation else []
        missing = [
            name for name in (*manifest.interface.graphs, *parts) if name not in manifest.files
        ]
        if missing:
            raise PackageError(
                f"{MANIFEST_NAME} lists no {', '.join(missing)}; export the package again"
            )
        return manifest


def model_package(packages: Mapping[str, Manifest]) -> dict[str, Any]:
    """The content of `manifest.json`, with which ONNX Runtime opens packages as the variants of a model package, from
    the manifests by folder, relative to the folder of `manifest.json`."""
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


def _check_scalars(data: Any, where: str) -> None:
    """Raise PackageError for integers out of all proportion, and for text that a terminal or a file could not take."""
    if isinstance(data, dict):
        for key, value in data.items():
            _check_scalars(key, f"a key of {where}")
            _check_scalars(value, _place(where, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            _check_scalars(value, f"{where}[{index}]")
    elif isinstance(data, int) and not -_LARGEST <= data < _LARGEST:
        raise PackageError(f"{where} in {MANIFEST_NAME} is an integer of more than 64 bits")
    elif isinstance(data, str) and (
        _CONTROL.search(
            data.replace("\n", "") if where.startswith("manifest.images.") else data
        )  # texts of a prompt
        or any("\ud800" <= c <= "\udfff" for c in data)
    ):
        raise PackageError(
            f"{where} in {MANIFEST_NAME} is {data!r:.80}, which holds control characters"
        )


def _commands(data: Mapping[str, Any]) -> str:
    """The commands that make a package of an older contract again, as far as its manifest, of other keys, has them."""

    def told(name: str, key: str, otherwise: str) -> str:
        values = data.get(name)
        text = f"{values[key]!s:.200}" if isinstance(values, dict) and key in values else ""
        return shlex.quote(text) if text and text.isprintable() else otherwise

    make = "export" if told("versions", "transformers", "") else "bake"
    model = told("source", "model_id", "MODEL")
    if data.get("kind") != "device":
        return f"qsample {make} {model} OUT"
    provider, ctx_len = (
        told("compilation", "provider", "cpu"),
        told("compilation", "ctx_len", "4096"),
    )
    compile_again = f"qsample compile PORTABLE OUT --provider {provider} --ctx-len {ctx_len}"
    return f"qsample {make} {model} PORTABLE && {compile_again}"


def _place(where: str, key: str) -> str:
    return f"{where}.{_shown(key)}"[:200]


def _shown(key: str) -> str:
    """A key as a message may show it, with any content."""
    return key if key.isprintable() and len(key) <= 60 else f"{key[:50]!r}…"


def _without_infinities(data: Any) -> Any:
    """`data` with names in place of NaN and infinities: JSON has no such numbers."""
    if isinstance(data, dict):
        return {key: _without_infinities(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_without_infinities(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data


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


def _decode(kind: Any, data: Any, where: str, field: str = "") -> Any:
    """JSON `data` as the annotated type `kind`; PackageError says which key is unknown, missing, mistyped or out of
    range, at the place `where` in the manifest. field: the dataclass's field that `data` belongs to."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return data
    if origin in (Union, types.UnionType):
        if data is None and type(None) in arguments:
            return None
        return _decode(
            next(option for option in arguments if option is not type(None)), data, where, field
        )
    if origin is Literal and data in arguments:
        return data
    if origin is tuple and isinstance(data, list):
        return tuple(
            _decode(arguments[0], item, f"{where}[{i}]", field) for i, item in enumerate(data)
        )
    if origin is Mapping and isinstance(data, dict):
        return {
            key: _decode(arguments[1], value, _place(where, key), field)
            for key, value in data.items()
        }
    if is_dataclass(kind) and isinstance(data, dict):
        return _decode_dataclass(kind, data, where)
    # JSON has no bool that is an int; Python has.
    if isinstance(kind, type) and type(data) is kind:
        least, most = int(field in _SIZES), _LARGEST if "bytes" in field else 2**31
        if (
            kind is int and isinstance(data, int) and not least <= data < most
        ):  # before a host allocates by it
            raise PackageError(
                f"{where} in {MANIFEST_NAME} is {data}; it must be {least} or more, and less than {most}"
            )
        return data
    wanted = (
        " or ".join(map(repr, arguments))
        if origin is Literal
        else getattr(origin or kind, "__name__", str(kind))
    )
    raise PackageError(f"{where} in {MANIFEST_NAME} is {data!r:.80}; it must be {wanted}")


def _decode_dataclass(kind: Any, data: dict[str, Any], where: str) -> Any:
    names = [entry.name for entry in fields(kind)]
    # What has a default may be younger than the package.
    needed = [
        entry.name
        for entry in fields(kind)
        if entry.default is MISSING and entry.default_factory is MISSING
    ]
    unknown, missing = (
        sorted(data.keys() - {*names, *_FORMER}),
        [name for name in needed if name not in data],
    )
    if unknown or missing:
        problems = [f"unknown {_shown(key)}" for key in unknown[:5]] + [
            f"missing {key}" for key in missing
        ]
        raise PackageError(
            f"{where} in {MANIFEST_NAME} does not fit this qsample: {', '.join(problems)}"
        )
    hints = get_type_hints(kind)
    try:
        return kind(
            **{
                name: _decode(hints[name], data[name], f"{where}.{name}", name)
                for name in names
                if name in data
            }
        )
    except ValueError as error:
        raise PackageError(f"{where} in {MANIFEST_NAME}: {error!s:.300}") from error
