"""`load` opens a package, and `CausalLM.generate` continues a fixed set of prompts."""

from __future__ import annotations

import time
import warnings
from collections import abc
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from qsample.contract import ALLOWED_TOKENS, Interface
from qsample.package import Package, read_package
from qsample.runtime.decode.loop import DecodeLoop, choose_flush_every
from qsample.runtime.decode.scheduler import Scheduler
from qsample.runtime.decode.slots import Slots
from qsample.runtime.guided_decoding import Guide
from qsample.runtime.output import GenerateOutput, Timing, make_output
from qsample.runtime.parameters import choose_seeds, parameter_arrays
from qsample.runtime.prompts import parse_prompts
from qsample.runtime.sequence import Sequence
from qsample.runtime.session.options import SessionOptions, check_count
from qsample.runtime.session.session import Sessions, open_sessions
from qsample.runtime.text.chat import ChatOptions
from qsample.runtime.text.generated_text import GeneratedText
from qsample.runtime.text.stop_strings import check_stop_strings
from qsample.runtime.text.streamer import Streamer
from qsample.runtime.text.tokenizer import Tokenizer
from qsample.sampling_params import SamplingParams

_CAPACITY_STEP: Final = 64  # capacities are multiples of this, where nothing else decides


def load(
    path: str | Path,
    provider: str | abc.Sequence[str] | None = None,
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
        params: SamplingParams | abc.Sequence[SamplingParams] | None = None,
        *,
        attention_mask: Any = None,
        streamer: Streamer | None = None,
        seed: int | abc.Sequence[int] | None = None,
        allowed_tokens: Any = None,
        prefill_chunk_size: int | None = None,
        flush_every: int | None = None,
        double_buffering: bool = True,
        stop_strings: str | abc.Sequence[str] | None = None,
        in_place: bool = True,
        **options: Any,
    ) -> GenerateOutput:
        """Continue one prompt or a batch of prompts of different lengths.

        Args:
            inputs: a text, token ids, a list of either, a 2-D integer array, or chat messages; see `parse_prompts`.
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
                `token_ids` goes on to the token that completes it. None = what the generation_config says.
            in_place: write the history and the cache into the buffers that they were read from; False takes turns
                between two sets, with the same result.
            options: fields of SamplingParams, or do_sample, in place of `params`; as in
                `SamplingParams.from_generation_config`. With chat messages also tools, documents, chat_template,
                chat_template_kwargs, add_generation_prompt and continue_final_message, see `ChatOptions`.

        A row ends at a stop token, at its maximum length (256 new tokens where neither the model nor the caller says),
        or where the context length is full. Raises ValueError where an argument is wrong.
        """
        sequences, guide = self.prepare(
            inputs,
            params,
            options,
            attention_mask=attention_mask,
            seed=seed,
            stop_strings=stop_strings,
            allowed_tokens=allowed_tokens,
        )
        slots = min(len(sequences), self.batch_size or len(sequences))
        if guide is not None and slots < len(sequences):
            raise ValueError(
                f"{len(sequences)} prompts were given and the package was compiled for {slots} at most; a function for "
                "allowed_tokens follows one batch"
            )
        if streamer is not None and len(sequences) != 1:
            raise ValueError(
                f"a streamer follows one prompt, and {len(sequences)} were given; generate them one by one"
            )
        check_count("prefill_chunk_size", prefill_chunk_size)
        flush_every = choose_flush_every(self.sessions, flush_every, guided=guide is not None)
        if guide is not None:
            guide.start()
        scheduler = Scheduler(
            slots,
            flush_every,
            self.sessions.chunk(prefill_chunk_size),
            interleave=False,
            keep_prefixes=not self.interface.recurrent,
            join_prompts=self.sessions.joins_prompts,
        )
        capacity = self.capacity(max(sequence.max_length for sequence in sequences))
        device = self._captured.pop((slots, capacity, in_place), None)
        if device is None:
            self._captured.clear()  # one batch's memory at a time
            device = Slots(self.sessions, slots, capacity, in_place=in_place)
        deliver = partial(_stream, streamer)
        loop = DecodeLoop(device, scheduler, deliver, double_buffering=double_buffering)
        if streamer is not None:
            streamer.put(sequences[0].prompt[None])
        timing = _run(loop, sequences, guide)
        if streamer is not None:
            streamer.end()
        if self.sessions.replays is not None:
            device.stop_all()
            self._captured[slots, capacity, in_place] = device
        output = make_output(self.interface, sequences, self.package.manifest.token_ids.pad, timing)
        invalid = [row for row, reason in enumerate(output.finish_reasons) if reason == "invalid"]
        if invalid:
            warnings.warn(
                f"rows {invalid} ended early: the model gave NaN or infinite logits, or no token was allowed",
                stacklevel=2,
            )
        return output

    def prepare(
        self,
        inputs: Any,
        params: Any,
        options: Mapping[str, Any],
        *,
        attention_mask: Any = None,
        seed: Any = None,
        stop_strings: Any = None,
        allowed_tokens: Any = None,
        capacity: int | None = None,
    ) -> tuple[list[Sequence], Guide | None]:
        """A sequence for each prompt; and the guide that writes their masks, where allowed_tokens is a function.

        capacity: tokens of a slot; None = what these sequences need. The other arguments are those of `generate`.
        Raises ValueError where one is wrong.
        """
        interface, token_ids = self.interface, self.package.manifest.token_ids
        chat, options = ChatOptions.split(options)
        rows = parse_prompts(inputs, attention_mask, self.tokenizer, interface.vocab_size, token_ids, chat)
        row_params = self.sampling_params(params, options, len(rows))
        seeds = choose_seeds(seed, params, row_params)
        stops = self.stop_strings(stop_strings, params)
        lengths = [len(row) for row in rows]
        if capacity is None:
            needed = (row.total_length(length) for row, length in zip(row_params, lengths, strict=True))
            capacity = self.capacity(max(needed))
        arrays = parameter_arrays(interface, row_params, lengths, capacity, token_ids.eos, allowed_tokens)
        guided = callable(allowed_tokens)
        sequences = []
        for row, prompt in enumerate(rows):
            text = None if self.tokenizer is None else GeneratedText(self.tokenizer, prompt.tolist(), stops)
            parameters = {name: values[row] for name, values in arrays.items()}
            sequences.append(Sequence(prompt, parameters, seeds[row], guided, text))
        if not guided:
            return sequences, None
        return sequences, Guide(allowed_tokens, sequences, arrays[ALLOWED_TOKENS.name], token_ids.pad)

    def stop_strings(self, given: str | abc.Sequence[str] | None, params: Any) -> tuple[str, ...]:
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
        if not isinstance(params, abc.Sequence) or not all(isinstance(row, SamplingParams) for row in params):
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


def _stream(streamer: Streamer | None, sequence: Sequence) -> None:
    for token in sequence.take()[0]:
        if streamer is not None:
            streamer.put(np.array([token], dtype=np.int64))


def _run(loop: DecodeLoop, sequences: list[Sequence], guide: Guide | None) -> Timing:
    """Run every sequence to its end."""
    started, prefilled = time.perf_counter(), None
    with loop:
        for sequence in sequences:
            loop.add(sequence)
        while loop.busy:
            loop.step()
            if prefilled is None and all(sequence.started for sequence in sequences):
                prefilled = time.perf_counter()
            if guide is not None and loop.busy and not loop.prefilling:
                guide.update(loop.set_parameter)
    ended = time.perf_counter()
    prefilled = prefilled or ended
    return Timing(prefilled - started, ended - prefilled, loop.steps)


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
