"""The guesses of a step and where its tokens go, compared with Python loops over each row; and several places of a row
in one step, whose tokens, outputs and states are those of steps of one token, bit by bit."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnxruntime as ort
import pytest

from qsample.contract.interface import Features, Interface
from qsample.contract.tensors import EXTRA_PARAMETERS, FILTER_ORDERS, GRAMMAR_AXES
from qsample.sampler.guess import build_drafter, build_verifier, drafter_spec
from tests.helpers.reference_grammar import (
    TABLE_NAMES,
    after_token,
    drafted,
    random_tables,
    state_in_time,
)
from tests.helpers.sampler_cases import PAD, opened, random_step, sampler

Array = np.ndarray
VOCAB, CAPACITY = 50, 64


@functools.cache
def drafter(features: Features, packed: bool = True) -> ort.InferenceSession:
    return opened(build_drafter(Interface(VOCAB, (), features=features), packed=packed))


def features(most: int = 7, **others: object) -> Features:
    return replace(Features(num_speculative_tokens=most), **others)  # type: ignore[arg-type]


def step(
    texts: Sequence[Sequence[int]], chosen: Features, *, packed: bool = True, **values: object
) -> dict[str, Array]:
    """A step of one token: the last of each of `texts`. values: of the other inputs, one a row."""
    rows = len(texts)
    interface = Interface(VOCAB, (), features=chosen)
    sizes = interface.sizes | {"B": rows, "S": 1, "T": CAPACITY}
    off = {
        "input_lengths": 1,
        "emit": True,
        "max_length": CAPACITY,
        "prompt_lookup_num_tokens": chosen.num_speculative_tokens,
        "row_multiple": 1,
    }
    sizes |= dict.fromkeys(GRAMMAR_AXES, 1)
    if "grammar_transitions" in values:
        sizes["X"], sizes["Y"] = np.shape(values["grammar_transitions"])  # type: ignore[arg-type]
        sizes["Z"] = len(values["grammar_classes"])  # type: ignore[arg-type]
    tokens = np.array([[*text, *[text[0]] * (CAPACITY - len(text))] for text in texts])
    for row, text in enumerate(texts):
        tokens[row, len(text) - 1] = 49  # the newest token is that of input_ids
    values = {
        "tokens": tokens,
        "lengths": [len(text) - 1 for text in texts],
        "input_ids": [[text[-1]] for text in texts],
        **values,
    }
    session, feeds = drafter(chosen, packed), {}
    spec = drafter_spec(interface, packed=packed)
    for tensor in (*spec.inputs, *spec.states):
        value = np.asarray(
            values.get(tensor.name, off.get(tensor.name, tensor.off or 0)), tensor.dtype
        )
        feeds[tensor.name] = np.array(np.broadcast_to(value, tensor.shape(sizes)))
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def match(text: Sequence[int], place: int) -> tuple[int, int]:
    """The length 2, 4 or 8 of the longest match of the tokens up to `place` with earlier ones, 0 if there is none, and
    the last place of the newest of these."""
    for length in (8, 4, 2):
        for end in range(place - 1, length - 2, -1):
            if (
                place - length + 1 >= 0
                and text[end - length + 1 : end + 1] == text[place - length + 1 : place + 1]
            ):
                return length, end
    return 0, -1


def expected(text: Sequence[int], rows: int, most: int) -> list[int]:
    """What `rows` rows that all guess draft for a row with `text`."""
    newest = len(text) - 1
    length, end = match(text, newest)
    tries = hits = 0
    for place in range(newest - 7, newest):
        level, source = match(text, place) if place >= 0 else (0, -1)
        tries += level > 0
        hits += level > 0 and text[source + 1] == text[place + 1]
    prior = {0: 0, 2: 1, 4: 3, 8: 15}[length]
    chance, cost = (hits + prior) / (tries + prior + 2), (0.3, 0.4, 0.5, 0.6)[min(rows, 4) - 1]
    count = sum(chance**n > cost for n in range(1, most + 1)) if length else 0
    count = min(count, most, CAPACITY - newest - 2)
    period = newest - end
    return [text[end + 1 + index % period] for index in range(count)]


def random_text(rng: np.random.Generator, longest: int) -> list[int]:
    """Pieces of a few tokens, repeated with few changes."""
    alphabet, text = int(rng.choice([2, 3, 8, 49])), []
    while len(text) < longest:
        if text and rng.random() < 0.7:
            start = int(rng.integers(0, len(text)))
            text += text[start : start + int(rng.integers(1, 20))]
        text += rng.integers(0, alphabet, int(rng.integers(1, 4))).tolist()
    return text[: int(rng.integers(1, longest + 1))]


def guesses(result: dict[str, Array]) -> list[list[int]]:
    return [[int(token) for token in row if token >= 0] for row in result["step_guesses"]]


@pytest.mark.parametrize("most", [1, 7, 15])
def test_lookup(most: int) -> None:
    rng, found = np.random.default_rng(0), 0
    for _ in range(40):
        texts = [
            random_text(rng, 46) for _ in range(int(rng.choice([1, 2, 3, 6])))
        ]  # at least 17 places are left
        drafted = guesses(step(texts, features(most)))
        assert drafted == [expected(text, len(texts), most) for text in texts]
        found += sum(map(len, drafted))
    assert found > 20


def test_the_newest_longest_match() -> None:
    text = [1, 2, 3, 4, 5, 0, 6, 1, 2, 3, 4, 7, 0, 8, 3, 4, 9, 0, 1, 2, 3, 4]
    assert guesses(step([text], features())) == [
        [7, 0]
    ]  # after four tokens, not after the newer two


def test_host_drafts_come_first_and_end_at_the_first_id_that_is_none() -> None:
    text = [1, 2, 3, 1, 2, 3, 1, 2]
    drafts = [
        [5, 49, 0, -1, 5, 5, 5],
        [5, 50, 5, 5, 5, 5, 5],
        [2**31 - 1] * 7,
        [-2, 4, 4, 4, 4, 4, 4],
        [0] * 7,
    ]
    assert guesses(step([text] * 5, features(), draft_ids=drafts))[:2] == [[5, 49, 0], [5]]
    assert guesses(step([text] * 5, features(), draft_ids=drafts))[2] == []
    assert guesses(step([text] * 5, features(), draft_ids=drafts))[4] == [0] * 7
    assert guesses(step([text], features(), draft_ids=[drafts[3]])) == guesses(
        step([text], features())
    )


def test_grammars_suggest_guesses() -> None:
    """After the host's drafts, before those of lookup; and the states after each guess, whoever made it."""
    rng, suggested, looked_up = np.random.default_rng(3), 0, 0
    chosen = features(grammars=True)
    for _ in range(30):
        texts = [random_text(rng, 40) for _ in range(4)]
        tables = random_tables(rng, VOCAB)
        tables["grammar_drafts"][1:] = np.where(
            rng.random(11) < 0.8, rng.integers(0, VOCAB, 11), -1
        )
        states = np.array([0, *rng.integers(1, 12, 3)])
        # Some pass in the course of the guesses.
        lengths = np.array([len(text) for text in texts])
        deadlines = np.where(rng.random(4) < 0.3, 2**31 - 1, lengths + rng.integers(-1, 5, 4))
        host = np.full((4, 7), -1)
        if rng.random() < 0.3:
            host[3, :2] = rng.integers(0, VOCAB, 2)
        values = {"grammar_state": states, "grammar_deadline": deadlines, "draft_ids": host}
        result = step(texts, chosen, **tables, **values)
        wanted = []
        for row, text in enumerate(texts):
            given = {"grammar_state": states[row], "grammar_deadline": deadlines[row], **tables}
            ids = host[row][host[row] >= 0].tolist() or drafted(given, len(text), 7)
            suggested += len(ids)
            if not ids:
                ids = expected(text, 4, 7)
                looked_up += len(ids)
            wanted.append(ids)
        found = guesses(result)
        # How many rows guess decides how many guesses of lookup are worth their time.
        for row, ids in enumerate(wanted):
            if host[row, 0] >= 0 or drafted(
                {"grammar_state": states[row], "grammar_deadline": deadlines[row], **tables},
                len(texts[row]),
                7,
            ):
                assert found[row] == ids
        inputs = {
            "grammar_state": states,
            "grammar_deadline": deadlines,
            "lengths": np.array([len(text) - 1 for text in texts]),
            "input_lengths": np.ones(4, int),
            **tables,
        }
        reached = states_along(inputs, result["step_guesses"])
        for row, ids in enumerate(found):
            last = next(
                (
                    n
                    for n in range(len(ids))
                    if not _allows(inputs, row, reached[row, n], n, ids[n])
                ),
                len(ids),
            )
            got = result["step_grammar_states"][row, : last + 1]
            np.testing.assert_array_equal(got, reached[row, : last + 1])
    assert suggested > 50
    assert looked_up > 10


def test_a_grammar_suggests_token_0_or_nothing() -> None:
    """The only answer is 0, 0, 5; without drafts, nobody guesses."""
    classes = np.full((1, VOCAB), 2)
    classes[0, [0, 5]] = 0, 1
    tables = {
        "grammar_classes": classes,
        "grammar_transitions": [[0, 0, 0], [2, -1, -1], [3, -1, -1], [-1, 4, -1], [-1, -1, -1]],
        "grammar_distances": [0, 4, 3, 2, 1],
        "grammar_maps": 0,
        "grammar_late": [0, 1, 2, 3, 4],
    }
    values = {"grammar_state": [1], "grammar_deadline": 2**31 - 1, **tables}
    text = [1, 2, 3]
    result = step([text], features(grammars=True), grammar_drafts=[-1, 0, 0, 5, -1], **values)
    assert guesses(result) == [[0, 0, 5]]
    assert result["step_grammar_states"].tolist() == [[1, 2, 3, 4]]
    result = step([text], features(grammars=True), grammar_drafts=-1, **values)
    assert result["step_guesses"].tolist() == [[-1]]
    assert result["step_grammar_states"].tolist() == [[1]]


def _allows(inputs: Mapping[str, Array], row: int, state: int, place: int, token: int) -> bool:
    given = {name: array for name, array in inputs.items() if name in TABLE_NAMES}
    given |= {"grammar_state": state, "grammar_deadline": inputs["grammar_deadline"][row]}
    total = int(inputs["lengths"][row]) + 1 + place
    return after_token(given, state_in_time(given, total), token) >= 0


def test_a_row_with_a_mask_does_not_guess() -> None:
    """Whichever word forbids a token: one or more, the first or the last, its lowest bit or its highest."""
    text = [1, 2, 3, 4] * 5
    every = np.uint32(0xFFFFFFFF)
    masks = [
        (every, every),
        (every, every - 1),
        (every - 1, every),
        (every, every >> 1),
        (every >> 1, every),
        (every - 1, every >> 1),
        (np.uint32(0), every),
        (every, np.uint32(0)),
        (np.uint32(0), np.uint32(0)),
        (every, every),
    ]
    words = np.array(masks, np.uint32).view(np.int32)
    found = guesses(step([text] * len(masks), features(allowed_tokens=True), allowed_tokens=words))
    assert [bool(ids) for ids in found] == [True, *[False] * 8, True]


def test_rows_that_do_not_guess() -> None:
    text = [1, 2, 3, 4] * 5
    chosen = features(allowed_tokens=True, filters=("mirostat", "adaptive_p"))
    masks = [[-1, -1], [-1, -1], [-1, -1], [-1, -1], [-1, 7], [-1, -1], [-1, -1], [-1, -1]]
    result = step(
        [text] * 8,
        chosen,
        status=[0, 1, 0, 0, 0, 0, 0, 0],
        emit=[True, True, False, True, True, True, True, True],
        prompt_lookup_num_tokens=[7, 7, 7, 0, 7, 7, 2, 7],
        allowed_tokens=masks,
        mirostat_tau=[0, 0, 0, 0, 0, 3, 0, 0],
        adaptive_target=[-1, -1, -1, -1, -1, -1, -1, 0],
    )
    assert [len(row) for row in guesses(result)] == [7, 0, 0, 0, 0, 0, 2, 0]
    assert result["step_lengths"].tolist() == [8, 0, 1, 1, 1, 1, 3, 1]


def test_room() -> None:
    """The token after the last guess has a place below the capacity and max_length; no buffer of a row that has not
    ended ends within the step."""
    for left in range(2, 12):
        text = ([1, 2, 3, 4] * 20)[: CAPACITY - left + 1]  # lengths is CAPACITY - left
        assert len(guesses(step([text], features()))[0]) == min(left - 2, 7)
        short = text[:20]
        assert [len(row) for row in guesses(step([text, short], features()))] == [
            min(left - 2, 7),
            min(left - 1, 7),
        ]
        for status, wanted in (0, min(left - 1, 7)), (2, 7):
            waiting = step([text, short], features(), input_lengths=[0, 1], status=[status, 0])
            assert [len(row) for row in guesses(waiting)] == [0, wanted]
            # The keys that are kept in other memory, as many as the attention takes.
            assert waiting["step_seqlens_k"][0] == CAPACITY - max(left, wanted + 1) - 1
        limited = guesses(step([short], features(), max_length=19 + left))
        assert len(limited[0]) == min(left - 2, 7)


@pytest.mark.parametrize(("packed", "multiple"), [(True, 1), (True, 2), (False, 1)])
def test_places(packed: bool, multiple: int) -> None:
    """Each token of a row is where the model reads it, and each draw after its row's tokens. An odd number of tokens or
    draws has the last of them twice, if the graph is told so."""
    texts = [[1, 2, 3, 4] * 4, [1, 5, 9], [7, 8] * 3, [4, 4]]
    result = step(
        texts,
        features(),
        packed=packed,
        input_lengths=[1, 1, 0, 1],
        draft_ids=[[-1] * 7, [3, 4] + [-1] * 5, [-1] * 7, [-1] * 7],
        row_multiple=multiple,
    )
    drafts = guesses(result)
    assert [len(row) for row in drafts] == [7, 2, 0, 0]
    read = [[text[-1], *row] for text, row in zip(texts, drafts, strict=True)]
    ids, columns = result["step_ids"], result["step_ids"].shape[1]
    model = ids[tuple(result["step_pack"][0].T)]
    assert not result["step_pad"][..., 0].any()
    count = sum(map(len, read))
    twice = -count % multiple
    assert count % 2
    assert len(model) == (count + twice if packed else ids.size)
    assert [*model[count:]] == [model[count - 1]] * twice or not packed
    for row, tokens in enumerate(read):
        length = len(tokens) if row != 2 else 0
        assert result["step_lengths"][row] == length
        assert ids[row, : len(tokens)].tolist() == tokens
        assert model[result["step_pad"][row, :, 1]][: len(tokens)].tolist() == tokens
        assert result["step_positions"][row].tolist() == list(
            range(len(texts[row]) - 1, len(texts[row]) - 1 + columns)
        )
        assert result["step_seqlens_k"][row] == len(texts[row]) + length - 2
    rows, after, last = result["step_rows"], result["step_columns"], result["step_choice"]
    places = [(row, n) for row, tokens in enumerate(read) for n in range(len(tokens))]
    places += places[-1:] * twice
    assert list(zip(rows, after, strict=True)) == places
    assert model[last].tolist() == [read[row][n] for row, n in places]
    for row, tokens in enumerate(read):
        for n in range(columns):
            assert result["step_places"][row, n] == [*rows].index(row) + min(n, len(tokens) - 1)


Array = np.ndarray
GUESSES = 4
FILTERS = tuple(EXTRA_PARAMETERS)
EVERYTHING = Features(
    logit_bias=True,
    allowed_tokens=True,
    grammars=True,
    logprobs=True,
    top_logprobs=3,
    filters=FILTERS,
)
RETAINED = "_RetainedState"


@functools.cache
def verifier(face: Interface) -> ort.InferenceSession:
    return opened(build_verifier(face, PAD))


def one_by_one(
    face: Interface, logits: Array, inputs: Mapping[str, Array]
) -> list[tuple[dict[str, Array], dict[str, Array]]]:
    """The results of each step and the inputs of the next. logits: [steps, B, V]."""
    steps, state = [], dict(inputs)
    for row in logits:
        result = sampler(face)(row, state)
        state = state | {
            name.removesuffix(RETAINED): array for name, array in result.items() if RETAINED in name
        }
        state |= {
            "input_ids": result["next_ids"],
            "input_lengths": np.ones_like(inputs["input_lengths"]),
        }
        steps.append((result, state))
    return steps


def layout(guesses: Array, ids: Array) -> dict[str, Array]:
    """What `guess` gives `verify`. guesses: [B, g], -1 after the last of each row. ids: [B, S]."""
    count = (guesses >= 0).sum(1)
    pairs = [(row, column) for row, most in enumerate(count) for column in range(most + 1)]
    places = [
        [pairs.index((row, min(column, most))) for column in range(guesses.shape[1] + 1)]
        for row, most in enumerate(count)
    ]
    rows, columns = np.array(pairs).T
    return {
        "step_ids": np.concatenate([ids, np.maximum(guesses, 0)], 1),
        "step_rows": rows,
        "step_columns": columns,
        "step_places": np.array(places),
        "step_guesses": np.pad(guesses, ((0, 0), (0, 1)), constant_values=-1),
    }


def states_along(inputs: Mapping[str, Array], guesses: Array) -> Array:
    """The grammar's state after 0, 1, … guesses of each row. guesses: [B, g + 1], -1 after the last."""
    states = np.repeat(inputs["grammar_state"][:, None], guesses.shape[1], 1)
    for row, ids in enumerate(guesses):
        given = {name: array for name, array in inputs.items() if name in TABLE_NAMES}
        given["grammar_deadline"] = inputs["grammar_deadline"][row]
        given["grammar_state"] = inputs["grammar_state"][row]
        total = int(inputs["lengths"][row] + inputs["input_lengths"][row])
        for place, token in enumerate(ids[ids >= 0]):
            given["grammar_state"] = after_token(
                given, state_in_time(given, total + place), int(token)
            )
            if given["grammar_state"] < 0:  # no draw is this guess
                break
            states[row, place + 1 :] = given["grammar_state"]
    return states


def check(face: Interface, rng: np.random.Generator, rows: int = 12) -> int:
    """Compare a random step. Returns how many tokens it gave beyond one a row."""
    plain = face.without_guesses()
    sequence = int(rng.choice([1, 1, 1, 2]))
    logits, inputs = random_step(rng, plain, rows, sequence)
    most = GUESSES if sequence == 1 else 0
    logits = np.stack(
        [logits, *(rng.permuted(logits, axis=1) * rng.choice([1, 0.5]) for _ in range(most))]
    )
    logits[rng.random(logits.shape[:2]) < 0.05, 3] = rng.choice([np.nan, np.inf])
    if sequence == 1:
        inputs["input_lengths"][:] = 1
    steps = one_by_one(plain, logits.astype(np.float32), inputs)

    drawn = np.concatenate([result["next_ids"] for result, _ in steps], 1)[:, :most]
    guesses = np.where(
        rng.random(drawn.shape) < 0.8, drawn, rng.integers(0, face.vocab_size, drawn.shape)
    )
    count = rng.integers(0, most + 1, rows)
    if "mirostat_tau" in inputs:
        count[(inputs["mirostat_tau"] > 0) | (inputs["adaptive_target"] >= 0)] = (
            0  # as `guess` has it
        )
    guesses[np.arange(most) >= count[:, None]] = -1
    given = layout(guesses[:, : max(count, default=0)], inputs["input_ids"])
    at = (given["step_columns"], given["step_rows"])
    if face.features.grammars:
        given["step_grammar_states"] = states_along(inputs, given["step_guesses"])
    session = verifier(face)
    names = [output.name for output in session.get_outputs()]
    feeds = {**inputs, **given, "logits": logits[at].astype(np.float32)}
    got = dict(
        zip(
            names,
            session.run(names, {value.name: feeds[value.name] for value in session.get_inputs()}),
            strict=True,
        )
    )

    more = 0
    for row in range(rows):
        last, kept = 0, []
        while True:
            result, _ = steps[last]
            if (
                inputs["status"][row] == 0
                and inputs["emit"][row]
                and result["status_RetainedState"][row] != 3
            ):
                kept.append(last)
            goes_on = (
                kept[-1:] == [last]
                and result["status_RetainedState"][row] == 0
                and last < count[row]
            )
            if not (goes_on and result["next_ids"][row, 0] == guesses[row, last]):
                break
            last += 1
        for name in (name for name in names if RETAINED in name):
            np.testing.assert_array_equal(got[name][row], steps[last][0][name][row], err_msg=name)
        assert got["num_new"][row] == len(kept)
        assert got["num_draft_tokens"][row] == count[row]
        for name, ordinary in (
            ("new_ids", "next_ids"),
            ("logprobs", "logprobs"),
            ("top_logprobs", "top_logprobs"),
            ("top_logprob_ids", "top_logprob_ids"),
        ):
            if name in names:
                wanted = np.stack(
                    [steps[step][0][ordinary][row] for step in kept] or [steps[0][0][ordinary][row]]
                )
                found = got[name][row][: max(len(kept), 1)]
                np.testing.assert_array_equal(found, wanted.reshape(found.shape), err_msg=name)
                rest = got[name][row][max(len(kept), 1) :]
                assert (rest == {"new_ids": PAD, "top_logprob_ids": -1}.get(name, 0)).all(), name
        newest = steps[kept[-1]][0]["next_ids"][row] if kept else [PAD]
        assert got["next_ids"][row].tolist() == list(newest)
        more += max(len(kept) - 1, 0)
    return more


VERIFIED = [
    Interface(300, (), features=replace(features, num_speculative_tokens=GUESSES))
    for features in (
        Features(logprobs=True, top_logprobs=3, grammars=True),
        EVERYTHING,
        replace(EVERYTHING, filter_order=FILTER_ORDERS[1], logprobs_mode="processed_logprobs"),
    )
]


def test_as_one_by_one() -> None:
    rng = np.random.default_rng(1)
    assert sum(check(VERIFIED[0], rng) for _ in range(6)) > 12


@pytest.mark.ci
@pytest.mark.parametrize("face", VERIFIED[1:], ids=["everything", "llama.cpp"])
def test_with_all_features(face: Interface) -> None:
    rng = np.random.default_rng(1)
    assert sum(check(face, rng) for _ in range(10)) > 10


@pytest.mark.slow
@pytest.mark.parametrize("face", VERIFIED, ids=["plain", "everything", "llama.cpp"])
def test_many_as_one_by_one(face: Interface) -> None:
    rng = np.random.default_rng(2)
    assert sum(check(face, rng) for _ in range(500)) > 500
