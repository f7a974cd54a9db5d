"""Whatever is wrong with a request is a ValueError where it is added, and reaches nobody else."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from qsample.errors import ArgumentError
from qsample.runtime import CausalLM, Engine, SamplingParams
from tests.helpers.fake_package import VOCAB
from tests.helpers.requests import ENDLESS, FREE, expected, outcome


class Odd:
    """Nothing can be said of it."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        raise OSError("no")


def nested(depth: int = 100_000) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def mapping_of_mappings() -> dict[str, Any]:
    value: dict[str, Any] = {"input_ids": [5]}
    for _ in range(5000):
        value = {"input_ids": value}
    return value


DEEP = nested()
HUGE = 10**5000  # Python does not even print it


def said(content: Any, role: Any = "user") -> list[dict[Any, Any]]:
    return [{"role": role, "content": content}]


INPUTS: dict[str, Any] = {
    "ids beyond int64": [2**70],
    "ids below int64": [5, -(2**70)],
    "an id that does not print": [HUGE],
    "the first beyond int64": [2**63],
    "an unsigned array beyond int64": np.array([5, 2**63 + 5], dtype=np.uint64),
    "an array of objects": np.array([5, 2**70], dtype=object),
    "negative": [-1],
    "beyond the vocabulary": [5, VOCAB],
    "floats": [5.0],
    "a float": [5, 6.5],
    "not a number": [math.nan],
    "an array of floats": np.array([5.0]),
    "bool": [True],
    "an array of bool": np.array([True]),
    "complex": [1j],
    "dates": np.array(["2020"], dtype="datetime64[D]"),
    "None in a list": [None],
    "ids and text": [5, "a"],
    "rows and text": [[5], "a"],
    "two rows": [[5], [6]],
    "nested": DEEP,
    "nested in a list": [5, DEEP],
    "nested mappings": mapping_of_mappings(),
    "no repr": [Odd()],
    "no array": Odd(),
    "three axes": np.zeros((1, 1, 1), dtype=np.int64),
    "no axis": np.array(5),
    "a number": 5,
    "bytes": b"abc",
    "a set": {5},
    "a mapping": {"a": 1},
    "an iterator": iter([5]),
    "a tensor of floats": torch.zeros(2),
    "a tensor without data": torch.zeros(2, device="meta", dtype=torch.long),
    "a sparse tensor": torch.zeros(2, 2, dtype=torch.long).to_sparse(),
    "a mask of another shape": {"input_ids": [[5, 6]], "attention_mask": [[1]]},
    "a mask of text": {"input_ids": [[5, 6]], "attention_mask": "ab"},
    "a mask of halves": {"input_ids": [[5, 6]], "attention_mask": [[0.5, 1]]},
    "a nested mask": {"input_ids": [[5, 6]], "attention_mask": DEEP},
    "half a character": "a\ud800",
    "half a character in a list": ["\udfff"],
    "too long": [5] * 1000,
    "a message without content": said(None),
    "a message of a number": said(5),
    "half a character in a message": said("\ud83d"),
    "a nested message": said(DEEP),
    "a message without repr": said(Odd()),
    "a message of an image": said([{"type": "image"}]),
    "a message without role": [{"content": "a"}],
    "a message with a number as its role": said("a", 5),
    "a message with a number as its key": [{5: "user"}],
    "messages and a number": [*said("a"), 5],
}
OPTIONS: dict[str, list[Any]] = {
    "temperature": [math.nan, math.inf, "a", Odd(), DEEP, HUGE, -1, True, 1j],
    "top_k": [2**70, -1, 1.5, "a", Odd(), DEEP, HUGE],
    "top_p": [0, 2, -1, "a", Odd()],
    "repetition_penalty": [0, -1, 1e40, "a"],
    "max_new_tokens": [0, -1, 2**70, HUGE, 1.5, "a", Odd(), DEEP],
    "min_new_tokens": [-1, 2**70, "a"],
    "max_length": [0, -1, 2**70, "a"],
    "do_sample": ["a", 5, Odd()],
    "eos_token_id": [
        2**70, [2**70], HUGE, -1, [-1], [VOCAB], range(10**6), "a", ["a"], [1.5], [None], [True], DEEP, [DEEP], Odd(),
        [Odd()], {3: 4}, b"ab", np.array([[3]]),
    ],
    "logit_bias": [{2**70: 1}, {-1: 1}, {VOCAB: 1}, {"a": 1}, {5: "a"}, {5: math.nan}, {5: 1e40}, {5: Odd()}, 5, DEEP],
    "seed": [2**70, HUGE, -1, "a", 1.5, True, [1, 2], [], [None], [2**70], range(10**9), DEEP, Odd(), [Odd()]],
    "stop_strings": [
        "", [""], 5, [5], "\ud800", ["a", "\udc00"], DEEP, [DEEP], Odd(), [Odd()], "a" * 10**6, ["ab"] * 10**5, {"a"},
        b"a", iter(["a"]),
    ],
    "allowed_tokens": [
        5, "a", DEEP, Odd(), np.zeros(3, np.int32), np.zeros(10, np.int64), np.zeros((2, 10), np.int32), [[1], [1, 2]],
    ],
    "params": [5, "a", DEEP, Odd(), [5], [], [SamplingParams()] * 2, {"temperature": 1}],
    "timeout": ["a", math.nan, DEEP, Odd(), 1j],
    "generation_config": [5, "a", DEEP, Odd(), {"temperature": "a"}],
    "pad_token_id": [-1, 2**70, VOCAB, "a", DEEP, Odd()],
    "tokenizer": [5, "a"],
    "nonsense": [1],
    "streamer": [5],
    "tools": [5, "a", [5], DEEP, Odd(), [Odd()]],
    "chat_template": [5, "{{", "{% for", "{{ 1 / 0 }}", "{{ x.y.z }}", "{{ messages[99].content.x }}", "\ud800", DEEP],
    "chat_template_kwargs": [5, "a", {5: 5}, DEEP],
}  # fmt: skip
CHAT = ("tools", "chat_template", "chat_template_kwargs")


def check_refused(call: Callable[[], object], what: str) -> None:
    """A ValueError that can be read."""
    error: Exception | None = None
    try:
        call()
    except Exception as raised:
        error = raised
    assert type(error) in (ValueError, ArgumentError), (what, repr(error)[:300])
    assert 10 < len(str(error)) < 1000, (what, error)


def test_every_wrong_argument_is_a_value_error_and_harms_nobody(fake_model: Callable[..., CausalLM]) -> None:
    with Engine(fake_model(allowed_tokens=True, logit_bias=True), slots=2, max_waiting=0) as engine:
        neighbour = engine.add_request([5], ENDLESS, seed=0)
        for what, inputs in INPUTS.items():
            check_refused(lambda: engine.add_request(inputs, max_new_tokens=2, timeout=60), what)  # noqa: B023
        for name, values in OPTIONS.items():
            prompt: Any = said("a") if name in CHAT else [5]
            for index, value in enumerate(values):
                options = {name: value} if name in ("params", "max_new_tokens") else {name: value, "max_new_tokens": 2}
                call = lambda: engine.add_request(prompt, **({"timeout": 60} | options))  # noqa: B023, E731
                check_refused(call, f"{name} {index}")
        assert outcome(engine.add_request([6], FREE, seed=1)) == expected([6], FREE, 1)
        assert outcome(neighbour) == expected([5], ENDLESS, 0)
        assert engine._guides == {}
