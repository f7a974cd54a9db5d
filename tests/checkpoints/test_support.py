"""What is refused by the configuration alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from qsample import AutoModelForCausalLM
from qsample.checkpoints.support import check_supported, empty_model
from qsample.errors import UnsupportedModelError
from tests.helpers.tiny_models import random_model


@pytest.mark.parametrize("model_type", ["openai-gpt", "rwkv"])
def test_what_the_configuration_tells_is_refused_before_the_weights_are_read(model_type: str, tmp_path: Path) -> None:
    random_model(model_type).config.save_pretrained(tmp_path / "checkpoint")  # there are no weights to read
    checkpoint = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", tokenizer=None)
    with pytest.raises(UnsupportedModelError, match=r"puts nothing into the cache.*docs/architectures\.md"):
        checkpoint.export(tmp_path / "package")


def test_what_can_be_exported_passes_and_the_configuration_stays_as_it_is() -> None:
    config = random_model("llama").config
    before = config.to_dict()
    check_supported(config)
    assert config.to_dict() == before


def test_an_empty_model_has_no_memory() -> None:
    model = empty_model(random_model("llama").config)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert not model.training
