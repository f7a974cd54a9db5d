"""LoRA adapters: what is merged, and which are refused before the model changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qsample import AutoModelForCausalLM
from qsample.checkpoints import checkpoint as checkpoint_module
from qsample.checkpoints.checkpoint import Checkpoint
from qsample.checkpoints.merge_lora import find_adapter, merge_adapter
from qsample.checkpoints.source import HubOptions
from qsample.errors import QsampleError
from qsample.request.huggingface.lora import read_config
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
def test_a_linear_layer_gets_the_scaled_product(
    config: dict[str, Any], scale: float, tmp_path: Path
) -> None:
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


def test_a_weight_that_comes_with_the_adapter_is_the_base(tmp_path: Path) -> None:
    """peft saves the embeddings that were resized or trained as a whole."""
    model = random_model("llama")
    path = "model.layers.1.self_attn.q_proj"
    before = model.get_submodule(path).weight.detach().numpy().copy()
    tensors = lora_pair(path, 64, 64)
    product, base = wanted(tensors, 3), torch.from_numpy(before) + 1
    merge_adapter(
        model,
        *save_adapter(
            tmp_path / "adapter", {**tensors, f"base_model.model.{path}.base_layer.weight": base}
        ),
    )
    np.testing.assert_allclose(
        model.get_submodule(path).weight.detach().numpy() - before, product + 1, atol=1e-5
    )


def test_an_adapter_is_not_read_at_the_revision_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is another repository; the other options of the hub go for it, too."""
    files = save_adapter(tmp_path / "adapter", lora_pair("model.layers.0.mlp.up_proj", 96, 64))
    asked: list[tuple[str, HubOptions]] = []

    def find(name: str, hub: HubOptions) -> tuple[Path, Path]:
        asked.append((name, hub))
        return files

    def exists(name: str, hub: HubOptions, *, file: str) -> None:
        asked.append((name, hub))

    monkeypatch.setattr(checkpoint_module, "find_adapter", find)
    monkeypatch.setattr(checkpoint_module, "check_exists", exists)
    hub = HubOptions(revision="v2", token="secret", local_files_only=True, cache_dir=tmp_path)
    assert Checkpoint("some/model", hub=hub, adapter="some/adapter").adapter_files == files
    assert asked == [("some/adapter", replace(hub, revision=None))] * 2


def test_a_checkpoint_is_loaded_with_its_adapter(tmp_path: Path) -> None:
    checkpoint = str(save_checkpoint(tmp_path / "checkpoint", "llama"))
    save_adapter(tmp_path / "adapter", lora_pair("model.layers.0.mlp.up_proj", 96, 64))
    plain = Checkpoint(checkpoint).load().state_dict()
    adapted = Checkpoint(checkpoint, adapter=str(tmp_path / "adapter")).load().state_dict()
    changed = [name for name in plain if not torch.equal(plain[name], adapted[name])]
    assert changed == ["model.layers.0.mlp.up_proj.weight"]


LAYER = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (
            lora_pair(LAYER, 96, 64),
            {"use_dora": True},
            r"with use_dora.*export the merged checkpoint",
        ),
        (
            lora_pair("model.layers.7.mlp.up_proj", 96, 64),
            {},
            r"changes model\.layers\.7\.mlp\.up_proj, which Llama",
        ),
        (lora_pair(LAYER, 96, 32), {}, r"shape \[96, 32\] .* has \[96, 64\]"),
        (
            lora_pair(LAYER, 96, 64)
            | {f"base_model.model.{LAYER}.base_layer.weight": torch.ones(3, 3)},
            {},
            r"holds a weight of shape \[3, 3\]",
        ),
    ],
)
def test_what_does_not_fit_changes_nothing(
    tensors: dict[str, Tensor], config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = random_model("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fitting = lora_pair("model.layers.0.mlp.down_proj", 64, 96)
    with pytest.raises(QsampleError, match=message):
        merge_adapter(model, *save_adapter(tmp_path / "adapter", fitting | tensors, **config))
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())


# What peft itself makes of the same adapters.


def save_with_peft(folder: Path, model_type: str, options: dict[str, Any], **overrides: Any) -> Any:
    """Write an adapter as peft does, of random matrices. Returns the model with it as peft loads it, not merged."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(random_model(model_type, **overrides), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    # peft sorts what it writes, patterns too, which may make another the first that matches.
    written = json.loads((folder / "adapter_config.json").read_text())
    patterns = {
        name: options[name] for name in ("rank_pattern", "alpha_pattern") if name in options
    }
    (folder / "adapter_config.json").write_text(json.dumps(written | patterns))
    return peft.PeftModel.from_pretrained(random_model(model_type, **overrides), folder).eval()


PROMPT = torch.arange(5, 25)[None]
PATTERNS = {
    "rank_pattern": {
        r"^model\.layers\.0\..*": 2,
        "q_proj": 6,
        "layers.1.self_attn.q_proj": 3,
        ".*": 5,
    },
    "alpha_pattern": {
        "proj": 1,
        "self_attn.q_proj": 20,
        "q_proj": 2,
        r"\d+\.mlp\.(up|down)_proj": 7,
        "^mlp": 9,
    },
}
SORTED_PATTERNS = {name: dict(sorted(patterns.items())) for name, patterns in PATTERNS.items()}
PROJECTIONS = ["q_proj", "v_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("model_type", "options", "overrides"),
    [
        ("llama", {"r": 4, "lora_alpha": 12, "target_modules": PROJECTIONS, **PATTERNS}, {}),
        (
            "llama",
            {
                "r": 4,
                "lora_alpha": 12,
                "target_modules": PROJECTIONS,
                "use_rslora": True,
                **PATTERNS,
            },
            {},
        ),
        (
            "llama",
            {
                "target_modules": PROJECTIONS,
                "layers_to_transform": [1],
                "init_lora_weights": "orthogonal",
            },
            {},
        ),
        ("llama", {"target_modules": r".*\.0\.mlp\..*_proj", "exclude_modules": ["gate_proj"]}, {}),
        ("gpt2", {"target_modules": ["c_attn", "c_fc", "wte"], "fan_in_fan_out": True}, {}),
        ("llama", {"target_modules": ["embed_tokens", "q_proj"]}, {"tie_word_embeddings": True}),
        ("llama", {"target_modules": ["lm_head"]}, {"tie_word_embeddings": True}),
        ("llama", {"target_modules": ["lm_head", "embed_tokens"]}, {}),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_merged_model_computes_what_peft_does(
    model_type: str, options: dict[str, Any], overrides: dict[str, Any], tmp_path: Path
) -> None:
    with torch.no_grad():
        adapted = save_with_peft(tmp_path / "adapter", model_type, options, **overrides)
        wanted = adapted(input_ids=PROMPT).logits.numpy()
    model = random_model(model_type, **overrides)
    with torch.no_grad():
        before = model(input_ids=PROMPT).logits.numpy()
        merge_adapter(model, *find_adapter(str(tmp_path / "adapter"), HubOptions()))
        got = model(input_ids=PROMPT).logits.numpy()
    assert np.abs(before - wanted).max() > 0.01
    np.testing.assert_allclose(got, wanted, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("patterns", [PATTERNS, SORTED_PATTERNS], ids=["as given", "sorted"])
@pytest.mark.filterwarnings("ignore")
def test_the_scales_are_those_of_peft(patterns: dict[str, Any], tmp_path: Path) -> None:
    """Of every pattern and layer, overlapping ones among them."""
    options = {"r": 4, "lora_alpha": 12, "target_modules": "all-linear", **patterns}
    adapted = save_with_peft(tmp_path, "llama", options)
    config = read_config(tmp_path / "adapter_config.json")
    layers = {
        name: layer
        for name, layer in adapted.base_model.model.named_modules()
        if hasattr(layer, "lora_A")
    }
    assert len(layers) == 14
    assert len({config.scale_of(name) for name in layers}) > 2
    for name, layer in layers.items():
        assert config.rank_of(name) == layer.r["default"], name
        assert config.scale_of(name) == pytest.approx(layer.scaling["default"]), name


@pytest.mark.parametrize("tied", ["embed_tokens", "lm_head"])
def test_a_tied_weight_is_untied(tied: str, tmp_path: Path) -> None:
    model = random_model("llama", tie_word_embeddings=True)
    before = model.lm_head.weight.clone()
    path = "lm_head" if tied == "lm_head" else "model.embed_tokens"
    name = f"base_model.model.{path}.lora_"
    tensors = {f"{name}A.weight": torch.ones(4, 64), f"{name}B.weight": torch.ones(320, 4)}
    if tied == "embed_tokens":
        tensors = {
            f"{name}embedding_A": torch.ones(4, 320),
            f"{name}embedding_B": torch.ones(64, 4),
        }
    merge_adapter(model, *save_adapter(tmp_path / "adapter", tensors))
    changed, other = model.model.embed_tokens.weight, model.lm_head.weight
    if tied == "lm_head":
        changed, other = other, changed
    assert torch.equal(other, before)
    np.testing.assert_allclose((changed - before).detach().numpy(), 12.0, atol=1e-5)
    assert model.config.tie_word_embeddings is False


def test_a_folder_without_an_adapter(tmp_path: Path) -> None:
    with pytest.raises(QsampleError, match=r"no LoRA adapter in .*adapter_config\.json"):
        find_adapter(str(tmp_path), HubOptions())


def test_a_package_takes_no_adapter(llama_package: Path) -> None:
    with pytest.raises(QsampleError, match="merged at export"):
        AutoModelForCausalLM.from_pretrained(llama_package, adapter="somewhere")
