"""Calls as sequences, without a graph: what each row is asked for, and calls that fit no package."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qsample.contract.interface import Features, Interface, KeyValueShape
from qsample.errors import ArgumentError
from qsample.package.manifest import TokenIds
from qsample.request.repetition import RepetitionDetection
from qsample.request.structured.tables import TokenGrammar
from qsample.request.text.tokenizer import Tokenizer
from qsample.runtime import SamplingParams
from qsample.runtime.call import Call
from qsample.runtime.image_prompts import TEXT_ONLY
from qsample.runtime.prepare import (
    check_features,
    choose_seeds,
    find_adapter,
    for_package,
    make_sequences,
    parameter_row,
)
from qsample.runtime.sequence import Sequence
from tests.helpers.fake_package import byte_tokenizer

V = 320
TOKENS = TokenIds(0, 1, (2, 3))
TOKENIZER = Tokenizer(byte_tokenizer())


def interface(**features: Any) -> Interface:
    return Interface(V, (KeyValueShape(1, 8),), "float32", Features(**features))


def sequences(
    inputs: Any = (5, 6, 7), params: Any = None, *, of: Interface | None = None, **fields: Any
) -> list[Sequence]:
    tokenizer = fields.pop("own_tokenizer", None)
    adapters = fields.pop("adapters", {})
    priority = fields.pop("priority", 0)
    call = Call(inputs=inputs, params=params or SamplingParams(), **fields)
    made, guide = make_sequences(
        call, of or interface(), TOKENS, tokenizer, lambda need: 64, adapters, TEXT_ONLY, priority=priority
    )  # fmt: skip
    assert guide is None
    return made


def test_the_fields_of_a_row() -> None:
    (plain,) = sequences(seed=4)
    request = plain.request
    assert request.prompt.tolist() == request.given_prompt.tolist() == [5, 6, 7]
    assert (request.seed, request.guided, request.priority, request.max_time) == (4, False, 0, None)
    assert (request.expected_tokens, request.adapter, request.grammar, request.scored) == (
        None,
    ) * 4
    assert request.stop_ids == [2, 3]
    assert (plain.images, plain.delivery.text, plain.delivery.repetitions) == (None, None, None)
    assert plain.request.max_length == 64

    padded, other = sequences(
        [[9, 5], [6, 7]],
        pad=9,
        seed=4,
        priority=-3,
        max_time=2.5,
        logits_processor=lambda ids, logits: logits,
        repetition_detection=RepetitionDetection(max_pattern_size=3, min_count=2),
        num_return_sequences=1,
    )
    request = padded.request
    assert (request.prompt.tolist(), request.given_prompt.tolist()) == ([5], [9, 5])
    assert (request.guided, request.priority, request.max_time) == (True, -3, 2.5)
    assert padded.delivery.repetitions is not None
    assert padded.delivery.repetitions is not other.delivery.repetitions
    assert other.request.seed == 5


def test_rows_of_a_prompt_are_adjacent() -> None:
    made = sequences([[5], [6]], seed=7, num_return_sequences=2)
    assert [row.request.prompt.tolist() for row in made] == [[5], [5], [6], [6]]
    assert [row.request.seed for row in made] == [7, 8, 9, 10]
    with pytest.raises(
        ValueError, match="num_return_sequences is 2 and prompt 1 is continued greedily"
    ):
        sequences(
            [[5], [6]], [SamplingParams(), SamplingParams(temperature=0)], num_return_sequences=2
        )
    assert len(sequences([[5], [6]], SamplingParams(temperature=0))) == 2


def test_the_capacity_is_asked_for_the_longest_row() -> None:
    asked: list[int] = []
    call = Call(inputs=[[5], [6, 7, 8]], params=SamplingParams(max_new_tokens=10))

    def capacity(need: int) -> int:
        asked.append(need)
        return need

    made, _ = make_sequences(call, interface(), TOKENS, None, capacity, {}, TEXT_ONLY)
    assert asked == [13]
    assert [row.request.max_length for row in made] == [11, 13]


@pytest.mark.parametrize(
    ("fields", "stops"),
    [
        ({}, [2, 3]),
        ({"stops": (4,)}, [4]),
        ({"stops": ()}, []),
        ({"stops": (4,), "chat_stops": (9,)}, [4]),
        ({"stops": (4,), "params": SamplingParams(eos_token_id=(8,))}, [8]),
        ({"params": SamplingParams(eos_token_id=())}, []),
    ],
)
def test_stop_tokens_of_a_row(fields: dict[str, Any], stops: list[int]) -> None:
    assert sequences(**fields)[0].request.stop_ids == stops


def test_an_empty_prompt_has_the_callers_first_token_or_the_packages() -> None:
    assert sequences([[]])[0].request.prompt.tolist() == [1]
    assert sequences([[]], bos=0)[0].request.prompt.tolist() == [0]


def test_texts_of_a_row() -> None:
    (row,) = sequences("ab", own_tokenizer=TOKENIZER, stop_strings="c")
    assert row.request.prompt.tolist() == [1, 68, 69]
    text = row.delivery.text
    assert text is not None
    assert text.put(70) == ""
    assert text.stop_string == "c"
    (row,) = sequences(
        "ab", own_tokenizer=TOKENIZER, stop_strings=("c",), include_stop_str_in_output=True
    )
    assert row.delivery.text is not None
    assert row.delivery.text.put(70) == "c"
    for skips, expected in ((True, ""), (False, "</s>")):
        (row,) = sequences("ab", own_tokenizer=TOKENIZER, skip_special_tokens=skips)
        assert row.delivery.text is not None
        assert row.delivery.text.put(2) + row.delivery.text.end() == expected
    with pytest.raises(
        ValueError, match="stop_strings are found in the text, and the package has no"
    ):
        sequences(stop_strings=("c",))
    # A tokenizer of the call serves a package without one.
    assert sequences("ab", tokenizer=byte_tokenizer())[0].request.prompt.tolist() == [1, 68, 69]


MASKS = interface(allowed_tokens=True)
GRAMMARS = interface(grammars=True)


def allowed(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def test_masks_of_rows() -> None:
    every = np.full(V // 32, -1, np.int32)
    one = np.zeros_like(every)
    one[0] = 1 << 5
    two = [
        sequences([[5], [6]], of=MASKS, allowed_tokens=mask)
        for mask in (one, np.stack([one, every]))
    ]
    for rows, second in zip(two, (one, every), strict=True):
        assert allowed(rows[0].request.parameters["allowed_tokens"]) == [5]
        assert rows[1].request.parameters["allowed_tokens"].tolist() == second.tolist()
    (free,) = sequences(of=MASKS)
    assert free.request.parameters["allowed_tokens"].tolist() == every.tolist()
    for mask in (every[:-1], every.astype(np.int64), np.stack([every] * 3)):
        with pytest.raises(ValueError, match=r"allowed_tokens is int\d\d \(.*\[10\] or \[1, 10\]"):
            sequences(of=MASKS, allowed_tokens=mask)
    with pytest.raises(ValueError, match="exported with allowed_tokens=True"):
        sequences(allowed_tokens=every)


def test_a_function_sees_each_token() -> None:
    """So no token is guessed, and its masks begin with all tokens."""
    of = MASKS
    call = Call(inputs=[[5], [6]], params=SamplingParams(), allowed_tokens=lambda step, mask: None)
    made, guide = make_sequences(call, of, TOKENS, None, lambda need: 64, {}, TEXT_ONLY)
    assert guide is not None
    for row in made:
        assert row.request.guided
        assert (row.request.parameters["allowed_tokens"] == -1).all()
    guessing = interface(allowed_tokens=True, num_speculative_tokens=3)
    params = SamplingParams(prompt_lookup_num_tokens=3)
    for function, guesses, expected in ((None, 3, [8]), (lambda step, mask: None, 0, None)):
        call = Call(inputs=[5], params=params, allowed_tokens=function, prediction=[8])
        (row,), _ = make_sequences(call, guessing, TOKENS, None, lambda need: 64, {}, TEXT_ONLY)
        most = row.request.parameters["prompt_lookup_num_tokens"]
        assert (most.tolist(), most.dtype.name) == (guesses, "int32")
        given = row.request.expected_tokens
        assert (None if given is None else given.tolist()) == expected


@pytest.mark.parametrize("of", [MASKS, interface(allowed_tokens=True, grammars=True)])
def test_allowed_ids_become_a_mask(of: Interface) -> None:
    (row,) = sequences(of=of, allowed_token_ids=[0, 31, 32, 319])
    assert allowed(row.request.parameters["allowed_tokens"]) == [0, 31, 32, 319]
    assert row.request.grammar is None
    assert row.request.stop_ids == [2, 3]


def test_allowed_ids_become_a_grammar_whose_stop_tokens_are_among_them() -> None:
    (row,) = sequences(of=GRAMMARS, allowed_token_ids=[3, 9])
    grammar = row.request.tables
    assert grammar is not None
    assert np.flatnonzero(grammar.classes).tolist() == [3, 9]
    assert row.request.stop_ids == [3]
    mine = SamplingParams(eos_token_id=(9, 4))
    for params in (mine, [mine]):
        (row,) = sequences([[5]], params, of=GRAMMARS, allowed_token_ids=[3, 9])
        assert row.request.stop_ids == [9]
    (row,) = sequences(of=GRAMMARS, allowed_token_ids=[3, 9], stops=(9, 2))
    assert row.request.stop_ids == [9]


@pytest.mark.parametrize(
    ("of", "fields", "message", "argument"),
    [
        (MASKS, {"allowed_tokens": [1]}, "allowed_token_ids and allowed_tokens were given", "allowed_token_ids"),
        (MASKS, {"grammar": 1}, "allowed_token_ids and grammar were given", "allowed_token_ids"),
        (MASKS, {"allowed_token_ids": [5, V]}, f"allowed_token_ids is {V}; give token ids of the model, 0 to {V - 1}",
         "allowed_token_ids"),
        (interface(), {}, "needs a package that was exported with allowed_tokens=True", "allowed_token_ids"),
    ],
)  # fmt: skip
def test_allowed_ids_that_are_refused(
    of: Interface, fields: dict[str, Any], message: str, argument: str
) -> None:
    with pytest.raises(ArgumentError, match=message) as raised:
        sequences(of=of, **{"allowed_token_ids": [5], **fields})
    assert raised.value.argument == argument


def grammar(distance: int, *, size: int = V, thoughts: bool = False) -> TokenGrammar:
    """Answers of at least `distance` tokens, their stop token included."""
    return TokenGrammar(
        classes=np.zeros(size, np.int32),
        transitions=np.zeros((2, 1), np.int32),
        distances=np.array([0, distance], np.int32),
        late=np.array([0, 0 if thoughts else 1], np.int32),
        drafts=np.full(2, -1, np.int32),
    )


def test_grammars_of_prompts() -> None:
    one, two = grammar(2), grammar(0)
    shared = sequences([[5], [6]], of=GRAMMARS, grammar=one)
    assert [row.request.grammar for row in shared] == [one, one]
    apart = sequences([[5], [6]], of=GRAMMARS, grammar=[None, two])
    assert [row.request.grammar for row in apart] == [None, two]
    # Without a stop token, the shortest answer is shorter by one.
    (row,) = sequences(params=SamplingParams(eos_token_id=()), of=GRAMMARS, grammar=one)
    assert row.request.tables is not None
    assert row.request.tables.shortest == 1


@pytest.mark.parametrize(
    ("params", "shortest", "message"),
    [
        (SamplingParams(max_new_tokens=3), 3, None),
        (SamplingParams(max_new_tokens=3), 4, "have 3 tokens, .* has 4, its stop token included; allow at least 4"),
        (SamplingParams(max_new_tokens=3, eos_token_id=()), 4, None),
        (SamplingParams(max_new_tokens=3, eos_token_id=()), 5, "have 3 tokens, .* has 4; allow at least 4"),
        (SamplingParams(min_new_tokens=1), 1, "min_new_tokens or min_length is given with a grammar"),
        (SamplingParams(min_new_tokens=0), 1, None),
        (SamplingParams(min_new_tokens=1), 0, None),
    ],
)  # fmt: skip
def test_an_answer_fits_its_row(params: SamplingParams, shortest: int, message: str | None) -> None:
    if message is None:
        assert sequences(params=params, of=GRAMMARS, grammar=grammar(shortest))
        return
    with pytest.raises(ArgumentError, match=message):
        sequences(params=params, of=GRAMMARS, grammar=grammar(shortest))
    with pytest.raises(ValueError, match=r"^prompt 1: "):
        sequences([[5], [6]], params, of=GRAMMARS, grammar=[None, grammar(shortest)])


@pytest.mark.parametrize(
    ("of", "given", "message"),
    [
        (interface(), grammar(2), "the package was exported without grammars"),
        (
            GRAMMARS,
            [grammar(2)] * 2,
            r"grammar is .*; give a result of CausalLM.grammar, or a list",
        ),
        (GRAMMARS, [5], "grammar is 5; give a result of CausalLM.grammar"),
        (GRAMMARS, "a", "grammar is 'a'; give a result of CausalLM.grammar"),
        (GRAMMARS, grammar(2, size=V - 1), "the grammar is for 319 tokens, and the model has 320"),
    ],
)
def test_grammars_that_do_not_fit(of: Interface, given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sequences(of=of, grammar=given)


def test_a_budget_for_thoughts() -> None:
    thinking = grammar(2, thoughts=True)
    (row,) = sequences(of=GRAMMARS, grammar=thinking, thinking_token_budget=4)
    assert row.request.parameters["grammar_deadline"] == 3 + 4
    (row,) = sequences(of=GRAMMARS, grammar=thinking)
    assert row.request.parameters["grammar_deadline"] == 2**31 - 1
    (row,) = sequences(of=GRAMMARS, grammar=thinking, thinking_token_budget=2**31 - 1)
    assert row.request.parameters["grammar_deadline"] == 2**31 - 1
    for given in (None, grammar(2)):
        with pytest.raises(
            ValueError, match="thinking_token_budget is given, and the grammar does"
        ):
            sequences(of=GRAMMARS, grammar=given, thinking_token_budget=0)
    with pytest.raises(ValueError, match="thinking_token_budget"):
        sequences([[5], [6]], of=GRAMMARS, grammar=[thinking, None], thinking_token_budget=0)


SCORING = interface(prompt_logprobs=True, grammars=True, logprobs=True)


def test_prompts_that_are_scored() -> None:
    """From the second token on; the last need not be read."""
    (row,) = sequences([5, 6, 7], SamplingParams(temperature=1.5), of=SCORING, prompt_logprobs=True)
    request = row.request
    assert request.prompt.tolist() == [5, 6]
    assert request.scored is not None
    assert request.scored.places.tolist() == [0, 1]
    assert request.scored.ids.tolist() == [6, 7]
    assert (request.scored.num_unread, request.num_prompt_tokens) == (1, 3)
    assert (request.max_new_tokens, request.stop_ids, request.output_names) == (1, [], ())
    assert request.parameters["temperature"] == 0


def test_tokens_that_are_scored_after_a_prompt() -> None:
    rows = sequences(
        [[5, 6], [7]],
        [SamplingParams(), SamplingParams(max_new_tokens=9)],
        of=SCORING,
        logprob_token_ids=[0, 319],
        grammar=grammar(99),
    )
    for row, place in zip(rows, (1, 0), strict=True):
        scored = row.request.scored
        assert scored is not None
        assert (scored.places.tolist(), scored.ids.tolist()) == ([place, place], [0, 319])
        assert (scored.num_unread, row.request.max_new_tokens) == (0, 1)
        assert row.request.grammar is None


@pytest.mark.parametrize(
    ("of", "inputs", "fields", "message", "argument"),
    [
        (interface(), [5, 6], {"prompt_logprobs": True}, "prompt_logprobs was given, and the package does not score",
         "prompt_logprobs"),
        (interface(), [5, 6], {"logprob_token_ids": [5]}, "logprob_token_ids was given, and the package",
         "logprob_token_ids"),
        (SCORING, [5], {"prompt_logprobs": True}, "the prompt is a single token", "prompt_logprobs"),
        (SCORING, [5, 6], {"logprob_token_ids": [V]}, "logprob_token_ids has token id 320", "logprob_token_ids"),
        (SCORING, [5, 6], {"logprob_token_ids": [5], "prompt_logprobs": True},
         "prompt_logprobs and logprob_token_ids were given", "logprob_token_ids"),
    ],
)  # fmt: skip
def test_scores_that_are_refused(
    of: Interface, inputs: Any, fields: dict[str, Any], message: str, argument: str
) -> None:
    with pytest.raises(ArgumentError, match=message) as raised:
        sequences(inputs, of=of, **fields)
    assert raised.value.argument == argument


def test_optional_outputs() -> None:
    of = interface(logprobs=True, probs=True)
    available = tuple(spec.name for spec in of.token_outputs)
    assert len(available) >= 2
    assert sequences(of=of)[0].request.output_names == available
    assert sequences(of=of, outputs=[])[0].request.output_names == ()
    assert sequences(of=of, outputs={available[1]})[0].request.output_names == available[1:2]
    assert sequences(of=of, outputs=available[::-1])[0].request.output_names == available
    for outputs in (available[0], ["other"], 5):
        with pytest.raises(ValueError, match=f"outputs is .*, which are {', '.join(available)}"):
            sequences(of=of, outputs=outputs)
    with pytest.raises(ValueError, match="which are none"):
        sequences(outputs=["other"])


GUESSING = interface(num_speculative_tokens=3)


@pytest.mark.parametrize(
    ("prediction", "ids"),
    [([5, 0, 319], [5, 0, 319]), (np.array([5], np.uint8), [5]), ([], []), ("ab", [68, 69])],
)
def test_predictions(prediction: Any, ids: list[int]) -> None:
    (row,) = sequences(of=GUESSING, prediction=prediction, own_tokenizer=TOKENIZER)
    found = row.request.expected_tokens
    assert found is not None
    assert (found.tolist(), found.dtype) == (ids, np.int64)


@pytest.mark.parametrize(
    ("of", "inputs", "prediction", "message"),
    [
        (interface(), [5], [5], "prediction is given, and the package draws a token a step"),
        (
            GUESSING,
            [[5], [6]],
            [5],
            "prediction is given with 2 prompts; it is for a single prompt",
        ),
        (GUESSING, [5], "ab", "prediction is a text, and the package has no tokenizer"),
        (GUESSING, [5], [[5]], r"prediction is int64 \(1, 1\); give a text"),
        (GUESSING, [5], [1.5], r"prediction is float64 \(1,\); give a text"),
        (GUESSING, [5], [V], "prediction has token id 320"),
    ],
)
def test_predictions_that_are_refused(
    of: Interface, inputs: Any, prediction: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sequences(inputs, of=of, prediction=prediction)


def test_parameters_of_prompts() -> None:
    hot, cold = SamplingParams(temperature=2.0), SamplingParams(temperature=0.5)
    rows = sequences([[5], [6]], [hot, cold])
    assert [row.request.parameters["temperature"] for row in rows] == [2.0, 0.5]
    with pytest.raises(
        ValueError, match="3 SamplingParams were given for 2 prompts; give one, or 2"
    ):
        sequences([[5], [6]], [hot, cold, hot])


def test_adapters_by_name() -> None:
    loaded: Any = {name: SimpleNamespace(sha256=name) for name in ("b", "a")}
    with_loras: Any = SimpleNamespace(adapters=[object()])
    without: Any = SimpleNamespace(adapters=[])
    assert find_adapter(None, loaded, with_loras) is None
    assert find_adapter("a", loaded, with_loras) is loaded["a"]
    rows = sequences([[5], [6]], [SamplingParams(adapter="a"), SamplingParams()], adapters=loaded)
    assert [row.request.adapter for row in rows] == [loaded["a"], None]
    for name, given, of, message in (
        ("c", loaded, with_loras, "adapter is 'c', and a, b is loaded; load it with load_adapter"),
        ("c", {}, with_loras, "and none is loaded"),
        (["a"], loaded, with_loras, "and a, b is loaded"),
        ("c", {}, without, "the package was exported without adapters"),
        ("x", {f"a{n:02}": None for n in range(30)}, with_loras, "a18, a19 is loaded"),
    ):
        with pytest.raises(ArgumentError, match=message) as raised:
            find_adapter(name, given, of)  # type: ignore[arg-type]
        assert raised.value.argument == "adapter"


@pytest.mark.parametrize(
    ("seed", "params", "count", "seeds"),
    [
        (5, SamplingParams(seed=9), 2, [5, 6, 7, 8]),
        (None, SamplingParams(seed=9), 2, [9, 10, 11, 12]),
        (None, [SamplingParams(seed=9), SamplingParams(seed=70)], 2, [9, 10, 70, 71]),
        (0, [SamplingParams(seed=9), SamplingParams(seed=70)], 1, [0, 1]),
        ([7, 7], SamplingParams(), 1, [7, 7]),
        (np.array([7, 8]), SamplingParams(), 1, [7, 8]),
        (np.int64(7), SamplingParams(), 1, [7, 8]),
        (2**63 - 1, SamplingParams(), 1, [2**63 - 1, 0]),
    ],
)
def test_seeds(seed: Any, params: Any, count: int, seeds: list[int]) -> None:
    assert choose_seeds(seed, params, 2, count) == seeds


def test_fresh_seeds_of_parameters_without_one() -> None:
    first, second = choose_seeds(None, [SamplingParams(), SamplingParams(seed=0)], 2)
    assert second == 0
    assert first != choose_seeds(None, [SamplingParams()], 1)[0]
    assert len(choose_seeds(None, SamplingParams(), 3)) == 3


@pytest.mark.parametrize(
    ("seed", "message"),
    [
        ([1], "1 seeds were given for 2 rows; give a single seed"),
        ([1, 2, 3], "3 seeds were given"),
        ([1, None], "a seed of the list is None"),
        (-1, "seed is -1"),
        ("5", "seed is '5'"),
        ([1, -1], "seed is -1"),
    ],
)
def test_seeds_that_are_refused(seed: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_seeds(seed, SamplingParams(), 2)


def test_guesses_that_the_package_checks() -> None:
    for guesses in (0, 3):
        check_features(GUESSING, SamplingParams(prompt_lookup_num_tokens=guesses))
    for of, message in (
        (
            GUESSING,
            "prompt_lookup_num_tokens is 4, and the package checks 3 guesses a step at most",
        ),
        (
            interface(),
            "is 4, and the package draws a token a step; .*or give prompt_lookup_num_tokens=0",
        ),
    ):
        with pytest.raises(ArgumentError, match=message) as raised:
            check_features(of, SamplingParams(prompt_lookup_num_tokens=4))
        assert raised.value.argument == "prompt_lookup_num_tokens"


def test_filters_that_the_package_has() -> None:
    asked = SamplingParams(typical_p=0.5)
    check_features(interface(filters=("typical_p",)), asked)
    for filters, words in (((), "no filters"), (("top_a", "xtc"), "the filters top_a, xtc")):
        with pytest.raises(
            ArgumentError, match=f"typical_p is 0.5, .* exported with {words}"
        ) as raised:
            check_features(interface(filters=filters), asked)
        assert raised.value.argument == "typical_p"
        assert str([*filters, "typical_p"]) in str(raised.value)


def test_texts_become_token_ids() -> None:
    same = SamplingParams(bad_words_ids=((5,),))
    dry = interface(filters=("dry", "bad_words_ids"))
    assert for_package(dry, same, None) is same
    numbers = SamplingParams(dry_multiplier=1.0, dry_sequence_breakers=(5,))
    assert for_package(dry, numbers, None) is numbers
    found = for_package(
        dry,
        SamplingParams(
            dry_multiplier=1.0,
            dry_sequence_breakers=(5, "a"),
            bad_words=("ab",),
            bad_words_ids=((9,),),
        ),
        TOKENIZER,
    )
    assert found.dry_sequence_breakers == (5, 68)
    assert found.bad_words is None
    assert found.bad_words_ids == ((9,), (68, 69))
    for params, message in (
        (SamplingParams(bad_words=("a",)), "bad_words has texts, and the package has no tokenizer"),
        (
            SamplingParams(dry_multiplier=1.0, dry_sequence_breakers=("a",)),
            "dry_sequence_breakers has texts",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            for_package(dry, params, None)
    for params, message in (
        (
            SamplingParams(dry_multiplier=1.0, dry_sequence_breakers=("ab",)),
            "has 'ab', which is 2 tokens",
        ),
        (SamplingParams(bad_words=(" ",)), "bad_words has ' ', which has no tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            for_package(dry, params, TOKENIZER)


def test_biases() -> None:
    of = interface(logit_bias=True)
    row = parameter_row(of, SamplingParams(logit_bias={5: 1.5, 0: -2.0}), 3, 64)
    assert (row["logit_bias_ids"].tolist(), row["logit_bias"].tolist()) == ([5, 0], [1.5, -2.0])
    assert (row["logit_bias_ids"].dtype, row["logit_bias"].dtype) == (np.int32, np.float32)
    row = parameter_row(of, SamplingParams(), 3, 64)
    assert (row["logit_bias_ids"].tolist(), row["logit_bias"].tolist()) == ([-1], [0])
    with pytest.raises(ValueError, match="logit_bias has token id 320"):
        parameter_row(of, SamplingParams(logit_bias={V: 1.0}), 3, 64)
    with pytest.raises(ValueError, match="logit_bias needs a package that was exported with"):
        parameter_row(interface(), SamplingParams(logit_bias={5: 1.0}), 3, 64)
    assert "logit_bias" not in parameter_row(interface(), SamplingParams(), 3, 64)


def test_lengths_with_padding() -> None:
    """As in transformers, a total length counts the padding."""
    params = SamplingParams(max_length=20, min_length=10)
    for padding, lengths in ((0, (10, 20)), (4, (6, 16))):
        row = parameter_row(interface(), params, 3, 64, padding=padding)
        assert (row["min_length"], row["max_length"]) == lengths
        assert {row[name].dtype for name in ("min_length", "max_length")} == {np.dtype(np.int32)}
