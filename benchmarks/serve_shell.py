"""A small FastAPI server around onnxruntime-genai's own engine; started by `serve.py`.

    python benchmarks/serve_shell.py MODEL --port 8000 --slots 16 --threads 2

It answers `/v1/models` and `/v1/completions` for prompts of token ids, as a whole or as a stream of tokens. On the CPU
the engine batches statically: requests wait until the running batch has ended, so an idle engine waits for as long as
requests keep arriving.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import threading
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as og
import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

COMPANY_SECONDS = 0.005  # within which the next request of a batch must arrive


class Body(BaseModel):
    """A request."""

    prompt: list[int]
    max_tokens: int = 16
    temperature: float = 1.0
    stream: bool = False
    seed: int | None = None  # ignored: an engine that batches statically takes no seed
    ignore_eos: bool = False


@dataclass(eq=False)
class Answer:
    """The items of an answer: (token, text) pairs, then None or the text of an error."""

    body: Body
    loop: asyncio.AbstractEventLoop
    items: asyncio.Queue[tuple[int, str] | str | None] = field(default_factory=asyncio.Queue)
    request: Any = None
    texts: Any = None


class EngineThread(threading.Thread):
    """Owns the engine, which only the thread that made it may use."""

    def __init__(self, model: Path, slots: int, threads: int) -> None:
        super().__init__(daemon=True)
        config = og.Config(str(model))
        options = {"intra_op_num_threads": threads, "session.intra_op.allow_spinning": "0"}
        overlay = {"model": {"decoder": {"session_options": options}}}
        config.overlay(
            json.dumps(overlay | {"engine": {"static_batching": {"max_batch_size": slots}}})
        )
        self._model = og.Model(config)
        self._tokenizer = og.Tokenizer(self._model)
        self._added: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._running: list[Answer] = []

    def add(self, body: Body) -> Answer:
        answer = Answer(body, asyncio.get_running_loop())
        self._added.put(answer)
        return answer

    def run(self) -> None:
        engine = og.Engine(self._model)
        buffer = engine.create_event_buffer(256)
        while True:
            if not self._running:
                self._begin(engine, self._added.get())
                with suppress(queue.Empty):
                    while True:
                        self._begin(engine, self._added.get(timeout=COMPANY_SECONDS))
            while not self._added.empty():
                self._begin(engine, self._added.get())
            try:
                events = list(engine.run(buffer))
            except Exception as error:
                for answer in list(self._running):
                    self._end(answer, str(error))
                continue
            for event in events:
                answer = next(
                    running for running in self._running if running.request is event.request
                )
                if event.flags & og.EngineEventFlags.TOKEN:
                    token = int(event.token)
                    item = (token, answer.texts.decode(token))
                    answer.loop.call_soon_threadsafe(answer.items.put_nowait, item)
                if event.flags & og.EngineEventFlags.FAILED:
                    self._end(answer, f"the engine says {event.error_code}")
                elif event.flags & og.EngineEventFlags.TURN_FINISHED:
                    self._end(answer, None)

    def _begin(self, engine: Any, answer: Answer) -> None:
        body = answer.body
        self._running.append(answer)
        try:
            options = og.RequestOptions()
            options.set_max_session_tokens(len(body.prompt) + body.max_tokens)
            answer.request, answer.texts = (
                engine.create_request(options=options),
                self._tokenizer.create_stream(),
            )
            turn = og.TurnOptions(answer.request)
            turn.set_do_sample(body.temperature > 0)
            turn.set_temperature(body.temperature)
            turn.set_top_k(0)
            turn.set_top_p(1.0)
            turn.set_max_generated_tokens(body.max_tokens)
            turn.set_min_generated_tokens(body.max_tokens if body.ignore_eos else 0)
            answer.request.begin_turn(np.array(body.prompt, dtype=np.int32), turn)
        except Exception as error:
            self._end(answer, str(error))

    def _end(self, answer: Answer, error: str | None) -> None:
        self._running.remove(answer)
        if answer.request is not None:
            answer.request.close()
        answer.loop.call_soon_threadsafe(answer.items.put_nowait, error)


def make_app(engine: EngineThread) -> FastAPI:
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "model", "object": "model"}]}

    @app.post("/v1/completions", response_model=None)
    async def complete(body: Body) -> StreamingResponse | dict[str, Any]:
        answer = engine.add(body)
        if body.stream:
            return StreamingResponse(events(answer), media_type="text/event-stream")
        tokens = 0
        while (item := await answer.items.get()) is not None:
            if isinstance(item, str):
                raise HTTPException(500, item)
            tokens += 1
        return {"usage": {"prompt_tokens": len(body.prompt), "completion_tokens": tokens}}

    return app


async def events(answer: Answer) -> AsyncIterator[bytes]:
    """A server-sent event per token."""
    head = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
    }
    while (item := await answer.items.get()) is not None:
        if isinstance(item, str):
            yield b"data: " + json.dumps({"error": {"message": item}}).encode() + b"\n\n"
            break
        choice = {
            "index": 0,
            "text": item[1],
            "token_ids": [item[0]],
            "logprobs": None,
            "finish_reason": None,
        }
        yield b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    engine = EngineThread(options.model, options.slots, options.threads)
    engine.start()
    uvicorn.run(make_app(engine), host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
