"""Weights reach the exporter as placeholders for the numbers in the checkpoint's files: the same numbers, no copy."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from qsample import AutoModelForCausalLM
from qsample.checkpoints.checkpoint import Checkpoint
from qsample.checkpoints.mapped_weights import INDEX, weight_files
from qsample.checkpoints.source import HubOptions
from qsample.errors import QsampleError
from qsample.transforms.deferred import computing, deferred, numbers
from tests.helpers.mixtures import mixture
from tests.helpers.tiny_models import random_model

pytestmark = pytest.mark.usefixtures("nothing_is_small")


def save(path: Path, dtype: torch.dtype, **options: object) -> Path:
    random_model("llama", tie_word_embeddings=True).to(dtype).save_pretrained(path, **options)  # type: ignore[arg-type]
    return path


def mapped(source: Path, dtype: str = "float32") -> PreTrainedModel:
    """The checkpoint, loaded with its weights in their files; nothing is written to scratch space."""
    (scratch := source.parent / "scratch").mkdir()
    model = Checkpoint(str(source), dtype=dtype).load(scratch=scratch)
    assert not list(scratch.iterdir())
    return model


def check_like_transformers(
    model: PreTrainedModel, source: Path, dtype: torch.dtype = torch.float32
) -> None:
    """The same names, dtypes and numbers as transformers loads into memory."""
    wanted = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
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
        logits,
        wanted.eval()(input_ids=ids).logits,
        rtol=0,
        atol=1e-5 if dtype == torch.float32 else 1e-2,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shard", ["1GB", "50KB"])
def test_the_weights_are_those_that_transformers_converts(
    dtype: torch.dtype, shard: str, tmp_path: Path
) -> None:
    source = save(tmp_path / "source", dtype, max_shard_size=shard)
    model = mapped(source)
    check_like_transformers(model, source)
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
    model = mapped(source, "float16")
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
    model = mapped(source)
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
    model = mapped(source, dtype)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (factor == 1)
    check_like_transformers(model, source, getattr(torch, dtype))


def test_experts_that_transformers_merges_are_put_together_when_they_are_needed(
    tmp_path: Path,
) -> None:
    mixture("qwen3_moe").to(torch.bfloat16).save_pretrained(tmp_path / "source")
    stored = load_file(tmp_path / "source" / "model.safetensors")
    assert any("experts.0." in name for name in stored)  # each expert on its own
    model = mapped(tmp_path / "source")
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
    checkpoint = Checkpoint(
        "someone/model", hub=HubOptions(cache_dir=tmp_path / "cache", local_files_only=True)
    )
    model = checkpoint.load(scratch=tmp_path / "scratch")
    check_like_transformers(model, snapshot)
    found = deferred(model.model.embed_tokens.weight)
    assert found is not None
    assert (
        found.place.path.parent == folder / "blobs"
    )  # ONNX Runtime opens no link that leads out of its folder


def save_shards(folder: Path, seed: int = 0) -> Path:
    random_model("llama", seed=seed, num_hidden_layers=1).to(torch.bfloat16).save_pretrained(
        folder, max_shard_size="60KB"
    )
    return folder


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return save_shards(tmp_path / "checkpoint")


def last(folder: Path) -> Path:
    return max(folder.glob("*.safetensors"))


def cut(folder: Path) -> None:
    os.truncate(last(folder), last(folder).stat().st_size - 100)


def forget(folder: Path) -> None:
    """A weight that neither the index nor its file has."""
    name = "model.norm.weight"
    index = json.loads((folder / INDEX).read_text())
    file = folder / index["weight_map"].pop(name)
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            cut,
            r"cannot load the weights of .*-of-0000\d\.safetensors is cut off, or no safetensors file.*again",
        ),
        (
            lambda folder: last(folder).unlink(),
            r"-of-0000\d\.safetensors is missing; download the checkpoint again",
        ),
        (
            lambda folder: last(folder).write_bytes(b"<html>"),
            r"-of-0000\d\.safetensors is cut off, or no safetensors",
        ),
        (
            lambda folder: (folder / INDEX).write_text('{"weight_map": {}}'),
            "is not an index of weights.*lists no tensor",
        ),
        (forget, r"holds no model\.norm\.weight, which LlamaForCausalLM needs"),
    ],
)
def test_a_damaged_shard_is_named(
    damage: Callable[[Path], None], message: str, shards: Path, tmp_path: Path
) -> None:
    damage(shards)
    model = AutoModelForCausalLM.from_pretrained(shards, tokenizer=None)
    for write in (model.export, model.compile):
        with pytest.raises(QsampleError, match=message):
            write(tmp_path / "package")
        assert sorted(os.listdir(tmp_path)) == ["checkpoint"]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("verb", "stage"),
    [
        ("export", "comparing with the original"),
        pytest.param("export", "writing the weights", marks=pytest.mark.slow),
        pytest.param("compile", "self-test", marks=pytest.mark.slow),
    ],
)
def test_a_shard_that_is_replaced_meanwhile(
    verb: str, stage: str, shards: Path, tmp_path: Path
) -> None:
    """A package of some old weights and some new ones would pass every gate that comes after."""
    other = save_shards(tmp_path / "other", seed=1)
    stages: list[str] = []

    def progress(name: str, fraction: float) -> None:
        if name == stage and name not in stages:
            os.replace(last(other), last(shards))
        stages.append(name)

    options: dict[str, Any] = {"ctx_len": 64} if verb == "compile" else {}
    model = AutoModelForCausalLM.from_pretrained(shards, tokenizer=None, include_sampler=False)
    with pytest.raises(
        QsampleError, match=r"\.safetensors was replaced or written to while it was in use"
    ):
        getattr(model, verb)(tmp_path / "package", progress=progress, **options)
    assert stage in stages
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "other"]


@pytest.mark.ci
def test_files_with_several_names(shards: Path, tmp_path: Path) -> None:
    """Hard links, as backups and caches make them: the same package."""
    (tmp_path / "backup").mkdir()
    for file in shards.iterdir():
        os.link(file, tmp_path / "backup" / file.name)
    model = AutoModelForCausalLM.from_pretrained(shards, tokenizer=None, include_sampler=False)
    portable = model.export(tmp_path / "portable")
    for file in sorted((tmp_path / "portable").iterdir()):
        os.link(file, tmp_path / "backup" / f"portable-{file.name}")
    prompt, options = [[5, 6, 7, 8]], {"max_new_tokens": 6, "do_sample": False}
    wanted = portable.generate(prompt, **options).token_ids
    compiled = portable.compile(ctx_len=64, weights="float16")
    assert compiled.generate(prompt, **options).token_ids == wanted


def test_all_that_is_mapped_is_watched(shards: Path, tmp_path: Path) -> None:
    from qsample.package.disk.source_files import SourceFiles

    sources = SourceFiles()
    Checkpoint(str(shards)).load(scratch=tmp_path, sources=sources)
    for file in sorted(shards.glob("*.safetensors")):
        sources.check()
        before = file.stat()
        os.utime(file, ns=(1, 1))
        with pytest.raises(QsampleError, match=file.name):
            sources.check()
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            '{"weight_map": {"a": "../model.safetensors"}}',
            "'../model.safetensors', which lies outside",
        ),
        ('{"weight_map": {"a": 5}}', "is not an index of weights"),
        ("[" * 100_000, "nested more than"),
    ],
)
def test_an_index_of_a_stranger(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(QsampleError, match=why):
        weight_files(tmp_path)
