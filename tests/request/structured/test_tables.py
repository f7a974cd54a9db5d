"""Tables over tokens: beside llguidance's masks, and beside a walk over the bytes of each token."""

from __future__ import annotations

import contextlib
import json
from collections import deque
from pathlib import Path
from typing import Any

import llguidance.numpy
import numpy as np
import pytest
from llguidance import LLMatcher

from qsample.contract.arrays import Array
from qsample.errors import QsampleError
from qsample.request.grammar import Form, InvalidGrammarError
from qsample.request.structured import tables
from qsample.request.structured.automaton import (
    ByteAutomaton,
    Thoughts,
    automaton_of,
    with_thoughts,
)
from qsample.request.structured.expression import expression_of
from qsample.request.structured.not_regular import NotRegularError
from qsample.request.structured.tables import TokenGrammar, token_grammar
from qsample.request.structured.vocabulary import TokenVocabulary
from tests.request.structured.conftest import STOP, Kind

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["yes", "no", 'a"b', "é"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
}
FORMS = {
    "person": Form("json_schema", PERSON),
    "date": Form("json_schema", {"type": "string", "format": "date"}),
    "choice": Form("choice", ["yes", "no", "yesterday", "ananas"]),
    "unicode": Form("regex", "(é|ü|日本|😊|[ж-я])+[!?]"),
    "email": Form("regex", r"[a-z0-9._%+-]{1,20}@[a-z0-9.-]{1,20}\.[a-z]{2,4}"),
    "calls": Form("calls", {"f": {"type": "object", "properties": {"x": {"type": "integer"}}}}),
    "words": Form("grammar", 'root ::= word (" " word)*\nword ::= [a-z]{1,8} | [0-9]+'),
}
KINDS = ["byte_level", "sentencepiece", pytest.param("real", marks=pytest.mark.real)]
THOUGHTS = Thoughts("<think>", "</think>", is_open=False)
OPEN_THOUGHTS = Thoughts("<think>", "</think>", is_open=True)


def reference(
    automaton: ByteAutomaton, vocabulary: TokenVocabulary
) -> tuple[dict[tuple[int, int], int], dict[int, bytes]]:
    """The state after each token from each state, by walking over its bytes; and the bytes of all tokens."""
    texts: dict[int, bytes] = {}
    prefixes = [b""]
    for level in vocabulary.levels:
        parents = zip(level.parents, level.last_bytes, strict=True)
        prefixes = [prefixes[parent] + bytes([byte]) for parent, byte in parents]
        for token, node in zip(level.token_ids, level.token_nodes, strict=True):
            texts[int(token)] = prefixes[node]
    specials = {token: text for text, ids in vocabulary.special_ids.items() for token in ids}
    after: dict[tuple[int, int], int] = {}
    for state in range(len(automaton.transitions)):
        for token in range(vocabulary.size):
            end = state
            if token in texts:
                for byte in texts[token]:
                    end = int(automaton.transitions[end, byte]) if end >= 0 else -1
            else:
                text = specials.get(token)
                names = automaton.special_texts
                known = text if text in names else "" if "" in names else None
                end = -1
                if known is not None:
                    end = int(automaton.transitions[state, 256 + names.index(known)])
            if end >= 0:
                after[state, token] = end
    return after, texts


def steps_to_end(automaton: ByteAutomaton, after: dict[tuple[int, int], int]) -> dict[int, int]:
    """The fewest tokens from each state to the end, the stop token included, by breadth-first search."""
    before: dict[int, set[int]] = {}
    for (state, _), end in after.items():
        before.setdefault(end, set()).add(state)
    steps = {int(state): 1 for state in np.flatnonzero(automaton.final)}
    queue = deque(steps)
    while queue:
        state = queue.popleft()
        for earlier in before.get(state, ()):
            if earlier not in steps:
                steps[earlier] = steps[state] + 1
                queue.append(earlier)
    return steps


def check_tables(automaton: ByteAutomaton, vocabulary: TokenVocabulary) -> TokenGrammar:
    """Compare tables with the reference, state by state from the start."""
    grammar = token_grammar(automaton, vocabulary)
    after, texts = reference(automaton, vocabulary)
    steps = steps_to_end(automaton, after)
    is_budget = automaton.free >= 0
    rows = {0: 1, automaton.free: 0} if is_budget else {0: 1}
    queue = deque([0])
    while queue:
        state = queue.popleft()
        row = rows[state]
        allowed = 0
        for token in range(vocabulary.size):
            end = after.get((state, token), -1)
            end = end if end in steps else -1
            got = int(grammar.transitions[row, grammar.classes[token]])
            assert (got >= 0) == (end >= 0), (state, token)
            allowed += end >= 0
            if end >= 0:
                if end not in rows:
                    rows[end] = got
                    queue.append(end)
                assert rows[end] == got
        late = int(automaton.late[state])
        if late not in rows:
            rows[late] = int(grammar.late[row])
            queue.append(late)
        assert rows[late] == grammar.late[row]
        if is_budget:
            assert grammar.distances[row] == (0 if automaton.final[state] else -1)
        else:
            assert grammar.distances[row] == steps[state]
        check_draft(automaton, state, int(grammar.drafts[row]), after, texts, allowed, steps)
    assert set(rows.values()) | {0} == set(range(len(grammar.transitions)))
    columns = {column.tobytes() for column in grammar.transitions.T}
    assert len(columns) == grammar.transitions.shape[1]
    assert (grammar.transitions[1:, 0] == -1).all()
    assert (grammar.transitions[0] == 0).all()
    assert (grammar.distances[0], grammar.late[0], grammar.drafts[0]) == (0, 0, -1)
    return grammar


def check_draft(
    automaton: ByteAutomaton,
    state: int,
    draft: int,
    after: dict[tuple[int, int], int],
    texts: dict[int, bytes],
    allowed: int,
    steps: dict[int, int],
) -> None:
    forced = bytearray()
    end = state
    while True:
        symbols = np.flatnonzero(automaton.transitions[end] >= 0)
        if automaton.final[end] or len(symbols) != 1 or symbols[0] > 255:
            break
        forced.append(symbols[0])
        end = int(automaton.transitions[end, symbols[0]])
    fits = [
        len(text)
        for token, text in texts.items()
        if forced.startswith(text) and after.get((state, token), -1) in steps
    ]
    if allowed == 1 and not automaton.final[state]:
        assert (state, draft) in after
    elif fits:
        assert forced.startswith(texts[draft])
        assert len(texts[draft]) == max(fits)
    else:
        assert draft == -1


def small_vocabulary() -> TokenVocabulary:
    words = [b"a", b"b", b"ab", b"abc", b"c", b"ba", b"aab", b"", b"<", b"/", b"</", b">", b"t"]
    words += [
        b"<t",
        b"<t>",
        b"t>",
        b"</t>",
        b">\n",
        b"\n",
        b"\n\n",
        b">a",
        b"x",
        b"a",
        b"",
        b"",
        b"",
    ]
    specials = {"<t>": [7], "</t>": [23], "<s>": [24]}
    return TokenVocabulary.of_tokens(words, specials)


SMALL = [
    "(ab)*",
    "\\n\\n[ab]",
    "abc|aab",
    "a{1,3}b?",
    "[ab]+c",
    "x(ab|ba)*x",
    "abcabc(a|b)",
    "<b|a",
]


@pytest.mark.parametrize("expression", SMALL)
@pytest.mark.parametrize("is_open", [None, True, False])
def test_tables_are_those_of_a_walk_over_bytes(expression: str, is_open: bool | None) -> None:
    automaton = automaton_of(expression)
    if is_open is not None:
        automaton = with_thoughts(automaton, Thoughts("<t>", "</t>", is_open))
    if expression == "<b|a" and is_open is None:
        automaton = automaton_of("<t|a")
    check_tables(automaton, small_vocabulary())


@pytest.mark.parametrize("is_open", [True, False])
def test_a_budget_has_tables(is_open: bool) -> None:
    automaton = with_thoughts(None, Thoughts("<t>", "</t>", is_open))
    grammar = check_tables(automaton, small_vocabulary())
    assert grammar.shortest == 0
    # Every token is allowed, except when thoughts are late.
    is_late = grammar.distances < 0
    assert is_late.sum() == len("</t>")
    assert (grammar.transitions[~is_late][:, grammar.classes] >= 0).all()


# With many walks, the forms and tokenizers together take more than 20,000 steps.
@pytest.mark.parametrize(
    "walks", [3, pytest.param(150, marks=pytest.mark.slow)], ids=["few", "many"]
)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_masks_are_those_of_llguidance(
    name: str, kind: str, walks: int, request: pytest.FixtureRequest
) -> None:
    made: Kind = request.getfixturevalue(kind)
    expression = expression_of(FORMS[name])
    grammar = token_grammar(automaton_of(expression), made.vocabulary)
    rng = np.random.default_rng(5)
    bits = np.zeros((1, (made.tokenizer.vocab_size + 31) // 32), np.int32)
    num_equal = 0
    for _ in range(walks):
        matcher = LLMatcher(made.tokenizer, LLMatcher.grammar_from_regex(expression))
        row = 1
        for _ in range(30):
            llguidance.numpy.fill_next_token_bitmask(matcher, bits, 0)
            unpacked = np.unpackbits(bits[0].view(np.uint8), bitorder="little")
            theirs = unpacked[: made.vocabulary.size].astype(bool)
            ours = grammar.transitions[row][grammar.classes] >= 0
            with_stop = ours.copy()
            with_stop[STOP] = grammar.distances[row] == 1
            forced = matcher.compute_ff_bytes()
            assert (theirs <= with_stop).all()
            if not forced:
                assert (theirs == with_stop).all()
            num_equal += bool((theirs == with_stop).all())
            choices = np.flatnonzero(ours & theirs)
            if not len(choices) or (with_stop[STOP] and rng.random() < 0.1):
                break
            token = int(rng.choice(choices))
            assert matcher.consume_token(token)
            row = int(grammar.transitions[row, grammar.classes[token]])
    assert num_equal > 1


@pytest.mark.parametrize("name", FORMS)
def test_every_answer_ends_in_time(name: str, byte_level: Kind) -> None:
    for thoughts in (None, THOUGHTS, OPEN_THOUGHTS):
        automaton = automaton_of(expression_of(FORMS[name]))
        if thoughts is not None:
            automaton = with_thoughts(automaton, thoughts)
        grammar = token_grammar(automaton, byte_level.vocabulary)
        rng = np.random.default_rng(7)
        for most in range(grammar.shortest, grammar.shortest + 21):
            row = 1
            left = most
            while not (grammar.distances[row] == 1 and (left == 1 or rng.random() < 0.1)):
                after = grammar.transitions[row]
                is_allowed = (after >= 0) & (grammar.distances[after] < left)
                classes = np.flatnonzero(is_allowed)
                if not len(classes):
                    assert grammar.distances[row] == 1
                    break
                row = int(after[rng.choice(classes)])
                left -= 1
            assert left >= 1


def test_a_late_state_leads_out_at_once(byte_level: Kind) -> None:
    automaton = with_thoughts(automaton_of("yes|no"), OPEN_THOUGHTS)
    grammar = token_grammar(automaton, byte_level.vocabulary)
    row = int(grammar.late[1])
    text = b""
    while grammar.distances[row] != 1:
        token = int(grammar.drafts[row])
        if token < 0:
            token = int(np.flatnonzero(grammar.transitions[row][grammar.classes] >= 0)[0])
        text += byte_level.tokenizer.decode_bytes([token])
        row = int(grammar.transitions[row, grammar.classes[token]])
    assert text.lstrip(b"</think>\n") in (b"yes", b"no", b"es", b"o")
    assert text.startswith(b"</think>")


@pytest.mark.parametrize("expression", ["abz", "zab"])
def test_a_form_without_a_text_of_tokens_is_invalid(expression: str) -> None:
    with pytest.raises(InvalidGrammarError, match="no text of this model's tokens"):
        token_grammar(automaton_of(expression), small_vocabulary())


def test_large_tables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_TABLE_BYTES", 100)
    with pytest.raises(NotRegularError, match="bytes"):
        token_grammar(automaton_of("(abc){1,9}"), small_vocabulary())


def test_many_columns_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_MAX_FOLD_BYTES", 1 << 12)
    letters = "abcdefghijklmnopqrst"
    words = [(one + other).encode() for one in letters for other in letters]
    texts = [one + other + other + one for one in letters for other in letters]
    automaton = automaton_of("|".join(texts))
    with pytest.raises(NotRegularError, match="states"):
        token_grammar(automaton, TokenVocabulary.of_tokens(words, {}))


@pytest.fixture(scope="module")
def made() -> TokenGrammar:
    return token_grammar(
        with_thoughts(automaton_of("(ab)+c"), Thoughts("<t>", "</t>", True)), small_vocabulary()
    )


def check_equal(one: TokenGrammar, other: TokenGrammar) -> None:
    for name in ("classes", "transitions", "distances", "late", "drafts"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        assert getattr(other, name).dtype == np.int32


def test_a_file_gives_the_tables_back(made: TokenGrammar, tmp_path: Path) -> None:
    made.save(tmp_path / "grammar")
    made.save(tmp_path / "grammar")
    check_equal(made, TokenGrammar.load(tmp_path / "grammar"))
    check_equal(made, TokenGrammar.from_bytes(made.to_bytes()))
    assert [path.name for path in tmp_path.iterdir()] == ["grammar"]
    content = (tmp_path / "grammar").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    shortest = str(made.shortest)
    metadata = {"format": "qsample-grammar", "version": "1", "shortest": shortest}
    assert header["__metadata__"] == metadata
    assert header["grammar_classes"]["shape"] == [1, small_vocabulary().size]
    assert set(header) - {"__metadata__"} == {
        f"grammar_{name}"
        for name in ("classes", "transitions", "distances", "maps", "late", "drafts")
    }


def changed(made: TokenGrammar, **arrays: Array) -> TokenGrammar:
    values = {
        name: arrays.get(name, getattr(made, name))
        for name in ("classes", "transitions", "distances", "late", "drafts")
    }
    return TokenGrammar(**values)


def edited(array: Array, place: Any, value: int) -> Array:
    copy = array.copy()
    copy[place] = value
    return copy


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("classes", 0, 99),
        ("classes", 0, -1),
        ("transitions", (1, 1), 9999),
        ("transitions", (1, 1), -2),
        ("transitions", (0, 1), 1),
        ("transitions", (1, 0), 1),
        ("distances", 2, -2),
        ("distances", 2, 9999),
        ("distances", 0, 1),
        ("late", 1, -1),
        ("late", 1, 9999),
        ("late", 0, 1),
        ("drafts", 1, 9999),
        ("drafts", 1, -2),
        ("drafts", 1, 0),
        ("drafts", 0, 1),
    ],
)
def test_numbers_out_of_range_are_refused(
    made: TokenGrammar, name: str, place: Any, value: int
) -> None:
    if (name, place, value) == ("drafts", 1, 0):
        # A token of class 0, which no state allows.
        value = int(np.flatnonzero(made.classes == 0)[0])
    wrong = changed(made, **{name: edited(getattr(made, name), place, value)})
    with pytest.raises(QsampleError, match=r"f is damaged, or not a grammar .*; make it again"):
        TokenGrammar.from_bytes(wrong.to_bytes(), "f")


@pytest.mark.parametrize("name", ["classes", "transitions", "distances", "late", "drafts"])
def test_shapes_and_dtypes_that_do_not_fit_are_refused(made: TokenGrammar, name: str) -> None:
    array = getattr(made, name)
    for wrong in (array[:0], array[:1], array.astype(np.float32), array[None]):
        if name == "classes" and wrong.shape == (1,):
            continue
        with pytest.raises(QsampleError, match="is damaged"):
            TokenGrammar.from_bytes(changed_bytes(made, name, wrong))


def changed_bytes(made: TokenGrammar, name: str, array: Array) -> bytes:
    if name == "distances" and (len(array) < 2 or array.ndim > 1):
        return made.to_bytes()[:-4]
    return changed(made, **{name: array}).to_bytes()


def test_every_cut_and_flipped_byte_of_a_header_is_refused_or_harmless(made: TokenGrammar) -> None:
    content = made.to_bytes()
    for length in range(0, len(content), 97):
        with pytest.raises(QsampleError):
            TokenGrammar.from_bytes(content[:length])
    with pytest.raises(QsampleError):
        TokenGrammar.from_bytes(content + b"\0")
    rng = np.random.default_rng(1)
    for place in rng.integers(0, 700, 400):
        wrong = bytearray(content)
        wrong[place] ^= 1 << rng.integers(8)
        with contextlib.suppress(QsampleError):
            TokenGrammar.from_bytes(bytes(wrong))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(QsampleError, match=r"cannot read the grammar .*missing"):
        TokenGrammar.load(tmp_path / "missing")
    with pytest.raises(QsampleError, match="cannot write"):
        token_grammar(automaton_of("ab"), small_vocabulary()).save(tmp_path / "no" / "file")
