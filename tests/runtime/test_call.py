"""Every form of prompt, and every form that is none; the arguments of a call, read from keywords."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qsample.errors import ArgumentError
from qsample.package.manifest import TokenIds
from qsample.request.repetition import RepetitionDetection
from qsample.request.text.chat import ChatOptions
from qsample.request.text.tokenizer import Tokenizer
from qsample.runtime import SamplingParams
from qsample.runtime.call import (
    CONFIG_KEYWORDS,
    Call,
    Prompt,
    accepted_keywords,
    check_token_ids,
    is_chat,
    parse_prompts,
    read_call,
)
from tests.helpers.fake_package import BOS, byte_tokenizer


def call(inputs: Any, mask: Any = None, pad: int | None = None) -> Call:
    return Call(inputs=inputs, params=SamplingParams(), attention_mask=mask, pad=pad)


def rows(inputs: Any, mask: Any = None, pad: int | None = None) -> list[list[int]]:
    prompts = parse_prompts(call(inputs, mask, pad), Tokenizer(byte_tokenizer()), 320, BOS)
    return [prompt.ids.tolist() for prompt in prompts]


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ("ab", [[1, 68, 69]]),
        (["ab", "c"], [[1, 68, 69], [1, 70]]),
        (("ab", "c"), [[1, 68, 69], [1, 70]]),
        ([5, 6], [[5, 6]]),
        ((5, 6), [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        ([np.array([5, 6]), [7], (8,), "a"], [[5, 6], [7], [8], [1, 68]]),
        ([np.int64(5), np.int32(6)], [[5, 6]]),
        (np.array([5, 6]), [[5, 6]]),
        (np.array([[5, 6], [7, 8]], dtype=np.int32), [[5, 6], [7, 8]]),
        ("", [[1]]),  # the tokenizer itself adds it
        ([[]], [[1]]),
        ([[5], []], [[5], [1]]),
        (np.zeros((2, 0), dtype=np.int64), [[1], [1]]),
    ],
)
def test_forms_of_prompts(inputs: Any, expected: list[list[int]]) -> None:
    assert rows(inputs) == expected


@pytest.mark.parametrize("mask", [[[0, 0, 1, 1], [1, 1, 1, 1]], [[1, 1, 0, 0], [1, 1, 1, 1]]])
def test_left_and_right_padding(mask: list[list[int]]) -> None:
    ids = np.array([[5, 6, 7, 8], [9, 10, 11, 12]])
    expected = [ids[0][np.array(mask[0]) == 1].tolist(), [9, 10, 11, 12]]
    for form in (np.array(mask), np.array(mask, dtype=bool), mask):
        assert rows(ids, form) == expected


@pytest.mark.parametrize(
    ("ids", "mask"),
    [
        ([5, 6], [1, 0]),
        ([[5, 6]], [[1, 0]]),
        ([[5, 6]], [1, 0]),
        (np.array([5, 6]), [1, 0]),
        ([[5, 6]], ([1, 0],)),
    ],
)
def test_lists_take_masks_too(ids: Any, mask: Any) -> None:
    assert rows(ids, mask) == rows(ids, np.array(mask, dtype=bool)) == [[5]]
    assert rows([[5, 6, 7], [8]], [[0, 1, 1], [1]]) == [[6, 7], [8]]


@pytest.mark.parametrize("form", [list, np.array])
def test_the_pad_token_is_padding_in_a_block_without_a_mask(form: Any) -> None:
    ids = form([[0, 0, 5], [6, 0, 7], [8, 9, 0]])
    assert rows(ids, pad=0) == [[5], [6, 7], [8, 9]]
    assert (
        rows(ids, np.ones((3, 3), dtype=int), pad=0)
        == rows(ids)
        == [[0, 0, 5], [6, 0, 7], [8, 9, 0]]
    )
    assert rows(form([[0, 5]]), pad=0) == [[5]]
    assert rows(["a"], pad=68) == [[1, 68]]  # text has no padding


@pytest.mark.parametrize(
    "prompts",
    [
        [5, 0, 6, 0],
        np.array([5, 0, 6, 0]),
        [[5, 6, 0], [0, 7]],
        [np.array([5, 6, 0]), np.array([0, 7])],
        [[5, 6, 0], [0, 7], []],
    ],
)
def test_a_single_row_and_rows_of_different_lengths_have_no_padding(prompts: Any) -> None:
    assert rows(prompts, pad=0) == rows(prompts)
    assert 0 in rows(prompts)[0]


def test_padding_between_tokens_is_refused_for_recurrent_models() -> None:
    def parse(ids: Any, mask: Any = None) -> list[list[int]]:
        prompts = parse_prompts(call(ids, mask, pad=0), None, 320, BOS, holes=False)
        return [prompt.ids.tolist() for prompt in prompts]

    assert parse([[0, 5, 6], [5, 6, 0], [5, 6, 7], [0, 0, 0]])[:3] == [[5, 6], [5, 6], [5, 6, 7]]
    assert parse([[], [5]]) == [[BOS], [5]]
    for ids, mask in (([[5, 5, 5], [6, 0, 7]], None), ([[9], [6, 8, 7]], [[1], [1, 0, 1]])):
        with pytest.raises(ValueError, match="prompt 1 has padding between its tokens"):
            parse(ids, mask)


def test_a_row_that_is_all_padding_is_an_empty_prompt() -> None:
    assert rows(np.array([[5, 6], [7, 8]]), [[0, 0], [1, 1]]) == [[BOS], [7, 8]]


@pytest.mark.parametrize(
    ("inputs", "mask", "problem"),
    [
        ([], None, "no prompt was given"),
        (5, None, "inputs is a int; give a text, token ids"),
        (b"a", None, "inputs is a bytes; give"),
        ({"a": 1}, None, "inputs is a dict; give"),
        (np.array(5), None, r"input ids have shape \(\); give \[rows, tokens\]"),
        (np.zeros((1, 1, 1), np.int64), None, r"input ids have shape \(1, 1, 1\)"),
        (np.zeros((1, 2)), None, "token ids are float64; give integers"),
        (np.array([True]), None, "token ids are bool; give integers"),
        (np.array([2**63], np.uint64), None, f"a prompt has token id {2**63}; no model has"),
        ([[2**63]], None, f"prompt 0 has token id {2**63}; no model has"),
        ([[5], [1, -(2**70)]], None, f"prompt 1 has token id {-(2**70)}"),
        ([[5], [1.5]], None, r"prompt 1 is \[1\.5\]; give a text"),
        ([[5], None], None, "prompt 1 is None; give a text"),
        ([[5], np.zeros((1, 1), np.int64)], None, r"prompt 1 is .*; give a text"),
        ([[5], [True]], None, r"prompt 1 is \[True\]; give a text"),
        ([[5], [320]], None, "prompt 1 has token id 320; the model's ids are 0 to 319"),
        ([[-1]], None, "prompt 0 has token id -1; the model's ids"),
        (["a"], [[1, 1]], "attention_mask goes with token ids, and prompt 0 is text; leave it out"),
        ([[5], "a"], [[1], [1, 1]], "prompt 1 is text"),
        ([[5, 6]], [[1]], r"must be 0 or 1 with the shape of the input ids, \(1, 2\); it is \(1, 1\)"),
        ([[5, 6]], [[1, 2]], r"\(1, 2\); it is \(1, 2\)"),
        ([[5, 6], [7]], [[1, 1]], r"rows of 2, 1; it is \(1, 2\)"),
        ([[5, 6], [7, 8]], [[1, 1], [1]], r"\(2, 2\); it is rows of 2, 1"),
    ],
)  # fmt: skip
def test_what_is_no_prompt(inputs: Any, mask: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        rows(inputs, mask)


def test_prompts_keep_their_padding() -> None:
    (prompt, empty) = parse_prompts(call([[9, 5, 6], [9, 9, 9]], pad=9), None, 320, BOS)
    assert (prompt.ids.tolist(), prompt.given.tolist(), prompt.padding) == ([5, 6], [9, 5, 6], 1)
    # What is all padding reads the first token, which takes no place of the block.
    assert (empty.ids.tolist(), empty.given.tolist()) == ([BOS], [9, 9, 9])
    (nothing,) = parse_prompts(call([[]]), None, 320, BOS)
    assert (nothing.ids.tolist(), nothing.given.tolist(), nothing.padding) == ([BOS], [BOS], 0)
    assert {array.dtype for array in (*prompt[:2], *nothing[:2])} == {np.dtype(np.int64)}
    assert prompt[2:] == (None, False, None)
    assert Prompt(prompt.ids, prompt.given).identities is prompt.ids
    with pytest.raises(
        ValueError, match="prompt 1 is empty and the model has no beginning-of-text"
    ):
        parse_prompts(call([[5], []]), None, 320, None)


def test_texts_need_a_tokenizer() -> None:
    for inputs in ("a", ["a"], [[5], "a"], [{"role": "user", "content": "a"}]):
        with pytest.raises(ValueError, match="the package has no tokenizer, so it takes no text"):
            parse_prompts(call(inputs), None, 320, BOS)


def test_options_of_chats_go_with_chats() -> None:
    given = Call(inputs="a", params=SamplingParams(), chat=ChatOptions(tools=[]))
    with pytest.raises(ValueError, match="tools go with chat messages, and another kind of prompt"):
        parse_prompts(given, Tokenizer(byte_tokenizer()), 320, BOS)


@pytest.mark.parametrize(
    ("value", "is_one"),
    [([{}], True), (({}, {}), True), ([], False), ({}, False), ([{}, "a"], False), (["a"], False), ("a", False)],
)  # fmt: skip
def test_what_is_a_chat(value: Any, is_one: bool) -> None:
    assert is_chat(value) == is_one


def test_an_error_about_ids_names_the_argument_if_it_is_one() -> None:
    check_token_ids("x", np.array([0, 9]), 10)
    check_token_ids("x", np.array([], np.int64), 10)
    for what, argument in (("allowed_token_ids", "allowed_token_ids"), ("prompt 3", None)):
        with pytest.raises(ArgumentError, match=f"{what} has token id 10; .* 0 to 9") as raised:
            check_token_ids(what, np.array([9, 10, 11]), 10)
        assert raised.value.argument == argument


TOKENS = TokenIds(0, BOS, (2, 3))  # of the model; its file names 2 alone
FILE: dict[str, Any] = {"eos_token_id": 2, "pad_token_id": 7, "bos_token_id": 8}


def read(
    inputs: Any = "a", params: Any = None, own: dict[str, Any] | None = None, **keywords: Any
) -> Call:
    return read_call(inputs, params, keywords, FILE if own is None else own, TOKENS, 320, 2)


def test_a_call_without_arguments() -> None:
    plain = read_call(None, None, {}, {}, TOKENS, 320)
    assert plain == Call(inputs=[[]], params=plain.params)
    assert isinstance(plain.params, SamplingParams)
    assert plain.params.eos_token_id is None
    assert plain.scoring_argument is None
    assert (plain.skip_special_tokens, plain.include_stop_str_in_output) == (True, False)
    assert (plain.num_return_sequences, plain.prompt_logprobs, plain.return_dict) == (
        1,
        False,
        None,
    )


@pytest.mark.parametrize(
    ("keyword", "value", "field", "kept"),
    [
        ("images", ["x"], "images", ["x"]),
        ("tokenizer", "t", "tokenizer", "t"),
        ("seed", 3, "seed", 3),
        ("stop_strings", "x", "stop_strings", ("x",)),
        ("skip_special_tokens", False, "skip_special_tokens", False),
        ("skip_special_tokens", None, "skip_special_tokens", True),
        ("include_stop_str_in_output", True, "include_stop_str_in_output", True),
        ("include_stop_str_in_output", None, "include_stop_str_in_output", False),
        ("repetition_detection", {"max_pattern_size": 3, "min_count": 4}, "repetition_detection",
         RepetitionDetection(max_pattern_size=3, min_count=4)),
        ("allowed_tokens", "a", "allowed_tokens", "a"),
        ("allowed_token_ids", [0, 5], "allowed_token_ids", [0, 5]),
        ("allowed_token_ids", np.array([5]), "allowed_token_ids", [5]),
        ("allowed_token_ids", {5}, "allowed_token_ids", [5]),
        ("allowed_token_ids", None, "allowed_token_ids", None),
        ("grammar", "g", "grammar", "g"),
        ("thinking_token_budget", 0, "thinking_token_budget", 0),
        ("thinking_token_budget", None, "thinking_token_budget", None),
        ("prompt_logprobs", True, "prompt_logprobs", True),
        ("prompt_logprobs", None, "prompt_logprobs", False),
        ("logprob_token_ids", [0], "logprob_token_ids", [0]),
        ("logprob_token_ids", range(128), "logprob_token_ids", [*range(128)]),
        ("logprob_token_ids", None, "logprob_token_ids", None),
        ("outputs", ["o"], "outputs", ["o"]),
        ("prediction", "p", "prediction", "p"),
        ("stopping_criteria", "c", "stopping_criteria", "c"),
        ("logits_processor", [], "logits_processor", None),
        ("logits_processor", ["p"], "logits_processor", ["p"]),
        ("logits_processor", abs, "logits_processor", abs),
        ("max_time", 1, "max_time", 1.0),
        ("max_time", None, "max_time", None),
        ("num_return_sequences", 2, "num_return_sequences", 2),
        ("num_return_sequences", None, "num_return_sequences", 1),
        ("return_dict_in_generate", False, "return_dict", False),
        ("return_dict_in_generate", None, "return_dict", None),
    ],
)  # fmt: skip
def test_a_keyword_and_its_field(keyword: str, value: Any, field: str, kept: Any) -> None:
    assert getattr(read(**{keyword: value}), field) == kept
    assert keyword in accepted_keywords()


REFUSED: dict[str, list[Any]] = {
    "prompt_logprobs": [1, "True"],
    "num_return_sequences": [0, 1.0, True],
    "thinking_token_budget": [-1, 1.5],
    "max_time": [0, -1.0, "1", True, float("nan")],
    "return_dict_in_generate": [1, "False"],
    "skip_special_tokens": [0],
    "include_stop_str_in_output": ["x"],
    "allowed_token_ids": [[], 5, "5", b"5", {5: 5}, [-1], [1.5], [True], ["5"]],
    "logprob_token_ids": [[], range(129), 5, "5", {5: 5}, [-1], [True]],
    "pad_token_id": [-1, 320, 1.5, "5", [1, 2], np.array([1, 2])],
    "bos_token_id": [-1, 320],
}


@pytest.mark.parametrize(
    ("keyword", "value"), [(name, value) for name, values in REFUSED.items() for value in values]
)
def test_values_that_are_refused(keyword: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{keyword} is .*; give|^{keyword} is .*, but"):
        read(**{keyword: value})


def test_settings_of_the_model_and_of_the_caller() -> None:
    """A keyword before the caller's configuration, and that before the model's."""
    own = {
        **FILE,
        "temperature": 0.1,
        "top_k": 4,
        "top_p": 0.3,
        "num_return_sequences": 3,
        "max_time": 5,
    }
    mine = {"do_sample": True, "temperature": 0.2, "top_k": 5, "max_time": 6.0}
    found = read(own=own, generation_config=mine, temperature=0.4)
    assert isinstance(found.params, SamplingParams)
    assert (found.params.temperature, found.params.top_k, found.params.top_p) == (0.4, 5, 0.3)
    assert (found.num_return_sequences, found.max_time) == (3, 6.0)
    assert set(CONFIG_KEYWORDS) == {"stop_strings", "max_time", "num_return_sequences"}
    # With params, the model's settings do not count, except its special tokens.
    params = SamplingParams(temperature=0.7)
    found = read(params=params, own=own)
    assert found.params is params
    assert (found.num_return_sequences, found.max_time, found.pad, found.bos) == (1, None, 7, 8)


def test_a_configuration_in_the_second_place() -> None:
    class Config:
        def to_dict(self) -> dict[str, Any]:
            return {"do_sample": True, "temperature": 0.3, "stop_strings": ["x"]}

    for found in (read(params=Config()), read(generation_config=Config())):
        assert isinstance(found.params, SamplingParams)
        assert (found.params.temperature, found.stop_strings) == (0.3, ("x",))
    with pytest.raises(ValueError, match="params and generation_config were given"):
        read(params=SamplingParams(), generation_config={"top_k": 3})
    assert read(params=SamplingParams(), generation_config={}).inputs == "a"
    with pytest.raises(ValueError, match="output_scores"):
        read(generation_config={"output_scores": True})


@pytest.mark.parametrize(
    ("own", "keywords", "stops", "chat_stops", "of_params"),
    [
        # The file's own stop tokens end texts; chats also end at those that the package adds.
        (FILE, {}, (2,), None, None),
        ({}, {}, None, (), None),
        # Changed meanwhile, they are those of chats, too.
        ({"eos_token_id": [4, 5]}, {}, (4, 5), (4, 5), None),
        (FILE, {"eos_token_id": 6}, (2,), None, (6,)),
        (FILE, {"generation_config": {"eos_token_id": [6, 9]}}, (2,), None, (6, 9)),
        # vLLM's come on top of the model's, or without these.
        (FILE, {"stop_token_ids": [9]}, (2,), None, (2, 3, 9)),
        ({"eos_token_id": 4}, {"stop_token_ids": [9]}, (4,), (4,), (4, 9)),
        (FILE, {"ignore_eos": True}, (2,), None, ()),
        (FILE, {"ignore_eos": True, "stop_token_ids": [9]}, (2,), None, (9,)),
    ],
)
def test_stop_tokens(
    own: dict[str, Any], keywords: dict[str, Any], stops: Any, chat_stops: Any, of_params: Any
) -> None:
    found = read(own=own, **keywords)
    assert isinstance(found.params, SamplingParams)
    if own:
        assert (found.stops, found.chat_stops) == (stops, chat_stops)
    else:
        assert found.stops is None
    assert found.params.eos_token_id == of_params


@pytest.mark.parametrize(
    ("own", "keywords", "pad", "fill", "bos"),
    [
        (FILE, {}, 7, 7, 8),
        (FILE, {"pad_token_id": 9, "bos_token_id": np.array([0])}, 9, 9, 0),
        (FILE, {"pad_token_id": 319}, 319, 319, 8),
        # Without a pad token, rows end in their first stop token.
        (FILE, {"pad_token_id": None, "bos_token_id": None}, None, 2, None),
        ({"eos_token_id": [5, 6]}, {}, None, 5, None),
        ({"eos_token_id": [5, 6]}, {"eos_token_id": np.array([9])}, None, 9, None),
        ({}, {}, None, None, None),
        ({}, {"eos_token_id": []}, None, None, None),
        # A pad token that also ends a row may be text, so it is read; it still fills.
        ({**FILE, "pad_token_id": 2}, {}, None, 2, 8),
        (FILE, {"eos_token_id": [9, 7]}, None, 7, 8),
        ({"pad_token_id": 3}, {}, None, 3, None),
        # A negative number in a file says that there is none.
        ({"pad_token_id": -1, "bos_token_id": -1, "eos_token_id": 2}, {}, None, 2, None),
    ],
)
def test_special_tokens(
    own: dict[str, Any], keywords: dict[str, Any], pad: Any, fill: Any, bos: Any
) -> None:
    found = read(own=own, **keywords)
    assert (found.pad, found.fill, found.bos) == (pad, fill, bos)


def test_a_pad_token_that_ends_the_row_of_any_parameters() -> None:
    rows_of = [SamplingParams(eos_token_id=(5,)), SamplingParams(eos_token_id=(7, 6))]
    assert read(params=rows_of).pad is None
    assert read(params=rows_of[:1]).pad == 7


@pytest.mark.parametrize(
    ("inputs", "keywords", "found", "mask"),
    [
        ([5], {}, [5], None),
        (None, {"input_ids": [5], "attention_mask": [1]}, [5], [1]),
        ([5], {"input_ids": None, "attention_mask": None}, [5], None),
        ({"input_ids": [5], "attention_mask": [1]}, {}, [5], [1]),
        (None, {"input_ids": {"input_ids": [5]}}, [5], None),
        # An argument before the mapping's.
        ({"input_ids": [5], "attention_mask": [1]}, {"attention_mask": [0]}, [5], [0]),
    ],
)
def test_prompts_under_each_name(inputs: Any, keywords: Any, found: Any, mask: Any) -> None:
    given = read(inputs, **keywords)
    assert (given.inputs, given.attention_mask) == (found, mask)


def test_options_of_chats() -> None:
    assert read().chat is None
    assert read(tools=None, chat_template=None).chat is None
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert read(tools=tools).chat == ChatOptions(tools=tools)
    found = read(add_generation_prompt=False, tools=None).chat
    assert found == ChatOptions(add_generation_prompt=False)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"inputs": [5], "input_ids": [5]}, "inputs and input_ids were given"),
        ({"inputs": {"input_ids": [5], "b": 1, "a": 2}}, "inputs has 'a', 'b'; give a mapping"),
        ({"temprature": 1}, "generate has no argument 'temprature'.*temperature"),
        ({"streamer": 1}, "streamer is an argument of generate, for a batch; leave it out here"),
        ({"double_buffering": True}, "double_buffering is an argument of generate"),
        ({"params": SamplingParams(), "top_k": 3, "top_p": 0.5}, "params and top_k, top_p were given"),
        ({"params": 5}, "params is 5; give a SamplingParams, or a list"),
        ({"params": [SamplingParams(), None]}, "params is .*; give a SamplingParams, or a list"),
    ],
)  # fmt: skip
def test_calls_that_are_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(**keywords)


@pytest.mark.parametrize(
    ("keywords", "argument"),
    [
        ({}, None),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"logprob_token_ids": [5], "prompt_logprobs": True}, "logprob_token_ids"),
    ],
)
def test_calls_that_score(keywords: dict[str, Any], argument: str | None) -> None:
    assert read(**keywords).scoring_argument == argument


def test_all_arguments() -> None:
    names = accepted_keywords()
    assert {"inputs", "input_ids", "attention_mask", "params", "generation_config"} <= names
    assert {"streamer", "prefill_chunk_size", "flush_every", "double_buffering"} <= names
    assert {"do_sample", "temperature", "eos_token_id", "pad_token_id", "bos_token_id"} <= names
    assert {"tools", "return_dict_in_generate", "stop_strings"} <= names
    assert not names & {"return_dict", "pad", "stops", "chat", "n", "stop"}


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    ids = torch.tensor([[0, 5], [6, 7]])
    assert rows(ids) == [[0, 5], [6, 7]]
    assert rows(ids, torch.tensor([[0, 1], [1, 1]])) == [[5], [6, 7]]
    assert rows([torch.tensor([5, 6]), torch.tensor([7])]) == [[5, 6], [7]]
