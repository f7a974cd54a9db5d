"""Export: what a package holds, with the weights in it or in the files of the checkpoint; which models are refused; and
that a failure leaves nothing behind."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qsample import AutoModelForCausalLM
from qsample.checkpoints.checkpoint import Checkpoint, Origin
from qsample.contract.interface import Features
from qsample.errors import PackageError, ParityError, QsampleError, UnsupportedModelError
from qsample.exporters import export, parity, portable
from qsample.exporters.export import LoadedModel, _save_model_files, _token_ids, export_model
from qsample.models.model import PackagedModel, SourceModel
from qsample.package.disk import space
from qsample.package.disk.source_files import SourceFiles
from qsample.package.package import read_package
from qsample.request.text.tokenizer import Tokenizer as RuntimeTokenizer
from qsample.request.text.tokenizer import warn_of_missing_rows
from qsample.runtime import load
from qsample.transforms.deferred import defer
from qsample.transforms.quantized_linear import QuantizedWeight, set_quantized_weight
from tests.helpers.mixtures import mixture
from tests.helpers.tiny_models import (
    byte_tokenizer,
    export_without_sampler,
    random_model,
    save_checkpoint,
)

WORDS = ["in", "the", "begin", "##ning"]


def graph_interface(path: Path) -> tuple[list[str], list[str]]:
    graph = onnx.load(path, load_external_data=False).graph
    return [value.name for value in graph.input], [value.name for value in graph.output]


def test_graphs_have_the_interface_of_the_contract(exported: Callable[..., Path]) -> None:
    everything = dict.fromkeys(("logit_bias", "allowed_tokens", "logprobs", "return_pdfs"), True)
    for features in ({}, {"include_sampler": False}, {**everything, "top_logprobs": 3}):
        package = read_package(exported("llama", **features))
        for name, spec in package.interface.graphs.items():
            assert graph_interface(package.path / name) == (spec.input_names, spec.output_names), (
                features,
                name,
            )


def test_axes_and_dtypes_are_those_of_the_contract(llama_package: Path) -> None:
    package = read_package(llama_package)
    graph = onnx.load(package.path / "decoder.onnx", load_external_data=False).graph
    specs = {
        spec.name: spec
        for spec in (*package.interface.decoder.inputs, *package.interface.decoder.states)
    }
    assert "logits" not in {value.name for value in graph.output}
    for value in graph.input:
        spec, tensor = specs[value.name], value.type.tensor_type
        dims = [dim.dim_param or dim.dim_value for dim in tensor.shape.dim]
        assert dims == [package.interface.sizes.get(axis, axis) for axis in spec.axes], value.name
        assert onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type) == np.dtype(spec.dtype), (
            value.name
        )


def test_manifest_records_source_versions_and_parity(
    llama_package: Path, checkpoint: Callable[[str], Path]
) -> None:
    manifest = read_package(llama_package).manifest
    folder = checkpoint("llama")
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    assert (manifest.source.model_id, manifest.source.files) == (folder.name, files)
    assert (manifest.source.model_type, manifest.source.architecture) == (
        "llama",
        "LlamaForCausalLM",
    )
    release = torch.__version__.partition("+")[0]  # its metadata may lack the build
    assert manifest.versions["torch"].partition("+")[0] == release
    assert manifest.max_position_embeddings == 256
    assert (manifest.token_ids.pad, manifest.token_ids.bos, tuple(manifest.token_ids.eos)) == (
        0,
        1,
        (2,),
    )
    assert manifest.parity is not None
    assert manifest.parity["max_error"] in (1e-6, 1e-5, 1e-4)
    assert manifest.parity["attention_layers"] == 2
    on_disk = json.loads((llama_package / "qsample.json").read_text())
    assert {"decoder.onnx", "initial_state.onnx", "tokenizer.json", "config.json"} <= set(
        on_disk["files"]
    )


def unigram() -> Tokenizer:
    pieces = [
        ("<unk>", 0.0),
        *(("\u2581" + word, -1.0) for word in ("in", "the", "begin")),
        ("ning", -1.5),
    ]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def word_piece() -> Tokenizer:
    vocab = {token: i for i, token in enumerate(["<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


@pytest.mark.parametrize(
    ("make", "ids"),
    [(unigram, [1, 2, 3, 4]), (word_piece, [1, 2, 3, 4])],
    ids=["unigram", "word_piece"],
)
def test_tokenizers_reach_the_runtime(
    make: Callable[[], Tokenizer], ids: list[int], tmp_path: Path
) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make(), unk_token="<unk>")
    _save_model_files(random_model("llama"), tokenizer, tmp_path)
    assert (
        RuntimeTokenizer(Tokenizer.from_file(str(tmp_path / "tokenizer.json"))).encode(
            "in the beginning"
        )
        == ids
    )


def test_every_stop_token_of_the_generation_config_is_kept() -> None:
    model = random_model("llama")
    model.generation_config.eos_token_id = [2, 7, 9]
    assert tuple(_token_ids(model, byte_tokenizer(), 320).eos) == (2, 7, 9)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([2, 7, 100_000], (2, 7)),
        ([-1, 2, -100], (2,)),
        (100_000, ()),
        (-1, ()),
        ([], ()),
        (None, (2,)),
    ],
)
def test_stop_and_pad_tokens_that_the_model_cannot_sample_are_left_out(
    given: Any, kept: tuple[int, ...], recwarn: pytest.WarningsRecorder
) -> None:
    """With such an id every call of the package would be refused."""
    model = random_model("llama")
    model.generation_config.eos_token_id = given  # None: the configuration's, which is 2
    model.generation_config.pad_token_id = model.generation_config.bos_token_id = 100_000
    ids = _token_ids(model, None, 320)
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
    settings = {
        "temperature": 0.9,
        "top_p": 0.6,
        "eos_token_id": [2, 400],
        "bos_token_id": 1,
        "pad_token_id": 0,
    }
    (source / "generation_config.json").write_text(json.dumps(settings))
    model = Checkpoint(str(source)).load()
    with pytest.warns(UserWarning, match="eos_token_id 400 is left out"):
        _token_ids(model, None, 320)
    _save_model_files(model, None, tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert {name: saved[name] for name in settings} == settings | {"eos_token_id": [2]}


def test_a_number_that_json_lacks(tmp_path: Path) -> None:
    """The package could not be opened."""
    model = random_model("llama")
    model.generation_config.temperature = float("nan")
    with pytest.raises(
        QsampleError,
        match="the model's generation_config cannot be stored: NaN is not JSON; correct",
    ):
        export_without_sampler(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "kept"),
    [(5, 5), ([5, 6], 5), ([400, 6], 6), ([], None), (True, ...), ("5", ...), ([5.0], ...)],
)
def test_ids_of_any_form(given: Any, kept: Any) -> None:
    model = random_model("llama")
    model.generation_config.bos_token_id = given
    if kept is ...:
        with pytest.raises(QsampleError, match=r"bos_token_id is .* a token id, or a list of ids"):
            _token_ids(model, None, 320)
    else:
        assert _token_ids(model, None, 320).bos == kept


@pytest.mark.slow
def test_a_model_can_be_exported_twice(tmp_path: Path) -> None:
    model = random_model("qwen3")
    first = export_without_sampler(model, tmp_path / "first")
    second = export_without_sampler(model, tmp_path / "second")
    assert first.manifest == second.manifest


@pytest.mark.ci
def test_float16_package(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "checkpoint", "llama", num_hidden_layers=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype="float16").export(
        tmp_path / "half"
    )
    assert model.package.interface.dtype == "float16"
    assert model.package.manifest.parity["max_error"] < 0.1
    assert len(model.generate([[5, 6, 7]], do_sample=False, max_new_tokens=5).token_ids[0]) == 5


@pytest.fixture
def without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """An export that writes a file in place of the graphs."""
    for name in ("trace", "fill_placeholders", "outline_scans", "lower_experts", "align_row_sums"):
        monkeypatch.setattr(export, name, lambda *_, **__: None)
    for name in ("packed_weights", "in_nibbles"):
        monkeypatch.setattr(portable, name, lambda model: None)
    monkeypatch.setattr(
        portable,
        "write_graphs",
        lambda model, interface, pad, folder, **_: (folder / "decoder.onnx").write_bytes(b""),
    )


@pytest.mark.usefixtures("without_a_trace")
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RuntimeError("no kernel for it"),
            r"onnxruntime cannot run the exported graph \(no kernel for it\)",
        ),
        (KeyboardInterrupt(), None),
        (OSError(28, "No space left on device"), None),
    ],
)
def test_a_failed_or_interrupted_export_leaves_nothing(
    error: BaseException, message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []

    def fail(decoder: Path, *args: Any, **options: Any) -> Any:
        written.append(decoder)
        assert decoder.exists()
        raise error

    monkeypatch.setattr(parity, "check", fail)
    with pytest.raises(BaseException) as raised:  # noqa: PT011
        export_without_sampler(random_model("llama"), tmp_path / "package")
    assert raised.value is error or raised.value.__cause__ is error
    assert message is None or (
        isinstance(raised.value, ParityError) and re.search(message, str(raised.value))
    )
    assert len(written) == 1
    assert os.listdir(tmp_path) == []


# Bad input.


def test_models_without_a_cache_are_refused_before_tracing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        export, "trace", lambda *_: pytest.fail("traced a model that it cannot export")
    )
    with pytest.raises(UnsupportedModelError):
        export_without_sampler(random_model("openai-gpt"), tmp_path / "package")
    assert os.listdir(tmp_path) == []


def test_tokenizer_larger_than_the_vocabulary(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "checkpoint", "llama", vocab_size=100)
    loaded = Checkpoint(str(tmp_path / "checkpoint"))
    with pytest.warns(UserWarning, match=r"the model lacks 160 of .* \(id 100\)"):
        warn_of_missing_rows(loaded.tokenizer.get_vocab(), 100)  # type: ignore[union-attr]


def test_dtype_without_a_kernel(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"bfloat16.*float32, float16"):
        AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype="bfloat16").export(
            tmp_path / "package"
        )


SIZES = {"hidden_size": 192, "intermediate_size": 512, "vocab_size": 1000, "num_hidden_layers": 1}


def large_checkpoint(
    folder: Path, dtype: torch.dtype = torch.bfloat16, **changes: object
) -> SourceModel:
    random_model("llama", **SIZES | changes).to(dtype).save_pretrained(folder, max_shard_size="1MB")  # type: ignore[arg-type]
    model = AutoModelForCausalLM.from_pretrained(folder, tokenizer=None, include_sampler=False)
    assert isinstance(model, SourceModel)
    return model


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def sizes_at_the_gate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the size of `folder` when the parity gate opens, which is after the graph is written."""
    sizes, check = [], parity.check

    def measured(*arguments: Any, **options: Any) -> Any:
        sizes.append(size(folder))
        return check(*arguments, **options)

    monkeypatch.setattr(parity, "check", measured)
    return sizes


@pytest.mark.ci
@pytest.mark.parametrize(
    "options",
    [
        {"weights": "int4"},
        pytest.param({"weights": "int8", "kv_cache_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param({}, marks=pytest.mark.slow),
    ],
)
def test_it_is_the_package_that_a_portable_one_is_compiled_to(
    options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = large_checkpoint(tmp_path / "checkpoint", tie_word_embeddings=not options)
    before = size(tmp_path / "checkpoint")
    sizes = sizes_at_the_gate(tmp_path, monkeypatch)
    portable = model.export(tmp_path / "portable")
    assert (
        size(tmp_path / "portable") < 1.05 * before + 1_000_000
    )  # the graph of the sampler is most of the rest
    there = portable.compile(tmp_path / "there", ctx_len=64, max_divergence=10, **options)
    if options == {"weights": "int4"}:
        check_asked_space(portable, tmp_path, monkeypatch)
    written = size(tmp_path)
    straight = model.compile(tmp_path / "straight", ctx_len=64, max_divergence=10, **options)
    assert sizes[1] - written < 0.1 * before + 1_000_000  # no weight is copied on the way
    for name in ("decoder.onnx.data", "config.json", "initial_state.onnx"):
        assert straight.package.manifest.files[name] == there.package.manifest.files[name]
    assert straight.package.manifest.parity == portable.package.manifest.parity
    assert straight.package.manifest.source == portable.package.manifest.source
    prompts = [[5, 6, 7], [900, 1]]
    ids = [
        package.generate(prompts, max_new_tokens=8, do_sample=False).token_ids
        for package in (there, straight)
    ]
    assert ids[0] == ids[1]
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "portable", "straight", "there"]


def check_asked_space(
    portable: PackagedModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is really written, 4 bits, scales and tables, has to fit before anything is written."""
    numbers = (
        sum(file.stat().st_size for file in (folder / "checkpoint").glob("*.safetensors")) // 2
    )
    asked: list[int] = []

    def full(folder: Path, needed: int, what: str) -> None:
        asked.append(needed)
        raise PackageError(f"{what} needs about {space.format_bytes(needed)}")

    with monkeypatch.context() as patched:
        patched.setattr(import_module("qsample.compiler.pipeline"), "check_free", full)
        with pytest.raises(PackageError, match="the package needs about"):
            portable.compile(folder / "full", ctx_len=64, weights="int4")
    assert numbers * 0.5 < asked[0] < numbers * 0.75 + 250_000
    assert sorted(os.listdir(folder)) == ["checkpoint", "portable", "there"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_no_weight_is_copied_on_the_way(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = large_checkpoint(tmp_path / "checkpoint", dtype)
    sizes = sizes_at_the_gate(tmp_path, monkeypatch)
    model.compile(tmp_path / "package", ctx_len=64, weights="int4", max_divergence=10)
    assert sizes[0] < 1.1 * size(tmp_path / "checkpoint") + 1_000_000


@pytest.mark.slow
def test_weights_that_are_computed(tmp_path: Path) -> None:
    from tests.helpers.adapters import lora_pair, save_adapter

    large_checkpoint(tmp_path / "checkpoint")
    save_adapter(tmp_path / "adapter", lora_pair("model.layers.0.mlp.up_proj", 512, 192))
    check_straight(tmp_path, adapter=str(tmp_path / "adapter"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    [
        "qwen3_moe",  # each expert on its own, gate and up too
        "mixtral",  # by other names
        "granitemoe",  # all experts in one tensor, up behind gate
    ],
)
def test_experts_are_not_copied_on_the_way(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes_of_experts = {"hidden_size": 256, "moe_intermediate_size": 96, "intermediate_size": 96}
    mixture(model_type, **sizes_of_experts).to(torch.bfloat16).save_pretrained(
        tmp_path / "checkpoint"
    )
    sizes = sizes_at_the_gate(tmp_path, monkeypatch)
    written = check_straight(tmp_path)
    assert sizes[1] - written < 0.2 * size(tmp_path / "checkpoint") + 800_000


def check_straight(folder: Path, **options: Any) -> int:
    """Check that the checkpoint compiles to what its portable package does. Returns the size of `folder` before."""
    model = AutoModelForCausalLM.from_pretrained(folder / "checkpoint", tokenizer=None, **options)
    there = model.export(folder / "portable").compile(folder / "there", ctx_len=64, weights="int8")
    before = size(folder)
    straight = model.compile(folder / "straight", ctx_len=64, weights="int8")
    name = "decoder.onnx.data"
    assert straight.package.manifest.files[name] == there.package.manifest.files[name]
    assert straight.package.manifest.parity == there.package.manifest.parity
    return before


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        SystemError("<function _find_and_load at 0x7f> returned NULL without setting an exception"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried to"
        ),
        ParityError("onnxruntime cannot run the exported graph (std::bad_alloc)"),
    ],
)
def test_memory_that_is_used_up(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is what an export under `ulimit -v` ended with."""

    def fail(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(export, "apply_transforms", fail)
    with pytest.raises(MemoryError, match=r"the export ran out of memory .*; end other programs"):
        export_without_sampler(random_model("llama"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ci
def test_a_head_that_is_longer_than_the_embedding(tmp_path: Path) -> None:
    """transformers cannot go on after a token that its embedding lacks; such a token is never sampled."""
    model = random_model("mistral", vocab_size=300, sliding_window=8)
    model.lm_head = torch.nn.Linear(64, 330)
    model.lm_head.bias.data[310:] = 100.0
    with torch.inference_mode():
        logits = model(torch.tensor([[5, 6, 7]])).logits[0, -1]
    assert logits.argmax() >= 310
    package = export_model(
        LoadedModel(model, byte_tokenizer(), Origin("tiny")), tmp_path / "package", Features()
    )
    assert package.interface.vocab_size == 300
    output = load(package.path).generate([[5, 6, 7]], do_sample=False, max_new_tokens=1)
    assert output.token_ids == [[int(logits[:300].argmax())]]


@pytest.mark.usefixtures("without_a_trace")
def test_a_package_for_a_compile_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies in the folder that was given; its files have sizes and no hashes, its weights' files are watched."""
    figures = parity.Parity(0.0, 1.0, 1e-4, 3, 14, 2, 0, "none")
    monkeypatch.setattr(parity, "check", lambda *given, **options: figures)
    source = save_checkpoint(tmp_path / "checkpoint", "llama")
    files = {"config.json": source / "config.json", "sub/w": source / "model.safetensors"}
    origin = Origin("me/tiny", "v2", "mit", "Q4_K", files)
    sources, stages = SourceFiles(), list[tuple[str, float]]()
    loaded = LoadedModel(random_model("llama"), byte_tokenizer(), origin, sources=sources)
    made = export.export_unpublished(
        loaded, tmp_path / "scratch", Features(), progress=lambda *one: stages.append(one)
    )
    assert (made.path, made.sources) == (tmp_path / "scratch", sources)
    written = {path.name: path.stat().st_size for path in made.path.iterdir()}
    assert {"config.json", "tokenizer.json", "decoder.onnx"} < {*written}
    assert {name: (one.bytes, one.sha256) for name, one in made.manifest.files.items()} == {
        name: (size, "") for name, size in written.items()
    }
    found = made.manifest.source
    assert (found.model_id, found.revision, found.license) == ("me/tiny", "v2", "mit")
    hashes = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    assert (found.files, found.architecture) == (hashes, "LlamaForCausalLM")
    assert (stages[0][1], stages[-1][1]) == (0.0, 1.0)
    assert made.manifest.packed_weights is None
    with pytest.raises(FileExistsError):
        export.export_unpublished(loaded, tmp_path / "scratch", Features())


def test_the_bytes_of_weights_as_they_are_written() -> None:
    """A quantized layer counts with its blocks, a placeholder with what it is stored in, a tied weight once."""
    model = random_model("llama", tie_word_embeddings=True)
    plain = sum(one.numel() * 4 for one in model.parameters())
    assert export._weight_bytes(model) == plain
    up, down = model.model.layers[0].mlp.up_proj, model.model.layers[1].mlp.down_proj
    blocks = torch.zeros(96, 2, 16, dtype=torch.uint8)
    set_quantized_weight(up, QuantizedWeight(4, 32, blocks, torch.zeros(96, 2)))
    stored = torch.zeros(64, 96, dtype=torch.bfloat16)
    placeholder = defer(stored.shape, torch.float32, lambda: stored, stored.dtype)
    down.weight = torch.nn.Parameter(placeholder, requires_grad=False)
    saved = (96 * 64 * 4 - 96 * 32 - 96 * 2 * 4) + 64 * 96 * 2
    assert export._weight_bytes(model) == plain - saved


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ({"tokenizer_config.json": "{}"}, UnsupportedModelError, "has no tokenizer.json form, .* tokenizer=None"),
        ({"tokenizer_config.json": "[NaN]", "tokenizer.json": ""}, QsampleError, "cannot be stored: NaN is not JSON"),
        ({"tokenizer_config.json": "[Infinity]", "tokenizer.json": ""}, None, ""),
    ],
)  # fmt: skip
def test_a_tokenizer_that_the_runtime_could_not_read(
    files: dict[str, str], error: type[Exception] | None, message: str, tmp_path: Path
) -> None:
    class Saves:
        def save_pretrained(self, folder: Path) -> None:
            for name, text in files.items():
                (folder / name).write_text(text)

    tokenizer: Any = Saves()
    with nullcontext() if error is None else pytest.raises(error, match=message):
        _save_model_files(random_model("llama"), tokenizer, tmp_path)
