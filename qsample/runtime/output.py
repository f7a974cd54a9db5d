"""The result of `generate`."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from qsample.contract import BATCH, LOGPROBS, NEXT_IDS
from qsample.huggingface.keywords import GENERATE
from qsample.interface import Interface
from qsample.runtime.sequence import Sequence
from qsample.tensors import Array

_FILL = {"logprobs": np.nan, "top_logprobs": np.nan, "top_logprob_ids": -1, "probs": 0}


@dataclass(frozen=True, slots=True)
class Timing:
    """The time of a batch.

    Args:
        prefill_seconds: until the first token of every row.
        decode_seconds: from there to the end.
        steps: decode steps of the whole batch, a run of the graph each; double buffering may run a window more than the
            rows needed.
    """

    prefill_seconds: float
    decode_seconds: float
    steps: int


@dataclass(frozen=True, slots=True)
class GenerateOutput:
    """The result of `generate`; row i belongs to prompt i, or, with num_return_sequences n, to prompt i // n.

    Indexed, measured or iterated over, it is its `sequences`, as transformers returns no more unless a caller asks for
    more: `tokenizer.decode(output[0])`, `output[:, input_ids.shape[1] :]`.

    Args:
        sequences: [B, P + N] int64 in transformers' layout: the prompts in P columns, padding included, and from column
            P on the new tokens, then the pad id. The padding of a prompt stays on its side; prompts of different
            lengths get the pad id on their left.
        token_ids: the sampled tokens, a stop token included.
        texts: their text, a continuation of the prompt; None if the package has no tokenizer.
        finish_reasons: "stop" (a stop token, a stop string or a stopping criterion), "length", "time" (max_time), or
            "invalid" (the model gave NaN or infinite logits).
        seeds: each reproduces its row.
        prompt_lengths: in tokens, without padding.
        timing: of the whole batch.
        logprobs: [B, N] float32, for packages with the feature, like those below; N = most new tokens of a row; NaN
            after a row's end.
        top_logprob_ids: [B, N, M] int32; -1 after a row's end.
        top_logprobs: [B, N, M] float32; NaN after a row's end.
        probs: [B, N, V] float32; 0 after a row's end.
    """

    sequences: Array
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

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sequences.shape

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[Array]:
        return iter(self.sequences)

    def __getitem__(self, index: Any) -> Any:
        """An item of the sequences; a field, if `index` is its name, as in transformers' ModelOutput."""
        if isinstance(index, str):
            if index not in self.__slots__:
                raise KeyError(f"{index!r}; the fields are {', '.join(self.__slots__)}")
            return getattr(self, index)
        return self.sequences[index]

    def __getattr__(self, name: str) -> Any:
        # Only called for a name without a field: for those of transformers' outputs, it says what to do instead.
        refusal = GENERATE.get(f"output_{name}", GENERATE.get(name))
        raise AttributeError(f"generate returns no {name}" + (f": {refusal.instead}" if refusal else ""))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.sequences, dtype=dtype, copy=copy)


def make_output(interface: Interface, sequences: list[Sequence], pad: int, timing: Timing) -> GenerateOutput:
    """The output of sequences that have ended. pad: token id after the shorter rows."""
    texts = []
    for sequence in sequences:
        if sequence.text is not None:
            sequence.text.end()
            texts.append(sequence.text.whole)
    return GenerateOutput(
        sequences=sequences_array(sequences, pad),
        token_ids=[sequence.token_ids for sequence in sequences],
        texts=texts if len(texts) == len(sequences) else None,
        finish_reasons=[sequence.finish_reason for sequence in sequences],
        seeds=[sequence.seed for sequence in sequences],
        prompt_lengths=[len(sequence.prompt) for sequence in sequences],
        timing=timing,
        **_optional_outputs(interface, sequences),
    )


def _optional_outputs(interface: Interface, sequences: list[Sequence]) -> dict[str, Array]:
    """The optional outputs by name, [B, N, ...]."""
    longest = max(len(sequence.token_ids) for sequence in sequences)
    gathered = {}
    for spec in interface.sampler_outputs:
        if spec is NEXT_IDS:
            continue
        shape = spec.shape({**interface.sizes, BATCH: longest})
        values = np.full((len(sequences), *shape), _FILL[spec.name], dtype=spec.dtype)
        for row, sequence in enumerate(sequences):
            for index, outputs in enumerate(sequence.outputs[: len(sequence.token_ids)]):
                values[row, index] = outputs[spec.name]
        # `logprobs` has a single column, of the sampled token; the others have a column for each token.
        gathered[spec.name] = values[:, :, 0] if spec is LOGPROBS else values
    return gathered


def sequences_array(sequences: abc.Sequence[Sequence], pad: int) -> Array:
    """[B, P + N] int64: the prompts against column P from the left, the new tokens from the right."""
    prompts = [sequence.given for sequence in sequences]
    width = max(map(len, prompts))
    longest = max(len(sequence.token_ids) for sequence in sequences)
    block = np.full((len(sequences), width + longest), pad, dtype=np.int64)
    for row, (prompt, sequence) in enumerate(zip(prompts, sequences, strict=True)):
        block[row, width - len(prompt) : width] = prompt
        block[row, width : width + len(sequence.token_ids)] = sequence.token_ids
    return block
