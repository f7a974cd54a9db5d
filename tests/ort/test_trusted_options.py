"""What a manifest may ask of ONNX Runtime: the providers and options that compile writes, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime as ort
import pytest

from qsample.compiler.targets import find_target, target_names
from qsample.errors import PackageError
from qsample.ort import session, trusted_options
from qsample.ort.options import SessionOptions
from qsample.ort.session import open_sessions
from qsample.ort.trusted_options import check_manifest_options
from qsample.package.package import MANIFEST_NAME, Package
from qsample.runtime import load
from tests.helpers.fake_package import compilation, fake_package

CPU, CUDA, OPENVINO = (f"{name}ExecutionProvider" for name in ("CPU", "CUDA", "OpenVINO"))


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


@pytest.mark.parametrize(("provider", "options"), REFUSED, ids=[str(options) for _, options in REFUSED])
def test_other_options_are_refused(provider: str, options: dict[str, str], tmp_path: Path) -> None:
    made = package(tmp_path, provider, CPU, **options)
    message = rf"sets {provider}'s option {next(iter(options))!r} to .*which a package may not; .*provider_options="
    with pytest.raises(PackageError, match=message) as caught:
        check_manifest_options(made, None, {})
    assert "\n" not in str(caught.value)
    check_manifest_options(made, None, options)


def test_a_tampered_option_never_reaches_onnxruntime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = package(tmp_path, CPU).path / MANIFEST_NAME
    manifest = json.loads(path.read_text())
    manifest["compilation"]["execution_providers"] = [CUDA, CPU]
    manifest["compilation"]["provider_options"] = {"trt_extra_plugin_lib_paths": "/tmp/evil.so"}
    path.write_text(json.dumps(manifest))
    monkeypatch.setattr(ort, "InferenceSession", lambda *_, **__: pytest.fail("a session was opened"))
    monkeypatch.setattr(session, "check_available", lambda providers: None)
    for provider in (None, "cpu"):
        with pytest.raises(PackageError, match="trt_extra_plugin_lib_paths"):
            load(path.parent, provider)


def test_what_a_caller_passes_is_his_own_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It also takes the place of what the manifest says."""
    seen: list[Any] = []

    def open_session(path: Any, options: Any, providers: Any, provider_options: Any) -> Any:
        seen.append(provider_options)
        raise RuntimeError("far enough")

    monkeypatch.setattr(session, "open_session", open_session)
    made = package(tmp_path, CPU, anything="manifest")
    with pytest.raises(PackageError, match="far enough"):
        open_sessions(made, None, SessionOptions(provider_options={"anything": "mine", "more": "too"}))
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
        PackageError, match=r"asks for the execution provider 'EvilExecutionProvider'.*provider=\[...\]"
    ):
        check_manifest_options(made, None, {})
    check_manifest_options(made, ["EvilExecutionProvider", CPU], {})
    with pytest.raises(PackageError, match="asks for the execution provider 'EvilExecutionProvider'"):
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
    point = SimpleNamespace(name="mine", load=lambda: SimpleNamespace(TARGET=target))
    monkeypatch.setattr(trusted_options, "entry_points", lambda group: [point] if group == "qsample.targets" else [])
    return point


def test_what_an_installed_target_writes_is_taken(installed: SimpleNamespace, tmp_path: Path) -> None:
    made = package(tmp_path, "MineExecutionProvider", CPU, name="mine", library="mine.so")
    check_manifest_options(made, None, {})


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "options"), [("mine", {"library": "evil.so"}), ("mine", {"more": "1"}), ("other", {"library": "mine.so"})]
)
def test_and_nothing_else(name: str, options: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="which a package may not"):
        check_manifest_options(package(tmp_path, "MineExecutionProvider", CPU, name=name, **options), None, {})


def test_a_target_that_needs_what_is_not_installed(installed: SimpleNamespace, tmp_path: Path) -> None:
    def load() -> Any:
        raise ModuleNotFoundError("onnx_ir")

    installed.load = load
    with pytest.raises(PackageError, match="which a package may not"):
        check_manifest_options(package(tmp_path, CPU, name="mine", library="mine.so"), None, {})


def test_portable_packages_name_nothing(tmp_path: Path) -> None:
    check_manifest_options(fake_package(tmp_path / "package"), None, {})
