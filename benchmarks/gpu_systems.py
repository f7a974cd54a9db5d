"""The models of the GPU benchmark, and the ways to decode with them that it measures.

A shape's checkpoint and packages are made on first use and kept. Each way to decode is opened, measured over every
batch and mix, and closed before the next: a GPU holds a single model at a time, and a failure affects no other way.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from checkpoints import SHAPES, make_checkpoint, make_genai_model
from systems import EVERYTHING, FIRST_TIMED, Generator, prompt_ids
from systems import MIXES as PLAIN_MIXES

import qsample
from qsample.package.package import read_package
from qsample.runtime import SamplingParams, load
from qsample.runtime.decode.slots import Slots
from qsample.runtime.prepare import parameter_row

PLAIN = "plain temperature"  # the default of OpenAI's API: no filter, so the draw is from the whole vocabulary
MIXES = {**PLAIN_MIXES, PLAIN: {"temperature": 1.0}, "everything": EVERYTHING}
MIXED = "half greedy, half everything"
PROMPT_TOKENS = 64
CTX_LEN = 1024
_GENAI_PRECISIONS = {"float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Variant:
    """The settings of a package; a dtype of None keeps the checkpoint's type."""

    provider: str
    dtype: str | None = None
    weights: str | None = None
    kv_cache_dtype: str | None = None
    sampler: bool = True

    @property
    def name(self) -> str:
        """The name of the package's folder, and in reports."""
        cache = self.kv_cache_dtype and f"{self.kv_cache_dtype} cache"
        host = None if self.sampler else "host"
        return " ".join(
            filter(None, (self.provider, self.dtype, self.weights, cache, host))
        ).replace(" ", "-")


class Files:
    """The checkpoint and packages of a shape.

    Args:
        shape: A key of `SHAPES`.
        folder: The folder for all of them.
        suffix: Appended to the names of packages that are compiled again under other conditions.
    """

    def __init__(self, shape: str, folder: Path, suffix: str = "") -> None:
        self.shape, self._folder, self._suffix = shape, folder, suffix

    def checkpoint(self) -> Path:
        return self._made("checkpoint", lambda path: make_checkpoint(self.shape, path))

    def portable(self, *, sampler: bool = True) -> Path:
        def export(path: Path) -> None:
            qsample.AutoModelForCausalLM.from_pretrained(
                self.checkpoint(), include_sampler=sampler
            ).export(path)

        return self._made("portable" if sampler else "host-portable", export)

    def compiled(self, variant: Variant) -> Path:
        options = {
            name: getattr(variant, name)
            for name in ("provider", "dtype", "weights", "kv_cache_dtype")
        }
        options = {name: value for name, value in options.items() if value is not None}

        def compile_to(path: Path) -> None:
            portable = self.portable(sampler=variant.sampler)
            model = qsample.AutoModelForCausalLM.from_pretrained(
                portable, include_sampler=variant.sampler
            )
            # Random weights diverge further than trained weights.
            model.compile(path, ctx_len=CTX_LEN, max_divergence=100, **options)

        return self._made(variant.name + self._suffix, compile_to)

    def genai(self, dtype: str) -> Path:
        def build(path: Path) -> None:
            precision = _GENAI_PRECISIONS[dtype]
            make_genai_model(
                self.checkpoint(), path, sys.executable, precision=precision, provider="cuda"
            )

        return self._made(f"genai-{dtype}", build)

    def there(self, name: str) -> Path:
        """The path of an existing model.

        Raises:
            FileNotFoundError: An earlier part failed to make it; a measurement does not try again.
        """
        path = self._folder / name
        if not path.exists():
            raise FileNotFoundError(f"{self.shape} has no {name}")
        return path

    def _made(self, name: str, make: Callable[[Path], Any]) -> Path:
        path, unfinished = self._folder / name, self._folder / f"{name}.part"
        if not path.exists():
            start = time.perf_counter()
            shutil.rmtree(unfinished, ignore_errors=True)  # of an interrupted run
            make(unfinished)
            unfinished.rename(path)
            print(
                f"{self.shape}: {name} took {time.perf_counter() - start:.0f} s",
                file=sys.stderr,
                flush=True,
            )
        return path


class Floor:
    """The least time of a step: the time to read the weights, and the cache with half of the new tokens, once.

    An embedding that is not also the head does not count: a step reads only a few of its rows.
    """

    def __init__(self, package: Path, shape: str, bandwidth: float | None) -> None:
        opened = read_package(package, verify=False)
        interface = opened.interface
        element = 4 if interface.dtype == "float32" else 2
        self._weights = opened.manifest.files["decoder.onnx.data"].bytes
        quantized = (
            opened.manifest.compilation is not None and opened.manifest.compilation.quantization
        )
        if not SHAPES[shape]["tie_word_embeddings"] and not quantized:
            self._weights -= interface.vocab_size * SHAPES[shape]["hidden_size"] * element
        cached = 1 if interface.kv_cache_dtype == "int8" else element
        self._token = sum(
            2 * layer.num_key_value_heads * layer.head_dim * cached
            for layer in interface.key_values
        )
        self._bandwidth = bandwidth

    def seconds(self, rows: int, new_tokens: int) -> float | None:
        """The least seconds of a step; None if the bandwidth (bytes per second) is unknown."""
        if self._bandwidth is None:
            return None
        return (
            self._weights + rows * self._token * (PROMPT_TOKENS + new_tokens / 2)
        ) / self._bandwidth


class Decode(Protocol):
    """A way to decode.

    `warm_up` precedes the first measurement of a batch. `seconds` measures a step for `rows` rows that sample as `mix`.
    """

    def warm_up(self, rows: int, new_tokens: int) -> None: ...

    def seconds(self, rows: int, mix: str, new_tokens: int) -> float: ...


def sampling(mix: str, rows: int, new_tokens: int) -> list[SamplingParams]:
    names = (
        ["greedy" if row % 2 else "everything" for row in range(rows)]
        if mix == MIXED
        else [mix] * rows
    )
    return [
        SamplingParams(**MIXES[name], max_new_tokens=new_tokens, eos_token_id=()) for name in names
    ]


class Qsample:
    """The runtime's slots, which read the sampled tokens after every `flush_every` steps.

    `generate` reads while the next steps run, so its own times do not show the end of a step.
    """

    def __init__(self, package: Path, flush_every: int, *, replay: bool = True) -> None:
        options = {} if replay else {"enable_cuda_graph": "0"}
        self._model = load(package, provider_options=options, verify=False)
        self._flush_every = flush_every
        self._slots: Slots | None = None

    def warm_up(self, rows: int, new_tokens: int) -> None:
        """Warm up and capture: later batches of this size are replayed."""
        self._slots = None  # frees the previous batch before the next is allocated
        self._slots = Slots(
            self._model.sessions, rows, self._model.capacity(PROMPT_TOKENS + 2 * new_tokens)
        )
        self.seconds(rows, "greedy", min(8, new_tokens))

    def seconds(self, rows: int, mix: str, new_tokens: int) -> float:
        slots, interface = self._slots, self._model.interface
        assert slots is not None
        prompts = prompt_ids(rows, PROMPT_TOKENS, interface.vocab_size)
        lengths = [PROMPT_TOKENS] * rows
        params = sampling(mix, rows, new_tokens)
        for row in range(slots.count):
            slots.stop(row)
        for row, prompt in enumerate(prompts):
            parameters = parameter_row(interface, params[row], lengths[row], slots.capacity)
            parameters["max_length"] = np.int32(
                slots.capacity
            )  # the last window may exceed the new tokens
            slots.begin(row, prompt, row, parameters)
            slots.prefill(row, prompt, emit=True)
        if not slots.prepared:  # a mix with searched rows has its own capture
            slots.prepare()
        windows = -(-new_tokens // self._flush_every)
        start = time.perf_counter()
        for _ in range(windows):
            for _ in range(self._flush_every - 1):
                slots.decode(wait=False)
            slots.decode()
            slots.read(
                newest=self._flush_every
            )  # like `generate`: only new tokens, not the whole history
        return (time.perf_counter() - start) / (windows * self._flush_every)


class Generated:
    """Another system, which is read after every step; see `systems`."""

    def __init__(self, system: Generator) -> None:
        self._system = system

    def warm_up(self, rows: int, new_tokens: int) -> None:
        """Compile the step for these rows and this length, if the system does; sampling is not part of it."""
        self.seconds(rows, "greedy", new_tokens)

    def seconds(self, rows: int, mix: str, new_tokens: int) -> float:
        prompts = prompt_ids(rows, PROMPT_TOKENS, self._system.vocab_size)
        moments, _ = self._system.run(prompts, new_tokens, MIXES[mix])
        return (moments[-1] - moments[FIRST_TIMED]) / (new_tokens - FIRST_TIMED)


def open_transformers(checkpoint: Path, device: str, dtype: str) -> Decode:
    """`generate` over a static cache, whose step transformers compiles on a GPU."""
    from systems.transformers import Transformers

    return Generated(Transformers(checkpoint, None, device, dtype, cache="static"))


def open_genai(folder: Path) -> Decode:
    from systems.genai import Genai

    return Generated(Genai(folder, None))
