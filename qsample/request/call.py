"""`Call`: the arguments of a call of `generate` or of a request to an engine, with their types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qsample.request.sampling_params import SamplingParams
from qsample.text.chat import ChatOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Prompts, and how to continue them. `read_call` makes a Call of keywords.

    Args:
        inputs: the prompts, see `parse_prompts`.
        params: for all prompts, or a list with the parameters of each prompt.
        attention_mask: 0 for each token of `inputs` that is padding, with their shape; None = see `pad`.
        pad: the token id that is padding if no mask is given; None = every token is read.
        fill: the token id after a row that has ended, and before a prompt that is shorter than others; None = the pad
            token of the package.
        bos: the token id that an empty prompt becomes; None = that of the package.
        chat: options of chat messages.
        tokenizer: of the caller, for a package that has no tokenizer.
        seed: of the first row, the next rows taking the numbers after it; a list with the seed of each row; None =
            those of `params`, or fresh seeds.
        stop_strings: texts that end a row, or a single text.
        allowed_tokens: int32 bitmask [W] or [B, W] of the tokens that may be sampled; or a function, see
            `AllowedTokensFn`.
        prediction: the text or the token ids that the continuation of a single prompt is expected to have: they are
            guessed, in packages that were compiled with num_speculative_tokens. Changes the speed alone.
        stopping_criteria: see `BatchEnd`.
        logits_processor: see `LogitsProcessors`.
        max_time: seconds until the rows end; None = any.
        num_return_sequences: adjacent rows of each prompt.
        return_dict: False = `generate` returns an array of the sequences alone.
    """

    inputs: Any
    params: SamplingParams | Sequence[SamplingParams]
    attention_mask: Any = None
    pad: int | None = None
    fill: int | None = None
    bos: int | None = None
    chat: ChatOptions | None = None
    tokenizer: Any = None
    seed: Any = None
    stop_strings: str | Sequence[str] | None = None
    allowed_tokens: Any = None
    prediction: Any = None
    stopping_criteria: Any = None
    logits_processor: Any = None
    max_time: float | None = None
    num_return_sequences: int = 1
    return_dict: bool | None = None
