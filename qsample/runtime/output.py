"""The result of `generate`.

transformers' tokenizers and torch's functions only take instances of certain classes:
`tokenizer.batch_decode` asks isinstance(output, numpy.ndarray | torch.Tensor), `torch.cat` wants
tensors. So the result is a `GenerateOutput` that is an array or a tensor as well: `_ArrayOutput`,
or `_TensorOutput` in a process that uses torch.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from qsample.contract.arrays import Array
from qsample.contract.interface import Interface
from qsample.contract.tensors import BATCH, LOGPROBS
from qsample.request.refusals import GENERATE
from qsample.runtime.sequence import NO_DRAFTS, DraftStats, Sequence, sequences_array

# Optional output → its value after the end of a row.
_FILL_VALUES: Final = {
    "logprobs": np.nan,
    "top_logprobs": np.nan,
    "top_logprob_ids": -1,
    "probs": 0,
}


@dataclass(frozen=True, slots=True)
class Timing:
    """The time of a batch.

    Args:
        prefill_seconds: the seconds until every row has its first token.
        decode_seconds: the seconds from there to the end.
        steps: the number of decode steps of the whole batch; double buffering may run a window more
            than the rows needed.
        drafts: how the guessed tokens of all rows fared; zeros if the package makes no guesses.
    """

    prefill_seconds: float
    decode_seconds: float
    steps: int
    drafts: DraftStats = NO_DRAFTS


@dataclass(eq=False, repr=False)
class GenerateOutput:
    """The result of `generate`. Row i belongs to prompt i or, with num_return_sequences n, to
    prompt i // n.

    The result is its `sequences`, with further attributes: a tensor of torch on the device of the
    prompts if these were given as a tensor, and a NumPy array otherwise. So it can be used like the
    result of transformers: `tokenizer.batch_decode(output)`, `output[:, length:]`,
    `torch.cat([output, more], dim=1)`. Rows, slices and results of computations are plain tensors
    or arrays.

    Attributes:
        sequences: a plain tensor or array, [B, P + N] int64, in transformers' layout: the prompts
            in P columns, padding included, and from column P on the new tokens, then the pad id. N
            is the most new tokens of a row. The padding of a prompt stays on its side; prompts of
            different lengths get the pad id on their left.
        token_ids: the sampled tokens, a stop token included.
        texts: the texts of these tokens without a stop token, which continue the prompts; None if
            the package has no tokenizer.
        finish_reasons: "stop" (a stop token, a stop string or a stopping criterion), "length",
            "repetition" (repetition_detection), "time" (max_time), or "invalid" (the model gave NaN
            or infinite logits, or no token was allowed).
        seeds: the seeds, each of which reproduces its row.
        prompt_lengths: the numbers of prompt tokens, without padding.
        timing: the time of the whole batch.
        logprobs: the log-probabilities of the sampled tokens, [B, N] float32; NaN after a row's
            end. This and the following are None for packages without the feature, and if `outputs`
            leaves them out.
        top_logprob_ids, top_logprobs: the likeliest tokens and their log-probabilities, [B, N, M]
            int32 and float32; -1 and NaN after a row's end.
        probs: the probabilities of all tokens, [B, N, V] float32; 0 after a row's end.
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

    if TYPE_CHECKING:  # the subclasses have these

        @property
        def shape(self) -> Any: ...
        def __len__(self) -> int: ...
        def tolist(self) -> list[list[int]]: ...

    def __iter__(self) -> Iterator[Any]:
        return iter(self.sequences)

    def __getitem__(self, index: Any) -> Any:
        """An item of the sequences; a field, if `index` is its name, as in transformers'
        ModelOutput."""
        if not isinstance(index, str):
            return self.sequences[index]
        if index not in _FIELD_NAMES:
            raise KeyError(f"{index!r}; the fields are {', '.join(_FIELD_NAMES)}")
        return getattr(self, index)

    def __getattr__(self, name: str) -> Any:
        # Python calls this for names that do not exist. For a field of transformers' outputs, the
        # message names the alternative.
        refusal = GENERATE.get(f"output_{name}", GENERATE.get(name))
        reason = ""
        if refusal is not None:
            reason = f": {refusal.instead}"
        elif isinstance(self, np.ndarray):
            reason = ", a NumPy array here; give the prompts as a tensor, and it is a tensor"
        raise AttributeError(f"generate returns no {name}{reason}")

    def __repr__(self) -> str:
        return f"GenerateOutput({self.sequences!r}, texts={self.texts!r}, finish_reasons={self.finish_reasons!r})"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _from_values, (self._values,)

    def __deepcopy__(self, memo: dict[int, Any]) -> GenerateOutput:
        return _from_values(copy.deepcopy(self._values, memo))

    @property
    def _values(self) -> dict[str, Any]:
        """The value of each field."""
        return {name: getattr(self, name) for name in _FIELD_NAMES}


_FIELD_NAMES: Final = tuple(entry.name for entry in fields(GenerateOutput))


class _ArrayOutput(GenerateOutput, np.ndarray):  # type: ignore[misc, override]
    """A result that is a NumPy array. Slices and results of computations are plain arrays."""

    def __array_finalize__(self, source: Any) -> None:
        # A view of a result, such as copy.copy makes, has its fields.
        if isinstance(source, GenerateOutput):
            vars(self).update(vars(source))

    def __array_wrap__(
        self, result: Array, context: Any = None, return_scalar: bool = False
    ) -> Any:
        plain = np.asarray(result)
        return plain[()] if return_scalar else plain


@functools.cache
def _tensor_output_class() -> Any:
    """The class of a result that is a tensor of torch. It is made when it is first needed, because
    qsample does not import torch: here, the caller has."""
    torch: Any = sys.modules["torch"]

    class _TensorOutput(GenerateOutput, torch.Tensor):  # type: ignore[misc]
        # As with a Parameter, the results of torch's functions are plain tensors.
        __torch_function__ = torch.nn.Parameter.__torch_function__

    return _TensorOutput


def _from_values(values: Mapping[str, Any]) -> GenerateOutput:
    """The result with these fields. Its kind is that of `sequences`, an array or a tensor."""
    sequences = values["sequences"]
    if isinstance(sequences, np.ndarray):
        output: GenerateOutput = sequences.view(_ArrayOutput)
    else:
        output = sequences.as_subclass(_tensor_output_class())
    GenerateOutput.__init__(output, **values)
    return output


def make_output(
    interface: Interface, sequences: list[Sequence], pad: int, timing: Timing, prompts: Any = None
) -> GenerateOutput:
    """The result of a batch.

    Args:
        interface: the interface of the package.
        sequences: the rows, which have ended.
        pad: the token id that follows the shorter rows.
        timing: the time of the batch.
        prompts: the prompts as the caller gave them. They decide whether the result is an array or
            a tensor.
    """
    texts = []
    for sequence in sequences:
        text = sequence.delivery.text
        if text is not None:
            text.end()
            texts.append(text.whole)
    return _from_values(
        {
            "sequences": _like_prompts(prompts, sequences_array(sequences, pad)),
            "token_ids": [sequence.token_ids for sequence in sequences],
            "texts": texts if len(texts) == len(sequences) else None,
            "finish_reasons": [sequence.finish_reason for sequence in sequences],
            "seeds": [sequence.request.seed for sequence in sequences],
            "prompt_lengths": [len(sequence.request.prompt) for sequence in sequences],
            "timing": timing,
            **_optional_outputs(interface, sequences),
        }
    )


def _like_prompts(prompts: Any, array: Array) -> Any:
    """`array`; as a tensor on the device of `prompts` if these are a tensor, and as a tensor on the
    CPU if there are none and the process uses torch."""
    torch: Any = sys.modules.get("torch")
    if isinstance(prompts, Mapping):
        prompts = prompts.get("input_ids")
    if torch is None:
        return array
    if prompts is None:
        return torch.from_numpy(array)
    if isinstance(prompts, torch.Tensor):
        return torch.from_numpy(array).to(prompts.device)
    return array


def _optional_outputs(interface: Interface, sequences: list[Sequence]) -> dict[str, Array]:
    """The optional outputs by name, [B, N, ...]."""
    wanted = sequences[0].request.output_names  # All rows of a call want the same outputs.
    longest = max(len(sequence.token_ids) for sequence in sequences)
    gathered = {}
    for spec in interface.token_outputs:
        if spec.name not in wanted:
            continue
        shape = spec.shape({**interface.sizes, BATCH: longest})
        values = np.full((len(sequences), *shape), _FILL_VALUES[spec.name], dtype=spec.dtype)
        for row, sequence in enumerate(sequences):
            for index, outputs in enumerate(sequence.progress.outputs[: len(sequence.token_ids)]):
                values[row, index] = outputs[spec.name]
        # `logprobs` has a single column, for the sampled token. The other outputs have a column
        # for each token.
        gathered[spec.name] = values[:, :, 0] if spec is LOGPROBS else values
    return gathered
