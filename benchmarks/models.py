"""Hybrids and mixtures of experts on the CPU, measured as `decode.py` measures: first token, step and memory.

    python -m venv peers && peers/bin/pip install onnxruntime-genai torch transformers
    python benchmarks/models.py --peers-python peers/bin/python

Random weights in the shapes of today's models: Qwen3.5-0.8B whole, and slices of Qwen3-Next-80B-A3B, Qwen3-30B-A3B and
gpt-oss-20b, which have two or four of their layers in full size and the whole vocabulary. The head is a larger share of
a slice's step than of the model's. A peer whose builder does not know an architecture is left out, and named.
"""

from __future__ import annotations

from pathlib import Path

from decode import make_parser, run

MODELS = ["qwen3.5-0.8b", "qwen3-next-slice", "qwen3-30b-a3b-slice", "gpt-oss-20b-slice"]


def main() -> None:
    output = Path("docs/benchmarks/models")
    run(make_parser(__doc__, MODELS, ["greedy", "top-p 0.95"], [1, 4], output), "Hybrids and mixtures of experts")


if __name__ == "__main__":
    main()
