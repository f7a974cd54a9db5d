"""Log-probabilities of tokens in the two forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qsample.contract import LOGPROBS, TOP_LOGPROB_OUTPUTS
from qsample.serve.token_texts import TokenTexts
from qsample.tensors import Array

_LEAST = -9999.0  # OpenAI's number for a token that could not come; JSON has no infinity
_TOP_IDS, _TOP_VALUES = (spec.name for spec in TOP_LOGPROB_OUTPUTS)


def chat_logprobs(
    texts: TokenTexts, tokens: Sequence[int], outputs: Mapping[str, Array], top: int
) -> list[dict[str, Any]]:
    """One entry a token, as chat completions have them. top: alternatives of each."""

    def entry(token: int, value: float) -> dict[str, Any]:
        text, data = texts.of(int(token))
        return {"token": text, "logprob": _finite(value), "bytes": list(data)}

    entries = []
    for index, token in enumerate(tokens):
        others = (
            [
                entry(*pair)
                for pair in zip(outputs[_TOP_IDS][index, :top], outputs[_TOP_VALUES][index, :top], strict=True)
            ]
            if top
            else []
        )
        entries.append(entry(token, outputs[LOGPROBS.name][index, 0]) | {"top_logprobs": others})
    return entries


def completion_logprobs(
    texts: TokenTexts, tokens: Sequence[int], outputs: Mapping[str, Array], top: int, offset: int
) -> dict[str, Any]:
    """All tokens in one object, as completions have them. top: alternatives of each; the sampled token stands among
    them, one more where it is none of the likeliest. offset: of the first token's text in the answer's."""
    strings = [texts.of(int(token))[0] for token in tokens]
    values = [_finite(outputs[LOGPROBS.name][index, 0]) for index in range(len(tokens))]
    offsets = [offset]
    for string in strings:
        offsets.append(offsets[-1] + len(string))
    alternatives: list[dict[str, float]] | None = None
    if top:
        alternatives = [
            {
                texts.of(int(token))[0]: _finite(value)
                for token, value in zip(outputs[_TOP_IDS][index, :top], outputs[_TOP_VALUES][index, :top], strict=True)
            }
            | {strings[index]: values[index]}
            for index in range(len(tokens))
        ]
    return {
        "tokens": strings,
        "token_logprobs": values,
        "top_logprobs": alternatives,
        "text_offset": offsets[:-1],
    }


def _finite(value: float) -> float:
    return max(float(value), _LEAST)
