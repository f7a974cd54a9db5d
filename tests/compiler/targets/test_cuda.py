"""The CUDA target, as far as it shows without a GPU: the structure of its graph, half precision, and, on the CPU in
float32, the tokens of a graph without control flow."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx.checker
import onnx.defs
import onnx_ir as ir
import pytest

from qsample import AutoModelForCausalLM
from qsample.compiler.options import CompileOptions
from qsample.compiler.plan import CompilePlan, make_plan
from qsample.compiler.quantize import INT_BITS
from qsample.compiler.quantize.blocks import quantization_report
from qsample.compiler.targets import Capability, cuda
from qsample.compiler.targets.cuda import CudaTarget, capture_problems
from qsample.contract.arrays import DTYPES
from qsample.contract.interface import Features, Interface, KeyValueShape
from qsample.errors import CompileError
from qsample.graph.edit import constant
from qsample.graph.gqa import Slot
from qsample.graph.join import cut_at_logits
from qsample.graph.runner import GraphRunner
from qsample.ort.session import check_interface
from qsample.package.package import Package, read_package
from qsample.runtime import load
from tests.helpers.building import build, run_on
from tests.helpers.capturing import capturing, compile_captured
from tests.helpers.cuda_kernels import KERNELS, VALUES_OF_WHERE, has_kernel
from tests.helpers.plain_host import OFF, PlainHost
from tests.helpers.quantized_checkpoints import stored_levels
from tests.helpers.sampling_cases import PARAMETERS, PROMPTS, rows
from tests.helpers.small_graphs import small_graph
from tests.helpers.small_packages import manifest
from tests.helpers.tiny_models import VOCAB_SIZE, random_model

CAPACITY = 48
LAYERS = 2
LAYER = Counter(
    MatMul=4, GroupQueryAttention=1, SkipSimplifiedLayerNormalization=2, Split=1, Sigmoid=1, Mul=2
)  # ONNX Runtime makes QuickGelu of the sigmoid when it loads the graph


def planned(package: Package, dtype: str, **options: Any) -> CompilePlan:
    plan = make_plan(
        package, CompileOptions(provider="cuda", ctx_len=CAPACITY, dtype=dtype, **options)
    )
    return replace(plan, interface=CudaTarget().interface(plan))


def published(plan: CompilePlan, folder: Path) -> ir.Model:
    """The graph as it is published."""
    return build(plan, CudaTarget(), folder, until="check-capture").model


@pytest.fixture(scope="module")
def bfloat16(exported: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> ir.Model:
    return published(
        planned(read_package(exported("qwen3")), "bfloat16"), tmp_path_factory.mktemp("bfloat16")
    )


@pytest.mark.ci
def test_nothing_forbids_replay(bfloat16: ir.Model) -> None:
    assert capture_problems(bfloat16) == []
    assert not {"If", "Loop", "Scan"} & {node.op_type for node in bfloat16.graph.all_nodes()}


@pytest.mark.ci
def test_every_node_has_a_cuda_kernel_for_its_dtype(bfloat16: ir.Model) -> None:
    missing = []
    for node in bfloat16.graph:
        value = next(value for value in node.inputs if value is not None)
        assert value.dtype is not None, value.name
        dtype = value.dtype.name.lower()
        if dtype not in KERNELS.get(node.op_type, set()):
            missing.append(f"{node.op_type} {dtype}")
        if node.op_type == "Where":
            values = [
                value.dtype.name.lower()
                for value in node.inputs[1:]
                if value is not None and value.dtype
            ]
            assert set(values) <= VALUES_OF_WHERE
    assert missing == []


@pytest.mark.ci
def test_every_operator_has_a_cuda_kernel_in_its_version(bfloat16: ir.Model) -> None:
    opset = bfloat16.opset_imports[""]
    used = {
        node.op_type
        for node in bfloat16.graph
        if node.domain == "" and onnx.defs.has(node.op_type, "")
    }
    versions = {
        operator: onnx.defs.get_schema(operator, opset, "").since_version for operator in used
    }
    assert {"Equal", "Pad", "ReduceMin"} <= used  # those that opset 20 has in a newer version
    assert [pair for pair in versions.items() if not has_kernel(*pair)] == []


@pytest.mark.ci
def test_the_graphs_are_valid_in_their_opset(bfloat16: ir.Model, tmp_path: Path) -> None:
    ir.save(bfloat16, tmp_path / "decoder.onnx", external_data="data")
    model = onnx.load(tmp_path / "decoder.onnx", load_external_data=False)
    for node in model.graph.node:
        if node.domain == "" and onnx.defs.has(node.op_type, ""):
            context = onnx.checker.C.CheckerContext()
            context.opset_imports = {"": bfloat16.opset_imports[""]}
            context.ir_version = model.ir_version
            onnx.checker.check_node(node, context)


@pytest.mark.ci
def test_a_layer_has_the_norms_of_its_heads_inside_the_attention(bfloat16: ir.Model) -> None:
    model_part = Counter(
        node.op_type
        for node in bfloat16.graph
        if node.name is None or not node.name.startswith("sampler.")
    )
    for operator, count in LAYER.items():
        assert model_part[operator] >= LAYERS * count, operator
    assert (
        model_part["SimplifiedLayerNormalization"] == 1
    )  # the first; those of the heads are inputs of the attention
    assert not {"Reshape", "Transpose", "RotaryEmbedding"} & set(model_part)
    for node in bfloat16.graph:
        if node.op_type == "GroupQueryAttention":
            assert node.inputs[Slot.KEY] is None
            weights = (Slot.COS_CACHE, Slot.SIN_CACHE, Slot.Q_NORM_WEIGHT, Slot.K_NORM_WEIGHT)
            assert all(node.inputs[slot] is not None for slot in weights)
            total = node.inputs[Slot.TOTAL_SEQUENCE_LENGTH]
            assert total.const_value.numpy() == CAPACITY


@pytest.mark.ci
def test_weights_and_states_are_in_half_precision(bfloat16: ir.Model) -> None:
    for value in bfloat16.graph.initializers.values():
        is_weight = (
            value.dtype == ir.DataType.FLOAT and value.shape is not None and len(value.shape) > 1
        )
        assert not is_weight or str(value.name).startswith("sampler."), value.name
    dtypes = {
        value.name: value.dtype for value in [*bfloat16.graph.inputs, *bfloat16.graph.outputs]
    }
    assert dtypes["past_key_values.0.key"] == dtypes["present.1.value"] == ir.DataType.BFLOAT16
    assert dtypes["temperature"] == ir.DataType.FLOAT


@pytest.mark.parametrize(
    ("dtype", "weights"), [("float16", "int4"), ("bfloat16", "int4"), ("bfloat16", "int8")]
)
def test_quantized_weights_keep_scales_in_half_precision(
    dtype: str, weights: str, llama_package: Path, tmp_path: Path
) -> None:
    """And they are the model's: what the head stands for, which no pass joins with others."""
    bits = INT_BITS[weights]
    model = published(planned(read_package(llama_package), dtype, weights=weights), tmp_path)
    packed = [node for node in model.graph if node.op_type == "MatMulNBits"]
    assert len(packed) == 4 * LAYERS + 1
    scales = {node.inputs[2].dtype for node in packed if node.inputs[2] is not None}
    assert scales == {ir.DataType(DTYPES[dtype].onnx)}
    assert capture_problems(model) == []
    report = quantization_report(model)
    assert report.matrices >= len(packed)

    head = next(node for node in packed if node.attributes.get_int("N", 0) == VOCAB_SIZE)
    blocks, steps, *zeros = (constant(value) for value in head.inputs[1:])
    middles = np.full((VOCAB_SIZE, steps.size // VOCAB_SIZE), 2 ** (bits - 1))
    if zeros:
        middles = stored_levels(zeros[0].reshape(VOCAB_SIZE, -1), bits)[:, : middles.shape[1]]
    levels = stored_levels(blocks.reshape(VOCAB_SIZE, -1), bits) - np.repeat(
        middles, 32, axis=1
    ).astype(np.float64)
    sizes = np.repeat(steps.astype(np.float64).reshape(VOCAB_SIZE, -1), 32, axis=1)
    wanted = random_model("llama").lm_head.weight.detach().numpy()
    error = np.abs(levels * sizes - wanted) / np.abs(sizes)
    own_rounding = np.abs(wanted) * 2.0**-8 / np.abs(sizes)
    # A level, if the largest of a sign has none, and those that the range of a block with a zero point may give up.
    assert (error <= (4 if bits == 4 else 1.01) + own_rounding).all()
    assert error.mean() < 0.35


def test_float16_logits_are_close(llama_package: Path, tmp_path: Path) -> None:
    state = check_float16_logits("llama", read_package(llama_package), tmp_path)
    assert state["past_key_values.0.key"].dtype == np.float16


def test_float16_logits_of_recurrent_layers_that_were_exported_so(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """The state of a convolution has the dtype of the export, the memory is float32, and so is all between products."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint("olmo_hybrid"), dtype="float16")
    package = model.export(tmp_path / "portable").package
    state = check_float16_logits("olmo_hybrid", package, tmp_path)
    assert state["past_key_values.0.conv_state"].dtype == np.float16
    assert state["past_key_values.0.recurrent_state"].dtype == np.float32


def check_float16_logits(model_type: str, package: Package, folder: Path) -> dict[str, np.ndarray]:
    """Compare the logits of a prompt and of a token after it with transformers'; returns the states."""
    plan = planned(package, "float16")
    interface = plan.interface
    model = cut_at_logits(published(plan, folder), interface)
    from qsample.exporters.portable import build_initial_state

    ir.save(build_initial_state(interface), folder / "initial_state.onnx")
    half = GraphRunner(model, folder, interface, CAPACITY)
    ids = np.random.default_rng(0).integers(0, VOCAB_SIZE, (1, 9))
    state = half.start(1)
    parts = (ids[:, :8], ids[:, 8:])
    got = [half.step(part, np.array([part.size]), state)["logits"] for part in parts]
    import torch

    from tests.helpers.tiny_models import random_model

    with torch.no_grad():
        logits = random_model(model_type)(input_ids=torch.tensor(ids)).logits
    for one, wanted in zip(got, logits[:, 7:].unbind(1), strict=True):
        assert one.dtype == np.float32
        np.testing.assert_allclose(one, wanted.numpy(), atol=2e-2 * np.abs(wanted.numpy()).max())
    return state


@pytest.fixture(scope="module")
def captured(llama_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_captured(
        llama_package, tmp_path_factory.mktemp("captured") / "package", CAPACITY
    )


def test_captured_package(captured: Path) -> None:
    package = read_package(captured)
    assert package.interface.captured
    assert set(package.interface.graphs) == {"decoder.onnx", "initial_state.onnx"}
    assert {path.name for path in captured.glob("*.onnx")} == set(package.interface.graphs)
    check_interface(
        load(captured).sessions.decoder,
        package.interface.decoder,
        package.interface.sizes,
        "decoder.onnx",
    )


def test_tokens_are_those_of_the_portable_graph(llama_package: Path, captured: Path) -> None:
    """One row for each of PARAMETERS. Of those, two have to be searched, in any order; one comes twice."""
    names = {name for row in PARAMETERS for name in row}
    given: dict[str, Any] = {
        name: [row.get(name, OFF[name][0]) for row in PARAMETERS] for name in names
    }
    prompts = np.random.default_rng(2).integers(4, VOCAB_SIZE, (len(PARAMETERS), 1))
    states = []
    for path in (llama_package, captured):
        host, ids = PlainHost(path), prompts
        state = host.start([*range(len(PARAMETERS))], CAPACITY)
        for _ in range(20):
            outputs = host.call(state, ids, **given, searched_rows=[4, 3, 4])
            state, ids = host.after(state, outputs), outputs["next_ids"]
        states.append(state)
    for name in ("lengths", "status"):
        np.testing.assert_array_equal(states[1][name], states[0][name], name)
    for row, length in enumerate(states[0]["lengths"]):  # the unused tails are others
        used = slice(length + 1)
        np.testing.assert_array_equal(
            states[1]["tokens"][row, used], states[0]["tokens"][row, used]
        )


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("double_buffering", [False, True])
@pytest.mark.parametrize("flush_every", [1, 4])
def test_the_runtime_lists_the_rows_to_search(
    llama_package: Path, captured: Path, flush_every: int, double_buffering: bool, replays: bool
) -> None:
    options: dict[str, Any] = {
        "seed": 4,
        "flush_every": flush_every,
        "double_buffering": double_buffering,
    }
    wanted = load(llama_package).generate(PROMPTS, rows(), seed=4)
    model = capturing(load(captured))[0] if replays else load(captured)
    for _ in range(1 + replays):
        got = model.generate(PROMPTS, rows(), **options, prefill_chunk_size=3)
        assert got.token_ids == wanted.token_ids
        assert got.finish_reasons == wanted.finish_reasons


def test_the_example_captures(llama_package: Path, captured: Path, tmp_path: Path) -> None:
    """The CPU provider does not know the option to capture; what the example does for it changes no token."""
    script = Path(__file__).parents[3] / "examples" / "generate_onnxruntime.py"
    package = shutil.copytree(captured, tmp_path / "package")
    manifest = json.loads((package / "qsample.json").read_text())
    manifest["compilation"]["provider_options"] = {"enable_cuda_graph": "1"}
    (package / "qsample.json").write_text(json.dumps(manifest))
    options = [
        "--temperature",
        "1.3",
        "--top-p",
        "0.98",
        "--max-new-tokens",
        "12",
        "--prompt",
        "ab",
    ]
    wanted, got = (
        subprocess.run(
            [sys.executable, script, path, *options], capture_output=True, text=True, check=True
        ).stdout
        for path in (llama_package, package)
    )
    assert got == wanted


PROBLEMS = """
<ir_version: 10, opset_import: ["" : 20]>
decode (float[B,S] x, int64[B] lengths) => (int64[B] result, int64[2,N] picked)
{
    count = Shape <start = 1, end = 2> (x)
    result = Add (lengths, count)
    picked = NonZero (x)
}
"""


def test_problems_are_named() -> None:
    model = ir.from_onnx_text(PROBLEMS)
    for node in model.graph:
        node.name = node.op_type.lower()
    assert capture_problems(model) == ["NonZero nonzero does not replay", "Add add takes count"]


def placed(
    monkeypatch: pytest.MonkeyPatch, parts: list[str], misplaced: dict[str, list[str]]
) -> tuple[Any, list[Any]]:
    """A build of parts after `place`, and how each file was loaded. misplaced: nodes, of a file."""
    build: Any = SimpleNamespace(parts=[SimpleNamespace(file=name) for name in parts])
    loaded: list[Any] = []

    def load_written(build: Any, providers: Any, options: Any, file: str) -> str:
        loaded.append((providers, dict(options), file))
        return file

    monkeypatch.setattr(cuda, "load_written", load_written)
    monkeypatch.setattr(
        cuda, "misplaced_nodes", lambda build, file, device: misplaced.get(file, [])
    )
    monkeypatch.setattr(cuda, "placement_of", lambda *files: {"of": files})
    cuda.place(build, ["Device", "Host"], {"an": "option"})
    return build, loaded


def test_each_part_is_loaded_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    build, loaded = placed(monkeypatch, [], {})
    assert loaded == [(["Device", "Host"], {"an": "option"}, "decoder.onnx")]
    assert build.placement == {"of": ("decoder.onnx",)}
    build, loaded = placed(monkeypatch, ["a.onnx", "b.onnx", "c.onnx"], {})
    assert loaded == [
        (["Device", "Host"], {"an": "option"}, "a.onnx"),
        (["Device", "Host"], {"an": "option", "device_id": "1"}, "b.onnx"),
        (["Device", "Host"], {"an": "option", "device_id": "2"}, "c.onnx"),
    ]
    assert build.placement == {"of": ("a.onnx", "b.onnx", "c.onnx")}


@pytest.mark.parametrize(
    ("misplaced", "message"),
    [
        ({"a.onnx": ["n1"]}, "1 nodes do not run on Device: n1$"),
        ({"a.onnx": list("abc"), "b.onnx": list("de")}, "5 nodes .*: a, b, c, d, e$"),
        ({"b.onnx": list("abcdef")}, "6 nodes .*: a, b, c, d, e …$"),
    ],
)
def test_nodes_outside_of_the_device(
    misplaced: dict[str, list[str]], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CompileError, match=message):
        placed(monkeypatch, ["a.onnx", "b.onnx"], misplaced)


def test_a_graph_that_cannot_be_replayed_is_refused() -> None:
    """With its first five problems; control flow is one."""
    text = """g (float[B,S] x, bool c) => (float[B,S] y) {
        %s
        y = If (c) <then_branch = one () => (float[B,S] a) { a = Neg (x) },
            else_branch = two () => (float[B,S] b) { b = Abs (x) }>
    }"""
    for count in (0, 5):
        drawn = "\n".join(f"r{number} = RandomUniformLike (x)" for number in range(count))
        model = small_graph(text % drawn)
        with pytest.raises(CompileError) as caught:
            cuda.check_capture(SimpleNamespace(model=model))  # type: ignore[arg-type]
        problems = ["If y is control flow"]
        problems += [f"RandomUniformLike r{number} does not replay" for number in range(count)]
        assert str(caught.value) == (
            f"the graph cannot be captured and replayed: {'; '.join(problems[:5])}"
        )
    fine = small_graph("g (float[B,S] x) => (float[B,S] y) { y = Neg (x) }")
    cuda.check_capture(SimpleNamespace(model=fine))  # type: ignore[arg-type]


def test_what_packages_for_cuda_declare(monkeypatch: pytest.MonkeyPatch) -> None:
    package = Package(
        Path("/models/one"), manifest(interface=Interface(50, (KeyValueShape(1, 8),)))
    )
    options = CompileOptions(
        provider="cuda", ctx_len=40, dtype="bfloat16", kv_cache_dtype="int8", batch_size=1
    )
    plan = make_plan(package, options)
    target = cuda.TARGET
    assert target.interface(plan) == replace(
        plan.interface, dtype="bfloat16", kv_cache_dtype="int8", captured=True
    )
    without = replace(plan, interface=replace(plan.interface, features=Features(sampler=False)))
    assert not target.interface(without).captured
    assert target.fixed_axes(plan) == {}, "rows stay free"
    assert target.execution_providers == ("CUDAExecutionProvider", "CPUExecutionProvider")
    assert dict(target.provider_options) == {"enable_cuda_graph": "1", "use_tf32": "0"}
    assert dict(target.default_options) == {"dtype": "bfloat16"}
    assert (target.dtypes, target.weight_bits) == (("float16", "bfloat16"), (4, 8))
    assert target.capabilities == {
        Capability.DTYPE_CONVERSION,
        Capability.SEVERAL_DEVICES,
        Capability.IMAGES,
    }
    place: Any = target.phases(plan)[-1].run
    assert place.keywords == {
        "providers": target.execution_providers,
        "provider_options": target.provider_options,
    }
    asked: list[Any] = []

    def note(*given: Any, **named: Any) -> list[Any]:
        asked.append((given, named))
        return []

    monkeypatch.setattr(cuda, "lean_phases", note)
    monkeypatch.setattr(cuda, "quantization_phases", note)
    target.phases(plan)
    assert asked == [(("cuda", 40), {}), ((plan,), {"expert_block_sizes": (64, 128)})]
    monkeypatch.undo()
    model = small_graph("g (float[B,T] x) => (float[B,T] y) { y = Neg (x) }")
    run_on(model, [phase for phase in target.phases(plan) if phase.name == "fix-axes"])
    assert [str(size) for size in model.graph.inputs[0].shape or ()] == ["B", "40"]
