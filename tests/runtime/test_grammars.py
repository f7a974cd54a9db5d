"""Answers that follow grammars in the graph, against the same answers by masks that NumPy computes from the tables:
alone, in batches, in engines, in pieces, read late, captured, with guesses."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample import AutoModelForCausalLM
from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.contract.interface import Features
from qsample.models.bundled import TINY_LM
from qsample.package.package import read_package
from qsample.request.structured.automaton import Thoughts, automaton_of, with_thoughts
from qsample.request.structured.tables import TokenGrammar, token_grammar
from qsample.request.structured.vocabulary import TokenVocabulary
from qsample.runtime import CausalLM, Engine, SamplingParams, Step, load
from qsample.runtime.decode import grammar_rows
from qsample.runtime.decode.grammar_rows import GrammarRows
from qsample.runtime.decode.slots import Slots, Snapshot
from tests.helpers.capturing import capturing, compile_captured
from tests.helpers.reference_grammar import forbidden, next_state
from tests.helpers.schema_answers import ANY_TOKEN, OWN_TOKENS, check_answers
from tests.helpers.tiny_models import with_features

pytest.importorskip("llguidance")
pytest.importorskip("outlines_core")

CONTEXT = 256
PROMPTS = ["In the beginning", "Blessed are", "And", "The LORD said unto Moses, Speak"]
PERSON = (
    r'\{"name": "[^"\\\x00-\x1f]*", "age": (0|[1-9][0-9]{0,17}), "kind": "(king|prophet|priest)"\}'
)
EXPRESSIONS = (PERSON, "(yes|no|perhaps)", r"[A-Z][a-z]{2,8}( [a-z]+)*\.")
OPEN = Thoughts("<think>", "</think>", is_open=True)
RANDOM = SamplingParams(temperature=1.2, top_p=0.95, repetition_penalty=1.1, max_new_tokens=48)
GREEDY = SamplingParams(temperature=0, max_new_tokens=40)
NO_DEADLINE = 2**31 - 1


@pytest.fixture(scope="module")
def model(adapted_server_package: Path) -> CausalLM:
    return load(adapted_server_package)


@pytest.fixture(scope="module")
def make(model: CausalLM) -> Callable[..., TokenGrammar]:
    """Makes a grammar of an expression, or of thoughts before any text."""
    assert model.tokenizer is not None
    vocabulary = TokenVocabulary.of(model.grammars.tokenizer)

    @functools.cache
    def made(expression: str | None, thoughts: Thoughts | None = None) -> TokenGrammar:
        automaton = None if expression is None else automaton_of(expression)
        if thoughts is not None:
            automaton = with_thoughts(automaton, thoughts)
        assert automaton is not None
        return token_grammar(automaton, vocabulary)

    return made


@pytest.fixture(scope="module")
def grammars(make: Callable[..., TokenGrammar]) -> list[TokenGrammar | None]:
    return [make(EXPRESSIONS[0]), make(EXPRESSIONS[1]), None, make(EXPRESSIONS[2])]


class Masks:
    """Writes the masks of a row by the reference: the state is on the host."""

    def __init__(
        self, model: CausalLM, grammar: TokenGrammar, prompt: int, most: int, budget: int | None
    ) -> None:
        self._vocab = model.interface.vocab_size
        self._total = prompt
        self._row: dict[str, Any] = {
            "grammar_classes": grammar.classes[None],
            "grammar_transitions": grammar.transitions,
            "grammar_distances": grammar.distances,
            "grammar_maps": np.zeros_like(grammar.distances),
            "grammar_late": grammar.late,
            "grammar_state": 1,
            "grammar_deadline": NO_DEADLINE if budget is None else prompt + budget,
            "max_length": prompt + most,
            "stop_ids": np.array(model.package.manifest.token_ids.eos),
        }

    def __call__(self, step: Step | None, mask: np.ndarray) -> None:
        if step is not None:
            self._row["grammar_state"] = next_state(self._row, self._total, int(step.tokens[0]))
            self._total += 1
        bits = np.ones(mask.shape[1] * 32, np.uint8)
        bits[forbidden(self._row, self._vocab, CONTEXT, self._total)] = 0
        mask[0] = np.packbits(bits, bitorder="little").view(np.int32)


def by_masks(
    model: CausalLM,
    prompt: str,
    params: SamplingParams,
    seed: int,
    grammar: TokenGrammar | None,
    budget: int | None = None,
) -> tuple[list[int], str]:
    """The tokens and the finish reason of a row, whose masks the host writes."""
    assert model.tokenizer is not None
    assert params.max_new_tokens is not None
    count = len(model.tokenizer.encode(prompt))
    masks = None
    if grammar is not None:
        masks = Masks(model, grammar, count, params.max_new_tokens, budget)
    output = model.generate(prompt, params, seed=seed, allowed_tokens=masks)
    return output.token_ids[0], output.finish_reasons[0]


@pytest.fixture(scope="module")
def wanted(model: CausalLM, grammars: list[TokenGrammar | None]) -> list[tuple[list[int], str]]:
    """The answers to PROMPTS with RANDOM and the seeds from 5 on."""
    rows = enumerate(zip(PROMPTS, grammars, strict=True))
    return [by_masks(model, prompt, RANDOM, 5 + row, grammar) for row, (prompt, grammar) in rows]


def answers(output: Any) -> list[tuple[list[int], str]]:
    return list(zip(output.token_ids, output.finish_reasons, strict=True))


@pytest.mark.parametrize("params", [RANDOM, GREEDY], ids=["random", "greedy"])
def test_alone(
    model: CausalLM, grammars: list[TokenGrammar | None], params: SamplingParams
) -> None:
    for row, (prompt, grammar) in enumerate(zip(PROMPTS, grammars, strict=True)):
        got = model.generate(prompt, params, seed=5 + row, grammar=grammar)
        assert answers(got) == [by_masks(model, prompt, params, 5 + row, grammar)]


@pytest.mark.parametrize(("flush_every", "double_buffering"), [(1, True), (3, False), (16, True)])
def test_in_a_batch(
    model: CausalLM,
    grammars: list[TokenGrammar | None],
    wanted: list[tuple[list[int], str]],
    flush_every: int,
    double_buffering: bool,
) -> None:
    got = model.generate(
        PROMPTS,
        RANDOM,
        seed=5,
        grammar=grammars,
        flush_every=flush_every,
        double_buffering=double_buffering,
        prefill_chunk_size=3,
    )
    assert answers(got) == wanted


@pytest.mark.parametrize(("slots", "flush_every"), [(1, 1), (2, 4), (4, 16)])
def test_in_an_engine(
    model: CausalLM,
    grammars: list[TokenGrammar | None],
    wanted: list[tuple[list[int], str]],
    slots: int,
    flush_every: int,
) -> None:
    """Requests come and go; a slot gets another grammar, or none, with the next request."""
    with Engine(model, slots=slots, flush_every=flush_every) as engine:
        requests = []
        for turn in range(3):
            for row in [0, 1, 2, 3] if turn % 2 else [3, 2, 1, 0]:
                request = engine.add_request(
                    PROMPTS[row], RANDOM, seed=5 + row, grammar=grammars[row]
                )
                requests.append((row, request))
        for row, request in requests:
            output = request.result(60)
            assert (output.token_ids, output.finish_reason) == wanted[row]


def test_requests_wait_for_room_in_the_tables(
    model: CausalLM,
    grammars: list[TokenGrammar | None],
    wanted: list[tuple[list[int], str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tables hold a single grammar: others wait for its answers, those of any text do not."""
    largest = max(grammar.transitions.nbytes for grammar in grammars if grammar is not None)
    monkeypatch.setattr(grammar_rows, "MAX_TRANSITIONS_BYTES", 4 * largest)
    sizes: list[int] = []
    plain_allocate = GrammarRows._allocate

    def allocate(self: GrammarRows) -> None:
        plain_allocate(self)
        if "grammar_transitions" in self.inputs:
            sizes.append(int(np.prod(self.inputs["grammar_transitions"].shape)) * 4)

    monkeypatch.setattr(GrammarRows, "_allocate", allocate)
    with Engine(model, slots=4) as engine:
        requests = [
            (row, engine.add_request(PROMPTS[row], RANDOM, seed=5 + row, grammar=grammars[row]))
            for row in [0, 1, 2, 3, 1, 0, 3]
        ]
        for row, request in requests:
            output = request.result(60)
            assert (output.token_ids, output.finish_reason) == wanted[row]
    assert max(sizes) <= 4 * largest


def test_a_row_that_has_ended_keeps_no_state(
    model: CausalLM, make: Callable[..., TokenGrammar], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables may have shrunk since."""
    long, wide = make(r"[a-z]{60}"), make("|".join("abcdefghijklmnop"))
    room = max(long.transitions.nbytes, wide.transitions.nbytes)
    monkeypatch.setattr(grammar_rows, "MAX_TRANSITIONS_BYTES", 2 * room)
    with Engine(model, slots=3) as engine:
        first = [
            engine.add_request("And", max_new_tokens=70, seed=row, grammar=long) for row in range(3)
        ]
        then = [engine.add_request("And", max_new_tokens=5, seed=1, grammar=wide)]
        texts = [request.result(60).text for request in [*first, *then]]
    assert [len(text or "") for text in texts] == [60, 60, 60, 1]


def test_a_row_that_moves_takes_its_grammar_along(
    model: CausalLM, make: Callable[..., TokenGrammar]
) -> None:
    slots = Slots(model.sessions, 3, CONTEXT)
    grammar = make("(yes|no|perhaps)")
    call = model.read("And", seed=1, grammar=grammar, max_new_tokens=8)
    (sequence,), _ = model.prepare(call, CONTEXT)
    request = sequence.request
    slots.begin(2, request.prompt, 1, request.parameters, grammar=grammar)
    slots.prefill(2, request.prompt, emit=True)
    slots.move(2, 0, 0)
    for _ in range(8):
        slots.decode(range(1))
    tokens = slots.read().tokens_from(0, len(request.prompt))
    assert tokens == model.generate("And", seed=1, grammar=grammar, max_new_tokens=8).token_ids[0]
    slots.stop(0)
    slots.stop(2)
    assert [place.users for place in slots.grammars._layout.places.values()] == [0]


def test_nothing_is_read_between_tokens(
    model: CausalLM, make: Callable[..., TokenGrammar], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are read every eight steps, with a grammar as without; masks of the host need each token."""
    reads: list[int] = []
    plain_read = Slots.read

    def read(self: Slots, *given: Any, **options: Any) -> Snapshot:
        reads.append(self.step)
        return plain_read(self, *given, **options)

    monkeypatch.setattr(Slots, "read", read)
    words = make(r"[a-z]{40}")
    counts = []
    for grammar in (words, None):
        reads.clear()
        output = model.generate(
            PROMPTS[:2],
            seed=1,
            temperature=1.0,
            max_new_tokens=48,
            eos_token_id=2,
            grammar=[grammar, None],
            flush_every=8,
        )
        steps = max(len(ids) for ids in output.token_ids) - 1
        counts.append(len(reads))
        assert len(reads) <= steps / 8 + 3
    assert abs(counts[0] - counts[1]) <= 1


def test_answers_are_complete_within_any_limit(
    model: CausalLM, make: Callable[..., TokenGrammar]
) -> None:
    person = make(PERSON)
    for limit in range(person.shortest, person.shortest + 12):
        output = model.generate(
            PROMPTS, seed=limit, temperature=1.5, max_new_tokens=limit, grammar=person
        )
        assert output.finish_reasons == ["stop"] * 4
        for text in output.texts:
            assert json.loads(text).keys() == {"name", "age", "kind"}


def test_a_limit_below_the_shortest_answer(
    model: CausalLM, make: Callable[..., TokenGrammar]
) -> None:
    person = make(PERSON)
    message = rf"the shortest that follows the grammar has {person.shortest}.*allow at least"
    with pytest.raises(ValueError, match=message):
        model.generate("And", max_new_tokens=person.shortest - 1, grammar=person)
    with pytest.raises(ValueError, match=message), Engine(model, slots=1) as engine:
        engine.add_request("And", max_new_tokens=1, grammar=person)


@pytest.mark.parametrize("budget", [None, 0, 1, 7])
def test_thoughts(model: CausalLM, make: Callable[..., TokenGrammar], budget: int | None) -> None:
    """Thoughts of any text, then the form; a budget ends them, and so does the limit of the answer."""
    assert model.tokenizer is not None
    grammar = make("(yes|no|perhaps)", OPEN)
    ends = len(model.tokenizer.encode("</think>"))
    for seed in range(4):
        output = model.generate(
            "And", RANDOM, seed=seed, grammar=grammar, thinking_token_budget=budget
        )
        assert answers(output) == [by_masks(model, "And", RANDOM, seed, grammar, budget)]
        thoughts, mark, answer = output.texts[0].partition("</think>")
        assert mark
        assert answer.lstrip("\n") in ("yes", "no", "perhaps")
        assert output.finish_reasons == ["stop"]
        if budget is not None:
            written = len(model.tokenizer.encode(thoughts)) if thoughts else 0
            assert written <= budget + ends


def test_a_budget_for_thoughts_before_any_text(
    model: CausalLM, make: Callable[..., TokenGrammar]
) -> None:
    """Without a form, the tokens up to the budget and after the thoughts are as without a grammar."""
    grammar = make(None, OPEN)
    free = model.generate("And", RANDOM, seed=3).token_ids[0]
    loose = model.generate("And", RANDOM, seed=3, grammar=grammar).token_ids[0]
    assert loose == free
    output = model.generate("And", RANDOM, seed=3, grammar=grammar, thinking_token_budget=5)
    assert output.token_ids[0][:5] == free[:5]
    assert "</think>" in output.texts[0]
    assert len(output.token_ids[0]) == RANDOM.max_new_tokens or output.finish_reasons == ["stop"]


@pytest.fixture(scope="module")
def captured_package(bundled_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("captured")
    portable = folder / "portable"
    with_features(read_package(bundled_package), portable, Features().for_serving())
    return compile_captured(portable, folder / "captured", CONTEXT)


@pytest.mark.ci
@pytest.mark.parametrize("flush_every", [1, 4])
def test_captured_graphs(
    captured_package: Path,
    grammars: list[TokenGrammar | None],
    make: Callable[..., TokenGrammar],
    flush_every: int,
) -> None:
    """A larger grammar needs larger tables, and so another capture, in the middle of other answers."""
    plain = load(captured_package)
    model, session = capturing(plain)
    prompts = [PROMPTS[1], PROMPTS[2], PROMPTS[3], PROMPTS[0]]
    chosen = [grammars[1], None, grammars[3], make(PERSON, OPEN)]
    rows = list(zip(prompts, chosen, strict=True))
    expected = [by_masks(plain, prompt, RANDOM, row, of) for row, (prompt, of) in enumerate(rows)]
    with Engine(model, slots=2, flush_every=flush_every) as engine:
        requests = [
            engine.add_request(prompt, RANDOM, seed=row, grammar=of)
            for row, (prompt, of) in enumerate(rows)
        ]
        got = [request.result(60) for request in requests]
    assert [(output.token_ids, output.finish_reason) for output in got] == expected
    assert session.replayed > 20


@pytest.mark.ci
def test_guesses_change_no_token(
    guessing_package: Path, grammars: list[TokenGrammar | None], make: Callable[..., TokenGrammar]
) -> None:
    """A forced text is guessed, so its answer takes fewer steps; lookup and predictions guess as well."""
    model = load(guessing_package)
    chosen = [*grammars[:3], make(PERSON, OPEN)]
    for params in (RANDOM, GREEDY):
        rows = list(enumerate(zip(PROMPTS, chosen, strict=True)))
        expected = [by_masks(model, prompt, params, row, of) for row, (prompt, of) in rows]
        for lookup in (0, 7):
            guessing = SamplingParams(
                **{
                    **{name: getattr(params, name) for name in ("temperature", "top_p")},
                    "repetition_penalty": params.repetition_penalty,
                    "max_new_tokens": params.max_new_tokens,
                    "prompt_lookup_num_tokens": lookup,
                }
            )
            output = model.generate(PROMPTS, guessing, seed=0, grammar=chosen)
            assert answers(output) == expected
            assert output.timing.drafts.num_accepted_tokens > 10


def test_fewest_tokens_after_limited_thoughts(
    model: CausalLM, make: Callable[..., TokenGrammar]
) -> None:
    """Without a form, `min_new_tokens` is as ever: no stop token comes before."""
    grammar = make(None, OPEN)
    (stop,) = model.package.manifest.token_ids.eos
    for seed in range(3):
        output = model.generate(
            "And",
            seed=seed,
            grammar=grammar,
            thinking_token_budget=2,
            logit_bias={stop: 100.0},
            min_new_tokens=20,
            max_new_tokens=40,
        )
        assert "</think>" in output.texts[0]
        assert output.token_ids[0].index(stop) == 20
        assert output.finish_reasons == ["stop"]


def test_refusals(model: CausalLM, make: Callable[..., TokenGrammar], llama_package: Path) -> None:
    choice = make("(yes|no|perhaps)")
    with pytest.raises(ValueError, match=r"exported without grammars.*--grammars"):
        load(llama_package).generate([[3]], grammar=choice)
    with pytest.raises(ValueError, match=r"grammar is 7; give a result of CausalLM\.grammar"):
        model.generate("And", grammar=7)
    with pytest.raises(ValueError, match="a list with one for each prompt"):
        model.generate(["And", "The"], grammar=[choice])
    other = TokenGrammar(
        choice.classes[:-1], choice.transitions, choice.distances, choice.late, choice.drafts
    )
    with pytest.raises(ValueError, match=r"the grammar is for \d+ tokens, and the model has"):
        model.generate("And", grammar=other)
    with pytest.raises(ValueError, match="thinking_token_budget is given, and the grammar"):
        model.generate("And", grammar=choice, thinking_token_budget=3)
    with pytest.raises(ValueError, match="thinking_token_budget is given, and the grammar"):
        model.generate("And", thinking_token_budget=3)
    with pytest.raises(ValueError, match="thinking_token_budget is -1; give an integer >= 0"):
        model.generate("And", grammar=choice, thinking_token_budget=-1)
    with pytest.raises(ValueError, match="min_new_tokens or min_length is given with a grammar"):
        model.generate("And", grammar=choice, min_new_tokens=2)


def test_other_stop_tokens(model: CausalLM, make: Callable[..., TokenGrammar]) -> None:
    """A stop token of the caller ends an answer where it may end, and nowhere else."""
    assert model.tokenizer is not None
    (stop,) = model.tokenizer.encode(" the", add_special_tokens=False)
    choice = make("(yes|no|perhaps)( the end)?")
    for seed in range(6):
        output = model.generate(
            "And", seed=seed, temperature=2.0, grammar=choice, eos_token_id=stop, max_new_tokens=20
        )
        text = model.tokenizer.decode(output.token_ids[0][:-1])
        assert output.token_ids[0][-1] == stop
        assert text in ("yes", "no", "perhaps", "yes the end", "no the end", "perhaps the end")


@pytest.mark.parametrize(
    "count", [24, pytest.param(2000, marks=pytest.mark.slow)], ids=["few", "many"]
)
@pytest.mark.parametrize("temperature", [OWN_TOKENS, ANY_TOKEN])
def test_answers_to_random_schemas(model: CausalLM, count: int, temperature: float) -> None:
    """Eight schemas a batch, at limits from the shortest answer up: jsonschema finds every answer valid."""
    check_answers(model, count, seed=count, temperature=temperature)


def test_a_package_and_a_model_make_grammars(
    bundled_package: Path, adapted_server_package: Path
) -> None:
    """As `qsample.AutoModelForCausalLM` opens them."""
    package = AutoModelForCausalLM.from_pretrained(adapted_server_package)
    texts = package.generate("And", grammar=package.grammar(choice=["just"]), seed=1).texts
    assert texts == ["just"]
    with pytest.raises(ValueError, match=r"takes no grammars; export it with grammars=True"):
        AutoModelForCausalLM.from_pretrained(bundled_package).grammar(choice=["just"])
    for wrong, message in (
        ({}, "no form was given"),
        ({"regex": "a", "choice": ["b"]}, "several forms were given"),
        ({"json": {"type": "object"}}, "#: any object"),
        ({"json": "{"}, "is not valid JSON"),
        ({"regex": "("}, "no answer can follow that form"),
        ({"choice": []}, "choice"),
    ):
        with pytest.raises(ValueError, match=message):
            package.grammar(**wrong)


def test_a_file_of_a_grammar(
    model: CausalLM, make: Callable[..., TokenGrammar], tmp_path: Path
) -> None:
    """A host without the libraries of grammars loads it."""
    from qsample import runtime

    grammar = make("(yes|no|perhaps)")
    grammar.save(str(tmp_path / "choice.safetensors"))
    loaded = runtime.TokenGrammar.load(str(tmp_path / "choice.safetensors"))
    assert loaded.key == grammar.key
    assert answers(model.generate("And", RANDOM, seed=1, grammar=loaded)) == [
        by_masks(model, "And", RANDOM, 1, grammar)
    ]


@pytest.mark.ci
def test_parts_for_several_devices(
    bundled_package: Path, grammars: list[TokenGrammar | None], tmp_path: Path
) -> None:
    """The last part has the sampler, and with it the tables."""
    portable = tmp_path / "portable"
    with_features(read_package(bundled_package), portable, Features(grammars=True))
    options = CompileOptions(ctx_len=CONTEXT, num_devices=2)
    compile_package(read_package(portable), tmp_path / "parts", options)
    parts = load(tmp_path / "parts").generate(PROMPTS, RANDOM, seed=5, grammar=grammars)
    whole = load(portable).generate(PROMPTS, RANDOM, seed=5, grammar=grammars)
    assert answers(parts) == answers(whole)


@pytest.mark.ci
def test_a_sampler_on_the_host(
    bundled_package: Path, grammars: list[TokenGrammar | None], tmp_path: Path
) -> None:
    """A package whose decoder returns logits."""
    model = AutoModelForCausalLM.from_pretrained(
        TINY_LM, include_sampler=False, grammars=True
    ).export(tmp_path / "host")
    portable = tmp_path / "portable"
    with_features(read_package(bundled_package), portable, Features(grammars=True))
    on_the_host = model.generate(PROMPTS, RANDOM, seed=5, grammar=grammars)
    in_the_graph = load(portable).generate(PROMPTS, RANDOM, seed=5, grammar=grammars)
    assert answers(on_the_host) == answers(in_the_graph)
