"""Models of packed integers, from a reader's matrices to tokens: what is exported, compiled and generated from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from qsample.checkpoints.checkpoint import Origin
from qsample.checkpoints.merge_lora import find_adapter, merge_adapter
from qsample.checkpoints.source import HubOptions
from qsample.contract.interface import Features
from qsample.exporters.export import LoadedModel, export_model
from qsample.graph.runner import GraphRunner
from qsample.graph.weights import load_graph
from qsample.models.model import PackagedModel
from qsample.package.package import Package
from qsample.transforms.deferred import computing
from tests.helpers.adapters import random_adapter
from tests.helpers.integer_models import IntegerModel, integer_model
from tests.helpers.tiny_models import byte_tokenizer

PROMPTS = [[5, 9, 200, 31, 7, 7, 120], [44, 3, 260]]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}


def export(made: IntegerModel, path: Path, **features: Any) -> Package:
    features = {"sampler": False, **features}
    loaded = LoadedModel(made.model, byte_tokenizer(), Origin("tiny"))
    return export_model(loaded, path, Features(**features))


def logits(package: Package) -> np.ndarray:
    """[rows, V] after the prompts."""
    runner = GraphRunner(
        load_graph(package.file("decoder.onnx")), package.path, package.interface, 32
    )
    lengths = np.array([len(prompt) for prompt in PROMPTS])
    ids = np.array([prompt + [0] * (max(lengths) - len(prompt)) for prompt in PROMPTS])
    result: np.ndarray = runner.step(ids, lengths, runner.start(len(ids)))["logits"]
    return result


def wanted_logits(made: IntegerModel) -> np.ndarray:
    with torch.no_grad():
        rows = [
            made.floats(input_ids=torch.tensor([prompt])).logits[0, -1].numpy()
            for prompt in PROMPTS
        ]
    return np.stack(rows)


def tokens(made: IntegerModel, prompt: list[int], count: int = 6) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        result = made.floats.generate(ids, do_sample=False, max_new_tokens=count, eos_token_id=None)
    return result[0, len(prompt) :].tolist()


def nodes(package: Package, *operators: str) -> list[ir.Node]:
    return [
        node for node in ir.load(package.file("decoder.onnx")).graph if node.op_type in operators
    ]


def q4_k_m(layer: str) -> Mapping[str, Any]:
    """Some layers of 4 bits with offsets, and some symmetric of 6 bits in blocks of 16, as in llama.cpp's Q4_K_M."""
    six = layer.endswith(("v_proj", "down_proj", "embed_tokens"))
    return {"bits": 6, "block": 16} if six else {"bits": 4, "offsets": True}


def gptq_8(layer: str) -> Mapping[str, Any]:
    order = not layer.endswith(("embed_tokens", "wte"))
    return {"bits": 8, "block": 64, "zero_points": True, "act_order": order}


def mlx_6(layer: str) -> Mapping[str, Any]:
    return {"bits": 6, "block": 64, "offsets": True}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("model_type", "make", "options"),
    [
        (
            "gemma3_text",
            q4_k_m,
            {"tie_word_embeddings": True, "layer_types": ["full_attention"], "head_dim": 64},
        ),
        pytest.param("llama", gptq_8, {"num_key_value_heads": 4}, marks=pytest.mark.slow),
        pytest.param("qwen3", mlx_6, {"tie_word_embeddings": True}, marks=pytest.mark.slow),
        pytest.param(
            "gpt2",
            lambda layer: {"bits": 4, "block": 128},
            {"n_embd": 256, "n_layer": 1},
            marks=pytest.mark.slow,
        ),
        pytest.param("llama", lambda layer: {"bits": 8, "block": 256}, {}, marks=pytest.mark.slow),
    ],
)
def test_a_packed_model(
    model_type: str,
    make: Callable[[str], Mapping[str, Any]],
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Its portable graph is the float model, its compiled one nearly so, and levels are stored once."""
    made = integer_model(model_type, tmp_path / "blocks", make, **{**SIZES, **options})
    package, wanted = export(made, tmp_path / "package"), wanted_logits(made)
    np.testing.assert_allclose(logits(package), wanted, atol=1e-5 * np.abs(wanted).max())
    assert len(nodes(package, "GatherBlockQuantized")) == 1
    tied = bool(options.get("tie_word_embeddings")) or model_type == "gpt2"
    assert len(nodes(package, "MatMulNBits")) == len(made.integers) - (not tied)
    stored = sum(
        weight.levels.size // (2 if weight.bits <= 4 else 1) for weight in made.integers.values()
    )
    uint8 = [
        value.const_value
        for value in ir.load(package.file("decoder.onnx")).graph.initializers.values()
    ]
    blocks = sum(
        tensor.nbytes for tensor in uint8 if tensor is not None and "blocks" in str(tensor.name)
    )
    assert blocks == stored

    compiled = PackagedModel(package).compile(tmp_path / "compiled", ctx_len=32)
    products = nodes(compiled.package, "MatMulNBits")
    bits = {4 if weight.bits <= 4 else 8 for weight in made.integers.values()}
    assert {node.attributes.get_int("accuracy_level", 0) for node in products} == {4}
    assert {node.attributes.get_int("bits", 0) for node in products} == bits
    if (
        make is q4_k_m
    ):  # queries and keys are one product, gate and up another: values have other bits
        assert Counter(node.attributes.get_int("bits", 0) for node in products) == {4: 3, 8: 3}
        assert (
            len(nodes(compiled.package, "ReduceSum")) == len(nodes(compiled.package, "MatMul")) == 3
        )
    compilation = compiled.package.manifest.compilation
    assert compilation is not None
    assert compilation.quantization is not None
    assert compilation.quantization["divergence"]["kl"]["value"] < 0.01  # of activations in 8 bits
    for prompt in PROMPTS:
        wanted_tokens = tokens(made, prompt)
        got = compiled.generate(
            [prompt], do_sample=False, max_new_tokens=6, eos_token_id=()
        ).token_ids[0]
        assert list(got)[:3] == wanted_tokens[:3]


def test_eager_rows_are_those_of_the_float_table(tmp_path: Path) -> None:
    made = integer_model(
        "gemma3_text", tmp_path / "blocks", q4_k_m, **SIZES, layer_types=["full_attention"]
    )
    ids = torch.tensor(PROMPTS[:1])
    with torch.no_grad(), computing():
        wanted = made.floats.get_input_embeddings()(ids)
        got = made.model.get_input_embeddings()(ids)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_tables_that_cannot_be_read_in_blocks_stay_float(tmp_path: Path) -> None:
    """An order of the inputs would be one of the rows' numbers, and no format has that."""
    with pytest.warns(UserWarning, match="1 of 9 quantized matrices become float"):
        made = integer_model(
            "llama", tmp_path / "blocks", lambda layer: {"act_order": "embed" in layer}, **SIZES
        )
    assert type(made.model.get_input_embeddings()) is nn.Embedding


@pytest.mark.slow
@pytest.mark.parametrize("make", [q4_k_m, gptq_8])
def test_adapters_of_a_packed_model(
    make: Callable[[str], Mapping[str, Any]], tmp_path: Path
) -> None:
    """As the float model with the adapter merged, before and after compile."""
    made = integer_model("llama", tmp_path / "blocks", make, **SIZES)
    package = export(made, tmp_path / "package", sampler=True, max_loras=1, max_lora_rank=4)
    folder = random_adapter(tmp_path / "adapter", package.interface, 0)
    compiled = PackagedModel(package).compile(tmp_path / "compiled", ctx_len=32)
    plain = tokens(made, PROMPTS[0])
    merge_adapter(made.floats, *find_adapter(str(folder), HubOptions()))
    merged = tokens(made, PROMPTS[0])
    assert merged != plain
    for model in (PackagedModel(package), compiled):
        for name, wanted in (("", plain), ("own", merged)):
            if name:
                model.load_adapter(name, folder)
            options = {"adapter": name} if name else {}
            output = model.generate(
                PROMPTS[:1], do_sample=False, max_new_tokens=6, eos_token_id=(), **options
            )
            assert list(output.token_ids[0])[:3] == wanted[:3]
