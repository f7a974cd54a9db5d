"""Small random causal LMs made from their configs, with weights scaled so that logits are of order 3 to 10."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from qsample.checkpoints.checkpoint import Origin
from qsample.contract.interface import Features
from qsample.exporters.export import LoadedModel, export_model
from qsample.exporters.portable import write_graphs
from qsample.graph.join import cut_at_logits
from qsample.graph.weights import load_graph
from qsample.package.package import MANIFEST_NAME, Package, write_package
from tests.helpers import small_packages

VOCAB_SIZE = 320  # 256 bytes, four special tokens and some that no text encodes to

# What each family needs beside the common sizes. Windows are shorter than the prompts of the tests.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 32},
    "gemma2": {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mistral": {"sliding_window": 5},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "phi3": {},
    # The first half of each head is rotated.
    "glm": {"head_dim": 32, "partial_rotary_factor": 0.5},
    "gpt_neox": {"num_attention_heads": 2, "rotary_pct": 0.5},
    "cohere": {},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": 6,
    },
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16},
    "qwen3_5_text": {
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "olmo_hybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
}


def random_model(model_type: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random `model_type` of two layers and about 0.1 M parameters, in eval mode."""
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = AutoConfig.for_model(
        model_type, **{**sizes, **FAMILIES.get(model_type, {}), **overrides}
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.12)
    return model


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """transformers' form of `small_packages.byte_tokenizer`."""
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=small_packages.byte_tokenizer(), **special)


def save_chat_checkpoint(folder: Path, vocab_size: int, eos_token_id: Any) -> Path:
    """Write a random Llama with a chat template, whose tokenizer has 262 tokens and ends with <|im_end|>, 260."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<|im_end|>", "<image>"], special_tokens=True)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = (
        "{% for message in messages %}[{{ message.role }}]{{ message.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    model = random_model("llama", vocab_size=vocab_size, eos_token_id=eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_checkpoint(folder: Path, model_type: str, **overrides: Any) -> Path:
    """Write a random model and its tokenizer to `folder` as a Hugging Face checkpoint."""
    random_model(model_type, **overrides).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def export_without_sampler(model: PreTrainedModel, path: Path, **options: Any) -> Package:
    """Export `model`, for tests that the sampler does not matter to: tracing it takes most of the time."""
    loaded = LoadedModel(model, byte_tokenizer(), Origin("tiny"))
    return export_model(loaded, path, Features(sampler=False), **options)


def with_features(source: Package, path: Path, features: Features) -> None:
    """Write the package that an export with `features` makes of the model in `source`, without another trace."""
    interface = replace(source.interface, features=features)
    model = cut_at_logits(load_graph(source.file("decoder.onnx")), source.interface)
    with write_package(path) as writer:
        for file in source.path.glob("*.json"):
            shutil.copyfile(file, writer.directory / file.name)
        (writer.directory / MANIFEST_NAME).unlink()
        write_graphs(model, interface, source.manifest.token_ids.pad, writer.directory)
        version = interface.contract_version
        writer.finish(replace(source.manifest, interface=interface, contract_version=version))
