"""The text that a model writes itself: how rows begin and go on, and which tokens the model chose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qsample.compiler import own_text
from qsample.compiler.own_text import Opening, opening_of, random_starts, sampled, write_text
from qsample.contract.arrays import Array
from qsample.errors import CompileError
from qsample.package.divergence import CHATS, DOCUMENTS, RANDOM_STARTS
from qsample.package.package import Package, read_package
from qsample.request.text.chat import ChatTemplates
from qsample.request.text.tokenizer import Tokenizer

VOCAB = 10
STOP = 7


def writer(*tokens: int) -> Any:
    """A step whose logits leave a row no choice: `tokens`, one after the other, in every row."""
    left = list(tokens)

    def step(ids: Array, lengths: Array) -> dict[str, Array]:
        logits = np.full((len(ids), VOCAB), -1e9, np.float32)
        logits[:, left.pop(0)] = 0
        return {"logits": logits}

    return step


def test_the_host_begins_turns() -> None:
    """The stop is replaced by what ends the turn and begins the next; users and assistants take turns."""
    opening = Opening(CHATS, (1, 2), (STOP,), 0.8, ((3, 4), (5,)))
    text = write_text(
        writer(8, STOP, 0, 9, STOP, 6, STOP, 0), opening, VOCAB, rows=2, tokens=8, seed=0
    )
    assert text.rows.tolist() == [[1, 2, 8, 3, 4, 9, 5, 6, 3, 4]] * 2
    scored = [True, True, False, True, True, True, True, False]
    assert np.array(text.scored).T.tolist() == [scored] * 2
    assert text.logits == []


def test_without_turns_a_stop_is_a_token_as_any() -> None:
    text = write_text(
        writer(8, STOP, 2),
        Opening(RANDOM_STARTS, (), (STOP,), 1.0, ()),
        VOCAB,
        rows=3,
        tokens=3,
        seed=4,
    )
    assert text.prompt.shape == (3, 1)
    assert len(np.unique(text.prompt)) > 1
    assert text.rows[:, 1:].tolist() == [[8, STOP, 2]] * 3
    assert np.all(text.scored)


def test_the_same_text_each_time_and_another_with_another_seed() -> None:
    opening = Opening(DOCUMENTS, (1,), (), 1.0, ())

    def written(seed: int) -> Array:
        def step(ids: Array, lengths: Array) -> dict[str, Array]:
            return {"logits": np.zeros((len(ids), 1000), np.float32)}

        told: list[float] = []
        text = write_text(
            step, opening, 1000, rows=4, tokens=5, seed=seed, keep_logits=True, progress=told.append
        )
        assert told == [0.2, 0.4, 0.6, 0.8, 1.0]
        assert [logits.shape for logits in text.logits] == [(4, 1000)] * 5
        return text.rows

    assert np.array_equal(written(1), written(1))
    assert not np.array_equal(written(1), written(2))


def with_template(
    package: Package, template: str | None, monkeypatch: pytest.MonkeyPatch
) -> Package:
    """`package` as if its tokenizer had the template."""
    plain = Tokenizer.of

    def of(package: Package) -> Tokenizer | None:
        tokenizer = plain(package)
        assert tokenizer is not None
        tokenizer._chat_templates = ChatTemplates(template)
        return tokenizer

    monkeypatch.setattr(own_text.Tokenizer, "of", of)
    return package


TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}"
ASKED = TURNS + "{% if add_generation_prompt %}<assistant>{% endif %}"


def test_a_chat_begins_as_its_template_has_it(
    bundled_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = with_template(read_package(bundled_package), "rules " + ASKED, monkeypatch)
    tokenizer = Tokenizer.of(package)
    assert tokenizer is not None
    opening = opening_of(package, 256)
    assert (opening.text, opening.temperature) == (CHATS, 0.7)
    assert tokenizer.decode(opening.ids, skip_special_tokens=False) == "rules <user>"
    assert [tokenizer.decode(ids, skip_special_tokens=False) for ids in opening.turns] == [
        "</s>\n<assistant>",
        "</s>\n<user>",
    ]
    assert opening.stops == package.manifest.token_ids.eos


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{{ raise_exception('no') }}",
        "{% for m in messages %}<{{ m.role }}>{{ m.content | upper }}</s>{% endfor %}",
        ASKED + "{{ messages[0].content }}",
        "{{ messages[-1].content }}",
        "a template for another {{ kind.of.host() }}",
    ],
)
def test_without_a_template_that_serves_it_writes_documents(
    template: str | None, bundled_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = with_template(read_package(bundled_package), template, monkeypatch)
    ids = package.manifest.token_ids
    assert opening_of(package, 256) == Opening(
        DOCUMENTS, (ids.bos,), ids.eos, 1.0, ((ids.eos[0], ids.bos),)
    )


def test_a_template_that_fills_the_context(
    bundled_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = with_template(read_package(bundled_package), "word " * 40 + ASKED, monkeypatch)
    opening = opening_of(package, 256)
    assert opening.text == CHATS
    half = len(opening.ids)  # of the context
    assert opening_of(package, 2 * half).text == CHATS
    assert opening_of(package, 2 * half - 1).text == DOCUMENTS


@pytest.mark.parametrize(
    ("bos", "eos", "expected"),
    [(0, (5,), DOCUMENTS), (0, (), DOCUMENTS), (None, (5, 6), RANDOM_STARTS)],
)
def test_models_without_a_first_or_a_stop_token(
    bos: int | None, eos: tuple[int, ...], expected: str, llama_package: Path
) -> None:
    package = read_package(llama_package)
    token_ids = replace(package.manifest.token_ids, bos=bos, eos=eos)
    package = replace(package, manifest=replace(package.manifest, token_ids=token_ids))
    opening = opening_of(package, 64)
    assert (opening.text, opening.stops) == (expected, eos)
    assert opening.ids == (() if bos is None else (0,))
    assert opening.turns == (((5, 0),) if bos is not None and eos else ())
    if bos is None:
        assert opening == random_starts(package)


@pytest.mark.parametrize("vocab_size", [7, 512, 1300])
def test_tokens_are_drawn_as_in_float64(vocab_size: int) -> None:
    """By inverse CDF: the first token whose running sum is above the number drawn."""
    logits = np.random.default_rng(0).normal(0, 3, (300, vocab_size)).astype(np.float32)
    logits[:100, : vocab_size // 2] = -np.inf
    ends = np.exp(logits.astype(np.float64)).cumsum(1)
    wanted = (ends <= np.random.default_rng(5).random((300, 1)) * ends[:, -1:]).sum(1)
    found = sampled(logits, np.random.default_rng(5))
    assert (found == wanted).mean() > 0.99, "float32 may round a sum to the other side"
    for drawn, least, most in ((0.0, vocab_size // 2, vocab_size // 2), (1.0, 0, vocab_size - 1)):
        rng: Any = SimpleNamespace(random=lambda shape, drawn=drawn: np.full(shape, drawn))
        tokens = sampled(logits[:100], rng)
        assert least <= tokens.min() <= tokens.max() <= most


TEMPERED = Opening(DOCUMENTS, (1,), (), 0.5, ())  # its temperature is not 1


def test_logits_are_divided_by_the_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    """A masked token stays one that cannot be chosen."""
    seen: list[Array] = []

    def choose(logits: Array, rng: object) -> Array:
        seen.append(logits)
        return np.array([0])

    def step(ids: Array, lengths: Array) -> dict[str, Array]:
        return {"logits": np.array([[1.0, -np.inf]], np.float32)}

    monkeypatch.setattr(own_text, "sampled", choose)
    write_text(step, TEMPERED, 2, rows=1, tokens=1, seed=0)
    assert seen[0].tolist() == [[2.0, -np.inf]]


@pytest.mark.parametrize("row", [[1.0, np.nan], [np.inf, 0.0], [-np.inf, -np.inf]])
def test_logits_that_are_not_numbers(row: list[float]) -> None:
    def step(ids: Array, lengths: Array) -> dict[str, Array]:
        return {"logits": np.array([row], np.float32)}

    with pytest.raises(CompileError, match="logits that are not numbers, so no text"):
        write_text(step, TEMPERED, 2, rows=1, tokens=1, seed=0)
