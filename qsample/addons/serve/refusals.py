"""The fields of requests of OpenAI, Anthropic, vLLM and llama.cpp that this server does not follow.

Values that ask for nothing are ignored. Other values are refused by name, with a remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from qsample.request.refusals import Refusal, refusals

Refusals = Mapping[str, Refusal]
_LEAVE_OUT: Final = "leave it out"
_NO_BEAMS: Final = "answers are sampled token by token, without beams; leave it out"
_FIXED_IMAGES: Final = "a package reads images as its model's processor does; leave it out"
_CUT_THE_INPUT: Final = "cut the input yourself; /tokenize counts its tokens"
_JSON_ON_ONE_LINE: Final = "JSON is written on one line, as json.dumps does; leave it out"

# The fields of vLLM and llama.cpp that requests of every kind have.
_COMMON: Final[Refusals] = {
    **refusals("use_beam_search early_stopping", _NO_BEAMS, False),
    "length_penalty": Refusal(_NO_BEAMS, (1,)),
    # The decoders of the tokenizers library write no blanks between special tokens.
    "spaces_between_special_tokens": Refusal(_LEAVE_OUT, (True, False)),
    "truncate_prompt_tokens": Refusal("cut the prompt yourself; /tokenize counts its tokens"),
    "logits_processors": Refusal("a server runs no programs of its clients", ([],)),
    "return_tokens_as_token_ids": Refusal(
        "return_token_ids returns them next to the text", (False,)
    ),
    "cache_salt": Refusal(
        "requests share cached prompts; start a server for each group that must not"
    ),
    **refusals("kv_transfer_params vllm_xargs", _LEAVE_OUT, {}),
    "prompt_logprob_token_ids": Refusal(
        "prompt_logprobs returns the log-probabilities of the prompt's own tokens and of the likeliest tokens",
        ([],),
    ),
    **refusals("mm_processor_kwargs media_io_kwargs", _FIXED_IMAGES, {}),
    "guided_json_object": Refusal('give response_format {"type": "json_object"}', (False,)),
    "guided_decoding_backend": Refusal("llguidance does it; leave it out", ("auto", "guidance")),
    "guided_whitespace_pattern": Refusal(_JSON_ON_ONE_LINE),
    "samplers": Refusal(
        "a package has a fixed order of filters, which --filter-order of export chooses"
    ),
    "min_keep": Refusal("each filter keeps at least a token; leave it out", (0,)),
}
CHAT: Final[Refusals] = {
    **_COMMON,
    "audio": Refusal("the model writes text; leave it out"),
    "functions": Refusal("give tools, which have taken their place", ([],)),
    "function_call": Refusal(
        "give tools and tool_choice, which have taken its place", ("none", "auto")
    ),
    "web_search_options": Refusal("search yourself, and put the results into messages"),
    "moderation": Refusal(_LEAVE_OUT),
    "echo": Refusal("put the message in front of the answer yourself", (False,)),
    "add_special_tokens": Refusal("the chat template writes special tokens", (False,)),
}
COMPLETIONS: Final[Refusals] = {
    **_COMMON,
    **refusals(
        "thinking_token_budget thinking_budget_tokens",
        "a completion continues a text, without thoughts; /v1/chat/completions takes it",
        -1,
    ),
    "prompt_embeds": Refusal("give texts or token ids", ([],)),
}
RESPONSES: Final[Refusals] = {
    **_COMMON,
    **refusals(
        "previous_response_id conversation",
        "nothing is stored here; send the whole conversation in input",
    ),
    "store": Refusal(
        "nothing is stored here; give store: false, and send the whole conversation each time",
        (False,),
    ),
    "background": Refusal(
        "nothing is stored here; wait for the answer, or give stream: true", (False,)
    ),
    **refusals("background_options moderation access_programs", _LEAVE_OUT),
    "prompt": Refusal("no prompts are stored here; give instructions and input"),
    # "auto" cuts an input that is too long. Here such an input is an error with either value.
    "truncation": Refusal(_CUT_THE_INPUT, ("disabled", "auto")),
    "context_management": Refusal(_CUT_THE_INPUT, ([],)),
    "image": Refusal("give input_image in the content of a message"),
    "messages": Refusal("give input"),
    **refusals("n best_of", "send a request for each answer", 1),
    **refusals("max_tokens max_completion_tokens", "give max_output_tokens"),
    "response_format": Refusal("give text.format", ({"type": "text"},)),
    "logprobs": Refusal('give include: ["message.output_text.logprobs"]', (False,)),
    **refusals(
        "prompt_logprobs logprob_token_ids return_token_ids", "/v1/chat/completions takes it", False
    ),
}
MESSAGES: Final[Refusals] = {
    **_COMMON,
    **refusals("container mcp_servers", "this server runs no tools itself; leave it out", []),
    **refusals("n best_of", "send a request for each answer", 1),
    "stop": Refusal("give stop_sequences", ([],)),
    **refusals("thinking_token_budget thinking_budget_tokens", "give thinking.budget_tokens", -1),
    "response_format": Refusal("give output_config.format", ({"type": "text"},)),
    **refusals(
        "logprobs prompt_logprobs logprob_token_ids return_token_ids",
        "/v1/chat/completions takes it",
        False,
    ),
}
MESSAGE_TOOL: Final[Refusals] = {
    "allowed_callers": Refusal("only the model calls tools; leave it out", (["direct"],)),
}
STRUCTURED_OUTPUTS: Final[Refusals] = {
    # llguidance has no fallback, and blanks are always those of json.dumps.
    **refusals("disable_fallback disable_any_whitespace", _LEAVE_OUT, True, False),
    "disable_additional_properties": Refusal(
        "give additionalProperties: false in the schema", (False,)
    ),
    "whitespace_pattern": Refusal(_JSON_ON_ONE_LINE),
    "structural_tag": Refusal("give tools, or a grammar"),
}
