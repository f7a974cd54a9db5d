"""scripts/real_model.py: the checkpoint that it writes of a GGUF file, here of a small one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from qsample.addons.formats.gguf.checkpoint import GgufCheckpoint
from qsample.addons.formats.gguf.models import configuration, read_model, weights_of

pytest.importorskip("gguf")
from scripts.real_model import kept, write_checkpoint
from tests.helpers.gguf_files import QUANTIZED


def test_transformers_reads_the_model_of_the_file(tmp_path: Path) -> None:
    file = read_model(QUANTIZED)
    weights = weights_of(file, configuration(file)).values()
    assert {weight.order is None for weight in weights} == {True, False}
    write_checkpoint(QUANTIZED, tmp_path / "checkpoint", kept)
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").eval()
    read = GgufCheckpoint(file, str(QUANTIZED)).load()
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        found, wanted = (model(ids).logits.numpy() for model in (written, read))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
