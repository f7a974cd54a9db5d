"""GGUF files as checkpoints: the weights and logits of the models that they were written of."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from qsample import AutoModelForCausalLM, cli
from qsample.addons.formats.gguf.checkpoint import _SAMPLING_KEYS, GgufCheckpoint
from qsample.addons.formats.gguf.file import GgufFile
from qsample.addons.formats.gguf.models import read_model
from qsample.errors import QsampleError, UnsupportedModelError
from qsample.package.disk.source_files import SourceFiles
from qsample.transforms.deferred import computing, deferred, numbers
from qsample.transforms.quantized_experts import quantized_experts
from qsample.transforms.quantized_linear import quantized_layers
from tests.helpers.adapters import lora_pair, save_adapter
from tests.helpers.tiny_models import byte_tokenizer, random_model

gguf = pytest.importorskip("gguf")
from tests.helpers.gguf_files import MODELS, buffers, tiny_lm_gguf, write_gguf  # noqa: E402

IDS = torch.randint(5, 300, (2, 48), generator=torch.Generator().manual_seed(1))
ALWAYS = ("llama, of Llama 3", "gemma3", "phi3, longrope", "gpt-oss")


def with_norms(model: PreTrainedModel) -> PreTrainedModel:
    """Norms, biases and factors of layers that are not all the same."""
    with torch.no_grad():
        for parameter in [*model.parameters(), *(buffer for _, buffer in buffers(model))]:
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def opened(path: Path, **options: Any) -> GgufCheckpoint:
    return GgufCheckpoint(read_model(path), str(path), **options)


def logits(model: PreTrainedModel) -> np.ndarray:
    with torch.no_grad(), computing():
        return np.asarray(model(IDS).logits)


@pytest.mark.parametrize(
    "name",
    [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.ci) for name in MODELS],
)
def test_a_file_is_the_model_that_it_was_written_of(
    name: str, tmp_path: Path, nothing_is_small: None
) -> None:
    kind, settings = MODELS[name]
    model = with_norms(random_model(kind, **settings))
    checkpoint = opened(
        write_gguf(tmp_path / "model.gguf", model, lambda name: "F16" if "ffn" in name else "F32")
    )
    assert checkpoint.file.architecture == name.partition(",")[0]
    wanted = logits(model)
    loaded = checkpoint.load(scratch=tmp_path)
    assert {key: parameter.shape for key, parameter in loaded.named_parameters()} == {
        key: parameter.shape for key, parameter in model.named_parameters()
    }
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(
            numbers(loaded.get_parameter(key).data), parameter.data, rtol=0, atol=0
        )
    np.testing.assert_allclose(logits(loaded), wanted, atol=2e-5 * np.abs(wanted).max())
    origin = checkpoint.origin(SourceFiles())
    assert origin.model_id == "model.gguf"
    assert origin.files == {"model.gguf": tmp_path / "model.gguf"}
    if "mlp.down_proj.weight" in str(list(checkpoint.outline.shapes)):
        mapped = deferred(loaded.get_parameter("model.layers.1.mlp.down_proj.weight"))
        assert mapped is not None
        assert (mapped.dtype, mapped.place.path) == (torch.float16, checkpoint.file.path)


@pytest.mark.parametrize(
    ("kind", "leave_out"),
    [
        ("llama", r".*(attn_output|ffn_\w+)\.bias"),
        ("llama", r".*(attn_q|ffn_gate)\.bias|blk\.0\.\w+\.bias"),
        ("granite", r".*(attn_\w+|ffn_up|ffn_down)\.bias"),
    ],
)
def test_biases_that_a_file_lacks_are_zero(kind: str, leave_out: str, tmp_path: Path) -> None:
    """As in llama.cpp; transformers has all biases of the attention, or none."""
    settings = next(settings for model_type, settings in MODELS.values() if model_type == kind)
    biased = {**settings, "attention_bias": True, "mlp_bias": True}
    model = with_norms(random_model(kind, **biased))
    checkpoint = opened(write_gguf(tmp_path / "model.gguf", model, leave_out=leave_out))
    wanted = logits(model)
    np.testing.assert_allclose(
        logits(checkpoint.load(scratch=tmp_path)), wanted, atol=2e-5 * np.abs(wanted).max()
    )


@pytest.mark.parametrize(
    ("kind", "leave_out"),
    [("llama", r"blk\.1\.attn_v\.weight"), ("qwen2", r"blk\.1\.attn_k\.bias")],
)
def test_a_file_without_weights_that_llama_cpp_wants_is_damaged(
    kind: str, leave_out: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model(kind), leave_out=leave_out)
    with pytest.raises(QsampleError, match=r"lacks .*it is damaged"):
        opened(path).load(scratch=tmp_path)


@pytest.mark.parametrize("kind", ["Q4_1", "BF16"])
def test_rows_in_another_order(kind: str, tmp_path: Path) -> None:
    """Of queries and keys; and a tied table."""
    model = random_model("llama", tie_word_embeddings=True)
    path = write_gguf(tmp_path / "model.gguf", model, lambda name: kind)
    loaded = opened(path).load()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(loaded.get_parameter(key).data, parameter.data, rtol=0, atol=0)


def quantized_mixture(
    path: Path, kind: str, types: dict[str, str], **sizes: Any
) -> tuple[PreTrainedModel, Path]:
    """A mixture, and its file with experts of a type for each of gate, up and down; the rest is
    F32."""

    def type_of(name: str) -> str:
        _, _, part = name.partition("ffn_")
        return types.get(part.removesuffix("_exps.weight"), "F32")

    model = with_norms(random_model(kind, **({"intermediate_size": 64} | sizes)))
    return model, write_gguf(path / "model.gguf", model, type_of)


def of_type(name: str) -> dict[str, str]:
    return dict.fromkeys(("gate", "up", "gate_up", "down"), name)


def in_order(name: str, weight: torch.Tensor, kind: str) -> np.ndarray:
    """Experts' float matrices as an MoE has them: [E, N, K], gate and up in turns."""
    matrices = weight.numpy()
    if kind == "gpt_oss":
        return matrices.swapaxes(1, 2)
    if "gate_up" in name:
        gate, up = np.split(matrices, 2, axis=1)
        return np.stack([gate, up], 2).reshape(matrices.shape)
    return matrices


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss", "qwen35moe", "gemma4, with experts"])
@pytest.mark.parametrize("small", [True, False], ids=["small", "large"])
def test_experts_of_integers(
    name: str, small: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Float weights and integers both mean what the gguf package reads; large ones take no
    memory."""
    if not small:
        request.getfixturevalue("nothing_is_small")
    kind, settings = MODELS[name]
    sizes = settings | {"intermediate_size": 64, "moe_intermediate_size": 64}
    model, path = quantized_mixture(tmp_path, kind, of_type("MXFP4"), **sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # nothing becomes float
        loaded = opened(path).load(scratch=tmp_path)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(
            numbers(loaded.get_parameter(key).data), parameter.data, rtol=0, atol=0
        )
    for layer in (0, 1):
        module = f"model.layers.{layer}.{'experts' if kind == 'gemma4_text' else 'mlp.experts'}"
        found = quantized_experts(loaded.get_submodule(module))
        assert found.keys() == {"gate_up_proj", "down_proj"}
        for parameter, stored in found.items():
            assert small or deferred(stored.blocks) is not None
            levels = numbers(stored.blocks).numpy().astype(np.float64) - 128
            meant = levels * np.repeat(numbers(stored.scales).numpy(), stored.block_size, -1)
            wanted = model.get_parameter(f"{module}.{parameter}").data
            np.testing.assert_array_equal(meant, in_order(parameter, wanted, kind))


@pytest.mark.parametrize(
    ("types", "named", "kept"),
    [
        (of_type("Q4_1"), "Q4_1", set()),
        (of_type("Q8_0") | {"down": "Q5_1"}, "Q5_1", {"gate_up_proj"}),
        ({"gate": "Q4_0", "up": "Q8_0", "down": "Q4_0"}, "Q4_0 and Q8_0", {"down_proj"}),
        (of_type("Q8_0") | {"down": "F16"}, None, {"gate_up_proj"}),
        (of_type("F16"), None, set()),
    ],
)
def test_experts_that_become_float(
    types: dict[str, str], named: str | None, kept: set[str], tmp_path: Path
) -> None:
    model, path = quantized_mixture(tmp_path, "qwen3_moe", types)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        loaded = opened(path).load(scratch=tmp_path)
    messages = [str(one.message) for one in caught if "experts" in str(one.message)]
    assert len(messages) == (named is not None)
    if named is not None:
        assert f"experts of the type {named} become float32" in messages[0]
        assert "it is one of Q4_0, Q5_0, Q8_0," in messages[0]
    assert quantized_experts(loaded.model.layers[1].mlp.experts).keys() == kept
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(
            numbers(loaded.get_parameter(key).data), parameter.data, rtol=0, atol=0
        )


@pytest.mark.parametrize(
    ("kind", "types", "bits"),
    [
        pytest.param("qwen3_moe", of_type("Q4_0"), 4, marks=pytest.mark.slow),
        pytest.param("gpt_oss", of_type("MXFP4"), 8, marks=pytest.mark.slow),
        # QMoE has a single number of bits, and a single block size: TQ2_0 has 4 bits and 256.
        pytest.param("gpt_oss", of_type("Q8_0") | {"down": "TQ2_0"}, 8, marks=pytest.mark.slow),
    ],
    ids=["Q4_0", "MXFP4", "Q8_0 and TQ2_0"],
)
def test_a_mixture_is_compiled_with_its_integers(
    kind: str,
    types: dict[str, str],
    bits: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The portable graph computes in float32, as its parity gate has found; QMoE has the numbers of
    the file."""
    import onnx_ir as ir

    sizes = {"intermediate_size": 256, "num_hidden_layers": 1}
    model, path = quantized_mixture(tmp_path, kind, types, **sizes)
    portable = AutoModelForCausalLM.from_pretrained(path).export(tmp_path / "portable")
    compiled = portable.compile(tmp_path / "compiled", ctx_len=32)
    layers = model.config.num_hidden_layers
    experts = 4 * layers
    assert portable.package.manifest.packed_weights["experts"] == experts
    assert bits in portable.package.manifest.packed_weights["bits"]
    assert compiled.package.manifest.compilation.quantization["packed_experts"] == experts
    names = [node.op_type for node in ir.load(portable.package.file("decoder.onnx")).graph]
    assert (names.count("MoE"), names.count("QMoE")) == (layers, 0)

    graph = ir.load(compiled.package.file("decoder.onnx")).graph
    mixtures = [node for node in graph if node.op_type == "QMoE"]
    assert len(mixtures) == layers
    for layer, node in enumerate(mixtures):
        assert node.attributes.get_int("expert_weight_bits", 0) == bits
        block = node.attributes.get_int("block_size", 0)
        for name, slot in (("gate_up_proj", 2), ("down_proj", 5)):
            levels, scales = (value.const_value.numpy() for value in node.inputs[slot : slot + 2])
            if bits == 4:
                levels = np.stack([levels & 15, levels >> 4], -1).reshape(*levels.shape[:2], -1)
            meant = (levels.astype(np.float64) - 2 ** (bits - 1)) * np.repeat(scales, block, -1)
            wanted = model.get_parameter(f"model.layers.{layer}.mlp.experts.{name}").data
            np.testing.assert_array_equal(meant, in_order(name, wanted, kind))

    assert cli.run(["inspect", str(compiled.package.path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"and {experts} experts as the checkpoint packed them" in shown
    assert f"and {experts} experts of the checkpoint" in shown


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16"])
def test_values_of_linear_attention_in_another_order(kind: str, tmp_path: Path) -> None:
    """Rows, and inputs, whose blocks of integers change places with them."""
    settings = MODELS["qwen35"][1] | {
        "hidden_size": 256,
        "intermediate_size": 256,
        "linear_num_value_heads": 8,
    }
    model = random_model("qwen3_5_text", **settings)
    path = write_gguf(tmp_path / "model.gguf", model, lambda name: kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # nothing becomes float
        loaded = opened(path).load(scratch=tmp_path)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(
            numbers(loaded.get_parameter(key).data), parameter.data, rtol=0, atol=0
        )
    blocks = dict(quantized_layers(loaded))
    assert len(blocks) == (0 if kind == "F16" else 2 * 8 + 7 + 2)
    np.testing.assert_allclose(logits(loaded), logits(model), atol=2e-4)


def test_layers_that_predict_further_tokens_are_left_out_by_name(tmp_path: Path) -> None:
    kind, settings = MODELS["qwen35"]
    model = random_model(kind, **settings)
    file = read_model(write_gguf(tmp_path / "model.gguf", model))
    extra = {
        f"blk.3.{name}.weight": file.tensors["blk.0.ffn_up.weight"]
        for name in ("nextn.eh_proj", "nextn.shared_head_norm", "ffn_up", "attn_q")
    }
    metadata = file.metadata | {
        "qwen35.block_count": 4,
        "qwen35.nextn_predict_layers": 1,
        "qwen35.attention.recurrent_layers": [True, False, True, False],
        "qwen35.attention.head_count_kv": [2, 2, 2, 4],
    }
    file = replace(file, metadata=metadata, tensors=file.tensors | extra)
    with pytest.warns(
        UserWarning, match=r"some\.gguf: its layers .* tokens \(blk\.3\) are left out"
    ):
        loaded = GgufCheckpoint(file, "some.gguf").load()
    wanted = logits(model)
    np.testing.assert_allclose(logits(loaded), wanted, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.ci
def test_keys_and_values_that_a_layer_shares_are_not_read(tmp_path: Path) -> None:
    kind, settings = MODELS["gemma4, of E2B"]
    model = random_model(kind, **settings)
    file = read_model(write_gguf(tmp_path / "model.gguf", model, lambda name: "Q8_0"))
    names = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
    extra = {f"blk.2.{name}": file.tensors[f"blk.0.{name}"] for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # no matrix is left over
        loaded = GgufCheckpoint(replace(file, tensors=file.tensors | extra), "some.gguf").load(
            scratch=tmp_path
        )
    wanted = logits(model)
    np.testing.assert_allclose(logits(loaded), wanted, atol=2e-5 * np.abs(wanted).max())


def test_gates_of_experts_in_two_tensors(tmp_path: Path) -> None:
    """Converters write both, or one of both."""
    kind, settings = MODELS["gemma4, with experts"]
    model = random_model(kind, **settings)
    file = read_model(write_gguf(tmp_path / "model.gguf", model))
    tensors = dict(file.tensors)
    for layer in range(4):
        whole = tensors.pop(f"blk.{layer}.ffn_gate_up_exps.weight")
        count, width, inputs = whole.shape
        assert count == 4
        halves = np.fromfile(file.path, np.float32, count * width * inputs, offset=whole.offset)
        gate_and_up = np.split(halves.reshape(whole.shape), 2, 1)
        for name, half in zip(("gate", "up"), gate_and_up, strict=True):
            raw = file.path.read_bytes() + half.tobytes()
            key = f"blk.{layer}.ffn_{name}_exps.weight"
            offset = file.path.stat().st_size
            file.path.write_bytes(raw)
            tensors[key] = replace(
                whole, name=key, shape=half.shape, offset=offset, length=half.nbytes
            )
    loaded = GgufCheckpoint(replace(file, tensors=tensors), "some.gguf").load()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(loaded.get_parameter(key).data, parameter.data, rtol=0, atol=0)


def test_settings_of_generate_and_tokens(tmp_path: Path) -> None:
    def add(writer: Any) -> None:
        writer.add_float32("general.sampling.temp", 0.6)
        writer.add_int32("general.sampling.top_k", 20)
        writer.add_string("general.sampling.min_p", "much")

    checkpoint = opened(write_gguf(tmp_path / "model.gguf", random_model("qwen2"), add=add))
    settings = checkpoint.generation_config
    assert (settings.temperature, settings.top_k, settings.min_p, settings.do_sample) == (
        0.6,
        20,
        None,
        True,
    )
    metadata = checkpoint.file.metadata | {"general.sampling.temp": 0.0}
    greedy = GgufCheckpoint(
        replace(checkpoint.file, metadata=metadata), "model.gguf"
    ).generation_config
    assert (greedy.do_sample, greedy.temperature, greedy.top_k) == (False, None, None)
    assert (settings.bos_token_id, settings.pad_token_id) == (1, 0)
    assert 2 in settings.eos_token_id
    tokenizer = checkpoint.tokenizer
    assert tokenizer is not None
    assert tokenizer("Töne").input_ids[1:] == byte_tokenizer().encode(
        "Töne", add_special_tokens=False
    )
    other = GgufCheckpoint(checkpoint.file, "model.gguf", tokenizer=None)
    assert other.tokenizer is None


def test_zeros_of_the_metadata(tmp_path: Path) -> None:
    """0 switches a filter off, temperature 0 is greedy, and token 0 is a token."""
    file = read_model(write_gguf(tmp_path / "model.gguf", random_model("qwen2")))
    tokens = {f"tokenizer.ggml.{name}_token_id": 0 for name in ("bos", "eos", "padding")}
    sampling = {"general.sampling.temp": 0.5}

    def settings(**values: float) -> Any:
        changes = {f"general.sampling.{name}": value for name, value in values.items()}
        metadata = file.metadata | tokens | sampling | changes
        return GgufCheckpoint(replace(file, metadata=metadata), "model.gguf").generation_config

    assert set(_SAMPLING_KEYS) == {"temp", "top_k", "top_p", "min_p"}
    plain = settings(top_k=0, min_p=0)
    assert (plain.top_k, plain.min_p, plain.do_sample, plain.temperature) == (0, 0, True, 0.5)
    assert (plain.bos_token_id, plain.pad_token_id) == (0, 0)
    assert 0 in np.atleast_1d(plain.eos_token_id)
    assert settings(temp=0, top_k=5).do_sample is False
    assert settings(top_p=0).top_p == 0  # which calls refuse or pass over, as of any checkpoint


def test_ids_that_no_token_has_are_named_and_count_as_missing(tmp_path: Path) -> None:
    file = read_model(write_gguf(tmp_path / "model.gguf", random_model("qwen2")))
    count = file.token_count
    assert count == 320
    none = 0xFFFFFFFF
    strange = {
        "bos_token_id": none,
        "padding_token_id": count,
        "seperator_token_id": -1,
        "fim_pre_token_id": none,
        "eos_token_ids": [2, none, count],
    }
    named = {f"tokenizer.ggml.{key}": value for key, value in strange.items()}
    named["tokenizer.chat_template"] = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    file = replace(file, metadata=file.metadata | named)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint = GgufCheckpoint(file, "some.gguf")
    assert [str(warning.message) for warning in caught] == [
        f"some.gguf: tokenizer.ggml.{key} is {number}, and the file has 320 tokens; the id counts as missing"
        for key, number in [
            ("bos_token_id", none),
            ("padding_token_id", count),
            ("seperator_token_id", -1),
            ("fim_pre_token_id", none),
            ("eos_token_ids", none),
            ("eos_token_ids", count),
        ]
    ]
    settings = checkpoint.generation_config
    assert (settings.bos_token_id, settings.pad_token_id) == (None, None)
    assert settings.eos_token_id == [2]
    tokenizer = checkpoint.tokenizer
    assert tokenizer is not None
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}])["input_ids"]
    assert ids == [*byte_tokenizer().encode("ab", add_special_tokens=False), 2]
    assert tokenizer.encode("ab") == ids[:-1]
    logits(checkpoint.load())


def test_what_a_file_lacks_or_has_too_many(tmp_path: Path) -> None:
    model = random_model("llama")
    path = write_gguf(tmp_path / "model.gguf", model)
    whole = read_model(path)

    def load(tensors: dict[str, Any]) -> None:
        GgufCheckpoint(type(whole)(whole.path, whole.metadata, tensors), "some.gguf").load()

    rest = copy.copy(whole.tensors)
    norm = rest.pop("blk.1.ffn_norm.weight")
    with pytest.raises(
        QsampleError, match=r"lacks model\.layers\.1\.post_attention_layernorm\.weight"
    ):
        load(rest)
    with pytest.raises(
        UnsupportedModelError,
        match=r"tensors that llama is not known to have \(blk\.0\.attn_gate\.w",
    ):
        load(whole.tensors | {"blk.0.attn_gate.weight": norm})
    with pytest.raises(
        QsampleError,
        match=r"has model\.layers\.2\.post_attention_layernorm\.weight, which the model",
    ):
        load(whole.tensors | {"blk.2.ffn_norm.weight": norm})
    keys = whole.tensors["blk.0.attn_k.weight"]
    with pytest.raises(
        QsampleError, match=r"has model\.layers\.2\.self_attn\.k_proj\.weight, which"
    ):
        load(whole.tensors | {"blk.2.attn_k.weight": keys})
    with pytest.raises(
        QsampleError, match=r"holds model\.norm\.weight of shape .* by its metadata"
    ):
        load(whole.tensors | {"output_norm.weight": whole.tensors["blk.0.ffn_up.weight"]})


def test_float16_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"))
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float16")
    with pytest.raises(
        UnsupportedModelError,
        match=r"model\.gguf: dtype is float16, and the scales .* leave dtype out",
    ):
        model.export(tmp_path / "package")


@pytest.mark.parametrize(
    "kind",
    [pytest.param("Q4_1", marks=pytest.mark.ci), pytest.param("Q8_0", marks=pytest.mark.slow)],
)
def test_a_file_is_exported_with_its_integers(kind: str, tmp_path: Path) -> None:
    """The tokens are those of transformers on the dequantized weights."""
    import onnx_ir as ir

    path = tiny_lm_gguf(tmp_path / "model.gguf", kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # nothing becomes float
        package = AutoModelForCausalLM.from_pretrained(path).export(tmp_path / "package")
    operators = [node.op_type for node in ir.load(package.package.file("decoder.onnx")).graph]
    assert "GatherBlockQuantized" in operators
    assert operators.count("MatMulNBits") == 4 * 7 + 1
    assert package.package.manifest.packed_weights["type"] == kind
    model = opened(path).load()
    prompt = opened(path).tokenizer("And the LORD spake unto", return_tensors="pt")
    wanted = model.generate(**prompt, max_new_tokens=24, do_sample=False)[
        0, prompt.input_ids.shape[1] :
    ]
    made = package.generate("And the LORD spake unto", max_new_tokens=24, do_sample=False)
    assert made.token_ids[0] == wanted.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen35moe", "gemma4, of E2B"])
def test_newer_architectures_are_exported(name: str, tmp_path: Path) -> None:
    """The gate compares the logits; the tokens are those of transformers."""
    kind, settings = MODELS[name]
    model = with_norms(random_model(kind, **settings))
    path = write_gguf(tmp_path / "model.gguf", model, lambda name: "Q8_0")
    package = AutoModelForCausalLM.from_pretrained(path).export(tmp_path / "package")
    ids = IDS[:1, :20]
    wanted = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=[2, 319])
    made = package.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=[2, 319])
    assert made.token_ids[0] == wanted[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("kind", ["Q4_1", "F16"])
def test_the_type_of_most_weights(kind: str, tmp_path: Path) -> None:
    checkpoint = opened(tiny_lm_gguf(tmp_path / "model.gguf", kind))
    assert checkpoint.origin(SourceFiles()).weight_type == kind


def test_an_adapter_makes_the_matrices_that_it_changes_float(tmp_path: Path) -> None:
    model = random_model("qwen3")
    path = write_gguf(tmp_path / "model.gguf", model, lambda name: "Q8_0")
    save_adapter(tmp_path / "adapter", lora_pair("model.layers.0.mlp.up_proj", 96, 64))
    with pytest.warns(UserWarning, match="1 of 16 quantized matrices become float"):
        loaded = opened(path, adapter=str(tmp_path / "adapter")).load(scratch=tmp_path)
    assert len(list(quantized_layers(loaded))) == 15
    changed = numbers(loaded.get_parameter("model.layers.0.mlp.up_proj.weight").data)
    a, b = lora_pair("model.layers.0.mlp.up_proj", 96, 64).values()
    torch.testing.assert_close(
        changed, model.get_parameter("model.layers.0.mlp.up_proj.weight").data + 3 * b @ a
    )


def with_tensors_of_q8_0(file: GgufFile, *names: str, flat: bool = False) -> GgufFile:
    """The file with some float tensors as Q8_0. flat: without the axis of length 1."""
    tensors = dict(file.tensors)
    for name in names:
        old = tensors[name]
        values = file.raw(old).view(np.float32).reshape(old.shape)
        raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
        offset = file.path.stat().st_size
        file.path.write_bytes(file.path.read_bytes() + raw.tobytes())
        shape = old.shape[-1:] if flat else old.shape
        tensors[name] = replace(old, type="Q8_0", shape=shape, offset=offset, length=raw.nbytes)
    return replace(file, tensors=tensors)


def test_integers_are_read_as_such_only_for_the_matrices_of_layers(tmp_path: Path) -> None:
    """Norms, biases, convolutions and the gate of a shared expert become float, whatever their
    type."""
    kind, settings = MODELS["qwen35moe"]
    model = with_norms(random_model(kind, **settings | {"linear_conv_kernel_dim": 32}))
    file = read_model(write_gguf(tmp_path / "model.gguf", model))
    vectors = ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ssm_norm.weight")
    file = with_tensors_of_q8_0(file, *vectors, "blk.1.attn_q.weight", "blk.0.ssm_conv1d.weight")
    file = with_tensors_of_q8_0(file, "blk.0.ffn_gate_inp_shexp.weight", flat=True)
    loaded = GgufCheckpoint(file, "some.gguf").load(scratch=tmp_path)
    layers = [layer for layer, _ in quantized_layers(loaded)]
    assert layers == [loaded.get_submodule("model.layers.1.self_attn.q_proj")]
    for key, parameter in model.named_parameters():
        found = numbers(loaded.get_parameter(key).data)
        assert found.shape == parameter.shape
        # A step of Q8_0 is a 127th of the largest number of its block.
        most = float(parameter.data.abs().max()) + ("norm" in key)
        torch.testing.assert_close(found, parameter.data, rtol=0, atol=most / 127)
    changed = ("norm.weight", "layers.0.mlp.shared_expert_gate.weight", "conv1d.weight")
    for name in changed:
        key = next(key for key, _ in model.named_parameters() if key.endswith(name))
        assert not torch.equal(numbers(loaded.get_parameter(key).data), model.get_parameter(key))
