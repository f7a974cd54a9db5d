"""What every endpoint refuses, by a table: the fields, the parameter that the error names, and its words."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from qsample.addons.serve import refusals

PATHS = {"text": "/v1/completions", "chat": "/v1/chat/completions", "items": "/v1/responses"}
GOOD: dict[str, dict[str, Any]] = {
    "text": {"prompt": "x", "max_tokens": 4},
    "chat": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
    "items": {"input": "x", "max_output_tokens": 4},
}
FUNCTION = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


Row = tuple[dict[str, Any], str | None, str]
# "both": of texts and of chats.
REFUSED: dict[str, list[Row]] = {
    "text": [
        ({"model": "gpt"}, "model", "'gpt' does not exist here; there is 'tiny'"),
        ({"temprature": 1}, "temprature", "temprature is not known here; did you mean 'temperature'?"),
        ({"temperature": "hot"}, "temperature", "temperature: "),
        ({"prompt": []}, None, "prompt is an empty list"),
        ({"prompt": [5, 100000]}, "prompt", "100000 is not a token"),
        ({"prompt": [5, -1]}, "prompt", "prompt: give a text, a list of token ids from 0"),
        ({"prompt": [[5]] * 65_537}, "prompt", "prompt: it has 65537 prompts; give at most 65536"),
        ({"prompt": "x" * 100_000}, "prompt", "the prompt has 100000 characters"),
        ({"prompt": "\ud800"}, None, "surrogate"),
        ({"guided_json": "[1]"}, None, "#: [1] is not a schema; give an object"),
        ({"guided_json": "{"}, None, "not valid JSON"),
        ({"guided_json": {"type": "wrong"}}, None, "#/type: 'wrong' is no type; give null, boolean"),
        ({"guided_json": {"type": "string", "minLength": 3, "maxLength": 2}}, None, "no answer can follow that form"),
        ({"structured_outputs": {"json": '{"not": {}}'}}, None, "no answer can follow that form"),
        ({"guided_regex": "("}, None, "no answer can follow that form"),
        ({"guided_regex": "[^\\x00-\\U0010FFFF]"}, None, "no answer can follow that form"),
        ({"guided_grammar": "start: start start"}, None, "no answer can follow that form"),
        ({"guided_choice": []}, "guided_choice", "guided_choice: "),
        ({"guided_choice": ["a"], "guided_regex": "b"}, None, "constrained by several fields"),
        ({"guided_choice": ["yes"], "ignore_eos": True}, "ignore_eos", "ignore_eos asks for tokens after the end"),
        ({"guided_choice": ["yes"], "min_tokens": 5}, "min_tokens", "min_tokens asks for tokens after the end"),
        ({"logprobs": 6}, "logprobs", "this package returns 5"),
        ({"suffix": "y"}, None, "suffix is not done here: the model writes"),
        ({"stream_options": {"include_usage": True}}, None, "stream_options is for streams"),
        ({"stream": False, "stream_options": {"include_obfuscation": True}}, None, "stream_options is for streams"),
        ({"stream": True, "prompt_logprobs": 0}, None, "prompt_logprobs come with a whole answer"),
        ({"n": 2, "best_of": 1}, None, "best_of is not done here"),
        ({"max_tokens": 0, "min_tokens": 1}, None, "min_tokens is 1 and max_tokens 0"),
        ({"min_tokens": 9, "max_tokens": 4}, "min_tokens", "min_new_tokens is 9"),
        ({"logit_bias": {"the": 1}}, "logit_bias", "logit_bias: the key 'the' is not a token id"),
        ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias", "it has 1025 tokens; give at most"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "logit_bias has token id 99999"),
        ({"stop_token_ids": [5] * 1_025}, "stop_token_ids", "stop_token_ids: list should have at most 1024 items"),
        ({"stop_token_ids": [99999]}, "stop_token_ids", "stop_token_ids is 99999; give ids of tokens"),
        ({"stop": ["ab"] * 65}, "stop", "stop: it has 65 strings of 130 characters in all; give at most 64 of"),
        ({"stop": [""]}, "stop", "stop: it has an empty text"),
        ({f"k{n}": 0 for n in range(257)}, None, "an object has 259 fields; give at most 256"),
        ({f"k{n}": 0 for n in range(65)}, None, "more than 64 fields that are not known here"),
        ({"structured_outputs": {"json_schema": {}}}, "structured_outputs.json_schema", "not known here"),
        ({"response_format": {"type": "json_object", "schemas": {}}}, "response_format.schemas", "not known here"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format", "a field of type json_object"),
        ({"response_format": {"type": "json_object", "schema": "{}"}}, "response_format.schema", "valid dictionary"),
        ({"repeat_penalty": 2, "repetition_penalty": 2}, "repetition_penalty", "the same as repeat_penalty"),
        ({"typical_p": 0.9}, "typical_p", "export the model again with filters=['typical_p'] (--filter)"),
        ({"skip_special_tokens": 1}, "skip_special_tokens", "skip_special_tokens: input should be a valid boolean"),
        ({"allowed_token_ids": [99999]}, "allowed_token_ids", "allowed_token_ids is 99999; give token ids"),
        ({"guided_choice": ["a"], "allowed_token_ids": [5]}, "allowed_token_ids", "both constrain the answer"),
        ({"thinking_token_budget": 5}, "thinking_token_budget", "is not done here; a completion continues a text"),
        ({"thinking_budget_tokens": 0}, "thinking_budget_tokens", "/v1/chat/completions takes it"),
        ({"prompt_embeds": "x"}, "prompt_embeds", "prompt_embeds is not done here; give texts or token ids"),
    ],
    "both": [
        ({"n": 100}, None, "100 answers were requested at once, and this server takes 66"),
        ({"use_beam_search": True}, "use_beam_search", "without beams"),
        ({"length_penalty": 0.5}, "length_penalty", "without beams"),
        ({"early_stopping": "never"}, "early_stopping", "without beams"),
        ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output", "valid boolean"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "/tokenize"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "should have at least 1 item"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids.0", "greater than or equal to 0"),
        ({"repetition_detection": {"max_pattern_size": 2}}, "repetition_detection", "min_count is 0; give"),
        ({"repetition_detection": {"min_pattern_size": 2}}, "repetition_detection", "min_pattern_size is 2, more"),
        ({"repetition_detection": {"max_pattern": 2}}, "repetition_detection.max_pattern", "not known here"),
        ({"repetition_detection": True}, "repetition_detection", "repetition_detection"),
        ({"repeat_last_n": -2}, "penalty_last_n", "give an integer >= -1"),
        ({"samplers": ["top_k"]}, "samplers", "--filter-order"),
        ({"min_keep": 2, "cache_salt": "x"}, "min_keep", "keeps at least a token"),
        ({"logits_processors": ["x"]}, "logits_processors", "no programs"),
        ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids", "return_token_ids"),
        ({"cache_salt": "x"}, "cache_salt", "share cached prompts"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params", "leave it out"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids", "without prompt_logprobs"),
        ({"prompt_logprob_token_ids": [[5]]}, "prompt_logprob_token_ids", "prompt_logprobs returns"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend", "llguidance does it"),
        ({"guided_json_object": True}, "guided_json_object", "response_format"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "give tools"),
    ],
    "chat": [
        ({"messages": []}, "messages", "messages: list should have at least 1 item"),
        ({"messages": None}, "messages", "messages is missing"),
        ({"messages": "hello"}, "messages", "messages: "),
        ({"messages": [{"role": "user"}]}, None, "no content"),
        ({"messages": [{"content": "x"}]}, None, "role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None,
            "text only",
        ),
        ({"tools": [tool("f"), tool("f")]}, None, "tools has two functions with the same name"),
        ({"tools": [tool("f")], "tool_choice": tool("g")}, None, "tool_choice names 'g', which is not among tools"),
        ({"tool_choice": tool("")}, None, "tool_choice names '', which"),
        ({"tool_choice": "required"}, None, 'tool_choice is "required" and the request has no tools'),
        ({"top_logprobs": 2}, None, "top_logprobs needs logprobs: true"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "less than or equal to 20"),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs", "greater than or equal to 0"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "greater than or equal to 1"),
        ({"tools": [tool("a b")]}, "tools.0.function.name", "pattern"),
        ({"tools": [tool("")]}, "tools.0.function.name", "pattern"),
        ({"tools": [tool("a" * 65)]}, "tools.0.function.name", "pattern"),
        ({"tools": [tool("f") | {"type": "custom"}]}, "tools.0.type", "'function'"),
        (
            {"tools": [tool("f")], "tool_choice": tool("f") | {"type": "custom"}}, "tool_choice",
            "tool_choice: input should be 'none', 'auto' or 'required'",
        ),
        ({"modalities": ["audio"]}, "modalities.0", "'text'"),
        (
            {"tools": [tool("f")], "tool_choice": "required", "guided_regex": "a"}, None,
            "response_format and tool_choice both constrain",
        ),
        ({"function": []}, "function", "function is not known here; did you mean 'functions'?"),
        ({"chat_template": "{{ messages }}"}, "chat_template", "takes no chat templates of clients"),
        ({"chat_template": "unknown"}, None, "nor a template of the package"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "has no schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "response_format"),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "audio", "the model writes text"),
        ({"functions": [{"name": "f"}]}, "functions", "functions is not done here; give tools"),
        ({"function_call": {"name": "f"}}, "function_call", "tool_choice"),
        ({"web_search_options": {}}, "web_search_options", "search yourself"),
        ({"moderation": {"model": "x"}}, "moderation", "leave it out"),
        ({"echo": True}, "echo", "yourself"),
        ({"length_penalty": True}, "length_penalty", "beams"),
        ({"add_special_tokens": True}, "add_special_tokens", "chat template"),
        ({"thinking_token_budget": 5}, "thinking_token_budget", "start it with --reasoning-parser, or leave"),
        ({"thinking_token_budget": -2}, "thinking_token_budget", "greater than or equal to -1"),
    ],
    "items": [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
        ({"store": True}, "store", "give store: false"),
        ({"background": True}, "background", "nothing is stored"),
        ({"truncation": "always"}, "truncation", "cut the input"),
        ({"max_tokens": 5}, "max_tokens", "give max_output_tokens"),
        ({"n": 2}, "n", "a request for each"),
        ({"tools": [{"type": "local_shell"}]}, "tools.0", "'local_shell', and this server runs no tools"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, None, "has no tools"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "file_search"}}, "tool_choice", "this server runs no tools"),
        ({"tool_choice": "required"}, None, "has no tools"),
        ({"top_logprobs": 2}, None, "needs include"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, None, "give schema"),
        ({"reasoning": {"summary": 5}}, "reasoning.summary", "string"),
        ({"input": 5}, "input", "give a text, or a list of items"),
        ({"input": []}, "input", "give a text, or a list of items"),
        ({"input": [5]}, "input", "item 0 is not an object"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "send the item itself"),
        ({"input": [{"type": "web_search_call"}]}, "input", "item 0 is of type 'web_search_call'"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input", "item 0 has no role"),
        ({"input": [{"role": "user", "content": 5}]}, "input", "item 0 has no content"),
        ({"input": [{"role": "user", "content": [5]}]}, "input", "item 0 has a part of type None"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input",
            "item 0 has a part of type 'input_text'",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input",
            "item 0 has an input_image without image_url",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, None, "text only"),
        ({"input": [{"role": "user", "content": [{"type": [], "text": "x"}]}]}, "input", "item 0 has a part of type"),
        ({"input": [{"type": "reasoning", "content": None}]}, "input", "it has no message"),
        ({"input": [{"type": "function_call_output", "call_id": 5, "output": ""}]}, "input", "item 0 has no call_id"),
        ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input", "item 0 has no name"),
        (
            {"input": [{"role": "user", "content": ""}, {"type": "function_call", "call_id": "c", "name": "f"}]},
            "input", "item 1 has no arg",
        ),
    ],
}  # fmt: skip
CASES = [
    (kind, *row)
    for kinds, rows in REFUSED.items()
    for kind in (("text", "chat") if kinds == "both" else (kinds,))
    for row in rows
]


@pytest.fixture(scope="module")
def client(local_app: Callable[..., TestClient]) -> Iterator[TestClient]:
    with local_app(slots=2, max_waiting=64) as running:
        yield running


def refusal(client: TestClient, path: str, content: str, status: int = 400) -> dict[str, Any]:
    answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    assert len(error["message"]) < 400
    return error


@pytest.mark.parametrize(("kind", "fields", "param", "words"), CASES, ids=range(len(CASES)))
def test_fields(
    client: TestClient, kind: str, fields: dict[str, Any], param: str | None, words: str
) -> None:
    content = json.dumps(GOOD[kind] | fields)
    for _ in range(2 if "form" in words else 1):  # a grammar that was refused is not kept
        error = refusal(client, PATHS[kind], content, 404 if "model" in fields else 400)
        assert (error["param"], words in error["message"]) == (param, True), error
    undone = error["message"].startswith(f"{param} is not done here; ")
    assert (error["code"] == "unsupported_parameter") == undone
    assert (error["code"] == "unknown_parameter") == (
        error["message"].startswith(f"{param} is not known here; ")
    )


@pytest.mark.parametrize(
    ("content", "param", "words"),
    [
        ("", None, "the body is empty; send a JSON object with Content-Type: "),
        ("[]", None, "the body is not a JSON object; send a"),
        ("text", None, "not valid JSON"),
        ('"text"', None, "not a JSON object"),
        ("null", None, "not a JSON object"),
        ("{", None, "the body is not valid JSON: Expecting property name"),
        ("\\xff", None, "the body is not valid JSON"),
        ('{"prompt": NaN}', None, "the body is not valid JSON: JSON has no NaN"),
        ("[" * 100_000, None, "the body is not valid JSON: "),
        ('{"temperature": 1e999}', "temperature", "temperature: input should be a finite number"),
        ('{"echo": "yes"}', "echo", "echo: input should be a valid boolean ('yes' was given)"),
        ('{"n": "\\u00e9"}', "n", "n: input should be a valid integer ('\\xe9' was given)"),
        ('{"n": []}', "n", "n: input should be a valid integer"),
        (
            '{"structured_outputs": {"choice": [1]}}',
            "structured_outputs.choice.0",
            "structured_outputs.choice.0: ",
        ),
        ('{"stop": 5}', "stop", "stop: input should be a valid string (5 was given)"),
    ],
)
def test_bodies(client: TestClient, content: str, param: str | None, words: str) -> None:
    error = refusal(client, PATHS["text"], content)
    assert (error["param"], words in error["message"]) == (param, True), error


def test_bytes_and_paths(client: TestClient) -> None:
    answer = client.post(
        PATHS["text"], content=b"\xff\xfe", headers={"Content-Type": "application/json"}
    )
    assert (answer.status_code, answer.json()["error"]["message"][:26]) == (
        400,
        "the body is not valid JSON",
    )
    for path, status in (("/v1/nothing", 404), (PATHS["text"], 405)):
        answer = client.get(path)
        assert (answer.status_code, "error" in answer.json()) == (status, True)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "f"}}, "auto"]
)
def test_parameters_that_are_nested_too_deep(client: TestClient, choice: Any) -> None:
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(300):  # JSON is read to this depth
        deep = {"type": "object", "properties": {"a": deep}}
    function = {"type": "function", "function": {"name": "f", "parameters": deep}}
    refusal(
        client,
        PATHS["chat"],
        json.dumps(GOOD["chat"] | {"tools": [function], "tool_choice": choice}),
    )


COMMON = """
    use_beam_search false; early_stopping false; length_penalty 1; spaces_between_special_tokens true false
    truncate_prompt_tokens; logits_processors []; return_tokens_as_token_ids false; cache_salt; kv_transfer_params {}
    vllm_xargs {}; prompt_logprob_token_ids []; mm_processor_kwargs {}; media_io_kwargs {}; guided_json_object false
    guided_decoding_backend "auto" "guidance"; guided_whitespace_pattern; samplers; min_keep 0
"""
# The fields of each kind of request that are refused, with the values that ask for nothing.
NEUTRAL = {
    "CHAT": COMMON + """
        audio; functions []; function_call "none" "auto"; web_search_options; moderation; echo false
        add_special_tokens false
    """,
    "COMPLETIONS": COMMON + "thinking_token_budget -1; thinking_budget_tokens -1; prompt_embeds []",
    "RESPONSES": COMMON + """
        previous_response_id; conversation; store false; background false; background_options; moderation
        access_programs; prompt; truncation "disabled" "auto"; context_management []; image; messages; n 1; best_of 1
        max_tokens; max_completion_tokens; response_format {"type":"text"}; logprobs false; prompt_logprobs false
        logprob_token_ids false; return_token_ids false
    """,
    "MESSAGES": COMMON + """
        container []; mcp_servers []; n 1; best_of 1; stop []; thinking_token_budget -1; thinking_budget_tokens -1
        response_format {"type":"text"}; logprobs false; prompt_logprobs false; logprob_token_ids false
        return_token_ids false
    """,
    "MESSAGE_TOOL": 'allowed_callers ["direct"]',
    "STRUCTURED_OUTPUTS": """
        disable_fallback true false; disable_any_whitespace true false; disable_additional_properties false
        whitespace_pattern; structural_tag
    """,
}  # fmt: skip


@pytest.mark.parametrize("name", NEUTRAL)
def test_values_that_ask_for_nothing(name: str) -> None:
    wanted = {}
    for entry in NEUTRAL[name].strip().replace("\n", ";").split(";"):
        if entry.strip():
            field, *values = entry.split()
            wanted[field] = [json.loads(value) for value in values]
    table: refusals.Refusals = getattr(refusals, name)
    found = {field: list(refusal.neutral) for field, refusal in table.items()}
    # True and 1 are different values here.
    assert [*map(repr, sorted(found.items()))] == [*map(repr, sorted(wanted.items()))]
    assert [field for field, refusal in table.items() if " " not in refusal.instead] == []
