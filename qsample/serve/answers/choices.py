"""One answer in its form on the wire: of chat completions, and of completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qsample.runtime import Delta, RequestOutput
from qsample.serve.answers.answers import finish_reason, stop_reason
from qsample.serve.answers.logprobs import chat_logprobs, completion_logprobs
from qsample.serve.reasoning import ReasoningReader
from qsample.serve.served_model import ServedModel
from qsample.serve.tool_calls.calls import DemandedCalls, ToolReader


class ChatChoice:
    """A choice of `/v1/chat/completions`."""

    def __init__(
        self,
        index: int,
        model: ServedModel,
        *,
        top_logprobs: int | None,
        tools: ToolReader | DemandedCalls | None,
        return_token_ids: bool,
        reasoning: ReasoningReader | None = None,
        show_reasoning: bool = True,
    ) -> None:
        """top_logprobs: alternatives of each token; None = no log-probabilities. tools: what reads calls. reasoning:
        what takes the model's thoughts out of the answer. show_reasoning: hand them on."""
        self._index = index
        self._model = model
        self._top = top_logprobs
        self._tools = tools
        self._reasoning = reasoning
        self._show_reasoning = show_reasoning
        self._return_token_ids = return_token_ids
        self._ends = model.model.package.manifest.token_ids.eos

    def opening(self) -> dict[str, Any]:
        return self._chunk({"role": "assistant", "content": ""})

    def piece(self, delta: Delta) -> dict[str, Any] | None:
        thoughts, text = self._put(delta.text or "")
        change = self._thoughts(thoughts) | ({"content": text} if text else {})
        chunk = self._chunk(change)
        if self._top is not None and delta.token_ids:
            chunk["logprobs"] = self._logprobs(delta.token_ids, delta.outputs)
        if self._return_token_ids:
            chunk["token_ids"] = delta.token_ids
        return chunk if change or chunk["logprobs"] or chunk.get("token_ids") else None

    def ending(self, output: RequestOutput) -> list[dict[str, Any]]:
        thoughts, rest, calls = self._rest()
        change = self._thoughts(thoughts) | ({"content": rest} if rest else {})
        chunks = [self._chunk(change)] if change else []
        chunks += [self._chunk({"tool_calls": [{"index": index, **call}]}) for index, call in enumerate(calls)]
        return [*chunks, self._chunk({}) | self._end(output, bool(calls))]

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        thoughts, before = self._put(output.text or "")
        last_thoughts, rest, calls = self._rest()
        thoughts, text = thoughts + last_thoughts, before + rest
        # As OpenAI and vLLM have it: null beside calls or thoughts, not "".
        content = text or (None if calls or thoughts else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        message |= self._thoughts(thoughts)
        if calls:
            message["tool_calls"] = calls
        choice: dict[str, Any] = {"index": self._index, "message": message, "logprobs": None}
        if self._top is not None:
            choice["logprobs"] = self._logprobs(output.token_ids, output.outputs)
        if self._return_token_ids:
            choice["token_ids"] = output.token_ids
        return choice | self._end(output, bool(calls))

    def _put(self, text: str) -> tuple[str, str]:
        """The thoughts and the text for the user that a part of the answer makes certain."""
        thoughts = ""
        if self._reasoning is not None:
            thoughts, text = self._reasoning.put(text)
        return thoughts, text if self._tools is None else self._tools.put(text)

    def _rest(self) -> tuple[str, str, list[dict[str, Any]]]:
        """What is left of both at the end, and the calls."""
        thoughts, text = self._reasoning.end() if self._reasoning is not None else ("", "")
        if self._tools is None:
            return thoughts, text, []
        before = self._tools.put(text)
        rest, calls = self._tools.end()
        return thoughts, before + rest, calls

    def _thoughts(self, text: str) -> dict[str, Any]:
        """Thoughts in vLLM's field, and in its former one, which many clients read."""
        return {"reasoning": text, "reasoning_content": text} if text and self._show_reasoning else {}

    def _chunk(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _end(self, output: RequestOutput, called: bool) -> dict[str, Any]:
        reason = finish_reason(output)
        # As OpenAI has it: an answer that was cut off says so, and the one function that was demanded is no surprise.
        named = isinstance(self._tools, DemandedCalls) and self._tools.name is not None
        reason = "tool_calls" if called and reason == "stop" and not named else reason
        return {"finish_reason": reason, "stop_reason": stop_reason(output, self._ends)}

    def _logprobs(self, tokens: Sequence[int], outputs: Any) -> dict[str, Any]:
        return {"content": chat_logprobs(self._model.token_texts, tokens, outputs, self._top or 0), "refusal": None}


class CompletionChoice:
    """A choice of `/v1/completions`."""

    def __init__(
        self, index: int, model: ServedModel, *, logprobs: int | None, echo: str, prompt_ids: Sequence[int] | None
    ) -> None:
        """logprobs: alternatives of each token; None = no log-probabilities. echo: comes before the answer. prompt_ids:
        to return, with the answer's own; None = no token ids."""
        self._index = index
        self._model = model
        self._top = logprobs
        self._echo = echo
        self._prompt_ids = prompt_ids
        self._ends = model.model.package.manifest.token_ids.eos
        self._offset = len(echo)

    def opening(self) -> dict[str, Any] | None:
        ids = {} if self._prompt_ids is None else {"prompt_token_ids": self._prompt_ids, "token_ids": []}
        return self._choice(self._echo) | ids if self._echo or ids else None

    def piece(self, delta: Delta) -> dict[str, Any] | None:
        choice = self._choice(delta.text or "")
        if self._top is not None and delta.token_ids:
            choice["logprobs"] = self._logprobs(delta.token_ids, delta.outputs)
            self._offset += sum(map(len, choice["logprobs"]["tokens"]))
        if self._prompt_ids is not None:
            choice["token_ids"] = delta.token_ids
        return choice if choice["text"] or choice["logprobs"] or choice.get("token_ids") else None

    def ending(self, output: RequestOutput) -> list[dict[str, Any]]:
        return [self._choice("") | self._end(output)]

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        choice = self._choice(self._echo + (output.text or ""))
        if self._top is not None:
            choice["logprobs"] = self._logprobs(output.token_ids, output.outputs)
        if self._prompt_ids is not None:
            choice |= {"prompt_token_ids": self._prompt_ids, "token_ids": output.token_ids}
        return choice | self._end(output)

    def _choice(self, text: str) -> dict[str, Any]:
        return {"index": self._index, "text": text, "logprobs": None, "finish_reason": None}

    def _end(self, output: RequestOutput) -> dict[str, Any]:
        return {"finish_reason": finish_reason(output), "stop_reason": stop_reason(output, self._ends)}

    def _logprobs(self, tokens: Sequence[int], outputs: Any) -> dict[str, Any]:
        return completion_logprobs(self._model.token_texts, tokens, outputs, self._top or 0, self._offset)
