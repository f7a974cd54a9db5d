"""The packages that are served: their engines, tokenizers and defaults."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Final

from qsample.addons.serve.http import ApiError
from qsample.addons.serve.parsers import ReasoningReader, find_reasoning_format, find_tool_format
from qsample.addons.serve.requests import GenerationRequest
from qsample.addons.serve.settings import ServeSettings
from qsample.disk.untrusted import leads_out
from qsample.errors import DISTRIBUTION, QsampleError, shown
from qsample.images.decode import ImageLimits, read_size
from qsample.images.messages import images_in
from qsample.images.prompt import ProcessedImage
from qsample.request.grammar import Form, GrammarGuide, Grammars, grammar_of
from qsample.request.sampling_params import FILTER_FIELDS, SamplingParams
from qsample.runtime import CausalLM, Engine, QueueFullError, Request, load
from qsample.runtime.call import Call
from qsample.runtime.prepare import check_features
from qsample.text.chat import ChatOptions, compile_template
from qsample.text.tokenizer import Tokenizer

# Fields that a model's generation_config decides with generation_config="auto".
_OF_CONFIG: Final = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens"),
    "prompt_lookup_num_tokens",
    *FILTER_FIELDS,
)
_MARK_TOKENS: Final = (
    32  # more than the longest mark around thoughts has, even in single characters
)
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_UNKNOWN: Final = "\ufffd"


class ServedModel:
    """A loaded package, or one of its adapters, under its served name. `base`: the package's name. `adapter`: None for
    the package itself. `created`: when it was loaded, in seconds since 1970. `defaults`: fields of `SamplingParams` for
    requests that leave them out."""

    def __init__(self, name: str, path: str, settings: ServeSettings) -> None:
        """Raises QsampleError or ValueError if the package cannot be served."""
        self.name = self.base = name
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
        self.model.images.limits = ImageLimits(settings.max_image_bytes, settings.max_image_pixels)
        if (tokenizer := self.model.tokenizer) is not None and settings.chat_template is not None:
            tokenizer.chat_template = tokenizer.get_chat_template(settings.chat_template)
            compile_template(tokenizer.chat_template)  # a mistake in it ends the start
        self.interface = self.model.interface
        self.created = int(time.time())
        self.ends = self.model.package.manifest.token_ids.eos
        self.defaults = {"temperature": 1.0}
        if settings.generation_config == "auto":
            config = self.model.generation_config
            self.defaults |= {
                name: config[name] for name in _OF_CONFIG if config.get(name) is not None
            }
        if settings.speculative_config is not None:
            self.defaults["prompt_lookup_num_tokens"] = wanted = settings.speculative_config[
                "num_speculative_tokens"
            ]
            if wanted > (most := self.interface.features.num_speculative_tokens):
                remedy = f"ask for at most {most}" if most else "leave it out"
                raise ValueError(
                    f"speculative_config asks for {wanted} guesses a step, and the package checks {most}; {remedy}, or "
                    f'compile the portable package with num_speculative_tokens={wanted} and kv_cache_dtype="int8"'
                )
        # So does a mistake in the generation_config, and a filter that the package lacks.
        check_features(self.interface, SamplingParams(**self.defaults))  # type: ignore[arg-type]
        self.tool_format = find_tool_format(settings.tool_call_parser, self._template)
        self._reasoning_format = find_reasoning_format(settings.reasoning_parser, self._is_shown)
        self.grammars = Grammars(self.model)
        self._longest_token = (
            None if self.model.tokenizer is None else self.model.tokenizer.characters_per_token()
        )
        if self.interface.features.logprobs and self.model.tokenizer is not None:
            _ = (
                self.token_texts
            )  # now: a large tokenizer.json takes half a second, and every request would wait
        for lora, folder in settings.loras.items():
            self.model.load_adapter(lora, folder)
        self.engine = Engine(  # last: it has a thread
            self.model,
            slots=settings.slots,
            max_waiting=settings.max_waiting,
            prefill_chunk_size=settings.prefill_chunk_size,
            prefixes=settings.prefixes,
            prefix_cache_dir=settings.prefix_cache_dir,
            prefix_cache_bytes=settings.prefix_cache_bytes,
        )

    def with_adapter(self, name: str) -> ServedModel:
        """The same package and engine under a loaded adapter's name; all its requests have the adapter."""
        view = copy(self)
        view.name = view.adapter = name
        view.created = int(time.time())
        return view

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its answer together."""
        return self.engine.capacity

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ApiError for a package without a tokenizer."""
        if self.model.tokenizer is None:
            raise ApiError(
                400,
                f"the package of {self.name!r} has no tokenizer: it takes prompts of token ids on /v1/completions",
            )
        return self.model.tokenizer

    @cached_property
    def token_texts(self) -> TokenTexts:
        return TokenTexts(self.model)

    @property
    def _template(self) -> str:
        templates = None if self.model.tokenizer is None else self.model.tokenizer.chat_template
        if isinstance(templates, Mapping):
            return templates.get("tool_use") or templates.get("default", "")
        return templates or ""

    @property
    def takes_chats(self) -> bool:
        """Whether there is a chat template for messages."""
        return bool(self._template)

    def reasoning_reader(self, prompt: Sequence[int]) -> ReasoningReader | None:
        """Splits the thoughts off an answer to that prompt; None if they stay in the answer."""
        if self._reasoning_format is None:
            return None
        end = self.tokenizer.decode(prompt[-_MARK_TOKENS:], skip_special_tokens=False)
        return ReasoningReader(self._reasoning_format, end)

    def _is_shown(self, text: str) -> bool:
        """Whether `text` can be in this model's texts: they do not contain special tokens."""
        if self.model.tokenizer is None:
            return True
        token = self.model.tokenizer.get_vocab().get(text)
        return token is None or not self.model.tokenizer.is_skipped(token)

    def sampling_params(self, request: GenerationRequest) -> SamplingParams:
        """The sampling parameters of every answer: the request's fields on top of `defaults`. Raises ApiError for what
        the package cannot do, and ArgumentError for a value out of its range or fields that contradict each other."""
        self._check_logprobs(request)
        fields = {**self.defaults, **request.sampling_fields()}
        if "max_new_tokens" not in fields:
            limit = request.default_token_limit
            fields |= (
                {"max_length": self.max_model_len} if limit is None else {"max_new_tokens": limit}
            )
        if "logit_bias" in fields and not self.interface.features.logit_bias:
            raise without_feature("logit_bias", "logit_bias")
        if request.ignore_eos or request.stop_token_ids:
            ends = () if request.ignore_eos else self.ends
            fields["eos_token_id"] = (*ends, *(request.stop_token_ids or ()))
        return SamplingParams(**fields)

    def _check_logprobs(self, request: GenerationRequest) -> None:
        """Raise ApiError if the package does not return the log-probabilities that a request asks for."""
        asked = (
            []
            if request.num_alternatives is None
            else [(request.alternatives_field, request.num_alternatives)]
        )
        if request.scores_prompt:
            asked.append(
                ("echo", 0)
                if request.prompt_logprobs is None
                else ("prompt_logprobs", request.prompt_logprobs)
            )
        features = self.interface.features
        for param, top in asked:
            if not features.logprobs:
                raise without_feature("logprobs", param)
            if self.model.tokenizer is None:
                text = (
                    "log-probabilities come with the texts of tokens, "
                    "and this package has no tokenizer; leave them out"
                )
                raise ApiError(400, text, param=param)
            if top > features.top_logprobs:
                raise ApiError(
                    400,
                    f"{top} alternatives were requested and this package returns {features.top_logprobs}; request "
                    f"fewer, or export it with --top-logprobs {top}",
                    param=param,
                )
        if request.scores_prompt and not features.allowed_tokens:
            raise without_feature(
                "allowed_tokens", asked[-1][0], ", which log-probabilities of a prompt need"
            )

    def guides(self, form: Form | None) -> Callable[[], Awaitable[GrammarGuide]] | None:
        """A function that makes the guides of answers in this form; None for any text. Raises ApiError if answers of
        this model cannot follow it."""
        if form is None:
            return None
        needed = ", which an answer that follows a schema needs"
        if not self.interface.features.allowed_tokens:
            raise without_feature("allowed_tokens", use=needed)
        if self.model.tokenizer is None:
            raise ApiError(400, f"this package has no tokenizer{needed}")
        if not self.model.package.manifest.token_ids.eos:
            raise ApiError(
                400, "this model has no stop token, with which an answer that follows a schema ends"
            )
        if importlib.util.find_spec("llguidance") is None:
            text = f"this server lacks llguidance{needed}; its machine needs the extra serve of {DISTRIBUTION}"
            raise ApiError(501, text, code="missing_module")
        return partial(self.grammars.guide, grammar_of(form))

    def check_count(self, count: int) -> None:
        """Raise ApiError if `count` answers can never have places at once."""
        most = self.engine.slots + self.engine.max_waiting
        if count > most:
            raise ApiError(
                400, f"{count} answers were requested at once, and this server takes {most}"
            )

    def check_places(self, count: int) -> None:
        """Raise QueueFullError unless `count` places are free. They stay free until the event loop goes on, because
        only it adds requests."""
        stats = self.engine.stats()
        taken, most = stats.running + stats.waiting, stats.slots + stats.max_waiting
        if taken + count > most:
            raise QueueFullError(
                f"{taken} of {most} places are taken and {count} were requested; try again later"
            )

    def check_room(self, prompt: Sequence[int], tokens: int = 1) -> None:
        """Raise ApiError unless a slot has room for a prompt and `tokens` tokens of an answer."""
        most = self.max_model_len - tokens
        if len(prompt) > most:
            raise ApiError(
                400,
                f"the prompt has {len(prompt)} tokens and this model's context {self.max_model_len}; give at most "
                f"{most}",
                param="prompt",
                code="context_length_exceeded",
            )

    def check_length(self, prompt: str | Sequence[int]) -> None:
        """Raise ApiError for a text that is too long for a slot in any encoding: encoding it takes long."""
        if not isinstance(prompt, str) or self._longest_token is None:
            return
        most = self._longest_token * self.max_model_len
        if len(prompt) > most:
            raise ApiError(
                400,
                f"the prompt has {len(prompt)} characters, and this model's context of {self.max_model_len} tokens "
                f"{most} at most; give less",
                param="prompt",
                code="context_length_exceeded",
            )

    def render_chat(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> str:
        """The text of a conversation. OpenAI's role "developer" becomes "system" for a template that does not know it,
        as OpenAI does for its earlier models. Raises ValueError as `Tokenizer.render_chat` does."""
        if any(message.get("role") == "developer" for message in messages):
            source = self.tokenizer.get_chat_template(options.chat_template, tools=options.tools)
            if "developer" not in source:
                messages = [
                    {**message, "role": "system"} if message.get("role") == "developer" else message
                    for message in messages
                ]
        return self.tokenizer.render_chat(messages, options)

    @property
    def reads_images(self) -> bool:
        return self.interface.image is not None

    def check_images(self, messages: Sequence[Mapping[str, Any]], images: Sequence[str]) -> None:
        """Raise ApiError for images that the model does not read, and ValueError for a text that stands for one."""
        processor = self.model.images.processor
        if processor is not None:
            images_in(messages, processor.placeholder, images)
        elif images:
            text = f"the model {self.name!r} reads text only; leave the image out, or ask another model of /v1/models"
            raise ApiError(400, text, code="invalid_image")

    def check_without_image(self, prompt: str | Sequence[int]) -> None:
        """Raise ApiError for a text with what stands for an image; there is none in a completion."""
        processor = self.model.images.processor
        if processor is not None and isinstance(prompt, str) and processor.placeholder in prompt:
            text = f"the prompt has the text {processor.placeholder}, which stands for an image; leave it out, or give "
            raise ApiError(400, text + "the image in messages", param="prompt")

    def process_images(self, files: Sequence[bytes]) -> list[ProcessedImage]:
        """Files as vision.onnx reads them. Raises ApiError for a file that cannot be read or is too large, and before
        any is unfolded, for more tokens than a slot holds."""
        reader, tokens = self.model.images, 0
        assert reader.processor is not None
        try:
            for number, file in enumerate(files):
                size = read_size(file, reader.limits, f"image {number}")
                tokens += reader.processor.layout(*size, f"image {number}").placeholders
            self.check_room(range(tokens))
            return reader.process(files)
        except ValueError as error:
            raise ApiError(400, str(error), code="invalid_image") from error
        except ApiError:
            raise
        except QsampleError as error:  # Pillow is missing
            raise ApiError(501, str(error), code="missing_module") from None

    def with_placeholders(self, text: str, images: Sequence[ProcessedImage]) -> str:
        """A conversation's text with the images' placeholders. Raises ValueError if the template leaves one out."""
        processor = self.model.images.processor
        assert processor is not None
        return processor.expand(text, images)

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise ApiError for a token id that is not the model's."""
        most = self.interface.vocab_size
        wrong = next((token for token in ids if token >= most), None)
        if wrong is not None:
            raise ApiError(
                400,
                f"{wrong} is not a token of this model, which has 0 to {most - 1}",
                param="prompt",
            )

    def add(
        self, prompt: list[int], params: SamplingParams, *, priority: int = 0, **options: Any
    ) -> Request:
        """A request to the engine, without waiting for room; `options`: fields of `Call`. Every token is read, the
        padding token too: a single prompt has no padding, and a text may spell that token. An empty prompt begins a
        text. Raises ApiError if the adapter has been unloaded meanwhile."""
        if self.adapter is not None:
            if self.adapter not in self.model.adapters:
                raise unknown_model(self.adapter, [self.base])
            params = replace(params, adapter=self.adapter)
        return self.engine.add(
            Call(inputs=[prompt], params=params, **options), timeout=0, priority=priority
        )[0]

    def close(self) -> None:
        self.grammars.close()
        self.engine.close()


class ServedModels:
    """The models of a server by name."""

    def __init__(self, settings: ServeSettings) -> None:
        self._models: dict[str, ServedModel] = {}  # adapters too, after the packages
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
        return list(self._models.values())  # a copy: another thread may load an adapter meanwhile

    def find(self, name: str | None, param: str = "model") -> ServedModel:
        """The model or adapter `name`, or the first model for None and "". Raises ApiError about `param` if `name` is
        unknown."""
        if not name:
            return next(iter(self))
        if name not in self._models:
            raise unknown_model(name, self._models, param=param)
        return self._models[name]

    def load_adapter(
        self, name: str, path: str, base: str | None = None, *, replaced: bool = False
    ) -> None:
        """Serve the adapter in a folder below the settings' `lora_dir` as `name`; running requests keep their adapter.

        It belongs to the model `base`, or by default to the first. With `replaced`, it may take the place of that
        model's adapter of the same name. Raises ApiError and changes nothing if the name is taken, or if the adapter
        cannot be used.
        """
        model = self.find(base, "base_model_name")
        self._check_new(name, replaced=model.base if replaced else None)
        folder = self._adapter_folder(path)
        try:
            model.model.load_adapter(name, folder, hotswap=replaced)
        except (QsampleError, ValueError) as error:
            raise ApiError(400, str(error), param="lora_path") from error
        self._models[name] = model.with_adapter(name)

    def unload_adapter(self, name: str) -> None:
        """Take no more requests for an adapter; its requests so far go on. Raises ApiError if it is not loaded."""
        if name not in self._models or self._models[name].adapter is None:
            loaded = [model.name for model in self.served if model.adapter is not None]
            raise unknown_model(name, loaded, "adapter", "lora_name")
        self._models.pop(name).model.unload_adapter(name)

    def _check_new(self, name: str, *, replaced: str | None = None) -> None:
        """Raise ApiError if `name` is taken, or no more adapters have room. An adapter of the model `replaced` may have
        the name."""
        there = self._models.get(name)
        if there is not None and (there.adapter is None or there.base != replaced):
            remedy = (
                "give another lora_name"
                if there.adapter is None
                else "give another, or load_inplace: true"
            )
            raise ApiError(400, f"{name!r:.100} is served already; {remedy}", param="lora_name")
        loaded, most = len(self._models) - len(list(self)), self._settings.max_cpu_loras
        if there is None and loaded >= most:
            text = f"{loaded} adapters are loaded, all that this server takes; unload another, or raise --max-cpu-loras"
            raise ApiError(400, text, param="lora_name")

    def _adapter_folder(self, path: str) -> Path:
        """An existing folder below `lora_dir` whose files lead nowhere else. Raises ApiError."""
        allowed = self._settings.lora_dir
        assert allowed is not None
        root = Path(os.path.realpath(allowed))
        folder = root / path
        try:
            files = [Path(entry) for entry in os.scandir(folder)]
            inside = not leads_out(folder, [root]) and not os.path.samefile(folder, root)
            inside = inside and all(
                file.is_file() and not leads_out(file, [root]) for file in files
            )
        except (OSError, ValueError):  # ValueError: no path at all
            inside = False
        if not inside:
            raise ApiError(
                400,
                f"lora_path is {shown(path)}; give an adapter's folder of plain files below this server's --lora-dir",
                param="lora_path",
            )
        return folder

    def close(self) -> None:
        for model in self:
            model.close()


def without_feature(name: str, param: str | None = None, use: str = "") -> ApiError:
    """The answer to a request for a feature that the package lacks. `use`: a clause about the feature."""
    option = f"--{name.replace('_', '-')}"
    text = (
        f"this package was exported without {name}{use}; export it with --for-serving, "
        f"which brings all that requests ask for, or with {option}"
    )
    return ApiError(400, text, param=param)


def unknown_model(
    name: str, there: Iterable[str], kind: str = "model", param: str = "model"
) -> ApiError:
    """The answer to a request for a model that is not served; `there`: the served names."""
    text = f"the {kind} {name!r:.100} does not exist here; there is {', '.join(map(repr, there)) or 'none'}"
    return ApiError(404, text, param=param, code="model_not_found")


class TokenTexts:
    """The text and bytes of each token of a vocabulary, in the middle of a text."""

    def __init__(self, model: CausalLM) -> None:
        assert model.tokenizer is not None
        self._tokenizer = model.tokenizer
        described = json.loads(self._tokenizer.to_json())  # the file may have been replaced
        self._byte_level = '"ByteLevel"' in json.dumps(described.get("decoder"))
        pieces: dict[int, str] = {
            entry["id"]: entry["content"] for entry in described.get("added_tokens") or []
        }
        vocabulary: Any = (described.get("model") or {}).get("vocab") or {}
        if isinstance(vocabulary, dict):
            pieces = {number: piece for piece, number in vocabulary.items()} | pieces
        else:  # Unigram: a list of pieces and their scores
            pieces = {number: entry[0] for number, entry in enumerate(vocabulary)} | pieces
        self._added = {entry["id"] for entry in described.get("added_tokens") or []}
        self._pieces = pieces
        # Some decoders drop a blank at the start of a text; so a token is shown as it is after another token.
        self._anchor = next(
            (token for token in pieces if token not in self._added and self._decode([token])), None
        )
        self.of = lru_cache(maxsize=2**16)(self._of)

    def width(self, token: int) -> int:
        """Characters of a token in a text. Texts contain no special tokens."""
        return 0 if self._tokenizer.is_skipped(token) else len(self.of(token)[0])

    def _of(self, token: int) -> tuple[str, bytes]:
        """The text of a token, and its bytes: perhaps a part of a character."""
        text = self._after_another(token)
        piece, data = self._pieces.get(token, ""), b""
        if _UNKNOWN in text and token not in self._added:
            if match := _BYTE_TOKEN.fullmatch(piece):
                data = bytes([int(match[1], 16)])
            elif self._byte_level and all(character in _byte_table() for character in piece):
                data = bytes(_byte_table()[character] for character in piece)
        return text, data or text.encode()

    def _after_another(self, token: int) -> str:
        alone = self._decode([token])
        if self._anchor is None or _UNKNOWN in alone:
            return alone
        before, both = self._decode([self._anchor]), self._decode([self._anchor, token])
        return both.removeprefix(before) if both.startswith(before) else alone

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


@lru_cache(maxsize=1)
def _byte_table() -> dict[str, int]:
    """GPT-2's printable characters for bytes (Radford et al. 2019; openai/gpt-2, encoder.py): printable bytes stand for
    themselves, the other bytes for the code points from 256 on."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}
