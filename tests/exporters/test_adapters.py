"""LoRA adapters as inputs of the graph: each row's tokens are those of transformers with the adapter merged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM as HuggingFace
from transformers.pytorch_utils import Conv1D

from qsample import AutoModelForCausalLM, SamplingParams
from qsample.contract.interface import Interface
from qsample.errors import CompileError
from qsample.package.package import read_package
from qsample.runtime import CausalLM, load
from tests.helpers.adapters import lora_pair, save_adapter
from tests.helpers.quantized_checkpoints import Scheme, save_quantized
from tests.helpers.tiny_models import FAMILIES, save_checkpoint

TOKENS = 12
PROMPTS = [
    [5, 9, 30, 7, 100, 40, 8],
    [17, 44, 9],
    [80, 21, 22, 90, 120],
    [200, 3, 61, 61],
    [11, 12, 13, 14, 15, 16],
]


def make_adapter(
    folder: Path, interface: Interface, seed: int, rank: int, *kinds: str, **config: Any
) -> Path:
    """A folder of an adapter of the layers of some kinds, or all. config: also rank_pattern, of kinds."""
    tensors, ranks = {}, config.get("rank_pattern", {})
    for index, target in enumerate(interface.adapters):
        if not kinds or target.kind in kinds:
            torch.manual_seed(1000 * seed + index)
            pair = lora_pair(
                target.path, target.out_features, target.in_features, ranks.get(target.kind, rank)
            )
            tensors |= {
                name: torch.randn_like(matrix) / (16 if "lora_B" in name else 1)
                for name, matrix in pair.items()
            }
    save_adapter(folder, tensors, r=rank, **config)
    return folder


def merged(checkpoint: Path, adapter: Path | None, scale: Callable[[str], float]) -> nn.Module:
    """transformers' model, with scale B A added to its weights."""
    model = HuggingFace.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tensors = {} if adapter is None else load_file(adapter / "adapter_model.safetensors")
    for path, module in model.named_modules():
        name = f"base_model.model.{path}"
        if f"{name}.lora_A.weight" in tensors:
            change = (
                scale(path.rpartition(".")[2])
                * tensors[f"{name}.lora_B.weight"]
                @ tensors[f"{name}.lora_A.weight"]
            )
            module.weight.data += change.T if isinstance(module, Conv1D) else change
    return model


def greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    ends = {"eos_token_id": None, "pad_token_id": 0}
    tokens = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, **ends
    )
    return tokens[0, len(prompt) :].tolist()


def generated(model: CausalLM, prompts: list[list[int]], names: list[str | None]) -> Any:
    params = [
        SamplingParams(temperature=0, max_new_tokens=TOKENS, eos_token_id=(), adapter=name)
        for name in names
    ]
    return model.generate(prompts, params)


@pytest.fixture(scope="module")
def package(adapted: Callable[..., Path]) -> Path:
    return adapted("llama", max_loras=4, max_lora_rank=8, logprobs=True)


@pytest.fixture(scope="module")
def adapters(
    package: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str | None, tuple[Path | None, Any]]:
    """Name → the folder, and kind → scale."""
    folder, interface = tmp_path_factory.mktemp("adapters"), read_package(package).interface
    pattern = {
        "rank_pattern": {"o_proj": 8, "v_proj": 2},
        "alpha_pattern": {"v_proj": 6},
        "lora_alpha": 4,
    }
    return {
        None: (None, None),
        "all": (make_adapter(folder / "all", interface, 1, 4, lora_alpha=12), lambda kind: 3.0),
        "query, value": (
            make_adapter(
                folder / "qv", interface, 2, 8, "q_proj", "v_proj", lora_alpha=16, use_rslora=True
            ),
            lambda kind: 16 / 8**0.5,
        ),
        "down": (
            make_adapter(folder / "down", interface, 3, 1, "down_proj", lora_alpha=8),
            lambda kind: 8.0,
        ),
        "patterns": (
            make_adapter(folder / "patterns", interface, 4, 4, **pattern),
            lambda kind: {"o_proj": 4 / 8, "v_proj": 6 / 2}.get(kind, 1.0),
        ),
    }


def loaded(package: Path, adapters: dict[str | None, tuple[Path | None, Any]]) -> CausalLM:
    model = load(package)
    for name, (folder, _) in adapters.items():
        if name is not None and folder is not None:
            model.load_adapter(name, folder)
    return model


@pytest.mark.ci
def test_each_row_has_its_own_adapter(
    package: Path,
    adapters: dict[str | None, tuple[Path | None, Any]],
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    wanted = [
        greedy(merged(checkpoint("llama"), *adapter), prompt)
        for prompt, adapter in zip(PROMPTS, adapters.values(), strict=True)
    ]
    plain, others = (
        merged(checkpoint("llama"), None, float),
        zip(wanted[1:], PROMPTS[1:], strict=True),
    )
    assert not any(row == greedy(plain, prompt) for row, prompt in others)  # the adapters matter
    AutoModelForCausalLM.from_pretrained(package).compile(tmp_path / "cpu", ctx_len=64)
    for path in (package, tmp_path / "cpu"):
        model = loaded(path, adapters)
        names = [*adapters]
        together = generated(model, PROMPTS, names)
        assert [[*row] for row in together.token_ids] == wanted
        # A row without an adapter has the bits that it has if no row has one.
        alone = generated(model, PROMPTS[:1], [None])
        assert np.array_equal(together.logprobs[0], alone.logprobs[0])
        # Other rows, other places.
        some = [3, 0, 1]
        again = generated(model, [PROMPTS[row] for row in some], [names[row] for row in some])
        assert [[*row] for row in again.token_ids] == [wanted[row] for row in some]


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "most"), [("int8", 0.06), ("int4", 1.0), ("float16", 0.01)])
def test_adapters_over_quantized_weights(
    package: Path,
    adapters: dict[str | None, tuple[Path | None, Any]],
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    weights: str,
    most: float,
) -> None:
    AutoModelForCausalLM.from_pretrained(package).compile(
        tmp_path / "p", ctx_len=64, weights=weights, max_divergence=9
    )
    output = generated(loaded(tmp_path / "p", adapters), PROMPTS, [*adapters])
    differences = []
    for row, (prompt, adapter) in enumerate(zip(PROMPTS, adapters.values(), strict=True)):
        with torch.no_grad():
            logits = merged(checkpoint("llama"), *adapter)(torch.tensor([prompt])).logits[0, -1]
        token = output.token_ids[row][0]
        differences.append(
            abs(float(output.logprobs[row][0]) - logits.log_softmax(-1)[token].item())
        )
    assert max(differences) < most, differences


@pytest.mark.ci
def test_the_manifest_names_the_layers(package: Path) -> None:
    data = json.loads((package / "qsample.json").read_text())
    assert data["contract_version"] == "2.1"
    assert data["interface"]["adapters"][0] == {
        "path": "model.layers.0.self_attn.q_proj",
        "in_features": 64,
        "out_features": 64,
    }
    kinds = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert [*read_package(package).interface.adapter_kinds] == kinds
    assert len(data["interface"]["adapters"]) == 2 * len(kinds)


@pytest.mark.ci
@pytest.mark.parametrize("target", ["cuda", "openvino"])
def test_targets_without_adapters_say_so(package: Path, tmp_path: Path, target: str) -> None:
    with pytest.raises(
        CompileError, match=rf"takes LoRA adapters \(max_loras=4\), and the target {target} has no"
    ):
        AutoModelForCausalLM.from_pretrained(package).compile(
            tmp_path / "p", provider=target, ctx_len=64
        )


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama"])
def test_families(family: str, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "checkpoint", family)
    portable = AutoModelForCausalLM.from_pretrained(
        checkpoint, max_loras=2, max_lora_rank=8
    ).export(tmp_path / "p")
    portable.compile(tmp_path / "cpu", ctx_len=64)
    portable.compile(tmp_path / "int4", ctx_len=64, weights="int4", max_divergence=99)
    interface = portable.package.interface
    folders = [
        make_adapter(tmp_path / f"{seed}", interface, seed, 4 * seed, lora_alpha=8)
        for seed in (1, 2)
    ]
    wanted = [
        greedy(merged(checkpoint, folder, lambda kind, scale=scale: scale), prompt)
        for prompt, folder, scale in zip(
            PROMPTS[:3], [None, *folders], (0.0, 2.0, 1.0), strict=True
        )
    ]
    for path in (tmp_path / "p", tmp_path / "cpu"):
        model = loaded(path, {None: (None, None), "1": (folders[0], None), "2": (folders[1], None)})
        output = generated(model, PROMPTS[:3], [None, "1", "2"])
        assert [[*row] for row in output.token_ids] == wanted


@pytest.mark.slow
def test_peft_gives_the_same_tokens(
    package: Path, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    every = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    configs: dict[str, dict[str, Any]] = {
        "all": {"r": 4, "lora_alpha": 12, "target_modules": every},
        "default": {"r": 8, "lora_alpha": 32, "use_rslora": True},
        "patterns": {
            "r": 4,
            "target_modules": every,
            "rank_pattern": {"layers.1.mlp.up_proj": 7},
            "alpha_pattern": {"q_proj": 3},
        },
        "a layer": {"r": 2, "lora_alpha": 20, "target_modules": every, "layers_to_transform": [1]},
    }
    model, wanted = (
        load(package),
        [greedy(HuggingFace.from_pretrained(checkpoint("llama")), PROMPTS[0])],
    )
    for seed, (name, config) in enumerate(configs.items()):
        torch.manual_seed(seed)
        base = HuggingFace.from_pretrained(checkpoint("llama"), dtype=torch.float32)
        adapted = peft.get_peft_model(
            base, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **config)
        )
        adapted.save_pretrained(tmp_path / name)
        model.load_adapter(name, tmp_path / name)
        wanted.append(greedy(adapted.eval(), PROMPTS[seed + 1]))
    output = generated(model, PROMPTS, [None, *configs])
    assert [[*row] for row in output.token_ids] == wanted


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [Scheme("gptq", act_order=True), Scheme("awq")], ids=str)
def test_adapters_over_weights_that_came_quantized(scheme: Scheme, tmp_path: Path) -> None:
    save_quantized(tmp_path / "checkpoint", "llama", scheme)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "checkpoint", max_loras=2, max_lora_rank=8
    )
    portable = model.export(tmp_path / "p")
    interface = portable.package.interface
    portable.compile(tmp_path / "cpu", ctx_len=64)
    folder, prompts = make_adapter(tmp_path / "a", interface, 1, 4, lora_alpha=8), PROMPTS[:2]
    floats = tmp_path / "checkpoint-float"
    models = [merged(floats, one, lambda kind: 2.0) for one in (None, folder)]
    names = {None: (None, None), "a": (folder, None)}
    wanted = [greedy(*pair) for pair in zip(models, prompts, strict=True)]
    output = generated(loaded(tmp_path / "p", names), prompts, [*names])
    assert [[*row] for row in output.token_ids] == wanted
    # The compiled graph rounds activations to 8 bits.
    output = generated(loaded(tmp_path / "cpu", names), prompts, [*names])
    assert [*output.token_ids[1][:2]] == wanted[1][:2]
