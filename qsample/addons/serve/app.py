"""The web application: OpenAI's endpoints over the engines of the served models."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
    json_bytes,
    json_response,
)
from qsample.addons.serve.images import MediaReader, take_addresses
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
from qsample.text.tokenizer import LONG_TEXT

ACCESS_LOG: Final = "qsample.access"  # the logger of a line for each request
# OpenAI's endpoints for other models and for stored objects.
_SUMMARIES: Final = {  # the others are called like their methods
    "/v1/completions": "Continue prompts",
    "/v1/chat/completions": "Answer a chat",
    "/v1/responses": "Create a response",
}
_ABSENT: Final = (
    "embeddings moderations images/{rest:path} audio/{rest:path} videos{rest:path} realtime{rest:path} "
    "responses/{rest:path} conversations{rest:path} files{rest:path} batches{rest:path} assistants{rest:path} "
    "threads{rest:path} vector_stores{rest:path} fine_tuning/{rest:path}"
)
_LONG_TEXTS: Final = 2  # that are encoded at once
_SEEN_AT_ONCE: Final = 2  # requests whose images are decoded or computed
_PREDICTED: Final = (
    32  # characters that a token of a prediction may have; the rest of the text is left out
)
_WRITTEN: Final = 2**16  # items of a list that become JSON at once: Python's lock is held meanwhile
# For the description alone: the middleware `ApiKeys` looks at keys.
_KEY: Final = Depends(HTTPBearer(auto_error=False, description="An API key of this server."))
_DOCS_PACKAGE: Final = (
    "fastapi_offline"  # it brings the files of Swagger UI; FastAPI loads them from the internet
)


def make_app(settings: ServeSettings, models: ServedModels | None = None) -> FastAPI:
    """An ASGI application that loads its models at its start, unless `models` has them, and closes them at its end.

    settings: the models and the limits. Raises QsampleError at its start if a model cannot be loaded.

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
            expose_headers=["Retry-After", "X-Request-Id"],
        )
    app.state.server = server
    return app


class _Server:
    """The endpoints."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self.models: ServedModels | None = None
        self._metrics = Metrics(lambda: self.models or ())
        self.count_exchange = self._metrics.count_exchange
        # A long text takes some hundred times its size while it is encoded.
        self._encoding = asyncio.Semaphore(_LONG_TEXTS)
        self._loading = asyncio.Lock()  # of an adapter
        self._media = MediaReader(
            settings.max_image_bytes,
            settings.allowed_media_domains,
            settings.allowed_local_media_path,
        )
        # Decoding takes memory, vision.onnx all cores: the others wait, and the event loop goes on.
        self._seeing = ThreadPoolExecutor(_SEEN_AT_ONCE, thread_name_prefix="qsample-images")

    def max_body_bytes(self) -> int:
        """Bytes of a request."""
        return self._settings.most_body(
            images=any(model.reads_images for model in self.models or ())
        )

    def add_routes(self, app: FastAPI) -> None:
        app.add_api_route("/", page.page, include_in_schema=False)
        app.add_api_route("/markdown/{name}", page.script, include_in_schema=False)
        app.add_api_route("/docs", self.docs, include_in_schema=False)
        if (folder := _docs_folder()) is not None:
            app.mount("/docs", StaticFiles(directory=folder / "static"))
        for method, path, endpoint, document in (
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
            error = documents.MessageError if path.startswith(MESSAGES_PATH) else documents.Error
            text: dict[int | str, dict[str, Any]] = {
                200: {"content": {"text/plain": {"schema": {"type": "string"}}}}
            }
            app.add_api_route(
                path,
                endpoint,
                methods=[method],
                summary=_SUMMARIES.get(path),
                response_model=document,
                response_class=Response if document is None else JSONResponse,
                responses={**(text if document is None else {}), "4XX": {"model": error}},
                dependencies=[_KEY]
                if self._settings.api_keys and path not in PATHS_WITHOUT_A_KEY
                else [],
            )
        for path, endpoint in (
            ("/", page.page),
            ("/health", self.health),
            ("/v1/models", self.list_models),
        ):
            app.add_api_route(
                path, endpoint, methods=["HEAD"], include_in_schema=False
            )  # load balancers ask so
        app.add_api_route(
            "/ping", self.health, methods=["GET", "POST"], include_in_schema=False
        )  # Amazon SageMaker's
        for path in _ABSENT.split():
            app.add_api_route(
                f"/v1/{path}",
                self.absent,
                methods=["GET", "POST", "DELETE"],
                include_in_schema=False,
            )

    async def docs(self) -> Response:
        """The endpoints, to read and to try, without files from the internet."""
        if _docs_folder() is None:
            text = f"this server lacks fastapi-offline, of the extra serve of {DISTRIBUTION}; see /openapi.json"
            raise ApiError(501, text, code="missing_module")
        return get_swagger_ui_html(
            openapi_url="openapi.json",  # relative: the server may be behind a prefix
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
        make_guide, params, prompts = (
            model.guides(body.form),
            model.sampling_params(body),
            body.prompts,
        )
        model.check_count(
            len(prompts) * body.num_engine_requests
        )  # before a million of them are encoded
        for prompt in prompts:
            model.check_without_image(prompt)
            model.check_length(prompt)  # before a text that is much too long is encoded
        rows = await self._encode(model, prompts, body.add_special_tokens)
        for row in rows:
            model.check_room(row, 0 if body.token_limit == 0 else 1)
        choices: list[CompletionChoice] = []
        for prompt, row in zip(prompts, rows, strict=True):
            echo = None
            if body.echo:
                echo = prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt)
            for _ in range(body.num_choices):
                choices.append(CompletionChoice(len(choices), model, body, row, echo))
        answers = Answers(model, body, self._metrics, choices)
        await answers.start(rows, params, make_guide, self._settings.request_timeout)
        return await _response(answers, body)

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
        model, chat = self._served().find(body.model), body.chat
        return json_response(
            {"input_tokens": len((await self._encode_chat(model, chat, chat.offers_tools))[0])}
        )

    async def _converse(
        self, body: ChatCompletionRequest, given: ResponsesRequest | MessagesRequest | None = None
    ) -> Response:
        """Answer a conversation; with `given`, the same in the words of another API, in these words."""
        model = self._served().find(body.model)
        make_guide, params = model.guides(body.form), model.sampling_params(body)
        model.check_count(body.num_engine_requests)
        prompt, images = await self._encode_chat(
            model, body, body.offers_tools, check=model.check_length
        )
        model.check_room(prompt)
        if images:
            if body.scores_prompt:
                text = (
                    "the log-probabilities of a prompt with images are not computed; leave it out"
                )
                raise ApiError(400, text, param="prompt_logprobs")
            model.check_places(
                body.num_engine_requests
            )  # before vision.onnx runs for an answer that gets none
            images = await self._see(model, images)
        expected = None
        if body.prediction is not None and model.interface.features.num_speculative_tokens:
            text = body.prediction.text[: _PREDICTED * model.max_model_len]
            expected = (await self._encode(model, [text], False))[0][: model.max_model_len]
        answers: Answers
        if isinstance(given, ResponsesRequest):
            answers = ResponseAnswers(model, given, self._metrics, params, prompt)
        elif given is not None:
            answers = MessageAnswers(model, given, self._metrics, prompt)
        else:
            choices = [ChatChoice(index, model, body, prompt) for index in range(body.num_choices)]
            answers = Answers(model, body, self._metrics, choices)
        await answers.start(
            [prompt], params, make_guide, self._settings.request_timeout, expected, images
        )
        return await _response(answers, body)

    async def load_adapter(self, body: LoadLoraRequest) -> Response:
        """Serve a LoRA adapter under a name, if the server allows it."""
        self._check_loading()
        load = partial(
            self._served().load_adapter, body.lora_name, body.lora_path, body.base_model_name
        )

        async def alone() -> None:
            async with self._loading:
                await asyncio.to_thread(load, replaced=body.load_inplace)

        await asyncio.shield(asyncio.create_task(alone()))  # a client that leaves does not end it
        return PlainTextResponse(
            f"Success: LoRA adapter '{body.lora_name}' added successfully."
        )  # vLLM's words

    async def unload_adapter(self, body: UnloadLoraRequest) -> Response:
        """Serve a LoRA adapter no more, if the server allows it."""
        self._check_loading()
        async with self._loading:
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
            f"{request.url.path:.80} is not done here: this server writes text and stores nothing; there are "
            "/v1/completions, /v1/chat/completions, /v1/responses and /v1/messages",
            code="unsupported_endpoint",
        )

    async def tokenize(self, body: TokenizeRequest) -> Response:
        """The token ids of a text or a conversation."""
        model = self._served().find(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give a prompt, or messages")
        if body.prompt is not None:
            (ids,) = await self._encode(model, [body.prompt], body.add_special_tokens)
        else:
            ids, _ = await self._encode_chat(model, body, True)

        def answer() -> Response:
            lists: dict[str, list[Any]] = {"tokens": ids}
            if body.return_token_strs:
                lists["token_strs"] = [model.token_texts.of(token)[0] for token in ids]
            parts = [json_bytes({"count": len(ids), "max_model_len": model.max_model_len})[:-1]]
            for name, items in lists.items():
                pieces = (
                    json_bytes(items[start : start + _WRITTEN])[1:-1]
                    for start in range(0, len(ids), _WRITTEN)
                )
                parts.append(b',"%b":[%b]' % (name.encode(), b",".join(pieces)))
            return Response(b"".join([*parts, b"}"]), media_type="application/json")

        return await asyncio.to_thread(answer) if len(ids) > LONG_TEXT else answer()

    async def detokenize(self, body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        model = self._served().find(body.model)
        model.check_ids(body.tokens)
        decode = partial(model.tokenizer.decode, body.tokens, skip_special_tokens=False)
        return json_response(
            {
                "prompt": await asyncio.to_thread(decode)
                if len(body.tokens) > LONG_TEXT
                else decode()
            }
        )

    def _served(self) -> ServedModels:
        assert self.models is not None  # the application has started
        return self.models

    async def _encode(
        self, model: ServedModel, prompts: Sequence[str | list[int]], special: bool
    ) -> list[list[int]]:
        def encode() -> list[list[int]]:
            return [
                model.tokenizer.encode(prompt, add_special_tokens=special)
                if isinstance(prompt, str)
                else prompt
                for prompt in prompts
            ]

        for prompt in prompts:
            if not isinstance(prompt, str):
                model.check_ids(prompt)
        if sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) <= LONG_TEXT:
            return encode()
        async with self._encoding:
            return await asyncio.to_thread(encode)

    async def _encode_chat(
        self,
        model: ServedModel,
        body: ChatPrompt,
        with_tools: bool,
        check: Callable[[str], object] = str,
    ) -> tuple[list[int], list[ProcessedImage]]:
        """The tokens of a conversation, and its images. check: looks at its text before it is encoded."""
        template = body.chat_template or ""
        if "{" in template and not self._settings.trust_request_chat_template:
            text = (
                "this server takes no chat templates of clients; name a template of the package, "
                "or start the server with --trust-request-chat-template"
            )
            raise ApiError(400, text, param="chat_template")
        messages, addresses = take_addresses(
            body.template_messages, self._settings.limit_images_per_prompt
        )
        model.check_images(messages, addresses)
        render = partial(model.render_chat, messages, body.template_options(with_tools=with_tools))
        # A template is a program of the model; on the event loop, a slow template would delay everybody.
        try:
            text = await asyncio.to_thread(render)
        except ImportError:  # jinja2 is missing, or too old to be safe
            text = f"this server cannot take messages: it lacks a jinja2 of the extra serve of {DISTRIBUTION}"
            raise ApiError(501, text, code="missing_module") from None
        check(text)
        images: list[ProcessedImage] = []
        if addresses:
            files = await self._media.read(addresses)
            loop = asyncio.get_running_loop()
            images = await loop.run_in_executor(self._seeing, model.process_images, files)
            text = model.with_placeholders(text, images)
        return (await self._encode(model, [text], False))[
            0
        ], images  # the template spells the special tokens out

    async def _see(self, model: ServedModel, images: list[ProcessedImage]) -> list[ProcessedImage]:
        """The images with their features."""
        began = time.monotonic()
        loop = asyncio.get_running_loop()
        seen = await loop.run_in_executor(self._seeing, model.model.images.with_features, images)
        self._metrics.count_images(
            model.base, [len(image.rows) for image in seen], time.monotonic() - began
        )
        return seen

    def close(self) -> None:
        """Wait for no image."""
        self._seeing.shutdown(wait=False, cancel_futures=True)


def _docs_folder() -> Path | None:
    found = importlib.util.find_spec(_DOCS_PACKAGE)
    return None if found is None or found.origin is None else Path(found.origin).parent


async def _response(answers: Answers, body: GenerationRequest) -> Response:
    return (
        EventStream(answers.events(), answers.cancel)
        if body.stream
        else json_response(await answers.whole())
    )


def _described(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "qsample",
        **({} if model.adapter is None else {"parent": model.base}),  # as in vLLM
        "max_model_len": model.max_model_len,
        # as in Mistral's list of models
        "capabilities": {"completion_chat": model.takes_chats, "vision": model.reads_images},
    }
