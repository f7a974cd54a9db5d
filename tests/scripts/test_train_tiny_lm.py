"""`train_tiny_lm`: its corpus and training, in runs of a few steps; and the bundled model that it made."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("rich")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "train_tiny_lm.py"
BUNDLED = ROOT / "qsample" / "assets" / "tiny_lm"
FILES = {
    "README.md",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
WORDS = re.findall(
    r"\w+",
    "the of and to that in he shall unto for his they be is him not them it with all thou was which my",
)
VERSES = (
    "In the beginning God created the heaven and the earth.",
    "The LORD is my shepherd; I shall not want.",
    "And it came to pass in those days, that there went out a decree from Caesar Augustus, "
    "that all the world should be taxed.",
)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_tiny_lm", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def quick(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script with short windows and samples, so that a run takes a second or two."""
    monkeypatch.setattr(script, "CONTEXT", 64)
    monkeypatch.setattr(script, "SAMPLING", script.SAMPLING | {"max_new_tokens": 4})
    monkeypatch.setattr(script, "PROMPTS", ("the",))
    return script


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "small.txt"
    lines = (
        " ".join(WORDS[(row * step) % len(WORDS)] for step in range(1, 10)) + ".\n"
        for row in range(300)
    )
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def bundled() -> tuple[Any, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(BUNDLED)


def test_a_short_run_gives_a_model_and_tokenizer_that_load(
    quick: ModuleType, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "lm"
    quick.main(["--text", str(text), "--steps", "3", "--out", str(out)])

    assert {path.name for path in out.iterdir()} == FILES
    assert [path.name for path in out.parent.iterdir()] == ["lm"]
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.float32
    assert model.get_input_embeddings().weight.shape[0] == 2048
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.generation_config.do_sample
    assert "| Parameters | 1,373,600 |" in (out / "README.md").read_text(encoding="utf-8")

    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    for sentence in ("the LORD\n  spake — naïve 日本 🙂\t\r\n", "", " of and"):
        ids = tokenizer(sentence)["input_ids"]
        assert ids[0] == tokenizer.bos_token_id == model.config.bos_token_id
        assert max(ids) < 2048
        assert tokenizer.decode(ids, skip_special_tokens=True) == sentence
    assert tokenizer.eos_token_id == model.config.eos_token_id
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3


def test_training_lowers_the_loss_and_is_reproducible(quick: ModuleType, text: Path) -> None:
    console = quick.Console(quiet=True)
    training, held_out = quick.split(quick.text_documents(text), seed=1)
    tokenizer = quick.train_tokenizer(training)
    streams = [quick.Stream.of(part, tokenizer) for part in (training, held_out)]
    losses = []
    for _ in range(2):
        torch.manual_seed(1)
        model = quick.build_model(tokenizer)
        before = quick.evaluate(model, streams[1])
        steps, _, _ = quick.train(
            model, *streams, quick.Recipe(steps=5, minutes=None, seed=1), console
        )
        losses.append(quick.evaluate(model, streams[1]))
        assert steps == 5
        assert losses[-1] < before - 0.3
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_the_time_budget_ends_a_run(quick: ModuleType, text: Path) -> None:
    training, held_out = quick.split(quick.text_documents(text), seed=1)
    tokenizer = quick.train_tokenizer(training)
    streams = [quick.Stream.of(part, tokenizer) for part in (training, held_out)]
    recipe = quick.Recipe(steps=10**6, minutes=0.01, seed=1)
    steps, seconds, _ = quick.train(
        quick.build_model(tokenizer), *streams, recipe, quick.Console(quiet=True)
    )
    assert 1 <= steps < 1000
    assert seconds >= 0.6


def test_windows_begin_with_bos_and_a_whole_line(quick: ModuleType, text: Path) -> None:
    documents = quick.text_documents(text)
    tokenizer = quick.train_tokenizer(documents)
    stream = quick.Stream.of(documents, tokenizer)
    lines = {line for document in documents for line in document.splitlines()}
    batches = stream.batches(2, torch.Generator().manual_seed(0))
    for _ in range(5):
        windows = next(batches)
        assert windows.shape[1] == quick.CONTEXT + 1
        for window in windows.tolist():
            assert window[0] == tokenizer.bos_token_id
            assert tokenizer.decode(window, skip_special_tokens=True).splitlines()[0] in lines


def test_the_learning_rate_warms_up_and_ends_at_zero(script: ModuleType) -> None:
    recipe = script.Recipe(steps=1, minutes=None, seed=0)
    rates = [script.rate_at(progress / 1000, recipe) for progress in range(1001)]
    peak = rates.index(max(rates))
    assert rates[peak] == pytest.approx(recipe.learning_rate, rel=0.05)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert 0 < rates[0] < rates[peak] / 10
    assert rates[-1] == pytest.approx(0)


def test_without_the_bible_program_the_error_says_what_to_install(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as caught:
        script.main(["--out", str(tmp_path / "lm")])
    assert "apt-get install bible-kjv" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "lm").exists()


def test_chapters_become_documents_without_verse_numbers(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bible"
    body = (
        "\nGenesis 1\n\n  1 In the beginning.\n  2 And the  earth was.\n\nGenesis 2\n\n  1 Thus.\n"
    )
    program.write_text(f"#!/bin/sh\nprintf '%s' '{body}'\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(script, "KJV_CHAPTERS", 2)
    assert script.kjv_documents() == [
        "Genesis 1\nIn the beginning.\nAnd the earth was.\n",
        "Genesis 2\nThus.\n",
    ]
    monkeypatch.setattr(script, "KJV_CHAPTERS", 3)
    with pytest.raises(SystemExit, match="printed 2 chapters, not 3"):
        script.kjv_documents()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty or too short"),
        (b"One line only.\n", "is empty or too short"),
        (b"\xff\xfe", "cannot read"),
    ],
)
def test_a_text_of_no_use_is_refused_in_one_line(
    script: ModuleType, tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(SystemExit, match=message) as caught:
        script.main(["--text", str(path), "--out", str(tmp_path / "lm")])
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "lm").exists()


@pytest.mark.parametrize("option", [["--steps", "0"], ["--minutes", "0"]])
def test_an_empty_budget_is_refused(script: ModuleType, text: Path, option: list[str]) -> None:
    with pytest.raises(SystemExit):
        script.main(["--text", str(text), *option])


@pytest.mark.parametrize(
    "place", ["train", "model_card", "PreTrainedTokenizerFast.save_pretrained"]
)
@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError])
def test_a_run_that_does_not_end_well_leaves_everything_as_it_was(
    quick: ModuleType,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    failure: type[BaseException],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise failure

    *owner, name = place.split(".")
    monkeypatch.setattr(getattr(quick, owner[0]) if owner else quick, name, fail)
    if place != "train":
        monkeypatch.setattr(quick, "train", lambda *_: (1, 1.0, 1.0))
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    (earlier / "config.json").write_text("{}", encoding="utf-8")
    for out in (tmp_path / "lm", earlier):
        with pytest.raises(failure):
            quick.main(["--text", str(text), "--steps", "1", "--out", str(out)])
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "config.json",
        "earlier",
        "small.txt",
    ]


def test_an_earlier_result_is_replaced_and_other_folders_are_not(
    quick: ModuleType, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick, "train", lambda *_: (1, 1.0, 1.0))
    out = tmp_path / "lm"
    out.mkdir()
    (out / "config.json").write_text("{}", encoding="utf-8")
    quick.main(["--text", str(text), "--out", str(out)])
    assert {path.name for path in out.iterdir()} == FILES

    (out / "thesis.txt").write_text("Not to be lost.", encoding="utf-8")
    for place in (out, text):
        with pytest.raises(SystemExit, match="not an earlier result"):
            quick.main(["--text", str(text), "--out", str(place)])
    assert (out / "thesis.txt").exists()


def test_the_bundled_folder_is_complete_and_small(bundled: tuple[Any, Any]) -> None:
    assert {path.name for path in BUNDLED.iterdir()} == FILES
    assert sum(path.stat().st_size for path in BUNDLED.iterdir()) <= 3_000_000
    messages = [
        {"role": "user", "content": "In the"},
        {"role": "assistant", "content": "beginning"},
    ]
    assert bundled[1].apply_chat_template(messages, tokenize=False) == "<s>In the\nbeginning"
    asked = bundled[1].apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert asked == "<s>In the\nbeginning\n"
    config = json.loads((BUNDLED / "config.json").read_text(encoding="utf-8"))
    assert config["vocab_size"] == 2048
    assert config["max_position_embeddings"] == 512


def test_the_bundled_tokenizer_keeps_any_text(bundled: tuple[Any, Any]) -> None:
    _, tokenizer = bundled
    assert len(tokenizer) == 2048
    for sentence in (*VERSES, "naïve 日本 🙂\t \r\n\n", ""):
        ids = tokenizer(sentence)["input_ids"]
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(ids, skip_special_tokens=True) == sentence


@pytest.mark.parametrize("verse", VERSES)
def test_the_bundled_model_knows_the_style(bundled: tuple[Any, Any], verse: str) -> None:
    model, tokenizer = bundled
    ids = tokenizer(verse, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert model(input_ids=ids, labels=ids).loss.item() < 3.2


def test_greedy_text_of_the_bundled_model_is_made_of_words(bundled: tuple[Any, Any]) -> None:
    model, tokenizer = bundled
    prompt = tokenizer("And the LORD spake unto", return_tensors="pt", return_token_type_ids=False)
    ids = model.generate(**prompt, do_sample=False, max_new_tokens=40)
    text = tokenizer.decode(ids[0], skip_special_tokens=True)
    assert text.startswith("And the LORD spake unto")
    assert len(text) > 60
    assert re.fullmatch(r"[A-Za-z0-9 \n.,:;?!'()-]+", text)
    words = re.findall(r"[A-Za-z]+", text)
    assert all(len(word) < 16 and re.search(r"[AEIOUYaeiouy]", word) for word in words)
    common = {
        "and",
        "the",
        "of",
        "to",
        "unto",
        "lord",
        "saying",
        "that",
        "in",
        "he",
        "shall",
        "children",
        "israel",
    }
    assert sum(word.lower() in common for word in words) > len(words) / 4
