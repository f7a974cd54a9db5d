"""An answer in its form on the wire: choices of completions and of chats, and their log-probabilities."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final

from qsample.contract.arrays import Array
from qsample.contract.tensors import LOGPROBS, TOP_LOGPROB_OUTPUTS
from qsample.runtime import Delta, RequestOutput
from qsample.serve.models import ServedModel, TokenTexts
from qsample.serve.parsers import DemandedCalls, ReasoningReader, ToolReader
from qsample.serve.scoring import PromptScores

_LEAST_LOGPROB: Final = -9999.0  # OpenAI's number for an impossible token; JSON has no infinity
_TOP_IDS, _TOP_VALUES = (spec.name for spec in TOP_LOGPROB_OUTPUTS)


class Choice(ABC):
    """An answer in its form on the wire."""

    def __init__(self, index: int, model: ServedModel, top_logprobs: int | None) -> None:
        """top_logprobs: alternatives of each token; None = no log-probabilities."""
        self._index = index
        self._model = model
        self._top = top_logprobs
        self.scores: PromptScores | None = None  # of its prompt, before its opening

    @abstractmethod
    def opening(self) -> dict[str, Any] | None:
        """The event before the first text; None = no event."""

    @abstractmethod
    def piece(self, delta: Delta) -> dict[str, Any] | None:
        """The event that a delta makes certain; None = no event yet."""

    @abstractmethod
    def ending(self, output: RequestOutput) -> list[dict[str, Any]]:
        """The last events; the last of them has the finish reason."""

    @abstractmethod
    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """The whole answer at once."""

    def _end(self, output: RequestOutput) -> dict[str, Any]:
        """OpenAI's finish reason, "length" after a timeout, too; and vLLM's stop reason: the stop string or token that
        ended the answer, None for the model's own end of text; and "timeout"."""
        stopped = output.finish_reason == "stop"
        reason: str | int | None = output.stop_string if stopped else None
        if stopped and reason is None and output.token_ids and output.token_ids[-1] not in self._model.ends:
            reason = output.token_ids[-1]
        if output.finish_reason == "time":
            reason = "timeout"
        return {"finish_reason": "stop" if stopped else "length", "stop_reason": reason}


class ChatChoice(Choice):
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
        """Prepare it.

        Args:
            index: among the choices.
            model: answers.
            top_logprobs: alternatives of each token; None = no log-probabilities.
            tools: reads calls; None = the answer is text.
            return_token_ids: return the tokens next to the text.
            reasoning: splits the thoughts off the answer; None = they stay in it.
            show_reasoning: return the thoughts.
        """
        super().__init__(index, model, top_logprobs)
        self._tools = tools
        self._reasoning = reasoning
        self._show_reasoning = show_reasoning
        self._return_token_ids = return_token_ids

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
        return [*chunks, self._chunk({}) | self._chat_end(output, bool(calls))]

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        thoughts, before = self._put(output.text or "")
        last_thoughts, rest, calls = self._rest()
        thoughts, text = thoughts + last_thoughts, before + rest
        # As in OpenAI's and vLLM's answers: null next to calls or thoughts, not "".
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
        return choice | self._chat_end(output, bool(calls))

    def _put(self, text: str) -> tuple[str, str]:
        """The thoughts and the text for the user that a part of the answer makes certain."""
        thoughts = ""
        if self._reasoning is not None:
            thoughts, text = self._reasoning.put(text)
        return thoughts, text if self._tools is None else self._tools.put(text)

    def _rest(self) -> tuple[str, str, list[dict[str, Any]]]:
        """The rest of both at the end, and the calls."""
        thoughts, text = self._reasoning.end() if self._reasoning is not None else ("", "")
        if self._tools is None:
            return thoughts, text, []
        before = self._tools.put(text)
        rest, calls = self._tools.end()
        return thoughts, before + rest, calls

    def _thoughts(self, text: str) -> dict[str, Any]:
        """Thoughts in vLLM's field, and in its former field, which many clients read."""
        return {"reasoning": text, "reasoning_content": text} if text and self._show_reasoning else {}

    def _chunk(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _chat_end(self, output: RequestOutput, called: bool) -> dict[str, Any]:
        end = self._end(output)
        # As in OpenAI's answers: the call of a demanded function ends with "stop", and a cut answer with "length".
        named = isinstance(self._tools, DemandedCalls) and self._tools.name is not None
        return end | {"finish_reason": "tool_calls"} if called and end["finish_reason"] == "stop" and not named else end

    def _logprobs(self, tokens: Sequence[int], outputs: Any) -> dict[str, Any]:
        return {"content": _chat_logprobs(self._model.token_texts, tokens, outputs, self._top or 0), "refusal": None}


class CompletionChoice(Choice):
    """A choice of `/v1/completions`."""

    def __init__(
        self,
        index: int,
        model: ServedModel,
        *,
        logprobs: int | None,
        echo: str | None,
        prompt_ids: Sequence[int] | None,
        prompt_logprobs: int | None,
    ) -> None:
        """Prepare it.

        Args:
            index: among the choices.
            model: answers.
            logprobs: alternatives of each token; None = no log-probabilities.
            echo: the prompt's text before the answer, None = without it.
            prompt_ids: returned next to the answer's token ids; None = no token ids.
            prompt_logprobs: alternatives of each token of the prompt, in vLLM's form; None = no log-probabilities.
        """
        super().__init__(index, model, logprobs)
        self._echo = echo
        self._prompt_ids = prompt_ids
        self._prompt_top = prompt_logprobs
        self._offset = len(echo or "")

    def opening(self) -> dict[str, Any] | None:
        ids = {} if self._prompt_ids is None else {"prompt_token_ids": self._prompt_ids, "token_ids": []}
        logprobs = self._of_prompt()
        return self._choice(self._echo or "") | {"logprobs": logprobs} | ids if self._echo or ids or logprobs else None

    def piece(self, delta: Delta) -> dict[str, Any] | None:
        choice = self._choice(delta.text or "")
        if self._top is not None and delta.token_ids:
            choice["logprobs"] = self._logprobs(delta.token_ids, delta.outputs)
            self._offset += sum(map(self._model.token_texts.width, delta.token_ids))
        if self._prompt_ids is not None:
            choice["token_ids"] = delta.token_ids
        return choice if choice["text"] or choice["logprobs"] or choice.get("token_ids") else None

    def ending(self, output: RequestOutput) -> list[dict[str, Any]]:
        return [self._choice("") | self._end(output)]

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        choice = self._choice((self._echo or "") + (output.text or ""))
        if self._top is not None:
            logprobs, own = self._of_prompt(), self._logprobs(output.token_ids, output.outputs)
            choice["logprobs"] = own if logprobs is None else _joined(logprobs, own)
        if self._prompt_top is not None and self.scores is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._model.token_texts, self.scores, self._prompt_top)
        if self._prompt_ids is not None:
            choice |= {"prompt_token_ids": self._prompt_ids, "token_ids": output.token_ids}
        return choice | self._end(output)

    def _choice(self, text: str) -> dict[str, Any]:
        return {"index": self._index, "text": text, "logprobs": None, "finish_reason": None}

    def _logprobs(self, tokens: Sequence[int], outputs: Any) -> dict[str, Any]:
        return _completion_logprobs(self._model.token_texts, tokens, outputs, self._top or 0, self._offset)

    def _of_prompt(self) -> dict[str, Any] | None:
        """The log-probabilities of the prompt in front of the answer's; the first token has none."""
        if self._top is None or self._echo is None or self.scores is None or not self.scores.token_ids:
            return None
        texts, (first, *others) = self._model.token_texts, self.scores.token_ids
        none = [None] if self._top else None
        start = {
            "tokens": [texts.of(first)[0]],
            "token_logprobs": [None],
            "top_logprobs": none,
            "text_offset": [0],
        }
        return _joined(start, _completion_logprobs(texts, others, self.scores.outputs, self._top, texts.width(first)))


def _chat_logprobs(
    texts: TokenTexts, tokens: Sequence[int], outputs: Mapping[str, Array], top: int
) -> list[dict[str, Any]]:
    """An entry for each token, as in chat completions."""

    def entry(token: int, value: float) -> dict[str, Any]:
        text, data = texts.of(int(token))
        return {"token": text, "logprob": _finite(value), "bytes": list(data)}

    entries = []
    for index, token in enumerate(tokens):
        others = (
            [
                entry(*pair)
                for pair in zip(outputs[_TOP_IDS][index, :top], outputs[_TOP_VALUES][index, :top], strict=True)
            ]
            if top
            else []
        )
        entries.append(entry(token, outputs[LOGPROBS.name][index, 0]) | {"top_logprobs": others})
    return entries


def _completion_logprobs(
    texts: TokenTexts, tokens: Sequence[int], outputs: Mapping[str, Array], top: int, offset: int
) -> dict[str, Any]:
    """An object for all tokens, as in completions. The alternatives include the sampled token, even if it is not among
    the `top` likeliest. offset: of the first token's text in the answer."""
    strings = [texts.of(token)[0] for token in tokens]
    values = [_finite(outputs[LOGPROBS.name][index, 0]) for index in range(len(tokens))]
    offsets = [offset]
    for token in tokens:
        offsets.append(offsets[-1] + texts.width(token))
    alternatives: list[dict[str, float]] | None = None
    if top:
        alternatives = [
            {
                texts.of(int(token))[0]: _finite(value)
                for token, value in zip(outputs[_TOP_IDS][index, :top], outputs[_TOP_VALUES][index, :top], strict=True)
            }
            | {strings[index]: values[index]}
            for index in range(len(tokens))
        ]
    return {
        "tokens": strings,
        "token_logprobs": values,
        "top_logprobs": alternatives,
        "text_offset": offsets[:-1],
    }


def _joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Two results of `_completion_logprobs` as one."""
    return {name: None if entry is None else entry + second[name] for name, entry in first.items()}


def prompt_logprobs(texts: TokenTexts, scores: PromptScores, top: int) -> list[dict[str, Any] | None]:
    """As in vLLM's answers: for each token of a prompt its alternatives and itself by token id, None for the first."""
    return [
        None
        if entry is None
        else {
            str(token): {"logprob": _finite(value), "rank": rank, "decoded_token": texts.of(token)[0]}
            for token, (value, rank) in entry.items()
        }
        for entry in scores.entries(top)
    ]


def _finite(value: float) -> float:
    return max(float(value), _LEAST_LOGPROB)
