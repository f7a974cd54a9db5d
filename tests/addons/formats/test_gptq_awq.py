"""Checkpoints quantized with GPTQ or AWQ: what is exported from them, what stays quantized, and what is refused."""

from __future__ import annotations

import gc
import json
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel

from qsample import AutoModelForCausalLM
from qsample.addons.formats.gptq_awq_layouts import Quantization
from qsample.checkpoints import checkpoint as checkpoint_module
from qsample.checkpoints.checkpoint import Checkpoint
from qsample.checkpoints.packed import packing_of
from qsample.errors import PackageError, QsampleError, UnsupportedModelError
from qsample.graph.runner import GraphRunner
from qsample.graph.weights import load_graph
from qsample.models.model import PackagedModel
from qsample.package.package import Package
from qsample.transforms.quantized_linear import quantized_layers
from tests.helpers.adapters import lora_pair, save_adapter
from tests.helpers.quantized_checkpoints import (
    Layer,
    Scheme,
    quantized_layer,
    save_quantized,
    stored_levels,
)
from tests.helpers.tiny_models import random_model, save_checkpoint

PROMPTS = [[5, 9, 200, 31, 7, 7, 120], [44, 3, 260]]


def logits(package: Package) -> np.ndarray:
    """[rows, V] after the prompts."""
    runner = GraphRunner(
        load_graph(package.file("decoder.onnx")),
        package.path,
        package.interface,
        32,
        weights_mapped=True,
    )
    lengths = np.array([len(prompt) for prompt in PROMPTS])
    ids = np.array([prompt + [0] * (max(lengths) - len(prompt)) for prompt in PROMPTS])
    result: np.ndarray = runner.step(ids, lengths, runner.start(len(ids)))["logits"]
    return result


def wanted_logits(model: PreTrainedModel) -> np.ndarray:
    with torch.no_grad():
        rows = [model(input_ids=torch.tensor([prompt])).logits[0, -1].numpy() for prompt in PROMPTS]
    return np.stack(rows)


def export(folder: Path, path: Path, **options: Any) -> Package:
    return (
        AutoModelForCausalLM.from_pretrained(folder, include_sampler=False, **options)
        .export(path)
        .package
    )


def quantized_nodes(package: Package) -> list[ir.Node]:
    return [
        node
        for node in ir.load(package.file("decoder.onnx")).graph
        if node.op_type == "MatMulNBits"
    ]


def array(node: ir.Node, slot: int) -> np.ndarray:
    tensor = node.inputs[slot].const_value  # type: ignore[union-attr]
    assert tensor is not None
    return tensor.numpy()


class Quantized(NamedTuple):
    scheme: Scheme
    model: PreTrainedModel
    layers: dict[str, Layer]
    portable: PackagedModel


def make(folder: Path, model_type: str, scheme: Scheme, **options: Any) -> Quantized:
    model, layers = save_quantized(folder / "checkpoint", model_type, scheme, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # nothing becomes float
        package = export(folder / "checkpoint", folder / "package")
    return Quantized(scheme, model, layers, PackagedModel(package))


@pytest.fixture(scope="module")
def act_order(tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    """A Llama with a tied head, quantized in act-order, in several files."""
    return make(
        tmp_path_factory.mktemp("act"),
        "llama",
        Scheme(act_order=True),
        files=3,
        tie_word_embeddings=True,
    )


def check(quantized: Quantized) -> None:
    """The package computes what the integers mean, and holds them as they are."""
    package, wanted = quantized.portable.package, wanted_logits(quantized.model)
    np.testing.assert_allclose(logits(package), wanted, atol=1e-4 * np.abs(wanted).max())
    bits, nodes = quantized.scheme.bits, quantized_nodes(package)
    assert len(nodes) == len(quantized.layers)
    stored = sorted(
        stored_levels(array(node, 1).reshape(len(array(node, 1)), -1), bits).tobytes()
        for node in nodes
    )
    assert stored == sorted(
        in_order(layer, quantized.scheme).astype(np.uint8).tobytes()
        for layer in quantized.layers.values()
    )
    summary = package.manifest.packed_weights
    assert summary is not None
    assert (summary["matrices"], summary["bits"]) == (len(quantized.layers), [bits])
    # No float copy of a quantized weight is left.
    floats = sum(weight.numel() for weight in quantized.model.parameters()) - sum(
        layer.weight.size for layer in quantized.layers.values()
    )
    assert (
        package.file("decoder.onnx.data").stat().st_size < 4 * floats + summary["bytes"] + 200_000
    )


@pytest.mark.ci
def test_act_order_in_a_tied_model_of_several_files(act_order: Quantized) -> None:
    check(act_order)


@pytest.mark.parametrize(
    ("model_type", "scheme", "options"),
    [
        pytest.param("qwen3", Scheme("awq"), {"files": 2}, marks=pytest.mark.slow),
        pytest.param("llama", Scheme(group_size=64), {}, marks=pytest.mark.slow),
        pytest.param("llama", Scheme(group_size=-1, version=2), {}, marks=pytest.mark.slow),
        pytest.param("qwen2", Scheme(symmetric=True, group_size=128), {}, marks=pytest.mark.slow),
        pytest.param("gpt2", Scheme(bits=8), {"n_embd": 128}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_other_families_and_layouts(
    model_type: str, scheme: Scheme, options: dict[str, Any], tmp_path: Path
) -> None:
    check(make(tmp_path, model_type, scheme, **options))


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme("awq"),
        Scheme(bits=2),
        Scheme(bits=3, group_size=64),
        Scheme(bits=8, act_order=True),
        Scheme(group_size=-1),
        Scheme(group_size=128, symmetric=True),
    ],
    ids=str,
)
def test_the_room_that_is_asked_for(
    scheme: Scheme, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is written: what the copy in blocks takes, and not what the checkpoint does."""
    save_quantized(
        tmp_path / "checkpoint", "llama", scheme, vocab_size=4000
    )  # the table is not copied
    asked: list[int] = []
    monkeypatch.setattr(
        checkpoint_module, "check_free", lambda folder, needed, what: asked.append(needed)
    )
    (tmp_path / "scratch").mkdir()
    model = Checkpoint(str(tmp_path / "checkpoint")).load(scratch=tmp_path / "scratch")
    written = sum(
        file.stat().st_size for file in (tmp_path / "scratch").rglob("*") if file.is_file()
    )
    weights = [weight for _, weight in quantized_layers(model)]
    orders = sum(
        weight.order.nbytes for weight in weights if weight.order is not None
    )  # nothing, in a layer of size
    assert asked == [pytest.approx(written - orders, rel=0.06, abs=400 * len(weights) + 1000)]

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    (tmp_path / "full").mkdir()
    with pytest.raises(
        PackageError,
        match=r"has 0\.0 MB free and the copy of the quantized weights in blocks needs",
    ):
        Checkpoint(str(tmp_path / "checkpoint")).load(scratch=tmp_path / "full")
    assert os.listdir(tmp_path / "full") == []


def in_order(layer: Layer, scheme: Scheme) -> np.ndarray:
    """[N, K]: the levels with the inputs of one group behind one another."""
    if scheme.method == "awq":
        return layer.levels
    return layer.levels[:, np.argsort(layer.tensors["g_idx"].numpy(), kind="stable")]


@pytest.mark.ci
@pytest.mark.parametrize("weights", [None, pytest.param("int4", marks=pytest.mark.slow)])
def test_compiling_keeps_the_blocks(
    weights: str | None, act_order: Quantized, tmp_path: Path
) -> None:
    layers = act_order.layers
    compiled = act_order.portable.compile(tmp_path / "compiled", ctx_len=32, weights=weights)
    compilation = compiled.package.manifest.compilation
    assert compilation is not None
    assert compilation.quantization is not None
    head = int(weights is not None)
    assert compilation.quantization.get("matrices", 0) == head
    assert compilation.quantization["packed_matrices"] == len(layers)
    # Activations in 8 bits change little; the head of a random model in 4 bits changes more.
    assert compilation.quantization["divergence"]["kl"]["value"] < (0.5 if head else 0.01)

    operators = compilation.placement["CPUExecutionProvider"]
    assert (operators["GroupQueryAttention"], operators.get("GatherBlockQuantized", 0)) == (2, head)
    # Queries, keys and values are one matrix, gate and up another, of each of the two layers.
    nodes = quantized_nodes(compiled.package)
    assert len(nodes) == 4 * 2 + head
    assert {node.attributes.get_int("accuracy_level", 0) for node in nodes} == {4}
    # The integers are still those of the checkpoint, the rows of one behind those of another.
    stored = {
        stored_levels(array(node, 1).reshape(len(array(node, 1)), -1), 4).tobytes()
        for node in nodes
    }
    for name, parts in (
        ("self_attn", ("q_proj", "k_proj", "v_proj")),
        ("mlp", ("gate_proj", "up_proj")),
    ):
        rows = [
            in_order(layers[f"model.layers.1.{name}.{part}"], act_order.scheme) for part in parts
        ]
        assert np.concatenate(rows).astype(np.uint8).tobytes() in stored
    output = compiled.generate([PROMPTS[0]], do_sample=False, max_new_tokens=4, eos_token_id=())
    assert len(output.token_ids[0]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("case", ["groups", "experts"])
def test_what_cannot_stay_quantized_becomes_float(case: str, tmp_path: Path) -> None:
    model_type, scheme = (
        ("llama", Scheme(group_size=8)) if case == "groups" else ("mixtral", Scheme())
    )
    model, layers = save_quantized(tmp_path / "checkpoint", model_type, scheme)
    reason = (
        "no block of 16 inputs lies within one group"
        if case == "groups"
        else "merged into other weights"
    )
    with pytest.warns(
        UserWarning, match=rf"of {len(layers)} quantized matrices become float: .*{reason}"
    ):
        package = export(tmp_path / "checkpoint", tmp_path / "package")
    assert len(quantized_nodes(package)) == (0 if case == "groups" else 8)
    wanted = wanted_logits(model)
    np.testing.assert_allclose(logits(package), wanted, atol=1e-4 * np.abs(wanted).max())


def test_an_adapter_makes_the_layer_float(tmp_path: Path) -> None:
    save_quantized(tmp_path / "checkpoint", "llama", Scheme())
    save_adapter(tmp_path / "adapter", lora_pair("model.layers.0.mlp.up_proj", 256, 128))
    with pytest.warns(
        UserWarning,
        match="1 of 14 .* 1 because they were merged into other weights, or changed by an",
    ):
        model = Checkpoint(str(tmp_path / "checkpoint"), adapter=str(tmp_path / "adapter")).load()
    assert len(list(quantized_layers(model))) == 13


@pytest.mark.slow
def test_half_precision(tmp_path: Path) -> None:
    model, layers = save_quantized(tmp_path / "checkpoint", "llama", Scheme("awq"))
    package = export(tmp_path / "checkpoint", tmp_path / "package", dtype="float16")
    assert len(quantized_nodes(package)) == len(layers)
    assert array(quantized_nodes(package)[0], 2).dtype == np.float16
    wanted = wanted_logits(model)
    np.testing.assert_allclose(logits(package), wanted, atol=0.03 * np.abs(wanted).max())


def save_mxfp4(folder: Path) -> dict[str, torch.Tensor]:
    """A random gpt-oss whose experts are in MXFP4 (OCP Microscaling Formats 1.0): blocks of 32 numbers of four bits,
    the first in the low bits, and an exponent each. Returns what its experts mean."""
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = torch.cat([magnitudes, -magnitudes])
    random_model("gpt_oss").save_pretrained(folder)
    stored, meant = load_file(folder / "model.safetensors"), {}
    for name in [
        name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]:
        experts, inputs, outputs = stored.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        exponents = torch.randint(118, 124, (experts, outputs, inputs // 32), dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
        pairs = torch.stack([numbers[(blocks & 15).long()], numbers[(blocks >> 4).long()]], -1)
        values = (
            pairs.reshape(experts, outputs, inputs // 32, 32)
            * torch.exp2(exponents.float() - 127)[..., None]
        )
        meant[name] = values.reshape(experts, outputs, inputs).transpose(1, 2)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    state_quantization(
        folder, quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "lm_head"]
    )
    return meant


def save_fp8(folder: Path) -> dict[str, torch.Tensor]:
    """A random Llama whose projections are in float8, with a scale a block of 128 by 128. Returns what they mean."""
    random_model("llama", hidden_size=128, intermediate_size=128).save_pretrained(folder)
    stored, meant = load_file(folder / "model.safetensors"), {}
    for name in [name for name in stored if "_proj" in name]:
        scale = stored[name].abs().max() / 448
        stored[name] = (stored[name] / scale).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale.reshape(1, 1)
        meant[name] = stored[name].float() * scale
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    state_quantization(
        folder, quant_method="fp8", weight_block_size=[128, 128], activation_scheme="dynamic"
    )
    return meant


def state_quantization(folder: Path, **options: Any) -> None:
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stated | {"quantization_config": options}))


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_methods_that_transformers_turns_into_float(method: str, tmp_path: Path) -> None:
    if method == "fp8":
        pytest.importorskip("accelerate")
    meant = (save_fp8 if method == "fp8" else save_mxfp4)(tmp_path / "checkpoint")
    with pytest.warns(UserWarning, match=f"its {method} weights become float32, in memory and in"):
        model = Checkpoint(str(tmp_path / "checkpoint")).load()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not hasattr(model.config, "quantization_config")
    for name, weight in meant.items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=0, atol=0)


def test_a_refusal_comes_before_the_weights(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "checkpoint", "llama")
    state_quantization(folder, quant_method="hqq")
    (folder / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(UnsupportedModelError, match="is quantized with hqq"):
        AutoModelForCausalLM.from_pretrained(folder).export(tmp_path / "package")
    assert not (tmp_path / "package").exists()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"model.layers.0.mlp.up_proj.scales": None},
            QsampleError,
            r"layer model\.layers\.0\.mlp\.up_proj cannot be read: it has no scales",
        ),
        (
            {"model.layers.0.mlp.up_proj.qweight": None},
            UnsupportedModelError,
            r"scales more than .*up_proj\.g_idx",
        ),
        (
            {"model.layers.0.mlp.act.scales": torch.ones(4)},
            UnsupportedModelError,
            r"scales more .*mlp\.act\.scales",
        ),
        (
            {"model.layers.0.mlp.up_proj.bias": torch.ones(256)},
            QsampleError,
            r"has .*up_proj\.bias, which the model",
        ),
        ({"model.norm.weight": None}, QsampleError, r"checkpoint lacks model\.norm\.weight"),
        (
            {"model.layers.0.mlp.up_proj.qzeros": torch.zeros(2, 2, dtype=torch.int32)},
            QsampleError,
            "do not fit",
        ),
        (
            {"model.layers.0.mlp.up_proj.weight": torch.ones(2)},
            QsampleError,
            r"both a qweight and a weight for .*up_proj",
        ),
        (
            {
                f"model.layers.0.mlp.up_proj.{name}": tensor
                for name, tensor in quantized_layer(
                    np.random.default_rng(0), 256, 64, Scheme()
                ).tensors.items()
            },
            QsampleError,
            r"up_proj stands for a weight of \[256, 64\], and the model's is \[256, 128\]",
        ),
    ],
)
def test_a_damaged_checkpoint(
    change: dict[str, Any],
    error: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is left of what was written, where the caller gave no folder for it."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    folder = tmp_path / "checkpoint"
    save_quantized(folder, "llama", Scheme())
    tensors = {**load_file(folder / "model.safetensors"), **change}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(error, match=message):
        Checkpoint(str(folder)).load()
    assert os.listdir(tmp_path / "temporary") == []


def test_a_model_holds_its_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    save_quantized(tmp_path / "checkpoint", "llama", Scheme())
    before = set(os.listdir(tmp_path))
    model = Checkpoint(str(tmp_path / "checkpoint")).load()
    (folder,) = set(os.listdir(tmp_path)) - before
    assert folder.startswith("qsample-")
    del model
    gc.collect()
    assert set(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", b"", "cannot load the weights of"),
        ("model.safetensors", b"\xff" * 200, "cannot load the weights of"),
        ("model.safetensors.index.json", b"{", "is not an index of weights"),
        ("model.safetensors.index.json", b"[]", "is not an index of weights"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": 3}}', "is not an index of weights"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a": "gone.safetensors"}}',
            "cannot load .*gone.safetensors",
        ),
    ],
)
def test_files_that_are_no_weights(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    save_quantized(tmp_path / "checkpoint", "llama", Scheme())
    (tmp_path / "checkpoint" / "model.safetensors").unlink()
    (tmp_path / "checkpoint" / name).write_bytes(content)
    with pytest.raises(QsampleError, match=message):
        Checkpoint(str(tmp_path / "checkpoint")).load()


def config(**options: Any) -> Any:
    return AutoConfig.for_model("llama", quantization_config=options)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (
            {"quant_method": "hqq"},
            "is quantized with hqq; only float weights, awq, .* compile that with weights=",
        ),
        (
            {"bits": 5},
            r"is quantized with gptq in a form .*'bits': 5.*; accepted is gptq or gptq_v2",
        ),
        ({"checkpoint_format": "marlin"}, "is quantized with gptq .*'checkpoint_format': 'marlin'"),
        ({"is_marlin_format": True}, "is quantized with gptq .*'is_marlin_format': True"),
        ({"pack_dtype": "int16"}, "is quantized with gptq .*'pack_dtype': 'int16'"),
        (
            {"quant_method": "awq", "version": "gemv"},
            "is quantized .*'version': 'gemv'.* accepted is gemm, with 4 bits",
        ),
        (
            {"quant_method": "awq", "bits": 8, "version": "gemm"},
            "is quantized with awq .*'bits': 8",
        ),
        *((stated, "must be an object with a quant_method") for stated in ("gptq", ["gptq"], 4)),
        *(
            ({"quant_method": method, name: value}, f"the quantization's {message}")
            for method in ("gptq", "awq")
            for name, value, message in (
                ("group_size", 0, "group_size is 0; it must be 1 or more, or -1"),
                ("group_size", -2, "group_size is -2; it must be 1 or more, or -1"),
                ("group_size", True, "group_size is True; it must be an integer"),
                ("group_size", "128", "group_size is '128'; it must be an integer"),
                ("group_size", 64.0, "group_size is 64.0; it must be an integer"),
                ("group_size", None, "group_size is None; it must be an integer"),
                ("group_size", [128], r"group_size is \[128\]; it must be an integer"),
                ("q_group_size", 0, "group_size is 0"),
                ("bits", "4", "bits is '4'; it must be an integer"),
                ("bits", True, "bits is True; it must be an integer"),
                ("bits", None, "bits is None; it must be an integer"),
                ("sym", "false", "sym is 'false'; it must be true or false"),
            )
        ),
    ],
)
def test_unreadable_configurations_are_refused(stated: Any, message: str) -> None:
    if isinstance(stated, dict):
        stated = {"quant_method": "gptq", "bits": 4} | stated
    with pytest.raises(
        UnsupportedModelError, match=rf"^some/model:? {message}|^some/model: .*{message}"
    ):
        packing_of(SimpleNamespace(quantization_config=stated), "some/model")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "read"),
    [
        (
            {
                "quant_method": "gptq",
                "bits": 3,
                "group_size": 64,
                "sym": False,
                "checkpoint_format": "gptq_v2",
            },
            Quantization("gptq", 3, 64, symmetric=False, version=2),
        ),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": -1}, Quantization("awq", 4, -1)),
        (
            {
                "quant_method": "gptq",
                "bits": 4,
                "dynamic": {"+:.*down.*": {"bits": 8, "group_size": 32}},
            },
            Quantization("gptq", 4, 128, mixed=True),
        ),
    ],
)
def test_readable_configurations(options: dict[str, Any], read: Quantization) -> None:
    assert packing_of(config(**options), "some/model") == read


def test_a_model_without_quantization() -> None:
    assert packing_of(AutoConfig.for_model("llama"), "some/model") is None
