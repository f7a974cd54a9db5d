"""Guided decoding: JSON that follows a schema, whatever the model would rather say.

    pip install -e '.[cpu,export,guided]'
    python examples/guided_json.py                    the bundled model, which knows no JSON at all
    python examples/guided_json.py PACKAGE [PROMPT]   a package that was exported with --allowed-tokens

The grammar library (llguidance) says before every token which tokens may come next, as a bitmask; the graph applies it
to the logits. Nothing else of the sampler moves to the host.
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
from qsample.bundled import TINY_LM
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
    """Keeps a grammar state for every row and writes its mask; the `allowed_tokens` of `generate`.

    tokenizer_json: the package's tokenizer.json, as text. eos_token_id: what ends a row once its value is complete.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_id: int, schema: object, rows: int) -> None:
        tokenizer = llguidance.LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos_token_id)
        options = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=options)
        self._rows = [llguidance.LLMatcher(tokenizer, grammar) for _ in range(rows)]

    def __call__(self, step: Step | None, mask: np.ndarray) -> None:
        for row, matcher in enumerate(self._rows):
            if step is not None and step.emitted[row]:
                matcher.consume_token(int(step.tokens[row]))
            if matcher.is_error():
                raise RuntimeError(f"row {row}: {matcher.get_error()}")
            # Once the value is complete, only the end-of-sequence token is left.
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
            qsample.AutoModelForCausalLM.from_pretrained(TINY_LM, allowed_tokens=True).export(exported)
            main(exported, PROMPTS)
