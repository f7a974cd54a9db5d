"""Writes a checkpoint as a GGUF file, which llama.cpp itself quantizes.

    python benchmarks/gguf_model.py CHECKPOINT OUT.gguf Q4_0 [--texts] [--mixed]

It supports the model types of ARCHITECTURES. The files have no vocabulary, because benchmarks feed and read token ids;
with --texts every token has an invented text, for a server that reads and returns texts. With --mixed, llama.cpp
chooses a type for each matrix.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

Config = dict[str, Any]
Named = tuple[str, Tensor]
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
}
GATED_DELTA = ("qwen3_next", "qwen3_5_text")
# These stay in float32, as in llama.cpp's own converter: they are small, and their rounding matters.
FLOAT32 = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "ssm_conv1d.weight", ".bias")
# The sections of Qwen3.5's rotary embedding, which llama.cpp requires; text has the same position in all of them.
ROPE_SECTIONS = [11, 11, 10, 0]


class Checkpoint:
    """The tensors of a checkpoint by name, read on access; with `sizes_only`, empty tensors on the meta device."""

    def __init__(self, folder: Path, *, sizes_only: bool = False) -> None:
        self._files = [safe_open(file, "pt") for file in sorted(folder.glob("*.safetensors"))]
        self._file_of = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 - no mapping
        self._sizes_only = sizes_only
        self.names = sorted(self._file_of)

    def __getitem__(self, name: str) -> Tensor:
        file = self._file_of[name]
        if self._sizes_only:
            return torch.empty(file.get_slice(name).get_shape(), device="meta")
        tensor: Tensor = file.get_tensor(name)
        return tensor


def write_float(
    checkpoint: Path, path: Path, dtype: torch.dtype = torch.float16, *, texts: bool = False
) -> None:
    """Write matrices in `dtype`, and norms, biases and routers in float32, as llama.cpp's converter does."""
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[config["model_type"]]])
    add_settings(writer, config)
    add_texts(writer, config["vocab_size"]) if texts else writer.add_tokenizer_model("no_vocab")
    # A file begins with all names and sizes; afterwards only a single tensor is in memory at a time.
    for name, tensor in named_for_llama(Checkpoint(checkpoint, sizes_only=True), config, dtype):
        kind = np.dtype(np.float32 if tensor.dtype == torch.float32 else np.float16)
        writer.add_tensor_info(name, tensor.shape, kind, tensor.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, tensor in named_for_llama(Checkpoint(checkpoint), config, dtype):
        writer.write_tensor_data(tensor.contiguous().numpy())
    writer.close()


def named_for_llama(tensors: Checkpoint, config: Config, dtype: torch.dtype) -> Iterator[Named]:
    """The tensors of the file, with llama.cpp's names and the types of the file."""
    names = gguf.get_tensor_name_map(
        ARCHITECTURES[config["model_type"]], config["num_hidden_layers"]
    )
    for name, tensor in translated(tensors, config):
        # Some already have their final name.
        target = name if name.startswith("blk.") else names.get_name(name, (".weight", ".bias"))
        if target is None:
            raise ValueError(f"{name} has no name in GGUF")
        yield (
            target,
            tensor.to(torch.float32 if tensor.ndim == 1 or target.endswith(FLOAT32) else dtype),
        )


def add_settings(writer: gguf.GGUFWriter, config: Config) -> None:
    """Write llama.cpp's description of the architecture."""
    heads, kind, rope = (
        config["num_attention_heads"],
        config["model_type"],
        config["rope_parameters"],
    )
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast", 32.0))
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow", 1.0))
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(
            config.get("moe_intermediate_size", config["intermediate_size"])
        )
    if kind == "gpt_oss":
        writer.add_sliding_window(config["sliding_window"])
    if kind == "qwen3_next":
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if kind == "qwen3_5_text":
        writer.add_rope_dimension_sections(ROPE_SECTIONS)
    if kind in GATED_DELTA:
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(
            config["linear_value_head_dim"] * config["linear_num_value_heads"]
        )
        writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)


def add_texts(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """Write a vocabulary in which each letter is a token, and every token has a different text.

    No two texts concatenate to a third, so a text of n letters has n tokens; and no text is half a character, for
    which a stream would wait. The first three tokens have no text, and 1 ends a text.
    """
    kinds = gguf.TokenType
    special = [("<unk>", kinds.UNKNOWN), ("</s>", kinds.CONTROL), ("<pad>", kinds.CONTROL)]
    tokens = [*special, *((f"<0x{byte:02X}>", kinds.BYTE) for byte in range(128))]
    tokens += [(chr(letter), kinds.NORMAL) for letter in range(ord("a"), ord("z") + 1)]
    tokens += [(f"\u2581{number}", kinds.NORMAL) for number in range(len(tokens), vocab_size)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([kind for _, kind in tokens])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)


def translated(tensors: Checkpoint, config: Config) -> Iterator[Named]:
    """The tensors of a checkpoint in llama.cpp's layout, with names that gguf knows."""
    for name in tensors.names:
        first = re.fullmatch(r"(.+\.experts\.)0(\..+)", name)
        if first:  # a single matrix for all experts of a layer
            count = config.get("num_experts") or config["num_local_experts"]
            yield (
                first[1][:-1] + first[2],
                torch.stack([tensors[f"{first[1]}{i}{first[2]}"] for i in range(count)]),
            )
        elif not re.search(r"\.experts\.\d+\.", name):
            yield from _translate(name, tensors[name], config)


def _translate(name: str, tensor: Tensor, config: Config) -> list[Named]:
    kind = config["model_type"]
    if kind == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        count = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        return [(name, interleaved(tensor, count))]
    if kind == "gpt_oss" and ".experts." in name:
        return _experts(name, tensor)
    if name.endswith(".sinks"):
        return [(f"{name}.weight", tensor)]
    if kind in GATED_DELTA:
        if ".linear_attn." in name:
            return _gated_delta(name, tensor, config)
        if name.endswith("norm.weight"):  # stored as the difference from 1
            return [(name, tensor.to(torch.float32) + 1)]
    return [(name, tensor)]


def _experts(name: str, tensor: Tensor) -> list[Named]:
    """gpt-oss's experts: matrices are [inputs, outputs], and the columns of gate and up alternate."""
    bias = name.endswith("_bias")
    stem, suffix = name.removesuffix("_bias"), "bias" if bias else "weight"
    parts = [(stem, tensor)]
    if stem.endswith("gate_up_proj"):
        stem = stem.removesuffix("gate_up_proj")
        parts = [(f"{stem}gate_proj", tensor[..., ::2]), (f"{stem}up_proj", tensor[..., 1::2])]
    return [
        (f"{part}.{suffix}", values if bias else values.transpose(-1, -2)) for part, values in parts
    ]


def _gated_delta(name: str, tensor: Tensor, config: Config) -> list[Named]:
    """A tensor of a gated-delta layer in llama.cpp's layout.

    Qwen3-Next stores query, key, value and gate of each key head together; llama.cpp expects all queries first. Qwen3.5
    sorts the value heads by key head; llama.cpp expects them to alternate.
    """
    layer, _, own = name.partition(".linear_attn.")
    keys, key_size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    shared, value_size = config["linear_num_value_heads"] // keys, config["linear_value_head_dim"]
    if own == "A_log":
        tensor = -torch.exp(tensor.to(torch.float32))
    elif own == "dt_bias":
        own = "dt_proj.bias"
    elif own == "conv1d.weight":
        tensor = tensor.squeeze(1)
    elif own == "in_proj_qkvz.weight":
        of_head = tensor.unflatten(0, (keys, -1))
        parts = of_head.split([key_size, key_size, shared * value_size, shared * value_size], dim=1)
        query, key, value, gate = (part.flatten(0, 1) for part in parts)
        block = f"blk.{layer.rpartition('.')[2]}"
        return [
            (f"{block}.attn_qkv.weight", torch.cat([query, key, value])),
            (f"{block}.attn_gate.weight", gate),
        ]
    if config["model_type"] == "qwen3_5_text":
        if own in (
            "A_log",
            "dt_proj.bias",
            "in_proj_a.weight",
            "in_proj_b.weight",
            "in_proj_z.weight",
        ):
            tensor = _in_turns(tensor, keys, shared)
        elif own in ("in_proj_qkv.weight", "conv1d.weight"):
            others, values = tensor.split([2 * keys * key_size, keys * shared * value_size])
            tensor = torch.cat([others, _in_turns(values, keys, shared)])
        elif own == "out_proj.weight":
            tensor = _in_turns(tensor.T, keys, shared).T
    return [(f"{layer}.linear_attn.{own}", tensor)]


def _in_turns(rows: Tensor, groups: int, members: int) -> Tensor:
    """Reorder `groups` x `members` heads from sorted by group to the first of each group, then the second of each."""
    heads = rows.unflatten(0, (groups, members, -1))
    return heads.swapaxes(0, 1).flatten(0, 2)


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows: Llama's rotary embedding pairs neighbours in llama.cpp, and halves in Hugging Face."""
    rows, columns = weight.shape
    return (
        weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


def quantize(source: Path, path: Path, kind: str, *, mixed: bool) -> None:
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    options.nthread = 2
    # By default the quantizer keeps the head in 6 bits; without `mixed`, all systems read the same number of bytes.
    # Mixtures of types, such as Q4_K_M, are always its own.
    options.pure = not mixed and "_K_" not in kind
    status = llama_cpp.llama_model_quantize(
        str(source).encode(), str(path).encode(), ctypes.byref(options)
    )
    if status:
        raise RuntimeError(f"llama.cpp's quantizer failed with status {status}")


def main() -> None:
    texts = "--texts" in sys.argv
    checkpoint, path, kind = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    whole, scratch = path.with_suffix(".float16.gguf"), path.with_suffix(".scratch.gguf")
    try:
        write_float(checkpoint, whole, texts=texts)
        quantize(whole, scratch, kind, mixed="--mixed" in sys.argv)
        scratch.rename(path)  # an existing file is complete
    finally:
        whole.unlink(missing_ok=True)
        scratch.unlink(missing_ok=True)
    print(f"{path}: {np.round(path.stat().st_size / 1e6)} MB")


if __name__ == "__main__":
    main()
