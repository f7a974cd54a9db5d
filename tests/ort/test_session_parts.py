"""What sessions know of their graphs, without a package: interfaces, options of providers, images."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest

from qsample.contract.interface import Features, GraphSpec, Interface
from qsample.contract.tensors import LOGITS, TensorSpec
from qsample.errors import PackageError
from qsample.ort import session as module
from qsample.ort import small_graphs
from qsample.ort.options import PartThreads, SessionOptions
from qsample.ort.providers import Place
from qsample.ort.session import Sessions, VisionSession, check_interface, with_logits

FLOAT, INT64, BFLOAT16 = 1, 7, 16
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


def vision(nodes: list[bytes], inputs: dict[str, int], output: int) -> VisionSession:
    data = small_graphs.model(nodes, inputs, {"image_features": output})
    return VisionSession(ort.InferenceSession(data, providers=[CPU]))


def test_images_with_and_without_a_grid() -> None:
    node = small_graphs.node
    plain = vision([node("Identity", ["pixels"], "image_features")], {"pixels": FLOAT}, FLOAT)
    pixels = np.arange(6, dtype=np.float64).reshape(2, 3)
    found = plain.features(pixels.T)
    assert (found.tolist(), found.dtype) == (pixels.T.tolist(), np.float32)
    cast = [
        node("Cast", ["grid"], "floats", to=FLOAT),
        node("Add", ["pixels", "floats"], "image_features"),
    ]
    with_grid = vision(cast, {"pixels": FLOAT, "grid": INT64}, FLOAT)
    assert with_grid.features(pixels[:, :2], (10, 20)).tolist() == [[10, 21], [13, 24]]


def test_features_of_bfloat16_are_their_bits() -> None:
    to_bfloat16 = small_graphs.node("Cast", ["pixels"], "image_features", to=BFLOAT16)
    encoder = vision([to_bfloat16], {"pixels": FLOAT}, BFLOAT16)
    numbers = np.array([[1.5, -2, 1 / 3]], np.float32)
    found = encoder.features(numbers)
    assert found.dtype == np.uint16
    assert np.array_equal(found, numbers.astype(ml_dtypes.bfloat16).view(np.uint16))


def test_no_run_begins_after_the_stop() -> None:
    identity = small_graphs.node("Identity", ["pixels"], "image_features")
    encoder = vision([identity], {"pixels": FLOAT}, FLOAT)
    encoder.stop()
    with pytest.raises(Exception, match="terminate"):
        encoder.features(np.zeros((1, 1), np.float32))


def test_logits_come_once() -> None:
    spec = Interface(100, (), features=Features(sampler=False)).decoder
    plain = Interface(100, ()).decoder
    assert LOGITS not in plain.outputs
    longer = with_logits(plain)
    assert longer.outputs == (*plain.outputs, LOGITS)
    assert (longer.inputs, longer.states) == (plain.inputs, plain.states)
    assert with_logits(longer) is longer
    assert LOGITS in spec.outputs
    assert with_logits(spec) is spec


def value(name: str, kind: str, *shape: Any) -> Any:
    return SimpleNamespace(name=name, type=kind, shape=list(shape))


SPEC = GraphSpec(
    inputs=(TensorSpec("x", "float32", ("B", 4), "rows"),),
    states=(TensorSpec("s", "int32", ("B", "T"), "a state"),),
    outputs=(TensorSpec("y", "int64", ("B",), "a result"),),
)
X, S = value("x", "tensor(float)", "any", 4), value("s", "tensor(int32)", None, 8)
Y, NEXT = value("y", "tensor(int64)", 2), value(SPEC.results[-1].name, "tensor(int32)")


@pytest.mark.parametrize(
    ("inputs", "outputs", "problem"),
    [
        ([X, S], [Y, NEXT], None),
        ([S, X], [NEXT, Y], None),
        ([X], [Y, NEXT], "it lacks input s; export it again"),
        ([X, S, value("z", "tensor(float)")], [Y, NEXT], "it has an unknown input z"),
        ([X, S], [NEXT], "it lacks output y"),
        ([X, S], [Y, NEXT, X], "it has an unknown output x"),
        ([value("x", "tensor(double)", 1, 4), S], [Y, NEXT], r"input x is tensor\(double\), not tensor\(float\)"),
        ([value("x", "tensor(float)", 1, 5), S], [Y, NEXT], r"input x has shape \[1, 5\], not \['B', 4\]"),
        ([value("x", "tensor(float)", 1), S], [Y, NEXT], r"input x has shape \[1\], not"),
        ([value("x", "tensor(float)"), S], [Y, NEXT], r"input x has shape \[\], not"),
        ([X, value("s", "tensor(int32)", 1, 9)], [Y, NEXT], r"input s has shape \[1, 9\], not \['B', 8\]"),
        # An output may have lost its shape; what is left has to fit.
        ([X, S], [value("y", "tensor(int64)"), NEXT], None),
        ([X, S], [value("y", "tensor(int64)", 1, 1), NEXT], r"output y has shape \[1, 1\], not \['B'\]"),
        ([X, S], [value("y", "tensor(float)"), NEXT], r"output y is tensor\(float\), not tensor\(int64\)"),
    ],
)  # fmt: skip
def test_interfaces(inputs: list[Any], outputs: list[Any], problem: str | None) -> None:
    session = SimpleNamespace(get_inputs=lambda: inputs, get_outputs=lambda: outputs)
    if problem is None:
        check_interface(session, SPEC, {"T": 8}, "a graph")
    else:
        with pytest.raises(PackageError, match=f"a graph does not .*{problem}"):
            check_interface(session, SPEC, {"T": 8}, "a graph")


def sessions(device: str, parts: Any = ()) -> Sessions:
    nothing: Any = None
    return Sessions(nothing, nothing, None, device, nothing, nothing, parts=parts)


def test_devices_of_inputs_and_states() -> None:
    """A state is where a part computes its next value; a device without addresses reads the host's memory."""
    assert [sessions(device).input_device for device in ("cpu", "cuda", "cuda:1", "webgpu")] == [
        "cpu",
        "cuda",
        "cuda:1",
        "cpu",
    ]
    state: Any = SPEC.states[0]
    other: Any = SPEC.inputs[0]
    parts = [
        SimpleNamespace(device=device, spec=SimpleNamespace(output_names=names))
        for device, names in (("cuda", ("h",)), ("cuda:1", (SPEC.results[-1].name,)))
    ]
    apart = sessions("cuda:2", tuple(parts))
    assert (apart.device_of(state), apart.device_of(other)) == ("cuda:1", "cuda:2")
    assert sessions("cpu").device_of(state) == "cpu"
    plain = sessions("cpu")
    assert (plain.guesses, plain.rounding, plain.replays, plain.parts) == (True, None, None, ())


def package(compilation: Any = None, *, captured: bool = True, **versions: str) -> Any:
    return SimpleNamespace(
        manifest=SimpleNamespace(compilation=compilation, versions=versions),
        interface=SimpleNamespace(captured=captured, sizes={"V": 5}),
        path="package",
    )


def compiled(**changes: Any) -> Any:
    fields = {
        "execution_providers": (CUDA, CPU),
        "provider_options": {"enable_cuda_graph": "1", "a": "manifest"},
        "parts": (),
        "versions": {},
        "batch_size": 1,
        "ctx_len": 64,
    }
    return SimpleNamespace(**{**fields, **changes})


@pytest.mark.parametrize(
    ("of", "provider", "file", "expected"),
    [
        # The manifest's options, under the caller's, for the decoder on the manifest's first provider.
        (package(compiled()), CUDA, "decoder.onnx", {"enable_cuda_graph": "1", "a": "manifest", "b": "caller"}),
        (package(compiled()), CPU, "decoder.onnx", {"b": "caller"}),
        (package(compiled(provider_options={"b": "manifest"})), CUDA, "decoder.onnx", {"b": "caller"}),
        # Only a decoder that is made for it is captured.
        (package(compiled(), captured=False), CUDA, "decoder.onnx", {"a": "manifest", "b": "caller"}),
        (package(compiled()), CUDA, "vision.onnx", {"a": "manifest", "b": "caller"}),
        (package(compiled()), CUDA, "sampler.onnx", {"b": "caller"}),
        (package(compiled(parts=[SimpleNamespace(file="part.onnx")])), CUDA, "part.onnx",
         {"enable_cuda_graph": "1", "a": "manifest", "b": "caller"}),
        (package(), CUDA, "decoder.onnx", {"b": "caller"}),
    ],
)  # fmt: skip
def test_options_of_the_first_provider(
    of: Any, provider: str, file: str, expected: dict[str, str]
) -> None:
    options = SessionOptions(provider_options={"b": "caller"})
    opener = module._GraphOpener(of, (provider,), options)
    assert opener._provider_options(file) == expected
    assert opener.row_multiple == 1
    if file == "decoder.onnx":
        assert opener.captures == ("enable_cuda_graph" in expected)


def test_another_gpu_gets_its_number() -> None:
    options = SessionOptions(3, {"a": "b", "device_id": "0"})
    opener = module._on_gpu(module._GraphOpener(package(), (CUDA,), options, 2), 1)
    assert opener.options.provider_options == {"a": "b", "device_id": "1"}
    assert (opener.options.intra_op_num_threads, opener.row_multiple) == (3, 2)
    assert options.provider_options["device_id"] == "0"


@pytest.mark.parametrize(
    ("compilation", "sizes"),
    [
        (None, {"V": 5}),
        (compiled(), {"V": 5, "T": 64, "B": 1}),
        (compiled(batch_size=2), {"V": 5, "T": 64}),
    ],
)
def test_sizes_of_a_compiled_decoder(compilation: Any, sizes: dict[str, int]) -> None:
    of = package(compilation)
    assert module._compiled_sizes(of) == sizes
    assert of.interface.sizes == {"V": 5}


@pytest.mark.parametrize(
    ("compilation", "version", "advises"),
    [
        (None, "99.0", False),
        (compiled(), "99.0", True),
        (compiled(), "0.1", False),
        (compiled(versions={"onnxruntime": "99.1"}), "0.1", True),
        (compiled(), ort.__version__, False),
    ],
)
def test_advice_on_a_newer_compiler(compilation: Any, version: str, advises: bool) -> None:
    advice = module._advice_on_newer_compiler(package(compilation, onnxruntime=version))
    newest = version if compilation is None else compilation.versions.get("onnxruntime", version)
    assert advice.startswith(f"; it was compiled with onnxruntime {newest}") == advises
    assert bool(advice) == advises
    assert module._version_numbers("1.24.1.dev7") == [1, 24, 1]


@pytest.mark.parametrize(
    ("place", "invariant", "measures"),
    [
        (Place((CPU,), "cpu", None), True, True),
        (Place((CPU,), "cpu", CPU), True, True),
        (Place((CPU,), "cpu", None), False, False),
        (Place((CUDA,), "cuda", None), True, False),
        (Place((CPU,), "cpu", CUDA), True, False),
    ],
)
def test_rounding_is_measured_where_it_counts(
    place: Place, invariant: bool, measures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "measured", lambda *arguments: arguments)
    of: Any = SimpleNamespace(place=Path("folder"))
    options = SessionOptions(3, config={"a": "b"}, batch_invariant=invariant)
    wanted = (Path("folder/decoder.onnx"), 3, {"a": "b"}) if measures else None
    assert module._measured_rounding(of, place, options) == wanted


def test_threads_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "threads_of_parts", lambda count: ["threads"] * count)
    two = package(compiled(parts=[SimpleNamespace(file="a"), SimpleNamespace(file="b")]))
    assert module._part_threads(two, Place((CPU,), "cpu", CPU)) == ["threads"] * 2
    on_gpus = module._part_threads(two, Place((CUDA,), "cuda", CUDA))
    assert len(on_gpus) == 2
    assert {part.count for part in on_gpus} == {None}
    for whole in (package(), package(compiled())):
        assert module._part_threads(whole, Place((CPU,), "cpu", CPU)) == []


@dataclass(frozen=True)
class Opener:
    """Opens the same graph for each part, and notes how."""

    package: Any
    options: SessionOptions
    captures: bool
    opened: list[Any]

    def open(self, file: str, *, adds_logits: bool) -> ort.InferenceSession:
        options = dict(self.options.provider_options)
        self.opened.append((file, options, adds_logits, threading.current_thread().name))
        return ort.InferenceSession(small_graphs.identity(FLOAT), providers=[CPU])


@pytest.mark.parametrize(("device", "captured"), [("cpu", False), ("cuda", True)])
@pytest.mark.parametrize("logits", [False, True])
def test_each_part_is_opened_where_it_runs(logits: bool, device: str, captured: bool) -> None:
    """In its thread, on its GPU; the last part alone returns the logits."""
    files = [SimpleNamespace(file=name) for name in "abc"]
    opener: Any = Opener(
        package(compiled(parts=files)), SessionOptions(provider_options={"x": "y"}), captured, []
    )
    parts = module._open_parts(opener, device, [PartThreads()] * 3, adds_logits=logits)
    numbers = [{}, *({"device_id": n} if device == "cuda" else {} for n in "12")]
    assert opener.opened == [
        (file, {"x": "y", **number}, logits and file == "c", f"qsample-part-{place}")
        for place, (file, number) in enumerate(zip("abc", numbers, strict=True), start=1)
    ]
    places = ["cuda", "cuda:1", "cuda:2"] if device == "cuda" else ["cpu"] * 3
    assert [part.device for part in parts] == places
    assert [part.replays is not None for part in parts] == [captured] * 3
    assert [spec.name for part in parts for spec in part.spec.outputs] == ["y"] * 3
