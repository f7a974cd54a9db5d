"""The parts of the GPU benchmark, in order of value: what each does, and the time that it has."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gpu_files import Files, Variant
from gpu_parts import PROVIDER, build, look_at_the_gpu, measure, smoke
from gpu_process import Reports
from gpu_report import CAPTURED
from gpu_sampler import check_sampler
from gpu_systems import PLAIN, Decode, Genai, Qsample, Transformers

PARTS = ("smoke", "first", "checks", "rest")
SYSTEMS = (CAPTURED, "uncaptured", "host", "genai", "transformers")
FIRST_ROWS = (1, 32)
FEW = ("greedy", "everything")  # for systems that are measured for one comparison
MOST = 240.0  # seconds for a part, where nothing else is said: more than any has taken, less than a hang takes
MOST_SMOKE = 120.0  # of tiny models


@dataclass(frozen=True)
class Part:
    """least: seconds that there must be for it to be started. most: after which it is stopped."""

    name: str
    work: Callable[[Reports], None]
    least: float = 5.0
    most: float = MOST
    environment: dict[str, str] = field(default_factory=dict)


class NoGpuError(Exception):
    """There is nothing to measure."""


class Plan:
    """The parts of a run, in order of value. NoGpuError: what was found so far forbids the rest."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._cuda = options.provider == "cuda"
        self._dtype = options.dtype if self._cuda else None
        self._captured = CAPTURED if self._cuda else "baked"
        self._bandwidth = options.bandwidth * 1e12 if options.bandwidth else None
        self._runs = not self._cuda

    def found(self, name: str, value: str) -> None:
        """What a part says of the machine: later ones take the bandwidth from it, and whether they make sense."""
        if name == PROVIDER:
            self._runs = True
        if name == "bandwidth" and self._bandwidth is None:
            with suppress(ValueError):
                self._bandwidth = float(value.split()[0]) * 1e12

    def parts(self) -> Iterator[Part]:
        options = self._options
        if self._cuda:
            yield Part("the GPU", look_at_the_gpu, most=90)
            if not self._runs:
                raise NoGpuError("the provider was not seen to run here, so everything else was left out")
        if "smoke" in options.parts:
            yield from self._smoke()
        first, *others = [Files(shape, self._folder / shape) for shape in options.shapes]
        float_weights = self._variant()
        if {"first", "checks", "rest"} & {*options.parts}:
            yield self._build(first, float_weights)
        if "first" in options.parts:
            yield from self._first(first)
        if "checks" in options.parts:
            trace = self._cuda
            yield Part(f"{first.shape}: checks", lambda reports: smoke(first, float_weights, reports, trace=trace))
        if "rest" in options.parts:
            yield from self._rest(first)
            for files in others:
                yield self._build(files, float_weights)
                yield from self._baked(files, float_weights, options.batch, options.mix)
                yield from self._baked(files, float_weights, options.batch, self._among(FEW), replay=False)
                yield from self._transformers(files, options.batch)

    def _smoke(self) -> Iterator[Part]:
        files = Files("tiny", self._folder / "tiny")
        provider = self._options.provider
        yield Part("the sampler", lambda reports: check_sampler(provider, reports), most=MOST_SMOKE)
        yield Part("tiny: export", lambda _: files.portable() and None, most=MOST_SMOKE)
        variants = [self._variant(), self._variant(weights="int4"), self._variant(kv_cache_dtype="int8")]
        if self._cuda:
            variants.append(Variant("cuda", "float16" if self._dtype == "bfloat16" else "bfloat16"))
        for variant in variants:
            yield Part(
                f"tiny, {variant.name}: smoke test",
                lambda reports, variant=variant: smoke(files, variant, reports),
                most=MOST_SMOKE,
            )
        if self._cuda:
            switch = {"ORT_ENABLE_CUDNN_FLASH_ATTENTION": "0"}
            # Another package, so that compile's own test of it runs without cuDNN's attention, too.
            apart = Files("tiny", self._folder / "tiny", "-no-cudnn")
            yield Part(
                "tiny without cuDNN's attention: smoke test",
                lambda reports: smoke(apart, self._variant(), reports),
                most=MOST_SMOKE,
                environment=switch,
            )

    def _first(self, files: Files) -> Iterator[Part]:
        rows, few, mixes = self._first_rows(), self._among(FEW), self._first_mixes()
        host = self._variant(sampler=False)
        yield from self._baked(files, self._variant(), rows, mixes)
        if self._cuda:
            yield from self._baked(files, self._variant(), rows, few, replay=False)
        if "host" in self._options.systems:
            yield self._build(files, host)
            yield self._measure(files, "host", host.name, lambda: Qsample(files.there(host.name), 1), rows, few)
        if CAPTURED in self._options.systems:
            for weights in self._options.weights:
                variant = self._variant(weights=weights)
                yield self._build(files, variant)
                yield from self._baked(files, variant, rows, mixes)
        yield from self._genai(files, rows)
        yield from self._transformers(files, rows)

    def _rest(self, files: Files) -> Iterator[Part]:
        """What `_first` left out, where that was asked for, too."""
        options, variant, few = self._options, self._variant(), self._among(FEW)
        rows, others = self._first_rows(), options.batch
        for every in (1, 16):
            yield from self._baked(files, variant, rows, few, flush_every=every)
        if "first" in options.parts:
            others = [number for number in options.batch if number not in rows]
            mixes = [mix for mix in options.mix if mix not in self._first_mixes()]
            yield from self._baked(files, variant, rows, mixes)
        yield from self._baked(files, variant, others, options.mix)
        yield from self._transformers(files, others)

    def _baked(
        self,
        files: Files,
        variant: Variant,
        rows: Sequence[int],
        mixes: Sequence[str],
        *,
        flush_every: int = 4,
        replay: bool = True,
    ) -> Iterator[Part]:
        kind = self._captured if replay else "uncaptured"
        if (CAPTURED if replay else kind) not in self._options.systems or (not replay and not self._cuda):
            return
        if not rows or not mixes:
            return
        weights = f", {variant.weights}" if variant.weights else ""
        name = f"{kind}{weights}" + (f", read every {flush_every}" if flush_every != 4 else "")
        yield self._measure(
            files,
            name,
            variant.name,
            lambda: Qsample(files.there(variant.name), flush_every, replay=replay),
            rows,
            mixes,
        )

    def _genai(self, files: Files, rows: Sequence[int]) -> Iterator[Part]:
        given: Path | None = self._options.genai
        installed = importlib.util.find_spec("onnxruntime_genai") is not None
        if "genai" not in self._options.systems or not self._cuda or not (given or installed):
            return
        if given is None:
            dtype = self._options.dtype
            yield Part(f"{files.shape}: genai's package", lambda _: files.genai(dtype) and None, least=30, most=400)
        mixes = self._among(("greedy", PLAIN, "top-k 50, top-p 0.95"))
        # The floor is that of the same weights and cache.
        yield self._measure(
            files,
            "genai",
            self._variant().name,
            lambda: Genai(given or files.there(f"genai-{self._options.dtype}")),
            rows,
            mixes,
        )

    def _transformers(self, files: Files, rows: Sequence[int]) -> Iterator[Part]:
        if "transformers" not in self._options.systems or not rows:
            return
        device, dtype = ("cuda", self._options.dtype) if self._cuda else ("cpu", "float32")

        def open_it() -> Decode:
            return Transformers(files.there("checkpoint"), device, dtype)

        yield self._measure(files, "transformers, static cache", self._variant().name, open_it, rows, self._among(FEW))

    def _measure(
        self,
        files: Files,
        system: str,
        package: str,
        open_it: Callable[[], Decode],
        rows: Sequence[int],
        mixes: Sequence[str],
    ) -> Part:
        options = self._options

        def work(reports: Reports) -> None:
            measure(files, system, package, self._bandwidth, open_it, rows, mixes, options, reports)

        return Part(f"{files.shape}: {system}", work, least=10)

    def _build(self, files: Files, variant: Variant) -> Part:
        return Part(f"{files.shape}: {variant.name}", lambda _: build(files, variant), least=20, most=540)

    def _variant(self, **options: object) -> Variant:
        return Variant(self._options.provider, self._dtype, **options)  # type: ignore[arg-type]

    def _first_rows(self) -> list[int]:
        batch: list[int] = self._options.batch
        return [number for number in batch if number in FIRST_ROWS] or batch[:1]

    def _first_mixes(self) -> list[str]:
        return self._among((FEW[0], PLAIN, FEW[1]))

    def _among(self, mixes: Sequence[str]) -> list[str]:
        return [mix for mix in mixes if mix in self._options.mix] or self._options.mix[:1]
