"""A device package straight from a checkpoint: what it holds, and what it takes of the disk meanwhile."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from qsample import AutoModelForCausalLM
from qsample.disk import space
from qsample.errors import PackageError
from qsample.exporters import export
from qsample.models import CheckpointModel
from tests.helpers.mixtures import mixture
from tests.helpers.tiny_models import random_model

SIZES = {"hidden_size": 192, "intermediate_size": 512, "vocab_size": 1000, "num_hidden_layers": 2}


def checkpoint(folder: Path, dtype: torch.dtype = torch.bfloat16, **changes: object) -> CheckpointModel:
    random_model("llama", **SIZES | changes).to(dtype).save_pretrained(folder, max_shard_size="1MB")  # type: ignore[arg-type]
    model = AutoModelForCausalLM.from_pretrained(folder, tokenizer=None)
    assert isinstance(model, CheckpointModel)
    return model


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def sizes_at_the_gate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the size of `folder` when the parity gate opens, which is after the graph is written."""
    sizes, check = [], export.parity.check

    def measured(*arguments: Any, **options: Any) -> Any:
        sizes.append(size(folder))
        return check(*arguments, **options)

    monkeypatch.setattr(export.parity, "check", measured)
    return sizes


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "int4"},
        pytest.param({"weights": "int8", "kv_cache_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param({}, marks=pytest.mark.slow),
    ],
)
def test_it_is_the_package_that_a_portable_one_is_compiled_to(
    options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checkpoint(tmp_path / "checkpoint", tie_word_embeddings=not options)
    before = size(tmp_path / "checkpoint")
    sizes = sizes_at_the_gate(tmp_path, monkeypatch)
    portable = model.export(tmp_path / "portable")
    assert size(tmp_path / "portable") < 1.05 * before + 1_000_000  # the graph of the sampler is most of the rest
    there = portable.compile(tmp_path / "there", ctx_len=64, max_divergence=10, **options)
    written = size(tmp_path)
    straight = model.compile(tmp_path / "straight", ctx_len=64, max_divergence=10, **options)
    assert sizes[1] - written < 0.1 * before + 1_000_000  # no weight is copied on the way
    for name in ("decoder.onnx.data", "config.json", "initial_state.onnx"):
        assert straight.package.manifest.files[name] == there.package.manifest.files[name]
    assert straight.package.manifest.parity == portable.package.manifest.parity
    assert straight.package.manifest.source == portable.package.manifest.source
    prompts = [[5, 6, 7], [900, 1]]
    ids = [package.generate(prompts, max_new_tokens=8, do_sample=False).token_ids for package in (there, straight)]
    assert ids[0] == ids[1]
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "portable", "straight", "there"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_no_weight_is_copied_on_the_way(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = checkpoint(tmp_path / "checkpoint", dtype)
    sizes = sizes_at_the_gate(tmp_path, monkeypatch)
    model.compile(tmp_path / "package", ctx_len=64, weights="int4", max_divergence=10)
    assert sizes[0] < 1.1 * size(tmp_path / "checkpoint") + 1_000_000


@pytest.mark.slow
def test_weights_that_are_computed(tmp_path: Path) -> None:
    from tests.helpers.adapters import lora_pair, save_adapter

    checkpoint(tmp_path / "checkpoint")
    save_adapter(tmp_path / "adapter", lora_pair("model.layers.0.mlp.up_proj", 512, 192))
    check_straight(tmp_path, adapter=str(tmp_path / "adapter"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    [
        "qwen3_moe",  # each expert on its own, gate and up too
        "mixtral",  # by other names
        "granitemoe",  # all experts in one tensor, up behind gate
    ],
)
def test_experts_are_not_copied_on_the_way(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes_of_experts = {"hidden_size": 256, "moe_intermediate_size": 96, "intermediate_size": 96}
    mixture(model_type, **sizes_of_experts).to(torch.bfloat16).save_pretrained(tmp_path / "checkpoint")
    sizes = sizes_at_the_gate(tmp_path, monkeypatch)
    written = check_straight(tmp_path)
    assert sizes[1] - written < 0.2 * size(tmp_path / "checkpoint") + 800_000


def check_straight(folder: Path, **options: Any) -> int:
    """Check that the checkpoint compiles to what its portable package does. Returns the size of `folder` before."""
    model = AutoModelForCausalLM.from_pretrained(folder / "checkpoint", tokenizer=None, **options)
    there = model.export(folder / "portable").compile(folder / "there", ctx_len=64, weights="int8")
    before = size(folder)
    straight = model.compile(folder / "straight", ctx_len=64, weights="int8")
    name = "decoder.onnx.data"
    assert straight.package.manifest.files[name] == there.package.manifest.files[name]
    assert straight.package.manifest.parity == there.package.manifest.parity
    return before


def test_a_disk_too_small_for_what_is_really_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = checkpoint(tmp_path / "checkpoint")
    numbers = sum(file.stat().st_size for file in (tmp_path / "checkpoint").glob("*.safetensors")) // 2
    asked: list[int] = []

    def full(folder: Path, needed: int, what: str) -> None:
        asked.append(needed)
        raise PackageError(f"{what} needs about {space.format_bytes(needed)}")

    monkeypatch.setattr(import_module("qsample.compiler.compile"), "check_free", full)
    with pytest.raises(PackageError, match="the package needs about"):
        model.compile(tmp_path / "package", ctx_len=64, weights="int4")
    assert 2 * numbers * 0.5 < asked[0] < 2 * numbers * 0.75 + 500_000  # 4 bits, scales and tables, twice
    assert sorted(os.listdir(tmp_path)) == ["checkpoint"]
