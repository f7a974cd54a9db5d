"""What is wrong with a call is a ValueError that names it, at each door: `generate`, `add_request`, `Engine`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch

from qsample.errors import ArgumentError
from qsample.package.manifest import TokenIds
from qsample.runtime import CausalLM, Engine, SamplingParams, load
from qsample.runtime.causal_lm import LoadKeywords, LoadOptions
from qsample.runtime.engine import EngineKeywords, EngineOptions
from tests.helpers.fake_package import EOS, MAX_POSITIONS, PAD, VOCAB, compilation
from tests.helpers.filters import FILTERS
from tests.helpers.requests import ENDLESS, FREE, GREEDY, PROMPTS, expected, outcome


class Odd:
    """Nothing can be said of it."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        raise OSError("no")


def nested(depth: int = 100_000) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def mapping_of_mappings() -> dict[str, Any]:
    value: dict[str, Any] = {"input_ids": [5]}
    for _ in range(5000):
        value = {"input_ids": value}
    return value


DEEP = nested()
HUGE = 10**5000  # Python does not even print it


def said(content: Any, role: Any = "user") -> list[dict[Any, Any]]:
    return [{"role": role, "content": content}]


INPUTS: dict[str, Any] = {
    "ids beyond int64": [2**70],
    "ids below int64": [5, -(2**70)],
    "an id that does not print": [HUGE],
    "the first beyond int64": [2**63],
    "an unsigned array beyond int64": np.array([5, 2**63 + 5], dtype=np.uint64),
    "an array of objects": np.array([5, 2**70], dtype=object),
    "negative": [-1],
    "beyond the vocabulary": [5, VOCAB],
    "floats": [5.0],
    "a float": [5, 6.5],
    "not a number": [math.nan],
    "an array of floats": np.array([5.0]),
    "bool": [True],
    "an array of bool": np.array([True]),
    "complex": [1j],
    "dates": np.array(["2020"], dtype="datetime64[D]"),
    "None in a list": [None],
    "ids and text": [5, "a"],
    "rows and text": [[5], "a"],
    "two rows": [[5], [6]],
    "nested": DEEP,
    "nested in a list": [5, DEEP],
    "nested mappings": mapping_of_mappings(),
    "no repr": [Odd()],
    "no array": Odd(),
    "three axes": np.zeros((1, 1, 1), dtype=np.int64),
    "no axis": np.array(5),
    "a number": 5,
    "bytes": b"abc",
    "a set": {5},
    "a mapping": {"a": 1},
    "an iterator": iter([5]),
    "a tensor of floats": torch.zeros(2),
    "a tensor without data": torch.zeros(2, device="meta", dtype=torch.long),
    "a sparse tensor": torch.zeros(2, 2, dtype=torch.long).to_sparse(),
    "a mask of another shape": {"input_ids": [[5, 6]], "attention_mask": [[1]]},
    "a mask of text": {"input_ids": [[5, 6]], "attention_mask": "ab"},
    "a mask of halves": {"input_ids": [[5, 6]], "attention_mask": [[0.5, 1]]},
    "a nested mask": {"input_ids": [[5, 6]], "attention_mask": DEEP},
    "half a character": "a\ud800",
    "half a character in a list": ["\udfff"],
    "too long": [5] * 1000,
    "a message without content": [{"role": "user"}],
    "a message of a number": said(5),
    "half a character in a message": said("\ud83d"),
    "a nested message": said(DEEP),
    "a message without repr": said(Odd()),
    "a message of an image": said([{"type": "image"}]),
    "a message without role": [{"content": "a"}],
    "a message with a number as its role": said("a", 5),
    "a message with a number as its key": [{5: "user"}],
    "messages and a number": [*said("a"), 5],
}
OPTIONS: dict[str, list[Any]] = {
    "temperature": [math.nan, math.inf, "a", Odd(), DEEP, HUGE, -1, True, 1j],
    "top_k": [2**70, -1, 1.5, "a", Odd(), DEEP, HUGE],
    "top_p": [0, 2, -1, "a", Odd()],
    "repetition_penalty": [0, -1, 1e40, "a"],
    "max_new_tokens": [0, -1, 2**70, HUGE, 1.5, "a", Odd(), DEEP],
    "min_new_tokens": [-1, 2**70, "a"],
    "max_length": [0, -1, 2**70, "a"],
    "do_sample": ["a", 5, Odd()],
    "eos_token_id": [
        2**70, [2**70], HUGE, -1, [-1], [VOCAB], range(10**6), "a", ["a"], [1.5], [None], [True], DEEP, [DEEP], Odd(),
        [Odd()], {3: 4}, b"ab", np.array([[3]]),
    ],
    "logit_bias": [{2**70: 1}, {-1: 1}, {VOCAB: 1}, {"a": 1}, {5: "a"}, {5: math.nan}, {5: 1e40}, {5: Odd()}, 5, DEEP],
    "seed": [2**70, HUGE, -1, "a", 1.5, True, [1, 2], [], [None], [2**70], range(10**9), DEEP, Odd(), [Odd()]],
    "stop_strings": [
        "", [""], 5, [5], "\ud800", ["a", "\udc00"], DEEP, [DEEP], Odd(), [Odd()], "a" * 10**6, ["ab"] * 10**5, {"a"},
        b"a", iter(["a"]),
    ],
    "allowed_tokens": [
        5, "a", DEEP, Odd(), np.zeros(3, np.int32), np.zeros(11, np.int64), np.zeros((2, 11), np.int32), [[1], [1, 2]],
    ],
    "params": [5, "a", DEEP, Odd(), [5], [], [SamplingParams()] * 2, {"temperature": 1}],
    "timeout": ["a", math.nan, DEEP, Odd(), 1j],
    "generation_config": [5, "a", DEEP, Odd(), {"temperature": "a"}],
    "pad_token_id": [-1, 2**70, VOCAB, "a", DEEP, Odd()],
    "tokenizer": [5, "a"],
    "nonsense": [1],
    "streamer": [5],
    "tools": [5, "a", [5], DEEP, Odd(), [Odd()]],
    "chat_template": [5, "{{", "{% for", "{{ 1 / 0 }}", "{{ x.y.z }}", "{{ messages[99].content.x }}", "\ud800", DEEP],
    "chat_template_kwargs": [5, "a", {5: 5}, DEEP],
}  # fmt: skip
CHAT = ("tools", "chat_template", "chat_template_kwargs")


def check_refused(call: Callable[[], object], what: str) -> None:
    """A ValueError that can be read."""
    error: Exception | None = None
    try:
        call()
    except Exception as raised:
        error = raised
    assert type(error) in (ValueError, ArgumentError), (what, repr(error)[:300])
    assert 10 < len(str(error)) < 1500, (what, error)


def test_every_wrong_argument_is_a_value_error_and_affects_no_other_request(
    fake_model: Callable[..., CausalLM],
) -> None:
    with Engine(fake_model(allowed_tokens=True, logit_bias=True), slots=2, max_waiting=0) as engine:

        def check(what: str, prompt: Any, **options: Any) -> None:
            check_refused(lambda: engine.add_request(prompt, **{"timeout": 60, **options}), what)

        neighbour = engine.add_request([5], ENDLESS, seed=0)
        for what, inputs in INPUTS.items():
            check(what, inputs, max_new_tokens=2)
        for name, values in OPTIONS.items():
            for value in values:
                fixed: dict[str, Any] = (
                    {} if name in ("params", "max_new_tokens") else {"max_new_tokens": 2}
                )
                check(name, said("a") if name in CHAT else [5], **{name: value}, **fixed)
        assert outcome(engine.add_request([6], FREE, seed=1)) == expected([6], FREE, 1)
        assert outcome(neighbour) == expected([5], ENDLESS, 0)
        assert engine._guides == {}


def keep(ids: Any, scores: Any) -> Any:
    return scores


NO_SAMPLER, GUESSES = {"sampler": False}, {"num_speculative_tokens": 4, "logit_bias": True}
ROW = [5, 6, 7]
IDS = np.array([[5, 6]])
# A prompt, options, and the words that the error has: at both doors, over a package without features.
CALLS: list[tuple[Any, dict[str, Any], str]] = [
    ([], {}, "no prompt was given"),
    (5, {}, "inputs is a int; give a text, token ids"),
    ({"text": "a"}, {}, "inputs is a dict"),
    ([1.5], {}, r"prompt 0 is 1\.5"),
    ([True, 1], {}, "prompt 0 is True"),
    ([[5], [True]], {}, r"prompt 1 is \[True\]"),
    ([[5], None], {}, "prompt 1 is None"),
    ([[[5]]], {}, r"prompt 0 is \[\[5\]\]"),
    ([[5], [331]], {}, "prompt 1 has token id 331; the model's ids are 0 to 330"),
    ([[5, -1]], {}, "prompt 0 has token id -1"),
    (np.array([[0.5]]), {}, "token ids are float64; give integers"),
    (np.array([[True]]), {}, "token ids are bool"),
    (np.zeros((1, 1, 1), dtype=np.int64), {}, r"input ids have shape \(1, 1, 1\)"),
    (IDS, {"attention_mask": [[1]]}, r"attention_mask must be 0 or 1 with the shape of the input ids, \(1, 2\)"),
    (IDS, {"attention_mask": [[1, 2]]}, "attention_mask must be 0 or 1"),
    ([[5, 6], [7]], {"attention_mask": [[1, 1]]}, r"with the shape of the input ids, rows of 2, 1; it is \(1, 2\)"),
    ([[5, 6], [7]], {"attention_mask": [[1, 1], [1, 1]]}, r"rows of 2, 1; it is \(2, 2\)"),
    ([[5, 6]], {"attention_mask": [1]}, r"\(1, 2\); it is \(1, 1\)"),
    ([[5, 6]], {"attention_mask": [[1, None]]}, "attention_mask must be 0 or 1"),
    (["a", [5]], {"attention_mask": [[1, 1], [1]]}, "attention_mask goes with token ids, and prompt 0 is text"),
    ([5] * MAX_POSITIONS, {}, "prompt has 256 tokens and the context length is 256; give at most 255"),
    (ROW, {"max_length": 3}, "max_length is 3 and the prompt already has 3 tokens"),
    (ROW, {"input_ids": ROW}, "inputs and input_ids were given"),
    ({"input_ids": ROW, "token_type_ids": [[1] * 3]}, {}, "token_type_ids is .* take it out"),
    ({"input_ids": ROW, "colour": 5}, {}, "inputs has 'colour'"),
    (ROW, {"token_type_ids": [[1] * 3]}, "token_type_ids is"),
    (ROW, {"temprature": 1}, "did you mean 'temperature'"),
    (ROW, {"max_new_token": 5}, "generate has no argument 'max_new_token'; did you mean 'max_new_tokens'"),
    (ROW, {"atention_mask": 5}, "did you mean 'attention_mask'"),
    (ROW, {"inputs_ids": 5}, "did you mean 'input_ids'"),
    (ROW, {"params": GREEDY, "top_k": 5, "max_new_tokens": 3}, "params and top_k, max_new_tokens were given"),
    (ROW, {"params": GREEDY, "generation_config": {"top_k": 5}}, "params and generation_config were given"),
    (ROW, {"params": {"temperature": 1}}, "give a SamplingParams, or a list"),
    (ROW, {"generation_config": 5}, "generation_config is a int"),
    (ROW, {"generation_config": {"num_beams": 4}}, "num_beams is 4, which is not supported"),
    (ROW, {"generation_config": {"output_scores": True}}, "output_scores is True.*return_pdfs"),
    (ROW, {"generation_config": {"temperature": -1, "do_sample": True}}, "temperature is -1"),
    (ROW, {"seed": -1}, "seed is -1"),
    (ROW, {"seed": "1"}, "seed is '1'"),
    (ROW, {"seed": True}, "seed is True"),
    (ROW, {"seed": b"ab"}, "seed is b'ab'; give an integer"),
    (ROW, {"temperature": math.nan}, "temperature is nan"),
    (ROW, {"temperature": np.array([0.5, 0.7])}, r"temperature is array\(\[0\.5, 0\.7\]\); give a finite number"),
    (ROW, {"top_p": 0}, "top_p is 0"),
    (ROW, {"do_sample": False, "top_k": np.array([5, 6])}, "do_sample=False chooses greedily"),
    (ROW, {"num_beams": 4}, "num_beams is 4, .*temperature=0 takes the likeliest .*give num_beams=None"),
    (ROW, {"output_scores": True}, "output_scores is True, .*return_pdfs=True .*logprobs=True"),
    (ROW, {"output_logits": True}, "output_logits is True, .*logprobs=True"),
    (ROW, {"assistant_model": object()}, "assistant_model is of type object, .*prompt_lookup_num_tokens"),
    (ROW, {"past_key_values": ()}, "past_key_values is"),
    (ROW, {"prefix_allowed_tokens_fn": print}, "prefix_allowed_tokens_fn is .*allowed_tokens"),
    (ROW, {"suppress_tokens": np.array([1, 2])}, "suppress_tokens needs a package that was exported with"),
    (ROW, {"sequence_bias": {(5,): 1.0}, "logit_bias": {6: 1.0}}, "logit_bias, sequence_bias needs a package that was"),
    (ROW, {"sequence_bias": [[[5, 6], 1.0]]}, r"sequence_bias is .*single token.*bad_words_ids forbids a sequence"),
    (ROW, {"begin_suppress_tokens": np.array([1, 2])}, "begin_suppress_tokens is of type ndarray, which is not supp"),
    (ROW, {"logit_bias": {5: 1.0}}, "logit_bias needs a package that was exported with logit_bias=True"),
    (ROW, {"allowed_tokens": np.zeros(11, np.int32)}, "allowed_tokens needs a package"),
    (ROW, {"eos_token_id": VOCAB}, f"eos_token_id has token id {VOCAB}; the model's ids are 0 to {VOCAB - 1}"),
    (ROW, {"no_repeat_ngram_size": 3}, r"no_repeat_ngram_size is 3, .*filters=\['no_repeat_ngram_size'\] \(--filter\)"),
    (ROW, {"bad_words_ids": np.array([[5]])}, r"bad_words_ids is \(\(5,\),\), .* or give bad_words_ids=None"),
    (ROW, {"max_time": 0}, "max_time is 0; give a number of seconds > 0"),
    (ROW, {"max_time": "1"}, "max_time is '1'"),
    (ROW, {"max_time": math.nan}, "max_time is nan"),
    (ROW, {"stop_strings": ""}, "stop_strings is ''"),
    (ROW, {"tokenizer": 5}, "tokenizer is a int; give a fast tokenizer"),
    (ROW, {"pad_token_id": 1.5}, r"pad_token_id is 1\.5; give a token id of the model, 0 to 330"),
    (ROW, {"pad_token_id": True}, "pad_token_id is True"),
    (ROW, {"bos_token_id": -1}, "bos_token_id is -1"),
    (ROW, {"prompt_lookup_num_tokens": 7}, r'draws a token a step; compile .*num_speculative_tokens=7 .*"int8"'),
    ("hi", {"tools": []}, "tools go with chat messages"),
    (ROW, {"chat_template": "x{{ 1 }}", "continue_final_message": True}, "chat_template, continue_final_message go"),
    (IDS, {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs go with chat messages"),
    ([said("a"), "hi"], {"tools": []}, "tools go with chat messages"),
    (said("a"), {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs has tools, an argument of its own"),
    (said("a"), {"chat_template_kwargs": True}, "chat_template_kwargs is True; give a mapping"),
    (ROW, {"prediction": "text"}, r'draws a token a step; compile .*num_speculative_tokens=7 .*"int8"'),
]  # fmt: skip
# Features of the package before them.
OF_PACKAGES: list[tuple[dict[str, Any], Any, dict[str, Any], str]] = [
    ({"logit_bias": True}, ROW, {"logit_bias": {331: 1.0}}, "logit_bias has token id 331"),
    ({"allowed_tokens": True}, ROW, {"allowed_tokens": np.zeros(10, np.int32)}, r"int32 bitmask \[11\] or \[1, 11\]"),
    ({"allowed_tokens": True}, ROW, {"allowed_tokens": np.zeros((3, 11), np.int32)}, "give an int32 bitmask"),
    ({"compilation": compilation(batch_size=2, ctx_len=48)}, [5] * 48, {}, "prompt has 48 tokens and .* at most 47"),
    ({"manifest": {"token_ids": TokenIds(PAD, None, (EOS,))}}, [[]], {}, "prompt 0 is empty and the model has no beg"),
    ({"tokenizer": False}, ROW, {"stop_strings": "a"}, "has no tokenizer; give eos_token_id, or tokenizer"),
    ({"tokenizer": False}, "a", {}, "the package has no tokenizer, so it takes no text; give token ids"),
    ({"tokenizer": False}, said("a"), {}, "the package has no tokenizer, so it takes no text; give token ids"),
    ({"tokenizer": False, "filters": FILTERS}, ROW, {"bad_words": ["a"]}, "bad_words has texts, and .* no tokenizer"),
    ({"filters": FILTERS}, ROW, {"dry_sequence_breakers": ["ab"]}, "has 'ab', which is 2 tokens; give texts of"),
    ({"filters": FILTERS}, ROW, {"dry_sequence_breakers": [400]}, "dry_sequence_breakers has token id 400; the"),
    ({"filters": FILTERS}, ROW, {"bad_words_ids": [[5], [6, 400]]}, "bad_words_ids has token id 400; the model's ids"),
    ({"filters": FILTERS}, ROW, {"bad_words": ["x" * 65]}, "bad_words_ids is .*; give a list of lists of 1 to"),
    (GUESSES, ROW, {"prompt_lookup_num_tokens": 5}, r"is 5, .* checks 4 guesses a step at most; compile .*=5 \(--num"),
    (GUESSES, ROW, {"prediction": [5, 999]}, "prediction has token id 999"),
    (GUESSES, ROW, {"prediction": [[5]]}, r"prediction is int64 \(1, 1\); give a text, or a list of token ids"),
]  # fmt: skip
# Batches, and what an engine does not have.
OF_GENERATE: list[tuple[dict[str, Any], Any, dict[str, Any], str]] = [
    ({}, PROMPTS[:2], {"params": [GREEDY]}, "1 SamplingParams were given for 2 prompts"),
    ({}, PROMPTS[:2], {"seed": [1]}, "1 seeds were given for 2 rows"),
    ({}, PROMPTS[:2], {"seed": [1, None]}, "a seed of the list is None"),
    ({}, PROMPTS[:2], {"streamer": object()}, "a streamer follows a single prompt, and 2 were given"),
    ({}, ROW, {"streamer": 5}, r"streamer is 5; give an object with put\(value\) and end\(\)"),
    ({}, ROW, {"prefill_chunk_size": 0}, "prefill_chunk_size is 0"),
    ({}, ROW, {"prefill_chunk_size": 1.5}, "prefill_chunk_size is 1.5"),
    ({}, ROW, {"return_dict_in_generate": 1}, "return_dict_in_generate is 1; give True, False or None"),
    ({}, ROW, {"stopping_criteria": [5]}, "stopping_criteria has a int; give a function"),
    ({}, ROW, {"stopping_criteria": "no"}, "stopping_criteria has a str"),
    ({}, ROW, {"num_return_sequences": 0}, "num_return_sequences is 0; give an integer >= 1, or None for 1"),
    ({}, ROW, {"num_return_sequences": 2.0}, "num_return_sequences is 2.0"),
    ({}, ROW, {"num_return_sequences": True}, "num_return_sequences is True"),
    ({}, ROW, {"num_return_sequences": 2, "do_sample": False}, "prompt 0 is continued greedily"),
    ({}, PROMPTS[:2], {"num_return_sequences": 2, "params": [FREE, GREEDY]}, "is 2 and prompt 1 is continued greedily"),
    ({"compilation": compilation(batch_size=2, ctx_len=48)}, PROMPTS, {"max_time": 5},
     "4 prompts were given .* for 2 at most; stopping_criteria and max_time follow"),
    (GUESSES, PROMPTS[:2], {"prediction": [5]}, "prediction is given with 2 prompts"),
    ({}, ROW, {"logits_processor": keep}, "logits_processor is given, and the logits stay in this package's graph; "
     "export with include_sampler=False.*logit_bias=True.*allowed_tokens=True"),
    (NO_SAMPLER, ROW, {"logits_processor": keep, "repetition_penalty": 1.2}, "and repetition_penalty were given"),
    (NO_SAMPLER, ROW, {"logits_processor": keep, "min_new_tokens": 3}, "logits_processor and min_length were given"),
    ({**NO_SAMPLER, "logit_bias": True}, ROW, {"logits_processor": keep, "logit_bias": {5: 1.0}}, "and logit_bias"),
    ({**NO_SAMPLER, "logprobs": True}, ROW, {"logits_processor": keep}, "package's logprobs are of; export without"),
    (NO_SAMPLER, ROW, {"logits_processor": [5]}, "logits_processor has a int; give a function"),
    (NO_SAMPLER, ROW, {"logits_processor": lambda ids, scores: None}, "returned object"),
    (NO_SAMPLER, ROW, {"logits_processor": lambda ids, scores: scores[0]}, r"returned float32 \(331,\)"),
    (NO_SAMPLER, ROW, {"logits_processor": lambda ids, scores: ids}, "returned int64"),
]  # fmt: skip
# The second is the number of sequences.
OF_AN_ENGINE: list[tuple[Any, int | None, dict[str, Any], str]] = [
    (["one", "two"], None, {}, "2 prompts were given; add them one by one"),
    (ROW, None, {"allowed_tokens": lambda step, mask: None}, "allowed_tokens needs a package"),
    (ROW, None, {"stopping_criteria": [print]}, r"are for generate; cancel\(\) ends a request"),
    (ROW, None, {"logits_processor": [keep]}, "logits_processor is for generate; export"),
    (
        ROW,
        None,
        {"num_return_sequences": 2},
        "add_request adds one request; add_requests takes num_return_sequences",
    ),
    (ROW, None, {"priority": 1.5}, "priority is 1.5; give an integer"),
    (ROW, None, {"priority": None}, "priority is None"),
    (PROMPTS[:3], 2, {"params": FREE}, "3 prompts were given; add them one by one"),
    (ROW, 2, {"params": GREEDY}, "continued greedily"),
    (ROW, 0, {"params": FREE}, "num_return_sequences is 0"),
    (
        ROW,
        6,
        {"params": FREE},
        "num_return_sequences is 6 and this engine takes 5; raise max_waiting",
    ),
    *(
        (ROW, None, {"timeout": wrong}, "timeout is .*; give seconds, or None")
        for wrong in ("1", math.nan, True, [1])
    ),
]


@pytest.mark.parametrize(
    ("features", "inputs", "options", "message"), [*(({}, *call) for call in CALLS), *OF_PACKAGES]
)
def test_generate_and_an_engine_refuse(
    features: dict[str, Any],
    inputs: Any,
    options: dict[str, Any],
    message: str,
    fake_model: Callable[..., CausalLM],
) -> None:
    model = fake_model(**features)
    with Engine(model, slots=1) as engine:
        for door in (model.generate, engine.add_request):
            with pytest.raises(ValueError, match=message):
                door(inputs, **options)


@pytest.mark.parametrize(("features", "inputs", "options", "message"), OF_GENERATE)
def test_generate_refuses(
    features: dict[str, Any],
    inputs: Any,
    options: dict[str, Any],
    message: str,
    fake_model: Callable[..., CausalLM],
) -> None:
    with pytest.raises(ValueError, match=message):
        fake_model(**features).generate(inputs, **options)


def test_an_engine_refuses(model: CausalLM) -> None:
    with Engine(model, slots=2, max_waiting=3) as engine:
        running = engine.add_request([5], FREE, seed=1)
        for inputs, count, options, message in OF_AN_ENGINE:
            several = {} if count is None else {"num_return_sequences": count}
            add = engine.add_request if count is None else engine.add_requests
            with pytest.raises(ValueError, match=message):
                add(inputs, **several, **options)  # type: ignore[operator]
        for wrong in ("1", math.nan, 1j):
            with pytest.raises(ValueError, match=r"timeout is .*; give seconds, or None"):
                running.result(wrong)  # type: ignore[arg-type]
        assert outcome(running) == expected([5], FREE, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 0}, "slots is 0"),
        ({"max_waiting": -1}, "max_waiting is -1"),
        ({"prefill_chunk_size": 0}, "prefill_chunk_size is 0"),
        ({"flush_every": 1.5}, "flush_every is 1.5"),
        ({"saved_states": -1}, "saved_states is -1; give an integer >= 0"),
        ({"saved_states": "2"}, "saved_states is '2'"),
        ({"prefixes": "rules"}, "prefixes is 'rules'; give a list"),
        ({"prefix_cache_dir": "kept", "reuse_sampled_tokens": True}, "leave either out"),
    ],
)
def test_an_engine_that_cannot_be_made(
    options: dict[str, Any], message: str, model: CausalLM
) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(model, **options)


def test_keywords_that_do_not_exist_have_a_suggestion(model: CausalLM) -> None:
    with pytest.raises(TypeError, match="Engine has no argument 'slot'; did you mean 'slots'"):
        Engine(model, slot=1)  # type: ignore[call-arg]
    with pytest.raises(
        TypeError, match="load has no argument 'ctx_length'; did you mean 'ctx_len'"
    ):
        load(model.package.path, ctx_length=5)  # type: ignore[call-arg]
    with pytest.raises(
        TypeError, match=r"load has no argument 'colour'; choose from batch_inv.*verify"
    ):
        load(model.package.path, colour=5)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("keywords", "options"), [(LoadKeywords, LoadOptions), (EngineKeywords, EngineOptions)]
)
def test_keywords_are_typed_as_they_are_read(keywords: Any, options: Any) -> None:
    assert get_type_hints(keywords) == get_type_hints(options)
