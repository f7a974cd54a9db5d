"""Packed checkpoints of strangers, in a process with little memory: whatever is wrong with them, an error of qsample's
comes out soon, and names what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from qsample.checkpoints.checkpoint import Checkpoint
from qsample.checkpoints.source import check_checkpoint
from qsample.errors import QsampleError, UnsupportedModelError
from tests.helpers.command_line import ROOT
from tests.helpers.hostile_checkpoints import header_of
from tests.helpers.packed import change_config, unpack

# A case takes 0.1 s; other programs may slow it down.
SECONDS = 10
NAMES = ("CHECKPOINT", "model.", "ForCausalLM")


@pytest.mark.ci
def test_damaged_checkpoints_end_with_an_error_that_names_them() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.helpers.hostile_checkpoints", "--count", "60"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    results = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(results) == 60
    assert [result for result in results if not result["own"]] == []
    assert [result for result in results if result["seconds"] > SECONDS] == []
    errors = [result["error"] for result in results if result["error"]]
    assert len(errors) > 30
    assert [error for error in errors if not any(name in error for name in NAMES)] == []
    assert [error for error in errors if "alloc" in error.lower() or len(error) > 2000] == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "scratch").mkdir()
    return unpack("compressed_tensors", tmp_path / "checkpoint")


def load(folder: Path) -> object:
    checkpoint = Checkpoint(str(folder), tokenizer=None)
    return checkpoint.load(scratch=folder.with_name("scratch"))


@pytest.mark.parametrize("layers", [1025, 10**5, 10**9, 10**30])
def test_layers_that_would_take_hours(layers: int, folder: Path) -> None:
    change_config(folder, num_hidden_layers=layers)
    for read in (check_checkpoint, load):
        with pytest.raises(UnsupportedModelError, match=r"num_hidden_layers is 10.* 1024 is the"):
            read(folder)


def test_layers_of_an_inner_configuration(folder: Path) -> None:
    change_config(folder, vision_config={"depth": 10**6})
    with pytest.raises(UnsupportedModelError, match="depth is 1000000"):
        check_checkpoint(folder)


@pytest.mark.parametrize("quantized", [True, False])
def test_a_model_that_is_larger_than_its_files_is_refused_before_it_is_made(
    quantized: bool, folder: Path
) -> None:
    """It would have 10**9 rows of 64 numbers, 256 GB."""
    if not quantized:
        tensors = load_file(folder / "model.safetensors")
        floats = {name: tensor.float() for name, tensor in tensors.items() if "norm" in name}
        save_file(floats, folder / "model.safetensors", metadata={"format": "pt"})
        change_config(folder, quantization=None, quantization_config=None)
    change_config(folder, vocab_size=10**9)
    with pytest.raises(QsampleError, match=r"LlamaForCausalLM has \d{11,} numbers by its config"):
        load(folder)


@pytest.mark.parametrize("quantized", [True, False])
def test_a_tensor_in_two_files(quantized: bool, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    if not quantized:
        change_config(folder, quantization=None, quantization_config=None)
        tensors = {name: tensor for name, tensor in tensors.items() if "norm" in name}
    (folder / "model.safetensors").unlink()
    twice = "model.norm.weight"
    save_file(tensors, folder / "a.safetensors")
    save_file({twice: tensors[twice] * 0}, folder / "b.safetensors")
    weight_map = dict.fromkeys(tensors, "a.safetensors") | {"more": "b.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(QsampleError, match=r"b\.safetensors holds model\.norm\.weight, which anot"):
        load(folder)


def test_a_header_that_readers_understand_in_two_ways(folder: Path) -> None:
    file = folder / "model.safetensors"
    header, numbers = header_of(file)
    entry = json.dumps({"model.norm.weight": header["model.norm.weight"]})
    text = f"{json.dumps(header)[:-1]}, {entry[1:]}".encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + numbers)
    with pytest.raises(QsampleError, match=r"model\.safetensors cannot be read: .* comes twice"):
        load(folder)
