"""`qsample export` and `qsample compile`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from qsample.contract.interface import Features
from qsample.package.package import read_package


@pytest.mark.ci
def test_export_writes_a_package_with_what_was_asked_for(everything: Path) -> None:
    assert read_package(everything).interface.features == Features(True, True, True, True, 3, True)


def test_export_passes_every_option(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def spy(model: str, **options: Any) -> None:
        seen.update(options, model=model)
        raise ValueError("seen")

    monkeypatch.setattr("qsample.models.auto_model.AutoModelForCausalLM.from_pretrained", spy)
    defaults = {
        "include_sampler": True,
        "return_pdfs": False,
        "logit_bias": False,
        "allowed_tokens": False,
        "logprobs": False,
        "top_logprobs": 0,
        "for_serving": False,
        "filters": (),
        "filter_order": "huggingface",
        "seed_input": False,
        "max_loras": 0,
        "max_lora_rank": 16,
        "dtype": "float32",
        "tokenizer": "auto",
        "revision": None,
        "adapter": None,
    }
    assert run("export", "some/model", tmp_path / "p")[0] == 1
    assert seen == {**defaults, "model": "some/model"}
    run("export", "some/model", tmp_path / "p", "--no-sampler", "--dtype", "float16", "--revision", "v2")
    assert seen == {**defaults, "model": "some/model", "include_sampler": False, "dtype": "float16", "revision": "v2"}
    filters = ("--filter", "xtc,dry", "--filter", "typical_p", "--filter-order", "llama.cpp", "--seed-input")
    run("export", "some/model", tmp_path / "p", *filters)
    chosen = {"filters": ("xtc", "dry", "typical_p"), "filter_order": "llama.cpp", "seed_input": True}
    assert seen == {**defaults, **chosen, "model": "some/model"}
    run("export", "some/model", tmp_path / "p", "--for-serving")
    assert seen == {**defaults, "for_serving": True, "model": "some/model"}


def test_bake_passes_filters(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def spy(*paths: Any, **options: Any) -> None:
        seen.update(options)
        raise ValueError("seen")

    monkeypatch.setattr("qsample.models.auto_model.bake", spy)
    run("bake", "some/model", tmp_path / "p", "--filter", "mirostat", "--filter-order", "llama.cpp", "--seed-input")
    assert seen["features"] == Features(filters=("mirostat",), filter_order="llama.cpp", seed=True)
    run("bake", "some/model", tmp_path / "p", "--for-serving", "--top-logprobs", "3")
    assert seen["features"] == Features(logit_bias=True, allowed_tokens=True, logprobs=True, top_logprobs=20)


@pytest.mark.parametrize("command", ["export", "bake"])
def test_a_filter_that_there_is_not(command: str, run: Any, tmp_path: Path) -> None:
    status, _, err = run(command, "some/model", tmp_path / "p", "--filter", "xtc,tpyical_p")
    assert (status, "--filter names 'tpyical_p'; did you mean 'typical_p'?" in err) == (2, True), err


def test_export_of_a_package_is_wrong_usage(run: Any, llama_package: Path, tmp_path: Path) -> None:
    status, _, err = run("export", llama_package, tmp_path / "p")
    assert status == 2
    assert "package already" in err


def test_export_of_no_model(run: Any, tmp_path: Path) -> None:
    status, _, err = run("export", tmp_path / "nothing", tmp_path / "p")
    assert status == 1
    assert "does not exist" in err
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("command", ["export", "bake"])
def test_a_folder_has_no_revision(command: str, run: Any, checkpoint: Any, tmp_path: Path) -> None:
    folder = checkpoint("llama")
    status, _, err = run(command, folder, tmp_path / "p", "--revision", "v2")
    assert (status, f"--revision belongs to a hub id, and {folder} is on this machine" in err) == (2, True), err
    assert not (tmp_path / "p").exists()


def test_compile_takes_a_package_and_shows_what_it_took(run: Any, llama_package: Path, tmp_path: Path) -> None:
    sizes = ("--ctx-len", "64", "--batch-size", "2")
    status, printed, err = run("compile", llama_package, tmp_path / "cpu", *sizes, "--timing", "--json")
    assert status == 0, err
    shown, package = json.loads(printed), read_package(tmp_path / "cpu")
    compilation = package.manifest.compilation
    assert compilation is not None
    assert (compilation.provider, compilation.batch_size, compilation.ctx_len) == ("cpu", 2, 64)
    assert (shown["path"], shown["kind"]) == (str(package.path), "device")
    assert shown["bytes"] == sum(entry.bytes for entry in package.manifest.files.values())

    stages = [cost["stage"] for cost in shown["timing"]]
    assert (stages[0], stages[-1]) == ("starting", "publishing")
    assert [cost.stage for cost in package.manifest.timing] == stages[:-1], "without those of the export"
    assert shown["total"]["seconds"] == pytest.approx(sum(cost["seconds"] for cost in shown["timing"]), abs=0.002)
    for name in (*stages, "total"):
        assert re.search(rf"^ *{name} +\d", err, re.MULTILINE), name


def test_compile_for_an_unknown_target(run: Any, llama_package: Path, tmp_path: Path) -> None:
    status, _, err = run("compile", llama_package, tmp_path / "p", "--provider", "abacus")
    assert status == 1
    assert "abacus" in err
    assert "cpu" in err


def test_a_text_for_gptq_is_read_before_anything_is_loaded(run: Any, tmp_path: Path) -> None:
    asked = ("compile", tmp_path / "nowhere", tmp_path / "out", "--weights", "int4", "--quantization-method", "gptq")
    status, _, err = run(*asked)
    assert (status, "give it as --calibration-text" in err) == (1, True), err
    status, _, err = run(*asked, "--calibration-text", tmp_path / "missing")
    assert (status, "cannot read --calibration-text" in err) == (2, True), err
    (tmp_path / "empty").write_text("\n")
    status, _, err = run(*asked, "--calibration-text", tmp_path / "empty")
    assert (status, "is empty; give a file with text in it" in err) == (2, True), err
