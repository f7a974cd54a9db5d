"""The answers of the endpoints, for their description in openapi.json; `choices.py` and its neighbours make them."""

from __future__ import annotations

from typing import Any, Final

from pydantic import create_model

from qsample.addons.serve.requests import Body

_OPTIONAL: Final = (Any, None)
_REPEATED: Final = (
    "instructions, max_output_tokens, metadata, parallel_tool_calls, reasoning, temperature, text, tool_choice, tools, "
    "top_logprobs, top_p, user, background, max_tool_calls, previous_response_id, service_tier, store, truncation"
)


def _document(name: str, about: str, **fields: Any) -> type[Body]:
    """about: of the document, then of its fields, as in the docstring of a `Body`."""
    return create_model(name, __base__=Body, __doc__=about, **fields)


COMPLETION: Final = _document(
    "Completion",
    """An answer of OpenAI's form. id: of the answer. object: what it is. created: seconds since 1970. model: its served
    name. choices: each with index, finish_reason ("stop", "length" or "tool_calls"), stop_reason (the stop string or
    token), logprobs, and the text, or the message with role, content, reasoning and tool_calls. usage: prompt_tokens,
    completion_tokens and total_tokens; `prompt_tokens_details.cached_tokens` a slot held already.
    prompt_token_ids, prompt_logprobs: of a chat's prompt, if the request asks for them.""",
    **dict.fromkeys(("id", "object", "model"), str),
    created=int,
    choices=list[dict[str, Any]],
    usage=dict[str, Any],
    prompt_token_ids=_OPTIONAL,
    prompt_logprobs=_OPTIONAL,
)
RESPONSE: Final = _document(
    "Response",
    f"""An answer in items. id: of the answer. object: what it is. created_at, completed_at: seconds since 1970. model:
    its served name. status: "completed", "incomplete", "in_progress" or "failed". error: of an answer that failed.
    incomplete_details: why an answer was cut off. output: items of type reasoning, message and function_call. usage:
    input_tokens, output_tokens and total_tokens, with details. {_REPEATED}: as the request has it, or the default.""",
    **dict.fromkeys(("id", "object", "model", "status"), str),
    created_at=int,
    **dict.fromkeys(("completed_at", "error", "incomplete_details"), _OPTIONAL),
    output=list[dict[str, Any]],
    usage=_OPTIONAL,
    **dict.fromkeys(_REPEATED.split(", "), _OPTIONAL),
)
MESSAGE: Final = _document(
    "Message",
    """An answer in blocks. id: of the answer. type: what it is. role: "assistant". model: its served name. content:
    blocks of type thinking, text and tool_use. stop_reason: "end_turn", "max_tokens", "stop_sequence", "tool_use" or
    "model_context_window_exceeded". stop_sequence: the one that came. usage: input_tokens,
    cache_read_input_tokens (which a slot held already) and output_tokens.""",
    **dict.fromkeys(("id", "type", "role", "model"), str),
    content=list[dict[str, Any]],
    **dict.fromkeys(("stop_reason", "stop_sequence"), _OPTIONAL),
    usage=dict[str, int],
)
TOKEN_COUNT: Final = _document(
    "TokenCount", "A number. input_tokens: of the conversation.", input_tokens=int
)
MODEL: Final = _document(
    "Model",
    """A model, or an adapter. id: its served name. object: what it is. created: when it was loaded, in seconds since
    1970. owned_by: "qsample". parent: an adapter's model. max_model_len: tokens of a prompt and its answer.
    capabilities: completion_chat is whether it has a chat template, vision whether it reads images.""",
    **dict.fromkeys(("id", "object", "owned_by"), str),
    **dict.fromkeys(("created", "max_model_len"), int),
    parent=_OPTIONAL,
    capabilities=dict[str, bool],
)
MODELS: Final = _document(
    "Models",
    'object: "list". data: the models.',
    object=str,
    data=list[MODEL],  # type: ignore[valid-type]
)
TOKENS: Final = _document(
    "Tokens",
    """count: of the tokens. max_model_len: tokens of a prompt and its answer. tokens: their ids. token_strs: their
    texts, if the request asks for them.""",
    **dict.fromkeys(("count", "max_model_len"), int),
    tokens=list[int],
    token_strs=_OPTIONAL,
)
TEXT: Final = _document("Text", "prompt: the text of the tokens.", prompt=str)
HEALTH: Final = _document(
    "Health",
    'status: "ok" or "error". ended: models whose engines have ended.',
    status=str,
    ended=_OPTIONAL,
)
VERSION: Final = _document("Version", "version: of qsample.", version=str)
_ERROR_ABOUT: Final = "error: message, with the remedy; type; "
ERROR: Final = _document(
    "Error", _ERROR_ABOUT + "param, the field; code, a word for it.", error=dict[str, Any]
)
MESSAGE_ERROR: Final = _document(
    "MessageError",
    f'type: "error". {_ERROR_ABOUT}as Anthropic has it.',
    type=str,
    error=dict[str, str],
)
