"""Times the tables of forms over a vocabulary of 152,000 tokens: the automaton, and its fold over the trie.

    python benchmarks/grammar_tables.py
    python benchmarks/grammar_tables.py --tokenizer build/smollm2/checkpoint/tokenizer.json --tokens 49152

The vocabulary is a byte-level one, extended by concatenations of two of its tokens. A figure is the median of the
turns.
`rows` and `classes` are the sizes of the table of transitions, and `drafts` the states that draft a token.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from llguidance import LLTokenizer
from report import describe_machine, markdown

from qsample.request.grammar import Form
from qsample.request.structured.automaton import Thoughts, automaton_of, with_thoughts
from qsample.request.structured.expression import expression_of
from qsample.request.structured.tables import token_grammar
from qsample.request.structured.vocabulary import TokenVocabulary

TOKENIZER: Final = Path("qsample/assets/tiny_lm/tokenizer.json")
NUM_TOKENS: Final = 152_000
LONGEST_TOKEN: Final = 24  # bytes
TURNS: Final = 5
THOUGHTS: Final = Thoughts("<think>", "</think>", is_open=True)
TEXT: Final = {"type": "string"}
PERSON: Final = {
    "type": "object",
    "properties": {
        "name": TEXT,
        "age": {"type": "integer"},
        "email": TEXT,
        "tags": {"type": "array", "items": TEXT},
    },
    "required": ["name", "age", "email", "tags"],
}
ENUM: Final = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "London", "Tokyo"]},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
}
ITEM: Final = {
    "type": "object",
    "properties": {"sku": TEXT, "qty": {"type": "integer"}, "price": {"type": "number"}},
    "required": ["sku", "qty", "price"],
}
NESTED: Final = {
    "type": "object",
    "properties": {
        "order": {
            "type": "object",
            "properties": {
                "id": {"type": "string", "maxLength": 20},
                "items": {"type": "array", "items": ITEM},
            },
            "required": ["id", "items"],
        },
        "note": TEXT,
    },
    "required": ["order", "note"],
}
# The three schemas whose total is compared between versions.
SCHEMAS: Final = {"person": PERSON, "enum": ENUM, "nested": NESTED}
OTHER_FORMS: Final = {
    "date": Form("json_schema", {"type": "string", "format": "date"}),
    "email": Form("json_schema", {"type": "string", "format": "email"}),
    "text of 500 characters": Form("json_schema", {"type": "string", "maxLength": 500}),
    "choice of 500 texts": Form("choice", [f"choice {number}" for number in range(500)]),
}


def extended_tokens(path: Path, count: int) -> list[bytes]:
    """The tokens of a tokenizer, and concatenations of two of them."""
    tokenizer = LLTokenizer(path.read_text("utf-8"))
    tokens: list[bytes] = []
    for token in range(min(tokenizer.vocab_size, count)):
        is_special = tokenizer.is_special_token(token)
        tokens.append(b"" if is_special else tokenizer.decode_bytes([token]))
    rng = np.random.default_rng(0)
    seen = set(tokens)
    num_base = len(tokens)
    while len(tokens) < count:
        first, last = rng.integers(0, num_base, 2)
        text = tokens[first] + tokens[last]
        if text not in seen and len(text) <= LONGEST_TOKEN:
            seen.add(text)
            tokens.append(text)
    return tokens


def median_ms(work: Callable[[], Any]) -> tuple[Any, float]:
    """The result of some work, and the median of its times in milliseconds."""
    times = []
    for _ in range(TURNS):
        start = time.perf_counter()
        result = work()
        times.append(1e3 * (time.perf_counter() - start))
    return result, float(np.median(times))


def measure(form: Form, vocabulary: TokenVocabulary) -> tuple[list[str], float]:
    """The cells of a form's line, and the time of its tables in milliseconds."""
    expression, expression_ms = median_ms(lambda: expression_of(form))
    automaton, automaton_ms = median_ms(lambda: automaton_of(expression))
    grammar, fold_ms = median_ms(lambda: token_grammar(automaton, vocabulary))
    thinking = with_thoughts(automaton, THOUGHTS)
    _, thinking_ms = median_ms(lambda: token_grammar(thinking, vocabulary))
    rows, classes = grammar.transitions.shape
    drafts = int((grammar.drafts >= 0).sum())
    kilobytes = len(grammar.to_bytes()) / 1e3
    cells = [
        *(f"{value:.1f}" for value in (expression_ms, automaton_ms, fold_ms, thinking_ms)),
        *(str(value) for value in (rows, classes, drafts, grammar.shortest)),
        f"{kilobytes:.0f}",
    ]
    return cells, expression_ms + automaton_ms + fold_ms


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER)
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS)
    options = parser.parse_args()
    print(describe_machine())
    tokens = extended_tokens(options.tokenizer, options.tokens)
    vocabulary, trie_ms = median_ms(lambda: TokenVocabulary.of_tokens(tokens, {}))
    nodes = sum(len(level.parents) for level in vocabulary.levels)
    print(f"{len(tokens)} tokens; a trie of {nodes} nodes in {trie_ms:.0f} ms\n")

    table = []
    total_ms = 0.0
    for name, schema in SCHEMAS.items():
        cells, form_ms = measure(Form("json_schema", schema), vocabulary)
        total_ms += form_ms
        table.append([name, *cells])
    for name, form in OTHER_FORMS.items():
        cells, _ = measure(form, vocabulary)
        table.append([name, *cells])
    times = ["expression, ms", "automaton, ms", "fold, ms", "fold with thoughts, ms"]
    sizes = ["rows", "classes", "drafts", "shortest", "file, kB"]
    print("\n".join(markdown(["form", *times, *sizes], table)))
    print(f"\n{' + '.join(SCHEMAS)}: {total_ms:.0f} ms")


if __name__ == "__main__":
    main()
