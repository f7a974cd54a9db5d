"""One package that is served: its engine, and what requests need of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from qsample.errors import QsampleError
from qsample.runtime import CausalLM, Engine, QueueFullError, Request, load
from qsample.runtime.parameters import check_filters
from qsample.sampling_params import FILTER_FIELDS, SamplingParams
from qsample.serve.guides import Grammars
from qsample.serve.http.errors import ApiError
from qsample.serve.reasoning import ReasoningReader
from qsample.serve.reasoning import find_format as find_reasoning_format
from qsample.serve.settings import ServeSettings
from qsample.serve.token_texts import TokenTexts
from qsample.serve.tool_calls.formats import find_format
from qsample.text.chat import compile_template
from qsample.text.tokenizer import Tokenizer

# What a model's generation_config decides with generation_config="auto".
_OF_CONFIG: Final = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens"),
    *FILTER_FIELDS,
)

_MARK_TOKENS: Final = 32  # more than the longest mark around thoughts has, even in single characters


class ServedModel:
    """A loaded package under the name that clients call it by.

    created: seconds since 1970 at which it was loaded. defaults: fields of SamplingParams that count where a request
    says nothing.
    """

    def __init__(self, name: str, path: str, settings: ServeSettings) -> None:
        """Load the package and start its engine. Raises QsampleError where that cannot be done."""
        self.name = name
        self.model: CausalLM = load(
            path,
            settings.provider,
            ctx_len=settings.ctx_len,
            intra_op_num_threads=settings.threads,
            session_config=settings.session_options,
        )
        if (tokenizer := self.model.tokenizer) is not None and settings.chat_template is not None:
            tokenizer.chat_template = tokenizer.get_chat_template(settings.chat_template)
            compile_template(tokenizer.chat_template)  # its mistakes are told at the start, too
        self.created = int(time.time())
        self.defaults = {"temperature": 1.0}
        if settings.generation_config == "auto":
            config = self.model.generation_config
            self.defaults |= {name: config[name] for name in _OF_CONFIG if config.get(name) is not None}
        # A config's own mistakes are told at the start, and what the package lacks for it.
        check_filters(self.model.interface, SamplingParams(**self.defaults))  # type: ignore[arg-type]
        self.tool_format = find_format(settings.tool_call_parser, self._template)
        self._reasoning_format = find_reasoning_format(settings.reasoning_parser, self._is_shown)
        self.grammars = Grammars(self.model)
        if self.model.interface.features.logprobs and self.model.tokenizer is not None:
            _ = self.token_texts  # made now: a large tokenizer.json takes half a second, for which everybody would wait
        self.engine = Engine(  # last: it has a thread
            self.model,
            slots=settings.slots,
            max_waiting=settings.max_waiting,
            prefill_chunk_size=settings.prefill_chunk_size,
        )

    @property
    def max_model_len(self) -> int:
        """Tokens that a slot holds, prompt and answer together."""
        return self.engine.capacity

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ApiError for a package without one."""
        if self.model.tokenizer is None:
            raise ApiError(
                400, f"the package of {self.name!r} has no tokenizer: it takes prompts of token ids on /v1/completions"
            )
        return self.model.tokenizer

    @cached_property
    def token_texts(self) -> TokenTexts:
        """The tokens as text and bytes."""
        return TokenTexts(self.model)

    @property
    def _template(self) -> str:
        templates = None if self.model.tokenizer is None else self.model.tokenizer.chat_template
        if isinstance(templates, Mapping):
            return templates.get("tool_use") or templates.get("default", "")
        return templates or ""

    def reasoning_reader(self, prompt: Sequence[int]) -> ReasoningReader | None:
        """What splits the thoughts off an answer to that prompt; None where they stay in it."""
        if self._reasoning_format is None:
            return None
        end = self.tokenizer.decode(prompt[-_MARK_TOKENS:], skip_special_tokens=False)
        return ReasoningReader(self._reasoning_format, end)

    def _is_shown(self, text: str) -> bool:
        """Whether a text of this model can have `text` in it: special tokens are left out."""
        if self.model.tokenizer is None:
            return True
        token = self.model.tokenizer.get_vocab().get(text)
        return token is None or not self.model.tokenizer.is_skipped(token)

    def check_count(self, count: int) -> None:
        """Raise ApiError where so many answers have no place, whatever else there is."""
        most = self.engine.slots + self.engine.max_waiting
        if count > most:
            raise ApiError(400, f"{count} answers are asked for at once, and this server takes {most}")

    def check_places(self, count: int) -> None:
        """Raise QueueFullError where there are not so many places now. It holds until the event loop goes on: nobody
        else adds requests, and those that end make room."""
        stats = self.engine.stats()
        taken, most = stats.running + stats.waiting, stats.slots + stats.max_waiting
        if taken + count > most:
            raise QueueFullError(f"{taken} of {most} places are taken and {count} are asked for; try again later")

    def check_room(self, prompt: Sequence[int]) -> None:
        """Raise ApiError where a slot has no room for a prompt and one token."""
        if len(prompt) >= self.max_model_len:
            raise ApiError(
                400,
                f"the prompt has {len(prompt)} tokens and this model's context {self.max_model_len}; give at most "
                f"{self.max_model_len - 1}",
                param="prompt",
                code="context_length_exceeded",
            )

    def add(self, prompt: list[int], params: SamplingParams, **options: Any) -> Request:
        """A request, as `Engine.add_request` makes it, without waiting for room.

        prompt: every token is read, the padding token too: nobody pads a single prompt, and a text may spell it. An
        empty one begins a text.
        """
        return self.engine.add_request([prompt], params, timeout=0, pad_token_id=None, **options)

    def close(self) -> None:
        self.grammars.close()
        self.engine.close()


class ServedModels:
    """The models of a server by name."""

    def __init__(self, settings: ServeSettings) -> None:
        self._models: dict[str, ServedModel] = {}
        try:
            for name, path in settings.models.items():
                self._models[name] = ServedModel(name, path, settings)
        except BaseException as error:
            self.close()
            if isinstance(error, QsampleError | ValueError) and len(settings.models) > 1:
                raise type(error)(f"model {name!r}: {error}") from error
            raise

    def __iter__(self) -> Any:
        return iter(self._models.values())

    def find(self, name: str | None) -> ServedModel:
        """The model of that name; the first where none is named. Raises ApiError where there is none."""
        if name is None or name == "":
            return next(iter(self._models.values()))
        if name not in self._models:
            raise ApiError(
                404,
                f"the model {name!r:.100} does not exist here; there is {', '.join(map(repr, self._models))}",
                param="model",
                code="model_not_found",
            )
        return self._models[name]

    def close(self) -> None:
        for model in self._models.values():
            model.close()
