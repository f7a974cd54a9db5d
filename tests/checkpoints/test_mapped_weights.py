"""Weights reach the exporter as placeholders for what lies in the checkpoint's files: the same numbers, no copy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from qsample.checkpoints.hub_options import HubOptions
from qsample.checkpoints.load import Checkpoint, load_model
from qsample.transforms.deferred import computing, deferred, numbers
from tests.helpers.mixtures import mixture
from tests.helpers.tiny_models import random_model

pytestmark = pytest.mark.usefixtures("nothing_is_small")


def save(path: Path, dtype: torch.dtype, **options: object) -> Path:
    random_model("llama", tie_word_embeddings=True).to(dtype).save_pretrained(path, **options)  # type: ignore[arg-type]
    return path


def check_like_transformers(model: PreTrainedModel, source: Path, dtype: torch.dtype = torch.float32) -> None:
    """The same names, dtypes and numbers as transformers loads into memory."""
    wanted = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    loaded = model.state_dict()
    assert loaded.keys() == wanted.state_dict().keys()
    for name, tensor in wanted.state_dict().items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(numbers(loaded[name]), tensor), name
    assert model.generation_config.to_dict() == wanted.generation_config.to_dict()
    ids = torch.tensor([[3, 14, 15, 92]])
    with torch.no_grad(), computing():
        logits = model(input_ids=ids).logits
    torch.testing.assert_close(
        logits, wanted.eval()(input_ids=ids).logits, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-2
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shard", ["1GB", "50KB"])
def test_the_weights_are_those_that_transformers_converts(dtype: torch.dtype, shard: str, tmp_path: Path) -> None:
    source = save(tmp_path / "source", dtype, max_shard_size=shard)
    (tmp_path / "scratch").mkdir()
    model = load_model(Checkpoint(str(source)), tmp_path / "scratch")
    check_like_transformers(model, source)
    assert not list((tmp_path / "scratch").iterdir())
    for name, weight in model.named_parameters():
        found = deferred(weight)
        if "norm" in name:
            assert found is None
        else:
            assert found is not None
            assert found.dtype == dtype
            with open(found.place.path, "rb") as file:
                file.seek(found.place.offset)
                content = file.read(found.place.length)
            assert content == numbers(weight.data).to(dtype).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_float16_is_computed_from_what_is_stored(stored: torch.dtype, tmp_path: Path) -> None:
    source = save(tmp_path / "source", stored)
    (tmp_path / "scratch").mkdir()
    model = load_model(Checkpoint(str(source), dtype="float16"), tmp_path / "scratch")
    check_like_transformers(model, source, torch.float16)
    found = deferred(model.model.layers[0].mlp.up_proj.weight)
    assert found is not None
    assert (found.place is not None) == (stored == torch.float16)


def test_a_weight_that_is_stored_in_float32_keeps_its_bits(tmp_path: Path) -> None:
    """In a checkpoint of bfloat16: routers and decays often are."""
    source, name = save(tmp_path / "source", torch.bfloat16), "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(source / "model.safetensors")
    exact = torch.randn(tensors[name].shape)
    save_file({**tensors, name: exact}, source / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "scratch").mkdir()
    model = load_model(Checkpoint(str(source)), tmp_path / "scratch")
    assert torch.equal(numbers(model.state_dict()[name]), exact)
    check_like_transformers(model, source)


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_tied_head_that_is_stored_as_well(dtype: str, factor: int, tmp_path: Path) -> None:
    """transformers ties it where it is equal, and leaves it as it is where it is not."""
    source = save(tmp_path / "source", torch.bfloat16)
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = factor * tensors["model.embed_tokens.weight"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "scratch").mkdir()
    model = load_model(Checkpoint(str(source), dtype=dtype), tmp_path / "scratch")
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (factor == 1)
    check_like_transformers(model, source, getattr(torch, dtype))


def test_experts_that_transformers_merges_are_put_together_when_they_are_needed(tmp_path: Path) -> None:
    mixture("qwen3_moe").to(torch.bfloat16).save_pretrained(tmp_path / "source")
    stored = load_file(tmp_path / "source" / "model.safetensors")
    assert any("experts.0." in name for name in stored)  # each expert on its own
    (tmp_path / "scratch").mkdir()
    model = load_model(Checkpoint(str(tmp_path / "source")), tmp_path / "scratch")
    found = deferred(model.model.layers[0].mlp.experts.gate_up_proj)
    assert found is not None
    assert found.dtype == torch.bfloat16
    assert found.place is not None
    for projection, place in zip(("gate", "up"), found.place.places, strict=True):
        for expert, part in enumerate(place.places):
            name = f"model.layers.0.mlp.experts.{expert}.{projection}_proj.weight"
            content = part.path.read_bytes()[part.offset : part.offset + part.length]
            assert content == stored[name].view(torch.uint8).numpy().tobytes()
    check_like_transformers(model, tmp_path / "source")


def test_a_checkpoint_of_the_hub_is_read_from_the_cache(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = tmp_path / "cache" / "models--someone--model"
    save(folder / "blobs", torch.bfloat16, max_shard_size="50KB")
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for file in (folder / "blobs").iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    (tmp_path / "scratch").mkdir()
    checkpoint = Checkpoint("someone/model", hub=HubOptions(cache_dir=tmp_path / "cache", local_files_only=True))
    model = load_model(checkpoint, tmp_path / "scratch")
    check_like_transformers(model, snapshot)
    found = deferred(model.model.embed_tokens.weight)
    assert found is not None
    assert found.place.path.parent == folder / "blobs"  # ONNX Runtime opens no link that leads out of its folder
