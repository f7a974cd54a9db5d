"""`load` opens a package, and `CausalLM.generate` continues a fixed set of prompts."""

from __future__ import annotations

import hashlib
import time
import warnings
from collections import abc
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, TypedDict, Unpack, overload

import numpy as np

from qsample.checks import as_path, check_count, from_keywords, plain
from qsample.contract.interface import Interface
from qsample.errors import ArgumentError, PackageError, shown
from qsample.images.features import DEFAULT_CACHE_BYTES, VisionEncoder
from qsample.ort.model_package import package_in
from qsample.ort.options import SessionOptions
from qsample.ort.session import VISION, Sessions, open_sessions
from qsample.package.package import Package, faster_way, read_package, use_package
from qsample.package.signature import TrustedKeys
from qsample.progress import Progress, Stage, Stages
from qsample.request.grammar import Form
from qsample.request.huggingface.facade import (
    Device,
    GenerationConfig,
    ModelConfig,
    ModelMethods,
    as_generation_config,
)
from qsample.request.own_settings import applied_settings
from qsample.request.sampling_params import GENERATION_CONFIG_FILE, SamplingParams
from qsample.request.structured.automaton import Thoughts
from qsample.request.structured.grammars import Grammars, Wish
from qsample.request.structured.tables import TokenGrammar
from qsample.request.text.generated_text import Streamer, check_streamer
from qsample.request.text.tokenizer import Tokenizer
from qsample.runtime.adapters import Adapter, read_adapter
from qsample.runtime.call import CONFIG_KEYWORDS, Call, Prompt, is_chat, parse_prompts, read_call
from qsample.runtime.callbacks import BatchEnd, Guide, LogitsProcessors
from qsample.runtime.decode.image_inputs import image_piece
from qsample.runtime.decode.loop import DecodeLoop, choose_flush_every
from qsample.runtime.decode.prefix_file import signature_of, write_prefix
from qsample.runtime.decode.prefixes import Pieces, shared_pieces, shared_prefix
from qsample.runtime.decode.scheduler import Scheduler, SchedulerConfig
from qsample.runtime.decode.slots import Slots
from qsample.runtime.image_prompts import ImageReader
from qsample.runtime.output import GenerateOutput, Timing, make_output
from qsample.runtime.prepare import find_adapter, make_sequences
from qsample.runtime.sequence import NO_DRAFTS, Sequence

# Unless the package or the caller fixes the capacity of a row, it is a multiple of this number
# of tokens.
_CAPACITY_STEP: Final = 64


class LoadKeywords(TypedDict, total=False):
    """The keywords of `load`. `LoadOptions` has their defaults."""

    ctx_len: int | None
    intra_op_num_threads: int | None
    provider_options: Mapping[str, str] | None
    session_config: Mapping[str, str] | None
    batch_invariant: bool
    image_cache_bytes: int
    verify: bool
    trusted_keys: TrustedKeys | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The keywords of `load`, where they are described. Raises ValueError for a wrong value."""

    ctx_len: int | None = None
    intra_op_num_threads: int | None = None
    provider_options: Mapping[str, str] | None = None
    session_config: Mapping[str, str] | None = None
    batch_invariant: bool = True
    image_cache_bytes: int = DEFAULT_CACHE_BYTES
    verify: bool = True
    trusted_keys: TrustedKeys | None = None

    def __post_init__(self) -> None:
        check_count("ctx_len", self.ctx_len, least=2)
        check_count("image_cache_bytes", self.image_cache_bytes, 0)
        _ = self.sessions

    @property
    def sessions(self) -> SessionOptions:
        """The options of ONNX Runtime."""
        return SessionOptions(
            self.intra_op_num_threads,
            self.provider_options or {},
            self.session_config or {},
            self.batch_invariant,
        )


def load(
    path: str | Path,
    provider: str | abc.Sequence[str] | None = None,
    **options: Unpack[LoadKeywords],
) -> CausalLM:
    """Open a package for generation. Needs onnxruntime, numpy and tokenizers, nothing else.

    Args:
        path: the folder of a package or a bundle.
        provider: "cpu", "cuda" or another of ONNX Runtime's providers by its short name (see
            `qsample.ort.providers.execution_providers`), or a list of ONNX Runtime's full names. By
            default the provider that a device package was compiled for, otherwise "cpu"; for a
            bundle, the variant for the first device here.
        ctx_len: the number of tokens of a row, for portable packages; by default what a call needs,
            up to max_position_embeddings.
        intra_op_num_threads: the number of threads of an operator. By default ONNX Runtime's
            choice, the machine's cores, or fewer if this process's affinity or a control group's
            quota leaves it fewer.
        provider_options: the options of the first provider, passed to ONNX Runtime; by default
            none.
        session_config: the entries of the session's configuration, passed to ONNX Runtime; by
            default none.
        batch_invariant: whether a row's tokens do not depend on the other rows of its batch; by
            default True. Some processors round a single row differently from several rows, so a
            step over one row computes two: docs/devices.md has the price. False gives up the
            promise, and takes each number of rows as it is.
        image_cache_bytes: the most bytes of image features that are kept for images that come
            again, by default 256 MiB. The images that were used longest ago are dropped first.
        verify: whether every file's sha256 is compared with the manifest first; by default True.
        trusted_keys: the keys of which one must have signed the package: PEM files of public keys
            or of certificate authorities, folders of such files, "sigstore:ACCOUNT,ISSUER" and the
            `.json` file of a trust configuration. By
            default no signature is needed. Needs the extra `sign`; see docs/security.md.
        options: the keywords above, from ctx_len on.

    Raises PackageError if the package is damaged or not signed by a trusted key, QsampleError if it
    does not fit the provider or ctx_len, ValueError for a wrong value, and TypeError for an unknown
    keyword.

    >>> model = load("exported")
    >>> model.generate("In the beginning", max_new_tokens=16, temperature=0.8, seed=1).texts
    """
    chosen = from_keywords(LoadOptions, "load", options)

    def opened(package: Package) -> CausalLM:
        _check_ctx_len(package, chosen.ctx_len)

        def open_vision() -> VisionEncoder:
            with package.verified_again(VISION):
                return VisionEncoder(package, chosen.image_cache_bytes, provider, chosen.sessions)

        return CausalLM(
            package,
            open_sessions(package, provider, chosen.sessions),
            chosen.ctx_len,
            open_vision=open_vision,
            loaded_with={"provider": provider, **asdict(chosen)},
        )

    return use_package(
        package_in(path, provider),
        opened,
        verify=chosen.verify,
        trusted_keys=chosen.trusted_keys,
    )


class CausalLM(ModelMethods):
    """A loaded package. It is pickled as the arguments of `load`, and opened again from the
    package's path.

    Attributes:
        package: the package's folder and manifest.
        interface: the inputs, states and outputs of the graph.
        features: the features of the graph.
        tokenizer: the tokenizer; None if the package was exported without a tokenizer.
        grammars: the compiled forms of answers.
        config: the model's config.json.
        sessions: the graphs.
        images: the reader of images.
        batch_size: the most rows of a batch; None for any number.
    """

    def __init__(
        self,
        package: Package,
        sessions: Sessions,
        ctx_len: int | None = None,
        *,
        open_vision: abc.Callable[[], VisionEncoder] | None = None,
        loaded_with: Mapping[str, Any] | None = None,
    ) -> None:
        """Make a model of opened sessions; see `load`.

        Args:
            package: the package.
            sessions: the package's sessions.
            ctx_len: the tokens of a row, for a portable package.
            open_vision: opens vision.onnx, see `ImageReader`.
            loaded_with: the arguments of `load` except the path. Without them, the model cannot be
                pickled.
        """
        self.package = package
        self.interface: Interface = package.interface
        self.features = self.interface.features
        self.tokenizer = Tokenizer.of(package)
        self.grammars = Grammars(self.interface, self.tokenizer)
        self.config = ModelConfig(package.read_json("config.json"))
        self._generation_config = GenerationConfig(package.read_json(GENERATION_CONFIG_FILE))
        # The settings that were applied last, and those of them that the package applies.
        self._applied: tuple[dict[str, Any], dict[str, Any]] | None = None
        # The file's settings, from which the caller's may differ by now.
        self._file_settings = dict(self._generation_config)
        self._file_stops = self._generation_config.eos_token_id
        self.sessions = sessions
        compilation = package.manifest.compilation
        self._ctx_len = compilation.ctx_len if compilation else ctx_len
        self.batch_size = compilation.batch_size if compilation else None
        # Captured graphs belong to the memory of a batch, and cost more to make than many steps.
        self._captured: dict[tuple[int, int, int], Slots] = {}
        self._adapters: dict[str, Adapter] = {}
        self.images = ImageReader(package, open_vision)
        self._loaded_with = loaded_with
        self._advice = faster_way(package)  # The first call shows it.

    def __repr__(self) -> str:
        return f"CausalLM({self.package.summary}, on {self.device})"

    def __reduce__(self) -> tuple[Any, ...]:
        if self._loaded_with is None:
            raise TypeError(
                "this model was not opened by qsample.runtime.load, so no path says how to open it again"
            )
        settings = dict(self.generation_config)
        return _reopen, (self.package.path, _fingerprint(self.package), self._loaded_with, settings)

    @property
    def generation_config(self) -> GenerationConfig:
        """The defaults of calls, from the model's file; they may be changed, or replaced, as in
        `generate`."""
        return self._generation_config

    @generation_config.setter
    def generation_config(self, value: Any) -> None:
        self._generation_config = as_generation_config(value)

    @property
    def applied_settings(self) -> dict[str, Any]:
        """The fields of `generation_config` that the package applies. A warning names the others,
        once."""
        given = {name: plain(value) for name, value in self.generation_config.items()}
        if self._applied is None or self._applied[0] != given:
            file = self._file_settings
            changed = [name for name, value in given.items() if value != file.get(name)]
            applied, left_out = applied_settings(given, self.interface, CONFIG_KEYWORDS, changed)
            if left_out is not None:
                warnings.warn(left_out, stacklevel=4)
            self._applied = given, applied
        return self._applied[1]

    @property
    def device(self) -> Device:
        return Device(self.sessions.device.partition(":")[0])

    @property
    def dtype(self) -> str:
        return self.interface.dtype

    @overload
    def generate(
        self,
        inputs: Any = ...,
        params: Any = ...,
        *,
        return_dict_in_generate: Literal[False],
        **options: Any,
    ) -> Any: ...

    @overload
    def generate(
        self,
        inputs: Any = ...,
        params: Any = ...,
        *,
        return_dict_in_generate: bool | None = ...,
        **options: Any,
    ) -> GenerateOutput: ...

    def generate(
        self,
        inputs: Any = None,
        params: SamplingParams | abc.Sequence[SamplingParams] | None = None,
        *,
        streamer: Streamer | None = None,
        prefill_chunk_size: int | None = None,
        flush_every: int | None = None,
        double_buffering: bool = True,
        **options: Any,
    ) -> Any:
        """Continue a prompt, or a batch of prompts of different lengths.

        Args:
            inputs: a text, token ids, a 1-D or 2-D integer array, chat messages, or a list of any
                of these.
            params: the parameters of all rows, or a list with the parameters of each prompt. By
                default the model's generation_config, with `options` on top.
            attention_mask: 0 for each token of the inputs that is padding, with their shape. By
                default as transformers infers it for a block [rows, tokens]: the pad token is
                padding, unless it is a stop token, too. In a single row without that axis, and in
                rows of different lengths, every token is read.
            images: the images of a prompt, an image or a list; for several prompts, a list with the
                images of each. An image is a path, the bytes of a file, an image of Pillow, or an
                array [height, width, 3] uint8. Images take the places that the prompt has for
                them, see docs/images.md; without places, they come before a text.
            streamer: gets the prompt and then every token, as in Hugging Face; for a single prompt.
            seed: the seed of the first row, after which the seeds of the next rows are counted; or
                a list with the seed of each row. By default the seeds of `params`, otherwise fresh
                seeds. A row depends on its seed only, not on the batch.
            allowed_tokens: an int32 bitmask of the tokens that may be sampled, [W] or [B, W]; or a
                function that writes the mask of each next token, see `AllowedTokensFn`. Needs the
                feature.
            prefill_chunk_size: the most tokens of short prompts that are read in a call; by
                default, only as many as make it faster. A prompt is always read in pieces
                (`sessions.prompts.piece_size` tokens).
            flush_every: the number of decode steps between two reads of the sampled tokens and the
                optional outputs; by default 1 on the CPU, 4 elsewhere. It changes no token, only
                how many come at once. If the tokens of every step are needed, for example by a
                function for allowed_tokens, tokens are read every step, and outputs as before.
            double_buffering: whether the next step starts while the tokens of the last step are
                read and streamed; False waits.
            stop_strings: the texts that end a row; by default those of the generation_config.
                `texts` is cut off before the first complete stop string; `token_ids` goes on to the
                token that completes it.
            skip_special_tokens, include_stop_str_in_output: whether `texts` lack special tokens, and
                whether they include the stop string, or the stop token, that ends them; by default
                True and False.
            repetition_detection: the repetitions that end a row, a mapping with the fields of
                `RepetitionDetection`; by default none does.
            allowed_token_ids: the ids of the tokens that may be sampled; by default all. Needs the
                feature `allowed_tokens` or `grammars`.
            return_dict_in_generate: False returns the `sequences` only, without the attributes of
                the output.
            options: the arguments above from attention_mask on, except those of the signature;
                vLLM's names max_tokens, min_tokens, stop, n, ignore_eos and stop_token_ids. Fields
                of SamplingParams, or do_sample, in place of `params`, as in
                `SamplingParams.from_generation_config`. With chat messages, also the fields of
                `ChatOptions`. And transformers' arguments: input_ids, for inputs;
                generation_config, an object, a mapping or a path, on top of the model's;
                pad_token_id; bos_token_id; tokenizer, if the package has none; max_time, in
                seconds; stopping_criteria, see `BatchEnd`; logits_processor, see
                `LogitsProcessors`; num_return_sequences, the number of adjacent rows of each
                prompt, which is read once. docs/transformers.md has the others.

        A row ends at a stop token, at its maximum length (by default the model's, otherwise 256 new
        tokens), or if the context length is full.

        Returns:
            A `GenerateOutput`: the token ids of all rows, [B, P + N] int64, with further
            attributes; a tensor if the prompts were given as a tensor, an array otherwise.

        Raises:
            ValueError: an argument is wrong.
        """
        if self._advice is not None:
            warnings.warn(self._advice, stacklevel=2)
            self._advice = None
        call = self.read(inputs, params, **options)
        name = call.scoring_argument
        if name is not None:
            raise ArgumentError(
                f"{name} is for requests of an Engine, add_request(prompt, {name}=...); leave it out",
                name,
            )
        sequences, guide = self.prepare(call)
        self.images.compute_features(sequences)
        pad = self.package.manifest.token_ids.pad if call.fill is None else call.fill
        end = None
        if call.stopping_criteria is not None or call.max_time is not None:
            end = BatchEnd(call.stopping_criteria, call.max_time, sequences, pad)
        processors = None
        if call.logits_processor is not None:
            processors = LogitsProcessors(call.logits_processor, sequences, self.interface)
        batch = _Batch(sequences, streamer, guide, end)
        slots = min(len(sequences), len(sequences) if self.batch_size is None else self.batch_size)
        self._check_batch(batch, slots)
        check_count("prefill_chunk_size", prefill_chunk_size)
        if flush_every is None and end is not None:
            flush_every = 1
        flush_every = choose_flush_every(self.sessions, flush_every)
        if guide is not None:
            guide.start()
        config = SchedulerConfig.of(
            self.sessions,
            flush_every=flush_every,
            prefill_chunk_size=prefill_chunk_size,
            interleave=False,
        )
        capacity = self.capacity(max(sequence.request.max_length for sequence in sequences))
        device = self._take_slots(slots, capacity, flush_every)
        device.process_logits = processors
        loop = DecodeLoop(
            device, Scheduler(slots, config), batch.deliver, double_buffering=double_buffering
        )
        timing = batch.run(loop)
        if self.sessions.replays is not None:
            for slot in range(slots):
                device.stop(slot)
            self._captured[slots, capacity, flush_every] = device
        prompts = options.get("input_ids") if inputs is None else inputs
        output = make_output(self.interface, sequences, pad, timing, prompts)
        invalid = [row for row, reason in enumerate(output.finish_reasons) if reason == "invalid"]
        if invalid:
            warnings.warn(
                f"rows {invalid} ended early: the model gave NaN or infinite logits, or no token was allowed",
                stacklevel=2,
            )
        return output.sequences if call.return_dict is False else output

    def _check_batch(self, batch: _Batch, slots: int) -> None:
        """Raise ValueError unless the batch can run in `slots`: its streamer follows a single row,
        and callbacks of the whole batch need all rows to run at once."""
        if batch.guide is not None:
            self._check_together(
                batch.sequences, slots, "a function for allowed_tokens follows a single batch"
            )
        elif batch.end is not None:
            self._check_together(
                batch.sequences, slots, "stopping_criteria and max_time follow a single batch"
            )
        if batch.streamer is not None:
            check_streamer(batch.streamer, len(batch.sequences))

    def _check_together(self, sequences: abc.Sequence[Sequence], slots: int, reason: str) -> None:
        """Raise ValueError unless all sequences can run at once."""
        adapters = {sequence.request.adapter_sha256 for sequence in sequences} - {""}
        most = self.features.max_loras
        if slots < len(sequences):
            raise ValueError(
                f"{len(sequences)} prompts were given and the package was compiled for {slots} at most; {reason}"
            )
        if most < len(adapters):
            raise ValueError(
                f"{len(adapters)} adapters were given and the package takes {most} at once; {reason}"
            )

    def read(self, inputs: Any = None, params: Any = None, **options: Any) -> Call:
        """A `Call` of the arguments of `generate` and the generation_config. Raises ValueError for
        a wrong argument."""
        # Without stop_strings, those of the generation_config count.
        if options.get("stop_strings") is None:
            options.pop("stop_strings", None)
        token_ids = self.package.manifest.token_ids
        return read_call(
            inputs,
            params,
            options,
            self.applied_settings,
            token_ids,
            self.interface.vocab_size,
            self._file_stops,
        )

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The loaded LoRA adapters by name."""
        return MappingProxyType(self._adapters)

    def load_adapter(
        self, adapter_name: str, path: str | Path, *, hotswap: bool = False
    ) -> Adapter:
        """Load a LoRA adapter, for requests that name it. It may be done while requests run.

        Args:
            adapter_name: the name by which requests call the adapter.
            path: a folder that peft wrote, with `adapter_config.json` and
                `adapter_model.safetensors`.
            hotswap: whether the adapter may replace an adapter of that name; requests that run with
                the old adapter go on to their end.

        Raises:
            ValueError: If the name is taken or not a text, the path is not a path, or the package
                takes no adapters.
            UnsupportedModelError: If the adapter is more than plain LoRA, or changes layers that
                the package keeps.
            QsampleError: If a file is missing or damaged, or the adapter is of another model or too
                large.
        """
        if not hotswap and isinstance(adapter_name, str) and adapter_name in self._adapters:
            raise _name_taken(adapter_name)
        adapter = read_adapter(adapter_name, path, self.interface)
        if hotswap:
            self._adapters[adapter_name] = adapter
        elif self._adapters.setdefault(adapter_name, adapter) is not adapter:
            # Another thread has loaded an adapter of that name meanwhile.
            raise _name_taken(adapter_name)
        return adapter

    def unload_adapter(self, adapter_name: str) -> None:
        """Forget the LoRA adapter `adapter_name`; requests that run with it go on. Raises
        ValueError for an unknown name."""
        if not isinstance(adapter_name, str) or self._adapters.pop(adapter_name, None) is None:
            loaded = ", ".join(self._adapters) or "none"
            raise ValueError(
                f"adapter_name is {shown(adapter_name)}; give the name of a loaded adapter: {loaded}"
            )

    def prepare(
        self, call: Call, capacity: int | None = None, *, priority: int = 0
    ) -> tuple[list[Sequence], Guide | None]:
        """The sequences of a call, and the guide that writes their masks if its allowed_tokens is a
        function.

        Args:
            call: the arguments of the call.
            capacity: the tokens of a slot; by default the need of the longest sequence.
            priority: the rank of the sequences among those that wait; the lowest goes first.

        Raises ValueError for a wrong argument.
        """
        return make_sequences(
            call,
            self.interface,
            self.package.manifest.token_ids,
            self.tokenizer,
            self.capacity if capacity is None else lambda needed: capacity,
            self._adapters,
            self.images,
            priority=priority,
        )

    def grammar(
        self,
        *,
        json: Mapping[str, Any] | str | None = None,
        regex: str | None = None,
        choice: abc.Sequence[str] | None = None,
        grammar: str | None = None,
        thoughts: tuple[str, str] | None = None,
    ) -> TokenGrammar:
        """Tables by which the graph keeps an answer to a form, for `grammar` of `generate` and
        `Engine.add_request`. It needs the extra `guided`.

        The form is one of the first four arguments, vLLM's names; without any, an answer is any
        text after its thoughts.

        Args:
            json: a JSON schema, or its text; docs/structured-outputs.md lists the keywords.
            regex: an expression of Rust's regex crate that the whole answer matches.
            choice: the possible answers.
            grammar: a grammar in llama.cpp's GBNF that is not recursive.
            thoughts: the texts that begin and end the thoughts of the model, such as ("<think>",
                "</think>"). An answer may then have thoughts before the form. For a chat template
                that begins them in the prompt, the first text is empty: ("", "</think>"). None for
                answers without thoughts.

        Raises:
            NotRegularError: no finite automaton follows the form, so that it needs masks.
            ArgumentError: the form is invalid, or no answer can follow it.
            ValueError: several forms were given, or the model cannot follow any.

        >>> schema = {"type": "object", "properties": {"age": {"type": "integer"}}}
        >>> model.generate("He was", grammar=model.grammar(json=schema))
        """
        given = [
            Form("json_schema", json),
            Form("regex", regex),
            Form("choice", choice),
            Form("grammar", grammar),
        ]
        forms = [form for form in given if form.value is not None]
        if len(forms) > 1:
            raise ValueError("several forms were given; give one of json, regex, choice, grammar")
        if not forms and thoughts is None:
            raise ValueError("no form was given; give one of json, regex, choice, grammar")
        marks = None if thoughts is None else Thoughts.between(*thoughts)
        return self.grammars.tables(Wish(forms[0] if forms else None, marks))

    def save_prefix(
        self,
        inputs: Any,
        path: str | Path,
        *,
        adapter: str | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> int:
        """Read a prompt, and write its keys, values and recurrent states to a file, for
        `Engine(prefixes=[...])`.

        A prompt that begins with the same tokens continues from there, in any process, and gets the
        tokens that it gets without the file. Prompts are read in pieces
        (`sessions.prompts.piece_size` tokens), and whole pieces are saved.

        Args:
            inputs: a text, token ids, or chat messages. For messages, the tokens are saved that all
                conversations share which begin with them, before any continuation.
            path: the path of the file, in safetensors' format; a file of that name is replaced.
            adapter: the name of a loaded adapter. The file is for prompts with the same adapter,
                under any name.
            progress: called with a stage's name and the fraction done, in [0, 1].
            options: the options of chat messages, and images, as in `generate`.

        Returns:
            The number of tokens in the file.

        Raises:
            ValueError: If the prompt is not valid, shorter than a piece, or longer than the model's
                context.
            PackageError: If the file cannot be written.
        """
        path = as_path("path", path)
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise PackageError(
                f"cannot write {path}; give the path of a file in an existing folder"
            )
        pieces = Pieces.of(self.sessions)
        prompt, common, count = self._common_beginning(inputs, options, pieces)
        if count == 0:
            raise ValueError(
                f"the prompt has {common} tokens that are the same in every conversation, and {pieces.size} are "
                "the least that can be saved; give a longer prompt"
            )
        capacity = self.capacity(count + 1)
        if count >= capacity:
            raise ValueError(
                f"the prompt has {common} tokens, and a row of this package holds {capacity}"
            )
        features = None if prompt.images is None else self.images.features(prompt.images)
        own = find_adapter(adapter, self._adapters, self.interface)
        slots = Slots(self.sessions, 1, capacity)
        if own is not None:
            slots.adapters.put(1, own)
        slots.begin(0, prompt.ids, 0, {}, adapter=0 if own is None else 1)
        stages = Stages(progress, {Stage.READING_PROMPT: 1.0})
        advance = stages.begin(Stage.READING_PROMPT)
        for piece in pieces.cut(prompt.identities, 0, count):
            advance(piece.start / count)
            images = [image_piece(prompt.images, features, piece)]
            ids = prompt.ids[piece.start : piece.stop]
            slots.prefill(0, ids, emit=False, wait=piece.stop == count, images=images)
        signature = signature_of(self.package, self.sessions)
        sha256 = "" if own is None else own.sha256
        write_prefix(
            path, signature, prompt.identities[:count], slots.unload(0, 0, count), adapter=sha256
        )
        stages.finish()
        return count

    def _common_beginning(
        self, inputs: Any, options: Mapping[str, Any], pieces: Pieces
    ) -> tuple[Prompt, int, int]:
        """A prompt, the number of its tokens that do not depend on later chat messages, and the
        number of those tokens that are in whole pieces."""

        def read(inputs: Any, **more: Any) -> Prompt:
            call = self.read(inputs, max_new_tokens=1, **options, **more)
            prompts = parse_prompts(
                call,
                self.tokenizer,
                self.interface.vocab_size,
                self.package.manifest.token_ids.bos,
                self.images,
            )
            if len(prompts) != 1:
                raise ValueError(f"{len(prompts)} prompts were given; save them one by one")
            return prompts[0]

        if not is_chat(inputs):
            prompt = read(inputs)
            return prompt, len(prompt.ids), pieces.begin(prompt.identities, len(prompt.ids))
        role = "assistant" if inputs[-1].get("role") == "user" else "user"

        def read_with(text: str) -> Prompt:
            message = {"role": role, "content": text}
            return read([*inputs, message], add_generation_prompt=False)

        # Any two texts would do that begin with different letters.
        one = read_with("A")
        other = read_with("7")
        common = shared_prefix(other.identities, one.identities)
        return one, common, shared_pieces(other.identities, one.identities, pieces)

    def _take_slots(self, count: int, capacity: int, flush_every: int) -> Slots:
        """Slots that were captured before, or new slots."""
        captured = self._captured.pop((count, capacity, flush_every), None)
        if captured is not None:
            return captured
        self._captured.clear()  # Only one batch at a time may hold memory.
        return Slots(self.sessions, count, capacity, flush_every=flush_every)

    def capacity(self, tokens: int) -> int:
        """T, the size of buffers for rows of `tokens` tokens: fixed by the package or `load`,
        otherwise `tokens` rounded up, at most the positions of the model."""
        if self._ctx_len is not None:
            return self._ctx_len
        rounded = -(-tokens // _CAPACITY_STEP) * _CAPACITY_STEP
        limit = self.package.manifest.max_position_embeddings
        return rounded if limit is None else min(rounded, limit)


@dataclass(frozen=True, slots=True)
class _Batch:
    """The rows of a call of `generate`, and everything that follows them while they run.

    Args:
        sequences: the rows.
        streamer: gets the tokens of the only row.
        guide: writes masks between steps.
        end: ends rows before the graph does.
    """

    sequences: list[Sequence]
    streamer: Streamer | None
    guide: Guide | None
    end: BatchEnd | None

    def run(self, loop: DecodeLoop) -> Timing:
        """Run every row to its end. The streamer ends in any case: who reads it waits no longer after
        an error, and the next call finds it as new."""
        if self.streamer is None:
            return self._run(loop)
        try:
            self.streamer.put(self.sequences[0].request.given_prompt[None])
            return self._run(loop)
        finally:
            self.streamer.end()

    def _run(self, loop: DecodeLoop) -> Timing:
        started = time.perf_counter()
        prefilled = None
        with loop:
            for sequence in self.sequences:
                loop.add(sequence)
            while loop.busy:
                loop.step()
                if prefilled is None and all(sequence.started for sequence in self.sequences):
                    prefilled = time.perf_counter()
                self._follow(loop)
        ended = time.perf_counter()
        if prefilled is None:
            prefilled = ended
        drafts = sum((sequence.progress.drafts for sequence in self.sequences), NO_DRAFTS)
        return Timing(prefilled - started, ended - prefilled, loop.steps, drafts)

    def deliver(self, sequence: Sequence) -> None:
        """Stream the tokens of a row that were read. If there is an `end`, it takes them, a token
        of every row at a time, so that no token after the end is streamed."""
        if self.end is None:
            self._stream(sequence)

    def _follow(self, loop: DecodeLoop) -> None:
        """Let the guide and the end see the tokens of a step."""
        if self.guide is not None and loop.busy and not loop.prefilling:
            self.guide.update(loop.set_parameter, loop.read_outputs)
        if self.end is not None:
            self.end.update(loop.leave, partial(self._stream, most=1))

    def _stream(self, sequence: Sequence, most: int | None = None) -> None:
        """Take the tokens of a row that were read, at most `most`, and give them to the
        streamer."""
        tokens, _ = sequence.take(most)
        if self.streamer is None:
            return
        for token in tokens:
            self.streamer.put(np.array([token], dtype=np.int64))


def _name_taken(adapter_name: str) -> ValueError:
    return ValueError(
        f"an adapter {shown(adapter_name)} is loaded already; give another name, unload it first, or replace it with "
        "hotswap=True"
    )


def _check_ctx_len(package: Package, ctx_len: int | None) -> None:
    if ctx_len is None:
        return
    manifest = package.manifest
    if manifest.compilation is not None and ctx_len != manifest.compilation.ctx_len:
        raise ValueError(
            f"ctx_len is {ctx_len} and the package was compiled for {manifest.compilation.ctx_len}; compile the "
            "portable package again, or leave ctx_len out"
        )
    if manifest.max_position_embeddings is not None and ctx_len > manifest.max_position_embeddings:
        raise ValueError(
            f"ctx_len is {ctx_len}; the model knows {manifest.max_position_embeddings} positions at most"
        )


def _fingerprint(package: Package) -> str:
    """sha256 of a package's manifest, with the hashes of all files."""
    return hashlib.sha256(package.manifest.to_json().encode()).hexdigest()


def _reopen(
    path: Path, wanted: str, arguments: Mapping[str, Any], generation_config: Mapping[str, Any]
) -> CausalLM:
    """`load` the package of a pickled model again. Raises PackageError unless its fingerprint is
    the `wanted` one."""
    try:
        package = read_package(path, verify=False)
    except PackageError as error:
        raise PackageError(
            f"a pickled model is opened again from its package, {path}, which cannot be read here: {error}"
        ) from error
    if _fingerprint(package) != wanted:
        raise PackageError(
            f"{path} is another package than when this model was pickled; put the old package back, or load the new "
            "package and pickle it"
        )
    model = load(path, **arguments)
    model.generation_config = generation_config
    return model
