"""Writes a checkpoint as compressed-tensors, whose library quantizes and packs each matrix.

    pip install compressed-tensors transformers torch
    python benchmarks/compressed_model.py CHECKPOINT OUT W4A16

The scheme is one of the library's own names of integers (W4A16, W4A16_ASYM, W8A16). Weights are rounded to the nearest
level, embeddings and the head stay float, and a single matrix is in memory at a time.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationStatus,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors import safe_open
from safetensors.torch import save_file

FORMAT = "pack-quantized"


def main() -> None:
    checkpoint, out, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    scheme = preset_name_to_scheme(name, ["Linear"])
    compressor = BaseCompressor.get_value_from_registry(FORMAT)
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(checkpoint, partial, ignore=shutil.ignore_patterns("*.safetensors*"))
    stored = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - it is no mapping
                weight = tensors.get_tensor(key)
                if not key.endswith("_proj.weight"):
                    stored[key] = weight
                    continue
                groups = weight.unflatten(-1, (-1, scheme.weights.group_size))
                scale, zero_point = calculate_qparams(
                    groups.amin(-1), groups.amax(-1), scheme.weights
                )
                parts = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}
                for part, tensor in compressor.compress(parts, scheme).items():
                    stored[f"{key.removesuffix('weight')}{part}"] = tensor.contiguous()
    save_file(stored, partial / "model.safetensors", metadata={"format": "pt"})
    status = QuantizationStatus.COMPRESSED
    stated = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=FORMAT,
        ignore=["lm_head"],
        quantization_status=status,
    )
    config = json.loads((partial / "config.json").read_text()) | {
        "quantization_config": stated.model_dump(mode="json")
    }
    (partial / "config.json").write_text(json.dumps(config, indent=1))
    partial.rename(out)  # an existing folder is complete


if __name__ == "__main__":
    with torch.no_grad():
        main()
