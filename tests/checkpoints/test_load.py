"""Loading checkpoints: what is missing, unknown or does not fit is refused with advice."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from qsample import AutoModelForCausalLM
from qsample.checkpoints.load import Checkpoint, load_model, load_tokenizer
from qsample.checkpoints.settings import read_generation_config
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
    named = r"holds lm_head\.weight of shape \[320, 64\], and LlamaForCausalLM has \[400, 64\].*1 more do not fit"
    with pytest.raises(QsampleError, match=named):
        AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").export(tmp_path / "package")


@pytest.mark.parametrize(
    "changes",
    [
        {"eos_token_id": "2"},
        {"num_attention_heads": 3},
        {"num_hidden_layers": "2"},
        {"pad_token_id": 400},
        {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}},
        {"hidden_act": "cubic"},
        {"dtype": "float99"},
    ],
)
def test_a_configuration_that_no_model_can_be_made_of(changes: dict[str, object], tmp_path: Path) -> None:
    """Each fails in transformers or torch, in its own way."""
    save_checkpoint(tmp_path / "checkpoint", "llama")
    file = tmp_path / "checkpoint" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(UnsupportedModelError, match=r"checkpoint: transformers makes no model of its config\.json \("):
        load_model(Checkpoint(str(tmp_path / "checkpoint")))


def test_a_wrong_configuration_is_no_missing_tokenizer(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "checkpoint", "llama")
    file = tmp_path / "checkpoint" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_attention_heads": 3}))
    with pytest.raises(UnsupportedModelError, match=r"transformers makes no model of its config\.json"):
        load_tokenizer(Checkpoint(str(tmp_path / "checkpoint")))


@pytest.mark.parametrize(
    "content",
    [
        *('{"eos_token_id": 2,', "", "[2]", '"eos"', "\xff"),
        *('{"pad_token_id": [0]}', '{"max_new_tokens": 0}', '{"cache_implementation": "a drawer"}'),
    ],
)
def test_a_damaged_generation_config_is_not_passed_over(content: str, tmp_path: Path) -> None:
    """Without it a model would not know its stop tokens."""
    save_checkpoint(tmp_path / "checkpoint", "llama")
    (tmp_path / "checkpoint" / "generation_config.json").write_bytes(content.encode("latin-1"))
    for read in (load_model, read_generation_config):
        with pytest.raises(QsampleError, match=r"its generation_config\.json cannot be used .*; correct it, delete it"):
            read(Checkpoint(str(tmp_path / "checkpoint")))
    (tmp_path / "checkpoint" / "generation_config.json").unlink()
    assert load_model(Checkpoint(str(tmp_path / "checkpoint"))).generation_config.eos_token_id == 2


class _RunsCode:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("code_was_run",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            pickle.dumps(_RunsCode(), protocol=2),
            r"a \.bin file is damaged, or a pickle that holds more than tensors.*safetensors",
        ),
        (b"", "cannot load the weights of"),
        (b"PK\x03\x04", "cannot load the weights of"),
    ],
)
def test_bin_files(content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path / "checkpoint", "llama")
    (tmp_path / "checkpoint" / "model.safetensors").unlink()
    (tmp_path / "checkpoint" / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(QsampleError, match=message):
        load_model(Checkpoint(str(tmp_path / "checkpoint")))
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_a_path_that_is_neither_checkpoint_nor_package(tmp_path: Path) -> None:
    with pytest.raises(QsampleError, match=r"neither a config.json .* nor a qsample.json"):
        AutoModelForCausalLM.from_pretrained(tmp_path).export(tmp_path / "package")
    with pytest.raises(QsampleError, match="does not exist"):
        AutoModelForCausalLM.from_pretrained("./no/such/folder").export(tmp_path / "package")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("dropped", "named"),
    [
        (["lm_head.weight"], r"lm_head\.weight, which LlamaForCausalLM needs"),
        (["model.layers.0.mlp.up_proj.weight"], r"model\.layers\.0\.mlp\.up_proj\.weight"),
        (
            ["model.norm.weight", "lm_head.weight", *(f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1))],
            "and 1 more",
        ),
    ],
)
def test_weights_are_never_made_up(dropped: list[str], named: str, dtype: str, tmp_path: Path) -> None:
    """transformers only warns, and puts random numbers in their place."""
    save_checkpoint(tmp_path / "checkpoint", "llama")
    tensors = load_file(tmp_path / "checkpoint" / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name not in dropped}
    save_file(kept, tmp_path / "checkpoint" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QsampleError, match=rf"checkpoint holds no .*{named}"):
        load_model(Checkpoint(str(tmp_path / "checkpoint"), dtype=dtype))


def test_a_tied_head_is_not_missing(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "checkpoint", "llama", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "checkpoint" / "model.safetensors")
    model = load_model(Checkpoint(str(tmp_path / "checkpoint")))
    assert model.lm_head.weight is model.model.embed_tokens.weight
