"""Checkpoints as GPTQ and AWQ tools write them, of random integers, and the float model that they stand for.

Written from the formats' descriptions, one integer at a time, and not from what reads them in qsample.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tests.helpers.tiny_models import byte_tokenizer, random_model

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
NOT_QUANTIZED = ("embed", "lm_head", "wte", "wpe", ".gate.")
SIZES = {"hidden_size": 128, "intermediate_size": 256}


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint is quantized. version: of GPTQ's format. stated_version: the one in config.json, if another."""

    method: str = "gptq"
    bits: int = 4
    group_size: int = 32
    symmetric: bool = False
    act_order: bool = False
    version: int = 1
    stated_version: int | None = None

    def __str__(self) -> str:
        flags = [name for name in ("symmetric", "act_order") if getattr(self, name)]
        return "-".join(
            [self.method, f"v{self.version}", f"{self.bits}bit", f"g{self.group_size}", *flags]
        )

    def config(self) -> dict[str, Any]:
        """config.json's quantization_config."""
        if self.method == "awq":
            return {
                "quant_method": "awq",
                "bits": 4,
                "group_size": self.group_size,
                "zero_point": True,
                "version": "gemm",
            }
        stated = self.stated_version or self.version
        return {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group_size,
            "desc_act": self.act_order,
            "sym": self.symmetric,
            "checkpoint_format": "gptq" if stated == 1 else "gptq_v2",
        }


@dataclass(frozen=True)
class Layer:
    """tensors: as they are stored. levels: [N, K]. weight: [N, K] float32."""

    tensors: dict[str, Tensor]
    levels: np.ndarray
    weight: np.ndarray


def words(values: np.ndarray, bits: int) -> np.ndarray:
    """[R, C] integers as [R, C * bits / 32] int32: each row is one long number, its first value lowest."""
    rows = []
    for row in values:
        number = sum(int(value) << (bits * i) for i, value in enumerate(row))
        rows.append(np.frombuffer(number.to_bytes(len(row) * bits // 8, "little"), "<i4"))
    return np.stack(rows)


def awq_words(values: np.ndarray) -> np.ndarray:
    """[R, C] integers of 4 bits as [R, C / 8] int32, eight columns in AWQ's order a word."""
    reordered = values.reshape(len(values), -1, 8)[:, :, list(AWQ_ORDER)]
    return words(reordered.reshape(len(values), -1), 4)


def stored_levels(blocks: np.ndarray, bits: int) -> np.ndarray:
    """[R, bytes] of MatMulNBits as [R, values]: 4-bit values lie in the low half of a byte first."""
    return (
        blocks
        if bits == 8
        else np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(len(blocks), -1)
    )


def quantized_layer(
    rng: np.random.Generator, outputs: int, inputs: int, scheme: Scheme, *, order: int = 0
) -> Layer:
    """order: seed of the act-order, if there is one: layers that read the same inputs have the same."""
    size = inputs if scheme.group_size == -1 else scheme.group_size
    levels = rng.integers(0, 2**scheme.bits, (inputs, outputs))
    groups = np.arange(inputs) // size
    if scheme.act_order:
        groups = np.random.default_rng(order).permutation(groups)
    shape = (inputs // size, outputs)
    scales = (rng.uniform(0.5, 1.5, shape) * 0.4 / 2**scheme.bits).astype(np.float16)
    zeros = (
        np.full(shape, 2 ** (scheme.bits - 1))
        if scheme.symmetric
        else rng.integers(1, 2**scheme.bits, shape)
    )
    weight = np.zeros((inputs, outputs), np.float32)
    for k in range(inputs):
        weight[k] = scales[groups[k]].astype(np.float32) * (levels[k] - zeros[groups[k]])
    if scheme.method == "awq":
        stored = {"qweight": awq_words(levels), "qzeros": awq_words(zeros)}
    else:
        stored = {
            "qweight": words(levels.T, scheme.bits).T,
            "qzeros": words(zeros - 1 if scheme.version == 1 else zeros, scheme.bits),
            "g_idx": groups.astype(np.int32),
        }
    tensors = {
        name: torch.from_numpy(np.ascontiguousarray(array).copy()) for name, array in stored.items()
    }
    return Layer(tensors | {"scales": torch.from_numpy(scales)}, levels.T, weight.T.copy())


def save_quantized(
    folder: Path, model_type: str, scheme: Scheme, *, files: int = 1, **overrides: Any
) -> tuple[PreTrainedModel, dict[str, Layer]]:
    """Write a random model whose linear layers, but for the head and routers, are quantized; the rest is float16.

    files: how many its tensors are spread over. Returns the float model that the checkpoint stands for, and its layers
    by name.
    """
    model = random_model(model_type, **(SIZES | overrides))
    transposed = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, Conv1D)
    }
    float_folder = folder.with_name(f"{folder.name}-float")
    model.save_pretrained(float_folder)
    rng = np.random.default_rng(0)
    layers: dict[str, Layer] = {}
    stored: dict[str, Tensor] = {}
    floats: dict[str, Tensor] = {}
    for name, tensor in sorted(load_file(float_folder / "model.safetensors").items()):
        layer = name.removesuffix(".weight")
        if tensor.ndim < 2 or any(part in name for part in NOT_QUANTIZED):
            stored[name] = tensor.to(torch.float16)
            floats[name] = stored[name].to(torch.float32)
            continue
        is_transposed = layer.rpartition(".")[2] in transposed
        parent, _, last = layer.rpartition(".")
        order = zlib.crc32(f"{parent} {last in ('o_proj', 'down_proj')}".encode())
        layers[layer] = quantized_layer(
            rng, *(tensor.shape[::-1] if is_transposed else tensor.shape), scheme, order=order
        )
        stored |= {
            f"{layer}.{part}": part_of_it for part, part_of_it in layers[layer].tensors.items()
        }
        weight = torch.from_numpy(layers[layer].weight)
        floats[name] = weight.T.contiguous() if is_transposed else weight
    save_file(floats, float_folder / "model.safetensors", metadata={"format": "pt"})

    folder.mkdir(parents=True)
    config = json.loads((float_folder / "config.json").read_text()) | {
        "quantization_config": scheme.config()
    }
    (folder / "config.json").write_text(json.dumps(config))
    model.generation_config.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    _save(folder, stored, files)
    return AutoModelForCausalLM.from_pretrained(float_folder), layers


def _save(folder: Path, tensors: dict[str, Tensor], files: int) -> None:
    """One file, or tensors dealt out in turn, so that the parts of a layer lie in different files."""
    if files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for number in range(files):
        name = f"model-{number:05}-of-{files:05}.safetensors"
        part = dict(sorted(tensors.items())[number::files])
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, name))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
