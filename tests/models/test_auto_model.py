"""The public class: opening checkpoints and packages, host sampling against the baked sampler, saving copies."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qsample
from qsample import AutoModelForCausalLM, CompileOptions
from qsample.contract.interface import Features
from qsample.errors import CompileError, PackageError, QsampleError
from qsample.models.auto_model import AutoModel
from qsample.models.model import PackagedModel, SourceModel
from qsample.models.sources import CheckpointSource
from qsample.runtime import Engine, load
from tests.helpers.adapters import random_adapter
from tests.helpers.fake_package import fake_package
from tests.helpers.tiny_models import save_checkpoint

PROMPTS = [[5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16, 17, 18]]
SAMPLED = {
    "temperature": 0.9,
    "top_k": 30,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "max_new_tokens": 30,
}


def test_host_sampling_gives_the_tokens_of_the_sampler(
    exported: Callable[..., Path], llama_package: Path
) -> None:
    host = AutoModelForCausalLM.from_pretrained(
        exported("llama", include_sampler=False), include_sampler=False
    )
    baked = AutoModelForCausalLM.from_pretrained(llama_package)
    for seed in (0, 1, 2**40):
        wanted = baked.generate(PROMPTS, seed=seed, **SAMPLED)
        got = host.generate(PROMPTS, seed=seed, **SAMPLED)
        assert (got.token_ids, got.finish_reasons) == (wanted.token_ids, wanted.finish_reasons)


@pytest.mark.parametrize(
    ("keywords", "features"),
    [
        ({}, Features()),
        ({"include_sampler": False}, Features(sampler=False)),
        ({"return_pdfs": True}, Features(probs=True)),
        ({"logit_bias": True, "top_logprobs": 3}, Features(logit_bias=True, top_logprobs=3)),
        ({"allowed_tokens": True, "logprobs": True}, Features(allowed_tokens=True, logprobs=True)),
        (
            {"for_serving": True, "filters": ["xtc"]},
            Features(
                True,
                True,
                True,
                grammars=True,
                logprobs=True,
                top_logprobs=20,
                prompt_logprobs=True,
                filters=("xtc", "penalty_last_n"),
            ),
        ),
        ({"filters": ["xtc", "typical_p"]}, Features(filters=("typical_p", "xtc"))),
        ({"filter_order": "llama.cpp"}, Features(filter_order="llama.cpp")),
        (
            {"logprobs": True, "logprobs_mode": "processed_logprobs"},
            Features(logprobs=True, logprobs_mode="processed_logprobs"),
        ),
        ({"logprobs_mode": None, "filter_order": None}, Features()),
    ],
)
def test_keywords_name_the_features(keywords: dict[str, Any], features: Features) -> None:
    model = AutoModelForCausalLM.from_pretrained("some/model", **keywords)
    assert isinstance(model, SourceModel)
    assert model.features == features


def test_save_pretrained_copies_a_package(llama_package: Path, tmp_path: Path) -> None:
    copy = AutoModelForCausalLM.from_pretrained(llama_package).save_pretrained(tmp_path / "copy")
    assert copy.package.path == tmp_path / "copy"
    assert (
        copy.package.manifest
        == AutoModelForCausalLM.from_pretrained(llama_package).package.manifest
    )
    with pytest.raises(QsampleError, match="overwrite"):
        copy.save_pretrained(tmp_path / "copy")


@pytest.mark.ci
def test_compile_without_a_path_lives_as_long_as_the_result(llama_package: Path) -> None:
    compiled = AutoModelForCausalLM.from_pretrained(llama_package).compile(ctx_len=64)
    path = compiled.package.path
    assert len(compiled.generate([[5, 6]], do_sample=False, max_new_tokens=4).token_ids[0]) == 4
    del compiled
    assert not path.exists()


def test_what_only_a_checkpoint_takes(llama_package: Path) -> None:
    for options, message in (
        ({"adapter": "me/a"}, "is a package, and an adapter is merged at export"),
        ({"images": True}, "from_pretrained has no argument 'images'"),
    ):
        with pytest.raises((QsampleError, TypeError), match=message):
            AutoModelForCausalLM.from_pretrained(llama_package, **options)
    assert AutoModelForCausalLM.from_pretrained(llama_package, text_only=True).dtype == "float32"
    with pytest.raises(QsampleError, match="is a package of text alone; open it with AutoModelFor"):
        qsample.AutoModelForImageTextToText.from_pretrained(llama_package)


def test_opening_a_package_imports_neither_torch_nor_transformers(llama_package: Path) -> None:
    program = (
        "import sys, qsample\n"
        f"model = qsample.AutoModelForCausalLM.from_pretrained({str(llama_package)!r})\n"
        "model.generate([[5, 6]], do_sample=False, max_new_tokens=2)\n"
        "print(sorted({'torch', 'transformers', 'onnx', 'jinja2'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_features_of_a_package_are_fixed(
    exported: Callable[..., Path], llama_package: Path
) -> None:
    with pytest.raises(QsampleError, match="exported with include_sampler=True"):
        AutoModelForCausalLM.from_pretrained(llama_package, include_sampler=False)
    with pytest.raises(QsampleError, match="without logprobs, probs; export it again"):
        AutoModelForCausalLM.from_pretrained(llama_package, logprobs=True, return_pdfs=True)
    with pytest.raises(QsampleError, match="holds float32, not float16"):
        AutoModelForCausalLM.from_pretrained(llama_package, dtype="float16")


def test_filters_of_a_package_are_fixed(tmp_path: Path) -> None:
    path = fake_package(tmp_path / "package", filters=("xtc", "dry"), filter_order="llama.cpp").path
    assert isinstance(AutoModelForCausalLM.from_pretrained(path, filters=["dry"]), PackagedModel)
    with pytest.raises(QsampleError, match="without the filter mirostat; export it again"):
        AutoModelForCausalLM.from_pretrained(path, filters=["dry", "mirostat"])
    with pytest.raises(
        QsampleError, match=r"exported with filter_order='llama\.cpp'; open it with that"
    ):
        AutoModelForCausalLM.from_pretrained(path, filter_order="huggingface")
    with pytest.raises(
        ValueError,
        match=r"filters is \['typical'\]; give a list of typical_p, top_a, epsilon_cutoff",
    ):
        AutoModelForCausalLM.from_pretrained("some/model", filters=["typical"])
    with pytest.raises(
        ValueError, match=r"filter_order is 'vllm'; choose one of huggingface, llama\.cpp"
    ):
        AutoModelForCausalLM.from_pretrained("some/model", filter_order="vllm")


def test_the_logprobs_mode_of_a_package_is_fixed(tmp_path: Path) -> None:
    mode = "processed_logprobs"
    path = fake_package(tmp_path / "package", logprobs=True, logprobs_mode=mode).path
    for options in ({}, {"logprobs": True}, {"logprobs_mode": mode}):
        assert isinstance(AutoModelForCausalLM.from_pretrained(path, **options), PackagedModel)
    with pytest.raises(QsampleError, match="exported with logprobs_mode='processed_logprobs'"):
        AutoModelForCausalLM.from_pretrained(path, logprobs_mode="raw_logprobs")
    plain = fake_package(tmp_path / "plain", logprobs=True).path
    with pytest.raises(QsampleError, match="exported with logprobs_mode='raw_logprobs'"):
        AutoModelForCausalLM.from_pretrained(plain, logprobs_mode=mode)
    with pytest.raises(
        ValueError, match="logprobs_mode is 'raw'; choose one of raw_logprobs, processed_logprobs"
    ):
        AutoModelForCausalLM.from_pretrained("some/model", logprobs_mode="raw")


def test_nothing_is_written_over_what_it_is_made_from(tmp_path: Path) -> None:
    package = fake_package(tmp_path / "package")
    before = sorted(path.name for path in package.path.iterdir())
    model = AutoModelForCausalLM.from_pretrained(package.path)
    with pytest.raises(
        PackageError, match="is what the package is made from; choose another folder"
    ):
        model.compile(tmp_path / "x" / ".." / "package", overwrite=True)
    assert sorted(path.name for path in package.path.iterdir()) == before
    folders = [tmp_path / name for name in ("checkpoint", "adapter", "words")]
    for folder in folders:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").touch()
    for folder in folders:
        source = AutoModelForCausalLM.from_pretrained(
            tmp_path / "checkpoint", adapter=tmp_path / "adapter", tokenizer=str(tmp_path / "words")
        )
        for write in (source.compile, source.export):
            with pytest.raises(PackageError, match="is what the package is made from"):
                write(folder, overwrite=True)


def test_a_script_of_transformers_runs(
    llama_package: Path, checkpoint: Callable[[str], Path]
) -> None:
    """What stands between from_pretrained and batch_decode in most of them."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint("llama"), padding_side="left")
    inputs = tokenizer(["In the beginning", "Blessed"], return_tensors="pt", padding=True)
    texts = {}
    for library, path in ((transformers, checkpoint("llama")), (qsample, llama_package)):
        model = library.AutoModelForCausalLM.from_pretrained(
            path,
            torch_dtype=torch.float32,
            device_map=None,
            attn_implementation="eager",
            trust_remote_code=False,
        )
        model.eval()
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        assert model.config.hidden_size == 64
        output = model.generate(
            **inputs.to(model.device),
            max_new_tokens=12,
            do_sample=False,
            use_cache=True,
            num_beams=1,
        )
        new = output[:, inputs["input_ids"].shape[1] :]
        texts[library] = (
            tokenizer.batch_decode(new),
            tokenizer.decode(output[0], skip_special_tokens=True),
        )
    assert texts[qsample] == texts[transformers]


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        (
            {"device_map": "cuda:0"},
            ValueError,
            'cannot move to .cuda:0.; model.compile.provider="cuda".',
        ),
        ({"max_memory": {0: "10GiB"}}, ValueError, "max_memory is .*mapped"),
        ({"load_in_4bit": True}, ValueError, 'load_in_4bit is True.*weights="int4"'),
        (
            {"include_samplers": True},
            TypeError,
            "no argument 'include_samplers'; did you mean 'include_sampler'",
        ),
        ({"dtype": "int8"}, QsampleError, "dtype is int8"),
        ({"torch_dtype": "bfloat16"}, QsampleError, "dtype is bfloat16.*compile"),
        ({"dtype": 5}, ValueError, "dtype is 5; give"),
    ],
)
def test_keywords_without_a_meaning(keywords: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        AutoModelForCausalLM.from_pretrained("some/model", **keywords)


def test_dtypes_of_a_package_under_every_name(llama_package: Path) -> None:
    torch = pytest.importorskip("torch")
    load = AutoModelForCausalLM.from_pretrained
    for keywords in (
        {"dtype": torch.float32},
        {"torch_dtype": "auto"},
        {"dtype": "auto", "torch_dtype": "float16"},
    ):
        assert load(llama_package, **keywords).dtype == "float32"
    for keywords in ({"torch_dtype": torch.float16}, {"dtype": torch.bfloat16}):
        with pytest.raises(QsampleError, match=r"holds float32, not b?float16"):
            load(llama_package, **keywords)


def test_the_dtype_of_a_checkpoint_is_its_own_where_it_is_asked_for(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    from qsample.checkpoints.checkpoint import Checkpoint

    config = json.loads((checkpoint("llama") / "config.json").read_text())
    for own, wanted in (
        ("float16", "float16"),
        ("bfloat16", "float32"),
        ("float32", "float32"),
        (None, "float32"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": own}))
        assert Checkpoint(str(tmp_path), dtype="auto").dtype == wanted
    assert Checkpoint("nowhere", dtype="float16").dtype == "float16"


@pytest.mark.ci
def test_a_checkpoint_takes_its_changed_settings_along(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "checkpoint", "llama", num_hidden_layers=1)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, include_sampler=False)
    assert (model.config.model_type, model.generation_config.eos_token_id) == ("llama", 2)
    assert model.eval().to("cpu", dtype="float32") is model
    assert (model.device, model.dtype) == ("cpu", "float32")
    assert "_packaged" not in vars(model)  # nothing of that needs an export
    model.generation_config.max_new_tokens = 3
    package = model.export(tmp_path / "package")
    assert package.generation_config.max_new_tokens == 3
    assert package.config.hidden_size == 64
    assert len(package.generate([[5, 6]], eos_token_id=None)[0]) == 5
    package.generation_config.max_new_tokens = 4
    assert len(package.generate([[5, 6]], eos_token_id=None)[0]) == 6
    # generate makes a package of its own, which shares these settings.
    assert (
        model.generate([[5, 6]], eos_token_id=None).token_ids
        == package.generate([[5, 6]], eos_token_id=None, max_new_tokens=3).token_ids
    )
    model.generation_config.temperature = 0.5  # without do_sample
    with pytest.raises(QsampleError, match=r"generation_config cannot be exported"):
        model.export(tmp_path / "another")
    assert not (tmp_path / "another").exists()


@pytest.mark.parametrize(
    ("provider", "given", "dtype"),
    [
        ("cuda", "float32", "bfloat16"),
        ("cuda", "float16", "float16"),
        ("cpu", "float16", None),
        ("cpu", "float32", None),
    ],
)
def test_a_package_in_the_cache_has_the_dtype_that_was_chosen(
    provider: str,
    given: str,
    dtype: str | None,
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device's preferred dtype is for models without a choice."""
    asked: list[Any] = []
    monkeypatch.setattr(
        SourceModel, "compile", lambda model, path, *, options, progress: asked.append(options)
    )
    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype=given)
    assert isinstance(model, SourceModel)
    model._make(
        tmp_path / "package", provider=provider, options=CompileOptions(ctx_len=32), progress=None
    )
    assert (asked[0].provider, asked[0].ctx_len, asked[0].dtype) == (provider, 32, dtype)


@pytest.mark.parametrize(
    ("provider", "message"), [("tpu", "no compile target 'tpu'"), ("webgpu", "onnxruntime")]
)
def test_a_target_that_is_not_there_fails_before_the_export(
    checkpoint: Callable[[str], Path], provider: str, message: str
) -> None:
    stages: list[tuple[str, float]] = []
    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"))
    with pytest.raises(CompileError, match=message):
        model.compile(provider=provider, progress=lambda *stage: stages.append(stage))
    assert not stages


@pytest.mark.parametrize("verb", ["compile", "export"])
def test_a_folder_that_is_taken_fails_before_the_export(
    verb: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    stages: list[tuple[str, float]] = []
    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"))
    (tmp_path / "qsample.json").write_text("{}")
    with pytest.raises(PackageError, match="already holds a package"):
        getattr(model, verb)(tmp_path, progress=lambda *stage: stages.append(stage))
    assert not stages


def test_a_mistyped_name_fails_when_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-cpu").mkdir()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(QsampleError, match=r"tiny-cup does not exist .did you mean tiny-cpu\?"):
        AutoModelForCausalLM.from_pretrained("./tiny-cup")
    with pytest.raises(QsampleError, match=r"\./no-adapter does not exist"):
        AutoModelForCausalLM.from_pretrained(tmp_path, adapter="./no-adapter")
    # So does one that may be a hub id, where nothing is installed that could export it.
    monkeypatch.setitem(sys.modules, "qsample.checkpoints.checkpoint", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        QsampleError, match=r"tiny-cup does not exist .did you mean tiny-cpu\?.*local_files_only"
    ):
        AutoModelForCausalLM.from_pretrained("tiny-cup", local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)  # its package may be in the cache
    with pytest.raises(ModuleNotFoundError):
        model.export()


def test_a_folder_has_no_revision(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), revision="v2")
    assert model._load(None, tmp_path).origin.revision is None


@pytest.mark.ci
def test_adapters_of_a_package(adapted: Callable[..., Path], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        adapted("llama", logprobs=True, max_loras=2, max_lora_rank=4)
    )
    assert isinstance(model, PackagedModel)
    loaded = load(model.package.path)
    folder = random_adapter(tmp_path / "a", loaded.interface, 1, rank=4)
    for one in (model, loaded):
        one.load_adapter("a", folder)
    options = {"max_new_tokens": 6, "do_sample": False}
    assert [*model.adapters] == ["a"]
    assert (
        model.generate([[5, 6]], adapter="a", **options).token_ids
        == loaded.generate([[5, 6]], adapter="a", **options).token_ids
    )
    model.unload_adapter("a")
    assert not model.adapters


def test_a_model_without_room_for_adapters_says_so_before_an_export(
    checkpoint: Callable[[str], Path],
) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"))
    with pytest.raises(ValueError, match="takes no LoRA adapters; export it with max_loras"):
        model.load_adapter("a", "folder")


def test_models_show_themselves_in_a_line(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    package = fake_package(tmp_path / "package")
    shown = f"{package.path}, portable package of fake, float32"
    loaded = load(package.path)
    assert repr(package) == f"Package({shown})"
    assert repr(AutoModelForCausalLM.from_pretrained(package.path)) == f"PackagedModel({shown})"
    assert repr(loaded) == f"CausalLM({shown}, on cpu)"
    with Engine(loaded, slots=2) as engine:
        assert (
            repr(engine)
            == f"Engine(CausalLM({shown}, on cpu), 2 slots of {engine.capacity} tokens, 0 requests)"
        )
    assert repr(engine).endswith(", closed)")
    folder = checkpoint("llama")
    assert (
        repr(AutoModelForCausalLM.from_pretrained(folder))
        == f"SourceModel({folder}, checkpoint to export or compile)"
    )


def test_gguf_files_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of a folder, as transformers names it, too; what is no model is refused without torch."""
    gguf = pytest.importorskip("gguf")
    for library in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, library, None)
    for name, architecture in (("a.gguf", "qwen2"), ("b.gguf", "clip")):
        writer = gguf.GGUFWriter(tmp_path / name, architecture)
        for setting in (
            "context_length",
            "embedding_length",
            "block_count",
            "feed_forward_length",
            "head_count",
        ):
            getattr(writer, f"add_{setting}")(1)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_tensor("token_embd.weight", np.zeros((3, 1), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    for options in ({"file": "a.gguf"}, {"gguf_file": "a.gguf"}):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
        assert model.source.model_id == str(tmp_path / "a.gguf")  # type: ignore[union-attr]
    with pytest.raises(
        QsampleError,
        match=r"b\.gguf is a projector of images or audio; give the file of the language",
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path / "b.gguf")
    with pytest.raises(
        QsampleError, match=r"has several models, a\.gguf, b\.gguf; say which with file="
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained("me/m-GGUF", gguf_file="q.gguf", revision="v2")
    assert (model.source.model_id, model.source.file) == ("me/m-GGUF", "q.gguf")  # type: ignore[union-attr]


@pytest.mark.parametrize(("provider", "alone"), [("cpu", False), ("webgpu", True)])
def test_packages_of_the_cache_leave_out_images_that_their_target_cannot_have(
    provider: str, alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QSAMPLE_CACHE", str(tmp_path / "cache"))
    seen = []

    def spy(self: SourceModel, *_: Any, **__: Any) -> None:
        seen.append(self.source)
        raise QsampleError("seen")

    monkeypatch.setattr(SourceModel, "compile", spy)
    model = AutoModel.from_pretrained(
        save_checkpoint(tmp_path / "model", "llama"), provider=provider
    )
    assert isinstance(model, SourceModel)
    with pytest.raises(QsampleError, match="seen"):
        model.cached()
    assert [source.text_only for source in seen] == [alone]


def test_what_a_source_has_to_say_is_said_where_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = CheckpointSource(model_id=str(tmp_path))
    monkeypatch.setattr("qsample.models.auto_model.find_source", lambda request: source)
    for notice in (None, "read the page about it"):
        monkeypatch.setattr(CheckpointSource, "notice", notice)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, provider="webgpu")
        told = [] if notice is None else [(notice, __file__)]
        assert [(str(each.message), each.filename) for each in said] == told
        assert (model.source, model.device) == (source, "webgpu")
