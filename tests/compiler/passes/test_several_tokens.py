"""A compiled graph that checks guesses: whatever is guessed, its tokens and states are those of one token a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from tokenizers import Tokenizer

from qsample.graph.runner import GraphRunner
from qsample.graph.weights import load_graph
from qsample.package.package import Package, read_package
from qsample.runtime import load
from tests.helpers.fake_graphs import GUESSING_CAPACITY as CAPACITY
from tests.helpers.plain_host import PlainHost

Array = np.ndarray
TEXT = (
    "And the LORD spake unto Moses, saying, Speak unto Aaron, and say unto him, Thus saith the LORD: and the LORD "
    "spake unto Moses, saying, Speak unto Aaron, and say unto him, In the beginning God created heaven and earth. "
)


class Guessing(NamedTuple):
    package: Package
    runner: GraphRunner
    text: list[int]
    masks: Array


class Written(NamedTuple):
    """What rows wrote. tokens, logprobs: of each row. state: after the last. calls: that wrote."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    state: dict[str, Array]
    calls: int


@pytest.fixture(scope="module")
def guessing(guessing_package: Path) -> Guessing:
    package = read_package(guessing_package)
    compilation = package.manifest.compilation
    model = load_graph(package.file("decoder.onnx"))
    runner = GraphRunner(model, package.path, package.interface, compilation.ctx_len)
    text = Tokenizer.from_file(str(package.path / "tokenizer.json")).encode(TEXT).ids
    return Guessing(package, runner, text, np.full(-(-package.interface.vocab_size // 32), -1))


def write(
    model: Guessing,
    prompts: list[list[int]],
    parameters: dict[str, Array],
    drafts: Callable[[int, list[int]], list[int]] | None = None,
) -> Written:
    """Run until every row has ended. drafts: of a row, after the tokens that it wrote."""
    rows, most = len(prompts), model.package.interface.features.num_speculative_tokens
    state = model.runner.start(rows)
    lengths = np.array([len(prompt) for prompt in prompts])
    ids = np.array([prompt + [0] * (max(lengths) - len(prompt)) for prompt in prompts])
    tokens: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    calls = 0
    while (state["status"] == 0).any():
        given = np.full((rows, most), -1)
        for row in range(rows) if drafts is not None and calls else []:
            own = drafts(row, tokens[row])[:most]  # type: ignore[misc]
            given[row, : len(own)] = own
        result = model.runner.step(ids, lengths, state, {**parameters, "draft_ids": given})
        for row, count in enumerate(result["num_new"]):
            tokens[row] += result["new_ids"][row, :count].tolist()
            logprobs[row] += result["logprobs"][row, :count].tolist()
        ids, lengths, calls = result["next_ids"], np.ones(rows, np.int64), calls + 1
        assert calls < 300
    return Written(tokens, logprobs, state, calls)


def random_parameters(
    rng: np.random.Generator, model: Guessing, lengths: Array
) -> dict[str, Array]:
    rows = len(lengths)

    def pick(*values: float) -> Array:
        return rng.choice(values, rows)

    often = np.array(model.text)
    masks = np.where(
        rng.random((rows, 1)) < 0.8,
        model.masks,
        rng.integers(-(2**31), 2**31, (rows, len(model.masks))),
    )
    return {
        "temperature": pick(0, 0, 0.2, 0.7, 1, 2),
        "top_k": pick(0, 0, 1, 5, 40, 100),
        "top_p": pick(1, 1, 0.5, 0.9),
        "min_p": pick(0, 0, 0.1),
        "repetition_penalty": pick(1, 1, 1, 1.2, 0.8),
        "presence_penalty": pick(0, 0, 0.5, -1),
        "frequency_penalty": pick(0, 0, 0.3),
        "min_length": pick(0, *(lengths + 6)),
        "max_length": np.minimum(lengths + rng.integers(1, 40, rows), rng.choice([2**31 - 1, 200])),
        "stop_ids": np.where(rng.random((rows, 1)) < 0.3, rng.choice(often, (rows, 1)), -1),
        "logit_bias_ids": np.where(rng.random((rows, 1)) < 0.3, rng.choice(often, (rows, 1)), -1),
        "logit_bias": rng.normal(size=(rows, 1)) * 3,
        "allowed_tokens": masks,
        "no_repeat_ngram_size": pick(0, 0, 0, 3),
        "dry_multiplier": pick(0, 0, 0, 0.8),
        "xtc_probability": pick(0, 0, 0, 0.5),
        "mirostat_tau": pick(0, 0, 0, 0, 3),
    }


def random_prompts(rng: np.random.Generator, model: Guessing) -> list[list[int]]:
    prompts = []
    for _ in range(int(rng.integers(1, 5))):
        start = int(rng.integers(0, len(model.text) // 2))
        full = rng.random() < 0.1  # its buffer ends within a few tokens
        prompts.append(
            (model.text * 9)[
                start : start + int(rng.integers(225, 256) if full else rng.integers(1, 60))
            ]
        )
    return prompts


def check(model: Guessing, rng: np.random.Generator) -> tuple[int, int]:
    """A random batch with and without guesses. Returns how many tokens it wrote, and in how many steps of a row."""
    prompts = random_prompts(rng, model)
    lengths = np.array([len(prompt) for prompt in prompts])
    parameters = random_parameters(rng, model, lengths)
    plain = write(model, prompts, parameters)
    vocab, most = (
        model.package.interface.vocab_size,
        model.package.interface.features.num_speculative_tokens,
    )

    def drafts(row: int, written: list[int]) -> list[int]:
        right = plain.tokens[row][len(written) : len(written) + int(rng.integers(0, most + 1))]
        kind = rng.integers(0, 6)
        if kind == 0:
            return []
        if kind < 3:
            return right
        if kind == 3:
            return [*right[:2], *rng.integers(0, vocab, 4).tolist()]
        if kind == 4:
            return [*right[:1], -1, *right]
        return rng.choice([-(2**31), -2, 0, vocab - 1, vocab, 2**31 - 1], most).tolist()

    lookup = {"prompt_lookup_num_tokens": rng.integers(0, most + 1, len(prompts))}
    steps = 0
    for guesses in (
        ({**parameters, **lookup}, None),
        (parameters, drafts),
        ({**parameters, **lookup}, drafts),
    ):
        guessed = write(model, prompts, *guesses)
        assert guessed.tokens == plain.tokens
        assert guessed.logprobs == plain.logprobs
        used = plain.state["lengths"]
        for name, value in plain.state.items():
            got = guessed.state[name]
            if name.startswith("past_key_values"):
                pairs = [
                    (got[row, :, : used[row]], value[row, :, : used[row]])
                    for row in range(len(prompts))
                ]
            else:
                pairs = [(got, value)]
            assert all(np.array_equal(*pair) for pair in pairs), name
        steps += guessed.calls
    return 3 * max(map(len, plain.tokens)), steps


def test_a_session_may_choose_the_number_of_rows(guessing: Guessing) -> None:
    session = load(guessing.package.path).sessions.decoder
    assert [value.name for value in session.get_overridable_initializers()] == ["row_multiple"]


@pytest.mark.ci
def test_pieces_behind_any_beginning_share_a_call(guessing: Guessing) -> None:
    """Each row's states, and its token, are those of the row alone; a row without tokens stays as it is."""
    runner, text = guessing.runner, guessing.text
    begins, pieces = [5, 0, 9, 30, 250], [4, 2, 0, 6, 0]
    rows, width = len(begins), max(pieces)
    parameters = {"temperature": 0.7, "repetition_penalty": 1.2}

    states = [
        {name: value[row : row + 1].copy() for name, value in runner.start(rows).items()}
        for row in range(rows)
    ]
    for begin, state in zip(begins, states, strict=True):
        if begin:
            runner.step(np.array([(text * 9)[:begin]]), np.array([begin]), state, {"emit": False})
    together = {name: np.concatenate([state[name] for state in states]) for name in states[0]}
    ids = np.array(
        [text[row : row + pieces[row]] + [7] * (width - pieces[row]) for row in range(rows)]
    )
    result = runner.step(ids, np.array(pieces), together, parameters)
    assert result["num_new"].tolist() == [int(piece > 0) for piece in pieces]
    for row, (state, piece) in enumerate(zip(states, pieces, strict=True)):
        if piece:
            alone = runner.step(ids[row : row + 1, :piece], np.array([piece]), state, parameters)
            assert alone["new_ids"].tolist() == result["new_ids"][row : row + 1].tolist()
        for name, value in state.items():
            got, wanted = together[name][row], value[0]
            if name.startswith("past_key_values"):
                got, wanted = (cache[:, : int(state["lengths"][0])] for cache in (got, wanted))
            np.testing.assert_array_equal(got, wanted, err_msg=name)


@pytest.mark.parametrize(("columns", "fullest"), [(1, 59), (1, 62), (4, 60)])
def test_rows_that_read_nothing_are_kept_in_other_memory(
    columns: int, fullest: int, fake: Callable[..., Package]
) -> None:
    """They wait or have ended, beside a row that reads `columns` tokens and guesses up to the end of the fullest buffer
    of those that wait. What is lost is at the ends of buffers, where the attention copies nothing."""
    host = PlainHost(fake(num_speculative_tokens=4).path)
    lengths, status = [3, 0, 1, 9, fullest, 5, 61, 64], [0, 0, 0, 0, 0, 1, 2, 3]
    rows, rng = len(lengths), np.random.default_rng(0)
    state = host.start([*range(rows)], CAPACITY)
    state |= {
        name: rng.integers(1, 100, value.shape).astype(value.dtype) for name, value in state.items()
    }
    state |= {"lengths": np.array(lengths, np.int32), "status": np.array(status, np.int32)}
    ids, drafts = rng.integers(1, 100, (rows, columns)), rng.integers(1, 100, (rows, 4))
    result = host.call(state, ids, [columns, 0, 0, 0, 0, 1, 1, 0], draft_ids=drafts)
    guesses = min(4, CAPACITY - fullest - 1) if columns == 1 else 0
    assert result["num_draft_tokens"].tolist() == [guesses] + [0] * (rows - 1)
    after = host.after(state, result)
    for name, before in state.items():
        for row in range(1, rows):
            pair = before[row], after[name][row]
            if name.startswith("past_key_values"):
                kept = min(lengths[row], CAPACITY - columns - guesses)
                pair = pair[0][:, :kept], pair[1][:, :kept]
            np.testing.assert_array_equal(*pair, err_msg=f"{name} of row {row}")


@pytest.mark.ci
def test_guesses_change_nothing(guessing: Guessing) -> None:
    rng = np.random.default_rng(0)
    tokens, steps = np.sum([check(guessing, rng) for _ in range(6)], axis=0)
    assert tokens > 1.05 * steps


@pytest.mark.slow
def test_guesses_never_change_anything(guessing: Guessing) -> None:
    rng = np.random.default_rng(1)
    tokens, steps = np.sum([check(guessing, rng) for _ in range(500)], axis=0)
    assert tokens > 1.1 * steps
