"""Fields of OpenAI's, vLLM's and llama.cpp's requests for what is not done here: passed over if they ask for nothing,
refused by name if they ask for something."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic_core import PydanticCustomError


class Unsupported:
    """A field that is not followed."""

    def __init__(self, *neutral: Any, instead: str) -> None:
        """neutral: values that ask for nothing, beside null. instead: what to do for what other values ask for."""
        self._neutral = neutral
        self._instead = instead

    def check(self, name: str, value: Any) -> None:
        """Raise pydantic's error where the value of the field `name` asks for something."""
        if not any(isinstance(value, bool) is isinstance(one, bool) and value == one for one in self._neutral):
            raise PydanticCustomError(
                "unsupported_parameter", "not done here; {instead}", {"name": name, "instead": self._instead}
            )


Fields = Mapping[str, Unsupported]

_LEAVE_OUT: Final = "leave it out"
_NO_BEAMS: Final = "answers are sampled token by token, without beams; leave it out"
_TEXT_ONLY: Final = "the model reads text only; leave it out"
_ONE_LINE: Final = "JSON is written on one line, as json.dumps does; leave it out"

# vLLM's, of both kinds of requests.
BOTH: Final[Fields] = {
    "use_beam_search": Unsupported(False, instead=_NO_BEAMS),
    "early_stopping": Unsupported(False, instead=_NO_BEAMS),
    "length_penalty": Unsupported(1, instead=_NO_BEAMS),
    "skip_special_tokens": Unsupported(True, instead="return_token_ids returns special tokens, too"),
    # Of texts with special tokens, which there are none of.
    "spaces_between_special_tokens": Unsupported(True, False, instead=_LEAVE_OUT),
    "include_stop_str_in_output": Unsupported(False, instead="stop_reason has the stop string"),
    "truncate_prompt_tokens": Unsupported(instead="cut the prompt yourself; /tokenize counts its tokens"),
    "prompt_logprobs": Unsupported(False, instead="logprobs has those of the answer"),
    "allowed_token_ids": Unsupported(instead="guided_choice, guided_regex and guided_grammar hold an answer to a form"),
    "logits_processors": Unsupported([], instead="a server runs no programs of its clients"),
    "return_tokens_as_token_ids": Unsupported(False, instead="return_token_ids returns them beside the text"),
    "cache_salt": Unsupported(instead="requests share what was read; start a server for each group that may not"),
    "kv_transfer_params": Unsupported({}, instead=_LEAVE_OUT),
    "vllm_xargs": Unsupported({}, instead=_LEAVE_OUT),
    "repetition_detection": Unsupported(instead="frequency_penalty keeps an answer from repeating itself"),
    "thinking_token_budget": Unsupported(instead="max_tokens bounds thoughts and answer together"),
    "mm_processor_kwargs": Unsupported({}, instead=_TEXT_ONLY),
    "media_io_kwargs": Unsupported({}, instead=_TEXT_ONLY),
    "guided_json_object": Unsupported(False, instead='give response_format {"type": "json_object"}'),
    "guided_decoding_backend": Unsupported("auto", "guidance", instead="llguidance does it; leave it out"),
    "guided_whitespace_pattern": Unsupported(instead=_ONE_LINE),
}
# llama.cpp's.
LLAMA_CPP: Final[Fields] = {
    "repeat_last_n": Unsupported(-1, instead="repetition_penalty is on all tokens of a row; leave it out"),
    "samplers": Unsupported(instead="a package has one order of filters, which --filter-order of an export chooses"),
    "min_keep": Unsupported(0, instead="each filter keeps one token at least; leave it out"),
}
# OpenAI's, and two of vLLM's, which are those of completions.
CHAT: Final[Fields] = {
    **BOTH,
    **LLAMA_CPP,
    "audio": Unsupported(instead="the model writes text; leave it out"),
    "functions": Unsupported([], instead="give tools, which have taken their place"),
    "function_call": Unsupported("none", "auto", instead="give tools and tool_choice, which have taken its place"),
    "web_search_options": Unsupported(instead="search yourself, and give what you found in messages"),
    "moderation": Unsupported(instead=_LEAVE_OUT),
    "echo": Unsupported(False, instead="put the message in front of the answer yourself"),
    "add_special_tokens": Unsupported(False, instead="the chat template writes special tokens"),
}
COMPLETIONS: Final[Fields] = {
    **BOTH,
    **LLAMA_CPP,
    "prompt_embeds": Unsupported([], instead="give texts or token ids"),
}
STRUCTURED_OUTPUTS: Final[Fields] = {
    "disable_fallback": Unsupported(True, False, instead=_LEAVE_OUT),  # nothing falls back
    "disable_any_whitespace": Unsupported(True, False, instead=_LEAVE_OUT),  # it is the model's to choose in no case
    "disable_additional_properties": Unsupported(False, instead="give additionalProperties: false in the schema"),
    "whitespace_pattern": Unsupported(instead=_ONE_LINE),
    "structural_tag": Unsupported(instead="give tools, or a grammar"),
}
