"""Models of GGUF files against what llama.cpp itself computes of the same files (`scripts/gguf_fixtures.py`)."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from qsample.checkpoints.gguf.checkpoint import GgufCheckpoint
from qsample.checkpoints.gguf.models import read_model

gguf = pytest.importorskip("gguf")
from tests.helpers.gguf_files import MODELS, PROMPT, RECORDED, RECORDED_AT, settled_model, write_gguf  # noqa: E402

ALWAYS = ("llama, of Llama 3", "gemma3")


@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.ci) for name in MODELS]
)
def test_logits_and_greedy_tokens_of_float_files(name: str, tmp_path: Path) -> None:
    recorded = json.loads(RECORDED.read_text())["models"][name]
    path = write_gguf(tmp_path / "model.gguf", settled_model(name))
    checkpoint = GgufCheckpoint(read_model(path), str(path))
    if name == "gpt-oss":  # llama.cpp rounds the limits of its YaRN
        checkpoint.config.rope_parameters["truncate"] = True
    model = checkpoint.load()
    ids = list(PROMPT)
    with torch.no_grad():
        logits = np.asarray(model(torch.tensor([ids])).logits[0, list(RECORDED_AT)])
        for _ in recorded["tokens"]:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    wanted = np.frombuffer(base64.b64decode(recorded["logits"]), "<f4").reshape(logits.shape)
    tolerance = 1e-3 if name == "gemma3" else 1e-5  # llama.cpp's GELU is a table of float16
    assert np.abs(logits - wanted).max() <= tolerance * np.abs(wanted).max()
    assert ids[len(PROMPT) :] == recorded["tokens"]
