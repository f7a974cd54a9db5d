"""Writes the policy components of `graphs.py` as files.

They go to a folder, with the YAML that declares them, or take the place of the sampler of an ONNX
workflow package.
"""

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
from qsample.checks import as_path
from qsample.contract.interface import GraphSpec
from qsample.contract.tensors import VOCAB, TensorSpec
from qsample.errors import PackageError, shown, unknown
from qsample.package.disk.scratch import ScratchFolder
from qsample.package.disk.space import full_disk_named
from qsample.package.disk.untrusted import read_text

METADATA: Final = "inference_metadata.yaml"
COMPONENTS: Final = "components.yaml"
CONTRACT: Final = f"{SAMPLER}@{VERSION}"
_FOLDER: Final = "policies"
_ARTIFACT: Final = f"{_FOLDER}/qsample_token_sampler.onnx"
_MAX_METADATA_BYTES: Final = 1 << 24
_PARAMETERS: Final = {"batching": "per_row", "inactive_rows": "preserve"}


@dataclass(frozen=True)
class _PolicyGraph:
    """A component that is written: the contract, its tensors, and the graph."""

    contract_id: str
    ports: GraphSpec
    model: ir.Model


def write_policy(
    out: str | Path,
    vocab_size: int,
    *,
    contract: str = CONTRACT,
    provider: str = "cpu",
    overwrite: bool = False,
) -> list[Path]:
    """Write sampler, termination and state update, and `components.yaml`, which declares them.

    Args:
        out: the folder, which is made if it is missing. Other files in it stay.
        vocab_size: V of the sampler, at least 1.
        contract: the contract of the sampler; "onnx-genai.token-sampler@2" is the only one.
        provider: the execution provider. Except for "cpu", the sampler has no control flow, so that
            CUDA can capture it.
        overwrite: replace files of these names.

    Returns:
        The files.

    Raises:
        ValueError: the contract is another one, or the vocabulary is empty.
        PackageError: a file exists or cannot be written.
    """
    _check_contract(contract)
    graphs = {
        "token_sampler": _PolicyGraph(SAMPLER, sampler_ports(), _sampler(vocab_size, provider)),
        "termination": _PolicyGraph(TERMINATION, TERMINATION_PORTS, build_termination()),
        "token_state_update": _PolicyGraph(STATE_UPDATE, STATE_UPDATE_PORTS, build_state_update()),
    }
    components: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    for name, graph in graphs.items():
        artifact = f"{_FOLDER}/{name}.onnx"
        components[name] = _declaration(graph, artifact, {VOCAB: vocab_size})
        files[artifact] = _as_bytes(graph.model)
    text = yaml.safe_dump({"components": components}, sort_keys=False)
    files[COMPONENTS] = text.encode()
    return _write(as_path("out", out), files, overwrite=overwrite)


def replace_sampler(
    package: str | Path,
    *,
    contract: str = CONTRACT,
    vocab_size: int | None = None,
    provider: str = "cpu",
    overwrite: bool = False,
) -> Path:
    """Write a sampler into a workflow package, in place of the package's; the old file stays.

    Args:
        package: the folder, with inference_metadata.yaml. In that file, only the `artifact` of the
            sampler changes.
        contract: the contract of the sampler, see `write_policy`.
        vocab_size: V; by default the size in the ports of the package.
        provider: the execution provider, see `write_policy`.
        overwrite: replace a sampler that was written before.

    Returns:
        The new file.

    Raises:
        ValueError: the contract is another one, or V is unknown.
        PackageError: the package has no such component, does not allow its replacement, or has
            other ports.
    """
    _check_contract(contract)
    folder = as_path("package", package)
    path = folder / METADATA
    try:
        text = read_text(path, _MAX_METADATA_BYTES)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        document = yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise PackageError(
            f"cannot read {path} ({error!s:.200}); give the folder of a workflow package, with "
            f"{METADATA}"
        ) from error
    component = _read_component(path, document)
    size = component.vocab_size(document) if vocab_size is None else vocab_size
    if size is None:
        raise ValueError(
            f"{path} does not say how many tokens its logits have; give vocab_size (--vocab-size)"
        )
    model = _sampler(size, provider, positions=component.positions)
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.name = component.bindings[str(value.name)]
    keys = ("pipeline", "workflow", "components", component.name, "implementation", "artifact")
    place = _find(root, keys)
    changed = text
    if place is not None:
        changed = text[: place.start_mark.index] + _ARTIFACT + text[place.end_mark.index :]
    if _artifacts(yaml.safe_load(changed)) != _artifacts(document) | {component.name: _ARTIFACT}:
        raise PackageError(
            f"{path} has the file of {component.name} in a part that stands for several; edit it by "
            "hand"
        )
    is_written_before = component.artifact == _ARTIFACT
    _write(folder, {_ARTIFACT: _as_bytes(model)}, overwrite=overwrite or is_written_before)
    _write(folder, {METADATA: changed.encode()}, overwrite=True)
    return folder / _ARTIFACT


def _check_contract(contract: str) -> None:
    if contract != CONTRACT:
        raise ValueError(unknown("contract is", contract, [CONTRACT]))


def _sampler(vocab_size: int, provider: str, *, positions: bool = False) -> ir.Model:
    return build_token_sampler(vocab_size, positions=positions, control_flow=provider == "cpu")


@dataclass(frozen=True)
class _Component:
    """The sampler of a workflow package.

    Attributes:
        name: the name of the component.
        artifact: the file of the component.
        bindings: the port of each role of the contract.
        ports: the axes of each port, as sizes or names.
    """

    name: str
    artifact: str
    bindings: Mapping[str, str]
    ports: Mapping[str, list[Any]]

    @property
    def positions(self) -> bool:
        """Whether the logits cover several positions."""
        return len(self.ports[self.bindings["logits"]]) == 3

    def vocab_size(self, document: Any) -> int | None:
        """V as the port of the logits says, or else the ports of other components.

        None if none of them says it, or if they differ.
        """
        own = self.ports[self.bindings["logits"]][-1]
        sizes = {own} if isinstance(own, int) else set(_logit_sizes(document))
        return sizes.pop() if len(sizes) == 1 else None


def _read_component(path: Path, document: Any) -> _Component:
    """Read the sampler of a workflow, and check that it can be replaced.

    Raises:
        PackageError: the message names the missing or different part.
    """
    components = _mapping(path, document, "pipeline", "workflow", "components")
    name = _sampler_name(path, components)
    component = components[name]
    implementation = _mapping(path, component, "implementation")
    contract = _mapping(path, component, "contract")
    problem = _obstacle(component, implementation, _mapping(path, contract, "parameters"))
    if problem is not None:
        raise PackageError(f"{path}: {name} {problem}")
    bindings = _mapping(path, contract, "bindings")
    ports: dict[str, list[Any]] = {}
    spec = sampler_ports()
    for side, tensors in (("inputs", spec.inputs), ("outputs", spec.outputs)):
        declared = _mapping(path, component, "ports", side)
        if sorted(declared) != sorted(str(bindings.get(tensor.name)) for tensor in tensors):
            roles = ", ".join(tensor.name for tensor in tensors)
            raise PackageError(
                f"{path}: the {side} of {name} are {', '.join(declared)}; they must be bound to "
                f"{roles}"
            )
        for tensor in tensors:
            port = bindings[tensor.name]
            ports[port] = _port_axes(path, name, port, declared[port], tensor)
    return _Component(name, str(implementation.get("artifact")), bindings, ports)


def _sampler_name(path: Path, components: Mapping[str, Any]) -> str:
    """The name of the only component with the contract of the sampler."""
    contracts = {name: _contract_of(component) for name, component in components.items()}
    names = [name for name, contract in contracts.items() if contract == CONTRACT]
    if len(names) != 1:
        others = [f"{name}: {contract}" for name, contract in contracts.items() if contract]
        listed = ", ".join(others) or "none"
        raise PackageError(
            f"{path} has {len(names)} components of {CONTRACT}, and a single one is replaced "
            f"({listed:.300})"
        )
    return names[0]


def _obstacle(
    component: Any, implementation: Mapping[str, Any], parameters: Mapping[str, Any]
) -> str | None:
    """The reason why a component cannot be replaced, as the end of a sentence; None if it can."""
    if component.get("application_overridable") is not True:
        return "is not application_overridable, so its sampler may not be replaced"
    effects = component.get("effects")
    if effects:
        return f"has effects, and the sampler has none: {shown(effects)}"
    kind = implementation.get("kind")
    if kind != "onnx" or not isinstance(implementation.get("artifact"), str):
        return f"is {shown(kind)}; only an ONNX file is replaced"
    for key, value in _PARAMETERS.items():
        if parameters.get(key) != value:
            return f"has {key} {shown(parameters.get(key))}; the sampler's is {value!r}"
    return None


def _port_axes(path: Path, name: str, port: str, declared: Any, tensor: TensorSpec) -> list[Any]:
    """The axes of a port, after a comparison with the sampler's tensor.

    Args:
        path: the metadata of the package.
        name: the component.
        port: the name of the port.
        declared: the declaration of the port.
        tensor: the tensor of the sampler that is bound to the port.
    """
    axes = declared.get("shape") if isinstance(declared, dict) else None
    ranks = (2, 3) if tensor.name == "logits" else (len(tensor.axes),)
    if isinstance(axes, list) and len(axes) in ranks and declared.get("dtype") == tensor.dtype:
        return axes
    raise PackageError(
        f"{path}: port {port} of {name} is {shown(declared, 120)}; the sampler's {tensor.name} is "
        f"{tensor.dtype} with {' or '.join(map(str, ranks))} axes"
    )


def _artifacts(document: Any) -> dict[str, Any]:
    """The file of each component, by the component's name."""
    artifacts: dict[str, Any] = {}
    for name, component in document["pipeline"]["workflow"]["components"].items():
        if isinstance(component, dict):
            artifacts[name] = (component.get("implementation") or {}).get("artifact")
    return artifacts


def _logit_sizes(document: Any) -> Iterator[int]:
    """The last axis of each output that has the role of logits."""
    for component in document["pipeline"]["workflow"]["components"].values():
        ports = (component.get("ports") if isinstance(component, dict) else None) or {}
        for name, role in (ports.get("roles") or {}).items():
            shape = ((ports.get("outputs") or {}).get(name) or {}).get("shape") or [None]
            if role == "logits" and isinstance(shape[-1], int):
                yield shape[-1]


def _contract_of(component: Any) -> str:
    """The contract of a component, "id@version"; empty if it has none."""
    contract = component.get("contract") if isinstance(component, dict) else None
    return f"{contract.get('id')}@{contract.get('version')}" if isinstance(contract, dict) else ""


def _mapping(path: Path, value: Any, *keys: str) -> dict[str, Any]:
    """The mapping at a path of keys; PackageError names the missing part."""
    for index, key in enumerate(keys):
        value = value.get(key) if isinstance(value, dict) else None
        if not isinstance(value, dict):
            raise PackageError(
                f"{path} has no {'.'.join(keys[: index + 1])}; it is not the metadata of a workflow"
            )
    result: dict[str, Any] = value
    return result


def _find(node: Any, keys: tuple[str, ...]) -> Any:
    """The scalar of a YAML document at a path of keys, with its place in the text.

    None if YAML merges a part of the path from another place.
    """
    for key in keys:
        node = next((value for name, value in node.value if name.value == key), None)
        if node is None:
            return None
    return node


def _declaration(graph: _PolicyGraph, artifact: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The declaration of a component, for YAML.

    Args:
        graph: the component.
        artifact: the file of the component.
        sizes: the sizes of named axes; other names stay.
    """
    tensors = (*graph.ports.inputs, *graph.ports.outputs)
    return {
        "implementation": {"kind": "onnx", "artifact": artifact},
        "ports": {
            "inputs": {spec.name: _port(spec, sizes) for spec in graph.ports.inputs},
            "outputs": {spec.name: _port(spec, sizes) for spec in graph.ports.outputs},
        },
        "contract": {
            "id": graph.contract_id,
            "version": VERSION,
            "equivalence": "semantic",
            "bindings": {spec.name: spec.name for spec in tensors},
            "parameters": dict(_PARAMETERS),
        },
        "application_overridable": graph.contract_id == SAMPLER,
    }


def _port(spec: TensorSpec, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The declaration of a tensor."""
    shape = [sizes.get(axis, axis) if isinstance(axis, str) else axis for axis in spec.axes]
    port: dict[str, Any] = {"dtype": spec.dtype, "shape": shape}
    if spec.axes[0] == "batch":
        port["batch_layout"] = {"kind": "request_aligned", "axis": 0}
    return port


def _as_bytes(model: ir.Model) -> bytes:
    result: bytes = ir.to_proto(model).SerializeToString()
    return result


def _write(folder: Path, files: Mapping[str, bytes], *, overwrite: bool) -> list[Path]:
    """Write files below a folder, each completely or not at all.

    Args:
        folder: the folder, which is made if it is missing.
        files: the content of each file, by its path in the folder.
        overwrite: replace existing files.

    Returns:
        The paths of the files.
    """
    paths = [folder / name for name in files]
    existing = [path for path in paths if os.path.lexists(path)]
    if existing and not overwrite:
        raise PackageError(
            f"{existing[0]} exists; give overwrite (--overwrite) to replace it, or another folder"
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
