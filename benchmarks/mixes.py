"""The sampling parameters that the benchmarks have in common, by Hugging Face's names; what is absent is off."""

from __future__ import annotations

EVERYTHING = {
    "temperature": 0.8,
    "top_k": 50,
    "top_p": 0.95,
    "min_p": 0.02,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.1,
}
MIXES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "top-k 50, top-p 0.95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
}
# At this temperature no distribution has a peak: the nucleus is most of the vocabulary, the worst case where the
# probabilities are sorted.
FLAT: dict[str, dict[str, float]] = {"top-p 0.95, flat": {"temperature": 100.0, "top_p": 0.95}}
# What the benchmarks of whole decoders can be asked for.
ALL: dict[str, dict[str, float]] = MIXES | FLAT | {"everything": EVERYTHING}
