"""Compiles a portable package in four bits, and counts the packed and the float weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.compiler.quantize.weights import looks_up_positions, matrix_of
from qsample.graph import moe
from qsample.graph.edit import with_loop_bodies
from qsample.package.package import Package
from qsample.runtime import SamplingParams, load
from tests.architectures.configs import VOCAB_SIZE

BLOCK = 16  # divides every size of a tiny model if a real model's blocks divide the real size
PROMPT_LENGTHS = (3, 11, 9)
NEW_TOKENS = 6


@dataclass(frozen=True, slots=True)
class Packed:
    """Counts of packed matrices and experts, needlessly unpacked names, and bytes of float and of all parameters."""

    matrices: int
    experts: int
    unpacked: int
    float_bytes: int
    bytes: int

    def __str__(self) -> str:
        experts = f", {self.experts} experts" if self.experts else ""
        return f"{self.matrices} matrices{experts}; {self.float_bytes / 1024:.0f} of {self.bytes / 1024:.0f} KiB float"


def compile_packed(package: Package, path: Path) -> Packed:
    """Compile `package` to `path`. AssertionError if a row of a ragged batch gets other tokens than alone."""
    options = CompileOptions(ctx_len=64, weights="int4", block_size=BLOCK, max_divergence=math.inf)
    compiled = compile_package(package, path, options)
    check_rows(path)
    assert compiled.manifest.compilation is not None
    figures = compiled.manifest.compilation.quantization
    assert figures is not None
    graph = ir.load(path / "decoder.onnx").graph
    total = sum(
        value.const_value.nbytes
        for value in graph.initializers.values()
        if value.const_value is not None
    )
    return Packed(
        figures["matrices"], figures["experts"], unpacked(graph), figures["float_bytes"], total
    )


def unpacked(graph: ir.Graph) -> int:
    """Float matrices of a decoder and its experts that `BLOCK` divides, without routers and position tables."""
    kept, found = moe.routers(graph), set()
    for node in with_loop_bodies(graph):
        matrix = matrix_of(node)
        stays = node in kept or looks_up_positions(node)
        if matrix is not None and matrix.input_size % BLOCK == 0 and not stays:
            found.add(matrix.value)
        weights = moe.gather_of_weights(node)
        if weights is not None:
            found.add(weights)
    found |= {
        node.inputs[slot] for node in moe.mixtures(graph) for slot in (moe.Slot.FC1, moe.Slot.FC2)
    }
    return len(
        {
            value.name
            for value in found
            if value is not None and not str(value.name).startswith("sampler.")
        }
    )


def check_rows(path: Path) -> None:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, VOCAB_SIZE, n).tolist() for n in PROMPT_LENGTHS]
    model = load(path)
    # Explicit parameters: a model's generation_config may request unsupported features.
    params = SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS, eos_token_id=())
    together = model.generate(prompts, params).token_ids
    for prompt, row in zip(prompts, together, strict=True):
        alone = model.generate([prompt], params).token_ids[0]
        assert alone == row, f"a row gets {alone} alone and {row} in a batch"
