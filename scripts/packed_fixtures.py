"""Makes the checkpoints with packed weights that the tests read: tests/fixtures/packed/*.tar.xz.

The libraries that define the formats quantize and write them. Each part needs another library:

    pip install 'transformers==5.23.*' torch safetensors compressed-tensors==0.20.0
    python scripts/packed_fixtures.py compressed_tensors

    pip install compressed-tensors==0.12.2     # the last releases that write the groups of GPTQ's act-order
    python scripts/packed_fixtures.py actorder

    pip install mlx==0.32.4 mlx-cpu==0.32.4 mlx-lm==0.32.2
    python scripts/packed_fixtures.py mlx

    pip install bitsandbytes==0.50.2 accelerate
    python scripts/packed_fixtures.py bitsandbytes bitsandbytes_nf4

The models are random, with two layers and 128 tokens. A folder's `expected.json` has the sha256 of each quantized
weight as the library dequantizes it, in float32, and the greedy tokens of transformers with these weights. If the
library rounds twice, `dequantized.safetensors` has some of the weights instead.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

FIXTURES = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "packed"
PROMPTS = [[1, 17, 40, 23, 9], [1, 88, 5], [1, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40]]
NEW_TOKENS = 16
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SIZES |= {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 128,
}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def main() -> None:
    for part in sys.argv[1:] or list(PARTS):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / part
            folder.mkdir()
            PARTS[part](folder)
            archive = FIXTURES / f"{part}.tar.xz"
            with tarfile.open(archive, "w:xz") as packed:
                for path in sorted(folder.iterdir()):
                    packed.add(path, path.name)
            print(f"{part}: {archive.stat().st_size} bytes")


def random_model(model_type: str, **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **SIZES, **options)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.15)
    return model.to(torch.bfloat16).eval()


def write_expected(folder: Path, model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """model: of the float checkpoint. weights: the dequantized weights by name, which replace the model's."""
    model = model.to(torch.float32)
    with torch.no_grad():
        for name, weight in weights.items():
            model.get_parameter(name).copy_(weight)
    tokens = []
    for prompt in PROMPTS:
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
        )
        tokens.append(ids[0, len(prompt) :].tolist())
    sums = {name: sha256(weight) for name, weight in weights.items()}
    (folder / "expected.json").write_text(
        json.dumps({"prompts": PROMPTS, "tokens": tokens, "sha256": sums}, indent=1)
    )


def sha256(weight: Tensor) -> str:
    """Of float32 numbers, -0 as 0."""
    return hashlib.sha256((weight.float() + 0.0).numpy().tobytes()).hexdigest()


# Projections of the two layers → arguments of compressed-tensors' QuantizationArgs, inputs in the same order.
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
INTEGERS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "0.self_attn.q_proj": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 32},
        None,
    ),
    "0.self_attn.k_proj": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
        None,
    ),
    "0.self_attn.v_proj": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}, None),
    "0.self_attn.o_proj": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "channel", "symmetric": False},
        None,
    ),
    "0.mlp.gate_proj": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, INT8),
    "0.mlp.up_proj": (
        "int-quantized",
        {"num_bits": 8, "strategy": "group", "group_size": 16, "symmetric": False},
        INT8,
    ),
    "0.mlp.down_proj": (
        "pack-quantized",
        {"num_bits": 8, "strategy": "group", "group_size": 32, "symmetric": False},
        None,
    ),
}
_FP4 = {"num_bits": 4, "type": "float"}
_FP8 = {"num_bits": 8, "type": "float"}
FLOATS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "1.self_attn.q_proj": (
        "nvfp4-pack-quantized",
        _FP4
        | {"strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn}
        | {"zp_dtype": torch.float8_e4m3fn},
        None,
    ),
    "1.self_attn.k_proj": (
        "mxfp4-pack-quantized",
        _FP4
        | {
            "strategy": "group",
            "group_size": 32,
            "scale_dtype": torch.uint8,
            "zp_dtype": torch.uint8,
        },
        None,
    ),
    "1.self_attn.v_proj": ("float-quantized", _FP8 | {"strategy": "tensor"}, None),
    "1.self_attn.o_proj": ("float-quantized", _FP8 | {"strategy": "channel"}, None),
    "1.mlp.gate_proj": (
        "float-quantized",
        _FP8 | {"strategy": "block", "block_structure": [24, 32]},
        None,
    ),
    "1.mlp.up_proj": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}, INT8),
    "1.mlp.down_proj": (
        "pack-quantized",
        {"num_bits": 2, "strategy": "group", "group_size": 32},
        None,
    ),
}


def make_compressed_tensors(folder: Path) -> None:
    """A Llama, each projection of which is stored in another format; the head is ignored."""
    from compressed_tensors.compressors import BaseCompressor, ModelCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    model = random_model("llama")
    model.save_pretrained(folder / "float")
    groups = {}
    for number, (name, (kind, weights, inputs)) in enumerate((INTEGERS | FLOATS).items()):
        groups[f"group_{number}"] = QuantizationScheme(
            targets=[rf"re:.*layers\.{name.replace('.', chr(92) + '.')}"],
            weights=QuantizationArgs(**weights),
            input_activations=None if inputs is None else QuantizationArgs(**inputs),
            format=kind,
        )
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    layers = {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "quantization_scheme")
    }
    for module in layers.values():
        args, weight = module.quantization_scheme.weights, module.weight.data.float()
        step = None
        if args.strategy == "tensor":
            low, high = weight.amin().reshape(1), weight.amax().reshape(1)
        elif args.strategy == "block":
            rows, columns = args.block_structure
            padded = torch.nn.functional.pad(weight, (0, 0, 0, -len(weight) % rows))
            blocks = padded.reshape(-1, rows, weight.shape[1] // columns, columns)
            low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
        else:
            by_group = weight.unflatten(-1, (-1, args.group_size or weight.shape[1]))
            low, high = by_group.amin(-1), by_group.amax(-1)
        if args.strategy == "tensor_group":
            step = generate_gparam(weight.amin(), weight.amax())
            module.weight_global_scale.data = step
        scale, zero_point = calculate_qparams(low, high, args, global_scale=step)
        module.weight_scale.data = scale.to(torch.bfloat16)
        module.weight_zero_point.data = zero_point
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    weights = {}
    for name, module in layers.items():
        scheme = module.quantization_scheme
        state, kind = module.state_dict(), BaseCompressor.get_value_from_registry(scheme.format)
        if (
            scheme.weights.num_bits == 4 and scheme.weights.type == "float"
        ):  # its own result is bfloat16
            scale, packed = (
                kind._decompress_scale(state["weight_scale"], torch.float32),
                state["weight_packed"],
            )
            numbers = unpack_fp4_from_uint8(packed, len(packed), packed.shape[1] * 2, torch.float32)
            step = state.get("weight_global_scale")
            weights[f"{name}.weight"] = dequantize(
                numbers, scale, args=scheme.weights, global_scale=step
            )
        else:
            state["weight_scale"] = state[
                "weight_scale"
            ].float()  # the library's result has the dtype of the scales
            weights[f"{name}.weight"] = kind.decompress(state, scheme)["weight"]
    model.save_pretrained(folder)
    compressor.update_config(folder)
    finish(folder, weights)


def make_actorder(folder: Path) -> None:
    """A layer whose inputs belong to groups out of order, symmetric and not."""
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    torch.manual_seed(0)
    stored, sums = {}, {}
    for name, symmetric in (("symmetric", True), ("asymmetric", False)):
        args = QuantizationArgs(
            num_bits=4, strategy="group", group_size=32, symmetric=symmetric, actorder="group"
        )
        weight = torch.randn(48, 128) * 0.1
        g_idx = torch.arange(128)[torch.randperm(128)] // 32
        by_group = weight[:, torch.argsort(g_idx, stable=True)].reshape(48, -1, 32)
        scale, zero_point = calculate_qparams(by_group.amin(-1), by_group.amax(-1), args)
        g_idx, compressor = g_idx.to(torch.int32), PackedQuantizationCompressor()
        options = {"zero_point": zero_point, "g_idx": g_idx}
        parts = compressor.compress_weight(weight, scale, args, **options) | {"weight_scale": scale}
        sums[name] = dequantize(
            quantize(weight, scale, args=args, dtype=torch.int8, **options), scale, **options
        )
        parts["weight_g_idx"] = g_idx
        if symmetric:
            parts.pop("weight_zero_point", None)
        stored |= {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(stored, folder / "model.safetensors")
    sums = {name: sha256(weight) for name, weight in sums.items()}
    (folder / "expected.json").write_text(json.dumps({"sha256": sums}, indent=1))


# Layers of mlx → bits and inputs of a group, or the mode.
MLX: dict[str, dict[str, Any]] = {
    "model.layers.0.self_attn.q_proj": {"bits": 2, "group_size": 32},
    "model.layers.0.self_attn.k_proj": {"bits": 3, "group_size": 32},
    "model.layers.0.self_attn.v_proj": {"bits": 5, "group_size": 64},
    "model.layers.0.self_attn.o_proj": {"bits": 6, "group_size": 32},
    "model.layers.0.mlp.gate_proj": {"bits": 8, "group_size": 64},
    "model.layers.0.mlp.up_proj": {"bits": 4, "group_size": 64},
    "model.layers.1.self_attn.k_proj": {"mode": "mxfp4", "bits": 4, "group_size": 32},
    "model.layers.1.self_attn.v_proj": {"mode": "nvfp4", "bits": 4, "group_size": 16},
    "model.layers.1.mlp.down_proj": {"mode": "mxfp8", "bits": 8, "group_size": 32},
}
MLX_FLOAT = "model.layers.1.self_attn.o_proj"


def make_mlx(folder: Path) -> None:
    """A tied Qwen3 with 4 bits in groups of 32, but for the layers of `MLX` and a layer that stays float."""
    import mlx.core as mx
    import mlx.utils
    import numpy as np
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    random_model("qwen3", tie_word_embeddings=True).save_pretrained(folder / "float")
    loaded, config = load_model(folder / "float")
    choice = {name: {"mode": "affine"} | options for name, options in MLX.items()} | {
        MLX_FLOAT: False
    }
    loaded, config = quantize_model(
        loaded, config, 32, 4, quant_predicate=lambda path, module: choice.get(path, True)
    )
    weights = {}
    for name, module in mlx.utils.tree_flatten(
        loaded.leaf_modules(), is_leaf=lambda leaf: hasattr(leaf, "weight")
    ):
        if "scales" not in module:
            continue
        parts = {"scales": module.scales, "biases": module.get("biases")}
        if module.mode == "affine":
            parts = {part: tensor.astype(mx.float32) for part, tensor in parts.items()}
        options = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
        weight = mx.dequantize(module.weight, **parts, **options, dtype=mx.float32)
        weights[f"{name}.weight"] = torch.from_numpy(np.array(weight))
    save_model(folder, loaded)
    save_config(config, config_path=folder / "config.json")
    finish(folder, weights)


def make_bitsandbytes(folder: Path) -> None:
    """A Llama in LLM.int8()."""
    from bitsandbytes.functional import int8_vectorwise_dequant
    from transformers import BitsAndBytesConfig

    random_model("llama").save_pretrained(folder / "float")
    options = BitsAndBytesConfig(load_in_8bit=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder / "float", quantization_config=options, device_map="cpu"
    )
    model.save_pretrained(folder)
    weights = {}
    for name, module in model.named_modules():
        if type(module).__name__ == "Linear8bitLt":
            weights[f"{name}.weight"] = int8_vectorwise_dequant(
                module.weight.CB, module.weight.SCB.float()
            )
    finish(folder, weights)
    # It multiplies by SCB first, and by 1 / 127 then: no scale of float32 gives every last bit.
    expected = json.loads((folder / "expected.json").read_text()) | {"sha256": {}}
    (folder / "expected.json").write_text(json.dumps(expected, indent=1))
    kept = {name: weight for name, weight in weights.items() if "layers.0.self_attn" in name}
    save_file(kept, folder / "dequantized.safetensors")


def make_bitsandbytes_nf4(folder: Path) -> None:
    """A Llama in NF4 with double quantization."""
    from bitsandbytes.functional import dequantize_4bit
    from transformers import BitsAndBytesConfig

    random_model("llama").save_pretrained(folder / "float")
    options = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder / "float", quantization_config=options, device_map="cpu", dtype=torch.float32
    )
    model.save_pretrained(folder)
    weights = {}
    for name, module in model.named_modules():
        if type(module).__name__ == "Linear4bit":
            weights[f"{name}.weight"] = dequantize_4bit(
                module.weight.data, module.weight.quant_state
            )
    finish(folder, weights)


def finish(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write what is expected of a checkpoint, and leave only what a checkpoint has."""
    write_expected(folder, AutoModelForCausalLM.from_pretrained(folder / "float"), weights)
    shutil.rmtree(folder / "float")
    for path in folder.iterdir():
        if path.name not in (
            "config.json",
            "generation_config.json",
            "expected.json",
            "model.safetensors",
        ):
            path.unlink()
    assert load_file(folder / "model.safetensors")


PARTS: dict[str, Callable[[Path], None]] = {
    "compressed_tensors": make_compressed_tensors,
    "actorder": make_actorder,
    "mlx": make_mlx,
    "bitsandbytes": make_bitsandbytes,
    "bitsandbytes_nf4": make_bitsandbytes_nf4,
}


if __name__ == "__main__":
    main()
