"""Prompts and parameters for the models of fake packages, fixed and random; sequences, requests and the reference's
answers to them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from qsample.runtime import CausalLM, Request, SamplingParams
from qsample.runtime.prepare import parameter_row
from qsample.runtime.sequence import Sequence, SequenceRequest
from tests.helpers import fake_reference
from tests.helpers.fake_package import EOS, MAX_POSITIONS

PROMPTS = [[5, 6, 7], [9, 200, 31, 4, 5, 6, 7, 8, 9, 10, 11], [77], [50, 51, 52, 53, 54]]
GREEDY = SamplingParams(temperature=0, max_new_tokens=24)
RANDOM = SamplingParams(
    temperature=0.8,
    repetition_penalty=1.3,
    presence_penalty=0.2,
    frequency_penalty=0.1,
    max_new_tokens=24,
)
FREE = SamplingParams(temperature=0.9, max_new_tokens=20, eos_token_id=())
ENDLESS = SamplingParams(temperature=0.9, max_new_tokens=240, eos_token_id=())


def mixed() -> list[SamplingParams]:
    """Greedy and random rows, other lengths and stop ids, in one batch."""
    return [
        GREEDY,
        RANDOM,
        SamplingParams(temperature=1.5, max_new_tokens=9, eos_token_id=()),
        SamplingParams(
            temperature=0.5,
            repetition_penalty=1.1,
            max_new_tokens=30,
            eos_token_id=tuple(range(3, 60)),
        ),
    ]


def random_params(generator: random.Random, most: int = 24) -> SamplingParams:
    """Greedy or random, penalties on or off, stop ids that are often hit, any length."""
    return SamplingParams(
        temperature=generator.choice([0.0, 0.6, 1.0, 1.7]),
        repetition_penalty=generator.choice([1.0, 1.0, 1.2, 0.8]),
        presence_penalty=generator.choice([0.0, 0.4]),
        frequency_penalty=generator.choice([0.0, 0.3, -0.1]),
        min_new_tokens=generator.choice([None, 0, 2]),
        max_new_tokens=generator.randrange(2, most),
        eos_token_id=generator.choice([None, (), range(3, 12), range(40, 70)]),
    )


def random_prompt(generator: random.Random, most: int = 20) -> list[int]:
    return [generator.randrange(3, 290) for _ in range(generator.randrange(1, most))]


def make_sequence(
    model: CausalLM,
    prompt: list[int],
    params: SamplingParams,
    seed: int,
    capacity: int,
    **options: Any,
) -> Sequence:
    """A sequence without a text, for rows of `capacity` tokens; it returns all optional outputs of
    the package. options: further fields of `SequenceRequest`."""
    parameters = parameter_row(model.interface, params, len(prompt), capacity, (EOS,))
    output_names = tuple(spec.name for spec in model.interface.token_outputs)
    fields = {"output_names": output_names, **options}
    ids = np.array(prompt, dtype=np.int64)
    return Sequence(SequenceRequest(ids, parameters, seed, **fields))


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def wait_for_token(request: Request) -> None:
    """Without reading: a reader that leaves cancels."""
    wait_until(lambda: request.completion_tokens > 0)


def expected(prompt: list[int], params: SamplingParams, seed: int) -> tuple[list[int], str]:
    return fake_reference.generate(prompt, params, seed, MAX_POSITIONS)


async def read_tokens(request: Request) -> list[int]:
    """All tokens of a request, as they come."""
    return [token async for delta in request for token in delta.token_ids]


def outcome(request: Request) -> tuple[list[int], str]:
    output = request.result(60)
    return output.token_ids, output.finish_reason
