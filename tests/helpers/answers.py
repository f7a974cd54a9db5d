"""A served model without an engine, whose answers a test writes itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from qsample.addons.serve.parsers import REASONING_FORMATS, TOOL_FORMATS, ReasoningReader
from qsample.contract.interface import Features, Interface
from qsample.runtime import Delta, RequestOutput
from qsample.runtime.request import RequestTiming, Usage

END = 1  # the model's end of text, which has no place in a text


class Texts:
    """As `TokenTexts`: token 2 is "c", 3 is "ddd", 4 is "é"."""

    def of(self, token: int) -> tuple[str, bytes]:
        text = {2: "c", 3: "ddd", 4: "é"}.get(token, f"<{token}>")
        return text, text.encode()

    def label(self, token: int) -> str:
        return self.of(token)[0]

    def width(self, token: int, *, skip_special_tokens: bool = True) -> int:
        return 0 if token == END else len(self.of(token)[0])


def optional_outputs(*tokens: int) -> dict[str, np.ndarray]:
    """Token number i has the log-probability -i - 1, and behind it stand 7 with -0.5, 8 with -1.5 and 9 with -inf."""
    count = len(tokens)
    return {
        "logprobs": -1.0 - np.arange(count, dtype=np.float32)[:, None],
        "top_logprob_ids": np.tile([7, 8, 9], (count, 1)),
        "top_logprobs": np.tile(np.array([-0.5, -1.5, -np.inf], np.float32), (count, 1)),
    }


def delta(*tokens: int, text: str = "") -> Delta:
    return Delta([*tokens], text, 0.0, optional_outputs(*tokens))


def ended(
    *tokens: int,
    text: str | None = "",
    reason: str = "stop",
    stop: str | None = None,
    usage: Usage | None = None,
) -> RequestOutput:
    timing = RequestTiming(0.0, 0.0, 0.0)
    usage = usage or Usage(10, len(tokens), 4)
    return RequestOutput([*tokens], text, reason, stop, 0, usage, timing, optional_outputs(*tokens))


class Scripted:
    """As `Request`: gives its deltas, then its output; an exception in place of either is raised."""

    def __init__(
        self, *deltas: Delta | Exception, output: RequestOutput, prompt_tokens: int = 10
    ) -> None:
        self.deltas, self.output, self.prompt_tokens = deltas, output, prompt_tokens
        self.cancelled = 0
        self.options: Mapping[str, Any] = {}
        self.arguments: tuple[Any, ...] = ()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        for item in self.deltas:
            if isinstance(item, Exception):
                raise item
            yield item

    def __await__(self) -> Generator[None, None, RequestOutput]:
        yield from ()
        return self.output

    def result(self, timeout: float) -> RequestOutput:
        assert timeout == 0
        return self.output

    def cancel(self) -> None:
        self.cancelled += 1


def served(
    *requests: Scripted | Exception, features: Features | None = None, reasoning: str | None = None
) -> Any:
    """As `ServedModel`: its `add` gives the requests in turn, and `places` has what it was asked for.

    reasoning: the format of thoughts; None = none.
    """
    waiting, places = list(requests), list[int]()

    def add(*arguments: Any, **options: Any) -> Scripted:
        request = waiting.pop(0)
        if isinstance(request, Exception):
            raise request
        request.arguments, request.options = arguments, options
        return request

    return SimpleNamespace(
        name="tiny",
        base="tiny",
        interface=Interface(
            300, (), features=features or Features(logprobs=True, top_logprobs=3, probs=True)
        ),
        ends={END},
        token_texts=Texts(),
        tool_format=TOOL_FORMATS["hermes"],
        reasoning_reader=lambda prompt, form: (
            None
            if reasoning is None or not form.may_have_thoughts
            else ReasoningReader(REASONING_FORMATS[reasoning], "")
        ),
        tokenizer=SimpleNamespace(
            tokenize=lambda text, *, add_special_tokens: [*text] + ["<s>"] * add_special_tokens
        ),
        add=add,
        check_places=places.append,
        places=places,
    )
