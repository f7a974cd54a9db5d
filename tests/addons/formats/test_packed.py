"""Checkpoints that compressed-tensors, MLX and bitsandbytes wrote themselves: weights bit for bit the library's, tokens
transformers' with these weights, and what is refused."""

from __future__ import annotations

import json
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from qsample import AutoModelForCausalLM
from qsample.checkpoints.checkpoint import Checkpoint
from qsample.checkpoints.packed import PackedWeights, packing_of, read_packed
from qsample.checkpoints.stored_matrices import StoredMatrix
from qsample.errors import QsampleError, UnsupportedModelError
from qsample.transforms.quantized_linear import quantized_layers
from tests.helpers.packed import change_config, change_tensors, expected, sha256, unpack

NAMES = ("compressed_tensors", "mlx", "bitsandbytes", "bitsandbytes_nf4")


def read(folder: Path) -> PackedWeights:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        packing = packing_of(AutoConfig.from_pretrained(folder), "some/model")
        assert packing is not None
        return read_packed([folder / "model.safetensors"], packing)


@pytest.mark.parametrize("name", NAMES)
def test_the_weights_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    folder = unpack(name, tmp_path)
    packed = read(folder)
    found = {f"{matrix.layer}.weight": matrix.floats() for matrix in packed.matrices}
    if name == "bitsandbytes":  # two roundings, in another order
        wanted = load_file(folder / "dequantized.safetensors")
        assert len(found) == 14
        for weight, tensor in wanted.items():
            np.testing.assert_allclose(found[weight], tensor.numpy(), rtol=2**-22, atol=0)
    else:
        assert {weight: sha256(floats) for weight, floats in found.items()} == expected(folder)[
            "sha256"
        ]
    others = [f"{matrix.layer}.weight" for matrix in packed.matrices] + list(packed.others)
    assert len(others) == len(set(others))
    for matrix in packed.matrices:
        if isinstance(matrix, StoredMatrix) and matrix.shape[0] > 32:
            parts = [
                matrix.read(rows).floats() for rows in (slice(0, 32), slice(32, matrix.shape[0]))
            ]
            np.testing.assert_array_equal(np.concatenate(parts), found[f"{matrix.layer}.weight"])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if "bits" in name else pytest.mark.ci)
        for name in NAMES
    ],
)
def test_the_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = unpack(name, tmp_path / "checkpoint")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "some/model|.* at run time|.* floats of 4 or 8 bits")
        model = AutoModelForCausalLM.from_pretrained(folder, include_sampler=True, tokenizer=None)
        package = model.export(tmp_path / "package")
    wanted = expected(folder)
    output = package.generate(
        wanted["prompts"], do_sample=False, max_new_tokens=len(wanted["tokens"][0]), eos_token_id=()
    )
    assert [list(row) for row in output.token_ids] == wanted["tokens"]
    nodes = [node.op_type for node in ir.load(package.package.file("decoder.onnx")).graph]
    # Of 14 matrices, compressed_tensors has 3 of floats; mlx has one, one that is not quantized, and a tied head.
    products = {"compressed_tensors": 11, "mlx": 13, "bitsandbytes": 14, "bitsandbytes_nf4": 0}[
        name
    ]
    assert nodes.count("MatMulNBits") >= products


def test_a_group_of_each_input(tmp_path: Path) -> None:
    """The groups of GPTQ's act-order, as the releases of compressed-tensors wrote them that had them."""
    folder = unpack("actorder", tmp_path)
    weights = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": 32,
        "actorder": "group",
    }
    groups = {
        name: {"targets": ["Linear"], "weights": weights | {"symmetric": name == "a"}}
        for name in "ab"
    }
    stated = {"format": "pack-quantized", "config_groups": groups}
    config = AutoConfig.for_model(
        "llama", compression_config={"quantization_config": stated}
    )  # as it was called then
    packing = packing_of(config, "some/model")
    assert packing is not None
    assert not hasattr(config, "compression_config")
    matrices = read_packed([folder / "model.safetensors"], packing).matrices
    assert {matrix.layer: sha256(matrix.floats()) for matrix in matrices} == expected(folder)[
        "sha256"
    ]
    assert isinstance(matrices[0], StoredMatrix)
    blocks = matrices[0].read(slice(0, 48)).blocks(torch.float32)
    assert blocks is not None
    assert (blocks.block_size, blocks.order is None) == (32, False)


def test_floats_are_announced_with_their_size(tmp_path: Path) -> None:
    folder = unpack("bitsandbytes_nf4", tmp_path)
    with pytest.warns(
        UserWarning,
        match=r"14 of 14 quantized matrices hold floats .* become float32, 0\.000295 GB",
    ):
        model = Checkpoint(str(folder), tokenizer=None).load()
    assert list(quantized_layers(model)) == []
    layer = model.model.layers[0].self_attn.q_proj
    assert (
        sha256(layer.weight.numpy())
        == expected(folder)["sha256"]["model.layers.0.self_attn.q_proj.weight"]
    )


Q, GATE = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.gate_proj"
K, O = "model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.o_proj"
NVFP4 = "model.layers.1.self_attn.q_proj"
NF4 = "weight.quant_state.bitsandbytes__nf4"


def state(**changes: Any) -> Any:
    """A change of an nf4 layer's JSON."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        text = json.dumps(json.loads(bytes(tensor.numpy())) | changes)
        return torch.from_numpy(np.frombuffer(text.encode(), np.uint8).copy())

    return change


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "compressed_tensors",
            {f"{Q}.weight_packed": None},
            f"layer {Q} cannot be read: it has no weight;",
        ),
        ("compressed_tensors", {f"{Q}.weight_shape": None}, "it has no weight_shape"),
        (
            "compressed_tensors",
            {f"{Q}.weight_scale": None},
            rf"scales more than .*{Q}\.weight_packed",
        ),
        (
            "compressed_tensors",
            {f"{Q}.weight_scale": lambda t: t[:, :1]},
            r"weight_scale \[64, 1\], without weight_zero",
        ),
        ("compressed_tensors", {f"{Q}.weight_scale": lambda t: t / 0}, "infinite or none"),
        (
            "compressed_tensors",
            {f"{Q}.weight_shape": lambda t: t * 3},
            r"weight_shape says \[192, 192\]",
        ),
        (
            "compressed_tensors",
            {f"{O}.weight_zero_point": None},
            "without weight_zero_point, and no group",
        ),
        (
            "compressed_tensors",
            {f"{K}.weight_zero_point": lambda t: t[:3]},
            r"weight_zero_point is int32 \[3, 2\]",
        ),
        (
            "compressed_tensors",
            {f"{GATE}.weight": lambda t: t.short()},
            "weight is int16 .* must be int8 or float8",
        ),
        (
            "compressed_tensors",
            {"model.embed_tokens.weight": lambda t: t.char()},
            "embed_tokens.weight as int8",
        ),
        ("mlx", {f"{Q}.biases": None}, "it has no biases"),
        (
            "compressed_tensors",
            {f"{NVFP4}.weight_global_scale": lambda t: t * 0},
            "weight_global_scale is no step",
        ),
        ("mlx", {f"{Q}.weight": lambda t: t[:, :3]}, "48 inputs in 2 bits, in groups of 32"),
        ("mlx", {f"{Q}.weight": lambda t: t.view(1, 64, 4)}, "experts"),
        ("mlx", {f"{Q}.scales": None}, rf"scales more than .*{Q}\.biases"),
        (
            "mlx",
            {"model.layers.1.self_attn.v_proj.scales": lambda t: t * 0 + 127},
            "infinite or none",
        ),
        ("bitsandbytes", {f"{Q}.SCB": lambda t: t[1:]}, r"SCB is float32 \[63\], and must be"),
        (
            "bitsandbytes",
            {f"{Q}.weight_format": lambda t: t + 2},
            "weight_format is 2, and must be 0",
        ),
        ("bitsandbytes", {f"{Q}.SCB": None}, rf"scales more than .*{Q}\.weight_format"),
        ("bitsandbytes_nf4", {f"{Q}.{NF4}": None}, "quant_state is float32"),
        ("bitsandbytes_nf4", {f"{Q}.{NF4}": lambda t: t[:9]}, f"layer {Q} cannot be read: "),
        (
            "bitsandbytes_nf4",
            {f"{Q}.{NF4}": state(shape=[64, 65])},
            r"weight is uint8 \[2048\], and must be uint8 \[2080\]",
        ),
        ("bitsandbytes_nf4", {f"{Q}.{NF4}": state(blocksize=0)}, "blocksize 0"),
        ("bitsandbytes_nf4", {f"{Q}.{NF4}": state(nested_blocksize=10**15)}, None),
        ("bitsandbytes_nf4", {f"{Q}.weight.quant_map": lambda t: t / 0}, "infinite or none"),
        ("bitsandbytes_nf4", {f"{Q}.{NF4}": state(nested_offset=None)}, "nested_offset None"),
        (
            "bitsandbytes_nf4",
            {f"{Q}.weight.nested_quant_map": lambda t: t[:9]},
            r"nested_quant_map is float32 \[9\]",
        ),
    ],
)
def test_damaged_layers(
    name: str, changes: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    folder = unpack(name, tmp_path)
    change_tensors(folder, changes)
    with pytest.raises(QsampleError, match=message) if message else nullcontext():
        read(folder)


def test_scales_of_activations_and_caches_are_left_out(tmp_path: Path) -> None:
    folder = unpack("compressed_tensors", tmp_path)
    before = set(read(folder).others)
    tensors = load_file(folder / "model.safetensors")
    more = {f"{Q}.input_scale": torch.ones(1), "model.layers.0.self_attn.k_scale": torch.ones(1)}
    save_file(tensors | more, folder / "model.safetensors", metadata={"format": "pt"})
    assert set(read(folder).others) == before


def test_a_model_of_images_in_the_layout_of_mlx() -> None:
    config = AutoConfig.for_model("gemma3", quantization={"bits": 4, "group_size": 64})
    with pytest.raises(
        UnsupportedModelError, match="some/model is a gemma3 in mlx's layout, which lacks parts"
    ):
        packing_of(config, "some/model")


def test_quantized_weights_without_a_configuration(tmp_path: Path) -> None:
    folder = unpack("bitsandbytes", tmp_path / "checkpoint")
    change_config(folder, quantization_config=None)
    (tmp_path / "scratch").mkdir()
    with pytest.raises(
        QsampleError, match=r"as int8, and the config\.json beside it does not say how"
    ):
        Checkpoint(str(folder), tokenizer=None).load(scratch=tmp_path / "scratch")


def test_a_method_is_refused_before_torch_is_needed(tmp_path: Path) -> None:
    from qsample.checkpoints.source import check_checkpoint

    folder = unpack("bitsandbytes", tmp_path)
    change_config(folder, quantization_config={"quant_method": "exl3", "bits": 4.0})
    with pytest.raises(
        UnsupportedModelError,
        match="is quantized with exl3; only float weights, awq, bitsandbytes, comp",
    ):
        check_checkpoint(folder)
