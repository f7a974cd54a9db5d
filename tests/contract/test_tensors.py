"""docs/contract.md, as a host follows it that knows nothing else: calls, rows that come and go, the manifest."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.fake_package import compilation, fake_package
from tests.helpers.grammar_files import choice_tables
from tests.helpers.plain_host import PlainHost, State

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "contract.md").read_text("utf-8")
T = 48
LONG, SHORT = (np.random.default_rng(n).integers(4, 260, n).tolist() for n in (12, 7))
DRAWN = {"temperature": [0.9], "repetition_penalty": [1.5], "frequency_penalty": [0.5]}


@pytest.fixture(scope="module", params=[{}, {"for_serving": True}], ids=["plain", "for_serving"])
def host(request: pytest.FixtureRequest, exported: Callable[..., Path]) -> PlainHost:
    return PlainHost(exported("llama", **request.param))


@pytest.fixture(scope="module")
def serving_host(exported: Callable[..., Path]) -> PlainHost:
    return PlainHost(exported("llama", for_serving=True))


@pytest.fixture(scope="module")
def alone(host: PlainHost) -> list[list[int]]:
    return [host.generate(host.start([0], T), prompt, 6) for prompt in (LONG, SHORT)]


@pytest.mark.parametrize("padding", [0, 259, -1])
@pytest.mark.parametrize("width", [12, 15])
def test_first_pieces_are_read_together(
    padding: int, width: int, host: PlainHost, alone: list[list[int]]
) -> None:
    if padding < 0:  # any ids: a different id in each place
        padding = np.random.default_rng(1).integers(0, 260, width)  # type: ignore[assignment]
    ids = np.broadcast_to(padding, (2, width)).copy()
    ids[0, :12], ids[1, :7] = LONG, SHORT
    state, lengths, tokens = host.start([0, 1], T), [12, 7], []
    for _ in range(6):
        outputs = host.call(state, ids, lengths)
        state, ids, lengths = host.after(state, outputs), outputs["next_ids"], [1, 1]
        tokens.append(ids[:, 0].tolist())
    assert np.transpose(tokens).tolist() == alone


def test_a_later_piece_is_read_alone(host: PlainHost, alone: list[list[int]]) -> None:
    state = host.start([0], T)
    for piece in (LONG[:5], LONG[5:9]):
        state = host.after(state, host.call(state, [piece + [9] * 3], [len(piece)], emit=[False]))
    assert host.generate(state, LONG[9:], 6) == alone[0]


@pytest.mark.parametrize("ahead", [[5, 5], [0, 5], [5, 0]])
def test_later_pieces_of_several_rows_are_refused(ahead: list[int], host: PlainHost) -> None:
    """They would be read as first pieces, over the rows' own beginnings."""
    state = host.start([0, 1], T)
    state["lengths"][:] = ahead
    with pytest.raises(Exception, match="batch_size must be 1"):
        host.call(state, [LONG[:6], LONG[6:]])


def test_tokens_are_scored_as_they_would_be_sampled(serving_host: PlainHost) -> None:
    """In any place of a ragged batch; the call is otherwise the same. Without places, there are no scores."""
    ids, lengths = np.zeros((2, 15), np.int64), [12, 7]
    ids[0, :12], ids[1, :7] = LONG, SHORT
    plain = serving_host.call(serving_host.start([0, 1], T), ids, lengths)
    assert [len(plain[name]) for name in plain if name.startswith("prompt_")] == [0] * 4
    places = [(0, place) for place in range(12)] + [(1, place) for place in range(7)]
    scored_ids = np.random.default_rng(0).integers(0, 260, len(places))
    scored = serving_host.call(
        serving_host.start([0, 1], T),
        ids,
        lengths,
        scored_places=[row * 15 + place for row, place in places],
        scored_ids=scored_ids,
    )
    for name, values in plain.items():
        if not name.startswith("prompt_"):
            # The head rounds another number of rows.
            np.testing.assert_allclose(values, scored[name], atol=1e-4)
    for index, (row, place) in enumerate(places):
        prompt = [LONG, SHORT][row][: place + 1]
        alone = serving_host.call(serving_host.start([0], T), [prompt])
        for name in ("top_logprobs", "top_logprob_ids"):
            np.testing.assert_allclose(scored[f"prompt_{name}"][index], alone[name][0], atol=1e-4)
        words = -(-serving_host.manifest["interface"]["vocab_size"] // 32)
        forced = np.zeros((1, words), np.int32)
        token = int(scored_ids[index])
        forced[0, token // 32] = np.uint32(1 << token % 32).astype(np.int32)
        own = serving_host.call(serving_host.start([0], T), [prompt], allowed_tokens=forced)
        assert own["next_ids"].item() == token
        np.testing.assert_allclose(scored["prompt_logprobs"][index], own["logprobs"][0], atol=1e-4)


def test_padding_needs_room(host: PlainHost) -> None:
    state = host.start([0], T)
    state["lengths"][:] = T - 12
    host.call(state, [LONG])
    state["lengths"][:] = T - 11
    with pytest.raises(Exception, match="out of range"):
        host.call(state, [LONG], [2])


def used_state(host: PlainHost, seed: int) -> dict[str, Any]:
    """That of a row after LONG and seven more tokens."""
    state = host.start([seed], T)
    ids: Any = [LONG]
    for _ in range(8):
        outputs = host.call(state, ids, **DRAWN)
        state, ids = host.after(state, outputs), outputs["next_ids"]
    return state


def test_a_row_begins_anew_over_what_another_left(host: PlainHost) -> None:
    wanted = host.generate(host.start([5], T), SHORT, 8, **DRAWN)
    state = used_state(host, 9)
    state["lengths"][:] = state["status"][:] = 0
    state["output_counts"][:] = 0
    if "grammar_state" in state:
        # As if the row before had followed a grammar, whose tables are gone.
        state["grammar_state"][:] = 0
    state["noise"] = host.start([5], T)["noise"]
    assert host.generate(state, SHORT, 8, **DRAWN) == wanted
    for name, value in state.items():
        if name.startswith("past_key_values"):
            value[:] = np.nan
    assert host.generate(state, SHORT, 8, **DRAWN) == wanted, "what lies behind lengths is not read"


def test_a_row_goes_on_from_a_common_beginning(host: PlainHost) -> None:
    other = [*LONG[:7], *SHORT]
    wanted = host.generate(host.start([5], T), other, 8, **DRAWN)
    state = used_state(host, 5)
    state["lengths"][:], state["output_counts"][:] = 7, 0
    state["tokens"][0, 7:] = LONG[0]
    assert host.generate(state, SHORT, 8, **DRAWN) == wanted


def test_rows_follow_tables_and_others_do_not(serving_host: PlainHost) -> None:
    """docs/contract.md, Grammars: the row with state 1 gives an answer, its neighbour what it would give alone."""
    assert serving_host.manifest["contract_version"] == "2.4"
    assert serving_host.manifest["interface"]["features"]["grammars"] is True
    stop = 2
    answers = [[50, 60, 70], [80, 90]]
    vocab_size = serving_host.manifest["interface"]["vocab_size"]
    tables: dict[str, Any] = dict(choice_tables(vocab_size, answers))
    free = serving_host.generate(serving_host.start([1], T), LONG, 4)
    state = serving_host.start([0, 1], T)
    state["grammar_state"][:] = [1, 0]
    ids: Any = [LONG, LONG]
    tokens = []
    while state["status"][0] == 0:
        outputs = serving_host.call(state, ids, stop_ids=[[stop], [-1]], **tables)
        state = serving_host.after(state, outputs)
        ids = outputs["next_ids"]
        tokens.append(ids[:, 0].tolist())
    first_row = [both[0] for both in tokens]
    other_row = [both[1] for both in tokens]
    assert first_row[-1] == stop
    assert first_row[:-1] in answers
    assert other_row == free[: len(other_row)]
    # The next answer begins in state 1 again, with room for the shortest answer alone.
    again = serving_host.start([0], T)
    again["grammar_state"][:] = 1
    limit = {"max_length": [len(LONG) + 3], "stop_ids": [[stop]]}
    assert serving_host.generate(again, LONG, 3, **limit, **tables) == [80, 90, stop]


@pytest.mark.parametrize("status", [1, 2, 3])
def test_a_row_that_does_not_run_stays_as_it_is(status: int, host: PlainHost) -> None:
    state = host.start([0, 1], T)
    state = host.after(state, host.call(state, [LONG, LONG]))
    state["status"][1] = status
    outputs = host.call(state, [[7], [8]])
    after: State = host.after(state, outputs)
    assert outputs["next_ids"][1, 0] == host.manifest["token_ids"]["pad"]
    assert after["lengths"].tolist() == [13, 12]
    for name in state:
        kept = slice(0, 12) if name.startswith("past_key_values") else slice(None)
        before, then = state[name][1], after[name][1]
        if before.ndim == 3:
            before, then = before[:, kept], then[:, kept]
        assert np.array_equal(before, then), name


@pytest.fixture(scope="module")
def with_features(exported: Callable[..., Path]) -> PlainHost:
    return PlainHost(
        exported(
            "llama",
            logit_bias=True,
            allowed_tokens=True,
            logprobs=True,
            top_logprobs=3,
            return_pdfs=True,
        )
    )


def test_what_a_row_returns_that_emits_nothing(with_features: PlainHost) -> None:
    host = with_features
    outputs = host.call(host.start([0, 1], T), [LONG, LONG], emit=[True, False])
    assert (outputs["logprobs"][0] < 0).all()
    assert outputs["logprobs"][1].tolist() == [0]
    assert outputs["top_logprob_ids"][1].tolist() == [-1] * 3
    assert outputs["top_logprobs"][1].tolist() == [0] * 3
    assert not outputs["probs"][1].any()
    assert np.sort(outputs["probs"][0])[-2:].tolist() == [0, 1], "a greedy row"
    assert (
        outputs["probs"][0].argmax()
        == outputs["next_ids"][0, 0]
        == outputs["top_logprob_ids"][0, 0]
    )


@pytest.mark.parametrize(
    "spoilt", [{"logit_bias": [[np.inf]]}, {"logit_bias": [[np.nan]]}, {"repetition_penalty": [0]}]
)
def test_an_invalid_logit_of_the_steps_counts_as_the_models(
    spoilt: dict[str, Any], with_features: PlainHost
) -> None:
    outputs = with_features.call(
        with_features.start([0], T), [LONG], logit_bias_ids=[[LONG[0]]], **spoilt
    )
    assert outputs["status_RetainedState"].tolist() == [3]
    assert outputs["lengths_RetainedState"].tolist() == [0]


def test_the_manifest_has_what_the_page_says(llama_package: Path, tmp_path: Path) -> None:
    portable = PlainHost(llama_package).manifest
    device = PlainHost(fake_package(tmp_path / "device", compilation=compilation()).path).manifest
    rows = re.findall(
        r"^\| ((?:`[\w.]+`(?:, )?)+) \| (.*) \|$",
        PAGE.split("A host needs these keys of the manifest")[1],
        re.MULTILINE,
    )
    named = [
        key
        for keys, _ in rows
        for key in re.findall(r"`([\w.]+)`", keys)
        if not key.startswith("qsample")
    ]
    assert {"contract_version", "interface.vocab_size", "token_ids", "compilation"} <= set(named)
    absent = {
        key
        for keys, text in rows
        if text.startswith("absent")
        for key in re.findall(r"`([\w.]+)`", keys)
    }
    for key in named[: named.index("files") + 1]:
        *parents, name = key.split(".")
        for manifest in (portable, device):
            value: Any = manifest
            for part in parents:
                value = value[part]
            assert value is None or (name in value) == (key not in absent), key
    texts = dict(rows)
    inside = {
        name: set(re.findall(r"`(\w+)`", texts[f"`{name}`"]))
        for name in ("token_ids", "compilation", "files")
    }
    assert inside["token_ids"] == set(portable["token_ids"])
    assert inside["compilation"] <= set(device["compilation"]) | {"decoder"}
    assert inside["files"] == set(portable["files"]["decoder.onnx"])
    omitted = {"grammars", "prompt_logprobs", "logprobs_mode"}  # their defaults are left out
    assert set(re.findall(r"`(\w+)`", texts["`interface.features`"])) == omitted | set(
        portable["interface"]["features"]
    )
    layer, slides = (
        texts["`interface.key_values`"],
        {"capacity"},
    )  # of layers that forget old tokens
    assert (
        set(re.findall(r"`(\w+)`", layer)) == set(portable["interface"]["key_values"][0]) | slides
    )
    assert portable["compilation"] is None
