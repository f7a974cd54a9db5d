"""The packages that are served: their engines, tokenizers and defaults."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final

from qsample.addons.serve.chats import ChatCompletionRequest
from qsample.addons.serve.forms import ANY_TEXT, AnswerForm
from qsample.addons.serve.http import ApiError
from qsample.addons.serve.parsers import (
    ANY_BLANKS,
    TWO_LINE_FEEDS,
    ReasoningReader,
    find_reasoning_format,
    find_tool_format,
)
from qsample.addons.serve.requests import GenerationRequest
from qsample.addons.serve.roles import rewritings
from qsample.addons.serve.settings import ServeSettings
from qsample.checks import refuse
from qsample.contract.tensors import RAW_LOGPROBS
from qsample.errors import DISTRIBUTION, EngineClosedError, QsampleError, shown
from qsample.images.decode import ImageLimits
from qsample.images.messages import images_in
from qsample.images.prompt import ProcessedImage
from qsample.images.worker import ImageWorker
from qsample.package.disk.untrusted import leads_out, path_below
from qsample.request.grammar import Form
from qsample.request.sampling_params import FILTER_FIELDS, SamplingParams
from qsample.request.structured.automaton import Thoughts
from qsample.request.structured.grammars import Wish
from qsample.request.text.chat import ChatOptions
from qsample.request.text.jinja_template import compile_template
from qsample.request.text.tokenizer import Tokenizer
from qsample.runtime import CausalLM, Engine, QueueFullError, Request, load
from qsample.runtime.call import Call

# A number of a feature is a float32, or smaller.
_BYTES_OF_A_FEATURE: Final = 4
# The fields that a model's generation_config decides with generation_config="auto".
_CONFIG_FIELDS: Final = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
    "prompt_lookup_num_tokens",
    "sequence_bias",
    "suppress_tokens",
    *FILTER_FIELDS,
)
# The longest mark around thoughts has fewer tokens, even if they are single characters.
_MAX_MARK_TOKENS: Final = 32
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT_CHARACTER: Final = "\ufffd"
# The purpose of a feature that a request needs, in messages.
_FOR_A_FORM: Final = ", which an answer that follows a schema needs"


class ServedModel:
    """A loaded package, or one of its adapters, under its served name.

    Attributes:
        name: the served name.
        base: the served name of the package.
        adapter: the name of the adapter; None for the package itself.
        model: the package, loaded.
        interface: the interface of the package.
        created: the time when it was loaded, in seconds since 1970.
        ends: the model's stop tokens.
        defaults: the fields of `SamplingParams` for requests that leave them out.
        tool_format: the format of the model's calls.
        engine: the engine of the package.
    """

    def __init__(self, name: str, path: str, settings: ServeSettings) -> None:
        """
        Args:
            name: the served name.
            path: the folder of the package.
            settings: the settings of the server.

        Raises:
            QsampleError, ValueError: the package cannot be served.
        """
        self.name = name
        self.base = name
        self.adapter: str | None = None
        self.model: CausalLM = load(
            path,
            settings.provider,
            ctx_len=settings.ctx_len,
            intra_op_num_threads=settings.threads,
            session_config=settings.session_options,
            batch_invariant=settings.batch_invariant,
            trusted_keys=settings.trusted_keys or None,
            image_cache_bytes=settings.image_cache_mib << 20,
        )
        self._image_worker = ImageWorker(
            ImageLimits(settings.max_image_bytes, settings.max_image_pixels)
        )
        tokenizer = self.model.tokenizer
        if tokenizer is not None and settings.chat_template is not None:
            tokenizer.chat_template = tokenizer.get_chat_template(settings.chat_template)
            # A mistake in the template ends the start of the server.
            compile_template(tokenizer.chat_template)
        self.interface = self.model.interface
        self.created = int(time.time())
        self.ends = self.model.package.manifest.token_ids.eos
        self.defaults = self._defaults(settings)
        self.tool_format = find_tool_format(settings.tool_call_parser, self._template)
        self._reasoning_format = find_reasoning_format(settings.reasoning_parser)
        self._reasoning_budget = self._checked_budget(settings)
        self._max_characters_per_token = (
            None if tokenizer is None else tokenizer.characters_per_token()
        )
        # A large tokenizer.json takes half a second, for which every request would wait later.
        if self.interface.features.logprobs and tokenizer is not None:
            _ = self.token_texts
        for lora, folder in settings.loras.items():
            self.model.load_adapter(lora, folder)
        # The engine starts a thread, so it is made last.
        self.engine = Engine(
            self.model,
            slots=settings.slots,
            max_waiting=settings.max_waiting,
            prefill_chunk_size=settings.prefill_chunk_size,
            prefixes=settings.prefixes,
            prefix_cache_dir=settings.prefix_cache_dir,
            prefix_cache_bytes=settings.prefix_cache_bytes,
        )
        self._places = Places(self.engine)

    def _defaults(self, settings: ServeSettings) -> dict[str, Any]:
        defaults: dict[str, Any] = {"temperature": 1.0}
        if settings.generation_config == "auto":
            config = self.model.applied_settings
            for name in _CONFIG_FIELDS:
                if config.get(name) is not None:
                    defaults[name] = config[name]
        if settings.speculative_config is not None:
            num_guesses = settings.speculative_config["num_speculative_tokens"]
            max_guesses = self.interface.features.num_speculative_tokens
            if num_guesses > max_guesses:
                remedy = f"ask for at most {max_guesses}" if max_guesses > 0 else "leave it out"
                raise ValueError(
                    f"speculative_config asks for {num_guesses} guesses a step, and the package "
                    f"checks {max_guesses}; {remedy}, or compile the portable package with "
                    f'num_speculative_tokens={num_guesses} and kv_cache_dtype="int8"'
                )
            defaults["prompt_lookup_num_tokens"] = num_guesses
        return defaults

    def _checked_budget(self, settings: ServeSettings) -> int:
        """The budget for the thoughts of requests without one. Raises ValueError."""
        if settings.reasoning_budget < 0:
            return settings.reasoning_budget
        if self._reasoning_format is None:
            raise ValueError(
                "reasoning_budget is given without reasoning_parser, which knows the thoughts of "
                "the model; give both"
            )
        if not self.interface.features.grammars:
            raise ValueError(
                "reasoning_budget is given, and the package was exported without grammars; export "
                "it with --for-serving"
            )
        return settings.reasoning_budget

    def with_adapter(self, name: str) -> ServedModel:
        """The same package and engine under the name of a loaded adapter. All its requests have the
        adapter."""
        view = copy(self)
        view.name = name
        view.adapter = name
        view.created = int(time.time())
        return view

    @property
    def max_model_len(self) -> int:
        """The largest number of tokens of a prompt and its answer together."""
        return self.engine.capacity

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the package. Raises ApiError if it has none."""
        if self.model.tokenizer is None:
            raise ApiError(
                400,
                f"the package of {self.name!r} has no tokenizer: it takes prompts of token ids on "
                "/v1/completions",
            )
        return self.model.tokenizer

    @cached_property
    def token_texts(self) -> TokenTexts:
        return TokenTexts(self.model)

    @property
    def _template(self) -> str:
        templates = None if self.model.tokenizer is None else self.model.tokenizer.chat_template
        if isinstance(templates, Mapping):
            return templates.get("tool_use", templates.get("default", ""))
        return templates or ""

    @property
    def takes_chats(self) -> bool:
        """Whether there is a chat template for messages."""
        return bool(self._template)

    def reasoning_reader(self, prompt: Sequence[int], form: AnswerForm) -> ReasoningReader | None:
        """The reader that splits the thoughts off an answer to a prompt; None if they stay in the
        answer, or the answer has none."""
        if self._reasoning_format is None or not form.may_have_thoughts:
            return None
        # Other blanks are a part of the form.
        separator = ANY_BLANKS if form.keeper is None else TWO_LINE_FEEDS
        return ReasoningReader(self._reasoning_format, self._end_of(prompt), separator)

    def _end_of(self, prompt: Sequence[int]) -> str:
        """The text of the last tokens of a prompt, special tokens included."""
        return self.tokenizer.decode(prompt[-_MAX_MARK_TOKENS:], skip_special_tokens=False)

    def reads_special_tokens(self, request: ChatCompletionRequest) -> bool:
        """Whether marks of calls or thoughts in the answers to a request are special tokens, which
        texts otherwise lack."""
        marks: list[str] = []
        if request.offers_tools:
            marks += [*self.tool_format.marks, *self.tool_format.start_marks]
        if self._reasoning_format is not None:
            marks += [self._reasoning_format.start, self._reasoning_format.end]
        return not all(map(self._is_shown, marks))

    def _is_shown(self, text: str) -> bool:
        """Whether `text` can be in this model's texts without special tokens."""
        if self.model.tokenizer is None:
            return True
        token = self.model.tokenizer.get_vocab().get(text)
        return token is None or not self.model.tokenizer.is_skipped(token)

    def sampling_params(self, request: GenerationRequest) -> SamplingParams:
        """The sampling parameters of every answer: the request's fields on top of `defaults`.

        Raises:
            ApiError: the package cannot do what the request asks for.
            ArgumentError: a value is out of its range, or fields contradict each other.
        """
        self._check_logprobs(request)
        fields = {**self.defaults, **request.sampling_fields()}
        if "max_new_tokens" not in fields:
            if request.default_token_limit is None:
                fields["max_length"] = self.max_model_len
            else:
                fields["max_new_tokens"] = request.default_token_limit
        if "logit_bias" in fields and not self.interface.features.logit_bias:
            raise without_feature("logit_bias", param="logit_bias")
        features = self.interface.features
        if request.allowed_token_ids and not (features.allowed_tokens or features.grammars):
            raise without_feature("allowed_tokens", param="allowed_token_ids")
        if request.ignore_eos or request.stop_token_ids:
            ends = [] if request.ignore_eos else list(self.ends)
            ends += request.stop_token_ids or []
            largest = max(request.stop_token_ids or [0])
            if largest >= self.interface.vocab_size:
                accepted = f"ids of tokens, 0 to {self.interface.vocab_size - 1}"
                refuse("stop_token_ids", largest, accepted)
            fields["eos_token_id"] = tuple(ends)
        return SamplingParams(**fields)

    def _check_logprobs(self, request: GenerationRequest) -> None:
        """Raise ApiError if the package does not return the log-probabilities that a request asks
        for."""
        if request.num_alternatives is not None:
            self._check_alternatives(request.alternatives_field, request.num_alternatives)
        if request.scores_answers:
            self._check_scores_of_answers(request)
        if not request.scores_prompt:
            return
        field = "echo"
        num_alternatives = 0
        if request.prompt_logprobs is not None:
            field = "prompt_logprobs"
            num_alternatives = request.prompt_logprobs
        self._check_alternatives(field, num_alternatives)
        features = self.interface.features
        if not (features.prompt_logprobs or features.allowed_tokens):
            raise without_feature(
                "allowed_tokens",
                param=field,
                purpose=", which log-probabilities of a prompt need",
            )

    def _check_scores_of_answers(self, request: GenerationRequest) -> None:
        """Raise ApiError if the tokens that a request lists cannot be scored."""
        field = "logprob_token_ids"
        features = self.interface.features
        if not features.prompt_logprobs:
            raise without_feature("prompt_logprobs", param=field)
        problem = None
        if request.num_alternatives is None:
            problem = "is for log-probabilities of the answer; give logprobs, too"
        elif request.token_limit != 1:
            problem = f"is for answers of a single token; give {request.token_limit_field}: 1"
        elif request.scores_prompt:
            problem = "and log-probabilities of the prompt were requested; request either"
        elif features.logprobs_mode != RAW_LOGPROBS:
            problem = (
                "has the model's own log-probabilities, and this package those of what is sampled; give "
                "allowed_token_ids"
            )
        if problem is not None:
            raise ApiError(400, f"{field} {problem}", param=field)

    def _check_alternatives(self, field: str, num_alternatives: int) -> None:
        """Raise ApiError if the package does not return log-probabilities, or returns fewer
        alternatives than the field of a request asks for."""
        features = self.interface.features
        if not features.logprobs:
            raise without_feature("logprobs", param=field)
        if self.model.tokenizer is None:
            raise ApiError(
                400,
                "log-probabilities come with the texts of tokens, and this package has no "
                "tokenizer; leave them out",
                param=field,
            )
        if num_alternatives > features.top_logprobs:
            raise ApiError(
                400,
                f"{num_alternatives} alternatives were requested and this package returns "
                f"{features.top_logprobs}; request fewer, or export it with "
                f"--top-logprobs {num_alternatives}",
                param=field,
            )

    def check_form(self, form: Form | None) -> None:
        """Raise ApiError if answers of this model cannot follow a form at all."""
        if form is None:
            return
        features = self.interface.features
        if not (features.grammars or features.allowed_tokens):
            raise without_feature("grammars", purpose=_FOR_A_FORM)
        if self.model.tokenizer is None:
            raise ApiError(400, f"this package has no tokenizer{_FOR_A_FORM}")
        self._check_libraries()

    def _check_libraries(self) -> None:
        """Raise ApiError if the libraries that compile forms are not installed."""
        for module in ("llguidance", "outlines_core"):
            if importlib.util.find_spec(module) is None:
                raise ApiError(
                    501,
                    f"this server lacks {module}{_FOR_A_FORM}; its machine needs the extra serve of "
                    f"{DISTRIBUTION}",
                    code="missing_module",
                )

    async def answer_form(self, request: GenerationRequest) -> AnswerForm:
        """The form of the answers to a request for texts, without thoughts.

        Raises:
            ArgumentError: the form is invalid, or takes too much to compile.
        """
        if request.form is None:
            return ANY_TEXT
        prepared = await self.model.grammars.prepare(Wish(request.form))
        return AnswerForm(prepared, may_have_thoughts=False)

    async def answer_form_of_chat(
        self, request: ChatCompletionRequest, prompt: Sequence[int], *, needs_budget: bool
    ) -> AnswerForm:
        """The form of the answers to a conversation, which may begin with thoughts.

        Args:
            request: the request.
            prompt: the token ids of its prompt.
            needs_budget: whether a budget for thoughts is an error if it cannot be kept.

        Raises:
            ApiError: the budget cannot be kept.
            ArgumentError: the form is invalid, or takes too much to compile.
        """
        budget = self._budget(request, needs_budget=needs_budget)
        thoughts = None if request.continue_final_message else self._thoughts_after(prompt)
        may_have_thoughts = not request.continue_final_message
        if thoughts is None:
            budget = None
        if request.form is None and budget is None:
            return AnswerForm(may_have_thoughts=may_have_thoughts)
        # Only tables have a part for thoughts.
        prepared = await self.model.grammars.prepare(Wish(request.form, thoughts))
        if prepared.tables is None:
            return AnswerForm(prepared, may_have_thoughts=False)
        return AnswerForm(
            prepared,
            may_have_thoughts=may_have_thoughts and (thoughts is not None or request.form is None),
            thinking_token_budget=budget,
        )

    def _thoughts_after(self, prompt: Sequence[int]) -> Thoughts | None:
        """The thoughts that answers to a prompt begin with, or may begin with."""
        if self._reasoning_format is None:
            return None
        return self._reasoning_format.thoughts_after(self._end_of(prompt))

    def _budget(self, request: ChatCompletionRequest, *, needs_budget: bool) -> int | None:
        """The largest number of tokens of the thoughts; None for no limit. Raises ApiError."""
        budget = request.thinking_token_budget
        if budget is None:
            budget = self._reasoning_budget
        if budget < 0:
            return None
        if request.allowed_token_ids is not None:
            raise ApiError(
                400,
                "allowed_token_ids and a limit of the thoughts both constrain the answer; leave "
                "allowed_token_ids out, or give thinking_token_budget: -1",
                param="allowed_token_ids",
            )
        reason = None
        if self._reasoning_format is None:
            reason = "this server does not know the thoughts of the model; start it with --reasoning-parser"
        elif not self.interface.features.grammars:
            reason = "this package was exported without grammars; export it with --for-serving"
        if reason is None:
            self._check_libraries()
            return budget
        if needs_budget:
            raise ApiError(
                400,
                f"{reason}, or leave thinking_token_budget out",
                param="thinking_token_budget",
            )
        return None

    def check_shortest(
        self, form: AnswerForm, prompt: Sequence[int], params: SamplingParams, limit_field: str
    ) -> None:
        """Raise ApiError if no answer to a prompt that follows its form is short enough.

        Args:
            form: the form of the answer.
            prompt: the token ids.
            params: the sampling parameters of the answer.
            limit_field: the field of the request that limits the tokens of the answer.
        """
        stops = self.ends if params.eos_token_id is None else params.eos_token_id
        shortest = form.shortest
        counted = ", its stop token included"
        if shortest > 0 and not stops:
            shortest -= 1
            counted = ""
        limit = params.max_new_tokens
        if limit is not None and limit < shortest:
            raise ApiError(
                400,
                f"{limit_field} is {limit}, and the shortest answer that follows the form has "
                f"{shortest} tokens{counted}; give at least {shortest}",
                param=limit_field,
            )
        room = self.max_model_len - shortest
        if len(prompt) > room:
            remedy = f"give at most {room}" if room >= 0 else "give a form of shorter answers"
            raise ApiError(
                400,
                f"the prompt has {len(prompt)} tokens, this model's context {self.max_model_len}, "
                f"and the shortest answer that follows the form {shortest}; {remedy}",
                param="prompt",
                code="context_length_exceeded",
            )

    def check_count(self, count: int) -> None:
        """Raise ApiError if `count` answers can never have places at once."""
        num_places = self.engine.slots + self.engine.max_waiting
        if count > num_places:
            raise ApiError(
                400, f"{count} answers were requested at once, and this server takes {num_places}"
            )

    def check_places(self, count: int) -> None:
        """Raise QueueFullError unless `count` places are free. They stay free until the event loop
        goes on, because only it adds requests."""
        self._places.check(count)

    def hold_places(self, count: int) -> AbstractContextManager[Callable[[], None]]:
        """Hold `count` places for requests that are being prepared. The result is a function that
        lets them go, because the requests take them; otherwise they are held to the end.

        Raises:
            QueueFullError: too few places are free.
        """
        return self._places.hold(count)

    def check_room(self, prompt: Sequence[int], tokens: int = 1) -> None:
        """Raise ApiError unless a slot has room for a prompt and `tokens` tokens of an answer."""
        max_tokens = self.max_model_len - tokens
        if len(prompt) > max_tokens:
            raise ApiError(
                400,
                f"the prompt has {len(prompt)} tokens and this model's context "
                f"{self.max_model_len}; give at most {max_tokens}",
                param="prompt",
                code="context_length_exceeded",
            )

    def check_length(self, prompt: str | Sequence[int]) -> None:
        """Raise ApiError for a text that is too long for a slot in any encoding. Encoding it would
        take long."""
        if not isinstance(prompt, str) or self._max_characters_per_token is None:
            return
        max_characters = self._max_characters_per_token * self.max_model_len
        if len(prompt) > max_characters:
            raise ApiError(
                400,
                f"the prompt has {len(prompt)} characters, and this model's context of "
                f"{self.max_model_len} tokens {max_characters} at most; give less",
                param="prompt",
                code="context_length_exceeded",
            )

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: ChatOptions,
        on_unread: Callable[[str], object],
    ) -> str:
        """The text of a conversation, in other roles if the template refuses those of the messages.

        Args:
            messages: the conversation.
            options: the options of the template.
            on_unread: a function that is called with the name of each thing that the template does
                not print, as in `Tokenizer.render_chat`.

        Raises:
            ValueError: as in `Tokenizer.render_chat`.
        """
        refusal: ValueError | None = None
        for rewriting in rewritings(messages, self._knows_developer(options)):
            try:
                return self.tokenizer.render_chat(rewriting, options, on_unread)
            except ValueError as error:
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    def _knows_developer(self, options: ChatOptions) -> bool:
        """Whether the template has a word for OpenAI's role "developer"; without one, it may drop
        the message in silence."""
        source = self.tokenizer.get_chat_template(options.chat_template, tools=options.tools)
        return "developer" in source

    @property
    def reads_images(self) -> bool:
        return self.interface.image is not None

    def check_images(self, messages: Sequence[Mapping[str, Any]], images: Sequence[str]) -> None:
        """Raise ApiError for images that the model does not read, and ValueError for a text that
        stands for an image."""
        processor = self.model.images.processor
        if processor is not None:
            images_in(messages, processor.placeholder, images)
        elif images:
            raise ApiError(
                400,
                f"the model {self.name!r} reads text only; leave the image out, or ask another "
                "model of /v1/models",
                code="invalid_image",
            )

    def check_without_image(self, prompt: str | Sequence[int]) -> None:
        """Raise ApiError for a text that stands for an image. Completions have no images."""
        processor = self.model.images.processor
        if processor is not None and isinstance(prompt, str) and processor.placeholder in prompt:
            raise ApiError(
                400,
                f"the prompt has the text {processor.placeholder}, which stands for an image; "
                "leave it out, or give the image in messages",
                param="prompt",
            )

    def process_images(self, files: Sequence[bytes]) -> list[ProcessedImage]:
        """Files as vision.onnx reads them.

        Raises:
            ApiError: a file cannot be read or is too large, or the images have more tokens than a
                slot holds. The tokens are counted before a file is unfolded.
        """
        processor = self.model.images.processor
        assert processor is not None
        worker = self._image_worker
        names = [f"image {number}" for number in range(len(files))]
        num_tokens = 0
        try:
            for name, file in zip(names, files, strict=True):
                width, height = worker.size(file, name)
                num_tokens += processor.layout(width, height, name).placeholders
            self.check_room(range(num_tokens))
            return [
                worker.process(file, processor, name)
                for name, file in zip(names, files, strict=True)
            ]
        except ValueError as error:
            raise ApiError(400, str(error), code="invalid_image") from error
        except (ApiError, EngineClosedError):
            raise
        except QsampleError as error:  # Pillow is missing.
            raise ApiError(501, str(error), code="missing_module") from None

    def feature_bytes(self, images: Sequence[ProcessedImage]) -> int:
        """The size of the features of images."""
        shape = self.interface.image
        assert shape is not None
        num_rows = sum(len(image.rows) for image in images)
        return num_rows * shape.width * _BYTES_OF_A_FEATURE

    def with_placeholders(self, text: str, images: Sequence[ProcessedImage]) -> str:
        """A conversation's text with the images' placeholders.

        Raises:
            ValueError: the template leaves an image out.
        """
        processor = self.model.images.processor
        assert processor is not None
        return processor.expand(text, images)

    def check_ids(self, ids: Sequence[int], *, any_token: bool = False) -> None:
        """Raise ApiError for a token id that the model does not have. any_token: whether the
        tokens that only the tokenizer has are valid."""
        vocab_size = self.interface.vocab_size
        if any_token:
            vocab_size = max(vocab_size, self.tokenizer.num_ids)
        wrong = next((token for token in ids if token >= vocab_size), None)
        if wrong is not None:
            raise ApiError(
                400,
                f"{wrong} is not a token of this model, which has 0 to {vocab_size - 1}",
                param="prompt",
            )

    def add(
        self, prompt: list[int], params: SamplingParams, *, priority: int = 0, **options: Any
    ) -> Request:
        """A request to the engine, without waiting for room.

        Args:
            prompt: the token ids. Every token is read, also the padding token: a single prompt has
                no padding, and a text may spell that token. An empty prompt begins a text.
            params: the sampling parameters.
            priority: the rank of the request. Requests with the lowest rank get a slot first.
            options: further fields of `Call`.

        Raises:
            ApiError: the adapter has been unloaded meanwhile.
        """
        if self.adapter is not None:
            if self.adapter not in self.model.adapters:
                raise unknown_model(self.adapter, [self.base])
            params = replace(params, adapter=self.adapter)
        call = Call(inputs=[prompt], params=params, **options)
        return self.engine.add(call, timeout=0, priority=priority)[0]

    def close(self) -> None:
        self._image_worker.close()
        self.model.images.stop()
        self.model.grammars.close()
        self.engine.close()


class Places:
    """The places of an engine. Its requests have some, and requests that are being prepared hold
    others, so that no work is done for an answer that gets no place."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_held = 0

    def check(self, count: int) -> None:
        """Raise QueueFullError unless `count` places are free."""
        stats = self._engine.stats()
        num_taken = stats.running + stats.waiting + self._num_held
        num_places = stats.slots + stats.max_waiting
        if num_taken + count > num_places:
            raise QueueFullError(
                f"{num_taken} of {num_places} places are taken and {count} were requested; "
                "try again later"
            )

    @contextmanager
    def hold(self, count: int) -> Iterator[Callable[[], None]]:
        """Hold places until the result is called, or else to the end. Raises QueueFullError."""
        self.check(count)
        self._num_held += count
        num_held = count

        def let_go() -> None:
            nonlocal num_held
            self._num_held -= num_held
            num_held = 0

        try:
            yield let_go
        finally:
            let_go()


class ServedModels:
    """The models of a server by name."""

    def __init__(self, settings: ServeSettings) -> None:
        # The packages, and after them their adapters.
        self._models: dict[str, ServedModel] = {}
        self._settings = settings
        try:
            for name, path in settings.models.items():
                self._models[name] = ServedModel(name, path, settings)
            for name in settings.loras:
                self._check_new(name)
                self._models[name] = next(iter(self)).with_adapter(name)
        except BaseException as error:
            self.close()
            if isinstance(error, QsampleError | ValueError) and len(settings.models) > 1:
                raise type(error)(f"model {name!r}: {error}") from error
            raise

    def __iter__(self) -> Iterator[ServedModel]:
        """The packages."""
        return iter([model for model in self.served if model.adapter is None])

    @property
    def served(self) -> list[ServedModel]:
        """The packages and the adapters."""
        # The values are copied, because another thread may load an adapter meanwhile.
        return list(self._models.values())

    def find(self, name: str | None, param: str = "model") -> ServedModel:
        """The model or adapter `name`, or the first model for None and "".

        Raises:
            ApiError: the name is unknown. The error is about the field `param`.
        """
        if name in (None, ""):
            return next(iter(self))
        if name not in self._models:
            raise unknown_model(name, self._models, param=param)
        return self._models[name]

    def load_adapter(
        self, name: str, path: str, base: str | None = None, *, replaced: bool = False
    ) -> None:
        """Serve an adapter. Running requests keep their adapter.

        Args:
            name: the served name of the adapter.
            path: the folder of the adapter, below the settings' `lora_dir`.
            base: the served name of its model, by default the first model.
            replaced: whether it may replace that model's adapter of the same name.

        Raises:
            ApiError: the name is taken, or the adapter cannot be used. Then nothing has changed.
        """
        model = self.find(base, "base_model_name")
        self._check_new(name, replaced=model.base if replaced else None)
        folder = self._adapter_folder(path)
        try:
            model.model.load_adapter(name, folder, hotswap=replaced)
        except (QsampleError, ValueError) as error:
            # The client reads its own name of the folder, not where the folder is.
            text = str(error).replace(str(folder), path)
            raise ApiError(400, text, param="lora_path") from error
        self._models[name] = model.with_adapter(name)

    def unload_adapter(self, name: str) -> None:
        """Take no more requests for an adapter. Its requests so far go on.

        Raises:
            ApiError: the adapter is not loaded.
        """
        if name not in self._models or self._models[name].adapter is None:
            loaded = [model.name for model in self.served if model.adapter is not None]
            raise unknown_model(name, loaded, "adapter", "lora_name")
        self._models.pop(name).model.unload_adapter(name)

    def _check_new(self, name: str, *, replaced: str | None = None) -> None:
        """Raise ApiError if `name` is taken, or no more adapters have room.

        Args:
            name: the served name of a new adapter.
            replaced: the served name of a model. The adapter of that model may have the name.
        """
        served = self._models.get(name)
        if served is None:
            num_loaded = len(self._models) - len(list(self))
            if num_loaded >= self._settings.max_cpu_loras:
                raise ApiError(
                    400,
                    f"{num_loaded} adapters are loaded, all that this server takes; "
                    "unload another, or raise --max-cpu-loras",
                    param="lora_name",
                )
        elif served.adapter is None:
            raise ApiError(
                400,
                f"{name!r:.100} is served already; give another lora_name",
                param="lora_name",
            )
        elif served.base != replaced:
            raise ApiError(
                400,
                f"{name!r:.100} is served already; give another, or load_inplace: true",
                param="lora_name",
            )

    def _adapter_folder(self, path: str) -> Path:
        """An existing folder below `lora_dir` that has only plain files below it.

        Raises:
            ApiError: the folder is missing, elsewhere, or has other files.
        """
        root = self._settings.lora_dir
        assert root is not None
        try:
            folder = path_below(root, path)
            if folder is not None and _has_only_files_below(folder, root):
                return folder
        except (OSError, ValueError):  # ValueError: the text is no path at all.
            pass
        # The answer is the same for every fault, because it must tell nothing of other files.
        raise ApiError(
            400,
            f"lora_path is {shown(path)}; give an adapter's folder of plain files below this "
            "server's --lora-dir",
            param="lora_path",
        )

    def close(self) -> None:
        for model in self:
            model.close()


def _has_only_files_below(folder: Path, root: str) -> bool:
    """Whether the entries of `folder`, which is not `root`, are plain files below `root`."""
    if os.path.samefile(folder, root):
        return False
    files = [Path(entry) for entry in os.scandir(folder)]
    return all(file.is_file() and not leads_out(file, [Path(root)]) for file in files)


def without_feature(name: str, *, param: str | None = None, purpose: str = "") -> ApiError:
    """The answer to a request for a feature that the package lacks.

    Args:
        name: the feature.
        param: the field of the request.
        purpose: a clause about what needs the feature.
    """
    option = f"--{name.replace('_', '-')}"
    text = (
        f"this package was exported without {name}{purpose}; export it with --for-serving, "
        f"which brings all that requests ask for, or with {option}"
    )
    return ApiError(400, text, param=param)


def unknown_model(
    name: str, served_names: Iterable[str], kind: str = "model", param: str = "model"
) -> ApiError:
    """The answer to a request for a model that is not served.

    Args:
        name: the name in the request.
        served_names: the names that are served.
        kind: the word for what the name stands for.
        param: the field of the request.
    """
    known = ", ".join(map(repr, served_names)) or "none"
    return ApiError(
        404,
        f"the {kind} {name!r:.100} does not exist here; there is {known}",
        param=param,
        code="model_not_found",
    )


class TokenTexts:
    """The text and bytes of each token of a vocabulary, in the middle of a text."""

    def __init__(self, model: CausalLM) -> None:
        assert model.tokenizer is not None
        self._tokenizer = model.tokenizer
        # The tokenizer's file may have been replaced since, so the tokenizer describes itself.
        description = json.loads(self._tokenizer.to_json())
        self._is_byte_level = '"ByteLevel"' in json.dumps(description.get("decoder"))
        vocabulary: Any = (description.get("model") or {}).get("vocab") or {}
        self._pieces: dict[int, str] = {}
        if isinstance(vocabulary, dict):
            for piece, token in vocabulary.items():
                self._pieces[token] = piece
        else:  # The vocabulary of a Unigram model is a list of pieces and their scores.
            for token, entry in enumerate(vocabulary):
                self._pieces[token] = entry[0]
        self._added_tokens: set[int] = set()
        for entry in description.get("added_tokens") or []:
            self._pieces[entry["id"]] = entry["content"]
            self._added_tokens.add(entry["id"])
        self._first_token = self._find_first_token()
        self.of = lru_cache(maxsize=2**16)(self._of)

    def width(self, token: int, *, skip_special_tokens: bool = True) -> int:
        """The number of characters of a token in a text. skip_special_tokens: whether special tokens
        have none."""
        if self._tokenizer.is_skipped(token, skip_special_tokens=skip_special_tokens):
            return 0
        # A character counts with the token that has its first byte.
        return sum(byte & 0xC0 != 0x80 for byte in self.of(token)[1])

    def label(self, token: int) -> str:
        r"""The text of a token, or of a part of a character its bytes in OpenAI's form,
        bytes:\xf0\x9f: such tokens have no text of their own."""
        text, data = self.of(token)
        if text.encode() == data:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _find_first_token(self) -> int | None:
        """A token that stands in front of each other token to decode that: some decoders drop a
        blank at the start of a text."""
        for token in self._pieces:
            if token not in self._added_tokens and self._decode([token]):
                return token
        return None

    def _of(self, token: int) -> tuple[str, bytes]:
        """The text of a token, and its bytes, which may be a part of a character."""
        text = self._text_in_the_middle(token)
        data = b""
        if _REPLACEMENT_CHARACTER in text and token not in self._added_tokens:
            data = self._bytes_of_piece(self._pieces.get(token, ""))
        return text, data or text.encode()

    def _bytes_of_piece(self, piece: str) -> bytes:
        """The bytes of a token that is a part of a character; empty if they are unknown."""
        match = _BYTE_TOKEN.fullmatch(piece)
        if match is not None:
            return bytes([int(match[1], 16)])
        table = _byte_table()
        if self._is_byte_level and all(character in table for character in piece):
            return bytes(table[character] for character in piece)
        return b""

    def _text_in_the_middle(self, token: int) -> str:
        alone = self._decode([token])
        if self._first_token is None or _REPLACEMENT_CHARACTER in alone:
            return alone
        first = self._decode([self._first_token])
        both = self._decode([self._first_token, token])
        return both.removeprefix(first) if both.startswith(first) else alone

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


@lru_cache(maxsize=1)
def _byte_table() -> dict[str, int]:
    """GPT-2's printable characters for bytes (Radford et al. 2019; openai/gpt-2, encoder.py).

    Printable bytes stand for themselves, and the other bytes for the code points from 256 on.
    """
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    table = {chr(byte): byte for byte in printable}
    not_printable = [byte for byte in range(256) if byte not in printable]
    for index, byte in enumerate(not_printable):
        table[chr(256 + index)] = byte
    return table
