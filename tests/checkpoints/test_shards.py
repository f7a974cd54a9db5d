"""Checkpoints of several files, from the first look at them to the published package."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qsample import AutoModelForCausalLM
from qsample.checkpoints.load import Checkpoint, load_model
from qsample.checkpoints.mapped_weights import INDEX
from qsample.errors import QsampleError
from tests.helpers.tiny_models import random_model

pytestmark = pytest.mark.usefixtures("nothing_is_small")


def save(folder: Path, seed: int = 0) -> Path:
    random_model("llama", seed=seed).to(torch.bfloat16).save_pretrained(folder, max_shard_size="60KB")
    return folder


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return save(tmp_path / "checkpoint")


def last(folder: Path) -> Path:
    return max(folder.glob("*.safetensors"))


def cut(folder: Path) -> None:
    os.truncate(last(folder), last(folder).stat().st_size - 100)


def forget(folder: Path) -> None:
    """A weight that neither the index nor its file has."""
    from safetensors.torch import load_file, save_file

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
        (cut, r"cannot load the weights of .*-of-0000\d\.safetensors is cut off, or no safetensors file.*again"),
        (lambda folder: last(folder).unlink(), r"-of-0000\d\.safetensors is missing; download the checkpoint again"),
        (lambda folder: last(folder).write_bytes(b"<html>"), r"-of-0000\d\.safetensors is cut off, or no safetensors"),
        (lambda folder: (folder / INDEX).write_text('{"weight_map": {}}'), "is no index of weights.*lists no tensor"),
        (forget, r"holds no model\.norm\.weight, which LlamaForCausalLM needs"),
    ],
)
def test_a_damaged_shard_is_named(damage: Callable[[Path], None], message: str, shards: Path, tmp_path: Path) -> None:
    damage(shards)
    model = AutoModelForCausalLM.from_pretrained(shards, tokenizer=None)
    for write in (model.export, model.compile):
        with pytest.raises(QsampleError, match=message):
            write(tmp_path / "package")
        assert sorted(os.listdir(tmp_path)) == ["checkpoint"]


@pytest.mark.parametrize(
    ("verb", "stage"),
    [("export", "writing the weights"), ("export", "comparing with the Hugging Face model"), ("compile", "self-test")],
)
def test_a_shard_that_is_replaced_meanwhile(verb: str, stage: str, shards: Path, tmp_path: Path) -> None:
    """A package of some old weights and some new ones would pass every gate that comes after."""
    other = save(tmp_path / "other", seed=1)
    stages: list[str] = []

    def progress(name: str, fraction: float) -> None:
        if name == stage and name not in stages:
            os.replace(last(other), last(shards))
        stages.append(name)

    options: dict[str, Any] = {"ctx_len": 64} if verb == "compile" else {}
    model = AutoModelForCausalLM.from_pretrained(shards, tokenizer=None, include_sampler=False)
    with pytest.raises(QsampleError, match=r"\.safetensors was replaced or written to while it was in use"):
        getattr(model, verb)(tmp_path / "package", progress=progress, **options)
    assert stage in stages
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "other"]


def test_files_with_several_names(shards: Path, tmp_path: Path) -> None:
    """Hard links, as backups and caches make them: the same package."""
    (tmp_path / "backup").mkdir()
    for file in shards.iterdir():
        os.link(file, tmp_path / "backup" / file.name)
    model = AutoModelForCausalLM.from_pretrained(shards, tokenizer=None)
    portable = model.export(tmp_path / "portable")
    for file in sorted((tmp_path / "portable").iterdir()):
        os.link(file, tmp_path / "backup" / f"portable-{file.name}")
    prompt, options = [[5, 6, 7, 8]], {"max_new_tokens": 6, "do_sample": False}
    wanted = portable.generate(prompt, **options).token_ids
    for source in (model, portable):
        compiled = source.compile(ctx_len=64, weights="float16")
        assert compiled.generate(prompt, **options).token_ids == wanted


def test_all_that_is_mapped_is_watched(shards: Path, tmp_path: Path) -> None:
    from qsample.disk.source_files import SourceFiles

    sources = SourceFiles()
    load_model(Checkpoint(str(shards)), tmp_path, sources)
    for file in sorted(shards.glob("*.safetensors")):
        sources.check()
        before = file.stat()
        os.utime(file, ns=(1, 1))
        with pytest.raises(QsampleError, match=file.name):
            sources.check()
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
