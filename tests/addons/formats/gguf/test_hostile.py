"""GGUF files whose header or metadata were changed: each is a clear error that names the file, or
another model."""

from __future__ import annotations

import random
import struct
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qsample.addons.formats.gguf.checkpoint import GgufCheckpoint
from qsample.addons.formats.gguf.file import GgufFile
from qsample.addons.formats.gguf.models import read_model
from qsample.errors import QsampleError
from tests.helpers.memory import resident

gguf = pytest.importorskip("gguf")
from tests.helpers.gguf_files import settled_model, write_gguf  # noqa: E402

NUMBERS = [
    0,
    -1,
    1,
    7,
    2**31 - 1,
    2**31,
    2**40,
    2**63,
    0.0,
    -1.5,
    1e-30,
    1e30,
    float("nan"),
    float("inf"),
]
OTHERS = [
    None,
    "",
    "x",
    "none",
    "yarn",
    "longrope",
    "x" * 100_000,
    True,
    False,
    [],
    [1, 2],
    ["a"],
    [0] * 100_000,
]
NAMES = (
    "llama, of Llama 3",
    "mistral3",
    "gemma3",
    "phi3, longrope",
    "granite",
    "qwen3moe",
    "gpt-oss",
)


@pytest.fixture(scope="module", params=NAMES)
def whole(request: Any, tmp_path_factory: Any) -> GgufFile:
    path = tmp_path_factory.mktemp("hostile") / "model.gguf"
    return read_model(write_gguf(path, settled_model(request.param)))


def refusal(read: Callable[[], Any]) -> QsampleError | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read()
    except QsampleError as error:
        return error
    return None


def is_read(file: GgufFile, *, weights: bool = False) -> bool:
    """Whether a model is made of the file; otherwise a message that names it says why not."""

    def read() -> None:
        checkpoint = GgufCheckpoint(file, str(file.path))
        _ = (
            checkpoint.config,
            checkpoint.generation_config,
            checkpoint.tokenizer,
            checkpoint.outline,
        )
        if weights:
            checkpoint.load()

    error = refusal(read)
    assert error is None or (file.path.name in str(error) and len(str(error)) < 700)
    return error is None


def changed(metadata: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for key in metadata:
        for value in NUMBERS + OTHERS:
            rest = {name: old for name, old in metadata.items() if name != key}
            yield rest if value is None else rest | {key: value}


def test_changed_metadata(whole: GgufFile) -> None:
    cases = list(changed(whole.metadata))
    made = [
        is_read(GgufFile(whole.path, metadata, whole.tensors))
        for metadata in random.Random(1).sample(cases, 4)
    ]
    assert not all(made)


@pytest.mark.slow
def test_each_changed_value_with_the_weights(whole: GgufFile) -> None:
    assert is_read(whole, weights=True)
    for metadata in changed(whole.metadata):
        is_read(GgufFile(whole.path, metadata, whole.tensors), weights=True)


@pytest.mark.slow
def test_changed_bytes(whole: GgufFile, tmp_path: Path) -> None:
    content = whole.path.read_bytes()
    header = min(tensor.offset for tensor in whole.tensors.values())
    draw = random.Random(2)
    path = tmp_path / "model.gguf"
    before = resident()
    for _ in range(100):
        place = draw.randrange(4, header)
        number = draw.choice([0, 1, 255, 2**20, 2**31, 2**32, 2**62, 2**63, 2**64 - 1])
        new = draw.choice(
            [
                bytes([draw.randrange(256)]),
                struct.pack("<Q", number),
                struct.pack("<I", number % 2**32),
            ]
        )
        end = draw.choice([len(content), len(content), place])
        path.write_bytes((content[:place] + new + content[place + len(new) :])[:end])
        error = refusal(lambda: read_model(path))
        assert error is None or path.name in str(error)
        if error is None:
            is_read(read_model(path))
    assert resident() - before < 500e6
