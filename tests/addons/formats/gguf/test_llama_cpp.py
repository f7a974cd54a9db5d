"""Models of GGUF files against what llama.cpp itself computes of the same files
(`scripts/gguf_fixtures.py`)."""

from __future__ import annotations

import base64
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from qsample.addons.formats.gguf.checkpoint import GgufCheckpoint
from qsample.addons.formats.gguf.models import configuration, read_model, weights_of

gguf = pytest.importorskip("gguf")
from tests.helpers.gguf_files import (  # noqa: E402
    MODELS,
    PROMPT,
    QUANTIZED,
    RECORDED,
    RECORDED_AT,
    settled_model,
    write_gguf,
)

ALWAYS = ("llama, of Llama 3", "gemma3")


@pytest.mark.parametrize(
    "name",
    [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.ci) for name in MODELS],
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
    # llama.cpp's GELU is a table of float16, which the models of gemma4 were recorded without.
    tolerance = 1e-3 if name == "gemma3" else 1e-5
    assert np.abs(logits - wanted).max() <= tolerance * np.abs(wanted).max()
    assert ids[len(PROMPT) :] == recorded["tokens"]


def test_a_file_that_llama_cpp_quantized() -> None:
    """llama.cpp rounds activations to 8 bits, so its logits are only near those of the file's
    weights."""
    file = read_model(QUANTIZED)
    assert Counter(tensor.type for tensor in file.tensors.values()) == {
        "F32": 3, "Q4_K": 4, "Q6_K": 2, "Q5_0": 1, "Q8_0": 1
    }  # fmt: skip
    checkpoint = GgufCheckpoint(file, str(QUANTIZED))
    model = checkpoint.load()
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(QUANTIZED).tensors}
    for name, weight in weights_of(file, configuration(file)).items():
        (tensor,) = weight.tensors
        of_gguf = gguf.quants.dequantize(stored[tensor.name].data, stored[tensor.name].tensor_type)
        wanted = of_gguf.reshape(tensor.shape)[
            slice(None) if weight.order is None else weight.order.places
        ]
        assert np.array_equal(model.get_parameter(name).detach().numpy(), wanted), name
    recorded = json.loads(RECORDED.read_text())["models"][QUANTIZED.name]
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0, list(RECORDED_AT)].log_softmax(-1)
    theirs = np.frombuffer(base64.b64decode(recorded["logits"]), "<f4").reshape(logits.shape)
    divergence = (logits.exp() * (logits - torch.tensor(theirs).log_softmax(-1))).sum(-1)
    assert 0 < divergence.max() < 0.02
    assert checkpoint.tokenizer is not None
