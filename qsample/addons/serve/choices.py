"""An answer as a client gets it: a choice of a completion or of a chat. It consists of the events
that new tokens make certain, and a whole answer is their sum."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, Final

from qsample.addons.serve.chats import ChatCompletionRequest
from qsample.addons.serve.forms import AnswerForm
from qsample.addons.serve.http import ApiError
from qsample.addons.serve.models import ServedModel, TokenTexts
from qsample.addons.serve.parsers import DemandedCalls, ToolCalls, ToolReader, joined_calls
from qsample.addons.serve.requests import CompletionRequest, GenerationRequest
from qsample.contract.arrays import Array
from qsample.contract.tensors import (
    LOGPROBS,
    PROMPT_LOGPROBS,
    PROMPT_RANKS,
    PROMPT_TOP_LOGPROB_OUTPUTS,
    TOP_LOGPROB_OUTPUTS,
)
from qsample.runtime import Delta, RequestOutput
from qsample.runtime.sequence import REPETITION_REASON

Event = dict[str, Any]

# This is OpenAI's number for an impossible token, because JSON has no infinity.
_MIN_LOGPROB: Final = -9999.0
_TOP_IDS: Final = TOP_LOGPROB_OUTPUTS[0].name
_TOP_VALUES: Final = TOP_LOGPROB_OUTPUTS[1].name
# The output of a sampled token → the same output of a token of a prompt.
_SCORES: Final = {
    LOGPROBS.name: PROMPT_LOGPROBS.name,
    _TOP_IDS: PROMPT_TOP_LOGPROB_OUTPUTS[0].name,
    _TOP_VALUES: PROMPT_TOP_LOGPROB_OUTPUTS[1].name,
}


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The log-probabilities of the n tokens of a prompt.

    Attributes:
        token_ids: the tokens of the prompt.
        outputs: the package's optional outputs by name, [n - 1, ...], from the second token on.
            They are empty for a prompt of a single token.
        ranks: [n - 1, 1], the ranks of these tokens among all tokens, from 1 on; None if the
            package does not know them.
    """

    token_ids: Sequence[int]
    outputs: Mapping[str, Array]
    ranks: Array | None = None

    @classmethod
    def of(cls, token_ids: Sequence[int], output: RequestOutput | None) -> PromptScores:
        """The scores in the output of a request that scored a prompt, or sampled it; None for a
        prompt of a single token."""
        if output is None:
            return cls(token_ids, {})
        scores = output.prompt_outputs
        if not scores:
            return cls(token_ids, output.outputs)
        outputs = {name: scores[source] for name, source in _SCORES.items() if source in scores}
        return cls(token_ids, outputs, scores[PROMPT_RANKS.name])

    def entries(self, texts: TokenTexts, num_alternatives: int) -> list[Event | None]:
        """The scores in vLLM's form: for each token the likeliest tokens in its place, and the
        token itself, by token id; None for the first token.

        A token's rank is None if it is not among the alternatives that the package returns, and
        the package knows no ranks.
        """
        entries: list[Event | None] = [None]
        for place, token in enumerate(self.token_ids[1:]):
            alternatives = self._alternatives(place)
            shown = alternatives[:num_alternatives]
            own = next((ranked for ranked in alternatives if ranked.token == token), None)
            if own is None:
                logprob = float(self.outputs[LOGPROBS.name][place, 0])
                rank = None if self.ranks is None else int(self.ranks[place, 0])
                own = _RankedToken(token, logprob, rank)
            if own not in shown:
                shown.append(own)
            entries.append({str(ranked.token): ranked.as_json(texts) for ranked in shown})
        return entries

    def _alternatives(self, place: int) -> list[_RankedToken]:
        """The likeliest tokens in a place, the likeliest first."""
        ids = self.outputs.get(_TOP_IDS)
        values = self.outputs.get(_TOP_VALUES)
        if ids is None or values is None:
            return []
        pairs = zip(ids[place].tolist(), values[place].tolist(), strict=True)
        return [
            _RankedToken(token, logprob, rank)
            for rank, (token, logprob) in enumerate(pairs, start=1)
            if token >= 0
        ]


@dataclass(frozen=True, slots=True)
class _RankedToken:
    """A token, its log-probability, and its place among the likeliest tokens, from 1 on."""

    token: int
    logprob: float
    rank: int | None

    def as_json(self, texts: TokenTexts) -> Event:
        return {
            "logprob": _finite(self.logprob),
            "rank": self.rank,
            "decoded_token": texts.of(self.token)[0],
        }


class Choice(ABC):
    """An answer as events.

    Attributes:
        kind, chunk: OpenAI's names of a whole answer and of an event.
        prefix: the beginning of a request's id.
        content: the field of an event that has the text.
        scores: the scores of the prompt, if the request asks for them. They are set before `start`.
        listed: the tokens that the request lists, with their log-probabilities in the place of the
            answer's only token; None if it lists none. They are set before `start`, too.
    """

    kind: ClassVar[str]
    chunk: ClassVar[str]
    prefix: ClassVar[str]
    content: ClassVar[str]

    def __init__(
        self, index: int, model: ServedModel, body: GenerationRequest, prompt: Sequence[int]
    ) -> None:
        self._index = index
        self._model = model
        self._num_alternatives = body.num_alternatives
        self._num_prompt_alternatives = body.prompt_logprobs
        self._prompt_ids = prompt if body.return_token_ids else None
        self.scores: PromptScores | None = None
        self.listed: list[tuple[int, float]] | None = None

    def _alternatives(self, outputs: Mapping[str, Array], index: int) -> list[tuple[int, float]]:
        """The tokens that the log-probabilities of a sampled token list, with theirs.

        Args:
            outputs: the package's optional outputs by name, an entry for each sampled token.
            index: the place of the token among these.
        """
        if self.listed is not None:
            return self.listed
        return _likeliest(outputs, index, self._num_alternatives)

    @abstractmethod
    def start(self) -> list[Event]:
        """The events before the first text."""

    @abstractmethod
    def _content(self, delta: Delta | RequestOutput) -> Event:
        """The text that new tokens make certain, and their log-probabilities and ids if the request
        asks for them."""

    @abstractmethod
    def end(self, output: RequestOutput) -> list[Event]:
        """The last events. The last of them has the finish reason."""

    def piece(self, delta: Delta) -> list[Event]:
        """The events that a delta makes certain."""
        event = self._content(delta)
        if not delta.token_ids:
            event["logprobs"] = None
        if event[self.content] or event["logprobs"] or event.get("token_ids"):
            return [event]
        return []

    def whole(self, output: RequestOutput) -> Event:
        """The whole answer."""
        events = [*self.start(), self._content(output), *self.end(output)]
        return reduce(joined_events, events)

    def failed(self, error: ApiError) -> list[Event]:
        """The events of an error."""
        return [error.body()]

    def outer(self) -> Event:
        """The fields next to the choices, of the whole answer or of the first event."""
        return {}

    def _end(self, output: RequestOutput) -> Event:
        """OpenAI's finish reason, and vLLM's stop reason.

        The finish reason after a timeout is "length", and after a repetition vLLM's "repetition".
        The stop reason is the stop string or token that ended the answer, "timeout",
        "repetition_detected", or None for the model's end of text.
        """
        if output.finish_reason == REPETITION_REASON:
            return {"finish_reason": REPETITION_REASON, "stop_reason": "repetition_detected"}
        if output.finish_reason != "stop":
            stop_reason = "timeout" if output.finish_reason == "time" else None
            return {"finish_reason": "length", "stop_reason": stop_reason}
        reason: str | int | None = output.stop_string
        if reason is None and output.token_ids:
            last = output.token_ids[-1]
            reason = None if last in self._model.ends else last
        return {"finish_reason": "stop", "stop_reason": reason}


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """The parts of an answer's text.

    Attributes:
        thoughts: the thoughts, shown or not.
        text: the text for the user.
        calls: calls of tools, or parts of them.
    """

    thoughts: str
    text: str
    calls: ToolCalls


class ChatChoice(Choice):
    """A choice of `/v1/chat/completions`."""

    kind = "chat.completion"
    chunk = "chat.completion.chunk"
    prefix = "chatcmpl"
    content = "delta"

    def __init__(
        self,
        index: int,
        model: ServedModel,
        body: ChatCompletionRequest,
        prompt: Sequence[int],
        form: AnswerForm,
    ) -> None:
        super().__init__(index, model, body, prompt)
        self._form = form
        self._shows_thoughts = body.include_reasoning
        self._reasoning_reader = model.reasoning_reader(prompt, form)
        self._tool_reader: ToolReader | DemandedCalls | None = None
        if body.demands_calls:
            self._tool_reader = DemandedCalls(body.demanded_function, body.tool_parameters)
        elif body.offers_tools:
            self._tool_reader = ToolReader(
                model.tool_format, body.tool_parameters, body.parallel_tool_calls is not False
            )
        self._thoughts = ""
        self._has_calls = False

    def start(self) -> list[Event]:
        return [self._chunk({"role": "assistant", "content": ""})]

    def _content(self, delta: Delta | RequestOutput) -> Event:
        chunk = self._chunk(self._change(self._read(delta.text or "")))
        if self._num_alternatives is not None:
            chunk["logprobs"] = self._logprobs(delta)
        if self._prompt_ids is not None:
            chunk["token_ids"] = delta.token_ids
        return chunk

    def end(self, output: RequestOutput) -> list[Event]:
        parts = self._read_end()
        changes = [self._change(AnswerParts(parts.thoughts, parts.text, []))]
        changes += [{"tool_calls": [call]} for call in parts.calls]
        end = self._end(output)
        # As in OpenAI's answers, the call of a demanded function ends with "stop", and an answer
        # that was cut off with "length".
        demands_a_function = (
            isinstance(self._tool_reader, DemandedCalls) and self._tool_reader.name is not None
        )
        if self._has_calls and end["finish_reason"] == "stop" and not demands_a_function:
            end["finish_reason"] = "tool_calls"
        events = [self._chunk(change) for change in changes if change]
        events.append(self._chunk({}) | end)
        return events

    def whole(self, output: RequestOutput) -> Event:
        choice = super().whole(output)
        message = choice.pop("delta") | {"refusal": None}
        if "tool_calls" in message:
            message["tool_calls"] = joined_calls(message["tool_calls"])
        # As in OpenAI's and vLLM's answers, the content next to calls or thoughts is null, not "".
        demands_calls = isinstance(self._tool_reader, DemandedCalls)
        if self._thoughts or "tool_calls" in message or demands_calls:
            message["content"] = message["content"] or None
        return {"index": self._index, "message": message} | choice

    def outer(self) -> Event:
        """The fields of the prompt. vLLM's answers have them in the same place."""
        fields: Event = {}
        if self._prompt_ids is not None:
            fields["prompt_token_ids"] = self._prompt_ids
        if self._num_prompt_alternatives is not None and self.scores is not None:
            fields["prompt_logprobs"] = self.scores.entries(
                self._model.token_texts, self._num_prompt_alternatives
            )
        return fields

    def _read(self, text: str) -> AnswerParts:
        """The parts that a piece of the answer's text makes certain."""
        thoughts = ""
        if self._reasoning_reader is not None:
            thoughts, text = self._reasoning_reader.put(text)
        self._thoughts += thoughts
        if self._tool_reader is None:
            return AnswerParts(thoughts, text, [])
        read = self._tool_reader.put(text)
        self._has_calls = self._has_calls or bool(read.calls)
        return AnswerParts(thoughts, read.text, read.calls)

    def _read_end(self) -> AnswerParts:
        """The rest of the parts at the end of the answer."""
        thoughts = ""
        text = ""
        if self._reasoning_reader is not None:
            thoughts, text = self._reasoning_reader.end()
        self._thoughts += thoughts
        if self._tool_reader is None:
            return AnswerParts(thoughts, text, [])
        last = self._tool_reader.put(text)
        rest = self._tool_reader.end()
        calls = last.calls + rest.calls
        self._has_calls = self._has_calls or bool(calls)
        return AnswerParts(thoughts, last.text + rest.text, calls)

    def _change(self, parts: AnswerParts) -> Event:
        """The parts as a change of the message. Thoughts are in vLLM's field, and in its former
        field, which many clients read."""
        change: Event = {}
        if parts.thoughts and self._shows_thoughts:
            change["reasoning"] = parts.thoughts
            change["reasoning_content"] = parts.thoughts
        if parts.text:
            change["content"] = parts.text
        if parts.calls:
            change["tool_calls"] = parts.calls
        return change

    def _chunk(self, delta: Event) -> Event:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, delta: Delta | RequestOutput) -> Event:
        """An entry for each token."""
        content = []
        for index, token in enumerate(delta.token_ids):
            entry = self._logprob_entry(token, delta.outputs[LOGPROBS.name][index, 0])
            alternatives = self._alternatives(delta.outputs, index)
            entry["top_logprobs"] = [
                self._logprob_entry(other, logprob) for other, logprob in alternatives
            ]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _logprob_entry(self, token: int, logprob: float) -> Event:
        text, data = self._model.token_texts.of(int(token))
        return {"token": text, "logprob": _finite(logprob), "bytes": list(data)}


class CompletionChoice(Choice):
    """A choice of `/v1/completions`."""

    kind = "text_completion"
    chunk = "text_completion"
    prefix = "cmpl"
    content = "text"

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
        self._next_text_offset = len(echo or "")
        self._skip_special_tokens = body.skip_special_tokens

    def start(self) -> list[Event]:
        choice = self._choice(self._echo or "")
        choice["logprobs"] = self._prompt_logprobs()
        if self._prompt_ids is not None:
            choice["prompt_token_ids"] = self._prompt_ids
            choice["token_ids"] = []
        if self._echo not in (None, "") or choice["logprobs"] or "token_ids" in choice:
            return [choice]
        return []

    def _content(self, delta: Delta | RequestOutput) -> Event:
        choice = self._choice(delta.text or "")
        if self._num_alternatives is not None:
            choice["logprobs"] = self._logprobs(
                delta.token_ids, delta.outputs, self._next_text_offset
            )
            self._next_text_offset += sum(map(self._width, delta.token_ids))
        if self._prompt_ids is not None:
            choice["token_ids"] = delta.token_ids
        return choice

    def end(self, output: RequestOutput) -> list[Event]:
        return [self._choice("") | self._end(output)]

    def whole(self, output: RequestOutput) -> Event:
        choice = super().whole(output)
        if self._num_prompt_alternatives is not None and self.scores is not None:
            choice["prompt_logprobs"] = self.scores.entries(
                self._model.token_texts, self._num_prompt_alternatives
            )
        return choice

    def _width(self, token: int) -> int:
        """The number of characters of a token in the text."""
        return self._model.token_texts.width(token, skip_special_tokens=self._skip_special_tokens)

    def _choice(self, text: str) -> Event:
        return {"index": self._index, "text": text, "logprobs": None, "finish_reason": None}

    def _prompt_logprobs(self) -> Event | None:
        """The log-probabilities of the prompt, which come before the answer's. The first token has
        none."""
        if self._num_alternatives is None or self._echo is None:
            return None
        if self.scores is None or not self.scores.token_ids:
            return None
        texts = self._model.token_texts
        first, *others = self.scores.token_ids
        start = {
            "tokens": [texts.label(first)],
            "token_logprobs": [None],
            "top_logprobs": [None] if self._num_alternatives > 0 else None,
            "text_offset": [0],
        }
        rest = self._logprobs(others, self.scores.outputs, self._width(first))
        return dict(joined_events(start, rest))

    def _logprobs(
        self, tokens: Sequence[int], outputs: Mapping[str, Array], text_offset: int
    ) -> Event:
        """An object for all tokens. The alternatives include the sampled token, even if it is not
        among the likeliest.

        Args:
            tokens: the tokens.
            outputs: the package's optional outputs by name, an entry for each token.
            text_offset: the place of the first token's text in the answer, in characters.
        """
        texts = self._model.token_texts
        strings: list[str] = []
        values: list[float] = []
        text_offsets: list[int] = []
        alternatives: list[dict[str, float]] = []
        for index, token in enumerate(tokens):
            string = texts.label(token)
            value = _finite(outputs[LOGPROBS.name][index, 0])
            strings.append(string)
            values.append(value)
            text_offsets.append(text_offset)
            text_offset += self._width(token)
            likeliest = {
                texts.label(int(other)): _finite(logprob)
                for other, logprob in self._alternatives(outputs, index)
            }
            alternatives.append({**likeliest, string: value})
        return {
            "tokens": strings,
            "token_logprobs": values,
            "top_logprobs": alternatives
            if self._num_alternatives not in (None, 0) or self.listed
            else None,
            "text_offset": text_offsets,
        }


def joined_events(first: Any, second: Any) -> Any:
    """Two events as one. Texts and lists follow each other, objects are joined field by field, null
    adds nothing, and another value replaces the first."""
    if second is None:
        return first
    if isinstance(first, dict):
        fields = {name: joined_events(first.get(name), value) for name, value in second.items()}
        return first | fields
    if isinstance(first, str | list):
        return first + second
    return second


def listed_tokens(ids: Sequence[int], output: RequestOutput) -> list[tuple[int, float]]:
    """Tokens with their log-probabilities, from the output of a request that scored them."""
    logprobs = output.prompt_outputs[PROMPT_LOGPROBS.name][:, 0]
    return list(zip(ids, logprobs, strict=True))


def _likeliest(
    outputs: Mapping[str, Array], index: int, num_alternatives: int | None
) -> list[tuple[int, float]]:
    """The likeliest tokens in a token's place, with their log-probabilities."""
    if num_alternatives in (None, 0):
        return []
    ids = outputs[_TOP_IDS][index, :num_alternatives]
    values = outputs[_TOP_VALUES][index, :num_alternatives]
    # Filters may leave fewer tokens than a request asks for.
    return [(token, value) for token, value in zip(ids, values, strict=True) if token >= 0]


def _finite(value: float) -> float:
    return max(float(value), _MIN_LOGPROB)
