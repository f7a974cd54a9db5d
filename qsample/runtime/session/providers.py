"""Names of execution providers enter; whether this installation has them, and sessions that use them, leave.

Some providers are part of ONNX Runtime. Others are libraries of their own, which have to be registered first:
https://onnxruntime.ai/docs/execution-providers/plugin-ep-libraries
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import onnxruntime as ort

from qsample.errors import QsampleError
from qsample.runtime.session.options import session_options

# Provider → the module that brings its library.
PLUGINS: Final[Mapping[str, str]] = {"OpenVINOExecutionProvider": "onnxruntime_ep_openvino"}
DEVICE: Final = "device_type"  # the option that chooses one of a plugin's devices
_INSTALL: Final[Mapping[str, str]] = {
    "CUDAExecutionProvider": "`pip install qsample[gpu]`, in place of qsample[cpu], brings CUDA",
    "OpenVINOExecutionProvider": "`pip install qsample[openvino]` brings OpenVINO",
    "TensorrtExecutionProvider": (
        "`pip install qsample[gpu]`, in place of qsample[cpu], and NVIDIA's TensorRT libraries bring TensorRT"
    ),
}


def available_providers() -> list[str]:
    """The providers that can be asked for: ONNX Runtime's own and those of installed plugins."""
    own: list[str] = ort.get_available_providers()
    return own + [name for name, module in PLUGINS.items() if name not in own and find_spec(module) is not None]


def check_available(providers: Sequence[str]) -> None:
    """Raise QsampleError, with what to install, unless this installation has all of them."""
    available = available_providers()
    absent = [name for name in providers if name not in available]
    if absent or not providers:
        advice = "".join(f". {_INSTALL[name]}" for name in absent[:1] if name in _INSTALL)
        raise QsampleError(
            f"this onnxruntime has no {', '.join(absent) or 'provider in an empty list'}; it has "
            f"{', '.join(available)}{advice}"
        )


def open_session(
    model: Path | bytes,
    options: ort.SessionOptions,
    providers: Sequence[str],
    provider_options: Mapping[str, str] | None = None,
    **more: Any,
) -> ort.InferenceSession:
    """A session on `providers`, in order of preference. provider_options: for the first. more: for InferenceSession.

    Raises QsampleError where the first provider does not load; ONNX Runtime would only warn, and go without.
    """
    chosen = dict(provider_options or {})
    if "CUDAExecutionProvider" in providers:
        ort.preload_dlls()  # the CUDA libraries of pip packages
    if providers[0] in PLUGINS:
        add_plugin(options, providers[0], chosen)
        session = ort.InferenceSession(model, options, **more)
    else:
        each = [chosen, *({} for _ in providers[1:])]
        session = ort.InferenceSession(model, options, providers=list(providers), provider_options=each, **more)
    if providers[0] not in session.get_providers():
        raise QsampleError(
            f"{providers[0]} is part of this onnxruntime and does not load here; the graph would run on "
            f"{', '.join(session.get_providers())}. README.md says what the provider needs"
        )
    return session


def compile_context(
    source: Path, destination: Path, providers: Sequence[str], provider_options: Mapping[str, str]
) -> None:
    """Let the first of `providers` compile ahead of time: write `destination`, in which EPContext nodes have taken the
    place of what it runs, with their content and the remaining weights beside it.

    https://onnxruntime.ai/docs/execution-providers/EP-Context-Design.html
    """
    options = session_options()
    if providers[0] in PLUGINS:
        add_plugin(options, providers[0], provider_options)
    else:
        for place, provider in enumerate(providers[:-1]):  # the last one, the CPU's, is there anyway
            options.add_provider(provider, dict(provider_options) if place == 0 else {})
    compiler = ort.ModelCompiler(
        options,
        source,
        embed_compiled_data_into_model=False,
        external_initializers_file_path=f"{destination.name}.data",
        external_initializers_size_threshold=1024,
    )
    compiler.compile_to_file(str(destination))


def add_plugin(options: ort.SessionOptions, provider: str, provider_options: Mapping[str, str]) -> None:
    """Put a provider of PLUGINS into `options`.

    provider_options: DEVICE, "CPU" where it is absent, and OpenVINO's properties of that device
    (https://docs.openvino.ai/2026/openvino-workflow/running-inference/inference-devices-and-modes/cpu-device.html).

    Raises QsampleError where the provider has no such device here.
    """
    properties = dict(provider_options)
    wanted = properties.pop(DEVICE, "CPU")
    devices = {device.ep_metadata.get("ov_device"): device for device in _devices(provider)}
    if wanted not in devices:
        raise QsampleError(
            f"{provider} finds no device {wanted!r} here, only {', '.join(map(repr, devices)) or 'none at all'}; it "
            "takes Intel's processors alone"
        )
    if options.intra_op_num_threads:
        properties["INFERENCE_NUM_THREADS"] = str(options.intra_op_num_threads)
    chosen = {"load_config": json.dumps({wanted: properties})} if properties else {}
    options.add_provider_for_devices([devices[wanted]], chosen)


def _devices(provider: str) -> list[Any]:
    found = [device for device in ort.get_ep_devices() if device.ep_name == provider]
    if not found:  # nothing has registered it yet
        library = import_module(PLUGINS[provider]).get_library_path()
        ort.register_execution_provider_library(provider, library)
        found = [device for device in ort.get_ep_devices() if device.ep_name == provider]
    return found
