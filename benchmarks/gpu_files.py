"""Checkpoint and packages of a shape, each made when it is first asked for; what is there is kept."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints import SHAPES, make_checkpoint, make_genai_model
from gpu_systems import PROMPT_TOKENS

import qsample
from qsample.package import read_package

CTX_LEN = 1024
_GENAI_PRECISIONS = {"float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Variant:
    """What a package is compiled for. dtype: None = as it is."""

    provider: str
    dtype: str | None = None
    weights: str | None = None
    kv_cache_dtype: str | None = None
    sampler: bool = True

    @property
    def name(self) -> str:
        """Of the package's folder, and in reports."""
        cache = self.kv_cache_dtype and f"{self.kv_cache_dtype} cache"
        host = None if self.sampler else "host"
        return " ".join(filter(None, (self.provider, self.dtype, self.weights, cache, host))).replace(" ", "-")


class Files:
    """shape: a key of `SHAPES`. folder: of all that is made of it. suffix: of its compiled packages' names, where they
    are made once more under other circumstances."""

    def __init__(self, shape: str, folder: Path, suffix: str = "") -> None:
        self.shape, self._folder, self._suffix = shape, folder, suffix

    def checkpoint(self) -> Path:
        return self._made("checkpoint", lambda path: make_checkpoint(self.shape, path))

    def portable(self, *, sampler: bool = True) -> Path:
        def export(path: Path) -> None:
            qsample.AutoModelForCausalLM.from_pretrained(self.checkpoint(), include_sampler=sampler).export(path)

        return self._made("portable" if sampler else "host-portable", export)

    def compiled(self, variant: Variant) -> Path:
        options = {name: getattr(variant, name) for name in ("provider", "dtype", "weights", "kv_cache_dtype")}
        options = {name: value for name, value in options.items() if value is not None}

        def compile_to(path: Path) -> None:
            portable = self.portable(sampler=variant.sampler)
            model = qsample.AutoModelForCausalLM.from_pretrained(portable, include_sampler=variant.sampler)
            # Random weights are off by more than trained ones.
            model.compile(path, ctx_len=CTX_LEN, max_divergence=100, **options)

        return self._made(variant.name + self._suffix, compile_to)

    def genai(self, dtype: str) -> Path:
        def build(path: Path) -> None:
            precision = _GENAI_PRECISIONS[dtype]
            make_genai_model(self.checkpoint(), path, sys.executable, precision=precision, provider="cuda")

        return self._made(f"genai-{dtype}", build)

    def there(self, name: str) -> Path:
        """FileNotFoundError where making it failed: whoever measures it does not make it once more."""
        path = self._folder / name
        if not path.exists():
            raise FileNotFoundError(f"there is no {name} of {self.shape}")
        return path

    def _made(self, name: str, make: Callable[[Path], Any]) -> Path:
        path, unfinished = self._folder / name, self._folder / f"{name}.part"
        if not path.exists():
            start = time.perf_counter()
            shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was ended
            make(unfinished)
            unfinished.rename(path)
            print(f"{self.shape}: {name} took {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        return path


class Floor:
    """The least time of a step: the weights, and the cache of half the new tokens, read once.

    An embedding that is not the head as well is left out: a step reads a few of its rows.
    """

    def __init__(self, package: Path, shape: str, bandwidth: float | None) -> None:
        opened = read_package(package, verify=False)
        interface = opened.interface
        element = 4 if interface.dtype == "float32" else 2
        self._weights = opened.manifest.files["decoder.onnx.data"].bytes
        quantized = opened.manifest.compilation is not None and opened.manifest.compilation.quantization
        if not SHAPES[shape]["tie_word_embeddings"] and not quantized:
            self._weights -= interface.vocab_size * SHAPES[shape]["hidden_size"] * element
        cached = 1 if interface.kv_cache_dtype == "int8" else element
        self._token = sum(2 * layer.num_key_value_heads * layer.head_dim * cached for layer in interface.key_values)
        self._bandwidth = bandwidth

    def seconds(self, rows: int, new_tokens: int) -> float | None:
        """bandwidth: bytes a second; None = not known."""
        if self._bandwidth is None:
            return None
        return (self._weights + rows * self._token * (PROMPT_TOKENS + new_tokens / 2)) / self._bandwidth
