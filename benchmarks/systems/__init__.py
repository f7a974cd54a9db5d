"""The systems that the benchmarks compare: each loads a model and generates.

`worker.py` opens a system in the Python that has its library. A module of this folder needs this library and NumPy.
"""

from __future__ import annotations

import importlib
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Final

import numpy as np

Ids = np.ndarray[Any, np.dtype[np.int64]]
Sampling = dict[
    str, float
]  # Hugging Face's names; an absent parameter is off, temperature 0 is greedy
EVERYTHING: Final[Sampling] = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02}
EVERYTHING.update(repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1)
MIXES: Final[dict[str, Sampling]] = {
    "greedy": {"temperature": 0.0},
    "top-k 50, top-p 0.95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
}
# At this temperature no distribution has a peak: the nucleus is most of the vocabulary, the worst case for hosts that
# sort the probabilities.
FLAT: Final[dict[str, Sampling]] = {"top-p 0.95, flat": {"temperature": 100.0, "top_p": 0.95}}
ALL: Final = MIXES | FLAT | {"everything": EVERYTHING}

FIRST_TIMED: Final = (
    4  # steps on a GPU before the clock starts; the host waits for the GPU there, and at the end
)

# Work → system → module of this folder, its class, further arguments.
SYSTEMS: Final[dict[str, dict[str, tuple[str, str, dict[str, Any]]]]] = {
    "generate": {
        **dict.fromkeys(
            ("qsample", "qsample, balanced", "qsample, speed"), ("qsample", "Qsample", {})
        ),
        **dict.fromkeys(
            ("qsample, --no-batch-invariant", "qsample, speed, --no-batch-invariant"),
            ("qsample", "Qsample", {"batch_invariant": False}),
        ),
        "genai": ("genai", "Genai", {}),
        "genai defaults": ("genai", "Genai", {"own_threads": True}),
        "transformers": ("transformers", "Transformers", {}),
        "llama.cpp": ("llama_cpp", "LlamaCpp", {}),
        "logits to NumPy": ("logits_host", "LogitsHost", {"sampler": "numpy"}),
        "logits to transformers": ("logits_host", "LogitsHost", {"sampler": "transformers"}),
    },
    "rows": {
        "qsample, float32 cache": ("qsample", "QsampleRows", {}),
        "qsample, int8 cache": ("qsample", "QsampleRows", {}),
        "genai": ("genai", "GenaiRows", {}),
        "llama.cpp, f16": ("llama_cpp", "LlamaRows", {"cache": "f16"}),
        "llama.cpp, q8_0": ("llama_cpp", "LlamaRows", {"cache": "q8_0"}),
    },
    "load": {name.lower(): ("load", name, {}) for name in ("Continuous", "Static", "Genai")},
    "streams": {"engine alone": ("engine", "EngineAlone", {})},
    "write": {
        "qsample": ("qsample", "QsampleWriter", {}),
        "llama.cpp": ("llama_cpp", "LlamaWriter", {}),
    },
}


def open_system(work: str, name: str, model: Path, threads: int, **options: Any) -> Any:
    module, kind, more = SYSTEMS[work][name]
    return getattr(importlib.import_module(f"systems.{module}"), kind)(
        model, threads, **more, **options
    )


class Generator(ABC):
    """A system that continues prompts. `library` is its module, `vocab_size` its model's."""

    library: str
    vocab_size: int

    @abstractmethod
    def run(
        self, prompts: Ids, new_tokens: int, sampling: Sampling
    ) -> tuple[list[float], list[list[int]]]:
        """Continue prompts [B, P]: the moments before the work and after each step, and the tokens [B, new_tokens]."""

    def generate(
        self, rows: int, prompt_tokens: int, new_tokens: int, sampling: Sampling
    ) -> dict[str, Any]:
        """Continue random prompts: seconds until each row has its first token, of each later step; tokens; memory."""
        moments, tokens = self.run(
            prompt_ids(rows, prompt_tokens, self.vocab_size), new_tokens, sampling
        )
        seconds = np.diff(moments).tolist()
        return {
            "first_token": seconds[0],
            "steps": seconds[1:],
            "tokens": tokens,
            "memory": memory(),
        }


class Rows(ABC):
    """A system whose rows hold a long history, once it is read or filled in."""

    library: str

    @abstractmethod
    def read(self) -> None:
        """Read the history and choose the next token, in every row."""

    @abstractmethod
    def fill(self) -> None:
        """Give the rows a history without reading it."""

    @abstractmethod
    def step(self) -> None:
        """Choose the next token of every row."""

    def history(self, filled: bool) -> dict[str, Any]:
        """Seconds to the first token; None for a history that is filled in."""
        start = time.perf_counter()
        self.fill() if filled else self.read()
        return {"first_token": None if filled else time.perf_counter() - start}

    def steps(self, count: int) -> dict[str, Any]:
        moments = [time.perf_counter()]
        for _ in range(count):
            self.step()
            moments.append(time.perf_counter())
        return {"steps": np.diff(moments).tolist(), "memory": memory()}


def prompt_ids(rows: int, tokens: int, vocab_size: int) -> Ids:
    """[rows, tokens] int64: the same random ids for each system, without the special ids 0, 1 and 2."""
    return np.random.default_rng(0).integers(3, vocab_size, (rows, tokens))


def memory() -> dict[str, int]:
    """The memory of this process in bytes, "anonymous" and "mapped"; {} without /proc."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    fields = dict(line.split(":", 1) for line in lines)
    return {
        name: int(fields[key].split()[0]) * 1024
        for name, key in (("anonymous", "RssAnon"), ("mapped", "RssFile"))
    }
