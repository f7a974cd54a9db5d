"""Export: what a package holds, which models are refused, and that a failure leaves nothing behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from transformers.models.llama import modeling_llama

from qsample import AutoModelForCausalLM
from qsample.contract import Features, Interface
from qsample.errors import ParityError, QsampleError, UnsupportedModelError
from qsample.exporters import export as export_module
from qsample.exporters import parity
from qsample.exporters.export import export_model, weight_hash
from qsample.package import read_package
from qsample.transforms import attention, decoder, masks, recurrent
from tests.architectures.configs import tiny_model
from tests.helpers.tiny_models import byte_tokenizer, random_model, save_checkpoint


def leftovers(folder: Path) -> list[str]:
    """Everything in `folder`, hidden staging folders included."""
    return sorted(os.listdir(folder))


def graph_interface(path: Path) -> tuple[list[str], list[str]]:
    graph = onnx.load(path, load_external_data=False).graph
    return [value.name for value in graph.input], [value.name for value in graph.output]


def test_graphs_have_the_interface_of_the_contract(exported: Callable[..., Path]) -> None:
    for features in ({}, {"include_sampler": False}, {"return_pdfs": True, "logprobs": True, "top_logprobs": 3}):
        package = read_package(exported("llama", **features))
        for name, spec in package.interface.graphs.items():
            assert graph_interface(package.path / name) == (spec.input_names, spec.output_names), (features, name)


def test_axes_and_dtypes_are_those_of_the_contract(llama_package: Path) -> None:
    package = read_package(llama_package)
    graph = onnx.load(package.path / "decoder.onnx", load_external_data=False).graph
    specs = {spec.name: spec for spec in (*package.interface.decoder.inputs, *package.interface.decoder.states)}
    for value in graph.input:
        spec, tensor = specs[value.name], value.type.tensor_type
        dims = [dim.dim_param or dim.dim_value for dim in tensor.shape.dim]
        assert dims == [package.interface.sizes.get(axis, axis) for axis in spec.axes], value.name
        assert onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type) == np.dtype(spec.dtype), value.name


def test_logits_do_not_leave_the_graph(llama_package: Path) -> None:
    _, outputs = graph_interface(llama_package / "decoder.onnx")
    assert "logits" not in outputs


def test_manifest_records_source_versions_and_parity(llama_package: Path, checkpoint: Callable[[str], Path]) -> None:
    manifest = read_package(llama_package).manifest
    assert manifest.source.model_id == str(checkpoint("llama"))
    assert (manifest.source.model_type, manifest.source.architecture) == ("llama", "LlamaForCausalLM")
    assert manifest.versions["torch"] == torch.__version__
    assert manifest.max_position_embeddings == 256
    assert (manifest.token_ids.pad, manifest.token_ids.bos, tuple(manifest.token_ids.eos)) == (0, 1, (2,))
    assert manifest.parity is not None
    assert 0 < manifest.parity["max_error"] < 1e-4
    assert manifest.parity["attention_layers"] == 2
    on_disk = json.loads((llama_package / "qsample.json").read_text())
    assert {"decoder.onnx", "initial_state.onnx", "tokenizer.json", "config.json"} <= set(on_disk["files"])


def test_the_version_of_onnxruntime_does_not_depend_on_its_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime-gpu and onnxruntime-openvino install the same module, and no distribution `onnxruntime`."""

    def installed(name: str) -> str:
        if name == "onnxruntime":
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(export_module, "version", installed)
    assert export_module._versions()["onnxruntime"] == ort.__version__


def test_weight_hash_changes_with_one_weight_and_not_with_the_export() -> None:
    model = random_model("llama")
    before = weight_hash(model)
    assert before == weight_hash(random_model("llama"))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1e-3
    assert weight_hash(model) != before


def export_tiny(model: Any, path: Path, **options: Any) -> Any:
    """Without the sampler, which these tests are not about and which takes most of the time to trace."""
    return export_model(model, byte_tokenizer(), path, Features(sampler=False), model_id="tiny", **options)


def test_a_model_can_be_exported_twice(tmp_path: Path) -> None:
    model = random_model("qwen3")
    first = export_tiny(model, tmp_path / "first")
    second = export_tiny(model, tmp_path / "second")
    assert first.manifest.source.weight_hash == second.manifest.source.weight_hash
    assert first.manifest.parity == second.manifest.parity


def test_float16_package(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype="float16").export(tmp_path / "half")
    assert model.package.interface.dtype == "float16"
    assert model.package.manifest.parity["max_error"] < 0.1
    assert len(model.generate([[5, 6, 7]], do_sample=False, max_new_tokens=5).new_token_ids[0]) == 5


def test_progress_runs_from_0_to_1(tmp_path: Path) -> None:
    seen: list[tuple[str, float]] = []
    export_tiny(random_model("llama"), tmp_path / "package", progress=lambda stage, done: seen.append((stage, done)))
    fractions = [done for _, done in seen]
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert fractions == sorted(fractions)


# Planted errors: each changes what the exported graph computes, and must be refused.


def drop(option: str) -> Callable[..., Any]:
    """What emits the operator, without one of its options."""
    original = attention._group_query_attention

    def changed(*args: Any, **options: Any) -> Any:
        query = args[2]
        return original(*args, **(options | {option: query.shape[-1] ** -0.5 if option == "scale" else None}))

    return changed


@pytest.mark.parametrize(
    ("model_type", "option"),
    [("mistral", "sliding_window"), ("gemma2", "softcap"), ("gpt_oss", "s_aux"), ("gemma3_text", "scale")],
)
def test_parity_gate_refuses_a_planted_error(
    model_type: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = {"query_pre_attn_scalar": 64} if model_type == "gemma3_text" else {}
    monkeypatch.setattr(attention, "_group_query_attention", drop(option))
    with pytest.raises(ParityError, match=r"differ from the eager model's by .*, more than"):
        export_tiny(random_model(model_type, **overrides), tmp_path / "package")
    assert leftovers(tmp_path) == []


def test_parity_gate_refuses_a_swapped_rotary_embedding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_run, real_half = decoder.run_model, modeling_llama.rotate_half

    def swapped(*args: Any) -> Any:
        with monkeypatch.context() as planted:
            planted.setattr(modeling_llama, "rotate_half", lambda states: -real_half(states))
            return real_run(*args)

    monkeypatch.setattr(decoder, "run_model", swapped)
    with pytest.raises(ParityError, match=r"differ from the eager model's by .*, more than"):
        export_tiny(random_model("llama"), tmp_path / "package")
    assert leftovers(tmp_path) == []


@pytest.mark.slow
def test_parity_gate_refuses_a_dropped_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a layer of plain operators: every key before a token is seen, whatever the model's mask says."""
    allowed = masks.MaskRule.allowed
    monkeypatch.setattr(masks.MaskRule, "allowed", lambda rule, *args: allowed(masks.MaskRule(masks.causal()), *args))
    with pytest.raises(ParityError, match="differ from the eager model's"):
        export_tiny(tiny_model("llama4_text"), tmp_path / "package")


@pytest.mark.slow
def test_parity_gate_refuses_padding_that_changes_a_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "_where", lambda rows, new, old: new.to(old.dtype))
    with pytest.raises(ParityError, match="differ from the eager model's"):
        export_tiny(tiny_model("mamba"), tmp_path / "package")


def test_parity_gate_counts_attention_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = parity.check

    def short_of_a_layer(
        decoder: Path, initial: Path, interface: Interface, expected: parity.Reference, **options: int
    ) -> Any:
        layers = interface.key_values + interface.key_values[:1]
        return real(decoder, initial, replace(interface, key_values=layers), expected, **options)

    monkeypatch.setattr(parity, "check", short_of_a_layer)
    with pytest.raises(ParityError, match="2 GroupQueryAttention nodes for 3 attention layers"):
        export_tiny(random_model("llama"), tmp_path / "package")


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_failed_or_interrupted_export_leaves_nothing(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(parity, "check", fail)
    with pytest.raises(BaseException) as raised:  # noqa: PT011
        export_tiny(random_model("llama"), tmp_path / "package")
    assert raised.value is error or raised.value.__cause__ is error
    assert leftovers(tmp_path) == []


# Bad input.


def test_unknown_model_type(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(UnsupportedModelError, match="no_such_model"):
        AutoModelForCausalLM.from_pretrained(tmp_path, tokenizer=None).export(tmp_path / "package")


def test_model_that_is_no_causal_lm(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(UnsupportedModelError, match=r"(?i)vit"):
        AutoModelForCausalLM.from_pretrained(tmp_path, tokenizer=None).export(tmp_path / "package")


def test_models_without_a_cache_are_refused_before_tracing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qsample.exporters import export

    monkeypatch.setattr(export, "trace", lambda *_: pytest.fail("traced a model that it cannot export"))
    with pytest.raises(UnsupportedModelError):
        export_tiny(random_model("openai-gpt"), tmp_path / "package")
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("model_type", ["openai-gpt", "rwkv"])
def test_what_the_configuration_tells_is_refused_before_the_weights_are_read(model_type: str, tmp_path: Path) -> None:
    random_model(model_type).config.save_pretrained(tmp_path / "checkpoint")  # there are no weights to read
    checkpoint = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", tokenizer=None)
    with pytest.raises(UnsupportedModelError, match=r"puts nothing into the cache.*docs/architectures\.md"):
        checkpoint.export(tmp_path / "package")


def test_missing_tokenizer(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path / "checkpoint")
    with pytest.raises(QsampleError, match=r"no tokenizer in .*tokenizer=None"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").export(tmp_path / "package")
    assert leftovers(tmp_path) == ["checkpoint"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", tokenizer=None).export(tmp_path / "package")
    assert len(model.generate([[5, 6]], do_sample=False, max_new_tokens=3).new_token_ids[0]) == 3


def test_tokenizer_larger_than_the_vocabulary(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "checkpoint", "llama", vocab_size=100)
    with pytest.raises(QsampleError, match=r"tokenizer has 260 tokens .* 100"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").export(tmp_path / "package")


def test_weights_that_do_not_fit_the_configuration(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "checkpoint", "llama")
    config = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps(config | {"vocab_size": 400}))
    with pytest.raises(QsampleError, match="cannot load the weights"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").export(tmp_path / "package")


def test_dtype_without_a_kernel(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"bfloat16.*float32, float16"):
        AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype="bfloat16").export(tmp_path / "package")


def test_a_path_that_is_neither_checkpoint_nor_package(tmp_path: Path) -> None:
    with pytest.raises(QsampleError, match=r"neither a config.json .* nor a qsample.json"):
        AutoModelForCausalLM.from_pretrained(tmp_path).export(tmp_path / "package")
    with pytest.raises(QsampleError, match="does not exist"):
        AutoModelForCausalLM.from_pretrained("./no/such/folder").export(tmp_path / "package")
