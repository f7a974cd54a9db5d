"""Writes docs/architectures.md from the rows of all model types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.architectures.images import IMAGE, image_names, other_types
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
model that reads images or audio, too, this table has the language model; [a second](#types-that-read-images) has
models with their images.

An export of a type that does not pass fails with the reason, and publishes nothing. These checks use a single small
configuration per type; every export runs the same parity gate on the real model.

| model type | result | largest error | tokens compared | layers | int4 | reason |
| --- | --- | --- | --- | --- | --- | --- |
"""


_IMAGES = """\

## Types that read images

The result of exporting a small random model of each type with its tokenizer and processor, as
[`AutoModelForImageTextToText`](images.md) opens it: **{passed} of {total} pass**. A type passes under these
conditions, for prompts without an image, with one, and with two of different sizes:

- The probabilities of its tokens equal those of transformers' model with `pixel_values`, to {max_error:g} of a logit.
- The greedy tokens are those of transformers' `generate`, for each prompt alone, in a batch with and without images,
  and in another order in pieces; those of the portable package and of the package compiled for the CPU.
- Every token sampled with fixed seeds equals the float64 reference's draw from transformers' logits.

Every export compares pixels, placeholders, features and logits with transformers in the same way. So other types pass
if they consist of the same parts, and a type that does not is refused with the reason.

| model type | result | largest error | tokens compared | images | reason |
| --- | --- | --- | --- | --- | --- |
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
    text += (
        "\nIn all: "
        + ", ".join(f"{count} {result}" for result, count in counts.most_common())
        + ".\n"
    )
    found = [rows.get(name, Row(name, "not run")) for name in image_names()]
    text += _IMAGES.format(
        passed=sum(row.passed for row in found), total=len(found), max_error=MAX_ERROR
    )
    text += "".join(f"{_image_line(row)}\n" for row in found)
    text += "\nTransformers' further types of texts and images:\n\n"
    for group, names in other_types().items():
        text += f"- {group}: {', '.join(f'`{name}`' for name in names)}\n"
    path.write_text(text, encoding="utf-8")


def _line(row: Row) -> str:
    attention = ", ".join(f"{count} {name}" for name, count in row.operators.items())
    cells = [f"`{row.model_type}`", *_figures(row), attention, row.int4, _reason(row)]
    return "| " + " | ".join(cells) + " |"


def _image_line(row: Row) -> str:
    cells = [f"`{row.model_type.removeprefix(IMAGE)}`", *_figures(row), row.images, _reason(row)]
    return "| " + " | ".join(cells) + " |"


def _figures(row: Row) -> tuple[str, str, str]:
    return row.result, "" if row.error is None else f"{row.error:.1e}", str(row.tokens or "")


def _reason(row: Row) -> str:
    # After its message, torch appends locations in files of this machine and values of the traced graph.
    message = row.reason.split(" (Refer to")[0].split(" While executing")[0].split("\x1b")[0]
    return message.replace("|", "\\|")[:300]
