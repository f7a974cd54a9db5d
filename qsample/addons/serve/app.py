"""The web application: OpenAI's endpoints over the engines of the served models."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

from fastapi import Depends, FastAPI, Request
from fastapi import Path as PathField
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.security import HTTPBearer
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles

import qsample
from qsample.addons.serve import documents, page
from qsample.addons.serve.answers import Answers
from qsample.addons.serve.chats import (
    ChatCompletionRequest,
    ChatPrompt,
    DetokenizeRequest,
    TokenizeRequest,
)
from qsample.addons.serve.choices import ChatChoice, CompletionChoice
from qsample.addons.serve.http import (
    IGNORED_HEADER,
    MESSAGES_PATH,
    PATHS_WITHOUT_A_KEY,
    ApiError,
    ApiKeys,
    BodyLimit,
    EventStream,
    Exchanges,
    Hosts,
    JsonRoute,
    add_error_handlers,
    ignored_header,
    json_bytes,
    json_response,
)
from qsample.addons.serve.image_steps import FeatureRoom, ImageSteps
from qsample.addons.serve.images import take_addresses
from qsample.addons.serve.messages import CountTokensRequest, MessageAnswers, MessagesRequest
from qsample.addons.serve.metrics import Metrics
from qsample.addons.serve.models import ServedModel, ServedModels
from qsample.addons.serve.requests import (
    CompletionRequest,
    GenerationRequest,
    LoadLoraRequest,
    UnloadLoraRequest,
)
from qsample.addons.serve.responses import ResponseAnswers, ResponsesRequest
from qsample.addons.serve.settings import ServeSettings
from qsample.errors import DISTRIBUTION
from qsample.images.prompt import ProcessedImage
from qsample.request.sampling_params import SamplingParams
from qsample.request.text.tokenizer import LONG_TEXT

# The name of the logger that writes a line for each request.
ACCESS_LOG: Final = "qsample.access"
# The other endpoints have the names of their methods as summaries.
_SUMMARIES: Final = {
    "/v1/completions": "Continue prompts",
    "/v1/chat/completions": "Answer a chat",
    "/v1/responses": "Create a response",
}
# OpenAI's endpoints for other models and for stored objects.
_ABSENT_PATHS: Final = (
    "/v1/embeddings",
    "/v1/moderations",
    "/v1/images/{rest:path}",
    "/v1/audio/{rest:path}",
    "/v1/videos{rest:path}",
    "/v1/realtime{rest:path}",
    "/v1/responses/{rest:path}",
    "/v1/conversations{rest:path}",
    "/v1/files{rest:path}",
    "/v1/batches{rest:path}",
    "/v1/assistants{rest:path}",
    "/v1/threads{rest:path}",
    "/v1/vector_stores{rest:path}",
    "/v1/fine_tuning/{rest:path}",
)
# A long text takes some hundred times its size while it is encoded.
_MAX_LONG_TEXTS_AT_ONCE: Final = 2
# A prediction is cut to this number of characters for each token of the context.
_MAX_CHARACTERS_OF_A_PREDICTED_TOKEN: Final = 32
# Python's lock is held while this number of items of a list becomes JSON.
_ITEMS_ENCODED_AT_ONCE: Final = 2**16
# The middleware `ApiKeys` checks keys. This is only for the description of the endpoints.
_KEY: Final = Depends(HTTPBearer(auto_error=False, description="An API key of this server."))
# It brings the files of Swagger UI, which FastAPI loads from the internet.
_DOCS_PACKAGE: Final = "fastapi_offline"


def make_app(settings: ServeSettings, models: ServedModels | None = None) -> FastAPI:
    """An ASGI application of the server. It closes its models at its end.

    Args:
        settings: the models and the limits.
        models: the loaded models. By default, the application loads them at its start.

    At its start, it raises QsampleError if a model cannot be loaded.

    >>> app = make_app(ServeSettings(models={"tiny": "tiny-cpu"}))  # uvicorn.run(app)
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        served = models
        if served is None:
            served = await asyncio.to_thread(ServedModels, settings)
        server.models = served
        yield
        await asyncio.to_thread(served.close)
        server.close()

    server = _Server(settings)
    app = FastAPI(
        title="qsample",
        version=qsample.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.router.route_class = JsonRoute
    server.add_routes(app)
    add_error_handlers(app)
    app.add_middleware(BodyLimit, max_bytes=server.max_body_bytes)
    if settings.api_keys:
        app.add_middleware(ApiKeys, keys=settings.api_keys)
    if settings.allowed_hosts and "*" not in settings.allowed_hosts:
        app.add_middleware(Hosts, allowed=settings.allowed_hosts)
    app.add_middleware(
        Exchanges,
        paths=frozenset(route.path for route in app.routes if isinstance(route, Route)),
        count=server.count_exchange,
        log=logging.getLogger(ACCESS_LOG) if settings.access_log else None,
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["Retry-After", "X-Request-Id", IGNORED_HEADER],
        )
    app.state.server = server
    return app


class TimeLimit:
    """The time that a request may take, from now on."""

    def __init__(self, seconds: float | None) -> None:
        """seconds: the time; None for any."""
        self._seconds = seconds
        self._start_time = time.monotonic()

    @asynccontextmanager
    async def of_preparation(self) -> AsyncIterator[None]:
        """Bounds what is done before the answer begins.

        Raises:
            ApiError: the time is over.
        """
        try:
            async with asyncio.timeout(self.seconds_left()):
                yield
        except TimeoutError:
            raise _timed_out() from None

    def seconds_left(self) -> float | None:
        """The time that is left; None for any.

        Raises:
            ApiError: the time is over.
        """
        if self._seconds is None:
            return None
        left = self._start_time + self._seconds - time.monotonic()
        if left <= 0:
            raise _timed_out()
        return left


def _timed_out() -> ApiError:
    return ApiError(504, "the answer did not begin in the time that it may take", code="timeout")


class _Server:
    """The endpoints."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self.models: ServedModels | None = None
        self._metrics = Metrics(lambda: self.models or ())
        self.count_exchange = self._metrics.count_exchange
        self._long_texts = asyncio.Semaphore(_MAX_LONG_TEXTS_AT_ONCE)
        self._adapter_lock = asyncio.Lock()
        self._images = ImageSteps(settings)

    def max_body_bytes(self) -> int:
        """The largest size of a request's body."""
        return self._settings.most_body(
            images=any(model.reads_images for model in self.models or ())
        )

    def add_routes(self, app: FastAPI) -> None:
        app.add_api_route("/", page.page, include_in_schema=False)
        app.add_api_route("/markdown/{name}", page.script, include_in_schema=False)
        app.add_api_route("/docs", self.docs, include_in_schema=False)
        docs_folder = _docs_folder()
        if docs_folder is not None:
            app.mount("/docs", StaticFiles(directory=docs_folder / "static"))
        for method, path, endpoint, answer in (
            ("GET", "/health", self.health, documents.Health),
            ("GET", "/version", self.version, documents.Version),
            ("GET", "/metrics", self.metrics, None),
            ("GET", "/v1/models", self.list_models, documents.Models),
            ("GET", "/v1/models/{name:path}", self.show_model, documents.Model),
            ("POST", "/v1/completions", self.complete, documents.Completion),
            ("POST", "/v1/chat/completions", self.chat, documents.Completion),
            ("POST", "/v1/responses", self.respond, documents.Response),
            ("POST", MESSAGES_PATH, self.answer_messages, documents.Message),
            ("POST", f"{MESSAGES_PATH}/count_tokens", self.count_tokens, documents.TokenCount),
            ("POST", "/v1/load_lora_adapter", self.load_adapter, None),
            ("POST", "/v1/unload_lora_adapter", self.unload_adapter, None),
            ("POST", "/tokenize", self.tokenize, documents.Tokens),
            ("POST", "/detokenize", self.detokenize, documents.Text),
        ):
            self._add_route(app, method, path, endpoint, answer)
        # Load balancers ask with HEAD, and Amazon SageMaker with /ping.
        for path, endpoint in (
            ("/", page.page),
            ("/health", self.health),
            ("/v1/models", self.list_models),
        ):
            app.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)
        app.add_api_route("/ping", self.health, methods=["GET", "POST"], include_in_schema=False)
        for path in _ABSENT_PATHS:
            app.add_api_route(
                path, self.absent, methods=["GET", "POST", "DELETE"], include_in_schema=False
            )

    def _add_route(
        self,
        app: FastAPI,
        method: str,
        path: str,
        endpoint: Callable[..., Any],
        answer: type[documents.Document] | None,
    ) -> None:
        """Add an endpoint with its description. answer: the document that it answers with; None for
        a plain text."""
        error = documents.MessageError if path.startswith(MESSAGES_PATH) else documents.Error
        responses: dict[int | str, dict[str, Any]] = {"4XX": {"model": error}}
        if answer is None:
            responses[200] = {"content": {"text/plain": {"schema": {"type": "string"}}}}
        needs_key = bool(self._settings.api_keys) and path not in PATHS_WITHOUT_A_KEY
        app.add_api_route(
            path,
            endpoint,
            methods=[method],
            summary=_SUMMARIES.get(path),
            response_model=answer,
            response_class=Response if answer is None else JSONResponse,
            responses=responses,
            dependencies=[_KEY] if needs_key else [],
        )

    async def docs(self) -> Response:
        """The endpoints, to read and to try, without files from the internet."""
        if _docs_folder() is None:
            raise ApiError(
                501,
                f"this server lacks fastapi-offline, of the extra serve of {DISTRIBUTION}; "
                "see /openapi.json",
                code="missing_module",
            )
        # The addresses are relative, because the server may be behind a prefix.
        return get_swagger_ui_html(
            openapi_url="openapi.json",
            title="qsample",
            swagger_js_url="docs/swagger-ui-bundle.js",
            swagger_css_url="docs/swagger-ui.css",
            swagger_favicon_url="docs/favicon.png",
        )

    async def health(self) -> Response:
        """200 if every model answers, 503 if an engine has ended."""
        ended = self.ended()
        body = {"status": "error", "ended": ended} if ended else {"status": "ok"}
        return json_response(body, 503 if ended else 200)

    async def version(self) -> Response:
        """The version of qsample."""
        return json_response({"version": qsample.__version__})

    def ended(self) -> list[str]:
        """The names of the models whose engines take no more requests."""
        return [model.name for model in self.models or () if model.engine.closed]

    async def metrics(self) -> Response:
        """The metrics in Prometheus' text form; docs/serving.md has the names."""
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def list_models(self) -> Response:
        """The models and adapters by name."""
        return json_response(
            {"object": "list", "data": [_described(model) for model in self._served().served]}
        )

    async def show_model(
        self, name: Annotated[str, PathField(description="A served name.")]
    ) -> Response:
        """A model; all models if the path ends with a slash."""
        if not name:
            return await self.list_models()
        return json_response(_described(self._served().find(name)))

    async def complete(self, body: CompletionRequest) -> Response:
        """Continue a text, or several."""
        model = self._served().find(body.model)
        model.check_form(body.form)
        params = model.sampling_params(body)
        prompts = body.prompts
        # A million prompts, or a text that is much too long, are refused before they are encoded.
        count = len(prompts) * body.num_engine_requests
        model.check_count(count)
        for prompt in prompts:
            model.check_without_image(prompt)
            model.check_length(prompt)
        limit = TimeLimit(self._settings.request_timeout)
        with model.hold_places(count) as let_places_go:
            async with limit.of_preparation():
                encoded = await self._encode(model, prompts, body.add_special_tokens)
                for tokens in encoded:
                    model.check_room(tokens, 0 if body.token_limit == 0 else 1)
                form = await model.answer_form(body)
            if body.token_limit != 0:
                for tokens in encoded:
                    model.check_shortest(form, tokens, params, body.token_limit_field)
            choices: list[CompletionChoice] = []
            for prompt, tokens in zip(prompts, encoded, strict=True):
                echo = None
                if body.echo:
                    echo = self._echo(model, body, prompt)
                for _ in range(body.num_choices):
                    choices.append(CompletionChoice(len(choices), model, body, tokens, echo))
            answers = Answers(model, body, self._metrics, choices, form)
            max_time = limit.seconds_left()
            let_places_go()
            await answers.start(encoded, params, max_time)
        return await self._response(model, answers, body)

    def _echo(self, model: ServedModel, body: CompletionRequest, prompt: str | list[int]) -> str:
        """The text of a prompt in front of its continuation."""
        if isinstance(prompt, str):
            return prompt
        return model.tokenizer.decode(prompt, skip_special_tokens=body.skip_special_tokens)

    async def chat(self, body: ChatCompletionRequest) -> Response:
        """Answer a conversation."""
        return await self._converse(body)

    async def respond(self, body: ResponsesRequest) -> Response:
        """Answer a conversation, in items. Nothing is stored."""
        return await self._converse(body.chat, body)

    async def answer_messages(self, body: MessagesRequest) -> Response:
        """Answer a conversation, in blocks of content. Nothing is stored."""
        return await self._converse(body.chat, body)

    async def count_tokens(self, body: CountTokensRequest) -> Response:
        """The number of tokens of a conversation, tools included."""
        model = self._served().find(body.model)
        tokens, _ = await self._encode_chat(model, body.chat, body.chat.offers_tools)
        return json_response({"input_tokens": len(tokens)})

    async def _converse(
        self,
        body: ChatCompletionRequest,
        original: ResponsesRequest | MessagesRequest | None = None,
    ) -> Response:
        """Answer a conversation.

        Args:
            body: the request as a chat completion.
            original: the same request in the words of another API. The answer has these words.
        """
        model = self._served().find(body.model)
        model.check_form(body.form)
        params = model.sampling_params(body)
        model.check_count(body.num_engine_requests)
        limit = TimeLimit(self._settings.request_timeout)
        room = self._images.feature_room()
        try:
            with model.hold_places(body.num_engine_requests) as let_places_go:
                async with limit.of_preparation():
                    answers, arguments = await self._prepared(model, body, original, params, room)
                max_time = limit.seconds_left()
                let_places_go()
                await answers.start(max_time=max_time, **arguments)
            return await self._response(model, answers, body, room)
        except BaseException:
            room.give_back()
            raise

    async def _prepared(
        self,
        model: ServedModel,
        body: ChatCompletionRequest,
        original: ResponsesRequest | MessagesRequest | None,
        params: SamplingParams,
        room: FeatureRoom,
    ) -> tuple[Answers, dict[str, Any]]:
        """The answers to a conversation, and the arguments of their start but for the time.

        Args:
            model: the model.
            body: the request as a chat completion.
            original: the same request in the words of another API.
            params: the sampling parameters.
            room: takes the bytes of the images' features.
        """
        prompt, images = await self._encode_chat(model, body, body.offers_tools, room)
        model.check_room(prompt)
        prediction = await self._predicted_tokens(model, body)
        form = await model.answer_form_of_chat(
            body, prompt, needs_budget=not isinstance(original, MessagesRequest)
        )
        model.check_shortest(form, prompt, params, (original or body).token_limit_field)
        answers: Answers
        if isinstance(original, ResponsesRequest):
            answers = ResponseAnswers(model, original, self._metrics, params, prompt, form)
        elif original is not None:
            answers = MessageAnswers(model, original, self._metrics, prompt, form)
        else:
            choices = [
                ChatChoice(index, model, body, prompt, form) for index in range(body.num_choices)
            ]
            answers = Answers(model, body, self._metrics, choices, form)
        arguments = {
            "prompts": [prompt],
            "params": params,
            "prediction": prediction,
            "images": images,
            "shows_special_tokens": model.reads_special_tokens(body),
        }
        return answers, arguments

    async def _predicted_tokens(
        self, model: ServedModel, body: ChatCompletionRequest
    ) -> list[int] | None:
        """The tokens that the answer is expected to have, if the package checks guesses."""
        if body.prediction is None or model.interface.features.num_speculative_tokens == 0:
            return None
        max_characters = _MAX_CHARACTERS_OF_A_PREDICTED_TOKEN * model.max_model_len
        (tokens,) = await self._encode(model, [body.prediction.text[:max_characters]], False)
        return tokens[: model.max_model_len]

    async def load_adapter(self, body: LoadLoraRequest) -> Response:
        """Serve a LoRA adapter under a name, if the server allows it."""
        self._check_loading()
        load = partial(
            self._served().load_adapter,
            body.lora_name,
            body.lora_path,
            body.base_model_name,
            replaced=body.load_inplace,
        )

        async def load_with_lock() -> None:
            async with self._adapter_lock:
                await asyncio.to_thread(load)

        # A client that leaves does not end the loading.
        await asyncio.shield(asyncio.create_task(load_with_lock()))
        # These are vLLM's words.
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_adapter(self, body: UnloadLoraRequest) -> Response:
        """Serve a LoRA adapter no more, if the server allows it."""
        self._check_loading()
        async with self._adapter_lock:
            self._served().unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _check_loading(self) -> None:
        if self._settings.lora_dir is None:
            raise ApiError(
                404, "this server loads no adapters for its clients; start it with --lora-dir"
            )

    async def absent(self, request: Request) -> Response:
        """An OpenAI endpoint for another kind of model, or for stored objects."""
        raise ApiError(
            404,
            f"{request.url.path:.80} is not done here: this server writes text and stores nothing; "
            "there are /v1/completions, /v1/chat/completions, /v1/responses and /v1/messages",
            code="unsupported_endpoint",
        )

    async def tokenize(self, body: TokenizeRequest) -> Response:
        """The token ids of a text or a conversation."""
        model = self._served().find(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give a prompt, or messages")
        if body.prompt is not None:
            (tokens,) = await self._encode(
                model, [body.prompt], body.add_special_tokens, any_token=True
            )
        else:
            tokens, _ = await self._encode_chat(model, body, True, any_token=True)
        make_answer = partial(_token_response, model, tokens, with_texts=body.return_token_strs)
        if len(tokens) > LONG_TEXT:
            return await asyncio.to_thread(make_answer)
        return make_answer()

    async def detokenize(self, body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        model = self._served().find(body.model)
        model.check_ids(body.tokens, any_token=True)
        decode = partial(model.tokenizer.decode, body.tokens, skip_special_tokens=False)
        if len(body.tokens) > LONG_TEXT:
            text = await asyncio.to_thread(decode)
        else:
            text = decode()
        return json_response({"prompt": text})

    def _served(self) -> ServedModels:
        assert self.models is not None  # The application has started.
        return self.models

    async def _encode(
        self,
        model: ServedModel,
        prompts: Sequence[str | list[int]],
        add_special_tokens: bool,
        *,
        any_token: bool = False,
    ) -> list[list[int]]:
        """The token ids of prompts. Long texts are encoded on another thread. any_token: whether
        texts may have tokens that the model lacks."""

        def encode() -> list[list[int]]:
            encoded: list[list[int]] = []
            for prompt in prompts:
                if isinstance(prompt, str):
                    tokenizer = model.tokenizer
                    encode_text = tokenizer.tokenize if any_token else tokenizer.encode
                    prompt = encode_text(prompt, add_special_tokens=add_special_tokens)
                encoded.append(prompt)
            return encoded

        num_characters = 0
        for prompt in prompts:
            if isinstance(prompt, str):
                num_characters += len(prompt)
            else:
                model.check_ids(prompt)
        if num_characters <= LONG_TEXT:
            return encode()
        async with self._long_texts:
            return await asyncio.to_thread(encode)

    async def _encode_chat(
        self,
        model: ServedModel,
        body: ChatPrompt,
        with_tools: bool,
        room: FeatureRoom | None = None,
        *,
        any_token: bool = False,
    ) -> tuple[list[int], list[ProcessedImage]]:
        """The tokens of a conversation, and its images.

        Args:
            model: the model.
            body: the conversation.
            with_tools: whether the text describes the tools.
            room: takes the bytes of the images' features, for conversations that are answered;
                otherwise, the tokens are only counted.
            any_token: whether the text may have tokens that the model lacks.

        Raises:
            ApiError: the conversation cannot be encoded.
        """
        template = body.chat_template or ""
        if "{" in template and not self._settings.trust_request_chat_template:
            raise ApiError(
                400,
                "this server takes no chat templates of clients; name a template of the package, "
                "or start the server with --trust-request-chat-template",
                param="chat_template",
            )
        messages, addresses = take_addresses(
            body.template_messages, self._settings.limit_images_per_prompt
        )
        model.check_images(messages, addresses)
        if addresses:
            _check_no_scores(body)
        render = partial(
            model.render_chat,
            messages,
            body.template_options(with_tools=with_tools),
            body.ignored.add,
        )
        # A template is a program of the model. On the event loop, a slow template would delay
        # every request.
        try:
            text = await asyncio.to_thread(render)
        except ImportError:  # jinja2 is missing, or too old to be safe.
            raise ApiError(
                501,
                "this server cannot take messages: it lacks a jinja2 of the extra serve of "
                f"{DISTRIBUTION}",
                code="missing_module",
            ) from None
        # The template spells the special tokens out.
        encode = partial(self._encode, model, add_special_tokens=False, any_token=any_token)
        if room is not None:
            model.check_length(text)
        if not addresses:
            (tokens,) = await encode([text])
            return tokens, []
        with model.hold_places(1 if room is None else 0):
            async with self._images.turn(model, addresses) as images:
                (tokens,) = await encode([model.with_placeholders(text, images)])
                if room is not None:
                    # vision.onnx must not run for a prompt that does not fit.
                    model.check_room(tokens)
                    images = await self._with_features(model, images, room)
        return tokens, images

    async def _with_features(
        self, model: ServedModel, images: list[ProcessedImage], room: FeatureRoom
    ) -> list[ProcessedImage]:
        """The images with their features, whose bytes `room` takes."""
        start_time = time.monotonic()
        seen = await self._images.see(model, images, room)
        self._metrics.count_images(
            model.base, [len(image.rows) for image in seen], time.monotonic() - start_time
        )
        return seen

    async def _response(
        self,
        model: ServedModel,
        answers: Answers,
        body: GenerationRequest,
        room: FeatureRoom | None = None,
    ) -> Response:
        """The answers, whole or as a stream. At their end, `room` gives its bytes back."""
        self._metrics.count_ignored(model.base, body.ignored)
        headers = ignored_header(body.ignored)

        def end() -> None:
            answers.cancel()
            if room is not None:
                room.give_back()

        if body.stream:
            return EventStream(answers.events(), end, headers, answers.keep_alive)
        try:
            return json_response(await answers.whole(), headers=headers)
        finally:
            end()

    def close(self) -> None:
        """End without waiting for images."""
        self._images.close()


def _docs_folder() -> Path | None:
    found = importlib.util.find_spec(_DOCS_PACKAGE)
    return None if found is None or found.origin is None else Path(found.origin).parent


def _check_no_scores(body: ChatPrompt) -> None:
    """Raise ApiError for a conversation with images whose tokens are to be scored."""
    if not isinstance(body, ChatCompletionRequest):
        return
    if body.scores_prompt or body.scores_answers:
        raise ApiError(
            400,
            "the log-probabilities of a prompt with images are not computed; leave it out",
            param="prompt_logprobs" if body.scores_prompt else "logprob_token_ids",
        )


def _token_response(model: ServedModel, tokens: list[int], with_texts: bool) -> Response:
    """The answer of /tokenize. Its lists become JSON in parts, so that other threads get Python's
    lock in between."""
    lists: dict[str, list[Any]] = {"tokens": tokens}
    if with_texts:
        lists["token_strs"] = [model.token_texts.of(token)[0] for token in tokens]
    parts = [json_bytes({"count": len(tokens), "max_model_len": model.max_model_len})[:-1]]
    for name, items in lists.items():
        encoded = [
            json_bytes(items[start : start + _ITEMS_ENCODED_AT_ONCE])[1:-1]
            for start in range(0, len(items), _ITEMS_ENCODED_AT_ONCE)
        ]
        parts.append(b',"%b":[%b]' % (name.encode(), b",".join(encoded)))
    parts.append(b"}")
    return Response(b"".join(parts), media_type="application/json")


def _described(model: ServedModel) -> dict[str, Any]:
    description: dict[str, Any] = {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "qsample",
    }
    if model.adapter is not None:
        description["parent"] = model.base  # This is vLLM's field.
    description["max_model_len"] = model.max_model_len
    # Mistral's list of models has this field.
    description["capabilities"] = {
        "completion_chat": model.takes_chats,
        "vision": model.reads_images,
    }
    return description
