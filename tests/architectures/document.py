"""The rows of all model types enter; docs/architectures.md leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.architectures.run import MAX_ERROR, Row

_INTRODUCTION = """\
# Architectures

Every model type that transformers {transformers} has a causal language model for, and what came of exporting a small
random model of it: **{passed} of {total} pass**. `python scripts/architectures.py` makes this page; nothing in it is
kept by hand, and no list in the code says what is supported. A type passes when

- the exported graph's logits are those of the eager Hugging Face model to {max_error:g}, where the largest logit is
  about 10 (float32): after a ragged batch of prompts, after each of eight decode steps over retained state, and after a
  prompt fed in chunks;
- every token that the runtime samples from the package with fixed seeds is the one that the float64 reference draws
  from the eager model's logits with the same noise;
- compiled for the CPU in four bits, every matrix and every expert whose inputs blocks of 16 divide is packed, but for
  what scores experts, and each row of a ragged batch gets the tokens that it gets alone.

*int4* counts them, and the bytes that stay float beside all bytes: in models this small, mostly tables of angles and
norms.

*layers* says how many of a model's layers that keep a state run in which way:

- **GroupQueryAttention**: ONNX Runtime's fused operator, in place over the cache.
- **masked**: plain operators over the whole buffer of the retained cache, at every step. Exact, and slower for long
  contexts. For attention that the operator cannot express: ALiBi and other position biases, chunked windows, code that
  computes its attention itself. Layers that share another's cache attend so, too, and are not counted.
- **LinearAttention**, **CausalConvWithState**: ONNX Runtime's operators for recurrences and short convolutions, over
  all tokens of a call at once. **Scan**: a layer run token by token.

A model of a type that does not pass is refused before anything is published, with the reason. The checks here use one
small configuration a type; the same parity gate runs on the very model at every export.

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
    path.write_text(text)


def _line(row: Row) -> str:
    error = "" if row.error is None else f"{row.error:.1e}"
    attention = ", ".join(f"{count} {name}" for name, count in row.operators.items())
    # What torch adds after its message are places in files of this machine and values of the traced graph.
    message = row.reason.split(" (Refer to")[0].split(" While executing")[0].split("\x1b")[0]
    reason = message.replace("|", "\\|")[:300]
    cells = [f"`{row.model_type}`", row.result, error, str(row.tokens or ""), attention, row.int4, reason]
    return "| " + " | ".join(cells) + " |"
