"""Execution providers that are plugins, that do not load, or that want inputs in memory of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnxruntime as ort
import pytest

from qsample.errors import QsampleError
from qsample.package import Package
from qsample.runtime import CausalLM, Engine, SamplingParams, load
from qsample.runtime.bench import measure
from qsample.runtime.session import providers
from qsample.runtime.session.bound_graph import _foreign_inputs
from tests.helpers import fake_reference
from tests.helpers.fake_package import MAX_POSITIONS, compilation, fake_package

OPENVINO = "OpenVINOExecutionProvider"


class Options:
    """Stands in for ONNX Runtime's session options."""

    def __init__(self, threads: int = 0) -> None:
        self.intra_op_num_threads = threads
        self.added: list[Any] = []

    def add_provider_for_devices(self, devices: list[Any], options: dict[str, str]) -> None:
        self.added.append((devices, options))


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A plugin with a CPU and a GPU, found once its library is registered. Returns what was registered."""
    registered: list[Any] = []
    devices = [SimpleNamespace(ep_name=OPENVINO, ep_metadata={"ov_device": name}) for name in ("CPU", "GPU")]
    module = SimpleNamespace(get_library_path=lambda: "the library")
    monkeypatch.setattr(providers, "import_module", lambda name: module)
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


def test_an_installed_plugin_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    # Once a plugin is registered in this process, ONNX Runtime counts it among its own.
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    monkeypatch.setattr(providers, "find_spec", lambda name: name == providers.PLUGINS[OPENVINO] or None)
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
        patch.setattr(providers, "PLUGINS", {})
        patch.setattr(ort, "preload_dlls", lambda: None)
        with pytest.warns(UserWarning, match=absent), pytest.raises(QsampleError, match=f"{absent} .*not load here"):
            providers.open_session(path, ort.SessionOptions(), [absent, "CPUExecutionProvider"])


def test_inputs_in_memory_of_the_providers_own_are_bound_before_every_run(model: CausalLM) -> None:
    """ONNX Runtime copies such an input when it is bound; this session says so of all that a step reads."""

    class Foreign:
        def __init__(self, session: Any) -> None:
            self._session = session

        def __getattr__(self, name: str) -> Any:
            return getattr(self._session, name)

        def get_input_memory_infos(self) -> list[Any]:
            return [SimpleNamespace(name="OpenVINO_shared_CPU") for _ in self._session.get_inputs()]

    session: Any = Foreign(model.sessions.decoder)
    assert _foreign_inputs(session) == {value.name for value in model.sessions.decoder.get_inputs()}
    assert _foreign_inputs(model.sessions.decoder) == set()


# A decoder with one token a call.


@pytest.fixture(scope="module")
def one_token(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    def fix(graph: onnx.ModelProto) -> None:
        for value in graph.graph.input:
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param == "S":
                    dim.dim_value = 1

    path: Path = tmp_path_factory.mktemp("one") / "package"
    model = load(fake_package(path, compilation=compilation(ctx_len=MAX_POSITIONS), edit=fix).path)
    assert model.sessions.tokens_per_call == 1
    return model


PARAMS = SamplingParams(temperature=0.9, max_new_tokens=8, eos_token_id=())
PROMPTS = [[5, 6, 7], [9, 200, 31, 4, 5]]


def test_a_prompt_is_read_token_by_token(one_token: CausalLM) -> None:
    wanted = [fake_reference.generate(prompt, PARAMS, row, MAX_POSITIONS)[0] for row, prompt in enumerate(PROMPTS)]
    for chunk in (None, 1, 3):
        assert one_token.generate(PROMPTS, PARAMS, seed=0, prefill_chunk_size=chunk).new_token_ids == wanted
    with Engine(one_token, slots=2) as engine:
        requests = [engine.add_request(prompt, PARAMS, seed=row) for row, prompt in enumerate(PROMPTS)]
        assert [request.result(60).token_ids for request in requests] == wanted
    assert measure(one_token, 1, 4, 2, repetitions=1).rows == 1
