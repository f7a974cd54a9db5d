"""Guided decoding: JSON that follows a schema, whatever the model prefers.

    pip install -e '.[cpu,export,guided]'
    python examples/guided_json.py                    the bundled model, which was not trained on JSON
    python examples/guided_json.py PACKAGE [PROMPT]   a package that was exported with --allowed-tokens

Before every token, the grammar library (llguidance) writes a bitmask of the allowed tokens; the graph applies it to the
logits. The rest of the sampler stays in the graph.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import llguidance
import llguidance.numpy
import numpy as np

import qsample
from qsample.models.bundled import TINY_LM
from qsample.runtime import CausalLM, Step, load

PROMPTS = ["And the LORD said", "Blessed are the"]
SCHEMA = {
    "type": "object",
    "properties": {
        "speaker": {"type": "string", "pattern": "^[A-Z][a-z]{1,11}$"},
        "chapter": {"type": "integer", "minimum": 1, "maximum": 150},
        "text": {"type": "string", "maxLength": 60, "pattern": "^[A-Za-z ,;]*$"},
    },
    "required": ["speaker", "chapter", "text"],
    "additionalProperties": False,
}


class JsonGuide:
    """Keeps a grammar state for every row and writes its mask; passed as `allowed_tokens` to `generate`.

    Args:
        tokenizer_json: The text of the package's tokenizer.json.
        vocab_size: The size of the vocabulary.
        eos_token_id: The token that ends a row after its value is complete.
        schema: The JSON schema.
        rows: The number of rows.
    """

    def __init__(
        self, tokenizer_json: str, vocab_size: int, eos_token_id: int, schema: object, rows: int
    ) -> None:
        tokenizer = llguidance.LLTokenizer(
            tokenizer_json, n_vocab=vocab_size, eos_token=eos_token_id
        )
        options = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
        grammar = llguidance.LLMatcher.grammar_from_json_schema(
            json.dumps(schema), defaults=options
        )
        self._rows = [llguidance.LLMatcher(tokenizer, grammar) for _ in range(rows)]

    def __call__(self, step: Step | None, mask: np.ndarray) -> None:
        for row, matcher in enumerate(self._rows):
            if step is not None and step.emitted[row]:
                matcher.consume_token(int(step.tokens[row]))
            if matcher.is_error():
                raise RuntimeError(f"row {row}: {matcher.get_error()}")
            # After the value is complete, only the end-of-sequence token is allowed.
            llguidance.numpy.fill_next_token_bitmask(matcher, mask, row)


def generate_json(model: CausalLM, prompts: list[str], schema: object, seed: int) -> list[str]:
    """A JSON value for each prompt."""
    eos = model.package.manifest.token_ids.eos[0]
    tokenizer_json = model.package.file("tokenizer.json").read_text(encoding="utf-8")
    guide = JsonGuide(tokenizer_json, model.interface.vocab_size, eos, schema, len(prompts))
    params = qsample.SamplingParams(temperature=0.8, top_p=0.9, max_new_tokens=200)
    output = model.generate(prompts, params, allowed_tokens=guide, seed=seed)
    assert output.texts is not None
    return output.texts


def main(package: Path, prompts: list[str]) -> None:
    for text in generate_json(load(package), prompts, SCHEMA, seed=1):
        value = json.loads(text)
        print(json.dumps(value, indent=2))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]), sys.argv[2:] or PROMPTS)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            exported = Path(scratch) / "tiny"
            qsample.AutoModelForCausalLM.from_pretrained(TINY_LM, allowed_tokens=True).export(
                exported
            )
            main(exported, PROMPTS)
