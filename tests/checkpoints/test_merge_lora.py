"""LoRA adapters: what is merged, and which are refused before the model changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qsample import AutoModelForCausalLM
from qsample.checkpoints.checkpoint import Checkpoint
from qsample.checkpoints.hub import HubOptions
from qsample.checkpoints.merge_lora import find_adapter, merge_adapter
from qsample.errors import QsampleError, UnsupportedModelError
from qsample.huggingface.lora import LoraConfig, read_config
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


def test_a_weight_that_comes_with_the_adapter_is_the_base(tmp_path: Path) -> None:
    """peft saves the embeddings that were resized or trained as a whole."""
    model = random_model("llama")
    path = "model.layers.1.self_attn.q_proj"
    before = model.get_submodule(path).weight.detach().numpy().copy()
    tensors = lora_pair(path, 64, 64)
    product, base = wanted(tensors, 3), torch.from_numpy(before) + 1
    merge_adapter(
        model, *save_adapter(tmp_path / "adapter", {**tensors, f"base_model.model.{path}.base_layer.weight": base})
    )
    np.testing.assert_allclose(model.get_submodule(path).weight.detach().numpy() - before, product + 1, atol=1e-5)


def test_a_checkpoint_is_loaded_with_its_adapter(tmp_path: Path) -> None:
    checkpoint = str(save_checkpoint(tmp_path / "checkpoint", "llama"))
    save_adapter(tmp_path / "adapter", lora_pair("model.layers.0.mlp.up_proj", 96, 64))
    plain = Checkpoint(checkpoint).load().state_dict()
    adapted = Checkpoint(checkpoint, adapter=str(tmp_path / "adapter")).load().state_dict()
    changed = [name for name in plain if not torch.equal(plain[name], adapted[name])]
    assert changed == ["model.layers.0.mlp.up_proj.weight"]


def test_an_adapter_that_is_more_than_lora_is_not_merged(tmp_path: Path) -> None:
    files = save_adapter(tmp_path / "adapter", lora_pair("model.layers.0.mlp.up_proj", 96, 64), use_dora=True)
    with pytest.raises(UnsupportedModelError, match=r"with use_dora.*export the merged checkpoint"):
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


LAYER = "model.layers.0.mlp.up_proj"
A, B = (f"base_model.model.{LAYER}.lora_{part}.weight" for part in "AB")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({A: None}, rf"holds matrix B of {LAYER} without its partner"),
        ({B: None}, rf"holds matrix A of {LAYER} without its partner"),
        (
            {A: torch.ones(5, 64), B: torch.ones(96, 5)},
            r"are \[5, 64\] and \[96, 5\], and the rank .* is 4",
        ),
        ({B: torch.ones(96, 3)}, r"are \[4, 64\] and \[96, 3\]"),
        ({A: torch.ones(64)}, r"lora_A\.weight is float32 \[64\]; it must be a matrix"),
        ({A: torch.ones(4, 64, 1, 1)}, r"is float32 \[4, 64, 1, 1\]"),
        ({B: torch.ones(96, 4, dtype=torch.int8)}, r"is int8 \[96, 4\]"),
        ({B: torch.full((96, 4), torch.nan)}, "must be a matrix of finite floats"),
        (
            {f"base_model.model.{LAYER}.lora_magnitude_vector": torch.ones(96)},
            "lora_magnitude_vector, which does not",
        ),
        ({f"base_model.model.{LAYER}.lora_B.bias": torch.ones(96)}, r"lora_B\.bias, which does not belong"),
        ({f"{LAYER}.lora_A.weight": torch.ones(4, 64)}, "which does not belong to a pair"),
        ({f"base_model.model.{LAYER}.base_layer.weight": torch.ones(3, 3)}, r"holds a weight of shape \[3, 3\]"),
        ({A: None, B: None}, "holds no LoRA matrices"),
    ],
)
def test_damaged_matrices(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = random_model("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    changed = lora_pair(LAYER, 96, 64) | change
    tensors = {name: tensor for name, tensor in changed.items() if tensor is not None}
    with pytest.raises(QsampleError, match=message):
        merge_adapter(model, *save_adapter(tmp_path / "adapter", tensors))
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("content", [b"", b"\xff" * 64])
def test_weights_that_are_no_safetensors(content: bytes, tmp_path: Path) -> None:
    files = save_adapter(tmp_path / "adapter", lora_pair(LAYER, 96, 64))
    files[1].write_bytes(content)
    with pytest.raises(QsampleError, match=r"adapter_model\.safetensors cannot be read"):
        merge_adapter(random_model("llama"), *files)


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
    patterns = {name: options[name] for name in ("rank_pattern", "alpha_pattern") if name in options}
    (folder / "adapter_config.json").write_text(json.dumps(written | patterns))
    return peft.PeftModel.from_pretrained(random_model(model_type, **overrides), folder).eval()


PROMPT = torch.arange(5, 25)[None]
PATTERNS = {
    "rank_pattern": {r"^model\.layers\.0\..*": 2, "q_proj": 6, "layers.1.self_attn.q_proj": 3, ".*": 5},
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
        ("llama", {"r": 4, "lora_alpha": 12, "target_modules": PROJECTIONS, "use_rslora": True, **PATTERNS}, {}),
        ("llama", {"target_modules": PROJECTIONS, "layers_to_transform": [1], "init_lora_weights": "orthogonal"}, {}),
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
    layers = {name: layer for name, layer in adapted.base_model.model.named_modules() if hasattr(layer, "lora_A")}
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
        tensors = {f"{name}embedding_A": torch.ones(4, 320), f"{name}embedding_B": torch.ones(64, 4)}
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


# All that peft 0.21 writes for an adapter of default options.
DEFAULTS: dict[str, Any] = {
    "task_type": "CAUSAL_LM",
    "peft_type": "LORA",
    "auto_mapping": None,
    "peft_version": "0.21.2",
    "revision": None,
    "base_model_name_or_path": "some/model",
    "inference_mode": True,
    "r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "target_modules": ["q_proj"],
    "exclude_modules": ["k_proj"],
    "fan_in_fan_out": True,
    "bias": "none",
    "use_rslora": False,
    "modules_to_save": None,
    "init_lora_weights": True,
    "layers_to_transform": [1, 2],
    "layers_pattern": "layers",
    "rank_pattern": {},
    "alpha_pattern": {},
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "trainable_token_indices": None,
    "loftq_config": {},
    "eva_config": None,
    "corda_config": None,
    "lora_ga_config": None,
    "use_dora": False,
    "velora_config": {"rank": 1},
    "alora_invocation_tokens": None,
    "use_qalora": False,
    "qalora_group_size": 16,
    "monteclora_config": None,
    "layer_replication": None,
    "lora_bias": False,
    "target_parameters": None,
    "use_bdlora": None,
    "arrow_config": None,
    "kasa_config": None,
    "ensure_weight_tying": False,
}
PATH = "model.layers.1.self_attn.q_proj"


def config(folder: Path, **options: Any) -> LoraConfig:
    (folder / "adapter_config.json").write_text(json.dumps(DEFAULTS | options))
    return read_config(folder / "adapter_config.json")


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({}, 16 / 8),
        ({"use_rslora": True}, 16 / 8**0.5),
        ({"rank_pattern": {"q_proj": 4}}, 16 / 4),
        ({"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 6}, "use_rslora": True}, 6 / 2),
        # The first that matches counts, whichever says more.
        ({"alpha_pattern": {"q_proj": 2, PATH: 3}}, 2 / 8),
        ({"alpha_pattern": {PATH: 3, "q_proj": 2}}, 3 / 8),
        ({"alpha_pattern": {"k_proj": 1, ".*": 5, "q_proj": 2}}, 5 / 8),
        # A whole name behind a dot, at the end of the path.
        ({"alpha_pattern": {"proj": 2}}, 16 / 8),
        ({"alpha_pattern": {"_proj": 2, "self_attn": 3, "q_proj.": 4, "xq_proj": 5}}, 16 / 8),
        ({"alpha_pattern": {"self_attn.q_proj": 2}}, 2 / 8),
        ({"alpha_pattern": {"elf_attn.q_proj": 2}}, 16 / 8),
        # Anchored at the front, the whole path.
        ({"alpha_pattern": {"^q_proj": 2}}, 16 / 8),
        ({"alpha_pattern": {f"^{PATH}": 2}}, 2 / 8),
        ({"alpha_pattern": {r"^model.layers.\d+.self_attn.(q|k)_proj": 2}}, 2 / 8),
        ({"alpha_pattern": {r"layers\.[02]\..*": 2, r"layers\.1\..*": 3}}, 3 / 8),
        ({"alpha_pattern": {"v_proj|q_proj": 2}}, 2 / 8),
        ({"alpha_pattern": {"": 2}}, 16 / 8),
        ({"alpha_pattern": None, "rank_pattern": None}, 16 / 8),
        ({"lora_alpha": 0.5}, 0.5 / 8),
    ],
)
def test_the_scale_of_a_layer(options: dict[str, Any], scale: float, tmp_path: Path) -> None:
    assert config(tmp_path, **options).scale_of(PATH) == pytest.approx(scale)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"peft_type": "IA3"}, "of type IA3"),
        ({"peft_type": None}, "of type None"),
        ({"use_dora": True}, "with use_dora"),
        ({"bias": "all"}, "with bias"),
        ({"bias": "lora_only", "use_dora": True}, "with use_dora, bias"),
        ({"modules_to_save": ["lm_head"]}, "with modules_to_save"),
        ({"lora_bias": True}, "with lora_bias"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "with target_parameters"),
        ({"trainable_token_indices": [3]}, "with trainable_token_indices"),
        ({"layer_replication": [[0, 2]]}, "with layer_replication"),
        ({"use_qalora": True}, "with use_qalora"),
        ({"use_bdlora": {"nblocks": 2}}, "with use_bdlora"),
        ({"alora_invocation_tokens": [1, 2]}, "with alora_invocation_tokens"),
        ({"arrow_config": {"top_k": 3}}, "with arrow_config"),
        ({"kasa_config": {"beta": 1}}, "with kasa_config"),
        ({"monteclora_config": {"n": 1}}, "with monteclora_config"),
        ({"megatron_config": {"tp": 2}}, "with megatron_config"),
        ({"ensure_weight_tying": True}, "with ensure_weight_tying"),
        ({"use_something_of_tomorrow": True}, "with use_something_of_tomorrow"),
        *(
            ({"init_lora_weights": name}, f"with init_lora_weights='{name}'")
            for name in ("pissa", "pissa_niter_16", "olora", "corda", "lora_ga", "loftq")
        ),
    ],
)
def test_what_is_more_than_lora_is_refused_by_name(options: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"an adapter {named} cannot be .*export the merged checkpoint"):
        config(tmp_path, **options)


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal", "mica"])
def test_initialisations_that_leave_the_model_alone(init: Any, tmp_path: Path) -> None:
    assert config(tmp_path, init_lora_weights=init).rank == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"r": 0}, "r is 0; it must be an integer of at least 1"),
        ({"r": True}, "r is True"),
        ({"r": "8"}, "r is '8'"),
        ({"r": None}, "r is None"),
        ({"lora_alpha": "16"}, "lora_alpha is '16'; it must be a number"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf"),
        ({"lora_alpha": 10**400}, "lora_alpha is 10+.*; it must be a number"),
        ({"lora_alpha": [1]}, r"lora_alpha is \[1\]"),
        ({"use_rslora": "false"}, "use_rslora is 'false'; it must be true or false"),
        ({"rank_pattern": {"q_proj": 2.5}}, r"rank_pattern\['q_proj'\] is 2.5"),
        ({"rank_pattern": {"q_proj": -1}}, r"rank_pattern\['q_proj'\] is -1"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern is .'q_proj'.; it must be an object"),
        ({"alpha_pattern": {"q_proj": None}}, r"alpha_pattern\['q_proj'\] is None"),
        ({"alpha_pattern": {"q_(proj": 2}}, r"alpha_pattern holds 'q_\(proj', which is not a regular expression"),
        ({"rank_pattern": {"*": 2}}, r"rank_pattern holds '\*', which is not a regular expression"),
    ],
)
def test_values_that_are_none(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(QsampleError, match=rf"adapter_config.json: {message}"):
        config(tmp_path, **options)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not valid JSON"),
        (b"{'r': 8}", "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[1, 2]", r"holds \[1, 2\], and must hold an object"),
        (b"null", "holds None, and must hold an object"),
    ],
)
def test_files_that_are_no_configuration(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_bytes(content)
    with pytest.raises(QsampleError, match=rf"adapter_config.json {message}"):
        read_config(tmp_path / "adapter_config.json")
