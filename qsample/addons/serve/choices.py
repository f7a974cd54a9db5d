"""An answer on the wire: a choice of a completion or of a chat. It consists of the events that new tokens make certain;
a whole answer is their sum."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, Final

from qsample.addons.serve.chats import ChatCompletionRequest
from qsample.addons.serve.http import ApiError
from qsample.addons.serve.models import ServedModel, TokenTexts
from qsample.addons.serve.parsers import DemandedCalls, ToolCalls, ToolReader, joined_calls
from qsample.addons.serve.requests import CompletionRequest, GenerationRequest
from qsample.contract.arrays import Array
from qsample.contract.tensors import LOGPROBS, TOP_LOGPROB_OUTPUTS
from qsample.runtime import Delta, RequestOutput

Event = dict[str, Any]

_LEAST_LOGPROB: Final = -9999.0  # OpenAI's number for an impossible token; JSON has no infinity
_TOP_IDS, _TOP_VALUES = (spec.name for spec in TOP_LOGPROB_OUTPUTS)


@dataclass(frozen=True, slots=True)
class PromptScores:
    """What the model says of the n tokens of a prompt. `outputs`: the package's optional outputs by name, [n - 1, ...],
    from the second token on; empty for a prompt of a single token."""

    token_ids: Sequence[int]
    outputs: Mapping[str, Array]

    def told(self, texts: TokenTexts, top: int) -> list[Event | None]:
        """In vLLM's form: for each token the `top` likeliest tokens in its place, and itself, by token id; None for the
        first. A token's rank is None if it is not among the alternatives that the package returns."""
        ids, values = self.outputs.get(_TOP_IDS), self.outputs.get(_TOP_VALUES)
        found: list[Event | None] = [None]
        for place, token in enumerate(self.token_ids[1:]):
            ranked: dict[int, tuple[float, int | None]] = {}
            if ids is not None and values is not None:
                pairs = zip(ids[place].tolist(), values[place].tolist(), strict=True)
                ranked = {
                    other: (value, rank) for rank, (other, value) in enumerate(pairs, start=1)
                }
            own = ranked.get(token, (float(self.outputs[LOGPROBS.name][place, 0]), None))
            entries = {**dict(list(ranked.items())[:top]), token: own}
            found.append(
                {
                    str(other): {
                        "logprob": _finite(value),
                        "rank": rank,
                        "decoded_token": texts.of(other)[0],
                    }
                    for other, (value, rank) in entries.items()
                }
            )
        return found


class Choice(ABC):
    """An answer as events. `kind`, `chunk`: OpenAI's names of a whole answer and of an event. `prefix`: of a request's
    id. `content`: an event's field with the text. `scores`: of the prompt, if requested; set before `start`."""

    kind: ClassVar[str]
    chunk: ClassVar[str]
    prefix: ClassVar[str]
    content: ClassVar[str]

    def __init__(
        self, index: int, model: ServedModel, body: GenerationRequest, prompt: Sequence[int]
    ) -> None:
        self._index = index
        self._model = model
        self._top = body.num_alternatives
        self._prompt_top = body.prompt_logprobs
        self._prompt_ids = prompt if body.return_token_ids else None
        self.scores: PromptScores | None = None

    @abstractmethod
    def start(self) -> list[Event]:
        """The events before the first text."""

    @abstractmethod
    def _content(self, delta: Delta | RequestOutput) -> Event:
        """The text that new tokens make certain, and their log-probabilities and ids if the request asks for them."""

    @abstractmethod
    def end(self, output: RequestOutput) -> list[Event]:
        """The last events; the last of them has the finish reason."""

    def piece(self, delta: Delta) -> list[Event]:
        """The events that a delta makes certain."""
        event = self._content(delta)
        if not delta.token_ids:
            event["logprobs"] = None
        return [event] if event[self.content] or event["logprobs"] or event.get("token_ids") else []

    def whole(self, output: RequestOutput) -> Event:
        """The whole answer."""
        return reduce(added, [*self.start(), self._content(output), *self.end(output)])

    def failed(self, error: ApiError) -> list[Event]:
        """The events of an error."""
        return [error.body()]

    def outer(self) -> Event:
        """Fields next to the choices, of the whole answer or of the first event."""
        return {}

    def _end(self, output: RequestOutput) -> Event:
        """OpenAI's finish reason ("length" after a timeout, too) and vLLM's stop reason: the stop string or token that
        ended the answer, None for the model's end of text, or "timeout"."""
        stopped = output.finish_reason == "stop"
        reason: str | int | None = output.stop_string if stopped else None
        if (
            stopped
            and reason is None
            and output.token_ids
            and output.token_ids[-1] not in self._model.ends
        ):
            reason = output.token_ids[-1]
        if output.finish_reason == "time":
            reason = "timeout"
        return {"finish_reason": "stop" if stopped else "length", "stop_reason": reason}


class ChatChoice(Choice):
    """A choice of `/v1/chat/completions`."""

    kind, chunk, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"
    content = "delta"

    def __init__(
        self, index: int, model: ServedModel, body: ChatCompletionRequest, prompt: Sequence[int]
    ) -> None:
        super().__init__(index, model, body, prompt)
        self._shows_thoughts = body.include_reasoning
        # A constrained answer contains no thoughts, and a message that is continued is past them.
        thinks = body.form is None and not body.continue_final_message
        self._reasoning = model.reasoning_reader(prompt) if thinks else None
        self._tools: ToolReader | DemandedCalls | None = None
        if body.demands_calls:
            self._tools = DemandedCalls(body.demanded_function, body.tool_parameters)
        elif body.offers_tools:
            self._tools = ToolReader(
                model.tool_format, body.tool_parameters, body.parallel_tool_calls is not False
            )
        self._thoughts = ""  # so far, shown or not
        self._calls = False  # whether the answer has any

    def start(self) -> list[Event]:
        return [self._chunk({"role": "assistant", "content": ""})]

    def _content(self, delta: Delta | RequestOutput) -> Event:
        chunk = self._chunk(self._change(*self._put(delta.text or "")))
        if self._top is not None:
            chunk["logprobs"] = self._logprobs(delta)
        if self._prompt_ids is not None:
            chunk["token_ids"] = delta.token_ids
        return chunk

    def end(self, output: RequestOutput) -> list[Event]:
        thoughts, rest, calls = self._rest()
        changes = [self._change(thoughts, rest, []), *({"tool_calls": [call]} for call in calls)]
        end = self._end(output)
        # As in OpenAI's answers: the call of a demanded function ends with "stop", and a cut answer with "length".
        named = isinstance(self._tools, DemandedCalls) and self._tools.name is not None
        if self._calls and end["finish_reason"] == "stop" and not named:
            end["finish_reason"] = "tool_calls"
        return [*map(self._chunk, filter(None, changes)), self._chunk({}) | end]

    def whole(self, output: RequestOutput) -> Event:
        choice = super().whole(output)
        message = choice.pop("delta") | {"refusal": None}
        if "tool_calls" in message:
            message["tool_calls"] = joined_calls(message["tool_calls"])
        # As in OpenAI's and vLLM's answers: null next to calls or thoughts, not "".
        if self._thoughts or "tool_calls" in message or isinstance(self._tools, DemandedCalls):
            message["content"] = message["content"] or None
        return {"index": self._index, "message": message} | choice

    def outer(self) -> Event:  # as in vLLM's answers
        fields: Event = {} if self._prompt_ids is None else {"prompt_token_ids": self._prompt_ids}
        if self._prompt_top is not None and self.scores is not None:
            fields["prompt_logprobs"] = self.scores.told(self._model.token_texts, self._prompt_top)
        return fields

    def _put(self, text: str) -> tuple[str, str, ToolCalls]:
        """The thoughts, the text for the user and the parts of calls that a part of the answer makes certain."""
        thoughts = ""
        if self._reasoning is not None:
            thoughts, text = self._reasoning.put(text)
        self._thoughts += thoughts
        text, calls = (text, []) if self._tools is None else self._tools.put(text)
        self._calls = self._calls or bool(calls)
        return thoughts, text, calls

    def _rest(self) -> tuple[str, str, ToolCalls]:
        """The rest of all three at the end."""
        thoughts, text = self._reasoning.end() if self._reasoning is not None else ("", "")
        self._thoughts += thoughts
        if self._tools is None:
            return thoughts, text, []
        (before, first), (rest, calls) = self._tools.put(text), self._tools.end()
        self._calls = self._calls or bool(first or calls)
        return thoughts, before + rest, first + calls

    def _change(self, thoughts: str, text: str, calls: ToolCalls) -> Event:
        """Thoughts in vLLM's field and in its former field (many clients read that), the text, and parts of calls."""
        shown = thoughts if self._shows_thoughts else ""
        parts = {
            "reasoning": shown,
            "reasoning_content": shown,
            "content": text,
            "tool_calls": calls,
        }
        return {name: part for name, part in parts.items() if part}

    def _chunk(self, delta: Event) -> Event:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, delta: Delta | RequestOutput) -> Event:
        """An entry for each token."""

        def entry(token: int, value: float) -> Event:
            text, data = self._model.token_texts.of(int(token))
            return {"token": text, "logprob": _finite(value), "bytes": list(data)}

        content = []
        for index, token in enumerate(delta.token_ids):
            others = [entry(*pair) for pair in _likeliest(delta.outputs, index, self._top)]
            content.append(
                entry(token, delta.outputs[LOGPROBS.name][index, 0]) | {"top_logprobs": others}
            )
        return {"content": content, "refusal": None}


class CompletionChoice(Choice):
    """A choice of `/v1/completions`."""

    kind = chunk = "text_completion"
    prefix, content = "cmpl", "text"

    def __init__(
        self,
        index: int,
        model: ServedModel,
        body: CompletionRequest,
        prompt: Sequence[int],
        echo: str | None,
    ) -> None:
        """echo: the prompt's text in front of the answer, if the request asks for it."""
        super().__init__(index, model, body, prompt)
        self._echo = echo
        self._offset = len(echo or "")

    def start(self) -> list[Event]:
        choice = self._choice(self._echo or "") | {"logprobs": self._of_prompt()}
        if self._prompt_ids is not None:
            choice |= {"prompt_token_ids": self._prompt_ids, "token_ids": []}
        return [choice] if self._echo or choice["logprobs"] or "token_ids" in choice else []

    def _content(self, delta: Delta | RequestOutput) -> Event:
        choice, tokens = self._choice(delta.text or ""), delta.token_ids
        if self._top is not None:
            choice["logprobs"] = self._logprobs(tokens, delta.outputs, self._offset)
            self._offset += sum(map(self._model.token_texts.width, tokens))
        if self._prompt_ids is not None:
            choice["token_ids"] = tokens
        return choice

    def end(self, output: RequestOutput) -> list[Event]:
        return [self._choice("") | self._end(output)]

    def whole(self, output: RequestOutput) -> Event:
        choice = super().whole(output)
        if self._prompt_top is not None and self.scores is not None:
            choice["prompt_logprobs"] = self.scores.told(self._model.token_texts, self._prompt_top)
        return choice

    def _choice(self, text: str) -> Event:
        return {"index": self._index, "text": text, "logprobs": None, "finish_reason": None}

    def _of_prompt(self) -> Event | None:
        """The log-probabilities of the prompt in front of the answer's; the first token has none."""
        if (
            self._top is None
            or self._echo is None
            or self.scores is None
            or not self.scores.token_ids
        ):
            return None
        texts, (first, *others) = self._model.token_texts, self.scores.token_ids
        start = {
            "tokens": [texts.of(first)[0]],
            "token_logprobs": [None],
            "top_logprobs": [None] if self._top else None,
            "text_offset": [0],
        }
        joined: Event = added(
            start, self._logprobs(others, self.scores.outputs, texts.width(first))
        )
        return joined

    def _logprobs(self, tokens: Sequence[int], outputs: Mapping[str, Array], offset: int) -> Event:
        """An object for all tokens. The alternatives include the sampled token, even if it is not among the likeliest.
        `offset`: of the first token's text in the answer."""
        texts = self._model.token_texts
        strings = [texts.of(token)[0] for token in tokens]
        values = [_finite(outputs[LOGPROBS.name][index, 0]) for index in range(len(tokens))]
        offsets = [offset]
        for token in tokens:
            offsets.append(offsets[-1] + texts.width(token))
        alternatives: list[dict[str, float]] | None = None
        if self._top:
            alternatives = [
                {
                    texts.of(int(token))[0]: _finite(value)
                    for token, value in _likeliest(outputs, index, self._top)
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


def added(first: Any, second: Any) -> Any:
    """Two events as one: texts and lists follow each other, objects are joined field by field, null adds nothing, and
    another value replaces the first."""
    if isinstance(first, dict) and second is not None:
        return first | {name: added(first.get(name), value) for name, value in second.items()}
    if first is None or second is None:
        return first if second is None else second
    return first + second if isinstance(first, str | list) else second


def _likeliest(
    outputs: Mapping[str, Array], index: int, top: int | None
) -> list[tuple[int, float]]:
    """The likeliest tokens in a token's place, with their log-probabilities."""
    if not top:
        return []
    return [*zip(outputs[_TOP_IDS][index, :top], outputs[_TOP_VALUES][index, :top], strict=True)]


def _finite(value: float) -> float:
    return max(float(value), _LEAST_LOGPROB)
