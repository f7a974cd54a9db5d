"""Execution providers: their names, plugins, and providers that do not load."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import onnxruntime as ort
import pytest

from qsample.errors import QsampleError
from qsample.ort import providers
from qsample.package.package import Package

OPENVINO = "OpenVINOExecutionProvider"


class Options:
    """Stands in for ONNX Runtime's session options."""

    def __init__(self, threads: int = 0) -> None:
        self.intra_op_num_threads = threads
        self.added: list[Any] = []

    def add_provider_for_devices(self, devices: list[Any], options: dict[str, str]) -> None:
        self.added.append((devices, options))


def install_plugin(monkeypatch: pytest.MonkeyPatch, module: str, provider: str) -> None:
    """Pretend that a plugin's package is installed, and no other's."""
    content = SimpleNamespace(get_library_path=lambda: "the library", get_ep_names=lambda: [provider])
    monkeypatch.setattr(providers, "find_spec", lambda name: content if name == module else None)
    monkeypatch.setattr(providers, "import_module", lambda name: {module: content}[name])


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A plugin with a CPU and a GPU, there once its library is registered. Returns what was registered."""
    registered: list[Any] = []
    devices = [SimpleNamespace(ep_name=OPENVINO, ep_metadata={"ov_device": name}) for name in ("CPU", "GPU")]
    install_plugin(monkeypatch, "onnxruntime_ep_openvino", OPENVINO)
    monkeypatch.setattr(ort, "get_ep_devices", lambda: devices if registered else [])
    monkeypatch.setattr(ort, "register_execution_provider_library", lambda *call: registered.append(call))
    return registered


def test_a_plugin_is_registered_once_and_gets_its_properties(plugin: list[Any]) -> None:
    options: Any = Options(threads=3)
    providers.add_plugin(options, OPENVINO, {"device_type": "CPU", "INFERENCE_PRECISION_HINT": "f32"})
    providers.add_plugin(options, OPENVINO, {})
    assert plugin == [(OPENVINO, "the library")]
    (first, chosen), (_, threads_alone) = options.added
    assert [device.ep_metadata["ov_device"] for device in first] == ["CPU"]
    wanted = {"CPU": {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": "3"}}
    assert json.loads(chosen["load_config"]) == wanted
    assert json.loads(threads_alone["load_config"]) == {"CPU": {"INFERENCE_NUM_THREADS": "3"}}


@pytest.mark.usefixtures("plugin")
def test_a_device_that_is_not_there() -> None:
    options: Any = Options()
    with pytest.raises(QsampleError, match="finds no device 'NPU' here, only 'CPU', 'GPU'"):
        providers.add_plugin(options, OPENVINO, {"device_type": "NPU"})


@pytest.mark.parametrize(
    ("name", "chain"),
    [
        ("cpu", ["CPUExecutionProvider"]),
        ("cuda", ["CUDAExecutionProvider", "CPUExecutionProvider"]),
        ("openvino", ["OpenVINOExecutionProvider", "CPUExecutionProvider"]),
        ("tensorrt", ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]),
        ("coreml", ["CoreMLExecutionProvider", "CPUExecutionProvider"]),  # no table has it
    ],
)
def test_short_names(name: str, chain: list[str]) -> None:
    assert list(providers.execution_providers(name)) == chain


@pytest.mark.parametrize("name", ["tpu", "", "CPUExecutionProvider", "a.b"])
def test_names_of_no_provider(name: str) -> None:
    with pytest.raises(QsampleError, match=f"no provider '{name}'; choose 'cpu' or 'cuda' or 'openvino' or 'tensorrt'"):
        providers.execution_providers(name)


def test_a_plugin_that_onnxruntime_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package says what its provider is called; all of its devices are taken, with its own options."""
    name = "ContosoAIExecutionProvider"
    install_plugin(monkeypatch, "onnxruntime_ep_contosoai", name)
    registered: list[Any] = []
    device = SimpleNamespace(ep_name=name)
    monkeypatch.setattr(ort, "get_ep_devices", lambda: [device] if registered else [])
    monkeypatch.setattr(ort, "register_execution_provider_library", lambda *call: registered.append(call))
    assert providers.execution_providers("contosoai") == (name, "CPUExecutionProvider")
    providers.check_available([name])
    options: Any = Options()
    providers.add_plugin(options, name, {"mode": "fast"})
    assert registered == [(name, "the library")]
    assert options.added == [([device], {"mode": "fast"})]


def test_a_plugin_with_a_provider_of_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime-ep-cuda does not bring what ONNX Runtime itself calls CUDAExecutionProvider."""
    install_plugin(monkeypatch, "onnxruntime_ep_cuda", "CudaPluginExecutionProvider")
    assert not providers.is_plugin("CUDAExecutionProvider")
    assert providers.execution_providers("cuda")[0] == "CUDAExecutionProvider"


def test_what_to_install_for_a_provider_without_advice_of_its_own() -> None:
    with pytest.raises(QsampleError, match=r"has no FooExecutionProvider; .*or its plugin, .* onnxruntime_ep_foo$"):
        providers.check_available(["FooExecutionProvider"])


def test_an_installed_plugin_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    # Once a plugin is registered in this process, ONNX Runtime counts it among its own.
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    install_plugin(monkeypatch, "onnxruntime_ep_openvino", OPENVINO)
    assert OPENVINO in providers.available_providers()
    providers.check_available([OPENVINO, "CPUExecutionProvider"])
    monkeypatch.setattr(providers, "find_spec", lambda name: None)
    with pytest.raises(QsampleError, match=r"has no OpenVINO.*qsample\[openvino\]` brings OpenVINO"):
        providers.check_available([OPENVINO, "CPUExecutionProvider"])


def test_a_provider_that_does_not_load_is_an_error(fake: Callable[..., Package]) -> None:
    """ONNX Runtime would run everything on the CPU, with a warning."""
    path = fake().file("decoder.onnx")
    absent = next(name for name in ("CUDAExecutionProvider", OPENVINO) if name not in ort.get_available_providers())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(providers, "is_plugin", lambda provider: False)
        patch.setattr(ort, "preload_dlls", lambda: None)
        with pytest.warns(UserWarning, match=absent), pytest.raises(QsampleError, match=f"{absent} .*not load here"):
            providers.open_session(path, ort.SessionOptions(), [absent, "CPUExecutionProvider"])


def test_an_older_onnx_runtime_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, least in (("1.32.0", "1.32"), ("1.100.0", "1.32"), ("2.0.0", "1.32"), ("1.32.1rc1", "1.32")):
        monkeypatch.setattr(ort, "__version__", given)
        providers.check_version(least)
    monkeypatch.setattr(ort, "__version__", "1.31.2")
    with pytest.raises(
        QsampleError, match=r"ONNX Runtime is 1.31.2, and this needs 1.32 or newer; upgrade it: pip inst"
    ):
        providers.check_version("1.32")
