"""JSON that follows a schema by masks of the host: a library writes the allowed tokens before each token.

    pip install -e '.[cpu,export,guided]'
    python examples/guided_json.py [PACKAGE [PROMPT ...]]   the bundled model, or a package with --allowed-tokens

Most schemas need no masks: the graph follows the tables of `qsample grammar` itself, see docs/hosts.md. Masks are for
the others, such as recursive schemas, and for grammar libraries of your own.
"""

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
CHAPTER = {"type": "integer", "minimum": 1, "maximum": 150}
TEXT = {"type": "string", "maxLength": 60, "pattern": "^[A-Za-z ,;]*$"}
SCHEMA = {"type": "object", "properties": {"chapter": CHAPTER, "text": TEXT}}
SCHEMA |= {"required": ["chapter", "text"], "additionalProperties": False}


def generate_json(model: CausalLM, prompts: list[str], schema: object, seed: int) -> list[str]:
    """A JSON value for each prompt."""
    tokenizer_json = model.package.file("tokenizer.json").read_text(encoding="utf-8")
    eos = model.package.manifest.token_ids.eos[0]
    tokenizer = llguidance.LLTokenizer(tokenizer_json, model.interface.vocab_size, eos)
    form = {"whitespace_flexible": False}
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=form)
    matchers = [llguidance.LLMatcher(tokenizer, grammar) for _ in prompts]

    def write_masks(step: Step | None, mask: np.ndarray) -> None:
        for row, matcher in enumerate(matchers):
            if step is not None and step.emitted[row]:
                matcher.consume_token(int(step.tokens[row]))
            # After the value is complete, only the end-of-sequence token is allowed.
            llguidance.numpy.fill_next_token_bitmask(matcher, mask, row)

    params = qsample.SamplingParams(temperature=0.8, top_p=0.9, max_new_tokens=200)
    output = model.generate(prompts, params, allowed_tokens=write_masks, seed=seed)
    assert output.texts is not None
    return output.texts


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        package = sys.argv[1] if len(sys.argv) > 1 else str(Path(scratch) / "tiny")
        if len(sys.argv) == 1:
            qsample.AutoModelForCausalLM.from_pretrained(TINY_LM, allowed_tokens=True).export(
                package
            )
        for text in generate_json(load(package), sys.argv[2:] or PROMPTS, SCHEMA, seed=1):
            print(json.dumps(json.loads(text), indent=2))
