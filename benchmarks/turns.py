"""Systems that take turns, each in a process of its own, round by round; what the benchmarks of whole decoders share.

A shared machine changes its speed from minute to minute. So every round asks each system once, another one first each
time, and ratios are taken within a round.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

PAUSE: Final = 0.1  # seconds between two systems' turns: threads of the last one may still spin
WARM_UP_TOKENS: Final = 64  # of the prompt that comes before the rounds; a longer one would cost as much as a round
# What a peer's Python has to have.
PEERS: Final = {
    "genai": ["onnxruntime_genai", "torch", "transformers"],
    "genai defaults": ["onnxruntime_genai", "torch", "transformers"],
    "llama.cpp": ["llama_cpp", "gguf"],
    "transformers": [],
}
Times: TypeAlias = dict[str, list[float]]  # system → milliseconds, one a round


@dataclass(frozen=True)
class Cell:
    """prompt: tokens of each of `rows` prompts. mix: the name of how they are sampled."""

    prompt: int
    rows: int
    mix: str

    def __str__(self) -> str:
        return f"prompt {self.prompt:,}, {self.rows} rows, {self.mix}"


class Worker:
    """A system in a process of its own, which answers requests in JSON lines; see the script, in this folder."""

    def __init__(
        self, system: str, model: Path, python: str, threads: int, *options: str, script: str = "decode_worker.py"
    ) -> None:
        command = [python, str(Path(__file__).with_name(script)), system, str(model), "--threads", str(threads)]
        command += options
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it lives as long as the process
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment
        )
        self.loaded = self._answer()
        # A step of one row, and a prompt of 64 tokens, in seconds; see `probe`.
        self.first_seconds = self.step_seconds = 0.0

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to a request; RuntimeError with the end of what the process wrote where it ended instead."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the process has ended; why is in its output
        return self._answer()

    def probe(self) -> dict[str, int]:
        """Run a little, which says how long more will take. Returns the memory that it holds then: mapped weights are
        not in memory before."""
        answer = self.ask(rows=1, prompt_tokens=WARM_UP_TOKENS, new_tokens=8, sampling={"temperature": 0.0})
        self.first_seconds, self.step_seconds = answer["first_token"], float(np.median(answer["steps"]))
        memory: dict[str, int] = answer["memory"]
        return memory

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._errors.seek(0)
            raise RuntimeError(f"a worker ended early, with status {status}: {self._errors.read()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def qsample(*arguments: object) -> list[str]:
    """The command line's program, in this Python."""
    return [sys.executable, "-c", "from qsample.cli import main; main()", *map(str, arguments)]


def without_folders(reason: str) -> str:
    """`reason` with the last part of each absolute path alone: where a model lies is nobody else's matter."""
    return re.sub(r"(?<![\w.:/])(?:/[\w.+-]+)+/([\w.+-]+)", r"\1", reason)


def size_of(model: Path) -> int:
    """Bytes of a model's files."""
    files = [model] if model.is_file() else [path for path in model.iterdir() if path.is_file()]
    return sum(path.stat().st_size for path in files)


def new_tokens_of(system: str, new_tokens: int) -> int:
    """Eager float32 steps are long, and fewer of them do."""
    return min(new_tokens, 8) if system == "transformers" else new_tokens


def expected_seconds(workers: Mapping[str, Worker], cell: Cell, rounds: int, new_tokens: int) -> float:
    """About how long a cell will take, from the workers' probes.

    A prompt's time grows a little faster than its length, and a step's with its rows and with what they hold: the
    figures are those of a model of 0.6 B parameters on two cores, and within a factor of two for others.
    """
    total = 0.0
    for name, worker in workers.items():
        reading = worker.first_seconds * cell.rows * (1 + cell.prompt / 4500)
        step = worker.step_seconds * (1 + (cell.rows - 1) * 0.25 + cell.rows * cell.prompt / 6000)
        one = reading * cell.prompt / WARM_UP_TOKENS + step * new_tokens_of(name, new_tokens) + PAUSE
        total += rounds * one + reading * min(cell.prompt, WARM_UP_TOKENS) / WARM_UP_TOKENS + 4 * step + PAUSE
    return total


def take_turns(
    workers: dict[str, Worker],
    cell: Cell,
    sampling: Mapping[str, float],
    rounds: int,
    new_tokens: int,
    *,
    failed: Callable[[str, RuntimeError], None],
    after_round: Callable[[], None] | None = None,
) -> tuple[Times, Times]:
    """Milliseconds to the first token of every row, and of a step after it (median): system → one of each a round.

    A round before the first one warms up: memory is taken, files are read. failed: told of a system whose process
    ended, which is out of `workers` from then on.
    """
    first: Times = {name: [] for name in workers}
    steps: Times = {name: [] for name in workers}
    for index in range(rounds + 1):
        names = list(workers)
        turn = index % len(names) if names else 0
        for name in names[turn:] + names[:turn]:
            time.sleep(PAUSE)
            count = new_tokens_of(name, new_tokens) if index else 4
            prompt = cell.prompt if index else min(cell.prompt, WARM_UP_TOKENS)
            try:
                answer = workers[name].ask(
                    rows=cell.rows, prompt_tokens=prompt, new_tokens=count, sampling=dict(sampling)
                )
            except RuntimeError as error:
                failed(name, error)
                del workers[name], first[name], steps[name]
                continue
            if index:
                first[name].append(1e3 * answer["first_token"])
                steps[name].append(1e3 * float(np.median(answer["steps"])))
        if index and after_round is not None:
            after_round()
    return first, steps
