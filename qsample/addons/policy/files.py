"""Writes the policy components of `graphs.py`: to a folder with the YAML that declares them, or in place of the
sampler of an ONNX workflow package."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import onnx_ir as ir
import yaml

from qsample.addons.policy.graphs import (
    SAMPLER,
    STATE_UPDATE,
    STATE_UPDATE_PORTS,
    TERMINATION,
    TERMINATION_PORTS,
    VERSION,
    build_state_update,
    build_termination,
    build_token_sampler,
    sampler_ports,
)
from qsample.contract.interface import GraphSpec
from qsample.contract.tensors import VOCAB
from qsample.disk.scratch import ScratchFolder
from qsample.disk.space import full_disk_named
from qsample.disk.untrusted import read_text
from qsample.errors import PackageError, shown, unknown

METADATA: Final = "inference_metadata.yaml"
COMPONENTS: Final = "components.yaml"
CONTRACT: Final = f"{SAMPLER}@{VERSION}"
_FOLDER: Final = "policies"
_ARTIFACT: Final = f"{_FOLDER}/qsample_token_sampler.onnx"
_LARGEST: Final = 1 << 24  # bytes of a package's metadata
_PARAMETERS: Final = {"batching": "per_row", "inactive_rows": "preserve"}


def write_policy(
    out: str | Path,
    vocab_size: int,
    *,
    contract: str = CONTRACT,
    provider: str = "cpu",
    overwrite: bool = False,
) -> list[Path]:
    """Write sampler, termination and state update, and `components.yaml` that declares them, and return the files.

    Args:
        out: the folder, made if it is missing. Other files in it stay.
        vocab_size: V of the sampler.
        contract: of the sampler; "onnx-genai.token-sampler@2" is the only one.
        provider: except for "cpu", the sampler has no control flow, so that CUDA can capture it.
        overwrite: replace files of these names.

    Raises ValueError for another contract and a vocabulary below 1, PackageError if a file exists or cannot be written.
    """
    _check_contract(contract)
    models: dict[str, tuple[str, GraphSpec, ir.Model]] = {
        "token_sampler": (SAMPLER, sampler_ports(), _sampler(vocab_size, provider)),
        "termination": (TERMINATION, TERMINATION_PORTS, build_termination()),
        "token_state_update": (STATE_UPDATE, STATE_UPDATE_PORTS, build_state_update()),
    }
    components = {
        name: _declaration(identity, f"{_FOLDER}/{name}.onnx", ports, {VOCAB: vocab_size})
        for name, (identity, ports, _) in models.items()
    }
    text = yaml.safe_dump({"components": components}, sort_keys=False)
    files: dict[str, bytes] = {
        f"{_FOLDER}/{name}.onnx": _as_bytes(model) for name, (_, _, model) in models.items()
    }
    return _write(Path(out), files | {COMPONENTS: text.encode()}, overwrite=overwrite)


def replace_sampler(
    package: str | Path,
    *,
    contract: str = CONTRACT,
    vocab_size: int | None = None,
    provider: str = "cpu",
    overwrite: bool = False,
) -> Path:
    """Write a sampler into a workflow package, in place of the package's; the old file stays. Returns the new file.

    Args:
        package: the folder, with inference_metadata.yaml. Of that file, only the sampler's `artifact` changes.
        contract, provider: as for `write_policy`.
        vocab_size: V; by default as the package's ports say.
        overwrite: replace a sampler that was written before.

    Raises ValueError for another contract and if V is unknown, PackageError if the package has no such component, does
    not allow to replace it, or has other ports.
    """
    _check_contract(contract)
    folder = Path(package)
    path = folder / METADATA
    try:
        text = read_text(path, _LARGEST)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        document = yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise PackageError(
            f"cannot read {path} ({error!s:.200}); give the folder of a workflow package, with {METADATA}"
        ) from error
    found = _Component.of(path, document)
    size = found.vocab_size(document) if vocab_size is None else vocab_size
    if size is None:
        raise ValueError(
            f"{path} does not say how many tokens its logits have; give vocab_size (--vocab-size)"
        )
    model = _sampler(size, provider, positions=found.positions)
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.name = found.bindings[str(value.name)]
    place = _find(
        root, ("pipeline", "workflow", "components", found.name, "implementation", "artifact")
    )
    changed = (
        text
        if place is None
        else text[: place.start_mark.index] + _ARTIFACT + text[place.end_mark.index :]
    )
    if _artifacts(yaml.safe_load(changed)) != _artifacts(document) | {found.name: _ARTIFACT}:
        raise PackageError(
            f"{path} has the file of {found.name} in a part that stands for several; edit it by hand"
        )
    _write(
        folder, {_ARTIFACT: _as_bytes(model)}, overwrite=overwrite or found.artifact == _ARTIFACT
    )
    _write(folder, {METADATA: changed.encode()}, overwrite=True)
    return folder / _ARTIFACT


def _check_contract(contract: str) -> None:
    if contract != CONTRACT:
        raise ValueError(unknown("contract is", contract, [CONTRACT]))


def _sampler(vocab_size: int, provider: str, *, positions: bool = False) -> ir.Model:
    return build_token_sampler(vocab_size, positions=positions, control_flow=provider == "cpu")


@dataclass(frozen=True)
class _Component:
    """The sampler of a workflow package. bindings: contract role → port. ports: port → its axes, sizes or names."""

    name: str
    artifact: str
    bindings: Mapping[str, str]
    ports: Mapping[str, list[Any]]

    @classmethod
    def of(cls, path: Path, document: Any) -> _Component:
        """Raises PackageError, whose message names what is missing or different."""
        components = _mapping(path, document, "pipeline", "workflow", "components")
        contracts = {name: _contract_of(component) for name, component in components.items()}
        names = [name for name, contract in contracts.items() if contract == CONTRACT]
        if len(names) != 1:
            listed = (
                ", ".join(f"{name}: {contract}" for name, contract in contracts.items() if contract)
                or "none"
            )
            raise PackageError(
                f"{path} has {len(names)} components of {CONTRACT}, and a single one is replaced ({listed:.300})"
            )
        (name,) = names
        component = components[name]
        implementation, contract = (
            _mapping(path, component, key) for key in ("implementation", "contract")
        )
        kind, artifact, effects = (
            implementation.get("kind"),
            implementation.get("artifact"),
            component.get("effects"),
        )
        overridable = component.get("application_overridable") is True
        given = _mapping(path, contract, "parameters")
        for is_right, problem in (
            (overridable, "is not application_overridable, so its sampler may not be replaced"),
            (not effects, f"has effects, and the sampler has none: {shown(effects)}"),
            (
                kind == "onnx" and isinstance(artifact, str),
                f"is {shown(kind)}; only an ONNX file is replaced",
            ),
            *(
                (
                    given.get(key) == value,
                    f"has {key} {shown(given.get(key))}; the sampler's is {value!r}",
                )
                for key, value in _PARAMETERS.items()
            ),
        ):
            if not is_right:
                raise PackageError(f"{path}: {name} {problem}")
        bindings = _mapping(path, contract, "bindings")
        ports: dict[str, list[Any]] = {}
        spec = sampler_ports()
        for side, tensors in (("inputs", spec.inputs), ("outputs", spec.outputs)):
            declared = _mapping(path, component, "ports", side)
            if sorted(declared) != sorted(str(bindings.get(tensor.name)) for tensor in tensors):
                roles = ", ".join(tensor.name for tensor in tensors)
                raise PackageError(
                    f"{path}: the {side} of {name} are {', '.join(declared)}; they must be bound to {roles}"
                )
            for tensor in tensors:
                port = declared[bindings[tensor.name]]
                axes = port.get("shape") if isinstance(port, dict) else None
                ranks = (2, 3) if tensor.name == "logits" else (len(tensor.axes),)
                if (
                    not isinstance(axes, list)
                    or len(axes) not in ranks
                    or port.get("dtype") != tensor.dtype
                ):
                    raise PackageError(
                        f"{path}: port {bindings[tensor.name]} of {name} is {shown(port, 120)}; the sampler's "
                        f"{tensor.name} is {tensor.dtype} with {' or '.join(map(str, ranks))} axes"
                    )
                ports[bindings[tensor.name]] = axes
        return cls(name, str(artifact), bindings, ports)

    @property
    def positions(self) -> bool:
        """Whether the logits cover several positions."""
        return len(self.ports[self.bindings["logits"]]) == 3

    def vocab_size(self, document: Any) -> int | None:
        """V by the port of the logits, or else by the other components' ports; None if they do not agree."""
        own = self.ports[self.bindings["logits"]][-1]
        sizes = {own} if isinstance(own, int) else set(_logit_sizes(document))
        return sizes.pop() if len(sizes) == 1 else None


def _artifacts(document: Any) -> dict[str, Any]:
    """The file of each component."""
    components = document["pipeline"]["workflow"]["components"]
    parts = {
        name: component for name, component in components.items() if isinstance(component, dict)
    }
    return {
        name: (component.get("implementation") or {}).get("artifact")
        for name, component in parts.items()
    }


def _logit_sizes(document: Any) -> Iterator[int]:
    """The last axis of each output that a component gives the role of logits."""
    for component in document["pipeline"]["workflow"]["components"].values():
        ports = (component.get("ports") if isinstance(component, dict) else None) or {}
        for name, role in (ports.get("roles") or {}).items():
            shape = ((ports.get("outputs") or {}).get(name) or {}).get("shape") or [None]
            if role == "logits" and isinstance(shape[-1], int):
                yield shape[-1]


def _contract_of(component: Any) -> str:
    contract = component.get("contract") if isinstance(component, dict) else None
    return f"{contract.get('id')}@{contract.get('version')}" if isinstance(contract, dict) else ""


def _mapping(path: Path, value: Any, *keys: str) -> dict[str, Any]:
    for index, key in enumerate(keys):
        value = value.get(key) if isinstance(value, dict) else None
        if not isinstance(value, dict):
            raise PackageError(
                f"{path} has no {'.'.join(keys[: index + 1])}; it is not the metadata of a workflow"
            )
    result: dict[str, Any] = value
    return result


def _find(node: Any, keys: tuple[str, ...]) -> Any:
    """The scalar of a YAML document at a path of keys, with its place in the text."""
    for key in keys:
        node = next((value for name, value in node.value if name.value == key), None)
        if node is None:  # merged from elsewhere
            return None
    return node


def _declaration(
    identity: str, artifact: str, ports: GraphSpec, sizes: Mapping[str, int]
) -> dict[str, Any]:
    def declared(name: str, dtype: str, axes: tuple[Any, ...]) -> dict[str, Any]:
        aligned = (
            {"batch_layout": {"kind": "request_aligned", "axis": 0}} if axes[0] == "batch" else {}
        )
        return {"dtype": dtype, "shape": [sizes.get(axis, axis) for axis in axes], **aligned}

    sides = {
        side: {spec.name: declared(spec.name, spec.dtype, spec.axes) for spec in specs}
        for side, specs in (("inputs", ports.inputs), ("outputs", ports.outputs))
    }
    names = [spec.name for spec in (*ports.inputs, *ports.outputs)]
    contract = {
        "id": identity,
        "version": VERSION,
        "equivalence": "semantic",
        "bindings": {name: name for name in names},
        "parameters": dict(_PARAMETERS),
    }
    return {
        "implementation": {"kind": "onnx", "artifact": artifact},
        "ports": sides,
        "contract": contract,
        "application_overridable": identity == SAMPLER,
    }


def _as_bytes(model: ir.Model) -> bytes:
    result: bytes = ir.to_proto(model).SerializeToString()
    return result


def _write(folder: Path, files: Mapping[str, bytes], *, overwrite: bool) -> list[Path]:
    """Write files below a folder, each whole or not at all."""
    paths = [folder / name for name in files]
    taken = [path for path in paths if os.path.lexists(path)]
    if taken and not overwrite:
        raise PackageError(
            f"{taken[0]} exists; give overwrite (--overwrite) to replace it, or another folder"
        )
    try:
        with full_disk_named(folder):
            for path in paths:
                path.parent.mkdir(parents=True, exist_ok=True)
                if not path.parent.resolve().is_relative_to(folder.resolve()):
                    raise PackageError(
                        f"{path.parent} is a link that leads out of {folder}; remove it"
                    )
            with ScratchFolder(folder) as scratch:
                for path, content in zip(paths, files.values(), strict=True):
                    made = scratch.new / path.name
                    made.write_bytes(content)
                    made.replace(path)
    except OSError as error:
        raise PackageError(
            f"cannot write to {folder}: {error.strerror}; choose another folder"
        ) from error
    return paths
