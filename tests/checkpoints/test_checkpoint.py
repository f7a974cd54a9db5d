"""Loading checkpoints: once, and what is missing, unknown or does not fit is refused with advice."""

from __future__ import annotations

import json
import os
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file, save_file
from transformers import GPT2LMHeadModel

from qsample import AutoModelForCausalLM
from qsample.checkpoints import checkpoint as checkpoint_module
from qsample.checkpoints.checkpoint import Checkpoint, transformers_generation_config
from qsample.checkpoints.source import HubOptions
from qsample.errors import QsampleError, UnsupportedModelError
from tests.helpers.tiny_models import random_model, save_checkpoint


def configured(folder: Path, **changes: object) -> str:
    """A Llama's checkpoint whose config.json has `changes`."""
    save_checkpoint(folder / "checkpoint", "llama")
    file = folder / "checkpoint" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return str(folder / "checkpoint")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "no_such_model"}, "no_such_model"),
        ({"model_type": "vit"}, "no causal language model of type vit; take a decoder-only"),
        (
            {"model_type": "qwen2_5_vl"},
            "which reads images; open it with AutoModelForImageTextToText, or its language",
        ),
        (
            {"model_type": "bert"},
            r"is an encoder \(LlamaForCausalLM\), which does not continue texts; take a decoder",
        ),
        ({"model_type": "whisper"}, "is an encoder-decoder"),
        *(
            (changes, r"checkpoint: transformers makes no model of its config\.json \(")
            for changes in (
                {"eos_token_id": "2"},
                {"num_attention_heads": 3},
                {"num_hidden_layers": "2"},
                {"pad_token_id": 400},
                {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}},
                {"hidden_act": "cubic"},
                {"dtype": "float99"},
            )
        ),
    ],
)
def test_a_configuration_that_no_model_can_be_made_of(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    """Each fails in transformers or torch, in a different way."""
    with pytest.raises(UnsupportedModelError, match=message):
        Checkpoint(configured(tmp_path, **changes)).load()


def test_an_export_says_what_it_leaves_out(tmp_path: Path) -> None:
    text = random_model("gemma3_text").config.to_dict()
    config = transformers.Gemma3Config(text_config=text, vision_config={"num_hidden_layers": 1})
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with (
        pytest.warns(UserWarning, match="also reads images; its language model alone"),
        pytest.raises(QsampleError),
    ):
        Checkpoint(str(tmp_path)).load()


def test_tokenizers(tmp_path: Path) -> None:
    """A missing tokenizer is refused, and a wrong configuration is not taken for one."""
    random_model("llama").save_pretrained(tmp_path / "model")
    with pytest.raises(QsampleError, match=r"no tokenizer in .*tokenizer=None"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "model").export(tmp_path / "package")
    assert os.listdir(tmp_path) == ["model"]
    assert Checkpoint(str(tmp_path / "model"), tokenizer=None).tokenizer is None
    with pytest.raises(
        UnsupportedModelError, match=r"transformers makes no model of its config\.json"
    ):
        _ = Checkpoint(configured(tmp_path, num_attention_heads=3)).tokenizer


def test_the_tokenizer_of_another_repository_is_not_read_at_the_revision_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    def loaded(name: str, *, revision: str | None, **options: Any) -> object:
        asked.append(revision)
        return object()

    def others(name: str, hub: HubOptions, **options: Any) -> None:
        asked.append(hub.revision)

    monkeypatch.setattr(checkpoint_module.AutoTokenizer, "from_pretrained", loaded)
    monkeypatch.setattr(checkpoint_module, "check_exists", others)
    monkeypatch.setattr(
        checkpoint_module, "keep_own_parts", lambda tokenizer, name, hub: others(name, hub)
    )
    hub = HubOptions(revision="v2")
    save_checkpoint(tmp_path / "checkpoint", "llama")
    for given, expected in (("auto", ["v2", "v2"]), ("me/another", [None, "main", None])):
        asked.clear()
        checkpoint = Checkpoint(str(tmp_path / "checkpoint"), hub=hub, tokenizer=given)
        _ = checkpoint.config
        asked.clear()
        _ = checkpoint.tokenizer
        assert asked == expected


def test_weights_that_do_not_fit_the_configuration(tmp_path: Path) -> None:
    named = r"holds lm_head\.weight of shape \[320, 64\], and LlamaForCausalLM has \[400, 64\].*1 more do not fit"
    with pytest.raises(QsampleError, match=named):
        AutoModelForCausalLM.from_pretrained(configured(tmp_path, vocab_size=400)).export(
            tmp_path / "package"
        )


@pytest.mark.parametrize(
    "content",
    [
        *('{"eos_token_id": 2,', "", "[2]", '"eos"', "\xff"),
        *('{"pad_token_id": [0]}', '{"max_new_tokens": 0}', '{"cache_implementation": "a drawer"}'),
        pytest.param("[" * 100_000, id="nested"),
    ],
)
def test_a_damaged_generation_config_is_not_passed_over(content: str, tmp_path: Path) -> None:
    """Without it a model would not know its stop tokens."""
    save_checkpoint(tmp_path / "checkpoint", "llama")
    (tmp_path / "checkpoint" / "generation_config.json").write_bytes(content.encode("latin-1"))
    for read in (Checkpoint.load, lambda checkpoint: checkpoint.generation_config):
        with pytest.raises(
            QsampleError,
            match=r"its generation_config\.json cannot be used .*; correct it, delete it",
        ):
            read(Checkpoint(str(tmp_path / "checkpoint")))
    (tmp_path / "checkpoint" / "generation_config.json").unlink()
    assert Checkpoint(str(tmp_path / "checkpoint")).load().generation_config.eos_token_id == 2


class _RunsCode:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("code_was_run",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            pickle.dumps(_RunsCode(), protocol=2),
            r"a \.bin file is damaged, or a pickle that holds more than tensors.*safetensors",
        ),
        (b"", "cannot load the weights of"),
        (b"PK\x03\x04", "cannot load the weights of"),
    ],
)
def test_bin_files(
    content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path / "checkpoint", "llama")
    (tmp_path / "checkpoint" / "model.safetensors").unlink()
    (tmp_path / "checkpoint" / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(QsampleError, match=message):
        Checkpoint(str(tmp_path / "checkpoint")).load()
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_a_path_that_is_neither_checkpoint_nor_package(tmp_path: Path) -> None:
    with pytest.raises(QsampleError, match=r"neither a config.json .* nor a qsample.json"):
        AutoModelForCausalLM.from_pretrained(tmp_path).export(tmp_path / "package")
    with pytest.raises(QsampleError, match="does not exist"):
        AutoModelForCausalLM.from_pretrained("./no/such/folder").export(tmp_path / "package")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("dropped", "named"),
    [
        (["lm_head.weight"], r"lm_head\.weight, which LlamaForCausalLM needs"),
        (["model.layers.0.mlp.up_proj.weight"], r"model\.layers\.0\.mlp\.up_proj\.weight"),
        (
            [
                "model.norm.weight",
                "lm_head.weight",
                *(f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1)),
            ],
            "and 1 more",
        ),
    ],
)
def test_weights_are_never_made_up(
    dropped: list[str], named: str, dtype: str, tmp_path: Path
) -> None:
    """transformers only warns, and puts random numbers in their place."""
    save_checkpoint(tmp_path / "checkpoint", "llama")
    tensors = load_file(tmp_path / "checkpoint" / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name not in dropped}
    save_file(kept, tmp_path / "checkpoint" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QsampleError, match=rf"checkpoint holds no .*{named}"):
        Checkpoint(str(tmp_path / "checkpoint"), dtype=dtype).load()


def test_a_tied_head_is_not_missing(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "checkpoint", "llama", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "checkpoint" / "model.safetensors")
    model = Checkpoint(str(tmp_path / "checkpoint")).load()
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("model_type", ["openai-gpt", "rwkv"])
def test_what_the_configuration_tells_is_refused_before_the_weights_are_read(
    model_type: str, tmp_path: Path
) -> None:
    random_model(model_type).config.save_pretrained(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "model.safetensors").touch()  # there are no weights to read
    checkpoint = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", tokenizer=None)
    with pytest.raises(
        UnsupportedModelError, match=r"puts nothing into the cache.*docs/architectures\.md"
    ):
        checkpoint.export(tmp_path / "package")


def test_the_outline_needs_no_weights_and_leaves_the_configuration_as_it_is(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "checkpoint", "gpt2")
    (tmp_path / "checkpoint" / "model.safetensors").unlink()
    checkpoint = Checkpoint(str(tmp_path / "checkpoint"))
    before = checkpoint.config.to_dict()
    outline = checkpoint.outline
    assert checkpoint.config.to_dict() == outline.config.to_dict() == before
    assert outline.kind is GPT2LMHeadModel
    assert list(outline.shapes["transformer.h.0.attn.c_attn.weight"]) == [64, 192]
    assert outline.transposed == {"c_attn", "c_proj", "c_fc"}


@pytest.mark.ci
def test_a_checkpoint_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export, a compile and what a script asks of the model share what was read; weights are read twice."""
    save_checkpoint(tmp_path / "checkpoint", "llama", num_hidden_layers=1)
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str, what: str) -> None:
        real = getattr(owner, name)

        def counted(*args: Any, **options: Any) -> Any:
            counts[what] += 1
            return real(*args, **options)

        monkeypatch.setattr(owner, name, counted)

    count(transformers.AutoConfig, "from_pretrained", "config")
    count(transformers.AutoTokenizer, "from_pretrained", "tokenizer")
    count(transformers.GenerationConfig, "from_pretrained", "generation_config")
    count(transformers.AutoModelForCausalLM, "from_config", "meta model")
    count(checkpoint_module, "state_shapes", "probe")
    count(checkpoint_module, "check_exists", "existence")
    count(checkpoint_module, "mapped_weights", "weights")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "checkpoint", dtype="auto", include_sampler=False
    )
    assert not counts
    assert (model.dtype, model.config.model_type, model.generation_config.eos_token_id) == (
        "float32",
        "llama",
        2,
    )
    seen: dict[str, list[tuple[str, float]]] = {"export": [], "compile": []}
    model.export(tmp_path / "portable", progress=lambda *report: seen["export"].append(report))
    model.compile(
        tmp_path / "device", ctx_len=32, progress=lambda *report: seen["compile"].append(report)
    )
    once = ("existence", "config", "tokenizer", "generation_config", "meta model", "probe")
    assert counts == {**dict.fromkeys(once, 1), "weights": 2}
    for reports in seen.values():
        fractions = [fraction for _, fraction in reports]
        assert (fractions[0], fractions[-1]) == (0.0, 1.0)
        assert fractions == sorted(fractions)
        assert [stage for stage, _ in reports].count("done") == 1


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [("float16", "float16"), ("bfloat16", "float32"), ("float32", "float32"), (None, "float32")],
)
def test_the_dtype_that_holds_what_is_stored(
    stored: str | None, dtype: str, tmp_path: Path
) -> None:
    """Of a model of texts, or of the texts of a model that reads more."""
    path = configured(tmp_path, dtype=stored)
    assert (Checkpoint(path, "auto").dtype, Checkpoint(path).dtype) == (dtype, "float32")
    text = {**random_model("gemma3_text").config.to_dict(), "dtype": stored}
    both = {"model_type": "gemma3", "dtype": None, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(both))
    assert Checkpoint(str(tmp_path), "auto", text_only=True).dtype == dtype


@pytest.mark.parametrize("more", [0, -1])
def test_a_model_of_more_than_twice_its_weights(
    more: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused by its size before memory is taken, up to a number that may be missing."""
    path = configured(tmp_path, num_hidden_layers=9)
    held = sum(one.numel() for one in load_file(Path(path) / "model.safetensors").values())
    size = Checkpoint(path).outline.size
    assert size > 2 * held
    monkeypatch.setattr(checkpoint_module, "_MAX_MISSING_NUMBERS", size - 2 * held + more)
    said = (
        "holds no model.layers" if more == 0 else f"has {size} numbers by its .* hold {held}; give"
    )
    with pytest.raises(QsampleError, match=said):
        Checkpoint(path).load(scratch=tmp_path)


def test_settings_that_transformers_would_not_save() -> None:
    config = transformers_generation_config({"temperature": 0.5, "do_sample": True})
    assert (config.temperature, config.do_sample) == (0.5, True)
    with pytest.raises(QsampleError, match=r"model\.generation_config cannot be exported: "):
        transformers_generation_config({"temperature": 0.5, "do_sample": False})
