"""The registry of targets, their refusals before any work, and a target of somebody else in one file."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qsample import AutoModelForCausalLM, cli
from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.compiler.targets import Target, find_target, target_names
from qsample.contract.interface import ImageShape
from qsample.errors import CompileError, PackageError
from qsample.models.model import PackagedModel
from qsample.ort.providers import available_providers
from qsample.package.package import Package
from qsample.runtime import load
from tests.helpers.fake_package import fake_package


def test_the_targets_are_found_by_name() -> None:
    assert {"cpu", "cuda", "openvino"} <= set(target_names())
    assert find_target("openvino").name == "openvino"


GPTQ = {"weights": "int4", "preset": "speed"}


@pytest.mark.parametrize(
    ("provider", "options", "message"),
    [
        (
            "cpu",
            {"dtype": "bfloat16"},
            "'bfloat16' and the target cpu computes in 'float32' or 'float16'; export the",
        ),
        (
            "cpu",
            {"dtype": "float16"},
            "'float16' and the package was exported as float32; export it again with that",
        ),
        (
            "cpu",
            {"weights": "bfloat16"},
            "'bfloat16' and the package holds float32; choose one of int2, int4, int8, float16, float32",
        ),
        (
            "cpu",
            {**GPTQ, "calibration_text": "too short"},
            "calibration_text has 10 tokens; give at least 128",
        ),
        ("cpu", {**GPTQ, "calibration_text": ""}, "calibration_text is empty"),
        ("cpu", {**GPTQ, "calibration_text": 5}, "calibration_text is 5; give a text"),
        ("cuda", {**GPTQ, "calibration_text": "a text"}, "provider is 'cuda'; take 'quick'"),
        (
            "cpu",
            {"num_speculative_tokens": 7},
            "=7 needs kv_cache_dtype='int8': over a cache in float32, attention to",
        ),
        (
            "cuda",
            {},
            "dtype is 'float32' and the target cuda computes in 'float16' or 'bfloat16'; compile with one",
        ),
        (
            "cuda",
            {"weights": "float16"},
            "'float16', which is for the cpu target; give dtype='float16' for cuda",
        ),
        (
            "cuda",
            {"num_speculative_tokens": 1},
            "is 1, and steps of graphs for cuda are of one token; leave",
        ),
        ("openvino", {"dtype": "float16"}, "the target openvino computes in 'float32'; export"),
        (
            "openvino",
            {"weights": "float16"},
            "for the cpu target; give 'int4', 'int8' or 'float32' for openvino",
        ),
        (
            "web",
            {"num_speculative_tokens": 1, "kv_cache_dtype": "int8"},
            "steps of graphs for web are of one",
        ),
        (
            "webgpu",
            {"dtype": "bfloat16"},
            "dtype is 'bfloat16' and the target webgpu computes in 'float32' or",
        ),
        (
            "webgpu",
            {"kv_cache_dtype": "int8"},
            "'int8', which the attention of webgpu does not take; leave it out",
        ),
        (
            "web",
            {"weights": "int2"},
            "products with 2-bit weights are for cpu; take 'int4' for web",
        ),
        (
            "webgpu",
            {"weights": {"*": "int2"}},
            r"is \{'\*': 'int2'\}, and products with 2-bit weights are for cpu",
        ),
        (
            "web",
            {"kv_cache_dtype": "int4"},
            "'int4', which the attention of web does not take; .* or take 'int8'",
        ),
        (
            "webgpu",
            {"weights": "float16"},
            "which is for the cpu target; give dtype='float16' for webgpu",
        ),
        ("tpu", {}, r"no compile target 'tpu'; choose one of .*cpu"),
    ],
)
def test_refused_before_any_work(
    provider: str, options: dict[str, Any], message: str, llama: Package, tmp_path: Path
) -> None:
    with pytest.raises(CompileError, match=message):
        compile_package(
            llama, tmp_path / "out", CompileOptions(provider=provider, **{"ctx_len": 32, **options})
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("provider", "options", "message"),
    [
        (
            "cuda",
            {"dtype": "bfloat16"},
            "graphs for cuda have none; compile for cpu, or export only the text model",
        ),
        (
            "web",
            {},
            "reads images, and packages for web read text; compile for cpu or cuda, or export only the text model",
        ),
        ("webgpu", {}, "reads images, and packages for webgpu read text"),
        ("openvino", {}, "reads images, and packages for openvino read text"),
        (
            "cpu",
            {"num_speculative_tokens": 1, "kv_cache_dtype": "int8"},
            "the tokens of an image see each other",
        ),
    ],
)
def test_images_whose_tokens_see_each_other_need_a_branch(
    provider: str, options: dict[str, Any], message: str, small: Package, tmp_path: Path
) -> None:
    interface = replace(small.interface, image=ImageShape(64, blockwise=True))
    source = replace(small, manifest=replace(small.manifest, interface=interface))
    with pytest.raises(CompileError, match=message):
        compile_package(
            source, tmp_path / "out", CompileOptions(provider=provider, ctx_len=32, **options)
        )


def test_a_package_in_half_precision_is_not_rounded_again(small: Package, tmp_path: Path) -> None:
    half = replace(
        small, manifest=replace(small.manifest, interface=replace(small.interface, dtype="float16"))
    )
    for provider, dtype in (("cuda", "bfloat16"), ("webgpu", "float32")):
        with pytest.raises(
            CompileError, match="the package was exported as float16; export it again as float32"
        ):
            compile_package(
                half, tmp_path / "out", CompileOptions(provider=provider, dtype=dtype, ctx_len=32)
            )


@pytest.mark.parametrize(
    ("provider", "options", "message"),
    [
        (
            "openvino",
            {},
            r"has no OpenVINOExecutionProvider; .*`pip install .*\[openvino\]\"` brings OpenVINO",
        ),
        ("cuda", {"dtype": "bfloat16"}, "no CUDAExecutionProvider"),
    ],
)
def test_a_provider_that_is_not_installed(
    provider: str, options: dict[str, Any], message: str, small: Package, tmp_path: Path
) -> None:
    if find_target(provider).execution_providers[0] in available_providers():
        pytest.skip("it is installed here")
    with pytest.raises(CompileError, match=message):
        compile_package(
            small, tmp_path / "out", CompileOptions(provider=provider, ctx_len=32, **options)
        )
    assert not (tmp_path / "out").exists()


TOY = """
from qsample.compiler.pipeline import fixed_sizes, graph_pass, quantization_phases, save, step
from qsample.compiler.targets import Target

def count_nodes(model):
    counted.append(len(model.graph))
    return False

def place(build):
    build.placement = {"CPUExecutionProvider": {"everything": len(build.model.graph)}}

class Toy(Target):
    name = "toy"
    execution_providers = ("CPUExecutionProvider",)
    provider_options = {"toy_option": "1"}  # which no package but one for this target may have

    def phases(self, plan):
        return [
            fixed_sizes(plan, self.fixed_axes(plan)),
            graph_pass(count_nodes),
            *quantization_phases(plan),
            step(save),
            step(place),
        ]

counted = []
TARGET = Toy()
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with a target, installed: one module, and the entry point that names it."""
    site = tmp_path / "site"
    (site / "toy_target-1.0.dist-info").mkdir(parents=True)
    (site / "toy_target-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: toy-target\nVersion: 1.0\n"
    )
    (site / "toy_target-1.0.dist-info" / "entry_points.txt").write_text(
        "[qsample.targets]\ntoy = toy_target:TARGET\n"
    )
    (site / "toy_target.py").write_text(TOY)
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "toy_target", raising=False)


@pytest.mark.usefixtures("toy")
def test_a_target_in_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    portable = fake_package(tmp_path / "portable")
    assert "toy" in target_names()
    assert isinstance(find_target("toy"), Target)

    options: dict[str, Any] = {"max_new_tokens": 6, "seed": 3}
    wanted = PackagedModel(portable).generate("abc", **options).token_ids
    compiled = PackagedModel(portable).compile(tmp_path / "toy", provider="toy", ctx_len=32)
    compilation = compiled.package.manifest.compilation
    assert (compilation.provider, dict(compilation.provider_options)) == (
        "toy",
        {"toy_option": "1"},
    )
    assert compilation.self_test["agreeing"] == compilation.self_test["tokens"]
    assert compiled.generate("abc", **options).token_ids == wanted
    assert (
        AutoModelForCausalLM.from_pretrained(tmp_path / "toy").generate("abc", **options).token_ids
        == wanted
    )

    command = [
        "compile",
        str(portable.path),
        str(tmp_path / "quantized"),
        "--provider",
        "toy",
        "--ctx-len",
        "32",
    ]
    assert cli.run([*command, "--weights", "int8", "--debug-dump", str(tmp_path / "dump")]) == 0
    assert (tmp_path / "dump" / "02-count-nodes.onnx").is_file()
    capsys.readouterr()
    assert (
        cli.run(["generate", str(tmp_path / "toy"), "--provider", "toy", "-p", "abc", "--json"])
        == 0
    )
    assert '"token_ids"' in capsys.readouterr().out

    fitted: dict[str, Any] = {"weights": "int4", "preset": "speed", "calibration_text": "a text"}
    with pytest.raises(
        CompileError, match=r"'speed' runs the graph .* and provider is 'toy'; take 'quick'"
    ):
        PackagedModel(portable).compile(tmp_path / "fitted", provider="toy", **fitted)


def test_its_options_are_not_trusted_once_it_is_not_installed(
    toy: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    portable = fake_package(tmp_path / "portable")
    PackagedModel(portable).compile(tmp_path / "toy", provider="toy", ctx_len=32)
    monkeypatch.undo()
    with pytest.raises(
        PackageError, match="sets CPUExecutionProvider's option 'toy_option' to '1'"
    ):
        load(tmp_path / "toy")
