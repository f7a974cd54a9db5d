"""Export: what a package holds, which models are refused, and that a failure leaves nothing behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qsample import AutoModelForCausalLM
from qsample.checkpoints.checkpoint import Checkpoint
from qsample.errors import ParityError, QsampleError, UnsupportedModelError
from qsample.exporters import parity
from qsample.exporters.export import _save_model_files, _token_ids, weight_hash
from qsample.package import read_package
from qsample.text.tokenizer import Tokenizer as RuntimeTokenizer
from qsample.transforms.cache import DecodeContext
from qsample.transforms.decoder import LastTokenHead, apply_transforms
from tests.helpers.tiny_models import byte_tokenizer, export_without_sampler, random_model, save_checkpoint

WORDS = ["in", "the", "begin", "##ning"]


def graph_interface(path: Path) -> tuple[list[str], list[str]]:
    graph = onnx.load(path, load_external_data=False).graph
    return [value.name for value in graph.input], [value.name for value in graph.output]


def test_graphs_have_the_interface_of_the_contract(exported: Callable[..., Path]) -> None:
    everything = dict.fromkeys(("logit_bias", "allowed_tokens", "logprobs", "return_pdfs"), True)
    for features in ({}, {"include_sampler": False}, {**everything, "top_logprobs": 3}):
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


def test_weight_hash_changes_with_one_weight_and_not_with_the_export() -> None:
    model = random_model("llama")
    before = weight_hash(model)
    assert before == weight_hash(random_model("llama"))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1e-3
    assert weight_hash(model) != before


def unigram() -> Tokenizer:
    pieces = [("<unk>", 0.0), *(("\u2581" + word, -1.0) for word in ("in", "the", "begin")), ("ning", -1.5)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def word_piece() -> Tokenizer:
    vocab = {token: i for i, token in enumerate(["<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


@pytest.mark.parametrize(
    ("make", "ids"), [(unigram, [1, 2, 3, 4]), (word_piece, [1, 2, 3, 4])], ids=["unigram", "word_piece"]
)
def test_tokenizers_reach_the_runtime(make: Callable[[], Tokenizer], ids: list[int], tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make(), unk_token="<unk>")
    _save_model_files(random_model("llama"), tokenizer, tmp_path)
    assert RuntimeTokenizer(Tokenizer.from_file(str(tmp_path / "tokenizer.json"))).encode("in the beginning") == ids


def test_every_stop_token_of_the_generation_config_is_kept() -> None:
    model = random_model("llama")
    model.generation_config.eos_token_id = [2, 7, 9]
    assert tuple(_token_ids(model, byte_tokenizer()).eos) == (2, 7, 9)


@pytest.mark.parametrize(
    ("given", "kept"),
    [([2, 7, 100_000], (2, 7)), ([-1, 2, -100], (2,)), (100_000, ()), (-1, ()), ([], ()), (None, (2,))],
)
def test_stop_and_pad_tokens_that_the_model_cannot_sample_are_left_out(
    given: Any, kept: tuple[int, ...], recwarn: pytest.WarningsRecorder
) -> None:
    """With such an id every call of the package would be refused."""
    model = random_model("llama")
    model.generation_config.eos_token_id = given  # None: the configuration's, which is 2
    model.generation_config.pad_token_id = model.generation_config.bos_token_id = 100_000
    ids = _token_ids(model, byte_tokenizer())
    assert (ids.eos, ids.pad, ids.bos) == (kept, kept[0] if kept else 0, None)
    ids_given = given if isinstance(given, list) else [] if given is None else [given]
    if all(0 <= token < 1000 for token in ids_given):
        assert [str(warning.message) for warning in recwarn] == []
        assert model.generation_config.eos_token_id == given
    else:
        assert "is left out: the model's ids are 0 to" in str(recwarn.pop(UserWarning).message)
        assert model.generation_config.eos_token_id == ([*kept] or None)


def test_a_temperature_of_a_model_that_does_not_sample(tmp_path: Path) -> None:
    """As Llama 2 has it. transformers would not save it once a stop token was left out."""
    source = save_checkpoint(tmp_path / "checkpoint", "llama")
    settings = {"temperature": 0.9, "top_p": 0.6, "eos_token_id": [2, 400], "bos_token_id": 1, "pad_token_id": 0}
    (source / "generation_config.json").write_text(json.dumps(settings))
    model = Checkpoint(str(source)).load()
    with pytest.warns(UserWarning, match="eos_token_id 400 is left out"):
        _token_ids(model, None)
    _save_model_files(model, None, tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert {name: saved[name] for name in settings} == settings | {"eos_token_id": [2]}


@pytest.mark.parametrize(
    ("given", "kept"), [(5, 5), ([5, 6], 5), ([400, 6], 6), ([], None), (True, ...), ("5", ...), ([5.0], ...)]
)
def test_ids_of_any_form(given: Any, kept: Any) -> None:
    model = random_model("llama")
    model.generation_config.bos_token_id = given
    if kept is ...:
        with pytest.raises(QsampleError, match=r"bos_token_id is .* a token id, or a list of ids"):
            _token_ids(model, None)
    else:
        assert _token_ids(model, None).bos == kept


@pytest.mark.parametrize("model_type", ["llama", "opt", "bert"])
def test_the_weight_hash_does_not_see_the_transforms(model_type: str) -> None:
    model = random_model(model_type, is_decoder=True) if model_type == "bert" else random_model(model_type)
    before = weight_hash(model)
    apply_transforms(model, DecodeContext())
    assert isinstance(model.get_output_embeddings(), LastTokenHead)
    assert weight_hash(model) == before


def test_a_model_can_be_exported_twice(tmp_path: Path) -> None:
    model = random_model("qwen3")
    first = export_without_sampler(model, tmp_path / "first")
    second = export_without_sampler(model, tmp_path / "second")
    assert first.manifest.source.weight_hash == second.manifest.source.weight_hash
    assert first.manifest.parity == second.manifest.parity


def test_float16_package(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype="float16").export(tmp_path / "half")
    assert model.package.interface.dtype == "float16"
    assert model.package.manifest.parity["max_error"] < 0.1
    assert len(model.generate([[5, 6, 7]], do_sample=False, max_new_tokens=5).token_ids[0]) == 5


def test_progress_runs_from_0_to_1(tmp_path: Path) -> None:
    seen: list[tuple[str, float]] = []
    export_without_sampler(
        random_model("llama"), tmp_path / "package", progress=lambda stage, done: seen.append((stage, done))
    )
    fractions = [done for _, done in seen]
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert fractions == sorted(fractions)


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_failed_or_interrupted_export_leaves_nothing(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(parity, "check", fail)
    with pytest.raises(BaseException) as raised:  # noqa: PT011
        export_without_sampler(random_model("llama"), tmp_path / "package")
    assert raised.value is error or raised.value.__cause__ is error
    assert os.listdir(tmp_path) == []


# Bad input.


def test_a_graph_that_onnxruntime_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(*args: object, **options: object) -> None:
        raise RuntimeError("no kernel for it")

    monkeypatch.setattr(parity, "check", check)
    with pytest.raises(ParityError, match=r"onnxruntime cannot run the exported graph \(no kernel for it\)"):
        export_without_sampler(random_model("llama"), tmp_path / "package")
    assert os.listdir(tmp_path) == []


def test_models_without_a_cache_are_refused_before_tracing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qsample.exporters import export

    monkeypatch.setattr(export, "trace", lambda *_: pytest.fail("traced a model that it cannot export"))
    with pytest.raises(UnsupportedModelError):
        export_without_sampler(random_model("openai-gpt"), tmp_path / "package")
    assert os.listdir(tmp_path) == []


def test_tokenizer_larger_than_the_vocabulary(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "checkpoint", "llama", vocab_size=100)
    with pytest.raises(QsampleError, match=r"tokenizer has 260 tokens .* 100"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").export(tmp_path / "package")


def test_dtype_without_a_kernel(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"bfloat16.*float32, float16"):
        AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype="bfloat16").export(tmp_path / "package")
