"""Execution providers: their names, plugins, providers that do not load, and what a manifest may ask of them: the
providers and options that compile writes, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime as ort
import pytest

from qsample import extensions
from qsample.compiler.targets import find_target, target_names
from qsample.errors import PackageError, QsampleError
from qsample.ort import providers, session
from qsample.ort.options import SessionOptions
from qsample.ort.providers import check_manifest_options
from qsample.ort.session import open_sessions
from qsample.package.package import MANIFEST_NAME, Package
from qsample.runtime import load
from tests.helpers.fake_package import compilation, fake_package

CPU, CUDA, OPENVINO = (f"{name}ExecutionProvider" for name in ("CPU", "CUDA", "OpenVINO"))


class Options:
    """Stands in for ONNX Runtime's session options."""

    def __init__(self, threads: int = 0) -> None:
        self.intra_op_num_threads = threads
        self.added: list[Any] = []

    def add_provider_for_devices(self, devices: list[Any], options: dict[str, str]) -> None:
        self.added.append((devices, options))


def install_plugin(monkeypatch: pytest.MonkeyPatch, module: str, provider: str) -> None:
    """Pretend that a plugin's package is installed, and no other's."""
    content = SimpleNamespace(
        get_library_path=lambda: "the library", get_ep_names=lambda: [provider]
    )
    monkeypatch.setattr(providers, "find_spec", lambda name: content if name == module else None)
    monkeypatch.setattr(providers, "import_module", lambda name: {module: content}[name])


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A plugin with a CPU and a GPU, there once its library is registered. Returns what was registered."""
    registered: list[Any] = []
    devices = [
        SimpleNamespace(ep_name=OPENVINO, ep_metadata={"ov_device": name})
        for name in ("CPU", "GPU")
    ]
    install_plugin(monkeypatch, "onnxruntime_ep_openvino", OPENVINO)
    monkeypatch.setattr(ort, "get_ep_devices", lambda: devices if registered else [])
    monkeypatch.setattr(
        ort, "register_execution_provider_library", lambda *call: registered.append(call)
    )
    return registered


def test_a_plugin_is_registered_once_and_gets_its_properties(plugin: list[Any]) -> None:
    options: Any = Options(threads=3)
    providers.add_plugin(
        options, OPENVINO, {"device_type": "CPU", "INFERENCE_PRECISION_HINT": "f32"}
    )
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
        (
            "tensorrt",
            ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"],
        ),
        ("coreml", ["CoreMLExecutionProvider", "CPUExecutionProvider"]),  # no table has it
    ],
)
def test_short_names(name: str, chain: list[str]) -> None:
    assert list(providers.execution_providers(name)) == chain


@pytest.mark.parametrize("name", ["tpu", "", "CPUExecutionProvider", "a.b"])
def test_names_of_no_provider(name: str) -> None:
    with pytest.raises(
        QsampleError,
        match=f"no provider '{name}'; choose 'cpu' or 'cuda' or 'openvino' or 'tensorrt'",
    ):
        providers.execution_providers(name)


def test_a_plugin_that_onnxruntime_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package says what its provider is called; all of its devices are taken, with its own options."""
    name = "ContosoAIExecutionProvider"
    install_plugin(monkeypatch, "onnxruntime_ep_contosoai", name)
    registered: list[Any] = []
    device = SimpleNamespace(ep_name=name)
    monkeypatch.setattr(ort, "get_ep_devices", lambda: [device] if registered else [])
    monkeypatch.setattr(
        ort, "register_execution_provider_library", lambda *call: registered.append(call)
    )
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
    with pytest.raises(
        QsampleError, match=r"has no FooExecutionProvider; .*or its plugin, .* onnxruntime_ep_foo$"
    ):
        providers.check_available(["FooExecutionProvider"])


def test_an_installed_plugin_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    # Once a plugin is registered in this process, ONNX Runtime counts it among its own.
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    install_plugin(monkeypatch, "onnxruntime_ep_openvino", OPENVINO)
    assert OPENVINO in providers.available_providers()
    providers.check_available([OPENVINO, "CPUExecutionProvider"])
    monkeypatch.setattr(providers, "find_spec", lambda name: None)
    with pytest.raises(QsampleError, match=r"has no OpenVINO.*\[openvino\]\"` brings OpenVINO"):
        providers.check_available([OPENVINO, "CPUExecutionProvider"])


def test_a_provider_that_does_not_load_is_an_error(fake: Callable[..., Package]) -> None:
    """ONNX Runtime would run everything on the CPU, with a warning."""
    path = fake().file("decoder.onnx")
    absent = next(
        name
        for name in ("CUDAExecutionProvider", OPENVINO)
        if name not in ort.get_available_providers()
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(providers, "is_plugin", lambda provider: False)
        patch.setattr(ort, "preload_dlls", lambda: None)
        with (
            pytest.warns(UserWarning, match=absent),
            pytest.raises(QsampleError, match=f"{absent} .*not load here"),
        ):
            providers.open_session(path, ort.SessionOptions(), [absent, "CPUExecutionProvider"])


def test_an_older_onnx_runtime_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, least in (
        ("1.32.0", "1.32"),
        ("1.100.0", "1.32"),
        ("2.0.0", "1.32"),
        ("1.32.1rc1", "1.32"),
    ):
        monkeypatch.setattr(ort, "__version__", given)
        providers.check_version(least)
    monkeypatch.setattr(ort, "__version__", "1.31.2")
    with pytest.raises(
        QsampleError,
        match=r"ONNX Runtime is 1.31.2, and this needs 1.32 or newer; upgrade it: pip inst",
    ):
        providers.check_version("1.32")


def package(tmp_path: Path, *providers: str, name: str = "cpu", **options: str) -> Package:
    made = compilation(provider=name, execution_providers=providers, provider_options=options)
    return fake_package(tmp_path / "package", compilation=made)


@pytest.mark.parametrize("name", target_names())
def test_what_our_own_targets_write_is_taken(name: str, tmp_path: Path) -> None:
    target = find_target(name)
    made = package(tmp_path, *target.execution_providers, name=name, **target.provider_options)
    check_manifest_options(made, None, {})
    check_manifest_options(made, name, {})


REFUSED = [
    (CUDA, {"use_tf32": "1 "}),
    (CUDA, {"user_compute_stream": "12345"}),
    (CUDA, {"gpu_external_alloc": "140000000"}),
    (CUDA, {"enable_cuda_graph": "yes"}),
    (CUDA, {"ENABLE_CUDA_GRAPH": "1"}),
    (CUDA, {"trt_fp16_enable": "1"}),
    (OPENVINO, {"load_config": "/etc/passwd"}),
    (OPENVINO, {"cache_dir": "/home"}),
    (OPENVINO, {"device_type": "HETERO:GPU,CPU"}),
    (OPENVINO, {"INFERENCE_PRECISION_HINT": '{"a": 1}'}),
    (CPU, {"anything": "1"}),
    (CPU, {"": ""}),
]


@pytest.mark.parametrize(
    ("provider", "options"), REFUSED, ids=[str(options) for _, options in REFUSED]
)
def test_other_options_are_refused(provider: str, options: dict[str, str], tmp_path: Path) -> None:
    made = package(tmp_path, provider, CPU, **options)
    message = rf"sets {provider}'s option {next(iter(options))!r} to .*which a package may not; .*provider_options="
    with pytest.raises(PackageError, match=message) as caught:
        check_manifest_options(made, None, {})
    assert "\n" not in str(caught.value)
    check_manifest_options(made, None, options)


def test_a_tampered_option_never_reaches_onnxruntime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = package(tmp_path, CPU).path / MANIFEST_NAME
    manifest = json.loads(path.read_text())
    manifest["compilation"]["execution_providers"] = [CUDA, CPU]
    manifest["compilation"]["provider_options"] = {"trt_extra_plugin_lib_paths": "/tmp/evil.so"}
    path.write_text(json.dumps(manifest))
    monkeypatch.setattr(
        ort, "InferenceSession", lambda *_, **__: pytest.fail("a session was opened")
    )
    monkeypatch.setattr(providers, "check_available", lambda names: None)
    for provider in (None, "cpu"):
        with pytest.raises(PackageError, match="trt_extra_plugin_lib_paths"):
            load(path.parent, provider)


def test_what_a_caller_passes_is_his_own_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It also takes the place of what the manifest says."""
    seen: list[Any] = []

    def open_session(path: Any, options: Any, providers: Any, provider_options: Any) -> Any:
        seen.append(provider_options)
        raise RuntimeError("far enough")

    monkeypatch.setattr(session, "open_session", open_session)
    made = package(tmp_path, CPU, anything="manifest")
    with pytest.raises(PackageError, match="far enough"):
        open_sessions(
            made, None, SessionOptions(provider_options={"anything": "mine", "more": "too"})
        )
    assert seen == [{"anything": "mine", "more": "too"}]


def test_options_are_for_the_provider_that_the_manifest_names_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that was made for CUDA, opened on the CPU."""
    seen: list[Any] = []

    def open_session(path: Any, options: Any, providers: Any, provider_options: Any) -> Any:
        seen.append((tuple(providers), dict(provider_options)))
        raise RuntimeError("far enough")

    monkeypatch.setattr(session, "open_session", open_session)
    with pytest.raises(PackageError, match="far enough"):
        open_sessions(package(tmp_path, CUDA, CPU, name="cuda", enable_cuda_graph="1"), [CPU])
    assert seen == [((CPU,), {})]


def test_providers_that_no_package_may_name(tmp_path: Path) -> None:
    made = package(tmp_path, "EvilExecutionProvider", CPU, name="evil")
    with pytest.raises(
        PackageError,
        match=r"asks for the execution provider 'EvilExecutionProvider'.*provider=\[...\]",
    ):
        check_manifest_options(made, None, {})
    check_manifest_options(made, ["EvilExecutionProvider", CPU], {})
    with pytest.raises(
        PackageError, match="asks for the execution provider 'EvilExecutionProvider'"
    ):
        check_manifest_options(made, "evil", {})


def test_a_provider_that_the_caller_names_is_his_choice(tmp_path: Path) -> None:
    made = package(tmp_path, "CoreMLExecutionProvider", CPU, name="coreml")
    check_manifest_options(made, "coreml", {})
    with pytest.raises(PackageError, match="CoreMLExecutionProvider"):
        check_manifest_options(made, None, {})


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A compile target of somebody else, installed here."""
    target = SimpleNamespace(
        execution_providers=("MineExecutionProvider", CPU), provider_options={"library": "mine.so"}
    )
    point = SimpleNamespace(name="mine", value="mine:TARGET", load=lambda: target)
    monkeypatch.setattr(
        extensions,
        "_entry_points",
        lambda group, path: {"mine": point} if group == "qsample.targets" else {},
    )
    return point


def test_what_an_installed_target_writes_is_taken(
    installed: SimpleNamespace, tmp_path: Path
) -> None:
    made = package(tmp_path, "MineExecutionProvider", CPU, name="mine", library="mine.so")
    check_manifest_options(made, None, {})


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "options"),
    [("mine", {"library": "evil.so"}), ("mine", {"more": "1"}), ("other", {"library": "mine.so"})],
)
def test_and_nothing_else(name: str, options: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="which a package may not"):
        check_manifest_options(
            package(tmp_path, "MineExecutionProvider", CPU, name=name, **options), None, {}
        )


def test_a_target_that_needs_what_is_not_installed(
    installed: SimpleNamespace, tmp_path: Path
) -> None:
    def load() -> Any:
        raise ModuleNotFoundError("onnx_ir")

    installed.load = load
    with pytest.raises(PackageError, match="which a package may not"):
        check_manifest_options(package(tmp_path, CPU, name="mine", library="mine.so"), None, {})


def test_portable_packages_name_nothing(tmp_path: Path) -> None:
    check_manifest_options(fake_package(tmp_path / "package"), None, {})


def test_a_session_has_its_providers_and_options_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    preloaded: list[str] = []

    class Session:
        def __init__(self, model: Any, options: Any, **more: Any) -> None:
            made.append((model, options, more))

        def get_providers(self) -> list[str]:
            return [CUDA, CPU]

    monkeypatch.setattr(ort, "InferenceSession", Session)
    monkeypatch.setattr(ort, "preload_dlls", lambda: preloaded.append("CUDA"), raising=False)
    options = Options()
    opened = providers.open_session(b"graph", options, [CUDA, CPU], {"a": "1"}, other=2)  # type: ignore[arg-type]
    assert isinstance(opened, Session)
    given = {"providers": [CUDA, CPU], "provider_options": [{"a": "1"}, {}], "other": 2}
    assert made == [(b"graph", options, given)]
    assert preloaded == ["CUDA"]
    providers.open_session(b"graph", options, [CPU])  # type: ignore[arg-type]
    assert made[1][2] == {"providers": [CPU], "provider_options": [{}]}
    assert preloaded == ["CUDA"]
    monkeypatch.setattr(providers, "is_plugin", lambda name: False)
    with pytest.raises(QsampleError, match=f"{OPENVINO} is part of this onnxruntime"):
        providers.open_session(b"graph", options, [OPENVINO, CPU])  # type: ignore[arg-type]
