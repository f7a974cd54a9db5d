"""What compile says beside the graph, without compiling: interface, figures, files, and advice if it is too far off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from qsample.compiler import compile as compile_module
from qsample.compiler.options import CompileOptions
from qsample.compiler.plan import CompilePlan, make_plan
from qsample.compiler.quantize.blocks import QuantizationReport, report_quantization
from qsample.compiler.targets import find_target
from qsample.contract.interface import Features, Interface, KeyValueShape
from qsample.errors import CompileError
from qsample.package.divergence import Divergence
from qsample.package.package import Compilation, FileEntry, Package
from qsample.package.statistics import Estimate
from tests.helpers.small_graphs import small_graph
from tests.helpers.small_packages import manifest

INTERFACE = Interface(
    100,
    (KeyValueShape(2, 8),),
    "float32",
    Features(logprobs=True, prompt_logprobs=True),
)
FITTED = {"weights": "int4", "preset": "balanced", "calibration_text": "a text"}


def plan_of(folder: Path = Path("/models/one"), changes: Any = None, **options: Any) -> CompilePlan:
    package = Package(folder, manifest(**{"interface": INTERFACE, **(changes or {})}))
    return make_plan(package, CompileOptions(**{"ctx_len": 32, **options}))


PACKED = {"packed_weights": {"matrices": 7}}
FAR = Divergence("random", 500, *[Estimate(value, value, value) for value in (2.5, 0.5, 9.0)])


@pytest.mark.parametrize(
    ("options", "changes", "causes", "advice"),
    [
        (
            {"weights": "int4"},
            None,
            "int4 weights in blocks of 32 (preset quick)",
            "preset balanced, or weights int8, or block_size 16",
        ),
        (
            FITTED,
            None,
            "int4 weights in blocks of 64 (preset balanced)",
            "weights int8, or block_size 32",
        ),
        (
            {"weights": "int2", "block_size": 128},
            None,
            "int2 weights in blocks of 128 (preset quick)",
            "preset balanced, or weights int4, or block_size 64",
        ),
        (
            {"weights": "int8", "block_size": 16},
            None,
            "int8 weights in blocks of 16 (preset quick)",
            "preset balanced",
        ),
        (
            {"weights": "int8", "block_size": 16, "provider": "web"},
            None,
            "int8 weights in blocks of 16 (preset quick)",
            "the float weights",
        ),
        (
            {"weights": {"*": "int4"}, "provider": "web"},
            None,
            "a table's weights in blocks of 32 (preset quick)",
            "weights int8, or block_size 16",
        ),
        ({"weights": "float16"}, None, "float16 weights", "weights float32"),
        ({"kv_cache_dtype": "int8"}, None, "an int8 cache", "no kv_cache_dtype"),
        ({"kv_cache_dtype": "int4"}, None, "an int4 cache", "kv_cache_dtype int8"),
        (
            {"weights": "float16", "kv_cache_dtype": "int8"},
            PACKED,
            "float16 weights and an int8 cache and activations in 8 bits, for the weights that came packed,",
            "weights float32, or no kv_cache_dtype, or the unquantized checkpoint",
        ),
    ],
)
def test_the_causes_and_what_to_do(
    options: dict[str, Any], changes: Any, causes: str, advice: str
) -> None:
    plan = plan_of(changes=changes, **options, max_divergence=0.25)
    message = str(compile_module._too_far_off(FAR, plan, None))
    assert message == (
        f"{causes} change the model too much: {FAR}, and the KL may be at most 0.25. Take {advice}; max_divergence "
        "moves the limit"
    )
    kept = compile_module._too_far_off(FAR, plan, Path("/put/aside"))
    assert isinstance(kept, CompileError)
    assert str(kept) == (
        f"{message}. The package is kept as /put/aside: rename it if it is good enough for you, or delete it"
    )


@pytest.mark.parametrize(
    ("options", "changes", "scores"),
    [
        ({}, None, True),
        ({"num_devices": 2}, None, False),
        ({"num_speculative_tokens": 1, "kv_cache_dtype": "int8"}, None, False),
        ({"provider": "web"}, None, False),
        ({}, {"interface": replace(INTERFACE, features=Features(logprobs=True))}, False),
    ],
)
def test_scores_of_prompts_where_they_cost_nothing(
    options: dict[str, Any], changes: Any, scores: bool
) -> None:
    plan = plan_of(changes=changes, **options)
    target = find_target(plan.options.provider)
    interface = compile_module._interface(plan, target)
    assert interface.features.prompt_logprobs == scores
    assert interface.features.logprobs, "the others stay"
    assert interface == replace(
        target.interface(plan), features=replace(plan.interface.features, prompt_logprobs=scores)
    )


def test_figures_of_quantization() -> None:
    model = small_graph("g (float[2] x) => (float[2] y) { y = Neg (x) }")
    figures = compile_module._figures
    assert figures(plan_of(), model) is None
    assert figures(plan_of(kv_cache_dtype="int8"), model) == {"kv_cache_dtype": "int8"}
    assert figures(plan_of(changes=PACKED), model) == {"packed_matrices": 7}
    report_quantization(model, QuantizationReport(3, 200, 100))
    assert figures(plan_of(), model) is None, "nothing was to be quantized"
    found = figures(plan_of(**FITTED), model)
    assert found is not None
    assert {name: found[name] for name in ("dtype", "preset", "bits", "block_size", "method")} == {
        "dtype": "int4",
        "preset": "balanced",
        "bits": {},  # of each matrix
        "block_size": 64,
        "method": "gptq",
    }
    assert (found["matrices"], found["bytes_before"], found["bytes_after"]) == (3, 200, 100)
    assert "kv_cache_dtype" not in found
    assert "packed_experts" not in found
    table = figures(plan_of(weights={"*": "int8"}), model)
    assert table is not None
    assert (table["dtype"], table["block_size"]) == ("a table's", 32)
    packed = figures(plan_of(changes=PACKED), model)
    assert packed is not None
    assert "block_size" not in packed, "its blocks are the checkpoint's"
    assert (packed["packed_matrices"], packed["matrices"]) == (7, 3)


def test_experts_that_came_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_graph("g (float[2] x) => (float[2] y) { y = Neg (x) }")
    monkeypatch.setattr(
        compile_module, "num_packed_experts", lambda given: 5 if given is model else 0
    )
    assert compile_module._figures(plan_of(changes=PACKED), model) == {
        "packed_matrices": 7,
        "packed_experts": 5,
    }


def test_the_other_files_come_along(tmp_path: Path) -> None:
    """All but the graphs that compile writes itself; the starting state is new if the cache is another."""
    source = tmp_path / "source"
    files = {
        "decoder.onnx": b"portable",
        "decoder.onnx.data": b"weights",
        "vision.onnx": b"tower",
        "vision.onnx.data": b"its weights",
        "initial_state.onnx": b"zeros",
        "tokenizer/tokenizer.json": b"{}",
    }
    for name, content in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(content)
    entries = {name: FileEntry(sha256="", bytes=0) for name in files}
    plan = plan_of(source, {"files": entries})
    for name, changed in (("same", plan), ("int8", _with_cache(plan))):
        folder = tmp_path / name
        folder.mkdir()
        compile_module._add_other_files(changed, folder)
        found = {
            path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
        }
        assert found == {"initial_state.onnx", "tokenizer/tokenizer.json"}
        assert (folder / "tokenizer" / "tokenizer.json").read_bytes() == b"{}"
    assert (tmp_path / "same" / "initial_state.onnx").read_bytes() == b"zeros"
    graph = onnx.load(tmp_path / "int8" / "initial_state.onnx").graph
    types = {value.name: value.type.tensor_type.elem_type for value in graph.output}
    assert types["past_key_values.0.key"] == onnx.TensorProto.INT8


def _with_cache(plan: CompilePlan) -> CompilePlan:
    return replace(plan, interface=replace(plan.interface, kv_cache_dtype="int8"))


def test_the_package_before_its_files_are_hashed(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    for name in ("decoder.onnx", "tokenizer/tokenizer.json"):
        (tmp_path / name).write_bytes(b"content")
    plan = _with_cache(plan_of())
    compilation = Compilation("cpu", ("CPUExecutionProvider",), None, 32, {}, {})
    package = compile_module._unsealed(plan, compilation, tmp_path)
    assert package.path == tmp_path
    assert package.manifest == replace(
        plan.source.manifest,
        kind="device",
        contract_version=plan.interface.contract_version,
        interface=plan.interface,
        compilation=compilation,
        files={
            name: FileEntry(sha256="", bytes=0)
            for name in ("decoder.onnx", "tokenizer/tokenizer.json")
        },
    )
