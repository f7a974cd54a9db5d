"""Lists of passes: each meets a clean graph, and those for lean layers change no number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from qsample.compiler import pipeline
from qsample.compiler.options import CompileOptions
from qsample.compiler.pipeline import apply, lean_phases, quantization_phases
from qsample.compiler.plan import CompilePlan, make_plan
from qsample.contract.arrays import Array
from qsample.contract.interface import (
    AdapterTarget,
    ImageShape,
    Interface,
    KeyValueShape,
    RecurrentShape,
)
from qsample.contract.tensors import BLOCK_SIZES, HOST_AXES
from qsample.graph.edit import fix_axes
from qsample.graph.join import cut_at_logits
from qsample.graph.runner import GraphRunner
from qsample.package.package import Package, read_package
from qsample.progress import Stage
from tests.helpers.building import run_on
from tests.helpers.small_graphs import small_graph
from tests.helpers.small_packages import manifest
from tests.helpers.tiny_models import VOCAB_SIZE

CAPACITY = 48
INTERFACE = Interface(100, (KeyValueShape(2, 8), KeyValueShape(1, 16)))
PHASES = lean_phases("cpu", CAPACITY)
FUSIONS, LEAN = PHASES[:2], PHASES[2:]


def test_each_pass_meets_a_graph_without_unused_nodes() -> None:
    x = ir.val("x", ir.DataType.FLOAT, [2])
    middle = ir.node("Neg", [x])
    last = ir.node("Abs", [middle.outputs[0]])
    model = ir.Model(
        ir.Graph([x], [last.outputs[0]], nodes=[middle, last], opset_imports={"": 20}),
        ir_version=10,
    )
    met = []

    def skip_negation(model: ir.Model) -> bool:
        met.append([node.op_type for node in model.graph])
        modified = last.inputs[0] is not x
        last.replace_input_with(0, x)
        return modified

    assert apply(model, skip_negation, skip_negation)
    assert met == [["Neg", "Abs"], ["Abs"]]
    assert not apply(model, skip_negation)
    assert not apply(model)


@pytest.mark.ci
@pytest.mark.parametrize(
    "model_type",
    [
        "qwen3",
        "gpt_oss",
        *(
            pytest.param(t, marks=pytest.mark.slow)
            for t in ("cohere", "gemma3_text", "glm", "gpt2", "gpt_neox", "phi3")
        ),
    ],
)
def test_same_logits(exported: Callable[..., Path], model_type: str) -> None:
    package = read_package(exported(model_type))
    runners = []
    for leaner in (False, True):
        model = cut_at_logits(ir.load(package.path / "decoder.onnx"), package.interface)
        fix_axes(model, {"T": CAPACITY})
        run_on(model, FUSIONS)
        before = len(model.graph)
        if leaner:
            run_on(model, LEAN)
            assert (after := len(model.graph)) < before
            run_on(model, LEAN)
            assert len(model.graph) == after
        runners.append(GraphRunner(model, package.path, package.interface, CAPACITY))
    plain, lean = (generate(runner) for runner in runners)
    # The same float32 operations on the same numbers, so only a fused kernel's order of additions may differ.
    np.testing.assert_allclose(lean, plain, rtol=0, atol=2e-5 * np.abs(plain).max())


def generate(runner: GraphRunner) -> Array:
    """Logits of a ragged batch and three steps after it, and of one row in chunks: every way to count positions."""
    rng = np.random.default_rng(3)
    rows, lengths = 3, np.array([11, 4, 7])
    state = runner.start(rows)
    found = [runner.step(rng.integers(0, VOCAB_SIZE, (rows, 11)), lengths, state)["logits"]]
    found += [
        runner.step(rng.integers(0, VOCAB_SIZE, (rows, 1)), np.ones(rows), state)["logits"]
        for _ in range(3)
    ]
    state = runner.start(1)
    found += [
        runner.step(rng.integers(0, VOCAB_SIZE, (1, n)), np.array([n]), state)["logits"]
        for n in (9, 1, 12)
    ]
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("given", "in_float16", "needed"),
    [({}, False, 48), ({}, True, 72), ({"copies": 2}, False, 96), ({"copies": 2}, True, 120)],
)
def test_the_room_for_a_package_is_checked_before_it_is_written(
    given: dict[str, int], in_float16: bool, needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights as often as they are written, and half of them again in float16."""
    plan: Any = SimpleNamespace(kv_cache_dtype=None, weights=None, store_float16=in_float16)
    model = small_graph(
        "model (float[2] x, float[4] a, float[8] b) => (float[2] y) { y = Neg (x) }",
        constants={"a": np.ones(4, np.float32), "b": np.ones(8, np.float32)},
    )
    stages: Any = SimpleNamespace(begin=lambda stage: None)
    build: Any = SimpleNamespace(plan=plan, model=model, folder=Path("/a"), stages=stages)
    checked: list[tuple[Path, int, str]] = []
    monkeypatch.setattr(pipeline, "check_free", lambda *arguments: checked.append(arguments))
    last = quantization_phases(plan, **given)[-1]
    last.run(build)
    assert last.name == "check"
    assert checked == [(Path("/a"), needed, "the package")]


def plan_of(interface: Interface = INTERFACE, parity: Any = None, **options: Any) -> CompilePlan:
    package = Package(Path("/nowhere"), manifest(interface=interface, parity=parity))
    return make_plan(package, CompileOptions(ctx_len=32, **options))


FITTED: dict[str, Any] = {"weights": "int4", "preset": "speed"}


@pytest.mark.parametrize(
    ("options", "stages"),
    [
        ({}, []),
        ({"weights": "int8"}, [Stage.DIVERGENCE]),
        ({"weights": "float16"}, [Stage.DIVERGENCE]),
        ({"kv_cache_dtype": "int8"}, [Stage.MEASURING_CACHE, Stage.DIVERGENCE]),
        (FITTED, [Stage.WRITING_TEXT, Stage.FITTING, Stage.DIVERGENCE]),
        ({**FITTED, "calibration_text": "a text"}, [Stage.FITTING, Stage.DIVERGENCE]),
    ],
)
def test_only_the_stages_of_a_plan_take_time(options: dict[str, Any], stages: list[Stage]) -> None:
    """Each begins where the shares before it end, and a stage that is not there takes none."""
    told: list[tuple[str, float]] = []
    every = pipeline.stages_of(
        plan_of(**options), lambda stage, fraction: told.append((stage, fraction))
    )
    always = (Stage.OPTIMISING, Stage.WRITING_GRAPH, Stage.TESTING, Stage.PUBLISHING)
    order = [
        Stage.WRITING_TEXT,
        Stage.OPTIMISING,
        Stage.MEASURING_CACHE,
        Stage.FITTING,
        Stage.WRITING_GRAPH,
        Stage.TESTING,
        Stage.DIVERGENCE,
        Stage.PUBLISHING,
    ]
    # The figures of docs/benchmarks/export.md, in seconds.
    seconds = dict(zip(order, (20, 3, 2, 30, 3, 3, 9, 0.3), strict=True))
    taken = [seconds[stage] if stage in (*always, *stages) else 0 for stage in order]
    for stage in order:
        every.begin(stage)
    begun: dict[str, float] = {}
    for stage, fraction in told:
        begun.setdefault(stage, fraction)
    starts = np.cumsum([0, *taken[:-1]]) / sum(taken)
    for stage, start, length in zip(order, starts, taken, strict=True):
        if length:
            assert begun[stage] == pytest.approx(start), stage


@pytest.mark.parametrize(
    ("dtype", "interface", "states"),
    [
        ("float32", INTERFACE, None),
        (
            "float16",
            INTERFACE,
            {f"past_key_values.{layer}.{kind}" for layer in (0, 1) for kind in ("key", "value")},
        ),
        (
            "bfloat16",
            Interface(
                9,
                (KeyValueShape(1, 8),),
                recurrent=(RecurrentShape(1, "conv_state", 0, (4,), "float32"),),
                image=ImageShape(4),
            ),
            {"past_key_values.0.key", "past_key_values.0.value", "image_features"},
        ),
    ],
)
def test_what_becomes_half_precision(
    dtype: str, interface: Interface, states: set[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caches, and features of images; recurrent states stay as they are."""
    got: list[Any] = []

    def convert_to_half(model: object, **given: Any) -> bool:
        got.append(given)
        return False

    monkeypatch.setattr(pipeline, "convert_to_half", convert_to_half)
    phases = pipeline.half_phases(plan_of(interface, dtype=dtype))
    if states is None:
        assert phases == []
        return
    run_on(small_graph("g (float[2] x) => (float[2] y) { y = Neg (x) }"), phases)
    assert [phase.name for phase in phases] == ["convert-to-half"]
    assert got == [{"dtype": dtype, "states": states}]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["keep-packed-experts", "check"]),
        ({"kv_cache_dtype": "int8"}, ["keep-packed-experts", "quantize-cache", "check"]),
        (
            {"kv_cache_dtype": "int4", "weights": "int4"},
            [
                "keep-packed-experts",
                "quantize-cache",
                "quantize-experts",
                "quantize-matrices",
                "check",
            ],
        ),
    ],
)
def test_phases_of_quantization(options: dict[str, Any], names: list[str]) -> None:
    phases = quantization_phases(plan_of(**options))
    assert [phase.name for phase in phases] == names


def test_the_arguments_of_quantization(monkeypatch: pytest.MonkeyPatch) -> None:
    got: dict[str, Any] = {}

    def noting(name: str, result: bool = False) -> Callable[..., bool]:
        def note(model: object, *arguments: Any, **given: Any) -> bool:
            got[name] = given or arguments
            return result

        note.__name__ = name
        return note

    for name in ("keep_packed_experts", "quantize_experts", "quantize_weights", "check_quantized"):
        monkeypatch.setattr(pipeline, name, noting(name))
    checked: list[Any] = []
    monkeypatch.setattr(pipeline, "check_free", lambda *given: checked.append(given))
    plan = plan_of(weights={"lm_head": "int8", "*": "int4"})
    model = small_graph("g (float[2] x) => (float[2] y) { y = Neg (x) }")
    stages: Any = SimpleNamespace(begin=lambda stage: None)
    for options, sizes, pads in (
        ({}, BLOCK_SIZES, False),
        ({"expert_block_sizes": (64,), "pads_blocks": True}, (64,), True),
    ):
        for phase in quantization_phases(plan, **options):  # type: ignore[arg-type]
            phase.run(pipeline.Build(plan, stages, Path("/a"), Path("/b"), model))
        assert got["keep_packed_experts"] == {"block_sizes": sizes}
        assert got["quantize_experts"] == {
            "quantization": plan.expert_weights,
            "block_sizes": sizes,
        }
        matrices = got["quantize_weights"]
        assert (matrices["quantization"], matrices["pads"]) == (plan.weights, pads)
        assert matrices["calibrate"] is None, "nothing is fitted to a text"
        assert matrices["table"].entries == {"lm_head": "int8", "*": "int4"}
        assert got["check_quantized"] == (plan.weights,)
    assert checked == [(Path("/a"), 0, "the package")] * 2


def test_phases_have_names_and_are_dumped_in_order() -> None:
    """The portable graph first, then the graph after each phase."""
    model = small_graph("g (float[2] x) => (float[2] y) { y = Neg (x) }")
    done: list[Any] = []

    def first_one(build: object, size: int) -> None:
        done.append(size)

    def second_one(model: ir.Model, *, more: int) -> bool:
        done.append(more)
        return False

    dumped: list[tuple[str, int, bool]] = []
    dump: Any = SimpleNamespace(
        write=lambda name, written: dumped.append((name, len(done), written is model))
    )
    phases = [pipeline.step(first_one, size=3), pipeline.graph_pass(second_one, more=4)]
    nothing: Any = None
    pipeline.run(pipeline.Build(nothing, nothing, nothing, nothing, model), phases, dump)
    assert done == [3, 4]
    assert dumped == [("portable", 0, True), ("first-one", 1, True), ("second-one", 2, True)]


def test_the_files_of_a_build(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    nothing: Any = None
    model = small_graph("g (float[2] x) => (float[2] y) { y = Neg (x) }")
    model.meta["report"] = "kept"
    build = pipeline.Build(nothing, nothing, tmp_path / "out", tmp_path, model)
    assert build.decoder == tmp_path / "out" / "decoder.onnx"
    (tmp_path / "written").write_bytes(b"weights")
    build.publish_weights(tmp_path / "written", "ab")
    assert (tmp_path / "out" / "decoder.onnx.data").read_bytes() == b"weights"
    assert build.weights_sha256 == "ab"
    build.publish_weights(tmp_path / "written", None)  # of a graph without a file of weights
    assert build.weights_sha256 is None

    other = small_graph(
        "g (float[2] x, float[2] b, float[2] a) => (float[2] y) { z = Add (x, b)\n y = Add (z, a) }",
        constants={"b": np.ones(2, np.float32), "a": np.zeros(2, np.float32)},
    )
    ir.save(other, tmp_path / "other.onnx")
    build.replace_model(tmp_path / "other.onnx")
    assert list(build.model.graph.initializers) == ["a", "b"], "in an order of their own"
    assert build.model.meta["report"] == "kept"


def test_a_capacity_and_other_sizes_are_fixed() -> None:
    text = "g (float[B,T,S] x) => (float[B,T,S] y) { y = Neg (x) }"
    for sizes, shape in ((None, ["B", 32, "S"]), ({"B": 1}, [1, 32, "S"])):
        model = small_graph(text)
        run_on(model, [pipeline.fixed_sizes(plan_of(), sizes)])
        assert [str(size) for size in model.graph.inputs[0].shape or ()] == list(map(str, shape))


def test_windows_of_a_cache_are_noted_in_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def slide_windows(model: object, capacity: int) -> dict[str, int]:
        asked.append(capacity)
        return {"past_key_values.1.key": 8}

    monkeypatch.setattr(pipeline, "slide_windows", slide_windows)
    nothing: Any = None
    build = pipeline.Build(plan_of(), nothing, nothing, nothing, nothing)
    pipeline.slide_caches(build)
    assert asked == [32]
    assert [shape.capacity for shape in build.plan.interface.key_values] == [None, 8]
    assert [shape.head_dim for shape in build.plan.interface.key_values] == [8, 16]


def test_what_weights_are_fitted_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The build's texts, from empty caches; states of recurrent layers are not among these."""
    recurrent = (RecurrentShape(2, "conv_state", 0, (4,), "float32"),)
    plan = plan_of(Interface(9, INTERFACE.key_values, recurrent=recurrent), **FITTED)
    got: dict[str, Any] = {}
    monkeypatch.setattr(pipeline, "quantize_weights", lambda model, **given: got.update(given))
    stages: Any = SimpleNamespace(begin=lambda stage: stage)
    model = small_graph("g (float[2] x) => (float[2] y) { y = Neg (x) }")
    texts = [np.arange(3)]
    build = pipeline.Build(plan, stages, Path("/a"), Path("/scratch"), model, texts=texts)
    pipeline.quantize_matrices(build, pads=True)
    assert got["calibrate"].func.__name__ == "calibrated_levels"
    calibration = got["calibrate"].keywords["calibration"]
    assert (calibration.sequences, calibration.folder) == (texts, Path("/scratch"))
    assert calibration.progress == Stage.FITTING
    assert list(calibration.caches) == [
        f"past_key_values.{layer}.{kind}" for layer in (0, 1) for kind in ("key", "value")
    ]
    assert calibration.axes["T"] == 32
    assert {calibration.axes[axis] for axis in HOST_AXES} == {1}
    assert calibration.axes.items() >= plan.source.interface.sizes.items()


def test_what_is_taken_out_is_put_back_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what was noted; a model without adapters has none to look for."""
    done: list[Any] = []

    def noting(name: str) -> Callable[..., str]:
        def note(*given: Any) -> str:
            done.append((name, *given))
            return f"{name}'s"

        return note

    names = ("split_adapters", "join_adapters", "cut_image_blocks", "see_whole_images")
    for name in (*names, "save_graph", "fold_constants"):
        monkeypatch.setattr(pipeline, name, noting(name))
    monkeypatch.setattr(pipeline, "split_at_logits", lambda model, face: ("first", "sampler"))
    adapted = replace(INTERFACE, adapters=(AdapterTarget("layers.0.q", 4, 4),))
    model: Any = "model"
    for interface, found in ((INTERFACE, False), (adapted, True)):
        plan = plan_of(interface)
        nothing: Any = None
        build: Any = pipeline.Build(plan, nothing, Path("/a"), nothing, model)
        pipeline.fold_sampler(build)
        for phase in (pipeline.cut_adapters, pipeline.put_adapters):
            phase(build)
        given: list[Any] = [("split_adapters", "model", interface)]
        given += [("join_adapters", "model", plan.interface, "split_adapters's")]
        assert done == (given if found else [])
        done.clear()
    for phase in (pipeline.cut_blocks, pipeline.put_blocks, pipeline.save, pipeline.split_sampler):
        phase(build)
    pipeline.fold_sampler(build)
    assert done == [
        ("cut_image_blocks", "model"),
        ("see_whole_images", "model", "cut_image_blocks's"),
        ("save_graph", "model", Path("/a/decoder.onnx")),
        ("fold_constants", "sampler"),
    ]
    assert build.weights_sha256 == "save_graph's"
    assert (build.model, build.sampler) == ("first", "sampler")


def test_a_build_begins_with_the_text_that_the_model_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_of(**FITTED)
    monkeypatch.setattr(pipeline, "own_text", lambda *given: given)
    monkeypatch.setattr(pipeline, "load_graph", lambda path: path)
    for name in ("widen_weights", "in_bytes"):
        monkeypatch.setattr(pipeline, name, lambda model: None)
    stages: Any = SimpleNamespace(begin=lambda stage: stage)
    build: Any = pipeline.start(plan, stages, Path("/out"), Path("/scratch"))
    assert (build.plan, build.texts) == (plan, (plan, Stage.WRITING_TEXT))
    assert (build.folder, build.scratch, build.model) == (
        Path("/out"),
        Path("/scratch"),
        plan.decoder,
    )
