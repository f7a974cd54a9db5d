"""The models that commands open: packages, and what is not one yet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qsample.cli.opening import FeatureNeeds, is_package, open_exported, open_model
from qsample.contract.interface import DEFAULT_LORA_RANK, Features
from qsample.models.model import PackagedModel, SourceModel
from qsample.models.sources import CheckpointSource
from qsample.request.sampling_params import SamplingParams
from tests.helpers.fake_package import fake_package


def test_a_package_is_opened_with_the_features_that_it_has(tmp_path: Path) -> None:
    path = fake_package(tmp_path / "package", sampler=False, allowed_tokens=True).path
    assert is_package(str(path))
    opened = open_model(str(path))
    assert isinstance(opened, PackagedModel)
    assert opened.package.interface.features.allowed_tokens
    assert open_exported(str(path)).package.path == path


def test_a_checkpoint_is_not_loaded_when_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    assert not is_package(str(tmp_path))
    for text_only in (False, True):
        opened = open_model(str(tmp_path), text_only=text_only)
        assert isinstance(opened, SourceModel)
        assert isinstance(opened.source, CheckpointSource)
        assert (opened.source.images, opened.source.text_only) == (None, text_only)
        identity = opened.source.identity()  # the cache's
        assert (identity["images"], identity["text_only"]) == (None, text_only)


def test_features_that_a_command_needs(tmp_path: Path) -> None:
    assert FeatureNeeds().added_to(Features()) == Features()
    assert FeatureNeeds(for_serving=True).added_to(Features()) == Features().for_serving()
    forms = Features(grammars=True, allowed_tokens=True)
    assert FeatureNeeds(has_form=True).added_to(Features()) == forms
    later = FeatureNeeds(max_loras=4).added_to(Features())
    assert (later.max_loras, later.max_lora_rank) == (4, DEFAULT_LORA_RANK)
    loras = {}
    for name, rank in (("a", 4), ("b", 96)):
        (tmp_path / name).mkdir()
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj"]}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(config))
        loras[name] = str(tmp_path / name)
    given = FeatureNeeds(loras=loras).added_to(Features())
    assert (given.max_loras, given.max_lora_rank) == (2, 96)


def test_the_options_of_loading_and_measuring_reach_the_runtime(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, seen = fake_package(tmp_path / "package").path, dict[str, Any]()
    monkeypatch.setattr(
        "qsample.runtime.bench.measure", lambda model, *given: seen.update(given=given)
    )
    run("bench", package, "--batch", "2", "--top-k", "3")
    assert seen["given"] == (2, 64, 64, SamplingParams(temperature=0, top_k=3), 3, [], None)

    def load(path: Path, provider: str, **options: Any) -> None:
        seen.update(options, path=path, provider=provider)

    monkeypatch.setattr("qsample.runtime.load", load)
    run(
        "chat",
        package,
        "--provider",
        "cpu",
        "--threads",
        "3",
        "--ctx-len",
        "32",
        "--no-batch-invariant",
    )
    del seen["given"]
    options = {"ctx_len": 32, "intra_op_num_threads": 3, "batch_invariant": False, "verify": False}
    options["trusted_keys"] = None
    assert seen == {"path": package, "provider": "cpu", **options}


def test_a_package_cannot_leave_out_its_images(run: Any, tmp_path: Path) -> None:
    package = fake_package(tmp_path / "package").path
    for command in (
        ("generate", package, "-p", "x"),
        ("compile", package, tmp_path / "out"),
        ("bench", package),
    ):
        code, _, said = run(*command, "--text-only")
        assert code == 2
        assert "--text-only is for a checkpoint, and" in " ".join(said.split())
