"""What a server holds for a request with images, and lets go at its end; the time that it may take."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from qsample.addons.serve import ServeSettings, make_app
from qsample.addons.serve.app import _Server
from qsample.addons.serve.image_steps import ImageSteps
from qsample.errors import EngineClosedError
from qsample.package.package import Package
from tests.helpers import hostile_images
from tests.helpers.fake_images import DIM, ROWS

CHAT = "/v1/chat/completions"


def chat(*sizes: tuple[int, int], **more: Any) -> dict[str, Any]:
    files = [hostile_images.large_png(*size) for size in sizes]
    urls = [f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in files]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": "a"}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2, **more}


@pytest.fixture
def make(fake: Callable[..., Package]) -> Callable[..., TestClient]:
    package = fake(image=ROWS)

    def make(**settings: Any) -> TestClient:
        chosen = {"models": {"tiny": str(package.path)}, "slots": 2, **settings}
        return TestClient(make_app(ServeSettings(**chosen)), raise_server_exceptions=False)

    return make


@pytest.fixture
def client(make: Callable[..., TestClient]) -> Iterator[TestClient]:
    with make() as client:
        yield client


def server_of(client: TestClient) -> _Server:
    server: _Server = client.app.state.server  # type: ignore[attr-defined]
    return server


def held(client: TestClient) -> tuple[int, int, int]:
    """The bytes of features and of files, and the places of requests that are prepared."""
    images = server_of(client)._images
    places = server_of(client)._served().find("tiny")._places
    return images._features._num_taken, images._files._num_taken, places._num_held


@pytest.mark.parametrize("stream", [False, True])
def test_all_is_given_back_at_the_end(
    stream: bool, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    while_seen: list[tuple[int, int, int]] = []
    see = ImageSteps.see

    async def spy(self: ImageSteps, *given: Any) -> Any:
        seen = await see(self, *given)
        while_seen.append(held(client))
        return seen

    monkeypatch.setattr(ImageSteps, "see", spy)
    answer = client.post(CHAT, json=chat((8, 8), (16, 12), stream=stream, n=2))
    assert answer.status_code == 200, answer.text
    ((features, files, places),) = while_seen
    assert features == 4 * DIM * (4 + 12)  # float32, and a placeholder for each patch of 4 x 4
    assert files > 0
    assert places == 2
    assert held(client) == (0, 0, 0)


@pytest.mark.parametrize(
    "body",
    [
        chat((8, 8), max_tokens=-1),
        chat((1, 3000)),
        chat((8, 8), logprobs=True, top_logprobs=3),
        {**chat((8, 8)), "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    ],
)
def test_all_is_given_back_after_an_error(body: dict[str, Any], client: TestClient) -> None:
    assert client.post(CHAT, json=body).status_code == 400
    assert held(client) == (0, 0, 0)
    assert client.post(CHAT, json=chat((8, 8))).status_code == 200


async def for_ever(*_: Any, **__: Any) -> Any:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("_encode_chat", CHAT, chat((8, 8))),
        ("_encode_chat", "/v1/responses", {"input": "x"}),
        ("_encode", "/v1/completions", {"prompt": "x"}),
    ],
)
def test_preparing_ends_with_the_time_of_a_request(
    method: str,
    path: str,
    body: dict[str, Any],
    make: Callable[..., TestClient],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_Server, method, for_ever)
    with make(request_timeout=0.1) as client:
        answer = client.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        assert held(client) == (0, 0, 0)


def test_a_model_that_is_closed_reads_and_sees_no_image(client: TestClient) -> None:
    assert client.post(CHAT, json=chat((8, 8))).status_code == 200
    model = server_of(client)._served().find("tiny")
    model.close()
    with pytest.raises(EngineClosedError, match="the server ends"):
        model.process_images([hostile_images.large_png(8, 8)])
    processor = model.model.images.processor
    assert processor is not None
    image = processor.process(hostile_images.large_png(12, 8))
    with pytest.raises(Exception, match="cannot read an image"):
        model.model.images.with_features([image])
