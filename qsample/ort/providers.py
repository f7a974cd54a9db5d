"""Execution providers: which exist here, what a manifest may ask of them, and their sessions.

Some providers are part of ONNX Runtime. Others are plugins, libraries of separate packages that
have to be registered first (https://onnxruntime.ai/docs/execution-providers/plugin-ep-libraries).
`PROVIDERS` describes each, and `Place` is the choice for a package.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

import onnxruntime as ort

from qsample.errors import PackageError, QsampleError, install_hint, shown
from qsample.extensions import TARGETS, extension_names, load_extension
from qsample.ort.options import session_options
from qsample.package.package import Package

CPU: Final = "CPUExecutionProvider"
CUDA: Final = "CUDAExecutionProvider"
OPENVINO: Final = "OpenVINOExecutionProvider"
TENSORRT: Final = "TensorrtExecutionProvider"
WEBGPU: Final = "WebGpuExecutionProvider"
# OpenVINO's option that chooses a device.
DEVICE_OPTION: Final = "device_type"
# WebGPU's option that names the nodes for the host, in manifests with spaces between the names.
HOST_NODES_OPTION: Final = "forceCpuNodeNames"


class Provider(NamedTuple):
    """An execution provider, as qsample knows it.

    Attributes:
        extra: The pip extra of qsample that installs it.
        advice: The end of a sentence that begins with the command that installs the extra.
        options: The options that a manifest may set, each with a pattern of its whole value: the
            precision, and the options that the targets of `compile` write. None if no manifest may
            name the provider.
        memory: The device of a session's buffers.
        fallbacks: The providers, before the CPU's, for the nodes that it does not run.
    """

    extra: str = ""
    advice: str = ""
    options: Mapping[str, str] | None = None
    memory: str = "cpu"
    fallbacks: tuple[str, ...] = ()


# The best provider comes first.
PROVIDERS: Final[Mapping[str, Provider]] = {
    CUDA: Provider(
        "gpu",
        ", in place of the extra cpu, brings CUDA",
        {"enable_cuda_graph": "[01]", "use_tf32": "[01]"},
        memory="cuda",
    ),
    WEBGPU: Provider(
        "webgpu",
        " brings WebGPU",
        {"enableInt64": "[01]", HOST_NODES_OPTION: r"[\w.:/ -]*"},
        memory="webgpu",
    ),
    OPENVINO: Provider(
        "openvino",
        " brings OpenVINO",
        {DEVICE_OPTION: "CPU|GPU|NPU", "INFERENCE_PRECISION_HINT": "f32|f16|bf16"},
    ),
    CPU: Provider(options={}),
    TENSORRT: Provider(
        "gpu",
        ", in place of the extra cpu, and NVIDIA's TensorRT libraries bring TensorRT",
        fallbacks=(CUDA,),
    ),
}
_PROVIDER_SUFFIX: Final = "ExecutionProvider"
_PLUGIN_PREFIX: Final = "onnxruntime_ep_"


def execution_providers(name: str) -> tuple[str, ...]:
    """ONNX Runtime's providers for a short name such as "cuda", in order of preference.

    The CPU's provider comes last. Raises QsampleError unless ONNX Runtime knows the provider, or an
    installed plugin `onnxruntime_ep_<name>` has it.
    """
    known = {short_name(provider): provider for provider in ort.get_all_providers()}
    provider = known.get(name) or next(iter(_plugin_providers(_PLUGIN_PREFIX + name)), None)
    if provider is None:
        choices = sorted(repr(short_name(provider)) for provider in PROVIDERS)
        raise QsampleError(
            f"no provider {name!r}; choose {' or '.join(choices)}, or give "
            f"a list of ONNX Runtime's names: {', '.join(available_providers())}"
        )
    return tuple(dict.fromkeys((provider, *_known(provider).fallbacks, CPU)))


def device_of(providers: Sequence[str]) -> str:
    """The device of the buffers of a session on `providers`: "cuda", "webgpu" or "cpu"."""
    devices = [_known(provider).memory for provider in providers]
    for device in ("cuda", "webgpu"):
        if device in devices:
            return device
    return "cpu"


def available_providers() -> list[str]:
    """The providers of this installation: those of ONNX Runtime and of installed plugins."""
    built_in: list[str] = ort.get_available_providers()
    others = [name for name in ort.get_all_providers() if name not in built_in]
    return built_in + [name for name in others if is_plugin(name)]


def check_available(providers: Sequence[str]) -> None:
    """Raise QsampleError, with advice on installation, unless this installation has all of them."""
    built_in = ort.get_available_providers()
    absent = [name for name in providers if name not in built_in and not is_plugin(name)]
    if absent or not providers:
        advice = f". {_install_advice(absent[0])}" if absent else ""
        raise QsampleError(
            f"this onnxruntime has no {', '.join(absent) or 'provider in an empty list'}; it has "
            f"{', '.join(available_providers())}{advice}"
        )


def is_version(least: str) -> bool:
    """Whether the installed ONNX Runtime is `least`, such as "1.32", or newer."""
    return _major_and_minor(ort.__version__) >= _major_and_minor(least)


def _major_and_minor(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def check_version(least: str) -> None:
    """Raise QsampleError if the installed ONNX Runtime is older than `least`, such as "1.32"."""
    if not is_version(least):
        raise QsampleError(
            f"ONNX Runtime is {ort.__version__}, and this needs {least} or newer; upgrade it: "
            f"pip install -U 'onnxruntime>={least}'"
        )


def is_plugin(provider: str) -> bool:
    """Whether an installed plugin has the provider.

    ONNX Runtime's guide says how the module of a plugin is named
    (https://onnxruntime.ai/docs/execution-providers/plugin-ep-libraries/packaging.html).
    """
    return provider in _plugin_providers(_plugin_module(provider))


def _known(provider: str) -> Provider:
    return PROVIDERS.get(provider, Provider())


def short_name(provider: str) -> str:
    """ONNX Runtime's name without `ExecutionProvider`, in lower case."""
    return provider.removesuffix(_PROVIDER_SUFFIX).lower()


def _plugin_module(provider: str) -> str:
    return _PLUGIN_PREFIX + short_name(provider)


def _plugin_providers(module: str) -> list[str]:
    """The providers of a plugin's module; none if it is not installed. `onnxruntime_ep_cuda` does
    not have the provider that is part of ONNX Runtime."""
    if not module.isidentifier() or find_spec(module) is None:
        return []
    names: list[str] = import_module(module).get_ep_names()
    return names


def _install_advice(provider: str) -> str:
    known = _known(provider)
    if known.extra:
        return f"`{install_hint(known.extra)}`{known.advice}"
    return f"Install an onnxruntime that is built with it, or its plugin, the module {_plugin_module(provider)}"


def check_manifest_options(package: Package, provider: object, chosen: Mapping[str, str]) -> None:
    """Raise PackageError if the manifest of a device package names a forbidden provider or option.

    A manifest may come from a stranger, and some options of providers load libraries or write
    files. The options that the package's compile target writes are allowed if the target is
    installed (entry point group `qsample.targets`).

    Args:
        package: The package.
        provider: The caller's provider, as a short name or a list; it is allowed.
        chosen: The caller's options, which replace the manifest's and are allowed.
    """
    compilation = package.manifest.compilation
    if compilation is None:
        return
    allowed = {
        name: known.options for name, known in PROVIDERS.items() if known.options is not None
    }
    for name in _named_by(provider, compilation.provider):
        allowed.setdefault(name, {})
    unknown = [name for name in compilation.execution_providers if name not in allowed]
    first = next(iter(compilation.execution_providers), "")
    patterns = allowed.get(first, {})
    refused = [
        name
        for name, value in compilation.provider_options.items()
        if name not in chosen and not (name in patterns and re.fullmatch(patterns[name], value))
    ]
    if unknown or refused:
        written = _written_by_target(compilation.provider)
        unknown = [name for name in unknown if name not in written.providers]
        refused = [
            name
            for name in refused
            if written.options.get(name) != compilation.provider_options[name]
        ]
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


@dataclass(frozen=True, slots=True)
class Place:
    """Where a package's graphs run here.

    Attributes:
        providers: ONNX Runtime's execution providers in order of preference; this installation has
            all of them.
        device: The device of the decoder's buffers: "cpu", "cuda" or "webgpu".
        compiled_for: The first execution provider that the package was compiled for; None for a
            portable package.
    """

    providers: tuple[str, ...]
    device: str
    compiled_for: str | None

    @classmethod
    def of(
        cls,
        package: Package,
        provider: str | Sequence[str] | None,
        provider_options: Mapping[str, str],
    ) -> Place:
        """Choose the place, and check that the package may run there.

        Args:
            package: The package.
            provider: A short name (see `execution_providers`) or ONNX Runtime's provider names in
                order of preference; None for the provider that a device package was compiled for,
                otherwise the CPU.
            provider_options: The caller's options of the first provider.

        Raises:
            QsampleError: The provider does not exist here, the package was compiled for another
                provider, or it needs a newer ONNX Runtime.
            PackageError: The manifest names a provider or an option that a package may not name.
            ValueError: `provider` is neither a name nor a list of names.
        """
        providers = _wanted_providers(package, provider)
        check_manifest_options(package, provider, provider_options)
        device = device_of(providers)
        number = str(provider_options.get("device_id", "0"))
        if device == "cuda" and number != "0":
            raise QsampleError(
                f"provider_options has device_id {number!r}, and a process takes its first GPU; set the environment "
                f"variable CUDA_VISIBLE_DEVICES={number} for this process, and leave device_id out"
            )
        check_available(providers)
        compilation = package.manifest.compilation
        if compilation is None:
            return cls(providers, device, compiled_for=None)
        if compilation.least_onnxruntime is not None:
            check_version(compilation.least_onnxruntime)
        return cls(providers, device, compilation.execution_providers[0])

    @property
    def on_cpu(self) -> bool:
        """Whether ONNX Runtime's CPU provider runs the graphs."""
        return self.providers[0] == CPU

    @property
    def is_plain_cpu(self) -> bool:
        """Whether ONNX Runtime's CPU provider runs graphs that were compiled for it or for no
        provider.

        Elsewhere attention is compiled for the capacity as its longest row, so it takes no batch of
        prompts, whichever provider runs it.
        """
        return self.on_cpu and self.compiled_for in (None, CPU)


def _wanted_providers(package: Package, provider: str | Sequence[str] | None) -> tuple[str, ...]:
    """The providers that `Place.of` takes for its arguments, unchecked."""
    compilation = package.manifest.compilation
    if provider is None:
        return compilation.execution_providers if compilation is not None else (CPU,)
    if isinstance(provider, str):
        if compilation is None:
            return execution_providers(provider)
        if provider != compilation.provider:
            raise QsampleError(
                f"{package.path} was compiled for {compilation.provider!r}, not {provider!r}; compile the portable "
                f"package for {provider!r}, or leave provider out"
            )
        return compilation.execution_providers
    providers = tuple(provider) if isinstance(provider, Sequence) else (provider,)
    if not all(isinstance(name, str) for name in providers):
        raise ValueError(
            f'provider is {shown(provider)}; give a short name such as "cpu", or a list of ONNX Runtime\'s names, '
            "the options of the first with provider_options"
        )
    return providers


def _named_by(provider: Any, target: str) -> tuple[str, ...]:
    """The execution providers that the caller names; none for the name of a target that ONNX
    Runtime does not know.

    Args:
        provider: The caller's provider, as a short name or a list; None for the default.
        target: The name of the package's target.
    """
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


@dataclass(frozen=True, slots=True)
class _TargetProviders:
    """The providers and options that a compile target writes to manifests."""

    providers: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)


def _written_by_target(name: str) -> _TargetProviders:
    """The providers and options of an installed target; nothing if it cannot be imported here."""
    if name not in extension_names(TARGETS):
        return _TargetProviders()
    try:
        target = load_extension(TARGETS, name)
    except ImportError:
        # The target needs a library that running packages does not need.
        return _TargetProviders()
    return _TargetProviders(tuple(target.execution_providers), dict(target.provider_options))


def open_session(
    model: Path | bytes,
    options: ort.SessionOptions,
    providers: Sequence[str],
    provider_options: Mapping[str, str] | None = None,
    **more: Any,
) -> ort.InferenceSession:
    """Open a session.

    Args:
        model: The file of a model, or the model as bytes.
        options: The options of the session.
        providers: The execution providers in order of preference.
        provider_options: The options of the first provider.
        more: Further arguments of InferenceSession.

    Raises:
        QsampleError: The first provider does not load; ONNX Runtime would only warn, and run
            without it.
    """
    chosen = dict(provider_options or {})
    if CUDA in providers:
        # This loads the CUDA libraries of pip packages.
        ort.preload_dlls()
    if is_plugin(providers[0]):
        add_plugin(options, providers[0], chosen)
        session = ort.InferenceSession(model, options, **more)
    else:
        options_of_others: list[dict[str, str]] = [{} for _ in providers[1:]]
        session = ort.InferenceSession(
            model,
            options,
            providers=list(providers),
            provider_options=[chosen, *options_of_others],
            **more,
        )
    if providers[0] not in session.get_providers():
        raise QsampleError(
            f"{providers[0]} is part of this onnxruntime and does not load here; the graph would run on "
            f"{', '.join(session.get_providers())}. docs/devices.md lists the provider's requirements"
        )
    return session


def compile_context(
    source: Path, destination: Path, providers: Sequence[str], provider_options: Mapping[str, str]
) -> None:
    """Let an execution provider compile a graph ahead of time.

    In the compiled graph, EPContext nodes replace the nodes that the provider runs. Their content
    and the remaining weights lie in files next to it
    (https://onnxruntime.ai/docs/execution-providers/EP-Context-Design.html).

    Args:
        source: The file of the graph.
        destination: The file of the compiled graph.
        providers: The execution providers in order of preference; the first compiles.
        provider_options: The options of the first provider.
    """
    options = session_options()
    if is_plugin(providers[0]):
        add_plugin(options, providers[0], provider_options)
    else:
        # The last provider, the CPU's, is always there.
        for index, provider in enumerate(providers[:-1]):
            options.add_provider(provider, dict(provider_options) if index == 0 else {})
    compiler = ort.ModelCompiler(
        options,
        source,
        embed_compiled_data_into_model=False,
        external_initializers_file_path=f"{destination.name}.data",
        external_initializers_size_threshold=1024,
    )
    compiler.compile_to_file(str(destination))


def add_plugin(
    options: ort.SessionOptions, provider: str, provider_options: Mapping[str, str]
) -> None:
    """Add a plugin's provider to the options of a session, on all its devices of this machine.

    Args:
        options: The options of the session.
        provider: The provider.
        provider_options: Its options. For OpenVINO, these are `DEVICE_OPTION`, by default "CPU",
            and properties of that device
            (https://docs.openvino.ai/2026/openvino-workflow/running-inference/inference-devices-and-modes/cpu-device.html).

    Raises:
        QsampleError: The provider finds no device.
    """
    if provider == OPENVINO:
        _add_openvino(options, provider_options)
        return
    devices = plugin_devices(provider)
    if not devices:
        raise QsampleError(
            f"{provider} finds no device here. docs/devices.md lists the provider's requirements"
        )
    given = dict(provider_options)
    if provider == WEBGPU:
        # WebGPU chooses its GPU itself.
        devices = devices[:1]
        if HOST_NODES_OPTION in given:
            # WebGPU expects lines, and manifests must not hold control characters.
            given[HOST_NODES_OPTION] = given[HOST_NODES_OPTION].replace(" ", "\n")
    options.add_provider_for_devices(devices, given)


def _add_openvino(options: ort.SessionOptions, provider_options: Mapping[str, str]) -> None:
    properties = dict(provider_options)
    wanted = properties.pop(DEVICE_OPTION, "CPU")
    devices = {device.ep_metadata.get("ov_device"): device for device in plugin_devices(OPENVINO)}
    if wanted not in devices:
        raise QsampleError(
            f"{OPENVINO} finds no device {wanted!r} here, only {', '.join(map(repr, devices)) or 'none at all'}; it "
            "takes Intel's processors alone"
        )
    if options.intra_op_num_threads:
        properties["INFERENCE_NUM_THREADS"] = str(options.intra_op_num_threads)
    chosen = {"load_config": json.dumps({wanted: properties})} if properties else {}
    options.add_provider_for_devices([devices[wanted]], chosen)


def plugin_devices(provider: str) -> list[Any]:
    """Register a plugin if necessary.

    Returns:
        The devices that its provider has here, as ONNX Runtime's OrtEpDevice.
    """
    if not any(device.ep_name == provider for device in ort.get_ep_devices()):
        library = import_module(_plugin_module(provider)).get_library_path()
        ort.register_execution_provider_library(provider, library)
    return [device for device in ort.get_ep_devices() if device.ep_name == provider]
