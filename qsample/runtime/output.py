"""The result of `generate`."""

from __future__ import annotations

import copy
import functools
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from qsample.contract.arrays import Array
from qsample.contract.interface import Interface
from qsample.contract.tensors import BATCH, LOGPROBS
from qsample.request.refusals import GENERATE
from qsample.runtime.callbacks import BatchEnd, Guide
from qsample.runtime.decode.loop import DecodeLoop
from qsample.runtime.sequence import NO_DRAFTS, DraftStats, Sequence, sequences_array
from qsample.text.generated_text import Streamer

_FILL = {"logprobs": np.nan, "top_logprobs": np.nan, "top_logprob_ids": -1, "probs": 0}


@dataclass(frozen=True, slots=True)
class Timing:
    """The time of a batch.

    Args:
        prefill_seconds, decode_seconds: until the first token of every row, and from there to the end.
        steps: decode steps of the whole batch; double buffering may run a window more than the rows needed.
        drafts: how the guessed tokens of all rows fared; zeros if the package makes no guesses.
    """

    prefill_seconds: float
    decode_seconds: float
    steps: int
    drafts: DraftStats = NO_DRAFTS


class GenerateOutput:
    """The result of `generate`; row i belongs to prompt i, or, with num_return_sequences n, to prompt i // n.

    It is its `sequences`, with further attributes: a tensor of torch on the device of the prompts if these were given
    as a tensor, and a NumPy array otherwise. So everything that takes the result of transformers takes it:
    `tokenizer.batch_decode(output)`, `output[:, input_ids.shape[1] :]`, `torch.cat([output, more], dim=1)`. Rows,
    slices and results of computations are plain tensors or arrays.

    Attributes:
        sequences: [B, P + N] int64 in transformers' layout, a plain tensor or array: the prompts in P columns, padding
            included, and from column P on the new tokens, then the pad id. The padding of a prompt stays on its side;
            prompts of different lengths get the pad id on their left.
        token_ids, texts: the sampled tokens, a stop token included, and their text, a continuation of the prompt; texts
            is None if the package has no tokenizer.
        finish_reasons: "stop" (a stop token, a stop string or a stopping criterion), "length", "time" (max_time), or
            "invalid" (the model gave NaN or infinite logits, or no token was allowed).
        seeds: each reproduces its row.
        prompt_lengths: in tokens, without padding.
        timing: of the whole batch.
        logprobs: [B, N] float32; NaN after a row's end. N: the most new tokens of a row. This and the rest are arrays
            for packages with the feature, unless `outputs` leaves them out, otherwise None.
        top_logprob_ids, top_logprobs: [B, N, M] int32 and float32; -1 and NaN after a row's end.
        probs: [B, N, V] float32; 0 after a row's end.
    """

    sequences: Any
    token_ids: list[list[int]]
    texts: list[str] | None
    finish_reasons: list[str]
    seeds: list[int]
    prompt_lengths: list[int]
    timing: Timing
    logprobs: Array | None = None
    top_logprob_ids: Array | None = None
    top_logprobs: Array | None = None
    probs: Array | None = None

    if TYPE_CHECKING:  # of both kinds
        shape: Any

        def __len__(self) -> int: ...
        def tolist(self) -> list[list[int]]: ...

    def __iter__(self) -> Iterator[Any]:
        return iter(self.sequences)

    def __getitem__(self, index: Any) -> Any:
        """An item of the sequences; a field, if `index` is its name, as in transformers' ModelOutput."""
        if isinstance(index, str):
            if index not in GenerateOutput.__annotations__:
                raise KeyError(
                    f"{index!r}; the fields are {', '.join(GenerateOutput.__annotations__)}"
                )
            return getattr(self, index)
        return self.sequences[index]

    def __getattr__(self, name: str) -> Any:
        # Only called for a name without a field: for fields of transformers' outputs, it says what to do instead.
        refusal = GENERATE.get(f"output_{name}", GENERATE.get(name))
        why = f": {refusal.instead}" if refusal else ""
        if refusal is None and isinstance(self, np.ndarray):
            why = ", a NumPy array here; give the prompts as a tensor, and it is a tensor"
        raise AttributeError(f"generate returns no {name}{why}")

    def __repr__(self) -> str:
        return f"GenerateOutput({self.sequences!r}, texts={self.texts!r}, finish_reasons={self.finish_reasons!r})"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _output, (self.sequences, vars(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> GenerateOutput:
        return _output(*copy.deepcopy((self.sequences, vars(self)), memo))


class _ArrayOutput(GenerateOutput, np.ndarray):  # type: ignore[misc]  # each has its own __getitem__
    def __array_finalize__(self, source: Any) -> None:
        vars(self).update(vars(source) if isinstance(source, GenerateOutput) else {})

    def __array_wrap__(
        self, result: Array, context: Any = None, return_scalar: bool = False
    ) -> Any:
        plain = np.asarray(result)
        return plain[()] if return_scalar else plain


@functools.cache
def _tensor_output(torch: Any) -> Any:
    # As with a Parameter, the results of torch's functions are plain tensors.
    plain = {"__torch_function__": torch.nn.Parameter.__torch_function__, "__module__": __name__}
    return type("_TensorOutput", (GenerateOutput, torch.Tensor), plain)


def _output(sequences: Any, attributes: Mapping[str, Any]) -> GenerateOutput:
    """sequences: an array or a tensor."""
    if isinstance(sequences, np.ndarray):
        output: GenerateOutput = sequences.view(_ArrayOutput)
    else:
        output = sequences.as_subclass(_tensor_output(sys.modules["torch"]))
    vars(output).update(attributes, sequences=sequences)
    return output


def make_output(
    interface: Interface, sequences: list[Sequence], pad: int, timing: Timing, prompts: Any = None
) -> GenerateOutput:
    """The output of sequences that have ended, of the kind that `_like` chooses. pad: follows the shorter rows."""
    texts = []
    for sequence in sequences:
        text = sequence.delivery.text
        if text is not None:
            text.end()
            texts.append(text.whole)
    attributes = {
        "token_ids": [sequence.token_ids for sequence in sequences],
        "texts": texts if len(texts) == len(sequences) else None,
        "finish_reasons": [sequence.finish_reason for sequence in sequences],
        "seeds": [sequence.request.seed for sequence in sequences],
        "prompt_lengths": [len(sequence.request.prompt) for sequence in sequences],
        "timing": timing,
        **_optional_outputs(interface, sequences),
    }
    return _output(_like(prompts, sequences_array(sequences, pad)), attributes)


def _like(prompts: Any, array: Array) -> Any:
    """`array` as a tensor on the device of `prompts`, if these are a tensor, or None in a process that uses torch."""
    torch: Any = sys.modules.get("torch")  # which a tensor has loaded
    if isinstance(prompts, Mapping):
        prompts = prompts.get("input_ids")
    if torch is None or not (prompts is None or isinstance(prompts, torch.Tensor)):
        return array
    tensor = torch.from_numpy(array)
    return tensor if prompts is None else tensor.to(prompts.device)


def _optional_outputs(interface: Interface, sequences: list[Sequence]) -> dict[str, Array]:
    """The optional outputs by name, [B, N, ...]."""
    longest = max(len(sequence.token_ids) for sequence in sequences)
    gathered = {}
    for spec in interface.token_outputs:
        if spec.name not in sequences[0].request.output_names:  # a call wants the same of all
            continue
        shape = spec.shape({**interface.sizes, BATCH: longest})
        values = np.full((len(sequences), *shape), _FILL[spec.name], dtype=spec.dtype)
        for row, sequence in enumerate(sequences):
            for index, outputs in enumerate(sequence.progress.outputs[: len(sequence.token_ids)]):
                values[row, index] = outputs[spec.name]
        # `logprobs` has a single column, of the sampled token; the rest have a column for each token.
        gathered[spec.name] = values[:, :, 0] if spec is LOGPROBS else values
    return gathered


def run(
    loop: DecodeLoop,
    sequences: list[Sequence],
    streamer: Streamer | None,
    guide: Guide | None,
    end: BatchEnd | None,
) -> Timing:
    """Run every sequence to its end. The streamer follows the only sequence, the guide writes masks between steps, and
    `end` ends sequences before the graph does."""
    if streamer is not None:
        streamer.put(sequences[0].request.given_prompt[None])
    started, prefilled = time.perf_counter(), None
    with loop:
        for sequence in sequences:
            loop.add(sequence)
        while loop.busy:
            loop.step()
            if prefilled is None and all(sequence.started for sequence in sequences):
                prefilled = time.perf_counter()
            if guide is not None and loop.busy and not loop.prefilling:
                guide.update(loop.set_parameter, loop.read_outputs)
            if end is not None:
                end.update(loop.leave, partial(hand_on, streamer, 1))
    ended = time.perf_counter()
    if streamer is not None:
        streamer.end()
    prefilled = prefilled or ended
    drafts = sum((sequence.progress.drafts for sequence in sequences), NO_DRAFTS)
    return Timing(prefilled - started, ended - prefilled, loop.steps, drafts)


def hand_on(streamer: Streamer | None, most: int | None, sequence: Sequence) -> None:
    """Take the tokens of a sequence that were read, at most `most`, and give them to the streamer."""
    for token in sequence.take(most)[0]:
        if streamer is not None:
            streamer.put(np.array([token], dtype=np.int64))
