"""Messages, and an engine that answers them; no terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qsample.errors import QsampleError

if TYPE_CHECKING:
    from qsample.runtime import CausalLM, Engine, RequestOutput


class TurnError(Exception):
    """A turn that could not be done; the conversation is as it was."""


@dataclass
class Conversation:
    """A conversation so far, the system prompt in front.

    options, template: of `Engine.add_request`. turns, tokens, seconds: of all answers. context: tokens after the last.
    """

    model: CausalLM
    engine: Engine
    options: dict[str, Any]
    template: dict[str, Any]
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: int = 0
    tokens: int = 0
    seconds: float = 0.0
    context: int = 0

    @property
    def system(self) -> str | None:
        first = self.messages[0] if self.messages else {}
        return first["content"] if first.get("role") == "system" else None

    def set_system(self, text: str | None) -> None:
        rest = self.messages[self.system is not None :]
        self.messages = ([] if text is None else [{"role": "system", "content": text}]) + rest

    def reset(self) -> None:
        self.messages = self.messages[: self.system is not None]

    def ask(self, text: str, show: Callable[[str], None]) -> RequestOutput:
        """Add what the user says, and answer it. Raises TurnError, the conversation being as it was."""
        self.messages.append({"role": "user", "content": text})
        try:
            return self.answer(show)
        except BaseException:
            self.messages.pop()
            raise

    def answer(self, show: Callable[[str], None]) -> RequestOutput:
        """Answer the last message, part by part to `show`; KeyboardInterrupt ends the answer, and what came is kept."""
        from qsample.runtime import EngineClosedError

        options = dict(self.options)
        if not {"max_new_tokens", "max_length"} & options.keys() and not self._model_says_how_long():
            options["max_length"] = self.engine.capacity
        try:
            request = self.engine.add_request(self.messages, **options, **self.template)
        except EngineClosedError:
            raise
        except (ValueError, QsampleError) as error:
            raise TurnError(self._too_long() or str(error)) from error
        try:
            for delta in request:
                show(delta.text or "")
        except KeyboardInterrupt:
            request.cancel()
        except BaseException:
            request.cancel()
            raise
        output = request.result()
        self.messages.append({"role": "assistant", "content": output.text or ""})
        self.turns += 1
        self.tokens += len(output.token_ids)
        self.seconds += output.timing.total_seconds
        self.context = output.usage.prompt_tokens + len(output.token_ids)
        return output

    def _too_long(self) -> str | None:
        """What to say where the conversation does not fit."""
        from qsample.text.chat import ChatOptions

        assert self.model.tokenizer is not None
        try:
            count = len(self.model.tokenizer.encode_chat(self.messages, ChatOptions(**self.template)))
        except ValueError:
            return None
        if count < self.engine.capacity:
            return None
        return (
            f"the conversation has {count} tokens and the context {self.engine.capacity}, so this was not added: say "
            "less, or /reset starts anew (/save keeps this one); --ctx-len of compile gives more"
        )

    def _model_says_how_long(self) -> bool:
        config = self.model.generation_config
        return any(config.get(name) is not None for name in ("max_new_tokens", "max_length"))

    def retry(self, show: Callable[[str], None]) -> RequestOutput:
        """Answer the last question again. Raises TurnError where there is none."""
        before = list(self.messages)
        while self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages or self.messages[-1]["role"] == "system":
            self.messages = before
            raise TurnError("there is nothing to answer again")
        try:
            return self.answer(show)
        except BaseException:
            self.messages = before
            raise

    def set_parameter(self, name: str, text: str) -> None:
        """Raises TurnError for an unknown name or a wrong value; then nothing changes."""
        from qsample.sampling_params import SAMPLING_FIELDS, SamplingParams
        from qsample.text.stop_strings import check_stop_strings

        value: Any
        try:
            value = json.loads(text)
        except ValueError:
            if name != "stop_strings":
                raise TurnError(f"{name} is {text}; give a number, true, false or null") from None
            value = text
        if name == "stop_strings" and not isinstance(value, str | list | None):
            value = text  # a number that stands in the text
        changed = {key: kept for key, kept in {**self.options, name: value}.items() if kept is not None}
        if name in SAMPLING_FIELDS and value is not None:
            changed.pop("do_sample", None)
        try:
            check_stop_strings(changed.get("stop_strings"))
            checked = {key: kept for key, kept in changed.items() if key != "stop_strings"}
            SamplingParams.from_generation_config(None, **checked)
        except (ValueError, TypeError) as error:
            raise TurnError(str(error)) from None
        self.options = changed
