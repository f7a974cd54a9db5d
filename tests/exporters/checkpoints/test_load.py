"""Loading checkpoints: what is missing, unknown or does not fit is refused with advice."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from qsample import AutoModelForCausalLM
from qsample.errors import QsampleError, UnsupportedModelError
from tests.helpers.tiny_models import random_model, save_checkpoint


def test_unknown_model_type(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(UnsupportedModelError, match="no_such_model"):
        AutoModelForCausalLM.from_pretrained(tmp_path, tokenizer=None).export(tmp_path / "package")


def test_model_that_is_no_causal_lm(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(UnsupportedModelError, match=r"(?i)vit"):
        AutoModelForCausalLM.from_pretrained(tmp_path, tokenizer=None).export(tmp_path / "package")


def test_missing_tokenizer(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path / "checkpoint")
    with pytest.raises(QsampleError, match=r"no tokenizer in .*tokenizer=None"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").export(tmp_path / "package")
    assert os.listdir(tmp_path) == ["checkpoint"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", tokenizer=None).export(tmp_path / "package")
    assert len(model.generate([[5, 6]], do_sample=False, max_new_tokens=3).token_ids[0]) == 3


def test_weights_that_do_not_fit_the_configuration(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "checkpoint", "llama")
    config = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps(config | {"vocab_size": 400}))
    with pytest.raises(QsampleError, match="cannot load the weights"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").export(tmp_path / "package")


def test_a_path_that_is_neither_checkpoint_nor_package(tmp_path: Path) -> None:
    with pytest.raises(QsampleError, match=r"neither a config.json .* nor a qsample.json"):
        AutoModelForCausalLM.from_pretrained(tmp_path).export(tmp_path / "package")
    with pytest.raises(QsampleError, match="does not exist"):
        AutoModelForCausalLM.from_pretrained("./no/such/folder").export(tmp_path / "package")
