"""Fields of OpenAI's, vLLM's and llama.cpp's requests that this server does not follow.

Values that ask for nothing are ignored; other values are refused by name, with a remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from qsample.request.refusals import Refusal

Refusals = Mapping[str, Refusal]


_LEAVE_OUT: Final = "leave it out"
_NO_BEAMS: Final = "answers are sampled token by token, without beams; leave it out"
_TEXT_ONLY: Final = "the model reads text only; leave it out"
_ONE_LINE: Final = "JSON is written on one line, as json.dumps does; leave it out"

# vLLM's and llama.cpp's, of both kinds of requests.
_BOTH: Final[Refusals] = {
    "use_beam_search": Refusal(_NO_BEAMS, (False,)),
    "early_stopping": Refusal(_NO_BEAMS, (False,)),
    "length_penalty": Refusal(_NO_BEAMS, (1,)),
    "skip_special_tokens": Refusal("return_token_ids returns special tokens, too", (True,)),
    "spaces_between_special_tokens": Refusal(_LEAVE_OUT, (True, False)),  # answers contain no special tokens
    "include_stop_str_in_output": Refusal("stop_reason has the stop string", (False,)),
    "truncate_prompt_tokens": Refusal("cut the prompt yourself; /tokenize counts its tokens"),
    "allowed_token_ids": Refusal("guided_choice, guided_regex and guided_grammar constrain an answer"),
    "logits_processors": Refusal("a server runs no programs of its clients", ([],)),
    "return_tokens_as_token_ids": Refusal("return_token_ids returns them next to the text", (False,)),
    "cache_salt": Refusal("requests share cached prompts; start a server for each group that must not"),
    "kv_transfer_params": Refusal(_LEAVE_OUT, ({},)),
    "vllm_xargs": Refusal(_LEAVE_OUT, ({},)),
    "repetition_detection": Refusal("frequency_penalty keeps an answer from repeating itself"),
    "thinking_token_budget": Refusal("max_tokens bounds thoughts and answer together"),
    "mm_processor_kwargs": Refusal(_TEXT_ONLY, ({},)),
    "media_io_kwargs": Refusal(_TEXT_ONLY, ({},)),
    "guided_json_object": Refusal('give response_format {"type": "json_object"}', (False,)),
    "guided_decoding_backend": Refusal("llguidance does it; leave it out", ("auto", "guidance")),
    "guided_whitespace_pattern": Refusal(_ONE_LINE),
    "repeat_last_n": Refusal("repetition_penalty applies to all tokens of a row; leave it out", (-1,)),
    "samplers": Refusal("a package has a fixed order of filters, which --filter-order of export chooses"),
    "min_keep": Refusal("each filter keeps at least a token; leave it out", (0,)),
}
CHAT: Final[Refusals] = {
    **_BOTH,
    "audio": Refusal("the model writes text; leave it out"),
    "functions": Refusal("give tools, which have taken their place", ([],)),
    "function_call": Refusal("give tools and tool_choice, which have taken its place", ("none", "auto")),
    "web_search_options": Refusal("search yourself, and put the results into messages"),
    "moderation": Refusal(_LEAVE_OUT),
    "echo": Refusal("put the message in front of the answer yourself", (False,)),
    "add_special_tokens": Refusal("the chat template writes special tokens", (False,)),
}
COMPLETIONS: Final[Refusals] = {**_BOTH, "prompt_embeds": Refusal("give texts or token ids", ([],))}
_NOTHING_STORED: Final = "nothing is stored here; send the whole conversation in input"
RESPONSES: Final[Refusals] = {
    **_BOTH,
    "previous_response_id": Refusal(_NOTHING_STORED),
    "conversation": Refusal(_NOTHING_STORED),
    "store": Refusal("nothing is stored here; give store: false, and send the whole conversation each time", (False,)),
    "background": Refusal("nothing is stored here; wait for the answer, or give stream: true", (False,)),
    "background_options": Refusal(_LEAVE_OUT),
    "prompt": Refusal("no prompts are stored here; give instructions and input"),
    "max_tool_calls": Refusal("this server runs no tools itself; leave it out"),
    "truncation": Refusal("cut the input yourself; /tokenize counts its tokens", ("disabled",)),
    "context_management": Refusal("cut the input yourself; /tokenize counts its tokens", ([],)),
    "moderation": Refusal(_LEAVE_OUT),
    "access_programs": Refusal(_LEAVE_OUT),
    "image": Refusal(_TEXT_ONLY),
    "messages": Refusal("give input"),
    "n": Refusal("send a request for each answer", (1,)),
    "best_of": Refusal("send a request for each answer", (1,)),
    "max_tokens": Refusal("give max_output_tokens"),
    "max_completion_tokens": Refusal("give max_output_tokens"),
    "response_format": Refusal("give text.format", ({"type": "text"},)),
    "logprobs": Refusal('give include: ["message.output_text.logprobs"]', (False,)),
    "prompt_logprobs": Refusal("/v1/chat/completions takes it", (False,)),
    "return_token_ids": Refusal("/v1/chat/completions takes it", (False,)),
}
STRUCTURED_OUTPUTS: Final[Refusals] = {
    "disable_fallback": Refusal(_LEAVE_OUT, (True, False)),  # llguidance has no fallback
    "disable_any_whitespace": Refusal(_LEAVE_OUT, (True, False)),  # blanks are always as json.dumps writes them
    "disable_additional_properties": Refusal("give additionalProperties: false in the schema", (False,)),
    "whitespace_pattern": Refusal(_ONE_LINE),
    "structural_tag": Refusal("give tools, or a grammar"),
}
