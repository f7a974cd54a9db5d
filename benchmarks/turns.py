"""Systems that take turns, each in its own process; shared by the benchmarks of whole decoders.

A shared machine changes its speed from minute to minute. Therefore every round asks each system once, in a rotated
order, and ratios are taken within a round.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from checkpoints import can_import
from report import median, rotated
from rich.console import Console
from systems import Sampling

PAUSE: Final = (
    0.1  # seconds between two systems' turns: threads of the previous system may still spin
)
WARM_UP_TOKENS: Final = (
    64  # of the prompt before the rounds; a longer prompt would cost as much as a round
)
GENAI: Final = [
    "onnxruntime_genai",
    "onnx",
    "onnx_ir",
    "torch",
    "transformers",
]  # with its model builder
# System → modules that the peers' Python must have; [] = the system runs in this Python.
PEERS: Final = {
    "genai": GENAI,
    "genai defaults": GENAI,
    "llama.cpp": ["llama_cpp", "gguf"],
    "transformers": [],
}
Times: TypeAlias = dict[str, list[float]]  # system → milliseconds per round


@dataclass(frozen=True)
class Cell:
    """`rows` prompts of `prompt` tokens each, sampled with the parameters named `mix`."""

    prompt: int
    rows: int
    mix: str

    def __str__(self) -> str:
        return f"prompt {self.prompt:,}, {self.rows} rows, {self.mix}"


class Worker:
    """A system in its own process, which answers requests in JSON lines; see `worker.py`."""

    def __init__(
        self,
        system: str,
        model: Path,
        python: str,
        threads: int,
        work: str = "generate",
        **options: Any,
    ) -> None:
        command = [python, str(Path(__file__).with_name("worker.py")), work, system, str(model)]
        command += ["--threads", str(threads), "--options", json.dumps(options)]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - it lives as long as the process
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        self.loaded = self._answer()

    def ask(self, call: str = "generate", **arguments: Any) -> dict[str, Any]:
        """The result of a method of the system.

        Raises:
            RuntimeError: The process ended; the message has the end of its output.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"call": call, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the process has ended; its output has the reason
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._errors.seek(0)
            raise RuntimeError(
                f"a worker ended early, with status {status}: {self._errors.read()[-2000:]}"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def available(systems: list[str], peers_python: str, console: Console) -> list[str]:
    """The systems whose modules are installed; the console names the others."""
    found = []
    for name in systems:
        needed = PEERS.get(name.split(",")[0], [])
        missing = can_import(peers_python if needed else sys.executable, needed)
        if missing is None:
            found.append(name)
        else:
            console.print(f"without {name}: {missing}", highlight=False)
    return found


def size_of(model: Path) -> int:
    """Bytes of a model's files."""
    files = [model] if model.is_file() else [path for path in model.iterdir() if path.is_file()]
    return sum(path.stat().st_size for path in files)


def take_turns(
    workers: dict[str, Worker],
    cell: Cell,
    sampling: Sampling,
    rounds: int,
    new_tokens: int,
    *,
    failed: Callable[[str, RuntimeError], None],
    after_round: Callable[[], None] = lambda: None,
) -> tuple[Times, Times]:
    """Measure a cell in rounds, after a round that warms up (memory is allocated, files are read).

    Args:
        workers: The systems by name; systems whose process ends are removed.
        cell: The prompts.
        sampling: The sampling parameters.
        rounds: Measured rounds.
        new_tokens: Tokens per row and round; transformers has 8 at most, because its eager float32 steps are long.
        failed: Called with the name and the error of a system whose process ended.
        after_round: Called after each measured round.

    Returns:
        Milliseconds until every row has its first token, and milliseconds of a later step (median), per system and
        round.
    """
    first: Times = {name: [] for name in workers}
    steps: Times = {name: [] for name in workers}
    for index in range(rounds + 1):
        for name in rotated(workers, index):
            time.sleep(PAUSE)
            tokens = (min(new_tokens, 8) if name == "transformers" else new_tokens) if index else 4
            prompt = cell.prompt if index else min(cell.prompt, WARM_UP_TOKENS)
            try:
                answer = workers[name].ask(
                    rows=cell.rows, prompt_tokens=prompt, new_tokens=tokens, sampling=sampling
                )
            except RuntimeError as error:
                failed(name, error)
                del workers[name], first[name], steps[name]
                continue
            if index:
                first[name].append(1e3 * answer["first_token"])
                steps[name].append(1e3 * median(answer["steps"]))
        if index:
            after_round()
    return first, steps
