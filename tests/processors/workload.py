"""Compares random rows of packages alone with the same rows in company, on the processor that runs this.

    python -m tests.processors.workload PACKAGE ... [--rows 100] [--seed 0]

Prints a line of JSON a package: how its products round here, its rows, comparisons and differences, and the first of
these in words. The exit status is 1 if there is a difference. Needs onnxruntime, numpy and tokenizers only, so that it
runs under an emulator. The packages have log-probabilities and logit_bias.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np

from qsample.runtime import CausalLM, Engine, SamplingParams, load

FIRST_TOKEN: Final = 4  # those before are special
BEGINNING: Final = (
    70  # tokens that long prompts have in common: more than the piece that a file holds at least
)
LIKELY: Final = 12.0  # nats on top of a logit
SHOWN: Final = 3  # differences of a package
TIMEOUT: Final = 600.0

Outcome = tuple[list[int], str, bytes]
"""A row's tokens, why it ended, and the bits of its log-probabilities."""


@dataclass(frozen=True)
class Row:
    """A prompt with its parameters, and the number that is its seed, too."""

    number: int
    prompt: list[int]
    params: SamplingParams


def random_rows(number: int, vocab_size: int, seed: int) -> list[Row]:
    """Prompts of 1 to 40 tokens; every sixth begins with the same 70. A third begin like an earlier one, or are the
    same; a third repeat three tokens and go on to, for guesses."""
    generator = random.Random(seed)
    beginning = generator.choices(range(FIRST_TOKEN, vocab_size), k=BEGINNING)
    rows: list[Row] = []
    for index in range(number):
        length = generator.choice([1, 2, generator.randrange(3, 41)])
        repeats = generator.random() < 1 / 3
        words = generator.choices(range(FIRST_TOKEN, vocab_size), k=3 if repeats else length)
        prompt = [words[place % len(words)] for place in range(length)]
        if rows and generator.random() < 1 / 3:
            earlier = generator.choice(rows).prompt
            kept = generator.choice([len(earlier), generator.randrange(len(earlier) + 1)])
            prompt = earlier if kept == len(earlier) else [*earlier[:kept], *prompt[:40]]
        if index % 6 == 5:
            prompt = [*beginning, *prompt[:40]]
        params = SamplingParams(
            temperature=generator.choice([0.0, 0.0, 0.7, 1.0, 1.5]),
            top_k=generator.choice([0, 0, 20]),
            top_p=generator.choice([1.0, 1.0, 0.9]),
            repetition_penalty=1.0 if repeats else generator.choice([1.0, 1.2]),
            max_new_tokens=generator.randrange(2, 17),
            eos_token_id=generator.choice([None, (), tuple(range(100, 120))]),
            logit_bias=dict.fromkeys(words, LIKELY) if repeats else None,
        )
        rows.append(Row(index, prompt, params))
    return rows


class Company:
    """Ways to run rows of a model next to others, each a function of rows that gives their outcomes in order.

    Attributes:
        reused: prompt tokens so far that were not read again.
        accepted: guesses so far that were right.
    """

    def __init__(self, model: CausalLM, generator: random.Random) -> None:
        self.model = model
        self.generator = generator
        self.guesses = model.features.num_speculative_tokens
        self.reused = self.accepted = 0

    def alone(self, rows: list[Row]) -> Iterator[Outcome]:
        """Each row in a call of its own: the standard of all comparisons."""
        for row in rows:
            yield from self._generate([row], [row.params])

    def ways(self) -> dict[str, Callable[[list[Row]], Iterator[Outcome]]]:
        return {
            "in batches of 2 to 8": self._batches,
            "in an engine of one slot": lambda rows: self._engine(rows, slots=1),
            "in engines of several slots": self._engines,
            "behind a prefix file": self._behind_a_file,
        }

    def _batches(self, rows: list[Row]) -> Iterator[Outcome]:
        for some in self._cut(rows, 2, 8):
            yield from self._generate(some, self._guessing(some), prefill_chunk_size=self._chunk())

    def _engines(self, rows: list[Row]) -> Iterator[Outcome]:
        """One after the other, each with its own slots and chunks."""
        for some in self._cut(rows, 10, 30):
            slots = self.generator.choice([2, 3, 5, 8])
            yield from self._engine(some, slots=slots, prefill_chunk_size=self._chunk())

    def _behind_a_file(self, rows: list[Row]) -> Iterator[Outcome]:
        long = [row.prompt for row in rows if len(row.prompt) >= BEGINNING]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "prefix")
            if long:
                self.model.save_prefix(long[0][:BEGINNING], file)
            yield from self._engine(rows, slots=3, prefixes=[file] if long else [])

    def _generate(
        self, rows: list[Row], params: list[SamplingParams], **options: Any
    ) -> Iterator[Outcome]:
        seeds = [row.number for row in rows]
        output = self.model.generate([row.prompt for row in rows], params, seed=seeds, **options)
        self.accepted += output.timing.drafts.num_accepted_tokens
        for index, tokens in enumerate(output.token_ids):
            bits = output.logprobs[index, : len(tokens)].tobytes()
            yield tokens, output.finish_reasons[index], bits

    def _engine(self, rows: list[Row], **options: Any) -> Iterator[Outcome]:
        """All rows in one engine. They arrive one by one or several at once, while others run."""
        with Engine(self.model, max_waiting=len(rows), **options) as engine:
            requests = []
            for row, params in zip(rows, self._guessing(rows), strict=True):
                requests.append(
                    engine.add_request(
                        row.prompt, params, seed=row.number, cancel_if_abandoned=False
                    )
                )
                if self.generator.random() < 0.3:
                    next(iter(requests[-1]), None)  # its first token
            for request in requests:
                result = request.result(TIMEOUT)
                self.reused += result.usage.cached_tokens
                self.accepted += result.usage.drafts.num_accepted_tokens
                yield result.token_ids, result.finish_reason, result.outputs["logprobs"].tobytes()

    def _cut(self, rows: list[Row], least: int, most: int) -> Iterator[list[Row]]:
        start = 0
        while start < len(rows):
            end = start + self.generator.randint(least, most)
            yield rows[start:end]
            start = end

    def _guessing(self, rows: list[Row]) -> list[SamplingParams]:
        """The parameters of rows, which may guess if the package does."""
        choices = [0, 1, self.guesses, self.guesses] if self.guesses else [0]
        return [
            replace(row.params, prompt_lookup_num_tokens=self.generator.choice(choices))
            for row in rows
        ]

    def _chunk(self) -> int | None:
        return self.generator.choice([None, 1, 8, 64, 100])


def compare(model: CausalLM, rows: list[Row], seed: int) -> dict[str, Any]:
    """The line of a package, without its name and the time."""
    company = Company(model, random.Random(seed))
    alone = list(company.alone(rows))
    comparisons, found = 0, []
    for way, run in company.ways().items():
        order = company.generator.sample(rows, len(rows))
        for row, outcome in zip(order, run(order), strict=True):
            comparisons += 1
            if outcome != alone[row.number]:
                found.append(f"{way}: row {row.number}, {_difference(alone[row.number], outcome)}")
    rounding, guesses = model.sessions.rounding, company.guesses and model.sessions.guesses
    return {
        "rounding": None if rounding is None else rounding.described(),
        "rows": len(rows),
        "reused": company.reused,
        "accepted": company.accepted if guesses else None,
        "comparisons": comparisons,
        "differences": len(found),
        "first": found[:SHOWN],
    }


def _difference(alone: Outcome, other: Outcome) -> str:
    for place, one, another in zip(count(1), alone[0], other[0], strict=False):
        if one != another:
            return f"token {place} is {another} and was {one} alone"
    bits = [np.frombuffer(outcome[2], np.uint32) for outcome in (alone, other)]
    for place, one, another in zip(count(1), *bits, strict=False):
        if one != another:
            return f"the log-probability of token {place} has other last bits than alone"
    return f"it ended with {other[1]!r} after {len(other[0])} tokens, alone with {alone[1]!r} after {len(alone[0])}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Compares random rows of packages alone and in company."
    )
    parser.add_argument("packages", type=Path, nargs="+", metavar="PACKAGE")
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    failed = False
    for path in given.packages:
        start = time.perf_counter()
        model = load(path)
        rows = random_rows(given.rows, model.interface.vocab_size, given.seed)
        report = compare(model, rows, given.seed)
        failed |= bool(report["differences"])
        seconds = round(time.perf_counter() - start, 1)
        print(json.dumps({"package": path.name, **report, "seconds": seconds}), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
