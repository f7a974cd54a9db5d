"""A package enters; a `CausalLM` that generates from it leaves."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from qsample.contract import ALLOWED_TOKENS, Interface
from qsample.package import Package, read_package
from qsample.runtime.batch import Batch
from qsample.runtime.decode.loop import choose_flush_every
from qsample.runtime.decode.scheduler import DecodeRequest, Scheduler
from qsample.runtime.decode.slots import Slots
from qsample.runtime.inputs import AllowedTokensFn, parameter_arrays, prompts
from qsample.runtime.output import Collector, GenerateOutput, Timing, pad_sequences
from qsample.runtime.session.options import SessionOptions, check_count
from qsample.runtime.session.session import Sessions, open_sessions
from qsample.runtime.text.generated_text import GeneratedText
from qsample.runtime.text.stop_strings import check_stop_strings
from qsample.runtime.text.streamer import Streamer
from qsample.runtime.text.tokenizer import Tokenizer
from qsample.sampling_params import SamplingParams
from qsample.tensors import Array

_CAPACITY_STEP: Final = 64  # capacities are multiples of this, where nothing else decides
_SEEDS: Final = 2**63


def load(
    path: str | Path,
    provider: str | Sequence[str] | None = None,
    *,
    ctx_len: int | None = None,
    intra_op_num_threads: int | None = None,
    provider_options: Mapping[str, str] | None = None,
    session_config: Mapping[str, str] | None = None,
    verify: bool = True,
) -> CausalLM:
    """Open a package for generation. Needs onnxruntime, numpy and tokenizers, nothing else.

    Args:
        path: the package's folder.
        provider: "cpu", "cuda" or another of ONNX Runtime's providers by its short name (see
            `session.providers.execution_providers`), or a list of ONNX Runtime's full names; None = the one that a
            device package was compiled for, otherwise "cpu".
        ctx_len: capacity of every row in tokens, for portable packages; None = what each generation needs, up to the
            model's max_position_embeddings.
        intra_op_num_threads: threads of one operator; None = ONNX Runtime's choice.
        provider_options, session_config: passed to ONNX Runtime.
        verify: compare every file's sha256 with the manifest first.

    Raises PackageError where the package is damaged, QsampleError where it does not fit the provider or ctx_len.

    >>> model = load("exported")
    >>> model.generate("In the beginning", max_new_tokens=16, temperature=0.8, seed=1).texts
    """
    options = SessionOptions(intra_op_num_threads, provider_options or {}, session_config or {})
    package = read_package(path, verify=verify)
    _check_ctx_len(package, ctx_len)
    return CausalLM(package, open_sessions(package, provider, options), ctx_len)


class CausalLM:
    """A loaded package.

    package: where it came from. tokenizer: None where it was exported without one. generation_config: the model's own
    sampling defaults. sessions: the graphs. batch_size: most rows of one call; None = any.
    """

    def __init__(self, package: Package, sessions: Sessions, ctx_len: int | None = None) -> None:
        self.package = package
        self.tokenizer = Tokenizer.of(package)
        self.generation_config: Mapping[str, Any] = package.read_json("generation_config.json")
        self.sessions = sessions
        compilation = package.manifest.compilation
        self._ctx_len = compilation.ctx_len if compilation else ctx_len
        self.batch_size = compilation.batch_size if compilation else None
        # Captured graphs belong to the memory of one batch, and cost more to make than many steps.
        self._captured: dict[tuple[int, int, bool], Slots] = {}

    @property
    def interface(self) -> Interface:
        return self.package.interface

    def generate(
        self,
        inputs: Any,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        attention_mask: Any = None,
        streamer: Streamer | None = None,
        seed: int | Sequence[int] | None = None,
        allowed_tokens: Any = None,
        prefill_chunk_size: int | None = None,
        flush_every: int | None = None,
        double_buffering: bool = True,
        stop_strings: str | Sequence[str] | None = None,
        in_place: bool = True,
        **options: Any,
    ) -> GenerateOutput:
        """Continue one prompt or a batch of prompts of different lengths.

        Args:
            inputs: a text, token ids, a list of either, a 2-D integer array, or chat messages; see `inputs.prompts`.
            params: for all rows, or a list with one a row. None = the model's generation_config, with `options` on top.
            attention_mask: for a padded 2-D array.
            streamer: gets the prompt and then every token, as in Hugging Face; one prompt only.
            seed: of the first row, the next rows taking the numbers after it; or a list with one a row. None = those of
                `params`, otherwise fresh ones. A row depends on its own seed only, not on the batch.
            allowed_tokens: int32 bitmask of the tokens that may be sampled, [W] or [B, W]; or a function that writes
                the mask of each next token, see `AllowedTokensFn`. Needs the feature.
            prefill_chunk_size: most prompt tokens in one call, to bound memory; None = the whole prompt.
            flush_every: decode steps between two reads of what was sampled; None = 1 on the CPU, 4 elsewhere. It
                changes no token, only how many come at once.
            double_buffering: start the next step while the last one's tokens are read and streamed; False waits.
            stop_strings: texts that end a row. `texts` is cut off before the first one that is complete;
                `new_token_ids` goes on to the token that completes it. None = what the generation_config says.
            in_place: write the history and the cache into the buffers that they were read from; False takes turns
                between two sets, with the same result.
            options: fields of SamplingParams, or do_sample, in place of `params`; as in
                `SamplingParams.from_generation_config`.

        A row ends at a stop token, at its maximum length (256 new tokens where neither the model nor the caller says),
        or where the context length is full. Raises ValueError where an argument is wrong.
        """
        interface, manifest = self.interface, self.package.manifest
        rows = prompts(inputs, attention_mask, self.tokenizer, interface.vocab_size, manifest.token_ids)
        row_params = self.sampling_params(params, options, len(rows))
        seeds = choose_seeds(seed, params, row_params)
        stops = self.stop_strings(stop_strings, params)
        guide: AllowedTokensFn | None = allowed_tokens if callable(allowed_tokens) else None
        slots = min(len(rows), self.batch_size or len(rows))
        if guide is not None and slots < len(rows):
            raise ValueError(
                f"{len(rows)} prompts were given and the package was compiled for {slots} at most; a function for "
                "allowed_tokens follows one batch"
            )
        if streamer is not None and len(rows) != 1:
            raise ValueError(f"a streamer follows one prompt, and {len(rows)} were given; generate them one by one")
        check_count("prefill_chunk_size", prefill_chunk_size)
        flush_every = choose_flush_every(self.sessions, flush_every, guided=guide is not None)

        lengths = [len(row) for row in rows]
        needed = max(row.total_length(length) for row, length in zip(row_params, lengths, strict=True))
        capacity = self.capacity(needed)
        arrays = parameter_arrays(interface, row_params, lengths, capacity, manifest.token_ids.eos, allowed_tokens)
        if guide is not None:
            guide(None, arrays[ALLOWED_TOKENS.name])
        requests = [
            DecodeRequest(
                row, {name: values[index] for name, values in arrays.items()}, seeds[index], guide is not None
            )
            for index, row in enumerate(rows)
        ]
        collector = Collector(interface, [self._text(row, stops) for row in rows])
        batch = Batch(requests, collector, manifest.token_ids.pad, streamer, guide, arrays.get(ALLOWED_TOKENS.name))
        scheduler = Scheduler(
            slots,
            flush_every,
            self.sessions.chunk(prefill_chunk_size),
            interleave=False,
            keep_prefixes=not interface.recurrent,
            join_prompts=self.sessions.joins_prompts,
        )
        device = self._captured.pop((slots, capacity, in_place), None)
        if device is None:
            self._captured.clear()  # one batch's memory at a time
            device = Slots(self.sessions, slots, capacity, in_place=in_place)
        timing = batch.run(device, scheduler, double_buffering=double_buffering)
        if self.sessions.replays is not None:
            device.stop_all()
            self._captured[slots, capacity, in_place] = device
        return self._output(rows, collector, seeds, timing)

    def stop_strings(self, given: str | Sequence[str] | None, params: Any) -> tuple[str, ...]:
        """`given`, or what the model's own settings say where they are used. Raises ValueError without a tokenizer."""
        if given is None and params is None:
            given = self.generation_config.get("stop_strings")
        stops = check_stop_strings(given)
        if stops and self.tokenizer is None:
            raise ValueError("stop_strings are found in the text, and the package has no tokenizer; give eos_token_id")
        return stops

    def sampling_params(self, params: Any, options: Mapping[str, Any], rows: int) -> list[SamplingParams]:
        """One a row, from `params` or from the model's own settings with `options` on top. Raises ValueError."""
        if params is None:
            settings = {name: value for name, value in self.generation_config.items() if name != "stop_strings"}
            return [SamplingParams.from_generation_config(settings, **options)] * rows
        if options:
            raise ValueError(f"params and {', '.join(options)} were given; put everything into params, or leave it out")
        if isinstance(params, SamplingParams):
            return [params] * rows
        if not isinstance(params, Sequence) or not all(isinstance(row, SamplingParams) for row in params):
            raise ValueError(f"params is {params!r:.80}; give a SamplingParams, or a list with one for each prompt")
        if len(params) != rows:
            raise ValueError(f"{len(params)} SamplingParams were given for {rows} prompts; give one, or one for each")
        return list(params)

    def capacity(self, tokens: int) -> int:
        """T for rows of `tokens` tokens: fixed by the package or `load`, otherwise that many, rounded up; at most what
        the model knows."""
        if self._ctx_len is not None:
            return self._ctx_len
        rounded = -(-tokens // _CAPACITY_STEP) * _CAPACITY_STEP
        limit = self.package.manifest.max_position_embeddings
        return rounded if limit is None else min(rounded, limit)

    def _output(self, rows: list[Array], collector: Collector, seeds: list[int], timing: Timing) -> GenerateOutput:
        reasons = collector.finish_reasons
        invalid = [row for row, reason in enumerate(reasons) if reason == "invalid"]
        if invalid:
            warnings.warn(
                f"rows {invalid} ended early: the model gave NaN or infinite logits, or no token was allowed",
                stacklevel=3,
            )
        return GenerateOutput(
            sequences=pad_sequences(rows, collector.new_token_ids, self.package.manifest.token_ids.pad),
            new_token_ids=collector.new_token_ids,
            texts=collector.texts(),
            finish_reasons=reasons,
            seeds=seeds,
            prompt_lengths=[len(row) for row in rows],
            timing=timing,
            **collector.optional_outputs(),
        )

    def _text(self, prompt: Array, stop_strings: Sequence[str]) -> GeneratedText | None:
        return None if self.tokenizer is None else GeneratedText(self.tokenizer, prompt.tolist(), stop_strings)


def _check_ctx_len(package: Package, ctx_len: int | None) -> None:
    if ctx_len is None:
        return
    check_count("ctx_len", ctx_len, least=2)
    manifest = package.manifest
    if manifest.compilation is not None and ctx_len != manifest.compilation.ctx_len:
        raise ValueError(
            f"ctx_len is {ctx_len} and the package was compiled for {manifest.compilation.ctx_len}; compile the "
            "portable package again, or leave ctx_len out"
        )
    if manifest.max_position_embeddings is not None and ctx_len > manifest.max_position_embeddings:
        raise ValueError(f"ctx_len is {ctx_len}; the model knows {manifest.max_position_embeddings} positions at most")


def choose_seeds(seed: Any, given: Any, params: Sequence[SamplingParams]) -> list[int]:
    """A seed a row: from `seed`, otherwise from the rows' parameters, otherwise fresh."""
    rows = len(params)
    if isinstance(seed, Sequence) and not isinstance(seed, str):
        if len(seed) != rows:
            raise ValueError(f"{len(seed)} seeds were given for {rows} prompts; give one, or one for each")
        return [_checked_seed(value) for value in seed]
    one_a_row = given is not None and not isinstance(given, SamplingParams)
    if seed is None and one_a_row:
        return [secrets.randbelow(_SEEDS) if row.seed is None else row.seed for row in params]
    first = params[0].seed if seed is None else _checked_seed(seed)
    if first is None:
        return [secrets.randbelow(_SEEDS) for _ in params]
    return [(first + row) % _SEEDS for row in range(rows)]


def _checked_seed(seed: Any) -> int:
    params = SamplingParams(seed=seed)  # refuses what is no seed
    if params.seed is None:
        raise ValueError("a seed of the list is None; give an integer")
    return params.seed
