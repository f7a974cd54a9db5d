"""Forms become tables or masks: compiled once, in another process with limits, cached, and given up
with the last client."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import llguidance.gbnf_to_lark
import numpy as np
import pytest

from qsample.contract.interface import Features, Interface
from qsample.errors import ArgumentError
from qsample.request.grammar import (
    CompiledGrammar,
    Form,
    GrammarTokenizer,
    InvalidGrammarError,
    TokenizerArguments,
    compile_grammar,
    grammar_of,
)
from qsample.request.structured import grammars as module
from qsample.request.structured.automaton import Thoughts, automaton_of
from qsample.request.structured.grammars import (
    MAX_CACHED_FORMS,
    Grammars,
    PreparedForm,
    Trial,
    Wish,
    make_tables,
)
from qsample.request.structured.not_regular import NotRegularError
from qsample.request.structured.tables import TokenGrammar, token_grammar
from qsample.request.structured.vocabulary import TokenVocabulary
from qsample.runtime import CausalLM, load
from tests.helpers.grammars import SLOW, chained

TABLES = Features(grammars=True)
MASKS = Features(allowed_tokens=True)
BOTH = Features(grammars=True, allowed_tokens=True)
THOUGHTS = Thoughts("<think>", "</think>", is_open=True)
# No finite automaton follows it.
ANY_OBJECT = Form("json_schema", {"type": "object"})
LARK = Form("grammar", 'start: "yes" | "no"')
Make = Callable[..., Grammars]


@pytest.fixture(scope="module")
def bundled_model(bundled_package: Path) -> CausalLM:
    return load(bundled_package, intra_op_num_threads=1)


@pytest.fixture(scope="module")
def arguments(bundled_model: CausalLM) -> TokenizerArguments:
    assert bundled_model.tokenizer is not None
    return TokenizerArguments(
        tokenizer=bundled_model.tokenizer.to_json(),
        vocab_size=bundled_model.interface.vocab_size,
    )


@pytest.fixture(scope="module")
def vocabulary(arguments: TokenizerArguments) -> TokenVocabulary:
    return TokenVocabulary.of(GrammarTokenizer.of(arguments))


@pytest.fixture(scope="module")
def trial(arguments: TokenizerArguments) -> Iterator[Trial]:
    made = Trial(lambda: arguments, max_seconds=600)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def make(bundled_model: CausalLM) -> Iterator[Make]:
    """(features) → the forms of such a package. A form may take as long as a busy machine needs: none ends by
    itself."""
    made: list[Grammars] = []

    def build(features: Features) -> Grammars:
        interface = replace(bundled_model.interface, features=features)
        grammars = Grammars(interface, bundled_model.tokenizer)
        made.append(grammars)
        for trial in [grammars._idle_trials.get() for _ in range(grammars._idle_trials.qsize())]:
            trial._process.max_seconds = 600
            grammars._idle_trials.put(trial)
        return grammars

    yield build
    for grammars in made:
        grammars.close()


@pytest.fixture(scope="module")
def by_tables(make: Make) -> Grammars:
    return make(BOTH)


@pytest.fixture(scope="module")
def by_masks(make: Make) -> Grammars:
    return make(MASKS)


def prepare(grammars: Grammars, form: Form) -> PreparedForm:
    return asyncio.run(grammars.prepare(Wish(form)))


def masks_of(prepared: PreparedForm) -> CompiledGrammar:
    assert prepared.tables is None
    assert prepared.masks is not None
    return prepared.masks


def tables_of(prepared: PreparedForm) -> TokenGrammar:
    assert prepared.tables is not None
    assert prepared.masks is None
    return prepared.tables


# The wishes, and their keys.


@pytest.mark.parametrize(
    "wish",
    [
        Wish(Form("json_schema", {"b": {"a": [1, None]}, "a": "é"})),
        Wish(Form("choice", ["a", "b"]), THOUGHTS),
        Wish(None, Thoughts("a", "b", is_open=False)),
    ],
)
def test_a_wish_has_a_key(wish: Wish) -> None:
    again = Wish.of_key(wish.key)
    assert again.key == wish.key
    assert again == wish


def test_the_order_of_properties_and_the_thoughts_count() -> None:
    properties = Form("json_schema", {"a": 1, "b": 2})
    other_order = Form("json_schema", {"b": 2, "a": 1})
    closed = Thoughts("<think>", "</think>", is_open=False)
    wishes = [Wish(properties), Wish(other_order), Wish(properties, THOUGHTS)]
    wishes += [Wish(properties, closed), Wish(None, THOUGHTS)]
    assert len({wish.key for wish in wishes}) == 5


def test_a_form_that_is_nested_too_deep_has_no_key() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(InvalidGrammarError, match="nested too deep"):
        _ = Wish(Form("json_schema", deep)).key


# The trial in another process.


@pytest.mark.parametrize(
    ("form", "seconds", "reason"),
    [
        (Form("json_schema", chained(5000)), 600, "too large or nested too deep"),
        (Form("regex", SLOW), 0.5, "takes more than 0.5 seconds"),
    ],
)
def test_masks_beyond_the_limits_end_alone(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, form: Form, seconds: float, reason: str
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(trial._process, "max_seconds", seconds)
        with pytest.raises(InvalidGrammarError, match=reason):
            trial.check_masks(form)
    trial.check_masks(Form("regex", "[a-z]+"))
    assert trial.tables(Wish(Form("regex", "a"))).shortest == 2


def test_tables_beyond_the_time_end_alone(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(trial._process, "max_seconds", 0.5)
        with pytest.raises(InvalidGrammarError, match=r"takes more than 0\.5 seconds"):
            trial.tables(Wish(Form("regex", SLOW)))
    assert trial.tables(Wish(Form("regex", "a"))).shortest == 2


def test_errors_of_masks_are_left_to_the_server(trial: Trial) -> None:
    trial.check_masks(Form("grammar", "start: missing"))


def test_errors_of_tables_come_back(trial: Trial) -> None:
    with pytest.raises(InvalidGrammarError, match="no answer can follow that form"):
        trial.tables(Wish(Form("regex", "(")))
    with pytest.raises(NotRegularError) as raised:
        trial.tables(Wish(ANY_OBJECT))
    with pytest.raises(NotRegularError) as raised_here:
        module.expression_of(ANY_OBJECT)
    assert str(raised.value) == str(raised_here.value)


@pytest.mark.parametrize(
    "wish",
    [
        Wish(Form("regex", "[a-c]{2,5}")),
        Wish(Form("choice", ["yes", "no"]), THOUGHTS),
        Wish(None, THOUGHTS),
    ],
)
def test_tables_are_those_of_this_process(
    trial: Trial, vocabulary: TokenVocabulary, wish: Wish
) -> None:
    assert trial.tables(wish).key == make_tables(wish, vocabulary).key


def test_a_tokenizer_that_llguidance_cannot_read() -> None:
    arguments = TokenizerArguments(tokenizer="{}", vocab_size=5)
    trial = Trial(lambda: arguments, max_seconds=600)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="this model's tokenizer cannot follow a grammar"):
            trial.tables(Wish(Form("regex", "a")))
        assert trial._process._process is None


# What a package takes.


def test_regular_forms_become_tables(by_tables: Grammars, vocabulary: TokenVocabulary) -> None:
    grammar = tables_of(prepare(by_tables, Form("regex", "[a-z]{3}")))
    assert grammar.key == token_grammar(automaton_of("[a-z]{3}"), vocabulary).key
    assert tables_of(by_tables.prepared(Wish(Form("regex", "[a-z]{3}")))).key == grammar.key
    assert by_tables.tables(Wish(Form("regex", "[a-z]{3}"))).key == grammar.key


@pytest.mark.parametrize("form", [ANY_OBJECT, LARK])
def test_other_forms_become_masks(make: Make, by_tables: Grammars, form: Form) -> None:
    masks_of(prepare(by_tables, form))
    masks_of(by_tables.prepared(Wish(form)))
    # Masks know no thoughts.
    masks_of(asyncio.run(by_tables.prepare(Wish(form, THOUGHTS))))
    tables_alone = make(TABLES)
    for get in (lambda: prepare(tables_alone, form), lambda: tables_alone.prepared(Wish(form))):
        with pytest.raises(ArgumentError, match="cannot follow that form: that form has no tables"):
            get()
    with pytest.raises(NotRegularError):
        by_tables.tables(Wish(form))


def test_a_package_without_tables_takes_masks(by_masks: Grammars) -> None:
    masks_of(prepare(by_masks, Form("regex", "[a-z]{3}")))
    with pytest.raises(
        ArgumentError, match="exported without grammars; export the model with --grammars"
    ):
        asyncio.run(by_masks.prepare(Wish(None, THOUGHTS)))


def test_a_package_without_either(make: Make) -> None:
    with pytest.raises(ArgumentError, match=r"exported without grammars; .* with --for-serving"):
        prepare(make(Features()), Form("regex", "a"))


@pytest.mark.parametrize("features", [TABLES, MASKS])
def test_a_package_without_a_tokenizer(bundled_model: CausalLM, features: Features) -> None:
    interface = Interface(bundled_model.interface.vocab_size, (), features=features)
    grammars = Grammars(interface, None)
    for get in (
        lambda: prepare(grammars, Form("regex", "a")),
        lambda: grammars.prepared(Wish(Form("regex", "a"))),
    ):
        with pytest.raises(ArgumentError, match="the package has no tokenizer"):
            get()
    grammars.close()


def test_arguments_of_an_answer(by_tables: Grammars) -> None:
    prepared = prepare(by_tables, Form("regex", "[a-z]{3}"))
    assert prepared.grammar is prepared.tables
    assert prepared.table_bytes >= tables_of(prepared).transitions.nbytes
    masks = prepare(by_tables, LARK)
    assert masks.grammar is masks.masks
    assert masks.table_bytes == 0


def test_a_choice_may_look_like_a_grammar(by_masks: Grammars, by_tables: Grammars) -> None:
    form = Form("choice", ["a ::= b", 'say "x"\n'])
    assert masks_of(prepare(by_masks, form)).mask.any()
    tables_of(prepare(by_tables, form))


@pytest.mark.parametrize(
    ("kind", "text", "whole"),
    [
        ("calls", '[{"name": "f", "parameters": {"x": 2}}]', True),
        (
            "calls",
            '[{"name": "f", "parameters": {"x": 2}}, {"name": "g.h", "parameters": {"y": true}}]',
            True,
        ),
        ("call", '[{"name": "f", "parameters": {"x": 2}}]', True),
        (
            "call",
            '[{"name": "f", "parameters": {"x": 2}}, {"name": "g.h", "parameters": {"y": true}}]',
            False,
        ),
        # by the definition that its schema refers to
        ("calls", '[{"name": "f", "parameters": {"x": 4}}]', False),
        # blanks as json.dumps writes them
        ("calls", '[{"name": "f", "parameters": {"x":2}}]', False),
        ("calls", '[{"name": "e", "parameters": {}}]', False),
        ("calls", "[]", False),
    ],
)
def test_calls_follow_the_functions(
    arguments: TokenizerArguments, by_tables: Grammars, kind: Any, text: str, whole: bool
) -> None:
    one_to_three = {"description": 'a "::=" // \n', "type": "integer", "minimum": 1, "maximum": 3}
    f = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/a"}},
        "required": ["x"],
        "additionalProperties": False,
        "$defs": {"a": one_to_three},
    }
    g = {"type": "object", "properties": {"y": {"type": "boolean"}}, "required": ["y"]}
    functions = {"f": f, "g.h": g | {"additionalProperties": False}}
    tokenizer = GrammarTokenizer.of(arguments)
    tokens = tokenizer.tokenizer.tokenize_str(text)

    masks = compile_grammar(
        grammar_of(Form(kind, {**functions, "f": f | {"x-guidance": {}}})),
        tokenizer,
    )
    accepted = masks.matcher.try_consume_tokens(tokens)
    assert (accepted == len(tokens) and masks.matcher.is_accepting()) == whole

    tables = tables_of(prepare(by_tables, Form(kind, functions)))
    state = 1
    for token in tokens:
        state = int(tables.transitions[state, tables.classes[token]]) if state >= 0 else -1
    assert (state >= 0 and tables.distances[state] == 1) == whole


# Many clients.


def test_gbnf_is_translated_elsewhere(by_masks: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """For masks, it is done in Python, and takes seconds where a client sends much."""
    threads, plain = [], llguidance.gbnf_to_lark.gbnf_to_lark

    def translate(text: str) -> str:
        threads.append(threading.get_ident())
        return plain(text)

    monkeypatch.setattr(llguidance.gbnf_to_lark, "gbnf_to_lark", translate)

    async def run() -> None:
        gbnf = await by_masks.prepare(Wish(Form("grammar", 'root ::= "yes" | "no"')))
        choice = await by_masks.prepare(Wish(Form("choice", ["yes", "no"])))
        np.testing.assert_array_equal(masks_of(gbnf).mask, masks_of(choice).mask)
        with pytest.raises(ArgumentError, match="the grammar is not valid GBNF"):
            await by_masks.prepare(Wish(Form("grammar", 'root ::= "')))

    asyncio.run(run())
    assert len(threads) == 2
    assert threading.get_ident() not in threads


@pytest.mark.parametrize(
    "error", [MemoryError, type("PanicException", (BaseException,), {})], ids=["memory", "panic"]
)
@pytest.mark.parametrize("kind", ["by_tables", "by_masks"])
def test_a_form_that_failed_is_tried_again(
    error: type[BaseException],
    kind: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammars: Grammars = request.getfixturevalue(kind)
    wish = Wish(Form("regex", f"[0-9]{{{2 if error is MemoryError else 3}}}"))

    def fail(*_: object) -> Any:
        raise error("for now")

    async def run() -> PreparedForm:
        with monkeypatch.context() as patched:
            patched.setattr(Grammars, "_prepared", fail)
            asked = [grammars.prepare(wish) for _ in range(2)]
            told = await asyncio.gather(*asked, return_exceptions=True)
            assert [type(one) for one in told] == [error, error]
        return await grammars.prepare(wish)

    prepared = asyncio.run(run())
    assert prepared.tables is not None or prepared.masks is not None


@pytest.mark.parametrize(("features", "invalid"), [(BOTH, "("), (MASKS, "(")])
def test_a_form_is_compiled_once_and_elsewhere(
    make: Make, monkeypatch: pytest.MonkeyPatch, features: Features, invalid: str
) -> None:
    grammars = make(features)
    threads: list[int] = []
    plain = Grammars._prepared

    def noted(self: Grammars, *given: Any) -> PreparedForm:
        threads.append(threading.get_ident())
        return plain(self, *given)

    monkeypatch.setattr(Grammars, "_prepared", noted)
    wish = Wish(Form("regex", "[a-z]+"))

    async def run() -> None:
        asked = [asyncio.ensure_future(grammars.prepare(wish)) for _ in range(20)]
        cancelled = asyncio.ensure_future(grammars.prepare(wish))
        await asyncio.sleep(0)
        cancelled.cancel()
        assert len({id(prepared) for prepared in await asyncio.gather(*asked)}) == 1
        for _ in range(2):
            with pytest.raises(InvalidGrammarError, match="no answer can follow that form"):
                await grammars.prepare(Wish(Form("regex", invalid)))
        for number in range(MAX_CACHED_FORMS + 6):
            await grammars.prepare(Wish(Form("regex", f"a{number}")))

    asyncio.run(run())
    assert len(threads) == 1 + 2 + MAX_CACHED_FORMS + 6
    assert threading.get_ident() not in threads
    assert len(grammars._cache) == MAX_CACHED_FORMS


def test_large_tables_leave_the_cache(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = make(TABLES)
    wishes = [Wish(Form("regex", f"{letter}{{50}}")) for letter in "abcd"]
    size = asyncio.run(grammars.prepare(wishes[0])).table_bytes
    monkeypatch.setattr(module, "MAX_CACHED_TABLE_BYTES", 2 * size + size // 2)

    async def run() -> None:
        for wish in [*wishes, wishes[2]]:
            await grammars.prepare(wish)
        assert [*grammars._cache] == [wishes[3].key, wishes[2].key]
        monkeypatch.setattr(module, "MAX_CACHED_TABLE_BYTES", 1)
        await grammars.prepare(wishes[0])
        assert [*grammars._cache] == [wishes[0].key], "the newest stays"

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["by_tables", "by_masks"])
def test_a_form_ends_with_its_last_client(kind: str, request: pytest.FixtureRequest) -> None:
    grammars: Grammars = request.getfixturevalue(kind)
    slow = Wish(Form("regex", SLOW))

    async def run() -> None:
        await grammars.prepare(Wish(Form("regex", "[a-y]+")))  # the process has begun
        asked = [asyncio.ensure_future(grammars.prepare(slow)) for _ in range(2)]
        while (
            not (tried := list(grammars._running_trials.values()))
            or tried[0]._process._process is None
        ):
            await asyncio.sleep(0.01)
        process = tried[0]._process._process
        asked[0].cancel()
        await asyncio.sleep(0.1)
        assert len(grammars._running_trials) == 1, "the other waits"
        asked[1].cancel()
        while grammars._running_trials:
            await asyncio.sleep(0.01)
        assert not grammars._num_waiting
        assert process.wait(60) == -signal.SIGKILL, "by itself it runs out of memory"

    asyncio.run(asyncio.wait_for(run(), 120))


@pytest.mark.parametrize("kind", ["by_tables", "by_masks"])
def test_a_form_that_would_end_the_process_is_refused(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """llguidance overflows the stack; the next form is compiled as ever."""
    grammars: Grammars = request.getfixturevalue(kind)
    with pytest.raises(InvalidGrammarError, match="too large or nested too deep"):
        prepare(grammars, Form("json_schema", chained(5000)))
    prepared = prepare(grammars, Form("json_schema", chained(5)))
    assert (prepared.tables is None) == (kind == "by_masks")


def test_no_form_is_compiled_after_the_end(bundled_model: CausalLM) -> None:
    interface = replace(bundled_model.interface, features=BOTH)
    grammars = Grammars(interface, bundled_model.tokenizer)
    prepare(grammars, Form("regex", "a"))
    processes = [
        trial._process._process for trial in [grammars._idle_trials.get() for _ in range(2)]
    ]
    (process,) = [process for process in processes if process is not None]
    assert process.poll() is None
    process.kill()
    grammars.close()
    with pytest.raises(RuntimeError):
        prepare(grammars, Form("regex", "b"))


def test_forms_that_wait_at_the_end_are_given_up(bundled_model: CausalLM) -> None:
    """Two are compiled at a time: these end, and the third does not begin."""
    interface = replace(bundled_model.interface, features=TABLES)
    grammars = Grammars(interface, bundled_model.tokenizer)
    wishes = [Wish(Form("regex", f"{letter}{SLOW}")) for letter in "abc"]

    async def run() -> list[object]:
        asked = [asyncio.ensure_future(grammars.prepare(wish)) for wish in wishes]
        while len(trials := list(grammars._running_trials.values())) < 2 or any(
            trial._process._process is None for trial in trials
        ):
            await asyncio.sleep(0.01)
        grammars.close()
        return await asyncio.gather(*asked, return_exceptions=True)

    *begun, waiting = asyncio.run(asyncio.wait_for(run(), 120))
    assert all(isinstance(error, InvalidGrammarError) for error in begun)
    assert isinstance(waiting, asyncio.CancelledError)
