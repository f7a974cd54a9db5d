"""The execution providers and their options that the manifest of a package may name.

A manifest is data that may come from anybody, and some options of a provider load libraries or write files. The
caller's own options are not checked here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, Final

from qsample.errors import PackageError, QsampleError
from qsample.ort.providers import CPU, CUDA, DEVICE, OPENVINO, WEBGPU, execution_providers
from qsample.package.package import Package

TARGETS: Final = "qsample.targets"  # the group of entry points of installed compile targets
# Provider → option → its values, as a pattern of the whole text: those that compile's own targets write, and precision.
ALLOWED_OPTIONS: Final[Mapping[str, Mapping[str, str]]] = {
    CPU: {},
    CUDA: {"enable_cuda_graph": "[01]", "use_tf32": "[01]"},
    OPENVINO: {DEVICE: "CPU|GPU|NPU", "INFERENCE_PRECISION_HINT": "f32|f16|bf16"},
    WEBGPU: {"enableInt64": "[01]", "forceCpuNodeNames": r"[\w.:/ -]*"},
}


def check_manifest_options(package: Package, provider: object, chosen: Mapping[str, str]) -> None:
    """Raise PackageError if the manifest of a device package names a provider or an option that a package may not.

    An installed compile target that the package was made for (entry point group `qsample.targets`) may have every
    option that it writes.

    Args:
        package: of any kind.
        provider: the caller's, by short name or in a list: it is allowed.
        chosen: the caller's own options, which replace the manifest's.
    """
    compilation = package.manifest.compilation
    if compilation is None:
        return
    allowed = {name: dict(options) for name, options in ALLOWED_OPTIONS.items()}
    for name in _named_by(provider, compilation.provider):
        allowed.setdefault(name, {})
    unknown = [name for name in compilation.execution_providers if name not in allowed]
    first = next(iter(compilation.execution_providers), "")
    refused = _refused(compilation.provider_options, allowed.get(first, {}), chosen)
    if unknown or refused:
        providers, options = _of_installed_target(compilation.provider)
        unknown = [name for name in unknown if name not in providers]
        refused = [name for name in refused if options.get(name) != compilation.provider_options[name]]
    if unknown:
        raise PackageError(
            f"{package.path} asks for the execution provider {unknown[0]!r:.80}, which a package may not by itself; if "
            "you trust it, name its providers yourself: provider=[...]"
        )
    if refused:
        name = refused[0]
        raise PackageError(
            f"{package.path} sets {first}'s option {name!r:.80} to {compilation.provider_options[name]!r:.80}, which a "
            "package may not; if you trust it, pass the option yourself: provider_options={...}"
        )


def _refused(given: Mapping[str, str], allowed: Mapping[str, str], chosen: Mapping[str, str]) -> list[str]:
    return [
        name
        for name, value in given.items()
        if name not in chosen and not (name in allowed and re.fullmatch(allowed[name], value))
    ]


def _named_by(provider: Any, target: str) -> tuple[str, ...]:
    """The execution providers that the caller names; none for the name of a target that ONNX Runtime does not know."""
    if provider is None:
        return ()
    if not isinstance(provider, str):
        return tuple(provider)
    try:
        return execution_providers(provider)
    except QsampleError:
        if provider != target:
            raise
        return ()


def _of_installed_target(name: str) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """The providers and options that an installed target writes; nothing if it cannot be imported here."""
    for point in entry_points(group=TARGETS):
        if point.name == name:
            try:
                target = point.load().TARGET
            except ImportError:  # of a library that only exporting needs
                break
            return tuple(target.execution_providers), dict(target.provider_options)
    return (), {}
