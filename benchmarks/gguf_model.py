"""Writes a checkpoint of Llama's or Qwen3's architecture as a GGUF file, which llama.cpp itself quantizes.

    python benchmarks/gguf_model.py CHECKPOINT OUT.gguf Q4_0

The vocabulary is left out: the benchmark feeds and reads token ids.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import safe_open

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen3": gguf.MODEL_ARCH.QWEN3}


def write_float(checkpoint: Path, path: Path) -> None:
    """The weights in float16, norms in float32, as llama.cpp's own converter stores them."""
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(config["rope_parameters"]["rope_theta"]))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - a safetensors file is no mapping
                tensor = tensors.get_tensor(name)
                if config["model_type"] == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
                    count = heads if "q_proj" in name else config["num_key_value_heads"]
                    tensor = interleaved(tensor, count)
                kind = torch.float32 if tensor.ndim == 1 else torch.float16
                writer.add_tensor(names.get_name(name, (".weight",)), tensor.to(kind).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(weight: Any, heads: int) -> Any:
    """Llama's rotary embedding pairs neighbours in llama.cpp, and halves in Hugging Face: reorder the rows."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def quantize(source: Path, path: Path, kind: str) -> None:
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    options.nthread = 2
    # By itself the quantizer keeps a head in 6 bits. All systems shall read the same number of bytes.
    options.pure = True
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(options))
    if status:
        raise RuntimeError(f"llama.cpp's quantizer failed with status {status}")


def main() -> None:
    checkpoint, path, kind = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    whole = path.with_suffix(".float16.gguf")
    write_float(checkpoint, whole)
    quantize(whole, path, kind)
    whole.unlink()
    print(f"{path}: {np.round(path.stat().st_size / 1e6)} MB")


if __name__ == "__main__":
    main()
