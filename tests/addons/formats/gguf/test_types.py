"""ggml's block types: random bytes mean what the gguf package says, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from qsample.addons.formats.gguf.file import TENSOR_TYPES, GgufFile, GgufTensor
from qsample.addons.formats.gguf.types import FLOATS, read_rows, unpack
from qsample.errors import QsampleError

gguf = pytest.importorskip("gguf")
PACKED = [kind for kind in TENSOR_TYPES.values() if kind.name not in FLOATS]
# Where a block has float16 numbers, and the numbers that may be special.
HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ2_0": (64,),
}
SPECIAL = np.array([0.0, -0.0, 6e-8, -6e-8, 65504, -65504, 1e-5], np.float16)


def random_rows(kind: str, rows: int, blocks: int) -> np.ndarray:
    """[rows, bytes] uint8: each bit is random, and every scale a finite number."""
    random = np.random.default_rng(len(kind))
    length = next(one.length for one in PACKED if one.name == kind)
    raw = random.integers(0, 256, (rows * blocks, length), np.uint8)
    for at in HALVES.get(kind, ()):
        scales = random.standard_normal(len(raw)).astype(np.float16)
        scales[: len(SPECIAL)] = SPECIAL[: len(scales)]
        raw[:, at : at + 2] = random.permutation(scales).view(np.uint8).reshape(-1, 2)
    if kind == "MXFP4":
        raw[:, 0] = random.permutation(np.arange(len(raw)) % 200)  # subnormal scales too
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", [kind.name for kind in PACKED])
def test_weights_are_those_of_the_gguf_package(kind: str) -> None:
    raw = random_rows(kind, 24, 3)
    weight = unpack(kind, raw)
    wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]).astype(np.float32)
    assert weight.floats().tobytes() == wanted.tobytes()
    assert weight.levels.max() < 1 << weight.bits
    blocks = weight.blocks(torch.float32)
    assert blocks is not None
    assert blocks.sizes == wanted.shape


@pytest.mark.parametrize(
    ("kind", "scale"),
    [("Q4_0", b"\x00\x7c"), ("Q6_K", b"\x01\x7e"), ("MXFP4", b"\xff"), ("MXFP4", b"\xfe")],
)
def test_scales_that_are_no_numbers_are_refused_by_name(
    kind: str, scale: bytes, tmp_path: Path
) -> None:
    raw = random_rows(kind, 4, 1)
    at = HALVES.get(kind, (0,))[0]
    raw[2, at : at + len(scale)] = np.frombuffer(scale, np.uint8)
    path = tmp_path / "model.gguf"
    path.write_bytes(raw.tobytes())
    tensor = GgufTensor(
        "blk.0.ffn_up.weight", kind, (4, 256 if kind == "Q6_K" else 32), 0, raw.nbytes
    )
    file = GgufFile(path, {}, {})
    assert read_rows(file, tensor, slice(0, 2)).levels.shape[0] == 2
    with pytest.raises(
        QsampleError,
        match=r"model\.gguf: the tensor 'blk.0.ffn_up.weight' has blocks whose scale is",
    ):
        read_rows(file, tensor, slice(2, 4))
