"""Weights of half precision reach the exporter as float32 in mapped files: the same numbers, and no copy in memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from qsample.exporters.checkpoints import float32_copy
from qsample.exporters.checkpoints.hub_options import HubOptions
from qsample.exporters.checkpoints.load import Checkpoint, load_model
from tests.helpers.tiny_models import random_model


def save(path: Path, dtype: torch.dtype, **options: object) -> Path:
    random_model("llama", tie_word_embeddings=True).to(dtype).save_pretrained(path, **options)  # type: ignore[arg-type]
    return path


def mapped_files(model: torch.nn.Module) -> set[str]:
    """The files that the model's weights lie in; an empty name for memory of no file."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *_, name = [*line.split(maxsplit=5), ""][:7] if len(line.split()) < 6 else line.split(maxsplit=5)
        start, stop = (int(end, 16) for end in addresses.split("-"))
        ranges.append((start, stop, name))
    starts = [parameter.data_ptr() for parameter in model.parameters()]
    return {next(name for start, stop, name in ranges if start <= address < stop) for address in starts}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shard", ["1GB", "50KB"])
def test_the_weights_are_those_that_transformers_converts(
    dtype: torch.dtype, shard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float32_copy, "_FILE_BYTES", 60_000)  # several files
    source, scratch = save(tmp_path / "source", dtype, max_shard_size=shard), tmp_path / "scratch"
    scratch.mkdir()
    loaded = load_model(Checkpoint(str(source)), scratch).state_dict()
    wanted = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).state_dict()
    assert loaded.keys() == wanted.keys()
    assert all(torch.equal(loaded[name], wanted[name]) for name in wanted)
    assert {tensor.dtype for tensor in loaded.values()} == {torch.float32}
    assert len(list(scratch.glob("*.safetensors"))) > 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_weights_stay_in_their_files(tmp_path: Path) -> None:
    source, scratch = save(tmp_path / "source", torch.bfloat16), tmp_path / "scratch"
    scratch.mkdir()
    files = mapped_files(load_model(Checkpoint(str(source)), scratch))
    assert files == {str(file) for file in scratch.glob("*.safetensors")}


def test_what_needs_no_conversion_is_read_where_it_is(tmp_path: Path) -> None:
    source, scratch = save(tmp_path / "source", torch.float32), tmp_path / "scratch"
    scratch.mkdir()
    load_model(Checkpoint(str(source)), scratch)
    half = save(tmp_path / "half", torch.bfloat16)
    load_model(Checkpoint(str(half), dtype="float16"), scratch)
    assert list(scratch.iterdir()) == []


def test_a_checkpoint_of_the_hub_is_converted_from_the_cache(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = tmp_path / "cache" / "models--someone--model"
    save(folder / "snapshots" / commit, torch.bfloat16, max_shard_size="50KB")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    checkpoint = Checkpoint("someone/model", hub=HubOptions(cache_dir=tmp_path / "cache", local_files_only=True))
    model = load_model(checkpoint, scratch)
    assert list(scratch.glob("*.safetensors"))
    wanted = AutoModelForCausalLM.from_pretrained(folder / "snapshots" / commit, dtype=torch.float32).state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
