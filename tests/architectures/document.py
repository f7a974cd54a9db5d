"""Writes docs/architectures.md from the rows of all model types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.architectures.run import MAX_ERROR, Row

_INTRODUCTION = """\
# Architectures

The result of exporting a small random model of every model type for which transformers {transformers} has a causal
language model: **{passed} of {total} pass**. `python scripts/architectures.py` generates this page. No list in the
code names the supported types. A type passes under three conditions:

- The exported graph's logits equal those of the eager Hugging Face model to {max_error:g}, with a largest logit of
  about 10 (float32): after a ragged batch of prompts, after each of eight decode steps over retained state, and
  after a prompt fed in chunks.
- Every token that the runtime samples from the package with fixed seeds equals the token that the float64 reference
  draws from the eager model's logits with the same noise.
- Compiled for the CPU in four bits, every matrix and every expert whose inputs are a multiple of 16 is quantized,
  except the experts' scores, and each row of a ragged batch returns the same tokens as alone.

*int4* counts the quantized matrices and experts, and compares the bytes that remain float with all bytes: in models
this small, the former are mostly tables of angles and norms.

*layers* counts the layers with a state by the way in which they run:

- **GroupQueryAttention**: ONNX Runtime's fused operator, in place over the cache.
- **masked**: plain operators over the whole buffer of the retained cache, at every step. This is exact, but slower
  for long contexts. It serves attention that the operator cannot express: ALiBi and other position biases, chunked
  windows, and code that computes its own attention. Layers that share another layer's cache also run in this way,
  but are not counted.
- **LinearAttention**, **CausalConvWithState**: ONNX Runtime's operators for recurrences and short convolutions,
  over all tokens of a call at once. **Scan**: a layer that runs token by token.

Types such as `bert` pass as decoders (`is_decoder`); checkpoints of encoders and of encoder-decoders are refused. Of a
model that reads images or audio, too, the language model alone is exported, and a warning says so.

An export of a type that does not pass fails with the reason, and publishes nothing. These checks use a single small
configuration per type; every export runs the same parity gate on the real model.

| model type | result | largest error | tokens compared | layers | int4 | reason |
| --- | --- | --- | --- | --- | --- | --- |
"""


def all_types() -> list[str]:
    """Every model type of transformers' auto mapping for causal language models."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def write_document(rows: Mapping[str, Row], path: Path) -> None:
    """Write the page; a type without a row is shown as not run."""
    names = all_types()
    found = [rows.get(name, Row(name, "not run")) for name in names]
    text = _INTRODUCTION.format(
        transformers=version("transformers"),
        passed=sum(row.passed for row in found),
        total=len(names),
        max_error=MAX_ERROR,
    )
    text += "".join(f"{_line(row)}\n" for row in found)
    counts = Counter(row.result for row in found)
    text += "\nIn all: " + ", ".join(f"{count} {result}" for result, count in counts.most_common()) + ".\n"
    path.write_text(text, encoding="utf-8")


def _line(row: Row) -> str:
    error = "" if row.error is None else f"{row.error:.1e}"
    attention = ", ".join(f"{count} {name}" for name, count in row.operators.items())
    # After its message, torch appends locations in files of this machine and values of the traced graph.
    message = row.reason.split(" (Refer to")[0].split(" While executing")[0].split("\x1b")[0]
    reason = message.replace("|", "\\|")[:300]
    cells = [f"`{row.model_type}`", row.result, error, str(row.tokens or ""), attention, row.int4, reason]
    return "| " + " | ".join(cells) + " |"
