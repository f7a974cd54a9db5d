"""LoRA adapters: what is merged, and which are refused before the model changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qsample import AutoModelForCausalLM
from qsample.errors import QsampleError, UnsupportedModelError
from qsample.exporters.checkpoints.hub_options import HubOptions
from qsample.exporters.checkpoints.load import Checkpoint, load_model
from qsample.exporters.checkpoints.lora import find_adapter, merge_adapter
from tests.helpers.adapters import lora_pair, save_adapter
from tests.helpers.tiny_models import random_model, save_checkpoint


def wanted(tensors: dict[str, Tensor], scale: float) -> np.ndarray:
    a, b = (tensor.numpy().astype(np.float64) for tensor in tensors.values())
    return scale * b @ a


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 12 / 4),
        ({"use_rslora": True}, 12 / 2),
        ({"alpha_pattern": {"q_proj": 2}}, 2 / 4),
        ({"alpha_pattern": {"v_proj": 2}}, 12 / 4),
    ],
)
def test_a_linear_layer_gets_the_scaled_product(config: dict[str, Any], scale: float, tmp_path: Path) -> None:
    model = random_model("llama")
    projection = model.model.layers[1].self_attn.q_proj
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = lora_pair("model.layers.1.self_attn.q_proj", 64, 64)
    assert merge_adapter(model, *save_adapter(tmp_path / "adapter", tensors, **config)) == 1
    name = "model.layers.1.self_attn.q_proj.weight"
    change = projection.weight.detach().numpy() - before.pop(name).numpy()
    np.testing.assert_allclose(change, wanted(tensors, scale), atol=1e-5)
    for other, tensor in before.items():
        assert torch.equal(model.state_dict()[other], tensor), other


def test_weights_that_are_stored_transposed(tmp_path: Path) -> None:
    """GPT-2's Conv1D holds [in, out]."""
    model = random_model("gpt2")
    before = model.transformer.h[0].attn.c_attn.weight.detach().numpy().copy()
    tensors = lora_pair("transformer.h.0.attn.c_attn", 192, 64)
    merge_adapter(model, *save_adapter(tmp_path / "adapter", tensors, fan_in_fan_out=True))
    after = model.transformer.h[0].attn.c_attn.weight.detach().numpy()
    np.testing.assert_allclose(after - before, wanted(tensors, 3).T, atol=1e-5)


def test_a_checkpoint_is_loaded_with_its_adapter(tmp_path: Path) -> None:
    checkpoint = str(save_checkpoint(tmp_path / "checkpoint", "llama"))
    save_adapter(tmp_path / "adapter", lora_pair("model.layers.0.mlp.up_proj", 96, 64))
    plain = load_model(Checkpoint(checkpoint)).state_dict()
    adapted = load_model(Checkpoint(checkpoint, adapter=str(tmp_path / "adapter"))).state_dict()
    changed = [name for name in plain if not torch.equal(plain[name], adapted[name])]
    assert changed == ["model.layers.0.mlp.up_proj.weight"]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"peft_type": "IA3"}, "of type IA3"),
        ({"use_dora": True}, "with use_dora"),
        ({"bias": "all"}, "with bias"),
        ({"modules_to_save": ["lm_head"]}, "with modules_to_save"),
    ],
)
def test_adapters_that_are_more_than_lora(config: dict[str, Any], named: str, tmp_path: Path) -> None:
    files = save_adapter(tmp_path / "adapter", lora_pair("model.layers.0.mlp.up_proj", 96, 64), **config)
    with pytest.raises(UnsupportedModelError, match=rf"{named}.*export the merged checkpoint"):
        merge_adapter(random_model("llama"), *files)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (lora_pair("model.layers.7.mlp.up_proj", 96, 64), r"changes model\.layers\.7\.mlp\.up_proj, which Llama"),
        (lora_pair("model.layers.0.mlp.up_proj", 96, 32), r"shape \[96, 32\] .* has \[96, 64\]"),
    ],
)
def test_an_adapter_of_another_model_changes_nothing(tensors: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    model = random_model("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    files = save_adapter(tmp_path / "adapter", lora_pair("model.layers.0.mlp.down_proj", 64, 96) | tensors)
    with pytest.raises(QsampleError, match=message):
        merge_adapter(model, *files)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())


def test_a_folder_without_an_adapter(tmp_path: Path) -> None:
    with pytest.raises(QsampleError, match=r"no LoRA adapter in .*adapter_config\.json"):
        find_adapter(str(tmp_path), HubOptions())


def test_a_package_takes_no_adapter(llama_package: Path) -> None:
    with pytest.raises(QsampleError, match="merged at export"):
        AutoModelForCausalLM.from_pretrained(llama_package, adapter="somewhere")
